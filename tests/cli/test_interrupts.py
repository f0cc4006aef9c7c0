"""Ctrl-C: one line and exit code 130 for a command of ours, and a launched program's own words.

covers: cli/__init__.py, cli/commands.py, arguments.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.hangs import HANG

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
# A command's process, whose import of one module is interrupted. Its parent may ignore SIGINT.
INTERRUPTED_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from streambp.cli import main
sys.exit(main(sys.argv[2:]))
"""
LAUNCHING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from streambp.cli import main
sys.exit(main(sys.argv[1:]))
"""
WAITING = "import time; print('waits', flush=True); time.sleep(600)"
PLAN = ("plan", "m", "--gpu-memory", "8GiB")


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typer", PLAN),
        ("huggingface_hub.dataclasses", ("launch", "--", "true")),
        ("torch.nn", PLAN),
        ("transformers", ("verify", "m")),
        ("streambp.cli.profile_page", ("env",)),
    ],
)
def test_an_interrupt_is_one_line(module, words):
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_a_launched_program_keeps_its_own_words():
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHING, "launch", "--", sys.executable, "-c", WAITING],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.startswith("Traceback (most recent call last):")
    assert "\nKeyboardInterrupt\n" in errors
    assert "\ninterrupted\n" not in errors
