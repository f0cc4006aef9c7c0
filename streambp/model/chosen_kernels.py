"""Set the kernels that `StreamConfig.kernels` names on a model's modules.

"auto" uses Liger's kernels for tensors on an accelerator, and the modules' own code elsewhere. A
model is often patched on the host and moved afterwards, so each call checks the device of its
tensors. The result on a CPU equals "own" bit for bit. A process without an accelerator does not
search for kernels.

Only Liger's norms and MLPs, which take one tensor, are used. Experts also take routing, and retain
the model's own code: peft's adapters may wrap experts, and Liger's version was tested on no device.

"auto" accepts everything that "own" accepts. Modules with another library's forward (accelerate's
hooks, hub kernels) and compiled modules are unchanged. All modules retain their own code if Liger
is not installed, does not support the model or computes something else. The same holds if Triton
has no driver for the accelerator. `describe` then reports the reason. The rotation is bound to this
model's attention modules: their forward is the class's, with Liger's rotation among its globals.
Liger's rotation overwrites queries and keys, which may be products that `saves` names; the model's
own rotation remains in that case.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streambp.config import StreamConfig
from streambp.errors import MissingLibraryError
from streambp.foreign import home_of, is_compiled
from streambp.known_names import ACCELERATE_HOOK, LIGER, ROTARY
from streambp.model.compiled_regions import compile_regions
from streambp.model.fused_layers import (
    AttributeChange,
    Attributes,
    DeviceForward,
    InstalledKernels,
    NoKernelsError,
    RotationGlobals,
    fused_modules,
    install_kernels,
    rotation_globals,
)
from streambp.source import with_globals

HALF_FEATURES = 4  # half of a head's features in the comparison of rotations


def choose_kernels(model: nn.Module, config: StreamConfig) -> InstalledKernels:
    """Set the kernels that `config.kernels` names on the modules of a model.

    "own" changes nothing. "liger" sets Liger's Triton kernels. "compiled" compiles parts of layers
    with torch.compile. "auto" sets Liger's kernels for tensors on an accelerator, if possible.

    Args:
        model: a transformers model, or a module that contains one; changed in place.
        config: the settings.

    Returns:
        A record of the changed attributes, whose `uninstall` restores the modules.

    Raises:
        ConfigError: kernels="liger" cannot be applied.
    """
    if config.kernels == "liger":
        return install_kernels(model)
    if config.kernels == "compiled":
        return compile_regions(model)
    device = None if config.kernels == "own" else kernel_device()
    if device is None:
        return InstalledKernels()
    causal = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    if fused_modules(causal):
        return InstalledKernels()
    rotations: dict[nn.Module, Callable[..., Any]] = {}
    try:
        fused = install_kernels(
            model, functools.partial(dispatch_by_device, device.type, rotations)
        )
    except NoKernelsError as error:
        return InstalledKernels(why_own=f"{error.fault}.")
    except MissingLibraryError as error:
        return InstalledKernels(why_own=str(error))
    except Exception as error:  # Triton's import raises various errors without a driver
        return InstalledKernels(
            why_own=f"Liger cannot be imported ({type(error).__name__}: {error})."
        )
    if (reason := why_no_driver(device.type)) is not None:
        fused.uninstall()
        return InstalledKernels(why_own=reason)
    if config.products:
        return fused
    bound: list[AttributeChange] = []
    turns_alike: dict[Callable[..., Any], bool] = {}
    for module, rotation in rotations.items():
        # All names are restored here, so the comparison uses the model's own rotation.
        space = rotation_globals(module)
        if space is None:
            continue
        family_rotation = space[ROTARY]
        if family_rotation not in turns_alike:
            turns_alike[family_rotation] = rotates_halves(family_rotation)
        if turns_alike[family_rotation]:
            namespace = RotationGlobals(space, rotation, device.type)
            forward = types.MethodType(with_globals(namespace, type(module).forward), module)
            module.__dict__["forward"] = forward
            bound.append(AttributeChange(module, "forward", None, forward, False))
    return dataclasses.replace(fused, changes=(*fused.changes, *bound))


def kernel_device() -> torch.device | None:
    """Return the accelerator device of this process, for which kernels="auto" chooses kernels; None
    if the process has none."""
    return torch.accelerator.current_accelerator(check_available=True)


def why_no_driver(kind: str) -> str | None:
    """Return the reason why Triton cannot launch Liger's kernels on devices of type `kind`, such as
    "cuda"; None if Triton can."""
    try:
        driver = importlib.import_module("triton.runtime").driver.active
        driver_kind = driver.get_active_torch_device().type
    except Exception as error:  # no driver, or no compiler for the driver
        return f"Triton has no driver here ({type(error).__name__}: {error})."
    if driver_kind == kind:
        return None
    return f"Triton's kernels run on devices of type {driver_kind!r} here, and not on {kind!r}."


def dispatch_by_device(
    kind: str, rotations: dict[nn.Module, Callable[..., Any]], attributes: Attributes
) -> set[nn.Module]:
    """Make modules with Liger's forwards run Liger's code on devices of type `kind` alone, and
    their own forward on all other devices. Called by `install_kernels`, while transformers'
    modeling modules contain Liger's functions.

    Args:
        kind: the device type on which Liger's kernels run, such as "cuda".
        rotations: filled by this function with Liger's rotary embedding function for each attention
            module that uses one.
        attributes: dict from each module of the model to its `__dict__` before Liger's forwards
            were set.

    Returns:
        The modules that must not have Liger's forward, and are restored by the caller: compiled
            modules, modules with another library's forward, and experts.
    """
    to_restore = {
        m
        for m in attributes
        if ACCELERATE_HOOK in attributes[m] or "forward" in attributes[m] or is_compiled(m)
    }
    for module in attributes:
        forward = module.__dict__.get("forward")
        if module in to_restore:
            continue
        if isinstance(forward, types.MethodType) and len(inspect.signature(forward).parameters) > 1:
            to_restore.add(module)
        elif isinstance(forward, types.MethodType):
            module.__dict__["forward"] = types.MethodType(
                DeviceForward(forward.__func__, kind), module
            )
        elif forward is None:
            rotation: Any = (rotation_globals(module) or {}).get(ROTARY)
            if home_of(rotation).partition(".")[0] == LIGER:
                rotations[module] = rotation
    return to_restore


def rotates_halves(rotation: Callable[..., Any]) -> bool:
    """True if a model's rotary embedding function rotates the same pairs of features as Liger's
    kernel. Only such a function may be replaced by Liger's. The function is called with random
    numbers, and the results are compared.

    Liger's kernel pairs the first half of a head's features with the second half. Some models pair
    neighbours, or rotate a part of the features.
    """
    generator = torch.Generator().manual_seed(0)
    # [B, H, T, D]
    q, k = (
        torch.randn(1, heads, 3, 2 * HALF_FEATURES, generator=generator, device="cpu")
        for heads in (2, 1)
    )
    angles = torch.randn(1, 3, HALF_FEATURES, generator=generator, device="cpu").repeat(
        1, 1, 2
    )  # [B, T, D]
    cos, sin = angles.cos(), angles.sin()

    def rotate_halves(x: Tensor) -> Tensor:
        return (
            x * cos[:, None]
            + torch.cat((-x[..., HALF_FEATURES:], x[..., :HALF_FEATURES]), -1) * sin[:, None]
        )

    try:
        rotated = rotation(q.clone(), k.clone(), cos, sin)
        return all(
            torch.allclose(by_ligers, rotate_halves(x), rtol=1e-5, atol=1e-6)
            for by_ligers, x in zip(rotated, (q, k), strict=True)
        )
    except Exception:  # the function needs other arguments
        return False
