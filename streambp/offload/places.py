"""Choose each layer's saved tensors and the place of each tensor: the host or the device.

[Note: two rooms] Saved tensors have room on the host and on the device. Both rooms serve one
choice. The link copies a limited number of bytes while one layer computes, and the host takes so
much from each layer. A later layer's idle link does not help an earlier layer, because at most two
groups of copies are in flight. The device takes the tensors of any layer with the most seconds
spared for each byte.

A byte of a room has a price: the seconds that the last chosen tensor spares for a byte. A tensor
that leaves spares the device's price, or its own seconds if these are fewer. Tensors of at
most the host's price leave last. The two prices determine each layer's set of leaving tensors.
The choice is the prices with which the step spares most seconds. Layer inputs leave, because
backward needs them in any case. The rest of the device's room goes to tensors of the last layers,
because their copies hide least.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from streambp.offload.costs import Candidate

INPUT = "x"  # name of a layer's input
PRICES = 12  # prices of a room that are tried; of more prices, every n-th by size
SETS = 10  # tensors of a layer of which every set is tried; of more tensors, the largest first


@dataclasses.dataclass(frozen=True)
class TwoRooms:
    """Bytes available for saved tensors on the host and on the device.

    Attributes:
        host: bytes of host memory.
        link: bytes that the link copies to the host while one layer computes forward.
        device: bytes of the device for saved tensors of all layers.
        never_leave: names of tensors that are never copied to the host, because computing them
            again is faster than the copy.
    """

    host: float
    link: float
    device: float
    never_leave: Collection[str] = ()


@dataclasses.dataclass
class Places:
    """The tensors of each layer that are saved, and their places.

    Attributes:
        saved: tensors that each layer saves beside its input, by the layer's index.
        staying: names of the tensors that stay on the device, by the layer's index. `INPUT` is the
            layer's input.
        leaving: bytes that leave for the host, by name.
        on_device: bytes that stay on the device.
        sizes: bytes of each layer's input, by the layer's index.
    """

    saved: dict[int, list[Candidate]] = dataclasses.field(default_factory=dict)
    staying: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    leaving: dict[str, float] = dataclasses.field(default_factory=dict)
    on_device: float = 0.0
    sizes: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def copied(self) -> Places:
        """Return a copy whose places can be changed."""
        staying = {index: set(names) for index, names in self.staying.items()}
        saved = {index: list(found) for index, found in self.saved.items()}
        return dataclasses.replace(self, saved=saved, staying=staying)

    @property
    def inputs(self) -> float:
        """Return the bytes of all layers' inputs."""
        return sum(self.sizes.values())

    def stays(self, index: int) -> float:
        """Return the bytes of a layer's tensors that stay on the device.

        Args:
            index: the layer's index.
        """
        names = self.staying.get(index, set())
        size = self.sizes.get(index, 0.0) if INPUT in names else 0.0
        return size + sum(one.bytes for one in self.saved.get(index, ()) if one.name in names)

    def let_leave(self, indices: Iterable[int], size: float) -> float:
        """Remove tensors from the device until at least `size` bytes are free, and return the bytes.
        Inputs leave for the host; other tensors that stay are not saved.

        Args:
            indices: indices of the layers, in the order in which their tensors are taken.
            size: bytes to free.
        """
        freed = 0.0
        for index in indices:
            if freed >= size:
                break
            freed += self.stays(index)
            names = self.staying.pop(index, set())
            kept = [one for one in self.saved.get(index, []) if one.name not in names]
            self.saved[index][:] = kept
        return freed

    @property
    def spared(self) -> float:
        """Return the computation that backward is spared by the saved tensors, in FLOPs of matrix
        products; attention's FLOPs are converted by their time. Choices are compared by this
        number."""
        return sum(one.bytes * one.worth for found in self.saved.values() for one in found)


def choose_places(
    inputs: Mapping[int, float], candidates: Mapping[int, Sequence[Candidate]], rooms: TwoRooms
) -> Places:
    """Return the layers' saved tensors and their places, the device or the host, so that backward
    is spared the most computation. [Note: two rooms]

    Args:
        inputs: bytes of each layer's input, by the layer's index.
        candidates: tensors that each layer may save.
        rooms: the bytes that saved tensors may take.
    """
    worths = {0.0}
    for found in candidates.values():
        worths |= {one.worth for one in found}
    prices = sorted(worths)[:: 1 + len(worths) // PRICES]
    choice = _Choice(inputs, candidates, rooms)
    best = choice.at_prices(0.0, 0.0)
    for on_device, on_host in itertools.product(prices, repeat=2):
        places = choice.at_prices(on_device, on_host)
        if places.spared > best.spared:
            best = places
    _use_rest_of_device(best, inputs, rooms.device)
    return best


class _Choice:
    """Chooses places for the same tensors at different prices: `at_prices` is called once for each
    pair of prices. A price is the FLOPs that a byte of the device or of the host would spare if it
    held another tensor.

    Args:
        inputs: bytes of each layer's input, by the layer's index.
        candidates: tensors that each layer may save.
        rooms: the bytes that saved tensors may take.
    """

    def __init__(
        self,
        inputs: Mapping[int, float],
        candidates: Mapping[int, Sequence[Candidate]],
        rooms: TwoRooms,
    ) -> None:
        self.inputs = inputs
        self.candidates = candidates
        self.rooms = rooms
        self._sets: dict[tuple[Any, ...], tuple[int, ...]] = {}  # layers are alike

    def at_prices(self, on_device: float, on_host: float) -> Places:
        """Return the saved tensors and their places if a byte has these prices, in FLOPs that the
        byte would spare if it held another tensor.

        Args:
            on_device: price of a byte of the device.
            on_host: price of a byte of the host. Tensors that spare at most this many FLOPs for
                each byte are the last to be copied to the host.
        """
        rooms = self.rooms
        places = Places(sizes=self.inputs)
        host = rooms.host
        sizes: dict[int, float] = {}  # bytes of each layer that leave
        for index in sorted(self.inputs):
            size = self.inputs[index]
            places.saved[index] = []
            places.staying[index] = set()
            if size > host:
                places.staying[index].add(INPUT)
                places.on_device += size
                size = 0.0
            sizes[index] = size
            places.leaving[INPUT] = places.leaving.get(INPUT, 0.0) + size
            host -= size
        for least in (on_host, 0.0):
            for index, size in sizes.items():
                found = []
                for one in self.candidates[index]:
                    can_leave = one.worth > least and one.name not in rooms.never_leave
                    if can_leave and one not in places.saved[index]:
                        found.append(one)
                for one in self._leaving(found, min(rooms.link - size, host), on_device):
                    places.saved[index].append(one)
                    places.leaving[one.name] = places.leaving.get(one.name, 0.0) + one.bytes
                    sizes[index] += one.bytes
                    host -= one.bytes
        everything = itertools.chain.from_iterable(self.candidates.values())
        for one in sorted(everything, key=lambda one: (-one.worth, -one.index)):
            if one in places.saved[one.index]:
                continue
            if places.on_device + one.bytes <= rooms.device:
                places.saved[one.index].append(one)
                places.staying[one.index].add(one.name)
                places.on_device += one.bytes
        return places

    def _leaving(self, found: list[Candidate], room: float, price: float) -> list[Candidate]:
        """Return the tensors of one layer that are copied to the host: those that spare the most
        FLOPs within `room` bytes.

        Args:
            found: tensors of the layer that may be copied to the host.
            room: bytes that may be copied.
            price: FLOPs that a byte of the device would spare otherwise; a larger worth of a tensor
                counts as this price.
        """
        if len(found) > SETS:
            chosen = []
            for one in sorted(found, key=lambda one: (-min(one.worth, price), -one.bytes)):
                if one.bytes <= room:
                    chosen.append(one)
                    room -= one.bytes
            return chosen
        key = (*((one.bytes, one.worth) for one in found), room, price)
        if key not in self._sets:
            self._sets[key] = _best_set(found, room, price)
        return [found[number] for number in self._sets[key]]


def _best_set(found: Sequence[Candidate], room: float, price: float) -> tuple[int, ...]:
    """Return the indices in `found` of the set of tensors that spares the most FLOPs within `room`
    bytes, by trying all sets.

    Args:
        found: a few tensors of one layer.
        room: bytes that may be copied to the host.
        price: FLOPs that a byte of the device would spare otherwise; a larger worth of a tensor
            counts as this price.
    """
    best: tuple[int, ...] = ()
    most = 0.0
    for count in range(1, len(found) + 1):
        for numbers in itertools.combinations(range(len(found)), count):
            size = value = 0.0
            for number in numbers:
                one = found[number]
                size += one.bytes
                value += one.bytes * min(one.worth, price)
            if size <= room and value > most:
                best = numbers
                most = value
    return best


def _use_rest_of_device(places: Places, inputs: Mapping[int, float], room: float) -> None:
    """Change tensors from the host to the device while the device has room, from the last layer to
    the first.

    Args:
        places: the choice, changed in place.
        inputs: bytes of each layer's input, by the layer's index.
        room: bytes of the device for saved tensors.
    """
    for index in sorted(inputs, reverse=True):
        sizes = {INPUT: inputs[index]}
        for one in places.saved[index]:
            sizes[one.name] = one.bytes
        for name, size in sizes.items():
            if name in places.staying[index]:
                continue
            if places.on_device + size > room:
                return
            places.staying[index].add(name)
            places.leaving[name] -= size
            places.on_device += size
