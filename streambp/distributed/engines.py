"""What engines hang on modules and parameters, and how the chunk loop treats it (DESIGN.md section 3, rules 3, 5 and 6).

One question, for all who would run a forward again, keep a graph or gather by themselves: does
an engine take part in what happens to these parameters? It is asked of the parameters, and of what `fully_shard` made of
modules. Hooks do not tell: a ZeRO-3 leaf has none on the modules inside it. It is asked anew each time, for an engine may
come after a forward.

[Note: order of gradients] ZeRO-2, and ZeRO-1 with overlap_comm, put gradients into buckets as they come, and add up the
buckets of all ranks. If they come in another order on one rank, parameters get the gradients of others without a word.
A layer that streams gives all its gradients at once, behind its backward. A layer that runs whole on one rank, because of a
mask or a hook that others have not, must do the same: its input and its parameters go through one node.

[Note: inner leaves] DeepSpeed marks the expert blocks of some families as ZeRO-3 leaves when it is initialised. The
gradients of such a block are reduced by its full-backward hook alone, which is silenced with the rest. If the layer was not
patched yet, so that it is not the leaf itself, that hook runs behind the layer's backward, when all gradients are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from streambp.distributed.zero import is_partitioned
from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import (
    DROPS_MASKS,
    ENGINES,
    FLAT_PARAMETER,
    GRADIENT_HOOKED,
    MODULE_HOOKS,
    MODULE_TABLES,
    Z3_LEAF,
)

DDP, FSDP2 = "DDP", "FSDP2"  # as errors name them


class Hold(NamedTuple):
    """What an engine does with a module's parameters.

    weights: they are on this rank only while a module runs, so that its forward is a collective: ZeRO-3, FSDP2.
    gradients: its hooks wait for the gradient of each: ZeRO-1 to -3, FSDP2. DDP's wait for each backward alone, whatever it
        was made of.
    """

    weights: bool
    gradients: bool


def engine_of(module: nn.Module) -> str | None:
    """Return the name of the engine that holds parameters in a module or waits for their gradients; None: no engine does.

    An engine around the module is seen as far as it marks parameters. DDP marks none.
    """
    modules, parameters = contents_of(module)
    if any(isinstance(inner, DistributedDataParallel) for inner in modules):
        return DDP
    if any(map(is_fsdp_unit, {type(inner): inner for inner in modules}.values())):
        return FSDP2
    return next((name for name in map(engine_of_parameter, parameters) if name is not None), None)


def engine_of_parameter(parameter: Tensor) -> str | None:
    """Return the name of the engine that has marked a parameter [...] as its own; None: no engine has."""
    if is_partitioned(parameter):
        return "DeepSpeed's ZeRO-3"
    if hasattr(parameter, GRADIENT_HOOKED):
        return "DeepSpeed's ZeRO-1 or ZeRO-2"
    if getattr(parameter, FLAT_PARAMETER, False):
        return "FSDP1"
    return FSDP2 if isinstance(parameter, DTensor) else None


def reduces_later(parameter: Tensor) -> str | None:
    """Return the name of what changes a parameter's gradient [...] after autograd has accumulated it; None: nothing does.

    FSDP2 reduces a gradient before it runs the hooks of its parameter. Every other engine reduces behind these hooks. DDP,
    pipelines and split sequences leave no mark on a parameter, so a whole parameter in a group of several ranks is taken
    for theirs.
    """
    name = engine_of_parameter(parameter)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if isinstance(parameter, DTensor):
        there = parameter.device_mesh.size()
        return None if there == ranks else f"FSDP2 over {there} of {ranks} ranks (a pipeline, or replicas beside it)"
    if name is None and ranks > 1:
        return f"DDP, a pipeline or a split sequence over a process group of {ranks} ranks"
    return name


def contents_of(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """A module with all inside it, and their parameters; each as often as it is there. In a third of the time of
    `modules()` and `parameters()`."""
    parameters_table, _, modules_table = MODULE_TABLES
    modules: list[nn.Module | None] = [module]
    parameters: list[nn.Parameter | None] = []
    for inner in modules:  # which grows
        if inner is not None:
            own = inner.__dict__
            if own[modules_table]:
                modules += own[modules_table].values()
            if own[parameters_table]:
                parameters += own[parameters_table].values()
    return [inner for inner in modules if inner is not None], [found for found in parameters if found is not None]


def held(module: nn.Module) -> Hold:
    """What an engine does with the parameters of a module and of those inside it."""
    modules, parameters = contents_of(module)
    weights = any(map(is_fsdp_unit, {type(inner): inner for inner in modules}.values())) or any(
        is_partitioned(parameter) or isinstance(parameter, DTensor) for parameter in parameters
    )
    return Hold(weights, weights or any(hasattr(parameter, GRADIENT_HOOKED) for parameter in parameters))


def engine_hooks(layer: nn.Module) -> list[dict[int, Any]]:
    """The tables of hooks of the layer's inner modules in which an engine has some."""
    tables = [getattr(module, name) for module in layer.modules() if module is not layer for name in MODULE_HOOKS]
    return [hooks for hooks in tables if any(map(belongs_to_engine, hooks.values()))]


@contextlib.contextmanager
def engine_hooks_silenced(tables: list[dict[int, Any]]) -> Iterator[None]:
    """Within, hooks that an engine hung on the layer's inner modules do not run: they would gather or reduce once a chunk.

    The layer's own hooks run around it as ever, and so do hooks of anybody else, once a chunk.

    Args:
        tables: `engine_hooks`.
    """
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for hooks in tables:
        taken.append((hooks, dict(hooks)))
        for key in [key for key, hook in hooks.items() if belongs_to_engine(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)


Reduction = tuple[nn.Module, Callable[..., Any]]


def reductions_of(layer: nn.Module) -> list[Reduction]:
    """What reduces the gradients of the layer's inner leaves. [Note: inner leaves]"""
    return [
        (module, hook)
        for module in layer.modules()
        if module is not layer and getattr(module, Z3_LEAF, False)
        for hook in module._backward_hooks.values()
        if belongs_to_engine(hook)
    ]


class Reduced(torch.autograd.Function):
    """The identity, behind whose backward a layer's inner leaves are reduced: autograd accumulates the gradients of
    parameters before it goes on to an input's own graph. [Note: inner leaves]"""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, reductions: list[Reduction]) -> Tensor:
        """hidden_states [..., B, T, h] in their own memory."""
        ctx.reductions = reductions
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient [..., B, T, h] as it came."""
        for module, hook in ctx.reductions:
            hook(module, (), ())
        return grad, None


class Together(torch.autograd.Function):
    """A layer's input [..., B, T, h] and its parameters [...] -> the same; their gradients go on together, in this
    order. [Note: order of gradients]"""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """hidden_states [..., B, T, h] and the parameters [...], in their own memory."""
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in (hidden_states, *parameters))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients as they came; zeros [...] where the engine waits for one that does not."""
        pairs = zip(grads, ctx.parameters, strict=True)
        return grad, *(zeros_for_engines(parameter) if found is None else found for found, parameter in pairs)


def drops_masks(hook: Callable[..., Any]) -> bool:
    """Whether a hook is accelerate's on attention under context parallelism: it puts None in place of the mask, of which
    torch's ring knows causal ones alone. Streamed layers attend with the model's own."""
    return getattr(hook, "__qualname__", "").startswith(f"{DROPS_MASKS}.")


def belongs_to_engine(hook: Callable[..., Any]) -> bool:
    """Whether a hook on a module is DeepSpeed's, by the package that defines the hook or its class, or drops masks."""
    owner = getattr(hook, "func", hook)
    return drops_masks(hook) or (getattr(owner, "__module__", None) or type(owner).__module__).split(".")[0] in ENGINES


def zeros_for_engines(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter [...] that the loss does not touch: None; zeros if DeepSpeed's hooks wait for it."""
    managed = is_partitioned(parameter) or hasattr(parameter, GRADIENT_HOOKED)
    return torch.zeros_like(parameter) if managed else None
