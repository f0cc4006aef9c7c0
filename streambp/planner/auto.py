"""`patch` with chunk sizes and saves that the device's memory decides, where that is known (DESIGN.md section 6)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

import streambp.model.patching as patching
from streambp.admission.stacks import find_stacks
from streambp.alive import Home
from streambp.config import LAST, StreamConfig
from streambp.device import allocator_count, autocast_dtype, counted_bytes, memory_limit, tells_memory
from streambp.distributed.engines import contents_of
from streambp.distributed.zero import is_partitioned
from streambp.known_names import SHARD_HERE
from streambp.model.last_step import record_of
from streambp.model.state import PatchState
from streambp.model.unpatched import UnpatchedRuns
from streambp.offload.arena import NO_LIMIT, host_limit
from streambp.offload.costs import Figures, LayerCost, Need
from streambp.offload.link import LinkBudget
from streambp.offload.policy import SavesPolicy
from streambp.planner.laws import Law, features
from streambp.planner.layer_costs import seen_costs
from streambp.planner.profile import Method, Phase
from streambp.planner.seconds import seconds
from streambp.planner.skeleton import Skeleton
from streambp.planner.step import EMBEDDING_BACKWARD
from streambp.planner.survey import SurveyRecipe, survey
from streambp.rates import DEFAULT, DEVICES, Rates

Model = TypeVar("Model", bound=nn.Module)
T = TypeVar("T")
WORK = 8  # how often a chunk's recomputation and its gradients have what a layer's weights take and give
WIDE = 2.0  # float32 weights under autocast: no tensor takes more than twice what it takes in half precision
HOST_SHARE = 0.5  # of a machine's free memory: it is not a step's alone, and running out of it raises no error
FRESH = 0.2  # seconds; looking takes a third of a millisecond
BESIDE = 4096  # tokens of the chunks that have room beside the layers that stay: fewer would be slow
OPTIMIZER = 12  # bytes a trained parameter, of an optimizer that has not begun
USABLE, LEFT = 0.95, 2**30  # the rest, or as many bytes, is left to fragmentation and other libraries
REMEMBERED = 64  # states of a model, and lengths
HALF = (torch.float16, torch.bfloat16)
DECIDES = ("nbytes", "requires_grad", "dtype", "device")  # of a parameter, on what a step takes


@dataclasses.dataclass(frozen=True)
class StepNeed(Need):
    """Bytes that a streamed step without saves takes, as counted.

    Args:
        method: the model's streamed step. factor, casts: a step takes so many times as much as that, and bytes besides.
        rows: that it was counted with; tokens are those of all rows.
    """

    method: Method
    factor: float = 1.0
    casts: float = 0.0
    rows: int = 1
    _asked: dict[tuple[int, int, float], tuple[tuple[float, float], ...]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def by_layer(self, tokens: int, chunk: int, present: float) -> tuple[tuple[float, float], ...]:
        """Of so many tokens over all rows, in chunks of `chunk`; between both regimes of gradients by the part of them that
        are there."""
        key = tokens, chunk, present
        if key in self._asked:
            return self._asked[key]
        tokens, chunk = tokens // self.rows, max(1, chunk // self.rows)
        largest: list[dict[float, float]] = []
        for phases in (self.method.first, self.method.accumulating if present else ()):
            largest.append({})
            step = features(tokens, min(chunk, tokens))
            for phase in phases:
                upto, size = waiting(phase.name), phase.law.at(step)
                largest[-1][upto] = max(largest[-1].get(upto, 0.0), size)
        first, again = largest
        if again:
            first = {upto: (1 - present) * size + present * again.get(upto, size) for upto, size in first.items()}
        if len(self._asked) == REMEMBERED:
            self._asked.clear()
        found = self._asked[key] = tuple((upto, self.factor * size + self.casts) for upto, size in first.items())
        return found

    def at_work(self, chunk: int) -> float:
        """What computing a chunk of so many tokens takes."""
        return self.factor * max(1, chunk // self.rows) * max(phase.law.chunk for phase in self.method.first)


def waiting(phase: str) -> float:
    """The last layer that waits for its backward in a phase; -1: none does."""
    kind, _, number = phase.rpartition(" ")
    if phase == EMBEDDING_BACKWARD:
        return -1.0
    return float(number) if kind == "backward" and number.isdigit() else math.inf


def bound(model: nn.Module, layers: Sequence[nn.Module]) -> StepNeed:
    """What a streamed step without saves takes, at most, of a model with these decoder layers: for CPUs, where nothing is
    counted, and for models that cannot be counted.

    They are gradients (once they are there, those of the largest part that is computed at a time); inputs of all layers;
    and at work what each weight of the largest layer takes and gives for each token of a chunk, WORK times.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = [[p for p in layer.parameters() if p.dim() > 1] for layer in layers]
    inputs = sum(max((p.shape[-1] * p.itemsize for p in found), default=0) for found in weights)
    work = WORK * max((sum((p.shape[-1] + p.shape[-2]) * p.itemsize for p in found) for found in weights), default=0)
    parts = [sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in layers]
    gradients = sum(getattr(p, SHARD_HERE, p).nbytes for p in trained)
    once = min(gradients, max((*parts, *(p.nbytes for p in trained)), default=0))
    first, again = ((Phase("at most", Law(size, inputs, work)),) for size in (gradients, once))
    return StepNeed(Method("at most", (), "none", False, True, first, again, Law(), ()))


def patch(model: Model, config: StreamConfig | None = None) -> Model:
    model = patching.patch(model, config)
    state: PatchState = model._streambp  # type: ignore[assignment]
    state.steps.name, state.steps.tell = type(model).__name__, functools.partial(record_of, state)
    sizes, saves = state.config.chunk_size == "auto", state.config.saves == "auto"
    on_device = state.config.offload == "auto" and state.config.gpu_memory is None
    link = LinkBudget(state.offloader, on_device) if state.offloader is not None and (saves or on_device) else None
    states = ModelStates(state.home, state.config)
    if state.weights is not None and state.config.weights == "auto":
        state.weights.room = states.room_for_weights
    if not state.steps.sites or not (sizes or saves or link is not None):
        return model
    number = 1 + max(site.index for site in state.steps.sites)
    state.policy = policy = SavesPolicy(number, FreeMemory(), states, sizes, saves, link)
    for site in state.steps.sites:
        site.chunk_rule = policy.chunk if sizes else None
        site.chooser = policy if saves or link is not None else None
    if saves and state.offloader is None:
        state.pending.let_go = policy.let_go
        if state.config.unpatched_runs and state.config.rows != "packed" and state.config.weights != "cpu":
            state.unpatched = UnpatchedRuns(state.config, policy, state.steps)
    return model


patch.__doc__ = patching.patch.__doc__


class ModelStates:
    """What is known of a model's steps, in each of its states, counted when it is first asked for. [Note: saves that fit]

    Args:
        model: that was given to `patch`. config: as it is streamed.
    """

    def __init__(self, model: nn.Module | Home, config: StreamConfig) -> None:
        self.home, self.config = model if isinstance(model, Home) else Home(model), config
        self._known: dict[tuple[Any, ...], Figures] = {}
        decides = DECIDES if config.weights == "device" else DECIDES[:-1]  # others are counted as if they were there
        self._decides = [operator.attrgetter(name) for name in decides]
        self._last: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        """A copied or pickled model is counted anew."""
        return ModelStates, (self.home, self.config)

    @property
    def model(self) -> nn.Module:
        """What was given to `patch`, or is left of it."""
        found = self.home()
        assert found is not None  # which calls this
        return found

    @property
    def installed(self) -> PatchState:
        """Its patch's."""
        found = patching.patch_of(self.model)
        assert found is not None
        return found[1]

    def __call__(self, device: torch.device) -> tuple[Figures, float]:
        """What is known of steps on a device as the model is now, and the part of its gradients that are there."""
        parameters = contents_of(self.model)[1]
        cast = autocast_dtype(device.type)
        look = [list(map(found, parameters)) for found in self._decides]
        sizes, trains = look[0], look[1]
        born = [p.is_leaf and p.grad is not None for p in itertools.compress(parameters, trains)]
        if self._last[:3] != (device, cast, look):  # hashing so many values takes longer
            key = device, cast, *map(tuple, look)
            if key not in self._known:
                if len(self._known) == REMEMBERED:
                    self._known.clear()
                self._known[key] = self._count(device)
            self._last = device, cast, look, self._known[key]
        known: Figures = self._last[3]
        if not any(born):
            return known, 0.0
        of_trained = list(itertools.compress(sizes, trains))
        return known, sum(itertools.compress(of_trained, born)) / (sum(of_trained) or 1)  # ZeRO-3 leaves nothing in place

    def _count(self, device: torch.device) -> Figures:
        if any(is_partitioned(parameter) for parameter in self.model.parameters()):
            return Figures(why="parameters that ZeRO-3 has divided cannot be counted")
        installed = self.installed
        sites = list(installed.steps.sites)
        most = bound(self.model, [site.layer for site in sites])
        if free_memory(device) is None or (self.config.chunk_size != "auto" and self.config.offload != "none"):
            return Figures(most)
        cast = autocast_dtype(device.type)
        wide = cast in HALF and any(p.dtype == torch.float32 for p in self.model.parameters())
        law = in_a_thread(lambda: _law(self.model, self.config, cast if wide else None))
        if isinstance(law, str):
            return Figures(most, why=law)
        moved = installed.weights is not None
        first = {site.index: next(site.layer.parameters(), None) for site in sites}
        places = {index: device if moved else getattr(p, "device", torch.device("cpu")) for index, p in first.items()}
        costs = in_a_thread(lambda: _costs(self.model, self.config, places, cast if wide else None))
        rates = rates_here(device)
        if not law.method.work:
            return Figures(law, costs)
        return Figures(law, costs, seconds_of(law.method, rates), rates.products, rates.link)

    def room_for_weights(self, device: torch.device, rows: int, length: int) -> float:
        """Bytes that a device has for the weights of layers beside a step of `rows` rows of `length` tokens without saves,
        in chunks of BESIDE tokens where none are given; infinitely many where no limit is known, none where no step could
        be counted. [Note: layers that stay]"""
        model, config = self.model, self.config
        free = free_memory(device)
        if free is None:
            return math.inf
        known, present = self(device)
        if known.need is None:
            return 0.0
        layers = {id(p) for site in self.installed.steps.sites for p in site.layer.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        there = sum(p.nbytes for p in model.parameters() if p.device == device and id(p) in layers and not p.requires_grad)
        coming = sum(p.nbytes for p in trained if p.device != device)
        states = 0 if present else sum(OPTIMIZER * p.numel() for p in trained)
        chunk = min(rows * length, BESIDE if config.chunk_size == "auto" else rows * int(config.chunk_size))
        return free + there - coming - states - known.need(rows * length, chunk, present)


def seconds_of(method: Method, rates: Rates, rows: int = 1) -> Callable[[int, int], float]:
    """Of a step without saves, by tokens of all rows and those of a chunk; those of the last lengths are remembered."""
    return functools.lru_cache(REMEMBERED)(
        lambda tokens, chunk: seconds(method, tokens // rows, max(1, chunk // rows), rates).total
    )


def in_a_thread(work: Callable[[], T]) -> T:
    """What `work` returns, without what acts in the running thread: autocast, no_grad, modes, hooks on saved tensors.
    Random numbers go on where they were."""
    before = torch.default_generator.get_state()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    finally:
        torch.default_generator.set_state(before)


def rates_here(device: torch.device) -> Rates:
    """Of a device by its name; of the one that is not known those of the default."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
    found = [known for known in DEVICES if known.replace("RTX", "RTX ") in name or known in name]
    return DEVICES[max(found, key=len, default=DEFAULT)]


def _skeleton(model: nn.Module, cast: torch.dtype | None) -> Skeleton:
    skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda", mixers="installed", fewer=True)
    if cast is not None:
        skeleton.model.to(cast)
    return skeleton


def _law(model: nn.Module, config: StreamConfig, cast: torch.dtype | None) -> StepNeed | str:
    """What a step takes on a GPU; why it is not known, where it cannot be counted without data.

    Args:
        cast: what autocast makes of float32 weights; None: it is off, or has nothing to cast.
    """
    offload: Literal["none", "cpu"] = "none" if config.offload == "none" else "cpu"
    saves = tuple(dict.fromkeys(name.partition(LAST)[0] for name in config.named_saves))  # of all layers: at most that
    fixed = dataclasses.replace(config, saves=saves, offload=offload, host_memory=None, weights="device")
    recipe = SurveyRecipe("streambp", fixed)
    try:
        method = survey(_skeleton(model, cast), [recipe], tree=False).methods[0]
    except Exception as error:  # a count that fails must not keep a model from training
        return f"a step could not be counted: {type(error).__name__}: {error}"
    if cast is None:
        return StepNeed(method)
    found = find_stacks(model).stacks
    largest = max(sum(p.numel() for p in layer.parameters()) for stack in found for layer in stack.layers)
    head = max(p.numel() for p in model.parameters())
    return StepNeed(method, WIDE, cast.itemsize * (largest + head))


def _costs(
    model: nn.Module, config: StreamConfig, devices: Mapping[int, torch.device], cast: torch.dtype | None
) -> dict[int, LayerCost]:
    """What each layer may save, by its index; {} where a model without data does not show it.

    Args:
        devices: of the layers. cast: as in `_law`; the residual stream stays in float32 then.
    """
    try:
        found, _ = seen_costs(_skeleton(model, cast), config, devices)
    except Exception:  # what layers may save is seen in their first step as well
        return {}
    if cast is not None:
        for index, one in found.items():
            found[index] = one._replace(cost=dataclasses.replace(one.cost, x=2 * one.cost.x), graph=0.0)
    return {index: one._replace(device=devices[index]) for index, one in found.items()}


def free_memory(device: torch.device) -> float | None:
    """Bytes that a step may take on a device beyond what is allocated now, by the driver; None where no limit is known, as
    with allocators that do not tell."""
    if not tells_memory(device):
        return None
    try:
        limit, allocated = memory_limit(device), counted_bytes(device, "allocated")
    except RuntimeError:
        return None
    return min(USABLE * limit, limit - LEFT) - allocated


@dataclasses.dataclass
class FreeMemory:
    """Bytes that a step may take on a device; None where no limit is known.

    The driver is asked once, then torch's own count tells what went since, until `forget`. On a CPU half of the machine's
    free memory, which is looked up every `FRESH` seconds: that reads files.
    """

    _limits: dict[torch.device, float | None] = dataclasses.field(default_factory=dict)
    _host: float | None = None
    _until: float = -math.inf

    def __call__(self, device: torch.device) -> float | None:
        """Now, or on a CPU a moment ago."""
        if device not in self._limits:
            free = free_memory(device)
            self._limits[device] = None if free is None else free + _allocated(device)
        limit = self._limits[device]
        if limit is not None:
            return limit - _allocated(device)
        if device.type != "cpu":
            return None
        now = time.monotonic()
        if now > self._until:
            found = host_limit(None)
            self._host, self._until = None if found == NO_LIMIT else HOST_SHARE * found, now + FRESH
        return self._host

    def forget(self) -> None:
        """Ask the driver when it is next wanted: others may have taken memory, or given some back."""
        self._limits.clear()

    def sees_others(self, device: torch.device) -> bool:
        """Whether what other processes take of it meanwhile shows: then a lack of it is no sign of a wrong law."""
        return self._limits.get(device) is None

    def retries(self, device: torch.device) -> int:
        """How often the allocator has given its cache back to the driver for want of memory."""
        return allocator_count(device, "num_alloc_retries") if self._limits.get(device) is not None else 0


def _allocated(device: torch.device) -> int:
    return counted_bytes(device, "allocated") if tells_memory(device) else 0
