"""`verify` tests if streaming is exact for a given model.

One batch runs three times: through the streamed model, through the unpatched model, and through the
reference, called the truth. The truth is the unpatched model with the same weights in a wider
dtype, on the host. `verify/verdict.py` judges the distances of the first two from the third.

The truth of a float32 or float64 model is computed in float64, with transformers' inner casts to
float32 (norms, softmax, rotary angles, loss) replaced. A float64 model has these casts with and
without streaming. They are its rounding noise, about 1e-7. The truth of a half-precision model is
computed in float32.

If two experts tie up to rounding, a router can choose different experts in two runs, streamed or
not. The token's gradients then differ completely. If a batch fails and the streamed model chose
other experts than the unpatched one, the batch is undecided and new tokens are drawn. An error in a
layer changes choices in every draw; an error behind all choices changes none. Both are found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streambp.chunks import pick_chunk_size
from streambp.config import StreamConfig
from streambp.device import is_accelerator, reports_memory
from streambp.distributed.engines import engine_of
from streambp.errors import ConfigError, StreamBPError, UnsupportedModelError
from streambp.instance_forward import check_is_module
from streambp.known_names import FUNCTION_OF_NODE, LIGER
from streambp.layer.function import StreamedLayer
from streambp.layer.gradients import nodes_behind
from streambp.model.chosen_kernels import choose_kernels
from streambp.model.describe import describe
from streambp.model.fused_layers import fused_modules
from streambp.model.packed_adapters import packed_adapters_active
from streambp.model.patching import install, unpatch
from streambp.planner.count import AllocatedBytes, LiveBytes
from streambp.verify.choices import CountedChoices
from streambp.verify.comparison import Comparison, MethodResult
from streambp.verify.methods import Method, check_libraries, check_methods, name_of, prepare_method
from streambp.verify.truth import (
    available_memory,
    copy_to_host,
    float64_experts,
    least_precise_dtype,
    lift_casts,
    wide_dtype,
)
from streambp.verify.verdict import (
    NOTABLE_RATIO,
    Distances,
    ParameterError,
    Verification,
    find_problems,
    rate,
)

MAX_BATCHES = 4  # maximal number of batches. [Note: choices]
SEED_STEP = 1_000_003  # step between the seeds of two batches
TIMED_STEPS = 2  # steps of which the faster one counts
MAX_COMPARED_ELEMENTS = 2**24  # elements of a gradient compared in one step
GIB = 2**30
PADDING_NOTE = (
    "the first token after the padding has no label here, streamed or not: padding predicts it, "
    "which reads nothing; streambp gives such a row 0, as sdpa does, eager attention the mean over "
    "all tokens, later ones too"
)

Batch = dict[str, Tensor]
ProgressCallback = Callable[[str, float], None]


def verify(
    model: nn.Module,
    seq_len: int = 512,
    chunk_size: int | None = None,
    saves: tuple[str, ...] = (),
    seed: int = 0,
    left_padding: int = 0,
    said: Callable[[str, float], None] | None = None,
    **fields: Any,
) -> Verification:
    """Compare the gradients of a model that is patched (computed chunk by chunk) with those of the
    unpatched model, on random tokens. Return the verdict: exact or not.

    Args:
        model: an unpatched causal language model on one device. Gradients and training flags are
            restored afterwards. Dropout is off during the test, because it draws other random
            numbers in each chunk.
        seq_len: tokens of the single random row; about a quarter of the tokens have no label.
        chunk_size: must give four chunks or more, of which the last is the shortest; None:
            automatic.
        seed: seed of the random tokens.
        left_padding: number of padding tokens at the start of the row.
        said: progress callback, called with a text and a fraction from 0 to 1; None: no callback.
        saves, fields: settings of the patch, arguments of `StreamConfig`.

    Raises:
        StreamBPError: the model cannot run in chunks, or cannot be judged in this way. Nothing is
            raised if gradients are not exact.
    """
    return compare_methods(
        model, (), seq_len, chunk_size, saves, seed, left_padding, said, **fields
    ).verification


def compare_methods(
    model: nn.Module,
    against: Sequence[Method],
    seq_len: int = 512,
    chunk_size: int | None = None,
    saves: tuple[str, ...] = (),
    seed: int = 0,
    left_padding: int = 0,
    said: Callable[[str, float], None] | None = None,
    **fields: Any,
) -> Comparison:
    """Compare the gradients of a model under streambp, and under other methods (ways to train),
    with the unpatched model's. Return the verdicts.

    Args:
        model: the model, like that of `verify`.
        against: other methods: "unpatched", "checkpointing", "trl" or "liger", or a function. The
            function gets a copy of the model with the same parameters, may change the copy, and
            returns its forward: a function of the model's arguments whose result has a loss.
            Methods are judged like streambp, on the same tokens. Peak memory and seconds of a step
            are measured for streambp and each method, unless `against` is empty.
        seq_len, chunk_size, saves, seed, left_padding, said, fields: arguments of `verify`.

    Raises:
        StreamBPError: the model or a method cannot run, or cannot be judged in this way.
    """
    check_methods(against)
    config = StreamConfig(chunk_size=pick_chunk_size(seq_len, chunk_size), saves=saves, **fields)
    progress = said or _say_nothing
    narrow, wide = _check(model, seq_len)
    check_memory(model, narrow, wide, len(against))
    check_libraries(against, next(model.parameters()).device)
    undecided = []  # number of differing choices for each undecided batch
    for draw in range(MAX_BATCHES):
        batch = _make_batch(model, seq_len, seed + draw * SEED_STEP, left_padding)
        draw_found = _judge(model, against, config, batch, narrow, wide, progress)
        verification = draw_found.verification
        runs = draw_found.runs
        differing = runs[0].choices.count_differences(runs[1].choices)
        if verification.exact or not differing:
            break
        undecided.append(differing)
    untouched = _unused_parameters(model, runs)
    notes = _find_notes(verification, undecided, bool(left_padding), untouched)
    verification = dataclasses.replace(verification, notes=(*verification.notes, *notes))
    if not against:
        return Comparison(verification, ())
    progress("steps that are measured", 0.9)
    with _set_gradients_aside(model):
        costs = [_measure_streamed(model, config, batch)]
        for method in against:
            with prepare_method(model, method) as forward:
                costs.append(_measure(forward, model, batch))
    streamed = MethodResult(
        "streambp",
        verification.exact,
        verification.problems,
        verification.whole_streamed,
        *costs[0],
    )
    method_results = []
    for method, errors, cost in zip(against, draw_found.method_errors, costs[1:], strict=True):
        exact = not errors.problems
        method_results.append(
            MethodResult(
                name_of(method), exact, errors.problems, errors.full_gradient.streamed, *cost
            )
        )
    return Comparison(verification, (streamed, *method_results))


def _say_nothing(text: str, fraction: float) -> None:
    """Ignore a report of progress: the callback that is used if the caller passed none (`said`)."""


def _unused_parameters(model: nn.Module, runs: tuple[VerifyRun, ...]) -> list[str]:
    """Return the names of trainable parameters that got no gradient in any run, which a note of the
    verdict names."""
    touched = set()
    for run in runs:
        for name in run.gradients:
            touched.add(name)
    untouched = []
    for name, p in model.named_parameters():
        if p.requires_grad and name not in touched:
            untouched.append(name)
    return untouched


def _judge(
    model: nn.Module,
    against: Sequence[Method],
    config: StreamConfig,
    batch: Batch,
    narrow: torch.dtype,
    wide: torch.dtype,
    progress: ProgressCallback,
) -> BatchResults:
    """Compare the gradients of one batch, from the patched model, the unpatched model and every
    other method, with a reference in dtype `wide`. Return the results, with notes on parts of the
    model that did not run chunk by chunk.

    Args:
        model: the model, unpatched.
        against: the other methods (ways to train), such as "checkpointing".
        config: settings of the patch.
        batch: arguments of the model, by name.
        narrow: the least precise dtype of the parameters.
        wide: dtype of the reference, a copy of the model on the host.
        progress: called with a text and the fraction done, before each run.
    """
    # float16 underflows for the small gradients of a mean, streamed or not
    scale = 1024.0 if narrow == torch.float16 else 1.0
    with (
        _set_gradients_aside(model),
        packed_adapters_active(model),
        float64_experts(model) if narrow == torch.float64 else contextlib.nullcontext(),
    ):
        progress("the streamed model", 0.2)
        streamed, notes = _run_streamed(model, config, batch, scale)
        fused = choose_kernels(model, config)  # the truth runs without these kernels
        progress("the unpatched model", 0.4)
        try:
            unpatched = _run(model, batch, scale)
        finally:
            fused.uninstall()
        if not all(bool(gradient.isfinite().all()) for gradient in unpatched.gradients.values()):
            raise StreamBPError(
                f"The unpatched model's own gradients are not finite in {_name(narrow)}, so there "
                "is nothing to compare with. Try float32."
            )
        runs = [streamed, unpatched]
        for method in against:
            progress(name_of(method), 0.5)
            with prepare_method(model, method) as forward:
                runs.append(_run(model, batch, scale, forward))
        progress(f"the truth in {_name(wide)}", 0.6)
        truth = _run_truth(model, batch, scale, wide, tuple(runs))
    streaming = _rate(*truth, runs, 0)
    errors = []
    for number in range(2, len(runs)):
        errors.append(_rate(*truth, runs, number))
    size = int(config.chunk_size)
    seq_len = batch["input_ids"].shape[1]
    verification = Verification(
        exact=not streaming.problems,
        problems=streaming.problems,
        parameters=streaming.rated,
        whole_streamed=streaming.full_gradient.streamed,
        whole_unpatched=streaming.full_gradient.unpatched,
        loss_streamed=streamed.loss,
        loss_unpatched=unpatched.loss,
        loss_truth=truth[0],
        model=type(model).__name__,
        dtype=_name(narrow),
        truth_dtype=_name(wide),
        seq_len=seq_len,
        chunk_size=size,
        chunks=-(-seq_len // size),
        window=_window(model),
        notes=tuple(notes),
    )
    return BatchResults(verification, tuple(runs), tuple(errors))


class GradientErrors(NamedTuple):
    """Errors of one run's gradients, relative to the truth (the unpatched model in a wider dtype),
    and the verdict.

    Attributes:
        rated: the errors of each parameter, the run's largest relative error first.
        full_gradient: the errors of the gradient of all parameters together.
        problems: texts about evidence against exactness; empty if exact.
    """

    rated: tuple[ParameterError, ...]
    full_gradient: ParameterError
    problems: tuple[str, ...]


class BatchResults(NamedTuple):
    """Results for one batch of random tokens. `compare_methods` draws another batch if the streamed
    run (under streambp) fails on the batch and chose other experts than the unpatched run.

    Attributes:
        verification: the verdict on the streamed run.
        runs: the streamed run, the unpatched run, and the run of each method in `against`.
        method_errors: the errors of each method in `against`, such as "checkpointing": distances of
            its gradients from the truth's.
    """

    verification: Verification
    runs: tuple[VerifyRun, ...]
    method_errors: tuple[GradientErrors, ...]


def _rate(
    loss: float, distances: dict[str, list[float]], runs: list[VerifyRun], number: int
) -> GradientErrors:
    """Return the errors of one run's gradients, relative to the truth (the gradients of the
    unpatched model in a wider dtype).

    Args:
        loss: loss of the truth.
        distances: dict from parameter names to lists. Each list has the norm of the truth's
            gradient, the gradient's number of elements, and the distance of each run's gradient
            from the truth's.
        runs: the run under streambp, the unpatched run, and runs of other methods (ways to train).
        number: index of the run.
    """
    unpatched = runs[1]
    by_name = {}
    for name, (norm, elements, *distances_of_runs) in distances.items():
        by_name[name] = Distances(
            norm, distances_of_runs[number], distances_of_runs[1], int(elements)
        )
    rated, of_full_gradient = rate(by_name)
    distance = Distances(loss, abs(runs[number].loss - loss), abs(unpatched.loss - loss))
    problems = find_problems(
        rated,
        of_full_gradient,
        distance,
        set(unpatched.gradients),
        set(runs[number].gradients),
        "streamed" if number == 0 else "by this method",
    )
    return GradientErrors(rated, of_full_gradient, problems)


def _check(model: nn.Module, seq_len: int) -> tuple[torch.dtype, torch.dtype]:
    """Check that `verify` supports a model. Return the least precise dtype of its parameters, and
    the wider dtype of the reference (the truth).

    Raises:
        StreamBPError: `verify` does not support the model.
    """
    check_is_module(model)
    engine = engine_of(model)
    if engine is not None:
        raise UnsupportedModelError(
            f"{engine} holds the parameters of this {type(model).__name__}, and verify compares "
            "whole gradients of one process. Verify the model before the engine gets it."
        )
    narrow = least_precise_dtype(model)
    if torch.finfo(narrow).bits == 16:
        wide = torch.float32
    else:
        wide = torch.float64
    name = type(model).__name__
    if any("_streambp" in module.__dict__ for module in model.modules()):
        raise StreamBPError(
            f"This {name} is patched; verify compares with it unpatched. Call "
            "streambp.unpatch(model) first."
        )
    if LIGER in fused_modules(model):
        raise StreamBPError(
            f"This {name} has Liger's kernels, which cannot compute the truth on the host. Verify "
            "the model as it was before, with kernels='liger'."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise StreamBPError(
            f"No parameter of this {name} requires a gradient. Call model.requires_grad_(True) "
            "first."
        )
    tensors = itertools.chain(model.parameters(), model.buffers())
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) != 1 or devices == ["meta"]:
        raise StreamBPError(
            f"This {name} is on {devices}; it must be on one device. Load it without device_map."
        )
    positions = getattr(_text_config(model), "max_position_embeddings", None) or seq_len
    if seq_len > positions:
        raise ConfigError(
            f"seq_len is {seq_len}, but this {name} has {positions} positions. Pass at most "
            f"{positions}."
        )
    return narrow, wide


def check_memory(
    model: nn.Module, narrow: torch.dtype, wide: torch.dtype, other_methods: int = 0
) -> None:
    """Check that the host has memory for the truth, a copy of the model in dtype `wide`, and for
    each run's gradients.

    Args:
        model: the model; tensors on `meta` are counted with the memory that they will take.
        narrow: the least precise dtype of the parameters.
        wide: dtype of the truth.
        other_methods: number of other methods (ways to train) that are compared with streambp.

    Raises:
        StreamBPError: the host has too little memory.
    """
    sets = 2 + other_methods
    required_bytes = 0
    for parameter in model.parameters():
        required_bytes += parameter.numel() * wide_dtype(parameter, wide).itemsize
        if parameter.requires_grad:
            required_bytes += sets * parameter.numel() * narrow.itemsize
        if parameter.is_meta:
            required_bytes += parameter.nbytes
    available = available_memory()
    if available is not None and required_bytes > available:
        raise StreamBPError(
            f"The model in {_name(wide)} and {sets} sets of {_name(narrow)} gradients take "
            f"{required_bytes / GIB:.1f} GiB of host memory; {available / GIB:.1f} are free. Use a "
            "machine with more memory or a narrower dtype, or verify fewer layers of random "
            "weights: streambp verify --random --layers 2."
        )


def _make_batch(model: nn.Module, seq_len: int, seed: int, left_padding: int = 0) -> Batch:
    """Return the model's arguments for one row of random tokens. The labels are the tokens, except
    for the first eighth of the row and an eighth of the rest (-100).

    Padding and the first token behind it have no label either, because the last padding token would
    predict that first token without reading any key.

    Args:
        model: the model, for its vocabulary and device.
        seq_len: tokens of the row.
        seed: seed of the random tokens.
        left_padding: number of padding tokens at the start of the row.
    """
    if not 0 <= left_padding <= seq_len // 2:
        raise ConfigError(
            f"left_padding is {left_padding}; pass 0 to {seq_len // 2}, half of seq_len."
        )
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    config = vars(_text_config(model) or model) | vars(getattr(model, "config", model))
    special = []
    for name, value in config.items():
        if name.endswith("token_id") and isinstance(value, int):
            special.append(value)
    allowed = torch.ones(embedding.weight.shape[0], dtype=torch.bool)  # [V]
    # special tokens; an image placeholder would need an image
    allowed[[token for token in special if 0 <= token < len(allowed)]] = False
    generator = torch.Generator().manual_seed(seed)
    # [1, T]
    ids = torch.multinomial(allowed.float(), seq_len, replacement=True, generator=generator)[None]
    unlabelled = torch.rand(1, seq_len, generator=generator) < 1 / 8  # [1, T]
    unlabelled[:, : seq_len // 8] = True
    if left_padding:
        unlabelled[:, : left_padding + 1] = True
    batch = {"input_ids": ids, "labels": ids.masked_fill(unlabelled, -100)}
    if left_padding:
        batch["attention_mask"] = (torch.arange(seq_len) >= left_padding).long()[None]  # [1, T]
    return {name: tensor.to(embedding.weight.device) for name, tensor in batch.items()}


@contextlib.contextmanager
def _set_gradients_aside(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model is in eval mode and every `.grad` is None.

    Afterwards the model is unpatched, and training flags and gradients are restored.
    """
    training = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        unpatch(model)
        for module, flag in training:
            module.training = flag
        for parameter, gradient in gradients:
            parameter.grad = gradient


@dataclasses.dataclass(frozen=True)
class VerifyRun:
    """Results of one step of a model: under streambp, unpatched, or with another way to train.

    Attributes:
        loss: the unscaled loss.
        gradients: `.grad` of each parameter by name, on the host.
        streamed_layers: number of layers whose backward ran chunk by chunk.
        choices: counts of the experts that MoE routers chose in forward.
    """

    loss: float
    gradients: dict[str, Tensor]
    streamed_layers: int
    choices: CountedChoices


def _run(
    model: nn.Module, batch: Batch, scale: float, forward: Callable[..., Any] | None = None
) -> VerifyRun:
    """Run forward and backward of one batch, and return the loss and the gradients, which are moved
    to the host.

    Args:
        model: the model whose parameters get the gradients.
        batch: arguments of the model.
        scale: factor of the loss before backward.
        forward: forward of another method, such as "checkpointing"; None: the model's.
    """
    choices = CountedChoices()
    loss, streamed_layers = _backward(forward or model, batch, scale, choices)
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.cpu()
            parameter.grad = None
    return VerifyRun(loss, gradients, streamed_layers, choices)


def _backward(
    model: Callable[..., Any],
    batch: Batch,
    scale: float,
    context: contextlib.AbstractContextManager[Any],
) -> tuple[float, int]:
    """Run forward and backward. Return the unscaled loss, and the number of layers that streambp
    computed chunk by chunk.

    Args:
        model: the model, its copy in a wider dtype (the truth), or another method's forward.
        batch: arguments of the model.
        scale: factor of the loss before backward.
        context: context manager for the forward.
    """
    with torch.enable_grad():
        with context:
            loss = getattr(model(**batch, use_cache=False), "loss", None)
        if loss is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} returns no loss when labels are given. Pass a causal "
                "language model (AutoModelForCausalLM)."
            )
        # Count nodes, because a model that silently runs unpatched passes every comparison.
        streamed_layers = sum(
            getattr(type(n), FUNCTION_OF_NODE, None) is StreamedLayer for n in nodes_behind([loss])
        )
        (loss * scale).backward()
    return loss.item(), streamed_layers


def _run_streamed(
    model: nn.Module, config: StreamConfig, batch: Batch, scale: float
) -> tuple[VerifyRun, list[str]]:
    """Patch the model, run one step, and unpatch the model. Return the step's results, and notes on
    parts of the model that did not run chunk by chunk.

    Args:
        model: the model.
        config: settings of the patch.
        batch: arguments of the model.
        scale: factor of the loss before backward.

    Raises:
        StreamBPError: no layer ran chunk by chunk.
    """
    install(model, config)
    with torch.enable_grad():
        # Try the layers here. The expert choices of the trials belong to no batch.
        model(**batch, use_cache=False)
    run = _run(model, batch, scale)
    described = describe(model)
    unpatch(model)
    layers = sum(layer.path == "streams" for layer in described.layers)
    if run.streamed_layers == 0:
        reasons = filter(None, map(operator.attrgetter("reason"), described.layers))
        cause = "; ".join(dict.fromkeys(reasons))
        raise StreamBPError(
            f"None of {len(described.layers)} patched layers streamed, so there is nothing to "
            f"judge. {cause or 'output_attentions=True makes a model run unpatched'}. "
            "Change what is named, or train without streambp."
        )
    notes = []
    for layer in described.layers:
        if layer.path != "streams":
            notes.append(f"{layer.name} does not stream: {layer.reason}")
    if run.streamed_layers < layers:
        notes.append(
            f"{run.streamed_layers} of {layers} layers took part in backward; those below are "
            "frozen"
        )
    if not described.head.startswith("blockwise"):
        notes.append(f"head: {described.head}")
    return run, [*notes, *described.notes]


def _run_truth(
    model: nn.Module, batch: Batch, scale: float, wide: torch.dtype, runs: tuple[VerifyRun, ...]
) -> tuple[float, dict[str, list[float]]]:
    """Run the truth: a copy of the unpatched model in dtype `wide`, on the host. Return its loss,
    and a dict from parameter names to lists: the norm of the gradient, its number of elements, and
    the distance of each run's gradient.

    Each gradient of the truth is freed after its comparison. The host never holds a full set of
    wide gradients.

    Args:
        model: the unpatched model.
        batch: arguments of the model.
        scale: factor of the loss before backward.
        wide: dtype of the truth.
        runs: the runs whose gradients are compared with the truth's.
    """
    truth = copy_to_host(model, wide)
    experts: contextlib.AbstractContextManager[None]
    if wide == torch.float64:
        experts = float64_experts(truth)
    else:
        experts = contextlib.nullcontext()
    distances_by_name: dict[str, list[float]] = {}

    def compare(name: str, parameter: Tensor) -> None:
        """Store the distance of each run's gradient from the truth's gradient of the parameter
        `name`, and free the truth's gradient. Called as a hook of the truth's `parameter`."""
        gradient = parameter.grad
        parameter.grad = None
        distances = [_distance(gradient, run.gradients.get(name)) for run in runs]
        distances_by_name[name] = [_distance(gradient, None), parameter.numel(), *distances]

    for name, parameter in truth.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(compare, name))
    inputs = {name: tensor.cpu() for name, tensor in batch.items()}
    with experts:
        step = _backward(
            truth,
            inputs,
            scale,
            lift_casts() if wide == torch.float64 else contextlib.nullcontext(),
        )
    return step[0], distances_by_name


def _distance(truth: Tensor | None, gradient: Tensor | None) -> float:
    """Return the norm of truth - gradient, for two gradients of one parameter, [...] each; None
    counts as zero.

    Computed in blocks, because a float64 copy of an embedding is large.
    """
    total = 0.0
    present = []
    for tensor in (truth, gradient):
        if tensor is not None:
            present.append(tensor.flatten().split(MAX_COMPARED_ELEMENTS))
    for blocks in zip(*present, strict=True):
        wide = [block.double() for block in blocks]
        total += float((wide[0] - wide[1] if len(wide) == 2 else wide[0]).square().sum())
    return math.sqrt(total)


def _measure_streamed(model: nn.Module, config: StreamConfig, batch: Batch) -> tuple[int, float]:
    """Return the peak bytes beyond the weights, and the seconds, of forward and backward under
    streambp, for the table of methods. The first step, which tests the layers, is not measured."""
    install(model, config)
    try:
        return _measure(model, model, batch)
    finally:
        unpatch(model)


def _measure(forward: Callable[..., Any], model: nn.Module, batch: Batch) -> tuple[int, float]:
    """Return the peak bytes beyond the weights, and the seconds, of forward and backward with one
    method (way to train), for the table of methods. The fastest of several steps counts.

    Args:
        forward: the method's forward.
        model: the model whose parameters get the gradients.
        batch: arguments of the model.
    """
    device = next(model.parameters()).device
    count: LiveBytes | AllocatedBytes

    def step() -> float:
        """Run a step and return its seconds."""
        begin = time.perf_counter()
        _backward(forward, batch, 1.0, contextlib.nullcontext())
        if is_accelerator(device):
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - begin
        for parameter in model.parameters():
            parameter.grad = None
        return seconds

    step()
    seconds = min(step() for _ in range(TIMED_STEPS))
    if reports_memory(device):
        count = AllocatedBytes(device)
    else:
        count = LiveBytes()
    with count:
        count.reset_peak()
        step()
        peak = count.peak
    return peak, seconds


def _window(model: nn.Module) -> int | None:
    """Return the largest number of keys that a query reads in layers with sliding-window or chunked
    attention; None if every layer reads all keys. A note of the verdict says if the tested row is
    shorter."""
    config = _text_config(model)
    kinds = getattr(config, "layer_types", None)
    all_kinds = "sliding" if kinds is None else " ".join(kinds)
    sizes = []
    for kind, field in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
        size = getattr(config, field, None)
        if kind in all_kinds and isinstance(size, int):
            sizes.append(size)
    return max(sizes, default=None)


def _find_notes(
    verification: Verification, undecided: list[int], padded: bool, untouched: list[str]
) -> list[str]:
    """Return notes on limits of the verdict: batches that decided nothing (other experts under
    streambp), a window longer than the row, rounding of the dtype, parameters without gradient.

    Args:
        verification: the verdict.
        undecided: number of differing expert choices in each such batch. [Note: choices]
        padded: True if the batch's row has left padding, which gets a note of its own.
        untouched: trainable parameters without a gradient.
    """
    notes = []
    if undecided:
        notes.append(
            f"{len(undecided)} of at most {MAX_BATCHES} draws of tokens decided nothing: "
            f"{undecided} choices of experts fell otherwise streamed than unpatched, which a tie "
            "does, or an "
            "error"
        )
    notes += [PADDING_NOTE] if padded else []
    window = verification.window
    seq_len = verification.seq_len
    if window is not None and window < seq_len:
        notes.append(f"the window of {window} was crossed")
    elif window is not None:
        longer = window + window // 4 + 1
        text = (
            f"the window of {window} was not crossed by {seq_len} tokens; pass --seq-len {longer} "
            "or more to check it"
        )
        notes.append(text)
    noise = verification.whole_unpatched
    error = verification.whole_streamed
    if verification.dtype == "float64":
        notes.append(
            "transformers computes norms, softmax and the loss in float32 even here: that is the "
            "model's own error"
        )
    elif verification.dtype != "float32":
        notes.append(
            f"{verification.dtype} hides differences below its noise, {noise:.1e} here; "
            "--dtype float32 "
            "shows them"
        )
        if verification.exact and error > NOTABLE_RATIO * noise:
            notes.append(
                f"an error {error / noise:.2f} x the model's own happens by chance; if other seeds "
                f"(--seed) agree on more than {NOTABLE_RATIO}, please report it"
            )
    if untouched:
        names = ", ".join(untouched[:5]) + (" ..." if len(untouched) > 5 else "")
        notes.append(
            f"{len(untouched)} trainable parameters get no gradient, streamed or unpatched: {names}"
        )
    return notes


def _text_config(model: nn.Module) -> Any:
    """Return the config of the language model inside the model, which has the vocabulary, the
    windows and the highest position."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return config


def _name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")
