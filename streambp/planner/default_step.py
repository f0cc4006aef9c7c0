"""Predict a step of `patch` without settings, for a plan. The policy (`SavesPolicy`) chooses chunk
size and saved tensors as in real steps, from counted instead of measured numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from streambp.model import unpatched
from streambp.model.record import (
    OUTCOME_KEPT_GRAPH,
    OUTCOME_STREAMED,
    OUTCOME_UNPATCHED,
    SavedTensors,
)
from streambp.offload.costs import GRAPH, Candidate, SavesChoice, StepFigures
from streambp.offload.host_choice import HostChoice, MovingStep
from streambp.offload.manager import OffloadManager
from streambp.offload.policy import SavesPolicy
from streambp.planner.auto import StepNeed, host_figures, last_unfinished_layer, seconds_of
from streambp.planner.layer_costs import PLAN_DEVICE, costs_from_json
from streambp.planner.profile import Profile, Setting, bytes_between_steps, peak
from streambp.planner.seconds import seconds
from streambp.planner.survey import STREAMED_RECIPES as METHODS
from streambp.planner.survey import UNPATCHED_RECIPE, streamed_recipe
from streambp.rates import Rates


@dataclasses.dataclass(frozen=True)
class DefaultStep:
    """Prediction for a step of `patch(model)`, which uses the default `StreamConfig()`.

    Attributes:
        way: "streamed" (chunk by chunk), "kept its graph" (one chunk, no recomputation) or "ran
            unpatched".
        chunk_size: positions of a chunk in each row.
        fits: True if the step would fit in memory with layers that save only their inputs.
        saved: tensors that layers save in addition to their inputs. Each entry has the name of a
            kind of tensor, such as "kv" (keys and values), the number of layers with this tensor,
            and the bytes.
        peak: peak memory of the device in bytes, weights and optimizer state included.
        seconds: seconds of the step.
        leaving: bytes of layer inputs and saved tensors that are moved to the host.
        on_device: bytes of inputs and saved tensors that stay on the device; 0 if nothing is moved
            to the host.
    """

    way: str
    chunk_size: int
    fits: bool
    saved: tuple[SavedTensors, ...]
    peak: float
    seconds: float
    leaving: float = 0.0
    on_device: float = 0.0


def predict_default_step(
    profile: Profile,
    seq_len: int,
    usable: float,
    setting: Setting,
    rates: Rates,
    host: float = 0.0,
) -> DefaultStep | None:
    """Return the prediction for a training step of `patch(model)` without settings, with rows of
    `seq_len` positions. The first steps of a training are slower than predicted, because they pin
    host memory. [Note: host by seconds]

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        seq_len: positions of a row.
        usable: bytes of the device that a program can use.
        setting: the training setting, such as optimizer and number of GPUs.
        rates: the device's speeds (FLOP/s, bytes/s).
        host: bytes of host memory for saved tensors; 0: no tensor is moved to the host.

    Returns:
        None if nothing can be predicted: sequences are sharded, ZeRO-3 is used, or the costs of the
            layers could not be counted.
    """
    if profile.saves is None or setting.split or setting.zero >= 3:
        return None
    setting = dataclasses.replace(setting, on_host=None)  # by default weights stay on the device
    method = profile.method(METHODS[0].name)
    rows = profile.batch_size
    between_steps = bytes_between_steps(profile, setting)
    present = 1.0 if setting.accumulate else 0.0
    free = (
        usable - between_steps.weights - between_steps.optimizer - present * between_steps.gradients
    )
    spent_by = seconds_of(method, rates, rows)
    figures = StepFigures(
        StepNeed(method, rows=rows),
        costs_from_json(profile.saves),
        spent_by,
        rates.products,
        rates.link,
    )
    on_host = _host_choice(profile, figures, rates, host)
    policy = SavesPolicy(
        profile.layers, lambda _: free, lambda _: (figures, present), True, True, host=on_host
    )
    policy.begin_forward(PLAN_DEVICE)
    tokens = rows * seq_len
    size = policy.size(rows, seq_len, PLAN_DEVICE)
    if size >= seq_len and profile.saves["plain"]:  # [Note: micro-batches as unpatched]
        heads = [0] * profile.layers  # fused attention kernels save no scores
        kept_plain = unpatched.unpatched_saved_bytes(
            policy, tokens, seq_len, PLAN_DEVICE, heads, profile.saves["vocabulary"]
        )
        plain = next(
            (method for method in profile.methods if method.name == UNPATCHED_RECIPE.name), None
        )
        if (
            kept_plain is not None
            and kept_plain.bytes <= unpatched.MAX_SHARE_OF_FREE_MEMORY * kept_plain.headroom
            and plain is not None
        ):
            unpatched_seconds = seconds(plain, seq_len, seq_len, rates)
            unpatched_peak = peak(profile, plain, seq_len, seq_len, setting)
            return DefaultStep(
                OUTCOME_UNPATCHED, size, True, (), unpatched_peak.total, unpatched_seconds.total
            )
    if policy.moving is not None:
        return _moving_step(policy.moving, rows, usable)
    fits, plan, spent = policy.predict({PLAN_DEVICE: free}, tokens, rows * size, seq_len)
    choice = SavesChoice(tokens, seq_len, size, free, plan)
    saved = tuple(
        SavedTensors(name, choice.layers[name], count) for name, count in choice.bytes.items()
    )
    if choice.layers.get(GRAPH) == profile.layers:
        way = OUTCOME_KEPT_GRAPH
    else:
        way = OUTCOME_STREAMED
    phases = peak(profile, method, seq_len, size, setting).phases
    return DefaultStep(way, size, fits, saved, _peak_with_saves(phases, plan), spent)


def _peak_with_saves(phases: Mapping[str, float], plan: Mapping[int, list[Candidate]]) -> float:
    """Return the peak memory of a step in bytes, tensors saved for backward included: the maximum
    over the phases of the step, such as the backward of each layer.

    Args:
        phases: dict from a phase's name, such as "backward 35", to bytes on the device without
            saved tensors.
        plan: dict from a layer's index to the tensors that the layer saves.
    """
    largest = 0.0
    for name, total in phases.items():
        for index, candidates in plan.items():
            if index <= last_unfinished_layer(name):
                total += sum(candidate.bytes for candidate in candidates)
        largest = max(largest, total)
    return largest


def _host_choice(
    profile: Profile, figures: StepFigures, rates: Rates, host: float
) -> HostChoice | None:
    """Return the object that decides if a predicted step moves saved tensors to host memory. None
    if `host` is 0, or if the profile has no step that moves tensors to the host.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        figures: predictions about the model's steps. The function sets its attribute `on_host`, the
            predictions for steps that move tensors.
        rates: the device's speeds (FLOP/s, bytes/s).
        host: bytes of host memory for saved tensors.
    """
    name = streamed_recipe((), "cpu").name
    offload_methods = [method for method in profile.methods if method.name == name]
    if not offload_methods or host <= 0:
        return None
    rows = profile.batch_size
    on_host = host_figures(StepNeed(offload_methods[0], rows=rows), rates, rows)
    figures.on_host = lambda: on_host
    return HostChoice(_HostMemory(host, profile.layers), price=0.0)


class _HostMemory(OffloadManager):
    """Offload manager for a predicted step, which is not run: its free host memory is a given
    number of bytes, and not what this machine has free.

    Args:
        headroom: bytes of host memory for saved tensors.
        layers: number of layers of the model.
    """

    def __init__(self, headroom: float, layers: int) -> None:
        super().__init__(None, "keep", layers, on_demand=True)
        self.headroom = headroom

    def host_room(self) -> float:
        """Return the bytes of host memory for saved tensors."""
        return self.headroom


def _moving_step(step: MovingStep, rows: int, usable: float) -> DefaultStep:
    """Return the prediction for a step that moves saved tensors to the host.

    Args:
        step: the prediction of `SavesPolicy`, which chooses chunk size and saved tensors, for a
            step of all rows.
        rows: rows of the batch.
        usable: bytes of the device that a program can use.
    """
    shape = step.shape
    choice = SavesChoice(*shape, step.headroom, step.placement.saved)
    saved = tuple(
        SavedTensors(name, choice.layers[name], count) for name, count in choice.bytes.items()
    )
    on_device = step.placement.on_device
    used_bytes = usable - step.free_bytes + step.copies + on_device
    size = max(1, shape.chunk // rows)
    return DefaultStep(
        OUTCOME_STREAMED, size, True, saved, used_bytes, step.seconds, step.leaving, on_device
    )
