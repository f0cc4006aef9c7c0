"""The methods by name, and the recipe of axolotl, which no library has in one piece."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from paper_repro.methods import ALST, Liger, Method, Plain, StreamBP, TRLHead, unwrapped

LARGE = 2**20  # bytes; what is smaller stays on the device


class Axolotl(TRLHead):
    """axolotl's recipe for long sequences, of public parts: layer inputs and attention outputs leave for the host, the MLP
    runs in tiles of as many tokens as it has features and is recomputed tile by tile, TRL's head makes the loss, and
    Liger's layer kernels run where there is a GPU."""

    name = "axolotl's recipe"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stash = Stash()

    def prepare(self, model: PreTrainedModel, chunk_size: int | str) -> None:
        super().prepare(model, chunk_size)
        for layer in unwrapped(model).get_decoder().layers:
            real = layer.mlp.forward
            layer.mlp.forward = lambda x, real=real: in_tiles(real, x)

    def checkpoint(self, model: PreTrainedModel) -> None:
        settings = {"use_reentrant": False, "context_fn": self.contexts}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """For one layer: one mode keeps what its attention gives, the other gives it to the recomputation."""
        saved: list[Any] = []
        return Keeping(self.stash, saved), Giving(self.stash, saved)

    @contextlib.contextmanager
    def step(self, model: PreTrainedModel) -> Iterator[None]:
        self.stash.empty()
        if model.device.type != "cuda":
            with torch.autograd.graph.save_on_cpu():
                yield
            return
        from trl.models import get_act_offloading_ctx_manager

        with get_act_offloading_ctx_manager(model):
            yield


def in_tiles(mlp: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The MLP of x [B, T, h], tile by tile."""
    tiles = x.chunk(math.ceil(x.shape[1] / x.shape[2]), 1)
    return torch.cat([checkpoint(mlp, tile, use_reentrant=False) for tile in tiles], 1)


@dataclasses.dataclass(frozen=True)
class Away:
    """Stands for a tensor of the stash."""

    number: int


class Stash:
    """Tensors on the host, which come back in the opposite order, each copied while the one before is at work.

    On a GPU copies run on a stream of their own and pinned memory is used again in the next step; on a CPU tensors stay.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.saved: list[tuple[Tensor, torch.device]] = []
        self.pool: list[Tensor] = []
        self.coming: dict[int, Tensor] = {}

    def empty(self) -> None:
        """A new step begins: what the last one left is used again."""
        self.pool += [host for host, device in self.saved if device.type == "cuda"]
        self.saved, self.coming = [], {}

    def put(self, x: Any) -> Any:
        """What `get` takes: x itself if it is no tensor or a small one."""
        if not isinstance(x, Tensor) or (x.is_cuda and x.nbytes < LARGE):
            return x
        self.saved.append((self._sent(x) if x.is_cuda else x, x.device))
        return Away(len(self.saved) - 1)

    def get(self, entry: Any) -> Any:
        if not isinstance(entry, Away):
            return entry
        number = entry.number
        if not self.saved[number][0].is_pinned():
            return self.saved[number][0]
        self._fetch(number)
        tensor = self.coming.pop(number)
        torch.cuda.current_stream(tensor.device).wait_stream(self._stream(tensor.device))
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if number:
            self._fetch(number - 1)
        return tensor

    def _sent(self, x: Tensor) -> Tensor:
        index = next(
            (
                i
                for i, host in enumerate(self.pool)
                if (host.shape, host.dtype) == (x.shape, x.dtype)
            ),
            None,
        )
        host = (
            torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            if index is None
            else self.pool.pop(index)
        )
        stream = self._stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(stream)
        return host

    def _fetch(self, number: int) -> None:
        if number in self.coming:
            return
        host, device = self.saved[number]
        with torch.cuda.stream(self._stream(device)):
            self.coming[number] = host.to(device, non_blocking=True)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        return self.stream


def attends(func: Any) -> bool:
    """Whether this is one of torch's fused attention operators, forward."""
    name = func.name()
    return (
        func.namespace == "aten"
        and "_scaled_dot_product" in name
        and "attention" in name
        and "backward" not in name
    )


class Keeping(TorchDispatchMode):
    """Around a checkpointed layer's forward: what its attention gives goes into `saved`, by
    way of the stash."""

    def __init__(self, stash: Stash, saved: list[Any]) -> None:
        super().__init__()
        self.stash, self.saved = stash, saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if attends(func):
            self.saved.append(tuple(map(self.stash.put, out)))
        return out


class Giving(TorchDispatchMode):
    """Around the layer's recomputation: attention gives what it gave."""

    def __init__(self, stash: Stash, saved: list[Any]) -> None:
        super().__init__()
        self.stash, self.saved = stash, saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if attends(func) and self.saved:
            return tuple(map(self.stash.get, self.saved.pop(0)))
        return func(*args, **(kwargs or {}))


# 68 KB a token and layer of Qwen3-8B with its inputs, 153 GiB at 65,536 tokens: the host and the card hold them together.
# "*" would be 96 KB with the output of down_proj, which backward never reads.
FAST = ("attn_out", "kv", "mlp.gate_proj", "mlp.up_proj")

METHODS: dict[str, Callable[[], Method]] = {
    "plain": Plain,
    "checkpointing": Method,
    "trl": TRLHead,
    "trl-selective": lambda: TRLHead(selective=True),
    "trl-selective-liger": lambda: TRLHead(selective=True, liger=True),
    "trl-offload-liger": lambda: TRLHead(offload=True, liger=True),
    "axolotl": Axolotl,
    "axolotl-liger": lambda: Axolotl(liger=True),
    "liger": Liger,
    "alst": ALST,
    "streambp": lambda: StreamBP(saves=("attn_out",)),
    "streambp-liger": lambda: StreamBP(saves=("attn_out",), liger=True),
    "streambp-default": lambda: StreamBP(untouched=True),
    "streambp-auto": lambda: StreamBP(saves="auto"),
    "streambp-auto-liger": lambda: StreamBP(saves="auto", liger=True),
    "streambp-lean": lambda: StreamBP(saves=("attn_out",), offload="cpu"),
    "streambp-lean-liger": lambda: StreamBP(saves=("attn_out",), offload="cpu", liger=True),
    "streambp-fast-liger": lambda: StreamBP(saves=FAST, offload="cpu", liger=True),
}
