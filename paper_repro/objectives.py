"""Seconds and peak memory of SFT, DPO, GRPO and PPO steps, at the paper's settings: Qwen3-4B, 9,000 tokens.

python -m paper_repro.objectives --output paper_repro/results/objectives.csv                 one GPU
python -m paper_repro.objectives --output FILE --shape mini --lengths 2048 --device cpu      a CPU

The objective is computed from the policy's per-token log-probabilities by the same function for every method
(`paper_repro/losses.py`).
"""

from __future__ import annotations

from paper_repro.harness import Job, arguments, run
from paper_repro.losses import OBJECTIVES


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="Qwen3-4B")
    parser.add_argument("--lengths", type=int, nargs="+", default=[9000])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--methods", nargs="+", default=["checkpointing", "trl", "streambp"])
    args = parser.parse_args()
    for objective in OBJECTIVES:
        for method in args.methods:
            rows = 2 if objective == "dpo" else 1
            job = Job(
                "objectives", method, args.shape, tuple(args.lengths), objective, args.lora, rows,
                seed=args.seed, device=args.device,
            )  # fmt: skip
            run(job, args.output)


if __name__ == "__main__":
    main()
