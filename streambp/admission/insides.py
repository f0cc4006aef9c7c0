"""What a layer has inside that was written by others: modules, forwards and hooks that may look at where they are.

[Note: foreign insides] transformers' modules, torch's and those of adapters treat every token alike outside of attention.
Others may not: a hook that adds to positions 100 to 120, a mask over the whole sequence, a shift by 16 tokens. The few
random tokens that a layer is tried on do not show it, so that layers with such insides are tried at the call's own length
as well (`long_trial.py`). A hook that only looks on needs no such trial: one that gave nothing back and wrote to nothing
when it was watched, and whose source has no branch in which it would.

[Note: who sees the rows] What changes which rows and positions the inside of a model sees (a packed row of shared prefixes,
a mixer that is called for one document after the other, a trial's tokens) changes what others' hooks and forwards do there:
one adds to a position, one keeps its output for the loss, one counts tokens. No trial tells what becomes of it. So one
question decides for all of them, `hooks_of_others`: hooks of libraries that are known to treat tokens alike and to keep
nothing (`known_names.HOOKS_ARE_HARMLESS`) do not count, all others do.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from streambp.errors import UnsupportedModelError
from streambp.fingerprint.hooks import short_name
from streambp.fingerprint.leaves import version_of
from streambp.foreign import full_name, home_of, package_of, trls_head
from streambp.instance_forward import InstanceForward, forwards
from streambp.known_names import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    GLOBAL_HOOKS,
    HOOKS_ARE_HARMLESS,
    MODULE_HOOKS,
    MODULES_ARE_HARMLESS,
    OPACUS,
)
from streambp.nested import tensors_in

NAMED_AT_MOST = 3  # hooks in a message


def foreign_parts(layer: nn.Module, previous: Callable[..., Any] | None = None) -> list[str]:
    """The modules and instance forwards of a layer that others wrote, by name.

    Args:
        previous: the layer's own instance forward.
    """
    found = [] if previous is None or _harmless(previous) else [full_name(previous)]
    for module in layer.modules():
        own, of_class = module.__dict__.get("forward"), getattr(type(module), "forward", module)
        if module is not layer and own is not None and not isinstance(own, InstanceForward) and not _harmless(own):
            found.append(full_name(own))
        if not _harmless(of_class):
            found.append(full_name(of_class))
        elif type(module).__module__.partition(".")[0] not in MODULES_ARE_HARMLESS:
            found.append(f"{type(module).__module__}.{type(module).__name__}")
    return list(dict.fromkeys(found))


def _harmless(forward: Any) -> bool:
    """Whether a library wrote it whose modules treat tokens alike."""
    return package_of(forward) in MODULES_ARE_HARMLESS


def refuse_opacus(where: str) -> NoReturn:
    """Raises UnsupportedModelError: the hooks would see chunks, and gradients of whole batches."""
    raise UnsupportedModelError(
        f"{where} has hooks of opacus, which compute a gradient for each sample from what passes a module in one forward "
        "and one backward. A streamed layer passes in chunks, whose gradients are no sample's. Train with opacus without "
        "streambp: call streambp.unpatch(model), or leave streambp.patch out."
    )


def hooks_of_others(module: nn.Module) -> dict[str, list[str]]:
    """Hooks on modules inside of a module, and torch's global ones, by name: the modules that each is on. Without those
    that are known to treat tokens alike and to keep nothing. [Note: who sees the rows]"""
    found: dict[str, list[str]] = {}
    everywhere = vars(torch.nn.modules.module)
    tables = [("all modules", everywhere[name]) for name in GLOBAL_HOOKS]
    for path, inner in module.named_modules():
        if inner is not module:
            own = inner.__dict__
            tables += [(path, own[name]) for name in MODULE_HOOKS if own.get(name)]
    for path, table in tables:
        for hook in table.values():
            if package_of(hook) not in HOOKS_ARE_HARMLESS:
                found.setdefault(short_name(hook), []).append(path)
    return found


def named_hooks(found: dict[str, list[str]]) -> str:
    """`hooks_of_others` in words, such as: count (probe.py:12) on layers.0.mlp and 11 other modules."""
    told = []
    for hook, paths in list(found.items())[:NAMED_AT_MOST]:
        others = len(set(paths)) - 1
        told.append(f"{hook} on {paths[0]}" + (f" and {others} other module{'s' * (others > 1)}" if others else ""))
    return ", ".join(told) + (f" and {len(found) - NAMED_AT_MOST} more" if len(found) > NAMED_AT_MOST else "")


def why_rows(module: nn.Module) -> str | None:
    """Why the inside of a backbone has to see a batch's rows as they are; None if it may see a packed row instead.
    [Note: who sees the rows]"""
    hooks = hooks_of_others(module)
    if hooks:
        return f"hooks would see another row than the batch's: {named_hooks(hooks)}"
    home = {base.__module__ for base in type(module).__mro__}  # a modeling file's modules are its model's own
    known = functools.partial(_is_known, home=home)
    for path, inner in module.named_modules():
        own = (forward for forward in forwards(inner) if not isinstance(forward, InstanceForward))
        for function in (*own, getattr(type(inner), "forward", inner), type(inner)):
            if not known(function):
                what = type(inner).__name__ if function is type(inner) else f"the forward {full_name(function)}"
                return f"{what} (in {path or 'the model'}) is another's, and would see another row than the batch's"
    return None


def others_read_rows(model: nn.Module, backbones: list[nn.Module]) -> bool:
    """Whether code of others runs between a language model's backbones and its loss, and may read all that these give, what
    they give padding among it: hooks, a head, the model's forward, a loss. The inside of a backbone is `why_rows`'.

    What stands around the model's call (its hooks, a forward in front of streambp's) sees what its caller sees.
    """
    home = {base.__module__ for backbone in backbones for base in type(backbone).__mro__}
    of_model = list(itertools.dropwhile(lambda forward: not isinstance(forward, InstanceForward), forwards(model)))
    functions = [*of_model, type(model).forward, getattr(model, "loss_function", None), nn.functional.cross_entropy]
    waiting = list(model.children())
    while waiting:
        module = waiting.pop()
        hooks = (hook for name in MODULE_HOOKS for hook in module.__dict__.get(name, {}).values())
        if any(package_of(hook) not in HOOKS_ARE_HARMLESS for hook in hooks):
            return True
        if not any(module is backbone for backbone in backbones):
            waiting += module.children()
            functions += [*forwards(module), type(module), getattr(type(module), "forward", module)]
    return not all(
        function is None or isinstance(function, InstanceForward) or _is_known(function, home) or trls_head(function)
        for function in functions
    )


def _is_known(function: Any, home: set[str]) -> bool:
    """Whether a function or class comes from one of these modules, or from libraries whose modules treat tokens alike."""
    found = function.__module__ if isinstance(function, type) else home_of(_innermost(function))
    return found in home or found.partition(".")[0] in MODULES_ARE_HARMLESS


@contextlib.contextmanager
def watched_hooks(layer: nn.Module, names: tuple[str, ...] = FORWARD_HOOKS) -> Iterator[list[str]]:
    """Within, the hooks of others inside a layer are watched; yields those that change what passes by, or may, by name.

    Args:
        names: of modules' tables: of hooks on values, or `BACKWARD_HOOKS`.
    """
    changing: list[str] = []
    everywhere = vars(torch.nn.modules.module)
    tables: list[dict[int, Any]] = [everywhere[f"_global{name}"] for name in names]
    tables += [getattr(module, name) for module in layer.modules() if module is not layer for name in names]
    before = [(table, dict(table)) for table in tables if table]
    for table, hooks in before:
        for key, hook in hooks.items():
            if package_of(hook) == OPACUS:
                refuse_opacus(type(layer).__name__)
            if package_of(hook) not in HOOKS_ARE_HARMLESS:
                table[key] = functools.partial(_watched, hook, changing)
                changing += [full_name(hook)] if _may_change(hook) else []
    try:
        yield changing
    finally:
        for table, hooks in before:
            table.update({key: hook for key, hook in hooks.items() if key in table})


def may_edit_gradients(layer: nn.Module) -> bool:
    """Whether a backward hook of others inside a layer gives something back, by its source."""
    hooks = (h for m in layer.modules() if m is not layer for name in BACKWARD_HOOKS for h in getattr(m, name).values())
    codes = (getattr(_innermost(h), "__code__", None) for h in hooks if package_of(h) not in HOOKS_ARE_HARMLESS)
    return any(code is None or _gives_back(code) for code in codes)


def _watched(hook: Callable[..., Any], changing: list[str], /, *args: Any, **kwargs: Any) -> Any:
    tensors = tensors_in((args[1:], kwargs), Tensor)
    before = [x.detach().clone() for x in tensors]  # versions miss what is written through `.data` or NumPy
    versions = [version_of(x) for x in tensors]  # values miss what is written to positions that are not there
    result = hook(*args, **kwargs)
    same = result is None and versions == [version_of(x) for x in tensors]
    pairs = zip(tensors, before, strict=True)
    if not same or not all(bool(((x == old) | (x.isnan() & old.isnan())).all()) for x, old in pairs):
        changing.append(full_name(hook))
    return result


def _may_change(hook: Callable[..., Any]) -> bool:
    """Whether its source has branches, and gives something back or assigns to parts of something."""
    code = getattr(_innermost(hook), "__code__", None)
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    branches = any(("JUMP" in step.opname and "_IF_" in step.opname) or step.opname == "FOR_ITER" for step in steps)
    stores = any(step.opname == "STORE_SUBSCR" or (step.opname == "BINARY_OP" and "=" in step.argrepr) for step in steps)
    return branches and (stores or _gives_back(code))


def _gives_back(code: CodeType) -> bool:
    """Whether it returns something else than None somewhere."""
    nothing = False  # the step before loads None
    for step in dis.get_instructions(code):
        if (step.opname == "RETURN_CONST" and step.argval is not None) or (step.opname == "RETURN_VALUE" and not nothing):
            return True
        nothing = step.opname == "LOAD_CONST" and step.argval is None
    return False


def _innermost(function: Any) -> Any:
    """What a partial or a callable object runs."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__code__") else getattr(type(function), "__call__", function)  # noqa: B004
