"""Options of `streambp plan` that make a plan fit, or faster. Each option is planned before it is
proposed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from streambp.errors import StreamBPError
from streambp.planner.plan import SLOWER, Plan, plan_profile
from streambp.planner.profile import Profile, Setting, static

# Rank of proposed adapters, and bits of proposed frozen weights.
RANK = 16
BITS: Literal[4] = 4
MOST_GPUS = 8
OPTIMIZER_THERE = "the optimizer state on the host"
PLENTY = 2**50  # bytes of a device on which everything fits


class Training(NamedTuple):
    """The trained parameters: all of them, or LoRA adapters on a frozen, possibly quantised model.

    Attributes:
        lora: rank of the adapters; None: all parameters are trained.
        bits: bits of the frozen weights.
    """

    lora: int | None = None
    bits: Literal[4, 8, 16] = 16

    def __str__(self) -> str:
        if self.lora is None:
            return "full training"
        return f"LoRA of rank {self.lora}" + (
            f" on {self.bits}-bit weights" if self.bits < 16 else ""
        )

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of `streambp plan` that request this training, such as ("--lora",
        "16")."""
        given = ("--full",) if self.lora is None else ("--lora", str(self.lora))
        return (*given, *(("--bits", str(self.bits)) if self.bits < 16 else ()))

    def smaller(self) -> Iterator[Training]:
        """Yield ways of training that take less device memory, such as LoRA or 4-bit weights, the
        closest first."""
        rank = self.lora or RANK
        if self.lora is None:
            yield Training(rank)
        if self.bits > BITS:
            yield Training(rank, BITS)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change, such as LoRA or more GPUs, with which a plan fits into memory.

    Attributes:
        change: description.
        options: command-line options.
        plan: the plan with these options.
    """

    change: str
    options: tuple[str, ...]
    plan: Plan


def settings_of(given: Setting) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Generate `given` and variants of it on the same GPUs: layers' weights, optimizer state, or
    both in host memory. Each comes with the command-line options that request it."""
    places: list[tuple[tuple[str, ...], Setting]] = [((), given)]
    for place in ("auto", "cpu"):
        if place != given.weights and given.weights != "cpu":
            moved = dataclasses.replace(given, weights=place)  # type: ignore[arg-type]
            places.append((("--weights", place), moved))
    for options, setting in places:
        yield options, setting
        if given.optimizer and not given.optimizer_on_host:
            there = dataclasses.replace(setting, optimizer_on_host=True)
            yield ("--optimizer-on-host", *options), there


def seconds_of(plan: Plan) -> float:
    """Return the seconds of a plan's fastest step; infinity if none fits."""
    if plan.choice is None:
        return math.inf
    if plan.default_wins and plan.by_default is not None:
        return plan.by_default.seconds
    return plan.choice.seconds.total


def best_change(
    found: Plan,
    seq_len: int | Literal["max"],
    profile: Profile,
    training: Training | None,
) -> Remedy | None:
    """Return the fastest plan of a profile among the variants of a setting (`settings_of`), with
    the options that request it. None if none fits.

    Among plans at most 2 % slower than the fastest, the one with the fewest command-line options is
    returned.

    Args:
        found: the plan whose setting changes.
        seq_len: the requested length.
        profile: the model with the training.
        training: the training, if it differs from the plan's; None: the plan's own.
    """
    tried: list[Remedy] = []
    for options, setting in settings_of(found.setting):
        if training is None and not options:
            continue
        with contextlib.suppress(StreamBPError):  # ranks that cannot share the heads, for example
            plan = plan_profile(profile, seq_len, found.memory, setting, found.rates)
            if plan.choice is None:
                continue
            changes, options = _changed(training, options)
            if plan.choice.on_host is not None:
                changes.append("the layers' weights on the host")
            tried.append(Remedy(" and ".join(changes), options, plan))
    bar = (1 + SLOWER) * min((seconds_of(one.plan) for one in tried), default=0.0)
    near = []
    for one in tried:
        if seconds_of(one.plan) <= bar:
            near.append(one)
    return min(near, key=lambda one: len(one.options), default=None)


def _changed(
    training: Training | None, options: tuple[str, ...]
) -> tuple[list[str], tuple[str, ...]]:
    """Return what a remedy changes, as texts, and all command-line options of the remedy.

    Args:
        training: the training, if it differs from the plan's; None: the plan's own.
        options: the options of the setting.
    """
    changes = []
    if training is not None:
        changes.append(str(training))
        options = (*training.options, *options)
    if "--optimizer-on-host" in options:
        changes.append(OPTIMIZER_THERE)
    return changes, options


def remedies(
    found: Plan,
    seq_len: int | Literal["max"],
    training: Training,
    count: Callable[[Training], Profile],
) -> Iterator[Remedy]:
    """Generate changes that make a plan fit: on the same GPUs, on more GPUs, or with fewer tokens.

    The first change keeps the training. Smaller trainings follow, until one of them needs no
    weights in host memory.

    Args:
        found: the plan that does not fit.
        seq_len: the requested length.
        training: the requested training.
        count: returns the model's profile for a training; called only if necessary.
    """
    named = 0
    last = None
    same = best_change(found, seq_len, found.profile, None)
    if same is not None:
        named += 1
        yield same
    for how in training.smaller():
        if same is not None and on_device(same):
            break
        profile = profile_of(how, count)
        if profile is None:
            continue
        last = (profile, how)
        smaller = best_change(found, seq_len, profile, how)
        if smaller is not None:
            named += 1
            yield smaller
            if on_device(smaller):
                break
    for wider in _on_more_gpus(found, seq_len):
        named += 1
        yield wider
    shorter = _fewer_tokens(found, seq_len, found.profile, None)
    if shorter is None and not named and last is not None:
        shorter = _fewer_tokens(found, seq_len, *last)
    if shorter is not None:
        yield shorter


def _fewer_tokens(
    found: Plan,
    seq_len: int | Literal["max"],
    profile: Profile,
    training: Training | None,
) -> Remedy | None:
    """Return the plan of the longest sequence that is shorter than the requested one; None if none
    fits.
    """
    if seq_len == "max" and training is None:
        return None
    for options, setting in settings_of(found.setting):
        if training is None and options:
            break
        most = plan_profile(profile, "max", found.memory, setting, found.rates)
        if most.choice is None or (seq_len != "max" and most.seq_len >= seq_len):
            continue
        changes, options = _changed(training, options)
        changes.append(f"{most.seq_len:,} tokens at most")
        return Remedy(" and ".join(changes), (*options, "--seq-len", str(most.seq_len)), most)
    return None


def _on_more_gpus(found: Plan, seq_len: int | Literal["max"]) -> Iterator[Remedy]:
    """Generate the plan with the smallest number of GPUs that fits, up to `MOST_GPUS`."""
    given = found.setting
    gpus = given.gpus if given.gpus > 1 and given.zero < 3 else 2 * given.gpus
    while gpus <= max(MOST_GPUS, given.gpus):  # more GPUs leave less host memory to each
        host = found.memory.host
        if host is not None:
            host = host * given.gpus // gpus
        memory = dataclasses.replace(found.memory, host=host)
        for on_host in dict.fromkeys((given.optimizer_on_host, True)):
            setting = dataclasses.replace(given, gpus=gpus, zero=3, optimizer_on_host=on_host)
            plan = plan_profile(found.profile, seq_len, memory, setting, found.rates)
            if plan.choice is None:
                continue
            change = f"{gpus} GPUs with ZeRO-3"
            options: tuple[str, ...] = ("--gpus", str(gpus), "--zero", "3")
            if on_host and not given.optimizer_on_host:
                change += " and the optimizer state on the host"
                options += ("--optimizer-on-host",)
            yield Remedy(change, options, plan)
            return
        gpus *= 2


def _least_seconds(found: Plan) -> float:
    """Return the least seconds of a plan's step on devices with more memory.

    The default's seconds may grow with the memory: where everything fits, the default runs the
    model unpatched. So devices between the plan's and one with memory for everything count, too.
    """
    gpu = found.memory.gpu
    least = math.inf
    for size in (gpu * 5 // 4, 2 * gpu, PLENTY):
        larger = dataclasses.replace(found.memory, gpu=size, host=None)
        plan = plan_profile(found.profile, found.seq_len, larger, found.setting, found.rates)
        least = min(least, seconds_of(plan))
    return least


def faster(
    found: Plan, training: Training, count: Callable[[Training], Profile]
) -> Iterator[Remedy]:
    """Generate changes of a plan that fits which lower its seconds by more than `SLOWER`: where
    weights and optimizer live, and 4 bits for frozen weights.

    Args:
        found: the plan that fits.
        training: the plan's training.
        count: returns the model's profile for a training; called only if memory binds.
    """
    now = seconds_of(found)
    if _least_seconds(found) >= (1 - SLOWER) * now:
        return  # more memory does not help
    same = best_change(found, found.seq_len, found.profile, None)
    if same is not None and seconds_of(same.plan) <= (1 - SLOWER) * now:
        yield same
        now = seconds_of(same.plan)
    if training.lora is not None and training.bits > BITS:
        how = Training(training.lora, BITS)
        profile = profile_of(how, count)
        if profile is not None:
            smaller = best_change(found, found.seq_len, profile, how)
            if smaller is not None and seconds_of(smaller.plan) <= (1 - SLOWER) * now:
                yield smaller


def profile_of(training: Training, count: Callable[[Training], Profile]) -> Profile | None:
    """Return a model's profile with a training; None if the model cannot be trained like that."""
    try:
        return count(training)
    except Exception:  # peft and transformers raise anything for models without usual Linears
        return None


def on_device(remedy: Remedy) -> bool:
    """True if all of the layers' weights are on the device."""
    choice = remedy.plan.choice
    return choice is not None and choice.on_host is None


def too_large(plan: Plan) -> str | None:
    """Return text with the bytes of weights, gradients and optimizer state if these alone exceed
    the device's memory; otherwise None.
    """
    setting = plan.setting
    if setting.weights == "auto":
        setting = dataclasses.replace(setting, on_host=None)
    kept = static(plan.profile, setting)
    shares = {
        "weights": kept.weights,
        "gradients": kept.gradients,
        "optimizer state": kept.optimizer,
    }
    if kept.total <= plan.memory.usable:
        return None
    parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in shares.items() if size)
    return (
        f"{parts} = {kept.total / 2**30:.1f} GiB, and {plan.memory.usable / 2**30:.1f} GiB of each "
        "GPU are usable"
    )


def with_options(given: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command line's words, with `options` in place of its options for the same
    settings."""
    names = {option for option in options if option.startswith("--")}
    names |= {"--lora", "--full"} if names & {"--lora", "--full"} else set()
    kept, values = [], iter(given)
    for word in values:
        name, _, value = word.partition("=")
        if name not in names:
            kept.append(word)
        elif not value and name not in ("--full", "--optimizer-on-host"):
            next(values, None)
    return [*kept, *options]
