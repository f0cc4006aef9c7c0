"""Hooks that torch runs for every module of the process see true values, in recomputations as well.

covers: layer/products.py
"""

from __future__ import annotations

import contextlib
import copy
import queue

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

import streambp
from tests.families import build, make_batch
from tests.model.test_contract import CONFIG, check_agree


@contextlib.contextmanager
def watching(register):
    """The names of modules that were handed NaN or gave it, and how many calls were looked at."""
    # out of sight: what a list kept would make layers run whole
    names, calls = ([], queue.SimpleQueue())

    def record_nan(module, *values):
        calls.put(module)
        tensors = [
            leaf
            for leaf in tree_leaves(values)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        names.extend([type(module).__name__] if any(bool(x.isnan().any()) for x in tensors) else [])

    handle = register(record_nan)
    try:
        yield names, calls
    finally:
        handle.remove()


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
@pytest.mark.parametrize("first", [False, True])
def test_a_monitor_sees_no_products_that_were_left_out(register, first, float64_oracle):
    """first: the layers have streamed without it before."""
    stock = build("qwen3", torch.float64)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = make_batch("plain")
    if first:
        check_agree(stock, ours, **batch)
    with watching(register) as (names, calls):
        check_agree(stock, ours, **batch)
    assert not calls.empty()
    assert not names
    check_agree(stock, ours, **batch)


def test_without_a_monitor_products_are_left_out(monkeypatch):
    """The mutant: were global hooks overlooked, the monitor would see them."""
    from streambp.layer import products

    monkeypatch.setattr(products, "GLOBAL_HOOKS", ())
    ours = streambp.patch(build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5))
    with watching(register_module_forward_hook) as (names, _):
        ours(**make_batch("plain")).loss.backward()
    assert "Linear" in names
