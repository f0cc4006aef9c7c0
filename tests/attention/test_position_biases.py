"""T5's bias by distance, for blocks of queries and keys, and its gradient.

covers: attention/position_biases.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from streambp.attention.position_biases import (
    add_block_gradient,
    distance_bias,
    has_table,
    pair_bias,
)
from streambp.attention.spans import Block, BlockKind

LENGTH = 13


def attention(is_decoder: bool) -> T5Attention:
    config = T5Config(
        d_model=32, d_kv=8, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=9, is_decoder=is_decoder,
    )  # fmt: skip
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()


@pytest.mark.parametrize("is_decoder", [True, False])
def test_bias_of_all_pairs(is_decoder):
    module = attention(is_decoder)
    bias = distance_bias(module, LENGTH, torch.device("cpu"))
    assert bias.shape == (1, 4, 2 * LENGTH - 1)
    expected = module.compute_bias(LENGTH, LENGTH)
    assert torch.equal(pair_bias(bias, 0, LENGTH, 0, LENGTH), expected)


@pytest.mark.parametrize("block", [(0, 1, 0, 1), (3, 9, 0, 3), (3, 9, 3, 9), (12, 13, 0, 13)])
def test_gradient_of_a_block(block):
    """The sum over diagonals is autograd's gradient."""
    module = attention(is_decoder=True)
    q0, q1, k0, k1 = block
    upstream = torch.randn(4, q1 - q0, k1 - k0, dtype=torch.float64)
    bias = distance_bias(module, LENGTH, torch.device("cpu"))[0].detach().requires_grad_()
    tile = pair_bias(bias, *block)
    assert torch.equal(tile, module.compute_bias(LENGTH, LENGTH)[0, :, q0:q1, k0:k1])
    (expected,) = torch.autograd.grad(tile, bias, upstream)
    sums = torch.zeros_like(expected)
    add_block_gradient(sums, upstream, Block(BlockKind.FULL, 0, 1, q0, q1, k0, k1))
    torch.testing.assert_close(sums, expected, rtol=0.0, atol=1e-14)


def test_modules_without_a_table():
    config = T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=True)
    assert not has_table(T5Attention(config, layer_idx=0))
    assert not has_table(torch.nn.Linear(2, 2))
