"""Agreement between ranks before one of them runs a collective that the others must join.

[Note: what a rank decides alone] Ranks differ in their batch, their free memory and their hooks.
Each rank therefore decides alone how to compute its micro-batch, and no collective may depend on
the decision: a rank that is alone in a collective waits forever. Under DDP, ZeRO-1 and ZeRO-2 all
collectives are in backward. Each gradient has one collective, however the gradient was computed.

Under ZeRO-3 and FSDP2 each call of a unit is a collective, in forward and backward. A rank may
neither repeat nor add a forward there, unless all ranks do. docs/explanation/distributed.md lists
every decision. `sharded/shards.py` makes ranks agree, for split sequences, on every value that
decides an exchange.
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
    """True if the module's forward gathers parameters from several ranks (ZeRO-3, FSDP2), so that
    all ranks must call it equally often."""
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and held(module).weights
    )


def everyones_numbers(
    module: nn.Module, mine: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Return the numbers that each rank passes, one list for each rank. A collective: every rank of
    the group calls this before each of its forwards.

    The group is the one over which ZeRO-3 or FSDP2 has partitioned the module's parameters,
    otherwise all ranks.

    Args:
        module: the module whose parameters are partitioned.
        mine: this rank's numbers; their count is the same on all ranks.
        device: the device of the model's inputs.
    """
    ranks = None
    for parameter in module.parameters():
        if hasattr(parameter, ZERO_GROUP):
            ranks = getattr(parameter, ZERO_GROUP)
            break
    for unit in filter(is_fsdp_unit, () if ranks is not None else module.modules()):
        state = unit._get_fsdp_state()  # type: ignore[operator]
        for group in getattr(state, FSDP_GROUPS[0], None) or [getattr(state, FSDP_GROUPS[1], None)]:
            found = getattr(getattr(group, FSDP_GATHERS[0], None), FSDP_GATHERS[1], None)
            ranks = found if ranks is None else ranks
    return [said.tolist() for said in all_gather(ranks, torch.tensor(mine, device=device))]


def all_gather(group: Any, tensor: Tensor) -> list[Tensor]:
    """Return the tensor [...] of each rank in the process group; all have the same shape."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
