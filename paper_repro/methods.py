"""The ways to train on long sequences that are compared, each as its users would set it up.

A method prepares a model and then gives per-token log-probabilities [B, T - 1], of which every objective is made; for the
loss of SFT it may have a shorter way (`nll`). Missing libraries, or a device that they do not support, raise `Unavailable`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from transformers import PreTrainedModel

import streambp
from paper_repro.figures import HEAD, LIGERS, NOT_FUSED, Figures


class Unavailable(Exception):  # noqa: N818 - a row of the table says so
    """This method cannot run here."""


class Method:
    """Gradient checkpointing as transformers does it, with logits for all tokens; the others change parts of it."""

    name = "checkpointing"
    streams = False

    def __init__(self, **options: Any) -> None:
        self.options = options

    @property
    def liger(self) -> bool:
        """Whether Liger's layer kernels belong to it."""
        return bool(self.options.get("liger"))

    def prepare(self, model: PreTrainedModel, chunk_size: int | str) -> None:
        self.checkpoint(model)

    def checkpoint(self, model: PreTrainedModel) -> None:
        """Turn gradient checkpointing on."""
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def nll(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Mean over the tokens; scalar."""
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    def log_probs(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """[B, T - 1] in float32."""
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
            ids.shape[0], -1
        )

    @contextlib.contextmanager
    def step(self, model: PreTrainedModel) -> Iterator[None]:
        """Around forward; what must be on for the saved tensors."""
        yield

    def missing(self, figures: Figures, device: str) -> list[str]:
        """Kernels that the method stands for and that did not run on a GPU."""
        if device != "cuda":
            return []
        problems = ["no fused kernel attended"] * (
            not any(name.endswith("backward") for name in figures.ran)
        )
        if self.liger:
            problems += [
                f"{name} did not run" for name in LIGERS.values() if name not in figures.ran
            ]
            rotated = any("rope" in kernel for kernel in figures.on_device)
            problems += ["Liger's rotation did not run"] * bool(figures.on_device and not rotated)
        return problems


class Plain(Method):
    name = "no checkpointing"

    def prepare(self, model: PreTrainedModel, chunk_size: int | str) -> None:
        pass


class StreamBP(Method):
    """untouched: `streambp.patch(model)`, and nothing else; Liger's kernels are the default where they are installed."""

    name = "streambp"
    streams = True

    @property
    def liger(self) -> bool:
        if self.options.get("untouched"):
            return importlib.util.find_spec("liger_kernel") is not None
        return super().liger

    def prepare(self, model: PreTrainedModel, chunk_size: int | str) -> None:
        if self.options.get("untouched"):
            streambp.patch(model)
            return
        if self.liger:
            liger(model, fused_linear_cross_entropy=False)
        settings = {
            "saves": (),
            "kernels": "own",
            **{name: value for name, value in self.options.items() if name != "liger"},
        }
        streambp.patch(model, streambp.StreamConfig(chunk_size=chunk_size, **settings))

    def log_probs(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, output_log_probs=True, use_cache=False).log_probs

    def missing(self, figures: Figures, device: str) -> list[str]:
        """Our head's kernels as well; blocks that torch merges are a slower path."""
        problems = super().missing(figures, device)
        if device == "cuda":
            problems += [
                f"{kernel} did not run in Triton" for kernel in HEAD if kernel not in figures.ran
            ]
            problems += [f"{NOT_FUSED} ran"] * (NOT_FUSED in figures.ran)
        return problems


class TRLHead(Method):
    """Checkpointing with TRL 1.16's chunked head; selective checkpointing, offloading and Liger's kernels as options."""

    name = "TRL head"

    def prepare(self, model: PreTrainedModel, chunk_size: int | str) -> None:
        if model.device.type != "cuda" and (self.options.get("offload") or self.liger):
            raise Unavailable("needs a GPU")
        try:
            from trl.models import enable_selective_activation_checkpointing
            from trl.trainer.utils import add_fused_lm_head
        except ImportError as error:
            raise Unavailable(f"TRL cannot be imported: {error}") from error
        if self.liger:
            liger(model, fused_linear_cross_entropy=False)
        if self.options.get("selective"):
            enable_selective_activation_checkpointing(model)
        add_fused_lm_head(unwrapped(model))
        self.checkpoint(model)

    def log_probs(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False).log_probs

    def nll(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        return -self.log_probs(model, ids).mean()

    @contextlib.contextmanager
    def step(self, model: PreTrainedModel) -> Iterator[None]:
        if not self.options.get("offload"):
            yield
            return
        from trl.models import get_act_offloading_ctx_manager

        with get_act_offloading_ctx_manager(model):
            yield


class Liger(Method):
    """Checkpointing, Liger's layer kernels and its fused linear cross-entropy."""

    name = "Liger"
    liger = True

    def prepare(self, model: PreTrainedModel, chunk_size: int | str) -> None:
        liger(model, fused_linear_cross_entropy=True)
        super().prepare(model, chunk_size)

    def log_probs(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        raise Unavailable("Liger's head gives a loss, no log-probabilities")


class ALST(Liger):
    """DeepSpeed's Arctic long-sequence pieces for one GPU: tiled MLP, Liger's head, checkpoints offloaded to the host."""

    name = "ALST pieces"

    def prepare(self, model: PreTrainedModel, chunk_size: int | str) -> None:
        try:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
        except ImportError as error:
            raise Unavailable("DeepSpeed is not installed") from error
        super().prepare(model, chunk_size)

        def tiled(mlp: Any, forward: Callable[[Any, Tensor], Tensor], x: Tensor) -> Tensor:
            shards = math.ceil(x.shape[1] / x.shape[2])
            result: Tensor = TiledMLP.apply(forward, mlp, x, shards, [])
            return result

        for layer in unwrapped(model).get_decoder().layers:
            forward = type(layer.mlp).forward
            layer.mlp.forward = lambda x, mlp=layer.mlp, forward=forward: tiled(mlp, forward, x)

    @contextlib.contextmanager
    def step(self, model: PreTrainedModel) -> Iterator[None]:
        with torch.autograd.graph.save_on_cpu(pin_memory=model.device.type == "cuda"):
            yield


def liger(model: PreTrainedModel, fused_linear_cross_entropy: bool) -> None:
    """Liger's kernels on one Qwen3 model."""
    if model.device.type != "cuda":
        raise Unavailable("needs a GPU")
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    except ImportError as error:
        raise Unavailable("liger-kernel is not installed") from error
    apply_liger_kernel_to_qwen3(
        fused_linear_cross_entropy=fused_linear_cross_entropy, model=unwrapped(model)
    )


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The causal language model itself, without peft's wrapper."""
    return model.base_model.model if hasattr(model, "peft_config") else model
