"""Kernels that a program put on its model before `patch`: a count launches none of them. Found on a
GPU, where Triton takes null pointers: the process got nothing but illegal accesses from its device.

covers: planner/fused_layers.py, planner/kernels.py, planner/skeleton.py
"""

from __future__ import annotations

import pytest
import torch

from streambp.errors import StreamBPError
from streambp.planner.kernels import no_launches
from streambp.planner.profile_cache import CountRequest, count_profile
from streambp.planner.survey import CHECKPOINTING_RECIPE, streamed_recipe
from tests.families import build
from tests.liger_stand_in import bind, stand_in, write_module

triton = pytest.importorskip("triton", reason="Triton is not installed")
LAUNCH_ERROR = "doubled cannot be launched on tensors without data"


@triton.jit
def doubled(x):  # nothing compiles it
    pass


def profile(model, kernels):
    return count_profile(
        CountRequest(model, kernels=kernels), [CHECKPOINTING_RECIPE, streamed_recipe(("attn_out",))]
    )


@pytest.mark.fast(2)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_ligers_modules_are_counted_as_such(family, monkeypatch):
    plain = build(family, torch.bfloat16)
    expected, own_kernels = profile(plain, "liger"), profile(plain, "own")
    stand_in(monkeypatch)(plain, ("rms_norm", "swiglu", "rope"))
    assert any("forward" in vars(module) for module in plain.modules())
    assert profile(plain, "own").methods == expected.methods != own_kernels.methods


@pytest.mark.full
def test_parts_of_liger_leave_the_rest_as_it_is(monkeypatch):
    plain = build("qwen3", torch.bfloat16)
    liger, own_kernels = profile(plain, "liger"), profile(plain, "own")
    stand_in(monkeypatch)(plain, ("rms_norm",))
    liger_norms = profile(plain, "own")
    assert own_kernels.methods != liger_norms.methods != liger.methods


def test_an_unknown_kernel_is_named_and_not_launched():
    model = build("qwen3", torch.bfloat16)
    hub = write_module(
        "hub_norms.layers",
        "def forward(self, x):\n    kernel[(1,)](x)\n    return x * self.weight\n",
        kernel=doubled,
    )
    bind(model.model.norm, hub.forward)
    with pytest.raises(StreamBPError, match=LAUNCH_ERROR):
        profile(model, "own")


def test_kernels_are_launched_on_tensors_with_data(monkeypatch):
    launched = []
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda kernel, *args, **_: launched.append(args)
    )
    x = torch.randn(3)
    with no_launches():
        doubled[(1,)](x)
        with pytest.raises(StreamBPError, match=LAUNCH_ERROR):
            doubled[(1,)](x.to("meta"))
    doubled[(1,)](x.to("meta"))  # not ours to refuse
    assert [args[0].device.type for args in launched] == ["cpu", "meta"]
