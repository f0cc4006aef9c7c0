"""Rows of one prompt in one micro-batch, for trainers of TRL that shuffle a generation batch before they cut it.

[Note: whole groups] GRPO's and RLOO's trainers draw a permutation of all completions and cut them into micro-batches, so
that rows of one prompt are far apart, where nothing can be shared. What has been cut is put together again here: prompts in
the order in which the permutation has them first, their rows one after the other. That is a shuffle of whole groups. It
draws no random number, so whatever is generated next is the same, and which rows an optimizer step has is the same where
one step takes the whole generation batch.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from streambp.known_names import IMAGES_OF_ROWS, PREPARES, PROMPTS, ROLLOUTS

Batch = dict[str, Any]  # values of rows: a tensor [B, ...] or a list of B; others are the same for all rows: None, 0-d


def keep_groups(trainer: Any) -> None:
    """Have a trainer of TRL's that generates (GRPO, RLOO) keep a prompt's rows together. [Note: whole groups]

    Only while its model has rows="packed"; a trainer that does not buffer rollouts is not changed by it.
    `StreamGRPOTrainer` and `streambp launch` do it by themselves.
    """
    if PREPARES not in vars(trainer):  # once, and not where its user has put another function there
        setattr(trainer, PREPARES, functools.partial(prepare_groups, trainer))


def prepare_groups(trainer: Any, generation_batch: Any) -> Any:
    """What a trainer's `_prepare_inputs` gives a step, of micro-batches that hold whole groups."""
    before = getattr(trainer, ROLLOUTS, None)
    inputs = getattr(type(trainer), PREPARES)(trainer, generation_batch)
    cut = getattr(trainer, ROLLOUTS, None)
    if cut is None or cut is before:
        return inputs
    patched = [part.__dict__["_streambp"] for part in trainer.model.modules() if "_streambp" in part.__dict__]
    if not any(state.config.rows == "packed" for state in patched):  # with "auto" no micro-batch is another
        return inputs
    together = grouped(cut)
    setattr(trainer, ROLLOUTS, together)
    return next((ours for ours, theirs in zip(together, cut, strict=True) if theirs is inputs), inputs)


def grouped(batches: list[Batch]) -> list[Batch]:
    """Micro-batches with the same rows, each as large as before, those of one prompt next to each other.

    A prompt is known by its ids and its mask. Micro-batches come back as they are if they have none, or hold anything that
    is not row by row (images).
    """
    first = batches[0]
    if not all(isinstance(first.get(name), Tensor) for name in PROMPTS) or IMAGES_OF_ROWS in first:
        return batches
    sizes = [len(batch[PROMPTS[0]]) for batch in batches]
    of_rows = [name for name, value in first.items() if isinstance(value, list) or (torch.is_tensor(value) and value.dim())]
    if any(len(batch[name]) != size for batch, size in zip(batches, sizes, strict=True) for name in of_rows):
        return batches
    prompts = torch.cat([torch.cat([batch[name] for name in PROMPTS], dim=1) for batch in batches])  # [rows, 2 P]
    found: dict[int, int] = {}  # of a prompt its first row
    which = prompts.unique(dim=0, return_inverse=True)[1].tolist()
    order = sorted(range(len(which)), key=lambda row: found.setdefault(which[row], row))
    whole: dict[str, Any] = {}
    for name in of_rows:
        parts = [batch[name] for batch in batches]
        if isinstance(parts[0], Tensor):
            whole[name] = torch.cat(parts)[order]
        else:
            values = list(itertools.chain.from_iterable(parts))
            whole[name] = [values[row] for row in order]
    ends = list(itertools.accumulate(sizes, initial=0))
    return [
        {**batch, **{name: value[start:stop] for name, value in whole.items()}}
        for batch, (start, stop) in zip(batches, itertools.pairwise(ends), strict=True)
    ]
