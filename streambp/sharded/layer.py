"""A decoder layer of which every rank has a shard of the tokens: chunks before and after attention, an exchange in between.

Attention needs all tokens, so no chunk loop can hold it: ranks with different numbers of chunks would wait for each other.
The layer's own forward is cut at its attention call instead (`sharded/halves.py`), and between the halves every rank
trades its tokens of all heads for all tokens of its heads (`sharded/shards.py`) and attends these in chunks:

    forward, no graph                          exchanges
        chunks of the shard: up to attention        q, k, v to heads
        chunks of the whole sequences: attend       o to tokens
        chunks of the shard: from attention on
    backward
        chunks of the shard: up to attention        q, k, v to heads       (not k, v if they were saved)
        chunks of the whole: attend, or take        o to tokens
        chunks of the shard: differentiate what follows attention; do
                                                    do to heads
        chunks of the whole, last to first: dq, dk, dv
                                                    dq, dk, dv to tokens
        chunks of the shard: differentiate what comes before

[Note: halves] Each half is computed without the other's Linear products: before attention the layer stops, after it
nothing reads queries, keys and values, so their products are left out. What both halves compute is elementwise: the first
norm, and what is done to q and k. hidden_states reach the layer's output through both halves, so dx has two parts; so may
a parameter's gradient.

[Note: equal exchanges] Which exchanges a rank makes follows from the model and from settings that `gather_shards` found to
be the same on all ranks, never from what fitted on this rank's host or from its chunks.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from streambp.admission.entry import backward_in_chunks, stream_layer
from streambp.attention.attend import Params, PrefixAttention, attend_blocks
from streambp.attention.backend import choose_backend
from streambp.attention.kv import CallSite
from streambp.attention.merge import Attended
from streambp.chunks import Chunk
from streambp.errors import UnsupportedModelError
from streambp.layer.call import LayerCall
from streambp.layer.function import BackwardPass, Passes, outputs_of, run_forward
from streambp.layer.other_leaves import refuse_other_leaves
from streambp.layer.outputs import Whole
from streambp.layer.products import left_out, summed
from streambp.layer.recompute import RandomState
from streambp.layer.saved import linear_of
from streambp.layer.site import CallReport, LayerSite
from streambp.sharded.call import ShardedCall
from streambp.sharded.halves import AfterAttention, BeforeAttention
from streambp.sharded.shards import Shards


def stream_shard(site: LayerSite, args: Any, kwargs: Any, shards: Shards) -> Any:
    """What the layer's forward returns for this rank's shard of the tokens; to be called on every rank.

    Raises:
        UnsupportedModelError, UnsupportedMaskError, StreamBPError: it cannot be computed exactly.
    """
    because = site.kind.attention.why_not_split or site.kind.states.why_not_split
    if because is not None:
        return _refuse(site, args, kwargs, CallReport(because))
    if not site.kind.attention.reads_a_mask:
        return stream_layer(site, args, kwargs, passes=Passes(LayerCall, run_forward, backward_in_chunks, _refuse))
    make = functools.partial(ShardedCall, shards=shards)
    return stream_layer(site, args, kwargs, passes=Passes(make, _forward, _backward, _refuse))


def _refuse(site: LayerSite, args: Any, kwargs: Any, report: CallReport) -> Any:
    reason = report.because or "the shard is too short to try it in chunks"
    raise UnsupportedModelError(
        f"{type(site.layer).__name__} cannot stream: {reason}. With sequences split over ranks it would see "
        "this rank's shard alone. Train this model without splitting sequences."
    )


def _part(chunk: Chunk) -> tuple[slice, slice, slice]:
    """A chunk's positions in a tensor [B, H, tokens, D]."""
    return slice(None), slice(None), slice(chunk.start, chunk.stop)


def _forward(call: ShardedCall, keep: bool) -> tuple[Tensor, ...]:
    whole = Whole(call.plan.length)
    with torch.no_grad(), call.streaming():
        call.look_into_halves()
        if keep:
            call.kept.find_products()
        before = RandomState.capture(call.device)
        q, k, v = _to_heads(call, _project(call, keep))
        if not before.is_current():
            raise UnsupportedModelError(
                f"{type(call.layer).__name__} draws random numbers before its attention (dropout?), which streambp does "
                "not support where sequences are split over ranks. Set that dropout to 0."
            )
        o, lse = _attend(call, q, k, v)
        wide = torch.promote_types(k.dtype, torch.float32).itemsize
        call.backward_bytes = 2 * o.nbytes + q.nbytes + (k.numel() + v.numel()) * (k.element_size() + wide)
        if keep:
            _keep_attention(call, k, v, o, lse)
        del q, k, v, lse
        o = call.shards.to_tokens(o, call.heads[0])  # [B, H, T / P, D_v]
        names = [n for n in call.kept.products if n not in call.kept.products_before and n not in call.unread.for_output]
        call.kept.products_after = names
        with left_out(call.site.linears, call.unread.for_output):
            for chunk in call.plan:
                hidden_chunk = call.hidden_states[..., chunk.start : chunk.stop, :]
                if keep:
                    call.kept.snapshot()
                with call.kept.capturing(names) if keep else contextlib.nullcontext():
                    output = call.run(hidden_chunk, chunk, AfterAttention(o[_part(chunk)]))
                assert output is not None
                if keep:
                    call.kept.keep(chunk, hidden_chunk, [])
                whole.put(None, output.hidden_states, chunk)
                for place, extra in output.extras.items():
                    whole.put(place, extra, chunk)
                del output
    if keep:
        call.kept.store.seal(*call.kept.accesses(), call.backward_bytes)
    return outputs_of(call, whole)


def _project(call: ShardedCall, keep: bool) -> list[Tensor]:
    """q [B, H, T / P, D], k and v [B, H_kv, T / P, D] of the shard, without a graph."""
    projected: list[Tensor] = []
    for chunk in call.plan:
        hidden_chunk = call.hidden_states[..., chunk.start : chunk.stop, :]
        with call.kept.capturing() if keep else contextlib.nullcontext():
            _collect(call, hidden_chunk, chunk, projected, 3)
        if keep:
            call.kept.keep_products(chunk)
    call.kept.products_before = list(dict.fromkeys(map(linear_of, call.kept.product_names)))
    return projected


def _collect(call: ShardedCall, hidden_chunk: Tensor, chunk: Chunk, projected: list[Tensor], count: int) -> None:
    """Run a chunk up to attention; its first `count` of q, k, v go into the shard's, which the first chunk makes."""
    point = BeforeAttention()
    call.run(hidden_chunk, chunk, point)
    found = point.projected
    assert found is not None
    if call.params is None:
        backend = choose_backend(call.carried.prefix.attention, found.q, found.v, 0.0, found.softcap)
        call.params = Params(backend, found.scale, found.softcap, 0.0, 0)
        call.heads = (found.q.shape[1], found.k.shape[1])
    parts = (found.q, found.k, found.v)[:count]
    if not projected:
        projected += [part.new_empty((*part.shape[:2], call.plan.length, part.shape[3])) for part in parts]
    for whole, part in zip(projected, parts, strict=True):
        whole[_part(chunk)] = part


def _to_heads(call: ShardedCall, parts: list[Tensor]) -> list[Tensor]:
    """Exchange each and let go of it."""
    return [call.shards.to_heads(parts.pop(0)) for _ in range(len(parts))]


def _attend(call: ShardedCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o [B, H / P, T, D_v] and lse [B, H / P, T] of whole sequences; chunks that were saved are taken."""
    assert call.params is not None
    batch, heads, length, _ = q.shape
    o = q.new_empty((batch, length, heads, v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    site = _site(k, v)
    for chunk in call.attention_plan:
        if call.kept.store.has("attn_out.0", chunk.index) and call.kept.store.has("lse.0", chunk.index):
            attended = Attended(*(call.kept.store.take(name, chunk.index) for name in ("attn_out.0", "lse.0")))
        else:
            attended = attend_blocks(q[_part(chunk)], site, call.carried.prefix.layout, chunk, call.params)
        o[:, chunk.start : chunk.stop], lse[_part(chunk)] = attended.o, attended.lse
    return o.transpose(1, 2), lse


def _site(k: Tensor, v: Tensor) -> CallSite:
    """k, v [B, H_kv / P, T, D], as `to_heads` gives them, where attention finds them."""
    return CallSite(*(x.transpose(1, 2).contiguous() for x in (k, v)))


def _keep_attention(call: ShardedCall, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
    """Save what this rank's heads were attended with; any other rank may have kept less. [Note: equal exchanges]"""
    for chunk in call.attention_plan:
        if "attn_out" in call.kept.saves:
            call.kept.store.put("attn_out.0", chunk.index, o[_part(chunk)].transpose(1, 2))
            call.kept.store.put("lse.0", chunk.index, lse[_part(chunk)])
        if call.kept.keeps_kv and call.kept.store.copies:
            call.kept.store.put("k.0", chunk.index, k[_part(chunk)])
            call.kept.store.put("v.0", chunk.index, v[_part(chunk)])
    if call.kept.keeps_kv and not call.kept.store.copies:
        call.kv = k, v


def _backward(call: ShardedCall, work: BackwardPass) -> None:
    q, k, v = _heads_again(call)
    o, lse = _attend(call, q, k, v)
    at_tokens = call.shards.to_tokens(o, call.heads[0])  # [B, H, T / P, D_v]
    _differentiate_after(call, work, at_tokens)
    d_o = call.shards.to_heads(at_tokens)
    del at_tokens
    _differentiate_attention(call, q, k, v, Attended(o, lse), d_o)
    del o, lse, d_o
    heads, kv_heads = call.heads
    parts = [q, k, v]
    del q, k, v
    gradients = [call.shards.to_tokens(parts.pop(0), count) for count in (heads, kv_heads, kv_heads)]
    _differentiate_before(call, work, gradients)


def _heads_again(call: ShardedCall) -> list[Tensor]:
    """q [B, H / P, T, D], k and v [B, H_kv / P, T, D] once more, k and v from where they were saved."""
    count = 1 if call.kept.keeps_kv else 3
    unread = call.unread.for_queries.difference(call.kept.products_before) if call.kept.keeps_kv else frozenset()
    projected: list[Tensor] = []
    with torch.no_grad(), left_out(call.site.linears, unread):
        for chunk in call.plan:
            with call.autocast.restored(), call.kept.knowing(chunk, call.kept.products_before, again=True):
                _collect(call, call.kept.store.peek("x", chunk.index), chunk, projected, count)
    found = _to_heads(call, projected)
    if call.kept.keeps_kv and call.kv is None:
        for chunk in call.attention_plan:
            call.carried.prefix.restore(
                0, chunk, call.kept.store.take("k.0", chunk.index), call.kept.store.take("v.0", chunk.index)
            )
        site = call.carried.prefix.sites[0]
        assert isinstance(site, CallSite)
        call.kv = site.k.transpose(1, 2), site.v.transpose(1, 2)
    if call.kv is not None:
        found += call.kv
        call.kv = None
    return found


def _differentiate_after(call: ShardedCall, work: BackwardPass, o: Tensor) -> None:
    """The half after attention; o [B, H, T / P, D_v] of the shard is overwritten by its gradient."""
    linears, unread = call.site.linears, call.unread.to_differentiate_after.difference(call.kept.products_after)
    with summed(linears, work.sums), left_out(linears, unread, work.sums):
        for chunk in call.plan.backward():
            hidden_chunk = call.kept.store.peek("x", chunk.index).detach().requires_grad_(work.needs_input)
            leaves = call.arguments.leaves(chunk, work.inputs.wanted)
            o_chunk = o[_part(chunk)].detach().requires_grad_()
            with (
                torch.enable_grad(),
                call.autocast.restored(),
                call.kept.random[chunk.index].replayed(),
                call.kept.knowing(chunk, call.kept.products_after, sums=work.sums),
            ):
                output = call.run(hidden_chunk, chunk, AfterAttention(o_chunk), leaves)
            assert output is not None
            outputs, upstream = work.grads.of(output, chunk)
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
    """Differentiate one half of a chunk and add up; returns the gradient of `extra`. Without it, it is the half before."""
    wanted = [*targets, *work.shadows, *(() if extra is None else (extra,))]
    found: list[Tensor | None] = [None] * len(wanted)
    if chunk.stop == call.plan.length:
        refuse_other_leaves(call.layer, outputs, wanted)
    if outputs and wanted:
        found = list(torch.autograd.grad(outputs, wanted, upstream, allow_unused=True))
    d_extra = None if extra is None else found.pop()
    work.inputs.add(chunk, found[: len(targets)], again=extra is None)
    work.sums.add(found[len(targets) :])
    return d_extra


def _differentiate_attention(call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, attended: Attended, d_o: Tensor) -> None:
    """Overwrite q, k and v by their gradients: when a chunk is done, no other reads its queries, keys and values.
    [Note: prefix accumulation order]"""
    assert call.params is not None
    site = _site(k, v)
    for chunk in call.attention_plan.backward():
        here = _part(chunk)
        leaves = [x[here].detach().requires_grad_() for x in (q, k, v)]
        saved = Attended(attended.o[here].transpose(1, 2), attended.lse[here])
        with torch.enable_grad():
            out = PrefixAttention.apply(*leaves, None, site, call.carried.prefix.layout, chunk, call.params, saved)
        gradients = torch.autograd.grad(out, leaves, d_o[here].transpose(1, 2))
        for x, gradient in zip((q, k, v), gradients, strict=True):
            x[here] = gradient


def _differentiate_before(call: ShardedCall, work: BackwardPass, gradients: list[Tensor]) -> None:
    """The half before attention, from the gradients [B, H, T / P, D] of the shard's q, k and v."""
    linears, unread = call.site.linears, call.unread.to_differentiate_before.difference(call.kept.products_before)
    with summed(linears, work.sums), left_out(linears, unread, work.sums):
        for chunk in call.plan.backward():
            hidden_chunk = call.kept.store.take("x", chunk.index).detach().requires_grad_(work.needs_input)
            leaves = call.arguments.leaves(chunk, work.inputs.wanted)
            point = BeforeAttention()
            with (
                torch.enable_grad(),
                call.autocast.restored(),
                call.kept.random[chunk.index].replayed(),
                call.kept.knowing(chunk, call.kept.products_before, sums=work.sums),
            ):
                call.run(hidden_chunk, chunk, point, leaves)
            found = point.projected
            assert found is not None
            pairs = [
                (x, gradient[_part(chunk)])
                for x, gradient in zip((found.q, found.k, found.v), gradients, strict=True)
                if x.requires_grad
            ]
            targets = [leaf for leaf in (hidden_chunk, *leaves) if leaf.requires_grad]
            _add(call, work, chunk, targets, [x for x, _ in pairs], [gradient for _, gradient in pairs])
