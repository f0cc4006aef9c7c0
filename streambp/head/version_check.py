"""Detect changes of tensors.

A tensor's version counts torch's own writes. Writes through `.data` or a pointer do not count,
although many optimizers, weight averages and engines use them. Some entries are therefore stored as
well. This is no proof: an update that changes none of the SAMPLE entries is not detected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from streambp.device import has_data

SAMPLE_SIZE = 256


class VersionCheck:
    """Snapshot of tensors, to detect whether they are changed in place later, for example between
    forward and backward.

    Args:
        tensors: tensors whose version counters are stored; torch's in-place operations increase the
            counters.
        sampled: tensors of which SAMPLE_SIZE entries are stored. Changed entries reveal writes
            through `.data`, which do not increase the counters.
    """

    def __init__(self, tensors: Sequence[Tensor], sampled: Sequence[Tensor]) -> None:
        self._versions = [
            (tensor, tensor._version) for tensor in tensors if not tensor.is_inference()
        ]
        plain = [
            x for x in sampled if type(x) in (Tensor, nn.Parameter) and has_data(x) and x.numel()
        ]
        self._entries = [(tensor, tensor.shape, _entries(tensor)) for tensor in plain]

    def written_tensor(self) -> Tensor | None:
        """Return the first of the `tensors` [...] whose version counter has changed since the
        snapshot; None if there is none."""
        return next(
            (tensor for tensor, version in self._versions if tensor._version != version), None
        )

    def changed_tensor(self) -> Tensor | None:
        """Return the first of the `sampled` tensors [...] whose stored entries differ from its
        current entries; None if there is none."""
        for tensor, shape, entries in self._entries:
            if not has_data(tensor):
                continue
            if tensor.shape != shape or not torch.allclose(
                _entries(tensor), entries, rtol=0.0, atol=0.0, equal_nan=True
            ):
                return tensor
        return None


def _entries(tensor: Tensor) -> Tensor:
    """Return at most SAMPLE_SIZE entries of a tensor, at evenly spread indices, as a
    one-dimensional tensor. A later check compares them with the entries at the same indices."""
    with torch.no_grad():
        count = min(SAMPLE_SIZE, tensor.numel())
        # [count]
        indices = (
            torch.arange(count, device=tensor.device) * (tensor.numel() - 1) // max(count - 1, 1)
        )
        return tensor.detach()[torch.unravel_index(indices, tensor.shape)]
