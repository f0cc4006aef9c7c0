"""Count bytes of live storages and FLOPs of a step, on tensors with or without data.

`LiveBytes` counts the storages that operations allocate. Tests use `LiveBytes` on real tensors, to
check predictions. `StepCount` is for steps on tensors without data, and also counts FLOPs, bytes
read and written, and workspaces of GPU kernels. Operations that read a tensor's values get assumed
values.

FlashAttention's backward allocates, and frees before it returns, dQ in float32 and one float32 for
each query and head. Grouped queries add dK and dV for every query head. cuDNN's backward allocates
the same except for dK and dV. Memory-efficient attention receives one key head for each query head,
and allocates dQ, dK and dV in float32. A dispatch mode cannot observe these allocations, so their
sizes are computed here from the operators' arguments.

Several torch operations of a counted step may replace one kernel of the GPU (a Triton kernel, a
kernel of another package, a copy). Allocations and FLOPs are then those of the operations, and
bytes read and written are those of the kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from streambp.device import allocator_bytes, has_data
from streambp.planner.routing import TOP_K, VALUE_READERS, answer
from streambp.planner.work import (
    ATTENTION_BACKWARDS,
    GROUPED_PRODUCT,
    Work,
    aten,
    tensors,
    work_of,
    workspace,
)

NUMBER_READERS = (
    aten.lt.Scalar,
    aten.le.Scalar,
    aten.gt.Scalar,
    aten.ge.Scalar,
    aten._local_scalar_dense.default,
)


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of the tensor storages that were created while the mode
    was active and have not been freed.

    Attributes:
        live: bytes that exist now.
        peak: maximum of `live` since `reset_peak`.
        largest: bytes of the largest storage so far.
        tracked: number of storages created so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.largest = 0
        self.tracked = 0
        # storage -> its number, its bytes, a weak reference that reports its end
        self._alive: dict[int, tuple[int, int, weakref.ref[Any]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled during a count; disabling dynamo costs as much as an operation
        return False

    def reset_peak(self) -> None:
        """Set the recorded peak to the bytes that exist now. Called at the start of each phase of a
        step (a layer's forward, for example), to measure the phase's peak."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        new_storages = []
        for s in (x.untyped_storage() for x in tensors(result)):
            if s._cdata not in self._alive:
                new_storages.append(s)
        if new_storages:
            input_storages = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
            for storage in new_storages:
                if storage._cdata not in input_storages and storage._cdata not in self._alive:
                    self._track(storage)
        return result

    def alive(self, first: int, stop: int) -> int:
        """Return the bytes of those storages that still exist, among storages number `first` to
        `stop` (exclusive) in the order of creation. The bytes that a module saves for backward are
        measured this way."""
        return sum(size for number, size, _ in self._alive.values() if first <= number < stop)

    def _track(self, storage: torch.UntypedStorage) -> None:
        """Add the bytes of a new tensor's storage to `live`, and register a weak reference for
        their subtraction when the storage is freed."""
        key = storage._cdata
        size = storage.nbytes()
        self._alive[key] = (
            self.tracked,
            size,
            weakref.ref(storage, functools.partial(self._subtract_freed, key)),
        )
        self.tracked += 1
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
        if size > self.largest:
            self.largest = size

    def _subtract_freed(self, key: int, _: Any) -> None:
        """Subtract the bytes of a storage from `live`. The storage's weak reference calls this
        method with the storage's `key` when the storage is freed."""
        self.live -= self._alive.pop(key)[1]


IN_PLACE_OPERATORS = frozenset(
    getattr(aten, name).default
    for name in ("copy_", "zero_", "neg_", "index_put_", "addmm_", "logical_and_")
) | frozenset(
    getattr(getattr(aten, name), kind)
    for name in ("add_", "mul_", "div_", "sub_", "fill_")
    for kind in ("Tensor", "Scalar")
)
IN_PLACE_LIST_OPERATORS = frozenset(
    {aten._foreach_add_.List}
)  # operations on lists that return nothing


@dataclasses.dataclass(frozen=True, eq=False)
class CachedCall:
    """Cached facts about one call of a torch operation on meta or fake tensors: its results and its
    cost. Equal calls are then counted without running the operation.

    Attributes:
        outputs: list with the shape, stride and dtype of each output, or the output itself if it is
            no tensor. `ShapeCache.IN_PLACE`: the operation returns its first argument.
            `ShapeCache.OUT`: the operation returns its argument `out`.
        several: True if the operation returns a tuple.
        work: FLOPs, bytes that are read and written, and the number of operations that torch
            starts.
        attends: True for attention backward, whose kernel allocates and frees a workspace.
        routed: number of indices that a `topk` returns, possibly (token, expert) pairs of an MoE
            router; 0 for other operations.
    """

    outputs: Any
    several: bool
    work: Work
    attends: bool = False
    routed: int = 0


VIEW_CALL = CachedCall(None, False, Work(dispatches=1))
TENSOR_TYPES = frozenset((Tensor, torch.nn.Parameter))
HASHABLE_TYPES = frozenset((int, bool, type(None), torch.dtype))
META_DEVICE = torch.device("meta")
# dtypes that grouped products have on a GPU and on a CPU, but not on meta
GROUPED_DTYPES = (torch.float32, torch.float16)


class ShapeCache:
    """Cache of the output shapes of torch operations on meta or fake tensors, by the shapes of the
    inputs.

    A step on such tensors repeats a few hundred operations thousands of times, and would spend most
    of its time on torch's inference of output shapes. A cached operation is not run again: its
    result is a new tensor of the stored shape. The result is the first argument for an in-place
    operation, and the argument `out` for an operation that has it.

    Args:
        mode: the `FakeTensorMode` of the fake tensors; None: the tensors are on the meta device.
    """

    IN_PLACE, OUT = "in place", "out"

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode
        # ids of operations that, by their schemas, return views of their arguments
        self.views: set[int] = set()
        self._operations: dict[Any, CachedCall] = {}
        self._meta = mode is None

    def lookup(self, func: Any, args: Any, kwargs: Any) -> tuple[CachedCall | None, Any]:
        """Return the cached facts about a call of an operation, and the call's cache key. The facts
        are None if the call is not in the cache. The key is None if the call cannot be cached.

        Args:
            func: the operation, an overload of `torch.ops.aten`.
            args: positional arguments of the operation.
            kwargs: keyword arguments of the operation.
        """
        key: list[Any] = [id(func)]  # ids hash in C, and torch never frees its operations
        try:
            for value in args:
                kind = type(value)
                if self._meta and kind in TENSOR_TYPES and value.is_meta:
                    key += value.shape, value.stride(), value.dtype
                else:
                    key.append((kind, value) if kind in HASHABLE_TYPES else self._part(value))
            if kwargs:
                key += [*kwargs, *map(self._part, kwargs.values())]
            key_of_call = tuple(key)
            return self._operations.get(key_of_call), key_of_call
        except TypeError:
            return None, None

    def make(self, operation: CachedCall) -> list[Any]:
        """Return the results of a cached operation without running the operation: new meta or fake
        tensors with the stored shapes, strides and dtypes."""
        tensors_of_call: list[Any] = []
        for output in operation.outputs:
            if type(output) is not tuple:
                tensors_of_call.append(output)
                continue
            shape, stride, dtype = output
            if self.mode is None:
                tensors_of_call.append(
                    torch.empty_strided(shape, stride, dtype=dtype, device=META_DEVICE)
                )
                continue
            with no_dispatch():
                storage = torch.empty_strided(shape, stride, dtype=dtype, device=META_DEVICE)
            tensors_of_call.append(FakeTensor(self.mode, storage, torch.device("cpu")))
        return tensors_of_call

    def _known_kind(self, tensor: Any) -> bool:
        """True if the cache supports a tensor: a fake tensor if the cache was created with a
        `FakeTensorMode`, otherwise a tensor on the meta device. Operations on other tensors are not
        cached."""
        if self.mode is None:
            return tensor.is_meta and type(tensor) in TENSOR_TYPES
        return isinstance(tensor, FakeTensor) and tensor.constant is None

    def _part(self, value: Any) -> Any:
        """Return the part of the cache key for one argument of an operation: shape, stride and
        dtype of a tensor, or the value itself.

        Raises:
            TypeError: the argument is a tensor that the cache does not support.
        """
        if isinstance(value, Tensor):
            if not self._known_kind(value):
                raise TypeError(f"{type(value).__name__} on {value.device}")
            return value.shape, value.stride(), value.dtype
        if isinstance(value, list | tuple):
            if any(isinstance(member, Tensor) for member in value):
                return tuple(map(self._part, value))
            return tuple(value)
        # nan never equals itself, so its key would never match
        return type(value), "nan" if value != value else value

    def remember(self, key: Any, func: Any, args: Any, kwargs: Any, result: Any) -> Work:
        """Return the cost (`Work`) of an operation that was not in the cache, and add the operation
        to the cache if possible.

        Args:
            key: the cache key, from `lookup`; None: do not cache.
            func: the operation, an overload of `torch.ops.aten`.
            args: positional arguments of the operation.
            kwargs: keyword arguments of the operation.
            result: the operation's result.
        """
        schema = func._schema
        input_storages = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        view = any(x.untyped_storage()._cdata in input_storages for x in tensors(result))
        writes_inputs = any(
            a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
        )
        if view and not writes_inputs:
            # By its schema, `_unsafe_view` returns no view.
            if func is aten._unsafe_view.default or all(
                out.alias_info is not None for out in schema.returns
            ):
                self.views.add(id(func))
            return VIEW_CALL.work
        work = work_of(func, args, kwargs, result)
        several = isinstance(result, tuple)
        if several:
            outputs = list(result)
        else:
            outputs = [result]
        if key is None:
            return work
        if writes_inputs:
            if func in IN_PLACE_OPERATORS and result is args[0]:
                self._operations[key] = CachedCall(ShapeCache.IN_PLACE, False, work)
            elif "out" in kwargs and result is kwargs["out"]:
                self._operations[key] = CachedCall(ShapeCache.OUT, False, work)
            elif func in IN_PLACE_LIST_OPERATORS:
                self._operations[key] = CachedCall([None], False, work)
        elif any(out.alias_info is not None for out in schema.returns):
            pass  # some outputs are views
        elif all(
            type(x) in HASHABLE_TYPES or (isinstance(x, Tensor) and self._known_kind(x))
            for x in outputs
        ):
            facts = []
            for x in outputs:
                if isinstance(x, Tensor):
                    facts.append((x.shape, x.stride(), x.dtype))
                else:
                    facts.append(x)
            self._operations[key] = CachedCall(
                facts,
                several,
                work,
                func in ATTENTION_BACKWARDS,
                result[1].numel() if func is TOP_K else 0,
            )
        return work


class AllocatedBytes(contextlib.nullcontext[None]):
    """Reads bytes in use (`live`) and their peak from an accelerator's allocator, to measure a real
    step. Takes the place of `LiveBytes`, with the same attributes, which counts a step on tensors
    without data. The context manager itself does nothing. Bytes are relative to those when this
    object was created."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._start = allocator_bytes(device, "allocated")

    @property
    def live(self) -> int:
        """Return the bytes allocated now minus those when this object was created."""
        return allocator_bytes(self._device, "allocated") - self._start

    @property
    def peak(self) -> int:
        """Return the peak of allocated bytes since `reset_peak`, minus the bytes when this object
        was created."""
        return allocator_bytes(self._device, "peak") - self._start

    def reset_peak(self) -> None:
        """Reset the allocator's peak, which all code of the process shares, to the bytes allocated
        now."""
        torch.accelerator.reset_peak_memory_stats(self._device)


class StepCount(LiveBytes):
    """Dispatch mode that counts the costs of a training step, which runs inside on meta or fake
    tensors. The costs are bytes in use (like `LiveBytes`), FLOPs, and bytes read and written.

    Args:
        kernels: "flash" or "cudnn": add the workspaces of these attention kernels to the peak;
            None: add none.
        shapes: cache of the output shapes and costs of operations, which several `StepCount`s may
            share; None: a new cache.
    """

    def __init__(self, kernels: str | None, shapes: ShapeCache | None = None) -> None:
        super().__init__()
        self.kernels = kernels
        self.shapes = shapes or ShapeCache()
        # (token, expert) pairs of the last expert selection, and the number of experts
        self.routed = self.experts = 0
        self._work = Work()
        # operation -> number of calls whose work is not yet in `_work`
        self._times: dict[CachedCall, int] = {}
        self._kernel_depth = 0

    @property
    def work(self) -> Work:
        """Return the FLOPs, bytes read and written, and dispatches of all operations so far."""
        for operation, times in self._times.items():
            self._work = self._work.plus(operation.work, times)
        self._times.clear()
        return self._work

    def add(self, work: Work) -> None:
        """Add the FLOPs, bytes and dispatches of a kernel to the step's costs. Called by the
        function that replaces the kernel, because a kernel cannot run on tensors without data."""
        self._work = self._work.plus(work)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shapes = self.shapes
        if id(func) in shapes.views:
            self._count(VIEW_CALL)
            return func(*args, **kwargs)
        cached, key = shapes.lookup(func, args, kwargs)
        if cached is None:
            return self._count_first(func, args, kwargs, key)
        self._count(cached)
        if cached.attends:
            self._workspace(func, args)
        if cached.routed:
            self.routed = cached.routed
        if cached.outputs is ShapeCache.IN_PLACE:
            return args[0]
        if cached.outputs is ShapeCache.OUT:
            return kwargs["out"]
        outputs = shapes.make(cached)
        for output in outputs:
            if isinstance(output, Tensor):
                self._track(output.untyped_storage())
        if cached.several:
            return tuple(outputs)
        return outputs[0]

    def _count_first(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """Return the result of an operation that is not in the cache of shapes, add its cost to the
        costs of the step, and add the operation to the cache.

        Operations that read values of a tensor without data get assumed values. Conditions are
        true, and each expert gets an equal share of the tokens.

        The arguments are those of `ShapeCache.remember`; `key` is None if the call cannot be
        cached.
        """
        if func is aten.rand.default and not args[0]:
            # Compared with the probability that a layer is dropped: no layer is. The number has
            # data, and so has the comparison.
            with _disable_current_modes():
                return torch.ones((), dtype=kwargs.get("dtype"))
        if func in NUMBER_READERS and has_data(args[0]):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is aten._to_copy.default and args[0].device.type == "meta":
            device = kwargs.get("device")
        else:
            device = None
        # True for a copy of values that do not exist
        to_data = device is not None and torch.device(device).type != "meta"
        is_read = func is aten._local_scalar_dense.default and not has_data(args[0])
        if is_read or (to_data and args[0].dim() == 0):
            # Conditions are true. In models' forwards, such conditions test that a mask keeps every
            # token, that a batch is not packed, or that an index is in range.
            kind = kwargs.get("dtype") or args[0].dtype
            value: float
            if args[0].dtype == torch.bool:
                value = True
            elif args[0].is_floating_point():
                value = 1.0
            else:
                value = 1
            if is_read:
                return value
            return torch.tensor(value, dtype=kind, device=device)
        if (
            func in VALUE_READERS
            and not has_data(args[0])
            and (to_data or func is not aten._to_copy.default)
        ):
            # one flag for each expert
            if (
                args[0].dtype == torch.bool
                and args[0].dim() == 1
                and func is not aten._to_copy.default
            ):
                self.experts = args[0].shape[0]
            routing = answer(func, args[0], self.routed, self.experts)
            if isinstance(routing, Tensor):
                return routing
            if routing is not None:  # shape and dtype of a tensor without data
                shape, dtype = routing
                (output,) = self.shapes.make(
                    CachedCall([(shape, (shape[1], 1), dtype)], False, VIEW_CALL.work)
                )
                self._track(output.untyped_storage())
                self._count(VIEW_CALL)
                return output
        if func in ATTENTION_BACKWARDS:
            self._workspace(func, args)
        if func is GROUPED_PRODUCT and not has_data(args[0]) and args[0].dtype in GROUPED_DTYPES:
            result = self._grouped(*args, **kwargs)
        else:
            result = super().__torch_dispatch__(func, (), args, kwargs)
        self._count(CachedCall(None, False, self.shapes.remember(key, func, args, kwargs, result)))
        if func is TOP_K:
            self.routed = result[1].numel()
        return result

    def _grouped(self, a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any) -> Tensor:
        """Return the output of `torch._grouped_mm` for tensors without data: a matrix product for
        each group, such as an expert. The function of torch is not called, because its inference of
        the output's shape supports bfloat16 alone.

        Args:
            a: rows of all groups, [tokens, in], or one matrix for each group.
            b: one matrix for each group, [groups, in, out], or [tokens, out] if `a` is
                [in, tokens].
            offs: index behind the last token of each group, [groups].
        """
        shape = torch.Size((a.shape[-2], b.shape[-1]))
        if a.dim() == b.dim():
            groups = a.shape[0] if a.dim() == 3 or offs is None else offs.shape[0]
            shape = torch.Size((groups, *shape))
        strides = torch.empty(shape, device=META_DEVICE).stride()
        (output,) = self.shapes.make(CachedCall([(shape, strides, a.dtype)], False, VIEW_CALL.work))
        self._track(output.untyped_storage())
        return output  # type: ignore[no-any-return]

    def _count(self, operation: CachedCall) -> None:
        """Add the cost of one call of an operation to the costs of the step. Inside the context
        manager `one_kernel`, only the FLOPs are added, because its arguments replace the other
        costs."""
        if self._kernel_depth:
            self.add(operation.work._replace(traffic=0.0, dispatches=0.0))
        else:
            self._times[operation] = self._times.get(operation, 0) + 1

    def _workspace(self, func: Any, args: Any) -> None:
        """Raise the recorded peak if a workspace reaches it: memory that the attention kernel of
        the operation `func(*args)` allocates and frees itself, unseen by the dispatch mode."""
        if self.kernels is not None:
            self.peak = max(self.peak, self.live + workspace(func, args, self.kernels))


Count = TypeVar("Count", bound=StepCount)


def running_counts(kind: type[Count]) -> list[Count]:
    """Return the active dispatch modes of class `kind`, for example all active `StepCount`s, which
    add up a step's bytes and FLOPs. A function that replaces a kernel adds the kernel's cost to
    these modes."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, kind)]


def add_flops(number: float, byte_count: float = 0.0) -> None:
    """Add `number` FLOPs and `byte_count` read and written bytes to all active `StepCount`s, the
    modes that add up a step's costs. Called by functions that replace a kernel and do not compute
    the kernel's matrix products."""
    for count in running_counts(StepCount):
        count.add(Work(number, traffic=byte_count))


@contextlib.contextmanager
def one_kernel(traffic: float, to_host: float = 0.0, from_host: float = 0.0) -> Iterator[None]:
    """Context manager for torch operations that replace a single kernel, when the costs of a step
    are counted. All active `StepCount`s add one kernel launch with the bytes in `traffic`, and not
    the bytes and dispatches of the operations. FLOPs and allocations of the operations are added as
    usual.

    Args:
        traffic: bytes that the kernel reads and writes on the device.
        to_host: bytes that the kernel copies to the host.
        from_host: bytes that the kernel copies from the host.
    """
    counts = running_counts(StepCount)
    for count in counts:
        count.add(Work(traffic=traffic, dispatches=1, to_host=to_host, from_host=from_host))
        count._kernel_depth += 1
    try:
        yield
    finally:
        for count in counts:
            count._kernel_depth -= 1


class KernelReplay(torch.autograd.Function):
    """Autograd function that takes the place of a kernel when a step runs on meta or fake tensors,
    to count its memory and FLOPs.

    The first two arguments of `apply` are functions for forward and backward. Both functions
    allocate the tensors that the kernel allocates, in the same order and with the same lifetime,
    and compute nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., tuple[Any, ...]], *args: Any
    ) -> Any:
        """Call `forward(ctx, *args)` to allocate the tensors of the kernel's forward, and return
        its result. The function `backward` is stored in `ctx`, and allocates the tensors of the
        kernel's backward when autograd runs the backward pass.

        `args` are the kernel's arguments: tensors [...] and other values.
        """
        ctx.replay = backward
        return forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Allocate the tensors that the kernel's backward allocates for gradients `grads` [...] of
        the outputs: call the function `backward` that was given to `forward`. Return None for the
        two functions, and the gradients of `args`."""
        return None, None, *ctx.replay(ctx, *grads)
