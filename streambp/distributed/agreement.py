"""What ranks tell each other before one of them does what the others must do as well.

[Note: what a rank decides alone] Ranks have other batches, other free memory, other hooks. So each decides by itself how
its micro-batch is computed, and no collective may depend on that: a rank that is alone in one waits for ever. Under DDP,
ZeRO-1 and ZeRO-2 collectives are in backward alone, for each gradient, whatever it was computed from. Under ZeRO-3 and
FSDP2 each call of a unit is one, forward and backward: there a rank may neither begin a forward again nor make one that
nobody asked for, unless all do. docs/explanation/distributed.md lists every decision. Where sequences are split,
`sharded/shards.py` agrees on all that decides an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streambp.distributed.engines import held
from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import FSDP_GATHERS, FSDP_GROUPS, ZERO_GROUP


def must_agree(module: nn.Module) -> bool:
    """Whether a forward of the module is a collective that other ranks take part in."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and held(module).weights


def everyones_numbers(module: nn.Module, mine: Sequence[int], device: torch.device) -> list[list[int]]:
    """What each rank hands in, as many numbers on each, of the ranks over which an engine has divided the module's
    parameters; of all, where it does not say.

    Every one of them calls this before each of its forwards. device: where the model's inputs are.
    """
    ranks = next((getattr(p, ZERO_GROUP) for p in module.parameters() if hasattr(p, ZERO_GROUP)), None)
    for unit in filter(is_fsdp_unit, () if ranks is not None else module.modules()):
        state = unit._get_fsdp_state()  # type: ignore[operator]
        for group in getattr(state, FSDP_GROUPS[0], None) or [getattr(state, FSDP_GROUPS[1], None)]:
            found = getattr(getattr(group, FSDP_GATHERS[0], None), FSDP_GATHERS[1], None)
            ranks = found if ranks is None else ranks
    return [said.tolist() for said in all_gather(ranks, torch.tensor(mine, device=device))]


def all_gather(group: Any, tensor: Tensor) -> list[Tensor]:
    """Every rank's `tensor`, of any one shape [...]."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
