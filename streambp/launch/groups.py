"""Put all completions of a prompt into one micro-batch, for TRL trainers that shuffle generated
batches.

GRPO's and RLOO's trainers permute all completions and split them into micro-batches. Rows of one
prompt end up far apart and cannot share computation. This module regroups the split rows: prompts
stay in the order of their first rows in the permutation, and all rows of a prompt follow each
other. The result is a shuffle of complete groups. Regrouping draws no random number, so later
generations are the same. An optimizer step has the same rows if it covers the full generation
batch.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from streambp.known_names import IMAGES_OF_ROWS, PREPARE_INPUTS, PROMPT_FIELDS, ROLLOUTS

# One value for each row: a tensor [B, ...] or a list of length B. Other values hold for all rows:
# None, 0-d.
Batch = dict[str, Any]


def keep_groups(trainer: Any) -> None:
    """Change a TRL trainer that generates completions (GRPO, RLOO), so that all completions of a
    prompt are in one micro-batch. A packed row then computes the prompt once.

    The change has an effect only while the trainer's model is patched with rows="packed", and only
    in trainers that buffer generated batches. `StreamGRPOTrainer` and `streambp launch` call this
    function themselves.
    """
    if PREPARE_INPUTS not in vars(
        trainer
    ):  # only once, and never over a function that the user has set
        setattr(trainer, PREPARE_INPUTS, functools.partial(prepare_groups, trainer))


def prepare_groups(trainer: Any, generation_batch: Any) -> Any:
    """Call a TRL trainer's own `_prepare_inputs`, in whose place this function is called, and
    return the inputs of one micro-batch. If the model is patched with rows="packed" and the trainer
    has generated new rows, the rows are first reordered: the completions of a prompt are then
    adjacent.

    Args:
        trainer: the trainer.
        generation_batch: the argument of `_prepare_inputs`.
    """
    earlier_rollouts = getattr(trainer, ROLLOUTS, None)
    inputs = getattr(type(trainer), PREPARE_INPUTS)(trainer, generation_batch)
    rollouts = getattr(trainer, ROLLOUTS, None)
    if rollouts is None or rollouts is earlier_rollouts:
        return inputs
    patched = []
    for part in trainer.model.modules():
        if "_streambp" in part.__dict__:
            patched.append(part.__dict__["_streambp"])
    # with "auto", micro-batches do not change
    if not any(state.config.rows == "packed" for state in patched):
        return inputs
    whole_groups = group_batches(rollouts)
    setattr(trainer, ROLLOUTS, whole_groups)
    return next(
        (ours for ours, theirs in zip(whole_groups, rollouts, strict=True) if theirs is inputs),
        inputs,
    )


def group_batches(batches: list[Batch]) -> list[Batch]:
    """Return the same rows in micro-batches of the same sizes, in which the completions of each
    prompt are adjacent.

    Rows with equal prompt ids and prompt mask belong to one prompt. The micro-batches are returned
    unchanged if they have no prompts, or have values without an entry for each row (images).

    Args:
        batches: the micro-batches: dicts from TRL's names to tensors [B, ...], lists of B values,
            or values for all rows.
    """
    first = batches[0]
    if (
        not all(isinstance(first.get(name), Tensor) for name in PROMPT_FIELDS)
        or IMAGES_OF_ROWS in first
    ):
        return batches
    sizes = [len(batch[PROMPT_FIELDS[0]]) for batch in batches]
    of_rows = []
    for name, value in first.items():
        if isinstance(value, list) or (torch.is_tensor(value) and value.dim()):
            of_rows.append(name)
    if any(
        len(batch[name]) != size
        for batch, size in zip(batches, sizes, strict=True)
        for name in of_rows
    ):
        return batches
    # [rows, 2 P]
    prompts = torch.cat(
        [torch.cat([batch[name] for name in PROMPT_FIELDS], dim=1) for batch in batches]
    )
    first_rows: dict[int, int] = {}  # prompt -> its first row
    prompt_indices = prompts.unique(dim=0, return_inverse=True)[1].tolist()
    order = sorted(
        range(len(prompt_indices)), key=lambda row: first_rows.setdefault(prompt_indices[row], row)
    )
    joined: dict[str, Any] = {}
    for name in of_rows:
        parts = [batch[name] for batch in batches]
        if isinstance(parts[0], Tensor):
            joined[name] = torch.cat(parts)[order]
        else:
            values = list(itertools.chain.from_iterable(parts))
            joined[name] = [values[row] for row in order]
    ends = list(itertools.accumulate(sizes, initial=0))
    regrouped: list[Batch] = []
    for batch, (start, stop) in zip(batches, itertools.pairwise(ends), strict=True):
        regrouped.append({**batch, **{name: value[start:stop] for name, value in joined.items()}})
    return regrouped
