"""Read a backbone call's arguments token by token, and convert them to arguments of a packed row.

Two tokens are equal if their ids, positions and values of `known_names.TOKEN_ARGUMENTS` are equal.
Embeddings are not compared: tokens given as embeddings all differ. Rows of embeddings therefore
share nothing, and only their padding is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.device import has_data
from streambp.known_names import (
    EMBEDDINGS_ARGUMENT,
    LABELS,
    MARKED_TOKEN_ARGUMENTS,
    SHARED_INPUTS,
    TOKEN_ARGUMENTS,
    TOKEN_INDEPENDENT_ARGUMENTS,
)
from streambp.prefixes.tree import PrefixTree

TRIAL_SHAPE = (3, 24)  # rows and tokens of a trial
TRIAL_PADDING = (4, 3)  # padding in trials: left of all rows, and right of the last row
KNOWN_ARGUMENTS = {
    *SHARED_INPUTS,
    EMBEDDINGS_ARGUMENT,
    *TOKEN_ARGUMENTS,
    *MARKED_TOKEN_ARGUMENTS,
    *TOKEN_INDEPENDENT_ARGUMENTS,
    *LABELS,
}
TEXT_FIRST = 4  # axes of positions: text, time, height and width; three axes lack text


def tokens_of(kwargs: Mapping[str, Any]) -> Any:
    """Return input_ids [B, T] of a call, or inputs_embeds [B, T, h] if the call has no input_ids;
    None if the call has neither.

    Args:
        kwargs: the backbone's arguments.
    """
    ids = kwargs.get(SHARED_INPUTS[0])
    return ids if ids is not None else kwargs.get(EMBEDDINGS_ARGUMENT)


def mask_and_positions(kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return attention_mask and position_ids from a call's arguments `kwargs`, each as None if the
    call does not have the argument."""
    return kwargs.get(SHARED_INPUTS[1]), kwargs.get(SHARED_INPUTS[2])


def _drop_labels(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments `kwargs` without `labels` and `shift_labels`, whose shape [B, T]
    does not fit the packed row. The loss is computed later, from the outputs of the batch's
    rows."""
    return {name: value for name, value in kwargs.items() if name not in LABELS}


def why_not_packed(kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason, as text for `streambp.describe`, why a call with these arguments must run
    on the batch's own rows. None if its tokens can be packed into one row, without padding and with
    shared prefixes once.

    Args:
        kwargs: the backbone's arguments.
    """
    for name, value in kwargs.items():
        if name not in KNOWN_ARGUMENTS and value is not None:
            return (
                f"the call has {name}, which may say more of a token than its id and its position"
            )
    tokens = tokens_of(kwargs)
    mask, positions = mask_and_positions(kwargs)
    embedded = isinstance(tokens, Tensor) and tokens.is_floating_point()
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 + embedded or not has_data(tokens):
        return "the call has neither input_ids [B, T] nor inputs_embeds [B, T, h]"
    if embedded and mask is None:
        return (
            "the call has inputs_embeds, which are not compared, and no attention_mask, which "
            "would tell padding"
        )
    shape = tokens.shape[:2]
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != shape):
        return "the attention mask is not [B, T]"
    if positions is not None and not (
        isinstance(positions, Tensor)
        and positions.dim() in (2, 3)
        and positions.shape[-2:] in (shape, (1, shape[1]))
    ):
        return "position_ids are not [B, T] or [axes, B, T]"
    for name in TOKEN_ARGUMENTS:
        if kwargs.get(name) is not None and kwargs[name].shape != shape:
            return f"{name} are not [B, T]"
    for name, marks in MARKED_TOKEN_ARGUMENTS.items():
        if kwargs.get(name) is None:
            continue
        if mask is None or kwargs.get(marks) is None or not embedded:
            return f"the call has {name} without inputs_embeds, attention_mask and {marks}"
        if bool((kwargs[marks] & (mask.to(kwargs[marks].device) == 0)).any()):
            return f"{marks} mark padding"
    return None


def token_numbers(kwargs: Mapping[str, Any]) -> Tensor:
    """Return integers [B, T] that are equal for two tokens if and only if the tokens' ids and
    per-token arguments are equal. Per-token arguments are token_type_ids, visual_pos_masks, and
    position_ids with several axes. Tokens passed as embeddings all get different integers.

    `find_tree` looks for common beginnings of rows in these integers, and compares text positions
    itself.

    Args:
        kwargs: the backbone's arguments.
    """
    tokens = tokens_of(kwargs)
    positions = kwargs.get(SHARED_INPUTS[2])
    shape = tokens.shape[:2]
    if tokens.is_floating_point():
        return torch.arange(shape.numel(), device=tokens.device).view(shape)
    values = [kwargs[name] for name in TOKEN_ARGUMENTS if kwargs.get(name) is not None]
    if positions is not None and positions.dim() == 3:
        values += [_number_positions(axis.expand(shape)) for axis in positions]
    if not values:
        return tokens  # type: ignore[no-any-return]
    # [B * T, what is said]
    rows_of_values = torch.stack([tokens, *(x.to(tokens) for x in values)], -1).flatten(0, 1)
    return rows_of_values.unique(dim=0, return_inverse=True)[1].view(shape)


def _number_positions(axis: Tensor) -> Tensor:
    """Return integers [B, T] that are equal for equal positions `axis` [B, T], for comparison with
    other tokens. Integer positions are returned unchanged."""
    if axis.is_floating_point():
        return axis.unique(return_inverse=True)[1]
    return axis


def pack_arguments(
    kwargs: Mapping[str, Any], tree: PrefixTree, takes_positions: bool = True
) -> dict[str, Any]:
    """Return a call's arguments for the packed row, without labels. Tokens are [1, N, ...], and the
    mask [1, N] has ones. The forward gets position_ids [1, N] or [axes, 1, N] if it accepts
    position_ids.

    Args:
        kwargs: the call's arguments for rows [B, T].
        tree: the packed row of N tokens: the tokens of all rows, without padding and with shared
            prefixes once.
        takes_positions: True if the forward accepts position_ids.
    """
    arguments = _drop_labels(kwargs)
    mask, positions = mask_and_positions(kwargs)
    tokens = tokens_of(kwargs)
    if positions is None:
        positions = torch.arange(tree.width, device=tokens.device)[None]
    # [B, T] or [axes, B, T]
    positions = positions.expand(*positions.shape[:-2], len(tree.rows), -1)
    if positions.dim() == 2:
        packed_positions = tree.pack(positions)
    else:
        packed_positions = torch.stack([tree.pack(axis) for axis in positions])
    if tree.extra_position is not None:
        packed_positions = nn.functional.pad(packed_positions, (0, 1), value=tree.extra_position)
    # A missing mask would make transformers search the positions for documents.
    arguments[SHARED_INPUTS[1]] = (tokens if mask is None else mask).new_ones(1, tree.length)
    if takes_positions:
        arguments[SHARED_INPUTS[2]] = packed_positions
    for name in (SHARED_INPUTS[0], EMBEDDINGS_ARGUMENT, *TOKEN_ARGUMENTS):
        if kwargs.get(name) is not None:
            arguments[name] = row = tree.pack(kwargs[name])  # [1, tokens, ...]
            if tree.extra_position is not None:
                # Append a copy of the first token. A padding id may have a zero embedding, and a
                # root of zeros has no gradient (Gemma 3n).
                first = row[:, :1].detach()
                if name in TOKEN_ARGUMENTS:
                    first = torch.zeros_like(first)
                arguments[name] = torch.cat([row, first], 1)
    return arguments


def trial_arguments(kwargs: Mapping[str, Any], vocabulary: int, padded: bool) -> dict[str, Any]:
    """Return arguments for a test that compares a packed row with its rows: three rows of random
    tokens that share prefixes. The arguments have the same names as in `kwargs`, without labels.

    Args:
        kwargs: a call's arguments.
        vocabulary: number of token ids.
        padded: True for rows with padding on both sides; False for rows without padding.
    """
    mask, positions = mask_and_positions(kwargs)
    length = TRIAL_SHAPE[1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, TRIAL_SHAPE, generator=generator, device="cpu")
    tokens[1, : length // 2] = tokens[0, : length // 2]
    tokens[2, : length * 5 // 6] = tokens[1, : length * 5 // 6]
    real = torch.ones_like(tokens)
    if padded:
        real[:, : TRIAL_PADDING[0]] = 0
        real[2, -TRIAL_PADDING[1] :] = 0
    arguments = _drop_labels(kwargs)
    tokens_of_call = tokens_of(kwargs)
    if tokens_of_call.is_floating_point():
        random_values = torch.randn(
            *TRIAL_SHAPE,
            tokens_of_call.shape[-1],
            generator=generator,
            device="cpu",
            dtype=torch.float32,
        )
        arguments[EMBEDDINGS_ARGUMENT] = random_values.to(tokens_of_call)
    else:
        arguments[SHARED_INPUTS[0]] = tokens.to(tokens_of_call)
    marked = tokens % 2 * real  # [rows, tokens]
    for name in TOKEN_ARGUMENTS:
        if kwargs.get(name) is not None:
            arguments[name] = marked.to(kwargs[name])
    for name in MARKED_TOKEN_ARGUMENTS:
        if kwargs.get(name) is not None:
            arguments[name] = []
            for like in kwargs[name]:
                size = (int(marked.sum()), like.shape[-1])
                random_values = torch.randn(
                    size, generator=generator, device="cpu", dtype=torch.float32
                )
                arguments[name].append(random_values.to(like))
    if mask is not None:
        arguments[SHARED_INPUTS[1]] = real.to(mask)
    if positions is not None:
        counted = (real.cumsum(1) - 1).clamp(min=0)  # [rows, tokens]
        if positions.dim() == 3:
            counted = torch.stack([counted + axis * marked for axis in range(len(positions))])
        arguments[SHARED_INPUTS[2]] = counted.to(positions)
    return arguments
