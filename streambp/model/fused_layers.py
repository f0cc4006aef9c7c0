"""Set Liger's kernels on a model's norms and MLPs, and restore the modules when the patch is
removed.

Liger binds its forwards to norms and MLPs of an existing model. Liger also replaces names in
transformers' modeling modules, which every model of the process reads. The names are classes of
later models, and the rotation of queries and keys. All names of modules and classes are therefore
restored. Only attributes of this model's modules remain, and these are recorded. The rotation is
set by `chosen_kernels.py` alone, module by module.

Liger's tables decide by model family which offset a norm adds to its weight, how a norm rounds, and
which activation a gate has. A norm that rounds elsewhere (DeepSeek V4's multiplies by its weight in
float32) would silently change the model. An activation changed in the config would do the same.
Both are therefore compared with the module's own code, in plain torch on a few random numbers.
Modules that differ retain their own forward. The model's dtypes are unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streambp.errors import ConfigError, MissingLibraryError
from streambp.foreign import REGION_ATTRIBUTE, home_of, is_region
from streambp.instance_forward import InstanceForward
from streambp.known_names import (
    ACTIVATIONS,
    BASE_LAYER,
    LIGER,
    LIGER_OTHER_PARTS,
    LIGERS_NORM,
    LIGERS_PATCHES,
    LIGERS_ROUNDINGS,
    LIGERS_TABLE,
    MODULES_ARE_HARMLESS,
    ROTARY,
)
from streambp.libraries import require_library
from streambp.source import undecorate, written_forward

MISSING_ATTRIBUTE = object()
COMPILER_MARK_PREFIX = "_dynamo_"  # prefix of attribute names
KERNELS_REMEDY = "Leave kernels out"
TEST_SIZE = 64  # rows, and features in each row, of a norm's test input
MAX_ROUNDING_MISMATCH = (
    0.02  # fraction of bfloat16 results that may differ because sums have another order
)
# Keyed by the last part of the module name of Liger's forward.
ACTIVATION_OF: dict[str, Callable[..., Any]] = {
    "swiglu": nn.functional.silu,
    "geglu": functools.partial(nn.functional.gelu, approximate="tanh"),
}


class NoKernelsError(ConfigError):
    """Raised if Liger's kernels cannot be applied to a model.

    Args:
        fault: the reason, a sentence without its full stop.
        remedy: advice for the user, in the same form.
    """

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(f"{fault}. {remedy}.")
        self.fault = fault


@dataclasses.dataclass
class AttributeChange:
    """Record of one changed attribute in a module's `__dict__`: its values before and after.

    Attributes:
        module: the module.
        name: name of the attribute.
        old_value: the value before the change; None if the attribute did not exist.
        new_value: the value after the change.
        was_there: True if the attribute existed before the change.
    """

    module: nn.Module
    name: str
    old_value: Any
    new_value: Any
    was_there: bool


@dataclasses.dataclass(frozen=True)
class InstalledKernels:
    """Record of the module attributes that `install_kernels` or `compile_regions` changed, so that
    `uninstall` can restore them.

    Args:
        changes: the changed attributes, in the order of the changes.
        skipped_classes: names of the classes whose modules keep their own forward, because Liger's
            or the compiled forward would not compute the same.
        why_own: the reason why the setting `kernels` changed no module of the model; None: it
            changed modules, or had nothing to change.
        compiler: the `RegionCompiler` that compiles the modules' forwards; None: no forward is
            compiled.
        marks: pairs of a changed module and the result of `compilers_marks` for that module, from
            before its forward ran compiled code.
    """

    changes: tuple[AttributeChange, ...] = ()
    skipped_classes: tuple[str, ...] = ()
    why_own: str | None = None
    compiler: Any = None
    marks: tuple[tuple[nn.Module, dict[str, frozenset[str]]], ...] = ()

    def uninstall(self) -> None:
        """Restore the changed attributes. An attribute stays if other code has replaced it after
        the change."""
        for change in reversed(self.changes):
            attributes = change.module.__dict__
            if attributes.get(change.name, MISSING_ATTRIBUTE) is not change.new_value:
                continue
            if change.was_there:
                attributes[change.name] = change.old_value
            else:
                del attributes[change.name]
        for module, marks_before in self.marks:
            for name, marks in compilers_marks(module).items():
                for attribute in marks - marks_before.get(name, frozenset()):
                    delattr(module.get_parameter(name), attribute)


def compilers_marks(module: nn.Module) -> dict[str, frozenset[str]]:
    """Return, for each parameter name of a module, the names of the attributes (`_dynamo_...`) that
    torch's compiler has set on the parameter. `uninstall` compares two such results, and removes
    the attributes that were added since `patch`."""
    return {
        name: frozenset(key for key in vars(parameter) if key.startswith(COMPILER_MARK_PREFIX))
        for name, parameter in module.named_parameters()
    }


Attributes = dict[nn.Module, dict[str, Any]]  # the `__dict__` of each module
Adjust = Callable[[Attributes], AbstractSet[nn.Module]]


def install_kernels(model: nn.Module, adjust: Adjust | None = None) -> InstalledKernels:
    """Apply Liger's kernels to the norms and MLPs of a model.

    Modules whose own forward gives other results than Liger's are restored.

    Args:
        model: a transformers model, or a module that contains one; changed in place.
        adjust: function that may change modules after Liger has set its forwards, and returns
            further modules to restore. The argument is a dict from each module to its `__dict__`
            from before. transformers' modeling modules contain Liger's functions during the call,
            for example the rotary embedding. None: no function is called.

    Returns:
        A record of the changed attributes, whose `uninstall` restores the modules.

    Raises:
        ConfigError: Liger is not installed, does not support the model or its dtype, or has no
            forward with the results of a module's own. The model is unchanged then.
    """
    causal = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    apply = _function_for(causal)
    wide = next((name for name, p in model.named_parameters() if p.dtype == torch.float64), None)
    if wide is not None:
        raise NoKernelsError(
            f"Liger computes in float32 or less, and {wide} is in float64",
            f"{KERNELS_REMEDY}, or cast the model",
        )
    previous_attributes = {module: dict(module.__dict__) for module in model.modules()}
    problem: Exception | None = None
    differing: set[nn.Module] = set()
    unchanged: AbstractSet[nn.Module] = frozenset()
    unwanted = LIGER_OTHER_PARTS if adjust is None else LIGER_OTHER_PARTS[1:]
    with _restore_global_names(causal):
        try:
            apply(
                model=causal,
                **{name: False for name in unwanted if name in inspect.signature(apply).parameters},
            )
            differing = {
                module
                for module in previous_attributes
                if _differs(module, previous_attributes[module])
            }
            unchanged = unchanged if adjust is None else adjust(previous_attributes)
        except Exception as error:
            problem = error
    changes = [
        AttributeChange(
            module,
            name,
            previous_attributes[module].get(name),
            value,
            name in previous_attributes[module],
        )
        for module in previous_attributes
        for name, value in module.__dict__.items()
        if previous_attributes[module].get(name, MISSING_ATTRIBUTE) is not value
    ]
    undone = differing | unchanged
    fused = InstalledKernels(
        tuple(change for change in changes if change.module not in undone),
        tuple(sorted({type(module).__name__ for module in differing - unchanged})),
    )
    InstalledKernels(tuple(change for change in changes if change.module in undone)).uninstall()
    if problem is not None or not any(change.name == "forward" for change in fused.changes):
        fused.uninstall()
        if problem:
            reason = f"{type(problem).__name__}: {problem}"
        else:
            reason = "it changes nothing of a model that is there already"
        if fused.skipped_classes and not problem:
            reason = f"it computes otherwise than {', '.join(fused.skipped_classes)}"
        else:
            reason = reason
        raise NoKernelsError(
            f"Liger could not be applied to this {type(causal).__name__}: {reason}",
            f"{KERNELS_REMEDY}, or apply Liger before the model is made",
        ) from problem
    return fused


def _differs(module: nn.Module, attributes: dict[str, Any]) -> bool:
    """True if the forward that Liger bound to a module computes something else than the module's
    own forward.

    Examples are a norm that rounds at another point, and an MLP with another activation. The result
    is also True for peft's wrapper around a module, if Liger set the forward on the wrapper.

    Args:
        module: the module with Liger's forward.
        attributes: the module's attributes before the change.
    """
    forward: Any = module.__dict__.get("forward")
    if (
        forward is attributes.get("forward")
        or home_of(type(module).forward).partition(".")[0] == LIGER
    ):
        return False
    if isinstance(getattr(module, BASE_LAYER, None), nn.Module):
        return True
    if not hasattr(module, LIGERS_NORM[-1]):  # no norm
        expected = ACTIVATION_OF.get(home_of(forward.__func__).rpartition(".")[2])
        activation = next(
            (getattr(module, name) for name in ACTIVATIONS if hasattr(module, name)), None
        )
        if expected is None:
            return False
        if activation is None:  # a block of experts under a dense model's type; a gated MLP has one
            return True
        x = torch.linspace(-4.0, 4.0, TEST_SIZE, device="cpu")
        return not torch.allclose(activation(x), expected(x), rtol=1e-5, atol=1e-6)
    # Rounding at another point changes a fourth of the bfloat16 values.
    eps, offset, rounding = (getattr(module, name) for name in LIGERS_NORM)
    generator = torch.Generator().manual_seed(0)
    x, weights = (
        torch.randn(TEST_SIZE, TEST_SIZE, generator=generator, device="cpu").bfloat16()
        for _ in range(2)
    )
    twin = object.__new__(type(module))
    parameters = {
        name: None if value is None else nn.Parameter(weights[0])
        for name, value in module._parameters.items()
    }
    twin.__dict__.update(attributes, _parameters=parameters)
    with torch.no_grad():
        rounded = type(module).forward(twin, x)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if rounding == LIGERS_ROUNDINGS[0]:
        normed = normed.bfloat16().float()
    if any(value is not None for value in parameters.values()):
        weight = weights[0].float()
    else:
        weight = 1.0 - offset
    computed = (normed * (offset + weight)).bfloat16()
    rounds_alike = rounding in LIGERS_ROUNDINGS and rounded.dtype == computed.dtype
    return not rounds_alike or bool((computed != rounded).float().mean() > MAX_ROUNDING_MISMATCH)


@dataclasses.dataclass(eq=False)
class DeviceForward:
    """Forward of a module that runs Liger's code for tensors on one type of device, and the forward
    of the module's class in all other cases.

    The device is checked in each call, because the model may be moved, cast or run on meta tensors
    after `patch`. The class's forward also runs for float64.

    Args:
        fused: Liger's forward of (module, x [..., h]).
        kind: the device type, such as "cuda".
    """

    __name__ = "forward"  # pickle stores a bound method as the module's attribute of this name

    fused: Callable[..., Any]
    kind: str

    def __call__(self, module: nn.Module, /, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = self.fused if supports_input(x, self.kind) else type(module).forward
        return forward(module, x, *args, **kwargs)


class RotationGlobals(dict[str, Any]):
    """Dict of global variables for a copy of an attention module's forward, with Liger's function
    in place of `apply_rotary_pos_emb`.

    All other names are looked up in the modeling file's current globals.

    Args:
        namespace: the modeling file's globals.
        fused: Liger's rotary embedding of q [B, H, T, D], k [B, H_kv, T, D], cos and sin [B, T, D].
        kind: the device type on which Liger's function runs.
    """

    home = LIGER

    def __init__(self, namespace: dict[str, Any], fused: Callable[..., Any], kind: str) -> None:
        super().__init__({"__name__": namespace["__name__"], ROTARY: self.apply_rotary})
        self.around = namespace
        self.modeling_function = namespace[ROTARY]
        self.fused = fused
        self.kind = kind

    def __missing__(self, name: str) -> Any:
        return self.around[name]

    def apply_rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Return q and k with rotary embeddings applied, by Liger's function if it supports the
        call, and otherwise by the modeling file's function.

        If another library has replaced the modeling file's function since `patch`, the replacement
        runs for every call.

        Args:
            q: [B, H, T, D].
            k: [B, H_kv, T, D].
            cos: [B, T, D].
            sin: [B, T, D].
            args, kwargs: further arguments of the modeling file's function.
        """
        current = self.around[ROTARY]
        plain = (
            current is self.modeling_function
            and not args
            and not kwargs
            and cos.dim() == 3
            and cos.shape[-1] == q.shape[-1]
        )
        return (self.fused if plain and supports_input(q, self.kind) else current)(
            q, k, cos, sin, *args, **kwargs
        )


def rotation_globals(module: nn.Module) -> dict[str, Any] | None:
    """Return the globals of the forward of a module's class if that forward calls
    `apply_rotary_pos_emb`, so that this function can be replaced for the module; None for other
    modules."""
    forward = written_forward(module)
    if not isinstance(forward, types.FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    return forward.__globals__ if ROTARY in forward.__globals__ else None


def supports_input(x: Tensor, kind: str) -> bool:
    """True if Liger's kernels can compute x [..., h]: x is on a device of type `kind`, and its
    dtype is supported. Otherwise the module's own forward runs."""
    return x.device.type == kind and x.dtype != torch.float64


def fused_modules(layer: nn.Module) -> dict[str, list[str]]:
    """Return the modules of a layer whose forward another library or the compiler has replaced: a
    dict from the library's name to the modules' names. `streambp.describe` reports the modules.

    Liger's forwards are found on the class and on the instance. Forwards of other libraries, such
    as hub kernels, are found on the instance alone. Liger's rotary embedding is included, even if
    other code set it for all models of a family. The key `REGION_ATTRIBUTE` has the modules whose
    forwards `patch` compiles.
    """
    by_library: dict[str, list[str]] = {}
    turning: set[str] = set()
    for name, module in layer.named_modules():
        forward = module.__dict__.get("forward")
        function = getattr(forward, "__func__", forward) or type(module).forward
        while isinstance(function, functools.partial | DeviceForward):
            function = function.func if isinstance(function, functools.partial) else function.fused
        home = home_of(function).partition(".")[0]
        if isinstance(
            namespace := getattr(undecorate(function), "__globals__", None), RotationGlobals
        ):
            turning.add(namespace.home)
        elif name and is_region(module):
            by_library.setdefault(REGION_ATTRIBUTE, []).append(name)
        is_instance_forward = (
            forward is not None
            and not isinstance(forward, InstanceForward)
            and home not in MODULES_ARE_HARMLESS
        )
        if name and (home == LIGER or is_instance_forward):
            by_library.setdefault(home, []).append(name)
    rotation = vars(sys.modules.get(type(layer).__module__, layer)).get(ROTARY)
    turning |= {LIGER} if home_of(rotation).partition(".")[0] == LIGER else set()
    for home in sorted(turning):
        by_library.setdefault(home, []).append("the rotation of queries and keys")
    return by_library


def _function_for(causal: PreTrainedModel) -> Callable[..., None]:
    """Return the function by which Liger applies its kernels to models like `causal`, for example
    `apply_liger_kernel_to_llama`. The function is chosen by the config's `model_type`.

    Raises:
        NoKernelsError: Liger has no function for this `model_type`, or Triton cannot be imported.
        MissingLibraryError: Liger is not installed.
    """
    try:
        with require_library(LIGER):
            table = getattr(
                importlib.import_module(f"{LIGER}.transformers.{LIGERS_PATCHES}"), LIGERS_TABLE
            )
    except MissingLibraryError:
        raise
    except (ImportError, AttributeError) as error:
        raise NoKernelsError(
            f"Liger's kernels need liger-kernel 0.8 and Triton ({type(error).__name__}: {error})",
            "Install them: pip install 'streambp-hf[liger]', or leave kernels out",
        ) from error
    kind = causal.config.model_type
    if kind not in table:
        model_types = ", ".join(sorted(table))
        raise NoKernelsError(
            f"Liger does not know {kind!r}",
            f"It knows {model_types}. {KERNELS_REMEDY} for this model",
        )
    function: Callable[..., None] = table[kind]
    return function


@contextlib.contextmanager
def _restore_global_names(causal: PreTrainedModel) -> Iterator[None]:
    """Context manager that undoes global changes of Liger at its end. Liger replaces names in
    transformers' modeling modules, and attributes of model classes, for the whole process.

    Args:
        causal: the model, whose classes are restored.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.")
    ]
    classes = {
        base for module in causal.modules() for base in type(module).__mro__ if base is not object
    }
    owners: list[Any] = [*modules, *classes]
    saved_names = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, names in zip(owners, saved_names, strict=True):
            for name, value in list(vars(owner).items()):
                if name not in names:
                    delattr(owner, name)
                elif names[name] is not value:
                    setattr(owner, name, names[name])
