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

Each device's layers save what fits beside the device's part of the step ([Note: parts of a step]).
All devices have the same chunk size.

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

from streambp.chunks import AUTO_RULE, floor_power_of_two, plan_chunks
from streambp.offload.costs import (
    GRAPH,
    SIZE,
    BatchSaves,
    Candidate,
    DeviceWatch,
    ForwardMeasurement,
    LayerCost,
    MicroBatchChoice,
    ObservedCosts,
    SavesChoice,
    Shortage,
    StepFigures,
    host_exclusions,
    inputs_and_candidates,
)
from streambp.offload.free_memory import host_limit
from streambp.offload.host_choice import ForwardState, HostChoice, MicroBatchShape, MovingStep
from streambp.offload.link import LinkBudget
from streambp.offload.placement import Headroom, Placement, choose_placement, room_beside_copies

# fraction of the initial free memory; smaller deviations are ignored
IGNORED_FREE_MEMORY_FRACTION = 0.01
HEADROOM_STEPS_PER_INPUT = 64  # rooms that are told apart, for the bytes of all layers' inputs
MAX_CACHED_PLACEMENTS = 64  # maximal number of cached choices of `choose_placement`
CHUNK_TOKENS = (32768, 16384, 8192, 4096, 2048, 1024)  # over all rows of the batch
EQUAL_SECONDS_TOLERANCE = 0.002  # seconds with a smaller relative difference count as equal
FORWARD_SECONDS_FRACTION = (
    0.25  # forward's fraction of a step's seconds; backward computes three times as much
)
HOST_MARGIN_KEY = "on the host"  # marks the margins of micro-batches that move saved tensors

Free = Callable[[torch.device], float | None]  # optional methods are those of `FreeMemory`
FreeByDevice = Mapping[torch.device, float]
# (index, bytes) of each device: common budget of its layers up to `index`
Headrooms = Mapping[torch.device, list[list[float]]]


class SavesPolicy:
    """Chooses chunk sizes, and the tensors that each layer saves for backward, by the free memory
    of the devices. [Note: saves that fit]

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
        states: Callable[[torch.device], tuple[StepFigures, float]],
        sizes: bool,
        saves: bool,
        link: LinkBudget | None = None,
        host: HostChoice | None = None,
    ) -> None:
        self.host = host
        self.moving: MovingStep | None = None
        self.layers = layers
        self.free = free
        self.states = states
        self.sizes = sizes
        self.keeps = saves
        self.link = link
        self.latest: MicroBatchChoice | None = None
        self.figures = StepFigures()
        self.present = 0.0
        self._forward = ForwardState()
        self._seen: dict[int, ObservedCosts] = {}
        self._waiting: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # instances of `layer.saved.SavedForBackward`
        # choices with offload="auto", by the measurements and the device's room
        self._places: dict[tuple[ForwardMeasurement, Headroom, bool], Placement] = {}
        self.margins: dict[tuple[Any, ...], Shortage] = {}  # by `Shortage.key`

    def __reduce__(self) -> Any:
        """Return the class and arguments of a copy without measurements, for copy and pickle."""
        settings = (self.layers, self.free, self.states, self.sizes, self.keeps)
        return SavesPolicy, (*settings, self.link, self.host)

    def __str__(self) -> str:
        if self.figures.seconds is None:
            return f"{AUTO_RULE} ({self.figures.why})" if self.figures.why else AUTO_RULE
        sizes = ", ".join(f"{size:,}" for size in CHUNK_TOKENS)
        return (
            f"auto: the fastest of {sizes} tokens over all rows of the batch that fits into the "
            "device's free memory"
        )

    def begin_forward(self, device: torch.device, with_layers: bool = False) -> None:
        """Record that a forward of the model begins, and read the device's free memory and the
        model's predictions. Nothing is read when the first layer calls after its backbone has
        called.

        Args:
            device: the device of the input.
            with_layers: True if the first layer calls; False if the backbone calls.
        """
        if not self._forward.is_begun:
            getattr(self.free, "forget", bool)()
            if self.link is not None:
                self.link.measure(list(self._seen.values()))
            self.learn()
            figures, self.present = self.states(device)
            if figures is not self.figures:
                self.figures, self._seen = figures, {}
                if self.link is not None:
                    self.link.measured.clear()
        self._forward.is_begun = not with_layers

    def end_forward(self) -> None:
        """Record that a forward of the model has ended, with or without an exception. Called by the
        backbone."""
        self._forward.is_begun = False

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
        if index == 0 or key not in self._forward.chunk_sizes:
            self.begin_forward(device, with_layers=True)
            self._forward.chunk_sizes = {key: self.size(batch_size, length, device)}
        return self._forward.chunk_sizes[key]

    def size(self, batch_size: int, length: int, device: torch.device) -> int:
        """Return the chunk size, in positions of each row, with which a step is fastest on a batch
        of `batch_size` rows and `length` tokens. Only sizes that fit into the memory of all devices
        are compared; if no size fits, return the smallest. `device` is the first layer's device."""
        figures = self.figures
        self.moving = None
        is_known = figures.need is not None and figures.seconds is not None
        free = figures.free_by_device(device, self.free) if is_known else {}
        if not free:
            return plan_chunks(length, batch_size, "auto").size
        size = 1
        best = math.inf
        best_plan: dict[int, list[Candidate]] = {}
        tokens = batch_size * length
        sizes = []
        for chunk_tokens in CHUNK_TOKENS:
            positions = max(1, chunk_tokens // batch_size)
            positions = length if positions >= length else floor_power_of_two(positions)
            sizes.append(positions)
            if math.isinf(best):
                size = positions  # if no size fits, the last one remains
            fits, plan, seconds = self.predict(free, tokens, batch_size * positions, length)
            if fits and seconds < best * (1 - EQUAL_SECONDS_TOLERANCE):
                size = positions
                best = seconds
                best_plan = plan
        if self.host is not None and figures.on_host is not None:
            rows = (batch_size, length)
            staying = (best, best_plan)
            self.moving = self._faster_on_host(sizes, rows, device, free[device], staying)
            if self.moving is not None:
                size = self.moving.shape.chunk // batch_size
            self._forward.host_shape = MicroBatchShape(tokens, length, batch_size * size)
        return size

    def _faster_on_host(
        self,
        sizes: Iterable[int],
        rows: tuple[int, int],
        device: torch.device,
        free: float,
        staying: tuple[float, Mapping[int, list[Candidate]]],
    ) -> MovingStep | None:
        """Return the prediction of the fastest step that moves saved tensors to the host. None
        unless the step is allowed, fits and spares enough seconds. [Note: host by seconds]

        Args:
            sizes: chunk sizes to try, in positions of each row.
            rows: number of rows, and tokens of each row.
            device: the device.
            free: free bytes of the device.
            staying: seconds and saves of the fastest step that moves nothing; infinity: none fits.
        """
        host, figures = self.host, self.figures
        assert host is not None
        assert figures.on_host is not None
        batch_size, length = rows
        tokens = batch_size * length
        host.reset()
        if not (host.allowed and self.keeps) or host.must_draw_alike():
            return None
        costs = figures.costs
        if len(costs) < self.layers or any(cost.device != device for cost in costs.values()):
            return None
        seconds, plan = staying
        unsaved = figures.max_spared_seconds(tokens, length) - figures.spared(plan)
        if not host.is_worth_counting(unsaved, seconds):
            return None
        host_figures = figures.on_host()
        if host_figures is None:
            return None
        fastest = None
        host_headroom = host.host_headroom(host_figures)
        for size in dict.fromkeys(sizes):
            shape = MicroBatchShape(tokens, length, batch_size * size)
            # Memory that similar micro-batches lacked, wherever their tensors were.
            keys = (*shape, HOST_MARGIN_KEY), (device, tokens, shape.chunk)
            shortages = [self.margins[key] for key in keys if key in self.margins]
            margin = max([shortage.margin for shortage in shortages], default=0.0)
            free_bytes = free - host_figures.need(tokens, shape.chunk, self.present) - margin
            step = host.predict(host_figures, costs, shape, free_bytes, host_headroom)
            if not step.fits:
                continue
            if fastest is None or step.seconds < fastest.seconds * (1 - EQUAL_SECONDS_TOLERANCE):
                fastest = step
        if fastest is None or not host.is_worth_moving(fastest, seconds):
            return None
        return fastest

    def predict(
        self, free: FreeByDevice, tokens: int, chunk: int, length: int
    ) -> tuple[bool, dict[int, list[Candidate]], float]:
        """Return (fits, plan, seconds), predictions for a step in chunks of `chunk` tokens. `fits`
        is True if the step fits into the memory of each device. `plan` has the tensors that each
        layer can save, by layer index. The step takes `seconds` with these tensors saved.

        Args:
            free: free bytes of each device.
            tokens: tokens over all rows.
            chunk: tokens of a chunk over all rows.
            length: tokens of each row.
        """
        headrooms = self._headrooms(free, tokens, chunk)
        plan = {}
        seconds = math.inf
        fits = min([room for rooms in headrooms.values() for _, room in rooms]) >= 0
        if fits and self.keeps and self.link is None:
            plan = self._fill(headrooms, range(self.layers), tokens, length, chunk == tokens)
        if self.figures.seconds is not None:
            seconds = self.figures.seconds(tokens, chunk) - self.figures.spared(plan)
        return fits, plan, seconds

    def _headrooms(self, free: FreeByDevice, tokens: int, chunk: int) -> Headrooms:
        """Return pairs [index, bytes] for each device. Saved tensors may take `bytes` on the device
        while the forward of layers 0 to `index` has run, and their backward has not.

        Args:
            free: free bytes of each device.
            tokens: tokens over all rows.
            chunk: tokens of a chunk over all rows.
        """
        assert self.figures.need is not None
        headrooms = {}
        for device, free_bytes in free.items():
            shortage = self.margins.get((device, tokens, chunk))
            free_bytes -= 0.0 if shortage is None else shortage.margin
            need = self.figures.need.on_device(device, self.figures.costs)
            sizes = need.bytes_by_layer(tokens, chunk, self.present)
            headrooms[device] = [[last_index, free_bytes - size] for last_index, size in sizes]
        return headrooms

    def saves(
        self, saved: Any, rows: int, can_keep_graph: Callable[[], bool]
    ) -> tuple[tuple[str, ...] | None, bool, ObservedCosts | None]:
        """Choose the tensors that a layer must save in its forward, which begins now.

        Args:
            saved: the layer's record of saved tensors (`SavedForBackward`) for this call.
            rows: number of rows.
            can_keep_graph: returns True if the layer's autograd graph may be saved.

        Returns:
            Names of the tensors in the form of `StreamConfig.saves`; the output of a Linear has the
                Linear's name in the layer. None: the names in the configuration.
            True if the layer's autograd graph is saved in place of single tensors.
            An object that records bytes and FLOPs of the layer's chunks; None: both are known.
        """
        index = saved.layer_state.index
        length = saved.plan.length
        unread = saved.layer_state.tests.unread
        tokens = rows * length
        if index <= self._forward.batch.last:
            self._begin(saved, rows)
        elif self._forward.batch.plan and saved.device in self._forward.batch.devices:
            self._shrink(saved, tokens)
        batch = self._forward.batch
        batch.last = index
        watch = batch.devices.get(saved.device)
        if self.host is not None:
            saved.moves = self.moving is not None
        cost_recorder = None
        cost = self.figures.costs.get(index)
        candidates = batch.plan.get(index, [])
        if self.link is not None:
            if self.latest is None:
                cost_recorder = ObservedCosts(saved.device, tokens, length, len(saved.plan), unread)
                self._seen[index] = self.link.time_chunks(cost_recorder)
            return (
                tuple(candidate.name for candidate in candidates) if self.keeps else None,
                False,
                cost_recorder,
            )
        if cost is None or cost.situations != len(unread) or cost.device != saved.device:
            cost_recorder = self._seen[index] = ObservedCosts(
                saved.device, tokens, length, len(saved.plan), unread
            )
        if watch is None or cost is None or cost.device != saved.device:
            return (), False, cost_recorder
        graph = GRAPH in [candidate.name for candidate in candidates]
        if graph and not (cost_recorder is None and can_keep_graph()):
            if cost_recorder is None:
                self.figures.without_graph.add(index)
            planned = sum(map(SIZE, candidates))
            graph = False
            headrooms = {saved.device: [[math.inf, planned]]}
            candidates = self._fill(headrooms, [index], tokens, length, True, (GRAPH,))[index]
            batch.plan[index] = candidates
        elif index in self.figures.without_graph and can_keep_graph():
            self.figures.without_graph.discard(index)
        self._waiting.add(saved)
        if self.moving is not None:
            watch.expected -= self.moving.placement.staying_bytes(index)
        else:
            watch.expected -= sum(map(SIZE, candidates))
            watch.expected -= cost.held_bytes(tokens, batch.home)
        return (
            () if graph else tuple([candidate.name for candidate in candidates]),
            graph,
            cost_recorder,
        )

    def _shrink(self, saved: Any, tokens: int) -> None:
        """Choose fewer saved tensors for this and the later layers, if less memory is free than
        planned. If the missing bytes are more than these layers would save, free the saved tensors
        of all layers on this device. This and the later layers then save only their inputs.

        Args:
            saved: the running layer's record of saved tensors (`SavedForBackward`).
            tokens: tokens over all rows.
        """
        batch = self._forward.batch
        device = saved.device
        watch = batch.devices[device]
        index = saved.layer_state.index
        free = self._free_now(device)
        if free is None or watch.expected - free <= watch.slack:
            return
        short = watch.expected - free
        watch.expected -= short
        if watch.shortage is not None and not watch.others_are_seen:
            watch.shortage.shortfall = max(watch.shortage.shortfall, short)
        later = [i for i in range(index, self.layers) if self.figures.device(i) == device]
        if self.moving is not None:
            freed = self.moving.placement.free_device(later, short)
            if freed < short:
                self._drop(device, None, "less memory was free than planned")
            return
        planned = sum([sum(map(SIZE, batch.plan.get(i, ()))) for i in later])
        if short > planned:
            self._drop(device, None, "less memory was free than planned")
        elif planned:
            headrooms = {device: [[math.inf, planned - short]]}
            is_unchunked = len(saved.plan) == 1
            batch.plan |= self._fill(headrooms, later, tokens, saved.plan.length, is_unchunked)

    def _begin(self, saved: Any, rows: int) -> None:
        """Begin a micro-batch: learn from the previous micro-batch how much memory to leave free,
        and choose the tensors that each layer saves.

        Args:
            saved: the first layer's record of saved tensors (`SavedForBackward`).
            rows: number of rows.
        """
        if not self.sizes:
            self.begin_forward(saved.device, with_layers=True)
        for device, watch in self._forward.batch.devices.items():
            if watch.shortage is not None:  # leave free what the previous one lacked
                watch.learn(getattr(self.free, "retries", lambda _: 0)(device), self.margins)
        self._seen = {}
        self._forward.batch = batch = BatchSaves(saved.device)
        self.latest = None
        length = saved.plan.length
        chunk = rows * min(saved.plan.size, saved.plan.length)
        if self.link is not None:
            self._begin_on_host(self.link, rows * length, length, chunk)
            return
        free = self.figures.free_by_device(saved.device, self.free)
        need = self.figures.need
        tokens = rows * length
        if self.host is not None and self.figures.on_host is not None and free:
            self._decide_for(MicroBatchShape(tokens, length, chunk), saved.device, free)
            if self.moving is not None:
                self._begin_moving(self.moving, saved.device, free[saved.device])
                return
        if not free or need is None or not self.figures.costs:
            return
        headrooms = self._headrooms(free, tokens, chunk)
        _, batch.plan, _ = self.predict(free, tokens, chunk, length)
        self.latest = SavesChoice(tokens, length, chunk, 0.0, batch.plan)
        for device, rooms in headrooms.items():
            headroom = max([room for _, room in rooms])
            self.latest.headroom += headroom
            planned_by_layer = {
                index: sum(map(SIZE, batch.plan.get(index, ())))
                for index, cost in self.figures.costs.items()
                if cost.device == device
            }
            shortage = Shortage(
                (device, tokens, chunk), headroom, sum(planned_by_layer.values()), planned_by_layer
            )
            self._watch(device, free[device], shortage, need.chunk_bytes(chunk))

    def _watch(
        self, device: torch.device, free: float, shortage: Shortage, chunk_bytes: float
    ) -> None:
        """Begin to compare the free memory of `device` with the plan of a micro-batch, which begins
        with `free` bytes. `shortage` is an empty record of the memory that will be lacking.
        `chunk_bytes` is the number of free bytes that a chunk needs."""
        self._forward.batch.devices[device] = DeviceWatch(
            expected=free - max(0.0, shortage.headroom - shortage.planned),
            slack=IGNORED_FREE_MEMORY_FRACTION * free,
            retries=getattr(self.free, "retries", lambda _: 0)(device),
            others_are_seen=getattr(self.free, "sees_others", lambda _: False)(device),
            chunk_bytes=chunk_bytes,
            shortage=shortage if shortage.planned else None,
        )

    def _decide_for(self, shape: MicroBatchShape, device: torch.device, free: FreeByDevice) -> None:
        """Decide if the micro-batch that begins moves saved tensors to the host, unless the method
        `size` has decided this for a micro-batch of equal shape. [Note: host by seconds]

        Args:
            shape: size of the micro-batch.
            device: the device of the first layer.
            free: free bytes of each device.
        """
        assert self.host is not None
        if shape != self._forward.host_shape or not self.sizes:
            self.moving = None
            if self.figures.need is not None and self.figures.seconds is not None:
                tokens, length, chunk = shape
                fits, plan, seconds = self.predict(free, tokens, chunk, length)
                staying = (seconds if fits else math.inf, plan)
                batch_size = max(1, tokens // max(1, length))
                rows = (batch_size, length)
                size = max(1, chunk // batch_size)
                self.moving = self._faster_on_host([size], rows, device, free[device], staying)
        self._forward.host_shape = None
        self.host.begin_micro_batch(self.moving)

    def _begin_moving(self, step: MovingStep, device: torch.device, free: float) -> None:
        """Store the plan of a micro-batch that moves saved tensors to the host, tell `host` which
        of the tensors move, and start to watch the device's free memory.

        Args:
            step: the prediction for the micro-batch.
            device: the device.
            free: free bytes of the device.
        """
        assert self.host is not None
        assert self.figures.on_host is not None
        host_figures = self.figures.on_host()
        assert host_figures is not None
        placement = step.placement.copy()
        self.moving = step = dataclasses.replace(step, placement=placement)
        self.host.prepare(step)
        self._forward.batch.plan = placement.saved
        shape, pace = step.shape, step.pace
        hidden_bytes = pace.link * pace.forward  # bytes whose copies hide behind forward
        measured = ForwardMeasurement(
            shape.tokens, shape.length, pace.forward, pace.link, pace.attention, step.host
        )
        inputs = placement.inputs
        self.latest = SavesChoice(
            *shape, min(hidden_bytes, step.host), placement.saved, measured, inputs
        )
        self.latest.on_device = planned = placement.on_device
        planned_by_layer = {index: placement.staying_bytes(index) for index in placement.saved}
        key = (*shape, HOST_MARGIN_KEY)
        shortage = Shortage(key, step.free_bytes, planned, planned_by_layer)
        self._watch(device, free, shortage, host_figures.need.chunk_bytes(shape.chunk))

    def _begin_on_host(self, link: LinkBudget, tokens: int, length: int, chunk: int) -> None:
        """Choose the tensors that this micro-batch saves, and those of them that are copied to the
        host. If no forward of similar length was measured yet, this forward is measured and nothing
        is chosen. Later choices copy a saved tensor only if copies end within a forward's seconds.

        Args:
            link: budget and measurements of the copies.
            tokens: tokens over all rows.
            length: tokens of each row.
            chunk: tokens of a chunk over all rows.
        """
        measured = link.begin(length)
        link.manager.staying = None
        costs = self.figures.costs
        if measured is None:
            self._places.clear()
            return
        model_cost = functools.reduce(
            operator.add, (cost.scaled_to(measured.tokens) for cost in costs.values())
        )
        attending = model_cost.attention_flops / measured.attention
        never_leave = host_exclusions(attending, model_cost.attn_out / measured.link)
        hidden = measured.seconds * measured.link  # bytes whose copies hide behind forward
        on_device = link.room_on_device(tokens) * measured.tokens / tokens
        one_chunk = chunk >= tokens
        inputs, candidates = inputs_and_candidates(
            costs, measured.tokens, measured.length, one_chunk
        )
        headroom = Headroom(measured.host, hidden / len(costs), on_device, never_leave)
        if link.is_measured:
            headroom = room_beside_copies(headroom, inputs, candidates, chunk / tokens)
        # Steps of other lengths have other rooms. Few different rooms need few choices.
        unit = model_cost.x / HEADROOM_STEPS_PER_INPUT
        headroom = dataclasses.replace(headroom, device=headroom.device // unit * unit)
        key = measured, headroom, one_chunk
        if key not in self._places:
            if len(self._places) >= MAX_CACHED_PLACEMENTS:
                self._places.clear()
            self._places[key] = choose_placement(inputs, candidates, headroom)
        placement = self._places[key]
        self._forward.batch.plan = placement.saved
        if self.keeps:
            link.manager.staying = placement.staying
        room = min(hidden, measured.host) + headroom.device - model_cost.x
        shape = MicroBatchShape(measured.tokens, measured.length, chunk)
        self.latest = SavesChoice(*shape, room, placement.saved, measured, model_cost.x)
        self.latest.on_device = placement.on_device
        full = f"the {'host' if measured.host < hidden else 'link'} has no room"
        self.latest.explain(model_cost, len(costs), never_leave, full)

    def faster_on_host(self) -> float:
        """Return the predicted seconds by which offload="cpu" would have shortened the last step; 0
        if the step would not be shorter, or if no prediction is possible."""
        choice = self.latest
        figures = self.figures
        costs = self.figures.costs
        on_host = self.link is not None or figures.on_host is not None
        if not isinstance(choice, SavesChoice) or on_host or figures.seconds is None:
            return 0.0
        if GRAPH in choice.layers or choice.layers.get("attn_out", 0) == len(costs):
            return 0.0
        headroom = min(
            FORWARD_SECONDS_FRACTION * figures.seconds(choice.tokens, choice.chunk) * figures.link,
            host_limit(None),
        )
        headroom -= sum(cost.scaled_to(choice.tokens).x for cost in costs.values())
        room = [[math.inf, headroom]]  # one for all devices
        rooms = {cost.device: room for cost in costs.values()}
        plan = self._fill(rooms, costs, choice.tokens, choice.length, False)
        return max(0.0, figures.spared(plan) - choice.spared / figures.products)

    def _fill(
        self,
        headrooms: Headrooms,
        indices: Iterable[int],
        tokens: int,
        length: int,
        is_unchunked: bool,
        without: Container[str] = (),
    ) -> dict[int, list[Candidate]]:
        """Return the tensors that each of these layers saves, by layer index. Tensors are added
        while they fit; the order is by the FLOPs that a saved byte spares, most first.

        Args:
            headrooms: pairs [index, bytes] for each device: bytes for saved tensors of layers 0 to
                `index`. The bytes of chosen tensors are subtracted in place. Layers on other
                devices save nothing.
            indices: indices of the layers.
            tokens: tokens over all rows.
            length: tokens of each row.
            is_unchunked: True if the call is one chunk, so that a layer's graph may be saved.
            without: names that no layer saves.
        """
        plan: dict[int, list[Candidate]] = {index: [] for index in indices}
        candidates: list[Candidate] = []
        graphs: dict[int, Candidate] = {}
        planned_bytes = dict.fromkeys(plan, 0.0)
        for index in plan:
            cost = self.figures.costs.get(index)
            if cost is not None and cost.device in headrooms:
                options = [
                    option
                    for option in cost.candidates(index, tokens, length, is_unchunked)
                    if option.name not in without
                ]
                candidates += options
                may_keep_graph = GRAPH not in without and index not in self.figures.without_graph
                if is_unchunked and cost.graph and may_keep_graph:
                    graphs[index] = cost.graph_candidate(index, tokens, options)
        ordered = sorted(candidates, key=lambda option: (-option.flops_per_byte, -option.index))
        for candidate in (*ordered, *sorted(graphs.values(), key=lambda option: -option.index)):
            index = candidate.index
            size = candidate.bytes
            graph = graphs.get(candidate.index)
            # all named saves are in the graph
            if graph is not None and graph.bytes <= planned_bytes[index] + size:
                candidate = graph
                size = graph.bytes - planned_bytes[index]
            rooms = headrooms[self.figures.costs[index].device]
            fits = size <= min([room for last, room in rooms if index <= last], default=math.inf)
            if graph not in plan[index] and fits:
                for entry in rooms:
                    entry[1] -= size if index <= entry[0] else 0.0
                plan[index] = [candidate] if candidate is graph else [*plan[index], candidate]
                planned_bytes[index] += size
        return plan

    def check_room(self, saved: Any) -> None:
        """Free the saved tensors of all layers on a device that has less memory free than a chunk
        needs.

        Args:
            saved: the running layer's record of saved tensors (`SavedForBackward`).
        """
        watch = self._forward.batch.devices.get(saved.device)
        if watch is None or watch.shortage is None:
            return
        free = self._free_now(saved.device)
        if free is None:
            return
        shortage = watch.shortage
        if not watch.others_are_seen:
            dropped_bytes = 0.0
            if shortage.saves_dropped:
                waiting = [other_saved.layer_state.index for other_saved in self._waiting]
                dropped_bytes = sum([shortage.planned_by_layer.get(i, 0.0) for i in waiting])
            shortage.shortfall = max(shortage.shortfall, watch.chunk_bytes + dropped_bytes - free)
        if free < watch.chunk_bytes and not shortage.saves_dropped:
            self._drop(saved.device, saved, "less memory was free than a chunk takes")

    def drop_saves(self, saved: Any | None = None) -> bool:
        """Free all saved tensors after a device ran out of memory, so that the failed computation
        can be repeated. Return True if any tensor was saved.

        Args:
            saved: the running layer's record (`SavedForBackward`), whose device is full; None: no
                layer runs, and any device may be.
        """
        device = None if saved is None else saved.device
        self.failed(device)
        reason = f"{'the loss' if saved is None else 'a chunk'} ran out of memory"
        return self._drop(device, saved, reason)

    def failed(self, device: torch.device | None = None) -> None:
        """Record that a step ran out of the memory of `device`; None: of any device. Similar steps
        then save at most half of the bytes that were planned for this step."""
        for watched_device, watch in self._forward.batch.devices.items():
            shortage = watch.shortage
            if shortage is not None and device in (None, watched_device):
                shortage.shortfall = max(shortage.shortfall, shortage.planned / 2)
                shortage.failed = True

    def learn(self) -> Mapping[int, LayerCost]:
        """Return bytes and FLOPs of the tensors that each layer may save, by layer index, for the
        next choice. Predictions are replaced by measurements for layers whose backward has run."""
        costs = self.figures.costs
        for index, observed_costs in list(self._seen.items()):
            cost = observed_costs.measured_cost()
            if cost is not None:
                earlier = costs.get(index)
                if earlier is not None and not cost.graph:
                    cost = cost._replace(graph=earlier.graph * cost.tokens / earlier.tokens)
                costs[index] = cost
                del self._seen[index]
        return costs

    def graphs(self, tokens: int, device: torch.device) -> tuple[float, float] | None:
        """Return two numbers for `tokens` tokens in one chunk: the bytes of all layers' autograd
        graphs, and the bytes that a step without saved tensors leaves free. A micro-batch runs
        unpatched only if the graphs take a small part of the free bytes.

        None if one of the numbers is unknown, or a layer is on another device than `device`.
        """
        costs = self.learn()
        free = self.free(device)
        need = self.figures.need
        if len(costs) < self.layers or free is None or need is None:
            return None
        graph_bytes = 0.0
        for cost in costs.values():
            if not cost.graph or cost.device != device:
                return None
            graph_bytes += cost.graph * tokens / cost.tokens
        return graph_bytes, free - need(tokens, tokens, self.present)

    def _free_now(self, device: torch.device) -> float | None:
        free = self.free(device)
        if free is not None and isinstance(self.latest, SavesChoice):
            self.latest.min_free_bytes = min(self.latest.min_free_bytes, free)
        return free

    def _drop(self, device: torch.device | None, saved: Any | None, reason: str) -> bool:
        """Free the saved tensors of a device's layers. Return True if any tensor was saved.

        Args:
            device: the device; None: all devices.
            saved: the running layer's record of saved tensors (`SavedForBackward`), whose buffers
                of K and V stay; None: no layer runs, and the buffers of all layers are freed.
            reason: the reason, for reports.
        """
        batch = self._forward.batch
        waiting = [
            other_saved
            for other_saved in self._waiting
            if device in (None, other_saved.device)
            and (other_saved.saves or other_saved.keeps_graph or other_saved.moves)
        ]
        freed = [other_saved.drop_saves(is_running=other_saved is saved) for other_saved in waiting]
        for watched_device, watch in batch.devices.items():
            if watch.shortage is not None and device in (None, watched_device):
                watch.shortage.saves_dropped = True
        batch.plan = {
            index: candidates
            for index, candidates in batch.plan.items()
            if device not in (None, self.figures.device(index))
        }
        if self.moving is not None:
            self.moving.placement.staying.clear()
        if waiting and isinstance(self.latest, SavesChoice):
            self.latest.drop_reason = reason
        return any(freed)
