"""Statistics in a container with many entries: each entry is that of the unpatched model.

A layer that runs whole runs the hook in forward and once more in its recomputation.

covers: fingerprint/memory.py, fingerprint/holders.py
"""

from __future__ import annotations

import collections

import pytest
import torch

import streambp
from streambp.fingerprint import holders, memory
from tests.families import build, make_batch, mix_neighbours

ENTRY_COUNT = 3 * holders.MAX_RECORDED_VALUES + 1


def add_out_of_place(container, key, value):
    container[key] = container[key] + value


def add_in_place(container, key, value):
    container[key] += value


def zeros():
    return [torch.zeros(32, dtype=torch.float64) for _ in range(ENTRY_COUNT)]


STORE_FUNCTIONS = {
    "numbers in a dict": (lambda: dict.fromkeys(range(ENTRY_COUNT), 0.0), add_out_of_place),
    "tensors in a dict": (lambda: dict(enumerate(zeros())), add_out_of_place),
    "tensors in a dict, in place": (lambda: dict(enumerate(zeros())), add_in_place),
    "numbers in a list": (lambda: [0.0] * ENTRY_COUNT, add_out_of_place),
    "tensors in a list, in place": (zeros, add_in_place),
    "tensors in a deque": (lambda: collections.deque(zeros()), add_out_of_place),
}


def sums(store, patched):
    """What the hook has added up to each entry after two steps and an evaluation."""
    (make_container, add), model = STORE_FUNCTIONS[store], build("qwen3", torch.float64)
    container = make_container()

    def hook(module, args, out):
        x = args[0].detach().flatten(0, -2)
        total = x.sum(0) if "tensors" in store else float(len(x))
        for key in range(ENTRY_COUNT):
            add(container, key, total)

    model.model.layers[1].mlp.up_proj.register_forward_hook(hook)
    if patched:
        streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves=(), rows="as_given"))
    for seed in (1, 2):
        model(**make_batch("plain", seed=seed), use_cache=False).loss.backward()
    with torch.no_grad():
        model.eval()(**make_batch("plain", seed=3), use_cache=False)
    if patched:
        assert {layer.path for layer in streambp.describe(model).layers} == {"checkpoints"}
    return [torch.as_tensor(container[key]) for key in range(ENTRY_COUNT)]


def check(store, monkeypatch):
    mix_neighbours(monkeypatch, build("qwen3"))
    expected, results = (sums(store, patched) for patched in (False, True))
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.fast(6)
@pytest.mark.parametrize("store", STORE_FUNCTIONS)
def test_each_entry_of_a_layer_that_runs_whole(store, monkeypatch):
    check(store, monkeypatch)


@pytest.mark.fast(6)
@pytest.mark.parametrize("store", STORE_FUNCTIONS)
def test_mutant_restores_the_last_entries_alone(store, monkeypatch):
    for module in (holders, memory):
        monkeypatch.setattr(module, "MAX_RESTORED_LENGTH", holders.MAX_RECORDED_VALUES)
    with pytest.raises(AssertionError):
        check(store, monkeypatch)
