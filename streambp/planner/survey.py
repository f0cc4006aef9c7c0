"""Count the memory and FLOPs of a model's training steps: run them on tensors without data, in
several ways (`SurveyRecipe`), and return the costs as a `Profile`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.stacks import find_stacks, kind_of, states_argument
from streambp.attention.kernels import K_BLOCK, MATH
from streambp.config import LAST_LAYERS_SEPARATOR, StreamConfig
from streambp.errors import ConfigError, StreamBPError
from streambp.known_names import CHECKPOINTING_SWITCHES
from streambp.model.patching import install, unpatch
from streambp.model.state import PatchState
from streambp.offload.arena import Arena
from streambp.planner.compose import PhaseMemory, fit, unroll
from streambp.planner.count import ShapeCache, StepCount
from streambp.planner.fused_layers import Kernels
from streambp.planner.host import CountingManager, UncountedHost
from streambp.planner.kernels import CountedCalls, launched_kernels
from streambp.planner.laws import PhaseLaws, Point, fit_bytes, fit_work
from streambp.planner.mixers import assumed_kernels
from streambp.planner.model_class import assumptions, counted_stack, inputs_of
from streambp.planner.packed_weights import bytes_of, parameters_of
from streambp.planner.profile import (
    CONTEXT_PARALLEL,
    ULYSSES,
    Heads,
    Method,
    Node,
    ParameterGroup,
    Phase,
    Profile,
)
from streambp.planner.sample_points import (
    SAMPLE_CHUNKS,
    TILED_SAMPLE_CHUNKS,
    biased_points_for,
    points_for,
    points_of_more_chunks,
)
from streambp.planner.skeleton import ShrunkModel, Skeleton
from streambp.planner.splits import SplitCount, lines_of_keys, split_of, split_over
from streambp.planner.step import Span, counted_head, fused_attention, run_step
from streambp.planner.tree import module_tree
from streambp.planner.work import Work
from streambp.progress import progress_line


@dataclasses.dataclass(frozen=True)
class SurveyRecipe:
    """Way to run a training step whose memory and FLOPs are to be counted: unpatched, with gradient
    checkpointing, or streamed with some settings.

    Attributes:
        name: name of the way, for example "checkpointing"; also the `Method`'s name.
        config: streambp's settings; None: an unpatched step.
        checkpointing: True for unpatched steps with gradient checkpointing.
        fused_head: True for unpatched steps with a loss that never has all logits in memory.
        split: kind of sequence sharding: "DeepSpeed Ulysses", "context parallelism", or "" if each
            rank has full sequences.
    """

    name: str
    config: StreamConfig | None = None
    checkpointing: bool = False
    fused_head: bool = False
    split: str = ""


def streamed_recipe(
    saves: tuple[str, ...] = (), offload: str = "none", split: str = ""
) -> SurveyRecipe:
    """Return the recipe (way to run a step) of a step under streambp, named after the settings.

    Args:
        saves: names of the tensors that every layer saves for backward, as in `StreamConfig.saves`.
        offload: the value of `StreamConfig.offload`.
        split: kind of sequence sharding: "DeepSpeed Ulysses", "context parallelism", or "" if each
            rank has full sequences.

    Raises:
        ConfigError: the saves are restricted to some layers.
    """
    if any(LAST_LAYERS_SEPARATOR in name for name in saves):
        raise ConfigError(
            f"saves is {saves!r}; a count has all layers save the same. Leave "
            f"{LAST_LAYERS_SEPARATOR} and what "
            "follows out."
        )
    if split:
        parts = [split.removeprefix("DeepSpeed ")]
    else:
        parts = []
    parts += [f"saves {'+'.join(saves)}"] if saves else []
    parts += ["offload"] if offload != "none" else []
    config = StreamConfig(saves=saves, offload=offload)  # type: ignore[arg-type]
    return SurveyRecipe(f"streambp {', '.join(parts)}".strip(), config, split=split)


UNPATCHED_RECIPE = SurveyRecipe("plain")
CHECKPOINTING_RECIPE = SurveyRecipe("checkpointing", checkpointing=True)
CHECKPOINTING_HEAD_RECIPE = SurveyRecipe(
    "checkpointing, fused head", checkpointing=True, fused_head=True
)
MIN_GPU_MEMORY = 1  # a gpu_memory that leaves only the current tiles of a prefix on the device
STREAMED_RECIPES = (
    *(
        streamed_recipe(saves, offload)
        for offload in ("none", "cpu")
        for saves in ((), ("attn_out",), ("attn_out", "kv"))
    ),
    SurveyRecipe(
        "streambp offload, keys on the host",
        StreamConfig(saves=(), offload="cpu", gpu_memory=MIN_GPU_MEMORY),
    ),
)


SPLIT_RECIPES = {
    by: tuple(
        streamed_recipe(saves, offload, by) for offload in ("none", "cpu") for saves in all_saves
    )
    for by, all_saves in (
        (ULYSSES, ((), ("attn_out",), ("attn_out", "kv"))),
        (CONTEXT_PARALLEL, ((), ("attn_out",))),
    )
}


def _chunks_to_count(recipe: SurveyRecipe) -> int:
    """Return roughly the number of chunks that must run to count the costs of a recipe (a way to
    run a step). The progress bar advances in proportion to this number."""
    if recipe.config is None:
        return 2
    return 15 if recipe.config.gpu_memory is None else 30


def survey(
    skeleton: Skeleton,
    recipes: Sequence[SurveyRecipe],
    batch_size: int = 1,
    at: Point | None = None,
    kernels: str = "cudnn",
    accumulating: bool = True,
    tree: bool = True,
    timed: bool = True,
    on_progress: Callable[[str, float], None] | None = None,
) -> Profile:
    """Count the memory and FLOPs of a model's training steps, which run on meta or fake tensors.
    Return these costs (`Profile`), with one `Method` for each recipe.

    Args:
        skeleton: the model. Layers are removed, until a few of each structure remain.
        recipes: the ways to run a step, such as gradient checkpointing.
        batch_size: number of rows.
        at: (T, C), row length and chunk size for which predictions must be accurate; None: any.
        kernels: attention kernels on a GPU, whose workspaces are counted.
        accumulating: True: also count steps that add to existing gradients. False: count only steps
            that create their gradients.
        tree: True: also count each module's parameters and activations.
        timed: True: also count more (T, C), which predictions of seconds at other lengths need.
        on_progress: progress callback with the next recipe's name and the fraction of the work
            done. None: a line on the terminal says that a step is counted.

    Raises:
        StreamBPError: a step under streambp cannot run on meta or fake tensors, for example because
            experts read values.
    """
    groups = parameter_groups(skeleton.model)
    unsharded = _gathered_bytes(skeleton)
    extra_fields = _more_fields(skeleton)
    shrunk_model = skeleton.reduce()
    counter = Counter(
        skeleton, shrunk_model, batch_size, kernels if skeleton.device == "cuda" else None
    )
    methods = []
    left_out = []
    refused_splits = set[str]()
    chunks = [_chunks_to_count(recipe) for recipe in recipes]
    for number, recipe in enumerate(recipes):
        if recipe.split in refused_splits or (recipe.fused_head and skeleton.head is None):
            continue
        if on_progress is not None:
            on_progress(recipe.name, sum(chunks[:number]) / sum(chunks))
        display = (
            progress_line("counting a step") if on_progress is None else contextlib.nullcontext()
        )
        try:
            with pause_garbage_collection(), display:
                methods.append(_count_method(counter, recipe, at, accumulating, timed))
        except Exception as error:  # any error of a model's own forward on tensors without data
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                :200
            ]
            if recipe.split and any(peer.config and not peer.split for peer in recipes):
                left_out.append(f"{recipe.split} ({reason})")
                refused_splits.add(recipe.split)
                continue
            if isinstance(error, StreamBPError):
                raise
            if recipe.config is not None:
                raise StreamBPError(
                    f"A streamed step of {type(skeleton.language_model).__name__} could not be counted "
                    f"without data ({reason}). Run a step and measure its memory "
                    "(torch.cuda.max_memory_allocated)."
                ) from error
            left_out.append(f"{recipe.name} ({reason})")
    dtype = str(next(skeleton.model.parameters()).dtype).removeprefix("torch.")
    name = type(skeleton.language_model).__name__
    modules = Node("", name, 1, 0, 0.0)
    if tree and len(refused_splits) == len(left_out):
        modules = module_tree(skeleton, shrunk_model, batch_size)
    shape = (name, dtype, len(shrunk_model.kinds), batch_size, groups, unsharded)
    mixers = assumed_kernels(skeleton.model, skeleton.mixers)
    return Profile(*shape, _with_floors(methods), modules, tuple(left_out), mixers, **extra_fields)


def _with_floors(methods: Sequence[Method]) -> tuple[Method, ...]:
    """Return the methods (ways to run a step), with lower bounds for the costs of those that read
    keys and values from the host. The bounds are the costs with keys and values on the device.

    Args:
        methods: the methods with their counted memory and FLOPs.
    """
    on_device: dict[Any, Method] = {}
    for method in methods:
        if method.chunked and not method.prefix_on_host:
            on_device[method.saves, method.offload, method.split] = method
    bounded = []
    for method in methods:
        floor = on_device.get((method.saves, method.offload, method.split))
        if method.prefix_on_host and floor is not None:
            laws = {}
            for part in floor.work:
                laws[part.name] = part.laws
            parts = []
            for part in method.work:
                parts.append(dataclasses.replace(part, floors=laws.get(part.name, ())))
            method = dataclasses.replace(method, work=tuple(parts))
        bounded.append(method)
    return tuple(bounded)


def _more_fields(skeleton: Skeleton) -> dict[str, Any]:
    """Return some fields of a model's `Profile` (its counted memory and FLOPs), as a dict by field
    name.

    "frozen" and "trained" are each layer's bytes of weights that may move to host memory, and
    "decoded" is the bytes of a layer's dequantized 4-bit weights. The three are missing for weights
    that cannot move (8-bit weights and torchao's). "assumed" has notes on assumptions about a model
    that is no causal language model. "without_adapters" has the names of Linears that peft refuses
    to adapt, or that do not exist.

    Args:
        skeleton: the model with all its layers, without data.
    """
    model = skeleton.model
    has_head = skeleton.head is not None
    texts = assumptions(model, _layers_of(model), has_head, skeleton.encoder_len)
    return {**skeleton.on_host(), "assumed": texts, "without_adapters": skeleton.without_adapters}


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Context manager that disables Python's garbage collector, because unreachable tensors would
    otherwise be freed at random moments while memory is counted."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _gathered_bytes(skeleton: Skeleton) -> int:
    """Return the most bytes of full parameters that ZeRO-3 has on a rank at a time: those of two
    layers (the current and the next), or those of the head. The peak of a step under ZeRO-3
    includes these bytes."""
    layers = max((stack.layers for stack in find_stacks(skeleton.model).stacks), key=len)
    largest = max(_bytes_of([*layer.parameters()]) for layer in layers)
    head = skeleton.head
    if head is None:
        return 2 * largest
    return max(2 * largest, _bytes_of([*head.parameters()]))


def _layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the decoder layers of all backbones of a model; an encoder-decoder has two backbones."""
    for stack in find_stacks(model).stacks:
        yield from stack.layers


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the total bytes of parameters [...] in the real model. `tensors` are their copies
    without data. The bytes of a quantized weight include its quantization statistics."""
    return sum(map(bytes_of, tensors))


def parameter_groups(model: nn.Module) -> tuple[ParameterGroup, ...]:
    """Return the numbers and bytes of a model's dense parameters, and of its experts' parameters if
    there are any. The bytes of weights, gradients and optimizer state are computed from these
    `ParameterGroup`s. Tied parameters count once."""
    groups = []
    for name in ("dense", "expert"):
        members = []
        for path, p in model.named_parameters():
            if (".experts." in path) == (name == "expert"):
                members.append(p)
        trained = []
        for p in members:
            if p.requires_grad:
                trained.append(p)
        if members:
            sizes = (sum(map(parameters_of, members)), _bytes_of(members))
            trained_sizes = (sum(map(torch.numel, trained)), _bytes_of(trained))
            groups.append(ParameterGroup(name, *sizes, *trained_sizes))
    return tuple(groups)


Works = dict[Point, dict[str, Work]]  # work of a full step, by point and kind of phase


@dataclasses.dataclass
class Counter:
    """Runs single training steps of a model on meta or fake tensors, to count their memory and
    FLOPs. The model has only one or a few layers of each structure, which represent all its layers.

    Attributes:
        skeleton: the model, on meta or fake tensors.
        shrunk_model: the indices of these layers, and the layers that they represent.
        batch_size: number of rows.
        kernels: attention kernels whose workspaces are counted, "cudnn" or "flash"; None: no
            workspaces are counted.
        growth: additional bytes of each phase (a layer's backward, for example) if a chunked step
            adds to existing gradients; [] before the first step is counted.
        layers: the decoder layers of all stacks.
        phase_layers: the layers whose forwards and backwards are phases.
    """

    skeleton: Skeleton
    shrunk_model: ShrunkModel
    batch_size: int
    kernels: str | None

    def __post_init__(self) -> None:
        self.shapes = ShapeCache(self.skeleton.mode)
        self.calls = CountedCalls(self.shapes)
        self._fused: bool | None = None
        self._unread: list[dict[Any, Any]] = []  # results of each layer's trials
        self._more_points: dict[tuple[str, tuple[str, ...], int], tuple[Works, Works]] = {}
        self._heads: dict[str, list[Heads]] = {}
        self.growth: list[PhaseMemory] = []
        # A search takes the time of a few layers' forward.
        self.layers = [*_layers_of(self.skeleton.model)]
        self.phase_layers = counted_stack(self.skeleton.model).layers

    def uses_fused_kernel(self, recipe: SurveyRecipe) -> bool:
        """True if a fused attention kernel would run in the recipe's step. False: matrix products.
        A fused kernel on a GPU requires half precision, no softcap, no bias of T5's kind, and no
        keys picked by an indexer (sparse attention). A recipe is a way to run a step."""
        if recipe.config is None:
            return True
        # for few tokens all keys are picked
        if any(kind_of(layer).attention.picks_keys for layer in self.layers):
            return False
        if self._fused is None:  # saves and offload change no kernel
            count = StepCount(None)
            with self._prepare(recipe, 8), self.skeleton.running(), count:
                ids = torch.empty(self.batch_size, 16, dtype=torch.long)  # [B, T]
                self.skeleton.loss(ids).backward()
                if not recipe.split:
                    steps = self.skeleton.model._streambp.steps  # type: ignore[union-attr]
                    self._unread = [layer_state.tests.unread for layer_state in steps.layer_states]  # type: ignore[union-attr]
            attends = count.work.forward + count.work.backward > 0
            # T5's cross-attention may be fused, but biased attention is not.
            self._fused = attends and not self.skeleton.adds_biases
        return self._fused

    def more_points(self, recipe: SurveyRecipe, size: int, counts: Works) -> Works:
        """Run a step at two more points (T, C), tokens of a row and of a chunk, on tensors without
        data. Return its FLOPs and bytes, as a dict from the point to a dict from the part of the
        step ("forward" of all layers, for example) to `Work`. Costs at any length are fitted
        through these and other points.

        The first point has two chunks of `size` tokens. The second has three chunks of 2 `size`
        tokens, or four with sharded sequences.

        Recipes that save the same tensors differ only by their copies to the host, and share one
        run at the two points. The result for a later recipe adds the difference from the first
        recipe, which is known at a point in the `counts` of both. Bytes of the difference are
        scaled with T, and dispatches (operations that torch starts) with the number of chunks.

        Args:
            recipe: the way to run the step, such as under streambp with some saved tensors.
            size: tokens of a chunk at the first of the two points.
            counts: the recipe's own costs at other points, in the form of the result.
        """
        assert recipe.config is not None
        key = recipe.split, recipe.config.named_saves, size
        if key not in self._more_points:
            points = (2 * size, size), ((8 if recipe.split else 6) * size, 2 * size)
            steps = {}
            for point in points:
                steps[point] = self.count(recipe, point, accumulate=False)[0]
            counted_works: Works = {}
            for point, spans in steps.items():
                counted_works[point] = unroll(spans, self.shrunk_model)[2]
            self._more_points[key] = (counts, counted_works)
        first, more_work = self._more_points[key]
        shared = next(point for point in counts if point in first)
        works: Works = {}
        for point, work in more_work.items():
            tokens = point[0] / shared[0]
            chunks = tokens * shared[1] / point[1]
            works[point] = {}
            for name, part in work.items():
                difference = counts[shared][name].plus(first[shared][name], -1)
                moved_bytes = part.traffic + tokens * difference.traffic
                dispatches = part.dispatches + chunks * difference.dispatches
                works[point][name] = part._replace(traffic=moved_bytes, dispatches=dispatches)
        return works

    def heads(self, recipe: SurveyRecipe) -> list[Heads]:
        """Return the different numbers of heads (`Heads`) among the model's attention layers, as
        recorded in a forward with the recipe's kind of sequence sharding. A recipe is a way to run
        a step.

        Raises:
            StreamBPError: the model's sequences cannot be sharded; the message has the reason.
        """
        if recipe.split not in self._heads:
            heads: set[Heads] = set()
            shared = split_over(recipe.split, 1, self.batch_size, 16, heads)
            with shared, self._prepare(recipe, 8), self.skeleton.running(), StepCount(None):
                ids = torch.empty(self.batch_size, 16, dtype=torch.long)  # [B, T]
                self.skeleton.loss(ids)
            self._heads[recipe.split] = sorted(heads)
        return self._heads[recipe.split]

    def ranks(self, recipe: SurveyRecipe) -> int:
        """Return the number of ranks that a counted step with sequence sharding assumes to share a
        sequence. This is 2 under context parallelism. Under Ulysses it is the smallest number from
        2 among which all heads can be shared evenly, or 1 if there is none."""
        if recipe.split != ULYSSES:
            return 2
        heads = self.heads(recipe)
        for ranks in range(2, 1 + min(h.queries for h in heads)):
            if all(
                h.queries % ranks == 0 and (h.keys % ranks == 0 or ranks % h.keys == 0)
                for h in heads
            ):
                return ranks
        return 1

    def count(
        self, recipe: SurveyRecipe, point: Point, accumulate: bool = True
    ) -> list[list[Span]]:
        """Run a step that creates its gradients, and a second step that adds to them, on tensors
        without data. Return the memory and costs of their phases, for example of a layer's forward.

        Args:
            recipe: the way to run the step.
            point: (T, C), tokens of a row and of a chunk.
            accumulate: True: run both steps. False: run only the first.

        Returns:
            One list for each step, with the step's phases (`Span`) in order.
        """
        model = self.skeleton.model
        skeleton = self.skeleton
        with skeleton.active():
            ids = torch.empty(self.batch_size, point[0], dtype=torch.long)  # [B, T]

        def loss() -> Tensor:
            """Run the forward, and return the loss as a scalar tensor without a value."""
            if recipe.fused_head:
                language_model = skeleton.language_model
                hidden = language_model.base_model(
                    **inputs_of(model, ids, skeleton.encoder_len), use_cache=False
                ).last_hidden_state.flatten(0, 1)  # [B T, h]
                # [B T], all counted as labelled
                rows = torch.arange(hidden.shape[0], device=hidden.device)
                return counted_head(hidden[rows], language_model.get_output_embeddings().weight)
            return skeleton.loss(ids)

        model.zero_grad(set_to_none=True)
        shared: Any = contextlib.nullcontext()
        kind: type[StepCount] = StepCount
        if recipe.split:
            shared = split_over(recipe.split, self.ranks(recipe), self.batch_size, point[0])
            kind = SplitCount
        with (
            shared,
            self._prepare(recipe, point[1]) as manager,
            skeleton.running(),
            launched_kernels(self.calls),
        ):
            steps = []
            for _ in range(1 + accumulate):
                manager.begin()
                steps.append(
                    run_step(
                        model,
                        self.phase_layers,
                        loss,
                        kind(self.kernels, self.shapes),
                        manager.on_host,
                    )
                )
        return steps

    @contextlib.contextmanager
    def _prepare(self, recipe: SurveyRecipe, chunk_size: int) -> Any:
        """Context manager in which the model is prepared for a step: patched with `chunk_size`, or
        with gradient checkpointing, as the recipe (way to run a step) requests. The yielded
        `CountingManager` counts the host bytes of the step."""
        model = self.skeleton.model
        language_model = self.skeleton.language_model
        with contextlib.ExitStack() as stack:
            if recipe.config is None:
                if self.skeleton.device == "cuda":
                    stack.enter_context(fused_attention(model))
                if recipe.checkpointing:
                    switch = next(
                        start
                        for start in CHECKPOINTING_SWITCHES
                        if hasattr(language_model, f"{start}enable")
                    )
                    getattr(language_model, f"{switch}enable")({"use_reentrant": False})
                    stack.callback(getattr(language_model, f"{switch}disable"))
                yield CountingManager()
                return
            kernels: Kernels
            if self.skeleton.own_adapters:
                kernels = "own"
            else:
                kernels = recipe.config.kernels
            install(
                model, dataclasses.replace(recipe.config, chunk_size=chunk_size, kernels=kernels)
            )
            stack.callback(unpatch, model)
            installed: PatchState = model._streambp  # type: ignore[assignment]
            layer_states = installed.steps.layer_states
            if not recipe.split:
                for layer_state, unread in zip(layer_states, self._unread, strict=False):
                    layer_state.tests.unread.update(unread)
            if not recipe.config.always_moves:
                yield CountingManager()
                return
            engine = UncountedHost(
                torch.device("meta" if self.skeleton.mode is None else "cpu"), self.skeleton
            )
            if recipe.config.gpu_memory is None:
                budget = None
            else:
                budget = int(recipe.config.gpu_memory)
            manager = CountingManager(len(layer_states), budget, engine)
            # no limit, independent of this machine
            manager.arena = Arena(2**62, engine.host_buffer)
            for layer_state in layer_states:
                layer_state.offloader = manager
            yield manager


def _growth(phases: list[PhaseMemory], accumulating: list[PhaseMemory]) -> list[PhaseMemory]:
    """Return the additional bytes of each phase of a step (a layer's backward, for example) if the
    step adds to existing gradients instead of creating them. Only steps that create gradients are
    counted at other row lengths, and `_add_growth` adds these bytes.

    Args:
        phases: the phases of a step that creates its gradients.
        accumulating: phases of the step that adds to existing gradients, in the same order.
    """
    growth = []
    for phase, total in zip(phases, accumulating, strict=True):
        start = total.start - phase.start
        growth.append(PhaseMemory(phase.name, start, total.peak - phase.peak, total.gradients))
    return growth


def _add_growth(phases: list[PhaseMemory], growth: list[PhaseMemory]) -> list[PhaseMemory]:
    """Return the memory of each phase (a layer's backward, for example) of a step that adds to
    existing gradients, computed from a step of the same length that creates gradients.

    Args:
        phases: the phases of the step that creates its gradients.
        growth: additional bytes of each phase, the result of `_growth` at any length.
    """
    result = []
    for phase, growth_part in zip(phases, growth, strict=True):
        max_bytes = {
            keys: other_bytes + growth_part.peak
            for keys, other_bytes in phase.max_other_bytes.items()
        }
        start = phase.start + growth_part.start
        result.append(
            PhaseMemory(
                phase.name, start, phase.peak + growth_part.peak, growth_part.gradients, max_bytes
            )
        )
    return result


def _points_of_shards(at: Point | None, fused: bool) -> tuple[Point, ...]:
    """Return the lengths and chunk sizes (T, C) at which steps with sequence sharding are counted.
    A shard, a rank's part of a sequence, has two parts of complete chunks.

    Args:
        at: (T, C) for which predictions must be accurate; None: any.
        fused: True if a fused kernel computes attention; False for plain matrix products.
    """
    large = SAMPLE_CHUNKS[1]
    if at is not None:
        large = 4 * math.ceil(at[1] / 4)
    elif not fused:
        large = TILED_SAMPLE_CHUNKS[1]
    return (4 * large, large), (2 * large, large // 2), (6 * large, large)


def _fit_groups(
    groups: Sequence[tuple[Point, ...]],
    phases: Sequence[Sequence[PhaseMemory]],
    shrunk_model: ShrunkModel,
    biases: bool,
) -> tuple[Phase, ...]:
    """Return the memory of each phase of a step as functions of T (a row's tokens) and C (a
    chunk's). Each group of points gives one function, and the larger value counts. () without
    phases.

    Args:
        groups: (T, C) of the counted steps, in one or several groups.
        phases: the phases of each counted step, in the order of the points.
        shrunk_model: says which layers of the full model have the same structure.
        biases: True for models whose attention adds T5's bias. The functions of the last group then
            have a part that grows with T^2 or T C.
    """
    fitted: list[Phase] = []
    start = 0
    if not phases:
        return ()
    for group in groups:
        part = phases[start : start + len(group)]
        fitted += fit(group, part, shrunk_model, biases and group is groups[-1])
        start += len(group)
    return tuple(fitted)


def _moves_attention_outputs(recipe: SurveyRecipe) -> bool:
    """True if a recipe (way to run a step) saves attention outputs, but not keys and values, and
    moves the outputs to the host."""
    config = recipe.config
    if config is None or config.offload == "none" or recipe.split:
        return False
    return config.named_saves == ("attn_out",)


def _groups_of_points(
    counter: Counter, recipe: SurveyRecipe, at: Point | None, fused: bool
) -> tuple[tuple[Point, ...], ...]:
    """Return the row lengths and chunk sizes (T, C) at which a step is counted. Memory is fitted
    through each group of points, and the larger value counts.

    Args:
        counter: counts single steps.
        recipe: the way to run the step.
        at: (T, C) for which predictions must be accurate; None: any.
        fused: True if a fused kernel computes attention.
    """
    chunked = recipe.config is not None
    if recipe.split:
        return (_points_of_shards(at, fused),)
    if counter.skeleton.adds_biases:
        return biased_points_for(at, chunked, counter.skeleton.device == "cuda")
    tiles = recipe.config is not None and recipe.config.gpu_memory is not None
    states = any(states_argument(layer) is not None for layer in counter.layers)
    points = points_for(at, chunked, fused, states, tiles)
    if _moves_attention_outputs(recipe):
        more_chunks = points_of_more_chunks(points, at)
        if more_chunks:
            return points, more_chunks
    return (points,)


def _fit_all_work(
    counter: Counter, all_work: Works, number: int, fused: bool, ranks: int
) -> tuple[PhaseLaws, ...]:
    """Return functions that predict the FLOPs, traffic and copies of each part of a step, such as
    the forward of all layers. The variables are the full sequence's length and a chunk's tokens.

    Args:
        counter: the object that counted the steps.
        all_work: dict from (T, C) of a counted step to the costs of each part of the step.
        number: number of points, from the first on, through which copies to the host are fitted.
        fused: True if a fused kernel computes attention.
        ranks: number of ranks that share a sequence, over which the costs are summed.
    """
    lengths = [(ranks * tokens, chunk) for tokens, chunk in all_work]
    k_block = K_BLOCK if fused else MATH.tiling.k_block or K_BLOCK
    skeleton = counter.skeleton
    parts = []
    for name in next(iter(all_work.values())):
        over_ranks = [Work().plus(costs[name], ranks) for costs in all_work.values()]
        parts.append(
            fit_work(
                name, lengths, over_ranks, k_block, number, skeleton.encoder, skeleton.adds_biases
            )
        )
    return tuple(parts)


def _count_method(
    counter: Counter, recipe: SurveyRecipe, at: Point | None, accumulating: bool, timed: bool
) -> Method:
    """Count a step at several (T, C), tokens of a row and of a chunk, on tensors without data.
    Return a `Method`: one way to run a step, with its memory and FLOPs as functions of T and C.

    Args:
        counter: counts single steps.
        recipe: the way to run the step, such as gradient checkpointing.
        at: (T, C) for which predictions must be accurate; None: any.
        accumulating: True: also count a step that adds to existing gradients; False: do not.
        timed: True: also count more (T, C), which predictions of seconds at other lengths need.
    """
    chunked = recipe.config is not None
    fused = counter.uses_fused_kernel(recipe)
    tiles = recipe.config is not None and recipe.config.gpu_memory is not None
    ranks = counter.ranks(recipe) if recipe.split else 1  # raises if the model cannot be sharded
    biases = counter.skeleton.adds_biases
    groups = _groups_of_points(counter, recipe, at, fused)
    points = tuple(itertools.chain(*groups))
    # FLOPs and traffic are fitted through the first group, which is the most accurate one.
    points_of_work = points if biases else groups[0]
    first: list[list[PhaseMemory]] = []
    more_phases: list[list[PhaseMemory]] = []
    hosts = list[list[float]]()
    counted = Works()
    links = tuple[float, ...]()
    growth = counter.growth if chunked else []
    for point in points:
        index = points.index(point)
        if index < len(first):  # The point is in both groups.
            first.append(first[index])
            hosts.append(hosts[index])
            more_phases += more_phases[index : index + 1]
            continue
        steps = counter.count(recipe, point, accumulating and not growth)
        phases, on_host, works, sent = unroll(steps[0], counter.shrunk_model)
        if point in points_of_work:
            counted[point] = works
        links = links or sent
        first.append(phases)
        hosts.append([on_host])
        if accumulating:
            # existing gradients add the same bytes at every point and in every streamed method
            if not growth:
                growth = _growth(phases, unroll(steps[1], counter.shrunk_model)[0])
            more_phases.append(_add_growth(phases, growth))
    if chunked:
        counter.growth = growth
    split = None
    if recipe.config is not None and recipe.split:
        heads = counter.heads(recipe)
        saves = recipe.config.named_saves
        split = split_of(recipe.split, heads, links, ranks, points[0][0], saves)
        lengths_of_shards = [tokens for tokens, _ in points]
        first = lines_of_keys(first, split, lengths_of_shards, ranks)
        more_phases = lines_of_keys(more_phases, split, lengths_of_shards, ranks)
    regimes: list[tuple[Phase, ...]] = []
    for at_points in (first, more_phases):
        regimes.append(_fit_groups(groups, at_points, counter.shrunk_model, biases))
    last = len(groups[-1])
    host = fit_bytes(groups[-1], hosts[-last:], biases)[0]._replace(chunk=0.0, tokens_chunk=0.0)
    if chunked and timed and not tiles and not biases:
        more_points = counter.more_points(recipe, points[0][1], counted)
    else:
        more_points = {}
    all_work = counted | {
        point: works for point, works in more_points.items() if point not in counted
    }
    work = _fit_all_work(counter, all_work, len(counted), fused, ranks)
    config = recipe.config or StreamConfig()
    how = (recipe.name, config.named_saves, config.offload, config.gpu_memory is not None, chunked)
    later_phases = tuple(dataclasses.replace(phase, gradients=0.0) for phase in regimes[1])
    return Method(*how, regimes[0], later_phases, host, work, split)
