"""Public model shapes with random weights; nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


def shape(
    hidden: int, intermediate: int, layers: int, heads: int, tied: bool, **config_settings: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **COMMON,
        **config_settings,
    }


SHAPES = {
    "Qwen3-4B": shape(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": shape(4096, 12288, 36, 32, tied=False),
    "Qwen3-14B": shape(5120, 17408, 40, 40, tied=False),
    "Qwen3-32B": shape(5120, 25600, 64, 64, tied=False),
    "mini": shape(256, 768, 4, 4, tied=False, num_key_value_heads=2, head_dim=64, vocab_size=8192),
}


def build(shape: str, lora: bool, device: torch.device, seed: int) -> PreTrainedModel:
    """A model of that shape in train mode: bf16 on a GPU, float32 on a CPU; every parameter trained, or LoRA of rank 8."""
    torch.manual_seed(seed)
    config = Qwen3Config(**SHAPES[shape], attn_implementation="sdpa", max_position_embeddings=2**22)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen3ForCausalLM(config).train()
    finally:
        torch.set_default_dtype(previous_dtype)
    if lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model


def make_batch(model: PreTrainedModel, length: int, seed: int, rows: int = 1) -> torch.Tensor:
    """Random token ids [rows, length] on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (rows, length), generator=generator).to(
        model.device
    )
