"""A call of a decoder layer: it streams in chunks, or runs whole, or is refused with a reason."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.checkpointed import run_whole
from streambp.admission.probe import can_stream
from streambp.admission.trials import look_for_writes, unread_products
from streambp.attention.masks import LazyMask
from streambp.attention.own import PaddingMask, PlainMask, biases_positions, own_mask, why_picked_blocks_stay_whole
from streambp.distributed.engines import reduced_after_backward, reductions_of
from streambp.errors import UnsupportedModelError
from streambp.fingerprint.looks import versions_of
from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import STATE
from streambp.layer.arguments import Arguments
from streambp.layer.call import LayerCall
from streambp.layer.carried import attention_mask_of
from streambp.layer.function import Passes, StreamedLayer, run_backward, run_forward
from streambp.layer.oom import explained
from streambp.layer.outputs import deliver
from streambp.layer.reuse import counts_when_alone
from streambp.layer.shadows import Parameters, slots_of
from streambp.layer.site import LayerSite, attention_configs
from streambp.recurrent.documents import PackedRows
from streambp.recurrent.scans import scans_selectively
from streambp.recurrent.segments import arguments_that_tell, mixers_of

backward_in_chunks = functools.partial(run_backward, unread_products)


IN_CHUNKS = Passes(LayerCall, run_forward, backward_in_chunks, run_whole)


def stream_layer(site: LayerSite, args: Any, kwargs: Any, passes: Passes | None = None) -> Any:
    """What the layer's forward returns for these arguments, computed in chunks of the sequence.

    Args:
        site: a decoder layer whose only work across tokens is attention through transformers' interface. Whether that is
            so is found out at its first call of each kind; if not, such calls run whole and checkpointed.
        passes: how; None: chunk by chunk.

    Raises:
        UnsupportedModelError, UnsupportedMaskError, StreamBPError: it cannot be computed exactly; nothing was changed.
    """
    passes = passes or IN_CHUNKS
    look = site.fingerprint.look(site.layer)
    site.of(_refuse_inner_fsdp)
    counts_when_alone()
    _refuse_states_given(site)
    packed_rows = None if site.states is None else site.packed_rows
    forward = type(site.layer).forward
    arguments = Arguments(forward, site.layer, args, kwargs, site.counts_positions, packed_rows, look.kind)
    if site.packed_rows is not None:
        _tell_of_documents(site, site.packed_rows, arguments)
    site.because = look.hooks.why_whole() or site.verdicts.get(arguments.kind) or _take_mask(site, arguments)
    if site.because is not None:
        return passes.whole(site, args, kwargs)
    call: LayerCall = passes.make(site, arguments)
    hidden_states = call.hidden_states
    parameters = Parameters(site.layer, hidden_states.device, site.of(slots_of))
    call.look = look
    with explained(call):
        failed, streams = look_for_writes(call), can_stream(call)
    if not streams:
        if arguments.tells:  # its kernels do something else than they are told
            site.kernels_told = False
            return stream_layer(site, args, kwargs, passes)
        return passes.whole(site, args, kwargs)
    if failed is not None:
        raise failed
    versions = versions_of(call.look)
    inputs = call.arguments.inputs
    if torch.is_grad_enabled() and (hidden_states.requires_grad or inputs or parameters.groups):
        call.hidden_states = hidden_states.detach()
        if site.offloader is not None:
            call.kept.save_to(site.offloader)
        hidden_states = reduced_after_backward(site.of(reductions_of), hidden_states)
        output, *extras = StreamedLayer.apply(passes, call, parameters, hidden_states, *inputs, *parameters.current())
        call.arguments.inputs = []
    else:
        output, *extras = passes.forward(call, False)
        if site.fingerprint.pending:
            site.fingerprint.learn(site.layer, call.look, versions)
    by_place = dict(zip(call.extras, extras, strict=True))
    deliver(by_place, call.arguments.mappings)
    return call.wrap(output, by_place)


def _take_mask(site: LayerSite, arguments: Arguments) -> str | None:
    """Why the layer cannot be cut with this call's attention mask; None if it can. Its own kind becomes an `OwnMask`."""
    mask = attention_mask_of(arguments.named)
    if site.states is not None and (because := _why_documents_stay_whole(site, arguments)) is not None:
        return because
    if site.cache is not None:
        by_sdpa = {config._attn_implementation for config in site.of(attention_configs)} == {"sdpa"}
        causal = PlainMask(torch.empty(0, device=arguments.hidden_states.device)) if mask is None and by_sdpa else None
        found = causal or own_mask(mask, arguments.length, by_sdpa)
        if isinstance(found, str):
            return found
        if site.packed_rows is not None and isinstance(found, PaddingMask | PlainMask):
            raise UnsupportedModelError(
                f"position_ids mark {site.packed_rows.number} documents of packed rows, which the attention of "
                f"{type(site.layer).__name__} is not told of: its mask knows padding alone, while the model's recurrent "
                "layers would compute the documents apart. Pass one document per row, or "
                "StreamConfig(documents='as_given') to let all layers go on from one to the next, as unpatched."
            )
        positions = arguments.named.get("position_ids")
        because = why_picked_blocks_stay_whole(site.layer, positions, found, arguments.length, by_sdpa)
        if because is not None:
            return because
        # Which gives an empty query 0, in a chunk as in the whole; with a position bias it is given another mask.
        if by_sdpa and found.mask.dtype == torch.bool and not biases_positions(site.layer):
            found = dataclasses.replace(found, empty=None)
        arguments.named["attention_mask"] = found
        return None
    known = mask is None or isinstance(mask, LazyMask) or (isinstance(mask, Tensor) and mask.dim() == 4)
    return None if known or not site.attends else "its attention_mask is not for attention alone"


def _why_documents_stay_whole(site: LayerSite, arguments: Arguments) -> str | None:
    """Why a layer with states cannot be cut where it is told of documents; None if it can, or is not told."""
    documents = arguments.documents
    site.told = () if documents is None else documents.names
    if documents is None:
        return None
    if documents.ids is not None and scans_selectively(site.layer):
        # Told in training its fused kernel mixes them, in eval mode its convolution does not: the mode decides, not chunks.
        return "seq_idx says where documents start, which its selective scan takes no notice of"
    return documents.why_not_cut(arguments.length)


def _tell_of_documents(site: LayerSite, packed_rows: PackedRows, arguments: Arguments) -> None:
    """Attention's mask, and kernels that can be told, learn of documents that position_ids mark."""
    mask = attention_mask_of(arguments.named)
    if isinstance(mask, LazyMask):
        mask.ends = packed_rows.ends
    if site.states is not None and site.kernels_told:
        names = arguments_that_tell(mixers_of(site.layer), len(packed_rows.ends))
        if names:
            arguments.tell(packed_rows.told_as(names, arguments.hidden_states.device))


def _refuse_states_given(site: LayerSite) -> None:
    if site.packed_rows is not None and site.states is not None and (site.states == STATE or not mixers_of(site.layer)):
        raise UnsupportedModelError(
            f"position_ids mark {site.packed_rows.number} documents in packed rows, but no module inside "
            f"{type(site.layer).__name__} can be called for one of them: the layer takes its states as an argument, and "
            "would go on from one document to the next. Pass one document per row, or let it go on, as unpatched: "
            "StreamConfig(documents='as_given')."
        )


def _refuse_inner_fsdp(layer: nn.Module) -> None:
    for name, module in layer.named_modules():
        if module is not layer and is_fsdp_unit(module):
            raise UnsupportedModelError(
                f"{name} inside {type(layer).__name__} is an FSDP unit of its own; streamed layers would gather it once "
                "per chunk and lose gradients. Apply fully_shard to whole decoder layers only."
            )
