"""Micro-batches by tokens instead of rows."""

from __future__ import annotations

import bisect
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from streambp.errors import ConfigError
from streambp.fields import shown


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of whole rows, each of up to `tokens` tokens: a `DataLoader`'s `batch_sampler`.

    Where a batch is computed without its padding (`StreamConfig(rows="packed")`, or "auto" with labels), its tokens are
    its cost, whatever the lengths of its rows. Each epoch shuffles all rows by (`seed`, epoch), cuts them into windows, and
    fills batches in each window with the longest rows first. Every epoch has each row once, and one number of batches;
    only where no two rows fit into a batch, up to num_replicas - 1 rows come again, so that no rank waits. A loss that is
    to count each token alike needs the number of labels of all batches of a step, as Trainer's `num_items_in_batch`.

    Consecutive batches are alike, and are dealt to ranks: batch i goes to rank i % num_replicas, so that every rank has the
    same number of batches. accelerate deals them by itself: leave `rank` out there, and set `even_batches=False`. The
    longest row comes first, so that memory which does not suffice fails at the first step.

    lengths: of each row, in tokens, special tokens included. tokens: of a batch at most. num_replicas: how many ranks
        share an epoch. rank: whose batches these are; None: those of all ranks, in the order in which they are dealt.
        window: rows that are packed together; a larger one fills batches better and makes an epoch's batches less random.

    Raises:
        ConfigError: a row has no token or more than `tokens`, there is no row, or a number is out of range.
    """

    # accelerate asks a batch sampler for these two: no fixed number of rows, and nothing to leave out at the end.
    batch_size = None
    drop_last = False

    def __init__(
        self,
        lengths: Sequence[int],
        tokens: int,
        *,
        num_replicas: int = 1,
        rank: int | None = None,
        seed: int = 0,
        window: int = 1024,
    ) -> None:
        self.lengths = _whole_numbers(lengths)
        self.tokens, self.num_replicas, self.rank, self.seed, self.window = tokens, num_replicas, rank, seed, window
        self.epoch = self._done = 0
        numbers = (tokens, num_replicas, window)
        if not all(isinstance(number, int) and number >= 1 for number in numbers):
            raise ConfigError(
                f"tokens={tokens}, num_replicas={num_replicas} and window={window} must be whole numbers from 1."
            )
        if rank is not None and not 0 <= rank < num_replicas:
            raise ConfigError(f"rank={rank} is not one of num_replicas={num_replicas}: 0 to {num_replicas - 1}.")
        if not self.lengths:
            raise ConfigError("lengths is empty. Give the number of tokens of each row.")
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.lengths[longest] > tokens:
            more = sum(length > tokens for length in self.lengths)
            raise ConfigError(
                f"{more} of {len(self.lengths)} rows have more than tokens={tokens} tokens; the longest, row {longest}, "
                f"has {self.lengths[longest]}. Give tokens={self.lengths[longest]}, or truncate rows (in TRL: max_length)."
            )
        if min(self.lengths) < 1:
            raise ConfigError(f"Row {self.lengths.index(min(self.lengths))} has no token. Leave such rows out.")
        order = range(len(self.lengths))
        most = max(len(self._in_windows(self._shuffled(0))), len(self._filled(order)))
        self._count = -(-most // num_replicas) * num_replicas  # of all ranks: one number in every epoch

    @property
    def sampler(self) -> TokenBatchSampler:
        """Itself: accelerate gives the epoch to the `sampler` of a batch sampler that it has wrapped."""
        return self

    def set_epoch(self, epoch: int, batches_done: int = 0) -> None:
        """The epoch that is handed out next, without its first batches: those of this rank that were trained on before."""
        self.epoch, self._done = epoch, batches_done

    def __len__(self) -> int:
        """Batches of an epoch: of this rank, or of all where `rank` is None."""
        return self._count if self.rank is None else self._count // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        """Numbers of rows, batch by batch."""
        first, step = (0, 1) if self.rank is None else (self.rank, self.num_replicas)
        epoch, skipped, self._done = self.epoch, self._done, 0
        order = self._shuffled(epoch)
        found = self._in_windows(order)
        if len(found) > self._count:
            found = self._filled(order)  # never more than are planned: the number depends on lengths alone
        while len(found) < self._count:
            which = max(range(len(found)), key=lambda batch: len(found[batch]))
            rows = found[which]
            found[which : which + 1] = [rows[::2], rows[1::2] or [order[len(found) % len(order)]]]  # or a row again
        groups = [found[start : start + self.num_replicas] for start in range(0, self._count, self.num_replicas)]
        random.Random(f"{self.seed} {epoch} groups").shuffle(groups)
        longest = [max(self.lengths[row] for batch in group for row in batch) for group in groups]
        groups.insert(0, groups.pop(longest.index(max(longest))))
        dealt = [batch for group in groups for batch in group]  # to all ranks, in turn
        yield from dealt[first::step][skipped:]

    def _shuffled(self, epoch: int) -> list[int]:
        """All rows; text seeds alike on every machine, and keeps seed 0, epoch 1 apart from seed 1, epoch 0."""
        order = list(range(len(self.lengths)))
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        return order

    def _in_windows(self, order: Sequence[int]) -> list[list[int]]:
        """Batches of each window's rows."""
        starts = range(0, len(order), self.window)
        return [batch for start in starts for batch in self._filled(order[start : start + self.window])]

    def _filled(self, rows: Sequence[int]) -> list[list[int]]:
        """Batches of these rows: the longest row first, each into the fullest batch that has room for it."""
        batches: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # what each batch has left, and its number, in order
        for row in sorted(rows, key=lambda row: -self.lengths[row]):
            place = bisect.bisect_left(rooms, (self.lengths[row], -1))
            room, batch = rooms.pop(place) if place < len(rooms) else (self.tokens, len(batches))
            if batch == len(batches):
                batches.append([])
            batches[batch].append(row)
            bisect.insort(rooms, (room - self.lengths[row], batch))
        return batches


def _whole_numbers(lengths: Any) -> list[int]:
    """The lengths of rows, out of a list, a column of a data set, an array or a tensor [rows].

    Raises:
        ConfigError: they are something else.
    """
    found = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    try:
        whole = [operator.index(length) for length in found]
    except TypeError:
        raise ConfigError(
            f"lengths is {shown(lengths)}; it must be one whole number for each row, its tokens. Give "
            "[len(ids) for ids in dataset['input_ids']], say."
        ) from None
    return whole
