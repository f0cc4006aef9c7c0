"""`plan --from` reads what a training's own files say; the command line wins.

covers: cli/training_files.py, planner/whole_run.py, cli/checks.py
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from streambp import cli
from streambp.cli import checks, commands, training_files
from streambp.errors import ConfigError
from streambp.planner import Memory, Setting
from streambp.planner.plan import plan_profile
from streambp.planner.suggestions import seconds_of
from streambp.planner.whole_run import whole_run, whole_run_text
from tests.planner.test_fastest import two_speeds

pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")

TRL = """
model_name_or_path: Qwen/Qwen3-8B
max_length: 65536
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
use_peft: true
lora_r: 32
lora_target_modules: all-linear
load_in_4bit: true
dtype: bfloat16
learning_rate: 1.0e-4
"""
AXOLOTL = """
base_model: Qwen/Qwen3-8B
sequence_len: 32768
micro_batch_size: 1
adapter: qlora
lora_r: 8
lora_target_modules: [q_proj, v_proj]
deepspeed: zero.json
streambp: {chunk_size: 8192}
"""
ACCELERATE = """
distributed_type: DEEPSPEED
num_processes: 8
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
"""
FULL_TUNING_SETTINGS = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "max_length": 4096,
    "fsdp": "full_shard",
}
FILES = {
    "trl.yaml": (
        TRL,
        {"model": "Qwen/Qwen3-8B", "seq_len": 65536, "batch_size": 2, "accumulate": True,
         "lora": 32, "bits": 4, "lora_targets": "", "full": False, "zero": 0},
    ),
    "axolotl.yml": (
        AXOLOTL,
        {"seq_len": 32768, "lora": 8, "bits": 4, "lora_targets": "q_proj,v_proj", "zero": 2,
         "accumulate": False, "optimizer_on_host": True},
    ),
    "args.json": (json.dumps(FULL_TUNING_SETTINGS),
        {"seq_len": 4096, "full": True, "lora": None, "zero": 3}),
}  # fmt: skip


def checked(tmp_path, monkeypatch, *words):
    """The arguments of a plan, as they are planned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    engine = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "zero.json").write_text(json.dumps(engine))
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_text(text)
    arguments = commands.parse(["plan", "--gpu-memory", "80GiB", *words])
    checks.check(arguments)
    return arguments


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_says_is_planned(name, tmp_path, monkeypatch):
    arguments = checked(tmp_path, monkeypatch, "--from", name)
    expected = FILES[name][1]
    assert {key: getattr(arguments, key) for key in expected} == expected
    assert arguments.from_text.startswith(f"From {name}: Qwen/Qwen3-8B ")


def test_two_files_add_up_and_the_line_wins(tmp_path, monkeypatch):
    words = ["--from", "trl.yaml", "--from", "accelerate.yaml"]
    arguments = checked(tmp_path, monkeypatch, *words)
    assert (arguments.gpus, arguments.zero, arguments.optimizer_on_host, arguments.seq_len) == (
        8,
        3,
        True,
        65536,
    )
    assert (arguments.lora, arguments.full) == (32, False)
    arguments = checked(tmp_path, monkeypatch, *words, "--seq-len", "1k", "--lora", "4")
    assert (arguments.seq_len, arguments.lora, arguments.bits) == (1024, 4, 16)
    arguments = checked(tmp_path, monkeypatch, "other/model", *words, "--full")
    assert (arguments.model, arguments.lora, arguments.full) == ("other/model", None, True)


def test_a_file_that_is_not_read_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(training_files, "options_of", lambda keys, file: {"model": "a/b"})
    with pytest.raises(AssertionError):
        test_what_a_file_says_is_planned("trl.yaml", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "cannot be read"),
        ("- a\n- b", "instead of keys"),
        ("just words", "instead of keys"),
        ("", "instead of keys"),
        ("base_model: m\nsequence_len: many", "sequence_len in train.yaml is 'many'"),
        ("base_model: m\nsequence_len: 0", "it must be a whole number from 1"),
        ("base_model: m\nmicro_batch_size: true", "micro_batch_size in train.yaml is True"),
        ("base_model: m\nadapter: lora\nlora_r: -4", "lora_r in train.yaml is -4"),
        ("base_model: m\ndeepspeed: absent.json", "absent.json cannot be read"),
        ("base_model: m\ndeepspeed: [1]", "deepspeed in train.yaml is"),
        ("learning_rate: 1.0", "needs MODEL"),
    ],
)
def test_wrong_files_end_in_one_error(text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(text)
    assert cli.main(["plan", "--gpu-memory", "80GiB", "--from", "train.yaml"]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_a_missing_file_is_named():
    arguments = SimpleNamespace(from_file=[training_files.Path("absent.yaml")], given=[], model="")
    with pytest.raises(ConfigError, match=r"--from absent\.yaml cannot be read"):
        training_files.apply_files(arguments)


def planned(gpus=1):
    setting = Setting(gpus=gpus)
    return plan_profile(two_speeds(), 1000, Memory(900 * 10**6, None, 0.0), setting)


def test_hours_and_money():
    plan = planned()
    lengths = [1000] * 500 + [5000] * 500
    cost = whole_run(plan, lengths, 2.0, 3.0)
    steps = 2 * 1000  # every row is cut to a row of the plan
    assert cost.tokens == 1_000_000
    assert cost.packed_hours == pytest.approx(steps * seconds_of(plan) / 3600)
    assert cost.hours == pytest.approx(cost.packed_hours, rel=0.01)
    assert cost.gpu_hours == min(cost.hours, cost.packed_hours)
    assert cost.price == pytest.approx(3 * cost.gpu_hours)
    cost_of_four = whole_run(planned(4), lengths, 2.0, 3.0)
    assert cost_of_four.packed_hours == pytest.approx(cost.packed_hours / 4)
    assert cost_of_four.price == pytest.approx(cost.price, rel=0.01)
    text = whole_run_text(cost, 1000)
    assert text.startswith("1,000 rows with 1,000,000 tokens, 2 epochs: ")
    assert f"{cost.price:,.2f} of money" in text
    assert whole_run(dataclasses.replace(plan, choice=None), lengths) is None


def test_the_command_line_has_both(tmp_path, monkeypatch):
    (tmp_path / "lengths.txt").write_text("100\n900\n")
    words = ["m", "--dataset", "lengths.txt", "--epochs", "3", "--price", "2.5"]
    arguments = checked(tmp_path, monkeypatch, *words)
    assert (arguments.dataset, arguments.epochs, arguments.price) == ([100, 900], 3, 2.5)
    assert arguments.seq_len == 900
    with pytest.raises(ConfigError, match="Add --dataset"):
        checked(tmp_path, monkeypatch, "m", "--price", "2")
