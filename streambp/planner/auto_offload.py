"""Predict a step of `offload="auto"`, which saves tensors on the host and on the device, for a
plan.

The choice of tensors for host and device is a real step's, with counted numbers in place of
measured numbers. [Note: two rooms]
"""

from __future__ import annotations

import dataclasses
import math

from streambp.model.record import SavedTensors
from streambp.offload.costs import SavesChoice
from streambp.offload.host_choice import MicroBatchShape, StepSpeeds, predicted_move
from streambp.planner.layer_costs import costs_from_json
from streambp.planner.profile import Method, Profile, Setting, peak, work
from streambp.planner.seconds import kernels, seconds
from streambp.planner.survey import streamed_recipe
from streambp.rates import Rates


@dataclasses.dataclass(frozen=True)
class AutoOffloadStep:
    """Predicted training step with `StreamConfig(chunk_size, offload="auto")`, which saves tensors
    for backward on the device and in host memory. The first steps of a training differ: they save
    only layer inputs, and measure the device.

    Attributes:
        chunk_size: positions of a chunk in each row.
        fits: True if a step whose layers save only their inputs fits on the device, and `leaving`
            fits in host memory.
        saved: tensors that layers save in addition to their inputs. Each entry has the name of a
            kind of tensor, such as "kv" (keys and values), the number of layers with this tensor,
            and the bytes.
        leaving: bytes of saved tensors and inputs that are copied to the host.
        on_device: bytes of saved tensors and inputs that stay on the device until backward.
        peak: peak memory of the device in bytes, weights and optimizer state included.
        seconds: seconds of the step.
    """

    chunk_size: int
    fits: bool
    saved: tuple[SavedTensors, ...]
    leaving: float
    on_device: float
    peak: float
    seconds: float


def predict_auto_offload(
    profile: Profile,
    seq_len: int,
    sizes: tuple[int, ...],
    memory: tuple[float, float | None],
    setting: Setting,
    rates: Rates,
) -> AutoOffloadStep | None:
    """Return the prediction for the fastest step of `offload="auto"` that fits in memory, over
    several chunk sizes. If no step fits, return the prediction with the lowest peak memory.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        seq_len: positions of a row.
        sizes: chunk sizes to try, in positions of each row.
        memory: usable bytes of the device, and bytes of host memory (None: no limit).
        setting: the training setting, such as optimizer and number of GPUs.
        rates: the device's speeds (FLOP/s, bytes/s).

    Returns:
        None if nothing can be predicted, because sequences are sharded, ZeRO-3 is used, or the
            costs of the layers could not be counted.
    """
    name = streamed_recipe((), "cpu").name
    counted = [method for method in profile.methods if method.name == name]
    if profile.saves is None or setting.split or setting.zero >= 3 or not counted:
        return None
    setting = dataclasses.replace(setting, on_host=None)
    candidates = []
    for size in dict.fromkeys(min(size, seq_len) for size in sizes):
        candidates.append(
            _predict_chunks(profile, counted[0], seq_len, size, memory, setting, rates)
        )
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return min(candidates, key=lambda candidate: candidate.peak)
    return min(fitting, key=lambda candidate: candidate.seconds)


def _predict_chunks(
    profile: Profile,
    method: Method,
    seq_len: int,
    size: int,
    memory: tuple[float, float | None],
    setting: Setting,
    rates: Rates,
) -> AutoOffloadStep:
    """Return the prediction for a step of `offload="auto"` in chunks of `size` positions.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        method: memory and FLOPs, counted on tensors without data, of a step that moves all layers'
            inputs to the host and saves nothing else.
        seq_len: positions of a row.
        size: positions of a chunk.
        memory: usable bytes of the device, and bytes of host memory (None: no limit).
        setting: the training setting, such as optimizer and number of GPUs.
        rates: the device's speeds (FLOP/s, bytes/s).
    """
    usable, host = memory
    at = peak(profile, method, seq_len, size, setting)
    host_room = math.inf if host is None else host
    tokens = profile.batch_size * seq_len
    parts = work(method, seq_len, size, setting)
    spent = seconds(method, seq_len, size, rates, setting)
    forward = sum(kernels(parts["forward"], rates))
    backward = spent.phases["backward"]
    pace = StepSpeeds(forward, backward, spent.total, rates.products, rates.forward, rates.link)
    shape = MicroBatchShape(tokens, seq_len, profile.batch_size * size)
    step = predicted_move(
        costs_from_json(profile.saves or {}), shape, usable - at.total, host_room, pace
    )
    placement = step.placement
    choice = SavesChoice(tokens, seq_len, size, step.headroom, placement.saved)
    saved = tuple(
        SavedTensors(name, choice.layers[name], count) for name, count in choice.bytes.items()
    )
    used_bytes = at.total + step.copies + placement.on_device
    return AutoOffloadStep(
        size, step.fits, saved, step.leaving, placement.on_device, used_bytes, step.seconds
    )
