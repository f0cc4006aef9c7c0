"""Pipelines that run backward twice are named by the error of a streamed layer and by the page of
distributed training.

covers: layer/gradients.py, head/one_pass.py, lazy/head.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import _backward, schedules

import streambp
from streambp.errors import BackwardError
from streambp.head import one_pass
from streambp.layer import gradients
from streambp.lazy import head
from tests.distributed.test_pipeline_parallel import (
    test_zero_bubble_schedules_are_refused_by_name as check_pipeline,
)
from tests.families import build, make_batch
from tests.seeds import seeded
from tests.versions import needs_edges_of_functions

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "distributed.md"


def loss_of_model(model, hidden_states):
    """Return the loss of a last stage, which the model computes."""
    labels = make_batch("plain")["labels"]
    return model(inputs_embeds=hidden_states, labels=labels, use_cache=False).loss


def loss_of_logits(model, hidden_states):
    """Return the loss of a last stage that its program computes of the logits."""
    labels = make_batch("plain")["labels"][:, 1:].flatten()
    logits = model(inputs_embeds=hidden_states, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)


def loss_of_more_logits(model, hidden_states):
    """Return a loss of padding as well, which a right-padded batch computes late."""
    batch = make_batch("right-padded")
    logits = model(
        inputs_embeds=hidden_states, attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    return logits.float().logsumexp(-1).mean()


def no_loss(model, hidden_states):
    """Return the output of a stage before the last."""
    return model.model(inputs_embeds=hidden_states, use_cache=False).last_hidden_state


STAGES = {
    "model's loss": (loss_of_model, {}),
    "model's loss in one pass": (loss_of_model, {"saves": ()}),
    "loss of logits": (loss_of_logits, {"lazy_logits": True}),
    "loss of padding": (loss_of_more_logits, {"lazy_logits": True}),
    "no loss": (no_loss, {}),
}
TRAINED = {"all": "", "head alone": "lm_head"}


def gradients_of_stage(stage, trained, patched=True):
    """Return the weights' gradients of a stage, as a zero-bubble pipeline computes them."""
    compute, settings = STAGES[stage]
    model = build("qwen3", torch.float64)
    if patched:
        streambp.patch(model, streambp.StreamConfig(chunk_size=5, **settings))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[trained] in name)
    hidden_states = torch.randn(2, 23, 32, dtype=torch.float64, generator=seeded(5))
    hidden_states.requires_grad_()
    output = compute(model, hidden_states)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    upstream = None if output.dim() == 0 else [torch.ones_like(output)]
    _, groups = _backward.stage_backward_input([output], upstream, [hidden_states], iter(weights))
    _backward.stage_backward_weight(iter(weights), groups)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def message(stage="no loss", trained="all"):
    """Return the error of a stage that runs backward twice."""
    with pytest.raises(BackwardError) as error:
        gradients_of_stage(stage, trained)
    return str(error.value)


CASES = [*((stage, "all") for stage in STAGES), *((name, "head alone") for name in [*STAGES][:-1])]


@needs_edges_of_functions
@pytest.mark.fast(3)
@pytest.mark.parametrize(("stage", "trained"), CASES)
def test_each_stage_names_them(stage, trained, float64_oracle):
    """A second pass through the head alone gave no gradients where a program computes its loss."""
    assert gradients_of_stage(stage, trained, patched=False)
    assert "Zero-bubble pipelines" in message(stage, trained)


def with_two_passes():
    """Return the names of torch's schedules whose code asks for gradients of inputs apart."""
    names = set()
    for name, schedule in vars(schedules).items():
        if name.startswith("Schedule") and inspect.isclass(schedule):
            code = inspect.getsource(schedule)
            if re.search(r"\bBACKWARD_INPUT\b|\bI,|enable_zero_bubble=True", code):
                names.add(name)
    return names


def test_the_message_names_each_schedule_of_torch():
    assert set(re.findall(r"Schedule\w+", message())) == with_two_passes()


def test_the_page_names_them():
    text = " ".join(PAGE.read_text().split())
    assert "Zero-bubble schedules" in text
    assert "refuses the second by name" in text


class ScheduleNew:
    """A schedule that a later torch may have: its backward begins with BACKWARD_INPUT."""


def silent(monkeypatch):
    """Make the error end before it names pipelines."""

    def short(text):
        return BackwardError(text.partition(" Zero-bubble")[0])

    for module in (gradients, one_pass, head):
        monkeypatch.setattr(module, "BackwardError", short)


def no_zero(monkeypatch):
    """Make results of lazy logits pass nothing to their handle."""
    real = head.LazyResult.backward
    monkeypatch.setattr(
        head.LazyResult,
        "backward",
        staticmethod(lambda ctx, *grads: tuple(None for _ in real(ctx, *grads))),
    )


def another_schedule(monkeypatch):
    monkeypatch.setattr(schedules, "ScheduleNew", ScheduleNew, raising=False)


def another_page(monkeypatch):
    monkeypatch.setitem(globals(), "PAGE", PAGE.parent / "packed-documents.md")


def check_message(stage):
    test_each_stage_names_them(stage, "head alone", None)


MUTANTS = {
    "silent": (silent, test_the_message_names_each_schedule_of_torch),
    "silent in a pipeline": (
        silent,
        lambda: check_pipeline(patched=True),
    ),
    "silent in the loss": (silent, lambda: check_message("model's loss in one pass")),
    "silent in logits": (silent, lambda: check_message("loss of logits")),
    "no zero": (no_zero, lambda: check_message("loss of logits")),
    "another schedule": (another_schedule, test_the_message_names_each_schedule_of_torch),
    "another page": (another_page, test_the_page_names_them),
}


NEED_EDGES = ("silent in the loss", "silent in logits", "no zero")


def mutants():
    for name in MUTANTS:
        yield pytest.param(name, marks=[needs_edges_of_functions] if name in NEED_EDGES else [])


@pytest.mark.parametrize("mutant", list(mutants()))
def test_mutant(mutant, monkeypatch):
    spoil, run = MUTANTS[mutant]
    spoil(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run()
