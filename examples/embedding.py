"""Train an embedding model: a decoder that maps a text to one vector, by contrast within a batch (InfoNCE).

    python examples/embedding.py                              # a small model from scratch, on a CPU, under a minute
    python examples/embedding.py --model Qwen/Qwen3-Embedding-0.6B --data pairs.jsonl --max-length 32768

`streambp.patch` takes a model without a head as well: its layers stream, and the loss is this program's own. A text and its
partner may be whole documents. A row of --data is {"prompt": ..., "completion": ...}, each a text or a conversation; the
program pulls the two together and all others of the batch apart.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from toy import DATA, model_and_tokenizer, parse_args, read_rows, show
from transformers import AutoModel, PreTrainedTokenizerBase

import streambp

BATCH, TEMPERATURE = 13, 0.05


def texts(rows: list[dict[str, Any]], name: str) -> list[str]:
    """One column; of a conversation what was said."""
    row_texts = [row[name] for row in rows]
    return [
        text if isinstance(text, str) else "\n".join(turn["content"] for turn in text)
        for text in row_texts
    ]


def embed(
    model: Any, tokenizer: PreTrainedTokenizerBase, batch: list[str], max_length: int
) -> Tensor:
    """Vectors of length one, [B, h]: the last token's hidden state, which has seen the whole text."""
    inputs = tokenizer(
        batch, padding=True, truncation=True, max_length=max_length, return_tensors="pt"
    ).to(model.device)
    mask = inputs["attention_mask"]  # [B, T]
    hidden = model(
        input_ids=inputs["input_ids"], attention_mask=mask, use_cache=False
    ).last_hidden_state  # [B, T, h]
    last = mask.sum(1) - 1  # [B]; texts are padded at their ends
    return torch.nn.functional.normalize(
        hidden[torch.arange(len(batch), device=hidden.device), last].float(), dim=-1
    )


def main() -> None:
    data, rows = DATA / "completions.jsonl", 'JSON lines with "prompt" and "completion"'
    args = parse_args(
        "Embeddings by contrast, streamed.",
        steps=60,
        max_length=512,
        name="embedding",
        data=data,
        rows=rows,
    )
    model, tokenizer = model_and_tokenizer(args)
    # without its head
    model = AutoModel.from_pretrained(args.model, dtype="auto") if args.model else model.model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = streambp.patch(
        model.to(device).train(), streambp.StreamConfig(chunk_size=args.chunk_size)
    )
    tokenizer.padding_side = "right"
    pairs = list({str(row): row for row in read_rows(args.data)}.values())
    draw, log = random.Random(args.seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        batch = draw.sample(pairs, min(BATCH, len(pairs)))
        prompts = embed(model, tokenizer, texts(batch, "prompt"), args.max_length)  # [B, h]
        completions = embed(model, tokenizer, texts(batch, "completion"), args.max_length)  # [B, h]
        scores = prompts @ completions.T / TEMPERATURE  # [B, B]; the diagonal has the pairs
        target = torch.arange(len(batch), device=device)
        loss = torch.nn.functional.cross_entropy(scores, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracy = (scores.argmax(1) == target).float().mean().item()
        log.append({"step": step + 1, "loss": loss.item(), "found": accuracy})
    print(streambp.describe(model))
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    show(log, ["loss", "found"], args.output / "embedding.png")


if __name__ == "__main__":
    main()
