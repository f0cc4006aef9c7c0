"""A layer cut at its attention, for where attention needs other ranks' tokens.

The half before attention runs the layer's own forward up to its attention call and stops there; the half after runs it
again, with an attention that returns what was computed in between.
"""

from __future__ import annotations

from torch import Tensor

from streambp.attention.prefix import AttentionCall, AttentionPoint, RefillDone
from streambp.errors import UnsupportedModelError


class Cut(AttentionPoint):
    """Where a layer is cut: the half before stops at it, the half after goes on from attention's output o [B, H, C, D_v].

    Args:
        o: of the half after, which does not look at queries, keys and values; None: it is the half before.

    projected: what attention was called with, with its graph if there is one.
    """

    def __init__(self, o: Tensor | None = None) -> None:
        self.o = o
        self.calls = 0
        self.projected: AttentionCall | None = None

    def attend(self, given: AttentionCall) -> Tensor:
        """o [B, C, H, D_v], contiguous, whatever is given; the half before is stopped by `RefillDone`.

        Raises:
            UnsupportedModelError: the call has dropout.
        """
        self.calls += 1
        if self.o is not None:
            return self.o.transpose(1, 2).contiguous()
        if given.dropout > 0.0:
            raise UnsupportedModelError(
                f"The model attends with attention dropout of {given.dropout}, which streambp does not support where "
                "sequences are split over ranks. Set attention_dropout=0.0 in its config."
            )
        self.projected = given
        raise RefillDone

    def finish(self) -> None:
        """Check that the layer attended once.

        Raises:
            UnsupportedModelError: it attended more or fewer times.
        """
        if self.o is None and not self.calls:
            raise UnsupportedModelError(
                "A layer did not attend through transformers' attention interface, so it cannot see what other ranks hold. "
                "Train this model without splitting sequences."
            )
        if self.calls != 1:
            raise UnsupportedModelError(
                f"A layer attended {self.calls} times; where sequences are split over ranks it must do so once. Train this "
                "model without splitting sequences."
            )
