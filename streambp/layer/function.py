"""The decoder layer as one autograd Function: forward without a graph, backward chunk by chunk
(DESIGN.md 2 and 3).
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from streambp.accumulate import GradientSum
from streambp.attention.attend import AttentionOutput
from streambp.attention.prefix import Stage
from streambp.chunks import Chunk
from streambp.device import MEMORY_ERRORS, RandomState, is_out_of_memory
from streambp.distributed.engines import zeros_for_engines
from streambp.fingerprint.hooks import watch_hooks
from streambp.fingerprint.snapshots import versions_of
from streambp.layer.arguments import Arguments
from streambp.layer.call import ChunkOutput, FullOutputs, LayerCall, OutputSlot, write_chunk
from streambp.layer.gradients import (
    NO_HOOKS,
    Graph,
    GraphMarker,
    MarkGraphStart,
    ReferenceCounts,
    begin_backward,
    check_recomputation,
    count_graph_bytes,
    may_overwrite,
    reference_counts,
    refuse_kept_graph,
    refuse_other_leaves,
    tag_reusable,
)
from streambp.layer.layer_state import CallReport, LayerState, remember
from streambp.layer.oom import RUN_ONCE, layer_memory_error
from streambp.layer.products import UnreadProducts, skip_outputs, sum_weight_gradients
from streambp.layer.recompute import NULL_CONTEXT, Parameters
from streambp.layer.saved_tensors import SavedForBackward
from streambp.recurrent.states import States, leaves_of


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The functions that compute a decoder layer, on one rank or with a sequence split over ranks.

    Attributes:
        make: creates a `LayerCall` from the layer's settings and arguments.
        forward: function of a call and a flag, True if tensors must be saved for backward. Returns
            hidden_states of the full sequence, then the other outputs in the order of
            `call.form.extras`.
        backward: function of a call and a `BackwardPass`: computes the gradients and adds them to
            the `BackwardPass`.
        run_unchunked: runs the unpatched layer under a checkpoint, for a call that cannot be split
            into chunks. Function of the layer's state, positional arguments, keyword arguments and
            a `CallReport` with the reason against chunks; returns the layer's result.
    """

    make: Callable[[LayerState, Arguments], Any]
    forward: Callable[[Any, bool], tuple[Tensor, ...]]
    backward: Callable[[Any, BackwardPass], None]
    run_unchunked: Callable[[LayerState, Any, Any, CallReport], Any]


def run_forward(call: LayerCall, keep: bool) -> tuple[Tensor, ...]:
    """Compute a decoder layer chunk by chunk, without a graph. Return hidden_states [..., B, T, h]
    and then the layer's other outputs, in the order of `call.form.extras`.

    Args:
        call: the layer call.
        keep: True: save the tensors that backward needs; False: there will be no backward.
    """
    layer_state = call.layer_state
    saved = call.saved
    carried = call.carried
    # Memory for the prefix of keys and values, and for the outputs.
    if saved.moves:
        assert layer_state.offloader is not None
        call.limit_prefix(layer_state.offloader)
    states = States()
    carries = layer_state.kind.states.carries
    outputs: FullOutputs = {}
    # The saves are chosen before the first chunk; the witness records each chunk's output.
    if keep:
        saved.find_products()
        if saved.cost_recorder is not None:
            saved.cost_recorder.record_chunk()
            saved.cost_recorder.arguments = call.arguments.nbytes
        call.backward.witness = layer_state.witness(call.hidden_states, call.autocast)
    seeing = call.record_inputs() if keep else NULL_CONTEXT
    with torch.no_grad(), call.prepare_layer(keeps_factors=keep), seeing:
        for chunk in call.plan.chunks:
            # The chunk's start: random state, input, states of the chunk before.
            if keep:
                saved.random.append(RandomState.capture(call.device))
            hidden_chunk = chunk.part(call.hidden_states, -2)
            original = (
                hidden_chunk.clone()
                if keep and layer_state.tests.overwritten.inputs
                else hidden_chunk
            )
            if carries:
                states = carried.start(call.plan, chunk)
                if keep:
                    saved.keep_states(chunk, states)
            # The layer's own forward; its attention appends K and V to the prefix and reads all
            # before them.
            compute = functools.partial(
                _forward_chunk, call, outputs, hidden_chunk, chunk, states, original
            )
            output, attended = call.attempt(compute) if keep else compute(False)
            # Start states for the next chunk, and tensors for backward.
            if carries and output.states and chunk.index in call.plan.successors:
                carried.states[chunk.index] = output.states
            if keep and saved.moves and call.attempt is not RUN_ONCE:
                call.attempt(functools.partial(_save_chunk, saved, chunk, original, attended))
            elif keep:
                saved.keep(chunk, original, attended)
            del output, attended
    # End of forward: report the attention kernels; the prefix stays only if it holds saved keys and
    # values.
    if saved.graph is None:  # a kept graph is computed as in backward, which records no kernels
        layer_state.last_call.kernels = carried.prefix.kernel_uses
    if keep:
        layer_state.last_call.sdpa = carried.prefix.sdpa
        saved.seal(carried.prefix.backward_bytes)
    if keep and "kv" in saved.saves and not saved.moves_kv:
        carried.prefix.pack()
    else:
        carried.prefix.drop_buffers()
        carried.states = {}
        carried.upstream = {}
    return outputs_of(call, outputs)


def _save_chunk(
    saved: SavedForBackward,
    chunk: Chunk,
    original: Tensor,
    attended: list[AttentionOutput],
    _: bool,
) -> None:
    """Save a chunk's tensors on the host for backward. Saving may allocate device memory for a
    copy, so `call.attempt` calls this function and repeats it after running out of memory.

    Args:
        saved: receives the tensors.
        chunk: the chunk's range of positions.
        original: the chunk's input, [..., B, C, h].
        attended: output and logsumexp of each attention call in the chunk.
        _: True in the repetition; not used.
    """
    saved.keep(chunk, original, attended)


def _forward_chunk(
    call: LayerCall,
    outputs: FullOutputs,
    hidden_chunk: Tensor,
    chunk: Chunk,
    states: States,
    original: Tensor,
    is_retry: bool,
) -> tuple[ChunkOutput, list[AttentionOutput]]:
    """Compute one chunk of a layer call, and copy its results into `outputs`. Return the chunk's
    results, and the output and logsumexp of each attention call. Linear outputs named by `saves`
    are collected in `call.saved`.

    The results have no graph. If the graph stays for backward, it is stored as `call.saved.graph`,
    and the list of attention outputs is empty. [Note: kept graphs]

    Args:
        call: the call of the layer.
        outputs: the outputs of the full sequence, into which the chunk's output is written.
        hidden_chunk: the chunk's input, [..., B, C, h].
        chunk: the chunk's range of positions.
        states: the recurrent states at the chunk's start.
        original: the chunk's input: a copy if the layer's forward overwrites `hidden_chunk` and
            backward needs the input, else `hidden_chunk` itself.
        is_retry: True if the chunk is computed a second time, after running out of memory.
    """
    saved = call.saved
    witness = call.backward.witness
    if is_retry:
        saved.random[-1].restore()
        if hidden_chunk is not original:
            hidden_chunk.copy_(original)
    see = call.start_witness(chunk, in_backward=False)
    if saved.keeps_graph:
        with call.backward.parameters.shadow() as shadows:
            graph = compute_with_graph(
                call, hidden_chunk, chunk, call.backward.needs_grad, shadows, {}
            )
        saved.graph = graph
        if witness is not None:
            witness.see_output(original, graph.output.hidden_states)
        extras = {slot: part.detach() for slot, part in graph.output.extras.items()}
        return write_chunk(
            outputs,
            ChunkOutput(graph.output.hidden_states.detach(), extras),
            chunk,
            call.plan.length,
        ), []
    with saved.products.capture_outputs(see=see) if saved.products.names else NULL_CONTEXT:
        output, attended = call.compute(hidden_chunk, chunk, Stage.FORWARD, states=states)
    assert output is not None
    if witness is not None:
        witness.see_output(original, output.hidden_states)
    return write_chunk(outputs, output, chunk, call.plan.length), attended


def outputs_of(call: LayerCall, outputs: FullOutputs) -> tuple[Tensor, ...]:
    """Return the layer's outputs as a tuple: hidden_states [..., B, T, h], then all other outputs,
    such as router logits. Store the order of the other outputs in `call.form.extras`.

    Args:
        call: the layer call.
        outputs: the outputs of the full sequence; key None holds the hidden states and is removed,
            the other keys are `OutputSlot`s.
    """
    result = outputs.pop(None)
    call.form.extras = [slot for slot in outputs if slot is not None]
    return result, *(outputs[slot] for slot in call.form.extras)


class BackwardPass:
    """Gradients in the backward of one layer call: the incoming gradients of the layer's outputs,
    and the gradients of its inputs and parameters, which are collected chunk by chunk.

    Args:
        call: the layer call.
        parameters: the number of distinct trainable parameters.
        of_output: gradient of the output hidden_states [..., B, T, h]; None: the loss does not
            depend on this output.
        of_extras: dict from the `OutputSlot` of each other output to the output's gradient; None:
            the loss does not depend on the output.

    Attributes:
        needs_input: True if the input hidden_states needs a gradient.
        needs_arguments: a flag per argument that requires a gradient: True if the gradient is
            needed in this backward.
        hidden_states: the buffer [..., B, T, h] for the gradient of the input hidden_states. None
            if no gradient is needed, or if the only chunk's gradient is not computed yet. The
            buffer may be that of the incoming gradient: a chunk's part is overwritten after its
            last read.
        sums: sums of the parameters' gradients over the chunks.
        shadows: detached aliases that replace the layer's trainable parameters.
    """

    def __init__(
        self,
        call: LayerCall,
        parameters: int,
        of_output: Tensor | None,
        of_extras: dict[OutputSlot, Tensor | None],
    ) -> None:
        self.of_output, self.of_extras = of_output, of_extras
        self.needs_input, self.needs_arguments = call.backward.needs_grad
        self.hidden_states: Tensor | None = None
        self.sums = GradientSum(parameters, call.backward.gradients_of_a_parameter)
        self.shadows: list[Tensor] = []
        self._arguments = [
            d
            for d, needs in zip(call.arguments.differentiable, self.needs_arguments, strict=True)
            if needs
        ]
        self._buffers = [
            None if d.dim is None else torch.zeros_like(d.tensor) for d in self._arguments
        ]
        self._argument_sums = GradientSum(
            len(self._arguments), call.backward.gradients_of_a_parameter
        )

    def choose_buffer(
        self, call: LayerCall, grad: Tensor | None, counts: ReferenceCounts | None
    ) -> None:
        """Set `hidden_states`, the buffer for the gradient of the layer's input. The buffer is that
        of the incoming gradient if no other code holds a reference to this gradient, else a new
        tensor.

        Args:
            call: the layer call.
            grad: gradient of the layer's output [..., B, T, h]; None: there is none.
            counts: `reference_counts(grad)` at the start of backward; None: `grad` is None.
        """
        like = call.hidden_states
        if grad is not None and counts is not None and may_overwrite(grad, counts, like):
            self.hidden_states = grad
            return
        buffer = call.attempt(
            lambda _: torch.empty_like(
                like, device=call.device, memory_format=torch.contiguous_format
            )
        )
        self.hidden_states = tag_reusable(buffer)

    def upstream(self, output: ChunkOutput, chunk: Chunk) -> tuple[list[Tensor], list[Tensor]]:
        """Return two lists for one chunk's backward: the chunk's outputs that have a graph and an
        incoming gradient, hidden_states [..., B, C, h] first, and the chunk's slices of these
        gradients.

        Args:
            output: the chunk's outputs.
            chunk: the chunk's range of positions.
        """
        tensors, gradients = [], []
        for slot, grad in ((None, self.of_output), *self.of_extras.items()):
            tensor = output.hidden_states if slot is None else output.extras[slot]
            if grad is not None and tensor.requires_grad:
                tensors.append(tensor)
                dim = -2 if slot is None else slot.dim
                gradients.append(chunk.part(grad, dim))
        return tensors, gradients

    def add(self, chunk: Chunk, gradients: list[Tensor | None], accumulate: bool = False) -> None:
        """Add the gradients of one chunk's inputs to those of the full sequence.

        Args:
            chunk: the chunk's range of positions.
            gradients: gradient of hidden_states [..., B, C, h] first, if needed, then of the
                arguments with a needed gradient; None: the chunk's outputs do not depend on the
                input.
            accumulate: False: write the gradient of hidden_states into the chunk's part of the
                buffer. True: add it to what the buffer has for this chunk, for a layer that is
                differentiated in two parts. The part after attention comes first, and the part up
                to attention is added.
        """
        first, *gradients = gradients if self.needs_input else (None, *gradients)
        if self.needs_input and self.sums.is_single_chunk:
            self.hidden_states = first
        elif self.hidden_states is not None:
            part = chunk.part(self.hidden_states, -2)
            if first is not None:
                part.add_(first) if accumulate else part.copy_(first)
            elif not accumulate:
                part.zero_()
        summed: list[Tensor | None] = [None] * len(self._arguments)
        for index, (argument, gradient) in enumerate(zip(self._arguments, gradients, strict=True)):
            buffer = self._buffers[index]
            if buffer is None:
                summed[index] = gradient
            elif gradient is not None:
                assert argument.dim is not None
                chunk.part(buffer, argument.dim).add_(gradient)
        self._argument_sums.add(summed)

    def argument_gradients(self) -> list[Tensor | None]:
        """Return one gradient for each argument with requires_grad, in the argument's shape [...],
        summed over the chunks. None if backward does not need the argument's gradient, or if no
        output depends on the argument."""
        if not self._arguments:
            return [None] * len(self.needs_arguments)
        sums = self._argument_sums.result([argument.tensor for argument in self._arguments])
        gradients = iter(
            [
                total if buffer is None else buffer
                for buffer, total in zip(self._buffers, sums, strict=True)
            ]
        )
        return [next(gradients) if needs else None for needs in self.needs_arguments]


class StreamedLayer(torch.autograd.Function):
    """Autograd Function that computes a decoder layer chunk by chunk in forward, and recomputes and
    differentiates it chunk by chunk in backward.

    Inputs are hidden_states [..., B, T, h], the layer's arguments with requires_grad, and the
    layer's trainable parameters. Outputs are hidden_states and the layer's other outputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        strategy: Strategy,
        call: LayerCall,
        parameters: Parameters,
        hidden_states: Tensor,
        *graded_inputs: Tensor,
    ) -> Any:
        """Return hidden_states [..., B, T, h] of the layer, then its other outputs. Tensors for
        backward are saved in `call.saved`.

        Args:
            strategy: functions that compute the layer's forward and backward.
            call: the call of the layer.
            parameters: the modules and names of the layer's trainable parameters, from which
                backward reads the parameters again.
            hidden_states: the layer's input [..., B, T, h].
            graded_inputs: the arguments with requires_grad, then the parameters, for autograd only.
                The values are read from `call` and from the layer's modules.
        """
        ctx.strategy = strategy
        ctx.call = call
        ctx.parameters = parameters
        ctx.owner = call.layer_state.owner
        ctx.began = call.layer_state.owner.current
        ctx.version = hidden_states._version
        ctx.set_materialize_grads(False)
        count = len(call.arguments.differentiable)
        call.backward.needs_grad = (
            ctx.needs_input_grad[3],
            list(ctx.needs_input_grad[4 : 4 + count]),
        )
        versions = versions_of(call.snapshot)
        try:
            hooks = call.snapshot.hooks
            weights = NULL_CONTEXT
            if call.layer_state.weights is not None:
                weights = call.layer_state.load_weights("forward", call.device)
            with weights, watch_hooks(hooks) if hooks.locations else NO_HOOKS as modifying_hooks:
                outputs = strategy.forward(call, True)
            if modifying_hooks:
                call.layer_state.tests.refuse_untested(modifying_hooks, call.layer_state.layer)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            raise layer_memory_error(error, call.layer_state, call.plan) from error
        call.backward.forward_snapshot = call.layer_state.fingerprint.record_forward(
            call.layer_state.layer, call.snapshot, versions, modifying_hooks
        )
        if call.saved.store.copies:
            # The shape without storage: the tensors are offloaded.
            call.hidden_states = hidden_states.new_empty((), device="meta").expand_as(hidden_states)
        return outputs

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, *extra_grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return three times None, then the gradients of the layer's input hidden_states
        [..., B, T, h], of the arguments with requires_grad and of the parameters. Each gradient has
        the dtype of its tensor.

        Args:
            grad: gradient of the output hidden_states [..., B, T, h]; None: the loss does not
                depend on this output. The buffer of `grad` may become that of the input's gradient.
            extra_grads: gradients of the layer's other outputs, each in its output's shape; None
                for unused outputs.

        Raises:
            BackwardError: this is the second backward, second derivatives are wanted, or the layer
                or its inputs changed since forward.
            StreamBPError: another thread is computing with the model. [Note: owner of a step]
        """
        counts = None if grad is None else reference_counts(grad)
        use = ctx.owner.enter(ctx.began)
        try:
            call, parameters = begin_backward(ctx)
            if call.layer_state.backward_begins is not None:
                call.layer_state.backward_begins(call.device)
            # Incoming gradients and accumulators; dx may be written into the incoming gradient's
            # buffer.
            work = BackwardPass(
                call,
                len(parameters.groups),
                grad,
                dict(zip(call.form.extras, extra_grads, strict=True)),
            )
            if work.needs_input and not work.sums.is_single_chunk:
                work.choose_buffer(call, grad, counts)
            call.hidden_states = None  # type: ignore[assignment]
            # Recompute and differentiate the layer with shadows in its parameters' slots.
            # `check_recomputation` exits after the parameters are back, because it takes a snapshot
            # of the layer.
            weights_on_device = NULL_CONTEXT
            if call.layer_state.weights is not None:
                weights_on_device = call.layer_state.load_weights("backward", call.device)
            with (
                call.autocast.disable(),
                call.prepare_layer(),
                check_recomputation(call),
                weights_on_device,
                parameters.shadow() as work.shadows,
            ):
                work.sums.index_by_alias = {
                    id(shadow): index for index, shadow in enumerate(work.shadows)
                }
                ctx.strategy.backward(call, work)
            # The comparison's results are read from the device once, at the end of the full
            # backward.
            if call.backward.witness is not None:
                call.backward.witness.end()
            call.carried.prefix.drop_buffers()
            call.carried.states = {}
            call.carried.upstream = {}
            # One gradient for each parameter, in its dtype.
            values = parameters.current()
            summed = call.attempt(lambda _: work.sums.result(values))
            if call.backward.send_gradients is not None:
                summed = call.backward.send_gradients(values, summed)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            raise layer_memory_error(error, call.layer_state, call.plan) from error
        finally:
            use.__exit__()
        pairs = zip(summed, values, strict=True)
        gradients = [
            zeros_for_engines(parameter) if gradient is None else gradient
            for gradient, parameter in pairs
        ]
        return None, None, None, work.hidden_states, *work.argument_gradients(), *gradients


FindUnread = Callable[[LayerCall, dict[str, nn.Linear], bool], UnreadProducts]


def run_backward(find_unread: FindUnread, call: LayerCall, work: BackwardPass) -> None:
    """Recompute and differentiate the chunks of a layer call, last chunk first. If keys and values
    were not saved, those of all chunks but the last are recomputed before. If forward's autograd
    graph was saved, only differentiate it. [Note: prefix accumulation order]

    Args:
        find_unread: function of the call, the layer's Linears by name, and a flag, True if the
            input needs a gradient. Returns the Linears whose outputs backward never reads, found by
            a test run. Called once for all calls with the same `LayerCall.unread_key`.
        call: the layer call.
        work: contains the gradients of the layer's outputs, and receives the gradients of its
            inputs and parameters.
    """
    if call.saved.graph is not None:  # [Note: kept graphs]
        (chunk,) = call.plan
        _chunk_backward(call, chunk, work, any(work.needs_arguments))
        return
    # Find the Linear outputs that backward never reads, once for each kind of call.
    linears = call.layer_state.linears
    unread_key = call.unread_key(linears, work.needs_input)
    unread = call.layer_state.tests.unread.get(unread_key)
    if unread is None:
        products = call.attempt(lambda _: find_unread(call, linears, work.needs_input))
        unread = remember(call.layer_state.tests.unread, unread_key, products)
    # Recompute keys and values of all chunks except the last, which writes its own. Skip the
    # recomputation if keys and values were saved, or if the layer has no attention.
    prefix = call.carried.prefix
    saved = call.saved
    needs_refill = (
        (len(call.plan) > 1 or saved.moves_kv) and prefix.calls and not prefix.filled_until
    )
    if needs_refill and saved.keys_are_stored:
        call.attempt(lambda _: prefix.load_saved())
    elif needs_refill:
        with torch.no_grad(), skip_outputs(linears, unread.refill):
            for chunk in saved.refilled_chunks:
                starts = saved.start_reads(chunk.index)
                if saved.moves and call.attempt is not RUN_ONCE:
                    call.attempt(functools.partial(saved.load, starts))
                saved.bring(chunk, starts, names_to_keep=dict(starts))
                call.attempt(functools.partial(_refill, call, chunk))
    # Recompute and differentiate each chunk. Chunks of later queries are first: the dK and dV of a
    # chunk are complete when its own turn begins.
    skipped = unread.recompute.difference(call.saved.products.names)
    if call.backward.witness is not None:
        skipped &= call.backward.witness.left_out
    with sum_weight_gradients(linears, work.sums, skipped, call.backward.witness):
        for chunk in call.plan.backward:
            _chunk_backward(call, chunk, work, unread.states or any(work.needs_arguments))


def compute_with_graph(
    call: LayerCall,
    x: Tensor,
    chunk: Chunk,
    flags: tuple[bool, list[bool]],
    shadows: list[Tensor],
    states: States,
) -> Graph:
    """Run the layer's own forward on one chunk x [..., B, C, h] with an autograd graph. Return the
    chunk's outputs, and the leaves of the graph.

    Args:
        call: the call of the layer.
        x: hidden_states of the chunk.
        chunk: the chunk's range of positions.
        flags: (True if x needs a gradient, a list with the same for each argument that requires a
            gradient).
        shadows: the detached aliases that now replace the layer's parameters.
        states: the recurrent states at the chunk's start.
    """
    needs_input, arguments = flags
    hidden_chunk = x.detach().requires_grad_(needs_input)
    leaves = call.arguments.leaves(chunk, arguments)
    origin = GraphMarker()
    with torch.enable_grad():
        if chunk.stop == call.plan.length:
            layer_input = MarkGraphStart.apply(hidden_chunk, origin, False)
        else:
            layer_input = hidden_chunk
        output, _ = call.compute(layer_input, chunk, Stage.RECOMPUTE, leaves=leaves, states=states)
    assert output is not None
    return Graph(output, origin, hidden_chunk, leaves, shadows)


def _refill(call: LayerCall, chunk: Chunk, is_retry: bool) -> None:
    with call.saved.random[chunk.index].replay():
        states = call.saved.states() if call.layer_state.kind.states.carries else None
        call.compute(call.saved.brought["x"], chunk, Stage.REFILL, states=states)


def _chunk_backward(
    call: LayerCall, chunk: Chunk, work: BackwardPass, through_states: bool
) -> None:
    """Recompute one chunk with a graph, differentiate it, and add its gradients to `work`.
    [Note: once for each chunk]

    Args:
        call: the layer call.
        chunk: the chunk's range of positions.
        work: contains the gradients of the layer's outputs, and receives the chunk's gradients.
        through_states: True if the chunk's start states depend on a tensor that needs a gradient.
            Gradients of the start states are then computed and passed to the chunk before.
    """
    saved = call.saved
    carries = call.layer_state.kind.states.carries
    if saved.moves and call.attempt is not RUN_ONCE:
        call.attempt(functools.partial(saved.load, saved.reads(chunk.index)))
    # The load may have freed saved tensors to make room, so the reads are listed again.
    saved.bring(chunk, saved.reads(chunk.index))
    x = saved.brought["x"]
    states = States()
    upstream = States()
    if carries:
        states = saved.states()
        upstream = call.carried.upstream.pop(chunk.index, {})
        states = leaves_of(states) if through_states else states
    of_inputs, through, of_parameters = call.attempt(
        functools.partial(_differentiate, call, chunk, work, x, states, upstream)
    )
    saved.brought.clear()
    if carries:
        call.carried.add_state_gradients(call.plan, chunk, through)
    work.add(chunk, of_inputs)
    call.attempt(lambda _: work.sums.add(of_parameters))


def _differentiate(
    call: LayerCall,
    chunk: Chunk,
    work: BackwardPass,
    x: Tensor,
    states: States,
    of_states: States,
    is_retry: bool,
) -> tuple[list[Tensor | None], States, list[Tensor | None]]:
    """Return the gradients of one chunk: of x and the arguments with needed gradients, of the
    chunk's start states, and of the parameters. The chunk is recomputed with a graph, unless
    forward has stored the graph. None stands for a gradient that does not exist, or that was added
    to `work.sums` directly.

    Args:
        call: the layer call.
        chunk: the chunk's range of positions.
        work: contains the gradients of the layer's outputs.
        x: [..., B, C, h], the chunk's hidden_states.
        states: the recurrent states that the chunk starts from.
        of_states: the gradients of the chunk's end states.
        is_retry: True in a retry after running out of memory: gradients that the first attempt
            added to sums over chunks are not added again.
    """
    if call.attempt is not RUN_ONCE:
        work.sums.begin(is_retry)
        call.carried.prefix.begin_backward(is_retry)
    graph, call.saved.graph = call.saved.graph, None
    if graph is None or any(
        of_graph is not of_pass
        and of_graph.data_ptr() != of_pass.data_ptr()  # an engine has gathered the parameters again
        for of_graph, of_pass in zip(graph.shadows, work.shadows, strict=True)
    ):
        saved = call.saved
        see = call.start_witness(chunk, in_backward=True)
        with (
            saved.random[chunk.index].replay(),
            saved.products.use_outputs(saved.brought, sums=work.sums, see=see)
            if saved.products.names
            else NULL_CONTEXT,
            count_graph_bytes(call, saved.cost_recorder, (x, *work.shadows))
            if saved.cost_recorder is not None
            else NULL_CONTEXT,
        ):
            graph = compute_with_graph(
                call, x, chunk, (work.needs_input, work.needs_arguments), work.shadows, states
            )
        if call.backward.witness is not None:
            call.backward.witness.see_output(x, graph.output.hidden_states)
    last, origin, output = chunk.stop == call.plan.length, graph.origin, graph.output
    outputs, upstream = work.upstream(output, chunk)
    for key, grad in of_states.items():  # a chunk's end states are outputs as well
        if output.states[key].requires_grad:
            outputs.append(output.states[key])
            upstream.append(grad.to(output.states[key].dtype))
    targets = [leaf for leaf in (graph.hidden_chunk, *graph.leaves) if leaf.requires_grad]
    starts = {key: state for key, state in states.items() if state.requires_grad} if states else {}
    sources = [*targets, *starts.values(), *graph.shadows]
    if last:
        refuse_other_leaves(call.layer_state.layer, outputs, sources)
    gradients: list[Tensor | None] = list(
        torch.autograd.grad(outputs, sources, upstream, allow_unused=True)
    )
    del outputs, upstream, output, graph
    marker = weakref.ref(origin)
    del origin
    if last:
        refuse_kept_graph(call, marker)
    first, second = len(targets), len(targets) + len(starts)
    through = zip(starts, gradients[first:second], strict=True)
    return (
        gradients[:first],
        {key: grad for key, grad in through if grad is not None} if starts else {},
        gradients[second:],
    )
