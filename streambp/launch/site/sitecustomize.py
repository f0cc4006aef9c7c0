"""Load the hook at the start of a launched program's interpreters, then the environment's own
sitecustomize, which this file hides.

The folder of this file is the first on PYTHONPATH. The folder contains no other file, because every
program could import it. See `launch/hook.py`.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

SITE_FOLDER = os.path.dirname(os.path.abspath(__file__))
HOOK_MODULE = "streambp_launch_hook"

# loaded by its path as a separate module, without an import of streambp
if os.environ.get("STREAMBP_LAUNCH"):
    hook = type(sys)(HOOK_MODULE)
    sys.modules[HOOK_MODULE] = hook
    SourceFileLoader(
        HOOK_MODULE, os.path.join(os.path.dirname(SITE_FOLDER), "hook.py")
    ).exec_module(hook)
    hook.install()
if __name__ == "sitecustomize":  # the sitecustomize hidden by this file replaces it
    other_entries = [entry for entry in sys.path if os.path.abspath(entry or ".") != SITE_FOLDER]
    spec = PathFinder.find_spec("sitecustomize", other_entries)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        hidden = module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)
