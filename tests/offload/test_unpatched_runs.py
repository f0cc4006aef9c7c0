"""Micro-batches of one chunk that fit many times over run as the unpatched model. [Note: micro-batches as unpatched]

covers: model/unpatched.py, model/deferring.py, offload/fitting.py
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.layer.recompute import RandomState
from streambp.model import unpatched
from streambp.nested import nodes_behind
from streambp.offload.fitting import AsUnpatched, FittingSaves
from tests import zoo
from tests.families import FAMILIES, LENGTH, MODES, build, make_batch
from tests.offload.runs import assert_same, step
from tests.offload.test_limits import PLENTY, Device
from tests.seeds import seed_torch

DROPS = {"attention_dropout": 0.3}


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setattr(unpatched, "SHARE", 0.25)


def patched(model=None, warm=True, room=PLENTY, **settings):
    """A copy of a model that was through a step on a device with so much memory."""
    model = copy.deepcopy(build("qwen3") if model is None else model)
    streambp.patch(model, streambp.StreamConfig(**{"chunk_size": LENGTH, **settings}))
    chooser = chooser_of(model)
    if chooser is not None:
        chooser.free = lambda _: room
    if warm:
        step(model)
    return model


def chooser_of(model):
    return next(w.site.chooser for w in model._streambp.state.wrappers if hasattr(w, "site"))


def streams(loss):
    """Whether a streamed layer is in the graph of a loss."""
    return any(node.name() == "StreamedLayerBackward" for node in nodes_behind([loss]))


def seeded_step(model, **batch):
    seed_torch(3)
    return step(model, **batch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_the_unpatched_models(family, mode):
    plain = build(family, **DROPS)
    model = patched(plain)
    assert_same(seeded_step(model, **make_batch(mode)), seeded_step(plain, **make_batch(mode)))
    assert isinstance(chooser_of(model).latest, AsUnpatched)
    assert not streams(model(**make_batch(mode)).loss)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gemma2", "gpt_oss"])
def test_other_families(family):
    plain = zoo.build(family, torch.float32)
    model = patched(plain)
    found = seeded_step(model)
    if isinstance(chooser_of(model).latest, AsUnpatched):
        assert_same(found, seeded_step(plain))
    else:
        assert "eager" in {layer.config._attn_implementation for layer in model.modules() if hasattr(layer, "config")}


def test_the_first_step_streams():
    model = patched(warm=False)
    assert streams(model(**make_batch("plain")).loss)


def test_a_head_that_is_deferred_gets_the_unpatched_layers_output():
    plain = build("qwen3", dtype=torch.float64)
    model = patched(plain, lazy_logits=True)
    batch = make_batch("plain")
    labels = batch.pop("labels")
    results = []
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        logits = one(**batch, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        assert not streams(loss)
        loss.backward()
        results.append([p.grad for p in one.parameters()])
    assert isinstance(chooser_of(model).latest, AsUnpatched)
    assert "computed blockwise" in streambp.describe(model).head
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_per_token_values():
    plain = build("qwen3", dtype=torch.float64)
    model, batch = patched(plain), make_batch("left-padded")
    found = model(**batch, output_log_probs=True)
    assert isinstance(chooser_of(model).latest, AsUnpatched)
    labels = batch["labels"][:, 1:]
    expected = plain(**{**batch, "labels": None}).logits[:, :-1].log_softmax(-1)
    expected = expected.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found.log_probs[labels >= 0], expected[labels >= 0], rtol=1e-6, atol=1e-8)


def test_a_backbone_alone():
    plain = build("qwen3").model
    model = patched(plain, warm=False)
    ids = make_batch("plain")["input_ids"]
    found = []
    for one in (model, model, plain):
        one.zero_grad(set_to_none=True)
        hidden_states = one(ids, use_cache=False).last_hidden_state  # [B, T, h]
        hidden_states.square().sum().backward()
        found.append([p.grad.clone() for p in one.parameters()])
    assert isinstance(chooser_of(model).latest, AsUnpatched)
    assert all(map(torch.equal, found[1], found[2]))


def test_logits_are_left_out_as_in_a_streamed_step():
    model = patched()
    output = model(**make_batch("plain"), output_hidden_states=True)
    assert set(output.keys()) == {"loss", "hidden_states"}
    assert isinstance(chooser_of(model).latest, AsUnpatched)


REASONS = {
    "chunks": {"chunk_size": LENGTH - 1},
    "saves": {"saves": ("attn_out",)},
    "shared prefixes": {"share_prefixes": True},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("reason", REASONS)
def test_else_it_streams(reason):
    settings = dict(REASONS[reason])
    plain = build("qwen3")
    plain.set_attn_implementation(settings.pop("attn_implementation", "sdpa"))
    model = patched(plain, **settings)
    assert streams(model(**make_batch("plain")).loss)
    assert not isinstance(getattr(chooser_of(model), "latest", None), AsUnpatched)


@pytest.mark.parametrize("share", [3, 5])
def test_it_has_to_fit_four_times(share):
    model = patched()
    runs, chooser = model._streambp.state.unpatched, chooser_of(model)
    kept, need = runs.predicted(2 * LENGTH, torch.device("cpu"), model.config), chooser.need(2 * LENGTH, 2 * LENGTH)
    chooser.free = lambda _: need + share * kept
    assert streams(model(**make_batch("plain")).loss) == (share < 4)


def test_a_tuple_is_that_of_a_streamed_step():
    model = patched()
    batch = {**make_batch("plain"), "use_cache": False}
    assert len(model(**batch, return_dict=False)) == len(model(**batch)) == 1


def test_states_stream():
    model = patched(zoo.build("lfm2", torch.float32))
    assert streams(model(**make_batch("plain")).loss)


def test_a_checkpoint_around_the_model_streams():
    model = patched()
    batch = make_batch("plain")
    hidden = model.get_input_embeddings()(batch["input_ids"])
    loss = checkpoint(lambda x: model(inputs_embeds=x, labels=batch["labels"]).loss, hidden, use_reentrant=False)
    assert not isinstance(chooser_of(model).latest, AsUnpatched)
    loss.backward()


def test_evaluation_streams():
    model = patched().eval()
    with torch.no_grad():
        model(**make_batch("plain"), use_cache=False)
    assert not isinstance(chooser_of(model).latest, AsUnpatched)


def test_out_of_memory_in_forward_streams_instead():
    plain = build("qwen3", **DROPS)
    model, reference = patched(plain), patched(plain, saves=())
    model.zero_grad(set_to_none=True)
    seen = []
    handle = model.model.layers[1].mlp.act_fn.register_forward_pre_hook(lambda *_: seen.append(1) or _raise_once(seen))
    seed_torch(3)
    loss = model(**make_batch("plain")).loss
    handle.remove()
    assert streams(loss)
    loss.backward()
    expected = seeded_step(reference)
    assert_same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected)
    assert streams(model(**make_batch("plain")).loss)
    assert not streams(model(**make_batch("plain", length=LENGTH // 2)).loss)


def _raise_once(seen):
    if len(seen) == 1:
        raise torch.OutOfMemoryError("no memory left, says a test")


def test_out_of_memory_in_backward_streams_later_steps():
    plain = build("qwen3", **DROPS)
    model, device = patched(plain), Device(fails_at=math.inf)
    seed_torch(3)
    with device:
        loss = model(**make_batch("plain")).loss
        assert not streams(loss)
        device.fails_at = device.operations + 20
        with pytest.raises(torch.OutOfMemoryError, match="says a test"):
            loss.backward()
    assert_same(seeded_step(model), seeded_step(patched(plain, saves=())))
    assert not isinstance(chooser_of(model).latest, AsUnpatched)
    seeded_step(model, **make_batch("plain", length=LENGTH // 2))
    assert isinstance(chooser_of(model).latest, AsUnpatched)


def test_a_backward_that_ends_changes_nothing():
    model = patched()
    for _ in range(3):
        step(model)
        assert isinstance(chooser_of(model).latest, AsUnpatched)
    assert model._streambp.state.unpatched.most == math.inf


def test_micro_batches_before_their_backward():
    plain = build("qwen3")
    model = patched(plain)
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        losses = [one(**make_batch("plain", seed=seed), use_cache=False).loss for seed in (1, 2)]
        for loss in reversed(losses):
            loss.backward()
    assert isinstance(chooser_of(model).latest, AsUnpatched)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_device_that_tells_corrects_the_prediction(monkeypatch):
    monkeypatch.setattr(unpatched, "TELLING", ("cpu",))
    model = patched()
    runs, device = model._streambp.state.unpatched, Device(limit=2_000_000)
    chooser_of(model).free = lambda _: device.limit - device.live
    config, cpu = model.config, torch.device("cpu")
    first = runs.predicted(2 * LENGTH, cpu, config)
    with device:
        loss = model(**make_batch("plain"), use_cache=False).loss
    assert isinstance(chooser_of(model).latest, AsUnpatched)
    assert runs.predicted(2 * LENGTH, cpu, config) >= max(first, device.live)
    loss.backward()


def test_the_prediction_holds_what_forward_keeps():
    model = patched()
    device = Device()
    with device:
        loss = model(**make_batch("plain"), use_cache=False).loss
    predicted = chooser_of(model).latest.bytes
    assert device.live <= predicted <= 3 * device.live
    loss.backward()


def test_describe_tells():
    model = patched()
    step(model)
    description = str(streambp.describe(model))
    assert f"auto ran {2 * LENGTH} tokens as unpatched" in description
    assert "as unpatched, from logits [B, T, V]" in description


def test_copies_have_seen_nothing():
    model = patched()
    model._streambp.state.unpatched.most = 1
    other = copy.deepcopy(model)
    runs = other._streambp.state.unpatched
    assert runs.most == math.inf
    assert runs.chooser is chooser_of(other)
    assert [site.layer for site in runs.sites] == list(other.model.layers)


def test_hooks_act_as_unpatched():
    """A hook that is hung on between forward and backward of a streamed layer is refused; here it is torch's own affair."""
    plain = build("qwen3")
    model = patched(plain)
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        one.model.layers[0].register_full_backward_hook(lambda _, grads, __: (2 * grads[0],))
        loss = one(**make_batch("plain"), use_cache=False).loss
        one.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        loss.backward()
    assert isinstance(chooser_of(model).latest, AsUnpatched)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


MUTANTS = {
    "random numbers": (RandomState, "restore", lambda self: None, test_out_of_memory_in_forward_streams_instead),
    "logits": (unpatched, "LOGITS", 0, test_the_prediction_holds_what_forward_keeps),
    "graphs": (FittingSaves, "graphs", lambda *_: 0.0, test_the_prediction_holds_what_forward_keeps),
    "share": (unpatched, "SHARE", math.inf, lambda: test_it_has_to_fit_four_times(3)),
    "eager": (unpatched, "_is_plain", lambda _: True, lambda: test_else_it_streams("eager")),
    "backward": (
        unpatched.UnpatchedRuns, "_heed_backward", lambda _: None, test_out_of_memory_in_backward_streams_later_steps,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(monkeypatch, mutant):
    owner, name, value, run = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(AssertionError):
        run()
