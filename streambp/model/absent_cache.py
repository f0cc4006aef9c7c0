"""What a streamed training step hands out in the place of a cache that the unpatched model would have made.

transformers' configs ask for a cache, in training as well, and nearly no program reads it. A streamed step makes none. A
program that goes on from it (truncated backpropagation, a prefix that several calls share) would begin anew, without a
word, if it found None there.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NoReturn

from streambp.cache_arguments import names_a_cache
from streambp.errors import StreamBPError


class NoCacheError(StreamBPError, AttributeError):
    """A program uses the cache of a streamed training step, which has none."""


class AbsentCache:
    """Stands where an output has its cache. Whatever is asked of it raises `NoCacheError`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, as of `copy` and `pickle`
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
    """Raises NoCacheError."""
    raise NoCacheError(
        "The cache of a streamed training step was used. Such a step makes none, unless its caller asks for it: the "
        "config's use_cache alone does not. Pass use_cache=True to the call whose cache you go on from; it runs unpatched "
        "then. (streambp.unpatch(model) runs all calls so.)"
    )


def with_absent_cache(output: Any) -> Any:
    """A model's output whose cache, if it has a field for one and none in it, raises when it is used."""
    kind: Any = type(output)
    name = _cache_field(kind)
    if name and getattr(output, name, None) is None:
        setattr(output, name, AbsentCache())
    return output


@functools.lru_cache(maxsize=256)
def _cache_field(kind: type[Any]) -> str:
    """The field of an output's class that takes a cache; empty if it has none."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    names = vars(sys.modules[kind.__module__])
    return next((field.name for field in fields if names_a_cache(field.type, names)), "")
