"""Which kernels can attend a call, and which of them torch's own attention would take. One rule for
each kernel.

torch's operators are called directly, so the checks of `scaled_dot_product_attention` are not
asked: these rules stand in their place. Tensors without data (meta, fake) pass through every
operator with every head size; nothing but these rules keeps a trace from calling what a device
refuses.

Each rule yields the reasons why a kernel cannot attend, the first of which an
`AttentionChoiceError` tells. It looks at the call's shapes and at the `Platform`: the device, the
versions, torch's switches. `choose_backend` asks `platform_of` once for each attention call of a
layer call. Tests and traces hand in a `Platform` of their own ("an H200 with torch 2.13"), so every
rule can be tried where there is no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from streambp.accumulate import HALF

Version = tuple[int, ...]
FLASH_LIMIT = 256  # head sizes of FlashAttention, of cuDNN on the devices that have them
NATIVE = 128  # head sizes that cuDNN takes wherever it runs
MLA = (192, 128)  # of multi-head latent attention: the pair beyond it that cuDNN takes
WIDE = (256, 256)
LAST_FLASH_4 = (4, 0, 0, 18)  # whose functions return what torch 2.11 to 2.13 unpack


@dataclasses.dataclass(frozen=True)
class Platform:
    """A device and the software on it, as far as kernels of attention depend on them.

    Args:
        device: its type: "cuda" (ROCm's devices, too), "cpu", "meta" (which stands for a CUDA
            device that nothing is known of), or another.
        capability: CUDA's compute capability, (9, 0) for an H200; None: it is no CUDA device, or
            unknown.
        cudnn: version of cuDNN's runtime as torch gives it, 92000 for 9.20.0; 0: there is none.
        torch: major and minor version.
        hip: torch was built for ROCm.
        flash: the implementation that a user has put behind torch's FlashAttention operators with
            `torch.nn.attention.activate_flash_attention_impl`, "FA3" or "FA4"; None: torch's own,
            FlashAttention-2.
        flash_4: release and beta number of the package of FlashAttention-4, (4, 0, 0, 18) for
            4.0.0b18; () without it.
        cudnn_on, flash_on, efficient_on: what `torch.backends.cuda.enable_..._sdp` and
            `sdpa_kernel` leave on.
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


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """What an attention call asks of a kernel: head sizes D of q and k and D_v of v, dtype, dropout
    and softcap."""

    size: int
    value_size: int
    dtype: torch.dtype
    dropout: float = 0.0
    softcap: float | None = None

    @property
    def padded(self) -> int:
        """The head size that q, k and v have if they are padded to one, a multiple of 8. [Note:
        padded values]"""
        return -(-max(self.size, self.value_size) // 8) * 8

    @property
    def pair(self) -> tuple[int, int]:
        """(D, D_v)."""
        return self.size, self.value_size


def why_not_fused(call: AttentionShape, here: Platform) -> Iterator[str]:
    """Why no fused kernel can do it."""
    if call.dropout > 0.0:
        yield f"it has no dropout, and the model's is {call.dropout}"
    if call.softcap is not None:
        yield f"it has no softcap, and the model's is {call.softcap}"
    if here.device not in ("cpu", "cuda", "meta"):
        yield f"it does not run on {here.device}"
    if here.device != "cpu" and call.dtype not in HALF:
        yield (
            "it computes in float16 and bfloat16, and the model attends in "
            f"{str(call.dtype).removeprefix('torch.')}"
        )
    if here.capability is not None and not here.hip and here.capability < (8, 0):
        yield f"the device has compute capability {here.capability}; it needs (8, 0)"


def why_not_flash(call: AttentionShape, here: Platform) -> Iterator[str]:
    """Why neither FlashAttention nor the CPU's fused kernel can do it, with q, k and v padded to
    one head size.

    FlashAttention-2 checks D % 8, D <= 256 and D_v == D (flash_api.cpp); for backward on compute
    capability 8.6, 8.9, 12.0 and 12.1 torch's own attention leaves D 200 to 224 out
    (`check_requires_grad_and_head_dim_gt192_...`, sdp_utils.cpp). FlashAttention-3 and -4 behind
    torch's operators raise, they never fall back; their devices are those of
    torch/nn/attention/_fa3.py and _fa4.py, their head sizes those of FlashAttention's own
    interfaces.
    """
    yield from why_not_fused(call, here)
    if here.device == "cpu":
        return
    if call.padded > FLASH_LIMIT:
        yield f"the head size is {call.padded}; it takes at most {FLASH_LIMIT}"
    name = here.flash
    if here.hip or name is None:
        if (
            not here.hip
            and 192 < call.padded <= 224
            and (here.capability in ((8, 6), (8, 9)) or here.major >= 12)
        ):
            yield (
                f"it has no backward for head size {call.padded} on compute capability "
                f"{here.capability}"
            )
        return
    restore = "torch.nn.attention.restore_flash_attention_impl() brings FlashAttention-2 back"
    wanted = {"FA3": (9,), "FA4": (9, 10)}.get(name)
    if wanted is None:
        yield (
            f"{name} stands behind torch's FlashAttention operators, which streambp does not know; "
            f"{restore}"
        )
    elif here.device == "cuda" and here.major not in wanted:
        devices = " and ".join(f"{major}.x" for major in wanted)
        yield (
            f"{name} is activated, which runs on compute capability {devices}, not on "
            f"{here.capability}; {restore}"
        )
    if name == "FA3" and here.deterministic and call.padded > 192:
        yield f"FA3 is not deterministic at head size {call.padded}; {restore}"
    if name == "FA4" and here.major == 10 and call.padded > NATIVE and call.padded != WIDE[0]:
        yield (
            f"FA4 takes head sizes to {NATIVE} and {WIDE[0]} on compute capability 10.x, not "
            f"{call.padded}; {restore}"
        )
    # a release is later than its betas
    newer = len(here.flash_4) == 3 or here.flash_4 > LAST_FLASH_4
    if name == "FA4" and here.torch < (2, 14) and newer:
        found = ".".join(map(str, here.flash_4[:3])) + "".join(
            f"b{beta}" for beta in here.flash_4[3:]
        )
        yield (
            f"flash-attn-4 {found} returns more than torch {'.'.join(map(str, here.torch))} "
            "unpacks; pip install flash-attn-4==4.0.0b18"
        )


def why_not_cudnn(call: AttentionShape, here: Platform) -> Iterator[str]:
    """Why cuDNN cannot do it, forward and backward.

    Head sizes are multiples of 8 and, beyond 128, exactly (D, D_v) = (192, 128) or (256, 256): what
    torch 2.14 allows in backward (`check_cudnn_d256_bprop_head_dim`, ATen's sdp_utils.cpp), with
    the runtimes from which cuDNN's frontend takes them (`pre_validate_node` of
    scaled_dot_product_flash_attention.h): on 9.0 both from 9.13.0 (9.11 and 9.12 have a known fault
    near (192, 128)); on 10.x (192, 128) from 9.11.0, and (256, 256) from 9.23.0 with torch 2.14,
    whose frontend is the first to know it. 12.x has neither.
    """
    yield from why_not_fused(call, here)
    if here.device != "cuda":
        yield f"cuDNN does not run on {here.device}"
    elif here.hip:
        yield "torch was built for ROCm, which has no cuDNN"
    elif here.major < 9:
        yield f"cuDNN's attention needs compute capability (9, 0), not {here.capability}"
    elif not here.cudnn:
        yield "torch was built without cuDNN"
    elif here.cudnn in (91000, 91001):
        yield "cuDNN 9.10.0 and 9.10.1 refuse attention's backward"
    if call.size % 8 or call.value_size % 8:
        yield (
            f"the head sizes are {call.size} and {call.value_size}; cuDNN's attention takes "
            "multiples of 8"
        )
    native = max(call.pair) <= NATIVE
    if here.capability == (9, 0):
        native = native or (call.pair in (MLA, WIDE) and here.cudnn >= 91300)
    elif here.major == 10:
        native = native or (call.pair == MLA and here.cudnn >= 91100)
        native = native or (call.pair == WIDE and here.cudnn >= 92300 and here.torch >= (2, 14))
    if not native:
        yield (
            f"the head size is {call.size}, of values {call.value_size}; cuDNN's attention has at "
            f"most {NATIVE}, and {MLA} and {WIDE} on compute capability 9.0 and 10.x with new "
            "versions"
        )
    if here.deterministic:
        yield (
            "cuDNN's attention is not deterministic, and torch.use_deterministic_algorithms(True) "
            "asks for what is"
        )


def prefers_cudnn(here: Platform) -> bool:
    """Whether torch's own attention takes cuDNN before FlashAttention on this device.

    That is `check_prefer_cudnn_attention` of ATen/native/transformers/cuda/sdp_utils.cpp, with the
    switch `torch.backends.cuda.cudnn_sdp_enabled()`: compute capability 9.0, 9.3, 10.0 or 10.3
    (torch 2.13 built for CUDA 13 takes any 9.x and 10.x; there are no others), cuDNN's runtime
    newer than 9.15.0, and TORCH_CUDNN_SDPA_DEPRIORITIZED not 1. On 8.x and 12.x FlashAttention is
    as fast or faster.
    """
    newest = here.capability is not None and here.major in (9, 10) and here.capability[1] in (0, 3)
    return here.cudnn_on and not here.hip and newest and here.cudnn > 91500 and not here.cudnn_last


def why_not_efficient(call: AttentionShape, here: Platform) -> Iterator[str]:
    """Why torch's memory-efficient attention cannot do it: any D and D_v, multiples of 8 here.

    It is what torch's own attention takes where the head size is beyond FlashAttention's and
    cuDNN's (512 in Gemma 4's global layers and DeepSeek V4). ROCm has another kernel behind the
    operator, which is not called.
    """
    yield from why_not_fused(call, here)
    if here.device == "cpu" or here.hip:
        yield "torch's memory-efficient attention is CUDA's alone"
    if call.size % 8 or call.value_size % 8:
        yield f"the head sizes are {call.size} and {call.value_size}; it takes multiples of 8"
