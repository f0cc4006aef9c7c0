"""Count memory and FLOPs of a model's steps, run on tensors without data, or read these numbers
(`Profile`) from an earlier plan's file.

A profile depends on the configuration, on the options of the count, and on code. Code means this
package's sources, the versions of torch, transformers and peft, and the set of installed kernel
packages for mixers. A digest of all these is the file's name, so a file is never stale. A file that
cannot be read, or whose content was changed, is ignored with one line in the log, and the count is
made again. `count_profile` always counts models that are already built, because no configuration
describes their modules; a patched model's first step has files of its own (`stored_counts.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from streambp.fields import MAX_NUMBER, check_fields
from streambp.known_names import IRRELEVANT_CONFIG_KEYS, LIGER
from streambp.planner.configuration import read_config
from streambp.planner.fused_layers import Kernels
from streambp.planner.layer_costs import counted_saves
from streambp.planner.mixers import MIXER_KERNELS, Mixers, is_installed
from streambp.planner.profile import Profile, from_json, to_json
from streambp.planner.skeleton import Device, Skeleton, Source
from streambp.planner.survey import STREAMED_RECIPES, SurveyRecipe, survey
from streambp.reporting import reason

logger = logging.getLogger(__name__)
PACKAGE_FOLDER = Path(__file__).parent.parent
VERSIONED_PACKAGES = ("torch", "transformers", "peft")
DIGEST_ENTRY = "digest"  # entry of a file: a digest of the file's other entries
ProgressCallback = Callable[[str, float], None]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CountRequest:
    """Arguments of a count: the model whose training steps run on tensors without data to count
    memory and FLOPs, and what is assumed about dtype, kernels and so on.

    Attributes:
        source: an id on the Hub, a checkpoint's folder, a config.json, a configuration, or a model.
        dtype: dtype of the weights, unless the source is a model.
        lora: rank of added LoRA adapters; None: no adapters are added.
        bits: 4 or 8 for a quantised, frozen base; 16 for none.
        device: type of the device whose kernels and memory are counted.
        mixers: code of recurrent and convolutional layers: "kernels" of their packages, plain
            "torch", or the kernels "installed" here; None: kernels on a GPU, torch on a CPU.
        kernels: code of norms, gated activations and rotary embeddings, as in
            `StreamConfig.kernels`; "auto": Liger's on a GPU if liger-kernel is installed here.
        batch_size: number of rows.
        attention: "cudnn" or "flash", the attention kernels on a GPU; their workspaces are counted.
        lora_targets: names of the Linears that get adapters; (): all that peft accepts.
        with_liger: True: count Liger's kernels in place of `kernels`, installed or not.
        encoder_len: positions of each row of an encoder-decoder's encoder; None: the length of the
            decoder's rows, or the length that the configuration fixes.

    Raises:
        ConfigError: an argument has an invalid value.
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
    lora_targets: tuple[str, ...] = ()
    with_liger: bool = False
    encoder_len: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, lora=(1, 2**20), batch_size=(1, 2**20), encoder_len=(1, MAX_NUMBER))

    def skeleton(self) -> Skeleton:
        """Return a new `Skeleton`: the model with meta or fake tensors, adapters and quantised
        weights, whose training steps can run without data to count their memory and FLOPs.

        Raises:
            StreamBPError: the source is unknown, or an option does not apply to it.
        """
        skeleton = Skeleton(
            self.source,
            self.dtype,
            self.lora,
            self.bits,
            self.device,
            self.mixers,
            "liger" if self.with_liger else self.kernels,
            lora_targets=self.lora_targets,
            encoder_len=self.encoder_len,
        )
        skeleton.own_adapters = self.kernels != "auto"
        return skeleton


def count_profile(
    request: CountRequest,
    recipes: Sequence[SurveyRecipe],
    cache: bool = False,
    on_progress: ProgressCallback | None = None,
) -> Profile:
    """Return the memory and FLOPs of a model's training steps (`Profile`) for several ways to run a
    step. The steps run on tensors without data, to count their costs.

    Args:
        request: the model, and the assumptions about dtype, kernels and so on.
        recipes: the ways to run a step, such as gradient checkpointing.
        cache: True: read the result from a file in `folder()`, if an earlier call with equal
            arguments wrote the file; otherwise write the file. False: use no file. No file is used
            if the source is a built model (`nn.Module`).
        on_progress: progress callback; arguments are a text and the finished fraction. None: a line
            on the terminal says that steps are counted.

    Raises:
        StreamBPError: the model is unknown or cannot be counted.
    """
    file = None
    if cache and not isinstance(request.source, nn.Module):
        config = read_config(request.source)
        fields = {}
        for name, value in config.to_dict().items():
            if name not in IRRELEVANT_CONFIG_KEYS:
                fields[name] = value
        options = {}
        for field in dataclasses.fields(request):
            if field.name != "source":
                options[field.name] = getattr(request, field.name)
        recipe_texts = [repr(recipe) for recipe in recipes]
        parts: list[Any] = [type(config).__name__, fields, options, recipe_texts, code_in_use()]
        digest = hashlib.sha256(
            json.dumps(parts, sort_keys=True, default=str).encode()
        ).hexdigest()[:32]
        file = folder() / f"{digest}.json"
        stored = read_file(file, from_json)
        if stored is not None:
            return stored
    profile = survey(
        request.skeleton(),
        recipes,
        request.batch_size,
        None,
        request.attention,
        on_progress=on_progress,
    )
    if request.device != "cpu" and any(
        recipe.name == STREAMED_RECIPES[0].name for recipe in recipes
    ):
        profile = dataclasses.replace(
            profile, saves=counted_saves(request.skeleton(), profile.layers)
        )
    if file is not None:
        with contextlib.suppress(OSError):  # the file is optional
            write_file(file, to_json(profile))
    return profile


def folder() -> Path:
    """Return the folder of cached profiles: `streambp/plans` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streambp" / "plans"


def code_in_use() -> list[Any]:
    """Return a list of three values: versions of libraries, installed packages with kernels, and a
    digest of this package's sources. The counted memory and FLOPs of a model depend on these. A
    cached file with memory and FLOPs is used only if the three are unchanged."""
    packages = sorted({LIGER, *(kernel.package for kernel in MIXER_KERNELS)})
    versions = dict.fromkeys(VERSIONED_PACKAGES, "")
    for package in VERSIONED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    installed = [name for name in packages if is_installed(name)]
    return [list(versions.values()), installed, _source()]


def read_file(file: Path, restore: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the content of a JSON file that `write_file` has written, for example the counted
    memory and FLOPs of a model. None if the file does not exist.

    The result is also None if the file cannot be read or was changed since `write_file`. One line
    in the log then names the file and the reason.

    Args:
        file: path of the file.
        restore: function that makes the result from the file's entries, a dict without the digest.
    """
    try:
        entries = json.loads(file.read_text("utf-8"))
        if entries.pop(DIGEST_ENTRY) != _digest(entries):
            raise ValueError("its content was changed")
        return restore(entries)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever a damaged file leads to
        logger.warning("%s is ignored, and the count is made again: %s", file, reason(error))
        return None


def _digest(entries: Any) -> str:
    """Return the SHA-256 digest of a file's entries (dicts, lists, numbers and strings) as
    hexadecimal digits, to detect a damaged file."""
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def write_file(file: Path, data: dict[str, Any]) -> None:
    """Write data as a JSON file, with a digest by which `read_file` detects a damaged file. The
    file appears complete or not at all, because other processes may read or write the same path.

    Args:
        file: path of the file, whose folder is created.
        data: the entries, as JSON types.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, delete=False, encoding="utf-8"
    ) as stream:
        stream.write(json.dumps({**data, DIGEST_ENTRY: _digest(data)}))
    try:
        Path(stream.name).replace(file)
    except OSError:
        Path(stream.name).unlink(missing_ok=True)
        raise


def _source() -> str:
    """Return a digest of the paths and contents of this package's Python files. A cached profile (a
    model's counted memory and FLOPs) with another digest is outdated."""
    source_hash = hashlib.sha256()
    for path in sorted(PACKAGE_FOLDER.rglob("*.py")):
        source_hash.update(path.relative_to(PACKAGE_FOLDER).as_posix().encode() + path.read_bytes())
    return source_hash.hexdigest()
