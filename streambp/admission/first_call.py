"""Find values that a layer sets at its first call and reads in later calls. [Note: a trial leaves
nothing]"""

from __future__ import annotations

import torch
from torch import Tensor

from streambp.admission.generators import learn_changes
from streambp.admission.own_run import StreamingMismatchError
from streambp.admission.rehearsal import TRIAL_CHUNK_SIZE, causal_prefix, may_have_graphs, rehearse
from streambp.admission.snapshot import StateRestorer
from streambp.attention.prefix import Stage
from streambp.chunks import Chunk
from streambp.device import RandomState
from streambp.layer.call import LayerCall

REASON_FIRST_CALL = "its forward initialises itself at its first call ({})"
TOKEN_SCALE = (
    64  # times larger than other tokens: what keeps a running value shows in half precision
)


def find_values_set_once(call: LayerCall, x: Tensor, state: StateRestorer) -> list[str]:
    """Return the names of the values that a layer computes from the tokens of its first call and
    never changes again, such as a scale; [] if there are none. Chunks would compute the value from
    the first chunk alone, so the caller runs the layer unchunked.

    If a stored value has changed since the start of the test, the layer runs again, on the same
    tokens and on fewer, larger ones. A value that later runs change too is left out of the result.
    A value that does not depend on the tokens is left out as well.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: [..., B, t, h], random hidden states.
        state: finds stored values that have changed since the start of the test, and restores them.

    Raises:
        StreamingMismatchError: the layer returns different values for the same tokens.
    """
    # The trial had a graph, and random numbers in place of zeros in trained weights. Third-party
    # code may take such zeros for a missing value.
    if not torch.is_grad_enabled() or state.has_foreign_code:
        _run_once(call, x)
    names = state.changes()
    if not names:
        return []
    learn_changes(call, state)
    state.rewind()
    first = _run_once(call, x)
    state.end_run()
    _run_once(call, x[..., :TRIAL_CHUNK_SIZE, :] * TOKEN_SCALE)
    repeated = _run_once(call, x)
    if bool(first.isfinite().all()) and not _repeats(first, repeated):
        raise StreamingMismatchError(
            f"{type(call.layer_state.layer).__name__} returns different values for the same "
            f"tokens: {', '.join(names)} changed during a test on a few random tokens (a counter or a "
            "running scale?). Chunks would change the value as well. Register the value as a "
            "buffer (register_buffer): then the layer runs unchunked, and its recomputation "
            "starts from the same value."
        )
    names = state.values_set_once()
    if names:  # a constant may be set at any time
        state.rewind()
        _run_once(call, x[..., :TRIAL_CHUNK_SIZE, :] * TOKEN_SCALE)
        names = [name for name in state.values_set_again() if name in names]
    return names


def _repeats(first: Tensor, repeated: Tensor) -> bool:
    """True if two outputs [..., B, t, h] for the same tokens are equal: to the bit on a CPU, up to
    rounding on other devices. Otherwise `find_values_set_once` raises."""
    if torch.equal(first, repeated) or first.device.type == "cpu":
        return torch.equal(first, repeated)
    tolerance = 2 * torch.finfo(first.dtype).eps * first.float().norm()
    return bool((first - repeated).float().norm() <= tolerance)


def _run_once(call: LayerCall, x: Tensor) -> Tensor:
    """Run the layer for `find_values_set_once` on x [..., B, t, h], all tokens at once and in the
    layer's present train or eval mode. Return the output. Every call draws the same random numbers,
    so that two calls can be compared."""
    graph = torch.is_grad_enabled() and may_have_graphs(call)
    prefix = causal_prefix(call, x.shape[-2])
    prefix.overwritten = graph  # the layer may write to its attention's output
    leaf, stage = x.detach().requires_grad_(graph), Stage.RECOMPUTE if graph else Stage.FORWARD
    with RandomState.capture(call.device).replay():
        ((_, output),) = rehearse(
            call, leaf, [Chunk(0, 0, x.shape[-2])], stage, prefix, lambda _: None
        )
    assert output is not None
    return output.hidden_states.detach()
