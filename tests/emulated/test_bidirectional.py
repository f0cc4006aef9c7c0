"""Layers whose attention reads ahead, on an emulated accelerator: patched on the CPU and moved;
saves that are chosen by free memory; memory that runs out.

covers: sharded/split_attention.py, sharded/bidirectional.py, sharded/layer.py
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import streambp
from streambp.accumulate import GradientSum
from streambp.attention import attend
from streambp.layer.saved_tensors import DeviceTensors
from streambp.sharded import bidirectional
from tests import device as tested
from tests.emulated.test_memory import (
    ENDED,
    Steps,
    are_equal,
    ends_of_failing_allocations,
    outcome,
)
from tests.families import build, make_batch
from tests.oracle import relative_l2
from tests.seeds import seed_torch
from tests.sharded.test_bidirectional import CHUNK, LENGTH, MODEL_BUILDERS, in_halves, padding
from tests.tiers import thinned

__all__ = ["in_halves"]  # a fixture

pytestmark = pytest.mark.emulated


def gradients(model, batch, weights):
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    states = model(**{name: x.to(device) for name, x in batch.items()}).last_hidden_state
    (states * weights.to(device)).sum().backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [{}, {"offload": "cpu", "saves": ("attn_out", "kv")}, {"offload": "auto"}, {"weights": "cpu"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["modernbert", "bert"])
def test_gradients_are_the_cpus(name, settings, in_halves):
    seed_torch(0)
    stock = MODEL_BUILDERS[name]().train()
    mask = padding("right")
    batch = {"input_ids": torch.randint(3, 60, (3, LENGTH)), "attention_mask": mask}
    weights = torch.randn(3, LENGTH, 32) * mask[..., None]
    expected = gradients(stock, batch, weights)
    config = streambp.StreamConfig(**{"chunk_size": CHUNK, **settings})
    ours = streambp.patch(copy.deepcopy(stock), config).to(tested.DEVICE)
    for _ in range(3):
        actual = gradients(ours, batch, weights)
        assert actual.keys() == expected.keys()
        assert relative_l2(actual, expected) <= 1e-5
    assert in_halves


TOKENS = 40
CHUNK_OF_CHOSEN = 21


class ChosenSteps(Steps):
    """A model whose layers run in halves, and whose saves are chosen by free memory."""

    def __init__(self, device, **settings):
        self.batch = make_batch("plain", length=TOKENS, rows=1)
        model = build("qwen3", device="cpu", num_hidden_layers=3, is_causal=False)
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        config = streambp.StreamConfig(chunk_size=CHUNK_OF_CHOSEN, **settings)
        self.model = streambp.patch(model, config).to(device)
        self.before_backward = None
        for _ in range(3):
            self.expected = [self()]
        count_before = self.count()
        self()
        self.allocations = self.count() - count_before

    @property
    def choice(self):
        return self.chooser.latest

    def with_room_for(self, saves):
        """Let the device have room for nothing, for a part of what the layers can save, or for all
        of it."""
        need = self.chooser.figures.need(TOKENS, CHUNK_OF_CHOSEN, self.chooser.present)
        free = {"nothing": need / 2, "a part": need + 100, "all": 2 * need}[saves]
        self.chooser.free = lambda device: free


@pytest.fixture(scope="module")
def chosen_steps(device):
    return ChosenSteps(device)


def attended_in_backward(steps, monkeypatch):
    """Run a step. Return its gradients, and how many chunks attended again in backward. Chunks of a
    count, which have no data, are left out."""
    calls = []
    real = attend.attend_blocks

    def noted(q, *args, **kwargs):
        if q.device.type == "emulated":
            calls.append(1)
        return real(q, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(attend, "attend_blocks", noted)
        return steps(), len(calls)


@pytest.mark.parametrize("saves", ["nothing", "a part", "all"])
def test_what_was_chosen_is_kept_and_the_rest_is_computed_again(saves, device, monkeypatch):
    steps = ChosenSteps(device)
    steps.with_room_for(saves)
    stored = []
    real = DeviceTensors.save

    def noted(self, name, chunk, tensor):
        stored.append((name.split(".")[0], tensor.nbytes))
        real(self, name, chunk, tensor)

    monkeypatch.setattr(DeviceTensors, "save", noted)
    result, attended = attended_in_backward(steps, monkeypatch)
    assert are_equal(result, steps.expected[0])
    saved = sum(size for name, size in stored if name in ("attn_out", "lse", "product"))
    assert saved == sum(steps.choice.bytes.values())
    chunks = -(-TOKENS // CHUNK_OF_CHOSEN)
    saved_by = steps.choice.layers
    assert attended == chunks * (3 - saved_by.get("attn_out", 0))
    expected = {"nothing": {0}, "a part": {1, 2}, "all": {3}}[saves]
    for name in ("attn_out", "self_attn.q_proj"):
        assert saved_by.get(name, 0) in expected
    assert "mlp.down_proj" not in saved_by  # backward never reads it
    products = steps.chooser.figures.costs[0].cost.products
    # norms of queries and keys: gradients read these products too
    assert products["self_attn.k_proj"].flops == 2 * products["self_attn.v_proj"].flops


def test_the_mutant_that_chooses_nothing_in_halves_is_noticed(device, monkeypatch):
    monkeypatch.setattr(bidirectional.BidirectionalSaves, "chosen_here", False)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        test_what_was_chosen_is_kept_and_the_rest_is_computed_again("all", device, monkeypatch)


def test_chosen_attention_outputs_leave_for_the_host(device):
    """Chunks that read all keys take equal times, so attention is timed by itself."""
    steps = ChosenSteps(device, offload="cpu")
    link = steps.chooser.link
    link.measure(list(steps.chooser._seen.values()))
    [measured] = link.measured.values()
    assert 0 < measured.attention < float("inf")
    assert are_equal(steps(), steps.expected[0])


@pytest.mark.parametrize(
    ("first", "stride"), thinned([(5, 61), (0, 7)], lambda first, stride: stride > 7)
)
def test_each_allocation_in_turn_fails(first, stride, chosen_steps):
    """A step ends with the same gradients, or with one error that has advice, and the next one is
    exact."""
    steps = chosen_steps.started()

    def check(number):
        gc.collect()
        assert outcome(steps) == ENDED, number
        steps.forget()

    outcomes = ends_of_failing_allocations(steps, first, stride, check)
    assert outcomes[ENDED] >= 0.5 * outcomes.total()


@pytest.mark.full
def test_the_mutant_whose_retry_adds_products_twice_is_noticed(chosen_steps, monkeypatch):
    real = GradientSum.begin
    monkeypatch.setattr(GradientSum, "begin", lambda self, is_retry=False: real(self))
    with pytest.raises(AssertionError):
        test_each_allocation_in_turn_fails(0, 29, chosen_steps)
