"""Add LoRA adapters to a model without data (meta or fake tensors), on the Linears that peft
accepts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from unittest import mock

from torch import Tensor, nn

from streambp.errors import ConfigError
from streambp.known_names import APPLY_METHOD
from streambp.libraries import require_library
from streambp.reporting import reason

ALL_LINEARS = "all-linear"


def add_adapters(
    model: nn.Module, rank: int, targets: Sequence[str] = ()
) -> tuple[nn.Module, tuple[str, ...]]:
    """Add LoRA adapters to a model whose tensors have no data. Return the PeftModel, and names of
    Linears that have no adapter, for a note to the user.

    If `targets` is empty, the returned names are those of Linears that peft refuses to adapt.
    Otherwise the returned names are the targets that no module of the model has. Peft ignores these
    silently.

    Args:
        model: the model, on meta or fake tensors; changed.
        rank: rank of the adapters.
        targets: names of the Linears that get adapters ("q_proj", for example); empty: all Linears
            that peft accepts.

    Raises:
        ConfigError: peft refuses a name in `targets`, or no module of the model has any of these
            names.
    """
    with require_library("peft"):
        from peft import LoraConfig, get_peft_model
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names: dict[str, None] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            names[path.rpartition(".")[2]] = None
    refused_names: list[str] = []
    if not targets:
        refused_names = [name for name in names if _is_refused(model, name)]
    modules: str | list[str] = list(targets) or ALL_LINEARS
    if refused_names:
        modules = [name for name in names if name not in refused_names]
    unknown_targets: list[str] = []
    for target in targets:
        if not _matches(model, target):
            unknown_targets.append(target)
    if unknown_targets and len(unknown_targets) == len(targets):
        raise ConfigError(
            f"{type(model).__name__} has no Linear named {', '.join(unknown_targets)}. Pass names of its "
            f"Linears: --lora-targets {','.join(names)}."
        )
    # peft's class of causal language models takes `prepare_inputs_for_generation` from the model
    generates = hasattr(model, "prepare_inputs_for_generation")
    config = LoraConfig(
        r=rank, target_modules=modules, task_type="CAUSAL_LM" if generates else None
    )
    with mock.patch.object(nn.Module, APPLY_METHOD, _renew_tensors), warnings.catch_warnings():
        # warnings about peft's own calls are useless for a plan
        warnings.simplefilter("ignore")
        try:
            return get_peft_model(model, config), (*refused_names, *unknown_targets)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(
                f"peft adds no adapters of rank {rank} to {type(model).__name__} "
                f"({reason(error)}). Pass names of its Linears: --lora-targets "
                f"{','.join(name for name in names if not _is_refused(model, name))}."
            ) from error


def _matches(model: nn.Module, target: str) -> bool:
    """True if `target`, one of peft's `target_modules`, selects a module of the model: a module's
    path is this name or ends with "." and this name. True also for peft's word "all-linear"."""
    if target == ALL_LINEARS:
        return True
    return any(path == target or path.endswith(f".{target}") for path, _ in model.named_modules())


def _is_refused(model: nn.Module, name: str) -> bool:
    """True if peft refuses to add LoRA adapters to Linears of this name in models of this type.
    `add_adapters` then leaves these Linears out. `name` is a Linear's last name, such as "q_proj".
    """
    from peft import LoraConfig, inject_adapter_in_model

    probe = nn.Module()
    probe.config = getattr(model, "config", None)  # type: ignore[assignment]
    probe.add_module(name, nn.Linear(2, 2))
    try:
        with mock.patch.object(nn.Module, APPLY_METHOD, _renew_tensors), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(LoraConfig(r=1, target_modules=[name]), probe)
    except ValueError:
        return True
    return False


def _renew_tensors(
    module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Apply `fn` to a module's parameters and buffers like `nn.Module._apply`, but create new
    parameters. Replaces `_apply` while peft adds adapters to a model on fake tensors.

    `nn.Module._apply` swaps fake tensors in place, which fails because fake tensors have weak
    references.
    """
    for inner in module.modules() if recurse else (module,):
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                inner._parameters[name] = nn.Parameter(
                    fn(parameter.detach()), parameter.requires_grad
                )
        inner._buffers.update(
            {name: fn(buffer) for name, buffer in inner._buffers.items() if buffer is not None}
        )
    return module
