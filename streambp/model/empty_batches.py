"""Return a loss of 0 for micro-batches in which no token has a label, and warn once.

transformers divides the sum over labelled tokens by their number. Without labels the quotient is 0
/ 0: the loss is NaN, and each gradient is zero. Patched models return a loss of 0 instead, with the
same gradients.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from streambp.device import has_data
from streambp.prefixes.calls import IGNORED_LABEL


def any_label(labels: Tensor, shift_labels: Tensor | None) -> Tensor:
    """Return a scalar bool tensor on the labels' device: True if some label is not -100. If False,
    the model returns a loss of 0.

    Args:
        labels: [B, T], to be shifted by the model, so that the first label of a row is not used.
        shift_labels: [B, T], already shifted; used in place of `labels` if not None.
    """
    predicted_labels = labels[..., 1:] if shift_labels is None else shift_labels
    return (predicted_labels != IGNORED_LABEL).any()


class LossOfLabels(torch.autograd.Function):
    """Autograd function that returns a model's loss. A loss that is NaN because no token has a
    label becomes 0. The gradient passes unchanged."""

    @staticmethod
    def forward(loss: Tensor, labelled: Tensor) -> Tensor:
        """Return the loss, a scalar; 0 in place of NaN if no token has a label.

        Args:
            loss: the model's loss, a scalar.
            labelled: scalar bool tensor, True if some token has a label.
        """
        return torch.where(loss.isnan() & ~labelled.to(loss.device), 0.0, loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Save nothing for backward of the scalar loss, which needs only its own argument.
        torch.func's transforms require this method in addition to `forward`."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the scalar loss unchanged, and None for `labelled`."""
        return grad, None


# torch would otherwise compute the signature in each call.
vars(LossOfLabels.forward)["__signature__"] = inspect.signature(LossOfLabels.forward)


class EmptyBatchWarning:
    """Issues one warning if a training batch has no token with a label.

    Attributes:
        has_warned: True once the warning was issued.
        unread: result of `any_label` for the last micro-batch, if it is on an accelerator. The next
            call reads the result, because reading it at once would synchronize with the device.
            None: no result is pending.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self.unread: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy and pickle, without the pending result."""
        return {"has_warned": self.has_warned, "unread": None}

    def check(self, labelled: Tensor) -> None:
        """Warn if no token of a batch has a label.

        Args:
            labelled: scalar bool tensor, the result of `any_label`. A tensor on an accelerator is
                read in the next call, so the warning comes one call later.
        """
        if self.has_warned or type(labelled) is not Tensor or not has_data(labelled):
            return
        answers = [labelled]
        if labelled.device.type != "cpu":
            answers = [] if self.unread is None else [self.unread]
            self.unread = labelled
        if any(not bool(answer) for answer in answers):
            self.warn()

    def warn(self) -> None:
        """Issue the warning unless it was issued before."""
        if self.has_warned:
            return
        self.has_warned = True
        self.unread = None
        warnings.warn(
            "A batch has no labelled token (each label is -100), so its loss is 0 and its "
            "gradients are zero. This happens where max_length cuts a prompt before its "
            "completion begins. Leave such rows out of the data set, or raise max_length. This "
            "warning is given once.",
            stacklevel=2,
        )
