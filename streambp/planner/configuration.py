"""Read and check a model's configuration, with errors that name the responsible field.

transformers checks the types of most fields and names those fields. Other values, such as zero
heads, raise arbitrary errors inside the models. The responsible field is found by a search that
leaves out one field at a time. The message names the fields without which the error disappears, or
else the fields without which the error changes.

A model is built before it is counted, and a wrong number must not make that last for hours. Models
build a module for each layer, and some models build a module for each expert. Names tell such
numbers from sizes: "num_hidden_layers" and "num_experts" count modules, while
"vocab_size_per_layer_input" and "n_positions" are sizes of tensors. Tensors have no data here, so a
large size takes no time. Sizes must stay far from the limits of 64-bit integers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig, PreTrainedConfig

from streambp.errors import StreamBPError
from streambp.fields import short_repr
from streambp.reporting import reason

T = TypeVar("T")
# Maxima of a configuration's numbers.
MAX_NUMBER = 2**40
MAX_PARTS = 2**20
MAX_LAYERS = 2**11
LAYER_COUNT_FIELD = re.compile(r"(^|_)layers(_|$)|(?<!_per)_layer$")
PART_COUNT_FIELD = re.compile(r"(num|n)_")
SIZE_FIELD = re.compile(
    r"_(embd|embeddings|embeds|inner|ctx|positions|vocab|tokens|buckets|parameters)"
)
TRUST_REMOTE_CODE_HINT = (
    "If you trust the Python code that comes with the model, pass --trust-remote-code."
)
MAX_FIELDS_IN_MESSAGE = 4  # maximal number of fields in a message
# transformers then names every class that it has
CLASS_LIST_START = " Model type should be one of"


def needs_trust(error: BaseException) -> bool:
    """True if transformers raised this error because a checkpoint's code may only run with
    trust_remote_code=True. The error message then advises this option."""
    return "trust_remote_code" in str(error)


def read_config(
    source: str | Path | PreTrainedConfig, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Return a model's configuration, read from an id on the Hub, a folder or a config.json.

    Args:
        source: the id, folder, file, or a configuration.
        trust_remote_code: run the Python code that comes with the model.

    Raises:
        StreamBPError: there is no configuration, transformers does not know its model_type, or a
            field is invalid; the message names the field.
    """
    if isinstance(source, PreTrainedConfig):
        _check_numbers(source.to_dict(), type(source).__name__)
        return source
    name = short_repr(str(source))
    fields = None
    try:
        path = Path(source)
        if path.is_file():
            fields = json.loads(path.read_text("utf-8"))
        else:
            fields = PreTrainedConfig.get_config_dict(source)[0]
        if not isinstance(fields, dict):
            raise TypeError(f"it is a {type(fields).__name__} instead of an object with fields")
        _check_numbers(fields, name)
        config: PreTrainedConfig
        if path.is_file():
            config = AutoConfig.for_model(**fields)
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except StreamBPError:
        raise
    except Exception as error:  # transformers' code, with values from anywhere
        if isinstance(fields, dict):
            culprits = _fields_of(error, fields, lambda some: AutoConfig.for_model(**some))
        else:
            culprits = ""
        if needs_trust(error):
            advice = f"{TRUST_REMOTE_CODE_HINT} "
        else:
            advice = ""
        raise StreamBPError(
            f"No model configuration could be read from {name} ({culprits}{reason(error)}). "
            f"{advice}Pass a config.json, the folder that save_pretrained wrote, or an id on the "
            "Hub that this machine can reach."
        ) from error
    return config


def build(config: PreTrainedConfig, make: Callable[[PreTrainedConfig], T]) -> T:
    """Return a model created by `make(config)`. If `make` raises, raise an error that names the
    invalid field of the configuration.

    Args:
        config: the configuration.
        make: function that creates the model.

    Raises:
        StreamBPError: `make` raised.
    """
    try:
        return make(config)
    except Exception as error:  # transformers' code, with values from anywhere
        kind = type(config)
        fields_of_config = {}
        for k, v in config.to_diff_dict().items():
            if k not in ("model_type", "transformers_version"):
                fields_of_config[k] = v
        culprits = _fields_of(error, fields_of_config, lambda fields: make(kind(**fields)))
        reason_text = reason(error).partition(CLASS_LIST_START)[0]
        raise StreamBPError(
            f"No causal language model for {kind.__name__} ({culprits}{reason_text}). Pass the "
            "configuration of one, or the model itself."
        ) from error


def _check_numbers(value: Any, name: str, field: str = "") -> None:
    """Check that the integers in a configuration, also nested integers, are small enough for the
    planner, which builds the model on meta tensors.

    Args:
        value: the configuration, or a value in it.
        name: the model's name, for the error message.
        field: the value's field, such as "text_config.num_hidden_layers".

    Raises:
        StreamBPError: an integer is too large; the message names its field.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        last = field.rpartition(".")[2]
        if LAYER_COUNT_FIELD.search(last):
            limit = MAX_LAYERS
        elif PART_COUNT_FIELD.match(last) and not SIZE_FIELD.search(last):
            limit = MAX_PARTS
        else:
            limit = MAX_NUMBER
        if abs(value) > limit:
            raise StreamBPError(
                f"{field} of {name} is {short_repr(value)}; the planner takes numbers up to "
                f"{limit:,} there. Pass the configuration of a model that can be built."
            )
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check_numbers(part, name, f"{field}.{key}" if field else str(key))
    if isinstance(value, list | tuple):
        for part in value:
            _check_numbers(part, name, field)


def _fields_of(
    error: Exception, fields: dict[str, Any], make: Callable[[dict[str, Any]], Any]
) -> str:
    """Return text with the fields of a configuration that cause an error, and their values, for the
    beginning of an error message. "" if no field or more than `MAX_FIELDS_IN_MESSAGE` fields cause
    the error. Fields are found by calls of `make` without the field.

    Args:
        error: the error that these fields caused in transformers' code.
        fields: the configuration's fields.
        make: function that creates a model from fields.
    """
    culprits = []
    suspects = []
    level = logging.root.manager.disable
    logging.disable()  # each attempt would repeat the warnings
    try:
        for field in fields:
            text = f"{field} is {short_repr(fields[field])}"
            try:
                make({name: value for name, value in fields.items() if name != field})
                culprits.append(text)
            except Exception as changed_error:
                suspects += [text] if reason(changed_error) != reason(error) else []
    finally:
        logging.disable(level)
    responsible = culprits or suspects
    if 0 < len(responsible) <= MAX_FIELDS_IN_MESSAGE:
        return f"{', '.join(responsible)}: "
    return ""
