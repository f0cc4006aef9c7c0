"""`estimate`: predict the memory, FLOPs and seconds of one training step, for each method."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from streambp.chunks import plan_chunks
from streambp.config import StreamConfig
from streambp.errors import ConfigError
from streambp.fields import MAX_NUMBER, short_repr
from streambp.planner.fused_layers import Kernels
from streambp.planner.mixers import Mixers
from streambp.planner.profile import (
    Peak,
    Profile,
    Setting,
    available_methods,
    entry_of,
    flops,
    peak,
)
from streambp.planner.profile_cache import CountRequest
from streambp.planner.seconds import Seconds, seconds
from streambp.planner.skeleton import Device, Source
from streambp.planner.survey import (
    CHECKPOINTING_HEAD_RECIPE,
    CHECKPOINTING_RECIPE,
    UNPATCHED_RECIPE,
    streamed_recipe,
    survey,
)
from streambp.rates import DEFAULT_DEVICE, Rates, rates_of

BASELINES = (UNPATCHED_RECIPE, CHECKPOINTING_RECIPE, CHECKPOINTING_HEAD_RECIPE)


@dataclasses.dataclass(frozen=True)
class MethodEstimate:
    """Memory, FLOPs and seconds of a training step that is run in a certain way: with gradient
    checkpointing, for example.

    Attributes:
        name: name of the `Method`.
        peak: peak memory on one rank, in bytes.
        flops: FLOPs, summed over the ranks that share the sequence.
        seconds: seconds on one rank.
    """

    name: str
    peak: Peak
    flops: float
    seconds: Seconds


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Result of `estimate`: memory, FLOPs and seconds of a training step that is run in several
    ways (methods), such as gradient checkpointing.

    Attributes:
        profile: the model's memory and FLOPs, counted on tensors without data. The function
            `profile.peak` and others predict steps of other lengths and settings from this object.
        setting: the training setting, such as optimizer and number of GPUs.
        seq_len: positions of a row.
        chunk_size: positions of a chunk, on each rank.
        methods: the costs of a step with each method.
    """

    profile: Profile
    setting: Setting
    seq_len: int
    chunk_size: int
    methods: tuple[MethodEstimate, ...]

    def method(self, name: str) -> MethodEstimate:
        """Return the memory, FLOPs and seconds of a step with one method (way to train).

        Args:
            name: the method's name, such as "checkpointing".

        Raises:
            ConfigError: the estimate has no method of this name.
        """
        return entry_of({method.name: method for method in self.methods}, name)

    @property
    def streamed(self) -> MethodEstimate:
        """Return the memory, FLOPs and seconds of a step under streambp, whose layers are computed
        chunk by chunk."""
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
    rates: str | Rates = DEFAULT_DEVICE,
    kernels: Kernels = "auto",
) -> Estimate:
    """Estimate bytes, FLOPs and seconds of one training step, without weights and without a GPU.

    The operations of the step are counted on tensors without data (DESIGN.md section 6).

    Args:
        model_or_config: an id on the Hub, a checkpoint's folder, a config.json, a configuration, or
            a model.
        seq_len: positions of a row. Packed documents cost the same memory as one long document.
        batch_size: number of rows.
        chunk_size, saves, offload: settings of streambp, the fields of `StreamConfig`. The chunk
            size "auto" is that of `patch` on a device with unknown free memory.
        setting: the training setting: number of GPUs, ZeRO stage, optimizer and so on; None:
            `Setting()`, one GPU with Adam.
        lora: rank of adapters on every Linear of the layers; all other parameters are frozen. A
            PeftModel has its own adapters.
        bits: 4 or 8 for a quantised frozen base.
        dtype: dtype of the weights, unless a model is passed.
        device: type of the device whose kernels and memory are counted.
        attention: attention kernels on a GPU, whose workspaces are counted.
        mixers: code of recurrent and convolutional layers: the "kernels" of fla, mamba_ssm and
            causal_conv1d, plain "torch" as in transformers, or the kernels "installed" here; None:
            kernels, and torch on a CPU.
        rates: speeds of the GPU (FLOP/s, bytes/s), for the seconds: a name in `rates.DEVICES`, a
            file of `--measure-device`, or `Rates`.
        kernels: code of norms, gated activations and rotary embeddings, as in `StreamConfig`;
            "auto": Liger's on a GPU if liger-kernel is installed here.

    Returns:
        Costs of steps with four methods: no checkpointing, gradient checkpointing, gradient
            checkpointing with a loss that never has all logits in memory, and streambp.

    Raises:
        StreamBPError: the model is unknown, or has no layers that can be chunked.
    """
    check_length("seq_len", seq_len)
    request = CountRequest(
        model_or_config, dtype, lora, bits, device, mixers, kernels, batch_size, attention
    )
    StreamConfig(chunk_size=chunk_size, saves=saves, offload=offload)
    setting = setting or Setting()
    device_rates = rates_of(rates)
    skeleton = request.skeleton()
    shard = -(-seq_len // setting.ranks)
    chunk = plan_chunks(shard, batch_size, chunk_size).size
    recipes = (*BASELINES, streamed_recipe(saves, offload, setting.split))
    profile = survey(skeleton, recipes, batch_size, (shard, chunk), attention)
    available_methods(profile, setting)  # raises if the setting is not available
    estimates = []
    for method in profile.methods:
        highest = peak(profile, method, seq_len, chunk, setting)
        total_flops = flops(method, seq_len, chunk, setting)
        spent = seconds(method, seq_len, chunk, device_rates, setting)
        estimates.append(MethodEstimate(method.name, highest, total_flops, spent))
    return Estimate(profile, setting, seq_len, chunk, tuple(estimates))


def check_length(field: str, value: int) -> None:
    """Raise ConfigError unless an argument's value is a positive integer.

    Args:
        field: the argument's name, for the error message.
        value: the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
        raise ConfigError(f"{field} is {short_repr(value)}; it must be a positive whole number.")
