"""Plans of sequences that ranks share: bytes of a rank as layers take them, exchanges by
arithmetic, refusals as in a step.

covers: planner/exchanges.py, planner/profile.py, planner/splits.py, planner/survey.py,
sharded/shards.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Lfm2Config, Qwen3Config

import streambp
from streambp.attention.spans import Spans
from streambp.errors import UnsupportedModelError
from streambp.model.split import TWO_SPLITS_ERROR
from streambp.planner import Setting, plan
from streambp.planner.exchanges import exchange_seconds, link_bytes
from streambp.planner.laws import Law
from streambp.planner.plan import Memory, plan_profile
from streambp.planner.profile import (
    CONTEXT_PARALLEL,
    ULYSSES,
    Heads,
    Method,
    SequenceSplit,
    available_methods,
    from_json,
    peak,
    to_json,
)
from streambp.planner.report import plan_table
from streambp.planner.skeleton import Skeleton
from streambp.planner.splits import SplitCount
from streambp.planner.survey import Counter, streamed_recipe, survey
from streambp.rates import Rates
from streambp.sharded.shards import Shards
from tests.distributed.one_rank import give_back
from tests.layer.test_bytes import KB
from tests.planner.test_page import random_profile
from tests.seeds import seed_of
from tests.sharded import test_sharded
from tests.versions import needs_states

FIELDS = {ULYSSES: "ulysses", CONTEXT_PARALLEL: "context_parallel"}
LAYER = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
TINY_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 3, "vocab_size": 64,
}  # fmt: skip


def over(ranks, by, **fields):
    return Setting(gpus=ranks, optimizer=0, **{FIELDS[by]: ranks}, **fields)


def counted(config, by, at=None):
    """A streamed step of a model, its layers split in this way; attention kernels take nothing of
    their own."""
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda")
    recipes = [streamed_recipe((), "none", by)]
    return survey(
        skeleton, recipes, at=at, kernels=None, accumulating=False, tree=False, timed=False
    )


@pytest.mark.parametrize(
    ("by", "ranks", "layers"),
    [
        (ULYSSES, 2, 1),
        pytest.param(ULYSSES, 4, 2, marks=pytest.mark.full),
        pytest.param(CONTEXT_PARALLEL, 16, 2, marks=pytest.mark.full),
        pytest.param(CONTEXT_PARALLEL, 64, 2, marks=pytest.mark.full),
    ],
)
def test_a_layers_backward_takes_what_its_own_count_says(by, ranks, layers, monkeypatch):
    """A Qwen3-8B layer alone, on stand-ins for collectives, beside the planner's lines from two
    ranks."""
    profile = counted(Qwen3Config(**LAYER, num_hidden_layers=layers, vocab_size=64), by)
    lengths = [ranks * length for length in (8192, 16384)]
    short, long = (
        peak(profile, profile.methods[0], length, 4096, over(ranks, by)).phases
        for length in lengths
    )
    slope = {name: (long[name] - short[name]) / 8192 / KB for name in long}
    # without inputs of layers
    predicted = {"last layer": slope[f"backward {layers - 1}"] - 8 * layers}
    predicted |= {"first layer": slope["backward 0"] - 8} if layers > 1 else {}
    counts = counted_alone(by, ranks, monkeypatch)
    print(f"{by} over {ranks}, KB a token of the shard: predicted {predicted}, counted {counts}")
    for name, value in predicted.items():
        assert value == pytest.approx(counts[name], rel=0.05)


def counted_alone(by, ranks, monkeypatch):
    if by == ULYSSES:
        monkeypatch.setattr(dist, "all_to_all_single", give_back)
        return test_sharded.bytes_of_a_token(ranks)
    return test_sharded.bytes_where_gathered(ranks, 1, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(("by", "ranks"), [(ULYSSES, 8), (CONTEXT_PARALLEL, 16)])
def test_lines_from_two_ranks_serve_others(by, ranks, monkeypatch):
    """Beside a count on so many ranks, with four times as many as kv heads."""
    config, point, setting = Qwen3Config(**TINY_SIZES), (16384, 4096), over(ranks, by)
    few_ranks = counted(config, by, point)
    monkeypatch.setattr(Counter, "ranks", lambda counter, recipe: ranks)
    many_ranks = counted(config, by, point)
    ours, theirs = (
        peak(p, p.methods[0], ranks * 16384, 4096, setting).phases for p in (few_ranks, many_ranks)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name], rel=0.05)
    sent = [link_bytes(p.methods[0], ranks * 16384, setting) for p in (few_ranks, many_ranks)]
    assert sent[0] == pytest.approx(sent[1], rel=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(SplitCount, "reset_peak", lambda *_: None)
        patch.setattr("streambp.planner.splits._keys_allocated", lambda: lambda run: run)
        patch.setattr(Counter, "ranks", lambda counter, recipe: 2)
        blind = counted(config, by, point)
    wrong = peak(blind, blind.methods[0], ranks * 16384, 4096, setting).phases
    assert max(abs(wrong[name] / value - 1) for name, value in theirs.items()) > 0.05


H100S = Rates("H100", 550e12, 550e12, 550e12, 2e12, 50e9)
ROWS = [  # model, layers, heads of queries; tokens, ranks
    ("8B", 36, 32, 2**17, 8), ("8B", 36, 32, 2**20, 8), ("8B", 36, 32, 2**20, 16), ("8B", 36, 32, 2**20, 64),
    ("8B", 36, 32, 2**17, 64), ("70B", 80, 64, 2**20, 16), ("70B", 80, 64, 2**20, 64), ("8B", 36, 32, 2**22, 64),
]  # fmt: skip


def shared(by, layers, queries, keys=8):
    """A method whose layers exchange what their heads of 128 say, in bf16."""
    q, kv = queries * 256 * layers, keys * 512 * layers
    links = {
        "traded": 6 * q,
        "traded_keys": 3 * kv,
        "gathered": 3 * kv,
        "gathered_at_once": 2 * kv,
        "summed": 2 * kv,
    }
    links = {
        name: size for name, size in links.items() if name.startswith("traded") == (by == ULYSSES)
    }
    split = SequenceSplit(by, (Heads(queries, keys, 2560),), **links)
    return Method("streambp", (), "none", False, True, (), (), Law(), (), split)


def test_the_table_of_the_docs_is_this_arithmetic():
    text = (
        Path(streambp.__file__).parent.parent / "docs" / "explanation" / "distributed.md"
    ).read_text("utf-8")
    table = [
        line.split(" | ") for line in text.splitlines() if re.match(r"\| \d+B, \d+[kM], \d+ ", line)
    ]
    assert len(table) == len(ROWS)
    for cells, (name, layers, queries, tokens, ranks) in zip(table, ROWS, strict=True):
        length = f"{tokens >> 20}M" if tokens >= 2**20 else f"{tokens >> 10}k"
        assert cells[0] == f"| {name}, {length}, {ranks}"
        # forward and backward, at least
        attention = 3.5 * 2 * 2 * tokens**2 / 2 * queries * 128 * layers / 550e12 / ranks
        for by, cell in zip((ULYSSES, CONTEXT_PARALLEL), cells[2:4], strict=True):
            if by == ULYSSES and queries % ranks:
                assert cell.startswith("impossible")
                continue
            predicted = exchange_seconds(
                shared(by, layers, queries), tokens, over(ranks, by), H100S, attention
            )
            assert float(cell.split()[0]) == pytest.approx(predicted, rel=0.01, abs=0.005)


def test_groups_of_heads_hide_behind_attention():
    """By hand: 8 kv heads, 1,000 tokens, 4 ranks of one node with 1 GB/s."""
    rates = dataclasses.replace(H100S, peers=1e9)
    method = shared(CONTEXT_PARALLEL, 1, 32)
    size = 8 * 512 * 1000
    one_node = over(4, CONTEXT_PARALLEL)
    assert link_bytes(method, 1000, one_node) == 5 * size * 0.75
    assert exchange_seconds(method, 1000, one_node, rates, 1.0) == pytest.approx(
        (2 + 3 / 8) * size * 0.75 / 1e9
    )
    assert exchange_seconds(method, 1000, one_node, rates, 0.0) == pytest.approx(
        5 * size * 0.75 / 1e9
    )
    roomy = dataclasses.replace(one_node, room=8 * 2560 * 1000)
    assert link_bytes(method, 1000, roomy) == 4 * size * 0.75
    assert exchange_seconds(method, 1000, roomy, rates, 1.0) == pytest.approx(4 * size * 0.75 / 1e9)
    ulysses = shared(ULYSSES, 1, 32)
    sent = (6 * 32 * 256 + 3 * 8 * 512 * 2) * 1000 / 16  # each kv head twice
    across = exchange_seconds(ulysses, 1000, over(16, ULYSSES), rates, 1.0)
    assert across == pytest.approx(max(sent * 7 / 16 / 1e9, sent * 8 / 16 / rates.network))


def test_a_plan_says_what_each_rank_does():
    profile = random_profile(seed_of(0))
    setting = Setting(gpus=8, zero=3, context_parallel=8)
    base_plan = plan_profile(profile, "max", Memory(180 * 2**30), setting)
    assert base_plan.seq_len % 8 == 0
    assert base_plan.choice.link > 0
    assert base_plan.choice.seconds.exchange > 0
    text = plan_table(base_plan)
    for words in (
        "each sequence over 8 ranks by context parallelism",
        "each of the 8 ranks",
        "GiB to the others",
        "not hidden",
    ):
        assert words in text
    assert {row.method for row in base_plan.longest} == {
        m.name for m in available_methods(profile, setting)
    }
    assert any(lever.change == "sequences over 16 ranks" for lever in base_plan.levers)
    restored = from_json(json.loads(json.dumps(to_json(profile))))
    assert restored.methods[-1].split == profile.methods[-1].split


def test_what_a_step_refuses_a_plan_refuses():
    profile = random_profile(0)  # with 48 and 24 heads of queries, 6 and 12 of keys
    for ranks, heads in ((5, 48), (48, 24), (8, 6)):
        with pytest.raises(UnsupportedModelError) as planned:
            available_methods(profile, over(ranks, ULYSSES))
        with pytest.raises(UnsupportedModelError) as run:
            Shards(None, ranks, 4, Spans.causal(1, 4 * ranks)).queries(
                torch.empty(1, 7 * ranks + 1, 4, 2, device="meta")
            )
        assert str(planned.value) == str(run.value).replace(
            f"{7 * ranks + 1} attention", f"{heads} attention"
        )
    assert "kv" in "".join(m.name for m in available_methods(profile, over(6, ULYSSES)))
    # each kv head twice
    assert "kv" not in "".join(
        m.name for m in available_methods(profile, over(12, ULYSSES)) if m.split
    )
    with pytest.raises(streambp.StreamBPError, match=re.escape(TWO_SPLITS_ERROR)):
        Setting(gpus=4, ulysses=2, context_parallel=2)
    with pytest.raises(streambp.StreamBPError, match="gpus is 3"):
        Setting(gpus=3, ulysses=2)
    with pytest.raises(streambp.StreamBPError, match="ranks must divide the number of tokens"):
        plan(Qwen3Config(**TINY_SIZES), 4097, gpu_memory="1GiB", setting=over(2, ULYSSES))
    unsplit = dataclasses.replace(
        profile, methods=tuple(m for m in profile.methods if m.split is None)
    )
    with pytest.raises(
        streambp.StreamBPError, match="No streamed step was counted with context parallelism"
    ):
        available_methods(unsplit, over(2, CONTEXT_PARALLEL))


@needs_states
@pytest.mark.parametrize("by", [ULYSSES, pytest.param(CONTEXT_PARALLEL, marks=pytest.mark.full)])
def test_layers_with_states_are_refused_for_the_steps_reason(by):
    shape = {**TINY_SIZES, "layer_types": ["conv", "full_attention", "conv"]}
    with pytest.raises(
        streambp.StreamBPError, match=r"goes on from a state.*which another rank's shard ends with"
    ):
        counted(Lfm2Config(**shape), by)
