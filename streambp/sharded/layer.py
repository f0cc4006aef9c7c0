"""Stream a decoder layer whose tokens are sharded over ranks.

Attention needs all tokens, so no loop over chunks can contain attention: ranks with different
numbers of chunks would wait for each other. Instead, the layer's own forward is cut at its
attention call (`sharded/halves.py`). Between the halves, every rank receives the tensors that its
queries read. The rank attends piece by piece, to each group of heads in turn. Ulysses exchanges a
rank's tokens of all heads for all tokens of the rank's heads, one single group
(`sharded/shards.py`). Under context parallelism queries stay on their rank, and K and V of a group
are gathered (`sharded/gathered.py`):

    forward, no graph                             Ulysses                 context parallelism
        chunks of the shard: up to attention          q, k, v to heads        k, v gathered
        pieces: attend                                o to tokens
        chunks of the shard: from attention on
    backward
        chunks of the shard: up to attention          q, k, v to heads        k, v gathered,
                                                                              unless o was saved
        pieces: attend, or read the saved o           o to tokens
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
from streambp.attention.attend import Attended, Params, PrefixAttention, attend_blocks
from streambp.attention.backend import Use, choose_backend
from streambp.attention.kv import KVBuffer
from streambp.attention.prefix import AttentionCall
from streambp.chunks import Chunk
from streambp.device import RandomState
from streambp.errors import UnsupportedModelError
from streambp.layer.call import LayerCall, Whole, put
from streambp.layer.function import BackwardPass, Strategy, outputs_of, run_forward
from streambp.layer.gradients import refuse_other_leaves
from streambp.layer.products import Labels, See, left_out, summed, tapped
from streambp.layer.recompute import NULL_CONTEXT
from streambp.layer.saved import linear_of
from streambp.layer.site import CallReport, LayerSite
from streambp.sharded.call import ShardedCall, keeps
from streambp.sharded.halves import SplitAtAttention
from streambp.sharded.shards import Keys, Shards


def stream_shard(site: LayerSite, args: Any, kwargs: Any, shards: Shards) -> Any:
    """Compute a decoder layer's forward for this rank's tokens, where sequences are split over
    ranks, and return its result. Must be called on every rank.

    Args:
        site: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.
        shards: the split, and the exchanges with other ranks.

    Raises:
        UnsupportedModelError, UnsupportedMaskError, StreamBPError: the result cannot be computed
            exactly.
    """
    because = site.kind.attention.why_not_split or site.kind.states.why_not_split
    if because is not None:
        return _refuse(site, args, kwargs, CallReport(because))
    if not site.kind.attention.reads_a_mask:
        return stream_layer(
            site,
            args,
            kwargs,
            strategy=Strategy(LayerCall, run_forward, backward_in_chunks, _refuse),
        )
    make = functools.partial(ShardedCall, shards=shards)
    strategy = Strategy(make, run_forward_in_halves, run_backward_in_halves, _refuse)
    return stream_layer(site, args, kwargs, strategy=strategy)


def _refuse(site: LayerSite, args: Any, kwargs: Any, report: CallReport) -> Any:
    """Raise the error for a layer that cannot run in chunks while sequences are split over ranks.
    The layer cannot run unchunked either: its own attention would read only this rank's part of
    each sequence."""
    reason = report.because or "the shard is too short to try it in chunks"
    raise UnsupportedModelError(
        f"{type(site.layer).__name__} cannot stream: {reason}. With sequences split over ranks it "
        "would see this rank's shard alone. Train this model without splitting sequences."
    )


def _part(chunk: Chunk) -> tuple[slice, slice, slice]:
    """Return the index (a tuple of slices) of a chunk's positions in a tensor [B, H, T / P, D]."""
    return slice(None), slice(None), slice(chunk.start, chunk.stop)


def run_forward_in_halves(call: ShardedCall, keep: bool) -> tuple[Tensor, ...]:
    """Compute a decoder layer's outputs for this rank's tokens, without a graph. The parts of the
    layer before and behind attention run in chunks, and attention runs over full sequences. Return
    hidden_states [..., B, T / P, h], then the other outputs.

    Args:
        call: the call of the layer.
        keep: True: save the tensors that backward needs.

    Raises:
        UnsupportedModelError: dropout draws before or in attention, and sequences are split.
    """
    outputs: Whole = {}
    with torch.no_grad(), call.streaming():
        call.look_into_halves()
        if keep:
            call.kept.find_products()
            call.backward.witness = call.site.witness(call.hidden_states, call.autocast)
        random_state = RandomState.capture(call.device)
        parts = _project(call, keep)
        q = call.shards.queries(parts.pop(0))
        keys = call.shards.start_keys(parts, call.heads[0])
        if random_state.is_current():
            call.random_before = []
        elif call.shards.splits:
            raise UnsupportedModelError(
                f"{type(call.site.layer).__name__} draws random numbers before its attention "
                "(dropout?), which streambp does not support where sequences are split over ranks. "
                "Set that dropout to 0."
            )
        assert call.params is not None
        if call.params.dropout > 0.0:
            seed = int(torch.randint(2**31, (), device="cpu"))
            call.params = call.params._replace(seed=seed)
        o, lse = _attend(call, q, keys, last=not (keep and call.kept.keeps_kv))
        call.site.last_call.kernels = call.carried.prefix.used
        call.backward_bytes += 2 * o.nbytes + q.nbytes
        if keep:
            _keep_attention(call, keys, o, lse)
        del q, keys, lse
        o = call.shards.tokens(o, call.heads[0])  # [B, H, T / P, D_v]
        names: list[str] = []
        for name in call.kept.products.names:
            if name not in call.kept.products_before and name not in call.unread.for_output:
                names.append(name)
        call.kept.products_after = names
        linears = call.site.linears
        recorded = NULL_CONTEXT
        # records the inputs of Linears that this half skips in backward
        if call.backward.witness is not None:
            call.backward.witness.left_out = call.unread.to_differentiate_after.difference(
                call.unread.for_output, names
            )
            recorded = tapped(
                linears, call.backward.witness.left_out, see=call.backward.witness.see
            )
        with left_out(linears, call.unread.for_output), recorded:
            for chunk in call.plan:
                hidden_chunk = call.hidden_states[..., chunk.start : chunk.stop, :]
                if keep:
                    call.kept.random.append(RandomState.capture(call.device))
                see = call.seeing(chunk, in_backward=False, half="after")
                with call.kept.products.capture_outputs(names, see) if keep else NULL_CONTEXT:
                    point = _second_half(call, chunk, o[_part(chunk)])
                    output = call.run(hidden_chunk, chunk, point)
                assert output is not None
                if call.backward.witness is not None:
                    call.backward.witness.see_output(hidden_chunk, output.hidden_states)
                if keep:
                    call.kept.keep(chunk, hidden_chunk, [])
                put(outputs, output, chunk, call.plan.length)
                del output
    if keep:
        call.kept.seal(call.backward_bytes)
    return outputs_of(call, outputs)


def _project(call: ShardedCall, keep: bool) -> list[Tensor]:
    """Run the layer's half before attention in chunks, without a graph. Return q [B, H, T / P, D],
    k and v [B, H_kv, T / P, D] of this rank's tokens.

    Args:
        call: the call of the layer.
        keep: True: save outputs of Linears for backward.
    """
    projected: list[Tensor] = []
    for chunk in call.plan:
        call.random_before.append(RandomState.capture(call.device))
        hidden_chunk = call.hidden_states[..., chunk.start : chunk.stop, :]
        see = call.seeing(chunk, in_backward=False, half="before")
        with call.kept.products.capture_outputs(see=see) if keep else NULL_CONTEXT:
            projected_chunk = _collect(call, hidden_chunk, chunk, projected, 3)
        _see_projected(see, projected_chunk)
        if keep:
            call.kept.keep_products(chunk)
    call.kept.products_before = list(dict.fromkeys(map(linear_of, call.kept.products.keys)))
    return projected


def _see_projected(see: See | None, projected: AttentionCall) -> None:
    """Pass a chunk's q, k and v to the function `see`, which compares recomputed values with those
    of forward. None: nothing is compared."""
    if see is not None:
        see("q", projected.q)
        see("k", projected.k)
        see("v", projected.v)


def _collect(
    call: ShardedCall, hidden_chunk: Tensor, chunk: Chunk, projected: list[Tensor], count: int
) -> AttentionCall:
    """Run one chunk of the layer up to its attention, and copy its q, k and v into tensors of all
    this rank's tokens. Return the arguments of the attention call.

    Args:
        call: the call of the layer.
        hidden_chunk: the chunk's input [..., B, C, h].
        chunk: the chunk's range of positions.
        projected: the tensors; [] before the first chunk, which allocates them.
        count: 3: copy q, k and v; 1: copy q alone.
    """
    point = SplitAtAttention()
    call.run(hidden_chunk, chunk, point)
    arguments = point.projected
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
        )
        call.params = Params(backend, arguments.scale, arguments.softcap, arguments.dropout, 0)
        call.heads = (arguments.q.shape[1], arguments.k.shape[1])
        call.value_size = arguments.v.shape[3]
    call.sinks = None if arguments.sink is None else call.shards.sinks(arguments.sink.detach())
    parts = (arguments.q, arguments.k, arguments.v)[:count]
    if not projected:
        projected += [
            part.new_empty((*part.shape[:2], call.plan.length, part.shape[3])) for part in parts
        ]
    for target, part in zip(projected, parts, strict=True):
        target[_part(chunk)] = part
    return arguments


def _second_half(call: ShardedCall, chunk: Chunk, o: Tensor) -> SplitAtAttention:
    """Return the replacement of attention for the half after attention, on one chunk.

    This half runs the layer from its start. The random numbers before attention must equal those of
    the half before attention, so torch's generators are set to that half's state. The replacement
    resets them at the attention call. The caller must have set the generators to the state for the
    numbers from attention on.

    Args:
        call: the call of the layer.
        chunk: the chunk's range of positions.
        o: attention's output for the chunk, [B, H, C, D_v].
    """
    if not call.random_before:
        return SplitAtAttention(o)
    random_state = RandomState.capture(call.device)
    call.random_before[chunk.index].restore()
    return SplitAtAttention(o, random_state.restore)


def _as_before(call: ShardedCall, chunk: Chunk) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which torch's generators draw, for this chunk, the same random
    numbers that the half before attention drew in forward."""
    if not call.random_before:
        return NULL_CONTEXT
    return call.random_before[chunk.index].replayed()


def _params_of(call: ShardedCall, chunk: Chunk) -> Params:
    """Return attention's parameters for one chunk of queries. The chunks differ in the seed of
    attention dropout."""
    assert call.params is not None
    if call.params.dropout == 0.0:
        return call.params
    return call.params._replace(seed=call.params.seed + (chunk.index << 32))


def _attend(call: ShardedCall, q: Tensor, keys: Keys, last: bool) -> tuple[Tensor, Tensor]:
    """Return attention's output o [B, H', n, D_v] and logsumexp lse [B, H', n] for the H' heads and
    n queries q [B, H', n, D] of this rank. Saved outputs are read instead of being computed.

    Args:
        call: the call of the layer.
        q: the queries.
        keys: K and V of full sequences.
        last: True if `keys` are not read again.
    """
    assert call.params is not None
    batch, heads, length, _ = q.shape
    o = q.new_empty((batch, length, heads, call.value_size))
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    unsaved = []
    for piece in call.pieces:
        queries = piece.here
        index = piece.here.index
        saved = [call.kept.store.take(*access) for access in call.kept.attended_reads(index)]
        call.kept.store.read_ahead()
        if saved:
            o[:, queries.start : queries.stop], lse[_part(queries)] = saved
        else:
            unsaved.append(piece)
        del saved
    if not unsaved and call.kept.gathers and keeps(call.site.config, "attn_out"):
        # saved on every rank, so no keys are gathered for another attention
        return o.transpose(1, 2), lse
    prefix = call.carried.prefix
    call.backward_bytes = 0
    for group in keys.groups(last):
        sinks = None if call.sinks is None else call.sinks[group.heads]
        site = KVBuffer.of(group.k, group.v, call.params.backend.width)
        wide = torch.promote_types(group.k.dtype, torch.float32).itemsize
        size = (group.k.numel() + group.v.numel()) * (group.k.element_size() + wide)
        call.backward_bytes = max(call.backward_bytes, size)
        for piece in unsaved:
            queries = piece.here
            q_of_group = q[:, group.heads, queries.start : queries.stop]
            params = _params_of(call, piece.whole)
            attended = attend_blocks(q_of_group, site, prefix.layout, piece.whole, params, sinks)
            prefix.note(call.params.backend.plan(prefix.layout, piece.whole, batch, Use.FORWARD))
            o[:, queries.start : queries.stop, group.heads] = attended.o
            lse[:, group.heads, queries.start : queries.stop] = attended.lse
        del group, site
    return o.transpose(1, 2), lse


def _keep_attention(call: ShardedCall, keys: Keys, o: Tensor, lse: Tensor) -> None:
    """Save attention's output and logsumexp, and K and V, for backward, if the settings name them.
    A rank with little host memory may save less than other ranks; no exchange depends on this.

    Args:
        call: the call of the layer.
        keys: K and V of full sequences.
        o: attention's output, [B, H', n, D_v].
        lse: logsumexp of attention, [B, H', n].
    """
    if "attn_out" in call.kept.saves:
        for piece in call.pieces:
            call.kept.store.put(
                "attn_out.0", piece.here.index, o[_part(piece.here)].transpose(1, 2)
            )
            call.kept.store.put("lse.0", piece.here.index, lse[_part(piece.here)])
    if not call.kept.keeps_kv:
        return
    if not call.kept.store.copies:
        call.keys = keys
        return
    for group in keys.groups(last=True):
        for piece in call.pieces:
            positions = slice(piece.whole.start, piece.whole.stop)
            call.kept.store.put("k.0", piece.here.index, group.k[:, positions])
            call.kept.store.put("v.0", piece.here.index, group.v[:, positions])


def run_backward_in_halves(call: ShardedCall, work: BackwardPass) -> None:
    """Compute a layer's gradients and add them to `work`, in this order: the half after attention,
    attention, the half before attention. The gradient of hidden_states is [..., B, T / P, h].

    Args:
        call: the call of the layer.
        work: receives the gradients.
    """
    q, keys = _exchanged_again(call)
    o, lse = _attend(call, q, keys, last=False)
    at_tokens = call.shards.tokens(o, call.heads[0])  # [B, H, T / P, D_v]
    if at_tokens is o:
        at_tokens = at_tokens.clone()
    _differentiate_after(call, work, at_tokens)
    d_o = call.shards.queries(at_tokens)
    del at_tokens
    gradients = _differentiate_attention(call, q, keys, Attended(o, lse), d_o)
    del o, lse, d_o, keys
    gradients.insert(0, call.shards.tokens(q, call.heads[0]))
    del q
    _differentiate_before(call, work, gradients)


def _exchanged_again(call: ShardedCall) -> tuple[Tensor, Keys]:
    """Return q of this rank's pieces, and K and V of full sequences, for attention in backward.
    Saved K and V are read; everything else is recomputed and exchanged between ranks as in forward.
    """
    saved = call.kept
    count = 3
    unread: Labels = frozenset()
    if saved.keeps_kv:
        count = 1
        unread = call.unread.for_queries.difference(saved.products_before)
    projected: list[Tensor] = []
    with torch.no_grad(), left_out(call.site.linears, unread):
        for chunk in call.plan:
            reads = saved.half_reads(chunk.index, saved.products_before)
            saved.bring(chunk, reads, again=dict(reads))
            with (
                _as_before(call, chunk),
                saved.products.use_outputs(saved.brought, saved.products_before),
            ):
                _collect(call, saved.brought["x"], chunk, projected, count)
    q = call.shards.queries(projected.pop(0))
    keys = call.shards.start_keys(projected, call.heads[0]) if projected else call.keys
    call.keys = None
    if keys is not None:
        return q, keys
    for piece in call.pieces:
        k, v = (saved.store.take(*access).transpose(1, 2) for access in saved.key_reads(piece))
        saved.store.read_ahead()
        call.carried.prefix.restore(0, piece.whole, k, v)
    site = call.carried.prefix.sites.pop()
    assert isinstance(site, KVBuffer)
    return q, Keys(site.k, site.v)


def _differentiate_after(call: ShardedCall, work: BackwardPass, o: Tensor) -> None:
    """Recompute and differentiate the layer's second half, behind its attention, chunk by chunk.
    The gradient of attention's output overwrites o [B, H, T / P, D_v].

    Args:
        call: the call of the layer.
        work: receives the gradients.
        o: attention's output for this rank's tokens.
    """
    saved = call.kept
    linears = call.site.linears
    unread = call.unread.to_differentiate_after.difference(saved.products_after)
    with summed(linears, work.sums, unread, call.backward.witness):
        for chunk in call.plan.backward:
            see = call.seeing(chunk, in_backward=True, half="after")
            saved.bring(chunk, saved.half_reads(chunk.index, saved.products_after), again=("x",))
            hidden_chunk = saved.brought["x"].detach().requires_grad_(work.needs_input)
            leaves = call.arguments.leaves(chunk, work.wanted)
            o_chunk = o[_part(chunk)].detach().requires_grad_()
            with (
                torch.enable_grad(),
                call.kept.random[chunk.index].replayed(),
                saved.products.use_outputs(
                    saved.brought, saved.products_after, sums=work.sums, see=see
                ),
            ):
                point = _second_half(call, chunk, o_chunk)
                output = call.run(hidden_chunk, chunk, point, leaves)
            assert output is not None
            if call.backward.witness is not None:
                call.backward.witness.see_output(hidden_chunk, output.hidden_states)
            outputs, upstream = work.upstream(output, chunk)
            targets = [leaf for leaf in (hidden_chunk, *leaves) if leaf.requires_grad]
            d_o = _add(call, work, chunk, targets, outputs, upstream, extra=o_chunk)
            o[_part(chunk)] = torch.zeros_like(o_chunk) if d_o is None else d_o
            del output, outputs, upstream


def _add(
    call: ShardedCall,
    work: BackwardPass,
    chunk: Chunk,
    targets: list[Tensor],
    outputs: list[Tensor],
    upstream: list[Tensor],
    extra: Tensor | None = None,
) -> Tensor | None:
    """Differentiate one half of the layer (before or after attention) on one chunk, and add the
    gradients to `work`. Return the gradient of `extra`.

    Args:
        call: the call of the layer.
        work: receives the gradients.
        chunk: the chunk's range of positions.
        targets: the leaves for the layer's input and arguments.
        outputs: the half's outputs.
        upstream: gradients of the outputs.
        extra: attention's output, an input of the half after attention; None for the half before
            attention.
    """
    sources = [*targets, *work.shadows, *(() if extra is None else (extra,))]
    gradients: list[Tensor | None] = [None] * len(sources)
    if chunk.stop == call.plan.length:
        refuse_other_leaves(call.site.layer, outputs, sources)
    if outputs and sources:
        gradients = list(torch.autograd.grad(outputs, sources, upstream, allow_unused=True))
    d_extra = None if extra is None else gradients.pop()
    work.add(chunk, gradients[: len(targets)], again=extra is None)
    work.sums.add(gradients[len(targets) :])
    return d_extra


def _differentiate_attention(
    call: ShardedCall, q: Tensor, keys: Keys, attended: Attended, d_o: Tensor
) -> list[Tensor]:
    """Compute the gradients of attention. Return dk and dv [B, H_kv, T / P, D] of this rank's
    tokens. The gradients of q and of attention sinks overwrite q and `call.sinks`.

    Args:
        call: the call of the layer.
        q: the queries, [B, H', n, D].
        keys: K and V of full sequences.
        attended: attention's output and logsumexp.
        d_o: gradient of the output, [B, H', n, D_v].
    """
    assert call.params is not None
    by_tensor: list[list[Tensor]] = [[], []]
    d_sinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=attended.lse.dtype)
    for group in keys.groups(last=True):
        site = KVBuffer.of(group.k, group.v, call.params.backend.width)
        for piece in reversed(call.pieces):
            part = slice(None), group.heads, slice(piece.here.start, piece.here.stop)
            leaf = q[part].detach().requires_grad_()
            leaves = [leaf]
            sinks = None
            if call.sinks is not None:
                sinks = call.sinks[group.heads].detach().requires_grad_()
                leaves.append(sinks)
            saved = Attended(attended.o[part].transpose(1, 2), attended.lse[part])
            with torch.enable_grad():
                out = PrefixAttention.apply(
                    leaf,
                    group.k,
                    group.v,
                    sinks,
                    site,
                    call.carried.prefix.layout,
                    piece.whole,
                    _params_of(call, piece.whole),
                    saved,
                )
            q[part], *d_sink = torch.autograd.grad(out, leaves, d_o[part].transpose(1, 2))
            if d_sinks is not None:
                d_sinks[group.heads] += d_sink[0]
        sums = list(site.grow_accumulators())
        dtype = group.k.dtype
        del out, site, group
        for parts, gradient in zip(
            by_tensor, call.shards.own_gradient(sums, dtype, call.heads[1]), strict=True
        ):
            parts.append(gradient)
    call.sinks = d_sinks
    return [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in by_tensor]


def _differentiate_before(call: ShardedCall, work: BackwardPass, gradients: list[Tensor]) -> None:
    """Recompute and differentiate the layer's first half, up to its attention, chunk by chunk.

    Args:
        call: the call of the layer.
        work: receives the gradients.
        gradients: of q, k and v, [B, H, T / P, D].
    """
    saved = call.kept
    linears = call.site.linears
    unread = call.unread.to_differentiate_before.difference(saved.products_before)
    with summed(linears, work.sums, unread):
        for chunk in call.plan.backward:
            saved.bring(chunk, saved.half_reads(chunk.index, saved.products_before))
            hidden_chunk = saved.brought["x"].detach().requires_grad_(work.needs_input)
            leaves = call.arguments.leaves(chunk, work.wanted)
            point = SplitAtAttention()
            see = call.seeing(chunk, in_backward=True, half="before")
            with (
                torch.enable_grad(),
                _as_before(call, chunk),
                saved.products.use_outputs(
                    saved.brought, saved.products_before, sums=work.sums, see=see
                ),
            ):
                call.run(hidden_chunk, chunk, point, leaves)
            projected = point.projected
            assert projected is not None
            _see_projected(see, projected)
            outputs: list[Tensor] = []
            upstream: list[Tensor] = []
            for x, gradient in zip((projected.q, projected.k, projected.v), gradients, strict=True):
                if x.requires_grad:
                    outputs.append(x)
                    upstream.append(gradient[_part(chunk)])
            is_last = chunk.stop == call.plan.length
            if is_last and projected.sink is not None and projected.sink.requires_grad:
                assert call.sinks is not None
                d_sinks = torch.zeros_like(projected.sink)
                call.shards.sinks(d_sinks).copy_(call.sinks)
                with torch.enable_grad():  # the sink is a parameter or a view of one
                    outputs.append(projected.sink.view_as(projected.sink))
                upstream.append(d_sinks)
            targets = [leaf for leaf in (hidden_chunk, *leaves) if leaf.requires_grad]
            _add(call, work, chunk, targets, outputs, upstream)
            del outputs, upstream
