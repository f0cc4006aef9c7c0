"""Triton kernel for d loss / d product of a block of raw logits, written over the logits.

torch would make three to six float32 copies of the block between logits and gradient. This kernel
reads and writes each entry once, in the dtype of the matrix product. The numbers are those of
`blocks.gradient_in_torch`, the reference in this kernel's tests (in Triton's interpreter without a
GPU).
"""

from __future__ import annotations

from torch import Tensor

from streambp.head.triton_fold import TRITON_AVAILABLE, WARPS, use_device

MAX_BLOCK_WIDTH = 2048  # see `triton_fold.MAX_BLOCK_WIDTH`

if TRITON_AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        product, labels, lse, entropy, d_log_probs, d_entropy, d_mean, d_lse,
        stride, columns, first, scale, softcap, temperature, share,
        capped: tl.constexpr, has_log_probs: tl.constexpr, has_entropy: tl.constexpr, has_mean: tl.constexpr,
        has_lse: tl.constexpr, width: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * width + tl.arange(0, width)
        in_vocabulary = column < columns
        pointers = product + row * stride + column
        z = tl.load(pointers, mask=in_vocabulary, other=0.0).to(tl.float32) * scale
        slope = scale / temperature
        if capped:
            small = tl.exp(-2.0 * tl.abs(z) / softcap)
            tanh = (1.0 - small) / (1.0 + small)
            z = softcap * tl.where(z < 0.0, -tanh, tanh)
            # equals 1 - tanh^2, without cancellation
            slope = slope * (4.0 * small / ((1.0 + small) * (1.0 + small)))
        log_p = z / temperature - tl.load(lse + row)
        p = tl.exp(log_p)
        if has_log_probs:
            upstream = tl.load(d_log_probs + row)
            factor = -upstream
        else:
            factor = 0.0
        if has_mean:
            mean = tl.load(d_mean + row)
            factor -= mean
        if has_lse:
            factor += tl.load(d_lse + row)
        if has_entropy:
            factor = factor - (log_p + tl.load(entropy + row)) * tl.load(d_entropy + row)
            grad = tl.where(p == 0.0, 0.0, p * factor)
        else:
            grad = p * factor
        if has_mean:
            grad += mean * share
        if has_log_probs:
            label = tl.load(labels + row) - first
            grad += tl.where(column == label, upstream, 0.0)
        tl.store(pointers, (grad * slope).to(product.dtype.element_ty), mask=in_vocabulary)


def write_gradient(
    product: Tensor,
    labels: Tensor,
    first: int,
    lse: Tensor,
    upstream: tuple[Tensor | None, ...],
    entropy: Tensor | None,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    """Overwrite the output projection's matrix products [n, v] with the loss's gradient with
    respect to these products, by one Triton kernel. Products on meta are not changed.

    Args:
        product: [n, v] in float32 or half precision, with a contiguous last dimension; read and
            written once.
        labels: the labels [n], indices in the full vocabulary.
        first: index in the full vocabulary of the first column.
        lse: [n] in float32, the log of the sum of exp(logit) over the full vocabulary.
        upstream: gradients of log_probs, entropy, mean_log_probs and lse, [n] in float32 each; None
            for unused values.
        entropy: [n] in float32; None if no gradient flows to the entropy.
        vocabulary: V, the number of vocabulary entries.
        scale: factor of the products.
        softcap: bound of the logits, or None.
        temperature: divisor of the logits.
    """
    rows, columns = product.shape
    if product.stride(1) != 1:
        raise ValueError(
            f"product has strides {product.stride()}; it is written in place and must be "
            "contiguous in rows."
        )
    if not rows or product.device.type == "meta":
        return
    d_log_probs, d_entropy, d_mean, d_lse = upstream
    width = min(MAX_BLOCK_WIDTH, triton.next_power_of_2(columns))
    lse = lse.float().contiguous()
    vectors: list[Tensor] = []
    for vector in (entropy, *upstream):
        # lse is a placeholder for arguments that are not read
        vectors.append(lse if vector is None else vector.float().contiguous())
    with use_device(product.device):
        _kernel[(rows, triton.cdiv(columns, width))](
            product, labels.contiguous(), lse, *vectors, product.stride(0), columns, first, scale,
            softcap or 1.0, temperature, 1.0 / vocabulary,
            capped=softcap is not None, has_log_probs=d_log_probs is not None,
            has_entropy=d_entropy is not None and entropy is not None, has_mean=d_mean is not None,
            has_lse=d_lse is not None, width=width, num_warps=WARPS,
        )  # fmt: skip
