"""Linear FLOPs of a step against torch's non-reentrant checkpointing; attention pairs against the
spans.

covers: attention/kernels.py, attention/spans.py, head/one_pass.py, head/recipe.py, layer/layer_state.py,
lazy/lazy_hidden.py
"""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3TextConfig
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2Config, Olmo2DecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3DecoderLayer

import streambp
from streambp.admission.entry import stream_layer
from streambp.admission.probe import Verdict
from streambp.attention import kernels
from streambp.attention.spans import BlockKind
from streambp.config import StreamConfig
from streambp.head.one_pass import PendingGradients
from streambp.head.recipe import HeadRequest, LogitsExpression
from streambp.layer.layer_state import LayerState
from streambp.lazy.lazy_hidden import LazyHidden
from tests.counting import LinearFlops
from tests.families import build, make_batch
from tests.oracle import gradients

LENGTH = 4096
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
PHI3_MINI = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
GEMMA3_4B = {
    "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
LAYERS = {
    "qwen3-8b": (Qwen3DecoderLayer, Qwen3Config, QWEN3_8B, 1.02),
    "llama-7b, full multi-head": (LlamaDecoderLayer, LlamaConfig, LLAMA_7B, 1.05),
    "phi3-mini, fused qkv": (Phi3DecoderLayer, Phi3Config, PHI3_MINI, 1.12),
    "olmo2-7b, post-norm": (Olmo2DecoderLayer, Olmo2Config, LLAMA_7B, 1.12),
    "gemma3-4b, post-norm": (Gemma3DecoderLayer, Gemma3TextConfig, GEMMA3_4B, 1.12),
}


def meta_layer(name):
    layer_class, config_class, sizes, bar = LAYERS[name]
    config = config_class(**sizes, num_hidden_layers=1, attn_implementation="sdpa", pad_token_id=0)
    with torch.device("meta"):
        return layer_class(config, 0).to(torch.bfloat16).train(), sizes, bar


def layer_flops(layer, sizes, chunk_size=None):
    """Linear FLOPs of forward and backward; checkpointed where no chunk size is given."""
    head_dim = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    x = torch.empty(
        1, LENGTH, sizes["hidden_size"], dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    rotary = torch.empty(1, LENGTH, head_dim, dtype=torch.bfloat16, device="meta")
    arguments = {"attention_mask": None, "position_embeddings": (rotary, rotary)}
    with LinearFlops() as flops:
        if chunk_size is None:
            out = checkpoint(
                lambda x: _without_attention(layer, x, arguments), x, use_reentrant=False
            )
        else:
            out = stream_layer(
                LayerState(layer, StreamConfig(chunk_size=chunk_size)), (x,), arguments
            )
        out.backward(torch.empty_like(out))
    return flops.total


def _without_attention(layer, x, arguments):
    """The layer with its attention product replaced by an elementwise stand-in: Linears are what is
    counted."""

    def stand_in(module, query, key, value, attention_mask, **kwargs):
        repeats = query.shape[1] // key.shape[1]
        return (query + (key * value).repeat_interleave(repeats, 1)).transpose(
            1, 2
        ).contiguous(), None

    AttentionInterface.register("stand_in", stand_in)
    configs = {id(m.config): m.config for m in layer.modules() if hasattr(m, "config")}.values()
    previous_names = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "stand_in"
        return layer(x, **arguments)
    finally:
        for config, name in zip(configs, previous_names, strict=True):
            config._attn_implementation_internal = name


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [
        pytest.param(
            name, size, marks=() if size == 1500 or name == "qwen3-8b" else pytest.mark.full
        )
        for name in LAYERS
        for size in (256, 1500, LENGTH)
    ],
)
def test_linear_flops_of_a_layer(name, chunk_size):
    layer, sizes, bar = meta_layer(name)
    ratio = layer_flops(layer, sizes, chunk_size) / layer_flops(layer, sizes)
    print(f"{name}, chunks of {chunk_size}: {ratio:.4f} x checkpointing's Linear FLOPs")
    assert ratio <= bar


def test_linear_flops_of_a_qwen3_8b_step():
    """36 layers and the head with its loss."""
    layer, sizes, bar = meta_layer("qwen3-8b")
    hidden = torch.empty(LENGTH, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    head = nn.Linear(4096, 151936, bias=False, dtype=torch.bfloat16, device="meta")
    labels = torch.empty(LENGTH, dtype=torch.long, device="meta")
    with LinearFlops() as stock_head:
        F.cross_entropy(head(hidden).float(), labels).backward()
    with LinearFlops() as our_head:
        F.cross_entropy(
            head(
                LazyHidden.make(hidden, LogitsExpression(HeadRequest(PendingGradients())))
            ).float(),
            labels,
        ).backward()
    ours = 36 * layer_flops(layer, sizes, 512) + our_head.total
    stock = 36 * layer_flops(layer, sizes) + stock_head.total
    print(f"Qwen3-8B step, chunks of 512: {ours / stock:.4f} x checkpointing's Linear FLOPs")
    assert ours / stock <= bar


@pytest.mark.parametrize("saves", [(), ("attn_out",)])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("mode", ["plain", "packed", "left-padded"])
def test_attention_computes_each_pair_once_a_pass(family, mode, saves, monkeypatch):
    pairs = collections.Counter()

    def counted(method, key):
        def wrapper(*args):
            block = args[-1].block
            rows = block.b1 - block.b0
            pairs[key, block.kind] += rows * block.pairs
            return method(*args)

        return wrapper

    for kernel in (kernels.CPU_FLASH, kernels.MATH):
        monkeypatch.setattr(kernel, "forward", counted(kernel.forward, "forward"))
        monkeypatch.setattr(kernel, "backward", counted(kernel.backward, "backward"))
    # its trial attends
    config = StreamConfig(chunk_size=5, saves=saves, attention="auto", rows="as_given")
    model = streambp.patch(build(family, num_hidden_layers=1), config)
    # no probe: it attends as well
    monkeypatch.setattr("streambp.layer.layer_state.plain_linears", lambda layer, adapted=(): {})
    # so do these
    monkeypatch.setattr("streambp.admission.entry.can_stream", lambda call: Verdict(True))
    monkeypatch.setattr("streambp.admission.entry.look_for_writes", lambda call: None)
    gradients(model, **make_batch(mode))
    inside, masked = expected_pairs(model, mode)
    forwards = 1 if saves else 2
    for key, times in (("forward", forwards), ("backward", 1)):
        computed = {kind: count for (run, kind), count in pairs.items() if run == key}
        assert sum(computed.values()) == times * (inside + masked)
        assert set(computed) <= {BlockKind.FULL, BlockKind.CAUSAL, BlockKind.BAND}


def expected_pairs(model, mode):
    """Pairs inside the spans, and masked pairs that the diagonal and window-edge blocks hold, by
    brute force."""
    batch = make_batch(mode)
    length, window = batch["input_ids"].shape[1], getattr(model.config, "sliding_window", None)
    inside = masked = 0
    for row in range(batch["input_ids"].shape[0]):
        is_token = batch["attention_mask"][row] if "attention_mask" in batch else torch.ones(length)
        document = (
            (batch["position_ids"][row] == 0).cumsum(0)
            if "position_ids" in batch
            else torch.zeros(length)
        )
        query, key = torch.arange(length)[:, None], torch.arange(length)
        allowed = (
            (key <= query) & (document[:, None] == document) & (is_token[:, None] * is_token > 0)
        )
        if window:
            allowed &= key > query - window
        inside += int(allowed.sum())
        for start in range(0, length, 5):
            for d in document[start : start + 5].unique():
                tokens = int(((document == d) & (is_token > 0))[start : start + 5].sum())
                masked += tokens * (tokens - 1) // 2
                first = int(((document == d) & (is_token > 0)).nonzero()[0]) if tokens else 0
                last = (
                    start
                    + max(i for i in range(5) if start + i < length and document[start + i] == d)
                    + 1
                )
                if window and tokens:
                    q0 = max(first, start)
                    edge, full = max(first, q0 - window + 1), max(first, last - window)
                    band = max(0, min(full, q0) - edge)
                    area = sum(
                        1
                        for q in range(q0, last)
                        for k in range(edge, edge + band)
                        if k <= q - window
                    )
                    masked += area
    return inside, masked
