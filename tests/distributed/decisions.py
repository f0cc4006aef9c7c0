"""What one rank may decide by itself, as a worker that has each rank decide otherwise. [Note: what
a rank decides alone]

python -m tests.distributed.decisions RANK PORT '[{"engine": "zero-3", "decisions": ["short", "lazy, read"]}, ...]' RANKS

Each case trains STEPS steps under an engine, patched and unpatched, on the same batches;
`RecordedMode` raises at the first collective that another rank does not issue. A case's "changes"
are of the model, as in engines.py. Its "mutant" takes a cure away; on the rank "fails_in_a_trial"
the second layer raises in each trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

import streambp
from streambp.admission import layer_checkpoint
from streambp.distributed.engines import EngineOwnership
from streambp.head.log_probs import HeadInputs
from streambp.layer import gradients
from streambp.lazy.head import LazyHead
from streambp.model import head_deferral, state, unpatched, wrappers
from streambp.prefixes import calls
from tests.distributed import engines as adapters
from tests.distributed.recorded import RecordedMode
from tests.distributed.watch import engines_seen
from tests.distributed.worker import ROW_PREFIX, distance
from tests.families import make_batch

STEPS = (
    2  # the first is looked at, and ZeRO-3 writes down its order of gathers; the second is decided
)
CASE_TIMEOUT_SECONDS = 60  # of a case; then a rank that hangs says where, and ends
ENGINES = {
    "ddp": (adapters.DDP, {}), "fsdp2": (adapters.FSDP2, {}),
    **{f"zero-{stage}": (adapters.DeepSpeed, {"stage": stage}) for stage in (1, 2)},
    "zero-3": (adapters.DeepSpeed, {"stage": 3, "zero": {
        "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}}),
}  # fmt: skip


def own_loss(model, batch):
    labels = batch["labels"][:, 1:]
    logits = model(
        **{name: x for name, x in batch.items() if name != "labels"}, use_cache=False
    ).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten())


def read_logits(model, batch):
    """The model's loss, a term of the logits, and numbers that this rank alone looks at."""
    output = model(**batch, use_cache=False)
    loss = output.loss
    if isinstance(model, FSDPModule):  # beside a loss it gives no logits
        return loss
    # unpatched ZeRO-3 wants all ranks to use as many outputs
    if type(output.logits) is torch.Tensor:
        loss = F.cross_entropy(
            output.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
    loss = loss + 0.1 * output.logits.float().logsumexp(-1).mean()
    with torch.no_grad():
        assert 0 <= (output.logits.argmax(-1) == batch["labels"]).double().mean() <= 1
        assert output.logits.std().isfinite()
    return loss


def nothing_labelled(model, batch):
    labels = torch.full_like(batch["labels"], -100)
    output = model(**{**batch, "labels": labels}, use_cache=False)
    # unpatched the loss is NaN
    return output.loss if output.logits is None else 0.0 * output.logits.sum()


def nothing_counted(model, batch):
    """The loss as a Trainer asks for it that counted no label: unpatched NaN, with gradients of
    zero."""
    labels = torch.full_like(batch["labels"], -100)
    return model(
        **{**batch, "labels": labels}, num_items_in_batch=torch.tensor(0), use_cache=False
    ).loss


def per_token(model, batch):
    if not hasattr(getattr(model, "module", model), "_streambp") and not hasattr(
        model, "_streambp"
    ):
        return model(**batch, use_cache=False).loss
    log_probs = model(**batch, use_cache=False, output_log_probs=True).log_probs
    return -log_probs.sum() / (batch["labels"][:, 1:] != -100).sum()


def mixed(engine):
    """Each token gets its left neighbour's value: the layer cannot be cut."""
    layer = adapters.decoder_layers(engine.module)[0]
    layer.mlp.register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(1, 1),))


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one rank does: its settings, batch and loss; what its `describe` says where it is done
    (engine -> text).

    prepare: is done to the rank's engine, patched and unpatched. between: to the patched state,
    before backward.
    """

    stream: dict = dataclasses.field(default_factory=dict)
    one_chunk: bool = False
    batch: str = "plain"  # or "shared", of which rows begin alike, or "padded"
    masked: bool = False  # "padded" always is
    rows: int = 2
    loss: Callable | None = None
    prepare: Callable | None = None
    between: Callable | None = None
    raises: bool = False
    says: tuple[tuple[str, str], ...] = ()


AUTO, SHARES, PACKS = {"saves": "auto"}, {"rows": "packed"}, {"rows": "auto"}
ALL_ENGINES = tuple(ENGINES)
ENGINES_HOLDING_HEADS = ("fsdp2", "zero-3")
DECISIONS = {
    "chunks": Decision({"saves": ()}),
    "saves": Decision({"saves": ("attn_out", "kv", "mlp.gate_proj"), "offload": "cpu"}),
    "short": Decision(AUTO, True, says=(("ddp", "as the unpatched model"),)),
    "begun again": Decision(AUTO, True, raises=True),
    "kept graphs": Decision({**AUTO, "unpatched_runs": False}, True),
    "let go": Decision(
        {**AUTO, "unpatched_runs": False}, True, between=lambda s: s.pending.drop_saves and s.pending.drop_saves()
    ),
    "a hook mixes": Decision({"saves": ()}, prepare=mixed,
        says=tuple((name, "checkpoint") for name in ALL_ENGINES)),
    "lazy, unread": Decision({"lazy_logits": True}),
    "lazy, read": Decision({"lazy_logits": True}, loss=read_logits),
    "own loss": Decision({}, loss=own_loss),
    "own loss, lazy": Decision({"lazy_logits": True}, loss=own_loss),
    "no label": Decision({}, loss=nothing_labelled),
    "nothing counted": Decision({}, loss=nothing_counted),
    "nothing counted, lazy": Decision({"lazy_logits": True}, loss=nothing_counted),
    "per token": Decision({}, loss=per_token),
    "shares": Decision(SHARES, batch="shared", says=(("ddp", "were computed as"),)),
    "shares, mask": Decision(SHARES, batch="shared", masked=True),
    "one row": Decision(SHARES, rows=1),
}  # fmt: skip
COMPUTED_MESSAGES = tuple((name, "were computed as") for name in ALL_ENGINES)
ROWS_MESSAGES = tuple((name, "rows: computed as given: ") for name in ALL_ENGINES)
PADDING = {  # of ranks with padding and without
    "padded": Decision(PACKS, batch="padded", says=COMPUTED_MESSAGES),
    "padded, offloaded": Decision(
        {**PACKS, "saves": ("kv",), "offload": "cpu"}, batch="padded", says=COMPUTED_MESSAGES
    ),
    "padded, lazy": Decision({**PACKS, "lazy_logits": True}, batch="padded", loss=own_loss),
    "padded, packed": Decision(SHARES, batch="padded", says=COMPUTED_MESSAGES),
    "full": Decision(PACKS, masked=True),  # of which describe says nothing
    "full, packed": Decision(SHARES, masked=True, says=ROWS_MESSAGES),
    "no mask": Decision(PACKS),
}
EVERY_DECISION = {**DECISIONS, **PADDING}


def batches(rank, decision):
    """A rank's micro-batches; lengths differ between steps and ranks."""
    for step in range(STEPS):
        length = (17, 23)[step] + 6 * rank + (90 if decision.batch == "shared" else 0)
        mode = ("left-padded", "right-padded")[step] if decision.batch == "padded" else "plain"
        batch = make_batch(mode, length=length, seed=10 * step + rank)
        if decision.batch == "shared":
            for name in ("input_ids", "labels"):
                batch[name][1, :-6] = batch[name][0, :-6]
        if decision.masked:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        yield {name: value[: decision.rows] for name, value in batch.items()}


def rows_of(case):
    return next(
        (rows for name in case["decisions"] if (rows := EVERY_DECISION[name].stream.get("rows"))),
        "as_given",
    )


def make_engine(case, rank, decision, patched):
    base, settings = ENGINES[case["engine"]]
    # To share is a setting of the run, as an engine is; what comes of it is decided by each rank.
    stream = {**decision.stream, "rows": rows_of(case)}
    settings = {**settings, **case.get("changes", {})}
    settings = {**settings, "stream": {k: v for k, v in stream.items() if k != "lazy_logits"}}
    settings |= {
        "one_chunk_on": rank if decision.one_chunk else None,
        "logits": stream.get("lazy_logits", False),
    }
    kind = type(
        "Deciding",
        (base,),
        {"loss": lambda self, batch: (decision.loss or its_loss)(self.wrapped, batch)},
    )
    engine = kind(settings, rank, patched)
    if decision.prepare is not None:
        decision.prepare(engine)
    return engine


def its_loss(model, batch):
    return model(**batch, use_cache=False).loss


def state_of(engine):
    return getattr(engine.module, "_streambp", None) or engine.wrapped._streambp


def train(case, rank, decision, patched, name):
    """Gradients of each step and the weights at the end; how many collectives; whether something
    was raised."""
    engine, tensors, raised = make_engine(case, rank, decision, patched), {}, []
    recorded, real = RecordedMode(name), unpatched.UnpatchedRuns.enter_layer

    def enter_layer(runs):
        raised.append(1)
        if len(raised) % 2 == 0:  # in the second of two layers
            raise torch.OutOfMemoryError("no memory")
        real(runs)

    def in_layer(layer, args, kwargs, call=wrappers.LayerForward._call):
        if layer.layer_state.index == 1 and layer.state.running.failed is not None:
            raised.append(1)
            raise KeyError("rope")
        return call(layer, args, kwargs)

    projection = {}
    watched = (
        projection_seen(engine, projection) if case.get("projection") else contextlib.nullcontext()
    )
    with pytest.MonkeyPatch.context() as patch, engines_seen() as engines, watched:
        if patched and decision.raises:
            patch.setattr(unpatched.UnpatchedRuns, "enter_layer", enter_layer)
        if patched and case.get("fails_in_a_trial") == rank:
            patch.setattr(wrappers.LayerForward, "_call", in_layer)
        for step, batch in enumerate(batches(rank, decision)):
            with recorded if step == 0 else RecordedMode(f"{name} {step}") as alike:
                engine.micro_step(batch, last=True)
            recorded.issued += alike.issued if alike is not recorded else []
            tensors |= {f"{step} {key}": gradient for key, gradient in engine.gradients().items()}
            with RecordedMode(f"{name} {step} stepped"):
                engine.step()
    tensors |= {f"weight {key}": weight for key, weight in engine.weights().items()}
    assert engines == {case["engine"]}, engines
    description = str(streambp.describe(engine.wrapped)) if patched else ""
    return (
        tensors,
        len(recorded.issued),
        {"raised": len(raised), "said": description, "projection": projection},
    )


@contextlib.contextmanager
def projection_seen(engine, max_bytes):
    """While layers run, forward and backward: bytes of the output projection that are on this rank,
    gathered or copied."""
    head, copies, borrow = (
        engine.module.get_output_embeddings(),
        [],
        head_deferral.BorrowWeights.forward,
    )
    weight = next(iter(head.parameters()))

    def forward(ctx, lent, hidden_states):
        copies.extend(StorageWeakRef(x.untyped_storage()) for x in lent.copies)
        return borrow(ctx, lent, hidden_states)

    def record_bytes(module, args):
        copies_alive = sum(not copy.expired() for copy in copies)
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        max_bytes[phase] = max(
            max_bytes.get(phase, 0), weight.nbytes + copies_alive * 4 * weight.ds_numel
        )

    def reached(*_):
        record_bytes(None, ())

    # Backward hooks of a module's insides would be an engine's business; a tensor's are not.
    layers = adapters.decoder_layers(engine.module)
    handles = [layer.register_forward_pre_hook(record_bytes) for layer in layers]
    handles += [layer.post_attention_layernorm.weight.register_hook(reached) for layer in layers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_deferral.BorrowWeights, "forward", staticmethod(forward))
        yield
    for handle in handles:
        handle.remove()


def begun_again():
    """A1: what is taken for a model that no engine holds."""
    no_hold = EngineOwnership(False, False)
    return [
        (state, "engine_ownership", lambda module: no_hold),
        (gradients, "engine_ownership", lambda module: no_hold),
    ]


def reads_the_weight():
    """A2: the projection's weight is looked at outside of its own forward."""
    real = head_deferral.HeldHead.install
    return [(head_deferral.HeldHead, "install", lambda head: (head._head[0].weight, real(head)))]


def gathers_where_used():
    """A3: each result of the logits asks the engine for the weights."""
    heads, forward, products = [], head_deferral.HeldHead.forward, LazyHead.products
    return [
        (
            head_deferral.HeldHead,
            "forward",
            lambda head, x: (heads.append(head._head[0]), forward(head, x))[1],
        ),
        (LazyHead, "products", lambda hub: (heads[-1](hub.hidden), products(hub))[1]),
    ]


def tries_alone():
    """A4: a rank tries what is new to it."""
    return [(calls, "ranks_must_agree", lambda module: False)]


def stops_in_a_trial():
    """A rank leaves the others in the middle of a trial's forward."""
    return [
        (
            wrappers.LayerForward,
            "_call_in_trial",
            lambda layer, _, args, kwargs: layer._call(args, kwargs),
        )
    ]


def gradients_as_they_come():
    """A layer that runs whole gives its gradients one by one."""
    return [
        (
            layer_checkpoint,
            "_join_gradients",
            lambda layer_state, args, kwargs: (contextlib.nullcontext(), args, kwargs),
        )
    ]


def scales_zeros():
    """Gradients that are zero for want of labels are multiplied by an infinite upstream
    gradient."""
    return [(HeadInputs, "labelled", 1)]


MUTANTS = {
    function.__name__: function
    for function in (
        begun_again,
        reads_the_weight,
        gathers_where_used,
        tries_alone,
        stops_in_a_trial,
        gradients_as_they_come,
        scales_zeros,
    )
}


@functools.cache
def expected(engine, decisions, rank, projection, changes):
    """What the unpatched engine gives for the same batches and losses."""
    case = {"engine": engine, "decisions": decisions, "projection": projection}
    case["changes"] = dict(changes)
    return train(
        case,
        rank,
        EVERY_DECISION[decisions[rank]],
        None,
        f"unpatched {engine} {decisions} {projection} {changes}",
    )


def like(name):
    """Of the decisions for which the unpatched engine does the same, the first."""
    decision_of_name = EVERY_DECISION[name]

    def key(d):
        loss = d.loss if d.loss is not per_token else None
        return d.batch, d.masked, d.rows, loss, d.prepare

    return next(
        peer for peer, decision in EVERY_DECISION.items() if key(decision) == key(decision_of_name)
    )


def run(case, rank, number):
    """A case's row: this rank's error, what it did, and the seconds that it took."""
    begun, name = time.monotonic(), f"case {number}"
    decision = EVERY_DECISION[case["decisions"][rank]]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for owner, attribute, value in MUTANTS[case["mutant"]]() if "mutant" in case else ():
            patch.setattr(owner, attribute, value)
        tensors, issued, did = train(case, rank, decision, case.get("patched", "before"), name)
    row = {"issued": issued, **did}
    stock = expected(
        case["engine"],
        tuple(like(peer) for peer in case["decisions"]),
        rank,
        case.get("projection"),
        tuple(case.get("changes", {}).items()),
    )
    row["error"], row["projection unpatched"] = distance(tensors, stock[0]), stock[2]["projection"]
    messages = [text for engine, text in decision.says if engine == case["engine"]]
    # no other rank tries that kind of call
    one_rank_tests = case["engine"] in ENGINES_HOLDING_HEADS and "no mask" in case["decisions"]
    messages = (
        ["a mask on some"]
        if messages and decision.batch == "padded" and one_rank_tests
        else messages
    )
    # where rows may share, nothing runs as unpatched
    if rows_of(case) != "as_given" and "as the unpatched model" in messages:
        messages = []
    row["done"] = all(text in row["said"] for text in messages)
    gc.collect()
    return {**row, "seconds": time.monotonic() - begun}


def main():
    rank, port, cases, size = (
        int(sys.argv[1]),
        sys.argv[2],
        json.loads(sys.argv[3]),
        int(sys.argv[4]),
    )
    os.environ.update(
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        WORLD_SIZE=str(size),
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=CASE_TIMEOUT_SECONDS / 2)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=patience)
    if any(case["engine"].startswith("zero") for case in cases):
        import deepspeed

        deepspeed.init_distributed("gloo", rank=rank, world_size=size, timeout=patience)
    for number, case in enumerate(cases):
        faulthandler.dump_traceback_later(2 * CASE_TIMEOUT_SECONDS, exit=True)
        row = run(case, rank, number)
        rows = [None] * size
        dist.all_gather_object(rows, row)
        print(ROW_PREFIX + json.dumps({"case": case, "ranks": rows}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


def pairs():
    """Every pair of decisions, in no order: a rank's number decides nothing."""
    return list(itertools.combinations_with_replacement(DECISIONS, 2))


def fours():
    """Twenty times four of the sixteen decisions, such that every two of them come together once:
    the lines of the affine plane over the field of four elements, whose sums are those of bits."""
    times = [[0, 0, 0, 0], [0, 1, 2, 3], [0, 2, 3, 1], [0, 3, 1, 2]]
    lines = [
        [4 * x + (times[slope][x] ^ start) for x in range(4)]
        for slope in range(4)
        for start in range(4)
    ]
    lines += [[4 * x + y for y in range(4)] for x in range(4)]
    names = list(DECISIONS)
    return [[names[index] for index in line] for line in lines]


if __name__ == "__main__":
    main()
