"""Decide which kernels can attend a call, and which kernel torch's own attention would take. One
rule for each kernel.

torch's operators are called directly, so the checks of `scaled_dot_product_attention` do not run:
these rules replace the checks. Tensors without data (meta, fake) pass through every operator with
every head size. Only these rules keep a trace from calling an operator that a device refuses.

Each rule yields the reasons why a kernel cannot attend; an `AttentionChoiceError` reports the
first. A rule examines the call's shapes and the `Platform`: the device, the versions, torch's
switches. `choose_backend` calls `platform_of` once for each attention call of a layer call. Tests
and traces pass a `Platform` of their own ("an H200 with torch 2.13"), so every rule can be tested
without a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from streambp.accumulate import HALF_DTYPES

Version = tuple[int, ...]
FLASH_MAX_HEAD_SIZE = 256  # head sizes of FlashAttention, of cuDNN on the devices that have them
CUDNN_MAX_HEAD_SIZE = 128  # head sizes that cuDNN takes wherever it runs
MLA_HEAD_SIZES = (192, 128)  # (D, D_v) of multi-head latent attention, which cuDNN takes, too
WIDE_HEAD_SIZES = (256, 256)
# the last whose functions return what torch 2.11 to 2.13 unpack
MAX_FLASH_4_VERSION = (4, 0, 0, 18)


@dataclasses.dataclass(frozen=True)
class Platform:
    """Properties of a device and its software that decide which attention kernels can run.

    Attributes:
        device: type of the device: "cuda" (ROCm's devices, too), "cpu", "meta" (a CUDA device
            without known properties), or another.
        capability: CUDA's compute capability, (9, 0) for an H200; None: no CUDA device, or unknown.
        cudnn: version of cuDNN's runtime as torch reports it, 92000 for 9.20.0; 0: no cuDNN.
        torch: major and minor version of torch.
        hip: True if torch was built for ROCm.
        flash: the implementation behind torch's FlashAttention operators, "FA3" or "FA4", if a user
            called `torch.nn.attention.activate_flash_attention_impl`; None: torch's own,
            FlashAttention-2.
        flash_4: release and beta number of the package of FlashAttention-4, (4, 0, 0, 18) for
            4.0.0b18; () without the package.
        cudnn_on: True if `torch.backends.cuda.enable_cudnn_sdp` and `sdpa_kernel` leave cuDNN
            enabled.
        flash_on: True if `enable_flash_sdp` and `sdpa_kernel` leave FlashAttention enabled.
        efficient_on: True if `enable_mem_efficient_sdp` and `sdpa_kernel` leave memory-efficient
            attention enabled.
        cudnn_last: True if TORCH_CUDNN_SDPA_DEPRIORITIZED is 1.
        deterministic: True for `torch.use_deterministic_algorithms(True)` without warn_only.
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
        """Return the major number of the compute capability, such as 9 for Hopper; 0 if unknown."""
        return 0 if self.capability is None else self.capability[0]


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Properties of an attention call that decide if a kernel supports the call.

    Attributes:
        size: D, head size of q and k.
        value_size: D_v, head size of v.
        dtype: dtype of q, k and v.
        dropout: probability to drop a weight.
        softcap: limit of the scores; None: no limit.
        biased: True if a bias for each distance of two positions is added to the scores.
    """

    size: int
    value_size: int
    dtype: torch.dtype
    dropout: float = 0.0
    softcap: float | None = None
    biased: bool = False

    @property
    def padded(self) -> int:
        """Return the head size, a multiple of 8, to which q, k and v are padded for kernels that
        require one head size for all three. [Note: padded values]"""
        return -(-max(self.size, self.value_size) // 8) * 8

    @property
    def pair(self) -> tuple[int, int]:
        """Return the head sizes (D, D_v), for rules of kernels that accept only some pairs."""
        return self.size, self.value_size


def why_not_fused(call: AttentionShape, platform: Platform) -> Iterator[str]:
    """Yield the reasons why no fused kernel (FlashAttention, cuDNN and others) can compute an
    attention call.

    Args:
        call: properties of the attention call, such as head sizes and dtype.
        platform: properties of the device and its software.
    """
    if call.dropout > 0.0:
        yield f"it has no dropout, and the model's is {call.dropout}"
    if call.softcap is not None:
        yield f"it has no softcap, and the model's is {call.softcap}"
    if call.biased:
        yield "it adds no bias for each distance of two positions, and the model does"
    if platform.device not in ("cpu", "cuda", "meta"):
        yield f"it does not run on {platform.device}"
    if platform.device != "cpu" and call.dtype not in HALF_DTYPES:
        yield (
            "it computes in float16 and bfloat16, and the model attends in "
            f"{str(call.dtype).removeprefix('torch.')}"
        )
    if platform.capability is not None and not platform.hip and platform.capability < (8, 0):
        yield f"the device has compute capability {platform.capability}; it needs (8, 0)"


def why_not_flash(call: AttentionShape, platform: Platform) -> Iterator[str]:
    """Yield the reasons why neither FlashAttention nor the CPU's fused kernel can attend, with q, k
    and v padded to one head size.

    FlashAttention-2 checks D % 8, D <= 256 and D_v == D (flash_api.cpp). PyTorch's own attention
    excludes backward for D 200 to 224 on compute capability 8.6, 8.9, 12.0 and 12.1
    (`check_requires_grad_and_head_dim_gt192_...`, sdp_utils.cpp). FlashAttention-3 and -4 behind
    torch's operators raise and never fall back. The files torch/nn/attention/_fa3.py and _fa4.py
    list the devices of both. FlashAttention's own interfaces list the head sizes.

    Args:
        call: properties of the attention call, such as head sizes and dtype.
        platform: properties of the device and its software.
    """
    yield from why_not_fused(call, platform)
    if platform.device == "cpu":
        return
    if call.padded > FLASH_MAX_HEAD_SIZE:
        yield f"the head size is {call.padded}; it takes at most {FLASH_MAX_HEAD_SIZE}"
    name = platform.flash
    if platform.hip or name is None:
        if (
            not platform.hip
            and 192 < call.padded <= 224
            and (platform.capability in ((8, 6), (8, 9)) or platform.major >= 12)
        ):
            yield (
                f"it has no backward for head size {call.padded} on compute capability "
                f"{platform.capability}"
            )
        return
    restore = "torch.nn.attention.restore_flash_attention_impl() brings FlashAttention-2 back"
    majors = {"FA3": (9,), "FA4": (9, 10)}.get(name)
    if majors is None:
        yield (
            f"{name} stands behind torch's FlashAttention operators, which streambp does not know; "
            f"{restore}"
        )
    elif platform.device == "cuda" and platform.major not in majors:
        devices = " and ".join(f"{major}.x" for major in majors)
        yield (
            f"{name} is activated, which runs on compute capability {devices}, not on "
            f"{platform.capability}; {restore}"
        )
    if name == "FA3" and platform.deterministic and call.padded > 192:
        yield f"FA3 is not deterministic at head size {call.padded}; {restore}"
    if (
        name == "FA4"
        and platform.major == 10
        and call.padded > CUDNN_MAX_HEAD_SIZE
        and call.padded != WIDE_HEAD_SIZES[0]
    ):
        yield (
            f"FA4 takes head sizes to {CUDNN_MAX_HEAD_SIZE} and {WIDE_HEAD_SIZES[0]} on compute "
            "capability 10.x, not "
            f"{call.padded}; {restore}"
        )
    # a release is later than its betas
    newer = len(platform.flash_4) == 3 or platform.flash_4 > MAX_FLASH_4_VERSION
    if name == "FA4" and platform.torch < (2, 14) and newer:
        version = ".".join(map(str, platform.flash_4[:3])) + "".join(
            f"b{beta}" for beta in platform.flash_4[3:]
        )
        yield (
            f"flash-attn-4 {version} returns more than torch {'.'.join(map(str, platform.torch))} "
            "unpacks; pip install flash-attn-4==4.0.0b18"
        )


def why_not_cudnn(call: AttentionShape, platform: Platform) -> Iterator[str]:
    """Yield the reasons why cuDNN cannot attend, forward and backward.

    D and D_v must be multiples of 8 up to 128. Two larger pairs (D, D_v) are supported as well:

        compute capability  (192, 128)     (256, 256)
        9.0                 cuDNN 9.13.0   cuDNN 9.13.0
        10.x                cuDNN 9.11.0   cuDNN 9.23.0 and torch 2.14
        any other           never          never

    Shown are the oldest versions that are used. Older runtimes are refused by cuDNN's frontend
    (`pre_validate_node` of scaled_dot_product_flash_attention.h). Versions 9.11 and 9.12 have a
    known fault near (192, 128) on 9.0. ATen's sdp_utils.cpp allows backward for the two pairs
    from torch 2.14 on (`check_cudnn_d256_bprop_head_dim`).

    Args:
        call: properties of the attention call, such as head sizes and dtype.
        platform: properties of the device and its software.
    """
    yield from why_not_fused(call, platform)
    if platform.device != "cuda":
        yield f"cuDNN does not run on {platform.device}"
    elif platform.hip:
        yield "torch was built for ROCm, which has no cuDNN"
    elif platform.major < 9:
        yield f"cuDNN's attention needs compute capability (9, 0), not {platform.capability}"
    elif not platform.cudnn:
        yield "torch was built without cuDNN"
    elif platform.cudnn in (91000, 91001):
        yield "cuDNN 9.10.0 and 9.10.1 refuse attention's backward"
    if call.size % 8 or call.value_size % 8:
        yield (
            f"the head sizes are {call.size} and {call.value_size}; cuDNN's attention takes "
            "multiples of 8"
        )
    native = max(call.pair) <= CUDNN_MAX_HEAD_SIZE
    if platform.capability == (9, 0):
        native = native or (
            call.pair in (MLA_HEAD_SIZES, WIDE_HEAD_SIZES) and platform.cudnn >= 91300
        )
    elif platform.major == 10:
        native = native or (call.pair == MLA_HEAD_SIZES and platform.cudnn >= 91100)
        native = native or (
            call.pair == WIDE_HEAD_SIZES and platform.cudnn >= 92300 and platform.torch >= (2, 14)
        )
    if not native:
        yield (
            f"the head size is {call.size}, of values {call.value_size}; cuDNN's attention has at "
            f"most {CUDNN_MAX_HEAD_SIZE}, and {MLA_HEAD_SIZES} and {WIDE_HEAD_SIZES} on compute "
            "capability 9.0 and 10.x with new "
            "versions"
        )
    if platform.deterministic:
        yield (
            "cuDNN's attention is not deterministic, and torch.use_deterministic_algorithms(True) "
            "asks for what is"
        )


def prefers_cudnn(platform: Platform) -> bool:
    """True if torch's own attention prefers cuDNN to FlashAttention on a device with the properties
    `platform`.

    The rule is `check_prefer_cudnn_attention` of ATen/native/transformers/cuda/sdp_utils.cpp, with
    the switch `torch.backends.cuda.cudnn_sdp_enabled()`. The rule requires compute capability 9.0,
    9.3, 10.0 or 10.3, cuDNN's runtime newer than 9.15.0, and TORCH_CUDNN_SDPA_DEPRIORITIZED not 1.
    Builds of torch 2.13 for CUDA 13 accept any 9.x and 10.x, which adds no existing device.
    FlashAttention is at least as fast on 8.x and 12.x.
    """
    newest = (
        platform.capability is not None
        and platform.major in (9, 10)
        and platform.capability[1] in (0, 3)
    )
    return (
        platform.cudnn_on
        and not platform.hip
        and newest
        and platform.cudnn > 91500
        and not platform.cudnn_last
    )


def why_not_efficient(call: AttentionShape, platform: Platform) -> Iterator[str]:
    """Yield the reasons why torch's memory-efficient attention cannot compute an attention call.
    Here D and D_v may be any multiples of 8.

    torch's own attention takes this kernel where the head size is beyond FlashAttention's and
    cuDNN's (512 in Gemma 4's global layers and DeepSeek V4). ROCm has another kernel behind the
    operator, which is not called.

    Args:
        call: properties of the attention call, such as head sizes and dtype.
        platform: properties of the device and its software.
    """
    yield from why_not_fused(call, platform)
    if platform.device == "cpu" or platform.hip:
        yield "torch's memory-efficient attention is CUDA's alone"
    if call.size % 8 or call.value_size % 8:
        yield f"the head sizes are {call.size} and {call.value_size}; it takes multiples of 8"
