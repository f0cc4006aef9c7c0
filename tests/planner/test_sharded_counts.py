"""A count of a model whose parameters ranks share: logical shapes, the gradients of this rank, and
what is gathered at once.

covers: planner/auto.py, distributed/engines.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streambp
from streambp.distributed.engines import full_bytes, gradient_bytes
from streambp.known_names import FULL_SHAPE, LOCAL_SHARD, PARTITION_ID
from streambp.model.head_deferral import HeldHead, restore_heads
from streambp.planner import auto
from streambp.planner.laws import Law
from streambp.planner.profile import Method, Phase
from tests.families import build


def divided(model):
    """As ZeRO-3 has it between gathers."""
    for number, parameter in enumerate(model.parameters()):
        setattr(parameter, PARTITION_ID, number)
        setattr(parameter, FULL_SHAPE, parameter.shape)
        parameter.data = parameter.new_empty(0)
    return model


def in_halves(model):
    """As FSDP2 has it on two ranks."""
    for parameter in model.parameters():
        setattr(parameter, LOCAL_SHARD, torch.empty(parameter.numel() // 2, dtype=parameter.dtype))
    return model


def test_parameters_have_their_full_bytes():
    full_model = build("qwen3")
    expected = [parameter.nbytes for parameter in full_model.parameters()]
    assert list(map(full_bytes, divided(build("qwen3")).parameters())) == expected
    assert list(map(gradient_bytes, full_model.parameters())) == expected
    assert set(map(gradient_bytes, divided(build("qwen3")).parameters())) == {0}
    assert [
        2 * size for size in map(gradient_bytes, in_halves(full_model).parameters())
    ] == expected


def test_what_is_shared_and_gathered():
    model = build("qwen3")
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert layer > model.lm_head.weight.nbytes
    assert auto.gradient_shares(model) == (1.0, 0.0)
    assert auto.gradient_shares(divided(build("qwen3"))) == (0.0, 2 * layer)
    assert auto.gradient_shares(in_halves(build("qwen3"))) == (0.5, 2 * layer)
    wide = build("qwen3", hidden_size=8, intermediate_size=8, head_dim=2)
    head = wide.lm_head.weight.nbytes
    assert auto.gradient_shares(divided(wide)) == (0.0, 2 * head)


def test_frozen_models_share_no_gradients():
    model = build("qwen3").requires_grad_(False)
    assert auto.gradient_shares(divided(model))[0] == 0.0


PHASES = (
    Phase("backward 1", Law(constant=5.0, tokens=2.0), 0.0),
    Phase("backward 0", Law(constant=105.0, tokens=1.0), 100.0),
)
LATER_CASES = (
    Phase("backward 1", Law(constant=3.0, tokens=2.0)),
    Phase("backward 0", Law(constant=3.0, tokens=1.0)),
)
METHOD = Method("streambp", (), "none", False, True, PHASES, LATER_CASES, Law(), ())


def test_a_step_needs_this_ranks_gradients_and_what_is_gathered():
    one_rank = auto.StepNeed(METHOD)
    assert one_rank.bytes_by_layer(10, 5, 0.0) == ((1.0, 25.0), (0.0, 115.0))
    half_sharded = auto.StepNeed(METHOD, share=0.5, gathered=7.0)
    assert half_sharded.bytes_by_layer(10, 5, 0.0) == ((1.0, 32.0), (0.0, 72.0))
    none = auto.StepNeed(METHOD, share=0.0, gathered=7.0)
    assert none.bytes_by_layer(10, 5, 0.0) == ((1.0, 32.0), (0.0, 22.0))
    # gradients that are there are no need of the step
    assert none.bytes_by_layer(10, 5, 1.0) == ((1.0, 30.0), (0.0, 20.0))


def test_a_divided_model_is_counted_like_the_whole_one():
    def law(model):
        return auto._law(model, streambp.StreamConfig(), None)

    expected = law(streambp.patch(build("qwen3", torch.bfloat16)))
    assert isinstance(expected, auto.StepNeed)
    model = streambp.patch(build("qwen3", torch.bfloat16))
    assert law(divided(model)) == expected
    assert {parameter.numel() for parameter in model.parameters()} == {0}


def test_the_bound_of_a_divided_model_has_its_shapes():
    """Where nothing is counted, on a CPU."""
    model = build("qwen3")
    full_bound = auto.upper_bound_of_step(model, model.model.layers)
    divided_model = divided(build("qwen3"))
    divided_bound = auto.upper_bound_of_step(divided_model, divided_model.model.layers)
    (expected,), (phase,) = full_bound.method.first, divided_bound.method.first
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    # ZeRO-3's gradients have memory of their own, except for those of the running layer
    assert phase.law == expected.law._replace(constant=layer)
    assert expected.law.tokens > 0
    assert expected.law.constant == sum(parameter.nbytes for parameter in model.parameters())
    assert divided_bound.method.accumulating == full_bound.method.accumulating


def test_a_copy_during_a_call_has_the_models_own_head():
    model = build("qwen3", torch.bfloat16)
    head = model.lm_head
    held_head = HeldHead(model, head, None)
    held_head.install()
    with restore_heads(model):
        assert model.lm_head is head
    assert model.lm_head is held_head
    with pytest.raises(KeyError), restore_heads(model):
        raise KeyError
    assert model.lm_head is held_head
    held_head.remove()
    assert isinstance(model.lm_head, nn.Linear)


def ignores_shards(patch):
    patch.setattr(auto, "gradient_bytes", lambda parameter: parameter.nbytes)


def ignores_shapes(patch):
    patch.setattr(auto, "full_bytes", lambda parameter: parameter.nbytes)


@pytest.mark.parametrize("mutant", [ignores_shards, ignores_shapes])
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_is_shared_and_gathered()
