"""torchao's Linear for training in float8 on a CPU, in its module and with the fields of its config
that decide how tensors are scaled; the tests' environments need not have torchao."""

from __future__ import annotations

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


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return module.rounded(x, ACTIVATIONS, -1) @ module.rounded(weight, ACTIVATIONS, -1).t()

    @staticmethod
    def backward(ctx, upstream):
        (x, weight), module = ctx.saved_tensors, ctx.module
        dx = module.rounded(upstream, GRADIENTS, -1) @ module.rounded(weight, ACTIVATIONS, 0)
        x, upstream = x.flatten(0, -2), upstream.flatten(0, -2)  # [N, in], [N, out]
        if module.config.cast_config_input_for_grad_weight.scaling_type.value == "dynamic":
            x = module.rounded(x, ACTIVATIONS, 0)
            upstream = module.rounded(upstream, GRADIENTS, 0)
        return dx, upstream.t() @ x, None


class Float8Linear(nn.Linear):
    def rounded(self, x, dtype, axis):
        tensorwise = self.config.cast_config_input.scaling_granularity.value == "tensorwise"
        return rounded(
            x, dtype, None if tensorwise else axis, self.config.round_scales_to_power_of_2
        )

    def forward(self, x):
        return Product.apply(x, self.weight, self)


Float8Linear.__module__ = Float8Linear.forward.__module__ = "torchao.float8.float8_linear"


def convert(layers, settings):
    """Let the Linears of `layers` train in float8, as `convert_to_float8_training` does."""
    for module in list(layers.modules()):
        for child in list(module.children()):
            if type(child) is nn.Linear:
                child.__class__ = Float8Linear
                child.config = settings
