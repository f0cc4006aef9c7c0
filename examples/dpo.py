"""Direct preference optimisation with TRL, streamed: policy and reference both run in chunks.

    python examples/dpo.py                                    # a small model from scratch, on a CPU, under a minute
    python examples/dpo.py --model Qwen/Qwen3-8B              # a pretrained one on a GPU

A row of --data is a prompt and two answers, each a conversation:
{"prompt": [{"role": "user", "content": ...}], "chosen": [{"role": "assistant", "content": ...}], "rejected": [...]}.
"""

from __future__ import annotations

import copy

from toy import DATA, model_and_tokenizer, parse_args, read_rows, show, trainer_settings

from streambp.integrations.trl import StreamDPOConfig, StreamDPOTrainer


def main() -> None:
    data, rows = DATA / "preferences.jsonl", 'JSON lines with "prompt", "chosen" and "rejected"'
    args = parse_args(
        "Direct preference optimisation, streamed.",
        steps=60,
        max_length=512,
        name="dpo",
        data=data,
        rows=rows,
    )
    model, tokenizer = model_and_tokenizer(args)
    config = StreamDPOConfig(
        **trainer_settings(args),
        per_device_train_batch_size=16,
        max_length=args.max_length,
        beta=0.3,
    )
    trainer = StreamDPOTrainer(
        model=model,
        ref_model=None if args.model else copy.deepcopy(model),  # with --model, TRL loads it again
        args=config,
        train_dataset=read_rows(args.data),
        processing_class=tokenizer,
    )
    trainer.train()
    show(trainer.state.log_history, ["loss", "rewards/accuracies"], args.output / "dpo.png")


if __name__ == "__main__":
    main()
