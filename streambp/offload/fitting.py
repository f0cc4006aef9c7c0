"""What layers keep on the device instead of computing it again: as much as fits beside the rest of the step.

[Note: saves that fit] `saves="auto"` without offloading is decided when the first layer's forward of a micro-batch begins,
from what the device has free then and from what a step without saves needs (the planner's law). Whatever else is there, an
optimizer's states, other models, other processes, gradients of earlier micro-batches, is part of what is not free. Saves
change no value (but for rounding, in half precision where plain products attend), so that each step, each micro-batch and
each rank may decide anew.

What is saved goes by seconds spared for each byte, and within one kind to the last layers first, whose backward comes
first. A step never saves what it cannot afford by the law. Where the law is wrong, or others take memory meanwhile,
less is saved:

    before each layer in forward       what the device lacks now is taken off the layers to come
    a chunk's forward runs out         every waiting layer lets go of its saves, and the chunk is computed again
    a chunk's backward runs out        it raises; later steps save half of what this one had

The bytes of each layer's tensors are seen in a forward whose backward has run; until then nothing is saved.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from streambp.layer.cost import Cost
from streambp.layer.products import UnreadProducts
from streambp.layer.saved import Kept

GIB = 2**30
KV_WORTH = 3.4  # seconds spared a byte, of outputs of Linears: norms, rotation and half of the refill come on top
SLACK = 0.01  # of the free memory at first: less is no sign that the law is wrong

Free = Callable[[torch.device], float | None]
Need = Callable[[int, int], float]


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

    def start(self) -> None:
        """Nothing: no time is measured."""

    def chunk_done(self, cost: Cost) -> None:
        """Add up what a chunk costs."""
        self.cost, self.done = self.cost + cost, self.done + 1

    def learnt(self) -> LayerCost | None:
        """Without the products that backward leaves out anyway; None before a backward has run."""
        if self.done < self.chunks or not self.unread:
            return None
        unread = {name for found in self.unread.values() for name in found.recompute}
        products = {name: product for name, product in self.cost.products.items() if name not in unread}
        cost = dataclasses.replace(self.cost, products=products)
        return LayerCost(self.device, cost, self.tokens, self.length, len(self.unread))


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A layer's cost, of a call of so many tokens over all rows, and as many in a row."""

    device: torch.device
    cost: Cost
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
            worth = cost.attention_flops / cost.attn_out * (length / self.length)
            yield Candidate(index, "attn_out", cost.attn_out * scale, _rounded(worth))
        if cost.kv and products:
            usual = sum(products.values()) / len(products)
            yield Candidate(index, "kv", cost.kv * scale, _rounded(KV_WORTH * usual))
        for name, worth in products.items():
            yield Candidate(index, name, cost.products[name].bytes * scale, _rounded(worth))


def _rounded(worth: float) -> float:
    """To three digits: layers of one kind are worth the same."""
    return float(f"{worth:.2e}")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a micro-batch saves: by name the bytes, and the number of layers.

    tokens: of all rows. room: bytes that a step without saves leaves free.
    """

    tokens: int
    room: float
    bytes: dict[str, float]
    layers: dict[str, int]

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

    def __str__(self) -> str:
        spare = f"{max(0.0, self.room) / GIB:.2f} GiB to spare beside a step without saves"
        if not self.bytes:
            return f"auto saved nothing at {self.tokens} tokens, with {spare}"
        parts = (f"{name} of {self.layers[name]} layers ({size / GIB:.2f} GiB)" for name, size in self.bytes.items())
        return f"auto saved, at {self.tokens} tokens, {', '.join(parts)}, with {spare}"


class FittingSaves:
    """Chooses what each layer of a model saves. [Note: saves that fit]

    Args:
        layers: how many there are. free: bytes that a device has for a step; None: not known. need: bytes that a step
            without saves takes, from its tokens over all rows and those of a chunk.

    latest: what the last micro-batch chose; None: nothing was known to choose from.
    """

    def __init__(self, layers: int, free: Free, need: Need) -> None:
        self.layers, self.free, self.need = layers, free, need
        self.latest: Chosen | None = None
        self._costs: dict[int, LayerCost] = {}
        self._seen: dict[int, LayerSeen] = {}
        self._plan: dict[int, list[Candidate]] = {}
        self._waiting: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._last = layers  # the layer whose forward began last
        self._device = torch.device("meta")  # of the first layer: only layers on it save anything
        self._expected = 0.0  # bytes that should be free as the next layer begins
        self._slack = 0.0
        self._most = math.inf  # bytes to save, by what once was too much

    def __reduce__(self) -> Any:
        """A copied or pickled model has seen nothing."""
        return FittingSaves, (self.layers, self.free, self.need)

    def saves(self, kept: Kept, rows: int) -> tuple[str, ...]:
        """What the layer of this call saves; its forward begins."""
        index, tokens = kept.site.index, rows * kept.plan.length
        if index <= self._last:
            self._begin(kept, rows)
        elif self._plan and kept.device == self._device:
            self._take_back(index, tokens, kept.plan.length)
        self._last = index
        chosen, cost, unread = self._plan.get(index, []), self._costs.get(index), kept.site.unread
        if cost is None or cost.situations != len(unread) or cost.device != kept.device:
            kept.watch = self._seen[index] = LayerSeen(kept.device, tokens, kept.plan.length, len(kept.plan), unread)
        if kept.device != self._device:
            return ()
        self._waiting.add(kept)
        self._expected -= sum(candidate.bytes for candidate in chosen) + (0.0 if cost is None else cost.inputs(tokens))
        return tuple(candidate.name for candidate in chosen)

    def let_go(self, kept: Kept) -> bool:
        """The device has run out of memory in this call's forward: whether saves were there to be let go of."""
        there = [other for other in self._waiting if other.device == kept.device and other.saves]
        self.failed()
        for other in there:
            other.give_up(at_work=other is kept)
        self._plan = {}
        return bool(there)

    def failed(self) -> None:
        """A step has run out of memory: later ones save half of what this one wanted to."""
        wanted = sum(candidate.bytes for chosen in self._plan.values() for candidate in chosen)
        if wanted:
            self._most = min(self._most, wanted / 2)

    def _begin(self, kept: Kept, rows: int) -> None:
        """A micro-batch begins: learn from those before, and choose."""
        learnt = {index: seen.learnt() for index, seen in self._seen.items()}
        self._costs.update({index: cost for index, cost in learnt.items() if cost is not None})
        self._seen, self._plan, self.latest = {}, {}, None
        free = self.free(kept.device)
        if free is None or not self._costs:
            return
        length = kept.plan.length
        room = min(free - self.need(rows * length, rows * kept.plan.size), self._most)
        self._device, self._expected, self._slack = kept.device, free, SLACK * free
        self._fill(room, range(self.layers), rows * length, length)
        self.latest = Chosen.of(rows * length, room, self._plan)

    def _fill(self, room: float, indices: range, tokens: int, length: int) -> None:
        """Choose for these layers what fits into so many bytes."""
        costs = {index: self._costs[index] for index in indices if index in self._costs}
        here = {index: cost for index, cost in costs.items() if cost.device == self._device}
        found = [candidate for index, cost in here.items() for candidate in cost.candidates(index, tokens, length)]
        self._plan.update({index: [] for index in indices})
        for candidate in sorted(found, key=lambda candidate: (-candidate.worth, -candidate.index)):
            if candidate.bytes <= room:
                self._plan[candidate.index].append(candidate)
                room -= candidate.bytes

    def _take_back(self, index: int, tokens: int, length: int) -> None:
        """Save less from layer `index` on if the device has less free than it should."""
        free = self.free(self._device)
        short = 0.0 if free is None else self._expected - free
        if short <= self._slack:
            return
        self._expected -= short
        later = range(index, self.layers)
        planned = sum(candidate.bytes for i in later for candidate in self._plan.get(i, []))
        if planned:
            self._fill(planned - short, later, tokens, length)
