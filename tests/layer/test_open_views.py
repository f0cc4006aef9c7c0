"""A layer whose views leave the number of tokens open: CLVP's, in chunks whose tokens its heads do
not divide.

covers: admission/trials.py, layer/call.py, layer/data_flow.py, layer/function.py,
layer/products.py, layer/layer_state.py
"""

from __future__ import annotations

import copy

import torch
from transformers import ClvpDecoderConfig, ClvpForCausalLM

import streambp
from tests.families import VOCABULARY, make_batch
from tests.oracle import gradients, worst_error


def clvp_errors():
    """Of all its gradients, relative, for several sizes of chunks."""
    torch.set_default_dtype(torch.float64)
    sizes = {
        "hidden_size": 32,
        "n_inner": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_mel_attn_blocks": 1,
    }
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0)
    try:
        stock = ClvpForCausalLM(ClvpDecoderConfig(vocab_size=VOCABULARY, **sizes, **drops)).train()
        _, expected = gradients(stock, **make_batch("plain"))
        return [worst_error(clvp_gradients(stock, size), expected) for size in (5, 7, 8)]
    finally:
        torch.set_default_dtype(torch.float32)


def clvp_gradients(stock, chunk_size):
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=chunk_size))
    return gradients(ours, **make_batch("plain"))[1]


def test_a_view_that_leaves_the_tokens_open(float64_oracle):
    assert max(clvp_errors()) <= 1e-10
