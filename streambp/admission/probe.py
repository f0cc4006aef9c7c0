"""Test before a layer is first streamed if its chunks compute the same as its full sequence.

A token-shift inside a decoder layer, or a recurrence with undetected states, would silently make
chunks compute something else. The first call of every layer, and of every new kind, therefore runs
a few tokens twice, unchunked and in chunks. Outputs are compared, and gradients if a graph is
required: a state that is passed on without its gradient gives the right output. The test misses
effects of positions far beyond these tokens. Layers that count positions therefore get a
`ChunkCache`.

The comparison misses token mixing below rounding, and mixing whose weights are still zero.
Therefore all runs replace zero weights, and one run has attention that does not cross the chunk's
end. No gradient may then cross the end, which is exact to the bit. Layers that pass on states or
read a cache are exempt. This run, in the layer's own mode, also shows side effects.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from streambp.admission.agreement import (
    all_agree,
    coarsest_dtype,
    fix_expert_choices,
    router_scores_agree,
)
from streambp.admission.first_call import REASON_FIRST_CALL, find_values_set_once
from streambp.admission.generators import (
    generator_states,
    generators_of,
    has_drawn,
    learn_changes,
    trial_context,
)
from streambp.admission.long_trial import why_not_at_length
from streambp.admission.own_run import (
    StreamingMismatchError,
    UnpatchedRun,
    can_run_unpatched,
    compare_with_unpatched,
    gradients_of,
    run_unpatched,
    small_parameters,
)
from streambp.admission.random_draws import (
    EXTREMES,
    REASON_DRAWS_FOR_ROWS,
    DrawRecorder,
    draws_for_rows,
)
from streambp.admission.rehearsal import (
    TRIAL_CHUNK_SIZE,
    causal_prefix,
    may_have_graphs,
    prepare_rehearsal,
    random_like,
    randomize_zero_weights,
    rehearse,
    set_eval_mode,
    unmask_arguments,
)
from streambp.admission.snapshot import StateRestorer
from streambp.admission.third_party import (
    distinct_attentions,
    foreign_experts,
    refuse_foreign_attention,
    watched_hooks,
)
from streambp.attention.prefix import Prefix, Stage
from streambp.attention.spans import QueryRun, Spans
from streambp.chunks import Chunk, ChunkPlan
from streambp.device import (
    RandomState,
    has_data,
    is_kernel_error,
    is_out_of_memory,
    passes_kernel_module,
)
from streambp.errors import AttentionChoiceError, KernelError, StreamBPError
from streambp.known_names import BACKWARD_HOOKS
from streambp.layer.call import LayerCall
from streambp.layer.gradients import GraphMarker, MarkGraphStart, is_kept, nodes_behind
from streambp.layer.layer_state import remember
from streambp.layer.side_effects import (
    REASON_KEPT_GRAPH,
    buffers_of,
    find_written_buffers,
    replace_buffers,
)
from streambp.recurrent.documents import join_documents, split_documents, trial_rows
from streambp.recurrent.states import MIN_CHUNK_TOKENS, leaves_of
from streambp.tensors import rebuild

REASON_MIXES_TOKENS = "it mixes tokens outside of its attention (a convolution, a recurrence?)"
REASON_RANDOM_NUMBERS = "it draws random numbers elsewhere than from torch's default generators"
REASON_PARTIAL_GRAPH = "its output has an autograd graph for some lengths of a sequence alone"
REASON_EMPTY_BATCH = "its batch is empty, which tells nothing of the layer"
REASON_GRADIENT_EDITS = (
    "{} changes gradients inside it, and may do so by where a token is in the whole sequence"
)
REASON_CONVOLUTION = (
    "it mixes tokens outside of its attention, in a convolution whose state it hands to no chunk"
)


class Verdict(NamedTuple):
    """Decision whether a call of a decoder layer runs in chunks.

    Attributes:
        streams: True if the call runs in chunks; False if it runs unchunked.
        reason: the reason to run the call unchunked. None if the call runs in chunks, or if no test
            was possible (a single token, tensors without data).
    """

    streams: bool
    reason: str | None = None


def can_stream(call: LayerCall) -> Verdict:
    """Decide whether a decoder layer runs in chunks: test on random tokens if chunks compute the
    same as the full sequence.

    The decision concerns the layer and not the batch: hidden states are random and the mask is
    causal. The decision applies to all calls with arguments of the same form, or to this call alone
    if the sequence has few tokens.

    Tensors without data (meta, fake) cannot be compared, so the decision follows from the layer's
    code. A single token and an empty batch are not tested and run unchunked. A single token runs as
    one chunk if the layer's weights are on the host.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.

    Raises:
        KernelError: a kernel failed in the test, so nothing is known about the layer.
        StreamBPError: the attention kernel that the user's settings request cannot compute the
            call.
    """
    layer_state, findings = call.layer_state, call.layer_state.tests.results[call.arguments.kind]
    x = call.hidden_states.detach()
    if not x.numel():
        return Verdict(False, REASON_EMPTY_BATCH)
    if findings.is_tested:  # layers that cannot stream return earlier
        return (
            Verdict(True)
            if layer_state.tests.covers(findings, call.plan)
            else _test_full_length(call)
        )
    if not has_data(x):
        # the structure alone does not decide
        if not (layer_state.kind.states.carries or layer_state.kind.attention.reads_a_mask):
            return Verdict(False)
        reason = (
            REASON_CONVOLUTION
            if not layer_state.kind.states.carries and _convolves(call.layer_state.layer)
            else None
        )
        if layer_state.kind.states.carries:
            try:
                with call.prepare_layer(), trial_context(call), set_eval_mode(call):
                    reason = _unread_state(call, x)
            except StreamBPError:
                raise
            except Exception as error:
                reason = reason_of_error(error)
        if reason is not None:
            findings.set_result(reason)
        return Verdict(reason is None, reason)
    if x.shape[-2] == 1:
        return Verdict(layer_state.on_host)
    try:
        call.arguments.slice_chunk(Chunk(0, 0, call.arguments.length))
    except StreamBPError as error:
        return Verdict(False, str(error))
    if call.parts.configs:
        refuse_foreign_attention(distinct_attentions([call.layer_state.layer]))
    reason, certain, _ = _test_chunks(call, x)
    if (
        reason is not None
        or not certain
        or layer_state.tests.covers(layer_state.tests.results[call.arguments.kind], call.plan)
    ):
        return Verdict(reason is None, reason)
    return _test_full_length(call)


class ProbeResult(NamedTuple):
    """Result of a test that compares a layer's output in chunks with its unchunked output.

    Attributes:
        reason: the reason, as text, to run the layer unchunked; None: the layer may run in chunks.
        certain: True: the result holds for all later calls with arguments of the same form. False:
            the result holds for this call alone, and the next call is tested again.
        may_change: True if the reason may be temporary, such as an exception. The result then holds
            for this call alone, whatever `certain` is. After `DOUBTS_BEFORE_DECISION` (4) such
            results, all calls of this form run unchunked.
    """

    reason: str | None
    certain: bool = True
    may_change: bool = False


def _test_chunks(call: LayerCall, x: Tensor) -> ProbeResult:
    """Test on random tokens if the layer's chunks compute the same as the full sequence, and return
    the result. If the result holds for all later calls with arguments of the same form, store it in
    the layer's `tests.results`, so that these calls are not tested.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: hidden_states of the call, [..., B, T, h], whose scale the random tokens have.
    """
    layer_state, kind = call.layer_state, call.arguments.kind
    outcome = _why_not(call, x)
    call.arguments.replace_state(call.snapshot.kind)  # without changes by the layer's own forward
    findings = remember(
        layer_state.tests.results, call.arguments.kind, layer_state.tests.results.pop(kind)
    )
    if outcome.reason is not None and outcome.may_change:
        findings.add_doubt(outcome.reason)
    elif outcome.certain:
        findings.set_result(outcome.reason)
    return outcome


def _test_full_length(call: LayerCall) -> Verdict:
    """Test a layer with third-party code on the full length of its call. The test on a few tokens
    is not enough, because such code may depend on positions that a few tokens do not have. Store
    and return the decision whether the layer runs in chunks. [Note: foreign insides]

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
    """
    findings = call.layer_state.tests.results[call.arguments.kind]
    with prepare_rehearsal(call), trial_context(call), set_eval_mode(call), torch.no_grad():
        try:
            reason = why_not_at_length(call)
        except Exception as error:
            if (
                isinstance(error, StreamBPError)
                or is_out_of_memory(error)
                or is_kernel_error(error, call.device)
            ):
                raise
            findings.is_tested = False
            findings.add_doubt(reason_of_error(error))
            return Verdict(False, reason_of_error(error))
    findings.set_result(reason)
    return Verdict(reason is None, reason)


def _why_not(call: LayerCall, hidden_states: Tensor) -> ProbeResult:
    """Test on random tokens if the layer's chunks compute the same as the full sequence, and return
    the result. The test leaves no trace: values that the layer stores meanwhile are removed, and
    the call's arguments are restored. [Note: a trial leaves nothing]

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        hidden_states: the layer's input, [..., B, T, h], whose scale the random tokens have.
    """
    if not call.layer_state.kind.states.carries and _convolves(call.layer_state.layer):
        return ProbeResult(REASON_CONVOLUTION)
    with prepare_rehearsal(call), trial_context(call) as state:
        with torch.no_grad():
            x, upstream = random_like(hidden_states), random_like(hidden_states)
        named_arguments, length = call.arguments.by_name, x.shape[-2]
        # Use several documents if the call has several.
        documents = (
            split_documents(named_arguments, length) if call.packing.document_arguments else {}
        )
        rows = None if call.packing.rows is None else trial_rows(x.shape[-3], length)
        with call.arguments.replace(
            {**unmask_arguments(named_arguments, length), **documents}, rows
        ):
            try:
                outcome = _compare_chunks(call, x, upstream, state)
            except Exception as error:
                outcome = _result_of_error(call, x, upstream, error, state)
        if outcome.reason in (None, REASON_MIXES_TOKENS) and call.layer_state.kind.states.carries:
            state.rewind()
            try:
                with set_eval_mode(call):
                    outcome = outcome._replace(reason=_unread_state(call, x) or outcome.reason)
            except Exception as error:
                outcome = _result_of_error(call, x, upstream, error, state)
        if not outcome.may_change:
            learn_changes(call, state)
    names = foreign_experts(call.layer_state.layer)
    if names and outcome.reason == REASON_MIXES_TOKENS:
        outcome = outcome._replace(
            reason=f"{REASON_MIXES_TOKENS}; its experts run {', '.join(names)}"
        )
    return outcome._replace(certain=outcome.certain and hidden_states.shape[-2] > TRIAL_CHUNK_SIZE)


def _compare_chunks(
    call: LayerCall, x: Tensor, upstream: Tensor, state: StateRestorer
) -> ProbeResult:
    """Run all checks of a layer on random tokens, and return the result. The first check that fails
    gives the reason to run the layer unchunked.

    The checks find writes to buffers, stored tensors with a graph, random numbers for a call
    instead of a token, and values that only the first call sets. Another check finds a gradient
    between tokens of different chunks outside of attention. The last check compares the values of
    chunks with those of the unpatched layer.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states, [..., B, t, h].
        upstream: random gradient of the layer's output, shaped like x.
        state: restores, between two runs, the values that the layer stored before the test.
    """
    chunk_size = min(TRIAL_CHUNK_SIZE, -(-x.shape[-2] // 2))
    generators = generators_of(call.layer_state, call.snapshot)
    states = generator_states(generators)
    random = RandomState.capture(call.device)
    with watched_hooks(call.layer_state.layer, BACKWARD_HOOKS) as editing:
        reason = _try_isolated_chunks(call, x, upstream, chunk_size)
        if has_drawn(generators, states):
            return ProbeResult(REASON_RANDOM_NUMBERS)
        if reason is not None and not editing:
            return ProbeResult(reason)
        # Inference mode builds no graphs, and the layer has not run then.
        may_draw = not (may_have_graphs(call) and random.is_current())
        if may_draw and _draws_for_rows(call, x, upstream, chunk_size, state, random):
            return ProbeResult(REASON_DRAWS_FOR_ROWS)
        if reason is None and (names := find_values_set_once(call, x, state)):
            return ProbeResult(REASON_FIRST_CALL.format(", ".join(names)), may_change=True)
        with set_eval_mode(call), randomize_zero_weights(call) as shadows:
            outcome = _why_unlike(call, x, upstream, chunk_size, shadows or [], state)
    return (
        ProbeResult(REASON_GRADIENT_EDITS.format(", ".join(dict.fromkeys(editing))))
        if editing
        else outcome
    )


def _draws_for_rows(
    call: LayerCall,
    x: Tensor,
    upstream: Tensor,
    chunk_size: int,
    state: StateRestorer,
    random: RandomState,
) -> bool:
    """True if the layer draws random numbers once for a call, for example for stochastic depth, and
    these numbers change its result. Each chunk would draw other numbers, so the caller runs the
    layer unchunked.

    The sizes of all draws are compared between chunks and the full sequence. The numbers of draws
    whose size does not depend on the tokens are then replaced by low and by high numbers. The
    result is True if the two outputs differ.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states, [..., B, t, h].
        upstream: random gradient of the layer's output, shaped like x.
        chunk_size: length of a chunk.
        state: restores, between two runs, the values that the layer stored before the test.
        random: the state of torch's generators at the start of each run.
    """

    def run(recorder: DrawRecorder, size: int | None = None) -> list[Tensor]:
        state.rewind()
        with random.replay(), recorder:
            return _run(call, x, upstream, size)

    results: list[list[Tensor]] = []
    with randomize_zero_weights(call):  # a new adapter's result is 0, whatever it draws
        unchunked, chunked = DrawRecorder(), DrawRecorder()
        run(unchunked)
        sizes: list[list[int]] = []
        if x.shape[-2] >= 2 * MIN_CHUNK_TOKENS:
            run(chunked, chunk_size)
            plan = ChunkPlan(x.shape[-2], chunk_size).with_min_tokens(MIN_CHUNK_TOKENS)
            count = max(1, len(chunked.sizes) // len(plan))
            for start in range(0, len(chunked.sizes), count):
                sizes.append(chunked.sizes[start : start + count])
        fixed = draws_for_rows(unchunked.sizes, sizes)
        if fixed:
            for fraction in (*EXTREMES, EXTREMES[0]):
                results.append(run(DrawRecorder(fixed, fraction)))
    state.rewind()
    if not results:
        return False
    low, high, repeated = results
    if all(map(torch.equal, low, repeated)):
        return not all(map(torch.equal, low, high))
    # A kernel adds in another order in each run, as experts' sums on a GPU do.
    return not all_agree(low, high, (x, upstream), coarsest_dtype(call, x))


def _result_of_error(
    call: LayerCall, x: Tensor, upstream: Tensor, error: Exception, state: StateRestorer
) -> ProbeResult:
    """Return the result of a test of a layer whose run in chunks raised. The call then runs
    unchunked, and the next call is tested again.

    If the unpatched layer computes the test's tokens, the chunks are the cause. After several such
    tests, all calls with arguments of the same form run unchunked. If the unpatched layer raises as
    well, this test is not counted: the call itself will raise.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states of the test, [..., B, t, h].
        upstream: random gradient of the layer's output, shaped like x.
        error: the exception.
        state: restores, before the next run, the values that the layer stored before the test.

    Raises:
        Exception: `error` itself, if an unchunked run is no remedy. Examples are lack of memory, an
            attention setting that cannot compute the call, and a layer that differs from the
            unpatched one.
        KernelError: a kernel failed.
    """
    if isinstance(error, AttentionChoiceError | StreamingMismatchError) or is_out_of_memory(error):
        raise error
    if isinstance(error, StreamBPError) and passes_kernel_module(error):
        raise error  # the requested attention cannot compute the call
    if is_kernel_error(error, x.device):
        raise KernelError(
            f"A kernel failed when {type(call.layer_state.layer).__name__} was tested on "
            f"{x.shape[-2]} tokens ({type(error).__name__}: {error}). The kernel would fail in training as well. Set "
            "another attention in StreamConfig ('flash', or 'math', which uses torch's own "
            "products alone), or run the model unpatched to see whether the kernel fails there "
            "too."
        ) from error
    # Any other exception is due to the chunks, or to the call.
    state.rewind()
    return ProbeResult(
        reason_of_error(error), certain=False, may_change=can_run_unpatched(call, x, upstream)
    )


def _why_unlike(
    call: LayerCall,
    x: Tensor,
    upstream: Tensor,
    chunk_size: int,
    shadows: list[Tensor],
    state: StateRestorer,
) -> ProbeResult:
    """Compare the layer's chunks with the unpatched layer on random tokens, and return the result.

    If the two differ, the layer also runs in one chunk with streambp's attention. This separates
    the effect of chunks from the effect of streambp's attention. Every run starts from the same
    stored values.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states, [..., B, t, h].
        upstream: random gradient of the layer's output, shaped like x.
        chunk_size: length of a chunk.
        shadows: tensors that replace the layer's trainable parameters during the test, with random
            numbers in place of zeros.
        state: restores, between two runs, the values that the layer stored before the test.
    """
    if (unpatched := _agreeing_run(call, x, upstream, chunk_size, shadows, state)) is not None:
        return ProbeResult(unpatched.why_whole())
    # The runs differ by more than rounding, or a router has a tie.
    state.rewind()
    with fix_expert_choices(call) as choices:
        unchunked = _run(call, x, upstream, parameters=small_parameters(shadows))
        state.rewind()
        # one document per row, because the unpatched layer may not accept several
        if call.packing.marks_documents:
            with (
                call.arguments.replace(join_documents(call.arguments.by_name)),
                fix_expert_choices(call),
            ):
                streamed = _run(call, x, upstream, parameters=small_parameters(shadows))
                state.rewind()
                reason = compare_with_unpatched(call, x, upstream, streamed, shadows)
        else:
            reason = compare_with_unpatched(call, x, upstream, unchunked, shadows)
        if reason is not None:
            return ProbeResult(reason)
        state.rewind()
        chunked = _run(call, x, upstream, chunk_size)
        dtype = coarsest_dtype(call, x)
        if (len(unchunked) > 1) != (len(chunked) > 1):
            return ProbeResult(REASON_PARTIAL_GRAPH)
        is_alike = all_agree(unchunked, chunked, (x, upstream), dtype)
        if is_alike and router_scores_agree(choices, dtype):
            return ProbeResult(None)
    if not all(bool(part.isfinite().all()) for part in unchunked):
        return ProbeResult(None, certain=False)  # the weights are not loaded yet
    if changes := state.changes():  # the first chunk sets a value, or a later chunk reads it
        return ProbeResult(REASON_FIRST_CALL.format(", ".join(changes)), may_change=True)
    return ProbeResult(REASON_MIXES_TOKENS)


def _agreeing_run(
    call: LayerCall,
    x: Tensor,
    upstream: Tensor,
    chunk_size: int,
    shadows: list[Tensor],
    state: StateRestorer,
) -> UnpatchedRun | None:
    """Return the run of the unpatched layer if the layer in chunks gives the same result up to
    rounding. None if the results differ, if either run raises, or if the call's arguments mark
    packed documents.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states, [..., B, t, h].
        upstream: random gradient of the layer's output, shaped like x.
        chunk_size: length of a chunk.
        shadows: tensors that replace the layer's trainable parameters during the test, with random
            numbers in place of zeros.
        state: restores, between two runs, the values that the layer stored before the test.
    """
    if call.packing.marks_documents:
        return None
    try:
        state.rewind()
        unpatched = run_unpatched(call, x, upstream, shadows)
        state.rewind()
        chunked = (
            []
            if unpatched is None
            else _run(call, x, upstream, chunk_size, small_parameters(shadows))
        )
    except Exception as error:  # `_why_unlike` finds out which run failed, and why
        if is_out_of_memory(error):
            raise
        return None
    return unpatched if unpatched is not None and unpatched.agrees(chunked) else None


def _try_isolated_chunks(
    call: LayerCall, x: Tensor, upstream: Tensor, second_start: int
) -> str | None:
    """Run the layer with attention limited to keys of the query's own chunk. Return the reason, as
    text for `streambp.describe`, to run the layer unchunked; None if this test finds no reason.

    Reasons are a write to a buffer, a stored tensor whose graph stays alive, and a gradient between
    tokens of the two chunks. Such a gradient shows that the layer mixes tokens outside of its
    attention.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states, [..., B, t, h].
        upstream: random gradient of the layer's output, shaped like x.
        second_start: first position of the second chunk.
    """
    if not may_have_graphs(call):
        return None
    origin = GraphMarker()
    marker = weakref.ref(origin)
    buffers = buffers_of(call.layer_state.layer)
    with replace_buffers(buffers):
        mixes = _crosses(call, x, upstream, second_start, origin)
        names = sorted({name for _, name in find_written_buffers(buffers)})
    origin.trying = False
    del origin
    if torch.is_grad_enabled() and is_kept(marker):
        return REASON_KEPT_GRAPH
    if names:
        return (
            f"its forward writes to buffers ({', '.join(names)}), and would for each chunk and "
            "once more in backward"
        )
    return REASON_MIXES_TOKENS if mixes else None


def _crosses(
    call: LayerCall, x: Tensor, upstream: Tensor, second_start: int, origin: GraphMarker
) -> bool:
    """True if the layer mixes the tokens of two chunks outside of its attention. The layer runs on
    random tokens, and each query reads only keys of its own chunk. The result is True if the output
    of one chunk still has a gradient to the input of the other chunk.

    Always False for layers that pass on recurrent states, or that attend by their own code. Such a
    layer runs once, for the caller's other tests.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states, [..., B, t, h].
        upstream: random gradient of the layer's output, shaped like x.
        second_start: first position of the second chunk.
        origin: object that the autograd node at the layer's input references. If the object is
            still alive later, the caller concludes that other code has stored a part of the graph.
    """
    first_chunk, second_chunk = slice(second_start), slice(second_start, x.shape[-2])
    kind = call.layer_state.kind
    if kind.states.carries or not kind.attention.ours:
        _run_in_trial(call, x, Spans.causal(x.shape[-3], x.shape[-2]), origin)
        return False
    layout = Spans(
        x.shape[-2],
        ((QueryRun(0, second_start, 0), QueryRun(second_start, x.shape[-2], second_start)),)
        * x.shape[-3],
    )
    with randomize_zero_weights(call), torch.enable_grad():
        for sources, readers in ((first_chunk, second_chunk), (second_chunk, first_chunk)):
            leaf, output = _run_in_trial(call, x, layout, origin)
            if output.requires_grad:
                # Keep the graph for hooks that store tensors: their backward reaches `origin`,
                # which names them.
                (grad,) = torch.autograd.grad(
                    output[..., readers, :],
                    leaf,
                    upstream[..., readers, :],
                    retain_graph=True,
                    allow_unused=True,
                )
                if grad is None:  # `UnpatchedRun.why_whole` tells of it
                    continue
                across = grad[..., sources, :]
                if bool(across.isfinite().all()) and bool(across.any()):
                    return True
    return False


def _run_in_trial(
    call: LayerCall, x: Tensor, layout: Spans, origin: GraphMarker
) -> tuple[Tensor, Tensor]:
    """Run the layer for a test, on a leaf with the values of x [..., B, t, h]. Return the leaf and
    the layer's output, with the graph between them.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random hidden_states.
        layout: the keys that each query may read.
        origin: object that the autograd node at the layer's input references. The object is alive
            while any code stores a part of the graph.
    """
    length = x.shape[-2]
    prefix = Prefix(layout, length, "math")
    prefix.overwritten = True  # a write to the attention's output has not been ruled out yet
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        ((_, output),) = rehearse(
            call,
            MarkGraphStart.apply(leaf, origin, True),
            [Chunk(0, 0, length)],
            Stage.RECOMPUTE,
            prefix,
        )
    assert output is not None
    return leaf, output.hidden_states


def _unread_state(call: LayerCall, x: Tensor) -> str | None:
    """Test if a layer with recurrent states continues a sequence from these states. The layer runs
    on two chunks, and the second chunk gets the states at the first chunk's end. Some layers read a
    state only for a single token, as in generation, and otherwise start anew.

    Return the reason, as text for `streambp.describe`, to run the layer unchunked: a state that the
    second chunk did not read. None if all states were read, or if there are too few tokens.

    The autograd graph of the second output shows the states that were read. Comparing values would
    not suffice: zero weights hide the effect of a state, and half precision may round the effect
    away.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: hidden_states, [..., B, t, h], with or without data.
    """
    size = min(TRIAL_CHUNK_SIZE, x.shape[-2] // 2)
    if size < MIN_CHUNK_TOKENS or any(
        parameter.is_inference() for parameter in call.layer_state.layer.parameters()
    ):
        return None
    named_arguments = {
        **unmask_arguments(call.arguments.by_name, x.shape[-2]),
        **join_documents(call.arguments.by_name),
    }
    with torch.inference_mode(False), torch.enable_grad():
        if x.is_inference():  # a graph may not save tensors made in inference mode
            x, named_arguments = (
                x.clone(),
                rebuild({**call.arguments.by_name, **named_arguments}, Tensor.clone),
            )
        with call.arguments.replace(named_arguments):
            chunks, prefix = ChunkPlan(2 * size, size), causal_prefix(call, 2 * size)
            _, (states, output) = rehearse(call, x, chunks, Stage.RECOMPUTE, prefix, leaves_of)
    assert output is not None
    assert states is not None
    read = {id(getattr(node, "variable", None)) for node in nodes_behind([output.hidden_states])}
    kinds = sorted(
        {key.kind for key, state in states.items() if state.requires_grad and id(state) not in read}
    )
    if not kinds:
        return None
    return (
        f"it mixes tokens outside of its attention, and goes on from its {' and '.join(kinds)} "
        "state with one token only"
    )


def reason_of_error(error: Exception) -> str:
    """Return the reason, as text for `streambp.describe`, to run a layer unchunked. The reason is
    that the layer's forward raises `error` on a chunk."""
    return f"its forward does not work on chunks ({type(error).__name__}: {error})"


def _convolves(layer: nn.Module) -> bool:
    """True if the layer has an nn.Conv1d that mixes neighbouring tokens. Such a layer runs
    unchunked unless the layer passes states from chunk to chunk. A test could miss the
    convolution's effect in half precision."""
    return any(
        isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 for module in layer.modules()
    )


def _run(
    call: LayerCall,
    x: Tensor,
    upstream: Tensor,
    chunk_size: int | None = None,
    parameters: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Run the layer with streambp's attention on x [..., B, t, h]. Return a list with the output
    and, if the output requires a gradient, the gradients of x and of each of `parameters`.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: the input.
        upstream: [..., B, t, h], the gradient of the output.
        chunk_size: length of a chunk; recurrent states, if the layer has any, are passed from chunk
            to chunk. None: run all tokens at once, without a cache.
        parameters: parameters whose gradients are returned.
    """
    graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    stage = Stage.RECOMPUTE if graph else Stage.FORWARD
    x = x.detach().requires_grad_(graph)
    length = x.shape[-2]
    prefix = causal_prefix(call, length)
    prefix.overwritten = graph  # a write to the attention's output has not been ruled out yet
    if chunk_size is None:
        outputs = rehearse(call, x, [Chunk(0, 0, length)], stage, prefix, lambda _: None)
    else:
        plan = ChunkPlan(length, chunk_size)
        plan = plan.avoid_barriers(call.packing.barriers) if call.packing.barriers else plan
        outputs = rehearse(call, x, plan.with_min_tokens(MIN_CHUNK_TOKENS), stage, prefix)
    # [..., B, MAX_TRIAL_TOKENS, h]
    joined = torch.cat([output.hidden_states for _, output in outputs if output is not None], -2)
    if not joined.requires_grad:
        return [joined.detach()]
    # Autograd also differentiates one graph over all chunks from last to first: newest nodes run
    # first.
    return [joined.detach(), *gradients_of(joined, [x, *parameters], upstream)]
