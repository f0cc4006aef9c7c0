"""Backward pass over the head, a single pass for all results of a forward's logits.

The gradient of a logit is the sum of the gradients from all its uses, and uses may cancel. For
example, a token's own logit and the logsumexp together give 1 - p. If each gradient were rounded
separately in half precision, the difference would be lost. Each use therefore leaves the gradient
of its result, a `Term`. One pass adds all terms for a block of logits, before the block's gradient
reaches the weights.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from streambp.device import has_data
from streambp.head.blocks import (
    LOGITS_PER_BLOCK,
    TOKENS_PER_BLOCK,
    HeadProducts,
    Projection,
    TokenGradients,
    fold,
    logits_gradient,
    product_gradient,
    token_blocks,
)
from streambp.head.log_probs import HeadGradients, HeadInputs
from streambp.lazy.expression import LogitsReading, Node, TensorOperand, evaluate, leaves, readings


def rows_per_block(vocabulary: int) -> int:
    """Return the number of tokens whose logits [n, V] are built at a time. The number falls with
    the vocabulary size V, so that the memory of a block of logits does not grow.

    Used where torch's own operations compute a result from the logits. The fused kernels have other
    block sizes.
    """
    return min(TOKENS_PER_BLOCK, max(1, LOGITS_PER_BLOCK // vocabulary))


class StatisticsTerm:
    """Sum of the gradients that reach the logits through softmax statistics of each token: the
    logit of its label, the logsumexp and the mean of its logits. The gradient of the logits follows
    by a formula:

        d loss / d logits = onehot(label) pick + p lse + mean / V

    p is the softmax of the logits. pick, lse and mean [M] are gradients of the label's logit, the
    logsumexp and the logits' mean.

    Args:
        projection: the map from the output projection's matrix products to logits: scale, softcap
            and temperature.
        count: M, the number of positions that have logits.
        like: tensor with the device of the gradients, and with their dtype, promote_types(dtype,
            float32).

    Attributes:
        further: gradients of further labels at positions that have a label already, for example
            from a second loss. A list of tuples (positions, vocabulary entries, gradients), [n]
            each.
    """

    def __init__(self, projection: Projection, count: int, like: Tensor) -> None:
        self.projection = projection
        self.labels = torch.full((count,), -1, dtype=torch.long, device=like.device)  # [M]
        self.pick, self.lse, self.mean = (like.new_zeros(count) for _ in range(3))  # [M] each
        self.has_mean = False
        self.further: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, gradient: StatisticsGradient) -> None:
        """Add the gradients of one result: a tensor that the program computed from the logits, for
        example each token's log-probability. Backward calls this method once for each result, and
        computes the gradient of the logits afterwards.

        The gradients of logsumexp and mean are added to the sums `lse` and `mean`. The gradient of
        a label's logit is stored in `pick`, and the label in `labels`, one for each position. The
        labels and gradients of this call are appended to `further` instead, if one of the positions
        occurs twice or has a label from an earlier call.

        Args:
            gradient: gradients [N] of each token's softmax statistics: the logit of its label, the
                logsumexp and the mean of its logits.
        """
        positions = gradient.positions
        if gradient.pick is not None:
            assert gradient.labels is not None
            pick = gradient.pick.to(self.pick.dtype)
            if gradient.unique and (
                not has_data(positions) or not bool((self.labels[positions] >= 0).any())
            ):
                self.labels[positions] = gradient.labels
                self.pick[positions] = pick
            else:
                self.further.append((positions, gradient.labels, pick))
        for total, part in ((self.lse, gradient.lse), (self.mean, gradient.mean)):
            if part is not None:
                total.index_add_(0, positions, part.to(total.dtype))
        self.has_mean |= gradient.mean is not None

    def touched_positions(self, count: int) -> Tensor:
        """Return a bool mask [M] of the positions whose logits have a gradient other than zero.
        Backward recomputes the logits of these positions alone.

        Args:
            count: M, the number of positions.
        """
        mask = (self.pick != 0) | (self.lse != 0) | (self.mean != 0)
        for positions, _, gradient in self.further:
            mask[positions[gradient != 0]] = True
        return mask

    def assign_rows(self, row_of: Tensor | None, edges: Sequence[int]) -> None:
        """Replace the positions in `further` by row numbers. Called before backward recomputes
        logits: only positions whose logits have a gradient are recomputed, and these positions are
        numbered as rows.

        Args:
            row_of: [M], the row number of each position; None: all positions are recomputed, and a
                position is its own row number.
            edges: first row of each block, and the end of the last block; not used by this class.
        """
        if row_of is not None:
            self.further = [
                (row_of[positions], entries, pick) for positions, entries, pick in self.further
            ]

    def add_to(self, total: Tensor, product: Tensor, positions: Tensor, block: slice) -> None:
        """Add this object's part of the gradient of one block of matrix products to `total` [n, V].
        Called for each block during backward. Other objects add the gradients from other uses of
        the logits.

        Args:
            total: sum of the gradients of the block's matrix products, over all uses of the logits.
            product: [n, V], matrix products of the output projection.
            positions: [n], positions of the block's tokens.
            block: the block's range of rows, where rows number the positions that backward
                recomputes.
        """
        token_gradients = self.read(product, positions)
        logits = self.projection.logits(product)
        grad = logits_gradient(logits, token_gradients, slice(0, product.shape[-1]))
        for rows, entries, gradient in self.further:
            in_block = (rows >= block.start) & (rows < block.stop) & (gradient != 0)
            grad.index_put_(
                (rows[in_block] - block.start, entries[in_block]),
                gradient[in_block],
                accumulate=True,
            )
        total += self.projection.backward(grad, logits)

    def read(self, product: Tensor, positions: Tensor) -> TokenGradients:
        """Return what the gradient of the logits at n positions is computed from: gradients of
        softmax statistics, and the logsumexp.

        Args:
            product: [n, V], the tokens' matrix products, from which the logsumexp is recomputed.
            positions: [n], positions of the tokens.
        """
        labels, pick, lse, mean = (
            values[positions] for values in (self.labels, self.pick, self.lse, self.mean)
        )
        columns = product.shape[-1]
        folded = fold(product, self.projection, labels, slice(0, columns))
        # A label's log-probability subtracts its gradient from p's; `d_lse` is p's total factor.
        d_lse = lse + pick + mean
        means = mean if self.has_mean else None
        return TokenGradients(labels, folded.lse(), None, columns, pick, None, means, d_lse)


@dataclasses.dataclass(frozen=True)
class StatisticsGradient:
    """Gradients of softmax statistics of N tokens, for one result that the program computed from
    the logits. Autograd has computed these gradients, [N] each; None: no gradient. `StatisticsTerm`
    turns the sum over all results into the gradient of the logits.

    Attributes:
        projection: the map from the output projection's matrix products to logits: scale, softcap
            and temperature.
        positions: [N], index of each token's hidden state.
        unique: True if all positions differ.
        labels: [N], the vocabulary entry of each token whose logit is a statistic; None: no label's
            logit is a statistic.
        pick: gradients of the logits of `labels`.
        lse: gradients of the logsumexp.
        mean: gradients of the logits' mean.
    """

    projection: Projection
    positions: Tensor
    unique: bool
    labels: Tensor | None = None
    pick: Tensor | None = None
    lse: Tensor | None = None
    mean: Tensor | None = None

    def scale_gradients(self, factor: Tensor) -> StatisticsGradient:
        """Return a copy with all gradients [N] multiplied by `factor` [1]. The factor is an
        engine's loss scale: DeepSpeed, for example, scales gradients by a hook on the logits."""
        pick, lse, mean = (
            None if g is None else g * factor for g in (self.pick, self.lse, self.mean)
        )
        return dataclasses.replace(self, pick=pick, lse=lse, mean=mean)


@dataclasses.dataclass
class NodeTerm:
    """Gradient that reaches the logits through a recorded function: operations on logits, run block
    by block. Used for operations without a gradient formula of their own (topk, for example).
    Backward runs the operations again under autograd.

    Attributes:
        node: the recorded function of N tokens; its inputs are [N] or [N, k].
        reading: the logits to differentiate, one of the function's inputs.
        gradients: gradient [N, ...] of each result of the function; None: no gradient.
        entries: indices into the N tokens, one tensor for each block of rows. Rows number the
            positions that backward recomputes.
        row_of: [M], the row of each position of the logits; None: backward recomputes all
            positions.
        blocks: number of blocks that `add_to` has processed.
    """

    node: Node
    reading: LogitsReading
    gradients: Sequence[Tensor | None]
    entries: list[Tensor] = dataclasses.field(default_factory=list)
    row_of: Tensor | None = None
    blocks: int = 0

    def scale_gradients(self, factor: Tensor) -> NodeTerm:
        """Return a copy with the gradients [N, ...] of the function's results multiplied by
        `factor` [1], in each gradient's dtype. The factor is an engine's loss scale: DeepSpeed, for
        example, scales gradients by a hook on the logits."""
        scaled = [None if g is None else g * factor.to(g.dtype) for g in self.gradients]
        return NodeTerm(self.node, self.reading, scaled)

    def touched_positions(self, count: int) -> Tensor:
        """Return a bool mask [M] of the positions whose logits the recorded function uses. Backward
        recomputes the logits of these positions alone.

        Args:
            count: M, the number of positions.
        """
        mask = torch.zeros(count, dtype=torch.bool, device=self.reading.positions.device)  # [M]
        mask[self.reading.positions] = True
        return mask

    def assign_rows(self, row_of: Tensor | None, edges: Sequence[int]) -> None:
        """Find which tokens of the recorded function belong to each block of rows, and store their
        indices in `entries`. Called before backward recomputes logits: only positions whose logits
        have a gradient are recomputed, and these positions are numbered as rows.

        Args:
            row_of: [M], the row number of each position of the logits; None: all positions are
                recomputed, and a position is its own row number.
            edges: first row of each block, and the end of the last block.
        """
        self.row_of = row_of
        rows = self.reading.positions
        if row_of is not None:
            rows = row_of[rows]
        order = torch.argsort(rows)
        if not has_data(rows):
            ends = [min(edge, rows.shape[0]) for edge in edges]
        else:
            ends = torch.searchsorted(rows[order], torch.tensor(edges, device=rows.device)).tolist()
        self.entries = [order[start:stop] for start, stop in itertools.pairwise(ends)]
        self.blocks = 0

    def add_to(self, total: Tensor, product: Tensor, positions: Tensor, block: slice) -> None:
        """Run the recorded function again for the next block of tokens, and add the resulting
        gradient of the block's matrix products to `total` [n, V]. Called for each block, in order.

        Args:
            total: sum of the gradients of the block's matrix products, over all uses of the logits.
            product: [n, V], matrix products of the output projection.
            positions: [n], positions of the block's tokens.
            block: the block's range of rows, where rows number the positions that backward
                recomputes.
        """
        entries = self.entries[self.blocks]
        self.blocks += 1
        if not entries.shape[0]:
            return
        rows = self.reading.positions[entries]
        if self.row_of is not None:
            rows = self.row_of[rows]
        rows = rows - block.start  # rows of `product`
        # A wide leaf, so that its gradient is not rounded before the addition.
        leaf = product[rows].to(total.dtype).requires_grad_()
        other_readings = [reading for reading in readings(self.node) if reading is not self.reading]
        hubs = dict.fromkeys(reading.head for reading in other_readings)
        products = {hub: hub.products() for hub in hubs}
        values = values_at(self.node, entries, other_readings, products)
        with torch.enable_grad():
            values[self.reading] = self.reading.projection.logits(leaf)
            evaluated = evaluate(self.node, values)
        outputs = evaluated if isinstance(evaluated, tuple | list) else (evaluated,)
        results: list[Tensor] = []
        upstream: list[Tensor] = []
        for result, gradient in zip(outputs, self.gradients, strict=True):
            if gradient is not None and result.requires_grad:
                results.append(result)
                upstream.append(gradient[entries].to(result.dtype))
        if results:
            (part,) = torch.autograd.grad(results, leaf, upstream)
            total.index_add_(0, rows, part.to(total.dtype))


Term = StatisticsTerm | NodeTerm  # a use of the logits that adds to their gradient


def values_at(
    node: Node,
    entries: Tensor | slice,
    read: Sequence[LogitsReading],
    products: Mapping[Any, HeadProducts],
) -> dict[Node, Any]:
    """Return the input values of a recorded function for some of its N tokens, without a graph. A
    recorded function consists of operations on logits that the program has called, and that run
    later, block by block.

    An input is either a tensor of the program, indexed to [n, k], or logits [n, V] in
    promote_types(dtype, float32), which are computed here.

    Args:
        node: the recorded function.
        entries: indices of the n tokens, or a slice of the N tokens.
        read: the inputs whose values are logits to compute.
        products: dict from the `LazyHead` of each input in `read` to the object that computes the
            output projection's matrix products.

    Raises:
        StreamBPError: one of the program's tensors was changed in place since the function was
            recorded.
    """
    operands = [leaf for leaf in leaves(node) if isinstance(leaf, TensorOperand)]
    for leaf in operands:
        leaf.check()
    values: dict[Node, Any] = {leaf: leaf.tensor[entries] for leaf in operands}
    with torch.no_grad():
        for reading in read:
            normed = reading.head.inputs.apply_norm(reading.head.hidden[reading.positions[entries]])
            values[reading] = reading.projection.logits(
                products[reading.head].multiply(normed, slice(0, reading.head.vocabulary))
            )
    return values


def compute_gradients(
    inputs: HeadInputs,
    terms: Sequence[Term],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of hidden [M, h], weight [V, h], bias [V] and the norm's parameters.
    The logits are recomputed once, block by block, for all results that the program computed from
    them.

    A gradient is None where `needs` is False.

    Args:
        inputs: the final norm and the settings of the blocks.
        terms: the gradients of the logits, one object for each use of the logits.
        hidden: [M, h], hidden states before the final norm.
        weight: [V, h].
        bias: [V] or None.
        needs: True for each tensor that requires a gradient, in the order of the result: hidden,
            weight, bias, parameters of the norm.
    """
    work = HeadGradients(inputs, hidden, weight, bias, needs)
    products = inputs.products(weight, bias)
    full_vocabulary = slice(0, weight.shape[0])
    rows: Tensor | None = None  # [count], sorted positions with a gradient; None: all M
    if has_data(hidden):
        touched = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)  # [M]
        for term in terms:
            touched |= term.touched_positions(hidden.shape[0])
        if not bool(touched.all()):
            rows = touched.nonzero().squeeze(-1)
    positions = rows  # [count]
    if positions is None:
        positions = torch.arange(hidden.shape[0], device=hidden.device)
    count = positions.shape[0]
    row_of = None
    if rows is not None:
        row_of = torch.full_like(hidden[:, 0], -1, dtype=torch.long)  # [M]
        row_of.index_copy_(0, rows, torch.arange(count, device=rows.device))

    # The kernels support a single term: statistics with at most one label for each position.
    statistics_term: StatisticsTerm | None = None
    tokens = rows_per_block(weight.shape[0])
    if len(terms) == 1 and isinstance(terms[0], StatisticsTerm) and not terms[0].further:
        statistics_term = terms[0]
        tokens, _ = inputs.block_size(hidden, weight.shape[0], full_vocabulary=True)
    blocks = list(token_blocks(count, tokens))
    for term in terms:
        term.assign_rows(row_of, [0, *(block.stop for block in blocks)])
    with inputs.autocast.disable(), inputs.norm_parameters.shadow() as shadows:
        for block in blocks:
            leaf, normed = work.recompute(rows, block)
            product = products.multiply(normed.detach(), full_vocabulary)  # [n, V]
            if statistics_term is not None:
                grad = product_gradient(
                    product,
                    statistics_term.projection,
                    statistics_term.read(product, positions[block]),
                    full_vocabulary,
                )
            else:
                # [n, V]
                total = torch.zeros_like(
                    product, dtype=torch.promote_types(product.dtype, torch.float32)
                )
                for term in terms:
                    term.add_to(total, product, positions[block], block)
                grad = total.to(product.dtype)
                del total
            work.add_block(grad, normed, products, full_vocabulary)
            del product, grad
            work.finish_tokens(leaf, normed, shadows, rows, block)
    return work.results()
