"""QLoRA with TRL, streamed: adapters on 4-bit weights, for one 24 GB card.

    python examples/qlora.py                                  # a small model from scratch, on a CPU, under a minute
    python examples/qlora.py --model Qwen/Qwen3-8B --data chats.jsonl --max-length 65536
                                                              # an 8B model on one 24 GB card

    streambp plan Qwen/Qwen3-8B --lora 16 --bits 4 --gpu-memory 24GiB --seq-len 64k     # before: does it fit?

Needs `pip install bitsandbytes`; `--bits 16` trains the adapters on unquantised weights, without it. Rows of --data are
those of sft.py.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from peft import LoraConfig
from toy import DATA, model_and_tokenizer, parser_of, read_rows, settled, show, trainer_settings
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)

import streambp
from streambp.integrations.trl import StreamSFTConfig, StreamSFTTrainer


def parse_args() -> argparse.Namespace:
    data, rows = DATA / "completions.jsonl", 'JSON lines with "prompt" and "completion"'
    parser = parser_of(
        "QLoRA, streamed.",
        steps=60,
        max_length=512,
        name="qlora",
        data=data,
        rows=rows,
        learning_rate=2e-2,
        pretrained=2e-4,
    )
    parser.add_argument(
        "--bits", type=int, choices=(4, 16), default=4, help="of the frozen weights"
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    return settled(parser)


def load(args: argparse.Namespace) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with frozen weights of so many bits. The small one is saved first: transformers quantises as it loads."""
    quantization = None
    if args.bits == 4:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if args.model else torch.float32,
        )  # fmt: skip
    how = {
        "quantization_config": quantization,
        "dtype": torch.bfloat16 if args.model else torch.float32,
    }
    if args.model:
        return AutoModelForCausalLM.from_pretrained(
            args.model, **how
        ), AutoTokenizer.from_pretrained(args.model)
    model, tokenizer = model_and_tokenizer(args)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, **how), tokenizer


def main() -> None:
    args = parse_args()
    try:
        model, tokenizer = load(args)
    except ImportError as error:
        raise SystemExit(
            f"{error}\nInstall it (pip install bitsandbytes), or train on unquantised weights: --bits 16"
        ) from error
    adapters = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = StreamSFTTrainer(
        model=model,
        args=StreamSFTConfig(
            **trainer_settings(args), per_device_train_batch_size=16, max_length=args.max_length
        ),
        train_dataset=read_rows(args.data),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    trainer.train()
    print(streambp.describe(trainer.model))
    trainer.save_model(str(args.output))
    print(f"adapters: {args.output}")
    show(trainer.state.log_history, ["loss", "mean_token_accuracy"], args.output / "qlora.png")


if __name__ == "__main__":
    main()
