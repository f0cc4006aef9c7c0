"""Whether two runs of a layer differ by no more than rounding does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from streambp.layer.call import LayerCall
from streambp.layer.choices import Choices
from streambp.nested import replaced

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of what the layer adds to its input
HALF_TOLERANCE = 3e-2  # in half precision, or under autocast
SCORES = 4  # tolerances: a few scores of a single token carry a larger part of rounding than what a layer adds in sum


def coarsest(call: LayerCall, x: Tensor) -> torch.dtype:
    """The dtype of the largest eps among those of x [..., B, T, h], what the layer computes in, and autocast."""
    return call.site.coarsest(x.dtype, x.device.type, call.autocast)


def agree(whole: Tensor, pieces: Tensor, residual: Tensor, dtype: torch.dtype) -> bool:
    """Whether two runs of a layer differ by no more than rounding does.

    Args:
        whole, pieces: [..., B, T, h], what the two runs gave: outputs, or gradients of the input.
        residual: [..., B, T, h], what both contain unchanged: of an output the input, of a gradient the upstream gradient.
            The norm of `whole - residual`, which is what the layer itself computes, sets the tolerance.
        dtype: the `coarsest` one.
    """
    added = TOLERANCE.get(dtype, HALF_TOLERANCE) * (whole - residual).float().norm()
    return bool((whole - pieces).float().norm() <= added + 8 * torch.finfo(whole.dtype).eps * whole.float().norm())


@contextlib.contextmanager
def choices_once(call: LayerCall) -> Iterator[Choices]:
    """Within, the layer chooses freely in its first run over the tokens, and as then in the others. [Note: choices]"""
    choices = Choices()
    with replaced([call.site], "choices", [choices]):
        yield choices


def chose_alike(choices: Choices | None, dtype: torch.dtype) -> bool:
    """Whether the latest run made its choices from the same numbers as the first one, to rounding. [Note: choices]"""
    return choices is None or choices.furthest() <= SCORES * TOLERANCE.get(dtype, HALF_TOLERANCE)
