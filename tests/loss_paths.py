"""Each way to a loss that the head computes, for a patched model and for one that is not: the
model's own loss in one pass and in two, lazy logits, the losses of TRL's trainers, and PPO with
values.

One table for one process (tests/head/test_paths_without_labels.py) and for ranks
(tests/distributed/empty_worker.py).
"""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import nn

import streambp
from streambp.integrations.trl.values import VALUE_HEAD, PolicyAndValueHead
from streambp.losses import ppo_loss
from streambp.model.fused_head import FusedHead, add_head
from streambp.model.installed_patch import streamed_head
from tests.seeds import seed_torch, seeded

SETUPS = {  # for `tests.distributed.engines.model_for`
    "full": {},
    "tied": {"tied": True},
    "head saved": {"lora": True, "head_saved": True},
    "lora": {"lora": True},
}
SETTINGS = {
    "one pass": {"saves": ()},
    "two passes": {},
    "lazy": {"lazy_logits": True},
    "own loss": {"lazy_logits": True},
    "packed": {"rows": "packed"},
    "default": {},
    "sft": {},
    "dft": {},
    "fused loss": {},
    "dpo": {},
    "grpo": {},
    "ppo": {},
}
TRLS_PATHS = ("sft", "dft", "fused loss", "dpo", "grpo")
FIELDS = ("log_probs", "entropy")


def base_of(model):
    """Return the language model, inside of peft's wrapper if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def with_value_head(model):
    """Add a value head to a model, the same whenever it is called."""
    seed_torch(7)
    weight = base_of(model).get_output_embeddings().weight
    head = nn.Linear(base_of(model).config.hidden_size, 1, dtype=weight.dtype)
    base_of(model).add_module(VALUE_HEAD, head)


def values_of_logits(model, *args, labels, fused_lm_head, values, **kwargs):
    """Return log-probabilities, entropies and values as an unpatched model's forward, from logits
    [B, T, V]."""
    output = type(model).forward(model, *args, **kwargs, use_cache=False, output_hidden_states=True)
    log_p = output.logits[:, :-1].log_softmax(-1)
    return {
        "log_probs": log_p.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "state_values": getattr(model, VALUE_HEAD)(output.hidden_states[-1])[:, :-1, 0],
    }


def prepare(model, path, patched, **settings):
    """Give a model what the path needs, and patch it if `patched`, as a trainer does before an
    engine gets it."""
    base = base_of(model)
    if path == "ppo":
        with_value_head(model)
    if patched:
        trainers = path == "ppo" or path in TRLS_PATHS
        module = base if trainers else model
        streambp.patch(
            module, streambp.StreamConfig(**{"chunk_size": 5, **SETTINGS[path], **settings})
        )
    if path == "ppo" and not patched:
        base.forward = types.MethodType(values_of_logits, base)
    elif path == "ppo":
        add_head(streamed_head(base), outputs=FIELDS, head_class=PolicyAndValueHead)
    elif path in TRLS_PATHS and patched:
        add_head(streamed_head(base), outputs=FIELDS, head_class=FusedHead)
    elif path in TRLS_PATHS:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(base, outputs=FIELDS)


def loss_of(model, path, batch, count, patched):
    """Return the loss of a path.

    model: the prepared model, or what an engine made of it.
    count: `num_items_in_batch`, by which the loss is divided; None: the path's own.
    """
    arguments = {} if count is None else {"num_items_in_batch": count}
    if path == "own loss":
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        total = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        return total if count is None else total / torch.as_tensor(count)
    if path == "ppo":
        output = model(**batch, fused_lm_head=True, values=True)
        loss = objective(output, batch, by_mask=patched)
        return loss if count is None else loss / torch.as_tensor(count)
    if path in TRLS_PATHS:
        return trls_loss(model(**batch, **arguments, fused_lm_head=True), path, count)
    if path == "two passes" and patched:
        arguments["output_log_probs"] = True
    return model(**batch, **arguments, use_cache=False).loss


def trls_loss(output, path, count):
    """Return what a trainer of TRL makes of the fused head's values."""
    if path == "fused loss":
        return output.loss
    log_probs, mask = output.log_probs, output.label_mask
    tokens = torch.as_tensor(mask.sum() if count is None else count).clamp(min=1)
    if path == "dpo":
        chosen, rejected = log_probs.sum(1)
        return -F.logsigmoid(0.1 * (chosen - rejected))
    if path == "grpo":
        ratio = torch.exp(log_probs - log_probs.detach())
        return -((ratio + 0.1 * output.entropy) * mask).sum() / tokens
    scale = log_probs.exp().detach() if path == "dft" else 1.0
    return -(log_probs * scale).sum() / tokens


def objective(output, batch, by_mask):
    """Return PPO's loss: streambp's, which masks, or the same of the tokens that the mask picks."""
    mask = batch["labels"][:, 1:] != -100
    generator = seeded(11)
    log_probs = output["log_probs"]
    draws = [torch.randn(mask.shape, generator=generator, dtype=log_probs.dtype) for _ in range(4)]
    old_log_probs, advantages, old_values, returns = draws
    old_log_probs = 0.3 * old_log_probs - 4
    inputs = [
        log_probs, old_log_probs, advantages, output["state_values"], old_values, returns, output["entropy"],
    ]  # fmt: skip
    if by_mask:
        new, old, advantages, values, old_values, returns, entropy = inputs
        settings = {"value_coef": 0.5, "entropy_coef": 0.1}
        return ppo_loss(
            new, old, advantages, mask, values, old_values, returns, entropy=entropy, **settings
        ).loss
    new, old, advantages, values, old_values, returns, entropy = (x[mask] for x in inputs)
    ratio = torch.exp(new - old)
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    clipped = torch.clamp(values, old_values - 0.2, old_values + 0.2)
    value = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
    return (policy + 0.5 * value - 0.1 * entropy).sum() / mask.sum().clamp(min=1)
