"""DeepSpeed Ulysses (ALST), which splits sequences over ranks and stands in for the attention function that a config names.

Streamed attention does not call that function. Ulysses' process group is taken from it, and streamed layers exchange heads
for tokens themselves (`sharded/layer.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streambp.errors import UnsupportedModelError
from streambp.known_names import ENGINES, ULYSSES_ATTENTION, ULYSSES_GROUP, ULYSSES_NOT_IN_EVAL


@dataclasses.dataclass(frozen=True)
class SplitOver:
    """The process group over which sequences are split.

    balanced: None where Ulysses splits them. Where context parallelism does, True: rank r holds parts r and 2 P - 1 - r of
        2 P parts; False: part r of P. disable_in_eval: sequences are whole while the model is in eval mode.
    """

    group: Any
    balanced: bool | None = None
    disable_in_eval: bool = False


def find_ulysses(implementation: str | None) -> SplitOver | None:
    """What `UlyssesSPAttentionHF.register_with_transformers` put in place of an attention function, if it did.

    Args:
        implementation: the attention implementation that the model's config names.

    Raises:
        UnsupportedModelError: DeepSpeed's function is there, but its process group is not where it is expected.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(implementation or "sdpa")
    if not (getattr(function, "__module__", None) or "").startswith(ENGINES):
        return None
    for value in inspect.getclosurevars(inspect.unwrap(function)).nonlocals.values():
        if hasattr(value, ULYSSES_GROUP) and hasattr(value, ULYSSES_ATTENTION):
            return SplitOver(getattr(value, ULYSSES_GROUP), None, getattr(value, ULYSSES_NOT_IN_EVAL, False))
    raise UnsupportedModelError(
        "DeepSpeed Ulysses (ALST) splits the sequence over ranks, but the process group is not where DeepSpeed 0.19 keeps "
        "it. Use DeepSpeed 0.19, or run this model unpatched (streambp.unpatch(model))."
    )
