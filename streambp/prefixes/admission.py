"""Decide which calls of a backbone share their rows' prefixes: by arguments, and by a trial of the
model.

Sharing is exact only if a token depends on its row's earlier tokens and
its position alone. No structure of a model proves this: some models count positions from the mask,
some continue over padding. The first call of each kind therefore runs a trial. Three short rows of
random tokens share most of their tokens. The trial computes the rows twice, once as rows and once
as a tree. Each token goes to the same experts both times [Note: choices]. A kind is defined by the
call's arguments, and never by the token values.

If a forward is a collective, ranks agree before each call on the kind to try, so all ranks run the
same forwards. [Note: what a rank decides alone] No rank stops in the middle of a forward. An
exception from a layer is stored, and both forwards continue to their end without computing. A rank
without memory for a trial then computes its rows unshared. Outside of the layers, ranks differ in
free memory alone; a rank without memory there ends the run, as in any forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.accumulate import HALF_DTYPES
from streambp.admission.agreement import SCORE_TOLERANCE_FACTOR
from streambp.admission.generators import restore_module_state
from streambp.attention.masks import LazyMask
from streambp.device import RandomState, autocast_dtype, is_out_of_memory
from streambp.errors import UnsharedError
from streambp.known_names import (
    EMBEDDINGS_ARGUMENT,
    LABELS,
    NOISY_EMBEDDINGS,
    QUANT_STATE,
    SHARED_INPUTS,
    Z_LOSS,
)
from streambp.layer.call import record_outputs
from streambp.layer.choices import ReplayedChoices
from streambp.layer.layer_state import LayerState
from streambp.prefixes.arguments import (
    TRIAL_SHAPE,
    mask_and_positions,
    pack_arguments,
    token_numbers,
    tokens_of,
    trial_arguments,
    why_not_packed,
)
from streambp.prefixes.row_outputs import spread_outputs
from streambp.prefixes.tree import PrefixTree, find_tree
from streambp.tensors import replace_attribute

DROPOUT_WORD = "drop"  # part of names of modules with dropout, and of rate attributes
JITTER_WORD = "jitter"  # part of names of attributes that scale a router's input at random
# maximal relative error of a trial, from rounding
TRIAL_TOLERANCE = 1e-4
HALF_TRIAL_TOLERANCE = 3e-2
# a backbone's forward: (arguments, None or a tree, in trials a list for exceptions)
BackboneCall = Callable[..., Any]


def why_not(
    module: nn.Module,
    kwargs: Mapping[str, Any],
    layer_states: list[LayerState],
    takes_positions: bool = True,
) -> str | None:
    """Return, as text for `streambp.describe`, why a call cannot be computed as one packed row,
    without padding and with shared prefixes once. None if a packed row may be tried.

    Args:
        module: the backbone: a transformers model without head.
        kwargs: its arguments.
        layer_states: the backbone's decoder layers, with their settings and test results.
        takes_positions: True if the backbone's forward accepts position_ids. A packed row needs
            position_ids if a layer's attention reads a mask.
    """
    if hasattr(_embeddings(module), NOISY_EMBEDDINGS):
        return "NEFTune adds noise to the embeddings, which depends on how many tokens a row has"
    if kwargs.get(SHARED_INPUTS[1]) is not None and getattr(module.config, Z_LOSS, False):
        return f"the loss takes padding in: the config has {Z_LOSS}"
    reason = why_not_packed(kwargs)
    if reason is not None:
        return reason
    for layer_state in layer_states:
        name = type(layer_state.layer).__name__
        if layer_state.kind.attention.reads_a_mask and not takes_positions:
            return f"{type(module).__name__} takes no position_ids"
        if not layer_state.kind.attention.ours or layer_state.kind.position_cache:
            return f"{name} attends by itself, or asks its cache for positions"
        if layer_state.kind.attention.picks_keys:
            return f"{name} picks the keys that its queries read"
    return None


def draws_noise(module: nn.Module) -> bool:
    """True if the model `module` is in training mode and has a nonzero rate of dropout or of other
    random noise. Equal tokens of two rows then have different hidden states."""
    for part in module.modules():
        if not part.training:
            continue
        is_dropout = DROPOUT_WORD in type(part).__name__.lower()
        for name, value in vars(part).items():
            is_rate = DROPOUT_WORD in name or JITTER_WORD in name or (name == "p" and is_dropout)
            if is_rate and isinstance(value, float) and value > 0:
                return True
    return False


def _embeddings(module: nn.Module) -> nn.Module | None:
    """Return the input embeddings of a backbone, `module`. None if transformers finds none. Callers
    look there for added noise (NEFTune) and for the number of token ids."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        embeddings: nn.Module | None = module.get_input_embeddings()  # type: ignore[operator]
        return embeddings
    return None


def attach_tree(
    tree: PrefixTree, layer_state: LayerState, args: Any, kwargs: Mapping[str, Any]
) -> None:
    """Store the packed row's function `spans` in each attention mask (`LazyMask`) among a layer's
    arguments. Attention calls the function to learn which keys each token of the packed row may
    read.

    Args:
        tree: the packed row: the batch's tokens in one row, without padding and with shared
            prefixes once.
        layer_state: the decoder layer.
        args, kwargs: the layer's arguments.

    Raises:
        UnsharedError: the layer has attention, and there is no `LazyMask` among its arguments.
    """
    masks = [value for value in (*args, *kwargs.values()) if isinstance(value, LazyMask)]
    for value in kwargs.values():
        if isinstance(value, Mapping):
            masks += [part for part in value.values() if isinstance(part, LazyMask)]
    for mask in masks:
        mask.tree = tree.spans
    if layer_state.kind.attention.reads_a_mask and not masks:
        raise UnsharedError(
            f"{type(layer_state.layer).__name__} gets no attention mask that could tell of branches"
        )


def check_streamed(layer_state: LayerState) -> None:
    """Raise UnsharedError unless the last call of the layer (`layer_state`) ran in chunks, with
    streambp's attention. The layer's own attention would let a token of a packed row read another
    row's tokens. Called after each layer of a packed row, a row with the tokens of all rows of the
    batch.

    Raises:
        UnsharedError: the layer ran unchunked.
    """
    if layer_state.last_call.report.reason is not None:
        raise UnsharedError(
            f"{type(layer_state.layer).__name__} does not run in chunks: {layer_state.last_call.report.reason}"
        )


class PackedRowTrials:
    """Tests, with random tokens, if a backbone computes the same for a packed row as for the rows
    themselves, and stores the results. A packed row has the tokens of all rows, and shared prefixes
    once.

    Args:
        module: the backbone.

    Attributes:
        takes_positions: True if the backbone's forward accepts position_ids.
        verdicts: dict from a kind of call (the key that `kind_of` returns) to two results: for
            batches without padding, and with padding. A result is the reason against a packed row
            as text, or None if rows may be packed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.takes_positions = SHARED_INPUTS[2] in inspect.signature(module.forward).parameters
        self.verdicts: dict[tuple[Any, ...], tuple[str | None, str | None]] = {}

    def kind_of(self, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a key for a call of the backbone. One test of packed rows serves all calls with
        the same key. The key has the names of the arguments, the number of dimensions of
        position_ids, the autocast dtype and the dtype of parameters.

        Args:
            kwargs: the backbone's arguments.
        """
        names: list[str] = []
        for name, value in kwargs.items():
            if value is not None and value is not False and name not in LABELS:
                names.append(name)
        positions = kwargs.get(SHARED_INPUTS[2])
        form = (*sorted(names), 0 if positions is None else positions.dim())
        dtype = next((parameter.dtype for parameter in self.module.parameters()), None)
        return form, autocast_dtype(tokens_of(kwargs).device.type), dtype

    def knows(self, kwargs: Mapping[str, Any]) -> bool:
        """True if calls with the key of these arguments (`kind_of`) were tested already. `verdicts`
        then has the result.

        Args:
            kwargs: the backbone's arguments.
        """
        return self.kind_of(kwargs) in self.verdicts

    def make(
        self,
        kwargs: Mapping[str, Any],
        over: BackboneCall,
        layer_states: list[LayerState],
        fork_distance: int,
        on_all_ranks: bool,
    ) -> None:
        """Test if calls with the same key as this one (`kind_of`) can be computed as a packed row:
        the tokens of all rows in one row, with shared prefixes once. The backbone runs on rows of
        random tokens and on their packed row, and the results are compared. Store the reasons
        against a packed row, or None, in `verdicts`.

        Args:
            kwargs: the arguments of this call, which `why_not` has accepted.
            over: the backbone's forward, called with three arguments: the arguments of the test,
                the packed row (None: the test's rows), and a list that receives exceptions of
                layers.
            layer_states: the backbone's decoder layers.
            fork_distance: minimum number of tokens between two positions at which rows branch.
            on_all_ranks: True if all ranks run this test together, as forwards contain collectives.
        """
        shares = kwargs.get(EMBEDDINGS_ARGUMENT) is None
        padded = kwargs.get(SHARED_INPUTS[1]) is not None
        embeddings: Any = _embeddings(self.module)
        vocabulary = int(getattr(embeddings, "num_embeddings", 0) or self.module.config.vocab_size)  # type: ignore[union-attr, arg-type]
        reasons: list[str | None] = []
        for with_padding in (False,) * shares + (True,) * padded:
            trial = trial_arguments(kwargs, vocabulary, with_padding)
            reasons.append(self._try(trial, over, layer_states, fork_distance, on_all_ranks))
        self.verdicts[self.kind_of(kwargs)] = reasons[0], reasons[-1]

    def _try(
        self,
        kwargs: dict[str, Any],
        over: BackboneCall,
        layer_states: list[LayerState],
        fork_distance: int,
        on_all_ranks: bool,
    ) -> str | None:
        mask, positions = mask_and_positions(kwargs)
        ids = token_numbers(kwargs)
        tree = find_tree(
            ids,
            mask,
            positions,
            min_prefix=TRIAL_SHAPE[1] // 3,
            min_savings=0.0,
            fork_distance=fork_distance,
        )
        assert isinstance(tree, PrefixTree), tree
        is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0  # [B, T]
        random = RandomState.capture(ids.device).replay()
        with (
            torch.no_grad(),
            _eval_mode(self.module),
            restore_module_state(self.module) as restored,
            record_outputs(()),
            random,
        ):
            failed: list[Exception] = []
            try:
                recorded = [ReplayedChoices() for _ in layer_states]
                with replace_attribute(layer_states, "choices", recorded):  # [Note: choices]
                    rows = over(kwargs, None, failed)
                restored.end_run()
                restored.rewind()
                replayed = [
                    choices.rearrange(functools.partial(_pack_row, tree)) for choices in recorded
                ]
                with replace_attribute(layer_states, "choices", replayed):
                    row = over(pack_arguments(kwargs, tree, self.takes_positions), tree, failed)
                if not failed:
                    expected = rows[0][is_token]
                    results = spread_outputs(row, tree)[0][is_token]
            except Exception as error:
                if on_all_ranks and (failed or is_out_of_memory(error)):
                    # Other ranks continue this forward, so this rank cannot skip it.
                    raise (failed or [error])[0] from None
                failed.append(error)
            set_otherwise = [] if failed else restored.values_set_again()
        if failed:
            if isinstance(failed[0], UnsharedError):
                return str(failed[0])
            if is_out_of_memory(failed[0]) and not on_all_ranks:
                # Running out of memory proves nothing about the model. No other rank waits here.
                raise failed[0]
            return (
                f"a trial on a few random tokens failed ({type(failed[0]).__name__}: {failed[0]})"
            )
        if set_otherwise:
            return f"its forward initialises itself at its first call ({', '.join(set_otherwise)})"
        in_half = expected.dtype in HALF_DTYPES or autocast_dtype(ids.device.type) in HALF_DTYPES
        results = results.double()
        expected = expected.double()
        if in_half:  # distance over all values, because single values round coarsely
            diff = float((results - expected).norm() / expected.norm().clamp(min=1e-30))
            bar = HALF_TRIAL_TOLERANCE
        else:
            diff = float((results - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
            bar = TRIAL_TOLERANCE
        scores = max(
            (choices.rms_distance() if in_half else choices.max_distance() for choices in replayed),
            default=0.0,
        )
        if diff <= bar and scores <= SCORE_TOLERANCE_FACTOR * bar:
            return None
        diff = max(diff, scores / SCORE_TOLERANCE_FACTOR)
        return (
            "a trial on a few random tokens gave something else than rows do (relative error "
            f"{diff:.1e})"
        )


def _pack_row(tree: PrefixTree, of_rows: Tensor) -> Tensor:
    """Return router scores or choices of experts for the tokens of the packed row, [1, N, ...],
    selected from those of the rows' tokens. A test of packed rows runs the rows first and records
    these values. The packed row is then run with the same values, so that each token goes to the
    same experts.

    A packed row may end with an additional token, for which nothing was recorded. This token gets
    the last token's integers, and NaN for floats.

    Args:
        tree: the packed row: the batch's tokens in one row, without padding and with shared
            prefixes once.
        of_rows: the recorded values [B, T, ...].
    """
    records = tree.pack(of_rows)
    if tree.extra_position is None:
        return records
    last = records[:, -1:]
    if last.is_floating_point():
        last = torch.full_like(last, float("nan"))
    return torch.cat([records, last], 1)


@contextlib.contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """Context manager that sets all modules inside `module` to eval mode, and restores their modes
    at the end. Modules with quantized weights are left out: the CPU code of bitsandbytes
    permanently repacks weights in eval mode."""
    training = []
    for part in module.modules():
        quantised = getattr(part, QUANT_STATE, None) is not None
        for parameter in part._parameters.values():
            if parameter is None:
                continue
            # `bnb_4bit_quant_storage` may give a quantised parameter's bytes a floating dtype.
            if not parameter.is_floating_point() or hasattr(parameter, QUANT_STATE):
                quantised = True
        if part.training and not quantised:
            training.append(part)
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
