"""What the TRL examples share: a task that fits any model, a small model to learn it on a CPU, and a plot.

The task: a prompt names a word among others, and the answer is that word three times. A pretrained model reads it as
English; the small model has the words as its vocabulary.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = (
    "apple",
    "bread",
    "chair",
    "dance",
    "eagle",
    "flame",
    "grape",
    "house",
    "image",
    "juice",
    "knife",
    "lemon",
    "night",
)
FRAME = "Repeat the word ->"


def parse_args(description: str, **defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or hub id; a small model from scratch if left out")
    parser.add_argument("--steps", type=int, default=defaults["steps"], help="optimizer steps")
    rate = defaults.get("learning_rate", 3e-3)
    parser.add_argument("--learning-rate", type=float, help=f"{rate} from scratch, 1e-6 for --model, if left out")
    parser.add_argument("--chunk-size", default="auto", help='tokens that are differentiated at a time, or "auto"')
    parser.add_argument("--output", type=Path, default=Path("runs") / defaults["name"], help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    args = parser.parse_args()
    if args.learning_rate is None:
        args.learning_rate = 1e-6 if args.model else rate
    args.output.mkdir(parents=True, exist_ok=True)
    return args


def question(draw: random.Random) -> tuple[str, str]:
    """A prompt and the word it asks for."""
    word = draw.choice(WORDS)
    return f"{FRAME} {word} :", word


def answer(word: str) -> str:
    return " " + " ".join([word] * 3)


def share_repeated(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of three words that are the prompt's."""
    wanted = [prompt.split()[-2] for prompt in prompts]
    return [min(3, text.split().count(word)) / 3 for text, word in zip(completions, wanted, strict=True)]


def small_tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {
        word: index for index, word in enumerate(["<pad>", "</s>", *dict.fromkeys([*FRAME.split(), ":", *WORDS])])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=":"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def model_and_tokenizer(args: argparse.Namespace) -> tuple[Any, PreTrainedTokenizerBase]:
    """What TRL's trainers take: the id of a pretrained model, or a small one from scratch."""
    if args.model:
        from transformers import AutoTokenizer

        return args.model, AutoTokenizer.from_pretrained(args.model)
    tokenizer = small_tokenizer()
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), tokenizer


def trainer_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all of TRL's configs have."""
    return {
        "output_dir": str(args.output), "max_steps": args.steps, "learning_rate": args.learning_rate, "seed": args.seed,
        "stream_chunk_size": args.chunk_size, "logging_steps": max(1, args.steps // 20), "save_strategy": "no",
        "report_to": [], "lr_scheduler_type": "constant", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
    }  # fmt: skip


def plot(log: list[dict[str, Any]], keys: list[str], file: Path) -> None:
    """The logged values against steps, as a PNG; prints the first and the last of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(keys), figsize=(4.5 * len(keys), 3.2), layout="constrained")
    for key, axis in zip(keys, axes if len(keys) > 1 else [axes], strict=True):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        axis.plot(*zip(*points, strict=True))
        axis.set(xlabel="step", title=key)
        axis.grid(alpha=0.3)
        print(f"{key}: {points[0][1]:.3f} -> {points[-1][1]:.3f}")
    figure.savefig(file, dpi=120)
    print(f"plot: {file}")
