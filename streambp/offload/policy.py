"""The one choice of saves="auto" without offloading: how long chunks are, and what layers keep for their backward.

[Note: saves that fit] `patch` decides nothing: a model may be moved, cast, frozen or given adapters afterwards. The choice
is taken when the first layer of a micro-batch begins, from what the device has free then and from what a step without
saves needs (the planner's law, counted once for each state of the model). Whatever else is there, an optimizer's states,
other models, other processes, gradients of earlier micro-batches, is part of what is not free. Saves change no value (but
for rounding, in half precision where plain products attend), so that each step, each micro-batch and each rank may decide
anew.

What is saved goes by seconds spared for each byte, and within one kind to the last layers first, whose backward comes
first: when the first layers' gradients are born, the last layers' saves are gone. Of the chunk sizes whose step fits the
one is taken that is fastest with the saves that fit beside it. A step never saves what it cannot afford by the law. Where
the law is wrong, or others take memory meanwhile, less is saved:

    before each layer in forward       what the device lacks now is taken off the layers to come, or else off all
    before each chunk, both ways       where less is free than computing it takes, all waiting layers let go of their saves
    a chunk runs out, either way       the same, and the chunk is computed again ([Note: once for each chunk])
    the next steps of as many tokens   leave free what was missing besides; each that goes well gives a tenth of it back

The driver is asked for the free memory when a forward begins and when its first layer begins; between, what it said then
and torch's own count tell it.

A call in one chunk, on a device with room for all of these, keeps its graph and recomputes nothing. [Note: kept graphs]
With four times the room it is not streamed at all. [Note: micro-batches as unpatched]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from streambp.chunks import AUTO_RULE, in_one_pass, plan_chunks
from streambp.layer.saved import GRAPH, Kept
from streambp.layer.site import Recent
from streambp.offload.fitting import AsUnpatched, Candidate, Chosen, LayerCost, LayerSeen, Margin, Shortage

SLACK = 0.01  # of the free memory at first: less is no sign that the law is wrong
CHUNK_TOKENS = (16384, 8192, 4096, 2048, 1024)  # over all rows of the batch
CLOSE = 0.002  # of the seconds: as fast

Free = Callable[[torch.device], float | None]
Rooms = list[list[float]]  # (index, bytes): what layers up to that one may save together


class Need:
    """What a step without saves takes."""

    def by_layer(self, tokens: int, chunk: int, present: float) -> tuple[tuple[float, float], ...]:
        """(index, bytes): what is needed while layers up to that one wait for their backward.

        Args:
            tokens: over all rows. chunk: tokens of a chunk. present: the part of the gradients that are there already.
        """
        raise NotImplementedError

    def at_work(self, chunk: int) -> float:
        """Bytes that computing a chunk of so many tokens takes."""
        raise NotImplementedError

    def __call__(self, tokens: int, chunk: int, present: float = 0.0) -> float:
        """Bytes at most."""
        return max(size for _, size in self.by_layer(tokens, chunk, present))


@dataclasses.dataclass
class Known:
    """What is known of a model's steps in one of its states.

    need: None: nothing. costs: of layers, by index; their own steps correct it. seconds: of a step without saves, by tokens
    and those of a chunk; None where no step was counted. products: FLOP/s. why: nothing is counted, or known at all.
    """

    need: Need | None = None
    costs: dict[int, LayerCost] = dataclasses.field(default_factory=dict)
    seconds: Callable[[int, int], float] | None = None
    products: float = math.inf
    why: str = ""


States = Callable[[torch.device], tuple[Known, float]]


def _never(_: torch.device) -> bool:
    return False


class SavesPolicy:
    """Chooses chunk sizes, and what each layer of a model saves. [Note: saves that fit]

    Args:
        layers: how many there are. free: bytes that a device has for a step; None: not known. states: what is known of the
            model's steps in its present state, and the part of its gradients that are there. sizes: it chooses chunk sizes.
        saves: and what is saved.

    latest: what the last micro-batch chose; None: nothing was known to choose from.
    """

    def __init__(self, layers: int, free: Free, states: States, sizes: bool, saves: bool) -> None:
        self.layers, self.free, self.states = layers, free, states
        self.sizes, self.keeps = sizes, saves
        self.latest: Chosen | AsUnpatched | None = None
        self.known, self.present = Known(), 0.0
        self._begun = False
        self._chunks: dict[tuple[int, int], int] = {}
        self._seen: dict[int, LayerSeen] = {}
        self._plan: dict[int, list[Candidate]] = {}
        self._waiting: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._last = layers  # the layer whose forward began last
        self._device = torch.device("meta")  # of the first layer: only layers on it save anything
        self._expected = 0.0  # bytes that must be free as the next layer begins, for what is planned
        self._slack = 0.0
        self._others_are_seen = False
        self._at_work = -math.inf  # bytes that should be free as a chunk begins; whatever is free where nothing was saved
        self._shortage: Shortage | None = None
        self._retries = 0
        self.margins: Recent[tuple[int, int], Margin] = Recent()  # by tokens and those of a chunk

    def __reduce__(self) -> Any:
        """A copied or pickled model has seen nothing."""
        return SavesPolicy, (self.layers, self.free, self.states, self.sizes, self.keeps)

    def __str__(self) -> str:
        if self.known.seconds is None:
            return f"{AUTO_RULE} ({self.known.why})" if self.known.why else AUTO_RULE
        sizes = ", ".join(f"{size:,}" for size in CHUNK_TOKENS)
        return f"auto: the fastest of {sizes} tokens over all rows of the batch that fits into the device's free memory"

    def begins(self, device: torch.device) -> None:
        """A forward of the model begins, before any of its layers; said again before `ended`, nothing happens."""
        if not self._begun:
            self._renew(device)
        self._begun = True

    def ended(self) -> None:
        """A forward of the model is over, however that came."""
        self._begun = False

    def _renew(self, device: torch.device) -> None:
        """Ask the device and the model anew."""
        forget = getattr(self.free, "forget", None)
        if forget is not None:
            forget()
        self.learn()
        known, self.present = self.states(device)
        if known is not self.known:
            self.known, self._seen = known, {}

    def _enter(self, device: torch.device) -> None:
        """The first layer of a forward begins."""
        if not self._begun:
            self._renew(device)
        self._begun = False

    def chunk(self, index: int, batch_size: int, length: int, device: torch.device) -> int:
        """Positions per row for layer `index`; the first layer of a forward decides for all."""
        key = (batch_size, length)
        if index == 0 or key not in self._chunks:
            self._enter(device)
            self._chunks = {key: self.size(batch_size, length, device)}
        return self._chunks[key]

    def size(self, batch_size: int, length: int, device: torch.device) -> int:
        """Positions per row of the chunks that are fastest with what fits beside them; the fewest if nothing fits."""
        free, known = self.free(device), self.known
        if free is None or known.need is None or known.seconds is None:
            return plan_chunks(length, batch_size, "auto").size
        size, best, tokens = 1, math.inf, batch_size * length
        for wanted in CHUNK_TOKENS:
            positions = max(1, wanted // batch_size)
            positions = length if positions >= length else in_one_pass(positions)
            chunk = batch_size * positions
            rooms = self._rooms(free, tokens, chunk)
            if math.isinf(best):
                size = positions  # where nothing fits the last one stays
            if min(room for _, room in rooms) < 0:
                continue
            spared = 0.0
            if self.keeps:
                plan = self._fill(rooms, range(self.layers), device, tokens, length, positions == length)
                spared = sum(c.bytes * c.worth for found in plan.values() for c in found) / known.products
            seconds = known.seconds(tokens, chunk) - spared
            if seconds < best * (1 - CLOSE):
                size, best = positions, seconds
        return size

    def _rooms(self, free: float, tokens: int, chunk: int) -> Rooms:
        """What is left for saves beside a step without any."""
        assert self.known.need is not None
        free -= self.margins.get((tokens, chunk), Margin()).bytes
        return [[upto, free - size] for upto, size in self.known.need.by_layer(tokens, chunk, self.present)]

    def saves(self, kept: Kept, rows: int, can_keep_graph: Callable[[], bool]) -> tuple[str, ...]:
        """What the layer of this call saves; its forward begins."""
        index, tokens = kept.site.index, rows * kept.plan.length
        if index <= self._last:
            self._begin(kept, rows)
        elif self._plan and kept.device == self._device:
            self._take_back(kept, tokens)
        self._last = index
        cost, unread = self.known.costs.get(index), kept.site.unread
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

    def _begin(self, kept: Kept, rows: int) -> None:
        """A micro-batch begins: learn from those before, and choose."""
        if not self.sizes:
            self._enter(kept.device)
        self._settle(kept.device)
        self._seen, self._plan, self.latest, self._at_work = {}, {}, None, -math.inf
        free, need = self.free(kept.device), self.known.need
        self._others_are_seen = getattr(self.free, "sees_others", _never)(kept.device)
        if free is None or need is None or not self.known.costs:
            return
        length, chunk = kept.plan.length, rows * min(kept.plan.size, kept.plan.length)
        tokens = rows * length
        rooms = self._rooms(free, tokens, chunk)
        room = max(rooms)[1]
        self._device, self._slack = kept.device, SLACK * free
        if min(left for _, left in rooms) >= 0:
            self._plan = self._fill(rooms, range(self.layers), kept.device, tokens, length, len(kept.plan) == 1)
        self.latest = chosen = Chosen.of(tokens, chunk, room, self._plan)
        planned = sum(chosen.bytes.values())
        self._expected = free - max(0.0, room - planned)
        if planned:
            self._at_work = need.at_work(chunk)
            wished = {index: sum(c.bytes for c in found) for index, found in self._plan.items()}
            self._shortage = Shortage((tokens, chunk), room, planned, wished)

    def _fill(
        self, rooms: Rooms, indices: Iterable[int], device: torch.device, tokens: int, length: int, whole: bool
    ) -> dict[int, list[Candidate]]:
        """What these layers save of what fits, by worth.

        Args:
            rooms: taken up by what is saved. whole: the call is one chunk, whose graph may be kept.
        """
        known = self.known.costs
        here = {index: known[index] for index in indices if index in known and known[index].device == device}
        plan: dict[int, list[Candidate]] = {index: [] for index in indices}
        named_by = {index: list(cost.candidates(index, tokens, length)) for index, cost in here.items()}

        found = sorted(itertools.chain(*named_by.values()), key=lambda candidate: (-candidate.worth, -candidate.index))
        for index in sorted(here, reverse=True) if whole else ():
            if here[index].graph:
                found.append(Candidate(index, GRAPH, here[index].graph * tokens / here[index].tokens, 0.0))
        for candidate in found:
            index, size, named = candidate.index, candidate.bytes, 0.0
            if candidate.name == GRAPH:
                if len(plan[index]) < len(named_by[index]):
                    continue
                named = sum(other.bytes for other in plan[index])
                size, candidate = max(0.0, size - named), dataclasses.replace(candidate, bytes=max(size, named))
            for upto, room in rooms:
                if index <= upto and size > room:
                    break
            else:
                for entry in rooms:
                    entry[1] -= size if index <= entry[0] else 0.0
                plan[index] = [candidate] if candidate.name == GRAPH else [*plan[index], candidate]
        return plan

    def _take_back(self, kept: Kept, tokens: int) -> None:
        """Save less from this call's layer on if the device has less free than it should; if that is not enough, let go of
        what is saved."""
        free = self._look()
        short = 0.0 if free is None else self._expected - free
        if short <= self._slack:
            return
        self._expected -= short
        if self._shortage is not None and not self._others_are_seen:
            self._shortage.by = max(self._shortage.by, short)
        later = range(kept.site.index, self.layers)
        planned = sum(candidate.bytes for i in later for candidate in self._plan.get(i, []))
        if short > planned:
            self._drop(None, "less memory was free than planned")
        elif planned:
            rooms = [[math.inf, planned - short]]
            self._plan |= self._fill(rooms, later, self._device, tokens, kept.plan.length, len(kept.plan) == 1)

    def look(self, kept: Kept) -> None:
        """Let go of all saves if the device has less free than a chunk takes."""
        lack = self._shortage
        if lack is None or self._at_work == -math.inf or kept.device != self._device:
            return
        free = self._look()
        if free is None:
            return
        if not self._others_are_seen:
            gone = sum(lack.wished.get(other.site.index, 0.0) for other in self._waiting) if lack.gone else 0.0
            lack.by = max(lack.by, self._at_work + gone - free)
        if free < self._at_work and not lack.gone:
            self._drop(kept, "less memory was free than a chunk takes")

    def let_go(self, kept: Kept | None = None) -> bool:
        """The device has run out of memory, in this call or between layers: whether saves were there to be let go of."""
        self.failed()
        return self._drop(kept, f"{'the loss' if kept is None else 'a chunk'} ran out of memory")

    def failed(self) -> None:
        """A step has run out of memory: later ones like it save half of what this one wanted to."""
        if self._shortage is not None:
            self._shortage.by = max(self._shortage.by, self._shortage.planned / 2)
            self._shortage.failed = True

    def _settle(self, device: torch.device) -> None:
        """What the micro-batch before lacked, those like it leave free besides."""
        retries = getattr(self.free, "retries", None)
        tried = 0 if retries is None else retries(device)
        lack, self._shortage = self._shortage, None
        if lack is not None:
            if tried > self._retries:  # the allocator gave its cache back to go on
                lack.by = max(lack.by, self._slack)
            self.margins[lack.key] = lack.margin(self.margins.get(lack.key, Margin()))
        self._retries = tried

    def learn(self) -> Mapping[int, LayerCost]:
        """What is known of each layer, by its index; of those whose backward has run, what was seen."""
        costs = self.known.costs
        for index, seen in list(self._seen.items()):
            cost = seen.learnt()
            if cost is not None:
                before = costs.get(index)
                if before is not None and not cost.graph:
                    cost = dataclasses.replace(cost, graph=before.graph * cost.tokens / before.tokens)
                costs[index] = cost
                del self._seen[index]
        return costs

    def graphs(self, tokens: int, device: torch.device) -> float | None:
        """Bytes that the graphs of all layers take in a call of so many tokens over all rows, in one chunk; None where a
        layer's are not known, or lie elsewhere."""
        costs = self.learn()
        if len(costs) < self.layers or not all(cost.graph and cost.device == device for cost in costs.values()):
            return None
        return sum(cost.graph * tokens / cost.tokens for cost in costs.values())

    def spare(self, device: torch.device, tokens: int, chunk: int) -> float | None:
        """Bytes that a step without saves leaves free on a device; None where that is not known."""
        free, need = self.free(device), self.known.need
        return None if free is None or need is None else free - need(tokens, chunk, self.present)

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
        self._plan = {}
        if self._shortage is not None:
            self._shortage.gone = True
        if there and isinstance(self.latest, Chosen):
            self.latest.let_go = because
        return bool(there)
