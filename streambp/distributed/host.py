"""What an engine's own CPU offloading takes of the host memory that offloaded activations want as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streambp.distributed.zero import is_partitioned
from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import (
    FSDP_GROUPS,
    FSDP_OFFLOADED,
    FSDP_PARAMETERS,
    OFFLOADS_PARAMETERS,
    OFFLOADS_STATES,
    ZERO_OPTIMIZERS,
)

STATES = 2  # of an optimizer that has not been seen: Adam's


@dataclasses.dataclass(frozen=True)
class HostUse:
    """Bytes of host memory on this rank: parameters and optimizer state that are there, and what is still to come."""

    parameters: int = 0
    optimizer: int = 0
    to_come: int = 0


def engine_host_use(model: nn.Module) -> HostUse:
    """What ZeRO-Offload, or FSDP2 under CPUOffloadPolicy, takes; all zero without them.

    DeepSpeed allocates everything when it is initialised. Under FSDP2 the gradients come with the first backward and the
    optimizer's state with its first step; nobody knows that optimizer yet, so Adam's two states are assumed.
    """
    shards = list(_fsdp_shards(model))
    if shards:
        gradients = _bytes(p.grad for p in shards if p.grad is not None)
        trained = _bytes(p for p in shards if p.requires_grad)
        return HostUse(parameters=_bytes(shards), to_come=(1 + STATES) * trained - gradients)
    zero = next((getattr(p, name) for p in model.parameters() for name in ZERO_OPTIMIZERS if hasattr(p, name)), None)
    parameters: list[Tensor] = []
    if getattr(zero, OFFLOADS_PARAMETERS, False):
        parameters = [p.ds_tensor for p in model.parameters() if is_partitioned(p)]  # type: ignore[attr-defined]
    state: Iterable[Tensor] = ()
    if zero is not None and any(getattr(zero, name, False) for name in OFFLOADS_STATES):
        state = _optimizer_tensors(zero.optimizer)
    return HostUse(parameters=_bytes(parameters), optimizer=_bytes(state))


def _fsdp_shards(model: nn.Module) -> Iterable[Tensor]:
    """The shards that FSDP2 keeps on the host."""
    for module in model.modules():
        if is_fsdp_unit(module):
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, FSDP_GROUPS[0], None) or [getattr(state, FSDP_GROUPS[1], None)]
            for parameter in (p for group in groups for p in getattr(group, FSDP_PARAMETERS, ())):
                if getattr(parameter, FSDP_OFFLOADED, False):
                    yield parameter.sharded_param


def _optimizer_tensors(optimizer: Any) -> Iterable[Tensor]:
    """float32 partitions with their gradients and state."""
    for partition, states in optimizer.state.items():
        yield partition
        if partition.grad is not None:
            yield partition.grad
        yield from (value for value in states.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of distinct storages; of a DTensor, this rank's."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
