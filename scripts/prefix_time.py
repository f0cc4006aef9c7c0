"""Processor time of a training step as one packed row, against each row for itself: of rows that
share a prompt, or that are padded.

    OMP_NUM_THREADS=1 python scripts/prefix_time.py                            # 16 rows: a prompt of 256, completions of 32
    OMP_NUM_THREADS=1 python scripts/prefix_time.py --prompt 256 --completion 32 --rows 16 --layers 4 --hidden 256
    OMP_NUM_THREADS=1 python scripts/prefix_time.py --only padded --longest 1024

Labels are of completions. Printed are seconds of processor time, the minimum over all steps, of a
batch whose rows share their prompt and of one that shares nothing, and the ratio of rows to tree
beside the ratio of their tokens; the second is also what looking for prefixes costs where there are
none. Rows and tree take turns on one model, patched anew for each turn: a machine that is busy or
slows down does so for both, and the weights lie at the same addresses (two models of equal weights
differ by 5 % either way). The last columns are the look alone, in milliseconds, and the operators
that the tree's step runs and the rows' step does not, or the other way round: they do not depend on
how busy the machine is. Where nothing is shared these few, and the look, are all that sharing
costs.

Of padded rows the time as one packed row over that as rows stands beside the share of tokens that
are no padding. In layers with states each row is a chunk of its own: `states` says how many tokens'
time that costs.

The last lines are the cost where nothing is shared, measured inside the steps: processor time of a
call of the model that sharing adds, which is the call's without the rows' own forward, beside the
whole step's. Both steps run the same code but for that, so where a machine's processor time varies
by 5 % from step to step, this tells what the ratio cannot.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import streambp
from streambp.instance_forward import forwards
from streambp.model.wrappers import BackboneForward
from streambp.prefixes import calls as prefixes
from streambp.prefixes.calls import SharedPrefixes
from streambp.prefixes.tree import find_tree


def build(arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=arguments.hidden // 8,
    )
    return Qwen3ForCausalLM(config).train()


def batch_of(arguments: argparse.Namespace, shared: bool) -> dict[str, torch.Tensor]:
    length = arguments.prompt + arguments.completion
    ids = torch.randint(
        0, 1024, (arguments.rows, length), generator=torch.Generator().manual_seed(1)
    )
    if shared:
        ids[:, : arguments.prompt] = ids[0, : arguments.prompt].clone()
    labels = ids.clone()
    labels[:, : arguments.prompt] = -100
    return {"input_ids": ids, "labels": labels}


PADDED_LENGTHS = {  # of eight rows: each one's share of the longest
    "37 %": (1.0, 0.605, 0.4, 0.293, 0.234, 0.195, 0.146, 0.088),
    "60 %": (1.0, 0.938, 0.82, 0.664, 0.508, 0.391, 0.293, 0.195),
}


def padded_batch(longest: int, shares: tuple[float, ...]) -> dict[str, torch.Tensor]:
    """Rows that are padded on the right, [8, longest]."""
    lengths = torch.tensor([round(longest * share) for share in shares])
    mask = torch.arange(longest) < lengths[:, None]  # [8, longest]
    ids = torch.randint(
        0, 1024, mask.shape, generator=torch.Generator().manual_seed(1)
    ).masked_fill(~mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    model(**batch, use_cache=False).loss.backward()
    spent = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return spent


def turn(model: torch.nn.Module, batch: dict[str, torch.Tensor], share: bool) -> float:
    """The faster of two steps after one that admits the calls, in seconds of processor time."""
    streambp.patch(model, streambp.StreamConfig(saves=(), rows="packed" if share else "as_given"))
    step(model, batch)
    spent = min(step(model, batch), step(model, batch))
    streambp.unpatch(model)
    return spent


def search_time(batch: dict[str, torch.Tensor]) -> float:
    """Milliseconds of processor time that finding the tree takes, or that there is none; the
    minimum of some."""
    spent = []
    for _ in range(20):
        start = time.process_time()
        find_tree(batch["input_ids"])
        spent.append(time.process_time() - start)
    return 1000 * min(spent)


class Operators(TorchDispatchMode):
    """Counts the operators of a step by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(model: torch.nn.Module, batch: dict[str, torch.Tensor], share: bool) -> Counter[str]:
    """How often the second step of a patched model calls each operator."""
    streambp.patch(model, streambp.StreamConfig(saves=(), rows="packed" if share else "as_given"))
    step(model, batch)
    with Operators() as counted:
        step(model, batch)
    streambp.unpatch(model)
    return counted.counts


class TimedSharing:
    """Stands for the object that shares prefixes, and takes the time of its calls without the rows'
    own forward."""

    def __init__(self, prefixes: SharedPrefixes) -> None:
        self.prefixes = prefixes
        self.spent = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prefixes, name)

    def call(self, kwargs: Any, over: Any, *call_args: Any) -> Any:
        inside = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            start = time.process_time()
            try:
                return over(*args, **kwargs)
            finally:
                inside += time.process_time() - start

        start = time.process_time()
        output = self.prefixes.call(kwargs, timed, *call_args)
        self.spent = time.process_time() - start - inside
        return output


def added(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of processor time that sharing adds to a step which shares nothing, and the step's:
    the least of six each."""
    streambp.patch(model, streambp.StreamConfig(rows="packed"))
    wrapper = next(
        forward
        for part in model.modules()
        for forward in forwards(part)
        if isinstance(forward, BackboneForward)
    )
    step(model, batch)
    assert wrapper.prefixes is not None
    counted = TimedSharing(wrapper.prefixes)
    wrapper.prefixes = counted  # type: ignore[assignment]
    steps = [(step(model, batch), counted.spent) for _ in range(6)]
    streambp.unpatch(model)
    return min(spent for _, spent in steps), min(step_time for step_time, _ in steps)


def ratio_of(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], repeats: int
) -> tuple[float, float]:
    """Seconds of processor time as rows and as one packed row, each the least of its turns."""
    pairs = [(turn(model, batch, False), turn(model, batch, True)) for _ in range(repeats)]
    plain, packed = (min(times) for times in zip(*pairs, strict=True))
    return plain, packed


def shared(model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """Rows that share a prompt, and rows that share nothing."""
    per_row = arguments.prompt + arguments.completion
    for shares in (True, False):
        batch = batch_of(arguments, shares)
        plain, packed = ratio_of(model, batch, arguments.turns)
        tokens = arguments.prompt * shares + arguments.rows * (per_row - arguments.prompt * shares)
        label = "prompt shared" if shares else "nothing shared"
        times = f"rows {plain:.3f} s, tree {packed:.3f} s, ratio {plain / packed:.3f}"
        counts = operators(model, batch, False), operators(model, batch, True)
        added_calls, fewer = (sum((counts[i] - counts[1 - i]).values()) for i in (1, 0))
        calls = f"operators {sum(counts[0].values())}, {added_calls} more and {fewer} fewer"
        ratio = arguments.rows * per_row / tokens
        print(
            f"{label}: {times}, ratio of tokens {ratio:.2f}, "
            f"look {search_time(batch):.2f} ms, {calls}",
            flush=True,
        )


def padded(model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """Rows with padding on the right."""
    for name, shares in PADDED_LENGTHS.items():
        batch = padded_batch(arguments.longest, shares)
        plain, packed = ratio_of(model, batch, arguments.turns)
        share = float(batch["attention_mask"].double().mean())
        times = f"rows {plain:.3f} s, packed {packed:.3f} s, packed / rows {packed / plain:.3f}"
        print(
            f"{name} tokens: {times}, share of tokens {share:.3f}, ratio of both "
            f"{packed / plain / share:.3f}",
            flush=True,
        )


def states(_: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """A model of layers with states, in which each row is a chunk: what a chunk costs beside its
    tokens."""
    config = Lfm2Config(
        vocab_size=1024,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_attention_heads=8,
        num_key_value_heads=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_hidden_layers=4,
    )
    model = Lfm2ForCausalLM(config).train()
    prefixes.CHUNK_OVERHEAD_TOKENS = 0
    for rows, longest in ((64, 16), (32, 64), (8, 256)):
        batch = padded_batch(longest, tuple((row + 1) / rows for row in range(rows)))
        plain, packed = ratio_of(model, batch, max(1, arguments.turns // 3))
        tokens = int(batch["attention_mask"].sum())
        of_a_token = plain / batch["input_ids"].numel()
        chunk = (packed - of_a_token * tokens) / (rows - 1)
        times = f"rows {plain:.3f} s, packed {packed:.3f} s"
        costs = (
            f"a chunk costs {1000 * chunk:.2f} ms beside its tokens, as {chunk / of_a_token:.0f} "
            "tokens do"
        )
        print(f"layers with states, {rows} rows of up to {longest}: {times}; {costs}", flush=True)


def nothing_shared(model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """What the look costs where nothing is saved: rows without a mask, and with one of ones."""
    plain = batch_of(arguments, False)
    masks: dict[str, dict[str, torch.Tensor]] = {
        "no mask": {},
        "a mask of ones": {"attention_mask": torch.ones_like(plain["input_ids"])},
    }
    for name, mask in masks.items():
        more_time, step_time = added(model, {**plain, **mask})
        ratio = 1 + more_time / step_time
        step_of = f"sharing adds {1000 * more_time:.2f} ms to a step of {step_time:.3f} s"
        print(f"nothing shared, {name}: {step_of}, ratio {ratio:.4f}", flush=True)


BENCHMARK_PARTS = {"shared": shared, "padded": padded, "states": states, "nothing": nothing_shared}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = {"prompt": 256, "completion": 32, "rows": 16, "layers": 4, "hidden": 256}
    for name, default in {**shape, "longest": 512, "turns": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=BENCHMARK_PARTS, default=list(BENCHMARK_PARTS))
    arguments = parser.parse_args()
    model = build(arguments)
    for name in arguments.only:
        BENCHMARK_PARTS[name](model, arguments)


if __name__ == "__main__":
    main()
