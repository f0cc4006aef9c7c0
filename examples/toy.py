"""What the examples share: a task that fits any model, a small model to learn it on a CPU, and a plot.

The task: a prompt names a word, and the answer is that word three times. A pretrained model reads it as English; the small
model has the words as its vocabulary. `python examples/toy.py` writes the files of examples/data.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
DATA = Path(__file__).with_name("data")
# A turn of a conversation is "<user> ... </s>"; the model's own turn begins with "<assistant>".
CHAT = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def parser_of(
    description: str, *, steps: int, name: str, **defaults: Any
) -> argparse.ArgumentParser:
    """The arguments of all examples: `defaults` has learning_rate (of the small model), pretrained (that of --model), and,
    for the examples that have the flags, max_length, data and rows (what a line of it has)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model", help="checkpoint folder or hub id; a small model from scratch if left out"
    )
    if "data" in defaults:
        parser.add_argument("--data", type=Path, default=defaults["data"], help=defaults["rows"])
    if "max_length" in defaults:
        parser.add_argument(
            "--max-length",
            type=int,
            default=defaults["max_length"],
            help="tokens; longer rows are cut",
        )
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    rates = (defaults.get("learning_rate", 3e-3), defaults.get("pretrained", 1e-6))
    parser.add_argument(
        "--learning-rate",
        type=float,
        help=f"{rates[0]} from scratch, {rates[1]} for --model, if left out",
    )
    parser.add_argument(
        "--chunk-size", default="auto", help='tokens that are differentiated at a time, or "auto"'
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs") / name, help="folder of the results"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.set_defaults(rates=rates)
    return parser


def settled(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of the command line, with the learning rate that goes with the model."""
    args = parser.parse_args()
    if args.learning_rate is None:
        args.learning_rate = args.rates[bool(args.model)]
    args.output.mkdir(parents=True, exist_ok=True)
    return args


def parse_args(description: str, **defaults: Any) -> argparse.Namespace:
    return settled(parser_of(description, **defaults))


def answer(word: str) -> str:
    return " ".join([word] * 3)


def repeated(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """A reward for TRL: the share of three words that are the row's `answer`, for each completion."""
    words_of_completions = [completion[0]["content"].split() for completion in completions]
    return [
        min(3, words.count(word)) / 3
        for words, word in zip(words_of_completions, answer, strict=True)
    ]


def read_rows(file: Path) -> Dataset:
    """The rows of a JSON lines file."""
    try:
        return load_dataset("json", data_files=str(file), split="train")
    except FileNotFoundError as error:
        raise SystemExit(
            f"--data {file} does not exist. Pass a JSON lines file such as those of examples/data."
        ) from error


def small_tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {
        word: index
        for index, word in enumerate(
            [
                "<pad>",
                "</s>",
                *dict.fromkeys([*FRAME.split(), ":", *WORDS]),
                "<user>",
                "<assistant>",
            ]
        )
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=":"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", chat_template=CHAT
    )


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


def show(log: list[dict[str, Any]], keys: list[str], file: Path) -> None:
    """Print the first and the last of each logged value, and draw them against steps if matplotlib is installed."""
    logged = {key: [(entry["step"], entry[key]) for entry in log if key in entry] for key in keys}
    for key, curve in logged.items():
        print(f"{key}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(4.5 * len(keys), 3.2), layout="constrained")
    for (key, curve), axis in zip(
        logged.items(), figure.subplots(1, len(keys), squeeze=False)[0], strict=True
    ):
        axis.plot(*zip(*curve, strict=True))
        axis.set(xlabel="step", title=key)
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    print(f"plot: {file}")


def user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def write_data() -> None:
    """The files of examples/data: conversations in the formats of TRL's trainers, one JSON object a line."""
    draw = random.Random(0)
    chats, completions, preferences, prompts = [], [], [], []
    for word in WORDS:
        prompt = {"prompt": user(f"{FRAME} {word} :")}
        for wrong_word in draw.sample([candidate for candidate in WORDS if candidate != word], 8):
            chats.append({"messages": prompt["prompt"] + assistant(answer(word))})
            completions.append({**prompt, "completion": assistant(answer(word))})
            preferences.append(
                {
                    **prompt,
                    "chosen": assistant(answer(word)),
                    "rejected": assistant(answer(wrong_word)),
                }
            )
            prompts.append({**prompt, "answer": word})
    files = {
        "chats": chats,
        "completions": completions,
        "preferences": preferences,
        "prompts": prompts,
    }
    for name, rows in files.items():
        draw.shuffle(rows)
        (DATA / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
        )


if __name__ == "__main__":
    write_data()
