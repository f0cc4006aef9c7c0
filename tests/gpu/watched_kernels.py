"""Attention kernels beside float32, block by block, on the tensors that the package hands to them.

Whatever `choose_backend` gives is watched, so a new kernel is judged without being named here.
Truth is the formula in float32, of the same q, k, v, o and lse. What a fused kernel cannot avoid is
the same formula with its weights, its score gradients and its results rounded once to the dtype of
q: the error of that is the unit that a kernel's error is given in.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from streambp.attention import prefix
from streambp.attention.backend import Backend
from streambp.attention.kernels import Task
from streambp.attention.spans import Block, BlockKind

FORWARD, BACKWARD = ("o",), ("dq", "dk", "dv")


@dataclasses.dataclass
class Sums:
    """Squared errors of one tensor over all blocks or draws: of what is judged, and of what it is
    measured by."""

    squared_error: float = 0.0
    rounded: float = 0.0

    def add(self, result: Tensor, truth: Tensor, rounded: Tensor) -> None:
        """Three tensors of one shape, truth in float32."""
        self.squared_error += float((result.float() - truth).square().sum())
        self.rounded += float((rounded.float() - truth).square().sum())

    @property
    def ratio(self) -> float:
        """The error found in units of the other one; inf where the other is 0, nan for no
        numbers."""
        if self.squared_error == 0.0 or self.rounded == 0.0:
            return 0.0 if self.squared_error == 0.0 else math.inf
        return math.sqrt(self.squared_error / self.rounded)


Key = tuple[str, str, str]  # kernel, kind of block, tensor


@dataclasses.dataclass
class KernelErrors:
    """What was seen: `errors` of each kernel, kind and tensor, and `lse`: of each kernel and kind,
    absolute."""

    errors: dict[Key, Sums] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(Sums)
    )
    lse: dict[tuple[str, str], float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    # the first kernel of each backend that was chosen
    preferred: set[str] = dataclasses.field(default_factory=set)

    @property
    def kernels(self) -> set[str]:
        """Those that attended forward and backward."""
        return {k for k, _, tensor in self.errors if tensor == "o"} & {
            k for k, _, tensor in self.errors if tensor == "dq"
        }

    def add(
        self,
        kernel: str,
        kind: BlockKind,
        tensors: tuple[str, ...],
        three: list[tuple[Tensor, Tensor, Tensor]],
    ) -> None:
        """three: of each tensor what was found, the truth, and the truth with unavoidable
        rounding."""
        for name, (result, truth, rounded) in zip(tensors, three, strict=True):
            self.errors[kernel, kind.value, name].add(result, truth, rounded)


@contextlib.contextmanager
def watching(record: KernelErrors) -> Iterator[None]:
    """Within, every kernel of a backend that attention chooses is judged at each call."""
    real_choice, watched_kernels = prefix.choose_backend, list[Any]()

    def choose(*args: Any, **kwargs: Any) -> Backend:
        backend = real_choice(*args, **kwargs)
        record.preferred.add(backend.name)
        for kernel in backend.kernels:
            if not any(kernel is watched_kernel for watched_kernel in watched_kernels):
                watched_kernels.append(kernel)
                object.__setattr__(kernel, "forward", judge_forward(kernel, kernel.forward, record))
                object.__setattr__(
                    kernel, "backward", judge_backward(kernel, kernel.backward, record)
                )
        return backend

    prefix.choose_backend = choose  # type: ignore[assignment]
    try:
        yield
    finally:
        prefix.choose_backend = real_choice
        for kernel in watched_kernels:
            object.__delattr__(kernel, "forward")
            object.__delattr__(kernel, "backward")


def judge_forward(
    kernel: Any, real: Callable[..., Any], record: KernelErrors
) -> Callable[..., Any]:
    def forward(q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        o, lse = real(q, k, v, task)
        truth, rounded = (
            reference_forward(q, k, v, task, dtype) for dtype in (torch.float32, q.dtype)
        )
        kind = task.block.kind
        record.add(kernel.name, kind, FORWARD, [(o, truth[0], rounded[0])])
        reads = truth[1] > -torch.inf
        differences = (lse.float() - truth[1])[reads].abs()
        worst = float(differences.max()) if differences.numel() else 0.0
        key = kernel.name, kind.value
        record.lse[key] = worst if not worst <= record.lse[key] else record.lse[key]  # NaN stays
        return o, lse

    return forward


def judge_backward(
    kernel: Any, real: Callable[..., Any], record: KernelErrors
) -> Callable[..., Any]:
    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = real(do, q, k, v, o, lse, task)
        truth, rounded = (
            reference_backward(do, q, k, v, o, lse, task, dtype)
            for dtype in (torch.float32, q.dtype)
        )
        record.add(
            kernel.name, task.block.kind, BACKWARD, list(zip(grads, truth, rounded, strict=True))
        )
        return grads

    return backward


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, task: Task, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """o [B, H, Tq, D_v] and lse [B, H, Tq] in float32; weights and o rounded to `dtype`."""
    scores = scores_of(q, k, task)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    o = weights.to(dtype).float() @ spread(v, q)
    return o.to(dtype).float(), lse


def reference_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    task: Task,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, H, Tq, D], dk [B, H_kv, Tk, D], dv in float32; weights, score gradients and results
    rounded to `dtype`."""
    scores, lse, do, o = scores_of(q, k, task), lse.float(), do.float(), o.float()
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    slopes = weights * (do @ spread(v, q).mT - (do * o).sum(-1)[..., None])  # [B, H, Tq, Tk]
    dv = weights.to(dtype).float().mT @ do
    slopes = slopes.to(dtype).float() * task.scale
    dq, dk = slopes @ spread(k, q), slopes.mT @ q.float()
    heads = k.shape[1]
    summed = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
    dq, dk, dv = (x.to(dtype).float() for x in (dq, *summed))
    return dq, dk, dv


def spread(x: Tensor, q: Tensor) -> Tensor:
    """[B, H_kv, T, D] for every head of q, in float32."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def scores_of(q: Tensor, k: Tensor, task: Task) -> Tensor:
    """[B, H, Tq, Tk] in float32, -inf where a pair does not count."""
    scores = (q.float() @ spread(k, q).mT) * task.scale
    return scores.masked_fill(~counts(task.block, q.device), -torch.inf)


def counts(block: Block, device: torch.device) -> Tensor:
    """Which pairs of a block count, bool [Tq, Tk]: the table of `streambp/attention/spans.py`."""
    query = torch.arange(block.q0, block.q1, device=device)[:, None]
    key = torch.arange(block.k0, block.k1, device=device)
    past, inside = (
        key <= query,
        torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=device),
    )
    if block.window is not None:
        inside = key > query - block.window
    if block.kind is BlockKind.VARLEN:
        documents = torch.zeros_like(inside)
        for (a, b), (c, d) in zip(
            itertools.pairwise(block.cu_q), itertools.pairwise(block.cu_k), strict=True
        ):
            documents[a:b, c:d] = True
        return documents & past & inside
    if block.kind in (BlockKind.FULL, BlockKind.BAND):
        return inside
    if block.kind in (BlockKind.CAUSAL, BlockKind.WINDOW):
        return past & inside
    raise ValueError(f"blocks of kind {block.kind} are not judged here")
