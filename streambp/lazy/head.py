"""Hub of one forward's logits: computes results of the logits and collects their gradients.

A result of the logits is an output of `LazyResult`, an autograd Function. `LazyResult` has the
hub's handle as input, an empty tensor that represents the logits in the graph. Hidden states and
weights are inputs of `HeadHandle` alone. During backward each `LazyResult` leaves its gradients
with the hub and returns a zero. autograd runs `HeadHandle` after all results. `HeadHandle`
computes the gradients of hidden states and weights from all left gradients in one pass (`compute_gradients`).
Left gradients belong to one backward call. Otherwise gradients that never reach the handle
(`autograd.grad` with respect to other tensors) would remain for the next call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streambp.device import has_data
from streambp.errors import TWO_BACKWARDS, BackwardError, StreamBPError
from streambp.head.blocks import HeadProducts, Projection, fold_vocabulary, token_blocks
from streambp.head.log_probs import HeadInputs, make_inputs, refuse_second_derivatives
from streambp.head.recipe import LogitsExpression
from streambp.head.version_check import VersionCheck
from streambp.lazy.backward import (
    NodeTerm,
    StatisticsGradient,
    StatisticsTerm,
    Term,
    compute_gradients,
    rows_per_block,
    values_at,
)
from streambp.lazy.expression import LogitsReading, Node, evaluate, inputs_of, readings, rebuild


class HeadHandle(torch.autograd.Function):
    """Autograd function from hidden states and output projection to a handle: a tensor [1] that
    stands for the logits in the autograd graph. Everything that a program computes from the logits
    has the handle as an input. The backward of this function therefore runs last, and computes the
    gradients of hidden states and weights once for all results.

    Inputs are source [M, h], weight [V, h], bias [V] or None, and the norm's parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, hub: LazyHead, source: Tensor, weight: Tensor, bias: Tensor | None, *norm: Tensor
    ) -> Tensor:
        """Save hidden states [M, h] and weights for backward, and return a zero [1] in the dtype of
        the hidden states. The logits are not computed here.

        Args:
            hub: computes the logits, and collects the gradients of all their results.
            source: hidden states [M, h] before the final norm.
            weight: the output projection's weight [V, h].
            bias: the output projection's bias [V], or None.
            norm: parameters of the final norm.
        """
        ctx.hub = hub
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(source, weight, bias, *norm)
        return source.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states [M, h], weights and the norm's parameters. All are
        None if no result has a gradient. A result is a tensor that the program computed from the
        logits, such as log-probabilities. The backward of each result has run before, and has
        stored its gradients in the `LazyHead`.

        Args:
            upstream: gradient of the handle [1]. A zero if a result has a gradient; its value is
                not used.

        Raises:
            BackwardError: `upstream` is a gradient, but no result has stored gradients, because
                backward was started at this node.
            StreamBPError: weights or hidden states were changed in place since forward.
        """
        source, weight, bias, *_ = ctx.saved_tensors
        stored = ctx.hub.take_gradients()
        if upstream is not None and not stored:
            raise BackwardError(
                "backward began at the logits' node of the graph, where a gradient of an earlier "
                "backward was put; streamed logits pass their gradients by other ways. Call "
                f"backward of the loss. {TWO_BACKWARDS}"
            )
        if not stored:
            return (None,) * len(ctx.needs_input_grad)
        ctx.hub.check()
        # Gradients of statistics with the same projection are added before rounding.
        statistics: dict[Projection, StatisticsTerm] = {}
        for gradient in stored:
            if isinstance(gradient, StatisticsGradient):
                projection = gradient.projection
                if projection not in statistics:
                    like = source.new_empty(0, dtype=ctx.hub.wide)
                    statistics[projection] = StatisticsTerm(projection, source.shape[0], like)
                statistics[projection].add(gradient)
        terms: list[Term] = [
            *statistics.values(),
            *(term for term in stored if isinstance(term, NodeTerm)),
        ]
        return None, *compute_gradients(
            ctx.hub.inputs, terms, source, weight, bias, ctx.needs_input_grad[1:]
        )


class RunInBackward(torch.autograd.Function):
    """Autograd function from a tensor to a zero [1] that calls a function in backward, such as an
    engine's hook. The zero is an input of results that are computed from logits. Backward of these
    results thus calls the function, and then runs the autograd node that made the tensor.

    The tensor gets the gradient of the zero if its shape is [1], and None otherwise. A tensor of
    another shape is passed only so that autograd runs its node.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any] | None, source: Tensor) -> Tensor:
        """Return a zero [1] in the dtype and on the device of `source`.

        Args:
            run: function without arguments that backward calls; None: backward calls nothing.
            source: tensor [...], whose autograd node runs after this function's backward.
        """
        ctx.run = run
        ctx.has_handle = source.shape == (1,)
        ctx.set_materialize_grads(False)
        return torch.zeros(1, dtype=source.dtype, device=source.device)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[None, Tensor | None]:
        """Call the function `run` that was passed to forward. Return None for `run`, and for
        `source` the gradient `upstream` [1] if `source` has shape [1]; otherwise None."""
        if ctx.run is not None:
            ctx.run()
        if not ctx.has_handle:
            return None, None
        return None, upstream


class LazyResult(torch.autograd.Function):
    """Autograd function that returns results of lazy logits, for example log-probabilities or topk.
    Lazy logits are never stored. Backward only stores the results' gradients and returns zeros.
    Autograd then runs the backward of `HeadHandle`, which computes the gradients of hidden states
    and weights from all stored gradients in one pass.

    Backward returns a zero and not None, so that an error can be detected. Zero-bubble pipelines
    run backward twice, and start the second pass at `HeadHandle`, when the stored gradients are
    gone. `HeadHandle` raises if it gets a zero but finds no stored gradients.
    """

    @staticmethod
    def forward(ctx: Any, calculation: Any, *anchors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of a calculation from logits, [N, ...] each.

        Args:
            calculation: a `StatisticsCalculation` or `FunctionCalculation`, whose `run` computes
                the results.
            anchors: tensors [1] that `calculation.inputs` returned. The tensors connect the results
                with the logits in the autograd graph; the tensors' values are not used.
        """
        values: tuple[Tensor, ...] = calculation.run()
        ctx.calculation = calculation
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value in values if not value.is_floating_point()))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Store the gradients of the results in the `LazyHead`. Return None for `calculation` and a
        zero [1] for each of the `anchors`, or None everywhere if no result has a gradient. The
        backward of `HeadHandle` runs later, and computes the gradients of hidden states and
        weights.

        Args:
            grads: gradient [N, ...] of each result; None: no gradient.

        Raises:
            BackwardError: backward was called with create_graph.
        """
        refuse_second_derivatives()
        first = next((grad for grad in grads if grad is not None), None)
        if first is None:
            return (None,) * len(ctx.needs_input_grad)
        ctx.calculation.store_gradients(grads)
        zero = first.new_zeros(1)
        return None, *(zero,) * (len(ctx.needs_input_grad) - 1)


class LazyHead:
    """Computes results from the logits of one forward (log-probabilities, for example) block by
    block. The logits are never stored. Collects the gradients of these results in backward, from
    which `HeadHandle` computes the gradients of hidden states and weights.

    Hidden states and weights must not be changed in place between forward and the last use of the
    logits.

    Args:
        source: [M, h], the hidden states before the final norm.
        recipe: the operations from the hidden states to the logits.
    """

    def __init__(self, source: Tensor, recipe: LogitsExpression) -> None:
        assert recipe.weight is not None
        self.recipe = recipe
        self.hidden = source.detach()
        self.vocabulary: int = recipe.weight.shape[0]
        self.wide = torch.promote_types(source.dtype, torch.float32)
        self.inputs: HeadInputs = make_inputs(
            source, source.new_empty(0, dtype=torch.long), Projection(), recipe.norm, -100
        )
        self.inputs.bias_dtype = recipe.bias_dtype()
        self._versions = VersionCheck((self.hidden, *recipe.inputs()), recipe.inputs())
        self._gradients: dict[int, list[Any]] = {}
        # [M] each: logsumexp, mean, and a mask of the positions with computed values.
        self._statistics: dict[Projection, tuple[Tensor, ...]] = {}
        # Hubs that include padding, and their handles. Key: True for a hub with gradients.
        self._hubs: dict[bool, tuple[LazyHead, Tensor]] = {}

    def read(
        self, source: Tensor, tokens: torch.Size, token_positions: Tensor | None = None
    ) -> LogitsReading:
        """Return a description of the logits (`LogitsReading`), from which operations compute the
        logits later, block by block. No logits are computed here. The logits are differentiable if
        hidden states or weights are.

        The caller must keep the `LogitsReading` until backward, because it holds the tensor whose
        autograd node receives the gradients. This object stores no reference to that tensor.

        Args:
            source: [M, h], the hidden states before the final norm.
            tokens: shape of the positions, [*tokens].
            token_positions: [*tokens], index of the hidden state of each token; None: all M hidden
                states in order.
        """
        recipe = self.recipe
        handle = HeadHandle.apply(
            self, source, recipe.weight, recipe.bias, *self.inputs.norm_parameters.current()
        )
        if token_positions is not None:
            return LogitsReading(self, handle, token_positions, recipe.projected(), unique=False)
        positions = torch.arange(source.shape[0], device=source.device).view(tokens)  # [*tokens]
        return LogitsReading(self, handle, positions, recipe.projected())

    def with_padding(self, reading: LogitsReading) -> LogitsReading:
        """Return a description of logits (`LogitsReading`) that can be computed at all positions of
        `reading`. A batch may have been computed without its padding, so that padding has no hidden
        states. If `reading` includes padding, the hidden states of the batch with padding are
        computed now, and the result refers to a new `LazyHead` with these hidden states. Otherwise
        `reading` itself is returned. [Note: padding that is read]"""
        late_padding = self.recipe.late_padding
        graded = torch.is_grad_enabled()
        if late_padding is None or not late_padding.reads_padding(reading.positions):
            return reading
        if graded not in self._hubs:
            self.check()
            source = late_padding.with_padding()
            hub = LazyHead(
                source, dataclasses.replace(self.recipe, late_padding=None, token_positions=None)
            )
            self._hubs[graded] = hub, hub.read(source, source.shape[:1]).handle
        hub, handle = self._hubs[graded]
        for hook in reading.hooks:
            handle = RunInBackward.apply(
                functools.partial(hub.scale_stored_gradients, hook), handle
            )
        return dataclasses.replace(reading, head=hub, handle=handle)

    def check(self) -> None:
        """Raise `StreamBPError` if weights or hidden states were changed in place since forward,
        because logits that are computed now would be those of another model."""
        changed_tensor = self._versions.written_tensor()
        weight = self.recipe.weight
        assert weight is not None
        if changed_tensor is None and has_data(weight) and not weight.untyped_storage().size():
            raise StreamBPError(
                "The output projection's weight is no longer on this rank where the logits are "
                "used: an engine has freed it after the forward. Set "
                "StreamConfig(lazy_logits=False)."
            )
        if changed_tensor is None:
            changed_tensor = self._versions.changed_tensor()
        if changed_tensor is not None:
            raise StreamBPError(
                f"The head's weights or inputs {list(changed_tensor.shape)} changed since the "
                "model was called, and its logits are computed where they are used. Use them "
                "before optimizer.step() or any other update, or set "
                "StreamConfig(lazy_logits=False)."
            )

    def products(self) -> HeadProducts:
        """Return an object that multiplies hidden states [n, h] by the weight [V, h] and adds the
        bias [V].

        Raises:
            StreamBPError: weights or hidden states were changed in place since forward.
        """
        self.check()
        assert self.recipe.weight is not None
        return self.inputs.products(self.recipe.weight, self.recipe.bias)

    def statistics(
        self, reading: LogitsReading, labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute three softmax statistics of the logits of N tokens: the logit of each token's
        label, the logsumexp, and the mean over the vocabulary. Return three tensors [N] in
        promote_types(dtype, float32). The first is 0 if `labels` is None.

        Tokens with the same position and label are computed once.

        Args:
            reading: describes the logits of the N tokens.
            labels: [N], a vocabulary entry for each token; None: no label's logit is needed.
        """
        positions = reading.positions.reshape(-1)
        picks = labels
        if picks is None:
            picks = positions.new_full(positions.shape, -1)
        repeats: Tensor | None = None
        if not reading.unique and has_data(positions):
            (positions, picks), repeats = torch.stack([positions, picks]).unique(
                dim=1, return_inverse=True
            )
        count = positions.shape[0]
        products = self.products()
        # [count] each
        pick, lse, mean = (self.hidden.new_empty(count, dtype=self.wide) for _ in range(3))
        tokens, entries = self.inputs.block_size(self.hidden, self.vocabulary)
        with torch.no_grad():
            for block in token_blocks(count, tokens):
                normed = self.inputs.apply_norm(self.hidden[positions[block]])
                folded = fold_vocabulary(
                    normed, products, reading.projection, picks[block], entries
                )
                pick[block] = folded.target
                lse[block] = folded.lse()
                mean[block] = folded.total / self.vocabulary
            if reading.projection not in self._statistics:
                total = self.hidden.shape[0]
                # Values computed under inference mode may be completed outside of it.
                with torch.inference_mode(False):
                    zeros = [
                        self.hidden.new_zeros(total, dtype=dtype)
                        for dtype in (self.wide, self.wide, torch.bool)
                    ]
                self._statistics[reading.projection] = tuple(zeros)
            all_lse, all_means, is_known = self._statistics[reading.projection]
            all_lse[positions] = lse
            all_means[positions] = mean
            is_known[positions] = True
        if repeats is None:
            return pick, lse, mean
        return pick[repeats], lse[repeats], mean[repeats]

    def known_statistics(self, reading: LogitsReading) -> tuple[Tensor, Tensor] | None:
        """Return logsumexp and mean of the logits of N tokens, [N] each, from the cache. Return
        None unless the cache has both for all N tokens. The logits are thus not computed twice if a
        program first needs the logsumexp, and later the mean.

        Args:
            reading: describes the logits of the N tokens.
        """
        positions = reading.positions.reshape(-1)
        if reading.projection not in self._statistics or not has_data(positions):
            return None
        self.check()
        lse, mean, is_known = self._statistics[reading.projection]
        if not bool(is_known[positions].all()):
            return None
        return lse[positions], mean[positions]

    def store_gradients(self, gradient: Any) -> None:
        """Store the gradients of one result of the logits. Called in backward; the backward of
        `HeadHandle` takes the stored gradients later in the same backward call. Gradients that it
        has not taken are removed when the backward call ends.

        Args:
            gradient: a `StatisticsGradient` or `NodeTerm`.
        """
        task = torch._C._current_graph_task_id()
        if task not in self._gradients:
            self._gradients[task] = []
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(lambda: self._gradients.pop(task, None))
        self._gradients[task].append(gradient)

    def scale_stored_gradients(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Multiply the gradients that are stored now by an engine's factor, such as a loss scale.
        Called in backward, after the results of the logits have stored their gradients, and before
        `HeadHandle` computes the gradients of hidden states and weights.

        Args:
            hook: the engine's tensor hook on the logits. The logits themselves get no gradient, so
                the factor is the hook's result for a gradient [1] of 1: hook(torch.ones(1)), in
                float32 or wider.
        """
        task = torch._C._current_graph_task_id()
        if task in self._gradients:
            factor = hook(self.hidden.new_ones(1, dtype=self.wide))
            if factor is not None:
                self._gradients[task] = [
                    gradient.scale_gradients(factor) for gradient in self._gradients[task]
                ]

    def take_gradients(self) -> list[Any]:
        """Return the gradients that results of the logits have stored in the current backward call,
        and remove them. The backward of `HeadHandle` calls this method."""
        return self._gradients.pop(torch._C._current_graph_task_id(), [])


@dataclasses.dataclass(frozen=True)
class StatisticsCalculation:
    """Calculation of softmax statistics from the logits of N tokens: the logit of a label, the
    logsumexp and the mean, each only if requested. `LazyResult` runs the calculation.

    Attributes:
        reading: describes the logits (`LogitsReading`).
        labels: [N], a vocabulary entry for each token, whose logit is computed; None: no label's
            logit is computed.
        lse: True to compute the logsumexp.
        mean: True to compute the mean of each token's logits.
    """

    reading: LogitsReading
    labels: Tensor | None
    lse: bool = False
    mean: bool = False

    def with_padding(self) -> StatisticsCalculation:
        """Return a calculation of the same statistics that can be run, even if it includes tokens
        of padding. A batch may have been computed without its padding, so that padding has no
        hidden states. If this calculation needs these hidden states, `LazyHead.with_padding`
        computes them now. [Note: padding that is read]"""
        return dataclasses.replace(self, reading=self.reading.head.with_padding(self.reading))

    def inputs(self) -> list[Tensor]:
        """Return the tensors [1] to pass to `LazyResult`. Through these tensors its results are
        connected with the logits in the autograd graph. One tensor stands for the logits. If an
        engine (DDP, ZeRO-3) has inserted a node behind the logits, a second tensor makes backward
        run this node."""
        return inputs_of(self.reading)

    def run(self) -> tuple[Tensor, ...]:
        """Compute the statistics and return those that are requested, in this order: label's logit,
        logsumexp, mean. Each is [N] in promote_types(dtype, float32) and has no graph."""
        head = self.reading.head
        cached: tuple[Tensor, Tensor] | None = None
        if self.labels is None:
            cached = head.known_statistics(self.reading)
        values: tuple[Any, ...]
        if cached is None:
            values = head.statistics(self.reading, self.labels)
        else:
            values = (None, *cached)
        requested = self.labels is not None, self.lse, self.mean
        return tuple(itertools.compress(values, requested))

    def store_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Store the gradients of the results of `run` in the `LazyHead`, where the backward of
        `HeadHandle` uses them later. Called by the backward of `LazyResult`.

        Args:
            grads: gradient [N] of each result of `run`, in the same order; None: no gradient.
        """
        gradients = iter(grads)
        reading = self.reading
        requested = self.labels is not None, self.lse, self.mean
        pick, lse, mean = (next(gradients) if is_requested else None for is_requested in requested)
        positions = reading.positions.reshape(-1)
        reading.head.store_gradients(
            StatisticsGradient(
                reading.projection, positions, reading.unique, self.labels, pick, lse, mean
            )
        )


@dataclasses.dataclass(frozen=True)
class FunctionCalculation:
    """Calculation of a recorded function, with results [N, ...]. A recorded function consists of
    operations on logits [N, V] that the program has called, and that run later. `LazyResult` runs
    the calculation.

    Attributes:
        node: the recorded function; its inputs are flat, [N] or [N, k].
    """

    node: Node

    def with_padding(self) -> FunctionCalculation:
        """Return a calculation of the same function that can be run, even if it includes tokens of
        padding. A batch may have been computed without its padding, so that padding has no hidden
        states. If this calculation needs these hidden states, `LazyHead.with_padding` computes them
        now. [Note: padding that is read]"""
        if all(reading.head.recipe.late_padding is None for reading in readings(self.node)):
            return self
        return FunctionCalculation(
            rebuild(
                self.node, lambda x: x.head.with_padding(x) if isinstance(x, LogitsReading) else x
            )
        )

    def inputs(self) -> list[Tensor]:
        """Return the tensors [1] to pass to `LazyResult`. Through these tensors its results are
        connected with the logits in the autograd graph. The values of these tensors are not used.

        Each of the logits that the function uses has one such tensor, the output of `HeadHandle`,
        whose backward computes the gradients of hidden states and weights. If an engine (DDP,
        ZeRO-3) has inserted a node behind the logits, a second tensor makes backward run that node.
        """
        return inputs_of(self.node)

    def run(self) -> tuple[Tensor, ...]:
        """Run the recorded function for all N tokens, and return its results, [N, ...] each,
        without a graph.

        Logits are built for a block of tokens at a time (`rows_per_block`).
        """
        logits = readings(self.node)
        count = logits[0].positions.shape[0]
        tokens = rows_per_block(logits[0].head.vocabulary)
        hubs = dict.fromkeys(reading.head for reading in logits)
        products = {hub: hub.products() for hub in hubs}
        parts: list[tuple[Tensor, ...]] = []
        blocks = [slice(0, 0)]
        if count:
            blocks = list(token_blocks(count, tokens))
        for block in blocks:
            value = evaluate(self.node, values_at(self.node, block, logits, products))
            parts.append(tuple(value) if isinstance(value, tuple | list) else (value,))
        return tuple(
            torch.cat(column) if len(column) > 1 else column[0].clone()
            for column in zip(*parts, strict=True)
        )

    def store_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Store the gradients of the results of `run` in the `LazyHead`, where the backward of
        `HeadHandle` uses them later. Called by the backward of `LazyResult`.

        Args:
            grads: gradient [N, ...] of each result of `run`; None: no gradient.
        """
        for reading in readings(self.node):
            if reading.handle.requires_grad:
                reading.head.store_gradients(NodeTerm(self.node, reading, grads))
