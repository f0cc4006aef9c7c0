"""Is streaming exact on *this* model? Patched against unpatched gradients, judged by the model's own rounding.

Three gradients of one short sequence are compared: the unpatched model's, the streamed model's, and a reference from a copy
of the unpatched model on the host in a wider dtype (float32 for half precision, float64 for float32). The distance of the
unpatched gradient from the reference is the model's own rounding noise in its dtype. Streaming adds up the same numbers in
another order, so its distance must be of the same size:

- over the whole gradient, at most 1.05 x the noise (half precision), or 1.5 x (float32, where single rounding errors of
  small models scatter more than that);
- for each parameter, at most 3 x the larger of its own noise and the whole gradient's.

A lost or doubled chunk changes a gradient by percents, a hundred to a million times more. In float64 there is no wider
dtype: streamed and unpatched are compared directly and must agree to 1e-6, because transformers computes norms and losses
in float32 even there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streambp.chunks import plan_chunks
from streambp.config import StreamConfig
from streambp.errors import StreamBPError
from streambp.patching import patch, unpatch

MIN_CHUNKS = 4
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
WHOLE_BAR = {torch.float32: 1.5, torch.bfloat16: 1.05, torch.float16: 1.05}
PARAMETER_BAR = 3.0
FLOAT64_BAR = 1e-6
Gradients = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class ParameterError:
    """Relative errors of one parameter's gradient: |g - ref| / max(|ref|, 1e-6 x norm of the whole gradient)."""

    name: str
    streamed: float
    unpatched: float


@dataclasses.dataclass(frozen=True)
class Verification:
    """The outcome of `verify`; `str()` is a table, worst parameter first."""

    exact: bool
    reason: str
    parameters: tuple[ParameterError, ...]
    whole_streamed: float
    whole_unpatched: float
    loss_streamed: float
    loss_unpatched: float
    dtype: str
    seq_len: int
    chunk_size: int
    chunks: int
    notes: tuple[str, ...]

    def table(self, top: int = 20) -> str:
        width = max([len(p.name) for p in self.parameters[:top]] + [20])
        lines = [f"{self.seq_len} tokens in {self.chunks} chunks of {self.chunk_size}, {self.dtype}"]
        lines += [f"{'gradient of':<{width}}  {'streamed':>10}  {'unpatched':>10}   relative error"]
        lines += [f"{p.name:<{width}}  {p.streamed:>10.2e}  {p.unpatched:>10.2e}" for p in self.parameters[:top]]
        if len(self.parameters) > top:
            lines.append(f"... and {len(self.parameters) - top} more with smaller errors")
        lines.append(f"{'whole gradient':<{width}}  {self.whole_streamed:>10.2e}  {self.whole_unpatched:>10.2e}")
        lines.append(f"loss {self.loss_streamed:.6f} streamed, {self.loss_unpatched:.6f} unpatched")
        lines += [f"note: {note}" for note in self.notes]
        lines.append(f"{'EXACT' if self.exact else 'NOT EXACT'}: {self.reason}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def verify(
    model: PreTrainedModel,
    seq_len: int = 512,
    chunk_size: int | None = None,
    saves: tuple[str, ...] = (),
    seed: int = 0,
) -> Verification:
    """Compare streamed gradients of `model` with unpatched ones on `seq_len` random tokens.

    The model is put into eval mode for it (dropout draws other numbers chunk by chunk) and left as it was, gradients
    included. Besides the model, the host holds a copy in a wider dtype and three sets of gradients.

    Raises:
        StreamBPError: the model is patched already or cannot be streamed, or there would be fewer than four chunks.
    """
    if any("_streambp" in module.__dict__ for module in model.modules()):
        raise StreamBPError("The model is patched; verify compares with the unpatched one. Call streambp.unpatch(model).")
    config = StreamConfig(chunk_size=_choose_chunk_size(seq_len, chunk_size), saves=saves)
    batch = _make_batch(model, seq_len, seed)
    with _left_as_found(model):
        loss_unpatched, unpatched = _gradients(model, batch)
        patch(model, config)
        try:
            loss_streamed, streamed = _gradients(model, batch)
        finally:
            unpatch(model)
        dtype = next(model.parameters()).dtype
        reference = _reference(model, batch, dtype) or unpatched
    exact, reason = _judge(streamed, unpatched, reference, dtype)
    common = [name for name in reference if name in streamed and name in unpatched]
    total = _norm(reference)
    errors = [
        ParameterError(n, _error(streamed[n], reference[n], total), _error(unpatched[n], reference[n], total))
        for n in common
    ]
    return Verification(
        exact,
        reason,
        tuple(sorted(errors, key=lambda e: -e.streamed if math.isfinite(e.streamed) else -math.inf)),
        _distance(streamed, reference),
        _distance(unpatched, reference),
        loss_streamed,
        loss_unpatched,
        str(dtype).removeprefix("torch."),
        seq_len,
        int(config.chunk_size),
        len(plan_chunks(seq_len, 1, config.chunk_size)),
        _notes(model, seq_len),
    )


def _choose_chunk_size(seq_len: int, chunk_size: int | None) -> int:
    """A size that gives at least four chunks, the last one shorter."""
    chosen = seq_len // 5 + 1 if chunk_size is None else chunk_size
    if chosen < 1 or -(-seq_len // chosen) < MIN_CHUNKS or seq_len % chosen == 0:
        raise StreamBPError(
            f"{seq_len} tokens in chunks of {chosen} are not at least {MIN_CHUNKS} chunks with a shorter last one. "
            "Choose a smaller --chunk-size that does not divide --seq-len, or leave --chunk-size out."
        )
    return chosen


def _make_batch(model: PreTrainedModel, seq_len: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, seq_len), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


@contextlib.contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    training = {id(m): m.training for m in model.modules()}
    before = [(p, p.grad) for p in model.parameters()]
    model.eval()
    try:
        yield
    finally:
        for module in model.modules():
            module.training = training[id(module)]
        for parameter, gradient in before:
            parameter.grad = gradient


def _gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients, moved to the host."""
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def _reference(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype) -> Gradients | None:
    wider = WIDER.get(dtype)
    if wider is None:
        return None
    host = copy.deepcopy(model).to("cpu", wider)
    return _gradients(host, {name: value.cpu() for name, value in batch.items()})[1]


def _norm(gradients: Gradients) -> float:
    return math.sqrt(sum(float(g.double().norm()) ** 2 for g in gradients.values()))


def _distance(ours: Gradients, reference: Gradients) -> float:
    """Relative L2 distance of the whole gradient; infinite if the sets differ."""
    if ours.keys() != reference.keys():
        return math.inf
    difference = math.sqrt(sum(float((ours[n].double() - g.double()).norm()) ** 2 for n, g in reference.items()))
    return difference / max(_norm(reference), 1e-300)


def _error(ours: Tensor, reference: Tensor, total: float) -> float:
    difference = float((ours.double() - reference.double()).norm())
    return difference / max(float(reference.double().norm()), 1e-6 * total, 1e-300)


def _judge(streamed: Gradients, unpatched: Gradients, reference: Gradients, dtype: torch.dtype) -> tuple[bool, str]:
    if streamed.keys() != unpatched.keys():
        odd = sorted(streamed.keys() ^ unpatched.keys())
        return False, f"only one of the two has gradients of {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}"
    ours, noise = _distance(streamed, reference), _distance(unpatched, reference)
    if dtype not in WHOLE_BAR:
        verdict = "" if ours <= FLOAT64_BAR else "not "
        return not verdict, f"streamed and unpatched differ by {ours:.1e}, {verdict}within {FLOAT64_BAR:.0e}"
    bar, total = WHOLE_BAR[dtype], _norm(reference)
    if not ours <= bar * noise:
        return False, f"the whole gradient's error is {ours / noise:.2f} x the model's own rounding noise (bar {bar} x)"
    for name, value in reference.items():
        error = _error(streamed[name], value, total)
        if not error <= PARAMETER_BAR * max(noise, _error(unpatched[name], value, total)):
            return False, f"{name} is off by {error:.1e}, more than {PARAMETER_BAR} x the model's own rounding noise"
    return True, f"the whole gradient's error is {ours / noise:.2f} x the model's own rounding noise (bar {bar} x)"


def _notes(model: PreTrainedModel, seq_len: int) -> tuple[str, ...]:
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not window or (types is not None and not any("sliding" in kind for kind in types)):
        return ()
    if window >= seq_len:
        return (f"the window of {window} was not crossed; pass --seq-len {window + window // 4 + 1} or more to check it",)
    return (f"the window of {window} was crossed",)
