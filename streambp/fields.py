"""Check the fields of settings dataclasses: types, and numbers within a range.

huggingface_hub checks the types; its strict dataclasses are the base of transformers' own
configurations. A float field also accepts a whole number. True is no number, and no field accepts
an infinity or NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from typing import Any, Literal, cast

from huggingface_hub.dataclasses import type_validator

from streambp.errors import ConfigError

MAX_NUMBER = 2.0**62  # above every length, number of bytes and rate
MAX_REPR_CHARACTERS = 120  # characters of a value in a message


def check_fields(instance: Any, **ranges: float | tuple[float, float]) -> None:
    """Check types and ranges of a dataclass's fields; called in `__post_init__`.

    Args:
        instance: the dataclass instance.
        ranges: smallest allowed number by field name, or a pair of smallest and largest; other
            fields have no range.

    Raises:
        ConfigError: a value has another type, is not finite, or is out of range.
    """
    for field, hint in _field_types(cast(Any, type(instance))).items():
        value = getattr(instance, field)
        limits = ranges.get(field, -MAX_NUMBER)
        low, high = limits if isinstance(limits, tuple) else (limits, MAX_NUMBER)
        try:
            type_validator(field, value, float | int if hint is float else hint)
            fits = not isinstance(value, int | float) or low <= value <= high
        except Exception:  # comparing a value with choices runs the value's own code
            fits = False
        if not fits:
            if low == -MAX_NUMBER:
                bound = ""
            elif high == MAX_NUMBER:
                bound = f" from {low:g}"
            else:
                bound = f" from {low:g} to {high:,}"
            raise ConfigError(
                f"{field} is {short_repr(value)}; it must be {_type_text(hint, bound)}."
            )


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return a dict from the names of a dataclass's fields to their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _type_text(hint: Any, bound: str) -> str:
    """Return a field's type in words for an error message, such as "a whole number from 1, or
    None".

    Args:
        hint: the type.
        bound: the range of numbers in words, such as " from 1"; "": no range.
    """
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        if len(parts) > 1:
            return f"one of {list(parts)}"
        return f'"{parts[0]}"'
    if typing.get_origin(hint) is tuple:
        return "a tuple of names"
    if parts:
        return ", or ".join(_type_text(part, bound) for part in parts)
    words = {
        bool: "True or False",
        int: f"a whole number{bound}",
        float: f"a number{bound}",
        str: "text",
    }
    return words.get(hint, "None" if hint is type(None) else f"a {hint.__name__}")


def short_repr(value: Any) -> str:
    """Return a value's repr in one line for an error message, shortened, and even if the repr
    raises.

    The repr of a number of 5,000 digits raises, for example.
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_REPR_CHARACTERS else f"{text[:MAX_REPR_CHARACTERS]}..."


DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # names of dtypes


BYTE_UNITS = {
    "": 1,
    "B": 1,
    **{
        f"{p}{b}": base**n
        for n, p in enumerate("KMGT", 1)
        for b, base in (("B", 1000), ("iB", 1024))
    },
}
# no two units differ in case alone
UPPERCASE_UNITS = {unit.upper(): factor for unit, factor in BYTE_UNITS.items()}
SHORT_UNITS = {prefix: f"{prefix}iB" for prefix in "KMGT"}  # users write 80G for a GPU's 80GiB
MIN_BYTES_WITHOUT_UNIT = 2**12  # in bytes; text of a smaller number must have a unit


def parse_tokens(field: str, value: int | str) -> int:
    """Return a number of tokens, parsed from text such as "65536", "64k", "64K" or "1M" (powers of
    1,024).

    Args:
        field: name of the setting, for the error message.
        value: a number or text.

    Raises:
        ConfigError: the value has another form, or is not positive.
    """
    if type(value) in (int, str):
        match = re.fullmatch(r"(\d+(?:\.\d+(?=[kKM]))?)([kKM]?)", str(value))
    else:
        match = None
    number = 0.0
    if match is not None:
        number = float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]
    if not 1 <= number <= MAX_NUMBER:
        raise ConfigError(
            f"{field} is {short_repr(value)}; it must be a positive number of tokens such as "
            "65536, 64k or 1M."
        )
    return int(number)


def parse_bytes(field: str, value: int | str) -> int:
    """Return a number of bytes, parsed from text such as "96GiB", "80G", "1.5 TB" or "8e9".

    Units may be in capitals or not; KB is 1000, KiB and K are 1024.

    Args:
        field: name of the setting, for the error message.
        value: a number or text.

    Raises:
        ConfigError: the value has another form, is not positive, or is text without a needed unit.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([a-z]*)\s*", value, re.IGNORECASE)
    else:
        match = None
    if match is None:
        unit = ""
    else:
        unit = SHORT_UNITS.get(match[2].upper(), match[2]).upper()
    if match is not None and unit in UPPERCASE_UNITS:
        number = float(match[1]) * UPPERCASE_UNITS[unit]
    else:
        number = value
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not 1 <= number <= MAX_NUMBER
    ):
        units = ", ".join(unit for unit in BYTE_UNITS if unit)
        with_unit = 'a positive number and a unit, such as "96GiB"'
        if not isinstance(value, str):
            with_unit = f"a positive whole number of bytes, or text of {with_unit}"
        raise ConfigError(
            f"{field} is {short_repr(value)}; it must be {with_unit}. The units are {units}."
        )
    if match is not None and not unit and number < MIN_BYTES_WITHOUT_UNIT:
        raise ConfigError(
            f"{field} is {short_repr(value)}, which has no unit. Write {match[1]}GiB, or "
            f"{match[1]}B for bytes."
        )
    return int(number)
