"""Count steps with sharded sequences on one rank: exchanges return tensors without data.

The number of ranks P changes the bytes of a rank with t tokens only by the keys, values and their
gradients of other ranks' tokens. Context parallelism holds a group of kv heads of T = P t tokens.
Ulysses holds the bytes of an unsharded step, times P / H_kv for more ranks than kv heads. A count
therefore separates these storages from all others. Different amounts of key bytes are few, and each
amount is recorded with the maximum of all other bytes at the same time. Such a pair becomes one
`Phase`, whose coefficient `law.keys` is the key bytes for each of `profile.held_keys`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
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
from streambp.planner.compose import PhaseMemory
from streambp.planner.count import CachedCall, StepCount, one_kernel, running_counts
from streambp.planner.profile import ULYSSES, Heads, SequenceSplit, Setting, held_keys
from streambp.planner.work import tensors
from streambp.sharded import gathered_keys
from streambp.sharded.gathered_keys import GatheredShards
from streambp.sharded.shards import Keys, Shards

TRADED_INDEX, TRADED_KEYS_INDEX, GATHERED_INDEX, SUMMED_INDEX, MOVED_INDEX = range(5)
MIN_KEY_BYTES = 256  # bytes; smaller tensors are indices and no keys


class SplitCount(StepCount):
    """Dispatch mode that counts the costs of a step on one of the ranks that share sequences. The
    mode counts the bytes of keys and values of other ranks' tokens, and of their gradients, apart
    from all other bytes. The attributes call all of these "keys of other ranks".

    Attributes:
        links: five numbers of bytes so far, in this order. All-to-alls of queries and outputs,
            all-to-alls of keys, gathered keys, gradients of keys sent to be summed, and keys moved
            on the device by reordering. The last is not a part of `work.traffic`.
        max_other_bytes: dict from each number of live bytes of keys of other ranks, since
            `reset_peak`, to the largest number of all other bytes that were live at the same time.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.links = [0.0] * 5
        self.max_other_bytes: dict[int, int] = {0: 0}
        self._keys = 0
        self._sizes: dict[int, int] = {}  # sizes of storages of keys
        self._marking = 0

    def reset_peak(self) -> None:
        """Set `peak` and `max_other_bytes` to the bytes that exist now. Called at the start of each
        phase of a step (a layer's forward, for example), to measure the phase's peak."""
        super().reset_peak()
        self.max_other_bytes = {self._keys: self.live - self._keys}

    def _track(self, storage: torch.UntypedStorage) -> None:
        if self._marking and storage.nbytes() > MIN_KEY_BYTES:
            self._sizes[storage._cdata] = storage.nbytes()
            self._keys += storage.nbytes()
        super()._track(storage)
        self._note(self.live)

    def _count(self, operation: CachedCall) -> None:
        if self._marking and not self._kernel_depth:
            self.links[MOVED_INDEX] += operation.work.traffic
            self.add(operation.work._replace(traffic=0.0))
        else:
            super()._count(operation)

    def _subtract_freed(self, key: int, _: Any) -> None:
        self._keys -= self._sizes.pop(key, 0)
        super()._subtract_freed(key, _)

    def _workspace(self, func: Any, args: Any) -> None:
        previous = self.peak
        self.peak = self.live
        super()._workspace(func, args)
        self._note(self.peak)
        self.peak = max(previous, self.peak)

    def _note(self, live: int) -> None:
        """Update the entry of `max_other_bytes` for the present number of bytes of keys and values
        of other ranks. The entry is the largest number of all other live bytes.

        Args:
            live: all bytes that exist now, including these keys and values.
        """
        self.max_other_bytes[self._keys] = max(
            self.max_other_bytes.get(self._keys, 0), live - self._keys
        )


@contextlib.contextmanager
def _keys_allocated() -> Iterator[None]:
    """Context manager for code that allocates keys and values of other ranks' tokens, or their
    gradients, in a step on tensors without data. Also used as a decorator of functions.

    Each running `SplitCount` counts the storages allocated inside as "keys of other ranks", a
    single sum that is separate from all other bytes.
    """
    counts = running_counts(SplitCount)
    for count in counts:
        count._marking += 1
    try:
        yield
    finally:
        for count in counts:
            count._marking -= 1


def _exchange(shards: Shards, parts: Tensor) -> Tensor:
    """Count the bytes of an all-to-all between P ranks, in place of running it, when a step with
    sharded sequences is counted. Return a tensor without data like the received parts [P, ...].

    Args:
        shards: the sequence sharding; not read.
        parts: the tensor [P, ...] to send, with one part for each rank.
    """
    sent = parts.contiguous()
    for count in running_counts(SplitCount):
        count.links[TRADED_KEYS_INDEX if count._marking else TRADED_INDEX] += sent.nbytes
    with one_kernel(0):
        return torch.empty_like(sent)


def _collective(names: tuple[str, ...]) -> Callable[..., SimpleNamespace]:
    """Return a replacement for a collective of torch.distributed, for a step on tensors without
    data that counts the costs of one rank. The replacement exchanges nothing, and adds the bytes to
    `links` of every running `SplitCount`.

    An all-gather adds the bytes of its result, which from then on count as keys of other ranks. A
    reduce-scatter adds the bytes that this rank would send: gradients of keys and values.

    Args:
        names: names that the collective has in torch's versions. `GATHER` stands for the
            all-gather, and all other names for the reduce-scatter.
    """

    def run(
        received: Tensor, sent: Tensor, group: Any = None, async_op: bool = False
    ) -> SimpleNamespace:
        """Count the bytes of a collective from `sent` [...] to `received` [...]. Return an object
        like the collective's work handle, whose `wait` does nothing."""
        storage = received.untyped_storage()
        for count in running_counts(SplitCount):
            if names == GATHER:
                count.links[GATHERED_INDEX] += received.nbytes
                # counts as keys from now on
                if storage._cdata in count._alive and storage._cdata not in count._sizes:
                    count._sizes[storage._cdata] = storage.nbytes()
                    count._keys += storage.nbytes()
            else:
                count.links[SUMMED_INDEX] += sent.nbytes
        return SimpleNamespace(wait=lambda: None)

    return run


@contextlib.contextmanager
def split_over(
    by: str, ranks: int, rows: int, length: int, head_counts: set[Heads] | None = None
) -> Iterator[None]:
    """Context manager in which patched models treat their batch as the first rank's part (shard) of
    longer sequences, although no other processes exist. A step with sharded sequences runs inside
    on tensors without data, to count its costs.

    Under context parallelism, keys are gathered one key/value head at a time.

    Args:
        by: kind of sequence sharding: "DeepSpeed Ulysses" or "context parallelism".
        ranks: number of ranks that share a sequence.
        rows: number of rows in the batch.
        length: tokens of a row in the shard.
        head_counts: set to which the head counts of every layer with attention are added; None: no
            set.
    """
    kind: type[Shards]
    if by == ULYSSES:
        kind = Shards
    else:
        kind = GatheredShards
    shards = kind(None, ranks, length, Spans.causal(rows, ranks * length), headroom=1)
    if by == ULYSSES:
        start = _keys_allocated()(kind.start_keys)
    else:
        start = kind.start_keys
    counted_gradient = _keys_allocated()(kind.own_gradients)

    def start_keys(self: Any, parts: list[Tensor], heads: int) -> Keys:
        """Record the layer's numbers of heads (`Heads`) in `head_counts`. Then call the original
        `start_keys`, which starts the exchange of the layer's keys and values with other ranks.

        Args:
            self: the sequence sharding.
            parts: the keys and values of this rank's tokens.
            heads: number of query heads.
        """
        if head_counts is not None:
            k, v = parts
            head_counts.add(Heads(heads, k.shape[1], gathered_keys.bytes_of_a_head(k, v, 1)))
        return start(self, parts, heads)

    def own_gradients(self: Any, *arguments: Any) -> list[Tensor]:
        """Return the gradients of this rank's own keys and values, from the original function. The
        running `SplitCount`s do not count the bytes of these gradients as "keys of other ranks".
        `arguments` are those of the original function."""
        gradients = counted_gradient(self, *arguments)
        for count in running_counts(SplitCount):
            for x in tensors(gradients):  # no keys, because they belong to this rank's tokens
                count._keys -= count._sizes.pop(x.untyped_storage()._cdata, 0)
        return gradients

    replacements = [
        (wrappers, "is_initialized", lambda: True),
        (wrappers, "shards_of", lambda *_: shards),
        (gathered_keys, "collective", _collective),
        (kind, "gather_numbers", lambda self, mine: [mine] * self.size),
        (kind, "start_keys", start_keys),
        (KVBuffer, "from_tensors", _keys_allocated()(KVBuffer.from_tensors)),
        (KVBuffer, "grow_accumulators", _keys_allocated()(KVBuffer.grow_accumulators)),
    ]
    if by == ULYSSES:
        replacements += [(kind, "own_gradients", own_gradients), (kind, "exchange", _exchange)]
    else:
        methods = "to_sequence_order", "to_rank_parts"
        replacements += [(kind, name, _keys_allocated()(getattr(kind, name))) for name in methods]
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in replacements:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def split_of(
    by: str,
    heads: Sequence[Heads],
    links: Sequence[float],
    ranks: int,
    tokens: int,
    saves: Sequence[str],
) -> SequenceSplit:
    """Return the bytes that ranks exchange in a step for each token (`SequenceSplit`), computed
    from a step on tensors without data whose exchanges were counted.

    Args:
        by: kind of sequence sharding: "DeepSpeed Ulysses" or "context parallelism".
        heads: the different numbers of heads among the layers.
        links: five numbers of bytes that this step exchanged (`SplitCount.links`).
        ranks: number of ranks that this step assumes.
        tokens: tokens of a rank's part of a sequence in this step.
        saves: names of the tensors that layers save, as in `StreamConfig.saves`.
    """
    full_tokens = ranks * tokens
    repeats = SequenceSplit(by, tuple(heads)).repeats(ranks)
    gathers = links[GATHERED_INDEX] / full_tokens
    return SequenceSplit(
        by, tuple(heads), links[TRADED_INDEX] / tokens, links[TRADED_KEYS_INDEX] / tokens / repeats,
        gathers, gathers if "attn_out" in saves else gathers * 2 / 3,
        links[SUMMED_INDEX] / full_tokens,
        links[MOVED_INDEX] / (tokens * repeats if by == ULYSSES else full_tokens),
    )  # fmt: skip


def lines_of_keys(
    phases: Sequence[Sequence[PhaseMemory]],
    split: SequenceSplit,
    lengths: Sequence[int],
    ranks: int,
) -> list[list[PhaseMemory]]:
    """Return phases whose memory is a linear function of the amount of other ranks' keys and values
    on a rank (`profile.held_keys`): `peak` + `per_key` * amount. The functions are computed from
    `max_other_bytes` of the phases, which were counted on tensors without data.

    A phase that has different amounts of these keys in memory over time occurs several times in the
    result, each time with another function. The planner predicts memory for any number of ranks as
    the maximum of the functions.

    Args:
        phases: the phases of each counted step, in order. The steps differ in row length and chunk
            size.
        split: sequence sharding of the steps, on which the amount depends.
        lengths: tokens of a rank's shard (its part of a row) in each counted step.
        ranks: number of ranks for which the steps were counted.
    """
    if split.by == ULYSSES:
        setting = Setting(gpus=ranks, ulysses=ranks)
    else:
        setting = Setting(gpus=ranks, context_parallel=ranks)
    key_amounts = [held_keys(split, tokens, setting) for tokens in lengths]
    lines: list[list[PhaseMemory]] = [[] for _ in phases]
    for counted in zip(*phases, strict=True):
        amounts = []
        for c, scale in zip(counted, key_amounts, strict=True):
            amounts.append(
                {size / scale: value_bytes for size, value_bytes in c.max_other_bytes.items()}
            )
        previous: list[float] = []
        for amount in sorted(set().union(*amounts), reverse=True):
            values = []
            for counted_phase in amounts:
                values.append(
                    max(
                        (
                            value_bytes
                            for size, value_bytes in counted_phase.items()
                            if size >= amount
                        ),
                        default=0.0,
                    )
                )
            if not previous or any(map(operator.gt, values, previous)):
                for rows, counted_phase, value in zip(lines, counted, values, strict=True):
                    rows.append(dataclasses.replace(counted_phase, peak=value, per_key=amount))
                previous = values
    return lines
