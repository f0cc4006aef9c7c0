"""Mixtures of experts in half precision: is none refused, and is streaming as precise as the
unpatched model?

    python scripts/mixture_table.py --models 40 --out mixtures.jsonl      # goes on where the file ends
    python scripts/mixture_table.py --family gpt-oss --models 8 --out mixtures.jsonl
    python scripts/mixture_table.py --models 0 --out mixtures.jsonl       # the table of what the file holds

Random models with the hidden width, the routing and the head size of released ones, and with few
layers, few and narrow experts and a small vocabulary. Each takes one step in one chunk unpatched
and one streamed in several, in bfloat16 and with float32 weights under bfloat16 autocast, under
eager attention and torch's own; the truth is the unpatched model in float32. gpt-oss attends
eagerly alone.

[Note: choices of the truth] A router that ties to rounding sends a token to other experts in one
run than in another, streamed or not, and one such token makes an error three times as large. Few
tokens do it, so that the mean error of free runs is decided by luck: its own standard error is up
to 13 % with 32 models. So errors are compared where both sides choose as the truth does, which
leaves rounding alone, and how often a side would choose otherwise is counted apart, from scores
behind the same choices: both could show that streaming is less precise. The free runs' errors are
printed, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import streambp

LENGTH, CHUNK, VOCABULARY = 41, 16, 64
COMMON_SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NARROW_SIZES = {"intermediate_size": 64, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "intermediate_size": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 64,
    },
    "Qwen3-MoE": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
        **NARROW_SIZES,
    },
    "DeepSeek V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_key_value_heads": 8, "n_routed_experts": 32, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 128,
        "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
        **NARROW_SIZES,
    },
    "GLM 4.5": {
        "model_type": "glm4_moe", "hidden_size": 4096, "head_dim": 128, "n_routed_experts": 32, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, **NARROW_SIZES,
    },
    "Qwen3-Next": {
        "model_type": "qwen3_next", "hidden_size": 2048, "head_dim": 256, "num_experts": 64, "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"],
        **NARROW_SIZES,
    },
}  # fmt: skip
PRECISIONS = ("weights", "autocast")  # what is in bfloat16
SIDES = ("unpatched", "streamed")


def attentions_of(family: str) -> tuple[str, ...]:
    """The attention functions that a family can be loaded with and that run on any device."""
    return ("eager",) if family == "gpt-oss" else ("eager", "sdpa")


def build(family: str, seed: int, **overrides: Any) -> nn.Module:
    """A random float32 model in train mode, its norms and biases random, too."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**COMMON_SIZES, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(parameter.bfloat16())  # the truth has the same weights
    return model


class ReplayedTopK:
    """What `topk` chose in a first forward; later ones get it handed out. [Note: choices of the
    truth]

    Chunks come in any order, and again in backward: a token is known by its scores, which lie
    closest to its own of the first forward. Other tokens' lie a hundred times as far.

    otherwise: of a later forward, how many tokens of all routers would have chosen otherwise. off:
    how far scores lie from those of the first, squared and relative, in sum.
    """

    def __init__(self) -> None:
        self.choices: dict[
            tuple[int, ...], list[tuple[Tensor, Tensor]]
        ] = {}  # by the sizes of a token's scores
        self.counts = self.recording = True
        self.otherwise, self.off = 0, 0.0

    def topk(
        self, original: Callable[..., Any], router_scores: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of torch's: its result, or one with the indices of the first forward."""
        result = original(router_scores, *args, **kwargs)
        by_token = router_scores.detach().float().nan_to_num(neginf=0.0)  # groups that are masked
        by_token = by_token[0] if by_token.dim() == 3 and by_token.shape[0] == 1 else by_token
        scores = by_token.flatten(1)  # [N, ...]
        picks = result.indices.reshape(scores.shape[0], -1)  # [N, ...]
        choices = self.choices.setdefault((*by_token.shape[1:], picks.shape[1]), [])
        if self.recording:
            choices.append((scores, picks))
            return result
        first, first_picks = (torch.cat(parts) for parts in zip(*choices, strict=True))
        nearest = torch.cdist(scores, first).min(-1)  # [N]
        handed = first_picks[nearest.indices]
        if self.counts:
            self.otherwise += int((handed.sort(-1).values != picks.sort(-1).values).any(-1).sum())
            self.off += float(nearest.values.square().sum() / first.var(0).sum())
        handed = handed.reshape(result.indices.shape)
        return type(result)((router_scores.gather(-1, handed), handed))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within, it takes the place of torch's: a mode would not be there in backward."""
        self.otherwise, self.off = 0, 0.0
        original = torch.topk
        with (
            mock.patch.object(torch, "topk", functools.partial(self.topk, original)),
            mock.patch.object(torch.Tensor, "topk", lambda *a, **k: self.topk(original, *a, **k)),
        ):
            yield
        self.recording = False


def step(
    model: nn.Module, ids: Tensor, autocast: bool = False, choices: ReplayedTopK | None = None
) -> list[Tensor]:
    """The gradients of one step, parameter by parameter, in float32."""
    model.zero_grad(set_to_none=True)
    with contextlib.nullcontext() if choices is None else choices():
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if choices is not None:
            choices.counts = False  # of the recomputation
        loss.backward()
        if choices is not None:
            choices.counts = True
    gradients = [torch.zeros(()) if p.grad is None else p.grad.float() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def error(gradients: list[Tensor], truth: list[Tensor]) -> float:
    """Relative L2 error of the whole gradient."""
    off, size = (
        sum(float(x.double().square().sum()) for x in part)
        for part in (map(torch.sub, gradients, truth), truth)
    )
    return float((off / size) ** 0.5)


def measure(
    family: str, seed: int, precision: str, attention: str, models: dict[str, Any]
) -> dict[str, Any]:
    """One row: how far the streamed and the unpatched step lie from the truth; or what refused the
    model.

    Args:
        models: the model, its copy in bfloat16, tokens and truth, for the rows of one seed.
    """
    if not models:
        plain = build(family, seed)
        ids = torch.randint(3, VOCABULARY, (1, LENGTH))
        plain.set_attn_implementation("eager")  # type: ignore[operator]
        choices = ReplayedTopK()
        truth = step(plain, ids, choices=choices)
        models |= {"autocast": plain, "ids": ids, "truth": truth, "chosen": choices}
        models["weights"] = copy.deepcopy(plain).bfloat16()
    model, ids, truth, choices = models[precision], models["ids"], models["truth"], models["chosen"]
    model.set_attn_implementation(attention)
    row: dict[str, Any] = {
        "family": family,
        "seed": seed,
        "precision": precision,
        "attention": attention,
    }
    autocast = precision == "autocast"

    def compare(side: str) -> None:
        row[f"{side}_free"] = error(step(model, ids, autocast), truth)
        row[side] = error(step(model, ids, autocast, choices), truth)
        row[f"{side}_otherwise"], row[f"{side}_off"] = choices.otherwise, choices.off

    compare("unpatched")
    streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK, saves=()))
    try:
        compare("streamed")
        unchunked_reasons = [
            layer.reason for layer in streambp.describe(model).layers if layer.path != "streams"
        ]
        row |= {"whole": unchunked_reasons}
    except streambp.StreamBPError as refusal:
        row |= {"refused": f"{type(refusal).__name__}: {refusal}"}
    finally:
        streambp.unpatch(model)
    return row


def ratio(rows: list[dict[str, Any]], name: str) -> str:
    """Of the means over rows, streamed to unpatched, and its standard error."""
    ours, stock = ([float(row[name.format(side)]) for row in rows] for side in reversed(SIDES))
    mean = statistics.mean(stock)
    if mean == 0:
        return "-"
    mean_ratio = statistics.mean(ours) / mean
    deviations = [
        our - mean_ratio * stock_error for our, stock_error in zip(ours, stock, strict=True)
    ]
    return (
        f"{mean_ratio:.3f} ± "
        f"{statistics.stdev(deviations) / len(rows) ** 0.5 / mean if len(rows) > 1 else 0.0:.3f}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the models of each family, precision and attention; a ratio is one of means, with
    its standard error."""
    lines = [
        "| family | bfloat16 | attention | models | refused | not in chunks | error unpatched | "
        "streamed | ratio | scores, ratio | otherwise: unpatched | streamed | free runs, ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = [
        (family, precision, attention)
        for family in FAMILIES
        for precision in PRECISIONS
        for attention in attentions_of(family)
    ]
    for key in keys:
        some = [row for row in rows if (row["family"], row["precision"], row["attention"]) == key]
        ran = [row for row in some if "streamed" in row]
        cells = [*key, str(len(some)), str(len(some) - len(ran))]
        if ran:
            for row in ran:
                row |= {f"{side}_rms": row[f"{side}_off"] ** 0.5 for side in SIDES}
            cells += [str(sum(bool(row["whole"]) for row in ran))]
            cells += [f"{statistics.mean(row[side] for row in ran):.4f}" for side in SIDES]
            cells += [ratio(ran, "{}"), ratio(ran, "{}_rms")]
            cells += [str(sum(row[f"{side}_otherwise"] for row in ran)) for side in SIDES]
            cells += [ratio(ran, "{}_free")]
        lines += [f"| {' | '.join(cells)} |"] * bool(some)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=int, default=40, help="of each family (default %(default)s)"
    )
    parser.add_argument(
        "--family",
        choices=list(FAMILIES),
        action="append",
        help="this one alone; may be given again",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a file of rows, one JSON a line; rows that it has are not measured again",
    )
    arguments = parser.parse_args()
    rows = (
        [json.loads(line) for line in arguments.out.read_text().splitlines()]
        if arguments.out and arguments.out.exists()
        else []
    )
    measured_cases = {
        (row["family"], row["seed"], row["precision"], row["attention"]) for row in rows
    }
    start = time.monotonic()
    for seed in range(arguments.models):
        for family in arguments.family or FAMILIES:
            models: dict[str, Any] = {}
            for precision in PRECISIONS:
                for attention in attentions_of(family):
                    if (family, seed, precision, attention) in measured_cases:
                        continue
                    rows.append(measure(family, seed, precision, attention, models))
                    print(f"{time.monotonic() - start:6.0f} s  {rows[-1]}", flush=True)
                    if arguments.out:
                        with arguments.out.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    print(
        f"\ntorch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}, CPU\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
