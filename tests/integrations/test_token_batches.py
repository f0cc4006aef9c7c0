"""Batches by tokens: each row once an epoch, no batch too long, ranks alike, as accelerate deals
them, too.

covers: integrations/token_batches.py
"""

from __future__ import annotations

import itertools
import random

import pytest
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from streambp.errors import ConfigError
from streambp.integrations import TokenBatchSampler
from tests.seeds import seed_of

LENGTHS = {
    "long tail": lambda draw: min(4096, int(draw.lognormvariate(5.0, 1.0)) + 1),
    "equal": lambda draw: 700,
    "two kinds": lambda draw: draw.choice((4096, 3)),
    "over half": lambda draw: draw.randint(2049, 4096),
}


def lengths_of(kind, rows):
    draw = random.Random(seed_of(rows))
    return [LENGTHS[kind](draw) for _ in range(rows)]


def check_epochs(lengths, tokens, ranks, epochs=4, **settings):
    """Every epoch of all ranks: the rows of every batch."""
    samplers = [
        TokenBatchSampler(lengths, tokens, num_replicas=ranks, rank=rank, **settings)
        for rank in range(ranks)
    ]
    batches_by_epoch = []
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in samplers]
        assert {len(of_rank) for of_rank in batches} == {len(samplers[0])}
        assert all(
            batch and sum(lengths[row] for row in batch) <= tokens
            for of_rank in batches
            for batch in of_rank
        )
        rows = [row for of_rank in batches for batch in of_rank for row in batch]
        repeated = len(rows) - len(lengths)
        assert sorted(set(rows)) == list(range(len(lengths)))
        assert 0 <= repeated < ranks
        assert not repeated or max(len(batch) for of_rank in batches for batch in of_rank) == 1
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        assert lengths[longest] in {lengths[row] for of_rank in batches for row in of_rank[0]}
        batches_by_epoch.append(batches)
    return batches_by_epoch


@pytest.mark.parametrize("window", [1, 16, 10_000])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rows", [2, 100, 333])
@pytest.mark.parametrize("kind", LENGTHS)
def test_every_row_once_and_no_batch_too_long(kind, rows, ranks, window):
    epochs = check_epochs(lengths_of(kind, rows), 4096, ranks, window=window)
    assert rows < 100 or epochs[0] != epochs[1]


def test_batches_are_full_and_those_of_one_step_alike():
    lengths = lengths_of("long tail", 20_000)
    (batches,) = check_epochs(lengths, 8192, 4, epochs=1)
    assert sum(lengths) / (sum(map(len, batches)) * 8192) > 0.97
    steps = list(zip(*batches, strict=True))
    spreads = [
        abs(max(lengths[row] for row in a) - max(lengths[row] for row in b)) for a, b, *_ in steps
    ]
    random_spreads = [
        abs(max(lengths[row] for row in steps[i][0]) - max(lengths[row] for row in steps[-i][1]))
        for i in range(1, len(steps))
    ]
    assert sum(spreads) < 0.5 * sum(
        random_spreads
    )  # ranks wait for the longest attention among them


def test_seeds_and_epochs_are_other_orders():
    lengths = lengths_of("long tail", 200)

    def batches(seed, epoch):
        sampler = TokenBatchSampler(lengths, 4096, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert batches(1, 2) == batches(1, 2)
    orders = [batches(seed, epoch) for seed, epoch in itertools.product(range(3), repeat=2)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_an_epoch_goes_on_where_it_was_left():
    sampler = TokenBatchSampler(lengths_of("long tail", 200), 4096, num_replicas=2, rank=1)
    sampler.set_epoch(3)
    full_epoch = list(sampler)
    sampler.set_epoch(3, batches_done=4)
    assert list(sampler) == full_epoch[4:]
    assert list(sampler) == full_epoch  # the next epoch has all of them


@pytest.mark.parametrize("ranks", [2, 3])
def test_accelerate_deals_as_the_sampler_does(ranks):
    lengths = lengths_of("long tail", 150)
    for rank in range(ranks):
        full_sampler = TokenBatchSampler(lengths, 4096, num_replicas=ranks)
        dealt = BatchSamplerShard(
            full_sampler, num_processes=ranks, process_index=rank, even_batches=False
        )
        rank_sampler = TokenBatchSampler(lengths, 4096, num_replicas=ranks, rank=rank)
        for epoch in range(2):
            dealt.batch_sampler.sampler.set_epoch(epoch)
            rank_sampler.set_epoch(epoch)
            assert list(dealt) == list(rank_sampler)
            assert len(dealt) == len(rank_sampler)


def test_accelerates_loader_gives_it_the_epoch():
    lengths = lengths_of("long tail", 60)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    loader = accelerator.prepare(
        DataLoader(list(range(60)), batch_sampler=TokenBatchSampler(lengths, 4096))
    )
    for epoch in range(2):
        loader.set_epoch(epoch)
        expected = TokenBatchSampler(lengths, 4096)
        expected.set_epoch(epoch)
        assert [batch.tolist() for batch in loader] == list(expected)


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        (
            [5, 70, 65],
            {},
            "2 of 3 rows have more than tokens=64 tokens; the longest, row 1, has 70",
        ),
        ([], {}, "lengths is empty"),
        ([3, 0], {}, "Row 1 has no token"),
        (
            [3, 4],
            {"num_replicas": 2, "rank": 2},
            "rank=2 is not one of num_replicas=2. Pass a rank from 0 to 1",
        ),
        ([3], {"window": 0}, "window=0 must be whole numbers from 1"),
    ],
)
def test_what_cannot_be_dealt_is_refused(lengths, settings, message):
    with pytest.raises(ConfigError, match=message):
        TokenBatchSampler(lengths, 64, **settings)


def test_an_epoch_whose_windows_are_unlucky_has_no_batch_too_many():
    draw = random.Random(1)
    lengths = [draw.randint(1, 9) for _ in range(60)]
    sampler = TokenBatchSampler(lengths, 10, window=8)
    batch_counts = [len(sampler._cut_windows(sampler._shuffled(epoch))) for epoch in range(30)]
    assert max(batch_counts) > len(sampler) > min(batch_counts)
    check_epochs(lengths, 10, 1, epochs=30, window=8)
