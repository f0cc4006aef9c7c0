"""How the states of a layer reach the next chunk: what stands in for its cache, or for its argument of states.

[Note: carriers] in `attention/carriers.py` says what a carrier is. [Note: states] says what is handed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from streambp.chunks import Chunk
from streambp.recurrent.states import LEAST_TOKENS, Key, StateCache, States, in_own_memory

Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class StateCarrier:
    """Of a layer that keeps states in its cache, or takes them as an argument and returns them behind its hidden states.

    Args:
        argument: the name of the argument that takes the cache, or the states; "": the layer has none, and nothing but keys
            and values passes from chunk to chunk. returned: it takes and returns the states themselves.

    carries: chunks start from states. least: tokens that a chunk has at least. why_not_split: why ranks cannot have a shard
    of the tokens each.
    """

    def __init__(self, argument: str = "", returned: bool = False) -> None:
        self.argument, self.returned = argument, returned
        self.carries, self.least = bool(argument), LEAST_TOKENS if argument else 1
        why = "it goes on from a state (a recurrence, a convolution), which another rank's shard ends with"
        self.why_not_split = why if argument else None

    def hand(
        self, named: dict[str, Any], chunk: Chunk, states: States | None, read: Read | None
    ) -> tuple[dict[str, Any], StateCache | None]:
        """A chunk's arguments with its start states among them, and where its end states are collected.

        In place of the layer's cache it is a `StateCache`, which also returns the prefix where that attends over one.

        Args:
            states: those that the chunk starts from; None: it gets no cache.
            read: what a cache does with keys and values; None: the layer does not attend over one.
        """
        if states is None and read is None:
            return named, None
        cache = StateCache(chunk.start, states or {}, read)
        given = (tuple(cache.before.values()) or None) if self.returned else cache
        return {**named, self.argument: given}, cache

    def collect(self, result: Any, cache: StateCache | None) -> Any:
        """What the layer returned, without end states [B, ...], which go into the chunk's cache: hidden_states [..., C, h]
        and None in place of the states."""
        if not self.returned:
            return result
        hidden_states, states = result
        if cache is not None:
            cache.after.update({Key("returned", 0, number): in_own_memory(state) for number, state in enumerate(states)})
        return hidden_states, None
