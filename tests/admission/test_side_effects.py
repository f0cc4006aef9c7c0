"""Layers whose forward does more than give an output for an input, and mixing of tokens that
numbers do not show yet.

covers: admission/probe.py, admission/rehearsal.py, layer/side_effects.py
"""

from __future__ import annotations

import copy
import queue

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import streambp
from streambp.admission import probe, rehearsal
from streambp.errors import BackwardError
from tests import zoo
from tests.families import build, make_batch
from tests.model.test_contract import check_agree
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch, seeded

CONFIG = streambp.StreamConfig(chunk_size=5)


def paths(model):
    return {layer.path for layer in streambp.describe(model).layers}


def reasons(model):
    return {layer.reason for layer in streambp.describe(model).layers}


class Wrapped(nn.Module):
    """Around an MLP."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Normed(Wrapped):
    """By the statistics of all tokens, in train mode."""

    def __init__(self, inner):
        super().__init__(inner)
        self.norm = nn.BatchNorm1d(32, affine=False, dtype=torch.float64)

    def forward(self, x):
        return self.norm(self.inner(x).flatten(0, 1)).view_as(x)


class Counted(Wrapped):
    """Counts where its output is positive, as routers count their experts' tokens; in train
    mode."""

    def __init__(self, inner):
        super().__init__(inner)
        self.register_buffer("count", torch.zeros(32, dtype=torch.int64))

    def forward(self, x):
        y = self.inner(x)
        if self.training:
            self.count += (y.detach() > 0).sum((0, 1))
        return y


class Reassigned(Counted):
    def forward(self, x):
        y = self.inner(x)
        self.count = self.count + (y.detach() > 0).sum((0, 1))
        return y


class Auxiliary(Wrapped):
    """Leaves a loss behind, in train mode."""

    def forward(self, x):
        y = self.inner(x)
        if self.training:
            self.aux_loss = y.pow(2).mean()
        return y


class Shifted(Wrapped):
    """Mixes neighbours by a gate."""

    def __init__(self, inner, gate=0.0, by=1):
        super().__init__(inner)
        self.gate = nn.Parameter(torch.full((), gate, dtype=next(inner.parameters()).dtype))
        self.by = by

    def forward(self, x):
        return self.inner(x + self.gate * torch.roll(x, self.by, 1))


class Interpolated(Shifted):
    """The same where the gate does nothing at 1."""

    def forward(self, x):
        return self.inner(x * self.gate + torch.roll(x, self.by, 1) * (1 - self.gate))


def pair(change, dtype=torch.float64):
    stock = build("qwen3", dtype)
    for layer in stock.model.layers:
        change(layer)
    return stock, streambp.patch(copy.deepcopy(stock), CONFIG)


def around_mlp(wrapper, **kwargs):
    def change(layer):
        layer.mlp = wrapper(layer.mlp, **kwargs)

    return change


def power_iterations(how):
    def change(layer):
        seed_torch(3)
        how(layer.mlp.up_proj)

    return change


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    "change",
    [
        around_mlp(Normed),
        around_mlp(Counted),
        around_mlp(Reassigned),
        power_iterations(parametrizations.spectral_norm),
        power_iterations(spectral_norm),
    ],
    ids=["statistics", "counter", "new buffer", "spectral norm", "spectral norm by a hook"],
)
def test_buffers_are_written_once_for_a_forward(change, float64_oracle):
    """Two steps of accumulation, so that a recomputation comes behind a later forward's buffers."""
    stock, ours = pair(change)
    batches = [make_batch("plain"), make_batch("plain", length=31, seed=2)]
    runs = []
    for model in (stock, ours):
        sum(model(**batch, use_cache=False).loss for batch in batches).backward()
        runs.append({name: p.grad for name, p in model.named_parameters()})
    assert worst_error(runs[1], runs[0]) <= 1e-10
    for (name, buffer), our_buffer in zip(stock.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(our_buffer, buffer, rtol=1e-12, atol=1e-12, msg=name)
    assert paths(ours) == {"checkpoints"}
    assert all("writes to buffers" in reason for reason in reasons(ours))


def test_buffers_that_are_only_read_stream(float64_oracle):
    class Scaled(Counted):
        def forward(self, x):
            return self.inner(x) * (1 + self.count.sum())

    stock, ours = pair(around_mlp(Scaled))
    buffers = list(ours.buffers())
    with torch.no_grad():
        for model in (stock, ours):
            for layer in model.model.layers:
                layer.mlp.count.fill_(2)
    check_agree(stock, ours, **make_batch("plain"))
    assert all(a is b for a, b in zip(buffers, ours.buffers(), strict=True))
    assert paths(ours) == {"streams"}


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", [5, 64])
def test_an_auxiliary_loss_in_an_attribute(chunk_size, float64_oracle):
    """A first call in eval mode, where there is none, must not decide for the others."""
    stock, _ = pair(around_mlp(Auxiliary))
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=chunk_size))
    batch = make_batch("plain")
    gradients(ours.eval(), **batch)
    assert paths(ours) == {"streams"}
    ours.train()
    runs = []
    for model in (stock, ours):
        loss = model(**batch, use_cache=False).loss + 3 * sum(
            layer.mlp.aux_loss for layer in model.model.layers
        )
        loss.backward()
        runs.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    assert abs(runs[0][0] - runs[1][0]) <= 1e-12 * abs(runs[0][0])
    assert worst_error(runs[1][1], runs[0][1]) <= 1e-10
    assert all("with their graph" in reason for reason in reasons(ours))


def step_with_hooks(model, batch, collected=None):
    """A loss of what hooks have collected, besides the model's."""
    outputs = []
    collect = outputs.append if collected is None else collected.put
    hooks = [
        layer.mlp.register_forward_hook(lambda m, a, out: collect(out))
        for layer in model.model.layers
    ]
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    while collected is not None and not collected.empty():
        outputs.append(collected.get())
    loss = loss + sum(out.pow(2).mean() for out in outputs)
    for hook in hooks:
        hook.remove()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("runs_step_first", [False, True])
def test_a_loss_of_what_hooks_collect(runs_step_first, float64_oracle):
    """They see the sequence once, and nothing of the trial is left with them."""
    stock, ours = pair(lambda layer: None)
    batch = make_batch("plain")
    if runs_step_first:
        gradients(ours, **batch)
    for _ in range(2):
        assert worst_error(step_with_hooks(ours, batch), step_with_hooks(stock, batch)) <= 1e-10
    check_agree(stock, ours, **batch)
    assert paths(ours) == {"streams"}


@pytest.mark.fast(2)
@pytest.mark.parametrize("runs_step_first", [False, True])
def test_a_loss_of_what_hooks_collect_out_of_sight(runs_step_first, float64_oracle):
    """What a queue holds of the trial cannot be taken out: it raises by name."""
    stock, ours = pair(lambda layer: None)
    batch = make_batch("plain")
    if runs_step_first:
        gradients(ours, **batch)
    with pytest.raises(BackwardError, match="a hook inside a streamed layer stored"):
        step_with_hooks(ours, batch, queue.SimpleQueue())
    assert worst_error(step_with_hooks(ours, batch), step_with_hooks(stock, batch)) <= 1e-10
    check_agree(stock, ours, **batch)
    assert paths(ours) == {"streams"}


def test_a_hook_for_the_last_token_that_comes_after_the_first_call(float64_oracle):
    """Of each chunk it would be another one."""
    stock, ours = pair(lambda layer: None)
    batch = make_batch("plain")
    check_agree(stock, ours, **batch)
    for model in (stock, ours):
        steer = lambda m, a, out: torch.cat((out[:, :-1], out[:, -1:] + 1), 1)  # noqa: E731
        model.model.layers[1].mlp.register_forward_hook(steer)
    check_agree(stock, ours, **batch)
    assert [layer.path for layer in streambp.describe(ours).layers] == ["streams", "checkpoints"]


@pytest.mark.parametrize(
    "change", [around_mlp(Shifted), around_mlp(Shifted, by=-1), around_mlp(Interpolated, gate=1.0)]
)
def test_a_gate_that_is_closed_at_first(change, float64_oracle):
    stock, ours = pair(change)
    batch = make_batch("plain")
    check_agree(stock, ours, **batch)
    with torch.no_grad():
        for model in (stock, ours):
            for layer in model.model.layers:
                layer.mlp.gate.add_(0.5)
    check_agree(stock, ours, **batch)
    assert paths(ours) == {"checkpoints"}


@pytest.mark.parametrize("name", ["gptj", "bamba"])
def test_a_closed_gate_in_layers_that_read_a_cache_or_hand_on_states(name):
    """Something is right to cross a chunk's end there, so that numbers have to tell."""
    model = zoo.build(name)
    layers = model.transformer.h if name == "gptj" else model.model.layers
    for layer in layers:
        child_name = "mlp" if name == "gptj" else "feed_forward"
        setattr(layer, child_name, Shifted(getattr(layer, child_name)))
    streambp.patch(model, CONFIG)
    model(**make_batch("plain"), use_cache=False).loss.backward()
    assert paths(model) == {"checkpoints"}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("by", [1, -1])
def test_mixing_less_than_half_precision_rounds(by, graph):
    _, ours = pair(around_mlp(Shifted, gate=0.01, by=by), torch.bfloat16)
    with torch.set_grad_enabled(graph):
        ours(**make_batch("plain"), use_cache=False)
    assert paths(ours) == {"checkpoints"}


@pytest.mark.full
def test_the_trial_leaves_parameters_buffers_and_random_numbers_alone():
    _, ours = pair(around_mlp(Counted), torch.float32)
    previous_values = {
        name: x.clone() for name, x in ours.state_dict().items() if not name.endswith("count")
    }
    state = torch.get_rng_state()
    ours(**make_batch("plain"), use_cache=False).loss.backward()
    assert all(
        torch.equal(x, previous_values[name])
        for name, x in ours.state_dict().items()
        if name in previous_values
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(isinstance(p, nn.Parameter) for p in ours.parameters())


def test_random_routing_is_no_mixing():
    """Phi-3.5-MoE's router draws its experts in train mode, and is a module without children."""
    ours = streambp.patch(zoo.build("phimoe", router_jitter_noise=0.1), CONFIG)
    ours(**make_batch("plain"), use_cache=False).loss.backward()
    assert paths(ours) == {"streams"}


def without_trial(monkeypatch):
    monkeypatch.setattr(probe, "_try_isolated_chunks", lambda *_: None)


def without_stirring(monkeypatch):
    monkeypatch.setattr(rehearsal, "with_random_zeros", torch.Tensor.detach)


def in_eval_mode(monkeypatch):
    def evaluated(call, *args, real=probe._try_isolated_chunks):
        with rehearsal.set_eval_mode(call.layer_state.layer):
            return real(call, *args)

    monkeypatch.setattr(probe, "_try_isolated_chunks", evaluated)


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            without_trial,
            lambda: test_buffers_are_written_once_for_a_forward(around_mlp(Counted), None),
        ),
        (without_trial, lambda: test_mixing_less_than_half_precision_rounds(1, True)),
        (without_stirring, lambda: test_a_gate_that_is_closed_at_first(around_mlp(Shifted), None)),
        (in_eval_mode, lambda: test_an_auxiliary_loss_in_an_attribute(5, None)),
    ],
)
def test_mutants_turn_these_red(mutant, test, monkeypatch, float64_oracle):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, BackwardError)):  # what a trial misses, backward may find
        test()


def test_large_matrices_are_not_copied(monkeypatch):
    monkeypatch.setattr(rehearsal, "MAX_MATRIX_ELEMENTS", 32)
    some, all_zeros = torch.randn(8, 8, generator=seeded()), torch.zeros(8, 8)
    some[2] = 0
    assert rehearsal.with_random_zeros(nn.Parameter(some)).data_ptr() == some.data_ptr()
    for zeros in (all_zeros, all_zeros[:4], some[1:4]):
        assert bool(rehearsal.with_random_zeros(nn.Parameter(zeros)).all())
    quantised = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    assert torch.equal(rehearsal.with_random_zeros(quantised), quantised)
