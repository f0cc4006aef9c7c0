"""A warm step enters at most so many files and functions (scripts/step_files.py).

The counts in LIMITS are a ratchet: they fall with a change that merges or takes out code, and never
grow. A newer Python runs comprehensions without a call, so it may count fewer functions.

covers: layer/function.py
"""

from __future__ import annotations

import pytest

from scripts.step_files import SAVES, StepCalls, files_of, warm_step
from tests.versions import needs_counted_versions

# A step enters 65 functions before its first chunk, and up to four more in a process in which
# other tests have run: some caches are full there.
# files of a step; functions before the first chunk; files and functions of a gradient chunk
LIMITS = {
    "named": (41, 69, 15, 72),
    "auto": (46, 123, 18, 81),  # of a step that asks for the free memory again, as some do
}


@pytest.fixture(scope="module", params=list(LIMITS))
def step(request: pytest.FixtureRequest) -> tuple[str, StepCalls]:
    return request.param, warm_step(SAVES[request.param])


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
    assert all(found <= limit for found, limit in zip(counts, LIMITS[saves], strict=True)), counts


def test_the_parts_of_a_step_are_found(step: tuple[str, StepCalls]) -> None:
    """The limits hold for parts that exist: a renamed function must not make a part empty."""
    _, record = step
    before = record.before_first_chunk()
    chunk = record.gradient_chunk()
    assert ("layer/call.py", "LayerCall.__init__") in before
    assert ("layer/function.py", "_differentiated") in chunk
    assert ("attention/attend.py", "PrefixAttention.backward") in chunk
    assert len(before) + len(chunk) < len(record.calls)
