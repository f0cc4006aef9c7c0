"""A first step says on a terminal what takes long. Off a terminal, and on other ranks, it is quiet.

covers: progress.py, admission/entry.py, offload/engines.py, planner/survey.py
"""

from __future__ import annotations

import contextlib
import io
import os
import types

import pytest
import torch
from torch import distributed

import streambp
from streambp import progress
from streambp.offload import engines, free_memory
from streambp.offload.engines import AcceleratorEngine
from streambp.planner import stored_counts
from streambp.progress import ERASE, progress_line
from tests.families import build
from tests.offload.runs import step


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """What the module takes for standard error. pytest replaces the real one between phases."""
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))
    monkeypatch.delenv("RANK", raising=False)
    return stream


def lines(stream):
    """The lines that a stream got, each of which was erased."""
    parts, messages = stream.getvalue().split(ERASE), []
    assert parts[0] == parts[-1] == ""
    for text, gap in zip(parts[1:-1:2], parts[2::2], strict=True):
        assert gap == ""
        assert text.startswith("streambp: ")
        assert text.endswith("\r")
        assert len(text) < 80
        messages.append(text.removeprefix("streambp: ").removesuffix("\r"))
    return messages


def first_step(monkeypatch, tmp_path):
    """The first step of a model on a device whose free memory is known."""
    monkeypatch.setattr(stored_counts, "folder", lambda: tmp_path / "plans")
    monkeypatch.setattr(free_memory, "free_memory", lambda device: 2**31)
    model = build("qwen3", dtype=torch.bfloat16, num_hidden_layers=2)
    streambp.patch(model, streambp.StreamConfig(unpatched_runs=False))
    step(model)
    return model


def test_a_first_step_tells_what_it_does(terminal, monkeypatch, tmp_path):
    """The next step and the next process, which reads the count, tell less."""
    model = first_step(monkeypatch, tmp_path)
    assert lines(terminal) == ["counting a step", "trying layer 1 of 2", "trying layer 2 of 2"]
    terminal.truncate(0)
    terminal.seek(0)
    step(model)
    assert terminal.getvalue() == ""
    first_step(monkeypatch, tmp_path)
    assert lines(terminal) == ["trying layer 1 of 2", "trying layer 2 of 2"]


def test_the_number_of_layers_is_left_out_if_unknown(terminal):
    model = streambp.patch(
        build("qwen3", num_hidden_layers=1), streambp.StreamConfig(chunk_size=5, saves=())
    )
    step(model)
    assert lines(terminal) == ["trying layer 1"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(36 * 2**30, ["pinning 36 GiB, about 11 s"]), (2**30, ["pinning 1 GiB, about 1 s"]), (2**29, [])],
)  # fmt: skip
def test_pinning_tells_its_size_and_seconds(size, expected, terminal, monkeypatch):
    engine = object.__new__(AcceleratorEngine)
    engine.pinned, engine._first, engine.device = True, None, torch.device("meta")
    allocations = []
    monkeypatch.setattr(
        engines.torch,
        "empty",
        lambda size, **kwargs: allocations.append((size, kwargs["pin_memory"])),
    )
    engine.host_buffer(size)
    assert allocations == [(size, True)]
    assert lines(terminal) == expected
    engine.pinned = False
    monkeypatch.setattr(engines.torch, "empty", lambda size, **kwargs: None)
    engine.host_buffer(size)
    assert lines(terminal) == expected


def off_terminal(patch):
    patch.setattr(Terminal, "isatty", lambda self: False)


def other_rank(patch):
    patch.setenv("RANK", "1")


def other_rank_without_a_variable(patch):
    patch.setattr(distributed, "is_initialized", lambda: True)
    patch.setattr(distributed, "get_rank", lambda: 1)


def no_stream(patch):
    patch.setattr(progress.sys, "stderr", None)


def closed(patch):
    stream = Terminal()
    stream.close()
    patch.setattr(progress.sys, "stderr", stream)


SILENT_CASES = (off_terminal, other_rank, other_rank_without_a_variable, no_stream, closed)


@pytest.mark.parametrize("why", SILENT_CASES)
def test_a_step_is_quiet_where_nobody_looks(why, terminal):
    with pytest.MonkeyPatch.context() as patch:
        why(patch)
        with progress_line("counting"):
            pass
    assert terminal.getvalue() == ""


def test_a_terminal_that_goes_away_ends_no_step(terminal, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as stream:
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with progress_line("counting"):
            finished = True
    assert finished


def test_an_error_inside_is_raised_and_the_line_is_erased(terminal):
    with pytest.raises(KeyError), progress_line("counting"):
        raise KeyError
    assert lines(terminal) == ["counting"]


MUTANTS = {
    "rank": ("_is_first_rank", lambda: True, other_rank),
    "ranks without a variable": (
        "_is_first_rank",
        lambda: os.environ.get("RANK", "0") == "0",
        other_rank_without_a_variable,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(mutant, terminal, monkeypatch):
    name, value, why = MUTANTS[mutant]
    monkeypatch.setattr(progress, name, value)
    with pytest.raises(AssertionError):
        test_a_step_is_quiet_where_nobody_looks(why, terminal)
