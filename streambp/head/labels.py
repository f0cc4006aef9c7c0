"""Labels of the head: entries of the vocabulary, or ignored."""

from __future__ import annotations

from torch import Tensor

from streambp.device import has_data
from streambp.errors import StreamBPError


def check_labels(labels: Tensor, vocabulary: int, ignore_index: int | None) -> None:
    """Raise if a label is outside the vocabulary. Synchronizes with the device.

    Such a label would select nothing, and the result would still look like a log-probability.

    Args:
        labels: [...] integers; labels without data are not checked.
        vocabulary: V.
        ignore_index: an additional valid label; None: there is none.

    Raises:
        StreamBPError: a label is negative, or not below `vocabulary`.
    """
    if not has_data(labels) or labels.numel() == 0:
        return
    wrong = (labels < 0) | (labels >= vocabulary)
    ignored = ""
    if ignore_index is not None:
        wrong = wrong & (labels != ignore_index)
        ignored = f" or be {ignore_index} (ignored)"
    if bool(wrong.any()):
        raise StreamBPError(
            f"labels hold {int(labels[wrong][0])}; they must lie in [0, {vocabulary}){ignored}. "
            "Check that the tokenizer belongs to this model."
        )
