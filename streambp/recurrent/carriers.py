"""How the states of a layer reach the next chunk: what stands in for its cache, or for its argument of states.

[Note: carriers] in `attention/carriers.py` says what a carrier is. [Note: states] says what is handed on.

    `NoStates`         nothing but keys and values passes from chunk to chunk
    `StatesInCache`    a `StateCache` hands them out and collects them
    `StatesReturned`   the layer takes them as an argument, and returns them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from streambp.chunks import Chunk
from streambp.recurrent.scans import scans_of
from streambp.recurrent.segments import mixers_of
from streambp.recurrent.states import LEAST_TOKENS, StateCache, States, take_returned

Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class NoStates:
    """A layer without states.

    carries: chunks start from states. least: tokens that a chunk has at least. why_not_split: why ranks cannot have a shard
    of the tokens each.
    """

    carries = False
    least = 1
    why_not_split: str | None = None

    def scans(self, layer: nn.Module) -> list[tuple[nn.Module, str]]:
        """As of `scans_of`."""
        return []

    def hand(
        self, named: dict[str, Any], chunk: Chunk, states: States | None, read: Read | None
    ) -> tuple[dict[str, Any], StateCache | None]:
        """A chunk's arguments with its start states among them, and where its end states are collected.

        Args:
            states: those that the chunk starts from; None: it gets no cache.
            read: what a cache does with keys and values; None: the layer does not attend over one.
        """
        return named, None

    def taken(self, result: Any, cache: StateCache | None) -> Any:
        """What the layer returned, without end states, which go into the chunk's cache."""
        return result

    def goes_by_document(self, layer: nn.Module) -> bool:
        """Whether modules inside it can be called for one document of packed rows after the other. [Note: segments]"""
        return True


class StatesInCache(NoStates):
    """A layer that keeps states in its cache.

    Args:
        argument: the name of the argument that takes the cache.
    """

    carries = True
    least = LEAST_TOKENS
    why_not_split = "it goes on from a state (a recurrence, a convolution), which another rank's shard ends with"

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def scans(self, layer: nn.Module) -> list[tuple[nn.Module, str]]:
        """Its recurrences that take no start state."""
        return scans_of(layer)

    def hand(
        self, named: dict[str, Any], chunk: Chunk, states: States | None, read: Read | None
    ) -> tuple[dict[str, Any], StateCache | None]:
        """A `StateCache` in place of the layer's cache, which also returns the prefix where that attends over one."""
        if states is None and read is None:
            return named, None
        cache = StateCache(chunk.start, states or {}, read)
        return {**named, self.argument: self._given(cache)}, cache

    def _given(self, cache: StateCache) -> Any:
        return cache

    def goes_by_document(self, layer: nn.Module) -> bool:
        """Whether one of its modules asks the cache for states."""
        return bool(mixers_of(layer))


class StatesReturned(StatesInCache):
    """A layer that takes its states as an argument and returns them behind its hidden states."""

    def _given(self, cache: StateCache) -> Any:
        return tuple(cache.before.values()) or None

    def taken(self, result: Any, cache: StateCache | None) -> Any:
        """hidden_states [..., C, h] and None in place of the states."""
        return take_returned(result, cache)

    def goes_by_document(self, layer: nn.Module) -> bool:
        """False: the states are the whole layer's."""
        return False
