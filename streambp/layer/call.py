"""One call of one decoder layer over one batch. `LayerCall` cuts the sequence into chunks, prepares
the layer for running on a chunk, and runs the layer's own forward on one chunk at a time. The loops
over chunks are in `function.py`.

`LayerCall` also contains the values that pass from chunk to chunk (`carried`) and the tensors saved
for backward (`saved`). See `layer/__init__.py`. The functions of this file join the chunks' outputs
to those of the full sequence, and return them in the form of the layer's own result.

A decoder layer has three kinds of outputs beside its hidden states. Transformers' forward hooks
record modules inside the layer (router logits for the load-balancing loss). Some layers write keys
and values into a mapping that later layers read. Some layers return a tensor behind their hidden
states. All three are outputs of the layer's autograd Function and receive gradients. States are not
outputs of the layer, only of a chunk. See `recurrent/states.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedConfig
from transformers.utils import output_capturing

from streambp.attention.attend import AttentionOutput
from streambp.attention.indexers import indexers_of, pick_keys
from streambp.attention.interface import route_attention
from streambp.attention.kv import PrefixMemory
from streambp.attention.mask_scan import move_ends
from streambp.attention.prefix import (
    ChunkAttention,
    Prefix,
    PrefixChunkAttention,
    RefillDone,
    Stage,
)
from streambp.chunks import Chunk, ChunkPlan, merge_barriers, plan_chunks
from streambp.distributed.engines import engine_hooks, engine_ownership, silence_engine_hooks
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.fingerprint.snapshots import ForwardSnapshot, LayerSnapshot
from streambp.foreign import compiled_submodules
from streambp.known_names import CHECKPOINTING_ATTRIBUTES
from streambp.layer.adapters import Factors, bytes_of, fuse_adapters
from streambp.layer.arguments import Arguments
from streambp.layer.chunk_states import CrossChunkState
from streambp.layer.layer_state import LayerState
from streambp.layer.oom import RUN_ONCE, run_with_retry
from streambp.layer.packed_experts import decode_once
from streambp.layer.packing import ONE_DOCUMENT, Packing
from streambp.layer.products import TensorCallback, tap_linears
from streambp.layer.recompute import NULL_CONTEXT, Autocast, Parameters, disable_checkpointing
from streambp.layer.saved_tensors import DeviceTensors, SavedForBackward
from streambp.layer.witness import Witness
from streambp.offload.gradients import SendGradients
from streambp.offload.manager import OffloadManager
from streambp.recurrent.states import MIN_CHUNK_TOKENS, States

RecordedOutputs = dict[str, list[Tensor]]
RETURN_VALUE_NAME = "returned"  # name of the return values behind hidden_states


@dataclasses.dataclass(frozen=True)
class OutputSlot:
    """Identifier of one output of a layer beside its hidden states. The output is a tensor that a
    transformers hook records (router logits), a tensor in a dict argument (shared keys), or a
    further return value.

    Attributes:
        name: the key under which the hook records, the dict's argument name, or
            `RETURN_VALUE_NAME`.
        index: the index among the recorded tensors, the tensors of the dict's entry, or the return
            values behind hidden_states.
        key: the key in the dict; None: no dict.
        flat: True if transformers' hook recorded the tensor as [B * C, ...]; False: as [B, C, ...].
            `ChunkOutput.extras` has the tensor as [B, C, ...] in both cases.
    """

    name: str
    index: int
    key: str | None = None
    flat: bool = False

    @property
    def dim(self) -> int:
        """Return the dimension of the output that counts tokens: -2 for tensors in a dict argument,
        else 1."""
        return 1 if self.key is None else -2


@dataclasses.dataclass
class ChunkOutput:
    """Outputs of a layer's forward for one chunk.

    Attributes:
        hidden_states: [..., C, h].
        extras: the layer's other outputs by `OutputSlot`: [..., C, D] for tensors in a dict
            argument, [B, C, ...] for others.
        states: the recurrent states at the chunk's end; {}: the layer has none.
    """

    hidden_states: Tensor
    extras: dict[OutputSlot, Tensor]
    states: States = dataclasses.field(default_factory=dict)


def collect_outputs(
    hidden_states: Tensor,
    return_values: dict[int, Tensor],
    recorded: RecordedOutputs,
    mappings: dict[str, tuple[Any, Any]],
) -> ChunkOutput:
    """Return a chunk's outputs as one `ChunkOutput`.

    Args:
        hidden_states: the layer's hidden states, [..., C, h].
        return_values: the return values behind hidden_states, [B, C, ...], by index.
        recorded: the tensors that transformers' hooks recorded, by key.
        mappings: pair of each dict argument's content before the layer ran and after, by name.

    Raises:
        UnsupportedModelError: a recorded tensor is neither [B * C, ...] nor [B, C, ...].
    """
    if return_values:
        extras = {
            OutputSlot(RETURN_VALUE_NAME, index): tensor for index, tensor in return_values.items()
        }
    else:
        extras = {}
    rows, tokens = hidden_states.shape[-3:-1]
    for name, tensors in recorded.items():
        for index, tensor in enumerate(tensors):
            flat = tensor.shape[0] == rows * tokens and tuple(tensor.shape[:2]) != (rows, tokens)
            if not flat and tuple(tensor.shape[:2]) != (rows, tokens):
                raise UnsupportedModelError(
                    f"{name} recorded inside a layer has shape {tuple(tensor.shape)}; expected was "
                    f"[{rows * tokens}, ...] or [{rows}, {tokens}, ...]. Leave output_{name} out, "
                    "or run this model unpatched."
                )
            extras[OutputSlot(name, index, flat=flat)] = (
                tensor.unflatten(0, (rows, tokens)) if flat else tensor
            )
    for name, (previous, current) in mappings.items():
        for key, parts in current.items():
            if (
                key not in previous or parts is not previous[key]
            ):  # new tuples of tensors [..., C, D]
                extras.update(
                    {OutputSlot(name, index, key): part for index, part in enumerate(parts)}
                )
    return ChunkOutput(hidden_states, extras)


# hidden states [..., T, h] and the extra outputs of the whole sequence
FullOutputs = dict[OutputSlot | None, Tensor]


def write_chunk(
    outputs: FullOutputs, output: ChunkOutput, chunk: Chunk, length: int
) -> ChunkOutput:
    """Copy a chunk's outputs into the outputs of the full sequence, and return `output` unchanged.
    An output that has all `length` positions already is stored without a copy.

    Args:
        outputs: dict of the full sequence's outputs, modified in place: key None holds the hidden
            states [..., T, h], the other keys are `OutputSlot`s. Missing outputs are allocated.
        output: the chunk's outputs.
        chunk: the chunk's range of positions.
        length: T, the length of the full sequence.
    """
    for slot, part in ((None, output.hidden_states), *output.extras.items()):
        dim = -2 if slot is None else slot.dim
        if part.shape[dim] == length:
            outputs[slot] = part
            continue
        if slot not in outputs:
            shape = list(part.shape)
            shape[dim] = length
            outputs[slot] = part.new_empty(shape)
        if part.shape[-1] > outputs[slot].shape[-1] and not part.is_floating_point():
            # Keys picked by each query. Early chunks have fewer keys and pick all; padding repeats
            # key 0.
            outputs[slot] = torch.nn.functional.pad(
                outputs[slot], (0, part.shape[-1] - outputs[slot].shape[-1])
            )
        chunk.part(outputs[slot], dim).copy_(part)
    return output


def deliver_outputs(extras: dict[OutputSlot, Tensor], mappings: Mapping[str, Any]) -> None:
    """Write a layer's outputs beside its hidden states to where callers read them. Tensors recorded
    by hooks go to transformers' output collector, and tensors of dict arguments to the caller's
    dicts.

    Values that the layer returns behind its hidden states are left out: `LayerCall.wrap` returns
    them.

    Args:
        extras: recorded tensors [B, T, ...], which the collector gets as [B * T, ...] if `flat`,
            and tensors [..., T, D] of dict arguments.
        mappings: the caller's dicts, by argument name.
    """
    collector = output_capturing._active_collector.get()
    entries: dict[tuple[str, str], list[Tensor]] = {}
    for slot, tensor in extras.items():
        if slot.name == RETURN_VALUE_NAME:
            continue
        if slot.key is None:
            assert collector is not None
            collector[slot.name].append(tensor.flatten(0, 1) if slot.flat else tensor)
        else:
            entries.setdefault((slot.name, slot.key), []).append(tensor)
    for (name, key), parts in entries.items():
        mappings[name][key] = tuple(parts)


@contextlib.contextmanager
def record_outputs(keys: tuple[str, ...]) -> Iterator[RecordedOutputs]:
    """Context manager in which transformers' output hooks record into the yielded dict, instead of
    the model's own collector. The model's collector would take each chunk's tensors for those of
    another layer.

    Args:
        keys: the keys to record.
    """
    collected: RecordedOutputs = {key: [] for key in keys}
    token = output_capturing._active_collector.set(collected)
    try:
        yield collected
    finally:
        output_capturing._active_collector.reset(token)


TRIAL_TOKENS = 3  # tokens of a trial
# Adapters' factors stay from forward to backward if the layer's input is this many times as large.
MIN_INPUT_FACTOR_RATIO = 8
# Reasons for a chunk beyond the requested length.
REASON_LONG_CHUNK_MASK = "its attention mask has no end sooner (an image, a prefix)"
REASON_LONG_CHUNK_DOCUMENTS = "documents of packed rows have no end sooner"
REASON_LONG_CHUNK_FORKS = (
    "prefixes that rows share end there, and its states leave no shorter chunk between"
)
REASON_LONG_CHUNK_STATES = (
    "its states are handed on from {} tokens or more, and the rest of a sequence has less"
)


@dataclasses.dataclass(frozen=True)
class LayerParts:
    """Facts about a decoder layer's modules that each call needs.

    Attributes:
        forward: the unpatched forward.
        configs: the transformers configs whose `_attn_implementation` is replaced while the layer
            runs.
        indexers: the modules that pick keys for each query (DeepSeek sparse attention).
            [Note: indexers]
        runs_compiled: True if a module inside is compiled.
        engine_hooks: the modules' hook dicts that contain hooks of DeepSpeed or accelerate.
        checkpointed: the modules with a `gradient_checkpointing` flag, set to False for each run.
    """

    forward: Callable[..., Any]
    configs: list[PreTrainedConfig]
    indexers: list[nn.Module]
    runs_compiled: bool
    engine_hooks: list[dict[int, Any]]
    checkpointed: list[nn.Module]

    @classmethod
    def find(cls, layer_state: LayerState, layer: nn.Module) -> LayerParts:
        """Return the facts about `layer`: its unpatched forward, configs, indexers, hooks and
        checkpointed modules. Some of them are cached in `layer_state`, the layer's state."""
        hooks, checkpointed = find_disabled_parts(layer)
        return cls(
            layer_state.forward,
            layer_state.cached_result(layer_state.kind.attention.configs),
            layer_state.cached_result(indexers_of),
            bool(layer_state.cached_result(compiled_submodules)),
            hooks,
            checkpointed,
        )


@dataclasses.dataclass
class ResultForm:
    """Form in which a decoder layer returns its outputs.

    Attributes:
        recorded: keys that transformers' output collector records inside the layer, such as router
            logits.
        collected: tensors that transformers' hooks recorded in the current chunk.
        extras: identifiers of the outputs beside hidden_states, in the order of the autograd
            Function's outputs.
        is_tuple: True if the layer returns a tuple; False: a tensor.
        width: the number of return values behind the hidden states, with those that are None.
    """

    recorded: tuple[str, ...]
    collected: RecordedOutputs = dataclasses.field(default_factory=dict)
    extras: list[OutputSlot] = dataclasses.field(default_factory=list)
    is_tuple: bool = False
    width: int = 0


@dataclasses.dataclass
class BackwardState:
    """Data that a layer call's backward needs beside the saved tensors.

    Attributes:
        training: True if the layer was in training mode in forward.
        gradients_of_a_parameter: number of terms in the sum of each parameter's gradient. One for
            each chunk; two if the layer's code before and after attention is differentiated apart.
        parameters: the layer's trainable parameters at the start of the call.
        needs_grad: pair, set by the autograd Function's forward: True if hidden_states need a
            gradient, and a list with the same flag for each argument that requires a gradient.
        forward_snapshot: snapshot of the layer at the end of forward. [Note: fingerprint]
        witness: compares recomputed values with those of forward; None: no comparison. [Note:
            witness]
        send_gradients: moves gradients to the host, for a layer whose weights are stored there;
            None: weights are on the device.
        factors: cached LoRA matrices in the compute dtype, by the Linear's name. [Note: adapters]
        unread_key: the last arguments and the last result of `LayerCall.unread_key`, as a cache;
            None: empty.
    """

    training: bool
    gradients_of_a_parameter: int
    parameters: Parameters = dataclasses.field(init=False)
    needs_grad: tuple[bool, list[bool]] = dataclasses.field(init=False)
    forward_snapshot: ForwardSnapshot | None = None
    witness: Witness | None = None
    send_gradients: SendGradients | None = None
    factors: dict[str, Factors] = dataclasses.field(default_factory=dict)
    unread_key: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None


class LayerCall:
    """One call of one decoder layer: its arguments, its chunks, the values passed between chunks
    and the tensors saved for backward. hidden_states is [..., B, T, h].

    Attributes:
        layer_state: settings and test results of the layer.
        arguments: the layer's arguments beside hidden_states.
        rows: the number of rows B.
        plan: the chunks.
        why_longer: the reason why a chunk is longer than requested; empty: no chunk is.
        parts: facts about the layer's modules.
        packing: the documents of packed rows.
        autocast: the autocast state at the start of the call.
        snapshot: snapshot of the layer's modules, attributes and hooks at the start of the call.
        carried: keys, values and recurrent states that pass from chunk to chunk.
        saved: tensors saved for backward.
        attempt: calls a function with False and returns its result. If the function runs out of
            memory and `saves="auto"` chose the saved tensors, they are freed, and the function is
            called with True (`oom.py`).
        form: the form of the layer's result: a tensor or a tuple, and which other outputs exist.
        backward: data that backward needs beside the saved tensors.
        has_full_sequence: True if this rank has all tokens of the sequence. The unpatched layer can
            then compute the same call.
    """

    has_full_sequence = True

    def __init__(self, layer_state: LayerState, arguments: Arguments) -> None:
        self.layer_state = layer_state
        self.arguments = arguments
        self.hidden_states: Tensor = arguments.hidden_states
        self.device = self.hidden_states.device
        del arguments.hidden_states
        self.rows, length = self.hidden_states.shape[-3:-1]
        if length == 0:
            raise StreamBPError(
                "The sequence has no tokens (T = 0). Pass at least one token per row."
            )
        self.plan = plan_of(layer_state, self.rows, length, self.device)
        self.why_longer = ""
        self.parts = layer_state.cached_result(
            functools.partial(LayerParts.find, layer_state), "parts"
        )
        self.packing = (
            Packing(layer_state, arguments) if layer_state.kind.states.carries else ONE_DOCUMENT
        )
        self.autocast = Autocast.capture(self.device)
        self.snapshot: LayerSnapshot
        self.carried = self._make_cross_chunk_state()
        if self.carried.layout.barriers or layer_state.kind.states.carries:
            self._move_ends(arguments, layer_state.kind.states.min_tokens)
        self.saved = self._make_saves()
        self.attempt = RUN_ONCE
        if layer_state.saves_policy is not None and layer_state.can_retry_chunks:
            self.attempt = functools.partial(
                run_with_retry,
                device=self.device,
                drop_saves=functools.partial(layer_state.saves_policy.drop_saves, self.saved),
                check_room=functools.partial(layer_state.saves_policy.check_room, self.saved),
            )
        collector = output_capturing._active_collector.get()
        self.form = ResultForm(recorded_keys(collector) if collector else ())
        self.backward = BackwardState(layer_state.layer.training, len(self.plan.ends))

    def _move_ends(self, arguments: Arguments, min_tokens: int) -> None:
        """Move chunk ends in `plan` to positions where the layer can be split. If a chunk becomes
        longer than requested, store the reason in `why_longer`. [Note: chunk ends]

        Args:
            arguments: the layer's arguments, whose `forks` require ends at shared prefixes.
            min_tokens: minimum length in tokens of a chunk that passes on recurrent states.
        """
        barriers = self.carried.layout.barriers
        if barriers:
            self._set_plan(move_ends(self.plan, barriers), REASON_LONG_CHUNK_MASK)
        documents = () if self.packing is ONE_DOCUMENT else self.packing.barriers
        if documents:
            self._set_plan(
                self.plan.avoid_barriers(merge_barriers((*barriers, *documents))),
                REASON_LONG_CHUNK_DOCUMENTS,
            )
        if arguments.forks:
            self._set_plan(
                self.plan.split_at_forks(arguments.forks, min_tokens), REASON_LONG_CHUNK_FORKS
            )
        elif min_tokens > 1:
            self._set_plan(
                self.plan.with_min_tokens(min_tokens), REASON_LONG_CHUNK_STATES.format(min_tokens)
            )

    def _set_plan(self, plan: ChunkPlan, why: str) -> None:
        if plan.longest > max(plan.size, self.plan.longest):
            self.why_longer = why
        elif plan.longest <= plan.size:
            self.why_longer = ""
        self.plan = plan

    def _make_cross_chunk_state(self) -> CrossChunkState:
        attention = self.layer_state.kind.attention
        layout = attention.layout(self.arguments.by_name, self.hidden_states)
        return CrossChunkState(
            layout,
            Prefix(layout.spans, self.plan.length, self.layer_state.config.attention),
            attention.in_tiles,
        )

    def _make_saves(self) -> SavedForBackward:
        return SavedForBackward(
            self.layer_state, self.plan, self.carried, self.device, self.autocast
        )

    def limit_prefix(self, offloader: OffloadManager) -> None:
        """Limit the device memory of keys, values and their gradients to the `gpu_memory` setting,
        which `offloader` has. Tensors above the limit are stored on the host. Does nothing for a
        layer whose keys cannot be split into one tensor for each chunk."""
        saved = self.saved.store if self.saved.moves_kv else None
        assert not isinstance(saved, DeviceTensors)  # offloaded keys are in a host store
        if self.carried.in_tiles:
            scratch = functools.partial(offloader.scratch, self.device)
            self.carried.prefix.memory = PrefixMemory(
                self.plan, offloader.prefix_memory, scratch, saved
            )

    def first_chunks(self, tokens: int) -> tuple[Chunk, ...]:
        """Return the chunks on which the layer is tested before its first call in chunks: one chunk
        from position 0. If the layer has recurrent states and the sequence is long enough, a second
        chunk follows, which starts from the end states of the first. Each chunk has at most
        `tokens` tokens."""
        length = self.arguments.length
        if not self.layer_state.kind.states.carries or len(self.plan.ends) == 1:
            return (Chunk(0, 0, min(tokens, length)),)
        # The test chunk is no copy of the first chunk, which may be one token and then has no
        # usable states.
        first = min(tokens, self.plan.longest)
        stop = min(2 * first, length)
        chunks = (Chunk(0, 0, first), Chunk(1, first, stop))
        return chunks if stop - first >= MIN_CHUNK_TOKENS else chunks[:1]

    def unread_key(self, linears: Iterable[str], needs_input: bool) -> tuple[Any, ...]:
        """Return this call's key in the dict `LayerTests.unread`, whose values are the Linears with
        outputs that backward can skip. A test run finds these Linears once for each key: form of
        arguments, Linears, needed gradients, autocast state, and ends of the test run's chunks.

        Args:
            linears: names of the layer's Linears.
            needs_input: True if hidden_states need a gradient.
        """
        question = linears, needs_input, self.arguments.kind
        cached = self.backward.unread_key
        if cached is None or any(map(operator.is_not, question, cached[0])):
            stops = [chunk.stop for chunk in self.first_chunks(TRIAL_TOKENS)]
            cached = self.backward.unread_key = (
                question,
                (
                    self.arguments.kind,
                    tuple(linears),
                    needs_input,
                    tuple(self.backward.needs_grad[1]),
                    self.autocast.states,
                    *stops,
                ),
            )
        return cached[1]

    def start_witness(
        self, chunk: Chunk, in_backward: bool, half_name: str = ""
    ) -> TensorCallback | None:
        """Start recording this chunk's values in forward; in backward, start comparing recomputed
        values with the recorded ones. [Note: witness]

        Args:
            chunk: the chunk's range of positions.
            in_backward: True in backward: compare.
            half_name: name of the half, for a layer that is split at its attention; empty: the full
                layer.

        Returns:
            A callback (name, tensor) for the last chunk, which records or compares q, k, v and the
            inputs of Linears with saved outputs. None for other chunks, or if comparison is off.
        """
        witness = self.backward.witness
        if witness is None:
            return None
        witness.begin((half_name, chunk.index), chunk.stop == self.plan.length, in_backward)
        return witness.see if witness.last else None

    def record_inputs(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for forward that records the inputs of the Linears whose outputs backward
        will skip; backward compares the inputs that it recomputes with the record. Does nothing in
        a layer's first call, because the first backward finds these Linears. [Note: witness]"""
        witness = self.backward.witness
        linears = self.layer_state.linears
        unread = self.layer_state.tests.unread.get(
            self.unread_key(linears, self.backward.needs_grad[0])
        )
        if witness is None or unread is None or not unread.recompute:
            return NULL_CONTEXT
        witness.left_out = unread.recompute.difference(self.saved.products.names)
        return tap_linears(linears, witness.left_out, see=witness.see)

    @contextlib.contextmanager
    def prepare_layer(self, keeps_factors: bool = False) -> Iterator[None]:
        """Context manager that prepares the layer for running chunk by chunk.

        streambp's attention function replaces the configured one. Transformers' checkpointing, and
        hooks of DeepSpeed and accelerate, are disabled inside the layer. Tensors recorded by
        transformers' hooks go to `form.collected`.

        Args:
            keeps_factors: True: cached LoRA matrices may stay for backward; False: free them.
        """
        previous = self.form.collected
        hooks = self.parts.engine_hooks
        modules = self.parts.checkpointed
        recorded: contextlib.AbstractContextManager[RecordedOutputs] = contextlib.nullcontext({})
        if self.form.recorded or output_capturing._active_collector.get() is not None:
            recorded = record_outputs(self.form.recorded)
        with (
            route_attention(self.parts.configs),
            disable_checkpointing(modules)
            if modules or parametrize._cache_enabled
            else NULL_CONTEXT,
            silence_engine_hooks(hooks) if hooks else NULL_CONTEXT,
            recorded as self.form.collected,
            decode_once(self.layer_state.replaced_forwards)
            if self.layer_state.replaced_forwards
            else NULL_CONTEXT,
            fuse_adapters(self.layer_state.adapters, self.backward.factors)
            if self.layer_state.adapters
            else NULL_CONTEXT,
        ):
            try:
                yield
            finally:
                self.form.collected = previous
                if self.backward.factors and not (keeps_factors and self._can_keep_factors()):
                    self.backward.factors.clear()

    def _can_keep_factors(self) -> bool:
        """True if the cached LoRA matrices (`Factor`) may stay in memory from forward to backward.
        False: backward computes these matrices again. The matrices must be small beside the layer's
        input. Parameters must neither be gathered by ZeRO-3 or FSDP nor be stored on the host."""
        limit = self.hidden_states.nbytes // MIN_INPUT_FACTOR_RATIO
        managed = self.layer_state.on_host or engine_ownership(self.layer_state.layer).weights
        return not managed and bytes_of(self.backward.factors.values()) <= limit

    def unwrap(self, result: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """Split a layer's result into its hidden states [..., B, C, h] and a dict of the tensors
        [B, C, ...] returned behind them. The keys are the tensors' indices behind the hidden
        states. Return values that are None or attention weights are left out. `form` stores
        `is_tuple` and `width`, for `wrap`.

        Raises:
            UnsupportedModelError: the layer returned other values than such tensors.
        """
        if isinstance(result, Tensor) and result.dim() > 1:
            self.form.is_tuple = False
            self.form.width = 0
            return result.flatten(-2) if self.arguments.folds else result, {}
        self.form.is_tuple = isinstance(result, tuple)
        hidden_states, *extra_values = result if self.form.is_tuple else (result,)
        if isinstance(hidden_states, Tensor) and self.arguments.folds:
            hidden_states = hidden_states.flatten(-2)
        if self.layer_state.kind.attention.returns_weights and any(
            x is not None and x.is_floating_point() for x in extra_values
        ):
            extra_values = [None] * len(extra_values)
        tensors = {index: part for index, part in enumerate(extra_values) if part is not None}
        batch_shape = isinstance(hidden_states, Tensor) and hidden_states.shape[-3:-1]
        if not batch_shape or not all(
            isinstance(part, Tensor) and part.shape[:2] == batch_shape for part in tensors.values()
        ):
            raise UnsupportedModelError(
                f"{type(self.layer_state.layer).__name__} returns more than its hidden states and tensors "
                "[B, T, ...] beside them, which streambp does not support. Use gradient checkpointing "
                "for this model."
            )
        self.form.width = len(extra_values)
        return hidden_states, tensors

    def wrap(self, hidden_states: Tensor, extras: dict[OutputSlot, Tensor]) -> Any:
        """Return hidden_states [..., B, T, h] and the tensors [B, T, ...] returned behind them as
        the layer itself would: a tensor or a tuple. The inverse of `unwrap`.

        Args:
            hidden_states: [..., B, T, h].
            extras: the outputs beside hidden_states. Recorded tensors and tensors of dict arguments
                among them are ignored.
        """
        extra_values = [
            extras.get(OutputSlot(RETURN_VALUE_NAME, index)) for index in range(self.form.width)
        ]
        hidden_states = self.arguments.restore_shape(hidden_states)
        return (hidden_states, *extra_values) if self.form.is_tuple else hidden_states

    def compute(
        self,
        hidden_chunk: Tensor,
        chunk: Chunk,
        stage: Stage,
        prefix: Prefix | None = None,
        leaves: list[Tensor] | None = None,
        states: States | None = None,
    ) -> tuple[ChunkOutput | None, list[AttentionOutput]]:
        """Run the layer's own forward on one chunk of its input. Return the chunk's outputs, and
        the output and logsumexp of each attention call.

        The outputs are None if the forward was ended at its last attention call, as in a
        recomputation of keys and values alone.

        Args:
            hidden_chunk: [..., B, C, h].
            chunk: the chunk's range of positions.
            stage: forward, recomputation of keys and values, or recomputation for gradients.
            prefix: keys and values of earlier chunks, for a test; None: the call's own.
            leaves: this chunk's result of `Arguments.leaves`, which receive gradients; None: the
                arguments get no gradients.
            states: the recurrent states at the chunk's start; None: no cache is passed, as in the
                unpatched model.
        """
        uses_own_prefix = prefix is None
        is_recomputation = stage is Stage.RECOMPUTE and uses_own_prefix
        saved = self.saved.take_attention_outputs() if is_recomputation else None
        picks = (
            self.saved.picks()
            if is_recomputation and self.layer_state.kind.attention.picks_keys
            else None
        )
        overwritten = self.layer_state.tests.overwritten
        if overwritten.inputs:  # [Note: writes through pointers]
            states = (
                None if states is None else {key: state.clone() for key, state in states.items()}
            )
            if prefix is not None or stage is not Stage.FORWARD:
                hidden_chunk = hidden_chunk.clone()
        if prefix is None and self.parts.runs_compiled:
            # A chunk is a view with an offset and the sequence's stride, for which torch would
            # recompile.
            hidden_chunk = hidden_chunk.clone(memory_format=torch.contiguous_format)
        prefix = prefix or self.carried.prefix
        prefix.overwritten |= overwritten.attention_output
        mask = PrefixChunkAttention(prefix, chunk, stage, saved, picks)
        witness = self.backward.witness
        if uses_own_prefix and witness is not None and witness.last and stage is not Stage.REFILL:
            mask.see = witness.see if "attn_out" in self.saved.saves else None
        return self.run(hidden_chunk, chunk, mask, leaves, states), mask.attended

    def run(
        self,
        hidden_chunk: Tensor,
        chunk: Chunk,
        chunk_attention: ChunkAttention,
        leaves: list[Tensor] | None = None,
        states: States | None = None,
    ) -> ChunkOutput | None:
        """Run the layer's own forward on one chunk of its input. Return the chunk's outputs; None
        if the forward was ended at its last attention call, as in a recomputation of keys and
        values alone.

        Args:
            hidden_chunk: [..., B, C, h].
            chunk: the chunk's range of positions.
            chunk_attention: computes attention in place of the layer's own function. The object is
                passed to the layer as its attention mask, and so reaches streambp's attention
                function.
            leaves: this chunk's result of `Arguments.leaves`, which receive gradients; None: the
                arguments get no gradients.
            states: the recurrent states at the chunk's start; None: no cache is passed, as in the
                unpatched model.
        """
        kind = self.layer_state.kind
        arguments, read = kind.attention.chunk_arguments(
            self.arguments.slice_chunk(chunk, leaves), chunk_attention
        )
        cache = None
        starting = NULL_CONTEXT
        shared = self.arguments.mappings
        if self.packing is not ONE_DOCUMENT:
            arguments, cache = kind.states.chunk_arguments(arguments, chunk, states, read)
            arguments, starting = self.packing.prepare_chunk(arguments, chunk, cache)
        earlier_mappings = {name: dict(arguments[name]) for name in shared} if shared else {}
        picks = (
            pick_keys(self.parts.indexers, chunk_attention)
            if kind.attention.picks_keys
            else NULL_CONTEXT
        )
        if self.layer_state.choices is None:
            choosing = NULL_CONTEXT
        else:
            choosing = self.layer_state.choices.replay(chunk, hidden_chunk.shape[-3])
        if self.arguments.folds:
            hidden_chunk = self.arguments.restore_shape(hidden_chunk)
        for (
            tensors
        ) in self.form.collected.values():  # a chunk that raised must not keep its graph alive
            tensors.clear()
        with (
            self.autocast.restore() if self.autocast.on else NULL_CONTEXT,
            starting,
            picks,
            choosing,
        ):
            try:
                result = self.parts.forward(hidden_chunk, **arguments)
            except RefillDone:
                chunk_attention.finish()
                return None
        chunk_attention.finish()
        result = kind.states.collect(result, cache) if kind.states.carries else result
        hidden_states, return_values = self.unwrap(result)
        if return_values or earlier_mappings or self.form.collected:
            output = collect_outputs(
                hidden_states,
                return_values,
                self.form.collected,
                {name: (earlier_mappings[name], arguments[name]) for name in earlier_mappings},
            )
        else:
            output = ChunkOutput(hidden_states, {})
        for tensors in self.form.collected.values():
            tensors.clear()
        output.states = {} if cache is None else cache.end_states
        return output


def recorded_keys(collector: Iterable[str]) -> tuple[str, ...]:
    """Return the keys that transformers' output collector records inside layers, such as router
    logits: all except hidden_states and private keys."""
    return tuple(key for key in collector if key != "hidden_states" and not key.startswith("_"))


def plan_of(layer_state: LayerState, rows: int, length: int, device: torch.device) -> ChunkPlan:
    """Return the chunks of a sequence with `length` positions. The chunks have equal lengths;
    `LayerCall` then moves chunk ends to positions where the layer can be split.

    Args:
        layer_state: settings of the layer.
        rows: batch size.
        length: number of positions T.
        device: device of the hidden states.
    """
    rule = layer_state.chunk_rule
    size = (
        layer_state.config.chunk_size
        if rule is None
        else rule(layer_state.index, rows, length, device)
    )
    return plan_chunks(length, rows, size)


def find_disabled_parts(layer: nn.Module) -> tuple[list[dict[int, Any]], list[nn.Module]]:
    """Return two lists of objects to disable while a layer runs in chunks: hook dicts that contain
    hooks of DeepSpeed or accelerate, and modules with a `gradient_checkpointing` flag."""
    return engine_hooks(layer), [
        module for module in layer.modules() if CHECKPOINTING_ATTRIBUTES[0] in module.__dict__
    ]
