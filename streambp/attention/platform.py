"""What decides which kernels attend, beside the shapes of a call: the device, the versions, torch's switches.

`choose_backend` asks `platform_of` once for each attention call of a layer call. Tests and traces hand in a `Platform` of
their own ("an H200 with torch 2.13"), so every rule can be tried where there is no device.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import re

import torch
from torch.nn.attention import current_flash_attention_impl

Version = tuple[int, ...]
FLASH_4 = "flash-attn-4"  # the package of FlashAttention-4


@dataclasses.dataclass(frozen=True)
class Platform:
    """A device and the software on it, as far as kernels of attention depend on them.

    Args:
        device: its type: "cuda" (ROCm's devices, too), "cpu", "meta" (which stands for a CUDA device that nothing is known
            of), or another.
        capability: CUDA's compute capability, (9, 0) for an H200; None: it is no CUDA device, or unknown.
        cudnn: version of cuDNN's runtime as torch gives it, 92000 for 9.20.0; 0: there is none.
        torch: major and minor version.
        hip: torch was built for ROCm.
        flash: the implementation that a user has put behind torch's FlashAttention operators with
            `torch.nn.attention.activate_flash_attention_impl`, "FA3" or "FA4"; None: torch's own, FlashAttention-2.
        flash_4: release and beta number of the package of FlashAttention-4, (4, 0, 0, 18) for 4.0.0b18; () without it.
        cudnn_on, flash_on, efficient_on: what `torch.backends.cuda.enable_..._sdp` and `sdpa_kernel` leave on.
        cudnn_last: TORCH_CUDNN_SDPA_DEPRIORITIZED is 1.
        deterministic: `torch.use_deterministic_algorithms(True)`, without warn_only.
    """

    device: str
    capability: tuple[int, int] | None = None
    cudnn: int = 0
    torch: Version = (2, 13)
    hip: bool = False
    flash: str | None = None
    flash_4: Version = ()
    cudnn_on: bool = True
    flash_on: bool = True
    efficient_on: bool = True
    cudnn_last: bool = False
    deterministic: bool = False

    @property
    def major(self) -> int:
        """Of the compute capability; 0 if it is unknown."""
        return 0 if self.capability is None else self.capability[0]

    @property
    def no_flash_backward_at_200(self) -> bool:
        """Whether FlashAttention-2 has no backward for head sizes 200 to 224, as torch's own attention has it: on compute
        capabilities 8.6, 8.9, 12.0 and 12.1 (`check_requires_grad_and_head_dim_gt192_...`, ATen's sdp_utils.cpp)."""
        return self.capability in ((8, 6), (8, 9)) or self.major >= 12


def platform_of(device: torch.device) -> Platform:
    """The platform of a device in this process, now: switches change at any time."""
    switches = torch.backends.cuda
    flash_on = switches.flash_sdp_enabled()
    if device.type != "cuda":
        return Platform(device.type, torch=_torch(), flash_on=flash_on)
    flash = current_flash_attention_impl()
    return Platform(
        "cuda",
        torch.cuda.get_device_capability(device),
        (torch.backends.cudnn.version() or 0) if torch.backends.cudnn.is_available() else 0,
        _torch(),
        torch.version.hip is not None,
        flash,
        _flash_4() if flash is not None else (),
        switches.cudnn_sdp_enabled(),
        flash_on,
        switches.mem_efficient_sdp_enabled(),
        os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1",
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _torch() -> Version:
    return _numbers(torch.__version__)[:2]


def _flash_4() -> Version:
    try:
        return _numbers(importlib.metadata.version(FLASH_4))
    except importlib.metadata.PackageNotFoundError:
        return ()


@functools.lru_cache
def _numbers(version: str) -> Version:
    """(4, 0, 0, 18) of "4.0.0b18", (2, 13, 0) of "2.13.0+cu130"; a pre-release has one number more than its release."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
