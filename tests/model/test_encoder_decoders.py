"""Decoders that read an encoder's output: they stream, and the encoder stays as it is.

covers: admission/stacks.py, attention/interface.py
"""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    BigBirdPegasusConfig,
    BigBirdPegasusForConditionalGeneration,
    EncoderDecoderModel,
    FSMTConfig,
    FSMTModel,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PegasusXConfig,
    PegasusXForConditionalGeneration,
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import streambp
from streambp.admission.own_run import StreamingMismatchError
from streambp.attention import interface, masks
from streambp.attention.kinds import BidirectionalAttention
from streambp.instance_forward import WRAPPERS_ATTRIBUTE
from streambp.layer.function import BackwardPass
from streambp.model import causal_lm
from streambp.model.empty_batches import any_label
from streambp.offload import free_memory
from tests.families import build
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

LENGTH = 22
CHUNK = 7
SIZES = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def whisper():
    return WhisperForConditionalGeneration(
        WhisperConfig(**SIZES, max_source_positions=20, max_target_positions=40, num_mel_bins=8)
    )


def t5gemma():
    part = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.0, "dropout_rate": 0.0, "sliding_window": 8,
    }  # fmt: skip
    decoder = {**part, "cross_attention_hidden_size": 32}
    config = T5GemmaConfig(encoder=part, decoder=decoder, vocab_size=64, dropout_rate=0.0)
    config._attn_implementation = "eager"  # transformers 5.5's sdpa would ignore the softcap
    return T5GemmaForConditionalGeneration(config)


def two_berts():
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    decoder = BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(
        encoder=BertModel(BertConfig(**sizes)), decoder=BertLMHeadModel(decoder)
    )
    model.config.decoder_start_token_id = 2
    model.config.pad_token_id = 0
    return model


def t5gemma2():
    part = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.0, "dropout_rate": 0.0, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    encoder = {
        "text_config": part, "vision_config": vision, "mm_tokens_per_image": 4, "boi_token_index": 60,
        "eoi_token_index": 61, "image_token_index": 62,
    }  # fmt: skip
    config = T5Gemma2Config(
        encoder=encoder, decoder=part, dropout_rate=0.0, attention_dropout=0.0, image_token_index=62
    )
    return T5Gemma2ForConditionalGeneration(config)


def bigbird_pegasus():
    return BigBirdPegasusForConditionalGeneration(
        BigBirdPegasusConfig(**SIZES, attention_type="original_full", forced_eos_token_id=None)
    )


MODEL_BUILDERS = {
    "bart": lambda: BartForConditionalGeneration(BartConfig(**SIZES, forced_eos_token_id=None)),
    "marian": lambda: MarianMTModel(MarianConfig(**SIZES, forced_eos_token_id=None)),
    "m2m100": lambda: M2M100ForConditionalGeneration(
        M2M100Config(**SIZES, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    ),
    "whisper": whisper,
    "t5gemma": t5gemma,
    "two berts": two_berts,
}
# the modules of their decoders say is_causal=False, and have a causal mask
MASK_ARGUMENTS = {
    "bigbird_pegasus": bigbird_pegasus,
    "pegasus_x": lambda: PegasusXForConditionalGeneration(
        PegasusXConfig(**SIZES, block_size=4, num_global_tokens=2, forced_eos_token_id=None)
    ),
}


def batch_of(name, source):
    """Rows that begin with the same tokens, and read different encoder outputs."""
    labels = torch.randint(3, 60, (3, LENGTH))
    labels[:, :6] = labels[:1, :6]
    labels[1, 17:] = -100
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 40), "labels": labels}
    mask = torch.ones(3, source, dtype=torch.long)
    mask[1, 12:] = 0
    ids = torch.randint(3, 60, (3, source))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def check(name, source=19, implementation="sdpa", changes=None, **settings):
    stock = {**MODEL_BUILDERS, **MASK_ARGUMENTS, "t5gemma2": t5gemma2}[name]().train()
    if name != "t5gemma2":
        stock.set_attn_implementation(implementation)
    batch = {**batch_of(name, source), **(changes or {})}
    loss, expected = gradients(stock, batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(**settings))
    for _ in range(2):
        ours_loss, grads = gradients(ours, batch)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert [layer.path for layer in described.layers] == ["streams"] * 2
    return described


@pytest.mark.fast(6)
@pytest.mark.parametrize("settings", [{}, {"saves": ("attn_out",), "offload": "cpu"}], ids=str)
@pytest.mark.parametrize("source", [LENGTH, 19], ids=["equal lengths", "other lengths"])
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_exact(name, source, settings):
    """Two of the lengths are equal, so that no argument is cut by its shape alone."""
    for implementation in ("eager",) if name == "t5gemma" else ("sdpa", "eager"):
        seed_torch()
        check(name, source, implementation, chunk_size=CHUNK, **settings)


def causal_4d_mask():
    """An added mask of the decoder in which the second row has two documents."""
    read = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    read[1, 0, 13:, :13] = False
    return torch.zeros(read.shape).masked_fill(~read, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("source", [LENGTH, 19], ids=["equal lengths", "other lengths"])
@pytest.mark.parametrize("name", ["bart", "two berts"])
def test_a_4d_mask_of_the_decoder_beside_the_encoders(name, source):
    """The encoder's mask is the only one that is not built, and is not the decoder's own."""
    for implementation in ("sdpa", "eager"):
        seed_torch()
        changes = {"decoder_attention_mask": causal_4d_mask()}
        check(name, source, implementation, changes, chunk_size=CHUNK)


def test_the_mutant_that_takes_the_encoders_mask_for_the_decoders_is_noticed(monkeypatch):
    real = interface.encoder_masks
    monkeypatch.setattr(
        interface, "encoder_masks", lambda arguments, configs, _: real(arguments, configs, False)
    )
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_a_4d_mask_of_the_decoder_beside_the_encoders("bart", 19)


@pytest.mark.parametrize("source", [LENGTH, 19], ids=["equal lengths", "other lengths"])
@pytest.mark.parametrize("name", list(MASK_ARGUMENTS))
def test_a_decoder_whose_mask_alone_is_causal(name, source):
    seed_torch()
    described = str(check(name, source, "eager", chunk_size=CHUNK))
    assert "DecoderLayer (" in described
    assert "Encoder: " in described


def test_one_mask_for_a_decoder_and_its_encoder():
    """T5Gemma 2's decoder attends to both at once: its encoder streams, it stays as it is."""
    seed_torch()
    described = str(check("t5gemma2", chunk_size=CHUNK))
    assert "T5Gemma2Decoder: T5Gemma2MergedAttention attends" in described
    assert "2 x T5Gemma2EncoderLayer" in described


def causal_by_its_modules(self, *args, real=BidirectionalAttention.take_mask):
    """A mask that only sdpa may leave out makes eager attention run whole."""
    arguments = args[1]
    mask = arguments["attention_mask"]
    return "its mask is causal" if isinstance(mask, masks.LazyMask) else real(self, *args)


def test_the_mutant_that_runs_causal_masks_whole_is_noticed(monkeypatch):
    monkeypatch.setattr(BidirectionalAttention, "take_mask", causal_by_its_modules)
    seed_torch()
    with pytest.raises(AssertionError):
        check("pegasus_x", 19, "eager", chunk_size=CHUNK)


def test_the_encoder_is_left_as_it_is():
    seed_torch(1)
    described = str(check("bart", chunk_size=CHUNK))
    assert "BartEncoder: its attention is bidirectional" in described


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_encoder_row_of_padding_alone(implementation):
    """Eager attention takes the mean over all keys there."""
    seed_torch(3)
    stock = MODEL_BUILDERS["bart"]().train()
    stock.set_attn_implementation(implementation)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    batch = batch_of("bart", 19)
    gradients(ours, batch)
    batch["attention_mask"][2] = 0
    expected_loss, expected = gradients(stock, batch)
    loss, grads = gradients(ours, batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR


def test_the_mutant_that_attends_by_sdpa_is_noticed(monkeypatch):
    monkeypatch.setattr(interface, "_eager_function", lambda module: None)
    with pytest.raises(AssertionError):
        test_an_encoder_row_of_padding_alone("eager")


def test_a_decoder_that_is_causal_without_a_cache_alone_is_refused():
    """The unpatched FSMT reads later tokens in training unless use_cache=False is passed."""
    sizes = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "pad_token_id")}
    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64, pad_token_id=0, **sizes
    )
    with pytest.raises(streambp.StreamBPError, match="DecoderLayer takes no attention_mask"):
        streambp.patch(FSMTModel(config))


def add_to_the_encoder_once(self, chunk, gradients, accumulate=False, real=BackwardPass.add):
    """No gradient for the encoder from later chunks."""
    first, *other_grads = gradients
    real(self, chunk, [first, *(g if chunk.start == 0 else None for g in other_grads)], accumulate)


MUTANTS = {
    "the encoder gets one chunk's gradient": (
        BackwardPass, "add", add_to_the_encoder_once, "bart", "sdpa",
    ),
    "the encoder's padding is read": (
        masks.LazyMask, "to_key_mask", lambda self, is_added: None, "m2m100", "sdpa",
    ),
    "a bool mask is added to the scores": (
        masks.LazyMask, "to_key_mask",
        lambda self, is_added: self.description["attention_mask"].bool()[:, None, None],
        "bart", "eager",
    ),
    "cross-attention without its softcap": (
        interface, "_eager_function",
        lambda module: lambda *args, softcap, **kwargs: interface.sdpa_attention_forward(*args, **kwargs),
        "t5gemma", "eager",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch):
    module, attribute, replacement, name, implementation = MUTANTS[mutant]
    seed_torch(2)
    monkeypatch.setattr(module, attribute, replacement)
    with pytest.raises((AssertionError, StreamingMismatchError)):
        check(name, implementation=implementation, chunk_size=CHUNK)


# The loss of the others is computed where nothing is replaced.
@pytest.mark.parametrize("name", ["bart", "whisper", "bigbird_pegasus", "pegasus_x"])
def test_labels_of_a_decoders_left_padding_are_warned_of(name):
    """Eager attention gives them the mean over all keys. Without these labels, steps are exact."""
    seed_torch(4)
    stock = {**MODEL_BUILDERS, **MASK_ARGUMENTS}[name]().train()
    stock.set_attn_implementation("eager")
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    batch = batch_of(name, LENGTH)
    batch["decoder_attention_mask"] = torch.ones_like(batch["labels"])
    batch["decoder_attention_mask"][2, :9] = 0
    labels = batch["labels"].clone()
    batch["labels"][2, :9] = -100
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loss, grads = gradients(ours, batch)
    expected_loss, expected = gradients(stock, batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    with pytest.warns(UserWarning, match="the label at each position of the decoder's left"):
        gradients(ours, {**batch, "labels": labels})


def masked_language_model():
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        vocab_size=64, dim=16, hidden_dim=32, n_layers=2, n_heads=2, dropout=0.0,
        attention_dropout=0.0, attn_implementation="eager",
    )  # fmt: skip
    return DistilBertForMaskedLM(config).double()


def only_first_labels(name):
    """A model whose loss shifts no labels, and a batch with labels at the first position alone."""
    seed_torch(5)
    if name == "distilbert":
        batch = {"input_ids": torch.randint(2, 60, (3, LENGTH))}
        batch["labels"] = batch["input_ids"].clone()
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, :4] = 0
        model = masked_language_model()
    else:
        model = {**MODEL_BUILDERS, **MASK_ARGUMENTS}[name]()
        batch = batch_of(name, LENGTH)
    batch["labels"][:, 1:] = -100
    return model.train(), batch


@pytest.mark.parametrize("name", ["bart", "t5gemma", "distilbert"])
@pytest.mark.parametrize("settings", [{}, {"head": False}], ids=["defaults", "logits"])
def test_a_label_at_the_first_position_is_one(name, settings, monkeypatch):
    """No warning of a batch without labels, nor of labels at padding that reads all tokens."""
    # Later steps run unpatched where they fit.
    monkeypatch.setattr(free_memory.FreeMemory, "__call__", lambda _, device: 1e12)
    stock, batch = only_first_labels(name)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(**settings))
    expected_loss, expected = gradients(stock, batch)
    assert expected_loss > 0.1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            loss, grads = gradients(ours, batch)
            assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
            assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    assert not [w for w in caught if re.match("A batch has no|Set the label", str(w.message))]


def head_of(model):
    return next(
        wrapper
        for wrapper in getattr(model, WRAPPERS_ATTRIBUTE)
        if isinstance(wrapper, causal_lm.CausalLMForward)
    )


@pytest.mark.parametrize("name", ["bart", "distilbert"])
def test_labels_that_no_loss_shifts(name):
    model, batch = only_first_labels(name)
    kwargs = {"labels": batch["labels"]}
    head = head_of(streambp.patch(model))
    assert bool(any_label(batch["labels"], head._shifted_labels(kwargs)))
    head = head_of(streambp.patch(build("llama")))
    assert not bool(any_label(batch["labels"], head._shifted_labels(kwargs)))


@pytest.mark.parametrize("shifted", [lambda kwargs: None, lambda kwargs: kwargs["labels"]])
def test_mutants_of_labels_that_no_loss_shifts(shifted, monkeypatch):
    monkeypatch.setattr(
        causal_lm.CausalLMForward, "_shifted_labels", lambda self, kwargs: shifted(kwargs)
    )
    with pytest.raises(AssertionError):
        test_labels_that_no_loss_shifts("bart")
