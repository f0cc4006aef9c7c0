"""One rank of a two-rank run, as `tests/distributed/worker.py`, of encoders, encoder-decoders and
models with a tower.

The case's "model" is a name in `MODEL_BUILDERS`, "draw" numbers its weights, and "mutant" is a name
in `MUTANTS`. Rows of "paligemma" begin with an image.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from streambp.layer.function import BackwardPass
from streambp.sharded import layer as halves
from streambp.sharded import split_attention
from tests.distributed import engines, worker
from tests.families import VOCABULARY
from tests.seeds import seed_torch, seeded

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 192,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip

IMAGE_TOKEN = VOCABULARY
PATCHES = 16


def bert():
    return BertForMaskedLM(
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def modernbert():
    token_ids = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(
        ModernBertConfig(**SIZES, **token_ids, local_attention=8, global_attn_every_n_layers=2)
    )


def paligemma():
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    text = {"model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4}
    config = PaliGemmaConfig(
        text_config={**sizes, **text, "vocab_size": VOCABULARY + 1},
        vision_config={**sizes, **vision, "projection_dim": 32, "vision_use_head": False},
        projection_dim=32,
        image_token_index=IMAGE_TOKEN,
    )
    return PaliGemmaForConditionalGeneration(config)


def batches(rank, case, real=worker.batches):
    """Yield a rank's micro-batches. Rows with an image have 16 patches and a prefix of 20 tokens,
    which is read in both directions."""
    if case["model"] != "paligemma":
        yield from real(rank, case)
        return
    for index, batch in enumerate(real(rank, {**case, "longer": 2, "padded_on": None})):
        ids = batch["input_ids"]
        ids[:, :PATCHES] = IMAGE_TOKEN
        batch["labels"][:, :20] = -100
        batch["token_type_ids"] = (torch.arange(ids.shape[1]) >= 20).long().expand_as(ids)
        generator = seeded(10 * index + rank)
        batch["pixel_values"] = torch.randn(len(ids), 3, 16, 16, generator=generator)
        yield batch


def layers_of_towers_and_decoders(model):
    """Return the layers of all stacks; FSDP2 makes a unit of each. Lists inside layers, as T5 has
    them, are no stacks."""
    layers = []
    for stack in model.modules():
        if isinstance(stack, torch.nn.ModuleList):
            inside = any(stack is module for layer in layers for module in layer.modules())
            layers += [] if inside else stack
    return layers


MODEL_BUILDERS = {
    "bert": bert,
    "paligemma": paligemma,
    "modernbert": modernbert,
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "t5 1.1": lambda: T5ForConditionalGeneration(T5Config(**T5, feed_forward_proj="gated-gelu")),
}


LORA_TARGETS = {
    "bert": ["query", "value"],
    "modernbert": ["Wqkv", "Wo"],
    "bart": ["q_proj", "v_proj", "fc1"],
    "t5 1.1": ["q", "v", "wo"],
}


def model_for(case, seed=0):
    seed_torch(seed + 100 * case.get("draw", 0))
    model = MODEL_BUILDERS[case["model"]]().train()
    if case.get("autocast"):  # attention to all keys alike would show no error of scores
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    if not case.get("lora"):
        return model
    import peft

    targets = LORA_TARGETS[case["model"]]
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    )


class RoundedQueries(split_attention.ChunkwiseAttention):
    """Queries lose half of their bits."""

    def __init__(self, call, q, keys):
        super().__init__(call, q.to(torch.float8_e4m3fn).to(q.dtype), keys)


def lose_first_chunk(self, chunk, gradients, accumulate=False, real=BackwardPass.add):
    """No gradient of a chunk's input and of the encoder's output from the first chunk."""
    real(self, chunk, [None] * len(gradients) if chunk.start == 0 else gradients, accumulate)


MUTANTS = {
    "rounded queries": (halves, "ChunkwiseAttention", RoundedQueries),
    "a lost chunk": (BackwardPass, "add", lose_first_chunk),
}


def main():
    (mutant,) = {case.get("mutant") for case in json.loads(sys.argv[4])}
    if mutant is not None:
        setattr(*MUTANTS[mutant])
    engines.model_for = model_for
    engines.decoder_layers = layers_of_towers_and_decoders
    worker.batches = batches
    worker.main()


if __name__ == "__main__":
    main()
