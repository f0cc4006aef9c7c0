"""Predict steps that move saved tensors to the host, and decide in each micro-batch if they are
faster.

[Note: host by seconds] The default is `offload="if_faster"`: a micro-batch moves saved tensors to
the host if it is then faster by prediction. Two predictions are compared: the fastest step that
keeps all tensors on the device ([Note: saves that fit]), and the fastest step that moves them. The
second prediction has one choice over host and device ([Note: two rooms]), from counted bytes and
FLOPs, the free memory of both, and the speed of the link. The link's speed is measured from the
first copies on.

Host memory must be pinned once before its first use, which takes seconds. Nobody knows how many
steps will follow. Therefore micro-batches stay on the device until the seconds that moving would
have spared add up to the price of pinning. The decision costs at most that price, whenever training
ends. A micro-batch that does not fit on the device, by its prediction, moves at once.

The policy pins at most half of the available host memory, unless `host_memory` allows more. The
program has not asked for offloading. The ranks of a machine share the half.

Nothing moves on a CPU, on a device of unknown memory, in sequences that ranks share, in models on
several devices, and beside weights in host memory. Each rank decides alone, because moved tensors
change no collective operation. Nothing moves either if two forwards may have to draw the same
dropout masks, as in GradCache, because chunk sizes may depend on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from streambp.device import run_and_watch_draws
from streambp.offload.costs import (
    BatchSaves,
    HostStepFigures,
    LayerCost,
    host_exclusions,
    inputs_and_candidates,
)
from streambp.offload.free_memory import UNLIMITED_BYTES
from streambp.offload.link import USABLE_FREE_FRACTION
from streambp.offload.manager import OffloadManager
from streambp.offload.placement import (
    COPY_GROUPS_IN_FLIGHT,
    Headroom,
    Placement,
    choose_placement,
    room_beside_copies,
)

ROUNDING = 1e-9  # relative error of sums of bytes
PINNING_SECONDS_PER_BYTE = 0.5 / 2**30  # seconds for each byte of host memory
MIN_RELATIVE_GAIN = 0.002  # fraction of a step's seconds below which nothing moves
HEADROOM_STEPS = (
    64  # the bytes of all layers' inputs, divided by the unit to which rooms are rounded
)
COUNTING_SECONDS = 5.0  # seconds of counting a step that moves
HOST_ALLOCATION_FACTOR = 1.01  # allocated host memory of a micro-batch, relative to its bytes
MAX_CACHED_PREDICTIONS = 64  # maximal number of cached predictions
T = TypeVar("T")


class MicroBatchShape(NamedTuple):
    """Size of a micro-batch.

    Attributes:
        tokens: tokens over all rows.
        length: tokens of each row.
        chunk: tokens of a chunk over all rows.
    """

    tokens: int
    length: int
    chunk: int


@dataclasses.dataclass
class ForwardState:
    """State of the policy for the running forward.

    Attributes:
        is_begun: True after the backbone has announced the forward (`SavesPolicy.begin_forward`),
            until the first layer asks for a chunk size. The layer then does not announce the
            forward again.
        chunk_sizes: dict from (rows, tokens of each row) to a chunk's positions in each row.
        host_shape: size of the micro-batch for which the policy has decided whether tensors move to
            the host; None: it has not decided.
        batch: tensors that the layers save in the running micro-batch.
    """

    is_begun: bool = False
    chunk_sizes: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    host_shape: MicroBatchShape | None = None
    batch: BatchSaves = dataclasses.field(default_factory=BatchSaves)


class StepSpeeds(NamedTuple):
    """Predicted seconds of the parts of a training step on one device, and the speeds that the
    predictions use.

    Attributes:
        forward: seconds of forward's kernels.
        backward: seconds of backward.
        total: seconds of the step, if layers save nothing but their inputs.
        products: FLOP/s of matrix products.
        attention: FLOP/s of attention's forward.
        link: bytes/s to the host.
    """

    forward: float
    backward: float
    total: float
    products: float
    attention: float
    link: float


@dataclasses.dataclass(frozen=True)
class MovingStep:
    """Prediction for a step that moves layer inputs and saved tensors to the host.

    Attributes:
        shape: size of the micro-batch.
        fits: True if the step fits on the device and on the host.
        placement: the saved tensors, and where they are.
        free_bytes: bytes of the device that stay free in a step whose layers save only their
            inputs, on the host.
        headroom: bytes of the device for saved tensors.
        host: bytes of host memory for saved tensors.
        copies: bytes of the device for copies that are under way.
        leaving: bytes that leave for the host.
        seconds: seconds of the step.
        pace: speed of the step's parts (forward, backward, products, attention, copies).
    """

    shape: MicroBatchShape
    fits: bool
    placement: Placement
    free_bytes: float
    headroom: float
    host: float
    copies: float
    leaving: float
    seconds: float
    pace: StepSpeeds


def predicted_move(
    costs: Mapping[int, LayerCost],
    shape: MicroBatchShape,
    free_bytes: float,
    host: float,
    pace: StepSpeeds,
) -> MovingStep:
    """Return the prediction for a step that moves layer inputs and saved tensors to the host.

    Args:
        costs: bytes and FLOPs of the tensors that each layer may save.
        shape: size of the micro-batch.
        free_bytes: bytes of the device that stay free in a step whose layers save only their
            inputs, on the host. Negative: the step does not fit.
        host: bytes of host memory for saved tensors.
        pace: speed of the step's parts.
    """
    chunk_fraction = shape.chunk / shape.tokens
    inputs, candidates = inputs_and_candidates(
        costs, shape.tokens, shape.length, is_unchunked=shape.chunk >= shape.tokens
    )
    hidden = pace.forward * pace.link / len(costs)  # bytes that one layer's forward hides
    attending = 0.0
    copying = 0.0
    for cost in costs.values():
        scaled = cost.scaled_to(shape.tokens)
        attending += scaled.attention_flops * shape.length / cost.length / pace.attention
        copying += scaled.attn_out / pace.link
    headroom = room_beside_copies(
        Headroom(
            host, hidden, USABLE_FREE_FRACTION * free_bytes, host_exclusions(attending, copying)
        ),
        inputs,
        candidates,
        chunk_fraction,
    )
    placement = choose_placement(inputs, candidates, headroom)
    leaving = sum(placement.leaving.values())
    spared = placement.spared / pace.products
    waits = max(0.0, leaving / pace.link - (pace.backward - spared))
    copied_saves = max(0.0, placement.largest_leaving - max(inputs.values()))
    copies = COPY_GROUPS_IN_FLIGHT * chunk_fraction * copied_saves
    fits = free_bytes >= 0 and leaving <= host
    fits = fits and placement.on_device + copies <= free_bytes * (1 + ROUNDING)
    spent = pace.total - spared + waits
    return MovingStep(
        shape, fits, placement, free_bytes, headroom.device, host, copies, leaving, spent, pace
    )


class HostChoice:
    """Decides in each micro-batch if saved tensors move to the host. Host memory must be pinned
    first, which takes seconds. Tensors move once the seconds that moving spares add up to the
    seconds of pinning. [Note: host by seconds]

    Args:
        manager: moves the tensors.
        price: seconds of pinning, for each byte of host memory.

    Attributes:
        saved_up_seconds: seconds that moving would have spared in all micro-batches since tensors
            moved last.
        allowed: False while sequences are split over ranks; saved tensors then stay on the device.
        drew: True if a forward without gradients has drawn random numbers; saved tensors then stay
            on the device.
        gain: seconds that moving spares in the last micro-batch, by prediction; 0 if nothing would
            be spared.
        waited: seconds that moving may have spared, at most, in the micro-batches so far. The first
            prediction of a moving step takes seconds, and is made once `waited` is large enough.
        unpaid_seconds: seconds of pinning beyond `saved_up_seconds` and `gain`, if the last
            micro-batch did not move for this reason; 0 otherwise.
    """

    def __init__(self, manager: OffloadManager, price: float = PINNING_SECONDS_PER_BYTE) -> None:
        self.manager = manager
        self.price = price
        self.saved_up_seconds = 0.0
        self.allowed = True
        self.drew = False
        self.gain = 0.0
        self.unpaid_seconds = 0.0
        self.waited = 0.0
        self._unsaved = 0.0
        self._predictions: dict[tuple[MicroBatchShape, float, float, float, int], MovingStep] = {}
        self._figures: HostStepFigures | None = None

    def __reduce__(self) -> tuple[type[HostChoice], tuple[OffloadManager, float]]:
        """Return the class and arguments of a copy without predictions, for copy and pickle."""
        return HostChoice, (self.manager, self.price)

    def reset(self) -> None:
        """Set the numbers of the last decision to 0, before the decision about the next
        micro-batch. The numbers are `gain`, the seconds that moving spares, and `unpaid_seconds`,
        the seconds of pinning that were not yet spared."""
        self.gain = 0.0
        self.unpaid_seconds = 0.0
        self._unsaved = 0.0

    def watch_draws(self, run: Callable[[], T], device: torch.device) -> T:
        """Return `run()`, and record in `drew` if it drew random numbers.

        Args:
            run: a forward without gradients.
            device: device of the forward.
        """
        if self.drew:
            return run()
        result, self.drew = run_and_watch_draws(run, device)
        return result

    def must_draw_alike(self) -> bool:
        """True if the running forward and another forward of the same batch may have to draw the
        same random numbers. This is so in GradCache and in a checkpoint. A step that moves tensors
        to the host may have other chunk sizes, and then draws other numbers. Saved tensors of such
        forwards must therefore stay on the device."""
        return (
            self.drew
            or not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1
            or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        )

    def host_headroom(self, figures: HostStepFigures) -> float:
        """Return the bytes of host memory that are left for saved tensors of a new micro-batch. 0
        if host memory cannot be pinned.

        The method also stores `figures.set_aside` in the manager: the bytes of host memory that a
        training engine (DeepSpeed) will allocate. The manager's limit on host memory leaves these
        bytes free. The limit is fixed when the manager first moves tensors.

        Args:
            figures: predictions about steps that move layer inputs; only `set_aside` is read.
        """
        self.manager.other_use.set_aside = figures.set_aside
        return self.manager.host_room()

    def predict(
        self,
        figures: HostStepFigures,
        costs: Mapping[int, LayerCost],
        shape: MicroBatchShape,
        free_bytes: float,
        host: float,
    ) -> MovingStep:
        """Return the prediction for a step that moves tensors. Predictions are cached by rounded
        values of the arguments.

        Args:
            figures: predictions about steps that move layer inputs.
            costs: bytes and FLOPs of the tensors that each layer may save.
            shape: size of the micro-batch.
            free_bytes: bytes of the device that stay free in a step whose layers save only their
                inputs, on the host.
            host: bytes of host memory that the micro-batch can take.
        """
        if figures is not self._figures or len(self._predictions) >= MAX_CACHED_PREDICTIONS:
            self._predictions.clear()
            self._figures = figures
        unit = sum(cost.scaled_to(shape.tokens).x for cost in costs.values()) / HEADROOM_STEPS
        if unit > 0:  # a few different rooms need few choices
            free_bytes = math.floor(free_bytes / unit) * unit
        if unit > 0 and host != math.inf:
            host = math.floor(host / unit) * unit
        measured = self.manager.link_rate()
        if measured is None:
            link = figures.link
        else:
            link = float(f"{measured:.2g}")  # equal in most steps, for the cache
        observations = sum(cost.tokens + cost.situations for cost in costs.values())
        key = shape, free_bytes, host, link, observations
        if key not in self._predictions:
            parts = figures.seconds(shape.tokens, shape.chunk)
            pace = StepSpeeds(*parts, figures.products, figures.attention, link)
            self._predictions[key] = predicted_move(costs, shape, free_bytes, host, pace)
        return self._predictions[key]

    def is_worth_counting(self, unsaved: float, seconds: float) -> bool:
        """True if steps that move tensors must be predicted. The first prediction takes seconds, in
        which bytes and FLOPs of such a step are counted. Small gains, or gains in a few
        micro-batches only, do not justify these seconds.

        Args:
            unsaved: seconds of recomputation that moving may spare at most.
            seconds: seconds of the micro-batch that does not move; infinity if it does not fit.
        """
        self._unsaved = unsaved
        if unsaved <= MIN_RELATIVE_GAIN * seconds and math.isfinite(seconds):
            self._unsaved = 0.0
            return False
        counted = self._figures is not None or self.price == 0
        return counted or math.isinf(seconds) or self.waited + unsaved >= COUNTING_SECONDS

    def is_worth_moving(self, step: MovingStep, seconds: float) -> bool:
        """True if a micro-batch must move: tensors leave, it is faster by more than a small
        fraction, and its host memory is pinned or pays for pinning. [Note: host by seconds]

        Args:
            step: the prediction for the micro-batch that moves.
            seconds: seconds of the micro-batch that does not move; infinity if it does not fit.
        """
        if not step.fits or not step.leaving:
            return False
        if not step.seconds < (1 - MIN_RELATIVE_GAIN) * seconds:
            return False
        self.gain = seconds - step.seconds
        price = self.price * max(0.0, step.leaving - self.manager.pinned)
        self.unpaid_seconds = max(0.0, price - self.saved_up_seconds - self.gain)
        return self.unpaid_seconds == 0

    def begin_micro_batch(self, step: MovingStep | None) -> None:
        """Record that a micro-batch begins. If the micro-batch does not move, the seconds that
        moving would have spared are added to `saved_up_seconds`. Otherwise `saved_up_seconds`
        becomes 0.

        Args:
            step: the prediction by which the micro-batch moves; None: the micro-batch does not
                move.
        """
        if step is None:
            self.saved_up_seconds += self.gain if math.isfinite(self.gain) else 0.0
            self.waited += self._unsaved
        else:
            self.saved_up_seconds = 0.0

    def prepare(self, step: MovingStep) -> None:
        """Set in the manager which of a micro-batch's saved tensors stay on the device and which
        move, and how much host memory to allocate at once.

        Args:
            step: the prediction for the micro-batch.
        """
        self.manager.staying = step.placement.staying
        self.manager.gpu_memory = UNLIMITED_BYTES  # `staying` decides
        self.manager.reserve = int(HOST_ALLOCATION_FACTOR * step.leaving)
