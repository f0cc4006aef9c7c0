from __future__ import annotations

import json

import pytest
import torch

import streambp
from streambp import cli
from streambp.attention import prefix
from streambp.layer import shadows
from streambp.verify import verify
from tests.families import build
from tests.test_mutants import only_this_chunk, skips_second


@pytest.fixture
def checkpoint(tmp_path):
    def save(family, **overrides):
        build(family, **overrides).save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_verify_says_exact(family, dtype, checkpoint, capsys):
    code = cli.main(["verify", checkpoint(family, hidden_size=64), "--seq-len", "250", "--dtype", dtype])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "EXACT" in printed
    assert "NOT EXACT" not in printed
    if family != "qwen3":
        assert "window of 6 was crossed" in printed


def test_json_lists_every_parameter(checkpoint, capsys):
    path = checkpoint("qwen3")
    assert cli.main(["verify", path, "--seq-len", "64", "--saves", "attn_out,kv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    errors = [p["streamed"] for p in found["parameters"]]
    assert {p["name"] for p in found["parameters"]} == {name for name, _ in build("qwen3").named_parameters()}
    assert errors == sorted(errors, reverse=True)
    assert found["chunks"] >= 4
    assert found["seq_len"] % found["chunk_size"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bug", ["accumulation", "prefix"])
def test_bugs_are_flagged(bug, dtype, monkeypatch):
    if bug == "accumulation":
        monkeypatch.setattr(shadows.GradientSum, "add", skips_second(shadows.GradientSum.add))
    else:
        monkeypatch.setattr(prefix.CallSite, "grow_accumulators", only_this_chunk)
    result = verify(build("qwen3", dtype), seq_len=64)
    assert not result.exact
    assert "NOT EXACT" in str(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["no-checkpoint"], "no-checkpoint"), (["--chunk-size", "32"], "smaller --chunk-size"), (["--saves", "qk"], "qk")],
)
def test_bad_usage_exits_with_2(arguments, message, checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-checkpoint").mkdir()
    path = [] if arguments[0] == "no-checkpoint" else [checkpoint("llama"), "--seq-len", "64"]
    assert cli.main(["verify", *path, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_window_that_was_not_crossed_is_named():
    result = verify(build("mistral", sliding_window=100), seq_len=64)
    assert "pass --seq-len 126 or more" in str(result)


def test_the_model_is_left_as_it_was(monkeypatch):
    model = build("qwen3")
    parameter = model.model.layers[0].mlp.up_proj.weight
    parameter.grad = torch.ones_like(parameter)
    model.model.layers[1].eval()
    verify(model, seq_len=64)
    with pytest.raises(streambp.StreamBPError, match="patched"):
        verify(streambp.patch(model), seq_len=64)
    streambp.unpatch(model)
    monkeypatch.setattr(prefix.ChunkMask, "attend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verify(model, seq_len=64)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert model.training
    assert not model.model.layers[1].training
    assert not any("forward" in m.__dict__ or "_streambp" in m.__dict__ for m in model.modules())
