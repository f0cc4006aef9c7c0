"""Fine-tune a model that reads images: the language model's layers stream, the vision tower is left as it is.

    python examples/vlm.py                                    # a small LLaVA from scratch, on a CPU, under a minute
    python examples/vlm.py --model Qwen/Qwen2.5-VL-3B-Instruct --data images.jsonl     # a pretrained one on a GPU

A row of --data is {"image": PATH, "prompt": TEXT, "completion": TEXT}, the path beside the file. Without --data: squares
of a colour, and the question which colour it is. Images become hundreds of tokens each, so that a few of them make a long
sequence.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from toy import parser_of, settled, show
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3Config,
)

import streambp

COLOURS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "grey": (0.5, 0.5, 0.5),
}
IMAGE, ASK, FIRST_COLOUR, VOCABULARY = 0, 1, 2, 8  # tokens of the small model
SIDE, PATCH = 32, 8


def parse_args(description: str, name: str) -> argparse.Namespace:
    parser = parser_of(description, steps=60, name=name, pretrained=1e-5)
    parser.add_argument(
        "--data", type=Path, help='JSON lines with "image", "prompt" and "completion"'
    )
    args = settled(parser)
    if bool(args.model) != bool(args.data):
        parser.error(
            "--model and --data go together: the small model has no words, and a pretrained one needs rows."
        )
    return args


def small_model() -> Any:
    """LLaVA: an image's 16 patches become 16 tokens of the language model."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH, projection_dim=64)
    text = Qwen3Config(
        **sizes, vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1
    )
    return LlavaForConditionalGeneration(config)


def small_batch(draw: random.Random, rows: int = 8) -> dict[str, Tensor]:
    """Squares, and the name of their colour as the only label."""
    names = [draw.randrange(len(COLOURS)) for _ in range(rows)]
    values = torch.tensor([list(COLOURS.values())[name] for name in names])  # [B, 3]
    patches = (SIDE // PATCH) ** 2
    ids = torch.tensor([[IMAGE] * patches + [ASK, FIRST_COLOUR + name] for name in names])  # [B, T]
    labels = ids.clone()
    labels[:, : patches + 1] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": values[:, :, None, None].expand(-1, -1, SIDE, SIDE),
    }


def batch_of(row: dict[str, str], folder: Path, processor: Any) -> dict[str, Tensor]:
    """One row of a data set; the prompt has no label."""
    content = [
        {"type": "image", "path": str(folder / row["image"])},
        {"type": "text", "text": row["prompt"]},
    ]
    prompt_messages = [{"role": "user", "content": content}]
    messages = [
        *prompt_messages,
        {"role": "assistant", "content": [{"type": "text", "text": row["completion"]}]},
    ]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    prompt = processor.apply_chat_template(prompt_messages, add_generation_prompt=True, **how)[
        "input_ids"
    ].shape[1]
    inputs = dict(processor.apply_chat_template(messages, **how))
    inputs["labels"] = inputs["input_ids"].clone()  # [1, T]
    inputs["labels"][:, :prompt] = -100
    return inputs


def main() -> None:
    args = parse_args("Images and text, streamed.", "vlm")
    torch.manual_seed(args.seed)
    draw, log = random.Random(args.seed), []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model:
        model: Any = AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto")
        processor = AutoProcessor.from_pretrained(args.model)
        rows = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()]
    else:
        model = small_model()
    model = streambp.patch(
        model.to(device).train(), streambp.StreamConfig(chunk_size=args.chunk_size)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        batch = (
            batch_of(draw.choice(rows), args.data.parent, processor)
            if args.model
            else small_batch(draw)
        )
        loss = model(
            **{name: value.to(device) for name, value in batch.items()}, use_cache=False
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({"step": step + 1, "loss": loss.item()})
    print(streambp.describe(model))
    model.save_pretrained(args.output)
    show(log, ["loss"], args.output / "vlm.png")


if __name__ == "__main__":
    main()
