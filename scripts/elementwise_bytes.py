"""Bytes that the elementwise parts of a layer move for a chunk, and seconds of a step by the
planner, by `kernels`.

    python scripts/elementwise_bytes.py                                # bytes a token, forward and backward, of each part
    python scripts/elementwise_bytes.py --seconds                      # seconds on an H100 and an H200, 4k to 64k

Shapes are those of Qwen3-8B in bfloat16. eager: what the planner's counting mode counts of
transformers' own operations. compiled: what inductor counts of the buffers that its generated
kernels read and write, fused as for a GPU; they are C++'s. liger: bytes that the loads and stores
of Liger's kernels touch in Triton's interpreter (TRITON_INTERPRET=1 is set), if liger-kernel is
installed; a norm's kernel loads its weight for each row anew, from a GPU's cache. planned: what the
planner takes a step to move (`planner/fused_layers.py`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from streambp.model import compiled_regions
from streambp.model.compiled_regions import RegionCompiler
from streambp.planner import plan
from streambp.planner.count import StepCount
from streambp.planner.fused_layers import Fusion, gate_kernel, norm_kernel, rotary_kernel
from streambp.planner.profile import Setting

TOKENS = 32
HIDDEN, MIDDLE, HEADS, KV_HEADS, SIZE = 4096, 12_288, 32, 8, 128
CHOICES: tuple[Fusion, ...] = ("liger", "compiled")
GIB = 2**30
Part = tuple[Callable[..., Any], list[Tensor]]


def parts(device: str) -> dict[str, Part]:
    """Each part of a layer: the model's own code, and inputs that want gradients."""

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        module = modeling_qwen3.Qwen3RMSNorm(x.shape[-1])
        module._parameters["weight"] = weight  # type: ignore[assignment]
        return module(x)  # type: ignore[no-any-return]

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up

    q, k = (
        some(1, TOKENS, HEADS, SIZE).transpose(1, 2),
        some(1, TOKENS, KV_HEADS, SIZE).transpose(1, 2),
    )
    angles = [some(1, TOKENS, SIZE).detach() for _ in range(2)]
    rows = TOKENS * (HEADS + KV_HEADS)
    return {
        "norm of hidden states": (norm, [some(TOKENS, HIDDEN), some(HIDDEN)]),
        "norms of queries and keys": (norm, [some(rows, SIZE), some(SIZE)]),
        "activation times up": (gated, [some(TOKENS, MIDDLE), some(TOKENS, MIDDLE)]),
        "rotation": (
            modeling_qwen3.apply_rotary_pos_emb,
            [q.detach().requires_grad_(), k.detach().requires_grad_(), *angles],
        ),
    }


def backward_of(out: Any, inputs: list[Tensor]) -> Callable[[], Any]:
    """Of what a part gave, a Tensor [...] or two."""
    outs = list(out) if isinstance(out, tuple) else [out]
    upstream, trained_inputs = (
        [torch.ones_like(x) for x in outs],
        [x for x in inputs if x.requires_grad],
    )
    return lambda: torch.autograd.grad(outs, trained_inputs, upstream)


def counted(run: Callable[..., Any], inputs: list[Tensor]) -> tuple[int, int]:
    """Bytes that the planner's counting mode counts, forward and backward."""
    backward = backward_of(run(*inputs), inputs)
    with StepCount(None) as count:
        run(*inputs)
    forward = count.work.traffic
    with StepCount(None) as count:
        backward()
    return forward, count.work.traffic


def by_inductor(run: Any, inputs: list[Tensor]) -> tuple[int, int]:
    """Bytes of the buffers that generated kernels read and write, forward and backward."""
    from torch._inductor import compile_fx, config, metrics

    torch._dynamo.reset()
    config.fx_graph_cache = False  # what comes from the cache is not counted
    config.force_pointwise_cat = True  # as it does for a GPU
    compile_fx.inductor_metrics_log.setLevel("INFO")  # which is when inductor counts
    compile_fx.inductor_metrics_log.propagate = False
    metrics.reset()
    backward = backward_of(RegionCompiler().compile_function(run, "part")(*inputs), inputs)
    forward = metrics.num_bytes_accessed
    backward()
    return forward, metrics.num_bytes_accessed - forward


class TouchedBytes:
    """Counts the bytes that loads and stores in Triton's interpreter touch."""

    def __init__(self) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.bytes = 0
        for name, mask_position in (("create_masked_load", 1), ("create_masked_store", 2)):
            self._count(InterpreterBuilder, name, mask_position)

    def _count(self, builder: Any, name: str, mask_position: int) -> None:
        real = getattr(builder, name)

        def counting(interpreter: Any, pointers: Any, *args: Any) -> Any:
            mask = args[mask_position - 1]
            self.bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return real(interpreter, pointers, *args)

        setattr(builder, name, counting)


def by_liger(touched: TouchedBytes) -> dict[str, Part]:
    """Liger's functions for the parts."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    functions: dict[str, Callable[..., Any]] = {
        "norm of hidden states": lambda x, w: LigerRMSNormFunction.apply(
            x, w, 1e-6, 0.0, "llama", True
        ),
        "norms of queries and keys": lambda x, w: LigerRMSNormFunction.apply(
            x, w, 1e-6, 0.0, "llama", True
        ),
        "activation times up": lambda gate, up: LigerSiLUMulFunction.apply(gate * 1, up * 1),
        "rotation": lambda q, k, cos, sin: LigerRopeFunction.apply(q * 1, k * 1, cos, sin),
    }
    return {name: (functions[name], inputs) for name, (_, inputs) in parts("cpu").items()}


def planned(kernels: Fusion) -> dict[str, Part]:
    """What the planner counts of them."""
    functions: dict[str, Callable[..., Any]] = {
        "norm of hidden states": lambda x, w: norm_kernel(x, w, kernels),
        "norms of queries and keys": lambda x, w: norm_kernel(x, w, kernels),
        "activation times up": lambda gate, up: gate_kernel(gate, up, kernels),
        "rotation": lambda q, k, cos, sin: rotary_kernel(q, k, kernels),
    }
    return {name: (functions[name], inputs) for name, (_, inputs) in parts("meta").items()}


def print_bytes() -> None:
    """KiB a token of each part, forward + backward."""
    table: dict[str, dict[str, tuple[int, int]]] = {
        "eager": {name: counted(run, inputs) for name, (run, inputs) in parts("meta").items()},
        "compiled": {
            name: by_inductor(run, inputs) for name, (run, inputs) in parts("cpu").items()
        },
    }
    try:
        touched = TouchedBytes()
        from tests.ligers_kernels import teach_the_interpreter

        teach_the_interpreter()
        bytes_of_part = {}
        for name, (run, inputs) in by_liger(touched).items():
            touched.bytes = 0
            backward = backward_of(run(*inputs), inputs)
            forward, touched.bytes = touched.bytes, 0
            backward()
            bytes_of_part[name] = forward, touched.bytes
        table["liger"] = bytes_of_part
    except ImportError as error:
        print(f"without Liger's own kernels: {error}")
    for choice in CHOICES:
        table[f"{choice}, planned"] = {
            name: counted(run, inputs) for name, (run, inputs) in planned(choice).items()
        }
    print(f"\nKiB a token, forward + backward, by what counts them (torch {torch.__version__}):")
    print(f"{'':28}" + "".join(f"{name:>20}" for name in table))
    for name in table["eager"]:
        cells = [
            f"{row[name][0] / TOKENS / 1024:.1f} + {row[name][1] / TOKENS / 1024:.1f}"
            for row in table.values()
        ]
        print(f"{name:28}" + "".join(f"{cell:>20}" for cell in cells))


def print_seconds(lengths: list[int]) -> None:
    """Of the fastest plan that fits, by device and kernels."""
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=HIDDEN, intermediate_size=MIDDLE, num_hidden_layers=36, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=SIZE, max_position_embeddings=40_960,
    )  # fmt: skip
    print("\nSeconds of a step of Qwen3-8B by the planner, all parameters, no optimizer states:")
    for kernels in ("own", "compiled", "liger"):
        for device, memory in (("H100", 80 * GIB), ("H200", 141 * GIB)):
            for length in lengths:
                options: Any = {
                    "gpu_memory": memory,
                    "setting": Setting(optimizer=0),
                    "rates": device,
                }
                choice = plan(config, length, kernels=kernels, cache=True, **options).choice  # type: ignore[arg-type]
                text = "does not fit"
                if choice is not None:
                    seconds = choice.seconds
                    text = (
                        f"{seconds.total:.2f} s, elementwise {seconds.elementwise:.2f} "
                        f"({choice.method}, {choice.chunk_size:,})"
                    )
                print(f"{kernels:9}{device:6}{length:>8,}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", action="store_true", help="of a step, by the planner")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument("--backend", default="inductor", help="of compiled parts")
    arguments = parser.parse_args()
    compiled_regions.BACKEND = arguments.backend
    if arguments.seconds:
        print_seconds(arguments.lengths)
    else:
        print_bytes()


if __name__ == "__main__":
    main()
