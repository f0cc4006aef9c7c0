"""Sum of -log p over all labelled tokens, with its gradient computed in forward.

If the loss is a sum or mean of -log p, d loss / d log p is known up to one scalar before backward
starts. Forward therefore computes the gradients at an expected scale while each block's logits
exist. This saves one of the head's four matrix products. Backward multiplies *all* gradients by the
true upstream gradient over the expected one.

float16, as the hidden states' dtype or autocast's, uses two passes, because small gradients that a
GradScaler preserves would underflow. The gradients (dW in float32) live from forward to backward.
While a forward of a head is pending, the head starts no second one-pass forward
(`PendingGradients`). One pass is also disabled inside torch's checkpoint and `save_on_cpu`. A
checkpoint repeats forward while the first run is pending, and the repetition must save the same
tensors.

A late factor that is no power of two rounds dhidden a second time. A loss divided by 3 for gradient
accumulation lost 7 % of the full gradient's precision in bf16. The expected scale is 1 / number of
labels (or 1 / num_items_in_batch), times the ratio of the last backward's upstream gradient to that
scale. If an engine or trainer always divides losses by the same number, the factor is 1 from the
second backward on. A factor of implausible size is not expected again: at a scale of 1e-36 the next
loss's gradients would underflow. A scale that is infinite, NaN or zero (num_items_in_batch of 0) is
replaced by 1. A batch without labels does not change the expected factor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.device import autocast_dtype
from streambp.errors import TWO_BACKWARDS, BackwardError
from streambp.foreign import torch_own
from streambp.head.blocks import TokenGradients, fold, product_gradient, token_blocks
from streambp.head.log_probs import HeadGradients, HeadInputs
from streambp.layer.oom import explain_memory_errors, run_outside_with_retry

MIN_LOSS_SCALE = 2.0**-64


class PendingGradients:
    """State of a patched model's losses, which compute their gradients together with the loss in
    forward. The state refers to the gradients of the last loss, and has the expected loss scale.

    The state is true, in a test by `if`, while the last loss's gradients wait for backward.

    Attributes:
        work: weak reference to the last loss's gradients; None: no loss was computed yet.
        factor: the loss scale to expect, for example that of a GradScaler: the last gradient that
            arrived at a loss, divided by the gradient of an unscaled loss. None: no backward has
            run yet.
        drop_saves: function that frees tensors saved by layers under saves="auto". The function
            returns True if it freed any. None: layers save nothing automatically.
    """

    work: weakref.ref[HeadGradients] | None = None
    factor: Tensor | None = None
    drop_saves: Callable[[], bool] | None = None

    def __bool__(self) -> bool:
        return self.work is not None and self.work() is not None

    def learn(self, factor: Tensor) -> None:
        """Store the loss scale that the next step is expected to have. Called in backward, when the
        scale of this step is known.

        A factor of 0, or with an absolute value outside of 2^-64 to 2^64, counts as 1.

        Args:
            factor: a scalar: the gradient that arrived at the loss, divided by the gradient of an
                unscaled loss.
        """
        # fake tensors must not outlive their mode
        if type(factor) is Tensor and not factor.is_meta:
            self.factor = _bounded_scale(factor)

    def __getstate__(self) -> dict[str, Any]:
        return {"work": None, "factor": None}  # a copied or pickled model has nothing pending


def _bounded_scale(scale: Tensor) -> Tensor:
    """Return the scalar `scale` if its absolute value is between 2^-64 and 2^64; otherwise return
    a scalar 1. Gradients computed in forward at a scale outside of this range could overflow or
    underflow."""
    size = scale.abs()
    return torch_own.where((size > MIN_LOSS_SCALE) & (size < 1 / MIN_LOSS_SCALE), scale, 1.0)


def can_run_in_one_pass(hidden: Tensor, pending: PendingGradients) -> bool:
    """True if a loss may compute its gradients already in forward, together with the loss. The
    logits are then computed once, and not again in backward.

    False in no_grad mode, in float16 (small gradients could underflow), and under saved-tensor
    hooks, such as checkpoint's. Also False while the gradients of an earlier loss wait for its
    backward.

    Args:
        hidden: the hidden states [N, h], whose dtype and device count.
        pending: the state of the patched model's losses.
    """
    in_float16 = torch.float16 in (hidden.dtype, autocast_dtype(hidden.device.type))
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return torch.is_grad_enabled() and not in_float16 and not hooked and not pending


class OnePassNLL(torch.autograd.Function):
    """Autograd function that returns the sum of -log p of all labels, a scalar. Inputs are hidden
    states [N, h], weight [V, h], bias [V] or None, and the norm's parameters.

    Forward computes the gradients of these inputs together with the loss, for an expected gradient
    of the loss. Backward multiplies these gradients by the true gradient of the loss, divided by
    the expected gradient. The logits are thus computed once, in forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: HeadInputs,
        pending: PendingGradients,
        scale: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *norm: Tensor,
    ) -> Tensor:
        """Return the sum of -log p over all labels, a scalar in promote_types(hidden dtype,
        float32).

        The gradients of hidden [N, h], weight [V, h], bias [V] and the norm's parameters are
        computed too, and stored for backward.

        Args:
            inputs: labels, final norm and settings.
            pending: state of the patched model's losses, which gets a weak reference to the
                gradients. The state's `factor` is the expected loss scale.
            scale: the gradient that the sum will get in backward without a loss scale, for example
                1 / number of labels for a mean: a scalar in promote_types(dtype, float32).
            hidden: hidden states [N, h] before the final norm.
            weight: the output projection's weight [V, h].
            bias: the output projection's bias [V], or None.
            norm: parameters of the final norm.
        """
        rows = inputs.rows
        labels = inputs.row_labels
        expected = scale
        if pending.factor is not None:
            expected = scale * pending.factor.to(scale)
        expected = _bounded_scale(expected)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        work = HeadGradients(inputs, hidden, weight, bias, ctx.needs_input_grad[3:])
        products = inputs.products(weight, bias)
        full_vocabulary = slice(0, weight.shape[0])
        upstream = (-expected).repeat(labels.shape[0])
        tokens, _ = inputs.block_size(hidden, weight.shape[0], full_vocabulary=True)
        with inputs.autocast.disable(), inputs.norm_parameters.shadow() as shadows:
            # The full vocabulary at once: the softmax must be known before the logits are freed.
            for block in token_blocks(labels.shape[0], tokens):
                leaf, normed = work.recompute(rows, block)
                with torch.no_grad():
                    product = products.multiply(normed, full_vocabulary)  # [n, V]
                    folded = fold(product, inputs.projection, labels[block], full_vocabulary)
                    lse = folded.lse()  # [n]
                    total += (lse - folded.target).sum()
                    token_gradients = TokenGradients(
                        labels[block], lse, None, weight.shape[0], upstream[block]
                    )
                    grad = product_gradient(
                        product, inputs.projection, token_gradients, full_vocabulary
                    )
                    work.add_block(grad, normed, products, full_vocabulary)
                    del grad, product
                work.finish_tokens(leaf, normed, shadows, rows, block)
        ctx.work = work
        ctx.scale = scale
        ctx.expected = expected
        ctx.pending = pending
        pending.work = weakref.ref(work)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that forward computed, multiplied by upstream / expected. `expected`
        is the gradient of the loss that forward assumed. The results are None for `inputs`,
        `pending` and `scale`, then the gradients of hidden, weight, bias and the norm's parameters.

        Args:
            upstream: the gradient of the loss, a scalar.

        Raises:
            BackwardError: this is the second backward, or second derivatives are requested
                (create_graph).
        """
        work = ctx.work
        ctx.work = None
        if work is None or torch.is_grad_enabled():
            raise BackwardError(
                "backward ran a second time, or with create_graph=True, through the blockwise "
                "loss; its gradients are used up by the first. Compute the loss again, or add "
                f"losses up and call backward once. {TWO_BACKWARDS}"
            )
        where = "in the loss' backward"
        buffers = run_outside_with_retry(
            work.hidden.device, work.inputs.drop_saves, work.result_buffers, where
        )
        with explain_memory_errors(
            where
        ):  # results are computed in place, so this cannot be retried
            if work.inputs.labelled:
                ctx.pending.learn(upstream / ctx.scale)
            return None, None, None, *work.results(upstream / ctx.expected, buffers)
