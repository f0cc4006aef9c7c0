"""Values with fewer columns than queries and keys, through kernels of one head size: zeros behind
them change nothing.

The CPU's fused kernel stands for FlashAttention: it has one head size, too.

covers: attention/attend.py, attention/kernels.py, attention/kernels_wide.py, attention/kv.py,
attention/prefix.py
"""

from __future__ import annotations

import functools

import pytest
import torch

import streambp
from streambp.attention import attend, kernels, kernels_wide, kv, prefix
from streambp.attention.attend import AttentionParams, PrefixAttention, attend_blocks
from streambp.attention.backend import Backend, choose_backend
from streambp.attention.kernels import CPU_FLASH, MATH
from streambp.attention.kernels_wide import PADDED_KERNELS
from streambp.attention.kv import KVBuffer, KVTiles
from streambp.attention.spans import QueryRun, Spans
from streambp.chunks import ChunkPlan
from streambp.layer.saved_tensors import DeviceTensors
from tests import zoo
from tests.attention.stand_in import softmax_attention
from tests.distributed import one_rank
from tests.families import make_batch
from tests.oracle import gradients, lift_float32_casts, worst_error
from tests.seeds import seeded

ROWS, HEADS, KV_HEADS, CHUNK = 2, 4, 2, 7
LENGTH = 3 * CHUNK + 1
LAYOUTS = {
    "causal": Spans.causal(ROWS, LENGTH),
    "packed": Spans(
        LENGTH,
        (
            (QueryRun(0, 9, 0), QueryRun(9, LENGTH, 9)),
            (QueryRun(0, 14, 0), QueryRun(14, LENGTH, 14)),
        ),
    ),
    "window": Spans.causal(ROWS, LENGTH, 5),
}
PAIRS = {"D_v < D": (12, 5), "D_v > D": (5, 12), "no multiple of 8": (12, 12)}
BACKENDS = {  # backend, tiles that stay on the device (None: one buffer)
    "padded buffer": (lambda size: Backend((CPU_FLASH, MATH), width=size), None),
    "padded tiles": (lambda size: Backend((CPU_FLASH, MATH), width=size), 1),
    "padded blocks": (lambda size: Backend((PADDED_KERNELS[CPU_FLASH], MATH)), None),
    "padded blocks of tiles": (lambda size: Backend((PADDED_KERNELS[CPU_FLASH], MATH)), 0),
}


def allowed(layout):
    mask = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)
    token_positions = torch.arange(LENGTH)
    for row, runs in enumerate(layout.rows):
        for run in runs:
            mask[row, 0, run.q0 : run.q1, run.k0 :] = True
    mask &= token_positions <= token_positions[:, None]
    return (
        mask
        if layout.window is None
        else mask & (token_positions > token_positions[:, None] - layout.window)
    )


def random(pair, length=LENGTH):
    generator = seeded(0)
    shapes = ((HEADS, pair[0]), (KV_HEADS, pair[0]), (KV_HEADS, pair[1]), (HEADS, pair[1]))
    return [
        torch.randn(ROWS, h, length, d, generator=generator, dtype=torch.float64) for h, d in shapes
    ]


def worst(way, layout, pair, saved):
    """The largest relative error of o, dq, dk and dv, of all chunks. saved: with o, and K and V as
    they are kept."""
    make, resident = BACKENDS[way]
    backend, (q, k, v, do) = make(pair[0]), random(pair)
    wide = [x.requires_grad_() for x in (q, k, v)]
    expected, _ = softmax_attention(*wide, allowed(layout), 0.3)
    expected_results = [expected.detach(), *torch.autograd.grad(expected, wide, do)]
    plan, params = ChunkPlan(LENGTH, CHUNK), AttentionParams(backend, 0.3, None, 0.0, 0)
    prefixes = prefix.Prefix(layout, LENGTH, "auto")
    prefixes.backends[0] = backend
    if resident is not None:
        kv_storage = KVTiles(
            0, plan, DeviceTensors(), DeviceTensors(), resident, False, pair[1], backend.width
        )
        prefixes.kv_storages.append(kv_storage)
    attended_chunks, parts = [], []
    for chunk in plan:
        positions = slice(chunk.start, chunk.stop)
        prefixes.restore(0, chunk, k[:, :, positions].detach(), v[:, :, positions].detach())
        attended_chunks.append(
            attend_blocks(
                q[:, :, positions].detach(), prefixes.kv_storages[0], layout, chunk, params
            )
        )
    if saved:
        prefixes.pack()
    for chunk in plan.backward:
        positions = slice(chunk.start, chunk.stop)
        leaves = [x[:, :, positions].detach().requires_grad_() for x in (q, k, v)]
        attended = attended_chunks[chunk.index] if saved else None
        out = PrefixAttention.apply(
            *leaves, None, prefixes.kv_storages[0], layout, chunk, params, attended
        )
        parts.append(
            [
                out.detach().transpose(1, 2),
                *torch.autograd.grad(out, leaves, do[:, :, positions].transpose(1, 2)),
            ]
        )
    results = [torch.cat(chunks, 2) for chunks in zip(*reversed(parts), strict=True)]
    assert all(a.shape == b.shape for a, b in zip(results, expected_results, strict=True))
    # NaN stays
    return float(
        torch.stack(
            [(a - b).norm() / b.norm() for a, b in zip(results, expected_results, strict=True)]
        ).max()
    )


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", BACKENDS)
def test_padding_changes_nothing(way, layout, saved):
    assert worst(way, LAYOUTS[layout], PAIRS["D_v < D"], saved) <= 1e-12


@pytest.mark.parametrize("pair", PAIRS)
def test_any_two_head_sizes_can_be_padded_for_each_block(pair):
    assert worst("padded blocks", LAYOUTS["causal"], PAIRS[pair], saved=True) <= 1e-12


def keep_the_tail(x, size):
    return x if x.shape[-1] == size else x[..., x.shape[-1] - size :]


def noise_behind(x, width):
    """Not the same for all keys: then softmax would take no notice of it."""
    return torch.cat(
        [x, torch.randn(*x.shape[:-1], width - x.shape[-1], dtype=x.dtype, generator=seeded(1))], -1
    )


def unwritten(self, like, width=None):
    rows, heads, _, size = like.shape
    return like.new_full((rows, self.length, heads, width or size), torch.nan)


MUTANTS = {  # the ways in which it is seen, and what is replaced
    "gradient of the padding kept": (BACKENDS, [(m, "cut_columns", keep_the_tail) for m in (attend, kv,
                kernels_wide)]),
    "noise instead of zeros": (
        ("padded blocks", "padded blocks of tiles"), [(m, "pad_columns", noise_behind) for m in (attend, kv, kernels_wide)],
    ),
    "zeros not written": (("padded buffer",), [(prefix.Prefix, "_buffer", unwritten)]),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name, monkeypatch):
    ways, replacements = MUTANTS[name]
    for module, function, mutant in replacements:
        monkeypatch.setattr(module, function, mutant)
    for way in ways:
        try:
            error = worst(way, LAYOUTS["causal"], PAIRS["D_v < D"], saved=False)
        except (AssertionError, RuntimeError):  # shapes that do not fit
            continue
        assert not error <= 1e-3, way


def test_values_are_kept_and_leave_without_the_zeros():
    backend, (_, k, v, _) = BACKENDS["padded buffer"][0](12), random((12, 5))
    prefixes = prefix.Prefix(LAYOUTS["causal"], LENGTH, "auto")
    prefixes.backends[0] = backend
    for chunk in ChunkPlan(LENGTH, CHUNK):
        prefixes.restore(
            0, chunk, k[:, :, chunk.start : chunk.stop], v[:, :, chunk.start : chunk.stop]
        )
    kv_storage = prefixes.kv_storages[0]
    assert isinstance(kv_storage, KVBuffer)
    assert kv_storage.v.shape[3] == kv_storage.width == 12
    chunk = ChunkPlan(LENGTH, CHUNK)[1]
    assert torch.equal(kv_storage.part(chunk)[1], v[:, :, chunk.start : chunk.stop].transpose(1, 2))
    (size,) = prefixes.sizes_seen
    assert size.resident - size.keys == ROWS * KV_HEADS * 7 * 8
    prefixes.pack()
    assert kv_storage.v.untyped_storage().nbytes() == v.numel() * 8
    assert (kv_storage.width, kv_storage.value_size) == (12, 5)


CONFIGS = {
    "nothing": {},
    "attn_out": {"saves": ("attn_out",)},
    "kv": {"saves": ("kv",)},
    "offloaded": {"saves": ("attn_out", "kv"), "offload": "cpu"},
    "streamed": {"saves": ("kv",), "offload": "cpu", "gpu_memory": 1},
}


@functools.cache
def reference(mode, default_dtype):
    """The default dtype decides which weights are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        return gradients(zoo.build("deepseek_v3"), **make_batch(mode, length=LENGTH))


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("config", "mode"),
    [*((name, "plain") for name in CONFIGS), ("attn_out", "left-padded"), ("nothing", "packed")],
)
def test_latent_attention_through_a_kernel_of_one_head_size(
    config, mode, float64_oracle, monkeypatch
):
    """DeepSeek V3 has D_v < D. "auto" attends with plain products on a CPU."""
    head_sizes = set()
    real = kernels.CpuFlashKernel.forward

    def forward(self, q, k, v, task):
        head_sizes.add((q.shape[-1], v.shape[-1]))
        return real(self, q, k, v, task)

    monkeypatch.setattr(kernels.CpuFlashKernel, "forward", forward)
    model = zoo.build("deepseek_v3")
    sizes = model.config.qk_head_dim, model.config.v_head_dim
    assert sizes[0] > sizes[1]
    streambp.patch(
        model, streambp.StreamConfig(chunk_size=CHUNK, attention="flash", **CONFIGS[config])
    )
    loss, our_gradients = gradients(model, **make_batch(mode, length=LENGTH))
    expected_loss, expected = reference(mode, torch.get_default_dtype())
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    assert head_sizes == {(sizes[0], sizes[0])}
    assert all(layer.path == "streams" for layer in streambp.describe(model).layers)


@pytest.mark.parametrize(
    "saves", [(), ("attn_out", "kv")], ids=lambda saves: "+".join(saves) or "nothing"
)
def test_split_sequences_are_padded_at_their_ranks(saves, float64_oracle, monkeypatch):
    """What ranks exchange is not padded: a group of one rank gives back what it is sent."""
    widths = set()
    one_rank.split_over_one_rank(monkeypatch)
    real = KVBuffer.from_tensors.__func__

    def of(cls, k, v, width):
        widths.add((v.shape[3], width))
        return real(cls, k, v, width)

    monkeypatch.setattr(KVBuffer, "from_tensors", classmethod(of))
    expected_loss, expected = reference("plain", torch.get_default_dtype())
    model = zoo.build("deepseek_v3")
    streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK, attention="flash", saves=saves))
    loss, our_gradients = gradients(
        model, **one_rank.with_shifted_labels(make_batch("plain", length=LENGTH))
    )
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    assert widths == {(model.config.v_head_dim, model.config.qk_head_dim)}
    assert "cpu flash in 2 layers" in streambp.describe(model).attention


def test_what_is_padded_where():
    """By name on a CPU; V alone in its buffer where that is enough."""
    q, v = torch.zeros(1, 2, 3, 12), torch.zeros(1, 2, 3, 5)
    assert choose_backend("auto", q, v, 0.0).name == "math"
    assert choose_backend("flash", q, v, 0.0) == Backend((CPU_FLASH, MATH), width=12)
    assert choose_backend("flash", v, q, 0.0) == Backend((PADDED_KERNELS[CPU_FLASH], MATH))
    assert choose_backend("flash", q, q, 0.0) == Backend((CPU_FLASH, MATH))
