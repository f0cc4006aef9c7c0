"""Seconds and peak memory of SFT, DPO, GRPO and PPO steps, at the paper's settings: Qwen3-4B, 9,000 tokens.

python -m paper_repro.objectives --output paper_repro/results/objectives.csv                 one GPU
python -m paper_repro.objectives --output FILE --shape mini --lengths 2048 --device cpu      a CPU

The objective is computed from the policy's per-token log-probabilities by the same function for every method. What an
earlier pass would have left (old, reference log-probabilities, advantages, values) is drawn at random: it costs the same
for all. DPO's pairs are two rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streambp.losses import dpo_loss, grpo_loss, ppo_loss


def sft(method: Any, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
    loss: Tensor = method.nll(model, ids)
    return loss


def dpo(method: Any, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
    log_probs = method.log_probs(model, ids)
    return dpo_loss(log_probs, near(log_probs, seed), completions(log_probs))


def grpo(method: Any, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
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


def ppo(method: Any, model: PreTrainedModel, ids: Tensor, seed: int) -> Tensor:
    log_probs = method.log_probs(model, ids)
    advantages, old_values, returns = (torch.randn_like(log_probs) for _ in range(3))
    values = old_values + 0.1
    return ppo_loss(log_probs, near(log_probs, seed), advantages, completions(log_probs), values, old_values, returns).loss


def near(log_probs: Tensor, seed: int) -> Tensor:
    """Log-probabilities of a model a little different [B, T - 1]."""
    generator = torch.Generator(log_probs.device).manual_seed(seed)
    noise = torch.randn(log_probs.shape, generator=generator, device=log_probs.device, dtype=log_probs.dtype)
    return log_probs.detach() + 0.1 * noise


def completions(log_probs: Tensor) -> Tensor:
    """The second half of every row is its completion; bool [B, T - 1]."""
    mask = torch.zeros_like(log_probs, dtype=torch.bool)
    mask[:, log_probs.shape[1] // 2 :] = True
    return mask


OBJECTIVES: dict[str, Callable[[Any, PreTrainedModel, Tensor, int], Tensor]] = {
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
    "ppo": ppo,
}


def main() -> None:
    from paper_repro.harness import Job, arguments, run

    parser = arguments(__doc__)
    parser.add_argument("--shape", default="Qwen3-4B")
    parser.add_argument("--lengths", type=int, nargs="+", default=[9000])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--methods", nargs="+", default=["checkpointing", "trl", "streambp"])
    args = parser.parse_args()
    for objective in OBJECTIVES:
        for method in args.methods:
            rows = 2 if objective == "dpo" else 1
            job = Job(
                "objectives", method, args.shape, tuple(args.lengths), objective, args.lora, rows,
                seed=args.seed, device=args.device,
            )  # fmt: skip
            run(job, args.output)


if __name__ == "__main__":
    main()
