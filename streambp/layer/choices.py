"""Discrete choices of a layer's forward: the experts that a router selects for a token.

[Note: choices] A router with nearly tied scores may send a token to different experts in two runs,
streamed or not. That token's output then differs completely, although streaming is exact. Runs with
different roundings are therefore compared with the same choices: the first run of each token
records its choices, and later runs replay them. The scores behind the choices must agree as well
(`squared_distances`), so that a layer with different choices for another reason than rounding is
found.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from streambp.chunks import Chunk

# torch's functions that return indices, and the position of their argument `dim`.
CHOICE_DIM_POSITIONS = {
    "topk": 2,
    "sort": 1,
    "argsort": 1,
    "argmax": 1,
    "argmin": 1,
    "max": 1,
    "min": 1,
}


class ReplayedChoices(TorchFunctionMode):
    """Torch function mode that records the experts chosen by a layer's routers for each token in
    the first run, and replays these choices in later runs. The runs of a test are then comparable.
    [Note: choices]

    Attributes:
        squared_distances: dict from a chunk's start position to a tensor [B, C]: the squared
            distance of each token's router scores in the latest run from the first run's scores.
            Distances are relative to the scores' spread, and summed over the layer's routers.
        differing: the number of tokens whose own choice in the latest run differed from the
            replayed one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded_choices: dict[
            Any, list[tuple[Any, ...]]
        ] = {}  # by call: (chunk stop, scores, choices)
        self._calls: Counter[Any] = Counter()
        self.squared_distances: dict[int, Tensor] = {}
        self.differing = 0

    @contextlib.contextmanager
    def replay(self, chunk: Chunk, rows: int) -> Iterator[None]:
        """Context manager for the layer's forward on one chunk. The first run of a chunk records
        the experts that the layer's routers choose; later runs replace the chosen experts by the
        recorded ones. A chunk at position 0 begins a new run: `squared_distances` and `differing`
        are reset.

        Args:
            chunk: the current chunk.
            rows: batch size.
        """
        if chunk.start == 0:
            self.squared_distances, self.differing = {}, 0
        self._chunk, self._tokens, self._calls = chunk, (rows, chunk.stop - chunk.start), Counter()
        with self:
            yield

    def rearrange(self, change: Callable[[Tensor], Tensor]) -> ReplayedChoices:
        """Return a copy of the recorded choices for a batch with the same tokens at other places. A
        test compares a run with one document in each row to a run with all documents in one packed
        row. The routers of the second run replay this copy.

        Args:
            change: moves the entries of a recorded tensor [B, T, ...] to their new rows and
                positions, [B', T', ...].
        """
        copied = ReplayedChoices()
        for call, records in self._recorded_choices.items():
            scores, choices = (
                change(torch.cat([of_chunk[index] for of_chunk in records], 1)) for index in (1, 2)
            )
            copied._recorded_choices[call] = [(scores.shape[1], scores, choices)]
        return copied

    def max_distance(self) -> float:
        """Return the largest distance, over all tokens, of a token's router scores in the latest
        run from the first run's scores; 0 if no choice was replayed. The distance is relative to
        the scores' spread. A test fails if the distance is larger than roundings explain."""
        return (
            max(
                (float(distances.max()) for distances in self.squared_distances.values()),
                default=0.0,
            )
            ** 0.5
        )

    def rms_distance(self) -> float:
        """Return the root mean square, over all tokens, of the distance of router scores in the
        latest run from the first run's scores; 0 if no choice was replayed. The distance is
        relative to the scores' spread. A test in half precision fails if the result is larger than
        roundings explain."""
        if self.squared_distances:
            return (
                float(
                    torch.cat(
                        [distances.flatten() for distances in self.squared_distances.values()]
                    ).mean()
                )
                ** 0.5
            )
        return 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if (
            name not in CHOICE_DIM_POSITIONS
            or not args
            or not isinstance(args[0], Tensor)
            or not args[0].is_floating_point()
        ):
            return result
        scores: Tensor = args[0]
        choices: Tensor = result if isinstance(result, Tensor) else result[1]
        dim = (
            args[CHOICE_DIM_POSITIONS[name]]
            if len(args) > CHOICE_DIM_POSITIONS[name]
            else (kwargs or {}).get("dim", -1)
        )
        flat = scores.shape[:1] == (math.prod(self._tokens),) and scores.shape[:2] != self._tokens
        one_each = choices.shape[: scores.dim() - 1] == scores.shape[:-1] and (
            flat or scores.shape[:2] == self._tokens
        )
        if (
            choices.is_floating_point()
            or dim not in (-1, scores.dim() - 1)
            or not one_each
            or scores.shape[-1] == 1
        ):
            return result
        # [B, C, ...] each
        router_scores, new_choices = (
            x.detach().unflatten(0, self._tokens) if flat else x.detach() for x in (scores, choices)
        )
        kind = name, router_scores.dim(), router_scores.shape[-1]
        call = *kind, self._calls[kind]
        records = self._recorded_choices.get(call, [])
        self._calls[kind] += 1
        if self._chunk.start == (records[-1][0] if records else 0):
            self._recorded_choices[call] = [
                *records,
                (self._chunk.stop, router_scores, new_choices),
            ]
            return result
        if not records:  # the first chunk has fewer choices: it starts without a state
            return result
        positions = slice(self._chunk.start, self._chunk.stop)
        first_scores, first_choices = (
            torch.cat([of_chunk[index] for of_chunk in records], 1)[:, positions]
            for index in (1, 2)
        )
        if first_scores.shape != router_scores.shape or first_choices.shape != new_choices.shape:
            return result
        self._note(first_scores, router_scores, first_choices, new_choices, name == "topk")
        handed = first_choices.reshape(choices.shape)
        if isinstance(result, Tensor):
            return handed
        if handed.dim() == scores.dim():
            return type(result)((scores.gather(-1, handed), handed))
        return type(result)((scores.gather(-1, handed[..., None]).squeeze(-1), handed))

    def _note(
        self,
        first_scores: Tensor,
        scores: Tensor,
        first_choices: Tensor,
        new_choices: Tensor,
        in_any_order: bool,
    ) -> None:
        """Add to `squared_distances` and `differing` how this run's scores and choices differ from
        the first run's. Called for each router call that replays choices.

        Args:
            first_scores: scores of the first run, [B, C, ..., n].
            scores: scores of this run, [B, C, ..., n].
            first_choices: choices of the first run, [B, C, ...].
            new_choices: choices of this run, [B, C, ...].
            in_any_order: True: the order of a token's choices does not matter, as for the indices
                of topk.
        """
        # a mask's -inf may be among them
        finite, eps = (first_scores.isfinite() & scores.isfinite(), torch.finfo(scores.dtype).eps)
        first_scores, scores = (
            torch.where(finite, x, 0.0).double().flatten(2) for x in (first_scores, scores)
        )
        spread = (first_scores - first_scores.mean(-1, keepdim=True)).square().sum(-1).mean()
        rounding = (16 * eps) ** 2 * first_scores.square().sum(
            -1
        ).mean()  # scores may be nearly all alike
        off = (first_scores - scores).square().sum(-1) / (spread + rounding).clamp(min=1e-300)
        start = self._chunk.start
        self.squared_distances[start] = (
            self.squared_distances[start] + off if start in self.squared_distances else off
        )
        both_choices = (x.reshape(*x.shape[:2], -1) for x in (first_choices, new_choices))
        first_choice, new_choice = (x.sort(-1).values if in_any_order else x for x in both_choices)
        self.differing += int((first_choice != new_choice).any(-1).sum())
