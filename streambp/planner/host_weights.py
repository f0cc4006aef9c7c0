"""Weights of a model's first layers on the host (`StreamConfig.weights`): bytes, seconds, and how many layers.

Each layer's come to the device once in each direction, one copy ahead of the layer at work. So the device holds two layers
in place of them, with one layer's decoded weights where these have 4 bits, and a phase takes as long as its kernels or as
the copies of its layers, whichever is longer. The law has all layers compute as long as each other; the first layer of a
step, which nothing hides, is not counted.

Gradients of layers that train leave for the host, where the optimizer then has its state for them. The device holds those
of two layers, one that leaves and one that is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from streambp.planner.step import HEAD_BACKWARD
from streambp.planner.work import Work

SLOTS = 2
MOVED = ", weights from the host"  # behind the name of a phase: the part of it whose layers' weights come
MOST_TOKENS = 2**24


@dataclasses.dataclass(frozen=True)
class OnHost:
    """The first `layers` of `of` layers: bytes of their weights on the host, of the last two of them, and of the
    largest; decoded: of one layer's 4-bit weights once they are decoded, without the largest, which any step counts.
    trained: bytes of those that train; their gradients take as many. part: of the bytes of all weights that train."""

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
        """Bytes of the device: without the weights, with the two layers that are there at a time."""
        return self.bytes - SLOTS * self.largest - self.decoded


def gradients_here(phases: Sequence[tuple[str, float]], on_host: OnHost | None) -> list[float]:
    """Of the gradients that phases find and make, by their names and in order, the bytes that are on the device."""
    if on_host is None or not on_host.part:
        return [gradients for _, gradients in phases]
    of_head = next((gradients for name, gradients in phases if name == HEAD_BACKWARD), 0.0)
    here = []
    for _, gradients in phases:  # the head's came first, the layers' next, the embeddings' last
        others = min(gradients, max(of_head, gradients - on_host.trained))
        here.append(others + min(gradients - others, SLOTS * on_host.largest))
    return here


def first(sizes: Sequence[int], layers: int, decoded: int = 0) -> OnHost:
    """The first `layers` of layers whose weights have these sizes [bytes]."""
    found = sizes[:layers]
    return OnHost(layers, len(sizes), sum(found), sum(found[-SLOTS:]), max(found, default=0), decoded)


def fewest(sizes: Sequence[int], lacking: float, decoded: int = 0) -> OnHost:
    """As few of the first layers as leave the device `lacking` bytes more; all of them where no number does."""
    tried = (first(sizes, number, decoded) for number in range(1, len(sizes)))
    return next((on_host for on_host in tried if on_host.freed >= lacking), first(sizes, len(sizes), decoded))


def with_copies(step: Mapping[str, Work], on_host: OnHost | None) -> dict[str, Work]:
    """A step's work by kind of phase, that of layers whose weights come from the host apart. Backward begins with the last
    two that are there still."""
    found = dict(step)
    if on_host is None:
        return found
    copies = ("forward", on_host.bytes, 0), ("backward", on_host.bytes - on_host.last, on_host.trained)
    for name, back, out in copies:
        part = on_host.layers / on_host.of
        found[name] = Work().plus(step[name], 1 - part)
        moved = Work().plus(step[name], part)
        found[name + MOVED] = moved._replace(back=moved.back + back, out=moved.out + out)
    return found
