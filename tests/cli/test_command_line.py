"""A command line is judged before torch is imported; names that the documentation writes resolve;
what is not installed.

covers: arguments.py, libraries.py, cli/__init__.py, cli/app.py, cli/checks.py, cli/environment.py, launch/settings.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import streambp
from streambp import cli, libraries
from streambp.config import CONFIG_FIELDS, StreamConfig
from streambp.errors import ConfigError, DeviceMemoryError, MissingLibraryError
from streambp.fields import parse_bytes, parse_tokens
from streambp.launch.settings import argument_texts, first_sentence
from tests.families import build
from tests.hangs import HANG

ROOT = Path(__file__).parents[2]
PLAN = "plan m --gpu-memory 8GiB"
# A wrong line, and words of the one line that answers it.
INVALID_VALUES = {
    "plan": "needs MODEL and --gpu-memory", "plan m": "needs --gpu-memory", "plan --gpu-memory 8GiB": "needs MODEL",
    "plan m --gpu-memory 80": "Write 80GiB", "plan m --gpu-memory 0": "--gpu-memory is '0'",
    "plan m --gpu-memory 80X": "--gpu-memory is '80X'", "plan m --gpu-memory -1GiB": "--gpu-memory is '-1GiB'",
    "plan m --gpu-memory nan": "--gpu-memory is 'nan'", "plan m --gpu-memory 1e999": "--gpu-memory is '1e999'",
    "plan m --gpu-memory": "requires an argument", f"{PLAN} --host-memory 64": "Write 64GiB",
    f"{PLAN} --host-memory much": "--host-memory is 'much'", f"{PLAN} --seq-len much": "--seq-len is 'much'",
    f"{PLAN} --seq-len 0": "--seq-len is '0'", f"{PLAN} --seq-len -5": "--seq-len is '-5'",
    f"{PLAN} --seq-len 64q": "--seq-len is '64q'", f"{PLAN} --seq-len 1e5": "--seq-len is '1e5'",
    f"{PLAN} --seq-len inf": "--seq-len is 'inf'", f"{PLAN} --reserve 1.5": "from 0 to 0.99",
    f"{PLAN} --reserve nan": "--reserve is 'nan'", f"{PLAN} --reserve -0.5": "--reserve is '-0.5'",
    f"{PLAN} --gpus 0": "--gpus is '0'", f"{PLAN} --gpus 1.5": "--gpus is '1.5'", f"{PLAN} --gpus x": "--gpus is 'x'",
    f"{PLAN} --ulysses 0": "--ulysses is '0'", f"{PLAN} --context-parallel -2": "--context-parallel is '-2'",
    f"{PLAN} --zero 4": "must be one of 0, 1, 2, 3", f"{PLAN} --zero x": "--zero is 'x'",
    f"{PLAN} --batch-size 0": "--batch-size is '0'", f"{PLAN} --lora 0": "--lora is '0'",
    f"{PLAN} --lora x": "--lora is 'x'",
    f"{PLAN} --bits 3": "must be one of 4, 8, 16", f"{PLAN} --bits 4": "Add --lora 16",
    f"{PLAN} --full --lora 4": "pass one", f"{PLAN} --lora-targets q_proj": "Add --lora 16",
    f"{PLAN} --optimizer-bytes nan": "--optimizer-bytes is 'nan'",
    f"{PLAN} --optimizer-bytes -1": "--optimizer-bytes is '-1'",
    f"{PLAN} --optimizer-bytes inf": "--optimizer-bytes is 'inf'", f"{PLAN} --dtype int8": "--dtype is 'int8'",
    f"{PLAN} --kernels x": "--kernels is 'x'", f"{PLAN} --mixers x": "--mixers is 'x'",
    f"{PLAN} --device RTX409": "Did you mean RTX4090", f"{PLAN} --device missing.json": "missing.json",
    f"{PLAN} --html /nowhere/at/all.html": "cannot be written", f"{PLAN} --prompt 4k": "Add --group",
    f"{PLAN} --group 4": "--group needs --prompt",
    f"{PLAN} --group 4 --prompt 8k --seq-len 8k": "Raise --seq-len above --prompt",
    f"{PLAN} --group 0 --prompt 8k": "--group is '0'", f"{PLAN} --foo": "No such option: --foo",
    f"{PLAN} --measure-device a.json --device H200": "pass one of the two",
    "plan ./nothing --gpu-memory 8GiB": "no such file",
    "plan missing.json --gpu-memory 8GiB": "no such file", "plan a/b/c --gpu-memory 8GiB": "no such file",
    "plan / --gpu-memory 8GiB": "folder without config.json", "verify": "PATH_OR_ID", "verify ./nothing": "no such file",
    "verify m --seq-len 5": "at least 9", "verify m --seq-len 64 --chunk-size 0": "--chunk-size is '0'",
    "verify m --seq-len 64 --chunk-size 16": "smaller --chunk-size", "verify m --saves kv@0": "saves names 'kv@0'",
    "verify m --seed -1": "--seed is '-1'", "verify m --left-padding 600": "--left-padding is 600",
    "verify m --dtype x": "--dtype is 'x'", "verify m --top -1": "--top is '-1'",
    "profile m --seq-len max": "--seq-len is 'max'",
    "profile m --offload disk": "must be one of none, cpu", "profile m --seq-len 2048M": "at most", "launch": "no command",
    "launch true": "to run after --", "launch --chunk-size 0 -- true": "--chunk-size is '0'",
    "launch --chunk-size 1.5 -- true": "--chunk-size is '1.5'", "verify m --seq-len 1.5": "--seq-len is '1.5'",
    "launch --attention fast -- true": "--attention is 'fast'", "launch --chunk-sizes 8 -- true": "No such option",
    "launch --uninstall -- true": "run no command", "pla m": "Did you mean 'plan'",
    f"{PLAN} --encoder-len 0": "--encoder-len is '0'", f"{PLAN} --encoder-len 4.5": "such as 65536, 64k or 1M",
    f"{PLAN} --group x --prompt 4k": "--group is 'x'", f"{PLAN} --group 4 --prompt -1": "--prompt is '-1'",
    f"{PLAN} --batch-size 8 --mean-length 0": "--mean-length is '0'",
    f"{PLAN} --batch-size 8 --mean-length 4k": "needs --seq-len, the tokens of the longest row",
    f"{PLAN} --batch-size 8 --lengths absent": "Pass a file of whole numbers",
    f"{PLAN} --batch-size 1.5": "--batch-size is '1.5'", f"{PLAN} --lora 1.5": "a whole number from 1",
    f"{PLAN} --lora -4": "--lora is '-4'", f"{PLAN} --optimizer-bytes 2000": "from 0 to 1024",
    f"{PLAN} --optimizer-bytes adam": "--optimizer-bytes is 'adam'", f"{PLAN} --reserve x": "--reserve is 'x'",
    f"{PLAN} --ulysses x": "--ulysses is 'x'", f"{PLAN} --context-parallel 1.5": "--context-parallel is '1.5'",
    f"{PLAN} --host-memory nan": "--host-memory is 'nan'", f"{PLAN} --price inf": "--price is 'inf'",
    f"{PLAN} --dtype bf8": "--dtype is 'bf8'", "verify m --seq-len -1": "--seq-len is '-1'",
    "verify m --seq-len 2048M": "at most", "verify m --chunk-size x": "--chunk-size is 'x'",
    "verify m --seed 1.5": "--seed is '1.5'", "verify m --left-padding x": "--left-padding is 'x'",
    "verify m --layers 2": "Add --random", "verify m --random --layers 0": "--layers is '0'",
    "verify m --top few": "--top is 'few'", "verify m n": "unexpected extra argument(s) (n)",
    "verify https://example.com/a": "like https://huggingface.co/Qwen/Qwen3-8B", "profile": "PATH_OR_ID",
    "profile m --chunk-size 0": "--chunk-size is '0'", "profile m --dtype int4": "one of auto, float32",
    "profile m --saves kv@x": "saves names 'kv@x'", "profile m --html /nowhere/x.html": "Pass another file",
    "profile m --snapshot /nowhere/x.pickle": "--snapshot /nowhere/x.pickle cannot be written",
    "launch --saves kv@0 -- true": "saves names 'kv@0'", "launch --rows both -- true": "rows is 'both'",
    "launch --weights disk -- true": "weights is 'disk'", "launch --host-memory 64 -- true": "Write 64GiB",
    "launch --gpu-memory 8GiB -- true": "set --offload cpu or auto too", "launch --at once -- true": "at is 'once'",
    "launch --no-head --eval-logits -- true": "or set head=True", "launch --kernels fast -- true": "kernels is 'fast'",
    "env x": "unexpected extra argument(s) (x)", "env --jsn": "No such option: --jsn",
    "--verson": "No such option: --verson",
}  # fmt: skip
# In a process of its own: all lines, and that none of them has imported what takes seconds.
RUN_LINES = """
import contextlib, io, json, sys, time
start = time.process_time()
from streambp.cli import main
found = []
for line in json.loads(sys.argv[1]):
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        code = main(line.split())
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    found.append([line, code, said.getvalue(), len(printed.getvalue()), heavy])
print(json.dumps(found))
"""


def run_lines(lines):
    words = [sys.executable, "-W", "error::UserWarning", "-c", RUN_LINES, json.dumps(lines)]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANG)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.full
def test_each_bad_line_gets_one_line_and_needs_no_torch():
    results = run_lines(list(INVALID_VALUES))
    assert len(results) == len(INVALID_VALUES) >= 95
    for line, code, message, printed, heavy in results:
        assert (code, printed, heavy, message.count("\n")) == (2, 0, [], 1), line
        assert message.startswith("streambp"), line
        assert INVALID_VALUES[line] in message, line


def test_help_and_version_need_no_torch():
    lines = [
        "--help",
        "--version",
        *(f"{name} --help" for name in ("plan", "verify", "profile", "launch", "env")),
    ]
    for line, code, message, printed, heavy in run_lines(lines):
        assert (code, message, heavy) == (0, "", []), line
        assert printed


@pytest.mark.full
def test_help_pages_say_what_a_flag_takes():
    """A flag takes no value, and each setting has the words that its documentation begins with."""
    pages = {}
    for name in ("plan", "launch"):
        command = ["-c", "from streambp.cli import main; main()", name, "--help"]
        environment = {**os.environ, "COLUMNS": "400", "TERMINAL_WIDTH": "400"}
        result = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=True, env=environment
        )
        pages[name] = result.stdout
        assert not re.search("<bool>|BOOLEAN", result.stdout, re.IGNORECASE)
    assert re.search(r"--json +print JSON instead of tables", pages["plan"])
    assert re.search(r"--help +-h +Show", pages["plan"])
    assert "StreamConfig's" not in pages["launch"]
    assert re.search(
        "--attention +auto.cudnn.flash.math +the kernels of attention .default: 'auto'.",
        pages["launch"],
    )
    texts = argument_texts(StreamConfig.__doc__)
    for name in CONFIG_FIELDS:
        text = first_sentence(texts[name])
        assert len(text.split()) > 2
        assert text in pages["launch"], name


def test_the_environment_is_told(capsys):
    assert cli.main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["streambp"] == streambp.__version__
    assert facts["torch"] == importlib.metadata.version("torch")
    assert "attention in float32" in facts["devices"][0]
    assert cli.main(["env"]) == 0
    assert f"transformers: {facts['transformers']}" in capsys.readouterr().out


@pytest.mark.full
def test_what_other_libraries_print_goes_to_stderr(monkeypatch, tmp_path, capsys):
    load = AutoModelForCausalLM.from_pretrained

    def chatty(*args, **kwargs):
        print("loading...")
        return load(*args, **kwargs)

    build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", chatty)
    capsys.readouterr()
    assert cli.main(["verify", str(tmp_path), "--seq-len", "60", "--device", "cpu", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["exact"]
    assert "loading..." in printed.err


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path, capsys):
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    for command in (["plan", str(tmp_path), "--gpu-memory", "8GiB"], ["verify", str(tmp_path)]):
        assert cli.main(command) == 2
        assert "--trust-remote-code" in capsys.readouterr().err


NAME = re.compile(r"(?<![\w./-])streambp(?:\.[A-Za-z_]\w*)+")
# modules, by their own statements
IMPORT_LINE = re.compile(r"^\s*(?::::|from|import|python -m|.* -m) .*$", re.MULTILINE)


def written_names():
    """Dotted names of the package in its documentation, and in texts of its sources."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    # its entries speak of names that other entries replaced
    pages.remove(ROOT / "docs/changelog-for-developers.md")
    texts = [page.read_text("utf-8") for page in pages]
    for path in ROOT.glob("streambp/**/*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        strings = (
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        texts += [text for text in strings if " " in text]  # others are module names
    return sorted({name for text in texts for name in NAME.findall(IMPORT_LINE.sub("", text))})


def test_every_name_that_is_written_resolves_after_import_streambp_alone():
    """Modules of frameworks that are not installed are known by the one message."""
    program = (
        "import sys, json, streambp\nassert 'torch' not in sys.modules\nwrong = []\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    try:\n        eval(name, {'streambp': streambp})\n"
        "    except Exception as error:\n        wrong.append([name, type(error).__name__, "
        "str(error)])\nprint(json.dumps(wrong))"
    )
    names = written_names()
    assert len(names) > 5
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    wrong = json.loads(result.stdout.splitlines()[-1])
    assert [case for case in wrong if case[1] != "MissingLibraryError"] == []


@pytest.mark.parametrize("library", [*libraries.EXTRAS, *libraries.PROGRAM_DISTRIBUTIONS])
def test_a_library_that_is_not_installed_gets_the_one_message(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"^{library} is not installed. Install it: pip install "
    with (
        pytest.raises(MissingLibraryError, match=message) as error,
        libraries.require_library(library),
    ):
        importlib.import_module(library)
    requirement = str(error.value).rpartition(" ")[2].rstrip(".")
    if library in libraries.EXTRAS:
        text = (ROOT / "pyproject.toml").read_text("utf-8")
        assert requirement == f"'streambp-hf[{libraries.EXTRAS[library]}]'"
        assert re.search(rf"^{libraries.EXTRAS[library]} = \[", text, re.MULTILINE)


def test_another_librarys_absence_is_not_renamed(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets_of_nobody", None)
    with pytest.raises(ModuleNotFoundError) as error, libraries.require_library("trl"):
        importlib.import_module("datasets_of_nobody")
    assert not isinstance(error.value, MissingLibraryError)


@pytest.mark.parametrize("version", ["9.0.1", "2.16.0", "2.15.5+cu130", "2.11"])
def test_newer_releases_are_warned_of(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        libraries.warn_of_untested("torch")
    assert len(caught) == (version in ("9.0.1", "2.16.0"))
    assert not caught or "newer than 2.15" in str(caught[0].message)


def test_one_type_of_tokens_and_one_of_bytes():
    assert (
        streambp.StreamConfig(chunk_size="8k").chunk_size
        == parse_tokens("chunk_size", "8k")
        == 8192
    )
    assert parse_bytes("gpu_memory", "80G") == parse_bytes("gpu_memory", "80GiB") == 80 * 2**30
    with pytest.raises(ConfigError, match="Write 80GiB"):
        streambp.StreamConfig(offload="cpu", gpu_memory="80")


def test_what_the_package_does_not_have():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = streambp.nothing
    assert {"patch", "verify", "losses"} <= set(dir(streambp))
    assert issubclass(DeviceMemoryError, streambp.StreamBPError)
