"""Merge two blocks' attention outputs in Triton: every element is read and written once.

torch would write the weights' products and read them again. The kernel computes the numbers of
`attend.merge_in_torch`, with which tests compare it (in Triton's interpreter without a GPU).
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None

TRITON_AVAILABLE = triton is not None
BLOCK_TOKENS = 32
NUM_WARPS = 4
MERGE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

if TRITON_AVAILABLE:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        o, lse, part, part_lse, out,
        o_row, o_token, o_head, lse_row, lse_head, lse_token,
        part_row, part_token, part_head, part_lse_row, part_lse_head, part_lse_token,
        out_row, out_token, out_head, length,
        size: tl.constexpr, width: tl.constexpr, tokens: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(2).to(tl.int64)
        head = tl.program_id(1).to(tl.int64)
        token = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
        in_row = token < length
        column = tl.arange(0, width)
        in_tensor = in_row[:, None] & (column < size)[None, :]
        lse += row * lse_row + head * lse_head + token * lse_token
        part_lse += row * part_lse_row + head * part_lse_head + token * part_lse_token
        x = tl.load(lse, mask=in_row, other=-float("inf"))
        y = tl.load(part_lse, mask=in_row, other=-float("inf"))
        top = tl.maximum(x, y)
        safe = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be NaN
        weight = tl.exp(x - safe)
        part_weight = tl.exp(y - safe)
        total = weight + part_weight
        shrink = 1.0 / tl.where(total == 0.0, 1.0, total)
        o += row * o_row + head * o_head + token[:, None] * o_token + column[None, :]
        part += row * part_row + head * part_head + token[:, None] * part_token + column[None, :]
        out += row * out_row + head * out_head + token[:, None] * out_token + column[None, :]
        a = tl.load(o, mask=in_tensor & (weight > 0.0)[:, None], other=0.0).to(tl.float32)
        b = tl.load(part, mask=in_tensor & (part_weight > 0.0)[:, None], other=0.0).to(tl.float32)
        merged = a * (weight * shrink)[:, None] + b * (part_weight * shrink)[:, None]
        tl.store(out, merged.to(out.dtype.element_ty), mask=in_tensor)
        # Each warp reads the logsumexp of its own tokens, and the first warp writes all of it: the
        # barrier waits until every warp has read.
        tl.debug_barrier()
        tl.store(lse, safe + tl.log(total), mask=in_row)


def fits_triton(*tensors: Tensor) -> bool:
    """True if `merge_in_triton` supports the device, dtypes and layout of these attention outputs,
    [b, t, H, D] each. Otherwise `merge_in_torch` merges them."""
    if not TRITON_AVAILABLE or not tensors[0].is_cuda:
        return False
    fit = all(x.is_cuda and x.dtype in MERGE_DTYPES and x.stride(3) == 1 for x in tensors)
    return fit and torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)


def merge_in_triton(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor, out: Tensor) -> None:
    """Merge two partial attention outputs of the same queries, each over some of the keys, into the
    output over all keys. One Triton kernel computes in float32, like `merge_in_torch`.

    Args:
        o: [b, t, H, D] of `MERGE_DTYPES`, the last dimension contiguous.
        lse: [b, H, t] in float32, any strides; replaced by the merged logsumexp.
        part_o: [b, t, H, D] of `MERGE_DTYPES`, the last dimension contiguous.
        part_lse: [b, H, t] in float32, any strides.
        out: [b, t, H, D] of `MERGE_DTYPES`, the last dimension contiguous; receives the result, may
            be `o`.
    """
    rows, length, heads, size = o.shape
    if not o.numel():
        return
    strides = [stride for x in (o, lse, part_o, part_lse, out) for stride in x.stride()[:3]]
    grid = (triton.cdiv(length, BLOCK_TOKENS), heads, rows)
    # Triton launches on the current device
    with torch.cuda.device(o.device) if o.is_cuda else contextlib.nullcontext():
        _kernel[grid](
            o, lse, part_o, part_lse, out, *strides, length,
            size=size, width=triton.next_power_of_2(size), tokens=BLOCK_TOKENS, num_warps=NUM_WARPS,
        )  # fmt: skip
