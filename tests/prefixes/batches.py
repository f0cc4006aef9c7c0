"""Batches whose rows begin alike, and what is computed of them."""

from __future__ import annotations

import itertools

import torch

from tests.families import VOCABULARY
from tests.seeds import seeded

MODES = ("plain", "padded", "two prompts", "deep", "equal", "nothing shared")
PROMPT = 17
COMPLETION = 9


def tokens(generator, *shape):
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def make_batch(mode, seed=1, prompt=PROMPT, completion=COMPLETION):
    """Labels are of completions; a batch with padding has it on both sides, and a mask."""
    generator = seeded(seed)
    parts = {0, prompt, prompt + 4, prompt + completion}
    ids, mask = draw(generator, mode, prompt, completion)
    while any(alike(*pair) not in parts for pair in itertools.combinations(ids, 2)):  # by chance
        ids, mask = draw(generator, mode, prompt, completion)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "labels": labels}
    return {**batch, "attention_mask": mask} if mode in ("padded", "two prompts", "deep") else batch


def alike(row, other_row):
    """How many tokens they begin with in common."""
    return int((row == other_row).long().cumprod(0).sum())


def draw(generator, mode, prompt, completion):
    """Ids and mask."""
    ids = tokens(generator, 6 if mode == "two prompts" else 4, prompt + completion)
    mask = torch.ones_like(ids)
    if mode in ("plain", "padded"):
        ids[:, :prompt] = ids[0, :prompt]
    elif mode == "two prompts":  # one after the other in turns, the second shorter
        ids[::2, :prompt], ids[1::2, :prompt] = ids[0, :prompt], ids[1, :prompt]
        mask[1::2, :4] = 0
    elif mode == "deep":  # turns of an agent: the last row ends inside the first
        ids[1, : prompt + 4] = ids[0, : prompt + 4]
        ids[2, :prompt] = ids[1, :prompt]
        ids[3] = ids[0]
        mask[3, prompt + 2 :] = 0
    elif mode == "equal":
        ids[:] = ids[0].clone()
    if mode == "padded":
        mask[:, :3], mask[1, -4:], mask[3, -1:] = 0, 0, 0
    return ids, mask


def real(batch):
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"]))


def token_prefixes(batch):
    """For each token of a row, what it is known by: its column, and the ids up to it."""
    for ids, mask in zip(batch["input_ids"], real(batch), strict=True):
        yield [
            (column, tuple(ids[mask > 0][: i + 1].tolist()))
            for i, column in enumerate(mask.nonzero().flatten().tolist())
        ]


def counted(batch):
    """Tokens of the rows, and how many of them differ."""
    prefixes = [prefix for row in token_prefixes(batch) for prefix in row]
    return len(prefixes), len(set(prefixes))
