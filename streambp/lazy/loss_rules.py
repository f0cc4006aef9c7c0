"""Rules for torch's losses of lazy rows: losses are computed from the entries at the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.foreign import torch_own
from streambp.head.log_probs import check_labels
from streambp.lazy.expression import RecordedCall
from streambp.lazy.head import FunctionCalculation, StatisticsCalculation
from streambp.lazy.row_rules import (
    empty_sample,
    gather_entries,
    match_log_softmax,
    note,
    record_elementwise,
    reduce_all,
)
from streambp.lazy.tensor import LazyLogits, flatten_node


def kl_div(
    func: Callable[..., Any],
    x: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """Compute F.kl_div block by block, for lazy logits or lazy log-probabilities (tensors whose
    values are computed on use) as input, target or both.

    Return NotImplemented if the deprecated arguments size_average or reduce are given. The caller
    then computes the complete tensors.

    Args:
        func: torch's F.kl_div.
        x: F.kl_div's input: log-probabilities [*tokens, V].
        target: [*tokens, V].
        size_average, reduce, reduction, log_target: arguments of F.kl_div.

    Returns:
        The loss, a scalar; lazy values [*tokens, V] for reduction "none".
    """
    if not _is_reduction(size_average, reduce, "mean" if reduction == "batchmean" else reduction):
        return NotImplemented
    by_entry = record_elementwise(
        "kl_div", func, (x, target), {"reduction": "none", "log_target": log_target}
    )
    if by_entry is NotImplemented or reduction == "none":
        return by_entry
    total = reduce_all("sum", torch_own.sum, by_entry, [], {})
    if reduction == "batchmean":
        return total / by_entry.shape[0]
    if reduction == "mean":
        return total / by_entry.numel()
    return total


def label_loss(
    name: str,
    func: Callable[..., Any],
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute F.cross_entropy of lazy logits, or F.nll_loss of lazy log-probabilities, block by
    block. The values of a lazy tensor are computed on use; the complete tensor is not built here.

    Args:
        name: "cross_entropy" or "nll_loss".
        func: torch's function of this name.
        x: lazy logits or log-probabilities, [N, V] or [B, V, T].
        target: labels [N] or [B, T].
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: arguments of the
            function.

    Returns:
        The loss, in the dtype of torch's own result. NotImplemented with class weights,
            probabilities as target, or the deprecated arguments size_average and reduce; the caller
            then computes the complete tensor.

    Raises:
        StreamBPError: a label is outside of the vocabulary and not `ignore_index`.
    """
    if (
        weight is not None
        or not _is_reduction(size_average, reduce, reduction)
        or not isinstance(x, LazyLogits)
    ):
        return NotImplemented
    if not isinstance(target, Tensor) or target.is_floating_point() or x.tokens != target.shape:
        return NotImplemented
    if x.dim() > 2 and x.classes != 1:
        return NotImplemented
    loss_arguments: dict[str, Any] = {"reduction": "none"}
    if name == "cross_entropy":
        loss_arguments["label_smoothing"] = label_smoothing
    with torch.no_grad():
        dtype = func(empty_sample(x), target.reshape(-1)[:0], **loss_arguments).dtype
    log_probs = x = x.with_classes(None)
    if name == "cross_entropy":
        log_probs = record_elementwise("log_softmax", torch_own.log_softmax, (x,), {"dim": -1})
    note(x, name)
    labels = target.reshape(-1).detach().clone()  # [N]
    check_labels(labels, log_probs.width, ignore_index)
    labelled = labels != ignore_index  # ignored tokens are not computed
    if labels.is_meta:
        token_positions = torch.arange(labels.shape[0], device=labels.device)
    else:
        token_positions = labelled.nonzero().squeeze(-1)
    rows = log_probs.with_tokens(lambda t: t.reshape(-1, t.shape[-1])[token_positions], view=False)
    losses = _smoothed_loss(rows, labels[token_positions], label_smoothing)
    if reduction == "none":
        scattered = losses.new_zeros(labels.shape[0]).index_put((token_positions,), losses)
        return scattered.to(dtype).view(target.shape)
    total = losses.sum()
    if reduction == "mean":
        total = total / labelled.sum()
    return total.to(dtype)


def _is_reduction(size_average: Any, reduce: Any, reduction: str) -> bool:
    return size_average is None and reduce is None and reduction in ("none", "sum", "mean")


def _smoothed_loss(log_probs: LazyLogits, labels: Tensor, smoothing: float) -> Tensor:
    """Return each token's loss with label smoothing, [N]. The loss is (1 - smoothing) times -log p of
    the label, plus smoothing times the mean of -log p over the vocabulary.

    Args:
        log_probs: lazy log-probabilities [N, V].
        labels: [N].
        smoothing: weight of the mean, from 0 to 1.
    """
    reading_and_sign = match_log_softmax(log_probs.node)
    if smoothing and reading_and_sign is not None:
        target, lse, mean = log_probs.compute(
            StatisticsCalculation(reading_and_sign[0], labels, lse=True, mean=True)
        )
        return lse - target * (1.0 - smoothing) - mean * smoothing
    losses = -gather_entries(log_probs, labels[:, None])[:, 0]
    if smoothing:
        (mean,) = log_probs.compute(
            FunctionCalculation(
                flatten_node(RecordedCall(torch_own.mean, (log_probs.node, -1), {}, True, "mean"))
            )
        )
        losses = losses * (1.0 - smoothing) - mean * smoothing
    return losses
