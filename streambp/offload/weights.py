"""Weights that live on the host: a layer's come to the device a layer ahead, once in each direction.

    HostWeights      one for each patched model: which layer is in which slot, and which comes next
      HostRanges     where they live (`ranges.py`)
      Buffer         where gradients of a layer that trains arrive (`gradients.py`)
      Slot           device memory for the weights of one layer; there are two

[Note: weights on the host] A parameter stays one object, with one version, everywhere: in the optimizer, in state_dict, in
looks at the layer. Only its `.data` points elsewhere: at its layer's range of host memory, and within `here` at a slot. So
quantised weights keep their attributes, and no look at a layer differs. A layer that is not streamed would leave a graph of
the slot behind, where other layers' weights come next: with gradients it is refused.

Nothing in a slot outlives a forward of the model. Weights may have changed since, and versions do not tell: whatever writes
to `.data` (merging adapters) leaves them as they are.

[Note: layers that stay] With weights="auto" the last layers stay on the device, as many as it has room for beside a step;
the first forward decides, before any weight moves, and a longer batch takes layers off again. Where all of them fit nothing
is on the host, and every layer is as ever.

[Note: order of weights] Two waits beside those of `engines.py`, with its queues:

    7  back waits for compute    before it overwrites a slot: the layer that was there must be done
    8  compute waits for back    before it reads a slot
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized

from streambp.alive import Home
from streambp.errors import UnsupportedModelError
from streambp.offload.decoded import FORWARD, DecodedLinear, packed_linears
from streambp.offload.engines import BACK, COMPUTE, OUT, STALL, Engine, make_engine
from streambp.offload.gradients import Arrival, Arriving, Buffer, Leave
from streambp.offload.ranges import HostRanges, LayerRange, view_of

SLOTS = 2
CPU = torch.device("cpu")
Access = tuple[str, int]


def several_ranks() -> bool:
    """True if the process belongs to a process group with other ranks."""
    return is_initialized() and get_world_size() > 1


@dataclasses.dataclass
class Slot:
    """Device memory [bytes], uint8, for one layer's weights.

    index: of the layer, -1 for none. filled: the event after which its weights are there. left: the event after which
    nobody reads what was there before. used: when it was last entered. inside: it is in use.
    """

    memory: Tensor
    left: Any
    filled: Any = None
    index: int = -1
    used: int = 0
    inside: bool = False


class HostWeights:
    """The weights of a model's layers, on the host. [Note: weights on the host]

    Args:
        root: the model. host_memory: bytes of host memory that they may take; None: what is available.
        engine: for tests; made for the device of the first call if None.

    ranges: where they are. loads: how often each layer's came to the device, in each
    direction. room: bytes that a device has for weights of layers, those that are there among them, beside a step over so
    many rows of a length; None: none.
    """

    def __init__(self, root: nn.Module | Home, host_memory: int | None = None, engine: Engine | None = None) -> None:
        self.ranges = HostRanges(root, host_memory)
        self.loads: dict[Access, int] = {}
        self.room: Callable[[torch.device, int, int], float] | None = None
        self._tokens = -1  # of the longest batch that layers stay beside
        self._given_engine = engine
        self._engine: Engine | None = None
        self._buffers: list[Buffer] = []
        self._leaving: tuple[Engine, Any, list[Tensor]] | None = None  # gradients [...] that leave the device
        self.close()

    def close(self) -> None:
        """Give the device's memory back; it is taken again when it is needed."""
        self._let_go()
        if self._engine is not None:
            self._engine.settle()
        self._engine = None
        self._engines_device: torch.device | None = None
        self._device: torch.device | None = None  # of the running step
        self._slots: list[Slot] = []
        self._inside: set[int] = set()
        self._next: dict[Access, Access] = {}  # what came after, the last time
        self._before: Access | None = None
        self._last_forward = -1
        self._clock = 0

    def __getstate__(self) -> Any:
        """A copied or pickled model has nothing on its device."""
        return {**vars(HostWeights(self.ranges.home)), "ranges": self.ranges, "room": self.room}

    @property
    def device_bytes(self) -> int:
        """Of the slots."""
        return sum(slot.memory.numel() for slot in self._slots)

    @property
    def host_bytes(self) -> tuple[int, int]:
        """Of the ranges, and what gradients will take beside those that they have."""
        trained = sum(one.memory.numel() for one in self.ranges.layers.values() if one.trains)
        return self.ranges.bytes, max(0, trained - self.ranges.beside)

    @property
    def seconds_waited(self) -> float:
        """That compute has waited for weights; waits for the device."""
        return 0.0 if self._engine is None else self._engine.spent()[STALL + BACK]

    def begin(self, given: Any) -> None:
        """A forward of the model begins: what is in slots counts no more.

        Args:
            given: its input [B, T, ...], or the device of a layer that is called by itself. On an accelerator slots are
                there when this returns.

        Raises:
            UnsupportedModelError: the process belongs to a process group of several ranks.
        """
        if several_ranks():
            raise UnsupportedModelError(
                "weights='cpu' works in one process, and this one belongs to a process group of several: each rank would "
                "pin a copy of all weights. Start a single process, or leave weights out."
            )
        device, shape = getattr(given, "device", given) or CPU, tuple(getattr(given, "shape", ())[:2])
        self._let_go()
        for slot in self._slots:
            slot.index = -1
        self._device = self._before = None
        self._last_forward = -1
        if self.room is not None and len(shape) == 2 and math.prod(shape) > self._tokens:
            self._tokens = math.prod(shape)
            self.ranges.stay(math.inf if device.type == "cpu" else self.room(device, *shape), SLOTS)
        if device.type != "cpu":
            self._start(device)

    @contextlib.contextmanager
    def here(self, index: int, direction: str, device: torch.device, decodes: bool = False) -> Iterator[None]:
        """Within, the weights of layer `index` are on the device, and those of the layer that comes next on their way.

        Args:
            decodes: 4-bit weights are decoded at most once.

        Raises:
            UnsupportedModelError: a weight cannot live on the host, or layers are on several devices.
            HostMemoryError: the host has no room for them.
        """
        if index in self._inside or index in self.ranges.staying:
            yield
            return
        if direction == FORWARD:
            if index <= self._last_forward:  # of a layer that is called by itself
                self.begin(device)
            self._last_forward = index
        self._start(device)
        assert self._engine is not None
        engine, weights, access = self._engine, self._current(index), (direction, index)
        slot = self._loaded(index, direction)
        engine.wait(COMPUTE, slot.filled)  # 8
        engine.access(COMPUTE, slot.memory, write=False)
        self._clock += 1
        slot.used, slot.inside = self._clock, True
        self._inside.add(index)
        if self._before is not None:
            self._next[self._before] = access
        self._before = access
        cached, linears = torch.is_autocast_cache_enabled(), list[nn.Module]()
        try:
            for piece in weights.pieces:
                piece.tensor.data = piece.within(slot.memory)
            if weights.trains:  # the cache would keep a copy of every layer until autocast ends
                torch.set_autocast_cache_enabled(False)
            following = self._next.get(access)
            if following is not None and following[1] != index:
                self._loaded(following[1], following[0])
            if decodes:  # [Note: decode on arrival]
                linears = self.ranges.sites[index].of(packed_linears)
            for linear in linears:
                vars(linear)[FORWARD] = DecodedLinear(linear)
            yield
        finally:
            for linear in linears:
                vars(linear).pop(FORWARD, None)
            torch.set_autocast_cache_enabled(cached)
            for piece in weights.pieces:
                piece.tensor.data = piece.home
            self._inside.discard(index)
            engine.access(COMPUTE, slot.memory, write=False)
            slot.left, slot.inside = engine.record(COMPUTE), False

    def _loaded(self, index: int, direction: str) -> Slot:
        """The slot with a layer's weights, or one that they are on their way to."""
        assert self._engine is not None
        weights = self._current(index)
        for slot in self._slots:
            if slot.index == index:
                return slot
        slot = min((slot for slot in self._slots if not slot.inside), key=lambda slot: slot.used)
        size = weights.memory.numel()
        if slot.memory.numel() < size:  # a layer has grown since
            self._engine.settle()
            with torch.inference_mode(False):
                slot.memory, slot.left = self._engine.like(weights.memory), self._engine.record(COMPUTE)
        self._engine.wait(BACK, slot.left)  # 7
        self._engine.copy(BACK, slot.memory[:size], weights.memory)
        slot.index, slot.filled = index, self._engine.record(BACK)
        self.loads[direction, index] = self.loads.get((direction, index), 0) + 1
        return slot

    def arriving(self, index: int, weights: list[Tensor], device: torch.device) -> tuple[Leave | None, list[Tensor]]:
        """What a layer's Function takes for its trained weights [...], and what sends their gradients to the host; None:
        they all live on the device. [Note: gradients on the host]"""
        if index in self.ranges.staying:
            return None, weights
        self._start(device)
        layer = self._current(index)
        if not layer.trains:
            return None, weights
        held = {id(piece.tensor) for piece in layer.pieces}
        arrival: Arrival = []
        on_host = [weight for weight in weights if id(weight) in held]
        found = dict(zip(map(id, on_host), Arriving.apply(arrival, *on_host), strict=True))  # type: ignore[no-untyped-call]
        return functools.partial(self.leave, index, arrival), [found.get(id(weight), weight) for weight in weights]

    def leave(
        self, index: int, arrival: Arrival, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Put copies of a layer's gradients [...] to the host into their queue.

        Args:
            arrival: of the call. weights: that the gradients are of, in their order.

        Returns:
            the host's tensors [...] that are on their way; gradients of weights that live on the device, as they are.

        Raises:
            HostMemoryError: the host has no room for them.
        """
        assert self._engine is not None
        engine, ranges, layer = self._engine, self.ranges, self.ranges.layers[index]
        pieces = {id(piece.tensor): piece for piece in layer.pieces}
        pairs = zip(weights, gradients, strict=True)
        going = {id(w): (pieces[id(w)], g) for w, g in pairs if g is not None and id(w) in pieces}
        self._let_go()
        if not going:
            return list(gradients)
        # A buffer of as many bytes that nobody needs, or a new one, which is there in training as well.
        size = layer.memory.numel()
        fitting = (buffer for buffer in self._buffers if buffer.memory.numel() == size)
        buffer = next((one for one in fitting if all(storage() is None for storage in one.given)), None)
        if buffer is None:
            with torch.inference_mode(False):
                buffer = Buffer(ranges.more(size, engine, "The gradients of a layer"))
            ranges.beside += size
            self._buffers.append(buffer)
        buffer.given.clear()
        for _, gradient in going.values():
            engine.access(COMPUTE, gradient, write=True)
        engine.wait(OUT, engine.record(COMPUTE))  # 9
        there = dict[int, Tensor]()
        for key, (piece, gradient) in going.items():
            engine.copy(OUT, piece.within(buffer.memory), gradient)
            # With a storage of its own, which tells when nobody has it any more.
            there[key] = view_of(buffer.memory, piece.offset, piece.home)
            buffer.given.append(weakref.ref(there[key].untyped_storage()))
        event = engine.record(OUT)
        arrival[:] = [(engine, event)]
        self._leaving = engine, event, [gradient for _, gradient in going.values()]
        return [there.get(id(w), g) for w, g in zip(weights, gradients, strict=True)]

    def _let_go(self) -> None:
        """Of the gradients on the device that left last."""
        if self._leaving is not None:
            engine, event, gradients = self._leaving
            engine.wait(COMPUTE, event)  # 11
            for gradient in gradients:
                engine.access(COMPUTE, gradient, write=True)  # as whoever has the memory next may do
            self._leaving = None

    @torch.inference_mode(False)  # what is made here is there in training as well
    def _start(self, device: torch.device) -> None:
        """Weights are wanted on a device: make what is not there yet, once for each forward."""
        if device == self._device:
            return
        if self._device is not None:
            raise UnsupportedModelError(
                f"Layers are on {self._device} and on {device}; weights='cpu' brings them to one device. Move the model to "
                "one, or leave weights out."
            )
        if device != self._engines_device:
            self.close()
            self._engine, self._engines_device = self._given_engine or make_engine(device), device
            if device.type == "cpu":
                warnings.warn(
                    "Move the model to an accelerator, or leave weights='cpu' out: the layers are computed on the host, "
                    "where it frees nothing and costs a copy of two layers' weights.",
                    stacklevel=2,
                )
        assert self._engine is not None
        self.ranges.put_all(self._engine, device)
        for slot in self._slots:
            slot.index = -1
        if not self._slots and self.ranges.layers:
            largest = max((one.memory for one in self.ranges.layers.values()), key=Tensor.numel)
            self._slots = [Slot(self._engine.like(largest), self._engine.record(COMPUTE)) for _ in range(SLOTS)]
        self._device = device

    @torch.inference_mode(False)
    def _current(self, index: int) -> LayerRange:
        """A layer's weights on the host."""
        if index in self._inside:
            return self.ranges.layers[index]
        known = self.ranges.known(index)
        if known is None:
            assert self._engine is not None
            assert self._engines_device is not None
            known = self.ranges.put(index, self._engine, self._engines_device)
            for slot in self._slots:
                slot.index = -1 if slot.index == index else slot.index
        return known
