"""Answer experts' reads of their routing on tensors without data, with an equal share of the tokens
for each expert.

Some families (dbrx, jetmoe, longcat_flash) do not multiply all experts together. Their code reads
which experts were selected and by which tokens, and computes the experts in turn. The reads are of
two kinds:

    nonzero    on a flag for each expert: all experts were selected. On an expert's row of a
               one-hot matrix: its share of the (token, expert) pairs
    to a list  of the number of tokens of each expert: their shares

Shares are integers; the first experts get the remainder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streambp.planner.work import aten

TOP_K = aten.topk.default
VALUE_READERS = frozenset({aten.nonzero.default, aten._to_copy.default})


def answer(
    func: Any, tensor: Tensor, rows: int, experts: int
) -> Tensor | tuple[tuple[int, int], torch.dtype] | None:
    """Return an assumed result for an operation that reads values of a tensor without data [...]
    (on meta, or fake), when a step of an MoE model is counted. None unless the tensor has a form in
    which models store the routing of tokens to experts.

    Each expert gets an equal share of the tokens. The kind of result depends on the operation. A
    cast to the CPU gets a tensor [experts] with data, the number of tokens of each expert. A
    `nonzero` gets a pair (shape, dtype), from which the caller makes a tensor without data.

    Args:
        func: the operation, `nonzero` or a cast that copies to the CPU (`_to_copy`).
        tensor: the operation's argument.
        rows: number of indices that the run's latest `topk` returned. That `topk` is assumed to
            have selected experts, so each index is a (token, expert) pair. 0: no `topk` ran so far.
        experts: number of experts; 0: unknown so far.
    """
    if func is aten._to_copy.default:
        if (
            tensor.dim() != 1
            or not rows
            or tensor.is_floating_point()
            or tensor.dtype == torch.bool
        ):
            return None
        share, remainder = divmod(rows, tensor.shape[0])
        shares = [share + (expert < remainder) for expert in range(tensor.shape[0])]
        return torch.tensor(shares, dtype=torch.long, device="cpu").to(tensor.dtype)  # [experts]
    if tensor.dtype == torch.bool:
        if tensor.dim() == 1:
            return ((tensor.shape[0], 1), torch.long)
        return None
    if experts:
        return ((-(-tensor.numel() // experts), tensor.dim()), torch.long)
    return None
