"""Determine who reads values at padding, and warn about labels that left padding predicts.

Streamed and eager attention differ only in the output at padding.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from streambp.admission.third_party import third_party_reads_rows
from streambp.device import has_data
from streambp.distributed.engines import ranks_must_agree
from streambp.known_names import DECODER_MASK, HIDDEN_STATES, ROUTER_LOGITS
from streambp.model.callers import reads_logits, wants_predictions
from streambp.model.state import PatchState


def hides_padding(
    model: nn.Module, state: PatchState, kwargs: Mapping[str, Any], handed_out: bool = False
) -> bool:
    """True if no code outside of patched layers can read values at padding positions in this call
    of a language model. Rows may then be computed as one packed row without padding.

    False, for example, if the call returns hidden states, router logits or an evaluation's logits,
    or if third-party code runs between backbone and loss.

    Args:
        model: the language model.
        state: state of the model's patch.
        kwargs: arguments of the call.
        handed_out: True if the caller gets lazy logits (computed on use), and may read logits at
            padding. The final norm must then be computed together with the logits, and without
            collectives; otherwise the result is False. [Note: padding that is read]
    """
    if handed_out and (state.running.defer_norm is None or ranks_must_agree(model)):
        return False
    config: Any = model.config
    for name, field_config in ((HIDDEN_STATES, config), (ROUTER_LOGITS, config.get_text_config())):
        requested = kwargs.get(name)
        if getattr(field_config, name, False) if requested is None else requested:
            return False
    if third_party_reads_rows(
        model, [wrapper.module for wrapper in state.wrappers if hasattr(wrapper, "packs")]
    ):
        return False
    if model.training:
        return True
    return not (state.config.eval_logits or wants_predictions() or reads_logits())


def warn_of_labels_after_padding(
    kwargs: Mapping[str, Any], mask_argument: str = "attention_mask"
) -> bool:
    """Warn if a label is predicted at a position that can attend to no key, such as the last
    position of left padding. Return True if a warning was issued.

    Called for models whose unpatched attention returns the mean over all tokens at such a position;
    patched layers return 0.

    Args:
        kwargs: arguments of a forward with labels or shift_labels [B, T] and a mask [B, T]. Masks
            of other shapes are ignored.
        mask_argument: name of the argument that masks padding among the labels' tokens. The name is
            "decoder_attention_mask" for an encoder-decoder, whose labels are not shifted.
    """
    labels = kwargs.get("labels")
    mask = kwargs.get(mask_argument)
    if mask_argument == DECODER_MASK:
        shifted = labels
        label = "the label at each position of the decoder's left padding"
    else:
        shifted = kwargs.get("shift_labels")
        label = "the label of the first token after left padding"
        if shifted is None and labels is not None:
            shifted = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
    if shifted is None or not isinstance(mask, Tensor) or mask.shape != shifted.shape:
        return False
    if not (has_data(mask) and has_data(shifted)):
        return False
    nothing_yet = mask.cumsum(1) == 0
    if not (
        (shifted != -100) & nothing_yet.to(shifted.device)
    ).any():  # synchronizes with the device
        return False
    warnings.warn(
        f"Set {label} to -100. Its gradient differs from the unpatched model's; the gradients of "
        "all other labels are equal. Padding predicts that token and may read no key. Eager "
        "attention, and attention with a bias for each pair of positions, then returns the mean "
        "over all tokens; streamed layers return 0, as sdpa does.",
        stacklevel=2,
    )
    return True
