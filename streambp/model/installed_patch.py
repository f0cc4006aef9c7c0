"""Find what `patch` installed in a model."""

from __future__ import annotations

from torch import nn

from streambp.errors import StreamBPError
from streambp.instance_forward import PATCH_ATTRIBUTE, InstanceForward, check_is_module, forwards
from streambp.model.causal_lm import CausalLMForward
from streambp.model.state import PatchState
from streambp.model.wrappers import BackboneForward, LayerForward

PATCH_FORWARDS = (BackboneForward, LayerForward, CausalLMForward)


def streamed_head(model: nn.Module) -> CausalLMForward | None:
    """Return the `CausalLMForward` that replaced the forward of a language model; None if there is
    none.

    Args:
        model: the language model. `patch` may have been called on a module around or inside the
            model.
    """
    return next(
        (f for f in forwards(model) if isinstance(f, CausalLMForward) and not f.retired), None
    )


def is_patched(model: nn.Module) -> bool:
    """True if a forward that `patch` installed is active in a model. The module that was passed to
    `patch` may be the model, a part, or a module around the model."""
    wrappers = (
        f for module in model.modules() for f in forwards(module) if isinstance(f, InstanceForward)
    )
    return any(not wrapper.retired for wrapper in wrappers)


def is_detached(model: nn.Module) -> bool:
    """True if `patch` was called on a module around `model`, and `model` was later copied or taken
    out of that module. The forwards inside of `model` are still replaced, but no module around them
    is patched. `patch` then removes these forwards first."""
    state = next(
        (
            f.state
            for module in model.modules()
            for f in forwards(module)
            if isinstance(f, PATCH_FORWARDS)
        ),
        None,
    )
    root = None if state is None else state.root
    return (
        root is not None
        and PATCH_ATTRIBUTE not in root.__dict__
        and any(module is root for module in model.modules())
    )


def find_patch(model: nn.Module) -> tuple[nn.Module, PatchState] | None:
    """Return the module that was passed to `patch`, and the patch's state; None if the model is not
    patched.

    The module is the model itself, a part of it, or a wrapper around the model (DDP, a DeepSpeed
    engine). A wrapper counts only if all modules with replaced forwards in it belong to the model.

    Raises:
        StreamBPError: the patch also covers layers outside of `model`.
        UnsupportedModelError: `model` is no module.
    """
    check_is_module(model)
    for module in model.modules():
        if PATCH_ATTRIBUTE in module.__dict__:
            own_state: PatchState = module.__dict__[PATCH_ATTRIBUTE]
            if not own_state.home.is_alive:  # of a copy
                own_state.home.name(module)
            return module, own_state
    state = next(
        (
            f.state
            for module in model.modules()
            for f in forwards(module)
            if isinstance(f, PATCH_FORWARDS) and not f.retired
        ),
        None,
    )
    root = None if state is None else state.root
    if state is None or root is None:
        return None
    inside_model, inside_root = (set(map(id, around.modules())) for around in (model, root))
    if any(id(wrapper.module) in inside_root - inside_model for wrapper in state.wrappers):
        raise StreamBPError(
            f"This {type(model).__name__} is a part of a {type(root).__name__} that was given to "
            "streambp.patch, and other parts of it stream as well. Pass the whole model."
        )
    return root, state
