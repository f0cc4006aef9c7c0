"""What a chunk costs beside the layer's own operations: dispatches, uploads and waits, on meta and
without a device.

covers: device.py, layer/call.py, tensors.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.admission.entry import stream_layer
from streambp.config import StreamConfig
from streambp.layer.layer_state import LayerState
from streambp.offload.engines import Engine
from streambp.offload.manager import OffloadManager
from tests.counting import Dispatches
from tests.layer.test_bytes import empty, qwen3_8b_layer
from tests.offload.runs import BOTH_SAVES
from tests.tiers import thinned
from tests.versions import SUM_WITHOUT_DATA

CHUNK = 8192


def run(chunks, mode, saves=(), offloader=None):
    """Forward and backward of a Qwen3-8B layer in so many chunks, watched by `mode`, once probes
    and traces are done."""
    layer = qwen3_8b_layer()
    layer_state = LayerState(
        layer, StreamConfig(chunk_size=CHUNK, saves=saves), offloader=offloader
    )

    def step():
        x = empty(1, chunks * CHUNK, 4096).requires_grad_()
        cos, sin = empty(1, chunks * CHUNK, 128), empty(1, chunks * CHUNK, 128)
        out = stream_layer(
            layer_state, (x,), {"attention_mask": None, "position_embeddings": (cos, sin)}
        )
        torch.autograd.grad(out, [x, *layer.parameters()], empty(1, chunks * CHUNK, 4096))

    step()
    with mode:
        step()
    return mode


def test_dispatches_of_a_layer_and_chunk():
    """At 8 chunks. Where attention's come from is its own tests' matter."""
    count = run(8, Dispatches())
    linears = count.of("layer/products.py", "accumulate.py:add_product") / 8
    bookkeeping = count.of("layer/") / 8 - count.of("layer/products.py") / 8
    of_model = count.of("model") / 8
    attention = count.of("attention/") / 8
    print(
        f"layer {of_model:.1f}, its Linears {linears:.1f}, attention {attention:.1f}, bookkeeping "
        f"{bookkeeping:.1f}"
    )
    assert bookkeeping <= 14.5  # 29.5 before
    assert linears <= 68  # a Linear's forward takes 4, its backward 6
    assert of_model <= 311


def test_sums_of_weight_gradients_are_made_by_the_products():
    """One operation for each Linear and chunk; the other parameters' are added up together."""
    count = run(8, Dispatches())
    by_name = {
        name: n
        for (origin, name), n in count.counts.items()
        if origin == "accumulate.py:add_product"
    }
    assert by_name == {"mm.dtype": 7, SUM_WITHOUT_DATA.name().removeprefix("aten::"): 7 * 7}
    assert count.counts["accumulate.py:add", "_foreach_add_.List"] == 7
    assert not [
        name
        for (origin, name) in count.counts
        if origin == "accumulate.py:add" and name.startswith("add_")
    ]


class NoWaits(TorchDispatchMode):
    """Raises where a device would wait for the host or the host for a device: values read, shapes
    that depend on data, tensors made on the CPU and sent."""

    READS = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "unique",
        "masked_select",
        "equal",
        "is_nonzero",
    )
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        self.operations += 1
        assert name not in self.READS, f"{func} waits for the device"
        if name in ("_to_copy", "copy_"):
            source = (
                args[-1]
                if name == "copy_" and len(args) == 2
                else args[1]
                if name == "copy_"
                else args[0]
            )
            target = (kwargs or {}).get("device", args[0].device)
            assert source.device.type != "cpu" or torch.device(target).type == "cpu", (
                f"{func} sends a tensor from the host"
            )
        return func(*args, **(kwargs or {}))


class OnMeta(Engine):
    """Host memory on meta too: copies are those of an engine, which do not wait."""

    def host_buffer(self, size):
        return torch.empty(size, dtype=torch.uint8, device="meta")


def offloading(gpu_memory):
    return OffloadManager(2**40, "raise", 1, gpu_memory, engine=OnMeta(torch.device("meta")))


PRODUCT = ("mlp.gate_proj",)
WAIT_CASES = (
    (BOTH_SAVES, "no offloading"),
    ((), None),
    (BOTH_SAVES, 2**20),
    (PRODUCT, None),
)  # the fast tier's


@pytest.mark.parametrize(
    ("saves", "gpu_memory"),
    thinned(
        itertools.product([(), BOTH_SAVES, PRODUCT], ["no offloading", None, 2**20]),
        lambda saves, gpu_memory: (saves, gpu_memory) in WAIT_CASES,
    ),
)
def test_no_chunk_waits_for_the_device_or_sends_it_anything(saves, gpu_memory, monkeypatch):
    monkeypatch.setattr(
        "streambp.offload.manager.host_limit", lambda requested_bytes, set_aside=0: 2**40
    )
    offloader = None if gpu_memory == "no offloading" else offloading(gpu_memory)
    assert run(3, NoWaits(), saves, offloader).operations > 500


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x + torch.ones(4096).to("meta"), lambda x: x.where(x.new_ones(()).bool().item(), x)],
)
def test_a_wait_would_be_found(wrong):
    x = empty(1, 4, 4096)
    with (
        pytest.raises((AssertionError, RuntimeError), match=r"from the host|waits for|meta"),
        NoWaits(),
    ):
        wrong(x)
