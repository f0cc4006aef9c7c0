"""Merged outputs and summed gradients; the Triton kernel against torch, in Triton's interpreter,
and compiled.

covers: attention/backend.py, attention/kernels.py, attention/attend.py, attention/spans.py,
  attention/triton_merge.py, chunks.py
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import torch

from streambp.attention import triton_merge
from streambp.attention.attend import MergedOutput, QueryGradientSum, merge, merge_in_torch
from streambp.attention.backend import Backend, BlockPurpose
from streambp.attention.kernels import CPU_FLASH, MATH
from streambp.attention.spans import Block, BlockKind, Spans
from streambp.chunks import Chunk, ChunkPlan
from tests.seeds import seeded

needs_triton = pytest.mark.skipif(
    not triton_merge.TRITON_AVAILABLE, reason="triton is not installed"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def parts(shape, dtype, generator, device="cpu"):
    """o [b, t, H, D] and lse [b, H, t], as parts of larger tensors; some queries have read
    nothing."""
    rows, length, heads, size = shape
    wide = torch.randn(rows, length + 3, heads, size, generator=generator).to(device, dtype)
    lse = torch.randn(rows, heads, length + 3, generator=generator).to(device) * 30
    lse[:, :, 4:9] = -torch.inf
    return wide[:, 2:-1], lse[:, :, 1:-2]


def compare(device="cpu"):
    """Over dtypes, sizes, layouts, in place or not; where nothing was read before, o may hold
    anything."""
    generator = seeded(0)
    for dtype, out_dtype in ((d, o) for d in DTYPES for o in (d, torch.float32)):
        for shape in ((1, 70, 2, 128), (2, 33, 3, 40), (1, 1, 1, 8)):
            (o, lse), (part, part_lse) = (parts(shape, dtype, generator, device) for _ in "ab")
            part_lse[:, :, :2] = -torch.inf
            part = part.transpose(1, 2).contiguous().transpose(1, 2)  # another layout
            o = torch.where((lse == -torch.inf).transpose(1, 2)[..., None], torch.nan, o)
            expected, expected_lse = torch.empty(shape, dtype=out_dtype, device=device), lse.clone()
            merge_in_torch(o, expected_lse, part, part_lse, expected)
            merged, merged_lse = (
                o if out_dtype == dtype else torch.full_like(expected, torch.nan),
                lse.clone(),
            )
            triton_merge.merge_in_triton(o, merged_lse, part, part_lse, merged)
            rtol = 2e-6 if out_dtype == torch.float32 else 2 * torch.finfo(out_dtype).eps
            # torch's weights are exp(an lse - the sum's): its last place is a relative error of o,
            # 4e-6 at 100.
            lse_rounding = (
                expected_lse.nan_to_num(neginf=0.0).abs() * torch.finfo(torch.float32).eps
            )
            error, allowed = (
                (merged - expected).abs(),
                2e-6 + (rtol + lse_rounding.mT.unsqueeze(-1)) * expected.abs(),
            )
            assert (error <= allowed).all(), (
                f"{shape}, {dtype}, {out_dtype}: {(error - allowed).max():.1e} too far off"
            )
            torch.testing.assert_close(merged_lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_read_parts_have_the_same_bits():
    """In half the operations; without the queries that read nothing."""
    generator = seeded(0)
    for dtype, out_dtype in (
        (d, o) for d in (*DTYPES, torch.float64) for o in (d, torch.promote_types(d, torch.float32))
    ):
        (o, lse), (part, part_lse) = (parts((2, 65, 3, 16), dtype, generator) for _ in "ab")
        lse, part_lse = (
            x.masked_fill(x == -torch.inf, 7.0).to(torch.promote_types(dtype, torch.float32))
            for x in (lse, part_lse)
        )
        expected, merged = (torch.empty((2, 65, 3, 16), dtype=out_dtype) for _ in "ab")
        lse_copy = lse.clone()
        merge_in_torch(o, lse, part, part_lse, expected)
        merge_in_torch(o, lse_copy, part, part_lse, merged, all_read=True)
        assert torch.equal(merged.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(lse_copy, lse)


@pytest.mark.gpu
def test_on_a_gpu():
    compare("cuda")


def compiled(architecture, dtype, out_dtype):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"o": dtype, "lse": "fp32", "part": "bf16", "part_lse": "fp32", "out": out_dtype}
    constants = {"size": 128, "width": 128, "tokens": triton_merge.BLOCK_TOKENS}
    names = triton_merge._kernel.arg_names
    signature = {name: f"*{pointers[name]}" if name in pointers else "i32" for name in names}
    signature.update(dict.fromkeys(constants, "constexpr"))
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants
    }
    source = ASTSource(
        triton_merge._kernel,
        signature,
        {(names.index(k),): v for k, v in constants.items()},
        aligned,
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": triton_merge.NUM_WARPS})


DTYPES_ON_A_GPU = [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")]


@pytest.mark.fast("fp32-bf16-80")
@needs_triton
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES_ON_A_GPU)
def test_compiles_without_a_device(architecture, dtype, out_dtype, tmp_path):
    import triton

    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled(architecture, dtype, out_dtype).asm["cubin"])
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    usage = subprocess.run(
        [tool, "--dump-resource-usage", str(binary)], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = (
        int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK")
    )
    assert registers <= 72
    assert stack == 0, "it spills"


@needs_triton
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES_ON_A_GPU)
def test_no_warp_writes_a_logsumexp_that_another_has_still_to_read(dtype, out_dtype):
    """The compiler gives each warp its own tokens to read and the first warp all to write: between
    them all warps wait.

    The interpreter runs a program as one thread, so that this cannot be seen in its numbers.
    """
    kernel = compiled(90, dtype, out_dtype).asm["ptx"]
    order = re.findall(r"ld\.global|st\.global|bar\.sync", kernel)
    *earlier_operations, last = order
    assert last == "st.global"
    waits = max(
        (i for i, operation in enumerate(earlier_operations) if operation == "bar.sync"), default=0
    )
    assert "ld.global" in earlier_operations
    assert "ld.global" not in earlier_operations[waits:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "backend", [Backend((CPU_FLASH, MATH)), Backend((MATH,))], ids=["cpu flash", "math"]
)
def test_sums_of_a_chunk_hold_what_its_blocks_gave(backend, dtype):
    """Blocks that cover the chunk and blocks that do not, in float64 and rounded once or twice in
    half precision."""
    generator = seeded(0)
    layouts = (
        Spans.causal(2, 40),
        Spans.causal(2, 40, window=5),
        Spans(40, (Spans.causal(1, 40).rows[0], ())),
    )
    for layout in layouts:
        for chunk in ChunkPlan(40, 15):
            plan = backend.plan(layout, chunk, 2, BlockPurpose.BACKWARD)
            shape = (2, chunk.stop - chunk.start, 3, 8)
            q = torch.empty(shape, dtype=dtype)
            merged, summed = MergedOutput(q, 8, plan, chunk), QueryGradientSum(q, plan, chunk)
            weights, total = (
                torch.zeros(2, 3, shape[1], 1).double(),
                torch.zeros(2, 3, shape[1], 8).double(),
            )
            expected = total.clone()
            for number, block in enumerate(plan.blocks):
                region = (
                    slice(block.b0, block.b1),
                    slice(None),
                    slice(block.q0 - chunk.start, block.q1 - chunk.start),
                )
                o, dq = (
                    torch.randn(total[region].shape, generator=generator).to(dtype) for _ in "ab"
                )
                lse = torch.randn(o.shape[:3], generator=generator).to(
                    torch.promote_types(dtype, torch.float32)
                )
                weight = lse.double().exp()[..., None]
                weights[region], total[region] = (
                    weights[region] + weight,
                    total[region] + weight * o.double(),
                )
                expected[region] += dq.double()
                merged.add(number, o, lse)
                summed.add(number, dq)
            bound = (
                {"rtol": 1e-12, "atol": 1e-12}
                if dtype == torch.float64
                else {"rtol": 0.01, "atol": 0.02}
            )
            attended = merged.result()
            assert attended.o.is_contiguous()
            assert attended.o.dtype == summed.result().dtype == dtype
            expected_output = torch.where(weights > 0, total / weights, 0.0).transpose(1, 2)
            torch.testing.assert_close(attended.o.double(), expected_output, **bound)
            torch.testing.assert_close(
                attended.lse.double(), weights.log()[..., 0], rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(summed.result().double(), expected, **bound)


def test_nothing_read_at_all():
    """-inf and -inf: o = 0, not NaN, whatever was there before."""
    o, lse = torch.full((1, 2, 3, 4), torch.nan), torch.full((1, 3, 2), -torch.inf)
    merge(o, lse, torch.zeros_like(o), lse.clone(), o)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


class PartialFirst:
    """A layout whose first block has some of the queries alone, and whose second has them all."""

    def __init__(self):
        self.caches = {}

    def blocks(self, start, stop, tiling):
        yield Block(BlockKind.FULL, 0, 2, start, stop - 1, 0, 2)
        yield Block(BlockKind.FULL, 0, 2, start, stop, 2, 4)


def test_a_first_block_without_some_queries_leaves_rows_that_read_nothing():
    plan = Backend((MATH,)).plan(PartialFirst(), Chunk(0, 4, 8), 2, BlockPurpose.FORWARD)
    assert (plan.covers, plan.complete, plan.all_read) == ((False, True), True, False)
    assert (
        Backend((MATH,)).plan(Spans.causal(2, 8), Chunk(0, 4, 8), 2, BlockPurpose.FORWARD).all_read
    )
