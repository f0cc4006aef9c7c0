"""Register streambp in transformers' attention interface, route a model's attention to it, and
connect a layer's chunks to the keys and values of earlier chunks.

[Note: carriers] `admission/stacks.py` chooses a layer's kind once. A kind is two objects: an
attention carrier (this module and `attention/kinds.py`), and a state carrier
(`recurrent/carriers.py`). The code that computes a chunk asks the two carriers for the chunk's
arguments, and never which kind a layer is. An attention carrier replaces the layer's mask or cache:

    class                     the layer                             replaced
    `NoAttention`             reads no keys                         nothing
    `InterfaceAttention`      calls transformers' attention         the mask, by a `ChunkAttention`
    `BidirectionalAttention`  the same; queries may read ahead      the mask, as above
    `TowerAttention`          the same, of pixels or audio          the mask, as above
    `SparseAttention`         the same; an indexer picks the keys   the mask, the indexer's forward
    `CacheAttention`          attends to what its cache returns     the cache, by a `ChunkCache`

`CacheAttention` also cuts the mask to the chunk.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from streambp.attention.masks import (
    MASKLESS_TYPES,
    DenseMask,
    LazyMask,
    attention_mask_of,
    replace_masks,
    resolve,
)
from streambp.attention.position_biases import distance_bias, has_table, is_distance_bias
from streambp.attention.prefix import (
    AttentionCall,
    ChunkAttention,
    Prefix,
    PrefixChunkAttention,
    Stage,
)
from streambp.attention.self_attending import (
    OwnMask,
)
from streambp.attention.spans import Spans
from streambp.chunks import Barrier, Chunk
from streambp.device import autocast_dtype, without_autocast
from streambp.errors import UnsupportedMaskError, UnsupportedModelError
from streambp.known_names import (
    DOCUMENT_ENDS,
    EAGER,
    EAGER_FORWARD,
    FOREIGN_ARGUMENTS,
    IMPLEMENTATION,
    PICKS_ARGUMENT,
    POSITION_BIAS,
    SINK_ARGUMENTS,
)
from streambp.source import written_forward

IMPLEMENTATION_NAME = "streambp"
NULL_CONTEXT = contextlib.nullcontext()
STREAMED_MASK_TYPES = (ChunkAttention, LazyMask)  # types of masks in streamed models
UNSUPPORTED_ARGUMENTS = frozenset(
    {*FOREIGN_ARGUMENTS, *SINK_ARGUMENTS, PICKS_ARGUMENT, POSITION_BIAS}
)


# Breaks the graph of compiled code around it, because each chunk has other blocks.
@torch.compiler.disable
def stream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as a function of transformers' attention interface: query [B, H, C, D], key
    and value [B, H_kv, C, D] -> [B, C, H, D_v], and None in place of the attention weights.

    `attention_mask` is a `ChunkAttention` in a layer that is computed chunk by chunk. This object
    has K and V of earlier chunks and the keys that each query may read, so a `sliding_window`
    argument is already included. Any other layer passes the model's own mask: a `LazyMask`, a 4-D
    tensor, or None for causal. The sequence is then attended as one chunk. Keys from another
    sequence (cross-attention to an image) are attended by the model's own function, sdpa or eager.
    The other arguments are as in transformers.

    Raises:
        UnsupportedModelError: the module attends in a way that streambp does not support, such as
            is_causal=False.
    """
    is_streamed = isinstance(attention_mask, STREAMED_MASK_TYPES)
    if not is_streamed:
        function = _own_function(module)
        if function is not None:
            # the module expects us to mask the keys that were not picked
            if kwargs.get(PICKS_ARGUMENT) is not None:
                attention_mask = _keep_picks(attention_mask, kwargs[PICKS_ARGUMENT], key.shape[2])
            if softcap is not None:
                kwargs["softcap"] = softcap
            kwargs.update(dropout=dropout, scaling=scaling)
            result: tuple[Tensor, None] = function(
                module, query, key, value, attention_mask, **kwargs
            )
            return result
    features = list[str]()
    sink = picks = bias = None
    if not kwargs.keys().isdisjoint(UNSUPPORTED_ARGUMENTS):
        features, sink, picks = _unsupported_arguments(attention_mask, kwargs)
        bias = kwargs.get(POSITION_BIAS)
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
    if not is_streamed and (
        not is_causal
        or getattr(module, "is_cross_attention", False)
        or key.shape[2] != query.shape[2]
    ):
        kwargs.update(dropout=dropout, scaling=scaling)
        return _attend_as_unpatched(
            module, (query, key, value), attention_mask, softcap, features, is_causal, kwargs
        )
    if not (
        is_causal
        or getattr(attention_mask, "bidirectional", False)
        or _is_causal_without_a_mask(module)
    ):
        features.append("is_causal=False")
    if bias is not None:
        bias = _distance_bias(module, bias, attention_mask)
        if bias is None:
            features.append(POSITION_BIAS)
    if features:
        raise _unsupported_error(module, features)
    if not isinstance(attention_mask, ChunkAttention):
        attention_mask = _whole_sequence(query, key, attention_mask, kwargs)
    dtype = autocast_dtype(query.device.type)
    # rotary embeddings leave q and k in float32 and v in half; sdpa casts all three, so do we
    if dtype is not None:
        query, key, value = (
            t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Autocast would round the scores. See `attention/attend.py`.
    with NULL_CONTEXT if dtype is None else without_autocast(query.device.type):
        return attention_mask.attend(
            AttentionCall(query, key, value, scale, dropout, softcap, sink, picks, bias)
        ), None


def _distance_bias(module: nn.Module, bias: Any, mask: Any) -> Tensor | None:
    """Return the bias that T5's attention adds for the distance of key and query, one value for
    each head and distance: [1, H, 2 T - 1]. T is the length of the sequence, or of its part up to
    the chunk's end.

    Return None if the bias is not T5's, or if the layer is not computed chunk by chunk.

    Args:
        module: the attention module.
        bias: the bias that the module passed to attention. T5's, one value for each distance, is
            returned unchanged. UMT5's, one value for each pair of positions within the chunk, is
            replaced by a bias for each distance from the module's table. If the chunk's attention
            reads no bias, `bias` is returned unchanged.
        mask: the call's attention_mask, a `ChunkAttention` if the layer is computed chunk by chunk.
    """
    if not isinstance(mask, ChunkAttention) or not isinstance(bias, Tensor):
        return None
    if is_distance_bias(bias):
        return bias
    if not has_table(module):
        return None
    if mask.bias_length is None:
        return bias
    return distance_bias(module, mask.bias_length, bias.device)


def _is_causal_without_a_mask(module: nn.Module) -> bool:
    """True if an attention module is causal only in calls without a mask (Moonshine). Such a module
    passes is_causal=False in calls with a mask, and the mask alone decides which keys are read.

    Every call has a mask if the layer runs in chunks, and is_causal=False does not make such a
    module bidirectional.
    """
    code = getattr(written_forward(module), "__code__", None)
    names = () if code is None else code.co_names
    return getattr(module, "is_causal", False) is True and "is_causal" in names


def _own_function(module: nn.Module) -> Any:
    """Return the attention function of the config's own implementation, "sdpa" for example. A
    thread must use the function if another thread has put `stream_attention` into the shared
    config. None if the current thread itself must use `stream_attention`."""
    implementation = _thread_implementation(getattr(module, "config", None))
    if implementation is None:
        return None
    return AttentionInterface().get(implementation, _model_eager_function(module))


def _model_eager_function(module: nn.Module) -> Any:
    """Return the eager attention function in the modeling file of the module's class, found by the
    names that the code of the module's forward mentions. None if there is none."""
    code = getattr(written_forward(module), "__code__", None)
    function_name = EAGER_FORWARD
    for name in getattr(code, "co_names", ()):
        if name.endswith(EAGER_FORWARD):
            function_name = name
            break
    return getattr(sys.modules[type(module).__module__], function_name, None)


def _attend_as_unpatched(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    softcap: float | None,
    features: list[str],
    is_causal: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Return attention's output [B, C, H, D_v] over keys from another sequence (cross-attention),
    computed by the model's own function.

    Queries are independent of each other, so the function is right for a chunk of them.

    Args:
        module: the attention module.
        tensors: query [B, H, C, D], key [B, H_kv, S, D] and value [B, H_kv, S, D_v].
        mask: the mask over the S keys.
        softcap: limit of the scores; None: no limit.
        features: unsupported arguments that the caller found, by name; others are appended
            here.
        is_causal: False for a bidirectional module.
        kwargs: the other arguments of the attention call.

    Raises:
        UnsupportedModelError: an argument is not supported, or a causal module has no mask.
    """
    features += [name for name in SINK_ARGUMENTS if kwargs.get(name) is not None]
    # sdpa and eager attention differ in queries without any key
    eager = _eager_function(module)
    if softcap is not None:
        kwargs["softcap"] = softcap
        if eager is None:
            features.append("softcap")
    # Without a mask, sdpa would be causal from the first key on, for every chunk.
    if mask is None and is_causal:
        features.append("no mask over keys from elsewhere")
    if features:
        raise _unsupported_error(module, features)
    if eager is not None:
        output: Tensor = eager(module, *tensors, mask, **kwargs)[0]
        return output, None
    return sdpa_attention_forward(module, *tensors, mask, **kwargs)


def _eager_function(module: nn.Module) -> Any:
    """Return the eager attention function of the module's model, for cross-attention, if the model
    attends eagerly; else None."""
    config = getattr(module, "config", None)
    if not isinstance(config, PreTrainedConfig) or own_implementation(config) != EAGER:
        return None
    return _model_eager_function(module)


def _unsupported_error(module: nn.Module, features: list[str]) -> UnsupportedModelError:
    """Return the error for an attention module with arguments or properties that are not supported.

    Args:
        module: the attention module.
        features: names of these arguments or properties.
    """
    return UnsupportedModelError(
        f"{type(module).__name__} attends with {features}, which streambp does not "
        "support; ignoring it would give wrong numbers. Use gradient checkpointing for this model "
        "(streambp.unpatch(model))."
    )


def _keep_picks(mask: Any, picks: Tensor, length: int) -> Tensor:
    """Return a 4-D attention mask [B, 1, S, T], bool or additive, in which each query reads only
    the keys that an indexer picked for it.

    Args:
        mask: the model's mask.
        picks: [B, S, k], indices of the picked keys.
        length: T.
    """
    if not isinstance(mask, Tensor):
        raise UnsupportedModelError(
            f"Attention is given keys that an indexer picked, and {type(mask).__name__} in place "
            "of a 4-D mask. Pass attention_mask [B, T], or run this model unpatched "
            "(streambp.unpatch(model))."
        )
    is_picked = torch.zeros(*picks.shape[:2], length, dtype=torch.bool, device=picks.device)
    is_picked = is_picked.scatter_(-1, picks.long(), True)[:, None]  # [B, 1, S, T]
    if mask.dtype == torch.bool:
        return mask & is_picked
    return mask.masked_fill(~is_picked, torch.finfo(mask.dtype).min)


def _unsupported_arguments(
    mask: Any, kwargs: Mapping[str, Any]
) -> tuple[list[str], Tensor | None, Tensor | None]:
    """Return three results on an attention call: the names of its unsupported arguments, the logits
    [H] of attention sinks, and the positions [B, S, k] of picked keys.

    A sink's logit enters the softmax of all queries of a head, like a key without a value. An
    indexer picks k keys for each of S queries. Logits or positions are None if the call has none.

    Args:
        mask: the call's attention_mask. Picked keys are unsupported unless the mask is a
            `ChunkAttention` of a layer with sparse attention.
        kwargs: the call's other keyword arguments.
    """
    passed = {name for name, value in kwargs.items() if value is not None}
    features = [name for name in FOREIGN_ARGUMENTS if name in passed]
    picks = kwargs.get(PICKS_ARGUMENT)
    if picks is not None and not (isinstance(mask, ChunkAttention) and mask.takes_picks):
        features.append(PICKS_ARGUMENT)
    return features, next((kwargs[name] for name in SINK_ARGUMENTS if name in passed), None), picks


def stream_mask(config: PreTrainedConfig | None = None, **description: Any) -> Any:
    """Return the mask of a model with the implementation `stream_attention`, as transformers' mask
    creation calls it: a `LazyMask`, which stores the arguments and builds no tensor. If the config
    has another implementation in the current thread, return that implementation's mask."""
    implementation = _thread_implementation(config)
    function: Any = LazyMask
    if implementation is not None:
        function = AttentionMaskInterface().get(implementation, LazyMask)
    return function(config=config, **description)


def _whole_sequence(query: Tensor, key: Tensor, mask: Any, kwargs: Any) -> PrefixChunkAttention:
    length = query.shape[2]
    if key.shape[2] != length:
        raise UnsupportedModelError(
            f"A layer attends {length} queries to {key.shape[2]} keys while its model streams; "
            "streambp supports neither caches nor cross-attention there. Use gradient "
            "checkpointing for this model (streambp.unpatch(model))."
        )
    layout = resolve(
        mask,
        query.shape[0],
        length,
        kwargs.get("position_ids"),
        kwargs.get(DOCUMENT_ENDS),
        query.device,
    )
    stage = Stage.RECOMPUTE if torch.is_grad_enabled() else Stage.FORWARD
    return PrefixChunkAttention(Prefix(layout, length, "auto"), Chunk(0, 0, length), stage)


def encoder_masks(
    arguments: Mapping[Any, Any], configs: list[PreTrainedConfig], has_own_mask: bool
) -> dict[Any, Any]:
    """Return the masks of a decoder layer's cross-attention, as a dict from keys of `arguments` to
    tensors [B, 1, 1, S]. None in place of a tensor: all S positions of the encoder are read.

    Args:
        arguments: the layer's arguments, by name or index. A bidirectional mask belongs to
            cross-attention if there is another mask too, for the layer's own attention.
        configs: the configs of the layer's attention modules.
        has_own_mask: True if the mask of the layer's own attention is a tensor, or is causal.
    """
    is_added = any(own_implementation(config) == EAGER for config in configs)
    masks: dict[Any, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, LazyMask) and value.is_bidirectional:
            masks[name] = value.to_key_mask(is_added)
        elif isinstance(value, LazyMask):
            has_own_mask = True
    return masks if has_own_mask else {}


class RoutedImplementation(str):
    """Value of a config's `_attn_implementation` while layers with this config are chunked: a
    string, the name under which `stream_attention` is registered.

    Attributes:
        original: the config's own implementation, which a copied or pickled config gets back.
        config: id() of the config.
        holders: one object for each running `route_attention` context manager that has set this
            value.
    """

    original: str | None
    config: int
    holders: set[object]

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self.original), () if self.original is None else (self.original,))


ROUTING_LOCK = threading.RLock()  # held while a config's name changes
# Names that `route_attention` holds in this thread, by id.
THREAD_ROUTED_NAMES: contextvars.ContextVar[Mapping[int, RoutedImplementation]] = (
    contextvars.ContextVar("streambp_routed", default=MappingProxyType({}))
)
THREAD_IMPLEMENTATIONS: contextvars.ContextVar[Mapping[int, str]] = contextvars.ContextVar(
    "streambp_unrouted", default=MappingProxyType({})
)


# faster than the config's own attribute access, and called in each layer of each pass
_get_attribute = object.__getattribute__


def own_implementation(config: PreTrainedConfig) -> str | None:
    """Return a config's own attention implementation, "sdpa" for example, also inside the context
    manager `route_attention`, which replaces it by streambp's. The unpatched model would attend
    with this implementation."""
    name: str | None = _get_attribute(config, "__dict__")[IMPLEMENTATION]
    return name.original if isinstance(name, RoutedImplementation) else name


@contextlib.contextmanager
def route_attention(configs: list[PreTrainedConfig]) -> Iterator[None]:
    """Context manager in which models with these configs use `stream_attention` and `LazyMask`.
    Sub-configs are unchanged.

    The name of `stream_attention` is registered in transformers' tables when a context is entered,
    because an unpickled model may run in a process that never called `patch`.

    Models share config objects, and threads run models. So a config has the name from the first
    `route_attention` entered in any thread to the last one left, and then its own implementation
    again. Another thread may find the name outside of any `route_attention` of its own. Calls of
    that thread use the config's own implementation.
    """
    routed_ids = THREAD_ROUTED_NAMES.get()
    holder = object()
    entered: list[tuple[PreTrainedConfig, RoutedImplementation]] = []

    def end() -> None:
        if entered:
            THREAD_ROUTED_NAMES.set(routed_ids)
        for config, name in entered:
            with ROUTING_LOCK:
                name.holders.discard(holder)
                if not name.holders and _get_attribute(config, "__dict__")[IMPLEMENTATION] is name:
                    _get_attribute(config, "__dict__")[IMPLEMENTATION] = name.original

    try:
        for config in configs:
            name: Any = _get_attribute(config, "__dict__")[IMPLEMENTATION]
            if id(name) in THREAD_ROUTED_NAMES.get():
                continue
            AttentionInterface.register(IMPLEMENTATION_NAME, stream_attention)
            AttentionMaskInterface.register(IMPLEMENTATION_NAME, stream_mask)
            with ROUTING_LOCK:
                name = _get_attribute(config, "__dict__")[IMPLEMENTATION]
                is_ours = isinstance(name, RoutedImplementation) and name.config == id(config)
                if not is_ours or not name.holders:
                    original = own_implementation(config)
                    name = RoutedImplementation(IMPLEMENTATION_NAME)
                    name.original = original
                    name.config = id(config)
                    name.holders = set()
                entered.append((config, name))  # first: Ctrl-C may come between any two of these
                name.holders.add(holder)
                _get_attribute(config, "__dict__")[IMPLEMENTATION] = name
            THREAD_ROUTED_NAMES.set({**THREAD_ROUTED_NAMES.get(), id(name): name})
        yield
    finally:
        try:
            end()
        except KeyboardInterrupt:
            end()
            raise


@contextlib.contextmanager
def use_implementations(
    configs: list[PreTrainedConfig], implementations: list[str]
) -> Iterator[None]:
    """Context manager in which models with these configs use other attention implementations, in
    this thread only. Enter it in the context of `route_attention`, which sends attention to us.

    Args:
        configs: the configs.
        implementations: the implementation for each config, such as "sdpa".
    """
    token = THREAD_IMPLEMENTATIONS.set(
        {id(config): name for config, name in zip(configs, implementations, strict=True)}
    )
    try:
        yield
    finally:
        THREAD_IMPLEMENTATIONS.reset(token)


def _thread_implementation(config: object) -> str | None:
    """Return the attention implementation that the current thread must use for a config, "sdpa" for
    example. None if this is `stream_attention`, and for an object that is no transformers config.

    Inside of `use_implementations` this is the implementation passed to `use_implementations`. A
    thread that has not entered `route_attention` must use the config's own implementation, even
    while another thread is inside of `route_attention`.
    """
    if not isinstance(config, PreTrainedConfig):
        return None
    compared = THREAD_IMPLEMENTATIONS.get().get(id(config))
    if (
        compared is not None
        or id(_get_attribute(config, "__dict__")[IMPLEMENTATION]) in THREAD_ROUTED_NAMES.get()
    ):
        return compared
    implementation = own_implementation(config)
    return None if implementation == IMPLEMENTATION_NAME else implementation


ReadKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Layout(NamedTuple):
    """Keys that the queries of a full sequence may read, and positions where no chunk may end.

    Attributes:
        spans: keys of each query.
        barriers: positions where no chunk may end, because an earlier query would read a later key.
            [Note: chunk ends]
        document_source: name of the argument that marks the documents of packed rows, and the
            number of documents; None: no argument marks documents.
    """

    spans: Spans | DenseMask
    barriers: tuple[Barrier, ...] = ()
    document_source: tuple[str, int] | None = None


class NoAttention:
    """Adapter between a decoder layer and chunked attention, for a layer that reads no keys (a
    recurrence alone). Subclasses are the adapters for layers with attention.

    Attributes:
        costs: text that `describe` prints about the attention's time and memory; None: no text.
        why_not_split: reason why the tokens cannot be sharded over ranks; None: they can.
        in_tiles: True if K and V may be stored chunk by chunk, some of them in host memory. False
            if all K and V must be in one buffer on the device.
        reads_a_mask: True if the layer passes attention_mask to attention only. False if attention
            gets no mask, or if the layer itself reads the mask.
        ours: True if streambp's attention replaces the layer's own. A test run can then hide the
            keys of other chunks from queries. False if the layer's own attention code runs.
        picks_keys: True if the keys of a query are selected by the contents of the keys.
        reads_ahead: True if the layer's attention modules are bidirectional, so that the mask alone
            decides which keys a query reads.
        returns_weights: True if the layer returns attention weights after the hidden states even if
            nobody requested them; floating tensors after the hidden states are then ignored.
        adds_bias: True if the layer's attention adds T5's bias to the scores.
        needs_no_mask: True if the layer reads all keys in a call without a mask. False if such a
            call may also be causal.
    """

    costs: str | None = None
    why_not_split: str | None = None
    in_tiles = True
    reads_a_mask = False
    ours = True
    picks_keys = False
    reads_ahead = False
    returns_weights = False
    adds_bias = False
    needs_no_mask = False

    def configs(self, layer: nn.Module) -> list[PreTrainedConfig]:
        """Return the configs of which `_attn_implementation` is replaced while the layer is
        chunked; an empty list if the layer keeps its own attention."""
        return attention_configs(layer) if self.ours else []

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Check the arguments of a layer's call, and replace its mask in `arguments` where needed.
        Return the reason why the layer cannot be chunked with these arguments, or None.

        Args:
            layer: the decoder layer.
            arguments: the layer's arguments by name.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark in packed rows; None: no
                documents.
        """
        return None

    def layout(self, arguments: Mapping[str, Any], x: Tensor) -> Layout:
        """Return the keys that each query of the sequence may read, from the layer's mask of any
        type.

        Args:
            arguments: the layer's arguments by name.
            x: hidden_states [..., B, T, h].
        """
        mask = attention_mask_of(arguments)
        batch_size, length = x.shape[-3:-1]
        barriers: tuple[Barrier, ...] = ()
        # attention does not read the mask, or the layer reads it itself
        if not self.reads_a_mask and not isinstance(mask, LazyMask):
            if isinstance(mask, OwnMask):
                barriers = mask.barriers
            return Layout(Spans.causal(batch_size, length), barriers)
        spans = resolve(
            mask,
            batch_size,
            length,
            arguments.get("position_ids"),
            arguments.get(DOCUMENT_ENDS),
            x.device,
            self.reads_ahead,
        )
        if isinstance(spans, DenseMask):
            barriers = spans.barriers
        documents = mask.document_source if isinstance(mask, LazyMask) else None
        return Layout(spans, barriers, documents)

    def chunk_arguments(
        self, arguments: dict[str, Any], chunk_attention: ChunkAttention
    ) -> tuple[dict[str, Any], ReadKeys | None]:
        """Return the layer's arguments for one chunk, with mask and cache replaced.

        The second result is a function (k, v) -> (K, V) for the layer's cache. The function stores
        the chunk's keys and values, and returns those of all tokens up to the chunk's end. None if
        the layer gets no cache, as here.

        Args:
            arguments: the layer's arguments by name.
            chunk_attention: the object that computes the chunk's attention.
        """
        return arguments, None

    def unchunked_run(
        self, configs: list[PreTrainedConfig], args: Any, kwargs: Any
    ) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
        """Return a context manager, and the layer's positional and keyword arguments, for a run of
        the layer on all tokens at once. The caller runs the layer with these arguments inside the
        context: in forward, and again in backward under torch's checkpoint.

        Here streambp's attention function replaces the layer's in the context, and the arguments
        are unchanged.

        Args:
            configs: the configs of the layer's attention modules, from the method `configs`.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
        """
        return route_attention(configs), args, kwargs

    def unpatched_arguments(
        self, arguments: dict[str, Any], length: int, mask: Callable[[LazyMask], Any]
    ) -> dict[str, Any]:
        """Return the layer's arguments for a test run of the layer's own forward on the first
        `length` tokens, with the masks that the unpatched model would pass to the layer.

        Args:
            arguments: the layer's arguments by name.
            length: number of tokens.
            mask: function from a `LazyMask` to the mask that transformers' own mask function makes.
        """
        return arguments


class InterfaceAttention(NoAttention):
    """Adapter for a decoder layer that calls transformers' attention interface. The layer gets a
    `ChunkAttention` as its attention_mask, and passes it to the attention function."""

    reads_a_mask = True

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Return the reason why the layer cannot be chunked with its attention_mask; None if it
        can. Accepted are a `LazyMask`, a tensor [B or 1, H or 1, T, T] and None.

        Args:
            layer: the decoder layer.
            arguments: the layer's arguments by name. The mask of cross-attention is replaced by a
                tensor [B, 1, 1, S], or by None if all S keys are read.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark; not read here.

        Raises:
            UnsupportedMaskError: the mask is bool and the model's attention is eager, which would
                add the values of the mask to the scores.
        """
        masks = list(map(type, arguments.values())).count(LazyMask)
        is_tensor = isinstance(arguments.get("attention_mask"), Tensor)
        if masks > 1 or (masks == 1 and is_tensor):  # the layer has cross-attention
            arguments.update(encoder_masks(arguments, self.configs(layer), is_tensor))
        mask = attention_mask_of(arguments)
        if mask is None or isinstance(mask, LazyMask):
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            return "its attention_mask is not for attention alone"
        if mask.dtype == torch.bool:
            _refuse_added_bools(self.configs(layer))
        return None

    def chunk_arguments(
        self, arguments: dict[str, Any], chunk_attention: ChunkAttention
    ) -> tuple[dict[str, Any], ReadKeys | None]:
        """Return a dict of the layer's arguments for one chunk, in which `chunk_attention` replaces
        the attention mask. The second result is None, because this layer gets no cache.

        Also set two attributes of `chunk_attention`: `takes_picks` is True if an indexer picks each
        query's keys, and `bidirectional` if queries may read later keys.

        Args:
            arguments: the layer's arguments by name; not changed.
            chunk_attention: the object that computes the chunk's attention.
        """
        chunk_attention.takes_picks = self.picks_keys
        chunk_attention.bidirectional = self.reads_ahead
        replacements: dict[str, Any] = {}
        for name, value in arguments.items():
            if type(value) in MASKLESS_TYPES:
                continue
            if isinstance(value, LazyMask):
                replacements[name] = chunk_attention
            elif isinstance(value, Mapping):
                parts: dict[Any, Any] = {}
                has_mask = False
                for key, part in value.items():
                    parts[key] = part
                    if isinstance(part, LazyMask):
                        parts[key] = chunk_attention
                        has_mask = True
                if has_mask:
                    replacements[name] = parts
        return {**arguments, **(replacements or {"attention_mask": chunk_attention})}, None

    def unchunked_run(
        self, configs: list[PreTrainedConfig], args: Any, kwargs: Any
    ) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
        """Return a context manager, and the layer's positional and keyword arguments, for a run of
        the layer on all tokens at once. The caller runs the layer with these arguments inside the
        context: in forward, and again in backward under torch's checkpoint.

        Here streambp's attention function replaces the layer's in the context. The returned
        arguments have tensors as masks of cross-attention.

        Args:
            configs: the configs of the layer's attention modules, from the method `configs`.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
        """
        masks = encoder_masks({**dict(enumerate(args)), **kwargs}, configs, has_own_mask=True)
        kwargs = {**kwargs, **{name: masks[name] for name in kwargs.keys() & masks.keys()}}
        return route_attention(configs), tuple(map(masks.get, range(len(args)), args)), kwargs

    def unpatched_arguments(
        self, arguments: dict[str, Any], length: int, mask: Callable[[LazyMask], Any]
    ) -> dict[str, Any]:
        """Return the layer's arguments with the model's own mask in place of each `LazyMask`, for a
        test run of the layer's own forward. If there is no `LazyMask`, `attention_mask` becomes a
        causal mask.

        Args:
            arguments: the layer's arguments by name.
            length: number of tokens; not read here.
            mask: function from a `LazyMask` to the mask that transformers' own mask function makes.
        """
        replacements = {name: replace_masks(value, mask) for name, value in arguments.items()}
        if not isinstance(attention_mask_of(arguments), LazyMask):
            replacements["attention_mask"] = mask(LazyMask())
        return replacements


def attention_configs(layer: nn.Module) -> list[PreTrainedConfig]:
    """Return every distinct config from which the layer's modules read their attention
    implementation. `route_attention` replaces the implementation in these configs."""
    by_id: dict[int, PreTrainedConfig] = {}
    for module in layer.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            by_id[id(config)] = config
    return list(by_id.values())


def _refuse_added_bools(configs: list[PreTrainedConfig]) -> None:
    """Raise `UnsupportedMaskError`, for a call with a bool mask, if one of the layer's `configs`
    has "eager" attention. Eager attention would add the mask to the scores as 0 and 1."""
    for config in configs:
        if own_implementation(config) == EAGER:
            raise UnsupportedMaskError(
                "The 4-D attention mask is of torch.bool, and the model's attention is eager: it "
                "adds the mask to the scores, True as 1, so that the unpatched model reads every "
                "key. Pass an added mask (0 where a key is read, -inf elsewhere), or set sdpa "
                "(model.set_attn_implementation('sdpa')), which reads bool masks."
            )
