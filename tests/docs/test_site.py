"""The site as a browser shows it: every page of a user, both themes, a telephone and a desk,
without a scrollbar below.

covers: __init__.py
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, USERS
from tests.hangs import HANG
from tests.planner.browser import BROWSER, DRIVER, opened

BUILDER = os.environ.get("STREAMBP_MKDOCS", sys.executable)  # a Python that has mkdocs
HAS_BUILDER = sys.executable != BUILDER or importlib.util.find_spec("material") is not None
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (BROWSER and DRIVER),
        reason="no Chromium with chromedriver was found to look at the site with",
    ),
    pytest.mark.skipif(
        not HAS_BUILDER,
        reason="no mkdocs: install the extra docs, or name a Python in STREAMBP_MKDOCS",
    ),
]
WIDE_SCRIPT = """
const wide = document.documentElement.clientWidth;
const scrolls = (one) => one.closest(arguments[0]);
const all = [...document.querySelectorAll(".md-content *, .md-header *")];
const boxes = all.filter((one) => one.checkVisibility() && !scrolls(one));
return {
  scroll: document.documentElement.scrollWidth - wide,
  outside: boxes.filter((one) => one.getBoundingClientRect().right > wide + 1).map((one) => one.outerHTML.slice(0, 80)),
  cut: [...document.querySelectorAll("td code")].filter(
    (one) => !/[\\s\u2011/.,_(-]/.test(one.textContent) && one.getClientRects().length > 1
  ).map((one) => one.textContent),
  scheme: document.body.getAttribute("data-md-color-scheme"),
  background: getComputedStyle(document.body).backgroundColor,
};
"""
# by themselves
SCROLLING_SELECTOR = (
    ".md-typeset__scrollwrap, pre, code, .md-sidebar, .md-tabs, .highlight, .md-search, .md-dialog"
)
THEME = """
const palette = document.querySelectorAll("[name=__palette]");
palette[arguments[0]].click();
"""


@pytest.fixture(scope="module")
def built_site(tmp_path_factory):
    """The address of the site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [BUILDER, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=HANG,
    )  # fmt: skip
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def addresses():
    return [
        "",
        *(
            page.removeprefix("docs/").removesuffix(".md") + "/"
            for page in USERS
            if page != "README.md"
        ),
    ]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_no_page_is_wider_than_the_window(built_site, width, theme, tmp_path):
    """STREAMBP_SHOTS names a folder for the pictures."""
    root, _ = built_site
    shots = Path(os.environ.get("STREAMBP_SHOTS", tmp_path))
    shots.mkdir(exist_ok=True)
    wrong, colours = {}, set()
    with opened(f"{root}/", width) as window:
        window.run(THEME, theme)
        for address in addresses():
            window.open(f"{root}/{address}")
            widths = window.run(WIDE_SCRIPT, SCROLLING_SELECTOR)
            colours.add((widths["scheme"], widths["background"]))
            name = address.strip("/").replace("/", "-") or "home"
            window.screenshot(shots / f"{name}-{width}-{('light', 'dark')[theme]}.png")
            if widths["scroll"] > 0 or widths["outside"] or widths["cut"]:
                wrong[address] = widths
    assert not wrong
    assert len(colours) == 1
    assert next(iter(colours))[0] == ("default", "slate")[theme]


def test_the_home_has_the_install_and_a_first_program(built_site):
    _, folder = built_site
    home = re.sub("<[^>]*>", "", (folder / "index.html").read_text("utf-8"))
    for text in (
        "pip install",
        "streambp.patch(model)",
        "streambp plan",
        "streambp verify",
        "streambp launch",
    ):
        assert text in home, text
