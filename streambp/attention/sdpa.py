"""What torch's own attention would make of a streamed layer's: whether it is the same, and whether it builds the scores."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from streambp.device import has_data


@dataclasses.dataclass(frozen=True)
class AsSdpa:
    """A layer's attention calls, unpatched and with transformers' sdpa.

    same: it computes what streamed attention computes; it knows no softcap and no sinks. heads: so many have their scores
    [B, H, T, T] built, because no fused kernel takes the call; 0: none.
    """

    same: bool = True
    heads: int = 0

    def __or__(self, other: AsSdpa) -> AsSdpa:
        return AsSdpa(self.same and other.same, max(self.heads, other.heads))


def as_sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float, same: bool) -> AsSdpa:
    """Of a call with q [B, H, C, D], k [B, H_kv, C, D] and v [B, H_kv, C, D_v], the same number of queries and keys."""
    if not has_data(q):
        return AsSdpa(same)
    fused = torch._fused_sdp_choice(q, k, v, None, dropout, True, enable_gqa=q.shape[1] != k.shape[1])
    return AsSdpa(same, 0 if fused else q.shape[1])
