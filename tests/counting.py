"""Counts Linear FLOPs and written bytes, on meta tensors as well; live bytes are counted by the
planner's `LiveBytes`."""

from __future__ import annotations

import collections
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class LinearFlops(TorchDispatchMode):
    """Twice the multiply-adds of 2-D matrix products, which is what Linears make; attention's are
    batched."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_):
            # a sum comes first, a dtype last
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            self.total += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return result


class Dispatches(TorchDispatchMode):
    """How many operations torch was asked for, by where in the package that was and by name.

    origin: the innermost frame in streambp, "layer/recompute.py:add"; what the layer's own modules
    ask for, and what autograd does by itself, counts as the "model"'s.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[_origin(sys._getframe(1)), func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *origins: str) -> int:
        """Of all origins that begin like one of these."""
        return sum(
            count for (origin, _), count in self.counts.items() if origin.startswith(origins)
        )


def _origin(frame: Any) -> str:
    while frame is not None:
        path, caller = frame.f_code.co_filename, frame.f_back
        if path.endswith("torch/autograd/__init__.py") or "/transformers/models/" in path:
            return "model"
        if "/streambp/" in path and path.endswith(".py"):
            return f"{path.rsplit('/streambp/', 1)[1]}:{frame.f_code.co_name}"
        frame = caller
    return "nobody"


class WrittenBytes(TorchDispatchMode):
    """Bytes that operations wrote: new tensors, and tensors changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        input_storages = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        in_place = any(
            a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
        )
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (
                in_place or x.untyped_storage()._cdata not in input_storages
            ):
                self.total += x.numel() * x.element_size()
        return result
