"""Read a backbone call's arguments token by token, and convert them to arguments of a packed row.

Two tokens are equal if their ids, positions and values of `known_names.PER_TOKEN` are equal.
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
    EMBEDS,
    IN_ORDER,
    LABELS,
    PER_TOKEN,
    SAYS_NOTHING_OF_TOKENS,
    SHARED_INPUTS,
)
from streambp.prefixes.tree import Tree

TRIAL = (3, 24)  # rows and tokens of a trial
PADS = (4, 3)  # padding in trials: left of all rows, and right of the last row
KNOWN = {*SHARED_INPUTS, EMBEDS, *PER_TOKEN, *IN_ORDER, *SAYS_NOTHING_OF_TOKENS, *LABELS}
TEXT_FIRST = 4  # axes of positions: text, time, height and width; three axes lack text


def tokens_of(kwargs: Mapping[str, Any]) -> Any:
    """Return input_ids [B, T], or else inputs_embeds [B, T, h]."""
    ids = kwargs.get(SHARED_INPUTS[0])
    return ids if ids is not None else kwargs.get(EMBEDS)


def why_not_packed(kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason against a packed row for these arguments.

    None: the arguments contain all that a packed row needs.
    """
    foreign = next(
        (name for name, value in kwargs.items() if name not in KNOWN and value is not None), None
    )
    if foreign is not None:
        return f"the call has {foreign}, which may say more of a token than its id and its position"
    tokens, (_, mask, positions) = tokens_of(kwargs), (kwargs.get(name) for name in SHARED_INPUTS)
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
    for name in PER_TOKEN:
        if kwargs.get(name) is not None and kwargs[name].shape != shape:
            return f"{name} are not [B, T]"
    for name, marks in IN_ORDER.items():
        if kwargs.get(name) is None:
            continue
        if mask is None or kwargs.get(marks) is None or not embedded:
            return f"the call has {name} without inputs_embeds, attention_mask and {marks}"
        if bool((kwargs[marks] & (mask.to(kwargs[marks].device) == 0)).any()):
            return f"{marks} mark padding"
    return None


def known_by(kwargs: Mapping[str, Any]) -> Tensor:
    """Return [B, T] integers that are equal for equal tokens, apart from text positions."""
    tokens, positions = tokens_of(kwargs), kwargs.get(SHARED_INPUTS[2])
    shape = tokens.shape[:2]
    if tokens.is_floating_point():
        return torch.arange(shape.numel(), device=tokens.device).view(shape)
    said = [kwargs[name] for name in PER_TOKEN if kwargs.get(name) is not None]
    if positions is not None and positions.dim() == 3:
        said += [_numbered(axis.expand(shape)) for axis in positions]
    if not said:
        return tokens  # type: ignore[no-any-return]
    # [B * T, what is said]
    each = torch.stack([tokens, *(x.to(tokens) for x in said)], -1).flatten(0, 1)
    return each.unique(dim=0, return_inverse=True)[1].view(shape)


def _numbered(axis: Tensor) -> Tensor:
    """Return [B, T] integers that identify the values of positions [B, T].

    Equal positions have equal integers; positions with different fractions differ.
    """
    if axis.is_floating_point():
        return axis.unique(return_inverse=True)[1]
    return axis


def packed(kwargs: Mapping[str, Any], tree: Tree, takes_positions: bool = True) -> dict[str, Any]:
    """Return a call's arguments for the packed row, without labels.

    Tokens are [1, N, ...], the mask [1, N]. Positions, if accepted, are [1, N] or [axes, 1, N].
    """
    changed = {name: value for name, value in kwargs.items() if name not in LABELS}
    _, mask, positions = (kwargs.get(name) for name in SHARED_INPUTS)
    tokens = tokens_of(kwargs)
    if positions is None:
        positions = torch.arange(tree.width, device=tokens.device)[None]
    # [B, T] or [axes, B, T]
    positions = positions.expand(*positions.shape[:-2], len(tree.rows), -1)
    found = (
        tree.packed(positions)
        if positions.dim() == 2
        else torch.stack([tree.packed(axis) for axis in positions])
    )
    if tree.furthest is not None:
        found = nn.functional.pad(found, (0, 1), value=tree.furthest)
    # A missing mask would make transformers search the positions for documents.
    changed[SHARED_INPUTS[1]] = (tokens if mask is None else mask).new_ones(1, tree.length)
    if takes_positions:
        changed[SHARED_INPUTS[2]] = found
    for name in (SHARED_INPUTS[0], EMBEDS, *PER_TOKEN):
        if kwargs.get(name) is not None:
            changed[name] = row = tree.packed(kwargs[name])  # [1, tokens, ...]
            if tree.furthest is not None:
                # Append a copy of the first token. A padding id may have a zero embedding, and a
                # root of zeros has no gradient (Gemma 3n).
                first = row[:, :1].detach()
                changed[name] = torch.cat(
                    [row, torch.zeros_like(first) if name in PER_TOKEN else first], 1
                )
    return changed


def trial_of(kwargs: Mapping[str, Any], vocabulary: int, padded: bool) -> dict[str, Any]:
    """Return arguments of the same kind for random rows that branch twice.

    Args:
        vocabulary: number of token ids.
        padded: True for padding on both sides.
    """
    _, mask, positions = (kwargs.get(name) for name in SHARED_INPUTS)
    length, generator = TRIAL[1], torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, TRIAL, generator=generator, device="cpu")
    tokens[1, : length // 2] = tokens[0, : length // 2]
    tokens[2, : length * 5 // 6] = tokens[1, : length * 5 // 6]
    real = torch.ones_like(tokens)
    if padded:
        real[:, : PADS[0]], real[2, -PADS[1] :] = 0, 0
    changed = {name: value for name, value in kwargs.items() if name not in LABELS}
    given = tokens_of(kwargs)
    if given.is_floating_point():
        drawn = torch.randn(
            *TRIAL, given.shape[-1], generator=generator, device="cpu", dtype=torch.float32
        )
        changed[EMBEDS] = drawn.to(given)
    else:
        changed[SHARED_INPUTS[0]] = tokens.to(given)
    marked = tokens % 2 * real  # [rows, tokens]
    for name in PER_TOKEN:
        if kwargs.get(name) is not None:
            changed[name] = marked.to(kwargs[name])
    for name in IN_ORDER:
        if kwargs.get(name) is not None:
            sizes = [(int(marked.sum()), x.shape[-1]) for x in kwargs[name]]
            features = [
                torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
                for size in sizes
            ]
            changed[name] = [x.to(like) for x, like in zip(features, kwargs[name], strict=True)]
    if mask is not None:
        changed[SHARED_INPUTS[1]] = real.to(mask)
    if positions is not None:
        counted = (real.cumsum(1) - 1).clamp(min=0)  # [rows, tokens]
        axes = (
            [counted + axis * marked for axis in range(len(positions))]
            if positions.dim() == 3
            else []
        )
        changed[SHARED_INPUTS[2]] = (torch.stack(axes) if axes else counted).to(positions)
    return changed
