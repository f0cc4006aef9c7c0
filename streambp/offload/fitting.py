"""What layers keep on the device instead of computing it again: as much as fits beside the rest of the step.

[Note: saves that fit] `saves="auto"` without offloading is decided when the first layer's forward of a micro-batch begins,
from what the device has free then and from what a step without saves needs (the planner's law). Whatever else is there, an
optimizer's states, other models, other processes, gradients of earlier micro-batches, is part of what is not free. Saves
change no value (but for rounding, in half precision where plain products attend), so that each step, each micro-batch and
each rank may decide anew.

What is saved goes by seconds spared for each byte, and within one kind to the last layers first, whose backward comes
first. A step never saves what it cannot afford by the law. Where the law is wrong, or others take memory meanwhile,
less is saved:

    before each layer in forward       what the device lacks now is taken off the layers to come, or else off all
    before each chunk, both ways       where less is free than computing it takes, all waiting layers let go of their saves
    a chunk runs out, either way       the same, and the chunk is computed again ([Note: once for each chunk]); later steps
                                       save half of what this one had

What each layer's tensors take, the planner sees on tensors without data, where it can count; a layer's own forward and
backward correct it. Where it cannot (on a CPU), nothing is saved until each layer has been through both.

A call in one chunk, on a device with room for all of these, keeps its graph and recomputes nothing. [Note: kept graphs]
With four times the room it is not streamed at all. [Note: micro-batches as unpatched]
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from streambp.layer.cost import Cost
from streambp.layer.products import UnreadProducts, never_read
from streambp.layer.saved import GRAPH, Kept

KV_WORTH = 3.4  # seconds spared a byte, of outputs of Linears: norms, rotation and half of the refill come on top
ATTENTION_PACE = 1.12  # seconds of a FLOP of attention, of a product's: an H200's rates (`planner/devices.py`)
SLACK = 0.01  # of the free memory at first: less is no sign that the law is wrong

Free = Callable[[torch.device], float | None]


class Need(Protocol):
    """What a step without saves takes."""

    def __call__(self, tokens: int, chunk: int) -> float:
        """Bytes of a step of so many tokens over all rows, in chunks of `chunk`."""
        ...

    def at_work(self, chunk: int) -> float:
        """Bytes that computing a chunk of so many tokens takes."""
        ...


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something that a layer may save: bytes, and the FLOPs a byte that backward is spared."""

    index: int
    name: str
    bytes: float
    worth: float


@dataclasses.dataclass
class LayerSeen:
    """What a layer's forward would have saved, chunk by chunk. [Note: saves that fit]

    tokens: of all rows. chunks: how many there are. unread: of the layer, filled by its backward: situations in which some
    products need not be computed again.
    """

    device: torch.device
    tokens: int
    length: int
    chunks: int
    unread: dict[Any, UnreadProducts]
    cost: Cost = dataclasses.field(default_factory=Cost)
    done: int = 0
    graph: float = 0.0  # bytes that the graphs of all chunks save

    def start(self) -> None:
        """Nothing: no time is measured."""

    def chunk_done(self, cost: Cost) -> None:
        """Add up what a chunk costs."""
        self.cost, self.done = self.cost + cost, self.done + 1

    def graph_done(self, size: int) -> None:
        """Add up what the chunks' graphs save."""
        self.graph += size

    def learnt(self) -> LayerCost | None:
        """Without the products that backward leaves out anyway; None before a backward has run."""
        if self.done < self.chunks or not self.unread:
            return None
        unread = never_read(self.unread.values())
        products = {name: product for name, product in self.cost.products.items() if name not in unread}
        cost = dataclasses.replace(self.cost, products=products)
        graph = self.graph + self.cost.kv if self.graph else 0.0  # not seen where another forward came before backward
        return LayerCost(self.device, cost, graph, self.tokens, self.length, len(self.unread))


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A layer's cost, of a call of so many tokens over all rows, and as many in a row. graph: bytes, if all is kept; 0: not
    known."""

    device: torch.device
    cost: Cost
    graph: float
    tokens: int
    length: int
    situations: int  # of the layer's backward, of which it is known what is not read

    def inputs(self, tokens: int) -> float:
        """Bytes of the layer's inputs in a call of so many tokens."""
        return self.cost.x * tokens / self.tokens

    def candidates(self, index: int, tokens: int, length: int) -> Iterator[Candidate]:
        """What layer `index` may save of a call of `tokens` tokens in rows of `length`."""
        cost, scale = self.cost, tokens / self.tokens
        products = {name: product.flops / product.bytes for name, product in cost.products.items() if product.bytes}
        if cost.attn_out:
            worth = ATTENTION_PACE * cost.attention_flops / cost.attn_out * (length / self.length)
            yield Candidate(index, "attn_out", cost.attn_out * scale, _rounded(worth))
        if cost.kv and products:
            usual = sum(products.values()) / len(products)
            yield Candidate(index, "kv", cost.kv * scale, _rounded(KV_WORTH * usual))
        for name, worth in products.items():
            yield Candidate(index, name, cost.products[name].bytes * scale, _rounded(worth))


def _rounded(worth: float) -> float:
    """To three digits: layers of one kind are worth the same."""
    return float(f"{worth:.2e}")


@dataclasses.dataclass
class Chosen:
    """What a micro-batch saves: by name the bytes, and the number of layers.

    tokens: of all rows. room: bytes that a step without saves leaves free. least: bytes that were free whenever the device
    was asked. let_go: why nothing is saved any more; None: it is.
    """

    tokens: int
    room: float
    bytes: dict[str, float]
    layers: dict[str, int]
    least: float = math.inf
    let_go: str | None = None

    @classmethod
    def of(cls, tokens: int, room: float, plan: dict[int, list[Candidate]]) -> Chosen:
        """From the plan of each layer; what is worth most comes first."""
        chosen = sorted((c for candidates in plan.values() for c in candidates), key=lambda c: -c.worth)
        sizes: dict[str, float] = {}
        layers: dict[str, int] = {}
        for candidate in chosen:
            sizes[candidate.name] = sizes.get(candidate.name, 0.0) + candidate.bytes
            layers[candidate.name] = layers.get(candidate.name, 0) + 1
        return cls(tokens, room, sizes, layers)


@dataclasses.dataclass
class AsUnpatched:
    """A micro-batch of so many tokens over all rows that ran as unpatched: bytes, predicted, that it kept, and those that a
    step without saves leaves free."""

    tokens: int
    bytes: float
    room: float


class FittingSaves:
    """Chooses what each layer of a model saves. [Note: saves that fit]

    Args:
        layers: how many there are. free: bytes that a device has for a step; None: not known. need: bytes that a step
            without saves takes, from its tokens over all rows and those of a chunk.

    latest: what the last micro-batch chose; None: nothing was known to choose from.
    """

    def __init__(self, layers: int, free: Free, need: Need, costs: Mapping[int, LayerCost] | None = None) -> None:
        self.layers, self.free, self.need = layers, free, need
        self.latest: Chosen | AsUnpatched | None = None
        self._counted = dict(costs or {})
        self._costs = dict(self._counted)
        self._seen: dict[int, LayerSeen] = {}
        self._plan: dict[int, list[Candidate]] = {}
        self._waiting: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._last = layers  # the layer whose forward began last
        self._device = torch.device("meta")  # of the first layer: only layers on it save anything
        self._expected = 0.0  # bytes that must be free as the next layer begins, for what is planned
        self._slack = 0.0
        self._at_work = -math.inf  # bytes that should be free as a chunk begins; whatever is free where nothing was saved
        self._most = math.inf  # bytes to save, by what once was too much

    def __reduce__(self) -> Any:
        """A copied or pickled model has seen nothing."""
        return FittingSaves, (self.layers, self.free, self.need, self._counted)

    def saves(self, kept: Kept, rows: int, can_keep_graph: Callable[[], bool]) -> tuple[str, ...]:
        """What the layer of this call saves; its forward begins."""
        index, tokens = kept.site.index, rows * kept.plan.length
        if index <= self._last:
            self._begin(kept, rows)
        elif self._plan and kept.device == self._device:
            self._take_back(kept, tokens)
        self._last = index
        cost, unread = self._costs.get(index), kept.site.unread
        if cost is None or cost.situations != len(unread) or cost.device != kept.device:
            kept.watch = self._seen[index] = LayerSeen(kept.device, tokens, kept.plan.length, len(kept.plan), unread)
        if kept.device != self._device:
            return ()
        chosen = self._plan.get(index, [])
        if any(candidate.name == GRAPH for candidate in chosen) and not (kept.watch is None and can_keep_graph()):
            assert cost is not None
            chosen = self._plan[index] = list(cost.candidates(index, tokens, kept.plan.length))
        self._waiting.add(kept)
        self._expected -= sum(candidate.bytes for candidate in chosen) + (0.0 if cost is None else cost.inputs(tokens))
        return tuple(candidate.name for candidate in chosen)

    def look(self, kept: Kept) -> None:
        """Let go of all saves if the device has less free than a chunk takes."""
        if self._at_work > -math.inf and kept.device == self._device:
            free = self._look()
            if free is not None and free < self._at_work:
                self._drop(kept, "less memory was free than a chunk takes")

    def let_go(self, kept: Kept | None = None) -> bool:
        """The device has run out of memory, in this call or between layers: whether saves were there to be let go of."""
        self.failed()
        return self._drop(kept, f"{'the loss' if kept is None else 'a chunk'} ran out of memory")

    def failed(self) -> None:
        """A step has run out of memory: later ones save half of what this one wanted to."""
        wanted = sum(candidate.bytes for chosen in self._plan.values() for candidate in chosen)
        if wanted:
            self._most = min(self._most, wanted / 2)

    def learn(self) -> Mapping[int, LayerCost]:
        """What is known of each layer, by its index; of those whose backward has run, what was seen."""
        for index, seen in list(self._seen.items()):
            cost = seen.learnt()
            if cost is not None:
                before = self._costs.get(index)
                if before is not None and not cost.graph:
                    cost = dataclasses.replace(cost, graph=before.graph * cost.tokens / before.tokens)
                self._costs[index] = cost
                del self._seen[index]
        return self._costs

    def graphs(self, tokens: int, device: torch.device) -> float | None:
        """Bytes that the graphs of all layers take in a call of so many tokens over all rows, in one chunk; None where a
        layer's are not known, or lie elsewhere."""
        costs = self.learn()
        if len(costs) < self.layers or not all(cost.graph and cost.device == device for cost in costs.values()):
            return None
        return sum(cost.graph * tokens / cost.tokens for cost in costs.values())

    def spare(self, device: torch.device, tokens: int, chunk: int) -> float | None:
        """Bytes that a step without saves leaves free on a device; None where that is not known."""
        free = self.free(device)
        return None if free is None else free - self.need(tokens, chunk)

    def _look(self) -> float | None:
        free = self.free(self._device)
        if free is not None and isinstance(self.latest, Chosen):
            self.latest.least = min(self.latest.least, free)
        return free

    def _drop(self, kept: Kept | None, because: str) -> bool:
        """Let go of all that is saved; the call of `kept` is at work, and uses its buffers. Whether anything was there."""
        device = self._device if kept is None else kept.device
        there = [other for other in self._waiting if other.device == device and (other.saves or other.keeps_graph)]
        for other in there:
            other.give_up(at_work=other is kept)
        self._plan, self._at_work = {}, -math.inf
        if there and isinstance(self.latest, Chosen):
            self.latest.let_go = because
        return bool(there)

    def _begin(self, kept: Kept, rows: int) -> None:
        """A micro-batch begins: learn from those before, and choose."""
        self.learn()
        self._seen, self._plan, self.latest = {}, {}, None
        free = self.free(kept.device)
        if free is None or not self._costs:
            return
        length, chunk = kept.plan.length, rows * kept.plan.size
        room = free - self.need(rows * length, chunk)
        self._device, self._slack = kept.device, SLACK * free
        self._fill(min(room, self._most), range(self.layers), rows * length, length, len(kept.plan) == 1)
        self.latest = chosen = Chosen.of(rows * length, room, self._plan)
        self._expected = free - max(0.0, room - sum(chosen.bytes.values()))
        if chosen.bytes:
            self._at_work = self.need.at_work(chunk)

    def _fill(self, room: float, indices: range, tokens: int, length: int, whole: bool) -> None:
        """Choose for these layers what fits into so many bytes. whole: the call is one chunk, whose graph may be kept."""
        costs = {index: self._costs[index] for index in indices if index in self._costs}
        here = {index: cost for index, cost in costs.items() if cost.device == self._device}
        found = [candidate for index, cost in here.items() for candidate in cost.candidates(index, tokens, length)]
        self._plan.update({index: [] for index in indices})
        for candidate in sorted(found, key=lambda candidate: (-candidate.worth, -candidate.index)):
            if candidate.bytes <= room:
                self._plan[candidate.index].append(candidate)
                room -= candidate.bytes
        for index, cost in sorted(here.items(), reverse=True) if whole else ():
            named = sum(candidate.bytes for candidate in self._plan[index])
            size = max(named, cost.graph * tokens / cost.tokens)
            more = size - named
            if cost.graph and more <= room and len(self._plan[index]) == sum(c.index == index for c in found):
                self._plan[index] = [Candidate(index, GRAPH, size, 0.0)]
                room -= more

    def _take_back(self, kept: Kept, tokens: int) -> None:
        """Save less from this call's layer on if the device has less free than it should; if that is not enough, let go of
        what is saved."""
        free = self._look()
        short = 0.0 if free is None else self._expected - free
        if short <= self._slack:
            return
        self._expected -= short
        later = range(kept.site.index, self.layers)
        planned = sum(candidate.bytes for i in later for candidate in self._plan.get(i, []))
        if short > planned:
            self._drop(None, "less memory was free than planned")
        elif planned:
            self._fill(planned - short, later, tokens, kept.plan.length, len(kept.plan) == 1)
