"""`verify` beside other methods: which are exact, what is measured, and what is left of them.

covers: verify/compare.py, verify/comparison.py, verify/methods.py
"""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch

import streambp
from streambp import cli
from streambp.errors import ConfigError
from streambp.verify import compare as compare_module
from streambp.verify import compare_methods, methods
from tests import zoo
from tests.families import build
from tests.liger_stand_in import stand_in

COMPARED_METHODS = ("unpatched", "checkpointing", "trl")


def without_trl():
    pytest.importorskip("trl", reason="TRL needs Python 3.11")


@pytest.mark.fast("qwen3-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3"])
def test_correct_methods_are_exact(family, dtype):
    without_trl()
    # TRL's head computes in float32 whatever the model's dtype is
    methods = COMPARED_METHODS[:2] if dtype == torch.float64 else COMPARED_METHODS
    comparison = compare_methods(build(family, dtype), methods, seq_len=97)
    assert len(comparison.methods) == len(methods) + 1
    assert all(method.exact for method in comparison.methods), str(comparison)
    assert [method.name for method in comparison.methods][:3] == [
        "streambp",
        "unpatched",
        "checkpointing",
    ]
    for method in comparison.methods:
        assert method.peak > 0
        assert method.seconds > 0


def test_checkpointing_keeps_less_than_the_unpatched_model():
    comparison = compare_methods(build("qwen3", torch.float32), ("unpatched", "checkpointing"), 250)
    assert all(method.exact for method in comparison.methods), str(comparison)
    streamed, unpatched, checkpointed = (method.peak for method in comparison.methods)
    assert streamed < unpatched
    assert checkpointed < unpatched


def test_peaks_are_of_one_step(monkeypatch):
    """A step of the unpatched model keeps at least its gradients and its logits."""
    model = build("qwen3", torch.float32)
    (_, unpatched) = compare_methods(model, ("unpatched",), 97).methods
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert unpatched.peak > gradients + 97 * model.config.vocab_size * 4


def test_a_function_is_judged_by_its_name():
    def drops_half(model):
        def run(**batch):
            out = model(**batch)
            out.loss = 0.5 * out.loss + 0.5 * out.loss.detach()
            return out

        return run

    def is_the_model(model):
        return model

    model = build("qwen3", torch.float32)
    comparison = compare_methods(model, (drops_half, is_the_model), 97)
    assert [(method.name, method.exact) for method in comparison.methods[1:]] == [
        ("drops_half", False),
        ("is_the_model", True),
    ]
    assert comparison.verification.exact
    assert "drops_half: the whole gradient's error" in str(comparison)
    assert comparison.methods[1].error == pytest.approx(0.5, rel=1e-3)


def test_a_lost_gradient_is_named():
    def frozen(model):
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out.detach())
        return model

    result = compare_methods(build("qwen3", torch.float32), (frozen,), 97).methods[1]
    assert "get none by this method" in result.problems[0]
    assert "layers.0.mlp.up_proj.weight" in result.problems[0]


def test_dropout_of_layers_that_checkpoint_is_off():
    """OPT's layers draw dropout themselves when they are in training mode."""
    model = zoo.build("opt", torch.float32, dropout=0.5)
    comparison = compare_methods(model, ("checkpointing",), 97)
    assert comparison.methods[1].exact, str(comparison)
    assert {module.dropout for module in model.modules() if hasattr(module, "dropout")} >= {0.5}


@pytest.mark.parametrize(
    "mutant", ["dropout stays", "a copy of the weights", "layers that do not checkpoint"]
)
def test_mutants_are_found(mutant, monkeypatch):
    if mutant == "dropout stays":
        monkeypatch.setattr(methods, "vars", lambda module: {}, raising=False)
        test = test_dropout_of_layers_that_checkpoint_is_off
    if mutant == "a copy of the weights":
        monkeypatch.setattr(methods, "_shared_copy", copy.deepcopy)
        test = test_checkpointing_keeps_less_than_the_unpatched_model
    if mutant == "layers that do not checkpoint":
        monkeypatch.setattr(methods, "_checkpoint", lambda model: None)
        test = test_checkpointing_keeps_less_than_the_unpatched_model
    with pytest.raises(AssertionError):
        test()


def test_nothing_of_a_method_stays():
    without_trl()
    model = build("qwen3", torch.float32)
    attributes_before = {name: dict(vars(module)) for name, module in model.named_modules()}
    compare_methods(model, COMPARED_METHODS, 97)
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes_before[name].keys(), name
        for field in ("training", "gradient_checkpointing"):
            assert vars(module).get(field) == attributes_before[name].get(field)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("package", "name"), [("trl", "trl"), ("liger_kernel", "liger")])
def test_a_missing_library_is_one_error(package, name, monkeypatch):
    for module_name in list(sys.modules):
        if module_name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, module_name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(compare_module, "_judge", None)  # before anything is computed
    with pytest.raises(streambp.StreamBPError, match=rf"pip install 'streambp-hf\[{name}\]'"):
        compare_methods(build("qwen3", torch.float32), (name,), 97)


def test_ligers_kernels_need_a_gpu(monkeypatch):
    stand_in(monkeypatch)
    with pytest.raises(streambp.StreamBPError, match="need a GPU"):
        compare_methods(build("qwen3", torch.float32), ("liger",), 97)


@pytest.mark.parametrize(("wrong", "message"), [("llger", "among unpatched"), ("trl", "once")])
def test_wrong_names(wrong, message):
    with pytest.raises(ConfigError, match=message):
        compare_methods(build("qwen3"), (wrong, wrong), 97)


def test_the_command_prints_each_method(tmp_path, capsys):
    build("qwen3", torch.float32).save_pretrained(tmp_path)
    arguments = ["verify", str(tmp_path), "--seq-len", "97", "--against", "unpatched,checkpointing"]
    capsys.readouterr()  # saving imports DeepSpeed, which writes to stdout
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count(" exact ") == 3
    assert cli.main([*arguments, "--json"]) == 0
    printed_fields = json.loads(capsys.readouterr().out)
    assert [method["name"] for method in printed_fields["methods"]] == [
        "streambp",
        "unpatched",
        "checkpointing",
    ]
    assert printed_fields["exact"]
