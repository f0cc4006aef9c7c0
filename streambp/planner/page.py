"""A plan as one HTML file that computes itself anew in the browser for other lengths, memory and settings.

The file carries the counted profiles as JSON, and `plan.js`: what `profile.py` and `plan.py` compute once more, to the bit.
It refers to nothing outside of itself, and its policy forbids the browser to try.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from importlib import resources

from streambp.planner.plan import CHUNK_TOKENS, LONGEST, SLOWER, Plan
from streambp.planner.profile import Profile, to_json
from streambp.rates import DEVICES, USUAL

START = 65_536  # tokens, where nothing fits and no length was asked for
PLACES = {
    "/*STYLE*/": ("page.css",),
    "/*PLAN*/": ("host_weights.js", "plan.js"),
    "/*PAGE*/": ("elements.js", "controls.js", "doors.js", "results.js", "chart.js", "frontier.js", "page.js"),
}
DATA = "/*DATA*/"
FOR_READERS = re.compile(r"^ *(?://.*\n|/\*.*\*/\n|\n)?", re.MULTILINE)  # not read by browsers


def page(
    plan: Plan,
    name: str,
    others: Mapping[str, Profile] | None = None,
    training: str = "every parameter",
    unfused: Mapping[str, Profile] | None = None,
) -> str:
    """The whole file.

    Args:
        plan: what the controls show at first.
        name: of the model, for the heading.
        others: the same model trained in other ways, by what the page calls them. training: what it calls the plan's.
        unfused: each of these without fused layers, where the plan has them; none: the page has no switch.
    """
    memory, setting = plan.memory, plan.setting
    profiles = {training: plan.profile, **(others or {})}
    embedded, without = (  # what `saves` has is not read by the page's own planner
        {label: to_json(dataclasses.replace(profile, saves=None)) for label, profile in some.items()}
        for some in (profiles, unfused or {})
    )
    data = {
        "name": name,
        "profiles": [{"training": label, "profile": profile} for label, profile in embedded.items()],
        "unfused": [without[label] for label in profiles] if unfused else [],
        "setting": dataclasses.asdict(dataclasses.replace(setting, on_host=None)),
        "memory": {
            "gpu": memory.gpu,
            "host": None if memory.host is None else memory.host * setting.gpus,
            "reserve": memory.reserve,
        },
        "seq_len": plan.seq_len or START,
        "chunk_tokens": CHUNK_TOKENS,
        "devices": [dataclasses.asdict(rates) for rates in ({plan.rates.name: plan.rates} | dict(DEVICES)).values()],
        "longest": LONGEST,
        "slower": SLOWER,
        "usual": USUAL,
    }
    folder = resources.files("streambp.planner") / "web"
    text = (folder / "page.html").read_text("utf-8")
    for place, files in PLACES.items():
        parts = "\n".join((folder / file).read_text("utf-8") for file in files)
        text = text.replace(place, FOR_READERS.sub("", parts))
    # "<" could end the script element or open a comment in it.
    return text.replace(DATA, json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
