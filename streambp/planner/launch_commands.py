"""Write a plan's settings as text for each entry point of streambp, such as `streambp launch` and
TRL."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from streambp.planner.plan import Choice
from streambp.planner.profile import Setting

ONE_PROCESS_NOTE = "not with weights on the host, which take one process"
HOST_OPTIMIZER_NOTE = (
    "; streambp.integrations.optimizer_in_backward(model, make, on_host=True) keeps the optimizer "
    "there"
)
BYTE_UNITS = ((2**30, "GiB", 10), (2**20, "MiB", 1))


def fields_of(choice: Choice) -> dict[str, Any]:
    """Return the chosen settings of a plan as fields of `StreamConfig`, in a dict from names to
    JSON values. The dict has chunk_size and saves, and all other fields that differ from their
    defaults."""
    fields: dict[str, Any] = {"chunk_size": choice.chunk_size, "saves": list(choice.saves)}
    fields |= {"offload": choice.offload} if choice.offload != "none" else {}
    fields |= (
        {"gpu_memory": format_bytes(choice.gpu_memory)} if choice.gpu_memory is not None else {}
    )
    return fields | ({"weights": choice.config.weights} if choice.on_host is not None else {})


def config_code(choice: Choice) -> str:
    """Return Python code that creates the `StreamConfig` with the chosen settings of a plan:
    "streambp.StreamConfig(chunk_size=8192, saves=())", for example."""
    return code_of_fields(fields_of(choice))


def code_of_fields(fields: Mapping[str, Any]) -> str:
    """Return Python code that creates a `StreamConfig` with these fields, such as
    "streambp.StreamConfig(chunk_size=8192)"."""
    written_fields = []
    for name, value in fields.items():
        if isinstance(value, list):
            value = tuple(value)
        written_fields.append(f"{name}={python_literal(value)}")
    return f"streambp.StreamConfig({', '.join(written_fields)})"


def launcher_settings(choice: Choice, setting: Setting) -> dict[str, str]:
    """Return the chosen settings of a plan, as text to paste for each way to start a training. The
    result is a dict with the keys "launch" (the command `streambp launch`), "TRL", "axolotl" and
    "DeepSpeed". Each value is a line of text.

    Args:
        choice: the plan's chosen settings.
        setting: the training setting, whose ZeRO stage is a part of the line for DeepSpeed.
    """
    return launcher_settings_of(fields_of(choice), setting, choice.on_host is not None)


def launcher_settings_of(
    fields: Mapping[str, Any], setting: Setting, on_host: bool
) -> dict[str, str]:
    """Return fields of `StreamConfig`, as text to paste for each way to start a training. The
    result is a dict with the keys "launch" (the command `streambp launch`), "TRL", "axolotl" and
    "DeepSpeed". Each value is a line of text.

    Args:
        fields: the fields by name, as JSON values; empty: the defaults.
        setting: the training setting, whose ZeRO stage is a part of the line for DeepSpeed.
        on_host: True if layers have their weights in host memory. The line for DeepSpeed then says
            that this requires a single process.
    """
    flags = []
    trl = []
    section = []
    for name, value in fields.items():
        text = ",".join(value) if isinstance(value, list) else value
        flags.append(f"--{name.replace('_', '-')}={text}")
        trl.append(f"stream_{name}={python_literal(str(value) if name == 'chunk_size' else value)}")
        section.append(f"{name}: {json.dumps(value)}")
    engine: dict[str, Any]
    if setting.zero:
        engine = {"zero_optimization": {"stage": setting.zero}}
    else:
        engine = {}
    if setting.optimizer_on_host:
        engine = {
            "zero_optimization": {
                "stage": max(2, setting.zero),
                "offload_optimizer": {"device": "cpu"},
            }
        }
    section_of_engine = json.dumps({**engine, "streambp": fields})
    if on_host:
        section_of_engine = ONE_PROCESS_NOTE + (
            HOST_OPTIMIZER_NOTE if setting.optimizer_on_host else ""
        )
    return {
        "launch": f"{shlex.join(['streambp', 'launch', *flags])} -- PROGRAM ...",
        "TRL": f"StreamSFTConfig({', '.join(trl)})",
        "axolotl": f"streambp: {{{', '.join(section)}}}",
        "DeepSpeed": section_of_engine,
    }


def python_literal(value: Any) -> str:
    """Return a value as a Python literal with double quotes, for code to paste."""
    return repr(value).replace("'", '"')


def format_bytes(size: int) -> int | str:
    """Return a number of bytes as text for `StreamConfig`, rounded down: "8.2GiB", "640MiB". Below
    a MiB, return the number itself."""
    for unit, name, digits in BYTE_UNITS:
        if size >= unit:
            return f"{size * digits // unit / digits:g}{name}"
    return size
