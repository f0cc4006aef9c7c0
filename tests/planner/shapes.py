"""Real shapes of hybrid models' layers, for counts on tensors without data."""

from __future__ import annotations

from transformers import (
    CONFIG_MAPPING,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

LINEAR = "linear_attention"
# As they are published, where transformers' defaults differ.
BAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
}
GRANITE = {
    **BAMBA, "vocab_size": 100352, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10,
    "intermediate_size": 768, "shared_intermediate_size": 1536, "rms_norm_eps": 1e-5,
}  # fmt: skip
FALCON = {
    "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
    "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1,
    "vocab_size": 130048,
}  # fmt: skip
LFM2 = {
    "hidden_size": 2048,
    "intermediate_size": 10752,
    "block_auto_adjust_ff_dim": False,
    "vocab_size": 65536,
}
NEMOTRON = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "chunk_size": 128,
}


def kimi_linear(sizes):
    """Where this transformers has it."""
    if "kimi_linear" not in CONFIG_MAPPING:
        return {}
    config = CONFIG_MAPPING["kimi_linear"](
        **sizes, layer_types=[LINEAR], mlp_layer_types=["sparse"]
    )
    return {"Kimi-Linear-48B-A3B": config}


def one_layer():
    """A configuration with a single layer, the one that has states, of each model."""
    sizes = {"num_hidden_layers": 1}
    return {
        "Qwen3-Next-80B-A3B": Qwen3NextConfig(**sizes, layer_types=[LINEAR]),
        "Qwen3.5-35B-A3B": Qwen3_5MoeTextConfig(**sizes, layer_types=[LINEAR]),
        "Qwen3.5-9B": Qwen3_5TextConfig(**sizes, layer_types=[LINEAR]),
        **kimi_linear(sizes),
        "Nemotron-H-8B": NemotronHConfig(**NEMOTRON, layers_block_type=["mamba"]),
        "Granite-4.0-H-Small": GraniteMoeHybridConfig(**sizes, **GRANITE, layer_types=["mamba"]),
        "Bamba-9B": BambaConfig(**sizes, **BAMBA, attn_layer_indices=[]),
        "Falcon-H1-7B": FalconH1Config(**sizes, **FALCON),
        "LFM2-2.6B": Lfm2Config(**sizes, **LFM2, layer_types=["conv"]),
        "Jamba-Mini": JambaConfig(**sizes),
    }
