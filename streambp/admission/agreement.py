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
    """Return the least precise dtype, by its eps, that a layer computes in: among the dtypes of x
    [..., B, T, h], of the layer's parameters and of autocast. Comparisons of two runs tolerate its
    roundings.

    Args:
        call: the call of the layer.
        x: the layer's input.
    """
    return call.layer_state.coarsest_dtype(x.dtype, x.device.type, call.autocast)


def gradient_tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance for gradients, relative to their norm. The tolerance is wider than for
    outputs in half precision. Rounding may flip a ReLU, which changes gradients more than outputs.

    Args:
        dtype: the result of `coarsest_dtype`.
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
    """True if the outputs of two runs agree, and the gradients of their inputs. False if only one
    run has gradients.

    Args:
        unchunked, chunked: the results of the two runs: the output [..., B, T, h] and, if the
            output has a graph, the gradient of the input [..., B, T, h]. Further gradients are not
            compared.
        residuals: the input and the gradient of the output, both [..., B, T, h].
        dtype: the result of `coarsest_dtype`.
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
    the record of the choices. [Note: choices]"""
    choices = ReplayedChoices()
    with replace_attribute([call.layer_state], "choices", [choices]):
        yield choices


def router_scores_agree(choices: ReplayedChoices | None, dtype: torch.dtype) -> bool:
    """True if the scores of the layer's MoE routers in the latest run equal those of the first run,
    up to rounding. Also true if nothing was recorded.

    Args:
        choices: the recorded scores; None: nothing was recorded.
        dtype: the result of `coarsest_dtype`, which sets the tolerance.
    """
    return choices is None or choices.max_distance() <= SCORE_TOLERANCE_FACTOR * TOLERANCES.get(
        dtype, HALF_TOLERANCE
    )
