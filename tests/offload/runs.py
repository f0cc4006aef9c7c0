"""Steps of a small model with and without offloading, their schedules, and what they should
take."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest
import torch

import streambp
from streambp.offload.arena import padded
from tests.families import LENGTH, build, make_batch

SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv"))


BOTH_SAVES = ("attn_out", "kv")


def sampled(fast, *axes):
    """Every combination, for `parametrize`; those that are not `fast` belong to the whole
    matrix."""
    return [
        pytest.param(
            *values,
            marks=() if fast(*values) else pytest.mark.full,
            id="-".join(map(_shown, values)),
        )
        for values in itertools.product(*axes)
    ]


def _shown(value):
    return ("+".join(value) or "none") if isinstance(value, tuple) else str(value)


def model_with(saves=(), model=None, **settings):
    model = build("qwen3", num_hidden_layers=3) if model is None else model
    return streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves=saves, **settings))


def offloaded(saves=("attn_out", "kv"), model=None, **settings):
    return model_with(saves, model, offload="cpu", **settings)


def step(model, mode="plain", **batch):
    model.zero_grad(set_to_none=True)
    loss = model(**{**make_batch(mode), **batch}, use_cache=False).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same(actual, expected):
    assert torch.equal(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(actual[1][name], gradient), name


def forward(model, seed):
    return model(**make_batch("plain", seed=seed), use_cache=False).loss


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


SCHEDULES = {  # forwards F and backwards B of micro-batches; E is an evaluation
    "accumulation": "F0 B0 F1 B1 F2 B2",
    "1F1B": "F0 F1 B0 F2 B1 B2",
    "interleaved": "F0 F1 F2 B1 B0 B2",
    "last first": "F0 F1 F2 B2 B1 B0",
    "evaluation in between": "F0 E F1 B0 E B1 F2 B2",
}


def run(model, schedule):
    model.zero_grad(set_to_none=True)
    losses = {}
    for item in schedule.split():
        if item == "E":
            with torch.no_grad():
                forward(model, 9)
        elif item[0] == "F":
            losses[item[1]] = forward(model, int(item[1]))
        else:
            losses.pop(item[1]).backward()
    return gradients_of(model)


def break_off(model):
    """A backward that raises once it has recomputed two chunks of the second layer."""
    loss = forward(model, 5)
    with broken_activation(3), pytest.raises(ValueError, match="injected"):
        loss.backward()
    del loss
    gc.collect()


@contextlib.contextmanager
def broken_activation(call, error=ValueError):
    """Within, the MLPs' activation raises at that call: a function of torch, so that no layer is
    another one for it.

    Calls of a trial, with 2 or 3 tokens, do not count.
    """
    real, calls = torch.nn.functional.silu, []

    def breaks(x, *args, **kwargs):
        calls.extend([1] * (x.shape[-2] > 3))
        if len(calls) == call:
            raise error("injected")
        return real(x, *args, **kwargs)

    torch.nn.functional.silu = breaks
    try:
        yield
    finally:
        torch.nn.functional.silu = real


def expected_host_bytes(model, rows=2, length=LENGTH, chunk_size=5):
    """The formula, for every layer and chunk: x [B, C, h], o [B, H, C, D], lse [B, H, C], K and V
    [B, H_kv, C, D]."""
    config = model.config
    total = 0
    for start in range(0, length, chunk_size):
        tokens = rows * (min(start + chunk_size, length) - start)
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        sizes = [
            config.hidden_size,
            heads * config.head_dim,
            heads,
            kv * config.head_dim,
            kv * config.head_dim,
        ]
        total += sum(padded(4 * tokens * size) for size in sizes)
    return total * config.num_hidden_layers


def layer_bytes():
    return expected_host_bytes(build("qwen3", num_hidden_layers=1))


def prefix_bytes(tokens=2 * LENGTH):
    """K, V and the accumulators of their gradients of one layer, all in float32."""
    config = build("qwen3", num_hidden_layers=1).config
    return 4 * 4 * tokens * config.num_key_value_heads * config.head_dim
