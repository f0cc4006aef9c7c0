"""The longest sequence that one forward and backward of each method takes on an 80 GB budget (79 GiB reserved).

python -m paper_repro.longest_sequence --output paper_repro/results/longest_sequence.csv
python -m paper_repro.longest_sequence --output FILE --shapes Qwen3-8B --methods streambp-lean --up-to 262144

Lengths double from --start until memory runs out, then the gap is halved --halvings times, so the answer is a length that
ran and lies within 2^-halvings of one that did not. --up-to ends the search at a length that takes long enough; a row
that stops there says so, and so does one for which --minutes did not suffice. All of it takes hours.
"""

from __future__ import annotations

import argparse

from paper_repro.harness import Job, Row, arguments, run
from paper_repro.rows import Deadline

EXPERIMENTS = (("Qwen3-4B", False), ("Qwen3-8B", False), ("Qwen3-14B", False), ("Qwen3-32B", True))
METHODS = (
    "plain",
    "checkpointing",
    "trl",
    "trl-offload-liger",
    "liger",
    "streambp",
    "streambp-lean",
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--budget-gib", type=float, default=79.0)
    parser.add_argument("--start", type=int, default=1024)
    parser.add_argument("--up-to", type=int, default=2**20)
    parser.add_argument("--halvings", type=int, default=3)
    parser.add_argument(
        "--shapes", nargs="+", help="of " + ", ".join(shape for shape, _ in EXPERIMENTS)
    )
    parser.add_argument("--methods", nargs="+", default=METHODS)
    args = parser.parse_args()
    if args.device != "cuda":
        parser.error(
            "the budget is a GPU's; on a CPU, `streambp plan` computes the longest sequence instead"
        )
    deadline = Deadline(args.minutes)
    for shape, lora in EXPERIMENTS:
        if args.shapes and shape not in args.shapes:
            continue
        for method in args.methods:
            longest = search(shape, lora, method, args, deadline)
            print(
                f"--- {shape} {'LoRA' if lora else 'full'} {method}: {longest} tokens on {args.budget_gib} GiB",
                flush=True,
            )


def search(
    shape: str, lora: bool, method: str, args: argparse.Namespace, deadline: Deadline
) -> str:
    """The longest that ran, or why none did."""

    def attempt(length: int) -> Row | None:
        """None: there was no time for it."""
        if not deadline.left:
            return None
        job = Job(
            "longest_sequence",
            method,
            shape,
            (length,),
            lora=lora,
            budget_gib=args.budget_gib,
            seed=args.seed,
        )
        return run(job, args.output, deadline)[0]

    good, length = 0, args.start
    while length <= args.up_to:
        row = attempt(length)
        if row is None or row.status != "ok":
            break
        good, length = length, 2 * length
    else:
        return f"at least {good}"
    if row is None or row.status != "out of memory":
        return unfinished(good, row)
    bad = length
    for _ in range(args.halvings):
        middle = (good + bad) // 2 // 256 * 256
        if middle in (good, bad):
            break
        row = attempt(middle)
        if row is None or row.status not in ("ok", "out of memory"):
            return unfinished(good, row)
        good, bad = (middle, bad) if row.status == "ok" else (good, middle)
    return str(good)


def unfinished(good: int, row: Row | None) -> str:
    """What is known where a length neither ran nor ran out of memory."""
    reason = "no time was left" if row is None else row.status
    return f"at least {good} ({reason})" if good else reason


if __name__ == "__main__":
    main()
