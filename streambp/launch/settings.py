"""Convert the settings of `streambp launch`: flags of the command line to a `StreamConfig`, and to
JSON for the program's processes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import typer

from streambp.config import CONFIG_FIELDS, StreamConfig, config_of
from streambp.fields import check_fields

T = TypeVar("T")
LAUNCH_DEFAULTS = StreamConfig(lazy_logits=True)  # unchanged programs read logits


@dataclasses.dataclass(frozen=True)
class LaunchSettings:
    """Settings of `streambp launch`: how models are patched, and when.

    Attributes:
        config: settings of every model.
        at: "trainer": patch the models of HF Trainer and its subclasses. "train": also patch any
            transformers model when its `train()` is called.

    Raises:
        ConfigError: `at` has another value.
    """

    config: StreamConfig = LAUNCH_DEFAULTS
    at: Literal["trainer", "train"] = "trainer"

    def __post_init__(self) -> None:
        check_fields(self)

    def to_json(self) -> str:
        """Return the settings that differ from the defaults as JSON, for the environment variable
        STREAMBP_LAUNCH. `settings_from_fields` reads the parsed JSON."""
        fields = {name: getattr(self.config, name) for name in CONFIG_FIELDS}
        changed_fields: dict[str, Any] = {}
        for name, value in fields.items():
            if value != getattr(LAUNCH_DEFAULTS, name):
                changed_fields[name] = value
        return json.dumps(
            changed_fields if self.at == "trainer" else {**changed_fields, "at": self.at}
        )


def settings_from_fields(fields: dict[str, Any]) -> LaunchSettings:
    """Return the `LaunchSettings` of `streambp launch` from a dict, parsed from JSON, with fields
    of `StreamConfig` and "at" (when models are patched).

    Raises:
        ConfigError: a name is unknown, or a value is invalid.
    """
    config = {}
    for name, value in fields.items():
        if name != "at":
            config[name] = value
    return LaunchSettings(config_from(config, "streambp launch"), fields.get("at", "trainer"))


def config_from(fields: dict[str, Any], source: str) -> StreamConfig:
    """Return a `StreamConfig` from a dict of its fields, with the defaults of `streambp launch` for
    missing fields.

    The default of `lazy_logits` is True here, except with head=False.

    Args:
        fields: fields by name.
        source: origin of the fields, such as "streambp launch", for error messages.

    Raises:
        ConfigError: a name is unknown, or a value is invalid.
    """
    lazy_logits = LAUNCH_DEFAULTS.lazy_logits and fields.get("head") is not False
    return config_of({"lazy_logits": lazy_logits, **fields}, source, LAUNCH_DEFAULTS)


AllowUnpatched = Annotated[
    bool, typer.Option("--allow-unpatched", help="succeed where no model was patched")
]


def argument_texts(docstring: str) -> dict[str, str]:
    """Return a dict from each argument under `Args:` in a docstring to the argument's text, on one
    line. Used for the help texts of command-line flags. The result is {} for a docstring without
    `Args:`."""
    part = re.search(
        r"^Args:\n(.*?)(?:^\S|\Z)", inspect.cleandoc(docstring), re.DOTALL | re.MULTILINE
    )
    if part is None:
        return {}
    matches = re.findall(
        r"^    (\w[\w, ]*): (.*?)(?=^    \w[\w, ]*: |\Z)", part[1], re.DOTALL | re.MULTILINE
    )
    texts = {}
    for name, text in matches:
        texts[name] = " ".join(text.split())
    return texts


def first_sentence(text: str) -> str:
    """Return the first sentence of a text on one line, without its full stop."""
    return re.split(r"\.(?= [A-Z\"\[]|$)", text, maxsplit=1)[0]


def add_flags(function: Callable[..., T]) -> Callable[..., T]:
    """Add command-line flags to the function of a typer command: a decorator. One parameter for
    each setting of `streambp launch` replaces `**settings` in the signature, and typer makes a flag
    of each parameter. Return the function itself, changed in place.

    The settings are the fields of `StreamConfig`, and `at` (when models are patched). A flag that
    is not on the command line has the value None.
    """
    signature = inspect.signature(function, eval_str=True)
    arguments = []
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            arguments.append(parameter)
    hints = typing.get_type_hints(StreamConfig)
    texts = argument_texts(StreamConfig.__doc__ or "")  # none under python -OO
    flags = []
    for name in CONFIG_FIELDS:
        flag = name.replace("_", "-")
        default = getattr(LAUNCH_DEFAULTS, name)
        help_text = f"{first_sentence(texts.get(name, name))} (default: {default!r})"
        if bool in (hints[name], *typing.get_args(hints[name])):
            kind: Any = Annotated[
                bool | None,
                typer.Option(f"--{flag}/--no-{flag}", help=help_text, rich_help_panel="Settings"),
            ]
        else:
            if typing.get_origin(hints[name]) is Literal:
                values = "|".join(typing.get_args(hints[name]))
            else:
                values = "VALUE"
            kind = Annotated[
                str | None,
                typer.Option(
                    f"--{flag}", help=help_text, rich_help_panel="Settings", metavar=values
                ),
            ]
        flags.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )
    help_text = (
        '"trainer" (the default): models of HF Trainer and its subclasses; "train": any transformers model too whose '
        "train() is called, for programs with a loop of their own"
    )
    annotation = Annotated[str | None, typer.Option(help=help_text, metavar="trainer|train")]
    flags.append(
        inspect.Parameter("at", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    )
    parameters = [*arguments, *flags]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def settings_from_flags(arguments: Any) -> LaunchSettings:
    """Return the `LaunchSettings` from the parsed arguments of `streambp launch`.

    Args:
        arguments: object with an attribute for each flag; None: the flag is not on the command
            line. Other attributes are ignored.

    Raises:
        ConfigError: `StreamConfig` rejects a value.
    """
    fields = {}
    for name, value in vars(arguments).items():
        if name in (*CONFIG_FIELDS, "at") and value is not None:
            fields[name] = value
    if "saves" in fields:
        fields["saves"] = tuple(name for name in fields["saves"].split(",") if name)
    return settings_from_fields(fields)
