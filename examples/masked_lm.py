"""Train an encoder to fill in masked tokens of long texts, as encoders are pretrained: its layers read ahead, and stream.

    python examples/masked_lm.py                              # a small ModernBERT from scratch, on a CPU, under a minute
    python examples/masked_lm.py --model answerdotai/ModernBERT-base --data texts.jsonl --max-length 8192

A row of --data is {"prompt": ..., "completion": ...}, each a text or a conversation. Rows are joined to texts of
--max-length tokens, and 30 % of the tokens are masked. The loss is computed without logits.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from toy import DATA, parse_args, read_rows, show, small_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedTokenizerBase,
)

import streambp

BATCH, MASKED = 4, 0.3


def words(content: Any) -> str:
    """A text; of a conversation what was said."""
    return content if isinstance(content, str) else "\n".join(turn["content"] for turn in content)


def small_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> ModernBertForMaskedLM:
    """Two layers with a window to both sides, and every second one without. The tokenizer gets a mask token."""
    torch.manual_seed(seed)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        local_attention=16, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=1, cls_token_id=1,
        sep_token_id=1,
    )  # fmt: skip
    return ModernBertForMaskedLM(config)


def masked_batch(ids: Tensor, mask_token: int) -> dict[str, Tensor]:
    """A batch [B, T] with labels where tokens are masked."""
    masked = torch.rand(ids.shape) < MASKED
    masked[:, 0] = True  # each row has a label
    return {
        "input_ids": ids.masked_fill(masked, mask_token),
        "labels": ids.masked_fill(~masked, -100),
    }


def main() -> None:
    data, rows = DATA / "completions.jsonl", 'JSON lines with "prompt" and "completion"'
    args = parse_args(
        "A masked language model, streamed.",
        steps=60,
        max_length=128,
        name="masked_lm",
        data=data,
        rows=rows,
    )
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForMaskedLM.from_pretrained(args.model, dtype="auto")
    else:
        tokenizer = small_tokenizer()
        model = small_model(tokenizer, args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = streambp.patch(
        model.to(device).train(), streambp.StreamConfig(chunk_size=args.chunk_size)
    )
    texts = [f"{words(row['prompt'])} {words(row['completion'])}" for row in read_rows(args.data)]
    ids = torch.cat(
        [
            torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
            for text in texts
        ]
    )
    if len(ids) <= args.max_length:
        raise SystemExit(f"--data has {len(ids)} tokens. Pass a smaller --max-length.")
    torch.manual_seed(args.seed)
    draw, log = random.Random(args.seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        starts = [draw.randrange(len(ids) - args.max_length) for _ in range(BATCH)]
        batch_ids = torch.stack([ids[start : start + args.max_length] for start in starts])
        batch = masked_batch(batch_ids, tokenizer.mask_token_id)
        loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({"step": step + 1, "loss": loss.item()})
    print(streambp.describe(model))
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    show(log, ["loss"], args.output / "masked_lm.png")


if __name__ == "__main__":
    main()
