"""The objectives that methods are compared on, each from the policy's per-token log-probabilities.

What an earlier pass would have left (old and reference log-probabilities, advantages, values) is drawn at random: it
costs the same for all methods. DPO's pairs are two rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from examples.objectives import dpo_loss, grpo_loss
from paper_repro.methods import Method
from streambp.losses import ppo_loss

Objective = Callable[[Method, PreTrainedModel, Tensor, int], Tensor]


def sft(method: Method, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
    return method.nll(model, ids)


def dpo(method: Method, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
    log_probs = method.log_probs(model, ids)
    return dpo_loss(log_probs, near(log_probs, seed), completions(log_probs))


def grpo(method: Method, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
    log_probs = method.log_probs(model, ids)
    advantages = torch.randn(ids.shape[0], device=ids.device)
    return grpo_loss(
        log_probs,
        advantages,
        completions(log_probs),
        old_log_probs=near(log_probs, seed),
        ref_log_probs=near(log_probs, seed + 1),
        beta=0.04,
    )


def ppo(method: Method, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
    log_probs = method.log_probs(model, ids)
    advantages, old_values, returns = (torch.randn_like(log_probs) for _ in range(3))
    values = old_values + 0.1
    return ppo_loss(
        log_probs,
        near(log_probs, seed),
        advantages,
        completions(log_probs),
        values,
        old_values,
        returns,
    ).loss


def near(log_probs: Tensor, seed: int) -> Tensor:
    """Log-probabilities of a model a little different [B, T - 1]."""
    generator = torch.Generator(log_probs.device).manual_seed(seed)
    noise = torch.randn(
        log_probs.shape, generator=generator, device=log_probs.device, dtype=log_probs.dtype
    )
    return log_probs.detach() + 0.1 * noise


def completions(log_probs: Tensor) -> Tensor:
    """The second half of every row is its completion; bool [B, T - 1]."""
    mask = torch.zeros_like(log_probs, dtype=torch.bool)
    mask[:, log_probs.shape[1] // 2 :] = True
    return mask


OBJECTIVES: dict[str, Objective] = {
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
    "ppo": ppo,
}
