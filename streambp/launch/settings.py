"""What `streambp launch` is told: `StreamConfig`'s fields as flags, and as the JSON that the processes it starts read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from typing import Any, Literal

from streambp.config import FIELDS, StreamConfig, config_of
from streambp.fields import check_fields

DIGITS = 18  # of a number among the flags
DEFAULTS = StreamConfig(lazy_logits=True, rows="auto")  # programs that know nothing of streambp ask for logits


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the models of a program stream, and where they are found.

    at: "trainer" patches what HF Trainer and its subclasses train; "train" any transformers model as well whose
        `train()` is called.

    Raises:
        ConfigError: there is no such place.
    """

    config: StreamConfig = DEFAULTS
    at: Literal["trainer", "train"] = "trainer"

    def __post_init__(self) -> None:
        check_fields(self)

    def to_json(self) -> str:
        """What differs from the defaults, for the environment of a program."""
        given = {name: getattr(self.config, name) for name in FIELDS}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value != getattr(DEFAULTS, name)}
        return json.dumps(changed if self.at == "trainer" else {**changed, "at": self.at})


def from_fields(found: dict[str, Any]) -> Settings:
    """Of `StreamConfig`'s fields and "at", as JSON gives them.

    Raises:
        ConfigError: a name is unknown, or a value cannot be.
    """
    config = {name: value for name, value in found.items() if name != "at"}
    return Settings(config_from(config, "streambp launch"), found.get("at", "trainer"))


def config_from(found: dict[str, Any], source: str) -> StreamConfig:
    """A `StreamConfig` of its fields by name; logits are lazy if nothing is said of them, and the head is ours.

    Args:
        source: where they come from, for the message.

    Raises:
        ConfigError: a name is unknown, or a value cannot be.
    """
    lazy_logits = DEFAULTS.lazy_logits and found.get("head") is not False
    return config_of({"lazy_logits": lazy_logits, **found}, source, DEFAULTS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One for each of `StreamConfig`'s fields, and --at; only those that are given become attributes."""
    types = typing.get_type_hints(StreamConfig)
    for field in dataclasses.fields(StreamConfig):
        default = getattr(DEFAULTS, field.name)
        flag, told = "--" + field.name.replace("_", "-"), f"StreamConfig's {field.name} (default: {default!r})"
        if bool in (types[field.name], *typing.get_args(types[field.name])):
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=argparse.SUPPRESS, help=told)
        else:
            kind = _names if field.name == "saves" else _number_or_text
            parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=told)
    parser.add_argument(
        "--at",
        choices=("trainer", "train"),
        default=argparse.SUPPRESS,
        help='"trainer" (the default): what HF Trainer and its subclasses train; "train": any transformers model too whose '
        "train() is called, for programs with a loop of their own",
    )


def from_flags(arguments: argparse.Namespace) -> Settings:
    """Raises ConfigError for a value that `StreamConfig` does not take."""
    return from_fields({name: value for name, value in vars(arguments).items() if name in (*FIELDS, "at")})


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) <= DIGITS else text
