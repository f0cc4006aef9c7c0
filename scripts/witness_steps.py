"""Does the witness raise where nothing changes? `python scripts/witness_steps.py [--steps 2000]
[CASE ...]`

Each case trains a small model in chunks, with dropout where its attention has it, on batches of
random sizes, in bfloat16 and float16: of all parameters, and by autocast, under a GradScaler in
float16. All saves take turns. The script prints how many tensors were compared, how many alarms
there were, and the largest difference, in units of what is allowed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {
    "dropout": "qwen3",
    "moe": "qwen3_moe",
    "shared experts": "deepseek_v3",
    "hybrid": "lfm2",
    "post-norm": "gemma3_text",
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SAVES: tuple[Any, ...] = ((), ("attn_out",), ("attn_out", "kv", "self_attn.*"), "auto")


def run(family: str, dtype: torch.dtype, autocast: bool, steps: int) -> tuple[int, int, float]:
    """Tensors compared, alarms, and the largest difference in units of the limit."""
    import streambp
    from streambp.layer import witness
    from tests import zoo

    count, furthest = 0, 0.0
    real, at_once = witness._differ, witness.equal_on_cpu

    def differ(group: list[Any], kind: torch.dtype, tolerance: float) -> torch.Tensor:
        nonlocal count, furthest
        count += len(group)
        for comparison in group:
            forward_value, recomputed = (
                comparison.forward_value.double(),
                comparison.backward_value.double(),
            )
            unchanged = (
                torch.zeros_like(recomputed)
                if comparison.unchanged is None
                else comparison.unchanged.double()
            )
            limit = (
                tolerance * (recomputed - unchanged).norm()
                + torch.finfo(kind).eps * recomputed.norm()
            )
            if bool(limit > 0):
                furthest = max(furthest, float((forward_value - recomputed).norm() / limit))
        return real(group, kind, tolerance)

    witness._differ = differ
    # how far apart they are is to be seen
    witness.equal_on_cpu = lambda forward, recomputed: False
    alarms, random = 0, torch.Generator().manual_seed(1)
    try:
        for saves in SAVES:
            model: Any = zoo.build(
                family, torch.float32 if autocast else dtype, attention_dropout=0.1
            ).train()
            streambp.patch(model, streambp.StreamConfig(chunk_size=8, saves=saves, rows="as_given"))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            scaler = torch.amp.GradScaler("cpu", enabled=autocast and dtype == torch.float16)
            for _ in range(steps // len(SAVES)):
                length, rows = (
                    int(torch.randint(low, high, (), generator=random))
                    for low, high in ((2, 40), (1, 4))
                )
                tokens = torch.randint(3, 50, (rows, length), generator=random)
                with torch.autocast("cpu", dtype, enabled=autocast):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                try:
                    scaler.scale(loss).backward()
                except streambp.errors.BackwardError as error:
                    alarms += 1
                    print(error, flush=True)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
    finally:
        witness._differ, witness.equal_on_cpu = real, at_once
    return count, alarms, furthest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(FAMILIES))
    parser.add_argument(
        "--steps", type=int, default=2000, help="of each case and dtype (default %(default)s)"
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for case in arguments.cases or FAMILIES:
        for (name, dtype), autocast in itertools.product(DTYPES.items(), (False, True)):
            count, alarms, furthest = run(FAMILIES[case], dtype, autocast, arguments.steps)
            print(
                f"{case:15} {'autocast ' * autocast + name:17} {arguments.steps} steps: {count} "
                f"compared, {alarms} alarms, {furthest:.3f} of the limit",
                flush=True,
            )


if __name__ == "__main__":
    main()
