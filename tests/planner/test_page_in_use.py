"""The page as a person uses it: pointer, keyboard, a narrow window; Python's numbers, and nothing
on the console.

covers: planner/page.py, planner/plan.py
"""

from __future__ import annotations

import pytest

import streambp.planner.page
from streambp.planner.launch_commands import (
    config_code,
    format_bytes,
    launcher_settings,
    python_literal,
)
from streambp.planner.page import page
from streambp.planner.plan import Memory, choose, fits, options, plan_profile
from streambp.planner.profile import Setting, available_methods
from streambp.rates import DEFAULT_DEVICE, DEVICES
from tests.planner.browser import BROWSER, DRIVER, opened
from tests.planner.test_page import random_profile
from tests.seeds import seed_of

GIB = 2**30
RATES = DEVICES[DEFAULT_DEVICE]
LENGTH, MEMORY, SETTING = 65_536, Memory(300 * GIB, 200 * GIB), Setting(optimizer_on_host=True)
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no Chromium with chromedriver was found to use the page with"
)

DOTS = """
return [...document.querySelectorAll("#frontier-svg .setting")].map((dot) => ({
  method: dot.dataset.method, bytes: Number(dot.dataset.bytes), seconds: Number(dot.dataset.seconds),
  chunk: Number(dot.dataset.chunk), inside: !dot.classList.contains("outside"), best: dot.dataset.best === "true",
}));
"""
FIGURES = """
const found = [...document.querySelectorAll("data[data-key]")];
return Object.fromEntries(found.map((one) => [one.dataset.key, Number(one.value)]));
"""
LAYOUT_SCRIPT = """
const wide = document.documentElement.clientWidth;
const seen = (one) => one.checkVisibility() && !one.closest(".hidden, thead, svg svg");
const boxes = [...document.querySelectorAll("main *")].filter(seen).map((one) => [one, one.getBoundingClientRect()]);
const beside = ([, box]) => box.width && (box.right > wide + 1 || box.left < -1);
return {
  scroll: document.documentElement.scrollWidth - wide,
  outside: boxes.filter(beside).map(([one]) => one.outerHTML.slice(0, 90)),
  lines: ["curve-svg", "times-svg"].map((id) => document.querySelectorAll(`#${id} polyline`).length),
  steps: document.querySelector("#frontier-svg .steps").points.length,
  wrong: [...document.querySelectorAll("svg *")].filter((one) => /NaN|Infinity|undefined/.test(one.outerHTML)).length,
};
"""


@pytest.fixture(scope="module")
def plan():
    seed = seed_of(0)
    print(f"seed {seed}")
    return plan_profile(random_profile(seed), LENGTH, MEMORY, SETTING)


@pytest.fixture
def address(plan, tmp_path):
    return written_to(tmp_path, plan)


def written_to(folder, plan):
    file = folder / "plan.html"
    file.write_text(page(plan, "a model"), "utf-8")
    return file.as_uri()


def all_options(plan):
    return list(
        options(
            plan.profile, available_methods(plan.profile, SETTING), LENGTH, MEMORY, SETTING, RATES
        )
    )


def check_what_it_shows(browser, plan):
    """The frontier's dots, the three charts, the next two, and a window without anything beside
    it."""
    candidates = [
        option for option in all_options(plan) if option.peak.total <= 1.5 * MEMORY.usable
    ]
    dots = {
        (dot["method"], dot["chunk"]): (dot["bytes"], dot["seconds"], dot["inside"])
        for dot in browser.run(DOTS)
    }
    assert dots == {
        (option.method, option.chunk_size): (
            option.peak.total,
            option.seconds.total,
            fits(option.peak, MEMORY),
        )
        for option in candidates
    }
    best = {(dot["method"], dot["chunk"]) for dot in browser.run(DOTS) if dot["best"]}
    assert best == {
        (option.method, option.chunk_size)
        for option in candidates
        if all(
            (peer.peak.total, peer.seconds.total) >= (option.peak.total, option.seconds.total)
            or peer.seconds.total > option.seconds.total
            for peer in candidates
        )
    }
    figures = browser.run(FIGURES)
    assert figures["seconds"] == plan.choice.seconds.total
    assert [figures[f"next {rank}"] for rank in (0, 1)] == [
        option.seconds for option in plan.next_fastest
    ]
    for option in plan.times:
        assert figures[f"seconds {option.method}"] == option.seconds
        assert figures[f"tokens_per_second {option.method}"] == option.tokens_per_second
        assert figures[f"peak {option.method}"] == option.peak
    layout = browser.run(LAYOUT_SCRIPT)
    assert min(layout["lines"]) >= len(plan.profile.methods)
    assert layout["steps"] >= 2 * len(best) - 1
    assert (layout["scroll"], layout["outside"], layout["wrong"]) == (0, [], 0)
    assert browser.console() == []


def check_width(address, plan, width=400):
    with opened(address, width) as browser:
        check_what_it_shows(browser, plan)


@pytest.mark.parametrize("width", [1280, 400])
def test_every_width_shows_pythons_numbers_and_all_charts(width, address, plan):
    check_width(address, plan, width)


def check_keyboard(address, plan):
    """Tab reaches every control and the frontier once; there arrows go from dot to dot and Enter
    chooses."""
    with opened(address, 400) as browser:
        reached = []
        for _ in range(60):
            browser.press("Tab")
            reached.append(
                browser.run(
                    "const at = document.activeElement; return at.id || at.getAttribute('class') "
                    "|| at.name;"
                )
            )
            if "setting" in reached[-1]:
                break
        assert {"T", "longest", "T-slider", "gpu", "host", "gpus", "device", "optimizer", "on_host", "saves", "offload",
                "chunk", "reset", "copy"} <= set(reached)  # fmt: skip
        browser.press("Home")
        focus_index = "return Number(document.activeElement.dataset.place);"
        assert browser.run(focus_index) == 0
        browser.press("Right", "Right", "Left")
        assert browser.run(focus_index) == 1
        number = next(
            number
            for number, dot in enumerate(browser.run(SORTED_DOTS_SCRIPT))
            if number > 1 and dot["inside"] and dot["chunk"] < 8192
        )
        browser.press(*["Right"] * (number - 1))
        # it says what the dot is
        assert browser.run("return document.getElementById('tip').hidden;") is False
        selected_dot = browser.run(SORTED_DOTS_SCRIPT)[number]
        browser.press("Enter")
        check_chosen(browser, selected_dot, plan)
        assert browser.run(focus_index) == number  # the focus stays
        assert browser.console() == []


SORTED_DOTS_SCRIPT = DOTS.replace(
    '.setting")].map', '.setting")].sort((a, b) => a.dataset.place - b.dataset.place).map'
)


def check_chosen(browser, dot, plan):
    """The page now is about that setting, as Python has it."""
    option = next(
        option
        for option in all_options(plan)
        if (option.method, option.chunk_size) == (dot["method"], dot["chunk"])
    )
    code = browser.run("return document.getElementById('code').textContent;")
    assert f"chunk_size={option.chunk_size}" in code
    assert ("saves=()" in code) == (not option.saves)
    assert all(f'"{name}"' in code for name in option.saves)
    assert ("offload=" in code) == (option.offload != "none")
    assert (
        f"gpu_memory={python_literal(format_bytes(option.gpu_memory))}"
        if option.gpu_memory
        else ")"
    ) in code
    figures = browser.run(FIGURES)
    assert (figures["seconds"], figures["peak"], figures["host"]) == (
        option.seconds.total,
        option.peak.total,
        option.peak.host,
    )
    title = browser.run("return document.getElementById('verdict-title').textContent;")
    assert title.startswith(f"{LENGTH:,} tokens fit: ")


@pytest.mark.full
def test_the_keyboard_is_enough(address, plan):
    check_keyboard(address, plan)


def check_pointer(address, plan):
    """A click on a dot chooses it, on a chart sets T, on the next in speed applies it."""
    with opened(address) as browser:
        target = next(
            option
            for option in all_options(plan)
            if option.saves and fits(option.peak, MEMORY) and option.chunk_size == 2048
        )
        browser.run(BRING_TO_FRONT_SCRIPT, target.method, target.chunk_size)
        browser.click("#wanted circle")
        check_chosen(browser, {"method": target.method, "chunk": 2048}, plan)
        browser.click("#reset")
        browser.run("return new Promise((done) => setTimeout(done, 30));")
        following = plan.next_fastest[0]
        browser.click("#next-fastest button")
        check_chosen(browser, {"method": following.method, "chunk": following.chunk_size}, plan)
        length_before = browser.run("return form.T.value;")
        browser.click("#times-svg")
        length_after = browser.run("return form.T.value;")
        assert length_after != length_before
        assert (
            browser.run(FIGURES)["seconds"]
            == choose(
                plan.profile,
                [plan.profile.method(following.method)],
                int(length_after.replace(",", "")),
                MEMORY,
                SETTING,
                RATES,
            ).seconds.total
        )
        assert browser.console() == []


# Dots may lie upon each other; the last one drawn is the one that a pointer meets.
BRING_TO_FRONT_SCRIPT = """
const [method, chunk] = arguments;
const dot = [...document.querySelectorAll("#frontier-svg .setting")].find((one) =>
  one.dataset.method === method && one.dataset.chunk === String(chunk));
dot.id = "wanted";
dot.parentElement.append(dot);
"""


def test_the_pointer_chooses(address, plan):
    check_pointer(address, plan)


DOOR_SCRIPT = """
const door = document.getElementById("door");
door.value = arguments[0];
door.dispatchEvent(new Event("change"));
return document.getElementById("code").textContent;
"""
TYPING_SCRIPT = """
form.gpu.value = arguments[0];
form.gpu.dispatchEvent(new Event("input", { bubbles: true }));
return form.device.value;
"""


@pytest.mark.full
def test_every_door_and_the_device_of_a_memory(address, plan):
    with opened(address) as browser:
        assert (
            browser.run(DOOR_SCRIPT, "Python")
            == f"streambp.patch(model, {config_code(plan.choice)})"
        )
        for door, text in launcher_settings(plan.choice, plan.setting).items():
            assert browser.run(DOOR_SCRIPT, door) == text
        for memory, device in (
            (24, "RTX4090"),
            (80, "H100"),
            (79.5, "H100"),
            (60, "H100"),
            (141, "H200"),
        ):
            assert browser.run(TYPING_SCRIPT, memory) == device
        assert browser.console() == []


MUTANTS = {
    "Enter does nothing": ('event.key === "Enter"', "false", check_keyboard),
    "a click does nothing": (
        "if (method.chunked) return apply_setting(method.name, chunk_size);",
        "",
        check_pointer,
    ),
    "every dot is best": ("one.seconds.total < fastest", "true", check_width),
    "an error on the console": (
        "function draw_charts() {",
        "function draw_charts() { console.error('x');",
        check_width,
    ),
    "a wide element": (
        "#frontier-svg { cursor: default; }",
        "#frontier { width: 700px; }",
        check_width,
    ),
    "the slowest next": ("one.seconds - other.seconds", "other.seconds - one.seconds", check_width),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_worse_page_is_seen(name, plan, tmp_path, monkeypatch):
    real, (right, wrong, check) = streambp.planner.page.part, MUTANTS[name]
    monkeypatch.setattr(
        streambp.planner.page, "part", lambda file: real(file).replace(right, wrong)
    )
    address = written_to(tmp_path, plan)
    assert any(
        right in real(file)
        for files in streambp.planner.page.FILES_BY_PLACEHOLDER.values()
        for file in files
    )
    with pytest.raises((AssertionError, StopIteration, KeyError)):
        check(address, plan)
