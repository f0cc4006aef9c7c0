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

COPY_GROUPS_IN_FLIGHT = 2  # groups of copies, each of one chunk
INPUT_NAME = "x"  # name of a layer's input
MAX_PRICES = 12  # prices of a room that are tried; of more prices, every n-th by size
MAX_COMBINED_TENSORS = (
    10  # tensors of a layer of which every set is tried; of more tensors, the largest first
)


@dataclasses.dataclass(frozen=True)
class Headroom:
    """Bytes available for saved tensors on the host and on the device.

    Attributes:
        host: bytes of host memory.
        link: bytes that can be copied to the host while one layer computes its forward.
        device: bytes of the device for saved tensors of all layers.
        never_leave: names of tensors that are never copied to the host, because computing them
            again is faster than the copy.
    """

    host: float
    link: float
    device: float
    never_leave: Collection[str] = ()


@dataclasses.dataclass
class Placement:
    """The tensors of each layer that are saved, and their places: the device or the host.

    Attributes:
        saved: tensors that each layer saves beside its input, by the layer's index.
        staying: names of the tensors that stay on the device, by the layer's index. `INPUT_NAME` is
            the layer's input. All other saved tensors leave for the host.
        leaving: bytes of all layers' tensors that leave for the host, by name of the tensor.
        on_device: bytes of inputs and saved tensors that stay on the device.
        sizes: bytes of each layer's input, by the layer's index.
    """

    saved: dict[int, list[Candidate]] = dataclasses.field(default_factory=dict)
    staying: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    leaving: dict[str, float] = dataclasses.field(default_factory=dict)
    on_device: float = 0.0
    sizes: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def copy(self) -> Placement:
        """Return a copy of which `saved` and `staying` can be changed without changing this
        placement."""
        staying = {index: set(names) for index, names in self.staying.items()}
        saved = {index: list(candidates) for index, candidates in self.saved.items()}
        return dataclasses.replace(self, saved=saved, staying=staying)

    @property
    def inputs(self) -> float:
        """Return the bytes of all layers' inputs."""
        return sum(self.sizes.values())

    def staying_bytes(self, index: int) -> float:
        """Return the bytes of a layer's tensors that stay on the device, with its input if the
        input stays.

        Args:
            index: the layer's index.
        """
        names = self.staying.get(index, set())
        size = self.sizes.get(index, 0.0) if INPUT_NAME in names else 0.0
        return size + sum(
            candidate.bytes for candidate in self.saved.get(index, ()) if candidate.name in names
        )

    def free_device(self, indices: Iterable[int], size: float) -> float:
        """Remove tensors from the device until at least `size` bytes are free, and return the
        number of freed bytes. Inputs leave for the host; other tensors on the device are then not
        saved at all.

        Args:
            indices: indices of the layers, in the order in which their tensors are removed.
            size: bytes to free.
        """
        freed = 0.0
        for index in indices:
            if freed >= size:
                break
            freed += self.staying_bytes(index)
            names = self.staying.pop(index, set())
            remaining = [
                candidate for candidate in self.saved.get(index, []) if candidate.name not in names
            ]
            self.saved[index][:] = remaining
        return freed

    @property
    def largest_leaving(self) -> float:
        """Return the bytes of tensors that leave from one layer, the layer with the most bytes."""
        largest = 0.0
        for index, candidates in self.saved.items():
            total = self.sizes.get(index, 0.0) + sum(candidate.bytes for candidate in candidates)
            largest = max(largest, total - self.staying_bytes(index))
        return largest

    @property
    def spared(self) -> float:
        """Return the computation that backward is spared by the saved tensors, in FLOPs of matrix
        products. Attention counts as matrix products of the same duration. Choices are compared by
        this number."""
        return sum(
            candidate.bytes * candidate.flops_per_byte
            for candidates in self.saved.values()
            for candidate in candidates
        )


def room_beside_copies(
    headroom: Headroom,
    inputs: Mapping[int, float],
    candidates: Mapping[int, Sequence[Candidate]],
    chunk_fraction: float,
) -> Headroom:
    """Return a copy of `headroom` with fewer bytes for saved tensors on the device, and for copies
    to the host. The reason is that each copy needs device memory until the copy has ended. A device
    with little free memory therefore copies less.

    Args:
        headroom: the bytes that saved tensors may take, if copies needed no memory.
        inputs: bytes of each layer's input, by the layer's index. Copies of inputs are not counted,
            because device memory is reserved for these copies already.
        candidates: tensors that each layer may save, by the layer's index.
        chunk_fraction: tokens of a chunk, divided by the tokens of the micro-batch.
    """
    # The copies of so many layers need memory at the same time.
    fraction = COPY_GROUPS_IN_FLIGHT * chunk_fraction
    largest_input = max(inputs.values())
    largest_saves = 0.0
    for layer_candidates in candidates.values():
        total = 0.0
        for candidate in layer_candidates:
            if candidate.name not in headroom.never_leave:
                total += candidate.bytes
        largest_saves = max(largest_saves, total)
    host = max(0.0, headroom.host - sum(inputs.values()))
    device = max(0.0, headroom.device)
    copied_saves = min(
        max(0.0, headroom.link - largest_input), largest_saves, host, device / fraction
    )
    return dataclasses.replace(
        headroom,
        link=min(headroom.link, largest_input + copied_saves),
        device=max(0.0, device - fraction * copied_saves),
    )


def choose_placement(
    inputs: Mapping[int, float], candidates: Mapping[int, Sequence[Candidate]], headroom: Headroom
) -> Placement:
    """Return the layers' saved tensors and their places, the device or the host, so that backward
    is spared the most computation. [Note: two rooms]

    Args:
        inputs: bytes of each layer's input, by the layer's index.
        candidates: tensors that each layer may save, by the layer's index.
        headroom: the bytes that saved tensors may take.
    """
    worths = {0.0}
    for layer_candidates in candidates.values():
        worths |= {candidate.flops_per_byte for candidate in layer_candidates}
    prices = sorted(worths)[:: 1 + len(worths) // MAX_PRICES]
    choice = _PlacementSearch(inputs, candidates, headroom)
    best = choice.choose_at_prices(0.0, 0.0)
    for on_device, on_host in itertools.product(prices, repeat=2):
        placement = choice.choose_at_prices(on_device, on_host)
        if placement.spared > best.spared:
            best = placement
    _use_rest_of_device(best, inputs, headroom.device)
    return best


class _PlacementSearch:
    """Chooses places for the same tensors at different prices: `choose_at_prices` is called once
    for each pair of prices. A price is the FLOPs that a byte of the device or of the host would
    spare if it held another tensor.

    Args:
        inputs: bytes of each layer's input, by the layer's index.
        candidates: tensors that each layer may save, by the layer's index.
        headroom: the bytes that saved tensors may take.
    """

    def __init__(
        self,
        inputs: Mapping[int, float],
        candidates: Mapping[int, Sequence[Candidate]],
        headroom: Headroom,
    ) -> None:
        self.inputs = inputs
        self.candidates = candidates
        self.headroom = headroom
        self._sets: dict[tuple[Any, ...], tuple[int, ...]] = {}  # layers are alike

    def choose_at_prices(self, on_device: float, on_host: float) -> Placement:
        """Return the saved tensors and their places if a byte has these prices, in FLOPs that the
        byte would spare if it held another tensor.

        Args:
            on_device: price of a byte of the device.
            on_host: price of a byte of the host. Tensors that spare more FLOPs for each byte than
                this price are copied first, in all layers. Other tensors are copied to the host if
                space is left there.
        """
        headroom = self.headroom
        placement = Placement(sizes=self.inputs)
        host = headroom.host
        sizes: dict[int, float] = {}  # bytes of each layer that leave
        for index in sorted(self.inputs):
            size = self.inputs[index]
            placement.saved[index] = []
            placement.staying[index] = set()
            if size > host:
                placement.staying[index].add(INPUT_NAME)
                placement.on_device += size
                size = 0.0
            sizes[index] = size
            placement.leaving[INPUT_NAME] = placement.leaving.get(INPUT_NAME, 0.0) + size
            host -= size
        for min_flops in (on_host, 0.0):
            for index, size in sizes.items():
                movable_candidates = []
                for candidate in self.candidates[index]:
                    can_leave = (
                        candidate.flops_per_byte > min_flops
                        and candidate.name not in headroom.never_leave
                    )
                    if can_leave and candidate not in placement.saved[index]:
                        movable_candidates.append(candidate)
                for candidate in self._choose_leaving(
                    movable_candidates, min(headroom.link - size, host), on_device
                ):
                    placement.saved[index].append(candidate)
                    placement.leaving[candidate.name] = (
                        placement.leaving.get(candidate.name, 0.0) + candidate.bytes
                    )
                    sizes[index] += candidate.bytes
                    host -= candidate.bytes
        all_candidates = itertools.chain.from_iterable(self.candidates.values())
        for candidate in sorted(
            all_candidates, key=lambda candidate: (-candidate.flops_per_byte, -candidate.index)
        ):
            if candidate in placement.saved[candidate.index]:
                continue
            if placement.on_device + candidate.bytes <= headroom.device:
                placement.saved[candidate.index].append(candidate)
                placement.staying[candidate.index].add(candidate.name)
                placement.on_device += candidate.bytes
        return placement

    def _choose_leaving(
        self, candidates: list[Candidate], headroom: float, price: float
    ) -> list[Candidate]:
        """Return the tensors of one layer that are copied to the host: those that spare the most
        FLOPs within `headroom` bytes.

        Args:
            candidates: tensors of the layer that may be copied to the host.
            headroom: bytes that may be copied.
            price: FLOPs that a byte of the device spares if another tensor takes it. A candidate
                counts with at most this many FLOPs for each byte, because the device could also
                store the candidate at this price.
        """
        if len(candidates) > MAX_COMBINED_TENSORS:
            choice = []
            for candidate in sorted(
                candidates,
                key=lambda candidate: (-min(candidate.flops_per_byte, price), -candidate.bytes),
            ):
                if candidate.bytes <= headroom:
                    choice.append(candidate)
                    headroom -= candidate.bytes
            return choice
        key = (
            *((candidate.bytes, candidate.flops_per_byte) for candidate in candidates),
            headroom,
            price,
        )
        if key not in self._sets:
            self._sets[key] = _best_set(candidates, headroom, price)
        return [candidates[number] for number in self._sets[key]]


def _best_set(candidates: Sequence[Candidate], headroom: float, price: float) -> tuple[int, ...]:
    """Return the indices in `candidates` of the set of tensors that spares the most FLOPs within
    `headroom` bytes, by trying all sets.

    Args:
        candidates: a few tensors of one layer.
        headroom: bytes that may be copied to the host.
        price: FLOPs that a byte of the device spares if another tensor takes it. A candidate
            counts with at most this many FLOPs for each byte, because the device could also
            store the candidate at this price.
    """
    best: tuple[int, ...] = ()
    max_value = 0.0
    for count in range(1, len(candidates) + 1):
        for numbers in itertools.combinations(range(len(candidates)), count):
            size = value = 0.0
            for number in numbers:
                candidate = candidates[number]
                size += candidate.bytes
                value += candidate.bytes * min(candidate.flops_per_byte, price)
            if size <= headroom and value > max_value:
                best = numbers
                max_value = value
    return best


def _use_rest_of_device(placement: Placement, inputs: Mapping[int, float], headroom: float) -> None:
    """Change the place of tensors from the host to the device while the device has room, from the
    last layer to the first.

    Args:
        placement: the choice, changed in place.
        inputs: bytes of each layer's input, by the layer's index.
        headroom: bytes of the device for saved tensors.
    """
    for index in sorted(inputs, reverse=True):
        sizes = {INPUT_NAME: inputs[index]}
        for candidate in placement.saved[index]:
            sizes[candidate.name] = candidate.bytes
        for name, size in sizes.items():
            if name in placement.staying[index]:
                continue
            if placement.on_device + size > headroom:
                return
            placement.staying[index].add(name)
            placement.leaving[name] -= size
            placement.on_device += size
