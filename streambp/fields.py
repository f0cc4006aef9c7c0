"""What dataclasses of settings may hold: their fields' types, and numbers within a range.

Types are checked by huggingface_hub, whose strict dataclasses transformers' own configurations are. A float field takes a
whole number as well; True is no number, and no field takes an infinity or NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from typing import Any, Literal, cast

from huggingface_hub.dataclasses import type_validator

from streambp.errors import ConfigError

MOST = 2.0**62  # no length, no number of bytes and no rate comes near
SHOWN = 120  # characters of a value in a message


def check_fields(found: Any, **ranges: float | tuple[float, float]) -> None:
    """Check the fields of a dataclass, as its `__post_init__` does.

    Args:
        ranges: of fields by name: the smallest value, or that and the largest one.

    Raises:
        ConfigError: a value is not of its field's type, not finite, or out of its range.
    """
    for field, hint in _hints(cast(Any, type(found))).items():
        value, given = getattr(found, field), ranges.get(field, -MOST)
        low, high = given if isinstance(given, tuple) else (given, MOST)
        try:
            type_validator(field, value, float | int if hint is float else hint)
            fits = not isinstance(value, int | float) or low <= value <= high
        except Exception:  # what compares a value with choices runs its own code
            fits = False
        if not fits:
            bound = "" if low == -MOST else f" from {low:g}" if high == MOST else f" from {low:g} to {high:,}"
            raise ConfigError(f"{field} is {shown(value)}; it must be {_told(hint, bound)}.")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _told(hint: Any, bound: str) -> str:
    """A type in words."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {list(parts)}" if len(parts) > 1 else f'"{parts[0]}"'
    if typing.get_origin(hint) is tuple:
        return "a tuple of names"
    if parts:
        return ", or ".join(_told(part, bound) for part in parts)
    words = {bool: "True or False", int: f"a whole number{bound}", float: f"a number{bound}", str: "text"}
    return words.get(hint, "None" if hint is type(None) else f"a {hint.__name__}")


def shown(value: Any) -> str:
    """A value in one line of a message, cut short; also one whose own repr raises, as that of a number of 5,000 digits."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


UNITS = {"": 1, "B": 1, **{f"{p}{b}": base**n for n, p in enumerate("KMGT", 1) for b, base in (("B", 1000), ("iB", 1024))}}
UPPER = {unit.upper(): factor for unit, factor in UNITS.items()}  # no two of them differ in case alone
SHORT = {prefix: f"{prefix}iB" for prefix in "KMGT"}  # people write 80G, and mean a GPU's 80GiB
FEW = 2**12  # bytes: text of a smaller number without a unit lacks it


def parse_tokens(field: str, value: int | str) -> int:
    """Tokens from a number, or from text such as "65536", "64k", "64K" or "1M" (powers of 1,024).

    Raises:
        ConfigError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+(?=[kKM]))?)([kKM]?)", str(value)) if type(value) in (int, str) else None
    number = 0 if match is None else float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]
    if not 1 <= number <= MOST:
        raise ConfigError(f"{field} is {shown(value)}; it must be a positive number of tokens such as 65536, 64k or 1M.")
    return int(number)


def parse_bytes(field: str, value: int | str) -> int:
    """Bytes from a number or from text such as "96GiB", "80G", "1.5 TB" or "8e9"; units in capitals or not, KB 1000, KiB
    and K 1024.

    Raises:
        ConfigError: it is neither, not positive, or text of a number that lacks its unit.
    """
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([a-z]*)\s*", value, re.IGNORECASE)
        if isinstance(value, str)
        else None
    )
    unit = "" if match is None else SHORT.get(match[2].upper(), match[2]).upper()
    number = float(match[1]) * UPPER[unit] if match is not None and unit in UPPER else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number <= MOST:
        units = ", ".join(unit for unit in UNITS if unit)
        raise ConfigError(
            f"{field} is {shown(value)}; it must be a positive number of bytes, or text of a number and a unit, such as "
            f'"96GiB". The units are {units}; a number without one is bytes.'
        )
    if match is not None and not unit and number < FEW:
        raise ConfigError(
            f"{field} is {shown(value)}, which has no unit; did you mean {match[1]}GiB? Bytes are {match[1]}B."
        )
    return int(number)
