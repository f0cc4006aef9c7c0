"""States of a recurrence or a convolution, passed from one chunk to the next.

Layers with a state-space model, linear attention or a short convolution store states in their
cache: the convolution's last inputs and the recurrence's running sum. A chunk's cache
(`StateCache`) returns the end states of the chunk before and collects the end states of its own
chunk. The layer's own forward computes them.

    forward, no graph                          backward
    for chunk in order:                        for chunk, last to first:
        save the start states                      leaves of the saved start states
        layer(chunk, StateCache(start states))     recompute with StateCache(leaves)
        start states = the cache's `end_states`    differentiate output and end states
                                                       by x and the leaves
                                                   upstream gradients of the end states
                                                       = gradients of the leaves

A chunk's end states are outputs like its hidden states. The next chunk, which is differentiated
first, computes their gradients ([Note: prefix accumulation order]). Reads use `start_states` alone
and writes use `end_states` alone. Nothing is written in place, so a recomputation reads the same
values as forward. End states are copies: a view would keep the chunk's full input alive for its
last few tokens. Start states are no leaves if no end state depends on a differentiated tensor. The
trace of unread products detects this case: adapters behind the mixer, in the first layer that
trains.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streambp.cache import ChunkCache
from streambp.device import without_autocast

# Minimum for a chunk: for a single token behind a state, mixers use decode kernels, without a
# backward.
MIN_CHUNK_TOKENS = 2


class StateKey(NamedTuple):
    """Key of one recurrent or convolution state.

    Attributes:
        kind: "conv", "recurrent" or "linear", by the cache method that stores the state; "returned"
            for states that the layer returns.
        layer: the layer's index in its model.
        number: the state's number among the layer's states of this kind.
    """

    kind: str
    layer: int
    number: int


States = dict[StateKey, Tensor]


class StateCache(ChunkCache):
    """Cache for one chunk of a layer with recurrent states, in place of transformers' Cache. The
    cache returns the states at the chunk's start, and collects the states at the chunk's end.

    Args:
        start: number of positions before the chunk.
        start_states: states at the chunk's start; {} for the first chunk, which starts without
            states.
        read: function from the chunk's K and V to K and V of all positions so far; None: the layer
            reads no keys and values from its cache.

    Attributes:
        start_states: states at the chunk's start.
        end_states: states at the chunk's end, complete after the layer's forward.
    """

    # mixers read this flag before they choose a decode kernel for a single token
    record_past = True

    def __init__(
        self,
        start: int,
        start_states: States,
        read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(start, read)
        self.start_states = start_states
        self.end_states: States = {}

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True for every layer index. If the result were False, transformers' modules would
        take a chunk of a single token for decoding, and choose a kernel without a backward."""
        return True

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """True if the chunk starts from a recurrent or convolution state with this layer index and
        number. The first chunk of a sequence starts from no state.

        Args:
            layer_idx: the layer's index; None: any layer.
            state_idx: the state's number in the layer; None: any number.
        """
        for key in self.start_states:
            if layer_idx not in (None, key.layer):
                continue
            if state_idx in (None, key.number):
                return True
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the convolution's last k inputs before the chunk, [B, D, k]; None in the first
        chunk, and if the layer has no state with this number.

        Args:
            layer_idx: the layer's index.
            state_idx: the state's number in the layer.
        """
        return self.start_states.get(StateKey("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrence's state [B, ...] at the chunk's start; None in the first chunk, and
        if the layer has no state with this number.

        Args:
            layer_idx: the layer's index.
            state_idx: the state's number in the layer.
        """
        return self.start_states.get(StateKey("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the convolution's last k inputs before the chunk followed by the chunk's inputs:
        [B, D, k + C]. The last inputs of the result are stored as the end state.

        The first chunk has no inputs before it, and gets `conv_states` itself.

        Args:
            conv_states: the chunk's inputs [B, D, C].
            layer_idx: the layer's index.
            state_idx: the state's number in the layer.
            conv_kernel_size: number of inputs to store; None: the number in the start state. The
                first chunk then stores all inputs.
        """
        key = StateKey("conv", layer_idx, state_idx)
        last_inputs = self.start_states.get(key)
        if last_inputs is None:
            joined = conv_states
        else:
            # autocast's `cat` refuses half-precision dtypes other than its own
            with without_autocast(conv_states.device.type):
                # convolution kernels require this layout
                if conv_states.dim() == 3 and conv_states.stride(1) == 1:
                    joined = torch.cat((last_inputs.mT, conv_states.mT), 1).mT
                else:
                    joined = torch.cat((last_inputs, conv_states), -1)
        size = conv_kernel_size or (conv_states if last_inputs is None else last_inputs).shape[-1]
        self.end_states[key] = joined[..., -size:].clone(memory_format=torch.contiguous_format)
        return joined

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Store a recurrence's state at the chunk's end, and return the state.

        Args:
            recurrent_states: the state, [B, ...].
            layer_idx: the layer's index.
            state_idx: the state's number in the layer.
        """
        self.end_states[StateKey("recurrent", layer_idx, state_idx)] = copy_view(recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> None:
        """Return None for every `layer_idx`, as at the start of a sequence. A module of linear
        attention that gets a state here would take the call for decoding of single tokens.
        `TorchWithState` therefore passes the start state instead."""
        return

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store the state `linear_cache` [B, ...] of linear attention at the chunk's end, for the
        layer with index `layer_idx`."""
        self.end_states[StateKey("linear", layer_idx, 0)] = copy_view(linear_cache)

    @property
    def layers(self) -> Mapping[int, SimpleNamespace]:
        """Return the states at the chunk's start, in the form that transformers up to 5.22 reads: a
        mapping from layer index to an object with two dicts. `conv_states` [B, D, k] and
        `recurrent_states` [B, ...] have the state's number as key.

        The result is created for every call. If the cache stored the result, the cache and the
        chunk's graph would be in a reference cycle.
        """
        by_layer: dict[int, SimpleNamespace] = collections.defaultdict(
            lambda: SimpleNamespace(record_past=True, conv_states={}, recurrent_states={})
        )
        for key, state in self.start_states.items():
            if key.kind in ("conv", "recurrent"):
                getattr(by_layer[key.layer], f"{key.kind}_states")[key.number] = state
        return by_layer


def copy_view(state: Tensor) -> Tensor:
    """Return the state [B, ...] itself, or a copy if the state is a view of a larger tensor. A view
    would keep the larger tensor alive."""
    if state.untyped_storage().nbytes() == state.nbytes:
        return state
    return state.clone()


def leaves_of(states: States) -> States:
    """Return a chunk's start states detached, as leaves of the chunk's autograd graph. States in
    floating point require a gradient, which backward passes to the end states of the chunk before.
    """
    return {
        key: state.detach().requires_grad_(state.is_floating_point())
        for key, state in states.items()
    }
