"""Numbers of released configurations are accepted, numbers that would be built for hours are not.

covers: planner/configuration.py, planner/skeleton.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BartConfig,
    CLIPConfig,
    Gemma3nConfig,
    Gemma3nTextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
)

from streambp.errors import StreamBPError
from streambp.planner import configuration, skeleton
from streambp.planner.configuration import build, read_config
from streambp.planner.skeleton import Skeleton, reduced_layers
from streambp.planner.survey import STREAMED_RECIPES, survey

# The defaults of these two classes are Gemma 3n E4B and a Gemma 4 of five billion parameters.
GEMMAS = (Gemma3nTextConfig, Gemma3nConfig, Gemma4TextConfig, Gemma4Config)
FAMILIES = 400  # at least so many configuration classes can be made without arguments


@pytest.mark.full
def test_no_default_of_transformers_is_refused():
    count = 0
    for kind in CONFIG_MAPPING.values():
        try:
            config = kind()
        except Exception:  # some need arguments, or other libraries
            continue
        assert read_config(config) is config
        count += 1
    assert count > FAMILIES


@pytest.mark.parametrize("kind", GEMMAS, ids=[kind.__name__ for kind in GEMMAS])
def test_gemmas_are_read(kind):
    config = read_config(kind())
    assert config.get_text_config().vocab_size_per_layer_input == 262_144


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (GPT2Config, "n_positions"),
        (GPT2Config, "n_inner"),
        (LlamaConfig, "max_position_embeddings"),
        (Gemma3nTextConfig, "vocab_size_per_layer_input"),
        (Gemma3nTextConfig, "hidden_size_per_layer_input"),
        (LlamaConfig, "num_parameters"),  # a note of whoever saved it
    ],
)
def test_sizes_may_be_large(kind, field):
    assert getattr(read_config(kind(**{field: 2**33})), field) == 2**33
    with pytest.raises(StreamBPError, match=rf"{field} of .* is"):
        read_config(kind(**{field: 2**41}))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (LlamaConfig, "num_hidden_layers", 2**12),
        (GPT2Config, "n_layer", 2**12),
        (LlamaConfig, "num_nextn_predict_layers", 2**12),
        (LlamaConfig, "n_layers_per_block", 2**12),
        (LlamaConfig, "num_experts", 2**21),
        (LlamaConfig, "n_routed_experts", 2**21),
        (LlamaConfig, "num_codebooks", 2**21),
    ],
)
def test_numbers_of_modules_are_limited(kind, field, value):
    config = kind()
    setattr(config, field, value)  # some classes make a list of so many
    with pytest.raises(StreamBPError, match=rf"{field} of {kind.__name__} is {value}"):
        read_config(config)


def test_a_limit_by_the_word_layer_is_seen(monkeypatch):
    """The rule that refused Gemma 3n."""
    monkeypatch.setattr(configuration, "LAYER_COUNT_FIELD", configuration.re.compile("layer"))
    with pytest.raises(StreamBPError, match="vocab_size_per_layer_input"):
        test_gemmas_are_read(Gemma3nTextConfig)


def counted(every_layer):
    """A streamed step of a small Gemma 4 whose layers get slices of one tensor; with all layers, or
    with those that stand for the others."""
    config = Gemma4TextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=12,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, global_head_dim=16,
        vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, sliding_window=4096,
    )  # fmt: skip
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda")
    reduce = skeleton.reduce if not every_layer else lambda: all_of(skeleton)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(skeleton, "reduce", reduce)
        profile = survey(
            skeleton, STREAMED_RECIPES[:1], accumulating=False, tree=False, timed=False
        )
    return profile.methods[0]


def all_of(skeleton):
    shrunk_model = reduced_layers(skeleton.model)
    assert len(shrunk_model.layer_indices) < len(shrunk_model.kinds) == 12
    return dataclasses.replace(shrunk_model, layer_indices=tuple(range(12)))


def check_inputs_by_layer():
    """The backbone makes the slices of all layers, and so does the representatives' backbone."""
    full, shrunk = counted(every_layer=True), counted(every_layer=False)
    for full_phase, shrunk_phase in zip(full.first, shrunk.first, strict=True):
        assert full_phase.name == shrunk_phase.name
        assert shrunk_phase.law == pytest.approx(full_phase.law, rel=1e-6, abs=0.05)


@pytest.mark.full
def test_inputs_of_each_layer_are_counted():
    check_inputs_by_layer()


@pytest.mark.full
def test_a_shorter_backbone_is_seen(monkeypatch):
    monkeypatch.setattr(skeleton, "INPUTS_BY_LAYER_FIELD", "no_such_field")
    with pytest.raises(StreamBPError, match="could not be counted"):
        check_inputs_by_layer()


def test_an_encoder_decoder_is_not_taken_for_its_decoder():
    config = BartConfig(encoder_layers=1, decoder_layers=1)
    model = Skeleton(config, torch.bfloat16, None, 16, "cuda").model
    assert type(model).__name__ == "BartForConditionalGeneration"


def test_a_model_of_another_kind_is_refused_in_few_words():
    """transformers' own message names all classes that it has."""
    with pytest.raises(StreamBPError) as error:
        build(CLIPConfig(), AutoModelForCausalLM.from_config)
    text = str(error.value)
    assert "for this kind of AutoModel: AutoModelForCausalLM.). Pass the configuration" in text
    assert "GPT2Config" not in text
