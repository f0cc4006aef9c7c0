"""Where the keys and values of one attention call are, and the accumulators of their gradients.

    KVBuffer    the whole sequence in one buffer on the device
    KVTiles   a tile for each chunk; some stay on the device, the others come from the host and go back there

Attention asks both for the keys and values of its blocks, one block after the other, and adds to
their gradients. Inside, tokens come before heads, [B, T, H_kv, D]. [Note: one layout]

[Note: one chunk] Where a chunk is the whole sequence, its own k and v are the buffers, if they lie
as buffers do; and where one block is all of its attention, the gradients that the kernel gives are
the accumulators, in the kernel's dtype. Nothing is copied, filled with zeros or added. A layer that
writes to k or v after that would change what backward reads: their versions tell. A chunk that is
retried after a lack of memory has new k and v, which replace the first ones. The first ones are not
overwritten: another layer may share them, and would find their versions changed.

[Note: tiles] Chunk i reads tiles 0 .. i, so tile j is read by all chunks but the first j: the first
tiles are those that stay on the device. Blocks are visited in the order of their keys, so that a
tile comes in once for each chunk: into the next tile's copies falls the work on this one. A tile of
accumulators is written back after each visit; in a chunk's own tile they are complete and never go
back. [Note: prefix accumulation order]. What is computed with which numbers in which order is the
same as in one buffer, up to where blocks end: gradients are equal to the bit if blocks are the
same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from streambp.attention.kernels import cut, narrowed, widened
from streambp.attention.spans import Block
from streambp.chunks import Chunk, ChunkPlan
from streambp.errors import BackwardError
from streambp.offload.manager import HostTensors

WORKING = (
    4  # tiles on the device beside the resident ones: at work, coming, and two on their way out
)
# a block; K [b, H_kv, k, D] and V of its rows and keys
Visit = Iterable[tuple[Block, Tensor, Tensor]]


@dataclasses.dataclass
class KVBuffer:
    """Buffers of one attention call of the layer. B rows, T tokens of the whole sequence.

    Attributes:
        columns: D_v if V is padded in its buffer, otherwise None. [Note: padded values]
        packed: the width to which V is padded at its next read.
        versions: version counters of K and V that are the layer's own tensors. [Note: one chunk]
        added: number of added parts of the present chunk, dK and dV of each block.
        again: number of these parts that a retry has not reached yet. [Note: once for each chunk]
    """

    k: Tensor  # [B, T, H_kv, D], contiguous
    v: Tensor  # [B, T, H_kv, D_v or width], contiguous
    dk: Tensor | None = None  # [B, T, H_kv, D] in promote_types(dtype, float32)
    dv: Tensor | None = None  # [B, T, H_kv, D_v]
    columns: int | None = None
    packed: int | None = None
    versions: tuple[int, int] | None = None
    added: int = 0
    again: int = 0
    streams = False

    def __post_init__(self) -> None:
        self.value_size = self.columns or self.v.shape[3]  # D_v
        self.width = self.v.shape[3]  # columns of V in its buffer

    @property
    def lent(self) -> bool:
        """True if K and V are the layer's own tensors. [Note: one chunk]"""
        return self.versions is not None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, width: int | None) -> KVBuffer:
        """From K [B, T, H_kv, D] and V [B, T, H_kv, D_v] of all tokens, contiguous; width: that V
        is padded to."""
        return cls(k, v) if width is None else cls(k, widened(v, width), columns=v.shape[3])

    @classmethod
    def of_one_chunk(cls, k: Tensor, v: Tensor) -> KVBuffer | None:
        """The layer's own K [B, H_kv, T, D] and V [B, H_kv, T, D_v] of all tokens; None if they lie
        otherwise, or in memory that holds more. [Note: one chunk]"""
        own = k.transpose(1, 2), v.transpose(1, 2)
        if not all(
            x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes and not x.is_inference()
            for x in own
        ):
            return None
        return cls(*own, versions=(k._version, v._version))

    def pack(self) -> None:
        """Keep V without the columns of zeros, until it is read again."""
        if self.columns is not None and self.packed is None:
            self.packed, self.v = self.width, narrowed(self.v, self.columns).contiguous()

    def grow_accumulators(self) -> tuple[Tensor, Tensor]:
        """dK [B, T, H_kv, D] and dV [B, T, H_kv, D_v] in promote_types(dtype, float32); zeros when
        first asked for."""
        if self.dk is None or self.dv is None:
            dtype = torch.promote_types(self.k.dtype, torch.float32)
            self.dk = torch.zeros_like(self.k, dtype=dtype)
            self.dv = self.v.new_zeros((*self.v.shape[:3], self.value_size), dtype=dtype)
        return self.dk, self.dv

    def part(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """K [B, C, H_kv, D] and V [B, C, H_kv, D_v] of a chunk, as views: as tiles lie, which may
        be made of them in backward."""
        here = slice(chunk.start, chunk.stop)
        return self.k[:, here], narrowed(self.v[:, here], self.value_size)

    def read(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """K [B, H_kv, e, D] and V [B, H_kv, e, D_v] of all tokens up to the chunk's end, as
        views."""
        k, v = (
            x[:, : chunk.stop].transpose(1, 2) for x in (self.k, narrowed(self.v, self.value_size))
        )
        return k, v

    def write(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Copy a chunk's K [B, H_kv, C, D] and V to their place in the buffers."""
        start, length = chunk.start, chunk.stop - chunk.start
        self.k.narrow(1, start, length).copy_(k.transpose(1, 2))
        own = self.v.narrow(1, start, length) if self.columns is None else self.part(chunk)[1]
        own.copy_(v.transpose(1, 2))

    def visit(self, blocks: Sequence[Block], gradients: bool = False) -> Visit:
        """The blocks with views of the buffers.

        Raises:
            BackwardError: the layer has written to K or V since they were attended to. [Note: one
                chunk]
        """
        if self.packed is not None:
            self.v, self.packed = widened(self.v, self.packed), None
        if gradients and self.versions not in (None, (self.k._version, self.v._version)):
            raise BackwardError(
                "A layer writes in place to keys or values that its attention has read, and "
                "backward would read others. Let it write to a copy (torch.add instead of "
                "Tensor.add_)."
            )
        found = []
        for block in blocks:
            k, v = cut((block.b0, block.b1, block.k0, block.k1), self.k, self.v)
            found.append((block, k, v))
        return found

    def add(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """dk [b, H_kv, k, D] and dv are added where the block's rows and keys lie in the
        buffers."""
        batch, length = self.k.shape[:2]
        if self.dk is None and (block.b1 - block.b0, block.q1 - block.q0, block.k1 - block.k0) == (
            batch,
            length,
            length,
        ):
            self.dk, self.dv = dk.transpose(1, 2), dv.transpose(1, 2)  # [Note: one chunk]
            self.added += 2
            return
        rows, keys = slice(block.b0, block.b1), slice(block.k0, block.k1)
        for total, part in zip(self.grow_accumulators(), (dk, dv), strict=True):
            self.add_once(total[rows, keys], part.transpose(1, 2))

    def add_once(self, total: Tensor, part: Tensor) -> None:
        """Add a part [...] to accumulators [...], unless an attempt before has done so: what counts
        is that it came to its end, not that it began. [Note: once for each chunk]"""
        if self.again:
            self.again -= 1
            return
        total.add_(part)
        self.added += 1

    def begin_backward(self, again: bool) -> None:
        """A chunk is differentiated; again: for the second time. [Note: once for each chunk]"""
        self.added *= again
        self.again = self.added

    def take_gradients(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Views [B, H_kv, C, D] of the accumulators, which stay."""
        dk, dv = self.grow_accumulators()
        start, length = chunk.start, chunk.stop - chunk.start
        if length < dk.shape[1]:
            dk, dv = dk.narrow(1, start, length), dv.narrow(1, start, length)
        return dk.transpose(1, 2), dv.transpose(1, 2)


class KVTiles:
    """Keys and values in tiles, one for each chunk. On the device a tile is the buffer of its
    chunk. [Note: tiles]

    Args:
        index: which of the layer's attention calls.
        keys: where K and V are kept. scratch: where the accumulators are between two chunks.
        resident: how many of the first tiles stay on the device.
        keeps_all: `keys` gets the resident tiles too, because they are saved for backward.
        value_size: D_v. width: columns of V in blocks; tiles are kept, and come and go, with D_v of
            them. [Note: padded values]
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
        self._keys, self._scratch = keys, scratch
        self._k, self._v, self._dk, self._dv = (
            f"{part}.{index}" for part in ("k", "v", "dk", "dv")
        )
        self._here: dict[int, KVBuffer] = {}

    def write(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Copy a chunk's K [B, H_kv, C, D] and V into a tile; tiles of the chunks before leave
        unless they are resident.

        A store gets the tile if `keeps_all`, or if a later chunk will read it and it is not
        resident.
        """
        self._leave(list(self._here))
        k, v = (
            part.transpose(1, 2).clone(memory_format=torch.contiguous_format) for part in (k, v)
        )
        tile = KVBuffer(k, v)
        # nobody else reads the last
        if self.keeps_all or self.resident <= chunk.index < len(self.plan) - 1:
            for name, part in ((self._k, tile.k), (self._v, tile.v)):
                self._keys.put(name, chunk.index, part)
                # to be computed again in backward; this pass needs it
                if not self._keys.has(name, chunk.index):
                    self._scratch.put(name, chunk.index, part)
        self._here[chunk.index] = tile

    def visit(self, blocks: Sequence[Block], gradients: bool = False) -> Visit:
        """The blocks. Their tiles come to the device before and leave after.

        A tile stays if it is resident, the chunk's own or one of the next block's.
        """
        wanted = [self._tiles(block) for block in blocks]
        if not blocks:  # padding that reads nothing
            return
        own = self.plan.holding(blocks[0].q0)
        self._leave([index for index in self._here if index != own and index not in wanted[0]])
        for number, block in enumerate(blocks):
            for index in wanted[number]:
                self._enter(index, gradients)
            following = wanted[number + 1] if number + 1 < len(blocks) else range(0)
            for index in following:  # it comes while the kernel is at work
                if index not in self._here:
                    for name in (self._k, self._v):
                        self._home(name, index).load(name, index)
                    if gradients and self._scratch.has(self._dk, index):
                        self._scratch.load(self._dk, index)
                        self._scratch.load(self._dv, index)
            yield (
                block,
                self._part(block, lambda tile: tile.k),
                self._part(block, lambda tile: tile.v, self.width),
            )
            self._leave(
                index for index in wanted[number] if index not in following and index != own
            )

    def add(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """dk [b, H_kv, k, D] and dv are added tile by tile."""
        rows = slice(block.b0, block.b1)
        for index, inside, of_block in self._overlaps(block):
            for total, part in zip(self._here[index].grow_accumulators(), (dk, dv), strict=True):
                total[rows, inside].add_(part[:, :, of_block].transpose(1, 2))

    def take_gradients(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """dK [B, H_kv, C, D] and dV of the chunk's tile, which leaves the device for good."""
        self._enter(chunk.index, gradients=True)
        return self._here.pop(chunk.index).take_gradients(chunk)

    def _enter(self, index: int, gradients: bool) -> None:
        if index not in self._here:
            k, v = (self._home(name, index).peek(name, index) for name in (self._k, self._v))
            self._keys.read_ahead()
            self._here[index] = KVBuffer(k, v)
        tile = self._here[index]
        if gradients and tile.dk is None:
            if self._scratch.has(self._dk, index):
                tile.dk, tile.dv = (
                    self._scratch.borrow(self._dk, index),
                    self._scratch.borrow(self._dv, index),
                )
            else:
                tile.grow_accumulators()

    def _leave(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index >= self.resident and index in self._here:
                tile = self._here.pop(index)
                if tile.dk is not None and tile.dv is not None:
                    self._scratch.put(self._dk, index, tile.dk)
                    self._scratch.put(self._dv, index, tile.dv)

    def _home(self, name: str, index: int) -> HostTensors:
        return self._keys if self._keys.has(name, index) else self._scratch

    def _tiles(self, block: Block) -> range:
        return range(self.plan.holding(block.k0), self.plan.holding(block.k1 - 1) + 1)

    def _overlaps(self, block: Block) -> Iterator[tuple[int, slice, slice]]:
        """The tiles of a block's keys: which, which of the tile's keys, and where these are among
        the block's."""
        for index in self._tiles(block):
            chunk = self.plan[index]
            k0, k1 = max(block.k0, chunk.start), min(block.k1, chunk.stop)
            yield (
                index,
                slice(k0 - chunk.start, k1 - chunk.start),
                slice(k0 - block.k0, k1 - block.k0),
            )

    def _part(
        self, block: Block, which: Callable[[KVBuffer], Tensor], width: int | None = None
    ) -> Tensor:
        """[b, H_kv, k, D], or with that many columns."""
        tiles = [(which(self._here[index]), inside) for index, inside, _ in self._overlaps(block)]
        if width is not None and tiles[0][0].shape[3] != width:
            rows = block.b1 - block.b0
            size, (heads, columns) = block.k1 - block.k0, tiles[0][0].shape[2:]
            padded = tiles[0][0].new_empty(rows, size, heads, width)
            padded[..., columns:] = 0.0
            for (tile, inside), (_, _, of_block) in zip(tiles, self._overlaps(block), strict=True):
                padded[:, of_block, :, :columns] = tile[block.b0 : block.b1, inside]
            return cut((0, rows, 0, size), padded)[0]
        if len(tiles) == 1:
            ((tile, inside),) = tiles
            return cut((block.b0, block.b1, inside.start, inside.stop), tile)[0]
        whole = torch.cat([tile[block.b0 : block.b1, inside] for tile, inside in tiles], 1)
        return cut((0, block.b1 - block.b0, 0, block.k1 - block.k0), whole)[0]


# keys and values of one attention call, and the accumulators of their gradients
Site = KVBuffer | KVTiles


@dataclasses.dataclass
class PrefixMemory:
    """How much of the device the prefixes of one layer call may use, and where tiles go.

    Args:
        room: bytes; None: no limit, every prefix is one buffer.
        scratch: a store for what lives no longer than one pass over the chunks.
        saved: the store that keeps K and V for backward; None if they are not saved there.

    Attributes:
        tiles: the scratch store of the current pass; None: no tile was moved yet.
    """

    plan: ChunkPlan
    room: int | None
    scratch: Callable[[], HostTensors]
    saved: HostTensors | None = None
    tiles: HostTensors | None = None

    def open_scratch(self) -> HostTensors:
        """Return the scratch store of the current pass."""
        if self.tiles is None:
            self.tiles = self.scratch()
        return self.tiles
