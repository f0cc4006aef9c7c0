"""Seconds and memory of whole models where minutes on a GPU are few: `python
tests/gpu/timed_rows.py FOLDER [NAME ...]`.

Each row is a job of paper_repro/harness.py, in a fork of this process, which has imported
everything and does not touch the GPU; where CUDA does not start in a fork, in a new process. Names
are those of `JOBS`, * stands for anything. Rows go to FOLDER/timed.csv as they are measured; those
for which no time is left are named.

Exit code 0 if every row's status is "ok".
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks for devices without touching one
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from paper_repro.harness import ROOT, Job, run
from paper_repro.rows import Deadline, add_minutes, run_child

OURS, PEER = "streambp-default", "trl-selective-liger"
PEFT_METHOD = "streambp-auto-liger"  # the default but for adapters, which are peft's own code
IMPORTED_MODULES = ("transformers.models.qwen3.modeling_qwen3",)
SHORT_LENGTHS = (2048, 4096, 16384)


def job(method: str, *lengths: int, shape: str = "Qwen3-8B", **settings: object) -> Job:
    return Job("timed", method, shape, lengths, until_oom=False, **settings)  # type: ignore[arg-type]


JOBS = {
    "short ours": job(OURS, *SHORT_LENGTHS),
    "short peer": job(PEER, *SHORT_LENGTHS),
    "LoRA ours": job(OURS, 16384, lora=True),
    "LoRA peer": job(PEER, 16384, lora=True),
    "LoRA own": job(PEFT_METHOD, 16384, lora=True),
    "own ours": job("streambp-auto", 4096, 16384),
    "own peer": job("trl-selective", 4096, 16384),
    "own checkpointing": job("checkpointing", 4096, 16384),
    "moved ours": job(OURS, 16384, moved=True),
    "AdamW ours": job(OURS, 4096, shape="Qwen3-4B", adamw=True),
    "AdamW peer": job(PEER, 4096, shape="Qwen3-4B", adamw=True),
    "accumulation ours": job(OURS, 4096, micro_batches=2),
    "short Liger": job("liger", *SHORT_LENGTHS),
    "64k lean": job("streambp-lean-liger", 65536, steps=2),
    "64k ours": job(OURS, 65536, steps=2),
    "64k peer": job(PEER, 65536, steps=2),
    "64k LoRA ours": job(OURS, 65536, lora=True, steps=2),
    "64k LoRA peer": job(PEER, 65536, lora=True, steps=2),
    "64k LoRA own": job(PEFT_METHOD, 65536, lora=True, steps=2),
    "128k LoRA ours": job(OURS, 131072, lora=True, steps=2),
    "128k lean": job("streambp-lean-liger", 131072, steps=2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["*"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and lengths, to try the script itself"
    )
    add_minutes(parser)
    args = parser.parse_intermixed_args()
    for module in IMPORTED_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    deadline, skipped_jobs, good = Deadline(args.minutes), [], True
    forks = not run_child(
        lambda: torch.zeros(1, device=args.device) + 1, ROOT, deadline, print
    ).code
    print(
        f"{torch.__version__}, jobs run in {'forks' if forks else 'processes of their own'}",
        flush=True,
    )
    for name, job in JOBS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in args.names):
            continue
        if not deadline.left:
            skipped_jobs.append(name)
            continue
        print(f"-- {name}, {deadline.left:.0f} s left", flush=True)
        small = {"shape": "mini", "lengths": (64, 200)} if args.tiny else {}
        settings = {**vars(job), "device": args.device, **small}
        good &= all(
            row.status == "ok"
            for row in run(Job(**settings), args.folder / "timed.csv", deadline, forks)
        )
    if skipped_jobs:
        print(
            f"not run, {deadline.minutes:g} minutes are over: {', '.join(skipped_jobs)}", flush=True
        )
    return int(not good or bool(skipped_jobs))


if __name__ == "__main__":
    sys.exit(main())
