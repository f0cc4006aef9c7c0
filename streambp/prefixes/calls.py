"""A backbone's call, over the packed row of its rows' tree where that is exact and saves something; else over the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.device import is_out_of_memory
from streambp.errors import StreamBPError, UnsharedError
from streambp.known_names import LABELS, SHARED_INPUTS
from streambp.layer.site import LayerSite
from streambp.prefixes.admission import Over, Trials, packed, why_not
from streambp.prefixes.spread import spread_all
from streambp.prefixes.tree import Tree, find_tree

IGNORED = -100  # a label that is none
ONE_ROW = "the last call has one row or none"


class SharedPrefixes:
    """How a backbone's calls share the prefixes of their rows.

    told: what became of the last call's rows, for `describe`; None before the first call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.trials = Trials(module)
        self.module = module
        self.told: str | None = None

    def call(
        self,
        kwargs: Mapping[str, Any],
        over: Over,
        on_trial: Over,
        sites: Callable[[], list[LayerSite]],
        labels: tuple[Any, Any] = (None, None),
        documents: bool = False,
    ) -> Any:
        """What the backbone returns for its arguments, for rows [B, T].

        Args:
            over: its forward, over rows or over a tree. on_trial: the same, of a call that nobody asked for.
            sites: its layers.
            labels: of the language model around it, as `known_names.LABELS` has them.
            documents: that model's position_ids mark several in a row.

        Raises:
            StreamBPError: only when the model ran was it found that it cannot share, and there are other ranks.
        """
        tree = self._find(kwargs, on_trial, sites, labels)
        tree = "position_ids mark documents in packed rows" if documents and isinstance(tree, Tree) else tree
        if isinstance(tree, Tree):
            try:
                output = spread_all(over(packed(kwargs, tree, self.trials.takes_positions), tree), tree)
            except Exception as error:  # a hook of this call alone may want the rows (peft's adapter_names)
                if is_out_of_memory(error):
                    raise
                self._refuse_on_ranks(error)
                known = isinstance(error, UnsharedError)
                tree = str(error) if known else f"their packed row failed ({type(error).__name__}: {error})"
                self.trials.settle(tree)
            else:
                self.told = (
                    f"the last call's {len(tree.rows)} rows of {tree.tokens_of_rows} tokens were computed as {tree.tokens}"
                )
                return output
        self.told = f"rows were computed: {tree}"
        return over(kwargs, None)

    def _find(
        self, kwargs: Mapping[str, Any], on_trial: Over, sites: Callable[[], list[LayerSite]], labels: tuple[Any, Any]
    ) -> Tree | str:
        ids, mask, positions = (kwargs.get(name) for name in SHARED_INPUTS)
        alone = isinstance(ids, Tensor) and ids.shape[0] < 2
        if alone and not _several_ranks():
            return ONE_ROW
        layers = sites()
        reason = why_not(self.module, kwargs, layers, self.trials.takes_positions)
        if reason is not None:
            return reason
        apart = max((site.kind.states.least for site in layers), default=1)  # a chunk ends wherever rows part
        plain, padded = self.trials.verdicts_of(kwargs, on_trial, apart)
        if plain is not None and padded is not None:
            return plain
        if alone:  # other ranks may have more rows, and have made their trials with this one
            return ONE_ROW
        assert ids is not None
        tree = find_tree(ids, mask, positions, _labelled(labels, kwargs, ids), apart=apart)
        reason = plain if isinstance(tree, str) or not any(tree.padding()) else padded
        return tree if reason is None else reason

    def _refuse_on_ranks(self, error: Exception) -> None:
        """One rank alone must not begin its forward again, for whose weights the others would have to be there."""
        if _several_ranks():
            raise StreamBPError(
                f"This batch's rows cannot be computed as a tree of prefixes: {error}. That was found while the model ran, "
                "where other ranks wait for this one. Set StreamConfig(share_prefixes=False)."
            ) from error


def _several_ranks() -> bool:
    return (
        torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    )


def _labelled(labels: tuple[Any, Any], kwargs: Mapping[str, Any], ids: Tensor) -> Tensor | None:
    """[B, T] in bool: which tokens predict a label; None where there are none.

    Args:
        labels: of the language model around the backbone, or else those among the backbone's kwargs.
    """
    plain, shifted = (outer if outer is not None else kwargs.get(name) for outer, name in zip(labels, LABELS, strict=True))
    if isinstance(shifted, Tensor) and shifted.shape == ids.shape:
        return shifted != IGNORED
    if isinstance(plain, Tensor) and plain.shape == ids.shape:
        return nn.functional.pad(plain[:, 1:] != IGNORED, (0, 1))
    return None
