"""Families x rows x settings of trees of rows, in float64 against the unpatched batch.

Each pair of a family and rows meets two of all combinations of settings.

covers: prefixes/calls.py, prefixes/row_outputs.py, layer/chunk_states.py, layer/saved_tensors.py
"""

from __future__ import annotations

import functools
import itertools

import pytest

from tests.oracle import MAX_FLOAT64_ERROR, gradients, lift_float32_casts, worst_error
from tests.prefixes.batches import MODES, make_batch
from tests.prefixes.test_calls import (
    build,
    float64_everywhere,  # noqa: F401 - a fixture
    policy_loss,
    sharing,
    tokens_or_reason,
)
from tests.prefixes.test_states import tree_of
from tests.versions import needs_states

RECURRENT_FAMILIES = ("lfm2", "qwen3_5_text", "mamba2", "falcon_h1")
FAMILIES = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "qwen3_moe",
    "gemma3n_text",
    *RECURRENT_FAMILIES,
)
SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv", "*proj"))
SETTINGS = tuple(itertools.product((3, 7, 1000), SAVES, ("none", "cpu"), (False, True)))
# unpatched, where padding is on the left
NAN_CASES = [("gemma3n_text", "padded"), ("gemma3n_text", "two prompts")]
SETTINGS_STRIDE = 7  # through the settings: it has no factor in common with their number


def cases():
    for number, (family, mode, _) in enumerate(itertools.product(FAMILIES, MODES, range(2))):
        if (family, mode) not in NAN_CASES:
            marks = [pytest.mark.full] if number % 36 else []
            marks += [needs_states] if family in RECURRENT_FAMILIES else []
            yield pytest.param(
                family, mode, *SETTINGS[SETTINGS_STRIDE * number % len(SETTINGS)], marks=marks
            )


@functools.cache
def reference(family, mode, lazy):
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        model, batch = build(family), make_batch(mode)
        return policy_loss(model, batch) if lazy else gradients(model, **batch)


@pytest.mark.parametrize(("family", "mode", "chunk_size", "saves", "offload", "lazy"), cases())
def test_gradients_are_exact(family, mode, chunk_size, saves, offload, lazy):
    expected_loss, expected = reference(family, mode, lazy)
    model, batch = (
        sharing(build(family), chunk_size, saves=saves, offload=offload, lazy_logits=lazy),
        make_batch(mode),
    )
    loss, our_gradients = policy_loss(model, batch) if lazy else gradients(model, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    if mode == "nothing shared":
        assert "saves too little" in tokens_or_reason(model)
    else:
        assert (
            tokens_or_reason(model)[1]
            == tree_of(batch, fork_distance=2 if family in RECURRENT_FAMILIES else 1).tokens
        )
