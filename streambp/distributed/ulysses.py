"""DeepSpeed Ulysses (ALST), which splits sequences over ranks by replacing the attention function.

Streamed attention does not call the replaced function, but takes Ulysses' process group from it.
Streamed layers exchange heads for tokens themselves (`sharded/layer.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streambp.errors import UnsupportedModelError
from streambp.known_names import (
    ENGINE_PACKAGES,
    ULYSSES_ATTENTION,
    ULYSSES_GROUP,
    ULYSSES_NOT_IN_EVAL,
)


@dataclasses.dataclass(frozen=True)
class SplitGroup:
    """The process group over which each sequence is split (DeepSpeed Ulysses, torch's context
    parallelism), and the order of the parts.

    Attributes:
        group: the process group, of P ranks.
        balanced: None: Ulysses, where rank r has part r of P. False: context parallelism with the
            same order. True: context parallelism with 2 P parts, of which rank r has r and 2 P - 1
            - r.
        disable_in_eval: True if sequences are not split while the model is in eval mode.
    """

    group: Any
    balanced: bool | None = None
    disable_in_eval: bool = False


def find_ulysses(implementation: str | None) -> SplitGroup | None:
    """Return the process group that DeepSpeed's `UlyssesSPAttentionHF.register_with_transformers`
    has set up for an attention implementation. None if the method was not called for this
    implementation.

    Args:
        implementation: the config's `_attn_implementation`; None: "sdpa".

    Raises:
        UnsupportedModelError: DeepSpeed's function is registered, but its process group is not
            where DeepSpeed 0.19 stores it.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(implementation or "sdpa")
    if not (getattr(function, "__module__", None) or "").startswith(ENGINE_PACKAGES):
        return None
    for value in inspect.getclosurevars(inspect.unwrap(function)).nonlocals.values():
        if hasattr(value, ULYSSES_GROUP) and hasattr(value, ULYSSES_ATTENTION):
            return SplitGroup(
                getattr(value, ULYSSES_GROUP), None, getattr(value, ULYSSES_NOT_IN_EVAL, False)
            )
    raise UnsupportedModelError(
        "DeepSpeed Ulysses (ALST) splits the sequence over ranks, but the process group is not "
        "where DeepSpeed 0.19 keeps it. Use DeepSpeed 0.19, or run this model unpatched "
        "(streambp.unpatch(model))."
    )
