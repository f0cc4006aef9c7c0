"""Propose options of `streambp plan` with which a step fits into memory, or is faster. Each
proposal comes with its plan."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from streambp.errors import StreamBPError
from streambp.planner.plan import ALLOWED_SLOWDOWN, Plan, plan_step
from streambp.planner.profile import Profile, Setting, bytes_between_steps

# Rank of proposed adapters, and bits of proposed frozen weights.
LORA_RANK = 16
QUANTIZED_BITS: Literal[4] = 4
MAX_GPUS = 8
HOST_OPTIMIZER_CHANGE = "the optimizer state on the host"
UNLIMITED_BYTES = 2**50  # bytes of a device on which everything fits


class Training(NamedTuple):
    """Kind of training: all parameters are trained, or LoRA adapters on a frozen, possibly
    quantised model.

    Attributes:
        lora: rank of the adapters; None: all parameters are trained.
        bits: bits of the frozen weights; 16: not quantised.
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
        adapters = ("--full",) if self.lora is None else ("--lora", str(self.lora))
        return (*adapters, *(("--bits", str(self.bits)) if self.bits < 16 else ()))

    def smaller(self) -> Iterator[Training]:
        """Yield the kinds of training that take less device memory than this kind: LoRA, then LoRA
        on 4-bit weights. A kind equal to this kind is left out."""
        rank = self.lora or LORA_RANK
        if self.lora is None:
            yield Training(rank)
        if self.bits > QUANTIZED_BITS:
            yield Training(rank, QUANTIZED_BITS)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change, such as LoRA or more GPUs, with which a step fits into memory or is faster.

    Attributes:
        change: the change in words, for the plan's text.
        options: options of `streambp plan` that request the change, such as ("--lora", "16").
        plan: the plan with these options, from `plan_step`.
    """

    change: str
    options: tuple[str, ...]
    plan: Plan


def settings_of(base: Setting) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Yield pairs: options of `streambp plan`, and the training setting that they request. The
    first pair is () with `base` itself. The other pairs have variants of `base`, with the layers'
    weights, the optimizer state or both in host memory."""
    choices: list[tuple[tuple[str, ...], Setting]] = [((), base)]
    for weights in ("auto", "cpu"):
        if weights != base.weights and base.weights != "cpu":
            placed = dataclasses.replace(base, weights=weights)  # type: ignore[arg-type]
            choices.append((("--weights", weights), placed))
    for options, setting in choices:
        yield options, setting
        if base.optimizer and not base.optimizer_on_host:
            offloaded = dataclasses.replace(setting, optimizer_on_host=True)
            yield ("--optimizer-on-host", *options), offloaded


def seconds_of(plan: Plan) -> float:
    """Return the seconds of a plan's fastest step (`Plan.choice`, or `patch` without settings if it
    is faster); infinity if no step fits. Proposed changes of a plan are compared by these seconds.
    """
    if plan.choice is None:
        return math.inf
    if plan.default_wins and plan.by_default is not None:
        return plan.by_default.seconds
    return plan.choice.seconds.total


def best_change(
    base_plan: Plan,
    seq_len: int | Literal["max"],
    profile: Profile,
    training: Training | None,
    max_seconds: float = math.inf,
) -> Remedy | None:
    """Return the fastest plan with another kind of training (LoRA, for example) or another setting
    than `base_plan`, with the command-line options that request the plan. None if no step of such a
    plan fits into memory and takes at most `max_seconds`.

    The settings that are tried are the plan's own, and variants with weights or optimizer state in
    host memory. Among plans at most 2 % slower than the fastest, the plan with the fewest options
    is returned.

    Args:
        base_plan: the plan whose setting changes.
        seq_len: the requested length of sequences; "max": the longest that fits.
        profile: the counted memory and FLOPs of the model under `training`.
        training: the kind of training, if it differs from the plan's; None: the plan's own, so that
            the plan's own setting is left out.
        max_seconds: the most seconds that a step of the plan may take.
    """
    fitting: list[Remedy] = []
    for options, setting in settings_of(base_plan.setting):
        if training is None and not options:
            continue
        with contextlib.suppress(StreamBPError):  # ranks that cannot share the heads, for example
            plan = plan_step(profile, seq_len, base_plan.memory, setting, base_plan.rates)
            if plan.choice is None or seconds_of(plan) > max_seconds:
                continue
            changes, options = _describe_change(training, options)
            if plan.choice.on_host is not None:
                changes.append("the layers' weights on the host")
            fitting.append(Remedy(" and ".join(changes), options, plan))
    bar = (1 + ALLOWED_SLOWDOWN) * min((seconds_of(remedy.plan) for remedy in fitting), default=0.0)
    nearly_fastest = [remedy for remedy in fitting if seconds_of(remedy.plan) <= bar]
    return min(nearly_fastest, key=lambda remedy: len(remedy.options), default=None)


def _describe_change(
    training: Training | None, options: tuple[str, ...]
) -> tuple[list[str], tuple[str, ...]]:
    """Return two values: texts with the changes of a proposed plan (LoRA or weights in host memory,
    for example), and all options of `streambp plan` that request these changes.

    Args:
        training: the kind of training, if it differs from the plan's; None: the plan's own.
        options: the options that request the proposed plan's setting, from `settings_of`.
    """
    changes = []
    if training is not None:
        changes.append(str(training))
        options = (*training.options, *options)
    if "--optimizer-on-host" in options:
        changes.append(HOST_OPTIMIZER_CHANGE)
    return changes, options


def remedies(
    plan: Plan,
    seq_len: int | Literal["max"],
    training: Training,
    count: Callable[[Training], Profile],
) -> Iterator[Remedy]:
    """Yield changes with which a step fits into memory: on the same GPUs, on more GPUs, or with
    fewer tokens.

    The first change keeps the training. Changes of the training (LoRA, 4-bit weights) follow, until
    one of them needs no weights in host memory.

    Args:
        plan: the plan that does not fit.
        seq_len: the requested length of sequences; "max": the longest that fits.
        training: the kind of training that was requested.
        count: function that returns the model's memory and FLOPs under a kind of training, called
            only while no change keeps the layers' weights on the device.
    """
    remedy_count = 0
    last = None
    best = best_change(plan, seq_len, plan.profile, None)
    if best is not None:
        remedy_count += 1
        yield best
    for how in training.smaller():
        if best is not None and is_on_device(best):
            break
        profile = profile_of(how, count)
        if profile is None:
            continue
        last = (profile, how)
        smaller = best_change(plan, seq_len, profile, how)
        if smaller is not None:
            remedy_count += 1
            yield smaller
            if is_on_device(smaller):
                break
    for wider in _on_more_gpus(plan, seq_len):
        remedy_count += 1
        yield wider
    shorter = _fewer_tokens(plan, seq_len, plan.profile, None)
    if shorter is None and not remedy_count and last is not None:
        shorter = _fewer_tokens(plan, seq_len, *last)
    if shorter is not None:
        yield shorter


def _fewer_tokens(
    plan: Plan,
    seq_len: int | Literal["max"],
    profile: Profile,
    training: Training | None,
) -> Remedy | None:
    """Return the plan for the longest sequence that fits into memory, with the command-line options
    that request this plan. None if no sequence fits, or if the requested sequence fits.

    Args:
        plan: the plan that does not fit.
        seq_len: the requested length of sequences; "max": the longest that fits.
        profile: the counted memory and FLOPs of the model under `training`.
        training: the kind of training, if it differs from the plan's; None: the plan's own.
    """
    if seq_len == "max" and training is None:
        return None
    for options, setting in settings_of(plan.setting):
        if training is None and options:
            break
        longest_plan = plan_step(profile, "max", plan.memory, setting, plan.rates)
        if longest_plan.choice is None or (seq_len != "max" and longest_plan.seq_len >= seq_len):
            continue
        changes, options = _describe_change(training, options)
        changes.append(f"{longest_plan.seq_len:,} tokens at most")
        return Remedy(
            " and ".join(changes), (*options, "--seq-len", str(longest_plan.seq_len)), longest_plan
        )
    return None


def _on_more_gpus(current_plan: Plan, seq_len: int | Literal["max"]) -> Iterator[Remedy]:
    """Yield the plan for more GPUs under ZeRO-3: for the smallest number (up to `MAX_GPUS`) with
    which a step fits into memory. Yield nothing if no number suffices.

    Args:
        current_plan: the plan that does not fit.
        seq_len: the requested length of sequences; "max": the longest that fits.
    """
    current = current_plan.setting
    gpus = current.gpus if current.gpus > 1 and current.zero < 3 else 2 * current.gpus
    while gpus <= max(MAX_GPUS, current.gpus):  # more GPUs leave less host memory to each
        host = current_plan.memory.host
        if host is not None:
            host = host * current.gpus // gpus
        memory = dataclasses.replace(current_plan.memory, host=host)
        for on_host in dict.fromkeys((current.optimizer_on_host, True)):
            setting = dataclasses.replace(current, gpus=gpus, zero=3, optimizer_on_host=on_host)
            plan = plan_step(current_plan.profile, seq_len, memory, setting, current_plan.rates)
            if plan.choice is None:
                continue
            change = f"{gpus} GPUs with ZeRO-3"
            options: tuple[str, ...] = ("--gpus", str(gpus), "--zero", "3")
            if on_host and not current.optimizer_on_host:
                change += " and the optimizer state on the host"
                options += ("--optimizer-on-host",)
            yield Remedy(change, options, plan)
            return
        gpus *= 2


def _min_seconds(base_plan: Plan) -> float:
    """Return the seconds of the fastest step with more device memory: 1.25 times the memory, twice,
    four times, and enough for everything. If this time is not shorter than that of the plan's own
    step, changes that save memory cannot make the plan faster, and are not proposed.

    The first three amounts are tried because `patch` without settings runs the model unpatched with
    the fourth, and this may be slower.
    """
    gpu = base_plan.memory.gpu
    min_seconds = math.inf
    for size in (gpu * 5 // 4, 2 * gpu, 4 * gpu, UNLIMITED_BYTES):
        larger = dataclasses.replace(base_plan.memory, gpu=size, host=None)
        plan = plan_step(
            base_plan.profile, base_plan.seq_len, larger, base_plan.setting, base_plan.rates
        )
        min_seconds = min(min_seconds, seconds_of(plan))
    return min_seconds


def faster_changes(
    plan: Plan, training: Training, count: Callable[[Training], Profile]
) -> Iterator[Remedy]:
    """Yield changes that make the step of a plan at least 2 % faster: weights or optimizer state in
    host memory, and frozen weights in 4 bits. The plan's step fits into memory without them.

    Args:
        plan: the plan that fits.
        training: the plan's kind of training.
        count: function that returns the model's memory and FLOPs under a kind of training, called
            only if more device memory would make the step faster.
    """
    seconds = seconds_of(plan)
    bar = (1 - ALLOWED_SLOWDOWN) * seconds
    if _min_seconds(plan) >= bar:
        return  # more memory does not help
    best = best_change(plan, plan.seq_len, plan.profile, None, bar)
    if best is not None:
        yield best
        bar = (1 - ALLOWED_SLOWDOWN) * seconds_of(best.plan)
    if training.lora is not None and training.bits > QUANTIZED_BITS:
        how = Training(training.lora, QUANTIZED_BITS)
        profile = profile_of(how, count)
        if profile is not None:
            smaller = best_change(plan, plan.seq_len, profile, how, bar)
            if smaller is not None:
                yield smaller


def profile_of(training: Training, count: Callable[[Training], Profile]) -> Profile | None:
    """Return `count(training)`: the counted memory and FLOPs of a model under a kind of training.
    None if this raises an error, for example because the model cannot have adapters."""
    try:
        return count(training)
    except Exception:  # peft and transformers raise anything for models without usual Linears
        return None


def is_on_device(remedy: Remedy) -> bool:
    """True if a step of a remedy's plan fits into memory, and the fastest one (`Plan.choice`) has
    the weights of all layers on the device. Other kinds of training, which need even less device
    memory, are then not proposed."""
    choice = remedy.plan.choice
    return choice is not None and choice.on_host is None


def excess_text(plan: Plan) -> str | None:
    """Return a sentence for a plan in which no step fits, if weights, gradients and optimizer state
    alone exceed the device's usable memory. The sentence has their GiB. Otherwise return None."""
    setting = plan.setting
    if setting.weights == "auto":
        setting = dataclasses.replace(setting, on_host=None)
    between_steps = bytes_between_steps(plan.profile, setting)
    shares = {
        "weights": between_steps.weights,
        "gradients": between_steps.gradients,
        "optimizer state": between_steps.optimizer,
    }
    if between_steps.total <= plan.memory.usable:
        return None
    parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in shares.items() if size)
    return (
        f"{parts} = {between_steps.total / 2**30:.1f} GiB, and "
        f"{plan.memory.usable / 2**30:.1f} GiB of each "
        "GPU are usable"
    )


def replace_options(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words of a command line in which some options are replaced, to print the command
    that requests another plan. `--lora` and `--full` (training of all parameters) replace each
    other.

    Args:
        command: the words of the command line.
        options: the other options with their values, appended at the end. Options of the same names
            are removed from `command`.
    """
    names = {option for option in options if option.startswith("--")}
    names |= {"--lora", "--full"} if names & {"--lora", "--full"} else set()
    words, values = [], iter(command)
    for word in values:
        name, _, value = word.partition("=")
        if name not in names:
            words.append(word)
        elif not value and name not in ("--full", "--optimizer-on-host"):
            next(values, None)
    return [*words, *options]
