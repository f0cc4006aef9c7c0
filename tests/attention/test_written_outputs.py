"""A layer that writes to what its attention gives.

covers: attention/attend.py, attention/prefix.py
"""

from __future__ import annotations

import pytest
import torch

import streambp
from streambp.errors import UnsupportedModelError
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error


def model_that_writes():
    model = build("qwen3", torch.float64)
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0].mul_(0.5),))
    return model


def test_gradients_are_exact(float64_oracle):
    _, expected = gradients(model_that_writes(), **make_batch("plain"))
    model = streambp.patch(model_that_writes(), streambp.StreamConfig(chunk_size=5))
    _, our_gradients = gradients(model, **make_batch("plain"))
    assert "checkpoints" not in str(streambp.describe(model))
    assert worst_error(our_gradients, expected) <= 1e-10


def test_what_was_overwritten_is_not_saved():
    model = streambp.patch(
        model_that_writes(), streambp.StreamConfig(chunk_size=5, saves=("attn_out",))
    )
    with pytest.raises(UnsupportedModelError, match="Leave 'attn_out' out"):
        model(**make_batch("plain"))
