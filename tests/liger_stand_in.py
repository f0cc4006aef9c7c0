"""A stand-in for Liger, which needs a GPU: it does to models and to transformers' modules what
Liger does.

Its kernels compute in numpy and write through pointers, as Triton's do.
"""

from __future__ import annotations

import sys
import types

import torch
from torch import nn

from streambp.known_names import LIGERS_PATCHES, LIGERS_TABLE
from streambp.model import fused_layers
from tests import opaque_kernels, zoo
from tests.families import build

HYBRID, MIXTURE = "qwen3_5_text", "qwen3_moe"
FAMILIES = ("llama", "qwen3", "gemma3", HYBRID)
KINDS = {
    "llama": "llama",
    "qwen3": "qwen3",
    MIXTURE: MIXTURE,
    "gemma3": "gemma3_text",
    HYBRID: HYBRID,
}
PATCHES = f"liger_kernel.transformers.{LIGERS_PATCHES}"

NORM = """
def forward(self, x):
    return kernels.Norm.apply(x, self.weight, self.variance_epsilon, self.offset, self.in_place)

class LigerRMSNorm(nn.Module):
    pass
"""
MLP = """
def forward(self, x):
    return self.down_proj(kernels.Gate.apply(self.gate_proj(x), self.up_proj(x), act))
"""
EXPERTS = """
def forward(self, hidden_states, top_k_index, top_k_weights):
    raise AssertionError("experts are not for these kernels")
"""
ROTATION = """
def rotation(q, k, cos, sin, *args, **kwargs):
    return kernels.Rotation.apply(q, k, cos, sin)
"""


def write_module(name, source, **names):
    """A module of that name."""
    module = types.ModuleType(name)
    module.__dict__.update(kernels=opaque_kernels, nn=nn, **names)
    exec(source, module.__dict__)
    return module


def bind(module, forward, **settings):
    for name, value in settings.items():
        setattr(module, name, value)
    module.__dict__["forward"] = types.MethodType(forward, module)


def stand_in(monkeypatch):
    """A stand-in for the package: binds forwards to modules of a model, and replaces names of its
    modeling module.

    Gives what a user does before `patch`, to one model alone but for the rotation.
    """
    home = "liger_kernel.transformers"
    norm, rope = write_module(f"{home}.rms_norm", NORM), write_module(f"{home}.rope", ROTATION)
    swiglu = write_module(f"{home}.swiglu", MLP, act=opaque_kernels.silu)
    experts = write_module(f"{home}.swiglu", EXPERTS)
    geglu = write_module(f"{home}.geglu", MLP, act=opaque_kernels.gelu_tanh)

    def apply(
        rope=None,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
        rms_norm=True,
        swiglu=True,
        model=None,
    ):
        assert not cross_entropy
        assert not fused_linear_cross_entropy
        modeling = sys.modules[type(model).__module__]
        gemma, hybrid = "gemma" in modeling.__name__, "qwen3_5" in modeling.__name__
        if not hybrid if rope is None else rope:
            modeling.apply_rotary_pos_emb = package.rope.rotation
        casting = {
            "offset": float(gemma or hybrid),
            "casting_mode": "gemma" if gemma or hybrid else "llama",
        }
        for name, member in list(vars(modeling).items()):
            if name.endswith("RMSNorm"):
                setattr(modeling, name, norm.LigerRMSNorm)
                member.added_by_liger = True
        modeling.added_by_liger = True
        for module in model.modules():
            if rms_norm and type(module).__name__.endswith("RMSNorm"):
                eps = getattr(module, "variance_epsilon", None) or module.eps
                in_place = not (gemma or hybrid)
                bind(module, norm.forward, variance_epsilon=eps, in_place=in_place, **casting)
            # a wrapper's, where peft has put one
            if swiglu and isinstance(getattr(module, "experts", None), nn.Module):
                bind(module.experts, experts.forward)
            if swiglu and type(module).__name__.endswith("MLP"):
                bind(module, (package.geglu if gemma else package.swiglu).forward)

    package = types.ModuleType(PATCHES)
    package.__dict__.update(
        rope=rope,
        swiglu=swiglu,
        geglu=geglu,
        **{LIGERS_TABLE: dict.fromkeys(KINDS.values(), apply)},
    )
    package._apply_liger_kernel_to_instance = apply
    for name in ("liger_kernel", "liger_kernel.transformers", PATCHES):
        monkeypatch.setitem(sys.modules, name, package)

    def applied(model, names=("rms_norm", "swiglu")):
        with fused_layers._restore_global_names(model):
            parts = {name: name in names for name in ("rms_norm", "swiglu")}
            apply(rope=False, fused_linear_cross_entropy=False, model=model, **parts)
        if "rope" in names:
            monkeypatch.setattr(
                sys.modules[type(model).__module__], "apply_rotary_pos_emb", rope.rotation
            )

    return applied


def built(family, seed=0, **sizes):
    return (
        zoo.build(family, torch.float32, **sizes)
        if family in (HYBRID, MIXTURE)
        else build(family, seed=seed, **sizes)
    )


def own_attributes(model):
    """What each module has of its own, without what calls leave behind."""
    return {name: dict(module.__dict__) for name, module in model.named_modules()}
