"""Parameters that are there only while their module runs, and a head that is called once in each
forward, by everybody.

covers: model/head_deferral.py, model/causal_lm.py
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import streambp
from streambp.distributed.engines import EngineOwnership
from streambp.model import causal_lm, head_deferral
from tests.families import FAMILIES, build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, relative_l2, worst_error
from tests.zoo import build as build_other

pytestmark = pytest.mark.usefixtures("float64_oracle")

OTHER_FAMILIES = ("qwen3_moe", "gemma2", "gpt2", "bamba")
HEAD_USES = {
    "labels": {}, "lazy": {"lazy_logits": True}, "no labels": {}, "no labels, lazy": {"lazy_logits": True},
    "per token": {}, "eval": {}, "eval with logits": {"eval_logits": True}, "shared": {"rows": "packed"},
}  # fmt: skip


class Reading(AssertionError):  # noqa: N818 - it is raised inside of what others catch errors of
    pass


class Table(dict):
    """A module's parameters, as ZeRO-3 has them: whoever takes one by its name outside of the
    module's own forward has it gathered for good. Here that raises. A decoder layer is one unit,
    and in backward autograd's nodes gather."""

    def __init__(self, module, running, units):
        super().__init__(module._parameters)
        self.running, self.owners = (
            running,
            {id(module), *(id(unit) for unit in units if module in set(unit.modules()))},
        )

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if (
            value is not None
            and torch._C._current_graph_task_id() == -1
            and not self.owners & set(self.running)
        ):
            raise Reading(f"{name} was read outside of its module's forward")
        return value


@contextlib.contextmanager
def tables(model, monkeypatch):
    """Within, every module of the model has such a table; no hook stands there, for hooks change
    how layers run."""
    running, call = [], nn.Module.__call__
    units = next(module for module in model.modules() if isinstance(module, nn.ModuleList))

    def called(module, *args, **kwargs):
        running.append(id(module))
        try:
            return call(module, *args, **kwargs)
        finally:
            running.pop()

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", called)
        real_tables = {module: module._parameters for module in model.modules()}
        for module in real_tables:
            module._parameters = Table(module, running, units)
        try:
            yield
        finally:
            for module, table in real_tables.items():
                module._parameters = table


def loss_of(model, way, batch):
    batch = {
        name: value for name, value in batch.items() if "no labels" not in way or name != "labels"
    }
    if way == "per token":
        return -model(**batch, output_log_probs=True, use_cache=False).log_probs.mean()
    output = model(**batch, use_cache=False)
    if way in ("labels", "shared"):
        return output.loss
    if "eval" in way:
        return output.loss + (
            output.logits.double().square().mean() if output.logits is not None else 0.0
        )
    logits = output.logits.double()
    extra = logits.logsumexp(-1).mean() + (logits.argmax(-1) == 3).double().mean()
    return extra if output.loss is None else output.loss + extra


def gradients(model, way, batch):
    model.train("eval" not in way)
    model.zero_grad()
    loss = loss_of(model, way, batch)
    loss.backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def as_held(monkeypatch):
    """The head is one whose weights an engine holds; and what was called of it, with the tensors it
    gave."""
    calls = []
    monkeypatch.setattr(causal_lm, "engine_ownership", lambda module: EngineOwnership(True, True))
    real = head_deferral.LendWeights.forward
    monkeypatch.setattr(
        head_deferral.LendWeights,
        "forward",
        staticmethod(lambda *args: calls.append(1) or real(*args)),
    )
    return calls


@pytest.mark.fast(
    "labels-qwen3",
    "no labels, lazy-qwen3",
    "lazy-gemma3",
    "per token-gpt2",
    "eval with logits-llama",
)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
@pytest.mark.parametrize("way", HEAD_USES)
def test_no_parameter_is_read_outside_of_its_modules_forward(way, family, monkeypatch):
    stock = build(family) if family in FAMILIES else build_other(family, torch.float64)
    stock = stock.double()
    batch = make_batch("plain")
    plain = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7, **HEAD_USES[way])
    )
    expected = gradients(plain, way, batch)
    model = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7, **HEAD_USES[way])
    )
    calls = as_held(monkeypatch)
    for number in (1, 2):
        with tables(model, monkeypatch):
            our_gradients = gradients(model, way, batch)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
        # once a forward, whoever uses what
        assert len(calls) == (0 if way == "no labels" else number)


@pytest.mark.parametrize("where", ["layers", "head"])
def test_the_table_raises(where, monkeypatch):
    model = build("qwen3")
    with tables(model, monkeypatch), pytest.raises(Reading):
        model.model.layers[0].mlp.up_proj.weight if where == "layers" else model.lm_head.weight


def test_a_mutant_that_looks_at_the_weight(monkeypatch):
    """As `HeldHead` did for its dtype."""
    real = head_deferral.HeldHead.install
    monkeypatch.setattr(
        head_deferral.HeldHead, "install", lambda head: (head._head[0].weight, real(head))
    )
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=7))
    as_held(monkeypatch)
    with tables(model, monkeypatch), pytest.raises(Reading):
        gradients(model, "labels", make_batch("plain"))


@pytest.mark.parametrize("trained", ["all", "all but the head", "the head alone"])
def test_what_is_trained(trained, monkeypatch):
    """Against a head that nobody holds, by `autograd.grad` of per-token values and by backward of
    the loss."""
    stock = build("llama", dtype=torch.float64)
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(
            trained == "all" or (trained == "the head alone") == name.startswith("lm_head")
        )
    results = []
    for holds_head in (False, True):
        with monkeypatch.context() as patch:
            if holds_head:
                as_held(patch)
            model = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7))
            loss = loss_of(model, "per token", make_batch("plain"))
            trained_parameters = [p for p in model.parameters() if p.requires_grad]
            first = torch.autograd.grad(loss, trained_parameters)
            loss_of(model, "labels", make_batch("plain")).mul(3.0).backward()
            results.append([*first, *(p.grad for p in trained_parameters)])
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert all(
        relative_l2({0: gradient}, {0: other_gradient}) <= MAX_FLOAT64_ERROR
        for gradient, other_gradient in zip(*results, strict=True)
    )


def test_a_head_of_another_kind_computes_its_logits(monkeypatch):
    """peft's wrapper adds to what its weight gives, so its weight is not all of it."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2.0 * super().forward(x)

    stock = build("llama", dtype=torch.float64)
    head = Scaled(
        stock.lm_head.in_features, stock.lm_head.out_features, bias=False, dtype=torch.float64
    )
    stock.lm_head = head
    batch = make_batch("plain")
    expected = gradients(copy.deepcopy(stock), "labels", batch)
    model = streambp.patch(stock, streambp.StreamConfig(chunk_size=7))
    calls = as_held(monkeypatch)
    assert worst_error(gradients(model, "labels", batch), expected) <= MAX_FLOAT64_ERROR
    assert not calls
    assert "Scaled's own forward" in streambp.describe(model).head
