"""A layer cut in two at its attention, because attention needs tokens of other ranks.

The first half runs the layer's own forward up to its attention call and stops there. The second
half runs the forward again, with a replacement of attention that returns the output computed in
between.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from streambp.attention.prefix import AttentionCall, ChunkAttention, RefillDone
from streambp.errors import UnsupportedModelError


class SplitAtAttention(ChunkAttention):
    """Replacement of a layer's attention, which cuts the layer's forward in two. The half before
    attention ends at the attention call. The attention call in the half after attention returns a
    given output.

    Args:
        o: attention's output [B, H, C, D_v] for the half after attention; None: this is the half
            before attention.
        at_attention: called at the attention call of the half after attention; None: nothing is
            called.

    Attributes:
        projected: arguments of the attention call (q, k, v and others), in the half before
            attention.
    """

    def __init__(
        self, o: Tensor | None = None, at_attention: Callable[[], None] | None = None
    ) -> None:
        self.o = o
        self.at_attention = at_attention
        self.calls = 0
        self.projected: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        """Replace the layer's attention call. The half after attention gets attention's output o
        as [B, C, H, D_v], contiguous. The half before attention ends here: the call's arguments are
        stored in `projected`, and `RefillDone` is raised, which ends the layer's forward.
        """
        self.calls += 1
        if self.o is not None:
            if self.at_attention is not None:
                self.at_attention()
            return self.o.transpose(1, 2).contiguous()
        self.projected = call
        raise RefillDone

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, C, D], k and v of the chunk, after the half before attention."""
        assert self.projected is not None
        return self.projected.q, self.projected.k, self.projected.v

    def finish(self) -> None:
        """Check, at the end of the layer's forward, that the forward has called attention once.

        Raises:
            UnsupportedModelError: the layer attended more or fewer times.
        """
        if self.o is None and not self.calls:
            raise UnsupportedModelError(
                "A layer did not attend through transformers' attention interface, so it cannot "
                "see what other ranks hold. Train this model without splitting sequences."
            )
        if self.calls != 1:
            raise UnsupportedModelError(
                f"A layer attended {self.calls} times; where sequences are split over ranks it "
                "must do so once. Train this model without splitting sequences."
            )
