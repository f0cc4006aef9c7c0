"""A real step beside its prediction, phase by phase: what `streambp profile` prints."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from streambp.admission.stacks import find_stacks
from streambp.config import StreamConfig
from streambp.device import counted_bytes, tells_memory
from streambp.errors import StreamBPError
from streambp.model.patching import Patch, patch, unpatch
from streambp.model.wrappers import LayerForward
from streambp.offload.manager import OffloadManager
from streambp.planner.compose import unroll
from streambp.planner.count import LiveBytes
from streambp.planner.host import UncountedHost
from streambp.planner.skeleton import Device, Skeleton, reduce_layers
from streambp.planner.step import Span, run_step
from streambp.planner.survey import Counter, SurveyRecipe


@dataclasses.dataclass(frozen=True)
class Compared:
    """A phase's peak bytes beyond what was there before the step."""

    phase: str
    predicted: float
    measured: float


def compare_step(
    model: nn.Module, ids: Tensor, config: StreamConfig, chunk_size: int, snapshot: Path | None = None
) -> list[Compared]:
    """Run one streamed step of a model whose gradients are None, and predict it.

    Args:
        ids: [B, T] tokens, also the labels. On an accelerator the allocator's bytes are measured, elsewhere those of live
            storages.
        snapshot: where to write torch's memory snapshot of the step (CUDA; open it at pytorch.org/memory_viz).

    Raises:
        StreamBPError: the model does not stream, or a snapshot was asked for without CUDA.
    """
    device = ids.device
    if snapshot is not None and device.type != "cuda":
        raise StreamBPError("A memory snapshot needs a CUDA device; torch records only what CUDA allocates.")
    recipe = SurveyRecipe("streambp", dataclasses.replace(config, chunk_size=chunk_size))
    target: Device = "cuda" if tells_memory(device) else "cpu"  # the law of the one serves other accelerators
    skeleton = Skeleton(model, torch.float32, None, 16, target, mixers="installed" if target == "cuda" else "torch")
    counter = Counter(skeleton, reduce_layers(skeleton.model), ids.shape[0], "cudnn" if target == "cuda" else None)
    (steps,) = counter.count(recipe, (ids.shape[1], chunk_size), accumulate=False)
    predicted, _ = unroll(steps, counter.reduced)
    spans = _measured(model, ids, recipe, snapshot)
    names = [span.name if span.layer is None else f"{span.name} {span.layer}" for span in spans]
    known = {phase.name: phase.peak for phase in predicted}
    return [Compared(name, known[name], span.peak) for name, span in zip(names, spans, strict=True) if name in known]


def _measured(model: nn.Module, ids: Tensor, recipe: SurveyRecipe, snapshot: Path | None) -> list[Span]:
    assert recipe.config is not None
    layers = max((stack.layers for stack in find_stacks(model).stacks), key=len)
    patch(model, recipe.config)
    told = tells_memory(ids.device)
    if not told:
        uncount_host(model)

    def loss() -> Tensor:
        value: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return value

    count = AllocatedBytes(ids.device) if told else LiveBytes()
    try:
        loss().backward()  # what happens once in a layer's life (probes, traces) is over
        model.zero_grad(set_to_none=True)
        if snapshot is not None:
            torch.cuda.memory._record_memory_history()
        spans = run_step(model, layers, loss, count)
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
    finally:
        model.zero_grad(set_to_none=True)
        unpatch(model)
    return spans


def uncount_host(model: nn.Module) -> None:
    """Keep the host memory of a patched CPU model's offloading out of a count of its storages."""
    installed: Patch = model._streambp  # type: ignore[assignment]
    sites = [wrapper.site for wrapper in installed.state.wrappers if isinstance(wrapper, LayerForward)]
    if sites and sites[0].offloader is not None:
        budget = None if sites[0].config.gpu_memory is None else int(sites[0].config.gpu_memory)
        manager = OffloadManager(None, "raise", len(sites), budget, engine=UncountedHost(torch.device("cpu")))
        for site in sites:
            site.offloader = manager


class AllocatedBytes(contextlib.AbstractContextManager["AllocatedBytes"]):
    """The bytes of an accelerator's allocator beyond those at the start, in place of tracked storages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = counted_bytes(device, "allocated")

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def live(self) -> int:
        """Bytes allocated now, less those at the start; freed ones count as negative."""
        return counted_bytes(self._device, "allocated") - self._start

    @property
    def peak(self) -> int:
        """The most bytes that were allocated since `reset_peak`, less those at the start."""
        return counted_bytes(self._device, "peak") - self._start

    def reset_peak(self) -> None:
        """Let the allocator's peak start from the bytes that are allocated now, for the whole process."""
        torch.accelerator.reset_peak_memory_stats(self._device)
