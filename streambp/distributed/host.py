"""What an engine's own CPU offloading takes of the host memory that offloaded activations want as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streambp.distributed.zero import is_partitioned

STATES = 2  # of an optimizer that has not been seen: Adam's
Z3_OPTIMIZER, ZERO_OPTIMIZER = "_z3_optimizer", "_zero_optimizer"  # where DeepSpeed hangs its optimizer on a parameter


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
    names = (Z3_OPTIMIZER, ZERO_OPTIMIZER)
    zero = next((getattr(p, name) for p in model.parameters() for name in names if hasattr(p, name)), None)
    parameters: list[Tensor] = []
    if getattr(zero, "offload_param", False):
        parameters = [p.ds_tensor for p in model.parameters() if is_partitioned(p)]  # type: ignore[attr-defined]
    state: Iterable[Tensor] = ()
    if zero is not None and (getattr(zero, "offload_optimizer", False) or getattr(zero, "cpu_offload", False)):
        state = _optimizer_tensors(zero.optimizer)
    return HostUse(parameters=_bytes(parameters), optimizer=_bytes(state))


def _fsdp_shards(model: nn.Module) -> Iterable[Tensor]:
    """The shards that FSDP2 keeps on the host."""
    for module in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for parameter in (p for group in groups for p in getattr(group, "fsdp_params", ())):
                if getattr(parameter, "offload_to_cpu", False):
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
