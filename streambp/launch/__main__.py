"""`python -m streambp.launch [flags] script.py ...`: install the hook in this process alone.

For torchrun and accelerate launch:

    torchrun --nproc-per-node 8 -m streambp.launch --chunk-size 8192 run_clm.py ...
    python -m streambp.launch -m a_package.train ...
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from streambp.arguments import parse_command_line
from streambp.errors import StreamBPError
from streambp.launch.command import judge
from streambp.launch.hook import SETTINGS_VARIABLE, ImportHook, install
from streambp.launch.report import count_patched_models
from streambp.launch.settings import AllowUnpatched, add_flags, settings_from_flags
from streambp.reporting import report_safely

EXIT_FAILED = 2
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@add_flags
def command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="and its arguments", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="...", show_default=False)
    ] = None,
    as_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name")] = False,
    allow_unpatched: AllowUnpatched = False,
    **settings: Any,
) -> SimpleNamespace:
    """Run a training script with its models patched."""
    return SimpleNamespace(**context.params)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script like `python SCRIPT` does, with its models patched. Return the script's exit
    code, or 96 if the script succeeded and no model was patched. The flag --allow-unpatched
    prevents 96. A wrong command line returns 2.

    Args:
        argv: the command line's arguments: flags, the script and its arguments; None: those of this
            process.
    """
    try:
        parsed_line = parse_command_line(
            app, sys.argv[1:] if argv is None else argv, "python -m streambp.launch"
        )
        if isinstance(parsed_line, int):
            return parsed_line
        os.environ[SETTINGS_VARIABLE] = settings_from_flags(parsed_line).to_json()
    except StreamBPError as error:
        print(f"streambp: launch: {error}", file=sys.stderr)
        return EXIT_FAILED
    hook: ImportHook = install()
    sys.argv[:] = [parsed_line.script, *(parsed_line.arguments or ())]
    code = 0
    try:
        if parsed_line.as_module:
            runpy.run_module(parsed_line.script, run_name="__main__", alter_sys=True)
        else:
            if not getattr(sys.flags, "safe_path", False):
                # `-m streambp.launch` has set it to the working directory
                sys.path[0] = os.path.dirname(os.path.abspath(parsed_line.script))
            runpy.run_path(parsed_line.script, run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        if end.code is None:
            code = 0
        elif isinstance(end.code, int):
            code = end.code
        else:
            code = 1
    return report_safely(
        lambda: judge(
            code,
            count_patched_models([hook.launched.process_record()]),
            parsed_line.allow_unpatched,
        ),
        otherwise=lambda why: code,
    )


if __name__ == "__main__":
    sys.exit(main())
