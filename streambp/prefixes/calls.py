"""A backbone's call, over the packed row of its batch where that is exact and saves something; else over the rows.

[Note: a look] Nobody has asked for the look at a batch: it is the default. So whatever it raises, over arguments that the
model itself may well take, is a reason to compute rows, and ends no step. `describe` has it. A trial is no look where
ranks make it together: in the middle of a forward nothing but an error ends it.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.insides import why_rows
from streambp.device import is_out_of_memory
from streambp.distributed.agreement import everyones_numbers, must_agree
from streambp.errors import StreamBPError, UnsharedError
from streambp.known_names import EMBEDS, LABELS, PER_TOKEN, SHARED_INPUTS
from streambp.layer.site import LayerSite
from streambp.prefixes.admission import Over, Trials, draws_noise, why_not
from streambp.prefixes.arguments import known_by, packed
from streambp.prefixes.late import Again, LateRows
from streambp.prefixes.spread import spread_all
from streambp.prefixes.tree import A_CHUNK, NOTHING, Tree, find_tree

IGNORED = -100  # a label that is none
Unseen = Callable[[], bool] | None  # whether the values of padding go to nobody; None: they go to the caller
AS_UNPATCHED = "a packed row would not save a tenth of the last call's tokens, and it ran unpatched"
ONE_ROW = "the last call has one row or none"
PADDING_IS_SEEN = (
    "the last call's caller gets values at padding, which a packed row has not (hidden states, logits or router logits), "
    "or code of its own may read them (a hook, a head, a forward, a loss); with rows='packed' they are another token's"
)
PADDING_IS_READ = (
    "the program has read logits at padding, which a packed row has not; with rows='packed' they are another token's"
)
NOISE_IS_SEEN = (
    "dropout or jitter would draw the same noise for tokens that rows have in common; with rows='packed' it does, and they "
    "are computed once"
)
UNREMARKABLE = (AS_UNPATCHED, ONE_ROW, NOTHING)  # with the default, whose user asked for nothing


@dataclasses.dataclass(frozen=True)
class Shared:
    """So many rows of a call with so many tokens and so much padding were computed as fewer tokens."""

    rows: int
    tokens_of_rows: int
    padding: int
    tokens: int


class SharedPrefixes:
    """How a backbone's calls pack their rows.

    Args:
        rows: as `StreamConfig` has it, "packed" or "auto".

    last: what became of the last call's rows, or why each of them was computed; None before the first call.
    """

    def __init__(self, module: nn.Module, rows: str) -> None:
        self.rows = rows
        self.trials = Trials(module)
        self.module = module
        self.last: Shared | str | None = None
        self._looked: tuple[list[tuple[Tensor, int | None]], Tree | str] | None = None
        self._reads_padding: set[tuple[bool, bool]] = set()  # kinds of calls whose callers have done so

    def call(
        self,
        kwargs: Mapping[str, Any],
        over: Over,
        sites: Callable[[], list[LayerSite]],
        labels: tuple[Any, Any] = (None, None),
        documents: bool = False,
        padding_unseen: Unseen = None,
        again: Again | None = None,
    ) -> Any:
        """What the backbone returns for its arguments, for rows [B, T].

        Args:
            over: its forward, over rows or over a tree.
            sites: its layers.
            labels: of the language model around it, as `known_names.LABELS` has them.
            documents: that model's position_ids mark several in a row.
            padding_unseen: whether nothing of what padding is given goes to the model's caller; asked where
                there is padding.
            again: the forward over rows after this call, which the head may ask for.

        Raises:
            StreamBPError: only when the model ran was it found that it cannot share, and there are other ranks.
        """
        tree = self._find(kwargs, over, sites, labels, padding_unseen)
        tree = "position_ids mark documents in packed rows" if documents and isinstance(tree, Tree) else tree
        if isinstance(tree, Tree):
            late = None if again is None else self._late(again, tree, labels)
            try:
                output = over(packed(kwargs, tree, self.trials.takes_positions), tree)
                compute = None if late is None else late.of(output)
                output = spread_all(output, tree, late=compute)
            except Exception as error:  # a hook of this call alone may want the rows (peft's adapter_names)
                if is_out_of_memory(error):
                    raise
                if must_agree(self.module):  # for whose weights the others would have to be there once more
                    raise StreamBPError(
                        f"This batch cannot be computed as a packed row: {error}. That was found while the model ran, "
                        "where other ranks wait for this one. Set StreamConfig(rows='as_given')."
                    ) from error
                known = isinstance(error, UnsharedError)
                tree = str(error) if known else f"their packed row failed ({type(error).__name__}: {error})"
                self.trials.verdicts = dict.fromkeys(self.trials.verdicts, (tree, tree))  # all kinds compute rows now
            else:
                padding = len(tree.rows) * tree.width - tree.tokens_of_rows
                self.last = Shared(len(tree.rows), tree.tokens_of_rows, padding, tree.tokens)
                return output
        self.last = tree
        return over(kwargs, None)

    def _late(self, again: Again, tree: Tree, labels: tuple[Any, Any]) -> LateRows | None:
        """What computes rows if padding is read; None where there is none, or the caller has asked for a packed row."""
        if self.rows != "auto" or not any(tree.padding()) or must_agree(self.module):
            return None

        caller = self._caller(labels)

        def told() -> None:
            self._reads_padding.add(caller)
            self.last = PADDING_IS_READ

        return LateRows(self.module, again, tree, told)

    def _caller(self, labels: tuple[Any, Any]) -> tuple[bool, bool]:
        """Tells a program's calls apart: in training, and with labels."""
        return self.module.training, any(value is not None for value in labels)

    def saves(
        self,
        kwargs: Mapping[str, Any],
        sites: list[LayerSite],
        labels: tuple[Any, Any],
        padding_unseen: Unseen,
    ) -> bool:
        """Whether a call would be computed as a packed row, or would have to be tried for that; arguments as of `call`."""
        return isinstance(self._wanted(kwargs, lambda: sites, labels, padding_unseen)[0], Tree)

    def _find(
        self,
        kwargs: Mapping[str, Any],
        over: Over,
        sites: Callable[[], list[LayerSite]],
        labels: tuple[Any, Any],
        padding_unseen: Unseen,
    ) -> Tree | str:
        together = must_agree(self.module)
        tree, may_try = self._wanted(kwargs, sites, labels, padding_unseen, together)
        self._looked = None
        wants = isinstance(tree, Tree) and not self.trials.knows(kwargs)
        if together and self._agreed(kwargs, may_try, wants):
            self.trials.make(kwargs, over, sites(), _apart(sites()), together)
        elif together and wants:
            return "ranks are to try a kind of call together, and this one is not that of all of them (a mask on some)"
        elif wants:
            try:
                self.trials.make(kwargs, over, sites(), _apart(sites()), together)
                return self._tried(kwargs, tree)  # type: ignore[arg-type]
            except Exception as error:
                reason = f"a trial on a few random tokens failed ({type(error).__name__}: {error})"
                if not is_out_of_memory(error):  # that says nothing of the model
                    self.trials.verdicts[self.trials.kind_of(kwargs)] = reason, reason
                return reason
        return self._tried(kwargs, tree) if isinstance(tree, Tree) else tree

    def _wanted(
        self,
        kwargs: Mapping[str, Any],
        sites: Callable[[], list[LayerSite]],
        labels: tuple[Any, Any],
        padding_unseen: Unseen,
        together: bool = False,
    ) -> tuple[Tree | str, bool]:
        """The packed row that a call may have, if its kind was tried or is yet to be, or why its rows are computed; and
        whether its kind may be tried. Nothing is computed, and whatever is raised is a reason. [Note: a look]"""
        may_try = False
        try:
            if not together and self._is_one_row(kwargs):
                return ONE_ROW, False
            layers = sites()
            reason = self._why_not(kwargs, layers)
            if reason is not None:
                return reason, False
            self.trials.kind_of(kwargs)
            may_try = True
            tree = self._look(kwargs, layers, labels, padding_unseen)
            if isinstance(tree, Tree) and self.trials.knows(kwargs):
                tree = self._tried(kwargs, tree)
            return tree, may_try
        except Exception as error:
            return f"the look at the last call's rows failed ({type(error).__name__}: {error})", may_try

    @staticmethod
    def _is_one_row(kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has nothing to save, which takes no look at the device."""
        ids, mask, _ = map(kwargs.get, SHARED_INPUTS)
        return mask is None and isinstance(ids, Tensor) and ids.shape[0] < 2

    def _why_not(self, kwargs: Mapping[str, Any], sites: list[LayerSite]) -> str | None:
        reason = why_not(self.module, kwargs, sites, self.trials.takes_positions)
        return why_rows(self.module) if reason is None else reason  # before a trial, whose tokens hooks would see

    def _look(
        self,
        kwargs: Mapping[str, Any],
        sites: list[LayerSite],
        labels: tuple[Any, Any],
        padding_unseen: Unseen,
    ) -> Tree | str:
        """The packed row of a call that may have one; or why its rows are computed. The tensors of one call are looked at
        once."""
        _, mask, positions = (kwargs.get(name) for name in SHARED_INPUTS)
        if self.trials.knows(kwargs):
            plain, padded = self.trials.verdicts[self.trials.kind_of(kwargs)]
            if plain is not None and padded is not None:
                return plain
        outer = zip(labels, LABELS, strict=True)  # of the language model around the backbone, or else the backbone's own
        plain, shifted = (value if value is not None else kwargs.get(name) for value, name in outer)
        said = (kwargs.get(name) for name in (*SHARED_INPUTS, EMBEDS, *PER_TOKEN))
        given = [x for x in (*said, plain, shifted) if isinstance(x, Tensor)]
        key = [(x, None if x.is_inference() else x._version) for x in given]
        before = [] if self._looked is None else self._looked[0]
        same = len(before) == len(key) and all(x is y and i == j for (x, i), (y, j) in zip(before, key, strict=True))
        if self._looked is None or not same:
            ids = known_by(kwargs)
            scored = _labelled(plain, shifted, ids)
            look = functools.partial(find_tree, ids, mask, positions, scored, apart=_apart(sites), a_chunk=_a_chunk(sites))
            found = look()
            shares = isinstance(found, Tree) and found.tokens < found.tokens_of_rows
            if shares and self.rows == "auto" and draws_noise(self.module):
                found = look(least=ids.shape[1] + 1)  # padding alone is left out
                found = found if isinstance(found, Tree) else NOISE_IS_SEEN
            self._looked = key, found
        tree = self._looked[1]
        if self.rows == "auto" and isinstance(tree, Tree) and any(tree.padding()):
            if self._caller(labels) in self._reads_padding:
                return PADDING_IS_READ
            return tree if padding_unseen is not None and padding_unseen() else PADDING_IS_SEEN
        return tree

    def _tried(self, kwargs: Mapping[str, Any], tree: Tree) -> Tree | str:
        """The packed row of a call whose kind was tried, or why that found against it."""
        reason = self.trials.verdicts[self.trials.kind_of(kwargs)][any(tree.padding())]
        return tree if reason is None else reason

    def stand_aside(self, kwargs: Mapping[str, Any]) -> None:
        """Tell other ranks of a call, with these arguments, that none of its rows share. [Note: trial of sharing]"""
        if must_agree(self.module):
            self._agreed(kwargs, may_try=False)

    def _agreed(self, kwargs: Mapping[str, Any], may_try: bool, wants: bool = False) -> bool:
        """Whether all ranks try the kind of this call now: it is that of all, and one of them wants to. Each call asks,
        since no rank knows what is new to another.

        Args:
            may_try: on this rank the call may be tried. wants: it is new, and saves something.
        """
        device = next((value.device for value in kwargs.values() if isinstance(value, Tensor)), torch.device("cpu"))
        kind = zlib.crc32(repr(self.trials.kind_of(kwargs)).encode()) if may_try else 0
        said = everyones_numbers(self.module, [kind, wants], device)
        return kind != 0 and all(other[0] == kind for other in said) and any(wanted for _, wanted in said)


def _apart(sites: list[LayerSite]) -> int:
    """Tokens between two places where rows part: a chunk of a layer with states ends at each."""
    return max((site.kind.states.least for site in sites), default=1)


def _a_chunk(sites: list[LayerSite]) -> float:
    """Tokens that one chunk more costs, of which attention's layers have no more for a packed row."""
    return A_CHUNK * sum(site.kind.states.carries for site in sites) / max(len(sites), 1)


def _labelled(plain: Any, shifted: Any, ids: Tensor) -> Tensor | None:
    """[B, T] in bool: which tokens predict a label, all where labels are of some tokens; None where there are none."""
    if isinstance(shifted, Tensor) and shifted.shape == ids.shape:
        return shifted != IGNORED
    if isinstance(plain, Tensor) and plain.shape == ids.shape:
        return nn.functional.pad(plain[:, 1:] != IGNORED, (0, 1))
    if isinstance(plain, Tensor) and plain.dim() == 2 and plain.shape[0] == ids.shape[0]:  # of logits_to_keep
        return torch.ones_like(ids, dtype=torch.bool)
    return None
