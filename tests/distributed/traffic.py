"""What ranks send each other: collectives and their elements, counted where torch dispatches them,
whoever calls."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHERS = {
    "allgather_": 0, "_allgather_base_": 0, "allgather_into_tensor_coalesced_": 0,
}  # fmt: skip
REDUCTIONS = {
    "allreduce_": 0, "allreduce_coalesced_": 0, "reduce_": 0, "reduce_scatter_": 1, "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}  # fmt: skip
MAX_SMALL_ELEMENTS = 8  # elements of flags, counts and norms


class Traffic(TorchDispatchMode):
    """Counts calls of collectives and the elements of the whole tensors that they gather or reduce.

    The number beside an operator in the tables above is that of its argument with the whole
    tensors.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.elements = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            for kind, table in (("gathered", GATHERS), ("reduced", REDUCTIONS)):
                if name in table:
                    elements = sum(
                        t.numel()
                        for t in tree_leaves(args[table[name]])
                        if isinstance(t, torch.Tensor)
                    )
                    if elements > MAX_SMALL_ELEMENTS:
                        self.calls[kind] += 1
                        self.elements[kind] += elements
            if name not in GATHERS and name not in REDUCTIONS:
                self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Gathers(Counter):
    """How often ZeRO-3 gathers each parameter, by its number; as a context."""

    def __enter__(self):
        from deepspeed.runtime.zero.partitioned_param_coordinator import (
            PartitionedParameterCoordinator as Coordinator,
        )

        self.owner, self.real = (
            Coordinator,
            Coordinator._PartitionedParameterCoordinator__all_gather_params_,
        )

        def gather(coordinator, params, *args, **kwargs):
            self.update(p.ds_id for p in params)
            return self.real(coordinator, params, *args, **kwargs)

        Coordinator._PartitionedParameterCoordinator__all_gather_params_ = gather
        return self

    def __exit__(self, *_):
        self.owner._PartitionedParameterCoordinator__all_gather_params_ = self.real
