"""Which kernels attend, and into which blocks a chunk's attention is cut for them; what torch's own
attention would do."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import operator
import os
import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from streambp.accumulate import HALF
from streambp.attention.kernels import (
    CPU_FLASH,
    CUDNN,
    FLASH,
    K_BLOCK,
    MATH,
    SQUARE_FLASH,
    WINDOWLESS_FLASH,
    CpuFlashKernel,
    FlashKernel,
    Kernel,
)
from streambp.attention.kernels_wide import EFFICIENT, PADDED
from streambp.attention.masks import DenseMask
from streambp.attention.rules import (
    AttentionShape,
    Platform,
    Version,
    prefers_cudnn,
    why_not_cudnn,
    why_not_efficient,
    why_not_flash,
)
from streambp.attention.spans import Block, Kind, Spans, Tiling
from streambp.chunks import Chunk
from streambp.device import has_data
from streambp.errors import AttentionChoiceError


class Use(enum.Enum):
    """What blocks are for, which decides how many keys they have."""

    FORWARD = "forward"  # keys and values lie in one buffer
    BACKWARD = "backward"  # dK and dV come back, so they are limited
    STREAMED = "streamed"  # keys and values come to the device in tiles


class Used(NamedTuple):
    """That a kernel, by its name, attends blocks of a kind. because: why there was no other one to
    choose."""

    kernel: str
    kind: Kind
    because: str


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The blocks of a chunk, ordered by their keys. [Note: tiles]

    Args:
        kernels: of each block.
        depth: the most blocks that a query is in. complete: every query is in one.
        covers: for each block, whether all of the chunk's queries are in it.
        by_place: what is read in a block follows from where it is, without a tile or the ends of
            documents.
        all_read: each query reads some key of the first block, and of each other one that it is in.
        used: what attends which kinds of blocks.
    """

    blocks: tuple[Block, ...]
    kernels: tuple[Kernel, ...]
    depth: int
    complete: bool
    covers: tuple[bool, ...]
    by_place: bool = False
    all_read: bool = False
    used: frozenset[Used] = frozenset()


@dataclasses.dataclass(frozen=True)
class Backend:
    """Kernels in order of preference; each block goes to the first that takes it, in the shape that
    this one wants.

    Args:
        width: columns of V in its buffer, more than D_v; None: as many. [Note: padded values]
        because: why plain products are the only kernel; "" if they are not.
    """

    kernels: tuple[Kernel, ...]
    width: int | None = None
    because: str = ""

    @property
    def name(self) -> str:
        """That of the preferred kernel."""
        return self.kernels[0].name

    def kernel(self, block: Block) -> Kernel:
        """The first kernel that takes the block."""
        for kernel in self.kernels[:-1]:
            if kernel.takes(block):
                return kernel
        return self.kernels[-1]  # plain products take what others leave over

    def tiling(self, use: Use) -> Tiling:
        """The limits of blocks for this use, as the preferred kernel wants them.

        tail: the next kernel's, if the preferred one refuses short blocks. masked: those of the
        kernel for MASK blocks.
        """
        limited, masked, native_window, native_varlen = list[Tiling](), None, False, False
        for kernel in self.kernels:
            tiling, most = kernel.tiling, kernel.tiling.k_block
            if use is not Use.BACKWARD:
                most = tiling.k_forward if use is Use.FORWARD else min(most or K_BLOCK, K_BLOCK)
            limited.append(
                tiling if most == tiling.k_block else dataclasses.replace(tiling, k_block=most)
            )
            masked = masked or (limited[-1] if Kind.MASK in kernel.kinds else None)
            native_window, native_varlen = (
                native_window or tiling.native_window,
                native_varlen or tiling.native_varlen,
            )
        first, tail = limited[0], limited[1] if limited[0].few is not None else None
        return dataclasses.replace(
            first,
            tail=tail,
            masked=masked,
            native_window=native_window,
            native_varlen=native_varlen,
        )

    def plan(self, layout: Spans | DenseMask, chunk: Chunk, rows: int, use: Use) -> BlockPlan:
        """The blocks of `rows` rows of a chunk; made once for all layers that share the layout."""
        key = (self, chunk.start, chunk.stop, use)
        plan: BlockPlan | None = layout.derived.get(key)
        if plan is not None:
            return plan
        tiling: Tiling | None = layout.derived.get((self.kernels, use))
        if tiling is None:
            tiling = layout.derived[self.kernels, use] = self.tiling(use)
        blocks = tuple(
            sorted(layout.blocks(chunk.start, chunk.stop, tiling), key=operator.attrgetter("k0"))
        )
        whole = 0, rows, chunk.start, chunk.stop
        kernels, covers, kinds, used = list[Kernel](), list[bool](), set[Kind](), set[Used]()
        for block in blocks:
            kernel = self.kernel(block)
            kernels.append(kernel)
            covers.append((block.b0, block.b1, block.q0, block.q1) == whole)
            kinds.add(block.kind)
            used.add(Used(kernel.name, block.kind, self.because))
        depth, covered = (
            (len(blocks), rows * (chunk.stop - chunk.start))
            if blocks and all(covers)
            else _depth(blocks)
        )
        plan = layout.derived[key] = BlockPlan(
            blocks,
            tuple(kernels),
            depth,
            complete=covered == rows * (chunk.stop - chunk.start),
            covers=tuple(covers),
            by_place=kinds.isdisjoint((Kind.MASK, Kind.VARLEN)),
            all_read=any(covers[:1]) and kinds <= {Kind.FULL, Kind.CAUSAL},
            used=frozenset(used),
        )
        return plan


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


FLASH_4 = "flash-attn-4"  # the package of FlashAttention-4


def platform_of(device: torch.device) -> Platform:
    """The platform of a device in this process, now: switches change at any time."""
    switches = torch.backends.cuda
    flash_on = switches.flash_sdp_enabled()
    version = _numbers(torch.__version__)[:2]
    if device.type != "cuda":
        return Platform(device.type, torch=version, flash_on=flash_on)
    flash = current_flash_attention_impl()
    flash_4: Version = ()
    if flash is not None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            flash_4 = _numbers(importlib.metadata.version(FLASH_4))
    return Platform(
        "cuda",
        torch.cuda.get_device_capability(device),
        (torch.backends.cudnn.version() or 0) if torch.backends.cudnn.is_available() else 0,
        version,
        torch.version.hip is not None,
        flash,
        flash_4,
        switches.cudnn_sdp_enabled(),
        flash_on,
        switches.mem_efficient_sdp_enabled(),
        os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1",
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@functools.lru_cache
def _numbers(version: str) -> Version:
    """(4, 0, 0, 18) of "4.0.0b18", (2, 13, 0) of "2.13.0+cu130"; a pre-release has one number more
    than its release."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def choose_backend(
    wanted: str,
    q: Tensor,
    v: Tensor,
    dropout: float,
    softcap: float | None = None,
    sink: bool = False,
    platform: Platform | None = None,
) -> Backend:
    """The backend for tensors like q [B, H, T, D] and v [B, H_kv, T, D_v].

    "auto" takes no kernel that torch's own attention would not take: cuDNN only where
    `prefers_cudnn`, FlashAttention and the CPU's fused kernel only where
    `torch.backends.cuda.flash_sdp_enabled()`, memory-efficient attention where these cannot, if it
    is on. Plain products are what is left. A kernel that is named is taken whatever these say, but
    beside it none that is switched off.

    With a sink, "auto" on a CPU takes plain products for half precision: unpatched models attend
    eagerly there, and the fused kernel's backward, from an o that is rounded, has thrice the error
    in q and k. [Note: rounded outputs] With D_v != D it takes plain products on a CPU, too, as
    torch does; "flash" pads there as on CUDA.

    Args:
        platform: what the rules ask about; None: what `platform_of` finds for q's device now.

    Raises:
        AttentionChoiceError: the wanted backend cannot do it; "auto" never raises, "math" does
            everything.
    """
    if wanted == "math":
        return PLAIN_PRODUCTS
    here = platform_of(q.device) if platform is None else platform
    return _chosen(
        wanted, AttentionShape(q.shape[-1], v.shape[-1], q.dtype, dropout, softcap), sink, here
    )


PLAIN_PRODUCTS = Backend((MATH,), because="attention='math'")


@functools.lru_cache
def _chosen(wanted: str, call: AttentionShape, sink: bool, here: Platform) -> Backend:
    if wanted == "auto" and here.device == "cpu" and sink and call.dtype in HALF:
        return Backend((MATH,), because="attention sinks in half precision on a CPU")
    no_flash, no_cudnn = (
        next(why_not_flash(call, here), None),
        next(why_not_cudnn(call, here), None),
    )
    if (
        no_flash is None
        and wanted == "auto"
        and here.device == "cpu"
        and call.size != call.value_size
    ):
        no_flash = f"queries and keys have head size {call.size}, values {call.value_size}"
    flash = no_flash is None and here.flash_on
    efficient = here.efficient_on and next(why_not_efficient(call, here), None) is None
    kernel: FlashKernel | CpuFlashKernel = FLASH
    if here.device == "cpu":
        kernel = CPU_FLASH
    elif here.hip:
        kernel = SQUARE_FLASH
    elif here.flash == "FA4" and here.torch < (
        2,
        12,
    ):  # whose operators raise in a window's backward
        kernel = WINDOWLESS_FLASH
    square = call.pair == (call.padded, call.padded)
    if no_cudnn is None and (wanted == "cudnn" or (wanted == "auto" and prefers_cudnn(here))):
        left_over: Kernel = EFFICIENT if efficient else MATH
        if flash:
            left_over = kernel if square else PADDED[kernel]
        return Backend(tuple(dict.fromkeys((CUDNN, left_over, MATH))))
    if no_flash is None and (wanted == "flash" or (wanted == "auto" and flash)):
        if square or (here.device == "cpu" and call.size == call.value_size):
            return Backend((kernel, MATH))
        if call.value_size < call.size and (call.size == call.padded or here.device == "cpu"):
            # V is padded in its buffer. [Note: padded values]
            return Backend((kernel, MATH), width=call.size)
        return Backend((PADDED[kernel], MATH))
    if wanted == "auto":
        switched_off = None if here.flash_on else "FlashAttention is switched off"
        because = f"FlashAttention cannot: {no_flash}" if no_flash else switched_off or ""
        return Backend((EFFICIENT, MATH)) if efficient else Backend((MATH,), because=because)
    raise AttentionChoiceError(
        f"attention={wanted!r} cannot attend here: {no_flash if wanted == 'flash' else no_cudnn}. "
        "Set attention='auto' or 'math' in StreamConfig."
    )


@dataclasses.dataclass(frozen=True)
class AsSdpa:
    """A layer's attention calls, unpatched and with transformers' sdpa.

    same: it computes what streamed attention computes; it knows no softcap and no sinks. heads: so
    many have their scores [B, H, T, T] built, because no fused kernel takes the call; 0: none.
    """

    same: bool = True
    heads: int = 0

    def with_call(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, same: bool) -> AsSdpa:
        """With one more, of q [B, H, C, D], k [B, H_kv, C, D] and v [B, H_kv, C, D_v], as many
        queries as keys."""
        grouped = q.shape[1] != k.shape[1]
        fused = not has_data(q) or torch._fused_sdp_choice(
            q, k, v, None, dropout, True, enable_gqa=grouped
        )
        return AsSdpa(self.same and same, self.heads if fused else max(self.heads, q.shape[1]))
