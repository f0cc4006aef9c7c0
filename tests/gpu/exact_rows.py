"""What no kernel decides, first: `python tests/gpu/exact_rows.py [--row NAME]`, some minutes.

1. "float64 NAME": tiny models of several kinds in float64, against the unpatched model on the same
   device: 1e-10. Without saves, with all, offloaded, and with a prefix in tiles. Everything but the
   fused kernels takes part: autograd's thread for the device, streams, pinned memory, random
   states, routing.
2. "default ...": the settings that `patch` has by itself, in bfloat16, at most 1.15 x as far off as
   the unpatched model: a micro-batch that runs as unpatched, one whose saves are chosen, one of
   each that runs out of memory on its way.
3. "autocast", "stream", "dropout": backward within autocast; a step in a stream of its own; masks
   that are drawn again.

Exit code 0 if every row passes, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the
same code on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import wrong_paths
from paper_repro.rows import Deadline, Result, each
from streambp.layer import function
from streambp.offload.costs import SavesChoice, UnpatchedChoice
from tests import zoo
from tests.families import make_batch
from tests.gpu import script
from tests.gpu.report import ROW_BAR, small_model
from tests.gpu.script import failed
from tests.oracle import MAX_FLOAT64_ERROR, gradients, lift_float32_casts, relative_l2, worst_error
from tests.seeds import seed_torch

# None of them has a kernel that a package brings: those know no float64.
FAMILIES = (
    "qwen3",
    "gemma2",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "mamba2",
    "recurrent_gemma",
    "lfm2",
)
ALL_SAVES = {"saves": ("attn_out", "kv", "*")}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"saves": ()}, ALL_SAVES, {**ALL_SAVES, "offload": "cpu"},
    {"saves": (), "offload": "cpu", "gpu_memory": 1}
)  # fmt: skip
Batch = dict[str, torch.Tensor]


def report(args: argparse.Namespace) -> Iterator[Result]:
    rows: list[tuple[str, Callable[[], Result]]] = [
        (f"float64 {family}", functools.partial(float64_row, family, args)) for family in FAMILIES
    ]
    other_rows = {
        "default short": functools.partial(default_row, args, 256, {}, UnpatchedChoice),
        "default long": functools.partial(
            default_row, args, 1024, {"chunk_size": 300}, SavesChoice
        ),
        "default short full": functools.partial(full_row, args, 256, {}, False),
        "default long full": functools.partial(full_row, args, 1024, {"chunk_size": 300}, True),
        "autocast": functools.partial(autocast_row, args),
        "stream": functools.partial(stream_row, args),
        "dropout": functools.partial(dropout_row, args),
    }
    rows += list(other_rows.items())
    yield from each(
        [(name, functools.partial(_named, name, row)) for name, row in rows],
        args.row,
        Deadline(args.minutes),
    )


def _named(name: str, row: Callable[[], tuple[str, list[str]]]) -> Result:
    text, problems = row()
    return f"{name:<24}{text}{failed(problems)}", not problems


def on(device: str, batch: Batch) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}


def float64_row(family: str, args: argparse.Namespace) -> tuple[str, list[str]]:
    problems, errors = [], []
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        plain = zoo.build(family).to(args.device)
        for mode in ("plain", "left-padded"):
            batch = on(args.device, make_batch(mode))
            _, truth = gradients(plain, **batch)
            for settings in SETTINGS:
                # some layers keep tensors, which cannot be copied
                model = zoo.build(family).to(args.device)
                streambp.patch(
                    model, streambp.StreamConfig(kernels="own", chunk_size=7, **settings)
                )
                for _ in range(2):
                    _, gradient = gradients(model, **batch)
                error = worst_error(gradient, truth)
                errors.append(error)
                problems += [f"{mode} {settings}: {error:.1e}"] * (
                    not error <= MAX_FLOAT64_ERROR
                ) + wrong_paths(model)
    return f"worst of {len(errors)}: {max(errors):.1e}", problems


def of_bfloat16(args: argparse.Namespace, length: int) -> tuple[Any, Batch, Any, float]:
    """A model, a batch, its true gradient and the unpatched model's error."""
    model, batch = small_model(
        "plain", length // 4 if args.tiny else length, args.device, 256 if args.tiny else 512
    )
    _, truth = gradients(model.bfloat16().float(), **batch)
    model.bfloat16()
    return model, batch, truth, relative_l2(gradients(model, **batch)[1], truth)


def judge_error(gradient: Any, truth: Any, noise: float) -> tuple[str, list[str]]:
    ratio = relative_l2(gradient, truth) / noise
    return f"{ratio:.3f} x the model's own error", [f"more than {ROW_BAR} x"] * (
        not ratio <= ROW_BAR
    )


def chooser_of(model: Any) -> Any:
    return next(
        w.layer_state.saves_policy for w in model._streambp.wrappers if hasattr(w, "layer_state")
    )


def default_row(
    args: argparse.Namespace, length: int, settings: dict[str, Any], way: type
) -> tuple[str, list[str]]:
    model, batch, truth, noise = of_bfloat16(args, length)
    if args.tiny and "chunk_size" in settings:
        settings = {"chunk_size": 60}
    streambp.patch(model, streambp.StreamConfig(kernels="own", **settings))
    for _ in range(3):
        _, gradient = gradients(model, **batch)
    text, problems = judge_error(gradient, truth, noise)
    latest = chooser_of(model).latest
    problems += [f"{latest!r} instead of {way.__name__}"] * (type(latest) is not way) + wrong_paths(
        model
    )
    return f"{text}; {streambp.last_step(model)}", problems


def run_out(device: str) -> None:
    """Ask for more memory than there is; the device's own error."""
    if device != "cpu":
        torch.empty(2**45, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError("a test wants it")


def full_row(
    args: argparse.Namespace, length: int, settings: dict[str, Any], in_backward: bool
) -> tuple[str, list[str]]:
    """As `default_row`, but in the third step memory runs out once: in a chunk's backward, or
    before the head."""
    model, batch, truth, noise = of_bfloat16(args, length)
    if args.tiny and "chunk_size" in settings:
        settings = {"chunk_size": 60}
    streambp.patch(model, streambp.StreamConfig(kernels="own", **settings))
    for _ in range(2):
        gradients(model, **batch)
    ran: list[int] = []

    def run_out_once(*_: Any) -> None:
        if not ran:
            ran.append(threading.get_ident())
            run_out(args.device)

    with pytest.MonkeyPatch.context() as patch:
        if in_backward:
            real = function._differentiate
            patch.setattr(
                function, "_differentiate", lambda *args: (run_out_once(), real(*args))[1]
            )  # type: ignore[func-returns-value]
        else:
            model.lm_head.register_forward_pre_hook(run_out_once)
        _, gradient = gradients(model, **batch)
    text, problems = judge_error(gradient, truth, noise)
    problems += ["memory did not run out"] * (not ran)
    if args.device != "cpu" and in_backward:
        problems += ["backward ran in forward's thread"] * (threading.get_ident() in ran)
    return f"{text}, after memory ran out once", problems


def autocast_row(args: argparse.Namespace) -> tuple[str, list[str]]:
    """float32 weights; backward is called within autocast, and outside of it."""
    length = 64 if args.tiny else 1024
    model, batch = small_model("plain", length, args.device, 256 if args.tiny else 512)
    _, truth = gradients(model, **batch)

    def step(within: bool) -> Any:
        model.zero_grad(set_to_none=True)
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
            if within:
                loss.backward()
        if not within:
            loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    noise = relative_l2(step(False), truth)
    streambp.patch(
        model, streambp.StreamConfig(kernels="own", chunk_size=length // 4 + 3, saves=("attn_out",))
    )
    step(False)
    text, problems = judge_error(step(False), truth, noise)
    told_within, problems_within = judge_error(step(True), truth, noise)
    return f"{text}; called within {told_within}", problems + problems_within + wrong_paths(model)


def stream_row(args: argparse.Namespace) -> tuple[str, list[str]]:
    model, batch, truth, noise = of_bfloat16(args, 1024)
    length = batch["input_ids"].shape[1]
    settings = {"chunk_size": length // 4 + 3, "saves": ("attn_out", "kv"), "offload": "cpu"}
    streambp.patch(model, streambp.StreamConfig(kernels="own", **settings))  # type: ignore[arg-type]
    stream = None if args.device == "cpu" else torch.Stream(args.device)
    if stream is not None:
        stream.wait_stream(torch.accelerator.current_stream())
    with stream or contextlib.nullcontext():
        for _ in range(2):
            _, gradient = gradients(model, **batch)
    if stream is not None:
        torch.accelerator.current_stream().wait_stream(stream)
    text, problems = judge_error(gradient, truth, noise)
    return text, problems + wrong_paths(model)


def dropout_row(args: argparse.Namespace) -> tuple[str, list[str]]:
    """What is saved changes no mask: masks of attention and of the layer itself are drawn again."""
    plain = zoo.build("phi3", attention_dropout=0.3, resid_pdrop=0.3).to(args.device)
    batch = on(args.device, make_batch("plain"))
    results = []
    for settings in SETTINGS[:3]:
        model = copy.deepcopy(plain)
        streambp.patch(model, streambp.StreamConfig(kernels="own", chunk_size=7, **settings))
        gradients(model, **batch)
        seed_torch(5)
        results.append(gradients(model, **batch)[1])
    error = max(worst_error(result, results[0]) for result in results[1:])
    _, without = gradients(plain.eval(), **batch)
    problems = [f"saves change masks: {error:.1e}"] * (not error <= MAX_FLOAT64_ERROR)
    problems += ["nothing was dropped"] * (relative_l2(results[0], without) < 0.01)
    return f"apart by {error:.1e} between saves", problems


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report))
