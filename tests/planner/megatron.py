"""Static memory under Megatron's parallelism, for comparison with its own estimators.

Each rank keeps 6 bytes a parameter (bf16 weight, float32 gradient) and 12 / R of optimizer state
(float32 copy and two moments), R being the ranks that hold the same parameter and share its
optimizer state; dense parameters and experts have their own R.
"""

from __future__ import annotations

import dataclasses

RESIDENT, OPTIMIZER = 6, 12


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """Ranks, and by how much tensors, layers, experts and experts' tensors are divided."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1


def static_bytes(dense: int, expert: int, embedding: int, at: Parallelism) -> float:
    """Bytes on the fullest rank: a pipeline's first and last stage hold one of the two embeddings.

    Args:
        dense, expert: parameters, the two embeddings (input and output, `embedding` each) among the
            dense.
    """
    divided = (dense - 2 * embedding) / at.pipeline + (2 if at.pipeline == 1 else 1) * embedding
    dense_replicas = at.gpus / at.pipeline / at.tensor
    expert_replicas = at.gpus / at.pipeline / at.expert / at.expert_tensor
    return divided / at.tensor * (RESIDENT + OPTIMIZER / dense_replicas) + (
        expert
        / at.pipeline
        / at.expert
        / at.expert_tensor
        * (RESIDENT + OPTIMIZER / expert_replicas)
    )
