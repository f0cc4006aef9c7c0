"""Group-relative policy optimisation with TRL, streamed: TRL generates and scores, the gradient steps run in chunks.

python examples/grpo.py                                   # a small model from scratch, on a CPU, under a minute
python examples/grpo.py --model Qwen/Qwen3-8B             # a pretrained one on a GPU
"""

from __future__ import annotations

import random

from datasets import Dataset
from toy import model_and_tokenizer, parse_args, plot, question, share_repeated, trainer_settings

from streambp.integrations.trl import StreamGRPOConfig, StreamGRPOTrainer


def main() -> None:
    args = parse_args("Group-relative policy optimisation, streamed.", steps=300, name="grpo")
    model, tokenizer = model_and_tokenizer(args)
    draw = random.Random(args.seed)
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
        train_dataset=Dataset.from_list([{"prompt": question(draw)[0]} for _ in range(256)]),
        processing_class=tokenizer,
        reward_funcs=share_repeated,
    )
    trainer.train()
    plot(trainer.state.log_history, ["reward", "entropy"], args.output / "grpo.png")


if __name__ == "__main__":
    main()
