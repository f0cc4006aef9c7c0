"""States that a recurrence or a convolution hands from one chunk to the next.

Layers with a state-space model, linear attention or a short convolution keep states in their cache: the last few inputs of
the convolution, the running sum of the recurrence. So a chunk's cache (`StateCache`) hands it the states that the chunk
before ended with, and collects those that it ends with itself; the layer's own forward does the rest.

    forward, no graph                          backward
    for chunk in order:                        for chunk, last to first:
        keep the start states                      leaves of the start states that were kept
        layer(chunk, StateCache(start states))     recompute with StateCache(leaves)
        start states = the cache's `after`         differentiate output and end states by x and the leaves
                                                   upstream of the end states = gradients of the leaves

[Note: states] A chunk's end states are outputs like its hidden states: their gradients come from the chunk behind it, which
has been differentiated before ([Note: prefix accumulation order]). Reads come from `before` alone and writes go to `after`
alone, so that nothing is written in place and a recomputation finds what forward found. End states are copies: a view would
keep the whole chunk's input alive for the sake of its last few tokens. Where no end state depends on anything that is
differentiated (adapters behind the mixer, in the first layer that trains), start states are no leaves; the trace of unread
products finds out.
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

LEAST_TOKENS = 2  # of a chunk: for one token on top of a state mixers take decode kernels, which have no backward


class Key(NamedTuple):
    """One state: "conv", "recurrent", "linear" or "returned", the layer's index in its model, the state's number in it."""

    kind: str
    layer: int
    number: int


States = dict[Key, Tensor]


class StateCache(ChunkCache):
    """The cache that a chunk of a layer with states gets (transformers' protocol for linear attention layers).

    Args:
        start: positions before the chunk.
        before: the states that the chunk starts from; {} for the first chunk, which starts as without a cache.
        read: as of `ChunkCache`.

    after: the states that the chunk ends with, once the layer's forward has run.
    """

    record_past = True  # asked before a decode kernel is chosen for a single token

    def __init__(
        self, start: int, before: States, read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    ) -> None:
        super().__init__(start, read)
        self.before = before
        self.after: States = {}

    def is_recording_past(self, layer_idx: int) -> bool:
        """True for every layer, as `record_past`."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the chunk starts from a state: of that layer, and of that number in it, where they are given."""
        return any(
            (layer_idx is None or key.layer == layer_idx) and (state_idx is None or key.number == state_idx)
            for key in self.before
        )

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[B, D, k], the convolution's last inputs before the chunk; None where it starts without."""
        return self.before.get(Key("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrence's start state [B, ...], as the mixer shapes it; None where it starts without."""
        return self.before.get(Key("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """conv_states [B, D, C] of this chunk -> [B, D, k + C] with the last k before it, in the same layout; the last k
        are its end state."""
        key = Key("conv", layer_idx, state_idx)
        before = self.before.get(key)
        if before is None:
            joined = conv_states
        else:
            with without_autocast(conv_states.device.type):  # which joins no two halves that are not its own
                if conv_states.dim() == 3 and conv_states.stride(1) == 1:  # convolution kernels are particular
                    joined = torch.cat((before.mT, conv_states.mT), 1).mT
                else:
                    joined = torch.cat((before, conv_states), -1)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        self.after[key] = joined[..., -size:].clone(memory_format=torch.contiguous_format)
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep recurrent_states [B, ...] as an end state, in memory of its own; returned as it was given."""
        self.after[Key("recurrent", layer_idx, state_idx)] = in_own_memory(recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> None:
        """None, as at the start of a sequence: with a state the mixer would decode. It gets its state by
        `scans.TorchWithState`."""
        return

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep linear_cache [B, ...] as an end state, in memory of its own."""
        self.after[Key("linear", layer_idx, 0)] = in_own_memory(linear_cache)

    @property
    def layers(self) -> Mapping[int, SimpleNamespace]:
        """The chunk's start states as transformers up to 5.22 reads them: by layer, then those of its convolutions, [B, D,
        k] each, and of its recurrences, [B, ...] each, by their number.

        Made anew for every call: kept here it would tie the cache, and with it the chunk's graph, into a cycle.
        """
        found: dict[int, SimpleNamespace] = collections.defaultdict(
            lambda: SimpleNamespace(record_past=True, conv_states={}, recurrent_states={})
        )
        for key, state in self.before.items():
            if key.kind in ("conv", "recurrent"):
                getattr(found[key.layer], f"{key.kind}_states")[key.number] = state
        return found


def in_own_memory(state: Tensor) -> Tensor:
    """The state [B, ...], copied where it is a part: some are the last of all blocks' or tokens' states."""
    return state if state.untyped_storage().nbytes() == state.nbytes else state.clone()


def leaves_of(states: States) -> States:
    """The same values as leaves of a new graph; floating states want a gradient, others (token ids) cannot have one."""
    return {key: state.detach().requires_grad_(state.is_floating_point()) for key, state in states.items()}
