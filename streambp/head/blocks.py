"""Arithmetic of one block of logits: project, fold into running statistics, differentiate.

Everything after the matrix product is computed in promote_types(dtype, float32). The product and
its gradient are computed in the hidden states' dtype, as in the model. N tokens, V vocabulary
entries, h hidden size.

The Triton kernels (`triton_fold.serves`) need the raw products of a block only, in the dtype of the
matrix product. A first kernel reads the products for the statistics, and a second kernel overwrites
the products with the gradient. torch's operators need float32 copies, so their blocks are smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from streambp.device import without_autocast
from streambp.foreign import nn_own, torch_own
from streambp.head.triton_fold import fold_rows, supports_kernels
from streambp.head.triton_gradient import write_gradient

LOGITS_PER_BLOCK = 2**25  # logits of a block for torch: 128 MiB in float32, several times
BYTES_PER_BLOCK = 2**29  # bytes of a block for the kernels: 2**28 logits in half precision, once
TOKENS_PER_BLOCK = 1024
TOKENS_IN_PLACE = 2048


def block_size(
    vocabulary: int, dtype: torch.dtype, device: torch.device, full_vocabulary: bool = False
) -> tuple[int, int]:
    """Return the size of a block of logits as a pair: number of tokens, number of vocabulary
    entries. The logits are computed block by block.

    The result does not depend on values of tensors, so that runs are bitwise reproducible. Each
    block of tokens reads and writes the weight's gradient dW, 4 V h bytes each, so blocks need many
    tokens. A block for Triton's kernels has at most 2,048 tokens and BYTES_PER_BLOCK bytes. Reading
    and writing dW for 2,048 tokens takes less time than the matrix products.

    Args:
        vocabulary: V, the number of entries of the full vocabulary.
        dtype: dtype of the output projection's matrix products.
        device: device of the products.
        full_vocabulary: True: a block must contain the full vocabulary. False: a block may contain
            a part of it.
    """
    if supports_kernels(device, dtype):
        tokens = min(TOKENS_IN_PLACE, max(1, BYTES_PER_BLOCK // (vocabulary * dtype.itemsize)))
        if tokens > 128:
            tokens -= tokens % 128
        return tokens, vocabulary
    if full_vocabulary:
        return min(TOKENS_PER_BLOCK, max(1, LOGITS_PER_BLOCK // vocabulary)), vocabulary
    return TOKENS_PER_BLOCK, max(1, LOGITS_PER_BLOCK // TOKENS_PER_BLOCK)


@dataclasses.dataclass(frozen=True)
class Projection:
    """Steps from the output projection's matrix product to logits: softcap(logit_scale * product) /
    temperature, where product = hidden @ W^T + bias.

    Attributes:
        logit_scale: factor of the products.
        softcap: bound of the logits, softcap * tanh(x / softcap); None: no softcap.
        temperature: divisor of the logits.
        slope: factor of the products inside of tanh, where the model's own code computes softcap *
            tanh(slope * product). The factor equals logit_scale / softcap up to rounding, and is
            stored to round complete logits like the model. Ignored if softcap is None.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    slope: float = 1.0

    def logits(self, product: Tensor) -> Tensor:
        """Return the logits [n, v] for matrix products [n, v] of the output projection, in
        promote_types(dtype, float32)."""
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch_own.tanh(logits / self.softcap) * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient [n, v] of the matrix product hidden @ W^T + bias, for a gradient of
        the logits that `logits` has computed from the product.

        Args:
            grad: gradient of the logits [n, v]; overwritten with the result.
            logits: the logits [n, v], from the method `logits`.
        """
        if self.softcap is not None:
            grad.mul_(1.0 - (logits * (self.temperature / self.softcap)).square())
        return grad.mul_(self.logit_scale / self.temperature)


class HeadProducts:
    """Matrix products hidden @ W^T + bias of an output projection, computed for a part of the
    vocabulary at a time. The weight is cast to the hidden states' dtype.

    Args:
        weight: [V, h].
        bias: [V], or None for no bias.
        keeps_dtype: False: the bias is cast to the hidden states' dtype. True: the model's code
            adds the bias after the projection. A bias in a wider dtype is then not cast, and the
            sum is in the wider dtype, as in the model.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, keeps_dtype: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._keeps_dtype = keeps_dtype
        self.vocabulary: int = weight.shape[0]

    def multiply(self, hidden: Tensor, columns: slice) -> Tensor:
        """Return the matrix products [n, v] of hidden [n, h], bias included, for the v vocabulary
        entries in the slice `columns`."""
        weight = self.weight(hidden.dtype)
        bias = self._bias
        if bias is not None:
            bias = bias[columns]
        # hidden states are in autocast's dtype already, unless float32 is required
        with without_autocast(hidden.device.type):
            if bias is None or bias.dtype == hidden.dtype:
                return nn_own.linear(hidden, weight[columns], bias)
            return torch_own.add(nn_own.linear(hidden, weight[columns]), bias)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [V, h] cast to `dtype`. The cast weight is stored for later calls. The
        bias is cast as well, unless it keeps its wider dtype (`keeps_dtype`)."""
        if self._weight.dtype != dtype:
            self._weight = self._weight.to(dtype)
        bias = self._bias
        if bias is not None and bias.dtype != dtype:
            is_wider = torch.promote_types(bias.dtype, dtype) != dtype
            if not (self._keeps_dtype and is_wider):
                self._bias = bias.to(dtype)
        return self._weight


def token_blocks(count: int, tokens: int = TOKENS_PER_BLOCK) -> Iterator[slice]:
    """Return an iterator over slices that divide the range from 0 to `count` into blocks of
    `tokens` entries. The last block may be shorter. Used for tokens, and for vocabulary entries."""
    return (slice(start, min(start + tokens, count)) for start in range(0, count, tokens))


@dataclasses.dataclass(frozen=True)
class Fold:
    """Softmax statistics of n tokens over a part of the vocabulary, from which log-probabilities
    and entropy are computed. Each field is [n]. z are the logits of a token in this part. The
    statistics of several parts can be merged.

    All but `best` are in promote_types(dtype, float32).

    Attributes:
        max: the largest logit of the part.
        sum: sum of exp(z - max) over the logits z; lse = max + log(sum).
        target: the label's logit, or 0 if the label is in another part.
        mean: sum of exp(z - max) * z.
        squares: sum of exp(z - max)^2.
        total: sum of z.
        best: index in the full vocabulary of the first entry with the largest logit.
    """

    max: Tensor
    sum: Tensor
    target: Tensor
    mean: Tensor
    squares: Tensor
    total: Tensor
    best: Tensor

    def lse(self) -> Tensor:
        """Return the logsumexp of each token's logits in this part of the vocabulary, [n]."""
        return self.max + torch_own.log(self.sum)

    def results(
        self, labels: Tensor, fields: Collection[str], entries: int
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of `TokenLogProbs` as a tuple, [n] each: log_probs, entropy,
        mean_log_probs, is_top1, mean_logits, log_sum_sq_probs. All but log_probs are None unless
        their name is in `fields`.

        The statistics must cover the full vocabulary. Statistics of parts of the vocabulary must be
        merged before (`merge`).

        Args:
            labels: the labels [n].
            fields: names of the optional fields to compute.
            entries: V, the number of vocabulary entries.
        """
        lse = self.lse()
        mean_logits = self.total / entries
        entropy: Tensor | None = None
        mean_log_probs: Tensor | None = None
        is_top1: Tensor | None = None
        log_sum_sq_probs: Tensor | None = None
        if "entropy" in fields:
            entropy = lse - self.mean / self.sum
        if "mean_log_probs" in fields:
            mean_log_probs = mean_logits - lse
        if "is_top1" in fields:
            is_top1 = self.best == labels
        if "log_sum_sq_probs" in fields:
            log_sum_sq_probs = torch_own.log(self.squares) - 2.0 * torch_own.log(self.sum)
        return (
            self.target - lse,
            entropy,
            mean_log_probs,
            is_top1,
            mean_logits if "mean_logits" in fields else None,
            log_sum_sq_probs,
        )

    def merge(self, later_fold: Fold) -> Fold:
        """Return the softmax statistics of two parts of the vocabulary together: of this part and
        of a later part.

        Args:
            later_fold: statistics of the same tokens over a part that comes later in the
                vocabulary.
        """
        top = torch_own.maximum(self.max, later_fold.max)
        base = _finite_maximum(top)
        own_factor = torch_own.exp(self.max - base)
        other_factor = torch_own.exp(later_fold.max - base)
        return Fold(
            top,
            self.sum * own_factor + later_fold.sum * other_factor,
            self.target + later_fold.target,
            self.mean * own_factor + later_fold.mean * other_factor,
            self.squares * own_factor.square() + later_fold.squares * other_factor.square(),
            self.total + later_fold.total,
            torch_own.where(later_fold.max > self.max, later_fold.best, self.best),
        )


def fold(product: Tensor, projection: Projection, labels: Tensor, block: slice) -> Fold:
    """Return softmax statistics of n tokens (largest logit, sum of exponentials, label's logit,
    ...) over a block of v vocabulary entries.

    The statistics are computed by one Triton kernel on CUDA and by torch's operators on other
    devices, with the same numbers up to rounding.

    Args:
        product: [n, v], matrix products of the output projection.
        projection: the map from matrix products to logits (scale, softcap, temperature).
        labels: the labels [n], indices in the full vocabulary.
        block: slice of the full vocabulary with the v entries of the columns.
    """
    if supports_kernels(product.device, product.dtype):
        values = fold_rows(
            product,
            labels,
            block.start,
            projection.logit_scale,
            projection.softcap,
            projection.temperature,
        )
        return Fold(*values)
    return fold_in_torch(projection.logits(product), labels, block)


def fold_in_torch(logits: Tensor, labels: Tensor, block: slice) -> Fold:
    """Return softmax statistics of n tokens (largest logit, sum of exponentials, label's logit,
    ...) over a block of v vocabulary entries, computed by torch's operators. Tests compare the
    Triton kernel with this function.

    Args:
        logits: [n, v].
        labels: the labels [n], indices in the full vocabulary.
        block: slice of the full vocabulary with the v entries of the columns.
    """
    top, best = logits.max(-1)
    weights = (logits - _finite_maximum(top)[:, None]).exp_()  # [n, v]
    in_block, column = locate(labels, block)
    target = torch_own.where(in_block, logits.gather(-1, column[:, None]).squeeze(-1), 0.0)
    squares = torch.linalg.vecdot(weights, weights)
    total = logits.sum(-1)
    summed = weights.sum(-1)
    none = weights == 0.0
    mean = weights.mul_(logits).masked_fill_(none, 0.0).sum(-1)  # 0 * -inf is 0 here
    return Fold(top, summed, target, mean, squares, total, best + block.start)


def _finite_maximum(top: Tensor) -> Tensor:
    """Return `top`, the largest logit [n] of each token, with 0 in place of -inf. The result is
    subtracted from all logits before exp, and -inf - -inf would be NaN."""
    return top.masked_fill(top == -torch.inf, 0.0)


def fold_vocabulary(
    normed: Tensor, products: HeadProducts, projection: Projection, labels: Tensor, entries: int
) -> Fold:
    """Return softmax statistics of n tokens (largest logit, sum of exponentials, label's logit,
    ...) over the full vocabulary. Logits are computed for `entries` vocabulary entries at a time.

    Args:
        normed: [n, h], the output projection's input, after the final norm.
        products: computes the output projection's matrix products.
        projection: the map from matrix products to logits (scale, softcap, temperature).
        labels: the labels [n].
        entries: number of vocabulary entries of a block.
    """
    folded: Fold | None = None
    for columns in token_blocks(products.vocabulary, entries):
        block_fold = fold(products.multiply(normed, columns), projection, labels, columns)
        folded = block_fold if folded is None else folded.merge(block_fold)
    assert folded is not None
    return folded


def locate(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Find the labels' columns in a block of logits [n, v], which has some of the vocabulary
    entries. Return two tensors [n]: a bool mask that is True for labels inside of the block, and
    the column of each label's logit, 0 where the mask is False.

    Args:
        labels: the labels [n], indices in the full vocabulary.
        block: slice of the full vocabulary with the block's v entries.
    """
    in_block = (labels >= block.start) & (labels < block.stop)
    return in_block, torch_own.where(in_block, labels - block.start, 0)


@dataclasses.dataclass(frozen=True)
class TokenGradients:
    """Tensors from which the gradient of n tokens' logits is computed: softmax statistics, and the
    gradients of the values that were computed from the logits. All tensors are [n].

    Attributes:
        labels: the labels, indices in the vocabulary.
        lse: log of the sum of exp(logit) over the full vocabulary.
        entropy: entropy over the full vocabulary; None if the entropy has no gradient.
        vocabulary: V, the number of vocabulary entries.
        d_log_probs: gradient of the labels' log-probabilities; None: no gradient.
        d_entropy: gradient of the entropy; None: no gradient.
        d_mean_log_probs: gradient of the mean of log p over the vocabulary; None: no gradient.
        d_lse: gradient of lse; None: no gradient.
    """

    labels: Tensor
    lse: Tensor
    entropy: Tensor | None
    vocabulary: int
    d_log_probs: Tensor | None
    d_entropy: Tensor | None = None
    d_mean_log_probs: Tensor | None = None
    d_lse: Tensor | None = None

    def select_tokens(self, block: slice) -> TokenGradients:
        """Return a copy with the values [n] of the tokens in the slice `block` alone."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return TokenGradients(*(x[block] if isinstance(x, Tensor) else x for x in values))  # type: ignore[arg-type]


def product_gradient(
    product: Tensor, projection: Projection, statistics: TokenGradients, block: slice
) -> Tensor:
    """Return the gradient of the output projection's matrix products [n, v], for a block of
    vocabulary entries, in the products' dtype.

    A Triton kernel on CUDA overwrites `product` with the gradient. torch's operators, elsewhere, do
    not change `product`.

    Args:
        product: the matrix products [n, v].
        projection: the map from matrix products to logits (scale, softcap, temperature).
        statistics: softmax statistics of the n tokens, and the gradients of their results.
        block: slice of the full vocabulary with the v entries of the columns.
    """
    if not supports_kernels(product.device, product.dtype):
        return gradient_in_torch(product, projection, statistics, block)
    write_gradient(
        product, statistics.labels, block.start, statistics.lse,
        (statistics.d_log_probs, statistics.d_entropy, statistics.d_mean_log_probs, statistics.d_lse),
        statistics.entropy, statistics.vocabulary,
        projection.logit_scale, projection.softcap, projection.temperature,
    )  # fmt: skip
    return product


def gradient_in_torch(
    product: Tensor, projection: Projection, statistics: TokenGradients, block: slice
) -> Tensor:
    """Return the gradient of the output projection's matrix products [n, v] by torch's operators,
    which do not change `product`. Tests compare the Triton kernel with this function.

    Args:
        product: [n, v], matrix products of the output projection.
        projection: the map from matrix products to logits (scale, softcap, temperature).
        statistics: softmax statistics of the n tokens, and the gradients of their results.
        block: slice of the full vocabulary with the v entries of the columns.
    """
    logits = projection.logits(product)
    return projection.backward(logits_gradient(logits, statistics, block), logits).to(product.dtype)


def logits_gradient(logits: Tensor, statistics: TokenGradients, block: slice) -> Tensor:
    """Return the gradient of logits [n, v], for a block of vocabulary entries.

    The gradient is the sum of these terms, for logits z with softmax p and label y:

        log p_y = z_y - lse            (onehot - p) g
        H = -sum p log p               -p (log p + H) g_H
        mean log p = mean z - lse      (1 / V - p) g_mean
        lse                            p g_lse

    Args:
        logits: [n, v].
        statistics: softmax statistics of the n tokens, and the gradients g of their results.
        block: slice of the full vocabulary with the v entries of the columns.
    """
    lse = statistics.lse[:, None]
    entropy = statistics.entropy
    grad = (logits - lse).exp_()  # p, in the single buffer [n, v] of this function
    scale = torch.zeros_like(lse)  # [n, 1]
    if statistics.d_log_probs is not None:
        scale = scale - statistics.d_log_probs[:, None]
    if statistics.d_mean_log_probs is not None:
        scale = scale - statistics.d_mean_log_probs[:, None]
    if statistics.d_lse is not None:
        scale = scale + statistics.d_lse[:, None]
    if entropy is not None and statistics.d_entropy is not None:
        scale = scale - (logits - lse + entropy[:, None]) * statistics.d_entropy[:, None]
        scale.masked_fill_(grad == 0.0, 0.0)  # 0 * log 0 is 0 here
    grad.mul_(scale)
    if statistics.d_mean_log_probs is not None:
        grad.add_(statistics.d_mean_log_probs[:, None] / statistics.vocabulary)
    if statistics.d_log_probs is None:
        return grad
    in_block, column = locate(statistics.labels, block)
    return grad.scatter_add_(
        -1, column[:, None], torch_own.where(in_block, statistics.d_log_probs, 0.0)[:, None]
    )
