"""Per-token log-probabilities of hidden @ W^T without logits (DESIGN.md section 2, "Head").

token_log_probs
  -> BlockwiseLogProbs      autograd Function: one pass forward, blocks recomputed in backward
  -> one_pass_nll           sum of -log p, with its gradient computed in forward (`one_pass.py`)
       both on HeadInputs   inputs of a token block: rows, norm, weight
       and blocks.*         arithmetic of one [tokens, vocabulary] block
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streambp.accumulate import GradientSum, add_product
from streambp.device import has_data
from streambp.errors import BackwardError, StreamBPError
from streambp.foreign import torch_own
from streambp.head.blocks import (
    HeadProducts,
    Projection,
    TokenGradients,
    block_size,
    fold_in_torch,
    fold_vocabulary,
    product_gradient,
    token_blocks,
)
from streambp.head.version_check import VersionCheck
from streambp.layer.oom import run_outside_with_retry
from streambp.layer.recompute import Autocast, Parameters
from streambp.tensors import check_tensors, full_shape


def check_labels(labels: Tensor, vocabulary: int, ignore_index: int | None) -> None:
    """Raise if a label is outside the vocabulary. The check waits for the device.

    Such a label would select no logit without the check, and the result would still look like a
    log-probability.

    Args:
        labels: [...] integers; labels without data (on meta, or fake) are not checked.
        vocabulary: V, the number of vocabulary entries.
        ignore_index: an additional valid label; None: there is none.

    Raises:
        StreamBPError: a label is negative, or not below `vocabulary`.
    """
    if not has_data(labels) or labels.numel() == 0:
        return
    wrong = (labels < 0) | (labels >= vocabulary)
    ignored = ""
    if ignore_index is not None:
        wrong = wrong & (labels != ignore_index)
        ignored = f" or be {ignore_index} (ignored)"
    if bool(wrong.any()):
        raise StreamBPError(
            f"labels hold {int(labels[wrong][0])}; they must lie in [0, {vocabulary}){ignored}. "
            "Check that the tokenizer belongs to this model."
        )


ROWS_PER_BLOCK = 4096
METRICS = ("is_top1", "mean_logits", "log_sum_sq_probs")


@dataclasses.dataclass(frozen=True)
class TokenLogProbs:
    """Result of `token_log_probs`: tensors shaped like the labels. Positions with an ignored label
    have 0 (False). A field that was not requested is None.

    log_probs, entropy and mean_log_probs are differentiable, and are in promote_types(hidden dtype,
    float32).

    Attributes:
        log_probs: log-probability of the label.
        entropy: entropy of the distribution.
        mean_log_probs: mean of log p over the vocabulary.
        is_top1: True if the label has the largest logit.
        mean_logits: mean of the logits over the vocabulary.
        log_sum_sq_probs: log of the sum of the squared probabilities.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    mean_log_probs: Tensor | None = None
    is_top1: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenLogProbs:
        """Return a copy with `change` applied to every tensor [...], for example a reshape. Fields
        of None stay None."""
        values: list[Any] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = change(value)
            values.append(value)
        return TokenLogProbs(*values)


@dataclasses.dataclass
class HeadInputs:
    """Labels, final norm and settings with which an output projection and its loss are computed.
    Hidden states [N, h], weight [V, h] and bias [V] are not included.

    Attributes:
        labels: the labels [N].
        projection: the map from matrix products to logits (scale, softcap, temperature).
        norm: the final norm; an Identity if the hidden states are normed already.
        norm_parameters: trainable parameters of the norm.
        ignore_index: value in `labels` at positions without a label.
        autocast: autocast's state in forward.
        in_float32: True if products are computed in float32 or wider, also under autocast. False:
            in autocast's dtype, or in that of the normed hidden states.
        drop_saves: function that frees tensors saved for backward by layers, called if the head
            runs out of memory. The function returns True if it freed any. None: nothing to free.
        bias_dtype: dtype of the bias if the model's code adds it to the logits, after the
            projection; None: the projection adds the bias itself.
    """

    labels: Tensor
    projection: Projection
    norm: nn.Module
    norm_parameters: Parameters
    ignore_index: int
    autocast: Autocast
    in_float32: bool = False
    drop_saves: Callable[[], bool] | None = None
    bias_dtype: torch.dtype | None = None

    @functools.cached_property
    def rows(self) -> Tensor | None:
        """Return the indices [n] of the positions that have a label, in increasing order; None if
        all N positions have one.

        Labels without data (on the meta device) give all N indices, and not None, because the
        memory prediction runs on meta and must count this tensor, which most batches need.
        """
        if not has_data(self.labels):
            return torch.arange(self.labels.shape[0], device=self.labels.device)
        valid = self.labels != self.ignore_index
        if bool(valid.all()):
            return None
        return valid.nonzero().squeeze(-1)

    @property
    def row_labels(self) -> Tensor:
        """Return the labels [n] of the n positions that have a label, in order."""
        return self.labels if self.rows is None else self.labels[self.rows]

    @property
    def labelled(self) -> int:
        """Return the number of positions with a label."""
        positions = self.labels if self.rows is None else self.rows
        return positions.shape[0]

    def apply_norm(self, hidden: Tensor) -> Tensor:
        """Return the final norm of a block of hidden states [n, h], in the dtype of the output
        projection's matrix product."""
        with self.autocast.restore():
            hidden = self.norm.forward(hidden)  # the norm's hooks run in the model's own call only
            return hidden.to(self.product_dtype(hidden.dtype, hidden.device))

    def product_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Return the dtype of the output projection's matrix product, for normed hidden states of
        `dtype` on `device`. The result is float32 or wider with `in_float32`. Otherwise it is
        autocast's dtype if autocast was enabled in forward, else `dtype`."""
        if self.in_float32:
            return torch.promote_types(dtype, torch.float32)
        kind, enabled, autocast_dtype = self.autocast.states[0]
        # autocast does not cast float64
        casts = enabled and kind == device.type and dtype != torch.float64
        return autocast_dtype if casts else dtype

    def products(self, weight: Tensor, bias: Tensor | None) -> HeadProducts:
        """Return an object that multiplies hidden states by weight [V, h] and adds bias [V] or
        None."""
        return HeadProducts(weight, bias, keeps_dtype=self.bias_dtype is not None)

    def block_size(
        self, hidden: Tensor, vocabulary: int, full_vocabulary: bool = False
    ) -> tuple[int, int]:
        """Return the size of a block of logits as a pair: number of tokens, number of vocabulary
        entries. The logits are computed block by block.

        Args:
            hidden: the hidden states [N, h] before the final norm.
            vocabulary: V, the number of vocabulary entries.
            full_vocabulary: True: a block must contain the full vocabulary. False: a block may
                contain a part of it.
        """
        # A norm in float32 returns float32.
        dtype = functools.reduce(
            torch.promote_types, (p.dtype for p in self.norm.parameters()), hidden.dtype
        )
        dtype = self.product_dtype(dtype, hidden.device)
        if self.bias_dtype is not None:
            dtype = torch.promote_types(dtype, self.bias_dtype)
        return block_size(vocabulary, dtype, hidden.device, full_vocabulary)


def token_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    norm: nn.Module | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    mean_log_probs: bool = False,
    metrics: Sequence[str] = (),
    ignore_index: int = -100,
) -> TokenLogProbs:
    """Compute log softmax(logits)[label] of every token without all logits in memory at once.

    logits = softcap(logit_scale * (norm(hidden_states) @ W^T + bias)) / temperature, where
    softcap(x) is softcap * tanh(x / softcap).

    Args:
        hidden_states: [..., h], any floating dtype; the input of `norm` if there is one.
        weight: [V, h].
        labels: [...] integers, already shifted; `ignore_index` marks positions without a label.
        norm: the final norm; None: hidden_states are normed already.
        bias: [V]; None: no bias.
        logit_scale: factor of the matrix products.
        softcap: bound of the logits; None: no softcap.
        temperature: divisor of the logits.
        entropy: also return the entropy of each position's distribution, differentiable.
        mean_log_probs: also return the mean of log p over the vocabulary, differentiable (for label
            smoothing).
        metrics: further fields of `TokenLogProbs`, out of "is_top1", "mean_logits" and
            "log_sum_sq_probs".
        ignore_index: label of ignored positions.

    Returns:
        TokenLogProbs of shape [...]; ignored positions are 0 and get no gradient.

    Raises:
        StreamBPError: an argument is no tensor, or its shape or kind does not fit, a label lies
            outside the vocabulary, a metric is unknown, or the weight is an engine's shard.
    """
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown:
        raise StreamBPError(
            f"metrics names {unknown}, which streambp does not compute. Use some of "
            f"{list(METRICS)}."
        )
    _refuse_shards(weight=weight, bias=bias)
    check_tensors(
        hidden_states=(hidden_states, "... h", "floating"),
        weight=(weight, "V h", "floating"),
        labels=(labels, "...", "whole"),
        bias=(bias, "V", "floating"),
    )
    check_labels(labels, weight.shape[0], ignore_index)
    inputs = make_inputs(
        hidden_states, labels, Projection(logit_scale, softcap, temperature), norm, ignore_index
    )
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    fields = tuple(metrics)
    if mean_log_probs:
        fields = ("mean_log_probs", *fields)
    if entropy:
        fields = ("entropy", *fields)
    values = BlockwiseLogProbs.apply(
        inputs, fields, flat, weight, bias, *inputs.norm_parameters.current()
    )
    return TokenLogProbs(*values).each(lambda value: value.view(labels.shape))


def _refuse_shards(**tensors: Any) -> None:
    """Raise if a parameter is a shard of FSDP2 or ZeRO-3. Outside of the wrapped module's forward,
    each rank has only its shard.

    Args:
        tensors: weight [V, h] and bias [V] of the output projection, by name; None is skipped.

    Raises:
        StreamBPError: a tensor is a shard. The message names the engine.
    """
    for name, tensor in tensors.items():
        engine = None
        if isinstance(tensor, DTensor):
            engine = "FSDP2"
        elif isinstance(tensor, Tensor) and full_shape(tensor) != tensor.shape:
            engine = "DeepSpeed's ZeRO-3"
        if engine is not None:
            raise StreamBPError(
                f"{name} is a parameter of which {engine} has only a shard on this rank. Call "
                "token_log_probs inside the forward of the module that the engine wraps, where "
                "parameters are complete, or call the patched model with labels and "
                "output_log_probs=True."
            )


def make_inputs(
    hidden_states: Tensor,
    labels: Tensor,
    projection: Projection,
    norm: nn.Module | None,
    ignore_index: int,
) -> HeadInputs:
    """Return the inputs of the output projection for hidden_states [..., h] and labels [...],
    flattened to [N].

    The current autocast state is stored with the inputs.

    Args:
        hidden_states: [..., h].
        labels: [...], already shifted.
        projection: the map from matrix products to logits.
        norm: the final norm; None: hidden_states are normed already.
        ignore_index: value in `labels` at positions without a label.

    Raises:
        UnsupportedModelError: a trainable parameter of the norm is a DTensor, or on meta although
            hidden_states are not.
    """
    autocast = Autocast.capture(hidden_states.device)
    if norm is None:
        norm = nn.Identity()
    parameters = Parameters(norm, hidden_states.device)
    return HeadInputs(labels.reshape(-1), projection, norm, parameters, ignore_index, autocast)


def refuse_second_derivatives() -> None:
    """Raise `BackwardError` if backward runs with create_graph=True. Called first in the backward
    of autograd Functions whose gradients have no graph."""
    if torch.is_grad_enabled():
        raise BackwardError(
            "The blockwise head has no second derivatives; call backward without create_graph."
        )


class BlockwiseLogProbs(torch.autograd.Function):
    """Autograd function from hidden states [N, h], weight [V, h], bias [V] or None, and the norm's
    parameters to the fields of `TokenLogProbs`, [N] each or None. Logits exist for one block of
    tokens at a time, and backward computes these blocks again."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: HeadInputs,
        fields: Collection[str],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *norm: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of `TokenLogProbs`, [N] each, with 0 at positions without a label.

        Saved for backward are hidden, weight, bias, and the logsumexp [n] of the n positions with a
        label.

        Args:
            inputs: labels, final norm and options of the head.
            fields: names of optional fields to compute. Other optional fields are None.
            hidden: hidden states [N, h] before the final norm.
            weight: weight [V, h] of the head.
            bias: bias [V] of the head, or None.
            norm: parameters [...] of the final norm.
        """
        rows = inputs.rows
        labels = inputs.row_labels
        wide = torch.promote_types(hidden.dtype, torch.float32)
        lse = torch.empty(labels.shape, dtype=wide, device=hidden.device)  # [n]
        with inputs.autocast.disable():  # [Note: autocast]
            parts: list[tuple[Any, ...]] = []
            products = inputs.products(weight, bias)
            tokens, entries = inputs.block_size(hidden, weight.shape[0])
            for block in token_blocks(labels.shape[0], tokens):
                positions = block if rows is None else rows[block]
                normed = inputs.apply_norm(hidden[positions])  # [n, h]
                folded = fold_vocabulary(
                    normed, products, inputs.projection, labels[block], entries
                )
                lse[block] = folded.lse()
                parts.append(folded.results(labels[block], fields, weight.shape[0]))
            if not parts:  # no position has a label
                empty = fold_in_torch(lse[:, None], labels, slice(0, 1))
                parts = [empty.results(labels, fields, 1)]
            values: list[Tensor | None] = []
            for column in zip(*parts, strict=True):
                values.append(None if column[0] is None else torch.cat(column))
            ctx.inputs = inputs
            ctx.rows = rows
            ctx.entropies = values[1]
            if ctx.entropies is not None:  # cloned, because the caller may overwrite the value
                ctx.entropies = ctx.entropies.clone()
            ctx.save_for_backward(hidden, weight, bias, lse)
            ctx.version_check = VersionCheck(
                norm, [x for x in (weight, bias, *norm) if x is not None]
            )
            if rows is not None:  # 0 at positions without a label
                count = hidden.shape[0]
                for index, value in enumerate(values):
                    if value is not None:
                        values[index] = value.new_zeros(count).index_copy_(0, rows, value)
        ctx.mark_non_differentiable(*(value for value in values[3:] if value is not None))
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return None for `inputs` and `fields`, then the gradients of hidden [N, h], weight
        [V, h], bias [V] and the norm's parameters, each in its tensor's dtype.

        Args:
            grads: gradients of the fields of `TokenLogProbs` in order, [N] each or None. The last
                three are ignored, because these fields are not differentiable.

        Raises:
            BackwardError: second derivatives are requested (create_graph), or the head or the norm
                changed since forward.
        """
        refuse_second_derivatives()
        # read once: a checkpoint around the head unpacks saved tensors a single time
        saved = ctx.saved_tensors
        changed_tensor = ctx.version_check.written_tensor()
        if changed_tensor is None:
            changed_tensor = ctx.version_check.changed_tensor()
        if changed_tensor is not None:
            raise BackwardError(
                f"A weight {list(changed_tensor.shape)} of the head or the final norm changed "
                "since forward, of which backward computes the logits again. Call backward before "
                "optimizer.step(), and before values are set through .data."
            )
        compute = functools.partial(BlockwiseLogProbs._gradients, ctx, saved, grads)
        return run_outside_with_retry(
            saved[0].device, ctx.inputs.drop_saves, compute, "in the loss' backward"
        )

    @staticmethod
    def _gradients(
        ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Recompute the logits block by block, and return the gradients of forward's arguments.

        Args:
            ctx: the context that forward has filled.
            saved: hidden, weight, bias, and the logsumexp [n], as forward saved them.
            grads: gradients [N] of the fields of `TokenLogProbs`, in order; None for unused fields.

        Returns:
            None for forward's arguments `inputs` and `fields`, then the gradients of hidden [N, h],
            weight [V, h], bias [V] and the norm's parameters.
        """
        inputs = ctx.inputs
        rows = ctx.rows
        hidden, weight, bias, lse = saved
        labels = inputs.row_labels
        upstream = list(grads[:3])
        if rows is not None:
            upstream = [None if grad is None else grad[rows] for grad in upstream]
        token_gradients = TokenGradients(labels, lse, ctx.entropies, weight.shape[0], *upstream)
        work = HeadGradients(inputs, hidden, weight, bias, ctx.needs_input_grad[2:])
        products = inputs.products(weight, bias)
        tokens, entries = inputs.block_size(hidden, weight.shape[0])
        with inputs.autocast.disable(), inputs.norm_parameters.shadow() as shadows:
            for block in token_blocks(labels.shape[0], tokens):
                normed_input, normed = work.recompute(rows, block)
                block_gradients = token_gradients.select_tokens(block)
                for columns in token_blocks(weight.shape[0], entries):
                    product = products.multiply(normed.detach(), columns)  # [n, v]
                    grad = product_gradient(product, inputs.projection, block_gradients, columns)
                    work.add_block(grad, normed, products, columns)
                    del product, grad
                work.finish_tokens(normed_input, normed, shadows, rows, block)
        return None, None, *work.results()


class HeadGradients:
    """Sums of the gradients of hidden states, output projection and final norm. The logits are
    recomputed block by block, and each block's gradient is added.

    Call `recompute` for each block of tokens, then `add_block` for each block of the vocabulary,
    then `finish_tokens`. `results` returns the gradients at the end. The weight's gradient is
    summed in promote_types(dtype, float32).

    Args:
        inputs: norm, labels and settings.
        hidden: hidden states [N, h] before the final norm.
        weight: the output projection's weight [V, h].
        bias: the output projection's bias [V], or None.
        needs: a flag for each of hidden, weight, bias and the norm's parameters, in this order:
            True if it requires a gradient.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, ...],
    ) -> None:
        self.inputs = inputs
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self.needs_hidden = needs[0]
        self.needs_input = needs[0] or any(needs[3:])
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.d_hidden = torch.zeros_like(hidden) if needs[0] else None  # [N, h]
        self.d_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None  # [V, h]
        self.d_bias: Tensor | None = None  # [V]
        if bias is not None and needs[2]:
            self.d_bias = torch.zeros_like(bias, dtype=wide)
        blocks = max(2, hidden.shape[0])
        self.d_norm = GradientSum(len(inputs.norm_parameters.current()), blocks)
        self.d_normed: Tensor | None = None

    def recompute(self, rows: Tensor | None, block: slice) -> tuple[Tensor, Tensor]:
        """Recompute the final norm of a block of n tokens. Return their hidden states [n, h] as a
        leaf tensor, and the norm's output [n, h] with a graph from this leaf.

        Args:
            rows: indices of the positions with a label; None: all positions.
            block: slice of `rows` (of all positions, if None) with the block's tokens.
        """
        positions = block if rows is None else rows[block]
        leaf = self.hidden[positions].detach().requires_grad_(self.needs_hidden)
        with torch.enable_grad():
            normed = self.inputs.apply_norm(leaf)
        return leaf, normed

    def add_block(
        self, grad: Tensor, normed: Tensor, products: HeadProducts, columns: slice
    ) -> None:
        """Add the gradients that follow from one block of the output projection's matrix products
        to the sums: of the weight, the bias and the block's normed hidden states.

        Args:
            grad: gradient of the loss with respect to the matrix products [n, v].
            normed: [n, h], the input of the matrix products, from `recompute`.
            products: computes the matrix products, and has the weight.
            columns: slice of the vocabulary with the v entries of the columns.
        """
        if self.d_bias is not None:
            self.d_bias[columns] += grad.sum(0, dtype=self.d_bias.dtype)
        grad = grad.to(normed.dtype)  # a bias in a wider dtype has widened the product
        if self.d_weight is not None:
            add_product(self.d_weight[columns], grad.mT, normed.detach())
        if self.needs_input:
            # [n, h]
            self.d_normed = add_product(self.d_normed, grad, products.weight(grad.dtype)[columns])

    def finish_tokens(
        self, leaf: Tensor, normed: Tensor, shadows: list[Tensor], rows: Tensor | None, block: slice
    ) -> None:
        """Differentiate the final norm of a block of n tokens, and write their gradients into the
        hidden states' gradient [N, h]. Called after `add_block` was called for all vocabulary
        entries.

        Args:
            leaf: hidden states [n, h] of the tokens, from `recompute`.
            normed: the norm's output [n, h], from `recompute`.
            shadows: detached aliases of the norm's parameters. The norm was computed with the
                aliases, and is differentiated with respect to them.
            rows: indices of the positions with a label; None: all positions.
            block: slice of `rows` (of all positions, if None) with the block's tokens.
        """
        if self.d_normed is None:
            return
        grad = self.d_normed.to(normed.dtype)
        self.d_normed = None
        sources = [leaf, *shadows] if self.needs_hidden else shadows
        parts: list[Tensor | None] = list(
            torch.autograd.grad(normed, sources, grad, allow_unused=True)
        )
        if self.needs_hidden:
            assert self.d_hidden is not None
            assert parts[0] is not None
            positions = block if rows is None else rows[block]
            self.d_hidden[positions] = parts.pop(0)  # type: ignore[assignment]
        self.d_norm.add(parts)

    def result_buffers(self) -> tuple[Tensor | None, ...]:
        """Return tensors into which `results` can write the gradients of hidden [N, h], weight [V,
        h] and bias [V]; None for a gradient that is not computed. `results` changes the sums in
        place, so it cannot be called again after running out of memory. This method therefore
        allocates all memory before.

        A sum that has its parameter's dtype already is returned itself. Other sums get a new
        tensor.
        """
        sums = (
            (self.d_hidden, self.hidden),
            (self.d_weight, self.weight),
            (self.d_bias, self.bias),
        )
        buffers: list[Tensor | None] = []
        for total, like in sums:
            if total is None or like is None:
                buffers.append(None)
            else:
                buffers.append(_output_buffer(total, like))
        return tuple(buffers)

    def results(
        self,
        upstream: Tensor | None = None,
        buffers: tuple[Tensor | None, ...] = (None, None, None),
    ) -> tuple[Tensor | None, ...]:
        """Return the summed gradients of hidden [N, h], weight [V, h], bias [V] and the norm's
        parameters, each in its tensor's dtype.

        Args:
            upstream: a scalar tensor that multiplies the gradients, in place if a sum has the right
                dtype. None: no factor.
            buffers: tensors for the results of hidden, weight and bias, from `result_buffers`. A
                tensor that is None and needed is allocated here.
        """
        values = self.inputs.norm_parameters.current()
        # Zeros, not None, where no position has a label: optimizers and engines expect the same set
        # every step.
        d_norm = self.d_norm.result(values)
        for index, value in enumerate(values):
            if d_norm[index] is None:
                d_norm[index] = torch.zeros_like(value)
        # A loss over no token divides by zero, and upstream is infinite. The zeros of autograd are
        # not multiplied by that infinity, so ours must not be either. Sums without a labelled token
        # have no factor, and neither have rows of dhidden without a label.
        factor = upstream if self.inputs.labelled else None
        d_hidden = _finish_gradient(
            self.d_hidden, self._of_labelled_rows(factor), self.hidden, buffers[0]
        )
        d_weight = _finish_gradient(self.d_weight, factor, self.weight, buffers[1])
        d_bias = None
        if self.bias is not None:
            d_bias = _finish_gradient(self.d_bias, factor, self.bias, buffers[2])
        return (
            d_hidden,
            d_weight,
            d_bias,
            *(_finish_gradient(g, factor, v) for g, v in zip(d_norm, values, strict=True)),
        )

    def _of_labelled_rows(self, factor: Tensor | None) -> Tensor | None:
        """Return factors by which to multiply the rows of the hidden states' gradient [N, h]:
        `factor` for rows with a label, 1 for other rows, as a tensor [N, 1]. The gradient of other
        rows is zero, and an infinite factor would turn zero into NaN.

        Return `factor` itself if it is None, if all rows have a label, or if the hidden states have
        no gradient.
        """
        rows = self.inputs.rows
        if factor is None or rows is None or self.d_hidden is None:
            return factor
        factors = factor.new_ones(self.hidden.shape[0], 1)
        factors[rows] = factor
        return factors


def _output_buffer(total: Tensor, like: Tensor) -> Tensor:
    """Return a tensor into which `_finish_gradient` can write a gradient. The result is `total`
    itself if it has the dtype of `like`, otherwise a new, empty tensor in this dtype.

    Args:
        total: the sum of a gradient.
        like: a tensor with the gradient's final dtype.
    """
    return total if total.dtype == like.dtype else torch.empty_like(total, dtype=like.dtype)


def _finish_gradient(
    total: Tensor | None, factor: Tensor | None, like: Tensor, buffer: Tensor | None = None
) -> Tensor | None:
    """Return a sum of gradients times a factor, in the dtype of `like`, in one pass over memory.
    The product is written into `total` itself if `total` has this dtype.

    Args:
        total: the sum [N, ...], or a scalar; None: no gradient, and the result is None.
        factor: a scalar tensor, or one factor for each row, [N, 1]. None: `total` is only cast.
        like: a tensor with the result's dtype.
        buffer: receives the result; None: `total` if its dtype fits, otherwise a new tensor.
    """
    if total is None:
        return None
    if factor is None:
        return total.to(like.dtype)
    out = _output_buffer(total, like) if buffer is None else buffer
    # a CPU casts through a copy
    parts, buffers = (torch.atleast_1d(x).split(ROWS_PER_BLOCK) for x in (total, out))
    factors: Sequence[Tensor]
    if factor.dim() == 2:
        factors = factor.split(ROWS_PER_BLOCK)
    else:
        # reshaped, because a 0-d tensor would be rounded to total's dtype before the product
        factors = [factor.reshape(1)] * len(parts)
    for part, part_factor, buffer in zip(parts, factors, buffers, strict=True):
        torch_own.mul(part, part_factor, out=buffer)
    return out
