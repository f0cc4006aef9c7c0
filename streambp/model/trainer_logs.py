"""Numbers of each step in a Trainer's logs: console, history, and reporting integrations."""

from __future__ import annotations

import logging
import sys
from typing import Any

from transformers import TrainerCallback

from streambp.errors import StreamBPError
from streambp.model.last_step import last_step
from streambp.model.record import StepRecord

logger = logging.getLogger(__name__)
LOSS_KEY = "loss"  # present in training logs, absent from evaluation logs


class StreamCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Trainer callback that adds numbers of the last step (`last_step(model)`) to the training
    logs.

    The callback adds the following keys. The last three cover the steps since the previous log.

        stream_tokens           tokens over all rows
        stream_chunks           number of chunks
        stream_chunk_size       tokens of each row in one chunk
        stream_kept_gib         saved tensors, 0 if they were freed before backward used them
        stream_free_gib         device memory that a step without saved tensors leaves free
        stream_peak_gib         peak of the allocator's device memory so far
        stream_host_gib         tensors moved to host memory
        stream_shared_tokens    computed tokens of rows with common prefixes
        stream_whole_layers     layers that ran unchunked, under gradient checkpointing
        stream_unpatched        fraction of micro-batches that ran unpatched
        stream_let_go           micro-batches that freed saved tensors before backward used them
        stream_stall_s          seconds that compute waited for copies

    A key is absent if its value is unknown. Other log entries stay the same, and no exception is
    raised. Models that are not patched add nothing.

    Each Trainer that is made after `streambp.patch` has a `StreamCallback`. If the model is patched
    after its Trainer is made, call `StreamCallback.add_to(trainer)`. A second `StreamCallback` of
    the same Trainer, passed in `callbacks`, adds nothing.
    """

    def __init__(self) -> None:
        self._previous: StepRecord | None = None
        log_in_new_trainers()

    @classmethod
    def add_to(cls, trainer: Any) -> None:
        """Make a `StreamCallback` the first of a Trainer's callbacks. Callbacks that report the
        logs come later, so their reports include its numbers.

        An existing `StreamCallback` is moved; otherwise a new one is added.
        """
        handler = getattr(trainer, "callback_handler", None)  # a mock trainer may have none
        if handler is not None:
            stream_callbacks = []
            for callback in handler.callbacks:
                if isinstance(callback, StreamCallback):
                    stream_callbacks.append(callback)
            other_callbacks = []
            for callback in handler.callbacks:
                if not isinstance(callback, StreamCallback):
                    other_callbacks.append(callback)
            handler.callbacks[:] = [*(stream_callbacks or [cls()]), *other_callbacks]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start counting steps anew, so that the logs count no step before this training."""
        self._previous = _last_step(kwargs.get("model"))

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the numbers of the last step to `logs`, and to the copy of `logs` in the Trainer's
        history. Logs without a training loss are left unchanged.

        Args:
            args, control, kwargs: further arguments of `TrainerCallback.on_log`, which are not
                used.
            state: the Trainer's state, with the history of logs.
            logs: the log entries by name; changed in place.
            model: the Trainer's model.
        """
        try:
            if not isinstance(logs, dict) or LOSS_KEY not in logs:
                return
            record = _last_step(model)
            previous = self._previous
            if record is None or (previous is not None and record.number == previous.number):
                return
            self._previous = record
            counts = zip(_counts(record), _counts(previous), strict=True)
            steps, unpatched, short, stalls = (current - old_count for current, old_count in counts)
            values = {
                **record.numbers(),
                "stream_unpatched": unpatched / max(1.0, steps),
                "stream_let_go": short,
            }
            if record.host is not None:
                values["stream_stall_s"] = stalls
            history = state.log_history[-1] if state.log_history else {}
            holds_logs = all(history.get(name) == value for name, value in logs.items())
            for entry in (logs, history) if holds_logs else (logs,):
                entry.update({name: value for name, value in values.items() if name not in entry})
        except Exception:  # a report must not end training
            logger.warning(
                "The numbers of the last step could not be added to the logs.", exc_info=True
            )


class DefaultStreamCallback(StreamCallback):
    """The `StreamCallback` that each new Trainer adds by default.

    A Trainer warns if two of its callbacks have the same class. This subclass prevents the warning
    if a user passes a `StreamCallback` too.
    """


def log_in_new_trainers() -> None:
    """Add `DefaultStreamCallback` to transformers' default callbacks, so that every new Trainer
    logs the numbers of a patched model's steps.

    A Trainer calls its callbacks in order: the default callbacks, then those of wandb, trackio and
    TensorBoard, then the user's. Only a default callback can add numbers that all others report.
    """
    # Without the module no Trainer has been imported, and importing it takes a second.
    trainer = sys.modules.get("transformers.trainer")
    defaults = getattr(trainer, "DEFAULT_CALLBACKS", None)
    if isinstance(defaults, list) and DefaultStreamCallback not in defaults:
        defaults.append(DefaultStreamCallback)


def _last_step(model: Any) -> StepRecord | None:
    """Return the record of a model's last step; None if the model is None or not patched, or has
    run no step."""
    try:
        return None if model is None else last_step(model)
    except StreamBPError:
        return None


def _counts(record: StepRecord | None) -> tuple[float, float, float, float]:
    """Return four totals since `patch`: all steps, unpatched steps, steps that freed saved tensors
    early, and seconds for which compute waited for copies. The log entries are differences of two
    such results.

    Args:
        record: record of the last step; None: all totals are 0.
    """
    if record is None:
        return 0.0, 0.0, 0.0, 0.0
    stalls = 0.0 if record.host is None else record.host.stalls
    return float(record.number), float(record.unpatched_steps), float(record.short_steps), stalls
