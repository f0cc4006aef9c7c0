"""Hold the data of one call of a decoder layer on this rank's shard of the tokens.

The data are the chunk plans, the saved tensors, and the products that each half of the layer skips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.trials import confirm_names, gradients_of, random_tokens, same_gradients
from streambp.attention.attend import AttentionParams
from streambp.attention.interface import Layout
from streambp.attention.masks import attention_mask_of
from streambp.attention.prefix import FullSequenceKeys, Prefix
from streambp.chunks import Chunk
from streambp.config import StreamConfig
from streambp.device import RandomState, has_data, is_out_of_memory
from streambp.errors import StreamBPError, UnsupportedMaskError, UnsupportedModelError
from streambp.known_names import DOCUMENT_ENDS
from streambp.layer.arguments import Arguments
from streambp.layer.call import TRIAL_TOKENS, LayerCall
from streambp.layer.chunk_states import CrossChunkState
from streambp.layer.data_flow import trace
from streambp.layer.layer_state import LayerState, remember
from streambp.layer.products import (
    LinearNames,
    UnreadInHalves,
    UnreadProducts,
    compute_outputs,
    skip_outputs,
)
from streambp.layer.recompute import Parameters
from streambp.layer.saved_tensors import SavedForBackward, linear_of
from streambp.offload.manager import Access
from streambp.sharded.layer_halves import SplitAtAttention
from streambp.sharded.masks import resolve_full_mask
from streambp.sharded.shards import ChunkShard, Keys, Shards


def keeps(config: StreamConfig, name: str) -> bool:
    """True if these settings make every rank save the tensor `name`, so that backward needs no
    exchange between ranks for the tensor.

    False if the tensor is not saved, or if a rank with full host memory may recompute the tensor.

    Args:
        config: the user's settings.
        name: "kv" (K and V) or "attn_out" (attention's output).
    """
    certain = not config.always_moves or (
        config.offload == "cpu" and config.on_host_full != "recompute"
    )
    return certain and name in config.named_saves


class ShardedSaves(SavedForBackward):
    """The tensors that a layer call saves for backward where sequences are split over ranks. Such a
    layer runs in two halves, before and after its attention, and ranks exchange tensors in between.

    Attributes:
        chunk_shards: the chunks of queries whose attention this rank computes.
        gathers: True if K and V are gathered from other ranks (context parallelism).
        products_before: names of the Linears before attention whose outputs are saved.
        products_after: names of the Linears after attention whose outputs are saved.
        unread: the Linears that each half of the layer can skip, because nothing there reads their
            outputs.
    """

    chunk_shards: list[ChunkShard]
    gathers: bool
    products_before: list[str]
    products_after: list[str]
    unread: UnreadInHalves
    lends_attended = False
    # ranks could choose differently by their own memory, and exchanges must be equal
    chosen_here = False
    attends_by_chunk = False  # True: each chunk's attention output is read with the chunk

    @property
    def keeps_kv(self) -> bool:
        """True if K and V of full sequences are saved for backward. Always False under context
        parallelism, where backward gathers K and V from other ranks again."""
        return keeps(self.layer_state.config, "kv") and not self.gathers

    def order(self) -> list[list[Access]]:
        """Return the tensors that backward reads from the store, as (name, chunk index) in the
        order of reading. The tensors of one inner list are read together.

        1. Inputs of the shard's chunks, with outputs of Linears before attention.
        2. K and V of the full sequences, if saved.
        3. Attention outputs, unless each output is read with its chunk in step 4.
        4. Inputs of the half after attention, last chunk first, with outputs of its Linears.
        5. Inputs of the half before attention, last chunk first, with outputs of its Linears.
        """
        names_before = self.products_before
        order = [self.half_reads(chunk.index, names_before) for chunk in self.plan]
        if self.keeps_kv:
            order += map(self.key_reads, self.chunk_shards)
        if not self.attends_by_chunk:
            order += [
                self.attention_reads(chunk_shard.local_chunk.index)
                for chunk_shard in self.chunk_shards
            ]
        order += [self.second_half_reads(chunk.index) for chunk in self.plan.backward]
        order += [self.half_reads(chunk.index, names_before) for chunk in self.plan.backward]
        return order

    def second_half_reads(self, index: int) -> list[Access]:
        """Return the keys (name, chunk index) of the saved tensors from which the half of the layer
        after attention is recomputed on the chunk with this index."""
        reads = self.half_reads(index, self.products_after)
        if self.attends_by_chunk:
            reads += self.attention_reads(index)
        return reads

    def times_recomputed(self, name: str) -> int:
        """Return the number of times that backward computes the output of the Linear `name` if the
        output is not saved: 1 or 2. A Linear before attention is computed for q, k and v of all
        tokens, and again if gradients of the half before attention read the output."""
        is_before = name in self.unread.for_output
        return 2 if is_before and name not in self.unread.to_differentiate_before else 1

    def half_reads(self, index: int, linears: list[str]) -> list[Access]:
        """Return the keys (name, chunk index) of the saved tensors from which one half of the layer
        (before or after attention) is recomputed on a chunk. The tensors are the layer's input, and
        saved outputs of the half's Linears.

        Args:
            index: the chunk's index.
            linears: names of the half's Linears whose outputs are saved.
        """
        reads = [("x", index)]
        for name in self.products.keys:
            if linear_of(name) in linears and self.store.has(name, index):
                reads.append((name, index))
        return reads

    def key_reads(self, chunk_shard: ChunkShard) -> list[Access]:
        """Return two pairs (name, chunk index), under which K and V at the positions of one chunk
        are saved.

        Args:
            chunk_shard: a chunk of queries whose attention this rank computes.
        """
        return [(f"{part}.0", chunk_shard.local_chunk.index) for part in "kv"]

    def attention_reads(self, index: int) -> list[Access]:
        """Return two pairs (name, chunk index), under which the attention output and its logsumexp
        are saved for one chunk of queries; [] unless both are saved.

        Args:
            index: index of the chunk.
        """
        accesses = [("attn_out.0", index), ("lse.0", index)]
        return accesses if all(self.store.has(*access) for access in accesses) else []


# attention's output [B, H, C, D_v], or K and V of all tokens for a layer that attends by itself
HalfInput = Tensor | tuple[Tensor, Tensor]


class ShardedCall(LayerCall):
    """One call of a decoder layer, on this rank's tokens of sequences that are split over ranks.
    The layer runs in two halves, before and after its attention, and ranks exchange tensors in
    between.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        arguments: the arguments of the layer's forward.
        shards: the split of the sequences, and the exchanges with other ranks.

    Attributes:
        plan: the chunks of this rank's tokens.
        chunk_shards: the chunks of queries whose attention this rank computes.
        params: parameters of attention, such as scale and kernels; None before the first chunk.
        random_before: list of random states, one for each chunk, from which the half before
            attention draws; [] if this half draws nothing.
        heads: number of query heads, and of key/value heads.
        keys: K and V of full sequences, if forward saved them on the device; otherwise None.
        unread: the Linears that each half of the layer (before and after its attention) can skip,
            because nothing there reads their outputs.
    """

    saved: ShardedSaves
    has_full_sequence = False
    saves_class: type[ShardedSaves] = ShardedSaves

    def __init__(self, layer_state: LayerState, arguments: Arguments, shards: Shards) -> None:
        self.shards = shards
        super().__init__(layer_state, arguments)
        self.backward.gradients_of_a_parameter *= 2  # one gradient from each half
        self.params: AttentionParams | None = None
        self.random_before: list[RandomState] = []
        self.heads: tuple[int, int] = (0, 0)  # number of query heads, and of K/V heads
        self.value_size = 0  # D_v
        self.sinks: Tensor | None = None  # [H'], sinks of this rank's query heads
        self.bias: Tensor | None = None  # [1, H, 2 T - 1], T5's bias, and then its gradient
        self.keys: Keys | None = None  # K and V of full sequences, if saved on the device
        self.backward_bytes = 0  # size of attention's tensors in backward on this device
        self.unread = UnreadInHalves()

    def _make_cross_chunk_state(self) -> CrossChunkState:
        length = self.plan.length
        if length != self.shards.length:
            raise StreamBPError(
                f"A layer was given {length} tokens, this rank's shard has {self.shards.length}. "
                "Pass all of the shard's tokens through every layer."
            )
        arguments = self.arguments.by_name
        shards = self.shards
        if arguments.get(DOCUMENT_ENDS) is not None:
            raise UnsupportedMaskError(
                "cu_seq_lens cannot be split over ranks. Mark packed documents by position_ids "
                "that restart, and leave cu_seq_lens out."
            )
        mask = attention_mask_of(arguments)
        device = self.hidden_states.device
        layout = Layout(
            resolve_full_mask(
                mask, shards.spans, shards.length, shards.positions, device, shards.gather_numbers
            )
        )
        prefix = Prefix(layout.spans, self.shards.full_length, self.layer_state.config.attention)
        return CrossChunkState(layout, prefix, self.layer_state.kind.attention.in_tiles)

    def _make_saves(self) -> ShardedSaves:
        saved = self.saves_class(
            self.layer_state, self.plan, self.carried, self.device, self.autocast
        )
        self.chunk_shards = saved.chunk_shards = self.shards.chunk_shards(self.rows, self.plan.size)
        saved.gathers = self.shards.gathers_keys
        saved.products_before = []
        saved.products_after = []
        saved.unread = UnreadInHalves()
        return saved

    @property
    def attends_by_itself(self) -> bool:
        """True if the layer's own code computes attention, and not streambp's attention. The layer
        still runs in two halves. The second half gets K and V of all tokens in place of attention's
        output."""
        return not self.layer_state.kind.attention.ours

    def split(
        self,
        chunk: Chunk,
        half_input: HalfInput | None = None,
        at_attention: Callable[[], None] | None = None,
    ) -> SplitAtAttention | FullSequenceKeys:
        """Return the replacement of the layer's attention that cuts the layer's forward on a chunk
        in two. A layer whose own code computes attention (`attends_by_itself`) gets a replacement
        of its keys and values instead.

        Args:
            chunk: the chunk's range of positions.
            half_input: attention's output [B, H, C, D_v] for the second half; None: the object is
                for the first half. A layer whose own code computes attention gets K
                [B, H_kv, T, D] and V of all tokens.
            at_attention: called in the second half where the first half ends; None: nothing is
                called.
        """
        if self.attends_by_itself:
            assert not isinstance(half_input, Tensor)
            return FullSequenceKeys(chunk, half_input, at_attention)
        assert not isinstance(half_input, tuple)
        split = SplitAtAttention(half_input, at_attention)
        if half_input is None:
            split.bias_length = self.shards.full_length
        return split

    def find_unread_in_halves(self) -> None:
        """Determine which Linears each half of the layer (before and after its attention) can skip,
        because the half does not read their outputs. Store the result in `unread`. The result of a
        test run is cached for calls of the same kind. Under inference mode autograd records no test
        run, so the halves skip nothing unless an earlier call has tested them. Must be called
        inside `LayerCall.prepare_layer`.

        Raises:
            UnsupportedModelError: a kernel that autograd does not record overwrites the layer's
                input in place. A layer that runs in halves does not support such kernels.
        """
        if self.layer_state.tests.overwritten.inputs:
            kind = type(self.layer_state.layer).__name__
            raise UnsupportedModelError(
                f"{kind} overwrites its hidden_states through a kernel that "
                "autograd does not record (a fused residual add?). streambp does not support this "
                f"{self.shards.where}. Use a kernel that returns a new tensor. {self.shards.remedy}"
            )
        linears = self.layer_state.linears
        autocast = tuple(enabled for _, enabled, _ in self.autocast.states)
        key = (
            self.arguments.kind,
            tuple(linears),
            len(self.arguments.differentiable),
            autocast,
            min(TRIAL_TOKENS, self.plan.length),
        )
        is_cached = key in self.layer_state.tests.unread_in_halves
        if linears and not is_cached and not torch.is_inference_mode_enabled():
            parameters = Parameters(self.layer_state.layer, self.device)
            # The hooks of a checkpoint around the model would store the trial's tensors.
            without_outer_hooks = torch.autograd.graph.saved_tensors_hooks(
                Tensor.detach, Tensor.detach
            )
            with (
                torch.enable_grad(),
                without_outer_hooks,
                RandomState.capture(self.device).replay(),
                parameters.shadow(),
            ):
                chunk = Chunk(0, 0, min(TRIAL_TOKENS, self.plan.length))
                with random_tokens(
                    self,
                    self.hidden_states.detach(),
                    chunk.stop,
                    self.layer_state.tests.at_last_positions,
                ) as x:
                    unread = _unread_in_halves(
                        self, linears, x, chunk, RandomState.capture(self.device)
                    )
                remember(self.layer_state.tests.unread_in_halves, key, unread)
        self.unread = self.layer_state.tests.unread_in_halves.get(key, UnreadInHalves())
        self.saved.unread = self.unread
        unread_key = ("halves", *key)
        is_known = key in self.layer_state.tests.unread_in_halves
        if is_known and self.saved.chosen_here and unread_key not in self.layer_state.tests.unread:
            # The policy for saves="auto" chooses no output that backward never reads.
            never_read = self.unread.to_differentiate_after - self.unread.for_output
            products = UnreadProducts(recompute=never_read, states=False)
            remember(self.layer_state.tests.unread, unread_key, products)


def _random_attention(call: ShardedCall, tensors: list[Tensor]) -> tuple[HalfInput, list[Tensor]]:
    """Return a random input for a test run of the half after attention, and the list of its random
    tensors, which require gradients. The input replaces the tensors that attention computes.

    Args:
        call: the call of the layer.
        tensors: q, k and v of the half before attention. The result is then a random attention
            output [B, H, C, D_v]. If the layer's own code computes attention, `tensors` has only k
            and v, and the result is random k and v.
    """
    if call.attends_by_itself:
        k, v = (torch.randn_like(tensor).requires_grad_() for tensor in tensors)
        return (k, v), [k, v]
    q, _, v = tensors
    o = torch.randn_like(v[:, :1].expand(-1, q.shape[1], -1, -1)).requires_grad_()
    return o, [o]


def _find_skippable(
    call: ShardedCall,
    linears: dict[str, nn.Linear],
    names: LinearNames,
    run: Callable[[], list[Tensor]],
    random: RandomState,
    leaves: list[Tensor] | None,
) -> LinearNames:
    """Return those of the Linears `names` that one half of the layer can skip: the results stay the
    same if these Linears return NaN.

    Args:
        call: the call of the layer.
        linears: the layer's Linears by name.
        names: names of the Linears to test.
        run: runs the half and returns its outputs.
        random: the state of torch's random generators from which each run starts.
        leaves: tensors whose gradients are the results; None: the outputs are the results.
    """

    def results_without(names: LinearNames) -> list[Any]:
        """Run one half of the layer (before or after attention) while the Linears `names` return
        NaN. Return the half's outputs, or gradients, which are to be compared."""
        if leaves is None:
            with torch.no_grad(), skip_outputs(linears, names):
                return run()
        computed_names = [name for name in linears if name not in names]
        with (
            random.replay(),
            compute_outputs(linears, computed_names),
            skip_outputs(linears, names),
        ):
            return gradients_of(run(), leaves)

    def equals_expected(results: list[Any]) -> bool:
        """True if these results, of a run in which some Linears returned NaN, equal those of a run
        with all Linears. The Linears can then be skipped."""
        if leaves is None:
            return all(map(torch.equal, results, expected))
        return same_gradients(call, results, expected)

    expected = results_without(frozenset())
    return confirm_names(names, lambda names: equals_expected(results_without(names)))


def _unread_in_halves(
    call: ShardedCall, linears: dict[str, nn.Linear], x: Tensor, chunk: Chunk, random: RandomState
) -> UnreadInHalves:
    """Return the Linears that each half of the layer (before and after its attention) can skip. A
    trace finds the Linears, and a run in which the Linears return NaN confirms the result.

    Args:
        call: the call of the layer.
        linears: the layer's Linears by name.
        x: random tokens [..., B, C, h].
        chunk: the tokens' range of positions.
        random: the state of torch's random generators from which each run starts.
    """
    x = x.clone().requires_grad_()
    leaves = call.arguments.leaves(chunk, [True] * len(call.arguments.differentiable))

    def run_before() -> list[Tensor]:
        """Run the layer's forward up to its attention, and return q, k and v. The result is k and v
        alone if the layer's own code computes attention (`attends_by_itself`), because q is then
        computed after this half."""
        chunk_attention = call.split(chunk)
        with random.replay():
            call.run(x, chunk, chunk_attention, leaves)
        return [*chunk_attention.tensors]

    with torch.no_grad():
        tensors = run_before()
    half_input, of_attention = _random_attention(call, tensors)

    def needed_tensors() -> list[Tensor]:
        """Run the half of the layer before attention, and return only the tensors that backward may
        need alone. This is q: if k and v were saved, backward recomputes only q, and can skip
        Linears of k and v. If the layer's own code computes attention (`attends_by_itself`), this
        half computes k and v alone, and both are returned."""
        tensors = run_before()
        return tensors if call.attends_by_itself else tensors[:1]

    def run_after() -> list[Tensor]:
        """Run the half of the layer after attention, and return hidden_states and the layer's other
        outputs. `half_input` replaces attention's output, or k and v if the layer's own code
        computes attention (`attends_by_itself`)."""
        with random.replay():
            output = call.run(x, chunk, call.split(chunk, half_input), leaves)
        assert output is not None
        return [output.hidden_states, *output.extras.values()]

    def skippable(
        names: LinearNames, run: Callable[[], list[Tensor]], differentiated: bool
    ) -> LinearNames:
        """Return those of the Linears `names` that one half of the layer can skip. `run` runs the
        half and returns its outputs. Runs with and without the Linears are compared: their
        gradients if `differentiated` is True, otherwise their outputs."""
        leaves_of_half = [x, *of_attention, *leaves, *call.layer_state.layer.parameters()]
        return _find_skippable(
            call, linears, names, run, random, leaves_of_half if differentiated else None
        )

    try:
        first = trace(linears, needed_tensors)
        second = trace(linears, run_after)
    except Exception as error:  # see `trials.unread_products`
        if is_out_of_memory(error):
            raise
        return UnreadInHalves()
    unreached = second.called - second.reached
    queries = first.called - first.reached
    to_before = first.called - first.read
    to_after = second.called - second.read
    if not has_data(x):
        return UnreadInHalves(queries, unreached, to_before, unreached | to_after)
    return UnreadInHalves(
        skippable(queries, needed_tensors, False),
        skippable(unreached, run_after, False),
        skippable(to_before, run_before, True),
        skippable(unreached | to_after, run_after, True),
    )
