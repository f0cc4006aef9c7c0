"""Plans fit, their limits are limits, and what they recommend works: chunk sizes, levers, errors,
the command line.

covers: layer/oom.py, planner/__init__.py, planner/auto.py, planner/plan.py, planner/profile.py,
  planner/report.py, planner/survey.py, planner/launch_commands.py
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import pickle
import shlex
import sys

import pytest
import torch

import streambp
from streambp import cli
from streambp.cli import commands, runs
from streambp.fields import parse_bytes, parse_tokens
from streambp.integrations.trl.settings import StreamArguments
from streambp.launch.settings import settings_from_flags
from streambp.offload import free_memory
from streambp.offload.costs import StepFigures
from streambp.offload.policy import SavesPolicy
from streambp.planner import Memory, Setting, auto, peak, plan, profile_cache
from streambp.planner.launch_commands import config_code, fields_of, format_bytes, launcher_settings
from streambp.planner.laws import Law
from streambp.planner.plan import Choice, choose, fits, longest_sequence, plan_profile
from streambp.planner.profile import Method, Phase, from_json
from streambp.planner.report import duration, plan_table, tree_lines
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import streamed_recipe
from streambp.planner.tree import module_tree
from tests import zoo
from tests.families import build, make_batch
from tests.planner.laws import made_work
from tests.planner.test_estimates import SMALL_CONFIG, made_up
from tests.planner.test_page import random_profile

GIB = 2**30
# the package's attribute of that name is the function
planning = sys.modules["streambp.planner.plan"]


def two_methods():
    """Streaming on the device and from the host: 20 and 5 bytes a token there, 30 on the host."""
    born, work = Phase("backward 0", Law(1000, 0, 5), 1000), made_work(3, 0.5)
    resident = Method(
        "streambp",
        (),
        "none",
        False,
        True,
        (Phase("forward 0", Law(0, 20, 1)), born),
        (),
        Law(),
        work,
    )
    host, forward = Law(0, 30), Phase("forward 0", Law(0, 5, 1))
    offloaded = Method("streambp offload", (), "cpu", False, True, (forward, born), (), host, work)
    plain = Method(
        "plain",
        (),
        "none",
        False,
        False,
        (Phase("head", Law(0, 100)),),
        (),
        Law(),
        made_work(2, 0.5),
    )
    return made_up(methods=(plain, resident, offloaded))


def check_longest():
    profile, setting = two_methods(), Setting(optimizer=0)
    memory = Memory(1000 + 20 * 5000 + 1024, 10**9, reserve=0)
    for method in profile.methods:
        row = longest_sequence(profile, method, memory, setting)
        assert fits(peak(profile, method, row.seq_len, 1024, setting), memory)
        assert not fits(peak(profile, method, row.seq_len + 1, 1024, setting), memory)
    assert longest_sequence(profile, profile.method("streambp"), memory, setting).seq_len == 5000
    host_bound = longest_sequence(
        profile,
        profile.method("streambp offload"),
        dataclasses.replace(memory, host=30 * 700),
        setting,
    )
    assert (host_bound.seq_len, host_bound.binds) == (700, "host memory")


def check_longest_with_states():
    """100 bytes a chunk and 1 a token of it: with 8,192 in a chunk almost twice as many fit as with
    1,024."""
    states = Phase("backward 0", Law(0, 0.1, 1, 1000))
    profile = made_up(
        methods=(
            Method("streambp", (), "none", False, True, (states,), (), Law(), made_work(3, 0.5)),
        )
    )
    setting, memory = Setting(optimizer=0), Memory(1000 + 100_000, None, reserve=0)
    method = profile.methods[0]
    row = longest_sequence(profile, method, memory, setting)
    assert fits(peak(profile, method, row.seq_len, 8192, setting), memory)
    assert not fits(peak(profile, method, row.seq_len + 1, 8192, setting), memory)
    assert not fits(peak(profile, method, row.seq_len, 1024, setting), memory)
    assert choose(profile, profile.methods, row.seq_len, memory, setting).chunk_size == 8192


def test_the_longest_sequence_is_the_longest():
    check_longest()


def test_with_states_larger_chunks_may_reach_further():
    check_longest_with_states()


def test_a_plan_prefers_what_moves_least_and_the_largest_chunk():
    profile, setting = two_methods(), Setting(optimizer=0)
    chunked = [method for method in profile.methods if method.chunked]
    memory = Memory(1000 + 20 * 5000 + 4096, 10**9, reserve=0)
    choice = choose(profile, chunked, 5000, memory, setting)
    assert (choice.method, choice.chunk_size, choice.config) == (
        "streambp", 4096, streambp.StreamConfig(chunk_size=4096, saves=(), offload="none"),
    )  # fmt: skip
    longer = choose(profile, chunked, 12000, memory, setting)
    assert (longer.method, longer.config.offload) == ("streambp offload", "cpu")
    assert choose(profile, chunked, 10**7, memory, setting) is None
    streamed_keys = dataclasses.replace(chunked[1], prefix_on_host=True)
    large_chunks = choose(profile, [streamed_keys], 12000, memory, setting)
    assert large_chunks.config.gpu_memory == memory.usable - large_chunks.peak.total


def test_levers_reach_what_they_promise():
    profile = two_methods()
    setting, memory = Setting(optimizer=12, gpus=2), Memory(20_000, 100_000, reserve=0)
    base_plan = plan_profile(profile, "max", memory, setting)
    best = max(row.seq_len for row in base_plan.longest if row.method != "plain")
    assert base_plan.seq_len == best
    levers = {lever.change: lever.seq_len for lever in base_plan.levers}
    assert all(length > best for length in levers.values())
    on_host = plan_profile(
        profile, "max", memory, dataclasses.replace(setting, optimizer_on_host=True)
    )
    assert levers["optimizer state on the host"] == on_host.seq_len
    sharded = plan_profile(profile, "max", memory, dataclasses.replace(setting, zero=3))
    assert levers["ZeRO-3 over the 2 GPUs"] == sharded.seq_len


@pytest.mark.full
def test_a_plan_of_a_model(monkeypatch):
    monkeypatch.setattr(
        planning, "STREAMED_RECIPES", (streamed_recipe(), streamed_recipe((), "cpu"))
    )
    small_plan = plan(
        SMALL_CONFIG, gpu_memory="2GiB", host_memory="1GiB", setting=Setting(optimizer=4)
    )
    rows = {row.method: row.seq_len for row in small_plan.longest}
    assert (
        rows["streambp offload"]
        > rows["streambp"]
        > rows["checkpointing, fused head"]
        > rows["plain"]
        > 0
    )
    assert small_plan.choice.peak.total <= small_plan.memory.usable
    assert small_plan.choice.peak.host <= GIB
    assert small_plan.choice.config.chunk_size == small_plan.choice.chunk_size
    table = plan_table(small_plan)
    # without it, what fits is saved
    assert f"StreamConfig(chunk_size={small_plan.choice.chunk_size}, saves=()" in table
    assert str(small_plan.choice.config.offload) in table
    assert "3 x Qwen3DecoderLayer" in table
    assert all(row.method in table and f"{row.seq_len:,}" in table for row in small_plan.longest)
    assert " a step, " in table
    assert "tokens/s, on H200: matrix products " in table
    times = {timed.method: timed for timed in small_plan.times}
    assert times[small_plan.choice.method].seconds == small_plan.choice.seconds.total
    assert {name: timed.fits for name, timed in times.items()} == {
        name: length >= small_plan.seq_len for name, length in rows.items()
    }
    assert all(
        f"{timed.tokens_per_second:,.0f}" in table for timed in small_plan.times if timed.fits
    )


@pytest.mark.parametrize("width", [60, 80, 100, None])
def test_a_plan_fits_the_terminal(width):
    """But for what is copied: settings, and the page's own words keep their names."""
    random_plan = plan_profile(random_profile(1), 65_536, Memory(300 * GIB, 200 * GIB), Setting())
    lines = plan_table(random_plan, modules=False, width=width).splitlines()
    copied = lines.index("The same settings elsewhere:")  # its four lines are to copy
    prose = [line for line in lines[:copied] + lines[copied + 5 :] if "StreamConfig(" not in line]
    assert (max(map(len, prose)) > 100) if width is None else (max(map(len, prose)) <= width)
    assert any(line.startswith("backward of layer 7 ") for line in lines)
    assert ("stopped by" in "".join(lines)) == (width is None)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (8 * GIB, "8GiB"),
        (12_345_678_901, "11.4GiB"),
        (GIB - 1, "1023MiB"),
        (2**20 - 1, 1048575),
        (1, 1),
    ],
)
def test_memory_is_written_as_a_person_does(size, text):
    """And is never more than there is."""
    assert format_bytes(size) == text
    assert 0.9 * size < parse_bytes("gpu_memory", text) <= size


def slower_and_smaller():
    """Four methods, in per cent of the first: 0, 1.5, 3 and 10 slower, with 100, 75, 50 and 25 of
    its bytes a token."""
    methods = [
        Method(
            name,
            (),
            "none",
            False,
            True,
            (Phase("forward 0", Law(0, 10 * size)),),
            (),
            Law(),
            made_work(1e9 * spent, 0.0),
        )
        for name, size, spent in (
            ("fastest", 4, 1),
            ("nearly", 3, 1.015),
            ("slower", 2, 1.03),
            ("slowest", 1, 1.1),
        )
    ]
    return made_up(methods=tuple(methods))


def check_safest(usable=4 * 10 * 5000):
    """What a plan calls the safest, at 5,000 tokens; `usable`: bytes beside the weights."""
    memory = Memory(1000 + usable, None, reserve=0)
    base_plan = plan_profile(slower_and_smaller(), 5000, memory, Setting(optimizer=0))
    times = {timed.method: timed.seconds for timed in base_plan.times}
    assert times["nearly"] < 1.02 * times["fastest"] < times["slower"]
    return base_plan


def test_the_safest_is_at_most_two_per_cent_slower_and_takes_the_least():
    base_plan = check_safest()
    assert (base_plan.choice.method, base_plan.safest.method) == ("fastest", "nearly")
    text = f"safest, 0.0 GiB in {duration(base_plan.safest.seconds.total)}: streambp.StreamConfig("
    assert text in plan_table(base_plan, modules=False)
    assert "safest" not in plan_table(
        dataclasses.replace(base_plan, safest=base_plan.choice), modules=False
    )
    tight = check_safest(2 * 10 * 5000)  # the bar goes by the fastest of those that fit
    assert (tight.choice.method, tight.safest.method) == ("slower", "slower")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.000123, "0.123 ms"),
        (0.0456, "45.6 ms"),
        (0.456, "0.46 s"),
        (12.34, "12.3 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_durations(seconds, text):
    """A small model's step of a few milliseconds is no "0.00 s"."""
    assert duration(seconds) == text


@pytest.mark.parametrize("bar", [0.0, 0.031, math.inf])
def test_another_bar_for_the_safest_is_seen(bar, monkeypatch):
    monkeypatch.setattr(planning, "ALLOWED_SLOWDOWN", bar)
    with pytest.raises(AssertionError):
        test_the_safest_is_at_most_two_per_cent_slower_and_takes_the_least()


def test_a_safest_that_takes_more_is_seen(monkeypatch):
    monkeypatch.setattr(planning, "_safest", planning._fastest)
    with pytest.raises(AssertionError):
        test_the_safest_is_at_most_two_per_cent_slower_and_takes_the_least()


@pytest.mark.parametrize(
    "fields",
    [
        {"saves": (), "offload": "none", "gpu_memory": None},
        {"saves": ("attn_out", "kv"), "offload": "cpu", "gpu_memory": 12_345_678_901},
        {"saves": ("mlp.*",), "offload": "cpu", "gpu_memory": None},
    ],
)
def test_every_way_in_takes_the_plans_settings(fields):
    """Each line is read as its program reads it; all give one configuration."""
    yaml = pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")
    choice = Choice(
        "streambp", chunk_size=2048, seq_len=8192, peak=None, flops=1.0, seconds=None, **fields
    )
    expected = streambp.StreamConfig(**fields_of(choice))
    assert (expected.chunk_size, expected.saves) == (2048, fields["saves"])
    if fields["offload"] == "none":  # left out: with saves that are named nothing moves by default
        assert not expected.always_moves
        assert not expected.may_move
    else:
        assert expected.offload == fields["offload"]
    assert eval(config_code(choice), {"streambp": streambp}) == expected
    ways = launcher_settings(choice, Setting(zero=2, gpus=2, optimizer_on_host=True))
    read = settings_from_flags(commands.parse(shlex.split(ways["launch"])[1:])).config
    assert [getattr(read, name) for name in fields_of(choice)] == [
        getattr(expected, name) for name in fields_of(choice)
    ]
    trl_config = eval(ways["TRL"], {"StreamSFTConfig": StreamArguments}).stream_config()
    assert [getattr(trl_config, name) for name in fields_of(choice)] == [
        getattr(expected, name) for name in fields_of(choice)
    ]
    assert streambp.StreamConfig(**yaml.safe_load(ways["axolotl"])["streambp"]) == expected
    engine = json.loads(ways["DeepSpeed"])
    assert streambp.StreamConfig(**engine["streambp"]) == expected
    assert engine["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def test_the_module_tree_has_no_empty_rows():
    """GPT-2's dropouts have no parameters, and keep nothing in bf16 that the planner sees without
    data at rate 0."""
    config = zoo.tiny_config("gpt2")
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda")
    assert any(isinstance(module, torch.nn.Dropout) for module in skeleton.model.modules())
    tree = module_tree(skeleton, skeleton.reduce(), 1)
    lines = tree_lines(tree)
    assert not [line for line in lines if "Dropout" in line]
    assert [line for line in lines if "LayerNorm" in line]
    assert tree.parameters == sum(child.count * child.parameters for child in tree.children)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpu_memory": "much"}, "gpu_memory is 'much'"),
        ({"gpu_memory": "1GiB", "seq_len": -1}, "seq_len is -1"),
        ({"gpu_memory": "1GiB", "seq_len": "64x"}, "seq_len is '64x'; .* such as 65536, 64k or 1M"),
        ({"gpu_memory": "1GiB", "reserve": 1.5}, "reserve is 1.5"),
        ({"gpu_memory": "1GiB", "batch_size": 0}, "batch_size is 0"),
        ({"gpu_memory": "1GiB", "lora": 0}, "lora is 0"),
        ({"gpu_memory": "1GiB", "bits": 4}, "bits is 4, but no Linear .* is frozen"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(streambp.StreamBPError, match=words):
        plan(SMALL_CONFIG, **arguments)


def printed_json(capsys):
    out = capsys.readouterr().out  # DeepSpeed, if transformers imports it, logs to stdout first
    return json.loads(out[out.index("{") :])


def test_plan_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile_cache, "survey", lambda *_, **__: two_methods())
    monkeypatch.setattr(profile_cache, "counted_saves", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    SMALL_CONFIG.save_pretrained(tmp_path)
    arguments = [
        "plan",
        str(tmp_path),
        "--gpu-memory",
        "2GiB",
        "--host-memory",
        "1GiB",
        "--seq-len",
        "8k",
    ]
    assert cli.main([*arguments, "--json"]) == 0
    printed_plan = printed_json(capsys)
    assert printed_plan["choice"]["seq_len"] == 8192
    assert from_json(printed_plan["profile"]) == two_methods()
    assert cli.main([*arguments, "--gpu-memory", "10KiB"]) == 1
    assert "8,192 tokens do not fit" in capsys.readouterr().out
    assert cli.main(["plan", str(tmp_path), "--gpu-memory", "2GiB", "--seq-len", "much"]) == 2
    assert "--seq-len is 'much'" in capsys.readouterr().err


def test_a_failed_plan_leaves_no_page(tmp_path):
    page = tmp_path / "plan.html"
    arguments = [
        "plan",
        str(tmp_path / "nothing.json"),
        "--gpu-memory",
        "2GiB",
        "--html",
        str(page),
    ]
    (tmp_path / "nothing.json").write_text("{")
    assert cli.main(arguments) == 2
    assert not page.exists()
    page.write_text("an earlier plan")
    assert cli.main(arguments) == 2
    assert page.read_text() == "an earlier plan"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chunk-size", "0"], "--chunk-size is '0'"),
        (["--device", "cuda"], "torch finds no such device here. Pass --device cpu."),
    ],
)
def test_profiles_that_cannot_run(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    build("llama").save_pretrained(tmp_path)
    assert cli.main(["profile", str(tmp_path), "--seq-len", "16", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_gpu_may_be_named_by_its_number(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert runs._device(name) == name
    for name in ("cuda:2", "cuda:", "xpu"):
        with pytest.raises(streambp.StreamBPError, match="cpu or cuda or cuda:0 or cuda:1"):
            runs._device(name)


def test_a_length_may_be_text_in_python(monkeypatch):
    """As `--seq-len` and StreamConfig's chunk_size."""
    monkeypatch.setattr(planning, "count_profile", lambda *args: made_up())
    assert plan(SMALL_CONFIG, "2k", gpu_memory="1GiB").seq_len == 2048


@pytest.mark.parametrize(
    ("text", "tokens"), [("64k", 65536), ("128K", 131072), ("1.5M", 1572864), ("100", 100)]
)
def test_lengths_on_the_command_line(text, tokens):
    assert parse_tokens("seq_len", text) == tokens


@pytest.mark.full
def test_profile_on_the_command_line(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path)
    arguments = [
        "profile",
        str(tmp_path),
        "--seq-len",
        "256",
        "--chunk-size",
        "64",
        "--device",
        "cpu",
        "--json",
    ]
    assert cli.main([*arguments, "--saves", "attn_out", "--offload", "cpu"]) == 0
    rows = printed_json(capsys)["phases"]
    assert [row["phase"] for row in rows][-1] == "embedding backward"
    predicted, measured = (max(row[name] for row in rows) for name in ("predicted", "measured"))
    assert predicted == pytest.approx(measured, rel=0.02)
    assert cli.main([*arguments, "--snapshot", str(tmp_path / "snapshot.pickle")]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def fitting():
    phase = Phase("backward 0", Law(1000, 10, 100))
    law = auto.StepNeed(Method("streambp", (), "none", False, True, (phase,), (), Law(), ()))
    # larger chunks are faster
    figures = StepFigures(law, {}, seconds=lambda tokens, chunk: tokens / chunk)
    free = [0.0]
    return SavesPolicy(1, lambda device: free[0], lambda device: (figures, 0.0), True, True), free


def check_chunks_fit():
    rule, free = fitting()
    for size in (16384, 8192, 4096, 2048, 1024):
        free[0] = 1000 + 10 * 100_000 + 100 * size
        assert rule.chunk(0, 1, 100_000, torch.device("cpu")) == size
    free[0] = 0
    assert rule.chunk(0, 1, 100_000, torch.device("cpu")) == 1024


def test_the_largest_chunk_that_fits():
    check_chunks_fit()


@pytest.mark.full
def test_auto_chunks_follow_the_device(monkeypatch):
    """One size for all layers of a forward, decided by what is free when it begins."""
    free, indices, chunk_rule = [10**12], [], SavesPolicy.chunk

    @functools.wraps(chunk_rule)  # by whose name pickle finds it
    def counted_rule(policy, index, *arguments):
        indices.append(index)
        return chunk_rule(policy, index, *arguments)

    monkeypatch.setattr(SavesPolicy, "chunk", counted_rule)
    monkeypatch.setattr(free_memory, "free_memory", lambda device: free[0])
    model = streambp.patch(
        build("qwen3", torch.bfloat16), streambp.StreamConfig(rows="as_given", unpatched_runs=False)
    )
    rule = model._streambp.saves_policy.chunk
    assert rule(0, 1, 200000, torch.device("cpu")) == 32768
    assert "fits into the device's free memory" in streambp.describe(model).chunk_size
    free[0] = 0
    assert rule(1, 1, 200000, torch.device("cpu")) == 32768
    assert rule(0, 4, 200000, torch.device("cpu")) == 256
    indices.clear()
    for copied_model in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied_model(**make_batch("plain"), use_cache=False).loss.backward()
        assert indices == [0, 1]
        indices.clear()
    model = streambp.patch(build("qwen3", torch.bfloat16), streambp.StreamConfig(chunk_size=7))
    assert all(
        w.layer_state.chunk_rule is None
        for w in model._streambp.wrappers
        if hasattr(w, "layer_state")
    )


def test_auto_says_why_it_keeps_the_plain_rule(monkeypatch):
    monkeypatch.setattr(free_memory, "free_memory", lambda device: 10**12)
    monkeypatch.setattr(auto, "survey", lambda *_, **__: 1 / 0)
    model = streambp.patch(build("qwen3", torch.bfloat16))
    for _ in range(2):
        model(**make_batch("plain"), use_cache=False).loss.backward()
    assert "could not be counted: ZeroDivisionError" in streambp.describe(model).chunk_size
    assert "auto saved nothing" not in str(streambp.describe(model).saves)  # by a bound


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("config", "lever"),
    [
        (streambp.StreamConfig(chunk_size=5), "offload='cpu'"),
        (streambp.StreamConfig(chunk_size=5, saves=("attn_out",)), "saves=('attn_out',)"),
        (streambp.StreamConfig(chunk_size=5, saves=(), offload="cpu"), "gpu_memory='1GiB'"),
        (streambp.StreamConfig(chunk_size=5, saves=(), offload="cpu", gpu_memory="1GiB"), "ZeRO-3"),
    ],
)
def test_running_out_of_memory_names_the_next_lever(config, lever, where, monkeypatch):
    model = streambp.patch(build("qwen3"), config)
    batch = make_batch("plain")
    model(**batch, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def step():
        with monkeypatch.context() as patched:
            if where == "forward":
                patched.setattr(torch.nn.functional, "silu", exhausted)
            loss = model(**batch, use_cache=False).loss
            patched.setattr(torch.nn.functional, "silu", exhausted)
            loss.backward()

    with pytest.raises(streambp.StreamBPError) as caught:
        step()
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert lever in str(caught.value)
    assert "Tried to allocate 2.00 GiB" in str(caught.value)
    del caught
    model.zero_grad()
    model(**batch, use_cache=False).loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_smaller_chunks_are_the_lever_once_everything_has_left():
    from streambp.chunks import ChunkPlan
    from streambp.layer.oom import advise_setting

    config = streambp.StreamConfig(offload="cpu")
    assert "chunk_size=4096" in advise_setting(config, ChunkPlan(100_000, 8192))
    assert "gpu_memory='1GiB'" in advise_setting(config, ChunkPlan(100_000, 1024))
    assert "ZeRO-3" in advise_setting(
        dataclasses.replace(config, gpu_memory=1), ChunkPlan(100_000, 1024)
    )
    assert "head=True" in advise_setting(
        dataclasses.replace(config, head=False), ChunkPlan(100_000, 1024)
    )
