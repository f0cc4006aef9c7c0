"""Whether a layer can be cut: found out by running it, before it is first streamed.

A token-shift inside a decoder layer, or a recurrence whose states are not seen, would make chunks compute something else,
silently. So the first call of every layer, and of every new kind, runs a few tokens twice, whole and in chunks, and
compares outputs and, where a graph is wanted, gradients: a state that is handed on without its gradient gives the right
output. What it cannot see: effects of positions far beyond these tokens, which is why layers that count
positions get a `ChunkCache`.

[Note: a trial] Comparing misses a mixing of tokens that is less than rounding, or none as yet because its weights start at
zero. So all runs have other weights where they are zero, and one has attention that does not cross the chunk's end: then
nothing may cross it, which gradients show to the bit, but in layers that hand on states or read a cache. The same run, in
the layer's own mode, shows its side effects.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from streambp.admission.agreement import agree, choices_once, chose_alike, coarsest
from streambp.admission.first_call import SETS, set_once
from streambp.admission.generators import generator_states, generators_of, has_drawn, on_trial
from streambp.admission.insides import watched_hooks
from streambp.admission.long_trial import why_not_at_length
from streambp.admission.own_run import (
    OtherModelError,
    OwnRun,
    gradients_of,
    own_run,
    runs_unpatched,
    small_ones,
    why_unlike_unpatched,
)
from streambp.admission.registry import distinct_attentions, refuse_foreign_attention
from streambp.admission.rehearsal import (
    CHUNK,
    as_trained,
    causal_prefix,
    evaluated,
    may_have_graphs,
    nothing_masked,
    random_like,
    rehearsed,
    rehearsing,
)
from streambp.admission.snapshot import Restored
from streambp.attention.prefix import Prefix, Stage
from streambp.attention.spans import Run, Spans
from streambp.chunks import Chunk, ChunkPlan
from streambp.device import failed_in_a_kernel, has_data, is_out_of_memory, raised_among_kernels
from streambp.errors import AttentionChoiceError, KernelError, StreamBPError
from streambp.known_names import BACKWARD_HOOKS
from streambp.layer.call import LayerCall
from streambp.layer.graphs import Origin, Started, is_kept, nodes_behind
from streambp.layer.side_effects import KEEPS, buffers_of, in_place_of_buffers, written_since
from streambp.layer.site import remember
from streambp.nested import rebuilt
from streambp.recurrent.documents import in_one, in_several, tried_rows
from streambp.recurrent.states import LEAST_TOKENS, leaves_of

MIXES = "it mixes tokens outside of its attention (a convolution, a recurrence?)"
DRAWS = "it draws random numbers elsewhere than from torch's default generators"
EMPTY = "its batch is empty, which tells nothing of the layer"
EDITS = "{} changes gradients inside it, and may do so by where a token is in the whole sequence"
CONVOLVES = "it mixes tokens outside of its attention, in a convolution whose state it hands to no chunk"


class Verdict(NamedTuple):
    """Whether a call streams, and if not, why it runs whole; None where it has nothing to cut."""

    streams: bool
    because: str | None = None


def can_stream(call: LayerCall) -> Verdict:
    """Whether chunks of the layer compute what the whole computes.

    What is judged is the layer, not the batch: hidden states are random and the mask is causal, because padding looks
    alike at every position, and a verdict counts for calls with the same kinds of arguments only. Few tokens are tried as
    well, but their verdict is this call's alone. Without data (meta, fake) values cannot be compared: layers then stream
    that start from the states they keep, or attend and keep none. A single token has nothing to cut; it runs whole,
    because some layers would not run on chunks at all, or is the only chunk where weights on the host allow no graph.

    Raises:
        KernelError: a kernel failed, which says nothing about the layer; to run it whole would hide that.
        StreamBPError: the attention that was asked for cannot do it.
    """
    site, findings = call.site, call.site.found(call.arguments.kind)
    x = call.hidden_states.detach()
    if not x.numel():
        return Verdict(False, EMPTY)
    if findings.judged:  # what is known not to stream does not get here
        return Verdict(True) if site.knows(findings, call.plan) else _judged_at_length(call)
    if not has_data(x):
        if not (site.kind.states.carries or site.kind.attention.reads_a_mask):  # its structure alone does not tell
            return Verdict(False)
        because = CONVOLVES if not site.kind.states.carries and _convolves(call.layer) else None
        if site.kind.states.carries:
            try:
                with call.streaming(), on_trial(call), evaluated(call):
                    because = _unread_state(call, x)
            except StreamBPError:
                raise
            except Exception as error:
                because = broken(error)
        if because is not None:
            findings.judge(because)
        return Verdict(because is None, because)
    if x.shape[-2] == 1:
        return Verdict(site.on_host)
    try:
        call.arguments.cut(Chunk(0, 0, call.arguments.length))
    except StreamBPError as error:
        return Verdict(False, str(error))
    if call.configs:
        refuse_foreign_attention(distinct_attentions([call.layer]))
    because, certain, _ = _judged(call, x)
    if because is not None or not certain or site.knows(site.found(call.arguments.kind), call.plan):
        return Verdict(because is None, because)
    return _judged_at_length(call)


class Found(NamedTuple):
    """What a trial found: why the layer cannot be cut, None if it can.

    certain: whether that will be so for any batch. passes: whether the reason may be gone at the next call.
    """

    because: str | None
    certain: bool = True
    passes: bool = False


def _judged(call: LayerCall, x: Tensor) -> Found:
    """What a trial finds, which is remembered where it holds for calls of this kind to come."""
    site, kind = call.site, call.arguments.kind
    found = _why_not(call, x)
    call.arguments.renamed(call.look.kind)  # without what the layer's own forward has changed
    findings = remember(site.findings, call.arguments.kind, site.findings.pop(kind))
    if found.because is not None and found.passes:
        findings.doubt(found.because)
    elif found.certain:
        findings.judge(found.because)
    return found


def _judged_at_length(call: LayerCall) -> Verdict:
    """Whether the call's own chunks give what its sequence gives at once. [Note: foreign insides]"""
    findings = call.site.found(call.arguments.kind)
    with rehearsing(call), on_trial(call), evaluated(call), torch.no_grad():
        try:
            because = why_not_at_length(call)
        except Exception as error:
            if isinstance(error, StreamBPError) or is_out_of_memory(error) or failed_in_a_kernel(error, call.device):
                raise
            findings.judged = False
            findings.doubt(broken(error))
            return Verdict(False, broken(error))
    findings.judge(because)
    return Verdict(because is None, because)


def _why_not(call: LayerCall, hidden_states: Tensor) -> Found:
    """Why chunks compute something else, None if they do not. [Note: a trial leaves nothing]"""
    if not call.site.kind.states.carries and _convolves(call.layer):
        return Found(CONVOLVES)
    apart = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)  # from a checkpoint around the model
    with apart, rehearsing(call), on_trial(call) as state:
        with torch.no_grad():
            x, upstream = random_like(hidden_states), random_like(hidden_states)
        named, length = call.arguments.named, x.shape[-2]
        # Several documents, if the call has several.
        documents = in_several(named, length) if call.packing.told else {}
        rows = None if call.packing.rows is None else tried_rows(x.shape[-3], length)
        with call.arguments.replaced({**nothing_masked(named, length), **documents}, rows):
            try:
                found = _compared(call, x, upstream, state)
            except Exception as error:
                found = _failed(call, x, upstream, error, state)
        if found.because in (None, MIXES) and call.site.kind.states.carries:
            state.rewind()
            try:
                with evaluated(call):
                    found = found._replace(because=_unread_state(call, x) or found.because)
            except Exception as error:
                found = _failed(call, x, upstream, error, state)
        if not found.passes:
            call.look = call.site.fingerprint.learn(call.layer, call.look)
    return found._replace(certain=found.certain and hidden_states.shape[-2] > CHUNK)


def _compared(call: LayerCall, x: Tensor, upstream: Tensor, state: Restored) -> Found:
    """Why chunks compute something else, by what the layer leaves behind, by a mix of gradients and by values."""
    chunk_size = min(CHUNK, -(-x.shape[-2] // 2))
    generators = generators_of(call.site, call.look)
    drawn = generator_states(generators)
    with watched_hooks(call.layer, BACKWARD_HOOKS) as editing:
        because = _try(call, x, upstream, chunk_size)
        if has_drawn(generators, drawn):
            return Found(DRAWS)
        if because is not None and not editing:
            return Found(because)
        if because is None and (names := set_once(call, x, state)):
            return Found(SETS.format(", ".join(names)), passes=True)
        with evaluated(call), as_trained(call) as shadows:
            found = _why_unlike(call, x, upstream, chunk_size, shadows or [], state)
    return Found(EDITS.format(", ".join(dict.fromkeys(editing)))) if editing else found


def _failed(call: LayerCall, x: Tensor, upstream: Tensor, error: Exception, state: Restored) -> Found:
    """What an exception in a trial says of the layer: it cannot be cut, if the exception comes again; nothing, if the
    layer unpatched raises on these tokens as well, which the call itself will tell.

    Raises:
        Exception: it is for the caller.
    """
    if isinstance(error, AttentionChoiceError | OtherModelError) or is_out_of_memory(error):
        raise error
    if isinstance(error, StreamBPError) and raised_among_kernels(error):
        raise error  # the attention that was asked for cannot do it
    if failed_in_a_kernel(error, x.device):
        raise KernelError(
            f"A kernel failed when {type(call.layer).__name__} was tried on {x.shape[-2]} tokens "
            f"({type(error).__name__}: {error}). It would fail in training as well. Set another attention in "
            "StreamConfig ('flash', or 'math', which uses torch's own products alone), or run the model unpatched "
            "to see whether it fails there too."
        ) from error
    state.rewind()
    return Found(broken(error), certain=False, passes=runs_unpatched(call, x, upstream))


def _why_unlike(call: LayerCall, x: Tensor, upstream: Tensor, cut: int, shadows: list[Tensor], state: Restored) -> Found:
    """Why chunks give something else than the layer unpatched, None if they do not; uncertain if values are not finite.

    Where they are alike, which a run of each tells, there is nothing to explain. Else the layer streamed in one chunk comes
    between them: is it the cut, or what streaming computes? Each run starts from what the layer keeps by now, as the
    call itself will.
    """
    if (own := _alike(call, x, upstream, cut, shadows, state)) is not None:
        return Found(own.why_whole())
    # They differ by more than rounding, or because a router ties.
    state.rewind()
    with choices_once(call) as choices:
        whole = _run(call, x, upstream, judged=small_ones(shadows))
        state.rewind()
        if call.packing.marks_documents:  # a document per row: of several the unpatched layer may not be told
            with call.arguments.replaced(in_one(call.arguments.named)), choices_once(call):
                streamed = _run(call, x, upstream, judged=small_ones(shadows))
                state.rewind()
                because = why_unlike_unpatched(call, x, upstream, streamed, shadows)
        else:
            because = why_unlike_unpatched(call, x, upstream, whole, shadows)
        if because is not None:
            return Found(because)
        state.rewind()
        pieces = _run(call, x, upstream, cut)
        dtype = coarsest(call, x)
        alike = all(agree(*pair, dtype) for pair in zip(whole, pieces, (x, upstream), strict=False))
        if alike and chose_alike(choices, dtype):
            return Found(None)
    if not all(bool(part.isfinite().all()) for part in whole):
        return Found(None, certain=False)  # weights are still to be loaded
    if changed := state.changes():  # by which the first chunk sets something, or a later one reads it
        return Found(SETS.format(", ".join(changed)), passes=True)
    return Found(MIXES)


def _alike(call: LayerCall, x: Tensor, upstream: Tensor, cut: int, shadows: list[Tensor], state: Restored) -> OwnRun | None:
    """The layer's own run, if its chunks gave the same; None if not, or if either failed or has to be told of documents."""
    if call.packing.marks_documents:
        return None
    try:
        state.rewind()
        own = own_run(call, x, upstream, shadows)
        state.rewind()
        pieces = [] if own is None else _run(call, x, upstream, cut, small_ones(shadows))
    except Exception as error:  # which of them, and why, `_why_unlike` finds out
        if is_out_of_memory(error):
            raise
        return None
    return own if own is not None and own.agrees(pieces) else None


def _try(call: LayerCall, x: Tensor, upstream: Tensor, cut: int) -> str | None:
    """Why chunks would compute something else, as far as one run of x [..., B, TOKENS, h] tells. [Note: a trial]"""
    if not may_have_graphs(call):
        return None
    origin = Origin()
    kept = weakref.ref(origin)
    before = buffers_of(call.layer)
    with in_place_of_buffers(before):
        mixes = _crosses(call, x, upstream, cut, origin)
        written = sorted({name for _, name in written_since(before)})
    origin.trying = False
    del origin
    if torch.is_grad_enabled() and is_kept(kept):
        return KEEPS
    if written:
        return f"its forward writes to buffers ({', '.join(written)}), and would for each chunk and once more in backward"
    return MIXES if mixes else None


def _crosses(call: LayerCall, x: Tensor, upstream: Tensor, cut: int, origin: Origin) -> bool:
    """Whether anything but attention and states takes a gradient from before `cut` to behind it or back."""
    before, behind = slice(cut), slice(cut, x.shape[-2])
    kind = call.site.kind
    if kind.states.carries or not kind.attention.ours:
        _on_trial(call, x, Spans.causal(x.shape[-3], x.shape[-2]), origin)
        return False
    layout = Spans(x.shape[-2], ((Run(0, cut, 0), Run(cut, x.shape[-2], cut)),) * x.shape[-3])
    with as_trained(call), torch.enable_grad():
        for there, here in ((before, behind), (behind, before)):
            leaf, output = _on_trial(call, x, layout, origin)
            if output.requires_grad:
                # The graph stays for hooks that keep what they see: their backward leads to `origin`, which names them.
                (grad,) = torch.autograd.grad(output[..., here, :], leaf, upstream[..., here, :], retain_graph=True)
                across = grad[..., there, :]
                if bool(across.isfinite().all()) and bool(across.any()):
                    return True
    return False


def _on_trial(call: LayerCall, x: Tensor, layout: Spans, origin: Origin) -> tuple[Tensor, Tensor]:
    """A leaf of the values x [..., B, TOKENS, h], and what the layer gives for it with a graph that starts at `origin`."""
    length = x.shape[-2]
    prefix = Prefix(layout, length, "math")
    prefix.overwritten = True  # whether the layer writes to its attention's output is not known yet
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        ((_, output),) = rehearsed(call, Started.apply(leaf, origin, True), [Chunk(0, 0, length)], Stage.RECOMPUTE, prefix)
    assert output is not None
    return leaf, output.hidden_states


def _unread_state(call: LayerCall, x: Tensor) -> str | None:
    """Why a layer with states cannot be cut: what a chunk gives does not come from a state that the one before ended with.

    Before transformers 5.15 most mixers go on from their states with a single token only. In half precision what a state
    changes within a few tokens may be less than rounding, and nothing where weights start at zero. So the graph is asked,
    which is there without data as well; of states that are no floating numbers it knows nothing.
    """
    size = min(CHUNK, x.shape[-2] // 2)
    if size < LEAST_TOKENS or any(parameter.is_inference() for parameter in call.layer.parameters()):
        return None
    named = {**nothing_masked(call.arguments.named, x.shape[-2]), **in_one(call.arguments.named)}
    with torch.inference_mode(False), torch.enable_grad():
        if x.is_inference():  # a graph may not save what was made there
            x, named = x.clone(), rebuilt({**call.arguments.named, **named}, Tensor.clone)
        with call.arguments.replaced(named):
            chunks, prefix = ChunkPlan(2 * size, size), causal_prefix(call, 2 * size)
            _, (states, output) = rehearsed(call, x, chunks, Stage.RECOMPUTE, prefix, leaves_of)
    assert output is not None
    assert states is not None
    read = {id(getattr(node, "variable", None)) for node in nodes_behind([output.hidden_states])}
    kinds = sorted({key.kind for key, state in states.items() if state.requires_grad and id(state) not in read})
    if not kinds:
        return None
    return f"it mixes tokens outside of its attention, and goes on from its {' and '.join(kinds)} state with one token only"


def broken(error: Exception) -> str:
    """Why a layer runs whole that raised this when it was cut."""
    return f"its forward does not work on chunks ({type(error).__name__}: {error})"


def _convolves(layer: nn.Module) -> bool:
    """Whether it mixes neighbouring tokens. That may be less than half precision's tolerance, too."""
    return any(isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 for module in layer.modules())


def _run(
    call: LayerCall, x: Tensor, upstream: Tensor, chunk_size: int | None = None, judged: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The layer's output for x [..., B, TOKENS, h] and, where a graph is wanted, gradients for that upstream: of x, and of
    the judged parameters.

    Args:
        chunk_size: in chunks that hand states on; None: at once, without a cache.
    """
    graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    stage = Stage.RECOMPUTE if graph else Stage.FORWARD
    x = x.detach().requires_grad_(graph)
    length = x.shape[-2]
    prefix = causal_prefix(call, length)
    prefix.overwritten = graph  # whether the layer writes to its attention's output is not known yet
    if chunk_size is None:
        outputs = rehearsed(call, x, [Chunk(0, 0, length)], stage, prefix, lambda _: None)
    else:
        plan = ChunkPlan(length, chunk_size)
        plan = plan.avoiding(call.packing.barriers) if call.packing.barriers else plan
        outputs = rehearsed(call, x, plan.with_least(LEAST_TOKENS), stage, prefix)
    whole = torch.cat([output.hidden_states for _, output in outputs if output is not None], -2)  # [..., B, TOKENS, h]
    if not whole.requires_grad:
        return [whole.detach()]
    # One graph over all chunks is differentiated last to first, too: the engine takes the newest nodes first.
    return [whole.detach(), *gradients_of(whole, [x, *judged], upstream)]
