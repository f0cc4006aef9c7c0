"""torch's ring attention on a CPU, for unpatched models: DTensor has no handler for the CPU's fused
kernel.

The handler below calls torch's own ring with that kernel. Streamed layers do not need it.
"""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def handler(op_call, args, kwargs):
    """What DTensor's dispatcher calls for either operator."""
    tensors = [x for x in args if isinstance(x, DTensor)]
    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    local = [x.to_local() if isinstance(x, DTensor) else x for x in args]
    kwargs = dict(kwargs)
    if op_call is FORWARD:
        q, k, v, dropout, is_causal = (*local, *(0.0, False)[len(local) - 3 :])[:5]
        outputs = ring._templated_ring_attention(
            mesh.get_group(),
            2,
            FORWARD,
            query=q,
            key=k,
            value=v,
            dropout_p=dropout,
            is_causal=is_causal,
            **kwargs,
        )
    else:
        grad, q, k, v, out, lse, dropout, is_causal = local
        outputs = ring._templated_ring_attention_backward(
            mesh.get_group(), 2, BACKWARD, grad_out=grad, grad_out_name="grad_out", query=q, key=k, value=v, out=out,
            logsumexp=lse, dropout_p=dropout, is_causal=is_causal, **kwargs,
        )  # fmt: skip
    return tuple(DTensor.from_local(x, mesh, placements, run_check=False) for x in outputs)


@contextlib.contextmanager
def enabled(widens=False):
    """Within, `context_parallel` works on a CPU; widens: it adds up in float32, its default, else
    in its tensors' dtype."""
    custom_ops, convert = dict(ring.custom_ops), ring._cp_options.convert_to_f32
    ring.custom_ops.update({FORWARD: handler, BACKWARD: handler})
    ring._cp_options.convert_to_f32 = widens
    try:
        yield
    finally:
        ring.custom_ops.clear()
        ring.custom_ops.update(custom_ops)
        ring._cp_options.convert_to_f32 = convert


@contextlib.contextmanager
def rotations():
    """A set that fills with how the ring within passes K and V on, by the names of
    `set_rotate_method`."""
    methods, real = set(), ring._create_rotater

    def create(group, dim, method=None):
        if method is None:  # gradients of K and V have their own
            methods.add(ring._cp_options.rotate_method.name.replace("_", "").lower())
        return real(group, dim, method)

    ring._create_rotater = create
    try:
        yield methods
    finally:
        ring._create_rotater = real


def causal(model):
    """The model with what accelerate hangs on its attention: no mask, causal."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model)
    return model
