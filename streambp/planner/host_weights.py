"""Predict bytes and seconds of a step with weights of a model's first layers in host memory
(`StreamConfig.weights`), and how many layers must move.

Each layer's weights are copied to the device once in each direction, one layer ahead of the
computation. The device therefore holds two layers, plus one layer's decoded weights if the weights
have 4 bits. The seconds of a phase are the larger of its kernels' seconds and its copies' seconds.
All layers count as equally slow. The first layer of a step, whose copy overlaps with nothing, is
not counted.

Gradients of trained layers move to the host, where the optimizer stores its state for these layers.
The device holds the gradients of two layers: one in transfer and one being computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from streambp.planner.step import HEAD_BACKWARD
from streambp.planner.work import Work

WEIGHT_SLOTS = 2
# suffix of a phase's name, for the part with weights from the host
HOST_WEIGHTS_SUFFIX = ", weights from the host"
MAX_TOKENS = 2**24


@dataclasses.dataclass(frozen=True)
class HostLayers:
    """The first decoder layers of a model, whose weights are in host memory (weights="cpu"), and
    their bytes.

    Attributes:
        layers: number of layers in host memory.
        of: number of all layers.
        bytes: bytes of the weights of these layers.
        last: bytes of the last two of these layers, which are still on the device when backward
            begins.
        largest: bytes of the largest of these layers.
        decoded: bytes of one layer's 4-bit weights after dequantization, without the layer's
            largest weight. The peak of every step includes a dequantized copy of that weight
            already.
        trained: bytes of the trained weights among these weights; the gradients have as many bytes.
        part: `trained` divided by the bytes of all trained weights of the model.
    """

    layers: int
    of: int
    bytes: int
    last: int
    largest: int
    decoded: int = 0
    trained: int = 0
    part: float = 0.0

    @property
    def freed(self) -> int:
        """Return the device bytes that become free while the weights of these layers are in host
        memory. The planner decides by this number how many layers must move.

        The number is `bytes` minus device buffers for two layers and one layer's dequantized
        weights.
        """
        return self.bytes - WEIGHT_SLOTS * self.largest - self.decoded


def device_gradients(
    phases: Sequence[tuple[str, float]], on_host: HostLayers | None
) -> list[float]:
    """Return the bytes of gradients on the device in each phase of a step, if gradients of some
    layers move to the host. A phase is the forward or backward of a layer, for example.

    Args:
        phases: (name, bytes of gradients) of each phase of the step, in order. A name is "backward
            35", for example, for layer 35's backward.
        on_host: the first layers of the model, whose weights are in host memory and whose gradients
            move there; None: no layer.
    """
    if on_host is None or not on_host.part:
        return [gradients for _, gradients in phases]
    of_head = next((gradients for name, gradients in phases if name == HEAD_BACKWARD), 0.0)
    bytes_here = []
    for _, gradients in phases:  # order of gradients: head, layers, embeddings
        other_gradients = min(gradients, max(of_head, gradients - on_host.trained))
        bytes_here.append(
            other_gradients + min(gradients - other_gradients, WEIGHT_SLOTS * on_host.largest)
        )
    return bytes_here


def first_layers(sizes: Sequence[int], layers: int, decoded: int = 0) -> HostLayers:
    """Return the `HostLayers` record for a model whose first `layers` layers have their weights in
    host memory. The record's `trained` and `part` are 0.

    Args:
        sizes: bytes of the weights of every layer of the model.
        layers: number of layers in host memory.
        decoded: bytes of one layer's dequantized 4-bit weights, as in `HostLayers.decoded`.
    """
    host_sizes = sizes[:layers]
    return HostLayers(
        layers,
        len(sizes),
        sum(host_sizes),
        sum(host_sizes[-WEIGHT_SLOTS:]),
        max(host_sizes, default=0),
        decoded,
    )


def fewest_layers(sizes: Sequence[int], lacking: float, decoded: int = 0) -> HostLayers:
    """Return the `HostLayers` record for the smallest number of first layers whose move to host
    memory frees `lacking` bytes on the device. The record has all layers if no number suffices.

    Args:
        sizes: bytes of the weights of every layer of the model.
        lacking: bytes to free.
        decoded: bytes of one layer's dequantized 4-bit weights, as in `HostLayers.decoded`.
    """
    total = 0
    largest = 0
    for number, size in enumerate(sizes[:-1], 1):
        total += size
        largest = max(largest, size)
        if total - WEIGHT_SLOTS * largest - decoded >= lacking:
            return first_layers(sizes, number, decoded)
    return first_layers(sizes, len(sizes), decoded)


def add_copies(step: Mapping[str, Work], on_host: HostLayers | None) -> dict[str, Work]:
    """Add the copies of weights and gradients between host and device to the costs of a step.
    Return the costs (`Work`) by kind of phase ("forward" of all layers, for example). Layers whose
    weights are in host memory get entries of their own ("forward, weights from the host", for
    example).

    Weights are copied to the device in forward and in backward, gradients to the host in backward.
    The last two of these layers are still on the device when backward begins, so their weights are
    copied once.

    Args:
        step: the costs (FLOPs, bytes, dispatches) by kind of phase, such as "forward" of all
            layers.
        on_host: the first layers of the model, whose weights are in host memory; None: no layer.
    """
    costs = dict(step)
    if on_host is None:
        return costs
    copies = (
        ("forward", on_host.bytes, 0),
        ("backward", on_host.bytes - on_host.last, on_host.trained),
    )
    for name, to_device, out in copies:
        part = on_host.layers / on_host.of
        costs[name] = Work().plus(step[name], 1 - part)
        host_work = Work().plus(step[name], part)
        costs[name + HOST_WEIGHTS_SUFFIX] = host_work._replace(
            from_host=host_work.from_host + to_device, to_host=host_work.to_host + out
        )
    return costs
