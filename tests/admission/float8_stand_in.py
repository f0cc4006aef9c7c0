"""torchao's Linear for training in float8 on a CPU, in its module and with the fields of its config
that decide how tensors are scaled; the tests' environments need not have torchao."""

from __future__ import annotations

import enum
import types

import torch
from torch import nn

MAX_FINITE_VALUES = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ACTIVATIONS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def enum_member(value):
    """A member of an enumeration."""
    return types.SimpleNamespace(value=value)


def config(granularity, powers_of_two, weights_in_float8=True):
    """A `Float8LinearConfig`: all operands are cast; of the product for the weight's gradient, on
    demand."""

    def cast(scaled=True):
        return types.SimpleNamespace(
            scaling_type=enum_member("dynamic" if scaled else "disabled"),
            scaling_granularity=enum_member(granularity),
        )

    return types.SimpleNamespace(
        round_scales_to_power_of_2=powers_of_two,
        cast_config_input=cast(),
        cast_config_grad_output=cast(),
        cast_config_input_for_grad_weight=cast(weights_in_float8),
        cast_config_grad_output_for_grad_weight=cast(weights_in_float8),
    )


def rounded(x, dtype, axis, powers_of_two):
    """`x` after a cast to float8 and back; `axis` None: one scale for the tensor."""
    largest = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
    scale = MAX_FINITE_VALUES[dtype] / largest.clamp_min(1e-12).float()
    if powers_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return ((x * scale).to(dtype).float() / scale).to(x.dtype)


class Role(enum.Enum):
    """torchao's `GemmInputRole`."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


def hp_tensor_to_float8_dynamic(
    x, dtype, gemm_input_role=Role.INPUT, axiswise_dim=None, round_scales_to_power_of_2=False
):
    """torchao's cast, by its name; the role is for those that count casts."""
    return rounded(x, dtype, axiswise_dim, round_scales_to_power_of_2)


class Product(torch.autograd.Function):
    """Of x [..., in] and a weight [in, out]."""

    @staticmethod
    def forward(ctx, x, weight_t, config):
        ctx.save_for_backward(x, weight_t)
        ctx.config = config
        settings = settings_of(config, -1)
        cast = hp_tensor_to_float8_dynamic(x, ACTIVATIONS, gemm_input_role=Role.INPUT, **settings)
        settings = settings_of(config, 0)
        return cast @ hp_tensor_to_float8_dynamic(
            weight_t, ACTIVATIONS, gemm_input_role=Role.WEIGHT, **settings
        )

    @staticmethod
    def backward(ctx, upstream):
        (x, weight_t), config = ctx.saved_tensors, ctx.config
        settings, role = settings_of(config, -1), Role.GRAD_OUTPUT
        cast = hp_tensor_to_float8_dynamic(upstream, GRADIENTS, gemm_input_role=role, **settings)
        cast_weight = hp_tensor_to_float8_dynamic(
            weight_t, ACTIVATIONS, gemm_input_role=Role.WEIGHT, **settings
        )
        dx = cast @ cast_weight.t().to(cast.dtype)  # under autocast the weight's is wider
        x, upstream = x.flatten(0, -2), upstream.flatten(0, -2)  # [N, in], [N, out]
        if config.cast_config_input_for_grad_weight.scaling_type.value == "dynamic":
            settings = settings_of(config, 0)
            x = hp_tensor_to_float8_dynamic(x, ACTIVATIONS, **settings)
            upstream = hp_tensor_to_float8_dynamic(
                upstream, GRADIENTS, gemm_input_role=role, **settings
            )
        return dx, (upstream.t() @ x.to(upstream.dtype)).t(), None


matmul_with_hp_or_float8_args = Product  # torchao's name


def settings_of(config, axis):
    """Arguments of a cast, with the dimension of its scales if there is more than one."""
    axiswise = config.cast_config_input.scaling_granularity.value == "axiswise"
    return {
        "axiswise_dim": axis if axiswise else None,
        "round_scales_to_power_of_2": config.round_scales_to_power_of_2,
    }


class Float8Linear(nn.Linear):
    def forward(self, x):
        product = matmul_with_hp_or_float8_args.apply(x, self.weight.t(), self.config)
        return product if self.bias is None else product + self.bias.to(product.dtype)


Float8Linear.__module__ = Float8Linear.forward.__module__ = "torchao.float8.float8_linear"


def convert(layers, settings):
    """Let the Linears of `layers` train in float8, as `convert_to_float8_training` does."""
    for module in list(layers.modules()):
        for child in list(module.children()):
            if type(child) is nn.Linear:
                child.__class__ = Float8Linear
                child.config = settings
