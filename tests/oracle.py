"""The oracle: an unpatched model in float64 whose inner float32 casts are lifted, on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]


def lift_float32_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make casts of float64 tensors to float32 do nothing, and `.float()` of integers (positions) give float64.

    transformers computes norms, softmax and losses in float32 even for float64 models. A TorchFunctionMode would not do:
    it is off inside backward.
    """
    real_float, real_to, real_type = Tensor.float, Tensor.to, Tensor.type
    real_softmax, real_sum = nn.functional.softmax, torch.sum

    def widen(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args, kwargs = tuple(map(widen, args)), {name: widen(value) for name, value in kwargs.items()}
        return real_to(self, *args, **kwargs)

    def to_float(self: Tensor) -> Tensor:
        return real_to(self, torch.float64) if self.dtype in (torch.float64, torch.int64) else real_float(self)

    to_float.__name__ = "float"  # as the model sees it

    def softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return real_softmax(x, dim, dtype=widen(dtype) if x.dtype == torch.float64 else dtype)

    def to_type(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        return real_type(self, widen(dtype) if self.dtype == torch.float64 else dtype, **kwargs)

    def total(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return real_sum(x, *args, dtype=widen(dtype) if x.dtype == torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(Tensor, "float", to_float)
    monkeypatch.setattr(Tensor, "type", to_type)
    monkeypatch.setattr(torch, "sum", total)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(nn.functional, "softmax", softmax)


def gradients(model: nn.Module, scale: float = 1.0, **batch: Any) -> tuple[Tensor, Gradients]:
    """Loss and all gradients of one step; parameters without a gradient are left out of the dictionary."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    (loss * scale).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def worst_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """max over parameters of |ours - ref| / max(|ref|, 1e-6 x norm of the whole gradient); sets must be identical."""
    assert ours.keys() == reference.keys()
    total = torch.stack([g.double().norm() for g in reference.values()]).norm()
    worst = 0.0
    for name, ref in reference.items():
        error = (ours[name].double() - ref.double()).norm() / torch.maximum(ref.double().norm(), 1e-6 * total)
        assert error.isfinite(), name
        worst = max(worst, error.item())
    return worst


def relative_l2(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Relative L2 error of the whole gradient."""
    assert ours.keys() == reference.keys()
    difference = torch.stack([(ours[n].double() - g.double()).norm() for n, g in reference.items()]).norm()
    return (difference / torch.stack([g.double().norm() for g in reference.values()]).norm()).item()
