"""Objectives as plain functions of per-token log-probabilities [B, T]: one equation each.

Their inputs come from `streambp.head.token_log_probs` or from `model(..., labels=..., output_log_probs=True)`. Gradients
flow back through them, so any of these can be replaced by a function of one's own.
"""

from streambp.losses.dpo import DPO_LOSSES, F_DIVERGENCES, dpo_loss
from streambp.losses.grpo import GRPO_LOSSES, grpo_loss
from streambp.losses.ppo import PPOLoss, gae, ppo_loss, whiten
from streambp.losses.sft import SFT_LOSSES, sft_loss

__all__ = [
    "DPO_LOSSES",
    "F_DIVERGENCES",
    "GRPO_LOSSES",
    "SFT_LOSSES",
    "PPOLoss",
    "dpo_loss",
    "gae",
    "grpo_loss",
    "ppo_loss",
    "sft_loss",
    "whiten",
]
