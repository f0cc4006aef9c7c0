"""Seconds and peak memory of SFT, DPO, GRPO and PPO steps, at the paper's settings: Qwen3-4B, 9,000 tokens.

python -m paper_repro.objectives --output paper_repro/results/objectives.csv                 one GPU
python -m paper_repro.objectives --output FILE --shape mini --lengths 2048 --device cpu      a CPU

The objective is computed from the policy's per-token log-probabilities by the same function for every method
(`paper_repro/losses.py`).
"""

from __future__ import annotations

from paper_repro.harness import Job, arguments, sweep
from paper_repro.losses import OBJECTIVES
from paper_repro.rows import Deadline


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="Qwen3-4B")
    parser.add_argument("--lengths", type=int, nargs="+", default=[9000])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--methods", nargs="+", default=["checkpointing", "trl", "streambp"])
    parser.add_argument(
        "--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES)
    )
    args = parser.parse_args()
    jobs = [
        Job(
            "objectives", method, args.shape, tuple(args.lengths), objective, args.lora, 2 if objective == "dpo" else 1,
            seed=args.seed, device=args.device,
        )
        for objective in args.objectives
        for method in args.methods
    ]  # fmt: skip
    sweep(jobs, args.output, Deadline(args.minutes))


if __name__ == "__main__":
    main()
