"""`estimate`: what one step of a model costs, by method, phase and module."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from streambp.chunks import plan_chunks
from streambp.config import StreamConfig
from streambp.errors import ConfigError
from streambp.fields import MOST, shown
from streambp.planner.counted import Asked
from streambp.planner.fused_layers import Kernels
from streambp.planner.mixers import Mixers
from streambp.planner.profile import Peak, Profile, Setting, available, flops, named, peak
from streambp.planner.seconds import Seconds, seconds
from streambp.planner.skeleton import Device, Source
from streambp.planner.survey import CHECKPOINTING, CHECKPOINTING_HEAD, PLAIN, streamed, survey
from streambp.rates import DEFAULT, Rates, rates_of

UNPATCHED = (PLAIN, CHECKPOINTING, CHECKPOINTING_HEAD)


@dataclasses.dataclass(frozen=True)
class MethodEstimate:
    """One method's step: bytes and seconds on one rank, FLOPs over the ranks that share the sequence."""

    name: str
    peak: Peak
    flops: float
    seconds: Seconds


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What steps of `seq_len` positions a row cost, in chunks of `chunk_size` on each rank.

    `profile` serves other lengths and settings (`profile.peak`).
    """

    profile: Profile
    setting: Setting
    seq_len: int
    chunk_size: int
    methods: tuple[MethodEstimate, ...]

    def method(self, name: str) -> MethodEstimate:
        """The estimate of the method by that name.

        Raises:
            ConfigError: it was not counted.
        """
        return named({method.name: method for method in self.methods}, name)

    @property
    def streamed(self) -> MethodEstimate:
        """The streamed method's estimate."""
        return next(method for method in self.methods if method.name.startswith("streambp"))


def estimate(
    model_or_config: Source,
    seq_len: int,
    *,
    chunk_size: int | Literal["auto"] = "auto",
    saves: tuple[str, ...] = (),
    offload: Literal["none", "cpu"] = "none",
    batch_size: int = 1,
    setting: Setting | None = None,
    lora: int | None = None,
    bits: Literal[4, 8, 16] = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cuda",
    attention: Literal["cudnn", "flash"] = "cudnn",
    mixers: Mixers | None = None,
    rates: str | Rates = DEFAULT,
    kernels: Kernels = "auto",
) -> Estimate:
    """Bytes, FLOPs and seconds of one training step, counted without weights and without a GPU (DESIGN.md section 6).

    Args:
        model_or_config: an id on the Hub, a checkpoint's folder, a config.json, a configuration, or a model.
        seq_len: positions per row. batch_size: rows. Packed documents cost the same memory as one long one.
        chunk_size, saves, offload: as in `StreamConfig`; "auto" is the rule that applies where no limit is known.
        setting: GPUs, ZeRO stage, optimizer and so on; `Setting()` if None.
        lora: rank of adapters on every Linear of the layers; the rest is frozen. A PeftModel brings its own.
        bits: 4 or 8 for a quantised frozen base. dtype: of the weights, where no model is given.
        device: "cpu" counts the kernels that a CPU would run. attention: the kernels whose workspaces count on a GPU.
        mixers: what recurrent and convolutional layers run: the "kernels" of fla, mamba_ssm and causal_conv1d, plain
            "torch" as transformers has it, or the kernels that are "installed" here; None: kernels, and torch on a CPU.
        rates: of the GPU, for seconds: a name in `rates.DEVICES`, a file of `--measure-device`, or `Rates`.
        kernels: of norms, gated activations and rotary embeddings, as in `StreamConfig`; "auto": Liger's on a GPU if
            liger-kernel is installed here.

    Returns:
        Peaks of no checkpointing, checkpointing, checkpointing with a fused head, and streambp.

    Raises:
        StreamBPError: the model is unknown, or has no layers that stream.
    """
    check_length("seq_len", seq_len)
    asked = Asked(model_or_config, dtype, lora, bits, device, mixers, kernels, batch_size, attention)
    StreamConfig(chunk_size=chunk_size, saves=saves, offload=offload)
    setting, known = setting or Setting(), rates_of(rates)
    skeleton = asked.skeleton()
    shard = -(-seq_len // setting.ranks)
    chunk = plan_chunks(shard, batch_size, chunk_size).size
    recipes = (*UNPATCHED, streamed(saves, offload, setting.split))
    profile = survey(skeleton, recipes, batch_size, (shard, chunk), attention)
    available(profile, setting)  # or raise
    methods = tuple(
        MethodEstimate(
            m.name, peak(profile, m, seq_len, chunk, setting), flops(m, seq_len, chunk, setting),
            seconds(m, seq_len, chunk, known, setting),
        )
        for m in profile.methods
    )  # fmt: skip
    return Estimate(profile, setting, seq_len, chunk, methods)


def check_length(field: str, value: int) -> None:
    """Raise ConfigError unless it is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ConfigError(f"{field} is {shown(value)}; it must be a positive whole number.")
