"""Fine-tune a causal language model on long sequences with streambp.

    python examples/long_context_sft.py
        A small Qwen3 model from scratch, on this Python's own standard library. No network, no GPU, a few minutes.

    python examples/long_context_sft.py --model Qwen/Qwen3-8B --data book.txt notes.jsonl --seq-len 65536 --lora
        A real run on a GPU.

The text: every training sequence is one unbroken run of real text. Documents (whole source files, in the order of their
names; or the files given with --data, in the order given) are put one after the other with an end-of-text token between
them, and the stream is cut every --seq-len tokens. So a sequence follows long documents from their beginning, and what
stands thousands of tokens back (imports, classes, earlier functions) helps to predict what comes next.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sysconfig
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

import streambp

END_OF_TEXT = "<|endoftext|>"
HEAD_DIM = 32
MIB = 2**20


def main() -> None:
    start = time.perf_counter()
    args = parse_args()
    set_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    documents = load_text(args.data)
    tokenizer = (
        load_tokenizer(args.model) if args.model else train_tokenizer(documents, args.vocab_size)
    )
    batches = make_batches(documents, tokenizer, args.seq_len, args.batch_size, args.seed)
    model = build_model(args, tokenizer, device)

    config = streambp.StreamConfig(chunk_size=args.chunk_size)
    peaks = (
        None
        if args.skip_measurement
        else compare_activation_peaks(model, config, batches[0].to(device))
    )
    streambp.patch(model, config)
    run = train(model, batches, args.steps, args.learning_rate, device)
    print(f"\n{streambp.describe(model)}\n")  # what a step did

    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print_summary(args, run, peaks, time.perf_counter() - start)
    print(f"\n--- sample ---\n{sample(model, tokenizer, args.prompt)}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a causal language model on long sequences with streambp. Without arguments: a small "
        "Qwen3 model from scratch on the running Python's standard library, on the CPU, within a few minutes."
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--model", help="model id or folder; default: a small Qwen3 model from scratch"
    )
    run.add_argument(
        "--data",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="text files (one document each), or .jsonl",
    )
    run.add_argument(
        "--seq-len", type=int, default=8192, help="tokens per sequence, T (default: %(default)s)"
    )
    run.add_argument(
        "--batch-size", type=int, default=1, help="sequences per step (default: %(default)s)"
    )
    run.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    run.add_argument(
        "--chunk-size",
        type=chunk_size,
        default="auto",
        help='tokens, or "auto" (default: %(default)s)',
    )
    run.add_argument(
        "--lora", action="store_true", help="train LoRA adapters instead of every weight"
    )
    run.add_argument(
        "--learning-rate",
        type=float,
        help="default: 4e-3 from scratch, 1e-4 with --lora, else 1e-5",
    )
    run.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32"
    )
    run.add_argument(
        "--output", type=Path, default=Path("runs/long_context_sft"), help="default: %(default)s"
    )
    run.add_argument(
        "--prompt", default="def ", help="what the sample continues (default: %(default)r)"
    )
    run.add_argument(
        "--skip-measurement", action="store_true", help="do not measure the activation peaks first"
    )
    run.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    small = parser.add_argument_group("the model from scratch (without --model)")
    small.add_argument(
        "--hidden-size", type=int, default=128, help=f"a multiple of {2 * HEAD_DIM} (%(default)s)"
    )
    small.add_argument("--layers", type=int, default=3, help="default: %(default)s")
    small.add_argument("--vocab-size", type=int, default=4096, help="default: %(default)s")
    args = parser.parse_args()
    for name in ("seq_len", "batch_size", "steps", "layers"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1."
            )
    if args.seq_len < 2:
        parser.error(
            "--seq-len is 1; a sequence needs at least 2 tokens, one to read and one to predict."
        )
    if args.hidden_size < 2 * HEAD_DIM or args.hidden_size % (2 * HEAD_DIM):
        parser.error(
            f"--hidden-size is {args.hidden_size}; it must be a multiple of {2 * HEAD_DIM}."
        )
    if args.learning_rate is None:
        args.learning_rate = 1e-4 if args.lora else 1e-5 if args.model else 4e-3
    return args


def chunk_size(text: str) -> int | Literal["auto"]:
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(
            f'{text!r} is neither a positive number of tokens nor "auto".'
        )
    return "auto" if text == "auto" else int(text)


# --- text, tokenizer, batches ---


def load_text(files: list[Path] | None) -> list[str]:
    """The documents, whole and in order: the given files, or the modules of Python's standard library."""
    if files is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))
        if not files:
            raise SystemExit(
                f"{folder} holds no .py files. Pass text of your own with --data FILE..."
            )
    documents: list[str] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise SystemExit(
                f"Cannot read {file} ({error.strerror}). Check the paths given to --data."
            ) from error
        documents.extend(read_jsonl(file, text) if file.suffix == ".jsonl" else [text])
    return [text for text in documents if text.strip()]


def read_jsonl(file: Path, text: str) -> list[str]:
    try:
        return [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise SystemExit(
            f'{file} has a line that is not a JSON object with a "text" field ({error!r}). '
            'Write one {"text": "..."} per line, or pass plain text files.'
        ) from error


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    with loading(model):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    return tokenizer


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SystemExit(
            f"Cannot load {model}: {error}\nPass --model a folder that holds a checkpoint with its tokenizer, or the id "
            "of a model on the Hugging Face Hub; an id needs a network or an earlier download."
        ) from error


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def make_batches(
    documents: list[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    batch_size: int,
    seed: int,
) -> list[Tensor]:
    """Batches [B, T] of consecutive text, in random order; training goes round them as often as it needs to."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for document in documents:
        stream.extend(tokenizer.encode(document, add_special_tokens=False, verbose=False) + end)
    count = len(stream) // (seq_len * batch_size)
    if count == 0:
        raise SystemExit(
            f"The text has {len(stream):,} tokens, less than one batch of {batch_size} x {seq_len:,}. "
            f"Pass more text with --data FILE..., or a smaller --seq-len or --batch-size."
        )
    sequences = torch.tensor(stream[: count * batch_size * seq_len]).view(
        count * batch_size, seq_len
    )
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))
    print(
        f"text: {len(documents)} documents, {len(stream):,} tokens, {len(sequences)} sequences of {seq_len:,}"
    )
    return list(sequences[order].split(batch_size))


# --- model ---


def build_model(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> PreTrainedModel:
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if args.model:
        with loading(args.model):
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    else:
        model = Qwen3ForCausalLM(small_config(args, tokenizer)).to(dtype)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and args.seq_len > positions:
        print(
            f"note: --seq-len {args.seq_len:,} is more than the {positions:,} positions {args.model} was made for."
        )
    if args.lora:
        model = add_lora(model)
    elif dtype == torch.bfloat16:
        print(
            "note: bfloat16 weights round small updates away; --lora (float32 adapters) or --dtype float32 keep them."
        )
    model = model.to(device).train()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    size = f"{total / 1e6:,.1f}M parameters, {trained / 1e6:,.1f}M trained"
    print(f"model: {type(model).__name__}, {size}, {dtype}, {device}")
    return model


def small_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    heads = args.hidden_size // HEAD_DIM
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
        initializer_range=0.05,  # a narrow model of few steps: at 0.02 it stays at the tokens' frequencies for longer
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def add_lora(model: PreTrainedModel) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SystemExit(
            "--lora needs peft. Install it with: pip install 'streambp-hf[examples]'"
        ) from error
    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )


# --- activation memory ---


@dataclasses.dataclass
class ActivationPeak:
    """One forward and backward: bytes of the activation peak, and the loss and gradient norm it came to."""

    bytes: int
    loss: float
    gradient_norm: float


class LiveStorages(TorchDispatchMode):
    """Bytes of the tensor storages allocated within and still alive, and their peak.

    Every operator's results pass here, those of the backward as well (on the CPU it runs in the calling thread). A storage
    counts once, however many tensors view it, from the operator that allocates it until it is freed.
    """

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = weakref.WeakSet[torch.UntypedStorage]()
        for tensor in tensors:
            self._seen.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, nbytes: int) -> None:
        self.live -= nbytes


Peaks = tuple[ActivationPeak | None, ActivationPeak | None]


def compare_activation_peaks(
    model: PreTrainedModel, config: streambp.StreamConfig, input_ids: Tensor
) -> Peaks:
    """Peaks of plain gradient checkpointing and of streambp, same weights, same batch. None: out of memory."""
    print(
        "measuring the activation peak of one step: plain gradient checkpointing, then streambp ..."
    )
    with warnings.catch_warnings():
        # transformers 5.23 renames the method that everybody calls
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        plain = measure_activation_peak(model, input_ids)
        model.gradient_checkpointing_disable()
    streambp.patch(model, config)
    streamed = measure_activation_peak(model, input_ids)
    streambp.unpatch(model)
    return plain, streamed


def measure_activation_peak(model: PreTrainedModel, input_ids: Tensor) -> ActivationPeak | None:
    """Peak of what forward and backward allocate on top of what is there before them.

    There before, and so not counted: the weights, the batch, and one gradient per trainable parameter (`.grad`, allocated
    here). Everything else counts: what is saved for backward, logits, temporaries, and parameter gradients on their way to
    `.grad`. What a kernel uses inside itself is seen on a GPU (torch.cuda's peak), not on the CPU (storages of tensors).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    measure = cuda_peak if input_ids.device.type == "cuda" else cpu_peak
    try:
        peak, loss = measure(model, lambda: forward_backward(model, input_ids))
    except torch.OutOfMemoryError:
        peak = None
    if peak is not None:
        norm = (
            torch.stack([p.grad.float().norm() for p in trained if p.grad is not None])
            .norm()
            .item()
        )
    model.zero_grad(set_to_none=True)
    return None if peak is None else ActivationPeak(peak, loss, norm)


def cpu_peak(model: PreTrainedModel, step: Callable[[], float]) -> tuple[int, float]:
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    with LiveStorages(iter(tensors)) as storages:
        loss = step()
    return storages.peak, loss


def cuda_peak(model: PreTrainedModel, step: Callable[[], float]) -> tuple[int, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start_bytes = torch.cuda.memory_allocated()
    loss = step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - start_bytes, loss


def forward_backward(model: PreTrainedModel, input_ids: Tensor) -> float:
    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


# --- training ---


@dataclasses.dataclass
class Run:
    """What training came to."""

    losses: list[float]
    tokens: int
    seconds: float

    def loss_span(self) -> tuple[float, float, int]:
        """Mean loss of the first and of the last tenth of the steps, and how many steps that is."""
        count = max(1, len(self.losses) // 10)
        return sum(self.losses[:count]) / count, sum(self.losses[-count:]) / count, count


def train(
    model: PreTrainedModel,
    batches: list[Tensor],
    steps: int,
    learning_rate: float,
    device: torch.device,
) -> Run:
    """AdamW with a short linear warmup, then a cosine down to a tenth of the rate; gradients clipped at 1."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 8)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_at(step, warmup, steps)
    )
    run = Run([], 0, 0.0)
    start = time.perf_counter()
    bar = tqdm(range(steps), desc="training", unit="step")
    for step in bar:
        input_ids = batches[step % len(batches)].to(device)
        run.losses.append(forward_backward(model, input_ids))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        run.tokens += input_ids.numel()
        run.seconds = time.perf_counter() - start
        bar.set_postfix(
            loss=f"{run.losses[-1]:.3f}", tokens_per_s=f"{run.tokens / run.seconds:,.0f}"
        )
    return run


def rate_at(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


# --- results ---


def print_summary(args: argparse.Namespace, run: Run, peaks: Peaks | None, seconds: float) -> None:
    first, last, count = run.loss_span()
    rows = [
        (
            "loss",
            f"{first:.3f} -> {last:.3f} (mean of the first and the last {count} of {len(run.losses)} steps)",
        ),
        (
            "tokens/s",
            f"{run.tokens / run.seconds:,.0f} ({run.tokens:,} tokens in {run.seconds:.0f} s)",
        ),
        *(peak_rows(args, *peaks) if peaks else []),
        ("checkpoint", str(args.output)),
        ("whole run", f"{seconds:.0f} s"),
    ]
    print("\n--- summary ---")
    for name, value in rows:
        print(f"{name:<22} {value}")


def peak_rows(
    args: argparse.Namespace, plain: ActivationPeak | None, streamed: ActivationPeak | None
) -> list[tuple[str, str]]:
    rows = [
        (
            "activation peak of one step, beyond weights, batch and .grad, T = "
            + f"{args.seq_len:,}:",
            "",
        )
    ]
    for name, peak in (("  plain checkpointing", plain), ("  streambp", streamed)):
        if peak is None:
            rows.append((name, "out of memory"))
        else:
            loss_and_norm = f"loss {peak.loss:.6f}, gradient norm {peak.gradient_norm:.6f}"
            rows.append((name, f"{peak.bytes / MIB:,.1f} MiB ({loss_and_norm})"))
    if plain is not None and streamed is not None:
        rows.append(("  ratio", f"{streamed.bytes / plain.bytes:.3f}"))
    return rows


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int = 100
) -> str:
    """A sampled continuation of the prompt. Generation runs as unpatched."""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    with torch.no_grad():
        output = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=True, temperature=0.7, top_k=40
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
