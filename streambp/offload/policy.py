"""The one choice of saves="auto": how long chunks are, and what layers keep for their backward, on the device or the host.

[Note: saves that fit] `patch` decides nothing: a model may be moved, cast, frozen or given adapters afterwards. The choice
is taken when the first layer of a micro-batch begins, from what there is room for then and from what a step without saves
needs (the planner's law, counted once for each state of the model). Whatever else is there, an optimizer's states, other
models, other processes, gradients of earlier micro-batches, is part of what is not free. Saves change no value (but for
rounding, in half precision where plain products attend), so that each step, each micro-batch and each rank may decide anew.

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

[Note: saves on the host] With offloading there is room for what leaves behind the compute of a forward, at the rate of the
copies, and for what the host has (DESIGN.md section 5). The first forward of a length, within a factor of two, measures
both and saves nothing but inputs; attention's outputs only where attending again takes longer than copying. The forward
decides: a backward takes twice as long, and the link is no slower in its direction.

A call in one chunk, on a device with room for all of these, keeps its graph and recomputes nothing. [Note: kept graphs]
With four times the room it is not streamed at all. [Note: micro-batches as unpatched]
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from streambp.chunks import AUTO_RULE, in_one_pass, plan_chunks
from streambp.offload.arena import host_limit
from streambp.offload.costs import GRAPH, Candidate, Choice, Chosen, Figures, LayerCost, LayerSeen, Shortage
from streambp.offload.link import LinkBudget

SLACK = 0.01  # of the free memory at first: less is no sign that the law is wrong
CHUNK_TOKENS = (16384, 8192, 4096, 2048, 1024)  # over all rows of the batch
CLOSE = 0.002  # of the seconds: as fast
FORWARD = 0.25  # of a step's seconds: it computes everything once, and backward three times as much
REMEMBERED = 32  # margins

Free = Callable[[torch.device], float | None]  # which may have `forget`, `sees_others` and `retries`, as `FreeMemory` has
Rooms = list[list[float]]  # (index, bytes): what layers up to that one may save together


class SavesPolicy:
    """Chooses chunk sizes, and what each layer of a model saves. [Note: saves that fit]

    Args:
        layers: how many there are. free: bytes that a device has for a step; None: not known. states: what is known of the
            model's steps in its present state, and the part of its gradients that are there. sizes: it chooses chunk sizes.
        saves: and what is saved. link: what may leave the device; None: nothing does.

    latest: what the last micro-batch chose; None: nothing was known to choose from.
    """

    def __init__(
        self,
        layers: int,
        free: Free,
        states: Callable[[torch.device], tuple[Figures, float]],
        sizes: bool,
        saves: bool,
        link: LinkBudget | None = None,
    ) -> None:
        self.layers, self.free, self.states = layers, free, states
        self.sizes, self.keeps, self.link = sizes, saves, link
        self.latest: Choice | None = None
        self.known, self.present = Figures(), 0.0
        self._begun = self._others_are_seen = False
        self._chunks: dict[tuple[int, int], int] = {}
        self._seen: dict[int, LayerSeen] = {}
        self._plan: dict[int, list[Candidate]] = {}
        self._by_name: set[int] = set()  # layers whose graphs cannot be kept
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # of `layer.saved.Kept`
        self._last = layers  # the layer whose forward began last
        self._device = torch.device("meta")  # of the first layer: only layers on it save anything
        self._expected = 0.0  # bytes that must be free as the next layer begins, for what is planned
        self._slack = 0.0
        self._at_work = -math.inf  # bytes that should be free as a chunk begins; whatever is free where nothing was saved
        self._shortage: Shortage | None = None
        self._retries = 0
        self.margins: dict[tuple[int, int], Shortage] = {}  # by tokens and those of a chunk: the last, with its margin

    def __reduce__(self) -> Any:
        """A copied or pickled model has seen nothing."""
        return SavesPolicy, (self.layers, self.free, self.states, self.sizes, self.keeps, self.link)

    def __str__(self) -> str:
        if self.known.seconds is None:
            return f"{AUTO_RULE} ({self.known.why})" if self.known.why else AUTO_RULE
        sizes = ", ".join(f"{size:,}" for size in CHUNK_TOKENS)
        return f"auto: the fastest of {sizes} tokens over all rows of the batch that fits into the device's free memory"

    def begins(self, device: torch.device, with_layers: bool = False) -> None:
        """A forward of the model begins: ask the device and the model anew, once, before any layer or with the first."""
        if not self._begun:
            getattr(self.free, "forget", bool)()
            if self.link is not None:
                self.link.measure(list(self._seen.values()))
            self.learn()
            known, self.present = self.states(device)
            if known is not self.known:
                self.known, self._seen, self._by_name = known, {}, set()
                if self.link is not None:
                    self.link.measured.clear()
        self._begun = not with_layers

    def ended(self) -> None:
        """A forward of the model is over, however that came."""
        self._begun = False

    def chunk(self, index: int, batch_size: int, length: int, device: torch.device) -> int:
        """Positions per row for layer `index`; the first layer of a forward decides for all."""
        key = batch_size, length
        if index == 0 or key not in self._chunks:
            self.begins(device, with_layers=True)
            self._chunks = {key: self.size(batch_size, length, device)}
        return self._chunks[key]

    def size(self, batch_size: int, length: int, device: torch.device) -> int:
        """Positions per row of the chunks that are fastest with what fits beside them; the fewest if nothing fits."""
        known = self.known
        free = None if known.need is None or known.seconds is None else self.free(device)
        if free is None:
            return plan_chunks(length, batch_size, "auto").size
        size, best, tokens = 1, math.inf, batch_size * length
        for wanted in CHUNK_TOKENS:
            positions = max(1, wanted // batch_size)
            positions = length if positions >= length else in_one_pass(positions)
            if math.isinf(best):
                size = positions  # where nothing fits the last one stays
            fits, _, seconds = self.predicted(free, tokens, batch_size * positions, device, length)
            if fits and seconds < best * (1 - CLOSE):
                size, best = positions, seconds
        return size

    def predicted(
        self, free: float, tokens: int, chunk: int, device: torch.device, length: int
    ) -> tuple[bool, dict[int, list[Candidate]], float]:
        """Whether a step in chunks of so many tokens fits, what its layers save by name, and its seconds."""
        rooms, plan, seconds = self._rooms(free, tokens, chunk), {}, math.inf
        fits = min(room for _, room in rooms) >= 0
        if fits and self.keeps and self.link is None:
            plan = self._fill(rooms, range(self.layers), device, tokens, length, chunk == tokens)
        if self.known.seconds is not None:
            seconds = self.known.seconds(tokens, chunk) - self.known.spared(plan)
        return fits, plan, seconds

    def _rooms(self, free: float, tokens: int, chunk: int) -> Rooms:
        """What is left for saves beside a step without any."""
        assert self.known.need is not None
        lack = self.margins.get((tokens, chunk))
        free -= 0.0 if lack is None else lack.margin
        return [[upto, free - size] for upto, size in self.known.need.by_layer(tokens, chunk, self.present)]

    def saves(
        self, kept: Any, rows: int, can_keep_graph: Callable[[], bool]
    ) -> tuple[tuple[str, ...] | None, bool, LayerSeen | None]:
        """What the layer of this call saves; its forward begins.

        Args:
            kept: `layer.saved.Kept`, which can be asked to let go of it. can_keep_graph: whether its graph may be kept.

        Returns:
            names as in `StreamConfig.saves`, a Linear by its exact name, None for those of the configuration; whether its
            graph is saved instead; and what is to be told what its chunks cost, None if that is known.
        """
        index, length, unread = kept.site.index, kept.plan.length, kept.site.unread
        tokens = rows * length
        if index <= self._last:
            self._begin(kept, rows)
        elif self._plan and kept.device == self._device:
            free = self._free_now()
            short = 0.0 if free is None else self._expected - free
            if short > self._slack:  # save less from here on; if that is not enough, let go of what is saved
                self._expected -= short
                if self._shortage is not None and not self._others_are_seen:
                    self._shortage.missing = max(self._shortage.missing, short)
                later = range(index, self.layers)
                planned = sum(candidate.bytes for i in later for candidate in self._plan.get(i, []))
                if short > planned:
                    self._drop(None, "less memory was free than planned")
                elif planned:
                    rooms = [[math.inf, planned - short]]
                    self._plan |= self._fill(rooms, later, self._device, tokens, length, len(kept.plan) == 1)
        self._last, watch = index, None
        cost, chosen = self.known.costs.get(index), self._plan.get(index, [])
        if self.link is not None:
            if self.latest is None:
                watch = LayerSeen(kept.device, tokens, length, len(kept.plan), unread)
                self._seen[index] = self.link.watch(watch)
            return tuple(candidate.name for candidate in chosen) if self.keeps else None, False, watch
        if cost is None or cost.situations != len(unread) or cost.device != kept.device:
            watch = self._seen[index] = LayerSeen(kept.device, tokens, length, len(kept.plan), unread)
        if kept.device != self._device:
            return (), False, watch
        graph = GRAPH in [candidate.name for candidate in chosen]
        if graph and not (watch is None and can_keep_graph()):
            if watch is None:
                self._by_name.add(index)
            rooms = [[math.inf, sum(candidate.bytes for candidate in chosen)]]
            graph, chosen = False, self._fill(rooms, [index], None, tokens, length, True, (GRAPH,))[index]
            self._plan[index] = chosen
        elif index in self._by_name and can_keep_graph():
            self._by_name.discard(index)
        self._waiting.add(kept)
        inputs = 0.0 if cost is None else cost.scaled_to(tokens).x
        self._expected -= sum(candidate.bytes for candidate in chosen) + inputs
        return () if graph else tuple(candidate.name for candidate in chosen), graph, watch

    def _begin(self, kept: Any, rows: int) -> None:
        """A micro-batch begins: learn from those before, and choose."""
        if not self.sizes:
            self.begins(kept.device, with_layers=True)
        lack, self._shortage = self._shortage, None
        if lack is not None:  # what the micro-batch before lacked, those like it leave free besides
            retries = getattr(self.free, "retries", lambda _: 0)(self._device)
            if retries > self._retries:  # the allocator gave its cache back to go on
                lack.missing = max(lack.missing, self._slack)
            lack.learn(self.margins.pop(lack.key, None))
            self.margins = {**dict(list(self.margins.items())[1 - REMEMBERED :]), lack.key: lack}
        self._seen, self._plan, self.latest, self._at_work = {}, {}, None, -math.inf
        length, chunk = kept.plan.length, rows * min(kept.plan.size, kept.plan.length)
        if self.link is not None:
            self._begin_on_host(self.link, length, chunk)
            return
        free, need, tokens = self.free(kept.device), self.known.need, rows * length
        self._others_are_seen = getattr(self.free, "sees_others", lambda _: False)(kept.device)
        if free is None or need is None or not self.known.costs:
            return
        room = max(room for _, room in self._rooms(free, tokens, chunk))
        self._device, self._slack = kept.device, SLACK * free
        self._retries = getattr(self.free, "retries", lambda _: 0)(kept.device)
        _, self._plan, _ = self.predicted(free, tokens, chunk, kept.device, length)
        self.latest = chosen = Chosen(tokens, length, chunk, room, self._plan)
        planned = sum(chosen.bytes.values())
        self._expected = free - max(0.0, room - planned)
        if planned:
            self._at_work = need.at_work(chunk)
            wished = {index: sum(c.bytes for c in found) for index, found in self._plan.items()}
            self._shortage = Shortage((tokens, chunk), room, planned, wished)

    def _begin_on_host(self, link: LinkBudget, length: int, chunk: int) -> None:
        """Choose what leaves, or let it be measured. [Note: saves on the host]"""
        measured, costs = link.begin(length), self.known.costs
        if measured is None:
            return
        whole = functools.reduce(operator.add, (cost.scaled_to(measured.tokens) for cost in costs.values()))
        attends = whole.attention_flops / measured.attention <= whole.attn_out / measured.link
        why = {"attn_out": "attending again is faster than copying"} if attends and whole.attn_out else {}
        hidden = measured.seconds * measured.link  # bytes whose copies hide behind the forward's compute
        room = min(hidden, measured.host) - whole.x
        self._plan = self._fill([[math.inf, room]], costs, None, measured.tokens, measured.length, False, why)
        self.latest = Chosen(measured.tokens, measured.length, chunk, room, self._plan, measured, whole.x, why)
        for name in sorted(whole.overwritten):
            why.setdefault(name, "layers that overwrite it compute it again")
        full = f"the {'host' if measured.host < hidden else 'link'} has no room"
        for name in (*(name for name in ("attn_out", "kv") if getattr(whole, name)), *whole.products):
            if self.latest.layers.get(name, 0) < len(costs):
                why.setdefault(name, full)

    def faster_on_host(self) -> float:
        """Seconds that the last step would have been shorter with offload="cpu", by the device's rates; 0: not known."""
        chosen, known, costs = self.latest, self.known, self.known.costs
        if not isinstance(chosen, Chosen) or self.link is not None or known.seconds is None:
            return 0.0
        if GRAPH in chosen.layers or chosen.layers.get("attn_out", 0) == len(costs):
            return 0.0
        room = min(FORWARD * known.seconds(chosen.tokens, chosen.chunk) * known.link, host_limit(None))
        room -= sum(cost.scaled_to(chosen.tokens).x for cost in costs.values())
        plan = self._fill([[math.inf, room]], costs, None, chosen.tokens, chosen.length, False)
        return max(0.0, known.spared(plan) - chosen.spared / known.products)

    def _fill(
        self,
        rooms: Rooms,
        indices: Iterable[int],
        device: torch.device | None,
        tokens: int,
        length: int,
        whole: bool,
        without: Container[str] = (),
    ) -> dict[int, list[Candidate]]:
        """What these layers save of what fits, by worth.

        Args:
            rooms: taken up by what is saved. device: of the layers that save; None: all do. whole: the call is one chunk,
                whose graph may be kept. without: names of what nobody saves.
        """
        plan: dict[int, list[Candidate]] = {index: [] for index in indices}
        found: list[Candidate] = []
        graphs: dict[int, Candidate] = {}
        taken = dict.fromkeys(plan, 0.0)
        for index in plan:
            cost = self.known.costs.get(index)
            if cost is not None and device in (None, cost.device):
                named = [one for one in cost.candidates(index, tokens, length, whole) if one.name not in without]
                found += named
                if whole and cost.graph and GRAPH not in without and index not in self._by_name:
                    size = cost.graph * tokens / cost.tokens
                    graphs[index] = Candidate(index, GRAPH, size, sum(one.bytes * one.worth for one in named) / size)
        ordered = sorted(found, key=lambda one: (-one.worth, -one.index))
        for candidate in (*ordered, *sorted(graphs.values(), key=lambda one: -one.index)):
            index, size, graph = candidate.index, candidate.bytes, graphs.get(candidate.index)
            if graph is not None and graph.bytes <= taken[index] + size:  # it keeps all that has a name, and takes no more
                candidate, size = graph, graph.bytes - taken[index]
            if graph not in plan[index] and all(size <= room for upto, room in rooms if index <= upto):
                for entry in rooms:
                    entry[1] -= size if index <= entry[0] else 0.0
                plan[index] = [candidate] if candidate is graph else [*plan[index], candidate]
                taken[index] += size
        return plan

    def check_room(self, kept: Any) -> None:
        """Let go of all saves if the device has less free than a chunk takes."""
        lack = self._shortage
        if lack is None or self._at_work == -math.inf or kept.device != self._device:
            return
        free = self._free_now()
        if free is None:
            return
        if not self._others_are_seen:
            gone = sum(lack.wished.get(other.site.index, 0.0) for other in self._waiting) if lack.gone else 0.0
            lack.missing = max(lack.missing, self._at_work + gone - free)
        if free < self._at_work and not lack.gone:
            self._drop(kept, "less memory was free than a chunk takes")

    def let_go(self, kept: Any | None = None) -> bool:
        """The device has run out of memory, in this call or between layers: whether saves were there to be let go of."""
        self.failed()
        return self._drop(kept, f"{'the loss' if kept is None else 'a chunk'} ran out of memory")

    def failed(self) -> None:
        """A step has run out of memory: later ones like it save half of what this one wanted to."""
        if self._shortage is not None:
            self._shortage.missing = max(self._shortage.missing, self._shortage.planned / 2)
            self._shortage.failed = True

    def learn(self) -> Mapping[int, LayerCost]:
        """What is known of each layer, by its index; of those whose backward has run, what was seen."""
        costs = self.known.costs
        for index, seen in list(self._seen.items()):
            cost = seen.learnt()
            if cost is not None:
                before = costs.get(index)
                if before is not None and not cost.graph:
                    cost = cost._replace(graph=before.graph * cost.tokens / before.tokens)
                costs[index] = cost
                del self._seen[index]
        return costs

    def graphs(self, tokens: int, device: torch.device) -> tuple[float, float] | None:
        """Bytes that the graphs of all layers take in a call of so many tokens over all rows, in one chunk, and those that
        a step without saves leaves free on the device; None where one of them is not known, or a layer lies elsewhere."""
        costs, free, need = self.learn(), self.free(device), self.known.need
        if len(costs) < self.layers or free is None or need is None:
            return None
        taken = 0.0
        for cost in costs.values():
            if not cost.graph or cost.device != device:
                return None
            taken += cost.graph * tokens / cost.tokens
        return taken, free - need(tokens, tokens, self.present)

    def _free_now(self) -> float | None:
        free = self.free(self._device)
        if free is not None and isinstance(self.latest, Chosen):
            self.latest.least = min(self.latest.least, free)
        return free

    def _drop(self, kept: Any | None, because: str) -> bool:
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
