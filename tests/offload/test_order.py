"""The order in which backward reads what is on the host: copies are under way before it asks, and
none is left over.

covers: attention/kv.py, attention/prefix.py, layer/saved_tensors.py, offload/manager.py,
planner/plan.py
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from streambp.layer.saved_tensors import SavedForBackward
from streambp.offload.manager import HostTensors
from streambp.planner import estimate
from streambp.planner.profile import Setting
from tests import zoo
from tests.offload.runs import assert_same, model_with, offloaded, sampled, step
from tests.planner.test_estimates import QWEN3_8B

SEPARATE_SAVES = ("attn_out", "kv", "*_proj")
SAVES = [
    (),
    *itertools.chain.from_iterable(itertools.combinations(SEPARATE_SAVES, n) for n in (1, 2, 3)),
    ("attn_out", "*"),
]
# Fused attention, attention over a cache, states, experts, values of another head size, picked
# keys, shared keys, sinks.
FAMILIES = (
    "qwen3",
    "gptj",
    "qwen3_next",
    "lfm2",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v32",
    "gemma3n_text",
    "gpt_oss",
)


class Copies:
    """Copies back to the device, of what is read within.

    reads: of tensors that are on the host. late: those of them that nobody had started to copy.
    copied: copies that were started. most: tensors on the device at a time that nobody had read
    yet; at_once: those of the widest reads.
    """

    def __init__(self):
        self.reads = self.late_reads = self.copied = self.max_arriving = self.at_once = 0

    @property
    def unread_copies(self):
        """Tensors on the device that nobody has read."""
        return self.copied - self.reads


def copies_of_a_step(model, mode="plain", count=2):
    """Of the last of so many steps; in the first, each layer is tried."""
    copies = Copies()
    load, peek = HostTensors.load, HostTensors.peek

    def is_away(store, name, chunk):
        entry = store._entry(name, chunk)
        return entry.source is None and entry not in store._holding.arriving

    def counting_load(store, name, chunk):
        copies.copied += is_away(store, name, chunk)
        load(store, name, chunk)
        copies.max_arriving = max(copies.max_arriving, len(store._holding.arriving))
        copies.at_once = max(copies.at_once, store._ahead)

    def counting_peek(store, name, chunk):
        copies.late_reads += is_away(store, name, chunk)
        copies.reads += store._entry(name, chunk).source is None
        return peek(store, name, chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTensors, "load", counting_load)
        patch.setattr(HostTensors, "peek", counting_peek)
        for _ in range(count):
            copies.__init__()
            step(model, mode)
    return copies


def some(family, saves):
    return saves == ("attn_out", "*") or (family == "qwen3" and len(saves) > 1)


@pytest.mark.fast(3)
@pytest.mark.parametrize(("family", "saves"), sampled(some, FAMILIES, SAVES))
def test_one_read_at_most_is_late_and_nothing_is_left(family, saves):
    copies = copies_of_a_step(offloaded(saves, zoo.build(family, torch.float32)))
    assert copies.reads >= 10
    assert copies.late_reads <= 1  # the first one: what the last layer's backward begins with
    assert copies.unread_copies == 0
    assert copies.max_arriving < 2 * copies.at_once


@pytest.mark.parametrize("mode", ["left-padded", "packed"])
def test_of_other_batches(mode):
    copies = copies_of_a_step(offloaded(("attn_out", "kv", "*")), mode)
    assert (copies.late_reads, copies.unread_copies) == (1, 0)


def test_a_first_backward_reads_a_chunk_more_to_try_each_layer():
    model = offloaded(("attn_out", "*"))
    copies = copies_of_a_step(model, count=1)
    assert copies.late_reads <= 1 + len(model.model.layers)
    assert copies.unread_copies == 0


@pytest.mark.parametrize(
    "saves", [("attn_out", "kv"), pytest.param(("attn_out", "kv", "*"), marks=pytest.mark.full)]
)
def test_with_tiles_nothing_is_left(saves):
    """Tiles are read a block ahead, and all of a tiny model's are one block; what chunks read does
    not wait for them."""
    tiled, untiled = (
        copies_of_a_step(offloaded(saves, **settings)) for settings in ({"gpu_memory": 1}, {})
    )
    assert tiled.unread_copies == untiled.unread_copies == 0
    chunks = copies_of_a_step(offloaded((), gpu_memory=1))
    assert tiled.late_reads < chunks.late_reads  # whose attention visits them once more


@pytest.mark.fast(5)
@pytest.mark.parametrize("lost", ["k.0", "v.0", "attn_out.0", "lse.0", "product.mlp.up_proj#0"])
def test_a_host_with_room_for_a_part(lost, monkeypatch):
    """One of two that belong together is not on the host: both are computed again, and the other
    does not come back for nothing. K and V may differ in size, so that either may be the one that
    fits."""
    saves = ("attn_out", "kv", "*")
    expected = step(model_with(saves))
    model, real = offloaded(saves, on_host_full="recompute"), HostTensors.save

    def save_some(self, name, chunk, tensor):
        if (name, chunk) != (lost, 3):
            real(self, name, chunk, tensor)

    monkeypatch.setattr(HostTensors, "save", save_some)
    copies = copies_of_a_step(model)
    assert (copies.late_reads, copies.unread_copies) == (1, 0)
    assert_same(step(model), expected)


def ascending(patch):
    patch.setattr(
        SavedForBackward, "order", lambda self, real=SavedForBackward.order: real(self)[::-1]
    )


def nothing_ahead(patch):
    patch.setattr(HostTensors, "read_ahead", lambda self: None)


def a_tensor_ahead(patch):
    def seal(self, order, workspace=0, real=HostTensors.seal):
        real(self, [[access] for reads in order for access in reads], workspace)

    patch.setattr(HostTensors, "seal", seal)


def taken_after_the_next_copies_start(patch):
    """As it was: with another order than backward's, one tensor after the other, each of which
    starts the next."""

    def seal(self, order, workspace=0, real=HostTensors.seal):
        real(self, [sorted(reads) for reads in order], workspace)
        self._order = [[access] for reads in self._order for access in reads]

    def take(self, name, chunk):
        tensor = self.peek(name, chunk)
        self.read_ahead()
        entry = self._entries.pop((name, chunk))
        self._transfers.release(entry)
        return tensor

    patch.setattr(HostTensors, "seal", seal)
    patch.setattr(HostTensors, "take", take)


@pytest.mark.parametrize(
    "mutant", [ascending, nothing_ahead, a_tensor_ahead, taken_after_the_next_copies_start]
)
def test_a_wrong_order_is_found(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_one_read_at_most_is_late_and_nothing_is_left("qwen3", ("attn_out", "*"))


def test_the_order_of_reads_is_known_from_one_place():
    """What `order` says is what backward reads: one access after the other, of all layers."""
    model = offloaded(("attn_out", "kv", "*"))
    step(model)
    announced, read = [], []
    order, peek = SavedForBackward.order, HostTensors.peek

    def noted_order(self):
        groups = order(self)
        announced.append([access for reads in groups for access in reads])
        return groups

    def noted_peek(self, name, chunk):
        read.append((name, chunk))
        return peek(self, name, chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedForBackward, "order", noted_order)
        patch.setattr(HostTensors, "peek", noted_peek)
        step(model)
    assert read == [access for layer in reversed(announced) for access in layer]


@functools.cache
def peak(saves):
    """Of an 8B model at 64k tokens in chunks of 16,384, in GiB."""
    setting = Setting(optimizer=0)
    plan = estimate(
        QWEN3_8B,
        65536,
        chunk_size=16384,
        saves=saves,
        offload="cpu",
        setting=setting,
        kernels="liger",
    )
    return plan.methods[-1].peak.total / 2**30


GATE_AND_UP = ("mlp.gate_proj", "mlp.up_proj")


@pytest.mark.full
def test_planned_peaks_do_not_grow_with_what_is_saved():
    """The outputs that are on their way come on top, those of one chunk."""
    assert (
        0
        < peak(("attn_out", *GATE_AND_UP)) - peak(("attn_out",))
        < 2 * 16384 * 2 * 12288 / 2**30 + 0.01
    )


@pytest.mark.full
def test_a_peak_that_grows_layer_by_layer_is_found(monkeypatch):
    taken_after_the_next_copies_start(monkeypatch)
    assert peak.__wrapped__(("attn_out", *GATE_AND_UP)) > peak(("attn_out",)) + 10
