"""Values that third-party code in a layer stores without a graph: for a replay, a record,
statistics.

[Note: kept values] Unpatched, a forward stores a value of the full sequence in an attribute, a
closure or a list, and stores it once. A chunked forward would leave the last chunk's value, or one
entry for each chunk, and backward's recomputation would store these values again. A layer with
third-party code is therefore tested for stored values. The test runs a few tokens from the same
start, once as unpatched, once in chunks as in a step. Values reachable from that code
(`fingerprint/memory.py`) must be equal afterwards: shapes, numbers, lengths. Sums over tokens are
equal. If a value differs, the layer runs unchunked, and its recomputation stores nothing. Calls of
other kinds then run unchunked too, as long as the value is reachable: code may store it in every
tenth call.

A later call may read a stored value by its length: routes stored for a replay fit the full sequence
and no chunk. A test on a few tokens does not detect this. Calls whose length is that of a
reachable tensor are therefore a kind of their own. Such calls are tested at their own length.

Reachable flags and strings, at greater depth than a snapshot's
(`fingerprint/observed_values.py`), also distinguish kinds of calls: a recorder may be switched on
between two steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from streambp.admission.agreement import HALF_TOLERANCE, TOLERANCES, coarsest_dtype
from streambp.admission.first_call import TOKEN_SCALE
from streambp.admission.generators import trial_context
from streambp.admission.long_trial import why_not_at_length
from streambp.admission.own_run import StreamingMismatchError, UnpatchedRun
from streambp.admission.rehearsal import (
    TRIAL_CHUNK_SIZE,
    causal_prefix,
    disable_compilation,
    may_have_graphs,
    prepare_rehearsal,
    random_like,
    randomize_zero_weights,
    rehearse,
    unmask_arguments,
)
from streambp.admission.snapshot import Snapshot, StateRestorer
from streambp.attention.prefix import Prefix, Stage
from streambp.chunks import Chunk, ChunkPlan
from streambp.device import RandomState, has_data, is_out_of_memory
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.fingerprint.hooks import unwrap_hook
from streambp.fingerprint.memory import (
    KNOWN_MODULES,
    PLAIN_TYPES,
    ReachableValues,
    is_third_party,
    stored_attributes,
    undo_changes,
)
from streambp.fingerprint.snapshots import LayerSnapshot
from streambp.known_names import GLOBAL_HOOKS
from streambp.layer.call import LayerCall, plan_of
from streambp.layer.layer_state import THIRD_PARTY_CODE_KEY, LayerState, remember
from streambp.layer.recompute import Parameters, slots_of
from streambp.recurrent.documents import split_documents, trial_rows
from streambp.recurrent.states import MIN_CHUNK_TOKENS, States

T = TypeVar("T")
Roots = list[tuple[str, Any]]
CallKind = frozenset[tuple[str, Any]]
MAX_NAMED_VALUES = 3
# Positions by which a test's tokens are moved along the sequence, in one run each. The chunk that
# runs last may by chance contain the maximum that code stores, and then equals the full sequence.
TOKEN_ROLLS = (0, TRIAL_CHUNK_SIZE, 2 * TRIAL_CHUNK_SIZE)
MAX_FLAG_ENTRIES = 8  # entries of a list whose flags distinguish kinds of calls
REASON_STORED_VALUES = (
    "it, or a hook inside it, keeps values for later, of which chunks would leave others than the "
    "whole sequence"
)
REASON_ITERATOR = (
    "its code may advance an iterator ({}), whose position could not be restored after a test run"
)
UNREACHABLE_TENSORS = "tensors out of sight"
MISSING_VALUE = object()
_DIGITS = re.compile(r"\d+")


def roots_of(layer_state: LayerState, snapshot: LayerSnapshot) -> Roots:
    """Return the objects in which third-party code inside a layer may store values, as (name,
    object): the layer's modules, third-party hooks, forwards and classes. [] if no third-party code
    runs inside.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        snapshot: snapshot of the layer's modules, hooks and attributes.
    """
    hooks = [
        ("", unwrap_hook(table[number]))
        for table, number in snapshot.hooks.locations.values()
        if number in table
    ]
    everywhere = vars(torch.nn.modules.module)
    hooks += [("", hook) for name in GLOBAL_HOOKS for hook in everywhere[name].values()]
    hooks = [(name, hook) for name, hook in hooks if is_third_party(hook)]
    if layer_state.previous is not None and is_third_party(layer_state.previous):
        hooks.append(("", layer_state.previous))
    code = layer_state.cached_result(_third_party_code)
    if not hooks and not code:
        return []
    return [*layer_state.layer.named_modules(), *hooks, *code]


def extend_kind(
    layer_state: LayerState, snapshot: LayerSnapshot, kind: CallKind, hidden_states: Tensor
) -> CallKind:
    """Return `kind`, the key under which test results of the layer are stored, with an added entry
    for values that third-party code inside the layer stores. A different entry makes `streambp`
    test the layer again.

    The entry changes with a stored flag or string, and with a number that becomes zero or nonzero.
    The entry also contains a flag: True if a stored tensor has one entry for each of the T tokens
    of this call. `kind` is returned unchanged if no third-party code runs inside.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        snapshot: snapshot of the layer's modules, hooks and attributes at the call.
        kind: pairs (name, value) for the form of the call's arguments and the layer's structure.
        hidden_states: the layer's input [..., B, T, h].
    """
    roots = roots_of(layer_state, snapshot)
    if not roots:
        return kind
    structure = frozenset(pair for pair in kind if pair[0] != THIRD_PARTY_CODE_KEY)
    rows, length = hidden_states.shape[-3:-1]
    as_long, flags = False, []
    for path, value in ReachableValues(roots).values.items():
        if path in layer_state.fingerprint.stored_paths:
            continue
        if isinstance(value, PLAIN_TYPES):
            flags += _flag(path, value)
        elif length > 1 and not isinstance(value, nn.Parameter):  # weights have any sizes
            sizes = tuple(value.shape[:2])
            as_long |= length in sizes or sizes[:1] == (rows * length,)
    as_long = as_long and len(plan_of(layer_state, rows, length, hidden_states.device)) > 1
    digest = hashlib.blake2b(repr(flags).encode(), digest_size=16).hexdigest()
    return structure | {(THIRD_PARTY_CODE_KEY, (digest, as_long))}


def _flag(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the part of a value, stored by third-party code, that becomes part of the key of the
    layer's test results. A change of this part makes `streambp` test the layer again, and all other
    changes do not.

    The part of a number is `value != 0`, and of a string the string without digits. The part of a
    container's length is a constant: only the container's existence counts. All other values are
    returned as they are.

    Args:
        path: the value's path, such as "mlp.kept[3]"; "len(...)" for a container's length.
        value: a flag, number, string or length of a container.

    Returns:
        [(path, part)]; [] for an entry of a list behind its first `MAX_FLAG_ENTRIES` entries.
    """
    if any(int(number) >= MAX_FLAG_ENTRIES for number in re.findall(r"\[(\d+)\]", path)):
        return []
    if path.startswith("len("):
        return [(path, "is there")]
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return [(path, value != 0)]
    return [(path, _DIGITS.sub("", value) if isinstance(value, str) else value)]


def _third_party_code(layer: nn.Module) -> Roots:
    """Return third-party classes, functions and objects that the layer's forward may run, as (name,
    object). Such code may store values, for example in a class attribute, and the result is
    searched for stored values."""
    by_id: dict[int, tuple[str, Any]] = {}
    for path, module in layer.named_modules():
        for name, value in module.__dict__.items():
            if callable(value) and not isinstance(value, nn.Module) and is_third_party(value):
                by_id[id(value)] = (f"{path}.{name}".removeprefix("."), value)
        for base in type(module).__mro__:
            if base is nn.Module:
                break
            if base.__module__.partition(".")[0] not in KNOWN_MODULES:
                by_id[id(base)] = (base.__name__, base)
                continue
            for name, value in vars(base).items():
                if callable(value) and not isinstance(value, type) and is_third_party(value):
                    by_id[id(value)] = (f"{base.__name__}.{name}", value)
    return list(by_id.values())


def restore_stored_values(call: LayerCall) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager for a test run of a layer on random tokens. Third-party code may
    store values of these tokens, for example in a list. The end of the context removes such values,
    and puts earlier values back."""
    roots = roots_of(call.layer_state, call.snapshot) if call.device.type != "meta" else []
    return undo_changes(roots) if roots else contextlib.nullcontext()


def recomputation_context(
    layer_state: LayerState, snapshot: LayerSnapshot
) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager for the recomputation of a layer in backward. Third-party code that
    stores values in forward, for example in a list, stores them a second time. The end of the
    context removes these second values, and leaves those of forward.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        snapshot: snapshot of the layer's modules, hooks and attributes.
    """
    roots = roots_of(layer_state, snapshot)
    return undo_changes(roots) if roots else contextlib.nullcontext()


def restore_after(find: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function that runs a layer on random tokens, so that the run leaves no trace. During
    the run, third-party code in the layer may store values in attributes, lists, closures or
    tensors. When the function ends, all of these places get back their earlier contents.

    Args:
        find: function of a `LayerCall` and further arguments, such as `unread_products`.
    """

    def find_and_restore(call: LayerCall, *args: Any) -> T:
        with restore_stored_values(call):
            return find(call, *args)

    return find_and_restore


def refuse_chunk_values(forward: Callable[[LayerCall, bool], T]) -> Callable[[LayerCall, bool], T]:
    """Wrap the function that runs a layer in chunks, so that it raises StreamBPError if third-party
    code has stored a tensor of a single chunk. Such a tensor has an entry for each token of the
    chunk. The unpatched model would store an entry for each token of the sequence.

    The layer's earlier test on random tokens may miss such code. Examples are a hook registered
    after `warm_up`, code for longer sequences only, and code behind a flag that the layer's
    snapshots do not contain.

    Args:
        forward: the function: gets a call and a flag, True if tensors must be saved for backward.
    """

    def run(call: LayerCall, keep: bool) -> T:
        layer_state = call.layer_state
        roots = (
            roots_of(layer_state, call.snapshot)
            if len(call.plan) > 1 and has_data(call.hidden_states)
            else []
        )
        if not roots:
            return forward(call, keep)
        memory = ReachableValues(roots)
        outputs = forward(call, keep)
        for path, value in ReachableValues(roots).changes_since(memory).items():
            is_expected = path in layer_state.fingerprint.stored_paths
            if (
                not is_expected
                and isinstance(value, (Tensor, np.ndarray))
                and _is_of_a_chunk(value.shape, call)
            ):
                _refuse(call, f"{path} {tuple(value.shape)}")
        return outputs

    return run


def _is_of_a_chunk(shape: Sequence[int], call: LayerCall) -> bool:
    """True if a stored tensor of this shape may have one entry for each token of a chunk:
    [B, C, ...] or [B * C, ...]. False if the number of tokens may instead be the size of a
    dimension of the layer's parameters.

    Args:
        shape: the tensor's shape.
        call: the layer's call, with the chunks.
    """
    parameter_sizes = {
        size for parameter in call.snapshot.body.parameters for size in parameter.shape
    }
    for length in {chunk.stop - chunk.start for chunk in call.plan}:
        rows = tuple(shape[:2]) == (call.rows, length) and (
            len(shape) > 2 or length not in parameter_sizes
        )
        if rows or (shape[:1] == (call.rows * length,) and shape[0] not in parameter_sizes):
            return True
    return False


def _refuse(call: LayerCall, value_text: str) -> NoReturn:
    """Raise StreamBPError because third-party code has stored a value that belongs to a single
    chunk. Before raising, store the decision that later calls with arguments of the same form run
    on all tokens at once, where the stored value is right.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        value_text: the value's name and shape, for the message.
    """
    layer_state = call.layer_state
    layer_state.tests.results[call.arguments.kind].set_result(
        f"{REASON_STORED_VALUES} ({value_text})"
    )
    when = "did not when it was tried"
    if layer_state.tests.warm_up is not None and layer_state.tests.warm_up.on:
        layer_state.tests.warm_up.on = False
        when = (
            "was set after streambp.warm_up, which lets hooks be set without a trial that add up "
            "or look on"
        )
    raise StreamBPError(
        f"{type(call.layer_state.layer).__name__}, or a hook inside it, stores values of single "
        f"chunks ({value_text}), and {when}. Delete the stored values and repeat the step: from now on "
        "the layer runs unchunked, which is exact."
    )


def why_untestable(call: LayerCall) -> str | None:
    """Return the reason, as text for `streambp.describe`, to run the layer unchunked and without a
    test. The reason is third-party code that may advance iterators, because a test cannot reset
    iterators. None if a test may run."""
    if not roots_of(call.layer_state, call.snapshot):
        return None
    iterators = Snapshot(call.layer_state.layer).iterators()
    return REASON_ITERATOR.format(", ".join(iterators)) if iterators else None


def why_kept(call: LayerCall) -> tuple[str | None, Exception | None]:
    """Test on random tokens if third-party code in a layer stores the same values in chunks as on
    all tokens at once. [Note: kept values]

    The test runs once for each kind of call: form of arguments, and structure of the layer. Values
    that code has stored in the test are left out of the kind from then on. `call.arguments.kind`,
    under which test results are stored, is therefore computed anew.

    Returns:
        A pair: the reason, as text for `streambp.describe`, to run the layer unchunked, and the
        exception that the test raised. Both are None if the values are the same, or if no test is
        needed.
    """
    layer_state, x = call.layer_state, call.hidden_states.detach()
    if not call.has_full_sequence or not has_data(x) or x.shape[-2] == 1 or not x.numel():
        return None, None
    roots = roots_of(layer_state, call.snapshot)
    if not roots or layer_state.tests.results[call.arguments.kind].is_tested:
        return None, None
    failed: Exception | None = None
    reason = None
    try:
        with disable_compilation(), _disable_dropout(call), contextlib.ExitStack() as stack:
            stack.enter_context(prepare_rehearsal(call))
            reason = _why_kept(call, x, roots, stack.enter_context(trial_context(call)))
            if (
                reason is None
                and dict(call.arguments.kind).get(THIRD_PARTY_CODE_KEY, ("", False))[1]
            ):
                stack.enter_context(_training_grad_mode(call))
                reason = why_not_at_length(call)
    except Exception as error:
        # the unpatched forward failed, which may happen in any trial
        other_model = isinstance(error, StreamingMismatchError)
        if is_out_of_memory(error) or (isinstance(error, StreamBPError) and not other_model):
            raise
        failed = error
    earlier_kind = call.arguments.kind
    call.arguments.kind = extend_kind(layer_state, call.snapshot, earlier_kind, x)
    if earlier_kind != call.arguments.kind and earlier_kind in layer_state.tests.results:
        remember(
            layer_state.tests.results,
            call.arguments.kind,
            layer_state.tests.results.pop(earlier_kind),
        )
    return reason, failed


def _why_kept(call: LayerCall, x: Tensor, roots: Roots, state: StateRestorer) -> str | None:
    """Return the reason, as text for `streambp.describe`, to run the layer unchunked: the names of
    stored values that differ between chunks and the full sequence. None if all are equal.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: hidden_states of the call, whose scale the random test tokens have.
        roots: third-party code, and objects from which stored values are reachable, as (name,
            object).
        state: restores the layer's state before each run.

    Raises:
        UnsupportedModelError: a stored value depends on the model's own attention, which streamed
            layers replace.
    """
    with torch.no_grad():
        tokens, upstream = random_like(x), random_like(x)
    trial = _StoredValuesTrial(call, tokens, upstream, roots, state)
    for roll in TOKEN_ROLLS:
        trial.x = tokens.roll(roll, -2)
        unchunked, chunks = (
            trial.stored_values(trial.run_unchunked),
            trial.stored_values(trial.run_in_chunks),
        )
        call.layer_state.fingerprint.stored_paths |= unchunked.keys() | chunks.keys()
        differing = _differences(unchunked, chunks, coarsest_dtype(call, x))
        if differing or not unchunked:
            break
    if differing:  # a value that changes at each run, such as a time, shows nothing
        repeated = trial.stored_values(trial.run_unchunked)
        noisy = _differences(unchunked, repeated, coarsest_dtype(call, x))
        differing = {path: shapes for path, shapes in differing.items() if path not in noisy}
    if not differing:
        return _why_kept_before(call.layer_state, roots)
    # A value that only the first call sets is no record of later calls.
    recorded = _differences(
        unchunked, trial.stored_values(trial.run_twice), coarsest_dtype(call, x)
    )
    call.layer_state.tests.differing |= differing.keys() & recorded.keys()
    otherwise = _differences(
        unchunked, trial.stored_values(trial.run_in_one_chunk), coarsest_dtype(call, x)
    )
    # Tensors in graphs are out of sight as well, and differ for another attention.
    otherwise = {
        path: shapes
        for path, shapes in otherwise.items()
        if path in differing and path != UNREACHABLE_TENSORS
    }
    if otherwise:
        raise UnsupportedModelError(
            f"{type(call.layer_state.layer).__name__}, or a hook inside it, stores values that "
            f"streamed layers do not compute, such as attention weights: {_names_text(otherwise)}. Remove the code "
            "that "
            "stores the values, or pass output_attentions=True, so that the call runs unpatched."
        )
    return f"{REASON_STORED_VALUES} ({_names_text(differing)})"


def _why_kept_before(layer_state: LayerState, roots: Roots) -> str | None:
    """Return the reason, as text for `streambp.describe`, to run calls of a new kind unchunked,
    where a kind is the form of a call's arguments and the layer's structure. The reason is an
    earlier test with another kind of call: third-party code stored values that differed in chunks.
    None if no such value is reachable.

    Code may store a value in some calls alone, such as every tenth. Calls of the new kind may
    therefore store such values later, even if their own test stored none.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        roots: objects from which the stored values are reachable, as (name, object).
    """
    if not layer_state.tests.differing:
        return None
    paths = ReachableValues(roots).values.keys() & layer_state.tests.differing
    return (
        f"{REASON_STORED_VALUES} ({_names_text(dict.fromkeys(sorted(paths), ''))})"
        if paths
        else None
    )


def _names_text(differing: dict[str, str]) -> str:
    labels = [path + shapes for path, shapes in list(differing.items())[:MAX_NAMED_VALUES]]
    return ", ".join(labels) + (
        f" and {len(differing) - MAX_NAMED_VALUES} more"
        if len(differing) > MAX_NAMED_VALUES
        else ""
    )


class _StoredValuesTrial:
    """Test runs of a layer over a few tokens, to compare the values that third-party code stores in
    each. Every run starts from the same state and random numbers, in the layer's train or eval
    mode.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: [..., B, T, h], the tokens.
        upstream: [..., B, T, h], the gradient of the layer's output.
        roots: objects in which third-party code may store values, as (name, object).
        state: restores the layer's state before each run.
    """

    def __init__(
        self, call: LayerCall, x: Tensor, upstream: Tensor, roots: Roots, state: StateRestorer
    ) -> None:
        self.call, self.x, self.upstream, self.roots = call, x, upstream, roots
        self.state = state
        self.random = RandomState.capture(call.device)
        differentiable = (
            call.hidden_states.requires_grad
            or call.arguments.inputs
            or call.backward.parameters.groups
        )
        self.graph = torch.is_grad_enabled() and bool(differentiable) and may_have_graphs(call)

    def stored_values(self, run: Callable[[list[Tensor]], None]) -> dict[str, Any]:
        """Run the layer, and return the values that third-party code stored meanwhile in
        attributes, containers or closures. The result is a dict from the value's path to the value.
        The earlier values are restored afterwards.

        Args:
            run: the method that runs the layer: `run_unchunked`, `run_twice`, `run_in_one_chunk` or
                `run_in_chunks`.
        """
        named_arguments, length = self.call.arguments.by_name, self.x.shape[-2]
        documents = (
            split_documents(named_arguments, length) if self.call.packing.document_arguments else {}
        )
        rows = None if self.call.packing.rows is None else trial_rows(self.x.shape[-3], length)
        test_arguments = self.call.arguments.replace(
            {**unmask_arguments(named_arguments, length), **documents}, rows
        )
        self.state.rewind()
        with undo_changes(self.roots) as (start, writes):
            # Draw the weights inside, so that each run has the same weights.
            with self.random.replay(), test_arguments, randomize_zero_weights(self.call) as shadows:
                run(shadows or [])
            on_weights = {
                f"parameter {number}.{name}": value
                for number, shadow in enumerate(shadows or [])
                for name, value in stored_attributes(shadow).items()
            }
            del shadows
            end = ReachableValues(self.roots)
            values, unreachable = end.changes_since(start, writes), writes.shapes_outside(end)
            values.update(on_weights)
            return {**values, UNREACHABLE_TENSORS: unreachable} if unreachable else values

    def run_unchunked(self, shadows: list[Tensor]) -> None:
        """Run the unpatched layer once, with backward if the call has one. A call with packed
        documents runs as in `run_in_one_chunk`, because the unpatched layer may not accept several
        documents. `stored_values` calls this method.

        Args:
            shadows: tensors that replace the layer's trainable parameters during the test, with
                random numbers in place of zeros.
        """
        # the unpatched layer may not accept several documents
        if self.call.packing.marks_documents:
            self.run_in_one_chunk(shadows)
        else:
            UnpatchedRun(self.call, self.x, self.upstream, shadows)

    def run_twice(self, shadows: list[Tensor]) -> None:
        """Run the layer as in `run_unchunked`, and again on tokens that are `TOKEN_SCALE` times
        larger. Stored values that then differ from those of `run_unchunked` are changed by later
        calls too, and not by the first call alone.

        Args:
            shadows: tensors that replace the layer's trainable parameters during the test, with
                random numbers in place of zeros.
        """
        self.run_unchunked(shadows)
        x = self.x
        try:
            self.x = TOKEN_SCALE * x
            self.run_unchunked(shadows)
        finally:
            self.x = x

    def run_in_one_chunk(self, _: list[Tensor]) -> None:
        """Run the layer once, unchunked, with streambp's attention in place of the model's own.
        A value that then differs from its value in `run_unchunked`, such as attention weights,
        depends on the model's own attention.

        Args:
            _: the argument `shadows` of `run_unchunked`; not used here.
        """
        stage = Stage.RECOMPUTE if self.graph else Stage.FORWARD
        self._run(stage, [Chunk(0, 0, self.x.shape[-2])], lambda _: None)

    def run_in_chunks(self, _: list[Tensor]) -> None:
        """Run the layer in chunks as a training step does: without a graph, then recomputed with
        backward.

        Args:
            _: the argument `shadows` of `run_unchunked`; not used here.
        """
        length = self.x.shape[-2]
        plan = ChunkPlan(length, min(TRIAL_CHUNK_SIZE, -(-length // 2)))
        packing = self.call.packing
        plan = plan.avoid_barriers(packing.barriers) if packing.barriers else plan
        chunks = list(plan.with_min_tokens(MIN_CHUNK_TOKENS))
        prefix = causal_prefix(self.call, length)
        with torch.no_grad():
            ran = list(rehearse(self.call, self.x.detach(), chunks, Stage.FORWARD, prefix))
        # Indexers pick keys in the order of the sequence.
        if self.graph and prefix.indexed.chunk_picks:
            self._run(Stage.RECOMPUTE, chunks, lambda ended: ended)
        elif self.graph:
            prefix.overwritten = True  # as in `_run`
            starts = [states for states, _ in ran]
            for chunk, states in zip(reversed(chunks), reversed(starts), strict=True):
                self._recompute(chunk, states, prefix)

    def _recompute(self, chunk: Chunk, states: States | None, prefix: Prefix) -> None:
        """Recompute one chunk with a graph, and differentiate it, as a training step's backward
        does. Third-party code may store values in this pass too. Called from the last chunk to the
        first.

        Args:
            chunk: the chunk's range of positions.
            states: the recurrent states at the chunk's start; None: the layer gets no cache.
            prefix: keys and values of all chunks, from the forward.
        """
        x = chunk.part(self.x, -2).detach().requires_grad_()
        output, _ = self.call.compute(x, chunk, Stage.RECOMPUTE, prefix, states=states)
        if output is not None and output.hidden_states.requires_grad:
            upstream = chunk.part(self.upstream, -2)
            torch.autograd.grad(output.hidden_states, [x], upstream, allow_unused=True)

    def _run(self, stage: Stage, chunks: list[Chunk], start: Callable[[Any], Any]) -> None:
        graph = stage is Stage.RECOMPUTE
        x = self.x.detach().requires_grad_(graph)
        prefix = causal_prefix(self.call, x.shape[-2])
        prefix.overwritten = graph  # a write to the attention's output has not been ruled out yet
        ran = rehearse(self.call, x, chunks, stage, prefix, start)
        outputs = [output.hidden_states for _, output in ran if output is not None]
        output = torch.cat(outputs, -2)  # [..., B, T, h]
        if output.requires_grad:
            torch.autograd.grad(output, [x], self.upstream, allow_unused=True)


def _differences(
    values: dict[str, Any], other_values: dict[str, Any], dtype: torch.dtype
) -> dict[str, str]:
    """Return a dict from the path of each stored value that differs between two runs by more than
    rounding, to a text with both shapes. The text is "" if the shapes are equal.

    Args:
        values: stored values of one run, by path.
        other_values: stored values of the other run, by path.
        dtype: dtype that determines the tolerance.
    """
    differences = {}
    tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE)
    for path in dict.fromkeys((*values, *other_values)):
        first, second = values.get(path, MISSING_VALUE), other_values.get(path, MISSING_VALUE)
        if not _values_agree(first, second, tolerance):
            differences[path] = _shapes_text(first, second)
    return differences


def _values_agree(first_value: Any, other_value: Any, tolerance: float) -> bool:
    """True if two values, which third-party code has stored in two test runs, are equal. Numbers,
    tensors and arrays may differ by the relative `tolerance`; a tensor's difference is measured by
    its norm."""
    if (
        isinstance(first_value, np.ndarray)
        and isinstance(other_value, np.ndarray)
        and first_value.dtype.kind in "biufc"
    ):
        first_value, other_value = (
            torch.from_numpy(first_value.copy()),
            torch.from_numpy(other_value.copy()),
        )
    if isinstance(first_value, Tensor) and isinstance(other_value, Tensor):
        if first_value.shape != other_value.shape or first_value.dtype != other_value.dtype:
            return False
        if (
            not (has_data(first_value) and has_data(other_value))
            or first_value.is_sparse
            or first_value.is_quantized
        ):
            return True
        wide = torch.complex128 if first_value.is_complex() else torch.float64
        first, second = (
            value.detach().to("cpu", wide).nan_to_num() for value in (first_value, other_value)
        )
        return bool((first - second).norm() <= tolerance * first.norm())
    numbers = (int, float, complex)
    if (
        isinstance(first_value, numbers)
        and isinstance(other_value, numbers)
        and not isinstance(first_value, bool)
    ):
        return (
            first_value == other_value
            or abs(first_value - other_value) <= tolerance * abs(first_value)
            or (first_value != first_value and other_value != other_value)
        )
    return first_value is other_value or (
        type(first_value) is type(other_value)
        and isinstance(first_value, PLAIN_TYPES)
        and first_value == other_value
    )


def _shapes_text(unchunked: Any, chunks: Any) -> str:
    """Return text with the shapes of a tensor that a layer stores, in a run with chunks and in a
    run without, such as " (4, 8) for (8, 8)". Return "" if the shapes are equal or a value is no
    tensor.

    Args:
        unchunked: the value that the run on all tokens at once has stored.
        chunks: the value that the run in chunks has stored.
    """
    arrays = isinstance(unchunked, (Tensor, np.ndarray)) and isinstance(
        chunks, (Tensor, np.ndarray)
    )
    if arrays and unchunked.shape != chunks.shape:
        return f" {tuple(chunks.shape)} for {tuple(unchunked.shape)}"
    return ""


@contextlib.contextmanager
def _disable_dropout(call: LayerCall) -> Iterator[None]:
    """Context manager that sets the layer's dropout modules to eval mode, so that dropout does not
    make two runs differ. Other modules keep their mode."""
    drops = [
        m
        for m in call.layer_state.layer.modules()
        if isinstance(m, nn.modules.dropout._DropoutNd) and m.training
    ]
    try:
        for module in drops:
            module.training = False
        yield
    finally:
        for module in drops:
            module.training = True


@contextlib.contextmanager
def _training_grad_mode(call: LayerCall) -> Iterator[None]:
    """Context manager for a test run of a layer on the call's full length, in the call's grad mode.
    If grad mode is on, detached aliases replace the layer's parameters, so that the run builds no
    graph. Grad mode is off for a layer that cannot have a graph. Values that third-party code
    stores in the run are removed afterwards."""
    parameters = Parameters(
        call.layer_state.layer, call.device, call.layer_state.cached_result(slots_of)
    )
    graph = torch.is_grad_enabled() and may_have_graphs(call)
    grad_mode: contextlib.AbstractContextManager[Any] = torch.no_grad()
    if graph:
        grad_mode = parameters.replace([p.detach() for p in parameters.current()])
    with undo_changes(roots_of(call.layer_state, call.snapshot)), grad_mode:
        yield
