"""Each kernel against a softmax in float64: (o, lse) forward, and backward from the merged (o, lse)
of the whole row.

FlashAttention and cuDNN have no kernel on the CPU; a stand-in with their signatures and conventions
shows that we call them rightly. `tests/gpu` runs the real ones.

covers: attention/backend.py, attention/kernels.py, attention/kernels_wide.py, attention/masks.py,
  attention/spans.py, chunks.py
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from streambp.attention import kernels
from streambp.attention.backend import Backend, BlockPurpose, choose_backend
from streambp.attention.kernels import (
    CPU_FLASH,
    CUDNN,
    FLASH,
    MATH,
    SQUARE_FLASH,
    WINDOWLESS_FLASH,
    Task,
)
from streambp.attention.kernels_wide import EFFICIENT, PADDED_KERNELS
from streambp.attention.masks import DenseMask
from streambp.attention.spans import Block, BlockKind, QueryRun, Spans
from streambp.chunks import ChunkPlan
from streambp.errors import StreamBPError
from tests.attention.stand_in import SCALE, StandIn, softmax_attention
from tests.seeds import seed_of, seeded

WINDOW = 4
BLOCKS = {
    "full": Block(BlockKind.FULL, 0, 2, 20, 29, 0, 13),
    "causal": Block(BlockKind.CAUSAL, 0, 2, 20, 29, 20, 29),
    "band": Block(BlockKind.BAND, 0, 2, 20, 24, 17, 20, WINDOW),
    "band with an empty row": Block(BlockKind.BAND, 0, 2, 20, 24, 14, 18, WINDOW),
    "window": Block(BlockKind.WINDOW, 0, 2, 20, 29, 17, 29, WINDOW),
    "mask": Block(BlockKind.MASK, 0, 2, 20, 29, 0, 13),
    "varlen": Block(BlockKind.VARLEN, 1, 2, 20, 29, 18, 29, None, (0, 4, 5, 9), (0, 6, 7, 11)),
    "varlen with a window": Block(
        BlockKind.VARLEN, 1, 2, 20, 29, 18, 29, WINDOW, (0, 4, 5, 9), (0, 6, 7, 11)
    ),
}


def make(block, dtype=torch.float64, head_size=8, value_size=8, heads=4, kv_heads=2, seed=0):
    """q, k, v, do of a block, and a merged (o, lse) as if the row had other blocks as well."""
    generator = seeded(seed)
    rows, queries, keys = block.b1 - block.b0, block.q1 - block.q0, block.k1 - block.k0

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (random(rows, h, t, d) for h, t, d in (
        (heads, queries, head_size), (kv_heads, keys, head_size), (kv_heads, keys, value_size),
    ))  # fmt: skip
    return q, k, v, random(rows, heads, queries, value_size)


def allowed(block, tile=None):
    query, key = torch.arange(block.q0, block.q1)[:, None], torch.arange(block.k0, block.k1)
    causal = key <= query
    inside = key > query - block.window if block.window is not None else torch.ones_like(causal)
    if block.kind is BlockKind.VARLEN:
        mask = torch.zeros_like(causal)
        for i, (a, b) in enumerate(itertools.pairwise(block.cu_q)):
            mask[a:b, block.cu_k[i] : block.cu_k[i + 1]] = True
        return mask & causal & inside
    if block.kind is BlockKind.MASK:
        return tile
    return {
        BlockKind.FULL: inside,
        BlockKind.CAUSAL: causal,
        BlockKind.BAND: inside,
        BlockKind.WINDOW: causal & inside,
    }[block.kind]


def check(kernel, block, tile=None, rtol=1e-10, **sizes):
    """Forward, then backward where the block is half of the row: the other half adds weight but no
    new gradient."""
    q, k, v, do = make(block, **sizes)
    task = Task(block, SCALE, tile)
    mask = allowed(block, tile)
    o, lse = kernel.forward(q, k, v, task)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected_o, expected_lse = softmax_attention(*wide, mask)
    torch.testing.assert_close(o.double(), expected_o, rtol=rtol, atol=rtol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=rtol, atol=rtol)

    other_lse = torch.randn(lse.shape, dtype=torch.float64, generator=seeded(1))
    other_o = torch.randn(o.shape, dtype=torch.float64, generator=seeded(2))
    merged_lse = torch.logaddexp(expected_lse, other_lse)
    merged_o = (
        expected_o * torch.exp(expected_lse - merged_lse)[..., None]
        + other_o * torch.exp(other_lse - merged_lse)[..., None]
    )
    expected_gradients = torch.autograd.grad(merged_o, wide, do.double())
    our_gradients = kernel.backward(
        do, q, k, v, merged_o.detach().to(q.dtype), merged_lse.detach().to(lse.dtype), task
    )
    for a, b in zip(our_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", ["full", "causal", "band", "band with an empty row"])
@pytest.mark.parametrize("value_size", [8, 5])
def test_math(name, value_size):
    check(MATH, BLOCKS[name], value_size=value_size)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("added", [False, True])
def test_math_with_a_mask(shape, added):
    block = BLOCKS["mask"]
    generator = seeded(3)
    tile = torch.rand(*shape, 9, 13, generator=generator) < 0.5
    tile[:, :, 4] = added  # a query that reads nothing, which added masks may not have
    if added:
        bias = torch.randn(tile.shape, generator=generator, dtype=torch.float64)
        tile = bias.masked_fill(~tile, -torch.inf)
    check(MATH, block, tile)


def test_a_query_without_keys_has_no_output_and_no_gradient():
    block = BLOCKS["band with an empty row"]
    q, k, v, do = make(block)
    o, lse = MATH.forward(q, k, v, Task(block, SCALE))
    assert (o[:, :, -1] == 0).all()
    assert (lse[:, :, -1] == -torch.inf).all()
    our_gradients = MATH.backward(do, q, k, v, o, lse, Task(block, SCALE))
    assert all(x.isfinite().all() for x in our_gradients)
    assert (our_gradients[0][:, :, -1] == 0).all()


@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_cpu_flash(name, dtype, rtol):
    check(CPU_FLASH, BLOCKS[name], dtype=dtype, rtol=rtol)


def test_dropout_draws_the_same_in_backward():
    block = BLOCKS["full"]
    q, k, v, do = make(block)
    task = Task(block, SCALE, dropout=0.4, seed=seed_of(5))
    wide = [x.requires_grad_() for x in (q, k, v)]
    draw = torch.rand(2, 2, 2, 9, 13, generator=seeded(5)).flatten(1, 2)
    weights = (q @ k.repeat_interleave(2, 1).mT * SCALE).softmax(-1) * (draw >= 0.4) / 0.6
    expected = weights @ v.repeat_interleave(2, 1)
    o, lse = MATH.forward(*(x.detach() for x in wide), task)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    expected_gradients = torch.autograd.grad(expected, wide, do)
    our_gradients = MATH.backward(do, *(x.detach() for x in wide), o, lse, task)
    for a, b in zip(our_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


FUSED_OPERATORS = sorted(name for name in vars(StandIn) if name.startswith(("_scaled", "_flash")))


@pytest.mark.parametrize("name", FUSED_OPERATORS)
def test_the_stand_in_has_the_operators_parameters(name):
    import inspect

    real = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]
    ours = list(inspect.signature(getattr(StandIn, name)).parameters)[1:]
    assert ours == real[: len(ours)]
    assert all(
        a.has_default_value()
        for a in getattr(torch.ops.aten, name).default._schema.arguments[len(ours) :]
    )


@pytest.mark.parametrize("name", ["full", "causal", "window", "varlen", "varlen with a window"])
def test_flash_calls_its_operators_rightly(name, monkeypatch):
    monkeypatch.setattr(kernels, "aten", StandIn())
    check(FLASH, BLOCKS[name])


@pytest.mark.parametrize("name", ["full", "causal"])
def test_cudnn_calls_its_operators_rightly(name, monkeypatch):
    monkeypatch.setattr(kernels, "aten", StandIn())
    check(CUDNN, BLOCKS[name])


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16), (24, 8)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal"])
def test_memory_efficient_attention_is_called_rightly(name, sizes, monkeypatch):
    monkeypatch.setattr(kernels, "aten", StandIn())
    check(EFFICIENT, BLOCKS[name], head_size=sizes[0], value_size=sizes[1])


@pytest.mark.parametrize("sizes", [(8, 5), (5, 8), (12, 12)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "window", "varlen", "varlen with a window"])
def test_padded_flash_calls_its_operators_rightly(name, sizes, monkeypatch):
    """The stand-in refuses two head sizes, as the operators do."""
    monkeypatch.setattr(kernels, "aten", StandIn())
    check(PADDED_KERNELS[FLASH], BLOCKS[name], head_size=sizes[0], value_size=sizes[1])


@pytest.mark.parametrize("name", ["full", "causal"])
def test_cudnn_takes_two_head_sizes(name, monkeypatch):
    monkeypatch.setattr(kernels, "aten", StandIn())
    check(CUDNN, BLOCKS[name], head_size=12, value_size=8)


def test_backends_are_chosen_by_what_they_can_do():
    q, v = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    assert choose_backend("auto", q, v, 0.0).name == "cpu flash"
    assert choose_backend("auto", q, v, 0.1).name == "math"
    assert choose_backend("auto", q, v[..., :4], 0.0).name == "math"
    q_half = q.bfloat16()
    assert choose_backend("auto", q_half, q_half, 0.0).name == "cpu flash"
    assert choose_backend("auto", q_half, q_half, 0.0, sink=True).name == "math"
    assert choose_backend("flash", q_half, q_half, 0.0, sink=True).name == "cpu flash"
    assert choose_backend("auto", q, v, 0.0, sink=True).name == "cpu flash"
    on_meta = q.to("meta", torch.bfloat16)
    assert choose_backend("auto", on_meta, on_meta, 0.0, sink=True).name == "flash"
    assert choose_backend("auto", on_meta, on_meta, 0.0).name == "flash"
    for choice in ("cudnn", "flash"):
        with pytest.raises(StreamBPError, match="Set attention='auto'"):
            choose_backend(choice, q, v, 0.1)


BACKENDS = [
    Backend((CUDNN, FLASH, MATH)), Backend((FLASH, MATH)), Backend((CPU_FLASH, MATH)), Backend((EFFICIENT, MATH)),
    Backend((CUDNN, PADDED_KERNELS[FLASH], MATH)), Backend((CUDNN, EFFICIENT, MATH)),
    Backend((SQUARE_FLASH, MATH)),
    Backend((WINDOWLESS_FLASH, MATH)), Backend((PADDED_KERNELS[FLASH], MATH)),
    Backend((CUDNN, WINDOWLESS_FLASH, MATH)),
]  # fmt: skip


@pytest.mark.parametrize(
    "backend", BACKENDS, ids=lambda backend: ", ".join(kernel.name for kernel in backend.kernels)
)
@pytest.mark.parametrize("use", BlockPurpose)
def test_every_block_has_a_kernel_in_every_backend(backend, use):
    padded = Spans(
        9000,
        (
            (QueryRun(300, 8500, 300), QueryRun(8500, 9000, 300, 8500)),
            (QueryRun(0, 7, 0), QueryRun(7, 9000, 7)),
        ),
    )
    for layout in (
        padded,
        dataclasses.replace(padded, window=700),
        DenseMask(2, 9000, torch.zeros(())),
    ):
        for chunk in ChunkPlan(9000, 2999):
            plan = backend.plan(layout, chunk, 2, use)
            assert len(plan.kernels) == len(plan.blocks) > 0
            assert all(
                block.kind in kernel.kinds
                for block, kernel in zip(plan.blocks, plan.kernels, strict=True)
            )
            for block, kernel in zip(plan.blocks, plan.kernels, strict=True):
                if kernel is MATH:
                    assert block.q1 - block.q0 <= 512, "scores that are too large"
                    assert block.k1 - block.k0 <= 2048
