"""Notes on each step of a patched model, and the line that a log gets when a step did something new.

[Note: notes on a step] A step is a micro-batch with gradients. Notes are made when the forward of its backbone ends, where
all that is decided before backward is known, and completed when autograd has ended its backward (a callback of the engine).
They are references to objects that are there anyway: nothing is counted for them and nothing waits. What they mean is
said when somebody asks (`last_step.py`). Evaluations between steps change no note.

[Note: bare errors] Backward outside of streamed layers and of the head is torch's: of embeddings, of norms, of sums of
gradients, and of all that a micro-batch as unpatched does. Nobody is called where it raises, so nobody can add advice to
its error. But the engine lets go of its callbacks then, uncalled. That is seen, and the advice is a warning beside the
error, if torch's allocator counts more errors than when backward began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook

from streambp.alive import Living
from streambp.device import allocator_count
from streambp.layer.oom import bare_advice
from streambp.layer.site import CallReport, LayerSite
from streambp.model.record import StepRecord
from streambp.offload.costs import Choice, Chosen
from streambp.offload.manager import OffloadManager
from streambp.prefixes.calls import Shared

logger = logging.getLogger(__name__)
Shape = tuple[int, int]


@dataclasses.dataclass
class Step:
    """Notes on one micro-batch. [Note: notes on a step]

    shapes: of the tokens [B, T] of each backbone. reports: of each layer's call. moved: bytes that copies have moved since
        the step before. in_backward: its backward has begun; over: it has ended, or the next step has begun. ooms: errors
        that each device's allocator had raised when backward came to it.
    """

    number: int
    unpatched: bool
    shapes: dict[int, Shape]
    reports: list[CallReport] = dataclasses.field(default_factory=list)
    choice: Choice | None = None
    shared: Shared | None = None
    moved: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_backward: bool = False
    over: bool = False
    ooms: dict[torch.device, int] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Over all rows."""
        return sum(rows * length for rows, length in self.shapes.values())

    @property
    def let_go(self) -> str | None:
        """Why saved tensors were let go of; None: they were not."""
        return self.choice.let_go if isinstance(self.choice, Chosen) else None


class Steps:
    """The steps of one patched model. [Note: notes on a step]

    Args:
        offloader: where its saved tensors go.

    sites: its layers. tell: makes a record of the last step for the log; None: nothing is logged. name: the model's.
    unpatched, short: how many steps ran as unpatched, and let go of saved tensors.
    apart: a layer's backward began before there was a step: another module than the backbone calls the layers.
    """

    def __init__(self, offloader: OffloadManager | None = None) -> None:
        self.offloader = offloader
        self.sites = Living[LayerSite]()
        self.tell: Callable[[], StepRecord | None] | None = None
        self.name = ""
        self.last: Step | None = None
        self.unpatched = self.short = 0
        self.apart = False
        self._moved: Mapping[str, float] = {}
        self._said: set[Hashable] = set()

    def __getstate__(self) -> Any:
        """A copied or pickled model has seen nothing."""
        return self.offloader, self.tell, self.name

    def __setstate__(self, state: Any) -> None:
        offloader, tell, name = state
        Steps.__init__(self, offloader)
        self.tell, self.name = tell, name

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Within, steps are not the program's: afterwards notes are what they were, and no log has a line of them."""
        before = self.last, self.unpatched, self.short, self.tell
        self.tell = None
        try:
            yield
        finally:
            self.settle()
            self.last, self.unpatched, self.short, self.tell = before

    def forward_done(self, backbone: int, given: Tensor | None, shared: Shared | None, unpatched: bool = False) -> None:
        """The forward of a backbone has ended, with gradients.

        Args:
            backbone: its id; a step has one forward of each. given: its tokens [B, T] or their embeddings [B, T, h].
            unpatched: it ran so.
        """
        shape = (0, 0) if given is None else (given.shape[0], given.shape[1])
        shapes, number = {backbone: shape}, 1
        last = self.last
        if last is not None:
            number = last.number + 1
            if last.unpatched and not last.in_backward:
                number = last.number  # it did not fit, and streams now
            elif not last.over and not last.in_backward and backbone not in last.shapes:
                number, shapes = last.number, {**last.shapes, **shapes}  # another stack of the same forward
            else:
                self.settle()
        reports = [] if unpatched else [site.last for site in self.sites]
        self.last = Step(number, unpatched, shapes, reports, self._choice(), shared)

    def _choice(self) -> Choice | None:
        """What the newest micro-batch chose to save, or to run as unpatched: no other place reads that."""
        chooser = self.sites[0].chooser if self.sites else None
        return None if chooser is None else chooser.latest

    def watch(self, output: Any) -> None:
        """See when the backward of an unpatched forward's output begins: of the loss, where the forward has computed it."""

        @unserializable_hook
        def begun(grad: Tensor) -> None:
            self.in_backward(grad.device)

        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(begun)
                return

    def known(self) -> Step | None:
        """The last step, with what is known of it by now."""
        step = self.last
        if step is not None and step.unpatched and not step.over:  # its choice was noted when its forward had ended
            step.choice = self._choice()
        return step

    def in_backward(self, device: torch.device) -> None:
        """The backward of a layer begins, or of an unpatched forward."""
        step = self.last
        if step is None:
            self.apart = True
            return
        if device not in step.ooms:
            step.ooms[device] = allocator_count(device, "num_ooms")
        if not step.in_backward:
            self.known()
            step.in_backward = True
            for site in self.sites:
                site.advised = False
            Variable._execution_engine.queue_callback(_Ending(self, step))  # type: ignore[attr-defined]

    def settle(self) -> None:
        """The last step is over: count it, and log its line if it did something new."""
        step = self.last
        if step is None or step.over:
            return
        step.over = True
        self.unpatched += step.unpatched
        self.short += step.let_go is not None
        if self.offloader is not None:
            moved = dict(self.offloader.transfers.bytes)
            step.moved = {way: max(0.0, size - self._moved.get(way, 0.0)) for way, size in moved.items()}
            self._moved = moved
        if self.tell is None or not logger.isEnabledFor(logging.INFO):
            return
        chunks = {report.plan.size for report in step.reports if report.plan is not None and len(report.plan) > 1}
        saves, whole = getattr(step.choice, "layers", ()), frozenset(report.because for report in step.reports)
        # A log is told once of how steps ran, not of how large they were.
        how = step.unpatched, max(chunks, default=None), frozenset(saves), step.let_go, whole, step.shared is None
        if how in self._said:
            return
        self._said.add(how)
        try:
            record = self.tell()
        except Exception:  # it only reports, and backward is not over for who called it
            logger.warning("%s: the step's record could not be made", self.name, exc_info=True)
            return
        logger.info("%s: %s", self.name, "" if record is None else record.line)


class _Ending:
    """Called by autograd's engine when the backward of a step has ended; let go of, uncalled, where it broke off: then it
    says what to change if memory ran out and nobody has said so. [Note: bare errors]"""

    def __init__(self, steps: Steps, step: Step) -> None:
        self.steps, self.step, self.ended = steps, step, False

    def __call__(self) -> None:
        self.ended = True
        self.steps.settle()

    def __del__(self) -> None:
        sites, step = self.steps.sites, self.step
        if self.ended or any(site.advised for site in sites):
            return
        if any(allocator_count(device, "num_ooms") > count for device, count in step.ooms.items()):
            plan = max((r.plan for r in step.reports if r.plan is not None), key=len, default=None)
            warnings.warn(bare_advice(step.tokens, None if plan is None else (sites[0].config, plan)), stacklevel=1)
