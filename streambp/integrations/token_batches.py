"""Sampler that fills micro-batches by tokens instead of rows."""

from __future__ import annotations

import bisect
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from streambp.errors import ConfigError
from streambp.fields import short_repr


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of whole rows, each of up to `tokens` tokens: a `batch_sampler` for `DataLoader`.

    The cost of a batch is its number of tokens, whatever the lengths of its rows, if padding is not
    computed. This requires `StreamConfig(rows="packed")`, or rows="auto" and labels. A loss with
    equal weight for each token must be divided by the number of labels in all batches of a step, as
    with Trainer's `num_items_in_batch`.

    Each epoch shuffles all rows by (`seed`, epoch), cuts the rows into windows, and packs each
    window into batches, longest rows first. Every epoch contains each row once, and has the same
    number of batches. Only if no two rows fit into a batch, up to num_replicas - 1 rows are
    repeated, so that no rank waits.

    Batch i goes to rank i % num_replicas. Consecutive batches are similar, so all ranks have
    similar batches, and equally many. accelerate distributes batches itself: omit `rank` there, and
    set `even_batches=False`. The longest row is in the first batch, so that a lack of memory shows
    at the first step.

    Args:
        lengths: number of tokens of each row, special tokens included.
        tokens: maximum number of tokens in a batch.
        num_replicas: number of ranks that share an epoch.
        rank: yield this rank's batches only; None: batches of all ranks, in the order of
            distribution.
        seed: seed of the shuffles.
        window: number of rows that are packed together; a larger window fills batches better and
            makes an epoch's batches less random.

    Raises:
        ConfigError: a row has no token or more than `tokens`, there is no row, or a number is out
            of range.
    """

    # accelerate reads these two: no fixed number of rows, and no incomplete last batch to drop.
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
        self.tokens = tokens
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.window = window
        self.epoch = self._batches_done = 0
        numbers = (tokens, num_replicas, window)
        if not all(isinstance(number, int) and number >= 1 for number in numbers):
            raise ConfigError(
                f"tokens={tokens}, num_replicas={num_replicas} and window={window} must be whole "
                "numbers from 1."
            )
        if rank is not None and not 0 <= rank < num_replicas:
            raise ConfigError(
                f"rank={rank} is not one of num_replicas={num_replicas}. Pass a rank from 0 to "
                f"{num_replicas - 1}."
            )
        if not self.lengths:
            raise ConfigError("lengths is empty. Give the number of tokens of each row.")
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.lengths[longest] > tokens:
            long_rows = sum(length > tokens for length in self.lengths)
            raise ConfigError(
                f"{long_rows} of {len(self.lengths)} rows have more than tokens={tokens} tokens; "
                f"the longest, row {longest}, has {self.lengths[longest]}. Give "
                f"tokens={self.lengths[longest]}, or truncate rows (in TRL: max_length)."
            )
        if min(self.lengths) < 1:
            raise ConfigError(
                f"Row {self.lengths.index(min(self.lengths))} has no token. Leave such rows out."
            )
        order = range(len(self.lengths))
        largest_count = max(
            len(self._cut_windows(self._shuffled(0))), len(self._fill_batches(order))
        )
        # number for all ranks, the same in every epoch
        self._count = -(-largest_count // num_replicas) * num_replicas

    @property
    def sampler(self) -> TokenBatchSampler:
        """Return the sampler itself, because accelerate calls `set_epoch` on the attribute
        `sampler` of a batch sampler."""
        return self

    def set_epoch(self, epoch: int, batches_done: int = 0) -> None:
        """Set the epoch that the next iteration yields.

        Args:
            epoch: number of the epoch.
            batches_done: number of this rank's batches to skip, because a resumed run has trained
                on them.
        """
        self.epoch = epoch
        self._batches_done = batches_done

    def __len__(self) -> int:
        """Return the number of batches of an epoch, for this rank or, without `rank`, for all
        ranks.
        """
        if self.rank is None:
            return self._count
        return self._count // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        """Yield each batch of the epoch as a list of row indices. Batches that `set_epoch` was told
        to skip are left out of this iteration."""
        first, step = (0, 1) if self.rank is None else (self.rank, self.num_replicas)
        epoch = self.epoch
        skipped = self._batches_done
        self._batches_done = 0
        order = self._shuffled(epoch)
        batches = self._cut_windows(order)
        if len(batches) > self._count:
            batches = self._fill_batches(order)  # `_count` batches at most, in every epoch
        while len(batches) < self._count:
            largest_batch = max(range(len(batches)), key=lambda batch: len(batches[batch]))
            rows = batches[largest_batch]
            # or repeat a row
            batches[largest_batch : largest_batch + 1] = [
                rows[::2],
                rows[1::2] or [order[len(batches) % len(order)]],
            ]
        groups = []
        for start in range(0, self._count, self.num_replicas):
            groups.append(batches[start : start + self.num_replicas])
        random.Random(f"{self.seed} {epoch} groups").shuffle(groups)
        longest = [max(self.lengths[row] for batch in group for row in batch) for group in groups]
        groups.insert(0, groups.pop(longest.index(max(longest))))
        # in the order of distribution to ranks
        dealt = [batch for group in groups for batch in group]
        yield from dealt[first::step][skipped:]

    def _shuffled(self, epoch: int) -> list[int]:
        """Return all rows in an epoch's random order.

        The generator's seed is the text of seed and epoch, which gives the same order on every
        machine. A sum would give (seed 0, epoch 1) and (seed 1, epoch 0) the same order.
        """
        order = list(range(len(self.lengths)))
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        return order

    def _cut_windows(self, order: Sequence[int]) -> list[list[int]]:
        """Return the batches of an epoch as lists of row indices. Consecutive rows of `order` form
        windows of `window` rows each, and the rows of a window are packed into batches
        (`_fill_batches`).

        Args:
            order: all row indices in the epoch's random order.
        """
        starts = range(0, len(order), self.window)
        batches: list[list[int]] = []
        for start in starts:
            for batch in self._fill_batches(order[start : start + self.window]):
                batches.append(batch)
        return batches

    def _fill_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Return batches, lists of row indices, that together contain the given rows. Best fit: the
        rows are taken longest first, and each goes into the fullest batch with enough room.

        Args:
            rows: indices of the rows.
        """
        batches: list[list[int]] = []
        headrooms: list[tuple[int, int]] = []  # sorted (tokens left, batch)
        for row in sorted(rows, key=lambda row: -self.lengths[row]):
            position = bisect.bisect_left(headrooms, (self.lengths[row], -1))
            headroom, batch = (
                headrooms.pop(position)
                if position < len(headrooms)
                else (self.tokens, len(batches))
            )
            if batch == len(batches):
                batches.append([])
            batches[batch].append(row)
            bisect.insort(headrooms, (headroom - self.lengths[row], batch))
        return batches


def _whole_numbers(lengths: Any) -> list[int]:
    """Return the lengths of rows as ints, from a list, a column of a data set, an array or a tensor
    [rows].

    Raises:
        ConfigError: `lengths` has another type.
    """
    if hasattr(lengths, "tolist"):
        values = lengths.tolist()
    else:
        values = lengths
    try:
        numbers = [operator.index(length) for length in values]
    except TypeError:
        raise ConfigError(
            f"lengths is {short_repr(lengths)}; it must be one whole number for each row, its "
            "tokens. Give [len(ids) for ids in dataset['input_ids']], say."
        ) from None
    return numbers
