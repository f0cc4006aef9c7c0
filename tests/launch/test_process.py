"""Which models of a process are patched, with what settings, and what is told of them.

covers: launch/hook.py, launch/process.py, model/patching.py
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    RwkvConfig,
    RwkvForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)

import streambp
from streambp import StreamConfig
from streambp.errors import ConfigError
from streambp.launch import process
from streambp.launch.hook import SETTINGS_VARIABLE, ImportHook
from streambp.model.installed_patch import is_patched
from tests.launch.programs import VOCABULARY, arguments, model_of, right, rows


@pytest.fixture
def hook(monkeypatch):
    """As in a launched process, but for modules that a test hands to it."""
    monkeypatch.setattr(process.atexit, "register", lambda function, **kwargs: None)
    monkeypatch.delenv("STREAMBP_LAUNCH_REPORT", raising=False)
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"chunk_size": 5}')
    return ImportHook()


@pytest.fixture
def trainer_class(hook):
    """A Trainer of a transformers that the hook has seen, a subclass's author having no part in
    it."""
    module = SimpleNamespace(Trainer=type("Trainer", (Trainer,), {}))
    hook.change_trainer(module)
    return module.Trainer


def settings(model):
    return model._streambp.config


def without_streams():
    """A model that cannot be streamed: its layers write states in place."""
    return RwkvForCausalLM(
        RwkvConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            attention_hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            context_length=64,
        )
    )


def test_a_reference_made_after_init_is_patched_and_calls_without_labels_are_told(
    trainer_class, hook, tmp_path, capsys
):
    class WithReference(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ref_model = model_of(7).eval()

        def compute_loss(self, model, inputs, **kwargs):
            ids = inputs["input_ids"]
            with torch.no_grad():
                theirs = self.ref_model(ids).logits.log_softmax(-1)
            return (model(ids).logits.log_softmax(-1) - theirs).square().mean()

    trainer = WithReference(model_of(), arguments(tmp_path / "out"), train_dataset=rows())
    assert is_patched(trainer.model)
    assert not is_patched(trainer.ref_model)
    trainer.train()
    assert is_patched(trainer.ref_model)
    assert "no logits: computed blockwise for log_softmax + " in capsys.readouterr().err
    policy, reference = hook.launched.process_record().models
    assert "no logits: computed blockwise for log_softmax + " in policy.description
    assert "not tried yet: 2 x" in reference.description, (
        "its calls return a cache: they run as unpatched"
    )


def scaled(outputs, labels, num_items_in_batch=None):
    """A loss function of the user's: each token's loss times its probability."""
    logits = outputs["logits"].float()[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return (losses * torch.exp(-losses.detach())).sum() / 10


@pytest.mark.fast("options1")
@pytest.mark.parametrize(
    "options", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": scaled}]
)
def test_losses_that_trainers_compute_from_logits(trainer_class, tmp_path, options):
    """Trained, evaluated and predicted with, logits and all."""
    functions = {name: value for name, value in options.items() if callable(value)}
    settings = {name: value for name, value in options.items() if not callable(value)}
    runs = []
    for kind in (Trainer, trainer_class):
        trainer = kind(
            model_of(),
            arguments(tmp_path / "out", **settings),
            train_dataset=rows(),
            eval_dataset=rows(2),
            **functions,
        )
        trainer.train()
        loss, predicted = trainer.evaluate()["eval_loss"], trainer.predict(rows(2)).predictions
        predicted = predicted[0] if isinstance(predicted, tuple) else predicted
        runs.append(
            (
                loss,
                torch.as_tensor(predicted),
                torch.cat([p.flatten() for p in trainer.model.parameters()]).detach(),
            )
        )
    first_weights = torch.cat([p.flatten() for p in model_of().parameters()]).detach()
    (expected_loss, expected, weights), (found_loss, our_predictions, ours) = runs
    assert (ours - weights).norm() <= 1e-4 * (weights - first_weights).norm()
    assert abs(found_loss - expected_loss) <= 1e-5
    assert (our_predictions - expected).norm() <= 1e-4 * expected.norm()
    assert streambp.describe(trainer.model).head.startswith("no logits: computed blockwise for ")


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("preprocess", [None, lambda logits, labels: logits.argmax(-1)])
def test_predictions_are_those_of_the_program_alone(trainer_class, tmp_path, labels, preprocess):
    """Of a Trainer that has no metrics: nothing but the call says that logits are wanted."""
    data = rows(5) if labels else [{"input_ids": row["input_ids"]} for row in rows(5)]
    runs = []
    for kind in (Trainer, trainer_class):
        training_args = arguments(tmp_path / "out", per_device_eval_batch_size=2)
        runs.append(
            kind(model_of(), training_args, preprocess_logits_for_metrics=preprocess).predict(data)
        )
    expected, output = runs
    torch.testing.assert_close(
        torch.as_tensor(output.predictions),
        torch.as_tensor(expected.predictions),
        rtol=1e-4,
        atol=1e-5,
    )
    assert set(expected.metrics) == set(output.metrics)
    assert not labels or abs(output.metrics["test_loss"] - expected.metrics["test_loss"]) <= 1e-5


@pytest.mark.full
def test_generated_predictions(hook, tmp_path):
    """As LLaMA-Factory's `predict_with_generate`: a patched model generates in evaluation, with a
    cache."""
    module = SimpleNamespace(Trainer=type("Trainer", (Seq2SeqTrainer,), {}))
    hook.change_trainer(module)
    runs = []
    for kind in (Seq2SeqTrainer, module.Trainer):
        training_args = Seq2SeqTrainingArguments(
            str(tmp_path / "out"), report_to=[], max_steps=2, optim="sgd", save_strategy="no", use_cpu=True,
            predict_with_generate=True, generation_max_length=40,
        )  # fmt: skip
        trainer = kind(model_of(), training_args, train_dataset=rows(), eval_dataset=rows(2))
        trainer.train()
        runs.append(trainer.predict(rows(2)))
    assert is_patched(trainer.model)
    expected, output = runs
    assert output.predictions.shape[1] > len(rows(1)[0]["input_ids"])
    assert (output.predictions == expected.predictions).all()
    assert abs(output.metrics["test_loss"] - expected.metrics["test_loss"]) <= 1e-5


@pytest.mark.full
def test_metrics_that_trainers_compute_from_logits_beside_the_loss(trainer_class, tmp_path):
    """As TRL 0.29 does in SFT, in training and evaluation."""

    def measured(kind):
        class Measured(kind):
            def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
                loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
                with torch.no_grad():
                    log_p = outputs.logits.log_softmax(-1)
                    entropies.append(float(-(log_p.exp() * log_p).sum(-1).mean()))
                return (loss, outputs) if return_outputs else loss

        return Measured

    runs = []
    for kind in (Trainer, trainer_class):
        entropies = []
        training_args = arguments(tmp_path / "out", eval_strategy="steps", eval_steps=1)
        trainer = measured(kind)(
            model_of(), training_args, train_dataset=rows(), eval_dataset=rows(2)
        )
        trainer.train()
        runs.append(entropies)
    assert len(runs[0]) == 6
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), rtol=1e-5, atol=0)
    head = streambp.describe(trainer.model).head
    assert (
        head
        == "blockwise loss, no logits; besides, no logits: computed blockwise for log_softmax + exp + mul + sum"
    )


def test_accelerates_conversion_to_float32_builds_nothing(trainer_class, tmp_path):
    smoothed = arguments(tmp_path / "out", bf16=True, label_smoothing_factor=0.1)
    trainer = trainer_class(model_of(), smoothed, train_dataset=rows())
    trainer.train()
    assert streambp.describe(trainer.model).head.startswith("no logits: computed blockwise for ")


def test_what_a_trainer_holds_can_be_sent_to_another_process(hook):
    """As sweeps do. There it is an account of its own, and still the trainer's."""
    model = model_of()
    hook.launched.patch_model(model)
    trainer = SimpleNamespace(model=model)
    trainer.watcher = process.LaunchCallback(hook.launched, trainer)
    sent = pickle.loads(pickle.dumps(trainer))
    assert sent.watcher.trainer is sent
    assert sent.watcher.launched.config == hook.launched.config
    assert sent.watcher.launched.process_record().models == []
    assert is_patched(sent.model)


def test_what_the_user_patched_keeps_its_settings(trainer_class, tmp_path):
    theirs = StreamConfig(chunk_size=7, saves=("kv",))
    model = streambp.patch(model_of(), theirs)
    trainer_class(model, arguments(tmp_path / "out"), compute_metrics=right)
    assert settings(model) is theirs


def test_arguments_that_say_how_to_stream_come_first(trainer_class, tmp_path):
    """Those of the streamed TRL trainers."""
    training_args = arguments(tmp_path / "out")
    training_args.stream_config = lambda: StreamConfig(chunk_size=9)
    assert settings(trainer_class(model_of(), training_args).model) == StreamConfig(chunk_size=9)


def test_logits_are_there_for_metrics_and_only_then(trainer_class, tmp_path):
    plain, measured = model_of(), model_of()
    trainer_class(plain, arguments(tmp_path / "out"))
    trainer_class(measured, arguments(tmp_path / "out"), compute_metrics=right)
    assert (settings(plain).eval_logits, settings(measured).eval_logits) == (False, True)
    trainer_class(
        plain,
        arguments(tmp_path / "out"),
        preprocess_logits_for_metrics=lambda logits, labels: logits,
    )
    # what launch patched, it may patch anew
    assert settings(plain) == StreamConfig(
        chunk_size=5, eval_logits=True, lazy_logits=True, rows="auto"
    )


def test_trls_head_leaves_logits_for_metrics(hook, trainer_class, tmp_path):
    """TRL gives its head to a model after its trainer has been made, and the trainer is seen to
    again when it trains."""
    pytest.importorskip("trl")
    model, ids = model_of(), torch.randint(VOCABULARY, (2, 11))
    trainer = trainer_class(model, arguments(tmp_path / "out"), compute_metrics=right)
    hook.launched.add_head(pytest.fail, model)
    assert settings(model).eval_logits
    trainer.preprocess_logits_for_metrics = None
    for config in (hook.launched.trainer_config(trainer), StreamConfig(chunk_size=4)):
        hook.launched.patch_model(model, config)
        assert settings(model) == config
        assert model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.shape == (2, 10)


def test_without_our_head_there_are_logits_anyway(trainer_class, tmp_path):
    training_args = arguments(tmp_path / "out")
    training_args.stream_config = lambda: StreamConfig(head=False)
    assert settings(
        trainer_class(model_of(), training_args, compute_metrics=right).model
    ) == StreamConfig(head=False)


def test_a_model_that_cannot_be_streamed_is_named_once_and_trains(
    trainer_class, hook, tmp_path, capsys
):
    model = without_streams()
    expected = copy.deepcopy(model)
    for trainee, kind in ((model, trainer_class), (expected, Trainer)):
        kind(trainee, arguments(tmp_path / "out"), train_dataset=rows()).train()
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in expected.named_parameters())
    stderr = capsys.readouterr().err
    assert stderr.count("streambp: RwkvForCausalLM is left as it was") == 1
    (record,) = hook.launched.process_record().models
    assert record.description is None
    assert "writes its states in place" in record.left


def test_settings_that_do_not_fit_the_model_stop_the_program(trainer_class, monkeypatch, tmp_path):
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"saves": ["mlp.no_proj"]}')
    with pytest.raises(ConfigError, match=r"mlp\.no_proj"):
        trainer_class(model_of(), arguments(tmp_path / "out"))


@pytest.fixture
def at_train(hook, monkeypatch):
    """A model class whose `train()` the hook has seen."""
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"chunk_size": 5, "at": "train"}')
    stand_in = type(model_of())
    module = SimpleNamespace(PreTrainedModel=type("Streamed", (stand_in,), {}))
    hook.change_models(module)
    return module.PreTrainedModel


def test_train_patches_the_outermost_model_once(at_train, hook):
    model = at_train(model_of().config)
    assert not is_patched(model.eval())
    for _ in range(3):
        assert model.train().training
    assert "_streambp" in model.__dict__
    assert len(hook.launched.process_record().models) == 1
    assert len(model._forward_hooks) == 1


def test_copies_that_patching_makes_are_not_patched(at_train, hook, monkeypatch):
    """The count of a step for chunk_size="auto" trains a copy."""
    real, copies = process.patch, []

    def patch(model, config):
        copies.append(copy.deepcopy(model).train())
        return real(model, config)

    monkeypatch.setattr(process, "patch", patch)
    at_train(model_of().config).train()
    assert len(copies) == 1
    assert not is_patched(copies[0])


def test_a_copy_of_a_model_has_told(at_train, hook, capsys):
    """An average of weights, or a reference: its own steps are not told again."""
    model = at_train(model_of().config).train()
    batch = {name: value[None] for name, value in rows(1)[0].items()}
    model(**batch).loss.backward()
    assert "blockwise loss, no logits\n" in capsys.readouterr().err
    copy.deepcopy(model)(**batch).loss.backward()
    assert capsys.readouterr().err == ""


def test_what_a_model_did_is_told_when_it_is_gone(at_train, hook, capsys):
    model = at_train(model_of().config).train()
    model(**{name: value[None] for name, value in rows(1)[0].items()}).loss.backward()
    assert "blockwise loss, no logits\n" in capsys.readouterr().err
    del model
    (record,) = hook.launched.process_record().models
    assert "blockwise loss, no logits" in record.description
    hook.launched.print_report(at_end=True)  # without a command that waits for the account
    assert "streams: 2 x Qwen3DecoderLayer" in capsys.readouterr().err


def test_an_interpreter_without_streambp_says_so(hook, monkeypatch):
    monkeypatch.setitem(sys.modules, "streambp.launch.process", None)
    with pytest.raises(ImportError, match="cannot import it"):
        _ = hook.launched


def test_modules_are_changed_once_they_are_loaded(tmp_path, monkeypatch):
    """A loader's own `exec_module` runs first; other modules are left to the other finders."""
    (tmp_path / "watched_module.py").write_text("value = 1")
    hook, values = ImportHook(), []
    hook.actions = {"watched_module": lambda module: values.append(module.value)}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    module = importlib.import_module("watched_module")
    assert (values, Path(module.__file__).parent) == ([1], tmp_path)
    assert hook.find_spec("another_module") is None
    monkeypatch.delitem(sys.modules, "watched_module")
