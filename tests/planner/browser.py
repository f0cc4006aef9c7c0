"""A headless Chromium by the WebDriver protocol, JSON over HTTP: clicks, keys and the console as a
person has them."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Left": "\ue012",
    "Right": "\ue014",
    "Home": "\ue011",
    "End": "\ue010",
}


class Page:
    """A window with a document."""

    def __init__(self, address, session):
        self._root = f"{address}/session/{session}"

    def ask(self, path, body=None, method="POST"):
        """A command's value."""
        return send(f"{self._root}/{path}", body if body is not None else {}, method)

    def open(self, address):
        """Go to an address; scripts have run."""
        self.ask("url", {"url": address})

    def run(self, script, *arguments):
        """The value of a function's body."""
        return self.ask("execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys):
        """Keys, one after the other, wherever the focus is."""
        strokes = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        self.ask("actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def click(self, selector):
        """The middle of an element, with the pointer."""
        element = self.ask("element", {"using": "css selector", "value": selector})
        self.run("arguments[0].scrollIntoView({ block: 'center' })", element)
        move = {
            "type": "pointerMove",
            "duration": 0,
            "x": 0,
            "y": 0,
            "origin": {ELEMENT: element[ELEMENT]},
        }
        steps = [move, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self.ask("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": steps}]})

    def console(self):
        """What was written there since the last time, with errors that nobody caught."""
        return [entry["message"] for entry in self.ask("se/log", {"type": "browser"})]

    def screenshot(self, file):
        """The window as a PNG."""
        file.write_bytes(base64.b64decode(self.ask("screenshot", method="GET")))


def send(address, body, method="POST"):
    data = None if method in ("GET", "DELETE") else json.dumps(body).encode()
    request = urllib.request.Request(
        address, data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["value"]


@contextlib.contextmanager
def opened(address, width=1280, height=900):
    """The page at an address in a window of that size, of a browser of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as driver,
    ):
        try:
            started = next(
                port_match
                for line in driver.stdout
                if (port_match := re.search(r"successfully on port (\d+)", line))
            )
            root = f"http://127.0.0.1:{started[1]}"
            options = {
                "binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={folder}"],
                "mobileEmulation": {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 1, "touch": False}},
            }  # fmt: skip
            capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = send(f"{root}/session", {"capabilities": {"alwaysMatch": capabilities}})[
                "sessionId"
            ]
            page = Page(root, session)
            try:
                page.open(address)
                yield page
            finally:
                # ends the browser; the driver alone would leave it
                send(f"{root}/session/{session}", None, "DELETE")
        finally:
            driver.kill()
