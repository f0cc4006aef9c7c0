"""Record each step of a patched model: which tensors its layers saved, how much memory was moved,
and where out-of-memory errors happened. `describe`, `last_step` and the log read these records.

A step is a micro-batch with gradients, and `Step` is its record. `Steps` creates the record at the
end of the backbone's forward, when all decisions before backward are taken. The start of a backward
and its end complete the record; an autograd engine callback reports the end. A line is logged if a
step ran in a way that was not logged before.

A record consists of references to existing objects, so it needs no counting and no synchronization.
`last_step.py` interprets the record on request. Evaluations between steps change no record.

Backward outside of streamed layers and of the head is torch's own: embeddings, norms, sums of
gradients, and every operation of a micro-batch that runs unpatched. No code of this package runs
when an error is raised there, so the error cannot carry advice. However, the engine then frees its
callbacks uncalled, and the callback's finalizer detects this. The advice is issued as a warning in
addition to the error, if torch's allocator counts more out-of-memory errors than at the start of
backward.
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

from streambp.device import allocator_count
from streambp.instance_forward import WeakSequence
from streambp.layer.layer_state import CallReport, LayerState
from streambp.layer.oom import advise_after_backward
from streambp.model.record import StepRecord
from streambp.offload.costs import MicroBatchChoice, SavesChoice, was_moved
from streambp.offload.manager import OffloadManager
from streambp.prefixes.calls import PackedRowSizes

logger = logging.getLogger(__name__)
Shape = tuple[int, int]


@dataclasses.dataclass
class Step:
    """Notes on one step: a micro-batch with gradients. `last_step` makes a `StepRecord` from the
    notes.

    Attributes:
        number: number of the micro-batch since `patch`, from 1.
        unpatched: True if the unpatched forward ran, without chunks.
        shapes: shape (B, T) of the tokens of each backbone, by the backbone's id().
        reports: report on each decoder layer's call; [] if the unpatched forward ran.
        choice: the choice of saves="auto" for the micro-batch: tensors to save, or a run of the
            unpatched forward. None if nothing was chosen.
        shared: sizes of the batch if common prefixes of its rows were computed once; None: no
            prefix was shared.
        moved_bytes: bytes copied since the previous step, by direction: `TO_HOST_QUEUE` or
            `FROM_HOST_QUEUE`.
        in_backward: True once backward has begun.
        over: True once backward has ended or the next step has begun.
        ooms: number of out-of-memory errors by device, as the device's allocator had counted before
            backward used the device.
    """

    number: int
    unpatched: bool
    shapes: dict[int, Shape]
    reports: list[CallReport] = dataclasses.field(default_factory=list)
    choice: MicroBatchChoice | None = None
    shared: PackedRowSizes | None = None
    moved_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_backward: bool = False
    over: bool = False
    ooms: dict[torch.device, int] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the micro-batch, over all rows."""
        return sum(rows * length for rows, length in self.shapes.values())

    @property
    def drop_reason(self) -> str | None:
        """Return the reason why saved tensors were freed before backward used them; None: none was
        freed."""
        return self.choice.drop_reason if isinstance(self.choice, SavesChoice) else None


class Steps:
    """Notes on the steps of one patched model. A step is a micro-batch with gradients.
    `streambp.last_step`, `describe` and the log read these notes.

    Args:
        offloader: moves saved tensors to the host; None without offloading.

    Attributes:
        layer_states: states of the model's decoder layers.
        tell: builds the record of the last step for the log; None: nothing is logged.
        name: the model's name in the log.
        last: notes on the last step; None before the first step.
        unpatched: number of steps that ran unpatched.
        short: number of steps that freed saved tensors before backward used them.
        bypasses_backbone: True if a layer's backward began before any step was noted, because
            another module than the backbone calls the layers.
    """

    def __init__(self, offloader: OffloadManager | None = None) -> None:
        self.offloader = offloader
        self.layer_states = WeakSequence[LayerState]()
        self.tell: Callable[[], StepRecord | None] | None = None
        self.name = ""
        self.last: Step | None = None
        self.unpatched = self.short = 0
        self.bypasses_backbone = False
        self._moved_bytes: Mapping[str, float] = {}
        self._logged: set[Hashable] = set()

    def __getstate__(self) -> Any:
        """Return the state for copy and pickle: (offloader, tell, name), without any step."""
        return self.offloader, self.tell, self.name

    def __setstate__(self, state: Any) -> None:
        offloader, tell, name = state
        Steps.__init__(self, offloader)
        self.tell = tell
        self.name = name

    @contextlib.contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Context manager for runs that are no training steps, such as a warm-up. Steps inside are
        neither counted nor logged, and the record of the last step is restored at the end."""
        previous = self.last, self.unpatched, self.short, self.tell
        self.tell = None
        try:
            yield
        finally:
            self.settle()
            self.last, self.unpatched, self.short, self.tell = previous

    def record_forward_end(
        self,
        backbone: int,
        tokens: Tensor | None,
        shared: PackedRowSizes | None,
        unpatched: bool = False,
    ) -> None:
        """Note that a backbone's forward with gradients has ended. A forward after the start of
        backward, or a second forward of the same backbone, begins a new step. Forwards of several
        backbones, for example of a vision tower, belong to one step.

        Args:
            backbone: id() of the backbone.
            tokens: input_ids [B, T], or inputs_embeds [B, T, h].
            shared: sizes of the batch if common prefixes of its rows were computed once; None: no
                prefix was shared.
            unpatched: True if the unpatched forward ran; False: layers ran chunk by chunk.
        """
        shape = (0, 0) if tokens is None else (tokens.shape[0], tokens.shape[1])
        shapes = {backbone: shape}
        number = 1
        last = self.last
        if last is not None:
            number = last.number + 1
            if last.over or last.in_backward or backbone in last.shapes:
                self.settle()
            else:  # another stack of the same forward
                number = last.number
                shapes = {**last.shapes, **shapes}
                if unpatched:  # records of saves of a streamed stack stay
                    self.last = dataclasses.replace(last, shapes=shapes)
                    return
        reports = (
            [] if unpatched else [layer_state.last_call.report for layer_state in self.layer_states]
        )
        self.last = Step(number, unpatched, shapes, reports, self._choice(), shared)

    def forget_since(self, last: Step | None) -> None:
        """Remove the notes on an unpatched forward whose result is discarded. The batch is then
        computed again in chunks, and noted again.

        Args:
            last: value of the attribute `last` before that forward.
        """
        self.last = last

    def _choice(self) -> MicroBatchChoice | None:
        """Return the choice that saves="auto" made for the newest micro-batch: the tensors to save,
        or a run of the unpatched forward. None if nothing was chosen."""
        chooser = self.layer_states[0].saves_policy if self.layer_states else None
        return None if chooser is None else chooser.latest

    def hook_backward(self, output: Any) -> None:
        """Register a tensor hook that notes the start of backward, on the output of a forward that
        ran unpatched. Layers that run in chunks note the start themselves.

        Args:
            output: the model's output. The hook is on its first tensor that requires a gradient:
                the loss, if there is one.
        """

        @unserializable_hook
        def begun(grad: Tensor) -> None:
            self.start_backward(grad.device)

        values = (
            output.values()
            if isinstance(output, Mapping)
            else output
            if isinstance(output, tuple)
            else (output,)
        )
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(begun)
                return

    def last_decided_step(self) -> Step | None:
        """Return the notes on the last step; None before the first step. Bring `choice` in the
        notes up to date for an unpatched step in progress, because its forward may end before the
        choice is stored."""
        step = self.last
        # forward may end before the choice
        if step is not None and step.unpatched and not step.over:
            step.choice = self._choice()
        return step

    def start_backward(self, device: torch.device) -> None:
        """Note that a backward has begun on `device`. Called by the backward of each layer, and by
        a hook if the forward ran unpatched. The first call in a step registers a callback for the
        end of backward."""
        step = self.last
        if step is None:
            self.bypasses_backbone = True
            return
        if device not in step.ooms:
            step.ooms[device] = allocator_count(device, "num_ooms")
        if not step.in_backward:
            self.last_decided_step()
            step.in_backward = True
            for layer_state in self.layer_states:
                layer_state.last_call.error_has_advice = False
            Variable._execution_engine.queue_callback(_BackwardEndCallback(self, step))  # type: ignore[attr-defined]

    def settle(self) -> None:
        """End the last step: mark the step as over, and update the counts of steps. Log a line if
        the step was computed in a way that was not logged before.

        Called when the step's backward ends, or otherwise when the next step begins.
        """
        step = self.last
        if step is None or step.over:
            return
        step.over = True
        self.unpatched += step.unpatched
        self.short += step.drop_reason is not None
        if self.offloader is not None:
            moved_bytes = dict(self.offloader.transfers.bytes)
            step.moved_bytes = {
                way: max(0.0, size - self._moved_bytes.get(way, 0.0))
                for way, size in moved_bytes.items()
            }
            self._moved_bytes = moved_bytes
        if self.tell is None or not logger.isEnabledFor(logging.INFO):
            return
        chunks = {
            report.plan.size
            for report in step.reports
            if report.plan is not None and len(report.plan) > 1
        }
        saves = getattr(step.choice, "layers", ())
        reasons = frozenset(report.reason for report in step.reports)
        # Log each way in which steps run once, whatever their size.
        how = (
            step.unpatched,
            max(chunks, default=None),
            frozenset(saves),
            step.drop_reason,
            reasons,
            step.shared is None,
        )
        if how in self._logged:
            return
        self._logged.add(how)
        try:
            record = self.tell()
        except Exception:  # a failed report must not end the user's backward
            logger.warning("%s: the step's record could not be made", self.name, exc_info=True)
            return
        logger.info("%s: %s", self.name, "" if record is None else record.line)


class _BackwardEndCallback:
    """Callback of autograd's engine that ends the notes on a step when the step's backward ends.

    If backward raises, the engine frees the callback without calling it, which is detected here by
    `__del__`. If memory ran out and the error itself has no advice on memory, a warning gives the
    advice.
    """

    ended = True  # until __init__ has run, for __del__

    def __init__(self, steps: Steps, step: Step) -> None:
        self.steps = steps
        self.step = step
        self.ended = False

    def __call__(self) -> None:
        self.ended = True
        self.steps.settle()

    def __del__(self) -> None:
        if self.ended:
            return
        layer_states = self.steps.layer_states
        step = self.step
        if any(layer_state.last_call.error_has_advice for layer_state in layer_states):
            return
        if any(allocator_count(device, "num_ooms") > count for device, count in step.ooms.items()):
            plan = max((r.plan for r in step.reports if r.plan is not None), key=len, default=None)
            warnings.warn(
                advise_after_backward(
                    step.tokens,
                    None
                    if plan is None
                    else (layer_states[0].config, plan, was_moved(step.choice)),
                ),
                stacklevel=1,
            )
