"""Trial of a layer at its call's length: unchunked and in the call's chunks. [Note: foreign
insides]

The trial builds no graph, and both runs use streamed attention, so no [T, T] scores exist. The rest
of the layer needs memory for the full sequence instead of one chunk. If this memory is not
available, fewer tokens are tested; `describe` names the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from streambp.admission.agreement import (
    HALF_TOLERANCE,
    TOLERANCES,
    coarsest_dtype,
    fix_expert_choices,
    router_scores_agree,
)
from streambp.admission.rehearsal import rehearse
from streambp.attention.prefix import Prefix, Stage
from streambp.attention.spans import Spans
from streambp.chunks import Chunk
from streambp.device import MEMORY_ERRORS, is_out_of_memory
from streambp.layer.call import LayerCall
from streambp.layer.layer_state import ANY_CHUNK_SIZE

TOKENS_PER_BLOCK = 64  # tokens whose differences are summed


def why_not_at_length(call: LayerCall) -> str | None:
    """Compare a layer's outputs in chunks and on all tokens at once, at the full length of its
    call. Return the reason, as text for `streambp.describe`, to run the layer unchunked: the
    outputs differ by more than rounding. None if the outputs agree. If memory is short, fewer
    tokens are compared.

    Must be called inside `LayerCall.prepare_layer`, without grad, with the layer in eval mode.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
    """
    layer_state, length = call.layer_state, call.plan.length
    chunks = len(call.plan)
    with call.arguments.replace({}):
        while True:
            try:
                is_alike = _chunks_agree(call, chunks)
                if not is_alike:
                    with fix_expert_choices(call) as choices:
                        is_alike = _chunks_agree(call, chunks) and router_scores_agree(
                            choices, coarsest_dtype(call, call.hidden_states)
                        )
                break
            except MEMORY_ERRORS as error:
                if chunks == 2 or not is_out_of_memory(error):
                    raise
            chunks = max(2, chunks // 2)
    tested_tokens = call.plan[chunks - 1].stop
    names = ", ".join(layer_state.tests.third_party_modules)
    if not is_alike:
        return (
            f"over {tested_tokens} tokens at once it computes something else than in chunks of "
            f"{call.plan.size}: {names} may depend on where a token is in the whole sequence"
        )
    if tested_tokens < length:
        layer_state.tests.max_tested_tokens = tested_tokens
    findings = layer_state.tests.results[call.arguments.kind]
    findings.tested_lengths = {
        ANY_CHUNK_SIZE: 0,
        **(findings.tested_lengths or {}),
        call.plan.size: length,
    }
    return None


def _chunks_agree(call: LayerCall, chunks: int) -> bool:
    """True if the layer's outputs for the first chunks agree with its unchunked output up to
    rounding, in each block of 64 tokens of every row.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        chunks: the number of chunks to compare.
    """
    length = call.plan[chunks - 1].stop
    # Every second token is negated, so that values replayed from an earlier call do not fit.
    # [Note: kept values]
    x = call.hidden_states.detach()[..., :length, :].clone()
    x[..., 1::2, :].neg_()
    carried = call.carried.prefix
    layout = carried.layout
    if (
        call.layer_state.kind.attention.reads_ahead
    ):  # chunks of the test have no keys of later chunks
        layout = Spans.causal(call.rows, carried.length)

    def outputs_of(parts: Sequence[Chunk]) -> Iterator[Tensor]:
        prefix = Prefix(layout, carried.length, carried.attention)
        for _, output in rehearse(call, x, parts, Stage.FORWARD, prefix):
            assert output is not None
            yield output.hidden_states

    (unchunked,) = outputs_of([Chunk(0, 0, length)])
    differences, residuals, sizes = [], [], []  # sums of squares, [..., B, C] each
    parts = call.plan.chunks[:chunks]
    for chunk, output_chunk in zip(parts, outputs_of(parts), strict=True):
        unchunked_chunk = chunk.part(unchunked, -2)
        differences.append(_squares(unchunked_chunk - output_chunk))
        residuals.append(_squares(unchunked_chunk - chunk.part(x, -2)))
        sizes.append(_squares(unchunked_chunk))
    padding = (0, -length % TOKENS_PER_BLOCK)
    difference, addition, size = (  # [..., T] -> the sums over each BLOCK
        torch.nn.functional.pad(torch.cat(squares, -1), padding)
        .unflatten(-1, (-1, TOKENS_PER_BLOCK))
        .sum(-1)
        for squares in (differences, residuals, sizes)
    )
    dtype = coarsest_dtype(call, x)
    tolerance = (
        TOLERANCES.get(dtype, HALF_TOLERANCE) * addition.sqrt()
        + 8 * torch.finfo(unchunked.dtype).eps * size.sqrt()
    )
    return bool(((difference.sqrt() <= tolerance) | ~size.isfinite()).all())


def _squares(x: Tensor) -> Tensor:
    """Return the sum of squares over the last dimension, [..., C, h] -> [..., C], for the norm of a
    difference."""
    return x.float().square().sum(-1)
