"""Steps of which every rank has a shard of the tokens, counted on one rank: exchanges give tensors without data.

[Note: bytes of keys] The number of ranks P changes what a rank holds of a shard of t tokens in one way: through keys and
values, and their gradients, of other ranks' tokens. Under context parallelism these are a group of kv heads of T = P t
tokens; under Ulysses as many as unsplit, or P / H_kv times that with more ranks than kv heads. So a count tells their
storages from all others, at each of the few amounts of them that are alive the most of the others. Each such pair is a line
of its phase, `Phase.per_key` bytes for each of `profile.keys_held`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from streambp.attention.kv import KVBuffer
from streambp.attention.spans import Spans
from streambp.known_names import GATHER
from streambp.model import wrappers
from streambp.planner.compose import Counted
from streambp.planner.count import Known, StepCount, one_kernel, running_counts
from streambp.planner.profile import ULYSSES, Heads, Setting, Split, keys_held
from streambp.planner.work import tensors
from streambp.sharded import gathered
from streambp.sharded.gathered import GatheredShards
from streambp.sharded.shards import Keys, Shards

TRADED, TRADED_KEYS, GATHERED, SUMMED, MOVED = range(5)
SMALL = 256  # bytes; smaller tensors are indices, not keys


class SplitCount(StepCount):
    """A count that tells the bytes of other ranks' keys from all others. [Note: bytes of keys]

    links: bytes of what exchanges gave so far: traded queries and outputs, traded keys, gathered keys, and summed
    gradients of keys (as sent); and bytes that putting keys in order moves, which are not in `work`.
    most: for each number of keys' bytes that were alive, the most of the others.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.links = [0.0] * 5
        self.most: dict[int, int] = {0: 0}
        self._keys = 0
        self._sizes: dict[int, int] = {}  # of storages of keys
        self._marking = 0

    def reset_peak(self) -> None:
        """Also `most`."""
        super().reset_peak()
        self.most = {self._keys: self.live - self._keys}

    def _track(self, storage: torch.UntypedStorage) -> None:
        if self._marking and storage.nbytes() > SMALL:
            self._sizes[storage._cdata] = storage.nbytes()
            self._keys += storage.nbytes()
        super()._track(storage)
        self._note(self.live)

    def _count(self, known: Known) -> None:
        if self._marking and not self._kernel_depth:
            self.links[MOVED] += known.work.moved
            self.add(known.work._replace(moved=0.0))
        else:
            super()._count(known)

    def _gone(self, key: int, _: Any) -> None:
        self._keys -= self._sizes.pop(key, 0)
        super()._gone(key, _)

    def _workspace(self, func: Any, args: Any) -> None:
        before, self.peak = self.peak, self.live
        super()._workspace(func, args)
        self._note(self.peak)
        self.peak = max(before, self.peak)

    def _note(self, live: int) -> None:
        self.most[self._keys] = max(self.most.get(self._keys, 0), live - self._keys)


@contextlib.contextmanager
def _keys_allocated() -> Iterator[None]:
    """What is allocated within, or by a function with this as its decorator, are keys."""
    counts = running_counts(SplitCount)
    for count in counts:
        count._marking += 1
    try:
        yield
    finally:
        for count in counts:
            count._marking -= 1


def _exchange(shards: Shards, parts: Tensor) -> Tensor:
    """Stands for an all-to-all of parts [P, ...]."""
    sent = parts.contiguous()
    for count in running_counts(SplitCount):
        count.links[TRADED_KEYS if count._marking else TRADED] += sent.nbytes
    with one_kernel(0):
        return torch.empty_like(sent)


def _collective(names: tuple[str, ...]) -> Callable[..., SimpleNamespace]:
    """Stands for a gather, or for a sum over ranks."""

    def run(received: Tensor, sent: Tensor, group: Any = None, async_op: bool = False) -> SimpleNamespace:
        storage = received.untyped_storage()
        for count in running_counts(SplitCount):
            if names == GATHER:
                count.links[GATHERED] += received.nbytes
                if storage._cdata in count._alive and storage._cdata not in count._sizes:  # keys from now on
                    count._sizes[storage._cdata] = storage.nbytes()
                    count._keys += storage.nbytes()
            else:
                count.links[SUMMED] += sent.nbytes
        return SimpleNamespace(wait=lambda: None)

    return run


@contextlib.contextmanager
def split_over(by: str, ranks: int, rows: int, length: int, seen: set[Heads] | None = None) -> Iterator[None]:
    """Within, streamed models take their batch for the first rank's shard, of `length` tokens a row; keys are gathered one
    kv head at a time.

    Args:
        seen: is told the heads of every layer that attends.
    """
    kind: type[Shards] = Shards if by == ULYSSES else GatheredShards
    shards = kind(None, ranks, length, Spans.causal(rows, ranks * length), room=1)
    start = _keys_allocated()(kind.start_keys) if by == ULYSSES else kind.start_keys
    own = _keys_allocated()(kind.own_gradient)

    def start_keys(self: Any, parts: list[Tensor], heads: int) -> Keys:
        if seen is not None:
            k, v = parts
            seen.add(Heads(heads, k.shape[1], gathered.bytes_of_a_head(k, v, 1)))
        return start(self, parts, heads)

    def own_gradient(self: Any, *given: Any) -> list[Tensor]:
        found = own(self, *given)
        for count in running_counts(SplitCount):
            for x in tensors(found):  # no keys: they belong to this rank's tokens
                count._keys -= count._sizes.pop(x.untyped_storage()._cdata, 0)
        return found

    replaced = [
        (wrappers, "is_initialized", lambda: True),
        (wrappers, "shards_of", lambda *_: shards),
        (gathered, "collective", _collective),
        (kind, "everyones", lambda self, mine: [mine] * self.size),
        (kind, "start_keys", start_keys),
        (KVBuffer, "of", _keys_allocated()(KVBuffer.of)),
        (KVBuffer, "grow_accumulators", _keys_allocated()(KVBuffer.grow_accumulators)),
    ]
    if by == ULYSSES:
        replaced += [(kind, "own_gradient", own_gradient), (kind, "exchange", _exchange)]
    else:
        both = "in_order", "by_rank"
        replaced += [(kind, name, _keys_allocated()(getattr(kind, name))) for name in both]
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def split_of(
    by: str, heads: Sequence[Heads], links: Sequence[float], ranks: int, tokens: int, saves: Sequence[str]
) -> Split:
    """From the bytes of a step's exchanges, that were counted on `ranks` with shards of so many tokens."""
    whole = ranks * tokens
    repeats = Split(by, tuple(heads)).repeats(ranks)
    gathers = links[GATHERED] / whole
    return Split(
        by, tuple(heads), links[TRADED] / tokens, links[TRADED_KEYS] / tokens / repeats, gathers,
        gathers if "attn_out" in saves else gathers * 2 / 3, links[SUMMED] / whole,
        links[MOVED] / (tokens * repeats if by == ULYSSES else whole),
    )  # fmt: skip


def lines_of_keys(
    phases: Sequence[Sequence[Counted]], split: Split, lengths: Sequence[int], ranks: int
) -> list[list[Counted]]:
    """The same phases at several points, each as often as there are amounts of keys that make a difference.

    Args:
        lengths: of the shards at each point.
    """
    setting = Setting(gpus=ranks, ulysses=ranks if split.by == ULYSSES else 1)
    setting = setting if split.by == ULYSSES else dataclasses.replace(setting, context_parallel=ranks)
    held = [keys_held(split, tokens, setting) for tokens in lengths]
    found: list[list[Counted]] = [[] for _ in phases]
    for counted in zip(*phases, strict=True):
        amounts = [{size / scale: most for size, most in c.most.items()} for c, scale in zip(counted, held, strict=True)]
        before: list[float] = []
        for amount in sorted({size for one in amounts for size in one}, reverse=True):
            values = [max((most for size, most in one.items() if size >= amount), default=0.0) for one in amounts]
            if not before or any(value > least for value, least in zip(values, before, strict=True)):
                for rows, one, value in zip(found, counted, values, strict=True):
                    rows.append(dataclasses.replace(one, peak=value, per_key=amount))
                before = values
    return found
