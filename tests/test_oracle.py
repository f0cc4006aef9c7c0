"""Every family, batch mode, chunk size and saves against the unpatched model in float64.

covers: attention/prefix.py, chunks.py, head/recipe.py, layer/call.py, layer/function.py
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import streambp
from tests.families import FAMILIES, LENGTH, MODES, build, make_batch
from tests.oracle import (
    NOT_PACKED,
    assert_as_precise,
    gradients,
    lift_float32_casts,
    relative_l2,
    skipped_where_unpatched_fails,
    worst_error,
)

SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv"))


@functools.cache
def reference(family, mode):
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        return gradients(build(family, torch.float64), **make_batch(mode))


def cases():
    """Fast ones: chunks of 5 tokens of everything, and each family once in chunks of one token and
    in a single chunk.

    With saves, gradients are the same bits: tests/offload/test_saves_bitwise.py. One family shows
    here that it is so.
    """
    for (f, family), (m, mode) in itertools.product(enumerate(FAMILIES), enumerate(MODES)):
        for chunk_size, (number, saves) in itertools.product([1, 5, LENGTH + 10], enumerate(SAVES)):
            fast = chunk_size == 5 or (m == f % 4 if chunk_size == 1 else m == (f + 2) % 4)
            fast = fast if not saves else (family, chunk_size, m) == ("qwen3", 5, number)
            marks = () if fast else pytest.mark.full
            name = "-".join([family, mode, str(chunk_size), "+".join(saves) or "none"])
            yield pytest.param(family, mode, chunk_size, saves, marks=marks, id=name)


@pytest.mark.fast(3)
@pytest.mark.parametrize(("family", "mode", "chunk_size", "saves"), cases())
def test_gradients_are_exact(family, mode, chunk_size, saves, float64_oracle):
    expected_loss, expected = reference(family, mode)
    model = streambp.patch(
        build(family, torch.float64), streambp.StreamConfig(chunk_size=chunk_size, saves=saves)
    )
    loss, grads = gradients(model, **make_batch(mode))
    assert grads.keys() == {name for name, _ in model.named_parameters()}
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(grads, expected) <= 1e-10


@pytest.mark.fast(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_math_attention_and_two_pass_head_are_exact(family, mode, float64_oracle, monkeypatch):
    monkeypatch.setattr("streambp.head.recipe.can_run_in_one_pass", lambda *_: False)
    expected_loss, expected = reference(family, mode)
    model = streambp.patch(
        build(family, torch.float64), streambp.StreamConfig(chunk_size=5, attention="math")
    )
    loss, grads = gradients(model, **make_batch(mode))
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(grads, expected) <= 1e-10


def bf16_errors(attention="auto", length=256, chunk_size=29, layers=3):
    """Ours and the unpatched model's own, of one random model after the other."""
    for seed in itertools.count():
        model = build("qwen3", torch.float32, seed=seed, num_hidden_layers=layers, hidden_size=64)
        batch = make_batch("plain", length=length, seed=seed)
        # of the same weights: rounding them is nobody's error
        _, truth = gradients(model.bfloat16().float(), **batch)
        model.bfloat16()
        with skipped_where_unpatched_fails():
            _, stock = gradients(model, **batch)
        streambp.patch(model, streambp.StreamConfig(chunk_size=chunk_size, attention=attention))
        _, ours = gradients(model, **batch)
        yield relative_l2(ours, truth), relative_l2(stock, truth)


@pytest.mark.full
@pytest.mark.parametrize("attention", ["auto", "math"])
def test_bf16_is_as_precise_as_the_unpatched_model(attention):
    assert_as_precise(bf16_errors(attention))


def packing_fails(real, message, calls):
    """torch's attention on a CPU with AMX under the kernels of an older one: it fails in half
    precision."""

    def attend(query, *args, **kwargs):
        calls.append(query.dtype)
        if query.dtype == torch.bfloat16:
            raise RuntimeError(message)
        return real(query, *args, **kwargs)

    return attend


def test_half_precision_is_skipped_where_the_unpatched_model_cannot_run(monkeypatch):
    real, calls = torch.nn.functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", packing_fails(real, NOT_PACKED, calls)
    )
    with pytest.raises(pytest.skip.Exception, match=r"unpatched model cannot run.*pack_vnni2"):
        next(bf16_errors())
    assert calls[-1] == torch.bfloat16


def test_other_errors_of_the_unpatched_model_and_all_of_ours_are_errors(monkeypatch):
    with monkeypatch.context() as patch:
        real = torch.nn.functional.scaled_dot_product_attention
        patch.setattr(
            torch.nn.functional,
            "scaled_dot_product_attention",
            packing_fails(real, "out of memory", []),
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            next(bf16_errors())

    def ours(*args, **kwargs):
        raise RuntimeError(NOT_PACKED)

    monkeypatch.setattr(streambp, "patch", ours)
    with pytest.raises(RuntimeError, match="pack_vnni2"):
        next(bf16_errors())
