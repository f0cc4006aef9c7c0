"""Group-relative policy optimisation with TRL, streamed: TRL generates and scores, the gradient steps run in chunks.

    python examples/grpo.py                                   # a small model from scratch, on a CPU, under a minute
    python examples/grpo.py --model Qwen/Qwen3-8B             # a pretrained one on a GPU

A row of --data is a prompt, and what the reward needs: {"prompt": [{"role": "user", "content": ...}], "answer": ...}.
"""

from __future__ import annotations

from toy import DATA, model_and_tokenizer, parse_args, read_rows, repeated, show, trainer_settings

from streambp.integrations.trl import StreamGRPOConfig, StreamGRPOTrainer


def main() -> None:
    data, rows = DATA / "prompts.jsonl", 'JSON lines with "prompt" and "answer"'
    args = parse_args(
        "Group-relative policy optimisation, streamed.",
        steps=300,
        name="grpo",
        data=data,
        rows=rows,
    )
    model, tokenizer = model_and_tokenizer(args)
    config = StreamGRPOConfig(
        **trainer_settings(args),
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=3,
        beta=0.0,
        stream_rows="packed",  # a micro-batch has eight whole groups; prompts from 64 tokens on count
    )
    trainer = StreamGRPOTrainer(
        model=model,
        args=config,
        train_dataset=read_rows(args.data),
        processing_class=tokenizer,
        reward_funcs=repeated,
    )
    trainer.train()
    show(trainer.state.log_history, ["reward", "entropy"], args.output / "grpo.png")


if __name__ == "__main__":
    main()
