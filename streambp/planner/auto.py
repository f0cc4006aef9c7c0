"""`patch` with chunk sizes and saves that the device's memory decides, where that is known (DESIGN.md section 6)."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

import streambp.model.patching as patching
from streambp.admission.stacks import find_stacks
from streambp.chunks import AUTO_RULE, in_one_pass, plan_chunks
from streambp.config import LAST, StreamConfig
from streambp.device import counted_bytes, memory_limit, tells_memory
from streambp.distributed.zero import is_partitioned
from streambp.model.last_step import record_of
from streambp.model.state import PatchState
from streambp.model.unpatched import UnpatchedRuns
from streambp.model.wrappers import LayerForward
from streambp.offload.arena import NO_LIMIT, host_limit
from streambp.offload.fitting import FittingSaves, LayerCost
from streambp.planner.count import StepCount
from streambp.planner.plan import CHUNK_TOKENS
from streambp.planner.profile import Method
from streambp.planner.skeleton import Skeleton, reduce_layers
from streambp.planner.survey import SurveyRecipe, survey

Model = TypeVar("Model", bound=nn.Module)
WORK = 8  # how often a chunk's recomputation and its gradients have what a layer's weights take and give
HOST_SHARE = 0.5  # of a machine's free memory: it is not a step's alone, and running out of it raises no error
FRESH = 0.2  # seconds; looking takes a third of a millisecond
SEEN = 1024  # tokens of the chunks in which layers without data are seen
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

    def at_work(self, chunk: int) -> float:
        """What computing a chunk of so many tokens takes."""
        return chunk * max(phase.per_chunk_token for phase in self.method.first)


@dataclasses.dataclass(frozen=True)
class HostLaw:
    """Bytes that a streamed step without saves takes on a CPU, at most: nothing is counted there, patching is to be quick.

    Args:
        gradients: of all trainable parameters. inputs: of all layers, for a token. work: that computing a chunk takes for
            each of its tokens, with what each weight of the largest layer takes and gives WORK times.
    """

    gradients: float
    inputs: float
    work: float

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[nn.Module]) -> HostLaw:
        """Of a model with these decoder layers."""
        trained = [p for p in model.parameters() if p.requires_grad]
        weights = [[p for p in layer.parameters() if p.dim() > 1] for layer in layers]
        inputs = sum(max((p.shape[-1] * p.itemsize for p in found), default=0) for found in weights)
        work = max((sum((p.shape[-1] + p.shape[-2]) * p.itemsize for p in found) for found in weights), default=0)
        return cls(sum(p.nbytes for p in trained), inputs, WORK * work)

    def __call__(self, tokens: int, chunk: int) -> float:
        """Of so many tokens over all rows, in chunks of `chunk`."""
        return self.gradients + self.inputs * tokens + self.at_work(chunk)

    def at_work(self, chunk: int) -> float:
        """What computing a chunk of so many tokens takes."""
        return self.work * chunk


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
    state.steps.name, state.steps.tell = type(model).__name__, functools.partial(record_of, state)
    cuts = state.config.chunk_size == "auto" and free_memory(device) is not None
    saves = state.config.saves == "auto" and state.offloader is None and (device.type == "cpu" or tells_memory(device))
    layers = [wrapper for wrapper in state.wrappers if isinstance(wrapper, LayerForward)]
    if not layers or not (cuts or saves):
        return model
    law = _law(model, state.config, layers)
    if cuts:
        rule = FittingChunk(law) if isinstance(law, Law) else f"{AUTO_RULE} ({law})"
        state.chunk_rule = rule
        for wrapper in layers:
            wrapper.site.chunk_rule = None if isinstance(rule, str) else rule
    state.saves_rule = law if saves and isinstance(law, str) else None
    if saves and not isinstance(law, str):
        _choose_saves(model, state, layers, law)
    return model


def _choose_saves(model: nn.Module, state: PatchState, layers: list[LayerForward], law: Law | HostLaw) -> None:
    costs: dict[int, LayerCost] = {}
    if isinstance(law, Law):
        costs = _costs(model, state.config, {wrapper.site.index: _device(wrapper.module) for wrapper in layers})
    chooser = FittingSaves(1 + max(wrapper.site.index for wrapper in layers), FreeMemory(), law, costs)
    for wrapper in layers:
        wrapper.site.chooser = chooser
    state.pending.let_go = chooser.let_go
    if state.config.unpatched_runs and not state.config.share_prefixes:
        state.unpatched = UnpatchedRuns(state.config, chooser, [wrapper.site for wrapper in layers])


patch.__doc__ = patching.patch.__doc__


def _law(model: nn.Module, config: StreamConfig, layers: list[LayerForward]) -> Law | HostLaw | str:
    """What a step takes; why it is not known, where it cannot be counted without data."""
    if any(is_partitioned(parameter) for parameter in model.parameters()):
        return "parameters that ZeRO-3 has divided cannot be counted"
    if free_memory(_device(model)) is None:
        return HostLaw.of(model, [wrapper.module for wrapper in layers])
    return counted(model, config)


def counted(model: nn.Module, config: StreamConfig) -> Law | str:
    """What a step in half precision takes on a GPU; why not, where it cannot be counted without data."""
    if not any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        return "weights in half precision would let the device's memory decide"
    offload: Literal["none", "cpu"] = "none" if config.offload == "none" else "cpu"
    saves = tuple(dict.fromkeys(name.partition(LAST)[0] for name in config.named_saves))  # of all layers: at most that
    fixed = dataclasses.replace(config, saves=saves, offload=offload, host_memory=None)
    recipe = SurveyRecipe("streambp", fixed)
    try:
        skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda", mixers="installed")
        return Law(survey(skeleton, [recipe], accumulating=False, tree=False, timed=False).methods[0])
    except Exception as error:  # a count that fails must not keep a model from training
        return f"a step could not be counted: {type(error).__name__}: {error}"


def _costs(model: nn.Module, config: StreamConfig, devices: Mapping[int, torch.device]) -> dict[int, LayerCost]:
    """What each layer may save, by its index: seen in a step of two chunks of a model without data. {} where such a step
    does not run, or has several stacks of layers: then each layer's first step shows it.

    Args:
        devices: of the layers.
    """
    try:
        skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda", mixers="installed")
        if len(find_stacks(skeleton.model).stacks) > 1:
            return {}
        reduced = reduce_layers(skeleton.model.eval())  # without dropout, whose numbers no tensor without data has
        patching.patch(skeleton.model, dataclasses.replace(config, chunk_size=SEEN, saves=(), offload="none"))
        sees = FittingSaves(len(reduced.kept), lambda _: None, Law(Method("", (), "none", False, True, (), (), 0, 0, ())))
        for wrapper in skeleton.model._streambp.state.wrappers:  # type: ignore[union-attr]
            if isinstance(wrapper, LayerForward):
                wrapper.site.chooser = sees
        with skeleton.running(), StepCount(None):
            ids = torch.empty(1, 2 * SEEN, dtype=torch.long)  # [B, T]
            skeleton.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found = sees.learn()
        return {
            index: dataclasses.replace(found[place], device=devices[index])
            for index in range(len(reduced.kinds))
            if (place := reduced.stand_in(index)) in found
        }
    except Exception:  # what layers may save is seen in their first step as well
        return {}


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def free_memory(device: torch.device) -> float | None:
    """Bytes that a step may take on a device beyond what is allocated now; None where no limit is known."""
    if not tells_memory(device):
        return None
    return USABLE * memory_limit(device) - counted_bytes(device, "allocated")


@dataclasses.dataclass
class FreeMemory:
    """Bytes that a step may take on a device; None where no limit is known. On a CPU half of the machine's free memory,
    which is looked up every `FRESH` seconds: that reads files."""

    _host: float | None = None
    _until: float = -math.inf

    def __call__(self, device: torch.device) -> float | None:
        """Now, or on a CPU a moment ago."""
        if device.type != "cpu":
            return free_memory(device)
        now = time.monotonic()
        if now > self._until:
            limit = host_limit(None)
            self._host, self._until = None if limit == NO_LIMIT else HOST_SHARE * limit, now + FRESH
        return self._host
