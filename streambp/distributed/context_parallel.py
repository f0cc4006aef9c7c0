"""torch's context parallelism, which accelerate's `cp_size`, HF Trainer and TRL enter for each
step.

`torch.distributed.tensor.experimental.context_parallel` replaces `scaled_dot_product_attention` by
a closure. Streamed attention does not call the closure, but reads the process group and the order
of the shards from it. Streamed layers gather keys and values themselves
(`sharded/gathered_keys.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - torch's own convention

from streambp.distributed.ulysses import SplitGroup
from streambp.errors import UnsupportedModelError
from streambp.known_names import (
    CONTEXT_PARALLEL,
    CONTEXT_PARALLEL_BALANCED,
    CONTEXT_PARALLEL_MESH,
    CONTEXT_PARALLEL_OPTIONS,
)


def attention_key() -> Any:
    """Return a hashable key for the present `torch.nn.functional.scaled_dot_product_attention`. A
    library may replace this function. The key then changes, and streambp tests the layer's
    attention again.

    Torch's context parallelism replaces the function by a new closure in each step. All its
    closures have the same key.
    """
    function = F.scaled_dot_product_attention
    if (getattr(function, "__module__", None) or "").startswith(CONTEXT_PARALLEL):
        return CONTEXT_PARALLEL
    if isinstance(function, Hashable):
        return function
    return id(function)


def find_context_parallel() -> SplitGroup | None:
    """Return the process group of torch's `context_parallel` and the order of its shards
    (`SplitGroup`); None if no `context_parallel` is active now.

    Raises:
        UnsupportedModelError: context parallelism is active, but its device mesh is not where torch
            2.11 to 2.13 store it.
    """
    function = F.scaled_dot_product_attention
    if not (getattr(function, "__module__", None) or "").startswith(CONTEXT_PARALLEL):
        return None
    try:
        mesh = inspect.getclosurevars(function).nonlocals[CONTEXT_PARALLEL_MESH]
        options = function.__globals__[CONTEXT_PARALLEL_OPTIONS]
        return SplitGroup(mesh.get_group(), bool(getattr(options, CONTEXT_PARALLEL_BALANCED)))
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise UnsupportedModelError(
            "torch's context parallelism splits the sequence over ranks, but streambp did not "
            f"find its one-dimensional mesh or its order of shards ({type(error).__name__}: "
            f"{error}). Use torch 2.11 to 2.13 with a mesh of one dimension, or run this model "
            "unpatched (streambp.unpatch(model))."
        ) from error
