"""Extend the phases of a few layers at a few lengths to the full model at any length.

A phase is the forward or backward of one layer, of the head or of the embedding. The peak of a
phase is the live bytes before the phase plus the bytes that the phase adds. Layers of one kind,
which have the same structure, add the same bytes and leave the same bytes behind. The counted
layers therefore determine the phases of all layers (DESIGN.md section 6: "affine in T and linear in
layers").
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from streambp.planner.laws import Point, fit_bytes
from streambp.planner.profile import Phase
from streambp.planner.skeleton import ShrunkModel
from streambp.planner.step import Span
from streambp.planner.work import Work


@dataclasses.dataclass(frozen=True)
class PhaseMemory:
    """Memory of one phase of a training step, for one row length and one chunk size. A phase is the
    forward or backward of one layer, of the head or of the embedding. `fit` computes functions of
    row length and chunk size from several of these records.

    Attributes:
        name: the phase's name, such as "backward 35".
        start: bytes in use at its start.
        peak: bytes in use at its peak.
        gradients: bytes in all `.grad` at its start.
        max_other_bytes: dict from bytes of other ranks' attention keys and values to the most bytes
            of everything else in use at the same time; {} unless ranks share sequences.
        per_key: bytes for each unit of `profile.held_keys`, the amount of other ranks' keys and
            values on this rank. The memory of the phase is `peak` + `per_key` * amount. 0 unless
            ranks share sequences. `splits.lines_of_keys` computes `peak` and `per_key` from
            `max_other_bytes`.
    """

    name: str
    start: float
    peak: float
    gradients: float
    max_other_bytes: Mapping[float, float] = dataclasses.field(default_factory=dict)
    per_key: float = 0.0


def unroll(
    spans: Sequence[Span], shrunk_model: ShrunkModel
) -> tuple[list[PhaseMemory], float, dict[str, Work], tuple[float, ...]]:
    """Return the memory and costs of a full model's training step, computed from a step of the same
    model with only a few layers. The step of the few layers ran on tensors without data. Each of
    these layers represents all layers with the same structure.

    Args:
        spans: phases of the step of the few layers, in order: the forward of a layer, for example.
        shrunk_model: the layers that ran, and for each layer of the full model the layer that
            represents it.

    Returns:
        Four values for the full model. First is the memory of each phase, in order. Second is the
            bytes of host memory that the step uses. Third is a dict from kind of phase, such as
            "forward" of all layers, to FLOPs and traffic (`Work`). Last are the bytes exchanged
            between ranks, in the order of `SplitCount.links`.
    """
    depth = len(shrunk_model.kinds)
    forward = {}
    for span in spans:
        if span.name == "forward":
            forward[span.layer] = span
    backward = {}
    for span in spans:
        if span.name == "backward":
            backward[span.layer] = span
    order: list[tuple[str, Span]] = []
    for span in spans:
        if span.layer is None:
            order.append((span.name, span))
        elif span.layer == 0 and span.name == "forward":
            for index in range(depth):
                order.append((f"forward {index}", forward[shrunk_model.representative(index)]))
        elif span.layer == len(shrunk_model.layer_indices) - 1 and span.name == "backward":
            down = []
            for index in reversed(range(depth)):
                if shrunk_model.representative(index) in backward:
                    down.append(index)
            order += [
                (f"backward {index}", backward[shrunk_model.representative(index)])
                for index in down
            ]
    at_start = {}
    for last, span in itertools.pairwise(spans):
        at_start[id(span)] = (last.gradients, last.host)
    live = gradients = host = 0.0
    counted = []
    for name, span in order:
        peaks_by_keys = {}
        for keys, other_bytes in span.max_other_bytes.items():
            peaks_by_keys[keys] = live + other_bytes - span.start
        counted.append(
            PhaseMemory(name, live, live + span.peak - span.start, gradients, peaks_by_keys)
        )
        gradients_before, host_before = at_start.get(id(span), (0, 0))
        live += span.end - span.start
        gradients += span.gradients - gradients_before
        host += span.host - host_before
    work: dict[str, Work] = {}
    for name, span in order:
        if span.layer is None:
            kind = name
        else:
            kind = span.name
        work[kind] = work.get(kind, Work()).plus(span.work)
    links = tuple(map(sum, zip(*(span.links for _, span in order), strict=True)))
    return counted, host, work, links


def fit(
    points: Sequence[Point],
    phases: Sequence[Sequence[PhaseMemory]],
    shrunk_model: ShrunkModel,
    adds_biases: bool = False,
) -> tuple[Phase, ...]:
    """Return the memory of each phase of a step as a linear function of T (a row's tokens), C (a
    chunk's tokens) and the number of chunks. The functions are fitted through the memory of steps
    with several (T, C), which ran on tensors without data.

    Layers with the same structure have one kind. Only phases of the first and the last layer of
    each kind are in the result, because all layers between need no more memory than one of the two.
    A phase may be in the result twice: with the function of its peak, and with the function of its
    start. The latter may be larger in long rows or large chunks, and the larger value counts.

    Args:
        points: (T, C) of each of these steps: tokens of a row, and tokens of a chunk.
        phases: the phases of each of these steps, in order. A phase is the forward or backward of a
            layer, of the head or of the embedding.
        shrunk_model: has the kind of each layer of the full model.
        adds_biases: True for models whose attention adds T5's bias, so that bytes also grow with
            T^2 or T C.
    """
    fitted = []
    counted_peaks = []
    counted_starts = []
    for at_point in phases:
        counted_peaks.append([phase.peak for phase in at_point])
        counted_starts.append([phase.start for phase in at_point])
    peaks = fit_bytes(points, counted_peaks, adds_biases)
    starts = fit_bytes(points, counted_starts, adds_biases)
    for counted, peak, start in zip(phases[0], peaks, starts, strict=True):
        fitted.append(Phase(counted.name, peak._replace(keys=counted.per_key), counted.gradients))
        # In long rows or large chunks, the start may exceed the peak.
        grows = start.tokens > peak.tokens or start.square > peak.square
        if grows or start.tokens_chunk > peak.tokens_chunk:
            fitted.append(Phase(counted.name, start, counted.gradients))
    ends: dict[int, tuple[int, int]] = {}
    for index, kind in enumerate(shrunk_model.kinds):
        ends[kind] = (ends.get(kind, (index, index))[0], index)
    end_layers = {0, len(shrunk_model.kinds) - 1}.union(*ends.values())
    selected = []
    for phase in fitted:
        layer = phase.name.split()[-1]
        if not layer.isdigit() or int(layer) in end_layers:
            selected.append(phase)
    return tuple(selected)
