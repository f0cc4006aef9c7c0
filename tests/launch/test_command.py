"""What the command does with programs, whatever they train: environment, exit codes, signals, the
placed file.

covers: cli/runs.py, launch/command.py, launch/hook.py, launch/hook_file.py, launch/report.py,
launch/settings.py
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from streambp.cli import main
from streambp.config import StreamConfig
from streambp.errors import ConfigError
from streambp.launch import command
from streambp.launch.command import ALLOW_UNPATCHED_OPTION, EXIT_UNPATCHED, environment, split
from streambp.launch.hook import SETTINGS_VARIABLE
from streambp.launch.hook_file import install_hook, remove
from streambp.launch.report import ModelRecord, ProcessRecord, collect, table, write_record
from streambp.launch.settings import LaunchSettings, settings_from_fields
from tests.hangs import HANG

OTHER_COMMANDS = {
    "attention": "math", "eval_logits": True, "offload": "cpu", "host_memory": 2**30, "gpu_memory": 2**20,
    "on_host_full": "raise", "chunk_size": 100, "saves": ("attn_out", "mlp.*"), "lazy_logits": False,
    "documents": "as_given", "kernels": "liger", "rows": "packed", "unpatched_runs": False,
    "weights": "cpu", "compare_backward": False, "towers": True,
}  # fmt: skip
FLAGS = [
    "--attention", "math", "--eval-logits", "--offload", "cpu", "--host-memory", "1GiB",
    "--gpu-memory", "1MiB", "--on-host-full", "raise", "--chunk-size", "100", "--saves", "attn_out,mlp.*", "--at", "train",
    "--no-lazy-logits", "--documents", "as_given", "--kernels", "liger", "--rows", "packed", "--no-unpatched-runs",
    "--weights", "cpu", "--no-compare-backward", "--towers",
]  # fmt: skip


def launch(*words):
    return main(["launch", "--", *map(str, words)])


def program(tmp_path, text):
    file = tmp_path / "program.py"
    file.write_text(text)
    return file


def test_every_setting_is_a_flag_and_reaches_the_program(capfd):
    """A new field of StreamConfig needs a value here that is not launch's default."""
    names = {field.name for field in dataclasses.fields(StreamConfig)}
    assert {
        *OTHER_COMMANDS,
        "head",
        "share_prefixes",
    } == names  # no logits are lazy without the one; the other is a former name
    code = f"import os; print(os.environ[{SETTINGS_VARIABLE!r}])"
    assert main(["launch", ALLOW_UNPATCHED_OPTION, *FLAGS, "--", sys.executable, "-c", code]) == 0
    assert settings_from_fields(json.loads(capfd.readouterr().out)) == LaunchSettings(
        StreamConfig(**OTHER_COMMANDS), "train"
    )
    assert LaunchSettings().to_json() == "{}"
    assert settings_from_fields({}).config == StreamConfig(lazy_logits=True, rows="auto")
    assert (
        main(["launch", ALLOW_UNPATCHED_OPTION, "--no-head", "--", sys.executable, "-c", code]) == 0
    )
    assert settings_from_fields(json.loads(capfd.readouterr().out)) == LaunchSettings(
        StreamConfig(head=False, rows="auto")
    )


def test_only_the_first_two_dashes_are_ours():
    assert split(["launch", "--at", "train", "--", "accelerate", "--", "x"]) == (
        ["launch", "--at", "train"],
        ["accelerate", "--", "x"],
    )
    assert split(["verify", "--", "x"]) == (["verify", "--", "x"], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunk-size", "0", "--", "true"], "--chunk-size is '0'"),
        (["--attention", "fast", "--", "true"], "attention is 'fast'"),
        ([], "no command to run"),
        (["true"], "'true' is no flag of streambp launch. Write the command to run after --"),
        (["--"], "no command to run"),
        (["--uninstall", "--", "true"], "run no command"),
    ],
)
def test_a_command_that_cannot_be_run(arguments, message, capsys):
    assert main(["launch", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [{"chunksize": 5}, {"at": "loop"}, {"saves": "kv"}, {"head": False, "lazy_logits": True}],
)
def test_settings_that_cannot_be(fields):
    with pytest.raises(ConfigError):
        settings_from_fields(fields)


def test_exit_codes(tmp_path, capfd):
    python = sys.executable
    assert launch(python, "-c", "raise SystemExit(7)") == 7
    assert launch(python, "-c", "import os; os.kill(os.getpid(), 9)") == 128 + 9
    assert launch(tmp_path / "nothing") == 127
    assert launch(program(tmp_path, "")) == 126
    capfd.readouterr()
    assert launch(python, "-I", "-c", "") == EXIT_UNPATCHED
    assert "no model was patched" in capfd.readouterr().err
    assert main(["launch", ALLOW_UNPATCHED_OPTION, "--", python, "-c", ""]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals and fork")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_program(number, tmp_path):
    text = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(9))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)"
    )
    command = (sys.executable, program(tmp_path, text))
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(launch(*command)))
    process.start()
    try:
        waited = time.monotonic()
        while not (tmp_path / "ready").exists() and time.monotonic() - waited < HANG:
            time.sleep(0.02)
        os.kill(process.pid, number)
        process.join(HANG)
        assert process.exitcode == 9
    finally:
        process.kill()


def test_a_signal_that_comes_before_the_program_runs_reaches_it(monkeypatch):
    real = subprocess.Popen

    def start_late(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    assert launch(sys.executable, "-S", "-c", "import time; time.sleep(3)") == 128 + signal.SIGTERM


INSPECTION_SCRIPT = (
    "import multiprocessing, sys\n"
    "def look(queue):\n"
    "    hooks = sum(hasattr(f, 'streambp_launch') for f in sys.meta_path)\n"
    "    queue.put([hooks, 'torch' in sys.modules, "
    "sys.modules.get('sitecustomize').__dict__.get('HIDDEN')])\nif __name__ == '__main__':\n    "
    "queue = multiprocessing.get_context('spawn').SimpleQueue()\n    look(queue)\n    "
    "print(queue.get())\n    child = multiprocessing.get_context('spawn').Process(target=look, "
    "args=(queue,))\n    child.start(); child.join(); print(queue.get())\n"
)


def test_the_hook_is_in_every_process_and_hides_no_sitecustomize(tmp_path, monkeypatch, capfd):
    """Spawned ones too; torch is not imported."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("HIDDEN = 'found'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    assert (
        main(
            [
                "launch",
                ALLOW_UNPATCHED_OPTION,
                "--",
                sys.executable,
                str(program(tmp_path, INSPECTION_SCRIPT)),
            ]
        )
        == 0
    )
    assert capfd.readouterr().out.splitlines() == ["[1, False, 'found']"] * 2


def test_the_placed_file(tmp_path):
    """Without the variable no module is imported that is not there without the file; with it the
    hook, even under -I."""
    venv.create(tmp_path / "v", with_pip=False, symlinks=os.name != "nt")
    python = tmp_path / "v" / ("Scripts" if os.name == "nt" else "bin") / "python"
    folder = next((tmp_path / "v").rglob("site-packages"))
    # from 3.13 on the first such file of an environment imports its encoding
    (folder / "other.pth").write_text("\n")
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("STREAMBP", "PYTHON"))
    }

    def modules(variables, *flags):
        code = (
            "import sys; print([any(hasattr(f, 'streambp_launch') for f in sys.meta_path), 'torch' "
            "in sys.modules])"
        )
        command = [python, *flags, "-X", "importtime", "-c", code]
        result = subprocess.run(
            command, env={**plain, **variables}, capture_output=True, text=True, check=True
        )
        return {
            line.rpartition("|")[2].strip() for line in result.stderr.splitlines()
        }, result.stdout.strip()

    modules_before = modules({})
    assert modules_before[1] == "[False, False]"
    file = install_hook(folder)
    assert modules({}) == modules_before
    assert modules({SETTINGS_VARIABLE: "{}"}, "-I")[1] == "[True, False]"
    assert remove(folder) == file
    assert modules({SETTINGS_VARIABLE: "{}"}) == modules_before
    assert remove(folder) is None


def test_installing_by_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("streambp.launch.hook_file.sysconfig.get_path", lambda name: str(tmp_path))
    assert main(["launch", "--chunk-size", "9", "--install"]) == 0
    (file,) = tmp_path.iterdir()
    output = capsys.readouterr().out
    assert str(file) in output
    assert f"""{SETTINGS_VARIABLE}='{{"chunk_size": 9}}'""" in output
    assert main(["launch", "--uninstall"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert main(["launch", "--uninstall"]) == 0
    assert "No file was placed" in capsys.readouterr().out
    monkeypatch.setattr(
        "streambp.launch.hook_file.sysconfig.get_path", lambda name: str(tmp_path / "nowhere")
    )
    assert main(["launch", "--install"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_launch_and_the_placed_file_make_one_hook(tmp_path):
    variables = environment(LaunchSettings(), str(tmp_path))
    install_hook(tmp_path)
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r})\n"
    code += "print(sum(hasattr(f, 'streambp_launch') for f in sys.meta_path))"
    result = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "1"


def test_settings_that_are_no_json_stop_the_program_that_needs_them(tmp_path, monkeypatch):
    from streambp.launch.hook import read

    monkeypatch.setenv(SETTINGS_VARIABLE, "8192")
    with pytest.raises(ValueError, match="must be a JSON object"):
        read()


def test_a_launch_in_a_launch_tells_the_outer_one(tmp_path, monkeypatch, capfd):
    account = {
        "process": 11,
        "rank": None,
        "program": "train.py",
        "models": [{"kind": "A", "description": "streams"}],
    }
    leaving = f"""
import json, os
with open(os.path.join(os.environ["STREAMBP_LAUNCH_REPORT"], "11.json"), "w") as file:
    json.dump({account!r}, file)
"""
    monkeypatch.setenv("STREAMBP_LAUNCH_REPORT", str(tmp_path))
    assert launch(sys.executable, "-c", leaving) == 0
    assert table(collect(tmp_path)[0]).splitlines()[1:] == [
        "  program     train.py",
        "  model       A, patched",
        "  streams",
    ]


def test_processes_that_did_the_same_are_told_of_together(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMBP_LAUNCH_REPORT", str(tmp_path))
    models = [
        ModelRecord("A", "layers  streams"),
        ModelRecord("A", "layers  streams"),
        ModelRecord("B", left="why"),
    ]
    for process, rank in ((11, "1"), (12, "0")):
        assert write_record(
            ProcessRecord(process, rank, "train.py", models, 2**30 * (2 - int(rank)))
        )
    assert [Path(f).suffix for f in os.listdir(tmp_path)] == [".json", ".json"]
    assert table(collect(tmp_path)[0]).splitlines() == [
        "process 12 (rank 0), peak memory 2.00 GiB; process 11 (rank 1), peak memory 1.00 GiB",
        "  program     train.py",
        "  model       2 x A, patched",
        "  layers  streams",
        "  model       B, left as it was: why",
    ]
    monkeypatch.setenv("STREAMBP_LAUNCH_REPORT", str(tmp_path / "elsewhere"))
    assert not write_record(ProcessRecord(13, None, "train.py", models))


ACCOUNT = {
    "process": 11,
    "rank": "0",
    "program": "train.py",
    "models": [{"kind": "A", "description": "streams"}],
}


def leaves(tmp_path, files, code):
    """A program that leaves files where accounts are looked for; None: it removes the folder."""
    return program(
        tmp_path,
        f"""
import os, shutil, sys
folder = os.environ["STREAMBP_LAUNCH_REPORT"]
for name, text in ({files!r} or {{}}).items():
    with open(os.path.join(folder, name), "wb") as file:
        file.write(text)
if {files is None}:
    shutil.rmtree(folder)
sys.exit({code})
""",
    )


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"11.json": json.dumps({**ACCOUNT, "rank": "worker-0"}).encode()},
            "process 11 (rank worker-0)",
        ),
        ({"11.json": json.dumps({**ACCOUNT, "rank": "9" * 5000}).encode()}, "process 11 (rank 999"),
        (
            {"11.json": json.dumps(ACCOUNT).encode()[:40]},
            "what process 11 did could not be told (JSONDecodeError",
        ),
        ({"11.json": b""}, "what process 11 did could not be told"),
        ({"11.json": b"\xff\xfe"}, "what process 11 did could not be told (UnicodeDecodeError"),
        ({"11.json": b"[]"}, "what process 11 did could not be told (TypeError"),
        ({"11.json": b"[" * 100_000}, "what process 11 did could not be told (RecursionError"),
        (
            {"11.json": json.dumps({**ACCOUNT, "models": [{"kind": 3}]}).encode()},
            "(ConfigError: kind is 3; it must be",
        ),
        ({"11.json": json.dumps({**ACCOUNT, "peak": "x"}).encode()}, "(ConfigError: peak is 'x'"),
        ({"11.json": json.dumps({**ACCOUNT, "surplus": 1}).encode()}, "surplus"),
        (None, "no account can be left in"),
    ],
)
def test_no_account_changes_an_exit_code(files, words, code, tmp_path, capfd):
    assert launch(sys.executable, leaves(tmp_path, files, code)) == code
    stderr = capfd.readouterr().err
    assert words in stderr
    assert "Traceback" not in stderr


def test_a_good_account_counts_beside_a_bad_one(tmp_path, capfd):
    files = {"11.json": json.dumps(ACCOUNT).encode(), "12.json": b"{"}
    assert launch(sys.executable, leaves(tmp_path, files, 0)) == 0
    assert "A, patched" in capfd.readouterr().err


@pytest.mark.parametrize("broken", ["collect", "table", "judge"])
def test_a_report_that_fails_leaves_the_exit_code(broken, tmp_path, monkeypatch, capfd):
    def fails(*_):
        raise OSError("no such thing")

    monkeypatch.setattr(command, broken, fails)
    assert (
        launch(sys.executable, leaves(tmp_path, {"11.json": json.dumps(ACCOUNT).encode()}, 3)) == 3
    )
    assert "could not be told (OSError: no such thing)" in capfd.readouterr().err


def test_without_a_temporary_folder_a_program_runs(tmp_path, monkeypatch, capfd):
    def mkdtemp(**_):
        raise OSError("no usable temporary directory")

    (tmp_path / "11.json").write_text("{")  # is nobody's account
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.tempfile, "mkdtemp", mkdtemp)
    assert launch(sys.executable, "-c", "import sys; sys.exit(5)") == 5
    assert "could not be told (OSError: no usable temporary directory)" in capfd.readouterr().err


def test_a_program_with_a_nul_byte(capfd):
    assert launch("a\0b") == 126
    assert "cannot be run" in capfd.readouterr().err


def test_nothing_more_is_said_of_a_program_that_did_not_start(capfd):
    """What its processes did is no question then."""
    assert launch("no-such-program") == 127
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("streambp: 'no-such-program' cannot be run: ")
