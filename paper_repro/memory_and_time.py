"""Peak memory and seconds of forward and backward against the sequence length, every method in the same run.

python -m paper_repro.memory_and_time --output paper_repro/results/memory_and_time.csv       one GPU, Qwen3-8B
python -m paper_repro.memory_and_time --output FILE --methods streambp trl --lengths 65536 131072     some rows
python -m paper_repro.memory_and_time --output FILE --shape mini --lengths 1024 2048 4096 8192 --device cpu

Each method has a process of its own and goes through the lengths until it runs out of memory; the weights are random. All
of it takes over an hour on one GPU: what is left after --minutes is named, for another call.
"""

from __future__ import annotations

from paper_repro.harness import Job, arguments, sweep
from paper_repro.recipes import METHODS
from paper_repro.rows import Deadline

LENGTHS = [4096, 8192, 16384, 32768, 65536, 131072, 262144]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="Qwen3-8B")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--chunk-size", type=lambda text: text if text == "auto" else int(text), default="auto"
    )
    args = parser.parse_args()
    jobs = [
        Job(
            "memory_and_time",
            method,
            args.shape,
            tuple(args.lengths),
            lora=args.lora,
            chunk_size=args.chunk_size,
            seed=args.seed,
            device=args.device,
        )
        for method in args.methods
    ]
    sweep(jobs, args.output, Deadline(args.minutes))


if __name__ == "__main__":
    main()
