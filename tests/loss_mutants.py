"""Wrong versions of what keeps a step without labels finite, for the loss paths of
tests/loss_paths.py."""

from __future__ import annotations

import torch

from streambp.head.log_probs import HeadGradients, HeadInputs
from streambp.integrations.trl import values
from streambp.losses import masked, ppo


def scales_zeros(patch):
    """Gradients that are zero for want of labels are multiplied by the upstream gradient."""
    patch.setattr(HeadInputs, "labelled", 1)


def head_of_no_label(patch):
    """The head divides its gradients by the number of labels."""

    def results(self, *arguments, real=HeadGradients.results):
        gradients = real(self, *arguments)
        if self.inputs.labelled:
            return gradients
        return tuple(None if x is None else x / 0.0 for x in gradients)

    patch.setattr(HeadGradients, "results", results)


class TakenOut(torch.autograd.Function):
    """Takes a factor out of a gradient and multiplies by it again, also where it is 0."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        size = grad.abs().max()
        return grad / size * size


def factor_of_values(patch):
    """The values' backward takes the size of its gradient out of a sum."""
    real = values.blockwise_values
    patch.setattr(
        values,
        "blockwise_values",
        lambda hidden, norm, head: TakenOut.apply(real(hidden, norm, head)),
    )


def objective_by_product(patch):
    """PPO's loss multiplies by its mask, in place of leaving tokens out."""

    def within(mask, x):
        return x * mask.to(x.dtype)

    patch.setattr(ppo, "within", within)
    patch.setattr(masked, "within", within)


MUTANTS = {
    "scales zeros": scales_zeros,
    "head of no label": head_of_no_label,
    "factor of values": factor_of_values,
    "objective by product": objective_by_product,
}
