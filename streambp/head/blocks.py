"""The arithmetic of one block of logits: project, fold into running statistics, differentiate.

Everything is computed in promote_types(dtype, float32) once the matrix product is done; the product itself runs in the
hidden states' dtype, as in the model. N tokens, V vocabulary entries, h hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from streambp.head.triton_fold import AVAILABLE, fold_rows

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


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Raw products [n, v] of hidden [n, h] with weight [v, h] and bias [v], which take the hidden states' dtype."""
    weight = weight.to(hidden.dtype)
    return torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))


def token_blocks(count: int, tokens: int = TOKENS_PER_BLOCK) -> Iterator[slice]:
    return (slice(start, min(start + tokens, count)) for start in range(0, count, tokens))


def vocabulary_blocks(size: int, tokens: int) -> Iterator[slice]:
    step = max(1, LOGITS_PER_BLOCK // max(1, tokens))
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


@dataclasses.dataclass(frozen=True)
class Fold:
    """Softmax statistics of n tokens over one or more vocabulary blocks, [n] each in the accumulation dtype.

    max, sum: lse = max + log(sum); target: the label's logit, 0 if it lies elsewhere; mean: sum of exp(z - max) * z;
    squares: sum of exp(z - max)^2; total: sum of z; best: the first entry with the largest logit, an integer.
    """

    max: Tensor
    sum: Tensor
    target: Tensor
    mean: Tensor
    squares: Tensor
    total: Tensor
    best: Tensor

    def merge(self, other: Fold) -> Fold:
        """Of both sets of entries; the other's come later in the vocabulary."""
        top = torch.maximum(self.max, other.max)
        mine, theirs = torch.exp(self.max - top), torch.exp(other.max - top)
        return Fold(
            top,
            self.sum * mine + other.sum * theirs,
            self.target + other.target,
            self.mean * mine + other.mean * theirs,
            self.squares * mine.square() + other.squares * theirs.square(),
            self.total + other.total,
            torch.where(other.max > self.max, other.best, self.best),
        )


def fold(product: Tensor, projection: Projection, labels: Tensor, block: slice) -> Fold:
    """The statistics of one block of raw products [n, v]: a Triton kernel on CUDA, torch elsewhere, the same numbers."""
    if product.is_cuda and AVAILABLE:
        values = fold_rows(product, labels, block.start, projection.logit_scale, projection.softcap, projection.temperature)
        return Fold(*values)
    return fold_in_torch(projection.logits(product), labels, block)


def fold_in_torch(logits: Tensor, labels: Tensor, block: slice) -> Fold:
    """What the kernel is tested against."""
    top, best = logits.max(-1)
    weights = (logits - top[:, None]).exp_()
    here, column = locate(labels, block)
    target = torch.where(here, logits.gather(-1, column[:, None]).squeeze(-1), 0.0)
    squares = torch.linalg.vecdot(weights, weights)
    total, summed = logits.sum(-1), weights.sum(-1)
    return Fold(top, summed, target, weights.mul_(logits).sum(-1), squares, total, best + block.start)


class Statistics:
    """Folds vocabulary blocks into the statistics of n tokens."""

    def __init__(self, labels: Tensor, wanted: Wanted) -> None:
        self.labels = labels  # [n]
        self.wanted = wanted
        self.folded: Fold | None = None
        self.entries = 0

    def add(self, product: Tensor, projection: Projection, block: slice) -> None:
        """Take in raw products [n, v] of the entries in `block`, which follows the blocks before it."""
        found = fold(product, projection, self.labels, block)
        self.folded = found if self.folded is None else self.folded.merge(found)
        self.entries += product.shape[-1]

    @property
    def so_far(self) -> Fold:
        assert self.folded is not None
        return self.folded

    def lse(self) -> Tensor:
        return self.so_far.max + torch.log(self.so_far.sum)

    def results(self) -> tuple[Tensor | None, ...]:
        """log_probs, then the fields of `Wanted` in order, [n] each; None for what is not wanted."""
        folded, lse, wanted = self.so_far, self.lse(), self.wanted
        mean_logits = folded.total / self.entries
        return (
            folded.target - lse,
            lse - folded.mean / folded.sum if wanted.entropy else None,
            mean_logits - lse if wanted.mean_log_probs else None,
            folded.best == self.labels if wanted.is_top1 else None,
            mean_logits if wanted.mean_logits else None,
            torch.log(folded.squares) - 2.0 * torch.log(folded.sum) if wanted.log_sum_sq_probs else None,
        )


def nothing(wanted: Wanted, empty: Tensor) -> tuple[Tensor | None, ...]:
    """What `Statistics.results` is for no tokens at all."""
    flags = [getattr(wanted, field.name) for field in dataclasses.fields(wanted)]
    return empty, *(empty if flag else None for flag in flags)


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
