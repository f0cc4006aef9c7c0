"""What the planner computes for the paper's tables: no GPU, no weights. Forward and backward, optimizer left out.

python -m paper_repro.predicted --output paper_repro/results      memory.csv and longest.csv, and the figure of the README

Figures of the planner are computed, not measured; docs/explanation/planner.md compares it with measurements. The
budgets of the longest sequences are 79 GiB of the GPU, as in `longest_sequence`, or 23, with 115 GiB of host memory.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from transformers import Qwen3Config

from paper_repro.shapes import SHAPES
from streambp.planner import Setting, plan
from streambp.planner.plan import Memory, longest_sequence
from streambp.planner.profile import Method, Profile, peak

GIB = 2**30
EXPERIMENTS = (  # shape, rank of LoRA, GiB of the GPU
    ("Qwen3-4B", None, 23.0),
    ("Qwen3-4B", None, 79.0),
    ("Qwen3-8B", None, 79.0),
    ("Qwen3-14B", None, 79.0),
    ("Qwen3-32B", 8, 79.0),
)
LENGTHS = [2**n for n in range(11, 21)]
BACKWARD_ONLY = Setting(optimizer=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--host-gib", type=float, default=115.0)
    args = parser.parse_args()
    curves, lengths = [], []
    for shape, lora, gpu in EXPERIMENTS:
        memory = Memory(int(gpu * GIB), int(args.host_gib * GIB), reserve=0.0)
        config = Qwen3Config(**SHAPES[shape], architectures=["Qwen3ForCausalLM"])
        profile = plan(
            config,
            gpu_memory=memory.gpu,
            host_memory=memory.host,
            reserve=0.0,
            setting=BACKWARD_ONLY,
            lora=lora,
        ).profile
        columns = {"shape": shape, "trained": f"LoRA {lora}" if lora else "full"}
        budget = {**columns, "gpu_gib": gpu, "host_gib": args.host_gib}
        for method in profile.methods:
            longest_plan = longest_sequence(profile, method, memory, BACKWARD_ONLY)
            lengths.append(
                {
                    **budget,
                    "method": longest_plan.method,
                    "tokens": longest_plan.seq_len,
                    "stopped_by": longest_plan.binds,
                }
            )
            if method.offload == "cpu":
                tokens_on_both = longest_on_both(profile, method, memory)
                lengths.append(
                    {
                        **budget,
                        "method": f"{longest_plan.method}, rest kept",
                        "tokens": tokens_on_both,
                        "stopped_by": "GPU and host",
                    }
                )
        if gpu == 79.0:
            curves += [{**columns, **row} for row in peaks(profile)]
    for row in lengths:
        print("  ".join(str(value) for value in row.values()))
    write(args.output / "predicted_longest.csv", lengths)
    write(args.output / "predicted_memory.csv", curves)
    draw(
        [row for row in curves if row["shape"] == "Qwen3-8B"], args.output / "predicted_memory.png"
    )


def longest_on_both(profile: Profile, method: Method, memory: Memory) -> int:
    """The longest sequence where tensors that the host cannot take stay on the GPU (`on_host_full="keep"`, the default).

    All of them count at the worst moment, though they go one layer after the other.
    """

    def fits(length: int) -> bool:
        at = peak(profile, method, length, 1024, BACKWARD_ONLY)
        assert memory.host is not None
        return at.total + max(0.0, at.host - memory.host) <= memory.usable

    low, high = 0, 2**24
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def peaks(profile: Profile) -> list[dict[str, object]]:
    """Peak GiB against length, in chunks of 8,192 tokens or the whole of a shorter sequence."""
    rows = []
    for method in profile.methods:
        for length in LENGTHS:
            at = peak(profile, method, length, min(8192, length), BACKWARD_ONLY)
            rows.append(
                {
                    "method": method.name,
                    "tokens": length,
                    "peak_gib": round(at.total / GIB, 3),
                    "host_gib": round(at.host / GIB, 3),
                }
            )
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


SHOWN = {
    "plain": "no checkpointing",
    "checkpointing": "gradient checkpointing",
    "checkpointing, fused head": "checkpointing, fused head",
    "streambp": "streambp",
    "streambp saves attn_out, offload": "streambp, attn_out saved, offload",
}


def draw(rows: list[dict[str, object]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.4))
    for method, label in SHOWN.items():
        points = [
            (row["tokens"], row["peak_gib"])
            for row in rows
            if row["method"] == method and row["peak_gib"] <= 400
        ]
        ours = method.startswith("streambp")
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=4,
            linewidth=2.6 if ours else 1.5,
            linestyle="-" if ours else "--",
            label=label,
        )
    axes.axhline(80, color="grey", linewidth=1)
    axes.annotate("80 GiB", (LENGTHS[0], 82), fontsize=8, color="grey")
    axes.set(
        xscale="log", xlabel="tokens in one sequence", ylabel="GPU memory (GiB)", ylim=(0, 140)
    )
    axes.set_xticks(LENGTHS, [f"{n // 1024}k" if n < 2**20 else "1M" for n in LENGTHS])
    axes.minorticks_off()
    axes.set_title(
        "Qwen3-8B, every parameter trained, forward and backward, bf16 (computed by the planner)",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.93))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
