"""Compare two runs of a layer with a tolerance for rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from streambp.layer.call import LayerCall
from streambp.layer.choices import ReplayedChoices
from streambp.tensors import replaced

# relative to the layer's addition to its input
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 3e-2  # in half precision, or under autocast
# rounding is a larger part of a token's few scores than of a layer's output, by this factor
SCORES = 4


def coarsest(call: LayerCall, x: Tensor) -> torch.dtype:
    """Return the dtype with the largest eps: of x [..., B, T, h], the layer or autocast."""
    return call.site.coarsest(x.dtype, x.device.type, call.autocast)


def agree(whole: Tensor, pieces: Tensor, residual: Tensor, dtype: torch.dtype) -> bool:
    """True if two runs of a layer differ by no more than rounding.

    Args:
        whole, pieces: [..., B, T, h], the results of the two runs: outputs, or gradients of the
            input.
        residual: [..., B, T, h], the unchanged part of both results: of an output the input, of a
            gradient the upstream gradient. The layer itself computes `whole - residual`; its norm
            sets the tolerance.
        dtype: the result of `coarsest`.
    """
    added = TOLERANCE.get(dtype, HALF_TOLERANCE) * (whole - residual).float().norm()
    return bool(
        (whole - pieces).float().norm()
        <= added + 8 * torch.finfo(whole.dtype).eps * whole.float().norm()
    )


@contextlib.contextmanager
def choices_once(call: LayerCall) -> Iterator[ReplayedChoices]:
    """Context manager in which later runs repeat the layer's first choices. [Note: choices]

    The choices are those of a router, for example. The layer's first run over the tokens chooses
    freely.
    """
    choices = ReplayedChoices()
    with replaced([call.site], "choices", [choices]):
        yield choices


def chose_alike(choices: ReplayedChoices | None, dtype: torch.dtype) -> bool:
    """True if the latest run's choices rest on the first run's numbers, up to rounding. [Note:
    choices]
    """
    return choices is None or choices.furthest() <= SCORES * TOLERANCE.get(dtype, HALF_TOLERANCE)
