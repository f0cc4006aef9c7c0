"""Messages of errors say what happened, why, and one remedy: scripts/messages.py counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.messages import main, messages, rules_broken

PACKAGE = Path(__file__).parents[2] / "streambp"
MAX_SHARE = 0.05  # of all messages may break a rule


def test_messages_of_errors_are_plain():
    rows = list(messages(PACKAGE))
    flagged = []
    for message in rows:
        rules = rules_broken(message.text)
        if rules:
            flagged.append(f"{message.location} {rules} {message.text}")
    assert len(rows) > 200
    assert len(flagged) <= MAX_SHARE * len(rows), "\n".join(flagged)


CLEAR_MESSAGE = "The mask has shape _, but the batch has _ rows. Pass a mask of the batch's shape."
RULE_BREAKS = {
    CLEAR_MESSAGE: [],
    "seq_len is _; it must be a positive number.": [],
    "The layer ran. " + CLEAR_MESSAGE.replace("rows", "rows " * 30): ["long"],
    "The layer has a value that is read by what comes. Call backward once.": ["stacked"],
    "They changed it, and others read them. Call backward once.": ["vague"],
    "The layer handed its mask on. Call backward once.": ["private"],
    "The layer runs whole. Call backward once.": ["private"],
    "The mask has shape _.": ["no remedy"],
    "The mask is wrong. Pass another mask, set chunk_size, or use eager attention.": ["remedies"],
}


@pytest.mark.parametrize("text", RULE_BREAKS)
def test_a_rule_finds_its_message(text):
    assert rules_broken(text) == RULE_BREAKS[text]


SOURCE = '''
ADVICE = "Pass one."


class OwnError(ConfigError):
    """An error of a module."""


def check(value):
    if value < 0:
        raise ConfigError(f"The value {value} is below 0. " + ADVICE)
    if value > 9:
        raise OwnError(f"The value is above 9. {ADVICE}")
    raise KeyError("The value is no message of this package.")
'''


def test_every_error_of_the_package_is_listed(tmp_path):
    (tmp_path / "errors.py").write_text("class ConfigError(StreamBPError):\n    pass\n")
    (tmp_path / "code.py").write_text(SOURCE)
    texts = {message.error: message.text for message in messages(tmp_path)}
    assert texts == {
        "ConfigError": "The value _ is below 0. Pass one.",
        "OwnError": "The value is above 9. Pass one.",
    }


def test_the_messages_that_break_a_rule_are_printed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["messages.py", "--all"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("%")
    assert len(lines) > 200
