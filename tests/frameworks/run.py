"""Train with a real framework, with and without streambp, and compare. By hand, at a release; needs
a package index.

    python -m tests.frameworks.run llama-factory --folder /somewhere/with/10GB
    python -m tests.frameworks.run ms-swift --kinds dpo --python python3.11

Makes an environment with the framework's own pins and a CPU build of torch, writes a tiny Qwen3 and
data, then runs the framework's own command: plain, with `streambp launch` before it, and with the
framework's plugin where there is one. Prints a table; exit code 1 if a run failed or is out of
bounds. What it logs beside losses and gradient norms is compared as well, of training and of
evaluation: metrics as a difference relative to the larger of 1 and the metric.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.frameworks.environments import default_python, make, name_of, versions
from tests.frameworks.programs import CHUNK, FRAMEWORKS, KINDS, STEPS, Framework, Kind

LOSSES, WEIGHTS = 1e-5, 1e-4  # absolute; of the distance moved
# DPO's loss is beta = 0.1 times four sums of log-probabilities near -2,000, where float32 numbers
# are 1.2e-4 apart.
DPO_LOSSES = 0.1 * 4 * 2.0**-13
HEADING = (
    "| run | by | losses | gradient norms, relative | weights / distance moved | metrics | report "
    "|\n|---|---|---|---|---|---|---|"
)
# what `describe` says; the second of built logits
LAYERS, LOGITS = ("streams: 3 x Qwen3DecoderLayer", "costs memory")
# clocks; and what has a column
UNMEASURED = re.compile("time|speed|per_sec|memory|^loss$|^eval_loss$|^grad_norm$")


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What a run left: losses [STEPS] and those of evaluations, gradient norms [STEPS], the other
    metrics that it logged, by entry and name, the weights it saved, and what it printed."""

    losses: list[float]
    norms: list[float]
    metrics: dict[tuple[int, str], float]
    weights: dict[str, torch.Tensor]
    log: str


@dataclasses.dataclass(frozen=True)
class Row:
    """How far a run with streambp is from the one without; lacking: the metrics that only the one
    without logged."""

    kind: str
    way: str
    loss: float
    norm: float
    weights: float
    metrics: float
    lacking: tuple[str, ...]
    streams: bool
    head: str

    @property
    def right(self) -> bool:
        bound = DPO_LOSSES if KINDS[self.kind].stage == "dpo" else LOSSES
        numbers = self.loss <= bound and self.metrics <= bound and self.weights <= WEIGHTS
        return (
            numbers
            and self.streams
            and LOGITS not in self.head
            and not any(n.startswith("eval") for n in self.lacking)
        )

    def __str__(self) -> str:
        layers = "all stream" if self.streams else "NOT ALL STREAM"
        metrics = f"{self.metrics:.1e}" + (
            f", without {', '.join(self.lacking)}" if self.lacking else ""
        )
        return (
            f"| {self.kind} | {self.way} | {self.loss:.1e} | {self.norm:.1e} | {self.weights:.1e} "
            f"| {metrics} | "
            f"{layers}; {self.head} |" + ("" if self.right else " OUT OF BOUNDS")
        )


def train(
    command: list[str], output: Path, folder: Path, variables: dict[str, str]
) -> TrainingResult:
    """Run a program to its end; everything it prints goes into a file beside its output."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.with_suffix(".log")
    plain = {n: v for n, v in os.environ.items() if not n.startswith(("STREAMBP", "PYTHON"))}
    caches = {"HF_HOME": str(folder / "cache"), "MODELSCOPE_CACHE": str(folder / "cache")}
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "disabled",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    with log.open("w") as file:
        code = subprocess.run(
            command,
            cwd=output.parent,
            env={**plain, **caches, **quiet, **variables},
            stdout=file,
            stderr=file,
            check=False,
        ).returncode
    if code != 0:
        raise RuntimeError(
            f"exit code {code}: {' '.join(command)}\n{log.read_text()[-3000:]}\n(all of it: {log})"
        )
    return read(output, log.read_text())


def read(output: Path, log: str) -> TrainingResult:
    """What a run left in its folder."""
    state = json.loads(
        max(output.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime).read_text()
    )
    entries = [entry for entry in state["log_history"] if "loss" in entry or "eval_loss" in entry]
    steps = [entry for entry in entries if "loss" in entry]
    if len(steps) != STEPS:
        raise RuntimeError(f"{len(steps)} steps in the log of {output}, not {STEPS}")
    saved = max(
        output.rglob("*model.safetensors"),
        key=lambda path: (f"checkpoint-{STEPS}" in str(path), len(str(path))),
    )
    numbers = [(at, *pair) for at, entry in enumerate(entries) for pair in entry.items()]
    return TrainingResult(
        [value for _, name, value in numbers if name in ("loss", "eval_loss")],
        [step.get("grad_norm", math.nan) for step in steps],
        {
            (at, n): float(v)
            for at, n, v in numbers
            if isinstance(v, (int, float)) and not UNMEASURED.search(n)
        },
        load_file(saved),
        log,
    )


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return math.sqrt(
        sum(float((first[name].double() - second[name].double()).pow(2).sum()) for name in second)
    )


def training_distance(weights: dict[str, torch.Tensor], inputs: Path) -> float:
    """How far training went. LoRA's B starts at zero; how far its A went is left out, which makes
    the bound narrower."""
    b = {name: weight for name, weight in weights.items() if "lora_B" in name}
    if b:
        return distance({name: torch.zeros_like(weight) for name, weight in b.items()}, b)
    return distance(load_file(inputs / "model" / "model.safetensors"), weights)


def metric_distance(ours: TrainingResult, stock: TrainingResult) -> float:
    """The largest distance of metrics that both logged, relative to the larger of 1 and the metric;
    NaN is equal to NaN."""
    pairs = [(value, ours.metrics[at]) for at, value in stock.metrics.items() if at in ours.metrics]
    pairs = [pair for pair in pairs if not all(map(math.isnan, pair))]
    return max(
        (math.inf if math.isnan(a - b) else abs(a - b) / max(1.0, abs(a)) for a, b in pairs),
        default=0.0,
    )


def compare(kind: str, way: str, ours: TrainingResult, stock: TrainingResult, inputs: Path) -> Row:
    if set(ours.weights) != set(stock.weights):
        raise RuntimeError(
            f"{kind}: the weights saved are not the same: {set(ours.weights) ^ set(stock.weights)}"
        )
    # the last: of the end, or of the first step without launch
    report = ours.log.rpartition("streambp: process")[2]
    head = [
        line.split("head ", 1)[1].strip()
        for line in report.splitlines()
        if line.startswith("streambp:   head ")
    ]
    return Row(
        kind,
        way,
        max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)),
        max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours.norms, stock.norms, strict=True)),
        distance(ours.weights, stock.weights) / training_distance(stock.weights, inputs),
        metric_distance(ours, stock),
        tuple(dict.fromkeys(name for at, name in stock.metrics if (at, name) not in ours.metrics)),
        LAYERS in report and "checkpoints:" not in report,
        ", ".join(dict.fromkeys(head)),
    )


def run(framework: Framework, kinds: list[str], folder: Path, binaries: Path) -> list[Row]:
    inputs = folder / "inputs"
    subprocess.run(
        [str(binaries / "python"), str(Path(__file__).with_name("inputs.py")), str(inputs)],
        check=True,
    )
    launch = [str(binaries / "streambp"), "launch", "--chunk-size", str(CHUNK), "--"]

    def command_of(words: list[str]) -> list[str]:
        return [str(binaries / words[0]), *words[1:]]

    rows = []
    for name in kinds:
        kind: Kind = KINDS[name]
        output = {way: folder / "runs" / f"{name}-{way}" for way in ("plain", "launch", "plugin")}
        stock = train(
            command_of(framework.command(kind, inputs, output["plain"])),
            output["plain"],
            folder,
            {},
        )
        words = command_of(framework.command(kind, inputs, output["launch"]))
        ours = train([*launch, *words], output["launch"], folder, {})
        rows.append(compare(name, "launch", ours, stock, inputs))
        print(rows[-1], flush=True)
        if framework.plugin is not None:
            words, variables = framework.plugin(kind, inputs, output["plugin"])
            ours = train(command_of(words), output["plugin"], folder, variables)
            rows.append(compare(name, "plugin", ours, stock, inputs))
            print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.frameworks.run", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("framework", choices=sorted(FRAMEWORKS))
    parser.add_argument(
        "--folder", type=Path, help="for environments and runs, kept (default: a temporary one)"
    )
    parser.add_argument(
        "--python", default=default_python(), help="the interpreter to make the environment with"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="of these (default: all)")
    arguments = parser.parse_args()
    framework = FRAMEWORKS[arguments.framework]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary).absolute() / arguments.framework
        binaries = make(framework, folder / "environment", arguments.python)
        names = [
            name_of(framework.framework),
            "torch",
            "transformers",
            "trl",
            "peft",
            "accelerate",
            "streambp",
        ]
        print(
            ", ".join(f"{name} {version}" for name, version in versions(binaries, *names).items())
        )
        stands = (
            f"; empty stand-ins for {', '.join(framework.stand_ins)}" if framework.stand_ins else ""
        )
        print(f"float32, CPU, SGD, {STEPS} steps, chunks of {CHUNK} tokens{stands}")
        print(HEADING)
        rows = run(framework, arguments.kinds.split(","), folder, binaries)
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
