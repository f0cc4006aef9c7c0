"""Read options of `streambp plan` from the files that describe a training: YAML or JSON files of
TRL and HfArgumentParser, axolotl's, and accelerate's.

Options of the command line win over a file's keys. A key without an option here is ignored.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streambp.errors import ConfigError
from streambp.fields import DTYPE_ALIASES, short_repr
from streambp.libraries import require_library

MODEL_KEYS = ("model_name_or_path", "base_model", "model_name")
NUMBER_KEYS = {
    "seq_len": ("max_length", "max_seq_length", "sequence_len", "cutoff_len"),
    "batch_size": ("per_device_train_batch_size", "micro_batch_size"),
    "gpus": ("num_processes",),
    "ulysses": ("sequence_parallel_degree",),
    "context_parallel": ("context_parallel_size",),
}
RANK_KEYS = ("lora_r", "lora_rank", "r")
TARGET_KEYS = ("lora_target_modules", "target_modules")
ALL_LINEARS = ("all-linear", "all")
FOUR_BIT_KEY, EIGHT_BIT_KEY = "load_in_4bit", "load_in_8bit"
TRAINING_OPTIONS = ("--full", "--lora", "--bits")


def apply_files(arguments: Any) -> None:
    """Set the arguments of `streambp plan` that are not on the command line to the values in the
    training files of `--from`. A later file's value replaces an earlier file's.

    The attribute `arguments.from_text` is set to a line of text with the options that were read.

    Args:
        arguments: the namespace of the command's parsed arguments, which is changed.

    Raises:
        ConfigError: a file cannot be read, or a key has an invalid value.
    """
    options: dict[str, Any] = {}
    for file in arguments.from_file:
        options |= options_of(read(file), file)
    given_options = set()
    for word in arguments.words:
        given_options.add(word.partition("=")[0])
    if given_options & set(TRAINING_OPTIONS):
        for name in ("full", "lora", "bits", "lora_targets"):
            options.pop(name, None)
    words: list[str] = []
    for name, value in options.items():
        if f"--{name.replace('_', '-')}" in given_options or (name == "model" and arguments.model):
            continue
        setattr(arguments, name, value)
        if name == "model":
            words.insert(0, str(value))
        elif value is True:
            words.append(f"--{name.replace('_', '-')}")
        else:
            words.append(f"--{name.replace('_', '-')} {value}")
    files = ", ".join(map(str, arguments.from_file))
    arguments.from_text = f"From {files}: {' '.join(words) or 'nothing'}"


def read(file: Path) -> Mapping[str, Any]:
    """Return the keys and values of a training program's YAML or JSON file, such as the
    configuration of axolotl, TRL or accelerate.

    Raises:
        ConfigError: the file cannot be read, or has no keys.
    """
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".json":
            content = json.loads(text)
        else:
            with require_library("yaml"):
                yaml = importlib.import_module("yaml")
            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from error
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--from {file} cannot be read ({why}). Pass the YAML or JSON file of a training."
        ) from error
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"--from {file} holds {short_repr(content)} instead of keys. Pass the YAML or JSON "
            "file of a training."
        )
    return content


def options_of(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Translate the keys of a training program's file into options of `streambp plan`. Return a
    dict from the names of the command's arguments, such as "lora", to values.

    Args:
        keys: keys and values of the file.
        file: the file, for messages.

    Raises:
        ConfigError: a key has an invalid value.
    """
    options: dict[str, Any] = {}
    for key in MODEL_KEYS:
        if keys.get(key):
            options["model"] = str(keys[key])
    for name, names in NUMBER_KEYS.items():
        value = first_number(keys, names, file)
        if value is not None:
            options[name] = value
    if (first_number(keys, ("gradient_accumulation_steps",), file) or 1) > 1:
        options["accumulate"] = True
    dtype = str(keys.get("dtype") or keys.get("torch_dtype") or "").removeprefix("torch.")
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype in ("float32", "bfloat16", "float16"):
        options["dtype"] = dtype
    return options | training_of(keys, file) | engine_of(keys, file)


def first_number(keys: Mapping[str, Any], names: Sequence[str], file: Path) -> int | None:
    """Return the value of the first key of `names` that has a value in a file; None if none has.

    Args:
        keys: keys and values of the file.
        names: the keys to look for, in this order.
        file: the file, for the error message.

    Raises:
        ConfigError: the value is not a positive whole number.
    """
    for name in names:
        value = keys.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{name} in {file} is {short_repr(value)}; it must be a whole number from 1."
            )
        return value
    return None


def section_of(keys: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    """Return the keys and values of a section of a file, such as "peft_config"; {} if the section
    is absent.

    Args:
        keys: keys and values of the file.
        name: key of the section.
        file: the file, for the error message.

    Raises:
        ConfigError: the section's value is no mapping.
    """
    section = keys.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} in {file} is {short_repr(section)}; it must hold keys.")
    return section


def training_of(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the options of `streambp plan` for LoRA and quantized weights that a training file
    requests. The dict's keys are names of `plan`'s arguments, such as "lora" and "bits".

    The result is {"full": True} if the file names a model and no adapter, and {} if it names
    neither.

    Args:
        keys: keys and values of the file.
        file: the file, for error messages.
    """
    adapter = keys.get("adapter")
    if not (adapter or keys.get("use_peft") or keys.get("peft_config")):
        if any(map(keys.get, MODEL_KEYS)):
            return {"full": True}
        return {}
    within = {**keys, **section_of(keys, "peft_config", file)}
    options: dict[str, Any] = {"lora": first_number(within, RANK_KEYS, file) or 16}
    targets = within.get(TARGET_KEYS[0]) or within.get(TARGET_KEYS[1])
    if isinstance(targets, str) and targets not in ALL_LINEARS:
        targets = [targets]
    if isinstance(targets, list) and not set(targets) & set(ALL_LINEARS):
        options["lora_targets"] = ",".join(map(str, targets))
    if keys.get(FOUR_BIT_KEY) or adapter == "qlora":
        options["bits"] = 4
    elif keys.get(EIGHT_BIT_KEY):
        options["bits"] = 8
    return options


def engine_of(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the options of `streambp plan` for a file with settings of ZeRO, FSDP or an optimizer
    in host memory. The result is a dict with the keys "zero" (the stage) and "optimizer_on_host". A
    key is absent if the file does not set it.

    Args:
        keys: keys and values of the file: a configuration of accelerate, or one of a training
            program with a DeepSpeed section or the path of a DeepSpeed file.
        file: the file, for error messages and to resolve that path.
    """
    name = "deepspeed_config" if keys.get("deepspeed_config") else "deepspeed"
    if isinstance(keys.get(name), str):
        engine_file = Path(keys[name])
        if not engine_file.is_absolute() and not engine_file.is_file():
            engine_file = file.parent / engine_file
        engine = read(engine_file)
    else:
        engine = section_of(keys, name, file)
    section = section_of(engine, "zero_optimization", file) or engine
    options: dict[str, Any] = {}
    stage = section.get("stage", section.get("zero_stage"))
    if stage in (0, 1, 2, 3):
        options["zero"] = stage
    device = section_of(section, "offload_optimizer", file).get("device")
    if "cpu" in (device, section.get("offload_optimizer_device")):
        options["optimizer_on_host"] = True
    if keys.get("fsdp") or keys.get("fsdp_config"):
        options["zero"] = 3
    return options
