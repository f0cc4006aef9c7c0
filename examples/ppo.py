"""Proximal policy optimisation, streamed: a value head on the policy's backbone, one backward for both.

    python examples/ppo.py                                    # a small model from scratch, on a CPU, under a minute
    python examples/ppo.py --model Qwen/Qwen3-8B              # a pretrained one on a GPU

A row of --data is a prompt, and what the reward needs: {"prompt": [{"role": "user", "content": ...}], "answer": ...}.
"""

from __future__ import annotations

from toy import DATA, model_and_tokenizer, parse_args, read_rows, repeated, show, trainer_settings

from streambp.integrations.trl import StreamPPOConfig, StreamPPOTrainer


def main() -> None:
    data, rows = DATA / "prompts.jsonl", 'JSON lines with "prompt" and "answer"'
    args = parse_args(
        "Proximal policy optimisation, streamed.",
        steps=400,
        learning_rate=1e-3,
        name="ppo",
        data=data,
        rows=rows,
    )
    model, tokenizer = model_and_tokenizer(args)
    config = StreamPPOConfig(
        **trainer_settings(args), per_device_train_batch_size=32, steps_per_generation=2, num_iterations=2,
        max_completion_length=3, kl_coef=0.01, value_coef=0.5,
    )  # fmt: skip
    trainer = StreamPPOTrainer(
        model=model,
        args=config,
        train_dataset=read_rows(args.data),
        processing_class=tokenizer,
        reward_funcs=repeated,
    )
    trainer.train()
    show(
        trainer.state.log_history,
        ["reward", "explained_variance", "ppo/value"],
        args.output / "ppo.png",
    )


if __name__ == "__main__":
    main()
