"""Costs of a model's steps as data, and the arithmetic from a sequence length to bytes.

A `Profile` contains numbers and names only. `json.dumps(dataclasses.asdict(profile))` therefore
suffices to compute every peak elsewhere, for example in a web page. `peak` is this computation.
Each phase of a step has

    static + one + tokens * T + chunk * C + chunks * N + keys * K + gradients * (share - 1)

bytes, with the coefficients of its law (`laws.py`); the peak is the largest phase. T and C are
positions in each row of the batch on one rank, N the number of chunks, K other ranks' keys
(`held_keys`). `gradients` are the bytes in `.grad` at the start of the phase, and `share` is the
fraction of them on this rank (DESIGN.md section 6). Laws are counted at lengths of tens of
thousands of tokens. Laws are an upper bound for shorter sequences, because outputs of attention
kernels are at most as large as their block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from streambp.errors import ConfigError
from streambp.fields import check_fields
from streambp.model.split import TWO_SPLITS_ERROR
from streambp.planner.host_weights import HostLayers, device_gradients
from streambp.planner.laws import Law, PhaseLaws, features
from streambp.planner.work import Work
from streambp.sharded.gathered_keys import GatheredShards
from streambp.sharded.shards import Shards, heads_error

ULYSSES, CONTEXT_PARALLEL = Shards.by, GatheredShards.by
SPLIT_FIELDS = {ULYSSES: "ulysses", CONTEXT_PARALLEL: "context_parallel"}  # fields of `Setting`


@dataclasses.dataclass(frozen=True)
class Phase:
    """Memory of one phase of a training step on the device, without weights and optimizer. A phase
    is the forward or backward of one layer, of the head or of the embedding.

    Attributes:
        name: the phase's name, such as "backward 35" (for layer 35) or "head".
        law: the phase's bytes as a linear function of the tokens of a row, the tokens of a chunk,
            the number of chunks and so on. `law.chunks` is not 0 only for layers with recurrent
            states, which save bytes for each chunk.
        gradients: bytes that the step has added to `.grad` before the phase; included in
            `law.constant`.
    """

    name: str
    law: Law
    gradients: float = 0.0


class Heads(NamedTuple):
    """Numbers of heads in a layer's attention. If ranks share a sequence, each rank gathers the
    keys and values of full sequences from the other ranks, some heads at a time.

    Attributes:
        queries: query heads.
        keys: key and value heads.
        size: bytes that a rank needs for one gathered key head and value head, with their
            gradients, for each token of a full sequence.
    """

    queries: int
    keys: int
    size: int


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
    """The kind of sequence sharding of a step, and the bytes that ranks exchange in the step, as
    counted on tensors without data.

    "Keys" are keys and values here. A rank's shard is the part of a sequence that the rank holds.
    Ulysses has no `gathered` and `summed` bytes, and context parallelism no `traded` bytes; these
    are 0.

    Attributes:
        by: kind of sharding: "DeepSpeed Ulysses" or "context parallelism".
        heads: the different numbers of attention heads among the model's layers.
        traded: bytes of all-to-alls of queries and outputs, for each token of the shard.
        traded_keys: bytes of all-to-alls of keys for each token of the shard, if no key/value head
            is copied to several ranks.
        gathered: bytes of gathered keys in a step for each token of the full sequence, if heads are
            gathered in several groups one after the other.
        gathered_at_once: the bytes as in `gathered`, but if all heads are gathered as one group.
            The number is smaller if backward reads the keys twice, because one group stays in
            memory and several groups are gathered again.
        summed: bytes of key gradients summed over ranks, for each token of the full sequence.
        moved: bytes moved on the device by reordering keys, for each token of the shard (Ulysses)
            or of the full sequence (context parallelism).
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
        """Return the number of ranks that have the same key/value head under Ulysses, by which the
        bytes of exchanged keys and values are multiplied. The number is 1 unless `ranks`, the ranks
        that share a sequence, are more than the key/value heads."""
        return max(1.0, max((ranks / heads.keys for heads in self.heads), default=1.0))


@dataclasses.dataclass(frozen=True)
class Method:
    """Way to run a training step, such as gradient checkpointing, with its memory and FLOPs as
    functions of a row's tokens T and a chunk's tokens C. The functions are fitted through steps
    that ran on tensors without data.

    Attributes:
        name: name of this way, such as "checkpointing" or "streambp saves attn_out".
        saves: names of the tensors saved for backward, as in `StreamConfig.saves`.
        offload: "none", or "cpu" if layer inputs and saved tensors wait in host memory.
        prefix_on_host: True if a layer's keys and values are in host memory, from which each chunk
            copies them (`StreamConfig.gpu_memory`).
        chunked: True if the sequence is cut into chunks of C; otherwise C has no effect.
        first: memory of each phase (the forward or backward of a layer, for example) of a step
            whose gradients are None at the start.
        accumulating: memory of each phase of a step that adds to existing gradients.
        host: bytes of host memory.
        work: FLOPs and bytes read and written, by kind of phase, summed over the ranks that share a
            sequence. T is that of the full sequence here.
        split: kind of sequence sharding and its exchanged bytes; None: each rank has full
            sequences. T and C of the other fields are those of a rank's shard.
    """

    name: str
    saves: tuple[str, ...]
    offload: str
    prefix_on_host: bool
    chunked: bool
    first: tuple[Phase, ...]
    accumulating: tuple[Phase, ...]
    host: Law
    work: tuple[PhaseLaws, ...]
    split: SequenceSplit | None = None

    @property
    def counts_chunks(self) -> bool:
        """True if layers save bytes for each chunk (recurrent states). Larger and fewer chunks may
        then take less memory, so the search for the longest sequence tries every chunk size, and
        not only the smallest."""
        if self.host.chunks > 0:
            return True
        return any(phase.law.chunks > 0 for phase in (*self.first, *self.accumulating))


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Number and bytes of a model's dense parameters, or of its experts' parameters. The two groups
    are separate, because expert parallelism gives them different numbers of replicas over the
    ranks.

    Attributes:
        name: "dense" or "expert".
        parameters: number of all parameters of the group.
        bytes: bytes of these parameters as stored, quantised or not.
        trainable: number of trainable parameters.
        trainable_bytes: bytes of trainable parameters, and of their gradients.
    """

    name: str
    parameters: int
    bytes: int
    trainable: int
    trainable_bytes: int


@dataclasses.dataclass(frozen=True)
class Node:
    """A module in the tree of a model's modules, with its parameters and activations. Equal modules
    share one node.

    Attributes:
        name: the module's name.
        kind: the module's class name.
        count: number of equal modules that share this node.
        parameters: number of parameters in one of these modules.
        activation: bytes for each token that the forward of one of these modules saves for
            backward, in an unpatched step.
        children: nodes of the modules inside.
    """

    name: str
    kind: str
    count: int
    parameters: int
    activation: float
    children: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Profile:
    """Memory and FLOPs of a model's training steps for a batch of `batch_size` rows. The steps ran
    on tensors without data, so that their costs were counted; other steps are predicted from these.

    Attributes:
        model: the model's class name.
        dtype: dtype of the weights.
        layers: number of layers.
        batch_size: number of rows.
        groups: numbers and bytes of dense and of expert parameters.
        unsharded: bytes of full parameters that ZeRO-3 has on a rank at a time.
        methods: the ways to run a step, such as gradient checkpointing, with their costs.
        tree: the model's modules with their parameters and activations.
        left_out: texts that name the unpatched methods and the kinds of sequence sharding that
            could not be counted, with reasons.
        mixers: text on the assumed code of recurrent and convolutional layers.
        saves: bytes and FLOPs of tensors that saves="auto" may save, in the form of
            `layer_costs.counted_saves`; None: unknown.
        frozen: bytes that each layer's frozen weights take in host memory, if moved there.
        decoded: bytes of one layer's dequantized 4-bit weights, without the layer's largest weight.
        trained: bytes that each layer's trained weights take in host memory, if moved there; 0 for
            layers with frozen weights.
        without_adapters: names of Linears that peft refuses to adapt, or that do not exist.
        assumed: texts on the assumptions of the count about a model that is no causal language
            model.
    """

    model: str
    dtype: str
    layers: int
    batch_size: int
    groups: tuple[ParameterGroup, ...]
    unsharded: int
    methods: tuple[Method, ...]
    tree: Node
    left_out: tuple[str, ...] = ()
    mixers: str = ""
    saves: Mapping[str, Any] | None = None
    frozen: tuple[int, ...] = ()
    decoded: int = 0
    trained: tuple[int, ...] = ()
    without_adapters: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def method(self, name: str) -> Method:
        """Return the `Method` with this name: a way to run a step, such as "checkpointing", with
        its counted memory and FLOPs.

        Raises:
            ConfigError: no way with this name was counted.
        """
        return entry_of({method.name: method for method in self.methods}, name)


Entry = TypeVar("Entry")


def entry_of(methods: Mapping[str, Entry], name: str) -> Entry:
    """Return the value of `methods`, a dict by method name, for the method `name`. A method is a
    way to run a training step, such as "checkpointing".

    Raises:
        ConfigError: the dict has no such name; the message lists its names.
    """
    if name not in methods:
        raise ConfigError(f"method is {name!r}; it must be one of {list(methods)}.")
    return methods[name]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Training setting on which the costs of a step depend: ranks, ZeRO, optimizer and host memory.

    Args:
        gpus: number of ranks, and of replicas of each parameter (expert parallelism divides the
            experts' replicas).
        zero: 0 for DDP or one GPU; ZeRO's stage otherwise.
        optimizer: bytes for each trainable parameter; 12 is Adam with a float32 copy of the
            weights, 0 is no optimizer.
        gradient_bytes: bytes of each element of a gradient; None: those of the parameter's dtype.
        ulysses, context_parallel: number of ranks that share one sequence; at most one of the two
            exceeds 1.
        expert_parallel: number of ranks that share the experts.
        optimizer_on_host: True if optimizer state is in host memory (ZeRO-Offload and the like).
        accumulate: True if the step adds to existing gradients; False: gradients are None at its
            start.
        room: bytes that a rank may use for gathered keys and values and their gradients under
            context parallelism; at least one key/value head is gathered. `plan` computes the value
            in the way of a real step (`plan.set_room`).
        weights: "device", "cpu" or "auto" (`StreamConfig.weights`), for chunked steps on one GPU;
            "auto" keeps weights on the device if a step fits.
        on_host: layers with weights in host memory; None: no layer. `plan` selects the number that
            a step needs.
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
    on_host: HostLayers | None = None

    def __post_init__(self) -> None:
        ranks = dict.fromkeys(("gpus", "ulysses", "context_parallel", "expert_parallel"), 1)
        check_fields(self, **ranks, zero=0, optimizer=0, gradient_bytes=0, room=0)
        if self.ulysses > 1 and self.context_parallel > 1:
            raise ConfigError(
                f"{TWO_SPLITS_ERROR} Choose one of both: ulysses is {self.ulysses}, and "
                f"context_parallel is {self.context_parallel}."
            )
        if self.gpus % self.ranks:
            raise ConfigError(
                f"gpus is {self.gpus}, and {self.ranks} ranks share a sequence; gpus counts all "
                f"ranks and must be a multiple of {self.ranks}."
            )
        if self.gpus % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel is {self.expert_parallel}; it must divide gpus={self.gpus}."
            )

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share one sequence; 1 without sequence sharding."""
        return self.ulysses * self.context_parallel

    @property
    def split(self) -> str:
        """Return the kind of sequence sharding over ranks: "DeepSpeed Ulysses", "context
        parallelism", or "" if each rank has full sequences."""
        if self.ulysses > 1:
            return ULYSSES
        if self.context_parallel > 1:
            return CONTEXT_PARALLEL
        return ""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes on one rank at the peak of a training step, by kind: `total` = weights + optimizer +
    gradients + activations. The peak is in the phase (a layer's backward, for example) that needs
    most device memory.

    Attributes:
        total: bytes on the device in this phase.
        phase: name of this phase, such as "backward 35" (for layer 35).
        weights: bytes of weights on the device.
        optimizer: bytes of optimizer state on the device.
        gradients: bytes of gradients on the device.
        activations: all other bytes on the device.
        host: bytes of host memory.
        phases: dict from the name of each phase to its total bytes on the device.
    """

    total: float
    phase: str
    weights: float
    optimizer: float
    gradients: float
    activations: float
    host: float
    phases: Mapping[str, float]


def bytes_between_steps(profile: Profile, setting: Setting) -> Peak:
    """Return the bytes on one rank between training steps: weights, optimizer state and all
    gradients. The peak of a step is computed from these bytes. The fields `phase` and `phases` are
    empty.

    A bf16 parameter with Adam takes 2 bytes, 2 bytes of gradient, and 12 / R bytes of optimizer
    state if R replicas share the state (ZeRO).
    """
    weights = gradients = optimizer = 0.0
    for group in profile.groups:
        if group.name == "expert":
            expert = setting.expert_parallel
        else:
            expert = 1
        replicas = setting.gpus / expert
        weights += group.bytes / expert / (replicas if setting.zero >= 3 else 1)
        if setting.gradient_bytes is None:
            size = group.trainable_bytes
        else:
            size = group.trainable * setting.gradient_bytes
        gradients += size / expert / (replicas if setting.zero >= 2 else 1)
        optimizer += (
            setting.optimizer * group.trainable / expert / (replicas if setting.zero >= 1 else 1)
        )
    if setting.zero >= 3:
        weights = min(weights + profile.unsharded, sum(group.bytes for group in profile.groups))
    if setting.optimizer_on_host:
        host = optimizer
        optimizer_here = 0.0
    else:
        host = 0.0
        optimizer_here = optimizer
    if setting.on_host is not None:
        weights = weights - setting.on_host.freed
        host = host + setting.on_host.bytes
        part = setting.on_host.part
        host = host + part * (gradients + optimizer_here)
        gradients = (1 - part) * gradients
        optimizer_here = (1 - part) * optimizer_here
    return Peak(
        weights + gradients + optimizer_here, "", weights, optimizer_here, gradients, 0.0, host, {}
    )


def peak(profile: Profile, method: Method, seq_len: int, chunk_size: int, setting: Setting) -> Peak:
    """Return the peak memory of a step on one rank in bytes, with the name of the phase in which
    the peak occurs.

    Args:
        profile: the model's memory and FLOPs, counted on tensors without data.
        method: the way to run the step, such as gradient checkpointing, with its counted memory.
        seq_len: positions of a row (of the full sequence, if ranks share it).
        chunk_size: positions of a chunk.
        setting: the training setting.
    """
    if not method.chunked and setting.on_host is not None:
        setting = dataclasses.replace(setting, on_host=None)
    between_steps = bytes_between_steps(profile, setting)
    born = sum(group.trainable_bytes for group in profile.groups)
    if setting.on_host is None:
        part = 0.0
    else:
        part = setting.on_host.part
    if born and part < 1:
        share = between_steps.gradients / (born * (1 - part))
    else:
        share = 0.0
    tokens = seq_len / setting.ranks
    if method.chunked:
        chunk = min(chunk_size, tokens)
    else:
        chunk = 0
    step = features(tokens, chunk, held_keys(method.split, tokens, setting))
    if setting.accumulate:
        present = between_steps.gradients
    else:
        present = 0.0
    parts: dict[str, tuple[float, float]] = {}  # gradients, activations
    if setting.accumulate:
        phases = method.accumulating
    else:
        phases = method.first
    gradients_by_phase = device_gradients(
        [(phase.name, phase.gradients) for phase in phases], setting.on_host
    )
    for phase, of_device in zip(phases, gradients_by_phase, strict=True):
        phase_bytes = (present + share * of_device, phase.law.at(step) - phase.gradients)
        parts[phase.name] = max(parts.get(phase.name, phase_bytes), phase_bytes, key=sum)
    worst = max(parts, key=lambda name: sum(parts[name]))
    gradients, activations = parts[worst]
    base = between_steps.weights + between_steps.optimizer
    host = method.host.at(step, between_steps.host)
    totals = {name: base + sum(phase_bytes) for name, phase_bytes in parts.items()}
    return Peak(
        totals[worst],
        worst,
        between_steps.weights,
        between_steps.optimizer,
        gradients,
        activations,
        host,
        totals,
    )


def work(
    method: Method, seq_len: int, chunk_size: int, setting: Setting | None = None
) -> dict[str, Work]:
    """Return the predicted costs of a step, as a dict by kind of phase ("forward" of all layers,
    "head" and so on). Costs are FLOPs, bytes read and written, and dispatches (operations that
    torch starts).

    FLOPs and bytes are summed over the ranks that share the sequence; dispatches are those of one
    rank.

    Args:
        method: the way to run the step, with its memory and FLOPs, counted on tensors without data.
        seq_len: positions of a row (of the full sequence, if ranks share it).
        chunk_size: positions of a chunk on one rank.
        setting: the training setting; None: one rank.
    """
    if setting is None:
        ranks = 1
    else:
        ranks = setting.ranks
    if method.split is not None:
        full_chunk = chunk_size
    else:
        full_chunk = chunk_size * ranks
    if method.chunked:
        chunk = min(full_chunk, seq_len)
    else:
        chunk = 0
    # all parts have the same k_block
    step = features(seq_len, chunk, k_block=method.work[0].k_block if method.work else 0)
    costs = {part.name: part.at(step) for part in method.work}
    if method.split is None:
        return costs
    return {name: part._replace(dispatches=part.dispatches / ranks) for name, part in costs.items()}


def held_keys(split: SequenceSplit | None, tokens: float, setting: Setting) -> float:
    """Return an amount, in tokens, that measures the keys and values of other ranks' tokens on a
    rank. The memory of each phase of a step (a layer's backward, for example) is linear in this
    amount.

    Under Ulysses the amount is the shard's tokens times the number of ranks with copies of the same
    keys. Under context parallelism the amount is the tokens of full sequences times the number of
    heads that are gathered at a time.

    Args:
        split: kind of sequence sharding; None: no sharding, and the amount is 0.
        tokens: tokens of a row in the rank's shard (its part of the sequence).
        setting: the training setting, with the number of ranks and the memory for gathered keys.
    """
    if split is None:
        return 0.0
    if split.by == ULYSSES:
        return tokens * split.repeats(setting.ranks)
    full_length = tokens * setting.ranks
    gathered = 0.0
    for heads in split.heads:
        gathered = max(gathered, min(heads.keys * full_length, setting.room / heads.size))
    return max(full_length, gathered)


def available_methods(profile: Profile, setting: Setting) -> tuple[Method, ...]:
    """Return the methods (ways to run a step) of a profile that are possible with this setting. The
    result has all unpatched methods, and the chunked methods that were counted with the setting's
    kind of sequence sharding.

    The tokens of unpatched methods are assumed to be shared evenly among the ranks.

    Raises:
        ConfigError: no step was counted with this kind of sequence sharding.
        UnsupportedModelError: the ranks cannot share the heads.
    """
    ranks = setting.ranks
    repeated = False
    methods = []
    for method in profile.methods:
        if (method.split.by if method.split else "") == setting.split:
            methods.append(method)
    for method in methods:
        split = method.split
        for heads in split.heads if split is not None and split.by == ULYSSES else ():
            for number in (heads.queries, heads.keys):
                if number % ranks and (number == heads.queries or ranks % number):
                    raise heads_error(number, ranks)
            repeated |= heads.keys < ranks
    # repeated keys are not worth saving
    methods = [method for method in methods if not (repeated and "kv" in method.saves)]
    if not any(method.chunked for method in methods):
        how = setting.split or "whole sequences on each rank"
        if profile.left_out:
            why = f" ({'; '.join(profile.left_out)})"
        else:
            why = ""
        raise ConfigError(
            f"No streamed step was counted with {how}{why}. Plan the model anew with this setting."
        )
    return tuple(method for method in profile.methods if method in methods or not method.chunked)


def flops(method: Method, seq_len: int, chunk_size: int, setting: Setting | None = None) -> float:
    """Return the FLOPs of one step, summed over all ranks that share the sequence.

    Args:
        method: the way to run the step, with its memory and FLOPs, counted on tensors without data.
        seq_len: positions of a row (of the full sequence, if ranks share it).
        chunk_size: positions of a chunk on one rank.
        setting: the training setting; None: one rank.
    """
    total = 0.0
    for part in work(method, seq_len, chunk_size, setting).values():
        total += part.products + part.forward + part.backward
    return total


def to_json(profile: Profile) -> dict[str, Any]:
    """Return a profile as nested dicts, lists, numbers and strings, for a JSON file or an HTML
    page. `from_json` restores the profile."""
    return dataclasses.asdict(profile)


def from_json(data: Mapping[str, Any]) -> Profile:
    """Return the `Profile` that `to_json` has made into nested dicts and lists."""

    def node(value: Mapping[str, Any]) -> Node:
        """Return a `Node` (a module in the tree of the model's modules) from the dict of its
        fields, with its children."""
        return Node(**{**value, "children": tuple(node(child) for child in value["children"])})

    groups = tuple(ParameterGroup(**group) for group in data["groups"])
    methods = tuple(map(method_from_json, data["methods"]))
    lists = {}
    for name in ("left_out", "frozen", "trained", "without_adapters", "assumed"):
        lists[name] = tuple(data.get(name, ()))
    return Profile(
        **{**data, **lists, "groups": groups, "methods": methods, "tree": node(data["tree"])}
    )


def method_as_json(method: Method) -> dict[str, Any]:
    """Return a `Method` (a way to run a step, with its memory and FLOPs) as nested dicts, lists,
    numbers and strings, for a file. `method_from_json` restores the method."""
    return dataclasses.asdict(method)


def method_from_json(value: Mapping[str, Any]) -> Method:
    """Return a `Method` (a way to run a step, with its memory and FLOPs) from nested dicts and
    lists, the result of `method_as_json`. Entries of "methods" in the result of `to_json` have the
    same form."""
    phases = {}
    for name in ("first", "accumulating"):
        phases[name] = tuple(
            Phase(entry["name"], Law(*entry["law"]), entry["gradients"]) for entry in value[name]
        )
    parts = []
    for entry in value["work"]:
        laws = tuple(itertools.starmap(Law, entry["laws"]))
        floors = tuple(itertools.starmap(Law, entry.get("floors", ())))
        parts.append(PhaseLaws(entry["name"], laws, entry["k_block"], floors))
    split = value.get("split")
    split = split and SequenceSplit(
        **{**split, "heads": tuple(itertools.starmap(Heads, split["heads"]))}
    )
    fields = {
        "saves": tuple(value["saves"]),
        "host": Law(*value["host"]),
        "work": tuple(parts),
        "split": split,
    }
    return Method(**{**value, **phases, **fields})
