"""Provide the placeholder for a cache in the output of a streamed training step.

transformers' configs request a cache in training too, and hardly any program reads that cache. A
streamed step makes no cache. A program that continues from the cache (truncated backpropagation, a
prefix shared by several calls) would silently start anew if the output contained None. The
placeholder raises instead.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NoReturn

from streambp.cache_arguments import names_a_cache
from streambp.errors import StreamBPError


class NoCacheError(StreamBPError, AttributeError):
    """Raised when a program uses the KV cache of a patched model's training step. Such a step makes
    no cache."""


class AbsentCache:
    """Placeholder in the field `past_key_values` of a training step's output. A patched model makes
    no KV cache in training, and None could be mistaken for the start of a new sequence.

    Every access to the placeholder raises `NoCacheError`.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # special methods, used by `copy` and `pickle`
            raise AttributeError(name)
        refuse()

    def __len__(self) -> int:
        refuse()

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: Any) -> Any:
        refuse()

    def __iter__(self) -> Any:
        refuse()


def refuse() -> NoReturn:
    """Raise `NoCacheError`. `AbsentCache`, the placeholder for the cache of a training step, calls
    this function at every access."""
    raise NoCacheError(
        "The cache of a streamed training step was used. A streamed step makes no cache unless "
        "the call asks for one; use_cache in the config is not enough. Pass use_cache=True to the "
        "call that makes the cache: this call then runs unpatched."
    )


def with_absent_cache(output: Any) -> Any:
    """Put an `AbsentCache` placeholder into the cache field of a model's output, for example
    `past_key_values`, if the field is None. Return the output. Other outputs are unchanged.

    Called for training steps that make no cache although the model's config requests one
    (use_cache). A program that passes None to the next call would start a new sequence unnoticed.
    The placeholder raises instead.
    """
    kind: Any = type(output)
    name = _cache_field(kind)
    if name and getattr(output, name, None) is None:
        setattr(output, name, AbsentCache())
    return output


@functools.lru_cache(maxsize=256)
def _cache_field(kind: type[Any]) -> str:
    """Return the name of the field that holds the KV cache in a `ModelOutput` class; "" if the
    class has no such field."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    names = vars(sys.modules[kind.__module__])
    return next((field.name for field in fields if names_a_cache(field.type, names)), "")
