"""Our own kernels that launch nothing on tensors without data, or that torch's operators stand for there: their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from streambp.attention import merge
from streambp.head import blocks, triton_fold, triton_gradient
from streambp.planner.count import one_kernel


@contextlib.contextmanager
def launched_kernels() -> Iterator[None]:
    """Within, steps count the head's two kernels and the merge by their bytes. [Note: one kernel]"""
    fold, write, merged = triton_fold.fold_rows, triton_gradient.write_gradient, merge.merge_in_torch

    def counted_fold(product: Tensor, *args: Any) -> Any:
        with one_kernel(product.nbytes):
            return fold(product, *args)

    def counted_write(product: Tensor, *args: Any, **kwargs: Any) -> None:
        with one_kernel(2 * product.nbytes):
            write(product, *args, **kwargs)

    def counted_merge(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor, out: Tensor) -> None:
        with one_kernel(o.nbytes + part_o.nbytes + out.nbytes):
            merged(o, lse, part_o, part_lse, out)

    with (
        mock.patch.object(blocks, "fold_rows", counted_fold),
        mock.patch.object(blocks, "write_gradient", counted_write),
        mock.patch.object(merge, "merge_in_torch", counted_merge),
    ):
        yield
