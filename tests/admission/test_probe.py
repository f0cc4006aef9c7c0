"""What the probe of a layer hides, and what it must not.

covers: admission/agreement.py, admission/probe.py
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import streambp
from streambp.admission.trials import same_gradients
from streambp.attention.kernels import CpuFlashKernel
from streambp.device import is_kernel_error
from streambp.errors import KernelError
from tests.families import build, make_batch

CPU_DEVICE = torch.device("cpu")


def run(**settings):
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5, **settings))
    model(**make_batch("plain"), use_cache=False).loss.backward()
    return model


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("FlashAttention only supports Ampere GPUs or newer."),
        torch.AcceleratorError("device-side assert triggered"),
        NotImplementedError(
            "Could not run 'aten::_scaled_dot_product_cudnn_attention' with arguments from the "
            "'CUDA' backend"
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_kernel_raises_comes_out(error, monkeypatch):
    def fails(self, q, k, v, task):
        raise error

    monkeypatch.setattr(CpuFlashKernel, "forward", fails)
    with pytest.raises(KernelError, match="Set another attention") as raised_error:
        run()
    assert raised_error.value.__cause__ is error
    monkeypatch.undo()
    run()


def test_a_backend_that_was_asked_for_and_cannot_do_it_is_refused():
    with pytest.raises(
        streambp.StreamBPError, match=r"attention='cudnn' cannot attend.*'auto' or 'math'"
    ):
        run(attention="cudnn")


def test_memory_that_ran_out_comes_out(monkeypatch):
    def fails(self, q, k, v, task):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CpuFlashKernel, "forward", fails)
    with pytest.raises(torch.OutOfMemoryError):
        run()


def test_what_comes_from_cutting_a_layer_makes_it_run_whole(monkeypatch):
    """A layer that cannot take a chunk, because it holds something for every position."""
    model = build("qwen3")
    mlp = type(model.model.layers[1].mlp)
    bias = torch.randn(12, 1)
    monkeypatch.setattr(mlp, "forward", lambda self, x, real=mlp.forward: real(self, x) + bias)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    model(**make_batch("plain", length=12), use_cache=False).loss.backward()
    assert "does not work on chunks" in str(streambp.describe(model))


def test_an_error_in_a_kernel_counts_by_where_it_was_raised():
    """Not on a CPU, whose kernels complain of the shapes that a cut layer hands them."""
    q = torch.randn(1, 1, 4, 8)
    try:
        CpuFlashKernel().forward(q, q[..., :4], q, None)
    except Exception as error:
        caught_error = error
    assert not is_kernel_error(caught_error, CPU_DEVICE)
    assert is_kernel_error(caught_error, torch.device("cuda", 0))
    assert not is_kernel_error(
        RuntimeError("The size of tensor a (5) must match the size of tensor b (12)"), CPU_DEVICE
    )


def test_half_precision_gradients_whose_norm_overflows_are_compared():
    call = SimpleNamespace(
        layer_state=SimpleNamespace(coarsest_dtype=lambda dtype, *_: dtype), autocast=None
    )
    x = torch.full((300, 300), 300.0, dtype=torch.float16) + torch.rand(300, 300).half()
    assert same_gradients(call, [x], [x])
    assert not same_gradients(call, [x / 2], [x])
