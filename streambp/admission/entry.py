"""Calls of a decoder layer: each streams in chunks, runs unchunked, or raises with a reason."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn

from streambp.admission.collectives import forbid_collectives
from streambp.admission.float8 import why_scaled
from streambp.admission.kept_values import (
    extend_kind,
    refuse_chunk_values,
    restore_after,
    restore_stored_values,
    roots_of,
    why_kept,
    why_untestable,
)
from streambp.admission.layer_checkpoint import run_unchunked
from streambp.admission.probe import Verdict, can_stream, reason_of_error
from streambp.admission.rehearsal import disable_compilation
from streambp.admission.third_party import (
    may_edit_gradients,
    refuse_compiled_attention,
    third_party_hooks,
)
from streambp.admission.trials import look_for_writes, unread_products
from streambp.attention.masks import LazyMask, attention_mask_of
from streambp.chunks import Forks
from streambp.device import MEMORY_ERRORS, has_data, is_out_of_memory
from streambp.distributed.context_parallel import attention_key
from streambp.distributed.engines import EngineReduce, reductions_of
from streambp.errors import UnsupportedModelError
from streambp.fingerprint.hooks import watch_hooks
from streambp.fingerprint.snapshots import versions_of
from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import DOCUMENT_ENDS, OWN_SCAN
from streambp.layer.arguments import Arguments
from streambp.layer.call import LayerCall, deliver_outputs
from streambp.layer.function import Strategy, StreamedLayer, run_backward, run_forward
from streambp.layer.gradients import NO_HOOKS, can_keep_graph, counts_when_alone
from streambp.layer.layer_state import THIRD_PARTY_CODE_KEY, CallReport, LayerState
from streambp.layer.oom import layer_memory_error
from streambp.layer.products import has_global_hooks
from streambp.layer.recompute import NULL_CONTEXT, Parameters, slots_of
from streambp.progress import progress_line
from streambp.recurrent.documents import PackedRows
from streambp.recurrent.scans import scans_of
from streambp.recurrent.segments import document_arguments, mixers_of
from streambp.tensors import replace_attribute

backward_in_chunks = functools.partial(run_backward, restore_after(unread_products))


CHUNK_STRATEGY = Strategy(
    LayerCall, refuse_chunk_values(run_forward), backward_in_chunks, run_unchunked
)
UNCHECKED_CHUNK_STRATEGY = dataclasses.replace(CHUNK_STRATEGY, forward=run_forward)


def stream_layer(
    layer_state: LayerState,
    args: Any,
    kwargs: Any,
    rows: PackedRows | None = None,
    strategy: Strategy = CHUNK_STRATEGY,
    forks: Forks = (),
) -> Any:
    """Compute a decoder layer's forward in chunks of the sequence, and return its result.

    A call has a kind: names, types and dtypes of its arguments, and the layer's structure. The
    first call of each kind tests on random tokens if chunks give the same result as the full
    sequence. If not, calls of this kind run unchunked, under torch's checkpoint.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.
        rows: boundaries of the documents in packed rows, read from position_ids for layers with
            recurrent states; None: no such boundaries. [Note: segments]
        strategy: functions that compute the call; default: chunk by chunk, on one rank.
        forks: pairs (start, origin) of positions in a packed row whose documents share a prefix.
            Recurrent states at `start` continue from the prefix that ends at `origin`, or start
            anew if `origin` is 0.

    Raises:
        UnsupportedModelError, UnsupportedMaskError, StreamBPError: the call cannot be computed
            exactly; nothing was changed.
    """
    call = admit(layer_state, args, kwargs, rows, strategy, forks)
    if isinstance(call, CallReport):
        layer_state.last_call.report = call
        try:
            with layer_state.load_weights_once(
                args, kwargs, call.reason or "its only token cannot be tried in chunks"
            ):
                return strategy.run_unchunked(layer_state, args, kwargs, call)
        except Exception:
            layer_state.tests.forget(call.reason)
            raise
    longest = (call.plan.longest, call.why_longer) if call.plan.longest > call.plan.size else None
    layer_state.last_call.report = CallReport(
        None,
        longest,
        call.packing.document_arguments,
        call.packing.rows,
        call.carried.layout.document_source,
        call.plan,
    )
    if strategy is CHUNK_STRATEGY and THIRD_PARTY_CODE_KEY not in dict(call.arguments.kind):
        strategy = UNCHECKED_CHUNK_STRATEGY
    with call.autocast.disable() if call.autocast.on else NULL_CONTEXT:  # [Note: autocast]
        return _run_in_chunks(call, strategy)


def admit(
    layer_state: LayerState,
    args: Any,
    kwargs: Any,
    rows: PackedRows | None,
    strategy: Strategy,
    forks: Forks = (),
) -> LayerCall | CallReport:
    """Return a `LayerCall` that runs in chunks of the sequence, or a report with the reason to run
    all tokens at once. Raise StreamBPError if neither would be exact.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.
        rows: boundaries of the documents in packed rows, read from position_ids; None: none.
        strategy: functions that compute the layer on one rank, or with a sequence split over ranks.
        forks: pairs (start, origin): recurrent states at `start` are a shared prefix's at `origin`.
    """
    snapshot = layer_state.fingerprint.take_snapshot(layer_state.layer)
    layer_state.cached_result(_refuse_inner_fsdp)
    counts_when_alone()
    carries = layer_state.kind.states.carries
    if rows is not None and carries:
        _refuse_inseparable_documents(layer_state, rows)
    trained = snapshot.gradient_flags
    arguments = Arguments(
        type(layer_state.layer).forward,
        layer_state.layer,
        args,
        kwargs,
        layer_state.kind.position_cache,
        rows if carries else None,
        (snapshot.body.kind, snapshot.hooks.kind, trained),
    )
    # A trial with torch's own attention does not cover another attention.
    if not isinstance(F.scaled_dot_product_attention, BuiltinFunctionType):
        attends = attention_key()
        if attends is not None:
            arguments.kind |= {("torch's attention", attends)}
    # Global hooks may change without a new snapshot. [Note: kept values]
    if has_global_hooks() or layer_state.cached_result(
        lambda _: bool(roots_of(layer_state, snapshot)), "third party"
    ):
        arguments.kind = extend_kind(layer_state, snapshot, arguments.kind, arguments.hidden_states)
    arguments.forks = forks if carries else ()
    if rows is not None:
        _pass_documents(layer_state, rows, arguments)
    marked = None if rows is None else rows.number
    if layer_state.tests.warm_up is not None and not may_edit_gradients(layer_state.layer):
        layer_state.tests.reuse_result(arguments.kind, snapshot)
    # Reasons to run unchunked that need no trial, or that a trial has found.
    findings = layer_state.tests.results[arguments.kind]
    reason = (
        (snapshot.hooks.why_whole() if snapshot.hooks.routing else None)
        or findings.reason
        or (_why_not_between_documents(layer_state, arguments) if carries else None)
        or layer_state.kind.attention.take_mask(
            layer_state.layer, arguments.by_name, arguments.hidden_states, marked
        )
    )
    if reason is not None:
        return CallReport(reason, rows=rows)
    call: LayerCall = strategy.make(layer_state, arguments)
    call.snapshot = snapshot
    parameters = layer_state.cached_result(
        lambda layer: Parameters(layer, call.device, layer_state.cached_result(slots_of)),
        ("parameters", call.device, trained),
    )
    call.backward.parameters = parameters.renew(snapshot, trained)
    # A tested kind streams. A new kind is tested first, on a few random tokens.
    if (
        findings.is_tested
        and call.autocast in findings.searched_for_writes
        and layer_state.tests.covers(findings, call.plan)
    ):
        return call
    decision = _test_call(call, rows)
    if decision is None:
        return admit(layer_state, args, kwargs, rows, strategy, forks)
    return decision


def _test_call(call: LayerCall, rows: PackedRows | None) -> LayerCall | CallReport | None:
    """Test the layer for a call that no earlier test covers. Return the call if it can run in
    chunks, or a report with the reason for an unchunked run.

    Returns None if kernels of the layer ignore or misread the boundaries of packed documents in the
    arguments. The layer's `tests.kernels_take_documents` is then False, and the caller must create
    the call again without these arguments.

    Args:
        call: the call, not yet run.
        rows: boundaries of the documents in packed rows, read from position_ids for layers with
            recurrent states; None: no such boundaries.
    """
    tests = call.layer_state.tests
    failed, verdict = _test_layer(call)
    if not verdict.streams:
        if call.arguments.tells:
            tests.kernels_take_documents = False
            return None
        return CallReport(verdict.reason, rows=rows)
    if failed is not None:
        tests.results[call.arguments.kind].add_doubt(reason_of_error(failed))
        return CallReport(reason_of_error(failed), rows=rows)
    return call


def _refuse_inseparable_documents(layer_state: LayerState, rows: PackedRows) -> None:
    """Raise if a layer would carry recurrent states from one document of a packed row to the next.
    Layers are accepted if modules inside can be called once for each document, and hold the states
    themselves. [Note: segments]

    Args:
        layer_state: the decoder layer, with its settings and test results.
        rows: the documents that position_ids mark.

    Raises:
        UnsupportedModelError: no module inside the layer can be called for one document, or the
            layer gets its states as an argument.
    """
    if mixers_of(layer_state.layer) and not layer_state.kind.states.returned:
        return
    raise UnsupportedModelError(
        f"position_ids mark {rows.number} documents in packed rows, but no module inside "
        f"{type(layer_state.layer).__name__} can be called for a single document. The layer takes "
        "its states as an argument and would carry them from one document to the next. Pass one "
        "document per row, or set StreamConfig(documents='as_given') to carry states over, as the "
        "unpatched model does."
    )


def _test_layer(call: LayerCall) -> tuple[Exception | None, Verdict]:
    """Test on a few random tokens if the layer may run in chunks for this call. During the tests
    the layer's weights are on the device, autocast is off, and collectives raise.

    Returns:
        A pair (exception, decision). The exception is that of the layer in the test for in-place
        writes, or None. The decision is the `Verdict` whether the call runs in chunks.
    """
    layer_state = call.layer_state
    if call.snapshot.hooks.ids and has_data(call.hidden_states):
        layer_state.tests.hooks_run_in_tests |= third_party_hooks(call.layer_state.layer)
    try:
        weights_on_device = layer_state.load_weights("trial", call.device)
        # [Note: choices] [Note: autocast]
        free_choices = replace_attribute([layer_state], "choices", [None])
        # Layers of a split sequence exchange keys and values with other ranks themselves.
        local = (
            forbid_collectives(call.layer_state.layer) if call.has_full_sequence else NULL_CONTEXT
        )
        progress = (
            progress_line(_progress_text(layer_state))
            if has_data(call.hidden_states)
            else NULL_CONTEXT
        )
        with (
            progress,
            weights_on_device,
            disable_compilation(),
            call.autocast.disable(),
            free_choices,
            local,
        ):
            results = call.attempt(lambda _: _run_tests(call))
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        raise layer_memory_error(error, layer_state, call.plan) from error
    layer_state.tests.tested_hooks |= call.snapshot.hooks.locations.keys()
    return results


def _progress_text(layer_state: LayerState) -> str:
    """Return the text that is shown on a terminal while a layer is tested, such as "trying layer 3
    of 32"."""
    if layer_state.saves_policy is None:
        return f"trying layer {layer_state.index + 1}"
    return f"trying layer {layer_state.index + 1} of {layer_state.saves_policy.layers}"


def _run_tests(call: LayerCall) -> tuple[Exception | None, Verdict]:
    """Run the three tests of a layer on a few random tokens. The tests find values that third-party
    code stores, in-place writes of the layer, and differences between the results of chunks and of
    the full sequence.

    Returns:
        A pair (exception, decision). The exception is that of the layer in the test for in-place
        writes, or None. The decision is the `Verdict` whether the call runs in chunks.
    """
    refuse_compiled_attention(call.layer_state.layer)
    reason = why_untestable(call) or why_scaled(call.layer_state.layer)
    if reason is not None:
        call.layer_state.tests.results[call.arguments.kind].set_result(reason)
        return None, Verdict(False, reason)
    with restore_stored_values(call):
        reason, error = why_kept(call)
        failed = look_for_writes(call)
        verdict = can_stream(call)
    findings = call.layer_state.tests.results[call.arguments.kind]
    if verdict.streams and reason is not None:
        findings.set_result(reason)
        verdict = Verdict(False, reason)
    # one trial's exception is no verdict about the layer
    elif verdict.streams and error is not None:
        findings.is_tested = False
        findings.add_doubt(reason_of_error(error))
        verdict = Verdict(False, reason_of_error(error))
    return failed, verdict


def _run_in_chunks(call: LayerCall, strategy: Strategy) -> Any:
    """Run a call of a decoder layer in chunks and return its result. The result has an autograd
    graph if grad mode is on and the input or a parameter requires a gradient.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        strategy: functions that compute the layer on one rank, or with a sequence split over ranks.
    """
    layer_state = call.layer_state
    hidden_states = call.hidden_states
    parameters = call.backward.parameters
    inputs = call.arguments.inputs
    if torch.is_grad_enabled() and (hidden_states.requires_grad or inputs or parameters.groups):
        call.hidden_states = hidden_states.detach()
        if layer_state.saves_policy is not None:
            call.saved.choose(call.rows, functools.partial(can_keep_graph, call))
        weights = parameters.current()
        if layer_state.weights is not None:
            call.backward.send_gradients, weights = layer_state.weights.receive_gradients(
                layer_state.index, weights, call.device
            )
        if call.saved.moves:
            assert layer_state.offloader is not None
            call.saved.store = layer_state.offloader.open(layer_state.index, call.device)
        reductions = layer_state.cached_result(reductions_of)
        hidden_states = (
            EngineReduce.apply(hidden_states, reductions) if reductions else hidden_states
        )
        output, *extras = StreamedLayer.apply(
            strategy, call, parameters, hidden_states, *inputs, *weights
        )
        call.arguments.inputs = []
    else:
        versions = versions_of(call.snapshot)
        on_device = (
            NULL_CONTEXT
            if layer_state.weights is None
            else layer_state.load_weights("forward", call.device)
        )
        with (
            on_device,
            watch_hooks(call.snapshot.hooks)
            if layer_state.tests.warm_up is not None
            else NO_HOOKS as modifying_hooks,
        ):
            output, *extras = strategy.forward(call, False)
        if modifying_hooks:
            layer_state.tests.refuse_untested(modifying_hooks, layer_state.layer)
        if layer_state.fingerprint.pending:
            layer_state.fingerprint.learn(layer_state.layer, call.snapshot, versions)
    by_place = dict(zip(call.form.extras, extras, strict=True))
    if by_place:
        deliver_outputs(by_place, call.arguments.mappings)
    return call.wrap(output, by_place)


def _why_not_between_documents(layer_state: LayerState, arguments: Arguments) -> str | None:
    """Return the reason, as text for `streambp.describe`, to run a layer with recurrent states on
    all tokens at once. The reason is packed documents, marked by the layer's arguments (seq_idx,
    cu_seq_lens_q), that chunks cannot follow. None if chunks can, or if the arguments mark no
    documents.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        arguments: the arguments of the layer's call.
    """
    documents = arguments.documents
    if documents is None:
        return None
    scans = (
        {name for _, name in scans_of(layer_state.layer)} if documents.ids is not None else set()
    )
    # a selective scan is identified by its own name
    if scans.difference(("torch", "forward", OWN_SCAN)):
        # The fused kernel of training mixes documents that these arguments describe. The
        # convolution of eval mode keeps them apart.
        return "seq_idx says where documents start, which its selective scan takes no notice of"
    ends = documents.ends
    rising = all(a < b for a, b in itertools.pairwise(ends))
    if ends and not (rising and ends[0] == 0 and ends[-1] == arguments.length):
        length = arguments.length
        remedy = f" (append {length}, so that the last tokens are one more document)"
        short = rising and ends[0] == 0 and ends[-1] < length
        return (
            f"{DOCUMENT_ENDS} does not rise from 0 to the sequence's {length} "
            f"tokens{remedy if short else ''}"
        )
    return None


def _pass_documents(layer_state: LayerState, rows: PackedRows, arguments: Arguments) -> None:
    """Pass document boundaries of packed rows on to the layer. The attention mask gets the end of
    each document, so that tokens attend within their document. Kernels of recurrent states get the
    boundaries as arguments, if they have arguments for this purpose.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        rows: the documents that position_ids mark.
        arguments: the layer's arguments, which are changed.
    """
    mask = attention_mask_of(arguments.by_name)
    if isinstance(mask, LazyMask):
        mask.ends = rows.ends
    if layer_state.kind.states.carries and layer_state.tests.kernels_take_documents:
        names = document_arguments(mixers_of(layer_state.layer), len(rows.ends))
        if names:
            arguments.add_documents(rows.to_documents(names, arguments.hidden_states.device))


def _refuse_inner_fsdp(layer: nn.Module) -> None:
    """Raise UnsupportedModelError if FSDP2's `fully_shard` was applied to a module inside the
    decoder layer. FSDP would gather the module's parameters once for each chunk, and gradients
    would be lost. `fully_shard` on the layer itself is supported."""
    for name, module in layer.named_modules():
        if module is not layer and is_fsdp_unit(module):
            raise UnsupportedModelError(
                f"{name} inside {type(layer).__name__} is an FSDP unit of its own; streamed layers "
                "would gather it once per chunk and lose gradients. Apply fully_shard to whole "
                "decoder layers only."
            )
