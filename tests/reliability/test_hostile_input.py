"""Whatever is typed or read ends in one line that names the field, and a code that is no verdict.

covers: cli/runs.py, config.py, fields.py, launch/report.py, launch/settings.py,
planner/configuration.py, rates.py
"""

from __future__ import annotations

import itertools

import pytest
import transformers

import streambp
from streambp.cli import main
from streambp.errors import ConfigError
from streambp.planner import configuration
from streambp.planner.profile import Setting
from tests.families import build
from tests.reliability import hostile
from tests.seeds import seed_others, seed_torch
from tests.tiers import thinned

EXPECTED_OUTCOMES = {"accepted", "refused"}


def wrong(cases, budget):
    outcomes = list(itertools.islice(cases, budget))
    assert len(outcomes) == budget
    assert {outcome for _, outcome in outcomes} >= {"refused"}
    return [case for case in outcomes if case[1] not in EXPECTED_OUTCOMES]


BUDGETS = {"few": {"configs": 24, "settings": 200, "rates": 40, "reports": 40}, "many": {}}
BUDGETS["many"] = {"configs": 240, "settings": 4000, "rates": 600, "reports": 600}


@pytest.mark.parametrize("budget", thinned(BUDGETS, lambda budget: budget == "few"))
@pytest.mark.parametrize("kind", sorted(BUDGETS["few"]))
def test_hostile_input_is_refused_in_one_line_that_names_the_field(
    kind, budget, tmp_path, record_property
):
    cases = {
        "configs": lambda: hostile.mutated_configs(tmp_path), "settings": hostile.settings,
        "rates": lambda: hostile.rates_files(tmp_path), "reports": lambda: hostile.report_files(tmp_path),
    }[kind]()  # fmt: skip
    assert wrong(cases, BUDGETS[budget][kind]) == []
    record_property("cases", BUDGETS[budget][kind])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    build("llama").float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("number", thinned([5, 160], lambda number: number == 5))
def test_command_lines_end_with_a_code_that_is_no_verdict(
    number, checkpoint, record_property, monkeypatch
):
    # names of no model are asked for nowhere
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    outcomes = list(itertools.islice(hostile.command_lines(checkpoint), number))
    assert len(outcomes) == number
    assert [case for case in outcomes if case[1] != "refused"] == []
    record_property("cases", len(outcomes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers of LlamaConfig is 100000"),
        ({"hidden_size": 10**18}, "hidden_size of LlamaConfig is 1000000000000000000"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0: ZeroDivisionError"),
        ({"hidden_act": "none"}, "hidden_act is 'none': KeyError"),
        ({"pad_token_id": 10**6}, "pad_token_id is 1000000"),
    ],
)
def test_a_configuration_that_cannot_be_built_names_its_field(sizes, message):
    config = transformers.LlamaConfig(**{**hostile.SIZES, **sizes})
    with pytest.raises(streambp.StreamBPError, match=message):
        streambp.planner.estimate(config, 64)


def test_the_fields_of_an_error_are_found_by_leaving_fields_out(monkeypatch):
    """Without it the same case names no field."""
    monkeypatch.setattr(configuration, "_fields_of", lambda *_: "")
    config = transformers.LlamaConfig(**{**hostile.SIZES, "num_key_value_heads": 0})
    with pytest.raises(streambp.StreamBPError) as error:
        streambp.planner.estimate(config, 64)
    assert "num_key_value_heads" not in str(error.value)


@pytest.mark.parametrize(
    "error",
    [KeyError("rope"), ValueError("a\nb"), RecursionError(), MemoryError(), OSError(28, "full")],
)
@pytest.mark.parametrize("command", ["plan", "verify", "profile", "launch"])
def test_no_uncaught_error_is_a_verdict(error, command, monkeypatch, capsys):
    """1 would be "does not fit" or "not exact"."""

    def fails(*_, **__):
        raise error

    for name in ("plan", "_load", "rates_of", "read_config"):
        monkeypatch.setattr(f"streambp.cli.runs.{name}", fails)
    monkeypatch.setattr("streambp.launch.command.environment", fails)
    words = {
        "plan": ["m", "--gpu-memory", "1GiB"],
        "verify": ["m"],
        "profile": ["m"],
        "launch": ["--", "true"],
    }[command]
    assert main([command, *words]) == 2
    stderr = capsys.readouterr().err
    assert len(stderr.splitlines()) == 1
    assert type(error).__name__ in stderr
    assert "line " in stderr


@pytest.mark.parametrize("value", [True, float("inf"), float("nan"), 0, 1.5, "4", 10**30])
@pytest.mark.parametrize("field", ["gpus", "ulysses", "expert_parallel"])
def test_settings_of_a_plan(field, value):
    with pytest.raises(ConfigError, match=f"{field} is .*it must be a whole number from 1"):
        Setting(**{field: value})


def test_draws_follow_from_the_seed_alone(tmp_path):
    first, second = (list(itertools.islice(hostile.rates_files(tmp_path), 20)) for _ in range(2))
    seed_others(1)
    seed_torch(1)
    assert first == second
