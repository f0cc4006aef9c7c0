"""`patch`, and the predictions with which its chunk sizes and saves are chosen for the device's
free memory (DESIGN.md section 6)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import itertools
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from streambp.admission.stacks import find_stacks
from streambp.config import LAST_LAYERS_SEPARATOR, StreamConfig
from streambp.device import autocast_dtype, is_accelerator
from streambp.distributed.engines import (
    contents_of,
    engine_ownership,
    full_bytes,
    gradient_bytes,
)
from streambp.distributed.host import engine_host_use
from streambp.instance_forward import PatchedModuleRef
from streambp.known_names import ENGINE_PACKAGES
from streambp.model.installed_patch import find_patch
from streambp.model.patching import install
from streambp.model.state import PatchState
from streambp.offload import free_memory
from streambp.offload.costs import HostStepFigures, LayerCost, MemoryNeed, StepFigures
from streambp.planner import device_parts, stored_counts
from streambp.planner.device_parts import DevicePart, ModelLayout
from streambp.planner.laws import Law, features
from streambp.planner.layer_costs import observed_layer_costs
from streambp.planner.model_class import adds_biases
from streambp.planner.profile import Method, Phase, work
from streambp.planner.seconds import kernels, seconds
from streambp.planner.skeleton import Skeleton
from streambp.planner.step import EMBEDDING_BACKWARD
from streambp.planner.survey import SurveyRecipe, survey
from streambp.rates import DEFAULT_DEVICE, DEVICES, Rates, rates_by_name
from streambp.tensors import full_shape

Model = TypeVar("Model", bound=nn.Module)
T = TypeVar("T")
# bytes of recomputing and differentiating a chunk, as a multiple of the inputs and outputs of a
# layer's weights
WORKSPACE_FACTOR = 8
AUTOCAST_FACTOR = (
    2.0  # float32 weights under autocast: a tensor takes at most twice its half-precision bytes
)
MIN_CHUNK_TOKENS = (
    4096  # tokens of a chunk beside the layers on the device; smaller chunks would be slow
)
OPTIMIZER_BYTES = 12  # bytes for each trained parameter, for an optimizer without state yet
MAX_CACHED_STATES = 64  # maximal number of cached model states, and of cached lengths
BIASED_REASON = "bytes of its position bias are known for batches of one row alone"
HALF_DTYPES = (torch.float16, torch.bfloat16)
# attributes of a parameter that change a step's memory
MEMORY_ATTRIBUTES = ("nbytes", "requires_grad", "dtype", "device")


@dataclasses.dataclass(frozen=True)
class StepNeed(MemoryNeed):
    """Prediction of the device memory, in bytes, that a training step needs if its layers save
    nothing for backward but their inputs. The methods take numbers of tokens over all rows of a
    batch.

    Attributes:
        method: the memory of each part of the step (the backward of a layer, for example), as
            functions of a row's tokens and a chunk's tokens. The bytes were counted on a copy of
            the model without data.
        factor: number by which the counted bytes are multiplied, for autocast; 1.0 without
            autocast.
        casts: bytes of autocast's half-precision copies of weights, added after the multiplication
            by `factor`.
        rows: batch size with which `method` was counted.
        share: fraction of the gradients' bytes that a step adds to a rank's memory; less than 1 if
            an engine (ZeRO, FSDP2) shards gradients.
        gathered: bytes of full weights that an engine with sharded weights (ZeRO-3, FSDP2) gathers
            at once; 0 without such an engine.
        layout: devices of the model's parts, if there are several; None: one device, or unknown.
        part: selects the bytes on a single device, if the model is on several; None: all bytes.
    """

    method: Method
    factor: float = 1.0
    casts: float = 0.0
    rows: int = 1
    share: float = 1.0
    gathered: float = 0.0
    layout: ModelLayout | None = None
    part: DevicePart | None = None
    _bytes_of_layers: dict[tuple[int, int, float], tuple[tuple[float, float], ...]] = (
        dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)
    )
    _needs: dict[tuple[torch.device, ...], StepNeed] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def on_device(self, device: torch.device, costs: Mapping[int, LayerCost]) -> StepNeed:
        """Return the prediction of the bytes on one device, for a model with layers on several
        devices (accelerate's `device_map`). Return this object for other models.
        [Note: parts of a step]

        Args:
            device: the device.
            costs: dict from a layer's index to its device and the bytes of its saved tensors.
        """
        if self.layout is None:
            return self
        key = device, *(cost.device for cost in costs.values())
        if key not in self._needs:
            names = self.method.saves
            part = device_parts.device_part(device, self.layout, costs, self.factor, names)
            self._needs[key] = dataclasses.replace(self, part=part)
        return self._needs[key]

    def bytes_by_layer(
        self, tokens: int, chunk: int, present: float
    ) -> tuple[tuple[float, float], ...]:
        """Return the predicted memory of a step as pairs (index, bytes). While the layers 0 to
        `index` wait for their backward or run it, the step uses at most this number of bytes,
        without saved tensors. The tensors that these layers save must fit in memory beside these
        bytes.

        The index is infinity for forward and the head: no layer's backward has begun. The index is
        -1 for backward of the embedding: every layer's backward has ended.

        Args:
            tokens: tokens of all rows.
            chunk: tokens of a chunk, over all rows.
            present: fraction of the gradients that exist before the step. The bytes are
                interpolated between a step that creates gradients (0) and a step that adds to all
                gradients (1).
        """
        key = tokens, chunk, present
        if key in self._bytes_of_layers:
            return self._bytes_of_layers[key]
        all_tokens = tokens
        tokens, chunk = tokens // self.rows, max(1, chunk // self.rows)
        largest: list[dict[float, float]] = []
        for phases in (self.method.first, self.method.accumulating if present else ()):
            largest.append({})
            step = features(tokens, min(chunk, tokens))
            for phase in phases:
                last_layer = last_unfinished_layer(phase.name)
                size = phase.law.at(step) - (1 - self.share) * phase.gradients
                if self.part is not None:
                    last_layer, size = self.part.of_phase(phase, size, self.share, all_tokens)
                largest[-1][last_layer] = max(largest[-1].get(last_layer, 0.0), size)
        first, accumulating = largest
        if accumulating:
            first = {
                last_layer: (1 - present) * size + present * accumulating.get(last_layer, size)
                for last_layer, size in first.items()
            }
        if len(self._bytes_of_layers) == MAX_CACHED_STATES:
            self._bytes_of_layers.clear()
        bytes_by_layer = self._bytes_of_layers[key] = tuple(
            (last_layer, self.factor * size + self.casts + self.gathered)
            for last_layer, size in first.items()
        )
        return bytes_by_layer

    def chunk_bytes(self, chunk: int) -> float:
        """Return the bytes of device memory that the computation of one chunk of the sequence adds
        to the bytes in use before.

        Args:
            chunk: tokens of the chunk, over all rows.
        """
        return (
            self.factor
            * max(1, chunk // self.rows)
            * max(phase.law.chunk for phase in self.method.first)
        )


def last_unfinished_layer(phase: str) -> float:
    """Return the index of the last layer whose backward has not ended in a phase of a step. The
    result is 35 for the phase "backward 35", in which layer 35's backward runs. Tensors that the
    layers 0 to 35 save are then in memory.

    Args:
        phase: name of the phase, such as "forward 3", "head", "backward 35" or "embedding
            backward".

    Returns:
        -1 if every layer's backward has ended, and infinity if none has begun.
    """
    kind, _, number = phase.rpartition(" ")
    if phase == EMBEDDING_BACKWARD:
        return -1.0
    return float(number) if kind == "backward" and number.isdigit() else math.inf


def upper_bound_of_step(model: nn.Module, layers: Sequence[nn.Module]) -> StepNeed:
    """Return an upper bound for the bytes of a step that is computed chunk by chunk and saves only
    the layers' inputs. The bound is used where a step's bytes cannot be counted: on CPUs, and for
    models that cannot run on tensors without data.

    The bound is the sum of three parts. The first is the gradients: of all parameters, or of the
    largest layer or parameter if the step adds to existing gradients. The second is the inputs of
    all layers. The third is, for each token of a chunk, `WORKSPACE_FACTOR` times the inputs and
    outputs of the largest layer's weight matrices.

    Args:
        model: the patched model.
        layers: the model's decoder layers.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    shapes: list[list[tuple[torch.Size, int]]] = []
    for layer in layers:
        sizes = [(full_shape(p), p.itemsize) for p in layer.parameters()]
        shapes.append([matrix for matrix in sizes if len(matrix[0]) > 1])
    inputs = sum(
        max((shape[-1] * item for shape, item in matrices), default=0) for matrices in shapes
    )
    work = WORKSPACE_FACTOR * max(
        (sum((shape[-1] + shape[-2]) * item for shape, item in matrices) for matrices in shapes),
        default=0,
    )
    parts = [sum(full_bytes(p) for p in layer.parameters() if p.requires_grad) for layer in layers]
    largest = max((*parts, *map(full_bytes, trained)), default=0)
    gradients_at_once = min(sum(map(full_bytes, trained)), largest)
    gradients = max(gradients_at_once, sum(map(gradient_bytes, trained)))
    first, accumulating = (
        (Phase("at most", Law(size, inputs, work)),) for size in (gradients, gradients_at_once)
    )
    return StepNeed(Method("at most", (), "none", False, True, first, accumulating, Law(), ()))


def patch(model: Model, config: StreamConfig | None = None) -> Model:
    """Patch a model in place: its decoder layers are computed in chunks of the sequence, and its
    loss in blocks of the logits.

    After an error the model is as before: unpatched, or with its previous patch.

    Layers that mix tokens outside of their attention (convolutions, recurrences), and cannot be
    chunked, run under gradient checkpointing. The first call of each kind (training or evaluation,
    dtype, arguments) detects such layers, and `describe` names them.

    Args:
        model: a transformers model, or a module that contains one (a PeftModel, for example).
            Changed in place.
        config: settings; `StreamConfig()` if None. A patched model is patched again with these
            settings.

    Returns:
        The same object as `model`.

    Raises:
        UnsupportedModelError: the model has no decoder layers that can be chunked with the
            unpatched model's results.
        StreamBPError: the model is part of a patched model.
        ConfigError: `config` names something that the model does not have, or Liger does not
            support the model.
    """
    install(model, config, ModelStates)
    if "transformers.trainer" in sys.modules:
        # Imported here, because a program without a Trainer does not need its callbacks.
        importlib.import_module("streambp.model.trainer_logs").log_in_new_trainers()
    return model


class ModelStates:
    """Callable that predicts the memory and seconds of a patched model's training steps.
    Predictions are cached for each state of the model: bytes, dtype, device and requires_grad of
    its parameters, and autocast's dtype.

    Args:
        model: the patched model.
        config: its settings.
    """

    def __init__(self, model: nn.Module | PatchedModuleRef, config: StreamConfig) -> None:
        self.home, self.config = (
            model if isinstance(model, PatchedModuleRef) else PatchedModuleRef(model),
            config,
        )
        self._figures: dict[tuple[Any, ...], StepFigures] = {}
        # weights on another device count like weights on this device
        decides = MEMORY_ATTRIBUTES if config.weights == "device" else MEMORY_ATTRIBUTES[:-1]
        self._decides = [operator.attrgetter(name) for name in decides]
        self._last: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        """Return (function, arguments) for copy and pickle. The copy has the same model and
        settings, and no cached predictions."""
        return ModelStates, (self.home, self.config)

    @property
    def model(self) -> nn.Module:
        """Return the module that was passed to `patch`. If the program has deleted this module,
        return the largest remaining module inside it with a replaced forward."""
        module = self.home()
        assert module is not None  # the model calls this function
        return module

    @property
    def installed(self) -> PatchState:
        """Return the state of the patch (`PatchState`: settings, and records of the layers), which
        all replaced forwards of the patched model share."""
        module_and_state = find_patch(self.model)
        assert module_and_state is not None
        return module_and_state[1]

    def __call__(self, device: torch.device) -> tuple[StepFigures, float]:
        """Return the predicted memory and seconds of training steps (`StepFigures`) for the model's
        present state: trained parameters, dtypes, devices and autocast. The second result is the
        fraction of trained parameters, by bytes, whose `.grad` is not None.

        Args:
            device: device of the step.
        """
        parameters = contents_of(self.model)[1]
        cast = autocast_dtype(device.type)
        snapshot = [list(map(decide, parameters)) for decide in self._decides]
        if (
            ENGINE_PACKAGES[0] in sys.modules
        ):  # ZeRO-3 replaces the data of parameters between gathers
            snapshot[0] = list(map(full_bytes, parameters))
        sizes, trains = snapshot[0], snapshot[1]
        born = [p.is_leaf and p.grad is not None for p in itertools.compress(parameters, trains)]
        # comparing is faster than hashing this many values
        if self._last[:3] != (device, cast, snapshot):
            key = device, cast, *map(tuple, snapshot)
            if key not in self._figures:
                if len(self._figures) == MAX_CACHED_STATES:
                    self._figures.clear()
                self._figures[key] = self._count(device)
            self._last = device, cast, snapshot, self._figures[key]
        figures: StepFigures = self._last[3]
        if not any(born):
            return figures, 0.0
        of_trained = list(itertools.compress(sizes, trains))
        return figures, sum(itertools.compress(of_trained, born)) / (sum(of_trained) or 1)

    def _count(self, device: torch.device) -> StepFigures:
        """Return the predicted memory and seconds of training steps (`StepFigures`) for the model's
        present state: trained parameters, dtypes, devices and autocast.

        The prediction comes from a step on a copy of the model with meta tensors, whose bytes and
        FLOPs are added up. If an earlier process has stored these in a file, the file is read
        instead. If such a step is not possible, the memory is the result of `upper_bound_of_step`.

        Args:
            device: device of the step.
        """
        installed = self.installed
        layer_states = list(installed.steps.layer_states)
        upper_bound = upper_bound_of_step(
            self.model, [layer_state.layer for layer_state in layer_states]
        )
        if free_memory.free_memory(device) is None or (
            self.config.chunk_size != "auto" and self.config.always_moves
        ):
            return StepFigures(upper_bound)
        cast = autocast_dtype(device.type)
        wide = cast in HALF_DTYPES and any(
            p.dtype == torch.float32 for p in self.model.parameters()
        )
        share, gathered = gradient_shares(self.model, self.config.towers)
        moves_weights = installed.weights is not None or gathered > 0
        first = {
            layer_state.index: next(layer_state.layer.parameters(), None)
            for layer_state in layer_states
        }
        devices = {}
        for index, p in first.items():
            own_device = torch.device("cpu") if p is None else device_parts.device_of(p)
            devices[index] = device if moves_weights else own_device
        key = stored_counts.key_of(self.model, self.config, cast if wide else None)
        stored = stored_counts.read(key)
        if stored is None or not stored.costs.keys() <= devices.keys():
            law = run_in_thread(lambda: _law(self.model, self.config, cast if wide else None))
            if isinstance(law, str):
                return StepFigures(upper_bound, why=law)
            costs = run_in_thread(
                lambda: _costs(self.model, self.config, devices, cast if wide else None)
            )
            # a failed count of the costs may succeed in a later process
            if costs or len(find_stacks(self.model, self.config.towers).stacks) > 1:
                count = stored_counts.StoredCount(law.method, law.factor, law.casts, costs)
                stored_counts.store(key, count)
        else:
            law = StepNeed(stored.method, stored.factor, stored.casts)
            costs = {}
            for index, cost in stored.costs.items():
                costs[index] = cost._replace(device=devices[index])
        layout = None
        if not moves_weights:
            layers = {layer_state.index: layer_state.layer for layer_state in layer_states}
            layout = device_parts.find_layout(self.model, layers, self.config.towers)
        law = dataclasses.replace(law, share=share, gathered=gathered, layout=layout)
        rates = rates_of_device(device)
        if not law.method.work:
            return StepFigures(law, costs)
        if self.config.may_move and is_accelerator(device):
            on_host = functools.cache(functools.partial(self._count_on_host, law, rates, cast))
        else:
            on_host = None
        pace = seconds_of(law.method, rates)
        return StepFigures(law, costs, pace, rates.products, rates.link, on_host=on_host)

    def _count_on_host(
        self, on_device: StepNeed, rates: Rates, cast: torch.dtype | None
    ) -> HostStepFigures | None:
        """Return predictions for training steps in which all layers' inputs wait in host memory for
        backward. None if such steps cannot run on tensors without data, so that their bytes and
        FLOPs cannot be counted. [Note: host by seconds]

        Args:
            on_device: prediction for steps that move nothing to the host.
            rates: the device's speeds (FLOP/s, bytes/s).
            cast: dtype of autocast; None: autocast is off.
        """
        config = dataclasses.replace(self.config, saves=(), offload="cpu")
        wide = on_device.casts > 0
        key = stored_counts.key_of(self.model, config, cast if wide else None)
        stored = stored_counts.read(key)
        if stored is None:
            law = run_in_thread(lambda: _law(self.model, config, cast if wide else None))
            if isinstance(law, str) or not law.method.work:
                return None
            stored_counts.store(
                key, stored_counts.StoredCount(law.method, law.factor, law.casts, {})
            )
            method = law.method
        else:
            method = stored.method
        need = dataclasses.replace(on_device, method=method)
        set_aside = engine_host_use(self.model).to_come
        return host_figures(need, rates, set_aside=set_aside)

    def room_for_weights(self, device: torch.device, rows: int, length: int) -> float:
        """Return the bytes of device memory that remain for the weights of decoder layers, while a
        step runs that saves only the layers' inputs.

        `StreamConfig(weights="auto")` keeps on the device the weights of the last layers that fit
        in these bytes, and moves all other layers' weights to the host. The result is infinity if
        the free memory is unknown, and 0 if the step's memory is unknown.

        Args:
            device: the device of the step.
            rows: batch size.
            length: tokens of a row. Chunks have `MIN_CHUNK_TOKENS` tokens unless the config sets a
                chunk size.
        """
        model, config = self.model, self.config
        free = free_memory.free_memory(device)
        if free is None:
            return math.inf
        figures, present = self(device)
        if figures.need is None:
            return 0.0
        layers: set[int] = set()
        for layer_state in self.installed.steps.layer_states:
            layers.update(map(id, layer_state.layer.parameters()))
        weights_on_device = 0
        coming = 0
        states = 0
        for p in model.parameters():
            if p.requires_grad:
                coming += p.nbytes if p.device != device else 0
                states += 0 if present else OPTIMIZER_BYTES * p.numel()
            elif p.device == device and id(p) in layers:
                weights_on_device += p.nbytes
        chunk = MIN_CHUNK_TOKENS if config.chunk_size == "auto" else rows * int(config.chunk_size)
        chunk = min(rows * length, chunk)
        return (
            free + weights_on_device - coming - states - figures.need(rows * length, chunk, present)
        )


def gradient_shares(model: nn.Module, towers: bool = False) -> tuple[float, float]:
    """Return two numbers that correct a memory prediction made for one rank with full parameters,
    if an engine (ZeRO-3, FSDP2) shards the parameters. The first is the fraction of the gradients'
    bytes that a step adds to this rank's memory. The second is the bytes of full weights that the
    engine gathers at once. The result is (1, 0) without such an engine.

    The second number is twice the bytes of the largest layer or single parameter.

    Args:
        model: the model.
        towers: True if encoders of images and audio run in chunks, too (`StreamConfig.towers`).
    """
    full = 0
    rank_bytes = 0
    for p in model.parameters():
        if p.requires_grad:
            full += full_bytes(p)
            rank_bytes += gradient_bytes(p)
    if not any(gradient_bytes(p) < full_bytes(p) for p in model.parameters()):
        return 1.0, 0.0
    largest = [0]
    for stack in find_stacks(model, towers).stacks:
        for layer in stack.layers:
            largest.append(sum(map(full_bytes, layer.parameters())))
    head = max(map(full_bytes, model.parameters()))
    return rank_bytes / (full or 1), 2.0 * max(*largest, head)


def seconds_of(method: Method, rates: Rates, rows: int = 1) -> Callable[[int, int], float]:
    """Return a cached function that maps (tokens, tokens of a chunk) to the predicted seconds of a
    step that saves only the layers' inputs. Both arguments are over all rows of the batch.

    Args:
        method: the way to run the step, with its memory and FLOPs, counted on tensors without data.
        rates: the device's speeds (FLOP/s, bytes/s).
        rows: batch size with which `method` was counted.
    """
    return functools.lru_cache(MAX_CACHED_STATES)(
        lambda tokens, chunk: seconds(method, tokens // rows, max(1, chunk // rows), rates).total
    )


def host_figures(
    need: StepNeed, rates: Rates, rows: int = 1, set_aside: int = 0
) -> HostStepFigures:
    """Return predictions for steps that move all layers' inputs to the host, computed from the
    memory and FLOPs of such a step, which were counted on tensors without data.

    Args:
        need: prediction of the step's bytes; `need.method` has the step's FLOPs and copied bytes.
        rates: the device's speeds (FLOP/s, bytes/s).
        rows: batch size with which the step was counted.
        set_aside: bytes of host memory that an engine with CPU offloading (ZeRO-Offload) will
            allocate later, and that saved tensors must not use.
    """

    def parts(tokens: int, chunk: int) -> tuple[float, float, float]:
        length = tokens // rows
        size = max(1, chunk // rows)
        forward = sum(kernels(work(need.method, length, size)["forward"], rates))
        spent = seconds(need.method, length, size, rates)
        return forward, spent.phases["backward"], spent.total

    return HostStepFigures(need, parts, rates.products, rates.forward, rates.link, set_aside)


def run_in_thread(work: Callable[[], T]) -> T:
    """Return `work()`, run in a new thread so that autograd, autocast and dispatch modes of the
    current thread do not apply. `work` runs a training step on tensors without data, to count its
    bytes and FLOPs.

    The state of torch's default random generator is restored afterwards.
    """
    random_state = torch.default_generator.get_state()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    finally:
        torch.default_generator.set_state(random_state)


def rates_of_device(device: torch.device) -> Rates:
    """Return a device's speeds (FLOP/s, bytes/s), found by its name, to predict the seconds of
    steps; default values for an unknown device."""
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    else:
        name = ""
    return rates_by_name(name) or DEVICES[DEFAULT_DEVICE]


def _skeleton(model: nn.Module, cast: torch.dtype | None) -> Skeleton:
    """Return a copy of the model with meta tensors (`Skeleton`). Training steps run on the copy to
    count their memory and FLOPs, as they would be on a GPU with the kernel packages that are
    installed here. Weights get the dtype `cast`, to which autocast casts float32 weights; None:
    weights keep their dtypes."""
    skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda", mixers="installed", fewer=True)
    if cast is not None:
        skeleton.model.to(cast)
    return skeleton


def _law(model: nn.Module, config: StreamConfig, cast: torch.dtype | None) -> StepNeed | str:
    """Return the predicted bytes of a training step on a GPU (`StepNeed`), as functions of a row's
    and a chunk's tokens, for a batch of one row. The step is run on a copy of the model with meta
    tensors. If this is impossible, return the reason as text.

    Args:
        model: the patched model.
        config: the patch's settings; each layer saves its input and the tensors that `config.saves`
            names.
        cast: dtype to which autocast casts float32 weights; None: autocast is off.
    """
    offload: Literal["none", "cpu"] = "cpu" if config.always_moves else "none"
    # counted as if all layers saved them: an upper bound
    saves = tuple(
        dict.fromkeys(name.partition(LAST_LAYERS_SEPARATOR)[0] for name in config.named_saves)
    )
    fixed = dataclasses.replace(
        config,
        saves=saves,
        offload=offload,
        host_memory=None,
        gpu_memory=None if offload == "none" else config.gpu_memory,
        weights="device",
    )
    if adds_biases(model):
        # Bytes of a bias for all pairs grow with the square of a row, and not of a batch's tokens.
        return BIASED_REASON
    recipe = SurveyRecipe("streambp", fixed)
    try:
        method = survey(_skeleton(model, cast), [recipe], tree=False).methods[0]
    except Exception as error:  # a failed count must not prevent training
        return f"a step could not be counted: {type(error).__name__}: {error}"
    if cast is None:
        return StepNeed(method)
    stacks = find_stacks(model, config.towers).stacks
    largest = max(
        sum(p.numel() for p in layer.parameters()) for stack in stacks for layer in stack.layers
    )
    head = max(p.numel() for p in model.parameters())
    return StepNeed(method, AUTOCAST_FACTOR, cast.itemsize * (largest + head))


def _costs(
    model: nn.Module,
    config: StreamConfig,
    devices: Mapping[int, torch.device],
    cast: torch.dtype | None,
) -> dict[int, LayerCost]:
    """Return a dict from layer index to the tensors that the layer may save for backward: their
    bytes, and the FLOPs of computing the tensors anew. Return {} if a step of the model cannot run
    on meta tensors.

    Args:
        model: the patched model.
        config: the patch's settings.
        devices: device of each layer, by layer index.
        cast: dtype to which autocast casts float32 weights; None: autocast is off. Under autocast
            the layers' inputs stay in float32, so their bytes count twice.
    """
    try:
        costs, _ = observed_layer_costs(_skeleton(model, cast), config, devices)
    except Exception:  # the layers' first step shows these costs as well
        return {}
    if cast is not None:
        for index, layer_cost in costs.items():
            costs[index] = layer_cost._replace(
                cost=dataclasses.replace(layer_cost.cost, x=2 * layer_cost.cost.x), graph=0.0
            )
    if engine_ownership(model).weights:  # a graph would keep the weights gathered
        for index, layer_cost in costs.items():
            costs[index] = layer_cost._replace(graph=0.0)
    return {
        index: layer_cost._replace(device=devices[index]) for index, layer_cost in costs.items()
    }
