"""Attention's kernels and the sums of weight gradients, one by one: `python tests/gpu/op_rows.py
[--row NAME]`.

1. Attention of random q, k, v over four chunks, forward and backward, as streamed layers call it,
   for each kernel that `StreamConfig` can name, kind of spans and head size, with 1 and 4 query
   heads for a key head, and 1 and 2 rows. Rows are named "plain cudnn 128", "window flash 192/128"
   and so on; "low" are plain spans whose scores lie about -120. Two errors are judged: that of the
   whole, in units of torch's own attention in one call, and that of each kernel on each kind of
   block, in units of what rounding costs (`tests/gpu/watched_kernels.py`). A preferred kernel that
   did not run fails its row; a kernel that refuses the head size is printed with its reason.
2. Sums of weight gradients ("sum layer", "sum head"): TFLOP/s of the product that adds to a float32
   sum, beside those of a plain product, and its error against float32.

Exit code 0 if every row passes, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the
same code on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from paper_repro.rows import Deadline, Result, each
from streambp.accumulate import add_product
from streambp.attention.attend import SpansOrMask
from streambp.attention.prefix import AttentionCall, Prefix, PrefixChunkAttention, Stage
from streambp.attention.spans import Block, BlockKind, QueryRun, Spans
from streambp.chunks import ChunkPlan
from streambp.config import StreamConfig
from streambp.errors import AttentionChoiceError
from tests.gpu import script
from tests.gpu.report import backends
from tests.gpu.script import failed
from tests.gpu.watched_kernels import KernelErrors, Sums, counts, watching
from tests.seeds import seeded

SIZES = {str(size): (size, size) for size in (128, 64, 80, 96, 192, 256)} | {
    "192/128": (192, 128),
    "512": (512, 512),
}
SPAN_CASES = ("plain", "low", "window", "packed")
DOCUMENTS = (0.1, 0.3, 0.303, 0.5, 0.95)  # where they end, of the length
HEADS = 4
MAX_HEAD_SIZE = 256  # features of a head that cuDNN and FlashAttention take
GRADS = ("dq", "dk", "dv")
# A block's result is rounded, and their sum again: at most sqrt(2) times the error of one rounding.
WHOLE_BAR, KERNEL_BAR = 1.5, 2.0
# Over how many draws the errors of the whole are summed, ours and torch's. Low scores have q and k
# of one sign each: the error of dk is then about one random number for each key head, and in 6 % of
# draws two of them are too far apart.
DRAW_COUNTS = {"low": 16}
SUM_BAR = 1e-4  # a sum of products in float32; one that was rounded to half precision is 1e-3 off
# elsewhere products are rounded before they are added.
AUTOCAST_DEVICES = ("cpu", "cuda")
Tensors = dict[str, Tensor]


def report(args: argparse.Namespace) -> Iterator[Result]:
    names = (
        get_args(get_type_hints(StreamConfig)["attention"])
        if args.device == "cuda"
        else backends(args.device)
    )
    rows: list[tuple[str, Callable[[], Result]]] = [
        (
            f"{spans} {attention} {size}",
            functools.partial(attention_row, spans, attention, size, args),
        )
        for size, spans, attention in itertools.product(SIZES, SPAN_CASES, names)
    ]
    rows += [(name, functools.partial(sum_row, name, args)) for name in SUMS]
    yield (
        f"{'row':<24}whole: o, dq, dk, dv in units of torch's error; then each kernel's worst, "
        "and its lse",
        True,
    )
    yield from each(rows, args.row, Deadline(args.minutes))


def attention_row(spans: str, attention: str, size: str, args: argparse.Namespace) -> Result:
    name = f"{spans} {attention} {size}"
    record, ratios = KernelErrors(), dict.fromkeys(("o", *GRADS), 0.0)
    for groups, rows in itertools.product((1, 4), (1, 2)):
        chunk_size = 40 if args.tiny else 2048
        length = 3 * chunk_size + (7 if args.tiny else 77)
        layout = layout_of(spans, rows, length)
        mask = whole_mask(layout, length, args.device)
        errors = {tensor: Sums() for tensor in ratios}
        for draw in range(DRAW_COUNTS.get(spans, 1)):
            tensors = make(spans, rows, groups, length, SIZES[size], args.device, draw)
            try:
                with watching(record) if draw == 0 else contextlib.nullcontext():
                    ours = in_chunks(tensors, layout, ChunkPlan(length, chunk_size), attention)
            except AttentionChoiceError as error:
                return f"{name:<24}refused: {error}", True
            stock, truth = (
                attend_at_once(tensors, mask, dtype) for dtype in (torch.bfloat16, torch.float32)
            )
            for tensor, sums in errors.items():
                sums.add(ours[tensor], truth[tensor], stock[tensor])
        ratios = {tensor: worse(ratio, errors[tensor].ratio) for tensor, ratio in ratios.items()}
    problems = problems_of(spans, ratios, record)
    text = " ".join(f"{ratio:.2f}" for ratio in ratios.values())
    return f"{name:<24}{text}   {kernels_text(record)}{failed(problems)}", not problems


def worse(a: float, b: float) -> float:
    """The larger; no number is worse than any."""
    return b if math.isnan(b) or b > a else a


def problems_of(spans: str, ratios: dict[str, float], record: KernelErrors) -> list[str]:
    """What is not as it should be. A preferred kernel has to attend plain spans; others may be
    another's work."""
    problems = [
        f"{name} is {ratio:.2f} x as far off as one call"
        for name, ratio in ratios.items()
        if not ratio <= WHOLE_BAR
    ]
    for (kernel, kind, tensor), sums in record.errors.items():
        if not sums.ratio <= KERNEL_BAR:
            problems.append(
                f"{tensor} of {kernel} on {kind} blocks is {sums.ratio:.2f} x what rounding costs"
            )
    # of lse: a weight's relative error, a quarter of its rounding
    bar = torch.finfo(torch.bfloat16).eps / 8
    problems += [f"lse of {kernel} on {kind} blocks is {error:.1e} off" for (kernel, kind), error in record.lse.items()
                 if not error <= bar]  # fmt: skip
    if spans in ("plain", "low"):
        problems += [
            f"{kernel} did not run" for kernel in sorted(record.preferred - record.kernels)
        ]
    return problems


def kernels_text(record: KernelErrors) -> str:
    """ "cudnn full 1.10, causal 1.02, lse 1e-06; flash full ..." """
    texts = []
    for kernel, kind in record.lse:
        ratios = (s.ratio for (a, b, _), s in record.errors.items() if (a, b) == (kernel, kind))
        texts.append(
            f"{kernel} {kind} {functools.reduce(worse, ratios, 0.0):.2f}, lse "
            f"{record.lse[kernel, kind]:.0e}"
        )
    return "; ".join(texts)


def make(
    spans: str,
    rows: int,
    groups: int,
    length: int,
    sizes: tuple[int, int],
    device: str,
    draw: int = 0,
) -> Tensors:
    """q, k, v, do [B, H, T, D] in bfloat16."""
    generator = seeded(17 + draw)
    shapes = {
        "q": (HEADS, sizes[0]),
        "k": (HEADS // groups, sizes[0]),
        "v": (HEADS // groups, sizes[1]),
    }
    shapes["do"] = (HEADS, sizes[1])
    tensors = {
        name: torch.randn(rows, heads, length, size, generator=generator)
        for name, (heads, size) in shapes.items()
    }
    if spans == "low":
        shift = (
            120 / sizes[0] ** 0.5
        ) ** 0.5  # q . k is 120 x sqrt(D) less, and the scale is 1 / sqrt(D)
        tensors["q"] += shift
        tensors["k"] -= shift
    return {name: x.to(device, torch.bfloat16) for name, x in tensors.items()}


def layout_of(spans: str, rows: int, length: int) -> Spans:
    """The window is longer than a chunk; documents end in chunks, soon after each other, and go
    over several."""
    if spans == "packed":
        ends = [0, *(int(part * length) for part in DOCUMENTS), length]
        runs = tuple(QueryRun(a, b, a) for a, b in itertools.pairwise(dict.fromkeys(ends)))
        return Spans(length, (runs,) * rows)
    return Spans.causal(rows, length, length // 2 if spans == "window" else None)


def in_chunks(tensors: Tensors, layout: SpansOrMask, plan: ChunkPlan, attention: str) -> Tensors:
    """o [B, H, T, D_v], dq, dk and dv, as a streamed layer makes them: attended, then attended
    again and differentiated."""
    prefix = Prefix(layout, plan.length, attention)
    q, k, v = (tensors[name] for name in "qkv")
    scale = q.shape[-1] ** -0.5
    parts, grads = [], []
    for chunk in plan:
        mask = PrefixChunkAttention(prefix, chunk, Stage.FORWARD)
        tokens = slice(chunk.start, chunk.stop)
        parts.append(
            mask.attend(
                AttentionCall(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], scale)
            ).transpose(1, 2)
        )
        mask.finish()
    for chunk in reversed(plan.chunks):
        tokens = slice(chunk.start, chunk.stop)
        chunk_inputs = [x[:, :, tokens].detach().requires_grad_() for x in (q, k, v)]
        o = PrefixChunkAttention(prefix, chunk, Stage.RECOMPUTE).attend(
            AttentionCall(*chunk_inputs, scale)
        )
        grads.append(
            torch.autograd.grad(o, chunk_inputs, tensors["do"][:, :, tokens].transpose(1, 2))
        )
    grads_by_name = {
        name: torch.cat(list(reversed(of)), 2)
        for name, of in zip(GRADS, zip(*grads, strict=True), strict=True)
    }
    return {"o": torch.cat(parts, 2), **grads_by_name}


def whole_mask(layout: Spans, length: int, device: str) -> Tensor | None:
    """bool [T, T]; None for plain causal."""
    if layout.window is None and len(layout.rows[0]) == 1:
        return None
    mask = counts(
        Block(BlockKind.CAUSAL, 0, 1, 0, length, 0, length, layout.window), torch.device(device)
    )
    documents = torch.zeros_like(mask)
    for run in layout.rows[0]:
        documents[run.q0 : run.q1, run.k0 : run.q1] = True
    return mask & documents


def attend_at_once(tensors: Tensors, mask: Tensor | None, dtype: torch.dtype) -> Tensors:
    """o, dq, dk and dv by torch's attention in one call; in float32 by its plain products.

    Of heads that its memory-efficient kernel alone takes, the keys are repeated, as transformers
    does with a mask: a call with fewer of them would be plain products, in float32 inside, which no
    fused kernel is as near to the truth as.
    """
    leaves = [tensors[name].to(dtype).requires_grad_() for name in "qkv"]
    q, k, v = leaves
    if dtype != torch.float32 and q.shape[-1] > MAX_HEAD_SIZE:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    kinds = [torch.nn.attention.SDPBackend.MATH] if dtype == torch.float32 else list(DEFAULT)
    with torch.nn.attention.sdpa_kernel(kinds):
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] < q.shape[1]
        )
    grads = torch.autograd.grad(o, leaves, tensors["do"].to(dtype))
    return {"o": o.detach(), **dict(zip(GRADS, grads, strict=True))}


DEFAULT = (
    torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION, torch.nn.attention.SDPBackend.MATH,
)  # fmt: skip

# [out, in, tokens] of a weight's gradient; those of a layer, and of a head of 151,936 entries.
SUMS = {"sum layer": (12288, 4096, 8192), "sum head": (151936, 4096, 1664)}


def sum_row(name: str, args: argparse.Namespace) -> Result:
    outs, ins, tokens = (64, 48, 40) if args.tiny else SUMS[name]
    generator = seeded(3)
    grad, x = (
        torch.randn(tokens, size, generator=generator).to(args.device, torch.bfloat16)
        for size in (outs, ins)
    )
    first_sum = add_product(None, grad.mT, x)
    total = add_product(first_sum.clone(), grad.mT, x)
    truth = grad.float().mT @ x.float()
    error = float((total - 2 * truth).norm() / (2 * truth).norm())
    dtypes = f"{total.dtype}".removeprefix("torch.")
    work = 2.0 * outs * ins * tokens
    plain = work / seconds(lambda: grad.mT @ x, args) / 1e12
    summed = work / seconds(lambda: add_product(total, grad.mT, x), args) / 1e12
    bar = SUM_BAR if args.device in AUTOCAST_DEVICES else torch.finfo(torch.bfloat16).eps
    problems = [f"error {error:.1e}"] * (not error <= bar) + [f"the sum is {dtypes}"] * (
        total.dtype != torch.float32
    )
    text = (
        f"{summed:8.2f} TFLOP/s into a float32 sum, {plain:8.2f} alone, {plain / summed:.2f} x, "
        f"error {error:.1e}"
    )
    return f"{name:<24}{text}{failed(problems)}", not problems


def seconds(run: Callable[[], object], args: argparse.Namespace) -> float:
    """Of one call, from ten after two."""
    for count in (2, 10):
        wait(args.device)
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait(args.device)
    return (time.perf_counter() - start) / 10


def wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report))
