"""A plan that does not fit names commands that do, on the same card, with more GPUs, or with fewer
tokens.

covers: planner/suggestions.py
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from streambp import cli
from streambp.cli import commands
from streambp.planner import Memory, Setting
from streambp.planner.laws import Law
from streambp.planner.plan import plan_profile
from streambp.planner.profile import Method, ParameterGroup, Phase, bytes_between_steps
from streambp.planner.profile_cache import CountRequest
from streambp.planner.report import device_text, plan_table
from streambp.planner.suggestions import Training, excess_text, remedies, replace_options
from streambp.planner.survey import STREAMED_RECIPES, survey
from streambp.rates import DEVICE_MEMORY_SIZES, DEVICES, assumed_rates, device_of, rates_by_name
from tests.planner.laws import made_work
from tests.planner.test_estimates import made_up

GIB = 2**30
TINY_CONFIG = Qwen3Config(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=2,
    head_dim=128, vocab_size=1024, tie_word_embeddings=False,
)  # fmt: skip
MODELS = {
    "Qwen3-0.6B": Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                              num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True),
    "Qwen3-4B": Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                            num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True),
    "Qwen3-8B": Qwen3Config(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                            num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False),
    "Llama-3.1-8B": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                                num_key_value_heads=8, vocab_size=128256),
    "Mistral-7B": MistralConfig(),
    "Qwen2.5-14B": Qwen2Config(hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40,
                               num_key_value_heads=8, vocab_size=152064),
    "Qwen3-30B-A3B": Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48,
                                    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                                    num_experts_per_tok=8, vocab_size=151936),
    "Llama-3.1-70B": LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                                 num_key_value_heads=8, vocab_size=128256),
}  # fmt: skip
TRAININGS = (Training(), Training(16), Training(16, 4))
LENGTHS = (8192, 65536, 262144)


@functools.cache
def counted_profile(name, training):
    # 8 bytes a token in chunks of 1,024 at 5; adapters have a tenth of the parameters trained
    if name == "made up":
        trained = 500_000 if training.lora is None else 50_000
        born = Phase("backward 0", Law(2 * trained, 8, 5), 2 * trained)
        method = Method(
            "streambp", (), "none", False, True, (born,), (born,), Law(), made_work(3, 0.5)
        )
        group = ParameterGroup("dense", 500_000, 500_000 * training.bits // 8, trained, 2 * trained)
        return made_up(groups=(group,), methods=(method,))
    config = TINY_CONFIG if name == "tiny" else MODELS[name]
    # The streamed steps that a plan chooses from, without what it prints beside them.
    request = CountRequest(config, lora=training.lora, bits=training.bits)
    return survey(request.skeleton(), STREAMED_RECIPES, accumulating=False, tree=False)


def check_cell(name, memory, training, length, setting=None):
    """A plan, and that it fits or that commands are named which do. Returns the remedies."""
    profile = counted_profile(name, training)
    plan = plan_profile(profile, length, memory, setting or Setting())
    if plan.choice is not None:
        return None
    suggestions = list(remedies(plan, length, training, functools.partial(counted_profile, name)))
    assert suggestions, (name, memory, training, length)
    for remedy in suggestions:
        assert remedy.plan.choice is not None
        second_plan = replanned(name, remedy, memory, training, length)
        assert second_plan.choice == remedy.plan.choice
    return suggestions


def replanned(name, remedy, memory, training, length):
    """The plan of the command that the remedy gives, read by the command line's own parser."""
    arguments = [
        "plan",
        "MODEL",
        "--seq-len",
        str(length),
        "--gpu-memory",
        str(memory.gpu),
        *training.options,
    ]
    line = replace_options(arguments, remedy.options)
    read = commands.parse(line)
    setting = Setting(
        gpus=read.gpus or 1,
        zero=read.zero,
        optimizer_on_host=read.optimizer_on_host,
        weights=read.weights,
    )
    host = None if memory.host is None else memory.host // setting.gpus
    profile = counted_profile(name, Training(read.lora, read.bits))
    return plan_profile(profile, read.seq_len, dataclasses.replace(memory, host=host), setting)


def test_every_kind_of_remedy_fits():
    """From a card that holds a part of the weights to one that lacks a little of the optimizer's
    state."""
    kinds = set()
    for memory in (700_000, 900_000, 1_300_000, 2_500_000, 8_200_000):
        for length in (1024, 65536):
            for remedy in (
                check_cell("made up", Memory(memory, None, 0.0), Training(), length) or ()
            ):
                kinds |= {
                    kind
                    for kind in ("LoRA", "4-bit", "optimizer", "GPUs", "tokens")
                    if kind in remedy.change
                }
    assert kinds == {"LoRA", "4-bit", "optimizer", "GPUs", "tokens"}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_a_grid_of_models_and_cards(name):
    """Each plan of a model on six cards, three trainings and three lengths: it fits, or a command
    that it names does."""
    cells = failing = commands = 0
    for training in TRAININGS:
        for size in (24, 32, 40, 48, 80, 141):
            for length in LENGTHS:
                suggestions = check_cell(name, Memory(size * GIB), training, length)
                cells, failing, commands = (
                    cells + 1,
                    failing + (suggestions is not None),
                    commands + len(suggestions or ()),
                )
    print(
        f"\n{name}: {cells} plans, {failing} do not fit and name {commands} commands, all of which "
        "do"
    )
    assert cells == 54
    assert failing < cells
    assert failing or name == "Qwen3-0.6B"  # all plans of which fit


@pytest.mark.parametrize(("length", "fits"), [(1024, True), (65536, False)])
def test_a_plan_names_levers_or_commands(length, fits):
    """Both name the same changes: commands where the plan does not fit, else how far each change
    reaches."""
    profile = counted_profile("made up", Training())
    plan = plan_profile(profile, length, Memory(8_200_000, None, 0.0), Setting())
    assert plan.levers
    assert (plan.choice is not None) == fits
    text = plan_table(plan, False)
    assert [f"{lever.change}: up to" in text for lever in plan.levers] == [fits] * len(plan.levers)


def test_what_is_too_large_is_told_by_share():
    profile = counted_profile("made up", Training())
    resident = bytes_between_steps(profile, Setting())
    plan = plan_profile(profile, 1024, Memory(int(resident.weights), None, 0.0), Setting())
    total = resident.weights + resident.gradients + resident.optimizer
    message = excess_text(plan)
    assert message is not None
    assert message.endswith(
        f"= {total / GIB:.1f} GiB, and {resident.weights / GIB:.1f} GiB of each GPU are usable"
    )
    assert excess_text(plan_profile(profile, 1024, Memory(int(2 * total)), Setting())) is None


def model_folder(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY_CONFIG.to_dict(), "architectures": ["Qwen3ForCausalLM"]})
    )
    return str(tmp_path / "config.json")


@pytest.mark.full
def test_the_command_that_is_printed_fits(tmp_path, capsys):
    resident = bytes_between_steps(counted_profile("tiny", Training()), Setting())
    arguments = [
        "plan",
        model_folder(tmp_path),
        f"--gpu-memory={int(2.4 * resident.weights)}",
        "--seq-len",
        "1k",
        "--no-cache",
    ]
    assert cli.main(arguments) == 1
    output = capsys.readouterr().out
    assert "do not fit: weights" in output
    assert "longest sequence  tokens" not in output
    commands = [
        line.strip() for line in output.splitlines() if line.startswith("    streambp plan")
    ]
    assert commands
    for command in commands:
        assert cli.main(shlex.split(command)[1:]) == 0, command


@pytest.mark.full
def test_without_a_training_both_are_planned(tmp_path, capsys):
    arguments = [
        "plan",
        model_folder(tmp_path),
        "--gpu-memory",
        "80GiB",
        "--seq-len",
        "1k",
        "--no-cache",
    ]
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    assert "Beside it:\n  LoRA of rank 16: 1,024 tokens" in output
    assert cli.main([*arguments, "--full"]) == 0
    assert "LoRA" not in capsys.readouterr().out
    assert cli.main([*arguments, "--lora", "8", "--bits", "4"]) == 0
    adapters = capsys.readouterr().out
    assert "Beside it" not in adapters
    parameters = sum(group.parameters for group in counted_profile("tiny", Training()).groups)
    stored = counted_profile("tiny", Training(16, 4)).groups
    assert sum(group.parameters - group.trainable for group in stored) == parameters


def test_the_device_follows_from_the_memory():
    assert set(DEVICE_MEMORY_SIZES) <= set(DEVICES)
    for name, size in DEVICE_MEMORY_SIZES.items():
        assert device_of(size * GIB) == name
        assert device_of(int(size * 1e9)) == name
    assert device_of(12 * GIB) is None
    assert device_of(60 * GIB) is None


@pytest.mark.parametrize(
    ("memory", "name"), [(6, "RTX4080"), (16, "RTX4080"), (22, "RTX4090"), (96, "RTXPRO6000"), (300, "B300")]
)  # fmt: skip
def test_an_assumed_card_is_the_nearest_and_says_so(memory, name):
    """A smaller card is never given a larger one's speed."""
    rates = assumed_rates(memory * GIB)
    assert (rates.name, rates.assumed) == (name, True)
    assert not DEVICES[name].assumed
    text = device_text(rates)
    assert text.startswith(f"{name} (assumed from the memory; --device NAME for yours)")
    assert "assumed" not in device_text(DEVICES[name])


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX5070Ti"),
        ("NVIDIA GeForce RTX 5070", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("", None),
    ],
)
def test_a_device_is_known_by_its_drivers_name(driver_name, name):
    rates = rates_by_name(driver_name)
    assert (rates.name if rates is not None else None) == name


@pytest.mark.parametrize("name", DEVICES)
def test_rates_are_below_the_datasheets(name):
    """Published dense TFLOP/s in bf16 and TB/s; each row's source has them."""
    published = {"H200": (989, 4.8), "H100": (989, 3.35), "RTX5090": (224, 1.79)}
    row = DEVICES[name]
    numbers = re.findall(r"([\d.,]+) TFLOP/s|([\d.]+) TB/s|of (312) ", row.source)
    compute = [
        float((tflops or guess).replace(",", "")) for tflops, _, guess in numbers if tflops or guess
    ]
    bandwidth = [float(terabytes) for _, terabytes, _ in numbers if terabytes]
    limits = published.get(name) or (max(compute, default=312), bandwidth[0])
    assert max(row.forward, row.backward) <= row.products <= limits[0] * 1e12
    assert row.bandwidth <= 0.8 * limits[1] * 1e12


def test_seconds_of_several_gpus_are_called_unmeasured():
    profile = counted_profile("made up", Training())
    for gpus in (1, 2):
        setting = Setting(gpus=gpus, zero=3 if gpus > 1 else 0)
        plan = plan_profile(profile, 1024, Memory(90_000_000, None, 0.0), setting)
        assert ("several GPUs were not measured" in plan_table(plan, False)) == (gpus > 1)


def test_options_replace_what_was_given():
    arguments = [
        "plan",
        "M",
        "--lora",
        "8",
        "--seq-len=64k",
        "--gpu-memory",
        "24GiB",
        "--optimizer-on-host",
    ]
    assert replace_options(arguments, ("--seq-len", "4096")) == [
        "plan", "M", "--lora", "8", "--gpu-memory", "24GiB", "--optimizer-on-host", "--seq-len", "4096",
    ]  # fmt: skip
    assert replace_options(arguments, ("--lora", "16", "--bits", "4", "--optimizer-on-host")) == [
        "plan", "M", "--seq-len=64k", "--gpu-memory", "24GiB", "--lora", "16", "--bits", "4", "--optimizer-on-host",
    ]  # fmt: skip
