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
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
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

    def take(self, name: str, chunk: int) -> Tensor:
        """The tensor [...] itself, which is not kept any longer."""
        return self.tensors.pop((name, chunk))


class Kept:
    """What backward will want of the chunks of one layer call, and in which order it asks for it.

    products: the Linears whose outputs are kept, of `linears`. product_names: the outputs, by store name.
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
        tensors = self.store.tensors
        for access in [access for access in tensors if access[0] != "x" and not access[0].startswith(("state.", "picks."))]:
            del tensors[access]
        if not at_work:
            self.carried.prefix.drop_buffers()

    @property
    def moves_kv(self) -> bool:
        """Keys and values leave with the rest; otherwise, if saved, they stay in the prefix's buffers."""
        return "kv" in self.saves and self.store.copies

    def seal(self, backward_bytes: int) -> None:
        """Forward is over. backward_bytes: what keys, values and their gradients will take on the device."""
        if not isinstance(self.store, InMemory):
            self.store.seal(*self.accesses(), backward_bytes)

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

    def states(self, chunk: Chunk, again: bool = False) -> States:
        """The states that a chunk starts from; again: they will be asked for once more."""
        kept = self._state_chunk(chunk.index)
        if kept is None:
            return {}
        read = self.store.peek if again or kept != chunk.index else self.store.take
        return {key: read(f"state.{number}", kept) for number, key in enumerate(self._state_keys)}

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
        chunk: Chunk,
        names: list[str] | None = None,
        again: bool = False,
        sums: GradientSum | None = None,
        see: See | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Within, those Linears return what was kept of this chunk.

        Args:
            again: it will be asked for once more. sums: as in `products.summed`. see: is given their inputs.
        """
        names = self.products if names is None else names
        calls: dict[str, int] = {}

        def source(name: str) -> Tensor | None:
            number = calls.get(name, 0)
            calls[name] = number + 1
            key = f"product.{name}#{number}"
            if not self.store.has(key, chunk.index):
                return None
            return self.store.peek(key, chunk.index) if again else self.store.take(key, chunk.index)

        return tapped(self.linears, names, None, see, source, sums) if names else contextlib.nullcontext()

    def accesses(self) -> tuple[list[Access], int]:
        """The order in which backward reads what was kept, and how many tensors of a chunk it reads at a time."""
        sites, chunks = range(self.carried.prefix.calls or 0), range(len(self.plan.ends))
        order: list[Access] = []
        names = [f"state.{number}" for number in range(len(self._state_keys))]
        kept = [(chunk, self._state_chunk(chunk)) for chunk in chunks]
        starts = {chunk: [] if at is None else [(name, at) for name in names] for chunk, at in kept}
        tiled: list[Access] = []  # the first tiles; each visit of one announces the next
        if self.moves_kv:
            for site, resident in enumerate(self.carried.prefix.resident_tiles(backward=True)):
                if resident is None:
                    order += [(f"{part}.{site}", chunk) for chunk in chunks for part in "kv"]
                else:
                    tiled += [(f"k.{site}", 0), (f"v.{site}", 0)]
        elif "kv" not in self.saves and sites:
            order += [access for chunk in chunks[:-1] for access in (("x", chunk), *starts[chunk])]
        picks = [f"picks.{indexer}" for indexer in range(self._indexers)]
        products = [[name for name in self.product_names if self.store.has(name, chunk)] for chunk in chunks]
        attended = [f"{part}.{site}" for site in sites for part in ("attn_out", "lse")] if "attn_out" in self.saves else []
        for chunk in reversed(chunks):
            order += [("x", chunk), *starts[chunk], *((name, chunk) for name in (*picks, *products[chunk], *attended))]
            order += tiled if chunk == chunks[-1] else []
        return order, 1 + len(picks) + len(names) + max(map(len, products)) + len(attended)

    def picks(self, chunk: Chunk) -> list[Tensor]:
        """[B, C, k], the keys that each indexer picked for the chunk, for the last time: unless the chunk may be computed
        once more. [Note: once for each chunk]"""
        read = self.store.peek if self.site.repeats else self.store.take
        return [read(f"picks.{indexer}", chunk.index) for indexer in range(self._indexers)]

    def attended(self, chunk: Chunk) -> list[Attended] | None:
        """What the chunk's attention calls gave, for the last time; None if it was not kept."""
        if "attn_out" not in self.saves:
            return None
        names = [(f"attn_out.{site}", f"lse.{site}") for site in range(self.carried.prefix.calls or 0)]
        if not all(self.store.has(lse, chunk.index) and self.store.has(o, chunk.index) for o, lse in names):
            return None
        return [Attended(self.store.take(o, chunk.index), self.store.take(lse, chunk.index)) for o, lse in names]


def _computes_in(linear: nn.Linear, x: Tensor) -> torch.dtype:
    """The dtype of the output for x [..., h]; a packed weight's is no float."""
    return linear.weight.dtype if linear.weight.is_floating_point() else x.dtype


def linear_of(product: str) -> str:
    """The Linear's name out of its output's."""
    return product.removeprefix("product.").split("#")[0]
