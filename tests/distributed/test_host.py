"""Host memory that several takers share: the ranks of a machine, an engine's offloading and that of
activations.

covers: distributed/host.py, model/wrappers.py, offload/free_memory.py
"""

from __future__ import annotations

import importlib

import pytest

import streambp
from streambp.distributed.host import HostUse
from streambp.model import wrappers
from streambp.offload.free_memory import host_limit
from tests.families import build, make_batch
from tests.oracle import gradients


@pytest.fixture
def meminfo(tmp_path):
    """100,000 KiB are available."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 200000 kB\nMemAvailable: 100000 kB\n")
    return path


def limit(requested, meminfo, **settings):
    return host_limit(requested, meminfo, meminfo.parent / "no cgroup", **settings) // 1024


def test_ranks_of_a_machine_share_its_memory(meminfo, monkeypatch):
    check_shared(meminfo, monkeypatch)


def check_shared(meminfo, monkeypatch):
    assert limit(None, meminfo) == 90000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert limit(None, meminfo) == 22500
    assert limit(25000 * 1024, meminfo) == 25000
    with pytest.raises(streambp.StreamBPError, match="for each of 4 ranks"):
        limit(25001 * 1024, meminfo)


def test_what_an_engine_will_take_is_set_aside(meminfo):
    assert limit(None, meminfo, set_aside=30000 * 1024) == 60000
    assert limit(None, meminfo, set_aside=95000 * 1024) == 0
    with pytest.raises(streambp.StreamBPError, match="engine's offloading"):
        limit(80000 * 1024, meminfo, set_aside=30000 * 1024)


def test_describe_names_the_engines_share_and_training_leaves_it_alone(monkeypatch):
    use = HostUse(parameters=2**31, optimizer=2**32, to_come=2**60)
    for module in (wrappers, importlib.import_module("streambp.model.describe")):
        monkeypatch.setattr(module, "engine_host_use", lambda model: use)
    model = streambp.patch(
        build("qwen3"), streambp.StreamConfig(chunk_size=5, saves=(), offload="cpu")
    )
    gradients(model, **make_batch("plain"))
    described = streambp.describe(model).offload
    assert "2.0 GiB of parameters and 4.0 GiB of optimizer state" in described
    assert "(0 B allocated)" in described  # all of the machine's memory is spoken for
    assert "did not fit" in described
