"""Objectives for loops of your own, as plain functions of per-token log-probabilities [B, T]: one equation each. Copy what
you need.

Their inputs come from `streambp.head.token_log_probs` or from `model(..., labels=labels, output_log_probs=True)`. Gradients
flow back through them. TRL's trainers compute their own, and PPO's is `streambp.losses.ppo_loss`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from streambp.errors import StreamBPError
from streambp.losses.masked import check_shapes, masked_mean, masked_sum, within

SFT_LOSSES = ("nll", "dft")
GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
LEVELS = ("token", "sequence")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise StreamBPError unless `value`, the argument `name`, is one of the choices."""
    if value not in choices:
        raise StreamBPError(f"{name} is {value!r}; it must be one of {sorted(choices)}.")


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
    log_probs = within(mask, log_probs)
    per_token = log_probs
    if label_smoothing:
        if mean_log_probs is None:
            raise StreamBPError(
                "label_smoothing needs mean_log_probs: call token_log_probs(..., mean_log_probs=True)."
            )
        per_token = (1.0 - label_smoothing) * log_probs + label_smoothing * within(
            mask, mean_log_probs
        )
    if loss_type == "dft":
        per_token = per_token * log_probs.detach().exp()
    count = (
        mask.bool().sum()
        if num_items is None
        else torch.as_tensor(num_items, device=log_probs.device)
    )
    return -masked_sum(per_token, mask) / count.clamp(min=1)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What the objectives are made of, each [P] for P pairs.

    chosen, rejected: sums of log p over a completion's tokens; ref_*: the reference model's; tokens_*: how many.
    chosen_score, rejected_score: f'(ratio) of the log-ratios. nll: the chosen completions' -log p a token, a scalar.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    tokens_chosen: Tensor
    tokens_rejected: Tensor
    nll: Tensor
    beta: float
    smoothing: float
    tau: float

    @property
    def chosen_ratio(self) -> Tensor:
        """[P], log p(chosen) - log p_ref(chosen)."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """[P], log p(rejected) - log p_ref(rejected)."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """[P], beta (s_w - s_l) of `dpo_loss`."""
        return self.beta * (self.chosen_score - self.rejected_score)

    @property
    def margin_a_token(self) -> Tensor:
        """[P], s_w / |y_w| - s_l / |y_l| of `dpo_loss`; without beta."""
        return self.chosen_score / self.tokens_chosen - self.rejected_score / self.tokens_rejected


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -(1.0 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _robust(p: Pairs) -> Tensor:
    if not 0.0 <= p.smoothing < 0.5:
        raise StreamBPError(
            f"label_smoothing is {p.smoothing}; robust needs a value from 0 to below 0.5."
        )
    smoothed = (1.0 - p.smoothing) * F.logsigmoid(p.margin) - p.smoothing * F.logsigmoid(-p.margin)
    return -smoothed / (1.0 - 2.0 * p.smoothing)


def _exo_pair(p: Pairs) -> Tensor:
    if not 0.0 < p.smoothing < 1.0:
        raise StreamBPError(
            f"label_smoothing is {p.smoothing}; exo_pair needs a value between 0 and 1, such as 1e-3."
        )
    win, lose = F.logsigmoid(p.margin), F.logsigmoid(-p.margin)
    return win.exp() * (win - math.log1p(-p.smoothing)) + lose.exp() * (
        lose - math.log(p.smoothing)
    )


def _nca_pair(p: Pairs) -> Tensor:
    chosen, rejected = p.beta * p.chosen_ratio, p.beta * p.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _sppo_hard(p: Pairs) -> Tensor:
    return (p.chosen_ratio - 0.5 / p.beta).square() + (p.rejected_ratio + 0.5 / p.beta).square()


def _aot(p: Pairs) -> Tensor:
    delta = (p.chosen - p.rejected).sort().values - (p.ref_chosen - p.ref_rejected).sort().values
    return _smoothed(p.beta * delta, p.smoothing)


def _aot_unpaired(p: Pairs) -> Tensor:
    return _smoothed(
        p.beta * (p.chosen_ratio.sort().values - p.rejected_ratio.sort().values), p.smoothing
    )


def _discopop(p: Pairs) -> Tensor:
    mix = torch.sigmoid(p.margin / p.tau)
    return -(1.0 - mix) * F.logsigmoid(p.margin) + mix * torch.exp(-p.margin)


DPO_LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda p: -F.logsigmoid(p.margin),
    "hinge": lambda p: torch.relu(1.0 - p.margin),
    "ipo": lambda p: (p.margin_a_token - 0.5 / p.beta).square(),
    "sigmoid_norm": lambda p: -F.logsigmoid(p.beta * p.margin_a_token),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda p: (
        -F.logsigmoid(p.beta * p.chosen_ratio) - F.logsigmoid(-p.beta * p.rejected_ratio)
    ),
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": lambda p: (
        1.0 - torch.sigmoid(p.beta * p.chosen_ratio) + torch.sigmoid(p.beta * p.rejected_ratio)
    ),
    "apo_down": lambda p: (
        1.0
        + torch.sigmoid(p.beta * p.chosen_ratio)
        - torch.sigmoid(p.beta * (p.chosen_ratio - p.rejected_ratio))
    ),
    "discopop": _discopop,
    "sft": lambda p: p.nll.expand_as(p.chosen),
}


SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")


def _alpha_divergence(ratio: Tensor, alpha: float) -> Tensor:
    power = alpha - 1.0
    if abs(power) < 1e-6:
        return ratio
    # exp(80) is the largest that float32 can square
    return torch.expm1((power * ratio).clamp(max=80.0)) / power


F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratio, alpha: ratio,
    "forward_kl": lambda ratio, alpha: -torch.expm1(-ratio),
    "js_divergence": lambda ratio, alpha: math.log(2.0) + F.logsigmoid(ratio),
    "alpha_divergence": _alpha_divergence,
}


def _check_smoothing(label_smoothing: float, loss_type: str) -> None:
    if label_smoothing and loss_type not in SMOOTHED:
        raise StreamBPError(
            f"label_smoothing is {label_smoothing}, which loss_type={loss_type!r} does not have. Leave it out, or choose "
            f"one of {list(SMOOTHED)}."
        )


def dpo_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    f_divergence: str = "reverse_kl",
    alpha: float = 0.5,
    label_smoothing: float = 0.0,
    tau: float = 0.05,
) -> Tensor:
    """A preference loss over pairs; r = log p(y) - log p_ref(y) is a completion's log-ratio, s = f'(e^r) its score.

        sigmoid        -log sigma(beta (s_w - s_l))                              DPO (arXiv 2305.18290, eq. 7)
        hinge          max(0, 1 - beta (s_w - s_l))                              SLiC (arXiv 2305.10425)
        ipo            (s_w / |y_w| - s_l / |y_l| - 1 / (2 beta))^2              IPO (arXiv 2310.12036, eq. 17)
        robust         sigmoid, unbiased under flipped labels at rate e          rDPO (arXiv 2403.00409)
        exo_pair       KL(softmax(beta s) || (1 - e, e))                         EXO (arXiv 2402.00856, eq. 16)
        nca_pair       -log sigma(beta r_w) - (log sigma(-beta r_w) + log sigma(-beta r_l)) / 2       NCA (arXiv 2402.05369)
        bco_pair       -log sigma(beta r_w) - log sigma(-beta r_l)               BCO (arXiv 2404.04656)
        sppo_hard      (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2           SPPO (arXiv 2405.00675, eq. 4.7)
        aot(_unpaired) sorted margins of the batch                               AOT (arXiv 2406.05882)
        apo_zero/_down anchored preference optimisation                          APO (arXiv 2408.06266, eq. 7 and 8)
        discopop       logistic and exponential loss, mixed by the margin        DiscoPOP (arXiv 2406.08414, eq. 5)
        sigmoid_norm   sigmoid of scores a token; sft: -log p a token of the chosen completions

    f_divergence (arXiv 2309.16240): reverse_kl s = r, forward_kl s = 1 - e^-r, js_divergence s = log 2 + log sigma(r),
    alpha_divergence s = (e^((alpha - 1) r) - 1) / (alpha - 1).

    Args:
        log_probs, ref_log_probs: [2 P, T], the first P rows chosen, the rest rejected. The reference's must come from the
            reference model's own hidden states, without gradient.
        mask: [2 P, T], true on completion tokens.
        label_smoothing: e of robust, exo_pair, aot and aot_unpaired, the only ones that have it. tau: of discopop.

    Returns:
        A scalar, the mean over pairs. StreamBPError is raised where shapes do not fit, or a setting is unknown or none of
        this loss_type's.
    """
    check_choice("loss_type", loss_type, DPO_LOSSES)
    check_choice("f_divergence", f_divergence, F_DIVERGENCES)
    _check_smoothing(label_smoothing, loss_type)
    check_shapes(log_probs, ref_log_probs=ref_log_probs, mask=mask)
    if log_probs.shape[0] % 2:
        raise StreamBPError(
            f"log_probs has {log_probs.shape[0]} rows; they must be chosen rows and then as many rejected ones."
        )
    chosen, rejected = masked_sum(log_probs, mask, 1).chunk(2)  # [P] each
    ref_chosen, ref_rejected = masked_sum(ref_log_probs, mask, 1).chunk(2)
    tokens_chosen, tokens_rejected = mask.bool().sum(1).clamp(min=1).chunk(2)  # [P] each
    score = F_DIVERGENCES[f_divergence]
    pairs = Pairs(
        chosen, rejected, ref_chosen, ref_rejected,
        score(chosen - ref_chosen, alpha), score(rejected - ref_rejected, alpha), tokens_chosen, tokens_rejected,
        -masked_mean(log_probs.chunk(2)[0], mask.chunk(2)[0]), beta, label_smoothing, tau,
    )  # fmt: skip
    return DPO_LOSSES[loss_type](pairs).mean()


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
    check_shapes(
        log_probs,
        mask=mask,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        entropy=entropy,
    )
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    advantages = within(mask, advantages.expand_as(log_probs))
    log_probs = within(mask, log_probs)
    old_log_probs = log_probs.detach() if old_log_probs is None else within(mask, old_log_probs)
    ref_log_probs = None if ref_log_probs is None else within(mask, ref_log_probs)
    ratio = _ratio(log_probs, old_log_probs, mask, level)
    if loss_type == "cispo":
        per_token = -ratio.clamp(max=epsilon_high).detach() * advantages * log_probs
    elif loss_type == "sapo":
        per_token = _soft_gate(ratio, advantages, *temperatures)
    else:
        per_token = _clipped(ratio, advantages, epsilon_low, epsilon_high, delta)
    if beta != 0.0:
        divergence = _divergence(log_probs, ref_log_probs)
        per_token = per_token + beta * (divergence * ratio if weighted_kl else divergence)
    loss = _reduce(per_token, mask, loss_type, max_completion_length, num_items)
    if entropy_coef == 0.0:
        return loss
    if entropy is None:
        raise StreamBPError(
            "entropy_coef needs entropy [B, T]: call token_log_probs(..., entropy=True)."
        )
    return loss - entropy_coef * masked_mean(entropy, mask)


def _divergence(log_probs: Tensor, ref_log_probs: Tensor | None) -> Tensor:
    if ref_log_probs is None:
        raise StreamBPError(
            "beta is not 0, which needs ref_log_probs [B, T] of the reference model."
        )
    log_ratio = ref_log_probs - log_probs
    return torch.exp(log_ratio) - log_ratio - 1.0


def _clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float | None
) -> Tensor:
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
    per_token: Tensor,
    mask: Tensor,
    loss_type: str,
    max_completion_length: int | None,
    num_items: Tensor | float | None,
) -> Tensor:
    if loss_type in ("grpo", "sapo"):
        return masked_mean(per_token, mask, 1).mean()
    if loss_type == "luspo":
        return masked_sum(per_token, mask, 1).mean()
    if loss_type == "bnpo":
        return masked_mean(per_token, mask)
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise StreamBPError(
                "dr_grpo divides by B * max_completion_length; pass max_completion_length."
            )
        return masked_sum(per_token, mask) / (per_token.shape[0] * max_completion_length)
    if num_items is None:
        raise StreamBPError(
            f"{loss_type} divides by the tokens of an optimizer step; pass num_items (or use 'bnpo')."
        )
    return masked_sum(per_token, mask) / num_items
