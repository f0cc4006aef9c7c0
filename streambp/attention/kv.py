"""Storage of one attention call's keys and values, and of the accumulators, tensors in which their
gradients are summed over chunks.

    KVBuffer  the whole sequence in one buffer on the device
    KVTiles   a tile for each chunk; some stay on the device, the others move to the host and back

Attention asks both classes for the keys and values of its blocks, one block after the other, and
adds to their gradients. Inside, tokens come before heads, [B, T, H_kv, D]. [Note: one layout]

If a chunk is the whole sequence, its own k and v are the buffers, provided that their memory layout
is the buffers'. If one block is all of its attention, the kernel's gradients are the accumulators,
in the kernel's dtype. Nothing is copied, filled with zeros or added. A layer that writes to k or v
afterwards would change what backward reads; their version counters detect the write. A chunk that
is retried after running out of memory has new k and v, which replace the first tensors. The first
tensors are not overwritten: another layer may share the tensors, and would find their versions
changed.

Chunk i reads tiles 0 .. i, so all chunks but the first j read tile j. Therefore the first tiles
stay on the device. Blocks are visited in the order of their keys, so each chunk loads a tile once.
The next tile is copied while the kernel works on this tile. A tile of accumulators is written back
after each visit. The accumulators in a chunk's own tile are complete and never go back. [Note:
prefix accumulation order]. Numbers and order of operations are the same as in one buffer, except
where blocks end: gradients are equal to the bit if blocks are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from streambp.attention.kernels import block_views, cut_columns, pad_columns
from streambp.attention.spans import Block
from streambp.chunks import Chunk, ChunkPlan
from streambp.errors import BackwardError
from streambp.offload.manager import HostTensors

# tiles on the device beside the resident ones: one in use, one arriving, two leaving
WORKING_TILES = 4
# (block, K [b, H_kv, k, D], V), with the block's rows and keys
BlockTensors = Iterable[tuple[Block, Tensor, Tensor]]


@dataclasses.dataclass
class KVBuffer:
    """Buffers for one attention call of a layer: keys and values of the whole sequence, and the
    sums of their gradients over chunks.

    Attributes:
        k: K of all tokens, [B, T, H_kv, D], contiguous.
        v: V of all tokens, [B, T, H_kv, D_v], contiguous; with more columns if V is padded.
        dk: sum of the gradients of K, [B, T, H_kv, D] in promote_types(dtype, float32), or in the
            kernel's dtype if one block computes all attention. None: not created yet.
        dv: sum of the gradients of V, [B, T, H_kv, D_v]; None: not created yet.
        columns: D_v if V has additional zero columns in its buffer, otherwise None. [Note: padded
            values]
        packed: number of columns to which V must be padded before its next read, after `pack` has
            freed the zero columns; None: V needs no padding.
        versions: version counters of K and V if the buffers are the layer's own tensors; None: the
            buffers are copies.
        added: number of additions to dK and dV in the current chunk's backward.
        additions_to_skip: number of additions that a retry of the chunk must skip, because the
            first attempt made them. [Note: once for each chunk]
    """

    k: Tensor
    v: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None
    columns: int | None = None
    packed: int | None = None
    versions: tuple[int, int] | None = None
    added: int = 0
    additions_to_skip: int = 0
    streams = False

    def __post_init__(self) -> None:
        self.value_size = self.columns or self.v.shape[3]  # D_v
        self.width = self.v.shape[3]  # columns of V in its buffer

    @property
    def lent(self) -> bool:
        """True if the buffers are the layer's own k and v tensors, without a copy. A write to k or
        v by the layer would then change what backward reads."""
        return self.versions is not None

    @classmethod
    def from_tensors(cls, k: Tensor, v: Tensor, width: int | None) -> KVBuffer:
        """Return buffers that hold contiguous K [B, T, H_kv, D] and V [B, T, H_kv, D_v] of all
        tokens.

        Args:
            k: the keys.
            v: the values.
            width: number of columns to which V is padded; None: no padding.
        """
        if width is None:
            return cls(k, v)
        return cls(k, pad_columns(v, width), columns=v.shape[3])

    @classmethod
    def from_one_chunk(cls, k: Tensor, v: Tensor) -> KVBuffer | None:
        """Return buffers that are the layer's own tensors k [B, H_kv, T, D] and v [B, H_kv, T, D_v]
        of all tokens, without a copy. Called if the layer's sequence is one chunk.

        Return None if k or v is not contiguous as [B, T, H_kv, D], does not fill its storage, or is
        an inference tensor.
        """
        buffers = k.transpose(1, 2), v.transpose(1, 2)
        for x in buffers:
            if not x.is_contiguous() or x.is_inference():
                return None
            if x.untyped_storage().nbytes() != x.nbytes:
                return None
        return cls(*buffers, versions=(k._version, v._version))

    def pack(self) -> None:
        """Free the zero columns with which V is padded for some kernels, at the end of forward. The
        next read of V pads V again."""
        if self.columns is not None and self.packed is None:
            self.v = cut_columns(self.v, self.columns).contiguous()
            self.packed = self.width

    def grow_accumulators(self) -> tuple[Tensor, Tensor]:
        """Return the gradient buffers dK [B, T, H_kv, D] and dV [B, T, H_kv, D_v] in
        promote_types(dtype, float32). The first call creates the buffers, filled with zeros."""
        if self.dk is None or self.dv is None:
            dtype = torch.promote_types(self.k.dtype, torch.float32)
            self.dk = torch.zeros_like(self.k, dtype=dtype)
            self.dv = self.v.new_zeros((*self.v.shape[:3], self.value_size), dtype=dtype)
        return self.dk, self.dv

    def part(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return K [B, C, H_kv, D] and V [B, C, H_kv, D_v] of a chunk, as views, to save them for
        backward. Saved tensors have the same layout: tokens before heads."""
        positions = slice(chunk.start, chunk.stop)
        return self.k[:, positions], cut_columns(self.v[:, positions], self.value_size)

    def read(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return K [B, H_kv, e, D] and V [B, H_kv, e, D_v] of the e tokens up to the chunk's end,
        as views."""
        k = self.k[:, : chunk.stop]
        v = cut_columns(self.v, self.value_size)[:, : chunk.stop]
        return k.transpose(1, 2), v.transpose(1, 2)

    def write(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Copy a chunk's keys `k` [B, H_kv, C, D] and values `v` [B, H_kv, C, D_v] into the buffers
        of the full sequence, at the chunk's positions."""
        start = chunk.start
        length = chunk.stop - chunk.start
        self.k.narrow(1, start, length).copy_(k.transpose(1, 2))
        if self.columns is None:
            target = self.v.narrow(1, start, length)
        else:
            target = self.part(chunk)[1]
        target.copy_(v.transpose(1, 2))

    def visit(self, blocks: Sequence[Block], gradients: bool = False) -> BlockTensors:
        """Return each block of a chunk's attention with its keys and values, as views of the
        buffers. A block is a rectangle of queries and keys.

        Args:
            blocks: the blocks.
            gradients: True in backward: first check that K and V are unchanged since forward. False
                in forward: no check. The result is the same.

        Raises:
            BackwardError: in backward, the layer has written to K or V after attention read them.
        """
        if self.packed is not None:
            self.v = pad_columns(self.v, self.packed)
            self.packed = None
        if gradients and self.versions not in (None, (self.k._version, self.v._version)):
            raise BackwardError(
                "A layer writes in place to keys or values that its attention has read, and "
                "backward would read others. Let it write to a copy (torch.add instead of "
                "Tensor.add_)."
            )
        visited = []
        for block in blocks:
            k, v = block_views((block.b0, block.b1, block.k0, block.k1), self.k, self.v)
            visited.append((block, k, v))
        return visited

    def add(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """Add a block's gradients dk [b, H_kv, k, D] and dv to the gradient buffers, at the block's
        rows and keys."""
        batch, length = self.k.shape[:2]
        sizes = (block.b1 - block.b0, block.q1 - block.q0, block.k1 - block.k0)
        if self.dk is None and sizes == (batch, length, length):
            # the only block of the only chunk: the kernel's gradients are the sums
            self.dk = dk.transpose(1, 2)
            self.dv = dv.transpose(1, 2)
            self.added += 2
            return
        rows = slice(block.b0, block.b1)
        keys = slice(block.k0, block.k1)
        for total, part in zip(self.grow_accumulators(), (dk, dv), strict=True):
            self.add_once(total[rows, keys], part.transpose(1, 2))

    def add_once(self, total: Tensor, part: Tensor) -> None:
        """Add `part` [...] to `total` [...], unless an earlier attempt at this chunk's backward,
        which ran out of memory, has already added the part.

        An addition that fails does not count. [Note: once for each chunk]
        """
        if self.additions_to_skip:
            self.additions_to_skip -= 1
            return
        total.add_(part)
        self.added += 1

    def begin_backward(self, is_retry: bool) -> None:
        """Prepare for the backward of a chunk, which adds to the gradient buffers. A retry skips
        the additions that the first attempt made.

        Args:
            is_retry: True if the chunk is differentiated for the second time, after running out of
                memory. [Note: once for each chunk]
        """
        self.added *= is_retry
        self.additions_to_skip = self.added

    def take_gradients(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the complete gradients dK and dV of a chunk's own tokens, as views [B, H_kv, C, D]
        of the gradient buffers. The chunk's backward passes them to autograd."""
        dk, dv = self.grow_accumulators()
        start = chunk.start
        length = chunk.stop - chunk.start
        if length < dk.shape[1]:
            dk = dk.narrow(1, start, length)
            dv = dv.narrow(1, start, length)
        return dk.transpose(1, 2), dv.transpose(1, 2)


class KVTiles:
    """Keys and values of one attention call, stored chunk by chunk. A tile is K and V of one
    chunk's tokens. Tiles move between the device and host memory; each tile on the device is a
    `KVBuffer`.

    Args:
        index: number of the attention call within the layer.
        plan: the chunks.
        keys: storage of K and V on the host.
        scratch: storage on the host of the gradients dK and dV between two chunks, and of K and V
            that `keys` does not accept.
        resident: number of first tiles that stay on the device.
        keeps_all: True if `keys` receives all tiles, because they are saved for backward. False if
            `keys` receives only tiles that leave the device and are read again.
        value_size: D_v, the head size of the values.
        width: columns to which V is padded for kernels; stored and moved tiles have D_v columns.
            [Note: padded values]
    """

    streams = True
    lent = False

    def __init__(
        self,
        index: int,
        plan: ChunkPlan,
        keys: HostTensors,
        scratch: HostTensors,
        resident: int,
        keeps_all: bool,
        value_size: int,
        width: int | None = None,
    ) -> None:
        self.plan = plan
        self.resident = resident
        self.keeps_all = keeps_all
        self.value_size = value_size
        self.width = width or value_size
        self._keys = keys
        self._scratch = scratch
        self._k = f"k.{index}"
        self._v = f"v.{index}"
        self._dk = f"dk.{index}"
        self._dv = f"dv.{index}"
        self._on_device: dict[int, KVBuffer] = {}

    def write(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Store a chunk's keys `k` [B, H_kv, C, D] and values `v` [B, H_kv, C, D_v] on the device.
        K and V of other chunks leave the device first. Only the first chunks keep theirs there; the
        attribute `resident` is the number of these chunks.

        The new K and V are also stored on the host if forward saves all K and V there for backward
        (`keeps_all`). Otherwise, the host gets only K and V that leave the device before a later
        chunk reads both.
        """
        self._leave(list(self._on_device))
        k = k.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        v = v.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        tile = KVBuffer(k, v)
        # no other chunk reads the last tile
        if self.keeps_all or self.resident <= chunk.index < len(self.plan) - 1:
            for name, part in ((self._k, tile.k), (self._v, tile.v)):
                self._keys.save(name, chunk.index, part)
                # `keys` declined the tile, which backward recomputes; this pass still needs it
                if not self._keys.has(name, chunk.index):
                    self._scratch.save(name, chunk.index, part)
        self._on_device[chunk.index] = tile

    def visit(self, blocks: Sequence[Block], gradients: bool = False) -> BlockTensors:
        """Yield each block of a chunk's attention with K and V of its keys. A tile, K and V of one
        chunk, is loaded from the host before its block, and removed from the device after the
        block.

        The tile of the queries' own chunk stays on the device, and so does a tile that the next
        block needs. The first tiles always stay; the attribute `resident` is the number of these
        tiles.

        Args:
            blocks: rectangles of the chunk's queries and of keys, ordered by their keys.
            gradients: True to load the sums of dK and dV as well, in backward.
        """
        tiles_of_blocks = [self._tiles(block) for block in blocks]
        if not blocks:  # all queries are padding that reads nothing
            return
        own_tile = self.plan.chunk_index(blocks[0].q0)
        self._leave(
            [
                index
                for index in self._on_device
                if index != own_tile and index not in tiles_of_blocks[0]
            ]
        )
        for number, block in enumerate(blocks):
            for index in tiles_of_blocks[number]:
                self._enter(index, gradients)
            following = range(0)
            if number + 1 < len(blocks):
                following = tiles_of_blocks[number + 1]
            for index in following:  # load the next tile while the kernel runs
                if index not in self._on_device:
                    for name in (self._k, self._v):
                        self._host_store(name, index).load(name, index)
                    if gradients and self._scratch.has(self._dk, index):
                        self._scratch.load(self._dk, index)
                        self._scratch.load(self._dv, index)
            yield (
                block,
                self._part(block, lambda tile: tile.k),
                self._part(block, lambda tile: tile.v, self.width),
            )
            self._leave(
                index
                for index in tiles_of_blocks[number]
                if index not in following and index != own_tile
            )

    def add(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """Add a block's gradients dk [b, H_kv, k, D] and dv to the gradients of the tiles (one for
        each chunk) that contain the block's keys."""
        rows = slice(block.b0, block.b1)
        for index, in_tile, of_block in self._overlaps(block):
            for total, part in zip(
                self._on_device[index].grow_accumulators(), (dk, dv), strict=True
            ):
                total[rows, in_tile].add_(part[:, :, of_block].transpose(1, 2))

    def take_gradients(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the complete gradients dK [B, H_kv, C, D] and dV of a chunk's own tokens, which
        the chunk's backward passes to autograd. Remove the chunk's K, V and gradients from the
        device."""
        self._enter(chunk.index, gradients=True)
        return self._on_device.pop(chunk.index).take_gradients(chunk)

    def _enter(self, index: int, gradients: bool) -> None:
        if index not in self._on_device:
            k, v = (self._host_store(name, index).peek(name, index) for name in (self._k, self._v))
            self._keys.read_ahead()
            self._on_device[index] = KVBuffer(k, v)
        tile = self._on_device[index]
        if gradients and tile.dk is None:
            if self._scratch.has(self._dk, index):
                dk = self._scratch.borrow(self._dk, index)
                dv = self._scratch.borrow(self._dv, index)
                tile.dk = dk
                tile.dv = dv
            else:
                tile.grow_accumulators()

    def _leave(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index >= self.resident and index in self._on_device:
                tile = self._on_device.pop(index)
                if tile.dk is not None and tile.dv is not None:
                    self._scratch.save(self._dk, index, tile.dk)
                    self._scratch.save(self._dv, index, tile.dv)

    def _host_store(self, name: str, index: int) -> HostTensors:
        return self._keys if self._keys.has(name, index) else self._scratch

    def _tiles(self, block: Block) -> range:
        return range(self.plan.chunk_index(block.k0), self.plan.chunk_index(block.k1 - 1) + 1)

    def _overlaps(self, block: Block) -> Iterator[tuple[int, slice, slice]]:
        """Yield the chunks that hold keys of a block: the chunk's index, the slice of these keys
        within the chunk, and the slice of these keys within the block. The chunks' tiles are read
        and written by these slices."""
        for index in self._tiles(block):
            chunk = self.plan[index]
            k0 = max(block.k0, chunk.start)
            k1 = min(block.k1, chunk.stop)
            yield (
                index,
                slice(k0 - chunk.start, k1 - chunk.start),
                slice(k0 - block.k0, k1 - block.k0),
            )

    def _part(
        self, block: Block, select: Callable[[KVBuffer], Tensor], width: int | None = None
    ) -> Tensor:
        """Return K or V of a block's keys, [b, H_kv, k, D], padded with zeros to `width` columns if
        `width` is passed.

        Args:
            block: the block.
            select: function that returns K or V of a chunk's tile.
            width: number of columns; None: no padding.
        """
        tiles = [
            (select(self._on_device[index]), in_tile) for index, in_tile, _ in self._overlaps(block)
        ]
        if width is not None and tiles[0][0].shape[3] != width:
            rows = block.b1 - block.b0
            size = block.k1 - block.k0
            heads, columns = tiles[0][0].shape[2:]
            padded = tiles[0][0].new_empty(rows, size, heads, width)
            padded[..., columns:] = 0.0
            for (tile, in_tile), (_, _, of_block) in zip(tiles, self._overlaps(block), strict=True):
                padded[:, of_block, :, :columns] = tile[block.b0 : block.b1, in_tile]
            return block_views((0, rows, 0, size), padded)[0]
        if len(tiles) == 1:
            ((tile, in_tile),) = tiles
            return block_views((block.b0, block.b1, in_tile.start, in_tile.stop), tile)[0]
        joined = torch.cat([tile[block.b0 : block.b1, in_tile] for tile, in_tile in tiles], 1)
        return block_views((0, block.b1 - block.b0, 0, block.k1 - block.k0), joined)[0]


# storage of one attention call's keys, values and gradients
KVStorage = KVBuffer | KVTiles


@dataclasses.dataclass
class PrefixMemory:
    """Limit on the device memory for K and V of one layer's call, and the storage on the host for K
    and V beyond that limit.

    Attributes:
        plan: the chunks.
        headroom: bytes on the device; None: no limit, so K and V of each attention call are one
            buffer.
        scratch: function that creates host storage for K and V that leave the device during the
            layer's forward, or during its backward.
        saved: host storage of the K and V that forward saves for backward; None: K and V are not
            saved on the host.
        tiles: the host storage that `scratch` has created for the running forward or backward;
            None: no K and V have left the device yet.
    """

    plan: ChunkPlan
    headroom: int | None
    scratch: Callable[[], HostTensors]
    saved: HostTensors | None = None
    tiles: HostTensors | None = None

    def open_scratch(self) -> HostTensors:
        """Return the host storage for K and V that leave the device while the layer's forward, or
        its backward, runs. The first call creates the storage."""
        if self.tiles is None:
            self.tiles = self.scratch()
        return self.tiles
