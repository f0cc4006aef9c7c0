"""The page: Python's numbers in a real browser, and nothing outside of the file.

covers: cli/runs.py, planner/page.py, planner/plan.py, planner/profile.py, planner/skeleton.py,
planner/survey.py
"""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import random
import re
import shutil
import subprocess
import urllib.parse

import pytest
import torch
from transformers import Qwen3Config

import streambp.planner.page
from streambp.cli import main
from streambp.planner.host_weights import first_layers
from streambp.planner.laws import Law, PhaseLaws
from streambp.planner.page import page
from streambp.planner.plan import Memory, options, plan_profile
from streambp.planner.profile import (
    CONTEXT_PARALLEL,
    ULYSSES,
    Heads,
    Method,
    Node,
    ParameterGroup,
    Phase,
    Profile,
    SequenceSplit,
    Setting,
    available_methods,
    flops,
    peak,
)  # fmt: skip
from streambp.planner.seconds import seconds, throughput
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import CHECKPOINTING_RECIPE, STREAMED_RECIPES, streamed_recipe, survey
from streambp.rates import DEFAULT_DEVICE, DEVICES
from tests.hangs import HANG
from tests.seeds import seed_of

GIB = 2**30
RATES = DEVICES[DEFAULT_DEVICE]
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
FLAGS += ["--virtual-time-budget=3000"]  # what waits in the page is over before it is written down
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium was found to open the page with"
)


class Elements(html.parser.HTMLParser):
    """Start tags with their attributes, `data-key` -> `value` of <data>, and the text of elements
    by their id."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.figures, self.texts, self._open = [], {}, {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        if "data-key" in values:
            self.figures[values["data-key"]] = values.get("value", values.get("data-value"))
        if tag not in ("meta", "input", "wbr", "i"):
            self._open.append(values.get("id"))

    def handle_endtag(self, tag):
        if self._open:
            self._open.pop()

    def handle_data(self, data):
        for name in filter(None, self._open):
            self.texts[name] = self.texts.get(name, "") + data


def browse(path, folder, fragment=""):
    """The document that a browser makes of a file, once its scripts have run."""
    address = path.as_uri() + (f"#{fragment}" if fragment else "")
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'browser'}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True).stdout


def random_profile(seed, batch_size=1, experts=True, states=False, frozen=False):
    """Lines that no model has: every branch of the arithmetic matters, equal names and equal peaks
    among them."""
    draw = random.Random(seed)

    def phases(chunked, accumulating, split):
        names = [
            "embedding",
            *(f"forward {i}" for i in (0, 7)),
            "head",
            "head",
            "head backward",
            *(f"backward {i}" for i in (7, 0)),
        ]
        born = sorted(draw.uniform(0, 16) * GIB for _ in names)
        return tuple(
            Phase(
                name,
                Law(
                    draw.uniform(0, 3) * GIB + (0 if accumulating else gradients),
                    draw.uniform(2e3, 4e5),
                    draw.uniform(1e3, 3e5) if chunked else 0.0,
                    draw.uniform(0, 5e7) if chunked and states else 0.0,
                    draw.uniform(0, 5e3) if split else 0.0,
                ),
                0.0 if accumulating else gradients,
            )
            for name, gradients in zip(names, born, strict=True)
        )

    def random_part(name, factor):
        """Every feature of every quantity, some of them taken away again, copies among the
        slowest."""
        sizes = (1e9, 3e10, -1e9, 1e8, 0.0, 1e4, 1e5, 1e6, 1e9, 1e5)
        shares = (1.0, 1.0, 2.5, 5e-3, 1e-9, 1e-4, 2e-4)
        laws = tuple(
            Law(*(draw.uniform(0.5, 1) * size * share * factor for size in sizes))
            for share in shares
        )
        floors = tuple(Law(*(value * draw.choice([0.2, 1.5]) for value in law)) for law in laws)
        return PhaseLaws(
            name, laws, draw.choice([2048, 16_384]), draw.choice([(), (), (), (), floors])
        )

    def method(recipe):
        chunked, config = recipe.config is not None, recipe.config
        saves, offload = (config.saves, config.offload) if config else ((), "none")
        host = (draw.uniform(0, GIB), draw.uniform(0, 3e5)) if offload == "cpu" else (0.0, 0.0)
        on_host = chunked and config.gpu_memory is not None
        # one of two profiles prefers keys on the host
        min_scale = 1e10 if on_host and not experts else 3e10
        work = tuple(
            random_part(name, min_scale / 3e10)
            for name in ("embedding", "forward", "head", "backward")
        )
        regimes = (phases(chunked, False, recipe.split), phases(chunked, True, recipe.split))
        on_host_too = draw.uniform(0, 5e7) if states and offload == "cpu" else 0.0
        heads = (Heads(48, 6, draw.randint(1000, 9000)), Heads(24, 12, draw.randint(1000, 9000)))
        links = [draw.uniform(0, 3e6) for _ in range(6)]
        split = SequenceSplit(recipe.split, heads, *links) if recipe.split else None
        return Method(
            recipe.name,
            saves,
            offload,
            on_host,
            chunked,
            *regimes,
            Law(*host, chunks=on_host_too),
            work,
            split,
        )

    recipes = [
        CHECKPOINTING_RECIPE,
        *(streamed_recipe(saves, to) for to in ("none", "cpu") for saves in ((), ("attn_out",))),
        STREAMED_RECIPES[-1],
        *(
            streamed_recipe(saves, "cpu", by)
            for by in (ULYSSES, CONTEXT_PARALLEL)
            for saves in ((), ("attn_out", "kv"))
        ),
    ]
    groups = [ParameterGroup("dense", 2_031_739_904, 4_063_479_809, 2_031_739_904, 4_063_479_808)]
    sizes = tuple(draw.randint(1, 4) * 10**9 for _ in range(8)) if frozen else ()
    trained = tuple(draw.randint(1, 4) * 10**8 for _ in range(8)) if states else ()
    groups += [ParameterGroup("dense", 2 * sum(sizes), sum(sizes), 0, 0)] if frozen else []
    groups += (
        [ParameterGroup("expert", 7_111_111_111, 14_222_222_222, 3_111_111_111, 6_222_222_223)]
        if experts
        else []
    )
    tree = Node("", "</script><b>Model", 1, 9_142_851_015, 8.5)
    return Profile(
        "Model", "bfloat16", 8, batch_size, tuple(groups), 1_234_567_891, tuple(method(r) for r in recipes), tree,
        frozen=sizes or (0,) * len(trained), trained=trained, decoded=draw.randint(1, 9) * 10**7 if frozen else 0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The shape of an 8B model, its config.json alone."""
    folder = tmp_path_factory.mktemp("model")
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    }
    Qwen3Config(vocab_size=151936, num_key_value_heads=8, head_dim=128, **shape).save_pretrained(
        folder
    )
    return folder / "config.json"


@pytest.fixture(scope="module")
def counted(config):
    """A few of an 8B model's methods, counted."""
    skeleton = Skeleton(str(config), torch.bfloat16, None, 16, "cuda")
    return survey(
        skeleton,
        (CHECKPOINTING_RECIPE, streamed_recipe(("attn_out",), "cpu")),
        accumulating=False,
        tree=False,
    )


SETTINGS = [
    Setting(),
    Setting(optimizer_on_host=True),
    Setting(accumulate=True, optimizer=4.0),
    Setting(gpus=8, zero=1),
    Setting(gpus=8, zero=2, gradient_bytes=4),
    Setting(gpus=6, zero=3, optimizer=8.0, accumulate=True),
    Setting(gpus=16, zero=3, expert_parallel=4, ulysses=2),
    Setting(gpus=3, zero=2, context_parallel=3, optimizer=0.0),
    Setting(gpus=24, zero=3, ulysses=24),
    Setting(gpus=80, zero=3, context_parallel=80, optimizer_on_host=True),
    Setting(gpus=16, expert_parallel=8, zero=1, gradient_bytes=4, accumulate=True),
    Setting(weights="device"),
    Setting(weights="cpu", optimizer=0.0),
    Setting(on_host=first_layers((4 * GIB, 2 * GIB, 3 * GIB), 2)),
]
MEMORIES = [
    Memory(80 * GIB),
    Memory(141 * GIB, 320 * GIB),
    Memory(180 * GIB, 30 * GIB, reserve=0.1),
    Memory(400 * GIB, 77_777_777_777),
]
LENGTH = 40_000  # of plans
LENGTHS = (1, 1000, 4096, 65_537, 262_144, 1_000_003)

COMPARED_FIELDS = ("seq_len", "choice", "safest", "binds", "levers", "longest", "times")
PROBE = """
<script>
"use strict";
const probe = JSON.parse(document.getElementById("probe").textContent);
const results = computed(probe);
document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "results" }));
document.getElementById("results").textContent = JSON.stringify(results);
</script>
"""
COMPUTE_SCRIPT = """
function computed(probe) {
const results = { peaks: [], plans: [] }, rates = data.devices[0];
for (const { profile } of data.profiles) {
  for (const setting of probe.settings) {
    for (const method of available(profile, setting)) {
      for (const length of probe.lengths) for (const chunk of [1, 3000, 8192]) {
        const { parts, ...at } = peak(profile, method, length, chunk, setting);
        const spent = seconds(method, length, chunk, rates, setting);
        const speed = throughput(spent, length, profile.batch_size, setting);
        results.peaks.push({ ...at, flops: flops(method, length, chunk, setting), spent, speed });
      }
    }
    for (const memory of probe.memories) for (const length of probe.plans) {
      const { best, setting: used, ...plan } = plan_profile(profile, length, memory, setting, rates);
      for (const one of [plan.choice, plan.safest]) if (one) delete one.peak.parts;
      plan.levers = plan.levers.map(({ change, seq_len }) => ({ change, seq_len }));
      results.plans.push(plan);
    }
  }
}
return results;
}
"""


def expected(profiles, memories, plans):
    """The same as PROBE finds, by Python."""
    results = {"peaks": [], "plans": []}
    for profile in profiles:
        for setting in SETTINGS:
            for method in available_methods(profile, setting):
                for length in LENGTHS:
                    for chunk in (1, 3000, 8192):
                        at = peak(profile, method, length, chunk, setting)
                        spent = seconds(method, length, chunk, RATES, setting)
                        speed = throughput(spent, length, profile.batch_size, setting)
                        flop_count = flops(method, length, chunk, setting)
                        costs = {
                            "flops": flop_count,
                            "spent": dataclasses.asdict(spent),
                            "speed": speed,
                        }
                        results["peaks"].append({**dataclasses.asdict(at), **costs})
            for memory in memories:
                for length in plans:
                    base_plan = plan_profile(profile, length, memory, setting)
                    plan = dataclasses.asdict(base_plan)
                    following = [dataclasses.asdict(timed) for timed in base_plan.next_fastest]
                    results["plans"].append(
                        {name: plan[name] for name in COMPARED_FIELDS} | {"next_fastest": following}
                    )
    return numbers(json.dumps(results))


def numbers(text):
    """JavaScript prints whole numbers without a point, and large ones with fewer digits than an int
    has."""
    return json.loads(text, parse_int=float)


def compare(folder):
    """Peaks and whole plans over a grid of settings, to the bit."""
    seed = seed_of(0)
    print(f"seed {seed}")
    profiles, plans = three_profiles(seed), (LENGTH, "max")
    memories = memories_of(profiles[2])
    other_profiles = {"other": profiles[1], "frozen": profiles[2]}
    text = page(plan_profile(profiles[0], 4096, MEMORIES[0], SETTINGS[0]), "grid", other_profiles)
    settings = {"settings": SETTINGS, "memories": memories}
    inputs = {
        name: [dataclasses.asdict(setting) for setting in values]
        for name, values in settings.items()
    }
    inputs |= {"lengths": LENGTHS, "plans": plans}
    data = f'<script type="application/json" id="probe">{json.dumps(inputs)}</script>'
    file = folder / "grid.html"
    probe = f"{data}<script>{COMPUTE_SCRIPT}</script>{PROBE}"
    file.write_text(text.replace("</body>", probe + "</body>"), "utf-8")
    assert_equal_results(
        numbers(Elements(browse(file, folder)).texts["results"]),
        expected(profiles, memories, plans),
    )


def three_profiles(seed):
    """With experts; of three rows, whose states are kept a chunk; and with frozen weights that may
    live on the host."""
    return [
        random_profile(seed), random_profile(seed + 1, batch_size=3, experts=False, states=True),
        random_profile(seed + 2, experts=False, frozen=True),
    ]  # fmt: skip


def memories_of(profile):
    """The list, and a device on which a step fits with some of its layers' weights on the host."""
    methods = [method for method in profile.methods if method.chunked and method.split is None]
    choices = options(profile, methods, LENGTH, Memory(2**50), Setting(weights="device"), RATES)
    return [*MEMORIES, Memory(int(min(choice.peak.total for choice in choices)) - 1, None, 0.0)]


def assert_equal_results(results, expected_results):
    """To the bit, and all branches were taken."""
    assert len(results["peaks"]) == len(expected_results["peaks"]) > 1000
    assert results["peaks"] == expected_results["peaks"]
    assert results["plans"] == expected_results["plans"]
    assert {plan["binds"] == "host memory" for plan in results["plans"]} == {True, False}
    assert {plan["choice"] is None for plan in results["plans"]} == {True, False}
    placements = [
        plan["choice"]["on_host"] for plan in results["plans"] if plan["choice"] is not None
    ]
    assert {on_host is None for on_host in placements} == {True, False}
    assert {on_host["layers"] < on_host["of"] for on_host in placements if on_host is not None} == {
        True,
        False,
    }


NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no Node.js was found to run plan.js with")


def compare_in_node():
    """`compare` without a page: plan.js alone."""
    seed = seed_of(0)
    print(f"seed {seed}")
    profiles, plans = three_profiles(seed), (LENGTH, "max")
    memories = memories_of(profiles[2])
    other_profiles = {"other": profiles[1], "frozen": profiles[2]}
    text = page(plan_profile(profiles[0], 4096, MEMORIES[0], SETTINGS[0]), "grid", other_profiles)
    block = re.search(r'(?s)<script type="application/json" id="data">(.*?)</script>', text)[1]
    settings = {"settings": SETTINGS, "memories": memories}
    inputs = {
        name: [dataclasses.asdict(setting) for setting in values]
        for name, values in settings.items()
    }
    inputs |= {"lengths": LENGTHS, "plans": plans}
    planner = [
        streambp.planner.page.part(file)
        for file in streambp.planner.page.FILES_BY_PLACEHOLDER["/*PLAN*/"]
    ]
    script = [*planner, f"const data = {block};", COMPUTE_SCRIPT]
    script += [f"console.log(JSON.stringify(computed({json.dumps(inputs)})));"]
    node = subprocess.run(
        [NODE], input="\n".join(script), capture_output=True, text=True, timeout=HANG, check=True
    )
    assert_equal_results(numbers(node.stdout), expected(profiles, memories, plans))


@pytest.mark.full
@needs_node
def test_every_number_is_pythons_in_node():
    compare_in_node()


@pytest.mark.full
@needs_node
@pytest.mark.parametrize(
    "name", ["no half of a chunk's blocks", "the slowest rate for all", "the first that fits"]
)
def test_changed_seconds_are_seen_in_node(name, monkeypatch):
    real, (right, wrong) = streambp.planner.page.part, SECONDS_MUTANTS[name]
    assert right in real("plan.js") + real("host_weights.js")
    monkeypatch.setattr(
        streambp.planner.page, "part", lambda file: real(file).replace(right, wrong)
    )
    with pytest.raises(AssertionError):
        compare_in_node()


SECONDS_MUTANTS = {
    "no half of a chunk's blocks": ("Math.ceil(start / k_block)", "Math.floor(start / k_block)"),
    "the slowest rate for all": (
        "part.backward / ranks / rates.backward",
        "part.backward / ranks / rates.forward",
    ),
    "the first that fits": ("one.seconds.total / fastest", "1"),
}


@pytest.mark.full
@needs_browser
def test_every_number_is_pythons(tmp_path):
    compare(tmp_path)


MUTANTS = {
    "all gradients on the device": ("phase.gradients - on_host.trained", "phase.gradients"),
    "experts shared like the rest": ("setting.gpus / expert", "setting.gpus"),
    "all of a gradient": ("present + share * gradients_here", "present + gradients_here"),
    "a name's last phase": ("if (!known || gradients + activations > known.sum)", "if (true)"),
    "another order of a sum": (
        "quantity(method.host, step, kept.host)",
        "kept.host + quantity(method.host, step)",
    ),
    "the smallest chunk": (": only === undefined ? chunk_sizes(profile.batch_size)", ": only === undefined ? [1024]"),
    "host memory for both": ("Math.floor(memory.host / 2)", "memory.host"),
    "nothing left for keys": ("usable(memory) - at.total", "at.total - usable(memory)"),
    "chunks for nothing": ("quantity(phase.law, step)", "quantity(phase.law.with(3, 0), step)"),
    "the smallest chunk for the longest": ("counts_chunks(method) ? sizes", "false ? sizes"),
    "one head at a time": ("return Math.max(whole, found);", "return whole;"),
    "sums that hide": ("return sums + gathers", "return gathers"),
    "a node of any size": ("Math.min(ranks, rates.node)", "ranks"),
    "no reserve": ("memory.gpu * (1 - memory.reserve)", "memory.gpu"),
    "weights that stay": ("weights -= freed(setting.on_host)", "weights -= 0"),
    "all layers where a few do": ("fewest(profile.frozen, lacking,", "fewest(profile.frozen, 1e15 + lacking,"),
    "copies for nothing": ("method.chunked ? setting.on_host : null);\n  for", "null);\n  for"),
}  # fmt: skip


@pytest.mark.full
@needs_browser
@pytest.mark.parametrize(
    "name",
    [
        name if name == "another order of a sum" else pytest.param(name, marks=pytest.mark.full)
        for name in MUTANTS
    ],
)
def test_changed_arithmetic_is_seen(name, tmp_path, monkeypatch):
    real, (right, wrong) = streambp.planner.page.part, MUTANTS[name]
    assert right in real("plan.js") + real("host_weights.js")
    monkeypatch.setattr(
        streambp.planner.page, "part", lambda file: real(file).replace(right, wrong)
    )
    with pytest.raises(AssertionError):
        compare(tmp_path)


CONTROLS = [
    ({"T": "131072", "gpu": "80", "on_host": "1"}, Memory(80 * GIB, 320 * GIB), Setting(optimizer_on_host=True)),
    ({"T": "1M", "gpu": "141.5", "host": "", "gpus": "8", "zero": "3", "optimizer": "4"},
     Memory(int(141.5 * GIB)), Setting(gpus=8, zero=3, optimizer=4.0)),
    ({"T": "8192", "gpu": "24", "host": "100", "gpus": "3", "zero": "2"},
     Memory(24 * GIB, 100 * GIB // 3), Setting(gpus=3, zero=2)),
]  # fmt: skip


@needs_browser
@pytest.mark.parametrize(
    "case", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, len(CONTROLS)))]
)
def test_the_controls_reach_what_the_page_shows(case, counted, tmp_path):
    """The address sets the controls; an 8B model's figures as they stand in the document."""
    controls, memory, setting = CONTROLS[case]
    file = tmp_path / "page.html"
    file.write_text(
        page(plan_profile(counted, 65_536, Memory(80 * GIB, 320 * GIB), Setting()), "an 8B model"),
        "utf-8",
    )
    elements = Elements(browse(file, tmp_path, urllib.parse.urlencode(controls)))
    length = {"1M": 2**20}.get(controls["T"]) or int(controls["T"])
    plan = plan_profile(counted, length, memory, setting)
    assert elements.figures["binds"] == plan.binds
    for row in plan.longest:
        method = counted.method(row.method)
        time = next(timed for timed in plan.times if timed.method == row.method)
        at = peak(counted, method, length, time.chunk_size, setting)
        figures = {
            "longest": row.seq_len,
            "peak": time.peak,
            "host": at.host,
            "seconds": time.seconds,
        }
        figures |= {"tokens_per_second": time.tokens_per_second}
        assert {
            name: float(elements.figures[f"{name} {row.method}"]) for name in figures
        } == figures
    fits = plan.choice is not None
    title = elements.texts["verdict-title"]
    assert (
        title.startswith(f"{length:,} tokens fit: ")
        if fits
        else title == f"{length:,} tokens do not fit"
    )
    at = plan.choice.peak if fits else peak(counted, counted.methods[-1], length, 1024, setting)
    printed = {
        name: float(elements.figures[name])
        for name in ("peak", "host", "weights", "gradients", "activations")
    }
    values = dataclasses.asdict(at)
    assert printed == {
        "peak": at.total,
        **{name: values[name] for name in printed if name != "peak"},
    }
    assert {name: float(elements.figures[f"phase {name}"]) for name in at.phases} == dict(at.phases)
    assert {lever.change: str(lever.seq_len) for lever in plan.levers} == {
        key.removeprefix("lever "): value
        for key, value in elements.figures.items()
        if key.startswith("lever ")
    }
    code = elements.texts.get("code", "")
    assert ("StreamConfig(chunk_size=" in code) == fits
    if fits:  # in Python, as a person would paste it
        printed_config, choice = (
            eval(code.partition("(model, ")[2].removesuffix(")"), {"streambp": streambp}),
            plan.choice,
        )
        assert (printed_config.chunk_size, printed_config.saves, printed_config.offload) == (
            choice.chunk_size,
            choice.saves,
            choice.offload,
        )


@needs_browser
@pytest.mark.full
def test_ranks_and_fused_layers_are_controls(tmp_path):
    """Both splits of a sequence, heads that ranks cannot share, and the switch to layers that are
    not fused."""
    profile, unfused = random_profile(1), random_profile(2)
    memory, file = Memory(400 * GIB), tmp_path / "page.html"
    text = page(
        plan_profile(profile, 98_304, memory, Setting()),
        "name",
        unfused={"every parameter": unfused},
    )
    file.write_text(text, "utf-8")
    for fields, fused in (({"ulysses": 6}, 1), ({"context_parallel": 16}, 0), ({}, 0)):
        setting = Setting(gpus=48, zero=3, **fields)
        controls = {"gpus": 48, "zero": 3, "fused": fused, **fields}
        elements = Elements(browse(file, tmp_path, urllib.parse.urlencode(controls)))
        plan = plan_profile(profile if fused else unfused, 98_304, memory, setting)
        assert plan.choice is not None
        assert float(elements.figures["peak"]) == plan.choice.peak.total
        assert float(elements.figures["seconds"]) == plan.choice.seconds.total
        assert float(elements.figures.get("link", 0)) == plan.choice.link
        assert bool(fields) == ("ranks." in elements.texts["verdict-detail"])
        assert {f"longest {row.method}": str(row.seq_len) for row in plan.longest} == {
            key: value for key, value in elements.figures.items() if key.startswith("longest ")
        }
    for fields, words in (
        (
            {"ulysses": 5, "gpus": 5},
            "48 attention heads cannot be split over 5 ranks. Choose an sp_size",
        ),
        ({"ulysses": 2, "gpus": 3}, "a multiple of the 2 ranks"),
        ({"ulysses": 2, "context_parallel": 2, "gpus": 4}, "one of them at a time"),
    ):
        assert (
            words
            in Elements(browse(file, tmp_path, urllib.parse.urlencode(fields))).texts["problem"]
        )


@needs_browser
@pytest.mark.full
def test_weights_on_the_host_are_a_control(tmp_path):
    """Where a step does not fit otherwise; the verdict says how many layers, and the code has the
    field."""
    profile, file = random_profile(2, experts=False, frozen=True), tmp_path / "page.html"
    memory = memories_of(profile)[-1]
    file.write_text(page(plan_profile(profile, LENGTH, memory, Setting()), "name"), "utf-8")
    for weights in ("auto", "cpu", "device"):
        elements = Elements(browse(file, tmp_path, urllib.parse.urlencode({"weights": weights})))
        choice = plan_profile(profile, LENGTH, memory, Setting(weights=weights)).choice
        assert (choice is None) == (weights == "device")
        if choice is not None:
            figures = {
                "peak": choice.peak.total,
                "host": choice.peak.host,
                "seconds": choice.seconds.total,
            }
            assert {name: float(elements.figures[name]) for name in figures} == figures
            message = (
                f"weights of {choice.on_host.layers} of {choice.on_host.of} layers on the host"
            )
            assert message in elements.texts["verdict-detail"]
            assert f'weights="{choice.config.weights}"' in elements.texts["code"]


USE = """
<script>
"use strict";
const steps = [], fire = (name, value) => {
  form[name].value = value;
  form[name].dispatchEvent(new Event("input", { bubbles: true }));
};
const note = () => steps.push({
  title: by_id("verdict-title").textContent, T: form.T.value, slider: Number(by_id("T-slider").value),
  longest: Number(document.querySelector('[data-key="longest"]').value), code: by_id("code").textContent,
  lines: svg.querySelectorAll("polyline").length, stale: document.body.className,
});
(async () => {
  const nameless = [...document.querySelectorAll("input, select, button, summary")].filter((control) =>
    !(control.labels && control.labels.length) && !control.getAttribute("aria-label") && !control.textContent.trim());
  note();
  by_id("T-slider").value = 15;
  by_id("T-slider").dispatchEvent(new Event("input", { bubbles: true }));
  note();
  by_id("longest").click();
  note();
  const lever = shown.plan.levers[0];
  by_id("levers").querySelector("button").click();
  note();
  fire("T", "2M");
  note();
  fire("T", "nonsense");
  note();
  by_id("reset").click();
  await new Promise((done) => setTimeout(done, 20));
  note();
  location.hash = "#optimizer=99&saves=wrong&training=7&zero=9&nobody=1";
  await new Promise((done) => setTimeout(done, 50));
  note();
  fire("offload", "cpu");
  note();
  const at = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + at.width / 2, clientY: at.top + 90 }));
  const tip = by_id("tip").textContent;
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "results" }));
  document.getElementById("results").textContent = JSON.stringify({
    steps, tip, reach: lever.seq_len, nameless: nameless.length, hash: location.hash,
  });
})();
</script>
"""


@pytest.mark.full
@needs_browser
def test_controls_work_together(counted, tmp_path):
    """Slider, Longest, a lever's Apply, text with a unit, nonsense, Reset, a choice of offload, and
    the chart's tooltip."""
    memory = Memory(80 * GIB, 320 * GIB)
    begin = plan_profile(counted, 65_536, memory, Setting(optimizer_on_host=True))
    file = tmp_path / "use.html"
    profile = dataclasses.replace(
        counted, methods=(*counted.methods, no_offload(counted.methods[-1]))
    )
    file.write_text(
        page(plan_profile(profile, 65_536, memory, begin.setting), "8B").replace(
            "</body>", USE + "</body>"
        )
    )
    results = json.loads(Elements(browse(file, tmp_path)).texts["results"])
    start, slid, farthest, levered, typed, nonsense, reset, strange, choice = results["steps"]
    assert start["title"].startswith("65,536 tokens fit: ")
    assert slid["T"] == "32,768"
    assert slid["title"].startswith("32,768 tokens fit: ")
    assert farthest["T"] == f"{start['longest']:,}"
    assert " tokens fit: " in farthest["title"]
    assert levered["longest"] == results["reach"] > start["longest"]
    assert (typed["title"].split()[0], typed["slider"]) == ("2,097,152", 21)
    assert nonsense["stale"] == "stale"
    assert nonsense["title"] == typed["title"]
    assert reset == start
    assert strange == start
    assert "offload" not in start["code"]
    assert 'offload="cpu"' in choice["code"]
    assert start["lines"] == 2 * len(profile.methods)  # what fits, and what does not
    assert all(method.name in results["tip"] for method in profile.methods)
    assert results["nameless"] == 0
    assert "offload=cpu" in results["hash"]


def no_offload(method):
    """As if its layer inputs stayed on the device."""
    laws = [phase.law._replace(tokens=phase.law.tokens + 3e5) for phase in method.first]
    first = tuple(
        dataclasses.replace(phase, law=law) for phase, law in zip(method.first, laws, strict=True)
    )
    host = method.host._replace(tokens=0.0)
    return dataclasses.replace(method, name="streambp", offload="none", first=first, host=host)


def test_the_page_stands_alone():
    """No address, no import, no request; and the policy that a browser enforces allows inline code
    and nothing else."""
    profile = random_profile(0)
    text = page(plan_profile(profile, 4096, MEMORIES[0], Setting()), "name")
    assert not re.search(
        r"https?:|//[a-z]+\.|@import|url\(|\bimport\b|\bfetch\b|XMLHttpRequest|WebSocket|\beval\b",
        text,
    )
    tags = Elements(text).tags
    assert not [
        (tag, values)
        for tag, values in tags
        if {"src", "href", "srcset", "action", "data"} & set(values)
    ]
    assert {tag for tag, _ in tags}.isdisjoint({"link", "iframe", "object", "embed", "img", "base"})
    policies = [
        values["content"]
        for tag, values in tags
        if values.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"]


def test_the_page_is_valid_and_small():
    """Elements close in order, ids are unique, labels and descriptions name elements that exist,
    names cannot break out."""
    profile = random_profile(1)
    unsplit = tuple(method for method in profile.methods if method.split is None)
    profile = dataclasses.replace(profile, methods=unsplit, left_out=("plain: no", "and why"))
    text = page(plan_profile(profile, 4096, MEMORIES[0], Setting()), '</script><script>"&')
    assert "/*" not in re.sub(r"(?s)/\*\*? .*?\*/", "", text)  # no place was left unfilled
    stack, ids, references = [], [], []
    void = {"meta", "input", "br", "wbr"}

    class Strict(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            values = dict(attributes)
            ids.extend([values["id"]] if "id" in values else [])
            for name in ("for", "aria-labelledby", "aria-describedby"):
                references.extend(values.get(name, "").split())
            if tag not in void:
                stack.append(tag)

        def handle_endtag(self, tag):
            assert stack.pop() == tag

    Strict().feed(text)
    assert not stack
    assert len(ids) == len(set(ids))
    assert set(references) <= set(ids)
    assert len(text) < 150_000  # laws without a zero, which no model has
    block = re.search(r'(?s)<script type="application/json" id="data">(.*?)</script>', text)[1]
    data = json.loads(block)
    assert data["name"] == '</script><script>"&'
    assert data["profiles"][0]["profile"] == json.loads(json.dumps(dataclasses.asdict(profile)))


@pytest.mark.full
def test_the_command_writes_it(config, tmp_path):
    """With --lora both ways of training are there."""
    file = tmp_path / "plan.html"
    command = [
        "plan",
        str(config),
        "--gpu-memory",
        "80GiB",
        "--seq-len",
        "64k",
        "--lora",
        "16",
        "--html",
        str(file),
    ]
    assert main(command) == 0
    block = re.search(r'(?s)id="data">(.*?)</script>', file.read_text("utf-8"))[1]
    data = json.loads(block)
    assert data["name"] == config.parent.name
    assert [entry["training"] for entry in data["profiles"]] == [
        "LoRA of rank 16",
        "full training",
        "LoRA of rank 16 on 4-bit weights",
    ]
    trained = [
        sum(group["trainable"] for group in entry["profile"]["groups"])
        for entry in data["profiles"]
    ]
    assert trained[0] < trained[1] / 100
    assert os.path.getsize(file) < 2**18  # bytes: it is sent by mail


def test_a_page_that_cannot_be_written_is_said_before_counting(config, tmp_path, capsys):
    command = ["plan", str(config), "--gpu-memory", "80GiB", "--html"]
    for file in (tmp_path / "nowhere" / "plan.html", tmp_path):
        assert main([*command, str(file)]) == 2
        assert f"--html {file} cannot be written" in capsys.readouterr().err
