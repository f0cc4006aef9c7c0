"""Hooks on tensors that stand for others: they see the gradient, or are refused.

What was made of a stand-in holds the hidden states, and passes its gradient by. A hook that is put on a stand-in first
makes it real, and sees the gradient; one that comes after something was made of it would see nothing, and change nothing.
So `followed` is remembered, and such hooks are refused, as is `torch.autograd.grad` with respect to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from streambp.errors import StreamBPError
from streambp.known_names import TENSOR_HOOKS
from streambp.nested import tensors_in


def note_use(stand_ins: Sequence[Any], result: Any) -> None:
    """`result` was made of them."""
    made = tensors_in(result, Tensor)
    for stand_in in stand_ins:
        stand_in.followed |= any(leaf is not stand_in and leaf.requires_grad for leaf in made)


def refuse_late(func: Any, name: str, args: Any, kwargs: Any, stand_ins: Sequence[Any], instead: str) -> None:
    """Raises StreamBPError where a gradient of a stand-in is asked for that would not be seen.

    Args:
        func, name, args, kwargs: an operation; stand_ins: those among its arguments.
    """
    asked = stand_ins
    if func is torch.autograd.grad:
        wanted = tree_leaves(kwargs.get("inputs", args[1] if len(args) > 1 else None))
        asked = [x for x in stand_ins if any(leaf is x for leaf in wanted)]
    elif name not in TENSOR_HOOKS:
        return
    if any(x.followed and x.written is None for x in asked):
        raise StreamBPError(
            f"{name} comes after something was made of these logits or hidden states, a loss or a part of them, whose "
            "gradient it would not see: they are computed where they are used. Call register_hook or retain_grad before "
            f"anything is made of them, or use {instead}."
        )
