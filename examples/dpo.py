"""Direct preference optimisation with TRL, streamed: policy and reference both run in chunks.

python examples/dpo.py                                    # a small model from scratch, on a CPU, under a minute
python examples/dpo.py --model Qwen/Qwen3-8B              # a pretrained one on a GPU
"""

from __future__ import annotations

import copy
import random

from datasets import Dataset
from toy import WORDS, answer, model_and_tokenizer, parse_args, plot, question, trainer_settings

from streambp.integrations.trl import StreamDPOConfig, StreamDPOTrainer


def pair(draw: random.Random) -> dict[str, str]:
    prompt, word = question(draw)
    other = draw.choice([candidate for candidate in WORDS if candidate != word])
    return {"prompt": prompt, "chosen": answer(word), "rejected": answer(other)}


def main() -> None:
    args = parse_args("Direct preference optimisation, streamed.", steps=60, name="dpo")
    model, tokenizer = model_and_tokenizer(args)
    draw = random.Random(args.seed)
    config = StreamDPOConfig(**trainer_settings(args), per_device_train_batch_size=16, beta=0.3)
    trainer = StreamDPOTrainer(
        model=model,
        ref_model=None if args.model else copy.deepcopy(model),  # with --model, TRL loads it again
        args=config,
        train_dataset=Dataset.from_list([pair(draw) for _ in range(512)]),
        processing_class=tokenizer,
    )
    trainer.train()
    plot(trainer.state.log_history, ["loss", "rewards/accuracies"], args.output / "dpo.png")


if __name__ == "__main__":
    main()
