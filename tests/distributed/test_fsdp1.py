"""FSDP1 keeps a layer's parameters in a flat one: refused, because their gradients would be lost.

covers: distributed/engines.py
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import streambp
from streambp.errors import UnsupportedModelError
from tests.families import build, make_batch

CONFIG = streambp.StreamConfig(chunk_size=5)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model, layers, original):
    classes = {type(model.model.layers[0])}
    policy = (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        if layers
        else None
    )
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=original, device_id=cpu
    )


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("original", [False, True])
def test_patched_before(layers, original, group):
    model = sharded(streambp.patch(build("llama"), CONFIG), layers, original)
    with pytest.raises(UnsupportedModelError, match="FSDP1 keeps the layer's parameters"):
        model(**make_batch("plain"), use_cache=False).loss.backward()


@pytest.mark.parametrize("target", ["the unit", "the model"])
def test_patched_after(target, group):
    model = sharded(build("llama"), True, True)
    with pytest.raises(UnsupportedModelError, match="wrapped by FSDP1"):
        streambp.patch(model if target == "the unit" else model.module, CONFIG)
