"""Micro-batches without a labelled token, and losses whose scale is 0, infinite or NaN, against the
unpatched model.

covers: model/empty_batches.py, head/one_pass.py, head/log_probs.py
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers

import streambp
from streambp.head import one_pass
from streambp.head.log_probs import HeadGradients, HeadInputs
from streambp.model import causal_lm, empty_batches
from streambp.model.empty_batches import EmptyBatchWarning
from tests.families import VOCABULARY, build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch, seeded

EMPTY = "no labelled token"


def with_adapters(**settings):
    """Return a Qwen3 with LoRA adapters whose products are not zero."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = build("qwen3", torch.float64)
    seed_torch(3)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            **{"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **settings}
        ),
    )
    return adapted.train()


MODELS = {
    "full": lambda: build("qwen3", torch.float64),
    "tied": lambda: build("qwen2", torch.float64),
    "softcap": lambda: build("gemma3", torch.float64),
    "head saved": lambda: with_adapters(modules_to_save=["lm_head"]),
    "head adapted": lambda: with_adapters(target_modules=["q_proj", "lm_head"]),
    "lora": with_adapters,
}
SETTINGS = {
    "one pass": {"chunk_size": 5, "saves": ()},
    "two passes": {"chunk_size": 5},
    "lazy": {"chunk_size": 5, "lazy_logits": True},
    "own loss": {"chunk_size": 5, "lazy_logits": True},
    "packed": {"chunk_size": 5, "rows": "packed"},
    "default": {},
}
COUNTS = (None, 0, torch.tensor(0), torch.tensor(7))
UPSTREAMS = (1.0, 0.0, -2.0, math.inf, math.nan)
LABELS = {"none": slice(None), "one row without": slice(1, None), "all": slice(0, 0)}


def sum_over_count(logits, labels, count):
    """Return a loss that a program computes of logits: the sum over labelled tokens over
    `count`."""
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss if count is None else loss / count


def gradients(model, batch, upstream, count, path):
    """Return the loss and the gradients of one step, and the warnings of it."""
    model.zero_grad()
    arguments = {} if count is None else {"num_items_in_batch": count}
    patched = (
        hasattr(getattr(model, "base_model", model), "_streambp")
        or streambp_state(model) is not None
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if path == "own loss":
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            loss = sum_over_count(model(**inputs, use_cache=False).logits, batch["labels"], count)
        else:
            if path == "two passes" and patched:
                arguments["output_log_probs"] = True
            loss = model(**batch, **arguments, use_cache=False).loss
    (loss * upstream).backward()
    parameter_gradients = {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    return (
        loss.detach(),
        parameter_gradients,
        [str(warning.message) for warning in caught if EMPTY in str(warning.message)],
    )


def streambp_state(model):
    return next((vars(m)["_streambp"] for m in model.modules() if "_streambp" in vars(m)), None)


def check_like_unpatched(our_gradients, expected, by_entry):
    """The same gradients are finite, place by place or as a whole, and these are equal."""
    assert our_gradients.keys() == expected.keys()
    finite = {name for name, gradient in expected.items() if gradient.isfinite().all()}
    assert finite == {name for name, gradient in our_gradients.items() if gradient.isfinite().all()}
    if by_entry:
        for name, gradient in expected.items():
            assert torch.equal(gradient.isfinite(), our_gradients[name].isfinite()), name
    some = {
        name: torch.where(gradient.isfinite(), gradient, 0.0) for name, gradient in expected.items()
    }
    ours = {
        name: torch.where(expected[name].isfinite(), our_gradients[name], 0.0) for name in expected
    }
    if by_entry or finite:
        names = expected if by_entry else finite
        assert (
            worst_error({n: ours[n] for n in names}, {n: some[n] for n in names})
            <= MAX_FLOAT64_ERROR
        )


@pytest.mark.fast("default-full")
@pytest.mark.parametrize("setup", MODELS)
@pytest.mark.parametrize("path", SETTINGS)
def test_gradients_are_finite_where_unpatched_ones_are(path, setup, float64_oracle):
    check_gradients(path, setup, ("plain", "right-padded"))


def check_gradients(
    path, setup, modes=("plain",), labels=LABELS, counts=COUNTS, upstreams=UPSTREAMS
):
    if (path, setup) == ("two passes", "head adapted"):
        pytest.skip("per-token values need a head that is one Linear")
    for mode in modes:
        stock = MODELS[setup]()
        ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(**SETTINGS[path]))
        for kind, count, upstream in itertools.product(labels, counts, upstreams):
            batch = make_batch(mode)
            batch["labels"][LABELS[kind]] = -100
            if count == 0 and isinstance(count, int) and path == "own loss":
                count = torch.tensor(0)  # a program's own division by 0 raises
            _, expected, _ = gradients(stock, batch, upstream, count, path)
            loss, our_gradients, messages = gradients(ours, batch, upstream, count, path)
            # Embeddings of padding get NaN from 0 * inf unpatched, and nothing where padding is not
            # computed.
            check_like_unpatched(our_gradients, expected, by_entry=mode == "plain")
            assert kind != "none" or path == "own loss" or loss == 0.0
            assert not messages or kind == "none"


@pytest.mark.parametrize("path", ["one pass", "two passes", "lazy", "packed", "default"])
def test_one_warning_names_the_empty_batch(path):
    model = streambp.patch(build("qwen3", torch.float64), streambp.StreamConfig(**SETTINGS[path]))
    batch = make_batch("plain")
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    messages = [
        gradients(model, step_batch, 1.0, torch.tensor(0), path)[2]
        for step_batch in (batch, empty, batch, empty)
    ]
    assert [len(step_messages) for step_messages in messages] == [0, 1, 0, 0]
    assert "max_length" in messages[1][0]
    with torch.no_grad():
        model_copy = copy.deepcopy(model)
        assert not gradients_of_evaluation(model_copy, empty)


def gradients_of_evaluation(model, batch):
    """Return the warnings of an evaluation without labels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.eval()(**batch, use_cache=False)
    return [warning for warning in caught if EMPTY in str(warning.message)]


def test_a_copy_and_a_count_without_data_have_nothing_to_read():
    warning = EmptyBatchWarning()
    warning.check(torch.empty((), dtype=torch.bool, device="meta"))
    warning.unread = torch.tensor(False)
    assert copy.deepcopy(warning).unread is None
    assert not copy.deepcopy(warning).has_warned


def own_count(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """Return a mean over the labelled tokens that does not read the count it is given."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = F.cross_entropy(
        logits.float().view(-1, vocab_size), shifted.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss / (shifted != -100).sum()


@pytest.mark.parametrize(
    "count", [torch.tensor(0), torch.tensor(math.inf), torch.tensor(math.nan), torch.tensor(5)]
)
def test_a_count_that_the_loss_does_not_read_scales_nothing(count, float64_oracle):
    stock = build("qwen3", torch.float64)
    stock.loss_function = own_count
    ours = copy.deepcopy(stock)
    ours.loss_function = own_count
    streambp.patch(ours, streambp.StreamConfig(chunk_size=5, saves=()))
    for upstream in (1.0, 1 / 3, 1 / 3):
        _, expected, _ = gradients(stock, make_batch("plain"), upstream, count, "one pass")
        _, our_gradients, _ = gradients(ours, make_batch("plain"), upstream, count, "one pass")
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR


def test_an_empty_batch_does_not_change_the_expected_scale(float64_oracle, monkeypatch):
    """The factor of 1 / 3 that accumulation brings is expected again after a batch without
    labels."""
    factors, real = [], HeadGradients.results

    def results(self, upstream=None, buffers=(None, None, None)):
        factors.append(float(upstream))
        return real(self, upstream, buffers)

    monkeypatch.setattr(HeadGradients, "results", results)
    model = streambp.patch(
        build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5, saves=())
    )
    batch = make_batch("plain")
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    for step_batch in (batch, batch, empty, batch):
        gradients(
            model, step_batch, 1 / 3, None if step_batch is batch else torch.tensor(0), "one pass"
        )
    assert factors[1] == pytest.approx(1.0)
    assert factors[3] == pytest.approx(1.0)


def rows(lengths=(9, 14, 14, 9, 14, 9), empty=2, one_token=None):
    """Return six rows of which one has no label, as `max_length` leaves a prompt."""
    examples = []
    for index, length in enumerate(lengths):
        size = 1 if index == one_token else length
        ids = torch.randint(3, VOCABULARY, (size,), generator=seeded(index))
        labels = torch.full_like(ids, -100) if index == empty else ids
        examples.append({"input_ids": ids, "labels": labels})
    return examples


class InOrder(transformers.Trainer):
    """A Trainer that takes rows in the order of the data set."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained(model, folder, data, **settings):
    """Return the weights after one epoch of Trainer with AdamW, and the norms of its steps."""
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=1, num_train_epochs=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_steps=1, learning_rate=1e-2, lr_scheduler_type="constant",
        **settings,
    )  # fmt: skip
    trainer = InOrder(model, arguments, train_dataset=data)
    trainer.train()
    norms = [float(step["grad_norm"]) for step in trainer.state.log_history if "grad_norm" in step]
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


@pytest.mark.fast("one pass-full", "lazy-tied", "default-head saved")
@pytest.mark.parametrize("setup", ["full", "tied", "head saved"])
@pytest.mark.parametrize("path", ["one pass", "lazy", "default"])
def test_trainer_with_an_empty_row(path, setup, tmp_path, float64_oracle):
    check_trainer(path, setup, tmp_path, rows())


def test_trainer_with_a_step_of_one_token_rows(tmp_path, float64_oracle):
    """Both rows of an accumulated step have a single token, which predicts nothing."""
    check_trainer(
        "one pass",
        "full",
        tmp_path,
        rows((9, 14, 1, 1, 9, 14), empty=-1),
        gradient_accumulation_steps=2,
    )


def check_trainer(path, setup, folder, data, **settings):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    stock = MODELS[setup]()
    ours = copy.deepcopy(stock)
    expected, norms = trained(stock, folder, data, **settings)
    streambp.patch(ours, streambp.StreamConfig(**SETTINGS[path]))
    with pytest.warns(UserWarning, match=EMPTY):
        our_parameters, our_norms = trained(ours, folder, data, **settings)
    assert all(weight.isfinite().all() for weight in expected.values())
    # AdamW divides by the size of each gradient, the smallest among them
    assert worst_error(our_parameters, expected) <= 1e-8
    assert our_norms == pytest.approx(norms, rel=1e-8, abs=1e-12)
    assert 0.0 in norms


def scale_all(monkeypatch):
    monkeypatch.setattr(HeadInputs, "labelled", 1)


def scale_every_row(monkeypatch):
    monkeypatch.setattr(HeadGradients, "_of_labelled_rows", lambda self, factor: factor)


def any_scale(monkeypatch):
    monkeypatch.setattr(one_pass, "_bounded_scale", lambda scale: scale)


def no_warning(monkeypatch):
    monkeypatch.setattr(EmptyBatchWarning, "warn", lambda self: None)


def keeps_nan(monkeypatch):
    monkeypatch.setattr(causal_lm, "_without_nan", lambda output, labelled: output)


def says_it_again(monkeypatch):
    monkeypatch.setattr(
        EmptyBatchWarning, "has_warned", property(lambda _: False, lambda *_: None), raising=False
    )


UNLABELLED = {"labels": ("none",), "counts": (torch.tensor(0),), "upstreams": (1.0,)}
MUTANTS = {
    "scales zeros": (scale_all, lambda: check_gradients("one pass", "full", **UNLABELLED)),
    "scales tied zeros": (scale_all, lambda: check_gradients("one pass", "tied", **UNLABELLED)),
    "scales every row": (
        scale_every_row, lambda: check_gradients("one pass", "full", labels=("one row without",), upstreams=(math.inf,)),
    ),
    "any scale": (any_scale, lambda: test_a_count_that_the_loss_does_not_read_scales_nothing(torch.tensor(math.inf), None)),
    "no warning": (no_warning, lambda: test_one_warning_names_the_empty_batch("one pass")),
    "no warning as unpatched": (no_warning, lambda: test_one_warning_names_the_empty_batch("default")),
    "a warning each time": (says_it_again, lambda: test_one_warning_names_the_empty_batch("one pass")),
    "loss of NaN": (keeps_nan, lambda: check_gradients("one pass", "full", **UNLABELLED)),
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(mutant, monkeypatch, float64_oracle):
    spoil, run = MUTANTS[mutant]
    run()
    spoil(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run()


def test_the_unpatched_loss_is_kept_where_a_token_has_a_label():
    """NaN of a labelled batch stays NaN; an empty batch's becomes 0, with the model's own
    gradient."""
    loss = torch.tensor(math.nan, requires_grad=True)
    assert empty_batches.LossOfLabels.apply(loss, torch.tensor(True)).isnan()
    zero = empty_batches.LossOfLabels.apply(loss, torch.tensor(False))
    zero.backward()
    assert zero == 0.0
    assert loss.grad == 1.0
