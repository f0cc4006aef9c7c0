"""Context parallelism: a rank keeps the queries of its tokens, and gathers the keys and values that they read.

K and V of whole sequences come a group of heads at a time, the next group while one is attended. Their gradients are summed
over ranks in float32, group by group. So one group of heads of T tokens is on a device, whatever the number of heads; how
many are in a group follows from the memory of the rank that has least. [Note: equal exchanges]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streambp.chunks import Chunk, ChunkPlan
from streambp.device import counted_bytes, memory_limit, tells_memory
from streambp.errors import StreamBPError
from streambp.known_names import GATHER, REDUCE_SCATTER
from streambp.sharded.shards import KeyGroup, Keys, Piece, Shards

SHARE = 8  # of the memory that is free when a forward begins: an eighth for keys, values and their gradients
ROOM = 2**30  # bytes for them where no limit is known


def room_for_keys(device: torch.device) -> int:
    """Bytes that this rank would give to keys and values of whole sequences, and their gradients."""
    if not tells_memory(device):
        return ROOM
    return int(memory_limit(device) - counted_bytes(device, "allocated")) // SHARE


def collective(names: tuple[str, ...]) -> Callable[..., Any]:
    """torch.distributed's function by the first of these names that this version has."""
    function: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return function


@dataclasses.dataclass(frozen=True)
class GatheredShards(Shards):
    """Shards as torch's context parallelism makes them.

    balanced: of 2 P parts of a sequence rank r holds parts r and 2 P - 1 - r; else of P parts the one of its number.
    room: bytes that every rank has for keys, values and their gradients.
    """

    balanced: bool = True

    by = "context parallelism"
    gathers_keys = True

    @property
    def _starts(self) -> list[int]:
        """Where this rank's parts begin in the whole sequence, in the order in which it holds them."""
        if not self.balanced:
            return [self.rank * self.length]
        return [part * self.length // 2 for part in (self.rank, 2 * self.size - 1 - self.rank)]

    def pieces(self, batch_size: int, size: int) -> list[Piece]:
        """This rank's parts in the order of the sequence, each cut into at most `size` positions."""
        found: list[Piece] = []
        length = self.length // len(self._starts)
        for number, start in enumerate(self._starts):
            for chunk in ChunkPlan(length, min(size, length)):
                here, whole = number * length, len(found)
                found.append(
                    Piece(
                        Chunk(whole, here + chunk.start, here + chunk.stop),
                        Chunk(whole, start + chunk.start, start + chunk.stop),
                    )
                )
        return found

    def queries(self, x: Tensor) -> Tensor:
        """x [B, H, T / P, D] itself."""
        return x

    def tokens(self, x: Tensor, heads: int) -> Tensor:
        """x [B, heads, T / P, D] itself."""
        return x

    def sinks(self, sinks: Tensor) -> Tensor:
        """sinks [H] themselves."""
        return sinks

    def in_order(self, x: Tensor) -> Tensor:
        """[P, B, T / P, ...] of all ranks -> [B, T, ...]."""
        parts = x.transpose(0, 1)  # [B, P, T / P, ...]
        if not self.balanced:
            return parts.flatten(1, 2)
        return parts.unflatten(2, (2, -1)).flatten(1, 2).index_select(1, self._order(x.device)).flatten(1, 2)

    def by_rank(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [P, B, T / P, ...], contiguous: what each rank holds. The inverse of `in_order`."""
        if self.balanced:
            back = self._order(x.device).argsort()
            x = x.unflatten(1, (2 * self.size, -1)).index_select(1, back).flatten(1, 2)
        return x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()

    def check_order(self, positions: Tensor, padding: Tensor | None) -> None:
        """Each position [1 or B, T] must be the one before and 1 more, or 0 where a document starts; padding may have any.

        Raises:
            StreamBPError: they are not, so the shards are in another order than the one that is known; on every rank alike.
        """
        fits = (positions.diff() == 1) | (positions[:, 1:] == 0)  # [1 or B, T - 1]
        if padding is not None:
            fits = fits | ~(padding[:, 1:] & padding[:, :-1])
        if not bool(fits.all()):
            row, place = (~fits).nonzero()[0].tolist()
            found = positions[min(row, len(positions) - 1), place : place + 2].tolist()
            order = "two parts a rank, one early and one late" if self.balanced else "one part a rank"
            raise StreamBPError(
                f"position_ids of row {row} are {found} at places {place} and {place + 1} of the sequence that the ranks "
                f"hold together, put in the order of torch's context parallelism ({order}). Put position_ids of whole "
                "sequences, torch.arange(whole_length) or documents that start at 0, among the buffers of "
                "context_parallel, with the default load balancer or none."
            )

    def _order(self, device: torch.device) -> Tensor:
        """[2 P], for each part of a sequence its place among the parts of all ranks."""
        part = torch.arange(2 * self.size, device=device)
        return torch.where(part < self.size, 2 * part, 4 * self.size - 1 - 2 * part)

    def start_keys(self, parts: list[Tensor], heads: int) -> Keys:
        """As in `Shards`, from k [B, H_kv, T / P, D] and v; the first group is on its way when this returns."""
        return GatheredKeys(self, parts.pop(0), parts.pop(0), heads)

    def own_gradient(self, sums: list[Tensor], dtype: torch.dtype, heads: int) -> list[Tensor]:
        """From dK [B, T, G, D] and dV of a group, which are taken out of `sums`, those of this rank's tokens from all
        ranks, [B, G, T / P, D]: added in float32 or wider, and rounded to `dtype` once."""
        found: list[Tensor] = []
        while sums:
            sent = self.by_rank(sums.pop(0))
            mine = torch.empty_like(sent[0])
            collective(REDUCE_SCATTER)(mine.view(-1), sent.view(-1), group=self.group)
            found.append(mine.to(dtype).transpose(1, 2))
        return found


def bytes_of_a_head(k: Tensor, v: Tensor, whole: int) -> int:
    """What a head of k [B, H_kv, T / P, D] and v [B, H_kv, T / P, D_v] takes, gathered over `whole` tokens: at work and
    on its way, and their gradients, of which one is sent."""
    item, wide = k.element_size(), torch.promote_types(k.dtype, torch.float32).itemsize
    return k.shape[0] * whole * (k.shape[3] + v.shape[3]) * (4 * item + 3 * wide) // 2


class GatheredKeys(Keys):
    """K and V of all ranks, a group of heads at a time, in order.

    Args:
        k, v: this rank's, [B, H_kv, T / P, D] and [B, H_kv, T / P, D_v]. heads: of the queries, H.
    """

    def __init__(self, shards: GatheredShards, k: Tensor, v: Tensor, heads: int) -> None:
        self.shards, self.own = shards, (k, v)
        self.readers = heads // k.shape[1]
        self.size = max(1, min(k.shape[1], shards.room // bytes_of_a_head(k, v, shards.whole_length)))
        self.held: KeyGroup | None = None
        self.coming = self._start(0)

    def groups(self, last: bool = False) -> Iterator[KeyGroup]:
        """As in `Keys`; a single group stays until it is asked for the last time."""
        if self.held is not None:
            group, self.held = self.held, None if last else self.held
            yield group
            return
        heads = self.own[0].shape[1]
        for first in range(0, heads, self.size):
            coming, self.coming = self.coming or self._start(first), []
            if first + self.size < heads:
                self.coming = self._start(first + self.size)
            elif first == 0 and not last:
                self.held = self._arrived(coming, first)
                yield self.held
                return
            yield self._arrived(coming, first)

    def _start(self, first: int) -> list[tuple[Any, Tensor, Tensor]]:
        """For K and V: the gather, its result [P, B, T / P, G, D], and what this rank sends."""
        found = []
        for part in self.own:
            mine = part[:, first : first + self.size].transpose(1, 2).contiguous()
            everyones = mine.new_empty((self.shards.size, *mine.shape))
            work = collective(GATHER)(everyones.view(-1), mine.view(-1), group=self.shards.group, async_op=True)
            found.append((work, everyones, mine))
        return found

    def _arrived(self, coming: list[tuple[Any, Tensor, Tensor]], first: int) -> KeyGroup:
        found = []
        while coming:
            work, everyones, _ = coming.pop(0)
            work.wait()
            found.append(self.shards.in_order(everyones).contiguous())
        heads = slice(first * self.readers, (first + self.size) * self.readers)
        return KeyGroup(heads, *found)
