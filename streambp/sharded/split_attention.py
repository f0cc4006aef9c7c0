"""Attention between the two halves of a layer: its output for a chunk of the second half, and its
gradients.

`layer.py` uses the classes in the same way:

    AllQueriesAttention  the queries of all tokens attend before the second half begins, because
                         ranks exchange tensors in between; the output and its gradient exist for
                         all tokens
    ChunkwiseAttention   each chunk's queries attend when the second half reaches the chunk, because
                         nothing is exchanged; the output and its gradient exist for one chunk

Both classes write the gradient of q over q. A third class, `ChunkwiseKeys`, serves a layer
that computes attention itself: the layer's second half gets keys and values of all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streambp.attention.attend import (
    AttentionOutput,
    AttentionParams,
    PrefixAttention,
    attend_blocks,
)
from streambp.attention.backend import BlockPurpose
from streambp.attention.kv import KVBuffer
from streambp.chunks import Chunk
from streambp.sharded.call import ShardedCall, keeps
from streambp.sharded.shards import Keys


def part_of(chunk: Chunk) -> tuple[slice, slice, slice]:
    """Return the index (a tuple of slices) of a chunk's positions in a tensor [B, H, T / P, D] of
    this rank's part of the sequences. P is the number of ranks over which sequences are split."""
    return slice(None), slice(None), slice(chunk.start, chunk.stop)


def params_of(call: ShardedCall, chunk: Chunk) -> AttentionParams:
    """Return the parameters of the layer's attention, such as kernels and scale, for a chunk of
    queries in `call`. Each chunk has its own seed for attention dropout. The parameters include
    T5's bias if the layer adds one."""
    params = call.params
    assert params is not None
    if call.bias is not None:
        params = params._replace(bias=call.bias[0])
    if params.dropout == 0.0:
        return params
    return params._replace(seed=params.seed + (chunk.index << 32))


class AllQueriesAttention:
    """Attention of all queries of this rank. The attention is complete before the half of the layer
    after attention begins, because ranks exchange the attention's output in between.

    Args:
        call: the call of the layer.
        q: [B, H', n, D], the n queries of H' heads whose attention this rank computes.
        keys: K and V of full sequences.

    Attributes:
        o: attention's output for this rank's tokens, [B, H, T / P, D_v]. The output's gradient
            replaces the output in backward, chunk by chunk.
    """

    def __init__(self, call: ShardedCall, q: Tensor, keys: Keys) -> None:
        self.call = call
        self.q = q
        self.keys: Keys | None = keys
        self.attended: AttentionOutput
        self.o: Tensor

    def forward(self, keep: bool) -> None:
        """Compute attention in forward, from the queries and keys that the constructor got, and
        store the output of this rank's tokens as `o`. Must be called on every rank, because ranks
        exchange tensors.

        Args:
            keep: True: save the tensors that backward needs.
        """
        call = self.call
        keys = self.keys
        assert keys is not None
        self.keys = None
        o, lse = self._attend(keys, last=not (keep and call.saved.keeps_kv))
        call.backward_bytes += 2 * o.nbytes + self.q.nbytes
        del self.q
        if keep:
            self._keep(keys, o, lse)
        del keys, lse
        self.o = call.shards.tokens(o, call.heads[0])

    def output(self, chunk: Chunk) -> tuple[Tensor, list[AttentionOutput]]:
        """Return attention's output [B, H, C, D_v] for a chunk of C of this rank's tokens in
        forward, and an empty list.

        The list is for attention outputs that the caller saves for backward with the chunk.
        `forward` has computed the output of all tokens before, and has saved the output if the
        settings require this.
        """
        return self.o[part_of(chunk)], []

    def backward(self) -> None:
        """Compute attention once more in backward, or read the output that forward saved. Store the
        output as `o`, for `leaf`. Must be called on every rank, because ranks exchange the
        output."""
        call = self.call
        assert self.keys is not None
        o, lse = self._attend(self.keys, last=False)
        self.attended = AttentionOutput(o, lse)
        self.o = call.shards.tokens(o, call.heads[0])
        if self.o is o:
            self.o = o.clone()

    def leaf(self, chunk: Chunk) -> tuple[Tensor, list[Tensor]]:
        """Return attention's output [B, H, C, D_v] for a chunk of this rank's tokens in backward,
        and a list with the leaves of the chunk's autograd graph: the output itself."""
        o = self.o[part_of(chunk)].detach().requires_grad_()
        return o, [o]

    def begin_backward(self, is_retry: bool) -> None:
        """Skip the preparation for a chunk's backward, because nothing is to be prepared. The
        backward of a chunk adds nothing to the gradients of K and V. The method `gradients`
        computes these for all chunks at once.

        Args:
            is_retry: True if the chunk is differentiated a second time, after running out of
                memory; not used.
        """

    def store_gradients(self, chunk: Chunk, gradients: list[Tensor | None]) -> None:
        """Store the gradient of a chunk's attention output, the leaf that `leaf` has returned.

        Args:
            chunk: the chunk's range of positions.
            gradients: a list of one gradient [B, H, C, D_v]. None stands for zeros.
        """
        (d_o,) = gradients
        self.o[part_of(chunk)] = 0.0 if d_o is None else d_o

    def gradients(self) -> list[Tensor]:
        """Compute the gradients of attention, after `store_gradients` for all chunks. Return dq [B,
        H, T / P, D], dk [B, H_kv, T / P, D] and dv of this rank's tokens. Must be called on every
        rank."""
        call = self.call
        d_o = call.shards.queries(self.o)
        del self.o
        gradients = self._differentiate(d_o)
        del d_o, self.attended
        gradients.insert(0, call.shards.tokens(self.q, call.heads[0]))
        return gradients

    def _attend(self, keys: Keys, last: bool) -> tuple[Tensor, Tensor]:
        """Return attention's output o [B, H', n, D_v] and logsumexp lse [B, H', n] for the H' heads
        and n queries of this rank. Saved outputs are read instead of being computed.

        Args:
            keys: K and V of full sequences.
            last: True if `keys` are not read again.
        """
        call = self.call
        q = self.q
        assert call.params is not None
        batch, heads, length, _ = q.shape
        o = q.new_empty((batch, length, heads, call.value_size))
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        unsaved = []
        for chunk_shard in call.chunk_shards:
            queries = chunk_shard.local_chunk
            index = chunk_shard.local_chunk.index
            saved = [call.saved.store.take(*access) for access in call.saved.attention_reads(index)]
            call.saved.store.read_ahead()
            if saved:
                o[:, queries.start : queries.stop], lse[part_of(queries)] = saved
            else:
                unsaved.append(chunk_shard)
            del saved
        if not unsaved and call.saved.gathers and keeps(call.layer_state.config, "attn_out"):
            # saved on every rank, so no keys are gathered for another attention
            return o.transpose(1, 2), lse
        prefix = call.carried.prefix
        call.backward_bytes = 0
        for group in keys.groups(last):
            sinks = None if call.sinks is None else call.sinks[group.heads]
            kv_storage = KVBuffer.from_tensors(group.k, group.v, call.params.backend.width)
            call.backward_bytes = max(call.backward_bytes, bytes_of(group.k, group.v))
            for chunk_shard in unsaved:
                queries = chunk_shard.local_chunk
                q_of_group = q[:, group.heads, queries.start : queries.stop]
                params = params_of(call, chunk_shard.full_chunk)
                attended = attend_blocks(
                    q_of_group, kv_storage, prefix.layout, chunk_shard.full_chunk, params, sinks
                )
                prefix.note_kernels(
                    call.params.backend.plan(
                        prefix.layout, chunk_shard.full_chunk, batch, BlockPurpose.FORWARD
                    )
                )
                o[:, queries.start : queries.stop, group.heads] = attended.o
                lse[:, group.heads, queries.start : queries.stop] = attended.lse
            del group, kv_storage
        return o.transpose(1, 2), lse

    def _keep(self, keys: Keys, o: Tensor, lse: Tensor) -> None:
        """Save for backward the tensors that the settings name: attention's output with its
        logsumexp, and K and V. A rank with little host memory may save less than other ranks; no
        exchange between ranks depends on this.

        Args:
            keys: K and V of full sequences.
            o: attention's output, [B, H', n, D_v].
            lse: logsumexp of attention, [B, H', n].
        """
        call = self.call
        if "attn_out" in call.saved.saves:
            for chunk_shard in call.chunk_shards:
                part = part_of(chunk_shard.local_chunk)
                call.saved.store.save(
                    "attn_out.0", chunk_shard.local_chunk.index, o[part].transpose(1, 2)
                )
                call.saved.store.save("lse.0", chunk_shard.local_chunk.index, lse[part])
        if call.saved.keeps_kv:
            keep_keys(call, keys)

    def _differentiate(self, d_o: Tensor) -> list[Tensor]:
        """Compute the gradients of attention. Return dk and dv [B, H_kv, T / P, D] of this rank's
        tokens. The tensors of q and of attention sinks (`call.sinks`) are overwritten by their
        gradients.

        Args:
            d_o: gradient of the output, [B, H', n, D_v].
        """
        call = self.call
        q = self.q
        attended = self.attended
        keys = self.keys
        assert call.params is not None
        assert keys is not None
        by_tensor: list[list[Tensor]] = [[], []]
        d_sinks = None
        if call.sinks is not None:
            d_sinks = torch.zeros_like(call.sinks, dtype=attended.lse.dtype)
        for group in keys.groups(last=True):
            kv_storage = KVBuffer.from_tensors(group.k, group.v, call.params.backend.width)
            for chunk_shard in reversed(call.chunk_shards):
                part = (
                    slice(None),
                    group.heads,
                    slice(chunk_shard.local_chunk.start, chunk_shard.local_chunk.stop),
                )
                saved = AttentionOutput(attended.o[part].transpose(1, 2), attended.lse[part])
                sinks = None if call.sinks is None else call.sinks[group.heads]
                out, leaves = attend_with_graph(
                    call, q[part], kv_storage, sinks, chunk_shard.full_chunk, saved
                )
                q[part], *d_sink = torch.autograd.grad(out, leaves, d_o[part].transpose(1, 2))
                if d_sinks is not None:
                    d_sinks[group.heads] += d_sink[0]
            sums = list(kv_storage.grow_accumulators())
            dtype = group.k.dtype
            del out, kv_storage, group
            for parts, gradient in zip(
                by_tensor, call.shards.own_gradients(sums, dtype, call.heads[1]), strict=True
            ):
                parts.append(gradient)
        call.sinks = d_sinks
        return [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in by_tensor]


class ChunkwiseAttention:
    """Attention computed one chunk of queries at a time, on a rank that has all tokens and heads. A
    chunk's queries attend right before the half of the layer after attention runs on the chunk.

    Args:
        call: the call of the layer.
        q: the queries [B, H, T, D] of all tokens.
        keys: K and V of all tokens.
    """

    def __init__(self, call: ShardedCall, q: Tensor, keys: Keys) -> None:
        self.call = call
        self.q = q
        self.keys = keys
        assert call.params is not None
        group = keys.key_groups[0]
        width = call.params.backend.width
        self.kv_storage = call.attempt(lambda _: KVBuffer.from_tensors(group.k, group.v, width))
        self.dtype = group.k.dtype
        self.d_sinks: Tensor | None = None
        self.d_bias: Tensor | None = None
        call.backward_bytes = bytes_of(group.k, group.v) + q.nbytes

    def forward(self, keep: bool) -> None:
        """Save K and V for backward, if this call saves them (`ShardedSaves.keeps_kv`). Attention
        itself is computed later: `output` computes attention for one chunk.

        Args:
            keep: True: the call saves tensors for backward; False: it saves none.
        """
        if keep and self.call.saved.keeps_kv:
            keep_keys(self.call, self.keys)
        del self.keys

    def output(self, chunk: Chunk) -> tuple[Tensor, list[AttentionOutput]]:
        """Compute attention for a chunk in forward. Return its output [B, H, C, D_v], and a list
        with one `AttentionOutput` (the same output and its logsumexp), to be saved with the chunk.
        """
        call = self.call
        prefix = call.carried.prefix
        params = params_of(call, chunk)
        plan = params.backend.plan(prefix.layout, chunk, call.rows, BlockPurpose.FORWARD)
        q = self.q[part_of(chunk)]
        cost_recorder = call.saved.cost_recorder
        began = None if cost_recorder is None else cost_recorder.clock()
        attended = attend_blocks(
            q, self.kv_storage, prefix.layout, chunk, params, call.sinks, plan=plan
        )
        if cost_recorder is not None:
            cost_recorder.mark_attention(began)
        prefix.note_kernels(plan)
        return attended.o.transpose(1, 2), [attended]

    def backward(self) -> None:
        """Create the sums of the gradients of attention sinks and of T5's bias, if the layer has
        them, before the first chunk in backward."""
        del self.keys
        call = self.call
        wide = torch.promote_types(self.dtype, torch.float32)
        if call.sinks is not None:
            self.d_sinks = torch.zeros_like(call.sinks, dtype=wide)
        if call.bias is not None:
            self.d_bias = torch.zeros_like(call.bias, dtype=wide)

    def leaf(self, chunk: Chunk) -> tuple[Tensor, list[Tensor]]:
        """Return attention's output [B, H, C, D_v] for a chunk in backward, and the leaves of its
        graph: the chunk's queries, attention sinks and T5's bias. A saved output is not computed
        again. Must be called with gradients enabled."""
        call = self.call
        saved = None
        for attended in call.saved.take_attention_outputs() or ():
            saved = attended
        out, leaves = attend_with_graph(
            call, self.q[part_of(chunk)], self.kv_storage, call.sinks, chunk, saved
        )
        return out.transpose(1, 2), leaves

    def begin_backward(self, is_retry: bool) -> None:
        """Start the backward of a chunk, which adds to the gradients of K and V.

        Args:
            is_retry: True if the chunk is differentiated a second time, after running out of
                memory. Gradients that the first attempt has added are then not added again.
        """
        self.kv_storage.begin_backward(is_retry)

    def store_gradients(self, chunk: Chunk, gradients: list[Tensor | None]) -> None:
        """Store the gradients of a chunk's leaves, which `leaf` has returned.

        Args:
            chunk: the chunk's range of positions.
            gradients: the gradients of the queries [B, H, C, D], attention sinks [H] and T5's bias
                [1, H, 2 T - 1], in this order. A layer may have no sinks or no bias.
        """
        remaining = iter(gradients)
        d_q = next(remaining)
        self.q[part_of(chunk)] = 0.0 if d_q is None else d_q
        for total in (self.d_sinks, self.d_bias):
            if total is None:
                continue
            gradient = next(remaining)
            if gradient is not None:
                total += gradient

    def gradients(self) -> list[Tensor]:
        """Return the gradients of attention, after the backward of all chunks: dq [B, H, T, D], dk
        [B, H_kv, T, D] and dv. The gradients of attention sinks and of T5's bias replace
        `call.sinks` and `call.bias`."""
        call = self.call
        sums = list(self.kv_storage.grow_accumulators())
        del self.kv_storage
        call.sinks = self.d_sinks
        call.bias = self.d_bias
        return [self.q, *call.shards.own_gradients(sums, self.dtype, call.heads[1])]


class ChunkwiseKeys:
    """Keys and values of all tokens, for a layer whose attention is computed by the model's own
    code and not by streambp's attention. The rank has all tokens.

    The layer is cut in two halves at its attention. The first half computes K and V of all tokens.
    The second half runs in chunks: the model's code computes a chunk's queries and their attention
    from this K and V. The second half of other layers gets attention's output instead.

    Args:
        call: the call of the layer.
        keys: K and V of all tokens.
    """

    def __init__(self, call: ShardedCall, keys: Keys) -> None:
        self.call = call
        self.keys = keys
        group = keys.key_groups[0]
        self.tensors = (group.k.transpose(1, 2), group.v.transpose(1, 2))  # [B, H_kv, T, D]
        self.sums: list[Tensor] = []
        call.backward_bytes = bytes_of(group.k, group.v)

    def forward(self, keep: bool) -> None:
        """Save K and V for backward, if this call saves them (`ShardedSaves.keeps_kv`). Called once
        in forward, when the layer's first half has computed K and V of all tokens. Attention is not
        computed here: the model's code attends in the layer's second half, chunk by chunk.

        Args:
            keep: True: the call saves tensors for backward; False: it saves none.
        """
        if keep and self.call.saved.keeps_kv:
            keep_keys(self.call, self.keys)
        del self.keys

    def output(self, chunk: Chunk) -> tuple[tuple[Tensor, Tensor], list[AttentionOutput]]:
        """Return (K, V) of all tokens, [B, H_kv, T, D] each, for a chunk in forward, and an empty
        list. The list is for attention outputs that the caller saves for backward; this layer
        computes attention itself, and its output is not saved."""
        return self.tensors, []

    def backward(self) -> None:
        """Create the sums of the gradients of K and V as zeros, before the first chunk in
        backward. `store_gradients` adds the gradients of each chunk."""
        del self.keys
        for x in self.tensors:
            wide = torch.promote_types(x.dtype, torch.float32)
            self.sums.append(torch.zeros_like(x.transpose(1, 2), dtype=wide))

    def leaf(self, chunk: Chunk) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """Return K [B, H_kv, T, D] and V of all tokens for a chunk in backward, and both as the
        leaves of the chunk's graph."""
        k, v = (x.detach().requires_grad_() for x in self.tensors)
        return (k, v), [k, v]

    def begin_backward(self, is_retry: bool) -> None:
        """Skip the preparation for a chunk's backward, because nothing is to be prepared. The
        chunk's gradients of K and V are added by `store_gradients`, after the backward of the chunk
        has succeeded.

        Args:
            is_retry: True if the chunk is differentiated a second time, after running out of
                memory; not used.
        """

    def store_gradients(self, chunk: Chunk, gradients: list[Tensor | None]) -> None:
        """Add the gradients [B, H_kv, T, D] of a chunk's leaves, which `leaf` has returned, to
        their sums."""
        for total, gradient in zip(self.sums, gradients, strict=True):
            if gradient is not None:
                total += gradient.transpose(1, 2)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of K and V over all chunks, dk [B, H_kv, T, D] and dv."""
        call = self.call
        dtype = self.tensors[0].dtype
        del self.tensors
        return call.shards.own_gradients(self.sums, dtype, call.heads[1])


SplitAttention = AllQueriesAttention | ChunkwiseAttention | ChunkwiseKeys


def bytes_of(k: Tensor, v: Tensor) -> int:
    """Return the device memory in bytes that K (`k`, [B, T, G, D]), V (`v`, [B, T, G, D_v]) and
    their gradients take in backward. The gradients are in float32 or wider."""
    wide = torch.promote_types(k.dtype, torch.float32).itemsize
    return (k.numel() + v.numel()) * (k.element_size() + wide)


def keep_keys(call: ShardedCall, keys: Keys) -> None:
    """Save K and V of full sequences for backward. The place is the host, chunk by chunk, if this
    call moves saved tensors there, and otherwise the device, as `call.keys`.

    Args:
        call: the call of the layer.
        keys: K and V. After a move to the host, `keys` has no tensors any more, so that their
            device memory can be freed.
    """
    if not call.saved.store.copies:
        call.keys = keys
        return
    for group in keys.groups(last=True):
        for chunk_shard in call.chunk_shards:
            positions = slice(chunk_shard.full_chunk.start, chunk_shard.full_chunk.stop)
            call.saved.store.save("k.0", chunk_shard.local_chunk.index, group.k[:, positions])
            call.saved.store.save("v.0", chunk_shard.local_chunk.index, group.v[:, positions])


def attend_with_graph(
    call: ShardedCall,
    q: Tensor,
    kv_storage: KVBuffer,
    sinks: Tensor | None,
    chunk: Chunk,
    saved: AttentionOutput | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return attention's output [B, C, H, D_v] for a chunk of queries with an autograd graph, and
    the leaves of the graph: the queries, attention sinks and T5's bias. A layer without sinks or
    bias has no leaf for them.

    Args:
        call: the call of the layer.
        q: the queries, [B, H, C, D].
        kv_storage: K and V of full sequences, and the sums of their gradients.
        sinks: the attention sinks [H]; None: there are none.
        chunk: the chunk's range of positions.
        saved: output that forward saved for the chunk; None: compute attention again.
    """
    leaf = q.detach().requires_grad_()
    leaves = [leaf]
    if sinks is not None:
        sinks = sinks.detach().requires_grad_()
        leaves.append(sinks)
    bias = call.bias
    if bias is not None:
        bias = bias.detach().requires_grad_()
        leaves.append(bias)
    with torch.enable_grad():
        out: Tensor = PrefixAttention.apply(
            leaf,
            kv_storage.k,
            kv_storage.v,
            sinks,
            kv_storage,
            call.carried.prefix.layout,
            chunk,
            params_of(call, chunk),
            saved,
            bias,
        )
    return out, leaves
