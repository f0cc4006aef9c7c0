"""Install and remove streaming forwards.

`streambp.patch` is in `planner/auto.py`, because it counts steps of patched models.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from streambp.admission.stacks import (
    ModelStacks,
    Stack,
    find_stacks,
    is_tower,
    shares_through_cache,
)
from streambp.admission.third_party import refuse_foreign_attention
from streambp.config import LAST_LAYERS_SEPARATOR, SAVES, StreamConfig
from streambp.errors import ConfigError, StreamBPError
from streambp.instance_forward import (
    PATCH_ATTRIBUTE,
    REDUCE_METHOD,
    WRAPPERS_ATTRIBUTE,
    InstanceForward,
    PatchedModuleRef,
    forwards,
    reduce_unpatched,
    unmark,
)
from streambp.known_names import FINAL_NORMS
from streambp.layer.packed_experts import refuse_without_backward
from streambp.layer.products import computes_plainly, match_names
from streambp.model.causal_lm import CausalLMForward
from streambp.model.chosen_kernels import choose_kernels
from streambp.model.fused_head import FusedHead, copy_head
from streambp.model.installed_patch import find_patch, is_detached, is_patched
from streambp.model.last_step import record_of
from streambp.model.packed_adapters import activate_packed, deactivate_packed
from streambp.model.patch_rollback import restore_on_error
from streambp.model.state import PatchState
from streambp.model.steps import Steps
from streambp.model.unpatched import UnpatchedRuns
from streambp.model.wrappers import BackboneForward, LayerForward
from streambp.offload.costs import StepFigures
from streambp.offload.free_memory import FreeMemory
from streambp.offload.host_choice import HostChoice
from streambp.offload.link import LinkBudget
from streambp.offload.manager import OffloadManager
from streambp.offload.policy import SavesPolicy
from streambp.offload.weights import HostWeights, several_ranks

Model = TypeVar("Model", bound=nn.Module)


class StepPredictor(Protocol):
    """Interface of a class that predicts the memory and the seconds of a patched model's steps, for
    settings that are "auto". `planner/auto.py` has such a class.

    Args:
        home: weak reference to the patched model.
        config: settings of the patch.
    """

    def __init__(self, home: PatchedModuleRef, config: StreamConfig) -> None: ...

    def __call__(self, device: torch.device) -> tuple[StepFigures, float]:
        """Return predictions for the model's steps on a device.

        Args:
            device: the device.

        Returns:
            The predictions (memory, bytes of saved tensors, seconds), and a fraction: the bytes of
                trained parameters that have a gradient now, divided by the bytes of all trained
                parameters.
        """
        ...

    def room_for_weights(self, device: torch.device, rows: int, length: int) -> float:
        """Return how many bytes of `device` the weights of layers may take, beside everything else
        that a step needs. Weights beyond this number are stored on the host.

        Args:
            device: the device.
            rows: rows of the batch.
            length: tokens of each row.
        """
        ...


def install(
    model: Model, config: StreamConfig | None = None, states: type[StepPredictor] | None = None
) -> Model:
    """Replace the forwards of a model so that its layers are computed chunk by chunk, and return
    the model. If an error is raised, the model is left as it was before: unpatched, or with its
    previous patch.

    Args:
        model: a transformers model, or a module that contains one. Changed in place.
        config: settings; `StreamConfig()` if None.
        states: class that predicts the memory and the seconds of steps, for settings that are
            "auto". None: such settings are not chosen by memory, and steps are not logged.

    Raises:
        StreamBPError: the model cannot be patched, or is part of a patched model.
    """
    config = StreamConfig() if config is None else config
    if not isinstance(config, StreamConfig):
        raise StreamBPError(
            f"config is {type(config).__name__}; pass a streambp.StreamConfig, or leave it out."
        )
    stacks = find_stacks(model, config.towers)
    everyone = (forward for module in model.modules() for forward in forwards(module))
    # trainers call them
    heads = {f.module: f for f in everyone if isinstance(f, FusedHead) and not f.retired}
    with restore_on_error(model):
        state = _install_patch(model, config, stacks, heads)
        if states is not None:
            _set_auto(state, type(model).__name__, states(state.home, state.config))
    return model


def _install_patch(
    model: nn.Module, config: StreamConfig, stacks: ModelStacks, heads: dict[nn.Module, FusedHead]
) -> PatchState:
    """Remove the model's existing patch, install a new one, and return the new patch's state.

    Args:
        model: the model.
        config: the settings.
        stacks: the model's backbones with their decoder layers.
        heads: dict from each language model with a fused head of TRL to this head (`FusedHead`),
            whose settings the new patch gets.
    """
    if any(hasattr(module, PATCH_ATTRIBUTE) for module in model.modules()) or is_detached(model):
        unpatch(model)
    _check_products(stacks, config)
    if is_patched(model):  # two patches would have two sets of settings for the same layers
        raise StreamBPError(
            f"This {type(model).__name__} is part of a model that is patched already. Patch that "
            "model again to change its settings, or call streambp.unpatch on it first."
        )
    layers = [layer for stack in stacks.stacks for layer in stack.layers]
    shared = any(shares_through_cache(stack.backbone) for stack in stacks.stacks)
    state = PatchState(
        config,
        home=PatchedModuleRef(model),
        left_alone=stacks.left_alone,
        shares_through_cache=shared,
    )
    if config.always_moves or config.may_move:
        host_memory, gpu_memory = (
            None if m is None else int(m) for m in (config.host_memory, config.gpu_memory)
        )
        state.offloader = OffloadManager(
            host_memory, config.on_host_full, len(layers), gpu_memory, on_demand=config.may_move
        )
    resident = config.weights == "device" or (config.weights == "auto" and several_ranks())
    state.weights = None if resident else HostWeights(state.home, config.host_memory)  # type: ignore[arg-type]
    state.steps = Steps(state.offloader)
    wrappers = _make_wrappers(state, model, stacks.stacks, layers)
    for wrapper in wrappers:
        if isinstance(wrapper, BackboneForward):
            refuse_foreign_attention(wrapper.attentions)
    refuse_without_backward(model)
    activate_packed(model)
    state.fused = choose_kernels(model, config)
    for order, wrapper in enumerate(wrappers):
        wrapper.order = order
        state.enter(wrapper)
        wrapper.install()
    if state.weights is not None:
        state.weights.ranges.install(state.steps.layer_states)
    for causal in [wrapper for wrapper in wrappers if isinstance(wrapper, CausalLMForward)]:
        head = copy_head(causal, heads.get(causal.module))
        if head is not None and config.head and causal.third_party_forward is None:
            head.install()
    model._streambp = state  # type: ignore[assignment]
    model.__dict__.setdefault(REDUCE_METHOD, functools.partial(reduce_unpatched, model))
    return state


def _set_auto(state: PatchState, name: str, states: StepPredictor) -> None:
    """Create the objects that decide settings with the value "auto", and store them in the patch's
    state. Also turn on the log of steps.

    Args:
        state: the patch's state.
        name: name of the model in the log.
        states: predicts the memory and the seconds of steps.
    """
    config = state.config
    steps = state.steps
    steps.name = name
    steps.tell = functools.partial(record_of, state)
    sizes = config.chunk_size == "auto"
    saves = config.saves == "auto"
    on_device = config.offload == "auto" and config.gpu_memory is None
    link = None
    host = None
    if state.offloader is not None and config.may_move:
        host = HostChoice(state.offloader)
    elif state.offloader is not None and (saves or on_device):
        link = LinkBudget(state.offloader, on_device)
    if state.weights is not None and config.weights == "auto":
        state.weights.headroom = states.room_for_weights
    if not steps.layer_states or not (sizes or saves or link is not None):
        return
    number = 1 + max(layer_state.index for layer_state in steps.layer_states)
    policy = SavesPolicy(number, FreeMemory(), states, sizes, saves, link, host)
    state.saves_policy = policy
    for layer_state in steps.layer_states:
        layer_state.chunk_rule = policy.chunk if sizes else None
        layer_state.saves_policy = policy if saves or link is not None else None
    if not saves or link is not None:
        return
    state.pending.drop_saves = policy.drop_saves
    # a step's tokens do not tell how many pixels or frames a tower gets
    has_tower = any(s.kind.attention.needs_no_mask for s in steps.layer_states)
    may_run = config.unpatched_runs and config.rows != "packed" and config.weights != "cpu"
    if may_run and not has_tower:
        state.unpatched = UnpatchedRuns(config, policy, steps)


def _make_wrappers(
    state: PatchState, model: nn.Module, stacks: tuple[Stack, ...], layers: list[nn.Module]
) -> list[InstanceForward]:
    """Return the objects that replace the forwards of backbones, decoder layers and language
    models, in the order of installation.

    Args:
        state: the patch's state.
        model: the patched model.
        stacks: each backbone with its decoder layers.
        layers: all decoder layers of the model. A layer's position in this list is its index, by
            which reports and errors name it.
    """
    wrappers: list[InstanceForward] = []
    norms: dict[int, nn.Module] = {}  # final norm of each backbone
    for stack in stacks:
        backbone = stack.backbone
        tower = is_tower(backbone)
        wrappers.append(BackboneForward(backbone, state, stack.layers))
        norm = next(
            (getattr(backbone, name) for name in FINAL_NORMS if hasattr(backbone, name)), None
        )
        norms.update({} if norm is None else {id(backbone): norm})
        for layer in stack.layers:
            layers_left = len(stack.layers) - stack.layers.index(layer)
            wrapper = LayerForward(
                layer, state, layers.index(layer), norm if layers_left == 1 else None, tower
            )
            wrapper.layer_state.config = state.config.of_layer(layers_left)
            wrapper.layer_state.backward_begins = state.steps.start_backward
            wrappers.append(wrapper)
    backbones = {id(stack.backbone) for stack in stacks}
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or id(module) in backbones:
            continue
        head = module.get_output_embeddings()
        if not _has_weight(head) or all(child is not head for child in module.children()):
            continue
        decoder = module.get_decoder()
        module_ids = (
            {id(part) for part in decoder.modules()} if isinstance(decoder, nn.Module) else set()
        )
        head_norms = tuple(
            norm for key, norm in norms.items() if key in module_ids or not backbones & module_ids
        )
        wrappers.append(CausalLMForward(module, state, head_norms))
    return wrappers


def _has_weight(head: Any) -> bool:
    """True if an output projection has a weight. A parametrized weight (torch.nn.utils.parametrize)
    is not read here: torch would compute the weight, and spectral_norm would change its buffers."""
    if parametrize.is_parametrized(head, "weight"):
        return True
    return isinstance(getattr(head, "weight", None), Tensor)


def _check_products(stacks: ModelStacks, config: StreamConfig) -> None:
    """Raise if a name in the setting `saves` selects no Linear of the model's layers. Such names
    are globs; for example, "mlp.*@12" selects the Linears whose names match "mlp.*" in the last 12
    layers.

    Args:
        stacks: the model's backbones with their decoder layers.
        config: the settings.

    Raises:
        ConfigError: a glob matches no Linear of any layer, or asks for more layers than the model
            has.
    """
    layers = [layer for stack in stacks.stacks for layer in stack.layers]
    depth = max(len(stack.layers) for stack in stacks.stacks)
    for name in config.named_saves:
        count = name.partition(LAST_LAYERS_SEPARATOR)[2]
        if count and int(count) > depth:
            raise ConfigError(
                f"saves names {name!r}, the last {count} layers; the model has {depth}. Leave "
                f"{LAST_LAYERS_SEPARATOR} out for all."
            )
    linears = {
        name: m for layer in layers for name, m in layer.named_modules() if isinstance(m, nn.Linear)
    }
    names = [name for name, module in linears.items() if computes_plainly(module)]
    for glob in config.products:
        if not match_names(names, [glob]):
            names_text = ", ".join(name.removesuffix(".base_layer") for name in names[:16])
            class_names = sorted(
                {type(linears[name]).__name__ for name in match_names(linears, [glob])}
            )
            if class_names:
                raise ConfigError(
                    f"saves names {glob!r}, and these Linears compute in their own way "
                    f"({', '.join(class_names)}): what their forward computes inside is needed in "
                    "backward, so that a saved product would save nothing. Leave the name out of "
                    f"saves. Linears whose products can be saved: {names_text or 'none'}."
                )
            raise ConfigError(
                f"saves names {glob!r}, which is neither of {list(SAVES)} nor the name of a Linear "
                f"in the model's layers. Name some of these Linears: {names_text or 'none'}."
            )


def unpatch(model: Model) -> Model:
    """Remove everything that `patch` installed, and restore the model exactly. A model that is not
    patched is returned unchanged.

    Raises:
        StreamBPError: the patch also covers layers outside of `model`.
    """
    module_and_state = find_patch(model)
    while module_and_state is not None:
        module, state = module_and_state
        root = state.root or module
        for patched in dict.fromkeys((module, root)):  # two modules after `copy.copy`
            patched.__dict__.pop(PATCH_ATTRIBUTE, None)
            for wrapper in (
                reversed(patched.__dict__.pop(WRAPPERS_ATTRIBUTE, ()))
                if patched is not root
                else ()
            ):
                wrapper.remove_from_attributes(patched.__dict__)
        for wrapper in reversed(state.wrappers):
            wrapper.remove()
        state.fused.uninstall()
        deactivate_packed(root)
        if state.weights is not None:
            state.weights.ranges.remove()
            state.weights.close()
        unmark(module)
        module_and_state = find_patch(model)
    return model
