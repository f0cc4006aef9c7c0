"""Run a backbone's call over the packed row of its batch if that is exact and saves tokens; else
over the rows.

Looking for shared prefixes is the default, without a request by the user. An exception from the
search, over arguments that the model accepts, is therefore a reason to compute rows, and never ends
a step. `describe` shows the reason. A trial that ranks run together is no part of the search: only
an error can end a forward in the middle.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.third_party import why_rows
from streambp.device import is_out_of_memory
from streambp.distributed.engines import gather_numbers, ranks_must_agree
from streambp.errors import StreamBPError, UnsharedError
from streambp.known_names import EMBEDDINGS_ARGUMENT, LABELS, SHARED_INPUTS, TOKEN_ARGUMENTS
from streambp.layer.layer_state import LayerState
from streambp.prefixes.admission import BackboneCall, PackedRowTrials, draws_noise, why_not
from streambp.prefixes.arguments import mask_and_positions, pack_arguments, token_numbers
from streambp.prefixes.deferred_rows import DeferredRows, RowsForward
from streambp.prefixes.row_outputs import spread_outputs
from streambp.prefixes.tree import (
    CHUNK_OVERHEAD_TOKENS,
    REASON_NOTHING_SHARED,
    PrefixTree,
    find_tree,
)

IGNORED_LABEL = -100  # label of tokens without a label
# returns True if no code reads values of padding; None: the caller does
PaddingCheck = Callable[[], bool] | None
REASON_RUN_UNPATCHED = (
    "a packed row would not save a tenth of the last call's tokens, and it ran unpatched"
)
REASON_ONE_ROW = "the last call has one row or none"
REASON_PADDING_RETURNED = (
    "the last call's caller gets values at padding, which a packed row has not (hidden states, "
    "logits or router logits), or code of its own may read them (a hook, a head, a forward, a "
    "loss); with rows='packed' they are another token's"
)
REASON_PADDING_READ = (
    "the program has read logits at padding, which a packed row has not; with rows='packed' they "
    "are another token's"
)
REASON_SHARED_NOISE = (
    "dropout or jitter would draw the same noise for tokens that rows have in common; with "
    "rows='packed' it does, and they are computed once"
)
# reasons that need no report with the default setting
UNREPORTED_REASONS = (REASON_RUN_UNPATCHED, REASON_ONE_ROW, REASON_NOTHING_SHARED)


@dataclasses.dataclass(frozen=True)
class PackedRowSizes:
    """Sizes of a batch [B, T] computed as one packed row, for `streambp.describe`. The packed row
    has the tokens of all rows, and shared prefixes once.

    Attributes:
        rows: number of rows B.
        tokens_of_rows: number of tokens of all rows, without padding.
        padding: number of padding positions.
        tokens: number of computed tokens; a token that rows share counts once.
    """

    rows: int
    tokens_of_rows: int
    padding: int
    tokens: int


class SharedPrefixes:
    """Runs a backbone on one packed row in place of the batch's rows [B, T]. The packed row has the
    tokens of all rows, without padding, and a common beginning of several rows once. A call runs on
    [B, T] if the packed row could give other results, or saves few tokens.

    Args:
        module: the backbone: a transformers model without head.
        rows: `StreamConfig.rows`. "auto": a padded batch is not packed if other code may read
            values at padding, and rows share no tokens if the model has dropout. "packed": such
            batches are packed, too. Values at padding are then another token's, and rows have the
            same dropout in their common beginning.

    Attributes:
        last: sizes of the last call's packed row, or the reason against it as text; None before the
            first call.
    """

    def __init__(self, module: nn.Module, rows: str) -> None:
        self.rows = rows
        self.trials = PackedRowTrials(module)
        self.module = module
        self.last: PackedRowSizes | str | None = None
        self._looked: tuple[list[tuple[Tensor, int | None]], PrefixTree | str] | None = None
        self._reads_padding: set[tuple[bool, bool]] = set()  # keys from `_caller`

    def call(
        self,
        kwargs: Mapping[str, Any],
        over: BackboneCall,
        layer_states: Callable[[], list[LayerState]],
        labels: tuple[Any, Any] = (None, None),
        documents: bool = False,
        padding_unseen: PaddingCheck = None,
        rows_forward: RowsForward | None = None,
    ) -> Any:
        """Return the backbone's output for rows [B, T], computed on a packed row or on the rows.
        The packed row has the tokens of all rows, without padding and with shared prefixes once.

        Args:
            kwargs: the backbone's arguments.
            over: the backbone's forward. Called either with arguments for the packed row and the
                packed row itself (a `PrefixTree`), or with the rows' arguments and None.
            layer_states: returns the backbone's decoder layers.
            labels: labels and shift_labels of the language model around the backbone.
            documents: True if the language model's position_ids mark several documents in a row.
                The call then runs on the rows.
            padding_unseen: returns True if no other code reads values at padding positions; called
                only for batches with padding. None: other code may read them.
            rows_forward: forward over the rows, which runs after the packed row if other code then
                reads values at padding; None: such a forward is impossible.

        Raises:
            StreamBPError: a packed row failed while the model ran, and other ranks wait for this
                rank.
        """
        tree = self._find(kwargs, over, layer_states, labels, padding_unseen)
        if documents and isinstance(tree, PrefixTree):
            tree = "position_ids mark documents in packed rows"
        if isinstance(tree, PrefixTree):
            late_rows = None
            if rows_forward is not None:
                late_rows = self._defer_rows(rows_forward, tree, labels)
            try:
                output = over(pack_arguments(kwargs, tree, self.trials.takes_positions), tree)
                compute = None
                if late_rows is not None:
                    compute = late_rows.set_packed_states(output)
                output = spread_outputs(output, tree, compute_rows=compute)
            except Exception as error:  # a hook may need the rows, as for peft's adapter_names
                if is_out_of_memory(error):
                    raise
                if ranks_must_agree(self.module):  # recomputing would need the other ranks' weights
                    raise StreamBPError(
                        f"This batch cannot be computed as a packed row: {error}. That was found "
                        "while the model ran, where other ranks wait for this one. Set "
                        "StreamConfig(rows='as_given')."
                    ) from error
                tree = f"their packed row failed ({type(error).__name__}: {error})"
                if isinstance(error, UnsharedError):
                    tree = str(error)
                # applies to all kinds
                self.trials.verdicts = dict.fromkeys(self.trials.verdicts, (tree, tree))
            else:
                padding = len(tree.rows) * tree.width - tree.tokens_of_rows
                self.last = PackedRowSizes(
                    len(tree.rows), tree.tokens_of_rows, padding, tree.tokens
                )
                return output
        self.last = tree
        return over(kwargs, None)

    def _defer_rows(
        self, rows_forward: RowsForward, tree: PrefixTree, labels: tuple[Any, Any]
    ) -> DeferredRows | None:
        """Return an object that can still run the backbone on the batch's rows after the packed
        row, for a program that reads values at padding.

        None if the batch has no padding, if rows="packed" is set, or if all ranks must take part in
        each forward.

        Args:
            rows_forward: the forward over the rows, to run later.
            tree: the packed row: the tokens of all rows, without padding and with shared prefixes
                once.
            labels: labels and shift_labels of the language model around the backbone.
        """
        if self.rows != "auto" or not any(tree.padding()) or ranks_must_agree(self.module):
            return None

        caller = self._caller(labels)

        def record_padding_read() -> None:
            self._reads_padding.add(caller)
            self.last = REASON_PADDING_READ

        return DeferredRows(self.module, rows_forward, tree, record_padding_read)

    def _caller(self, labels: tuple[Any, Any]) -> tuple[bool, bool]:
        """Return a pair of bools that stands for the program's code around this call: (True in
        training mode, True with labels).

        Code that reads values at padding needs the batch's rows, which the packed row lacks. Once
        code has read such values, later calls with an equal pair are computed on the rows.

        Args:
            labels: labels and shift_labels of the language model around the backbone.
        """
        return self.module.training, any(value is not None for value in labels)

    def saves(
        self,
        kwargs: Mapping[str, Any],
        layer_states: list[LayerState],
        labels: tuple[Any, Any],
        padding_unseen: PaddingCheck,
    ) -> bool:
        """True if this call would be computed on a packed row with fewer tokens than the batch
        [B, T]. The result is also True if the model was not tested on packed rows yet, and no
        other reason speaks against a packed row. Nothing is computed.

        The caller runs a small batch unpatched only if the result is False, because an unpatched
        forward computes all tokens.

        Args:
            kwargs: the backbone's arguments.
            layer_states: the backbone's decoder layers.
            labels: labels and shift_labels of the language model around the backbone.
            padding_unseen: returns True if no other code reads values at padding positions. None:
                other code may read them.
        """
        return isinstance(
            self._decide(kwargs, lambda: layer_states, labels, padding_unseen)[0], PrefixTree
        )

    def _find(
        self,
        kwargs: Mapping[str, Any],
        over: BackboneCall,
        layer_states: Callable[[], list[LayerState]],
        labels: tuple[Any, Any],
        padding_unseen: PaddingCheck,
    ) -> PrefixTree | str:
        on_all_ranks = ranks_must_agree(self.module)
        tree, may_try = self._decide(kwargs, layer_states, labels, padding_unseen, on_all_ranks)
        self._looked = None
        wants = isinstance(tree, PrefixTree) and not self.trials.knows(kwargs)
        if on_all_ranks and self._agree(kwargs, may_try, wants):
            self.trials.make(
                kwargs, over, layer_states(), _fork_distance(layer_states()), on_all_ranks
            )
        elif on_all_ranks and wants:
            return (
                "ranks are to try a kind of call together, and this one is not that of all of them "
                "(a mask on some)"
            )
        elif wants:
            try:
                self.trials.make(
                    kwargs, over, layer_states(), _fork_distance(layer_states()), on_all_ranks
                )
                return self._trial_verdict(kwargs, tree)  # type: ignore[arg-type]
            except Exception as error:
                reason = f"a trial on a few random tokens failed ({type(error).__name__}: {error})"
                # Running out of memory proves nothing about the model.
                if not is_out_of_memory(error):
                    self.trials.verdicts[self.trials.kind_of(kwargs)] = reason, reason
                return reason
        if isinstance(tree, PrefixTree):
            return self._trial_verdict(kwargs, tree)
        return tree

    def _decide(
        self,
        kwargs: Mapping[str, Any],
        layer_states: Callable[[], list[LayerState]],
        labels: tuple[Any, Any],
        padding_unseen: PaddingCheck,
        on_all_ranks: bool = False,
    ) -> tuple[PrefixTree | str, bool]:
        """Return two values. The first is the packed row for a call, or the reason against a packed
        row as text. The second is True if the backbone may be tested on packed rows with the
        arguments of this call. The backbone does not run here.

        An exception is returned as a reason in text, because the user did not request a packed
        row, and the rows can still be computed.

        Args:
            kwargs: the backbone's arguments.
            layer_states: returns the backbone's decoder layers.
            labels: labels and shift_labels of the language model around the backbone.
            padding_unseen: returns True if no other code reads values at padding positions.
            on_all_ranks: True if all ranks test the backbone together. A batch of one row, which
                packing cannot shorten, then takes part in the test.
        """
        may_try = False
        try:
            if not on_all_ranks and self._is_one_row(kwargs):
                return REASON_ONE_ROW, False
            layers = layer_states()
            reason = self._why_not(kwargs, layers)
            if reason is not None:
                return reason, False
            self.trials.kind_of(kwargs)
            may_try = True
            tree = self._find_tree(kwargs, layers, labels, padding_unseen)
            if isinstance(tree, PrefixTree) and self.trials.knows(kwargs):
                tree = self._trial_verdict(kwargs, tree)
            return tree, may_try
        except Exception as error:
            return (
                f"the look at the last call's rows failed ({type(error).__name__}: {error})",
                may_try,
            )

    @staticmethod
    def _is_one_row(kwargs: Mapping[str, Any]) -> bool:
        """True if the batch of a call with the arguments `kwargs` is one row without a mask, so
        that packing saves nothing. Does not synchronize with the device."""
        ids, mask, _ = map(kwargs.get, SHARED_INPUTS)
        return mask is None and isinstance(ids, Tensor) and ids.shape[0] < 2

    def _why_not(self, kwargs: Mapping[str, Any], layer_states: list[LayerState]) -> str | None:
        reason = why_not(self.module, kwargs, layer_states, self.trials.takes_positions)
        if reason is not None:
            return reason
        return why_rows(self.module)  # before a trial: hooks would get its tokens

    def _find_tree(
        self,
        kwargs: Mapping[str, Any],
        layer_states: list[LayerState],
        labels: tuple[Any, Any],
        padding_unseen: PaddingCheck,
    ) -> PrefixTree | str:
        """Return the packed row for a call, or the reason against it as text. The packed row has
        the tokens of all rows, without padding and with shared prefixes once. The result is cached
        for the tensors of one call.

        Args:
            kwargs: the backbone's arguments.
            layer_states: the backbone's decoder layers.
            labels: labels and shift_labels of the language model around the backbone.
            padding_unseen: returns True if no other code reads values at padding positions.
        """
        mask, positions = mask_and_positions(kwargs)
        if self.trials.knows(kwargs):
            plain, padded = self.trials.verdicts[self.trials.kind_of(kwargs)]
            if plain is not None and padded is not None:
                return plain
        # Labels of the surrounding language model, or else the backbone's own labels.
        plain, shifted = labels
        if plain is None:
            plain = kwargs.get(LABELS[0])
        if shifted is None:
            shifted = kwargs.get(LABELS[1])
        key: list[tuple[Tensor, int | None]] = []
        for x in (
            *map(kwargs.get, (*SHARED_INPUTS, EMBEDDINGS_ARGUMENT, *TOKEN_ARGUMENTS)),
            plain,
            shifted,
        ):
            if isinstance(x, Tensor):
                key.append((x, None if x.is_inference() else x._version))
        looked_key = [] if self._looked is None else self._looked[0]
        is_same_call = len(looked_key) == len(key) and all(
            x is y and i == j for (x, i), (y, j) in zip(looked_key, key, strict=True)
        )
        if self._looked is None or not is_same_call:
            ids = token_numbers(kwargs)
            scored = _label_mask(plain, shifted, ids)
            find = functools.partial(
                find_tree,
                ids,
                mask,
                positions,
                scored,
                fork_distance=_fork_distance(layer_states),
                chunk_overhead=_chunk_overhead(layer_states),
            )
            row_or_reason = find()
            shares = (
                isinstance(row_or_reason, PrefixTree)
                and row_or_reason.tokens < row_or_reason.tokens_of_rows
            )
            if shares and self.rows == "auto" and draws_noise(self.module):
                row_or_reason = find(
                    min_prefix=ids.shape[1] + 1
                )  # share no tokens, drop padding only
                row_or_reason = (
                    row_or_reason if isinstance(row_or_reason, PrefixTree) else REASON_SHARED_NOISE
                )
            self._looked = key, row_or_reason
        tree = self._looked[1]
        if self.rows == "auto" and isinstance(tree, PrefixTree) and any(tree.padding()):
            if self._caller(labels) in self._reads_padding:
                return REASON_PADDING_READ
            return (
                tree if padding_unseen is not None and padding_unseen() else REASON_PADDING_RETURNED
            )
        return tree

    def _trial_verdict(self, kwargs: Mapping[str, Any], tree: PrefixTree) -> PrefixTree | str:
        """Return the packed row if the model has passed its test for this kind of call
        (`PackedRowTrials.kind_of`); otherwise the reason as text. The test has compared a packed
        row of random tokens with its rows.

        Args:
            kwargs: the backbone's arguments.
            tree: the packed row of this call.
        """
        reason = self.trials.verdicts[self.trials.kind_of(kwargs)][any(tree.padding())]
        if reason is None:
            return tree
        return reason

    def decline_sharing(self, kwargs: Mapping[str, Any]) -> None:
        """Tell all ranks that this rank does not merge its rows into a packed row, for example
        because the call runs unpatched. A packed row has the shared prefix of rows once. Other
        ranks may wait for this message, because all ranks exchange such messages before each call
        (`_agree`). Does nothing if ranks share no parameters.

        Args:
            kwargs: the backbone's arguments, whose names and kinds of values are exchanged.
        """
        if ranks_must_agree(self.module):
            self._agree(kwargs, may_try=False)

    def _agree(self, kwargs: Mapping[str, Any], may_try: bool, wants: bool = False) -> bool:
        """Exchange with all ranks whether to test now if calls like this one can be computed as a
        packed row. Return True if all ranks have a call of the same kind
        (`PackedRowTrials.kind_of`), and at least one rank wants the test.

        The exchange precedes each call, because no rank knows which kinds other ranks have tested.

        Args:
            kwargs: the backbone's arguments.
            may_try: True if the call may be tested on this rank.
            wants: True if this rank has not tested the kind yet, and the call's packed row saves
                tokens.
        """
        device = next(
            (value.device for value in kwargs.values() if isinstance(value, Tensor)),
            torch.device("cpu"),
        )
        kind = zlib.crc32(repr(self.trials.kind_of(kwargs)).encode()) if may_try else 0
        replies = gather_numbers(self.module, [kind, wants], device)
        if kind == 0 or any(reply[0] != kind for reply in replies):
            return False
        return any(wants_test for _, wants_test in replies)


def _fork_distance(layer_states: list[LayerState]) -> int:
    """Return the minimum number of tokens between two positions at which rows may branch in a
    packed row. A packed row has the tokens of all rows, and rows share the tokens of common
    prefixes. A layer with recurrent states ends a chunk at each branch, and has a minimum number of
    tokens in a chunk. The result is the largest minimum of all layers.

    Args:
        layer_states: the backbone's decoder layers.
    """
    return max((layer_state.kind.states.min_tokens for layer_state in layer_states), default=1)


def _chunk_overhead(layer_states: list[LayerState]) -> float:
    """Return the cost of one more chunk, as a number of tokens that take the same time. The cost is
    used to decide if a packed row is worth its branches: layers with recurrent states end a chunk
    at each branch. Other layers have no such cost. The result is the average over all layers.

    Args:
        layer_states: the backbone's decoder layers.
    """
    return (
        CHUNK_OVERHEAD_TOKENS
        * sum(layer_state.kind.states.carries for layer_state in layer_states)
        / max(len(layer_states), 1)
    )


def _label_mask(plain: Any, shifted: Any, ids: Tensor) -> Tensor | None:
    """Return a bool tensor [B, T], True for tokens whose output has a label. `find_tree` refuses to
    pack a batch if the result is True at a padding position, because a packed row has no padding.
    If labels exist for the last tokens alone (logits_to_keep), all entries are True. None without
    labels.

    Args:
        plain: the argument `labels`, or None; the label of a token is for the output of the token
            before.
        shifted: the argument `shift_labels`, or None; the label of a token is for its own output.
        ids: a tensor [B, T], for its shape and device.
    """
    if isinstance(shifted, Tensor) and shifted.shape == ids.shape:
        return shifted != IGNORED_LABEL
    if isinstance(plain, Tensor) and plain.shape == ids.shape:
        return nn.functional.pad(plain[:, 1:] != IGNORED_LABEL, (0, 1))
    # labels for logits_to_keep
    if isinstance(plain, Tensor) and plain.dim() == 2 and plain.shape[0] == ids.shape[0]:
        return torch.ones_like(ids, dtype=torch.bool)
    return None
