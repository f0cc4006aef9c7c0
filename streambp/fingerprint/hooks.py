"""Describe the hooks inside a layer, and find the hooks that modify values.

A hook that modifies a value must be the same in forward and in backward's recomputation. A hook
that only reads values may be added and removed freely. A running hook counts as modifying if it
returns other values or changes the version of a tensor argument. The values themselves are compared
for hooks that could write without changing a version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from streambp.device import has_data
from streambp.distributed.engines import belongs_to_engine
from streambp.fingerprint.observed_values import leaves, name_of, version_of
from streambp.known_names import ALORA_OFFSETS, MODULE_HOOKS, PEFT_FORWARD_ARGUMENTS, UNSEEN_WRITES
from streambp.tensors import tensors_in

# module name in the layer, kind of hook, hook name, number among equal ones
HookKey = tuple[str, str, str, int]
HOOK_KINDS = dict(
    zip(
        MODULE_HOOKS,
        ("forward hook", "forward pre-hook", "backward hook", "backward pre-hook"),
        strict=True,
    )
)


@dataclasses.dataclass(eq=False)
class HookSnapshot:
    """Snapshot of the module hooks inside a layer. Hooks of DeepSpeed and accelerate are left out.

    A hook's key is (module name in the layer, kind such as "forward hook", hook name, number among
    hooks of equal module, kind and name).

    Attributes:
        ids: the numbers under which torch registered the hooks. Other numbers show that hooks were
            added or removed.
        exact: dict from (hook's key, name of a value) to each value in the hook's code and closure.
            The hook acts the same in forward and backward if these values are equal.
        kind: classes and other properties of the same values, without numbers and identities. Test
            results (if the layer can run in chunks) hold for later snapshots with an equal `kind`.
        locations: dict from a hook's key to its hook dict and its registration number in this dict.
        routing: pairs of a module and a hook that peft registers on the module for a single
            forward, to pass an argument. `exact`, `kind` and `locations` leave these hooks out.
    """

    ids: list[int]
    exact: dict[tuple[HookKey, str], Any] = dataclasses.field(default_factory=dict)
    kind: tuple[Any, ...] = ()
    locations: dict[HookKey, tuple[dict[int, Any], int]] = dataclasses.field(default_factory=dict)
    routing: list[tuple[nn.Module, Callable[..., Any]]] = dataclasses.field(default_factory=list)

    def why_whole(self) -> str | None:
        """Return the reason, as text for `describe`, to run the layer on all tokens at once; None
        if the hooks allow chunks. The reason is a peft hook that passes an argument to modules.

        aLoRA's offsets are such an argument, and count tokens from the end of the full sequence.
        Every argument is a reason in grad mode: peft removes the hooks after the forward, and
        backward would recompute the chunks without these hooks.
        """
        names = {name for _, hook in self.routing for name in hook.keywords}  # type: ignore[attr-defined]
        if ALORA_OFFSETS in names:
            return (
                f"peft hands {ALORA_OFFSETS} to its modules, which count tokens from the end of "
                "the sequence"
            )
        if names and torch.is_grad_enabled():
            return (
                f"peft hands {', '.join(sorted(names))} to its modules by hooks that are there for "
                "the forward alone"
            )
        return None

    def differences(
        self,
        previous: HookSnapshot,
        modifying_hooks: AbstractSet[HookKey],
        ignored: set[tuple[HookKey, str]],
    ) -> list[str]:
        """Compare the hooks with an earlier snapshot, and return a text for an error message for
        each change. Compared are backward hooks and the forward hooks that modify values. All other
        forward hooks cannot change the layer's result.

        Args:
            previous: the hooks in the earlier snapshot.
            modifying_hooks: keys of the forward hooks that modified values in the layer's forward.
            ignored: (hook's key, name) of the values in hooks that the layer's own forward changes;
                left out.
        """
        texts = []
        for (key, leaf), exact in previous.exact.items():
            if (key not in modifying_hooks and "backward" not in key[1]) or (
                key,
                base_of(leaf),
            ) in ignored:
                continue
            if key not in self.locations:
                texts.append(f"{describe_hook(key)} is gone")
            elif (key, leaf) not in self.exact:
                texts.append(f"{describe_hook(key)}: {leaf or 'its code'} is gone")
            elif self.exact[key, leaf] != exact:
                value = self.exact[key, leaf]
                repr_is_equal = repr(value) == repr(exact)
                texts.append(
                    f"{describe_hook(key)}: {leaf} "
                    + ("is another" if repr_is_equal else f"was {exact!r} and is {value!r}")
                )
        return list(dict.fromkeys(texts))


def short_name(hook: Any) -> str:
    """Return a hook's name for messages: its function, with file and line, such as "double
    (model.py:12)"."""
    hook = getattr(hook, "func", hook)
    code = getattr(hook, "__code__", None)
    name = name_of(hook).rpartition(".")[2]
    if code is None:
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def base_of(leaf: str) -> str:
    """Return the name of a container from the name of one of its entries: "cache" for "cache[3]". A
    name without index is returned unchanged. If a layer's own forward changes an entry, comparisons
    of hooks ignore the container.

    Args:
        leaf: name of a value in a hook: a variable in the hook's closure, or an entry of this
            variable.
    """
    return leaf.partition("[")[0]


def describe_hook(key: HookKey) -> str:
    """Return a hook's description for messages, such as "the forward hook double (model.py:12) of
    self_attn".

    Args:
        key: (module name in the layer, kind of hook, hook name, number among equal ones).
    """
    path, sort, name, number = key
    return f"the {sort} {name}" + (f" ({number + 1})" if number else "") + f" of {path}"


def hooks_of(
    tables: list[dict[int, Any]],
    modules: dict[str, nn.Module],
    ignored: set[tuple[HookKey, str]],
    latest: HookSnapshot | None,
) -> HookSnapshot:
    """Return a snapshot of the hooks on the modules inside a layer; the object `latest` itself if
    no hook has changed.

    Args:
        tables: the hook dicts of each inner module, in the order of `MODULE_HOOKS`.
        modules: the layer's modules by name, the layer first.
        ignored: (hook's key, name) of the values in hooks that the layer's own forward changes;
            left out of the snapshot.
        latest: the hooks of the previous snapshot; None: there is no previous snapshot.
    """
    if not any(tables):
        return latest if latest is not None and not latest.ids else HookSnapshot([])
    ids = [number for table in filter(None, tables) for number in table]
    if latest is not None and latest.ids == ids and not latest.locations:
        return latest
    snapshot = HookSnapshot(ids)
    paths = list(modules)
    kinds = []
    for index, table in enumerate(tables):
        for number, hook in table.items():
            if belongs_to_engine(hook):
                continue
            path, sort = (
                paths[1 + index // len(MODULE_HOOKS)],
                HOOK_KINDS[MODULE_HOOKS[index % len(MODULE_HOOKS)]],
            )
            peft = isinstance(hook, functools.partial) and getattr(
                hook.func, "__module__", ""
            ).startswith("peft.")
            if peft and any(keyword in PEFT_FORWARD_ARGUMENTS for keyword in hook.keywords):
                snapshot.routing.append((modules[path], hook))
                continue
            name = short_name(hook)
            number_of_namesakes = sum(key[:3] == (path, sort, name) for key in snapshot.locations)
            key = (path, sort, name, number_of_namesakes)
            snapshot.locations[key] = (table, number)
            for leaf in leaves(hook, ""):
                if (key, base_of(leaf.name)) not in ignored:
                    snapshot.exact[key, leaf.name] = leaf.exact
                    kinds.append((*key, leaf.name, leaf.kind))
    snapshot.kind = tuple(map(repr, kinds))
    if (
        latest is not None
        and latest.ids == ids
        and latest.exact == snapshot.exact
        and not snapshot.routing
    ):
        return latest
    return snapshot


@contextlib.contextmanager
def watch_hooks(hooks: HookSnapshot) -> Iterator[set[HookKey]]:
    """Context manager that finds the forward hooks and forward pre-hooks that modify values. Yields
    a set, which is empty at first. The key of each hook that modifies its inputs or outputs is
    added when the hook runs.

    Args:
        hooks: snapshot of the hooks to watch, which defines their keys: (module name, kind, hook
            name, number).
    """
    modifying_hooks: set[HookKey] = set()
    watched = []
    for key, (table, number) in hooks.locations.items():
        if number in table and "forward" in key[1]:
            hook = table[number]
            table[number] = _WatchedHook(key, hook, modifying_hooks)
            watched.append((table, number, hook))
    try:
        yield modifying_hooks
    finally:
        for table, number, hook in watched:
            if isinstance(table.get(number), _WatchedHook):  # the hook may have removed itself
                table[number] = hook


class _WatchedHook:
    """Wrapper of a forward hook, which adds the hook's key to the set `modifying_hooks` once the
    hook modifies a value."""

    def __init__(
        self, key: HookKey, hook: Callable[..., Any], modifying_hooks: set[HookKey]
    ) -> None:
        self.key, self.hook, self.modifying_hooks = key, hook, modifying_hooks
        code = getattr(getattr(hook, "func", hook), "__code__", None)
        self.unseen = code is not None and bool(UNSEEN_WRITES & set(code.co_names))

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        if self.key in self.modifying_hooks:
            return self.hook(module, *arguments)
        tensors = tensors_in(arguments, Tensor)
        versions = [version_of(x) for x in tensors]
        copies = [x.detach().clone() for x in tensors] if self.unseen else []
        result = self.hook(module, *arguments)
        acts = versions != [version_of(x) for x in tensors] or not all(map(_equal, tensors, copies))
        if not acts and result is not None:
            # A hook may return its own argument: it only reads, or changes the gradient alone.
            values_before = arguments[-1] if self.key[1] == "forward hook" else arguments[0]
            results, inputs = (tensors_in(values, Tensor) for values in (result, values_before))
            acts = len(results) != len(inputs) or not all(map(_equal, results, inputs))
        if acts:
            self.modifying_hooks.add(self.key)
        return result


def unwrap_hook(hook: Any) -> Any:
    """Return a hook without the wrapper that `watch_hooks` puts around hooks. A hook without this
    wrapper is returned unchanged."""
    return hook.hook if isinstance(hook, _WatchedHook) else hook


def _equal(x: Tensor, y: Tensor) -> bool:
    """True if two tensors [...] are the same object or have equal values."""
    if x is y:
        return True
    return x.shape == y.shape and x.dtype == y.dtype and has_data(x) and torch.equal(x, y)


@contextlib.contextmanager
def routing_hooks(routing: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Context manager for the recomputation of a layer in backward, in which peft's hooks of
    forward are registered again. The hooks pass arguments to modules. peft removes the hooks after
    the forward, so the recomputed modules would miss these arguments.

    Args:
        routing: pairs of a module and its hook (`HookSnapshot.routing`).
    """
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in routing]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
