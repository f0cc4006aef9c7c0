"""Backward in a thread of its own, as on a GPU, gives the same bits as in forward's thread,
whatever runs.

covers: layer/function.py, layer/recompute.py, attention/interface.py, model/unpatched.py,
lazy/head.py, head/one_pass.py
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import streambp
from streambp.layer import saved_tensors
from streambp.model import unpatched
from streambp.offload.costs import UnpatchedChoice
from tests import device_thread, zoo
from tests.families import LENGTH, build, make_batch, mix_neighbours
from tests.offload.runs import assert_same
from tests.offload.test_limits import AMPLE_BYTES
from tests.offload.test_unpatched_runs import chooser_of
from tests.seeds import seed_torch
from tests.versions import needs_mambas_states

CHUNK = 5
SAVES = ("attn_out", "kv", "*")


def steps(model, number=3, within=None, **batch):
    """Losses and gradients of the last step; within: autocast's dtype, backward is called
    inside."""
    for _ in range(number):
        seed_torch(4)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", within or torch.bfloat16, enabled=within is not None):
            output = model(**batch, use_cache=False)
            loss = (
                output.loss
                if output.get("loss") is not None
                else loss_of(output, batch["input_ids"])
            )
            loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def loss_of(output, ids):
    return -output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()


def compare(model, batch, ran=None, within=None, **settings):
    """Both kinds of steps of a patched copy; returns the model of the last."""
    runs = []
    for thread in (False, True):
        patched = copy.deepcopy(model)
        streambp.patch(
            patched, streambp.StreamConfig(**{"chunk_size": CHUNK, "rows": "as_given", **settings})
        )
        chooser = chooser_of(patched)
        if chooser is not None:
            chooser.free = lambda _: AMPLE_BYTES
        with pytest.MonkeyPatch.context() as patch:
            threads = device_thread.use(patch) if thread else []
            runs.append(steps(patched, within=within, **batch))
    assert threads
    assert threading.get_ident() not in threads
    assert_same(*runs)
    return patched


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"saves": ()},
        {"saves": SAVES},
        {"saves": SAVES, "offload": "cpu"},
        {"saves": (), "offload": "cpu", "gpu_memory": 1},
        {"offload": "auto"},
        {"saves": "auto"},
    ],
    ids=["nothing", "all", "offloaded", "tiles", "offload auto", "auto"],
)
@pytest.mark.parametrize("mode", ["plain", "packed"])
def test_streamed_layers(settings, mode):
    compare(build("gemma3", attention_dropout=0.2), make_batch(mode), **settings)


@pytest.mark.fast(7)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        pytest.param("mamba2", marks=needs_mambas_states),
        *("qwen3_next", "deepseek_v3", "gpt_oss", "bloom", "deepseek_v32"),
    ],
)
def test_other_kinds_of_layers(name):
    compare(zoo.build(name, torch.float32), make_batch("plain"), saves=())


def test_layers_that_run_whole(monkeypatch):
    model = build("qwen3")
    mix_neighbours(monkeypatch, model)
    patched = compare(model, make_batch("left-padded"))
    assert {layer.path for layer in streambp.describe(patched).layers} == {"checkpoints"}


def test_graphs_that_are_kept(monkeypatch):
    decisions = []
    real = saved_tensors.SavedForBackward.choose
    monkeypatch.setattr(
        saved_tensors.SavedForBackward,
        "choose",
        lambda self, *args: (real(self, *args), decisions.append(self.keeps_graph))[0],
    )
    compare(build("qwen3"), make_batch("plain"), chunk_size=LENGTH)
    assert decisions[-2:] == [True, True]


def test_micro_batches_as_unpatched(monkeypatch):
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25)
    patched = compare(build("qwen3", attention_dropout=0.2), make_batch("plain"), chunk_size=LENGTH)
    assert isinstance(chooser_of(patched).latest, UnpatchedChoice)
    assert patched._streambp.steps.last.over  # the end of backward was seen


def test_a_backward_that_raises_is_heeded(monkeypatch, backward_threads):
    """As unpatched, and in the thread: from then on half of the tokens at most."""
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25)
    model, batch = build("qwen3"), make_batch("plain")
    streambp.patch(model, streambp.StreamConfig(chunk_size=LENGTH, rows="as_given"))
    chooser_of(model).free = lambda _: AMPLE_BYTES
    steps(model, 2, **batch)
    loss = model(**batch, use_cache=False).loss
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)

    def raises(_):
        raise torch.OutOfMemoryError("injected")

    next(iter(model.model.layers)).mlp.down_proj.weight.register_hook(raises)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    next(iter(model.model.layers)).mlp.down_proj.weight._backward_hooks.clear()
    model(**batch, use_cache=False)
    assert not isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert backward_threads


@pytest.mark.parametrize("settings", [{"lazy_logits": True}, {"head": False}], ids=["lazy", "full"])
def test_losses_outside_of_the_model(settings):
    batch = make_batch("plain")
    del batch["labels"]
    compare(build("qwen3"), batch, **settings)


@pytest.mark.fast(6)
@pytest.mark.parametrize(
    "settings", [{}, {"offload": "cpu", "saves": SAVES}, {"lazy_logits": True}]
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_backward_within_autocast(family, settings):
    """autocast's dtype is the thread's own: there it is float16, whatever the program has
    chosen."""
    within = torch.bfloat16
    assert within != device_thread.UNLIKE
    compare(build(family), make_batch("plain"), within=within, **settings)


def test_prefixes_that_are_shared():
    batch = make_batch("plain", rows=4)
    batch["input_ids"][1::2, :9] = batch["input_ids"][::2, :9]
    compare(build("qwen3"), batch, rows="packed")
