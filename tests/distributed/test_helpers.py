"""Public helpers that put hooks on parameters, or wait for gradients, under each engine and in both
orders of wrapping: the steps are those of the unpatched engine, or the helper is refused with the
engine's name and leaves the model usable.

covers: integrations/in_backward.py, distributed/engines.py, model/warm_up.py, verify/compare.py,
  head/log_probs.py
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import pickle
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import streambp
from streambp.errors import ConfigError, StreamBPError
from streambp.head import log_probs, token_log_probs
from streambp.integrations import in_backward, optimizer_in_backward
from streambp.verify import verify
from tests.distributed.engines import ENGINES, config_for
from tests.distributed.ranks import launch, need_deepspeed, result_of
from tests.distributed.test_pipeline_parallel import example
from tests.distributed.watch import engines_seen
from tests.distributed.worker import batches, distance
from tests.families import build, make_batch

STEPS = 3
# float32, of the same steps on the same ranks; the worker's engines differ by more between orders
# of sums
MAX_RELATIVE_ERROR = 1e-6
TIMEOUT_SECONDS = 240  # a rank imports DeepSpeed, perhaps on a busy machine
STAGES = {"zero-1": 1, "zero-2": 2, "zero-3": 3}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def apply(case, model):
    """Call the case's helper on what the program holds; what it returns."""
    helper, batch = case["helper"], make_batch("plain", length=17, seed=99)
    if helper in ("token_log_probs", "describe"):
        return None
    if helper == "unpatch":
        return streambp.unpatch(model)
    if helper == "optimizer_in_backward":
        hidden = case["order"] == "before the group"
        with (
            mock.patch.object(dist, "is_initialized", return_value=False)
            if hidden
            else mock.MagicMock()
        ):
            return optimizer_in_backward(model, sgd)
    if helper == "warm_up":
        return streambp.warm_up(model, **batch, use_cache=False)
    return verify(model, seq_len=17, chunk_size=5)


def loss_of_tokens(wrapped, model, batch):
    """Return the mean over labels by `token_log_probs`, called outside of the model's forward, with
    the head's weight as `model` has it."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    output = wrapped(**inputs, use_cache=False, output_hidden_states=True)
    weight = next(p for name, p in model.named_parameters() if name.endswith("lm_head.weight"))
    labels = batch["labels"][:, 1:]
    scored = token_log_probs(output.hidden_states[-1][:, :-1], weight, labels)
    return -scored.log_probs.sum() / (labels != -100).sum()


def adapter(case, rank, helped):
    """The engine's adapter (`engines.py`), patched, with the helper called around it as the case
    says; or unpatched."""
    name = case["engine"]
    base = ENGINES["deepspeed" if name in STAGES else name]

    class Around(base):
        handle = None
        is_refused = False

        def wrap(self, model):
            if helped and case["helper"] != "verify":
                streambp.patch(model, config_for({}, rank))
            if helped and case["order"] != "after":
                self.handle = apply(case, model)
            if helped and case["helper"] == "verify":
                streambp.patch(model, config_for({}, rank))
            return super().wrap(model)

        def loss(self, batch):
            if (
                self.is_refused
                or not helped
                or case["helper"] not in ("describe", "token_log_probs")
            ):
                return super().loss(batch)
            target = self.module if case.get("given") == "inner" else self.wrapped
            if case["helper"] == "describe":
                sentences = f"{streambp.describe(target)} {streambp.last_step(target)}"
                assert "Qwen3DecoderLayer" in sentences
                return super().loss(batch)
            return loss_of_tokens(self.wrapped, target, batch)

    zero = (
        {"stage": STAGES[name], "zero": {"stage3_param_persistence_threshold": 0}}
        if name in STAGES
        else {}
    )
    engine = Around({**case, **zero}, rank)
    if helped and case["order"] == "after":
        target = engine.wrapped if case.get("given") != "inner" else engine.module
        unverified = case["helper"] == "verify"
        if unverified:
            streambp.unpatch(engine.module)
        try:
            engine.handle = apply(case, target)
        finally:
            if unverified:
                streambp.patch(engine.module, config_for({}, rank))
    return engine


def step(engine, batch, steps_itself):
    engine.micro_step(batch, last=True)
    if not steps_itself:
        engine.step()


def trained(engine, case, rank, handle=None):
    """Weights after some steps, and the engines that they went through."""
    with engines_seen() as engines:
        for batch in list(batches(rank, {"steps": STEPS})):
            step(engine, batch, handle is not None)
    return engine.weights(), sorted(engines)


def run(case, rank):
    """What became of a case: how far its weights are from the unpatched engine's, or the words of
    its refusal; whether it trains after that."""
    if case["engine"] == "pipeline":
        return run_pipeline(case, rank)
    expected, _ = trained(adapter(case, rank, helped=False), case, rank)
    row, engine = {}, None
    try:
        engine = adapter(case, rank, helped=True)
        initial = engine.weights()
        weights, row["engines"] = trained(
            engine, case, rank, getattr(engine.handle, "optimizers", None) and engine.handle
        )
    except StreamBPError as error:
        row["refused"] = str(error)
        row["in"] = "the first step" if engine is not None else "the call"
        if engine is not None:
            assert distance(engine.weights(), initial) == 0.0
            engine.is_refused = True
            if engine.handle is not None:
                engine.handle.remove()
    if "refused" in row:
        if engine is None:
            engine = adapter(case, rank, helped=False)
            streambp.patch(engine.wrapped, config_for({}, rank))
        weights, row["engines"] = trained(engine, case, rank)
    row["error"] = distance(weights, expected)
    return row


def run_pipeline(case, rank):
    """Two stages. An error of one rank would leave the other in the schedule, so a late refusal is
    asked of the stage."""
    train = example()
    batch = make_batch("plain", 21, 0, 4)
    inputs = {"x": batch["input_ids"] if rank == 0 else torch.randn(4, 21, 32, dtype=torch.float64)}
    inputs |= {"labels": batch["labels"], "num_items_in_batch": torch.tensor(9)} if rank else {}
    gradients = {}
    for helped in (False, True):
        stage = train.Stage(build("qwen3", torch.float64, num_hidden_layers=4), rank, 2)
        schedule = train.pipeline(stage, torch.device("cpu"), 4, "1f1b")
        row, handle = {"engines": ["pipeline"]}, None
        try:
            if helped:
                streambp.patch(
                    stage, streambp.StreamConfig(chunk_size=(5, 8)[rank], saves=("attn_out",))
                )
                row["in"] = "the call"
                handle = (
                    streambp.warm_up(stage, **inputs)
                    if case["helper"] == "warm_up"
                    else apply(case, stage)
                )
            if handle is not None:
                row["in"] = "the first step"
                stage(**inputs)
        except StreamBPError as error:
            row["refused"] = str(error)
            if handle is not None:
                handle.remove()
        train.step(schedule, stage, batch)
        gradients[helped] = {name: p.grad for name, p in stage.named_parameters()}
    return {**row, "error": distance(gradients[True], gradients[False])}


def main():
    """One rank's: `RANK PORT RANKS LIBRARY CASES`."""
    rank, port, ranks, library, cases = int(sys.argv[1]), *sys.argv[2:5], json.loads(sys.argv[5])
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=ranks,
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    if library == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", rank=rank, world_size=int(ranks))
    else:
        dist.init_process_group("gloo", rank=rank, world_size=int(ranks))
    rows = []
    for case in cases:
        faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
        rows.append(run(case, rank))
    faulthandler.cancel_dump_traceback_later()
    print("RESULT " + json.dumps(rows), flush=True)
    dist.destroy_process_group()


NAMES = {
    "ddp": "DDP",
    "fsdp": "fully_shard",
    "pipeline": "pipeline",
    **dict.fromkeys(STAGES, "ZeRO"),
}
HELPERS = ("optimizer_in_backward", "warm_up", "verify", "token_log_probs", "describe", "unpatch")
ORDERS = ("before the group", "before", "after")


def case(helper, engine, order, **settings):
    return {"helper": helper, "engine": engine, "order": order, **settings}


def cases(helper, engines):
    """In both orders, of what the engine made and of the model inside."""
    orders = ORDERS if helper == "optimizer_in_backward" else ORDERS[1:]
    plain_cases = [case(helper, engine, order) for engine in engines for order in orders]
    return plain_cases + [
        case(helper, engine, "after", given="inner")
        for engine in engines
        if engine not in ("fsdp", "pipeline")
    ]


def expected(setting, ranks):
    """Where a case is refused; None: its steps are those of the unpatched engine."""
    helper, engine, order = setting["helper"], setting["engine"], setting["order"]
    if helper == "token_log_probs":
        return "the first step" if engine in ("fsdp", "zero-3") else None
    if helper in ("describe", "unpatch"):
        return None
    if helper != "optimizer_in_backward":
        if (
            order == "before"
            or engine == "pipeline"
            or (engine == "ddp" and setting.get("given") == "inner")
        ):
            return None
        return "the call"
    if engine == "fsdp":
        at_first_step = order != "after" and (ranks == 1 or order == "before the group")
        return None if order == "after" else "the first step" if at_first_step else "the call"
    if engine == "ddp" and ranks == 1:
        return None
    at_first_step = order == "before the group" or (order == "before" and ranks == 1)
    return "the first step" if at_first_step else "the call"


def check(library, settings, ranks=2):
    if library == "deepspeed":
        need_deepspeed()
    processes = launch(
        "tests.distributed.test_helpers",
        str(ranks),
        library,
        json.dumps(settings),
        ranks=ranks,
        seconds=TIMEOUT_SECONDS * len(settings),
    )
    for row, setting in zip(result_of(*processes), settings, strict=True):
        engine = setting["engine"]
        engine_name = {"fsdp": "fsdp2"}.get(engine, engine)
        assert row["engines"] == [engine_name if ranks > 1 else "none"], (setting, row)
        assert row["error"] <= MAX_RELATIVE_ERROR, (setting, row)
        where = expected(setting, ranks)
        assert ("refused" in row) == (where is not None), (setting, row)
        if where is not None:
            name = (
                "FSDP2"
                if engine == "fsdp" and setting["helper"] != "optimizer_in_backward"
                else NAMES[engine]
            )
            # there are ranks, and no engine yet
            if where == "the call" and setting["order"] == "before":
                name = f"a process group of {ranks} ranks"
            assert name in row["refused"], (setting, row)
            assert row["in"] == where, (setting, row)


@pytest.mark.full
def test_an_optimizer_in_backward():
    check("torch", [case("optimizer_in_backward", "ddp", order) for order in ORDERS[::2]])


@pytest.mark.full
@pytest.mark.parametrize("helper", HELPERS)
def test_each_helper_under_torchs_engines(helper):
    hooks = helper in ("optimizer_in_backward", "warm_up")
    check("torch", cases(helper, ["ddp", "fsdp"] + ["pipeline"] * hooks))


@pytest.mark.full
@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("engine", STAGES)
def test_each_helper_under_zero(engine, helper):
    check("deepspeed", cases(helper, [engine]))


@pytest.mark.full
@pytest.mark.parametrize("library", ["torch", "deepspeed"])
def test_one_rank(library):
    engines = STAGES if library == "deepspeed" else ("ddp", "fsdp")
    check(library, cases("optimizer_in_backward", engines), ranks=1)


# -- in one process


def in_group(monkeypatch, ranks):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)


def tiny():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def shard(shape):
    """Return what ZeRO-3 leaves of a parameter on a rank between gathers."""
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_shape = 0, torch.Size(shape)
    return parameter


def test_a_shard_of_the_heads_weight_is_named():
    hidden, labels = torch.randn(2, 5, 4), torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(StreamBPError, match="weight is a parameter of which DeepSpeed's ZeRO-3"):
        token_log_probs(hidden, shard((7, 4)), labels)
    with pytest.raises(StreamBPError, match="bias is a parameter of which DeepSpeed's ZeRO-3"):
        token_log_probs(hidden, torch.randn(7, 4), labels, bias=shard((7,)))
    gathered = shard((7, 4))
    gathered.data = torch.randn(7, 4)
    assert token_log_probs(hidden, gathered, labels).log_probs.isfinite().all()


def test_mutant_nobody_looks_for_shards(monkeypatch):
    monkeypatch.setattr(log_probs, "_refuse_shards", lambda **tensors: None)
    with pytest.raises(AssertionError):
        test_a_shard_of_the_heads_weight_is_named()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "when", ["before the call", "before the first step", "before a part is called"]
)
def test_several_ranks_with_whole_weights(when, monkeypatch):
    """Mutants below."""
    model, handle = tiny(), None
    initial = weights(model)
    if when == "before the call":
        in_group(monkeypatch, 2)
        with pytest.raises(
            ConfigError, match="DDP, a pipeline or a split sequence over a process group of 2 ranks"
        ):
            optimizer_in_backward(model, sgd)
    else:
        handle = optimizer_in_backward(model, sgd)
        in_group(monkeypatch, 2)
        called = model if when == "before the first step" else torch.nn.Sequential(*model)
        with pytest.raises(ConfigError, match="DDP"):
            called(torch.randn(5, 3)).sum().backward()
        handle.remove()
    assert all(torch.equal(p, initial[name]) for name, p in model.named_parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_pre_hooks
    model.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "when", ["before the call", "before the first step", "before a part is called"]
)
def test_mutant_nobody_asks_for_ranks(when, monkeypatch):
    monkeypatch.setattr(in_backward, "late_reducing_engine", lambda weight: None)
    with pytest.raises(pytest.fail.Exception):
        test_several_ranks_with_whole_weights(when, monkeypatch)


def test_weights_that_others_took_the_place_of():
    """As fully_shard and resize_token_embeddings do: hooks of the old ones would never run."""
    model = tiny()
    handle = optimizer_in_backward(model, sgd)
    model[1].weight = torch.nn.Parameter(torch.randn(2, 4))
    with torch.no_grad():
        model(torch.randn(5, 3))
    with pytest.raises(
        ConfigError, match=r"1.weight has an optimizer in backward and is no longer a parameter"
    ):
        model(torch.randn(5, 3))
    handle.remove()
    model(torch.randn(5, 3)).sum().backward()


def test_a_copy_has_no_hooks_and_no_guard():
    model = tiny()
    optimizer_in_backward(model, sgd)
    for model_copy in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model_copy[1].weight = torch.nn.Parameter(torch.randn(2, 4))
        initial = weights(model_copy)
        model_copy(torch.randn(5, 3)).sum().backward()
        assert all(torch.equal(p, initial[name]) for name, p in model_copy.named_parameters())


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_optimizer_that_cannot_be_made_leaves_no_hook(fails_at):
    """All are made before a hook is set."""
    model, optimizers = tiny(), []

    def make(parameters):
        optimizers.append(parameters)
        if len(optimizers) > fails_at:
            raise ValueError("no")
        return sgd(parameters)

    attributes = [dict(vars(p)) for p in model.parameters()]
    with pytest.raises(ValueError, match="no"):
        optimizer_in_backward(model, make)
    assert [dict(vars(p)) for p in model.parameters()] == attributes
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer_in_backward(model, sgd).remove()


def test_mutant_hooks_as_optimizers_are_made(monkeypatch):
    def register(self, model, make, on_host):
        for parameter in model.parameters():
            optimizer = make([parameter])
            parameter.register_post_accumulate_grad_hook(lambda p, bound=optimizer: bound.step())

    monkeypatch.setattr(in_backward.OptimizersInBackward, "__init__", register)
    with pytest.raises(AssertionError):
        test_an_optimizer_that_cannot_be_made_leaves_no_hook(3)


if __name__ == "__main__":
    main()
