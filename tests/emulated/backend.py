"""torch's device "emulated": device.cpp, built once for each torch and each state of that file, and
`torch.emulated`.

It is a process' only accelerator once it is registered, so a process asks for it before anything
else: STREAMBP_TEST_DEVICE=emulated (tests/device.py). Trainer and accelerate see it, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "emulated"
DEVICES = 2
LIMIT = 64 * 2**30  # bytes of each, at first
SOURCE = Path(__file__).with_name("device.cpp")


def why_not() -> str | None:
    """Why this machine cannot build the device; None if it can, or if it is built already."""
    if not sys.platform.startswith("linux"):
        return f"the emulated device needs Linux, not {platform.system()}"
    if library().exists():
        return None
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"the emulated device needs a C++ compiler, and there is no {compiler}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"the emulated device needs Python's headers, and there is no {header}"
    if not _find_ninja():
        return "the emulated device needs ninja (pip install ninja)"
    return None


def _find_ninja() -> bool:
    """Whether there is one, beside Python too: an environment's programs can be called without its
    being activated."""
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + scripts
    return bool(cpp_extension.is_ninja_available())


def library() -> Path:
    """Where the built device is, or is to be: one for each Python, torch and device.cpp."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return (
        cache
        / "streambp"
        / f"{sys.implementation.cache_tag}-torch-{torch.__version__}-{key}"
        / f"{NAME}.so"
    )


@functools.lru_cache
def extension() -> Any:
    """The extension's module; building it takes most of a minute."""
    path = library()
    if path.exists():
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        print(f"building {path}, once", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=path.parent
        ) as folder:  # processes that build at once do not meet
            module = cpp_extension.load(
                NAME, str(SOURCE), ["-O1", "-g0", "-w"], build_directory=folder, with_cuda=False
            )
            os.replace(Path(folder) / f"{NAME}.so", path)
    atexit.register(module.shutdown)
    return module


def index_of(device: Any = None) -> int:
    """Its number; the current device's where none is said."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(extension().current_device()) if index is None else int(index)


class Device(contextlib.ContextDecorator):
    """`torch.cuda.device`, for these devices."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.previous_index = extension().exchange_device(self.index)

    def __exit__(self, *_: object) -> None:
        extension().exchange_device(self.previous_index)


@functools.lru_cache
def register() -> types.ModuleType:
    """Make the device this process' accelerator; `torch.emulated`, which has what programs ask
    `torch.cuda` for."""
    torch.utils.rename_privateuse1_backend(NAME)
    c = extension()
    c.set_devices(DEVICES)
    module = types.ModuleType(f"torch.{NAME}")

    def general(name: str) -> Any:
        function = getattr(torch.accelerator, name)
        return lambda device=None: function(torch.device(NAME, index_of(device)))

    @contextlib.contextmanager
    def stream(requested: Any) -> Iterator[None]:
        with requested or contextlib.nullcontext():
            yield

    def seed_all(seed: int) -> None:
        for index in range(c.device_count()):
            c.manual_seed(index, seed)

    def set_states(states: Any) -> None:
        for index, state in enumerate(states):
            c.set_rng_state(index, state)

    vars(module).update(
        {
            name: general(name)
            for name in (
                "synchronize",
                "current_stream",
                "memory_allocated",
                "max_memory_allocated",
            )
        },
        **{
            name: general(name)
            for name in ("memory_reserved", "reset_peak_memory_stats", "memory_stats")
        },
        max_memory_reserved=general("max_memory_reserved"),
        mem_get_info=general("get_memory_info"),
        empty_cache=lambda: torch.accelerator.empty_cache(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=c.device_count,
        current_device=c.current_device,
        set_device=lambda device: c.set_device(index_of(device)),
        device=Device,
        stream=stream,
        Stream=lambda device=None, priority=0: torch.Stream(
            torch.device(NAME, index_of(device)), priority=priority
        ),
        Event=lambda enable_timing=False, **_: torch.Event(NAME, enable_timing=enable_timing),
        get_device_name=lambda device=None: "an emulated device",
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
        is_bf16_supported=lambda **_: True,
        get_rng_state=lambda device=NAME: c.get_rng_state(index_of(device)),
        set_rng_state=lambda state, device=NAME: c.set_rng_state(index_of(device), state),
        get_rng_state_all=lambda: [c.get_rng_state(index) for index in range(c.device_count())],
        set_rng_state_all=set_states,
        manual_seed=lambda seed: c.manual_seed(c.current_device(), seed),
        manual_seed_all=seed_all,
        initial_seed=lambda: c.initial_seed(c.current_device()),
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    os.environ["ACCELERATE_TORCH_DEVICE"] = (
        NAME  # accelerate, and so Trainer, looks for makers that it knows
    )
    return module
