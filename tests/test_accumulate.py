"""Sums of products: numbers on a CPU, and the one operation that CUDA runs.

covers: accumulate.py
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.accumulate import add_product
from streambp.planner.count import StepCount
from tests.device import ACCELERATOR
from tests.seeds import seeded
from tests.versions import SUM_WITHOUT_DATA

aten = torch.ops.aten
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def factors(dtype, seed, device="cpu"):
    """grad^T [7, 5] of a transposed [5, 7], and x [5, 3]."""
    generator = seeded(seed)
    grad, x = (torch.randn(5, width, generator=generator, dtype=torch.float64) for width in (7, 3))
    return grad.to(device, dtype).mT, x.to(device, dtype)


def check_sums(dtype, device="cpu"):
    """Three products into a row slice of a larger sum, the first into none; at most one rounding of
    each product away."""
    wide = torch.promote_types(dtype, torch.float32)
    assert add_product(None, *factors(dtype, 0, device)).dtype == wide
    buffer = torch.full((11, 3), torch.nan, dtype=wide, device=device)
    pairs = [factors(dtype, seed, device) for seed in range(3)]
    buffer[2:9] = add_product(None, *pairs[0])
    part = buffer[2:9]
    assert add_product(part, *pairs[1]) is part
    add_product(part, *pairs[2])
    exact = [left.double() @ right.double() for left, right in pairs]
    bound = (
        sum(product.abs() for product in exact) * torch.finfo(dtype).eps
        + 16 * torch.finfo(wide).eps
    )
    assert ((part.double() - sum(exact)).abs() <= bound).all()
    assert buffer[:2].isnan().all()
    assert buffer[9:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype):
    check_sums(dtype)


@pytest.mark.gpu(any=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_on_a_device(dtype):
    check_sums(dtype, ACCELERATOR.type)


def test_a_float64_sum_of_half_precision_products():
    total = add_product(torch.zeros(7, 3, dtype=torch.float64), *factors(torch.bfloat16, 0))
    assert total.dtype == torch.float64


def test_factors_that_want_gradients_get_no_graph():
    left, right = (x.requires_grad_() for x in factors(torch.float32, 0))
    assert not add_product(add_product(None, left, right), left, right).requires_grad


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "operation"),
    [(torch.bfloat16, SUM_WITHOUT_DATA), (torch.float32, aten.addmm_.default)],
)
def test_cuda_adds_inside_the_product(dtype, operation):
    """On meta, which stands for CUDA: one operation, that writes where the sum is."""
    left, right = factors(dtype, 0, "meta")
    total = torch.empty(7, 3, device="meta")
    with Operations() as operations:
        assert add_product(total, left, right) is total
    assert operations.functions == [operation]
    first = add_product(None, left, right)
    assert (first.dtype, first.shape) == (torch.float32, (7, 3))


def test_the_planner_counts_their_flops():
    left, right = factors(torch.bfloat16, 0, "meta")
    count = StepCount(None)
    with count:
        add_product(add_product(None, left, right), left, right)
    assert count.work.products == 2 * (2 * 7 * 5 * 3)
