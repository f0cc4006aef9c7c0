"""Whether tensors still hold what they held.

A tensor's version counts what torch itself writes to it, and not what comes through
`.data` or a pointer, as much of what optimizers, weight averages and engines write does. So some entries are kept as well.
Which is no proof: an update that leaves every one of SAMPLE entries as it was passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from streambp.device import has_data

SAMPLE = 256


class Seen:
    """Tensors as they are now: their versions and, of `sampled` ones, some of their entries."""

    def __init__(self, tensors: Sequence[Tensor], sampled: Sequence[Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        plain = [x for x in sampled if type(x) in (Tensor, nn.Parameter) and has_data(x) and x.numel()]
        self._entries = [(tensor, tensor.shape, _entries(tensor)) for tensor in plain]

    def written(self) -> Tensor | None:
        """One of the tensors [...] that torch wrote to; None if there is none."""
        return next((tensor for tensor, version in self._versions if tensor._version != version), None)

    def changed(self) -> Tensor | None:
        """A sampled tensor [...] that is here and holds something else now."""
        for tensor, shape, before in self._entries:
            if not has_data(tensor):
                continue
            if tensor.shape != shape or not torch.allclose(_entries(tensor), before, rtol=0.0, atol=0.0, equal_nan=True):
                return tensor
        return None


def _entries(tensor: Tensor) -> Tensor:
    """[SAMPLE] or fewer, from all over it."""
    with torch.no_grad():
        count = min(SAMPLE, tensor.numel())
        places = torch.arange(count, device=tensor.device) * (tensor.numel() - 1) // max(count - 1, 1)  # [count]
        return tensor.detach()[torch.unravel_index(places, tensor.shape)]
