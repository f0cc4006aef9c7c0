"""Sequences that are split over ranks: not supported yet, and refused, because they would go wrong silently.

DeepSpeed Ulysses stands in for the attention function that the model's config names, torch's context parallelism for
`scaled_dot_product_attention`. Streamed attention goes through neither, so every rank would attend to its own shard alone.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface

from streambp.errors import UnsupportedModelError


def refuse_split_sequences(implementation: str | None) -> None:
    """Raise if Ulysses or torch's context parallelism is at work.

    Args:
        implementation: the attention implementation that the model's config names.
    """
    ulysses = AttentionInterface().get(implementation or "sdpa")
    by = None
    if (getattr(ulysses, "__module__", None) or "").startswith("deepspeed"):
        by = "DeepSpeed Ulysses (ALST)"
    if (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith("torch.distributed"):
        by = "torch's context parallelism"
    if by is not None:
        raise UnsupportedModelError(
            f"{by} splits the sequence over ranks; a streamed layer would attend to this rank's shard alone. Train without "
            "it: streaming takes the place of sequence parallelism up to the memory of one GPU and its host "
            "(StreamConfig(offload='cpu')), or run this model unpatched (streambp.unpatch(model))."
        )
