"""Supervised fine-tuning with TRL, streamed.

    python examples/sft.py                                    # a small model from scratch, on a CPU, under a minute
    python examples/sft.py --model Qwen/Qwen3-8B              # a pretrained one on a GPU

The only differences from TRL's own trainer are the two names that start with `Stream`.
"""

from __future__ import annotations

import random

from datasets import Dataset
from toy import answer, model_and_tokenizer, parse_args, plot, question, trainer_settings

from streambp.integrations.trl import StreamSFTConfig, StreamSFTTrainer


def main() -> None:
    args = parse_args("Supervised fine-tuning, streamed.", steps=60, name="sft")
    model, tokenizer = model_and_tokenizer(args)
    draw = random.Random(args.seed)
    rows = [{"prompt": prompt, "completion": answer(word)} for prompt, word in (question(draw) for _ in range(512))]
    config = StreamSFTConfig(**trainer_settings(args), per_device_train_batch_size=16, max_length=512)
    trainer = StreamSFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    plot(trainer.state.log_history, ["loss", "mean_token_accuracy"], args.output / "sft.png")


if __name__ == "__main__":
    main()
