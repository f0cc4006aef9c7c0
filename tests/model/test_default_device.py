"""torch's default device is the program's: what has to be on the host is made there, wherever that
is.

covers: attention/masks.py, attention/prefix.py, offload/arena.py, offload/engines.py,
  prefixes/tree.py, prefixes/admission.py, recurrent/documents.py, layer/gradients.py
"""

from __future__ import annotations

import pytest
import torch

import streambp
from streambp.device import memory_limit
from streambp.layer import gradients
from tests import zoo
from tests.families import build, make_batch
from tests.offload.runs import assert_same
from tests.seeds import seed_torch
from tests.versions import needs_mambas_states

SETTINGS = {
    "nothing": {"saves": ()},
    "offloaded": {"saves": ("attn_out", "kv"), "offload": "cpu"},
    "tiles": {"saves": (), "offload": "cpu", "gpu_memory": 1},
    "shared": {"rows": "packed"},
}
MODELS = {
    "windows": lambda: build("gemma3"),
    "dropout": lambda: build("qwen3", attention_dropout=0.2),
    "states": lambda: zoo.build("mamba2", torch.float32),
}


@pytest.mark.fast(
    "packed-nothing-windows",
    "plain-offloaded-states",
    "left-padded-tiles-dropout",
    "plain-shared-windows",
)
@pytest.mark.parametrize(
    "name", ["windows", "dropout", pytest.param("states", marks=needs_mambas_states)]
)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("mode", ["plain", "packed", "left-padded"])
def test_steps_are_the_same_with_another_default_device(name, settings, mode):
    """meta stands for the GPU that a program has made its default: what ends up there has no
    values."""
    runs, batch = [], make_batch(mode)
    for default in ("cpu", "meta"):
        gradients.counts_when_alone.cache_clear()
        model = MODELS[name]()
        with torch.device(default):
            streambp.patch(
                model,
                streambp.StreamConfig(chunk_size=5, **{"rows": "as_given", **SETTINGS[settings]}),
            )
            for _ in range(2):
                seed_torch(3)
                model.zero_grad(set_to_none=True)
                loss = model(**batch, use_cache=False).loss
                loss.backward()
        runs.append(
            (
                loss.detach(),
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            )
        )
    assert_same(*runs)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    """torch tells the fraction of numbered devices alone."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * device.index, 100))
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5 * device.index
    )
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert memory_limit(torch.device("cuda")) == memory_limit(torch.device("cuda", 1)) == 10
