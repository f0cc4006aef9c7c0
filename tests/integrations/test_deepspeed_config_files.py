"""DeepSpeed configs that cannot be read, values of types that no field takes, and a section with
fields.

covers: integrations/deepspeed.py
"""

from __future__ import annotations

import base64
import json
import types

import pytest

from streambp.config import StreamConfig
from streambp.errors import ConfigError
from streambp.integrations.deepspeed import read, stream_config


@pytest.mark.parametrize("saves", [None, 5, "attn_out", ("attn_out", 3)])
def test_saves_of_another_type(saves):
    with pytest.raises(ConfigError, match="saves is"):
        StreamConfig(saves=saves)


def test_a_config_that_is_not_there():
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read("missing.json")


def test_a_config_that_is_no_json(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("{,")
    with pytest.raises(ConfigError, match=r"ds\.json.*line 1 column 2"):
        read(str(file))


def test_the_section_has_streamconfigs_fields():
    section = {"chunk_size": 5, "saves": ["kv"], "rows": "packed"}
    assert stream_config({"streambp": section}) == StreamConfig(
        chunk_size=5, saves=("kv",), rows="packed"
    )


FIELDS = {
    "streambp": {"chunk_size": 8192, "saves": ["attn_out"], "offload": "cpu"},
    "train_batch_size": 8,
}
LONG_FIELDS = {**FIELDS, "comment": "x" * 5000}


@pytest.mark.parametrize("fields", [FIELDS, LONG_FIELDS], ids=["short", "long"])
@pytest.mark.parametrize("way", ["dict", "mapping", "text", "urlsafe", "base64", "path", "Path"])
def test_a_config_comes_in_every_way_that_deepspeed_takes_and_more(way, fields, tmp_path):
    text, file = json.dumps(fields), tmp_path / "ds.json"
    file.write_text(text)
    sources = {
        "dict": fields, "mapping": types.MappingProxyType(fields), "text": f" {text}\n", "path": str(file), "Path": file,
        "urlsafe": base64.urlsafe_b64encode(text.encode()).decode(), "base64": base64.encodebytes(text.encode()).decode(),
    }  # fmt: skip
    assert read(sources[way]) == fields
    assert stream_config(read(sources[way])) == StreamConfig(8192, ("attn_out",), offload="cpu")


@pytest.mark.parametrize(
    "source", [3, 2.5, True, [], b"{}", "x" * 5000, "a\0b", "[" * 100_000, "{" * 100_000, "{" + "9" * 5000, "", "W10="],
)  # fmt: skip
def test_a_config_that_is_none_is_named_in_one_line(source):
    with pytest.raises(ConfigError, match=r"DeepSpeed config") as error:
        read(source)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 1000
