"""A layer cut at its attention, for where attention needs other ranks' tokens.

The half before attention runs the layer's own forward up to its attention call and stops there; the half after runs it
again, with an attention that returns what was computed in between.
"""

from __future__ import annotations

from torch import Tensor

from streambp.attention.prefix import AttentionCall, AttentionPoint, RefillDone
from streambp.errors import UnsupportedModelError


class BeforeAttention(AttentionPoint):
    """Stops the layer at its attention; `projected` is what it was called with, with its graph if there is one."""

    def __init__(self) -> None:
        self.projected: AttentionCall | None = None

    def attend(self, given: AttentionCall) -> Tensor:
        """Keep what attention is called with, q [B, H, C, D] among it, and stop the layer by `RefillDone`.

        Raises:
            UnsupportedModelError: the call has dropout.
        """
        if given.dropout > 0.0:
            raise UnsupportedModelError(
                f"The model attends with attention dropout of {given.dropout}, which streambp does not support where "
                "sequences are split over ranks. Set attention_dropout=0.0 in its config."
            )
        self.projected = given
        raise RefillDone

    def finish(self) -> None:
        """Check that the layer was stopped.

        Raises:
            UnsupportedModelError: it did not attend.
        """
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

    def attend(self, given: AttentionCall) -> Tensor:
        """o [B, C, H, D_v], contiguous, whatever is given."""
        self.calls += 1
        return self.o.transpose(1, 2).contiguous()

    def finish(self) -> None:
        """Check that the layer attended once.

        Raises:
            UnsupportedModelError: it attended more or fewer times.
        """
        if self.calls != 1:
            raise UnsupportedModelError(
                f"A layer attended {self.calls} times; where sequences are split over ranks it must do so once. Train this "
                "model without splitting sequences."
            )
