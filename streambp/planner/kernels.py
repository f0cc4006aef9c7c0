"""Count kernels on tensors without data: bytes of streambp's Triton kernels without a launch, and
plain attention once for each shape. Other Triton kernels are refused.

Plain attention and merges of its outputs run dozens of operations for each block of queries and
keys. A step has thousands of blocks, of a few shapes. Allocations and work of a block depend on
shapes alone, and nothing but the results remains. So only one call of each shape is run. Later
calls add the same work and the same peak, and return new tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from streambp.attention import attend
from streambp.attention.kernels import MathKernel, Task
from streambp.attention.spans import BlockKind
from streambp.device import has_data
from streambp.errors import StreamBPError
from streambp.head import blocks, triton_fold, triton_gradient
from streambp.planner.count import CachedCall, ShapeCache, StepCount, one_kernel, running_counts
from streambp.planner.work import Work, tensors


@dataclasses.dataclass(frozen=True)
class CountedCall:
    """Memory and cost of one call of a function on meta or fake tensors.

    Attributes:
        peak: most bytes in use during the call, beyond the bytes before it.
        largest: bytes of the largest storage that the call allocated.
        work: FLOPs, bytes that operations read and write, and number of operations that torch
            starts.
        outputs: list with the shape, stride and dtype of each result, or the result itself if it is
            no tensor.
        several: True if the function returns a tuple; False: a single result.
    """

    peak: int
    largest: int
    work: Work
    outputs: list[Any]
    several: bool


class CountedCalls:
    """Runs functions on meta or fake tensors, once for each combination of input shapes. Later
    calls with the same shapes return new tensors, and add the memory and cost of the first call to
    the active `StepCount`. This saves time, because a step has thousands of calls with few
    different shapes.

    Args:
        shapes: cache that creates tensors without data.
    """

    def __init__(self, shapes: ShapeCache) -> None:
        self._shapes = shapes
        # None for calls that must run each time
        self._counted_calls: dict[Any, CountedCall | None] = {}

    def run(self, function: Callable[..., Any], key: Any, *args: Any) -> Any:
        """Return `function(*args)`, and record the call's memory and FLOPs. If an earlier call had
        the same `key` and shapes, do not call the function. Return new tensors in the shapes of its
        results instead, and add the recorded memory and FLOPs to the step's.

        Args:
            function: a function that frees all its allocations, except for its results, before it
                returns.
            key: values that decide memory and cost, in addition to the shapes of tensors.
            args: the function's arguments, among them meta or fake tensors of any shape.
        """
        counts = running_counts(StepCount)
        # A count of split sequences assigns each allocation to this rank or to others.
        if len(counts) != 1 or type(counts[0]) is not StepCount or torch.is_grad_enabled():
            return function(*args)
        count = counts[0]
        parts = [function, key, count._kernel_depth > 0]
        for x in args:
            if isinstance(x, Tensor):
                parts += [x.shape, x.stride(), x.dtype]
        counted_call = self._counted_calls.get(tuple(parts))
        if counted_call is None:
            if tuple(parts) in self._counted_calls:
                return function(*args)
            return self._count_first(count, tuple(parts), functools.partial(function, *args))
        count.add(counted_call.work)
        count.peak = max(count.peak, count.live + counted_call.peak)
        count.largest = max(count.largest, counted_call.largest)
        with no_dispatch():
            outputs = self._shapes.make(
                CachedCall(counted_call.outputs, counted_call.several, counted_call.work)
            )
        for output in outputs:
            if isinstance(output, Tensor):
                count._track(output.untyped_storage())
        if counted_call.several:
            return tuple(outputs)
        return outputs[0]

    def _count_first(self, count: StepCount, key: Any, call: Callable[[], Any]) -> Any:
        """Return the result of a call with new shapes, and store the call's memory and cost under
        `key` for later calls.

        Args:
            count: the active dispatch mode that adds up the step's bytes and FLOPs.
            key: the function, the shapes and other values that decide memory and cost.
            call: runs the function with its arguments.
        """
        live = count.live
        peak = count.peak
        largest = count.largest
        work = count.work
        count.reset_peak()
        count.largest = 0
        result = call()
        several = isinstance(result, tuple)
        results = list(result) if several else [result]
        forms: list[Any] = []
        bytes_made = 0
        for x in results:
            if isinstance(x, Tensor):
                forms.append((x.shape, x.stride(), x.dtype))
                bytes_made += x.itemsize * _extent(x)
            else:
                forms.append(x)
        work_of_call = count.work.plus(work, -1)
        counted_call = CountedCall(count.peak - live, count.largest, work_of_call, forms, several)
        # The results are all that is left, and each has a storage of its own size.
        is_complete = count.live - live == bytes_made and len(
            {x.untyped_storage()._cdata for x in tensors(results)}
        ) == len(tensors(results))
        self._counted_calls[key] = counted_call if is_complete else None
        count.peak = max(peak, count.peak)
        count.largest = max(largest, count.largest)
        return result


def _extent(x: Tensor) -> int:
    """Return the number of elements in memory from the first element of x [...] to the last one,
    both included: the size that the storage of x must have at least."""
    if x.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


@contextlib.contextmanager
def launched_kernels(calls: CountedCalls) -> Iterator[None]:
    """Context manager for a step that runs on tensors without data, to count its memory and
    traffic. Instead of a launch, streambp's Triton kernels (for logits, and for merged attention
    outputs) add the bytes that they would move. Plain attention (matrix products and softmax in
    torch) runs once for each shape, and later calls add the numbers of the first.

    Args:
        calls: cache of the counted calls.
    """

    attend_merge = attend.merge_in_torch

    def launch(
        kernel: Callable[..., Any], byte_count: Callable[..., float], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the torch implementation of a Triton kernel on tensors without data, and add the
        bytes that the kernel itself would read and write to the step's costs.

        Args:
            kernel: the torch implementation.
            byte_count: function that is called with `args` and returns these bytes.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        with one_kernel(byte_count(*args)):
            return kernel(*args, **kwargs)

    def merge(o: Tensor, lse: Tensor, part_o: Tensor, *args: Any) -> None:
        """Merge the attention outputs o and part_o [b, t, H, D], of which each is computed over a
        part of the keys. Count the bytes that a single kernel launch would move for this. The
        arguments are those of `merge_in_torch`."""
        out, *all_read = args[1:]
        traffic = o.nbytes + part_o.nbytes + out.nbytes
        with one_kernel(traffic):
            merged = functools.partial(calls.run, attend_merge, tuple(all_read))
            merged(o, lse, part_o, *args)

    def plain(kernel: MathKernel, function: Callable[..., Any], *args: Any) -> Any:
        """Return the results of attention by matrix products and softmax in torch, over a block of
        queries and keys, in forward or backward. Only the first call for given shapes computes.
        Later calls return tensors without values, and add the first call's memory and FLOPs to the
        step's.

        Args:
            kernel: the object that computes attention in torch.
            function: the object's method, forward or backward.
            args: tensors [B, H, T, D], and the block as a `Task`.
        """
        task: Task = args[-1]
        block = task.block
        if block.kind is BlockKind.MASK:
            return function(kernel, *args)
        sizes = (block.q1 - block.q0, block.k1 - block.k0)
        key = (block.kind, *sizes, task.softcap is None, task.dropout > 0.0)
        return calls.run(function, key, kernel, *args)

    with contextlib.ExitStack() as stack:
        for module, name, kernel, kernel_bytes in (
            (blocks, "fold_rows", triton_fold.fold_rows, lambda product, *_: product.nbytes),
            (
                blocks,
                "write_gradient",
                triton_gradient.write_gradient,
                lambda product, *_: 2 * product.nbytes,
            ),
        ):
            stack.enter_context(
                mock.patch.object(module, name, functools.partial(launch, kernel, kernel_bytes))
            )
        stack.enter_context(mock.patch.object(attend, "merge_in_torch", merge))
        for name in ("forward", "backward"):
            method = functools.partialmethod(plain, getattr(MathKernel, name))
            stack.enter_context(mock.patch.object(MathKernel, name, method))
        yield


@contextlib.contextmanager
def no_launches() -> Iterator[None]:
    """Context manager in which the launch of a Triton kernel on meta or fake tensors raises
    `StreamBPError`. Inside, a step runs on such tensors to count its memory and FLOPs.

    Triton would launch the kernel with null pointers. After this illegal access, the process could
    not use the GPU any more.
    """
    triton: Any = sys.modules.get("triton.runtime.jit")
    if triton is None:
        yield
        return
    launch = triton.JITFunction.run

    def run(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Launch a Triton kernel; raise `StreamBPError` if an argument is a tensor without data.
        Replaces Triton's own function for launches, and has its arguments."""
        if any(isinstance(x, Tensor) and not has_data(x) for x in (*args, *kwargs.values())):
            name = getattr(kernel, "__name__", "a Triton kernel")
            raise StreamBPError(
                f"{name} cannot be launched on tensors without data, so the planner cannot count a "
                "step with this kernel. Run a step and measure its peak memory."
            )
        return launch(kernel, *args, **kwargs)

    with mock.patch.object(triton.JITFunction, "run", run):
        yield
