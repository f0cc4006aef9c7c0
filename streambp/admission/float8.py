"""Find layers whose results depend on the number of tokens in a call: torchao's float8 Linears.

A `Float8Linear` multiplies its operands by a scale before the cast to float8. A scale may depend on
the largest value of all tokens in the call: the single scale of a tensor ("tensorwise"), or the
scale of a feature in the weight's gradient ("axiswise"). A chunk has other largest values than the
full sequence, and is rounded otherwise. The difference equals the error of float8 in size. A test
on random tokens detects the difference by chance only. The layer therefore runs unchunked.

Scales that are powers of two change the exponent alone. Every such scale gives the same rounding,
except for values near float8's smallest number. Layers with these scales run in chunks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from streambp.known_names import (
    FLOAT8_CASTS,
    FLOAT8_CASTS_FOR_WEIGHTS,
    FLOAT8_LINEAR,
    POWERS_OF_TWO,
)
from streambp.layer.float8_linears import is_float8

AXISWISE, DISABLED = "axiswise", "disabled"  # values of torchao's enumerations


def why_scaled(module: nn.Module) -> str | None:
    """Return the reason, as text for `streambp.describe`, to run a module unchunked: torchao's
    float8 Linears inside compute a scale from all tokens of a call. A chunk would get another
    scale. None if the module has no such Linear.

    Args:
        module: a decoder layer, or a whole model.
    """
    names = [name for name, inner in module.named_modules() if _scales_over_tokens(inner)]
    if not names:
        return None
    more_names = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{FLOAT8_LINEAR} ({names[0]}{more_names}) has scales that all tokens of a call share; set "
        f"{POWERS_OF_TWO}=True in Float8LinearConfig, which gives chunks the same rounding"
    )


def _scales_over_tokens(module: nn.Module) -> bool:
    """True if the module is a float8 Linear with a scale that depends on several tokens and is not
    rounded to a power of two. Also true if the Linear's configuration lacks the expected fields, as
    in another torchao release."""
    if not is_float8(module):
        return False
    config = getattr(module, "config", None)
    if getattr(config, POWERS_OF_TWO, False):
        return False
    for name in FLOAT8_CASTS:
        cast = getattr(config, name, None)
        if _scales(cast) and not _field_equals(cast, "scaling_granularity", AXISWISE):
            return True
    weight: Any = module.weight
    # The product for the weight's gradient sums over tokens, so every scale covers all tokens.
    return weight.requires_grad and any(
        _scales(getattr(config, name, None)) for name in FLOAT8_CASTS_FOR_WEIGHTS
    )


def _scales(cast: Any) -> bool:
    """True if an operand of a matrix product is cast to float8; False if the operand keeps its
    dtype.

    Args:
        cast: torchao's configuration of the operand's cast.
    """
    return not _field_equals(cast, "scaling_type", DISABLED)


def _field_equals(cast: Any, field: str, value: str) -> bool:
    """True if a field of torchao's configuration contains the enum member with this value. False
    for any other member, or if the configuration has no such field.

    Args:
        cast: torchao's configuration of an operand's cast to float8.
        field: name of the field, such as "scaling_type".
        value: value of the enum member, such as "disabled".
    """
    return bool(getattr(getattr(cast, field, None), "value", None) == value)
