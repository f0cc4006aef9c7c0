"""Counted profiles: from the skeleton, or from a file of an earlier plan of the same model.

[Note: cached profiles] A profile depends on the configuration, on the options of the count, and on code: this package's,
and that of torch, transformers and peft by their versions, and which packages have kernels for mixers. All of it is in the
file's name, as a digest, so a file is never stale; one that cannot be read is counted anew. Models that were built already
are always counted: what they are made of is in no configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from streambp.fields import check_fields
from streambp.known_names import LIGER, NO_PART_OF_A_STEP
from streambp.planner.configuration import read_config
from streambp.planner.fused_layers import Kernels
from streambp.planner.layer_costs import counted_saves
from streambp.planner.mixers import KERNELS, Mixers, is_installed
from streambp.planner.profile import Profile, from_json, to_json
from streambp.planner.skeleton import Device, Skeleton, Source
from streambp.planner.survey import STREAMED, SurveyRecipe, survey

PACKAGE = Path(__file__).parent.parent
VERSIONS = ("torch", "transformers", "peft")
Said = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is counted, and for what; the arguments of `Skeleton` and of `survey`.

    Raises:
        ConfigError: one of them has a value that it cannot have.
    """

    source: Source
    dtype: torch.dtype = torch.bfloat16
    lora: int | None = None
    bits: Literal[4, 8, 16] = 16
    device: Device = "cuda"
    mixers: Mixers | None = None
    kernels: Kernels = "auto"
    batch_size: int = 1
    attention: Literal["cudnn", "flash"] = "cudnn"

    def __post_init__(self) -> None:
        check_fields(self, lora=(1, 2**20), batch_size=(1, 2**20))

    def skeleton(self) -> Skeleton:
        """The model without data.

        Raises:
            StreamBPError: the source is unknown, or options do not go with it.
        """
        found = Skeleton(self.source, self.dtype, self.lora, self.bits, self.device, self.mixers, self.kernels)
        found.own_adapters = self.kernels != "auto"
        return found


def counted(asked: Asked, recipes: Sequence[SurveyRecipe], cache: bool = False, said: Said | None = None) -> Profile:
    """The profile of a model under the recipes.

    Args:
        cache: look for it in `folder()`, and leave it there. [Note: cached profiles]
        said: is told of progress, in words and as a part from 0 to 1.

    Raises:
        StreamBPError: the model is unknown or cannot be counted.
    """
    file = None
    if cache and not isinstance(asked.source, nn.Module):
        config = read_config(asked.source)
        fields = {name: value for name, value in config.to_dict().items() if name not in NO_PART_OF_A_STEP}
        options = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked) if field.name != "source"}
        packages = sorted({LIGER, *(kernel.package for kernel in KERNELS)})
        versions = dict.fromkeys(VERSIONS, "")
        for package in VERSIONS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        parts: list[Any] = [
            type(config).__name__, fields, options, [repr(recipe) for recipe in recipes],
            list(versions.values()), [name for name in packages if is_installed(name)], _source(),
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
        file = folder() / f"{digest}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return from_json(json.loads(file.read_text("utf-8")))
    profile = survey(asked.skeleton(), recipes, asked.batch_size, None, asked.attention, said=said)
    if asked.device != "cpu" and any(recipe.name == STREAMED[0].name for recipe in recipes):
        profile = dataclasses.replace(profile, saves=counted_saves(asked.skeleton(), profile.layers))
    if file is not None:
        with contextlib.suppress(OSError):  # a plan needs no file
            file.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all, also where several plans write at once.
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as made:
                made.write(json.dumps(to_json(profile)))
            Path(made.name).replace(file)
    return profile


def folder() -> Path:
    """Where profiles are kept: `streambp/plans` in the user's cache, which XDG_CACHE_HOME moves."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streambp" / "plans"


def _source() -> str:
    """Of this package's code."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return found.hexdigest()
