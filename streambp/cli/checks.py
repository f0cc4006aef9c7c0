"""Check a command's arguments before torch is imported and a model is read."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from streambp.chunks import pick_chunk_size
from streambp.cli.training_files import apply_files
from streambp.config import StreamConfig
from streambp.errors import ConfigError, StreamBPError
from streambp.fields import short_repr
from streambp.rates import rates_of

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # names on the Hub
MAX_ID_LENGTH = 96
WEB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|\w+://")
MODEL_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"([^/?#]+/[^/?#]+)"  # the model's id
    r"(?:/tree/main)?/?(?:[?#].*)?"
)
OTHER_PAGES = ("datasets", "spaces", "docs", "papers", "blog", "collections", "posts", "learn")
MAX_STEP_TOKENS = 2**30  # maximal tokens of a step that runs
CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
SPLITS = ("ulysses", "context_parallel")  # arguments that share each row among ranks
LAUNCH_EXAMPLE = "streambp launch --chunk-size 8k -- trl sft ..."
PLAN_EXAMPLE = "streambp plan Qwen/Qwen3-8B --gpu-memory 24GiB --lora 16"


def check(arguments: Any) -> None:
    """Check a command's arguments and the form of the model's name, without reading the model. Some
    arguments are changed: a path of a file with row lengths is replaced by the lengths, and
    arguments without a value get defaults that depend on other arguments.

    Args:
        arguments: the namespace of the command's parsed arguments, with its name as `command`.

    Raises:
        StreamBPError: an argument is invalid.
    """
    if arguments.command == "launch" and arguments.extra:
        raise ConfigError(
            f"{short_repr(arguments.extra[0])} is no flag of streambp launch. Write the command to "
            f"run after --: {LAUNCH_EXAMPLE}."
        )
    if arguments.command == "plan":
        _check_plan(arguments)
    if arguments.command in ("verify", "profile"):
        _check_step(arguments)
    if arguments.command in ("plan", "verify", "profile") and (
        arguments.model or arguments.command != "plan"
    ):
        file = arguments.command == "plan" or getattr(arguments, "random", False)
        arguments.model = model_name(arguments.model)
        check_model(arguments.model, file)


def model_name(name: str) -> str:
    """Return the id of a model on the Hub if a name is the web address of the model's page;
    otherwise return the name.

    Args:
        name: the model, as written on the command line.

    Raises:
        ConfigError: the name is another web address.
    """
    page = MODEL_PAGE.fullmatch(name)
    if page is not None and page[1].partition("/")[0] not in OTHER_PAGES:
        return page[1]
    if WEB_ADDRESS.match(name):
        raise ConfigError(
            f"The model {short_repr(name)} is a web address, but not of a model's page. Pass an id "
            "on the Hub, or a model's page like https://huggingface.co/Qwen/Qwen3-8B."
        )
    return name


def check_model(name: str, file: bool) -> None:
    """Check that a name can be a checkpoint's folder, an id on the Hub, or a config.json.

    Args:
        name: the model, as written on the command line.
        file: True if the path of a config.json is allowed; False: a folder or an id only.

    Raises:
        ConfigError: the name can be none of these.
    """
    expected = (
        "a folder with a config.json"
        + (", a config.json" if file else "")
        + ", or an id on the Hub"
    )
    try:
        path = Path(name)
        is_folder = path.is_dir()
        is_file = path.is_file()
    except (OSError, ValueError):  # the name is too long or has a NUL byte
        is_folder = is_file = False
    if is_file and file:
        return
    if is_file:
        raise ConfigError(f"The model {short_repr(name)} is a file; this command needs {expected}.")
    if is_folder:
        if (path / CONFIG_FILE).is_file():
            return
        hint = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            base = str(
                json.loads((path / ADAPTER_FILE).read_text("utf-8"))["base_model_name_or_path"]
            )
            if base:
                hint = f" It holds an adapter of {short_repr(base)}: pass that one."
            else:
                hint = ""
        raise ConfigError(
            f"The model {short_repr(name)} is a folder without {CONFIG_FILE}; it must be "
            f"{expected}.{hint}"
        )
    if not HUB_ID.fullmatch(name) or len(name) > MAX_ID_LENGTH or name.endswith(".json"):
        path_hint = " There is no such file or folder." if name else ""
        raise ConfigError(f"The model is {short_repr(name)}; it must be {expected}.{path_hint}")


def _check_plan(arguments: Any) -> None:
    """Raise StreamBPError if the arguments of `streambp plan` are invalid or contradict each other.

    The function changes the arguments. Options from the training files of `--from` are added. The
    path in `arguments.dataset` is replaced by the numbers in the file, the lengths of a data set's
    rows. If seq_len is "max", the largest of these lengths replaces it.
    """
    arguments.from_text = ""
    if arguments.from_file:
        apply_files(arguments)
    _check_writable("--html", arguments.html)
    _check_writable("--measure-device", arguments.measure_device)
    if arguments.device is not None:
        if arguments.measure_device is not None:
            raise ConfigError(
                "--device names rates and --measure-device measures them: pass one of the two."
            )
        rates_of(arguments.device)
    if arguments.measure_device is not None and not arguments.model:
        return
    if not arguments.model or arguments.gpu_memory is None:
        if arguments.model:
            missing_arguments = "--gpu-memory"
        elif arguments.gpu_memory is not None:
            missing_arguments = "MODEL"
        else:
            missing_arguments = "MODEL and --gpu-memory"
        raise ConfigError(f"A plan needs {missing_arguments}, such as `{PLAN_EXAMPLE}`.")
    if arguments.full and arguments.lora is not None:
        raise ConfigError(
            "--full trains every parameter and --lora adapters alone: pass one of the two."
        )
    if arguments.lora_targets and arguments.lora is None:
        raise ConfigError("--lora-targets names Linears that get adapters. Add --lora 16.")
    if arguments.dataset is None and (arguments.epochs or arguments.price) is not None:
        raise ConfigError(
            "--epochs and --price are of a data set. Add --dataset FILE, with the tokens of each "
            "row, one a line."
        )
    if arguments.dataset is not None:
        arguments.dataset = _lengths("--dataset", arguments.dataset)
        if arguments.seq_len == "max":
            arguments.seq_len = max(arguments.dataset)
    if arguments.bits < 16 and arguments.lora is None:
        raise ConfigError(
            f"--bits {arguments.bits} is of frozen weights, and full training freezes none. Add "
            "--lora 16, or leave it out."
        )
    gpus = max(arguments.gpus or 1, arguments.ulysses, arguments.context_parallel)
    if arguments.weights == "cpu" and gpus > 1:
        raise ConfigError(
            f"--weights cpu takes one process, and the plan is for {gpus} GPUs. Leave --weights "
            "cpu out."
        )
    _check_batch(arguments)


def _check_writable(option: str, file: Path | None) -> None:
    """Raise StreamBPError if a file cannot be written, before the command works for minutes to
    write it. An existing file is not changed, and no new file remains.

    Args:
        option: the command-line option, for the message.
        file: the file to write; None: nothing is checked.
    """
    if file is None:
        return
    try:
        new = not file.exists()
        with file.open("a"):
            pass
        if new:
            file.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        why = getattr(error, "strerror", None) or error
        raise StreamBPError(
            f"{option} {file} cannot be written ({why}). Pass another file."
        ) from error


def _check_batch(arguments: Any) -> None:
    """Raise ConfigError if the arguments of `streambp plan` that describe a micro-batch of several
    rows are invalid: --group, --prompt, --lengths and --mean-length. The path in
    `arguments.lengths` is replaced by the list of numbers in the file."""
    ways = ("group", "lengths", "mean_length")
    flags = []
    for name in ways:
        if getattr(arguments, name) is not None:
            flags.append(f"--{name.replace('_', '-')}")
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} each describe a micro-batch: pass one of them.")
    for name in SPLITS:
        ranks = getattr(arguments, name)
        if flags and ranks > 1:
            raise ConfigError(
                f"{flags[0]} plans a micro-batch on one rank, and --{name.replace('_', '-')} "
                f"{ranks} shares each row among ranks. Leave one of them out."
            )
    if arguments.prompt is not None and arguments.group is None:
        raise ConfigError(
            "--prompt is a part of a group's rows, and there is no --group. Add --group 8, or "
            "leave --prompt out."
        )
    if arguments.group is not None:
        if arguments.prompt is None:
            raise ConfigError(
                "--group needs --prompt, tokens of each row such as 32k; --seq-len is longer and "
                "has a prompt and a completion."
            )
        if arguments.seq_len != "max" and arguments.seq_len <= arguments.prompt:
            raise ConfigError(
                f"--seq-len is {arguments.seq_len} and --prompt {arguments.prompt}: a row has the "
                "prompt and a completion. Raise --seq-len above --prompt."
            )
        return
    if flags and arguments.batch_size < 2:
        raise ConfigError(
            f"{flags[0]} plans a micro-batch of several rows: one has no padding. Add --batch-size "
            "8."
        )
    if arguments.mean_length is not None:
        rows = arguments.batch_size
        mean = arguments.mean_length
        longest = arguments.seq_len
        if longest == "max" or not longest <= mean * rows - rows + 1 or mean > longest:
            raise ConfigError(
                f"--mean-length {mean} needs --seq-len, the tokens of the longest row: with "
                f"--batch-size {rows} pass a number from {mean} to {mean * rows - rows + 1}."
            )
    if arguments.lengths is not None:
        arguments.lengths = _lengths("--lengths", arguments.lengths)


def _lengths(option: str, file: Path) -> list[int]:
    """Return the row lengths of a data set, in tokens, which are stored in a text file.

    Args:
        option: the command-line option, for messages.
        file: text file with whole numbers, one on each line or as a JSON list.

    Raises:
        ConfigError: the file cannot be read, or has other words than numbers.
    """
    try:
        words = re.sub(r"[\[\],]", " ", file.read_text("utf-8")).split()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{option} {file} cannot be read ({why}). Pass a file of whole numbers, one a line."
        ) from error
    wrong = next((word for word in words if not re.fullmatch("0*[1-9][0-9]{0,8}", word)), None)
    if wrong is not None or not words:
        content = "no number" if wrong is None else short_repr(wrong)
        raise ConfigError(
            f"{option} {file} has {content}. Each line must hold the tokens of one row, a whole "
            "number from 1."
        )
    return [int(word) for word in words]


def _check_step(arguments: Any) -> None:
    """Raise StreamBPError if the arguments of `streambp verify` or `streambp profile` are invalid.
    Set `arguments.config` to the `StreamConfig` of the step that is run, and for `verify`
    `arguments.against` to a tuple of names of methods."""
    for option, length in (
        ("--seq-len", arguments.seq_len),
        ("--chunk-size", arguments.chunk_size),
    ):
        if length is not None and length > MAX_STEP_TOKENS:
            raise ConfigError(
                f"{option} is {length}; it must be at most {MAX_STEP_TOKENS:,}, since the step is "
                "run."
            )
    saves = tuple(name for name in arguments.saves.split(",") if name)
    if arguments.command == "verify":
        chunk_size = pick_chunk_size(arguments.seq_len, arguments.chunk_size)
        if arguments.left_padding > arguments.seq_len - 2:
            raise ConfigError(
                f"--left-padding is {arguments.left_padding}, and a row has --seq-len "
                f"{arguments.seq_len}; at least two tokens must be no padding."
            )
        arguments.config = StreamConfig(chunk_size, saves)
        arguments.against = tuple(filter(None, arguments.against.split(",")))
        if arguments.layers is not None and not arguments.random:
            raise ConfigError(
                "--layers is of random weights, and a checkpoint has all its layers. Add --random."
            )
        return
    _check_writable("--html", arguments.html)
    _check_writable("--snapshot", arguments.snapshot)
    arguments.config = StreamConfig(
        arguments.chunk_size or "auto", saves, offload=arguments.offload
    )
