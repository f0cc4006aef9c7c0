"""The arithmetic of one block of logits: project, fold into running statistics, differentiate.

Everything is computed in promote_types(dtype, float32) once the matrix product is done; the product itself runs in the
hidden states' dtype, as in the model. N tokens, V vocabulary entries, h hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

LOGITS_PER_BLOCK = 2**25  # 128 MiB of float32 logits
TOKENS_PER_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Projection:
    """How logits come from normed hidden states: softcap(scale * (hidden @ W^T + bias)) / temperature."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def logits(self, product: Tensor) -> Tensor:
        """Raw products [n, v] -> logits [n, v] in the accumulation dtype."""
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """d loss / d product from d loss / d logits; `grad` is overwritten."""
        if self.softcap is not None:
            grad.mul_(1.0 - (logits * (self.temperature / self.softcap)).square())
        return grad.mul_(self.logit_scale / self.temperature)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which statistics of each position's distribution are computed beside the label's log-probability."""

    entropy: bool = False
    mean_log_probs: bool = False
    is_top1: bool = False
    mean_logits: bool = False
    log_sum_sq_probs: bool = False


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, projection: Projection) -> Tensor:
    """Logits [n, v] of hidden [n, h] for weight [v, h] and bias [v]; weight and bias take the hidden states' dtype."""
    weight = weight.to(hidden.dtype)
    product = torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))
    return projection.logits(product)


def token_blocks(count: int, tokens: int = TOKENS_PER_BLOCK) -> Iterator[slice]:
    return (slice(start, min(start + tokens, count)) for start in range(0, count, tokens))


def vocabulary_blocks(size: int, tokens: int) -> Iterator[slice]:
    step = max(1, LOGITS_PER_BLOCK // max(1, tokens))
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


class Statistics:
    """Running softmax statistics of n tokens over vocabulary blocks.

    max, sum: lse = max + log(sum); target: the label's logit; mean: sum of exp(z - max) * z, for the entropy; squares:
    sum of exp(2 * (z - max)); total: sum of z; best: the first entry with the largest logit.
    """

    def __init__(self, labels: Tensor, dtype: torch.dtype, wanted: Wanted) -> None:
        self.labels = labels  # [n]
        self.max = torch.full(labels.shape, -torch.inf, dtype=dtype, device=labels.device)
        self.sum = torch.zeros_like(self.max)
        self.target = torch.zeros_like(self.max)
        self.mean = torch.zeros_like(self.max) if wanted.entropy else None
        self.squares = torch.zeros_like(self.max) if wanted.log_sum_sq_probs else None
        self.total = torch.zeros_like(self.max) if wanted.mean_logits or wanted.mean_log_probs else None
        self.wanted = wanted
        self.best = torch.zeros_like(labels) if wanted.is_top1 else None
        self.entries = 0

    def add(self, logits: Tensor, block: slice) -> None:
        largest = logits.amax(-1)
        if self.best is not None:
            self.best = torch.where(largest > self.max, logits.argmax(-1) + block.start, self.best)
        top = torch.maximum(self.max, largest)
        shrink = torch.exp(self.max - top)
        weights = (logits - top[:, None]).exp_()
        self.sum = self.sum * shrink + weights.sum(-1)
        if self.squares is not None:
            self.squares = self.squares * shrink.square() + torch.linalg.vecdot(weights, weights)
        if self.mean is not None:
            self.mean = self.mean * shrink + (weights * logits).sum(-1)
        if self.total is not None:
            self.total = self.total + logits.sum(-1)
        self.entries += logits.shape[-1]
        self.max = top
        here, column = locate(self.labels, block)
        self.target += torch.where(here, logits.gather(-1, column[:, None]).squeeze(-1), 0.0)

    def lse(self) -> Tensor:
        return self.max + torch.log(self.sum)

    def results(self) -> tuple[Tensor | None, ...]:
        """The fields of `Wanted` in order, [n] each; None for what is not wanted."""
        lse = self.lse()
        mean_logits = None if self.total is None else self.total / self.entries
        return (
            None if self.mean is None else lse - self.mean / self.sum,
            mean_logits - lse if mean_logits is not None and self.wanted.mean_log_probs else None,
            None if self.best is None else self.best == self.labels,
            mean_logits if self.wanted.mean_logits else None,
            None if self.squares is None else torch.log(self.squares) - 2.0 * torch.log(self.sum),
        )


def locate(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Which labels lie in a vocabulary block, and their column there (0 for the others)."""
    here = (labels >= block.start) & (labels < block.stop)
    return here, torch.where(here, labels - block.start, 0)


@dataclasses.dataclass(frozen=True)
class Upstream:
    """Gradients of n tokens' values; None for a value that is not wanted or not used."""

    log_probs: Tensor | None
    entropy: Tensor | None = None
    mean_log_probs: Tensor | None = None

    def at(self, rows: Tensor | slice) -> Upstream:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Upstream(*(None if value is None else value[rows] for value in values))


def logits_gradient(
    logits: Tensor,
    lse: Tensor,
    labels: Tensor,
    block: slice,
    upstream: Upstream,
    entropy: Tensor | None = None,
    vocabulary: int = 1,
) -> Tensor:
    """d loss / d logits [n, v] of one vocabulary block.

    log p_y = z_y - lse gives (onehot - p) g; H = -sum p log p gives -p (log p + H) g_H; mean log p = mean z - lse gives
    (1 / V - p) g_mean.
    """
    grad = (logits - lse[:, None]).exp_()  # p, in the one buffer of [n, v] that this needs
    scale = torch.zeros_like(lse)[:, None]
    if upstream.log_probs is not None:
        scale = scale - upstream.log_probs[:, None]
    if upstream.mean_log_probs is not None:
        scale = scale - upstream.mean_log_probs[:, None]
    if entropy is not None and upstream.entropy is not None:
        scale = scale - (logits - lse[:, None] + entropy[:, None]) * upstream.entropy[:, None]
    grad.mul_(scale)
    if upstream.mean_log_probs is not None:
        grad.add_(upstream.mean_log_probs[:, None] / vocabulary)
    if upstream.log_probs is None:
        return grad
    here, column = locate(labels, block)
    return grad.scatter_add_(-1, column[:, None], torch.where(here, upstream.log_probs, 0.0)[:, None])
