"""Find a model's decoder layers, and judge by their structure if they can be streamed."""

from __future__ import annotations

import dataclasses
import dis
import inspect
from typing import TypeGuard

from torch import nn
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from streambp.admission.third_party import refuse_opacus
from streambp.attention.indexers import indexers_of
from streambp.attention.interface import InterfaceAttention, NoAttention
from streambp.attention.kinds import (
    BiasedAttention,
    BidirectionalAttention,
    BidirectionalBiasedAttention,
    BidirectionalCacheAttention,
    CacheAttention,
    ForeignAttention,
    SparseAttention,
    TowerAttention,
)
from streambp.attention.position_biases import biases_distances, has_table
from streambp.attention.self_attending import biases_positions
from streambp.cache_arguments import cache_arguments, cache_parameters
from streambp.errors import UnsupportedModelError
from streambp.foreign import home_of, name_of, wrapped_functions
from streambp.instance_forward import check_is_module
from streambp.known_names import (
    ATTENTION,
    ATTENTION_TABLE,
    BIAS_TABLE,
    BIDIRECTIONAL_MASKS,
    COMPILED_MODULE_ATTRIBUTE,
    EITHER_MASK,
    FSDP1,
    INDEX_HEADS,
    INDEX_TOPK,
    INDEXER,
    INDEXER_CALLS,
    MASK_MAKERS,
    OPACUS_MODULE,
    PICKED_KEYS_ARGUMENT,
    PICKS_ARGUMENT,
    POSITION_BIAS,
    SEGMENT_ENDS,
    SEQUENCE_LENGTH,
    SHARED_LAYER_COUNT,
    SHARED_LAYERS,
    STATE_ARGUMENT,
    STATE_PROTOCOL,
    UNSLOTH,
    UPDATE_METHOD,
)
from streambp.layer.layer_state import LayerKind
from streambp.recurrent.carriers import StateCarrier
from streambp.source import written_forward

# names in the forward of a module that attends itself
ATTENTION_NAMES = frozenset((ATTENTION_TABLE, UPDATE_METHOD))
TRANSFORMERS_PREFIX = "transformers."  # start of the names of all its modules


@dataclasses.dataclass(frozen=True)
class Stack:
    """A transformers model without head, and the decoder layers that it runs in order.

    Attributes:
        backbone: the model that runs the layers.
        layers: the decoder layers.
    """

    backbone: PreTrainedModel
    layers: tuple[nn.Module, ...]


@dataclasses.dataclass(frozen=True)
class ModelStacks:
    """The stacks of decoder layers in a model. A stack is a transformers model without head,
    together with the layers that it runs.

    Attributes:
        stacks: the stacks whose layers may run in chunks.
        left_alone: one text "class: reason" for every stack (for example a vision tower) that stays
            unpatched.
    """

    stacks: tuple[Stack, ...]
    left_alone: tuple[str, ...]


def find_stacks(model: nn.Module, towers: bool = False) -> ModelStacks:
    """Return the stacks of decoder layers in a model that may run in chunks, and the reasons why
    other stacks stay unpatched. A stack is a transformers model without head, for example
    LlamaModel, and the layers that this model runs.

    Args:
        model: a transformers model, or a module that contains one.
        towers: True: vision and audio towers may run in chunks, and encoders before a decoder
            (`StreamConfig.towers`).

    Raises:
        UnsupportedModelError: no stack may run in chunks, or a wrapper hides the layers.
    """
    check_is_module(model)
    if any(base.__name__ == FSDP1 for module in model.modules() for base in type(module).__mro__):
        # FSDP1's parameters are views of a flat one, plain attributes that no layer can get
        # gradients for.
        raise UnsupportedModelError(
            f"{type(model).__name__} is wrapped by FSDP1 (FullyShardedDataParallel), whose flat "
            "parameters streamed layers cannot give gradients to. Use FSDP2 (fully_shard; "
            "fsdp_version: 2 in accelerate's config), DeepSpeed ZeRO or DDP."
        )
    if any(OPACUS_MODULE in base.__name__ for base in type(model).__mro__):
        refuse_opacus(type(model).__name__)
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise UnsupportedModelError(
            f"{lazy[0]} gets its shape in the model's first call, as parameters of "
            "torch.nn.LazyLinear do. Call the model on one batch before streambp.patch."
        )
    _refuse_wrapped_layers(model)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    stacks: list[Stack] = []
    bidirectional: list[Stack] = []
    reasons: list[str] = []
    lists = [
        (module, layers) for module in models for layers in module.children() if _is_stack(layers)
    ]
    direct_stacks = [(module, bare_layers(layers)) for module, layers in lists]
    for module, layers in direct_stacks or _deeper_stacks(models, set()):
        _refuse_unsloth(module, *layers)
        problem = _why_not(module, layers)
        if problem is not None:
            reasons.append(f"{type(module).__name__}: {problem}")
        elif _reads_ahead(layers):
            bidirectional.append(Stack(module, layers))
        else:
            stacks.append(Stack(module, layers))
    if direct_stacks:
        inner_ids = {id(inner) for _, layers in lists for inner in layers.modules()}
        for module, layers in _deeper_stacks(models, inner_ids):
            if _why_not(module, layers) is not None:
                continue
            if _reads_ahead(layers):
                bidirectional.append(Stack(module, layers))
            else:
                reasons.append(
                    f"{type(module).__name__}: its layers lie deeper in the model than those of "
                    f"{type(direct_stacks[0][0]).__name__}"
                )
    chosen, why_not_chosen = _choose_bidirectional(bidirectional, bool(stacks), towers)
    stacks += chosen
    reasons += why_not_chosen
    if not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be streamed. "
            + ("; ".join(reasons) if reasons else "It has no stack of transformers decoder layers")
            + ". Use gradient checkpointing for it."
        )
    return ModelStacks(tuple(stacks), tuple(reasons))


def _choose_bidirectional(
    bidirectional: list[Stack], has_causal: bool, towers: bool
) -> tuple[list[Stack], list[str]]:
    """Return the bidirectional stacks (encoders, vision or audio towers) that may run in chunks,
    and a text "class: reason" for each bidirectional stack that may not.

    If the model has no causal stack, stacks that read token ids run in chunks. If the model has
    one, only encoders with T5's bias run in chunks, because unpatched these would save attention
    weights for each pair of tokens. All other bidirectional stacks depend on `towers`.

    Args:
        bidirectional: the stacks whose layers have bidirectional self-attention.
        has_causal: True if the model also has a stack with causal self-attention.
        towers: True: the other bidirectional stacks run in chunks too, if they have trained
            parameters or are the model's only stacks.
    """
    chosen = []
    for stack in bidirectional:
        if has_causal:
            streams = _computes_biases(stack.backbone, stack.layers)
        else:
            streams = _reads_text(stack.backbone)
        if streams:
            chosen.append(stack)
    is_only_kind = not has_causal and not chosen
    reasons = []
    for stack in bidirectional:
        if stack in chosen:
            continue
        name = type(stack.backbone).__name__
        if not towers:
            reasons.append(
                f"{name}: its attention is bidirectional (an encoder or a tower); "
                "StreamConfig(towers=True) streams it"
            )
        elif is_only_kind or any(p.requires_grad for p in stack.backbone.parameters()):
            _refuse_unsloth(stack.backbone, *stack.layers)
            chosen.append(stack)
        else:
            reasons.append(f"{name}: none of its parameters is trained")
    return chosen, reasons


def _is_stack(module: nn.Module) -> TypeGuard[nn.ModuleList]:
    return isinstance(module, nn.ModuleList) and any(
        isinstance(layer, GradientCheckpointingLayer) for layer in bare_layers(module)[:1]
    )


def bare_layers(layers: nn.ModuleList) -> tuple[nn.Module, ...]:
    """Return the layers in this list without the wrappers that `torch.compile` puts around
    modules."""
    return tuple(layer._modules.get(COMPILED_MODULE_ATTRIBUTE) or layer for layer in layers)


def _deeper_stacks(
    models: list[PreTrainedModel], inner_ids: set[int]
) -> list[tuple[PreTrainedModel, tuple[nn.Module, ...]]]:
    """Return (model, layers) pairs for lists of decoder layers that are not direct children of
    their model, but inside another of its modules. Used to find a model's layers if no list is a
    direct child, and to find towers.

    Args:
        models: the transformers models, outermost first.
        inner_ids: id() of modules to leave out. The modules of found lists are added.
    """
    stacks: list[tuple[PreTrainedModel, tuple[nn.Module, ...]]] = []
    for model in reversed(models):  # innermost model first
        for module in model.modules():
            if id(module) in inner_ids or not isinstance(module, nn.ModuleList) or not len(module):
                continue
            layers = bare_layers(module)
            is_layer = attends(layers[0]) or cache_argument(layers[0])
            if _is_stack(module) or (
                is_layer and ATTENTION_NAMES.isdisjoint(_names_in_forward(layers[0]))
            ):
                stacks.insert(0, (model, layers))
                inner_ids |= {id(inner) for inner in module.modules()}
    return stacks


def _refuse_wrapped_layers(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a decoder layer is inside a wrapper module, such as torch's
    checkpoint_wrapper."""
    for layers in model.modules():
        for layer in layers if isinstance(layers, nn.ModuleList) else ():
            inner = _wrapped_layer(layer)
            if inner is not None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} has a {type(layer).__name__} around some or all of "
                    f"its {type(inner).__name__} layers, so streambp cannot identify the layer "
                    f"itself. Remove the {type(layer).__name__} (streamed layers need no gradient "
                    "checkpointing), or add it after streambp.patch."
                )


def _wrapped_layer(module: nn.Module) -> nn.Module | None:
    """Return the decoder layer inside a module that wraps this one layer; None for other
    modules."""
    if (
        isinstance(module, GradientCheckpointingLayer | nn.ModuleList)
        or COMPILED_MODULE_ATTRIBUTE in module._modules
    ):
        return None
    children = list(module.children())
    layers = [child for child in children if isinstance(child, GradientCheckpointingLayer)]
    if len(layers) == 1:
        return layers[0]
    if len(children) != 1:
        return None
    # Layers that transformers does not checkpoint are identified by their content.
    [inner] = children
    is_layer = (
        ATTENTION_NAMES.isdisjoint(_names_in_forward(inner))
        and bool(list(inner.children()))
        and (attends(inner) or cache_argument(inner))
    )
    return _wrapped_layer(inner) or (inner if is_layer else None)


def _refuse_unsloth(*modules: nn.Module) -> None:
    """Raise UnsupportedModelError if Unsloth has replaced the forward of one of these modules,
    because its forward cannot be cut into chunks."""
    for module in modules:
        for home in map(home_of, wrapped_functions(type(module).forward)):
            if home.startswith(UNSLOTH):
                raise UnsupportedModelError(
                    f"Unsloth has replaced the forward of {type(module).__name__} (in {home}) with "
                    "one that cannot be cut into chunks. Load the model with transformers in a "
                    "process that does not import unsloth, or train it with Unsloth's own "
                    "checkpointing, without streambp."
                )


def attends(layer: nn.Module) -> bool:
    """True if the layer leaves its attention to functions of transformers' ALL_ATTENTION_FUNCTIONS,
    without selecting or weighting keys itself. streambp can then replace these functions."""
    return bool(_attentions(layer)) and not any(map(_looks_at_keys, _attentions(layer)))


def cache_argument(layer: nn.Module) -> str | None:
    """Return the name of the cache argument, such as past_key_values, of a layer whose own code
    attends to the keys and values that the cache's `update` returns. None for other layers."""
    if attends(layer) or not any(
        UPDATE_METHOD in _names_in_forward(m) and cache_parameters(type(m).forward)
        for m in layer.modules()
    ):
        return None
    return next(iter(cache_arguments(layer)), None)


def replaced_attention(layer: nn.Module) -> str | None:
    """Return the full name of the third-party function that has replaced the forward of an
    attention class in the layer. None if there is no such function. Also None, without a search,
    for a layer whose attention function, cache or recurrent states streambp can replace (`attends`,
    `cache_argument`, `states_argument`)."""
    if attends(layer) or cache_argument(layer) or states_argument(layer):
        return None
    for module in layer.modules():
        wrote = next((base for base in type(module).__mro__ if "forward" in vars(base)), nn.Module)
        home = home_of(written_forward(module))
        if (
            ATTENTION in type(module).__name__
            and home != wrote.__module__
            and not home.startswith("transformers.")
        ):
            return f"{home}.{name_of(written_forward(module))}"
    return None


def states_argument(layer: nn.Module) -> str | None:
    """Return the name of the argument through which a layer gets its recurrent states, or the cache
    that holds the states. Chunks pass states on through this argument. None if the layer has no
    states, or writes to its states in place, so that no gradient would pass through the states."""
    if any(set(STATE_PROTOCOL) & set(_names_in_forward(module)) for module in layer.modules()):
        return next(iter(cache_arguments(layer)), None)
    # A module must not assign to items if it uses the states by the same name.
    knowing = (
        written_forward(m) for m in layer.modules() if STATE_ARGUMENT in _variables_in_forward(m)
    )
    writes = (
        step.opname == "STORE_SUBSCR"
        for forward in knowing
        for step in dis.get_instructions(forward)
    )
    return STATE_ARGUMENT if _takes_states(layer) and not any(writes) else None


def kind_of(layer: nn.Module, tower: bool = False) -> LayerKind:
    """Return the objects that pass keys, values and recurrent states of a layer from chunk to chunk
    (`LayerKind`). The classes of these objects are chosen by the code of the layer and of the
    modules inside. [Note: carriers]

    Args:
        layer: the decoder layer.
        tower: True if the layer belongs to a vision or audio tower (`is_tower`).
    """
    cache, states = cache_argument(layer), states_argument(layer)
    attention_function = replaced_attention(layer)
    if cache is not None:
        ahead = attends_ahead_by_itself(layer)
        attention: NoAttention = (
            BidirectionalCacheAttention(cache) if ahead else CacheAttention(cache)
        )
    elif attends(layer) and adds_bias(layer):
        # a bias by distance needs no positions from a cache
        attention = BiasedAttention(_takes_argument(layer, POSITION_BIAS))
        if is_bidirectional(layer):
            attention = BidirectionalBiasedAttention(attention.gets_bias)
        return LayerKind(attention, StateCarrier(""), "")
    elif is_bidirectional(layer):
        attention = TowerAttention(_why_no_mask(layer)) if tower else BidirectionalAttention()
    elif attends(layer):
        picks = any(map(_passes_picked_keys, _attentions(layer)))
        if picks:
            top = next((getattr(indexer, INDEX_TOPK) for indexer in indexers_of(layer)), None)
        else:
            top = None
        attention = SparseAttention(top) if picks else InterfaceAttention()
    else:
        attention = (
            NoAttention() if attention_function is None else ForeignAttention(attention_function)
        )
    carrier = StateCarrier(states or "", returned=states == STATE_ARGUMENT)
    return LayerKind(attention, carrier, position_cache(layer))


def shares_through_cache(backbone: PreTrainedModel) -> bool:
    """True if later layers of the model read the keys and values of earlier layers from the cache,
    as in Gemma 3n and 4 of transformers 5.5. Without a cache, the later layers compute other keys
    and values."""
    if not getattr(backbone.config, SHARED_LAYER_COUNT, 0):
        return False
    return any(SHARED_LAYERS in _names_in_forward(module) for module in backbone.modules())


def position_cache(layer: nn.Module) -> str:
    """Return the name of the cache argument if a module inside the layer asks the cache for the
    number of earlier tokens, else "". A chunk gets another cache in this argument, which returns
    the number of tokens before the chunk. Otherwise the module would count from 0 in every chunk.
    """
    asking = (
        module for module in layer.modules() if not getattr(module, "is_cross_attention", False)
    )
    if not any(SEQUENCE_LENGTH in _names_in_forward(module) for module in asking):
        return ""
    return next(iter(cache_arguments(layer)), "")


def _why_not(backbone: PreTrainedModel, layers: tuple[nn.Module, ...]) -> str | None:
    """Return why this stack's layers cannot run in chunks, as text for `streambp.describe`; None if
    their code and config give no reason.

    Args:
        backbone: the model that runs the layers.
        layers: the decoder layers.
    """
    ahead = _reads_ahead(layers)
    has_encoder = getattr(backbone.config, "is_encoder_decoder", False)
    for biased in filter(_adds_biases, (a for layer in layers for a in _attentions(layer))):
        name = type(biased).__name__
        unknown = not biases_distances(biased)
        if unknown and (ahead or has_encoder):
            return f"{name} adds a bias to each score, which streambp does not compute"
        if not unknown and ahead and not _computes_biases(backbone, layers):
            return (
                f"{name} adds a bias for each pair of positions, which its model computes outside "
                "of the layers"
            )
    if getattr(backbone.config, "is_encoder_decoder", False):
        unmasked = next((x for x in layers if not _takes_argument(x, "attention_mask")), None)
        if unmasked is not None:
            return (
                f"{type(unmasked).__name__} takes no attention_mask: its model makes a causal mask "
                "only where it keeps no keys and values, and streambp turns use_cache off"
            )
    by_itself = all(map(attends_ahead_by_itself, layers))
    if not (ahead or by_itself) and (reason := _why_config_differs(backbone, layers)) is not None:
        return reason
    for layer in layers:
        if isinstance(layer, GradientCheckpointingLayer) != isinstance(
            layers[0], GradientCheckpointingLayer
        ):
            return f"{type(layer).__name__} is not a GradientCheckpointingLayer"
        attentions = _attentions(layer)
        if is_bidirectional(layer):
            name = type(attentions[0]).__name__
            reads_encoder = _takes_argument(layer, "encoder_hidden_states")
            if reads_encoder and not _takes_argument(layer, "attention_mask"):
                return f"{name} attends to its own tokens and to an encoder's output at once"
            several = len(attentions) > 1 and not (reads_encoder and _is_decoder(backbone))
            if several or not attends(layer):
                return (
                    f"{name} is bidirectional (is_causal=False), and attends more than once or to "
                    "keys that it selects itself"
                )
        # Doge computes a mask from its values.
        masking = (
            a
            for a in attentions
            if any("mask" in name and hasattr(type(a), name) for name in _names_in_forward(a))
        )
        ranking = next((a for a in masking if not _looks_at_keys(a)), None)
        if ranking is not None:
            return (
                f"{type(ranking).__name__} reads the keys whose values rank highest, in which "
                "equal tokens tie, and which of them it reads depends on how many keys there are"
            )
        indexer = next((m for m in layer.modules() if INDEXER in type(m).__name__), None)
        if indexer is not None and not any(
            _looks_at_keys(a) or _passes_picked_keys(a) for a in attentions
        ):
            return (
                f"its attention is sparse, {type(indexer).__name__} picks among keys that it pools "
                "in a cache of its own"
            )
    kinds = (attends, cache_argument, states_argument, replaced_attention)
    if not any(known_by(layer) for layer in layers for known_by in kinds):
        writing = next((layer for layer in layers if _takes_states(layer)), None)
        if writing is not None:
            return (
                f"{type(writing).__name__} writes its states in place, where no gradient follows "
                "them to the next chunk"
            )
        return (
            "its layers neither attend, through transformers' interface or over what a cache "
            "returns, nor keep states there"
        )
    return None


def _why_config_differs(backbone: PreTrainedModel, layers: tuple[nn.Module, ...]) -> str | None:
    """Return the reason, as text for `streambp.describe`, not to run a stack in chunks. The reason
    is bidirectional attention, which the model's config or its mask shows, but no attribute of the
    attention modules does. None if config and mask are causal.

    Args:
        backbone: the model that runs the layers.
        layers: the decoder layers, none of which has bidirectional attention modules.
    """
    if getattr(backbone.config, "is_causal", True) is False:
        return (
            "its config is bidirectional (is_causal=False), and its attention modules are causal; "
            "set is_causal=False on them, too"
        )
    # A model whose mask is causal in a decoder and bidirectional in an encoder, which it is here.
    is_encoder = getattr(backbone.config, "is_decoder", True) is False
    if is_encoder and {"is_decoder", *MASK_MAKERS} <= _names_in_methods(backbone):
        return (
            "its attention is bidirectional, a chunk would read what later chunks hold; it is "
            "causal with config.is_decoder=True, which is False here"
        )
    return _why_mask_differs(backbone, layers)


def _why_mask_differs(backbone: PreTrainedModel, layers: tuple[nn.Module, ...]) -> str | None:
    """Return the reason, as text for `streambp.describe`, not to run a stack in chunks: the mask is
    bidirectional, but the attention modules lack the attribute `is_causal`. The attribute is the
    mark by which streambp recognizes bidirectional layers. None if a module has the attribute, or
    if the mask is causal.

    Args:
        backbone: the model that makes the mask and runs the layers.
        layers: the decoder layers.
    """
    # Splinter's and LayoutLM's attention modules lack the attribute.
    for layer in layers:
        if any(hasattr(attention, "is_causal") for attention in _attentions(layer)):
            return None
    names = _names_in_methods(backbone)
    if getattr(backbone.config, "is_decoder", False) and EITHER_MASK in names:
        return None
    if any("causal" in name for name in names) or names.isdisjoint(BIDIRECTIONAL_MASKS):
        return None
    return (
        f"{type(backbone).__name__} makes a bidirectional mask, a chunk would read what later "
        "chunks hold; its attention modules have no attribute is_causal, by which streambp finds "
        "bidirectional layers"
    )


def _names_in_methods(module: nn.Module) -> set[str]:
    """Return the names of functions, attributes and variables in the methods that a module's class
    defines itself. The names of mask functions among them show if the model's mask is causal."""
    functions = [written_forward(module)]
    for value in vars(type(module)).values():
        if inspect.isfunction(value):
            functions.append(inspect.unwrap(value))
    names: set[str] = set()
    for function in functions:
        if hasattr(function, "__code__"):
            names.update(function.__code__.co_names)
            # A variable may have any meaning in another library.
            if type(module).__module__.startswith(TRANSFORMERS_PREFIX):
                names.update(function.__code__.co_varnames)
    return names


def is_bidirectional(layer: nn.Module) -> bool:
    """True if the layer has attention modules, and all of them are bidirectional (is_causal=False).
    False for a decoder's layer with causal self-attention and cross-attention to an encoder's
    output, because the self-attention is causal."""
    attentions = _attentions(layer)
    return bool(attentions) and all(
        getattr(attention, "is_causal", True) is False for attention in attentions
    )


def attends_ahead_by_itself(layer: nn.Module) -> bool:
    """True if a layer has bidirectional attention in code of its own, outside of transformers'
    attention functions. Such a layer has a cache argument, as a decoder's layer has, but its
    modules have the attribute is_decoder=False."""
    says = [module.is_decoder for module in layer.modules() if hasattr(module, "is_decoder")]
    if not says or any(says):  # first, because it is found sooner than the cache's argument
        return False
    return cache_argument(layer) is not None


def _reads_ahead(layers: tuple[nn.Module, ...]) -> bool:
    """True if one of these layers has bidirectional self-attention. A layer with self-attention and
    cross-attention to an encoder's output does not count, because a decoder's self-attention is
    causal."""
    for layer in layers:
        attentions = _attentions(layer)
        if len(attentions) == 1 and getattr(attentions[0], "is_causal", True) is False:
            return True
        if attends_ahead_by_itself(layer):
            return True
    return False


def _reads_text(backbone: PreTrainedModel) -> bool:
    """True if a stack's model gets token ids, and no pixels or audio. A bidirectional stack of this
    kind runs in chunks if the model has no causal stack."""
    # Parts of older vision models have the main_input_name of text.
    return backbone.main_input_name == "input_ids" and not is_tower(backbone)


def is_tower(backbone: PreTrainedModel) -> bool:
    """True if a model is a vision or audio tower: its forward has no argument input_ids, so it
    computes pixels, audio or their embeddings. The layers of such a model get no attention_mask if
    there is no padding."""
    return not _takes_argument(backbone, "input_ids")


def _why_no_mask(layer: nn.Module) -> str | None:
    """Return the reason, as text for `streambp.describe`, why a layer of a vision or audio tower
    cannot run in chunks: its forward takes no attention_mask. The keys that a chunk reads are
    passed in this argument. None if the forward takes it."""
    if _takes_argument(layer, "attention_mask"):
        return None
    name = type(layer).__name__
    if _takes_argument(layer, SEGMENT_ENDS):
        return (
            f"{name} takes {SEGMENT_ENDS} in place of an attention_mask: it attends within each "
            "image or frame of one row without a batch dimension"
        )
    return f"{name} takes no attention_mask, in whose place a chunk gets its keys"


def _takes_argument(layer: nn.Module, argument: str) -> bool:
    """True if the layer's forward has an argument of this name. Also true if the forward is no
    Python function, because its arguments are then unknown."""
    forward = written_forward(layer)
    if not hasattr(forward, "__code__"):
        return True
    return argument in inspect.signature(forward).parameters


def _takes_states(layer: nn.Module) -> bool:
    """True if the layer's forward has an argument for recurrent states. False if the forward is no
    Python function."""
    forward = written_forward(layer)
    return hasattr(forward, "__code__") and STATE_ARGUMENT in inspect.signature(forward).parameters


def adds_bias(layer: nn.Module) -> bool:
    """True if an attention module of the layer passes a bias for each distance between two
    positions to transformers' attention function, as T5 does."""
    return any(
        _adds_biases(attention) and biases_distances(attention) for attention in _attentions(layer)
    )


def _is_decoder(backbone: PreTrainedModel) -> bool:
    """True if a stack's config says that the stack is a decoder, or part of an encoder-decoder. The
    stack's layers may then attend to an encoder's output, too."""
    config = backbone.config
    if getattr(config, "is_decoder", False):
        return True
    return bool(getattr(config, "is_encoder_decoder", False))


def _computes_biases(backbone: PreTrainedModel, layers: tuple[nn.Module, ...]) -> bool:
    """True if the layers of a stack add T5's bias and compute the bias themselves, from a table in
    one of their attention modules. False if the stack computes a bias outside of its layers (UDOP).

    Args:
        backbone: the model that runs the layers.
        layers: the layers of the stack.
    """
    inside = [module for layer in layers for module in layer.modules()]
    for module in backbone.modules():
        if hasattr(module, BIAS_TABLE) and module not in inside:
            return False
    return all(map(adds_bias, layers)) and any(map(has_table, inside))


def _adds_biases(attention: nn.Module) -> bool:
    """True if the attention module passes a bias for each pair of positions to transformers'
    attention function, as T5 does."""
    constants = written_forward(attention).__code__.co_consts
    return any(isinstance(const, tuple) and POSITION_BIAS in const for const in constants)


def _attentions(layer: nn.Module) -> list[nn.Module]:
    """Return the modules inside the layer whose forward names ALL_ATTENTION_FUNCTIONS,
    transformers' table of attention functions."""
    return [module for module in layer.modules() if ATTENTION_TABLE in _names_in_forward(module)]


def _looks_at_keys(attention: nn.Module) -> bool:
    """True if the attention module's own code selects or weights keys among all keys that its cache
    returns. The code may have an indexer (sparse attention), an argument with key indices that an
    earlier layer's indexer selected, or a bias for each pair of positions.

    False if the module only passes selected key indices on to transformers' attention function.
    """
    if _passes_picked_keys(attention):
        return False
    indexed = any(INDEXER in type(module).__name__ for module in attention.children())
    return UPDATE_METHOD in _names_in_forward(attention) and (
        indexed
        or biases_positions(attention)
        or PICKED_KEYS_ARGUMENT in _variables_in_forward(attention)
    )


def _passes_picked_keys(attention: nn.Module) -> bool:
    """True if the attention module passes the key indices that an indexer selected (sparse
    attention) to transformers' attention function, and its indexer can run on a part of the
    queries. [Note: indexers]"""
    forward = written_forward(attention)
    keywords = (const for const in forward.__code__.co_consts if isinstance(const, tuple))
    if (
        UPDATE_METHOD not in _names_in_forward(attention)
        or not any(PICKS_ARGUMENT in names for names in keywords)
        or biases_positions(attention)
    ):
        return False
    indexers = indexers_of(attention)
    return bool(indexers or PICKED_KEYS_ARGUMENT in _variables_in_forward(attention)) and all(
        set(INDEXER_CALLS) <= set(_names_in_forward(indexer))
        and hasattr(indexer, INDEX_HEADS)
        and hasattr(indexer, INDEX_TOPK)
        for indexer in indexers
    )


def _variables_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments and local variables of a module's forward, by which its
    kind of attention or states is recognized."""
    forward = written_forward(module)
    return forward.__code__.co_varnames if hasattr(forward, "__code__") else ()


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of a module's forward, by which its
    kind of attention or states is recognized."""
    forward = written_forward(module)
    return forward.__code__.co_names if hasattr(forward, "__code__") else ()
