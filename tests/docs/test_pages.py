"""The users' pages: their length, and that what they take from the code is what the code says now.

covers: config.py, cli/app.py, errors.py
"""

from __future__ import annotations

import re

import pytest

from scripts import reference
from streambp import errors
from tests.conftest import SHARES_PREFIXES
from tests.docs.pages import ALL_PAGES, FENCE, ROOT, USERS, prose

LONGEST, ALL = 1500, 9000  # words of a page in Start and How-to; of all users' pages
MAX_BLOCK_COLUMNS = 76  # columns of a block that the site shows without a scroll bar
README_LINES = 120
CHANGELOG_LINES = 80  # of one version, for users
NOT_WRITTEN = ("docs/reference/families.md",)  # a table that tests fill


def words(page):
    return len(re.findall(r"[A-Za-z][\w'-]*", prose((ROOT / page).read_text("utf-8"))))


def test_pages_are_short():
    counted = {page: words(page) for page in USERS if page not in NOT_WRITTEN}
    print(
        f"\n{sum(counted.values())} words; the longest: "
        f"{sorted(counted.items(), key=lambda item: -item[1])[:3]}"
    )
    assert sum(counted.values()) <= ALL
    assert not {
        page: n
        for page, n in counted.items()
        if page.startswith(("docs/start", "docs/how-to")) and n > LONGEST
    }


def wide_lines(text):
    """The lines of a page's blocks that its reader would have to scroll."""
    lines = []
    for block in FENCE.finditer(text):
        lines += [line for line in block[3].splitlines() if len(line) > MAX_BLOCK_COLUMNS]
    return lines


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *ALL_PAGES])
def test_blocks_are_not_cut_off(page):
    assert wide_lines((ROOT / page).read_text("utf-8")) == []


def test_a_wide_block_is_found():
    line = "streambp plan " + "x" * (MAX_BLOCK_COLUMNS - 13)
    assert wide_lines(f"{line}\n```bash\n{line}\n```\n") == [line]
    assert wide_lines(f"```text\n{line[1:]}\n```\n") == []


def test_the_readme_is_short_and_begins_with_what_others_cannot_run():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= README_LINES
    rows = [line for line in text.splitlines() if line.startswith("|")][2:5]
    assert rows[0].startswith("| longest sequence")
    assert "33.9 GiB" in rows[1]
    assert "62.3 GiB" in rows[1]
    assert "default" in rows[2]


def test_the_users_changelog_is_short_and_begins_with_wrong_numbers():
    """All entries are in the developers' list, which is on the site beside it."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    unreleased = text.partition("(unreleased)")[2].partition("\n## ")[0]
    assert unreleased.count("\n") <= CHANGELOG_LINES
    kinds = re.findall(r"^### (.*)$", unreleased, re.MULTILINE)
    assert kinds == ["Fixed: gradients or values that were wrong", "Added", "Changed", "Fixed"]
    full = "changelog-for-developers.md"
    assert f"docs/{full}" in text
    assert f"docs/{full}" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert full in (ROOT / "mkdocs.yml").read_text("utf-8")
    assert (ROOT / "docs" / full).read_text("utf-8").count("\n- ") >= unreleased.count("\n- ")


@pytest.mark.skipif(SHARES_PREFIXES, reason="STREAMBP_TEST_ROWS changes a default")
@pytest.mark.parametrize("page",
    [path for path in reference.pages() if reference.CODE_PLACE.search(path.read_text("utf-8"))],
                         ids=lambda path: path.stem)  # fmt: skip
def test_pages_say_what_the_code_says(page):
    text = page.read_text("utf-8")
    assert reference.filled(text) == text, "run `python scripts/reference.py`"


def test_an_error_that_is_built_on_first_access_has_one_row():
    assert errors.DeviceMemoryError is not None
    assert reference.errors().count("| `DeviceMemoryError` |") == 1


def test_a_page_that_is_old_is_found():
    assert (
        reference.filled("All <!-- from code: families -->7<!-- end --> stream.") != "All 7 stream."
    )
    assert reference.families() in reference.filled("<!-- from code: families --><!-- end -->")
    assert int(reference.families()) > 100


def test_no_fact_of_the_code_is_typed_by_hand():
    """The rule of chunk sizes, and the number of families."""
    marked = re.compile(r"<!-- from code: .*?<!-- end -->", re.DOTALL)
    for page in (*USERS, "docs/explanation/saves.md", "docs/explanation/planner.md"):
        text = marked.sub("", (ROOT / page).read_text("utf-8"))
        assert not re.search(r"\d+ (?:model )?families stream", text), page
        assert not re.search(r"eighth of the sequence|8,192, 4,096, 2,048", text), page
