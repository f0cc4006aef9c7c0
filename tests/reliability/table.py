"""Prints what the tests of reliability tried, a line for each kind of trouble: `python -m
tests.reliability.table`.

Every line runs tests of the whole matrices, with the number of cases that they tried; arguments
choose lines by a part of their name. `--fast` runs the cases of the fast tier.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time

import pytest

TEST_FOLDER = "tests/reliability/"
STEPS = f"{TEST_FOLDER}test_interrupted_steps.py::"
INPUT = f"{TEST_FOLDER}test_hostile_input.py::"
ROWS = {
    "ranks that differ, against the unpatched engine": ["tests/distributed/test_engines.py"],
    "kill -9 of a rank in forward, backward, optimizer; resumed on two ranks and on one": [
        f"{TEST_FOLDER}test_killed_ranks.py"
    ],
    "OutOfMemoryError at an operation": [f"{STEPS}test_an_error_at_an_operation", "memory"],
    "KeyboardInterrupt at an operation": [f"{STEPS}test_an_error_at_an_operation", "interrupt"],
    "KeyboardInterrupt at any bytecode": [f"{STEPS}test_an_interrupt_at_any_bytecode"],
    "a user's hook raises": [f"{STEPS}test_a_users_hook_raises"],
    "unpatch, copies, pickles, state_dict and workers between": [f"{STEPS}test_what_programs_do_between"],
    "two threads and one model": [f"{TEST_FOLDER}test_threads.py"],
    "host memory that cannot be had": ["tests/offload/test_faults.py::test_host_memory_that_the_system_does_not_give"],
    "200 steps, then unpatch and del": [f"{TEST_FOLDER}test_long_runs.py"],
    "config.json": [f"{INPUT}test_hostile_input_is_refused_in_one_line_that_names_the_field", "configs"],
    "StreamConfig, DeepSpeed sections, launch settings": [
        f"{INPUT}test_hostile_input_is_refused_in_one_line_that_names_the_field", "settings",
    ],
    "rates files": [f"{INPUT}test_hostile_input_is_refused_in_one_line_that_names_the_field", "rates"],
    "report files": [f"{INPUT}test_hostile_input_is_refused_in_one_line_that_names_the_field", "reports"],
    "command lines": [f"{INPUT}test_command_lines_end_with_a_code_that_is_no_verdict"],
}  # fmt: skip


class CaseCounts:
    """What became of a line's tests: cases of those that passed, tests that failed, and were
    skipped."""

    def __init__(self) -> None:
        self.cases, self.failed, self.skipped = 0, list[str](), 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for each phase of a test."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.cases += int(dict(report.user_properties).get("cases", 1))


def main() -> int:
    """Run the lines; 1 if a test failed."""
    fast, words = (
        "--fast" in sys.argv[1:],
        [word for word in sys.argv[1:] if not word.startswith("-")],
    )
    code = 0
    logging.raiseExceptions = (
        False  # libraries log to streams that an earlier line's tests have closed
    )
    print(
        "| | cases as they should be | tests that failed | skipped | seconds "
        "|\n|---|---|---|---|---|",
        flush=True,
    )
    for name, (tests, *filters) in ROWS.items():
        if words and not any(word in name for word in words):
            continue
        counted, start = CaseCounts(), time.monotonic()
        flags = [
            "-q",
            "-m",
            "not full and not gpu" if fast else "not gpu",
            *(["-k", filters[0]] if filters else []),
        ]
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            pytest.main([*flags, tests], plugins=[counted])
        if counted.failed or not counted.cases:
            print(stdout.getvalue(), file=sys.stderr)
        failed = ", ".join(counted.failed) or "0"
        print(
            f"| {name} | {counted.cases} | {failed} | {counted.skipped} | "
            f"{time.monotonic() - start:.0f} |",
            flush=True,
        )
        code |= bool(counted.failed) or not counted.cases
    return code


if __name__ == "__main__":
    sys.exit(main())
