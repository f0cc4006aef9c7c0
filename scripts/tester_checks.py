"""Whether a row of docs/transformers-testers.md shows anything: inputs that are cut, and gradients
that are not zero."""

from __future__ import annotations

from typing import Any


def chunk_size_for(batch: dict[str, Any], usual: int) -> int:
    """The usual size; for a text that is no longer, one that leaves a remainder."""
    length = batch["input_ids"].shape[-1] if "input_ids" in batch else usual + 1
    return usual if length > usual else max(1, length - 1)


def count_chunks(patch: Any) -> list[int]:
    """A list that gets the number of chunks of each call of a streamed layer."""
    from streambp.layer.call import LayerCall
    from streambp.sharded.call import ShardedCall

    chunks: list[int] = []
    for kind in (LayerCall, ShardedCall):  # the second: layers that are cut at their attention
        real = kind._make_saves

        def keep(call: Any, real: Any = real) -> Any:
            chunks.append(len(call.plan))
            return real(call)

        patch.setattr(kind, "_make_saves", keep)
    return chunks


def why_nothing(description: Any, chunks: list[int], expected: dict[str, Any]) -> str:
    """Why a model that agrees shows nothing of chunks; "" if it does."""
    if any(layer.path == "streams" for layer in description.layers) and max(chunks, default=0) < 2:
        return "all its layers ran in one chunk"
    inside = [
        grad
        for name, grad in expected.items()
        if any(f"{layer.name}." in name for layer in description.layers)
    ]
    return (
        "" if any(bool(grad.any()) for grad in inside) else "the gradients of its layers are zero"
    )


def give_every_row_a_token(batch: dict[str, Any]) -> None:
    """Some testers' random masks say that all tokens are padding, for which every gradient is
    zero."""
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        batch["attention_mask"] = mask.masked_fill((mask == 0).all(1, keepdim=True), 1)
