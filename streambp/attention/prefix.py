"""Causal-prefix attention: a chunk's queries attend to all keys and values up to the chunk's end.

Life of one attention call of one layer, for one batch:

    forward (no graph)   chunk by chunk: append K, V to the buffer, attend, save (o, lse) if wanted
    refill  (no graph)   if the buffer was not kept: append K, V again, stop the layer there
    recompute (graph)    last chunk to first: `PrefixAttention` attends, or takes the saved (o, lse)
    backward             return dQ of the chunk; add dK, dV of all tokens up to the chunk's end to
                         accumulators; return the accumulators' slice [s, e) of the chunk
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streambp.attention.attend import (
    AttentionOutput,
    AttentionParams,
    PrefixAttention,
    PrefixRead,
    attend_blocks,
)
from streambp.attention.backend import (
    Backend,
    BlockPlan,
    BlockPurpose,
    KernelUse,
    SdpaComparison,
    choose_backend,
)
from streambp.attention.kv import WORKING_TILES, KVBuffer, KVStorage, KVTiles, PrefixMemory
from streambp.attention.masks import DenseMask
from streambp.attention.picked_keys import PickedMask
from streambp.attention.spans import BlockKind, Spans, Tiling
from streambp.chunks import Chunk
from streambp.errors import BackwardError, StreamBPError
from streambp.offload.manager import Access, HostTensors


class Stage(enum.Enum):
    """Purpose for which a layer's forward runs on a chunk. A layer's chunks run for FORWARD first,
    and in the layer's backward for REFILL and then for RECOMPUTE.
    FORWARD computes the layer's output without a graph, and stores K and V. REFILL recomputes and
    stores K and V at the start of backward, if forward did not keep them. RECOMPUTE recomputes each
    chunk in backward with an autograd graph, last chunk first.
    """

    FORWARD = "forward"
    REFILL = "refill"
    RECOMPUTE = "recompute"


class RefillDone(Exception):  # noqa: N818 - control flow, never seen by users
    """Exception that ends a layer's forward at its attention call, in a pass that needs only the
    call's q, k and v. The rest of the forward is skipped."""


@dataclasses.dataclass(frozen=True)
class KVBytesPerToken:
    """Bytes of one position, summed over the rows of the batch, in one attention call of a layer.
    The number of chunks whose K and V stay on the device follows from these bytes.

    Attributes:
        keys: bytes of K and V without padding, as they are stored on the host.
        sums: bytes of the gradients of K and V, which are summed over chunks.
        resident: bytes of K and V on the device, with the zeros of a padded V. [Note: padded
            values]
        value_size: D_v, the head size of the values.
    """

    keys: int
    sums: int
    resident: int
    value_size: int  # D_v

    @classmethod
    def from_tensors(cls, k: Tensor, v: Tensor, width: int | None = None) -> KVBytesPerToken:
        """Return the bytes of one token, over all rows, for tensors like k [B, H_kv, C, D] and v
        [B, H_kv, C, D_v].

        Args:
            k: the keys.
            v: the values.
            width: number of columns to which V is padded in its buffer; None: no padding.
        """
        wide = torch.promote_types(k.dtype, torch.float32).itemsize
        elements = (k.numel() + v.numel()) // k.shape[2]
        keys = elements * k.element_size()
        if width is None:
            padding = 0
        else:
            padding = v.shape[0] * v.shape[1] * (width - v.shape[3]) * v.element_size()
        return cls(keys, elements * wide, keys + padding, v.shape[3])


@dataclasses.dataclass
class IndexerTensors:
    """Tensors of a layer's indexers, the modules that pick keys for sparse attention. [Note: indexers]

    Attributes:
        keys: dict from an indexer's index, in the order of the layer's modules, to its keys
            [B, T, D]. Filled in forward, and read again by backward.
        chunk_picks: list with the positions of keys [B, C, k] that each indexer picked for the
            chunk that was computed last, in the same order.
    """

    keys: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    chunk_picks: list[Tensor] = dataclasses.field(default_factory=list)


class Prefix:
    """State that the chunks of one layer share over one batch: mainly K and V of all earlier
    chunks, for each attention call of the layer.

    Args:
        layout: keys that each query may read.
        length: number of positions of the sequence.
        attention: the setting `attention` of `StreamConfig`, "auto" for example.

    Attributes:
        kv_storages: K and V of each attention call, in call order within the layer's forward. Every
            chunk makes the same calls.
        memory: limit on the device memory for K and V; None: no limit.
        calls: number of attention calls in a forward of the layer; None: no chunk has ended yet.
        filled_until: number of first positions for which K and V of all attention calls are stored.
        overwritten: True if the code of the layer writes to the output of attention in place.
    """

    def __init__(self, layout: Spans | DenseMask, length: int, attention: str) -> None:
        self.layout = layout
        self.length = length
        self.attention = attention
        self.kv_storages: list[KVStorage] = []
        self.calls: int | None = None
        self.filled_until = 0
        self.overwritten = False
        # buffers are [B, H_kv, T, D]: a layer that attends by itself may rely on a cache's layout
        self.heads_first = False
        # scale, dropout and softcap, by chunk and attention call
        self.settings_by_call: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.backends: dict[int, Backend] = {}  # of each attention call, chosen at its first chunk
        self.kernel_uses: frozenset[KernelUse] = frozenset()  # the kernels that attended in forward
        self.sdpa = SdpaComparison()  # of all attention calls
        self.memory: PrefixMemory | None = None
        self.restored_chunks: set[tuple[int, int]] = (
            set()
        )  # attention calls and chunks of `load_saved`
        self.sizes_seen: list[KVBytesPerToken] = []
        self.indexed = IndexerTensors()

    def restore(
        self, index: int, chunk: Chunk, k: Tensor, v: Tensor, backward: bool = True
    ) -> None:
        """Store K [B, H_kv, C, D] and V [B, H_kv, C, D_v] of a chunk for later chunks, in forward
        or again in backward.

        Args:
            index: number of the attention call within the layer's forward.
            chunk: the chunk's range of positions.
            k: the chunk's keys.
            v: the chunk's values.
            backward: True if gradients of K and V will be needed. The memory limit then covers the
                gradients too.
        """
        if (
            index < len(self.kv_storages) and self.kv_storages[index].lent
        ):  # left by a failed attempt
            del self.kv_storages[index:]
        if index == len(self.kv_storages):
            width = self._width(index)
            if index == len(self.sizes_seen):
                self.sizes_seen.append(KVBytesPerToken.from_tensors(k, v, width))
            resident, tile = self.resident_tiles(backward)[index], None
            if (
                resident is None
                and width is None
                and k.shape[2] == self.length
                and not self.heads_first
            ):
                tile = KVBuffer.from_one_chunk(k, v)
            if tile is not None:
                self.kv_storages.append(tile)
                return
            if resident is None:
                columns = None if width is None else v.shape[3]
                self.kv_storages.append(
                    KVBuffer(self._buffer(k), self._buffer(v, width), columns=columns)
                )
            else:
                self.kv_storages.append(self._make_tiles(index, resident, backward))
        self.kv_storages[index].write(chunk, k, v)

    def _buffer(self, like: Tensor, width: int | None = None) -> Tensor:
        """Create an uninitialized buffer [B, T, H_kv, D] for K or V of the whole sequence, for
        tensors like a chunk's [B, H_kv, C, D].

        Args:
            like: the chunk's K or V.
            width: number of columns, with zeros in the columns behind D; None: D.
        """
        rows, heads, _, size = like.shape
        if self.heads_first:
            return like.new_empty(rows, heads, self.length, size).transpose(1, 2)
        buffer = like.new_empty(rows, self.length, heads, width or size)
        if width is not None:
            buffer[..., size:] = 0.0  # [Note: padded values]
        return buffer

    def _width(self, index: int) -> int | None:
        """Return the number of columns to which V of attention call number `index` is padded in its
        buffer; None: no padding."""
        backend = self.backends.get(index)
        return None if backend is None else backend.width

    def note_kernels(self, plan: BlockPlan) -> None:
        """Add the kernels that compute the blocks of `plan` to `kernel_uses`, which `describe`
        prints."""
        if not plan.kernel_uses <= self.kernel_uses:
            self.kernel_uses |= plan.kernel_uses

    def pack(self) -> None:
        """Free memory that is not needed between forward and backward: the zero columns of a padded
        V, and the keys of indexers. [Note: padded values]"""
        self.indexed = IndexerTensors()
        for kv_storage in self.kv_storages:
            if isinstance(kv_storage, KVBuffer):
                kv_storage.pack()

    @property
    def backward_bytes(self) -> int:
        """Return the device memory that K, V and their gradients need in backward, in bytes, over
        all attention calls of the layer. If saved tensors are moved to the host, these bytes count
        against the setting `gpu_memory`."""
        return self.length * sum(size.resident + size.sums for size in self.sizes_seen)

    def flops(self, chunk: Chunk, attended: AttentionOutput) -> float:
        """Return the FLOPs of a chunk's attention in forward: two products for each pair of a query
        and a key that the query reads. The policy for saves="auto" compares the FLOPs with the
        bytes of attention outputs.

        Args:
            chunk: the chunk's range of positions.
            attended: the chunk's attention output, of which the number and size of heads are read.
        """
        _, _, heads, size = attended.o.shape
        pairs = sum(
            block.pairs * (block.b1 - block.b0) * (0.5 if block.kind is BlockKind.CAUSAL else 1.0)
            for block in self.layout.blocks(chunk.start, chunk.stop, Tiling())
        )
        return 4.0 * size * heads * pairs

    def resident_tiles(self, backward: bool) -> list[int | None]:
        """Return, for each attention call of the layer, the number of first chunks whose K and V
        stay on the device. None in place of a number: K and V of all tokens are in one buffer on
        the device.

        Args:
            backward: True if the gradients dK and dV need device memory as well.
        """
        headroom, tiles = None if self.memory is None else self.memory.headroom, list[int | None]()
        for size in self.sizes_seen:
            if self.memory is None or headroom is None:
                tiles.append(None)
                continue
            token, plan = size.resident + backward * size.sums, self.memory.plan
            if token * plan.length <= headroom:
                tiles.append(None)
                headroom -= token * plan.length
            else:
                resident = max(0, headroom // (token * plan.longest) - WORKING_TILES)
                tiles.append(resident)
                headroom = max(0, headroom - (resident + WORKING_TILES) * token * plan.longest)
        return tiles

    def saved_reads(self, index: int) -> list[list[Access]]:
        """Return the order in which backward loads the saved K and V of one attention call from
        host storage. The storage needs the order to start its copies early.

        Args:
            index: number of the attention call within the layer's forward.

        Returns:
            A list for each chunk, first to last, with the key of K and the key of V in the storage.
                A key is (tensor name, chunk index).
        """
        assert self.memory is not None
        reads: list[list[Access]] = []
        for chunk in self.memory.plan:
            reads.append([(f"k.{index}", chunk.index), (f"v.{index}", chunk.index)])
        return reads

    def load_saved(self) -> None:
        """Load the K and V of all chunks that forward saved, and append an object with K and V to
        `kv_storages` for each attention call of the layer. After an error, a second call of this
        method continues where the first one ended."""
        assert self.memory is not None
        assert self.memory.saved is not None
        for index, resident in enumerate(self.resident_tiles(backward=True)):
            if resident is not None:
                self.kv_storages.append(
                    self._make_tiles(index, resident, backward=True, saved=self.memory.saved)
                )
                continue
            for chunk, reads in zip(self.memory.plan, self.saved_reads(index), strict=True):
                if (index, chunk.index) in self.restored_chunks:
                    continue
                k = self.memory.saved.peek(*reads[0])  # [B, C, H_kv, D]
                v = self.memory.saved.peek(*reads[1])  # [B, C, H_kv, D]
                self.restore(index, chunk, k.transpose(1, 2), v.transpose(1, 2))
                self.restored_chunks.add((index, chunk.index))
                for access in reads:
                    self.memory.saved.remove(*access)
                self.memory.saved.read_ahead()
        self.restored_chunks.clear()
        self.filled_until = self.length

    def _make_tiles(
        self, index: int, resident: int, backward: bool, saved: HostTensors | None = None
    ) -> KVTiles:
        assert self.memory is not None
        plan, size = self.memory.plan, self.sizes_seen[index]
        if not backward:
            saved = self.memory.saved
        scratch = self.memory.open_scratch()
        # Tokens in tiles that move to the scratch store: neither resident tiles nor the last.
        moving = plan[len(plan) - 1].start - plan[resident].start if resident < len(plan) - 1 else 0
        scratch.reserve(moving * (size.keys * (saved is None) + size.sums * backward))
        keys, width = saved or scratch, self._width(index)
        return KVTiles(
            index, plan, keys, scratch, resident, saved is not None, size.value_size, width
        )

    def begin_backward(self, is_retry: bool) -> None:
        """Prepare for the backward of a chunk, which adds to the gradients of K and V. A retry
        skips the additions that the first attempt made.

        Args:
            is_retry: True if the chunk is differentiated for the second time, after running out of
                memory. [Note: once for each chunk]
        """
        for kv_storage in self.kv_storages:
            if isinstance(kv_storage, KVBuffer):
                kv_storage.begin_backward(is_retry)

    def drop_buffers(self) -> None:
        """Free K, V and their gradients of all attention calls of the layer on the device. Backward
        recomputes K and V later, or `load_saved` loads them from the host."""
        self.kv_storages = []
        self.filled_until = 0
        if self.memory is not None:
            self.memory.tiles = None
        self.indexed = IndexerTensors()


class AttentionCall(NamedTuple):
    """Tensors and settings of one call of attention, for one chunk.

    Attributes:
        q: [B, H, C, D].
        k: [B, H_kv, C, D].
        v: [B, H_kv, C, D_v].
        scale: factor of q @ k^T.
        dropout: probability to drop a weight.
        softcap: limit of the scores; None: no limit.
        sink: [H], the attention sink: logits of one more key without a value; None: no sink.
        picks: [B, C, k], indices of the keys that an indexer picked for each query; None: the query
            reads all keys that the mask allows.
        bias: [1, H, 2 T - 1], T5's bias for each distance of key and query, added to the scores;
            None: no bias.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    sink: Tensor | None = None
    picks: Tensor | None = None
    bias: Tensor | None = None


class ChunkAttention:
    """Object that computes a chunk's attention. The layer receives the object as `attention_mask`
    and passes it to `stream_attention`.

    Attributes:
        takes_picks: True for a layer with sparse attention, where an indexer picks each query's
            keys.
        bidirectional: True for a layer whose attention modules are bidirectional (is_causal=False),
            so that the mask decides which keys are read.
        bias_length: number T of positions between which T5's bias is needed; the bias then has a
            value for each of 2 T - 1 distances. None: this object does not read the bias.
    """

    takes_picks = False
    bidirectional = False
    bias_length: int | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output of the chunk, [B, C, H, D_v].

        Args:
            call: the chunk's q, k and v, and the settings of the attention call.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Check and record the attention calls of the layer's forward on a chunk. Called after this
        forward; subclasses define the checks."""
        raise NotImplementedError


class FullSequenceKeys(ChunkAttention):
    """Source of the keys and values of all tokens, for a chunk of a bidirectional layer that
    computes attention itself. The layer's forward runs in two halves, which meet at the layer's
    call of its cache. The first half computes the chunk's k and v. The second half runs when K and
    V of all chunks exist, and reads them.

    Args:
        chunk: the chunk's range of positions.
        keys: K [B, H_kv, T, D] and V of all tokens, for the second half. None: the first half runs,
            and ends at the call of the cache.
        at_attention: function that the second half calls when it reaches the cache; None: no
            function is called.

    Attributes:
        projected: k [B, H_kv, C, D] and v of the chunk, from the first half; None in the second.
    """

    def __init__(
        self,
        chunk: Chunk,
        keys: tuple[Tensor, Tensor] | None = None,
        at_attention: Callable[[], None] | None = None,
    ) -> None:
        self.chunk = chunk
        self.keys = keys
        self.at_attention = at_attention
        self.calls = 0
        self.projected: tuple[Tensor, Tensor] | None = None

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take the chunk's k and v [B, H_kv, C, D] in place of the layer's cache, and return K [B,
        H_kv, T, D] and V of all tokens.

        The layer's forward runs twice on a chunk. The first run only computes k and v: this method
        stores them as `projected`, and raises `RefillDone`, which ends the forward. The second run
        gets K and V.
        """
        self.calls += 1
        if self.keys is None:
            self.projected = (k, v)
            raise RefillDone
        if self.at_attention is not None:
            self.at_attention()
        return self.keys

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the chunk's k [B, H_kv, C, D] and v, after the first of two runs of the layer's
        forward on the chunk. This run ends when the layer has passed k and v to its cache."""
        assert self.projected is not None
        return self.projected

    def finish(self) -> None:
        """Check, at the end of the layer's forward on a chunk, that the layer's code has called its
        cache for keys and values exactly once.

        Raises:
            StreamBPError: the layer has called its cache more or fewer times.
        """
        if self.calls != 1:
            raise StreamBPError(
                f"A layer with bidirectional attention of its own read keys {self.calls} times in "
                "a chunk; expected was once. Use gradient checkpointing for this model "
                "(streambp.unpatch(model))."
            )


class PrefixChunkAttention(ChunkAttention):
    """Object that computes a chunk's attention to all tokens up to the chunk's end, and stores the
    chunk's own keys and values for later chunks.

    Args:
        prefix: K and V of all earlier chunks.
        chunk: the chunk's range of positions.
        stage: purpose of the layer's run on the chunk: forward, recomputation of K and V alone, or
            recomputation with a graph.
        saved: the outputs of the layer's attention calls that forward saved for this chunk; None:
            compute attention.
        picks: one tensor [B, C, k] of each indexer of sparse attention, the indices of the keys
            that the indexer picked in forward. None: indexers pick keys anew. [Note: indexers]

    Attributes:
        chunk_picks: indices of the keys that the indexers pick for this chunk, one tensor for each
            call of an indexer.
        attended: the output of each attention call, computed without a graph.
        call: number of attention calls so far.
        see: function that records q, k and v of each attention call in forward, and compares them
            with the record in backward. Gets a name, such as "q.0", and the tensor. None: no
            comparison.
    """

    def __init__(
        self,
        prefix: Prefix,
        chunk: Chunk,
        stage: Stage,
        saved: list[AttentionOutput] | None = None,
        picks: list[Tensor] | None = None,
    ) -> None:
        self.prefix = prefix
        self.chunk = chunk
        self.bias_length = chunk.stop
        self.stage = stage
        self.saved = saved
        self.picks = picks
        self.chunk_picks: list[Tensor] = []
        self.attended: list[AttentionOutput] = []
        self.call = 0
        self.see: Callable[[str, Tensor], None] | None = None

    __iter__ = None  # `0.0 in mask` would never end

    def __getitem__(self, index: Any) -> PrefixChunkAttention:
        """Return the object itself, for any `index`. A layer with sparse attention may slice its
        attention mask for its indexer, the module that picks keys. The call of the indexer then
        gets a mask tensor in place of this object.

        Raises:
            TypeError: the layer has no indexer, so the layer itself reads the mask.
        """
        if not self.takes_picks:
            raise TypeError(f"'{type(self).__name__}' object is not subscriptable")
        return self

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the output o [B, C, H, D_v] of one attention call in q's dtype, with an autograd
        graph only if backward recomputes the chunk (stage RECOMPUTE).

        Args:
            call: q, k and v of the chunk, and the settings of the attention call.

        Raises:
            RefillDone: the pass only recomputes K and V (stage REFILL), and K and V of the layer's
                last attention call are stored.
            BackwardError: backward attends with another scale, dropout or softcap than forward.
            AttentionChoiceError: the configuration names a kernel that cannot attend here.
            StreamBPError: the layer has an indexer and attends more than once.
        """
        prefix = self.prefix
        chunk = self.chunk
        index = self.call
        q, k, v, scale, dropout, softcap, sink, picks, bias = call
        self.call += 1
        backend = prefix.backends.get(index)
        # backward uses forward's kernels, even if torch's switches change in between
        if backend is None:
            is_biased = bias is not None
            backend = choose_backend(
                prefix.attention, q, v, dropout, softcap, sink is not None, biased=is_biased
            )
            prefix.backends[index] = backend
            in_sdpa = softcap is None and sink is None and not is_biased
            prefix.sdpa = prefix.sdpa.with_call(q, k, v, dropout, in_sdpa)
        settings, call_key = (scale, dropout, softcap), (chunk.index, index)
        if self.stage is Stage.FORWARD:
            prefix.settings_by_call[call_key] = settings
        elif (
            self.stage is Stage.RECOMPUTE
            and prefix.settings_by_call.get(call_key, settings) != settings
        ):
            raise BackwardError(
                "Attention was called with scale, dropout and softcap "
                f"{prefix.settings_by_call[call_key]} in forward, and is with {settings} in "
                "backward. Call backward before you change them."
            )
        if self.see is not None:
            for name, x in ((f"q.{index}", q), (f"k.{index}", k), (f"v.{index}", v)):
                self.see(name, x.transpose(1, 2).flatten(2))  # the layout of projections: no copy
        seed = int(torch.randint(2**62, (), device="cpu")) if dropout > 0.0 else 0
        values = None if bias is None else bias.detach()[0]
        params = AttentionParams(backend, scale, softcap, dropout, seed, values)
        kv_storage = self._kv_storage(index, k, v)
        if self.stage is Stage.REFILL and self.call == prefix.calls:
            raise RefillDone
        if self.stage is Stage.REFILL and picks is not None:
            raise StreamBPError(
                f"The layer attends {prefix.calls} times to keys that an indexer picks; expected "
                "was once. Please report this model."
            )
        if picks is None:
            layout = prefix.layout
        else:
            layout = PickedMask.from_picks(prefix.layout, prefix.length, chunk, picks)
        if self.stage is not Stage.RECOMPUTE:
            plan = backend.plan(
                layout,
                chunk,
                q.shape[0],
                BlockPurpose.TILED if kv_storage.streams else BlockPurpose.FORWARD,
            )
            attended = attend_blocks(q, kv_storage, layout, chunk, params, sink, plan=plan)
            attended.version = None if attended.o.is_inference() else attended.o._version
            self.attended.append(attended)
            prefix.note_kernels(plan)
            return attended.o
        saved = self.saved[index] if self.saved else None
        out: Tensor = PrefixAttention.apply(
            q, k, v, sink, kv_storage, layout, chunk, params, saved, bias
        )
        return out.clone() if prefix.overwritten else out

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this chunk's k and v [B, H_kv, C, D], and return the keys and values of the e
        tokens up to the chunk's end, [B, H_kv, e, D]. Called for layers that compute attention
        themselves."""
        self.call += 1
        self.prefix.heads_first = True
        kv_storage = self._kv_storage(self.call - 1, k, v)
        if self.stage is Stage.REFILL and self.call == self.prefix.calls:
            raise RefillDone
        # `LayerCall.limit_prefix` does not cut these layers' prefixes into tiles
        assert isinstance(kv_storage, KVBuffer)
        if self.stage is not Stage.RECOMPUTE:
            return kv_storage.read(self.chunk)
        keys_and_values: tuple[Tensor, Tensor] = PrefixRead.apply(k, v, kv_storage, self.chunk)
        return keys_and_values

    def finish(self) -> None:
        """Check the number of attention calls in this chunk. Record the keys that indexers picked,
        and if the layer has overwritten an attention output.

        Raises:
            StreamBPError: the layer called attention more or fewer times than for the chunks
                before.
        """
        prefix = self.prefix
        if prefix.calls is not None and self.call != prefix.calls:
            raise StreamBPError(
                f"The layer called its attention {self.call} times on chunk {self.chunk.index} and "
                f"{prefix.calls} times before. A streamed layer must pass attention_mask to "
                "transformers' attention interface the same number of times in every chunk. "
                "Please report this model."
            )
        prefix.calls = self.call
        prefix.indexed.chunk_picks = self.chunk_picks
        for attended in self.attended:
            prefix.overwritten |= attended.is_overwritten
        prefix.filled_until = max(prefix.filled_until, self.chunk.stop)

    def _kv_storage(self, index: int, k: Tensor, v: Tensor) -> KVStorage:
        prefix = self.prefix
        chunk = self.chunk
        if chunk.stop > prefix.filled_until:
            prefix.restore(
                index, chunk, k.detach(), v.detach(), backward=self.stage is not Stage.FORWARD
            )
        return prefix.kv_storages[index]
