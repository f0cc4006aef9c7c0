"""Stream layers whose attention adds T5's bias by the distance of key and query.

T5's first layer computes the bias from its table, and returns the bias for the other layers. Here
the bias has one value for each distance (`attention/position_biases.py`). It is computed before the
first layer runs. Every layer gets the bias as an argument, and returns the bias's gradient.
Autograd adds these gradients, and gives the sum to the table.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from streambp.admission.entry import CHUNK_STRATEGY, stream_layer
from streambp.admission.layer_checkpoint import run_unchunked
from streambp.attention.kinds import BiasedAttention
from streambp.attention.position_biases import distance_bias, has_table, is_distance_bias
from streambp.chunks import Forks
from streambp.errors import UnsupportedModelError
from streambp.known_names import POSITION_BIAS
from streambp.layer.function import Strategy
from streambp.layer.layer_state import CallReport, LayerState
from streambp.recurrent.documents import PackedRows
from streambp.source import written_forward

REASON_BIAS_BY_PAIR = "its position_bias has a value for each pair of positions, or is missing"


def stream_biased(
    layer_state: LayerState,
    args: Any,
    kwargs: Any,
    rows: PackedRows | None,
    forks: Forks,
    strategy: Strategy = CHUNK_STRATEGY,
) -> Any:
    """Compute the forward of a layer whose attention adds T5's bias in chunks, and return its
    result.

    T5's first layer computes the bias and returns it for the later layers, which have an argument
    for the bias. The bias here has one value for each distance between a query and a key, instead
    of one for each pair of positions. A layer that gets another bias runs unchunked.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.
        rows: boundaries of the documents in packed rows, read from position_ids for layers with
            recurrent states; None: no such boundaries.
        forks: pairs (start, origin) of positions in a packed row whose documents share a prefix.
            Recurrent states at `start` continue from the prefix that ends at `origin`, or start
            anew if `origin` is 0.
        strategy: functions that compute the call; default: chunk by chunk, on one rank.

    Raises:
        UnsupportedModelError: the layer computes the bias, and its weights are on the host.
    """
    kind = layer_state.kind.attention
    if not isinstance(kind, BiasedAttention) or not kind.gets_bias:
        return stream_layer(layer_state, args, kwargs, rows, strategy, forks)
    names = layer_state.cached_result(_argument_names)
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden_states: Tensor = kwargs.pop(names[0])
    bias = kwargs.get(POSITION_BIAS)
    source = layer_state.cached_result(_attention_with_table)
    if bias is None and source is not None:
        if layer_state.weights is not None:
            raise UnsupportedModelError(
                f"{type(layer_state.layer).__name__} computes a bias for all layers from its own "
                "weights, "
                "which are in host memory (weights='cpu'). streambp does not support both. Set "
                "weights='device' in StreamConfig."
            )
        bias = distance_bias(source, hidden_states.shape[-2], hidden_states.device)
        kwargs[POSITION_BIAS] = bias
    if not is_distance_bias(bias):
        report = layer_state.last_call.report = CallReport(REASON_BIAS_BY_PAIR)
        with layer_state.load_weights_once((hidden_states,), kwargs, REASON_BIAS_BY_PAIR):
            return run_unchunked(layer_state, (hidden_states,), kwargs, report)
    output = stream_layer(layer_state, (hidden_states,), kwargs, rows, strategy, forks)
    if not isinstance(output, tuple):
        return output
    # Cross-attention without a bias makes zeros, in each layer.
    return output[0], bias, *[None] * (len(output) - 2)


def _argument_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of the layer's forward, in order, to find the bias among
    positional arguments."""
    return tuple(inspect.signature(written_forward(layer)).parameters)[1:]


def _attention_with_table(layer: nn.Module) -> nn.Module | None:
    """Return the layer's attention module with a table of biases; None if it has none. This module
    computes the bias of each distance."""
    return next(filter(has_table, layer.modules()), None)
