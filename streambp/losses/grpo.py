"""Group-relative policy optimisation and its variants.

A policy-gradient loss; rho = exp(log p - log p_old), A the advantage.

    clipped   l_t = -min(min(rho, delta) A, clip(rho, 1 - e_low, 1 + e_high) A): all types but the next two; PPO's
              clip (arXiv 1707.06347, eq. 7), two-sided with delta (arXiv 2505.07291)
    cispo     l_t = -sg(min(rho, e_high)) A log p                             MiniMax-M1 (arXiv 2506.13585)
    sapo      l_t = -4 / tau sigma(tau (rho - 1)) A, tau by the sign of A     SAPO (arXiv 2511.20347)
    + beta (e^(ref - log p) - (ref - log p) - 1)                              an estimate of KL(p || p_ref); times rho
                                                                              where weighted (arXiv 2512.02556)
    level "sequence": rho of the mean log-ratio of a completion               GSPO (arXiv 2507.18071)

and summed up as

    grpo, sapo     mean over completions of their means          (arXiv 2402.03300, eq. 3)
    bnpo           sum / tokens of this batch
    dr_grpo        sum / (B * max_completion_length)             (arXiv 2503.20783)
    dapo, cispo    sum / num_items, the tokens of all batches of an optimizer step     (arXiv 2503.14476)
    luspo          mean over completions of their sums
"""

from __future__ import annotations

import torch
from torch import Tensor

from streambp.errors import StreamBPError
from streambp.losses.masked import check_choice, check_shapes, masked_mean, masked_sum

GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
LEVELS = ("token", "sequence")


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    loss_type: str = "grpo",
    beta: float = 0.0,
    weighted_kl: bool = False,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    level: str = "token",
    max_completion_length: int | None = None,
    num_items: Tensor | float | None = None,
    temperatures: tuple[float, float] = (1.0, 1.05),
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Tensor:
    """A policy-gradient loss of the given type and level; the equations are in the module's docstring.

    Args:
        log_probs: [B, T]; advantages: [B] or [B, T]; mask: [B, T], true on completion tokens.
        old_log_probs: [B, T], of the policy that sampled; None: the present one (rho = 1, with its gradient).
        ref_log_probs: [B, T]; needed if beta is not 0. weighted_kl: its KL term is weighted with rho, as by TRL's default.
        entropy: [B, T]; its mean times entropy_coef is subtracted.

    Returns:
        A scalar.

    Raises:
        StreamBPError: shapes do not fit, a setting is unknown, or an argument is missing that a setting needs.
    """
    check_choice("loss_type", loss_type, GRPO_LOSSES)
    check_choice("level", level, LEVELS)
    check_shapes(log_probs, mask=mask, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs, entropy=entropy)
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    ratio = _ratio(log_probs, log_probs.detach() if old_log_probs is None else old_log_probs, mask, level)
    if loss_type == "cispo":
        per_token = -ratio.clamp(max=epsilon_high).detach() * advantages * log_probs
    elif loss_type == "sapo":
        per_token = _soft_gate(ratio, advantages, *temperatures)
    else:
        per_token = _clipped(ratio, advantages, epsilon_low, epsilon_high, delta)
    if beta != 0.0:
        divergence = _divergence(log_probs, ref_log_probs)
        per_token = per_token + beta * (divergence * ratio if weighted_kl else divergence)
    loss = _reduce(per_token.expand_as(log_probs), mask, loss_type, max_completion_length, num_items)
    if entropy_coef == 0.0:
        return loss
    if entropy is None:
        raise StreamBPError("entropy_coef needs entropy [B, T]: call token_log_probs(..., entropy=True).")
    return loss - entropy_coef * masked_mean(entropy, mask)


def _divergence(log_probs: Tensor, ref_log_probs: Tensor | None) -> Tensor:
    if ref_log_probs is None:
        raise StreamBPError("beta is not 0, which needs ref_log_probs [B, T] of the reference model.")
    away = ref_log_probs - log_probs
    return torch.exp(away) - away - 1.0


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def _soft_gate(ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> Tensor:
    tau = torch.where(advantages > 0, ratio.new_tensor(positive), ratio.new_tensor(negative))
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages


def _ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: str) -> Tensor:
    """[B, T], or [B, 1] for whole completions."""
    log_ratio = log_probs - old_log_probs
    return torch.exp(log_ratio if level == "token" else masked_mean(log_ratio, mask, 1)[:, None])


def _reduce(
    per_token: Tensor, mask: Tensor, loss_type: str, max_completion_length: int | None, num_items: Tensor | float | None
) -> Tensor:
    if loss_type in ("grpo", "sapo"):
        return masked_mean(per_token, mask, 1).mean()
    if loss_type == "luspo":
        return masked_sum(per_token, mask, 1).mean()
    if loss_type == "bnpo":
        return masked_mean(per_token, mask)
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise StreamBPError("dr_grpo divides by B * max_completion_length; pass max_completion_length.")
        return masked_sum(per_token, mask) / (per_token.shape[0] * max_completion_length)
    if num_items is None:
        raise StreamBPError(f"{loss_type} divides by the tokens of an optimizer step; pass num_items (or use 'bnpo').")
    return masked_sum(per_token, mask) / num_items
