"""The stages of examples/pipeline_parallel on two ranks, gloo, CPU: gradients against one process
on the whole batch.

covers: layer/gradients.py, model/patching.py, model/wrappers.py, model/causal_lm.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import _backward

import streambp
from streambp.errors import BackwardError
from tests.distributed.context_trainer import mutate
from tests.distributed.ranks import launch
from tests.families import build, make_batch
from tests.hangs import HANG
from tests.oracle import lift_float32_casts, worst_error

PATH = Path(__file__).parent.parent.parent / "examples" / "pipeline_parallel" / "train.py"
MAX_RELATIVE_ERROR = 1e-10  # float64
ROWS, LENGTH, STEPS = 4, 21, 2
WINDOWS = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
CASES = [
    {"family": "qwen3", "schedule": "1f1b"},
    {
        "family": "qwen3",
        "schedule": "gpipe",
        "stream": {"saves": ["attn_out", "kv"], "offload": "cpu"},
    },
    # embedding and head are tied
    {"family": "gemma3", "schedule": "1f1b", "mode": "packed", "model": WINDOWS},
    {"family": "llama", "schedule": "gpipe", "mode": "right-padded"},
    {"family": "qwen3", "schedule": "1f1b", "mutant": True},
]


def example():
    spec = importlib.util.spec_from_file_location("pipeline_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(case, rank):
    """The worst error of this rank's gradients, their names, how its layers ran, and the names of
    all ranks' parameters."""
    train, family = example(), case["family"]
    batches = [
        make_batch(case.get("mode", "left-padded"), LENGTH, seed, ROWS) for seed in range(STEPS)
    ]
    sizes = {"num_hidden_layers": 4, **case.get("model", {})}
    full_model = build(family, torch.float64, **sizes)
    for batch in batches:
        full_model(**batch, use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in full_model.named_parameters()}
    model = build(family, torch.float64, **sizes)
    names = {id(p): name for name, p in model.named_parameters()}
    stage = train.Stage(model, rank, 2)
    stream = {"saves": ("attn_out",), **case.get("stream", {})}
    streambp.patch(stage, streambp.StreamConfig(chunk_size=(5, 8)[rank], **stream))
    schedule = train.pipeline(stage, torch.device("cpu"), ROWS, case["schedule"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        if case.get("mutant"):
            mutate(monkeypatch)
        for batch in batches:
            train.step(schedule, stage, batch)
        stage.sum_tied()
    gradients = {names[id(p)]: p.grad for p in stage.parameters()}
    paths = sorted({layer.path for layer in streambp.describe(stage).layers})
    return (
        worst_error(gradients, {name: expected[name] for name in gradients}),
        sorted(gradients),
        paths,
        sorted(expected),
    )


def main():
    """One rank's: `RANK PORT CASES`."""
    rank, port, cases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        lift_float32_casts(monkeypatch)
        print("RESULT " + json.dumps([run(case, rank) for case in cases]), flush=True)
    dist.destroy_process_group()


@pytest.mark.parametrize("patched", [False, True])
def test_zero_bubble_schedules_are_refused_by_name(patched):
    """They ask for the gradients of a stage's input and of its weights apart."""
    model = build("qwen3", torch.float64)
    if patched:
        streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    ids = make_batch("plain")["input_ids"]
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    output = model.model(inputs_embeds=x, use_cache=False).last_hidden_state

    def run_schedule():
        _, groups = _backward.stage_backward_input(
            [output], [torch.ones_like(output)], [x], model.parameters()
        )
        _backward.stage_backward_weight(model.parameters(), groups)

    refusal = pytest.raises(
        BackwardError,
        match=r"Zero-bubble pipelines .*; 1F1B, interleaved 1F1B and GPipe run it once",
    )
    with refusal if patched else contextlib.nullcontext():
        run_schedule()


@pytest.mark.full
def test_gradients():
    """Four micro-batches with different numbers of labels, two steps of accumulation, numbers of
    chunks that differ."""
    outputs, codes = launch(
        "tests.distributed.test_pipeline_parallel", json.dumps(CASES), seconds=HANG
    )
    assert codes == [0, 0], [output[-4000:] for output in outputs]
    first, last = (
        json.loads(
            next(x for x in output.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT ")
        )
        for output in outputs
    )
    for case, *ranks in zip(CASES, first, last, strict=True):
        print(case, [error for error, *_ in ranks])
        assert sorted({name.replace("lm_head", "model.embed_tokens") if case["family"] == "gemma3" else name
                       for _, names, *_ in ranks for name in names}) == ranks[0][3]  # fmt: skip
        assert all(row[2] == ["streams"] for row in ranks)
        errors = [error for error, *_ in ranks]
        assert (
            max(errors) <= MAX_RELATIVE_ERROR if not case.get("mutant") else min(errors) > 1e-4
        ), case
