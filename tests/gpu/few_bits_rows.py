"""Frozen bases in few bits under LoRA on a device: `python tests/gpu/few_bits_rows.py [--row NAME]`.

"int8", "float8", "int4", "NVFP4" and "MXFP4" are torchao's weights of the layers' Linears, in
bfloat16: at most 1.15 x as far from the decoded weights in float32 as the unpatched model with the
same weights. "MXFP4 experts" is a small gpt-oss whose experts `streambp.keep_mxfp4` keeps: decoded
as transformers decodes them, to the bit, and float32 gradients of the decoded model, in chunks,
with offload and with weights on the host.

A row that the library or the device cannot run, or whose unpatched model has no backward, is
skipped with the reason and shows nothing. Exit code 0 if no row fails, 1 if one does, 2 without a
GPU. `--device cpu --tiny` runs the same code on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import wrong_paths
from paper_repro.rows import Deadline, Result, each, first_line
from streambp.offload.mxfp4 import BLOCK_SIZE, keep_in_mxfp4
from streambp.verify.truth import copy_to_host
from tests import zoo
from tests.families import make_batch
from tests.gpu import script
from tests.gpu.report import ROW_BAR, small_model
from tests.gpu.script import failed
from tests.oracle import gradients, relative_l2, worst_error
from tests.seeds import seed_torch

QUANTIZATION, MX_FORMATS = "torchao.quantization", "torchao.prototype.mx_formats"
INFERENCE = f"{MX_FORMATS}.inference_workflow"
FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
# A row's module and class of a configuration, its arguments, and the compute capability it needs.
TORCHAO: dict[str, tuple[str, str, dict[str, Any], tuple[int, int] | None]] = {
    "int8": (QUANTIZATION, "Int8WeightOnlyConfig", {}, None),
    "float8": (QUANTIZATION, "Float8WeightOnlyConfig", {}, None),
    "int4": (QUANTIZATION, "Int4WeightOnlyConfig", {"group_size": 32}, (8, 0)),
    "NVFP4": (INFERENCE, "NVFP4WeightOnlyConfig", {}, (8, 0)),
    "MXFP4": (
        INFERENCE,
        "MXDynamicActivationMXWeightConfig",
        {"activation_dtype": FLOAT4, "weight_dtype": FLOAT4},
        (10, 0),
    ),
}
EXPERTS_ROW = "MXFP4 experts"
NAMES = (*TORCHAO, EXPERTS_ROW)
EXPERTS = ("gate_up_proj", "down_proj")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"chunk_size": 7},
    {"chunk_size": 7, "offload": "cpu", "saves": ("attn_out", "kv")},
    {"chunk_size": 7, "weights": "cpu"},
)
MAX_FLOAT32_ERROR = 1e-4


class SkippedRowError(Exception):
    """A row that cannot run here; the message says why."""


def report(args: argparse.Namespace) -> Iterator[Result]:
    rows: list[tuple[str, Callable[[], tuple[str, list[str]]]]] = [
        (name, functools.partial(torchao_row, name, args)) for name in TORCHAO
    ]
    rows.append((EXPERTS_ROW, functools.partial(experts_row, args)))
    yield from each(
        [(name, functools.partial(_named, name, row)) for name, row in rows],
        args.row,
        Deadline(args.minutes),
    )


def _named(name: str, row: Callable[[], tuple[str, list[str]]]) -> Result:
    try:
        text, problems = row()
    except SkippedRowError as reason:
        return f"{name:<16}skipped: {reason}", True
    return f"{name:<16}{text}{failed(problems)}", not problems


def with_adapters(model: Any, rank: int = 8) -> Any:
    """The model under LoRA of attention's Linears, with random factors."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise SkippedRowError("peft is not installed") from error
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config).train()


def quantise(model: Any, name: str, device: str) -> None:
    """Store the Linears of layers as torchao does.

    Raises:
        SkippedRowError: the library or the device has not what it takes.
    """
    home, config, settings, capability = TORCHAO[name]
    if capability is not None:
        if device != "cuda":
            raise SkippedRowError(f"{config} needs a CUDA device")
        if torch.cuda.get_device_capability() < capability:
            raise SkippedRowError(
                f"{config} needs compute capability {'.'.join(map(str, capability))}"
            )
    try:
        quantization = importlib.import_module(QUANTIZATION)
        configuration = getattr(importlib.import_module(home), config)(**settings)
    except ImportError as error:
        raise SkippedRowError(f"torchao: {first_line(error)}") from error
    except AttributeError as error:
        raise SkippedRowError(f"this torchao has no {config}") from error
    try:
        quantization.quantize_(model.model.layers, configuration)
    except (ImportError, NotImplementedError, AssertionError, RuntimeError) as error:
        raise SkippedRowError(f"torchao: {first_line(error)}") from error


def torchao_row(name: str, args: argparse.Namespace) -> tuple[str, list[str]]:
    length = 64 if args.tiny else 1024
    base, batch = small_model("plain", length, args.device, 256 if args.tiny else 512)
    base.bfloat16()
    quantise(base, name, args.device)
    model = with_adapters(base)
    wide = copy_to_host(model, torch.float32).to(args.device)
    _, truth = gradients(wide, **batch)
    try:
        noise = relative_l2(gradients(model, **batch)[1], truth)
    except (RuntimeError, NotImplementedError) as error:
        raise SkippedRowError(f"the unpatched model has no step: {first_line(error)}") from error
    config = streambp.StreamConfig(kernels="own", chunk_size=length // 4 + 3, unpatched_runs=False)
    streambp.patch(model, config)
    for _ in range(2):
        _, gradient = gradients(model, **batch)
    ratio = relative_l2(gradient, truth) / noise
    problems = [f"more than {ROW_BAR} x"] * (not ratio <= ROW_BAR) + wrong_paths(model)
    return f"{ratio:.3f} x the model's own error; {weights_line(model)}", problems


def weights_line(model: Any) -> str:
    """What `describe` says of the weights."""
    return next(
        (note for note in streambp.describe(model).notes if note.startswith("weights: ")),
        "describe names no weights",
    )


def in_mxfp4(device: str) -> tuple[Any, Any, list[str]]:
    """A small gpt-oss whose experts are random bytes, the same with decoded weights, and what is
    not as transformers decodes it."""
    try:
        reference = importlib.import_module("transformers.integrations.mxfp4")
    except ImportError as error:
        raise SkippedRowError("this transformers has no MXFP4") from error
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    model = zoo.build("gpt_oss", torch.float32, **sizes).to(device)
    seed_torch(1)
    decoded, problems = copy.deepcopy(model), []
    names = [n for n, m in model.named_modules() if type(m).__name__ == "GptOssExperts"]
    for path in names:
        experts, wide = model.get_submodule(path), decoded.get_submodule(path)
        for name in EXPERTS:
            count, inputs, outputs = getattr(experts, name).shape
            shape = (count, outputs, inputs // BLOCK_SIZE)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8).to(device)
            scales = torch.randint(122, 126, shape, dtype=torch.uint8).to(device)
            values = reference.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            keep_in_mxfp4(experts, name, blocks, scales)
            if not torch.equal(getattr(experts, name), values):
                problems.append(f"{name} is not as transformers decodes it")
            getattr(wide, name).data.copy_(values)
    return model, decoded, problems


def experts_row(args: argparse.Namespace) -> tuple[str, list[str]]:
    model, decoded, problems = in_mxfp4(args.device)
    batch = {name: value.to(args.device) for name, value in make_batch("plain").items()}
    model, decoded = with_adapters(model), with_adapters(decoded)
    decoded.load_state_dict(adapters_of(model), strict=False)
    _, truth = gradients(decoded, **batch)
    errors = []
    for settings in SETTINGS:
        ours = copy.deepcopy(model)
        config = streambp.StreamConfig(kernels="own", unpatched_runs=False, **settings)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Move the model to an accelerator")
            streambp.patch(ours, config)
            for _ in range(2):
                _, gradient = gradients(ours, **batch)
        errors.append(worst_error(gradient, truth))
        problems += [f"{settings}: {errors[-1]:.1e}"] * (not errors[-1] <= MAX_FLOAT32_ERROR)
        problems += wrong_paths(ours)
    return f"worst of {len(errors)}: {max(errors):.1e}; {weights_line(ours)}", problems


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report))
