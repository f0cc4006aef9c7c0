"""Third-party code: attention functions of a model; modules, forwards and hooks inside a layer.

[Note: foreign insides] Outside of attention, modules of transformers, torch and adapter libraries
treat every token alike. Third-party code may not: a hook that adds to positions 100 to 120, a mask
over the full sequence, a shift by 16 tokens. A trial on a few random tokens does not detect this.
Layers with third-party code inside are therefore tested at the call's own length as well
(`long_trial.py`). A hook needs no such test if it only reads: in the trial it returned nothing and
wrote nothing, and its source has no branch that would.

Streaming may change the rows and positions inside a model: a packed row of shared prefixes, a mixer
that runs for one document at a time, the tokens of a trial. Hooks and forwards of third parties
then act differently: some add to a position, some store their output for the loss, some count
tokens. No trial can tell the effect. All these cases therefore ask one function,
`third_party_hooks`. Hooks of libraries in `known_names.HOOKS_ARE_HARMLESS` do not count, because
they treat tokens alike and store nothing; all other hooks count.

Streamed layers compute softmax attention themselves, with the masks that
transformers describes. transformers' own functions compute the same. A third-party function under
the same name would never be called, and another model would be trained. Such a function may be
registered, or replace transformers' function or a modeling file's eager function. A few tokens may
not show the difference: a local window is wider, a counter changes no number. Functions are
therefore identified by the module that defines them. The check runs once in each forward of a
model, because functions may be replaced at any time.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streambp.admission.float8 import why_scaled
from streambp.attention.interface import IMPLEMENTATION_NAME, own_implementation
from streambp.distributed.ulysses import find_ulysses
from streambp.errors import UnsupportedModelError
from streambp.fingerprint.hooks import short_name
from streambp.fingerprint.observed_values import version_of
from streambp.foreign import (
    compiled_submodules,
    full_name,
    home_of,
    package_of,
    strip_deprecation,
    trls_head,
)
from streambp.instance_forward import InstanceForward, forwards
from streambp.known_names import (
    ATTENTION_TABLE,
    BACKWARD_HOOKS,
    EAGER,
    EAGER_FORWARD,
    EXPERTS_IMPLEMENTATION,
    EXPERTS_INTEGRATION,
    EXPERTS_TABLE,
    FLASH_FORWARD,
    FORWARD_HOOKS,
    GLOBAL_HOOKS,
    HOOKS_ARE_HARMLESS,
    HUB_KERNEL,
    MASKING_MODULE,
    MODULE_HOOKS,
    MODULES_ARE_HARMLESS,
    OPACUS,
    SOFTMAX_FUNCTIONS,
    VERLS_SIZE,
)
from streambp.source import undecorate, written_forward
from streambp.tensors import tensors_in

# Compilers of older releases raise at a lookup by a subclass of str: a routed config's name.
COMPILES_NAMES = TorchVersion(torch.__version__) >= "2.13"


def refuse_foreign_attention(attentions: Iterable[nn.Module]) -> None:
    """Raise if the attention function or mask function of one of these modules is not transformers'
    own.

    Args:
        attentions: attention modules; one of each class and config is enough.

    Raises:
        UnsupportedModelError: a third-party function computes attention or makes masks.
    """
    for module in attentions:
        implementation = own_implementation(module.config)  # type: ignore[arg-type]
        if implementation == IMPLEMENTATION_NAME:
            continue  # routed by another forward, which has checked already
        reason = foreign_function(module, implementation)
        if reason is not None:
            raise UnsupportedModelError(
                f"{reason}. A streamed layer would not call it: streambp computes softmax "
                "attention "
                "itself, with the masks that transformers describes, so another model would be "
                "trained. Choose one of transformers' own "
                "(model.set_attn_implementation('sdpa')), or run the model unpatched "
                "(streambp.unpatch(model)). Sequences are split over ranks by DeepSpeed Ulysses "
                "or torch's context parallelism (accelerate's sp_size with "
                "sp_backend='deepspeed', or cp_size)."
            )


def distinct_attentions(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules in these layers that call transformers' attention functions, one of each
    class and config. A check of an attention function needs only these modules, because the others
    would give the same result."""
    by_config: dict[tuple[int, type], nn.Module] = {}
    for layer in layers:
        for module in layer.modules():
            config = getattr(module, "config", None)
            if config is not None and ATTENTION_TABLE in getattr(
                getattr(written_forward(module), "__code__", None), "co_names", ()
            ):
                by_config.setdefault((id(config), type(module)), module)
    return list(by_config.values())


def refuse_compiled_attention(layer: nn.Module) -> None:
    """Refuse a layer with a compiled attention module, if torch's compiler is too old for streamed
    attention.

    Args:
        layer: the decoder layer.

    Raises:
        UnsupportedModelError: an attention module inside the layer is compiled.
    """
    if COMPILES_NAMES:
        return
    for module in compiled_submodules(layer):
        if distinct_attentions([module]):
            raise UnsupportedModelError(
                f"{type(module).__name__} in {type(layer).__name__} is compiled, and the compiler "
                f"of torch {torch.__version__} fails on streamed attention. Compile the other "
                "modules of a layer alone (layer.mlp.compile()), or install torch 2.13."
            )


def foreign_function(module: nn.Module, implementation: str | None) -> str | None:
    """Return the start of an error message if a third-party function computes attention or makes
    masks for an attention module. The text names the function. None if every function is
    transformers' own.

    Args:
        module: the attention module.
        implementation: the config's `_attn_implementation`.
    """
    forward = undecorate(type(module).forward)
    names = forward.__globals__
    table = names.get(ATTENTION_TABLE, ALL_ATTENTION_FUNCTIONS)
    function = table.get(implementation) if implementation else None
    registered = function is not None
    if not registered:
        function = next(filter(callable, map(names.get, _eager_names(forward))), None)
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation or EAGER)
    inside: Callable[[Any], Any] = _inside
    why: Callable[..., str | None] = _why_foreign
    try:
        hash((function, mask))
    except TypeError:  # without a hash, their results cannot be cached
        inside = strip_deprecation
        why = _why_foreign.__wrapped__
    function = inside(function)
    inner = getattr(function, "__globals__", {}).get(FLASH_FORWARD)
    if inner is not None:  # verl's function passes its tensors on where sequences are not split
        size = getattr(inner, "__globals__", {}).get(VERLS_SIZE)
        plain = home_of(inner).startswith("verl.") and callable(size) and size() == 1
        inner = None if plain or home_of(inner).startswith("transformers.") else inner
    return why(
        type(module).__name__,
        names["__name__"],
        implementation,
        function,
        registered,
        None if inner is None else full_name(inner),
        mask,
    )


_inside = functools.lru_cache(strip_deprecation)


@functools.lru_cache
def _eager_names(forward: Callable[..., Any]) -> list[str]:
    """Return the names under which the code of an attention module's forward calls its eager
    attention, such as eager_attention_forward. Another library may have replaced the functions of
    these names."""
    return [name for name in forward.__code__.co_names if name.endswith(EAGER_FORWARD)]


@functools.lru_cache
def _why_foreign(
    kind: str,
    home: str,
    implementation: str | None,
    function: Any,
    registered: bool,
    inner: str | None,
    mask: Any,
) -> str | None:
    """Return the start of an error message that names a third-party function among an attention
    module's functions, or says that no mask function is registered. None if all functions are
    transformers' own. The result is cached, because the functions are the same in each call of a
    model.

    Args:
        kind: the attention module's class.
        home: the Python module that defines the class.
        implementation: the name of the attention implementation.
        function: the attention function.
        registered: True if the function is in transformers' ALL_ATTENTION_FUNCTIONS.
        inner: name of a third-party function that `function` calls; None: none.
        mask: the mask function; None: none is registered for the implementation.
    """
    function, mask = strip_deprecation(function), strip_deprecation(mask)
    subject = f"The attention function of {kind} (attn_implementation={implementation!r})"
    if not registered:
        # The expected place is its modeling file (transformers' or a user's), or elsewhere in
        # transformers.
        if (
            function is not None
            and home_of(function) != home
            and not home_of(function).startswith("transformers.")
        ):
            return f"{subject} is {full_name(function)}, where {home}.{EAGER_FORWARD} is expected"
    elif not _is_softmax(function, implementation):
        return f"{subject} is {full_name(function)}, where a function of transformers is expected"
    if inner is not None:
        return f"{subject} calls {inner}, where transformers' own {FLASH_FORWARD} is expected"
    if mask is None:
        return (
            f"{subject} has no mask function registered by its name, so that the unpatched model "
            "ignores padding and windows"
        )
    if home_of(mask) != MASKING_MODULE:
        return (
            f"The mask function for attn_implementation={implementation!r} is {full_name(mask)}, "
            "not transformers' own"
        )
    return None


def _is_softmax(function: Callable[..., Any], implementation: str | None) -> bool:
    """True if this function of ALL_ATTENTION_FUNCTIONS is known to compute softmax attention.
    Streamed attention then computes the same."""
    if isinstance(function, functools.partial):
        return False  # transformers registers no partial: its arguments would change the result
    home, name = home_of(function), getattr(getattr(function, "__code__", None), "co_name", "")
    if home.startswith("transformers.integrations."):
        return name in SOFTMAX_FUNCTIONS
    if "/" in (implementation or "") and name == HUB_KERNEL[0]:
        return all(hub_name in getattr(function, "__globals__", {}) for hub_name in HUB_KERNEL)
    return find_ulysses(implementation) is not None


MAX_NAMED_HOOKS = 3  # hooks in a message


def foreign_parts(layer: nn.Module, previous: Callable[..., Any] | None = None) -> list[str]:
    """Return the names of third-party code inside a layer: modules, and forwards that were set on a
    module object. A layer with such code is tested at the full length of its calls, because the
    code may depend on positions.

    Args:
        layer: the decoder layer.
        previous: the forward that was set on the layer itself before `patch`; None: there was none.
    """
    names = [] if previous is None or _is_harmless(previous) else [full_name(previous)]
    for module in layer.modules():
        instance_forward, of_class = (
            module.__dict__.get("forward"),
            getattr(type(module), "forward", module),
        )
        if (
            module is not layer
            and instance_forward is not None
            and not isinstance(instance_forward, InstanceForward)
            and not _is_harmless(instance_forward)
        ):
            names.append(full_name(instance_forward))
        if not _is_harmless(of_class):
            names.append(full_name(of_class))
        elif type(module).__module__.partition(".")[0] not in MODULES_ARE_HARMLESS:
            names.append(f"{type(module).__module__}.{type(module).__name__}")
    return list(dict.fromkeys([*names, *foreign_experts(layer)]))


def foreign_experts(layer: nn.Module) -> list[str]:
    """Return the names of third-party functions that compute the experts inside a layer, as
    registered with transformers' experts interface. Such a kernel may drop tokens beyond an
    expert's capacity, for example, which a trial on a few tokens does not show."""
    table = getattr(sys.modules.get(EXPERTS_INTEGRATION), EXPERTS_TABLE, {})
    names = []
    for module in layer.modules():
        implementation = getattr(getattr(module, "config", None), EXPERTS_IMPLEMENTATION, None)
        if not isinstance(implementation, str) or implementation not in table:
            continue
        function = table[implementation]
        if not _is_harmless(function):
            names.append(f"{full_name(function)} ({implementation})")
    return list(dict.fromkeys(names))


def _is_harmless(forward: Any) -> bool:
    """True if the forward is from a library whose modules treat each token alike, wherever it is in
    the sequence (torch, transformers, peft and others). Such a forward needs no test as third-party
    code."""
    return package_of(forward) in MODULES_ARE_HARMLESS


def refuse_opacus(where: str) -> NoReturn:
    """Raise UnsupportedModelError for hooks of opacus. Opacus computes per-sample gradients, and
    would compute gradients of chunks instead.

    Args:
        where: the class with the hooks, for the message.
    """
    raise UnsupportedModelError(
        f"{where} has hooks of opacus, which compute the gradient of each sample from one forward "
        "and one backward of a module. A streamed layer calls the module once per chunk, so the "
        "gradients would be of chunks, not of samples. Train with opacus without streambp "
        "(streambp.unpatch(model))."
    )


def third_party_hooks(module: nn.Module) -> dict[str, list[str]]:
    """Return the third-party hooks on the modules inside `module`, as a dict from a hook's name to
    the names of the modules that have the hook. A hook that is registered for all modules has the
    entry "all modules".

    Hooks on `module` itself are left out, and so are hooks of libraries that treat all tokens alike
    and store nothing.
    """
    paths_by_hook: dict[str, list[str]] = {}
    everywhere = vars(torch.nn.modules.module)
    tables = [("all modules", everywhere[name]) for name in GLOBAL_HOOKS]
    for path, inner in module.named_modules():
        if inner is not module:
            attributes = inner.__dict__
            tables += [(path, attributes[name]) for name in MODULE_HOOKS if attributes.get(name)]
    for path, table in tables:
        for hook in table.values():
            if package_of(hook) not in HOOKS_ARE_HARMLESS:
                paths_by_hook.setdefault(short_name(hook), []).append(path)
    return paths_by_hook


def named_hooks(paths_of_hooks: dict[str, list[str]]) -> str:
    """Return a text that names hooks and their modules, such as "count (probe.py:12) on
    layers.0.mlp and 11 other modules".

    Args:
        paths_of_hooks: dict from a hook's name to the names of its modules, from
            `third_party_hooks`.
    """
    labels = []
    for hook, paths in list(paths_of_hooks.items())[:MAX_NAMED_HOOKS]:
        further_modules = len(set(paths)) - 1
        labels.append(
            f"{hook} on {paths[0]}"
            + (
                f" and {further_modules} other module{'s' * (further_modules > 1)}"
                if further_modules
                else ""
            )
        )
    return ", ".join(labels) + (
        f" and {len(paths_of_hooks) - MAX_NAMED_HOOKS} more"
        if len(paths_of_hooks) > MAX_NAMED_HOOKS
        else ""
    )


def why_rows(module: nn.Module) -> str | None:
    """Return the reason, as text for `streambp.describe`, not to merge a batch's rows into one
    packed row for this model. None if rows may be merged. A reason is third-party code that would
    read the packed row, or a float8 Linear whose scales would be those of the packed row."""
    if (scaled := why_scaled(module)) is not None:
        return scaled
    hooks = third_party_hooks(module)
    if hooks:
        return f"hooks would see another row than the batch's: {named_hooks(hooks)}"
    # a modeling file's modules belong to its model
    home = {base.__module__ for base in type(module).__mro__}
    is_known = functools.partial(_is_known, home=home)
    for path, inner in module.named_modules():
        instance_forwards = (
            forward for forward in forwards(inner) if not isinstance(forward, InstanceForward)
        )
        for function in (*instance_forwards, getattr(type(inner), "forward", inner), type(inner)):
            if not is_known(function):
                if function is type(inner):
                    owner = type(inner).__name__
                else:
                    owner = f"the forward {full_name(function)}"
                return (
                    f"{owner} (in {path or 'the model'}) is another's, and would see another row "
                    "than the batch's"
                )
    return None


def third_party_reads_rows(model: nn.Module, backbones: list[nn.Module]) -> bool:
    """True if third-party code between backbone and loss may read values at padding positions: a
    hook, a head, the model's forward or a loss function. A batch's rows must then not be computed
    as one packed row without padding.

    Hooks on the model itself do not count, because they get the same arguments and result as the
    model's caller. `why_rows` covers the inside of backbones.

    Args:
        model: the causal language model.
        backbones: the models inside it that run the decoder layers.
    """
    home = {base.__module__ for backbone in backbones for base in type(backbone).__mro__}
    of_model = list(
        itertools.dropwhile(
            lambda forward: not isinstance(forward, InstanceForward), forwards(model)
        )
    )
    functions = [
        *of_model,
        type(model).forward,
        getattr(model, "loss_function", None),
        nn.functional.cross_entropy,
    ]
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
        function is None
        or isinstance(function, InstanceForward)
        or _is_known(function, home)
        or trls_head(function)
        for function in functions
    )


def _is_known(function: Any, home: set[str]) -> bool:
    """True if a function or class is defined in one of the Python modules `home`, or in a library
    that treats all tokens alike."""
    defining_module = (
        function.__module__
        if isinstance(function, type)
        else home_of(_innermost_function(function))
    )
    return defining_module in home or defining_module.partition(".")[0] in MODULES_ARE_HARMLESS


@contextlib.contextmanager
def watched_hooks(layer: nn.Module, names: tuple[str, ...] = FORWARD_HOOKS) -> Iterator[list[str]]:
    """Context manager for a test run of a layer, to find third-party hooks that modify values.
    Yields a list, to which the name of each such hook is added when the hook modifies a value.

    A hook whose code modifies values under a condition is in the list from the start, because the
    condition may not hold in the test.

    Args:
        layer: the layer; hooks on its inner modules and hooks for all modules are watched.
        names: names of the hook dicts: of forward hooks, or `BACKWARD_HOOKS`.

    Raises:
        UnsupportedModelError: a hook belongs to opacus.
    """
    changing: list[str] = []
    everywhere = vars(torch.nn.modules.module)
    tables: list[dict[int, Any]] = [everywhere[f"_global{name}"] for name in names]
    tables += [
        getattr(module, name) for module in layer.modules() if module is not layer for name in names
    ]
    copies = [(table, dict(table)) for table in tables if table]
    for table, hooks in copies:
        for key, hook in hooks.items():
            if package_of(hook) == OPACUS:
                refuse_opacus(type(layer).__name__)
            if package_of(hook) not in HOOKS_ARE_HARMLESS:
                table[key] = functools.partial(_run_watched_hook, hook, changing)
                changing += [full_name(hook)] if _may_change(hook) else []
    try:
        yield changing
    finally:
        for table, hooks in copies:
            table.update({key: hook for key, hook in hooks.items() if key in table})


def may_edit_gradients(layer: nn.Module) -> bool:
    """True if a third-party backward hook inside the layer may replace a gradient: its code
    contains a return of a value, or the hook has no Python code."""
    hooks = (
        h
        for m in layer.modules()
        if m is not layer
        for name in BACKWARD_HOOKS
        for h in getattr(m, name).values()
    )
    codes = (
        getattr(_innermost_function(h), "__code__", None)
        for h in hooks
        if package_of(h) not in HOOKS_ARE_HARMLESS
    )
    return any(code is None or _can_return_value(code) for code in codes)


def _run_watched_hook(
    hook: Callable[..., Any], changing: list[str], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a hook of a module and return its result. Add the hook's name to `changing` if the hook
    returned a value or modified one of its tensors. `watched_hooks` registers this function in
    place of the hook.

    Args:
        hook: the hook.
        changing: names of the hooks that modify values.
        args, kwargs: the arguments of the hook; the first one is the module.
    """
    tensors = tensors_in((args[1:], kwargs), Tensor)
    # version counters miss writes through `.data` or NumPy
    copies = [x.detach().clone() for x in tensors]
    # values miss writes to positions that the trial does not have
    versions = [version_of(x) for x in tensors]
    result = hook(*args, **kwargs)
    is_unchanged = result is None and versions == [version_of(x) for x in tensors]
    pairs = zip(tensors, copies, strict=True)
    if not is_unchanged or not all(
        bool(((x == old) | (x.isnan() & old.isnan())).all()) for x, old in pairs
    ):
        changing.append(full_name(hook))
    return result


def _may_change(hook: Callable[..., Any]) -> bool:
    """True if the hook's code may modify values under a condition: the code has branches, and it
    returns a value or assigns to items. Watching the hook in a test run may then show no
    modification, because the condition does not hold there."""
    code = getattr(_innermost_function(hook), "__code__", None)
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    branches = any(
        ("JUMP" in step.opname and "_IF_" in step.opname) or step.opname == "FOR_ITER"
        for step in steps
    )
    stores = any(
        step.opname == "STORE_SUBSCR" or (step.opname == "BINARY_OP" and "=" in step.argrepr)
        for step in steps
    )
    return branches and (stores or _can_return_value(code))


def _can_return_value(code: CodeType) -> bool:
    """True if the function's code can return anything but None: a hook with this code may replace a
    value."""
    loads_none = False  # the previous instruction loads None
    for step in dis.get_instructions(code):
        if (step.opname == "RETURN_CONST" and step.argval is not None) or (
            step.opname == "RETURN_VALUE" and not loads_none
        ):
            return True
        loads_none = step.opname == "LOAD_CONST" and step.argval is None
    return False


def _innermost_function(function: Any) -> Any:
    """Return the plain function that a functools.partial or a callable object calls, whose code can
    be inspected."""
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "__code__"):
        return function
    return getattr(type(function), "__call__", function)  # noqa: B004 - its code
