"""`describe` tells of the model as it is now, whatever became of its layers after `patch`.

covers: model/describe.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import streambp
from tests.families import build, make_batch
from tests.seeds import seed_torch
from tests.test_contract import check_agree

CONFIG = streambp.StreamConfig(chunk_size=5)
STREAMS, UNPATCHED, REMOVED = "streams", "unpatched", "removed"


def rows(model):
    return [(layer.name, layer.path) for layer in streambp.describe(model).layers]


def pruned(model):
    model.model.layers = model.model.layers[1:]


def replaced_by_a_layer(model):
    model.model.layers[1] = type(model.model.layers[1])(model.config, 1).double()


def replaced_by_nothing(model):
    model.model.layers[1] = Passed()


class Passed(nn.Module):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (pruned, [("model.layers.0", STREAMS), ("model.layers.1", STREAMS), ("layer 0", REMOVED)]),
        (
            replaced_by_a_layer,
            [("model.layers.0", STREAMS), ("model.layers.1", UNPATCHED), ("model.layers.2", STREAMS), ("layer 1", REMOVED)],
        ),
        (replaced_by_nothing, [("model.layers.0", STREAMS), ("model.layers.2", STREAMS), ("layer 1", REMOVED)]),
    ],
)
def test_layers_that_came_and_went_after_patch(change, expected, float64_oracle):
    stock = build("llama", torch.float64, num_hidden_layers=3)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    for model in (stock, ours):
        seed_torch(0)
        change(model)
    assert rows(ours) == expected
    check_agree(stock, ours, **make_batch("plain"))
    assert rows(ours) == expected
    told = str(streambp.describe(ours))
    assert "taken out of the model after streambp.patch" in told
    assert ("patch the model again" in told) == (change is replaced_by_a_layer)
    if change is replaced_by_a_layer:
        assert rows(streambp.patch(ours, CONFIG)) == [(f"model.layers.{index}", STREAMS) for index in range(3)]


def test_layers_that_peft_repeats(float64_oracle):
    """Its copies of streamed layers stream."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[[0, 2], [1, 3]], init_lora_weights=False)
    found = []
    for patch in (False, True):
        model = build("llama", torch.float64, num_hidden_layers=3)
        model = streambp.patch(model, CONFIG) if patch else model
        seed_torch(0)
        found.append(peft.get_peft_model(model, lora))
    expected = [(f"base_model.model.model.layers.{index}", STREAMS) for index in range(4)]
    assert [row for row in rows(found[1]) if row[1] != REMOVED] == expected
    check_agree(*found, **make_batch("plain"))


def test_layers_inside_checkpoint_wrappers_are_no_others():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    ours = streambp.patch(build("llama", torch.float64), CONFIG)
    apply_activation_checkpointing(ours, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    assert [path for _, path in rows(ours)] == [STREAMS, STREAMS]
