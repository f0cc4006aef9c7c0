"""torch's context parallelism, which accelerate's `cp_size`, HF Trainer and TRL's trainers enter around every step.

Within `torch.distributed.tensor.experimental.context_parallel` a closure stands in for `scaled_dot_product_attention`.
Streamed attention does not call it. It takes the process group and the order of the shards from there, and streamed layers
gather keys and values themselves (`sharded/gathered.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - torch's own convention

from streambp.distributed.ulysses import SplitOver
from streambp.errors import UnsupportedModelError
from streambp.known_names import (
    CONTEXT_PARALLEL,
    CONTEXT_PARALLEL_BALANCED,
    CONTEXT_PARALLEL_MESH,
    CONTEXT_PARALLEL_OPTIONS,
)


def replaced_attention() -> Any:
    """What stands in for torch's own `scaled_dot_product_attention`, to compare with another time's.

    Context parallelism puts another closure in place in each step, and one word stands for all of them.
    """
    function = F.scaled_dot_product_attention
    if (getattr(function, "__module__", None) or "").startswith(CONTEXT_PARALLEL):
        return CONTEXT_PARALLEL
    return function if isinstance(function, Hashable) else id(function)


def find_context_parallel() -> SplitOver | None:
    """What is at work now, if it is.

    Raises:
        UnsupportedModelError: it is, but its mesh or its order is not where torch 2.11 to 2.13 keep them.
    """
    function = F.scaled_dot_product_attention
    if not (getattr(function, "__module__", None) or "").startswith(CONTEXT_PARALLEL):
        return None
    try:
        mesh = inspect.getclosurevars(function).nonlocals[CONTEXT_PARALLEL_MESH]
        options = function.__globals__[CONTEXT_PARALLEL_OPTIONS]
        return SplitOver(mesh.get_group(), bool(getattr(options, CONTEXT_PARALLEL_BALANCED)))
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise UnsupportedModelError(
            "torch's context parallelism splits the sequence over ranks, but its mesh of one dimension or the order of its "
            f"shards is not where torch 2.11 to 2.13 keep them ({type(error).__name__}: {error}). Use one of these "
            "versions and a mesh of one dimension, or run this model unpatched (streambp.unpatch(model))."
        ) from error
