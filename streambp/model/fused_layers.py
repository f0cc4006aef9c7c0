"""Liger's kernels for a model's norms and MLPs, put on and taken off with the patch.

[Note: fused layers] Liger binds its forwards to norms and MLPs of a model that is there already. Beside that it replaces
names in transformers' modeling modules, which every model of the process reads: the classes of later models, and the
rotation of queries and keys. So the rotation is not asked for, all names of modules and classes are put back, and what
stays are attributes of this model's modules, which are written down. Liger's own tables decide what a family's norm adds
to its weight and in which dtype it computes; the model's dtypes stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from streambp.errors import ConfigError
from streambp.foreign import home_of
from streambp.known_names import LIGER, LIGERS_PATCHES, LIGERS_TABLE, NOT_OF_LAYERS

ABSENT = object()


@dataclasses.dataclass
class Replaced:
    """An attribute of a module's own, as it was before and as it was set; was_there: it had a value."""

    module: nn.Module
    name: str
    before: Any
    after: Any
    was_there: bool

    def undo(self) -> None:
        """Put it back, unless somebody has set it again since."""
        own = self.module.__dict__
        if own.get(self.name, ABSENT) is not self.after:
            return
        if self.was_there:
            own[self.name] = self.before
        else:
            del own[self.name]


def put_on(model: nn.Module) -> tuple[Replaced, ...]:
    """Liger's kernels on norms and MLPs of the model. [Note: fused layers]

    Args:
        model: a transformers model, or a module that holds one; changed in place.

    Returns:
        What was set, for `take_off`.

    Raises:
        ConfigError: Liger is not installed or does not know the model, or its kernels would compute in another dtype. The
            model is left as it was.
    """
    causal = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    apply = _function_for(causal)
    wide = next((name for name, p in model.named_parameters() if p.dtype == torch.float64), None)
    if wide is not None:
        raise ConfigError(
            f"kernels='liger' computes in float32 or less, and {wide} is in float64. Leave kernels out, or cast the model."
        )
    before = {module: dict(module.__dict__) for module in model.modules()}
    problem: Exception | None = None
    with _names_put_back(causal):
        try:
            apply(model=causal, **{name: False for name in NOT_OF_LAYERS if name in inspect.signature(apply).parameters})
        except Exception as error:
            problem = error
    replaced = tuple(
        Replaced(module, name, before[module].get(name), value, name in before[module])
        for module in before
        for name, value in module.__dict__.items()
        if before[module].get(name, ABSENT) is not value
    )
    if problem is not None or not any(change.name == "forward" for change in replaced):
        take_off(replaced)
        found = f"{type(problem).__name__}: {problem}" if problem else "it changes nothing of a model that is there already"
        raise ConfigError(
            f"kernels='liger' could not be applied to this {type(causal).__name__}: {found}. Leave kernels out, or apply "
            "Liger before the model is made."
        ) from problem
    return replaced


def take_off(replaced: tuple[Replaced, ...]) -> None:
    """Put back what `put_on` has set."""
    for change in reversed(replaced):
        change.undo()


def fused_modules(layer: nn.Module) -> list[str]:
    """Names of the modules of a layer that Liger's forwards compute, whoever has put them there."""
    return [name for name, module in layer.named_modules() if name and _is_ligers(module)]


def _is_ligers(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward") or type(module).forward
    return home_of(getattr(forward, "__func__", forward)).partition(".")[0] == LIGER


def _function_for(causal: PreTrainedModel) -> Callable[..., None]:
    """What applies Liger's kernels to such a model."""
    try:
        table = getattr(importlib.import_module(f"{LIGER}.transformers.{LIGERS_PATCHES}"), LIGERS_TABLE)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"kernels='liger' needs liger-kernel 0.8 and Triton ({type(error).__name__}: {error}). Install them with "
            "`pip install liger-kernel`, or leave kernels out."
        ) from error
    kind = causal.config.model_type
    if kind not in table:
        raise ConfigError(
            f"kernels='liger' needs a model that Liger knows, and it does not know {kind!r}. It knows "
            f"{', '.join(sorted(table))}. Leave kernels out for this model."
        )
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
