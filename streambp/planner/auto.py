"""`patch` with chunk sizes and saves that the device's memory decides, where that is known (DESIGN.md section 6)."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

import torch
from torch import nn

import streambp.model.patching as patching
from streambp.chunks import AUTO_RULE, in_one_pass, plan_chunks
from streambp.config import StreamConfig
from streambp.device import memory_limit
from streambp.distributed.zero import is_partitioned
from streambp.model.wrappers import LayerForward
from streambp.offload.arena import host_limit
from streambp.offload.fitting import FittingSaves
from streambp.planner.plan import CHUNK_TOKENS
from streambp.planner.profile import Method
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import Recipe, survey

Model = TypeVar("Model", bound=nn.Module)
USABLE = 0.95  # the rest is left to fragmentation and other libraries


@dataclasses.dataclass(frozen=True)
class Law:
    """Bytes that a streamed step without saves takes.

    Args:
        method: the model's streamed step.
    """

    method: Method

    def __call__(self, tokens: int, chunk: int) -> float:
        """Of so many tokens over all rows, in chunks of `chunk`."""
        return max(phase.at(tokens, min(chunk, tokens)) for phase in self.method.first)


@dataclasses.dataclass
class FittingChunk:
    """The largest chunk size with which a step fits into what the device has left when the step begins.

    Args:
        law: what the model's streamed step takes.
    """

    law: Law
    _sizes: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def __call__(self, index: int, batch_size: int, length: int, device: torch.device) -> int:
        """Positions per row for layer `index`; the first layer of a forward decides for all."""
        key = (batch_size, length)
        if index == 0 or key not in self._sizes:
            free = free_memory(device)
            if free is None:
                return plan_chunks(length, batch_size, "auto").size
            size = max(1, self.tokens(batch_size * length, free) // batch_size)
            self._sizes = {key: length if size >= length else in_one_pass(size)}
        return self._sizes[key]

    def tokens(self, length: int, free: float) -> int:
        """Tokens over all rows in a chunk of a step of `length` tokens; the smallest size if nothing fits."""
        for size in CHUNK_TOKENS:
            if self.law(length, size) <= free:
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
    state, device = installed.state, _device(model)
    cuts = state.config.chunk_size == "auto" and free_memory(device) is not None
    saves = state.config.saves == "auto" and state.offloader is None
    if not cuts and not saves:
        return model
    law = _law(model, state.config, half=cuts or device.type == "cuda")
    layers = [wrapper for wrapper in state.wrappers if isinstance(wrapper, LayerForward)]
    if cuts:
        state.chunk_rule = rule = f"{AUTO_RULE} ({law})" if isinstance(law, str) else FittingChunk(law)
        for wrapper in layers:
            wrapper.site.chunk_rule = None if isinstance(rule, str) else rule
    if saves and isinstance(law, Law):
        chooser = FittingSaves(1 + max(wrapper.site.index for wrapper in layers), memory_for_saves, law)
        for wrapper in layers:
            wrapper.site.chooser = chooser
    if saves:
        state.saves_rule = law if isinstance(law, str) else None
    return model


patch.__doc__ = patching.patch.__doc__


def _law(model: nn.Module, config: StreamConfig, half: bool) -> Law | str:
    """What a step takes on a GPU, which a CPU's is taken to be like; why not, where it cannot be counted without data.

    Args:
        half: it has to be a step in half precision, which is what is counted.
    """
    if any(is_partitioned(parameter) for parameter in model.parameters()):
        return "parameters that ZeRO-3 has divided cannot be counted"
    if half and not any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        return "weights in half precision would let the device's memory decide"
    offload: Literal["none", "cpu"] = "none" if config.offload == "none" else "cpu"
    fixed = dataclasses.replace(config, saves=config.named_saves, offload=offload, host_memory=None)
    recipe = Recipe("streambp", fixed)
    try:
        skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda", mixers="installed")
        return Law(survey(skeleton, [recipe], accumulating=False, tree=False, timed=False).methods[0])
    except Exception as error:  # a count that fails must not keep a model from training
        return f"a step could not be counted: {type(error).__name__}: {error}"


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def free_memory(device: torch.device) -> float | None:
    """Bytes that a step may take on a device beyond what is allocated now; None where no limit is known."""
    if device.type != "cuda":
        return None
    return USABLE * memory_limit(device) - torch.cuda.memory_allocated(device)


def memory_for_saves(device: torch.device) -> float | None:
    """The same, and on a CPU what a share of the machine's memory leaves."""
    return float(host_limit(None)) if device.type == "cpu" else free_memory(device)
