"""The oracle: an unpatched model in float64 whose inner float32 casts are lifted, on both sides."""

from __future__ import annotations

import contextlib
import importlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]


def lift_float32_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make casts of float64 tensors to float32 do nothing, and `.float()` of integers (positions)
    give float64.

    Rotary angles are an elementwise product of frequencies and positions now, in older transformers
    a matrix product, and a loaded model's frequencies are float32: that product promotes as the
    elementwise one does. transformers computes norms, softmax and losses in float32 even for
    float64 models. A TorchFunctionMode would not do: it is off inside backward.
    """
    # Up to transformers 5.17 it compiles its softmax when it is imported, which must be torch's own
    # then.
    importlib.import_module("transformers.models.gpt_bigcode.modeling_gpt_bigcode")
    real_float, real_to, real_type = Tensor.float, Tensor.to, Tensor.type
    real_matmul = Tensor.__matmul__
    real_softmax, real_sum, real_zeros = nn.functional.softmax, torch.sum, torch.zeros_like

    def widen(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args, kwargs = (
                tuple(map(widen, args)),
                {name: widen(value) for name, value in kwargs.items()},
            )
        return real_to(self, *args, **kwargs)

    def to_float(self: Tensor) -> Tensor:
        return (
            real_to(self, torch.float64)
            if self.dtype in (torch.float64, torch.int64)
            else real_float(self)
        )

    to_float.__name__ = "float"  # as the model sees it

    def softmax(
        x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> Tensor:
        return real_softmax(x, dim, dtype=widen(dtype) if x.dtype == torch.float64 else dtype)

    def matmul(self: Tensor, other: Any) -> Tensor:
        if {self.dtype, other.dtype} == {torch.float32, torch.float64}:
            return real_matmul(real_to(self, torch.float64), real_to(other, torch.float64))
        return real_matmul(self, other)

    def to_type(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        return real_type(self, widen(dtype) if self.dtype == torch.float64 else dtype, **kwargs)

    def total(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return real_sum(
            x, *args, dtype=widen(dtype) if x.dtype == torch.float64 else dtype, **kwargs
        )

    def zeros(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return real_zeros(
            x, *args, dtype=widen(dtype) if x.dtype == torch.float64 else dtype, **kwargs
        )

    monkeypatch.setattr(Tensor, "float", to_float)
    monkeypatch.setattr(Tensor, "__matmul__", matmul)
    monkeypatch.setattr(torch, "zeros_like", zeros)
    monkeypatch.setattr(Tensor, "type", to_type)
    monkeypatch.setattr(torch, "sum", total)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(nn.functional, "softmax", softmax)


def gradients(model: nn.Module, scale: float = 1.0, **batch: Any) -> tuple[Tensor, Gradients]:
    """Loss and all gradients of one step; parameters without a gradient are left out of the
    dictionary."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    (loss * scale).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


MAX_FLOAT64_ERROR = 1e-10  # the bar of float64 gradients


def worst_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """max over parameters of |ours - ref| / (|ref| + what is too small to be judged); sets must be
    identical.

    [Note: gradients that cancel] A parameter's gradient is a sum of terms that may cancel: that of
    a key's bias, or of a query's weight before a single key, is zero but for rounding, and its
    error is as large as itself. What rounding leaves is eps times the terms, and those are products
    of what the other gradients are made of: eps x |the whole gradient| for each operation on the
    way, of which there is about one for each parameter. `worst_error(...) <= EXACT` therefore says
    |ours - ref| <= EXACT x |ref| + eps x parameters x |the whole gradient|, with float64's eps. The second term is about
    1e-14 of the whole in these tests' models. A term that is lost changes a parameter by percents:
    that shows wherever its gradient is more than 1e-12 of the whole.
    """
    assert ours.keys() == reference.keys()
    total = torch.stack([g.double().norm() for g in reference.values()]).norm().item()
    rounding = torch.finfo(torch.float64).eps * len(reference) * total
    worst = 0.0
    for name, ref in reference.items():
        difference = (ours[name].double() - ref.double()).norm().item()
        assert math.isfinite(difference), name
        if difference:
            worst = max(
                worst,
                difference / max(ref.double().norm().item() + rounding / MAX_FLOAT64_ERROR, 1e-300),
            )
    return worst


def relative_l2(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Relative L2 error of the whole gradient."""
    assert ours.keys() == reference.keys()
    difference = torch.stack(
        [(ours[n].double() - g.double()).norm() for n, g in reference.items()]
    ).norm()
    return (difference / torch.stack([g.double().norm() for g in reference.values()]).norm()).item()


NOT_PACKED = "pack_vnni2 is only supported when avx512 is supported"


@contextlib.contextmanager
def skipped_where_unpatched_fails() -> Iterator[None]:
    """Around a run of the unpatched model in half precision: skips the test where torch's own
    attention cannot run.

    On a CPU with AMX torch packs half-precision keys for it, also under an ATEN_CPU_CAPABILITY
    whose kernels cannot read them. Any other error is one.
    """
    try:
        yield
    except RuntimeError as error:
        if NOT_PACKED not in str(error):
            raise
        capability = torch.backends.cpu.get_cpu_capability()
        pytest.skip(
            f"the unpatched model cannot run under ATEN_CPU_CAPABILITY={capability.lower()}: "
            f"{NOT_PACKED}"
        )


MAX_ERROR_RATIO = 1.05  # our error over the unpatched model's own, in the mean over models
RESOLUTION = 0.015  # of that mean: the standard error of its logarithm
FEWEST, MOST = 8, 128


def assert_as_precise(errors: Iterable[tuple[float, float]], bar: float = MAX_ERROR_RATIO) -> None:
    """On average over models our error is at most `bar` times the unpatched model's own. [Note:
    draws of a noise]

    Args:
        errors: (our error, the unpatched model's) of one random model after the other, each
            computed when it is asked for.

    [Note: draws of a noise] In half precision both errors are draws of the same noise: for a single
    model their ratio is 1 to 10 % off by chance, and not the same on CPUs with other instructions.
    So models are drawn until the mean of log ratio is known to RESOLUTION, measured by the scatter
    of the ratios themselves, and it has to be at most log(bar) but for one standard error. An
    implementation that is as precise as the unpatched model is 4 standard errors within that, one
    that is 1.10 times worse is 2 beyond; where the ratios scatter less both are further.
    """
    ratios: list[float] = []
    resolution = math.inf
    for ours, unpatched in errors:
        ratios.append(math.log(ours / unpatched))
        resolution = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else math.inf
        if len(ratios) >= MOST or (len(ratios) >= FEWEST and resolution <= RESOLUTION):
            break
    mean = statistics.fmean(ratios)
    text = (
        f"{math.exp(mean):.3f} +- {resolution:.3f} times the unpatched model's own error over "
        f"{len(ratios)} models"
    )
    print(text)
    assert resolution <= RESOLUTION, (
        f"{text}: too few, or they scatter too much, to tell {bar} from more"
    )
    assert mean <= math.log(bar) + resolution, f"{text}: more than {bar}"
