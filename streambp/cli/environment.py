"""`streambp env`: versions, devices and kernels, for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

import streambp
from streambp.attention.backend import choose_backend
from streambp.device import reports_memory
from streambp.offload.engines import make_engine
from streambp.reporting import report_safely

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "liger-kernel", "bitsandbytes", "triton",
    "flash-attn",
    "flash-linear-attention", "mamba-ssm", "causal-conv1d", "axolotl", "ms-swift", "verl", "unsloth",
)  # fmt: skip
ENVIRONMENT_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "STREAMBP_LAUNCH",
)
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # heads of the attention call whose kernel is reported


def environment() -> dict[str, Any]:
    """Return a dict for a bug report: versions of Python and of packages by name, the devices with
    their kernels ("devices"), and environment variables ("environment").

    The dict has variables such as CUDA_VISIBLE_DEVICES, if they are set. If a device cannot be
    read, its entry is {"error": the error's text}.
    """
    facts: dict[str, Any] = {
        "streambp": streambp.__version__,
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
    }
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.device("cpu")]
    if accelerator is not None:
        devices += [
            torch.device(accelerator.type, index)
            for index in range(torch.accelerator.device_count())
        ]
    facts["devices"] = [
        report_safely(_device, device, otherwise=lambda why: {"error": why}) for device in devices
    ]
    facts["environment"] = {
        name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ
    }
    return facts


def _device(device: torch.device) -> dict[str, Any]:
    """Return a dict for a bug report: a device's name, memory and attention kernels. The entry
    "offload engine" says in words if copies to host memory run at the same time as computation."""
    parts: dict[str, Any] = {"device": str(device)}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        parts["name"] = module.get_device_name(device)
        parts["capability"] = ".".join(
            map(str, getattr(module, "get_device_capability", lambda _: ())(device) or ())
        )
        parts["driver"] = torch.version.cuda or torch.version.hip or ""
        if reports_memory(device):
            free, total = module.mem_get_info(device)
            parts["memory"] = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of it free"
        parts["allocator"] = (
            getattr(torch.cuda, "get_allocator_backend", lambda: "")()
            if device.type == "cuda"
            else ""
        )
    else:
        parts["name"] = (
            f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        parts[f"attention in {name}"] = report_safely(
            _attention, device, dtype, otherwise=lambda why: f"none ({why})"
        )
    parts["offload engine"] = report_safely(
        lambda: make_engine(device).name, otherwise=lambda why: f"none ({why})"
    )
    return {name: value for name, value in parts.items() if value}


def _attention(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the attention kernel that a step would use on this device and in this
    dtype, for heads of a usual size."""
    q = torch.empty(1, HEADS, 1, HEAD_SIZE, device=device, dtype=dtype)  # [B, H, T, D]
    v = torch.empty(1, KV_HEADS, 1, HEAD_SIZE, device=device, dtype=dtype)  # [B, H_kv, T, D]
    return f"{choose_backend('auto', q, v, 0.0).name} for heads of {HEAD_SIZE}"


def format_facts(facts: dict[str, Any], indent: str = "") -> str:
    """Return the result of `environment` as text with one line for each entry, to copy into an
    issue.

    Args:
        facts: the dict; dicts and lists inside it are indented.
        indent: spaces before each line.
    """
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict | list):
            lines.append(f"{indent}{name}:")
            for part in value if isinstance(value, list) else [value]:
                lines.append(format_facts(part, f"{indent}  "))
        else:
            lines.append(f"{indent}{name}: {value}")
    return "\n".join(line for line in lines if line)
