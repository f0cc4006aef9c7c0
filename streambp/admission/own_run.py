"""Run a layer as its unpatched model does, and compare the result with the streamed layer's.

`compare_with_unpatched` is called for each new kind of call, on a few random tokens. `UnpatchedRun`
calls the layer with the model's own attention, masks and forward. If output or gradients differ
from streambp's, the layer is refused by an error.

The chunked and the unchunked run of a probe share streamed attention. A comparison of these two
runs therefore does not test this attention. The layer also runs with the attention function that
its model calls, the mask function of the same name, and the forward that `patch` found. If the
result differs, the layer computes something that streaming does not, and is refused. Some functions
are known to be equivalent, but cannot run a few tokens: they compile, need half precision, or read
documents from position_ids. `admission/third_party.py` checks these functions, and eager attention
runs in their place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from streambp.admission.agreement import (
    all_agree,
    coarsest_dtype,
    gradient_tolerance,
    router_scores_agree,
)
from streambp.admission.third_party import distinct_attentions, foreign_parts, watched_hooks
from streambp.attention.interface import own_implementation, use_implementations
from streambp.attention.masks import LazyMask
from streambp.cache_arguments import without_caches
from streambp.chunks import Chunk
from streambp.device import is_out_of_memory
from streambp.distributed.ulysses import find_ulysses
from streambp.errors import UnsupportedModelError
from streambp.known_names import EAGER, FLAT_PARAMETER, STATE_ARGUMENT
from streambp.layer.call import LayerCall, record_outputs
from streambp.layer.gradients import dependence_message, find_other_leaf
from streambp.layer.layer_state import ANY_CHUNK_SIZE
from streambp.layer.recompute import NULL_CONTEXT

MAX_COMPARED_ELEMENTS = (
    2**24
)  # total elements of parameters whose gradients are compared, smallest parameters first


REASON_NO_GRADIENT = (
    "its output passes no gradient to its input (no_grad or detach inside it), and chunks would "
    "pass zeros"
)


class StreamingMismatchError(UnsupportedModelError):
    """Error of a layer's test run: streambp's result for the layer differs from that of the layer's
    own, unpatched code, or cannot be compared with it. A run of all tokens at once would be no
    remedy, because it uses streambp's attention too."""


class UnpatchedRun:
    """One run of the unpatched layer on x [..., B, t, h], to be compared with streambp's result.

    The run uses the attention and mask functions that are registered in transformers under "sdpa"
    if the model uses SDPA, otherwise under "eager".

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: [..., B, t, h], the input.
        upstream: [..., B, t, h], the gradient of the output.
        shadows: tensors that replace the layer's trainable parameters during the test, with random
            numbers in place of zeros.

    Attributes:
        result: list of the output and, if a graph is required, the gradients of x and of the
            smallest parameters (`small_parameters`).
        other_leaf: a leaf of the graph that requires a gradient, but is neither a parameter nor an
            argument of the layer; None: there is none.
        cuts_graph: True if a graph is required, and the output has none that leads to x.
        third_party_names: names of third-party modules, forwards and hooks inside the layer.
    """

    def __init__(self, call: LayerCall, x: Tensor, upstream: Tensor, shadows: list[Tensor]) -> None:
        self.call = call
        self.compared = x, upstream
        self.other_leaf: Tensor | None = None
        x = x.detach().clone()  # the layer may write to its input
        x.requires_grad_(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
        try:
            output = self._output(x)
            self.result = [output.detach()]
            self.cuts_graph = x.requires_grad
            if output.requires_grad:
                self.other_leaf = find_other_leaf([output], [x, *shadows])
                leaves = [x, *small_parameters(shadows)]
                gradients = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
                self.cuts_graph = gradients[0] is None
                self.result += zeros_for_missing(gradients, leaves)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise StreamingMismatchError(
                f"{self.layer_names} streams a few random tokens and fails to compute them "
                f"unpatched ({type(error).__name__}: {error}), so the two results cannot be "
                f"compared. {REMEDY}"
            ) from error

    @property
    def layer_names(self) -> str:
        """Return the names of the layer and its attention modules, for error messages."""
        layer = self.call.layer_state.layer
        attentions = distinct_attentions([layer])
        names = {
            f"{type(a).__name__} with attn_implementation={own_implementation(a.config)!r}"
            for a in attentions
        }  # type: ignore[arg-type]
        if names:
            return f"{type(layer).__name__} ({', '.join(sorted(names))})"
        return type(layer).__name__

    def agrees(self, streamed: list[Tensor]) -> bool:
        """True if streambp's result for the input of this run equals `result`, the unpatched
        layer's, up to rounding.

        Args:
            streamed: streambp's result, with the same entries as `result`: the output [..., B, t,
                h], the gradient of x [..., B, t, h], and the gradients of the smallest parameters.
        """
        dtype = coarsest_dtype(self.call, self.compared[0])
        if not all_agree(self.result, streamed, self.compared, dtype):
            return False
        # Compare the parameters' gradients as one long vector: a single gradient may be rounding
        # alone.
        gradients = list(zip(self.result[2:], streamed[2:], strict=True))
        off = sum(float((a - b).float().norm()) ** 2 for a, b in gradients)
        size = sum(float(b.float().norm()) ** 2 for _, b in gradients)
        is_alike = off <= gradient_tolerance(dtype) ** 2 * size
        return is_alike and router_scores_agree(self.call.layer_state.choices, dtype)

    def why_whole(self) -> str | None:
        """Return the reason, as text for `streambp.describe`, to run the layer unchunked; None if
        there is no reason. The layer runs unchunked if its output passes no gradient to its input,
        because chunks would pass zeros. The layer also runs unchunked if it reads a leaf from
        outside (`other_leaf`), because chunks would give this leaf no gradient.

        Raises:
            StreamingMismatchError: the leaf is a flat parameter of FSDP1.
        """
        if self.other_leaf is None:
            return REASON_NO_GRADIENT if self.cuts_graph else None
        if getattr(self.other_leaf, FLAT_PARAMETER, False):
            raise StreamingMismatchError(
                f"{type(self.call.layer_state.layer).__name__} "
                f"{dependence_message(self.other_leaf)}"
            )
        return f"it {dependence_message(self.other_leaf)}, for which chunks would give no gradient"

    def _output(self, x: Tensor) -> Tensor:
        """Run the unpatched layer's forward on x [..., B, t, h] and return its hidden states [...,
        B, t, h]."""
        call, length = self.call, x.shape[-2]
        implementations = [_comparison_implementation(config) for config in call.parts.configs]
        choices = call.layer_state.choices
        choosing = (
            NULL_CONTEXT if choices is None else choices.replay(Chunk(0, 0, length), x.shape[-3])
        )
        with (
            use_implementations(call.parts.configs, implementations),
            record_outputs(call.form.recorded),
            choosing,
            call.autocast.restore(),
            watched_hooks(call.layer_state.layer) as changing,
        ):
            # The first tokens, without caches and states, and with the model's own masks.
            named_arguments = call.arguments.slice_chunk(Chunk(0, 0, length))
            named_arguments = without_caches(named_arguments)
            if STATE_ARGUMENT in named_arguments:
                named_arguments[STATE_ARGUMENT] = None
            named_arguments = call.layer_state.kind.attention.unpatched_arguments(
                named_arguments, length, lambda mask: self._mask(mask, x)
            )
            result = call.layer_state.forward(call.arguments.restore_shape(x), **named_arguments)
        self.third_party_names = list(
            dict.fromkeys(
                [*foreign_parts(call.layer_state.layer, call.layer_state.previous), *changing]
            )
        )
        hidden_states = result[0] if isinstance(result, tuple) else result
        return hidden_states.flatten(-2) if call.arguments.folds else hidden_states

    def _mask(self, mask: LazyMask, x: Tensor) -> Any:
        """Return a causal mask for the tokens of x [..., B, t, h], made by the model's mask
        function.

        Args:
            mask: streambp's description of the model's mask, with the mask function's arguments.
            x: the layer's input.
        """
        config = next(iter(self.call.parts.configs), None)
        implementation = EAGER if config is None else _comparison_implementation(config)
        causal = {
            "batch_size": x.shape[-3],
            "q_length": x.shape[-2],
            "kv_length": x.shape[-2],
            "mask_function": causal_mask_function,
            "attention_mask": None,
            "use_vmap": False,
        }
        if self.call.layer_state.kind.attention.reads_ahead:  # sdpa without a mask reads ahead
            causal["allow_is_causal_skip"] = False
            causal["allow_is_bidirectional_skip"] = False
        plain = {
            "q_offset": 0,
            "kv_offset": 0,
            "dtype": x.dtype,
            "config": config,
            "device": x.device,
        }
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            **{**plain, **mask.description, **causal}
        )


REMEDY = (
    "Restore the original function, or run the model unpatched (streambp.unpatch(model)) with "
    "gradient checkpointing."
)


def run_unpatched(
    call: LayerCall, x: Tensor, upstream: Tensor, shadows: list[Tensor]
) -> UnpatchedRun | None:
    """Run the unpatched layer for comparison, and record the names of third-party modules inside
    the layer in its test results (`LayerTests.third_party_modules`).

    Return None for a layer whose sequence is split over ranks: its own attention would communicate
    with other ranks.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: [..., B, t, h], the input.
        upstream: [..., B, t, h], the gradient of the output.
        shadows: tensors that replace the layer's trainable parameters during the test, with random
            numbers in place of zeros.

    Raises:
        StreamingMismatchError: the unpatched layer raises.
    """
    if not call.has_full_sequence:
        return None
    unpatched = UnpatchedRun(call, x, upstream, shadows)
    call.layer_state.tests.third_party_modules = unpatched.third_party_names
    call.layer_state.tests.results[call.arguments.kind].tested_lengths = {
        ANY_CHUNK_SIZE: 0 if unpatched.third_party_names else sys.maxsize
    }
    return unpatched


def can_run_unpatched(call: LayerCall, x: Tensor, upstream: Tensor) -> bool:
    """True if the unpatched layer runs on x [..., B, t, h] without an exception. An exception of
    the layer in chunks is then due to the chunks. Also true, without a run, for a layer whose
    sequence is split over ranks.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: [..., B, t, h], the input.
        upstream: [..., B, t, h], the gradient of the output.
    """
    if not call.has_full_sequence:
        return True
    try:
        UnpatchedRun(call, x, upstream, [])
    except StreamingMismatchError:
        return False
    return True


def compare_with_unpatched(
    call: LayerCall, x: Tensor, upstream: Tensor, streamed: list[Tensor], shadows: list[Tensor]
) -> str | None:
    """Compare streambp's result with the unpatched layer's, and raise if they differ. Return the
    reason, as text for `streambp.describe`, to run the layer unchunked although the results are
    equal (`UnpatchedRun.why_whole`). None if there is no reason.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: [..., B, t, h], the input.
        upstream: [..., B, t, h], the gradient of the output.
        streamed: streambp's result in one chunk: the output [..., B, t, h], the gradient of x, and
            the gradients of the smallest parameters (`small_parameters`).
        shadows: tensors that replace the layer's trainable parameters during the test, with random
            numbers in place of zeros.

    Raises:
        StreamingMismatchError: the results differ by more than rounding, or FSDP1 holds the layer's
            parameters.
    """
    unpatched = run_unpatched(call, x, upstream, shadows)
    if unpatched is None:
        return None
    if not unpatched.agrees(streamed) and all(bool(part.isfinite().all()) for part in streamed):
        raise StreamingMismatchError(
            f"{unpatched.layer_names} computes other values unpatched than streamed: outputs or "
            "gradients for "
            "a few random tokens differ by more than rounding. A replaced attention function, "
            "mask function or inner forward is a common cause, because streaming does not call "
            "the replacement. Another cause is a module that counts or keeps a running scale. "
            f"{REMEDY}"
        )
    return unpatched.why_whole()


def small_parameters(parameters: list[Tensor]) -> list[Tensor]:
    """Return the parameters [...] whose gradients a test compares: the smallest ones, up to
    `MAX_COMPARED_ELEMENTS` elements altogether."""
    smallest, total = [], 0
    for parameter in sorted(parameters, key=Tensor.numel):
        total += parameter.numel()
        if total > MAX_COMPARED_ELEMENTS:
            break
        smallest.append(parameter)
    return smallest


def gradients_of(output: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the gradients of `leaves` [...]; zeros for leaves that the output does not depend on.
    A layer's test compares the gradients of two runs, in chunks and unchunked.

    Args:
        output: [..., B, t, h].
        leaves: tensors in the graph of `output`.
        upstream: [..., B, t, h], the gradient of `output`.
    """
    gradients = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    return zeros_for_missing(gradients, leaves)


def zeros_for_missing(gradients: Sequence[Tensor | None], leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients [...] of `leaves`, with zeros for gradients that are None. Gradients of
    two runs can then be compared."""
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, gradients, strict=True)
    ]


def _comparison_implementation(config: PreTrainedConfig) -> str:
    """Return the name of the attention implementation for a run of the unpatched layer, "sdpa" or
    "eager". The result is "sdpa" if the config names SDPA or no implementation, unless DeepSpeed
    Ulysses has replaced SDPA. All other implementations may not accept a few test tokens, so eager
    attention runs in their place."""
    name = own_implementation(config) or "sdpa"
    return name if name in ("sdpa", EAGER) and find_ulysses(name) is None else EAGER
