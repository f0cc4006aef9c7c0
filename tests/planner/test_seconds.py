"""Seconds of steps: measured ones on an H200 and H100s, laws at other lengths, devices, and what is
chosen by them.

covers: rates.py, planner/fused_layers.py, planner/kernels.py, planner/laws.py,
  planner/measure_device.py, planner/seconds.py, planner/work.py
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

import streambp
from paper_repro.harness import peak_of
from streambp import cli
from streambp.planner import Setting, auto, fused_layers
from streambp.planner.count import StepCount
from streambp.planner.laws import Law, features
from streambp.planner.measure_device import measure_device
from streambp.planner.profile import peak, work
from streambp.planner.seconds import kernels, seconds, throughput
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import (
    CHECKPOINTING_HEAD_RECIPE,
    CHECKPOINTING_RECIPE,
    STREAMED_RECIPES,
    streamed_recipe,
    survey,
)
from streambp.planner.work import Work, aten, pairs
from streambp.rates import DEVICES, Rates, rates_of, read_rates, write_rates
from tests.planner.laws import made_work
from tests.planner.test_estimates import QWEN3_8B, SMALL_CONFIG, made_up

GIB = 2**30
H200 = DEVICES["H200"]
# Forward and backward of an 8B model on one H200, bf16, batch 1: method, fused layers, T, seconds.
# The first four are those that the H200's rates are fitted on. "selective" is checkpointing that
# keeps attention's outputs; Liger's head computes logits once, TRL's twice.
MEASURED = [
    ("head", False, 65_536, 18.36),
    ("head, selective", False, 65_536, 16.24),
    ("head, selective", True, 16_384, 2.06),
    ("head, selective", True, 65_536, 14.22),
    ("logits", False, 16_384, 2.66),
    ("head", False, 16_384, 2.68),
    ("head, selective", False, 16_384, 2.55),
    ("Liger's head", True, 16_384, 2.17),
    ("Liger's head", True, 65_536, 16.32),
    ("head, offloaded", True, 65_536, 16.42),
    ("x offloaded", True, 65_536, 17.71),
    ("x, attn_out offloaded", True, 65_536, 15.40),
    ("x, attn_out, kv", True, 65_536, 14.75),
]
# The same on one H100 of 80 GB, by this package's own scripts (paper_repro/results/h100): nothing
# is fitted on them but the bandwidth, which was measured apart. Chunks of 16,384.
MEASURED_H100 = [
    ("head, selective", True, 16_384, 2.049),
    ("head, selective", True, 65_536, 14.218),
    ("x, attn_out offloaded", True, 65_536, 14.655),
]
FITTED_STEPS = 4
KERNELS = ("auto", "own", "liger", "compiled")
STREAMED_AS = {
    "x offloaded": streamed_recipe((), "cpu").name,
    "x, attn_out offloaded": streamed_recipe(("attn_out",), "cpu").name,
    "x, attn_out, kv": streamed_recipe(("attn_out", "kv")).name,
}
# The streamed rows are those of a prototype of this package, which computed down_proj and queries
# again, 150 TFLOP, and merged blocks in plain torch, 0.3 TB.
PROTOTYPE = Work(products=150e12, traffic=0.3e12)


@pytest.fixture(scope="module")
def counted():
    """Both profiles of the 8B model: layers in plain torch, and with fused kernels."""
    recipes = {
        False: (CHECKPOINTING_RECIPE, CHECKPOINTING_HEAD_RECIPE),
        True: (
            CHECKPOINTING_HEAD_RECIPE,
            STREAMED_RECIPES[2],
            STREAMED_RECIPES[3],
            STREAMED_RECIPES[4],
        ),
    }

    def skeleton(fused):
        return Skeleton(
            QWEN3_8B, torch.bfloat16, None, 16, "cuda", None, "liger" if fused else "own"
        )

    return {
        fused: survey(skeleton(fused), recipes_of_kind, accumulating=False, tree=False)
        for fused, recipes_of_kind in recipes.items()
    }


def row_work(counted, name, fused, length, prototype=True):
    """Of a whole step."""
    profile, base = counted[fused], name.partition(",")[0]
    methods_by_name = {
        "logits": CHECKPOINTING_RECIPE.name,
        "head": CHECKPOINTING_HEAD_RECIPE.name,
        "Liger's head": CHECKPOINTING_HEAD_RECIPE.name,
    }
    parts = work(profile.method(STREAMED_AS.get(name) or methods_by_name[base]), length, 16_384)
    if name == "head, selective":
        parts["backward"] = parts["backward"]._replace(forward=0.0)
    if name == "Liger's head":
        parts["head"] = parts["head"]._replace(products=0.0)
    total = PROTOTYPE if name in STREAMED_AS and prototype else Work()
    for part in parts.values():
        total = total.plus(part)
    return total


@pytest.mark.full
def test_every_measured_step_on_an_h200_within_five_percent(counted):
    errors = []
    for number, (name, fused, length, measured) in enumerate(MEASURED):
        predicted = sum(kernels(row_work(counted, name, fused, length), H200))
        errors.append(predicted / measured - 1)
        print(
            f"{name:24} {'fused layers' if fused else 'plain torch':12} {length:>7,} predicted "
            f"{predicted:6.2f} measured {measured:6.2f} {100 * errors[-1]:+5.1f} % "
            f"{'fitted' if number < FITTED_STEPS else 'held out'}"
        )
    assert max(map(abs, errors)) <= 0.05


def test_every_measured_step_on_an_h100_within_three_percent(counted):
    for name, fused, length, measured in MEASURED_H100:
        predicted = sum(
            kernels(row_work(counted, name, fused, length, prototype=False), DEVICES["H100"])
        )
        print(
            f"{name:24} {length:>7,} predicted {predicted:6.3f} measured {measured:6.3f} "
            f"{100 * (predicted / measured - 1):+5.1f} %"
        )
        assert abs(predicted / measured - 1) <= 0.03


# `streambp.patch(model)` there: LoRA, T in one chunk or in chunks of 16,384, GiB of saves, at the
# start, at the peak.
PEAKS_H100 = [
    (False, 2_048, 8.88, 15.26, 30.594),
    (False, 4_096, 17.8, 15.26, 37.750),
    (False, 16_384, 44.4, 15.26, 67.948),
    (False, 65_536, 32.8, 15.26, 70.617),
    (True, 16_384, 48.2, 15.4, 70.545),
]


@pytest.mark.full
def test_every_measured_peak_of_the_default_on_an_h100_within_four_percent():
    peft = pytest.importorskip("peft")
    needs = {}
    for lora in (False, True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(QWEN3_8B, dtype=torch.bfloat16).train()
        if lora:
            model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
        skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda", "installed", "liger")
        skeleton.own_adapters = True  # as it was measured
        needs[lora] = auto.StepNeed(survey(skeleton, [streamed_recipe()], tree=False).methods[0])
    for lora, length, saved, start, measured in PEAKS_H100:
        phases = needs[lora].bytes_by_layer(length, min(length, 16_384), 0.0)
        predicted = start + sum(peak_of(phases, saved * GIB, QWEN3_8B.num_hidden_layers)) / GIB
        print(
            f"{lora!s:5} {length:>7,} predicted {predicted:.2f} measured {measured:6.2f} "
            f"{100 * predicted / measured - 100:+5.1f} %"
        )
        assert abs(predicted / measured - 1) <= 0.04


def test_the_rates_are_fitted_on_four_of_the_steps(counted):
    works = [
        row_work(counted, name, fused, length) for name, fused, length, _ in MEASURED[:FITTED_STEPS]
    ]
    table = torch.tensor(
        [[w.products, w.forward, w.backward, w.traffic] for w in works], dtype=torch.float64
    )
    measured = torch.tensor([row[-1] for row in MEASURED[:FITTED_STEPS]], dtype=torch.float64)
    fitted = (1 / torch.linalg.solve(table, measured)).tolist()
    print([f"{rate:.4g}" for rate in fitted])
    assert [H200.products, H200.forward, H200.backward, H200.bandwidth] == pytest.approx(
        fitted, rel=0.03
    )


def test_a_million_tokens_on_eight_h100_within_fifteen_percent(counted):
    """TRL's documented steps of Qwen3-8B took 364 to 380 s, with communication."""
    profile = counted[True]
    setting = Setting(gpus=8, ulysses=8)
    for name in (CHECKPOINTING_HEAD_RECIPE.name,):
        predicted = seconds(profile.method(name), 2**20, 2**17, DEVICES["H100"], setting).total
        print(f"{predicted:.0f} s")
        assert 0.85 * 364 <= predicted <= 1.15 * 380


def profile_of_small(recipe, config=SMALL_CONFIG, fused=False):
    kernels = fused if isinstance(fused, str) else "liger" if fused else "own"
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda", None, kernels)
    return survey(skeleton, [recipe], accumulating=False, tree=False)


def test_pairs_are_counted_one_by_one():
    for queries, keys, window in [
        (7, 7, None),
        (7, 7, 3),
        (5, 12, 4),
        (5, 12, 9),
        (5, 12, 11),
        (6, 6, 6),
    ]:
        reads = [keys - queries + i + 1 for i in range(queries)]
        exact = sum(min(n, window or n) for n in reads)
        assert pairs(queries, keys, True, window) == pytest.approx(exact, abs=queries / 2 + 1)
        if window is not None and window < keys:
            assert pairs(queries, keys, True, window) == exact
    assert pairs(5, 12, False, None) == 60


def test_bytes_that_operations_move():
    """Written once, read once: by hand for each rule of `planner/work.py`."""
    make = dict(device="meta", dtype=torch.bfloat16)  # noqa: C408
    x, row, index = (
        torch.empty(6, 8, **make),
        torch.empty(8, **make),
        torch.empty(3, dtype=torch.long, device="meta"),
    )
    wide = torch.empty(65, 65, device="meta")
    cases = {
        "in and out": (lambda: x + x, 3 * 96),
        "in place": (lambda: x.mul_(2), 2 * 96),
        "broadcast once": (lambda: x * row.expand(6, 8), 2 * 96 + 16),
        "a view": (lambda: x.t()[2:], 0),
        "empty": (lambda: torch.empty_like(x), 0),
        "a fill": (lambda: x.zero_(), 96),
        "a copy": (lambda: x.copy_(torch.empty_like(x)), 2 * 96),
        "a gather": (lambda: x[index], 2 * 48),
        "a scatter": (lambda: x.index_add_(0, index, torch.empty(3, 8, **make)), 2 * 48),
        "a product": (lambda: wide @ wide, 0),
        "a product onto a sum": (lambda: wide.addmm_(wide, wide), 2 * 4 * 65**2),
        "a skinny product": (lambda: x @ x.t(), 2 * 96 + 72),
        "a reduction": (lambda: x.sum(-1), 96 + 12),
    }
    for name, (run, expected) in cases.items():
        for _ in range(2):  # what is remembered is the same
            with StepCount(None) as count:
                run()
            assert count.work.traffic == expected, name


@pytest.mark.fast("True")
@pytest.mark.parametrize("fused", [False, True])
def test_attention_of_windows_is_counted_as_it_is(fused):
    """One layer in two with a window of 512: neither a T^2 nor counted whole, unpatched and
    streamed."""
    config = Gemma3TextConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=100,
        num_hidden_layers=2, sliding_window=512, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    length, flops = 65_536, 4 * 2 * 32
    exact = flops * (length**2 / 2 + length * 512 - 512**2 / 2)
    for recipe in (streamed_recipe(), CHECKPOINTING_RECIPE):
        profile = profile_of_small(recipe, config, fused)
        parts = work(profile.methods[0], length, 8192)
        assert parts["forward"].forward == pytest.approx(exact, rel=0.03)
        assert parts["backward"].backward == pytest.approx(2.5 * exact, rel=0.03)


def test_fused_layers_move_less_and_keep_less():
    plain, fused = (
        profile_of_small(CHECKPOINTING_HEAD_RECIPE, fused=fused) for fused in (False, True)
    )
    traffic = [
        sum(part.traffic for part in work(p.methods[0], 32_768, 0).values()) for p in (plain, fused)
    ]
    assert traffic[1] < 0.5 * traffic[0]
    peaks = [peak(p, p.methods[0], 32_768, 0, Setting(optimizer=0)).total for p in (plain, fused)]
    assert peaks[1] < peaks[0]
    products = [work(p.methods[0], 32_768, 0)["forward"].products for p in (plain, fused)]
    assert products[0] == products[1]


@pytest.mark.full
def test_compiled_regions_move_little_more_than_liger_and_keep_more():
    """Their backward gives new tensors, where Liger's writes over what it is given."""
    own_kernels, liger, compiled = (
        profile_of_small(streamed_recipe(("attn_out",)), fused=kernels) for kernels in KERNELS[1:]
    )
    traffic = [
        sum(part.traffic for part in work(p.methods[0], 32_768, 8192).values())
        for p in (own_kernels, liger, compiled)
    ]
    assert traffic[1] < traffic[2] < 0.65 * traffic[0]
    peaks = [
        peak(p, p.methods[0], 32_768, 8192, Setting(optimizer=0)).total
        for p in (own_kernels, liger, compiled)
    ]
    assert peaks[1] <= peaks[2] <= peaks[0]


def test_what_kernels_are_planned(monkeypatch):
    """ "auto" is what training takes here by default."""
    for installed, expected in ((True, "liger"), (False, None)):
        monkeypatch.setattr(
            fused_layers, "is_installed", lambda name, installed=installed: installed
        )
        assert fused_layers.fusion("auto", "cuda") == expected
        assert fused_layers.fusion("auto", "cpu") is None
    assert [fused_layers.fusion(kernels, "cuda") for kernels in KERNELS[1:]] == [
        None,
        "liger",
        "compiled",
    ]
    with pytest.raises(
        streambp.StreamBPError, match="kernels is 'triton'; it must be one of 'auto', 'own'"
    ):
        fused_layers.fusion("triton", "cuda")


def test_blocks_of_a_chunk():
    """Chunks of 8,192 end at 8k, 16k, 24k and 32k: one block of 16k each for two of them, two for
    the others."""
    assert features(32_768, 8192, 0.0, 16_384) == (
        1,
        32_768,
        8192,
        4,
        0,
        4 * 32_768,
        2**28,
        2**30,
        2,
        2 * 8192,
    )
    # a prefix of 32k is two blocks beside the chunk's own
    assert features(65_536, 32_768, k_block=16_384).blocks == 2
    assert features(100, 0, k_block=16_384)[3:6] == (0, 0, 0)
    block_count = features(2**22, 1024, k_block=16_384).blocks
    assert block_count == pytest.approx(
        sum(-(-(i + 1) * 1024 // 16_384) - 1 for i in range(4096)), rel=0.02
    )


def rates(**changes):
    return dataclasses.replace(Rates("made up", 1e3, 1e3, 1e3, 1e3, 1e3, dispatch=1e-9), **changes)


def test_seconds_by_hand():
    method = dataclasses.replace(made_up().methods[0], work=made_work(3, 0.5))
    predicted = seconds(method, 100, 10, rates())
    assert (predicted.products, predicted.attention, predicted.total) == (0.3, 5, 5.3)
    assert seconds(method, 100, 10, rates(), Setting(gpus=2, ulysses=2)).total == 5.3 / 2
    assert throughput(predicted, 100, 2, Setting(gpus=4, ulysses=2)) == 400 / 5.3
    part = method.work[0]
    copies = dataclasses.replace(part, laws=(*part.laws[:5], Law(tokens=60), Law(tokens=70)))
    predicted = seconds(dataclasses.replace(method, work=(copies,)), 100, 10, rates())
    assert (predicted.total, predicted.waiting, predicted.phases) == (
        7,
        pytest.approx(1.7),
        {"backward": 7},
    )
    host = dataclasses.replace(part, laws=(*part.laws[:4], Law(tokens=1), *part.laws[5:]))
    assert (
        seconds(dataclasses.replace(method, work=(host,)), 100, 10, rates(dispatch=0.1)).total == 10
    )


def test_a_device_is_found_by_its_name_or_file(tmp_path):
    assert rates_of("h100 pcie") is DEVICES["H100-PCIe"]
    file = tmp_path / "mine.json"
    write_rates(rates(source="here", guess=True), file)
    assert rates_of(str(file)) == read_rates(file) == rates(source="here", guess=True)
    with pytest.raises(
        streambp.StreamBPError,
        match=r"'H10O' is not in the table.*Did you mean H100\?.*--measure-device",
    ):
        rates_of("H10O")
    file.write_text('{"name": "half"}')
    with pytest.raises(streambp.StreamBPError, match=r"No rates of a device .*missing.*'products'"):
        rates_of(file)
    with pytest.raises(streambp.StreamBPError, match=r"link is 0; it must be a number"):
        rates(link=0)


def test_every_guess_is_marked_and_every_rate_has_a_source():
    assert all(row.source for row in DEVICES.values())
    assert {name for name, row in DEVICES.items() if not row.guess} == {
        "H200", "H100", "A100", "A100-40GB", "RTX5090"
    }  # fmt: skip


def test_this_machine_is_measured(tmp_path, capsys):
    file = tmp_path / "here.json"
    assert cli.main(["plan", "--measure-device", str(file)]) == 0
    fields = json.loads(file.read_text())
    assert "TFLOP/s in matrix products" in capsys.readouterr().err
    assert read_rates(file).name == fields["name"]
    second_rates = measure_device("cpu")
    assert (
        0.02 < second_rates.products / fields["products"] < 50 or torch.accelerator.is_available()
    )
    assert cli.main(["plan", "--measure-device", str(file), "--device", "H200"]) == 2
    assert "pass one of the two" in capsys.readouterr().err
    assert cli.main(["plan"]) == 2
    assert "needs MODEL and --gpu-memory" in capsys.readouterr().err


@pytest.mark.full
def test_a_copy_is_the_links_and_no_kernels():
    """What offloading adds to a step: copies out in forward and back in backward; nothing of the
    device's bandwidth."""
    profile = survey(
        Skeleton(SMALL_CONFIG, torch.bfloat16, None, 16, "cuda"),
        [streamed_recipe(), streamed_recipe((), "cpu")],
        accumulating=False,
        tree=False,
    )
    resident, offloaded = (work(method, 65_536, 8192) for method in profile.methods)
    token = 3 * 128 * 2  # x of three layers
    assert offloaded["forward"].to_host == pytest.approx(token * 65_536)
    # Keys first, then all gradients, both from all chunks but the last, which has stayed since
    # forward.
    assert offloaded["backward"].from_host == pytest.approx(token * (2 * 65_536 - 2 * 8192))
    assert resident["forward"].to_host == resident["backward"].from_host == 0
    assert offloaded["backward"].traffic == pytest.approx(resident["backward"].traffic, rel=0.01)


def test_attention_kernels_are_no_products():
    q = torch.empty(1, 2, 64, 32, dtype=torch.bfloat16, device="meta")
    with StepCount(None) as count:
        aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True, scale=1.0)
    assert count.work._replace(dispatches=0) == Work(forward=4 * 2 * 32 * 64 * 64 / 2)
