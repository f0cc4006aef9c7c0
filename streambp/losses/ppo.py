"""Proximal policy optimisation: clipped policy and value losses, and advantages."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from streambp.errors import StreamBPError
from streambp.losses.masked import check_shapes, masked_mean, within

WHITEN_EPS = 1e-8  # for `whiten`


@dataclasses.dataclass(frozen=True)
class PPOLoss:
    """Results of `ppo_loss`, scalars. Only `loss` has a gradient; the other scalars are for logs.
    All means are over the masked tokens.

    Attributes:
        loss: policy + value_coef * value - entropy_coef * entropy.
        policy: mean of the clipped policy loss.
        value: mean of the clipped value loss.
        entropy: mean of the entropy; 0 without entropy.
        policy_clipped: fraction of tokens with a policy loss changed by clipping.
        value_clipped: fraction of tokens with a value loss changed by clipping.
        approximate_kl: mean of rho - 1 - log rho, an estimate of KL(old policy, policy). rho is the
            ratio of the new to the old probability.
    """

    loss: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    policy_clipped: Tensor
    value_clipped: Tensor
    approximate_kl: Tensor


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip_range: float = 0.2,
    value_clip_range: float | None = 0.2,
    value_coef: float = 0.1,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PPOLoss:
    """Compute PPO's objective (arXiv 1707.06347, eq. 7 and 9), means over the masked tokens.

        policy   -min(rho A, clip(rho, 1 - e, 1 + e) A),   rho = exp(log p - log p_old)
        value    max((v - R)^2, (clip(v, v_old - e_v, v_old + e_v) - R)^2) / 2
        entropy  H(p)

    Args:
        log_probs: log p, [B, T], log-probabilities of the tokens; differentiable.
        old_log_probs: log p_old, [B, T], of the policy that generated the tokens.
        advantages: A, [B, T], for example from `gae`.
        mask: [B, T], true on completion tokens.
        values: v, [B, T], the value model's predictions; differentiable.
        old_values: v_old, [B, T], predictions at the time of the generation.
        returns: R, [B, T], the targets of the values.
        clip_range: e of the formula.
        value_clip_range: e_v of the formula. None leaves the value loss unclipped.
        entropy: H(p), [B, T], differentiable; None: no entropy term.
        value_coef, entropy_coef: factors of the value loss and of the entropy.

    Raises:
        StreamBPError: shapes do not fit, or entropy_coef is given without entropy.
    """
    check_shapes(
        log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask, values=values, old_values=old_values,
        returns=returns, entropy=entropy,
    )  # fmt: skip
    if entropy_coef and entropy is None:
        raise StreamBPError(
            "entropy_coef needs entropy [B, T]: call token_log_probs(..., entropy=True)."
        )
    log_ratio = within(mask, log_probs) - within(mask, old_log_probs)  # [B, T]
    ratio = torch.exp(log_ratio)
    advantages = within(mask, advantages)
    values = within(mask, values)
    old_values = within(mask, old_values)
    returns = within(mask, returns)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy = masked_mean(torch.maximum(plain, clipped), mask)
    error = (values - returns).square()
    worse = error
    if value_clip_range is not None:
        clipped_values = torch.clamp(
            values, old_values - value_clip_range, old_values + value_clip_range
        )
        worse = torch.maximum(error, (clipped_values - returns).square())
    value = 0.5 * masked_mean(worse, mask)
    if entropy is not None:
        spread = masked_mean(entropy, mask)
    else:
        spread = log_probs.new_zeros(())
    with torch.no_grad():
        policy_clipped = masked_mean((clipped > plain).to(ratio.dtype), mask)
        value_clipped = masked_mean((worse > error).to(ratio.dtype), mask)
        approximate_kl = masked_mean(ratio - 1.0 - log_ratio, mask)
    loss = policy + value_coef * value - entropy_coef * spread
    return PPOLoss(
        loss,
        policy.detach(),
        value.detach(),
        spread.detach(),
        policy_clipped,
        value_clipped,
        approximate_kl,
    )


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimation (arXiv 1506.02438, eq. 16) over each row's masked
    tokens.

        A_t = sum_k (gamma lam)^k d_(t + k)
        d_t = r_t + gamma v_(t + 1) - v_t,   v after the last token is 0

    The index t counts masked tokens alone. Tokens between masked tokens (a tool's answer) are no
    steps of the policy.

    Args:
        rewards: r, [B, T], the reward of each token.
        values: v, [B, T], the value model's predictions.
        mask: [B, T], true on tokens that the policy generated.
        gamma: discount factor of later rewards.
        lam: lambda, the decay of later d in the sum.

    Returns:
        advantages and returns (advantages + values), [B, T], 0 outside of the mask.
    """
    check_shapes(rewards, name="rewards", values=values, mask=mask)
    is_masked = mask.bool()
    values = within(mask, values.detach())
    rewards = within(mask, rewards)
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        step = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage
        advantage = torch.where(is_masked[:, t], step, advantage)
        next_value = torch.where(is_masked[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    return within(mask, advantages), within(mask, advantages + values)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return values [B, T] scaled to variance 1 and shifted to mean 0 over the mask [B, T], and 0
    outside of the mask: (values - mean) / sqrt(variance + eps).

    eps is 1e-8, as in TRL. Constant values therefore become 0, and values that vary by less than
    1e-4 keep a variance below 1.

    Args:
        values: [B, T].
        mask: [B, T], true on the tokens that count.
        shift_mean: True: shift the mean to 0; False: the values keep their mean.

    Raises:
        StreamBPError: shapes do not fit.
    """
    check_shapes(values, name="values", mask=mask)
    values = within(mask, values)
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean).square(), mask)
    whitened = (values - mean) * torch.rsqrt(variance + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return within(mask, whitened)
