"""Layers with states on one GPU, kernel by kernel: `python tests/gpu/state_rows.py [--row NAME]
[--minutes 8]`.

1. Each kernel in chunks: output, end state and all gradients, the start state's among them, of one
   call and of chunks, against the same in float32 by transformers' torch code, or, where documents
   are told, by `reference_kernels`. Chunks may be 1.05 x as far off as one call, on average over
   random inputs (`assert_as_precise`).
2. A bf16 model of a few layers in chunks, against float32 and beside the unpatched model's own
   error, in the same way.
3. Seconds of a Mamba 2 mixer, forward and backward: its fused kernel, which a mixer without a cache
   takes in training, and the composed path that a cache selects. Not judged, but both must give the
   same.

A row whose kernel transformers did not take from its package, absent or not to be imported, is
named with the reason and does not pass; "bf16 qwen3_next" wants fla alone, and says that its
convolution is torch's. fla is Triton and Python: its unpacked wheel on PYTHONPATH will do, and so
will mamba_ssm's Python files beside an empty `selective_scan_cuda.py`, which its scan in Triton
does not call (docs/cuda.md). Exit code 0 if every row passes, 1 if one does not, 2 without a GPU.
`--device cpu --tiny` runs the same code with `reference_kernels` for all of them, on one draw each,
which chance may make twice as far off.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import wrong_paths
from paper_repro.rows import Deadline, Result, each
from streambp.chunks import ChunkPlan
from streambp.recurrent.documents import Documents, wrap_kernel
from streambp.recurrent.states import StateCache
from tests import zoo
from tests.families import make_batch
from tests.gpu import script
from tests.gpu.state_kernels import FULL, KERNELS, TINY, Function, Kernel, Named, Sizes, fallbacks
from tests.layer import reference_kernels
from tests.oracle import assert_as_precise, gradients, relative_l2
from tests.packed import packed_batch
from tests.seeds import seeded

# where they end, of the length: within a chunk, with it, soon after, over several
DOCUMENTS = (0.1, 0.3, 0.303, 0.5, 0.95)
MAX_ERROR = 0.1  # half precision stays far below; what computes something else does not
MAX_CHANCE_RATIO = 2.0  # of a ratio of few draws; a state that is lost is more
DRAW_COUNT = 4  # of a kernel's tiny row: one's ratio is up to 1.8 by chance, four's up to 1.4
Errors = dict[str, float]  # each tensor's, by its norm
CHUNK = 0.3  # of the length: no multiple of a kernel's block


def in_chunks(
    kernel: Kernel,
    function: Function,
    inputs: tuple[Named, Named, Tensor | None],
    size: int,
    documents: Documents | None,
) -> Named:
    """Output, end state and gradients in chunks of `size`; weights' gradients are added up in
    float32."""
    tokens, weights, start = inputs
    length = next(iter(tokens.values())).shape[1]
    tokens = {name: x.detach().requires_grad_() for name, x in tokens.items()}
    state = start = None if start is None else start.detach().requires_grad_()
    parts, copies = [], []
    for chunk in ChunkPlan(length, size):
        chunk_weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
        chunk_tokens = {name: x[:, chunk.start : chunk.stop] for name, x in tokens.items()}
        called = function if documents is None else wrap_kernel(function, documents, chunk)
        out, state = kernel.run(called, {**chunk_tokens, **chunk_weights}, state, chunk, documents)
        parts.append(out)
        copies.append(chunk_weights)
    results = {"output": torch.cat(parts, 1), "end state": state}
    upstream = [
        torch.randn(x.shape, generator=seeded(7)).to(x) for x in results.values() if x is not None
    ]
    leaves = {**tokens, **({} if start is None else {"start": start})}
    flat = [*leaves.values(), *(w for chunk_weights in copies for w in chunk_weights.values())]
    grads = list(torch.autograd.grad(list(results.values()), flat, upstream))
    results |= {f"d {name}": grad for name, grad in zip(leaves, grads, strict=False)}
    weight_grads = grads[len(leaves) :]
    for index, name in enumerate(weights):
        results[f"d {name}"] = sum(grad.float() for grad in weight_grads[index :: len(weights)])
    return {name: x.detach().float() for name, x in results.items()}


def errors(
    kernel: Kernel, function: Function, sizes: Sizes, device: str, chunk_size: int
) -> Iterator[tuple[Errors, Errors]]:
    """Of chunks and of one call in half precision against float32, for random inputs after the
    other."""
    if kernel.document_form == "ends":
        sizes = dataclasses.replace(sizes, rows=1)
    for seed in itertools.count():
        tokens, weights, start = kernel.make(sizes, seeded(seed))
        start = (
            None if kernel.document_form == "ends" else start
        )  # each document starts from nothing
        documents = documents_of(kernel.document_form, sizes, device)
        to_half = functools.partial(move_tensors, kernel, device, torch.bfloat16)
        inputs = (
            to_half(tokens),
            to_half(weights),
            None if start is None else to_half({"start": start})["start"],
        )
        wide = functools.partial(move_tensors, kernel, device, torch.float32)
        rounded = wide(inputs[0]), wide(inputs[1]), inputs[2]
        truth = in_chunks(kernel, kernel.truth, rounded, sizes.length, documents)
        chunks, one_call = (
            in_chunks(kernel, function, inputs, size, documents)
            for size in (chunk_size, sizes.length)
        )
        yield errors_of(chunks, truth), errors_of(one_call, truth)


def move_tensors(kernel: Kernel, device: str, dtype: torch.dtype, tensors: Named) -> Named:
    return {
        n: x.to(device, torch.float32 if n in kernel.wide else dtype) for n, x in tensors.items()
    }


def documents_of(form: str, sizes: Sizes, device: str) -> Documents | None:
    ends = torch.tensor([int(part * sizes.length) for part in DOCUMENTS]).unique()
    if form == "ids":
        ids = torch.bucketize(torch.arange(sizes.length), ends, right=True)
        return Documents(torch.stack([ids, ids.clamp(min=2) - 2]).to(device, torch.int32), None)
    if form == "ends":
        return Documents(
            None, torch.tensor([0, *ends.tolist(), sizes.length], device=device, dtype=torch.int32)
        )
    return None


def errors_of(tensors: Named, truth: Named) -> Errors:
    return {name: float((tensors[name] - x).norm() / x.norm()) for name, x in truth.items()}


def mean(errors: Errors) -> float:
    return statistics.fmean(error**2 for error in errors.values()) ** 0.5


def judge_errors(name: str, pairs: Iterator[tuple[float, float]], draws: int | None) -> Result:
    """A row of error ratios: by `assert_as_precise`, or within CHANCE on so many draws."""
    drawn_pairs: list[tuple[float, float]] = []

    def watched() -> Iterator[tuple[float, float]]:
        for pair in pairs:
            if not all(map(math.isfinite, pair)):
                raise FloatingPointError(
                    f"outputs or gradients are not finite: errors {pair[0]} and {pair[1]}"
                )
            drawn_pairs.append(pair)
            yield pair

    problem = ""
    if draws is not None:
        list(itertools.islice(watched(), draws))
    else:
        try:
            with contextlib.redirect_stdout(None):
                assert_as_precise(watched())
        except AssertionError as error:
            problem = f"   FAILED: {error}"
    ours, one_call = (statistics.fmean(of) for of in zip(*drawn_pairs, strict=True))
    if not one_call <= MAX_ERROR or not ours <= MAX_CHANCE_RATIO * one_call:
        problem = f"   FAILED: something else is computed{problem}"
    return (
        f"{name:<34}{ours:>10.3e}{one_call:>12.3e}{ours / one_call:>8.3f}"
        f"   of {len(drawn_pairs)} draws{problem}",
        not problem,
    )


def kernel_row(name: str, args: argparse.Namespace) -> Result:
    kernel, sizes = KERNELS[name], TINY if args.tiny else FULL
    function = kernel.function if args.device == "cuda" else kernel.reference
    pairs = errors(kernel, function, sizes, args.device, int(CHUNK * sizes.length))
    return judge_errors(
        name,
        ((mean(ours), mean(one_call)) for ours, one_call in pairs),
        DRAW_COUNT if args.tiny else None,
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """A family, the kernels that it must run, and fields of its config for dimensions that kernels
    take.

    kernels: by transformers' names; what else the family has may be torch's.
    """

    family: str
    kernels: tuple[str, ...]
    changes: dict[str, Any]
    has_documents: bool = False


WIDE_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
RULE_SIZES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "mlp_only_layers": [0, 1]}
SCAN_SIZES = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 64}
CONV, RULE, SCAN = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
FUSED_SCAN, SELECTIVE = "mamba2_split_conv1d_scan_combined", "mamba_selective_scan"
MODELS = {
    "bf16 qwen3_next": Model("qwen3_next", (RULE,), {**WIDE_SIZES, **RULE_SIZES}),
    "bf16 bamba": Model("bamba", (SCAN, CONV), {**WIDE_SIZES, **SCAN_SIZES}),
    "bf16 lfm2": Model("lfm2", (CONV,), WIDE_SIZES),
    "bf16 jamba": Model(
        "jamba",
        (SELECTIVE, CONV),
        {**WIDE_SIZES, "num_experts": 1, "mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
}
MODELS |= {  # in torch a convolution goes on over the ends of documents
    f"{name} documents": dataclasses.replace(
        m, kernels=tuple(dict.fromkeys((*m.kernels, CONV))), has_documents=True
    )
    for name, m in MODELS.items()
    if m.family != "jamba"
}


@contextlib.contextmanager
def in_torch(model: torch.nn.Module, has_documents: bool) -> Iterator[None]:
    """Within, a model computes everything in torch: without documents by transformers' code."""
    with pytest.MonkeyPatch.context() as patch:
        if has_documents:
            reference_kernels.install(patch, model)
        else:
            modeling = sys.modules[type(model).__module__]
            for name in (*reference_kernels.KERNELS, "mamba_inner_fn"):
                if hasattr(modeling, name):
                    patch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
        yield


def model_draws(row: Model, args: argparse.Namespace) -> Iterator[tuple[float, float]]:
    length = 40 if args.tiny else 500
    for seed in itertools.count():
        if row.has_documents:
            ends = [0, *(int(part * length) for part in DOCUMENTS), length]
            batch = packed_batch([list(dict.fromkeys(ends))], seed=seed)
        else:
            batch = make_batch("plain", length=length, seed=seed)
        batch = {
            name: x.to(args.device) if isinstance(x, Tensor) else x for name, x in batch.items()
        }
        rounded = zoo.build(row.family, torch.float32, seed, **row.changes).bfloat16()
        oracle = rounded.float().to(args.device)  # the same weights on both sides
        with in_torch(oracle, row.has_documents):
            truth = gradients(oracle, **batch)[1]
        stock = copy.deepcopy(oracle).to(torch.bfloat16)
        ours = streambp.patch(
            copy.deepcopy(stock),
            streambp.StreamConfig(kernels="own", chunk_size=int(CHUNK * length)),
        )
        with (
            contextlib.nullcontext()
            if args.device == "cuda"
            else in_torch(oracle, row.has_documents)
        ):
            errors_of_draw = [
                relative_l2(gradients(model, **batch)[1], truth) for model in (ours, stock)
            ]
        if problems := wrong_paths(ours):
            raise RuntimeError("; ".join(problems))
        yield errors_of_draw[0], errors_of_draw[1]


def model_row(name: str, args: argparse.Namespace) -> Result:
    return judge_errors(name, model_draws(MODELS[name], args), 1 if args.tiny else None)


def fused_row(name: str, args: argparse.Namespace) -> Result:
    """A mixer of Bamba-9B's shape over 8,192 tokens."""
    sizes = (
        {}
        if args.tiny
        else {"hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128}
    )
    sizes |= {} if args.tiny else {"mamba_chunk_size": 256}
    model = zoo.build("bamba", torch.bfloat16, **sizes).to(args.device)
    mixer: Any = next(module for module in model.modules() if "Mixer" in type(module).__name__)
    x = torch.randn(1, 64 if args.tiny else 8192, mixer.hidden_size, generator=seeded(1)).to(
        args.device, torch.bfloat16
    )
    upstream = torch.randn(x.shape, generator=seeded(2)).to(x)
    seconds, results = [], []
    for cache in (lambda: None, lambda: StateCache(0, {})):
        for _ in range(3):
            leaf = x.detach().requires_grad_()
            synchronize(args.device)
            begin = time.perf_counter()
            y = mixer(leaf, cache_params=cache())
            (grad,) = torch.autograd.grad(y, leaf, upstream)
            synchronize(args.device)
            last = time.perf_counter() - begin
        seconds.append(last)
        results.append({"y": y.detach().float(), "dx": grad.float()})
    difference = mean(errors_of(results[1], results[0]))
    failed = "" if difference <= MAX_ERROR else "   FAILED: they differ"
    text = (
        f"fused {seconds[0] * 1e3:9.2f} ms  composed {seconds[1] * 1e3:9.2f} ms  "
        f"{seconds[1] / seconds[0]:.3f} x"
    )
    return f"{name:<34} {text}   apart by {difference:.1e}{failed}", not failed


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


FUSED_SCAN_TEXT = "fused and composed scan"
ROWS: dict[str, Callable[[str, argparse.Namespace], Result]] = {
    **dict.fromkeys(KERNELS, kernel_row),
    **dict.fromkeys(MODELS, model_row),
    FUSED_SCAN_TEXT: fused_row,
}


def kernels_of(name: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A row's modeling module, the kernels that it must run, and others that the module has, by
    transformers' names."""
    if name in KERNELS:
        family, kernels = KERNELS[name].modeling, (KERNELS[name].name,)
    elif name in MODELS:
        family, kernels = MODELS[name].family, MODELS[name].kernels
    else:
        family, kernels = "bamba", (FUSED_SCAN, SCAN, CONV)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    other_kernels = tuple(
        kernel
        for kernel in reference_kernels.KERNELS
        if hasattr(module, kernel) and kernel not in kernels
    )
    return module.__name__, kernels, other_kernels


def absent(name: str) -> list[str]:
    """What a row must run and cannot on this machine, each with the reason."""
    module, kernels, _ = kernels_of(name)
    return fallbacks(module, kernels)


def measured(name: str, args: argparse.Namespace) -> Result:
    if args.device != "cuda":
        return ROWS[name](name, args)
    if lacking := absent(name):
        return f"{name:<34} not run: {'; '.join(lacking)}", False
    module, _, other_kernels = kernels_of(name)
    line, passed = ROWS[name](name, args)
    also = fallbacks(module, other_kernels) if name in MODELS else []
    return line + (f"   ({'; '.join(also)})" if also else ""), passed


def report(args: argparse.Namespace) -> Iterator[Result]:
    yield (
        f"{'row':<34}{'chunks':>10}{'one call':>12}{'ratio':>8}   (models: streamed, unpatched)",
        True,
    )
    yield from each(
        ((name, functools.partial(measured, name, args)) for name in ROWS),
        args.row,
        Deadline(args.minutes),
    )


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report))
