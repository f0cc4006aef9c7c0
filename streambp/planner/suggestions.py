"""Options of `streambp plan` that make a plan fit. Each option is planned before it is proposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from streambp.planner.plan import Memory, Plan, plan_profile
from streambp.planner.profile import Profile, Setting, static

# Rank of proposed adapters, and bits of proposed frozen weights.
RANK = 16
BITS: Literal[4] = 4
MOST_GPUS = 1024


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


def remedies(
    found: Plan,
    seq_len: int | Literal["max"],
    training: Training,
    count: Callable[[Training], Profile],
) -> Iterator[Remedy]:
    """Generate changes that make a plan fit: on the same GPUs, on more GPUs, or with fewer tokens.

    Each kind occurs at most once. A second change on the same GPUs follows if the first one puts
    weights in host memory.

    Args:
        found: the plan that does not fit.
        seq_len: the requested length.
        training: the requested training.
        count: returns the model's profile for a training; called only if necessary.
    """
    same, wider, given = (
        list[tuple[Training, Setting]](),
        list[tuple[Setting, Memory]](),
        found.setting,
    )
    for how in (training, *training.smaller()):  # the smallest change of the training first
        if how != training:
            same.append((how, given))
        if given.optimizer and not given.optimizer_on_host:
            same.append((how, dataclasses.replace(given, optimizer_on_host=True)))
        if given.weights == "device":
            same.append((how, dataclasses.replace(given, weights="auto")))
    gpus = given.gpus if given.gpus > 1 and given.zero < 3 else 2 * given.gpus
    while gpus <= MOST_GPUS:  # more GPUs leave less host memory to each
        host = None if found.memory.host is None else found.memory.host * given.gpus // gpus
        for on_host in dict.fromkeys((given.optimizer_on_host, True)):
            more = dataclasses.replace(given, gpus=gpus, zero=3, optimizer_on_host=on_host)
            wider.append((more, dataclasses.replace(found.memory, host=host)))
        gpus *= 2
    on_device = True
    for how, setting in same:
        profile = found.profile if how == training else count(how)
        plan = plan_profile(profile, seq_len, found.memory, setting, found.rates)
        if plan.choice is not None and (on_device or plan.choice.on_host is None):
            on_device = plan.choice.on_host is None
            on_host = setting.optimizer_on_host and not found.setting.optimizer_on_host
            parts = ([str(how)] if how != training else []) + (
                ["the optimizer state on the host"] if on_host else []
            )
            parts += (
                ["the layers' frozen weights on the host"]
                if plan.choice.on_host is not None
                else []
            )
            moved = ("--weights", "auto") if setting.weights != found.setting.weights else ()
            there = ("--optimizer-on-host",) if on_host else ()
            yield Remedy(
                " and ".join(parts),
                (*(how.options if how != training else ()), *there, *moved),
                plan,
            )
            if on_device:
                break
    for setting, memory in wider:
        plan = plan_profile(found.profile, seq_len, memory, setting, found.rates)
        if plan.choice is not None:
            on_host = setting.optimizer_on_host and not found.setting.optimizer_on_host
            change = f"{setting.gpus} GPUs with ZeRO-3" + (
                " and the optimizer state on the host" if on_host else ""
            )
            options = (
                "--gpus",
                str(setting.gpus),
                "--zero",
                "3",
                *(("--optimizer-on-host",) if on_host else ()),
            )
            yield Remedy(change, options, plan)
            break
    longest = max(row.seq_len for row in found.longest if found.profile.method(row.method).chunked)
    if seq_len != "max" and 0 < longest < seq_len:
        plan = plan_profile(found.profile, longest, found.memory, found.setting, found.rates)
        yield Remedy(f"{longest:,} tokens at most", ("--seq-len", str(longest)), plan)


def too_large(plan: Plan) -> str | None:
    """Return text with the bytes of weights, gradients and optimizer state if these alone exceed
    the device's memory; otherwise None."""
    kept = static(plan.profile, plan.setting)
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
