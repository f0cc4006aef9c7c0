"""sentence-transformers' trainer, ten steps, against the same steps unpatched.

covers: model/patching.py, model/unpatched.py, sharded/bidirectional.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.attention.prefix import KVBuffer
from streambp.errors import StreamBPError
from streambp.sharded import layer as halves
from tests.integrations.test_seq2seq_trainer import logged
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_of, seeded
from tests.test_mutants import only_this_chunk

pytest.importorskip(
    "sentence_transformers",
    reason="sentence-transformers is not installed; scripts/newest_releases.sh installs it",
)
pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytest.importorskip("datasets", reason="sentence-transformers' trainer needs datasets")

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

pytestmark = pytest.mark.usefixtures("float64_everywhere")
STEPS = 10
MAX_TOKENS = 22  # 3 chunks of 7, and one token
CHUNK = 7
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip
MODERNBERT_SIZES = {
    "local_attention": 8, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODEL_BUILDERS = {
    "bert": (lambda: BertModel(BertConfig(**SIZES, **NO_DROPOUT)), "cls"),
    "modernbert": (lambda: ModernBertModel(ModernBertConfig(**SIZES, **MODERNBERT_SIZES)), "mean"),
    "qwen3": (
        lambda: Qwen3Model(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)), "lasttoken",
    ),
}  # fmt: skip
LOSSES = {
    "mnrl": MultipleNegativesRankingLoss,
    "cached mnrl": lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
}


def tokenizer():
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, SIZES["vocab_size"])}}
    backend = Tokenizer(WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", padding_side="right", model_max_length=64
    )


def sentence_model(name, folder):
    """A SentenceTransformer of a small random model, which is loaded from `folder`."""
    make, pooling = MODEL_BUILDERS[name]
    make().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(SIZES["hidden_size"], pooling)]
    return SentenceTransformer(modules=modules, device="cpu").double().train()


def words(generator, length):
    ids = torch.randint(3, SIZES["vocab_size"], (length,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())


def pairs():
    """Questions and documents, of which each batch of four has some of full length."""
    generator = seeded(1)
    rows = []
    for row in range(4 * STEPS):
        short, long = torch.randint(3, MAX_TOKENS, (2,), generator=generator).tolist()
        if row % 2:
            long = MAX_TOKENS
        rows.append({"anchor": words(generator, short), "positive": words(generator, long)})
    return Dataset.from_list(rows)


def train(model, kind, folder, steps):
    """Train by SGD; returns the trainer and the weights' changes."""
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = SentenceTransformerTrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, optim="sgd", learning_rate=0.05,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, seed=seed_of(5),
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model, arguments, pairs(), loss=LOSSES[kind](model))
    trainer.train()
    return trainer, {
        name: p.detach() - weights_before[name] for name, p in model.named_parameters()
    }


def check(name, kind, folder, steps=STEPS):
    stock = sentence_model(name, folder / "model")
    config = streambp.StreamConfig(chunk_size=CHUNK)
    ours = streambp.patch(copy.deepcopy(stock), config)
    expected, expected_changes = train(stock, kind, folder, steps)
    our_trainer, changes = train(ours, kind, folder, steps)
    for key in ("loss", "grad_norm"):
        assert len(logged(expected, key)) == steps
        assert logged(our_trainer, key) == pytest.approx(logged(expected, key), rel=1e-10, abs=0.0)
    assert min(logged(expected, "grad_norm")) > 0.1  # each step moved the weights
    assert worst_error(changes, expected_changes) <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert [layer.path for layer in described.layers] == ["streams"] * 2
    texts = [row["positive"] for row in pairs()][:4]
    with torch.no_grad():
        our_embeddings, stock_embeddings = (
            model.encode(texts, convert_to_tensor=True) for model in (ours, stock)
        )
    torch.testing.assert_close(our_embeddings, stock_embeddings, rtol=1e-9, atol=1e-10)


@pytest.mark.fast("bert-mnrl", "modernbert-cached mnrl", "qwen3-cached mnrl")
@pytest.mark.parametrize("kind", list(LOSSES))
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_ten_steps(name, kind, tmp_path):
    check(name, kind, tmp_path)


MUTANTS = {
    "a first half that is not differentiated": (
        halves, "_differentiate_before", lambda call, work, gradients: None, "bert", "mnrl",
    ),
    "keys of earlier chunks get no gradient": (
        KVBuffer, "grow_accumulators", only_this_chunk, "qwen3", "cached mnrl",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch, tmp_path):
    module, attribute, replacement, name, kind = MUTANTS[mutant]
    monkeypatch.setattr(module, attribute, replacement)
    with pytest.raises((AssertionError, StreamBPError)):
        check(name, kind, tmp_path, steps=2)
