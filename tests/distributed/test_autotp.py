"""DeepSpeed's AutoTP itself on two ranks: a patched model is refused by name at its first call, on
both ranks and in both orders of wrapping, and trains as the unpatched engine after `unpatch`.

covers: admission/collectives.py, distributed/engines.py
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys

import pytest
import torch
import torch.distributed as dist

import streambp
from streambp.admission import collectives
from tests.distributed.engines import model_for
from tests.distributed.ranks import launch, need_deepspeed, result_of
from tests.distributed.worker import distance
from tests.families import make_batch

TIMEOUT_SECONDS = 240
MAX_RELATIVE_ERROR = 1e-6  # float32, of the steps after `unpatch`


def make_engine(case, order=None):
    """Return DeepSpeed's engine of a case; patched in this order, or not."""
    import deepspeed

    model = model_for(case)
    config = streambp.StreamConfig(**case.get("stream", {"chunk_size": 5}))
    if order == "before":
        streambp.patch(model, config)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": case.get("stage", 0)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "tensor_parallel": {"autotp_size": 2},
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if order == "after":
        streambp.patch(engine, config)
    return engine


def trained(engine):
    """Return the losses of two steps and the weights after them, this rank's parts."""
    losses = {}
    for step in range(2):  # AutoTP's ranks have the same batch
        loss = engine(**make_batch("plain", length=17 + 6 * step, seed=step), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses[str(step)] = loss.detach().double()
    weights = {name: p.detach().double().clone() for name, p in engine.module.named_parameters()}
    return losses, weights


def run(case):
    """Return what a patched step says in each order, and how far the steps after `unpatch` are from
    the unpatched engine's."""
    expected = trained(make_engine(case))
    row = {}
    for order in ("before", "after"):
        engine = make_engine(case, order)
        refusal = ""
        try:
            result = trained(engine)
        except streambp.StreamBPError as error:
            refusal = str(error)
            streambp.unpatch(engine)
            result = trained(engine)
        errors = [distance(ours, theirs) for ours, theirs in zip(result, expected, strict=True)]
        row[order] = {"refused": refusal, "errors": errors}
    parallel = [type(m).__module__ for m in engine.module.modules()]
    row["parallel"] = sum(name.startswith("deepspeed.module_inject") for name in parallel)
    return row


def main():
    """One rank's: `RANK PORT CASES MUTANT`."""
    rank, port = int(sys.argv[1]), sys.argv[2]
    cases = json.loads(sys.argv[3])
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo", rank=rank, world_size=2)
    if json.loads(sys.argv[4]):
        collectives.COLLECTIVES = ()
    rows = []
    for case in cases:
        faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
        ranks = [None, None]
        dist.all_gather_object(ranks, run(case))
        rows.append(ranks)
    faulthandler.cancel_dump_traceback_later()
    print("RESULT " + json.dumps(rows), flush=True)
    dist.destroy_process_group()


def check(cases, mutant=False):
    need_deepspeed()
    processes = launch(
        "tests.distributed.test_autotp",
        json.dumps(cases),
        json.dumps(mutant),
        seconds=60 + TIMEOUT_SECONDS * len(cases),
    )
    for ranks, case in zip(result_of(*processes), cases, strict=True):
        for rank in ranks:
            assert rank["parallel"] > 0, case
            for order in ("before", "after"):
                assert max(rank[order]["errors"]) <= MAX_RELATIVE_ERROR, (case, order, rank)
                message = rank[order]["refused"]
                assert "makes collectives inside its forward" in message, (case, order, rank)
                assert "AutoTP" in message


@pytest.mark.full
def test_layers_that_autotp_has_cut_are_refused():
    """By the section of the config, with chunks of 5 tokens and with the defaults."""
    check([{"model": "llama"}, {"model": "qwen3", "stage": 2, "stream": {}}])


@pytest.mark.full
def test_mutant_nobody_looks_for_collectives():
    with pytest.raises(AssertionError):
        check([{"model": "llama"}], mutant=True)


if __name__ == "__main__":
    main()
