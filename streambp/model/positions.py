"""Warn of sequences beyond the positions of a model."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from streambp.device import has_data

UNLIMITED = sys.maxsize
GLOBAL_LAYERS_KEY = (
    "full_attention"  # key of the angles of layers without a window, if layers differ
)
ORIGINAL_POSITIONS_KEY = "original_max_position_embeddings"


def positions_warning(config: PreTrainedConfig, seq_len: int) -> str | None:
    """Return the text of a warning if rows are longer than the model's `max_position_embeddings`;
    None if they are not. The text contains code that extends rotary embeddings by YaRN, if the
    model has any.

    Args:
        config: the model's configuration.
        seq_len: number of positions in a row.
    """
    text = config.get_text_config()
    max_positions = position_limit(text)
    if seq_len <= max_positions:
        return None
    warning = f"Rows of {seq_len:,} tokens exceed the model's {max_positions:,} positions"
    angles = angles_of(text)
    if not angles:
        return f"{warning}. Positions beyond those were never trained; take shorter rows."
    where = "config.rope_parameters"
    if GLOBAL_LAYERS_KEY in text.rope_parameters:
        where = f'config.rope_parameters["{GLOBAL_LAYERS_KEY}"]'
    fields = yarn_fields(angles, max_positions, seq_len)
    if config is not text:
        where = where.replace("config", "config.get_text_config()", 1)
    config_text = where.partition(".rope_parameters")[0]
    reached = int(fields["factor"] * fields[ORIGINAL_POSITIONS_KEY])
    fields_text = repr(fields).replace("'", '"')
    return (
        f"{warning}. Extend them before the model is loaded with this config: "
        f"{where}.update({fields_text}); {config_text}.max_position_embeddings = {reached}"
    )


def angles_of(text: PreTrainedConfig) -> Mapping[str, Any]:
    """Return the `rope_parameters` of a model's global attention layers (those without a sliding
    window); {} for a model without rotary embeddings.

    Args:
        text: the configuration of the model's text part.
    """
    angles = getattr(text, "rope_parameters", None)
    if not isinstance(angles, Mapping):
        return {}
    full = angles.get(GLOBAL_LAYERS_KEY, angles)
    return full if isinstance(full, Mapping) else {}


def position_limit(text: PreTrainedConfig) -> int:
    """Return the largest number of positions for which a model's position embeddings were made;
    `UNLIMITED` if its configuration has no limit.

    Scaled rotary embeddings reach `factor` times the original positions, whatever
    `max_position_embeddings` says. The type "dynamic" has no limit: its factor grows with the row.

    Args:
        text: the configuration of the model's text part.
    """
    max_positions = getattr(text, "max_position_embeddings", None)
    angles = angles_of(text)
    scaling = angles.get("rope_type", "default")
    if not isinstance(max_positions, int) or scaling == "dynamic":
        return UNLIMITED
    factor = angles.get("factor")
    original = angles.get(ORIGINAL_POSITIONS_KEY)
    if scaling == "default" or not isinstance(factor, int | float) or not original:
        return max_positions
    return max(max_positions, int(factor * original))


def warn_beyond_positions(
    config: PreTrainedConfig, text: PreTrainedConfig, tokens: Tensor, positions: Tensor | None
) -> int:
    """Warn if a batch has more positions than the rotary embeddings of a model were made for.
    Return a number of tokens: while rows are not longer than this number, later calls need no
    check.

    A model has only one warning: after the warning the result is `UNLIMITED`.

    Args:
        config: the configuration of the whole model, which the printed code changes.
        text: the configuration of the model's text part.
        tokens: input_ids [B, T], or inputs_embeds [B, T, h].
        positions: position_ids, which restart in packed rows; None: positions count the tokens.
    """
    max_positions = position_limit(text)
    # Other embeddings have no limit, or a table that raises an error beyond its end.
    if not angles_of(text) or not has_data(tokens):
        return UNLIMITED
    length = tokens.shape[1]
    if length <= max_positions:
        return max_positions
    if positions is not None:
        length = int(positions.max()) + 1
    warning = positions_warning(config, length)
    if warning is not None:
        warnings.warn(warning, stacklevel=2)
    return UNLIMITED


def yarn_fields(angles: Mapping[str, Any], max_positions: int, seq_len: int) -> dict[str, Any]:
    """Return entries for a config's `rope_parameters` by which YaRN extends rotary embeddings to
    `seq_len` positions. A warning shows these entries to the user.

    Args:
        angles: the model's present `rope_parameters`.
        max_positions: the model's `max_position_embeddings`.
        seq_len: number of positions in a row.
    """
    original = angles.get(ORIGINAL_POSITIONS_KEY) or max_positions
    factor = math.ceil(2 * seq_len / original) / 2
    return {"rope_type": "yarn", "factor": factor, ORIGINAL_POSITIONS_KEY: original}
