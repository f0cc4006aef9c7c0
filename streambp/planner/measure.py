"""Compare real steps with their predictions, for `streambp profile`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from streambp.config import StreamConfig
from streambp.device import MEMORY_ERRORS, is_accelerator, is_out_of_memory, reports_memory
from streambp.errors import StreamBPError
from streambp.model.last_step import last_step
from streambp.model.patching import install, unpatch
from streambp.model.record import StepRecord
from streambp.model.state import PatchState
from streambp.offload import free_memory
from streambp.offload.manager import OffloadManager
from streambp.planner import auto
from streambp.planner.compose import unroll
from streambp.planner.count import AllocatedBytes, LiveBytes
from streambp.planner.default_step import DefaultStep, predict_default_step
from streambp.planner.host import UncountedHost
from streambp.planner.model_class import counted_stack
from streambp.planner.profile import Setting, bytes_between_steps
from streambp.planner.profile_cache import CountRequest, count_profile
from streambp.planner.skeleton import Device, Skeleton
from streambp.planner.step import run_step
from streambp.planner.survey import STREAMED_RECIPES, UNPATCHED_RECIPE, Counter, SurveyRecipe


@dataclasses.dataclass(frozen=True)
class PhaseComparison:
    """Predicted and measured peak memory of a phase of a training step (the forward or backward of
    a layer, for example), in bytes beyond those in use before the step.

    Attributes:
        phase: the phase's name, such as "head" or "backward 35" (for layer 35).
        predicted: peak bytes, counted on tensors without data.
        measured: peak bytes in the real step.
    """

    phase: str
    predicted: float
    measured: float


def compare_step(
    model: nn.Module,
    ids: Tensor,
    config: StreamConfig,
    chunk_size: int,
    snapshot: Path | None = None,
) -> list[PhaseComparison]:
    """Run one training step under streambp, and return the predicted and the measured peak bytes of
    each phase (the forward or backward of a layer, for example).

    The step is measured by the allocator's bytes on an accelerator, and by the bytes of live
    storages elsewhere. A first step, which is not measured, runs before it. The model is patched
    for both steps, and unpatched again with gradients of None.

    Args:
        model: the model, unpatched; its gradients must be None.
        ids: [B, T] tokens, also used as labels.
        config: settings of the step.
        chunk_size: tokens of a chunk.
        snapshot: path for torch's memory snapshot of the step (CUDA only); None: no snapshot.

    Raises:
        StreamBPError: the model cannot be chunked, or a snapshot was requested without CUDA.
    """
    device = ids.device
    if snapshot is not None and device.type != "cuda":
        raise StreamBPError(
            "A memory snapshot needs a CUDA device; torch records only what CUDA allocates."
        )
    recipe = SurveyRecipe("streambp", dataclasses.replace(config, chunk_size=chunk_size))
    # CUDA's counts apply to other accelerators
    target: Device
    if reports_memory(device):
        target = "cuda"
    else:
        target = "cpu"
    skeleton = Skeleton(
        model,
        torch.float32,
        None,
        16,
        target,
        mixers="installed" if target == "cuda" else "torch",
        fewer=True,
    )
    counter = Counter(
        skeleton, skeleton.reduce(), ids.shape[0], "cudnn" if target == "cuda" else None
    )
    (steps,) = counter.count(recipe, (ids.shape[1], chunk_size), accumulate=False)
    predicted, *_ = unroll(steps, counter.shrunk_model)
    layers = counted_stack(model).layers
    install(model, recipe.config)
    if target == "cpu":
        uncount_host(model)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    try:
        # a first step with the work that is done once for each layer (probes, traces)
        model(**inputs).loss.backward()
        model.zero_grad(set_to_none=True)
        if snapshot is not None:
            torch.cuda.memory._record_memory_history()
        count: LiveBytes | AllocatedBytes
        if target == "cpu":
            count = LiveBytes()
        else:
            count = AllocatedBytes(device)
        spans = run_step(model, layers, lambda: model(**inputs).loss, count)
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
    finally:
        model.zero_grad(set_to_none=True)
        unpatch(model)
    names = [span.name if span.layer is None else f"{span.name} {span.layer}" for span in spans]
    predicted_peaks = {phase.name: phase.peak for phase in predicted}
    rows: list[PhaseComparison] = []
    for name, span in zip(names, spans, strict=True):
        if name in predicted_peaks:
            rows.append(PhaseComparison(name, predicted_peaks[name], span.peak))
    return rows


def compare_default(model: nn.Module, ids: Tensor) -> tuple[DefaultStep, DefaultStep | None] | None:
    """Predict and run a training step of `streambp.patch(model)` without settings, to compare the
    prediction with the measurement. The model is unpatched afterwards.

    A first step is not measured. streambp tests in this step, on random tokens, if the layers can
    be chunked.

    Args:
        model: the model, unpatched; its gradients must be None.
        ids: [B, T] tokens, also used as labels.

    Returns:
        A pair: the prediction, and the measurement or None if the device ran out of memory. None in
            place of the pair if the device does not report free memory, or `predict_default_step`
            does not support the model.
    """
    device = ids.device
    setting = Setting(optimizer=0)
    free = free_memory.free_memory(device)
    if free is None:
        return None
    request = CountRequest(model, device="cuda", mixers="installed", batch_size=ids.shape[0])
    profile = count_profile(request, (UNPATCHED_RECIPE, STREAMED_RECIPES[0]))
    rates = auto.rates_of_device(device)
    weights = bytes_between_steps(profile, setting).weights
    predicted = predict_default_step(profile, ids.shape[1], free + weights, setting, rates)
    if predicted is None:
        return None
    count: LiveBytes | AllocatedBytes
    if reports_memory(device):
        count = AllocatedBytes(device)
    else:
        count = LiveBytes()
    auto.patch(model)
    try:
        _step(model, ids)
        with count:
            count.reset_peak()
            start = time.perf_counter()
            step = _step(model, ids)
            step_seconds = time.perf_counter() - start
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        return predicted, None
    finally:
        unpatch(model)
    fits = step.let_go is None
    peak = weights + count.peak
    return predicted, DefaultStep(step.way, step.chunk_size, fits, step.saved, peak, step_seconds)


def _step(model: nn.Module, ids: Tensor) -> StepRecord:
    """Run forward and backward of a patched model on tokens `ids` [B, T], and set the gradients to
    None. Return streambp's record of the step, which has the chunk size and the saved tensors."""
    try:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if is_accelerator(ids.device):
            torch.accelerator.synchronize(ids.device)
    finally:
        model.zero_grad(set_to_none=True)
    step = last_step(model)
    assert step is not None
    return step


def uncount_host(model: nn.Module) -> None:
    """Replace the object that offloads tensors of a patched CPU model (`OffloadManager`), so that
    the sum of live storages' bytes does not include the offloaded copies. The sum would otherwise
    include the copies, because device and host are both the CPU. Models without offloading stay as
    they are."""
    installed: PatchState = model._streambp  # type: ignore[assignment]
    layer_states = installed.steps.layer_states
    if layer_states and layer_states[0].config.always_moves:
        if layer_states[0].config.gpu_memory is None:
            budget = None
        else:
            budget = int(layer_states[0].config.gpu_memory)
        manager = OffloadManager(
            None, "raise", len(layer_states), budget, engine=UncountedHost(torch.device("cpu"))
        )
        for layer_state in layer_states:
            layer_state.offloader = manager
