"""What callers read of a call with labels beside its loss: hidden states, logits for a loss of
theirs, predictions.

covers: model/callers.py, model/causal_lm.py
"""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from transformers import MoshiConfig, MoshiForCausalLM, MoshiForConditionalGeneration

import streambp
from streambp.model import causal_lm
from tests.families import LENGTH, VOCABULARY, build, make_batch
from tests.oracle import worst_error
from tests.seeds import seed_torch, seeded

CONFIG = streambp.StreamConfig(chunk_size=5)


def stepped(model, loss, **batch):
    """The output and the gradients of `loss` of it."""
    output = model(**batch, use_cache=False)
    total = loss(output)
    total.backward()
    return (
        output,
        total.detach(),
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )


def compare(stock, loss, config=CONFIG, **batch):
    expected, our_run = (
        stepped(model, loss, **batch)
        for model in (stock, streambp.patch(copy.deepcopy(stock), config))
    )
    assert abs(our_run[1] - expected[1]) <= 1e-12 * abs(expected[1])
    assert worst_error(our_run[2], expected[2]) <= 1e-10
    return expected[0], our_run[0]


def moshi(model_class):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 40,
        "num_codebooks": 2,
    }
    depth = {**sizes, "input_size": 32, "vocab_size": VOCABULARY, "audio_vocab_size": 16}
    codec = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_filters": 4,
    }
    config = MoshiConfig(
        **sizes, vocab_size=VOCABULARY, audio_vocab_size=16, sliding_window=64, depth_decoder_config=depth,
        audio_encoder_config={"model_type": "mimi", **codec, "codebook_dim": 8, "vector_quantization_hidden_dimension": 8,
                              "upsample_groups": 16},
    )  # fmt: skip
    seed_torch(0)
    return model_class(config).double().train()


@pytest.mark.parametrize("lazy", [False, True])
def test_hidden_states_behind_the_final_norm(lazy, float64_oracle):
    config = streambp.StreamConfig(chunk_size=5, lazy_logits=lazy)
    loss = lambda output: output.loss + output.last_hidden_state.square().mean()  # noqa: E731
    batch = make_batch("plain")
    expected, our_output = compare(moshi(MoshiForCausalLM), loss, config, **batch)
    torch.testing.assert_close(
        our_output.last_hidden_state, expected.last_hidden_state, rtol=1e-12, atol=1e-12
    )
    assert (our_output.logits is None) == (not lazy)


def test_a_second_decoder_of_them(float64_oracle):
    """Moshi's depth decoder reads the text decoder's hidden states."""
    stock = moshi(MoshiForConditionalGeneration)
    codes = lambda seed: torch.randint(0, 16, (2, 2, LENGTH), generator=seeded(seed))  # noqa: E731
    text = make_batch("plain")["input_ids"]
    batch = {"input_ids": text, "moshi_audio_codes": codes(1), "user_audio_codes": codes(2)}
    compare(stock, lambda output: output.loss, text_labels=text, audio_labels=codes(3), **batch)


def cpt(model, patch=None):
    """Context-aware prompt tuning of four tokens, the last a label; patched "before" peft, "after"
    it, or not."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    prompt = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[3, 4, 5, 6], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4],
        opt_weighted_loss_type="decay", opt_loss_decay_factor=0.7, opt_projection_epsilon=0.2,
        opt_projection_format_epsilon=0.1, tokenizer_name_or_path="none",
    )  # fmt: skip
    model = streambp.patch(model, CONFIG) if patch == "before" else model
    with torch.no_grad():
        model = peft.get_peft_model(model, prompt).double()
        seed_torch(1)
        for parameter in model.prompt_encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return streambp.patch(model, CONFIG) if patch == "after" else model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("patch", ["before", "after"])
def test_a_loss_that_peft_computes_from_logits(patch, training, float64_oracle):
    """CPT passes labels, and then weighs the tokens' losses itself."""
    batch = make_batch("plain")
    runs = []
    for how in (None, patch):
        model = cpt(build("llama", torch.float64), how).train(training)
        inputs = {name: value.clone() for name, value in batch.items()}
        loss = model(input_ids=inputs["input_ids"], labels=inputs["labels"], use_cache=False).loss
        loss.backward()
        runs.append(
            (
                loss.detach(),
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
                model,
            )
        )
    (expected, gradients, _), (loss, ours, model) = runs
    assert abs(loss - expected) <= 1e-12 * abs(expected)
    assert set(gradients) == {"prompt_encoder.default.delta_embedding.weight"}
    assert worst_error(ours, gradients) <= 1e-10
    assert (
        "besides, no logits: computed blockwise for cross_entropy" in streambp.describe(model).head
    )


def labelled_output():
    return streambp.patch(build("llama"), CONFIG)(**make_batch("plain"))


def test_other_calls_with_labels_have_no_logits():
    assert labelled_output().logits is None


def test_the_mutant_that_asks_nobody(monkeypatch):
    monkeypatch.setattr(causal_lm, "reads_logits", lambda by_name=False: False)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'device'"):
        cpt(build("llama"), "after").float()(**make_batch("plain"))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        ids = torch.randint(3, VOCABULARY, (17,), generator=seeded(index))
        return {"input_ids": ids, "labels": ids}


def trainer(tmp_path, config=CONFIG, **settings):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True
    )
    return transformers.Trainer(streambp.patch(build("qwen3"), config), arguments, **settings)


def predictions(act, trainer, metric_inputs):
    """What the metrics were computed from, and what `predict` returns."""
    prediction_output = getattr(trainer, act)(Rows())
    return [*metric_inputs, *([prediction_output.predictions] if act == "predict" else [])]


@pytest.mark.parametrize("act", ["evaluate", "predict"])
def test_a_trainer_that_wants_predictions_gets_them(act, tmp_path):
    runs = []
    for patched in (True, False):
        metric_inputs = []
        measured = trainer(
            tmp_path,
            compute_metrics=lambda evaluation, metric_inputs=metric_inputs: (
                metric_inputs.append(evaluation.predictions) or {}
            ),
        )
        if not patched:
            streambp.unpatch(measured.model)
        runs.append(predictions(act, measured, metric_inputs))
        if patched:
            assert streambp.describe(measured.model).head.endswith(causal_lm.LOSS_OF_PREDICTIONS)
    for ours, theirs in zip(*runs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_mutant_a_trainer_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(causal_lm, "wants_predictions", lambda: False)
    with pytest.raises(AssertionError):
        test_a_trainer_that_wants_predictions_gets_them("evaluate", tmp_path)


def test_a_trainer_that_wants_the_loss_has_no_logits(tmp_path):
    built = streambp.StreamConfig(chunk_size=5, eval_logits=True)
    metric_inputs = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = trainer(tmp_path)
        assert plain.evaluate(Rows())["eval_loss"] > 0
        assert causal_lm.LOSS_OF_PREDICTIONS not in streambp.describe(plain.model).head
        trainer(
            tmp_path,
            built,
            compute_metrics=lambda evaluation: metric_inputs.append(evaluation.predictions) or {},
        ).evaluate(Rows())
        assert trainer(tmp_path, built).predict(Rows()).predictions.shape == (4, 17, VOCABULARY)
    assert metric_inputs[0].shape == (4, 17, VOCABULARY)
