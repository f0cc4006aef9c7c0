"""Counts Linear FLOPs and written bytes, on meta tensors as well; live bytes are counted by the planner's `LiveBytes`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class LinearFlops(TorchDispatchMode):
    """Twice the multiply-adds of 2-D matrix products, which is what Linears make; attention's are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_):
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            self.total += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return result


class WrittenBytes(TorchDispatchMode):
    """Bytes that operations wrote: new tensors, and tensors changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        in_place = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (in_place or x.untyped_storage()._cdata not in before):
                self.total += x.numel() * x.element_size()
        return result
