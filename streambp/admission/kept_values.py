"""Values that a layer, or code of others inside it, keeps without their graph: for a replay, a record, statistics.

[Note: kept values] Unpatched, what a forward leaves in an attribute, a closure or a list is of the whole sequence, and is
left once. Chunks would leave the last one's, one entry for each, and the same once more in backward's recomputation. So a
layer with code of others inside it is tried for that as well: the few tokens whole, as unpatched, and in chunks, as a step
makes them, each from the same start. What can be reached from that code (`fingerprint/memory.py`) has to be the same
afterwards: shapes, numbers, lengths. Sums over tokens are. If something is not, the layer runs whole, and its recomputation
leaves nothing behind.

What is kept may be read by a later call, by its length: routes that are replayed fit the whole sequence and no chunk of it.
The few tokens of a trial do not show that. So a call with a tensor in reach that is as long as its sequence is another kind
of call, tried at its own length.

Flags and strings in reach, deeper than a look goes (`fingerprint/leaves.py`), tell kinds of calls apart: a recorder may be
switched on between two steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from streambp.admission.agreement import HALF_TOLERANCE, TOLERANCE, coarsest
from streambp.admission.generators import generators_kept, generators_of
from streambp.admission.long_trial import why_not_at_length
from streambp.admission.own_run import OtherModelError, OwnRun
from streambp.admission.rehearsal import (
    CHUNK,
    as_trained,
    causal_prefix,
    may_have_graphs,
    nothing_compiled,
    nothing_masked,
    random_like,
    rehearsed,
    rehearsing,
)
from streambp.attention.prefix import Stage
from streambp.chunks import Chunk, ChunkPlan
from streambp.device import has_data, is_out_of_memory
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.fingerprint.hooks import unwatched
from streambp.fingerprint.looks import Look
from streambp.fingerprint.memory import KNOWN, PLAIN, Memory, is_theirs, undone
from streambp.known_names import GLOBAL_HOOKS
from streambp.layer.call import LayerCall, plan_of
from streambp.layer.recompute import RandomState
from streambp.layer.shadows import Parameters, slots_of
from streambp.layer.side_effects import buffers_of, in_place_of_buffers
from streambp.layer.site import REACH, LayerSite, remember
from streambp.recurrent.documents import in_several, tried_rows
from streambp.recurrent.states import LEAST_TOKENS

T = TypeVar("T")
Roots = list[tuple[str, Any]]
Kind = frozenset[tuple[str, Any]]
NAMED_AT_MOST = 3
SHORT = 8  # entries of a list whose flags tell kinds of calls apart
KEEPS_VALUES = "it, or a hook inside it, keeps values for later, of which chunks would leave others than the whole sequence"
OUT_OF_SIGHT = "tensors out of sight"
MISSING = object()
_DIGITS = re.compile(r"\d+")


def roots_of(site: LayerSite, look: Look) -> Roots:
    """Where others' code inside a layer may keep values, by name; empty if no code of others runs inside."""
    hooks = [("", unwatched(table[number])) for table, number in look.hooks.places.values() if number in table]
    everywhere = vars(torch.nn.modules.module)
    hooks += [("", hook) for name in GLOBAL_HOOKS for hook in everywhere[name].values()]
    hooks = [(name, hook) for name, hook in hooks if is_theirs(hook)]
    if site.previous is not None and is_theirs(site.previous):
        hooks.append(("", site.previous))
    code = site.of(_code_of_others)
    if not hooks and not code:
        return []
    return [*site.layer.named_modules(), *hooks, *code]


def tell(site: LayerSite, look: Look, kind: Kind, hidden_states: Tensor) -> Kind:
    """The kind of a call with these hidden states [..., B, T, h], told by what can be reached from others' code inside the
    layer as well; the kind itself if there is no such code."""
    roots = roots_of(site, look)
    if not roots:
        return kind
    known = frozenset(pair for pair in kind if pair[0] != REACH)
    rows, length = hidden_states.shape[-3:-1]
    as_long, flags = False, []
    for path, value in Memory(roots).values.items():
        if path in site.fingerprint.kept:
            continue
        if isinstance(value, PLAIN):
            flags += _flag(path, value)
        elif length > 1:
            sizes = tuple(value.shape[:2])
            as_long |= length in sizes or sizes[:1] == (rows * length,)
    as_long = as_long and len(plan_of(site, rows, length, hidden_states.device)) > 1
    digest = hashlib.blake2b(repr(flags).encode(), digest_size=16).hexdigest()
    return known | {(REACH, (digest, as_long))}


def _flag(path: str, value: Any) -> list[tuple[str, Any]]:
    if any(int(number) >= SHORT for number in re.findall(r"\[(\d+)\]", path)):
        return []
    if path.startswith("len("):
        return [(path, "is there")]
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return [(path, value != 0)]
    return [(path, _DIGITS.sub("", value) if isinstance(value, str) else value)]


def _code_of_others(layer: nn.Module) -> Roots:
    """Classes, functions and objects inside a layer that others wrote and that its forward may run."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in layer.named_modules():
        for name, value in module.__dict__.items():
            if callable(value) and not isinstance(value, nn.Module) and is_theirs(value):
                found[id(value)] = (f"{path}.{name}".removeprefix("."), value)
        for base in type(module).__mro__:
            if base is nn.Module:
                break
            if base.__module__.partition(".")[0] not in KNOWN:
                found[id(base)] = (base.__name__, base)
                continue
            for name, value in vars(base).items():
                if callable(value) and not isinstance(value, type) and is_theirs(value):
                    found[id(value)] = (f"{base.__name__}.{name}", value)
    return list(found.values())


def leaving_nothing(call: LayerCall) -> contextlib.AbstractContextManager[Any]:
    """Context manager of a trial, after which nothing stays of what others' code inside the layer kept."""
    roots = roots_of(call.site, call.look) if call.device.type != "meta" else []
    return undone(roots) if roots else contextlib.nullcontext()


def recomputed(site: LayerSite, look: Look) -> contextlib.AbstractContextManager[Any]:
    """Context manager of a recomputation: what the forward has left stays as it is. [Note: kept values]"""
    roots = roots_of(site, look)
    return undone(roots) if roots else contextlib.nullcontext()


def without_traces(find: Callable[..., T]) -> Callable[..., T]:
    """The function of a call, run so that nothing stays of what others' code keeps."""

    def found(call: LayerCall, *args: Any) -> T:
        with leaving_nothing(call):
            return find(call, *args)

    return found


def refusing_chunks(forward: Callable[[LayerCall, bool], T]) -> Callable[[LayerCall, bool], T]:
    """The forward in chunks; it raises if code of others keeps values of a chunk, and kept none when it was tried.

    It was not tried with hooks that were set after a warm-up, nor on as many tokens, nor with a switch that no look sees.
    """

    def run(call: LayerCall, keep: bool) -> T:
        site = call.site
        roots = roots_of(site, call.look) if len(call.plan) > 1 and has_data(call.hidden_states) else []
        if not roots:
            return forward(call, keep)
        before = Memory(roots)
        found = forward(call, keep)
        for path, value in Memory(roots).changed(before).items():
            known = path in site.fingerprint.kept
            if not known and isinstance(value, (Tensor, np.ndarray)) and _is_of_a_chunk(value.shape, call):
                _refuse(call, f"{path} {tuple(value.shape)}")
        return found

    return run


def _is_of_a_chunk(shape: Sequence[int], call: LayerCall) -> bool:
    """True if a tensor of that shape has a value for each token of a chunk; not if its size may be one of the layer's."""
    own = {size for parameter in call.look.body.parameters for size in parameter.shape}
    for length in {chunk.stop - chunk.start for chunk in call.plan}:
        rows = tuple(shape[:2]) == (call.rows, length) and (len(shape) > 2 or length not in own)
        if rows or (shape[:1] == (call.rows * length,) and shape[0] not in own):
            return True
    return False


def _refuse(call: LayerCall, what: str) -> NoReturn:
    site = call.site
    site.found(call.arguments.kind).judge(f"{KEEPS_VALUES} ({what})")
    when = "did not when it was tried"
    if site.warm is not None and site.warm.on:
        site.warm.on = False
        when = "was set after streambp.warm_up, which lets hooks be set without a trial that add up or look on"
    raise StreamBPError(
        f"{type(call.layer).__name__}, or a hook inside it, keeps values of single chunks ({what}), and {when}. Empty what "
        "was kept and repeat the step: from now on the layer runs whole, which is exact."
    )


def why_kept(call: LayerCall) -> tuple[str | None, Exception | None]:
    """Return why the layer runs whole for values that others' code inside it keeps, and the trial's own exception.

    Both are None where the layer may be cut. The trial runs once for each kind of call, and the kind may be another one
    afterwards. [Note: kept values]
    """
    site, x = call.site, call.hidden_states.detach()
    if type(call) is not LayerCall or not has_data(x) or x.shape[-2] == 1 or not x.numel():
        return None, None
    roots = roots_of(site, call.look)
    if not roots or site.found(call.arguments.kind).judged:
        return None, None
    failed: Exception | None = None
    because = None
    try:
        generators, buffers = generators_kept(generators_of(site, call.look)), in_place_of_buffers(buffers_of(call.layer))
        with nothing_compiled(), _plain_dropout(call), generators, buffers, contextlib.ExitStack() as stack:
            stack.enter_context(rehearsing(call))
            because = _why_kept(call, x, roots)
            if because is None and dict(call.arguments.kind).get(REACH, ("", False))[1]:
                stack.enter_context(_as_in_a_step(call))
                because = why_not_at_length(call)
    except Exception as error:
        other_model = isinstance(error, OtherModelError)  # its unpatched forward failed, as any trial may
        if is_out_of_memory(error) or (isinstance(error, StreamBPError) and not other_model):
            raise
        failed = error
    before = call.arguments.kind
    call.arguments.kind = tell(site, call.look, before, x)
    if before != call.arguments.kind and before in site.findings:
        remember(site.findings, call.arguments.kind, site.findings.pop(before))
    return because, failed


def _why_kept(call: LayerCall, x: Tensor, roots: Roots) -> str | None:
    """What chunks would leave otherwise than the whole, in words; None if nothing."""
    with torch.no_grad():
        tokens, upstream = random_like(x), random_like(x)
    trial = _Trial(call, tokens, upstream, roots)
    whole, chunks = trial.left(trial.whole), trial.left(trial.in_chunks)
    call.site.fingerprint.kept |= whole.keys() | chunks.keys()
    differing = _differing(whole, chunks, coarsest(call, x))
    if differing:  # what is another at each run (a time) tells nothing
        again = trial.left(trial.whole)
        noisy = _differing(whole, again, coarsest(call, x))
        differing = {path: told for path, told in differing.items() if path not in noisy}
    if not differing:
        return None
    otherwise = _differing(whole, trial.left(trial.at_once), coarsest(call, x))
    # What graphs hold is out of sight as well, and another for another attention.
    otherwise = {path: told for path, told in otherwise.items() if path in differing and path != OUT_OF_SIGHT}
    if otherwise:
        raise UnsupportedModelError(
            f"{type(call.layer).__name__}, or a hook inside it, keeps values that its unpatched forward makes and streamed "
            f"layers do not, such as weights of attention: {_named(otherwise)}. Take off what keeps them, pass "
            "output_attentions=True, with which a call runs unpatched, or run the model unpatched "
            "(streambp.unpatch(model))."
        )
    return f"{KEEPS_VALUES} ({_named(differing)})"


def _named(differing: dict[str, str]) -> str:
    told = [path + shapes for path, shapes in list(differing.items())[:NAMED_AT_MOST]]
    return ", ".join(told) + (f" and {len(differing) - NAMED_AT_MOST} more" if len(differing) > NAMED_AT_MOST else "")


class _Trial:
    """A layer over a few tokens x [..., B, T, h], whole and in chunks, in its own mode, each time from the same start.

    Args:
        upstream: the gradient of its output.
    """

    def __init__(self, call: LayerCall, x: Tensor, upstream: Tensor, roots: Roots) -> None:
        self.call, self.x, self.upstream, self.roots = call, x, upstream, roots
        self.random = RandomState.capture(call.device)
        wanted = call.hidden_states.requires_grad or call.arguments.inputs or call.parameters.groups
        self.graph = torch.is_grad_enabled() and bool(wanted) and may_have_graphs(call)

    def left(self, run: Callable[[list[Tensor]], None]) -> dict[str, Any]:
        """What a run has left that was not there before, or was another, by path."""
        named, length = self.call.arguments.named, self.x.shape[-2]
        documents = in_several(named, length) if self.call.packing.told else {}
        rows = None if self.call.packing.rows is None else tried_rows(self.x.shape[-3], length)
        given = self.call.arguments.replaced({**nothing_masked(named, length), **documents}, rows)
        with undone(self.roots) as (before, writes):
            # Weights are drawn within, so that each run has the same.
            with self.random.replayed(), given, as_trained(self.call) as shadows:
                run(shadows or [])
            del shadows
            after = Memory(self.roots)
            found, elsewhere = after.changed(before, writes), writes.kept_elsewhere(after)
            return {**found, OUT_OF_SIGHT: elsewhere} if elsewhere else found

    def whole(self, shadows: list[Tensor]) -> None:
        """As unpatched: once, with a graph where there is one."""
        if self.call.packing.marks_documents:  # of several the unpatched layer may not be told
            self.at_once(shadows)
        else:
            OwnRun(self.call, self.x, self.upstream, shadows)

    def at_once(self, _: list[Tensor]) -> None:
        """As a layer that runs whole does it: once, with the attention of streamed layers."""
        stage = Stage.RECOMPUTE if self.graph else Stage.FORWARD
        self._run(stage, [Chunk(0, 0, self.x.shape[-2])], lambda _: None)

    def in_chunks(self, _: list[Tensor]) -> None:
        """As a step does it: forward without a graph, then once more for the gradient."""
        length = self.x.shape[-2]
        plan = ChunkPlan(length, min(CHUNK, -(-length // 2)))
        packing = self.call.packing
        plan = plan.avoiding(packing.barriers) if packing.barriers else plan
        chunks = list(plan.with_least(LEAST_TOKENS))
        with torch.no_grad():
            self._run(Stage.FORWARD, chunks, lambda ended: ended)
        if self.graph:
            self._run(Stage.RECOMPUTE, chunks, lambda ended: ended)

    def _run(self, stage: Stage, chunks: list[Chunk], start: Callable[[Any], Any]) -> None:
        graph = stage is Stage.RECOMPUTE
        x = self.x.detach().requires_grad_(graph)
        prefix = causal_prefix(self.call, x.shape[-2])
        prefix.overwritten = graph  # whether the layer writes to its attention's output is not known yet
        ran = rehearsed(self.call, x, chunks, stage, prefix, start)
        outputs = [output.hidden_states for _, output in ran if output is not None]
        output = torch.cat(outputs, -2)  # [..., B, T, h]
        if output.requires_grad:
            torch.autograd.grad(output, [x], self.upstream, allow_unused=True)


def _differing(one: dict[str, Any], other: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """The paths of what is not alike in both, to rounding, and the shapes of these tensors in words."""
    found = {}
    tolerance = TOLERANCE.get(dtype, HALF_TOLERANCE)
    for path in dict.fromkeys((*one, *other)):
        first, second = one.get(path, MISSING), other.get(path, MISSING)
        if not _alike(first, second, tolerance):
            found[path] = _told(first, second)
    return found


def _alike(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.dtype.kind in "biufc":
        one, other = torch.from_numpy(one.copy()), torch.from_numpy(other.copy())
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not (has_data(one) and has_data(other)) or one.is_sparse or one.is_quantized:
            return True
        wide = torch.complex128 if one.is_complex() else torch.float64
        first, second = (value.detach().to("cpu", wide).nan_to_num() for value in (one, other))
        return bool((first - second).norm() <= tolerance * first.norm())
    numbers = (int, float, complex)
    if isinstance(one, numbers) and isinstance(other, numbers) and not isinstance(one, bool):
        return one == other or abs(one - other) <= tolerance * abs(one) or (one != one and other != other)
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)


def _told(whole: Any, chunks: Any) -> str:
    arrays = isinstance(whole, (Tensor, np.ndarray)) and isinstance(chunks, (Tensor, np.ndarray))
    if arrays and whole.shape != chunks.shape:
        return f" {tuple(chunks.shape)} for {tuple(whole.shape)}"
    return ""


@contextlib.contextmanager
def _plain_dropout(call: LayerCall) -> Iterator[None]:
    """Within, modules of dropout draw nothing, and all others have their own mode."""
    drops = [m for m in call.layer.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    try:
        for module in drops:
            module.training = False
        yield
    finally:
        for module in drops:
            module.training = True


@contextlib.contextmanager
def _as_in_a_step(call: LayerCall) -> Iterator[None]:
    """Within, no graph is made, and code may find that gradients are on, as they are."""
    parameters = Parameters(call.layer, call.device, call.site.of(slots_of))
    graph = torch.is_grad_enabled() and may_have_graphs(call)
    given = parameters.replaced([p.detach() for p in parameters.current()]) if graph else torch.no_grad()
    with undone(roots_of(call.site, call.look)), given:
        yield
