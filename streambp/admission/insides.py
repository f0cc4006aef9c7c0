"""What a layer has inside that was written by others: modules, forwards and hooks that may look at where they are.

[Note: foreign insides] transformers' modules, torch's and those of adapters treat every token alike outside of attention.
Others may not: a hook that adds to positions 100 to 120, a mask over the whole sequence, a shift by 16 tokens. The few
random tokens that a layer is tried on do not show it, so that layers with such insides are tried at the call's own length
as well (`long_trial.py`). A hook that only looks on needs no such trial: one that gave nothing back and wrote to nothing
when it was watched, and whose source has no branch in which it would.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from streambp.errors import UnsupportedModelError
from streambp.fingerprint.leaves import version_of
from streambp.foreign import home_of, name_of
from streambp.instance_forward import InstanceForward
from streambp.known_names import FORWARD_HOOKS, HOOKS_ARE_HARMLESS, MODULES_ARE_HARMLESS, OPACUS
from streambp.nested import tensors_in


def foreign_parts(layer: nn.Module, previous: Callable[..., Any] | None) -> list[str]:
    """The modules and instance forwards of a layer that others wrote, by name.

    Args:
        previous: the layer's own instance forward.
    """
    found = [] if previous is None or _is_own(previous, MODULES_ARE_HARMLESS) else [_full_name(previous)]
    for module in layer.modules():
        forward = module.__dict__.get("forward") if module is not layer else None
        if forward is not None and not isinstance(forward, InstanceForward) and not _is_own(forward, MODULES_ARE_HARMLESS):
            found.append(_full_name(forward))
        if not _is_own(getattr(type(module), "forward", module), MODULES_ARE_HARMLESS):
            found.append(_full_name(getattr(type(module), "forward", module)))
        elif type(module).__module__.partition(".")[0] not in MODULES_ARE_HARMLESS:
            found.append(f"{type(module).__module__}.{type(module).__name__}")
    return list(dict.fromkeys(found))


def refuse_opacus(where: str) -> NoReturn:
    """Raises UnsupportedModelError: the hooks would see chunks, and gradients of whole batches."""
    raise UnsupportedModelError(
        f"{where} has hooks of opacus, which compute a gradient for each sample from what passes a module in one forward "
        "and one backward. A streamed layer passes in chunks, whose gradients are no sample's. Train with opacus without "
        "streambp: call streambp.unpatch(model), or leave streambp.patch out."
    )


@contextlib.contextmanager
def watched_hooks(layer: nn.Module) -> Iterator[list[str]]:
    """Within, the hooks of others inside a layer are watched; yields those that change what passes by, or may, by name."""
    changing: list[str] = []
    everywhere = torch.nn.modules.module
    tables: list[dict[int, Any]] = [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
    tables += [getattr(module, name) for module in layer.modules() if module is not layer for name in FORWARD_HOOKS]
    before = [(table, dict(table)) for table in tables if table]
    for table, hooks in before:
        for key, hook in hooks.items():
            if _is_own(hook, (OPACUS,)):
                refuse_opacus(type(layer).__name__)
            if not _is_own(hook, HOOKS_ARE_HARMLESS):
                table[key] = functools.partial(_watched, hook, changing)
                changing += [_full_name(hook)] if _may_change(hook) else []
    try:
        yield changing
    finally:
        for table, hooks in before:
            table.update({key: hook for key, hook in hooks.items() if key in table})


def _watched(hook: Callable[..., Any], changing: list[str], *args: Any, **kwargs: Any) -> Any:
    tensors = tensors_in((args[1:], kwargs), Tensor)
    before = [x.detach().clone() for x in tensors]  # versions miss what is written through `.data` or NumPy
    versions = [version_of(x) for x in tensors]  # values miss what is written to positions that are not there
    result = hook(*args, **kwargs)
    if result is not None or versions != [version_of(x) for x in tensors] or not all(map(_same, tensors, before)):
        changing.append(_full_name(hook))
    return result


def _same(x: Tensor, before: Tensor) -> bool:
    return bool(((x == before) | (x.isnan() & before.isnan())).all())


def _may_change(hook: Callable[..., Any]) -> bool:
    """Whether its source has branches, and gives something back or assigns to parts of something."""
    code = getattr(_innermost(hook), "__code__", None)
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    branches = any(("JUMP" in step.opname and "_IF_" in step.opname) or step.opname == "FOR_ITER" for step in steps)
    stores = any(step.opname == "STORE_SUBSCR" or (step.opname == "BINARY_OP" and "=" in step.argrepr) for step in steps)
    return branches and (stores or any(_gives_back(*pair) for pair in zip([None, *steps], steps, strict=False)))


def _gives_back(before: dis.Instruction | None, step: dis.Instruction) -> bool:
    if step.opname == "RETURN_CONST":
        return step.argval is not None
    nothing = before is not None and before.opname == "LOAD_CONST" and before.argval is None
    return step.opname == "RETURN_VALUE" and not nothing


def _innermost(function: Any) -> Any:
    """What a partial or a callable object runs."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__code__") else getattr(type(function), "__call__", function)  # noqa: B004


def _is_own(function: Any, homes: tuple[str, ...]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return home_of(function).partition(".")[0] in homes


def _full_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{home_of(function)}.{name_of(function)}"
