"""Warn if position_ids split a row that the unpatched model treats as one document, and if hooks
ran in trials.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from streambp.admission.third_party import named_hooks
from streambp.device import has_data
from streambp.known_names import DOCUMENT_ENDS, FLASH
from streambp.layer.site import LayerSite


def finds_other_documents(
    kwargs: Mapping[str, Any], implementation: str | None, cached: bool
) -> bool:
    """True if position_ids make patched layers split a row into packed documents, and the unpatched
    model would attend over the whole row.

    Args:
        kwargs: arguments of a model's call.
        implementation: the model's attention implementation, such as "sdpa".
        cached: True if the unpatched call makes a cache; transformers then derives no documents
            from position_ids.
    """
    if FLASH in str(implementation):
        return False
    positions = kwargs.get("position_ids")
    ends = kwargs.get(DOCUMENT_ENDS)
    read = (
        kwargs.get("attention_mask") is None
        and isinstance(positions, Tensor)
        and positions.dim() == 2
    )
    if not (read and has_data(positions)):  # type: ignore[arg-type]
        return ends is not None
    if ends is None and not cached:
        return False
    starts = int((positions.diff(dim=-1) != 1).sum())  # type: ignore[union-attr]  # waits for the device, as transformers does
    return (cached and starts > 0) or (ends is not None and starts != len(ends) - 2)


def warn_of_documents(sites: list[LayerSite], unseen: bool, states: bool) -> bool:
    """Warn that patched layers split rows into packed documents where the unpatched model would
    not. True if a warning was issued.

    Args:
        sites: the records of the decoder layers.
        unseen: True if the unpatched attention reads documents from a mask, which omits documents
            in a call with a cache.
        states: True if the unpatched recurrences and convolutions continue from one document to the
            next.
    """
    unpatched = []
    cure = ""
    if unseen and any(
        site.last_call.report.documents is not None
        and site.last_call.report.documents[0] == "position_ids"
        for site in sites
    ):
        unpatched.append(
            "attend across them, because its config makes a cache for this call, with which "
            "transformers does not look for documents (with use_cache=False it does)"
        )
    if states:
        unpatched.append("let its recurrences and convolutions go on from one to the next")
        cure = (
            " Set StreamConfig(documents='as_given') if recurrences and convolutions alone are to "
            "go on."
        )
    if not unpatched:
        return False
    warnings.warn(
        "position_ids restart, so streamed layers treat each row as several documents and "
        f"separate the documents. The unpatched model would {' and '.join(unpatched)}. Pass "
        "attention_mask=torch.ones_like(input_ids) if each row is one document whose positions "
        f"skip: transformers looks for no documents where a mask is given.{cure}",
        stacklevel=2,
    )
    return True


def warn_of_trials(sites: list[LayerSite]) -> bool:
    """Warn about user hooks inside of layers that also ran in test runs on random tokens. True if a
    warning was issued. [Note: who sees the rows]"""
    shown: dict[str, list[str]] = {}
    for site in sites:
        for hook, paths in site.tests.hooks_run_in_tests.items():
            shown.setdefault(hook, []).extend(
                f"{type(site.layer).__name__} {site.index}: {path}" for path in paths
            )
    if shown:
        warnings.warn(
            "Hooks inside decoder layers ran on the random tokens of a first call's tests, beside "
            f"the batch: {named_hooks(shown)}. streambp restores all values that hooks store in "
            "Python, but nothing that they write elsewhere (a file, a logger). If these hooks do, "
            "call streambp.warm_up(model, **inputs) before you register them: then no test runs "
            "the hooks.",
            stacklevel=2,
        )
    return bool(shown)
