"""What to save when the user leaves it open: as much recomputation as fits behind the compute (DESIGN.md section 5).

The first forward of a length saves nothing but the layers' inputs and measures: the time of each chunk, the rate of the
copies, what could be saved and what that would spare. From the second on, in this order and as long as the bytes that leave
in a forward are at most compute time x link bandwidth, and the host has room:

    attn_out   if attending again takes longer than copying: for causal attention, if the sequence is longer than attention
               FLOP/s over link bytes/s
    kv
    products   the outputs of Linears, those first that cost the most FLOPs a byte

The forward decides: a backward takes twice as long, and the link is no slower in its direction.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from streambp.layer.cost import Cost
from streambp.offload.engines import OUT, DeviceMemory, Engine
from streambp.offload.transfers import Transfers

OVERWRITTEN = "layers that overwrite it compute it again"
FREE_SHARE = 0.9  # of what a step left free on the device; the rest is for fragments


@dataclasses.dataclass(frozen=True)
class Measured:
    """One forward over `length` tokens a row: seconds of its layers' compute, bytes/s to the host, attention FLOP/s."""

    length: int
    seconds: float
    link: float
    attention: float


@dataclasses.dataclass(frozen=True)
class OffloadChoice:
    """What is saved, and why the rest is not. bytes: that leave in a forward. spared: seconds of attention, and FLOPs of
    Linears, that backward does not compute again."""

    measured: Measured
    saves: tuple[str, ...]
    bytes: int
    spared_attention: float
    spared_flops: float
    left_out: dict[str, str]

    @property
    def copying(self) -> float:
        """Seconds."""
        return self.bytes / self.measured.link


def choose(cost: Cost, measured: Measured, host_bytes: float) -> OffloadChoice:
    """What to save of a forward that costs `cost`, with so much host memory for it."""
    fits = measured.seconds * measured.link
    saves: list[str] = []
    left_out = dict.fromkeys(sorted(cost.overwritten), OVERWRITTEN)
    taken = cost.x
    spared_attention = cost.attention_flops / measured.attention

    def consider(name: str, size: int, worth: bool = True) -> None:
        nonlocal taken
        if not worth:
            left_out[name] = "attending again is faster than copying"
        elif taken + size > fits:
            left_out[name] = "the link has no room"
        elif taken + size > host_bytes:
            left_out[name] = "the host has no room"
        else:
            saves.append(name)
            taken += size

    if cost.attn_out:
        consider("attn_out", cost.attn_out, spared_attention > cost.attn_out / measured.link)
    if cost.kv:
        consider("kv", cost.kv)
    products = sorted(cost.products.items(), key=lambda item: (-item[1].flops / item[1].bytes, -item[1].bytes))
    for name, product in products:
        consider(name, product.bytes)
    spared_flops = sum(product.flops for name, product in products if name in saves)
    return OffloadChoice(measured, tuple(saves), taken, spared_attention * ("attn_out" in saves), spared_flops, left_out)


@dataclasses.dataclass
class LayerWatch:
    """One layer's forward while it is measured: the time at its start and after each chunk, and what each chunk cost.

    unread: of the layer, filled by its backward: situations in which some products need not be computed again.
    """

    engine: Engine
    unread: dict[Any, Any]
    marks: list[Any] = dataclasses.field(default_factory=list)
    chunks: list[Cost] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        """Forward begins: mark the time in the compute queue."""
        self.marks.append(self.engine.clock())

    def chunk_done(self, cost: Cost) -> None:
        """A chunk's forward is over: mark the time, and remember what the chunk cost."""
        self.marks.append(self.engine.clock())
        self.chunks.append(cost)

    def graph_done(self, size: int) -> None:
        """Nothing: graphs stay on the device."""

    @property
    def complete(self) -> bool:
        """Forward went through, and a backward has run."""
        return bool(self.unread) and 0 < len(self.chunks) == len(self.marks) - 1

    def seconds(self) -> list[float]:
        """Of each chunk."""
        return [self.engine.seconds(a, b) for a, b in zip(self.marks, self.marks[1:], strict=False)]

    def paces(self) -> list[tuple[float, float]]:
        """Of each chunk, FLOPs of attention and seconds, per byte of hidden states: chunks may differ in length."""
        sizes = [cost.x or 1 for cost in self.chunks]
        return [
            (cost.attention_flops / size, seconds / size)
            for cost, seconds, size in zip(self.chunks, self.seconds(), sizes, strict=True)
        ]

    def cost(self) -> Cost:
        """Of all chunks, without the products that backward leaves out anyway."""
        total = sum(self.chunks, Cost())
        unread = {name for products in self.unread.values() for name in products.recompute}
        return dataclasses.replace(total, products={k: v for k, v in total.products.items() if k not in unread})


@dataclasses.dataclass(frozen=True)
class Before:
    """As a measured forward began: bytes moved to the host so far, and the seconds that took; the memory of each device, by
    its engine, as its first layer began."""

    moved: float
    copying: float
    memory: dict[Engine, DeviceMemory] = dataclasses.field(default_factory=dict)


class Auto:
    """Measures the first forward of each length (within a factor of two), and chooses for those that follow.

    Args:
        chooses_saves: what is saved. sets_budget: what may stay on the device, out of what the measured step left free.
    """

    def __init__(self, chooses_saves: bool = True, sets_budget: bool = False) -> None:
        self.chooses_saves = chooses_saves
        self.sets_budget = sets_budget
        self.choices: dict[int, OffloadChoice] = {}
        self.latest: OffloadChoice | None = None
        self.gpu_memory: int | None = None  # chosen
        self.prefix_memory: int | None = None  # before that, for prefixes: half of what was free at first
        self._watches: list[LayerWatch] = []
        self._length = 0
        self._before = Before(0.0, 0.0)

    def fresh(self) -> Auto:
        """One that has measured nothing."""
        return Auto(self.chooses_saves, self.sets_budget)

    def saves(self, length: int) -> tuple[str, ...] | None:
        """What a forward over that many tokens a row saves; None: what the configuration says."""
        self.latest = self.choices.get(length.bit_length())
        if not self.chooses_saves:
            return None
        return self.latest.saves if self.latest is not None else ()

    def begin(self, length: int, transfers: Transfers, host_bytes: float, workspace: int) -> None:
        """A forward begins. The one before needed `workspace` bytes for a prefix; if it was measured, choose."""
        if self._watches and all(watch.complete for watch in self._watches):
            self.choices[self._length.bit_length()] = self._decide(transfers, host_bytes)
            self._set_budget(workspace)
        self._watches = []
        if length.bit_length() not in self.choices:
            self._length = length
            self._before = Before(transfers.bytes[OUT], transfers.copying()[OUT])

    def _look_at(self, engine: Engine) -> None:
        """A device's first layer of a measured forward begins."""
        memory = engine.memory()
        if memory is None:
            return
        self._before.memory[engine] = memory
        if self.sets_budget and self.gpu_memory is None:
            half = (memory.limit - memory.allocated) // 2
            self.prefix_memory = half if self.prefix_memory is None else min(self.prefix_memory, half)

    def _set_budget(self, workspace: int) -> None:
        """What the fullest device has left. [Note: device budget]"""
        pairs = [(before, engine.memory()) for engine, before in self._before.memory.items()]
        known = [(before, now) for before, now in pairs if now is not None]
        if not self.sets_budget or not known or self.prefix_memory is None:
            return
        # What a device has more than at first are the optimizer's states, born after the peak.
        free = min(now.limit - now.peak - max(0, now.allocated - before.allocated) for before, now in known)
        self.gpu_memory = min(workspace, self.prefix_memory) + max(0, int(FREE_SHARE * free))
        self.prefix_memory = self.gpu_memory

    def watch(self, length: int, engine: Engine, unread: dict[Any, Any]) -> LayerWatch | None:
        """For one layer's forward; None if there is nothing to measure."""
        if length.bit_length() in self.choices:
            return None
        if engine not in self._before.memory:
            self._look_at(engine)
        self._watches.append(LayerWatch(engine, unread))
        return self._watches[-1]

    def _decide(self, transfers: Transfers, host_bytes: float) -> OffloadChoice:
        moved = transfers.bytes[OUT] - self._before.moved
        copying = transfers.copying()[OUT] - self._before.copying
        warm = self._watches[1:] or self._watches  # the first layer's kernels may have been made while it ran
        seconds = sum(sum(watch.seconds()) for watch in warm) * len(self._watches) / len(warm)
        link = moved / copying if moved and copying else 1.0
        measured = Measured(self._length, seconds, link, attention_rate([watch.paces() for watch in warm]))
        return choose(sum((watch.cost() for watch in self._watches), Cost()), measured, host_bytes)


def attention_rate(paces: list[list[tuple[float, float]]]) -> float:
    """FLOP/s of attention, from the slope of the chunks' times: they differ in nothing but how much they attend to.

    Args:
        paces: of each chunk's attention, layer by layer: FLOPs and seconds, both for the same number of tokens.

    Returns:
        Infinity if longer spans take no longer.
    """
    above = below = 0.0
    for layer in paces:
        whole = layer[:-1] or [(0.0, 0.0)]  # the last chunk may be shorter
        mean_work, mean_time = (sum(values) / len(whole) for values in zip(*whole, strict=True))
        above += sum((w - mean_work) ** 2 for w, _ in whole)
        below += sum((w - mean_work) * (t - mean_time) for w, t in whole)
    return above / below if below > 0 else float("inf")
