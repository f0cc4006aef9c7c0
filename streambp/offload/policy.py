"""Choose chunk sizes and saved tensors for saves="auto", on the device or the host.

[Note: saves that fit] `patch` decides nothing, because a model may be moved, cast, frozen or given
adapters afterwards. The choice is made when the first layer of a micro-batch begins. The policy
compares the free memory with the need of a step without saves (the planner's formula, computed once
for each state of the model). Other memory users are simply part of the memory that is not free:
optimizer states, other models, other processes, gradients of earlier micro-batches. Saves change no
value, except for rounding in half precision where plain products attend. Each step, each
micro-batch and each rank may therefore choose anew.

Saves are ordered by seconds spared for each byte, and within one kind from the last layer to the
first. The last layers' backward runs first, so their saves are freed before the first layers'
gradients are allocated. Among the chunk sizes whose step fits, the policy takes the fastest one,
given the saves that fit beside the step. A step never saves more than the formula allows. If the
formula is wrong, or other users take memory meanwhile, less is saved:

    before each layer in forward       memory that is missing now is taken from the saves of later
                                       layers, or else all saves are freed
    before each chunk, both ways       if less is free than the chunk needs, all waiting layers free
                                       their saves
    a chunk runs out, either way       the same, and the chunk is computed again
                                       ([Note: once for each chunk])
    the next steps of as many tokens   leave the missing memory free too; each successful step returns
                                       a tenth of this margin

The driver reports the free memory when a forward begins and when its first layer begins. Between
these points the driver's last report and torch's own counters give the free memory.

Three quantities limit saves with offloading (DESIGN.md section 5). Copies must hide behind a
forward's compute. The host's memory is limited. So is `gpu_memory`, the device's memory for tensors
that stay. The first forward of a length, within a factor of two, measures them and saves nothing
but inputs. Attention outputs leave only if attending again takes longer than copying. Only the
forward counts, because a backward takes twice as long and the link is no slower in its direction.
One choice decides about saves and their places. [Note: two rooms]

If offload="if_faster", each micro-batch also decides if saved tensors are copied to the host
([Note: host by seconds]).

A call in one chunk, on a device with room for all saves, keeps its graph and recomputes nothing
([Note: kept graphs]). A call whose graphs fit into four fifths of the room is not streamed at all
([Note: micro-batches as unpatched]).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from streambp.chunks import AUTO_RULE, in_one_pass, plan_chunks
from streambp.offload.costs import (
    GRAPH,
    BatchSaves,
    Candidate,
    Choice,
    Chosen,
    Figures,
    LayerCost,
    Measured,
    ObservedCosts,
    Shortage,
    never_leaving,
)
from streambp.offload.free_memory import host_limit
from streambp.offload.link import LinkBudget
from streambp.offload.moving import HostChoice, MovingStep, Shape
from streambp.offload.places import Places, TwoRooms, choose_places

IGNORED_SHARE_OF_FREE_MEMORY = (
    0.01  # fraction of the initial free memory; smaller deviations are ignored
)
ROOMS_PER_INPUT = 64  # rooms that are told apart, for the bytes of all layers' inputs
CHUNK_TOKENS = (32768, 16384, 8192, 4096, 2048, 1024)  # over all rows of the batch
EQUAL_SECONDS = 0.002  # seconds with a smaller relative difference count as equal
FORWARD = 0.25  # forward's fraction of a step's seconds; backward computes three times as much
REMEMBERED = 32  # maximal number of margins
ON_HOST = "on the host"  # marks the margins of micro-batches that move saved tensors

Free = Callable[[torch.device], float | None]  # optional methods are those of `FreeMemory`
Rooms = list[list[float]]  # (index, bytes): common budget of all layers up to `index`


class SavesPolicy:
    """Chooses chunk sizes, and the tensors that each layer saves for backward, by the free memory
    of the device. [Note: saves that fit]

    Args:
        layers: number of layers.
        free: returns the bytes that a device has free for a step; None: unknown.
        states: returns predictions for the model's steps, and the fraction of its gradients that
            exist already.
        sizes: True if chunk sizes are chosen (chunk_size="auto").
        saves: True if saved tensors are chosen (saves="auto").
        link: budget of tensors that are copied to the host; None: saved tensors stay on the device.
        host: decides in each micro-batch if saved tensors are copied to the host; None: the
            settings decide. [Note: host by seconds]

    Attributes:
        latest: the last micro-batch's choice; None: too little information for a choice.
        moving: the prediction by which the micro-batch moves saved tensors to the host; None: the
            tensors stay, or `link` decides.
    """

    def __init__(
        self,
        layers: int,
        free: Free,
        states: Callable[[torch.device], tuple[Figures, float]],
        sizes: bool,
        saves: bool,
        link: LinkBudget | None = None,
        host: HostChoice | None = None,
    ) -> None:
        self.host = host
        self.moving: MovingStep | None = None
        self._decided: Shape | None = None  # size of the micro-batch for which `moving` is known
        self.layers = layers
        self.free = free
        self.states = states
        self.sizes = sizes
        self.keeps = saves
        self.link = link
        self.latest: Choice | None = None
        self.known = Figures()
        self.present = 0.0
        self._begun = False
        self._chunks: dict[tuple[int, int], int] = {}
        self._seen: dict[int, ObservedCosts] = {}
        self._by_name: set[int] = set()  # layers whose graphs cannot be kept
        self._waiting: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # instances of `layer.saved.SavedForBackward`
        # choices with offload="auto", by the measurements and the device's room
        self._places: dict[tuple[Measured, float], Places] = {}
        self._batch = BatchSaves()
        # keys are tokens of a step and of a chunk, or `Shape` and ON_HOST
        self.margins: dict[tuple[Any, ...], Shortage] = {}

    def __reduce__(self) -> Any:
        """Return what copy and pickle need to make a new object without measurements."""
        settings = (self.layers, self.free, self.states, self.sizes, self.keeps)
        return SavesPolicy, (*settings, self.link, self.host)

    def __str__(self) -> str:
        if self.known.seconds is None:
            return f"{AUTO_RULE} ({self.known.why})" if self.known.why else AUTO_RULE
        sizes = ", ".join(f"{size:,}" for size in CHUNK_TOKENS)
        return (
            f"auto: the fastest of {sizes} tokens over all rows of the batch that fits into the "
            "device's free memory"
        )

    def begins(self, device: torch.device, with_layers: bool = False) -> None:
        """Record that a forward of the model begins. The device's free memory and the model's
        predictions are read once for each forward.

        Args:
            device: the device of the input.
            with_layers: True if the caller is the first layer and not the model.
        """
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
        """Record that a forward of the model has ended, with or without an exception. Called by the
        backbone."""
        self._begun = False

    def chunk(self, index: int, batch_size: int, length: int, device: torch.device) -> int:
        """Return the chunk size for layer `index`, in positions of each row. The first layer of a
        forward decides for all layers.

        Args:
            index: index of the layer.
            batch_size: number of rows.
            length: tokens of each row.
            device: the layer's device.
        """
        key = batch_size, length
        if index == 0 or key not in self._chunks:
            self.begins(device, with_layers=True)
            self._chunks = {key: self.size(batch_size, length, device)}
        return self._chunks[key]

    def size(self, batch_size: int, length: int, device: torch.device) -> int:
        """Return the chunk size in positions of each row with which a step is fastest among the
        sizes that fit into memory. If no size fits, return the smallest."""
        known = self.known
        self.moving = None
        free = None if known.need is None or known.seconds is None else self.free(device)
        if free is None:
            return plan_chunks(length, batch_size, "auto").size
        size = 1
        best = math.inf
        chosen: dict[int, list[Candidate]] = {}
        tokens = batch_size * length
        sizes = []
        for wanted in CHUNK_TOKENS:
            positions = max(1, wanted // batch_size)
            positions = length if positions >= length else in_one_pass(positions)
            sizes.append(positions)
            if math.isinf(best):
                size = positions  # if no size fits, the last one remains
            fits, plan, seconds = self.predicted(
                free, tokens, batch_size * positions, device, length
            )
            if fits and seconds < best * (1 - EQUAL_SECONDS):
                size = positions
                best = seconds
                chosen = plan
        if self.host is not None and known.on_host is not None:
            rows = (batch_size, length)
            self.moving = self._faster_on_host(sizes, rows, device, free, (best, chosen))
            if self.moving is not None:
                size = self.moving.shape.chunk // batch_size
            self._decided = Shape(tokens, length, batch_size * size)
        return size

    def _faster_on_host(
        self,
        sizes: Iterable[int],
        rows: tuple[int, int],
        device: torch.device,
        free: float,
        staying: tuple[float, Mapping[int, list[Candidate]]],
    ) -> MovingStep | None:
        """Return the prediction for the micro-batch if saved tensors must move to the host; None if
        they must stay on the device. [Note: host by seconds]

        Args:
            sizes: chunk sizes to try, in positions of each row.
            rows: number of rows, and tokens of each row.
            device: the device.
            free: free bytes of the device.
            staying: seconds and saved tensors of the fastest step that moves nothing; infinity if
                none fits.
        """
        host, known = self.host, self.known
        assert host is not None
        assert known.on_host is not None
        batch_size, length = rows
        tokens = batch_size * length
        host.reset()
        if not (host.allowed and self.keeps) or host.must_draw_alike():
            return None
        costs = known.costs
        if len(costs) < self.layers or any(cost.device != device for cost in costs.values()):
            return None
        seconds, plan = staying
        unsaved = known.worth(tokens, length) - known.spared(plan)
        if not host.is_worth_counting(unsaved, seconds):
            return None
        figures = known.on_host()
        if figures is None:
            return None
        fastest = None
        room = host.room(figures)
        for size in dict.fromkeys(sizes):
            shape = Shape(tokens, length, batch_size * size)
            # Memory that similar micro-batches lacked, wherever their tensors were.
            lacks = (self.margins.get(key) for key in ((*shape, ON_HOST), (tokens, shape.chunk)))
            margin = max((lack.margin for lack in lacks if lack is not None), default=0.0)
            left = free - figures.need(tokens, shape.chunk, self.present) - margin
            step = host.predicted(figures, costs, shape, left, room)
            if not step.fits:
                continue
            if fastest is None or step.seconds < fastest.seconds * (1 - EQUAL_SECONDS):
                fastest = step
        if fastest is None or not host.pays(fastest, seconds):
            return None
        return fastest

    def predicted(
        self, free: float, tokens: int, chunk: int, device: torch.device, length: int
    ) -> tuple[bool, dict[int, list[Candidate]], float]:
        """Return three predictions for a step in chunks of `chunk` tokens: True if the step fits
        into memory, the tensors that each layer can save (by index), and the step's seconds with
        them.

        Args:
            free: free bytes of the device.
            tokens: tokens over all rows.
            chunk: tokens of a chunk over all rows.
            device: the device.
            length: tokens of each row.
        """
        rooms = self._rooms(free, tokens, chunk)
        plan = {}
        seconds = math.inf
        fits = min(room for _, room in rooms) >= 0
        if fits and self.keeps and self.link is None:
            plan = self._fill(rooms, range(self.layers), device, tokens, length, chunk == tokens)
        if self.known.seconds is not None:
            seconds = self.known.seconds(tokens, chunk) - self.known.spared(plan)
        return fits, plan, seconds

    def _rooms(self, free: float, tokens: int, chunk: int) -> Rooms:
        """Return pairs [index, bytes]: the bytes that saved tensors may take while the layers 0 to
        `index` wait for their backward, that is after their forward.

        Args:
            free: free bytes of the device.
            tokens: tokens over all rows.
            chunk: tokens of a chunk over all rows.
        """
        assert self.known.need is not None
        lack = self.margins.get((tokens, chunk))
        free -= 0.0 if lack is None else lack.margin
        return [
            [upto, free - size]
            for upto, size in self.known.need.by_layer(tokens, chunk, self.present)
        ]

    def saves(
        self, kept: Any, rows: int, can_keep_graph: Callable[[], bool]
    ) -> tuple[tuple[str, ...] | None, bool, ObservedCosts | None]:
        """Return the tensors that a layer must save in its forward, which begins now.

        Args:
            kept: record of what this call saves, with a method that frees saved tensors.
            rows: number of rows.
            can_keep_graph: returns True if the layer's autograd graph may be saved.

        Returns:
            Names of the tensors in the form of `StreamConfig.saves`; the output of a Linear has the
                Linear's name in the layer. None: the names in the configuration.
            True if the layer's autograd graph is saved in place of single tensors.
            An object that records bytes and FLOPs of the layer's chunks; None: both are known.
        """
        index = kept.layer_state.index
        length = kept.plan.length
        unread = kept.layer_state.tests.unread
        tokens = rows * length
        if index <= self._batch.last:
            self._begin(kept, rows)
        elif self._batch.plan and kept.device == self._batch.device:
            self._shrink(kept, tokens)
        batch = self._batch
        batch.last = index
        if self.host is not None:
            kept.moves = self.moving is not None
        watch = None
        cost = self.known.costs.get(index)
        chosen = batch.plan.get(index, [])
        if self.link is not None:
            if self.latest is None:
                watch = ObservedCosts(kept.device, tokens, length, len(kept.plan), unread)
                self._seen[index] = self.link.watch(watch)
            return (
                tuple(candidate.name for candidate in chosen) if self.keeps else None,
                False,
                watch,
            )
        if cost is None or cost.situations != len(unread) or cost.device != kept.device:
            watch = self._seen[index] = ObservedCosts(
                kept.device, tokens, length, len(kept.plan), unread
            )
        if kept.device != batch.device:
            return (), False, watch
        graph = GRAPH in [candidate.name for candidate in chosen]
        if graph and not (watch is None and can_keep_graph()):
            if watch is None:
                self._by_name.add(index)
            rooms = [[math.inf, sum(candidate.bytes for candidate in chosen)]]
            graph = False
            chosen = self._fill(rooms, [index], None, tokens, length, True, (GRAPH,))[index]
            batch.plan[index] = chosen
        elif index in self._by_name and can_keep_graph():
            self._by_name.discard(index)
        self._waiting.add(kept)
        if self.moving is not None:
            batch.expected -= self.moving.places.stays(index)
        else:
            inputs = 0.0 if cost is None else cost.scaled_to(tokens).x
            batch.expected -= sum(candidate.bytes for candidate in chosen) + inputs
        return () if graph else tuple(candidate.name for candidate in chosen), graph, watch

    def _shrink(self, kept: Any, tokens: int) -> None:
        """Choose fewer saved tensors for the remaining layers, or free all saved tensors, if less
        memory is free than planned.

        Args:
            kept: record of what the running layer's call saves.
            tokens: tokens over all rows.
        """
        batch = self._batch
        index = kept.layer_state.index
        free = self._free_now()
        short = 0.0 if free is None else batch.expected - free
        if short <= batch.slack:
            return
        batch.expected -= short
        if batch.shortage is not None and not batch.others_are_seen:
            batch.shortage.missing = max(batch.shortage.missing, short)
        later = range(index, self.layers)
        if self.moving is not None:
            freed = self.moving.places.let_leave(later, short)
            if freed < short:
                self._drop(None, "less memory was free than planned")
            return
        planned = sum(candidate.bytes for i in later for candidate in batch.plan.get(i, []))
        if short > planned:
            self._drop(None, "less memory was free than planned")
        elif planned:
            rooms = [[math.inf, planned - short]]
            batch.plan |= self._fill(
                rooms, later, batch.device, tokens, kept.plan.length, len(kept.plan) == 1
            )

    def _begin(self, kept: Any, rows: int) -> None:
        """Begin a micro-batch: learn from the previous micro-batch how much memory to leave free,
        and choose the tensors that each layer saves.

        Args:
            kept: record of what the first layer's call saves.
            rows: number of rows.
        """
        if not self.sizes:
            self.begins(kept.device, with_layers=True)
        previous = self._batch
        lack = previous.shortage
        if lack is not None:  # leave free what the previous one lacked
            retries = getattr(self.free, "retries", lambda _: 0)(previous.device)
            if retries > previous.retries:  # the allocator freed its cache
                lack.missing = max(lack.missing, previous.slack)
            lack.learn(self.margins.pop(lack.key, None))
            self.margins = {**dict(list(self.margins.items())[1 - REMEMBERED :]), lack.key: lack}
        self._seen = {}
        self._batch = batch = BatchSaves(device=previous.device)
        self.latest = None
        length = kept.plan.length
        chunk = rows * min(kept.plan.size, kept.plan.length)
        if self.link is not None:
            self._begin_on_host(self.link, rows * length, length, chunk)
            return
        free = self.free(kept.device)
        need = self.known.need
        tokens = rows * length
        if self.host is not None and self.known.on_host is not None and free is not None:
            self._decide_for(Shape(tokens, length, chunk), kept.device, free)
            if self.moving is not None:
                self._begin_moving(self.moving, kept.device, free)
                return
        batch.others_are_seen = getattr(self.free, "sees_others", lambda _: False)(kept.device)
        if free is None or need is None or not self.known.costs:
            return
        room = max(room for _, room in self._rooms(free, tokens, chunk))
        batch.device = kept.device
        batch.slack = IGNORED_SHARE_OF_FREE_MEMORY * free
        batch.retries = getattr(self.free, "retries", lambda _: 0)(kept.device)
        _, batch.plan, _ = self.predicted(free, tokens, chunk, kept.device, length)
        self.latest = chosen = Chosen(tokens, length, chunk, room, batch.plan)
        planned = sum(chosen.bytes.values())
        batch.expected = free - max(0.0, room - planned)
        if planned:
            batch.at_work = need.at_work(chunk)
            wished = {index: sum(c.bytes for c in found) for index, found in batch.plan.items()}
            batch.shortage = Shortage((tokens, chunk), room, planned, wished)

    def _decide_for(self, shape: Shape, device: torch.device, free: float) -> None:
        """Decide if the micro-batch that begins moves saved tensors to the host, unless the choice
        of its chunk size has decided. [Note: host by seconds]

        Args:
            shape: size of the micro-batch.
            device: the device.
            free: free bytes of the device.
        """
        assert self.host is not None
        if shape != self._decided or not self.sizes:
            self.moving = None
            if self.known.need is not None and self.known.seconds is not None:
                tokens, length, chunk = shape
                fits, plan, seconds = self.predicted(free, tokens, chunk, device, length)
                staying = (seconds if fits else math.inf, plan)
                batch_size = max(1, tokens // max(1, length))
                rows = (batch_size, length)
                size = max(1, chunk // batch_size)
                self.moving = self._faster_on_host([size], rows, device, free, staying)
        self._decided = None
        self.host.began(self.moving)

    def _begin_moving(self, step: MovingStep, device: torch.device, free: float) -> None:
        """Begin a micro-batch that moves saved tensors to the host. [Note: host by seconds]

        Args:
            step: the prediction for the micro-batch.
            device: the device.
            free: free bytes of the device.
        """
        assert self.host is not None
        assert self.known.on_host is not None
        figures = self.known.on_host()
        assert figures is not None
        places = step.places.copied()
        self.moving = step = dataclasses.replace(step, places=places)
        self.host.prepare(step)
        batch = self._batch
        batch.device = device
        batch.plan = places.saved
        batch.slack = IGNORED_SHARE_OF_FREE_MEMORY * free
        batch.retries = getattr(self.free, "retries", lambda _: 0)(device)
        batch.others_are_seen = getattr(self.free, "sees_others", lambda _: False)(device)
        shape, pace = step.shape, step.pace
        room = pace.link * pace.forward  # bytes whose copies hide behind forward
        measured = Measured(
            shape.tokens, shape.length, pace.forward, pace.link, pace.attention, step.host
        )
        inputs = places.inputs
        self.latest = Chosen(*shape, min(room, step.host), places.saved, measured, inputs)
        self.latest.on_device = planned = places.on_device
        batch.expected = free - max(0.0, step.left - planned)
        if planned:
            batch.at_work = figures.need.at_work(shape.chunk)
            wished = {index: places.stays(index) for index in places.saved}
            batch.shortage = Shortage((*shape, ON_HOST), step.left, planned, wished)

    def _begin_on_host(self, link: LinkBudget, tokens: int, length: int, chunk: int) -> None:
        """Choose the tensors that this micro-batch saves, and those of them that are copied to the
        host. If no forward of similar length was measured yet, this forward is measured and nothing
        is chosen. The copies of a later choice must hide behind a forward's compute.

        Args:
            link: budget and measurements of the copies.
            tokens: tokens over all rows.
            length: tokens of each row.
            chunk: tokens of a chunk over all rows.
        """
        measured = link.begin(length)
        link.manager.staying = None
        costs = self.known.costs
        if measured is None:
            self._places.clear()
            return
        whole = functools.reduce(
            operator.add, (cost.scaled_to(measured.tokens) for cost in costs.values())
        )
        attending = whole.attention_flops / measured.attention
        never_leave = never_leaving(attending, whole.attn_out / measured.link)
        hidden = measured.seconds * measured.link  # bytes whose copies hide behind forward
        on_device = link.room_on_device(tokens) * measured.tokens / tokens
        # Steps of other lengths have other rooms. Few different rooms need few choices.
        on_device -= on_device % (whole.x / ROOMS_PER_INPUT)
        inputs: dict[int, float] = {}
        candidates: dict[int, list[Candidate]] = {}
        for index, cost in costs.items():
            inputs[index] = cost.scaled_to(measured.tokens).x
            candidates[index] = list(cost.candidates(index, measured.tokens, measured.length))
        rooms = TwoRooms(measured.host, hidden / len(costs), on_device, never_leave)
        key = measured, on_device
        if key not in self._places:
            self._places[key] = choose_places(inputs, candidates, rooms)
        places = self._places[key]
        self._batch.plan = places.saved
        if self.keeps:
            link.manager.staying = places.staying
        self.latest = Chosen(
            measured.tokens,
            measured.length,
            chunk,
            min(hidden, measured.host) + on_device - whole.x,
            places.saved,
            measured,
            whole.x,
        )
        self.latest.on_device = places.on_device
        why = self.latest.left_out
        for name in never_leave if whole.attn_out else ():
            if self.latest.layers.get(name, 0) < len(costs):
                why[name] = "attending again is faster than copying"
        for name in sorted(whole.overwritten):
            why.setdefault(name, "layers that overwrite it compute it again")
        full = f"the {'host' if measured.host < hidden else 'link'} has no room"
        for name in (
            *(name for name in ("attn_out", "kv") if getattr(whole, name)),
            *whole.products,
        ):
            if self.latest.layers.get(name, 0) < len(costs):
                why.setdefault(name, full)

    def faster_on_host(self) -> float:
        """Return the predicted seconds by which offload="cpu" would have shortened the last step; 0
        if unknown."""
        chosen = self.latest
        known = self.known
        costs = self.known.costs
        on_host = self.link is not None or known.on_host is not None
        if not isinstance(chosen, Chosen) or on_host or known.seconds is None:
            return 0.0
        if GRAPH in chosen.layers or chosen.layers.get("attn_out", 0) == len(costs):
            return 0.0
        room = min(
            FORWARD * known.seconds(chosen.tokens, chosen.chunk) * known.link, host_limit(None)
        )
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
        """Return the tensors that each of these layers saves, by layer index. Tensors are added
        while they fit; the order is by the FLOPs that a saved byte spares, most first.

        Args:
            rooms: pairs [index, bytes] as in `_rooms`; the bytes of the chosen tensors are
                subtracted in place.
            indices: indices of the layers.
            device: only layers on this device save; None: all layers save.
            tokens: tokens over all rows.
            length: tokens of each row.
            whole: True if the call is one chunk, so that a layer's graph may be saved.
            without: names that no layer saves.
        """
        plan: dict[int, list[Candidate]] = {index: [] for index in indices}
        found: list[Candidate] = []
        graphs: dict[int, Candidate] = {}
        taken = dict.fromkeys(plan, 0.0)
        for index in plan:
            cost = self.known.costs.get(index)
            if cost is not None and device in (None, cost.device):
                named = [
                    one
                    for one in cost.candidates(index, tokens, length, whole)
                    if one.name not in without
                ]
                found += named
                if whole and cost.graph and GRAPH not in without and index not in self._by_name:
                    size = cost.graph * tokens / cost.tokens
                    graphs[index] = Candidate(
                        index, GRAPH, size, sum(one.bytes * one.worth for one in named) / size
                    )
        ordered = sorted(found, key=lambda one: (-one.worth, -one.index))
        for candidate in (*ordered, *sorted(graphs.values(), key=lambda one: -one.index)):
            index = candidate.index
            size = candidate.bytes
            graph = graphs.get(candidate.index)
            # all named saves are in the graph
            if graph is not None and graph.bytes <= taken[index] + size:
                candidate = graph
                size = graph.bytes - taken[index]
            if graph not in plan[index] and all(
                size <= room for upto, room in rooms if index <= upto
            ):
                for entry in rooms:
                    entry[1] -= size if index <= entry[0] else 0.0
                plan[index] = [candidate] if candidate is graph else [*plan[index], candidate]
                taken[index] += size
        return plan

    def check_room(self, kept: Any) -> None:
        """Free all saved tensors if the device has less memory free than a chunk needs.

        Args:
            kept: record of what the running layer's call saves.
        """
        batch = self._batch
        lack = batch.shortage
        if lack is None or batch.at_work == -math.inf or kept.device != batch.device:
            return
        free = self._free_now()
        if free is None:
            return
        if not batch.others_are_seen:
            if lack.gone:
                gone = sum(lack.wished.get(other.layer_state.index, 0.0) for other in self._waiting)
            else:
                gone = 0.0
            lack.missing = max(lack.missing, batch.at_work + gone - free)
        if free < batch.at_work and not lack.gone:
            self._drop(kept, "less memory was free than a chunk takes")

    def let_go(self, kept: Any | None = None) -> bool:
        """Free all saved tensors after the device ran out of memory, so that the failed computation
        can be repeated. Return True if any tensor was saved.

        Args:
            kept: record of what the running layer's call saves; None: no layer runs.
        """
        self.failed()
        return self._drop(kept, f"{'the loss' if kept is None else 'a chunk'} ran out of memory")

    def failed(self) -> None:
        """Record that a step ran out of device memory. Similar steps then save at most half of the
        bytes that were planned for this step."""
        lack = self._batch.shortage
        if lack is not None:
            lack.missing = max(lack.missing, lack.planned / 2)
            lack.failed = True

    def learn(self) -> Mapping[int, LayerCost]:
        """Return bytes and FLOPs of the tensors that each layer may save, by layer index, for the
        next choice. Predictions are replaced by measurements for layers whose backward has run."""
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
        """Return the bytes of all layers' autograd graphs for `tokens` tokens in one chunk, and the
        bytes that a step without saved tensors in one chunk leaves free. A micro-batch runs
        unpatched only if the graphs take a small part of these bytes.

        None if either is unknown, or a layer is on another device.
        """
        costs = self.learn()
        free = self.free(device)
        need = self.known.need
        if len(costs) < self.layers or free is None or need is None:
            return None
        taken = 0.0
        for cost in costs.values():
            if not cost.graph or cost.device != device:
                return None
            taken += cost.graph * tokens / cost.tokens
        return taken, free - need(tokens, tokens, self.present)

    def _free_now(self) -> float | None:
        free = self.free(self._batch.device)
        if free is not None and isinstance(self.latest, Chosen):
            self.latest.least = min(self.latest.least, free)
        return free

    def _drop(self, kept: Any | None, because: str) -> bool:
        """Free the saved tensors of all layers of the micro-batch that are on the running device.
        Return True if any tensor was saved.

        Args:
            kept: record of what the running layer's call saves, whose buffers of K and V stay;
                None: no layer runs, and the buffers of all layers are freed.
            because: the reason, for reports.
        """
        device = self._batch.device if kept is None else kept.device
        there = [
            other
            for other in self._waiting
            if other.device == device and (other.saves or other.keeps_graph or other.moves)
        ]
        freed = [other.give_up(at_work=other is kept) for other in there]
        self._batch.plan = {}
        if self._batch.shortage is not None:
            self._batch.shortage.gone = True
        if self.moving is not None:
            self.moving.places.staying.clear()
        if there and isinstance(self.latest, Chosen):
            self.latest.let_go = because
        return any(freed)
