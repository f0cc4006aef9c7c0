"""`plan`: find the chunk size, saves and offload with which a training step fits into memory and is
fastest, at a chosen or at the longest possible sequence length."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from streambp.chunks import floor_power_of_two
from streambp.config import StreamConfig
from streambp.errors import ConfigError, UnsupportedModelError
from streambp.fields import check_fields, parse_bytes, parse_tokens
from streambp.offload.free_memory import DEFAULT_HOST_FRACTION, RESERVED_BYTES, USABLE_HOST_FRACTION
from streambp.planner.auto_offload import AutoOffloadStep, predict_auto_offload
from streambp.planner.default_step import DefaultStep, predict_default_step
from streambp.planner.estimate import BASELINES
from streambp.planner.exchanges import link_bytes
from streambp.planner.fused_layers import Kernels
from streambp.planner.host_weights import HostLayers, fewest_layers, first_layers
from streambp.planner.mixers import Mixers
from streambp.planner.profile import (
    SPLIT_FIELDS,
    Method,
    Peak,
    Profile,
    Setting,
    available_methods,
    bytes_between_steps,
    flops,
    peak,
)
from streambp.planner.profile_cache import CountRequest, ProgressCallback, count_profile
from streambp.planner.sample_points import SAMPLE_CHUNKS
from streambp.planner.seconds import Seconds, min_hiding_length, seconds, throughput
from streambp.planner.skeleton import Device, Source
from streambp.planner.survey import SPLIT_RECIPES, STREAMED_RECIPES
from streambp.rates import DEFAULT_DEVICE, DEVICES, Rates, rates_of
from streambp.sharded.gathered_keys import FREE_MEMORY_DIVISOR

# tokens of a chunk over all rows of the batch, largest first
CHUNK_TOKENS = tuple(SAMPLE_CHUNKS[1] >> shift for shift in range(4))
AUTO_OFFLOAD_CHUNK_TOKENS = (32768, 16384, *CHUNK_TOKENS)  # chunk sizes of offload="auto"
MAX_SEQ_LEN = 2**30
MAX_CACHED_SETTINGS = 256
EQUAL_SECONDS_TOLERANCE = (
    0.005  # difference of seconds, relative to the fastest, below which steps are equally fast
)
ALLOWED_SLOWDOWN = 0.02  # allowed slowdown of the choice with less memory, relative to the fastest


@dataclasses.dataclass(frozen=True)
class Memory:
    """Limits of device memory and host memory for one rank.

    Attributes:
        gpu: bytes of the device's memory.
        host: bytes of host memory that this rank may use; None: no limit.
        reserve: fraction of the device's memory that a step may not use, left to the CUDA context,
            fragmentation and other libraries.
    """

    gpu: int
    host: int | None = None
    reserve: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self, gpu=1, host=0, reserve=(0, 0.99))

    @property
    def usable(self) -> float:
        """Return the bytes of device memory that a step may use: `gpu` without the reserve."""
        return self.gpu * (1 - self.reserve)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings of a training step at one sequence length, with the step's predicted memory, FLOPs
    and seconds.

    Attributes:
        method: name of the way to run the step: "checkpointing" or "streambp saves attn_out", say.
        saves: the value of `StreamConfig.saves`.
        offload: the value of `StreamConfig.offload`.
        chunk_size: positions of a chunk in each row of a rank; `seq_len` for unpatched steps, which
            have no chunks.
        seq_len: positions of a full sequence, also if ranks share it.
        peak: peak memory on each rank.
        flops: FLOPs of the step, summed over the ranks that share a sequence.
        seconds: predicted seconds of the step.
        gpu_memory: the value of `StreamConfig.gpu_memory`, if keys and values are read from the
            host.
        link: bytes that a rank sends in a step to the ranks that share its sequences; each rank
            receives equally many.
        on_host: layers with weights in host memory; None: no layer.
        hidden_from: smallest number of positions of a row at which copies of these weights take no
            extra time. None: copies take extra time at any length, or no weights are in host
            memory.
    """

    method: str
    saves: tuple[str, ...]
    offload: str
    chunk_size: int
    seq_len: int
    peak: Peak
    flops: float
    seconds: Seconds
    gpu_memory: int | None = None
    link: float = 0.0
    on_host: HostLayers | None = None
    hidden_from: int | None = None

    @property
    def config(self) -> StreamConfig:
        """Return the `StreamConfig` with which `streambp.patch` runs this step."""
        if self.on_host is None:
            weights = "device"
        elif self.on_host.layers == self.on_host.of:
            weights = "cpu"
        else:
            weights = "auto"
        where = {"offload": self.offload, "gpu_memory": self.gpu_memory, "weights": weights}
        return StreamConfig(self.chunk_size, self.saves, **where)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class LongestSequence:
    """Longest sequence with which a training step of one method (way to run a step) fits into
    memory.

    Attributes:
        method: name of the `Method`, such as "checkpointing" or "streambp saves attn_out".
        seq_len: positions of the sequence; 0 if no sequence fits.
        binds: reason why longer sequences do not fit: the part of the step that exceeds the GPU's
            memory, such as "backward 35" (of layer 35), or "host memory".
    """

    method: str
    seq_len: int
    binds: str


@dataclasses.dataclass(frozen=True)
class MethodStep:
    """Predicted seconds of a step of one method (way to run a step) at the plan's sequence length.
    The chunk size is the fastest that fits into memory, or the smallest if none fits.

    Attributes:
        method: name of the `Method`, such as "checkpointing" or "streambp saves attn_out".
        chunk_size: positions of a chunk in each row; all of the row for unpatched steps.
        fits: True if the step fits into memory.
        peak: bytes of device memory at the step's peak.
        seconds: seconds of the step.
        tokens_per_second: tokens that all ranks together process per second.
    """

    method: str
    chunk_size: int
    fits: bool
    peak: float
    seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Lever:
    """A change outside of streambp's settings, such as more GPUs, and the longest sequence after
    the change.

    Attributes:
        change: the change in words, for the plan's text.
        seq_len: positions of the longest sequence that fits after the change.
    """

    change: str
    seq_len: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Result of `plan`: the fastest step that fits into memory at a sequence length, other steps,
    and the longest sequences.

    Attributes:
        profile: the model's memory and FLOPs, counted on tensors without data.
        setting: the training setting: number of GPUs, ZeRO stage, optimizer and so on.
        memory: memory limits of each rank.
        seq_len: positions of a row; 0 if "max" was requested and no row fits.
        choice: the fastest step with fixed settings that fits at `seq_len`; None if none fits.
        binds: reason why longer sequences do not fit in chunked steps: the part of the step that
            exceeds the GPU's memory, such as "backward 35" (of layer 35), or "host memory".
        levers: changes outside of streambp's settings (more GPUs, for example) that allow a longer
            sequence, the simplest first.
        longest: the longest sequence of each method (way to run a step).
        times: seconds of a step of each method at `seq_len`.
        rates: speeds of the device (FLOP/s, bytes/s).
        by_default: prediction for `patch(model)` without settings; None if the step cannot be
            predicted.
        safest: the step with the lowest peak among those that fit and are at most 2 % slower than
            the fastest; None if none fits.
        both_rooms: prediction for offload="auto"; None if the step cannot be predicted.
    """

    profile: Profile
    setting: Setting
    memory: Memory
    seq_len: int
    choice: Choice | None
    binds: str
    levers: tuple[Lever, ...]
    longest: tuple[LongestSequence, ...]
    times: tuple[MethodStep, ...]
    rates: Rates
    by_default: DefaultStep | None = None
    safest: Choice | None = None
    both_rooms: AutoOffloadStep | None = None

    @property
    def default_wins(self) -> bool:
        """True if `patch(model)` without settings fits into memory, and takes less than 99.5 % of
        the seconds of `choice`, the fastest step with fixed settings. False if the plan has
        weights="cpu", because `patch(model)` keeps weights on the device."""
        default = self.by_default
        if default is None or self.choice is None or not default.fits:
            return False
        if self.setting.weights == "cpu":  # by default weights stay on the device
            return False
        return default.seconds < (1 - EQUAL_SECONDS_TOLERANCE) * self.choice.seconds.total

    @property
    def both_rooms_win(self) -> bool:
        """True if a step with `offload="auto"`, which saves tensors on the device and on the host,
        fits into memory and is the fastest. The step must take less than 99.5 % of the seconds of
        `choice` and of `patch(model)` without settings. False if the plan has weights="cpu"."""
        combined = self.both_rooms
        if combined is None or not combined.fits or self.setting.weights == "cpu":
            return False
        other_seconds = []
        if self.choice is not None:
            other_seconds.append(self.choice.seconds.total)
        if self.by_default is not None and self.by_default.fits:
            other_seconds.append(self.by_default.seconds)
        return combined.seconds < (1 - EQUAL_SECONDS_TOLERANCE) * min(
            other_seconds, default=math.inf
        )

    @property
    def next_fastest(self) -> tuple[MethodStep, ...]:
        """Return the predicted steps of the two fastest methods (ways to run a step) after that of
        `choice`, the faster first. Methods are left out if they do not compute in chunks, or do not
        fit into memory."""
        if self.choice is None:
            method = None
        else:
            method = self.choice.method
        candidates = []
        for timed in self.times:
            if timed.fits and timed.method != method and self.profile.method(timed.method).chunked:
                candidates.append(timed)
        return tuple(sorted(candidates, key=lambda timed: timed.seconds)[:2])


def plan(
    model_or_config: Source,
    seq_len: int | str = "max",
    *,
    gpu_memory: int | str,
    host_memory: int | str | None = None,
    setting: Setting | None = None,
    reserve: float = 0.05,
    batch_size: int = 1,
    lora: int | None = None,
    bits: Literal[4, 8, 16] = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cuda",
    attention: Literal["cudnn", "flash"] = "cudnn",
    mixers: Mixers | None = None,
    rates: str | Rates = DEFAULT_DEVICE,
    kernels: Kernels = "auto",
    cache: bool = False,
    said: ProgressCallback | None = None,
    every_split: bool = False,
    lora_targets: Sequence[str] = (),
    with_liger: bool = False,
    methods: Sequence[str] = (),
    encoder_len: int | None = None,
) -> Plan:
    """Return the fastest settings (`Plan`) with which a training step fits into memory. No GPU is
    needed.

    Args:
        seq_len: positions of a full sequence, as a number or "64k", also if ranks share it
            (`setting.ulysses`, `setting.context_parallel`); "max": the longest that fits.
        gpu_memory: bytes of each GPU, as a number or "80GiB".
        reserve: fraction of the GPU memory that stays free.
        host_memory: bytes of host memory for all ranks together; None: no limit.
        model_or_config, batch_size, lora, bits, dtype, device, attention, mixers, kernels: the
            model, its number of rows and the assumed kernels, as in `estimate`.
        setting: GPUs, ZeRO stage and optimizer; `Setting()` if None.
        rates: speeds of the GPU, for seconds: a name in `rates.DEVICES`, a file of
            `--measure-device`, or `Rates`.
        cache: store the model's memory and FLOPs in a file, and reuse a stored file.
        said: progress callback; arguments are a text and the finished fraction.
        every_split: predict every kind of sequence sharding, not the setting's alone (for a page).
        lora_targets: names of the Linears that get adapters; empty: all that peft accepts.
        with_liger: plan as if liger-kernel were installed.
        methods: names of the ways to run a step (`Method.name`) to compare; empty: all.
        encoder_len: positions of an encoder's rows; None: `seq_len`, or what the config fixes.

    Raises:
        StreamBPError: the model or the device is unknown, the model cannot be chunked or sharded
            over this number of ranks, or an argument is out of range.
    """
    device_rates = rates_of(rates)
    setting = setting or Setting()
    request = CountRequest(
        model_or_config, dtype, lora, bits, device, mixers, kernels, batch_size, attention,
        tuple(lora_targets), with_liger, encoder_len,
    )  # fmt: skip
    length: int | Literal["max"] = "max"
    if seq_len != "max":
        length = parse_tokens("seq_len", seq_len)
        if length % setting.ranks:
            raise ConfigError(
                f"seq_len is {length}, and {setting.ranks} ranks share a sequence. Shards must "
                "have the same shape: the number of ranks must divide the number of tokens."
            )
    if host_memory is None:
        host = None
    else:
        host = parse_bytes("host_memory", host_memory) // setting.gpus
    memory = Memory(parse_bytes("gpu_memory", gpu_memory), host, reserve)
    recipes = (*BASELINES, *(SPLIT_RECIPES[setting.split] if setting.split else STREAMED_RECIPES))
    if every_split:
        recipes = (
            *BASELINES, *STREAMED_RECIPES,
            *(recipe for some in SPLIT_RECIPES.values() for recipe in some),
        )  # fmt: skip
    if methods:
        recipes = tuple(recipe for recipe in recipes if recipe.name in methods)
    profile = count_profile(request, recipes, cache, said)
    return plan_profile(profile, length, memory, setting, device_rates)


def plan_profile(
    profile: Profile,
    seq_len: int | Literal["max"],
    memory: Memory,
    setting: Setting,
    rates: Rates = DEVICES[DEFAULT_DEVICE],
) -> Plan:
    """Return the `Plan` for a model whose costs were counted.

    weights="auto" keeps the layers' weights on the device for each method (way to run a step) whose
    step fits. If a step does not fit, the weights of the smallest sufficient number of first layers
    move to host memory. The fastest of all these steps is chosen.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        seq_len: positions of a row; "max": the most that fit under streambp.
        memory: memory limits of each rank.
        setting: the training setting: number of GPUs, ZeRO stage, optimizer, weights and so on.
        rates: the device's speeds (FLOP/s, bytes/s).

    Raises:
        ConfigError, UnsupportedModelError: ranks cannot share the model's sequences as the setting
            requests.
    """
    setting = allow_host_weights(profile, setting)
    methods = available_methods(profile, setting)
    table = tuple(longest_sequence(profile, method, memory, setting) for method in methods)
    best = max(
        (row for row in table if profile.method(row.method).chunked), key=lambda row: row.seq_len
    )
    if seq_len == "max":
        length = best.seq_len
    else:
        length = seq_len
    step = plan_step(profile, length, memory, setting, rates)
    levers = tuple(_levers(profile, best.seq_len, memory, setting))
    if not length:
        return dataclasses.replace(step, binds=best.binds, levers=levers, longest=table)
    times = []
    for method in methods:
        times.append(_timed(profile, method, length, memory, setting, rates))
    usable = min(memory.usable, memory.gpu - RESERVED_BYTES)
    host = None
    if memory.host is not None:
        host = USABLE_HOST_FRACTION * memory.host
    sizes = tuple(max(1, tokens // profile.batch_size) for tokens in AUTO_OFFLOAD_CHUNK_TOKENS)
    combined = predict_auto_offload(profile, length, sizes, (usable, host), setting, rates)
    return dataclasses.replace(
        step,
        binds=best.binds,
        levers=levers,
        longest=table,
        times=tuple(times),
        both_rooms=combined,
    )


def plan_step(
    profile: Profile,
    seq_len: int | Literal["max"],
    memory: Memory,
    setting: Setting,
    rates: Rates = DEVICES[DEFAULT_DEVICE],
) -> Plan:
    """Return a `Plan` with only the fastest step and the prediction for `patch(model)`, by which
    plans with different options are compared. Everything that only a report shows is left out.

    `binds`, `levers`, `longest`, `times` and `both_rooms` of the result are empty. All else is as
    `plan_profile` returns it, with the same arguments and errors.
    """
    setting = allow_host_weights(profile, setting)
    chunked = []
    for method in available_methods(profile, setting):
        if method.chunked:
            chunked.append(method)
    if seq_len == "max":
        length = max(longest_sequence(profile, m, memory, setting).seq_len for m in chunked)
    else:
        length = seq_len
    if not length:
        return Plan(profile, setting, memory, length, None, "", (), (), (), rates)
    fitting = []
    for option in options(profile, chunked, length, memory, setting, rates):
        if fits(option.peak, memory):
            fitting.append(option)
    choice = _fastest(fitting)
    if choice is not None and choice.on_host is not None:
        placed_setting = dataclasses.replace(setting, on_host=choice.on_host)
        hidden = min_hiding_length(
            profile.method(choice.method), choice.chunk_size, rates, placed_setting
        )
        choice = dataclasses.replace(choice, hidden_from=hidden)
    if memory.host is None:
        host_headroom = math.inf
    else:
        host_headroom = DEFAULT_HOST_FRACTION * memory.host
    usable = min(memory.usable, memory.gpu - RESERVED_BYTES)
    default = predict_default_step(profile, length, usable, setting, rates, host_headroom)
    safest = _safest(fitting)
    return Plan(profile, setting, memory, length, choice, "", (), (), (), rates, default, safest)


@functools.lru_cache(maxsize=MAX_CACHED_SETTINGS)
def _set_host_layers(setting: Setting, on_host: HostLayers | None) -> Setting:
    """Return a copy of the setting with other layers in host memory. Copies are cached: a plan
    needs the same few thousands of times, and a new copy checks all fields.

    Args:
        setting: the training setting.
        on_host: the layers whose weights are in host memory; None: no layer.
    """
    return dataclasses.replace(setting, on_host=on_host)


def allow_host_weights(profile: Profile, setting: Setting) -> Setting:
    """Return a copy of the setting, whose field `on_host` states if a plan may move layers' weights
    to host memory.

    `on_host` has all layers if weights may move; for each step, the plan then moves the layers that
    the step needs to move. `on_host` is None if no weights may move: with weights="device", for
    several GPUs, and if no layer has weights that can move.

    Args:
        profile: the model's counted memory and FLOPs, with the bytes of each layer's weights.
        setting: the training setting.
    """
    on_host = put_weights_on_host(profile, setting)
    if on_host is None or setting.weights == "device":
        return dataclasses.replace(setting, on_host=None)
    return on_host


def put_weights_on_host(profile: Profile, setting: Setting) -> Setting | None:
    """Return a copy of the setting, in which the frozen weights of all layers are in host memory
    (the field `on_host`).

    Trained weights are in host memory as well if `setting.weights` is "cpu". The result is None for
    several GPUs, or if no layer has weights that can move.
    """
    sizes = profile.frozen
    trained = 0
    if setting.weights == "cpu" and profile.trained:
        # each layer has frozen or trained bytes, and 0 of the other kind
        sizes = tuple(map(max, sizes, profile.trained))
        trained = sum(profile.trained)
    if setting.gpus > 1 or not any(sizes):
        return None
    born = sum(group.trainable_bytes for group in profile.groups)
    on_host = dataclasses.replace(first_layers(sizes, len(sizes), profile.decoded), trained=trained)
    return dataclasses.replace(
        setting, on_host=dataclasses.replace(on_host, part=min(1.0, trained / max(1, born)))
    )


def _timed(
    profile: Profile,
    method: Method,
    seq_len: int,
    memory: Memory,
    setting: Setting,
    rates: Rates,
) -> MethodStep:
    """Return the predicted seconds of a step of one method (way to train), with the fastest chunk
    size that fits into memory. If none fits, the step has the smallest chunk size.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        method: the method, such as gradient checkpointing.
        seq_len: positions of a row.
        memory: memory limits of each rank.
        setting: the training setting.
        rates: the device's speeds (FLOP/s, bytes/s).
    """
    limited = set_room(profile, memory, setting)
    choice = choose(profile, [method], seq_len, memory, limited, rates)
    if choice is not None:
        size = choice.chunk_size
        spent = choice.seconds
        total = choice.peak.total
    else:
        size = min(chunk_sizes(profile.batch_size)[-1], seq_len)
        at, placed_setting = place_weights(profile, method, seq_len, size, memory, limited)
        spent = seconds(method, seq_len, size, rates, placed_setting)
        total = at.total
    speed = throughput(spent, seq_len, profile.batch_size, limited)
    chunk_size = size if method.chunked else seq_len
    return MethodStep(method.name, chunk_size, choice is not None, total, spent.total, speed)


def choose(
    profile: Profile,
    methods: Sequence[Method],
    seq_len: int,
    memory: Memory,
    setting: Setting,
    rates: Rates = DEVICES[DEFAULT_DEVICE],
) -> Choice | None:
    """Return the fastest step that fits into memory, over all given methods (ways to run a step)
    and all chunk sizes that a plan tries; None if none fits.

    Steps within half a percent of the fastest count as equally fast; the least host memory decides
    between them, then the largest chunk.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        methods: the methods to try, such as gradient checkpointing.
        seq_len: positions of a row.
        memory: memory limits of each rank.
        setting: the training setting.
        rates: the device's speeds (FLOP/s, bytes/s).
    """
    fitting = []
    for option in options(profile, methods, seq_len, memory, setting, rates):
        if fits(option.peak, memory):
            fitting.append(option)
    return _fastest(fitting)


def _fastest(choices: Sequence[Choice]) -> Choice | None:
    """Return the fastest of several predicted steps; None for no steps. If several are equally fast
    (within 0.5 %), the least host memory decides, then the largest chunk."""
    # a synthetic step may take no time
    fastest = min((c.seconds.total for c in choices), default=0.0) or math.inf
    return min(
        choices,
        key=lambda c: (round(c.seconds.total / fastest, 2), c.peak.host, -c.chunk_size),
        default=None,
    )


def _safest(choices: Sequence[Choice]) -> Choice | None:
    """Return the step with the lowest peak memory among those at most 2 % slower than the fastest.
    None for no steps. A plan names the result as an alternative to its fastest step."""
    bar = (1 + ALLOWED_SLOWDOWN) * min((c.seconds.total for c in choices), default=0.0)
    return min(
        (c for c in choices if c.seconds.total <= bar),
        key=lambda c: (c.peak.total, c.seconds.total),
        default=None,
    )


def options(
    profile: Profile,
    methods: Sequence[Method],
    seq_len: int,
    memory: Memory,
    setting: Setting,
    rates: Rates,
) -> Iterator[Choice]:
    """Yield one `Choice` for each method (way to run a step) and each chunk size that a plan tries,
    also for steps that do not fit into memory.

    An unpatched method has no chunks and yields a single `Choice`.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        methods: the methods to try, such as gradient checkpointing.
        seq_len: positions of a row.
        memory: memory limits of each rank.
        setting: the training setting.
        rates: the device's speeds (FLOP/s, bytes/s).
    """
    setting = set_room(profile, memory, setting)
    for method in methods:
        if method.chunked:
            sizes = chunk_sizes(profile.batch_size)
        else:
            sizes = (seq_len,)
        for size in dict.fromkeys(min(size, seq_len) for size in sizes):
            at, placed_setting = place_weights(profile, method, seq_len, size, memory, setting)
            how = (method.name, method.saves, method.offload, size, seq_len)
            if method.prefix_on_host:
                free_bytes = max(1, int(memory.usable - at.total))
            else:
                free_bytes = None
            spent = seconds(method, seq_len, size, rates, placed_setting)
            sent = link_bytes(method, seq_len, setting)
            yield Choice(
                *how,
                at,
                flops(method, seq_len, size, setting),
                spent,
                free_bytes,
                sent,
                placed_setting.on_host,
            )


def place_weights(
    profile: Profile,
    method: Method,
    seq_len: int,
    chunk_size: int,
    memory: Memory,
    setting: Setting,
) -> tuple[Peak, Setting]:
    """Return a step's peak memory, and a copy of the setting whose `on_host` has the layers with
    weights in host memory during this step (None: no layer).

    setting.weights="auto" moves the smallest number of first layers with which the step fits the
    device, and "cpu" moves all layers. Unpatched steps keep all weights on the device.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        method: the method of the step.
        seq_len: positions of a row.
        chunk_size: positions of a chunk.
        memory: memory limits of each rank.
        setting: the training setting, from `allow_host_weights`.
    """
    resident = _set_host_layers(setting, None)
    if setting.on_host is None or not method.chunked:
        return peak(profile, method, seq_len, chunk_size, resident), resident
    placed_setting = setting
    if setting.weights == "auto":
        at = peak(profile, method, seq_len, chunk_size, resident)
        lacking = at.total - memory.usable
        if lacking <= 0:
            return at, resident
        on_host = fewest_layers(profile.frozen, lacking, profile.decoded)
        placed_setting = _set_host_layers(setting, on_host)
    return peak(profile, method, seq_len, chunk_size, placed_setting), placed_setting


def set_room(profile: Profile, memory: Memory, setting: Setting) -> Setting:
    """Return a copy of the setting in which `room` is an eighth of the device memory that is free
    at the start of a step. Under context parallelism a rank may use `room` bytes for keys and
    values gathered from other ranks.

    Args:
        profile: the model's counted memory, with the bytes of weights and optimizer state.
        memory: memory limits of each rank.
        setting: the training setting.
    """
    between_steps = bytes_between_steps(profile, setting)
    free = (
        memory.usable
        - between_steps.weights
        - between_steps.optimizer
        - (between_steps.gradients if setting.accumulate else 0.0)
    )
    return dataclasses.replace(setting, room=max(0.0, free) / FREE_MEMORY_DIVISOR)


def longest_sequence(
    profile: Profile, method: Method, memory: Memory, setting: Setting
) -> LongestSequence:
    """Return the longest sequence with which a step of one method (way to train) fits into memory,
    with the smallest chunk size of `chunk_sizes`, which needs the least memory.

    A method whose layers save bytes for each chunk (recurrent states) may need less memory with
    larger chunks. Such a method is tried with every chunk size.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        method: the method, such as gradient checkpointing.
        memory: memory limits of each rank.
        setting: the training setting.
    """
    setting, ranks, sizes = (
        set_room(profile, memory, setting),
        setting.ranks,
        chunk_sizes(profile.batch_size),
    )
    candidates = []
    for size in sizes if method.counts_chunks else sizes[-1:]:
        low = 0
        high = MAX_SEQ_LEN // ranks
        while low < high:  # valid because every phase grows with the length
            middle = (low + high + 1) // 2
            at, _ = place_weights(profile, method, ranks * middle, size, memory, setting)
            low, high = (middle, high) if fits(at, memory) else (low, middle - 1)
        next_peak, _ = place_weights(profile, method, ranks * (low + 1), size, memory, setting)
        if next_peak.total > memory.usable:
            binds = next_peak.phase
        else:
            binds = "host memory"
        candidates.append(LongestSequence(method.name, ranks * low, binds))
    return max(candidates, key=lambda row: row.seq_len)


def fits(at: Peak, memory: Memory) -> bool:
    """True if a step with the peak memory `at` fits: its device bytes are at most the usable device
    memory, and its host bytes are within the limit."""
    return at.total <= memory.usable and (memory.host is None or at.host <= memory.host)


def chunk_sizes(batch_size: int) -> tuple[int, ...]:
    """Return the chunk sizes that a plan tries for a batch of `batch_size` rows, the largest first.
    A chunk size is a number of positions of each row, so more rows get smaller chunks."""
    return tuple(
        dict.fromkeys(floor_power_of_two(max(1, tokens // batch_size)) for tokens in CHUNK_TOKENS)
    )


def _levers(profile: Profile, seq_len: int, memory: Memory, setting: Setting) -> Iterator[Lever]:
    """Yield changes outside of streambp's settings, such as more GPUs, ZeRO-3 or more host memory,
    each with the longest sequence that fits after the change. Changes are left out if this sequence
    is less than 5 % longer than `seq_len`.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        seq_len: positions of the longest sequence that fits without a change.
        memory: memory limits of each rank.
        setting: the training setting.
    """
    options: list[tuple[str, Setting, Memory]] = []
    if setting.optimizer and not setting.optimizer_on_host:
        options.append(
            (
                "optimizer state on the host",
                dataclasses.replace(setting, optimizer_on_host=True),
                memory,
            )
        )
    everywhere = dataclasses.replace(setting, weights="cpu")
    with_host_weights = put_weights_on_host(profile, everywhere)
    if with_host_weights is not None and setting.on_host is None:
        options.append(("weights on the host (weights='cpu')", with_host_weights, memory))
    if memory.host is not None:
        options.append(
            ("twice the host memory", setting, dataclasses.replace(memory, host=2 * memory.host))
        )
    if setting.gpus > 1 and setting.zero < 3:
        options.append(
            (f"ZeRO-3 over the {setting.gpus} GPUs", dataclasses.replace(setting, zero=3), memory)
        )
    more_gpus = dataclasses.replace(setting, gpus=2 * setting.gpus, zero=3, on_host=None)
    # the GPUs share the machine
    halved = dataclasses.replace(memory, host=None if memory.host is None else memory.host // 2)
    if setting.split:
        doubled_ranks = {SPLIT_FIELDS[setting.split]: 2 * setting.ranks, "gpus": 2 * setting.gpus}
        wider = dataclasses.replace(setting, **doubled_ranks)  # type: ignore[arg-type]
        with contextlib.suppress(UnsupportedModelError):
            available_methods(profile, wider)
            options.append((f"sequences over {wider.ranks} ranks", wider, halved))
    options.append((f"{more_gpus.gpus} GPUs with ZeRO-3", more_gpus, halved))
    options.append(
        ("GPUs with twice the memory", setting, dataclasses.replace(memory, gpu=2 * memory.gpu))
    )
    for change, candidate, budget in options:
        methods = available_methods(profile, candidate)
        reached = max(
            longest_sequence(profile, m, budget, candidate).seq_len for m in methods if m.chunked
        )
        if reached > 1.05 * seq_len:
            yield Lever(change, reached)
