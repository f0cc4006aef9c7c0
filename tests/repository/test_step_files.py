"""A warm step enters at most so many files and functions (scripts/step_files.py).

The counts in LIMITS are a ratchet: they fall with a change that merges or takes out code, and never
grow. Comprehensions are not counted: newer versions of Python run them without a call.

covers: layer/function.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.step_files import StepCalls, files_of
from tests.versions import needs_counted_versions

ROOT = Path(__file__).parents[2]
# files of a step; functions before the first chunk; files and functions of a gradient chunk
LIMITS = {
    "named": (41, 65, 15, 68),
    "auto": (46, 109, 18, 75),
}


@pytest.fixture(scope="module", params=list(LIMITS))
def step(request: pytest.FixtureRequest) -> tuple[str, StepCalls]:
    """A warm step in a process of its own: a process in which other tests have run has other
    caches, and then a step enters up to five functions more."""
    command = [sys.executable, "-m", "scripts.step_files", "--saves", request.param, "--json"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    record = StepCalls(ROOT)
    record.calls = [(file, name) for file, name in json.loads(process.stdout)]
    return request.param, record


@needs_counted_versions
def test_a_step_enters_no_more_files_and_functions_than_before(step: tuple[str, StepCalls]) -> None:
    saves, record = step
    chunk = record.gradient_chunk()
    counts = (
        files_of(record.calls),
        len(set(record.before_first_chunk())),
        files_of(chunk),
        len(set(chunk)),
    )
    assert all(count <= limit for count, limit in zip(counts, LIMITS[saves], strict=True)), counts


def test_the_parts_of_a_step_are_found(step: tuple[str, StepCalls]) -> None:
    """The limits hold for parts that exist: a renamed function must not make a part empty."""
    _, record = step
    first_calls = record.before_first_chunk()
    chunk = record.gradient_chunk()
    assert ("layer/call.py", "LayerCall.__init__") in first_calls
    assert ("layer/function.py", "_differentiate") in chunk
    assert ("attention/attend.py", "PrefixAttention.backward") in chunk
    assert len(first_calls) + len(chunk) < len(record.calls)
