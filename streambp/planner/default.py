"""Predict a step of `patch` without settings, for a plan. The policy of real steps chooses saves
and chunk size, with counted numbers instead of a device's."""

from __future__ import annotations

import dataclasses

from streambp.model import unpatched
from streambp.model.record import KEPT_GRAPH, STREAMED, UNPATCHED, Saved
from streambp.offload.costs import GRAPH, Chosen, Figures
from streambp.offload.policy import SavesPolicy
from streambp.planner.auto import StepNeed, seconds_of, waiting
from streambp.planner.layer_costs import PLAN_DEVICE, costs_from_json
from streambp.planner.profile import Profile, Setting, peak, static
from streambp.planner.seconds import seconds
from streambp.planner.survey import STREAMED as METHODS
from streambp.planner.survey import UNPATCHED_RECIPE
from streambp.rates import Rates


@dataclasses.dataclass(frozen=True)
class ByDefault:
    """Prediction for a step of `patch(model)`, which uses the default `StreamConfig()`.

    Attributes:
        way: "streamed", "kept its graph" or "ran unpatched", as in `StepRecord`.
        chunk_size: positions of a chunk in each row.
        fits: True if the step would fit in memory with layers that save only their inputs.
        saved: kinds of tensors that layers save in addition to their inputs.
        peak: bytes on the device.
        seconds: seconds of the step.
    """

    way: str
    chunk_size: int
    fits: bool
    saved: tuple[Saved, ...]
    peak: float
    seconds: float


def by_default(
    profile: Profile, seq_len: int, usable: float, setting: Setting, rates: Rates
) -> ByDefault | None:
    """Return the prediction for a step of `patch(model)` without settings, for rows of `seq_len`
    positions.

    Args:
        profile: the model's counted costs.
        seq_len: positions of a row.
        usable: bytes of the device that a program can use.
        setting: the training setting.
        rates: the device's speeds (FLOP/s, bytes/s).

    Returns:
        None if nothing can be predicted: sequences are sharded, ZeRO-3 is used, or the costs of the
            layers could not be counted.
    """
    if profile.saves is None or setting.split or setting.zero >= 3:
        return None
    setting = dataclasses.replace(setting, on_host=None)  # by default weights stay on the device
    method = profile.method(METHODS[0].name)
    rows = profile.batch_size
    between_steps = static(profile, setting)
    present = 1.0 if setting.accumulate else 0.0
    free = (
        usable - between_steps.weights - between_steps.optimizer - present * between_steps.gradients
    )
    spent_by = seconds_of(method, rates, rows)
    figures = Figures(
        StepNeed(method, rows=rows),
        costs_from_json(profile.saves),
        spent_by,
        rates.products,
        rates.link,
    )
    policy = SavesPolicy(profile.layers, lambda _: free, lambda _: (figures, present), True, True)
    policy.begins(PLAN_DEVICE)
    tokens = rows * seq_len
    size = policy.size(rows, seq_len, PLAN_DEVICE)
    if size >= seq_len and profile.saves["plain"]:  # [Note: micro-batches as unpatched]
        heads = [0] * profile.layers  # fused attention kernels save no scores
        kept_plain = unpatched.kept_unpatched(
            policy, tokens, seq_len, PLAN_DEVICE, heads, profile.saves["vocabulary"]
        )
        plain = next(
            (method for method in profile.methods if method.name == UNPATCHED_RECIPE.name), None
        )
        if (
            kept_plain is not None
            and kept_plain.bytes <= unpatched.MAX_SHARE_OF_FREE_MEMORY * kept_plain.room
            and plain is not None
        ):
            took = seconds(plain, seq_len, seq_len, rates)
            unpatched_peak = peak(profile, plain, seq_len, seq_len, setting)
            return ByDefault(UNPATCHED, size, True, (), unpatched_peak.total, took.total)
    fits, plan, spent = policy.predicted(free, tokens, rows * size, PLAN_DEVICE, seq_len)
    choice = Chosen(tokens, seq_len, size, free, plan)
    saved = tuple(Saved(name, choice.layers[name], count) for name, count in choice.bytes.items())
    if choice.layers.get(GRAPH) == profile.layers:
        way = KEPT_GRAPH
    else:
        way = STREAMED
    phases = peak(profile, method, seq_len, size, setting).phases
    most_saved = max(
        total
        + sum(
            candidate.bytes
            for index, candidates in plan.items()
            if index <= waiting(name)
            for candidate in candidates
        )
        for name, total in phases.items()
    )
    return ByDefault(way, size, fits, saved, most_saved, spent)
