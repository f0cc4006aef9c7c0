"""Find the products that a layer's passes can skip, and test by value before they are skipped.

[Note: writes through pointers] Kernels of Triton and of extension modules write through pointers.
No dispatch mode detects these writes, and no version counter changes. Labels of the data flow then
end at such a kernel's output, and a saved tensor may change before forward ends. A trace therefore
only proposes products, and version counters are not the only check: with data, a few random tokens
decide.

    skipped in a refill           K and V are the same to the bit
    skipped in a recomputation    all gradients are the same
    skipped in a half             its results are the same, or its gradients are
    saved                         the layer's forward has not changed it

If a proposed set fails, its names are tested one by one; names that fail are computed. A layer that
writes to its own input works on a copy in recomputations, and the saved input is from before the
write. Sequences that are split over ranks refuse such a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.agreement import coarsest_dtype
from streambp.admission.generators import trial_context
from streambp.admission.rehearsal import (
    MAX_TRIAL_TOKENS,
    TRIAL_CHUNK_SIZE,
    causal_prefix,
    disable_autocast_cache,
    disable_compilation,
    random_like,
    randomize_zero_weights,
    rehearse,
    unmask_arguments,
)
from streambp.attention.kv import KVBuffer
from streambp.attention.prefix import AttentionCall, Prefix, PrefixChunkAttention, Stage
from streambp.chunks import Chunk
from streambp.device import RandomState, has_data, is_out_of_memory
from streambp.known_names import TOKEN_DIMS
from streambp.layer.call import TRIAL_TOKENS, LayerCall
from streambp.layer.data_flow import trace
from streambp.layer.layer_state import OverwrittenTensors
from streambp.layer.products import (
    LinearNames,
    UnreadProducts,
    compute_outputs,
    skip_outputs,
    tap_linears,
)
from streambp.recurrent.documents import join_documents
from streambp.recurrent.states import States, leaves_of
from streambp.tensors import rebuild


def unread_products(
    call: LayerCall, linears: dict[str, nn.Linear], needs_input: bool
) -> UnreadProducts:
    """Return the Linears of a layer whose outputs backward's recomputation can skip, because no
    code reads these outputs. A traced run on a few tokens proposes Linears, and a run without their
    outputs confirms them by equal results.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        linears: the layer's Linears by name.
        needs_input: True if hidden_states need a gradient.
    """
    if not linears and not call.layer_state.kind.states.carries:
        return UnreadProducts()
    if call.layer_state.tests.results[call.arguments.kind].adopted:
        return UnreadProducts(
            states=any(products.states for products in call.layer_state.tests.unread.values())
        )
    with disable_compilation():
        return _find_unread(call, linears, needs_input)


def look_for_writes(call: LayerCall) -> Exception | None:
    """Run the layer on a few random tokens, and detect the tensors that its forward overwrites in
    place. The tensors are stored in `tests.overwritten` of the layer's state. Runs once for each
    kind of call: form of arguments, and structure of the layer.

    Returns:
        The layer's exception, if it raised; None otherwise.
    """
    layer_state, x = call.layer_state, call.hidden_states.detach()
    findings = layer_state.tests.results[call.arguments.kind]
    if (
        call.autocast in findings.searched_for_writes
        or not has_data(x)
        or x.shape[-2] == 1
        or not x.numel()
    ):
        return None
    chunks = call.first_chunks(MAX_TRIAL_TOKENS)
    failed: Exception | None = None
    # a layer may count its keys by their positions, and find none at the highest ones
    for at_last_positions in (True, False):
        try:
            with (
                torch.no_grad(),
                call.prepare_layer(),
                random_tokens(call, x, chunks[-1].stop, at_last_positions) as tokens,
            ):
                layer_state.tests.overwritten = _find_writes(call, tokens, chunks)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failed = error
            continue
        layer_state.tests.at_last_positions = at_last_positions
        if x.shape[-2] > TRIAL_CHUNK_SIZE:
            findings.searched_for_writes |= {call.autocast}
        return None
    return failed


def confirm_names(names: LinearNames, passes: Callable[[LinearNames], bool]) -> LinearNames:
    """Return the names of the Linears whose outputs can be skipped in a recomputation, found by
    tests.

    All names are tested together. If this test fails, each name is tested alone, and those that
    pass are tested together. The result is empty if this last test fails too.

    Args:
        names: names of Linears that may be skipped.
        passes: function that runs the layer without the outputs of some Linears. Returns True if
            the results are right.
    """
    if not names or _passes_without_error(passes, names):
        return names
    passing = frozenset(name for name in names if _passes_without_error(passes, frozenset({name})))
    return (
        passing
        if passing and passing != names and _passes_without_error(passes, passing)
        else frozenset()
    )


def _passes_without_error(passes: Callable[[LinearNames], bool], names: LinearNames) -> bool:
    """Run the test `passes(names)` and return its result. False if the test raises anything but an
    out-of-memory error, because the layer then needs one of the left-out outputs.

    Args:
        passes: runs the layer without the outputs of some Linears, and returns True if the results
            are right.
        names: names of these Linears. The caller may skip the Linears if the result is True.
    """
    try:
        return passes(names)
    except Exception as error:  # the layer needs one of the products
        if is_out_of_memory(error):
            raise
        return False


@contextlib.contextmanager
def random_tokens(
    call: LayerCall, like: Tensor, length: int, at_last_positions: bool = True
) -> Iterator[Tensor]:
    """Context manager for a test run of a layer on random tokens, which it yields: [..., B, length,
    h], at the scale of `like`. If `like` is a meta or fake tensor, the yielded tensor has no data.

    Inside, the call's arguments describe one document in each row without padding, and zero weights
    are replaced by random numbers. Arguments, weights and values that the layer stores are restored
    at the end.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        like: [..., B, T, h], hidden states of the call.
        length: number of tokens.
        at_last_positions: True: position_ids of the random tokens include the highest position of
            the call; False: the tokens get the call's first positions.
    """
    named_arguments = call.arguments.by_name
    if not has_data(like):
        with call.arguments.replace(join_documents(named_arguments)), trial_context(call):
            yield like.new_empty((*like.shape[:-2], length, like.shape[-1]))
        return
    with (
        RandomState.capture(call.device).replay(),
        disable_autocast_cache(),
        trial_context(call),
        randomize_zero_weights(call),
    ):
        with torch.no_grad():
            parts = [
                random_like(like)
                for _ in range(-(-length // min(MAX_TRIAL_TOKENS, like.shape[-2])))
            ]
            x = torch.cat(parts, -2)[..., :length, :]  # [..., B, length, h]
        positions = _rolled_positions(call, length) if at_last_positions else {}
        with call.arguments.replace(
            {
                **unmask_arguments(named_arguments, length),
                **join_documents(named_arguments),
                **positions,
            }
        ):
            yield x


def _rolled_positions(call: LayerCall, length: int) -> dict[str, Any]:
    """Return the call's position_ids and position_embeddings, rolled along the sequence for a test
    run on the first `length` tokens. The tokens of the test run then include the highest position.

    Rotary embeddings (RoPE) have no effect at position 0, where padding may be, so a test run at
    position 0 would not cover rotations.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        length: number of tokens of the test run.

    Returns:
        The replaced arguments by name; {} if the call has no position_ids for all its tokens.
    """
    named_arguments, total = call.arguments.by_name, call.arguments.length
    positions = named_arguments.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape[-1] != total:
        return {}
    highest = int(positions.reshape(-1, total).amax(0).argmax())
    start = max(0, min(highest - length // 2, total - length))
    dims = {name: dim for name, dim in TOKEN_DIMS.items() if name.startswith("position") and start}

    def turn(x: Any, dim: int) -> Any:
        return x.roll(-start, dim) if isinstance(x, Tensor) else x

    return {
        name: rebuild(named_arguments[name], functools.partial(turn, dim=dim))
        for name, dim in dims.items()
        if name in named_arguments
    }


def gradients_of(outputs: Iterable[Tensor], leaves: Iterable[Tensor]) -> list[Tensor | None]:
    """Return gradients of the leaves [...], for random gradients of the outputs [...]. A layer's
    test compares the gradients of two runs, with and without the outputs of some Linears.

    A leaf without effect on the outputs gets None. Outputs and leaves that do not require a
    gradient are left out. The list is empty without any outputs or without any leaves.
    """
    outputs, leaves = ([x for x in tensors if x.requires_grad] for tensors in (outputs, leaves))
    if not outputs or not leaves:
        return []
    upstream = [torch.randn_like(y) for y in outputs]
    return list(torch.autograd.grad(outputs, leaves, upstream, allow_unused=True))


def same_gradients(
    call: LayerCall, gradients: list[Tensor | None], expected: list[Tensor | None]
) -> bool:
    """True if two lists of gradients are equal, so that the outputs of some Linears can be skipped
    in backward's recomputation. Gradients must be equal to the bit, or up to rounding on devices
    whose kernels sum in varying order. A gradient of None equals only None.

    Args:
        call: the layer's call, whose dtypes determine the tolerance.
        gradients: gradients [...] from a recomputation without the outputs of these Linears.
        expected: gradients [...] from a recomputation with the outputs of all Linears.
    """
    if len(gradients) != len(expected):
        return False
    for x, y in zip(gradients, expected, strict=True):
        if x is None or y is None:
            if x is not y:
                return False
        elif not torch.equal(x, y):
            dtype = coarsest_dtype(call, y)
            wide = torch.promote_types(dtype, torch.float32)  # a half's norm may overflow
            tolerance = max(torch.finfo(dtype).eps, 64 * torch.finfo(wide).eps)
            if not bool((x - y).to(wide).norm() <= tolerance * y.to(wide).norm()):
                return False
    return True


class _RecordingAttention(PrefixChunkAttention):
    """Attention of one chunk that also stores each attention output and a copy of its values, to
    see later if the layer has written to the output."""

    def __init__(self, prefix: Prefix, chunk: Chunk) -> None:
        super().__init__(prefix, chunk, Stage.FORWARD)
        self.output_copies: list[tuple[Tensor, Tensor]] = []

    def attend(self, call: AttentionCall) -> Tensor:
        o = super().attend(call)
        self.output_copies.append((o, o.clone()))
        return o


def _find_writes(call: LayerCall, x: Tensor, chunks: tuple[Chunk, ...]) -> OverwrittenTensors:
    """Run the layer on random tokens, and return the tensors that its forward overwrites in place:
    outputs of Linears, attention's output, or its inputs. Tensors that earlier test runs found are
    included.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: random tokens, [..., B, T, h].
        chunks: the chunks to run.
    """
    linears, overwritten = call.layer_state.linears, call.layer_state.tests.overwritten
    products: list[tuple[str, Tensor, Tensor]] = []
    prefix = causal_prefix(call, chunks[-1].stop)
    states: States = {}
    attended, inputs = overwritten.attention_output, overwritten.inputs
    for chunk in chunks:
        inputs_of_chunk = [
            part.clone() for part in (x[..., chunk.start : chunk.stop, :], *states.values())
        ]
        records = [
            (part, part.clone(), None if part.is_inference() else part._version)
            for part in inputs_of_chunk
        ]
        chunk_attention = _RecordingAttention(prefix, chunk)
        states_of_chunk = dict(zip(states, inputs_of_chunk[1:], strict=True))
        with tap_linears(
            linears, linears, lambda name, out: products.append((name, out, out.clone()))
        ):
            output = call.run(inputs_of_chunk[0], chunk, chunk_attention, states=states_of_chunk)
        assert output is not None
        attended |= any(_is_changed(*pair) for pair in chunk_attention.output_copies)
        inputs |= any(
            _is_changed(part, old) and (version in (None, part._version))
            for part, old, version in records
        )
        states = output.states
    names_of_overwritten = {
        name for name, out, copy in products if _is_changed(out, copy) or _counts_no_writes(out)
    }
    return OverwrittenTensors(overwritten.products.union(names_of_overwritten), attended, inputs)


def _is_changed(current: Tensor, copy: Tensor) -> bool:
    return bool(((current != copy) & ~(current.isnan() & copy.isnan())).any())


def _counts_no_writes(tensor: Tensor) -> bool:
    """True if the tensor [...] has no version counter, because code in the layer made the tensor in
    inference mode. Writes to such a tensor cannot be detected, so it is not saved for backward."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


@dataclasses.dataclass
class RecomputedResults:
    """Results of recomputing a few test tokens with a graph.

    Attributes:
        kv: K and then V, [B, t, H_kv, D], of each attention call.
        outputs: hidden states, other outputs and recurrent end states of each chunk, in one list.
        leaves: the leaf tensors of the graph: the input, the differentiable arguments of each chunk
            and the recurrent start states.
        starts: the recurrent start states of each chunk.
        goes_on: True if the first chunk's recurrent end states have a graph. Gradients of the
            second chunk then reach the first one through these states.
    """

    kv: list[Tensor]
    outputs: list[Tensor]
    leaves: list[Tensor]
    starts: list[States]
    goes_on: bool


@dataclasses.dataclass(frozen=True)
class Trial:
    """Test runs of a layer over t random tokens, with and without some of its Linears, to find the
    Linears that backward's recomputation can skip. Each run starts from the same random state.

    Attributes:
        call: the layer's call on one batch, with its arguments and chunks.
        linears: the layer's Linears by name.
        x: random hidden_states, [..., B, t, h].
        chunks: the one or two chunks in which each run computes the t tokens.
        needs_input: True if backward computes the gradient of x.
        random: state of the random-number generators at the start of each run.
    """

    call: LayerCall
    linears: dict[str, nn.Linear]
    x: Tensor
    chunks: tuple[Chunk, ...]
    needs_input: bool
    random: RandomState

    def recompute(self) -> RecomputedResults:
        """Run the chunks with a graph, as backward's recomputation does, and return the results."""
        prefix = causal_prefix(self.call, self.chunks[-1].stop)
        leaf = self.x.detach().requires_grad_(self.needs_input)
        results = RecomputedResults([], [], [leaf], [], False)

        def start(ended: States) -> States:
            results.goes_on = any(state.requires_grad for state in ended.values())
            results.starts.append(leaves_of(ended) if results.goes_on else ended)
            results.leaves += results.starts[-1].values()
            return results.starts[-1]

        def leaves(chunk: Chunk) -> list[Tensor]:
            # an encoder's output may be all that needs a gradient
            arguments = self.call.arguments.leaves(chunk, self.call.backward.needs_grad[1])
            results.leaves += arguments
            return arguments

        with torch.enable_grad(), self.random.replay():
            for _, output in rehearse(
                self.call, leaf, self.chunks, Stage.RECOMPUTE, prefix, start, leaves
            ):
                assert output is not None
                results.outputs += [
                    output.hidden_states,
                    *output.extras.values(),
                    *output.states.values(),
                ]
                if not output.states:
                    break
        results.kv += _keys_and_values(prefix)
        return results

    def refill(self, calls: int, starts: list[States], names: LinearNames) -> list[Tensor]:
        """Recompute K [B, t, H_kv, D] and V of each attention call while some Linears skip their
        outputs, and return K and V in the order of `RecomputedResults.kv`. Backward recomputes K
        and V this way if forward has not saved them. If they are right, no code reads the skipped
        outputs.

        Args:
            calls: the number of attention calls.
            starts: the recurrent start states of each chunk.
            names: the Linears that return NaN instead of their output.
        """
        prefix, start_states = causal_prefix(self.call, self.chunks[-1].stop), iter(starts)
        prefix.calls, chunks = calls, self.chunks[: len(starts)]
        with torch.no_grad(), self.random.replay(), skip_outputs(self.linears, names):
            for _ in rehearse(
                self.call, self.x, chunks, Stage.REFILL, prefix, lambda _: next(start_states)
            ):
                pass
        return _keys_and_values(prefix)

    def gradients(self, names: LinearNames) -> list[Tensor | None]:
        """Recompute the layer while some Linears skip their outputs, and return the gradients [...]
        of its input, arguments, start states and parameters for random gradients of the outputs. If
        these gradients are right, no code reads the skipped outputs.

        Args:
            names: the Linears that return NaN instead of their output.
        """
        computed_names = [name for name in self.linears if name not in names]
        with compute_outputs(self.linears, computed_names), skip_outputs(self.linears, names):
            return self.gradients_of(self.recompute())

    def gradients_of(self, recomputed: RecomputedResults) -> list[Tensor | None]:
        """Return the gradients [...] for random gradients of a recomputation's outputs. The order
        is the layer's input, its arguments, the recurrent start states and the parameters. Tensors
        that require no gradient are left out. None stands for a tensor that the outputs do not
        depend on.

        Args:
            recomputed: the outputs and the leaves of the recomputation's graph.
        """
        parameters = [
            parameter
            for parameter in self.call.layer_state.layer.parameters()
            if parameter.requires_grad
        ]
        with self.random.replay():
            return gradients_of(recomputed.outputs, [*recomputed.leaves, *parameters])


def _keys_and_values(prefix: Prefix) -> list[Tensor]:
    """Return K and V [B, t, H_kv, D] of each attention call for the t tokens that a test run has
    stored, to be compared with another run's."""
    kv_buffers = [kv_buffer for kv_buffer in prefix.kv_storages if isinstance(kv_buffer, KVBuffer)]
    return [
        part[:, : prefix.filled_until]
        for kv_buffer in kv_buffers
        for part in (kv_buffer.k, kv_buffer.v)
    ]


def _find_unread(
    call: LayerCall, linears: dict[str, nn.Linear], needs_input: bool
) -> UnreadProducts:
    """Return the Linears whose outputs backward's recomputation can skip. A traced recomputation
    proposes Linears, and a run without their outputs must give equal results.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        linears: the layer's Linears by name.
        needs_input: True if hidden_states need a gradient.
    """
    like = call.saved.store.peek("x", 0)
    chunks = call.first_chunks(TRIAL_TOKENS)
    with_data = has_data(like)
    with random_tokens(call, like, chunks[-1].stop, call.layer_state.tests.at_last_positions) as x:
        trial = Trial(call, linears, x, chunks, needs_input, RandomState.capture(call.device))
        ran: list[RecomputedResults] = []

        def run() -> list[Tensor]:
            # computes what a recomputation with skipped products computes
            with compute_outputs(linears, linears):
                ran.append(trial.recompute())
            return ran[0].kv

        try:
            traced = trace(linears, run)
        # a trace only saves work: the layer's own passes report its errors
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return UnreadProducts()
        products = UnreadProducts(
            traced.called - traced.reached, traced.called - traced.read, ran[0].goes_on
        )
        if with_data and products.recompute:
            try:
                # a checkpoint inside the layer computes the products once more
                with compute_outputs(linears, linears):
                    expected = trial.gradients_of(ran[0])
            except Exception as error:  # a trace's error is ignored as well
                if is_out_of_memory(error):
                    raise
                recompute: LinearNames = frozenset()
            else:
                recompute = confirm_names(
                    products.recompute,
                    lambda names: same_gradients(call, trial.gradients(names), expected),
                )
            products = dataclasses.replace(products, recompute=recompute)
        return _find_refillable(products, trial, ran[0])


def _find_refillable(
    proposed: UnreadProducts, trial: Trial, ran: RecomputedResults
) -> UnreadProducts:
    """Test which Linears can be skipped while backward recomputes K and V alone: K and V must be
    equal to the bit without these Linears' outputs. Return `proposed` with only these Linears in
    `refill`.

    Args:
        proposed: the Linears that a trace proposes.
        trial: runs the test tokens.
        ran: the results of a recomputation with all Linears.
    """
    if not ran.kv or not proposed.refill:
        return dataclasses.replace(proposed, refill=frozenset())
    starts = ran.starts if trial.call.layer_state.kind.states.carries else [{}]
    calls = len(ran.kv) // 2
    refill = confirm_names(
        proposed.refill, lambda names: _bits_equal(trial.refill(calls, starts, names), ran.kv)
    )
    return dataclasses.replace(proposed, refill=refill)


def _bits_equal(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    """True if two lists of K and V, recomputed with and without some Linears, are equal to the bit.
    Lists of meta or fake tensors are compared by shapes alone."""
    if any(x.shape != y.shape for x, y in zip(tensors, expected, strict=True)):
        return False
    return not has_data(tensors[0]) or all(
        torch.equal(x, y) for x, y in zip(tensors, expected, strict=True)
    )
