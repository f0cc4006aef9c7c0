"""Supervised fine-tuning with TRL, streamed.

    python examples/sft.py                                    # a small model from scratch, on a CPU, under a minute
    python examples/sft.py --model Qwen/Qwen3-8B              # a pretrained one on a GPU

The only differences from TRL's own trainer are the two names that start with `Stream`. A row of --data is
{"prompt": [{"role": "user", "content": ...}], "completion": [{"role": "assistant", "content": ...}]}.
"""

from __future__ import annotations

from toy import DATA, model_and_tokenizer, parse_args, read_rows, show, trainer_settings

from streambp.integrations.trl import StreamSFTConfig, StreamSFTTrainer


def main() -> None:
    data, rows = DATA / "completions.jsonl", 'JSON lines with "prompt" and "completion"'
    args = parse_args(
        "Supervised fine-tuning, streamed.",
        steps=60,
        max_length=512,
        name="sft",
        data=data,
        rows=rows,
    )
    model, tokenizer = model_and_tokenizer(args)
    config = StreamSFTConfig(
        **trainer_settings(args), per_device_train_batch_size=16, max_length=args.max_length
    )
    trainer = StreamSFTTrainer(
        model=model, args=config, train_dataset=read_rows(args.data), processing_class=tokenizer
    )
    trainer.train()
    show(trainer.state.log_history, ["loss", "mean_token_accuracy"], args.output / "sft.png")


if __name__ == "__main__":
    main()
