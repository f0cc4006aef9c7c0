"""What `patch` without settings does at a plan's length: the policy that a step asks, with counts in place of a device."""

from __future__ import annotations

import dataclasses

from streambp.model import unpatched
from streambp.model.record import KEPT_GRAPH, STREAMED, UNPATCHED, Saved
from streambp.offload.costs import GRAPH, Chosen, Known
from streambp.offload.policy import SavesPolicy
from streambp.planner.auto import Law, seconds_of, waiting
from streambp.planner.layer_costs import HERE, costs_from_json
from streambp.planner.profile import Method, Profile, Setting, peak, static
from streambp.planner.seconds import seconds
from streambp.planner.survey import PLAIN
from streambp.planner.survey import STREAMED as METHODS
from streambp.rates import Rates


@dataclasses.dataclass(frozen=True)
class ByDefault:
    """A step under `StreamConfig()`.

    way, saved: as in `StepRecord`. chunk_size: positions a row. fits: a step without saves does. peak: bytes on the device.
    """

    way: str
    chunk_size: int
    fits: bool
    saved: tuple[Saved, ...]
    peak: float
    seconds: float


def by_default(profile: Profile, seq_len: int, usable: float, setting: Setting, rates: Rates) -> ByDefault | None:
    """The choice of saves="auto" for the profile's rows of `seq_len` positions.

    Args:
        usable: bytes of the device that a program may take.

    Returns:
        None where the choice goes by other rules, or is not known: shared sequences, ZeRO-3, layers that are not seen
        without data.
    """
    if profile.saves is None or setting.split or setting.zero >= 3:
        return None
    setting = dataclasses.replace(setting, on_host=None)  # weights stay on the device unless a program asks otherwise
    method, rows, kept = profile.method(METHODS[0].name), profile.batch_size, static(profile, setting)
    present = 1.0 if setting.accumulate else 0.0
    free = usable - kept.weights - kept.optimizer - present * kept.gradients
    pace = seconds_of(method, rates)
    known = Known(
        Law(method, rows=rows),
        costs_from_json(profile.saves),
        lambda tokens, chunk: pace(tokens // rows, max(1, chunk // rows)),
        rates.products,
        rates.link,
    )
    policy = SavesPolicy(profile.layers, lambda _: free, lambda _: (known, present), True, True)
    policy.begins(HERE)
    tokens, size = rows * seq_len, policy.size(rows, seq_len, HERE)
    plain = _unpatched(profile, policy, seq_len, size)
    if plain is not None:
        took, most = seconds(plain, seq_len, seq_len, rates), peak(profile, plain, seq_len, seq_len, setting)
        return ByDefault(UNPATCHED, size, True, (), most.total, took.total)
    fits, plan, spent = policy.predicted(free, tokens, rows * size, HERE, seq_len)
    chosen = Chosen(tokens, seq_len, size, free, plan)
    saved = tuple(Saved(name, chosen.layers[name], count) for name, count in chosen.bytes.items())
    way = KEPT_GRAPH if chosen.layers.get(GRAPH) == profile.layers else STREAMED
    phases = peak(profile, method, seq_len, size, setting).phases
    most_saved = max(
        total + sum(one.bytes for index, found in plan.items() if index <= waiting(name) for one in found)
        for name, total in phases.items()
    )
    return ByDefault(way, size, fits, saved, most_saved, spent)


def _unpatched(profile: Profile, policy: SavesPolicy, seq_len: int, size: int) -> Method | None:
    """The unpatched method, where a micro-batch runs as that. [Note: micro-batches as unpatched]"""
    saves = profile.saves
    assert saves is not None
    if size < seq_len or not saves["plain"]:
        return None
    heads = [0] * profile.layers  # fused kernels attend
    kept = unpatched.kept_unpatched(policy, profile.batch_size * seq_len, seq_len, HERE, heads, saves["vocabulary"])
    if kept is None or kept.bytes > unpatched.SHARE * kept.room:
        return None
    return next((method for method in profile.methods if method.name == PLAIN.name), None)
