"""The kernels compiled for Ampere and Hopper, which takes no device: they compile, and keep
everything in registers.

covers: head/triton_fold.py, head/triton_gradient.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from streambp.head import triton_fold, triton_gradient
from tests.head.interpreter import needs_triton

FOLD = {"product": "*{}", "labels": "*i64", "out": "*fp32", "best_out": "*i64"}
GRADIENT = {"product": "*{}", "labels": "*i64"} | dict.fromkeys(
    ("lse", "entropy", "d_log_probs", "d_entropy", "d_mean", "d_lse"), "*fp32"
)
INTEGERS = dict.fromkeys(("stride", "columns", "first"), "i32")
FLOATS = dict.fromkeys(("scale", "softcap", "temperature"), "fp32")
USED_FLAGS = dict.fromkeys(("has_log_probs", "has_entropy", "has_mean", "has_lse"), True)
LOG_PROBS_FLAGS = {**USED_FLAGS, "has_entropy": False, "has_mean": False, "has_lse": False}
KERNELS = {
    "fold": (triton_fold, {**FOLD, **INTEGERS, **FLOATS}, {"fields": triton_fold.STATISTICS_COUNT}),
    "gradient": (triton_gradient, {**GRADIENT, **INTEGERS, **FLOATS, "share": "fp32"}, USED_FLAGS),
    "gradient of log p alone": (
        triton_gradient, {**GRADIENT, **INTEGERS, **FLOATS, "share": "fp32"}, LOG_PROBS_FLAGS,
    ),
}  # fmt: skip


def compiled(name, dtype, capability, capped):
    """A kernel with its widest block."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, signature, constants = KERNELS[name]
    constants = {**constants, "capped": capped, "width": module.MAX_BLOCK_WIDTH}
    signature = {key: kind.format(dtype) for key, kind in signature.items()}
    order = module._kernel.arg_names
    signature = {key: signature.get(key, "constexpr") for key in order}
    # As at a Qwen3 vocabulary: pointers are aligned, and so are rows.
    aligned = {
        (order.index(key),): [["tt.divisibility", 16]]
        for key in signature
        if signature[key].startswith("*")
    }
    aligned |= {(order.index(key),): [["tt.divisibility", 16]] for key in ("stride", "columns")}
    source = ASTSource(module._kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": triton_fold.WARPS}
    )


def resources(kernel, folder):
    """Registers a thread, bytes of local memory a thread, and whether 16 bytes of global memory are
    read at a time."""
    import triton

    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", binary]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"], "ld.global.v4.b32" in kernel.asm["ptx"]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("name", "dtype", "capped"),
    [
        ("fold", "bf16", False),
        ("gradient", "bf16", True),
        *(
            pytest.param(name, dtype, capped, marks=pytest.mark.full)
            for name in KERNELS
            for dtype in ("bf16", "fp16", "fp32")
            for capped in (False, True)
        ),
    ],
)
def test_kernels_compile_without_spills(name, dtype, capped, capability, tmp_path):
    registers, spilled, vectors = resources(compiled(name, dtype, capability, capped), tmp_path)
    print(
        f"{name}, {dtype}, softcap {capped}, sm_{capability}: {registers} registers, {spilled} "
        "bytes spilled"
    )
    assert spilled == 0
    # three or four programs of 8 warps a multiprocessor
    assert registers <= (80 if name == "fold" else 64)
    assert vectors
