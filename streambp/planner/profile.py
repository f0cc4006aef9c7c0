"""What a model's steps cost, as data, and the arithmetic that turns it into bytes for a sequence length.

A `Profile` holds numbers and names only, so `json.dumps(dataclasses.asdict(profile))` is all that is needed to compute
every peak elsewhere (a web page, say). `peak` is that computation: for each phase of a step

    static + one + tokens * T + chunk * C + chunks * N + keys * K + gradients * (share - 1)

with the coefficients of its law (`laws.py`), and the largest wins. T and C are positions per row of the batch on one rank,
N the number of chunks, K other ranks' keys (`keys_held`), `gradients` what is in `.grad` when the phase begins, `share` the
part of them that this rank keeps (DESIGN.md section 6). Lines are counted at lengths of tens of thousands of tokens; below
that they are an upper bound: attention kernels' outputs stop growing at their block size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from streambp.errors import ConfigError
from streambp.fields import check_fields
from streambp.model.split import BOTH
from streambp.planner.host_weights import OnHost, gradients_here
from streambp.planner.laws import Law, Part, features
from streambp.planner.work import Work
from streambp.sharded.gathered import GatheredShards
from streambp.sharded.shards import Shards, heads_error

ULYSSES, CONTEXT_PARALLEL = Shards.by, GatheredShards.by
FIELDS = {ULYSSES: "ulysses", CONTEXT_PARALLEL: "context_parallel"}  # of `Setting`


@dataclasses.dataclass(frozen=True)
class Phase:
    """Bytes on the device beyond weights and optimizer. gradients: bytes in `.grad` at its beginning that the step has put
    there; they are part of `law.one`. `law.chunks` is what layers with states keep for each chunk."""

    name: str
    law: Law
    gradients: float = 0.0


class Heads(NamedTuple):
    """Of a layer's attention: of queries, of keys and values, and the bytes that a gathered key/value head takes for each
    token of whole sequences."""

    queries: int
    keys: int
    size: int


@dataclasses.dataclass(frozen=True)
class Split:
    """How a method's ranks share a sequence: by Ulysses or context parallelism, and the bytes of a step's exchanges.

    heads: all that occur. traded, traded_keys: bytes of all-to-alls for a token of the shard, of keys (with no more ranks
    than kv heads) and of the rest. gathered, summed: bytes of keys that are gathered and of gradients that are added up for
    a token of the whole sequence; gathered_at_once: where one group has all heads. moved: bytes that putting keys in order
    moves, for a token of the shard with Ulysses, of the whole sequence otherwise.
    """

    by: str
    heads: tuple[Heads, ...]
    traded: float = 0.0
    traded_keys: float = 0.0
    gathered: float = 0.0
    gathered_at_once: float = 0.0
    summed: float = 0.0
    moved: float = 0.0

    def repeats(self, ranks: int) -> float:
        """How many times the bytes of keys grow where Ulysses has more ranks than kv heads."""
        return max(1.0, max((ranks / heads.keys for heads in self.heads), default=1.0))


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to run a step. chunked: the sequence is cut into chunks of C (otherwise C plays no part). prefix_on_host: the
    keys and values of the layer at work are streamed from the host (`StreamConfig.gpu_memory`).

    first: phases of a step whose gradients are None at its start; accumulating: of one that adds to gradients.
    host: bytes of host memory. work: of a step, by kind of phase. split: how ranks share a sequence, if they do; T and C
    are then those of a rank's shard, but in `work`, which is all ranks', T is the sequence's.
    """

    name: str
    saves: tuple[str, ...]
    offload: str
    prefix_on_host: bool
    chunked: bool
    first: tuple[Phase, ...]
    accumulating: tuple[Phase, ...]
    host: Law
    work: tuple[Part, ...]
    split: Split | None = None

    @property
    def counts_chunks(self) -> bool:
        """Whether fewer and larger chunks can take less memory."""
        return any(law.chunks > 0 for law in (self.host, *(phase.law for phase in (*self.first, *self.accumulating))))


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are replicated alike: "dense" or "expert". Bytes as stored; gradients in the parameters' dtypes."""

    name: str
    parameters: int
    bytes: int
    trainable: int
    trainable_bytes: int


@dataclasses.dataclass(frozen=True)
class Node:
    """A module: parameters of one of `count` alike, and the bytes a token that its forward leaves for backward."""

    name: str
    kind: str
    count: int
    parameters: int
    activation: float
    children: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Profile:
    """A model with a batch of `batch_size` rows. unsharded: bytes that ZeRO-3 has gathered at a time. left_out: unpatched
    methods whose steps could not be counted, and why. mixers: what recurrent and convolutional layers are taken to run.
    saves: what saves="auto" chooses from (`layer_costs.counted_saves`).
    frozen, trained: bytes of host memory that each layer's frozen weights would take there, or those of a layer that trains
    as a whole; decoded: as `OnHost`'s."""

    model: str
    dtype: str
    layers: int
    batch_size: int
    groups: tuple[Group, ...]
    unsharded: int
    methods: tuple[Method, ...]
    tree: Node
    left_out: tuple[str, ...] = ()
    mixers: str = ""
    saves: Mapping[str, Any] | None = None
    frozen: tuple[int, ...] = ()
    decoded: int = 0
    trained: tuple[int, ...] = ()

    def method(self, name: str) -> Method:
        """The method by that name.

        Raises:
            ConfigError: it was not counted.
        """
        return named({method.name: method for method in self.methods}, name)


Entry = TypeVar("Entry")


def named(methods: Mapping[str, Entry], name: str) -> Entry:
    """The method by that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in methods:
        raise ConfigError(f"method is {name!r}; it must be one of {list(methods)}.")
    return methods[name]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The conditions of a step.

    Args:
        gpus: ranks, and replicas of each parameter among them (expert parallelism divides the experts' replicas).
        zero: 0 for DDP or one GPU; ZeRO's stage otherwise. optimizer: bytes a trainable parameter; 12 is Adam with a
            float32 copy of the weights, 0 leaves it out.
        gradient_bytes: of a gradient's element; None: as the parameter.
        ulysses, context_parallel: ranks that share one sequence; one of them at most is more than 1.
        optimizer_on_host: its state waits in host memory (ZeRO-Offload and the like).
        accumulate: the step adds to gradients that exist; False: it starts from None.
        room: bytes that a rank gives to gathered keys and their gradients; a plan takes the part of the memory that a
            step would. One key/value head is gathered in any case.
        weights: as `StreamConfig`'s, of streamed steps on one GPU; "auto" leaves them on the device where a step fits so.
        on_host: those that are on the host; a plan takes as many as its step needs.
    """

    gpus: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    optimizer: float = 12.0
    gradient_bytes: int | None = None
    ulysses: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    optimizer_on_host: bool = False
    accumulate: bool = False
    room: float = 0.0
    weights: Literal["device", "cpu", "auto"] = "auto"
    on_host: OnHost | None = None

    def __post_init__(self) -> None:
        ranks = dict.fromkeys(("gpus", "ulysses", "context_parallel", "expert_parallel"), 1)
        check_fields(self, **ranks, zero=0, optimizer=0, gradient_bytes=0, room=0)
        if self.ulysses > 1 and self.context_parallel > 1:
            raise ConfigError(f"{BOTH} Choose one: ulysses is {self.ulysses}, context_parallel {self.context_parallel}.")
        if self.gpus % self.ranks:
            raise ConfigError(
                f"gpus is {self.gpus}, and {self.ranks} ranks share a sequence; gpus counts all of them and must be a "
                "multiple of that."
            )
        if self.gpus % self.expert_parallel:
            raise ConfigError(f"expert_parallel is {self.expert_parallel}; it must divide gpus, which is {self.gpus}.")

    @property
    def ranks(self) -> int:
        """That share one sequence."""
        return self.ulysses * self.context_parallel

    @property
    def split(self) -> str:
        """How they share it; "" if there is one."""
        return ULYSSES if self.ulysses > 1 else CONTEXT_PARALLEL if self.context_parallel > 1 else ""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes on one rank at a moment: `total` = weights + optimizer + gradients + activations. Of a step it is the worst."""

    total: float
    phase: str
    weights: float
    optimizer: float
    gradients: float
    activations: float
    host: float
    phases: Mapping[str, float]  # total by phase


def static(profile: Profile, setting: Setting) -> Peak:
    """What a step finds and leaves, with all gradients: 2 + gradient + 12 / R bytes a parameter in bf16, R the replicas
    that share its optimizer state."""
    weights = gradients = optimizer = 0.0
    for group in profile.groups:
        expert = setting.expert_parallel if group.name == "expert" else 1
        replicas = setting.gpus / expert
        weights += group.bytes / expert / (replicas if setting.zero >= 3 else 1)
        size = group.trainable_bytes if setting.gradient_bytes is None else group.trainable * setting.gradient_bytes
        gradients += size / expert / (replicas if setting.zero >= 2 else 1)
        optimizer += setting.optimizer * group.trainable / expert / (replicas if setting.zero >= 1 else 1)
    if setting.zero >= 3:
        weights = min(weights + profile.unsharded, sum(group.bytes for group in profile.groups))
    host = optimizer if setting.optimizer_on_host else 0.0
    here = 0.0 if setting.optimizer_on_host else optimizer
    if setting.on_host is not None:
        weights, host = weights - setting.on_host.freed, host + setting.on_host.bytes
        part = setting.on_host.part
        host, gradients, here = host + part * (gradients + here), (1 - part) * gradients, (1 - part) * here
    return Peak(weights + gradients + here, "", weights, here, gradients, 0.0, host, {})


def peak(profile: Profile, method: Method, seq_len: int, chunk_size: int, setting: Setting) -> Peak:
    """The largest phase of a step of `seq_len` positions a row in chunks of `chunk_size`."""
    setting = setting if method.chunked else dataclasses.replace(setting, on_host=None)
    kept = static(profile, setting)
    born = sum(group.trainable_bytes for group in profile.groups)
    part = 0.0 if setting.on_host is None else setting.on_host.part
    share = kept.gradients / (born * (1 - part)) if born and part < 1 else 0.0
    tokens = seq_len / setting.ranks
    chunk = min(chunk_size, tokens) if method.chunked else 0
    step = features(tokens, chunk, keys_held(method.split, tokens, setting))
    present = kept.gradients if setting.accumulate else 0.0
    parts: dict[str, tuple[float, float]] = {}  # gradients, activations
    phases = method.accumulating if setting.accumulate else method.first
    here = gradients_here([(phase.name, phase.gradients) for phase in phases], setting.on_host)
    for phase, of_device in zip(phases, here, strict=True):
        found = (present + share * of_device, phase.law.at(step) - phase.gradients)
        parts[phase.name] = max(parts.get(phase.name, found), found, key=sum)
    worst = max(parts, key=lambda name: sum(parts[name]))
    gradients, activations = parts[worst]
    base = kept.weights + kept.optimizer
    host = method.host.at(step, kept.host)
    totals = {name: base + sum(found) for name, found in parts.items()}
    return Peak(totals[worst], worst, kept.weights, kept.optimizer, gradients, activations, host, totals)


def work(method: Method, seq_len: int, chunk_size: int, setting: Setting | None = None) -> dict[str, Work]:
    """Of a step of `seq_len` positions a row in chunks of `chunk_size`, by kind of phase, over all ranks that share the
    sequence; `dispatches` are one rank's."""
    ranks = 1 if setting is None else setting.ranks
    whole = chunk_size if method.split is not None else chunk_size * ranks
    chunk = min(whole, seq_len) if method.chunked else 0
    step = features(seq_len, chunk, k_block=method.work[0].k_block if method.work else 0)  # which all parts share
    found = {part.name: part.at(step) for part in method.work}
    if method.split is None:
        return found
    return {name: part._replace(dispatches=part.dispatches / ranks) for name, part in found.items()}


def keys_held(split: Split | None, tokens: float, setting: Setting) -> float:
    """What bytes of other ranks' keys go by, for a shard of so many tokens: with Ulysses tokens, as often as keys are
    repeated; under context parallelism tokens of whole sequences times the heads of a group. [Note: bytes of keys]"""
    if split is None:
        return 0.0
    if split.by == ULYSSES:
        return tokens * split.repeats(setting.ranks)
    whole, found = tokens * setting.ranks, 0.0
    for heads in split.heads:
        found = max(found, min(heads.keys * whole, setting.room / heads.size))
    return max(whole, found)


def available(profile: Profile, setting: Setting) -> tuple[Method, ...]:
    """The methods that this setting's ranks can run; those that are not streamed are taken to share tokens evenly.

    Raises:
        ConfigError: none was counted with sequences split in this way. UnsupportedModelError: ranks cannot share the heads.
    """
    ranks, repeated = setting.ranks, False
    found = [method for method in profile.methods if (method.split.by if method.split else "") == setting.split]
    for split in (method.split for method in found):
        for heads in split.heads if split is not None and split.by == ULYSSES else ():
            for number in (heads.queries, heads.keys):
                if number % ranks and (number == heads.queries or ranks % number):
                    raise heads_error(number, ranks)
            repeated |= heads.keys < ranks
    found = [method for method in found if not (repeated and "kv" in method.saves)]  # repeated keys are not worth it
    if not any(method.chunked for method in found):
        how = setting.split or "whole sequences on each rank"
        why = f" ({'; '.join(profile.left_out)})" if profile.left_out else ""
        raise ConfigError(f"No streamed step was counted with {how}{why}. Plan the model anew with this setting.")
    return tuple(method for method in profile.methods if method in found or not method.chunked)


def flops(method: Method, seq_len: int, chunk_size: int, setting: Setting | None = None) -> float:
    """Of a step, over all ranks that share the sequence."""
    total = 0.0
    for part in work(method, seq_len, chunk_size, setting).values():
        total += part.products + part.forward + part.backward
    return total


def to_json(profile: Profile) -> dict[str, Any]:
    """`profile` as JSON's types; `from_json` is the inverse."""
    return dataclasses.asdict(profile)


def from_json(data: Mapping[str, Any]) -> Profile:
    """The `Profile` that `to_json` gave as `data`, also after a way through JSON text."""

    def node(value: Mapping[str, Any]) -> Node:
        return Node(**{**value, "children": tuple(node(child) for child in value["children"])})

    methods = []
    for value in data["methods"]:
        phases = {
            name: tuple(Phase(one["name"], Law(*one["law"]), one["gradients"]) for one in value[name])
            for name in ("first", "accumulating")
        }
        parts = tuple(Part(one["name"], tuple(Law(*law) for law in one["laws"]), one["k_block"]) for one in value["work"])
        split = value.get("split")
        split = split and Split(**{**split, "heads": tuple(Heads(*heads) for heads in split["heads"])})
        given = {"saves": tuple(value["saves"]), "host": Law(*value["host"]), "work": parts, "split": split}
        methods.append(Method(**{**value, **phases, **given}))
    groups = tuple(Group(**group) for group in data["groups"])
    lists = {name: tuple(data[name]) for name in ("left_out", "frozen", "trained")}
    return Profile(**{**data, **lists, "groups": groups, "methods": tuple(methods), "tree": node(data["tree"])})
