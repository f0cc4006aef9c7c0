"""One tree's process of scripts/compare_commits.py: it builds a case's model and batch, and runs
two steps.

It is started as a file, so that `streambp` is that of the tree in PYTHONPATH and nothing else is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streambp

ROOT = Path(__file__).resolve().parent.parent
CHUNK, LENGTH = 5, 21
IMAGE_TOKEN = 50  # the token in the place of an image's patches
DENSE_FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "glm4", "olmo2", "cohere", "starcoder2", "gpt2",
    "gpt_neox", "opt", "bloom", "falcon", "gptj",
)  # fmt: skip
MIXTURE_FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
RECURRENT_FAMILIES = (
    "qwen3_next", "qwen3_5_text", "mamba2", "bamba", "jamba", "falcon_h1", "lfm2", "recurrent_gemma", "nemotron_h",
    "minimax",
)  # fmt: skip
FAMILIES = (
    *DENSE_FAMILIES,
    *MIXTURE_FAMILIES,
    "deepseek_v3",
    "gemma4_text",
    *RECURRENT_FAMILIES,
    "llava",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, batch and configuration."""

    family: str
    mode: str = "plain"
    saves: str = "none"
    offload: str = "none"
    dtype: str = "float64"

    def __str__(self) -> str:
        storage = "offloaded" if self.offload == "cpu" else "kept"
        return f"{self.family} {self.mode}, saves {self.saves}, {storage}, {self.dtype}"


def use_tests_of_this_tree() -> None:
    """Make `tests` this tree's package, whatever PYTHONPATH says; its helpers import no
    streambp."""
    spec = importlib.util.spec_from_file_location(
        "tests", ROOT / "tests" / "__init__.py", submodule_search_locations=[str(ROOT / "tests")]
    )
    assert spec is not None
    sys.modules["tests"] = importlib.util.module_from_spec(spec)


def build(family: str, dtype: torch.dtype, seed: int) -> nn.Module:
    """A tiny model in train mode; nothing in it is zero by its initialization."""
    from tests import zoo

    if family == "llava":
        from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

        vision = CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
            projection_dim=16,
        )  # fmt: skip
        text = zoo.tiny_config("llama")
        config = LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=IMAGE_TOKEN,
            vision_feature_layer=-1,
        )
        torch.manual_seed(seed)
        model: nn.Module = LlavaForConditionalGeneration(config).to(dtype).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1 * (parameter.dim() <= 1))
        return model
    routed = {"output_router_logits": True} if family in MIXTURE_FAMILIES else {}
    return zoo.build(family, dtype, seed, **routed)


def batch_of(family: str, mode: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Two rows of random tokens. Padded: the first on its left, the second on its right."""
    from tests.families import make_batch

    if mode == "padded":
        left, right = (make_batch(f"{side}-padded", LENGTH, seed) for side in ("left", "right"))
        batch = {name: torch.stack([left[name][0], right[name][1]]) for name in left}
    else:
        batch = make_batch(mode, LENGTH, seed)
    if family == "llava":
        ids = batch["input_ids"]
        ids[ids == IMAGE_TOKEN] -= 1
        ids[:, 8:12] = IMAGE_TOKEN
        batch["labels"] = batch["labels"].masked_fill(ids == IMAGE_TOKEN, -100)
        generator = torch.Generator().manual_seed(seed)
        batch["pixel_values"] = torch.randn(
            2, 3, 8, 8, generator=generator, dtype=torch.float64
        ).to(dtype)
    return batch


def documents_apart(batch: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each document of packed rows as a row of its own, with its share of the labels."""
    labelled = float((batch["labels"] != -100).sum())  # no document's first token is
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in itertools.pairwise(starts):
            document = {name: value[row : row + 1, start:end] for name, value in batch.items()}
            share = float((document["labels"] != -100).sum()) / labelled
            if share:
                yield share, document


@functools.lru_cache(maxsize=4)
def tensors_of(
    case: Case, settings: tuple[tuple[str, Any], ...] | None
) -> tuple[dict[str, Tensor], str]:
    """The losses and gradients of two steps, and what `describe` says after them.

    Without settings unpatched, packed rows of layers with states as rows of their own.
    """
    from tests.oracle import lift_float32_casts

    dtype = getattr(torch, case.dtype)
    seed = zlib.crc32(f"{case.family} {case.mode}".encode())
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            lift_float32_casts(patch)
            torch.set_default_dtype(torch.float64)
        try:
            model, batch = (
                build(case.family, dtype, seed),
                batch_of(case.family, case.mode, dtype, seed),
            )
            if settings is not None:
                saves = () if case.saves == "none" else (case.saves,)
                config_settings: dict[str, Any] = {
                    "chunk_size": CHUNK,
                    "saves": saves,
                    "offload": case.offload,
                    **dict(settings),
                }
                streambp.patch(model, streambp.StreamConfig(**config_settings))
                return steps(model, [(1.0, batch)]), str(streambp.describe(model))
            splits_documents = case.mode == "packed" and case.family in RECURRENT_FAMILIES
            return steps(
                model, list(documents_apart(batch)) if splits_documents else [(1.0, batch)]
            ), ""
        finally:
            torch.set_default_dtype(torch.float32)


def steps(model: nn.Module, parts: list[tuple[float, dict[str, Any]]]) -> dict[str, Tensor]:
    """Loss and gradients of the parts' weighted sum, by name, for each of two steps."""
    tensors = {}
    for step in ("first", "warm"):
        total = torch.zeros(())
        for share, batch in parts:
            loss = model(**batch, use_cache=False).loss
            (loss if share == 1.0 else loss * share).backward()
            total = loss.detach() if share == 1.0 else total + loss.detach() * share
        tensors[f"{step} loss"] = total
        tensors |= {
            f"{step} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None
        }
        model.zero_grad(set_to_none=True)
    return tensors


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Of a case: the digests of its tensors, or the error that it raises. The tensors go to the
    file that is named."""
    try:
        settings = request["settings"]
        tensors, text = tensors_of(
            Case(**request["case"]), None if settings is None else tuple(settings.items())
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "tensors": {}, "text": ""}
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        return {
            "error": f"not finite: {bad[0]} and {len(bad) - 1} others",
            "tensors": {},
            "text": text,
        }
    if request["file"]:
        torch.save(tensors, request["file"])
    return {
        "error": "",
        "tensors": {name: digest(tensor) for name, tensor in tensors.items()},
        "text": text,
    }


def serve() -> None:
    """Answer each line of the input with a line; what models print goes to the error output."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    use_tests_of_this_tree()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        json.dumps(str(Path(streambp.__file__).resolve().parent.parent)), file=replies, flush=True
    )
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    serve()
