"""`streambp.warm_up`: hooks that are set after it count what they count on the unpatched model,
from the first step on.

covers: model/warm_up.py, model/steps.py, layer/layer_state.py, model/state.py, admission/entry.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streambp
from streambp.admission import own_run, probe, trials
from streambp.errors import StreamBPError
from streambp.layer.layer_state import LayerTests
from streambp.model import unpatched
from streambp.model.steps import Steps
from streambp.prefixes import calls
from streambp.prefixes.admission import PackedRowTrials
from streambp.prefixes.tree import find_tree
from tests import families, zoo
from tests.families import make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.prefixes import batches
from tests.seeds import seed_torch

CHUNKS = streambp.StreamConfig(chunk_size=5, saves=())


pytestmark = pytest.mark.usefixtures("float64_everywhere")


@pytest.fixture
def trial_counts(monkeypatch):
    """The first looks that are made, by name."""
    counts = Counter()
    trial_functions = [
        (probe, "_test_chunks"),
        (probe, "_test_full_length"),
        (trials, "_find_writes"),
        (trials, "random_tokens"),
        (PackedRowTrials, "_try"),
    ]
    for home, name in (*trial_functions, (own_run, "run_unpatched"), (probe, "run_unpatched")):
        real = getattr(home, name)

        def count(*args, real=real, name=name, **kwargs):
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(home, name, count)
    return counts


class Statistics:
    """What K-FAC, calibration and influence functions add up: tokens, products of inputs, squares
    of gradients.

    everywhere: also where a forward has no graph that backward will recompute, as before a
    checkpoint's recomputation.
    """

    def __init__(self, model, everywhere=False):
        self.sums, self.everywhere = {}, everywhere
        for name, module in model.named_modules():
            if "layers" in name and isinstance(module, nn.Linear):
                module.register_forward_hook(functools.partial(self.forward, name))
                module.register_full_backward_hook(functools.partial(self.backward, name))

    def add(self, key, value):
        self.sums[key] = self.sums.get(key, 0) + value

    def forward(self, name, _, args, output):
        x = args[0].detach().flatten(0, -2)
        if torch.is_grad_enabled() or self.everywhere:
            self.add((name, "tokens"), len(x))
            self.add((name, "inputs"), x.T @ x)
        if output.requires_grad:
            output.register_hook(functools.partial(self.of_tensor, name))

    def backward(self, name, _, __, grads):
        self.add((name, "gradients"), grads[0].square().sum())

    def of_tensor(self, name, grad):
        self.add((name, "of a tensor"), grad.square().sum())


def labelled(model, batch):
    return model(**batch, use_cache=False).loss


def from_logits(model, batch):
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def warm_up_inputs(batch, loss_of):
    return (
        {**batch, "use_cache": False}
        if loss_of is labelled
        else {"input_ids": batch["input_ids"], "use_cache": False}
    )


def lora(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    seed_torch(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )


def identity(model):
    return model


CASES = {
    "chunks": ("llama", identity, labelled, CHUNKS),
    "default": ("llama", identity, labelled, streambp.StreamConfig()),
    "streamed in one chunk": (
        "llama",
        identity,
        labelled,
        streambp.StreamConfig(unpatched_runs=False),
    ),
    "lazy": (
        "llama",
        identity,
        from_logits,
        streambp.StreamConfig(chunk_size=5, saves=(), lazy_logits=True),
    ),
    "logits": ("llama", identity, from_logits, CHUNKS),
    "LoRA": ("llama", lora, labelled, CHUNKS),
    "saves": (
        "llama",
        identity,
        labelled,
        streambp.StreamConfig(chunk_size=5, saves=("attn_out", "kv", "mlp.*")),
    ),
    "experts": ("qwen3_moe", identity, labelled, CHUNKS),
    "states": ("falcon_h1", identity, labelled, CHUNKS),
    "whole": ("mixing", identity, labelled, CHUNKS),
}


def build(family):
    if family == "mixing":
        model = families.build("llama", torch.float64)
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(mix)
        return model
    return (
        families.build(family, torch.float64) if family in families.FAMILIES else zoo.build(family)
    )


def mix(_, args):
    return (args[0] + args[0].roll(1, 1),)


def a_step(model, batch, loss_of):
    model.zero_grad(set_to_none=True)
    loss_of(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def statistics(case, trial_counts):
    """Steps with statistics after a warm-up, on the unpatched model and on ours."""
    family, wrap, loss_of, config = CASES[case]
    stock, ours = (wrap(build(family)) for _ in range(2))
    batch = make_batch("plain")
    streambp.warm_up(streambp.patch(ours, config), **warm_up_inputs(batch, loss_of))
    assert trial_counts
    trial_counts.clear()
    # where the step runs as unpatched
    everywhere = config.chunk_size == "auto" and config.unpatched_runs
    collectors = [Statistics(model, everywhere) for model in (stock, ours)]
    for seed in (1, 2):
        batch = make_batch("plain", seed=seed)
        expected, gradients = (a_step(model, batch, loss_of) for model in (stock, ours))
        assert worst_error(gradients, expected) <= MAX_FLOAT64_ERROR
        compare(*(statistics.sums for statistics in collectors), runs_twice=case == "whole")
    assert not +trial_counts


def compare(expected, actual, runs_twice=False):
    """twice: torch's checkpoint runs forward with a graph, and once more."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        times = (
            actual[key[0], "tokens"] / expected[key[0], "tokens"]
            if key[1] in ("tokens", "inputs")
            else 1
        )
        assert times in ((1, 2) if runs_twice else (1,))
        value, our_value = (torch.as_tensor(x) for x in (value, actual[key]))
        torch.testing.assert_close(our_value / times, value * 1.0, rtol=1e-9, atol=1e-14)


@pytest.mark.sees_padding("hooks count the tokens that pass")
@pytest.mark.fast("chunks", "default", "lazy", "LoRA", "states", "whole")
@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_the_unpatched_model(case, trial_counts, monkeypatch):
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25 if case == "default" else 0.0)
    statistics(case, trial_counts)


@pytest.mark.fast(2)
@pytest.mark.parametrize("forget", [LayerTests, streambp])
def test_without_it_they_keep_the_trials(forget, trial_counts, monkeypatch):
    """Mutants: what is known is not taken over, and no warm-up at all."""
    if forget is LayerTests:
        monkeypatch.setattr(LayerTests, "reuse_result", lambda *_: None)
    else:
        monkeypatch.setattr(streambp, "warm_up", lambda *_, **__: trial_counts.update(["it"]))
    with pytest.raises(AssertionError):
        statistics("chunks", trial_counts)


def test_without_gradients(trial_counts):
    """Evaluation is a kind of call of its own."""
    stock, ours = build("llama").eval(), streambp.patch(build("llama"), CHUNKS).eval()
    with torch.no_grad():
        streambp.warm_up(ours, **make_batch("plain"), use_cache=False)
        trial_counts.clear()
        collectors = [Statistics(model, everywhere=True) for model in (stock, ours)]
        for model in (stock, ours):
            labelled(model, make_batch("plain"))
    compare(*(statistics.sums for statistics in collectors))
    assert not +trial_counts


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharing_of_prefixes(ranks, trial_counts, monkeypatch):
    """Several ranks make the trial of sharing even if there are hooks."""
    monkeypatch.setattr(calls, "find_tree", functools.partial(find_tree, min_prefix=8))
    monkeypatch.setattr(calls, "ranks_must_agree", lambda module: ranks > 1)
    monkeypatch.setattr(calls, "gather_numbers", lambda module, mine, device: [mine] * ranks)
    config = streambp.StreamConfig(chunk_size=1000, saves=(), rows="packed")
    stock, ours, batch = (
        build("llama"),
        streambp.patch(build("llama"), config),
        batches.make_batch("plain"),
    )
    streambp.warm_up(ours, **batch)
    assert trial_counts["_try"]
    trial_counts.clear()
    collectors = [Statistics(stock), Statistics(ours)]
    expected, gradients = (a_step(model, batch, labelled) for model in (stock, ours))
    assert worst_error(gradients, expected) <= MAX_FLOAT64_ERROR
    compare(*(statistics.sums for statistics in collectors))
    assert not +trial_counts


class CountingModule(nn.Module):
    """Counts in a buffer and in an attribute, and draws from three generators."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.steps = inner, 0
        self.register_buffer("token_count", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        self.token_count += x.shape[1]
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        return self.inner(x) * (1 + 1e-3 * noise)


@pytest.mark.fast(2)
@pytest.mark.parametrize("grads_before", ["no gradients", "gradients"])
def test_nothing_stays(grads_before):
    model = build("llama")
    model.model.layers[0].mlp = CountingModule(model.model.layers[0].mlp)
    steps = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: steps.append(1))
        if grads_before == "gradients":
            parameter.grad = torch.randn_like(parameter)
    streambp.patch(model, CHUNKS)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    holders = {name: id(b) for name, b in model.named_buffers()}
    versions = [p._version for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    streambp.warm_up(model, **make_batch("plain"), use_cache=False)
    assert not steps
    assert [p._version for p in model.parameters()] == versions
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)
    assert all(
        torch.equal(b, buffers[name]) and id(b) == holders[name]
        for name, b in model.named_buffers()
    )
    assert model.model.layers[0].mlp.steps == 0
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


@pytest.mark.parametrize(
    "config", [CHUNKS, streambp.StreamConfig(chunk_size=5, saves=(), offload="cpu")]
)
def test_it_is_no_step(config, caplog):
    """No record before the first step, none in the log, and the steps count as if nothing had
    been."""
    stock, ours = (streambp.patch(build("llama"), config) for _ in range(2))
    with caplog.at_level(logging.INFO, logger="streambp"):
        streambp.warm_up(ours, **make_batch("plain"), use_cache=False)
    assert streambp.last_step(ours) is None
    assert streambp.describe(ours).head == streambp.describe(stock).head
    assert "step 1" not in caplog.text
    for model in (stock, ours):
        a_step(model, make_batch("plain"), labelled)
    records = [dataclasses.replace(streambp.last_step(model), host=None) for model in (stock, ours)]
    assert records[0] == records[1]
    streambp.warm_up(ours, **make_batch("plain", length=13), use_cache=False)
    assert dataclasses.replace(streambp.last_step(ours), host=None) == records[1]
    a_step(ours, make_batch("plain"), labelled)
    assert streambp.last_step(ours).number == 2


def test_a_warm_up_that_is_noted_turns_this_red(monkeypatch, caplog):
    """Mutant: what it does counts as a step."""
    monkeypatch.setattr(Steps, "pause_recording", lambda _: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        test_it_is_no_step(CHUNKS, caplog)


class ScaledModule(nn.Module):
    """An MLP times a number that the first batch gives, kept where no fingerprint looks."""

    scale = None

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        ScaledModule.scale = None

    def forward(self, x):
        if ScaledModule.scale is None:
            ScaledModule.scale = x.detach().abs().mean()
        return self.inner(x) * ScaledModule.scale


def test_a_value_of_the_first_batch_is_not_that_of_a_warm_up():
    def scaled():
        model = build("llama")
        model.model.layers[0].mlp = ScaledModule(model.model.layers[0].mlp)
        return model

    stock, other_batch = scaled(), make_batch("plain", seed=9)
    expected = [a_step(stock, make_batch("plain", seed=seed), labelled) for seed in (1, 2)]
    ours = streambp.patch(scaled(), CHUNKS)
    for _ in range(3):
        streambp.warm_up(ours, **other_batch, use_cache=False)
    for seed, gradients in zip((1, 2), expected, strict=True):
        assert (
            worst_error(a_step(ours, make_batch("plain", seed=seed), labelled), gradients)
            <= MAX_FLOAT64_ERROR
        )
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


def doubling(_, __, output):
    return output * 2


@pytest.mark.parametrize("grad", [True, False])
def test_a_hook_that_changes_something_is_told_and_tried(grad):
    stock, ours = build("llama"), streambp.patch(build("llama"), CHUNKS)
    batch = make_batch("plain")
    with torch.set_grad_enabled(grad):
        streambp.warm_up(ours, **batch, use_cache=False)
        for model in (stock, ours):
            for layer in model.model.layers:
                layer.mlp.register_forward_hook(doubling)
        with pytest.raises(
            StreamBPError, match=r"doubling .* of mlp .* was registered after\s+streambp.warm_up"
        ):
            labelled(ours, batch)
    # the second time it runs
    expected, grads = (a_step(model, batch, labelled) for model in (stock, ours))
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR


@pytest.mark.full
def test_a_hook_that_keeps_its_graph_is_told_and_runs_whole():
    stock, ours = build("llama"), streambp.patch(build("llama"), CHUNKS)
    batch, outputs = make_batch("plain"), []
    streambp.warm_up(ours, **batch, use_cache=False)
    for model in (stock, ours):
        model.model.layers[1].mlp.register_forward_hook(
            lambda _, __, output: outputs.append(output)
        )

    def loss(model, batch):
        outputs.clear()
        return labelled(model, batch) + outputs[-1].pow(2).mean()

    expected = a_step(stock, batch, loss)
    with pytest.raises(StreamBPError, match="stores values of single chunks"):
        a_step(ours, batch, loss)
    assert worst_error(a_step(ours, batch, loss), expected) <= MAX_FLOAT64_ERROR


@pytest.mark.full
def test_hooks_that_see_trials_are_named_once():
    model = streambp.patch(build("llama"), CHUNKS)
    statistics = Statistics(model)
    with pytest.warns(
        UserWarning,
        match=r"forward \(test_warm_up.py:\d+\) on LlamaDecoderLayer 0: .*streambp.warm_up",
    ) as records:
        a_step(model, make_batch("plain"), labelled)
    assert sum("streambp.warm_up" in str(w.message) for w in records) == 1
    assert statistics.sums
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a_step(model, make_batch("plain", seed=2), labelled)


@pytest.mark.parametrize("has_warm_up", [True, False])
def test_who_is_not_warned(has_warm_up):
    """Hooks of transformers, hooks around layers, and who has warmed up."""
    model = streambp.patch(build("llama"), CHUNKS)
    if has_warm_up:
        streambp.warm_up(model, **make_batch("plain"), use_cache=False)
        Statistics(model)
    model.enable_input_require_grads()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a_step(model, make_batch("plain"), labelled)


def test_what_cannot_be_warmed_up():
    model = build("llama")
    with pytest.raises(StreamBPError, match="is not patched"):
        streambp.warm_up(model, **make_batch("plain"))
    streambp.patch(model)
    next(model.parameters()).grad_accum = object()  # as DeepSpeed leaves it
    with pytest.raises(StreamBPError, match="before the engine gets the model"):
        streambp.warm_up(model, **make_batch("plain"))


def test_patching_anew_starts_cold():
    model = streambp.patch(build("llama"), CHUNKS)
    streambp.warm_up(model, **make_batch("plain"), use_cache=False)
    streambp.patch(model, CHUNKS)
    Statistics(model)
    with pytest.warns(UserWarning, match="streambp.warm_up"):
        a_step(model, make_batch("plain"), labelled)
