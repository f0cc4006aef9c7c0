"""Micro-batches put together again, so that each has rows of few prompts.

covers: launch/groups.py
"""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch

from streambp.launch import groups
from streambp.launch.groups import group_batches, prepare_groups
from streambp.prefixes.tree import PrefixTree, find_tree
from tests.seeds import seeded


def generated(prompts, completions, longest_prompt, longest_completion, least_prompt=1, seed=0):
    """A generation batch as TRL has it: prompts padded on the left, completions on the right,
    groups in order."""
    generator = seeded(seed)

    def lengths(count, longest, min_length=1):
        return torch.randint(min_length, longest + 1, (count,), generator=generator)

    # [rows]
    of_prompts = lengths(prompts, longest_prompt, least_prompt).repeat_interleave(completions)
    prompt_mask = (torch.arange(longest_prompt).flip(0) < of_prompts[:, None]).long()
    ids = torch.randint(3, 1000, (prompts, longest_prompt), generator=generator).repeat_interleave(
        completions, 0
    )
    rows = prompts * completions
    completion_mask = (
        torch.arange(longest_completion) < lengths(rows, longest_completion)[:, None]
    ).long()
    completion_ids = torch.randint(3, 1000, (rows, longest_completion), generator=generator)
    # none begins like another by chance, which would be shared in one order
    completion_ids[:, 0] = 3 + torch.arange(rows)
    return {
        "prompt_ids": ids * prompt_mask, "prompt_mask": prompt_mask,
        "completion_ids": completion_ids * completion_mask, "completion_mask": completion_mask,
        "advantages": torch.arange(float(rows)), "names": [f"row {row}" for row in range(rows)],
        "num_items_in_batch": torch.tensor(7), "ref_per_token_logps": None,
    }  # fmt: skip


def micro_batches(batch, size, shuffled=True, seed=0):
    """What TRL makes of a generation batch."""
    rows = len(batch["prompt_ids"])
    order = torch.randperm(rows, generator=seeded(seed)) if shuffled else torch.arange(rows)

    def part(value, start):
        if value is None or (torch.is_tensor(value) and value.dim() == 0):
            return value
        row_numbers = order[start : start + size]
        return value[row_numbers] if torch.is_tensor(value) else [value[row] for row in row_numbers]

    return [
        {name: part(value, start) for name, value in batch.items()}
        for start in range(0, rows, size)
    ]


def names_of(batches):
    return [batch["names"] for batch in batches]


@pytest.mark.parametrize("size", [4, 6, 8, 24])
def test_prompts_stay_together_and_every_row_is_kept(size):
    batch = generated(prompts=6, completions=4, longest_prompt=5, longest_completion=3)
    theirs = micro_batches(batch, size)
    ours = group_batches(theirs)
    assert [len(names) for names in names_of(ours)] == [size] * (24 // size)
    order = [int(name.split()[1]) for name in itertools.chain.from_iterable(names_of(ours))]
    assert sorted(order) == list(range(24))
    assert len([prompt for prompt, _ in itertools.groupby(order, key=lambda row: row // 4)]) == 6
    shuffled = [int(name.split()[1]) for name in itertools.chain.from_iterable(names_of(theirs))]
    assert list(dict.fromkeys(row // 4 for row in order)) == list(
        dict.fromkeys(row // 4 for row in shuffled)
    )
    for micro in ours:  # all that a row has goes with it
        rows = [int(name.split()[1]) for name in micro["names"]]
        assert micro["advantages"].tolist() == rows
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
            assert torch.equal(micro[name], batch[name][rows]), name
        assert micro["num_items_in_batch"] == 7
        assert micro["ref_per_token_logps"] is None


def test_the_same_ids_behind_other_padding_are_another_prompt():
    batch = generated(prompts=2, completions=3, longest_prompt=4, longest_completion=2)
    batch["prompt_ids"][:] = 0
    batch["prompt_mask"][:3], batch["prompt_mask"][3:] = (
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([0, 0, 1, 1]),
    )
    for names in names_of(group_batches(micro_batches(batch, 3))):
        assert len({int(name.split()[1]) // 3 for name in names}) == 1


@pytest.mark.parametrize(
    "changes",
    [{"num_images": [1] * 24}, {"pixel_values": torch.zeros(30, 2)}, {"prompt_mask": None}],
    ids=["images of rows", "not row by row", "no prompts"],
)
def test_what_may_not_be_row_by_row_stays_as_it_is(changes):
    theirs = micro_batches(
        generated(prompts=6, completions=4, longest_prompt=5, longest_completion=3), 4
    )
    theirs = [{**batch, **changes} for batch in theirs]
    assert group_batches(theirs) is theirs


@pytest.mark.parametrize(
    ("prompts", "completions", "size", "min_saved"),
    [(8, 8, 8, 3.0), (8, 8, 4, 2.2), (8, 8, 16, 3.0), (4, 16, 16, 4.0)],
)
def test_tokens_saved_are_those_of_rows_in_order(prompts, completions, size, min_saved):
    """Prompts of 256 to 512 tokens, completions of up to 128; printed are tokens of rows over those
    of the tree."""
    batch = generated(
        prompts, completions, longest_prompt=512, longest_completion=128, least_prompt=256
    )
    theirs = micro_batches(batch, size)
    ordered, ours, shuffled = (
        saved(batches)
        for batches in (micro_batches(batch, size, shuffled=False), group_batches(theirs), theirs)
    )
    print(
        f"{prompts} x {completions} in micro-batches of {size}: {ours:.2f}, as TRL shuffles "
        f"{shuffled:.2f}"
    )
    assert ours == pytest.approx(ordered, rel=1e-6)
    assert ours > max(min_saved, 1.5 * shuffled)


def saved(batches):
    """Tokens of all rows over those that are computed."""
    rows = computed = 0
    for batch in batches:
        ids, mask = (
            torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1)
            for kind in ("ids", "mask")
        )
        tree = find_tree(ids, mask)
        rows += int(mask.sum())
        computed += tree.tokens if isinstance(tree, PrefixTree) else int(mask.sum())
    return rows / computed


class Trainer:
    """One that generates every second step."""

    def __init__(self, shares=True):
        self.model = torch.nn.Linear(1, 1)
        config = SimpleNamespace(rows="packed" if shares else "auto")
        self.model._streambp = SimpleNamespace(config=config)
        self.step, self._buffered_inputs = 0, None

    def _prepare_inputs(self, batch):
        if self.step % 2 == 0:
            self._buffered_inputs = micro_batches(
                batch, len(batch["prompt_ids"]) // 2, seed=self.step
            )
        self.step += 1
        return self._buffered_inputs[(self.step - 1) % 2]


@pytest.mark.parametrize("shares", [True, False])
def test_a_trainer_gets_groups_while_its_model_shares(shares):
    trainer, batch = (
        Trainer(shares),
        generated(prompts=2, completions=8, longest_prompt=5, longest_completion=3),
    )
    groups.keep_groups(trainer)
    groups.keep_groups(trainer)
    rows = []
    for _ in range(2):
        halves = [trainer._prepare_inputs(batch)["names"] for _ in range(2)]
        # no row twice
        assert sorted(itertools.chain.from_iterable(halves)) == sorted(batch["names"])
        rows += [{int(name.split()[1]) // 8 for name in names} for names in halves]
    assert all(len(prompts) == 1 for prompts in rows) == shares


def test_a_function_that_a_trainers_user_put_there_stays():
    trainer = Trainer()
    trainer._prepare_inputs = theirs = lambda batch: batch
    groups.keep_groups(trainer)
    assert trainer._prepare_inputs is theirs


def test_a_trainer_can_be_sent_to_another_process():
    trainer = Trainer()
    trainer.model = None
    groups.keep_groups(trainer)
    trainer_copy = pickle.loads(pickle.dumps(trainer))
    assert trainer_copy._prepare_inputs.func is prepare_groups
    assert trainer_copy._prepare_inputs.args[0] is trainer_copy


def rows_in_order_of_their_numbers(batches):
    """A mutant: rows of the same prompt, but the micro-batches as TRL cut them."""
    return batches


def test_a_shuffle_that_stays_is_seen(monkeypatch):
    monkeypatch.setattr(groups, "group_batches", rows_in_order_of_their_numbers)
    with pytest.raises(AssertionError):
        test_a_trainer_gets_groups_while_its_model_shares(True)
