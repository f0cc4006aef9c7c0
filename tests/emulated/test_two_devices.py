"""saves="auto" on two emulated devices: each device's layers save what is free on their device.

covers: offload/policy.py, planner/device_parts.py, layer/arguments.py
"""

from __future__ import annotations

import pytest
import torch

import streambp
from streambp.device import allocator_bytes
from streambp.offload.free_memory import RESERVED_BYTES
from streambp.planner import device_parts
from tests.emulated import backend
from tests.emulated.test_models import divided
from tests.families import build, make_batch

pytestmark = pytest.mark.emulated
LAYERS, LENGTH, CHUNK = 4, 96, 48


class Steps:
    """A model whose first two layers are on one device and whose others, with the head, are on
    another."""

    def __init__(self, **settings):
        accelerate = pytest.importorskip("accelerate")
        self.devices = [torch.device(backend.NAME, number) for number in range(2)]
        model = build("qwen3", device="cpu", num_hidden_layers=LAYERS)
        self.model = accelerate.dispatch_model(
            model,
            device_map=divided(model, *self.devices),
            main_device=self.devices[0],
            force_hooks=True,
        )
        config = {"chunk_size": CHUNK, "unpatched_runs": False, "offload": "none", **settings}
        streambp.patch(self.model, streambp.StreamConfig(**config))
        batch = make_batch("plain", length=LENGTH, rows=1)
        self.batch = {name: x.to(self.devices[0]) for name, x in batch.items()}

    def __call__(self):
        self.model.zero_grad(set_to_none=True)
        loss = self.model(**self.batch, use_cache=False).loss
        loss.backward()
        gradients = {name: p.grad.cpu() for name, p in self.model.named_parameters()}
        return {"loss": loss.detach().cpu(), **gradients}

    @property
    def chooser(self):
        return self.model._streambp.saves_policy

    def saved(self):
        """Names that each layer was to save in the last step."""
        plan = self.chooser._forward.batch.plan
        return [{candidate.name for candidate in plan.get(i, [])} for i in range(LAYERS)]

    def limit(self, number, room):
        """Leave so many bytes for saved tensors on a device."""
        self.model.zero_grad(set_to_none=True)
        device, figures = self.devices[number], self.chooser.figures
        need = figures.need.on_device(device, figures.costs)(LENGTH, CHUNK)
        allocated = allocator_bytes(device, "allocated")
        backend.extension().set_limit(number, int(RESERVED_BYTES + allocated + need + room))


@pytest.fixture
def expected():
    return Steps(saves=())()


def are_equal(actual, expected):
    return all(torch.equal(actual[name], expected[name]) for name in expected)


def test_layers_of_both_devices_save(expected, device):
    steps = Steps()
    for _ in range(3):
        assert are_equal(steps(), expected)
    assert steps.chooser.figures.need.layout is not None
    assert all("attn_out" in names for names in steps.saved())
    assert steps.chooser.latest.layers["attn_out"] == LAYERS
    assert steps.chooser.latest.drop_reason is None


# room in attention outputs of a layer; the fullest phase of the second device counts one layer
@pytest.mark.parametrize(("number", "room"), [(0, 1.5), (1, 0.5)])
def test_a_full_device_takes_nothing_from_the_other(number, room, expected, device):
    steps = Steps()
    for _ in range(3):
        steps()
    costs = steps.chooser.figures.costs
    unlimited = steps.saved()
    own_layers = range(2) if number == 0 else range(2, LAYERS)
    try:
        steps.limit(number, room * costs[0].scaled_to(LENGTH).attn_out)
        for _ in range(2):
            assert are_equal(steps(), expected)
        saved = steps.saved()
    finally:
        backend.extension().set_limit(number, backend.LIMIT)
    assert steps.chooser.latest.drop_reason is None
    assert sum(len(names) for i, names in enumerate(saved) if i in own_layers) < sum(
        len(unlimited[i]) for i in own_layers
    )
    assert all(saved[i] == unlimited[i] for i in range(LAYERS) if i not in own_layers)


def test_arguments_that_accelerate_copies_are_counted(device):
    """Cosines and sines, for each layer of the second device."""
    steps = Steps()
    for _ in range(2):
        steps()
    figures = steps.chooser.figures
    home = figures.need.layout.embedding_device
    assert home == steps.devices[0]
    for index, cost in figures.costs.items():
        copies = cost.held_bytes(LENGTH, home) - cost.cost.x * LENGTH / cost.tokens
        assert (copies > 0) == (index >= 2)


def test_a_need_that_is_not_divided_is_seen(expected, device, monkeypatch):
    monkeypatch.setattr(device_parts, "find_layout", lambda *_: None)
    with pytest.raises(AssertionError):
        test_layers_of_both_devices_save(expected, device)
