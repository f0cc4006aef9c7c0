"""Counts bytes of live storages and FLOPs of a step, on tensors with or without data.

`LiveBytes` counts what operations allocate; it works on real tensors too, which is how its predictions are tested.
`StepCount` adds what a step on tensors without data needs: an answer where the model looks at values, the memory that GPU
kernels take inside of themselves, and the work of each operation.

[Note: kernel workspaces] FlashAttention's backward allocates, and frees before it returns, dQ in float32 and one float32 a
query and head; with grouped queries also dK and dV for every query head. cuDNN's does the same except for the latter.
Memory-efficient attention's has dQ, dK and dV in float32; it is given a key head for each query head. A dispatch mode
cannot see these, so their sizes are added here from the operators' arguments.

[Note: one kernel] On tensors without data torch runs several operations where a GPU runs one kernel of Triton's, of a
package's, or a copy. Their memory counts as it is; the bytes that they move are the kernel's.
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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from streambp.device import counted_bytes, has_data
from streambp.planner.routing import LOOKED_AT, TOP_K, answer
from streambp.planner.work import BACKWARDS, Work, aten, tensors, work_of, workspace


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations created while this mode was on and that are still alive;
    their peak, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.largest = 0
        self.tracked = 0  # storages so far
        self._alive: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # storage -> its number, its bytes, what sees it go

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled during a count, and keeping dynamo out costs as much as an operation

    def reset_peak(self) -> None:
        """Let the peak start from the bytes that are alive now."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        fresh = [s for s in (x.untyped_storage() for x in tensors(result)) if s._cdata not in self._alive]
        if fresh:
            before = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
            for storage in fresh:
                if storage._cdata not in before and storage._cdata not in self._alive:
                    self._track(storage)
        return result

    def alive(self, first: int, stop: int) -> int:
        """Bytes that are still alive of the storages numbered [first, stop)."""
        return sum(size for number, size, _ in self._alive.values() if first <= number < stop)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] = (self.tracked, size, weakref.ref(storage, functools.partial(self._gone, key)))
        self.tracked += 1
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
        if size > self.largest:
            self.largest = size

    def _gone(self, key: int, _: Any) -> None:
        self.live -= self._alive.pop(key)[1]


CHANGED_IN_PLACE = frozenset(getattr(aten, name).default for name in ("copy_", "zero_", "neg_", "index_put_")) | frozenset(
    getattr(getattr(aten, name), kind) for name in ("add_", "mul_", "div_", "sub_") for kind in ("Tensor", "Scalar")
)
CHANGED_LISTS = frozenset({aten._foreach_add_.List})  # nothing is returned


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """What is known of an operation: how its results come about, and its work.

    made: shape, stride and dtype of each output, or the output itself where it is no tensor; or IN_PLACE, or OUT.
    several: the outputs are a tuple. attends: its kernel takes memory of its own.
    """

    made: Any
    several: bool
    work: Work
    attends: bool = False
    routed: int = 0  # pairs of a token and an expert, where this picks experts


VIEW = Known(None, False, Work(dispatches=1))
PLAIN = frozenset((Tensor, torch.nn.Parameter))
SIMPLE = frozenset((int, bool, type(None), torch.dtype))
META = torch.device("meta")


class Shapes:
    """Results of operations on meta tensors, remembered by the shapes of their inputs: a step repeats the same few hundred
    operations thousands of times, and most of a count's time is torch finding out their outputs' shapes.

    Only operations are remembered whose outputs are fresh tensors, their first argument changed in place, or their `out`.

    Args:
        mode: of fake tensors; None: the tensors are on meta.
    """

    IN_PLACE, OUT = "in place", "out"

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode
        self.views: set[int] = set()  # ids of operations whose results are views of their arguments, by their schemas
        self._known: dict[Any, Known] = {}
        self._meta = mode is None

    def known(self, func: Any, args: Any, kwargs: Any) -> tuple[Known | None, Any]:
        """What is known of an operation, and the key to remember it by; None where it cannot be."""
        key: list[Any] = [id(func)]  # hashed in C; torch keeps its operations
        try:
            for value in args:
                kind = type(value)
                if self._meta and kind in PLAIN and value.is_meta:
                    key += value.shape, value.stride(), value.dtype
                else:
                    key.append((kind, value) if kind in SIMPLE else self._part(value))
            if kwargs:
                key += [*kwargs, *map(self._part, kwargs.values())]
            found = tuple(key)
            return self._known.get(found), found
        except TypeError:
            return None, None

    def make(self, known: Known) -> list[Any]:
        """Fresh outputs."""
        made: list[Any] = []
        for one in known.made:
            if type(one) is not tuple:
                made.append(one)
                continue
            shape, stride, dtype = one
            if self.mode is None:
                made.append(torch.empty_strided(shape, stride, dtype=dtype, device=META))
                continue
            with no_dispatch():
                storage = torch.empty_strided(shape, stride, dtype=dtype, device=META)
            made.append(FakeTensor(self.mode, storage, torch.device("cpu")))
        return made

    def _known_kind(self, tensor: Any) -> bool:
        if self.mode is None:
            return tensor.is_meta and type(tensor) in PLAIN
        return isinstance(tensor, FakeTensor) and tensor.constant is None

    def _part(self, value: Any) -> Any:
        """What an argument says about the output's shape.

        Raises:
            TypeError: a tensor of another kind.
        """
        if isinstance(value, Tensor):
            if not self._known_kind(value):
                raise TypeError(f"{type(value).__name__} on {value.device}")
            return value.shape, value.stride(), value.dtype
        if isinstance(value, list | tuple):
            return tuple(map(self._part, value)) if any(isinstance(one, Tensor) for one in value) else tuple(value)
        return type(value), "nan" if value != value else value  # nan would never be found again

    def remember(self, key: Any, func: Any, args: Any, kwargs: Any, result: Any) -> Work:
        """The work of an operation whose results were not known; from now on they are, where that is possible."""
        schema = func._schema
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        view = any(x.untyped_storage()._cdata in given for x in tensors(result))
        written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        if view and not written:
            # The schema of `_unsafe_view` says that it makes none.
            if func is aten._unsafe_view.default or all(out.alias_info is not None for out in schema.returns):
                self.views.add(id(func))
            return VIEW.work
        work = work_of(func, args, kwargs, result)
        several = isinstance(result, tuple)
        outputs = list(result) if several else [result]
        if key is None:
            return work
        if written:
            if func in CHANGED_IN_PLACE and result is args[0]:
                self._known[key] = Known(Shapes.IN_PLACE, False, work)
            elif "out" in kwargs and result is kwargs["out"]:
                self._known[key] = Known(Shapes.OUT, False, work)
            elif func in CHANGED_LISTS:
                self._known[key] = Known([None], False, work)
        elif any(out.alias_info is not None for out in schema.returns):
            pass  # some of these are views
        elif all(type(x) in SIMPLE or (isinstance(x, Tensor) and self._known_kind(x)) for x in outputs):
            made = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in outputs]
            self._known[key] = Known(made, several, work, func in BACKWARDS, result[1].numel() if func is TOP_K else 0)
        return work


class AllocatedBytes(contextlib.nullcontext[None]):
    """The bytes of an accelerator's allocator beyond those at the start, in place of tracked storages."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._start = counted_bytes(device, "allocated")

    @property
    def live(self) -> int:
        """Bytes allocated now, less those at the start; freed ones count as negative."""
        return counted_bytes(self._device, "allocated") - self._start

    @property
    def peak(self) -> int:
        """The most bytes that were allocated since `reset_peak`, less those at the start."""
        return counted_bytes(self._device, "peak") - self._start

    def reset_peak(self) -> None:
        """Let the allocator's peak start from the bytes that are allocated now, for the whole process."""
        torch.accelerator.reset_peak_memory_stats(self._device)


class StepCount(LiveBytes):
    """`LiveBytes` for a step without data; `work` adds up.

    Args:
        kernels: "flash" or "cudnn", whose workspaces are added to the peak; None: none are. [Note: kernel workspaces]
        shapes: what is known about operations already.
    """

    def __init__(self, kernels: str | None, shapes: Shapes | None = None) -> None:
        super().__init__()
        self.kernels = kernels
        self.shapes = shapes or Shapes()
        self.routed = self.experts = 0  # pairs of a token and an expert where experts were last picked; experts there
        self._done = Work()
        self._times: dict[Known, int] = {}  # operations whose work is not yet in `_done`
        self._kernel_depth = 0  # [Note: one kernel]

    @property
    def work(self) -> Work:
        """Of everything so far."""
        for known, times in self._times.items():
            self._done = self._done.plus(known.work, times)
        self._times.clear()
        return self._done

    def add(self, work: Work) -> None:
        """Count work that no operation stands for."""
        self._done = self._done.plus(work)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shapes = self.shapes
        if id(func) in shapes.views:
            self._count(VIEW)
            return func(*args, **kwargs)
        known, key = shapes.known(func, args, kwargs)
        if known is None:
            return self._first(func, args, kwargs, key)
        self._count(known)
        if known.attends:
            self._workspace(func, args)
        if known.routed:
            self.routed = known.routed
        if known.made is Shapes.IN_PLACE:
            return args[0]
        if known.made is Shapes.OUT:
            return kwargs["out"]
        made = shapes.make(known)
        for output in made:
            if isinstance(output, Tensor):
                self._track(output.untyped_storage())
        return tuple(made) if known.several else made[0]

    def _first(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """Run an operation that is not known."""
        device = kwargs.get("device") if func is aten._to_copy.default and args[0].device.type == "meta" else None
        to_data = device is not None and torch.device(device).type != "meta"  # a copy of values that do not exist
        is_read = func is aten._local_scalar_dense.default and not has_data(args[0])
        if is_read or (to_data and args[0].dim() == 0):
            # Conditions hold. In the models' forwards they ask whether a mask keeps every token, whether a batch is not
            # packed, whether an index lies in its range.
            kind = kwargs.get("dtype") or args[0].dtype
            value = True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
            return value if is_read else torch.tensor(value, dtype=kind, device=device)
        if func in LOOKED_AT and not has_data(args[0]) and (to_data or func is not aten._to_copy.default):
            if args[0].dtype == torch.bool and args[0].dim() == 1 and func is not aten._to_copy.default:  # a flag for each
                self.experts = args[0].shape[0]
            found = answer(func, args[0], self.routed, self.experts)
            if isinstance(found, Tensor):
                return found
            if found is not None:  # a tensor without data that no operation could make
                shape, dtype = found
                (made,) = self.shapes.make(Known([(shape, (shape[1], 1), dtype)], False, VIEW.work))
                self._track(made.untyped_storage())
                self._count(VIEW)
                return made
        if func in BACKWARDS:
            self._workspace(func, args)
        result = super().__torch_dispatch__(func, (), args, kwargs)
        self._count(Known(None, False, self.shapes.remember(key, func, args, kwargs, result)))
        if func is TOP_K:
            self.routed = result[1].numel()
        return result

    def _count(self, known: Known) -> None:
        if self._kernel_depth:
            self.add(known.work._replace(moved=0.0, dispatches=0.0))
        else:
            self._times[known] = self._times.get(known, 0) + 1

    def _workspace(self, func: Any, args: Any) -> None:
        if self.kernels is not None:
            self.peak = max(self.peak, self.live + workspace(func, args, self.kernels))


Count = TypeVar("Count", bound=StepCount)


def running_counts(kind: type[Count]) -> list[Count]:
    """The counts of a kind that are running."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, kind)]


def add_flops(number: float, moved: float = 0.0) -> None:
    """Add FLOPs of products that no operation stands for, and bytes moved, to the counts that are running."""
    for count in running_counts(StepCount):
        count.add(Work(number, moved=moved))


@contextlib.contextmanager
def one_kernel(moved: float, out: float = 0.0, back: float = 0.0) -> Iterator[None]:
    """Operations within stand for one kernel, which moves these bytes and is one dispatch. [Note: one kernel]"""
    counts = running_counts(StepCount)
    for count in counts:
        count.add(Work(moved=moved, dispatches=1, out=out, back=back))
        count._kernel_depth += 1
    try:
        yield
    finally:
        for count in counts:
            count._kernel_depth -= 1


class Replayed(torch.autograd.Function):
    """A kernel as two functions that allocate, in its order and for as long, what its passes do, and compute nothing."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        """What `forward` gives for `ctx` and args, tensors [...] among them."""
        ctx.replay = backward
        return forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """What `backward` gives for `ctx` and grads [...]: gradients of args."""
        return None, None, *ctx.replay(ctx, *grads)
