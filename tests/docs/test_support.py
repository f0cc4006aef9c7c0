"""The support matrix is what the tests' parameters say, and names what was not run.

covers: model/describe.py
"""

from __future__ import annotations

import pytest

from scripts import support_matrix


def check_current():
    assert support_matrix.page() == support_matrix.PAGE.read_text("utf-8"), (
        "run `python -m scripts.support_matrix`"
    )


def test_the_page_is_current():
    check_current()


def test_a_family_that_is_tested_no_more_is_seen(monkeypatch):
    monkeypatch.setattr(support_matrix.test_engines, "MODELS", ("llama", "qwen3"))
    with pytest.raises(AssertionError):
        check_current()


def test_cells_name_what_was_not_run():
    table = support_matrix.rows()
    assert table["qwen3"]["ZeRO"] == "full, LoRA (1, 2, 3)"
    assert table["bamba"]["ZeRO"] == "full (2, 3)"
    assert table["bamba"]["Ulysses"] == support_matrix.NOT_RUN_TEXT
    assert table["deepseek_v3"]["context parallel"] == "full"
    assert table["deepseek_v3"]["DDP"] == support_matrix.NOT_RUN_TEXT
    assert all(cells["one device"].startswith("full") for cells in table.values())
