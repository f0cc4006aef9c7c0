"""Layers that make collectives by themselves are refused by name, at their first call on every
rank.

covers: admission/collectives.py, layer/recompute.py
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import streambp
from streambp.admission import collectives
from streambp.layer import recompute
from tests.distributed.ranks import launch, result_of
from tests.families import build, make_batch
from tests.hangs import HANG


class Reduced(nn.Module):
    """A row-parallel Linear as DeepSpeed's AutoTP makes one: plain parameters, and a sum over ranks
    inside its forward."""

    def __init__(self, linear, make):
        super().__init__()
        self.linear, self.make = linear, make

    def forward(self, x):
        return self.make(self.linear(x) / dist.get_world_size())


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def functional(x):
    """torch's functional collectives go elsewhere than `dist.all_reduce`."""
    gathered = torch.distributed._functional_collectives.all_gather_tensor(x, 0, dist.group.WORLD)
    return gathered.unflatten(0, (dist.get_world_size(), -1)).sum(0)


def exchanged(x):
    """Expert parallelism sends tokens around."""
    received = torch.empty_like(x.detach())
    dist.all_to_all_single(received, x.detach().contiguous())
    return x + 0.0 * received


LAYERS = {"all_reduce": Sum.apply, "functional": functional, "all_to_all": exchanged}


class OfTrainedOnes(type):
    def __instancecheck__(cls, value):
        return isinstance(value, DTensor) and value.requires_grad


class TrainedDTensor(metaclass=OfTrainedOnes):
    """What a look that passes frozen parameters by takes for a DTensor."""


def step(model, rank):
    model(**make_batch("plain", length=17 + 6 * rank), use_cache=False).loss.backward()


def refusal(model, rank, config):
    """What a patched step says, and whether the model trains unpatched after that."""
    streambp.patch(model, config)
    try:
        step(model, rank)
        return "", False
    except streambp.StreamBPError as error:
        message = str(error)
    streambp.unpatch(model)
    step(model, 0)
    return message, all(p.grad is not None for p in model.parameters() if p.requires_grad)


def run(name, rank, mutant):
    model = build("llama", torch.float32, num_hidden_layers=2)
    config = streambp.StreamConfig(chunk_size=5)
    if name == "plain":
        streambp.patch(model, config)
        step(model, rank)
        return sorted({layer.path for layer in streambp.describe(model).layers}), True
    if name.startswith("DTensor"):
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            parallelize_module(layer.mlp, mesh, {
                "gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})  # fmt: skip
        if name == "DTensor, frozen":
            model.requires_grad_(False)
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.requires_grad_(True)
    else:
        for layer in model.model.layers:
            layer.mlp.down_proj = Reduced(layer.mlp.down_proj, LAYERS[name])
    if mutant == "nobody looks":
        collectives.COLLECTIVES = ()
    elif mutant:
        recompute.DTensor = TrainedDTensor
    return refusal(model, rank, config)


def main():
    """One rank's: `RANK PORT CASES MUTANT`."""
    rank, port, cases, mutant = (
        int(sys.argv[1]),
        sys.argv[2],
        json.loads(sys.argv[3]),
        json.loads(sys.argv[4]),
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    print("RESULT " + json.dumps([run(case, rank, mutant) for case in cases]), flush=True)
    dist.destroy_process_group()


def refusals_of(cases, mutant=""):
    processes = launch(
        "tests.distributed.test_layers_with_collectives",
        json.dumps(cases),
        json.dumps(mutant),
        seconds=HANG,
    )
    return result_of(*processes)


def test_layers_that_speak_to_other_ranks_are_refused():
    names = (*LAYERS, "DTensor, trained", "DTensor, frozen")
    plain, *refusals = refusals_of(["plain", *names])
    assert plain == [["streams"], True]
    for refusal, name in zip(refusals, names, strict=True):
        check(name, *refusal)


def check_alone(name, mutant=""):
    (refusal,) = refusals_of([name], mutant)
    check(name, *refusal)


def check(name, message, trains):
    expected = (
        "is a DTensor while the layer computes"
        if name.startswith("DTensor")
        else "makes collectives inside its forward"
    )
    assert expected in message, (name, message)
    assert trains, name


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mutant"),
    [("all_reduce", "nobody looks"), ("DTensor, frozen", "frozen ones are passed by")],
)
def test_mutants(name, mutant):
    """Chunks of one rank wait for those of the other, or add up what does not belong together. A
    frozen DTensor is met by torch, or by the trial's look at collectives."""
    with pytest.raises(AssertionError):
        check_alone(name, mutant)


if __name__ == "__main__":
    main()
