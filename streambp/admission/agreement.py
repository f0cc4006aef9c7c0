"""Compare two runs of a layer with a tolerance for rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from streambp.layer.call import LayerCall
from streambp.layer.choices import ReplayedChoices
from streambp.tensors import replace_attribute

# relative to the layer's addition to its input
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 3e-2  # in half precision, or under autocast
# rounding is a larger part of a token's few scores than of a layer's output, by this factor
SCORE_TOLERANCE_FACTOR = 4
EPS_FACTOR = 8  # eps of rounding, relative to the tensors themselves


def coarsest_dtype(call: LayerCall, x: Tensor) -> torch.dtype:
    """Return the dtype with the largest eps, and so the largest rounding error, in which a layer
    computes. Candidates are the dtypes of x [..., B, T, h], of the layer's parameters and of
    autocast. Comparisons of two runs of the layer tolerate rounding in this dtype.

    Args:
        call: the layer's call on one batch, which has the layer's parameters and autocast state.
        x: the layer's input.
    """
    return call.layer_state.coarsest_dtype(x.dtype, x.device.type, call.autocast)


def gradient_tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance for comparing the gradients of two runs of a layer: the largest allowed
    norm of their difference, divided by the norm of the gradients. Gradients in half precision have
    a wider tolerance than outputs, because rounding may flip a ReLU.

    Args:
        dtype: the result of `coarsest_dtype`, the least precise dtype in which the layer computes.
    """
    return TOLERANCES.get(dtype, HALF_TOLERANCE) + EPS_FACTOR * torch.finfo(dtype).eps


def agree(unchunked: Tensor, chunked: Tensor, residual: Tensor, tolerance: float) -> bool:
    """True if the results of two runs of a layer, such as with and without chunks, differ by no
    more than rounding.

    Args:
        unchunked, chunked: [..., B, T, h], the results of the two runs: outputs, or gradients of
            the input.
        residual: [..., B, T, h], what the residual connection adds to both results. This is the
            layer's input if outputs are compared, and the gradient of the output if gradients are.
        tolerance: the largest difference, relative to the norm of `unchunked - residual`.
    """
    limit = tolerance * (unchunked - residual).float().norm()
    return bool(
        (unchunked - chunked).float().norm()
        <= limit + EPS_FACTOR * torch.finfo(unchunked.dtype).eps * unchunked.float().norm()
    )


def all_agree(
    unchunked: Sequence[Tensor],
    chunked: Sequence[Tensor],
    residuals: Sequence[Tensor],
    dtype: torch.dtype,
) -> bool:
    """True if the outputs of two runs of a layer are equal up to rounding, and the gradients of
    their inputs too. False if only one run has gradients.

    Args:
        unchunked, chunked: the results of the two runs: the output [..., B, T, h] and, if the
            output has a graph, the gradient of the input [..., B, T, h]. Further gradients are not
            compared.
        residuals: pair of the layer's input and the gradient of its output, both [..., B, T, h].
        dtype: the result of `coarsest_dtype`, which sets the tolerance.
    """
    if (len(unchunked) > 1) != (len(chunked) > 1):
        return False
    tolerances = (TOLERANCES.get(dtype, HALF_TOLERANCE), gradient_tolerance(dtype))
    compared = zip(unchunked, chunked, residuals, tolerances, strict=False)
    return all(agree(*results) for results in compared)


@contextlib.contextmanager
def fix_expert_choices(call: LayerCall) -> Iterator[ReplayedChoices]:
    """Context manager around several test runs of a layer, so that all runs use the same experts.
    MoE routers choose experts freely in the first run, and later runs replay these choices. Yields
    the object that records the choices and the routers' scores. [Note: choices]"""
    choices = ReplayedChoices()
    with replace_attribute([call.layer_state], "choices", [choices]):
        yield choices


def router_scores_agree(choices: ReplayedChoices | None, dtype: torch.dtype) -> bool:
    """True if the scores of the layer's MoE routers in the latest test run equal those of the first
    run, up to rounding. Also true if no scores were recorded.

    Args:
        choices: the object that `fix_expert_choices` yields, with the scores of both runs; None: no
            run was recorded.
        dtype: the result of `coarsest_dtype`, which sets the tolerance.
    """
    return choices is None or choices.max_distance() <= SCORE_TOLERANCE_FACTOR * TOLERANCES.get(
        dtype, HALF_TOLERANCE
    )
