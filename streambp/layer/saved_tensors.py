"""Tensors that one layer call saves in forward for its backward, chunk by chunk.

    x           the chunk's hidden_states                                 always
    attn_out.i  output and logsumexp of attention call i, with lse.i      by `saves`
    k.i, v.i    keys and values of attention call i                       by `saves`, if offloaded
    product.n#i the output of call i of the Linear n                      by `saves`
    picks.i     the keys that indexer i picked for each query             always. [Note: indexers]
    state.i     state i that the chunk started from                       always, except for the
                                                                          first chunk; chunks with
                                                                          the same start state
                                                                          share one entry
    random      the random state that the chunk started from              always

All tensors except the random states go into a store, on the device or on the host.

A store on the host is given the order of backward's reads, so that it can prefetch the next copies.
Backward reads in two steps. First it reads the keys and values of all chunks, from the store
(`Prefix.saved_reads`) or recomputed from the chunks' start values (`start_reads`). Then it reads
everything that a chunk needs (`reads`) before the chunk's layer runs. The layer may use these
tensors in any order, or ignore them; unused tensors are freed with the chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from streambp.accumulate import GradientSum
from streambp.attention.attend import AttentionOutput
from streambp.attention.kv import KVBuffer
from streambp.chunks import Chunk, ChunkPlan
from streambp.config import SAVES
from streambp.device import RandomState
from streambp.errors import UnsupportedModelError
from streambp.layer.chunk_states import CrossChunkState
from streambp.layer.layer_state import LayerState
from streambp.layer.products import (
    TensorCallback,
    is_factor,
    linear_autocast_dtype,
    match_names,
    tap_linears,
)
from streambp.layer.recompute import Autocast
from streambp.offload.costs import Cost, LinearOutput, ObservedCosts, saves_name
from streambp.offload.manager import Access, HostTensors
from streambp.recurrent.states import StateKey, States


@dataclasses.dataclass(eq=False)
class DeviceTensors:
    """Store for the tensors that a layer call saves for backward, on the device. The store
    references each tensor from `save` until `take`. `HostTensors` has the same methods for host
    memory.

    Attributes:
        tensors: the stored tensors [...], by (name, chunk index).
        copies: False: tensors are stored without a copy. `HostTensors.copies` is True.
    """

    copies = False
    tensors: dict[Access, Tensor] = dataclasses.field(default_factory=dict)

    def save(self, name: str, chunk: int, tensor: Tensor) -> None:
        """Store a reference to a chunk's tensor [...] under (name, chunk index)."""
        self.tensors[name, chunk] = tensor

    def has(self, name: str, chunk: int) -> bool:
        """True if the tensor `name` of the chunk with index `chunk` is stored."""
        return (name, chunk) in self.tensors

    def reserve(self, size: int) -> None:
        """Ignore the request for `size` bytes of memory: this store keeps references and needs no
        memory of its own. Stores on the host allocate memory here."""

    def load(self, name: str, chunk: int) -> None:
        """Ignore the request to copy a tensor to the device: the tensor never left the device."""

    def peek(self, name: str, chunk: int) -> Tensor:
        """Return the tensor `name` [...] of the chunk with index `chunk`, which stays stored."""
        return self.tensors[name, chunk]

    borrow = peek  # in-place changes need no copy back

    def read_ahead(self) -> None:
        """Ignore the request to prefetch: no tensor has to be copied to the device."""

    def take(self, name: str, chunk: int) -> Tensor:
        """Remove the tensor `name` [...] of the chunk with index `chunk` from the store, and return
        the tensor."""
        return self.tensors.pop((name, chunk))


@dataclasses.dataclass(eq=False)
class SavedProducts:
    """The outputs of Linears that one layer call saves for backward.

    Attributes:
        linears: the Linears whose outputs may be saved, by name.
        names: the names of the Linears whose outputs are saved.
        keys: the names of these outputs in the store, such as "product.mlp.up_proj#0" for the first
            call of the Linear mlp.up_proj in a chunk.
        captured: the outputs of the current chunk that are not yet in the store, as tuples of the
            name in the store, the output [..., out], and the output's version counter.
    """

    linears: dict[str, nn.Linear] = dataclasses.field(default_factory=dict)
    names: list[str] = dataclasses.field(default_factory=list)
    keys: list[str] = dataclasses.field(default_factory=list)
    captured: list[tuple[str, Tensor, int]] = dataclasses.field(default_factory=list)

    def capture_outputs(
        self, names: list[str] | None = None, see: TensorCallback | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager that collects the outputs of Linears in `captured`, until
        `SavedForBackward.keep_products` stores them.

        Args:
            names: names of the Linears; None: those whose outputs are saved (`self.names`).
            see: callback, gets a Linear's name and its input [..., in]; None: no callback.
        """
        if names is None:
            names = self.names
        calls: dict[str, int] = {}

        def sink(name: str, product: Tensor) -> None:
            calls[name] = calls.get(name, -1) + 1
            key = f"product.{name}#{calls[name]}"
            self.captured.append((key, product, product._version))
            if key not in self.keys:
                self.keys.append(key)

        if not names:
            return contextlib.nullcontext()
        return tap_linears(self.linears, names, sink, see)

    def use_outputs(
        self,
        brought: dict[str, Tensor],
        names: list[str] | None = None,
        sums: GradientSum | None = None,
        see: TensorCallback | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager in which Linears return their saved outputs of the current chunk. Each
        saved output is returned once.

        Args:
            brought: the saved tensors [B, C, ...] of the current chunk, by name; used outputs are
                removed. A Linear without a saved output here computes its output.
            names: names of the Linears; None: those whose outputs are saved (`self.names`).
            sums: adds up the weights' gradients over the chunks inside the Linears' backward; None:
                autograd returns each chunk's gradient.
            see: callback, gets a Linear's name and its input [..., in]; None: no callback.
        """
        if names is None:
            names = self.names
        calls: dict[str, int] = {}

        def source(name: str) -> Tensor | None:
            number = calls.get(name, 0)
            calls[name] = number + 1
            return brought.pop(f"product.{name}#{number}", None)

        if not names:
            return contextlib.nullcontext()
        return tap_linears(self.linears, names, None, see, source, sums)


@dataclasses.dataclass
class CarriedNames:
    """The names under which a layer's recurrent states and selected keys are saved for backward.

    Attributes:
        state_keys: the keys of the layer's recurrent states; the index of a key is part of the
            saved state's name.
        indexers: number of the layer's indexers (sparse attention). The key indices that each
            indexer selected are saved.
    """

    state_keys: list[StateKey] = dataclasses.field(default_factory=list)
    indexers: int = 0


class SavedForBackward:
    """The tensors that one layer call saves for its backward, chunk by chunk, and the order in
    which backward reads them.

    Attributes:
        saves: names of the tensors that are saved beside each chunk's input: "attn_out" (outputs of
            attention), "kv" (keys and values), and names or glob patterns of Linears (outputs of
            these Linears).
        chosen_by_user: True if the user's config names what to save; False: `saves` was chosen by
            the policy for `saves="auto"`.
        cost_recorder: records bytes and FLOPs of each tensor that may be saved, for the policy's
            later choices; None: nothing is recorded.
        autocast: the forward's autocast state; Linears return autocast's dtype. [Note: autocast]
        store: holds the tensors, on the device or on the host.
        moves: True if the tensors go to the host.
        random: the random state at each chunk's start.
        products: the outputs of Linears that are saved.
        keeps_graph: True if forward keeps its autograd graph for backward, so that nothing is
            recomputed. [Note: kept graphs]
        graph: the graph that forward has kept, a `layer.gradients.Graph`; None: backward
            recomputes.
        brought: the saved tensors of the chunk that backward is computing, by name, on the device.
    """

    lends_attended = True  # the layer receives the saved attention output itself, not a copy
    chosen_here = True  # the policy chooses the saves if the config names none

    def __init__(
        self,
        layer_state: LayerState,
        plan: ChunkPlan,
        carried: CrossChunkState,
        device: torch.device,
        autocast: Autocast,
    ) -> None:
        self.layer_state = layer_state
        self.plan = plan
        self.carried = carried
        self.device = device
        self.saves = layer_state.config.named_saves
        self.chosen_by_user = True
        self.cost_recorder: ObservedCosts | None = None
        self.autocast = autocast  # [Note: autocast]
        self.store: DeviceTensors | HostTensors = DeviceTensors()
        self.moves = layer_state.offloader is not None and not layer_state.offloader.on_demand
        self.random: list[RandomState] = []
        self.products = SavedProducts()
        self.keeps_graph = False
        self.graph: Any = None  # [Note: kept graphs]
        self.brought: dict[str, Tensor] = {}
        self._names = CarriedNames()

    def choose(self, rows: int, can_keep_graph: Callable[[], bool]) -> None:
        """Choose what this call saves, by the policy for `saves="auto"` and the available memory.
        Sets `saves`, `keeps_graph` and `cost_recorder`. Does nothing without such a policy: the
        config then names what to save.

        Args:
            rows: batch size.
            can_keep_graph: returns True if forward may keep its autograd graph for backward.
        """
        if self.layer_state.saves_policy is not None and self.chosen_here:
            names, self.keeps_graph, self.cost_recorder = self.layer_state.saves_policy.saves(
                self, rows, can_keep_graph
            )
            if names is not None:
                self.saves = names
                self.chosen_by_user = False

    def drop_saves(self, is_running: bool) -> bool:
        """Free every saved tensor on the device that backward can recompute, because memory is
        short. Return True if memory may have been freed. Later chunks of the layer's current call
        save no tensors with these names: the names are removed from the attribute `saves`.

        Args:
            is_running: True if this layer is running, so that the buffers of keys and values must
                stay; False: free these buffers as well.
        """
        if not isinstance(self.store, DeviceTensors):
            return self._drop_saves_on_device(self.store, is_running)
        self.saves = ()
        self.keeps_graph = False
        self.graph = None
        self.products.names = []
        self.products.captured.clear()
        assert isinstance(self.store, DeviceTensors)
        tensors = self.store.tensors
        brought = self.brought
        for access in [access for access in tensors if not _cannot_be_recomputed(access[0])]:
            del tensors[access]
        for name in [name for name in brought if not _cannot_be_recomputed(name)]:
            del brought[name]
        if not is_running:
            self.carried.prefix.drop_buffers()
        return True

    def _drop_saves_on_device(self, store: HostTensors, is_running: bool) -> bool:
        """Free the part of the saved tensors that is still on the device, because memory is short,
        in a call whose saves move to the host. Tensors that are on the host stay saved, and so do
        tensors that backward cannot recompute. Return True if any memory was freed.

        Args:
            store: the store of the tensors.
            is_running: True if this layer is running and may be using its keys and values, which
                then stay.
        """

        def goes(name: str) -> bool:
            return not (_cannot_be_recomputed(name) or (is_running and name[:1] in "kv"))

        freed = store.finish_copies()
        kinds = set(map(saves_name, store.drop(goes)))
        self.saves = tuple(name for name in self.saves if name not in kinds)
        self.products.names = [name for name in self.products.names if name not in kinds]
        self.products.captured.clear()
        for name in list(self.brought):
            if not _cannot_be_recomputed(name):
                del self.brought[name]
                freed = True
        if not is_running:
            store.seal(self.order())
        return freed or bool(kinds)

    @property
    def moves_kv(self) -> bool:
        """True if keys and values are saved and go to the host. False: keys and values are not
        saved, or stay in attention's buffers on the device."""
        return "kv" in self.saves and self.store.copies

    def seal(self, backward_bytes: int) -> None:
        """End the saving of tensors in forward. A store on the host then knows the order in which
        backward will read the tensors, and can prefetch them. A store on the device needs no such
        order, so nothing happens.

        Args:
            backward_bytes: bytes of device memory that backward needs for keys, values and their
                gradients. The bytes count against the setting `gpu_memory`.
        """
        if not isinstance(self.store, DeviceTensors):
            self.store.seal(self.order(), backward_bytes)

    def keep_states(self, chunk: Chunk, states: States) -> None:
        """Save the recurrent states from which a chunk starts, for the chunk's recomputation in
        backward. If several chunks start from the same states, the states are saved once.

        Args:
            chunk: the chunk's range of positions.
            states: the start states, by `StateKey`; {}: the chunk begins a sequence.
        """
        self._names.state_keys = list(states) or self._names.state_keys
        if states and self._state_chunk(chunk.index) == chunk.index:
            for number, state in enumerate(states.values()):
                self.store.save(f"state.{number}", chunk.index, state)

    def _state_chunk(self, index: int) -> int | None:
        """Return the chunk index under which the recurrent start states of a chunk are stored.
        Usually this is `index` itself. If several chunks continue from the end of a shared prefix,
        they have the same start states, stored once under the smallest index. None if the chunk
        continues from no other chunk.

        Call this method only for a layer with states.

        Args:
            index: the chunk's index.
        """
        predecessor = self.plan.predecessors[index]
        return None if predecessor is None else self.plan.successors[predecessor][0]

    def states(self) -> States:
        """Return the saved recurrent states from which the current chunk of backward starts. The
        states were copied back from the host if they had moved there. {} if the chunk starts
        without states."""
        states = (
            self.brought.get(f"state.{number}") for number in range(len(self._names.state_keys))
        )
        return {
            key: state
            for key, state in zip(self._names.state_keys, states, strict=True)
            if state is not None
        }

    def keep(self, chunk: Chunk, hidden_chunk: Tensor, attended: list[AttentionOutput]) -> None:
        """Save a chunk's tensors for backward: its input, the keys that indexers selected, and the
        outputs that `saves` names.

        Args:
            chunk: the chunk's range of positions.
            hidden_chunk: the chunk's input [..., B, C, h], without a graph.
            attended: output and logsumexp of each attention call in the chunk.

        Raises:
            UnsupportedModelError: the layer has written in place to a tensor that must be saved.
        """
        self.store.save("x", chunk.index, hidden_chunk)
        self._names.indexers = len(self.carried.prefix.indexed.chunk_picks)
        for indexer, picks in enumerate(self.carried.prefix.indexed.chunk_picks):
            self.store.save(f"picks.{indexer}", chunk.index, picks)
        if self.products.captured:
            self.keep_products(chunk)
        for call_index, part in enumerate(attended):
            if "attn_out" in self.saves:
                if part.is_overwritten:
                    raise self._overwritten()
                self.store.save(f"attn_out.{call_index}", chunk.index, part.o)
                self.store.save(f"lse.{call_index}", chunk.index, part.lse)
            storage = self.carried.prefix.kv_storages[call_index] if self.moves_kv else None
            if isinstance(storage, KVBuffer):  # tiles are already in the store
                k, v = storage.part(chunk)
                self.store.save(f"k.{call_index}", chunk.index, k)
                self.store.save(f"v.{call_index}", chunk.index, v)
        if self.cost_recorder is None:
            return
        # Record the costs of saving and of recomputing each tensor; later forwards choose by them.
        tokens = hidden_chunk.numel() // hidden_chunk.shape[-1]
        prefix = self.carried.prefix
        overwritten = self.layer_state.tests.overwritten
        with self.autocast.restore():
            products = {
                name: LinearOutput(
                    linear.out_features
                    * tokens
                    * (
                        linear_autocast_dtype(linear.weight) or _output_dtype(linear, hidden_chunk)
                    ).itemsize,
                    self.times_recomputed(name)
                    * 2.0
                    * linear.out_features
                    * linear.in_features
                    * tokens,
                )
                for name, linear in self.layer_state.linears.items()
                if name not in overwritten.products and not is_factor(name)
            }
        cost = Cost(
            x=hidden_chunk.nbytes + sum(picks.nbytes for picks in prefix.indexed.chunk_picks),
            attn_out=0
            if overwritten.attention_output
            else sum(part.o.nbytes + part.lse.nbytes for part in attended),
            kv=(chunk.stop - chunk.start) * sum(size.keys for size in prefix.sizes_seen),
            attention_flops=sum(prefix.flops(chunk, part) for part in attended),
            products=products,
            overwritten=overwritten.products
            | ({"attn_out"} if overwritten.attention_output else set()),
        )
        self.cost_recorder.record_chunk(cost)

    def times_recomputed(self, name: str) -> int:
        """Return how many times backward computes the output of the Linear `name` if the output is
        not saved: once, because each chunk is recomputed once. The subclass for sequences that are
        split over ranks returns 1 or 2."""
        return 1

    def keep_products(self, chunk: Chunk) -> None:
        """Move the Linear outputs that `capture_outputs` has collected for this chunk into the
        store.

        Args:
            chunk: the chunk's range of positions.

        Raises:
            UnsupportedModelError: the layer has written in place to one of the outputs.
        """
        for name, product, version in self.products.captured:
            if product._version != version:
                raise self._overwritten(linear_of(name))
            self.store.save(name, chunk.index, product)
        self.products.captured.clear()

    def find_products(self) -> None:
        """Find the Linears that `saves` names, and set `products.names` to those whose outputs this
        forward will save. Outputs that the layer overwrites in place are not saved, nor are outputs
        that backward never reads.

        Must be called inside `LayerCall.prepare_layer`, where hooks of DeepSpeed and accelerate are
        disabled.

        Raises:
            UnsupportedModelError: the user has named an output that the layer overwrites.
        """
        overwritten = self.layer_state.tests.overwritten
        if "attn_out" in self.saves and overwritten.attention_output and self.lends_attended:
            if self.chosen_by_user:
                raise self._overwritten()
            self.saves = tuple(name for name in self.saves if name != "attn_out")
        names = [name for name in self.saves if name not in SAVES]
        if names:
            linears = self.products.linears = self.layer_state.linears
            if self.chosen_by_user:
                products = match_names(linears, names)
            else:
                products = [name for name in linears if name in names]
            savable = [name for name in products if name not in overwritten.products]
            if self.chosen_by_user and len(savable) < len(products):
                raise self._overwritten(
                    *(name for name in products if name in overwritten.products)
                )
            unread = [
                unread_linears.recompute
                for unread_linears in self.layer_state.tests.unread.values()
            ]
            never_read = frozenset.intersection(*unread) if unread else frozenset()
            self.products.names = [name for name in savable if name not in never_read]

    def _overwritten(self, *names: str) -> UnsupportedModelError:
        """Return the error for tensors that must be saved, but are overwritten in place by the
        layer: the outputs of the Linears `names`, or without names the output of attention."""
        kind = type(self.layer_state.layer).__name__
        if not names:
            return UnsupportedModelError(
                f"The output of attention is changed in place inside {kind}, so it cannot be "
                "saved. Leave 'attn_out' out of StreamConfig's saves."
            )
        if len(names) == 1:
            return UnsupportedModelError(
                f"The output of {names[0]} is changed in place inside {kind}, so it cannot be "
                f"saved. Leave it out of StreamConfig's saves, which is {self.saves}."
            )
        return UnsupportedModelError(
            f"The outputs of {' and '.join(names)} are changed in place inside {kind}, so these "
            f"outputs cannot be saved. StreamConfig's saves is {self.saves}. Name the other "
            "Linears there one by one."
        )

    def order(self) -> list[list[Access]]:
        """Return the tensors that backward reads from the store, as lists of (name, chunk index) in
        the order of reading. The tensors of one inner list are read together. `seal` gives the
        order to a store on the host, which prefetches."""
        prefix = self.carried.prefix
        order = list[list[Access]]()
        tiled: list[
            list[Access]
        ] = []  # the first tiles, read by the last chunk; each read loads the next tile
        if self.keys_are_stored:
            for call_index, resident in enumerate(prefix.resident_tiles(backward=True)):
                if resident is None:
                    order += prefix.saved_reads(call_index)
                else:
                    tiled.append([(f"k.{call_index}", 0), (f"v.{call_index}", 0)])
        elif prefix.calls and ("kv" not in self.saves or self.moves_kv):
            order += [self.start_reads(chunk.index) for chunk in self.refilled_chunks]
        for chunk in self.plan.backward:
            order.append(self.reads(chunk.index))
            if chunk.stop == self.plan.length:
                order += tiled
        return order

    @property
    def keys_are_stored(self) -> bool:
        """True if keys and values of all chunks are in the store on the host. Backward then reads
        keys and values from the store, and recomputes none."""
        call_indices = range(self.carried.prefix.calls or 0)
        accesses = [
            (f"{part}.{call_index}", chunk.index)
            for call_index in call_indices
            for chunk in self.plan
            for part in "kv"
        ]
        return (
            self.moves_kv and bool(accesses) and all(self.store.has(*access) for access in accesses)
        )

    @property
    def refilled_chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks whose keys and values backward recomputes at its start, if forward has
        not saved keys and values: all chunks but the last. Backward recomputes the last chunk
        first, and thereby its keys and values."""
        return self.plan.chunks[:-1]

    def start_reads(self, index: int) -> list[Access]:
        """Return the (name, chunk index) in the store of the saved tensors that the recomputation
        of chunk `index` starts from: its input and its recurrent start states. States that several
        chunks share are stored under the index of the first of these chunks."""
        reads = [("x", index)]
        if self._names.state_keys:
            state_chunk = self._state_chunk(index)
            if state_chunk is not None:
                for number in range(len(self._names.state_keys)):
                    reads.append((f"state.{number}", state_chunk))
        return reads

    def reads(self, index: int) -> list[Access]:
        """Return the (name, chunk index) in the store of all saved tensors that recomputing and
        differentiating chunk `index` needs."""
        reads = self.start_reads(index)
        reads += self.attention_reads(index)
        for indexer in range(self._names.indexers):
            reads.append((f"picks.{indexer}", index))
        for name in self.products.keys:
            if self.store.has(name, index):
                reads.append((name, index))
        return reads

    def attention_reads(self, index: int) -> list[Access]:
        """Return the (name, chunk index) in the store of the attention outputs and logsumexps of
        chunk `index`; [] if these are not saved for every attention call."""
        reads: list[Access] = []
        if "attn_out" not in self.saves:
            return reads
        for call_index in range(self.carried.prefix.calls or 0):
            for name in (f"attn_out.{call_index}", f"lse.{call_index}"):
                if not self.store.has(name, index):
                    return []
                reads.append((name, index))
        return reads

    def load(self, reads: list[Access], _: bool = False) -> None:
        """Start copying saved tensors from the host to the device, so that the copies are under way
        before `bring` reads the tensors.

        Args:
            reads: (name, chunk index) of the tensors; tensors that are not saved any more are left
                out.
            _: True in a retry after running out of memory; not used.
        """
        for access in reads:
            if self.store.has(*access):
                self.store.load(*access)

    def bring(self, chunk: Chunk, reads: list[Access], names_to_keep: Container[str] = ()) -> None:
        """Read a chunk's saved tensors from the store into `brought`, on the device. Tensors that
        no later read needs are removed from the store.

        Args:
            chunk: the chunk's range of positions.
            reads: (name, chunk index) of the tensors; all must be in the store.
            names_to_keep: names of tensors that stay in the store for a later read. Tensors that
                are stored under another chunk's index stay as well.
        """
        self.brought.clear()
        for name, index in reads:
            read = (
                self.store.peek
                if name in names_to_keep or index != chunk.index
                else self.store.take
            )
            self.brought[name] = read(name, index)
        self.store.read_ahead()

    def picks(self) -> list[Tensor]:
        """Return the key indices that the layer's indexers (sparse attention) selected in forward:
        for each indexer a tensor [B, C, k], k keys for each query of the current chunk. The tensors
        stay in `brought` for a retry."""
        return [self.brought[f"picks.{indexer}"] for indexer in range(self._names.indexers)]

    def take_attention_outputs(self) -> list[AttentionOutput] | None:
        """Remove the saved attention outputs and logsumexps of the current chunk from `brought`,
        and return one `AttentionOutput` for each attention call; None if they are not saved for
        every call."""
        call_indices = range(self.carried.prefix.calls or 0)
        if "attn_out" not in self.saves:
            return None
        for call_index in call_indices:
            if f"lse.{call_index}" not in self.brought:
                return None
        take = self.brought.pop
        attended = []
        for call_index in call_indices:
            attended.append(
                AttentionOutput(take(f"attn_out.{call_index}"), take(f"lse.{call_index}"))
            )
        return attended


def _cannot_be_recomputed(name: str) -> bool:
    """True if backward cannot recompute a saved tensor of this name: a chunk's input, a recurrent
    start state, or the key indices that an indexer selected. Such a tensor is not freed when memory
    is short."""
    return name.split(".")[0] in ("x", "state", "picks")


def _output_dtype(linear: nn.Linear, x: Tensor) -> torch.dtype:
    """Return the dtype of a Linear's output for x [..., h]: the dtype of its weight, or that of x
    if the weight is quantized. The size of a saved output follows from the dtype."""
    return linear.weight.dtype if linear.weight.is_floating_point() else x.dtype


def linear_of(product: str) -> str:
    """Return the name of the Linear whose saved output has the name `product` in the store:
    "mlp.up_proj" for "product.mlp.up_proj#0"."""
    return product.removeprefix("product.").split("#")[0]
