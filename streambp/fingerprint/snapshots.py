"""Compare a layer with its earlier snapshots, to reuse test results and to check backward.

[Note: fingerprint] A snapshot of modules, inner hooks, parameters, buffers and attributes is taken
before a forward, at its end and before its backward. A snapshot costs one list of values, which is
compared with the previous list. Only after a difference is each value named and described
(`observed_values.py`). There are two fingerprints:

    exact   compared between a forward and its backward, which would recompute another layer; a
            difference raises and is named
    kind    decides which verdicts apply (`LayerTests.results`, `unread`): structure alone, not
            numbers, nor identities

Values that the layer's own forward changes (counters, values stored for later) belong to neither
fingerprint: the snapshot at the forward's end finds them. A hook that modifies nothing may come and
go. Answers about the layer's modules (`LayerState.cached_result`) are cached until a snapshot
differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
import random
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from streambp.errors import BackwardError
from streambp.fingerprint.attribute_reads import names_read
from streambp.fingerprint.hooks import HookKey, HookSnapshot, base_of, hooks_of
from streambp.fingerprint.observed_values import (
    ObjectIdentity,
    ObservedValue,
    contents,
    has_inner_state,
    leaves,
    name_of,
    plain_leaf,
)
from streambp.known_names import (
    ACCELERATE_FORWARD,
    ACCELERATE_HOOK,
    APPLY_METHOD,
    CHECKPOINTING_ATTRIBUTES,
    MODULE_HOOKS,
    MODULE_TABLES,
    PEFT_CHECKPOINTING,
    ZERO_COUNTERS,
)

T = TypeVar("T")
Key = tuple[str, str]  # module name in the layer, and name of its attribute, parameter or buffer
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
READ_ATTRIBUTES = ("training", *MODULE_TABLES, *MODULE_HOOKS)
# Engines and trainers change these during a step; streambp itself changes the first three.
ENGINE_ATTRIBUTES = (
    "_streambp",
    "__reduce_ex__",
    APPLY_METHOD,
    *CHECKPOINTING_ATTRIBUTES,
    PEFT_CHECKPOINTING,
    *ZERO_COUNTERS,
)
# attributes of the layer itself that run around it
FORWARD_ATTRIBUTES = ("forward", ACCELERATE_FORWARD, ACCELERATE_HOOK)
MAX_NAMED_CHANGES = 3
GET_REQUIRES_GRAD = operator.attrgetter("requires_grad")
# of a tensor: how often it was written to
GET_VERSION = Tensor._version.__get__  # type: ignore[attr-defined]
# of all modules in one go
CHAIN, GET_VALUES = (itertools.chain.from_iterable, operator.methodcaller("values"))
Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
CLASSES_KEY = "~"  # replaces a module's name in keys that concern the modules' classes


class ValueList:
    """The attributes, parameters and buffers of some modules. `read` returns all values in one flat
    list. Comparing the list with an earlier one is a fast way to see if anything changed.

    Attributes:
        modules: the modules.
        types: the modules' classes.
        dicts: the `__dict__` of each module.
        getters: functions that read the compared attributes of a module, each with the module's
            `__dict__`.
        tables: dicts whose values are compared.
        tensor_tables: dicts of tensors that are all compared.
        tensor_names: dicts of tensors, each with the names of its compared tensors.
        expected_empty: dicts that had no entries at the time of the snapshot.
        lists: containers whose elements are compared.
        live: attributes whose content may change while the attribute stays the same object, as
            (path, `__dict__`, name). The parts of such an attribute (`leaves`) are compared.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.types = list({type(module): None for module in modules})
        self.dicts = [module.__dict__ for module in modules]
        self.getters: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self.tables: list[dict[Any, Any]] = []
        self.tensor_tables: list[dict[str, Any]] = []
        self.tensor_names: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.expected_empty: list[Any] = []
        self.lists: list[Any] = []
        self.live: list[tuple[str, dict[str, Any], str]] = []

    def read(self) -> list[Any]:
        """Return the present values of the modules' attributes as one flat list, with id() in place
        of a tensor. If two lists are equal, no attribute was replaced in between, but tensors may
        have been written to in place."""
        current: list[Any] = list(map(len, self.dicts))
        extend = current.extend
        for getter, values in self.getters:
            extend(getter(values))
        # the ids of live tensors, so no other object can reuse an id
        extend(map(id, CHAIN(map(GET_VALUES, self.tensor_tables))))
        for table, names in self.tensor_names:
            extend([id(table[name]) for name in names])
        extend(CHAIN(map(GET_VALUES, self.tables)))
        extend(CHAIN(self.lists))
        extend(map(type, self.modules))
        extend(map(getattr, self.types, itertools.repeat("forward"), itertools.repeat(None)))
        current.append(any(self.expected_empty))
        for path, values, name in self.live:
            extend(leaf.exact for leaf in leaves(values[name], path))
        return current


class ModuleSnapshot:
    """Snapshot of a layer's modules with their attributes, parameters and buffers. Hooks are not
    included, because they change more often.

    Args:
        layer: the layer.
        ignored: attributes to leave out, as (module name, attribute name).

    Attributes:
        modules_by_name: the modules by name.
        values: the attributes, parameters and buffers of the modules.
        flat: `values.read()` at the snapshot.
        hooks: the hook dicts of the modules inside the layer, not a copy.
        exact: dict with an entry for each part of each attribute, parameter and buffer. The key is
            (module name, attribute name, position inside the attribute). The value is a number or
            string itself, or the identity of a tensor or object. Two snapshots have equal dicts if
            a forward would read the same values at both times.
        generators: random generators among the attributes.
        parameters: the parameters.
        tensors: tensors whose version counters are compared.
        keys: (module name, tensor name) of these tensors, in the same order.
        kind: digest of classes, flags, strings and dtypes, without numbers and identities. Test
            results (if the layer can run in chunks) hold for later snapshots with an equal `kind`.
    """

    def __init__(self, layer: nn.Module, ignored: set[Key]) -> None:
        self.modules_by_name = dict(layer.named_modules())
        self.values = ValueList(list(self.modules_by_name.values()))
        self.hooks = [d[name] for d in self.values.dicts[1:] for name in MODULE_HOOKS]
        self.exact: dict[tuple[str, str, str], Any] = {}
        self.generators: list[Generator] = []
        self.parameters: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.keys: list[Key] = []
        self._references: list[Tensor] = []
        kinds: list[Any] = []
        for path, module in self.modules_by_name.items():
            self._read(path, module, ignored, kinds)
        for cls in self.values.types:
            self._add(
                (CLASSES_KEY, ""),
                leaves(getattr(cls, "forward", None), f"{cls.__qualname__}.forward"),
                kinds,
            )
        self.kind = hashlib.blake2b(repr(kinds).encode(), digest_size=16).hexdigest()
        self.flat = self.values.read()

    @property
    def modules(self) -> list[nn.Module]:
        """Return the layer's modules."""
        return self.values.modules

    def _read(self, path: str, module: nn.Module, ignored: set[Key], kinds: list[Any]) -> None:
        """Add a module's attributes, parameters and buffers to the snapshot.

        Args:
            path: the module's name in the layer.
            module: the module.
            ignored: attributes to leave out, as (module name, attribute name).
            kinds: the list from which `kind` is computed; entries are appended.
        """
        values = self.values
        attributes = module.__dict__
        counts = [
            name
            for name in attributes
            if name not in TORCH_ATTRIBUTES
            and not name.startswith(ENGINE_ATTRIBUTES)
            and (path or name not in FORWARD_ATTRIBUTES)
            and (path, name) not in ignored
        ]
        read = [
            name for name in READ_ATTRIBUTES if name in attributes
        ]  # modules of torch.compile lack some of these
        values.getters.append((operator.itemgetter(*dict.fromkeys((*read, *counts))), attributes))
        for table in (module._parameters, module._buffers):
            compared_names = tuple(name for name in table if (path, name) not in ignored)
            if len(compared_names) < len(table):
                values.tensor_names.append((table, compared_names))
            else:
                (values.tensor_tables if table else values.expected_empty).append(table)
        (values.tables if module._modules else values.expected_empty).append(module._modules)
        self._add(
            (path, ""), [ObservedValue("", ObjectIdentity(module), name_of(type(module)))], kinds
        )
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                self._add((path, name), leaves(None, ""), kinds)
            elif (path, name) not in ignored:
                self._add(
                    (path, name),
                    [ObservedValue("", ObjectIdentity(tensor), str(tensor.dtype))],
                    kinds,
                )
                self._count_versions((path, name), tensor)
        self.parameters += [p for p in module._parameters.values() if p is not None]
        for name in counts:
            key, value = (path, name), attributes[name]
            if (plain := plain_leaf(value, "")) is not None:
                self._add(key, [plain], kinds)
                continue
            if isinstance(value, Tensor):
                self._add(
                    key,
                    [ObservedValue("", ObjectIdentity(value), ("tensor", value.requires_grad))],
                    kinds,
                )
                self._count_versions(key, value)
                continue
            self._add(key, leaves(value, ""), kinds)
            if has_inner_state(value):
                values.live.append((name, attributes, name))
            for inner in (value, *(part for _, part in contents(value) or ())):
                if isinstance(inner, Generator) and not isinstance(inner, random.SystemRandom):
                    self.generators.append(inner)
                if contents(inner) is not None:
                    (values.tables if isinstance(inner, dict) else values.lists).append(inner)

    def _count_versions(self, key: Key, tensor: Tensor) -> None:
        """Add a tensor [...] to `tensors`, whose version counters are compared in backward.
        Inference tensors have no counter and are not added."""
        self._references.append(tensor)
        if not tensor.is_inference():
            self.tensors.append(tensor)
            self.keys.append(key)

    def _add(self, key: Key, parts: Iterable[ObservedValue], kinds: list[Any]) -> None:
        """Add one attribute, parameter or buffer to the snapshot, in comparable parts: each part
        goes to `exact` with its value, and to `kinds` with its class.

        Args:
            key: (module name, attribute name).
            parts: the parts of the value, from `leaves`.
            kinds: the list from which `kind` is computed; entries are appended.
        """
        for leaf in parts:
            self.exact[(*key, leaf.name)] = leaf.exact
            kinds.append((*key, leaf.name, leaf.kind))


@dataclasses.dataclass(eq=False)
class LayerSnapshot:
    """Snapshot of a layer's modules, attributes and hooks. [Note: fingerprint]

    Attributes:
        body: the modules with their attributes, parameters and buffers.
        hooks: the hooks inside the layer.
        answers: cache for functions of the layer, such as the list of its Linears: dict from the
            function, or another key, to its result. A newer snapshot starts with an empty cache.
    """

    body: ModuleSnapshot
    hooks: HookSnapshot
    answers: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    @property
    def gradient_flags(self) -> bytes:
        """Return the parameters' current requires_grad flags, one byte each."""
        return bytes(map(GET_REQUIRES_GRAD, self.body.parameters))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return a key for results of a layer's tests, which show if the layer can run in chunks. A
        result is valid for all snapshots of the layer with the same key."""
        return self.body.kind, self.hooks.kind, self.gradient_flags


@dataclasses.dataclass
class ForwardSnapshot:
    """Snapshot of a layer at the end of a forward, to compare with the layer in backward.

    Attributes:
        layer_snapshot: the snapshot.
        versions: version counters of the snapshot's tensors.
        modifying_hooks: keys of the hooks inside the layer that modified values in the forward.
    """

    layer_snapshot: LayerSnapshot
    versions: list[int]
    modifying_hooks: AbstractSet[HookKey]


@dataclasses.dataclass(eq=False)
class Fingerprint:
    """The snapshots of one layer, which show changes between calls, and between a forward and its
    backward. [Note: fingerprint]

    A copied or pickled object is empty, because snapshots hold the modules of the original.

    Attributes:
        last: the latest snapshot.
        pending: number of forwards whose backward has not run yet.
        in_cycles: True if autograd graphs of the layer are in reference cycles, so that only
            garbage collection frees them. Backward then does not check if other code holds a graph.
        stored_paths: paths of values that third-party code inside the layer stored in a test run of
            the layer, for example "mlp.kept[3]". [Note: kept values]
    """

    last: LayerSnapshot | None = None
    pending: int = 0
    in_cycles: bool = False
    stored_paths: set[str] = dataclasses.field(default_factory=set)
    # changed by the layer's own forward
    _ignored: set[Key] = dataclasses.field(default_factory=set)
    _ignored_of_hooks: set[tuple[HookKey, str]] = dataclasses.field(default_factory=set)

    def __reduce__(self) -> Any:
        return Fingerprint, ()

    def take_snapshot(self, layer: nn.Module) -> LayerSnapshot:
        """Return a snapshot of the layer as it is now. If nothing changed since the latest snapshot
        `last`, return the object `last` itself."""
        latest = self.last
        body_is_unchanged = False
        if latest is not None:
            try:
                # identical objects are not compared by value
                body_is_unchanged = latest.body.values.read() == latest.body.flat
            except Exception:  # an attribute is gone, or a tensor replaced another value
                body_is_unchanged = False
        if (
            body_is_unchanged
            and latest is not None
            and not latest.hooks.ids
            and not any(latest.body.hooks)
        ):
            return latest
        body = (
            latest.body
            if latest is not None and body_is_unchanged
            else ModuleSnapshot(layer, self._ignored)
        )
        latest_hooks = latest.hooks if latest is not None and body_is_unchanged else None
        hooks = hooks_of(body.hooks, body.modules_by_name, self._ignored_of_hooks, latest_hooks)
        if latest is None or not body_is_unchanged or hooks is not latest.hooks:
            self.last = latest = LayerSnapshot(body, hooks)
        return latest

    def learn(
        self, layer: nn.Module, previous: LayerSnapshot, versions: list[int] | None = None
    ) -> LayerSnapshot:
        """Take a snapshot of the layer after its own forward, and return the snapshot. Values that
        the forward itself has changed, such as a counter, are ignored in all later comparisons.

        Args:
            layer: the layer.
            previous: snapshot before the forward.
            versions: version counters of the tensors in `previous` before the forward; None: the
                counters are not compared.
        """
        current = self.take_snapshot(layer)
        body_is_unchanged = current.body is previous.body
        changed_keys = (
            set()
            if body_is_unchanged
            else {key[:2] for key in _differing_keys(previous.body.exact, current.body.exact)}
        )
        if versions is not None and versions != (current_versions := versions_of(previous)):
            changed_keys |= {
                key
                for key, a, b in zip(previous.body.keys, versions, current_versions, strict=True)
                if a != b
            }
        hooks = (
            set()
            if current is previous
            else _differing_keys(previous.hooks.exact, current.hooks.exact)
        )
        if not changed_keys and not hooks:
            return current
        self._ignored |= changed_keys
        self._ignored_of_hooks |= {(key, base_of(leaf)) for key, leaf in hooks}
        self.last = None
        return self.take_snapshot(layer)

    def record_forward(
        self,
        layer: nn.Module,
        previous: LayerSnapshot,
        versions: list[int],
        modifying_hooks: AbstractSet[HookKey],
    ) -> ForwardSnapshot:
        """Return the snapshot of the layer at the end of a forward, which `check` compares with the
        layer in backward. Increase `pending`, the number of forwards whose backward has not run
        yet.

        Args:
            layer: the layer.
            previous: snapshot at the forward's start.
            versions: version counters of the tensors in `previous` at the forward's start.
            modifying_hooks: keys of the hooks inside the layer that modified values in the forward.
        """
        current = self.learn(layer, previous, versions)
        self.pending += 1
        return ForwardSnapshot(
            current, versions if current is previous else versions_of(current), modifying_hooks
        )

    def check(self, layer: nn.Module, snapshot: ForwardSnapshot, current: LayerSnapshot) -> None:
        """Raise BackwardError if the layer changed between the end of its forward and its backward.

        Args:
            layer: the layer.
            snapshot: snapshot at the end of the forward.
            current: snapshot at the start of backward.

        Raises:
            BackwardError: the layer changed; the message names the changes.
        """
        self.pending = max(0, self.pending - 1)
        texts: list[str] = []
        if current is not snapshot.layer_snapshot:
            values_in_forward, values_in_backward = (
                snapshot.layer_snapshot.body.exact,
                current.body.exact,
            )
            differing = (
                set()
                if values_in_forward is values_in_backward
                else _differing_keys(values_in_forward, values_in_backward)
            )
            differing = {
                key
                for key in differing
                if key[:2] not in self._ignored
                # classes come and go with their modules
                and (
                    key[0] != CLASSES_KEY
                    or (key in values_in_forward and key in values_in_backward)
                )
            }
            if differing:  # an attribute counts only if the layer's code may read it
                modules = [*current.body.modules, *snapshot.layer_snapshot.body.modules]
                locations = [
                    *current.hooks.locations.values(),
                    *snapshot.layer_snapshot.hooks.locations.values(),
                ]
                read = names_read(
                    modules, [table[number] for table, number in locations if number in table]
                )
                read |= {
                    name
                    for module in modules
                    for table in (module._parameters, module._buffers)
                    for name in table
                }
                differing = {
                    key
                    for key in differing
                    if not key[1] or key[0] == CLASSES_KEY or key[1] in read
                }
            texts += [
                _change_text(key, values_in_forward, values_in_backward)
                for key in sorted(differing)
            ]
            texts += current.hooks.differences(
                snapshot.layer_snapshot.hooks, snapshot.modifying_hooks, self._ignored_of_hooks
            )
        if (versions := versions_of(snapshot.layer_snapshot)) != snapshot.versions:
            for key, version_in_forward, version in zip(
                snapshot.layer_snapshot.body.keys, snapshot.versions, versions, strict=True
            ):
                if version_in_forward != version and key not in self._ignored:
                    texts.append(f"{_dotted_name(*key)} was changed in place")
        if texts:
            omitted_text = (
                f"; and {len(texts) - MAX_NAMED_CHANGES} more"
                if len(texts) > MAX_NAMED_CHANGES
                else ""
            )
            raise change_error(layer, "; ".join(texts[:MAX_NAMED_CHANGES]) + omitted_text)


def change_error(layer: nn.Module, changes: str) -> BackwardError:
    """Return the error to raise in backward for a layer that has changed since its forward.

    Args:
        layer: the layer.
        changes: the changes, for the message.
    """
    return BackwardError(
        f"{type(layer).__name__} is not in backward what it was in forward: {changes}. Backward "
        "recomputes the layer, so it would give the gradient of another model. Call backward "
        "before you change the layer: inside of the `with` block that changes it, before hooks are "
        "removed, adapters scaled or attributes set."
    )


def versions_of(snapshot: LayerSnapshot) -> list[int]:
    """Return the current version counters of the snapshot's tensors. A counter that is larger later
    shows that the tensor was written to."""
    return list(map(GET_VERSION, snapshot.body.tensors))


def _differing_keys(old: dict[Any, Any], new: dict[Any, Any]) -> set[Any]:
    """Return the keys under which two dicts have different values, and the keys that only one of
    them has."""
    no_value = object()
    pairs = ((key, old_value, new.get(key, no_value)) for key, old_value in old.items())
    return {
        key
        for key, old_value, value in pairs
        if old_value is not value and not bool(old_value == value)
    } | (new.keys() - old.keys())


def _dotted_name(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part) or "the layer"


def _change_text(key: tuple[str, str, str], old: dict[Any, Any], new: dict[Any, Any]) -> str:
    path, attribute, leaf = key
    if path == CLASSES_KEY:
        return f"{leaf} is another function"
    name = _dotted_name(path, attribute) + (
        leaf if not leaf or leaf.startswith("[") else f" ({leaf})"
    )
    if key not in new:
        return f"{name} is gone"
    if key not in old:
        return f"{name} has come"
    return f"{name} was {_value_text(old[key])} and is {_value_text(new[key], old[key])}"


def _value_text(exact: Any, previous: Any = None) -> str:
    if isinstance(exact, tuple) and len(exact) == 2 and exact[0] == "entries":
        return f"of {exact[1]} entries"
    if isinstance(exact, tuple):
        return _value_text(exact[0], previous[0] if isinstance(previous, tuple) else None)
    if (
        isinstance(exact, ObjectIdentity)
        and isinstance(previous, ObjectIdentity)
        and repr(exact) == repr(previous)
    ):
        return f"another {exact.kind}"
    return f"the function {exact.co_name}" if hasattr(exact, "co_name") else repr(exact)
