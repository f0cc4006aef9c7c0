"""Models of public shapes on machines that nobody has at hand: which kernel attends each block, and
what `describe` says.

covers: attention/backend.py, attention/kernels_wide.py, attention/rules.py, model/describe.py
"""

from __future__ import annotations

import pytest
import torch
import transformers

from streambp.attention import prefix
from streambp.attention.spans import BlockKind
from streambp.errors import UnsupportedModelError
from streambp.model.describe import BLOCK_TEXTS
from tests.attention.traces import LENGTH, MACHINES, MODELS, trace
from tests.tiers import thinned
from tests.versions import needs_indexers

C, F, E, M = "cudnn", "flash", "efficient", "math"
NATIVE_HEAD_SIZES = {(64, 64), (128, 128), (192, 128), (256, 256)}
SPARSE_MODELS = ("DeepSeek V3.2", "GLM 5")  # of 2,048 picked keys
REFUSED_MODEL = "DeepSeek V4"
SOFTCAP = "Gemma 2"
# What attends the prefixes of whole chunks on an H200; elsewhere it is FlashAttention or what is
# named.
FIRST_KERNELS = {"Gemma 4": E, SOFTCAP: M}


def first_kernel(name, machine):
    if name in FIRST_KERNELS:
        return M if machine == "MI300" and FIRST_KERNELS[name] == E else FIRST_KERNELS[name]
    wide = name in ("Qwen3.5", "Qwen3.5 MoE", "Qwen3-Next", "Gemma 3", "GLM-4.7-Flash")
    return C if machine == "H200" or (machine == "B200" and not wide) else F


def check(name, machine, length=LENGTH):
    run = trace(name, machine, length)
    description = run.described.attention
    assert run.calls
    assert length < LENGTH or not run.large  # shorter ones are no longer than other sizes
    for call in run.calls:  # no operator says so without data
        if call.kernel == C:
            assert call.sizes in NATIVE_HEAD_SIZES
        if call.kernel == F:
            assert call.sizes[0] == call.sizes[1] <= 256
    plain = [call for call in run.calls if call.kernel == M]
    # head sizes that no other kernel takes
    nothing_else = {call.sizes for call in plain if call.kind is BlockKind.FULL}
    assert ("because" in description) == bool(nothing_else)
    assert ("plain products" in description) == bool(plain)
    assert all(
        f"plain products for {BLOCK_TEXTS[call.kind]}" in description
        for call in plain
        if call.sizes not in nothing_else
    )
    if name in SPARSE_MODELS:
        assert run.kernels(BlockKind.MASK) == {M}
        assert all(
            "its indexer's picks are kept, 8,192 bytes a token" in layer.reason
            for layer in run.described.layers
        )
    else:
        assert run.kernels(BlockKind.FULL) - {F, M} <= {first_kernel(name, machine)}
        assert first_kernel(name, machine) in run.kernels(BlockKind.FULL)
    assert all(layer.path == "streams" for layer in run.described.layers)
    return run


@pytest.mark.full
def test_latent_attention_takes_cudnn_as_it_is():
    run = check("DeepSeek V3", "H200")
    assert {call.sizes for call in run.calls if call.kernel == C} == {(192, 128)}


@pytest.mark.full
def test_latent_attention_is_padded_elsewhere():
    run = check("Kimi Linear", "A100", 3 * 8192 + 1)
    assert {call.sizes for call in run.calls} == {(192, 192)}


@pytest.mark.full
def test_head_sizes_beyond_flash_attention():
    """Gemma 4: sliding layers of 256, global ones of 512."""
    run = check("Gemma 4", "H200")
    assert {(call.kernel, call.sizes) for call in run.calls if call.kind is BlockKind.WINDOW} == {
        (F, (256, 256))
    }
    assert {call.sizes for call in run.calls if call.kernel == E} == {(512, 512)}


@pytest.mark.full
def test_a_softcap_is_named():
    run = check(SOFTCAP, "H200", 8192)
    assert (
        "because FlashAttention cannot: it has no softcap, and the model's is 50.0"
        in run.described.attention
    )


@pytest.mark.full
def test_windows_without_a_kernel_for_them_are_named():
    run = check("gpt-oss", "MI300", 16_384)
    assert (
        "plain products for the near edges of sliding windows in 1 layer" in run.described.attention
    )


@pytest.mark.fast(3)
@needs_indexers
@pytest.mark.parametrize("name", thinned(SPARSE_MODELS, lambda name: name == "GLM 5"))
def test_keys_that_an_indexer_picks(name):
    run = check(name, "H200", 8192 + 256)
    assert (
        "plain products for attention masks that are no intervals in 1 layer"
        in run.described.attention
    )


@pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek V4"
)
def test_a_model_whose_attention_has_its_own_cache_is_refused():
    with pytest.raises(UnsupportedModelError, match="DeepseekV4Indexer"):
        trace(REFUSED_MODEL, "H200", 16_384)


@pytest.mark.full
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != REFUSED_MODEL])
def test_every_model_on_every_machine(name, machine):
    thousands = name in (SOFTCAP, *SPARSE_MODELS)  # of blocks
    check(name, machine, LENGTH if not thousands or machine == "H200" else 8192)


def unnoted(self, plan):
    """`Prefix.note_kernels` that forgets plain products."""
    self.kernel_uses |= {use for use in plan.kernel_uses if use.kernel != M}


def with_a_mask(self, plan):
    """`Prefix.note_kernels` beside which a [T, T] mask is made."""
    torch.empty(self.length, self.length, dtype=torch.bool, device="meta")
    self.kernel_uses |= plan.kernel_uses


@pytest.mark.fast("[T, T]")
@pytest.mark.parametrize(
    ("name", "machine", "length", "note"),
    [("gpt-oss", "MI300", 16_384, unnoted), ("Qwen3", "H200", LENGTH, with_a_mask)],
    ids=["unnamed", "[T, T]"],
)
def test_a_mutant_is_seen(name, machine, length, note, monkeypatch):
    monkeypatch.setattr(prefix.Prefix, "note_kernels", note)
    with pytest.raises(AssertionError):
        check(name, machine, length)
