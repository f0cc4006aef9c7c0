"""Context parallelism: a rank keeps its tokens' queries and gathers the K and V that they read.

K and V of full sequences are gathered one group of heads at a time. The next group is in transfer
during attention over the current group. The ranks sum their gradients in float32, group by group. A
device therefore holds one group of heads of T tokens, for any number of heads. The group size
follows from the memory of the rank with the least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streambp.chunks import Chunk, ChunkPlan
from streambp.device import allocator_bytes, memory_limit, reports_memory
from streambp.errors import StreamBPError
from streambp.known_names import GATHER, REDUCE_SCATTER
from streambp.sharded.shards import ChunkShard, KeyGroup, Keys, Shards

# an eighth of the memory that is free at the start of forward: for K, V and their gradients
FREE_MEMORY_DIVISOR = 8
DEFAULT_KEY_BYTES = 2**30  # bytes for K, V and their gradients on a device without a known limit


def key_memory_bytes(device: torch.device) -> int:
    """Return the bytes of device memory that this rank can spend on K and V gathered from other
    ranks, and on their gradients. All ranks then agree on the smallest of their values, which
    limits the number of heads that are gathered at a time."""
    if not reports_memory(device):
        return DEFAULT_KEY_BYTES
    return int(memory_limit(device) - allocator_bytes(device, "allocated")) // FREE_MEMORY_DIVISOR


def collective(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a collective of torch.distributed, which versions of torch call by different names.
    The result is the function with the first of `names` that this version has."""
    function: Callable[..., Any] = next(
        getattr(dist, name) for name in names if hasattr(dist, name)
    )
    return function


@dataclasses.dataclass(frozen=True)
class GatheredShards(Shards):
    """Sequences that torch's context parallelism has split over P ranks. Queries stay on their
    rank, and K and V are gathered from all ranks.

    Attributes:
        balanced: True: a sequence has 2 P parts and rank r holds parts r and 2 P - 1 - r. False: a
            sequence has P parts and rank r holds part r.
        headroom: bytes that every rank has for K, V and their gradients.
    """

    balanced: bool = True

    by = "context parallelism"
    gathers_keys = True

    @property
    def _starts(self) -> list[int]:
        """Return the position in the full sequence at which each of this rank's one or two parts
        begins."""
        if not self.balanced:
            return [self.rank * self.length]
        return [part * self.length // 2 for part in (self.rank, 2 * self.size - 1 - self.rank)]

    def chunk_shards(self, batch_size: int, size: int) -> list[ChunkShard]:
        """Return the chunks of this rank's queries, for all heads, in sequence order. Attention is
        computed one chunk at a time. Each chunk has at most `size` positions.

        Args:
            batch_size: number of rows B.
            size: maximum length of a chunk.
        """
        groups: list[ChunkShard] = []
        length = self.length // len(self._starts)
        for number, start in enumerate(self._starts):
            for chunk in ChunkPlan(length, min(size, length)):
                first_query = number * length
                index = len(groups)
                groups.append(
                    ChunkShard(
                        Chunk(index, first_query + chunk.start, first_query + chunk.stop),
                        Chunk(index, start + chunk.start, start + chunk.stop),
                    )
                )
        return groups

    def queries(self, x: Tensor) -> Tensor:
        """Return queries x [B, H, T / P, D] of one of P ranks unchanged: queries stay on their
        rank."""
        return x

    def tokens(self, x: Tensor, heads: int) -> Tensor:
        """Return attention outputs x [B, heads, T / P, D] of one of P ranks unchanged: the outputs
        are on their tokens' rank already."""
        return x

    def sinks(self, sinks: Tensor) -> Tensor:
        """Return attention sinks [H] unchanged: every rank has all heads."""
        return sinks

    def to_sequence_order(self, x: Tensor) -> Tensor:
        """Return `x`, the parts of P ranks gathered along a new first dimension, [P, B, T / P,
        ...], as full sequences [B, T, ...] in the order of the positions."""
        parts = x.transpose(0, 1)  # [B, P, T / P, ...]
        if not self.balanced:
            return parts.flatten(1, 2)
        return (
            parts.unflatten(2, (2, -1))
            .flatten(1, 2)
            .index_select(1, self._order(x.device))
            .flatten(1, 2)
        )

    def to_rank_parts(self, x: Tensor) -> Tensor:
        """Return full sequences `x` [B, T, ...] as the parts of P ranks, [P, B, T / P, ...]: the
        input of a reduce-scatter. This is the inverse of `to_sequence_order`."""
        if self.balanced:
            inverse = self._order(x.device).argsort()
            x = x.unflatten(1, (2 * self.size, -1)).index_select(1, inverse).flatten(1, 2)
        return x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()

    def check_order(self, positions: Tensor, padding: Tensor | None) -> None:
        """Check that this rank and the other ranks have the parts of the sequences that torch's
        context parallelism gives to each. If so, the joined position_ids increase by 1 from token
        to token, or restart at 0 for a document.

        Padding may have any positions.

        Args:
            positions: [1 or B, T], position_ids of all ranks, joined in the order that context
                parallelism defines.
            padding: [B, T], True for tokens; None: no padding.

        Raises:
            StreamBPError: the positions do not increase like this; on every rank alike.
        """
        fits = (positions.diff() == 1) | (positions[:, 1:] == 0)  # [1 or B, T - 1]
        if padding is not None:
            fits = fits | ~(padding[:, 1:] & padding[:, :-1])
        if not bool(fits.all()):
            row, column = (~fits).nonzero()[0].tolist()
            pair = positions[min(row, len(positions) - 1), column : column + 2].tolist()
            order = (
                "two parts a rank, one early and one late" if self.balanced else "one part a rank"
            )
            raise StreamBPError(
                f"position_ids of row {row} are {pair} at places {column} and {column + 1} of the "
                "sequence that the ranks hold together, put in the order of torch's context "
                f"parallelism ({order}). Put position_ids of whole sequences, "
                "torch.arange(whole_length) or documents that start at 0, among the buffers of "
                "context_parallel, with the default load balancer or none."
            )

    def _order(self, device: torch.device) -> Tensor:
        """Return the permutation that sorts the parts of P ranks, two on each, by position: [2 P].
        Entry i is the index of the sequence's part i among the parts in the order of the ranks. The
        result is on `device`."""
        part = torch.arange(2 * self.size, device=device)
        return torch.where(part < self.size, 2 * part, 4 * self.size - 1 - 2 * part)

    def start_keys(self, parts: list[Tensor], heads: int) -> Keys:
        """Start to gather K and V of full sequences from k [B, H_kv, T / P, D] and v of all P
        ranks, and return them as `GatheredKeys`.

        Args:
            parts: list of k and v; the list is emptied.
            heads: H, the number of query heads.
        """
        return GatheredKeys(self, parts.pop(0), parts.pop(0), heads)

    def own_gradients(self, sums: list[Tensor], dtype: torch.dtype, heads: int) -> list[Tensor]:
        """Sum dK [B, T, G, D] and dV, the gradients of K and V of full sequences for G heads, over
        P ranks. Return dk and dv [B, G, T / P, D] of this rank's tokens.

        Args:
            sums: list of dK and dV in float32 or wider; the list is emptied.
            dtype: dtype of the result.
            heads: number of key/value heads.
        """
        gradients: list[Tensor] = []
        while sums:
            sent = self.to_rank_parts(sums.pop(0))
            shard = torch.empty_like(sent[0])
            collective(REDUCE_SCATTER)(shard.view(-1), sent.view(-1), group=self.group)
            gradients.append(shard.to(dtype).transpose(1, 2))
        return gradients


def bytes_of_a_head(k: Tensor, v: Tensor, length: int) -> int:
    """Return the bytes of device memory for one head of gathered K and V in backward: values in
    use, values in transfer, and gradients. The number of heads in a group follows from these bytes.

    Args:
        k: [B, H_kv, T / P, D].
        v: [B, H_kv, T / P, D_v].
        length: T, the number of tokens in a full sequence.
    """
    item = k.element_size()
    wide = torch.promote_types(k.dtype, torch.float32).itemsize
    return k.shape[0] * length * (k.shape[3] + v.shape[3]) * (4 * item + 3 * wide) // 2


class GatheredKeys(Keys):
    """K and V of full sequences, gathered from all P ranks, some heads at a time.

    Args:
        shards: the split of the sequences.
        k: this rank's K, [B, H_kv, T / P, D].
        v: this rank's V, [B, H_kv, T / P, D_v].
        heads: H, the number of query heads; several query heads may share a head of K and V.
    """

    def __init__(self, shards: GatheredShards, k: Tensor, v: Tensor, heads: int) -> None:
        self.shards = shards
        self.local_kv = (k, v)
        self.readers = heads // k.shape[1]
        self.size = max(
            1, min(k.shape[1], shards.headroom // bytes_of_a_head(k, v, shards.full_length))
        )
        self.reused_group: KeyGroup | None = None
        self.coming = self._start(0)

    def groups(self, last: bool = False) -> Iterator[KeyGroup]:
        """Yield K and V, one group of heads after the other, while the next group is in transfer.
        If a single group has all heads, the group stays in memory for later loops over this method.

        Args:
            last: True if this is the last loop. No group stays in memory then.
        """
        if self.reused_group is not None:
            group = self.reused_group
            self.reused_group = None if last else self.reused_group
            yield group
            return
        heads = self.local_kv[0].shape[1]
        for first in range(0, heads, self.size):
            coming = self.coming or self._start(first)
            self.coming = []
            if first + self.size < heads:
                self.coming = self._start(first + self.size)
            elif first == 0 and not last:
                self.reused_group = self._wait_for(coming, first)
                yield self.reused_group
                return
            yield self._wait_for(coming, first)

    def _start(self, first: int) -> list[tuple[Any, Tensor, Tensor]]:
        """Start to gather K and V of one group of heads.

        Args:
            first: index of the group's first head.

        Returns:
            For K and for V: the running collective, its result [P, B, T / P, G, D], and this rank's
                part. P is the number of ranks, G that of the heads.
        """
        transfers = []
        for part in self.local_kv:
            shard = part[:, first : first + self.size].transpose(1, 2).contiguous()
            all_parts = shard.new_empty((self.shards.size, *shard.shape))
            work = collective(GATHER)(
                all_parts.view(-1), shard.view(-1), group=self.shards.group, async_op=True
            )
            transfers.append((work, all_parts, shard))
        return transfers

    def _wait_for(self, coming: list[tuple[Any, Tensor, Tensor]], first: int) -> KeyGroup:
        """Wait until K and V of one group of heads are gathered, and return both with their tokens
        in the order of the sequence.

        Args:
            coming: the result of `_start`; the list is emptied.
            first: index of the group's first head.
        """
        keys_and_values = []
        while coming:
            work, all_parts, _ = coming.pop(0)
            work.wait()
            keys_and_values.append(self.shards.to_sequence_order(all_parts).contiguous())
        heads = slice(first * self.readers, (first + self.size) * self.readers)
        return KeyGroup(heads, *keys_and_values)
