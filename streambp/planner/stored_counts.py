"""Write the counted costs of patched models' steps to files, and read them in later processes.

The first step of a patched model counts itself on tensors without data (`auto.py`), and the count
takes most of that step's time. The count depends on the model's structure and settings and on code,
but on no weight's value. A digest of all these is the name of a file, and the next process of the
same model reads this file:

    model         path, class and plain attributes of each module; shape, strides, dtype and
                  requires_grad of each parameter and buffer, and which are tied; configurations,
                  adapters' among them; hooks
    code          functions of the modules' classes and of the files that define these classes, and
                  this package's sources
    surroundings  settings of `patch`, autocast's dtype, versions of libraries, installed kernels

A digest cannot cover all code that a forward may reach. An outdated count costs memory or seconds,
but changes no number: the policy measures each step, and corrects its predictions
([Note: saves that fit]). A damaged file, or a file of another model, is ignored with one line in
the log (`read_file`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from streambp.config import StreamConfig
from streambp.distributed.engines import differentiable_input, is_partitioned
from streambp.instance_forward import (
    PATCH_ATTRIBUTE,
    REDUCE_METHOD,
    WRAPPERS_ATTRIBUTE,
    InstanceForward,
)
from streambp.known_names import (
    COMPOSABLE_STATE,
    IRRELEVANT_CONFIG_KEYS,
    KWARGS_HOOKS,
    MODULE_HOOKS,
    MODULE_TABLES,
)
from streambp.model.head_deferral import restore_heads
from streambp.offload.costs import LayerCost
from streambp.planner.layer_costs import costs_as_json, costs_from_json
from streambp.planner.profile import Method, method_as_json, method_from_json
from streambp.planner.profile_cache import code_in_use, folder, read_file, write_file
from streambp.tensors import full_shape

MAX_DEPTH = 4  # levels of containers and configurations inside an attribute
MAX_FILES = 256  # files in the folder; older ones are deleted
# attributes of modules that are described apart, or that a step changes
IGNORED_ATTRIBUTES = frozenset(
    (
        *MODULE_TABLES,
        *MODULE_HOOKS,
        KWARGS_HOOKS,
        PATCH_ATTRIBUTE,
        REDUCE_METHOD,
        WRAPPERS_ATTRIBUTE,
        "training",
    )
)
VERSIONED_LIBRARIES = frozenset(("builtins", "torch", "typing"))  # covered by a version


class StoredCount(NamedTuple):
    """Costs of a patched model's training step, as they are stored in a file: memory, FLOPs, and
    the tensors that layers may save for backward. The step ran on tensors without data, to count
    these costs.

    Attributes:
        method: the step's counted memory and FLOPs.
        factor: number by which the counted bytes are multiplied under autocast, because the step is
            counted with weights in autocast's dtype; 1 without autocast.
        casts: bytes of autocast's copies of weights; 0 without autocast.
        costs: dict from the layer's index to bytes and FLOPs of the tensors that the layer may
            save. The device in each `LayerCost` is a placeholder.
    """

    method: Method
    factor: float
    casts: float
    costs: dict[int, LayerCost]


def key_of(model: nn.Module, config: StreamConfig, cast: torch.dtype | None) -> str | None:
    """Return the name of the file that stores the counted memory and FLOPs of a model's training
    step: a digest of everything on which these costs depend. This is the model's structure, the
    settings, versions and code, and no weight's value. Return None if the model cannot be
    described.

    Args:
        model: the patched model.
        config: its settings.
        cast: dtype to which autocast casts float32 weights; None: autocast is off.
    """
    try:
        numbers: dict[int, int] = {}
        with restore_heads(model):
            modules = list(model.named_modules())
        structure = []
        kinds: dict[type, None] = {}
        for path, module in modules:
            structure.append((path, *_module(module, numbers)))
            kinds[type(module)] = None
        switches = (sys.version_info[:2], torch.backends.cuda.flash_sdp_enabled(), str(cast))
        parts = [structure, list(_code_of(kinds)), repr(config), switches, code_in_use()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    except Exception:  # a model that cannot be described is counted in each process
        return None


def read(key: str | None) -> StoredCount | None:
    """Return the memory and FLOPs of a training step that an earlier process has counted and stored
    under this key. None if the key is None, or if the file does not exist or is damaged.

    Args:
        key: result of `key_of`, by which the file is named.
    """
    if key is None:
        return None
    try:
        file = _file(key)
    except Exception:  # the user has no home, for example
        return None
    return read_file(file, functools.partial(_restore, key))


def _restore(key: str, entries: Mapping[str, Any]) -> StoredCount:
    """Return the counted memory and FLOPs of a training step from the entries of a file.

    Args:
        key: the result of `key_of` for the present model, by which the file is named.
        entries: the file's entries, as `store` makes them.

    Raises:
        ValueError: the entries have another key.
    """
    if entries["key"] != key:
        raise ValueError("it is another model's")
    costs = {}
    for position, cost in costs_from_json(entries["saves"]).items():
        costs[entries["indices"][position]] = cost
    method = method_from_json(entries["method"])
    return StoredCount(method, entries["factor"], entries["casts"], costs)


def store(key: str | None, count: StoredCount) -> None:
    """Write the counted memory and FLOPs of a training step to a file, from which later processes
    with the same model read them. The key is the file's name. Nothing is raised if the file cannot
    be written. Beyond MAX_FILES files, the oldest are deleted.

    Args:
        key: result of `key_of`; None: nothing is written.
        count: the counted memory and FLOPs.
    """
    if key is None:
        return
    with contextlib.suppress(Exception):  # the file is optional
        indices = sorted(count.costs)
        data = {
            "key": key,
            "factor": count.factor,
            "casts": count.casts,
            "method": method_as_json(count.method),
            "indices": indices,
            "saves": costs_as_json([count.costs[index] for index in indices]),
        }
        file = _file(key)
        write_file(file, data)
        files = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def _file(key: str) -> Path:
    """Return the path of the file with the costs of a training step that are stored under this key
    (a result of `key_of`)."""
    return folder().with_name("counts") / f"{key}.json"


def _module(module: nn.Module, numbers: dict[int, int]) -> Iterator[Any]:
    """Yield the class, tensors, attributes and hooks of one module as JSON types. `key_of` hashes
    these into the name of the file with a model's counted memory. Modules inside the module are
    left out.

    Args:
        module: the module.
        numbers: dict from ids of parameters to their numbers, by which tied parameters are
            recognized; changed.
    """
    yield _name(type(module))
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is None:
                continue
            number = numbers.setdefault(id(tensor), len(numbers))
            yield name, number, _tensor(tensor)
    for name, value in vars(module).items():
        is_left_out = name == "forward" and isinstance(value, InstanceForward)
        is_left_out = is_left_out or name.startswith(
            COMPOSABLE_STATE
        )  # its name differs in each process
        if name not in IGNORED_ATTRIBUTES and not is_left_out:
            yield name, describe_value(value)
    for hooks in MODULE_HOOKS:
        yield [
            describe_value(hook)
            for hook in getattr(module, hooks).values()
            if hook is not differentiable_input  # added once DeepSpeed is imported
        ]


def _tensor(tensor: Tensor) -> list[str]:
    """Return the class, shape, strides, dtype and requires_grad of a tensor [...] as texts.
    `key_of` hashes these into the name of the file with a model's counted memory. The shape of a
    parameter that ZeRO-3 has divided is the full shape."""
    if is_partitioned(tensor):
        layout = str(tuple(full_shape(tensor)))
    else:
        layout = f"{tuple(tensor.shape)} {tensor.stride()}"
    return [_name(type(tensor)), layout, str(tensor.dtype), str(tensor.requires_grad)]


def describe_value(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a value as JSON types, with equal results in each process. `key_of` hashes these into
    the name of the file with a model's counted memory. Sets are sorted; objects of unknown classes
    become the name of their class.

    Args:
        value: the value.
        depth: levels of nested containers that are described; deeper containers become the name of
            their class.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, types.MethodType):
        return _function(value.__func__, depth)
    if depth > 0:
        if isinstance(value, PreTrainedConfig) or dataclasses.is_dataclass(value):
            fields = dict(vars(value))
            for name in IRRELEVANT_CONFIG_KEYS:
                fields.pop(name, None)
            return _name(type(value)), describe_value(fields, depth - 1)
        if isinstance(value, Mapping):
            pairs = zip(map(str, value), describe_value(list(value.values()), depth), strict=True)
            return sorted(pairs, key=repr)
        inside = functools.partial(describe_value, depth=depth - 1)
        if isinstance(value, list | tuple):
            return list(map(inside, value))
        if isinstance(value, set | frozenset):
            return sorted(map(inside, value), key=repr)
    return _name(type(value))


def _name(kind: type) -> str:
    """Return the module and the qualified name of a class as text. `key_of` hashes this into the
    name of the file with a model's counted memory."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _code_of(kinds: Mapping[type, Any]) -> Iterator[Any]:
    """Yield descriptions, as JSON types, of the code of some modules' classes, and of the functions
    in the files that define these classes. `key_of` hashes these into the name of the file with a
    model's counted memory.

    Args:
        kinds: dict with the modules' classes as keys; its values are not read.
    """
    spaces: dict[str, Mapping[str, Any]] = {}
    for base in itertools.chain.from_iterable(kind.__mro__ for kind in kinds):
        if base.__module__.partition(".")[0] not in VERSIONED_LIBRARIES:
            spaces[_name(base)] = vars(base)
            spaces[base.__module__] = vars(sys.modules.get(base.__module__, types))
    for space in sorted(spaces):
        for name, value in sorted(spaces[space].items()):
            if isinstance(value, types.FunctionType):
                yield space, name, _function(value, 1)


def _function(function: Any, depth: int) -> list[Any]:
    """Return a description of a function as a list of JSON types: digests of its code and of
    functions that it wraps, and the values in defaults and closure. `key_of` hashes the list into
    the name of the file with a model's counted memory.

    Args:
        function: the function.
        depth: 0: leave out the values of defaults and closure; 1 or more: describe them.
    """
    parts: list[Any] = []
    for _ in range(MAX_DEPTH):
        code = getattr(function, "__code__", None)
        if code is not None:
            parts.append(_code(code))
        if depth > 0 and isinstance(function, types.FunctionType):
            values = [*(function.__defaults__ or ()), *_contents(function)]
            parts.append(list(map(functools.partial(describe_value, depth=0), values)))
        function = getattr(function, "__wrapped__", None)
    return parts


def _contents(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of a function's closure that are no functions. `key_of` hashes these into
    the name of the file with a model's counted memory."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            if not isinstance(cell.cell_contents, types.FunctionType):
                yield cell.cell_contents


def _code(code: types.CodeType) -> str:
    """Return a digest of a function's compiled code as hexadecimal digits. The digest does not
    depend on file name and line numbers. `key_of` hashes this into the name of the file with a
    model's counted memory."""
    digest = hashlib.sha256(code.co_code)
    for value in (*code.co_names, *code.co_varnames, *code.co_consts):
        if isinstance(value, types.CodeType):
            digest.update(_code(value).encode())
        elif isinstance(value, frozenset):
            digest.update(repr(sorted(value, key=repr)).encode())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()[:16]
