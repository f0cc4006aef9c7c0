"""Measure the host memory that DeepSpeed or FSDP2 uses for its own CPU offloading, which offloaded
activations cannot use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streambp.distributed.engines import is_partitioned
from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import (
    FSDP_GROUPS,
    FSDP_OFFLOADED,
    FSDP_PARAMETERS,
    OFFLOADS_PARAMETERS,
    OFFLOADS_STATES,
    ZERO_OPTIMIZERS,
)

OPTIMIZER_STATES = 2  # states of an optimizer that does not exist yet; Adam has two


@dataclasses.dataclass(frozen=True)
class HostUse:
    """Bytes of host memory on this rank for CPU offloading by DeepSpeed or FSDP2.

    Attributes:
        parameters: bytes of offloaded parameters.
        optimizer: bytes of optimizer state that exists already. Under DeepSpeed, its float32 copies
            of the weights and their gradients are included.
        to_come: bytes of gradients and optimizer state that the engine has not allocated yet, but
            will.
    """

    parameters: int = 0
    optimizer: int = 0
    to_come: int = 0


def engine_host_use(model: nn.Module) -> HostUse:
    """Return the host memory on this rank that DeepSpeed's ZeRO-Offload or FSDP2's CPUOffloadPolicy
    uses now and will use. Tensors that streambp moves to the host leave this memory free. All
    numbers are 0 without CPU offloading.

    DeepSpeed allocates everything when it is initialized. FSDP2 allocates gradients in the first
    backward, and the optimizer allocates its state in its first step: Adam's two states are
    assumed.

    Args:
        model: the model, with the marks of the engine.
    """
    shards: list[Tensor] = []  # shards that FSDP2 stores on the host
    for module in filter(is_fsdp_unit, model.modules()):
        state = module._get_fsdp_state()  # type: ignore[operator]
        for group in getattr(state, FSDP_GROUPS[0], None) or [getattr(state, FSDP_GROUPS[1], None)]:
            parameters = getattr(group, FSDP_PARAMETERS, ())
            shards += [p.sharded_param for p in parameters if getattr(p, FSDP_OFFLOADED, False)]
    if shards:
        gradients = _bytes(p.grad for p in shards if p.grad is not None)
        trained = _bytes(p for p in shards if p.requires_grad)
        return HostUse(
            parameters=_bytes(shards), to_come=(1 + OPTIMIZER_STATES) * trained - gradients
        )
    zero = _zero_optimizer(model)
    partitioned: list[Tensor] = []
    if getattr(zero, OFFLOADS_PARAMETERS, False):
        partitioned = [p.ds_tensor for p in model.parameters() if is_partitioned(p)]  # type: ignore[attr-defined]
    states: list[Any] = []  # float32 partitions with their gradients and state
    if zero is not None and any(getattr(zero, name, False) for name in OFFLOADS_STATES):
        for partition, state in zero.optimizer.state.items():
            states += [partition, partition.grad, *state.values()]
    return HostUse(
        parameters=_bytes(partitioned), optimizer=_bytes(x for x in states if isinstance(x, Tensor))
    )


def _zero_optimizer(model: nn.Module) -> Any:
    """Return DeepSpeed's ZeRO optimizer of a model; None without ZeRO. ZeRO stores a reference to
    the optimizer as an attribute of the parameters."""
    for parameter in model.parameters():
        for name in ZERO_OPTIMIZERS:
            if hasattr(parameter, name):
                return getattr(parameter, name)
    return None


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory that these tensors occupy. A storage that several tensors share
    counts once, and a DTensor counts as this rank's shard."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
        else:
            local = tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
