"""Write a plan as one HTML file that computes plans for other lengths, memory and settings in the
browser.

The file contains the counted profiles as JSON, and `plan.js`, a bitwise equal implementation of
`profile.py` and `plan.py`. The content policy of the file forbids external references, which the
file does not have.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from streambp.planner.plan import ALLOWED_SLOWDOWN, CHUNK_TOKENS, MAX_SEQ_LEN, Plan
from streambp.planner.profile import Profile, to_json
from streambp.rates import DEVICE_MEMORY_SIZES, DEVICES

START_TOKENS = 65_536  # tokens at the start, if nothing fits and no length was requested
FILES_BY_PLACEHOLDER = {
    "/*STYLE*/": ("page.css",),
    "/*PLAN*/": ("host_weights.js", "plan.js"),
    "/*PAGE*/": (
        "elements.js",
        "controls.js",
        "doors.js",
        "results.js",
        "chart.js",
        "frontier.js",
        "page.js",
    ),
}
DATA_PLACEHOLDER = "/*DATA*/"
# comments and empty lines, which browsers ignore
COMMENT_OR_EMPTY_LINE = re.compile(r"^ *(?://.*\n|/\*.*\*/\n|\n)?", re.MULTILINE)


def page(
    plan: Plan,
    name: str,
    other_profiles: Mapping[str, Profile] | None = None,
    training: str = "every parameter",
    unfused: Mapping[str, Profile] | None = None,
) -> str:
    """Return the text of the planner's HTML page for a plan.

    Args:
        plan: the plan at the start, with the initial state of the controls.
        name: the model's name, for the heading.
        other_profiles: dict from the page's label for a kind of training (LoRA, for example) to the
            model's memory and FLOPs under this training. None: only the plan's own training is on
            the page.
        training: label of the plan's own training.
        unfused: memory and FLOPs without fused kernels, by the same labels, for each profile on the
            page. A switch on the page selects these profiles. None or empty: the page has no
            switch.
    """
    memory = plan.memory
    setting = plan.setting
    profiles = {training: plan.profile, **(other_profiles or {})}
    embedded = []
    without = []
    for label, profile in profiles.items():
        embedded.append({"training": label, "profile": _embedded(profile)})
        if unfused:
            without.append(_embedded(unfused[label]))
    devices = {plan.rates.name: plan.rates} | dict(DEVICES)
    data = {
        "name": name,
        "profiles": embedded,
        "unfused": without,
        "setting": dataclasses.asdict(dataclasses.replace(setting, on_host=None)),
        "memory": {
            "gpu": memory.gpu,
            "host": None if memory.host is None else memory.host * setting.gpus,
            "reserve": memory.reserve,
        },
        "seq_len": plan.seq_len or START_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "devices": list(map(dataclasses.asdict, devices.values())),
        "longest": MAX_SEQ_LEN,
        "slower": ALLOWED_SLOWDOWN,
        "usual": DEVICE_MEMORY_SIZES,
    }
    text = part("page.html")
    for placeholder, files in FILES_BY_PLACEHOLDER.items():
        text = text.replace(placeholder, COMMENT_OR_EMPTY_LINE.sub("", "\n".join(map(part, files))))
    # "<" could end the script element or open a comment in it.
    return text.replace(
        DATA_PLACEHOLDER,
        json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def part(file: str) -> str:
    """Return the text of a file in this package that is inserted into the planner's HTML page, such
    as "plan.js"."""
    return (resources.files("streambp.planner") / "web" / file).read_text("utf-8")


def _embedded(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON types for the HTML page. The field `saves` (costs of the tensors
    that saves="auto" may save) is None, because the page does not use it."""
    return to_json(dataclasses.replace(profile, saves=None))
