"""A step of a model of public shape on meta tensors, as on a machine that nobody has at hand: what
attends each block.

    python -m tests.attention.traces ["DeepSeek V3" H200 ...]

prints the kernels of every model of MODELS on every machine of MACHINES, or of those that are
named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

import streambp
from streambp.attention import backend, kernels, kernels_wide
from streambp.attention.spans import BlockKind
from streambp.errors import StreamBPError
from streambp.model.describe import Description
from streambp.planner.count import StepCount, tensors
from streambp.planner.skeleton import Skeleton
from tests.attention.platforms import A100, B200, H200, MI300, RTX_4090

LENGTH, CHUNK = 65_536, 8192
MACHINES = {"H200": H200, "B200": B200, "A100": A100, "4090": RTX_4090, "MI300": MI300}
KERNELS = (
    kernels.MathKernel, kernels.FlashKernel, kernels.CudnnKernel, kernels_wide.EfficientKernel, kernels.CpuFlashKernel,
)  # fmt: skip
MLP = {"mlp_layer_types": ["sparse"]}
# model_type, and what differs from the defaults of its configuration: one layer of each kind. Kinds
# of layers with an indexer are left to the configuration: their name is not the same in all
# versions.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", {"num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                        "intermediate_size": 12_288, "head_dim": 128}),
    "Llama 3": ("llama", {"num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                          "intermediate_size": 14_336, "vocab_size": 128_256}),
    "Qwen3.5": ("qwen3_5_text", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "Qwen3-Next": ("qwen3_next", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "Gemma 2": ("gemma2", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "Gemma 3": ("gemma3_text", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "Gemma 4": ("gemma4_text", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                                "num_kv_shared_layers": 0}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {"num_hidden_layers": 1, **MLP}),
    "DeepSeek V3": ("deepseek_v3", {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "DeepSeek V3.2": ("deepseek_v32", {"num_hidden_layers": 1, **MLP}),
    "DeepSeek V4": ("deepseek_v4", {"num_hidden_layers": 2, "mlp_layer_types": ["moe", "moe"],
                                    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}),
    "GLM 5": ("glm_moe_dsa", {"num_hidden_layers": 1, "indexer_types": ["full"], **MLP}),
    "Kimi Linear": ("kimi_linear", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
                                    "mlp_layer_types": ["sparse", "sparse"]}),
    "MiniMax": ("minimax", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "MiniMax M2": ("minimax_m2", {"num_hidden_layers": 1}),
    "Nemotron-H": ("nemotron_h", {}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TracedAttention:
    """One call of a kernel: its name, the block's kind, and the head sizes D and D_v that it was
    given."""

    kernel: str
    kind: BlockKind
    backward: bool
    sizes: tuple[int, int]


@dataclasses.dataclass
class Trace:
    """What a step did. large: shapes of [T, T] tensors or larger, and the operator that made
    them."""

    calls: set[TracedAttention]
    large: set[tuple[str, tuple[int, ...]]]
    described: Description

    def kernels(self, *kinds: BlockKind) -> set[str]:
        """Names of the kernels that attended blocks of these kinds, of any if none is named."""
        return {call.kernel for call in self.calls if not kinds or call.kind in kinds}


class Large(StepCount):
    """Sees every tensor that an operator makes."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__(None)
        self.elements = length * length
        self.parameters = {p.numel() for p in model.parameters()}
        self.large_tensors: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors(result):
            storage_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
            if (
                max(storage_elements, tensor.numel()) >= self.elements
                and storage_elements not in self.parameters
            ):
                self.large_tensors.add((func._schema.name, tuple(tensor.shape)))
        return result


@contextlib.contextmanager
def watched(platform: Any) -> Iterator[set[TracedAttention]]:
    """Within, attention is chosen as on that machine; the calls of kernels."""
    calls: set[TracedAttention] = set()

    def recording(real, backward):
        def method(self, *args):
            q, v = (args[1], args[3]) if backward else (args[0], args[2])
            calls.add(
                TracedAttention(
                    self.name, args[-1].block.kind, backward, (q.shape[-1], v.shape[-1])
                )
            )
            return real(self, *args)

        return method

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "platform_of", lambda device: platform)
        for kernel in KERNELS:
            patch.setattr(kernel, "forward", recording(kernel.forward, False))
            patch.setattr(kernel, "backward", recording(kernel.backward, True))
        yield calls


def trace(name: str, machine: str, length: int = LENGTH, **batch: Any) -> Trace:
    """One step of a model on a machine."""
    model_type, changes = MODELS[name]
    skeleton = Skeleton(
        AutoConfig.for_model(model_type, **changes), torch.bfloat16, None, 16, "cuda"
    )
    model = streambp.patch(skeleton.model, streambp.StreamConfig(chunk_size=CHUNK))
    count = Large(model, length)
    with skeleton.running(), watched(MACHINES[machine]) as calls, count:
        ids = torch.empty(1, length, dtype=torch.long)  # [B, T]
        model(input_ids=ids, labels=ids, use_cache=False, **batch).loss.backward()
    return Trace(calls, count.large_tensors, streambp.describe(model))


def main() -> None:
    for name in [name for name in sys.argv if name in MODELS] or MODELS:
        for machine in [name for name in sys.argv if name in MACHINES] or MACHINES:
            try:
                run = trace(name, machine)
            except StreamBPError as error:
                print(f"{name:<14} {machine:<6} {type(error).__name__}: {error}", flush=True)
                break
            calls = sorted({(c.kernel, c.kind.value, c.sizes) for c in run.calls})
            print(
                f"{name:<14} {machine:<6} "
                f"{', '.join(f'{k} {d}/{v} {kind}' for k, kind, (d, v) in calls)}"
            )
            print(f"{'':<21} describe: {run.described.attention}", flush=True)
            if run.large:
                print(f"{'':<21} [T, T]: {sorted(run.large)[:4]}", flush=True)


if __name__ == "__main__":
    main()
