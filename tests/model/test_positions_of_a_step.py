"""The first step beyond a model's positions warns once, with the line that extends the model.

covers: model/positions.py, model/wrappers.py
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config

import streambp
from streambp.model import positions
from tests import zoo
from tests.versions import needs_mambas_states
from tests.zoo import VOCABULARY

EXCESS_MESSAGE = "exceed the model's"
MAX_POSITIONS = 48
LONG_LENGTH = 97


def warned(model, length=LONG_LENGTH, **kwargs):
    """The warnings of positions that a step gives."""
    ids = torch.randint(0, VOCABULARY, (1, length))
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        model(input_ids=ids, labels=ids, use_cache=False, **kwargs).loss.backward()
    return [str(record.message) for record in records if EXCESS_MESSAGE in str(record.message)]


def make_model(name="llama", max_positions=MAX_POSITIONS, **changes):
    model = zoo.build(name, torch.float32, device="cpu")
    for field, value in {"max_position_embeddings": max_positions, **changes}.items():
        setattr(model.config.get_text_config(), field, value)
    return streambp.patch(model.train(), streambp.StreamConfig(chunk_size=16))


def test_the_first_step_beyond_warns_once():
    model = make_model()
    assert not warned(model, MAX_POSITIONS)
    (message,) = warned(model)
    assert f"Rows of {LONG_LENGTH} tokens exceed the model's {MAX_POSITIONS} positions" in message
    assert not warned(model)
    config = zoo.tiny_config("llama")
    config.max_position_embeddings = MAX_POSITIONS
    exec(re.search(r"this config: (.*)", message)[1], {"config": config})
    assert positions.positions_warning(config, LONG_LENGTH) is None


def check_other_steps():
    assert not warned(
        make_model(), LONG_LENGTH, position_ids=torch.arange(LONG_LENGTH)[None] % MAX_POSITIONS
    )
    evaluated = make_model().eval()
    assert not warned(evaluated)
    assert warned(evaluated.train())


def test_packed_rows_and_evaluation_do_not_warn():
    check_other_steps()


def test_a_test_of_the_tokens_alone_is_seen(monkeypatch):
    real = positions.warn_beyond_positions
    monkeypatch.setattr(
        "streambp.model.wrappers.warn_beyond_positions", lambda *args: real(*args[:3], None)
    )
    with pytest.raises(AssertionError):
        check_other_steps()


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": MAX_POSITIONS}


@pytest.mark.parametrize(
    ("angles", "silent"),
    [
        ({**YARN, "factor": 4.0}, True),
        ({**YARN, "factor": 1.5}, False),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, True),
        ({"rope_type": "default", "rope_theta": 1e4}, False),
    ],
    ids=["yarn", "short yarn", "dynamic", "default"],
)
def test_scaled_angles_reach_further(angles, silent):
    assert (
        warned(make_model(rope_parameters=angles)) == []
        if silent
        else warned(make_model(rope_parameters=angles))
    )


@pytest.mark.parametrize("name", ["bloom", pytest.param("mamba", marks=needs_mambas_states)])
def test_models_without_rotary_embeddings_do_not_warn(name):
    assert not warned(make_model(name))


TOWER = {
    "hidden_size": 32, "image_size": 28, "intermediate_size": 32, "num_attention_heads": 2,
    "num_hidden_layers": 1, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip


def test_a_multimodal_model_is_told_of_its_text_part():
    """Its code changes the configuration that a user loads."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    text |= {"max_position_embeddings": MAX_POSITIONS}
    config = Gemma3Config(text_config=text, vision_config=TOWER)
    model = AutoModelForCausalLM.from_config(config).train()
    text_alone = torch.zeros(1, LONG_LENGTH, dtype=torch.long)  # which older releases ask for
    streambp.patch(model, streambp.StreamConfig(chunk_size=16))
    (message,) = warned(model, token_type_ids=text_alone)
    assert 'config.get_text_config().rope_parameters["full_attention"].update(' in message


def test_adapters_hide_nothing():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = zoo.build("llama", torch.float32, device="cpu")
    model.config.max_position_embeddings = MAX_POSITIONS
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    streambp.patch(model.train(), streambp.StreamConfig(chunk_size=16))
    (message,) = warned(model)
    assert "config.rope_parameters.update(" in message
