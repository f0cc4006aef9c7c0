"""Wrong lines of `plan` that people write: one error each, with a remedy and without torch.

covers: cli/checks.py, cli/app.py, cli/training_files.py, fields.py
"""

from __future__ import annotations

import pytest

from streambp.cli import commands
from streambp.cli.checks import check
from streambp.errors import ConfigError
from streambp.fields import DTYPE_ALIASES, parse_bytes
from tests.cli.test_command_line import PLAN, run_lines

# A wrong line, and words of the one line that answers it.
INVALID_LINES = {
    "plan m --gpu-memory 24GBs": "a positive number and a unit",
    "plan m --gpu-memory 24 GiB": "Write 24GiB", "plan m --gpu-memory=": "--gpu-memory is ''",
    f"{PLAN} --host-memory -1GiB": "--host-memory is '-1GiB'",
    f"{PLAN} --seq-len 64k32": "such as 65536, 64k or 1M", f"{PLAN} --seq-len 2**16": "is '2**16'",
    f"{PLAN} --seq-len 0k": "--seq-len is '0k'", f"{PLAN} --batch-size two": "a whole number from 1",
    f"{PLAN} --lora-targets": "requires an argument", f"{PLAN} --bits 4 --full": "Add --lora 16",
    f"{PLAN} --lora-targets q_proj": "Add --lora 16", f"{PLAN} --lora 16 --full": "pass one of the two",
    f"{PLAN} --weights disk": "one of device, cpu, auto", f"{PLAN} --weights": "requires an argument",
    f"{PLAN} --optimizer-on-host true": "unexpected extra argument(s) (true)",
    f"{PLAN} --json true": "unexpected extra argument(s) (true)",
    f"{PLAN} --accumulate 4": "unexpected extra argument(s) (4)", f"{PLAN} --zero": "requires an argument",
    f"{PLAN} --gpus": "requires an argument", f"{PLAN} --device": "requires an argument",
    f"{PLAN} --device RTX9999": "run `streambp plan --measure-device FILE`",
    f"{PLAN} --device l40z": "Did you mean L40", f"{PLAN} --attention fa3": "one of cudnn, flash",
    f"{PLAN} --dtype half": "one of float32, bfloat16", f"{PLAN} --from absent.yaml": "cannot be read",
    "plan --gpu-memory 8GiB --from /": "Pass the YAML or JSON file", f"{PLAN} --from": "requires an argument",
    f"{PLAN} --dataset absent.txt": "Pass a file of whole numbers", f"{PLAN} --dataset /": "cannot be read",
    f"{PLAN} --epochs 3": "Add --dataset FILE", f"{PLAN} --price 2": "Add --dataset FILE",
    f"{PLAN} --epochs 0": "--epochs is '0'", f"{PLAN} --epochs many": "--epochs is 'many'",
    f"{PLAN} --price -1": "--price is '-1'", f"{PLAN} --price $2": "--price is '$2'",
    f"{PLAN} --lengths absent": "Add --batch-size 8", f"{PLAN} --mean-length 2k": "Add --batch-size 8",
    f"{PLAN} --group 4 --lengths x": "pass one of them",
    f"{PLAN} --group 4 --prompt 8k --mean-length 4k": "pass one of them",
    "plan m n --gpu-memory 8GiB": "unexpected extra argument(s) (n)",
    f"{PLAN} --gpu-mem 4GiB": "--gpu-memory", f"{PLAN} --html": "requires an argument",
    "plan https://huggingface.co/datasets/a/b --gpu-memory 8GiB": "not of a model's page",
    "plan https://huggingface.co/Qwen --gpu-memory 8GiB": "https://huggingface.co/Qwen/Qwen3-8B",
    "plan hf.co/Qwen/Qwen3-8B/tree/v2 --gpu-memory 8GiB": "not of a model's page",
    "plan https://example.com/a/b --gpu-memory 8GiB": "like https://huggingface.co/Qwen/Qwen3-8B",
    f"{PLAN} --html /": "Pass another file", f"{PLAN} --measure-device /": "Pass another file",
    f"{PLAN} --kernels": "requires an argument", f"{PLAN} --mixers fla": "one of kernels, torch, installed",
    f"{PLAN} --reserve 100%": "from 0 to 0.99", f"{PLAN} --weights cpu --gpus 2": "Leave --weights cpu out",
    f"{PLAN} --group 4 --prompt 8k --ulysses 2": "and --ulysses 2 shares each row",
    f"{PLAN} --mean-length 2k --context-parallel 4": "--context-parallel 4 shares each row",
}  # fmt: skip


def test_each_wrong_line_of_a_plan_gets_one_line():
    results = run_lines(list(INVALID_LINES))
    assert len(results) == len(INVALID_LINES) > 40
    for line, code, message, printed, heavy in results:
        assert (code, printed, heavy, message.count("\n")) == (2, 0, [], 1), line
        assert message.startswith("streambp"), line
        assert INVALID_LINES[line] in message, (line, message)
        assert "no verdict" not in message, line


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/Qwen/Qwen3-8B",
        "http://www.huggingface.co/Qwen/Qwen3-8B/",
        "https://huggingface.co/Qwen/Qwen3-8B/tree/main",
        "https://huggingface.co/Qwen/Qwen3-8B?library=transformers#usage",
        "hf.co/Qwen/Qwen3-8B",
    ],
)
def test_the_address_of_a_models_page_is_the_model(address):
    for line in (["plan", address, "--gpu-memory", "8GiB"], ["verify", address]):
        arguments = commands.parse(line)
        check(arguments)
        assert arguments.model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("alias", DTYPE_ALIASES)
def test_a_dtype_may_have_its_short_name(alias, tmp_path):
    for line in ([*PLAN.split()], ["verify", "m"], ["profile", "m"]):
        assert commands.parse([*line, "--dtype", alias]).dtype == DTYPE_ALIASES[alias]
    file = tmp_path / "training.json"
    file.write_text(f'{{"dtype": "{alias}"}}', "utf-8")
    arguments = commands.parse([*PLAN.split(), "--from", str(file)])
    check(arguments)
    assert arguments.dtype == DTYPE_ALIASES[alias]


NAMES = ("chunk_size", "offload", "gpus", "seq_len", "saves")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("chunk_size is '0'; it must be positive", "--chunk-size is '0'; it must be positive"),
        ("gpus is 3; gpus counts all ranks", "--gpus is 3; gpus counts all ranks"),
        ("Choose one: gpus is 2", "Choose one: --gpus is 2"),
        ("saves names 'x'; the model saves it", "--saves names 'x'; the model saves it"),
        ("it must be one of ['none', 'cpu'].", "it must be one of none, cpu."),
        ("a seq_len of 2, and model.seq_len", "a seq_len of 2, and model.seq_len"),
        ("the seq_len that it has", "the --seq-len that it has"),
        ("write StreamConfig(chunk_size=64)", "write StreamConfig(chunk_size=64)"),
        ("Set offload='cpu' in StreamConfig", "Set offload='cpu' in StreamConfig"),
        ("pass --seq-len or 'seq_len'", "pass --seq-len or 'seq_len'"),
        ("length is ['64']; it must be a number", "length is ['64']; it must be a number"),
        ("/a/seq_len/b and seq_len/c have 'x'", "/a/seq_len/b and seq_len/c have 'x'"),
        ("the folder 'x/chunk_size y' is empty", "the folder 'x/chunk_size y' is empty"),
        ("chunk_size of 'm2' is 9", "chunk_size of 'm2' is 9"),
    ],
)
def test_messages_name_options(message, expected):
    assert commands.name_options(message, NAMES) == expected


def test_messages_of_launch_name_values():
    message = "but offload='none' moves nothing; set offload='cpu' or 'auto' too, f(offload='cpu')"
    expected = "but --offload none moves nothing; set --offload cpu or auto too, f(offload='cpu')"
    assert commands.name_options(message, NAMES, with_values=True) == expected


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("24", "has no unit. Write 24GiB, or 24B"),
        ("24GBs", "must be a positive number and a unit"),
        (-24, "must be a positive whole number of bytes, or text of a positive number and a unit"),
    ],
)
def test_text_of_bytes_has_a_unit(value, remedy):
    with pytest.raises(ConfigError, match=remedy) as error:
        parse_bytes("gpu_memory", value)
    assert "number without" not in str(error.value)
