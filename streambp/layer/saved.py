"""What one layer call keeps from its forward for its backward, chunk by chunk.

    x           the chunk's hidden_states                                 always
    attn_out.i  output and logsumexp of attention call i, with lse.i      by `saves`
    k.i, v.i    keys and values of attention call i                       by `saves`, where they leave the device
    product.n#i the output of call i of the Linear n                      by `saves`
    picks.i     the keys that indexer i picked for each query             always. [Note: indexers]
    state.i     state i that the chunk started from                       always, but for the first chunk; once for all
                                                                          that start from it, with the first of them
    random      the random state that the chunk started from              always

All but the random states go into a store, on the device or on the host.

[Note: order of reads] A store on the host is told in which order backward will read, to have the next copies under way.
Backward takes that order from where it is told: first keys and values of all chunks, from the store (`Prefix.saved_reads`)
or from what chunks start from (`starts`); then all that a chunk needs at once (`reads`), before its layer runs. So a layer
may use in any order, or not at all, what was brought for a chunk; what nobody uses goes with the chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from streambp.attention.kv import KVBuffer
from streambp.attention.merge import Attended
from streambp.chunks import Chunk, ChunkPlan
from streambp.config import SAVES
from streambp.errors import UnsupportedModelError
from streambp.layer.carried import Carried
from streambp.layer.products import See, cast_to, is_factor, matching, tapped
from streambp.layer.recompute import Autocast, RandomState
from streambp.layer.shadows import GradientSum
from streambp.layer.site import LayerSite
from streambp.offload.costs import Cost, LayerSeen, Product
from streambp.offload.manager import Access, HostTensors
from streambp.recurrent.states import Key, States


@dataclasses.dataclass(eq=False)
class InMemory:
    """Keeps the tensors [...] where they are, each from `put` to `take`; as `HostTensors` does on the host."""

    copies = False
    tensors: dict[Access, Tensor] = dataclasses.field(default_factory=dict)

    def put(self, name: str, chunk: int, tensor: Tensor) -> None:
        """Keep the tensor [...] itself."""
        self.tensors[name, chunk] = tensor

    def has(self, name: str, chunk: int) -> bool:
        """Whether it is kept."""
        return (name, chunk) in self.tensors

    def reserve(self, size: int) -> None:
        """Nothing: a tensor that is kept needs no room of its own."""

    def load(self, name: str, chunk: int) -> None:
        """Nothing: the tensor is where it was."""

    def peek(self, name: str, chunk: int) -> Tensor:
        """The tensor [...] itself."""
        return self.tensors[name, chunk]

    borrow = peek  # a change of it is kept at once

    def read_ahead(self) -> None:
        """Nothing: no tensor is elsewhere."""

    def take(self, name: str, chunk: int) -> Tensor:
        """The tensor [...] itself, which is not kept any longer."""
        return self.tensors.pop((name, chunk))


class Kept:
    """What backward will want of the chunks of one layer call, and in which order it asks for it.

    products: the Linears whose outputs are kept, of `linears`. product_names: the outputs, by store name.
    brought: what the chunk at work reads, by name. [Note: order of reads]
    """

    lends_attended = True  # the layer gets to work with the very output of attention that is kept
    chosen_here = True  # what is saved, where the config does not name it

    def __init__(
        self, site: LayerSite, plan: ChunkPlan, carried: Carried, device: torch.device, autocast: Autocast
    ) -> None:
        self.site, self.plan, self.carried, self.device = site, plan, carried, device
        self.saves = site.config.named_saves
        self.named = True  # by the user
        self.watch: LayerSeen | None = None
        self.autocast = autocast  # Linears give their outputs in its dtype. [Note: autocast]
        self.store: InMemory | HostTensors = InMemory()
        self.random: list[RandomState] = []
        self.linears: dict[str, nn.Linear] = {}
        self.products: list[str] = []
        self.product_names: list[str] = []
        self.keeps_graph = False
        self.graph: Any = None  # of `layer.graphs`, from forward to backward. [Note: kept graphs]
        self.brought: dict[str, Tensor] = {}
        self._state_keys: list[Key] = []
        self._indexers = 0
        self._captured: list[tuple[str, Tensor, int]] = []

    def choose(self, rows: int, can_keep_graph: Callable[[], bool]) -> None:
        """What is saved is chosen for the memory that there is, if nothing else says it."""
        if self.site.chooser is not None and self.chosen_here:
            names, self.keeps_graph, self.watch = self.site.chooser.saves(self, rows, can_keep_graph)
            if names is not None:
                self.saves, self.named = names, False

    def give_up(self, at_work: bool) -> None:
        """Keep only what backward cannot compute again. at_work: the layer's forward is running."""
        self.saves, self.products, self.keeps_graph, self.graph = (), [], False, None
        self._captured.clear()
        assert isinstance(self.store, InMemory)
        tensors, brought = self.store.tensors, self.brought
        for access in [access for access in tensors if not _is_needed(access[0])]:
            del tensors[access]
        for name in [name for name in brought if not _is_needed(name)]:
            del brought[name]
        if not at_work:
            self.carried.prefix.drop_buffers()

    @property
    def moves_kv(self) -> bool:
        """Keys and values leave with the rest; otherwise, if saved, they stay in the prefix's buffers."""
        return "kv" in self.saves and self.store.copies

    def seal(self, backward_bytes: int) -> None:
        """Forward is over. backward_bytes: what keys, values and their gradients will take on the device."""
        if not isinstance(self.store, InMemory):
            self.store.seal(self.order(), backward_bytes)

    def keep_states(self, chunk: Chunk, states: States) -> None:
        """Save the states that a chunk starts from."""
        self._state_keys = list(states) or self._state_keys
        if states and self._state_chunk(chunk.index) == chunk.index:
            for number, state in enumerate(states.values()):
                self.store.put(f"state.{number}", chunk.index, state)

    def _state_chunk(self, index: int) -> int | None:
        """The chunk with which a chunk's start states are kept: the first that has them; None: it starts anew."""
        before = self.plan.before[index] if self._state_keys else None
        return None if before is None else self.plan.behind[before][0]

    def states(self) -> States:
        """The states that the chunk at work starts from."""
        found = (self.brought.get(f"state.{number}") for number in range(len(self._state_keys)))
        return {key: state for key, state in zip(self._state_keys, found, strict=True) if state is not None}

    def keep(self, chunk: Chunk, hidden_chunk: Tensor, attended: list[Attended]) -> None:
        """Save what backward will want of this chunk: hidden_chunk [..., B, C, h], without a graph, and what its attention
        calls left.

        Raises:
            UnsupportedModelError: the layer has written to something that is to be saved.
        """
        self.store.put("x", chunk.index, hidden_chunk)
        self._indexers = len(self.carried.prefix.picked)
        for indexer, picks in enumerate(self.carried.prefix.picked):
            self.store.put(f"picks.{indexer}", chunk.index, picks)
        if self._captured:
            self.keep_products(chunk)
        for site, part in enumerate(attended):
            if "attn_out" in self.saves:
                if part.changed:
                    raise self._overwritten()
                self.store.put(f"attn_out.{site}", chunk.index, part.o)
                self.store.put(f"lse.{site}", chunk.index, part.lse)
            whole = self.carried.prefix.sites[site] if self.moves_kv else None
            if isinstance(whole, KVBuffer):  # tiles are in the store already
                k, v = whole.part(chunk)
                self.store.put(f"k.{site}", chunk.index, k)
                self.store.put(f"v.{site}", chunk.index, v)
        if self.watch is None:
            return
        # What each thing would cost to keep and to compute again, by which the next forwards choose.
        tokens = hidden_chunk.numel() // hidden_chunk.shape[-1]
        prefix, overwritten = self.carried.prefix, self.site.overwritten
        with self.autocast.restored():
            products = {
                name: Product(
                    linear.out_features * tokens * (cast_to(linear.weight) or _computes_in(linear, hidden_chunk)).itemsize,
                    2.0 * linear.out_features * linear.in_features * tokens,
                )
                for name, linear in self.site.linears.items()
                if name not in overwritten.products and not is_factor(name)
            }
        cost = Cost(
            x=hidden_chunk.nbytes + sum(picks.nbytes for picks in prefix.picked),
            attn_out=0 if overwritten.attended else sum(part.o.nbytes + part.lse.nbytes for part in attended),
            kv=(chunk.stop - chunk.start) * sum(size.keys for size in prefix.sizes_seen),
            attention_flops=sum(prefix.flops(chunk, part) for part in attended),
            products=products,
            overwritten=overwritten.products | ({"attn_out"} if overwritten.attended else set()),
        )
        self.watch.mark(cost)

    def keep_products(self, chunk: Chunk) -> None:
        """Save what was captured since the last call.

        Raises:
            UnsupportedModelError: the layer has written to one of them.
        """
        for name, product, version in self._captured:
            if product._version != version:
                raise self._overwritten(linear_of(name))
            self.store.put(name, chunk.index, product)
        self._captured.clear()

    def find_products(self) -> None:
        """Which Linears `saves` names; within `LayerCall.streaming`, where no engine's hooks stand in the way.

        What the layer overwrites is not kept, nor what its backward was seen to leave unread.
        [Note: writes through pointers]

        Raises:
            UnsupportedModelError: the user has named something that the layer overwrites.
        """
        overwritten = self.site.overwritten
        if "attn_out" in self.saves and overwritten.attended and self.lends_attended:
            if self.named:
                raise self._overwritten()
            self.saves = tuple(name for name in self.saves if name != "attn_out")
        names = [name for name in self.saves if name not in SAVES]
        if names:
            self.linears = self.site.linears
            products = matching(self.linears, names) if self.named else [name for name in self.linears if name in names]
            self.products = [name for name in products if name not in overwritten.products]
            if self.named and len(self.products) < len(products):
                raise self._overwritten(*(name for name in products if name in overwritten.products))
            unread = [found.recompute for found in self.site.unread.values()]
            never_read = frozenset.intersection(*unread) if unread else frozenset()
            self.products = [name for name in self.products if name not in never_read]

    def _overwritten(self, *names: str) -> UnsupportedModelError:
        """The layer writes to the outputs of these Linears; without names, to that of attention."""
        kind = type(self.site.layer).__name__
        if not names:
            return UnsupportedModelError(
                f"The output of attention is changed in place inside {kind}, so it cannot be saved. Leave 'attn_out' out "
                "of StreamConfig's saves."
            )
        if len(names) == 1:
            return UnsupportedModelError(
                f"The output of {names[0]} is changed in place inside {kind}, so it cannot be saved. Leave it out of "
                f"StreamConfig's saves, which is {self.saves}."
            )
        return UnsupportedModelError(
            f"The outputs of {' and '.join(names)} are changed in place inside {kind}, so they cannot be saved. Leave them "
            f"out of StreamConfig's saves, which is {self.saves}: name the Linears to save one by one."
        )

    def capturing(self, names: list[str] | None = None, see: See | None = None) -> contextlib.AbstractContextManager[None]:
        """Within, outputs of the Linears that `saves` names, or of those given here, are collected for `keep`.

        Args:
            see: is given their inputs.
        """
        names = self.products if names is None else names
        calls: dict[str, int] = {}

        def sink(name: str, product: Tensor) -> None:
            calls[name] = calls.get(name, -1) + 1
            key = f"product.{name}#{calls[name]}"
            self._captured.append((key, product, product._version))
            if key not in self.product_names:
                self.product_names.append(key)

        return tapped(self.linears, names, sink, see) if names else contextlib.nullcontext()

    def knowing(
        self,
        names: list[str] | None = None,
        sums: GradientSum | None = None,
        see: See | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Within, those Linears return what was brought of the chunk at work, each output once.

        Args:
            sums: as in `products.summed`. see: is given their inputs.
        """
        names = self.products if names is None else names
        calls: dict[str, int] = {}

        def source(name: str) -> Tensor | None:
            number = calls.get(name, 0)
            calls[name] = number + 1
            return self.brought.pop(f"product.{name}#{number}", None)

        return tapped(self.linears, names, None, see, source, sums) if names else contextlib.nullcontext()

    def order(self) -> list[list[Access]]:
        """What backward reads of what was kept, each list at once. [Note: order of reads]"""
        prefix, order = self.carried.prefix, list[list[Access]]()
        tiled: list[list[Access]] = []  # the first tiles, which the last chunk visits; a visit loads the next
        if self.keys_are_stored:
            for site, resident in enumerate(prefix.resident_tiles(backward=True)):
                if resident is None:
                    order += prefix.saved_reads(site)
                else:
                    tiled.append([(f"k.{site}", 0), (f"v.{site}", 0)])
        elif prefix.calls and ("kv" not in self.saves or self.moves_kv):
            order += [self.starts(chunk.index) for chunk in self.refilled]
        for chunk in self.plan.backward:
            order.append(self.reads(chunk.index))
            if chunk.stop == self.plan.length:
                order += tiled
        return order

    @property
    def keys_are_stored(self) -> bool:
        """Whether backward brings keys and values of all chunks back, instead of computing them again."""
        sites = range(self.carried.prefix.calls or 0)
        wanted = [(f"{part}.{site}", chunk.index) for site in sites for chunk in self.plan for part in "kv"]
        return self.moves_kv and bool(wanted) and all(self.store.has(*access) for access in wanted)

    @property
    def refilled(self) -> tuple[Chunk, ...]:
        """The chunks whose keys and values are computed ahead of backward, if any are: the last one writes its own."""
        return self.plan.chunks[:-1]

    def starts(self, index: int) -> list[Access]:
        """What a chunk starts from."""
        kept = self._state_chunk(index)
        states = [] if kept is None else [(f"state.{number}", kept) for number in range(len(self._state_keys))]
        return [("x", index), *states]

    def reads(self, index: int) -> list[Access]:
        """What differentiating a chunk takes: its start, its indexers' picks, and what need not be computed."""
        names = [f"picks.{indexer}" for indexer in range(self._indexers)]
        names += [name for name in self.product_names if self.store.has(name, index)]
        return [*self.starts(index), *self.attended_reads(index), *((name, index) for name in names)]

    def attended_reads(self, index: int) -> list[Access]:
        """What the chunk's attention calls gave; [] unless all of it was kept."""
        sites = range(self.carried.prefix.calls or 0) if "attn_out" in self.saves else ()
        wanted = [(f"{part}.{site}", index) for site in sites for part in ("attn_out", "lse")]
        return wanted if all(self.store.has(*access) for access in wanted) else []

    def bring(self, chunk: Chunk, reads: list[Access], again: Container[str] = ()) -> None:
        """Bring what work on a chunk reads to the device: for the last time, but for states that another chunk starts from.

        Args:
            again: names of what will be read once more.
        """
        self.brought.clear()
        for name, index in reads:
            read = self.store.peek if name in again or index != chunk.index else self.store.take
            self.brought[name] = read(name, index)
        self.store.read_ahead()

    def picks(self) -> list[Tensor]:
        """[B, C, k], the keys that each indexer picked for the chunk at work, which may be computed once more."""
        return [self.brought[f"picks.{indexer}"] for indexer in range(self._indexers)]

    def attended(self) -> list[Attended] | None:
        """What the attention calls of the chunk at work gave, for the last time; None if it was not kept."""
        sites = range(self.carried.prefix.calls or 0)
        if "attn_out" not in self.saves or not all(f"lse.{site}" in self.brought for site in sites):
            return None
        take = self.brought.pop
        return [Attended(take(f"attn_out.{site}"), take(f"lse.{site}")) for site in sites]


def _is_needed(name: str) -> bool:
    """Whether backward cannot compute it again."""
    return name.split(".")[0] in ("x", "state", "picks")


def _computes_in(linear: nn.Linear, x: Tensor) -> torch.dtype:
    """The dtype of the output for x [..., h]; a packed weight's is no float."""
    return linear.weight.dtype if linear.weight.is_floating_point() else x.dtype


def linear_of(product: str) -> str:
    """The Linear's name out of its output's."""
    return product.removeprefix("product.").split("#")[0]
