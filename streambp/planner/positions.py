"""Sequences that are longer than the positions a model was made for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

FULL = "full_attention"  # key of the angles of layers without a window, if layers differ
ORIGINAL = "original_max_position_embeddings"


def beyond_positions(config: PreTrainedConfig, seq_len: int) -> str | None:
    """Return a warning if rows are longer than the model's `max_position_embeddings`, with code
    that extends the rotary embeddings by YaRN if the model has any. None for shorter rows.

    Args:
        config: the model's configuration.
        seq_len: positions of a row.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or seq_len <= limit:
        return None
    warning = f"Rows of {seq_len:,} tokens exceed the model's {limit:,} positions"
    angles = getattr(text, "rope_parameters", None)
    if not isinstance(angles, Mapping) or not angles:
        return f"{warning}. Positions beyond those were never trained; take shorter rows."
    where = "config.rope_parameters"
    if FULL in angles:
        angles = angles[FULL]
        where = f'config.rope_parameters["{FULL}"]'
    fields = extension(angles, limit, seq_len)
    if config is not text:
        where = where.replace("config", "config.get_text_config()", 1)
    config_text = where.partition(".rope_parameters")[0]
    reached = int(fields["factor"] * fields[ORIGINAL])
    literal = repr(fields).replace("'", '"')
    return (
        f"{warning}. Extend them before the model is loaded with this config: "
        f"{where}.update({literal}); {config_text}.max_position_embeddings = {reached}"
    )


def extension(angles: Mapping[str, Any], most: int, seq_len: int) -> dict[str, Any]:
    """Return the fields of `rope_parameters` that extend rotary embeddings to `seq_len` positions
    by YaRN.

    Args:
        angles: the model's present `rope_parameters`.
        most: the model's `max_position_embeddings`.
        seq_len: positions of a row.
    """
    original = angles.get(ORIGINAL) or most
    factor = math.ceil(2 * seq_len / original) / 2
    return {"rope_type": "yarn", "factor": factor, ORIGINAL: original}
