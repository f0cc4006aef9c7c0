"""Layers that attend by themselves over what their cache gives back: the cache they get is the prefix.

Models from before transformers' attention interface (GPT-J, GPT-Neo, CodeGen, BLOOM) call `cache.update(key, value)` and
attend to what it returns. So a chunk's cache returns the keys and values up to the chunk's end, and the mask, which their
model builds whole, is cut to the chunk. Exact, but the scores of one chunk against its prefix exist, as does the mask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streambp.attention.prefix import ChunkMask
from streambp.chunks import Chunk, ChunkPlan
from streambp.errors import UnsupportedMaskError
from streambp.layer.arguments import ChunkCache

PER_KEY = ("alibi",)  # arguments whose last dimension is the keys


def chunk_arguments(named: dict[str, Any], cache: str, mask: ChunkMask) -> dict[str, Any]:
    """The arguments of a chunk for a layer that attends by itself; `cache` is the name of its cache's argument."""
    chunk: Chunk = mask.chunk
    changed = {cache: ChunkCache(chunk.start, mask.read)}
    changed["attention_mask"] = named["attention_mask"][..., chunk.start : chunk.stop, : chunk.stop]
    changed.update({name: named[name][..., : chunk.stop] for name in PER_KEY if isinstance(named.get(name), Tensor)})
    return {**named, **changed}


def why_not(mask: Any, length: int) -> str | None:
    """Why a layer with this mask cannot be cut; None if it can."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or tuple(mask.shape[-2:]) != (length, length):
        return "it attends by itself, without a 4-D attention mask"
    return None


def check_chunk_ends(mask: Tensor, plan: ChunkPlan) -> None:
    """Raise if a query may read a key of a later chunk.

    Some masks are added, some say what is read and some what is not; what they say of the first query and the last key
    means "not read" in a causal one, and the layer's probe shows that it is.
    """
    for chunk in plan:
        if not bool((mask[..., chunk.start : chunk.stop, chunk.stop :] == mask[..., :1, -1:]).all()):
            raise UnsupportedMaskError(
                f"The attention mask lets a query of [{chunk.start}, {chunk.stop}) read a key that comes after its chunk. "
                "streambp needs masks that are causal at every chunk end. Choose another chunk_size, or run this batch "
                "unpatched (streambp.unpatch(model))."
            )
