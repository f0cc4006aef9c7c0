"""Fused kernels by family and setting: a covering design, in which each two values of two settings
stand in some row.

Liger's are a stand-in's (`tests/liger_stand_in.py`), which computes the norms and MLPs that it
knows; compiled regions are made by aot_eager and by inductor. In float32 gradients are the
unpatched model's, with the same kernels where they are Liger's; under bfloat16's autocast our error
is at most 1.05 times that of the unpatched model.

covers: model/chosen_kernels.py, model/compiled_regions.py, model/fused_layers.py, layer/products.py
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys

import pytest
import torch

import streambp
from streambp.known_names import LIGERS_TABLE
from streambp.model import chosen_kernels, compiled_regions
from tests import families, zoo
from tests.families import make_batch
from tests.liger_stand_in import KINDS, PATCHES, stand_in
from tests.oracle import assert_as_precise, gradients, relative_l2
from tests.seeds import seed_torch
from tests.tiers import thinned
from tests.versions import needs_states

MAX_RELATIVE_ERROR = 1e-6  # of the whole gradient, in float32
DENSE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3")
# two hybrids, one with a mixture; sinks
OTHER_FAMILIES = ("qwen3_5_text", "lfm2", "granitemoehybrid", "qwen3_moe", "gpt_oss")
FACTORS = (
    (*DENSE, *OTHER_FAMILIES),
    ("liger", "aot_eager", "inductor"),
    ((), ("attn_out",), ("attn_out", "kv"), ("*",), "auto"),
    ("none", "cpu"),
    ("full", "lora"),
    ("float32", "autocast"),
)


def covering(factors):
    """Rows in which each two values of two factors stand together, the one that adds most after the
    other."""
    uncovered_pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a in factors[i]
        for b in factors[j]
    }
    pairs = {
        row: frozenset(itertools.combinations(enumerate(row), 2))
        for row in itertools.product(*factors)
    }
    rows = []
    while uncovered_pairs:
        rows.append(max(pairs, key=lambda row: len(pairs[row] & uncovered_pairs)))
        uncovered_pairs -= pairs[rows[-1]]
    return rows


ROWS = covering(FACTORS)
FAST_CASES = {
    next(row for row in ROWS if row[1] == by and row[5] == "float32" and row[0] in DENSE)
    for by in ("liger", "aot_eager")
}


def test_the_design_covers():
    for i, j in itertools.combinations(range(len(FACTORS)), 2):
        assert {(row[i], row[j]) for row in ROWS} == set(itertools.product(FACTORS[i], FACTORS[j]))
    print(f"{len(ROWS)} rows")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Liger's stand-in for all families, and an accelerator that is the host."""
    stand_in(monkeypatch)
    package = sys.modules[PATCHES]
    apply, table = package._apply_liger_kernel_to_instance, getattr(package, LIGERS_TABLE)

    def apply_gated(model, **options):
        gated = all(
            hasattr(m, "gate_proj") for m in model.modules() if type(m).__name__.endswith("MLP")
        )
        apply(
            model=model,
            swiglu=gated,
            **{name: value for name, value in options.items() if name != "swiglu"},
        )

    table.update((KINDS.get(name, name), apply_gated) for name in FACTORS[0])
    monkeypatch.setattr(chosen_kernels, "kernel_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(chosen_kernels, "why_no_driver", lambda kind: None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def built(family, training="full", seed=0):
    if family in DENSE:
        model = families.build(family, seed=seed)
    else:
        model = zoo.build(family, torch.float32, seed)
    if training == "full":
        return model
    peft = pytest.importorskip("peft", reason="peft is not installed")
    seed_torch(seed)
    settings = peft.LoraConfig(
        r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, settings)


def with_kernels(model, config):
    """An unpatched model: with Liger's kernels where ours has them; compiled regions compute what
    it does."""
    if config.kernels == "auto":
        chosen_kernels.choose_kernels(model, config)
    return model


@pytest.mark.fast(2)
@needs_states
@pytest.mark.parametrize(
    ("family", "by", "saves", "offload", "training", "dtype"),
    thinned(ROWS, lambda *row: row in FAST_CASES),
)
def test_covering_design(family, by, saves, offload, training, dtype, monkeypatch):
    monkeypatch.setattr(compiled_regions, "BACKEND", by)
    config = streambp.StreamConfig(
        chunk_size=7,
        saves=saves,
        offload=offload,
        kernels="auto" if by == "liger" else "compiled",
        unpatched_runs=False,
    )
    stock, ours = built(family, training), built(family, training)
    truth, batch = copy.deepcopy(stock), make_batch("left-padded")
    streambp.patch(ours, config)
    with_kernels(stock, config)
    if dtype == "float32":
        for _ in range(2):  # the second with what the first has measured
            loss, grads = gradients(ours, **batch)
        expected_loss, expected = gradients(stock, **batch)
        assert abs(loss - expected_loss) <= 1e-6 * expected_loss
        off = relative_l2(grads, expected)
        print(f"{off:.1e}")
        assert off <= MAX_RELATIVE_ERROR
    else:
        assert_as_precise(errors(truth, stock, ours, family, training, batch))
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


def errors(truth, stock, ours, family, training, batch):
    """Under autocast: ours and the unpatched model's, with one set of random weights after the
    other."""
    for seed in itertools.count():
        weights = built(family, training, seed).state_dict()
        runs = []
        for model in (truth, stock, ours):
            model.load_state_dict(weights)
            with (
                contextlib.nullcontext()
                if model is truth
                else torch.autocast("cpu", torch.bfloat16)
            ):
                runs.append(gradients(model, **batch)[1])
        yield relative_l2(runs[2], runs[0]), relative_l2(runs[1], runs[0])
