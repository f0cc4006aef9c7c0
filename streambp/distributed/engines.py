"""Marks and hooks of engines on modules and parameters (DESIGN.md section 3, rules 3, 5 and 6).

Code that repeats a forward, retains a graph or gathers parameters must first know if an engine
manages these parameters. The answer comes from marks on the parameters and from the modules that
`fully_shard` changed. Hooks are no sign: a ZeRO-3 leaf has none on its inner modules. The answer is
not cached, because an engine may be set up after a forward.

ZeRO-2, and ZeRO-1 with overlap_comm, put gradients into buckets in order of arrival, and sum the
buckets of all ranks. If the order differs on one rank, parameters silently get the gradients of
other parameters. A streamed layer delivers all its gradients together, after its backward. A layer
may run unchunked on one rank alone, because of a mask or a hook there. One autograd node then
receives the input and the parameters of that layer, and keeps the order.

DeepSpeed marks the expert blocks of some families as ZeRO-3 leaves when it is initialised. Only the
block's full-backward hook reduces its gradients, and streaming silences this hook. If the layer was
patched too late to be the leaf itself, the hook runs after the layer's backward, when all gradients
exist.

DeepSpeed gathers a module's parameters in its forward and backward hooks. Inside a streamed layer
these hooks would run once for each chunk. The layer is therefore marked as a leaf. DeepSpeed
gathers a leaf completely: once for its forward, once for its backward. A full-backward hook reduces
a leaf's gradients. The hook runs too early unless hidden_states is a positional argument that
requires a gradient. A hook before DeepSpeed's ensures this; a layer gets the hook once DeepSpeed
was imported. The mark and the hook have no effect without ZeRO-3.

[Note: what a rank decides alone] Ranks differ in their batch, their free memory and their hooks.
Each rank therefore decides alone how to compute its micro-batch, and no collective may depend on
the decision: a rank that is alone in a collective waits forever. Under DDP, ZeRO-1 and ZeRO-2 all
collectives are in backward. Each gradient has one collective, however the gradient was computed.

Under ZeRO-3 and FSDP2 each call of a unit is a collective, in forward and backward. No rank
may repeat or add a forward, unless all ranks do. docs/explanation/distributed.md
lists every decision. For split sequences, `sharded/shards.py` agrees on every value that decides an
exchange.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import (
    ENGINE_PACKAGES,
    FLAT_PARAMETER,
    FSDP_GATHERS,
    FSDP_GROUPS,
    GRADIENT_HOOKED,
    LOCAL_SHARD,
    MASK_DROPPING_HOOKS,
    MODULE_HOOKS,
    MODULE_TABLES,
    PARTITION_ID,
    Z3_LEAF,
    ZERO_GROUP,
)
from streambp.tensors import full_shape


def is_partitioned(parameter: Tensor) -> bool:
    """True if DeepSpeed's ZeRO-3 partitions this parameter [...] over ranks, also while the
    parameter is gathered."""
    return hasattr(parameter, PARTITION_ID)


def full_bytes(parameter: Tensor) -> int:
    """Return the bytes of a parameter with its full shape, even if the parameter is partitioned
    over ranks. While a layer runs, ZeRO-3 and FSDP2 gather its parameters, and the prediction of
    memory counts this size.

    Args:
        parameter: the parameter [...].
    """
    return int(math.prod(full_shape(parameter)) * parameter.itemsize)


def gradient_bytes(parameter: Tensor) -> int:
    """Return the bytes that the gradient of a parameter [...] adds to a rank's memory in a step.
    The gradient has the bytes of the parameter, or of this rank's shard under FSDP2. The prediction
    of memory uses the result.

    The result is 0 under ZeRO-3, whose buffers for gradients exist between steps as well.
    """
    if is_partitioned(parameter):
        return 0
    shard: Tensor = getattr(parameter, LOCAL_SHARD, parameter)
    return shard.nbytes


def differentiable_input(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Change the arguments of a decoder layer so that its input requires a gradient, for ZeRO-3.
    Otherwise ZeRO-3's full-backward hook of the layer would run before all gradients exist.
    Registered as a forward pre-hook of decoder layers.

    Args:
        layer: the decoder layer.
        args, kwargs: the arguments of its forward.

    Returns:
        (args, kwargs) with hidden_states as a positional argument. None, so that torch changes
        nothing, if ZeRO-3 partitions no parameter of the layer.
    """
    if ENGINE_PACKAGES[0] not in sys.modules or not any(map(is_partitioned, layer.parameters())):
        return None
    kwargs = dict(kwargs)
    hidden_states: Tensor
    if args:
        hidden_states = args[0]
    else:
        hidden_states = kwargs.pop("hidden_states")
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        hidden_states = hidden_states.detach().requires_grad_()
    return (hidden_states, *args[1:]), kwargs


DDP = "DDP"  # the names in errors
FSDP2 = "FSDP2"


class EngineOwnership(NamedTuple):
    """Two facts about the engine of a module, by which streambp decides how the module may run. An
    engine is code that owns parameters across ranks: DDP, DeepSpeed's ZeRO or FSDP2.

    Attributes:
        weights: True under ZeRO-3 and FSDP2, which gather full parameters on a rank only while a
            module runs. The module's forward is then a collective.
        gradients: True under ZeRO-1 to -3 and FSDP2, whose hooks wait for each parameter's
            gradient. False under DDP, whose hooks wait for each backward.
    """

    weights: bool
    gradients: bool


def engine_of(module: nn.Module) -> str | None:
    """Return the name, for messages, of the engine that shards a module's parameters or reduces
    their gradients: "DDP", "FSDP2", "FSDP1" or DeepSpeed's ZeRO. None if there is none.

    An engine that wraps a larger model, of which this module is a part, is found by marks on the
    parameters. DDP sets no marks, and is found only if its wrapper is the module or inside it.
    """
    modules, parameters = contents_of(module)
    if any(isinstance(inner, DistributedDataParallel) for inner in modules):
        return DDP
    if any(map(is_fsdp_unit, {type(inner): inner for inner in modules}.values())):
        return FSDP2
    for parameter in parameters:
        name = engine_of_parameter(parameter)
        if name is not None:
            return name
    return None


def engine_of_parameter(parameter: Tensor) -> str | None:
    """Return the name, for messages, of the engine that has marked a parameter [...]: FSDP1, FSDP2
    or DeepSpeed's ZeRO. None if there is no mark."""
    if is_partitioned(parameter):
        return "DeepSpeed's ZeRO-3"
    if hasattr(parameter, GRADIENT_HOOKED):
        return "DeepSpeed's ZeRO-1 or ZeRO-2"
    if getattr(parameter, FLAT_PARAMETER, False):
        return "FSDP1"
    if isinstance(parameter, DTensor):
        return FSDP2
    return None


def late_reducing_engine(parameter: Tensor) -> str | None:
    """Return the name, for messages, of the engine that reduces a parameter's gradient over ranks
    only after the parameter's post-accumulate-grad hooks have run. An optimizer step inside such a
    hook would read unreduced gradients. None if the hooks get reduced gradients.

    FSDP2 reduces before these hooks. DDP, pipelines and split sequences leave no mark on a
    parameter, so one of them is assumed for an unmarked parameter on several ranks.

    Args:
        parameter: the parameter [...], on which some engines set marks.
    """
    name = engine_of_parameter(parameter)
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    if isinstance(parameter, DTensor):
        mesh_size = parameter.device_mesh.size()
        if mesh_size == ranks:
            return None
        return f"FSDP2 over {mesh_size} of {ranks} ranks (a pipeline, or replicas beside it)"
    if name is None and ranks > 1:
        return f"DDP, a pipeline or a split sequence over a process group of {ranks} ranks"
    return name


def contents_of(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return a module with all inner modules as a list, and a second list of their parameters.
    Callers search the lists, for example for marks of engines. A module or parameter that is used
    twice appears twice. The function takes a third of the time of `module.modules()` and
    `module.parameters()`."""
    parameters_table, _, modules_table = MODULE_TABLES
    is_not_none = functools.partial(operator.is_not, None)
    modules: list[Any] = [module]
    parameters: list[Any] = []
    for inner in modules:  # the loop appends to this list
        attributes = inner.__dict__
        if attributes[modules_table]:
            modules += filter(is_not_none, attributes[modules_table].values())
        if attributes[parameters_table]:
            parameters += filter(is_not_none, attributes[parameters_table].values())
    return modules, parameters


def engine_ownership(module: nn.Module) -> EngineOwnership:
    """Return how an engine owns the parameters of a module and all inner modules, as two flags
    (`EngineOwnership`). The first is True if ZeRO-3 or FSDP2 partitions parameters. The second is
    True if ZeRO or FSDP2 waits for the gradient of each parameter."""
    modules, parameters = contents_of(module)
    one_of_each_class = dict(zip(map(type, modules), modules, strict=True))
    weights = any(map(is_fsdp_unit, one_of_each_class.values()))
    gradients = False
    for parameter in parameters:
        if hasattr(parameter, PARTITION_ID) or isinstance(parameter, DTensor):
            weights = True
        gradients = gradients or hasattr(parameter, GRADIENT_HOOKED)
    return EngineOwnership(weights, weights or gradients)


def engine_hooks(layer: nn.Module) -> list[dict[int, Any]]:
    """Return the hook dicts (such as `_forward_pre_hooks`) of modules inside a layer that contain
    hooks of DeepSpeed, or accelerate's hook for removing attention masks. The caller disables these
    hooks while the layer runs chunk by chunk."""
    tables = []
    for module in layer.modules():
        if module is not layer:
            for name in MODULE_HOOKS:
                hooks = getattr(module, name)
                if any(map(belongs_to_engine, hooks.values())):
                    tables.append(hooks)
    return tables


@contextlib.contextmanager
def silence_engine_hooks(tables: list[dict[int, Any]]) -> Iterator[None]:
    """Context manager in which the modules inside a layer have no hooks of DeepSpeed and
    accelerate. Otherwise hooks would gather or reduce once for each chunk. Hooks of other owners
    still run.

    Args:
        tables: the result of `engine_hooks`.
    """
    silenced: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for hooks in tables:
        silenced.append((hooks, dict(hooks)))
        for key in [key for key, hook in hooks.items() if belongs_to_engine(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, saved_hooks in silenced:
            hooks.clear()
            hooks.update(saved_hooks)


Reduction = tuple[nn.Module, Callable[..., Any]]


def reductions_of(layer: nn.Module) -> list[Reduction]:
    """Return pairs (module, hook) for the ZeRO-3 leaf modules inside a layer. DeepSpeed treats a
    leaf module, for example a block of experts, as one unit. The hook is DeepSpeed's full-backward
    hook, which reduces the module's gradients over ranks. `EngineReduce` calls the hooks once after
    the layer's backward."""
    reductions: list[Reduction] = []
    for module in layer.modules():
        if module is not layer and getattr(module, Z3_LEAF, False):
            for hook in module._backward_hooks.values():
                if belongs_to_engine(hook):
                    reductions.append((module, hook))
    return reductions


class EngineReduce(torch.autograd.Function):
    """Autograd Function that returns a layer's input unchanged. Backward runs after the layer's
    backward, and calls DeepSpeed's hooks that reduce the gradients of ZeRO-3 leaf modules inside
    the layer."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, reductions: list[Reduction]) -> Tensor:
        """Return a view of hidden_states [..., B, T, h], on which the layer then runs. Autograd
        therefore runs the layer's backward before this Function's `backward`. All gradients of the
        layer then exist, and `backward` calls the hooks in `reductions`.

        Args:
            hidden_states: the layer's input.
            reductions: pairs (module, hook) from `reductions_of`. The hook is DeepSpeed's, and
                reduces the gradients of the module's parameters over ranks.
        """
        ctx.reductions = reductions
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Call DeepSpeed's hooks, and return the gradient [..., B, T, h] unchanged."""
        for module, hook in ctx.reductions:
            hook(module, (), ())
        return grad, None


class JoinGradients(torch.autograd.Function):
    """Autograd Function that returns a layer's input [..., B, T, h] and parameters [...] unchanged.
    Backward returns all their gradients from one node, in the order of the arguments. DeepSpeed,
    which puts gradients into buckets as they arrive, thus gets the same order on every rank."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return views of hidden_states [..., B, T, h] and of the parameters [...]. The layer runs
        on these views, so that all their gradients arrive at one autograd node."""
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in (hidden_states, *parameters))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the incoming gradients [...] unchanged, as the gradients of hidden_states and of
        the parameters. A parameter on which the loss does not depend gets zeros if DeepSpeed waits
        for its gradient, else None.

        Args:
            grad: gradient of hidden_states [..., B, T, h]; None: there is none.
            grads: gradient of each parameter; None: there is none.
        """
        pairs = zip(grads, ctx.parameters, strict=True)
        return grad, *(
            zeros_for_engines(parameter) if gradient is None else gradient
            for gradient, parameter in pairs
        )


def drops_masks(hook: Callable[..., Any]) -> bool:
    """True if this is the hook by which accelerate replaces the attention mask by None. Under
    context parallelism, attention modules have this hook, because torch's ring attention supports
    causal masks alone. The hook is disabled in streamed layers, which use the model's own mask."""
    return getattr(hook, "__qualname__", "").startswith(f"{MASK_DROPPING_HOOKS}.")


def belongs_to_engine(hook: Callable[..., Any]) -> bool:
    """True if a hook of a module belongs to DeepSpeed, or is accelerate's hook that removes
    attention masks. streambp disables such hooks inside a layer that runs in chunks."""
    owner = getattr(hook, "func", hook)
    return (
        drops_masks(hook)
        or (getattr(owner, "__module__", None) or type(owner).__module__).split(".")[0]
        in ENGINE_PACKAGES
    )


def zeros_for_engines(parameter: Tensor) -> Tensor | None:
    """Return the gradient that a layer's backward gives a parameter [...] on which the loss does
    not depend: zeros if DeepSpeed's hooks wait for the gradient, else None."""
    managed = is_partitioned(parameter) or hasattr(parameter, GRADIENT_HOOKED)
    if managed:
        return torch.zeros_like(parameter)
    return None


def ranks_must_agree(module: nn.Module) -> bool:
    """True if the module's forward gathers parameters from several ranks (ZeRO-3, FSDP2), so that
    all ranks must call the forward equally often. One rank alone then may not decide to repeat a
    forward."""
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and engine_ownership(module).weights
    )


def gather_numbers(
    module: nn.Module, numbers: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Gather a few ints from each rank, and return the ints of every rank as a list of lists. All
    ranks can then take the same decision. The function is a collective: every rank of the group
    must call it equally often.

    The group is the one over which ZeRO-3 or FSDP2 has partitioned the module's parameters,
    otherwise all ranks.

    Args:
        module: the module whose parameters are partitioned.
        numbers: this rank's ints, equal in number on all ranks.
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
            gather_group = getattr(getattr(group, FSDP_GATHERS[0], None), FSDP_GATHERS[1], None)
            ranks = gather_group if ranks is None else ranks
    return [row.tolist() for row in all_gather(ranks, torch.tensor(numbers, device=device))]


def all_gather(group: Any, tensor: Tensor) -> list[Tensor]:
    """Return the tensor [...] of each rank in the process group; all have the same shape."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
