"""Calls with labels have no logits: who asks for them all the same gets them, or hears what to do.

covers: model/callers.py, model/causal_lm.py, model/padding.py
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from torch import nn

import streambp
from streambp.errors import StreamBPError
from streambp.lazy.dispatch import LazyLogits
from streambp.model import callers, causal_lm
from tests.families import VOCABULARY, build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch, seeded

SETTING_TEXT = "lazy_logits=True"


def output(**settings):
    config = streambp.StreamConfig(chunk_size=5, **settings)
    return streambp.patch(build("llama"), config)(**make_batch("plain"), use_cache=False)


LOGITS_REQUESTS = {
    "attribute": lambda output: output.logits,
    "get": lambda output: output.get("logits"),
    "get with a default": lambda output: output.get("logits", None),
    "getattr": lambda output: getattr(output, "logits"),  # noqa: B009
}


@pytest.mark.parametrize("how", LOGITS_REQUESTS)
def test_they_are_none_and_a_warning_says_what_to_do(how):
    model_output = output()
    with pytest.warns(UserWarning, match=SETTING_TEXT):
        assert LOGITS_REQUESTS[how](model_output) is None
    assert LOGITS_REQUESTS[how](output(lazy_logits=True)) is not None


def test_a_key_that_is_not_there():
    with pytest.raises(StreamBPError, match=SETTING_TEXT):
        output()["logits"]
    with pytest.raises(KeyError, match=SETTING_TEXT):
        output()["logits"]


def test_the_output_is_another_in_nothing_else():
    model_output = output()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "logits" not in model_output
        assert list(model_output.keys()) == ["loss"]
        assert model_output[0] is model_output.loss
        assert model_output["loss"] is model_output.loss
        assert len(model_output.to_tuple()) == 1
        assert isinstance(model_output, transformers.modeling_outputs.CausalLMOutputWithPast)
        new_output = type(model_output)(loss=model_output.loss.detach())
        pickle_copy = pickle.loads(pickle.dumps(new_output))
        assert type(pickle_copy) is transformers.modeling_outputs.CausalLMOutputWithPast
        assert torch.equal(pickle_copy.loss, model_output.loss)
        copied = copy.deepcopy(new_output)
        assert torch.equal(copied.loss, model_output.loss)
        leaves = torch.utils._pytree.tree_map(lambda x: x, model_output)
        assert leaves.loss is model_output.loss
        assert model_output.get("hidden_states") is None


def test_libraries_are_not_told():
    operations = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")
    model_output = output()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rebuilt = operations.convert_to_fp32(model_output)
        operations.find_batch_size({"x": torch.zeros(2)})
    with pytest.warns(UserWarning, match=SETTING_TEXT):
        assert rebuilt.logits is None


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        ids = torch.randint(3, VOCABULARY, (17,), generator=seeded(index))
        mask = torch.ones_like(ids)
        mask[17 - 4 * (index % 2) :] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }


class OwnLoss(transformers.Trainer):
    """As transformers' own pages show it: labels stay in the call, and logits are read by their
    name. A function beside the class reads them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = weighted_loss(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def weighted_loss(outputs, labels):
    logits = outputs.get("logits")
    shifted, targets = logits[:, :-1].contiguous(), labels[:, 1:]
    token_losses = nn.functional.cross_entropy(
        shifted.view(-1, shifted.shape[-1]), targets.reshape(-1), reduction="none"
    )
    weights = torch.linspace(0.5, 2, len(token_losses))
    return (token_losses * weights).sum() / (targets != -100).sum()


class Reading(OwnLoss):
    """Labels left in, and a statistic of all logits in the loss of the class above."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss + 1e-2 * outputs.logits.logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


def trainer_of(model, kind, folder, loss_only):
    arguments = transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=2, learning_rate=1e-2,
        per_device_train_batch_size=2, prediction_loss_only=loss_only, save_strategy="no",
        lr_scheduler_type="constant", seed=3,
    )  # fmt: skip
    seed_torch(0)
    return kind(model, arguments, train_dataset=Rows(), eval_dataset=Rows())


def trained(model, kind, folder, loss_only):
    trainer = trainer_of(model, kind, folder, loss_only)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    return loss, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.fast(4)
@pytest.mark.parametrize("loss_only", [True, False])
@pytest.mark.parametrize("kind", [OwnLoss, Reading])
def test_a_trainers_own_loss(kind, loss_only, tmp_path, float64_oracle):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    stock = build("llama", torch.float64)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    expected_loss, expected = trained(stock, kind, tmp_path / "stock", loss_only)
    loss, our_parameters = trained(ours, kind, tmp_path / "ours", loss_only)
    assert abs(loss - expected_loss) <= 1e-9 * abs(expected_loss)
    for name, value in expected.items():
        torch.testing.assert_close(our_parameters[name], value, rtol=1e-8, atol=1e-10)


class Handing(nn.Module):
    """A program's module around the model, whose caller reads the logits."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch, use_cache=False)


def by_get(model, batch):
    return model(**batch, use_cache=False).get("logits")


def by_attribute(model, batch):
    outputs = model(**batch, use_cache=False)
    return outputs.logits


def by_key(model, batch):
    return model(**batch, use_cache=False)["logits"]


def by_place(model, batch):
    loss, logits = model(**batch, use_cache=False).to_tuple()[:2]
    assert loss.isfinite()
    return logits


def around_the_model(model, batch):
    return Handing(model)(**batch).logits


READERS = (by_get, by_attribute, by_key, by_place, around_the_model)


def results_of(model, read, trains):
    """Loss and gradients of a loss that a program computes beside the model's own."""
    batch = make_batch("plain")
    model.train(trains).zero_grad(set_to_none=True)
    with torch.set_grad_enabled(trains):
        shifted = read(model, batch)[:, :-1]
        loss = nn.functional.cross_entropy(shifted.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss = loss + 1e-2 * shifted.logsumexp(-1).square().mean()
    if trains:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_loops_own_loss(read, trains, float64_oracle):
    """With labels left in the call, and the defaults."""
    expected = results_of(build("llama", torch.float64), read, trains)
    ours = streambp.patch(build("llama", torch.float64), streambp.StreamConfig(chunk_size=5))
    assert worst_error(results_of(ours, read, trains), expected) <= MAX_FLOAT64_ERROR
    ours(**make_batch("plain"), use_cache=False).loss.backward()
    assert worst_error(results_of(ours, read, trains), expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


def stand_ins_of_a_trainer(folder, monkeypatch):
    """How many stand-ins a Trainer's own loss was given, in a program that names logits itself."""
    outputs, real = [], causal_lm.lazy_logits
    monkeypatch.setattr(causal_lm, "lazy_logits", lambda *args: (outputs.append(1), real(*args))[1])
    model = streambp.patch(build("llama"), streambp.StreamConfig(chunk_size=5))
    trainer_of(model, transformers.Trainer, folder, loss_only=True).train()
    logits = model(**make_batch("plain"), use_cache=False).logits
    assert type(logits) is LazyLogits
    return len(outputs) - 1


def test_a_trainer_reads_the_loss_alone(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    assert stand_ins_of_a_trainer(tmp_path, monkeypatch) == 0


def test_the_mutant_that_passes_trainers_by(tmp_path, monkeypatch):
    monkeypatch.setattr(callers, "LOSS_READERS", ("nobody",))
    assert stand_ins_of_a_trainer(tmp_path, monkeypatch) > 0


def test_the_mutant_that_reads_no_code(monkeypatch, float64_oracle):
    monkeypatch.setattr(callers, "LOSS_READERS", ("",))
    with pytest.raises(TypeError, match="NoneType"), pytest.warns(UserWarning, match=SETTING_TEXT):
        test_a_loops_own_loss(by_get, True, float64_oracle)


def test_the_mutant_that_reads_the_next_caller_alone(monkeypatch, float64_oracle):
    monkeypatch.setattr(callers, "MODULE_METHODS", ())
    with pytest.raises(TypeError, match="NoneType"), pytest.warns(UserWarning, match=SETTING_TEXT):
        test_a_loops_own_loss(around_the_model, True, float64_oracle)


def test_the_mutant_that_asks_nobody(tmp_path, monkeypatch, float64_oracle):
    monkeypatch.setattr(causal_lm, "reads_logits", lambda by_name=False: False)
    with pytest.raises(TypeError, match="NoneType"):
        test_a_trainers_own_loss(OwnLoss, False, tmp_path, float64_oracle)


def test_the_mutant_that_tells_nobody(monkeypatch):
    monkeypatch.setattr(callers, "_warn_of_read", lambda: None)
    with pytest.raises(pytest.fail.Exception):
        test_they_are_none_and_a_warning_says_what_to_do("get")
