"""Interrupts at each place at which Python handles signals, one place at a time.

Python runs a signal's handler at the beginning of a function of Python code, after a call, and at
the jump back of a loop. Ctrl-C therefore raises at these places, and at no other.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import Counter
from pathlib import Path

import streambp

PACKAGE = str(Path(streambp.__file__).parent)
LOOPS_BACK = (
    "JUMP_BACKWARD",
    "JUMP_ABSOLUTE",
    "POP_JUMP_BACKWARD_IF_TRUE",
    "POP_JUMP_BACKWARD_IF_FALSE",
)


@functools.cache
def signal_offsets(code):
    """Return the offsets of the bytecodes before which Python handles signals.

    A call handles signals itself. So the bytecode after a call is left out if the call has another
    exception handler, because an error raised there would miss the call's handler.
    """
    entries = getattr(dis.Bytecode(code), "exception_entries", ())

    def handler(offset):
        return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)

    offsets, call = set(), None
    for instruction in dis.get_instructions(code):
        if call is not None and handler(call) == handler(instruction.offset):
            offsets.add(instruction.offset)
        starts = instruction.opname.startswith("CALL") or instruction.opname == "RESUME"
        call = instruction.offset if starts else None
        if instruction.opname in LOOPS_BACK:
            offsets.add(instruction.argval)
    return offsets


class Interrupt(contextlib.AbstractContextManager):
    """Context manager that raises KeyboardInterrupt at one place of streambp's code, once, and counts
    how often each place was reached.

    Args:
        place: a code object and an offset; None: only count.
        occurrence: raise when the place is reached for the n-th time.
    """

    def __init__(self, place=None, occurrence=1):
        self.place, self.occurrence = place, occurrence
        self.counts = Counter()
        self.raised = False

    def __enter__(self):
        self.previous_trace = sys.gettrace()
        sys.settrace(self._trace_call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.previous_trace)

    def _trace_call(self, frame, event, argument):
        filename = frame.f_code.co_filename
        if not filename.startswith(PACKAGE) and filename != contextlib.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace_opcode

    def _trace_opcode(self, frame, event, argument):
        if event == "opcode" and frame.f_lasti in signal_offsets(frame.f_code):
            place = frame.f_code, frame.f_lasti
            self.counts[place] += 1
            if place == self.place and self.counts[place] == self.occurrence:
                self.raised = True
                raise KeyboardInterrupt
        return self._trace_opcode
