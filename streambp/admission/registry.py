"""Check that a model's attention implementation is transformers' own function.

Streamed layers compute softmax attention themselves, with the masks that transformers describes.
transformers' own functions compute the same. A third-party function under the same name would never
be called, and another model would be trained. Such a function may be registered, or replace
transformers' function or a modeling file's eager function. A few tokens may not show the
difference: a local window is wider, a counter changes no number. Functions are therefore identified
by the module that defines them. The check runs once in each forward of a model, because functions
may be replaced at any time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streambp.attention.interface import NAME, own_implementation
from streambp.distributed.ulysses import find_ulysses
from streambp.errors import UnsupportedModelError
from streambp.foreign import full_name, home_of, undecorated
from streambp.known_names import (
    ATTENTION_TABLE,
    EAGER,
    EAGER_FORWARD,
    FLASH_FORWARD,
    HUB_KERNEL,
    MASKING,
    SOFTMAX,
    VERLS_SIZE,
)
from streambp.source import written, written_forward


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
        if implementation == NAME:
            continue  # routed by another forward, which has checked already
        found = foreign_function(module, implementation)
        if found is not None:
            raise UnsupportedModelError(
                f"{found}. A streamed layer would not call it: streambp computes softmax attention "
                "itself, with the masks that transformers describes, so another model would be "
                "trained. Choose one of transformers' own "
                "(model.set_attn_implementation('sdpa')), or run the model unpatched "
                "(streambp.unpatch(model)). Sequences are split over ranks by DeepSpeed Ulysses "
                "or torch's context parallelism (accelerate's sp_size with "
                "sp_backend='deepspeed', or cp_size)."
            )


def distinct_attentions(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules in these layers that call transformers' attention functions, one of each
    class and config."""
    found: dict[tuple[int, type], nn.Module] = {}
    for layer in layers:
        for module in layer.modules():
            config = getattr(module, "config", None)
            if config is not None and ATTENTION_TABLE in getattr(
                getattr(written_forward(module), "__code__", None), "co_names", ()
            ):
                found.setdefault((id(config), type(module)), module)
    return list(found.values())


def foreign_function(module: nn.Module, implementation: str | None) -> str | None:
    """Return a text that names the third-party function behind an attention implementation, as the
    start of a sentence. None if every function is transformers' own.

    Args:
        module: the attention module.
        implementation: the config's `_attn_implementation`.
    """
    forward = written(type(module).forward)
    names = forward.__globals__
    table = names.get(ATTENTION_TABLE, ALL_ATTENTION_FUNCTIONS)
    function = _inside(table.get(implementation)) if implementation else None
    registered = function is not None
    if not registered:
        function = next(filter(callable, map(names.get, _eager_names(forward))), None)
    inner = getattr(_inside(function), "__globals__", {}).get(FLASH_FORWARD)
    if inner is not None:  # verl's function passes its tensors on where sequences are not split
        size = getattr(inner, "__globals__", {}).get(VERLS_SIZE)
        plain = home_of(inner).startswith("verl.") and callable(size) and size() == 1
        inner = None if plain or home_of(inner).startswith("transformers.") else inner
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation or EAGER)
    return _why_foreign(
        type(module).__name__, names["__name__"], implementation, function, registered, inner, mask
    )


def _remembered(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ask` with a cache of its results, except for arguments that cannot be hashed."""
    kept = functools.lru_cache(ask)

    @functools.wraps(ask)
    def answer(*args: Any) -> Any:
        try:
            return kept(*args)
        except TypeError:  # the argument has no hash
            return ask(*args)

    return answer


_inside = _remembered(undecorated)


@functools.lru_cache
def _eager_names(forward: Callable[..., Any]) -> list[str]:
    """Return the names of the eager attention functions in the code of an attention module's
    forward."""
    return [name for name in forward.__code__.co_names if name.endswith(EAGER_FORWARD)]


@_remembered
def _why_foreign(
    kind: str,
    home: str,
    implementation: str | None,
    function: Any,
    registered: bool,
    inner: Any,
    mask: Any,
) -> str | None:
    """Return the text of `foreign_function` for this attention function and mask function. The
    result is cached, because the functions are the same in each call of a model.

    Args:
        kind: the attention module's class.
        home: the Python module that defines the class.
        implementation: the name of the attention implementation.
        function: the attention function.
        registered: True if the function is in transformers' ALL_ATTENTION_FUNCTIONS.
        inner: a third-party function that `function` calls; None: none.
        mask: the mask function.
    """
    function, mask = undecorated(function), undecorated(mask)
    who = f"The attention function of {kind} (attn_implementation={implementation!r})"
    if not registered:
        # The expected place is its modeling file (transformers' or a user's), or elsewhere in
        # transformers.
        if (
            function is not None
            and home_of(function) != home
            and not home_of(function).startswith("transformers.")
        ):
            return f"{who} is {full_name(function)}, where {home}.{EAGER_FORWARD} is expected"
    elif not _is_softmax(function, implementation):
        return f"{who} is {full_name(function)}, where a function of transformers is expected"
    if inner is not None:
        return (
            f"{who} calls {full_name(inner)}, where transformers' own {FLASH_FORWARD} is expected"
        )
    if mask is None:
        return (
            f"{who} has no mask function registered by its name, so that the unpatched model "
            "ignores padding and windows"
        )
    if home_of(mask) != MASKING:
        return (
            f"The mask function for attn_implementation={implementation!r} is {full_name(mask)}, "
            "not transformers' own"
        )
    return None


def _is_softmax(function: Callable[..., Any], implementation: str | None) -> bool:
    """True if this function of ALL_ATTENTION_FUNCTIONS is known to compute softmax attention."""
    if isinstance(function, functools.partial):
        return False  # transformers registers no partial: its arguments would change the result
    home, name = home_of(function), getattr(getattr(function, "__code__", None), "co_name", "")
    if home.startswith("transformers.integrations."):
        return name in SOFTMAX
    if "/" in (implementation or "") and name == HUB_KERNEL[0]:
        return all(known in getattr(function, "__globals__", {}) for known in HUB_KERNEL)
    return find_ulysses(implementation) is not None
