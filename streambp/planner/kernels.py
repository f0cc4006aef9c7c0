"""Triton kernels on tensors without data: ours count their bytes and launch nothing; others are
refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from streambp.attention import attend
from streambp.device import has_data
from streambp.errors import StreamBPError
from streambp.head import blocks, triton_fold, triton_gradient
from streambp.planner.count import one_kernel


@contextlib.contextmanager
def launched_kernels() -> Iterator[None]:
    """Context manager in which streambp's Triton kernels (for logits, and for merged attention
    outputs) are counted by the bytes that they move, without a launch.

    See `planner/count.py`.
    """

    def launch(
        kernel: Callable[..., Any], byte_count: Callable[..., float], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the torch implementation of a Triton kernel, and count the bytes that the kernel
        itself would read and write.

        Args:
            kernel: the torch implementation.
            byte_count: function of the same positional arguments that returns the bytes.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        with one_kernel(byte_count(*args)):
            return kernel(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module, name, kernel, moved in (
            (blocks, "fold_rows", triton_fold.fold_rows, lambda product, *_: product.nbytes),
            (
                blocks,
                "write_gradient",
                triton_gradient.write_gradient,
                lambda product, *_: 2 * product.nbytes,
            ),
            (
                attend,
                "merge_in_torch",
                attend.merge_in_torch,
                lambda o, _, p, __, out, *___: o.nbytes + p.nbytes + out.nbytes,
            ),
        ):
            stack.enter_context(
                mock.patch.object(module, name, functools.partial(launch, kernel, moved))
            )
        yield


@contextlib.contextmanager
def no_launches() -> Iterator[None]:
    """Context manager in which the launch of a Triton kernel on meta or fake tensors raises
    `StreamBPError`.

    Triton would launch the kernel with null pointers. On a GPU this is an illegal access, and the
    process cannot use its device afterwards.
    """
    triton: Any = sys.modules.get("triton.runtime.jit")
    if triton is None:
        yield
        return
    launch = triton.JITFunction.run

    def run(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Launch a Triton kernel; raise `StreamBPError` if an argument has no data."""
        if any(isinstance(x, Tensor) and not has_data(x) for x in (*args, *kwargs.values())):
            name = getattr(kernel, "__name__", "a Triton kernel")
            raise StreamBPError(
                f"{name} cannot be launched on tensors without data, so the planner cannot count a "
                "step with this kernel. Run a step and measure its peak memory."
            )
        return launch(kernel, *args, **kwargs)

    with mock.patch.object(triton.JITFunction, "run", run):
        yield
