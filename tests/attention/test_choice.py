"""Which kernels "auto" takes: those that torch's own attention would take on a device, which is
emulated.

covers: attention/backend.py, attention/kernels.py, attention/prefix.py, attention/spans.py,
chunks.py
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import streambp
from streambp.attention import kernels, prefix
from streambp.attention.backend import Backend, BlockPurpose, choose_backend
from streambp.attention.kernels import CUDNN, FLASH, MATH, SQUARE_FLASH
from streambp.attention.spans import QueryRun, Spans
from streambp.chunks import ChunkPlan
from streambp.config import StreamConfig
from streambp.errors import AttentionChoiceError
from tests.attention.stand_in import CachedGraphs, Squares
from tests.families import MODES, build, make_batch
from tests.oracle import gradients, worst_error
from tests.tiers import thinned

HOPPER, BLACKWELL = (9, 0), (10, 0)
FUSED_KERNELS = ["cudnn", "flash", "math"]


@pytest.fixture
def machine(monkeypatch):
    """Sets up a CUDA device as torch describes it; returns what is chosen there."""
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)

    def choose(capability=HOPPER, runtime=91900, choice="auto", hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: runtime)
        monkeypatch.setattr(torch.version, "hip", hip)
        with FakeTensorMode():
            q = torch.empty(1, 4, 512, 128, dtype=torch.bfloat16, device="cuda")
        return [kernel.name for kernel in choose_backend(choice, q, q, 0.0).kernels]

    return choose


@contextlib.contextmanager
def deterministic(warn_only=False):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("capability", "first"),
    [
        ((8, 0), "flash"), ((8, 6), "flash"), ((8, 9), "flash"), ((9, 0), "cudnn"), ((10, 0), "cudnn"), ((10, 3), "cudnn"),
        ((12, 0), "flash"), ((12, 1), "flash"),
    ],
)  # fmt: skip
def test_cudnn_comes_first_where_torch_prefers_it(capability, first, machine):
    assert machine(capability)[0] == first
    if capability >= HOPPER:  # by name it is there
        assert machine(capability, choice="cudnn") == FUSED_KERNELS


@pytest.mark.parametrize(
    ("runtime", "first"), [(91501, "cudnn"), (92000, "cudnn"), (91500, "flash"), (90800, "flash")]
)
def test_an_old_runtime_of_cudnn_comes_after_flash(runtime, first, machine):
    assert machine(runtime=runtime)[0] == first
    assert machine(runtime=runtime, choice="cudnn") == FUSED_KERNELS


@pytest.mark.parametrize(("value", "first"), [("1", "flash"), ("0", "cudnn"), (None, "cudnn")])
def test_torchs_variable_counts(value, first, machine, monkeypatch):
    if value is not None:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", value)
    assert machine(BLACKWELL)[0] == first


def test_deterministic_algorithms_leave_cudnn_out(machine):
    with deterministic():
        assert machine() == ["flash", "math"]
        with pytest.raises(AttentionChoiceError, match=r"not deterministic.*Set attention='auto'"):
            machine(choice="cudnn")
        assert machine(choice="flash") == ["flash", "math"]
    with deterministic(warn_only=True):  # torch's own attention takes it then
        assert machine() == FUSED_KERNELS


def test_what_is_switched_off_is_not_chosen(machine):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert machine() == ["flash", "math"]
        assert machine(choice="cudnn") == FUSED_KERNELS
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert machine() == ["cudnn", "math"]
        assert machine((8, 0)) == ["math"]
        assert machine(choice="flash") == ["flash", "math"]
    with sdpa_kernel(SDPBackend.MATH):
        assert machine() == ["math"]


def test_rocm_has_no_cudnn(machine):
    """Its compute capabilities look like NVIDIA's, and torch calls MIOpen cuDNN."""
    assert machine(HOPPER, hip="6.4") == ["flash", "math"]
    with pytest.raises(AttentionChoiceError, match="ROCm"):
        machine(HOPPER, hip="6.4", choice="cudnn")


def test_flash_switched_off_on_a_cpu_means_plain_products(float64_oracle):
    """As of torch's own attention; exact, and named by `describe`."""
    stock, batch = build("qwen3", torch.float64), make_batch("plain")
    expected = gradients(stock, **batch)[1]
    model = streambp.patch(stock, StreamConfig(chunk_size=5))
    assert streambp.describe(model).attention == "auto"
    with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.MATH):
        kernel_calls, real = [], kernels.MathKernel.forward
        patch.setattr(
            kernels.MathKernel, "forward", lambda *args: kernel_calls.append(1) or real(*args)
        )
        patch.setattr(
            kernels.CpuFlashKernel, "forward", lambda *args: pytest.fail("it is switched off")
        )
        assert worst_error(gradients(model, **batch)[1], expected) <= 1e-10
        assert kernel_calls
        assert "FlashAttention is switched off" in streambp.describe(model).attention


def test_backward_attends_with_the_kernels_of_forward(monkeypatch):
    model = streambp.patch(build("qwen3", torch.float32), StreamConfig(chunk_size=5))
    batch, used_kernels = make_batch("plain"), []
    for kernel in (kernels.MathKernel, kernels.CpuFlashKernel):
        real = kernel.backward
        monkeypatch.setattr(
            kernel,
            "backward",
            lambda *args, real=real: used_kernels.append(args[0].name) or real(*args),
        )
    model(**batch).loss.backward()
    used_kernels.clear()
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(**batch).loss
    loss.backward()
    assert set(used_kernels) == {"math"}


@pytest.mark.parametrize("use", BlockPurpose)
@pytest.mark.parametrize("window", [None, 700])
def test_plain_products_take_what_cudnn_leaves_over(use, window):
    """Of any sequence, in blocks whose scores are no larger than elsewhere."""
    rows = (
        (QueryRun(300, 8500, 300), QueryRun(8500, 20_000, 300, 8500)),
        (QueryRun(0, 7, 0), QueryRun(7, 20_000, 7)),
    )
    scores = 0
    for chunk in ChunkPlan(20_000, 8192):
        plan = Backend((CUDNN, MATH)).plan(Spans(20_000, rows, window), chunk, 2, use)
        for block, kernel in zip(plan.blocks, plan.kernels, strict=True):
            assert kernel.takes(block)
            if kernel is MATH:
                scores = max(scores, (block.q1 - block.q0) * (block.k1 - block.k0))
    assert 0 < scores <= 8192 * 256


def as_on_rocm(backend, family, mode, monkeypatch):
    """The worst error of gradients where causal blocks must be squares."""
    flash, stock, batch = Squares(), build(family, torch.float64), make_batch(mode)
    expected = gradients(stock, **batch)[1]
    monkeypatch.setattr(kernels, "aten", flash)
    monkeypatch.setattr(prefix, "choose_backend", lambda *_, **__: backend)
    model = streambp.patch(stock, StreamConfig(chunk_size=5))
    our_gradients = gradients(model, **batch)[1]
    assert {layer.path for layer in streambp.describe(model).layers} == {"streams"}, (
        "a kernel refused a chunk"
    )
    assert flash.calls > 0
    return worst_error(our_gradients, expected)


@pytest.mark.fast(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_squares_alone_are_exact(family, mode, float64_oracle, monkeypatch):
    assert as_on_rocm(Backend((SQUARE_FLASH, MATH)), family, mode, monkeypatch) <= 1e-10


def test_blocks_aligned_at_the_last_key_are_seen(float64_oracle, monkeypatch):
    with pytest.raises(AssertionError, match="a kernel refused"):
        as_on_rocm(Backend((FLASH, MATH)), "qwen3", "plain", monkeypatch)


@pytest.mark.fast("qwen3-packed")
@pytest.mark.parametrize(
    ("family", "mode"),
    thinned(
        itertools.product(["qwen3", "mistral"], ["left-padded", "packed"]),
        lambda family, mode: (family == "qwen3") == (mode == "packed"),
    ),
)
def test_cudnn_with_plain_products_is_exact(family, mode, float64_oracle, monkeypatch):
    graphs, length = CachedGraphs(), 1025
    stock = build(family, torch.float64, num_hidden_layers=1, max_position_embeddings=length)
    batch = make_batch(mode, length=length)
    expected = gradients(stock, **batch)[1]
    monkeypatch.setattr(kernels, "aten", graphs)
    monkeypatch.setattr(prefix, "choose_backend", lambda *_, **__: Backend((CUDNN, MATH)))
    our_gradients = gradients(streambp.patch(stock, StreamConfig(chunk_size=512)), **batch)[1]
    assert graphs.calls > 0 or family == "mistral"
    assert worst_error(our_gradients, expected) <= 1e-10
