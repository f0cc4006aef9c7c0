"""Pass a layer's recurrent and convolution states from one chunk to the next.

A chunk's forward gets a `StateCache` instead of the layer's cache, or states instead of the layer's
state argument. [Note: carriers] in `attention/interface.py` defines carriers; [Note: states]
defines states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from streambp.chunks import Chunk
from streambp.recurrent.states import LEAST_TOKENS, Key, StateCache, States, in_own_memory

Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class StateCarrier:
    """State carrier for a layer with states in its cache, or with states as an argument and an
    output.

    The second kind of layer returns the states behind its hidden states.

    Args:
        argument: name of the argument for the cache or the states; "": the layer has no states, so
            chunks share K and V only.
        returned: True if the layer takes and returns the states themselves, without a cache.

    Attributes:
        carries: True if a chunk starts from the states of the chunk before.
        least: minimum number of tokens in a chunk.
        why_not_split: the reason against sharding the tokens over ranks; None if sharding is
            possible.
    """

    def __init__(self, argument: str = "", returned: bool = False) -> None:
        self.argument = argument
        self.returned = returned
        self.carries = bool(argument)
        self.least = 1
        self.why_not_split: str | None = None
        if argument:
            self.least = LEAST_TOKENS
            self.why_not_split = (
                "it goes on from a state (a recurrence, a convolution), which another rank's shard "
                "ends with"
            )

    def hand(
        self, named: dict[str, Any], chunk: Chunk, states: States | None, read: Read | None
    ) -> tuple[dict[str, Any], StateCache | None]:
        """Return the chunk's arguments with its start states, and the cache for its end states.

        The `StateCache` replaces the layer's own cache. It also returns the prefix K and V if the
        layer attends over its cache.

        Args:
            states: states at the start of the chunk; None: the chunk has no cache for states.
            read: function that the cache calls on new K and V; None: the layer does not attend over
                a cache.
        """
        if states is None and read is None:
            return named, None
        cache = StateCache(chunk.start, states or {}, read)
        given: Any = cache
        if self.returned:
            given = tuple(cache.before.values()) or None
        return {**named, self.argument: given}, cache

    def collect(self, result: Any, cache: StateCache | None) -> Any:
        """Move returned end states [B, ...] into the chunk's cache and return the layer's other
        outputs.

        The result is hidden_states [..., C, h] with None in place of the states. Layers that return
        no states keep their result.
        """
        if not self.returned:
            return result
        hidden_states, states = result
        if cache is not None:
            for number, state in enumerate(states):
                cache.after[Key("returned", 0, number)] = in_own_memory(state)
        return hidden_states, None
