"""One rank of a two-rank run, as `tests/distributed/worker.py`, of encoders and encoder-decoders.

The case's "model" is a name in `MODEL_BUILDERS`.
"""

from __future__ import annotations

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.distributed import engines, worker
from tests.families import VOCABULARY
from tests.seeds import seed_torch

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip


def bert():
    return BertForMaskedLM(
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def modernbert():
    token_ids = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(
        ModernBertConfig(**SIZES, **token_ids, local_attention=8, global_attn_every_n_layers=2)
    )


MODEL_BUILDERS = {
    "bert": bert,
    "modernbert": modernbert,
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
}


def model_for(case, seed=0):
    seed_torch(seed)
    return MODEL_BUILDERS[case["model"]]().train()


def main():
    engines.model_for = model_for
    worker.main()


if __name__ == "__main__":
    main()
