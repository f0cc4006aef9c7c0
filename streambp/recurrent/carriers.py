"""Pass a layer's recurrent and convolution states from one chunk to the next.

A chunk's forward gets a `StateCache` instead of the layer's cache, or states instead of the layer's
state argument. `attention/interface.py` defines carriers [Note: carriers], and
`recurrent/states.py` defines states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from streambp.chunks import Chunk
from streambp.recurrent.states import MIN_CHUNK_TOKENS, StateCache, StateKey, States, copy_view

ReadKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class StateCarrier:
    """Object that passes a layer's recurrent and convolution states from one chunk to the next. The
    layer reads and writes the states in its cache, or takes the states as an argument and returns
    new states.

    Args:
        argument: name of the argument for the cache or the states; "": the layer has no states.
        returned: True if the layer takes and returns the states themselves, without a cache.

    Attributes:
        carries: True if the layer has states.
        min_tokens: minimum number of tokens in a chunk; 1 for a layer without states.
        why_not_split: the reason why a sequence of this layer cannot be split over ranks; None for
            a layer without states.
    """

    def __init__(self, argument: str = "", returned: bool = False) -> None:
        self.argument = argument
        self.returned = returned
        self.carries = bool(argument)
        self.min_tokens = 1
        self.why_not_split: str | None = None
        if argument:
            self.min_tokens = MIN_CHUNK_TOKENS
            self.why_not_split = (
                "it goes on from a state (a recurrence, a convolution), which another rank's shard "
                "ends with"
            )

    def chunk_arguments(
        self, arguments: dict[str, Any], chunk: Chunk, states: States | None, read: ReadKeys | None
    ) -> tuple[dict[str, Any], StateCache | None]:
        """Return the arguments for one chunk's forward, and the chunk's cache, which collects the
        chunk's end states.

        The cache replaces the layer's cache argument. If the layer takes states as an argument, the
        start states replace this argument instead. The cache is None, and the arguments are
        unchanged, if both `states` and `read` are None.

        Args:
            arguments: the chunk's arguments by name.
            chunk: the chunk's range of positions.
            states: states at the chunk's start; None: the layer has no states.
            read: function from the chunk's K and V to K and V of all positions so far; None: the
                layer reads no keys and values from its cache.
        """
        if states is None and read is None:
            return arguments, None
        cache = StateCache(chunk.start, states or {}, read)
        argument_value: Any = cache
        if self.returned:
            argument_value = tuple(cache.start_states.values()) or None
        return {**arguments, self.argument: argument_value}, cache

    def collect(self, result: Any, cache: StateCache | None) -> Any:
        """Return a layer's result without the recurrent states. States among the return values are
        moved into the chunk's cache as end states and replaced by None; other results are returned
        unchanged.

        Args:
            result: the layer's result; (hidden_states, states) for a layer that returns its states.
            cache: the chunk's cache, which gets the end states; None: the states are dropped.
        """
        if not self.returned:
            return result
        hidden_states, states = result
        if cache is not None:
            for number, state in enumerate(states):
                cache.end_states[StateKey("returned", 0, number)] = copy_view(state)
        return hidden_states, None
