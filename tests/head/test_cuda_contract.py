"""What the head does on CUDA, seen on meta tensors, which stand for it: kernels, blocks, bytes, no
waiting.

covers: head/blocks.py, head/log_probs.py, head/one_pass.py, head/triton_fold.py,
  head/triton_gradient.py
"""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from torch import nn

from streambp.head import blocks, token_log_probs, triton_fold, triton_gradient
from streambp.head.blocks import Projection, block_size, fold
from streambp.head.log_probs import make_inputs
from streambp.head.one_pass import OnePassNLL, PendingGradients
from streambp.planner.count import LiveBytes
from tests.head.traffic import SYNCS, Traffic
from tests.versions import SUM_WITHOUT_DATA

VOCABULARY, WIDTH = 151936, 4096
META = torch.device("meta")
STEP_BYTES = 15 * 4e12  # bytes that a device with 4 TB/s moves in a step of 15 s


def tensors(length, dtype=torch.bfloat16, norm=True, bias=False):
    empty = lambda *shape: torch.empty(*shape, dtype=dtype, device="meta").requires_grad_()  # noqa: E731
    with torch.device("meta"):
        norm = nn.RMSNorm(WIDTH, dtype=dtype) if norm else None
    labels = torch.empty(length, dtype=torch.long, device="meta")
    return (
        empty(length, WIDTH),
        empty(VOCABULARY, WIDTH),
        empty(VOCABULARY) if bias else None,
        labels,
        norm,
    )


def one_pass(length, **options):
    hidden, weight, bias, labels, norm = tensors(length, **options)
    inputs = make_inputs(hidden, labels, Projection(), norm, -100)
    with Traffic().counting() as traffic:
        scale = torch.ones((), device="meta")
        OnePassNLL.apply(
            inputs,
            PendingGradients(),
            scale,
            hidden,
            weight,
            bias,
            *inputs.norm_parameters.current(),
        ).backward()
    return traffic


def two_pass(length, **options):
    hidden, weight, bias, labels, norm = tensors(length, **options)
    with Traffic().counting() as traffic:
        values = token_log_probs(
            hidden, weight, labels, norm=norm, bias=bias, entropy=True, mean_log_probs=True
        )
        (values.log_probs + values.entropy + values.mean_log_probs).sum().backward()
    return traffic


HEADS = {"one pass": (one_pass, 1), "two passes": (two_pass, 2)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_kernels_work_on_the_products_themselves(name, bias):
    head, _ = HEADS[name]
    traffic = head(5000, bias=bias)
    blocks_of_tokens = [1664, 1664, 1664, 8]
    for kernel in ("fold_rows", "write_gradient"):
        assert [tuple(x.shape) for (x,) in traffic.results_of(kernel)] == [
            (n, VOCABULARY) for n in blocks_of_tokens
        ]
        assert all(x.dtype == torch.bfloat16 for (x,) in traffic.results_of(kernel))
    sums = [x for (x,) in traffic.results_of(SUM_WITHOUT_DATA) if x.shape == (VOCABULARY, WIDTH)]
    assert len(sums) == len(blocks_of_tokens)
    assert all(x.dtype == torch.float32 for x in sums)
    results = [
        (func, x)
        for func, tensors in traffic.calls
        for x in tensors
        if x.shape[:1] != (VOCABULARY,)
    ]
    assert not [
        func
        for func, x in results
        if x.shape[-1:] == (VOCABULARY,) and x.dim() == 2 and x.dtype != torch.bfloat16
    ]


@pytest.mark.parametrize("name", HEADS)
def test_a_block_costs_few_launches(name):
    """Those of one more block, views left out."""
    head, passes = HEADS[name]

    def launches(length):
        calls = [func for func, _ in head(length).calls]
        views = [func for func in calls if not isinstance(func, str) and any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )]  # fmt: skip
        return len(calls) - len(views)

    a_block = launches(3 * 1664) - launches(2 * 1664)
    print(f"{name}: {a_block} launches a block")
    assert a_block <= 45 * passes


@pytest.mark.parametrize(("name", "share"), [("one pass", 0.0065), ("two passes", 0.007)])
def test_bytes_at_the_shape_of_qwen3_8b(name, share):
    traffic = HEADS[name][0](65536)
    elementwise, sums = traffic.elementwise / STEP_BYTES, traffic.sums / STEP_BYTES
    print(
        f"{name}: elementwise {100 * elementwise:.2f} %, sums of dW inside products "
        f"{100 * sums:.2f} % of a step of 15 s"
    )
    assert elementwise + sums <= share


def test_blocks_follow_from_shapes_alone():
    for vocabulary, tokens in (
        (32000, 2048),
        (128256, 2048),
        (151936, 1664),
        (262144, 1024),
        (2**29, 1),
    ):
        assert block_size(vocabulary, torch.bfloat16, META) == (tokens, vocabulary)
        assert tokens * vocabulary * 2 <= 2**29 or tokens == 1
    assert block_size(151936, torch.float32, META)[0] == 768
    tokens, entries = block_size(151936, torch.float64, META)
    assert tokens * entries <= 2**25


def test_float64_is_not_the_kernels():
    """They compute in float32."""
    product = torch.empty(3, 50, dtype=torch.float64, device="meta")
    labels = torch.empty(3, dtype=torch.long, device="meta")
    assert fold(product, Projection(), labels, slice(0, 50)).sum.dtype == torch.float64
    assert not triton_fold.supports_kernels(torch.device("cuda", 0), torch.float64)


@pytest.mark.skipif(not triton_fold.TRITON_AVAILABLE, reason="triton is not installed")
def test_kernels_launch_where_their_tensors_are(monkeypatch):
    """A model on the second device, while the first is current."""
    current, launch_devices = ["cuda:0"], []

    @contextlib.contextmanager
    def device(name):
        previous, current[0] = current[0], str(name)
        yield
        current[0] = previous

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launch_devices.append(current[0])

    monkeypatch.setattr(torch.cuda, "device", device)
    for module in (triton_fold, triton_gradient):
        monkeypatch.setattr(module, "_kernel", Kernel())
    other_product = types.SimpleNamespace(
        shape=(2, 8), device=torch.device("cuda", 1), stride=lambda *dim: 1 if dim == (1,) else 8,
        new_empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )  # fmt: skip
    labels, row = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    triton_fold.fold_rows(other_product, labels, 0, 1.0, None, 1.0)
    triton_gradient.write_gradient(
        other_product, labels, 0, row, (row, None, None, None), None, 8, 1.0, None, 1.0
    )
    assert launch_devices == ["cuda:1", "cuda:1"]
    assert current == ["cuda:0"]


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_nothing_waits_for_the_device_in_a_block(in_one_pass, monkeypatch):
    """On a CPU, with data: as many operations that would wait for three blocks as for one."""

    def waits(tokens):
        monkeypatch.setattr(blocks, "TOKENS_PER_BLOCK", tokens)
        hidden, weight = (
            torch.randn(24, 8, requires_grad=True),
            torch.randn(29, 8, requires_grad=True),
        )
        labels = torch.arange(24)
        labels[5] = -100
        traffic = Traffic()
        with traffic:
            if in_one_pass:
                inputs = make_inputs(hidden, labels, Projection(), None, -100)
                OnePassNLL.apply(
                    inputs, PendingGradients(), torch.ones(()), hidden, weight, None
                ).backward()
            else:
                token_log_probs(hidden, weight, labels, entropy=True).log_probs.sum().backward()
        return [func for func, _ in traffic.calls if func in SYNCS], len(traffic.calls)

    (one_block, calls), (three_blocks, more_calls) = waits(24), waits(8)
    assert more_calls > calls
    assert one_block == three_blocks
    assert len(one_block) <= 4


def test_a_cast_weight_is_gone_after_forward():
    """float32 weights under autocast: one copy in half precision for all blocks, and none from
    forward to backward."""
    hidden, weight = torch.randn(24, 8, requires_grad=True), torch.randn(29, 8, requires_grad=True)
    labels = torch.arange(24)
    with LiveBytes() as count:
        with torch.autocast("cpu", torch.bfloat16):
            inputs = make_inputs(hidden, labels, Projection(), None, -100)
            total = OnePassNLL.apply(
                inputs, PendingGradients(), torch.ones(()), hidden, weight, None
            )
        assert count.live <= hidden.nbytes + weight.nbytes + 64  # their gradients
        total.backward()
    assert weight.grad.dtype == torch.float32
