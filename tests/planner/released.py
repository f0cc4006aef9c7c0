"""Configurations of released models, from the values of their public config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.planner.shapes import NEMOTRON

# of scripts/released_plans.py: processor seconds of a first count at most, and its rows' columns
MOST_SECONDS = 40.0  # processor seconds of a first count
COLUMNS = (
    "model", "training", "first_count_s", "card_gib", "tokens", "peak_gib", "host_gib", "step_s",
    "settings", "layers_on_host", "check",
)  # fmt: skip

QWEN = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN |= {"max_position_embeddings": 40960, "tie_word_embeddings": False}
LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
# blocks of Nemotron-H-8B: M is Mamba, - an MLP, * attention
NEMOTRON_BLOCKS = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
BLOCKS = {"M": "mamba", "-": "mlp", "*": "attention"}


def shape(hidden: int, inner: int, layers: int, **fields: Any) -> dict[str, Any]:
    """The three sizes that every configuration has, and others."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**sizes, **fields}


def nemotron() -> PreTrainedConfig:
    """Nemotron-H-8B: Mamba layers, MLPs and four layers of attention."""
    blocks = [BLOCKS[letter] for letter in NEMOTRON_BLOCKS]
    return NemotronHConfig(**NEMOTRON, layers_block_type=blocks)


RELEASED_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen3-0.6B": lambda: Qwen3Config(
        **QWEN | shape(1024, 3072, 28, num_attention_heads=16, tie_word_embeddings=True)
    ),
    "Qwen3-8B": lambda: Qwen3Config(**QWEN | shape(4096, 12288, 36)),
    "Qwen3-32B": lambda: Qwen3Config(**QWEN | shape(5120, 25600, 64, num_attention_heads=64)),
    "Qwen2.5-14B": lambda: Qwen2Config(
        **shape(5120, 13824, 48, num_attention_heads=40, num_key_value_heads=8),
        vocab_size=152064, max_position_embeddings=32768,
    ),
    "Qwen3.5-9B": Qwen3_5TextConfig,
    "Qwen3-30B-A3B": lambda: Qwen3MoeConfig(
        **QWEN | shape(2048, 6144, 48, num_key_value_heads=4),
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    ),
    "Llama-3.1-8B": lambda: LlamaConfig(**LLAMA | shape(4096, 14336, 32, num_attention_heads=32)),
    "Llama-3.1-70B": lambda: LlamaConfig(**LLAMA | shape(8192, 28672, 80, num_attention_heads=64)),
    "Mistral-Small-24B": lambda: MistralConfig(
        **shape(5120, 32768, 40, num_attention_heads=32, num_key_value_heads=8),
        head_dim=128, vocab_size=131072, max_position_embeddings=32768,
    ),
    "Phi-4": lambda: Phi3Config(
        **shape(5120, 17920, 40, num_attention_heads=40, num_key_value_heads=10),
        vocab_size=100352, max_position_embeddings=16384, pad_token_id=None,
    ),
    "Gemma-3-27B": lambda: Gemma3TextConfig(
        **shape(5376, 21504, 62, num_attention_heads=32, num_key_value_heads=16),
        head_dim=128, sliding_window=1024, vocab_size=262208, query_pre_attn_scalar=168,
        max_position_embeddings=131072,
    ),
    "gpt-oss-20b": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "Nemotron-H-8B": nemotron,
}  # fmt: skip
