"""A layer cut at its attention, for where attention needs other ranks' tokens.

The half before attention runs the layer's own forward up to its attention call and stops there; the half after runs it
again, with an attention that returns what was computed in between.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from streambp.attention.prefix import AttentionPoint, RefillDone
from streambp.errors import UnsupportedModelError


@dataclasses.dataclass
class Projected:
    """What a layer hands to its attention: q [B, H, C, D], k and v [B, H_kv, C, D], the scale and the softcap."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None


class BeforeAttention(AttentionPoint):
    """Stops the layer at its attention; `projected` is what it was called with, with its graph if there is one."""

    def __init__(self) -> None:
        self.projected: Projected | None = None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        if dropout > 0.0 or sink is not None:
            what = "an attention sink" if sink is not None else f"attention dropout of {dropout}"
            raise UnsupportedModelError(
                f"The model attends with {what}, which streambp does not support where sequences are split over ranks. "
                + ("Run it unpatched." if sink is not None else "Set attention_dropout=0.0 in its config.")
            )
        self.projected = Projected(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
        raise RefillDone

    def finish(self) -> None:
        if self.projected is None:
            raise UnsupportedModelError(
                "A layer did not attend through transformers' attention interface, so it cannot see what other ranks hold. "
                "Train this model without splitting sequences."
            )


class AfterAttention(AttentionPoint):
    """Lets the layer go on from its attention's output o [B, H, C, D_v]; queries, keys and values are not looked at."""

    def __init__(self, o: Tensor) -> None:
        self.o = o
        self.calls = 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        return self.o.transpose(1, 2).contiguous()

    def finish(self) -> None:
        if self.calls != 1:
            raise UnsupportedModelError(
                f"A layer attended {self.calls} times; where sequences are split over ranks it must do so once. Train this "
                "model without splitting sequences."
            )
