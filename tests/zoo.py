"""Every causal family that transformers' AutoModelForCausalLM knows, as a tiny model.

A family's default config is shrunk by the names of its fields, keeping one layer of each kind; what
that leaves inconsistent stands in OVERRIDES.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.device import DEVICE
from tests.families import VOCABULARY, WINDOW, Device, placed
from tests.seeds import seed_torch

SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "n_inner"), 40
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    "dense_intermediate_size": 40,
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), 8),
    "global_head_dim": 16,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"),
        512,
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        (
            "num_shared_experts",
            "n_shared_experts",
            "moe_num_shared_experts",
            "n_group",
            "topk_group",
        ),
        1,
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 12,
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), WINDOW),
    "first_k_dense_replace": 1,
    **dict.fromkeys(
        (
            "mamba_d_state",
            "ssm_state_size",
            "state_size",
            "mamba_d_conv",
            "mamba_dt_rank",
            "conv1d_width",
        ),
        4,
    ),
    **dict.fromkeys(
        ("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim", "mamba_chunk_size"),
        8,
    ),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "mamba_expand": 2,
    "chunk_size": 8,
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    **dict.fromkeys(("index_topk", "keep_window_size", "index_block_size"), 4),
    "index_head_dim": 8,
    "index_n_heads": 32,  # with few of them more than one key has a score of exactly zero
    "index_topk_blocks": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEFAULT_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")  # where the default is None
RANDOM = ("dropout", "pdrop", "jitter", "layerdrop")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

MHA = {"num_key_value_heads": 4}
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash"), MHA
    ),
    **dict.fromkeys(("minicpm3", "youtu", "dots3_note_text", "sarvam_mla"), MHA),
    "bailing_hybrid": {**MHA, "rope_parameters": ROPE, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "head_dim": 128,  # up to transformers 5.17 its rotation has parts of a fixed size
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {**MHA, "num_experts_per_tok": 2},
    "dots1": {**MHA, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "n_input_layers": 1,
        "n_recurrent_layers": 2, "n_output_layers": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {**SHARED_KV, "intermediate_size": 40, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.5]},
    "gemma4_text": SHARED_KV,
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "layer_types": [0, 1, 0], "num_hidden_layers": 3,
        "hc_lowrank": 8, "hc_count": 2,
        "ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_vocab_size_base": 61, "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 1, "heads_per_ngram": 2, "indexer_n_heads": 32, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3, "attention_hidden_size": 64,
        "attention_head_dim": 16, "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

# transformers' sdpa leaves their softcap out.
EAGER = ("gemma2", "vaultgemma")
# In AutoModelForCausalLM's list, but not decoder-only text models with a config of their own.
OTHER_MODELS = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
    "data2vec-text", "electra", "ernie", "git", "marian", "mbart", "megatron-bert", "musicgen", "musicgen_melody",
    "mvp", "pegasus", "plbart", "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "reformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod", "blt", "emu3", "fuyu",
    "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama", "moss_transcribe_diarize",
    "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "dots3_note", "gemma4_assistant",
    "gemma4_unified_assistant",
}  # fmt: skip
NAMES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in OTHER_MODELS)


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The family's default config, shrunk, with one layer of each kind and nothing random."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config_class = CONFIG_MAPPING[name]
    default = config_class().to_dict()
    depth_name = next((field for field in DEPTHS if isinstance(default.get(field), int)), None)
    small: dict[str, Any] = {}
    for field, value in default.items():
        if isinstance(value, float) and any(word in field for word in RANDOM):
            small[field] = 0.0
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if field in SIZES and (is_number or (value is None and field in DEFAULT_TOKEN_IDS)):
            small[field] = SIZES[field]
    if depth_name is not None:
        small.update(_one_layer_of_each_kind(default, default[depth_name], depth_name))
    if isinstance(default.get("intermediate_size"), list):
        small["intermediate_size"] = 40
    settings = {**small, **OVERRIDES.get(name, {}), **changes}
    # by number: their names are not the same in all versions
    if 0 in settings.get("layer_types", ()):
        kinds = list(dict.fromkeys(default["layer_types"]))
        settings["layer_types"] = [kinds[number] for number in settings["layer_types"]]
    config: PreTrainedConfig = config_class(**settings)
    config._experts_implementation = "eager"  # grouped products know no float64
    return config


def _one_layer_of_each_kind(default: dict[str, Any], depth: int, depth_name: str) -> dict[str, Any]:
    per_layer = {
        field: value
        for field, value in default.items()
        if isinstance(value, list | tuple) and len(value) == depth > 2
    }
    if not per_layer:
        return {depth_name: 2}
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(json.dumps([value[layer] for value in per_layer.values()]), layer)
    layers = (list(kinds.values()) if len(kinds) > 1 else [0, 1])[:5]
    return {
        depth_name: len(layers),
        **{field: [value[layer] for layer in layers] for field, value in per_layer.items()},
    }


def build(
    name: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: Device = DEVICE,
    **changes: Any,
) -> PreTrainedModel:
    """A model in train mode with random weights, norms and biases among them.

    With sdpa, or with transformers' eager attention where the family's sdpa is missing or
    incomplete.
    """
    config = tiny_config(name, **changes)
    seed_torch(seed)
    try:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if name in EAGER else "sdpa"
        )
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return placed(model, device)
