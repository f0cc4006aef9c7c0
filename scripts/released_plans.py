"""Plans of released models as a table: three cards, three trainings and three lengths of each.

    OMP_NUM_THREADS=1 python scripts/released_plans.py
    OMP_NUM_THREADS=1 python scripts/released_plans.py --models Qwen3-8B gpt-oss-20b

Each model runs in a process of its own. A line has the training, the processor seconds of its first
count without imports, those of its nine plans and their remedies, and the settings that each plan
chooses. Each plan is checked as tests/planner/test_fastest.py does: nothing that the planner knows
is 2 % faster and not named, and each remedy fits when it is planned by its printed options. The
exit code is 1 if a plan fails the check, or if a first count takes more than `MOST_SECONDS`.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 40.0  # processor seconds of a first count


def cell(found: object) -> str:
    """Return a plan's GiB, seconds and method in few letters; "-" if nothing fits."""
    choice = found.choice  # type: ignore[attr-defined]
    if choice is None:
        return "-"
    letters = choice.method.replace("streambp", "").replace(" saves", "")
    letters = letters.replace("offload, keys on the host", "keys").replace("offload", "host")
    letters = letters.replace("attn_out", "a").replace(",", "").strip() or "lean"
    where = "" if choice.on_host is None else f" w{choice.on_host.layers}"
    return f"{choice.peak.total / 2**30:.1f} GiB {choice.seconds.total:.3g} s {letters}{where}"


def table(name: str) -> bool:
    """Print the lines of a model; return True if all of its plans pass."""
    from streambp.planner import Memory, Setting
    from streambp.planner.counted import Asked, counted
    from streambp.planner.estimate import UNPATCHED
    from streambp.planner.plan import plan_profile
    from streambp.planner.survey import STREAMED
    from tests.planner.released import RELEASED
    from tests.planner.test_fastest import CARDS, GIB, LENGTHS, LORA, Training, check_cell

    @functools.cache
    def profile(training: Training):  # type: ignore[no-untyped-def]
        asked = Asked(RELEASED[name](), lora=training.lora, bits=training.bits)
        return counted(asked, (*UNPATCHED, *STREAMED))

    passed = True
    trainings = (Training(), LORA, Training(16, 4))
    counts = []
    for training in trainings:
        begun = time.process_time()
        profile(training)
        counts.append(time.process_time() - begun)
    passed &= max(counts) <= MOST_SECONDS
    for training, first in zip(trainings, counts, strict=True):
        begun = time.process_time()
        cells = []
        for size in CARDS:
            for length in LENGTHS:
                memory = Memory(size * GIB, 256 * GIB)
                try:
                    check_cell(name, memory, training, length, profile)
                    wrong = ""
                except AssertionError as error:
                    wrong = f" WRONG {str(error).splitlines()[0][:200]}"
                    passed = False
                found = plan_profile(profile(training), length, memory, Setting())
                cells.append(f"{size}/{length // 1024}k: {cell(found)}{wrong}")
        rest = time.process_time() - begun
        print(f"{name}, {training}: first count {first:.1f} s, nine plans {rest:.1f} s")
        print("    " + "\n    ".join(cells), flush=True)
    return passed


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.planner.released import RELEASED

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=RELEASED, default=list(RELEASED))
    parser.add_argument("--one", choices=RELEASED, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return 0 if table(arguments.one) else 1
    wrong = 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for name in arguments.models:
        command = [sys.executable, "-W", "ignore", __file__, "--one", name]
        wrong += subprocess.run(command, env=environment, check=False).returncode != 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
