"""What the layers of a vision tower cost in chunks: bytes of a backward and products, beside
torch's checkpointing, counted on tensors without data in the shape of SigLIP's so400m.

covers: sharded/bidirectional.py, attention/kinds.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

import streambp
from streambp.admission import stacks
from streambp.admission.stacks import kind_of
from streambp.layer.layer_state import LayerState
from streambp.planner.count import LiveBytes
from streambp.sharded.bidirectional import stream_bidirectional
from tests.counting import LinearFlops
from tests.layer.test_bytes import KB, Source, flash_on_meta

HIDDEN = 1152
CHUNK = 1024
LENGTHS = (4 * CHUNK, 8 * CHUNK)  # patches, or frames
MIB = 2**20


def siglip_layer():
    """On meta, in bfloat16."""
    config = SiglipVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=4304,
        num_attention_heads=16,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        return SiglipEncoderLayer(config).to(torch.bfloat16).train()


class AttentionFlops(TorchDispatchMode):
    """FLOPs of fused attention, forward and backward."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "attention" in func.name():
            count = flop_registry[func.overloadpacket]
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def streamed():
    """Run a layer in chunks, as a patched tower does."""
    index = itertools.count()

    def forward(layer, x):
        config = streambp.StreamConfig(chunk_size=CHUNK, saves=())
        kind = kind_of(layer, tower=True)
        layer_state = LayerState(layer, config, index=next(index), kind=kind)
        return stream_bidirectional(layer_state, (x, None), {}, None, ())

    return forward


def checkpointed():
    AttentionInterface.register("flash_on_meta", flash_on_meta)

    def forward(layer, x):
        layer.self_attn.config._attn_implementation_internal = "flash_on_meta"
        return checkpoint(layer, x, None, use_reentrant=False)

    return forward


def step(forward, length, before_backward=lambda: None):
    """Forward and backward of two layers, which share weights."""
    layer = siglip_layer()
    x = torch.empty(1, length, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    end = Source.apply(forward(layer, forward(layer, x)))
    before_backward()
    end.backward()


def peak_of(forward, length):
    """Bytes at the peak of backward: two inputs of layers, and all that one layer's backward keeps
    alive."""
    with LiveBytes() as count:
        step(forward, length, count.reset_peak)
    return count.peak


def bytes_of_a_patch(way):
    shorter, longer = (peak_of(way(), length) for length in LENGTHS)
    return (longer - shorter) / (LENGTHS[1] - LENGTHS[0]) / KB


def flops_of(way):
    """FLOPs of Linears, and of attention."""
    with LinearFlops() as linears, AttentionFlops() as attention:
        step(way(), 2 * CHUNK + 1)
    return linears.total, attention.total


def test_flops_are_those_of_checkpointing():
    ours, theirs = flops_of(streamed), flops_of(checkpointed)
    print(f"Linears {ours[0] / theirs[0]:.4f} x, attention {ours[1] / theirs[1]:.4f} x")
    assert ours[0] <= 1.001 * theirs[0]
    assert ours[1] == theirs[1] > 0


@pytest.mark.full
def test_bytes_of_a_patch():
    kilobytes = bytes_of_a_patch(streamed)
    print(f"in chunks: {kilobytes:.1f} KB a patch")
    assert kilobytes <= 30


@pytest.mark.full
def test_bytes_of_a_patch_under_checkpointing():
    kilobytes = bytes_of_a_patch(checkpointed)
    print(f"torch's checkpointing: {kilobytes:.1f} KB a patch")
    assert kilobytes >= 45


@pytest.mark.full
@pytest.mark.parametrize("length", [2**12, 2**14, 2**15])
def test_peaks(length):
    """The table of docs/explanation/bidirectional.md."""
    ours, theirs = (peak_of(way(), length) for way in (streamed, checkpointed))
    print(f"{length:,} patches: {ours / MIB:,.0f} MiB in chunks, {theirs / MIB:,.0f} MiB")
    assert ours < theirs


@pytest.mark.full
def test_the_mutant_that_runs_whole_is_noticed(monkeypatch):
    monkeypatch.setattr(stacks, "_why_no_mask", lambda layer: "a mutant")
    with pytest.raises(AssertionError):
        test_bytes_of_a_patch()
