"""DeepSpeed configs that cannot be read, values of types that no field takes, and a section with fields.

covers: integrations/deepspeed.py
"""

from __future__ import annotations

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
    section = {"chunk_size": 5, "saves": ["kv"], "share_prefixes": True}
    assert stream_config({"streambp": section}) == StreamConfig(chunk_size=5, saves=("kv",), share_prefixes=True)
