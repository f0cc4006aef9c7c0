"""A group of one rank, so that split sequences can be tried in one process: an exchange gives back
what was sent."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from streambp.distributed.ulysses import SplitGroup
from streambp.model import causal_lm, split, wrappers


def give_back(received, sent, group=None):
    received.copy_(sent)


def split_over_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(split, "find_ulysses", lambda implementation: SplitGroup(None))
    for module in (causal_lm, wrappers):
        patch.setattr(module, "is_initialized", lambda: True)
    patch.setattr(dist, "all_to_all_single", give_back)
    patch.setattr(dist, "all_gather", lambda parts, tensor, group=None: parts[0].copy_(tensor))
    patch.setattr(dist, "get_world_size", lambda group=None: 1)
    patch.setattr(dist, "get_rank", lambda group=None: 0)


def with_shifted_labels(batch):
    """The batch as a data loader hands it to ranks: positions counted, labels shifted."""
    length = batch["input_ids"].shape[1]
    positions = batch["input_ids"].new_tensor(range(length)).expand_as(batch["input_ids"])
    labels = batch["labels"].roll(-1, 1)
    labels[:, -1] = -100
    return {"position_ids": positions, **batch, "labels": labels, "shift_labels": labels}
