"""Make the allocations of fused kernels, Liger's or compiled, for RMSNorm, gated activations and
rotary embeddings.

For a plan with fused kernels, the modules of the model without data are replaced by modules that
allocate and save the same bytes as the kernels. A norm saves its input and one number for each row,
an activation both of its inputs, rotary embeddings nothing. Liger's kernels write gradients over
their inputs, and rotate in place; compiled code returns new tensors. Each kernel reads and writes a
tensor's bytes a number of times in forward and in backward: a norm 2 and 3 times, an activation 3
and 5, rotary embeddings 2 and 2. The backward of a compiled norm counts 5 times, because a separate
kernel computes the weight's gradient. `scripts/elementwise_bytes.py` compares these counts with the
kernels themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from streambp.device import has_data
from streambp.errors import ConfigError
from streambp.fields import short_repr
from streambp.known_names import GATED_MLP, LIGER, NORM_CLASS_SUFFIX, ROTARY
from streambp.planner.count import KernelReplay, one_kernel
from streambp.planner.mixers import globals_of, is_installed, replaced_functions

Fusion = Literal["liger", "compiled"]
Kernels = Literal["auto", "own", "liger", "compiled"]


def fusion(kernels: Kernels, device: str) -> Fusion | None:
    """Return the source of the fused kernels (Liger or torch.compile) that a value of
    `StreamConfig.kernels` selects on a type of device; None if the model's own code runs.

    Args:
        kernels: the value; "auto" selects Liger's on a GPU if liger-kernel is installed.
        device: type of the device.

    Raises:
        ConfigError: the value is none of `Kernels`.
    """
    if kernels == "auto":
        if device != "cpu" and is_installed(LIGER):
            return "liger"
        return None
    if kernels not in ("own", "liger", "compiled"):
        raise ConfigError(
            f"kernels is {short_repr(kernels)}; it must be one of 'auto', 'own', 'liger', "
            "'compiled'."
        )
    return None if kernels == "own" else kernels


def _norm_kernel(ctx: Any, x: Tensor, weight: Tensor, by: Fusion) -> Tensor:
    """Allocate the tensors of a fused norm's forward without computing them, to count memory.
    Return the output [..., h]. The tensors saved for backward are x [..., h] and a float32 [...]
    with a number for each row of x. `by` names the kernel's source, Liger or torch.compile."""
    with one_kernel(2 * x.nbytes):
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.weight = weight
        ctx.by = by
        return torch.empty_like(x)


def _norm_kernel_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    """Allocate the tensors of a fused norm's backward without computing them, to count memory.
    Return the gradients of the input [..., h] and of the weight [h] for the output's gradient
    `grad` [..., h]. Liger's kernel overwrites grad, so the first is grad itself."""
    (x, _) = ctx.saved_tensors
    if ctx.needs_input_grad[3]:
        d_weight = torch.empty_like(ctx.weight)
    else:
        d_weight = None
    new_tensor = ctx.by == "compiled"
    with one_kernel((5 if new_tensor and d_weight is not None else 3) * x.nbytes):
        return torch.empty_like(grad) if new_tensor else grad, d_weight, None


# x [..., h], weight [h] -> [..., h] in x's dtype.
norm_kernel = functools.partial(KernelReplay.apply, _norm_kernel, _norm_kernel_backward)


def _gate_kernel(ctx: Any, gate: Tensor, up: Tensor, by: Fusion) -> Tensor:
    """Allocate the tensors of a fused gated activation's forward without computing them, to count
    memory. Return act(gate) * up [..., m] without values, for gate and up [..., m]. Both are saved
    for backward. `by` names the kernel's source, Liger or torch.compile."""
    with one_kernel(3 * gate.nbytes):
        ctx.save_for_backward(gate, up)
        ctx.by = by
        return torch.empty_like(gate)


def _gate_kernel_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """Allocate the tensors of a fused gated activation's backward without computing them, to count
    memory. Return the gradients of gate and up for the output's gradient `grad` [..., m]. Liger's
    kernel overwrites gate and up, so the results share their storages."""
    gate, up = ctx.saved_tensors
    with one_kernel(5 * gate.nbytes):
        if ctx.by == "compiled":
            return torch.empty_like(gate), torch.empty_like(up), None
        return gate.view_as(gate), up.view_as(up), None


# gate, up [..., m] -> act(gate) * up [..., m].
gate_kernel = functools.partial(KernelReplay.apply, _gate_kernel, _gate_kernel_backward)


def _rotary_kernel(ctx: Any, q: Tensor, k: Tensor, by: Fusion) -> tuple[Tensor, Tensor]:
    """Return tensors with the shapes of q [B, H, T, D] and k [B, H_kv, T, D] after a fused kernel's
    rotary embedding. Nothing is computed, because the planner only counts the memory and the bytes
    moved. Nothing is saved for backward. `by` names the kernel's source, Liger or torch.compile."""
    ctx.traffic = 2 * (q.nbytes + k.nbytes)
    ctx.by = by
    with one_kernel(ctx.traffic):
        if by == "liger":
            return (q.view_as(q), k.view_as(k))
        return (torch.empty_like(q), torch.empty_like(k))


def _rotary_kernel_backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None]:
    """Allocate the tensors of a fused rotary embedding's backward without computing them, to count
    memory. Return the gradients of q [B, H, T, D] and k [B, H_kv, T, D] for those of the outputs,
    dq and dk. Liger's kernel overwrites dq and dk, so the results are dq and dk themselves."""
    with one_kernel(ctx.traffic):
        if ctx.by == "liger":
            return (dq, dk, None)
        return (torch.empty_like(dq), torch.empty_like(dk), None)


# q [B, H, T, D], k [B, H_kv, T, D] -> both, rotated; Liger's in place.
rotary_kernel = functools.partial(KernelReplay.apply, _rotary_kernel, _rotary_kernel_backward)


def fuse_layers(model: nn.Module, by: Fusion | None) -> int:
    """Replace the forwards of norms and gated MLPs, in a model without data, by functions that only
    allocate a fused kernel's tensors, to count memory. Return the number of replaced forwards.

    Args:
        model: the model, on meta or fake tensors.
        by: the kernels' source, Liger or torch.compile. None: replace only forwards with Liger's
            kernels that the model has already, which cannot run without data.
    """
    fusion = by or "liger"

    def norm(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Allocate the tensors of a fused norm without computing them, to count memory. Replaces
        the forward of a norm module. Return the output, which has the shape of `hidden_states`
        [..., h]."""
        return norm_kernel(hidden_states, self.weight, fusion)

    def mlp(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a gated MLP on `hidden_states` [..., h], and return the output of its last Linear.
        Replaces the MLP's forward to count memory: in place of the activation, a fused kernel's
        tensors are allocated."""
        gate, up, down = (getattr(self, name) for name in GATED_MLP[:3])
        return down(gate_kernel(gate(hidden_states), up(hidden_states), fusion))

    classes: dict[type[nn.Module], type[nn.Module]] = {}
    replacements = 0
    for module in model.modules():
        kind = type(module)
        ligers = is_ligers(module.forward)
        if by is None and not ligers:
            continue
        weights = [name for name, _ in module.named_parameters(recurse=False)]
        # gated norms have a second tensor argument
        takes_one = len(inspect.signature(kind.forward).parameters) == 2
        is_norm = kind.__name__.endswith(NORM_CLASS_SUFFIX) and weights == ["weight"] and takes_one
        if is_norm or all(hasattr(module, name) for name in GATED_MLP[: 3 if ligers else 4]):
            if ligers:
                module.__dict__.pop("forward", None)
            content = {"forward": norm if is_norm else mlp, "__module__": kind.__module__}
            classes[kind] = classes.get(kind) or type(kind.__name__, (kind,), content)
            module.__class__ = classes[kind]
            replacements += 1
    return replacements


def is_ligers(function: Any) -> bool:
    """True if a function or method is defined in a file of liger-kernel. A kernel of Liger needs
    data, so the function is replaced while memory is counted on tensors without data."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == LIGER


def fused_rotary(model: nn.Module, by: Fusion | None) -> contextlib.AbstractContextManager[None]:
    """Context manager in which `apply_rotary_pos_emb` of the model's files only allocates what a
    fused kernel allocates, if the tensors are meta or fake tensors, to count memory.

    Calls with other tensors run the original function.

    Args:
        model: the model, on meta or fake tensors.
        by: the kernels' source, Liger or torch.compile; None: replace only functions of Liger.
    """
    replacements = []
    for space in globals_of(model):
        function = space.get(ROTARY)
        if not callable(function) or (by is None and not is_ligers(function)):
            continue
        if list(inspect.signature(function).parameters)[:4] == ["q", "k", "cos", "sin"]:
            replacements.append(
                (space, ROTARY, functools.partial(_rotary, function, by or "liger"))
            )
    return replaced_functions(replacements)


def _rotary(function: Any, by: Fusion, /, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, the modeling file's rotary embedding, unless q is a meta or fake tensor:
    then allocate the tensors of a fused kernel without computing them. `by` names the kernel's
    source, Liger or torch.compile."""
    if has_data(q):
        return function(q, k, *args, **kwargs)
    return rotary_kernel(q, k, by)
