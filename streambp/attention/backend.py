"""Which kernels attend, and into which blocks a chunk's attention is cut for them."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from streambp.accumulate import HALF
from streambp.attention.kernels import CPU_FLASH, CUDNN, FLASH, K_BLOCK, MATH, Kernel
from streambp.attention.masks import DenseMask
from streambp.attention.spans import Block, Kind, Spans, Tiling
from streambp.chunks import Chunk
from streambp.errors import AttentionChoiceError


class Use(enum.Enum):
    """What blocks are for, which decides how many keys they have."""

    FORWARD = "forward"  # keys and values lie in one buffer
    BACKWARD = "backward"  # dK and dV come back, so they are limited
    STREAMED = "streamed"  # keys and values come to the device in tiles


@dataclasses.dataclass(frozen=True)
class Plan:
    """The blocks of a chunk, ordered by their keys. [Note: tiles]

    Args:
        kernels: of each block.
        depth: the most blocks that a query is in. complete: every query is in one.
        covers: for each block, whether all of the chunk's queries are in it.
    """

    blocks: tuple[Block, ...]
    kernels: tuple[Kernel, ...]
    depth: int
    complete: bool
    covers: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Backend:
    """Kernels in order of preference; each block goes to the first that takes it, in the shape that this one wants."""

    kernels: tuple[Kernel, ...]

    @property
    def name(self) -> str:
        """That of the preferred kernel."""
        return self.kernels[0].name

    def kernel(self, block: Block) -> Kernel:
        """The first kernel that takes the block."""
        return next(kernel for kernel in self.kernels if kernel.takes(block))

    def tiling(self, use: Use) -> Tiling:
        """The limits of blocks for this use, as the preferred kernel wants them.

        tail: the next kernel's, if the preferred one refuses short blocks. masked: those of the kernel for MASK blocks.
        """
        first, *others = (_limited(kernel.tiling, use) for kernel in self.kernels)
        masked = next(kernel for kernel in self.kernels if Kind.MASK in kernel.kinds)
        return dataclasses.replace(
            first,
            tail=others[0] if first.few is not None else None,
            masked=_limited(masked.tiling, use),
            native_window=any(tiling.native_window for tiling in (first, *others)),
            native_varlen=any(tiling.native_varlen for tiling in (first, *others)),
        )

    def plan(self, layout: Spans | DenseMask, chunk: Chunk, rows: int, use: Use) -> Plan:
        """The blocks of `rows` rows of a chunk; made once for all layers that share the layout."""
        key = (self.kernels, chunk.start, chunk.stop, use)
        if key not in layout.derived:
            layout.derived[key] = self._plan(layout, chunk, rows, use)
        plan: Plan = layout.derived[key]
        return plan

    def _plan(self, layout: Spans | DenseMask, chunk: Chunk, rows: int, use: Use) -> Plan:
        tiling = layout.derived.get((self.kernels, use)) or self.tiling(use)
        layout.derived[self.kernels, use] = tiling
        found = layout.blocks(chunk.start, chunk.stop, tiling)
        blocks = tuple(sorted(found, key=lambda block: block.k0))
        depth, covered = _depth(blocks)
        covers = tuple((b.b0, b.b1, b.q0, b.q1) == (0, rows, chunk.start, chunk.stop) for b in blocks)
        complete = covered == rows * (chunk.stop - chunk.start)
        return Plan(blocks, tuple(map(self.kernel, blocks)), depth, complete, covers)


def _limited(tiling: Tiling, use: Use) -> Tiling:
    if use is Use.FORWARD:
        return dataclasses.replace(tiling, k_block=tiling.k_forward)
    if use is Use.STREAMED:
        return dataclasses.replace(tiling, k_block=min(tiling.k_block or K_BLOCK, K_BLOCK))
    return tiling


def _depth(blocks: tuple[Block, ...]) -> tuple[int, int]:
    """The most blocks that a query is in, and how many queries of all rows are in one.

    Blocks of different groups of rows never share a query.
    """
    depth = covered = 0
    for b0, b1 in {(block.b0, block.b1) for block in blocks}:
        here = [block for block in blocks if (block.b0, block.b1) == (b0, b1)]
        edges = sorted([(block.q0, 1) for block in here] + [(block.q1, -1) for block in here])
        inside = since = 0
        for position, change in edges:
            covered += (b1 - b0) * (position - since) * (inside > 0)
            inside, since = inside + change, position
            depth = max(depth, inside)
    return depth, covered


def choose_backend(
    wanted: str, q: Tensor, v: Tensor, dropout: float, softcap: float | None = None, sink: bool = False
) -> Backend:
    """The backend for tensors like q [B, H, T, D] and v [B, H_kv, T, D_v].

    "auto" takes no kernel that torch's own attention would not take: FlashAttention and the CPU's fused kernel only where
    `torch.backends.cuda.flash_sdp_enabled()`, cuDNN only where `prefers_cudnn`. Plain products are what is left. A kernel
    that is named is taken whatever these say, but beside it none that is switched off.

    With a sink, "auto" on a CPU takes plain products for half precision: unpatched models attend eagerly there, and the
    fused kernel's backward, from an o that is rounded, has thrice the error in q and k. [Note: rounded outputs]

    Raises:
        AttentionChoiceError: the wanted backend cannot do it; "auto" never raises, "math" does everything.
    """
    if wanted == "math":
        return Backend((MATH,))
    if wanted == "auto" and sink and q.device.type == "cpu" and q.dtype in HALF:
        return Backend((MATH,))
    no_flash = next(_not_flash(q, v, dropout, softcap), None)
    no_cudnn = next(_not_cudnn(q), no_flash)
    flash_is_on = torch.backends.cuda.flash_sdp_enabled()
    if no_cudnn is None and (wanted == "cudnn" or (wanted == "auto" and prefers_cudnn(q.device))):
        return Backend((CUDNN, FLASH, MATH) if flash_is_on else (CUDNN, MATH))
    if no_flash is None and (wanted == "flash" or (wanted == "auto" and flash_is_on)):
        return Backend((CPU_FLASH if q.device.type == "cpu" else FLASH, MATH))
    if wanted == "auto":
        return Backend((MATH,))
    raise AttentionChoiceError(
        f"attention={wanted!r} cannot attend here: {no_flash if wanted == 'flash' else no_cudnn}. Set attention='auto' or "
        "'math' in StreamConfig."
    )


def _not_flash(q: Tensor, v: Tensor, dropout: float, softcap: float | None) -> Iterator[str]:
    """Why neither FlashAttention nor the CPU's fused kernel can do it."""
    size, device = q.shape[-1], q.device
    if dropout > 0.0:
        yield f"it has no dropout, and the model's is {dropout}"
    if softcap is not None:
        yield f"it has no softcap, and the model's is {softcap}"
    if size != v.shape[-1]:
        yield f"queries and keys have head size {size}, values {v.shape[-1]}; it needs one head size"
    if device.type == "cpu":
        return
    if device.type not in ("cuda", "meta"):
        yield f"it does not run on {device.type}"
    if q.dtype not in HALF:
        yield f"it computes in float16 and bfloat16, and the model attends in {str(q.dtype).removeprefix('torch.')}"
    if size % 8 or size > 256:
        yield f"the head size is {size}; it must be a multiple of 8 and at most 256"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            yield f"the device has compute capability {capability}; it needs (8, 0)"
        if 192 < size <= 224 and (capability in ((8, 6), (8, 9)) or capability >= (12, 0)):
            yield f"it has no backward for head size {size} on compute capability {capability}"


def _not_cudnn(q: Tensor) -> Iterator[str]:
    """Why cuDNN cannot do it although FlashAttention can, which takes what is left over of its blocks."""
    if q.device.type != "cuda":
        yield f"cuDNN does not run on {q.device.type}"
    elif torch.version.hip is not None:
        yield "torch was built for ROCm, which has no cuDNN"
    elif torch.cuda.get_device_capability(q.device) < (9, 0):
        yield f"cuDNN's attention needs compute capability (9, 0), not {torch.cuda.get_device_capability(q.device)}"
    elif not torch.backends.cudnn.is_available():
        yield "torch was built without cuDNN"
    if q.shape[-1] > 128:
        yield f"the head size is {q.shape[-1]}; cuDNN's attention has at most 128"
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield "cuDNN's attention is not deterministic, and torch.use_deterministic_algorithms(True) asks for what is"


def prefers_cudnn(device: torch.device) -> bool:
    """Whether torch's own attention takes cuDNN before FlashAttention on a CUDA device.

    That is `check_prefer_cudnn_attention` of ATen/native/transformers/cuda/sdp_utils.cpp, with the switch
    `torch.backends.cuda.cudnn_sdp_enabled()`: compute capability 9.0, 9.3, 10.0 or 10.3 (torch 2.13 built for CUDA 13 takes
    any 9.x and 10.x; there are no others), cuDNN's runtime newer than 9.15.0, and TORCH_CUDNN_SDPA_DEPRIORITIZED not 1.
    On 8.x and 12.x FlashAttention is as fast or faster.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and major in (9, 10)
        and minor in (0, 3)
        and (torch.backends.cudnn.version() or 0) > 91500
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )
