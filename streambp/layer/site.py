"""A streamed layer: how it streams, and what its calls found out about it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from streambp.attention.backend import AsSdpa, Used
from streambp.attention.carriers import NoAttention, ThroughInterface
from streambp.chunks import ChunkPlan
from streambp.config import StreamConfig
from streambp.device import has_data, products_rounded_to
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.fingerprint.hooks import HookKey, described
from streambp.fingerprint.looks import Fingerprint, Look
from streambp.foreign import has_compiled_parts
from streambp.layer.adapters import Reading, readings
from streambp.layer.choices import Choices
from streambp.layer.owner import StepOwner
from streambp.layer.products import UnreadInHalves, UnreadProducts, hooked_everywhere, plain_linears
from streambp.layer.recompute import NOTHING, Autocast
from streambp.layer.witness import (
    CHOSEN_OTHERWISE,
    EPS_OF_HALVES,
    TOLERANCE,
    Compared,
    Witness,
    Witnesses,
    chooses,
    dtypes_of,
)
from streambp.offload.manager import OffloadManager
from streambp.offload.policy import SavesPolicy
from streambp.offload.weights import HostWeights
from streambp.recurrent.carriers import StateCarrier
from streambp.recurrent.documents import PackedRows

T = TypeVar("T")
Key = TypeVar("Key")
ANY_SIZE = 0  # of chunks, in `Findings.tried`
REACH = "code of others"  # part of a kind of call: what can be reached from it. [Note: kept values]
KINDS = 32  # of calls, for which what was found out about a layer is remembered
TIMES = 4  # that a reason which may pass is found, before it counts for all calls of a kind


def remember(known: dict[Key, T], key: Key, value: T) -> T:
    """Make the value the latest entry of what is known, which keeps the last `KINDS` that were made; give it back."""
    known.pop(key, None)
    known[key] = value
    if len(known) > KINDS:
        del known[next(iter(known))]
    return value


@dataclasses.dataclass(frozen=True)
class Overwritten:
    """What a layer's forward writes to, of what streamed layers keep for backward. [Note: writes through pointers]

    Args:
        products: names of the Linears whose output it writes to.
        attended: it writes to its attention's output.
        inputs: it writes to its hidden_states or start states, through a pointer.
    """

    products: frozenset[str] = frozenset()
    attended: bool = False
    inputs: bool = False


@dataclasses.dataclass
class Findings:
    """What trials found out about calls of one kind.

    judged: whether they stream is known. because: why they run whole; None: they stream.
    seen_writing: under which settings of autocast it was looked for what the layer writes to.
    tried: for each size of chunks, the tokens up to which these give what the whole sequence gives; None: nobody tried.
    adopted: all of it is that of the same calls without some hooks. [Note: hooks after a warm-up]
    doubts: how often a reason to run whole was found that may pass.
    """

    judged: bool = False
    because: str | None = None
    seen_writing: frozenset[Autocast] = frozenset()
    tried: dict[int, int] | None = None
    adopted: bool = False
    doubts: int = 0

    def judge(self, because: str | None) -> None:
        """Remember why such calls run whole; None: they stream."""
        self.judged, self.because = True, because

    def doubt(self, because: str) -> None:
        """Remember why this call runs whole, if the calls before it did for such a reason as well: an exception that does
        not come again, or a value that a first call sets, says nothing of calls to come."""
        self.doubts += 1
        if self.doubts >= TIMES:
            self.judge(because)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What passes from chunk to chunk of a layer, and by which of its arguments. [Note: carriers]

    Args:
        attention: how chunks get at keys and values. states: how they get at states.
        position_cache: the argument of the cache that the layer asks how many tokens came before; empty: it asks none.
    """

    attention: NoAttention = dataclasses.field(default_factory=ThroughInterface)
    states: StateCarrier = dataclasses.field(default_factory=StateCarrier)
    position_cache: str = ""


@dataclasses.dataclass(frozen=True)
class CallReport:
    """What became of a layer's call, for `describe`.

    Args:
        because: why it ran whole, checkpointed, instead of in chunks; None if it streamed, or had nothing to cut.
        longest: tokens of its longest chunk, if that is longer than asked for, and why. [Note: chunk ends]
        told: the arguments that told its kernels where documents of packed rows start. [Note: documents]
        rows: the documents of packed rows that position_ids mark for its mixers; None: they mark none. [Note: segments]
        documents: the argument that told attention of packed documents, and how many there were.
        plan: the chunks that it streamed in.
    """

    because: str | None = None
    longest: tuple[int, str] | None = None
    told: tuple[str, ...] = ()
    rows: PackedRows | None = None
    documents: tuple[str, int] | None = None
    plan: ChunkPlan | None = None


@dataclasses.dataclass
class Warm:
    """What `streambp.warm_up` leaves with the layers of a model. [Note: hooks after a warm-up]

    on: hooks that are set from now on are watched, not tried. Off for all layers once one changed what it was given.
    """

    on: bool = True


@dataclasses.dataclass
class LayerSite:
    """A streamed layer: the module, how it streams, and what was found out about it.

    Args:
        kind: what passes from chunk to chunk.
        last: what became of its last call.
        findings: of each kind of call that was tried.
        fingerprint: what the layer is made of, which is part of the kind of call. [Note: fingerprint]
        kernels_told: documents that position_ids mark are told to its kernels, if these can be.
        offloader: where saved tensors go; None: they stay. chooser: decides what is saved; None: the config does.
        weights: where its weights live; None: on the device.
        index: the layer's place among those of its model.
        chunk_rule: chunk size from index, rows, positions and device; None: what the config says.
        overwritten: what its forward was seen to write to.
        turns: its trials may run at the highest positions of a call. [Note: writes through pointers]
        foreign: what is inside it and was written by others, by name. [Note: foreign insides]
        foreign_until: so many tokens could be tried at once, of a longer call; None: all of them.
        choices: what its chunks chose, or are to choose; None: they choose freely. [Note: choices]
        previous: what stood in place of the class's forward before `patch`; it is part of what the layer computes.
        backward_begins: is told when the backward of one of its calls begins, and on which device. [Note: notes on a step]
        advised: an error of this step says already what to change where memory runs out.
        attended: the kernels that attended in its last call. sdpa: what torch's own attention would have made of it.
        warm: of a model that was warmed up.
        hooks_tried: the inner hooks that were there when the layer was tried. shown: of others' hooks, by name, the modules
            that they are on: these saw trials.

    [Note: hooks after a warm-up] A trial runs the layer's hooks, and a hook that adds something up keeps the trial's tokens
    and gradients. A hook that only looks on changes nothing of what a trial finds. So in a model that was warmed up hooks
    that are new are not tried: each forward watches whether they change what they are given, as it always does, and
    backward whether they keep it with its graph. A hook that does either ends the step with an error, and the layer is
    tried with it from then on.
        owner: who is computing with the model. [Note: owner of a step]
        witnesses: compare what backward passes compute with what forwards gave. [Note: witness]
    """

    layer: nn.Module
    config: StreamConfig
    kind: LayerKind = LayerKind()
    last: CallReport = CallReport()
    findings: dict[frozenset[tuple[str, Any]], Findings] = dataclasses.field(default_factory=dict)
    fingerprint: Fingerprint = dataclasses.field(default_factory=Fingerprint, repr=False, compare=False)
    kernels_told: bool = True
    offloader: OffloadManager | None = None
    chooser: SavesPolicy | None = None
    weights: HostWeights | None = None
    index: int = 0
    chunk_rule: Callable[[int, int, int, torch.device], int] | None = None
    unread: dict[tuple[Any, ...], UnreadProducts] = dataclasses.field(default_factory=dict)
    unread_in_halves: dict[tuple[Any, ...], UnreadInHalves] = dataclasses.field(default_factory=dict)
    overwritten: Overwritten = Overwritten()
    turns: bool = True
    foreign: list[str] = dataclasses.field(default_factory=list)
    foreign_until: int | None = None
    choices: Choices | None = None
    previous: Callable[..., Any] | None = None
    backward_begins: Callable[[torch.device], None] | None = None
    advised: bool = False
    attended: frozenset[Used] = frozenset()
    sdpa: AsSdpa = dataclasses.field(default_factory=AsSdpa)
    warm: Warm | None = None
    hooks_tried: set[HookKey] = dataclasses.field(default_factory=set)
    shown: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    owner: StepOwner = dataclasses.field(default_factory=StepOwner, repr=False, compare=False)
    witnesses: Witnesses = dataclasses.field(default_factory=Witnesses, repr=False, compare=False)

    @property
    def forward(self) -> Callable[..., Any]:
        """What the layer computes unpatched."""
        return self.previous or functools.partial(type(self.layer).forward, self.layer)

    @property
    def on_host(self) -> bool:
        """Whether the layer's weights live on the host."""
        return self.weights is not None and self.index not in self.weights.ranges.staying

    def weights_here(self, direction: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Within, the layer's weights are on the device, wherever they live."""
        if self.weights is None:
            return NOTHING
        return self.weights.here(self.index, direction, device, decodes=direction != "trial")

    def weights_for_once(self, args: Any, kwargs: Any, because: str) -> contextlib.AbstractContextManager[None]:
        """The same for a call of the layer that does not stream, which must leave no graph behind.

        Args:
            because: why it does not.

        Raises:
            UnsupportedModelError: it would.
        """
        if not self.on_host:
            return NOTHING
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, *self.layer.parameters())):
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} {self.index} does not stream: {because}. Its graph would hold weights on the "
                "device, where those of other layers come next. Call the model under torch.no_grad(), or leave "
                "weights='cpu' out."
            )
        self.fingerprint.look(self.layer)
        assert self.weights is not None
        return self.weights.here(self.index, "forward", given[0].device)

    @property
    def repeats(self) -> bool:
        """Whether a chunk may be computed again: saves that nobody named are there to be let go of.
        [Note: once for each chunk]"""
        return self.chooser is not None and self.offloader is None

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """Its Linears that may be left out, kept and summed; none where torch's global hooks watch every module, which come
        and go at any time."""
        if hooked_everywhere():
            return {}
        names = tuple(name for name, reading in self.adapters.items() if reading.why is None)
        return self.of(functools.partial(plain_linears, adapted=names), ("linears", names))

    @property
    def adapters(self) -> dict[str, Reading]:
        """Its Linears with adapters, by name; none where all modules are to compute in their own way."""
        return self.of(readings) if self.config.kernels == "auto" else {}

    def found(self, kind: frozenset[tuple[str, Any]]) -> Findings:
        """What trials found, or find next, of such calls."""
        findings = self.findings.get(kind)
        if findings is None:
            findings = remember(self.findings, kind, Findings())
        return findings

    def forget(self, because: str | None) -> None:
        """Take back what a trial found against a call that has raised: it may have been the call's fault."""
        for findings in self.findings.values():
            findings.doubts = 0
            if findings.judged and because is not None and findings.because == because:
                findings.judge(None)
                findings.judged = False

    def knows(self, findings: Findings, plan: ChunkPlan) -> bool:
        """Whether nothing inside the layer is foreign, or was tried with sequences about as long as a call's of the kind
        of which these are the findings. [Note: foreign insides]"""
        tried = findings.tried
        if len(plan.ends) == 1 or (tried is None and not self.foreign):
            return True
        return tried is not None and plan.length <= tried.get(plan.size, tried[ANY_SIZE])

    def coarsest(self, dtype: torch.dtype, device: str, autocast: Autocast) -> torch.dtype:
        """The dtype of the largest eps among this one, what the layer computes in, and what autocast casts to, where
        products of float32 are rounded as the program lets this kind of device round them: it does so for some numbers of
        rows and not for others."""
        cast = (to for _, active, to in autocast.states if active)
        coarsest = max((dtype, *self.of(dtypes_of), *cast), key=lambda dtype: torch.finfo(dtype).eps)
        return products_rounded_to(device) or coarsest if coarsest == torch.float32 else coarsest

    def witness(self, x: Tensor, autocast: Autocast) -> Witness | None:
        """What compares a call's backward with its forward over x [..., T, h]; None: that is switched off, or there are no
        values to compare."""
        if not self.config.compare_backward or not has_data(x) or not x.numel():
            return None
        dtype, device = x.dtype, x.device.type  # x itself would live as long as its witness

        def compared(_: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], Compared]:
            coarsest = self.coarsest(dtype, device, autocast)
            tolerance = TOLERANCE.get(coarsest, EPS_OF_HALVES * torch.finfo(coarsest).eps)
            if coarsest not in TOLERANCE and (device != "cpu" or self.of(has_compiled_parts)) and self.of(chooses):
                tolerance = CHOSEN_OTHERWISE  # kernels may add up in any order
            return functools.partial(Compared, self.layer, self.index, autocast.on, tolerance)

        known_as = "compared", dtype, device, autocast.states
        return Witness(self.witnesses, lambda: self.of(compared, (*known_as, products_rounded_to(device))))

    def adopt(self, kind: frozenset[tuple[str, Any]], look: Look) -> None:
        """Take the verdict of calls of a kind from that kind without the hooks that have come since the layer was warmed
        up; give back what was taken where that does not hold any more. [Note: hooks after a warm-up]"""
        if self.warm is None or not look.hooks.places:
            return
        if not self.warm.on:
            for taken in [taken for taken, findings in self.findings.items() if findings.adopted]:
                del self.findings[taken]
        elif not self.found(kind).judged:
            now = dict(kind)["state"]  # of modules, of hooks, and what trains
            for known, findings in [pair for pair in self.findings.items() if pair[1].judged]:
                before = dict(known)["state"]
                differing = {name for name, _ in known ^ kind} - {REACH}
                same = differing == {"state"} and before[::2] == now[::2]
                if same and set(before[1]) <= set(now[1]):
                    remember(self.findings, known, findings)  # whose findings others take stays among the last entries
                    remember(self.findings, kind, dataclasses.replace(findings, adopted=True))
                    return

    def refuse_untried(self, acted: AbstractSet[HookKey]) -> None:
        """Asked when a forward is over, of the hooks that changed what they were given.

        Raises:
            StreamBPError: one of them was never tried. [Note: hooks after a warm-up]
        """
        for key in sorted(acted - self.hooks_tried if self.warm is not None and self.warm.on else ()):
            self.warm.on = False  # type: ignore[union-attr]
            raise StreamBPError(
                f"{described(key)} of {type(self.layer).__name__} changes what it is given, and was set after "
                "streambp.warm_up, which lets hooks that look on alone be set without a trial. Set it before warm_up, or "
                "repeat the step: from now on layers are tried with the hooks that are on them."
            )

    def of(self, question: Callable[[nn.Module], T], known_as: Hashable = None) -> T:
        """What a function says of the layer as of the last look; asked again when it has changed. [Note: fingerprint]

        Args:
            known_as: instead of by the function itself.
        """
        answers = (self.fingerprint.last or self.fingerprint.look(self.layer)).answers
        key = known_as or question
        if key not in answers:
            answers[key] = question(self.layer)
        answer: T = answers[key]
        return answer
