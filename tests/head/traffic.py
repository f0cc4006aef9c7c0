"""Bytes that a head moves through memory beside its matrix products, counted on meta.

Every operation that is not a view reads its arguments and writes its results once; gathers and
scatters move what they select. The kernels, which launch nothing on meta, are counted by what they
read and write. A product that adds to a sum reads and writes it.
"""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streambp.head import blocks

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.mm.dtype}
SUMS = {aten.addmm.dtype_out, aten.addmm_.default}
SELECTIONS = {aten.index.Tensor, aten.gather.default, aten.index_select.default}
SCATTERS = {
    aten.index_put_.default,
    aten.scatter_add_.default,
    aten.index_copy_.default,
    aten.scatter_add.default,
}
NO_READS = {aten.zeros_like.default, aten.zero_.default, aten.fill_.Scalar, aten.zeros.default}
FREE_OPERATIONS = {
    aten.empty_like.default,
    aten.empty.memory_format,
    aten.promote_types.default,
    aten.new_empty.default,
}
SYNCS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
}


def size(tensor):
    return tensor.element_size() * math.prod(
        n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0
    )


class Traffic(TorchDispatchMode):
    """elementwise, sums: bytes; calls: (operation or kernel's name, its tensors) in order."""

    def __init__(self):
        super().__init__()
        self.elementwise = 0
        self.sums = 0
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.calls.append((func, outputs))
        views = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if (
            views
            or func in FREE_OPERATIONS
            or func in PRODUCTS
            or func is aten._unsafe_view.default
        ):
            return result
        if func in SUMS:
            self.sums += 2 * size(outputs[0])
        elif func in SELECTIONS:
            self.elementwise += 2 * size(outputs[0])
        elif func in SCATTERS:
            self.elementwise += 2 * size(inputs[-1])
        else:
            reads = [] if func in NO_READS else inputs[1:] if func is aten.copy_.default else inputs
            self.elementwise += sum(map(size, {id(x): x for x in reads}.values())) + sum(
                map(size, outputs)
            )
        return result

    @contextlib.contextmanager
    def counting(self):
        """Within, operations and kernels count."""

        def counted(kernel, passes):
            def call(product, *args):
                self.elementwise += passes * size(product)
                self.calls.append((kernel.__name__, [product]))
                return kernel(product, *args)

            return call

        with (
            self,
            mock.patch.object(blocks, "fold_rows", counted(blocks.fold_rows, 1)),
            mock.patch.object(blocks, "write_gradient", counted(blocks.write_gradient, 2)),
        ):
            yield self

    def results_of(self, *names):
        return [tensors for name, tensors in self.calls if name in names]
