"""Fused kernels of norms and MLPs that others put on, and in `verify`.

covers: model/describe.py, model/fused_layers.py, verify/compare.py
"""

from __future__ import annotations

import copy

import pytest
import transformers
from transformers.integrations import liger as transformers_liger

import streambp
from streambp.admission import trials
from streambp.errors import StreamBPError
from streambp.model import fused_layers
from streambp.verify import compare
from tests.families import build, make_batch
from tests.liger_stand_in import NORM, bind, own_attributes, stand_in, write_module
from tests.oracle import gradients, relative_l2

MAX_RELATIVE_ERROR = 1e-6  # of the whole gradient, in float32


@pytest.fixture
def liger(monkeypatch):
    return stand_in(monkeypatch)


def test_kernels_of_other_packages_are_named(liger):
    """As transformers' `use_kernels` binds them."""
    stock, batch = build("qwen3"), make_batch("plain")
    hub = write_module("liger_kernels_cuda_1a2b.layers", NORM)
    for module in stock.modules():
        if type(module).__name__.endswith("RMSNorm"):
            bind(module, hub.forward, offset=0.0, in_place=True)
    ours = copy.deepcopy(stock)
    expected = gradients(stock, **batch)[1]
    streambp.patch(ours, streambp.StreamConfig(chunk_size=7, saves=("attn_out",)))
    assert relative_l2(gradients(ours, **batch)[1], expected) <= MAX_RELATIVE_ERROR
    norms = "self_attn.q_norm, self_attn.k_norm, input_layernorm, post_attention_layernorm"
    assert (
        f"forwards of liger_kernels_cuda_1a2b compute {norms} of 2 layers"
        in streambp.describe(ours).notes
    )
    streambp.unpatch(ours)
    assert fused_layers.fused_modules(ours.model.layers[0])


@pytest.mark.fast(2)
@pytest.mark.parametrize("kernels", ["own", "liger"])
def test_a_trainer_that_applies_them_to_a_patched_model(kernels, liger, monkeypatch, tmp_path):
    """transformers' `use_liger_kernel`, which TRL, axolotl and ms-swift hand on."""
    monkeypatch.setattr(transformers_liger, "is_liger_kernel_available", lambda: True)
    rows = [
        {name: x[0] for name, x in make_batch("plain", rows=1, seed=seed).items()}
        for seed in range(4)
    ]
    trained = []
    for patched in (False, True):
        model = build("qwen3")
        if patched:
            streambp.patch(
                model, streambp.StreamConfig(chunk_size=7, saves=("*",), kernels=kernels)
            )
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, optim="sgd", learning_rate=1.0, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, use_liger_kernel=True,
            liger_kernel_config={"fused_linear_cross_entropy": False},
        )  # fmt: skip
        with fused_layers._restore_global_names(model):
            transformers.Trainer(model, arguments, train_dataset=rows).train()
        assert fused_layers.fused_modules(model.model.layers[0]).keys() == {"liger_kernel"}
        trained.append({name: p.detach() for name, p in model.named_parameters()})
    begun = dict(build("qwen3").named_parameters())
    changes = [{name: p - begun[name] for name, p in weights.items()} for weights in trained]
    # of two steps, the second from parameters that float32 has rounded
    assert relative_l2(changes[1], changes[0]) <= 1e-5


class TestVerify:
    def test_compares_with_the_unpatched_model_with_the_same_kernels(self, liger, monkeypatch):
        model = build("qwen3")
        attributes_before = own_attributes(model)
        with_kernels = []
        real = compare._run
        monkeypatch.setattr(
            compare,
            "_run",
            lambda m, *a: with_kernels.append(bool(fused_layers.fused_modules(m))) or real(m, *a),
        )
        result = compare.verify(model, seq_len=97, kernels="liger", saves=("attn_out",))
        assert result.exact, str(result)
        assert with_kernels == [True, True]
        assert any("Liger's kernels compute" in note for note in result.notes)
        assert own_attributes(model) == attributes_before

    def test_sees_what_streaming_gets_wrong(self, liger, monkeypatch):
        monkeypatch.setattr(trials, "_find_refillable", lambda products, *_: products)
        assert not compare.verify(build("qwen3"), seq_len=97, kernels="liger").exact

    def test_says_that_no_truth_can_be_had(self, liger):
        model = build("qwen3")
        liger(model)
        with pytest.raises(StreamBPError, match="Liger's kernels, which cannot compute the truth"):
            compare.verify(model, seq_len=97)
