"""Kernels' stand-ins: what they keep and give back, by hand; how they are known; that nothing of
them stays.

covers: planner/delta_rules.py, planner/mixers.py, planner/plan.py, planner/profile.py,
  planner/report.py, planner/skeleton.py, planner/state_spaces.py, planner/survey.py
"""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import Qwen3_5TextConfig

import streambp
from streambp.planner import mixers
from streambp.planner.count import LiveBytes, StepCount
from streambp.planner.delta_rules import causal_conv, delta_rule
from streambp.planner.mixers import (
    MIXER_KERNELS,
    assumed_kernels,
    mixers_of,
    replace_mixers,
    uncountable_packages,
)
from streambp.planner.plan import Memory, plan, plan_profile
from streambp.planner.profile import Setting
from streambp.planner.report import plan_table
from streambp.planner.skeleton import Skeleton
from streambp.planner.state_spaces import fused_mamba, fused_mamba2, mamba2_scan, selective_scan
from streambp.planner.survey import Counter, streamed_recipe, survey
from tests import zoo
from tests.seeds import seed_torch
from tests.versions import MIXERS_ARE_FUNCTIONS, needs_mixer_functions

HALF, WIDE = torch.bfloat16, torch.float32
FAMILIES = {
    "qwen3_next": {"causal_conv1d", "fla"},
    "kimi_linear": {"causal_conv1d", "fla"},
    "bamba": {"causal_conv1d", "mamba_ssm"},
    "falcon_mamba": {"causal_conv1d", "mamba_ssm"},
    "jamba": {"causal_conv1d", "mamba_ssm"},
    "lfm2": {"causal_conv1d"},
    "qwen3": set(),
}
SMALL_CONFIG = Qwen3_5TextConfig(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=1000,
    num_hidden_layers=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip


def empty(*shape, dtype=HALF):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def ran(call, *inputs):
    """Bytes alive after forward, and at most in backward beyond what its outputs' gradients take;
    gradients."""
    with LiveBytes() as count:
        outputs = [out for out in call(*inputs) if out is not None]
        saved_bytes = count.live
        grads = [torch.empty_like(out) for out in outputs]
        bytes_before = count.live - saved_bytes
        count.reset_peak()
        gradients = torch.autograd.grad(outputs, [x for x in inputs if x is not None], grads)
        return saved_bytes, count.peak - bytes_before, gradients


def delta_inputs(tokens, per_channel):
    """q, k of 2 heads, v of 4; K = 16, V = 32."""
    q, k, v = empty(1, tokens, 2, 16), empty(1, tokens, 2, 16), empty(1, tokens, 4, 32)
    g = empty(1, tokens, 4, 16, dtype=WIDE) if per_channel else empty(1, tokens, 4, dtype=WIDE)
    return q, k, v, g, empty(1, tokens, 4), empty(1, 4, 16, 32, dtype=WIDE)


def check_kept():
    """What a forward leaves: outputs, and what is saved besides its inputs."""
    tokens, state = 256, 4 * 16 * 32 * 4

    def rule(*inputs):
        return delta_rule(*inputs, True, True)

    q, k, v, g, beta, start = delta_inputs(tokens, False)
    saved_bytes, _, gradients = ran(rule, q, k, v, g, beta, start)
    normalised = 2 * tokens * 2 * (16 * 2 + 4)
    assert (
        saved_bytes
        == tokens * 4 * 32 * 2 + state + normalised + tokens * 4 * 4 + tokens * 4 * 64 * 2
    )
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, g, beta, start)]
    q, k, v, g, beta, start = delta_inputs(tokens, True)
    saved_bytes, _, _ = ran(rule, q, k, v, g, beta, start)
    assert (
        saved_bytes
        == tokens * 4 * 32 * 2 + state + normalised + tokens * 4 * 16 * 4 + 2 * tokens * 4 * 64 * 2
    )

    u, dt, z = empty(1, 32, tokens), empty(1, 32, tokens), empty(1, 32, tokens)
    a, b, c, d = (
        empty(32, 8, dtype=WIDE),
        empty(1, 8, tokens),
        empty(1, 8, tokens),
        empty(32, dtype=WIDE),
    )
    saved_bytes, _, _ = ran(selective_scan, u, dt, a, b, c, d, z, empty(32, dtype=WIDE))
    assert (
        saved_bytes == 2 * 32 * tokens * 2 + 32 * 2 * 8 * 4
    )  # out, gated, and states of one block

    x, dt, b, c = (
        empty(1, tokens, 4, 32),
        empty(1, tokens, 4),
        empty(1, tokens, 2, 16),
        empty(1, tokens, 2, 16),
    )
    head = empty(4, dtype=WIDE)
    start = empty(1, 4, 32, 16, dtype=WIDE)
    saved_bytes, _, gradients = ran(
        lambda *i: mamba2_scan(*i, 64), x, dt, head, b, c, head, head, start
    )
    assert saved_bytes == 4 * 32 * tokens * 2 + start.nbytes + 4 * tokens * 4  # out, end, decay
    assert gradients[-1].dtype == start.dtype


def check_peaks():
    """Of the gated delta rule's backward: w, u, h, v_new again, both state gradients, two of v,
    three of k and dw."""
    tokens = 4096
    q, k, v, g, beta, start = delta_inputs(tokens, False)
    saved_bytes, peak, _ = ran(
        lambda *inputs: delta_rule(*inputs, True, True), q, k, v, g, beta, start
    )
    blocks = 2 * (tokens // 64) * 4 * 16 * 32 * 2  # h and dh
    values, keys, small = tokens * 4 * 32 * 2, tokens * 4 * 16 * 2, tokens * 4
    at_most = (
        blocks
        + values * (2 + 1 + 1)
        + keys * (1 + 1 + 1)
        + 3 * tokens * 2 * 16 * 2
        + small * (4 + 4 + 2)
    )
    assert peak - saved_bytes == pytest.approx(at_most, rel=0.01)
    saved_bytes, peak, _ = ran(
        lambda *inputs: (causal_conv(*inputs),), empty(1, 64, 128), empty(64, 4), None
    )
    # dx, dW in float32 and then in its dtype
    assert peak - saved_bytes == 64 * 128 * 2 + 64 * 4 * 4 + 64 * 4 * 2


def test_what_kernels_keep_by_hand():
    check_kept()


def test_what_backward_takes_by_hand():
    check_peaks()


def test_fused_forms_return_every_gradient():
    xz, proj = empty(2, 64, 256), empty(16, 32)
    inputs = (
        xz,
        empty(32, 1, 4),
        empty(32),
        empty(20, 32),
        empty(32, 4),
        proj,
        None,
        empty(32, 8, dtype=WIDE),
    )
    inputs += (empty(32, dtype=WIDE), empty(32, dtype=WIDE))
    _, _, gradients = ran(lambda *i: (fused_mamba(*i, torch.ones(1)),), *inputs)
    assert [x.shape for x in gradients] == [x.shape for x in inputs if x is not None]
    heads = empty(4, dtype=WIDE)
    inputs = (
        empty(2, 256, 2 * 128 + 2 * 2 * 16 + 4),
        empty(192, 4),
        empty(192),
        heads,
        heads.detach().requires_grad_(),
    )
    inputs += (empty(4), empty(128), empty(48, 128), empty(48))
    _, _, gradients = ran(lambda *i: (fused_mamba2(*i, 32, 2, 64),), *inputs)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_are_known_by_their_parameters(family):
    model = Skeleton(zoo.tiny_config(family), HALF, None, 16, "cuda").model
    functions = mixers_of(model)
    unreachable = set(uncountable_packages(model))
    assert {kernel.package for _, _, kernel in functions} == FAMILIES[family] - unreachable
    assert unreachable <= FAMILIES[family]
    assert not (unreachable and MIXERS_ARE_FUNCTIONS)
    assert not any("update" in name or "recurrent" in name for _, name, _ in functions)
    assert len({(id(space), id(kernel)) for space, _, kernel in functions}) == len(functions)


def test_nothing_stays_behind_an_exception():
    model = zoo.build("qwen3_next", WIDE)
    space = sys.modules[type(model).__module__].__dict__
    space_before = dict(space)
    space_inside = {}

    def fail():
        with replace_mixers(model, "kernels"):
            space_inside.update(space)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (
        space_inside["torch_chunk_gated_delta_rule"]
        is not space_before["torch_chunk_gated_delta_rule"]
    )
    assert all(space[name] is value for name, value in space_before.items())


def test_a_model_with_data_runs_its_own_functions_meanwhile():
    seed_torch(0)
    model = zoo.build("lfm2", WIDE).eval()
    ids = torch.randint(3, zoo.VOCABULARY, (1, 17))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with replace_mixers(model, "kernels"):
            assert torch.equal(model(ids, use_cache=False).logits, expected)


@pytest.mark.full
@needs_mixer_functions
def test_what_is_assumed_is_said(monkeypatch):
    profile = survey(
        Skeleton(SMALL_CONFIG, HALF, None, 16, "cuda"),
        [streamed_recipe()],
        at=(256, 128),
        accumulating=False,
        tree=False,
    )
    assert profile.mixers == "kernels of causal_conv1d, fla"
    table = plan_table(plan_profile(profile, 256, Memory(2**30), Setting(optimizer=4)))
    assert "Recurrent and convolutional layers: assuming kernels of causal_conv1d, fla" in table
    monkeypatch.setattr(mixers, "is_installed", lambda package: package == "fla")
    model = Skeleton(SMALL_CONFIG, HALF, None, 16, "cuda", "installed").model
    assert (
        assumed_kernels(model, "installed")
        == "kernels of fla and transformers' plain torch where causal_conv1d would have kernels"
    )
    assert (
        assumed_kernels(model, "torch")
        == "transformers' plain torch where causal_conv1d, fla would have kernels"
    )
    assert Skeleton(SMALL_CONFIG, HALF, None, 16, "cpu").mixers == "torch"
    with pytest.raises(streambp.StreamBPError, match="mixers is 'fla'"):
        plan(SMALL_CONFIG, 256, gpu_memory=2**30, mixers="fla")


def operations(config, choice, point):
    """Operations of a streamed step's count, and calls of stand-ins in it."""
    skeleton = Skeleton(config, HALF, None, 16, "cuda", choice)
    counter = Counter(skeleton, skeleton.reduce(), 1, "cudnn")
    calls, number = [], 0
    real_call, real_kernel = StepCount.__torch_dispatch__, mixers.stand_in

    def call(self, *arguments):
        nonlocal number
        number += 1
        return real_call(self, *arguments)

    def kernel(function, mixer_kernel, *arguments, **keywords):
        calls.append(mixer_kernel.package)
        return real_kernel(function, mixer_kernel, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepCount, "__torch_dispatch__", call)
        patched.setattr(mixers, "stand_in", kernel)
        counter.count(streamed_recipe(), point, accumulate=False)
    return number, calls


class OlderMixer(torch.nn.Module):
    """Calls its rule as an attribute, and its convolution as an import that is not there."""

    def __init__(self):
        super().__init__()
        self.rule = rule_in_torch

    def forward(self, q, k, v, g, beta):
        return self.rule(q, k, v, g, beta)


def rule_in_torch(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False):  # fmt: skip
    return None, None


causal_conv1d_fn = None


def test_functions_that_modules_hold_and_kernels_out_of_reach():
    """As in transformers before 5.15, whose Qwen3-Next holds a rule, and convolves in its own
    code."""
    model = OlderMixer()
    assert [
        (space is vars(model), name) for space, name, _ in mixers_of(model) if name == "rule"
    ] == [(True, "rule")]
    assert uncountable_packages(model) == ["causal_conv1d"]
    assert assumed_kernels(model, "kernels") == (
        "kernels of fla and transformers' plain torch where causal_conv1d would have kernels"
    )
    *inputs, _ = delta_inputs(128, False)
    with replace_mixers(model, "kernels"):
        out, _ = model(*inputs)
    assert out.shape == inputs[2].shape
    assert model.rule is rule_in_torch


@needs_mixer_functions
def test_a_step_is_a_few_hundred_operations_a_chunk_and_layer():
    """Of Qwen3.5-9B's shape, three layers with states among six kept: what a plan's minute is made
    of."""
    number, calls = operations(Qwen3_5TextConfig(), "kernels", (32768, 8192))
    probes = calls.count("fla") - 3 * 4 * 2  # layers, chunks, forward and recomputation
    print(
        f"{number} operations, {len(calls)} calls of stand-ins; of the delta rule's {probes} in "
        "probes"
    )
    assert calls.count("fla") == calls.count("causal_conv1d")
    assert probes == 3 * (2 + 2)  # of its unread products, and of whether it starts from its states
    assert number <= 6 * 4 * 700


@pytest.mark.full
def test_plain_torch_is_counted_where_asked_for():
    number, calls = operations(SMALL_CONFIG, "torch", (256, 128))
    fewer, some = operations(SMALL_CONFIG, "kernels", (256, 128))
    assert not calls
    assert some
    assert number > fewer


def test_every_kernel_names_its_package():
    assert {kernel.package for kernel in MIXER_KERNELS} == {"causal_conv1d", "fla", "mamba_ssm"}
