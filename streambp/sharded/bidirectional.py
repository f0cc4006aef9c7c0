"""Stream a layer whose queries also read later keys (bidirectional attention), on one rank.

Keys and values of a layer depend on the layer's input alone. The layer is therefore cut at its
attention, as if its tokens were split over ranks. Chunks up to attention compute q, k and v of all
tokens. Then each chunk's queries read all keys, and chunks from attention on compute the rest.
`sharded/layer.py` describes the passes; nothing is exchanged here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from streambp.admission.entry import CHUNK_STRATEGY, stream_layer
from streambp.admission.layer_checkpoint import run_unchunked
from streambp.admission.t5_bias import stream_biased
from streambp.attention.interface import Layout
from streambp.attention.masks import DenseMask
from streambp.attention.prefix import Prefix
from streambp.attention.spans import Spans
from streambp.chunks import Forks
from streambp.layer.arguments import Arguments
from streambp.layer.call import LayerCall, plan_of
from streambp.layer.chunk_states import CrossChunkState
from streambp.layer.function import BackwardPass, Strategy
from streambp.layer.layer_state import LayerState
from streambp.recurrent.documents import PackedRows
from streambp.sharded.call import ShardedCall, ShardedSaves
from streambp.sharded.layer import run_backward_in_halves, run_forward_in_halves
from streambp.sharded.shards import Keys, Shards


class OneRankShards(Shards):
    """Implementation of `Shards`, the exchanges between ranks around attention, for sequences that
    are not split. One rank has all tokens and heads, and exchanges nothing."""

    where: ClassVar[str] = "where attention is bidirectional"
    remedy: ClassVar[str] = "Use gradient checkpointing for this model (streambp.unpatch(model))."
    splits: ClassVar[bool] = False

    def queries(self, x: Tensor) -> Tensor:
        """Return x [B, H, T, D] itself: the rank has all tokens, so nothing is exchanged."""
        return x

    def tokens(self, x: Tensor, heads: int) -> Tensor:
        """Return x [B, H, T, D] itself: the rank has all heads, so nothing is exchanged. `heads`,
        the number of heads, is not used."""
        return x

    def sinks(self, sinks: Tensor) -> Tensor:
        """Return the attention sinks [H] themselves: the rank has all heads."""
        return sinks

    def start_keys(self, parts: list[Tensor], heads: int) -> Keys:
        """Return K and V of all heads and tokens, from k [B, H_kv, T, D] and v; nothing is
        exchanged.

        Args:
            parts: list of k and v; the list is emptied.
            heads: H, the number of query heads; not used.
        """
        return Keys(*(parts.pop(0).transpose(1, 2).contiguous() for _ in range(2)))

    def own_gradients(self, sums: list[Tensor], dtype: Any, heads: int) -> list[Tensor]:
        """Return dK and dV, the gradients of K and V, as dk and dv [B, H_kv, T, D] in `dtype`.
        Nothing is exchanged or summed.

        Args:
            sums: list of dK [B, T, H_kv, D] and dV; the list is emptied.
            dtype: dtype of the result.
            heads: number of key/value heads; not used.
        """
        return [sums.pop(0).to(dtype).transpose(1, 2) for _ in range(2)]


class BidirectionalSaves(ShardedSaves):
    """The tensors that a layer call saves for backward if its attention is bidirectional, such as
    inputs of chunks, K and V. Sequences are not split here: the rank that runs the call has all
    tokens. The free memory of this rank may therefore decide which tensors are saved with
    `saves="auto"`. The base class is for ranks that share a sequence. These ranks must all save the
    same tensors."""

    chosen_here = True
    attends_by_chunk = True

    @property
    def moves_kv(self) -> bool:
        """Return False: unlike a causal layer, this call does not move K and V to the host chunk by
        chunk. K and V of all tokens are saved at once, before the half of the layer after
        attention."""
        return False


class BidirectionalCall(ShardedCall):
    """One call of a decoder layer whose queries read later keys, run in several chunks on one rank.
    The layer's forward is cut in two at its attention, because K and V of all tokens must exist
    before any query attends.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        arguments: the arguments of the layer's forward.
        layout: the keys that each query may read, and the positions where no chunk may end.

    Attributes:
        mask_layout: the argument `layout`.
    """

    has_full_sequence = True
    saves_class = BidirectionalSaves

    def __init__(self, layer_state: LayerState, arguments: Arguments, layout: Layout) -> None:
        self.mask_layout = layout
        length = arguments.hidden_states.shape[-2]
        rows = arguments.hidden_states.shape[-3]
        # the spans of `Shards` are for masks that ranks share; this layer has its own
        super().__init__(
            layer_state, arguments, OneRankShards(None, 1, length, Spans.causal(rows, length))
        )

    def _make_cross_chunk_state(self) -> CrossChunkState:
        spans = self.mask_layout.spans
        if isinstance(spans, DenseMask):
            spans = spans.over_all_keys(self.hidden_states.device)
        layout = Layout(spans, (), self.mask_layout.document_source)
        prefix = Prefix(spans, self.plan.length, self.layer_state.config.attention)
        prefix.calls = 1  # the half before attention ends at the first call
        return CrossChunkState(layout, prefix, self.layer_state.kind.attention.in_tiles)


def stream_bidirectional(
    layer_state: LayerState, args: Any, kwargs: Any, rows: PackedRows | None, forks: Forks
) -> Any:
    """Compute the forward of a decoder layer whose attention modules are bidirectional
    (is_causal=False), and return the layer's result. If queries read later keys, the layer is cut
    in two at its attention: K and V of all tokens are computed before any query attends. Otherwise
    chunks run through the layer one after the other.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.
        rows: boundaries of packed documents, from position_ids; None: no packed documents.
        forks: positions at which recurrent states continue from an earlier position.
    """
    if layer_state.kind.attention.adds_bias:
        return stream_biased(layer_state, args, kwargs, rows, forks, BIDIRECTIONAL_STRATEGY)
    return stream_layer(layer_state, args, kwargs, rows, BIDIRECTIONAL_STRATEGY, forks)


def _make(layer_state: LayerState, arguments: Arguments) -> LayerCall:
    """Return the object for one call of a layer: a `BidirectionalCall`, which computes the parts of
    the layer before and after attention one after the other, or an ordinary `LayerCall`.

    The result is a `LayerCall` if the sequence is one chunk. Otherwise the result is a
    `BidirectionalCall` if queries read later keys. A mask that allows one chunk alone, or only
    chunks longer than twice the requested chunk size, has the same effect.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        arguments: the arguments of the layer's forward.
    """
    hidden_states = arguments.hidden_states
    rows, length = hidden_states.shape[-3:-1]
    plan = plan_of(layer_state, rows, length, hidden_states.device)
    if len(plan.ends) > 1:
        layout = layer_state.kind.attention.layout(arguments.by_name, hidden_states)
        ahead = isinstance(layout.spans, Spans) and layout.spans.reads_ahead
        allowed = plan.avoid_barriers(layout.barriers)
        if ahead or len(allowed.ends) == 1 or allowed.longest > 2 * plan.size:
            return BidirectionalCall(layer_state, arguments, layout)
    return LayerCall(layer_state, arguments)


def _forward(call: LayerCall, keep: bool) -> tuple[Tensor, ...]:
    if isinstance(call, BidirectionalCall):
        return run_forward_in_halves(call, keep)
    return CHUNK_STRATEGY.forward(call, keep)


def _backward(call: LayerCall, work: BackwardPass) -> None:
    if isinstance(call, BidirectionalCall):
        run_backward_in_halves(call, work)
    else:
        CHUNK_STRATEGY.backward(call, work)


BIDIRECTIONAL_STRATEGY = Strategy(_make, _forward, _backward, run_unchunked)
