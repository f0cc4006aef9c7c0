"""Hostile input, drawn from a seed: values that no field takes, mutated configurations, command
lines, files.

Each generator yields cases without end; tests and the table take as many as their budget allows.
`judge` says what became of one: "accepted", "refused" (one line that names the field), or what was
wrong with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import streambp
from streambp.cli import main
from streambp.errors import StreamBPError
from streambp.integrations.deepspeed import read, stream_config
from streambp.launch.report import ProcessRecord, collect
from streambp.launch.settings import settings_from_fields
from streambp.planner.skeleton import Skeleton
from streambp.rates import DEVICES, read_rates, write_rates
from tests.seeds import seed_of

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 128,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
BASES = {
    "Llama": {}, "Qwen3": {"head_dim": 16}, "Qwen3Moe": {"head_dim": 16, **EXPERTS}, "Gemma3Text": {"head_dim": 16},
    "Mixtral": EXPERTS, "Gemma2": {"head_dim": 16},
}  # fmt: skip
DIGITS = "9" * 5000
HOSTILE_NUMBERS = (
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    10**18,
    10**400,
    100_000,
    10**9,
    True,
    False,
)
HOSTILE_OBJECTS = (
    None,
    "x",
    "",
    "\0",
    "a\nb",
    DIGITS,
    [],
    {},
    ["a", 1],
    [[[]]],
    {"a": {"b": 1}},
    "😀" * 300,
)
JSON = (*HOSTILE_NUMBERS, *HOSTILE_OBJECTS)
CASE_TIMEOUT_SECONDS = 240  # for a case that should end at once, on a machine 30 times slower


class Hostile:
    """Raises whatever is done to it."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("shown")


PYTHON = (
    *JSON, Hostile(), [Hostile()], np.zeros(3), np.int64(5), np.bool_(True), torch.zeros(3), b"1", {1}, (), ("kv", 3),
    ("kv",), 8192, "auto", ("attn_out@" + DIGITS,), ("kv@²",), "8GiB", "1e999", "8e9", 2**62 + 1, ["auto"], ("auto", "kv"),
    object, "cpu",
)  # fmt: skip


def drawn(number: int) -> random.Random:
    return random.Random(seed_of(number))


def judge(run: Callable[[], Any], field: str) -> str:
    """What became of a case whose bad field is named so."""
    start = time.monotonic()
    try:
        run()
    except StreamBPError as error:
        text = str(error)
        if len(text.splitlines()) != 1:
            return f"several lines: {text[:300]}"
        if field not in text:
            return f"{field} is not named: {text[:300]}"
        outcome = "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    else:
        outcome = "accepted"
    return (
        outcome
        if time.monotonic() - start < CASE_TIMEOUT_SECONDS
        else f"took {time.monotonic() - start:.0f} s"
    )


def mutated_configs(folder: Path) -> Iterator[tuple[str, str]]:
    """A field of a config.json with another value, or left out: what it was, and what became of it,
    read and built."""
    choose, file = drawn(1), folder / "config.json"
    bases = {}
    for name, base_fields in BASES.items():
        config = getattr(transformers, f"{name}Config")(**SIZES, **base_fields)
        bases[name] = json.loads(config.to_json_string(use_diff=False))
    layers = [
        ("Llama", "num_hidden_layers", 100_000),
        ("Llama", "hidden_size", 10**18),
        ("Qwen3", "num_hidden_layers", 10**9),
    ]
    for family, field, value in itertools.chain(layers, _endless(choose, bases)):
        fields = dict(bases[family])
        if value is dict:
            del fields[field]
        else:
            fields[field] = value
        file.write_text(json.dumps(fields))
        yield (
            f"{family}.{field} = {_told(value)}",
            judge(lambda: Skeleton(file, torch.bfloat16, None, 16, "cuda"), field),
        )


def _endless(
    choose: random.Random, bases: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, Any]]:
    while True:
        family = choose.choice(sorted(bases))
        yield family, choose.choice(sorted(bases[family])), choose.choice((*JSON, dict))


FIELDS = [field.name for field in dataclasses.fields(streambp.StreamConfig)]
# Two of them do not go together with others' defaults, which the message says in their names.
REQUIRED_SETTINGS = {"host_memory": {"offload": "cpu"}, "gpu_memory": {"offload": "cpu"}}


def settings() -> Iterator[tuple[str, str]]:
    """`StreamConfig`, a DeepSpeed section, settings of `streambp launch`: a field with a value."""
    choose = drawn(2)
    ways: dict[str, Callable[[dict[str, Any]], Any]] = {
        "StreamConfig": lambda fields: streambp.StreamConfig(**fields),
        "section": lambda fields: stream_config({"streambp": fields}),
        "launch": settings_from_fields,
        "file": lambda fields: stream_config(read(json.dumps({"streambp": fields}))),
    }
    while True:
        way, field = choose.choice(sorted(ways)), choose.choice([*FIELDS, "at", "surplus"])
        value = choose.choice(JSON if way == "file" else PYTHON)
        if way == "StreamConfig" and field in ("at", "surplus"):
            continue
        arguments = {**REQUIRED_SETTINGS.get(field, {}), field: value}
        outcome = judge(lambda ways=ways, way=way, arguments=arguments: ways[way](arguments), field)
        if outcome == "accepted" and not _sensible(field, value):
            outcome = "accepted silently"
        yield f"{way}: {field} = {_told(value)}", outcome


def _sensible(field: str, value: Any) -> bool:
    """Whether a field may have that value: a second opinion, from what docs/reference/settings.md
    says of it."""
    names = isinstance(value, tuple | list) and all(isinstance(name, str) for name in value)
    booleans = (
        "head",
        "eval_logits",
        "lazy_logits",
        "share_prefixes",
        "unpatched_runs",
        "compare_backward",
        "towers",
    )
    if field == "share_prefixes" and value is None:
        return True
    if field in booleans:
        return value is True or value is False
    if field == "chunk_size":
        # none of PYTHON's is "8k"
        return (type(value) is int and 0 < value < 2**62) or (
            isinstance(value, str) and value == "auto"
        )
    if field == "saves":
        return (isinstance(value, str) and value == "auto") or (
            names and DIGITS not in "".join(value)
        )
    if field in ("host_memory", "gpu_memory"):
        return (
            value is None
            or (type(value) in (int, float) and 1 <= value < 2**63)
            or (isinstance(value, str) and value != DIGITS)
        )
    choices = {
        "attention": ("auto",),
        "kernels": ("auto",),
        "offload": ("cpu", "auto"),
        "rows": ("auto",),
        "weights": ("cpu", "auto"),
        "at": (),
    }
    return isinstance(value, str) and value in choices.get(field, ())


LENGTHS = ("x", "", "0", "-5", "64q", DIGITS, "1e5", "nan", "inf", "\0")
COUNTS = ("x", "", "1.5", "-1", "0", DIGITS, "nan")
AMOUNTS = ("x", "", "-1GiB", "0", "1e999", "nan", "80GiBB", DIGITS)
NUMBER_TEXTS = ("x", "nan", "inf", "-0.5", "1.5")
OPTIONS = {
    "plan": {
        "--seq-len": LENGTHS, "--gpu-memory": AMOUNTS, "--host-memory": AMOUNTS,
        "--reserve": NUMBER_TEXTS, "--gpus": COUNTS,
        "--ulysses": COUNTS, "--context-parallel": COUNTS, "--zero": ("4", "-1", "x"), "--batch-size": COUNTS,
        "--lora": COUNTS, "--bits": ("3", "x"),
        "--optimizer-bytes": ("x", "nan", "inf", "-1"), "--dtype": ("int8", ""), "--kernels": ("x",),
        "--mixers": ("x",), "--device": ("x", "", "\0", "missing.json"), "--html": ("/nowhere/at/all/a.html", "a\0b", "/"),
    },
    "verify": {
        "--seq-len": COUNTS, "--chunk-size": COUNTS, "--dtype": ("x",), "--saves": ("x", "kv@0", "attn_out@" + DIGITS),
        "--seed": ("x", DIGITS), "--left-padding": ("x", "-1", DIGITS),
    },
    "profile": {"--seq-len": LENGTHS, "--chunk-size": COUNTS, "--saves": ("x", "kv@0"), "--offload": ("x",)},
    "launch": {
        "--chunk-size": ("x", "0", "-1", "1.5", "²"), "--saves": ("kv@0", "attn_out@" + DIGITS), "--attention": ("x",),
        "--host-memory": AMOUNTS[:5], "--offload": ("x",), "--at": ("x",), "--documents": ("x",),
    },
}  # fmt: skip
MODELS = ("missing", "a\0b", "x" * 5000, "/", "")


def command_lines(model: Path) -> Iterator[tuple[str, str]]:
    """All of them, in an order that is drawn; `model` is a checkpoint's folder."""
    cases = [
        (command, option, value)
        for command, options in OPTIONS.items()
        for option in options
        for value in options[option]
    ]
    cases += [
        (command, "MODEL", value) for command in ("plan", "verify", "profile") for value in MODELS
    ]
    drawn(3).shuffle(cases)
    for command, option, value in cases:
        words = (
            [command, str(model) if option != "MODEL" else value]
            if command != "launch"
            else [command]
        )
        words += (
            ["--gpu-memory", "8GiB", "--no-cache"]
            if command == "plan" and option != "--gpu-memory"
            else []
        )
        words += (
            ["--seq-len", "64"]
            if option != "--seq-len" and command in ("verify", "profile")
            else []
        )
        words += [f"{option}={value}"] if option != "MODEL" else []
        words += ["--", "true"] if command == "launch" else []
        yield f"{command} {option} {_told(value)}", run_line(words, option)


def run_line(words: list[str], option: str) -> str:
    """What became of a command line: code 2 and an error that names the option, or the field it
    sets."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            code = main(words)
    except SystemExit as end:
        code = end.code
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    text = stderr.getvalue()
    field = option.strip("-").replace("-", "_")
    if code != 2:
        return f"accepted silently: {code}"
    if "Traceback" in text:
        return f"a traceback: {text[-300:]}"
    names = (
        option,
        field,
        field.removesuffix("_bytes"),
        *(["model", "MODEL"] if option == "MODEL" else []),
    )
    return (
        "refused"
        if any(name in text for name in names)
        else f"{option} is not named: {text[-300:]}"
    )


def rates_files(folder: Path) -> Iterator[tuple[str, str]]:
    """A field of a file of `--measure-device` with another value, left out, or the file cut off."""
    choose, file = drawn(4), folder / "rates.json"
    write_rates(DEVICES["H200"], file)
    content = file.read_text()
    good = json.loads(content)
    required = ("name", "products", "forward", "backward", "bandwidth", "link")
    while True:
        field, value = choose.choice(sorted(good)), choose.choice((*JSON, dict, ...))
        fields = (
            {name: other_value for name, other_value in good.items() if name != field}
            if value is dict
            else {**good, field: value}
        )
        if value is ...:
            file.write_text(content[: choose.randrange(len(content) - 3)])
            outcome = judge(lambda: read_rates(file), "rates of a device")
        else:
            file.write_text(json.dumps(fields))
            outcome = judge(lambda: read_rates(file), field)
            number = (
                isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**62
            )
            text, boolean = isinstance(value, str), isinstance(value, bool)
            kind = {
                "name": text,
                "source": text,
                "assumed": boolean,
                "guess": boolean,  # its name in older files
                "node": number and isinstance(value, int),
            }.get(field, number)
            if outcome == "accepted" and not (kind if value is not dict else field not in required):
                outcome = "accepted silently"
        yield f"rates: {field} = {_told(value)}", outcome


def report_files(folder: Path) -> Iterator[tuple[str, str]]:
    """An account of `streambp launch` with another value, or cut off: it is told, or told to be
    lost, and never raises."""
    choose, file = drawn(5), folder / "11.json"
    models = [{"kind": "A", "description": "streams", "left": None}]
    good = {"process": 11, "rank": "0", "program": "train.py", "models": models, "peak": 2**30}
    while True:
        field, value = choose.choice([*good, "surplus"]), choose.choice(JSON)
        text = json.dumps({**good, field: value})
        file.write_text(text if choose.random() < 0.8 else text[: choose.randrange(len(text))])
        try:
            accounts, lost = collect(folder)
        except Exception as error:
            yield f"report: {field} = {_told(value)}", f"{type(error).__name__}: {str(error)[:200]}"
            continue
        is_reported = len(accounts) + len(lost) == 1 and all(
            isinstance(account, ProcessRecord) for account in accounts
        )
        is_reported = is_reported and all(len(line.splitlines()) == 1 for line in lost)
        yield (
            f"report: {field} = {_told(value)}",
            ("refused" if lost else "accepted") if is_reported else f"{accounts}, {lost}",
        )


def _told(value: Any) -> str:
    try:
        return "left out" if value is dict else "cut off" if value is ... else repr(value)[:60]
    except Exception:
        return type(value).__name__
