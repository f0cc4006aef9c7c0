"""Recipes for deferred logits: the steps from hidden states to logits, or to a loss without
logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streambp.errors import StreamBPError
from streambp.foreign import nn_own, torch_own
from streambp.head.blocks import Projection
from streambp.head.log_probs import BlockwiseLogProbs, TokenLogProbs, check_labels, make_inputs
from streambp.head.one_pass import OnePassNLL, PendingGradients, can_run_in_one_pass
from streambp.head.token_positions import LatePadding, take_rows
from streambp.layer.oom import run_outside_with_retry
from streambp.layer.recompute import Autocast, Parameters


@dataclasses.dataclass(eq=False)
class HeadOutcome:
    """Facts on how the logits of one forward were used, which `streambp.describe` reports.

    Attributes:
        loss_in_blocks: True if a loss was computed block by block, without complete logits.
        empty: True if this loss had no labelled token.
        computed: names of other results that were computed block by block, as keys of a dict.
        built_for: name of the operation that required the complete logits [B, T, V]; None: the
            complete logits were not computed.
        hidden_built_for: name of the operation that required the output projection's complete input
            [B, T, h]; None: only blocks of the input were computed.
    """

    loss_in_blocks: bool = False
    empty: bool = False
    computed: dict[str, None] = dataclasses.field(default_factory=dict)
    built_for: str | None = None
    hidden_built_for: str | None = None


@dataclasses.dataclass(eq=False)
class HeadRequest:
    """Record of the output projection in one forward of the model: options for computing logits,
    and results of a loss. The forward itself computes no logits; the logits are computed later,
    where the program uses them.

    Attributes:
        pending: gradients that a loss of the model has computed in forward, until backward returns
            them.
        requested_outputs: names of fields of `TokenLogProbs` that a loss must store in `values`
            besides log_probs; None: only the loss itself is needed.
        temperature: divisor of the logits.
        in_float32: True if the output projection's matrix products are computed in float32.
        norms: norms that may be computed later, with the logits: final norms of the decoder that
            ends in this output projection. Other norms (an encoder's) run in the model's forward.
        num_items: num_items_in_batch, by which the model divides the sum of its loss; None: not
            passed.
        beside_loss: True if the model returns these logits together with a loss. Engines such as
            ZeRO-3 then notice the start of the model's backward at the loss, not at the logits.
        handed_out: True if user code receives these logits, and may read them at padding.
        values: per-token results of a loss over these logits, [N] each. None before a loss, or if
            the loss computed only its value.
        hidden_states: returns [N, h], the hidden states from which `values` were computed, before
            `norm` if there is one.
        norm: the final norm, or None if `hidden_states` returns normed hidden states.
        outcome: facts on how the logits were used, for `describe`.
        projecting: True while the output projection's forward runs.
    """

    pending: PendingGradients
    requested_outputs: tuple[str, ...] | None = None
    temperature: float = 1.0
    in_float32: bool = False
    norms: tuple[nn.Module, ...] = ()
    num_items: Tensor | int | None = None
    beside_loss: bool = False
    handed_out: bool = False

    values: TokenLogProbs | None = None
    hidden_states: Callable[[], Tensor] | None = None
    norm: nn.Module | None = None
    outcome: HeadOutcome = dataclasses.field(default_factory=HeadOutcome)
    projecting: bool = False


class InputSnapshot(NamedTuple):
    """Snapshot of the tensors from which logits will be computed. Backward takes a second snapshot,
    and raises an error if the two differ.

    Attributes:
        autocast: the autocast state.
        versions: pairs of the shape and the version counter of each tensor. The counter is -1 for
            inference tensors, which have none.
    """

    autocast: Autocast
    versions: list[tuple[torch.Size, int]]


@dataclasses.dataclass(frozen=True)
class LogitsExpression:
    """Recipe for computing normed hidden states or logits later from hidden states. The hidden
    states are not part of the recipe; its methods get them as the argument `source`.

    Attributes:
        request: options of the output projection in this forward.
        norm: the final norm; None: no norm is applied.
        weight: the output projection's weight [V, h]; None if the result is hidden states.
        bias: the output projection's bias [V], or None.
        adds_bias: True if the model's code adds the bias to the logits, after the projection.
        projection: steps after the matrix product with `weight`: a factor, then a softcap (bound by
            tanh) if the model has one. If `weight` is None, the factor multiplies the hidden
            states. The temperature is not here but in `request`.
        logits: True if the result is logits, or was computed from logits; False for hidden states.
        token_positions: [...], index of each token's hidden state in `source` [N, h]; None:
            `source` [..., h] has one hidden state for each token, in order.
        late_padding: computes hidden states of padding, if `source` has none and the program reads
            logits there. None: `source` has the hidden states of all tokens. [Note: padding that is
            read]
    """

    request: HeadRequest
    norm: nn.Module | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    adds_bias: bool = False
    projection: Projection = dataclasses.field(default_factory=Projection)
    logits: bool = False
    token_positions: Tensor | None = None
    late_padding: LatePadding | None = None

    def indexable_source(self, source: Tensor, token_positions: Tensor) -> Tensor:
        """Return a tensor of hidden states that has a row for each index in `token_positions`. This
        is `source` itself, unless an index is that of padding and `source` has no padding. The
        hidden states of the batch with padding, [B * T, h], are then computed and appended to
        `source`.

        Args:
            source: hidden states [N, h].
            token_positions: [...], index of each token's hidden state in the result.
        """
        if self.late_padding is None or not self.late_padding.reads_padding(token_positions):
            return source
        return self.late_padding.with_padding()

    def projected(self) -> Projection:
        """Return the map from the output projection's matrix products to logits: this recipe's
        scale and softcap, and the temperature of `request`."""
        return dataclasses.replace(self.projection, temperature=self.request.temperature)

    def bias_dtype(self) -> torch.dtype | None:
        """Return the dtype of a bias that the model's code adds to the logits, after the
        projection; None if there is no such bias."""
        if self.bias is None or not self.adds_bias:
            return None
        return self.bias.dtype

    def inputs(self) -> list[Tensor]:
        """Return the tensors from which `build` computes its result, other than the hidden states:
        weight [V, h] and bias [V] unless None, and the norm's parameters. Backward returns
        gradients of these tensors, and raises if one has changed since forward."""
        norm = [] if self.norm is None else list(self.norm.parameters())
        return [tensor for tensor in (self.weight, self.bias, *norm) if tensor is not None]

    def build(self, source: Tensor) -> Tensor:
        """Compute hidden states [..., h], or logits [..., V] if the recipe has a weight, from
        stored hidden states. Both are differentiable. The logits are those of the model itself, not
        divided by the temperature in `request`.

        Args:
            source: the stored hidden states [..., h]. If the recipe has `token_positions`, these
                are indices of rows of `source`, and only these rows are used.
        """
        if self.token_positions is not None:
            source = take_rows(
                self.indexable_source(source, self.token_positions), self.token_positions
            )
        # the norm's hooks ran in the model's own call
        value: Tensor = source if self.norm is None else self.norm.forward(source)
        if self.weight is not None:
            if self.adds_bias and self.bias is not None:
                value = torch_own.add(nn_own.linear(value, self.weight), self.bias)
            else:
                value = nn_own.linear(value, self.weight, self.bias)
        softcap = self.projection.softcap
        scale = self.projection.logit_scale if softcap is None else self.projection.slope
        if scale != 1.0:  # in the model's dtype, as its own code does
            value = torch_own.mul(value, scale)
        if softcap is None:
            return value
        return torch_own.mul(torch_own.tanh(value), softcap)

    def snapshot(self, source: Tensor) -> InputSnapshot:
        """Return a snapshot of all tensors from which `build` would compute its result: the hidden
        states `source` [..., h], weight, bias and the norm's parameters. If a later snapshot
        differs, one of the tensors has changed in between."""
        inputs = (source, *self.inputs())
        versions = []
        for x in inputs:
            version = -1 if x.is_inference() else x._version
            versions.append((x.shape, version))
        return InputSnapshot(Autocast.capture(source.device), versions)

    def gradients(
        self, source: Tensor, gradient: Tensor, autocast: Autocast
    ) -> list[Tensor | None]:
        """Recompute the result of `build`, and return the gradients of the tensors from which it is
        computed: of `source`, and then of the tensors that `inputs` returns. None for a tensor that
        requires no gradient.

        Args:
            source: the stored hidden states [..., h].
            gradient: gradient of the result of `build`, of the same shape.
            autocast: autocast's state when the result was first computed.
        """
        norm = self.norm
        if norm is None:
            norm = nn.Identity()
        parameters = Parameters(norm, source.device)
        index_by_id = {id(parameter): index for index, parameter in enumerate(parameters.current())}
        leaves = []
        for x in (source, self.weight, self.bias):
            if x is not None:
                leaves.append(x.detach().requires_grad_(x.requires_grad))
        indices = [index_by_id.get(id(parameter)) for parameter in norm.parameters()]
        with torch.enable_grad(), autocast.restore(), parameters.shadow() as shadows:
            remaining = iter(leaves[1:])
            weight = bias = None
            if self.weight is not None:
                weight = next(remaining)
            if self.bias is not None:
                bias = next(remaining)
            value = dataclasses.replace(self, weight=weight, bias=bias).build(leaves[0])
        sources = [leaf for leaf in (*leaves, *shadows) if leaf.requires_grad]
        source_gradients = torch.autograd.grad(
            value, sources, gradient.to(value.dtype), allow_unused=True
        )
        by_id = dict(zip(map(id, sources), source_gradients, strict=True))
        gradients = [by_id.get(id(leaf)) for leaf in leaves]
        for index in indices:
            gradients.append(None if index is None else by_id[id(shadows[index])])
        return gradients


def blockwise_loss(
    source: Tensor, recipe: LogitsExpression, target: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """Compute F.cross_entropy of logits with labels `target`, block by block, without the complete
    logits. If memory runs out, tensors that layers have saved for backward are freed, and the loss
    is computed again.

    Args:
        source: hidden states [N, h].
        recipe: the steps from `source` to logits. A recipe with `token_positions` [M] has M tokens,
            and several tokens may use the same row of `source`.
        target: labels, one for each token: [N], or [M] for a recipe with `token_positions`.
        ignore_index: label of ignored positions.
        reduction: "none", "mean" or "sum", as in F.cross_entropy.

    Returns:
        A scalar, or a tensor with the shape of `target` for reduction "none", in
            promote_types(source dtype, float32). 0 if no label is valid.

    Raises:
        StreamBPError: the number of labels is not N (or M), or a label is outside the vocabulary.
    """

    positions = (source if recipe.token_positions is None else recipe.token_positions).shape[0]
    if target.shape[0] != positions:
        raise StreamBPError(
            f"There are {target.shape[0]} labels for {positions} positions. labels must be shaped "
            "like input_ids, [B, T], and shift_labels like labels."
        )
    compute = functools.partial(_loss, source, recipe, target, ignore_index, reduction)
    if recipe.token_positions is not None:
        compute = functools.partial(
            _loss_at_positions,
            source,
            recipe,
            recipe.token_positions,
            target,
            ignore_index,
            reduction,
        )
    return run_outside_with_retry(
        source.device,
        recipe.request.pending.drop_saves,
        compute,
        "in the output projection and its loss",
    )


def _loss(
    source: Tensor, recipe: LogitsExpression, target: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """Compute F.cross_entropy of the logits of hidden states [N, h], block by block, for a recipe
    without `token_positions`. The function can be called again after it ran out of memory.

    The function also stores results in `recipe.request`: facts for `describe` in `outcome`, and
    log-probabilities of each token in `values`. `values` stays None if the gradients are computed
    together with the loss.

    Args:
        source: hidden states [N, h].
        recipe: the steps from source to logits.
        target: labels [N].
        ignore_index: label of ignored positions.
        reduction: "none", "mean" or "sum", with the meaning of F.cross_entropy.
    """
    assert recipe.weight is not None
    check_labels(target, recipe.weight.shape[0], ignore_index)
    request = recipe.request
    inputs = make_inputs(source, target, recipe.projected(), recipe.norm, ignore_index)
    inputs.in_float32 = request.in_float32
    inputs.bias_dtype = recipe.bias_dtype()
    inputs.drop_saves = request.pending.drop_saves
    # No valid label: loss 0 and gradient 0, where torch gives NaN.
    labelled = (target != ignore_index).sum().clamp(min=1)
    one_pass = (
        reduction != "none"
        and request.requested_outputs is None
        and can_run_in_one_pass(source, request.pending)
    )
    divisor: Tensor | int = 1
    if reduction == "mean":
        divisor = labelled
    elif request.num_items is not None:
        divisor = request.num_items

    tensors = (source, recipe.weight, recipe.bias, *inputs.norm_parameters.current())
    request.outcome.loss_in_blocks = True
    request.outcome.empty = inputs.labelled == 0
    if one_pass:
        unit = torch.ones(
            (), dtype=torch.promote_types(source.dtype, torch.float32), device=source.device
        )
        scale = unit / divisor
        if scale.numel() == 1:  # a count may be a tensor of any shape
            scale = scale.reshape(())
        total: Any = OnePassNLL.apply(inputs, request.pending, scale, *tensors)
    else:
        values = BlockwiseLogProbs.apply(inputs, request.requested_outputs or (), *tensors)
        request.hidden_states = lambda: source
        request.norm = recipe.norm
        request.values = TokenLogProbs(*values)
        if reduction == "none":
            return -request.values.log_probs
        total = -request.values.log_probs.sum()
    return total if reduction == "sum" else total / labelled


def _loss_at_positions(
    source: Tensor,
    recipe: LogitsExpression,
    token_positions: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """Compute F.cross_entropy of the logits of M tokens, block by block. The hidden state of token
    i is row `token_positions[i]` of `source`, and several tokens may have the same row.

    If many tokens have the same row and the same label, each different pair of row and label is
    computed once. The gradients are then computed in backward; otherwise they may be computed in
    forward already.

    Args:
        source: hidden states [N, h].
        recipe: the steps from source to logits.
        token_positions: [M], the row of each token.
        target: labels [M].
        ignore_index: label of ignored positions.
        reduction: "none", "mean" or "sum", with the meaning of F.cross_entropy.
    """
    labelled = (target != ignore_index).nonzero().squeeze(-1)
    plain = dataclasses.replace(recipe, token_positions=None, late_padding=None)
    read = token_positions[labelled]
    labels = target[labelled]
    repeats = None
    source = recipe.indexable_source(source, read)
    inner_reduction = reduction
    if len(read):
        pairs, pair_of_label = torch.stack([read, labels], 1).unique(dim=0, return_inverse=True)
        if len(pairs) * 4 < len(read) * 3:
            read, labels = pairs.T
            repeats = pair_of_label
            inner_reduction = "none"
    loss = _loss(take_rows(source, read), plain, labels, ignore_index, inner_reduction)
    request = recipe.request
    if request.values is not None:

        def spread(values: Tensor) -> Tensor:
            """Return one value for each of the M tokens, [M]; 0 (False) for tokens without a label.

            Args:
                values: one value for each labelled token. If equal pairs of hidden state and label
                    were computed once: one value for each different pair.
            """
            if repeats is not None:
                values = values[repeats]
            return values.new_zeros(target.shape[0]).index_copy(0, labelled, values)

        request.values = request.values.each(spread)
        # Values at padding are masked by the trainers that read them: padding gets a token's hidden
        # state.
        tokens = token_positions
        if recipe.late_padding is not None:
            tokens = torch_own.where(
                recipe.late_padding.tokens(token_positions), token_positions, 0
            )
        request.hidden_states = lambda: take_rows(source, tokens)
    if repeats is not None:
        loss = loss[repeats]
        if reduction != "none":
            loss = loss.sum()
        if reduction == "mean":
            loss = loss / labelled.shape[0]
    if reduction == "none":
        return loss.new_zeros(target.shape).index_copy(0, labelled, loss)
    return loss
