"""Losses and metrics that training programs compute from logits, in plain torch; ids are the
tokens, [B, T]."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.seeds import seeded


def selected(logits, index):
    """log p of the tokens in `index`: from logits in float32 by the logsumexp of each row, else by
    log_softmax."""
    if logits.dtype in (torch.float32, torch.float64):
        token_logits = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        return token_logits - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = zip(logits, index, strict=True)
    return torch.stack(
        [
            F.log_softmax(z, dim=-1).gather(dim=-1, index=i.unsqueeze(-1)).squeeze(-1)
            for z, i in rows
        ]
    )


def entropy_of(logits, chunk=7):
    parts = []
    for part in logits.reshape(-1, logits.shape[-1]).split(chunk, dim=0):
        log_p = F.log_softmax(part, dim=-1)
        parts.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(parts, dim=0).reshape(logits.shape[:-1])


def prompt(ids, tokens=4):
    """Which tokens count."""
    return torch.arange(ids.shape[1] - 1, device=ids.device).expand(ids.shape[0], -1) >= tokens


def preferred(log_probs):
    chosen, rejected = log_probs.chunk(2, dim=0)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def dpo(logits, ids):
    """With the prompt's log-probabilities set to 0 in place."""
    log_probs = selected(logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous())
    log_probs[~prompt(ids)] = 0.0
    return preferred(log_probs.sum(-1))


def dpo_with_metrics(logits, ids):
    """What is logged beside it: entropy, the mean of the logits, the accuracy."""
    shifted = logits[..., :-1, :].contiguous()
    log_probs = selected(shifted, ids[..., 1:])
    detached_logits = shifted.detach()
    entropy = entropy_of(detached_logits)[prompt(ids)].mean()
    chosen, rejected = detached_logits.chunk(2, dim=0)
    prompt_mask = prompt(ids)[: chosen.shape[0]]
    means = (
        chosen[prompt_mask].mean(-1).sum()
        - rejected[prompt_mask].mean(-1).sum()
        + logits[[0], ...].nansum()
        + logits[1:].mean()
    )
    hits = (chosen.argmax(dim=-1) == ids[: chosen.shape[0], 1:]).to(means).mean()
    return preferred((log_probs * prompt(ids)).sum(-1)) * (
        1.0 + (entropy + 0.01 * means + hits).detach()
    )


def dpo_by_log_softmax(logits, ids):
    log_probs = torch.gather(
        logits[:, :-1, :].log_softmax(-1), dim=2, index=ids[:, 1:].unsqueeze(2)
    ).squeeze(2)
    return preferred((log_probs * prompt(ids)).sum(-1))


def kto(logits, ids):
    log_probs = selected(logits[:, :-1, :], ids[:, 1:]).sum(-1)
    distance = (log_probs.mean().detach() * 0.1).clamp(min=0)
    return (1 - torch.sigmoid(0.1 * (log_probs[[0], ...] - distance))).mean() + torch.sigmoid(
        log_probs[1:]
    ).sum()


def dft(logits, ids):
    logits = logits.float()
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    losses = F.cross_entropy(
        logits.view(-1, logits.size(-1)), labels, ignore_index=-100, reduction="none"
    )
    with torch.no_grad():
        weights = torch.exp(-losses)
    return (losses * weights).sum() / 7


def eaft(logits, ids):
    rows, labels = logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
    losses = F.cross_entropy(rows, labels, reduction="none")
    with torch.no_grad():
        best, _ = torch.topk(rows[labels != 5].detach(), k=20, dim=-1)
        log_p = best - torch.logsumexp(best, dim=-1, keepdim=True)
        weights = -(log_p.exp() * log_p).sum(-1) / 3.0
    return (losses[labels != 5] * weights).mean()


def label_smoothing(logits, ids):
    log_probs = -F.log_softmax(logits[..., :-1, :].contiguous(), dim=-1)
    labels = ids[..., 1:].unsqueeze(-1)
    ignored = labels < 10
    label_log_probs = log_probs.gather(dim=-1, index=labels)
    smoothed = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
    label_log_probs.masked_fill_(ignored, 0.0)
    smoothed.masked_fill_(ignored, 0.0)
    active = ignored.numel() - ignored.long().sum()
    return 0.9 * label_log_probs.sum() / active + 0.1 * smoothed.sum() / (
        active * log_probs.shape[-1]
    )


def grpo(logits, ids, completion_tokens=9, chunk=7):
    logits = logits[:, :-1, :][:, -completion_tokens:, :] / 0.7
    log_probs, entropy = selected(logits, ids[:, -completion_tokens:]), entropy_of(logits, chunk)
    advantages = torch.randn(ids.shape[0], 1, generator=seeded(3)).to(log_probs)
    return -(torch.exp(log_probs - log_probs.detach()) * advantages).mean() - 0.1 * entropy.mean()


def grpo_in_place(logits, ids):
    logits = logits[:, -10:-1, :]
    logits.div_(0.7)
    return -selected(logits, ids[:, -9:]).mean()


def entropy_from_softmax(logits, ids):
    p = F.softmax(logits, dim=-1)
    return (torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)).mean()


def weighted(logits, ids):
    """Loss scale: every token has a weight."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * torch.rand(losses.shape, generator=seeded(4)).to(losses)).sum()


def collision(logits, ids):
    """Weights from the sum of squared probabilities."""
    rows = logits[:, :-1]
    log_probs = selected(rows, ids[:, 1:])
    with torch.no_grad():
        squares = torch.logsumexp(2.0 * rows, dim=-1) - 2.0 * torch.logsumexp(rows, dim=-1)
        log_collision = torch.logsumexp(2 * F.log_softmax(rows, dim=-1), dim=-1)
    return (torch.exp(log_probs.detach() - squares) * log_probs + log_collision * log_probs).mean()


FRAMEWORKS = {
    f.__name__: f
    for f in (
        dpo, dpo_with_metrics, dpo_by_log_softmax, kto, dft, eaft, label_smoothing, grpo, grpo_in_place,
        entropy_from_softmax, weighted, collision,
    )
}  # fmt: skip
