"""Fine-tune PaliGemma: images and a question are a prefix that is read in both directions, and the answer is causal.

    python examples/paligemma.py                              # a small one from scratch, on a CPU, under a minute
    python examples/paligemma.py --model google/paligemma2-3b-pt-448 --data images.jsonl     # a pretrained one on a GPU

A row of --data is {"image": PATH, "prompt": TEXT, "completion": TEXT}, the path beside the file. Without --data: squares
of a colour, and the question which colour it is. Chunks end behind the prefix. Each row needs `token_type_ids`, 0 for the
prefix and 1 for the answer: the model makes its mask of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from toy import show
from transformers import AutoProcessor, PaliGemmaConfig, PaliGemmaForConditionalGeneration
from vlm import IMAGE, PATCH, SIDE, VOCABULARY, parse_args, small_batch

import streambp


def small_model() -> PaliGemmaForConditionalGeneration:
    """An image's 16 patches become 16 tokens of the language model."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = {
        **sizes, "model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH, "projection_dim": 64,
        "vision_use_head": False,
    }  # fmt: skip
    text = {
        **sizes, "model_type": "gemma", "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, projection_dim=64, image_token_index=IMAGE
    )
    return PaliGemmaForConditionalGeneration(config)


def batch_of(row: dict[str, str], folder: Path, processor: Any) -> dict[str, Any]:
    """One row of a data set. The processor makes token_type_ids, and labels of the answer."""
    image = Image.open(folder / row["image"]).convert("RGB")
    return dict(
        processor(
            text=f"<image>{row['prompt']}",
            images=image,
            suffix=row["completion"],
            return_tensors="pt",
        )
    )


def main() -> None:
    args = parse_args("PaliGemma, streamed.", "paligemma")
    torch.manual_seed(args.seed)
    draw, log = random.Random(args.seed), []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model:
        model: Any = PaliGemmaForConditionalGeneration.from_pretrained(args.model, dtype="auto")
        processor = AutoProcessor.from_pretrained(args.model)
        rows = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()]
    else:
        model = small_model()
    model = streambp.patch(
        model.to(device).train(), streambp.StreamConfig(chunk_size=args.chunk_size)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        if args.model:
            batch = batch_of(draw.choice(rows), args.data.parent, processor)
        else:
            batch = small_batch(draw)
            batch["token_type_ids"] = (batch["labels"] != -100).long()  # [B, T]
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        loss = model(
            **{name: value.to(device) for name, value in batch.items()}, use_cache=False
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({"step": step + 1, "loss": loss.item()})
    print(streambp.describe(model))
    model.save_pretrained(args.output)
    show(log, ["loss"], args.output / "paligemma.png")


if __name__ == "__main__":
    main()
