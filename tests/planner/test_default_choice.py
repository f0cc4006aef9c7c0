"""saves="auto" chooses the fastest of what fits, by the planner's own bytes and seconds, in the set-ups that people have.

covers: offload/policy.py, planner/auto.py
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import streambp
from scripts.plan_time import configs
from streambp.offload import costs as costs_of_steps
from streambp.offload import policy
from streambp.planner import auto
from streambp.planner.profile import Method
from streambp.planner.seconds import seconds
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import streamed, survey
from streambp.rates import DEFAULT, DEVICES

GIB = 2**30
HERE = torch.device("cuda", 0)
LENGTHS = (2048, 4096, 16384, 65536, 131072)
CLOSE = 1.01
RATES = DEVICES[DEFAULT]


def model_of(name):
    """Qwen3-8B without data: all of it trained, its first half frozen, or with adapters."""
    model = Skeleton(configs()["Qwen3-8B"](), torch.bfloat16, 16 if name == "adapters" else None, 16, "cuda").model
    if name == "autocast":
        model = model.float()
    if name == "frozen":
        for module in (model.model.embed_tokens, *model.model.layers[:18]):
            module.requires_grad_(False)
    return model


@functools.cache
def counted(name):
    """What the policy knows of a set-up's model, and the planner's methods that stay on the device."""
    model, config = model_of(name), streambp.StreamConfig()
    cast = torch.bfloat16 if name == "autocast" else None
    law = auto._law(model, config, cast)
    costs = auto._costs(model, config, dict.fromkeys(range(36), HERE), cast)
    recipes = [streamed(saves) for saves in ((), ("attn_out",), ("attn_out", "kv"))]
    methods = survey(auto._skeleton(model, cast), recipes, tree=False).methods
    known = costs_of_steps.Known(law, costs, auto.seconds_of(law.method, RATES), RATES.products, RATES.link)
    weights = sum(p.nbytes for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    return known, methods, weights, sum(p.nbytes for p in trained), sum(p.numel() for p in trained)


SET_UPS = {  # model, part of the gradients that are there, bytes of optimizer states a trained parameter
    "first step": ("full", 0.0, 0),
    "accumulating": ("full", 1.0, 0),
    "bucket views": ("full", 1.0, 0),  # DDP's gradients are there from the first step on, as zeros that were kept are
    "optimizer states there": ("full", 0.0, 4),
    "states and gradients there": ("full", 1.0, 4),
    "autocast": ("autocast", 0.0, 0),  # float32 weights
    "adapters": ("adapters", 0.0, 8),
    "first half frozen": ("frozen", 0.0, 0),
}


def possible(law, methods: tuple[Method, ...], backwards, tokens, free, present):
    """Seconds of every method in every chunk size that fits, and of every number of last layers that save it.

    backwards: layers that have one.
    """
    for chunk in dict.fromkeys(min(size, tokens) for size in policy.CHUNK_TOKENS):
        sizes = [dict(dataclasses.replace(law, method=m).by_layer(tokens, chunk, present)) for m in methods]
        took = [seconds(m, tokens, chunk, RATES).total for m in methods]
        for one, took_one in zip(sizes, took, strict=True):
            for layers in range(backwards + 1):
                share = layers / backwards
                mixed = max(sizes[0][upto] + share * (one[upto] - sizes[0][upto]) for upto in sizes[0])
                if mixed <= free:
                    yield took[0] + share * (took_one - took[0])


def chosen(name, tokens, free, present):
    """Seconds of what the policy chooses, by the planner's seconds; its chunk size and plan."""
    known, methods, *_ = counted(name)
    backwards = len(known.costs)  # layers that have one
    chooser = policy.SavesPolicy(36, lambda device: free, lambda device: (known, present), True, True)
    chooser.begins(HERE)
    chunk = chooser.size(1, tokens, HERE)
    rooms = chooser._rooms(free, tokens, chunk)
    fits = min(room for _, room in rooms) >= 0
    plan = chooser._fill(rooms, range(36), HERE, tokens, tokens, chunk == tokens) if fits else {}
    assert all(room >= 0 for _, room in rooms) or not fits
    took = [seconds(method, tokens, chunk, RATES).total for method in methods]
    spent, names = took[0], [candidate for found in plan.values() for candidate in found]
    for candidate in names:
        if candidate.name == "attn_out":
            spent -= (took[0] - took[1]) / backwards
        elif candidate.name == "kv":
            spent -= (took[1] - took[2]) / backwards
        else:
            spent -= candidate.bytes * candidate.worth / RATES.products
    if any(candidate.name == policy.GRAPH for candidate in names):
        graphs = sum(candidate.name == policy.GRAPH for candidate in names)
        spent -= (took[0] - took[2]) * graphs / backwards
    return spent, chunk, plan


@pytest.mark.full
@pytest.mark.parametrize("memory", [80, 24])
@pytest.mark.parametrize("set_up", SET_UPS)
def test_the_choice_is_the_fastest_that_fits(set_up, memory):
    name, present, optimizer = SET_UPS[set_up]
    known, methods, weights, gradients, parameters = counted(name)
    free = 0.95 * memory * GIB - weights - present * gradients - optimizer * parameters
    seen = 0
    for tokens in LENGTHS:
        every = list(possible(known.need, methods, len(known.costs), tokens, free, present))
        spent, chunk, plan = chosen(name, tokens, free, present)
        if not every:
            assert not any(plan.values())
            continue
        seen += 1
        assert spent <= CLOSE * min(every), (tokens, chunk, spent, min(every))
        need = known.need(tokens, chunk, present)
        assert need <= free
    assert seen or memory == 24


@pytest.mark.full
def test_where_not_all_attention_fits_the_host_is_faster(monkeypatch):
    """At 131,072 tokens on 80 GB the outputs of attention fit for a part of the layers; at 16,384 for all."""
    monkeypatch.setattr(policy, "host_limit", lambda wanted: 112 * GIB)
    known, _, weights, *_ = counted("full")
    faster = {}
    for tokens in (16384, 131072):
        free = 0.95 * 80 * GIB - weights
        chooser = policy.SavesPolicy(36, lambda device, free=free: free, lambda device: (known, 0.0), True, True)
        chooser.begins(HERE)
        chunk = chooser.size(1, tokens, HERE)
        _, plan, _ = chooser.predicted(free, tokens, chunk, HERE, tokens)
        chooser.latest = costs_of_steps.Chosen(tokens, tokens, chunk, free, plan)
        faster[tokens] = chooser.faster_on_host()
    assert faster[16384] == 0
    assert 2 < faster[131072] < 12


@pytest.mark.full
def test_the_largest_chunk_without_saves_is_seen(monkeypatch):
    monkeypatch.setattr(policy.SavesPolicy, "_fill", lambda self, rooms, *_: {})
    with pytest.raises(AssertionError):
        test_the_choice_is_the_fastest_that_fits("first step", 80)


@pytest.mark.full
def test_gradients_counted_twice_are_seen(monkeypatch):
    """As it was with AdamW's states and gradients there: chunks of 1,024 and nothing saved."""
    law = counted("full")[0].need
    once = dataclasses.replace(law, method=dataclasses.replace(law.method, accumulating=()))
    monkeypatch.setattr(counted("full")[0], "need", once)
    with pytest.raises(AssertionError):
        test_the_choice_is_the_fastest_that_fits("states and gradients there", 80)
