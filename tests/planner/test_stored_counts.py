"""The count of a patched model is stored, and read by the next process of the same model. A file
that is damaged or wrong costs memory or a count, and changes no number.

covers: planner/profile_cache.py, planner/stored_counts.py
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import streambp
from streambp.known_names import ENGINE_PACKAGES
from streambp.offload import free_memory
from streambp.planner import auto, profile_cache, stored_counts
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, step

CPU_DEVICE = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of counts, and a device that says what it has free."""
    monkeypatch.setattr(stored_counts, "folder", lambda: tmp_path / "plans")
    monkeypatch.setattr(free_memory, "free_memory", lambda device: 2**31)
    return tmp_path / "counts"


@pytest.fixture(scope="module")
def profiles():
    """The count of `tiny()`, made once."""
    return []


@pytest.fixture(autouse=True)
def counts(profiles, monkeypatch):
    """One entry for each step that was counted."""
    real, survey_calls = auto.survey, []

    def survey(*args, **keywords):
        survey_calls.append(1)
        profiles.extend([] if profiles else [real(*args, **keywords)])
        return profiles[0]

    monkeypatch.setattr(auto, "survey", survey)
    return survey_calls


def tiny(**settings):
    return build("qwen3", **{"dtype": torch.bfloat16, "num_hidden_layers": 3, **settings})


def figures_of(model, **settings):
    """What the policy of a newly patched model knows."""
    fields = {"unpatched_runs": False, **settings}
    policy = streambp.patch(model, streambp.StreamConfig(**fields))._streambp.saves_policy
    policy.begin_forward(CPU_DEVICE)
    policy.end_forward()
    return policy.figures


def candidates(figures):
    return {
        index: set(cost.candidates(index, 2 * LENGTH, LENGTH))
        for index, cost in figures.costs.items()
    }


def assert_alike(figures, expected):
    assert figures.need == expected.need
    assert figures.need.bytes_by_layer(4096, 1024, 0.5) == expected.need.bytes_by_layer(
        4096, 1024, 0.5
    )
    assert figures.seconds(65536, 8192) == expected.seconds(65536, 8192)
    assert figures.costs == expected.costs
    assert len(candidates(figures)) == 3
    assert candidates(figures) == candidates(expected)


def test_the_next_process_of_a_model_reads_what_was_counted(counts, cache):
    first = figures_of(tiny())
    assert len(list(cache.iterdir())) == len(counts) == 1
    # another model of the same structure: other values, gradients there, in eval mode
    model = tiny(seed=5).eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert_alike(figures_of(model), first)
    assert len(counts) == 1


def adapted(model, rank=2):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["q_proj"]))


def first_frozen(model):
    model.model.layers[0].requires_grad_(False)
    return model


def with_strides(model):
    old = model.model.layers[1].mlp.up_proj.weight
    weight = nn.Parameter(torch.randn(old.mT.shape, dtype=old.dtype).mT)
    assert not weight.is_contiguous()
    model.model.layers[1].mlp.up_proj.weight = weight
    return model


def with_attribute(model):
    model.model.layers[1].mlp.splits = 3
    return model


def with_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


def with_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) * 1
    return model


COUNT_CHANGES = {
    "frozen": first_frozen,
    "float32": lambda model: model.float(),
    "strides": with_strides,
    "adapters": adapted,
    "an attribute": with_attribute,
    "a hook": with_hook,
    "a forward": with_forward,
}


def test_another_model_is_counted(counts):
    figures_of(tiny())
    figures_of(first_frozen(tiny()))
    assert len(counts) == 2


def key(model, cast=None, **settings):
    return stored_counts.key_of(model, streambp.StreamConfig(**settings), cast)


@pytest.mark.parametrize("change", COUNT_CHANGES)
def test_what_a_count_depends_on_is_in_its_key(change):
    assert key(tiny()) == key(tiny(seed=5))
    assert key(COUNT_CHANGES[change](tiny())) != key(tiny())
    assert key(COUNT_CHANGES[change](tiny())) == key(COUNT_CHANGES[change](tiny(seed=5)))


def test_adapters_of_another_rank_have_another_key():
    assert key(adapted(tiny(), rank=4)) != key(adapted(tiny()))


def test_settings_code_and_versions_are_in_the_key(monkeypatch):
    model = tiny()
    keys = [key(model), key(model, torch.bfloat16), key(model, saves=("kv",))]
    keys.append(key(build("qwen3", dtype=torch.bfloat16, num_hidden_layers=4)))
    keys.append(key(tiny(tie_word_embeddings=True)))
    with monkeypatch.context() as patch:
        patch.setattr(profile_cache, "_source", lambda: "another release")
        keys.append(key(model))
    with monkeypatch.context() as patch:
        patch.setattr(profile_cache.importlib.metadata, "version", lambda package: "0.0")
        keys.append(key(model))
    mlp = type(model.model.layers[0].mlp)
    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
        keys.append(key(model))
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[mlp.__module__], "rotate_half", lambda x: -x)
        keys.append(key(model))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(model) == keys[0]


@pytest.mark.parametrize("with_deepspeed", [False, True])
def test_a_patched_model_in_a_step_has_the_key_of_the_first_one(with_deepspeed, monkeypatch):
    """What a patch and a step leave on modules is not in it. Once DeepSpeed is imported, a step
    adds a hook to each layer."""
    monkeypatch.delitem(sys.modules, ENGINE_PACKAGES[0], raising=False)
    model, keys = tiny(), []
    real = stored_counts.key_of
    monkeypatch.setattr(stored_counts, "key_of", lambda *args: keys.append(real(*args)) or keys[-1])
    for _ in range(2):
        streambp.patch(model, streambp.StreamConfig(unpatched_runs=False))
        step(model)
        step(model)
        if with_deepspeed:
            monkeypatch.setitem(
                sys.modules, ENGINE_PACKAGES[0], types.ModuleType(ENGINE_PACKAGES[0])
            )
    assert len(keys) == 2  # once a patch
    assert len(set(keys)) == 1


def test_objects_are_described_by_their_classes():
    """No address, and no order of a set, is in a description."""
    odd = {
        "set": {"b", "a", "c"},
        "object": object(),
        "map": {"x": [torch.float16, CPU_DEVICE, {1}]},
    }
    assert stored_counts.describe_value(odd) == [
        ("map", [("x", ["torch.float16", "cpu", [1]])]),
        ("object", "builtins.object"),
        ("set", ["a", "b", "c"]),
    ]
    assert stored_counts.describe_value([[[[[1]]]]]) == [[[["builtins.list"]]]]


PROGRAM = """
import torch, streambp
from streambp.planner import stored_counts
from tests.families import build
import peft
model = build("qwen3", num_hidden_layers=2)
model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "o_proj"]))
print(stored_counts.key_of(model, streambp.StreamConfig(), None))
"""


@pytest.mark.full
def test_two_processes_find_the_same_key():
    pytest.importorskip("peft", reason="peft is not installed")
    keys = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        process = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        keys.append(process.stdout.split()[-1])
    assert keys[0] == keys[1]
    assert len(keys[0]) == 32


def signed(data):
    """The text of a file with these entries, as it is written."""
    entries = {name: value for name, value in data.items() if name != profile_cache.DIGEST_ENTRY}
    return json.dumps({**entries, profile_cache.DIGEST_ENTRY: profile_cache._digest(entries)})


def truncated_text(data):
    return json.dumps(data)[:-50]


def empty(data):
    return ""


def older(data):
    """Another version's, which had no such entry."""
    del data["method"]["work"]
    return signed(data)


def unsigned(data):
    del data[profile_cache.DIGEST_ENTRY]
    return json.dumps(data)


def with_other_key(data):
    return signed({**data, "key": "0" * 32})


def another_librarys(data):
    return json.dumps({"version": 2, "results": {"key": data["key"]}})


def no_object(data):
    return json.dumps([data])


def no_text(data):
    return "\udcff\udcfe"


def deep(data):
    return "[" * 100_000


def another_number(data):
    return json.dumps({**data, "factor": 1.5})


def no_number(data):
    data["method"]["first"][0]["law"][1] = None
    return json.dumps(data)


DAMAGES = (
    truncated_text, empty, older, unsigned, with_other_key, another_librarys, no_object, no_text,
    deep, another_number, no_number,
)  # fmt: skip


@pytest.mark.fast("truncated_text", "with_other_key", "another_librarys", "no_number")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_count_is_ignored_with_one_line(damage, counts, cache, caplog):
    expected = figures_of(tiny())
    (file,) = cache.iterdir()
    text = file.read_text()
    file.write_text(damage(json.loads(text)), "utf-8", "surrogateescape")
    with caplog.at_level(logging.WARNING, "streambp"):
        assert_alike(figures_of(tiny()), expected)
    assert_one_line(file, caplog)
    assert len(counts) == 2
    assert json.loads(file.read_text()) == json.loads(text)


def assert_one_line(file, caplog):
    (line,) = caplog.messages
    assert line.startswith(f"{file} is ignored, and the count is made again: ")
    assert "\n" not in line
    assert len(line) < 600


def test_a_file_that_is_a_folder_is_ignored(counts, cache, caplog):
    figures_of(tiny())
    (file,) = cache.iterdir()
    file.unlink()
    file.mkdir()
    figures_of(tiny())
    assert_one_line(file, caplog)
    assert len(counts) == 2
    assert [path.name for path in cache.iterdir()] == [file.name]  # nothing is left beside it


def without_rights(folder):
    folder.chmod(0)


def points_to_itself(folder):
    """Nobody can read it, not even a superuser."""
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(folder)


@pytest.mark.parametrize("damage", [without_rights, points_to_itself])
def test_a_folder_that_cannot_be_read_is_ignored(damage, counts, cache, caplog):
    if damage is without_rights and os.geteuid() == 0:
        pytest.skip("a superuser may read every folder")
    figures_of(tiny())
    (file,) = cache.iterdir()
    damage(cache)
    try:
        figures_of(tiny())
    finally:
        if damage is without_rights:
            cache.chmod(0o700)
    assert_one_line(file, caplog)
    assert len(counts) == 2


def test_a_file_in_place_of_the_folder_is_not_worth_a_line(counts, cache, caplog):
    """With XDG_CACHE_HOME=/dev/null a user says that nothing is to be stored."""
    cache.write_text("")
    for _ in range(2):
        figures_of(tiny())
    assert caplog.messages == []
    assert len(counts) == 2


@pytest.mark.parametrize("broken", ["key_of", "read", "store"])
def test_no_trouble_with_files_ends_a_step(broken, monkeypatch, cache):
    """Neither does a model that cannot be described, a missing home, or a full disk."""
    names = {"key_of": "_module", "read": "folder", "store": "write_file"}

    def fails(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(stored_counts, names[broken], fails)
    assert figures_of(tiny()).seconds is not None
    assert not cache.exists()


def test_old_files_go(cache, monkeypatch):
    monkeypatch.setattr(stored_counts, "MAX_FILES", 2)
    cache.mkdir(parents=True)
    for number in range(3):
        (cache / f"{number}.json").write_text("{}")
        os.utime(cache / f"{number}.json", (number, number))
    figures_of(tiny())
    names = {path.name for path in cache.iterdir()}
    assert len(names) == 2
    assert "2.json" in names


def test_what_cannot_be_counted_is_not_stored(monkeypatch, cache, counts):
    with monkeypatch.context() as patch:
        patch.setattr(auto, "_law", lambda *_: "no")
        assert figures_of(tiny()).why == "no"
    with monkeypatch.context() as patch:
        patch.setattr(auto, "_costs", lambda *_: {})
        figures_of(tiny())
    assert not cache.exists()


def test_a_cpu_neither_counts_nor_looks(monkeypatch, cache, counts):
    """Where a device's memory is unknown nothing is described, read or stored."""
    monkeypatch.setattr(free_memory, "free_memory", lambda device: None)
    monkeypatch.setattr(stored_counts, "key_of", None)
    model = streambp.patch(tiny())
    step(model)
    assert not counts
    assert not cache.exists()


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_wrong_count_changes_no_number(factor, cache, counts, float64_oracle):
    """One that is far too low, and one with which nothing would fit."""
    model = tiny(dtype=torch.float64)
    batch = make_batch("plain", LENGTH)
    expected = step(model, **batch)
    model.zero_grad()
    settings = {"chunk_size": 5, "saves": "auto"}
    figures_of(model, **settings)
    right = step(model, **batch)
    (file,) = cache.iterdir()
    file.write_text(signed({**json.loads(file.read_text()), "factor": factor}))
    figures = figures_of(tiny(dtype=torch.float64), **settings)
    assert figures.need.factor == factor
    second_model = tiny(dtype=torch.float64)
    figures_of(second_model, **settings)
    result = step(second_model, **batch)
    assert len(counts) == 1
    assert_same(result, right)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(result[1][name], gradient, rtol=1e-9, atol=1e-12)


def no_parameters(patch):
    patch.setattr(stored_counts, "_tensor", lambda tensor: [])


def one_key(patch):
    patch.setattr(stored_counts, "key_of", lambda *_: "0" * 32)


@pytest.mark.parametrize("mutant", [no_parameters, one_key])
def test_mutant_of_the_key_turns_a_test_red(mutant, monkeypatch, counts):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_another_model_is_counted(counts)


def test_mutant_that_believes_every_file_turns_a_test_red(monkeypatch, counts, cache, caplog):
    monkeypatch.setattr(profile_cache, "_digest", lambda entries: "")
    with pytest.raises((AssertionError, TypeError)):
        test_a_file_that_is_no_count_is_ignored_with_one_line(no_number, counts, cache, caplog)


def test_mutant_that_stores_nothing_turns_a_test_red(monkeypatch, counts, cache):
    monkeypatch.setattr(stored_counts, "write_file", lambda *_: None)
    with pytest.raises((AssertionError, FileNotFoundError)):
        test_the_next_process_of_a_model_reads_what_was_counted(counts, cache)
