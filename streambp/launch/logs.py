"""What each step did, in a Trainer's logs: on its console, in its history, and in whatever its logs are reported to."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from streambp.errors import StreamBPError
from streambp.model.last_step import last_step
from streambp.model.record import StepRecord

logger = logging.getLogger(__name__)
LOSS = "loss"  # what the logs of training have, and those of evaluations have not


class StreamCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Adds numbers of the last step (`last_step(model)`) to the logs of a Trainer whose model is patched.

    They are `stream_tokens`, `stream_chunks`, `stream_chunk_size`, `stream_kept_gib`, `stream_free_gib`, `stream_peak_gib`,
    `stream_host_gib`, `stream_shared_tokens` and `stream_whole_layers`, each where it is known; and since the log before,
    `stream_unpatched` (the share of micro-batches that ran as unpatched), `stream_let_go` (how many let go of saved
    tensors) and `stream_stall_s` (seconds that compute waited for copies). Nothing else of the logs changes, and nothing
    is raised.

    `StreamCallback.add_to(trainer)` gives it to a Trainer; Stream trainers and `streambp launch` have it already. A Trainer
    calls wandb's, trackio's and TensorBoard's callbacks before those of its user: what is passed among `callbacks` adds to
    the history and the console alone.
    """

    def __init__(self) -> None:
        self._before: StepRecord | None = None

    @classmethod
    def add_to(cls, trainer: Any) -> None:
        """Put it in the first place of a Trainer's callbacks, before those that report logs; one that is there, or a new
        one."""
        handler = getattr(trainer, "callback_handler", None)  # a stand-in of a trainer may have none
        if handler is not None:
            ours = [callback for callback in handler.callbacks if isinstance(callback, StreamCallback)]
            others = [callback for callback in handler.callbacks if not isinstance(callback, StreamCallback)]
            handler.callbacks[:] = [*(ours or [cls()]), *others]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Steps before training are not told of."""
        self._before = _last_step(kwargs.get("model"))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Adds to the logs of training, and to their copy in the Trainer's history."""
        try:
            if not isinstance(logs, dict) or LOSS not in logs:
                return
            record, before = _last_step(model), self._before
            if record is None or (before is not None and record.number == before.number):
                return
            self._before = record
            counts = zip(_counts(record), _counts(before), strict=True)
            steps, unpatched, short, stalls = (now - then for now, then in counts)
            found = {**record.numbers(), "stream_unpatched": unpatched / max(1.0, steps), "stream_let_go": short}
            if record.host is not None:
                found["stream_stall_s"] = stalls
            history = state.log_history[-1] if state.log_history else {}
            same = all(history.get(name) == value for name, value in logs.items())
            for entry in (logs, history) if same else (logs,):
                entry.update({name: value for name, value in found.items() if name not in entry})
        except Exception:  # it only reports
            logger.warning("The numbers of the last step could not be added to the logs.", exc_info=True)


def _last_step(model: Any) -> StepRecord | None:
    """None for a model that is not patched, too."""
    try:
        return None if model is None else last_step(model)
    except StreamBPError:
        return None


def _counts(record: StepRecord | None) -> tuple[float, float, float, float]:
    """Steps so far, those that ran as unpatched, those that let go of saved tensors; seconds of stalls."""
    if record is None:
        return 0.0, 0.0, 0.0, 0.0
    stalls = 0.0 if record.host is None else record.host.stalls
    return float(record.number), float(record.unpatched_steps), float(record.short_steps), stalls
