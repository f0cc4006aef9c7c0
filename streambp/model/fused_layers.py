"""Liger's kernels for a model's norms and MLPs, put on and taken off with the patch.

[Note: fused layers] Liger binds its forwards to norms and MLPs of a model that is there already. Beside that it replaces
names in transformers' modeling modules, which every model of the process reads: the classes of later models, and the
rotation of queries and keys. So all names of modules and classes are put back, and what stays are attributes of this
model's modules, which are written down. The rotation is put on by `chosen_kernels.py` alone, by module.

Liger's tables decide by family what a norm adds to its weight, where it rounds, and which activation a gate has. A norm
that rounds elsewhere (DeepSeek V4's multiplies by its weight in float32) and an activation that a config has changed would
silently be another model. So both are compared with the module's own, in plain torch on a few random numbers, and modules
that differ keep their own forward. The model's dtypes stay as they are.
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
from streambp.foreign import REGION, home_of, is_region
from streambp.instance_forward import InstanceForward
from streambp.known_names import (
    ACTIVATIONS,
    BASE_LAYER,
    LIGER,
    LIGERS_NORM,
    LIGERS_PATCHES,
    LIGERS_ROUNDINGS,
    LIGERS_TABLE,
    MODULES_ARE_HARMLESS,
    NOT_OF_LAYERS,
    ROTARY,
)
from streambp.libraries import required
from streambp.source import written, written_forward

ABSENT = object()
COMPILERS_MARKS = "_dynamo_"  # what their names begin with
LEAVE_OUT = "Leave kernels out"
TRIED = 64  # rows of as many features that a norm is tried on
BY_CHANCE = 0.02  # of their bfloat16 values, that another order of addition may round otherwise
# By the last part of the name of the module that Liger's forward stands in.
ACTIVATION_OF: dict[str, Callable[..., Any]] = {
    "swiglu": nn.functional.silu,
    "geglu": functools.partial(nn.functional.gelu, approximate="tanh"),
}


class NoKernelsError(ConfigError):
    """Liger's kernels cannot be put on. found: why."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}. {remedy}.")
        self.found = found


@dataclasses.dataclass
class Replaced:
    """An attribute of a module's own, as it was before and as it was set; was_there: it had a value."""

    module: nn.Module
    name: str
    before: Any
    after: Any
    was_there: bool


@dataclasses.dataclass(frozen=True)
class Fused:
    """What `put_on` has set.

    Args:
        left: classes of modules that keep their own forward because Liger's computes otherwise.
        why_own: why kernels="auto" or "compiled" leaves all modules of a model as they are.
        compiler: what compiles the modules' forwards; None: they are Liger's. [Note: compiled regions]
        marks: what torch's compiler had noted on the tensors of these modules before, by their names.
    """

    replaced: tuple[Replaced, ...] = ()
    left: tuple[str, ...] = ()
    why_own: str | None = None
    compiler: Any = None
    marks: tuple[tuple[nn.Module, dict[str, frozenset[str]]], ...] = ()

    def take_off(self) -> None:
        """Put back what was set, unless somebody has set it again since."""
        for change in reversed(self.replaced):
            own = change.module.__dict__
            if own.get(change.name, ABSENT) is not change.after:
                continue
            if change.was_there:
                own[change.name] = change.before
            else:
                del own[change.name]
        for module, before in self.marks:
            for name, marks in compilers_marks(module).items():
                for mark in marks - before.get(name, frozenset()):
                    delattr(module.get_parameter(name), mark)


def compilers_marks(module: nn.Module) -> dict[str, frozenset[str]]:
    """What torch's compiler has noted on a module's parameters, as attributes of theirs."""
    return {
        name: frozenset(key for key in vars(parameter) if key.startswith(COMPILERS_MARKS))
        for name, parameter in module.named_parameters()
    }


Attributes = dict[nn.Module, dict[str, Any]]  # of each module, its own
Adjust = Callable[[Attributes], AbstractSet[nn.Module]]


def put_on(model: nn.Module, adjust: Adjust | None = None) -> Fused:
    """Liger's kernels on norms and MLPs of the model. [Note: fused layers]

    Args:
        model: a transformers model, or a module that holds one; changed in place.
        adjust: is called while all names are Liger's, its rotation's too, with the attributes of each module before; may
            change what modules have, and gives those that are to have theirs again.

    Raises:
        ConfigError: Liger is not installed, does not know the model, or computes none of its modules as they do. The model
            is left as it was.
    """
    causal = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    apply = _function_for(causal)
    wide = next((name for name, p in model.named_parameters() if p.dtype == torch.float64), None)
    if wide is not None:
        raise NoKernelsError(
            f"Liger computes in float32 or less, and {wide} is in float64", f"{LEAVE_OUT}, or cast the model"
        )
    before = {module: dict(module.__dict__) for module in model.modules()}
    problem: Exception | None = None
    differing: set[nn.Module] = set()
    kept: AbstractSet[nn.Module] = frozenset()
    unwanted = NOT_OF_LAYERS if adjust is None else NOT_OF_LAYERS[1:]
    with _names_put_back(causal):
        try:
            apply(model=causal, **{name: False for name in unwanted if name in inspect.signature(apply).parameters})
            differing = {module for module in before if _differs(module, before[module])}
            kept = kept if adjust is None else adjust(before)
        except Exception as error:
            problem = error
    changes = [
        Replaced(module, name, before[module].get(name), value, name in before[module])
        for module in before
        for name, value in module.__dict__.items()
        if before[module].get(name, ABSENT) is not value
    ]
    undone = differing | kept
    fused = Fused(
        tuple(change for change in changes if change.module not in undone),
        tuple(sorted({type(module).__name__ for module in differing - kept})),
    )
    Fused(tuple(change for change in changes if change.module in undone)).take_off()
    if problem is not None or not any(change.name == "forward" for change in fused.replaced):
        fused.take_off()
        found = f"{type(problem).__name__}: {problem}" if problem else "it changes nothing of a model that is there already"
        found = f"it computes otherwise than {', '.join(fused.left)}" if fused.left and not problem else found
        raise NoKernelsError(
            f"Liger could not be applied to this {type(causal).__name__}: {found}",
            f"{LEAVE_OUT}, or apply Liger before the model is made",
        ) from problem
    return fused


def _differs(module: nn.Module, own: dict[str, Any]) -> bool:
    """Whether the forward that Liger has given a module rounds elsewhere than its own, has another activation, or is meant
    for the module inside of this one, as with peft's adapters of experts.

    Args:
        own: the module's attributes before.
    """
    forward: Any = module.__dict__.get("forward")
    if forward is own.get("forward") or home_of(type(module).forward).partition(".")[0] == LIGER:
        return False
    if isinstance(getattr(module, BASE_LAYER, None), nn.Module):
        return True
    if not hasattr(module, LIGERS_NORM[-1]):  # no norm
        expected = ACTIVATION_OF.get(home_of(forward.__func__).rpartition(".")[2])
        activation = next((getattr(module, name) for name in ACTIVATIONS if hasattr(module, name)), None)
        if expected is None:
            return False
        if activation is None:  # a gated MLP has one; a block of experts, under a dense model's type, has none
            return True
        x = torch.linspace(-4.0, 4.0, TRIED, device="cpu")
        return not torch.allclose(activation(x), expected(x), rtol=1e-5, atol=1e-6)
    # Of bfloat16 values another place of rounding changes a fourth.
    eps, offset, rounding = (getattr(module, name) for name in LIGERS_NORM)
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(TRIED, TRIED, generator=generator, device="cpu").bfloat16() for _ in range(2))
    twin = object.__new__(type(module))
    parameters = {name: None if value is None else nn.Parameter(weights[0]) for name, value in module._parameters.items()}
    twin.__dict__.update(own, _parameters=parameters)
    with torch.no_grad():
        rounded = type(module).forward(twin, x)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if rounding == LIGERS_ROUNDINGS[0]:
        normed = normed.bfloat16().float()
    weight = weights[0].float() if any(value is not None for value in parameters.values()) else 1.0 - offset
    found = (normed * (offset + weight)).bfloat16()
    known = rounding in LIGERS_ROUNDINGS and rounded.dtype == found.dtype
    return not known or bool((found != rounded).float().mean() > BY_CHANCE)


@dataclasses.dataclass(eq=False)
class OnDevice:
    """A forward that Liger has given a module: Liger's for tensors of one kind of device, the class's for all others, and
    in float64. The model may move, be cast, or be called on meta tensors after it was patched.

    Args:
        fused: Liger's, of (module, x [..., h]). kind: the device's type.
    """

    __name__ = "forward"  # a bound method is pickled as what the module has by this name

    fused: Callable[..., Any]
    kind: str

    def __call__(self, module: nn.Module, /, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = self.fused if takes(x, self.kind) else type(module).forward
        return forward(module, x, *args, **kwargs)


class WithRotation(dict[str, Any]):
    """The globals of an attention's forward in which the rotation is Liger's. All other names are looked up in the modeling
    file's globals as they are then.

    Args:
        around: these. fused: Liger's, of q [B, H, T, D], k [B, H_kv, T, D], cos and sin [B, T, D]. kind: of device.
    """

    home = LIGER

    def __init__(self, around: dict[str, Any], fused: Callable[..., Any], kind: str) -> None:
        super().__init__({"__name__": around["__name__"], ROTARY: self.turned})
        self.around = around
        self.own = around[ROTARY]
        self.fused = fused
        self.kind = kind

    def __missing__(self, name: str) -> Any:
        return self.around[name]

    def turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """q [B, H, T, D] and k [B, H_kv, T, D], turned. By the modeling file's function where that is no longer the one
        that was compared, or the call is unlike those that Liger's takes."""
        now = self.around[ROTARY]
        plain = now is self.own and not args and not kwargs and cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        return (self.fused if plain and takes(q, self.kind) else now)(q, k, cos, sin, *args, **kwargs)


def globals_that_turn(module: nn.Module) -> dict[str, Any] | None:
    """Those of a class's forward that calls the rotation by its usual name; None for other modules."""
    forward = written_forward(module)
    if not isinstance(forward, types.FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    return forward.__globals__ if ROTARY in forward.__globals__ else None


def takes(x: Tensor, kind: str) -> bool:
    """Whether kernels of that kind of device compute with x [..., h]."""
    return x.device.type == kind and x.dtype != torch.float64


def fused_modules(layer: nn.Module) -> dict[str, list[str]]:
    """Names of the modules inside a layer that forwards of another library compute, by the library, whoever has put them
    there: Liger's, on the class or the instance, and any other's on the instance, as hub kernels are. Liger's rotation,
    which is every model's of a family if others have put it on, is named with them. `REGION`: what `patch` compiles."""
    found: dict[str, list[str]] = {}
    turning: set[str] = set()
    for name, module in layer.named_modules():
        forward = module.__dict__.get("forward")
        function = getattr(forward, "__func__", forward) or type(module).forward
        while isinstance(function, functools.partial | OnDevice):
            function = function.func if isinstance(function, functools.partial) else function.fused
        home = home_of(function).partition(".")[0]
        if isinstance(around := getattr(written(function), "__globals__", None), WithRotation):
            turning.add(around.home)
        elif name and is_region(module):
            found.setdefault(REGION, []).append(name)
        others = forward is not None and not isinstance(forward, InstanceForward) and home not in MODULES_ARE_HARMLESS
        if name and (home == LIGER or others):
            found.setdefault(home, []).append(name)
    rotation = vars(sys.modules.get(type(layer).__module__, layer)).get(ROTARY)
    turning |= {LIGER} if home_of(rotation).partition(".")[0] == LIGER else set()
    for home in sorted(turning):
        found.setdefault(home, []).append("the rotation of queries and keys")
    return found


def _function_for(causal: PreTrainedModel) -> Callable[..., None]:
    """What applies Liger's kernels to such a model."""
    try:
        with required(LIGER):
            table = getattr(importlib.import_module(f"{LIGER}.transformers.{LIGERS_PATCHES}"), LIGERS_TABLE)
    except MissingLibraryError:
        raise
    except (ImportError, AttributeError) as error:
        raise NoKernelsError(
            f"Liger's kernels need liger-kernel 0.8 and Triton ({type(error).__name__}: {error})",
            "Install them: pip install 'streambp[liger]', or leave kernels out",
        ) from error
    kind = causal.config.model_type
    if kind not in table:
        known = ", ".join(sorted(table))
        raise NoKernelsError(f"Liger does not know {kind!r}", f"It knows {known}. {LEAVE_OUT} for this model")
    found: Callable[..., None] = table[kind]
    return found


@contextlib.contextmanager
def _names_put_back(causal: PreTrainedModel) -> Iterator[None]:
    """Within, names of transformers' modeling modules and of the model's classes may change; afterwards they have not."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.")]
    classes = {base for module in causal.modules() for base in type(module).__mro__ if base is not object}
    owners: list[Any] = [*modules, *classes]
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, names in zip(owners, before, strict=True):
            for name, value in list(vars(owner).items()):
                if name not in names:
                    delattr(owner, name)
                elif names[name] is not value:
                    setattr(owner, name, names[name])
