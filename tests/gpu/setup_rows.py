"""The set-ups that most programs have, on a GPU: `python tests/gpu/setup_rows.py [--row NAME]`, one
or two minutes.

Each row patches a small model as its users would, mostly with nothing but `streambp.patch(model)`,
and takes three steps. Its gradients may be 1.15 x as far from those in float32 as the unpatched
model's in the same set-up. "default": Liger's kernels where they are installed; "compiled"; "LoRA",
and "LoRA own": by peft's code; "experts": a mixture, also with LoRA, and with LoRA on experts in 4
bits by bitsandbytes; "QLoRA": a 4-bit base by bitsandbytes;
"padded"; "bidirectional": attention reads ahead, and layers are cut at it; "weights": those of a LoRA
model's base on the host; "autocast": float32 weights; "TF32" and "float32": no half precision.
"Trainer" compares four logged steps of HF's Trainer in bf16, patched on the CPU, with two
micro-batches of padded rows each, with those of the unpatched model.

Exit code 0 if every row passes, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the
same code on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import LIGERS, counted_calls, wrong_paths
from paper_repro.rows import Deadline, Result, each
from tests.gpu import script
from tests.gpu.report import ROW_BAR, small_model
from tests.gpu.script import failed
from tests.oracle import Gradients, gradients, relative_l2
from tests.seeds import seed_torch, seeded

Batch = dict[str, Tensor]
LENGTH, TINY = 2048, 160
MAX_RELATIVE_DIFFERENCES = {"loss": 2**-8, "grad_norm": 2**-5}  # relative: two runs in bf16


@dataclasses.dataclass(frozen=True)
class Setup:
    """One row: what is done to a model, how it is patched, and in what dtypes it runs.

    prepare: gives the model that trains, from one whose weights fit in bfloat16. dtype: of its
    weights. settings: of `StreamConfig`, beside the chunk size. autocast: to bfloat16. tf32:
    products of float32 in TF32. spans: of the batch. experts: a mixture, each of whose experts
    takes each token, so that rounding chooses none.
    """

    prepare: Callable[[nn.Module, torch.dtype], nn.Module] = lambda model, dtype: model.to(dtype)
    dtype: torch.dtype = torch.bfloat16
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    autocast: bool = False
    tf32: bool = False
    spans: str = "plain"
    chunks: int = 4
    liger: bool = False
    experts: bool = False


def with_adapters(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """LoRA on all Linears, both factors random. dtype: None: the model's own."""
    from peft import LoraConfig, get_peft_model

    seed_torch(7)
    model = get_peft_model(
        model if dtype is None else model.to(dtype), LoraConfig(r=8, target_modules="all-linear")
    )
    generator = seeded(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def in_four_bits(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """LoRA on a base that bitsandbytes quantises as it is loaded."""
    from peft import prepare_model_for_kbit_training

    device = next(model.parameters()).device
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        base = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=quantised,
            dtype=dtype,
            device_map={"": device},
            attn_implementation="sdpa",
        )
    return with_adapters(
        prepare_model_for_kbit_training(base.train(), use_gradient_checkpointing=False), None
    )


def experts_in_four_bits(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """LoRA on Linears and experts, and experts in 4 bits. peft alone cannot train such a model, so
    the unpatched model has the cure of `patch`, too."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    from streambp.model.packed_adapters import activate_packed

    model = with_adapters(model, dtype)
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() == 3:
                replace_parameter_4bit(module, name, quant_type="nf4")
    activate_packed(model, stays=True)
    return model


def reads_ahead(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with bidirectional attention, as LLM2Vec makes it."""
    model.config.is_causal = False  # type: ignore[union-attr]
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False  # type: ignore[assignment]
    return model.to(dtype)


SETUPS = {
    "default": Setup(liger=True),
    "default short": Setup(liger=True, chunks=1),
    "compiled": Setup(settings={"kernels": "compiled"}),
    "LoRA": Setup(with_adapters),
    "LoRA own": Setup(with_adapters, settings={"kernels": "own"}),
    "experts": Setup(experts=True),
    "experts LoRA": Setup(with_adapters, experts=True),
    "experts in 4 bits": Setup(experts_in_four_bits, experts=True),
    "QLoRA": Setup(in_four_bits),
    "padded right": Setup(spans="right-padded"),
    "padded left": Setup(spans="left-padded"),
    "bidirectional": Setup(reads_ahead),
    "bidirectional padded": Setup(reads_ahead, spans="right-padded"),
    "weights": Setup(with_adapters, settings={"weights": "cpu"}),
    "offload": Setup(settings={"offload": "auto"}),
    "autocast": Setup(dtype=torch.float32, autocast=True),
    "autocast LoRA": Setup(with_adapters, autocast=True),
    "TF32": Setup(dtype=torch.float32, tf32=True),
    "float32": Setup(dtype=torch.float32),
}


def report(args: argparse.Namespace) -> Iterator[Result]:
    rows: list[tuple[str, Callable[[], Result]]] = [
        (name, functools.partial(setup_row, name, setup, args)) for name, setup in SETUPS.items()
    ]
    rows.append(("Trainer", functools.partial(trainer_row, args)))
    yield from each(rows, args.row, Deadline(args.minutes))


def make_model(
    spans: str, args: argparse.Namespace, experts: bool = False
) -> tuple[nn.Module, Batch]:
    """A float32 model whose weights fit in bfloat16."""
    width = 256 if args.tiny else 512
    model: nn.Module
    model, batch = small_model(spans, TINY if args.tiny else LENGTH, args.device, width)
    if experts:
        config_settings = {
            name: value
            for name, value in model.config.to_diff_dict().items()
            if name != "model_type"
        }
        sizes = {"moe_intermediate_size": width // 2, "num_experts": 4, "num_experts_per_tok": 4}
        model = (
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**config_settings | sizes)).to(args.device).train()
        )
    return model.bfloat16().float(), batch


@contextlib.contextmanager
def products_in_tf32(on: bool) -> Iterator[None]:
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous


def step(model: nn.Module, batch: Batch, setup: Setup, device: str) -> Gradients:
    """Of what trains, in float64."""
    with (
        products_in_tf32(setup.tf32),
        torch.autocast(device, torch.bfloat16, enabled=setup.autocast),
    ):
        return {name: g.double() for name, g in gradients(model, **batch)[1].items()}


def setup_row(name: str, setup: Setup, args: argparse.Namespace) -> Result:
    model, batch = make_model(setup.spans, args, setup.experts)
    wide = torch.float64 if setup.dtype == torch.float32 and not setup.autocast else torch.float32
    exact = dataclasses.replace(setup, autocast=False, tf32=False)
    truth = step(setup.prepare(copy.deepcopy(model), wide), batch, exact, args.device)
    stock = step(setup.prepare(copy.deepcopy(model), setup.dtype), batch, setup, args.device)
    noise = relative_l2(stock, truth)
    ours = setup.prepare(model, setup.dtype)
    length = batch["input_ids"].shape[1]
    chunk_size = length // setup.chunks + (3 if setup.chunks > 1 else 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Move the model to an accelerator")
        streambp.patch(ours, streambp.StreamConfig(chunk_size=chunk_size, **setup.settings))
    step(ours, batch, setup, args.device)
    calls: dict[str, int] = {}
    with counted_calls(calls):
        step(ours, batch, setup, args.device)
    error = relative_l2(step(ours, batch, setup, args.device), truth)
    problems = wrong_paths(ours) + [f"{error / noise:.3f} is more than {ROW_BAR}"] * (
        not error <= ROW_BAR * noise
    )
    if setup.liger and "liger_kernel" in sys.modules and args.device != "cpu":
        problems += [f"{kernel} did not run" for kernel in LIGERS.values() if not calls.get(kernel)]
    text = (
        f"error {error:.3e}, unpatched {noise:.3e}, ratio {error / noise:.3f}; "
        f"{streambp.last_step(ours)}"
    )
    return f"{name:<24}{text}{failed(problems)}", not problems


def trained(folder: str, patched: bool, args: argparse.Namespace) -> list[dict[str, float]]:
    """What HF's Trainer logs in four steps of two micro-batches, padded rows each."""
    model, _ = make_model("plain", args)
    model.cpu()
    if patched:
        streambp.patch(model)
    generator = seeded(5)
    longest = TINY if args.tiny else LENGTH
    rows = [
        {"input_ids": torch.randint(1, 1024, (length,), generator=generator)}
        for length in torch.randint(longest // 4, longest, (16,), generator=generator).tolist()
    ]
    arguments = TrainingArguments(
        folder, max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=2, learning_rate=1e-3,
        logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", bf16=True, use_cpu=args.device == "cpu",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=padded)  # type: ignore[arg-type]
    trainer.train()
    if patched and (problems := wrong_paths(model)):
        raise RuntimeError("; ".join(problems))
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def padded(rows: list[Batch]) -> Batch:
    """On the right, as a tokenizer's collator does."""
    longest = max(row["input_ids"].numel() for row in rows)
    batch = {"input_ids": torch.zeros(len(rows), longest, dtype=torch.long)}
    batch |= {
        "attention_mask": torch.zeros_like(batch["input_ids"]),
        "labels": torch.full_like(batch["input_ids"], -100),
    }
    for number, row in enumerate(rows):
        index = (number, slice(0, row["input_ids"].numel()))
        batch["input_ids"][index], batch["attention_mask"][index], batch["labels"][index] = (
            row["input_ids"],
            1,
            row["input_ids"],
        )
    return batch


def trainer_row(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = (trained(folder, patched, args) for patched in (True, False))
    worst = {
        key: max(abs(a[key] / b[key] - 1) for a, b in zip(ours, theirs,
                strict=True)) for key in MAX_RELATIVE_DIFFERENCES
    }  # fmt: skip
    problems = [
        f"{key} {off:.1e} off"
        for key, off in worst.items()
        if not off <= MAX_RELATIVE_DIFFERENCES[key]
    ]
    text = ", ".join(f"{key} apart by {off:.1e}" for key, off in worst.items())
    return (
        f"{'Trainer':<24}{text} in {len(ours)} steps, the last loss "
        f"{ours[-1]['loss']:.4f}{failed(problems)}",
        not problems,
    )


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report))
