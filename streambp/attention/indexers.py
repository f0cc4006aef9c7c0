"""Run the indexers of sparse attention, which pick the keys that each query of a chunk reads.

[Note: indexers] An indexer (DeepSeek V3.2, GLM 5) scores all keys up to a query in each of its
heads, and picks the highest sums. An indexer has no gradient. The model's own forward is called for
a few queries at a time. So its scores [B, queries, heads, keys] in float32 take no more than
`MAX_SCORE_BYTES` bytes. The indexer's keys [B, T, D] are collected over the chunks and dropped
after the forward. The picks are saved for backward, whose recomputation does not score again.
Rounding could make a second scoring choose another key than forward did, and the gradient would be
another function's. A refill, a pass at the start of backward that recomputes K and V alone, needs
no picks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streambp.attention.picked_keys import visible_keys
from streambp.attention.prefix import ChunkAttention, PrefixChunkAttention, Stage
from streambp.cache import ChunkCache
from streambp.cache_arguments import cache_parameters
from streambp.known_names import INDEX_HEADS, INDEXER
from streambp.tensors import rebuild, restoring_iterator

# bytes of an indexer's scores in all of its heads; its operators hold a few copies
MAX_SCORE_BYTES = 2**28


def indexers_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside `module` that pick the keys of each query, for sparse attention."""
    return [part for part in module.modules() if INDEXER in type(part).__name__]


@contextlib.contextmanager
def pick_keys(indexers: Sequence[nn.Module], chunk_attention: ChunkAttention) -> Iterator[None]:
    """Context manager in which indexers pick the keys for the queries of one chunk. An indexer is a
    module of sparse attention that picks keys for each query. Called in backward, the indexers
    return the picks that forward saved. The indexers' `forward` is replaced meanwhile.

    Args:
        indexers: the layer's indexers.
        chunk_attention: the object that computes the chunk's attention. The object has the saved
            picks (`picks`), and receives the picks of this chunk (`chunk_picks`).
    """
    assert isinstance(chunk_attention, PrefixChunkAttention)
    restore = restoring_iterator([(vars(indexer), "forward") for indexer in indexers])
    try:
        for number, indexer in enumerate(indexers):
            indexer.forward = functools.partial(
                _pick, indexer, indexer.forward, number, chunk_attention
            )  # type: ignore[method-assign]
        yield
    finally:
        collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way


def _pick(
    indexer: nn.Module,
    forward: Callable[..., Tensor],
    number: int,
    chunk_attention: PrefixChunkAttention,
    /,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return the indices of the keys that the chunk's queries read, [B, C, k] in int32. Indices
    that forward saved are returned without a call of the indexer. A pass that recomputes K and V
    alone gets k = 0, because it ends before attention.

    Args:
        indexer: module of sparse attention that picks keys.
        forward: the indexer's own forward.
        number: the indexer's index within the layer.
        chunk_attention: the object that computes the chunk's attention, and has the picks of
            forward.
        args: positional arguments of the indexer's call.
        kwargs: keyword arguments of the indexer's call.
    """
    arguments = dict(
        inspect.signature(type(indexer).forward).bind(indexer, *args, **kwargs).arguments
    )
    arguments.pop(next(iter(arguments)))
    x: Tensor = next(
        value for value in arguments.values() if isinstance(value, Tensor)
    )  # [B, C, h]
    if chunk_attention.stage is Stage.REFILL:
        # the layer stops before reading the picks
        return x.new_empty(*x.shape[:2], 0, dtype=torch.int32)
    if chunk_attention.picks is not None:
        picks = chunk_attention.picks[number]
    else:
        with torch.no_grad():
            picks = _pick_in_parts(indexer, forward, number, chunk_attention, arguments, x)
    chunk_attention.chunk_picks.append(picks)
    return picks


def _pick_in_parts(
    indexer: nn.Module,
    forward: Callable[..., Tensor],
    number: int,
    chunk_attention: PrefixChunkAttention,
    arguments: dict[str, Any],
    x: Tensor,
) -> Tensor:
    """Return the keys [B, C, k] that an indexer picks for the queries x [B, C, h]. The indexer is
    called for a few queries at a time, because the scores of all pairs would be large.

    Args:
        indexer: module of sparse attention that picks keys.
        forward: the indexer's own forward.
        number: the indexer's index within the layer.
        chunk_attention: the object that computes the chunk's attention.
        arguments: the arguments of the indexer's call, by name.
        x: the hidden states from which the indexer computes its queries.
    """
    chunk = chunk_attention.chunk
    rows = x.shape[0]
    heads: int = getattr(indexer, INDEX_HEADS)
    caches = cache_parameters(type(indexer).forward)
    step = max(1, MAX_SCORE_BYTES // (4 * heads * chunk.stop))
    picks: list[Tensor] = []
    for row in range(rows):
        parts = []
        for start in range(chunk.start, chunk.stop, step):
            stop = min(start + step, chunk.stop)
            # [1, queries, k]
            parts.append(
                forward(**_part(arguments, caches, number, chunk_attention, row, rows, start, stop))
            )
        # The first queries may have fewer keys: they pick all, and key 0 repeatedly.
        widest = parts[-1].shape[-1]
        picks.append(
            torch.cat(
                [torch.nn.functional.pad(part, (0, widest - part.shape[-1])) for part in parts], 1
            )
        )
    return picks[0] if rows == 1 else torch.cat(picks)


def _part(
    arguments: dict[str, Any],
    caches: tuple[str, ...],
    number: int,
    chunk_attention: PrefixChunkAttention,
    row: int,
    rows: int,
    start: int,
    stop: int,
) -> dict[str, Any]:
    """Return the arguments of an indexer's call for queries [start, stop) of one row. The call
    picks the keys for these few queries alone.

    Args:
        arguments: arguments for all queries of the chunk, by name.
        caches: names of the arguments that take a cache.
        number: the indexer's index within the layer.
        chunk_attention: the object that computes the chunk's attention.
        row: index of the row.
        rows: number of rows of the batch.
        start: first query, as a position in the full sequence.
        stop: end of the queries, exclusive, as a position in the full sequence.
    """
    prefix = chunk_attention.prefix
    chunk = chunk_attention.chunk

    def queries_of(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[0] not in (1, rows) or x.shape[1] != chunk.stop - chunk.start:
            return x
        return _row(x, row)[:, start - chunk.start : stop - chunk.start]

    def read(k: Tensor, placeholder: Tensor) -> tuple[Tensor, Tensor]:
        """Store an indexer's keys k [1, 1, queries, D], and return the indexer's keys of all tokens
        up to the last query, [1, 1, stop, D]. The indexer calls this function as its cache.
        `placeholder`, which takes the place of values in the cache's interface, is returned
        unchanged."""
        keys = prefix.indexed.keys.get(number)
        if keys is None:
            # [B, T, D]
            keys = prefix.indexed.keys[number] = k.new_empty(rows, prefix.length, k.shape[-1])
        keys[row, start:stop] = k[0, 0]
        return keys[row, :stop][None, None], placeholder

    part: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in caches:
            part[name] = ChunkCache(start, read)
        elif value is chunk_attention:
            device = next(x for x in arguments.values() if isinstance(x, Tensor)).device
            tile = visible_keys(prefix.layout, start, stop, 0, stop, device)
            part[name] = _row(tile, row)[:, 0]  # [1, queries, stop]
        else:
            part[name] = rebuild(value, queries_of)
    return part


def _row(x: Tensor, row: int) -> Tensor:
    """Return row number `row` of x [B, ...] as [1, ...], for an indexer's call on one row. An x [1,
    ...] that serves all rows is returned unchanged."""
    return x if len(x) == 1 else x[row : row + 1]
