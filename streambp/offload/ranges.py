"""Which weights live on the host, and where: a range of memory for each layer.

    HostRanges       of one patched model
      LayerRange     one layer's: the memory, and the tensors that lie in it
    move_others      stands in for a layer's `_apply`, by which modules are moved

Frozen weights live on the host. On the device stay weights that train or once did (adapters), and weights that somebody
else holds, too (another layer, the embeddings). Of a layer that trains as a whole all weights live on the host, and their
gradients come there. [Note: gradients on the host]
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

from streambp.alive import Home
from streambp.errors import HostMemoryError, UnsupportedModelError
from streambp.known_names import GRADIENT_HOOKED, MOVES, PARTITIONED, STATISTICS_8BIT
from streambp.offload.arena import NO_LIMIT, Arena, BufferStack, host_limit
from streambp.offload.engines import Engine

ALIGNMENT = 512  # bytes: as the allocators of devices align, for kernels that read weights in vectors
MAP = "hf_device_map"  # transformers': where parts of a model were loaded to
ALL_OTHERS = -1  # beside the indices of layers
WANTS_GRADIENT = operator.attrgetter("requires_grad")


@dataclasses.dataclass(eq=False)
class OneLayer:
    """A layer that does not stream, where ranges are only counted."""

    layer: nn.Module


@dataclasses.dataclass
class Piece:
    """A tensor within its layer's range. home: its part of the memory [...]."""

    tensor: Tensor
    offset: int
    home: Tensor

    def within(self, memory: Tensor) -> Tensor:
        """Its part of other memory [bytes], uint8, in its shape and strides [...]."""
        home = self.home
        return memory[self.offset : self.offset + home.nbytes].view(home.dtype).as_strided(home.shape, home.stride())


@dataclasses.dataclass
class LayerRange:
    """One layer's weights on the host. memory: all of them [bytes], uint8.

    tensors, wanting: all that the layer had when they were put there, and which of them wanted gradients. trains: weights
    on the host do.
    """

    memory: Tensor
    pieces: list[Piece]
    tensors: list[Tensor]
    wanting: bytes
    trains: bool


class HostRanges:
    """The weights of a model's layers on the host.

    Args:
        root: the model. host_memory: bytes that they may take; None: what is available.

    sites: of the layers (`layer.site.LayerSite`), by their index. layers: their ranges. staying: those that live on the
    device. [Note: layers that stay] beside: bytes of host memory for gradients.
    """

    def __init__(self, root: nn.Module | Home, host_memory: int | None) -> None:
        self.home = root if isinstance(root, Home) else Home(root)
        self.host_memory = host_memory
        self.sites: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.layers: dict[int, LayerRange] = {}
        self.staying: frozenset[int] = frozenset()
        self.beside = 0
        self._arena: Arena | None = None
        self._maps: list[tuple[nn.Module, Any]] = []
        self._holders: dict[int, tuple[Tensor, set[int]]] = {}  # of each tensor by its id: indices of layers

    def __getstate__(self) -> Any:
        """A copied or pickled model's weights are put on the host when it is first called."""
        found = vars(HostRanges(self.home, self.host_memory))
        return {name: value for name, value in found.items() if name != "sites"}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, sites=weakref.WeakValueDictionary())

    @property
    def root(self) -> nn.Module:
        """The model."""
        found = self.home()
        assert found is not None  # which calls this
        return found

    @property
    def bytes(self) -> int:
        """Of all ranges."""
        return sum(one.memory.numel() for one in self.layers.values())

    def install(self, sites: Iterable[Any]) -> None:
        """Have the layers' weights stay on the host when the model is moved from now on."""
        self.sites.update({site.index: site for site in sites})
        for site in self.sites.values():
            site.layer.__dict__[MOVES] = functools.partial(move_others, self, site.index)
        for module in self.root.modules():
            places = module.__dict__.get(MAP)
            if places and {str(place) for place in places.values()} == {"cpu"}:  # accelerate would train it nowhere else
                self._maps.append((module, module.__dict__.pop(MAP)))

    def remove(self) -> None:
        """The layers may be moved again. Their weights stay where they are, on the host."""
        for site in self.sites.values():
            site.layer.__dict__.pop(MOVES, None)
        for module, places in self._maps:
            module.__dict__[MAP] = places

    def stay(self, room: float, slots: int) -> None:
        """Have as many of the last layers live on the device as have room there, and no more than before.

        Args:
            room: bytes for layers' weights. slots: layers besides whose weights come there from the host, if any do.
        """
        sizes = {index: self.bytes_of(index) for index in self.sites}
        most = room if sum(sizes.values()) <= room else room - slots * max(sizes.values())
        staying, taken = {index for index, size in sizes.items() if not size}, 0
        for index in sorted(sizes.keys() - staying, reverse=True):
            taken += sizes[index]
            if taken > most or (self.layers and index not in self.staying):
                break
            staying.add(index)
        self.staying = frozenset(staying)
        self._holders.clear()

    def bytes_of(self, index: int, trained: bool = False) -> int:
        """What a layer's frozen weights take of the host, or those of a layer that trains as a whole."""
        found = [tensor for tensor in self.streamed(index).values() if tensor.requires_grad == trained]
        return _laid_out(found)[1] if found else 0

    def streamed(self, index: int) -> dict[int, Tensor]:
        """The tensors [...] of a layer that live on the host if the layer does, by their id."""
        tensors = {id(tensor): tensor for tensor in tensors_inside(self.sites[index].layer)}
        if not tensors.keys() <= self._holders.keys():
            self._holders.clear()
            inside: set[int] = set()
            for other, site in self.sites.items():
                inside.update(map(id, site.layer.modules()))
                for tensor in tensors_inside(site.layer):
                    self._holders.setdefault(id(tensor), (tensor, set()))[1].add(other)
            for module in self.root.modules():
                for tensor in tensors_of(module) if id(module) not in inside else ():
                    self._holders.setdefault(id(tensor), (tensor, set()))[1].add(ALL_OTHERS)
        known, stay = self.layers.get(index), set[int]()
        if known is not None:  # adapters that are switched off for a while
            stay = set(map(id, known.tensors)).difference(id(piece.tensor) for piece in known.pieces)
        own = {key: tensor for key, tensor in tensors.items() if self._holders[key][1] == {index} and key not in stay}
        return {key: tensor for key, tensor in own.items() if not tensor.requires_grad} or own

    def put_all(self, engine: Engine, device: torch.device) -> None:
        """`put` what is not on the host yet, or no more."""
        self._holders.clear()
        for index, site in self.sites.items():
            if index in self.staying:
                for tensor in site.of(tensors_inside):
                    if tensor.device != device and not tensor.is_meta:
                        tensor.data = tensor.data.to(device)
            elif self.known(index) is None:
                self.put(index, engine, device)
        self._holders.clear()

    def known(self, index: int) -> LayerRange | None:
        """A layer's range, while the layer has the same tensors, of any shape, and these lie where they did; else None."""
        known = self.layers.get(index)
        if known is None:
            return None
        tensors = self.sites[index].of(tensors_inside)
        same = tensors is known.tensors or list(map(id, tensors)) == list(map(id, known.tensors))
        at_home = (piece.tensor.data_ptr() == piece.home.data_ptr() for piece in known.pieces)
        current = same and known.wanting == bytes(map(WANTS_GRADIENT, tensors)) and all(at_home)
        return known if current else None

    def put(self, index: int, engine: Engine, device: torch.device) -> LayerRange:
        """Move a layer's weights into one range of host memory; what they had before is freed.

        Args:
            engine: allocates the range. device: where the layer is computed; the rest of it moves there.

        Raises:
            UnsupportedModelError: a weight cannot live on the host.
            HostMemoryError: the host has no room for them.
        """
        engine.settle()
        streamed, known = self.streamed(index), self.layers.get(index)
        tensors = self.sites[index].of(tensors_inside)
        for tensor in tensors:
            if id(tensor) in streamed:
                if hasattr(tensor, PARTITIONED) or hasattr(tensor, GRADIENT_HOOKED):
                    raise UnsupportedModelError(
                        "DeepSpeed keeps the weights of this model in memory of its own, and weights='cpu' would move them "
                        "out of it. Use DeepSpeed's offload_param in place of weights='cpu', or train without DeepSpeed."
                    )
                if type(tensor.data) is not Tensor or tensor.is_meta or hasattr(tensor, STATISTICS_8BIT):
                    name = next((n for n, p in self.sites[index].layer.named_parameters() if p is tensor), "a tensor")
                    kind = type(tensor if type(tensor.data) is Tensor else tensor.data).__name__
                    raise UnsupportedModelError(
                        f"{name} of layer {index} is a {kind} on {tensor.device}, which weights='cpu' cannot keep on the "
                        "host: it holds plain tensors and bitsandbytes' 4-bit weights. Load the model so, on the CPU, or "
                        "leave weights out."
                    )
                tensor.data = tensor.data if _dense(tensor) else tensor.data.contiguous()
            elif not tensor.is_meta and tensor.device != device:
                tensor.data = tensor.data.to(device)  # adapters are made where their base is
        places, size = _laid_out([tensor for tensor in tensors if id(tensor) in streamed])
        memory, before = (None, 0) if known is None else (known.memory, known.memory.numel())
        if memory is not None:  # it serves if every tensor that lies in it lies at its new place already
            offsets = ((tensor.data_ptr() - memory.data_ptr(), offset) for tensor, offset in places)
            stays = before == size and all(not 0 <= at < size or at == offset for at, offset in offsets)
            memory = memory if stays else None
        if memory is None:
            memory = self.more(size, engine, f"The weights of layer {index}", before)
        pieces = [Piece(tensor, offset, view_of(memory, offset, tensor)) for tensor, offset in places]
        for piece in pieces:
            if piece.home.data_ptr() != piece.tensor.data_ptr():
                piece.home.copy_(piece.tensor.data)
                piece.tensor.data = piece.home
        wanting, trains = bytes(map(WANTS_GRADIENT, tensors)), any(map(WANTS_GRADIENT, streamed.values()))
        self.layers[index] = LayerRange(memory, pieces, tensors, wanting, trains)
        return self.layers[index]

    def more(self, size: int, engine: Engine, who: str, instead: int = 0) -> Tensor:
        """Host memory [size], uint8, that lasts. The out-of-memory killer would give no exception: so ask first.

        Args:
            who: wants it, in the plural. instead: bytes of other memory that are given back for it.

        Raises:
            HostMemoryError: the host has no room for it.
        """
        if self._arena is None:
            self._arena = Arena(self.host_memory or NO_LIMIT, engine.host_buffer)
        others = self.bytes + self.beside - instead
        self._arena.allocated = others
        stack, available = BufferStack("weights"), host_limit(None) if self.host_memory is None else NO_LIMIT
        if size > available or not self._arena.grow(stack, size):
            found = f"{available / 2**30:.2f} GiB are available" if size > available else self._arena.refused
            raise HostMemoryError(
                f"{who} want {size / 2**30:.2f} GiB of host memory beside {others / 2**30:.2f} GiB of other weights and "
                f"gradients, and {found or f'host_memory is {self._arena.limit / 2**30:.2f} GiB'}. Free memory, "
                "raise host_memory, load the model in 4 bits, or leave weights='cpu' out."
            )
        return stack.segments[0]


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters [...], and the tensors [...] in attributes of these, such as bitsandbytes' statistics."""
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        yield parameter
        waiting = [value for value in vars(parameter).values() if hasattr(value, "__dict__")]
        for value in waiting:  # which grows
            for inner in vars(value).values() if not isinstance(value, Tensor | nn.Module | type) else ():
                if isinstance(inner, Tensor):
                    yield inner
                elif type(inner) is type(value):  # statistics of statistics
                    waiting.append(inner)


def tensors_inside(layer: nn.Module) -> list[Tensor]:
    """`tensors_of` all modules of a layer [...], each once."""
    found = {id(tensor): tensor for module in layer.modules() for tensor in tensors_of(module)}
    return list(found.values())


def _laid_out(tensors: Iterable[Tensor]) -> tuple[list[tuple[Tensor, int]], int]:
    """The place of each tensor [...] in a layer's range, and the bytes of the whole."""
    places, size = list[tuple[Tensor, int]](), ALIGNMENT
    for tensor in tensors:
        places.append((tensor, size))
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def bytes_on_host(root: nn.Module, layers: Sequence[nn.Module]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the frozen weights of each of a model's layers take of the host, and the weights of layers that train as a
    whole; they need no data."""
    ranges = HostRanges(root, None)
    sites = {index: OneLayer(layer) for index, layer in enumerate(layers)}
    ranges.sites.update(sites)
    frozen, trained = (tuple(ranges.bytes_of(index, trains) for index in ranges.sites) for trains in (False, True))
    return frozen, trained


def view_of(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """The part of memory [bytes], uint8, at `offset` as a tensor of the shape, strides [...] and dtype of `like`, with a
    storage of its own: `torch.save` writes a tensor's whole storage."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory.numpy(), dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.as_strided(like.shape, like.stride())


def _dense(tensor: Tensor) -> bool:
    """Whether its elements [...] fill a range of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def move_others(ranges: HostRanges, index: int, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` of a layer, by which modules are moved and cast: weights [...] on the host are cast there.

    It may be asked before the model was ever called, and before adapters are added.
    """
    layer = ranges.sites[index].layer
    held = {} if index in ranges.staying else ranges.streamed(index)
    held |= {id(tensor.grad): tensor.grad for tensor in list(held.values()) if tensor.grad is not None}

    def apply(tensor: Tensor) -> Tensor:
        if id(tensor) not in held or tensor.is_meta:
            return fn(tensor)
        asked = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # which shows where to, and what of
        if asked.device.type in ("cpu", "meta"):
            return fn(tensor)
        there = tensor.device.type == "cpu" and tensor.dtype == asked.dtype
        return tensor if there else tensor.to("cpu", asked.dtype)

    applied: nn.Module = getattr(type(layer), MOVES)(layer, apply, recurse)
    return applied
