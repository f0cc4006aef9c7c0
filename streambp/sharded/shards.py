"""Sequences sharded over the ranks of a group: their spans, and the exchanges around attention.

A layer calls the five methods below and does not depend on the kind of sharding. `Shards`
implements Ulysses: it exchanges a rank's tokens of all heads, [B, H, T / P, D], for all tokens of
the rank's heads, [B, H / P, T, D]. `sharded/gathered_keys.py` implements context parallelism: a
rank keeps its queries and gathers K and V.

    pieces          chunks of this rank's queries, with their positions in the full sequence
    queries         move q to the rank that attends it
    start_keys      k and v of full sequences, in order
    own_gradients    the gradients of k and v for this rank's tokens
    tokens          move attention outputs back to their tokens' rank

All collectives are torch.distributed's. Every rank calls them equally often, for any number of
chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streambp.attention.masks import spans_of_tokens
from streambp.attention.spans import Spans
from streambp.chunks import Chunk, plan_chunks
from streambp.distributed.engines import all_gather
from streambp.errors import StreamBPError, UnsupportedMaskError, UnsupportedModelError


class ChunkShard(NamedTuple):
    """A chunk of queries whose attention this rank computes, with its positions on this rank and in
    the full sequence.

    Attributes:
        local_chunk: the chunk's positions among this rank's queries.
        full_chunk: the chunk's positions in the full sequence.
    """

    local_chunk: Chunk
    full_chunk: Chunk


class KeyGroup(NamedTuple):
    """Some heads of K and V of full sequences, contiguous in memory.

    Attributes:
        heads: slice of the query heads that read these keys.
        k: [B, T, G, D], with G key heads.
        v: [B, T, G, D_v].
    """

    heads: slice
    k: Tensor
    v: Tensor


class Keys:
    """K and V of full sequences, which are read one group of heads at a time. This class has all
    heads in memory, as a single group.

    Args:
        k: [B, T, G, D].
        v: [B, T, G, D_v].
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.key_groups = [KeyGroup(slice(None), k, v)]

    def groups(self, last: bool = False) -> Iterator[KeyGroup]:
        """Yield K and V, one group of heads after the other.

        Args:
            last: True if this is the last loop over this method. The memory is then freed once the
                caller drops the group.
        """
        yield self.key_groups.pop() if last else self.key_groups[0]


@dataclasses.dataclass(frozen=True)
class Shards:
    """A batch whose sequences DeepSpeed Ulysses has split over P ranks: each rank has T / P
    consecutive tokens of every row. The methods exchange q, k, v and attention outputs between the
    ranks, so that each rank attends with all T tokens of some heads.

    Attributes:
        group: process group of the ranks.
        size: P, the number of ranks.
        length: T / P, the tokens of a row on one rank.
        spans: keys that each query of the full sequences may read, by padding and packed documents.
            Layers may have a sliding window in addition.
        positions: position_ids [1 or B, T / P] of this rank's tokens.
        rank: this rank's index in the group.
        headroom: device memory in bytes that every rank can spend on gathered K and V (context
            parallelism).
        by: name of the method that splits sequences, for messages.
        where: the condition under which a layer is unsupported, for error messages.
        remedy: advice to the user, for error messages.
        splits: True if sequences are split over ranks; False if one rank has all tokens.
        gathers_keys: True if K and V are gathered from other ranks (context parallelism).
    """

    group: Any
    size: int
    length: int
    spans: Spans
    positions: Tensor | None = None
    rank: int = 0
    headroom: int = 0

    by: ClassVar[str] = "DeepSpeed Ulysses"
    # texts of error messages
    where: ClassVar[str] = "where sequences are split over ranks"
    remedy: ClassVar[str] = "Train this model without splitting sequences."
    splits: ClassVar[bool] = True
    # each rank has K and V of all its heads at once, and may save them
    gathers_keys: ClassVar[bool] = False

    @property
    def full_length(self) -> int:
        """Return T, the number of tokens in a full sequence."""
        return self.size * self.length

    def chunk_shards(self, batch_size: int, size: int) -> list[ChunkShard]:
        """Return the chunks of queries whose attention this rank computes. Under Ulysses each rank
        attends with all queries of the full sequence, for the rank's own heads.

        Args:
            batch_size: number of rows B.
            size: maximum number of positions of a chunk.
        """
        return [
            ChunkShard(chunk, chunk) for chunk in plan_chunks(self.full_length, batch_size, size)
        ]

    def queries(self, x: Tensor) -> Tensor:
        """Exchange x, this rank's tokens of all heads, [B, H, T / P, D], for all tokens of the
        rank's heads, [B, H / P, T, D]. P is the number of ranks. The result has tokens before heads
        in memory. If there are fewer heads than ranks, heads are repeated.

        Raises:
            UnsupportedModelError: the number of heads is no multiple of the number of ranks, nor
                the reverse.
        """
        batch, heads, length, width = x.shape
        if heads < self.size and self.size % heads == 0:
            x = x.repeat_interleave(self.size // heads, dim=1)
            heads = self.size
        if heads % self.size:
            raise heads_error(heads, self.size)
        # [P, B, H / P, T / P, D]
        exchanged = self.exchange(x.reshape(batch, self.size, -1, length, width).movedim(1, 0))
        return (
            exchanged.permute(1, 0, 3, 2, 4)
            .reshape(batch, self.full_length, -1, width)
            .transpose(1, 2)
        )

    def tokens(self, x: Tensor, heads: int) -> Tensor:
        """Exchange x, all tokens of this rank's heads, [B, H / P, T, D], for the rank's tokens of all
        heads, [B, heads, T / P, D], after attention over P ranks. If `queries` has repeated heads,
        and x is a gradient, the repeated heads are summed."""
        batch, _, _, width = x.shape
        # [P, B, H / P, T / P, D]
        exchanged = self.exchange(x.reshape(batch, -1, self.size, self.length, width).movedim(2, 0))
        x = exchanged.movedim(0, 1).reshape(batch, -1, self.length, width)
        if x.shape[1] == heads:
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.unflatten(1, (heads, -1)).sum(2, dtype=wide).to(x.dtype)

    def sinks(self, sinks: Tensor) -> Tensor:
        """Return the attention sinks (one more score in each head's softmax) of this rank's query
        heads, a view [H / P] of `sinks` [H] for P ranks."""
        return sinks.chunk(self.size)[self.rank]

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Gather the list `numbers` of integers from each rank, and return the lists in the order
        of the ranks. This is a collective: every rank must call the method."""
        assert self.positions is not None
        return [
            row.tolist()
            for row in all_gather(self.group, torch.tensor(numbers, device=self.positions.device))
        ]

    def start_keys(self, parts: list[Tensor], heads: int) -> Keys:
        """Exchange this rank's k [B, H_kv, T / P, D] and v for K and V of full sequences, of the
        heads that this rank's queries read. P is the number of ranks.

        Args:
            parts: list of k and v; the list is emptied.
            heads: H, the number of query heads; not used here.
        """
        return Keys(*(self.queries(parts.pop(0)).transpose(1, 2).contiguous() for _ in range(2)))

    def own_gradients(self, sums: list[Tensor], dtype: torch.dtype, heads: int) -> list[Tensor]:
        """Exchange dK [B, T, G, D] and dV, the gradients of K and V of full sequences for this
        rank's G heads. Return dk [B, heads, T / P, D] and dv of this rank's tokens, for P ranks.

        Args:
            sums: list of dK and dV; the list is emptied.
            dtype: dtype of the result.
            heads: number of key/value heads.
        """
        return [self.tokens(sums.pop(0).to(dtype).transpose(1, 2), heads) for _ in range(2)]

    def to_sequence_order(self, x: Tensor) -> Tensor:
        """Return `x`, the parts of P ranks gathered along a new first dimension, [P, B, T / P,
        ...], as full sequences [B, T, ...] in the order of the positions."""
        return x.transpose(0, 1).flatten(1, 2)

    def check_order(self, positions: Tensor, padding: Tensor | None) -> None:
        """Skip the check of position_ids that context parallelism needs
        (`GatheredShards.check_order`). Under Ulysses rank r always has part r of each sequence, so
        no other order is possible.

        Args:
            positions: [1 or B, T], position_ids of all ranks; not used.
            padding: [B, T], True for tokens; not used.
        """

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of `parts` [P, ...] to rank i of P ranks, and return the parts that the ranks
        have sent, [P, ...]."""
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received


def heads_error(heads: int, ranks: int) -> UnsupportedModelError:
    """Return the error for a number of attention heads that DeepSpeed Ulysses cannot split evenly
    over this number of ranks."""
    return UnsupportedModelError(
        f"{heads} attention heads cannot be split over {ranks} ranks. Choose an sp_size that "
        "divides the number of heads, and divides or is a multiple of the number of key and value "
        "heads."
    )


def gather_shards(
    kind: Callable[..., Shards],
    group: Any,
    tokens: Tensor,
    position_ids: Tensor | None,
    attention_mask: Any,
    agreed: int = 0,
    headroom: int = 0,
) -> Shards:
    """Gather position_ids and padding masks of the P ranks that share sequences, and return the
    split of the full sequences. Called on every rank once for each forward of the backbone.

    Args:
        kind: class of the result: `Shards` for DeepSpeed Ulysses, or a subclass.
        group: process group of the ranks.
        tokens: this rank's tokens, [B, T / P, ...].
        position_ids: [1 or B, T / P] of these tokens, counted over the full sequence.
        attention_mask: padding mask of these tokens, [B, T / P], or None.
        agreed: a number for the settings on which the exchanges depend; must be equal on all ranks.
        headroom: bytes that this rank can spend on K and V; the result has the minimum over the
            ranks.

    Raises:
        StreamBPError: position_ids are missing, or the ranks' tensors do not fit together; on every
            rank alike.
        UnsupportedMaskError: the mask is no padding mask.
    """
    batch_size, length = tokens.shape[:2]
    code = _kind(batch_size, length, position_ids, attention_mask)
    replies = _agree(
        group, torch.tensor([batch_size, length, code, agreed, headroom], device=tokens.device)
    )
    min_code = min(reply[2] for reply in replies)
    if min_code == -1:
        fault = "missing" if position_ids is None else f"of shape {tuple(position_ids.shape)}"
        raise StreamBPError(
            f"position_ids are {fault}. With sequences split over ranks each rank must pass the "
            f"positions of its shard, [1 or {batch_size}, {length}], counted over the whole "
            "sequence. Put torch.arange(whole_length) into the batch before it is split "
            "(DeepSpeed Ulysses), or among the buffers of context_parallel."
        )
    if min_code == -2:
        raise UnsupportedMaskError(
            f"attention_mask is {getattr(attention_mask, 'shape', type(attention_mask).__name__)}; "
            "with sequences split over ranks it must be this rank's shard of a padding mask, "
            f"[{batch_size}, {length}], or None."
        )
    assert position_ids is not None
    size = len(replies)
    min_headroom = min(reply[4] for reply in replies)
    spans = Spans.causal(batch_size, length * size)
    shards = kind(group, size, length, spans, position_ids, dist.get_rank(group), min_headroom)
    # [1 or B, T]
    positions = shards.to_sequence_order(torch.stack(all_gather(group, position_ids.contiguous())))
    padding = None
    if attention_mask is not None:
        everyones_masks = all_gather(group, attention_mask.to(torch.uint8).contiguous())
        padding = shards.to_sequence_order(torch.stack(everyones_masks)).bool()  # [B, T]
    shards.check_order(positions, padding)
    return dataclasses.replace(
        shards, spans=spans_of_tokens(batch_size, length * size, padding, positions)
    )


def _agree(group: Any, numbers: Tensor) -> list[list[int]]:
    """Gather the integers `numbers` [n] of each rank, and return one list for each rank. The
    numbers describe the batch and the settings that decide exchanges. All ranks raise unless the
    numbers are equal on every rank. Only the last number, a rank's free memory, may differ.

    Args:
        group: process group of the ranks.
        numbers: [n], this rank's numbers.

    Raises:
        StreamBPError: the ranks' numbers differ, or a rank did not take part.
    """
    try:
        replies: list[list[int]] = [reply.tolist() for reply in all_gather(group, numbers)]
    except RuntimeError as error:
        raise StreamBPError(
            "The ranks that share sequences did not all begin this forward: a rank has ended, or "
            "does not split its batch. If no other rank shows an error of its own, enter "
            "context_parallel on every rank of its mesh. With DeepSpeed Ulysses the model must be "
            "in training mode on all ranks, or on none."
        ) from error
    for rank, reply in enumerate(replies):
        if reply[:-1] != replies[0][:-1]:
            raise StreamBPError(
                "Ranks that share sequences hold different shards. Rank 0 holds [rows, tokens, "
                f"position_ids and mask, settings] = {replies[0][:-1]}, rank {rank} "
                f"{reply[:-1]}. Shards must have the same shape and position_ids, so the number of "
                "ranks must divide the number of tokens. attention_mask must be passed on all "
                "ranks or on none. StreamConfig must be the same on all ranks, chunk_size "
                "excepted."
            )
    return replies


def _kind(batch_size: int, length: int, position_ids: Tensor | None, attention_mask: Any) -> int:
    """Return an integer that stands for the shapes of position_ids and attention_mask. `_agree`
    checks that this integer is equal on all ranks.

    The integer is twice the number of rows of position_ids, plus 1 if there is a mask. The integer
    is -1 if position_ids do not fit the tokens, and -2 if the mask does not fit.

    Args:
        batch_size: number of rows of this rank's tokens.
        length: number of this rank's tokens in a row.
        position_ids: position_ids of these tokens.
        attention_mask: padding mask of these tokens, or None.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != length:
        return -1
    if attention_mask is None:
        return 2 * position_ids.shape[0]
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != (
        batch_size,
        length,
    ):
        return -2
    return 2 * position_ids.shape[0] + 1
