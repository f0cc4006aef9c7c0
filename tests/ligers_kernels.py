"""Liger's own kernels in Triton's interpreter, on tiny models: to be run in a process of their
own."""

from __future__ import annotations

import copy
import importlib
import sys
from contextlib import nullcontext

import numpy as np
import torch

import streambp
from streambp.known_names import LIGERS_PATCHES, LIGERS_TABLE
from streambp.model import chosen_kernels, fused_layers
from tests import zoo
from tests.families import build, make_batch
from tests.oracle import gradients, relative_l2

# What the interpreter runs slowly: each kernel for each row.
CASES = (
    ("qwen3", "liger", {"saves": ()}),
    ("qwen3", "liger and rotation", {"saves": ("*",), "offload": "cpu"}),
    ("llama", "liger", {"saves": ("*",)}),
    ("llama", "liger and rotation", {"saves": ("attn_out",)}),
    ("gemma3", "liger", {"saves": ("attn_out", "kv"), "offload": "cpu"}),
    ("gemma3", "liger and rotation", {"saves": ()}),
    ("qwen3_5_text", "liger", {"saves": ("*",)}),
    ("qwen3", "auto", {"saves": ("attn_out",)}),
    ("llama", "auto", {"saves": ()}),
    ("gemma3", "auto", {"saves": ("attn_out", "kv")}),
    ("qwen3_5_text", "auto", {"saves": ()}),
)


def teach_the_interpreter():
    """It gives kernels Python's floats, which have no `.to`, and knows none of libdevice's
    functions."""
    import triton.language as tl
    from triton.runtime import interpreter

    real = interpreter._implicit_cvt

    def convert(value):
        if isinstance(value, float):
            return tl.tensor(
                interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32
            )
        return real(value)

    interpreter._implicit_cvt = convert
    importlib.import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: tl.rsqrt(x)
    importlib.import_module("liger_kernel.ops.geglu").tanh = lambda x: (
        2.0 * tl.sigmoid(2.0 * x) - 1.0
    )


def apply(model, rotation):
    """As a user does before `patch`; the rotation is every model's."""
    table = getattr(
        importlib.import_module(f"liger_kernel.transformers.{LIGERS_PATCHES}"), LIGERS_TABLE
    )
    with nullcontext() if rotation else fused_layers._restore_global_names(model):
        table[model.config.model_type](model=model, rope=rotation, fused_linear_cross_entropy=False)


def compare():
    teach_the_interpreter()
    chosen_kernels.kernel_device = lambda: torch.device("cpu")
    chosen_kernels.why_no_driver = lambda kind: None
    batch = make_batch("plain", length=9, rows=1)
    for family, kernels, settings in CASES:
        stock = zoo.build(family, torch.float32) if family == "qwen3_5_text" else build(family)
        plain = gradients(stock, **batch)[1]
        ours, rotation = (
            copy.deepcopy(stock),
            kernels != "liger" and (family, kernels) != ("qwen3_5_text", "auto"),
        )
        modeling = sys.modules[type(stock).__module__]
        globals_before = dict(vars(modeling))
        apply(stock, rotation)
        expected = gradients(stock, **batch)[1]
        if kernels == "auto":
            vars(modeling).update(globals_before)
        elif rotation:
            apply(ours, rotation)
        by = "own" if kernels == "liger and rotation" else kernels
        streambp.patch(ours, streambp.StreamConfig(chunk_size=4, kernels=by, **settings))
        off, own_error = (
            relative_l2(gradients(ours, **batch)[1], expected),
            relative_l2(expected, plain),
        )
        vars(modeling).update(globals_before)
        print(
            family,
            kernels,
            settings,
            f"{off:.1e}, beside transformers' own operations {own_error:.1e}",
            flush=True,
        )
        assert off <= 1e-6
        assert 0.0 < own_error <= 1e-5
        notes = " ".join(
            note for note in streambp.describe(ours).notes if "Liger's kernels compute" in note
        )
        assert notes
        assert ("the rotation of queries and keys" in notes) == (rotation and kernels == "auto")
