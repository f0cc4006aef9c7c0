"""RoPE whose frequencies depend on the longest sequence so far: no trial, and no packed row, makes
it another one.

covers: prefixes/admission.py, admission/generators.py, admission/snapshot.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import streambp
from streambp.admission.snapshot import Snapshot
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.seeds import seed_torch, seeded
from tests.tiers import thinned
from tests.versions import LONGROPE_BY_KIND_FAILS

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
EXTRA_ROPE_TYPES = {
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 64,
    },
    "yarn": {"original_max_position_embeddings": 64},
    "llama3": {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
# Rows shorter than the original length in a batch that is longer, and batches on both sides of it.
BATCHES = {
    "around": [(80, (20, 40, 10)), (40, (3, 0, 9)), (80, (20, 30, 40))],
    "below": [(60, (5, 20, 0)), (81, (0, 50, 20))],
}


def build(kind, rope):
    seed_torch()
    parameters = {
        "rope_type": rope,
        "rope_theta": 1e4,
        "factor": 4.0,
        **EXTRA_ROPE_TYPES.get(rope, {}),
    }
    if kind == "one":
        return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters)).to(torch.float64)
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    if kind == "in each kind of layer":
        sliding = {**parameters, "factor": 2.0, "rope_theta": 1e3}
    ropes = {"full_attention": parameters, "sliding_attention": sliding}
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=types, rope_parameters=ropes)
    return Gemma3ForCausalLM(config).to(torch.float64)


def padded(length, pads, seed):
    """Rows [B, length] with so many tokens of padding on the right."""
    ids = torch.randint(3, 53, (len(pads), length), generator=seeded(seed))
    is_token = torch.arange(length) < length - torch.tensor(pads)[:, None]
    labels = torch.where(is_token, ids, -100)
    return {"input_ids": ids * is_token, "labels": labels, "attention_mask": is_token.long()}


def results(model, generates, batches):
    """Gradients of all steps, and what RoPE keeps at the end."""
    if generates:  # beyond the original length, which dynamic RoPE remembers
        ids = torch.randint(3, 53, (1, 90), generator=seeded(9))
        model.eval().generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        model.train()
    by_name = {}
    for number, (length, pads) in enumerate(batches):
        steps = gradients(model, **padded(length, pads, number))[1]
        by_name |= {f"{number} {name}": grad for name, grad in steps.items()}
    (rotary,) = (module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    values = {
        name: float(value) for name, value in vars(rotary).items() if "max_seq_len_cached" in name
    }
    return by_name, values, {name: buffer.clone() for name, buffer in rotary.named_buffers()}


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("rope", "kind", "generates", "batches"),
    thinned(
        itertools.product(
            sorted(ROPE_INIT_FUNCTIONS),
            ["one", "per kind of layer", "in each kind of layer"],
            [True, False],
            BATCHES,
        ),
        lambda rope, kind, generates, batches: (
            rope in ("dynamic", "longrope") and generates and batches == "around"
        ),
    ),
)
def test_frequencies_are_those_of_the_unpatched_model(
    rope, kind, generates, batches, float64_oracle
):
    if rope == "longrope" and kind != "one" and LONGROPE_BY_KIND_FAILS:
        pytest.skip(
            "this transformers' longrope of a kind of layer fails at a second long sequence"
        )
    stock, ours = (
        build(kind, rope),
        streambp.patch(build(kind, rope), streambp.StreamConfig(chunk_size=16, saves=())),
    )
    expected, expected_values, buffers = results(stock, generates, BATCHES[batches])
    our_gradients, our_values, ours_buffers = results(ours, generates, BATCHES[batches])
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert our_values == expected_values
    assert all(torch.equal(ours_buffers[name], buffer) for name, buffer in buffers.items())
    assert streambp.last_step(ours).shared is not None


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", ["per kind of layer", "in each kind of layer"])
def test_a_trial_that_leaves_its_length_turns_this_red(kind, monkeypatch, float64_oracle):
    monkeypatch.setattr(Snapshot, "restore", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        test_frequencies_are_those_of_the_unpatched_model("dynamic", kind, True, "around", None)
