"""What stands in for what, where the tests run a page's programs: the one table of substitutions.

A big checkpoint becomes a small one of its kind on disk, a data set some rows in a file, a GPU's
dtype float32, and each length a short one. Programs keep their calls and their settings' names.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import sys
import types
from pathlib import Path
from types import MappingProxyType
from typing import Any

CHECKPOINTS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen2.5-VL-3B-Instruct",
)
# whose real configurations plans read
CHECKPOINT_SIZES = MappingProxyType({CHECKPOINTS[0]: "8B", CHECKPOINTS[2]: "70B"})
DATA = (
    "trl-lib/Capybara",
    "trl-lib/ultrafeedback_binarized",
    "trl-lib/DeepMath-103K",
    "emozilla/pg19",
)
# of chunks; longer numbers are lengths of sequences
LENGTHS = MappingProxyType({8192: 16, 4096: 16})
LONG, SHORT = 10_000, 64
RANKS = 2
# Ends each program: a rank whose gloo threads still hold tensors while Python ends may abort
# (pytorch/pytorch#179291).
LEAVE_RANKS = """
import torch.distributed as ranks_of_test
if ranks_of_test.is_torchelastic_launched() and ranks_of_test.is_initialized():
    ranks_of_test.destroy_process_group()
"""
# Keywords of a trainer's arguments, where they are given, and those that are added.
GIVEN_ARGUMENTS = MappingProxyType(
    {
        "max_completion_length": 8, "num_generations": 2, "gradient_accumulation_steps": 1, "bf16": False,
        "report_to": "none", "stream_host_memory": None,
    }
)  # fmt: skip
ADDED_ARGUMENTS = MappingProxyType(
    {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none"}
)
GROUP = ("num_generations", "per_device_train_batch_size")
# a CPU has no 4-bit weights
DROPPED_ARGUMENTS = MappingProxyType({"from_pretrained": ("quantization_config", "device_map")})
DTYPES = MappingProxyType({"bfloat16": "float32"})


def bits(**kwargs: Any) -> None:
    """In place of `BitsAndBytesConfig`, which asks for bitsandbytes: its parameters are checked."""
    from transformers import BitsAndBytesConfig

    inspect.signature(BitsAndBytesConfig).bind(**kwargs)


def pack_without_bitsandbytes(monkeypatch: Any) -> None:
    """In place of bitsandbytes' parametrized weights: bytes with a scale for each 16 numbers."""
    from tests.layer.test_packed_experts import Decoding, pack

    name = "bitsandbytes.nn.parametrize"
    if importlib.util.find_spec("bitsandbytes") is not None:
        return
    module = types.ModuleType(name)
    notes = types.SimpleNamespace(append=lambda entry: None)
    vars(module)["Bnb4bitParametrization"] = Decoding
    vars(module)["replace_parameter_4bit"] = lambda experts, weight, quant_type: pack(
        experts, weight, notes
    )
    monkeypatch.setitem(sys.modules, name, module)


class Smaller(ast.NodeTransformer):
    """A program of a page with stand-ins. shards: it asks for FSDP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = False

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if isinstance(value, str):
            sizes = {str(size): str(short) for size, short in LENGTHS.items()}
            node.value = (DTYPES | sizes).get(value, substituted(value, self.folder))
        elif isinstance(value, int) and not isinstance(value, bool):
            node.value = LENGTHS.get(value, SHORT if value >= LONG else value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = DTYPES.get(node.attr, node.attr)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        dropped = DROPPED_ARGUMENTS.get(name, ())
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in dropped]
        keywords = {keyword.arg: keyword for keyword in node.keywords}
        if "weights" in keywords:  # a small model leaves room, where a big one's weights leave none
            keywords["weights"].value = ast.Constant("cpu")
        if name == "BitsAndBytesConfig":
            node.func = ast.parse(
                "__import__('tests.docs.stand_ins', fromlist=['bits']).bits", mode="eval"
            ).body
        if "output_dir" in keywords and name != "launch":
            values: dict[str, Any] = {
                key: value for key, value in GIVEN_ARGUMENTS.items() if key in keywords
            }
            values |= {
                key: value
                for key, value in ADDED_ARGUMENTS.items()
                if key != "max_steps" or key not in keywords
            }
            if "fsdp" in keywords:
                values["use_cpu"] = False  # transformers and accelerate take FSDP for a GPU's
                self.shards = True
            if "num_generations" in keywords and "per_device_train_batch_size" in keywords:
                values |= dict.fromkeys(GROUP, 2)
            for key, value in values.items():
                new = ast.keyword(key, ast.Constant(value))
                node.keywords = [keyword for keyword in node.keywords if keyword.arg != key] + [new]
        return node


def python(text: str, folder: Path) -> str:
    """A program with stand-ins of `folder`."""
    smaller = Smaller(folder)
    tree = smaller.visit(ast.parse(text))
    if smaller.shards:
        tree.body[:0] = ast.parse(
            "import tests.distributed.context_trainer as ranks; ranks.let_accelerate_shard()"
        ).body
    tree.body += ast.parse(LEAVE_RANKS).body
    return ast.unparse(ast.fix_missing_locations(tree))


def deepspeed(text: str) -> str:
    """A DeepSpeed config for CPU ranks: torch's Adam, no half precision, short chunks."""
    config = json.loads(text)
    config.pop("bf16", None)
    config["zero_force_ds_cpu_optimizer"] = False
    if "optimizer" in config:
        config["optimizer"]["params"]["torch_adam"] = True
    if "streambp" in config:
        config["streambp"]["chunk_size"] = 16
    return json.dumps(config)


def substituted(text: str, folder: Path) -> str:
    """Text with names of checkpoints and data sets replaced by those of `folder`."""
    for name in (*CHECKPOINTS, *DATA):
        text = text.replace(name, str(folder / name))
    return text


def ranks(words: list[str]) -> list[str]:
    """A command for several GPUs, for as many CPU ranks as the tests start."""
    return [re.sub(r"\d+", lambda match: str(min(RANKS, int(match[0]))), word) if previous == "--nproc-per-node" else word
            for previous, word in zip(["", *words], words, strict=False)]  # fmt: skip


def make(folder: Path) -> None:
    """All checkpoints and data, small, under the names that pages use."""
    tokenizer = make_tokenizer()
    for name in CHECKPOINTS[:3]:
        make_text_model(len(tokenizer), name).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    make_vision_model(folder / CHECKPOINTS[3], tokenizer)
    for name, rows in zip(
        DATA, (conversations(), preferences(), questions(), books()), strict=True
    ):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines = "\n".join(json.dumps(row) for row in rows)
            (folder / name / f"{split}.jsonl").write_text(lines)


VOCABULARY_WORDS = tuple(f"w{i}" for i in range(990))
TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image> <image> <image> <image> ' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ ' </s> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "user", "assistant")
    vocabulary = {word: index for index, word in enumerate((*special, *VOCABULARY_WORDS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


SIZES = MappingProxyType(
    {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
    }
)  # fmt: skip


def make_text_model(vocabulary: int, name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    kind = "llama" if "Llama" in name else "qwen3"
    config = AutoConfig.for_model(kind, vocab_size=max(1000, vocabulary), **special, **SIZES)
    return AutoModelForCausalLM.from_config(config)


def make_vision_model(folder: Path, tokenizer: Any) -> None:
    """A tiny Qwen2.5-VL. Its processor is `Processor`, since the real one wants the real
    tokenizer."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {key: value for key, value in SIZES.items() if key != "head_dim"}
    text |= {
        "vocab_size": 1000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
        "spatial_merge_size": 1, "window_size": 8, "fullatt_block_indexes": [1], "temporal_patch_size": 2,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=4)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Processor:
    """In place of a vision-language model's processor: its template, and four patches of noise for
    an image."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, name: str) -> Processor:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(name))

    def apply_chat_template(
        self, messages: Any, tokenize: bool, return_dict: bool, return_tensors: str
    ) -> Any:
        import torch
        from transformers import BatchFeature

        assert tokenize
        assert return_dict
        assert return_tensors == "pt"
        ids = self.tokenizer(
            self.tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt"
        )["input_ids"]
        picture = {"pixel_values": torch.randn(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        return BatchFeature({"input_ids": ids, "mm_token_type_ids": (ids == 4).int(), **picture})


def content(first: int, count: int) -> str:
    return " ".join(
        VOCABULARY_WORDS[(first * 37 + 11 * i) % len(VOCABULARY_WORDS)] for i in range(count)
    )


def conversations() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": content(i, 9)}, {"role": "assistant", "content": content(i + 1, 30)}]}
            for i in range(8)]  # fmt: skip


def preferences() -> list[dict[str, Any]]:
    prompts = [{"role": "user", "content": content(i, 20)} for i in range(8)]
    return [{"chosen": [prompts[i], {"role": "assistant", "content": content(i + 1, 9)}],
             "rejected": [prompts[i], {"role": "assistant", "content": content(i + 2, 7)}]} for i in range(8)]  # fmt: skip


def books() -> list[dict[str, Any]]:
    """Texts, each longer than the rows of the shortened programs."""
    return [{"text": content(i, 3 * SHORT)} for i in range(8)]


def questions() -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": content(i, 12)}], "solution": f"${i}$"}
        for i in range(8)
    ]
