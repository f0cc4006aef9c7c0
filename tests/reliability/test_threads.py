"""Two threads and one model: who comes between is refused, who waits for a turn is not. [Note:
owner of a step]

covers: instance_forward.py
"""

from __future__ import annotations

import copy
import gc
import pickle
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.fingerprint.hooks import hooks_of, watch_hooks
from streambp.fingerprint.snapshots import ModuleSnapshot
from streambp.instance_forward import ModelAccess, StepOwner
from streambp.layer.recompute import disable_checkpointing
from tests import device_thread
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error

CONFIG = streambp.StreamConfig(chunk_size=5, unpatched_runs=False)
REFUSAL_MESSAGE = "Another thread is computing with this model"


def streamed():
    return streambp.patch(build("qwen3", torch.float64), CONFIG)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def expected(float64_oracle):
    model = build("qwen3", torch.float64)
    model(**make_batch("plain"), use_cache=False).loss.backward()
    return gradients(model)


@pytest.fixture
def in_other_thread():
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def evaluate(model):
    with torch.no_grad():
        return model(**make_batch("plain", seed=1), use_cache=False).loss


def in_the_middle(model, when, action):
    """Call `action` once in the first layer's MLP, in forward or in its recomputation in
    backward."""
    results = queue.SimpleQueue()  # a list would be put back after a trial

    def act(module, args):
        if results.empty() and torch.is_grad_enabled() == (when == "backward"):
            results.put(action())

    return model.model.layers[0].mlp.register_forward_pre_hook(act), results


@pytest.mark.parametrize("thread", ["caller's", "device's"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_thread_that_comes_between_is_refused(
    when, thread, expected, in_other_thread, monkeypatch
):
    model, ran = streamed(), None
    if thread == "device's":
        ran = device_thread.use(monkeypatch)

    def come_between():
        with pytest.raises(streambp.StreamBPError, match=REFUSAL_MESSAGE):
            in_other_thread(lambda: evaluate(model))
        return True

    hook, results = in_the_middle(model, when, come_between)
    loss = model(**make_batch("plain"), use_cache=False).loss
    loss.backward()
    hook.remove()
    assert results.get_nowait()
    assert results.empty()
    assert ran is None or ran
    assert worst_error(gradients(model), expected) <= MAX_FLOAT64_ERROR
    assert in_other_thread(lambda: evaluate(model)).isfinite()  # its turn


def test_backward_that_comes_between_is_refused_and_can_be_repeated(expected, in_other_thread):
    model = streamed()
    loss = model(**make_batch("plain"), use_cache=False).loss

    def come_between():
        with pytest.raises(streambp.StreamBPError, match=REFUSAL_MESSAGE):
            in_other_thread(lambda: loss.backward(retain_graph=True))
        return True

    model.eval()
    results = queue.SimpleQueue()
    hook = model.model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: results.put(come_between()) if results.empty() else None
    )
    evaluate(model)
    hook.remove()
    model.train()
    assert results.get_nowait()


def test_threads_that_take_turns(expected):
    """Forward in one, evaluation in a second, backward in a third."""
    model = streamed()
    pools = [ThreadPoolExecutor(1) for _ in range(3)]
    loss = pools[0].submit(lambda: model(**make_batch("plain"), use_cache=False).loss).result()
    assert pools[1].submit(lambda: evaluate(model)).result().isfinite()
    pools[2].submit(loss.backward).result()
    for pool in pools:
        pool.shutdown()
    assert worst_error(gradients(model), expected) <= MAX_FLOAT64_ERROR


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("thread", ["caller's", "device's"])
def test_a_checkpoint_around_the_model_is_its_own(reentrant, thread, expected, monkeypatch):
    model, batch = streamed(), make_batch("plain")
    ran = device_thread.use(monkeypatch) if thread == "device's" else [0]
    embedded = model.get_input_embeddings()(batch["input_ids"])

    def loss_of(x):
        return model(inputs_embeds=x, labels=batch["labels"], use_cache=False).loss

    checkpoint(loss_of, embedded, use_reentrant=reentrant).backward()
    assert ran
    assert worst_error(gradients(model), expected) <= MAX_FLOAT64_ERROR


def test_copies_and_what_an_exception_left_behind_belong_to_nobody(in_other_thread):
    model = streamed()
    with model._streambp.owner.enter():
        clone, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert in_other_thread(lambda: evaluate(clone)).isfinite()
        assert in_other_thread(lambda: evaluate(loaded)).isfinite()
    layer_states = {
        id(wrapper.layer_state.owner)
        for wrapper in clone._streambp.wrappers
        if hasattr(wrapper, "layer_state")
    }
    assert layer_states == {id(clone._streambp.owner)}
    use = model._streambp.owner.enter()  # an interrupt came before `with`
    with pytest.raises(streambp.StreamBPError, match=REFUSAL_MESSAGE):
        in_other_thread(lambda: evaluate(model))
    del use
    gc.collect()
    assert in_other_thread(lambda: evaluate(model)).isfinite()


def test_a_backward_within_a_forward_is_its_owners_in_any_thread():
    owner = StepOwner()
    with owner.enter() as use:
        began = owner.current
        thread = threading.Thread(target=lambda: uses.append(owner.enter(began)))
        uses = []
        thread.start()
        thread.join()
        assert uses == [use]


def test_without_an_owner_another_thread_is_let_in(in_other_thread, monkeypatch):
    """The mutant of the owner."""
    monkeypatch.setattr(StepOwner, "enter", lambda self, began=None: ModelAccess(self, 0, 0))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_copies_and_what_an_exception_left_behind_belong_to_nobody(in_other_thread)


def test_a_cache_of_parametrized_weights_is_its_own_threads(monkeypatch):
    """Where nobody caches as a layer begins, its end says nothing of a cache that another thread
    has begun meanwhile."""
    monkeypatch.setattr(parametrize, "_cache_enabled", 0)
    checkpointed = torch.nn.Identity()
    checkpointed.gradient_checkpointing = True
    cached = parametrize.cached()
    with disable_checkpointing([checkpointed]):
        assert not checkpointed.gradient_checkpointing
        cached.__enter__()
    assert checkpointed.gradient_checkpointing
    assert parametrize._cache_enabled == 1
    cached.__exit__(None, None, None)
    assert parametrize._cache_enabled == 0


def test_threads_that_watch_one_hook_leave_it_as_it_was():
    """Of two models that share a module: the watches overlap, and the first to begin is the first
    to end."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    layer[0].register_forward_hook(hook := lambda module, args, output: 2 * output)
    body = ModuleSnapshot(layer, set())
    hooks = hooks_of(body.hooks, body.modules_by_name, set(), None)
    first, second = watch_hooks(hooks), watch_hooks(hooks)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert list(layer[0]._forward_hooks.values()) == [hook]
