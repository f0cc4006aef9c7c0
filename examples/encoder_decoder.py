"""Train an encoder-decoder with transformers' Seq2SeqTrainer: a text in, a text out. The decoder streams.

    python examples/encoder_decoder.py                        # a small BART from scratch, on a CPU, under a minute
    python examples/encoder_decoder.py --model facebook/bart-base --max-length 1024

`streambp.patch` before the trainer is made is the only change. A row of --data is {"prompt": ..., "completion": ...}, each
a text or a conversation; the encoder reads the prompt, and the decoder writes the completion.
"""

from __future__ import annotations

from typing import Any

import torch
from toy import DATA, parse_args, read_rows, show, small_tokenizer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import streambp

BATCH = 16


def text_of(content: Any) -> str:
    """A text; of a conversation what was said."""
    return content if isinstance(content, str) else "\n".join(turn["content"] for turn in content)


def small_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> BartForConditionalGeneration:
    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=None, eos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=None, init_std=0.1, dropout=0.0,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def main() -> None:
    data, rows = DATA / "completions.jsonl", 'JSON lines with "prompt" and "completion"'
    args = parse_args(
        "An encoder-decoder, streamed.",
        steps=60,
        max_length=512,
        name="encoder_decoder",
        data=data,
        rows=rows,
    )
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    else:
        tokenizer = small_tokenizer()
        model = small_model(tokenizer, args.seed)
    streambp.patch(model, streambp.StreamConfig(chunk_size=args.chunk_size))

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        prompt, completion = (text_of(row[name]) for name in ("prompt", "completion"))
        max_tokens = args.max_length - 1
        read = tokenizer(prompt, truncation=True, max_length=args.max_length)["input_ids"]
        label_ids = tokenizer(completion, add_special_tokens=False)["input_ids"][:max_tokens]
        return {"input_ids": read, "labels": [*label_ids, tokenizer.eos_token_id]}

    on_cpu = not torch.cuda.is_available()
    settings = Seq2SeqTrainingArguments(
        output_dir=str(args.output), max_steps=args.steps, learning_rate=args.learning_rate, seed=args.seed,
        per_device_train_batch_size=BATCH, logging_steps=max(1, args.steps // 20), save_strategy="no", report_to=[],
        lr_scheduler_type="constant", disable_tqdm=True, use_cpu=on_cpu, bf16=not on_cpu,
    )  # fmt: skip
    read = read_rows(args.data)
    trainer = Seq2SeqTrainer(
        model=model,
        args=settings,
        train_dataset=read.map(tokens, remove_columns=read.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
    )
    trainer.train()
    print(streambp.describe(model))
    trainer.save_model(str(args.output))
    show(trainer.state.log_history, ["loss"], args.output / "encoder_decoder.png")


if __name__ == "__main__":
    main()
