"""Instructions of a warm training step of a model with tiny layers: `host_time.py` where a machine
is too busy for a clock.

    OMP_NUM_THREADS=1 python scripts/host_instructions.py --against /path/to/tree/of/another/commit [--cases plain lora]

The cases are those of `host_time.py`, in 6 layers; each runs 3 steps under valgrind's callgrind,
which has to be installed and takes two minutes a case and tree. The counts are the same in each
run. They weigh vector instructions of kernels like any other, and valgrind knows no AVX-512, so
that Python has a smaller part than in time. What decides is what a tree adds. The clock stands
still meanwhile: valgrind is fifty times slower, and saves="auto" looks for free host memory five
times a second, which would be in each step.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
LAYERS, LENGTH, STEPS = 6, 128, 3


def run(case: str) -> None:
    """The steps that are counted, after three that are not."""
    import time

    import torch
    from host_time import build

    model = build(case, LAYERS, LENGTH)
    tokens = torch.randint(0, 64, (1, LENGTH))

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    fixed_time = time.monotonic()
    time.monotonic = lambda: fixed_time
    step()  # which may still look
    counting = ["callgrind_control", "-i", "on", str(os.getpid())]
    subprocess.run(counting, check=True, capture_output=True)
    for _ in range(STEPS):
        step()
    counting[2] = "off"
    subprocess.run(counting, check=True, capture_output=True)


def counted(tree: Path, case: str) -> int:
    """Instructions of one step."""
    command = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--callgrind-out-file=/dev/null",
    ]
    command += [
        sys.executable,
        "-W",
        "ignore",
        str(SCRIPTS / "host_instructions.py"),
        "--run",
        case,
    ]
    paths = os.pathsep.join((str(tree), str(SCRIPTS)))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stderr
    counts = re.findall(r"Collected : (\d+)", output)
    return int(counts[-1]) // STEPS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument(
        "--cases", nargs="+", default=["plain", "uncompared plain", "lora"], metavar="CASE"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run)
        return
    for case in arguments.cases:
        count = counted(SCRIPTS.parent, case)
        against = (
            f"   against {counted(arguments.against.resolve(), case):,}"
            if arguments.against
            else ""
        )
        ratio = (
            f"   ratio {count / int(against.split()[-1].replace(',', '')):.3f}" if against else ""
        )
        print(f"{case:<24} {count:,} a step{against}{ratio}", flush=True)


if __name__ == "__main__":
    main()
