"""Describe the tensors that layers may save for backward, with bytes and spared FLOPs, and the
choice for a micro-batch.

The planner predicts each layer's tensor sizes on tensors without data, if it can. The layer's first
forward and backward replace the prediction by measurements. `offload/policy.py` chooses.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from streambp.offload.engines import Engine

GRAPH = "everything"  # name of a saved graph. [Note: kept graphs]
# names of stored tensors without their numbers, and the names in `StreamConfig.saves`
SAVES_BY_STORED_NAME = {"attn_out": "attn_out", "lse": "attn_out", "k": "kv", "v": "kv"}
KV_RELATIVE_VALUE = 3.4  # K/V's worth relative to Linear outputs: norms and rotation are spared too
RETURNED_MARGIN, RETURNED_MARGIN_AFTER_FAILURE = (
    0.1,
    0.01,
)  # fraction of an unused margin returned by a good step; after a failure
MAX_MARGINS = 32  # maximal number of margins
META_DEVICE = torch.device("meta")  # before the first micro-batch
ATTENTION_SECONDS_RATIO = (
    1.12  # seconds of an attention FLOP / of a product FLOP, on an H200 (`rates.py`)
)


def saves_name(name: str) -> str:
    """Return the name in `StreamConfig.saves` for a tensor that a layer has stored for backward:
    "kv" for "k.0", "mlp.up_proj" for "product.mlp.up_proj#0".

    The result is "x" for tensors that backward cannot recompute: the layer's input, recurrent
    states, and the keys that an indexer picked.

    Args:
        name: name under which the tensor is stored.
    """
    kind, _, suffix = name.partition(".")
    if kind == "product":
        return suffix.rpartition("#")[0]
    return SAVES_BY_STORED_NAME.get(kind, "x")


def host_exclusions(attention_seconds: float, copy_seconds: float) -> tuple[str, ...]:
    """Return the names of saved tensors that are never copied to the host. The result is
    ("attn_out",) if backward computes attention outputs again faster than it copies the outputs,
    and () otherwise.

    Args:
        attention_seconds: seconds of attention in all layers.
        copy_seconds: seconds in which all attention outputs are copied to the host.
    """
    return ("attn_out",) if attention_seconds <= copy_seconds else ()


@dataclasses.dataclass(frozen=True)
class LinearOutput:
    """Output of a Linear that a layer may save for backward.

    Attributes:
        bytes: size of the output.
        flops: FLOPs that compute the output.
    """

    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes and FLOPs of the tensors that a layer may save for backward, over one or several
    chunks.

    Attributes:
        x: bytes of the layer inputs.
        attn_out: bytes of attention outputs with their logsumexps.
        kv: bytes of keys and values.
        attention_flops: FLOPs of attention in a forward.
        products: outputs of Linears, by the Linear's name in the layer.
        overwritten: names of tensors that cannot be saved, because the layer overwrites them in
            place.
    """

    x: float = 0
    attn_out: float = 0
    kv: float = 0
    attention_flops: float = 0.0
    products: dict[str, LinearOutput] = dataclasses.field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()

    def __add__(self, other: Cost) -> Cost:
        products = dict(self.products)
        for name, new in other.products.items():
            old = products.get(name)
            products[name] = (
                new if old is None else LinearOutput(old.bytes + new.bytes, old.flops + new.flops)
            )
        return Cost(
            self.x + other.x,
            self.attn_out + other.attn_out,
            self.kv + other.kv,
            self.attention_flops + other.attention_flops,
            products,
            self.overwritten | other.overwritten,
        )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tensor that a layer may save for backward, with its size and what saving it spares.

    Attributes:
        index: index of the layer.
        name: name in the form of `StreamConfig.saves`, such as "kv".
        bytes: size of the tensor.
        flops_per_byte: FLOPs of matrix products that backward need not recompute, for each byte.
    """

    index: int
    name: str
    bytes: float
    flops_per_byte: float


SIZE: Callable[[Candidate], float] = operator.attrgetter("bytes")


class LayerCost(NamedTuple):
    """Bytes and FLOPs (`Cost`) of one layer's saved tensors, as predicted or measured for a call of
    `tokens` tokens over all rows, with `length` tokens in each row.

    Attributes:
        device: the layer's device.
        cost: bytes and FLOPs of the tensors that the layer may save.
        graph: bytes of the layer's autograd graph; 0: unknown.
        tokens: tokens over all rows.
        length: tokens of each row.
        situations: number of kinds of backward that have run; a backward with other frozen weights
            is another kind. `cost` leaves out Linear outputs that none of these backwards reads.
        arguments: bytes of the layer's arguments beside its input, such as cosines and sines. All
            layers of a device share them; a layer on another device than the model's input has its
            own copies.
    """

    device: torch.device
    cost: Cost
    graph: float
    tokens: int
    length: int
    situations: int
    arguments: float = 0.0

    def scaled_to(self, tokens: int) -> Cost:
        """Return the bytes and FLOPs (`Cost`) for a call of another number of tokens, in rows of
        the same length, such as a batch of more rows."""
        cost = self.cost
        if tokens == self.tokens:
            return cost
        scale = tokens / self.tokens
        products = {
            name: LinearOutput(scale * p.bytes, scale * p.flops)
            for name, p in cost.products.items()
        }
        x, attn_out, kv, flops = (
            scale * size for size in (cost.x, cost.attn_out, cost.kv, cost.attention_flops)
        )
        return Cost(x, attn_out, kv, flops, products, cost.overwritten)

    def held_bytes(self, tokens: int, home: torch.device) -> float:
        """Return the bytes of tensors that the layer holds from its forward to its backward, if
        only the layer's input is saved. A layer on another device than the model's input also holds
        copies of its arguments, such as cosines and sines.

        Args:
            tokens: tokens over all rows.
            home: device of the model's input.
        """
        copies = 0.0 if self.device == home else self.arguments
        return (self.cost.x + copies) * tokens / self.tokens

    def graph_candidate(self, index: int, tokens: int, options: list[Candidate]) -> Candidate:
        """Return the autograd graph of layer `index` as one tensor to save (`Candidate`). A saved
        graph contains all tensors that the layer may save one by one.

        Args:
            index: index of the layer.
            tokens: tokens over all rows.
            options: the tensors that the layer may save one by one. The graph spares the sum of
                their FLOPs.
        """
        size = self.graph * tokens / self.tokens
        spared = sum(option.bytes * option.flops_per_byte for option in options)
        return Candidate(index, GRAPH, size, spared / size)

    def candidates(
        self, index: int, tokens: int, length: int, is_unchunked: bool = False
    ) -> Iterator[Candidate]:
        """Yield the tensors that layer `index` may save for backward, with size and spared FLOPs.

        The FLOPs for each byte are rounded to three digits, so that equal layers have equal values.

        Args:
            index: index of the layer.
            tokens: tokens over all rows.
            length: tokens of each row.
            is_unchunked: True if the call is one chunk. "kv" is then left out: backward recomputes
                the chunk's K and V with its graph in any case. False: the call has several chunks.
        """
        cost = self.scaled_to(tokens)
        flops_per_byte = {
            name: product.flops / product.bytes
            for name, product in cost.products.items()
            if product.bytes
        }
        sizes: dict[str, float] = {name: cost.products[name].bytes for name in flops_per_byte}
        if cost.kv and flops_per_byte and not is_unchunked:
            sizes["kv"], flops_per_byte["kv"] = (
                cost.kv,
                KV_RELATIVE_VALUE * sum(flops_per_byte.values()) / len(flops_per_byte),
            )
        if cost.attn_out:
            pace = ATTENTION_SECONDS_RATIO * (length / self.length)
            sizes["attn_out"], flops_per_byte["attn_out"] = (
                cost.attn_out,
                pace * cost.attention_flops / cost.attn_out,
            )
        for name, size in sizes.items():
            yield Candidate(index, name, size, float(f"{flops_per_byte[name]:.2e}"))


def inputs_and_candidates(
    costs: Mapping[int, LayerCost], tokens: int, length: int, is_unchunked: bool
) -> tuple[dict[int, float], dict[int, list[Candidate]]]:
    """Return the bytes of each layer's input, and the tensors that each layer may save.

    Args:
        costs: bytes and FLOPs of the tensors that each layer may save, by the layer's index.
        tokens: tokens over all rows.
        length: tokens of each row.
        is_unchunked: True if the call is one chunk.
    """
    inputs: dict[int, float] = {}
    candidates: dict[int, list[Candidate]] = {}
    for index, cost in costs.items():
        inputs[index] = cost.scaled_to(tokens).x
        candidates[index] = list(cost.candidates(index, tokens, length, is_unchunked))
    return inputs, candidates


@dataclasses.dataclass
class ObservedCosts:
    """Measurements of one layer's forward, chunk by chunk: bytes and FLOPs of the tensors that the
    layer may save, and times.

    Args:
        device: the layer's device.
        tokens: tokens over all rows.
        length: tokens of each row.
        chunks: number of chunks.
        unread: dict from kinds of backward (with frozen weights or without) to Linear outputs that
            backward never reads; filled by the layer's backward.
        engine: provides the clock that times the chunks; None: no timing.

    Attributes:
        costs: bytes and FLOPs of each chunk whose forward has ended.
        graph: bytes of the autograd graphs of all chunks, as backward builds them.
        marks: device times at the start of forward and at the end of each chunk.
        attention: device times (start, end) of each chunk's attention, if attention is timed
            separately (in layers whose chunks all read the same keys).
        arguments: bytes of the layer's arguments beside its input.
    """

    device: torch.device
    tokens: int
    length: int
    chunks: int
    unread: dict[Any, Any]
    engine: Engine | None = None
    costs: list[Cost] = dataclasses.field(default_factory=list)
    graph: float = 0.0  # bytes saved by the graphs of all chunks
    marks: list[Any] = dataclasses.field(default_factory=list)
    # device times at which a chunk's attention began and ended, if attention is timed by itself
    attention: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    arguments: float = 0.0

    def clock(self) -> Any:
        """Return the device's current time as a timestamp, to be passed to `mark_attention`; None
        if chunks are not timed."""
        return None if self.engine is None else self.engine.clock()

    def mark_attention(self, began: Any) -> None:
        """Record the timestamps of the device at the start and the end of a chunk's attention.
        Called when the attention has ended. Does nothing if chunks are not timed.

        Args:
            began: timestamp at the start, the result of `clock`.
        """
        if self.engine is not None:
            self.attention.append((began, self.engine.clock()))

    def record_chunk(self, cost: Cost | None = None) -> None:
        """Record the device's timestamp when the layer's forward begins, and again when each chunk
        has ended, together with the chunk's bytes and FLOPs.

        Args:
            cost: bytes and FLOPs of the chunk that has ended; None: forward begins.
        """
        if self.engine is not None:
            self.marks.append(self.engine.clock())
        if cost is not None:
            self.costs.append(cost)

    def measured_cost(self) -> LayerCost | None:
        """Return the layer's measured bytes and FLOPs, without Linear outputs that no backward
        reads. None until the forward of every chunk has ended and a backward has run."""
        if len(self.costs) < self.chunks or not self.unread:
            return None
        unread = frozenset.intersection(
            *(unread_outputs.recompute for unread_outputs in self.unread.values())
        )
        total = sum(self.costs, Cost())
        products = {name: product for name, product in total.products.items() if name not in unread}
        cost = dataclasses.replace(total, products=products)
        # 0 if another forward ran before backward
        graph = self.graph + cost.kv if self.graph else 0.0
        return LayerCost(
            self.device, cost, graph, self.tokens, self.length, len(self.unread), self.arguments
        )

    def chunk_seconds(self) -> list[float]:
        """Return the seconds of each chunk's forward, from which speeds of attention and copies
        follow; [] if chunks were not timed."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.engine is None:
            return []
        return [self.engine.seconds(start, stop) for start, stop in pairs]

    def attention_seconds(self) -> float:
        """Return the seconds of attention in all chunks; 0 if attention has no separate times."""
        if self.engine is None:
            return 0.0
        return sum(self.engine.seconds(began, ended) for began, ended in self.attention)


def attention_rate(layers: Iterable[ObservedCosts]) -> float:
    """Return the FLOP/s of attention, estimated from the times of the layers' chunks. The rate
    decides if attention outputs are copied to the host or computed again.

    Causal chunks differ only in the number of keys that they attend to, so the increase of their
    times is attention's. If all chunks of a layer read the same keys, its attention was timed
    separately.

    Args:
        layers: measurements of each layer's forward.

    Returns:
        The rate; infinity if later chunks take no longer.
    """
    layers = list(layers)
    seconds = sum(layer.attention_seconds() for layer in layers)
    if seconds > 0:
        timed = [cost for layer in layers if layer.attention for cost in layer.costs]
        return sum(cost.attention_flops for cost in timed) / seconds
    numerator = denominator = 0.0
    for layer in layers:
        chunks = zip(layer.costs, layer.chunk_seconds(), strict=True)
        # Attention FLOPs and seconds for each byte of hidden states, because chunks differ in
        # length.
        paces = [
            (cost.attention_flops / (cost.x or 1), seconds / (cost.x or 1))
            for cost, seconds in chunks
        ]
        full_chunks = paces[:-1] or [(0.0, 0.0)]  # the last chunk may be shorter
        mean_work, mean_time = (
            sum(values) / len(full_chunks) for values in zip(*full_chunks, strict=True)
        )
        numerator += sum((w - mean_work) ** 2 for w, _ in full_chunks)
        denominator += sum((w - mean_work) * (t - mean_time) for w, t in full_chunks)
    return numerator / denominator if denominator > 0 else float("inf")


@dataclasses.dataclass(frozen=True)
class ForwardMeasurement:
    """Measurements of one forward pass of the model. The policy chooses by these numbers which
    saved tensors are copied to the host.

    Attributes:
        tokens: tokens over all rows.
        length: tokens of each row.
        seconds: compute time of all layers.
        link: bytes/s of copies to the host.
        attention: FLOP/s of attention.
        host: bytes of host memory available for saved tensors.
    """

    tokens: int
    length: int
    seconds: float
    link: float
    attention: float
    host: float


@dataclasses.dataclass
class SavesChoice:
    """Tensors that saves="auto" chose to save in one micro-batch, and the numbers behind the
    choice.

    Attributes:
        tokens: tokens over all rows.
        length: tokens of each row.
        chunk: tokens of each chunk over all rows.
        headroom: bytes of the device available for saved tensors, beside all other needs of the
            step. Under offloading the number is not reported.
        plan: tensors that each layer saves, by the layer's index; passed to the constructor, and
            not stored as an attribute.
        measured: the measured forward behind the choice, if saved tensors are copied to the host;
            None: saved tensors stay on the device.
        inputs: bytes of the layers' inputs under offloading, not part of `bytes`; 0 without
            offloading.
        on_device: bytes of inputs and saved tensors that stay on the device under offloading.
        left_out: the reason, as text, for each tensor that some or all layers do not save, by name
            of the tensor.
        min_free_bytes: smallest number of free bytes on the device during the micro-batch.
        drop_reason: the reason why all saved tensors were freed before their backward; None: no
            tensor was freed.
        spared: computation that backward is spared, in FLOPs of matrix products. Attention counts
            as matrix products of the same duration.
        bytes: bytes that all layers save, by name of the tensor.
        layers: number of layers that save the tensor, by name of the tensor.
    """

    tokens: int
    length: int
    chunk: int
    headroom: float
    plan: dataclasses.InitVar[dict[int, list[Candidate]]]
    measured: ForwardMeasurement | None = None
    inputs: float = 0.0
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    on_device: float = 0.0
    min_free_bytes: float = math.inf
    drop_reason: str | None = None
    spared: float = 0.0  # FLOPs of products, or an equivalent
    bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    layers: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self, plan: dict[int, list[Candidate]]) -> None:
        """Compute the attributes `bytes`, `layers` and `spared` from the plan. `bytes` has the
        bytes of all layers by name of the tensor, and `layers` the number of layers. `spared` is
        the sum of the spared FLOPs. Names are in order of the FLOPs that a saved byte spares, most
        first.

        Args:
            plan: tensors that each layer saves, by the layer's index.
        """
        for candidate in sorted(
            (candidate for candidates in plan.values() for candidate in candidates),
            key=lambda candidate: -candidate.flops_per_byte,
        ):
            self.bytes[candidate.name] = self.bytes.get(candidate.name, 0.0) + candidate.bytes
            self.layers[candidate.name] = self.layers.get(candidate.name, 0) + 1
            self.spared += candidate.bytes * candidate.flops_per_byte

    def explain(self, cost: Cost, layers: int, never_leave: tuple[str, ...], full: str) -> None:
        """Store in `left_out`, for each tensor that some layers do not save, the reason as text.
        Used if saved tensors are copied to the host.

        Args:
            cost: bytes of all layers' tensors.
            layers: number of layers.
            never_leave: names of the tensors that backward computes again faster than a copy takes.
            full: the reason for all other tensors, as text: no space on the host, or copies too
                slow.
        """
        why = self.left_out
        for name in never_leave if cost.attn_out else ():
            if self.layers.get(name, 0) < layers:
                why[name] = "attending again is faster than copying"
        for name in sorted(cost.overwritten):
            why.setdefault(name, "layers that overwrite it compute it again")
        for name in (
            *(name for name in ("attn_out", "kv") if getattr(cost, name)),
            *cost.products,
        ):
            if self.layers.get(name, 0) < layers:
                why.setdefault(name, full)

    @property
    def leaving(self) -> float:
        """Return the bytes of inputs and saved tensors that are copied to the host under
        offloading."""
        return self.inputs + sum(self.bytes.values()) - self.on_device


@dataclasses.dataclass
class UnpatchedChoice:
    """Predicted memory of a micro-batch for which a patched model ran the unpatched forward,
    because memory was plentiful.

    Attributes:
        tokens: tokens over all rows.
        bytes: predicted bytes of the micro-batch's autograd graphs and logits.
        headroom: bytes that a chunked step without saved tensors leaves free.
    """

    tokens: int
    bytes: float
    headroom: float


MicroBatchChoice = SavesChoice | UnpatchedChoice


def was_moved(choice: MicroBatchChoice | None) -> bool:
    """True if saved tensors of a micro-batch were copied to the host, as saves="auto" chose.

    Args:
        choice: the choice for the micro-batch; None: no choice was made.
    """
    return isinstance(choice, SavesChoice) and choice.measured is not None


class MemoryNeed:
    """Prediction of the memory that a step needs if no layer saves tensors beyond its input. The
    rest of the free memory may be used for saved tensors."""

    def bytes_by_layer(
        self, tokens: int, chunk: int, present: float
    ) -> tuple[tuple[float, float], ...]:
        """Return pairs (index, bytes). `bytes` is the largest number of bytes that a step needs
        while the forward of layers 0 to `index` has run, and their backward has not. Saved tensors
        of these layers must fit beside these bytes.

        Args:
            tokens: tokens over all rows.
            chunk: tokens of a chunk.
            present: fraction of the model's gradients that exist already.
        """
        raise NotImplementedError

    def on_device(self, device: torch.device, costs: Mapping[int, LayerCost]) -> MemoryNeed:
        """Return the prediction of the memory that a step needs on one device, for a model with
        layers on several devices. The result is this object, the prediction for the full step, if
        the devices' parts are unknown.

        Args:
            device: the device.
            costs: device and bytes of each layer, by the layer's index.
        """
        return self

    def chunk_bytes(self, chunk: int) -> float:
        """Return the bytes needed to compute one chunk of `chunk` tokens, beyond the bytes in use
        before the chunk. Saved tensors are freed if less memory is free."""
        raise NotImplementedError

    def __call__(self, tokens: int, chunk: int, present: float = 0.0) -> float:
        """Return the largest number of bytes that a step needs at any time, by which chunk sizes
        are rejected.

        Args:
            tokens: tokens over all rows.
            chunk: tokens of a chunk.
            present: fraction of the model's gradients that exist already.
        """
        return max(map(operator.itemgetter(1), self.bytes_by_layer(tokens, chunk, present)))


@dataclasses.dataclass(frozen=True)
class HostStepFigures:
    """Predictions about the steps of a model that move layer inputs to the host and save nothing
    else.

    Attributes:
        need: device memory of a step.
        seconds: maps (tokens, tokens of a chunk) to three numbers: seconds of forward's kernels, of
            backward, and of the step.
        products: FLOP/s of matrix products.
        attention: FLOP/s of attention's forward.
        link: bytes/s to the host.
        set_aside: bytes of host memory that a training engine (DeepSpeed) will allocate, and that
            saved tensors must leave free.
    """

    need: MemoryNeed
    seconds: Callable[[int, int], tuple[float, float, float]]
    products: float
    attention: float
    link: float
    set_aside: int = 0


@dataclasses.dataclass
class StepFigures:
    """Predictions about the steps of a model in its present state (trained parameters, dtype,
    mode).

    Attributes:
        need: device memory of a step without saved tensors; None: unknown.
        costs: bytes and FLOPs of the tensors that each layer may save, by the layer's index.
            Measurements of a layer's steps later replace the layer's entry.
        seconds: maps (tokens, tokens of a chunk) to seconds of a step without saved tensors; None:
            unknown.
        products: FLOP/s of matrix products.
        link: bytes/s to the host.
        why: the reason why predictions are missing; "" if no reason is known.
        on_host: function that returns predictions for steps with layer inputs on the host, or None
            if such steps cannot be counted. None in place of the function: no tensor may move to
            the host.
        without_graph: indices of layers whose graphs cannot be kept.
    """

    need: MemoryNeed | None = None
    costs: dict[int, LayerCost] = dataclasses.field(default_factory=dict)
    seconds: Callable[[int, int], float] | None = None
    products: float = math.inf
    link: float = 0.0
    why: str = ""
    on_host: Callable[[], HostStepFigures | None] | None = None
    without_graph: set[int] = dataclasses.field(default_factory=set)

    def free_by_device(
        self, home: torch.device, free: Callable[[torch.device], float | None]
    ) -> dict[torch.device, float]:
        """Return the free bytes of each device that has layers and reports its memory; {} if the
        device of the first layer reports none.

        Args:
            home: the device of the first layer.
            free: returns the bytes that a device has free; None: unknown.
        """
        at_home = free(home)
        if at_home is None:
            return {}
        free_bytes = {home: at_home}
        for cost in self.costs.values():
            if cost.device not in free_bytes:
                size = free(cost.device)
                if size is not None:
                    free_bytes[cost.device] = size
        return free_bytes

    def device(self, index: int) -> torch.device | None:
        """Return the device of layer `index`; None before the layer was counted or measured."""
        cost = self.costs.get(index)
        return None if cost is None else cost.device

    def max_spared_seconds(self, tokens: int, length: int) -> float:
        """Return the seconds of recomputation that backward need not do if all layers save all
        tensors.

        Args:
            tokens: tokens over all rows.
            length: tokens of each row.
        """
        return self.spared(
            {
                index: list(cost.candidates(index, tokens, length))
                for index, cost in self.costs.items()
            }
        )

    def spared(self, plan: Mapping[int, list[Candidate]]) -> float:
        """Return the seconds of recomputation that backward need not do because tensors were saved.
        The fastest chunk size is chosen with this number.

        Args:
            plan: tensors that each layer saves, by the layer's index.
        """
        return (
            sum(
                candidate.bytes * candidate.flops_per_byte
                for candidates in plan.values()
                for candidate in candidates
            )
            / self.products
        )


@dataclasses.dataclass
class Shortage:
    """Record of how much free memory a micro-batch lacked compared with its plan, and the margin
    that similar micro-batches leave free.

    Attributes:
        key: tuple that is equal for similar micro-batches, of the device and the tokens of a step
            and of a chunk. If saved tensors move to the host, the tuple has the length of a row and
            the constant `policy.HOST_MARGIN_KEY` in place of the device.
        headroom: bytes available for saved tensors.
        planned: bytes of the tensors that the plan of the micro-batch saves.
        planned_by_layer: the bytes in `planned` by layer index.
        shortfall: largest number of bytes that were lacking at any time; negative if bytes stayed
            free.
        saves_dropped: True if the saved tensors were freed before their backward.
        failed: True if the device ran out of memory.
        margin: bytes that the next similar micro-batch leaves free, in addition to those that its
            prediction leaves free.
        margin_decay: fraction by which one micro-batch without a shortfall reduces the margin.
    """

    key: tuple[Any, ...]
    headroom: float
    planned: float
    planned_by_layer: Mapping[int, float]
    shortfall: float = -math.inf
    saves_dropped: bool = False
    failed: bool = False
    margin: float = 0.0
    margin_decay: float = RETURNED_MARGIN

    def learn(self, previous: Shortage | None) -> None:
        """Set `margin`, the memory that the next similar micro-batch leaves free: the margin of the
        previous similar micro-batch, raised if this micro-batch lacked memory and lowered
        otherwise.

        Args:
            previous: the shortage of the previous similar micro-batch; None: there was none.
        """
        if previous is not None:
            self.margin = previous.margin
            self.margin_decay = previous.margin_decay
        if self.shortfall > 0:
            self.margin = self.margin + self.headroom - self.planned + self.shortfall
            self.margin_decay = RETURNED_MARGIN_AFTER_FAILURE if self.failed else self.margin_decay
        else:
            self.margin = self.margin - self.margin_decay * min(self.margin, -self.shortfall)


@dataclasses.dataclass
class DeviceWatch:
    """The free memory that one device is expected to have while a micro-batch runs, and a record of
    the memory that is lacking.

    Attributes:
        expected: free bytes that the plan expects at the start of the device's next layer.
        slack: bytes of free memory that may be lacking before layers save less than planned.
        retries: number of failed allocations of torch's allocator (`num_alloc_retries`) when the
            micro-batch began.
        others_are_seen: True if the reported free memory includes changes by other processes.
        chunk_bytes: bytes that a chunk needs free.
        shortage: record of the memory that the micro-batch lacks on the device compared with the
            plan; None if the device's layers save nothing.
    """

    expected: float
    slack: float
    retries: int
    others_are_seen: bool
    chunk_bytes: float = 0.0
    shortage: Shortage | None = None

    def learn(self, retries: int, margins: dict[tuple[Any, ...], Shortage]) -> None:
        """Store the record of the memory that the micro-batch lacked (`shortage`) in `margins`.
        First compute from the record how many bytes the next similar micro-batch leaves free. The
        oldest record is removed if there are too many.

        Args:
            retries: number of failed allocations of torch's allocator now.
            margins: records of earlier micro-batches, by `Shortage.key`.
        """
        shortage = self.shortage
        assert shortage is not None
        if retries > self.retries:  # the allocator freed its cache
            shortage.shortfall = max(shortage.shortfall, self.slack)
        shortage.learn(margins.pop(shortage.key, None))
        if len(margins) == MAX_MARGINS:
            del margins[next(iter(margins))]
        margins[shortage.key] = shortage


@dataclasses.dataclass
class BatchSaves:
    """Tensors that the layers save in the running micro-batch, and the free memory of the devices.

    Attributes:
        home: device of the first layer.
        plan: tensors that each layer saves, by the layer's index.
        last: index of the layer whose forward began last; infinity before the first layer.
        devices: expected free memory of each device; only layers on these devices save.
    """

    home: torch.device = META_DEVICE
    plan: dict[int, list[Candidate]] = dataclasses.field(default_factory=dict)
    last: float = math.inf
    devices: dict[torch.device, DeviceWatch] = dataclasses.field(default_factory=dict)
