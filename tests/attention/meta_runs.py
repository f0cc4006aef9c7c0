"""One layer's attention over a sequence on meta tensors, with CUDA's backend: which kernel calls,
how many bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streambp.attention import attend, kernels
from streambp.attention.attend import AttentionParams, PrefixAttention, attend_blocks
from streambp.attention.backend import Backend
from streambp.attention.kernels import CUDNN, FLASH, MATH
from streambp.attention.kv import KVBuffer, KVTiles
from streambp.chunks import ChunkPlan
from streambp.layer.saved_tensors import DeviceTensors

HEADS, KV_HEADS, SIZE = 32, 8, 128  # Qwen3-8B
CUDNN_FIRST = Backend((CUDNN, FLASH, MATH))


class Recorder:
    """In place of aten: returns tensors without data in the layouts that torch gives, and notes the
    calls.

    calls: (operator, queries, keys, rows). graphs: of each key of a cuDNN backward, the layouts of
    o, dO and logsumexp. sizes: (operator, D, D_v). Without data every pair passes, so tests have to
    look at them.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, int]] = []
        self.forwards: set[Any] = set()
        self.graphs: dict[Any, set[Any]] = {}
        self.sizes: set[tuple[str, int, int]] = set()

    def note(self, operator, q, k, v, rows, tokens=2):
        self.calls.append((operator, q.shape[tokens], k.shape[tokens], rows))
        self.sizes.add((operator, q.shape[-1], v.shape[-1]))

    def _scaled_dot_product_cudnn_attention(self, q, k, v, *args, scale):
        self.note("cudnn", q, k, v, q.shape[0])
        self.forwards.add((*((*x.shape, *x.stride()) for x in (q, k, v)), args[3]))
        assert (
            q.stride()
            == (q.shape[2] * q.shape[1] * q.shape[3], q.shape[3], q.shape[1] * q.shape[3], 1)
            or q.shape[0] > 1
        )
        # q's order, packed by D_v
        o = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        return o, q.new_empty((*q.shape[:3], 1), dtype=torch.float32)

    def _scaled_dot_product_cudnn_attention_backward(self, do, q, k, v, o, lse, *args, scale):
        self.note("cudnn backward", q, k, v, q.shape[0])
        assert do.shape == o.shape == (*q.shape[:3], v.shape[3])
        key = (*((*x.shape, *x.stride()) for x in (q, k, v)), args[-1])
        self.graphs.setdefault(key, set()).add(tuple(x.stride() for x in (do, o, lse)))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def _scaled_dot_product_flash_attention(self, q, k, v, *args, scale):
        self.note("flash", q, k, v, q.shape[0])
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def _scaled_dot_product_flash_attention_backward(self, do, q, k, v, *args, scale):
        self.note("flash backward", q, k, v, q.shape[0])
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def _scaled_dot_product_efficient_attention(self, q, k, v, *args, scale):
        self.note("efficient", q, k, v, q.shape[0])
        padding = -q.shape[2] % 32
        return (
            q.new_empty(*q.shape[:3], v.shape[3]),
            q.new_empty(*q.shape[:2], q.shape[2] + padding, dtype=torch.float32),
            0,
            0,
        )

    def _scaled_dot_product_efficient_attention_backward(
        self, do, q, k, v, bias, o, lse, *args, scale
    ):
        self.note("efficient backward", q, k, v, q.shape[0])
        assert lse.shape[2] % 32 == 0
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

    def _flash_attention_forward(self, q, k, v, cu_q, *args, **kwargs):
        self.note("varlen" if q.dim() == 3 else "window", q, k, v, 1, tokens=-3)
        shape = q.shape[1::-1] if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)

    def _flash_attention_backward(self, do, q, k, v, *args, **kwargs):
        self.note("varlen backward" if q.dim() == 3 else "window backward", q, k, v, 1, tokens=-3)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class ElementwiseBytes(TorchDispatchMode):
    """Bytes that operations read and wrote, those of attention, matrix products and views left out.

    by_name: of each operator. calls: views and all. uploads: of cu_seqlens. syncs: reads of a value
    by the host.
    """

    SILENT = ("empty", "view", "detach", "alias", "prim::")

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}
        self.uploads = self.syncs = self.calls = 0

    @property
    def total(self) -> int:
        return sum(self.by_name.values())

    def add(self, name: str, size: int) -> None:
        self.by_name[name] = self.by_name.get(name, 0) + size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.calls += 1
        self.syncs += name in ("_local_scalar_dense", "nonzero", "equal")
        if func.is_view or any(word in name for word in self.SILENT):
            return result
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # what `x[here] += y` ends with; torch does nothing
        if name == "copy_" and _is_same(*args[:2]):
            return result
        if name in ("copy_", "fill_", "zero_", "zeros_like", "new_zeros", "new_full"):
            read = read[1:]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.add(name, sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in (*read, *outputs)))
        return result


def _is_same(a: Tensor, b: Tensor) -> bool:
    layouts = [
        (x.untyped_storage()._cdata, x.storage_offset(), x.stride(), x.dtype) for x in (a, b)
    ]
    return layouts[0] == layouts[1]


def run(
    monkeypatch,
    layout,
    chunk_size,
    *,
    rows=1,
    saved=True,
    tiles=None,
    size=SIZE,
    value_size=None,
    heads=HEADS,
    backend=CUDNN_FIRST,
):
    """Forward and backward of every chunk; the calls, and the bytes beside them.

    Args:
        saved: backward takes forward's (o, lse). tiles: keys and values stream, so many tiles of
            them stay.
        size, value_size: D, and D_v if it is another.
    """
    value_size = value_size or size
    recorder, counted = Recorder(), ElementwiseBytes()
    monkeypatch.setattr(kernels, "aten", recorder)
    monkeypatch.setattr(attend, "fits_triton", lambda *_: True)

    def merged(o, lse, part_o, part_lse, out):
        counted.add(
            "merge in Triton",
            o.nbytes + part_o.nbytes + out.nbytes + 2 * lse.nbytes + part_lse.nbytes,
        )

    monkeypatch.setattr(attend, "merge_in_triton", merged)

    def upload(*args):
        counted.uploads += 1
        return kernels.upload(*args)

    monkeypatch.setattr(attend, "upload", upload)
    plan = ChunkPlan(layout.length, chunk_size)
    params = AttentionParams(backend, size**-0.5, None, 0.0, 0)

    def tensor(count, length, columns=size):
        return torch.empty(
            rows, length, count, columns, dtype=torch.bfloat16, device="meta"
        ).transpose(1, 2)

    if tiles is None:
        k, v = (
            tensor(KV_HEADS, layout.length, columns).transpose(1, 2)
            for columns in (size, value_size)
        )
        kv_storage = KVBuffer.from_tensors(k, v, backend.width)
    else:
        kv_storage = KVTiles(
            0, plan, DeviceTensors(), DeviceTensors(), tiles, False, value_size, backend.width
        )
    attended = {}
    with counted:
        for chunk in plan:
            length = chunk.stop - chunk.start
            kv_storage.write(chunk, tensor(KV_HEADS, length), tensor(KV_HEADS, length, value_size))
            attended[chunk] = attend_blocks(
                tensor(heads, length), kv_storage, layout, chunk, params
            )
        for chunk in plan.backward:
            shapes = ((heads, size), (KV_HEADS, size), (KV_HEADS, value_size))
            leaves = [
                tensor(count, chunk.stop - chunk.start, columns).requires_grad_()
                for count, columns in shapes
            ]
            out = PrefixAttention.apply(
                *leaves, None, kv_storage, layout, chunk, params, attended[chunk] if saved else None
            )
            torch.autograd.grad(out, leaves, torch.empty_like(out))
    return recorder, counted
