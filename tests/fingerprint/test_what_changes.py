"""What a program changes in a layer: between a forward and its backward it raises, between two
steps it is tried anew.

covers: admission/generators.py, fingerprint/hooks.py, fingerprint/observed_values.py, fingerprint/snapshots.py,
  fingerprint/attribute_reads.py, layer/gradients.py
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import queue
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

import streambp
from streambp.admission import entry, kept_values, probe
from streambp.admission import layer_checkpoint as whole
from streambp.errors import BackwardError, StreamBPError, UnsupportedModelError
from streambp.fingerprint import hooks as watched
from streambp.fingerprint import observed_values
from streambp.fingerprint import snapshots as fingerprint
from streambp.layer import function, layer_state
from streambp.layer import gradients as layer_gradients
from tests.admission.test_side_effects import CONFIG, Wrapped, around_mlp, pair, paths, reasons
from tests.conftest import SHARES_PREFIXES
from tests.families import build, make_batch, mix_neighbours
from tests.model.test_contract import check_agree
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.seeds import seed_of, seed_others, seed_torch, seeded
from tests.tiers import thinned

pytestmark = pytest.mark.usefixtures("float64_oracle")
SWITCH = {"on": False, "by": 0.0, "deep": [[["deeper", {"on": False}]]]}  # a program's globals
STORED_TENSORS: list[torch.Tensor] = []


def layer_of(model):
    return model.model.layers[1]


@contextlib.contextmanager
def hooked(module, hook):
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def attribute(owner, name, value):
    previous_value = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous_value)


@contextlib.contextmanager
def instance_forward(module, forward):
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def steering(by=0.5):
    def steer(module, args, out):
        return out * by

    return steer


def hook_removed(model):
    return hooked(layer_of(model).mlp, steering())


@contextlib.contextmanager
def hook_added(model):
    yield
    layer_of(model).mlp.up_proj.register_forward_hook(steering())


@contextlib.contextmanager
def pre_hook_in_place(model):
    def shrink(module, args):
        args[0].mul_(0.5)

    handle = layer_of(model).mlp.down_proj.register_forward_pre_hook(shrink)
    yield
    handle.remove()


@contextlib.contextmanager
def flag_flipped(model):
    on = True

    def gated(module, args, out):
        return out * 0.5 if on else None

    layer_of(model).mlp.register_forward_hook(gated)
    yield
    on = False


@contextlib.contextmanager
def number_changed(model):
    by = 0.5

    def gated(module, args, out):
        return out * by

    layer_of(model).mlp.register_forward_hook(gated)
    yield
    by = 0.25


class Steering:
    def __init__(self):
        self.scale = 0.5

    def __call__(self, module, args, out):
        return out * self.scale


@contextlib.contextmanager
def scale_of_a_hook_object(model):
    hook = Steering()
    layer_of(model).mlp.register_forward_hook(hook)
    yield
    hook.scale = 2.0


def gated_by_a_global(module, args, out):
    return out * 0.5 if SWITCH["on"] else None


@contextlib.contextmanager
def global_flipped(model):
    """No print sees it, but the hook changes nothing any more."""
    layer_of(model).mlp.register_forward_hook(gated_by_a_global)
    SWITCH["on"] = True
    try:
        yield
    finally:
        SWITCH["on"] = False


def trained_intervention(model):
    steer = nn.Parameter(torch.rand(32, generator=seeded(), dtype=torch.float64))
    return hooked(layer_of(model).mlp, lambda m, a, out: out + steer)


def scaling_of_attention(model):
    return attribute(layer_of(model).self_attn, "scaling", 0.7)


def activation(model):
    return attribute(layer_of(model).mlp, "act_fn", nn.GELU())


def own_forward(model):
    mlp = layer_of(model).mlp
    return instance_forward(mlp, lambda x: type(mlp).forward(mlp, x) * 0.5)


def class_forward(model):
    norm = type(layer_of(model).input_layernorm)
    return attribute(norm, "forward", lambda self, x, real=norm.forward: real(self, x) * 0.5)


def module_mode(model):
    return attribute(layer_of(model).mlp, "training", False)


@contextlib.contextmanager
def frozen_weight(model):
    weight = layer_of(model).mlp.up_proj.weight
    yield
    with torch.no_grad():
        weight.mul_(1.5)


@contextlib.contextmanager
def frozen_weight_replaced(model):
    yield
    layer_of(model).mlp.up_proj.weight = nn.Parameter(
        torch.rand(40, 32, dtype=torch.float64), requires_grad=False
    )


@contextlib.contextmanager
def buffer(model):
    yield
    layer_of(model).self_attn.offset.add_(1)


@contextlib.contextmanager
def container(model):
    yield
    layer_of(model).self_attn.factors["first"] = 3.0


def reads_both(module, args):
    """What no code reads may change."""
    assert module.factors
    assert module.settings


class Settings:
    def __init__(self):
        self.scale = 1.0


@contextlib.contextmanager
def object_in_an_attribute(model):
    yield
    layer_of(model).self_attn.settings.scale = 2.0


LAYER_CHANGES = {
    "hook removed": (
        hook_removed,
        r"forward hook steer \(test_what_changes\.py:\d+\) of mlp is gone",
    ),
    "hook added": (
        hook_added,
        r"forward hook steer \(.*\) of mlp\.up_proj changes what it is given, and .* in forward",
    ),
    "pre-hook that writes": (
        pre_hook_in_place,
        r"forward pre-hook shrink .* of mlp\.down_proj is gone",
    ),
    "flag flipped": (flag_flipped, r"forward hook gated .* of mlp: on in .* was True and is False"),
    "number changed": (
        number_changed,
        r"forward hook gated .* of mlp: by in .* was 0\.5 and is 0\.25",
    ),
    "scale of a hook object": (
        scale_of_a_hook_object,
        r"forward hook Steering of mlp: \.scale was 0\.5 and is 2\.0",
    ),
    "trained intervention": (trained_intervention, r"forward hook <lambda> \(.*\) of mlp is gone"),
    "attribute": (scaling_of_attention, r"self_attn\.scaling was 0\.7 and is 0\.35"),
    "activation": (activation, r"mlp\.act_fn was a GELU and is a SiLUActivation"),
    "instance forward": (own_forward, r"mlp\.forward .*is gone"),
    "class forward": (class_forward, r"Qwen3RMSNorm\.forward"),
    "module's mode": (module_mode, r"mlp\.training was False and is True"),
    "frozen weight": (frozen_weight, r"mlp\.up_proj\.weight was changed in place"),
    "frozen weight replaced": (
        frozen_weight_replaced,
        r"mlp\.up_proj\.weight was a Parameter and is another Parameter",
    ),
    "buffer": (buffer, r"self_attn\.offset was changed in place"),
    "entry of a container": (container, r"self_attn\.factors\['first'\] was 1\.0 and is 3\.0"),
    "object in an attribute": (
        object_in_an_attribute,
        r"self_attn\.settings \(\.scale\) was 1\.0 and is 2\.0",
    ),
}


def with_more(layer):
    layer.self_attn.settings = Settings()
    layer.mlp.up_proj.weight.requires_grad_(False)
    layer.self_attn.register_buffer("offset", torch.zeros(3))
    layer.self_attn.factors = {"first": 1.0, "second": [2.0]}
    layer.self_attn.register_forward_pre_hook(reads_both)


@pytest.mark.fast("streams-buffer")
@pytest.mark.parametrize(
    ("runs", "change"),
    thinned(
        itertools.product(["streams", "checkpoints"], LAYER_CHANGES),
        lambda runs, change: (
            runs == "streams"
            or change in ("hook removed", "flag flipped", "frozen weight", "attribute")
        ),
    ),
)
def test_a_change_for_the_forward_alone_raises(change, runs, monkeypatch):
    make, message = LAYER_CHANGES[change]
    if runs == "checkpoints":
        mix_neighbours(monkeypatch, build("qwen3"))
    _, ours = pair(with_more)
    with make(ours):
        loss = ours(**make_batch("plain"), use_cache=False).loss
    with pytest.raises(BackwardError, match=message):
        loss.backward()
    expected = copy.deepcopy(ours)
    check_agree(streambp.unpatch(expected), ours, **make_batch("plain"))
    assert paths(ours) == {runs}


def test_a_flag_that_no_print_sees():
    _, ours = pair(lambda layer: None)
    with global_flipped(ours):
        loss = ours(**make_batch("plain"), use_cache=False).loss
    with pytest.raises(
        BackwardError,
        match=r"gated_by_a_global .* changes nothing that it is given, and did in forward",
    ):
        loss.backward()


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "change", ["hook removed", "flag flipped", "attribute", "activation", "instance forward"]
)
def test_backward_inside_is_exact_and_no_new_trial(change, monkeypatch):
    """In every step hooks are put on and taken off, attributes set and reset."""
    trials = counted(monkeypatch)
    make, _ = LAYER_CHANGES[change]
    stock, ours = pair(lambda layer: None)
    batch = make_batch("plain")
    for step in range(4):
        runs = []
        for model in (stock, ours):
            previous_hooks = dict(layer_of(model).mlp._forward_hooks)
            with make(model):
                runs.append(gradients(model, **batch)[1])
            layer_of(model).mlp._forward_hooks.clear()
            layer_of(model).mlp._forward_hooks.update(previous_hooks)
        assert worst_error(runs[1], runs[0]) <= MAX_FLOAT64_ERROR
        if step == 0:
            first = Counter(trials)
    assert trials == first


def counted(monkeypatch):
    """How often each layer is tried."""
    trials: Counter = Counter()
    real = probe._why_not

    def count(call, x):
        trials[call.layer_state.index] += 1
        return real(call, x)

    monkeypatch.setattr(probe, "_why_not", count)
    return trials


def looked(passed):
    """What a hook does that keeps nothing."""
    assert passed is not None


@pytest.mark.fast(2)
@pytest.mark.parametrize("runs", ["streams", "checkpoints"])
def test_hooks_that_only_look_may_go_before_backward(runs, monkeypatch):
    if runs == "checkpoints":
        mix_neighbours(monkeypatch, build("qwen3"))
    trials = counted(monkeypatch)
    stock, ours = pair(lambda layer: None)
    batch = make_batch("plain")
    for step in range(3):
        grads_of_runs = []
        for model in (stock, ours):
            model.zero_grad()
            with hooked(layer_of(model).mlp, lambda m, a, out: looked(out)):
                loss = model(**batch, use_cache=False).loss
            with hooked(layer_of(model).self_attn, lambda m, a, out: looked(a)):
                loss.backward()
            grads_of_runs.append({name: p.grad for name, p in model.named_parameters()})
        assert worst_error(grads_of_runs[1], grads_of_runs[0]) <= MAX_FLOAT64_ERROR
        if step == 0:
            first = Counter(trials)
    assert trials == first
    assert paths(ours) == {runs}


class Leaving(Wrapped):
    """Counts, and leaves what it computed last."""

    def __init__(self, inner):
        super().__init__(inner)
        self.tokens, self.weight, self.log, self.sums = 0, 0.0, [], {}
        self.total = torch.zeros(())

    def forward(self, x):
        y = self.inner(x * (1 + self.weight))
        self.tokens += x.shape[1]
        self.last = y.detach()
        self.log.append(self.tokens)
        self.sums[len(self.log)] = float(y.detach().sum())
        self.total.add_(1)
        return y


class AddingUp(Leaving):
    """Leaves sums over tokens alone, which chunks leave as well, of a recomputation."""

    def forward(self, x):
        y = self.inner(x * (1 + self.weight))
        if torch.is_grad_enabled():
            self.tokens += x.shape[1]
            self.last = self.__dict__.get("last", 0) + y.detach().sum()
        return y


@pytest.mark.fast(2)
@pytest.mark.parametrize("runs", ["streams", "checkpoints"])
def test_what_the_forward_itself_changes_is_no_alarm(runs, monkeypatch):
    """Six steps of two batches each, one and both before backward, with two annealed numbers."""
    trials = counted(monkeypatch)
    stock, ours = pair(around_mlp(Leaving if runs == "checkpoints" else AddingUp))
    batches = [make_batch("plain"), make_batch("left-padded", length=31, seed=2)]
    trial_counts = []
    for step in range(6):
        grads_of_runs = []
        for model in (stock, ours):
            model.zero_grad()
            for layer in model.model.layers:
                layer.mlp.weight = 0.125 * step
                layer.self_attn.scaling *= 0.99
            losses = [model(**batches[0], use_cache=False).loss]
            if step % 2:
                losses.pop().backward()
            losses.append(model(**batches[1], use_cache=False).loss)
            sum(losses).backward()
            grads_of_runs.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert worst_error(grads_of_runs[1], grads_of_runs[0]) <= MAX_FLOAT64_ERROR
        trial_counts.append(sum(trials.values()))
    assert len(set(trial_counts[1:])) == 1, (
        trial_counts
    )  # the weight that is zero at first is one kind more
    assert paths(ours) == {runs}


def test_a_backward_while_forwards_wait_for_theirs_teaches_nothing(monkeypatch):
    """What stands in for the parameters while a layer is recomputed is no change of the layer's
    own."""
    layer_indices, real = [], probe._why_not
    monkeypatch.setattr(
        probe,
        "_why_not",
        lambda call, x: layer_indices.append(call.layer_state.index) or real(call, x),
    )
    model, batch = streambp.patch(build("qwen3", torch.float64), CONFIG), make_batch("plain")
    model(**batch).loss.backward()
    assert layer_indices == [0, 1]
    waiting = [model(**batch).loss for _ in range(3)]
    for loss in waiting[1:]:  # the first one's never comes, as after an error
        loss.backward()
    layer_states = [w.layer_state for w in model._streambp.wrappers if hasattr(w, "layer_state")]
    assert [layer_state.fingerprint._ignored for layer_state in layer_states] == [set(), set()]
    model(**batch).loss.backward()
    assert layer_indices == [0, 1]


@pytest.mark.full
class Mixing(Wrapped):
    def forward(self, x):
        return self.inner(x + 0.5 * torch.roll(x, 1, 1))


@pytest.mark.full
def test_copies_of_a_model_after_steps(monkeypatch):
    stock, ours = pair(around_mlp(Leaving))
    batch = make_batch("plain")
    check_agree(stock, ours, **batch)
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    with hooked(layer_of(ours).mlp, lambda m, a, out: None):
        check_agree(stock, ours, **batch)
        copied = copy.deepcopy(ours)
    check_agree(stock, copied, **batch)
    check_agree(stock, torch.load(saved, weights_only=False), **batch)
    for model in (stock, copied):
        layer_of(model).mlp.inner.act_fn = nn.GELU()
    check_agree(stock, copied, **batch)
    for model in (stock, copied):
        second_layer = model.model.layers[0]
        second_layer.mlp = Mixing(second_layer.mlp)
    check_agree(stock, copied, **batch)


class Weighted(Wrapped):
    """An auxiliary loss whose weight is scheduled."""

    weight = 0.0

    def __init__(self, inner):
        super().__init__(inner)
        self.weight = 0.0

    def forward(self, x):
        y = self.inner(x)
        if self.weight:
            self.aux_loss = self.weight * y.pow(2).mean()
        return y


def mixing_module(layer):
    layer.mlp = Mixing(layer.mlp)


def mixing_forward(layer):
    mlp = layer.mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x + 0.5 * torch.roll(x, 1, 1))


def mixing_hook(layer):
    layer.mlp.register_forward_hook(lambda m, a, out: out + 0.5 * torch.roll(out, 1, 1))


def mixing_hook_in_place_of_another(layer):
    layer.mlp._forward_hooks.clear()
    mixing_hook(layer)


def mixing_flag(layer):
    layer.mixes = True


def flagged(layer):
    """A hook of the layer's own flag."""
    layer.mixes = False
    mixes = lambda m, a, out: out + 0.5 * torch.roll(out, 1, 1) if layer.mixes else None  # noqa: E731
    layer.mlp.register_forward_hook(mixes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda layer: None, mixing_module),
        (lambda layer: None, mixing_forward),
        (lambda layer: None, mixing_hook),
        (
            lambda layer: layer.mlp.register_forward_hook(steering()),
            mixing_hook_in_place_of_another,
        ),
        (flagged, mixing_flag),
    ],
    ids=["module", "forward", "hook", "hook in place of another", "flag"],
)
def test_mixing_of_tokens_that_sets_in_later(first, second):
    stock, ours = unpatched_and_patched(first)
    batch = make_batch("plain")
    check_agree(stock, ours, **batch)
    assert paths(ours) == {"streams"}
    for model in (stock, ours):
        second(layer_of(model))
    check_agree(stock, ours, **batch)
    assert [layer.path for layer in streambp.describe(ours).layers] == ["streams", "checkpoints"]


def unpatched_and_patched(change):
    """As `pair`, but hooks and closures are each model's own."""
    models = [build("qwen3", torch.float64), build("qwen3", torch.float64)]
    for model in models:
        change(layer_of(model))
    return models[0], streambp.patch(models[1], CONFIG)


def auxiliary_step(model, batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss = loss + sum(layer.mlp.aux_loss for layer in model.model.layers if layer.mlp.weight)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.full
def test_an_auxiliary_loss_that_is_scheduled_from_zero():
    stock, ours = pair(around_mlp(Weighted))
    batch = make_batch("plain")
    for weight in (0.0, 0.25, 0.5):
        for model in (stock, ours):
            for layer in model.model.layers:
                layer.mlp.weight = weight
        assert (
            worst_error(auxiliary_step(ours, batch), auxiliary_step(stock, batch))
            <= MAX_FLOAT64_ERROR
        )
        assert paths(ours) == {"checkpoints" if weight else "streams"}
    assert all("with their graph" in reason for reason in reasons(ours))


def collecting(layer, how):
    """A hook that starts to collect when its flag is set; returns what sets it, and what it has
    collected."""
    collected = []
    on, out_of_sight = False, queue.SimpleQueue()

    def closure(m, a, out):
        if on:
            collected.append(out)

    def by_queue(m, a, out):
        if not out_of_sight.empty():
            collected.append(out)

    def by_global(m, a, out):
        if SWITCH["deep"][0][0][1]["on"]:
            collected.append(out)

    def start():
        nonlocal on
        on = True
        SWITCH["deep"][0][0][1]["on"] = True
        out_of_sight.put(1)

    layer.mlp.register_forward_hook(
        {"closure": closure, "global": by_global, "queue": by_queue}[how]
    )
    return start, collected


@pytest.mark.fast(3)
@pytest.mark.parametrize("how", ["closure", "global", "queue"])
def test_a_hook_that_starts_to_collect(how):
    """Where the switch is out of sight one step raises; from then on it is exact."""
    SWITCH["deep"][0][0][1]["on"] = False
    stock, ours = (build("qwen3", torch.float64) for _ in range(2))
    streambp.patch(ours, CONFIG)
    watchers = [collecting(layer_of(model), how) for model in (stock, ours)]
    batch = make_batch("plain")
    check_agree(stock, ours, **batch)

    def step(model, collected):
        model.zero_grad()
        collected.clear()
        (
            model(**batch, use_cache=False).loss + sum(out.pow(2).mean() for out in collected)
        ).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    for start, _ in watchers:
        start()
    if how == "queue":
        message = r"stores tensors with their graph|stores values of single chunks|a streamed layer stored"
        with pytest.raises(StreamBPError, match=message):
            step(ours, watchers[1][1])
    for _ in range(2):
        assert (
            worst_error(step(ours, watchers[1][1]), step(stock, watchers[0][1]))
            <= MAX_FLOAT64_ERROR
        )
    assert [layer.path for layer in streambp.describe(ours).layers] == ["streams", "checkpoints"]


class Noisy(Wrapped):
    """Adds noise from a generator of its own, in train mode."""

    def __init__(self, inner):
        super().__init__(inner)
        self.generator = seeded(5)

    def forward(self, x):
        y = self.inner(x)
        if not self.training:
            return y
        return y * (1 + torch.rand(y.shape, generator=self.generator, dtype=y.dtype))

    def __deepcopy__(self, memo):
        return Noisy(copy.deepcopy(self.inner, memo))


def test_a_generator_of_a_modules_own():
    """The layer runs whole, draws what the unpatched one draws, and once more the same in
    backward."""
    stock, ours = pair(around_mlp(Noisy))
    batches = [make_batch("plain"), make_batch("plain", length=31, seed=2)]
    for _ in range(2):
        runs = []
        for model in (stock, ours):
            model.zero_grad()
            loss = sum(model(**batch, use_cache=False).loss for batch in batches)
            loss.backward()
            runs.append(
                (loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()})
            )
        assert abs(runs[0][0] - runs[1][0]) <= 1e-12 * abs(runs[0][0])
        assert worst_error(runs[1][1], runs[0][1]) <= MAX_FLOAT64_ERROR
    assert reasons(ours) == {probe.REASON_RANDOM_NUMBERS}
    check_agree(stock.eval(), ours.eval(), **batches[0])
    assert paths(ours) == {"streams"}


class Skipping(Wrapped):
    """Stochastic depth in train mode, by random numbers that are not torch's. shared: with the
    whole program."""

    def __init__(self, inner, library, shared):
        super().__init__(inner)
        self.library, self.generator = library, None
        if not shared:
            self.generator = (
                random.Random(seed_of(5))
                if library == "python"
                else np.random.default_rng(seed_of(5))
            )

    def forward(self, x):
        numbers = self.generator or (random if self.library == "python" else np.random)
        return self.inner(x * (numbers.random() if self.training else 0.5))


class SkippingHook:
    """The same in a hook."""

    def __call__(self, module, args, out):
        return out * (random.random() if module.training else 0.5)


def skipping(library, shared):
    if library != "hook":
        return around_mlp(Skipping, library=library, shared=shared)
    return lambda layer: layer.mlp.register_forward_hook(SkippingHook())


@pytest.mark.parametrize(
    ("library", "shared"), [*itertools.product(["python", "numpy"], [False, True]), ("hook", True)]
)
def test_numbers_of_python_and_numpy(library, shared):
    """Their generators are where they are unpatched after each step, and a recomputation draws as
    forward did."""
    runs = []
    for model in pair(skipping(library, shared)):
        seed_others(6)
        runs.append([])
        for seed in (1, 2):
            model.zero_grad()
            loss = model(**make_batch("plain", seed=seed), use_cache=False).loss
            loss.backward()
            runs[-1].append({name: p.grad.clone() for name, p in model.named_parameters()})
            runs[-1][-1] |= {
                "loss": loss.detach(),
                "next": torch.tensor([random.random(), np.random.random()]),
            }
    for ours, theirs in zip(runs[1], runs[0], strict=True):
        assert worst_error(ours, theirs) <= MAX_FLOAT64_ERROR
        assert torch.equal(ours["next"], theirs["next"])
    assert reasons(model) == {probe.REASON_RANDOM_NUMBERS}


def lora(**settings):
    """The same adapted model unpatched and patched."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    models = []
    for _ in range(2):
        seed_torch(3)
        config = peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "up_proj"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            **settings,
        )
        model = peft.get_peft_model(
            build("qwen3", torch.float64), config, adapter_name="first"
        ).train()
        models.append(model)
    return models[0], models[1]


def adapter_gradients(model, **batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def test_adapters_scaled_for_the_forward_alone():
    helpers = pytest.importorskip("peft.helpers", reason="peft is not installed")
    stock, ours = lora()
    streambp.patch(ours, CONFIG)
    batch = make_batch("plain")
    runs = []
    for model in (stock, ours):
        with helpers.rescale_adapter_scale(model, 0.1):
            runs.append(adapter_gradients(model, **batch)[1])
    assert worst_error(runs[1], runs[0]) <= MAX_FLOAT64_ERROR
    with helpers.rescale_adapter_scale(ours, 0.1):
        loss = ours(**batch, use_cache=False).loss
    with pytest.raises(BackwardError, match=r"scaling\['first'\] was 0\.4 and is 4\.0"):
        loss.backward()


@pytest.mark.parametrize("tokens", [[7, 8], [7]])
@pytest.mark.parametrize("length", [23, 5])
def test_an_activated_lora(tokens, length):
    """peft hands each module where the invocation starts, counted from the end, by hooks that
    forward takes off again."""
    stock, ours = lora(alora_invocation_tokens=tokens)
    streambp.patch(ours, CONFIG)
    batch = make_batch("plain", length=length)
    for row, start in enumerate((1, 2)):
        batch["input_ids"][row, start : start + len(tokens)] = torch.tensor(tokens)
    mixed = {name: x.clone() for name, x in batch.items()}
    mixed["input_ids"][0][mixed["input_ids"][0] == 7] = 9  # the first row is without its adapter
    for inputs in (batch, mixed, batch):
        (expected_loss, expected), (loss, grads) = (
            adapter_gradients(model, **inputs) for model in (stock, ours)
        )
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
        assert any(bool(grad.any()) for grad in expected.values())
        with torch.no_grad():
            losses = [model(**inputs, use_cache=False).loss for model in (stock, ours)]
        assert abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[0])
    assert all("alora_offsets" in reason for reason in reasons(ours))


def test_adapters_by_row():
    """`adapter_names` come by such hooks as well; with a graph in eval mode alone."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    stock, ours = lora()
    for model in (stock, ours):
        seed_torch(4)
        model.add_adapter(
            "second",
            peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
        model.eval()
    streambp.patch(ours, dataclasses.replace(CONFIG, rows="as_given"))
    batch = make_batch("plain") | {"adapter_names": ["first", "second"]}
    for _ in range(2):
        expected, grads = (adapter_gradients(model, **batch)[1] for model in (stock, ours))
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
        assert len(expected) == 16
    assert all("adapter_names" in reason for reason in reasons(ours))
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss for model in (stock, ours)]
    assert abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[0])
    assert paths(ours) == {"streams"}


@pytest.mark.full
def test_kinds_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(layer_state, "MAX_KINDS_OF_CALLS", 3)
    trials = counted(monkeypatch)
    stock, ours = pair(lambda layer: None)
    batch = make_batch("plain")
    for step in range(5):
        for model in (stock, ours):
            for layer in model.model.layers:
                layer.mlp.name = f"step {step}"
        check_agree(stock, ours, **batch)
    layer_states = [
        w.layer_state for w in ours.__dict__["_streambp"].wrappers if hasattr(w, "layer_state")
    ]
    assert all(len(state.tests.results) == 3 == len(state.tests.unread) for state in layer_states)
    assert sum(trials.values()) == 10 + 2 * SHARES_PREFIXES  # whose trial is of a kind of its own


def constant(monkeypatch):
    """The fingerprint says that nothing changes."""
    monkeypatch.setattr(fingerprint.ValueList, "read", lambda self: [])
    real = watched.hooks_of
    fixed = lambda _, modules, ignored, old: old or real([], modules, ignored, None)  # noqa: E731
    monkeypatch.setattr(fingerprint, "hooks_of", fixed)
    monkeypatch.setattr(
        fingerprint, "versions_of", lambda snapshot: [0] * len(snapshot.body.tensors)
    )
    for module in (function, entry):
        monkeypatch.setattr(
            module, "versions_of", lambda snapshot: [0] * len(snapshot.body.tensors)
        )
    for module in (kept_values, entry):
        monkeypatch.setattr(
            module, "extend_kind", lambda layer_state, snapshot, kind, hidden_states: kind
        )


@pytest.mark.fast(21)
@pytest.mark.parametrize(
    "test",
    [
        *(lambda monkeypatch, change=change: test_a_change_for_the_forward_alone_raises(change, "streams", monkeypatch)
          for change in LAYER_CHANGES),
        lambda monkeypatch: test_mixing_of_tokens_that_sets_in_later(lambda layer: None, mixing_module),
        lambda monkeypatch: test_an_auxiliary_loss_that_is_scheduled_from_zero(),
        lambda monkeypatch: test_adapters_scaled_for_the_forward_alone(),
        lambda monkeypatch: test_an_activated_lora([7, 8], 23),
    ],
)  # fmt: skip
def test_a_constant_fingerprint_turns_these_red(test, monkeypatch):
    constant(monkeypatch)
    with pytest.raises(
        (
            AssertionError,
            pytest.fail.Exception,
            UnsupportedModelError,
            BackwardError,
            CheckpointError,
        )
    ):
        test(monkeypatch)


def nothing_learnt(monkeypatch):
    monkeypatch.setattr(
        fingerprint.Fingerprint, "learn", lambda self, layer, *_: self.take_snapshot(layer)
    )


def every_hook_acts(monkeypatch):
    @contextlib.contextmanager
    def watching(hooks):
        yield set(hooks.locations)

    for module in (function, layer_gradients, whole):
        monkeypatch.setattr(module, "watch_hooks", watching)


def hooks_by_identity(monkeypatch):
    def with_ids(*args):
        hooks = watched.hooks_of(*args)
        hooks.kind = tuple(hooks.ids)
        return hooks

    monkeypatch.setattr(fingerprint, "hooks_of", with_ids)


def numbers_by_value(monkeypatch):
    def by_value(*args):
        return [
            dataclasses.replace(leaf, kind=repr(leaf.exact))
            for leaf in observed_values.leaves(*args)
        ]

    monkeypatch.setattr(fingerprint, "leaves", by_value)
    monkeypatch.setattr(fingerprint, "plain_leaf", lambda *_: None)


def generators_run_on(monkeypatch):
    monkeypatch.setattr(whole, "set_generators", lambda *_: None)


def peft_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(whole, "routing_hooks", lambda routing: contextlib.nullcontext())


def copies_know_the_original(monkeypatch):
    monkeypatch.setattr(fingerprint.Fingerprint, "__reduce__", object.__reduce__)
    monkeypatch.setattr(
        fingerprint.Fingerprint, "__deepcopy__", lambda self, memo: copy.copy(self), raising=False
    )
    monkeypatch.setattr(fingerprint.Fingerprint, "__copy__", lambda self: self, raising=False)


@pytest.mark.fast(8)
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            nothing_learnt,
            lambda patch: test_what_the_forward_itself_changes_is_no_alarm("streams", patch),
        ),
        (
            nothing_learnt,
            lambda patch: test_what_the_forward_itself_changes_is_no_alarm("checkpoints", patch),
        ),
        (
            numbers_by_value,
            lambda patch: test_what_the_forward_itself_changes_is_no_alarm("streams", patch),
        ),
        (
            every_hook_acts,
            lambda patch: test_hooks_that_only_look_may_go_before_backward("streams", patch),
        ),
        (
            every_hook_acts,
            lambda patch: test_hooks_that_only_look_may_go_before_backward("checkpoints", patch),
        ),
        (
            hooks_by_identity,
            lambda patch: test_backward_inside_is_exact_and_no_new_trial("hook removed", patch),
        ),
        (generators_run_on, lambda patch: test_a_generator_of_a_modules_own()),
        (peft_is_not_asked_again, lambda patch: test_an_activated_lora([7, 8], 23)),
        (peft_is_not_asked_again, lambda patch: test_adapters_by_row()),
        (copies_know_the_original, test_copies_of_a_model_after_steps),
    ],
)
def test_mutants_turn_these_red(mutant, test, monkeypatch):
    mutant(monkeypatch)
    # The last two are of copies: one cannot be pickled, or it shadows the original's parameters and
    # its own are left over.
    with pytest.raises(
        (AssertionError, BackwardError, CheckpointError, TypeError, UnsupportedModelError)
    ):
        test(monkeypatch)


def test_graphs_alone_tell_of_a_hook_that_starts_to_collect(monkeypatch):
    """Values that are of no chunk, such as a mean, show in backward."""
    monkeypatch.setattr(kept_values, "_is_of_a_chunk", lambda *_: False)
    test_a_hook_that_starts_to_collect("queue")


def test_without_the_origin_collecting_later_is_lost(monkeypatch):
    monkeypatch.setattr(function, "refuse_kept_graph", lambda *_: None)
    monkeypatch.setattr(kept_values, "_is_of_a_chunk", lambda *_: False)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_hook_that_starts_to_collect("queue")
