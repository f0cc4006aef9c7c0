"""A tiny Qwen3 with a tokenizer, and data, as the frameworks read them. Run by an environment's own
Python.

python inputs.py FOLDER: writes FOLDER/model and FOLDER/data.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# words of an answer: two or three chunks of 100, and a rest
VOCABULARY, ROWS, SHORTEST, LONGEST = (1024, 8, 130, 300)
SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
CHATML = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.1, pad_token_id=0,
        bos_token_id=1, eos_token_id=3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    names = [*SPECIAL_TOKENS, "user", "assistant", "system"]
    names += [f"w{number}" for number in range(VOCABULARY - len(names))]
    words = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<|unk|>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<|pad|>", eos_token="<|im_end|>", bos_token="<|endoftext|>", unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"], model_max_length=1024,
    )  # fmt: skip
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


def write_data(folder: Path) -> None:
    """The same rows in the forms that the frameworks read."""
    draw = random.Random(1)

    def text(min_words: int, max_words: int) -> str:
        return " ".join(
            f"w{draw.randrange(200)}" for _ in range(draw.randint(min_words, max_words))
        )

    rows = [(text(5, 40), text(SHORTEST, LONGEST), text(SHORTEST, LONGEST)) for _ in range(ROWS)]

    def answer(content: str) -> dict[str, str]:
        return {"role": "assistant", "content": content}

    def conversation(question: str, *answers: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, *map(answer, answers)]

    forms = {
        "alpaca-sft": [{"instruction": q, "input": "", "output": a} for q, a, _ in rows],
        "alpaca-dpo": [
            {"instruction": q, "input": "", "chosen": a, "rejected": b} for q, a, b in rows
        ],
        "messages-sft": [{"messages": conversation(q, a)} for q, a, _ in rows],
        "messages-dpo": [
            {"messages": conversation(q, a), "rejected_response": b} for q, a, b in rows
        ],
        "chosen-dpo": [
            {"messages": conversation(q), "chosen": answer(a), "rejected": answer(b)}
            for q, a, b in rows
        ],
    }
    for name, rows_of_form in forms.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows_of_form)
        )
    dataset_info = {
        "sft": {"file_name": "alpaca-sft.jsonl"},
        "dpo": {"file_name": "alpaca-dpo.jsonl", "ranking": True},
    }
    columns = {
        "prompt": "instruction",
        "query": "input",
        "chosen": "chosen",
        "rejected": "rejected",
    }
    dataset_info["dpo"]["columns"] = columns
    (folder / "dataset_info.json").write_text(json.dumps(dataset_info))


def main() -> None:
    folder = Path(sys.argv[1])
    for name in ("model", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_tokenizer(folder / "model")
    write_data(folder / "data")


if __name__ == "__main__":
    main()
