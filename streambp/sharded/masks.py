"""Find the keys that each query of full sequences may read, from the attention masks that the model
makes for each rank's shard."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, find_packed_sequence_indices

from streambp.attention.masks import LazyMask, agrees, rows_of
from streambp.attention.spans import Spans
from streambp.errors import UnsupportedMaskError


class MaskResult(enum.IntEnum):
    """Result of reading one rank's attention mask for packed documents, from which all ranks derive
    the keys of full sequences. NOTHING: this rank's tokens have no packed documents. KNOWN: the
    mask separates packed documents. IGNORED: position_ids mark packed documents, and the mask does
    not separate these documents. REFUSED: the mask is not supported."""

    NOTHING = 0
    KNOWN = 1
    IGNORED = 2
    REFUSED = 3  # more than padding, packing and a window


def resolve_full_mask(
    mask: LazyMask | Tensor | None,
    full_spans: Spans,
    length: int,
    position_ids: Tensor | None,
    device: torch.device,
    gather_numbers: Callable[[list[int]], list[list[int]]],
) -> Spans:
    """Return the `Spans` of the full sequences, the keys that each query may read, from the
    attention mask that the model made for this rank's tokens.

    One rank's mask can leave the end of a sliding window or document boundaries open. Ranks
    therefore exchange facts from their masks and reach the same result. Boundaries are read from
    `full_spans`: an early and a late part of one sequence in a shard would seem to be two
    documents.

    The result is stored in `mask.full_layout` for the layers that share the mask.

    Args:
        mask: the model's mask for this rank's tokens; None: every query reads itself and all
            earlier keys.
        full_spans: the keys that each query of the full sequences may read, by padding and packed
            documents, without a window.
        length: number of this rank's tokens in a row.
        position_ids: [1 or B, length], of these tokens.
        device: device for comparisons of masks.
        gather_numbers: gathers a list of numbers from each rank; called once for each mask of the
            model, on every rank.

    Raises:
        UnsupportedMaskError: the mask is more than padding, packed documents and a window, or may
            be; on every rank alike.
    """
    rows = len(full_spans.rows)
    if mask is None:
        return Spans.causal(rows, full_spans.length)
    if isinstance(mask, LazyMask) and mask.full_layout is not None:
        return mask.full_layout
    window, clear, visibility = _read_mask(
        mask, rows, full_spans.length, length, position_ids, device
    )
    replies = gather_numbers([-1 if window is None else window, clear, visibility])
    if any(reply[2] == MaskResult.REFUSED or reply[0] != replies[0][0] for reply in replies):
        raise UnsupportedMaskError(
            "The attention mask is no sliding window, padding or packing; where sequences are "
            "split over ranks streambp knows one rank's part of it only. Train this model without "
            "splitting sequences."
        )
    if not any(reply[1] for reply in replies):
        raise UnsupportedMaskError(
            f"One shard of {length} tokens does not show whether the attention mask is a sliding "
            f"window of {window}. Use longer sequences or fewer ranks, or train without splitting "
            "sequences."
        )
    assert isinstance(mask, LazyMask)
    ignored = (
        any(reply[2] == MaskResult.IGNORED for reply in replies)
        and mask.description.get("attention_mask") is None
    )
    if ignored:
        mask.full_layout = Spans.causal(rows, full_spans.length, window)
    else:
        mask.full_layout = dataclasses.replace(full_spans, window=window)
    return mask.full_layout


def _read_mask(
    mask: LazyMask | Tensor,
    rows: int,
    full_length: int,
    length: int,
    position_ids: Tensor | None,
    device: torch.device,
) -> tuple[int | None, bool, MaskResult]:
    """Return the facts that the mask of this rank's tokens shows, for `resolve_full_mask`, which
    compares the facts of all ranks. The three values are the length of the sliding window (None: no
    window), True if no other window is possible, and a `MaskResult` about packed documents.

    Args:
        mask: the model's mask.
        rows: number of rows in the batch.
        full_length: number of tokens in a full sequence.
        length: number of this rank's tokens in a row.
        position_ids: [1 or B, length], of these tokens.
        device: device for comparisons of masks.
    """
    if isinstance(mask, Tensor) or mask.description.get("use_vmap", False):
        return None, False, MaskResult.REFUSED
    description = mask.description
    padding = description.get("attention_mask")
    window = description.get("local_size")
    plain = description["mask_function"] is causal_mask_function
    packed = None
    if padding is None and position_ids is not None:
        packed = find_packed_sequence_indices(position_ids.expand(rows, -1))
    else:
        padding = None if padding is None or bool(padding.all()) else padding
    ends_in_sight = window is None or window < length
    everywhere = functools.partial(
        agrees, Spans.causal(1, full_length, window), description, None, device
    )
    if packed is not None:
        if not plain and agrees(
            Spans(length, rows_of(rows, length, None, packed), window), description, None, device
        ):
            return window, ends_in_sight, MaskResult.KNOWN
        if not agrees(Spans.causal(rows, length, window), description, None, device):
            return window, False, MaskResult.REFUSED
        return window, plain or everywhere(), MaskResult.IGNORED
    if not agrees(
        Spans(length, rows_of(rows, length, padding, None), window), description, padding, device
    ):
        return window, False, MaskResult.REFUSED
    return window, plain or everywhere(), MaskResult.NOTHING
