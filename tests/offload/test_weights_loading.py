"""A checkpoint's weights go from its mapped file into their ranges of host memory: no second copy
is made.

covers: offload/ranges.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import build, make_batch
from tests.offload.weights_runs import assert_same, patched, step, weights_of, with_adapters

STATUS, MAPS = Path("/proc/self/status"), Path("/proc/self/maps")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Move the model to an accelerator"),
    pytest.mark.skipif(
        not MAPS.exists(), reason="only Linux says what lies where in a process's memory"
    ),
]
SIZES = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8}


def anonymous():
    """Bytes of this process's memory that are no file's."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", STATUS.read_text())[1])


def in_file(tensor, folder):
    """Whether it lies where a file of the folder is mapped."""
    for line in MAPS.read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        start, stop = (int(address, 16) for address in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            return name.startswith(str(folder))
    return False


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint").resolve()
    build("llama", **SIZES).save_pretrained(folder)
    return folder


def loaded(checkpoint, weights):
    return patched(with_adapters(AutoModelForCausalLM.from_pretrained(checkpoint)).train(), weights)


@pytest.mark.full
def test_weights_leave_their_file_for_their_range_layer_by_layer(checkpoint):
    model = loaded(checkpoint, "cpu")
    layers = [
        p for name, p in model.named_parameters() if ".layers." in name and not p.requires_grad
    ]
    size = sum(p.nbytes for p in layers)
    assert all(in_file(p, checkpoint) for p in layers)
    bytes_before = anonymous()
    with torch.no_grad():
        model(**make_batch("plain"), use_cache=False)
    weights = weights_of(model)
    assert not any(in_file(p, checkpoint) for p in layers)
    assert size <= weights.ranges.bytes <= 1.01 * size
    # once; the rest is the step's and the allocator's
    assert anonymous() - bytes_before <= 1.25 * size + weights.device_bytes
    assert_same(step(model), step(loaded(checkpoint, "device")))
