"""`patch` with a chunk size that the device's memory decides, where that is known (DESIGN.md section 6)."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

import torch
from torch import nn

import streambp.model.patching as patching
from streambp.chunks import AUTO_RULE, plan_chunks
from streambp.config import StreamConfig
from streambp.device import memory_limit
from streambp.distributed.zero import is_partitioned
from streambp.model.wrappers import LayerForward
from streambp.planner.plan import CHUNK_TOKENS
from streambp.planner.profile import Method
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import Recipe, survey

Model = TypeVar("Model", bound=nn.Module)
USABLE = 0.95  # the rest is left to fragmentation and other libraries


@dataclasses.dataclass
class FittingChunk:
    """The largest chunk size with which a step fits into what the device has left when the step begins.

    Args:
        method: the model's streamed step.
    """

    method: Method
    _sizes: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def __call__(self, index: int, batch_size: int, length: int, device: torch.device) -> int:
        """Positions per row for layer `index`; the first layer of a forward decides for all."""
        key = (batch_size, length)
        if index == 0 or key not in self._sizes:
            free = free_memory(device)
            if free is None:
                return plan_chunks(length, batch_size, "auto").size
            self._sizes = {key: max(1, min(length, self.tokens(batch_size * length, free) // batch_size))}
        return self._sizes[key]

    def tokens(self, length: int, free: float) -> int:
        """Tokens over all rows in a chunk of a step of `length` tokens; the smallest size if nothing fits."""
        for size in CHUNK_TOKENS:
            chunk = min(size, length)
            if max(phase.at(length, chunk) for phase in self.method.first) <= free:
                return size
        return CHUNK_TOKENS[-1]

    def __str__(self) -> str:
        return (
            f"auto: the largest of {', '.join(f'{size:,}' for size in CHUNK_TOKENS)} tokens over all rows of the batch "
            "whose step fits into the device's free memory"
        )


def patch(model: Model, config: StreamConfig | None = None) -> Model:
    model = patching.patch(model, config)
    installed: patching.Patch = model._streambp  # type: ignore[assignment]
    state = installed.state
    if state.config.chunk_size == "auto" and free_memory(_device(model)) is not None:
        state.chunk_rule = rule = _fitting(model, state.config)
        for wrapper in installed.state.wrappers:
            if isinstance(wrapper, LayerForward) and isinstance(rule, FittingChunk):
                wrapper.site.chunk_rule = rule
    return model


patch.__doc__ = patching.patch.__doc__


def _fitting(model: nn.Module, config: StreamConfig) -> FittingChunk | str:
    """How the plain rule is described where a step cannot be counted without data, and it stays."""
    if any(is_partitioned(parameter) for parameter in model.parameters()):
        return f"{AUTO_RULE} (parameters that ZeRO-3 has divided cannot be counted)"
    if not any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        return f"{AUTO_RULE} (weights in half precision would let the device's memory decide)"
    offload: Literal["none", "cpu"] = "none" if config.offload == "none" else "cpu"
    fixed = dataclasses.replace(config, saves=config.named_saves, offload=offload, host_memory=None)
    recipe = Recipe("streambp", fixed)
    try:
        skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda", mixers="installed")
        return FittingChunk(survey(skeleton, [recipe], accumulating=False, tree=False, timed=False).methods[0])
    except Exception as error:  # a count that fails must not keep a model from training
        return f"{AUTO_RULE} (a step could not be counted: {type(error).__name__}: {error})"


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def free_memory(device: torch.device) -> float | None:
    """Bytes that a step may take on a device beyond what is allocated now; None where no limit is known."""
    if device.type != "cuda":
        return None
    return USABLE * memory_limit(device) - torch.cuda.memory_allocated(device)
