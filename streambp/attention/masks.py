"""Turn transformers' description of a mask into spans (the keys that each query reads), without
ever building a [T, T] tensor.

transformers builds masks from index functions. `LazyMask` replaces a mask: it stores the
description and does not call the index function. `resolve` reads the spans from the known parts
(2-D padding, window, packing). The index function then confirms the spans at their edges. If a
query's keys are no interval, the mask becomes a `DenseMask`, built tile by tile.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
    sdpa_mask,
)

from streambp.attention.mask_scan import (
    SCAN_TILE_SIZE,
    find_barriers,
    find_empty,
    find_reach,
    reads,
)
from streambp.attention.spans import Block, BlockKind, QueryRun, Spans, Tiling
from streambp.chunks import Barrier
from streambp.device import has_data
from streambp.errors import UnsharedError, UnsupportedMaskError
from streambp.known_names import DOCUMENT_ENDS

# types of arguments without masks
MASKLESS_TYPES = frozenset({Tensor, tuple, list, bool, type(None)})


class LazyMask:
    """Attention mask stored as the arguments of transformers' mask functions (of `sdpa_mask`, for
    example), in place of a tensor with T^2 elements.

    Attributes:
        description: arguments of transformers' mask function.
        layout: keys that each query may read, the cached result of `resolve` for all layers that
            share the mask; None: no result yet.
        bidirectional_layout: cached result of `resolve` for layers whose attention may read ahead;
            None: no result yet.
        full_layout: cached result of `resolve_full_mask` for sequences that are split over ranks;
            None: no result yet.
        document_source: name of the argument that marks the documents of packed rows, and the
            number of documents; None: no documents.
        ends: a tuple for each row, of 0 and the end positions of its packed documents. Used for
            models whose mask functions do not separate documents. None: the description alone
            defines the documents.
        flash_ends: 0 and the end positions of a single row's documents, if the unpatched layer
            attends by FlashAttention, which separates documents that no mask separates. None: there
            are none.
        tree: function from the sliding window (None: no window) to the keys that each query reads,
            if the batch's rows are merged into one packed row (`prefixes/tree.py`). None: no packed
            row.

    Raises:
        UnsupportedMaskError: the argument `attention_mask` is not 2-D.
    """

    def __init__(self, **description: Any) -> None:
        padding = description.get("attention_mask")
        if isinstance(padding, Tensor) and padding.dim() != 2:
            raise UnsupportedMaskError(
                f"The attention mask has shape {tuple(padding.shape)}, of which transformers makes "
                "no mask. Pass it 2-D, [B, T] with 1 for tokens and 0 for padding, or 4-D, [B or "
                "1, heads or 1, T, T]."
            )
        self.description = description
        self.layout: Spans | DenseMask | None = None
        self.bidirectional_layout: Spans | DenseMask | None = None
        self.full_layout: Spans | None = None
        self.document_source: tuple[str, int] | None = None
        self.ends: tuple[tuple[int, ...], ...] | None = None
        self.flash_ends: list[int] | None = None
        self.tree: Callable[[int | None], Spans] | None = None
        self._keys_read: Tensor | None = None
        self._has_empty_row: bool | None = None
        self._has_empty_window: bool | None = None

    @property
    def is_bidirectional(self) -> bool:
        """True if each query reads all keys but padding, as in an encoder or in cross-attention."""
        return self.description.get("mask_function") is bidirectional_mask_function

    @property
    def has_empty_row(self) -> bool:
        """True if a row of the batch has no tokens but padding. False for a mask on the meta
        device, which has no data. The result is cached, because all layers share the mask and the
        first call waits for the device."""
        if self._has_empty_row is None:
            padding: Tensor | None = self.description.get("attention_mask")
            self._has_empty_row = (
                padding is not None and has_data(padding) and not bool(padding.any(-1).all())
            )
        return self._has_empty_row

    @property
    def has_empty_window(self) -> bool:
        """True if a query reads no key, because all keys that the mask allows are padding. This
        happens in a sliding window, for example. False for a mask on the meta device, which has no
        data. The result is cached, because all layers share the mask. The scan costs T^2 mask
        elements."""
        if self._has_empty_window is None:
            self._has_empty_window = self._find_empty_window()
        return self._has_empty_window

    def _find_empty_window(self) -> bool:
        padding: Tensor | None = self.description.get("attention_mask")
        if self.is_bidirectional or padding is None or not has_data(padding) or bool(padding.all()):
            return False
        batch_size, length = padding.shape
        mask = DenseMask(batch_size, length, self)
        empty, _ = find_empty(
            lambda q0, q1, k0, k1: reads(mask.tile(q0, q1, k0, k1, padding.device)),
            length,
            padding.device,
        )
        return empty is not None

    def to_key_mask(self, is_added: bool) -> Tensor | None:
        """Return the mask of cross-attention or of an encoder as [B, 1, 1, S], because it is the
        same for all queries; None if all S keys are read. The result is cached, because all layers
        share the mask.

        Args:
            is_added: True: the mask is added to the scores, as in eager attention: 0 for keys that
                are read, and the lowest number of the model's dtype for others. False: the mask is
                bool, True for keys that are read.
        """
        padding: Tensor | None = self.description.get("attention_mask")
        if padding is None:
            return None
        if self._keys_read is None:
            read = padding.bool()[:, None, None, :]
            self._keys_read = read
            if is_added:
                dtype = self.description["dtype"]
                scores = torch.zeros(read.shape, dtype=dtype, device=read.device)
                self._keys_read = scores.masked_fill(~read, torch.finfo(dtype).min)
        return self._keys_read

    def repeat(self, *sizes: int) -> Tensor:
        """Return the mask of cross-attention as a tensor [B, 1, 1, S] in bool, repeated like a
        tensor by torch's `repeat`. True means that a key is read. The pooling head of SigLIP 2
        calls this method, because the head uses torch's own attention.

        Raises:
            UnsupportedMaskError: the mask is not the same for all queries.
        """
        mask = self.to_key_mask(is_added=False)
        if mask is None or not self.is_bidirectional:
            raise UnsupportedMaskError(
                "The model reads its attention mask itself, and the mask is not one of keys alone. "
                "Run this model unpatched (streambp.unpatch(model))."
            )
        return mask.repeat(*sizes)

    def __getitem__(self, index: Any) -> LazyMask:
        """Return the mask itself if the index selects all queries and keys. Some models slice their
        mask to the current queries and keys, which are the whole sequence in streambp.

        Raises:
            UnsupportedMaskError: the index selects a part of the positions.
        """
        lengths = (None, None, self.description["q_length"], self.description["kv_length"])
        parts = index if isinstance(index, tuple) else (index,)
        for part, length in zip(parts, lengths, strict=False):
            all_positions = isinstance(part, slice) and (
                length is None or range(length)[part] == range(length)
            )
            if not all_positions and part is not Ellipsis:
                raise UnsupportedMaskError(
                    f"The model cuts its attention mask to {part} of {length} positions; streambp "
                    "attends whole sequences. Run this model unpatched (streambp.unpatch(model))."
                )
        return self


@dataclasses.dataclass(frozen=True)
class DenseMask:
    """Attention mask that may allow any set of keys for a query. Kernels receive parts [B or 1, H
    or 1, q, k] of the mask: bool (True: the query reads the key), or values that are added to the
    scores.

    Attributes:
        batch_size: rows of the batch.
        length: tokens of a row.
        source: the mask tensor, or the `LazyMask` from which parts are built.
        barriers: positions where no chunk may end, because an earlier query would read a later key.
            [Note: chunk ends]
        reach: intervals (first key, last key + 1), one for each SCAN_TILE_SIZE (a constant)
            consecutive queries. The queries read no key outside of the interval. Used in
            bidirectional layers, where a chunk's queries have the keys of all tokens; (): a chunk's
            queries have the keys up to the chunk's end.
        caches: results that other modules compute once for this mask.
    """

    batch_size: int
    length: int
    source: LazyMask | Tensor
    barriers: tuple[Barrier, ...] = ()
    reach: tuple[tuple[int, int], ...] = ()
    caches: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def blocks(self, start: int, stop: int, tiling: Tiling) -> list[Block]:
        """Return rectangles (blocks) that cover queries [start, stop) and their keys. The keys of a
        block end at its last query if the mask is causal, otherwise at `stop`. Bidirectional layers
        set `reach`: the blocks then cover only the interval of keys that `reach` has for the
        queries.

        Args:
            start: first query.
            stop: end of the queries, exclusive.
            tiling: sizes of the rectangles that the kernel prefers.
        """
        tiling = tiling.masked or tiling
        blocks = list[Block]()
        q_step = tiling.q_block or SCAN_TILE_SIZE
        k_step = tiling.k_block or SCAN_TILE_SIZE
        for q0 in range(start, stop, q_step):
            q1 = min(q0 + q_step, stop)
            first = 0
            end = stop if self.barriers else q1
            if self.reach:
                read = self.reach[q0 // SCAN_TILE_SIZE : -(-q1 // SCAN_TILE_SIZE)]
                first = min(start for start, _ in read)
                end = max(stop for _, stop in read)
            for k0 in range(first, end, k_step):
                blocks.append(
                    Block(BlockKind.MASK, 0, self.batch_size, q0, q1, k0, min(k0 + k_step, end))
                )
        return blocks

    def over_all_keys(self, device: torch.device) -> DenseMask:
        """Return a copy of this mask for a bidirectional layer, in which a chunk's queries have the
        keys of all tokens, later ones included. The copy has no `barriers`, because chunks may then
        end anywhere. The copy's `reach` has the intervals of keys that the queries read. The result
        is cached.

        Args:
            device: the device on which to find the keys that are read.
        """
        mask: DenseMask | None = self.caches.get(DenseMask)
        if mask is None:
            reach = find_reach(
                lambda q0, q1, k0, k1: reads(self.tile(q0, q1, k0, k1, device)),
                self.length,
                device,
            )
            mask = dataclasses.replace(self, barriers=(), reach=reach, caches={})
            self.caches[DenseMask] = mask
        return mask

    def tile(self, q0: int, q1: int, k0: int, k1: int, device: torch.device) -> Tensor:
        """Return the mask of queries [q0, q1) and keys [k0, k1) on `device`, [B or 1, H or 1, q,
        k]. The dtype is bool (True: the query reads the key), or a floating dtype for a mask that
        is added to the scores."""
        if isinstance(self.source, Tensor):
            return self.source[:, :, q0:q1, k0:k1].to(device)
        description = self.source.description
        return sdpa_mask(
            batch_size=self.batch_size,
            q_length=q1 - q0,
            kv_length=k1 - k0,
            q_offset=q0,
            kv_offset=k0,
            mask_function=description["mask_function"],
            attention_mask=description.get("attention_mask"),
            allow_is_causal_skip=False,
            use_vmap=description.get("use_vmap", False),
            device=device,
        )


def resolve(
    mask: LazyMask | Tensor | None,
    batch_size: int,
    length: int,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    device: torch.device,
    bidirectional: bool = False,
) -> Spans | DenseMask:
    """Return the keys that each query of a batch may read: intervals of keys (`Spans`) if the mask
    allows, otherwise a mask (`DenseMask`).

    Args:
        mask: a `LazyMask`, a 4-D mask tensor from the user, or None for plain causal.
        batch_size: rows of the batch.
        length: T.
        position_ids: [1 or B, T]; positions that start again mark packed documents, unless there is
            a 2-D padding mask.
        cu_seq_lens: [documents + 1], document boundaries of a single packed row; these take
            precedence over plain position_ids.
        device: the batch's device.
        bidirectional: True for attention modules that may read keys behind the query
            (is_causal=False). The result may then be intervals that end behind the query. False for
            causal attention modules.

    Raises:
        UnsharedError: the batch is computed as one packed row, and the model's mask is not simply
            causal (with or without a sliding window).
    """
    if isinstance(mask, Tensor):
        return _from_tensor(mask, batch_size, length, device)
    if mask is None:
        mask = LazyMask(mask_function=causal_mask_function, q_length=length, kv_length=length)
    if bidirectional and mask.tree is None:
        if mask.bidirectional_layout is None:
            mask.bidirectional_layout = rectangular_spans(mask, batch_size, length, device)
            _note_documents(mask, batch_size, length, position_ids, device)
        return mask.bidirectional_layout
    if mask.layout is None:
        if mask.tree is None:
            mask.layout = _from_description(
                mask, batch_size, length, position_ids, cu_seq_lens, device
            )
        else:
            # The packed row gets a tree if the mask of a single row is causal, with or without a
            # window. A query's keys then come before the query in the packed row.
            plain = _from_description(mask, 1, length, None, None, device)
            if not isinstance(plain, Spans) or plain != Spans.causal(1, length, plain.window):
                raise UnsharedError("the attention mask is more than causal within a window")
            mask.layout = mask.tree(plain.window)
    return mask.layout


def rectangular_spans(
    mask: LazyMask, batch_size: int, length: int, device: torch.device
) -> Spans | DenseMask:
    """Return the keys that each query reads, for attention that may read ahead. The result is a
    `Spans` with one interval for each row if all queries of a row read the same consecutive tokens.
    Otherwise the result is a `DenseMask`, which tells for each pair of a query and a key if the
    query reads the key.

    Args:
        mask: the mask's description.
        batch_size: rows of the batch.
        length: T.
        device: device of the batch.

    Raises:
        UnsupportedMaskError: the mask covers another number of keys.
    """
    arguments = mask.description
    if (arguments["q_length"], arguments["kv_length"]) != (length, length):
        raise UnsupportedMaskError(
            f"The attention mask covers {arguments['kv_length']} keys, but the sequence has "
            f"{length} tokens. Pass an attention_mask of the same length as input_ids."
        )
    padding: Tensor | None = arguments.get("attention_mask")
    runs: list[tuple[QueryRun, ...]] = [(QueryRun(0, length, 0, length),)] * batch_size
    if mask.flash_ends is not None:
        if not mask.is_bidirectional:
            return _dense(_within_documents(mask, device), batch_size, length, device)
        runs = [tuple(QueryRun(a, b, a, b) for a, b in itertools.pairwise(mask.flash_ends))]
    elif padding is not None:
        runs = []
        for row in padding.bool().cpu():
            tokens = row.nonzero().flatten()
            if not len(tokens):
                runs.append(())
                continue
            first = int(tokens[0])
            end = int(tokens[-1]) + 1
            if len(tokens) < end - first:  # padding between tokens
                return _dense(mask, batch_size, length, device)
            runs.append((QueryRun(0, length, first, end),))
    if mask.is_bidirectional or _reads_all(mask, batch_size, length, padding, device):
        return Spans(length, tuple(runs))
    return _dense(mask, batch_size, length, device)


def find_flash_documents(
    mask: LazyMask,
    batch_size: int,
    length: int,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
) -> None:
    """Record in `mask.flash_ends` and `mask.document_source` which documents the unpatched
    model's FlashAttention separates: those that cu_seq_lens marks, or those of a single row that
    position_ids mark. FlashAttention looks for no documents if the row has padding.

    Args:
        mask: the mask of a layer that may read ahead.
        batch_size: rows of the batch.
        length: T.
        position_ids: [1 or B, T]; None: the layer gets no positions.
        cu_seq_lens: [documents + 1], document boundaries of a single packed row; None: none.

    Raises:
        UnsupportedMaskError: cu_seq_lens does not rise from 0 to the length of a single row.
    """
    padding = mask.description.get("attention_mask")
    if padding is not None and not (has_data(padding) and bool(padding.all())):
        return
    if mask.flash_ends is not None:
        return
    if cu_seq_lens is not None:
        mask.flash_ends = _ends_of(cu_seq_lens, batch_size, length)
        mask.document_source = DOCUMENT_ENDS, len(mask.flash_ends) - 1
        return
    if batch_size > 1 or position_ids is None or position_ids.dim() != 2:
        return
    packed = find_packed_sequence_indices(position_ids) if has_data(position_ids) else None
    if packed is not None:
        (runs,) = rows_of(1, length, None, packed)
        mask.flash_ends = [0, *(run.q1 for run in runs)]
        mask.document_source = "position_ids", len(runs)


def _within_documents(mask: LazyMask, device: torch.device) -> LazyMask:
    """Return a mask like `mask` in which no query reads a key of another document of
    `mask.flash_ends`. `device` is the device of the batch."""
    assert mask.flash_ends is not None
    sizes = torch.tensor(mask.flash_ends, device="cpu").diff()
    number = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes).to(device)
    function = and_masks(
        packed_sequence_mask_function(number[None]), mask.description["mask_function"]
    )
    return LazyMask(**{**mask.description, "mask_function": function})


def _note_documents(
    mask: LazyMask,
    batch_size: int,
    length: int,
    position_ids: Tensor | None,
    device: torch.device,
) -> None:
    """Record in `mask.document_source` that position_ids mark packed documents, if the mask of
    attention that may read ahead separates the documents. Neighbours read each other in each such
    mask unless a document ends between them.

    Args:
        mask: the mask, with its `bidirectional_layout`.
        batch_size: rows of the batch.
        length: T.
        position_ids: [1 or B, T]; None: the layer gets no positions.
        device: device of the batch.
    """
    layout = mask.bidirectional_layout
    if mask.document_source is not None or not isinstance(layout, DenseMask):
        return
    if mask.description.get("attention_mask") is not None:
        return
    if position_ids is None or position_ids.dim() != 2 or not has_data(position_ids):
        return
    packed = find_packed_sequence_indices(position_ids.expand(batch_size, -1))
    if packed is None:
        return
    row, last = (packed[:, 1:] != packed[:, :-1]).nonzero()[0].tolist()
    read = layout.tile(last + 1, last + 2, last, last + 1, device)
    if not bool(read.expand(batch_size, -1, -1, -1)[row].any()):
        count = sum(map(len, rows_of(batch_size, length, None, packed)))
        mask.document_source = "position_ids", count


def _reads_all(
    mask: LazyMask, batch_size: int, length: int, padding: Tensor | None, device: torch.device
) -> bool:
    """True if each query of a mask reads all keys but padding, so that one interval for each row
    describes the mask. Compares all T^2 elements of the mask, SCAN_TILE_SIZE^2 at a time, and stops
    at the first difference.

    Args:
        mask: the mask's description.
        batch_size: rows of the batch.
        length: T.
        padding: [B, T], True for tokens; None: no padding.
        device: the device on which to compare.
    """
    dense = DenseMask(batch_size, length, mask)
    for q0 in range(0, length, SCAN_TILE_SIZE):
        for k0 in range(0, length, SCAN_TILE_SIZE):
            k1 = min(k0 + SCAN_TILE_SIZE, length)
            read = dense.tile(q0, min(q0 + SCAN_TILE_SIZE, length), k0, k1, device)
            expected: Tensor | bool = True
            if padding is not None:
                expected = padding[:, None, None, k0:k1].to(device).bool()
            if not bool((read == expected).all()):
                return False
    return True


def _from_tensor(mask: Tensor, batch_size: int, length: int, device: torch.device) -> DenseMask:
    fits = (
        mask.dim() == 4
        and mask.shape[0] in (1, batch_size)
        and tuple(mask.shape[2:]) == (length, length)
    )
    if mask.dim() == 4 and mask.shape[-2] == 1 < length:
        raise UnsupportedMaskError(
            f"The attention mask has shape {tuple(mask.shape)}, one row of keys for all {length} "
            "queries: each query reads the keys behind it, too. So the attention is bidirectional, "
            "as an encoder's, and a chunk would read what later chunks hold. Use gradient "
            "checkpointing for this model (streambp.unpatch(model)). For a decoder pass the mask "
            f"2-D, [{batch_size}, {length}] with 1 for tokens and 0 for padding."
        )
    if not fits:
        raise UnsupportedMaskError(
            f"The attention mask has shape {tuple(mask.shape)}. For this batch the mask must be "
            f"[{batch_size} or 1, heads or 1, {length}, {length}], or 2-D [{batch_size}, {length}] "
            "with 1 for tokens and 0 for padding."
        )
    if mask.requires_grad and torch.is_grad_enabled():
        raise UnsupportedMaskError(
            "The attention mask requires a gradient, which streambp does not compute. Pass "
            "mask.detach() if it is not trained, or run this model unpatched "
            "(streambp.unpatch(model))."
        )
    if mask.is_meta or isinstance(mask, FakeTensor):  # without data the mask counts as causal
        return DenseMask(batch_size, length, mask)
    if mask.dtype != torch.bool:
        _, harmless = find_empty(
            lambda q0, q1, k0, k1: reads(mask[:, :, q0:q1, k0:k1]), length, mask.device
        )
        if not harmless:
            raise UnsupportedMaskError(
                "The added 4-D attention mask leaves a query without any key, though other "
                "queries or heads read this query's key. Softmax then weighs all keys equally, "
                "later keys too, which chunks cannot compute. Pass a bool mask (True is read): a "
                "query without keys then reads nothing."
            )
    return _dense(mask, batch_size, length, device)


def _from_description(
    mask: LazyMask,
    batch_size: int,
    length: int,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    device: torch.device,
) -> Spans | DenseMask:
    description = mask.description
    if (description["q_length"], description["kv_length"]) != (length, length):
        raise UnsupportedMaskError(
            f"The attention mask covers {description['kv_length']} keys, but the sequence has "
            f"{length} "
            "tokens. Pass an attention_mask of the same length as input_ids."
        )
    padding = description.get("attention_mask")
    window = description.get("local_size")
    if padding is not None and bool(padding.all()):
        padding = None
    plain = description["mask_function"] is causal_mask_function and padding is None
    if mask.ends is not None and padding is None:
        spans = Spans(length, tuple(_documents(list(ends)) for ends in mask.ends), window)
        # the mask separates the documents, or does not
        candidates = (spans, Spans.causal(batch_size, length, window))
        if plain or any(agrees(candidate, description, None, device) for candidate in candidates):
            mask.document_source = "position_ids", sum(map(len, spans.rows))
            return spans
    if plain and cu_seq_lens is None:
        return Spans.causal(batch_size, length)
    if description.get("use_vmap", False):
        return _dense(mask, batch_size, length, device)
    packed = None
    if description.get("attention_mask") is None and not plain and position_ids is not None:
        packed = find_packed_sequence_indices(position_ids.expand(batch_size, -1))
    if packed is not None:
        mask.document_source = (
            "position_ids",
            sum(map(len, rows_of(batch_size, length, None, packed))),
        )
    if cu_seq_lens is not None:
        ends = _ends_of(cu_seq_lens, batch_size, length)
        rows = (_documents(ends),)
        mask.document_source = mask.document_source or (DOCUMENT_ENDS, len(rows[0]))
        if packed is not None and rows != rows_of(batch_size, length, None, packed):
            raise UnsupportedMaskError(
                f"cu_seq_lens ends its documents at {ends[:9]}..., but position_ids restart "
                "elsewhere. Pass only one of the two."
            )
        return Spans(length, rows, window)
    spans = Spans(length, rows_of(batch_size, length, padding, packed), window)
    if agrees(spans, description, padding, device):
        return spans
    return _dense(mask, batch_size, length, device)


def _ends_of(cu_seq_lens: Tensor, batch_size: int, length: int) -> list[int]:
    """Return 0 and the end positions of a packed row's documents, from cu_seq_lens.

    Args:
        cu_seq_lens: [documents + 1], document boundaries.
        batch_size: rows of the batch.
        length: T.

    Raises:
        UnsupportedMaskError: they do not rise from 0 to the length of a single row.
    """
    ends: list[int] = cu_seq_lens.tolist()
    if batch_size != 1 or ends[:1] != [0] or ends[-1] != length or sorted(ends) != ends:
        raise UnsupportedMaskError(
            f"cu_seq_lens is {ends[:9]}... for a batch of {batch_size} x {length}; it must "
            "rise from 0 to the length of a single row. "
            f"{_remedy_of_ends(ends, batch_size, length)}"
        )
    return ends


def spans_of_tokens(
    batch_size: int, length: int, padding: Tensor | None, position_ids: Tensor
) -> Spans:
    """Return the keys that each query of full sequences reads, if attention is causal without a
    window, from the padding and the positions of the tokens. Used where sequences are split over
    ranks.

    Args:
        batch_size: rows of the batch.
        length: T.
        padding: [B, T], True for tokens; None: no padding mask. A padding mask rules out packed
            documents, as in transformers.
        position_ids: [1 or B, T]; positions that start again mark packed documents.

    Raises:
        UnsupportedMaskError: padding lies between the tokens of a row.
    """
    packed = None
    if padding is None:
        packed = find_packed_sequence_indices(position_ids.expand(batch_size, -1))
    rows = rows_of(batch_size, length, padding, packed)
    if padding is not None:
        causal_tokens = [sum(run.q1 - run.q0 for run in runs if run.k1 is None) for runs in rows]
        if causal_tokens != padding.sum(1).tolist():
            raise UnsupportedMaskError(
                "The attention mask masks tokens in the middle of a row. For sequences split over "
                "ranks it must mark padding on the left and on the right only."
            )
    return Spans(length, rows)


def _dense(
    mask: LazyMask | Tensor, batch_size: int, length: int, device: torch.device
) -> DenseMask:
    dense = DenseMask(batch_size, length, mask)
    barriers = find_barriers(
        lambda q0, q1, k0, k1: reads(dense.tile(q0, q1, k0, k1, device)), length, device
    )
    return dataclasses.replace(dense, barriers=barriers)


def rows_of(
    batch_size: int, length: int, padding: Tensor | None, packed: Tensor | None
) -> tuple[tuple[QueryRun, ...], ...]:
    """Return the runs of each row. A run is a range of consecutive queries that read keys by the
    same rule.

    Args:
        batch_size: number of rows.
        length: tokens of a row.
        padding: [B, T], True for tokens; None: no padding mask.
        packed: [B, T], the document number of each token; None: no packed documents.
    """
    if packed is not None:
        rows = []
        for row in packed.cpu():
            changes = (row[1:] != row[:-1]).nonzero().flatten() + 1
            rows.append(_documents([0, *changes.tolist(), length]))
        return tuple(rows)
    if padding is None:
        return Spans.causal(batch_size, length).rows
    rows = []
    for row in padding.cpu():
        tokens = row.nonzero().flatten()
        runs: list[QueryRun] = []
        if len(tokens):
            first = int(tokens[0])
            last = int(tokens[-1]) + 1
            runs.append(QueryRun(first, last, first))
            if last < length:
                runs.append(QueryRun(last, length, first, last))
        rows.append(tuple(runs))
    return tuple(rows)


def _remedy_of_ends(ends: list[int], batch_size: int, length: int) -> str:
    """Return advice for an error message: how the user should change the document boundaries `ends`
    (the values of cu_seq_lens), which do not fit `batch_size` rows of `length` tokens."""
    if batch_size == 1 and ends[:1] == [0] and ends[-1] < length:
        return (
            f"Tokens {ends[-1]} to {length} are in no document: append {length}, so that they are "
            "one more, and set their labels to -100."
        )
    return "Flatten the batch into one row, or leave cu_seq_lens out."


def _documents(ends: list[int]) -> tuple[QueryRun, ...]:
    return tuple(QueryRun(a, b, a) for a, b in itertools.pairwise(ends) if a < b)


def agrees(
    spans: Spans, mask_arguments: dict[str, Any], padding: Tensor | None, device: torch.device
) -> bool:
    """True if a mask function of transformers allows exactly the keys in `spans`. The function is
    called for each query at the edges of its interval: the first and last key must be allowed, and
    the keys just outside must not.

    Args:
        spans: the expected keys of each query.
        mask_arguments: arguments of transformers' mask function; its `mask_function` is called.
        padding: [B, T] in bool, True for tokens; None: no padding.
        device: device of the check.
    """
    first, last = edges(spans, device)  # [B, T] each; an empty span has last < first
    query = torch.arange(spans.length, device=device).expand_as(first)
    row = torch.arange(len(spans.rows), device=device)[:, None].expand_as(first)
    head = torch.zeros_like(row)

    def read(key: Tensor) -> Tensor:
        exists = (key >= 0) & (key < spans.length)
        key = key.clamp(0, spans.length - 1)
        result = mask_arguments["mask_function"](row, head, query, key) & exists
        return result if padding is None else result & padding.to(device)[row, key]

    empty = last < first
    right = read(first) & read(last) & ~read(first - 1) & ~read(last + 1)
    reads_none = ~read(query) & ~read(torch.zeros_like(query))
    return bool(torch.where(empty, reads_none, right).all())


def edges(spans: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query reads, [B, T] each in int64. A query that
    reads no key has last < first. Masks are built from, or compared with, these numbers.

    Args:
        spans: the keys that each query reads.
        device: device of the result.
    """
    first = torch.zeros(len(spans.rows), spans.length, dtype=torch.long, device="cpu")  # [B, T]
    last = torch.full_like(first, -1)
    query = torch.arange(spans.length, device="cpu")
    for row, runs in enumerate(spans.rows):
        for run in runs:
            queries = slice(run.q0, run.q1)
            start = torch.full_like(query[queries], run.k0)
            if spans.window is not None:
                start = torch.maximum(start, query[queries] - spans.window + 1)
            first[row, queries] = start
            last[row, queries] = query[queries] if run.k1 is None else run.k1 - 1
    return first.to(device), last.to(device)


def attention_mask_of(arguments: Mapping[str, Any]) -> Any:
    """Return the mask, among a layer's arguments, that the layer will pass to its attention: the
    first `LazyMask`, or without one the argument attention_mask.

    The argument attention_mask is not always this mask: it may be a padding mask for other modules
    of the layer.
    """
    for value in arguments.values():
        if type(value) in MASKLESS_TYPES:
            continue
        if isinstance(value, LazyMask):
            return value
        if isinstance(value, Mapping):
            for part in value.values():
                if isinstance(part, LazyMask):
                    return part
    return arguments.get("attention_mask")


def replace_masks(value: Any, mask: Callable[[LazyMask], Any]) -> Any:
    """Return a layer's argument `value` with `mask(lazy_mask)` in place of each `LazyMask`, also
    inside dicts. The layer's own forward then gets masks as in the unpatched model."""
    if isinstance(value, Mapping) and any(isinstance(part, LazyMask) for part in value.values()):
        return {key: replace_masks(part, mask) for key, part in value.items()}
    return mask(value) if isinstance(value, LazyMask) else value
