"""First on PYTHONPATH of a launched program: loads the hook, then the sitecustomize that it stands in front of.

The folder holds nothing else, since all that is in it can be imported by every program. [Note: launch hook]
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

HERE = os.path.dirname(os.path.abspath(__file__))
HOOK = "streambp_launch_hook"


def load_hook() -> None:
    """By its path, in a module of its own: streambp itself is not imported."""
    loader = SourceFileLoader(HOOK, os.path.join(os.path.dirname(HERE), "hook.py"))
    module = type(sys)(HOOK)
    sys.modules[HOOK] = module
    loader.exec_module(module)
    module.install()


def load_hidden() -> None:
    """The sitecustomize that would have been found without ours takes its place."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("STREAMBP_LAUNCH"):
    load_hook()
if __name__ == "sitecustomize":
    load_hidden()
