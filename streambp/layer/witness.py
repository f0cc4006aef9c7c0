"""Comparison of a recomputation in backward with the forward.

[Note: witness] Backward recomputes a chunk with the layer's current values. A change since forward
(an optimizer step, an adapter's scale, a hook, a global number) would give the gradient of another
model. Forward therefore records each chunk's output, and backward compares. The record is not the
tensor but one random combination of its rows, in which every row has a weight. Up to a factor, the
norm of the difference of two combinations is the norm of the tensors' difference.

Backward reads some values instead of recomputing them. For these values the inputs are compared:

    a Linear output that is skipped           its input; in the last chunk also the output, in a
                                              few rows for which the product is computed
    saved products and attention results      in the last chunk the input of the product, q, k and v

Two runs of the same chunks differ only by the summation order of kernels, and by compilation once
with a graph and once without. These differences are a few roundings of the least precise dtype. A
router with nearly tied scores may then send a token to another expert, so that its full row
differs. If kernels may sum in any order, and a half-precision layer has a router, a fraction of the
rows may differ.

On a CPU, equal bits end a comparison at once. Other devices are synchronized once for a full
backward, at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from streambp.device import MEMORY_ERRORS, is_out_of_memory, without_autocast
from streambp.errors import BackwardError
from streambp.known_names import COMPUTE_DTYPE

MAX_COMPARED_ROWS = 8  # compared rows of an output that contains a skipped product
MAX_CACHED_WEIGHTS = 32  # row counts with cached weights
MAX_FOLDED_FEATURES = 1024  # a combination of rows is folded to about this size
# Half precision is allowed four eps. The other dtypes are allowed the difference of sums of
# thousands of terms in another order. A model in float64 computes some of its parts in float32.
RELATIVE_TOLERANCES = {torch.float64: 1e-8, torch.float32: 256 * torch.finfo(torch.float32).eps}
HALF_TOLERANCE_EPS = 4
CHANGED_CHOICES_TOLERANCE = 0.35  # relative to the norm: one row in sixteen, counted twice
CHOICE_FUNCTIONS = frozenset(("topk", "argsort", "sort", "argmax", "multinomial"))


def rows_of(length: int) -> slice:
    """Return a slice that selects at most `MAX_COMPARED_ROWS` (8) of `length` rows of a tensor,
    evenly spaced, with the last row. If backward skips the last Linear of the layer, only these
    rows of the output are computed, and compared with forward."""
    step = max(1, length // MAX_COMPARED_ROWS)
    return slice(length - 1 - (min(MAX_COMPARED_ROWS, length) - 1) * step, None, step)


def dtypes_of(layer: nn.Module) -> frozenset[torch.dtype]:
    """Return the dtypes that the layer's modules compute in: those of its float parameters, and
    `compute_dtype` of bitsandbytes' 4-bit Linears, whose parameters are bytes. The tolerance of
    comparisons follows from the dtypes."""
    compute_dtypes = (getattr(module, COMPUTE_DTYPE, None) for module in layer.modules())
    computed_in = {
        dtype
        for dtype in compute_dtypes
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point
    }
    return (
        frozenset(
            parameter.dtype for parameter in layer.parameters() if parameter.is_floating_point()
        )
        | computed_in
    )


def makes_choices(layer: nn.Module) -> bool:
    """True if the code of a module inside the layer calls topk, sort or argmax, as routers of
    experts and indexers of keys do. Comparisons of forward and recomputation then may tolerate a
    larger difference, because rounding can change a few choices."""
    classes = {
        base
        for module in layer.modules()
        for base in type(module).__mro__
        if base not in (nn.Module, object)
    }
    members = (member for base in classes for member in vars(base).values())
    codes = (getattr(member, "__code__", None) for member in members)
    return any(
        code is not None and not CHOICE_FUNCTIONS.isdisjoint(code.co_names) for code in codes
    )


def equal_on_cpu(in_forward: Tensor, in_backward: Tensor) -> bool:
    """True if two tensors [...] are on a CPU and equal, so that no further comparison is needed.
    False for tensors on another device: reading the result there would synchronize, so the caller
    compares these tensors later."""
    return in_backward.is_cpu and torch.equal(in_forward, in_backward)


class ValuePair(NamedTuple):
    """Two values of the same tensor of a layer, from forward and from the recomputation in
    backward. The values must be equal up to a tolerance.

    Attributes:
        layer: the layer.
        number: the layer's index in its model.
        cast: True if autocast was on in forward.
        tolerance: allowed norm of the difference, divided by the norm of `backward_value` minus
            `unchanged`. [Note: witness]
        forward_value: the value in forward: [n], a weighted sum of the tensor's rows, or a few of
            its rows [..., n].
        backward_value: this value of the recomputed tensor.
        unchanged: a term that both values contain unchanged, such as the residual connection's
            input, in the shape of the values; None: there is none.
    """

    layer: nn.Module  # no reference to the witness: an aborted backward must leave no cycle
    number: int
    cast: bool
    tolerance: float
    forward_value: Tensor
    backward_value: Tensor
    unchanged: Tensor | None


@dataclasses.dataclass(eq=False)
class Witness:
    """Record of one layer call's forward, by which backward finds out if its recomputation differs
    from the forward. The record contains weighted sums of tensors' rows, not the tensors. A
    difference raises BackwardError. [Note: witness]

    Attributes:
        witnesses: collects the comparisons of all layers of the model.
        compared: function without arguments. Returns a function that makes a `ValuePair` from the
            arguments forward_value, backward_value and unchanged. Called only if a comparison is
            needed, because `compared` inspects the layer.
        left_out: names of the Linears whose outputs backward skips.
        last: True if the current chunk is the last of the sequence; more values are compared there.
    """

    witnesses: Witnesses
    compared: Callable[[], Callable[[Tensor, Tensor, Tensor | None], ValuePair]]
    left_out: frozenset[str] = frozenset()
    last: bool = False
    _noted: dict[Any, list[tuple[str, Tensor]]] = dataclasses.field(default_factory=dict)
    _records: list[tuple[str, Tensor]] = dataclasses.field(default_factory=list)
    _combined_input: tuple[weakref.ref[Tensor], int, Tensor] | None = (
        None  # the last x, its version, and its combination
    )
    _in_backward: bool = False
    _pairs: list[ValuePair] = dataclasses.field(default_factory=list)

    def begin(self, key: Hashable, last: bool, in_backward: bool) -> None:
        """Set the chunk to which the next calls of `see` belong. Called in forward, `see` records
        values of this chunk. Called in backward, `see` compares recomputed values with the values
        that forward recorded for this chunk.

        Args:
            key: pair of a name and the chunk's index, under which forward's values are stored until
                backward. The name is "" for the full layer, or that of the part before or after
                attention if these parts are computed separately.
            last: True for the last chunk of the sequence.
            in_backward: True in backward; False in forward.
        """
        self.last, self._in_backward, self._combined_input = last, in_backward, None
        if in_backward:
            self._records = self._noted.pop(key, [])
        else:
            self._records = self._noted[key] = []

    def see(
        self, name: str, x: Tensor, unchanged: Tensor | None = None, rows: slice | None = None
    ) -> None:
        """Record a weighted sum of the rows of x in forward; in backward, compare it with the value
        that forward has recorded under the same name. A difference raises later, when
        `Witnesses.submit` evaluates all comparisons.

        Args:
            name: name of the tensor in this chunk. Tensors with the same name are compared in the
                order of their calls.
            x: [..., C, n].
            unchanged: [..., C, n], a term of x that is equal in forward and backward, such as the
                layer's input. The norm of x without this term sets the tolerance. None: there is no
                such term.
            rows: rows of x that are recorded themselves; None: record one weighted sum of all rows.
        """
        if not self._in_backward:
            self._records.append(
                (name, self._combine_rows(x) if rows is None else x.detach()[..., rows, :].clone())
            )
            return
        for index, (recorded_name, recorded) in enumerate(self._records):
            if recorded_name == name:
                del self._records[index]
                value = self._combine_rows(x) if rows is None else x.detach()[..., rows, :]
                if recorded.shape != value.shape or equal_on_cpu(recorded, value):
                    return
                base = unchanged
                if base is not None:
                    if rows is None:
                        base = self.witnesses.combine_rows(base.detach())
                    else:
                        base = base.detach()[..., rows, :].clone()
                self._pairs.append(
                    self.compared()(recorded, value if rows is None else value.clone(), base)
                )
                return

    def _combine_rows(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the rows of x [..., C, n], with the weights of
        `Witnesses.combine_rows`. The last result is cached, because consecutive Linears often have
        the same input x."""
        if x.is_inference():
            return self.witnesses.combine_rows(x)
        cached = self._combined_input
        if cached is None or cached[0]() is not x or cached[1] != x._version:
            combined = self.witnesses.combine_rows(x.detach() if x.requires_grad else x)
            self._combined_input = weakref.ref(x), x._version, combined
            return combined
        return cached[2]

    def see_output(self, x: Tensor, output: Tensor) -> None:
        """Record a chunk's output in forward; in backward, compare the recomputed output with the
        recorded one.

        If backward skips a Linear of the layer, the full output is not recomputed. Only a few rows
        of the last chunk are then compared.

        Args:
            x: the chunk's input [..., B, C, h], which the output contains as a term.
            output: the chunk's output [..., B, C, h].
        """
        if self.left_out and not self.last:
            return
        self.see("output", output, x, rows_of(output.shape[-2]) if self.left_out else None)

    def end(self) -> None:
        """End the comparisons of this layer call, at the end of the layer's backward. The pairs of
        values that `see` has collected go to `Witnesses.submit`, which compares them. All recorded
        values are dropped."""
        pairs, self._pairs, self._noted = self._pairs, [], {}
        if pairs:
            self.witnesses.submit(pairs)


@dataclasses.dataclass(eq=False)
class Witnesses:
    """The running comparisons of forward and recomputation, for all layers of a model. All pairs of
    values of one backward are compared at its end, so that the host waits for the device only once.
    [Note: witness]"""

    _weights: dict[tuple[int, torch.dtype, torch.device], Tensor] = dataclasses.field(
        default_factory=dict
    )
    _longest: dict[tuple[torch.dtype, torch.device], Tensor] = dataclasses.field(
        default_factory=dict
    )
    _questions: weakref.WeakValueDictionary[int, ComparisonBatch] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )
    # autograd has a thread for each device
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def __reduce__(self) -> Any:
        """Return what copy and pickle need to make a new object without comparisons, because no
        backward of the copy is running."""
        return Witnesses, ()

    def combine_rows(self, x: Tensor) -> Tensor:
        """Return one weighted sum of the rows of x, without a graph. Two tensors are compared by
        these sums, so that forward need not save a tensor for the comparison. The result is [n]; if
        n is large, groups of its entries are added up to fewer numbers.

        The weight of a row is a pseudorandom function of its index, and small enough for sums in
        float16.

        Args:
            x: [..., n].
        """
        device, features = x.device, x.shape[-1]
        rows = x.numel() // max(1, features)
        weights = self._weights.get((rows, x.dtype, device))
        if weights is None:  # a view of the longest cached weights
            key = x.dtype, device
            if key not in self._longest or self._longest[key].shape[0] < rows:
                mixed = (
                    torch.arange(1, 2 * rows + 1, device="cpu", dtype=torch.int64) * 2654435761
                    & 0xFFFFFFFF
                )
                mixed = (mixed ^ (mixed >> 15)) * 2246822519 & 0xFFFFFFFF
                mixed = (mixed ^ (mixed >> 13)) * 3266489917 & 0xFFFFFFFF
                size = 0.5 + (mixed & 0xFFFF) / 0xFFFF
                self._longest[key] = (size * torch.where(mixed >> 31 == 1, 1 / 64, -1 / 64)).to(
                    device, x.dtype
                )
            if len(self._weights) == MAX_CACHED_WEIGHTS:
                self._weights.clear()
            weights = self._weights[rows, x.dtype, device] = self._longest[key][:rows]
        is_contiguous = type(x) is Tensor and x.is_contiguous()
        # as_strided makes one view, reshape and t two; this runs twice for each chunk.
        # [n, rows]
        if is_contiguous:
            columns = x.as_strided((features, rows), (1, features))
        else:
            columns = x.reshape(rows, features).t()
        if not torch._C._is_any_autocast_enabled():
            total = torch.mv(columns, weights)
        else:
            with without_autocast(device.type):
                total = torch.mv(columns, weights)
        folded = (
            math.gcd(features, MAX_FOLDED_FEATURES) if features > MAX_FOLDED_FEATURES else features
        )
        return total if folded in (features, 1) else total.view(-1, folded).sum(0)

    def submit(self, pairs: list[ValuePair]) -> None:
        """Compare pairs of values from forward and recomputation. While autograd runs a backward,
        the comparison waits until its end, where the pairs of all layers are compared together.
        Otherwise the pairs are compared at once. Raise BackwardError if a pair differs by more than
        its tolerance.

        Args:
            pairs: the pairs.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            ComparisonBatch(pairs).evaluate()
            return
        with self._lock:
            question = self._questions.get(task)
            if question is None:
                question = self._questions[task] = ComparisonBatch([])
                Variable._execution_engine.queue_callback(question.evaluate)  # type: ignore[attr-defined]
            question.pairs += pairs


@dataclasses.dataclass(eq=False)
class ComparisonBatch:
    """The pairs of values, of all layers of a model, that are compared at the end of one backward
    of the model.

    Attributes:
        pairs: the pairs of values from forward and from backward.
    """

    pairs: list[ValuePair]

    def evaluate(self) -> None:
        """Compare the pairs of values from forward and backward, with one read from each device.
        `pairs` is then empty.

        Raises:
            BackwardError: a layer's recomputation differs from its forward.
        """
        pairs, self.pairs = self.pairs, []
        try:
            changed_pairs = _find_changed(pairs)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            changed_pairs = None
        # after the handler: the error's frames hold tensors. Compare on the CPU instead.
        if changed_pairs is None:
            for index, (*_, in_forward, in_backward, base) in enumerate(pairs):
                base = None if base is None else base.cpu()
                pairs[index] = pairs[index]._replace(
                    forward_value=in_forward.cpu(), backward_value=in_backward.cpu(), unchanged=base
                )
            changed_pairs = _find_changed(pairs)
        if changed_pairs:
            first = min(changed_pairs, key=lambda pair: pair.number)
            keeps = (
                "Autocast keeps its copies of weights until its context ends: end it before "
                "optimizer.step(). "
            )
            raise BackwardError(
                f"{type(first.layer).__name__} is not in backward what it was in forward: the same "
                "input has another output. Backward recomputes the layer, so it would compute the "
                "gradient of another model. Between forward and backward nothing may change that "
                "the layer reads: weights (optimizer.step(), `.data`) or numbers outside of the "
                "model. Set gradients to zero and repeat the step without such a change. "
                f"{keeps if first.cast else ''}If nothing changes and kernels only round "
                "differently each time, set StreamConfig(compare_backward=False)."
            )


def _find_changed(pairs: list[ValuePair]) -> list[ValuePair]:
    """Return those of the pairs whose values from forward and backward differ by more than the
    pair's tolerance."""
    groups: dict[tuple[Any, ...], list[ValuePair]] = {}
    for pair in pairs:
        key = (
            pair.backward_value.device,
            pair.backward_value.dtype,
            pair.backward_value.shape,
            pair.tolerance,
            pair.unchanged is None,
        )
        groups.setdefault(key, []).append(pair)
    flags: dict[torch.device, list[Tensor]] = {}
    for (device, dtype, _, tolerance, _), group in groups.items():
        flags.setdefault(device, []).append(_differ(group, dtype, tolerance))
    ordered = [
        pair
        for device in flags
        for key, group in groups.items()
        if key[0] == device
        for pair in group
    ]
    different = [flag for parts in flags.values() for flag in torch.cat(parts).tolist()]
    return [pair for pair, differs in zip(ordered, different, strict=True) if differs]


def _differ(group: list[ValuePair], dtype: torch.dtype, tolerance: float) -> Tensor:
    """Compare pairs of values, from a layer's forward and from its recomputation in backward.
    Return a bool tensor [len(group)], True for a pair whose difference exceeds the tolerance.

    A pair with NaN gives False, because Linears whose output values no code reads return NaN.

    Args:
        group: pairs of values with the same shape, dtype and device. `ValuePair.unchanged` is a
            tensor in all pairs, or None in all.
        dtype: the dtype of the values.
        tolerance: allowed norm of the difference, relative to the norm of the recomputed value. The
            tensor `unchanged`, if there is one, is first subtracted from this value.
    """
    wide = torch.promote_types(dtype, torch.float32)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.enter_context(without_autocast(group[0].backward_value.device.type))
        pairs = zip(*((pair.forward_value, pair.backward_value) for pair in group), strict=True)
        in_forward, in_backward = (torch.stack(parts).flatten(1).to(wide) for parts in pairs)
        scale = size = in_backward.norm(dim=1)
        # all pairs have a tensor, or all have None
        unchanged_terms = [pair.unchanged for pair in group if pair.unchanged is not None]
        if unchanged_terms:
            scale = (in_backward - torch.stack(unchanged_terms).flatten(1).to(wide)).norm(dim=1)
        off = (in_backward - in_forward).norm(dim=1)
        limit = tolerance * scale + torch.finfo(dtype).eps * size
        return off > limit
