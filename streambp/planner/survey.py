"""Counts the steps of a model under several methods and puts them down as a `Profile`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from streambp.admission.stacks import find_stacks, states_argument
from streambp.attention.kernels import K_BLOCK, MATH
from streambp.config import StreamConfig
from streambp.errors import StreamBPError
from streambp.model.patching import Patch, patch, unpatch
from streambp.model.wrappers import LayerForward
from streambp.offload.arena import Arena
from streambp.offload.engines import Engine, SynchronousEngine
from streambp.offload.manager import OffloadManager
from streambp.offload.stores import MicroBatch
from streambp.offload.transfers import Entry, Holding
from streambp.planner.compose import Point, Totals, fit, solve, unroll
from streambp.planner.count import Shapes, StepCount
from streambp.planner.mixers import assumed
from streambp.planner.profile import Group, Method, Node, Phase, Profile
from streambp.planner.skeleton import Reduced, Skeleton, reduce_layers
from streambp.planner.step import Span, fused_attention, fused_head_loss, run_step
from streambp.planner.tree import module_tree

CHUNKS = (2048, 8192)  # chunk sizes at which streamed steps are counted for lines that serve any length
TILED_CHUNKS = (1024, 2048)  # where attention is plain matrix products: their tiles are small, and there are many


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to run a step. config: streambp's; None: unpatched, with checkpointing and a fused head or without."""

    name: str
    config: StreamConfig | None = None
    checkpointing: bool = False
    fused_head: bool = False


def streamed(saves: tuple[str, ...] = (), offload: str = "none") -> Recipe:
    """A streamed recipe; its name says how."""
    parts = [f"saves {'+'.join(saves)}"] if saves else []
    parts += ["offload"] if offload != "none" else []
    return Recipe(f"streambp {', '.join(parts)}".strip(), StreamConfig(saves=saves, offload=offload))  # type: ignore[arg-type]


PLAIN = Recipe("plain")
CHECKPOINTING = Recipe("checkpointing", checkpointing=True)
CHECKPOINTING_HEAD = Recipe("checkpointing, fused head", checkpointing=True, fused_head=True)
LEAST = 1  # a gpu_memory that leaves nothing of a prefix on the device but the tiles at work
STREAMED = (
    *(streamed(saves, offload) for offload in ("none", "cpu") for saves in ((), ("attn_out",), ("attn_out", "kv"))),
    Recipe("streambp offload, keys on the host", StreamConfig(offload="cpu", gpu_memory=LEAST)),
)


class UncountedHost(SynchronousEngine):
    """Copies at once, like a CPU's; host memory stays out of the count of the device's."""

    def __init__(self, device: torch.device, skeleton: Skeleton | None = None) -> None:
        super().__init__(device)
        self._skeleton = skeleton

    def host_buffer(self, size: int) -> Tensor:
        """Allocated while the modes that count are off."""
        with _disable_current_modes(), self._skeleton.active() if self._skeleton is not None else contextlib.nullcontext():
            return torch.empty(size, dtype=torch.uint8)


class CountingManager(OffloadManager):
    """Counts the host's bytes of a step: what waits for backward, and at most of one layer's keys and values."""

    def __init__(self, layers: int = 0, gpu_memory: int | None = None, engine: UncountedHost | None = None) -> None:
        super().__init__(None, "raise", layers, gpu_memory, engine=engine)
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._waiting = self._prefix = 0

    def on_host(self) -> int:
        """Bytes of host memory that the step has needed so far."""
        return self._waiting + self._prefix

    def place(
        self, holding: Holding, engine: Engine, tensor: Tensor, optional: bool, foreign: bool = False
    ) -> Entry | None:
        """`OffloadManager.place`, counted: saved tensors add up, of prefixes the largest counts."""
        entry = super().place(holding, engine, tensor, optional, foreign)
        if isinstance(holding, MicroBatch):
            self._waiting += tensor.nbytes
        else:
            self._prefix = max(self._prefix, holding.stack.used)
        return entry


def survey(
    skeleton: Skeleton,
    recipes: Sequence[Recipe],
    batch_size: int = 1,
    at: Point | None = None,
    kernels: str = "cudnn",
    accumulating: bool = True,
    tree: bool = True,
) -> Profile:
    """Count every recipe on the skeleton, whose layers are reduced for it.

    Args:
        at: a length and chunk size that the lines must fit best; None: lines for any length.
        accumulating, tree: count the second regime and the modules as well.

    Raises:
        StreamBPError: a streamed step cannot be counted without data (experts that look at what was routed to them, say).
    """
    groups = parameter_groups(skeleton.model)
    unsharded = _gathered_at_once(skeleton)
    reduced = reduce_layers(skeleton.model)
    counter = Counter(skeleton, reduced, batch_size, kernels if skeleton.device == "cuda" else None)
    methods, left_out = [], []
    for recipe in recipes:
        try:
            methods.append(_method(counter, recipe, at, accumulating))
        except Exception as error:  # whatever a model's own forward raises on tensors without data
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            if isinstance(error, StreamBPError):
                raise
            if recipe.config is not None:
                raise StreamBPError(
                    f"A streamed step of {type(skeleton.causal_lm).__name__} could not be counted without data ({reason}). "
                    "Run one and measure it (torch.cuda.max_memory_allocated)."
                ) from error
            left_out.append(f"{recipe.name} ({reason})")
    dtype = str(next(skeleton.model.parameters()).dtype).removeprefix("torch.")
    name = type(skeleton.causal_lm).__name__
    modules = module_tree(skeleton, reduced, batch_size) if tree and not left_out else Node("", name, 1, 0, 0.0)
    shape = (name, dtype, len(reduced.kinds), batch_size)
    mixers = assumed(skeleton.model, skeleton.mixers)
    return Profile(*shape, groups, unsharded, tuple(methods), modules, tuple(left_out), mixers)


def parameter_groups(model: nn.Module) -> tuple[Group, ...]:
    """Dense parameters and those of experts; each parameter once, tied or not."""
    groups = []
    for name in ("dense", "expert"):
        mine = [p for path, p in model.named_parameters() if (".experts." in path) == (name == "expert")]
        trained = [p for p in mine if p.requires_grad]
        sizes = [sum(p.numel() for p in mine), sum(p.nbytes for p in mine)]
        if mine:
            groups.append(Group(name, sizes[0], sizes[1], sum(p.numel() for p in trained), sum(p.nbytes for p in trained)))
    return tuple(groups)


def _gathered_at_once(skeleton: Skeleton) -> int:
    """Bytes that ZeRO-3 holds whole: two layers, the running and the next, or the head."""
    layers = max((stack.layers for stack in find_stacks(skeleton.model).stacks), key=len)
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
    head = sum(p.nbytes for p in skeleton.causal_lm.get_output_embeddings().parameters())
    return max(2 * largest, head)


@dataclasses.dataclass
class Counter:
    """Counts single steps of a skeleton with reduced layers."""

    skeleton: Skeleton
    reduced: Reduced
    batch_size: int
    kernels: str | None

    def __post_init__(self) -> None:
        self.shapes = Shapes(self.skeleton.mode)

    @property
    def carries_states(self) -> bool:
        """Whether a layer hands states from chunk to chunk."""
        stacks = find_stacks(self.skeleton.model).stacks
        return any(states_argument(layer) is not None for stack in stacks for layer in stack.layers)

    def fused(self, recipe: Recipe) -> bool:
        """Whether a fused kernel attends, as on a GPU in half precision without softcap."""
        if recipe.config is None:
            return True
        count = StepCount(None)
        with self._prepared(recipe, 8), self.skeleton.running(), count:
            ids = torch.empty(self.batch_size, 16, dtype=torch.long)  # [B, T]
            self.skeleton.model(input_ids=ids, labels=ids, use_cache=False)
        return count.attention_flops > 0

    def count(self, recipe: Recipe, point: Point, accumulate: bool = True) -> list[list[Span]]:
        """The spans of a first step and, if asked for, of a second that adds to its gradients."""
        model, skeleton = self.skeleton.model, self.skeleton
        layers = max((stack.layers for stack in find_stacks(model).stacks), key=len)
        with skeleton.active():
            ids = torch.empty(self.batch_size, point[0], dtype=torch.long)  # [B, T]

        def loss() -> Tensor:
            if recipe.fused_head:
                return fused_head_loss(skeleton.causal_lm, ids)
            result: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            return result

        model.zero_grad(set_to_none=True)
        with self._prepared(recipe, point[1]) as manager, skeleton.running():
            steps = []
            for _ in range(1 + accumulate):
                manager.begin()
                steps.append(run_step(model, layers, loss, StepCount(self.kernels, self.shapes), manager.on_host))
        return steps

    @contextlib.contextmanager
    def _prepared(self, recipe: Recipe, chunk_size: int) -> Any:
        """The model as the recipe wants it; yields what counts the host's bytes."""
        model, causal_lm = self.skeleton.model, self.skeleton.causal_lm
        with contextlib.ExitStack() as stack:
            if recipe.config is None:
                if self.skeleton.device == "cuda":
                    stack.enter_context(fused_attention(model))
                if recipe.checkpointing:
                    causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
                    stack.callback(causal_lm.gradient_checkpointing_disable)
                yield CountingManager()
                return
            patch(model, dataclasses.replace(recipe.config, chunk_size=chunk_size))
            stack.callback(unpatch, model)
            yield self._uncounted_manager(recipe)

    def _uncounted_manager(self, recipe: Recipe) -> CountingManager:
        if recipe.config is None or recipe.config.offload == "none":
            return CountingManager()
        device = torch.device("meta" if self.skeleton.mode is None else "cpu")
        installed: Patch = self.skeleton.model._streambp  # type: ignore[assignment]
        wrappers = [w for w in installed.state.wrappers if isinstance(w, LayerForward)]
        engine = UncountedHost(device, self.skeleton)
        budget = None if recipe.config.gpu_memory is None else int(recipe.config.gpu_memory)
        manager = CountingManager(len(wrappers), budget, engine)
        manager._arena = Arena(2**62, engine.host_buffer)  # no limit, whatever this machine has
        for wrapper in wrappers:
            wrapper.site.offloader = manager
        return manager


def _method(counter: Counter, recipe: Recipe, at: Point | None, accumulating: bool) -> Method:
    chunked = recipe.config is not None
    points = _points(at, chunked, counter.fused(recipe), counter.carries_states)
    counted = [counter.count(recipe, point, accumulating) for point in points]
    regimes: list[tuple[Phase, ...]] = []
    totals: tuple[Totals, ...] = ()
    for number in range(1 + accumulating):
        phases, totals = zip(*(unroll(steps[number], counter.reduced) for steps in counted), strict=True)
        regimes.append(fit(points, phases, counter.reduced))
    if not accumulating:
        regimes.append(())
    host = solve(points, [total.host for total in totals])
    config = recipe.config or StreamConfig()
    return Method(
        recipe.name,
        config.named_saves,
        config.offload,
        config.gpu_memory is not None,
        chunked,
        regimes[0],
        tuple(dataclasses.replace(phase, gradients=0.0) for phase in regimes[1]),
        host[0],
        host[1],
        *_flops(points, totals),
        host[3],
    )


def _flops(points: Sequence[Point], totals: Sequence[Totals]) -> tuple[float, float]:
    """Linear FLOPs a token and attention FLOPs a token squared, at the longest of the points."""
    (length, _), total = max(zip(points, totals, strict=True), key=lambda pair: pair[0][0])
    return total.linear_flops / length, total.attention_flops / length**2


def _points(at: Point | None, chunked: bool, fused: bool, states: bool) -> tuple[Point, ...]:
    """Where to count: lengths beyond the attention kernels' block, or up to `at` if that is shorter.

    States are kept for each chunk: a third chunk size tells that number from the chunk size.
    """
    small, large = CHUNKS if fused else TILED_CHUNKS
    k_block = K_BLOCK if fused else MATH.tiling.k_block or 0
    if at is not None and (fused or at[1] < large):
        small, large = max(1, at[1] // 2), at[1]
    length = max(4 * large, large + k_block)
    length = length if at is None else min(at[0], length)
    if not chunked:
        return (length, 0), (length + large, 0)
    points = (length, large), (length, small), (length + large, large)
    return (*points, (length, 2 * small if 2 * small < large else max(1, small // 2))) if states else points
