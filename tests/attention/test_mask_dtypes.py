"""A 4-D attention mask of any dtype: computed as in the unpatched model, or refused by name.

covers: attention/mask_scan.py, attention/interface.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.attention import interface
from streambp.errors import UnsupportedMaskError
from tests import zoo
from tests.families import LENGTH, build, make_batch
from tests.oracle import gradients, worst_error

CONFIG = streambp.StreamConfig(chunk_size=7)
READ_MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
ADDED_MASK = torch.where(READ_MASK, 0.0, -torch.inf)
MASKS = {
    "bool": READ_MASK,
    "bool for each head": READ_MASK.expand(2, 4, LENGTH, LENGTH),
    "added": ADDED_MASK.double(),
    "int64": READ_MASK.long(),
    "int32": READ_MASK.int(),
    "uint8": READ_MASK.to(torch.uint8),
    "complex": READ_MASK.to(torch.complex64),
}
COMPUTED_CASES = {"sdpa": ("bool", "bool for each head", "added"), "eager": ("added",)}


def model_of(family, attention):
    if family == "gptj":  # has no attention but its own
        return zoo.build(family)
    model = build(family, torch.float64)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(
    ("attention", "name"),
    [(attention, name) for attention in COMPUTED_CASES for name in MASKS],
)
def test_as_unpatched_or_refused(attention, name, float64_oracle):
    stock = model_of("qwen3", attention)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = {**make_batch("plain"), "attention_mask": MASKS[name]}
    if name not in COMPUTED_CASES[attention]:
        with pytest.raises(UnsupportedMaskError, match=f"mask is of {MASKS[name].dtype}"):
            ours(**batch)
        return
    _, expected = gradients(stock, **batch)
    _, our_gradients = gradients(ours, **batch)
    assert worst_error(our_gradients, expected) <= 1e-10


@pytest.mark.parametrize("name", MASKS)
def test_layers_with_attention_of_their_own(name, float64_oracle):
    stock = model_of("gptj", "eager")
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = {**make_batch("plain"), "attention_mask": MASKS[name]}
    if name in ("int64", "int32", "uint8", "complex"):
        with pytest.raises(UnsupportedMaskError, match=f"mask is of {MASKS[name].dtype}"):
            ours(**batch)
        return
    _, expected = gradients(stock, **batch)
    _, our_gradients = gradients(ours, **batch)
    assert worst_error(our_gradients, expected) <= 1e-10


def test_mutant_bools_under_eager(monkeypatch, float64_oracle):
    """Eager attention adds True as 1: read as sdpa reads it, the mask gives other gradients."""
    monkeypatch.setattr(interface, "_refuse_added_bools", lambda configs: None)
    stock = model_of("qwen3", "eager")
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = {**make_batch("plain"), "attention_mask": READ_MASK}
    _, expected = gradients(stock, **batch)
    _, our_gradients = gradients(ours, **batch)
    assert worst_error(our_gradients, expected) > 1e-2
