"""`streambp verify`: what it finds exact, what it flags, what it says of bad usage.

covers: __main__.py, cli/runs.py, verify/__init__.py, verify/choices.py, verify/compare.py,
  verify/truth.py, verify/verdict.py
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import streambp
import streambp.verify.compare
from streambp import accumulate, cli
from streambp.admission import entry
from streambp.admission.probe import Verdict
from streambp.attention import prefix
from streambp.chunks import pick_chunk_size
from streambp.head import recipe
from streambp.layer import function
from streambp.verify.choices import CountedChoices
from streambp.verify.compare import verify
from streambp.verify.verdict import Distances, find_problems, rate
from tests import zoo
from tests.families import FAMILIES, build
from tests.seeds import seed_of, seeded
from tests.test_mutants import only_this_chunk, skips_second
from tests.tiers import thinned


@pytest.fixture
def checkpoint(tmp_path):
    def save(family, **overrides):
        build(family, **overrides).save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


def some(names, dtypes):
    """Each name with one dtype and each dtype with one name; the rest of the product is in the full
    tier."""
    for (n, name), (d, dtype) in itertools.product(enumerate(names), enumerate(dtypes)):
        fast = n % len(dtypes) == d or d % len(names) == n
        yield pytest.param(
            name, dtype, marks=() if fast else pytest.mark.full, id=f"{name}-{dtype}"
        )


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("family", "dtype"),
    some(["qwen3", "mistral", "gemma3"], ["float32", "bfloat16", "float16", "float64", "auto"]),
)
def test_verify_says_exact(family, dtype, checkpoint, capsys):
    code = cli.main(
        ["verify", checkpoint(family, hidden_size=64), "--seq-len", "250", "--dtype", dtype]
    )
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "EXACT" in printed
    assert "NOT EXACT" not in printed
    assert "5 chunks of 59, the last of 14" in printed
    if family != "qwen3":
        assert "window of 6 was crossed" in printed


@pytest.mark.parametrize(
    ("family", "dtype"),
    some(["qwen3_moe", "gpt_oss", "mixtral"], ["float32", "bfloat16", "float64"]),
)
def test_verify_experts(family, dtype, tmp_path, capsys):
    """Loaded as they are by default they use grouped products, which know no float64; the model's
    choice is left alone."""
    zoo.build(family, torch.float32).save_pretrained(tmp_path)
    assert cli.main(["verify", str(tmp_path), "--seq-len", "60", "--dtype", dtype]) == 0, (
        capsys.readouterr().out
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    implementation = model.config._experts_implementation
    assert implementation == "grouped_mm"
    assert verify(model, seq_len=60).exact
    assert model.config._experts_implementation == implementation


def test_a_model_that_names_no_dtype():
    """XGLM's attention makes the lowest number of its scores' dtype a tensor of the default
    dtype."""
    result = verify(zoo.build("xglm", torch.float32), seq_len=97)
    assert result.exact, str(result)
    assert result.truth_dtype == "float64"
    assert torch.get_default_dtype() == torch.float32


FAMILY_DTYPES = {"qwen3": torch.float16, "gemma3": torch.float32, "phi3": torch.bfloat16}


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "dtype"),
    thinned(
        itertools.product(FAMILIES, [torch.float32, torch.bfloat16, torch.float16]),
        lambda family, dtype: dtype == FAMILY_DTYPES.get(family),
    ),
)
def test_rounding_alone_is_never_flagged(family, dtype):
    for seed in range(3):
        result = verify(build(family, dtype, seed=seed), seq_len=97, seed=seed)
        assert result.exact, str(result)


def test_json_lists_every_parameter(checkpoint, capsys):
    path = checkpoint("qwen3")
    capsys.readouterr()  # saving imports DeepSpeed, which writes to stdout
    assert cli.main(["verify", path, "--seq-len", "64", "--saves", "attn_out,kv", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    errors = [p["streamed"] for p in printed["parameters"]]
    assert {p["name"] for p in printed["parameters"]} == {
        name for name, _ in build("qwen3").named_parameters()
    }
    assert errors == sorted(errors, reverse=True)
    assert printed["exact"] is True
    assert printed["chunks"] >= 4
    assert printed["seq_len"] % printed["chunk_size"]


def test_top_shortens_the_table(checkpoint, capsys):
    path = checkpoint("qwen3")
    cli.main(["verify", path, "--seq-len", "64", "--top", "3"])
    assert f"and {len(list(build('qwen3').parameters())) - 3} more" in capsys.readouterr().out
    cli.main(["verify", path, "--seq-len", "64", "--top", "0"])
    printed = capsys.readouterr().out
    assert all(name in printed for name, _ in build("qwen3").named_parameters())


BUGS = {
    "lost accumulation": (
        accumulate.GradientSum,
        "add",
        lambda: skips_second(accumulate.GradientSum.add),
    ),
    "lost dK and dV": (prefix.KVBuffer, "grow_accumulators", lambda: only_this_chunk),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_flagged(bug, dtype, monkeypatch):
    owner, attribute, mutant = BUGS[bug]
    model = build("qwen3", dtype)
    # it would find the second one
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(True))
    monkeypatch.setattr(owner, attribute, mutant())
    result = verify(model, seq_len=64)
    assert not result.exact
    assert "NOT EXACT" in str(result)
    assert any("rounding does not explain" in problem for problem in result.problems)


def test_a_bug_makes_the_command_fail(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(True))  # it would find it
    monkeypatch.setattr(prefix.KVBuffer, "grow_accumulators", only_this_chunk)
    assert cli.main(["verify", checkpoint("qwen3"), "--seq-len", "64"]) == 1
    assert "NOT EXACT" in capsys.readouterr().out


def test_a_lost_parameter_is_named(monkeypatch):
    real = accumulate.GradientSum.result
    monkeypatch.setattr(
        accumulate.GradientSum, "result", lambda self, like: [None, *real(self, like)[1:]]
    )
    result = verify(build("llama"), seq_len=64)
    assert "model.layers.0.self_attn.q_proj.weight" in result.problems[0]
    assert "get none streamed" in result.problems[0]


def test_nan_is_flagged_and_valid_json(checkpoint, capsys, monkeypatch):
    real = accumulate.GradientSum.result
    monkeypatch.setattr(
        accumulate.GradientSum,
        "result",
        lambda self, like: [g * torch.nan for g in real(self, like)],
    )
    assert cli.main(["verify", checkpoint("llama"), "--seq-len", "64", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert printed["parameters"][0]["streamed"] is None


def test_a_wrong_loss_is_flagged_though_gradients_are_right(monkeypatch):
    class Shifted:
        @staticmethod
        def apply(*args, real=recipe.OnePassNLL.apply):
            total = real(*args)
            return total + 0.01 * total.detach()

    monkeypatch.setattr(recipe, "OnePassNLL", Shifted)
    for dtype in (torch.float32, torch.bfloat16):
        (problem,) = verify(build("qwen3", dtype), seq_len=128).problems
        assert problem.startswith("the loss is off")


def test_a_model_that_did_not_stream_gets_no_verdict(monkeypatch):
    model = build("qwen3")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(streambp.StreamBPError, match="None of 2 patched layers streamed"):
        verify(model, seq_len=64)


def test_the_reason_of_layers_that_run_whole_is_named(monkeypatch):
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(False, "it counts its tokens"))
    with pytest.raises(streambp.StreamBPError, match=r"None of 2 .* judge\. it counts its tokens"):
        verify(build("qwen3"), seq_len=64)


@pytest.mark.parametrize("length", [7, 9, 64, 97, 512, 4096])
def test_chunks_are_at_least_four_and_unequal(length):
    size = pick_chunk_size(length)
    assert -(-length // size) >= 4
    assert length % size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at-all"], "nowhere"),
        (["--chunk-size", "16"], "smaller --chunk-size"),
        (["--chunk-size", "22"], "smaller --chunk-size"),
        (["--seq-len", "8"], "at least 9"),
        (["--seq-len", "513"], "at most 512"),
        (["--saves", "qk"], "qk"),
        (["--device", "cuda"], "--device cpu"),
    ],
)
def test_bad_usage_exits_with_2(arguments, message, checkpoint, capsys, monkeypatch):
    # the environment was read already
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    path = [] if arguments[0].startswith("nowhere") else [checkpoint("llama"), "--seq-len", "64"]
    capsys.readouterr()  # saving imports DeepSpeed, which writes to stdout
    assert cli.main(["verify", *path, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_a_broken_checkpoint_exits_with_2(checkpoint, tmp_path, capsys):
    path = checkpoint("llama")
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"not a checkpoint")
    assert cli.main(["verify", path]) == 2
    error = capsys.readouterr().err
    assert "could not be loaded" in error
    assert "--random" not in error
    (tmp_path / "llama" / "model.safetensors").unlink()
    assert cli.main(["verify", path]) == 2
    assert (
        "Or add --random: this folder has a configuration and no weights" in capsys.readouterr().err
    )


def test_too_little_host_memory_is_named(monkeypatch):
    monkeypatch.setattr(streambp.verify.compare, "available_memory", lambda: 1000)
    with pytest.raises(streambp.StreamBPError, match=r"of host memory; 0\.0 are free"):
        verify(build("llama"), seq_len=64)


def test_module_runs_as_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["streambp", "verify", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("streambp", run_name="__main__")
    assert "--seq-len" in capsys.readouterr().out


def test_the_window_that_was_not_crossed_is_named():
    result = verify(build("mistral", sliding_window=100), seq_len=64)
    assert result.exact
    assert "pass --seq-len 126 or more" in str(result)


def test_frozen_layers_are_named():
    model = build("qwen3")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    result = verify(model, seq_len=64)
    assert result.exact
    assert "1 of 2 layers took part" in str(result)


@pytest.mark.parametrize("stage", ["before", "streamed", "backward"])
def test_the_model_is_left_as_it_was(stage, monkeypatch):
    model = build("qwen3")
    parameter = model.model.layers[0].mlp.up_proj.weight
    parameter.grad = torch.ones_like(parameter)
    model.model.layers[1].eval()
    ids = torch.arange(3, 40)[None]
    expected = model(ids).logits
    verify(model, seq_len=64)
    if stage == "before":
        with pytest.raises(streambp.StreamBPError, match="patched"):
            verify(streambp.patch(model), seq_len=64)
        streambp.unpatch(model)
    else:
        owner, name = (
            (prefix.PrefixChunkAttention, "attend")
            if stage == "streamed"
            else (function, "_chunk_backward")
        )
        monkeypatch.setattr(owner, name, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            verify(model, seq_len=64)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert all(p.grad is None for p in model.parameters() if p is not parameter)
    assert model.training
    assert not model.model.layers[1].training
    assert not any("forward" in m.__dict__ or "_streambp" in m.__dict__ for m in model.modules())
    assert torch.equal(model(ids).logits, expected)


def test_the_truth_of_float32_is_float64_throughout():
    """With transformers' casts to float32 lifted, truths of a float32 model and of its float64 copy
    are the same."""
    ours, copy = build("gemma3"), build("gemma3").double()
    assert verify(ours, seq_len=64).loss_truth == pytest.approx(
        verify(copy, seq_len=64).loss_truth, rel=1e-14
    )


@pytest.mark.parametrize(
    ("streamed", "unpatched", "exact"),
    [
        (1.9e-6, 1e-6, True),
        (2.1e-6, 1e-6, False),
        (float("nan"), 1e-6, False),
        (1e-11, 0.0, True),
        (1e-9, 0.0, False),
    ],
)
def test_the_bar_of_the_whole_gradient(streamed, unpatched, exact):
    _, full_gradient = rate({"w": Distances(1.0, streamed, unpatched)})
    assert full_gradient.exact is exact


def test_a_lucky_parameter_is_judged_by_its_kind():
    rated, full_gradient = rate(
        {
            "layers.0.bias": Distances(1e-3, 1e-8, 1e-12),
            "layers.1.bias": Distances(1e-3, 1e-8, 1e-8),
            "layers.1.weight": Distances(1.0, 1e-7, 1e-7),
        }
    )
    assert find_problems(rated, full_gradient, Distances(1.0, 0.0, 0.0), {"a"}, {"a"}) == ()


@pytest.mark.parametrize(
    ("elements", "ratio", "exact"),
    [(4, 8.0, True), (4, 9.0, False), (64, 4.0, True), (64, 4.1, False)],
)
def test_few_elements_may_be_lucky(elements, ratio, exact):
    rated, _ = rate(
        {
            "bias": Distances(1e-3, ratio * 1e-8, 1e-8, elements),
            "weight": Distances(1.0, 1e-8, 1e-8),
        }
    )
    assert next(p for p in rated if p.name == "bias").exact == exact


@pytest.mark.parametrize("number", range(3))
def test_sinks_in_half_precision_are_not_blamed(number):
    """Plain products take the output before rounding, as eager attention does."""
    model = zoo.build("gpt_oss", torch.bfloat16, seed=number)
    assert verify(model, seq_len=50, seed=seed_of(number)).exact


@pytest.mark.fast("0-True-0")
@pytest.mark.parametrize(
    ("draws", "exact", "undecided"), [(0, True, 0), (1, True, 1), (9, False, 4)]
)
def test_what_other_experts_compute_decides_nothing(draws, exact, undecided, monkeypatch):
    """Tokens that go elsewhere streamed than unpatched, in so many draws: others are judged. [Note:
    choices]"""
    model, batches = zoo.build("qwen3_moe", torch.float32, seed=0), []
    router = type(
        next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
    )
    make_batch, forward = sys.modules["streambp.verify.compare"]._make_batch, router.forward

    def elsewhere(self, hidden_states):
        streamed = any("_streambp" in module.__dict__ for module in model.modules())
        return forward(
            self, -hidden_states if streamed and len(batches) <= draws else hidden_states
        )

    monkeypatch.setattr(
        "streambp.verify.compare._make_batch",
        lambda *args: batches.append(args) or make_batch(*args),
    )
    monkeypatch.setattr(router, "forward", elsewhere)
    verification = verify(model, seq_len=50)
    assert verification.exact == exact
    assert len({seed for _, _, seed, _ in batches}) == len(batches) == min(undecided + 1, 4)
    notes = [note for note in verification.notes if "choices of experts" in note]
    assert [note.split()[0] for note in notes] == [str(undecided)] * bool(undecided)


def test_choices_are_the_same_in_chunks():
    logits = torch.randn(30, 8, generator=seeded())
    with CountedChoices() as unchunked:
        torch.topk(logits, 2)
    with CountedChoices() as chunked:
        for chunk in (logits[20:], logits[:7], logits[7:20]):
            chunk.topk(2, sorted=False)
    with CountedChoices() as other_choices:
        torch.cat([logits[:-1], -logits[-1:]]).topk(2)
    assert unchunked.count_differences(chunked) == chunked.count_differences(unchunked) == 0
    assert (
        unchunked.count_differences(other_choices)
        == other_choices.count_differences(unchunked)
        == 1
    )
