"""Sequences of which every rank of a group holds one shard: their spans, and the exchange of heads for tokens.

Around attention each rank trades its tokens of all heads, [B, H, T / P, D], for all tokens of its heads, [B, H / P, T, D].
All collectives are torch.distributed's; every rank calls them equally often, however many chunks it has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streambp.attention.masks import spans_of_tokens
from streambp.attention.spans import Spans
from streambp.errors import StreamBPError, UnsupportedMaskError, UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class Shards:
    """One batch of split sequences, B rows of `size * length` tokens; this rank holds `length` of each, in rank order.

    spans: what each query of the whole sequences may read, without a sliding window.
    """

    group: Any
    size: int
    length: int
    spans: Spans

    @property
    def whole_length(self) -> int:
        """T, tokens of a whole sequence."""
        return self.size * self.length

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, H, T / P, D] -> [B, H / P, T, D], with tokens before heads in memory. Fewer heads than ranks are repeated, so
        that each rank has one."""
        batch, heads, length, width = x.shape
        if heads < self.size and self.size % heads == 0:
            x, heads = x.repeat_interleave(self.size // heads, dim=1), self.size
        if heads % self.size:
            raise UnsupportedModelError(
                f"{heads} attention heads cannot be split over {self.size} ranks. Choose an sp_size that divides the "
                "number of heads, and divides or is a multiple of the number of key and value heads."
            )
        mine = self._exchange(x.reshape(batch, self.size, -1, length, width).movedim(1, 0))  # [P, B, H / P, T / P, D]
        return mine.permute(1, 0, 3, 2, 4).reshape(batch, self.whole_length, -1, width).transpose(1, 2)

    def to_tokens(self, x: Tensor, heads: int) -> Tensor:
        """[B, H / P, T, D] -> [B, heads, T / P, D]; repeated heads are summed, as their gradients must be."""
        batch, _, _, width = x.shape
        mine = self._exchange(x.reshape(batch, -1, self.size, self.length, width).movedim(2, 0))  # [P, B, H / P, T / P, D]
        x = mine.movedim(0, 1).reshape(batch, -1, self.length, width)
        if x.shape[1] == heads:
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.unflatten(1, (heads, -1)).sum(2, dtype=wide).to(x.dtype)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of [P, ...] goes to rank i; part i of the result came from there."""
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received


def gather_shards(
    group: Any, batch_size: int, length: int, position_ids: Tensor | None, attention_mask: Any, agreed: int = 0
) -> Shards:
    """What the ranks of `group` hold together: each hands in its shard of position_ids [1 or B, T / P] and of a 2-D mask.

    Args:
        agreed: a number that must be the same on all ranks, because it decides which exchanges they make.

    Raises:
        StreamBPError: position_ids are missing, or the shards do not fit together; on every rank alike.
        UnsupportedMaskError: the mask is no padding mask.
    """
    kind = _kind(batch_size, length, position_ids, attention_mask)
    device = position_ids.device if position_ids is not None else torch.device("cpu")
    mine = torch.tensor([batch_size, length, kind, agreed], device=device)
    everyones = [other.tolist() for other in _all_gather(group, mine)]
    for rank, other in enumerate(everyones):
        if other != everyones[0]:
            raise StreamBPError(
                f"Rank 0 of the sequence-parallel group holds [rows, tokens, kind of mask, saved kv] = {everyones[0]}, "
                f"rank {rank} {other}. Shards must have the same shape, and StreamConfig must be the same on all ranks; "
                "only chunk_size may differ."
            )
    assert position_ids is not None
    positions = torch.cat(_all_gather(group, position_ids.contiguous()), 1)  # [1 or B, T]
    padding = None
    if attention_mask is not None:
        padding = torch.cat(_all_gather(group, attention_mask.to(torch.uint8).contiguous()), 1).bool()  # [B, T]
    whole = length * len(everyones)
    return Shards(group, len(everyones), length, spans_of_tokens(batch_size, whole, padding, positions))


def _kind(batch_size: int, length: int, position_ids: Tensor | None, attention_mask: Any) -> int:
    """Whether there is a mask, 0 or 1, and how many rows of positions there are, times 2."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != length:
        found = "missing" if position_ids is None else f"of shape {tuple(position_ids.shape)}"
        raise StreamBPError(
            f"position_ids are {found}; with sequences split over ranks (DeepSpeed Ulysses) each rank must pass those of "
            f"its shard, [1 or {batch_size}, {length}], counted over the whole sequence: put "
            "torch.arange(whole_length) into the batch before it is split."
        )
    if attention_mask is None:
        return 2 * position_ids.shape[0]
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != (batch_size, length):
        raise UnsupportedMaskError(
            f"attention_mask is {getattr(attention_mask, 'shape', type(attention_mask).__name__)}; with sequences split "
            f"over ranks it must be this rank's shard of a padding mask, [{batch_size}, {length}], or None."
        )
    return 2 * position_ids.shape[0] + 1


def _all_gather(group: Any, tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
