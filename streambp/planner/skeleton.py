"""Build models without data: from an id, a configuration or a model, with LoRA, with a quantised
base, or with fewer layers.

A skeleton for a GPU has tensors on `meta`. A skeleton for a CPU has fake CPU tensors, so that torch
selects the kernels of a CPU. Only a configuration is downloaded, and nothing is allocated.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrize import ParametrizationList
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from streambp.admission.generators import generators_inside, restore_module_state
from streambp.admission.stacks import (
    bare_layers,
    find_stacks,
    is_bidirectional,
    states_argument,
)
from streambp.device import RandomState
from streambp.distributed.engines import drops_masks, is_partitioned
from streambp.errors import ConfigError, StreamBPError
from streambp.instance_forward import InstanceForward, forwards, is_fsdp_unit
from streambp.known_names import (
    ACCELERATE_FORWARD,
    ACCELERATE_HOOK,
    COMPOSABLE_STATE,
    HOOK_TABLE_SUFFIX,
    MODULE_HOOKS,
)
from streambp.model.head_deferral import restore_heads
from streambp.model.packed_adapters import activate_packed
from streambp.model.patching import unpatch
from streambp.offload.decoded_weights import CountedPackedLinear
from streambp.offload.mxfp4 import Mxfp4Weight
from streambp.offload.ranges import bytes_on_host
from streambp.planner.adapters import add_adapters
from streambp.planner.configuration import build, read_config
from streambp.planner.count import KernelReplay
from streambp.planner.fused_layers import Kernels, fuse_layers, fused_rotary, fusion
from streambp.planner.kernels import no_launches
from streambp.planner.laws import Encoder
from streambp.planner.mask_rules import masks_from_positions
from streambp.planner.mixers import Mixers, replace_mixers
from streambp.planner.model_class import (
    adds_biases,
    build_as,
    check_encoder_len,
    counted_stack,
    fixed_positions,
    is_encoder_decoder,
    loss_of,
    refuse_other_biases,
)
from streambp.planner.packed_weights import (
    FOUR_BIT_BYTES,
    PARAMETER_COUNT_ATTRIBUTE,
    STORED_BYTES_ATTRIBUTE,
    decoded_size,
    pack_experts,
    parameters_of,
    statistics_of,
)
from streambp.planner.step import fused_sdpa
from streambp.tensors import full_shape, inner_bytes, replace_attribute

Device = Literal["cuda", "cpu"]
INNER_LAYERS = 2
# Config field of models in which each layer also gets a slice of one tensor [B, T, layers, size],
# which the backbone makes for all layers at once. The backbone needs the full number of layers.
INPUTS_BY_LAYER_FIELD = "hidden_size_per_layer_input"
Source: TypeAlias = str | Path | PreTrainedConfig | nn.Module


class Skeleton:
    """A model whose tensors have no data (on meta, or fake), on which the memory and FLOPs of
    training steps are counted.

    Args:
        source: an id on the Hub, a checkpoint's folder, a config.json, a configuration, or a model
            (not changed).
        dtype: dtype of the weights, unless the source is a model.
        lora: rank of LoRA adapters on the Linears of the layers (`lora_targets`), with all other
            parameters frozen; None: no adapters are added.
        bits: 4 or 8 for a quantised, frozen base; 16 for none.
        device: type of the device whose kernels and memory are counted.
        mixers: code of recurrent and convolutional layers: "kernels" of their packages,
            transformers' plain "torch", or the kernels "installed" here; None: kernels on a GPU,
            torch on a CPU.
        kernels: code of norms, gated activations and rotary embeddings, as in `StreamConfig`;
            "auto": Liger's on a GPU if liger-kernel is installed here.
        fewer: True: if the source is a model, copy only one or a few of its layers of each
            structure (`ShrunkModel`). False: copy all layers.
        lora_targets: names of the Linears that get adapters; empty: every Linear of the layers that
            peft accepts.
        encoder_len: positions of each row of an encoder-decoder's encoder; None: the length of the
            decoder's rows, or the length that the configuration fixes.

    Attributes:
        model: the model on meta or fake tensors.
        without_adapters: names of Linears that peft refuses to adapt, or that do not exist.
        adds_biases: True if attention adds a bias by the distance of query and key, as T5's does.
        own_adapters: True if LoRA adapters run peft's code under streambp. False: streambp may
            compute adapters in fused operations, depending on `StreamConfig.kernels`.

    Raises:
        StreamBPError: the source is unknown, or `lora` or `bits` do not apply to it.
    """

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype,
        lora: int | None,
        bits: int,
        device: Device,
        mixers: Mixers | None = None,
        kernels: Kernels = "own",
        fewer: bool = False,
        lora_targets: Sequence[str] = (),
        encoder_len: int | None = None,
    ) -> None:
        self.device = device
        self.encoder_len = encoder_len
        self.bits = bits
        self.mixers: Mixers = mixers or ("kernels" if device == "cuda" else "torch")
        self.mode: FakeTensorMode | None = None
        if device == "cpu":
            self.mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.own_adapters = (
            False  # streamed layers leave adapters to peft, whatever a recipe's config says
        )
        self.without_adapters: tuple[str, ...] = ()
        self._reduced: ShrunkModel | None = None
        with self.active():
            if isinstance(source, nn.Module):
                self.model = self._copy(source, fewer)
            else:
                config = read_config(source)
                trusted = (
                    type(config).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME
                )
                options = {"dtype": dtype, "trust_remote_code": trusted}
                self.model = build(
                    config,
                    lambda config: build_as(config, **options),
                )
            if lora is not None:
                self.model, self.without_adapters = add_adapters(self.model, lora, lora_targets)
            if bits != 16:
                _quantise(self.model, bits)
        activate_packed(self.model, stays=True)
        check_encoder_len(self.model, encoder_len)
        self.adds_biases = adds_biases(self.model)
        if self.adds_biases:
            refuse_other_biases(self.model)
        self.fused = fusion(kernels, device)
        fuse_layers(self.model, self.fused)
        self.model.train()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager in which new tensors have no data: they are on meta, or fake tensors.

        transformers treats fake tensors as a trace and would build masks that a real step does not
        have; this is disabled. Messages of torch's FakeTensor logger are disabled as well, because
        a log handler would keep tensors of the traceback alive while memory is counted.
        """
        if self.mode is None:
            with (
                torch.device("meta"),
                mock.patch.object(torch, "autocast", _autocast),
                no_launches(),
            ):
                yield
        else:
            log = logging.getLogger(fake_tensor.__name__)
            with (
                self.mode,
                no_launches(),
                # A mock would store its arguments, and their bytes would count.
                replace_attribute([masking_utils], "is_tracing", [lambda *_: False]),
                # Fake tensors draw no numbers, and a fake comparison of states has no result.
                replace_attribute([RandomState], "is_current", [lambda _: True]),
                mock.patch.object(log, "disabled", True),
            ):
                yield

    @functools.cached_property
    def _generators(self) -> tuple[Any, ...]:
        """Return torch's default random generators, and the generators in the model's attributes,
        whose states are restored after a step. A generator that the step itself creates is not
        included."""
        return generators_inside(self.model)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which training steps of the model run. New tensors have no data, as in
        `active`. Recurrent and convolutional layers and rotary embeddings allocate the tensors of
        the kernels that are assumed for these layers, and compute nothing.

        Attributes, buffers and random generators of the modules are restored at the end, because
        the original model shares classes and closures with the copy.
        """
        with (
            self.active(),
            restore_module_state(self.model, self._generators),
            replace_mixers(self.model, self.mixers),
            masks_from_positions(),
            self._fused_elsewhere(),
            fused_rotary(self.model, self.fused),
        ):
            yield

    def _fused_elsewhere(self) -> AbstractContextManager[None]:
        """Return a context manager for an encoder-decoder, which counts attention outside of the
        chunked layers as FlashAttention. This is the attention in the encoder's layers, and from
        the decoder to the encoder's output. Otherwise a [T, T] matrix would be counted. The context
        manager does nothing for other models and on a CPU."""
        if self.device == "cuda" and is_encoder_decoder(self.model):
            return fused_sdpa()
        return contextlib.nullcontext()

    @property
    def language_model(self) -> PreTrainedModel:
        """Return the `PreTrainedModel` that has the language-model head, inside of PEFT and other
        wrappers. The result for a bidirectional model without a head (an embedding model) is the
        outermost `PreTrainedModel`.

        Raises:
            StreamBPError: no module has a language-model head, and the attention is causal.
        """
        first = None
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel):
                if module.get_output_embeddings() is not None:
                    return module
                first = first or module
        if first is not None and self.is_bidirectional:
            return first
        raise StreamBPError(
            f"{type(self.model).__name__} has no language-model head, and the planner estimates "
            "steps of causal language models. Pass a model with a head, such as "
            "AutoModelForCausalLM loads."
        )

    @property
    def head(self) -> nn.Module | None:
        """Return the output projection to the vocabulary, found by `get_output_embeddings`; None if
        the model has none."""
        head: nn.Module | None = self.language_model.get_output_embeddings()
        return head

    @property
    def is_bidirectional(self) -> bool:
        """True if a decoder layer of the model has bidirectional attention, in which queries also
        read later keys."""
        stacks = find_stacks(self.model).stacks
        return any(is_bidirectional(layer) for stack in stacks for layer in stack.layers)

    @property
    def encoder(self) -> Encoder:
        """Return a word for the length of the encoder's rows: "same" for the decoder's length,
        "fixed" for a length of their own, "" without an encoder."""
        if not is_encoder_decoder(self.model):
            return ""
        if self.encoder_len or fixed_positions(self.model):
            return "fixed"
        return "same"

    def loss(self, ids: Tensor) -> Tensor:
        """Run the model's forward on token ids [B, T], and return the loss of one training step."""
        return loss_of(self.model, ids, self.head is not None, self.encoder_len)

    def on_host(self) -> dict[str, Any]:
        """Return a dict with three fields of `Profile`, from which steps with weights in host
        memory are predicted. "frozen" and "trained" are lists of the bytes of each layer's weights,
        if moved to the host. "decoded" is the bytes of a layer's dequantized 4-bit weights on the
        device.

        The dict is empty if streambp cannot move the weights to the host. This is so for 8-bit
        weights, for torchao's, and for T5's kind of models, whose layers share a bias.
        """
        layers: list[nn.Module] = []
        for stack in find_stacks(self.model).stacks:
            layers.extend(stack.layers)
        frozen, trained = bytes_on_host(self.model, layers)
        # two bytes for each weight except the largest, which its product decodes itself
        decoded = []
        for layer in layers:
            sizes = []
            for part in layer.modules():
                if isinstance(part, QuantisedLinear):
                    sizes.append(2 * parameters_of(part.weight))
            decoded.append(sum(sizes) - max(sizes, default=0))
        subclasses = any(
            hasattr(parameter, STORED_BYTES_ATTRIBUTE)
            and not hasattr(parameter, PARAMETER_COUNT_ATTRIBUTE)
            for parameter in self.model.parameters()
        )
        if self.bits == 8 or subclasses or self.adds_biases:
            return {}
        return {"frozen": frozen, "trained": trained, "decoded": max(decoded)}

    def reduce(self) -> ShrunkModel:
        """Remove layers of the model, to count the memory and FLOPs of steps in less time: a few
        layers of each structure represent all layers. Only the first call removes layers. Return
        the `ShrunkModel` with the indices of the remaining layers."""
        if self._reduced is None:
            self._reduced = reduced_layers(self.model)
            self._reduced.apply(self.model)
        return self._reduced

    def _copy(self, model: nn.Module, fewer: bool) -> nn.Module:
        """Return an unpatched copy of a model whose parameters and buffers are meta or fake
        tensors. Hooks of the original do nothing in the copy, except for hooks that drop attention
        masks.

        Args:
            model: the model, which is not changed.
            fewer: True: copy only one or a few layers of each structure. False: copy all layers.
        """
        memo: dict[int, Any] = {}
        if fewer:
            self._reduced = reduced_layers(model)
            memo |= {id(layer): nn.Identity() for layer in self._reduced.left_out(model)}
        device = torch.device("cpu" if self.mode is not None else "meta")
        with restore_heads(model):
            modules = list(model.modules())
        for module in modules:
            for tensor in (
                *module._parameters.values(),
                *module._buffers.values(),
                *vars(module).values(),
            ):
                if not isinstance(tensor, Tensor) or id(tensor) in memo:
                    continue
                if is_partitioned(tensor):
                    empty = torch.empty(full_shape(tensor), dtype=tensor.dtype, device=device)
                else:
                    empty = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                    )
                parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
                stored = None if is_partitioned(tensor) else inner_bytes(tensor)
                if stored is not None:
                    setattr(memo[id(tensor)], STORED_BYTES_ATTRIBUTE, stored)
            if isinstance(module, ParametrizationList):
                _note_packed(module, memo, device)
            if isinstance(module, Mxfp4Weight):  # bytes that stand for no parameters of their own
                setattr(memo[id(module.scales)], PARAMETER_COUNT_ATTRIBUTE, 0)
        for module in modules:
            for name, table in vars(module).items():
                if name.endswith(HOOK_TABLE_SUFFIX) and isinstance(table, dict):
                    # share hooks, those of state dicts too, instead of copying their contents
                    memo |= {id(hook): hook for hook in table.values()}
                if name.startswith(COMPOSABLE_STATE):
                    memo[id(table)] = {}
        with restore_heads(model), _unsharded_classes(model):
            copied = unpatch(copy.deepcopy(model, memo))
        _remove_device_hooks(copied)
        for module in copied.modules():
            for wrapper in list(forwards(module)):
                if isinstance(wrapper, InstanceForward):
                    wrapper.remove()  # wrappers of a forward in progress
        # A program's hooks must not receive tensors without data, but their existence matters.
        for table in _hook_tables(copied):
            for key, hook in table.items():
                if not drops_masks(hook):
                    table[key] = lambda *_, **__: None
        if self._reduced is not None:
            self._reduced.apply(copied)
        return copied


def _remove_device_hooks(model: nn.Module) -> None:
    """Remove the hooks of accelerate's `device_map` from a copy of a model without data. The hooks
    would move the copy's inputs to the devices of the original model's weights."""
    for module in model.modules():
        attributes = vars(module)
        if attributes.pop(ACCELERATE_HOOK, None) is None:
            continue
        attributes.pop("forward", None)
        forward = attributes.pop(ACCELERATE_FORWARD)
        if getattr(forward, "__func__", None) is not type(module).forward:
            attributes["forward"] = forward


def _note_packed(weights: ParametrizationList, memo: dict[int, Any], device: torch.device) -> None:
    """Copy the quantization statistics of a packed weight as tensors without data. A packed weight
    is, for example, an expert weight that bitsandbytes stores in 4 bits. Set the weight's bytes and
    its number of parameters as attributes of the copy of the packed weight.

    Args:
        weights: the parametrization of the weight, in the original model.
        memo: `copy.deepcopy`'s dict from ids of originals to copies. The packed weight's copy is
            read from the dict, and copies of the statistics are added.
        device: device of the copies.
    """
    packed = weights.original
    copy_of_packed = memo.get(id(packed))
    if not isinstance(copy_of_packed, Tensor):
        return
    total = packed.nbytes
    for tensor in statistics_of(weights):
        total += tensor.nbytes
        memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    setattr(copy_of_packed, STORED_BYTES_ATTRIBUTE, total)
    setattr(copy_of_packed, PARAMETER_COUNT_ATTRIBUTE, decoded_size(weights) or packed.numel())


def _autocast(device_type: str, *args: Any, _autocast: Any = torch.autocast, **kwargs: Any) -> Any:
    """Call torch.autocast, with "cpu" in place of the unsupported device type "meta". peft passes
    the device type of a meta tensor to switch autocast off."""
    return _autocast("cpu" if device_type == "meta" else device_type, *args, **kwargs)


def _constant(value: Any, _: Any) -> Any:
    """Return the first argument. Used as the getter of a property with the constant value `value`,
    bound by `functools.partial`; the second argument is the object that has the property."""
    return value


@contextlib.contextmanager
def _unsharded_classes(model: nn.Module) -> Iterator[None]:
    """Context manager in which the modules of a model with FSDP2's `fully_shard` have their
    original classes, because FSDP2's classes refuse to be copied.

    Args:
        model: the model whose modules change their classes, until the end.
    """
    units = []
    for module in model.modules():
        if is_fsdp_unit(module):
            units.append((module, type(module)))
    try:
        for module, kind in units:
            module.__class__ = kind.__bases__[-1]
        yield
    finally:
        for module, kind in units:
            module.__class__ = kind


def _hook_tables(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield each dict of hooks, such as `_forward_hooks`, of each module of a model. The caller
    replaces the hooks by functions without effect."""
    for module in model.modules():
        for name in MODULE_HOOKS:
            yield getattr(module, name)


class QuantisedLinear(nn.Module):
    """Linear with a frozen 4-bit or 8-bit weight. Replaces a layer's Linear in a model on meta or
    fake tensors, whose memory and FLOPs are counted for quantised weights.

    Each forward and backward allocates the dequantized weight in the input's dtype and frees it, as
    bitsandbytes does.

    Args:
        linear: the original module.
        bytes_per_parameter: stored bytes for each element of the original weight, including
            quantization constants.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, bytes_per_parameter: float) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        size = int(linear.weight.numel() * bytes_per_parameter)
        device = linear.weight.device
        self.weight = nn.Parameter(
            torch.empty(size, dtype=torch.uint8, device=device), requires_grad=False
        )
        setattr(self.weight, PARAMETER_COUNT_ATTRIBUTE, linear.weight.numel())
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] @ weight + bias, [..., out] in x's dtype."""
        result: Tensor = dequantised(x, self.out_features)
        if self.bias is None:
            return result
        return result + self.bias


class FourBitLinear(QuantisedLinear, CountedPackedLinear):
    """`QuantisedLinear` with a 4-bit weight. streambp treats the module like a 4-bit Linear of
    bitsandbytes, and computes LoRA adapters on the module in a fused operation. [Note: adapters]

    Args:
        linear: the original module.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, FOUR_BIT_BYTES)
        self.compute_dtype = linear.weight.dtype

    def decoded(self) -> Tensor:
        """Return a meta or fake tensor [out, in] in place of the dequantized weight, in the
        original weight's dtype, so that its memory is counted."""
        return self.weight.new_empty(self.out_features, self.in_features, dtype=self.compute_dtype)


def _dequantised(ctx: Any, x: Tensor, width: int) -> Tensor:
    """Allocate the tensors of a quantised Linear's forward without computing them, to count memory.
    Return the output [..., width] for x [..., in]. No tensor is saved for backward."""
    ctx.inner = x.shape[-1]
    return x @ x.new_empty(width, x.shape[-1]).mT


def _dequantised_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Allocate the tensors of a quantised Linear's backward without computing them, to count
    memory. Return the gradient of x [..., in] for grad [..., out]."""
    return grad @ grad.new_empty(grad.shape[-1], ctx.inner), None


# x [..., in] -> [..., out] through a temporary weight [out, in], here and in backward.
dequantised = functools.partial(KernelReplay.apply, _dequantised, _dequantised_backward)


def _quantise(model: nn.Module, bits: int) -> None:
    """Replace the frozen Linears of all decoder layers, except LoRA's own, by `QuantisedLinear`. If
    `bits` is 4, pack the weights of frozen experts as well.

    Args:
        model: the model on meta or fake tensors, which is changed.
        bits: bits of the stored weights, 4 or 8.

    Raises:
        ConfigError: the layers have no frozen Linears or experts.
    """
    quantised = 0
    for stack in find_stacks(model).stacks:
        for layer in stack.layers:
            for module in list(layer.modules()):
                for name, child in list(module.named_children()):
                    if (
                        type(child) is nn.Linear
                        and not child.weight.requires_grad
                        and "lora" not in name
                    ):
                        linear = FourBitLinear(child) if bits == 4 else QuantisedLinear(child, 1.0)
                        setattr(module, name, linear)
                        quantised += 1
            if bits == 4:
                quantised += pack_experts(layer)
    if not quantised:
        raise ConfigError(
            f"bits is {bits}, but no Linear of the layers is frozen, and trained weights are not "
            "stored in few bits. Give a LoRA rank too, or leave bits out."
        )


@dataclasses.dataclass(frozen=True)
class ShrunkModel:
    """Selection of a few of a model's layers. Only these layers run when a step's memory and FLOPs
    are counted on tensors without data, because layers with the same structure need equal memory
    and FLOPs.

    Attributes:
        layer_indices: indices of the selected layers in the full model.
        kinds: a number for each layer of the full model; layers with equal numbers have the same
            structure.
        backbone: path of the module that runs the layers, such as "model".
        layers: name of the attribute of this module that is the list of layers.
    """

    layer_indices: tuple[int, ...]
    kinds: tuple[int, ...]
    backbone: str
    layers: str

    def representative(self, index: int) -> int:
        """Return which selected layer represents layer `index` of the full model and has the same
        memory and FLOPs, as a position in `layer_indices`."""
        if index in self.layer_indices:
            return self.layer_indices.index(index)
        inner = []
        for position, representative in enumerate(self.layer_indices):
            if 0 < representative < len(self.kinds) - 1:
                inner.append(position)
        return next(
            position
            for position in reversed(inner)
            if self.kinds[self.layer_indices[position]] == self.kinds[index]
        )

    def left_out(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the layers of the full model that are not in the selection (`layer_indices`).

        A module may be used as several layers. The module is not yielded if any of these layers is
        in the selection.
        """
        layers = getattr(model.get_submodule(self.backbone), self.layers)
        representatives = {id(layers[index]) for index in self.layer_indices}
        return (layer for layer in layers if id(layer) not in representatives)

    def apply(self, model: nn.Module) -> None:
        """Remove all layers but those of the selection (`layer_indices`) from the full model, or
        from its copy. Lists with a value for each layer, such as `layer_types` of the config, lose
        the values of the removed layers."""
        if len(self.layer_indices) == len(self.kinds):
            return
        backbone: Any = model.get_submodule(self.backbone)
        config = backbone.config
        layers = getattr(backbone, self.layers)
        fields, attributes, computed = values_by_layer(backbone, len(layers))
        setattr(
            backbone, self.layers, nn.ModuleList([layers[index] for index in self.layer_indices])
        )
        for holder, lists in ((config, fields), (backbone, attributes)):
            for field, values in lists.items():
                setattr(holder, field, type(values)(values[index] for index in self.layer_indices))
        if computed:
            answers = {}
            for field, values in computed.items():
                answers[field] = type(values)(values[index] for index in self.layer_indices)
            constant = {}
            for field, answer in answers.items():
                constant[field] = property(functools.partial(_constant, answer))
            config.__class__ = type(type(config).__name__, (type(config),), constant)
        if not getattr(config, INPUTS_BY_LAYER_FIELD, 0):
            config.num_hidden_layers = len(self.layer_indices)


def reduced_layers(model: nn.Module) -> ShrunkModel:
    """Return a selection of layers (`ShrunkModel`): the first, the last, and a layer between the
    two. The memory and FLOPs of a step are counted with these layers alone, which represent all
    layers of the model.

    Layers with the same structure are of one kind. If the model has several kinds, or layers with
    recurrent states, two layers of each kind between the first and the last are selected. A second
    layer is needed because some work happens only once, in backward of the first layer of a kind.
    All layers are selected if layers read another layer's keys and values (`num_kv_shared_layers`),
    or if the layers are in no `ModuleList` of the backbone.
    """
    stack = counted_stack(model)
    depth = len(stack.layers)
    path = next(name for name, module in model.named_modules() if module is stack.backbone)
    lists = [name for name, child in stack.backbone.named_children() if isinstance(child, nn.ModuleList)
             and bare_layers(child) == stack.layers]  # fmt: skip
    fields = values_by_layer(stack.backbone, depth)[0]
    signatures = []
    for index, layer in enumerate(stack.layers):  # equal for layers with equal computation
        parts: list[Any] = [repr(layer), *(values[index] for values in fields.values())]
        parts += [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in layer.parameters()]
        for module in layer.modules():
            for name, value in vars(module).items():
                is_plain = isinstance(value, bool | int | float | str | None)
                if is_plain and name not in ("layer_idx", "layer_id", "training"):
                    parts.append((name, value))
        signatures.append(str(parts))
    kinds = tuple(list(dict.fromkeys(signatures)).index(signature) for signature in signatures)
    one_kind = len(set(kinds)) == 1 and all(
        states_argument(layer) is None for layer in stack.layers
    )
    layers_per_kind = 1 if one_kind else INNER_LAYERS
    inner = []
    for index in range(1, depth - 1):
        if kinds[1:index].count(kinds[index]) < layers_per_kind:
            inner.append(index)
    if depth > 1:
        representatives = (0, *inner, depth - 1)
    else:
        representatives = (0,)
    if getattr(stack.backbone.config, "num_kv_shared_layers", 0) or not lists:
        representatives = tuple(range(depth))
    return ShrunkModel(representatives, kinds, path, lists[0] if lists else "")


def values_by_layer(
    backbone: Any, depth: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return all lists with a value for each layer, such as `layer_types`: the removal of layers
    must shorten these lists. The result is three dicts from names to lists: attributes of the
    model's config, attributes of the backbone, and properties of the config's class.

    Properties of `PreTrainedConfig` itself are skipped. Reading them may warn, and their values do
    not depend on layers.

    Args:
        backbone: the module that runs the layers.
        depth: number of its layers.
    """
    config = backbone.config
    kind = type(config)
    properties = {}
    for name in dir(kind):
        inherited = name in vars(PreTrainedConfig)
        if not inherited and isinstance(getattr(kind, name, None), property):
            properties[name] = getattr(config, name, None)
    by_layer: list[dict[str, Any]] = []
    for values in (vars(config), vars(backbone), properties):
        matching = {}
        for name, value in values.items():
            if isinstance(value, list | tuple) and len(value) == depth:
                matching[name] = value
        by_layer.append(matching)
    return by_layer[0], by_layer[1], by_layer[2]
