"""Under what engine a model trains: read off the modules that are called and their parameters, not
off what was asked for. And whether adapted Linears are one operation there.

python -m tests.distributed.watch SCRIPT ARGUMENT...     runs a script, and prints it at the end
"""

from __future__ import annotations

import contextlib
import runpy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from streambp.known_names import FSDP_GROUPS, FSDP_PARAMETERS
from streambp.layer import adapted_linear

TRAINED_PREFIX = "TRAINED UNDER"


def tell(engines):
    """Print them in a single write: ranks share one stream."""
    sys.stdout.write(f"{TRAINED_PREFIX} {engines}\n")
    sys.stdout.flush()


def _shards(module):
    """The parameters of FSDP2's units in a module, each once: several modules may be one unit."""
    states = {
        id(unit): unit
        for m in module.modules()
        if isinstance(m, FSDPModule)
        for unit in [m._get_fsdp_state()]
    }
    groups = [
        getattr(s, FSDP_GROUPS[0], None) or [getattr(s, FSDP_GROUPS[1], None)]
        for s in states.values()
    ]
    return [
        p.sharded_param
        for unit_groups in groups
        for group in unit_groups
        for p in getattr(group, FSDP_PARAMETERS, ())
    ]


def engine_of(module):
    """What a module is, if it is an engine over several ranks: "ddp", "fsdp2" or "zero-STAGE"; else
    None."""
    if isinstance(module, DistributedDataParallel):
        return "ddp" if dist.get_world_size(module.process_group) > 1 else None
    if isinstance(module, FSDPModule):
        # a forward without a backward leaves the outermost unit's parameters gathered
        shards = _shards(module)
        sharded = all(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in shards)
        return "fsdp2" if sharded and len(shards) == len(list(module.parameters())) else None
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None or not isinstance(module, deepspeed.DeepSpeedEngine):
        return None
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    stage, parameters = module.zero_optimization_stage(), list(module.module.parameters())
    ranks = dist.get_world_size(module.data_parallel_group)
    over_ranks = isinstance(module.optimizer, ZeROOptimizer) and ranks > 1
    # Rounded up: a value head's bias is one number, on every rank.
    is_sharded = [
        hasattr(p, "ds_id") and p.ds_tensor.numel() == -(-p.ds_numel // ranks) for p in parameters
    ]
    if not over_ranks or any(is_sharded) != (stage == 3) or all(is_sharded) != (stage == 3):
        return None
    return f"zero-{stage}"


@contextlib.contextmanager
def engines_seen():
    """A set that fills with the engine of every forward that trains; "none" for a model that is
    called without one. Without hooks: a model that has others' does not share prefixes."""
    engines, within, real = set(), [], nn.Module.__call__

    def call(module, *args, **kwargs):
        engine = None if within or not torch.is_grad_enabled() else engine_of(module)
        outermost = (
            not within
            and torch.is_grad_enabled()
            and bool(engine or isinstance(module, PreTrainedModel))
        )
        if not outermost:
            return real(module, *args, **kwargs)
        engines.add(engine or "none")
        within.append(module)
        try:
            return real(module, *args, **kwargs)
        finally:
            within.pop()

    nn.Module.__call__ = call
    try:
        yield engines
    finally:
        nn.Module.__call__ = real


@contextlib.contextmanager
def operations_seen():
    """A list that fills with the input shapes of adapted Linears that are computed as one
    operation."""
    shapes, real = [], adapted_linear._forward

    def forward(ctx, work, x, *arguments):
        shapes.append(tuple(x.shape))
        return real(ctx, work, x, *arguments)

    adapted_linear._forward = forward
    try:
        yield shapes
    finally:
        adapted_linear._forward = real


def main():
    del sys.argv[0]
    with engines_seen() as engines:
        runpy.run_path(sys.argv[0], run_name="__main__")
    tell(" ".join(sorted(engines)))


if __name__ == "__main__":
    main()
