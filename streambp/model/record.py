"""Hold what one step of a patched model did, and format the sentences that report it.

`describe`, the log line and a Trainer's logs agree, because all three are built from one
`StepRecord`.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from streambp.offload.costs import GRAPH, SavesChoice
from streambp.prefixes.calls import PackedRowSizes

OUTCOME_STREAMED = "streamed"
OUTCOME_KEPT_GRAPH = "kept its graph"
OUTCOME_UNPATCHED = "ran unpatched"
OUTCOME_UNCHUNKED = "ran whole"
NOT_TRIED = "not tried yet"
UNITS = MappingProxyType({"GiB": 2**30, "MiB": 2**20, "KiB": 2**10})
GIB = UNITS["GiB"]


def size_text(size: float) -> str:
    """Return a number of bytes as text with a fitting unit, such as "7.8 GiB"."""
    for unit, scale in UNITS.items():
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def share_text(part: float, total: float) -> str:
    """Return a part and a total in bytes as text, for example "0.03 of 7.8 GiB". If the part is too
    small for the total's unit, each has its own unit: "1.2 KiB of 7.8 GiB"."""
    scale = next((scale for scale in UNITS.values() if total >= scale), 1)
    if scale == 1 or part < scale / 100:
        return f"{size_text(part)} of {size_text(total)}"
    return f"{part / scale:.2g} of {size_text(total)}"


@dataclasses.dataclass(frozen=True)
class SavedTensors:
    """One kind of tensor that layers saved for backward.

    Attributes:
        name: the name in `StreamConfig.saves`, or "everything" for a layer's whole autograd graph.
        layers: number of layers that saved the tensors.
        bytes: total over these layers; None if the user named the tensors to save, because their
            bytes are not counted then.
    """

    name: str
    layers: int
    bytes: float | None = None

    def __str__(self) -> str:
        name = "the graph" if self.name == GRAPH else self.name
        size = "" if self.bytes is None else f" ({size_text(self.bytes)})"
        return f"{name} of {self.layers} layer{'s' * (self.layers != 1)}{size}"


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """Memory traffic between device and host in one step, caused by offloading of saved tensors.

    Attributes:
        out: bytes moved to the host.
        back: bytes moved back to the device.
        allocated: bytes of allocated host memory.
        stalls: seconds that compute has waited for copies, over all steps since `patch`.
        left: number of tensors that stayed on the device because host memory was full, over all
            steps since `patch`.
        choice: sentence about which saved tensors were chosen for the host; None: the user named
            them, or nothing was chosen yet.
    """

    out: float
    back: float
    allocated: float
    stalls: float
    left: int
    choice: str | None = None


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Device memory of one step.

    Attributes:
        needed: bytes that the unpatched model was predicted to save, for a step that ran unpatched;
            None for other steps.
        free: bytes that a step without saved tensors leaves free, as of the start of the step;
            None: unknown.
        least_free: the fewest free bytes that the device reported; None: unknown.
        peak: peak bytes of torch's allocator on the first layer's device since the last reset;
            None: unknown.
        let_go: the reason why saved tensors were freed before backward used them, and recomputed;
            None: no saved tensor was freed.
    """

    needed: float | None = None
    free: float | None = None
    least_free: float | None = None
    peak: int | None = None
    let_go: str | None = None


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """Record of a patched model's last training step (a micro-batch with gradients); `str()` is one
    sentence.

    Args:
        number: number of the micro-batch since `patch`, from 1.
        tokens: tokens over all rows.
        rows: rows of the batch.
        way: text on the computation of the layers. "streamed": chunk by chunk. "kept its graph": in
            one chunk, and backward recomputed nothing. "ran unpatched": by the model's own forward.
            "ran whole": no layer can be chunked, so all used gradient checkpointing.
        chunk_size: tokens of each row in one chunk.
        chunks: number of chunks.
        layers: number of the model's layers.
        head: text about the output projection and the loss.
        saved: tensors that layers saved for backward in addition to their inputs.
        memory: device memory of the step. The fields of `memory` can also be read from the record,
            for example `record.free`.
        host: traffic to and from host memory; None without offloading.
        shared: sizes of the batch if common prefixes of its rows were computed once; None: no
            prefix was shared.
        whole: pairs of a layer's name and the reason, for the layers that ran unchunked.
        split_by: the library that splits sequences over ranks; None: sequences are not split.
        unpatched_steps: number of steps since `patch` that ran unpatched.
        short_steps: number of steps since `patch` that freed saved tensors because memory was
            short.
    """

    number: int
    tokens: int
    rows: int
    way: str
    chunk_size: int
    chunks: int
    layers: int
    head: str
    saved: tuple[SavedTensors, ...] = ()
    memory: StepMemory = StepMemory()
    host: HostTraffic | None = None
    shared: PackedRowSizes | None = None
    whole: tuple[tuple[str, str], ...] = ()
    split_by: str | None = None
    unpatched_steps: int = 0
    short_steps: int = 0

    @property
    def needed(self) -> float | None:
        """Return the device bytes that autograd graphs and logits were predicted to take between
        forward and backward, if this step ran unpatched; None for other steps."""
        return self.memory.needed

    @property
    def free(self) -> float | None:
        """Return the device bytes that would be free during the step if layers saved no tensors
        beside their inputs; None: unknown."""
        return self.memory.free

    @property
    def least_free(self) -> float | None:
        """Return the fewest free bytes that the device reported during the step; None: unknown."""
        return self.memory.least_free

    @property
    def peak(self) -> int | None:
        """Return the peak bytes of torch's allocator on the first layer's device, since the peak
        was reset last; None: unknown."""
        return self.memory.peak

    @property
    def let_go(self) -> str | None:
        """Return the reason why saved tensors were freed before backward used them; None: none was
        freed."""
        return self.memory.let_go

    @property
    def saved_bytes(self) -> float | None:
        """Return the bytes of all tensors that layers saved for backward; None if they are not
        counted."""
        sizes = [saved.bytes for saved in self.saved]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def __str__(self) -> str:
        batch = f"{self.tokens:,} token{'s' * (self.tokens != 1)}"
        shared = "" if self.shared is None else f", computed as {self.shared.tokens:,} tokens"
        batch += (
            f" ({self.rows} row{'s' * (self.rows != 1)}{shared})" if self.rows > 1 or shared else ""
        )
        if self.way == OUTCOME_UNPATCHED:
            return f"{batch} in one chunk, ran unpatched{self._room(self.needed, ': it needs')}"
        if self.way == OUTCOME_UNCHUNKED:
            reasons = dict.fromkeys(reason for _, reason in self.whole)
            return f"{batch}, ran whole under gradient checkpointing: {'; '.join(reasons)}"
        chunks_text = (
            "one chunk" if self.chunks == 1 else f"{self.chunks} chunks of {self.chunk_size:,}"
        )
        chunks_text += " a row" if self.chunks > 1 and self.rows > 1 and self.shared is None else ""
        parts = [f"{batch} in {chunks_text}, {self.way}"]
        if self.whole:
            parts.append(
                f"but {len(self.whole)} of {self.layers} layers ran whole under gradient "
                "checkpointing"
            )
        moved_bytes = self.host is not None and self.host.out
        if moved_bytes:
            savings = f"moved {size_text(moved_bytes)} to the host"
        elif self.way == OUTCOME_KEPT_GRAPH:
            savings = (
                f"backward recomputed nothing{self._room(self.saved_bytes, ', the graph took')}"
            )
        elif not self.saved:
            savings = "saved layer inputs alone"
        elif self.saved_bytes is None:
            savings = f"saved {', '.join(saved.name for saved in self.saved)}"
        else:
            savings = f"saved{self._room(self.saved_bytes, '')}"
        drop_text = (
            "" if moved_bytes or self.let_go is None else f", and let go of it: {self.let_go}"
        )
        return f"{', '.join(parts)}: {savings}{drop_text}"

    def _room(self, size: float | None, verb: str) -> str:
        if size is None:
            return ""
        if self.free is None:
            return f"{verb} {size_text(size)}"
        return f"{verb} {share_text(size, max(0.0, self.free))} free"

    @property
    def line(self) -> str:
        """Return one line for a log: the step's number and sentence, the saved tensors, and how the
        loss was computed."""
        if self.saved_bytes and self.way == OUTCOME_STREAMED:
            names = f" ({', '.join(saved.name for saved in self.saved)})"
        else:
            names = ""
        return f"step {self.number}: {self}{names}; head: {self.head}"

    def numbers(self) -> dict[str, float]:
        """Return the record's values for a Trainer's logs, by log key, such as "stream_tokens".
        Unknown values are left out."""
        host = self.host
        saved_bytes = (
            self.needed
            if self.way == OUTCOME_UNPATCHED
            else self.saved_bytes
            if self.let_go is None
            else 0.0
        )
        saved_bytes = saved_bytes if host is None else None
        values = {
            "stream_tokens": self.tokens,
            "stream_chunks": self.chunks,
            "stream_chunk_size": self.chunk_size,
            "stream_kept_gib": None if saved_bytes is None else saved_bytes / GIB,
            "stream_free_gib": None if self.free is None else self.free / GIB,
            "stream_peak_gib": None if self.peak is None else self.peak / GIB,
            "stream_host_gib": None if host is None else host.out / GIB,
            "stream_shared_tokens": None if self.shared is None else self.shared.tokens,
            "stream_whole_layers": len(self.whole),
        }
        return {name: value for name, value in values.items() if value is not None}

    def saves(self) -> tuple[str, ...]:
        """Return lines for `streambp.describe` on what a step with saves="auto" saved for backward,
        without offloading.

        Each kind of saved tensor has a line. The last line states how much device memory a step
        without saved tensors leaves free, which limits the saved tensors. If nothing was saved, one
        line has the reason.
        """
        if self.way == OUTCOME_UNPATCHED:
            return ("all activations and the logits, as the unpatched model does (auto)",)
        if self.split_by is not None:
            return ("nothing (auto: sequences are split over ranks)",)
        if self.way == OUTCOME_UNCHUNKED:
            return ("nothing (auto: layers that run whole keep their inputs alone)",)
        if self.free is None:
            if self.number == 1:
                return ("nothing (auto: the first step counts what there is to save)",)
            return ("nothing (auto: the device's free memory or the cost of a layer is not known)",)
        free_text = f"auto: a step without saves leaves {size_text(max(0.0, self.free))} free"
        if self.least_free is not None:
            free_text += f"; at least {size_text(max(0.0, self.least_free))} stayed free"
        if self.let_go is not None:
            free_text += f"; {self.let_go}, so all of it was let go of and recomputed"
        return (
            (*(str(saved) for saved in self.saved), free_text)
            if self.saved
            else (f"nothing ({free_text})",)
        )


def offload_text(choice: SavesChoice) -> str:
    """Return a sentence on the saved tensors that offload="auto" moves to the host. The sentence
    includes the measurements behind this choice, and the tensors that were not chosen.

    Args:
        choice: the choice of saved tensors for a step, with its measurements.
    """
    m = choice.measured
    assert m is not None
    leaves = choice.leaving
    copying = leaves / m.link
    hidden = min(1.0, m.seconds / copying) if copying else 1.0
    kept_out = "; ".join(f"not {name}: {why}" for name, why in choice.left_out.items())
    rates = f"{m.link / 1e9:.3g} GB/s to the host, attention {m.attention / 1e12:.3g} TFLOP/s"
    names = ", ".join(
        name if n == max(choice.layers.values()) else f"{name} of {n} layers"
        for name, n in choice.layers.items()
    )
    return (
        f"auto chose {names or 'layer inputs alone'} at {m.length:,} tokens ({m.seconds:.3g} s of "
        f"forward, {rates}): {size_text(leaves)} leave in {copying:.3g} s, {hidden:.0%} of it "
        "behind "
        "the compute, and spare "
        f"{choice.spared:.3g} FLOPs in backward" + (f"; {kept_out}" if kept_out else "")
    )
