"""Runs a page as its reader does: writes its files, runs its programs and commands, with the
stand-ins of `stand_ins`."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import streambp
from streambp import cli
from streambp.cli.commands import parse
from tests.docs import stand_ins
from tests.docs.pages import ROOT, Block, blocks, commands, unfolded, words
from tests.hangs import HANG

EXECUTED, RANKS, PARSED = "executed", "on two CPU ranks", "checked, not run"
# Commands that are not run, each with its reason; what can be judged of them is.
NOT_RUN = {
    "pip": "would change the tests' environment: its extras are looked up",
    "axolotl": "is not installed: the YAML's section is read by StreamConfig",
    "bash": "is the README's set-up and test command: tests/packaging looks at both",
    "streambp launch --install": "would change the tests' environment",
    "streambp launch --uninstall": "would change the tests' environment",
    "trl": "needs the installed hook: `streambp launch -- trl` runs the same",
}
FOREIGN_FILES = ("run_clm.py", "x.yaml", "loop.py", "finetune.py")


class PageError(AssertionError):
    """A block or a command of a page did not do what the page says."""


@dataclasses.dataclass
class Runner:
    """Of one page, in a folder of its own."""

    page: str
    folder: Path  # where its files are
    stand_in_folder: Path  # checkpoints and data
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def run(self) -> Counter[str]:
        """All blocks, in order.

        Raises:
            PageError: one of them failed.
        """
        namespace: dict[str, Any] = {"__name__": "page"}
        with self.inside():
            for block in blocks(self.page):
                how = self._block(block, namespace)
                self.counts[f"{block.language} blocks, {how}"] += 1
        return self.counts

    def _block(self, block: Block, namespace: dict[str, Any]) -> str:
        match block.language:
            case "python" if block.title:
                (self.folder / block.title).write_text(
                    stand_ins.python(block.text, self.stand_in_folder)
                )
            case "python":
                code = compile(
                    stand_ins.python(block.text, self.stand_in_folder), str(block), "exec"
                )
                self._fill(namespace, code.co_names)
                exec(code, namespace)
            case "bash":
                for command in commands(block):
                    self.counts[f"commands, {self._command(command, block)}"] += 1
            case "json" if block.title:
                (self.folder / block.title).write_text(stand_ins.deepspeed(block.text))
            case "yaml" if block.title:
                check_yaml(block)
                return PARSED
            case _:
                raise PageError(
                    f"{block}: a {block.language or 'nameless'} block without a title cannot be run"
                )
        return EXECUTED

    def _fill(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        """`model` and `input_ids`, which blocks may use: a small model on a CPU, and two rows of
        tokens."""
        import torch
        from transformers import AutoModelForCausalLM

        if "model" in names and "model" not in namespace:
            namespace["model"] = AutoModelForCausalLM.from_pretrained(
                self.stand_in_folder / stand_ins.CHECKPOINTS[0]
            ).train()
        if "input_ids" in names and "input_ids" not in namespace:
            namespace["input_ids"] = torch.randint(5, 990, (2, 96))
        if "labels" in names and "labels" not in namespace and "input_ids" in namespace:
            namespace["labels"] = namespace["input_ids"]

    def _command(self, command: str, block: Block) -> str:
        environment, words_of_command = words(command)
        if reason := not_run(words_of_command):
            check_unrun(words_of_command, reason, block)
            return PARSED
        expected = (
            int(code[1])
            if (code := re.search(r"# exit code (\d+)", line_of(block, command)))
            else 0
        )
        words_of_command = [
            stand_ins.substituted(word, self.stand_in_folder)
            for word in stand_ins.ranks(words_of_command)
        ]
        if words_of_command[0] == "streambp" and words_of_command[1] != "launch":
            self._ours(words_of_command[1:], expected, block)
            return EXECUTED
        if words_of_command[0] == "python":
            self._script(words_of_command[1:], block)
            return EXECUTED
        how = RANKS if "torchrun" in words_of_command else EXECUTED
        self.process(words_of_command, environment, block)
        return how

    def _ours(self, arguments: list[str], expected: int, block: Block) -> None:
        """A command of streambp, in this process."""
        if arguments[0] == "plan":  # of the real sizes: a plan has to fit, or not, as the page says
            sizes = {
                str(self.stand_in_folder / name): str(self.stand_in_folder / size)
                for name, size in stand_ins.CHECKPOINT_SIZES.items()
            }
            arguments = [sizes.get(word, word) for word in arguments]
        elif "--seq-len" in arguments:
            arguments[arguments.index("--seq-len") + 1] = "96"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = cli.main(arguments)
        print(printed.getvalue())
        if code != expected:
            raise PageError(
                f"{block}: streambp {' '.join(arguments)} ended with {code}; the page says "
                f"{expected}"
            )
        check_shown(block, printed.getvalue())

    def _script(self, arguments: list[str], block: Block) -> None:
        """A Python program, in this process: its imports are there."""
        previous_arguments, sys.argv = sys.argv, arguments
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        finally:
            sys.argv = previous_arguments
            forget_engines()

    def process(self, command: list[str], environment: dict[str, str], block: Block) -> str:
        """A command of another program, in a process of its own; what it printed."""
        at = command.index("--") + 1 if "--" in command else 0
        if command[at] == "torchrun":
            command[at : at + 1] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        elif command[at] == "trl":
            command[at : at + 1] = [sys.executable, "-m", "trl.cli.main"]
            command += [
                "--use_cpu",
                "--bf16",
                "false",
                "--dtype",
                "float32",
                "--max_steps",
                "2",
                "--report_to",
                "none",
            ]
            command += ["--max_length", "64", "--per_device_train_batch_size", "2"]
        if command[0] == "streambp":
            command[:1] = [sys.executable, "-m", "streambp"]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            **environment,
        }
        variables |= {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        variables.pop("ACCELERATE_USE_CPU", None)  # it would mean DDP
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG,
        )
        if result.returncode:
            raise PageError(
                f"{block}: {' '.join(command)} ended with "
                f"{result.returncode}\n{result.stderr[-4000:]}"
            )
        return result.stdout

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        previous_folder = Path.cwd()
        os.chdir(self.folder)
        try:
            yield
        finally:
            os.chdir(previous_folder)


def check_shown(block: Block, printed: str) -> None:
    """That a command printed the lines which the page shows of it: whole ones, or as far as
    "..."."""
    lines = printed.splitlines()
    for expected in unfolded(block.expected_output):
        start = expected.removesuffix("...")
        if expected not in lines and (
            start == expected or not any(line.startswith(start) for line in lines)
        ):
            raise PageError(f"{block}: the page shows {expected!r}, which was not printed")


def line_of(block: Block, command: str) -> str:
    """A command, joined where it goes on, with its comment."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    return next((line for line in lines if command in line), command)


def not_run(command: list[str]) -> str | None:
    """Why a command is not run; None if it is."""
    if (
        any(word.rpartition("/")[2] in FOREIGN_FILES for word in command[1:])
        and command[0] != "torchrun"
    ):
        return "is a program of others that is not here: its flags before -- are parsed"
    names = (command[0], " ".join(command[:3]))
    return next((NOT_RUN[name] for name in names if name in NOT_RUN), None)


def check_unrun(command: list[str], reason: str, block: Block) -> None:
    """Of a command that is not run: that its flags are known, its extras exist."""
    if command[0] == "streambp":
        parse(command[1:])
    elif command[0] == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(command))
        text = (ROOT / "pyproject.toml").read_text("utf-8")
        for extra in ",".join(extras).split(",") if extras else ():
            if not re.search(rf"^{extra} = \[", text, re.MULTILINE):
                raise PageError(f"{block}: pyproject.toml has no extra {extra}")


def check_yaml(block: Block) -> None:
    """Of axolotl's configuration: that it is YAML, and that its section is one."""
    import yaml

    settings = yaml.safe_load(block.text)
    streambp.StreamConfig(**settings["streambp"])


def forget_engines() -> None:
    """accelerate keeps the first settings of a process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def count(page: str) -> Counter[str]:
    """How a page's blocks and commands would be run, without running them."""
    counts: Counter[str] = Counter()
    for block in blocks(page):
        if block.language != "bash":
            counts[
                f"{block.language} blocks, {PARSED if block.language == 'yaml' else EXECUTED}"
            ] += 1
            if block.language == "python":
                ast.parse(block.text)
            continue
        counts[f"bash blocks, {EXECUTED}"] += 1
        for command in commands(block):
            _, words_of_command = words(command)
            how = (
                PARSED
                if not_run(words_of_command)
                else RANKS
                if "torchrun" in words_of_command
                else EXECUTED
            )
            counts[f"commands, {how}"] += 1
    return counts
