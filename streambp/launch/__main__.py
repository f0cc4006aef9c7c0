"""`python -m streambp.launch [flags] script.py ...`: the hook in this process alone, for torchrun and accelerate launch.

torchrun --nproc-per-node 8 -m streambp.launch --chunk-size 8192 run_clm.py ...
python -m streambp.launch -m a_package.train ...
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from streambp.errors import StreamBPError
from streambp.launch.command import add_allowed, judge
from streambp.launch.hook import VARIABLE, Hook, install
from streambp.launch.report import streamed
from streambp.launch.settings import add_flags, from_flags
from streambp.reporting import told

FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script as `python` would; its exit code, or that no model was patched."""
    parser = argparse.ArgumentParser(
        prog="python -m streambp.launch", description="Run a training script with its models patched."
    )
    add_flags(parser)
    add_allowed(parser)
    parser.add_argument("-m", dest="as_module", action="store_true", help="what follows is a module's name")
    parser.add_argument("script", help="and its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    try:
        os.environ[VARIABLE] = from_flags(given).to_json()
    except StreamBPError as error:
        print(f"streambp: launch: {error}", file=sys.stderr)
        return FAILED
    hook: Hook = install()
    sys.argv[:] = [given.script, *given.arguments]
    code = 0
    try:
        if given.as_module:
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = os.path.dirname(os.path.abspath(given.script))  # it was the working directory, for our own -m
            runpy.run_path(given.script, run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    return told(lambda: judge(code, streamed([hook.launched.account()]), given.allow_unpatched), otherwise=lambda why: code)


if __name__ == "__main__":
    sys.exit(main())
