"""Reserve host memory for weights: one range of memory for each layer.

    HostRanges       the ranges of one patched model
      LayerRange     the range of one layer: the memory, and the tensors in it
    move_others      replaces a layer's `_apply`, which moves and casts modules

Frozen weights are on the host. Weights that require a gradient, or once did (adapters), stay on the
device. So do weights that other modules share (another layer, the embeddings). A layer that trains
entirely has all its weights and their gradients on the host, because the gradient of a tensor on
the host must be on the host too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streambp.errors import HostMemoryError, UnsupportedModelError
from streambp.instance_forward import PatchedModuleRef
from streambp.known_names import (
    APPLY_METHOD,
    GRADIENT_HOOKED,
    PARTITION_ID,
    QUANT_STATE,
    STATISTICS_8BIT,
)
from streambp.offload.arena import Arena, BufferStack
from streambp.offload.engines import Engine
from streambp.offload.free_memory import UNLIMITED_BYTES, host_limit

ALIGNMENT_BYTES = 512  # bytes, like device allocators: some kernels read weights as vectors
DEVICE_MAP_ATTRIBUTE = (
    "hf_device_map"  # transformers' attribute with the devices of a model's parts
)
OTHER_MODULES = -1  # index of all modules outside of layers
REQUIRES_GRADIENT = operator.attrgetter("requires_grad")


@dataclasses.dataclass(eq=False)
class LayerStandIn:
    """Object with the attribute `layer`, a decoder layer, and nothing else. The planner uses the
    object in place of a patched layer's `LayerState` to compute the bytes of weights on the
    host."""

    layer: nn.Module


@dataclasses.dataclass
class WeightSlice:
    """One tensor's place in the host memory that holds all weights of its layer.

    Attributes:
        tensor: the tensor, whose `.data` points at the host, or at the device while the layer runs.
        offset: first byte in the layer's memory.
        home: view of the layer's memory with the tensor's shape [...].
    """

    tensor: Tensor
    offset: int
    home: Tensor

    def view_in(self, memory: Tensor) -> Tensor:
        """Return the tensor's view in another memory with the same layout, such as a copy of the
        layer's memory on the device.

        Args:
            memory: [bytes] uint8.

        Returns:
            A view with the tensor's dtype, shape [...] and strides.
        """
        home = self.home
        return (
            memory[self.offset : self.offset + home.nbytes]
            .view(home.dtype)
            .as_strided(home.shape, home.stride())
        )


@dataclasses.dataclass
class LayerRange:
    """The weights of a decoder layer in a contiguous range of host memory.

    Attributes:
        memory: memory of all weights [bytes], uint8.
        slices: the place of each weight in the memory.
        tensors: all tensors of the layer when the memory was filled, including those that stay on
            the device.
        wanting: one byte for each of `tensors`: 1 if the tensor required a gradient when the memory
            was filled, otherwise 0.
        trains: True if weights on the host require a gradient.
    """

    memory: Tensor
    slices: list[WeightSlice]
    tensors: list[Tensor]
    wanting: bytes
    trains: bool


class HostRanges:
    """Host memory with the weights of a model's decoder layers, one contiguous range for each
    layer.

    Args:
        root: the model.
        host_memory: limit in bytes; None: the available memory.

    Attributes:
        layer_states: records of the decoder layers (`layer.layer_state.LayerState`) by the layer's
            index.
        layers: ranges of host memory by the layer's index.
        staying: indices of the layers whose weights stay on the device between their uses.
        gradient_bytes: bytes of host memory for gradients.
    """

    def __init__(self, root: nn.Module | PatchedModuleRef, host_memory: int | None) -> None:
        self.home = root if isinstance(root, PatchedModuleRef) else PatchedModuleRef(root)
        self.host_memory = host_memory
        self.layer_states: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.layers: dict[int, LayerRange] = {}
        self.staying: frozenset[int] = frozenset()
        self.gradient_bytes = 0
        self._arena: Arena | None = None
        self._maps: list[tuple[nn.Module, Any]] = []
        self._holders: dict[int, tuple[Tensor, set[int]]] = {}  # tensor and layer indices by id

    def __getstate__(self) -> Any:
        """Return the state for copy and pickle, without host memory: the copy's first call fills
        its own."""
        state = vars(HostRanges(self.home, self.host_memory))
        return {name: value for name, value in state.items() if name != "layer_states"}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, layer_states=weakref.WeakValueDictionary())

    @property
    def root(self) -> nn.Module:
        """Return the model whose layers' weights are on the host."""
        model = self.home()
        assert model is not None  # the model calls this method
        return model

    @property
    def bytes(self) -> int:
        """Return the bytes of host memory that all layers' weights take now."""
        return sum(layer_range.memory.numel() for layer_range in self.layers.values())

    def install(self, layer_states: Iterable[Any]) -> None:
        """Make the layers' weights stay on the host from now on if the program moves the model, for
        example with `model.to("cuda")`.

        Args:
            layer_states: the records of the decoder layers.
        """
        self.layer_states.update({layer_state.index: layer_state for layer_state in layer_states})
        for layer_state in self.layer_states.values():
            layer_state.layer.__dict__[APPLY_METHOD] = functools.partial(
                move_others, self, layer_state.index
            )
        for module in self.root.modules():
            device_map = module.__dict__.get(DEVICE_MAP_ATTRIBUTE)
            # accelerate would use the CPU alone
            if device_map and {str(device) for device in device_map.values()} == {"cpu"}:
                self._maps.append((module, module.__dict__.pop(DEVICE_MAP_ATTRIBUTE)))

    def remove(self) -> None:
        """Undo `install`: calls such as `model.to("cuda")` move the layers' weights again. The
        weights remain on the host until such a call."""
        for layer_state in self.layer_states.values():
            layer_state.layer.__dict__.pop(APPLY_METHOD, None)
        for module, device_map in self._maps:
            module.__dict__[DEVICE_MAP_ATTRIBUTE] = device_map

    def keep_on_device(self, headroom: float, slots: int) -> None:
        """Choose the layers whose weights stay on the device: the last layers, up to the number
        that fits. The indices are stored in `staying`. Once weights are on the host, later calls
        can only reduce this number.

        Args:
            headroom: device bytes for layers' weights.
            slots: number of device buffers for the weights of layers on the host. The buffers take
                part of `headroom`, unless all layers fit.
        """
        sizes = {index: self.bytes_of(index) for index in self.layer_states}
        max_bytes = (
            headroom if sum(sizes.values()) <= headroom else headroom - slots * max(sizes.values())
        )
        staying = {index for index, size in sizes.items() if not size}
        used_bytes = 0
        for index in sorted(sizes.keys() - staying, reverse=True):
            used_bytes += sizes[index]
            if used_bytes > max_bytes or (self.layers and index not in self.staying):
                break
            staying.add(index)
        self.staying = frozenset(staying)
        self._holders.clear()

    def bytes_of(self, index: int, trained: bool = False) -> int:
        """Return the bytes that a layer's weights take in host memory. A layer with frozen weights
        has only these on the host; a layer without frozen weights has all weights there.

        Args:
            index: index of the layer.
            trained: False: count frozen weights only. True: count trained weights only.
        """
        tensors = [
            tensor
            for tensor in self.streamed_tensors(index).values()
            if tensor.requires_grad == trained
        ]
        return _lay_out(tensors)[1] if tensors else 0

    def streamed_tensors(self, index: int) -> dict[int, Tensor]:
        """Return a dict from id() to the tensors [...] of layer `index` that are in host memory
        while the layer does not run.

        The result has the layer's frozen tensors, or all tensors if none is frozen. Tensors that
        belong to other modules as well stay on the device.
        """
        tensors = {id(tensor): tensor for tensor in tensors_inside(self.layer_states[index].layer)}
        if not tensors.keys() <= self._holders.keys():
            self._holders.clear()
            inside: set[int] = set()
            for other_index, layer_state in self.layer_states.items():
                inside.update(map(id, layer_state.layer.modules()))
                for tensor in tensors_inside(layer_state.layer):
                    self._holders.setdefault(id(tensor), (tensor, set()))[1].add(other_index)
            for module in self.root.modules():
                for tensor in tensors_of(module) if id(module) not in inside else ():
                    self._holders.setdefault(id(tensor), (tensor, set()))[1].add(OTHER_MODULES)
        layer_range = self.layers.get(index)
        stay = set[int]()
        if layer_range is not None:  # adapters that are disabled temporarily
            stay = set(map(id, layer_range.tensors)).difference(
                id(weight_slice.tensor) for weight_slice in layer_range.slices
            )
        own_tensors = {
            key: tensor
            for key, tensor in tensors.items()
            if self._holders[key][1] == {index} and key not in stay
        }
        return {
            key: tensor for key, tensor in own_tensors.items() if not tensor.requires_grad
        } or own_tensors

    def move_all(self, engine: Engine, device: torch.device) -> None:
        """Move the weights of all layers to host memory, except the layers that stay on the device
        and the layers that are there already.

        Args:
            engine: allocates the host memory.
            device: computes the layers.
        """
        self._holders.clear()
        for index, layer_state in self.layer_states.items():
            if index in self.staying:
                for tensor in layer_state.cached_result(tensors_inside):
                    if tensor.device != device and not tensor.is_meta:
                        tensor.data = tensor.data.to(device)
            elif self.valid_range(index) is None:
                self.move_layer(index, engine, device)
        self._holders.clear()

    def valid_range(self, index: int) -> LayerRange | None:
        """Return the range of host memory with the weights of layer `index`. None if the layer has
        no range, or if the range is outdated and must be filled again.

        The range is valid while the layer has the same tensors with the same `requires_grad`, and
        the tensors on the host still point into the range.
        """
        layer_range = self.layers.get(index)
        if layer_range is None:
            return None
        tensors = self.layer_states[index].cached_result(tensors_inside)
        same_tensors = tensors is layer_range.tensors or list(map(id, tensors)) == list(
            map(id, layer_range.tensors)
        )
        at_home = (
            weight_slice.tensor.data_ptr() == weight_slice.home.data_ptr()
            for weight_slice in layer_range.slices
        )
        current = (
            same_tensors
            and layer_range.wanting == bytes(map(REQUIRES_GRADIENT, tensors))
            and all(at_home)
        )
        return layer_range if current else None

    def move_layer(self, index: int, engine: Engine, device: torch.device) -> LayerRange:
        """Move a layer's weights into one contiguous range of host memory, and free their previous
        memory. Return the range, which is also stored in `layers`.

        Args:
            index: index of the layer.
            engine: allocates the range.
            device: computes the layer; the layer's other tensors move to this device.

        Raises:
            UnsupportedModelError: a weight cannot be on the host.
            HostMemoryError: the host has no room for the weights.
        """
        engine.settle()
        streamed = self.streamed_tensors(index)
        layer_range = self.layers.get(index)
        tensors = self.layer_states[index].cached_result(tensors_inside)
        for tensor in tensors:
            if id(tensor) in streamed:
                if hasattr(tensor, PARTITION_ID) or hasattr(tensor, GRADIENT_HOOKED):
                    raise UnsupportedModelError(
                        "DeepSpeed stores the weights of this model in its own memory, and "
                        "weights='cpu' would move them. Use DeepSpeed's offload_param in place of "
                        "weights='cpu', or train without DeepSpeed."
                    )
                if (
                    type(tensor.data) is not Tensor
                    or tensor.is_meta
                    or hasattr(tensor, STATISTICS_8BIT)
                ):
                    name = next(
                        (
                            n
                            for n, p in self.layer_states[index].layer.named_parameters()
                            if p is tensor
                        ),
                        "a tensor",
                    )
                    kind = type(tensor if type(tensor.data) is Tensor else tensor.data).__name__
                    raise UnsupportedModelError(
                        f"{name} of layer {index} is a {kind} on {tensor.device}, which "
                        "weights='cpu' cannot keep on the host: it holds plain tensors and "
                        "bitsandbytes' 4-bit weights. Load the model so, on the CPU, or leave "
                        "weights out."
                    )
                tensor.data = tensor.data if _is_dense(tensor) else tensor.data.contiguous()
            elif not tensor.is_meta and tensor.device != device:
                tensor.data = tensor.data.to(device)  # adapters were created on the host
        layout, size = _lay_out([tensor for tensor in tensors if id(tensor) in streamed])
        memory, previous_size = (
            (None, 0) if layer_range is None else (layer_range.memory, layer_range.memory.numel())
        )
        if memory is not None:  # reused if its tensors have their new offsets already
            offsets = ((tensor.data_ptr() - memory.data_ptr(), offset) for tensor, offset in layout)
            stays = previous_size == size and all(
                not 0 <= at < size or at == offset for at, offset in offsets
            )
            memory = memory if stays else None
        if memory is None:
            memory = self.reserve(size, engine, f"The weights of layer {index}", previous_size)
        slices = [
            WeightSlice(tensor, offset, view_of(memory, offset, tensor))
            for tensor, offset in layout
        ]
        for weight_slice in slices:
            if weight_slice.home.data_ptr() != weight_slice.tensor.data_ptr():
                weight_slice.home.copy_(weight_slice.tensor.data)
                weight_slice.tensor.data = weight_slice.home
        wanting = bytes(map(REQUIRES_GRADIENT, tensors))
        trains = any(map(REQUIRES_GRADIENT, streamed.values()))
        self.layers[index] = LayerRange(memory, slices, tensors, wanting, trains)
        return self.layers[index]

    def reserve(self, size: int, engine: Engine, subject: str, replaced_bytes: int = 0) -> Tensor:
        """Reserve host memory [size], uint8, for weights or their gradients.

        The available memory is checked first, because the out-of-memory killer raises no exception.

        Args:
            size: number of bytes.
            engine: allocates the memory.
            subject: subject of the error message, in the plural, such as "The weights of layer 3".
            replaced_bytes: bytes of other memory that will be freed once this memory is filled, and
                that do not count against the limit.

        Raises:
            HostMemoryError: the host has no room for the memory.
        """
        if self._arena is None:
            self._arena = Arena(self.host_memory or UNLIMITED_BYTES, engine.host_buffer)
        other_bytes = self.bytes + self.gradient_bytes - replaced_bytes
        self._arena.allocated = other_bytes
        stack = BufferStack("weights")
        available = host_limit(None) if self.host_memory is None else UNLIMITED_BYTES
        if size > available or not self._arena.grow(stack, size):
            reason = self._arena.system_error
            if size > available:
                reason = f"{available / 2**30:.2f} GiB are available"
            raise HostMemoryError(
                f"{subject} want {size / 2**30:.2f} GiB of host memory beside "
                f"{other_bytes / 2**30:.2f} GiB of other weights and gradients, and "
                f"{reason or f'host_memory is {self._arena.limit / 2**30:.2f} GiB'}. Free memory, "
                "raise host_memory, load the model in 4 bits, or leave weights='cpu' out."
            )
        return stack.segments[0]


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters [...] of a module itself, and the tensors [...] with which bitsandbytes
    dequantizes 4-bit weights, such as absmax: from attributes of the parameters, or from the
    module's `quant_state`. All of them move between host and device."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
            yield from _statistics(vars(parameter).values())
    yield from _statistics([vars(module).get(QUANT_STATE)])


def _statistics(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors [...] with which bitsandbytes dequantizes a weight, such as absmax: the
    attributes of its quantization state. Nested states of the same class are included.

    Args:
        values: objects to search for quantization states, such as the attributes of a weight;
            tensors and modules are skipped.
    """
    waiting = [value for value in values if hasattr(value, "__dict__")]
    for value in waiting:  # the loop appends to this list
        for inner in (
            vars(value).values() if not isinstance(value, Tensor | nn.Module | type) else ()
        ):
            if isinstance(inner, Tensor):
                yield inner
            elif type(inner) is type(value):  # statistics of statistics
                waiting.append(inner)


def tensors_inside(layer: nn.Module) -> list[Tensor]:
    """Return the parameters [...] of all modules of a layer, and the tensors in attributes of these
    parameters, with which bitsandbytes dequantizes weights. Each tensor is returned once."""
    tensors = {id(tensor): tensor for module in layer.modules() for tensor in tensors_of(module)}
    return list(tensors.values())


def _lay_out(tensors: Iterable[Tensor]) -> tuple[list[tuple[Tensor, int]], int]:
    """Return pairs (tensor, first byte), which place tensors one behind another in a contiguous
    range of host memory, and the number of bytes of this range.

    Args:
        tensors: tensors of one layer.
    """
    layout = list[tuple[Tensor, int]]()
    size = ALIGNMENT_BYTES
    for tensor in tensors:
        layout.append((tensor, size))
        size += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return layout, size


def bytes_on_host(
    root: nn.Module, layers: Sequence[nn.Module]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two tuples with one number for each layer, for the prediction of memory. The first has
    the host bytes of the layer's frozen weights. The second has the host bytes of the layer's
    trained weights. This number is 0 if any weight of the layer is frozen, because trained weights
    then stay on the device.

    Args:
        root: the model.
        layers: the decoder layers. The weights may be meta tensors.
    """
    ranges = HostRanges(root, None)
    layer_states = {index: LayerStandIn(layer) for index, layer in enumerate(layers)}
    ranges.layer_states.update(layer_states)
    frozen, trained = (
        tuple(ranges.bytes_of(index, trains) for index in ranges.layer_states)
        for trains in (False, True)
    )
    return frozen, trained


def view_of(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a part of `memory` as a tensor with the shape, strides [...] and dtype of `like`.
    Writes to the tensor change `memory`.

    The tensor has a storage of its own, because `torch.save` writes entire storages.

    Args:
        memory: [bytes], uint8.
        offset: first byte of the part.
        like: tensor of any shape.
    """
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory.numpy(), dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.as_strided(like.shape, like.stride())


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements [...] of a tensor fill a range of memory without gaps or overlaps, in
    any order. Other tensors are made contiguous before they move to host memory."""
    expected = 1
    for stride, size in sorted(
        (s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def move_others(
    ranges: HostRanges, index: int, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Move and cast a layer's tensors, and return the layer. `model.to(...)` calls this function in
    place of the layer's `nn.Module._apply`. Weights [...] on the host are cast, but not moved.

    Each call determines anew the weights that belong on the host. The function thus also works
    before the first forward, and after adapters were added.

    Args:
        ranges: host memory with the weights of all layers.
        index: index of the layer.
        fn: function of a tensor, the argument of `_apply`.
        recurse: the argument of `_apply`.
    """
    layer = ranges.layer_states[index].layer
    host_tensors = {} if index in ranges.staying else ranges.streamed_tensors(index)
    host_tensors |= {
        id(tensor.grad): tensor.grad
        for tensor in list(host_tensors.values())
        if tensor.grad is not None
    }

    def apply(tensor: Tensor) -> Tensor:
        if id(tensor) not in host_tensors or tensor.is_meta:
            return fn(tensor)
        # reveals device and dtype
        probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        if probe.device.type in ("cpu", "meta"):
            return fn(tensor)
        is_on_host = tensor.device.type == "cpu" and tensor.dtype == probe.dtype
        return tensor if is_on_host else tensor.to("cpu", probe.dtype)

    applied: nn.Module = getattr(type(layer), APPLY_METHOD)(layer, apply, recurse)
    return applied
