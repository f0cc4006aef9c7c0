"""Stream a decoder layer whose tokens are sharded over ranks.

Attention needs all tokens, so no loop over chunks can contain attention: ranks with different
numbers of chunks would wait for each other. Instead, the layer's own forward is cut at its
attention call (`sharded/layer_halves.py`). Between the halves, every rank receives the tensors that
its queries read. The rank attends piece by piece, to each group of heads in turn. Ulysses exchanges
a rank's tokens of all heads for all tokens of the rank's heads, one single group
(`sharded/shards.py`). Under context parallelism queries stay on their rank, and K and V of a group
are gathered (`sharded/gathered_keys.py`):

    forward, no graph                             Ulysses                 context parallelism
        chunks of the shard: up to attention          q, k, v to heads        k, v gathered
        chunk_shards: attend                                o to tokens
        chunks of the shard: from attention on
    backward
        chunks of the shard: up to attention          q, k, v to heads        k, v gathered,
                                                                              unless o was saved
        chunk_shards: attend, or read the saved o           o to tokens
        chunks of the shard: after attention
        pieces, last to first: dq, dk, dv             do to heads             k, v gathered,
                                                                              unless in one group
                                                      dq, dk, dv to tokens    dk, dv summed where
                                                                              their tokens are
        chunks of the shard: before attention

Each half skips the other half's Linear products. The first half stops at attention. Nothing reads
q, k and v in the second half, so the second half skips their products. Only elementwise work is
done twice: the first norm, and the operations on q and k. hidden_states reach the layer's output
through both halves, so dx has two parts. A parameter's gradient may have two parts as well.

A rank's exchanges must equal those of other ranks. The exchanges follow from the model and from
settings that `gather_shards` compared between all ranks, never on the free memory of this rank's
host or on its number of chunks.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from streambp.admission.entry import backward_in_chunks, stream_layer
from streambp.attention.attend import AttentionOutput, AttentionParams
from streambp.attention.backend import choose_backend
from streambp.attention.kv import KVBuffer
from streambp.attention.prefix import FullSequenceKeys
from streambp.chunks import Chunk
from streambp.device import RandomState
from streambp.errors import UnsupportedModelError
from streambp.layer.call import FullOutputs, LayerCall, write_chunk
from streambp.layer.function import BackwardPass, Strategy, outputs_of, run_forward
from streambp.layer.gradients import count_graph_bytes, refuse_other_leaves
from streambp.layer.layer_state import CallReport, LayerState
from streambp.layer.products import (
    LinearNames,
    TensorCallback,
    skip_outputs,
    sum_weight_gradients,
    tap_linears,
)
from streambp.layer.recompute import NULL_CONTEXT
from streambp.layer.saved_tensors import linear_of
from streambp.sharded.call import HalfInput, ShardedCall
from streambp.sharded.layer_halves import SplitAtAttention
from streambp.sharded.shards import Keys, Shards
from streambp.sharded.split_attention import (
    AllQueriesAttention,
    ChunkwiseAttention,
    ChunkwiseKeys,
    SplitAttention,
    part_of,
)

# gradients of the layer's input and arguments, of attention's leaves, and of the parameters
Gradients = tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]


def stream_shard(layer_state: LayerState, args: Any, kwargs: Any, shards: Shards) -> Any:
    """Compute a decoder layer's forward for this rank's tokens, where sequences are split over
    ranks, and return its result. Must be called on every rank.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.
        shards: the split, and the exchanges with other ranks.

    Raises:
        UnsupportedModelError, UnsupportedMaskError, StreamBPError: the result cannot be computed
            exactly.
    """
    reason = layer_state.kind.attention.why_not_split or layer_state.kind.states.why_not_split
    if reason is not None:
        return _refuse(layer_state, args, kwargs, CallReport(reason))
    if not layer_state.kind.attention.reads_a_mask:
        return stream_layer(
            layer_state,
            args,
            kwargs,
            strategy=Strategy(LayerCall, run_forward, backward_in_chunks, _refuse),
        )
    make = functools.partial(ShardedCall, shards=shards)
    strategy = Strategy(make, run_forward_in_halves, run_backward_in_halves, _refuse)
    return stream_layer(layer_state, args, kwargs, strategy=strategy)


def _refuse(layer_state: LayerState, args: Any, kwargs: Any, report: CallReport) -> Any:
    """Raise the error for a layer that cannot run in chunks while sequences are split over ranks.
    The layer cannot run unchunked either: its own attention would read only this rank's part of
    each sequence.

    Args:
        layer_state: the decoder layer.
        args, kwargs: the arguments of the layer's forward; not used.
        report: contains the reason why the layer cannot run in chunks.
    """
    reason = report.reason or "the shard is too short to try it in chunks"
    raise UnsupportedModelError(
        f"{type(layer_state.layer).__name__} cannot stream: {reason}. With sequences split over "
        "ranks it would see this rank's shard alone. Train this model without splitting sequences."
    )


def run_forward_in_halves(call: ShardedCall, keep: bool) -> tuple[Tensor, ...]:
    """Compute a decoder layer's outputs for this rank's tokens, without a graph. The parts of the
    layer before and behind attention run in chunks, and attention runs over full sequences. Return
    hidden_states [..., B, T / P, h] for P ranks, then the other outputs.

    Args:
        call: the call of the layer.
        keep: True: save the tensors that backward needs.

    Raises:
        UnsupportedModelError: the layer has dropout before or in its attention, and sequences are
            split over ranks.
    """
    outputs: FullOutputs = {}
    with torch.no_grad(), call.prepare_layer():
        call.find_unread_in_halves()
        if keep:
            call.saved.find_products()
            if call.saved.cost_recorder is not None:
                call.saved.cost_recorder.record_chunk()
            call.backward.witness = call.layer_state.witness(call.hidden_states, call.autocast)
        random_state = RandomState.capture(call.device)
        parts = _project(call, keep)
        q = _queries(call, parts)
        keys = call.shards.start_keys(parts, call.heads[0])
        if random_state.is_current():
            call.random_before = []
        elif call.shards.splits:
            raise UnsupportedModelError(
                f"{type(call.layer_state.layer).__name__} draws random numbers before its "
                "attention (dropout?), which streambp does not support where sequences are split "
                "over ranks. Set that dropout to 0."
            )
        if call.params is not None and call.params.dropout > 0.0:
            seed = int(torch.randint(2**31, (), device="cpu"))
            call.params = call.params._replace(seed=seed)
        attention = _attention_of(call, q, keys)
        del q, keys
        attention.forward(keep)
        names: list[str] = []
        for name in call.saved.products.names:
            if name not in call.saved.products_before and name not in call.unread.for_output:
                names.append(name)
        call.saved.products_after = names
        linears = call.layer_state.linears
        recorded = NULL_CONTEXT
        # records the inputs of Linears that this half skips in backward
        if call.backward.witness is not None:
            call.backward.witness.left_out = call.unread.to_differentiate_after.difference(
                call.unread.for_output, names
            )
            recorded = tap_linears(
                linears, call.backward.witness.left_out, see=call.backward.witness.see
            )
        with skip_outputs(linears, call.unread.for_output), recorded:
            for chunk in call.plan:
                hidden_chunk = call.hidden_states[..., chunk.start : chunk.stop, :]
                if keep:
                    call.saved.random.append(RandomState.capture(call.device))
                compute = functools.partial(
                    _forward_second_half, call, outputs, hidden_chunk, chunk, attention, keep
                )
                attended = call.attempt(compute) if keep else compute(False)
                if keep:
                    call.saved.keep(chunk, hidden_chunk, attended)
                del attended
        call.layer_state.last_call.kernels = call.carried.prefix.kernel_uses
    if keep:
        call.saved.seal(call.backward_bytes)
    return outputs_of(call, outputs)


def _queries(call: ShardedCall, parts: list[Tensor]) -> Tensor | None:
    """Remove q [B, H, T / P, D] from `parts`, the list of q, k and v of this rank's tokens. Return
    the n queries of H' heads whose attention this rank computes, [B, H', n, D], after an exchange
    with other ranks. Return None if the layer's own code computes attention
    (`call.attends_by_itself`): `parts` then has only k and v."""
    if call.attends_by_itself:
        return None
    return call.shards.queries(parts.pop(0))


def _attention_of(call: ShardedCall, q: Tensor | None, keys: Keys) -> SplitAttention:
    """Return the object that computes attention between the layer's two halves.

    Args:
        call: the call of the layer.
        q: the n queries of H' heads whose attention this rank computes, [B, H', n, D]; None: the
            layer's own code computes attention.
        keys: K and V of full sequences.
    """
    if q is None:
        return ChunkwiseKeys(call, keys)
    attends = AllQueriesAttention if call.shards.splits else ChunkwiseAttention
    return attends(call, q, keys)


def _forward_second_half(
    call: ShardedCall,
    outputs: FullOutputs,
    hidden_chunk: Tensor,
    chunk: Chunk,
    attention: SplitAttention,
    keep: bool,
    is_retry: bool,
) -> list[AttentionOutput]:
    """Compute the half of the layer after attention on one chunk, without a graph, and copy the
    chunk's results into `outputs`. Return the attention output that is to be saved with the chunk:
    a list with one output, or [].

    Args:
        call: the call of the layer.
        outputs: the outputs of all this rank's tokens.
        hidden_chunk: the chunk's input [..., B, C, h].
        chunk: the chunk's range of positions.
        attention: computes attention.
        keep: True: save outputs of Linears for backward.
        is_retry: True if the chunk is computed a second time, after running out of memory.
    """
    if is_retry:
        call.saved.random[-1].restore()
    half_input, attended = attention.output(chunk)
    see = call.start_witness(chunk, in_backward=False, half_name="after")
    names = [name for name in call.saved.products_after if name in call.saved.products.names]
    with call.saved.products.capture_outputs(names, see) if keep else NULL_CONTEXT:
        output = call.run(hidden_chunk, chunk, _second_half(call, chunk, half_input))
    assert output is not None
    if call.backward.witness is not None:
        call.backward.witness.see_output(hidden_chunk, output.hidden_states)
    write_chunk(outputs, output, chunk, call.plan.length)
    return attended


def _project(call: ShardedCall, keep: bool) -> list[Tensor]:
    """Run the layer's half before attention in chunks, without a graph. Return q [B, H, T / P, D],
    k and v [B, H_kv, T / P, D] of this rank's tokens, for P ranks.

    Args:
        call: the call of the layer.
        keep: True: save outputs of Linears for backward.
    """
    projected: list[Tensor] = []
    with skip_outputs(call.layer_state.linears, _unread_before(call)):
        for chunk in call.plan:
            call.random_before.append(RandomState.capture(call.device))
            compute = functools.partial(_project_chunk, call, chunk, projected, keep)
            if keep:
                call.attempt(compute)
                call.saved.keep_products(chunk)
            else:
                compute(False)
    call.saved.products_before = list(dict.fromkeys(map(linear_of, call.saved.products.keys)))
    return projected


def _unread_before(call: ShardedCall) -> LinearNames:
    """Return names of Linears to skip when the half of the layer before attention computes all of
    its tensors. The set is empty if these tensors are q, k and v. If the layer's own code computes
    attention (`call.attends_by_itself`), the tensors are k and v alone, and the Linears of q are
    skipped."""
    if call.attends_by_itself:
        return call.unread.for_queries
    return frozenset()


def _project_chunk(
    call: ShardedCall, chunk: Chunk, projected: list[Tensor], keep: bool, is_retry: bool
) -> None:
    """Run the layer's half before attention on one chunk, without a graph, and copy its q, k and v
    into `projected`.

    Args:
        call: the call of the layer.
        chunk: the chunk's range of positions.
        projected: q, k and v of all this rank's tokens.
        keep: True: save outputs of Linears for backward.
        is_retry: True if the chunk is computed a second time, after running out of memory.
    """
    if is_retry:
        call.random_before[-1].restore()
    hidden_chunk = call.hidden_states[..., chunk.start : chunk.stop, :]
    see = call.start_witness(chunk, in_backward=False, half_name="before")
    with call.saved.products.capture_outputs(see=see) if keep else NULL_CONTEXT:
        projected_chunk = _collect(call, hidden_chunk, chunk, projected, 3)
    _see_projected(see, projected_chunk)


def _see_projected(see: TensorCallback | None, projected: tuple[Tensor, ...]) -> None:
    """Pass a chunk's q, k and v to the callback `see`, which compares the values in backward with
    those in forward.

    Args:
        see: the callback (name, tensor); None: nothing is compared.
        projected: q, k and v of the chunk, or k and v alone.
    """
    if see is not None:
        for name, x in zip("qkv"[-len(projected) :], projected, strict=True):
            see(name, x)


def _collect(
    call: ShardedCall, hidden_chunk: Tensor, chunk: Chunk, projected: list[Tensor], count: int
) -> tuple[Tensor, ...]:
    """Run one chunk of the layer up to its attention, and copy its q, k and v into tensors of all
    this rank's tokens. Return q, k and v of the chunk, or only k and v if the layer's own code
    computes attention.

    Args:
        call: the call of the layer.
        hidden_chunk: the chunk's input [..., B, C, h].
        chunk: the chunk's range of positions.
        projected: the tensors; [] before the first chunk, which allocates them.
        count: 3: copy q, k and v; 1: copy q alone.
    """
    chunk_attention = call.split(chunk)
    call.run(hidden_chunk, chunk, chunk_attention)
    if isinstance(chunk_attention, SplitAtAttention):
        _store_attention_settings(call, chunk_attention)
    else:
        call.heads = (0, chunk_attention.tensors[0].shape[1])
    parts = chunk_attention.tensors[:count]
    if not projected:
        projected += [_full_length_tensor(part, call.plan.length) for part in parts]
    for target, part in zip(projected, parts, strict=True):
        target[part_of(chunk)] = part
    return chunk_attention.tensors


def _store_attention_settings(call: ShardedCall, chunk_attention: SplitAtAttention) -> None:
    """Store the settings of one chunk's attention call in `call`. Called for each chunk. The first
    chunk sets the kernels, the numbers of heads and their dimensions, which are the same in all
    chunks. The attention sinks and T5's bias are replaced by those of the current chunk.

    Args:
        call: the call of the layer.
        chunk_attention: has the arguments of the attention call.

    Raises:
        UnsupportedModelError: the layer has attention dropout, and sequences are split over ranks.
    """
    arguments = chunk_attention.projected
    assert arguments is not None
    if arguments.dropout > 0.0 and call.shards.splits:
        raise UnsupportedModelError(
            f"The model attends with attention dropout of {arguments.dropout}, which streambp does "
            "not support where sequences are split over ranks. Set attention_dropout=0.0 in its "
            "config."
        )
    if call.params is None:
        sinks = arguments.sink is not None
        backend = choose_backend(
            call.carried.prefix.attention,
            arguments.q,
            arguments.v,
            arguments.dropout,
            arguments.softcap,
            sinks,
            biased=arguments.bias is not None,
        )
        call.params = AttentionParams(
            backend, arguments.scale, arguments.softcap, arguments.dropout, 0
        )
        call.heads = (arguments.q.shape[1], arguments.k.shape[1])
        call.value_size = arguments.v.shape[3]
    call.sinks = None if arguments.sink is None else call.shards.sinks(arguments.sink.detach())
    call.bias = arguments.bias
    if call.bias is not None:
        call.bias = call.bias.detach()


def _full_length_tensor(part: Tensor, length: int) -> Tensor:
    """Return an uninitialized tensor [B, H, length, D], with tokens before heads in memory. A
    chunk's q, k or v, `part` [B, H, C, D], defines the other dimensions, the dtype and the
    device."""
    rows, heads, _, size = part.shape
    return part.new_empty((rows, length, heads, size)).transpose(1, 2)


def _second_half(
    call: ShardedCall, chunk: Chunk, half_input: HalfInput
) -> SplitAtAttention | FullSequenceKeys:
    """Return the replacement of attention with which the layer's forward computes the half after
    attention, on one chunk.

    The layer's forward then runs from its start, so the code before attention runs once more. This
    code must draw the same random numbers as in the half before attention. Torch's generators are
    therefore set to the states stored for that half. The replacement restores the generators'
    present states when the forward reaches attention.

    Args:
        call: the call of the layer.
        chunk: the chunk's range of positions.
        half_input: attention's output for the chunk, [B, H, C, D_v], or K [B, H_kv, T, D] and V if
            the layer's own code computes attention.
    """
    if isinstance(half_input, Tensor) and call.layer_state.tests.overwritten.attention_output:
        half_input = (
            half_input.clone()
        )  # the layer writes to a copy, because the output may be saved
    if not call.random_before:
        return call.split(chunk, half_input)
    random_state = RandomState.capture(call.device)
    call.random_before[chunk.index].restore()
    return call.split(chunk, half_input, random_state.restore)


def _replay_generators(call: ShardedCall, chunk: Chunk) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which torch's generators draw, for this chunk, the same random
    numbers as in forward, in the half of the layer before attention. Backward recomputes this half
    in the context. `call` has the states of the generators. The previous states are restored at the
    end."""
    if not call.random_before:
        return NULL_CONTEXT
    return call.random_before[chunk.index].replay()


def run_backward_in_halves(call: ShardedCall, work: BackwardPass) -> None:
    """Compute a layer's gradients and add them to `work`, in this order: the half after attention,
    attention, the half before attention. The gradient of hidden_states is [..., B, T / P, h], for P
    ranks.

    Args:
        call: the call of the layer.
        work: receives the gradients.
    """
    attention = _attention_of(call, *_exchange_again(call))
    attention.backward()
    _differentiate_after(call, work, attention)
    gradients = attention.gradients()
    del attention
    _differentiate_before(call, work, gradients)


def _exchange_again(call: ShardedCall) -> tuple[Tensor | None, Keys]:
    """Return q, and K and V of full sequences, for attention in backward. K and V are read if
    forward saved K and V. Other tensors are recomputed, and exchanged between ranks again. q is
    None if the layer's own code computes attention.

    Args:
        call: the call of the layer.
    """
    saved = call.saved
    count = 3
    unread = _unread_before(call)
    if saved.keeps_kv:
        count = 1
        unread = call.unread.for_queries.difference(saved.products_before)
    projected: list[Tensor] = []
    with torch.no_grad(), skip_outputs(call.layer_state.linears, unread):
        for chunk in call.plan:
            if count == 1 and call.attends_by_itself:
                break  # k and v are saved, and the second half computes q
            reads = saved.half_reads(chunk.index, saved.products_before)
            saved.bring(chunk, reads, names_to_keep=dict(reads))
            call.attempt(functools.partial(_project_again, call, chunk, projected, count))
    q = _queries(call, projected)
    keys = call.shards.start_keys(projected, call.heads[0]) if projected else call.keys
    call.keys = None
    if keys is not None:
        return q, keys
    for chunk_shard in call.chunk_shards:
        k, v = (
            saved.store.take(*access).transpose(1, 2) for access in saved.key_reads(chunk_shard)
        )
        saved.store.read_ahead()
        call.carried.prefix.restore(0, chunk_shard.full_chunk, k, v)
    kv_buffer = call.carried.prefix.kv_storages.pop()
    assert isinstance(kv_buffer, KVBuffer)
    return q, Keys(kv_buffer.k, kv_buffer.v)


def _project_again(
    call: ShardedCall, chunk: Chunk, projected: list[Tensor], count: int, is_retry: bool
) -> None:
    """Run the layer's half before attention on one chunk again, in backward, and copy its first
    `count` tensors of q, k and v into `projected`.

    Args:
        call: the call of the layer.
        chunk: the chunk's range of positions.
        projected: the tensors of all this rank's tokens.
        count: 3: q, k and v; 1: q alone.
        is_retry: True if the chunk is computed a second time, after running out of memory.
    """
    saved = call.saved
    with (
        _replay_generators(call, chunk),
        saved.products.use_outputs(saved.brought, saved.products_before),
    ):
        _collect(call, saved.brought["x"], chunk, projected, count)


def _differentiate_after(call: ShardedCall, work: BackwardPass, attention: SplitAttention) -> None:
    """Recompute and differentiate the layer's second half, behind its attention, chunk by chunk.

    Args:
        call: the call of the layer.
        work: receives the gradients of the layer's input, arguments and parameters.
        attention: computes attention, and receives the gradients of tensors that the second half
            gets from attention, such as a chunk's attention output.
    """
    saved = call.saved
    linears = call.layer_state.linears
    unread = call.unread.to_differentiate_after.difference(saved.products_after)
    with sum_weight_gradients(linears, work.sums, unread, call.backward.witness):
        for chunk in call.plan.backward:
            saved.bring(chunk, saved.second_half_reads(chunk.index), names_to_keep=("x",))
            of_inputs, of_leaves, of_parameters = call.attempt(
                functools.partial(_differentiate_chunk_after, call, work, chunk, attention)
            )
            attention.store_gradients(chunk, of_leaves)
            work.add(chunk, of_inputs)
            call.attempt(functools.partial(_add_to_sums, work, of_parameters))


def _differentiate_chunk_after(
    call: ShardedCall,
    work: BackwardPass,
    chunk: Chunk,
    attention: SplitAttention,
    is_retry: bool,
) -> Gradients:
    """Recompute and differentiate the layer's second half, behind its attention, on one chunk.
    Return three lists of gradients: of the layer's input and arguments, of attention's leaves (such
    as the chunk's attention output), and of the parameters.

    Args:
        call: the call of the layer.
        work: contains the gradients of the layer's outputs.
        chunk: the chunk's range of positions.
        attention: computes attention.
        is_retry: True if the chunk is differentiated a second time, after running out of memory.
            The gradients that the first attempt added to sums over chunks are then not added again.
    """
    saved = call.saved
    work.sums.begin(is_retry)
    attention.begin_backward(is_retry)
    see = call.start_witness(chunk, in_backward=True, half_name="after")
    hidden_chunk = saved.brought["x"].detach().requires_grad_(work.needs_input)
    leaves = call.arguments.leaves(chunk, work.needs_arguments)
    with (
        torch.enable_grad(),
        saved.random[chunk.index].replay(),
        saved.products.use_outputs(saved.brought, saved.products_after, sums=work.sums, see=see),
        _count_graph_bytes(call, saved.brought["x"], work),
    ):
        half_input, of_attention = attention.leaf(chunk)
        output = call.run(hidden_chunk, chunk, _second_half(call, chunk, half_input), leaves)
    assert output is not None
    if call.backward.witness is not None:
        call.backward.witness.see_output(hidden_chunk, output.hidden_states)
    outputs, upstream = work.upstream(output, chunk)
    del output, half_input
    targets = [leaf for leaf in (hidden_chunk, *leaves) if leaf.requires_grad]
    return _differentiate_half(call, work, chunk, targets, of_attention, outputs, upstream)


def _count_graph_bytes(
    call: ShardedCall, x: Tensor, work: BackwardPass
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that counts the bytes of one half's autograd graph on one chunk.
    Nothing is counted unless the policy for `saves="auto"` observes this call.

    Args:
        call: the call of the layer.
        x: the chunk's input [..., B, C, h]; not counted, because it exists without the graph.
        work: contains detached aliases of the parameters, which are not counted either.
    """
    cost_recorder = call.saved.cost_recorder
    return (
        NULL_CONTEXT
        if cost_recorder is None
        else count_graph_bytes(call, cost_recorder, (x, *work.shadows))
    )


def _add_to_sums(work: BackwardPass, gradients: list[Tensor | None], is_retry: bool) -> None:
    """Add a chunk's gradients of parameters to their sums over chunks in `work`. `is_retry` has no
    effect: a retry finds in `gradients` only those that the first attempt has not added."""
    work.sums.add(gradients)


def _differentiate_half(
    call: ShardedCall,
    work: BackwardPass,
    chunk: Chunk,
    targets: list[Tensor],
    of_attention: list[Tensor],
    outputs: list[Tensor],
    upstream: list[Tensor],
) -> Gradients:
    """Differentiate one half of the layer (before or after attention) on one chunk. Return three
    lists of gradients: of `targets`, of `of_attention` and of the parameters. An entry is None if
    no gradient reaches its tensor.

    Args:
        call: the call of the layer.
        work: contains detached aliases of the parameters, which are their leaves in the graph.
        chunk: the chunk's range of positions.
        targets: the leaves for the layer's input and arguments.
        of_attention: the leaves of attention, such as the chunk's attention output, for the half
            after attention; [] for the half before attention.
        outputs: the half's outputs.
        upstream: gradients of the outputs.
    """
    sources = [*targets, *of_attention, *work.shadows]
    gradients: list[Tensor | None] = [None] * len(sources)
    if chunk.stop == call.plan.length:
        refuse_other_leaves(call.layer_state.layer, outputs, sources)
    if outputs and sources:
        gradients = list(torch.autograd.grad(outputs, sources, upstream, allow_unused=True))
    first = len(targets)
    second = first + len(of_attention)
    return gradients[:first], gradients[first:second], gradients[second:]


def _differentiate_before(call: ShardedCall, work: BackwardPass, gradients: list[Tensor]) -> None:
    """Recompute and differentiate the layer's first half, up to its attention, chunk by chunk.

    Args:
        call: the call of the layer.
        work: receives the gradients.
        gradients: gradients of q, k and v, [B, H, T / P, D] for P ranks.
    """
    saved = call.saved
    linears = call.layer_state.linears
    unread = call.unread.to_differentiate_before.difference(saved.products_before)
    with sum_weight_gradients(linears, work.sums, unread):
        for chunk in call.plan.backward:
            saved.bring(chunk, saved.half_reads(chunk.index, saved.products_before))
            of_inputs, _, of_parameters = call.attempt(
                functools.partial(_differentiate_chunk_before, call, work, chunk, gradients)
            )
            saved.brought.clear()
            work.add(chunk, of_inputs, accumulate=True)
            call.attempt(functools.partial(_add_to_sums, work, of_parameters))


def _differentiate_chunk_before(
    call: ShardedCall, work: BackwardPass, chunk: Chunk, gradients: list[Tensor], is_retry: bool
) -> Gradients:
    """Recompute and differentiate the layer's first half, up to its attention, on one chunk. Return
    three lists: the gradients of the layer's input and arguments, [] (this half has no leaves of
    attention), and the gradients of the parameters.

    Args:
        call: the call of the layer.
        work: contains detached aliases of the parameters, which are their leaves in the graph.
        chunk: the chunk's range of positions.
        gradients: of q, k and v, [B, H, T / P, D].
        is_retry: True if the chunk is differentiated a second time, after running out of memory.
            The gradients that the first attempt added to sums over chunks are then not added again.
    """
    saved = call.saved
    work.sums.begin(is_retry)
    hidden_chunk = saved.brought["x"].detach().requires_grad_(work.needs_input)
    leaves = call.arguments.leaves(chunk, work.needs_arguments)
    chunk_attention = call.split(chunk)
    see = call.start_witness(chunk, in_backward=True, half_name="before")
    with (
        torch.enable_grad(),
        _replay_generators(call, chunk),
        saved.products.use_outputs(saved.brought, saved.products_before, sums=work.sums, see=see),
        _count_graph_bytes(call, saved.brought["x"], work),
    ):
        call.run(hidden_chunk, chunk, chunk_attention, leaves)
    _see_projected(see, chunk_attention.tensors)
    if (
        saved.cost_recorder is not None and saved.cost_recorder.graph
    ):  # a kept graph has keys and values as well
        saved.cost_recorder.graph += sum(x.nbytes for x in chunk_attention.tensors[-2:])
    outputs: list[Tensor] = []
    upstream: list[Tensor] = []
    for x, gradient in zip(chunk_attention.tensors, gradients, strict=True):
        if x.requires_grad:
            outputs.append(x)
            upstream.append(gradient[part_of(chunk)])
    sink = None
    bias = None
    if isinstance(chunk_attention, SplitAtAttention) and chunk_attention.projected is not None:
        sink = chunk_attention.projected.sink
        bias = chunk_attention.projected.bias
    if chunk.stop == call.plan.length and sink is not None and sink.requires_grad:
        assert call.sinks is not None
        d_sinks = torch.zeros_like(sink)
        call.shards.sinks(d_sinks).copy_(call.sinks)
        with torch.enable_grad():  # the sink is a parameter or a view of one
            outputs.append(sink.view_as(sink))
        upstream.append(d_sinks)
    if chunk.stop == call.plan.length and bias is not None and bias.requires_grad:
        assert call.bias is not None
        with torch.enable_grad():  # the bias may be an argument of the layer
            outputs.append(bias.view_as(bias))
        upstream.append(call.bias.to(bias.dtype))
    targets = [leaf for leaf in (hidden_chunk, *leaves) if leaf.requires_grad]
    return _differentiate_half(call, work, chunk, targets, [], outputs, upstream)
