"""Micro-batches in which no token has a label: their loss, and one warning of them.

transformers divides the sum over labelled tokens by their number. Without a label that is 0 / 0: the loss is NaN, and each
gradient is zero. Patched models return a loss of 0 instead, with the same gradients.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from streambp.device import has_data
from streambp.prefixes.calls import IGNORED


def any_label(labels: Tensor, shift_labels: Tensor | None) -> Tensor:
    """Return whether a token has a label, as a scalar bool on the labels' device.

    Args:
        labels: [B, T], which the model shifts.
        shift_labels: [B, T], already shifted; they stand for `labels` if they are given.
    """
    wanted = labels[..., 1:] if shift_labels is None else shift_labels
    return (wanted != IGNORED).any()


class LossOfLabels(torch.autograd.Function):
    """The model's own loss, or 0 in place of NaN where no token has a label. Its gradient is the model's own."""

    @staticmethod
    def forward(loss: Tensor, labelled: Tensor) -> Tensor:
        """Return the loss, a scalar, or 0 in its place.

        Args:
            loss: a scalar.
            labelled: a scalar bool, of `any_label`.
        """
        return torch.where(loss.isnan() & ~labelled.to(loss.device), 0.0, loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Keep nothing of the loss, a scalar. Apart from forward it runs under torch.func's transforms as well."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the loss, a scalar, unchanged."""
        return grad, None


vars(LossOfLabels.forward)["__signature__"] = inspect.signature(LossOfLabels.forward)  # torch makes one at each call else


class EmptyBatchWarning:
    """Warns once of a training batch in which no token has a label.

    Attributes:
        given: True once the warning has been issued.
        unread: the last micro-batch's `any_label` on an accelerator. The next call reads it, when the device has computed
            it; None: there is nothing to read.
    """

    def __init__(self) -> None:
        self.given = False
        self.unread: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copied or pickled model, which has nothing to read."""
        return {"given": self.given, "unread": None}

    def check(self, labelled: Tensor) -> None:
        """Warn if `labelled`, a scalar bool, is False; of one on an accelerator, at the next call."""
        if self.given or type(labelled) is not Tensor or not has_data(labelled):
            return
        answers = [labelled]
        if labelled.device.type != "cpu":
            answers = [] if self.unread is None else [self.unread]
            self.unread = labelled
        if any(not bool(answer) for answer in answers):
            self.warn()

    def warn(self) -> None:
        """Issue the warning, unless it was issued before."""
        if self.given:
            return
        self.given, self.unread = True, None
        warnings.warn(
            "A batch has no labelled token (each label is -100), so its loss is 0 and its gradients are zero. This happens "
            "where max_length cuts a prompt before its completion begins. Leave such rows out of the data set, or raise "
            "max_length. This warning is given once.",
            stacklevel=2,
        )
