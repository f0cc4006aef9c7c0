"""Supervised fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor

from streambp.errors import StreamBPError
from streambp.losses.masked import check_choice, check_shapes, masked_sum

SFT_LOSSES = ("nll", "dft")


def sft_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "nll",
    label_smoothing: float = 0.0,
    mean_log_probs: Tensor | None = None,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Negative log-likelihood of the labelled tokens.

        nll   L = -sum_t log p_t / N
        dft   L = -sum_t sg(p_t) log p_t / N                      Dynamic Fine-Tuning (arXiv 2508.05629)
        with label smoothing e: log p_t becomes (1 - e) log p_t + e * mean_v log p_tv     (arXiv 1512.00567, section 7)

    Args:
        log_probs: [B, T], of the labels.
        mask: [B, T], true where there is a label.
        mean_log_probs: [B, T], the mean of log p over the vocabulary (`token_log_probs(..., mean_log_probs=True)`);
            needed with label smoothing.
        num_items: N; the number of labelled tokens if None. Pass the tokens of the whole optimizer step when
            accumulating gradients.

    Returns:
        A scalar; 0 for a batch without labels.

    Raises:
        StreamBPError: shapes do not fit, loss_type is unknown, or label_smoothing is given without mean_log_probs.
    """
    check_choice("loss_type", loss_type, SFT_LOSSES)
    check_shapes(log_probs, mask=mask, mean_log_probs=mean_log_probs)
    per_token = log_probs
    if label_smoothing:
        if mean_log_probs is None:
            raise StreamBPError("label_smoothing needs mean_log_probs: call token_log_probs(..., mean_log_probs=True).")
        per_token = (1.0 - label_smoothing) * log_probs + label_smoothing * mean_log_probs
    if loss_type == "dft":
        per_token = per_token * log_probs.detach().exp()
    count = mask.bool().sum() if num_items is None else torch.as_tensor(num_items, device=log_probs.device)
    return -masked_sum(per_token, mask) / count.clamp(min=1)
