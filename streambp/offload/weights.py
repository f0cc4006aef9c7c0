"""Stream weights from the host: a layer's weights are copied to the device one layer ahead, once in
forward and once in backward.

    HostWeights      one for each patched model: the layer in each slot, and the next layer
      HostRanges     host memory of the weights (`ranges.py`)
      GradientBuffer host memory for gradients of a layer that trains (`gradients.py`)
      WeightSlot     device memory for the weights of one layer; two slots exist

A parameter remains one object with one version everywhere: in the optimizer, in state_dict, in
snapshots of the layer. Only its `.data` changes: it points at the layer's range of host memory, and
inside `on_device` at a slot. Quantised weights therefore keep their attributes, and snapshots of a
layer do not differ. An unstreamed layer would leave a graph that references the slot, and the slot
is reused for the next layers. Gradients of an unstreamed layer are therefore refused.

The content of a slot is valid during one forward of the model. Weights may change afterwards, and
versions do not reveal the change: writes to `.data` (merging adapters) leave versions as they are.

If weights="auto", the last layers stay on the device, up to the number that fits beside a step. The
first forward decides before any weight moves, and a longer batch reduces the number of layers. If
all layers fit, nothing is on the host, and every layer runs as usual.

Two waits in addition to the waits of `engines.py`, with its queues:

    7  back waits for compute    before it overwrites a slot: the slot's previous layer must be done
    8  compute waits for back    before it reads a slot
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized

from streambp.errors import UnsupportedModelError
from streambp.instance_forward import PatchedModuleRef
from streambp.offload.decoded_weights import FORWARD, DecodedLinear, packed_linears
from streambp.offload.engines import (
    COMPUTE_QUEUE,
    FROM_HOST_QUEUE,
    STALL_PREFIX,
    TO_HOST_QUEUE,
    Engine,
    make_engine,
)
from streambp.offload.gradients import CopyEvents, GradientArrival, GradientBuffer, SendGradients
from streambp.offload.ranges import HostRanges, LayerRange, view_of

WEIGHT_SLOTS = 2
CPU = torch.device("cpu")
Access = tuple[str, int]


def several_ranks() -> bool:
    """True if torch.distributed is initialized with more than one rank. Weights on the host support
    one rank alone."""
    return is_initialized() and get_world_size() > 1


@dataclasses.dataclass
class WeightSlot:
    """Buffer in device memory for the weights of one layer at a time.

    Attributes:
        memory: the memory [bytes], uint8.
        last_read: event after the last use of the buffer. The next copy to the buffer waits for it.
        filled: event after the copy of the weights to the buffer.
        index: index of the layer whose weights are in the buffer; -1: empty.
        last_use: number of the buffer's last use; uses are counted over all buffers. The buffer
            with the smallest number is overwritten first.
        inside: True while the layer whose weights are in the buffer runs.
    """

    memory: Tensor
    last_read: Any
    filled: Any = None
    index: int = -1
    last_use: int = 0
    inside: bool = False


class HostWeights:
    """The weights of a model's layers on the host, copied to the device for each layer's forward
    and backward.

    Args:
        root: the model.
        host_memory: limit on host memory in bytes; None: the available memory.
        engine: object that copies weights, replaced in tests; None: an engine is created for the
            device of the first call.

    Attributes:
        ranges: host memory of the weights.
        loads: number of copies to the device, by (direction, layer index). Directions are
            "forward", "backward", and "trial" for a test run.
        headroom: function of (device, rows, length) that returns the device memory for layers'
            weights during a step with a batch [rows, length], in bytes. None: no layer's weights
            stay on the device after the layer has run.
    """

    def __init__(
        self,
        root: nn.Module | PatchedModuleRef,
        host_memory: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.ranges = HostRanges(root, host_memory)
        self.loads: dict[Access, int] = {}
        self.headroom: Callable[[torch.device, int, int], float] | None = None
        self._tokens = -1  # tokens of the largest batch so far
        self._given_engine = engine
        self._engine: Engine | None = None
        self._buffers: list[GradientBuffer] = []
        self._leaving: tuple[Engine, Any, list[Tensor]] | None = (
            None  # gradients [...] on their way to the host
        )
        self.close()

    def close(self) -> None:
        """Free the device buffers of weights. The next call of the model allocates them again."""
        self._free_gradients()
        if self._engine is not None:
            self._engine.settle()
        self._engine = None
        self._engines_device: torch.device | None = None
        self._device: torch.device | None = None  # device of the running step
        self._slots: list[WeightSlot] = []
        self._inside: set[int] = set()
        self._next: dict[Access, Access] = {}  # successor of each access in the last pass
        self._last_access: Access | None = None
        self._last_forward = -1
        self._clock = 0

    def __getstate__(self) -> Any:
        """Return the state for copy and pickle, without device memory."""
        return {
            **vars(HostWeights(self.ranges.home)),
            "ranges": self.ranges,
            "headroom": self.headroom,
        }

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the device buffers for weights. `describe` reports them."""
        return sum(slot.memory.numel() for slot in self._slots)

    @property
    def host_bytes(self) -> tuple[int, int]:
        """Return two numbers: the bytes of weights in host memory, and the bytes that gradients of
        these weights will take there beyond the gradients' present memory."""
        trained = sum(
            layer_range.memory.numel()
            for layer_range in self.ranges.layers.values()
            if layer_range.trains
        )
        return self.ranges.bytes, max(0, trained - self.ranges.gradient_bytes)

    @property
    def seconds_waited(self) -> float:
        """Return the seconds for which the compute stream has waited for copies of weights. The
        call synchronizes with the device."""
        return (
            0.0
            if self._engine is None
            else self._engine.queue_seconds()[STALL_PREFIX + FROM_HOST_QUEUE]
        )

    def begin(self, input_or_device: Any) -> None:
        """Begin a forward of the model. The device buffers count as empty, because the weights may
        have changed since they were copied.

        Args:
            input_or_device: the model's input [B, T, ...], or the device of a layer that is called
                alone. If the device is an accelerator, the call allocates the buffers.

        Raises:
            UnsupportedModelError: the process belongs to a process group of several ranks.
        """
        if several_ranks():
            raise UnsupportedModelError(
                "weights='cpu' works in a single process, and this process belongs to a group of "
                "several: each rank would pin a copy of all weights. Start a single process, or "
                "leave weights out."
            )
        device = getattr(input_or_device, "device", input_or_device) or CPU
        shape = tuple(getattr(input_or_device, "shape", ())[:2])
        self._free_gradients()
        for slot in self._slots:
            slot.index = -1
        self._device = self._last_access = None
        self._last_forward = -1
        if self.headroom is not None and len(shape) == 2 and math.prod(shape) > self._tokens:
            self._tokens = math.prod(shape)
            self.ranges.keep_on_device(
                math.inf if device.type == "cpu" else self.headroom(device, *shape), WEIGHT_SLOTS
            )
        if device.type != "cpu":
            self._start(device)

    @contextlib.contextmanager
    def on_device(
        self, index: int, direction: str, device: torch.device, decodes: bool = False
    ) -> Iterator[None]:
        """Context manager in which the parameters of layer `index` point at a device buffer with
        the layer's weights; outside they point at host memory.

        The copy of the weights of the layer that runs next is started on entry. Nothing happens for
        a layer whose weights stay on the device between its uses.

        Args:
            index: index of the layer.
            direction: "forward", "backward", or "trial" for a test run.
            device: computes the layer.
            decodes: True to dequantize 4-bit weights once for all chunks; False: for each chunk.

        Raises:
            UnsupportedModelError: a weight cannot be on the host, or layers are on several devices.
            HostMemoryError: the host has no room for the weights.
        """
        if index in self._inside or index in self.ranges.staying:
            yield
            return
        if direction == FORWARD:
            if index <= self._last_forward:  # a layer was called alone
                self.begin(device)
            self._last_forward = index
        self._start(device)
        assert self._engine is not None
        engine = self._engine
        weights = self._current(index)
        access = (direction, index)
        slot = self._loaded(index, direction)
        engine.wait(COMPUTE_QUEUE, slot.filled)  # 8
        engine.access(COMPUTE_QUEUE, slot.memory, write=False)
        self._clock += 1
        slot.last_use = self._clock
        slot.inside = True
        self._inside.add(index)
        if self._last_access is not None:
            self._next[self._last_access] = access
        self._last_access = access
        cached = torch.is_autocast_cache_enabled()
        changed_tables: list[dict[str, Any]] = []
        tensors = map(operator.attrgetter("tensor"), weights.slices)
        homes = map(operator.attrgetter("home"), weights.slices)
        restore = itertools.chain(
            map(setattr, tensors, itertools.repeat("data"), homes),
            map(dict.pop, changed_tables, itertools.repeat(FORWARD), itertools.repeat(None)),
        )
        try:
            for weight_slice in weights.slices:
                weight_slice.tensor.data = weight_slice.view_in(slot.memory)
            if weights.trains:  # autocast would cache a copy of every layer
                torch.set_autocast_cache_enabled(False)
            following = self._next.get(access)
            if following is not None and following[1] != index:
                self._loaded(following[1], following[0])
            if decodes:  # once for each pass; a Linear's own forward decodes for each chunk
                for linear in self.ranges.layer_states[index].cached_result(packed_linears):
                    changed_tables.append(vars(linear))
                    vars(linear)[FORWARD] = DecodedLinear(linear)
            yield
        finally:
            collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way
            torch.set_autocast_cache_enabled(cached)
            self._inside.discard(index)
            engine.access(COMPUTE_QUEUE, slot.memory, write=False)
            slot.last_read = engine.record(COMPUTE_QUEUE)
            slot.inside = False

    def _loaded(self, index: int, direction: str) -> WeightSlot:
        """Return the device buffer with the weights of layer `index`. The copy from the host is
        started if no buffer has these weights.

        Args:
            index: index of the layer.
            direction: the layer's next use ("forward", "backward" or "trial"), under which the copy
                is counted in `loads`.
        """
        assert self._engine is not None
        weights = self._current(index)
        for slot in self._slots:
            if slot.index == index:
                return slot
        slot = min(
            (slot for slot in self._slots if not slot.inside), key=lambda slot: slot.last_use
        )
        size = weights.memory.numel()
        if slot.memory.numel() < size:  # the layer has grown
            self._engine.settle()
            with torch.inference_mode(False):
                slot.memory, slot.last_read = (
                    self._engine.empty_like(weights.memory),
                    self._engine.record(COMPUTE_QUEUE),
                )
        self._engine.wait(FROM_HOST_QUEUE, slot.last_read)  # 7
        self._engine.copy(FROM_HOST_QUEUE, slot.memory[:size], weights.memory)
        slot.index, slot.filled = index, self._engine.record(FROM_HOST_QUEUE)
        self.loads[direction, index] = self.loads.get((direction, index), 0) + 1
        return slot

    def receive_gradients(
        self, index: int, weights: list[Tensor], device: torch.device
    ) -> tuple[SendGradients | None, list[Tensor]]:
        """Return two values: a function that starts copies of the weights' gradients to the host,
        and the list of weights to pass to the layer's autograd function instead of `weights`.

        The layer's backward calls the function (`SendGradients`). None in place of the function: no
        trained weight is on the host. The list has the order of `weights`. Each weight on the host
        is replaced by a view [...] from `GradientArrival`, whose backward waits for the copies. All
        other weights are unchanged.

        Args:
            index: index of the layer.
            weights: the layer's trained weights.
            device: computes the layer.
        """
        if index in self.ranges.staying:
            return None, weights
        self._start(device)
        layer = self._current(index)
        if not layer.trains:
            return None, weights
        host_ids = {id(weight_slice.tensor) for weight_slice in layer.slices}
        arrival: CopyEvents = []
        on_host = [weight for weight in weights if id(weight) in host_ids]
        weight_views = dict(
            zip(map(id, on_host), GradientArrival.apply(arrival, *on_host), strict=True)
        )  # type: ignore[no-untyped-call]
        return functools.partial(self.send_gradients, index, arrival), [
            weight_views.get(id(weight), weight) for weight in weights
        ]

    def send_gradients(
        self,
        index: int,
        arrival: CopyEvents,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Start copies of a layer's gradients [...] to the host.

        Args:
            index: index of the layer.
            arrival: list that receives the events of the copies.
            weights: weights of the gradients, in the same order.
            gradients: gradients on the device; None: no gradient.

        Returns:
            The gradients as tensors [...] on the host, whose copies are running. Gradients of
                weights on the device are returned unchanged.

        Raises:
            HostMemoryError: the host has no room for the gradients.
        """
        assert self._engine is not None
        engine = self._engine
        ranges = self.ranges
        layer = self.ranges.layers[index]
        slices = {id(weight_slice.tensor): weight_slice for weight_slice in layer.slices}
        pairs = zip(weights, gradients, strict=True)
        going = {id(w): (slices[id(w)], g) for w, g in pairs if g is not None and id(w) in slices}
        self._free_gradients()
        if not going:
            return list(gradients)
        # Reuse a free buffer of equal size, or allocate a new one outside of inference mode.
        size = layer.memory.numel()
        fitting = (buffer for buffer in self._buffers if buffer.memory.numel() == size)
        buffer = next(
            (
                candidate
                for candidate in fitting
                if all(storage() is None for storage in candidate.gradient_storages)
            ),
            None,
        )
        if buffer is None:
            with torch.inference_mode(False):
                buffer = GradientBuffer(ranges.reserve(size, engine, "The gradients of a layer"))
            ranges.gradient_bytes += size
            self._buffers.append(buffer)
        buffer.gradient_storages.clear()
        for _, gradient in going.values():
            engine.access(COMPUTE_QUEUE, gradient, write=True)
        engine.wait(TO_HOST_QUEUE, engine.record(COMPUTE_QUEUE))  # 9
        host_gradients = dict[int, Tensor]()
        for key, (weight_slice, gradient) in going.items():
            engine.copy(TO_HOST_QUEUE, weight_slice.view_in(buffer.memory), gradient)
            # A separate storage, whose end of life shows that the gradient is unused.
            host_gradients[key] = view_of(buffer.memory, weight_slice.offset, weight_slice.home)
            buffer.gradient_storages.append(weakref.ref(host_gradients[key].untyped_storage()))
        event = engine.record(TO_HOST_QUEUE)
        arrival[:] = [(engine, event)]
        self._leaving = engine, event, [gradient for _, gradient in going.values()]
        return [host_gradients.get(id(w), g) for w, g in zip(weights, gradients, strict=True)]

    def _free_gradients(self) -> None:
        """Free the device memory of the gradients whose copies to the host were started last. The
        compute stream first waits for these copies. Called when the next layer's gradients are
        copied, and at the next forward."""
        if self._leaving is not None:
            engine, event, gradients = self._leaving
            engine.wait(COMPUTE_QUEUE, event)  # 11
            for gradient in gradients:
                # the next owner of the memory may write
                engine.access(COMPUTE_QUEUE, gradient, write=True)
            self._leaving = None

    @torch.inference_mode(False)  # tensors created here also serve training
    def _start(self, device: torch.device) -> None:
        """Create device buffers on `device` and move weights to the host, if not done yet in this
        forward.

        Raises:
            UnsupportedModelError: the model's layers are on several devices.
        """
        if device == self._device:
            return
        if self._device is not None:
            raise UnsupportedModelError(
                f"Layers are on {self._device} and on {device}, and weights='cpu' needs all layers "
                "on one device. Move the model to one device, or leave weights out."
            )
        if device != self._engines_device:
            self.close()
            self._engine = self._given_engine or make_engine(device)
            self._engines_device = device
            if device.type == "cpu":
                warnings.warn(
                    "Move the model to an accelerator, or leave weights='cpu' out: the layers are "
                    "computed on the host, where it frees nothing and costs a copy of two layers' "
                    "weights.",
                    stacklevel=2,
                )
        assert self._engine is not None
        self.ranges.move_all(self._engine, device)
        for slot in self._slots:
            slot.index = -1
        if not self._slots and self.ranges.layers:
            largest = max(
                (layer_range.memory for layer_range in self.ranges.layers.values()),
                key=Tensor.numel,
            )
            self._slots = [
                WeightSlot(self._engine.empty_like(largest), self._engine.record(COMPUTE_QUEUE))
                for _ in range(WEIGHT_SLOTS)
            ]
        self._device = device

    @torch.inference_mode(False)
    def _current(self, index: int) -> LayerRange:
        """Return a layer's weights in host memory, to be copied to the device. Weights that are not
        there yet, or were replaced, are moved to the host first.

        Args:
            index: index of the layer.
        """
        if index in self._inside:
            return self.ranges.layers[index]
        layer_range = self.ranges.valid_range(index)
        if layer_range is None:
            assert self._engine is not None
            assert self._engines_device is not None
            layer_range = self.ranges.move_layer(index, self._engine, self._engines_device)
            for slot in self._slots:
                slot.index = -1 if slot.index == index else slot.index
        return layer_range
