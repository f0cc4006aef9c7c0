"""Choose the kernels that compute attention. Cut the attention of a chunk into blocks, rectangles
of queries and keys that one kernel call computes. Predict which kernel torch's own attention would
choose."""

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

from streambp.accumulate import HALF_DTYPES
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
from streambp.attention.kernels_wide import EFFICIENT, PADDED_KERNELS
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
from streambp.attention.spans import Block, BlockKind, Spans, Tiling
from streambp.chunks import Chunk
from streambp.device import has_data
from streambp.errors import AttentionChoiceError


class BlockPurpose(enum.Enum):
    """Purpose of a block (a rectangle of queries and keys), which limits the number of its keys.

    FORWARD: the output is computed, from K and V of all chunks in one buffer on the device.
    BACKWARD: dK and dV of the block's keys are returned, so a block may have fewer keys than in
    FORWARD. TILED: K and V are copied to the device chunk by chunk, in forward and in backward.
    """

    FORWARD = "forward"  # keys and values lie in one buffer
    BACKWARD = "backward"  # limited, because dK and dV are returned, too
    TILED = "streamed"  # keys and values reach the device in tiles


class KernelUse(NamedTuple):
    """Kernel that computed blocks (rectangles of queries and keys) of one kind in a layer's last
    call. `describe` prints these kernels.

    Attributes:
        kernel: name of the kernel.
        kind: rule for the pairs within a block in which the query reads the key, such as CAUSAL or
            MASK.
        reason: reason why plain matrix products are the only kernel; "" otherwise.
    """

    kernel: str
    kind: BlockKind
    reason: str


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Blocks that together compute a chunk's attention, in the order of their first keys. A block
    is a rectangle of queries and keys, computed by one kernel call.

    Attributes:
        blocks: the blocks.
        kernels: the attention kernel of each block.
        depth: largest number of blocks that contain the same query.
        complete: True if every query is in a block.
        covers: True for each block that contains all of the chunk's queries.
        by_place: True if the positions alone decide which keys of a block each query reads. False
            if a block needs a mask tensor or document boundaries (cu_seqlens).
        all_read: True if each query reads a key in the first block, and in every other block that
            contains the query.
        kernel_uses: (kernel, kind of block, reason) of the blocks, without duplicates, for reports.
    """

    blocks: tuple[Block, ...]
    kernels: tuple[Kernel, ...]
    depth: int
    complete: bool
    covers: tuple[bool, ...]
    by_place: bool = False
    all_read: bool = False
    kernel_uses: frozenset[KernelUse] = frozenset()


@dataclasses.dataclass(frozen=True)
class Backend:
    """Attention kernels in order of preference. Each block (a rectangle of queries and keys) is
    computed by the first kernel that supports it. The preferred kernel decides block sizes.

    Attributes:
        kernels: the kernels; the last one supports every block.
        width: number of columns to which V is padded in its buffer, more than D_v; None: no
            padding. [Note: padded values]
        reason: reason why plain matrix products are the only kernel; "" otherwise.
    """

    kernels: tuple[Kernel, ...]
    width: int | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """Return the name of the preferred kernel, such as "flash"."""
        return self.kernels[0].name

    def kernel(self, block: Block) -> Kernel:
        """Return the first of `kernels` that supports the block, in order of preference. The last
        kernel supports every block."""
        for kernel in self.kernels[:-1]:
            if kernel.takes(block):
                return kernel
        return self.kernels[-1]  # plain products take every block that is left

    def tiling(self, purpose: BlockPurpose) -> Tiling:
        """Return the largest and smallest sizes of blocks for this purpose, as the preferred kernel
        requires them. `Spans.blocks` cuts a chunk's attention into blocks of these sizes.

        The field `tail` has the sizes for the next kernel, which computes blocks too short for the
        preferred kernel. The field `masked` has the sizes for the kernel that reads mask tensors.
        """
        limited = list[Tiling]()
        masked = None
        native_window = False
        native_varlen = False
        for kernel in self.kernels:
            tiling = kernel.tiling
            largest = kernel.tiling.k_block
            if purpose is BlockPurpose.FORWARD:
                largest = tiling.k_forward
            elif purpose is BlockPurpose.TILED:
                largest = min(largest or K_BLOCK, K_BLOCK)
            if largest != tiling.k_block:
                tiling = dataclasses.replace(tiling, k_block=largest)
            limited.append(tiling)
            if masked is None and BlockKind.MASK in kernel.kinds:
                masked = tiling
            native_window = native_window or tiling.native_window
            native_varlen = native_varlen or tiling.native_varlen
        first = limited[0]
        tail = None
        if first.min_tokens is not None:
            tail = limited[1]
        return dataclasses.replace(
            first,
            tail=tail,
            masked=masked,
            native_window=native_window,
            native_varlen=native_varlen,
        )

    def plan(
        self, layout: Spans | DenseMask, chunk: Chunk, rows: int, purpose: BlockPurpose
    ) -> BlockPlan:
        """Return the rectangles of queries and keys (blocks) that compute a chunk's attention, with
        their kernels. All layers with the same mask share the cached plan.

        Args:
            layout: keys that each query may read.
            chunk: the chunk's range of positions.
            rows: number of rows of the batch.
            purpose: use of the blocks (forward or backward, K and V in one buffer or in tiles),
                which limits the number of keys of a block.
        """
        key = (self, chunk.start, chunk.stop, purpose)
        plan: BlockPlan | None = layout.caches.get(key)
        if plan is not None:
            return plan
        tiling: Tiling | None = layout.caches.get((self.kernels, purpose))
        if tiling is None:
            tiling = layout.caches[self.kernels, purpose] = self.tiling(purpose)
        blocks = tuple(
            sorted(layout.blocks(chunk.start, chunk.stop, tiling), key=operator.attrgetter("k0"))
        )
        all_queries = 0, rows, chunk.start, chunk.stop
        kernels = list[Kernel]()
        covers = list[bool]()
        kinds = set[BlockKind]()
        uses = set[KernelUse]()
        for block in blocks:
            kernel = self.kernel(block)
            kernels.append(kernel)
            covers.append((block.b0, block.b1, block.q0, block.q1) == all_queries)
            kinds.add(block.kind)
            uses.add(KernelUse(kernel.name, block.kind, self.reason))
        queries = rows * (chunk.stop - chunk.start)
        if blocks and all(covers):
            depth = len(blocks)
            covered = queries
        else:
            depth, covered = _depth(blocks)
        plan = layout.caches[key] = BlockPlan(
            blocks,
            tuple(kernels),
            depth,
            complete=covered == queries,
            covers=tuple(covers),
            by_place=kinds.isdisjoint((BlockKind.MASK, BlockKind.VARLEN)),
            all_read=any(covers[:1]) and kinds <= {BlockKind.FULL, BlockKind.CAUSAL},
            kernel_uses=frozenset(uses),
        )
        return plan


def _depth(blocks: tuple[Block, ...]) -> tuple[int, int]:
    """Return two numbers about a chunk's blocks. A block is a rectangle of queries and keys in some
    rows of the batch. The first number is the largest number of blocks that contain the same query.
    The second is the number of queries, over all rows of the batch, that are in some block. Both
    decide how the outputs of blocks are merged.

    Queries are counted separately for each range of batch rows, because blocks of different rows
    never have a query in common.
    """
    depth = covered = 0
    for b0, b1 in {(block.b0, block.b1) for block in blocks}:
        blocks_of_rows = [block for block in blocks if (block.b0, block.b1) == (b0, b1)]
        edges = sorted(
            [(block.q0, 1) for block in blocks_of_rows]
            + [(block.q1, -1) for block in blocks_of_rows]
        )
        open_blocks = since = 0
        for position, change in edges:
            covered += (b1 - b0) * (position - since) * (open_blocks > 0)
            open_blocks = open_blocks + change
            since = position
            depth = max(depth, open_blocks)
    return depth, covered


FLASH_4_PACKAGE = "flash-attn-4"  # the package of FlashAttention-4


def platform_of(device: torch.device) -> Platform:
    """Return properties of a device and its software, by which attention kernels are chosen.
    Switches such as torch's `enable_flash_sdp` are read anew in each call."""
    switches = torch.backends.cuda
    flash_on = switches.flash_sdp_enabled()
    version = _numbers(torch.__version__)[:2]
    if device.type != "cuda":
        return Platform(device.type, torch=version, flash_on=flash_on)
    flash = current_flash_attention_impl()
    flash_4: Version = ()
    if flash is not None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            flash_4 = _numbers(importlib.metadata.version(FLASH_4_PACKAGE))
    cudnn = 0
    if torch.backends.cudnn.is_available():
        cudnn = torch.backends.cudnn.version() or 0
    return Platform(
        "cuda",
        torch.cuda.get_device_capability(device),
        cudnn,
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
    """Parse the version of torch or FlashAttention to a tuple of numbers. Examples are (4, 0, 0,
    18) for "4.0.0b18" and (2, 13, 0) for "2.13.0+cu130". A pre-release has one number more than its
    release."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def choose_backend(
    requested: str,
    q: Tensor,
    v: Tensor,
    dropout: float,
    softcap: float | None = None,
    sink: bool = False,
    platform: Platform | None = None,
    biased: bool = False,
) -> Backend:
    """Return the attention kernels (`Backend`) for tensors like q [B, H, T, D] and v [B, H_kv, T,
    D_v].

    "auto" takes only kernels that torch's own attention would take. cuDNN is taken only if torch
    prefers cuDNN to FlashAttention on the device (`prefers_cudnn`). FlashAttention and the CPU's
    fused kernel require `torch.backends.cuda.flash_sdp_enabled()`. Memory-efficient attention, if
    enabled, serves calls that these kernels refuse. Plain matrix products serve the rest. A kernel
    chosen by name is used even if a switch disables this kernel. Fallbacks for blocks that the
    kernel refuses obey the switches.

    "auto" on a CPU takes plain products for a sink in half precision, because unpatched models
    attend eagerly in this case. The fused kernel's backward takes the rounded o, which triples the
    error in the gradients of q and k. If D_v != D, "auto" on a CPU takes plain products too, as
    torch does; "flash" pads V instead, as on CUDA.

    Args:
        requested: the setting `attention` of `StreamConfig`: "auto", "cudnn", "flash" or "math".
        q: a tensor with the shape, dtype and device of the queries.
        v: a tensor like the values.
        dropout: probability to drop a weight.
        softcap: limit of the scores; None: no limit.
        sink: True if there is an attention sink, one more key without a value.
        platform: properties of device and software; None: the result of `platform_of` for q's
            device.
        biased: True if a bias for each distance of two positions is added to the scores.

    Raises:
        AttentionChoiceError: the wanted backend cannot attend this call. "auto" never raises;
            "math" supports everything.
    """
    if requested == "math":
        return MATH_BACKEND
    properties = platform_of(q.device) if platform is None else platform
    return _choose(
        requested,
        AttentionShape(q.shape[-1], v.shape[-1], q.dtype, dropout, softcap, biased),
        sink,
        properties,
    )


MATH_BACKEND = Backend((MATH,), reason="attention='math'")


@functools.lru_cache
def _choose(choice: str, call: AttentionShape, sink: bool, platform: Platform) -> Backend:
    if choice == "auto" and platform.device == "cpu" and sink and call.dtype in HALF_DTYPES:
        return Backend((MATH,), reason="attention sinks in half precision on a CPU")
    no_flash = next(why_not_flash(call, platform), None)
    no_cudnn = next(why_not_cudnn(call, platform), None)
    pads_on_cpu = platform.device == "cpu" and call.size != call.value_size
    if no_flash is None and choice == "auto" and pads_on_cpu:
        no_flash = f"queries and keys have head size {call.size}, values {call.value_size}"
    flash = no_flash is None and platform.flash_on
    efficient = platform.efficient_on and next(why_not_efficient(call, platform), None) is None
    kernel: FlashKernel | CpuFlashKernel = FLASH
    if platform.device == "cpu":
        kernel = CPU_FLASH
    elif platform.hip:
        kernel = SQUARE_FLASH
    elif platform.flash == "FA4" and platform.torch < (2, 12):
        # the operators of FlashAttention-4 raise in the backward of a window
        kernel = WINDOWLESS_FLASH
    square = call.pair == (call.padded, call.padded)
    if no_cudnn is None and (choice == "cudnn" or (choice == "auto" and prefers_cudnn(platform))):
        left_over: Kernel = EFFICIENT if efficient else MATH
        if flash:
            left_over = kernel if square else PADDED_KERNELS[kernel]
        return Backend(tuple(dict.fromkeys((CUDNN, left_over, MATH))))
    if no_flash is None and (choice == "flash" or (choice == "auto" and flash)):
        if square or (platform.device == "cpu" and call.size == call.value_size):
            return Backend((kernel, MATH))
        if call.value_size < call.size and (call.size == call.padded or platform.device == "cpu"):
            # V is padded in its buffer. [Note: padded values]
            return Backend((kernel, MATH), width=call.size)
        return Backend((PADDED_KERNELS[kernel], MATH))
    if choice == "auto":
        if efficient:
            return Backend((EFFICIENT, MATH))
        fallback_reason = ""
        if no_flash:
            fallback_reason = f"FlashAttention cannot: {no_flash}"
        elif not platform.flash_on:
            fallback_reason = "FlashAttention is switched off"
        return Backend((MATH,), reason=fallback_reason)
    reason = no_flash if choice == "flash" else no_cudnn
    raise AttentionChoiceError(
        f"attention={choice!r} cannot attend here: {reason}. Set attention='auto' or 'math' in "
        "StreamConfig."
    )


@dataclasses.dataclass(frozen=True)
class SdpaComparison:
    """Comparison of a layer's attention calls with transformers' "sdpa" implementation: whether
    sdpa computes the same numbers, and whether sdpa builds the scores in memory. Both decide if a
    micro-batch may run unpatched.

    Attributes:
        same_numbers: True if sdpa computes the same numbers. False with a softcap, sinks or T5's
            bias, which sdpa does not support.
        heads: largest H of the calls for which sdpa builds the scores [B, H, T, T], because no
            fused kernel supports the call; 0: a fused kernel supports all calls.
    """

    same_numbers: bool = True
    heads: int = 0

    def with_call(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, same_numbers: bool
    ) -> SdpaComparison:
        """Return a copy that includes one more attention call, of q [B, H, C, D], k [B, H_kv, C, D]
        and v [B, H_kv, C, D_v].

        Args:
            dropout: the call's probability to drop a weight.
            same_numbers: True if sdpa computes this call's numbers.
        """
        grouped = q.shape[1] != k.shape[1]
        fused = not has_data(q) or torch._fused_sdp_choice(
            q, k, v, None, dropout, True, enable_gqa=grouped
        )
        return SdpaComparison(
            self.same_numbers and same_numbers, self.heads if fused else max(self.heads, q.shape[1])
        )
