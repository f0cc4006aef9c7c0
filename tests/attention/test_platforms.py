"""Which kernels attend with which head sizes on which machine: one table, and what unpatched models
would run there.

covers: attention/backend.py, attention/kernels_wide.py, attention/rules.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from streambp.attention import backend as backends
from streambp.attention import rules
from streambp.attention.backend import choose_backend, platform_of
from streambp.errors import AttentionChoiceError
from tests.attention.platforms import (
    A100,
    B200,
    B200_NEW,
    H200,
    H200_CUDNN_919,
    H200_OLD,
    MI200,
    MI300,
    RTX_4090,
    RTX_5090,
    V100,
    backend,
    with_flash,
)

C, F, P, E, M = "cudnn", "flash", "padded flash", "efficient", "math"
TABLE = [  # machine, D, D_v, kernels in order, columns of V in its buffer
    (H200, 64, 64, (C, F, M), None),
    (H200, 128, 128, (C, F, M), None),
    (H200, 96, 64, (C, P, M), None),
    (H200, 192, 128, (C, P, M), None),
    (H200, 256, 256, (C, F, M), None),
    (H200, 192, 192, (F, M), None),
    (H200, 160, 160, (F, M), None),
    (H200, 256, 128, (F, M), 256),
    (H200, 512, 512, (E, M), None),
    (H200, 576, 512, (E, M), None),
    (H200, 100, 100, (P, M), None),
    (H200_CUDNN_919, 192, 128, (C, P, M), None),
    (H200_CUDNN_919, 256, 256, (C, F, M), None),
    (H200_OLD, 128, 128, (F, M), None),
    (H200_OLD, 192, 128, (F, M), 192),
    (A100, 128, 128, (F, M), None),
    (A100, 192, 128, (F, M), 192),
    (A100, 96, 64, (F, M), 96),
    (A100, 64, 96, (P, M), None),
    (A100, 224, 224, (F, M), None),
    (A100, 512, 512, (E, M), None),
    (RTX_4090, 192, 128, (F, M), 192),
    (RTX_4090, 256, 256, (F, M), None),
    (RTX_4090, 224, 224, (E, M), None),
    (RTX_5090, 128, 128, (F, M), None),
    (RTX_5090, 192, 128, (F, M), 192),
    (RTX_5090, 208, 128, (E, M), None),
    (B200, 128, 128, (C, F, M), None),
    (B200, 192, 128, (C, P, M), None),
    (B200, 256, 256, (F, M), None),
    (B200_NEW, 256, 256, (C, F, M), None),
    (MI300, 128, 128, (F, M), None),
    (MI200, 128, 128, (F, M), None),
    (MI300, 192, 128, (F, M), 192),
    (MI300, 512, 512, (M,), None),
    (V100, 128, 128, (M,), None),
]


@pytest.mark.parametrize(("platform", "size", "value_size", "kernels", "width"), TABLE)
def test_kernels_by_machine_and_head_sizes(platform, size, value_size, kernels, width):
    choice = backend(platform, size, value_size)
    assert tuple(kernel.name for kernel in choice.kernels) == kernels
    assert choice.width == width
    assert bool(choice.reason) == (kernels == (M,))


@pytest.mark.parametrize("platform", [A100, RTX_4090, RTX_5090, MI300, MI200, H200_OLD])
def test_auto_never_takes_cudnn_where_torch_does_not(platform):
    for pair in ((64, 64), (128, 128), (192, 128), (256, 256)):
        assert backend(platform, *pair).name != C


def test_a_limit_of_forward_is_not_backwards():
    """In forward cuDNN takes head size 256 on compute capability 8.x and 10.x, too."""
    for platform in (A100, RTX_4090, B200, RTX_5090):
        with pytest.raises(AttentionChoiceError, match="cuDNN"):
            backend(platform, 256, choice="cudnn")


def test_runtimes_with_known_faults_are_left_out():
    for version, is_faulty in ((91000, False), (91001, False), (91002, True), (91600, True)):
        platform = dataclasses.replace(H200, cudnn=version)
        if is_faulty:
            assert backend(platform, 128, choice="cudnn").name == C
        else:
            with pytest.raises(AttentionChoiceError, match=r"9\.10\.0"):
                backend(platform, 128, choice="cudnn")
    with pytest.raises(AttentionChoiceError, match="head size"):
        backend(dataclasses.replace(H200, cudnn=91200), 192, 128, choice="cudnn")


def test_what_is_switched_off_is_not_chosen():
    off = dataclasses.replace
    assert [k.name for k in backend(off(H200, flash_on=False), 192, 128).kernels] == [C, E, M]
    assert [k.name for k in backend(off(A100, flash_on=False), 192, 128).kernels] == [E, M]
    assert [
        k.name for k in backend(off(A100, flash_on=False, efficient_on=False), 192, 128).kernels
    ] == [M]
    assert backend(off(H200, efficient_on=False), 512).reason
    assert backend(off(H200, cudnn_on=False), 256).name == F
    assert backend(off(H200, deterministic=True), 256).name == F
    assert backend(off(H200, deterministic=True), 192, 128).width == 192


def test_plain_products_say_why():
    assert "softcap" in backend(H200, 256, softcap=50.0).reason
    assert "dropout" in backend(H200, 128, dropout=0.1).reason
    assert "float32" in backend(H200, 128, dtype=torch.float32).reason
    assert "compute capability (7, 0)" in backend(V100, 128).reason
    assert backend(H200, 128, choice="math").reason


FLASH_LIMITS = [  # machine, implementation, D, D_v, what an error says; None: it attends
    (with_flash(H200, "FA3"), 128, 128, None),
    (with_flash(H200, "FA3"), 192, 128, None),
    (with_flash(H200, "FA3", deterministic=True), 128, 128, None),
    (with_flash(H200, "FA3", deterministic=True), 256, 256, "not deterministic"),
    (with_flash(A100, "FA3"), 128, 128, r"9\.x, not on \(8, 0\)"),
    (with_flash(B200, "FA3"), 128, 128, r"9\.x, not on \(10, 0\)"),
    (with_flash(H200, "FA4"), 192, 128, None),
    (with_flash(H200, "FA4"), 256, 256, None),
    (with_flash(B200, "FA4"), 128, 128, None),
    (with_flash(B200, "FA4"), 192, 128, "not 192"),
    (with_flash(B200, "FA4"), 256, 256, None),
    (with_flash(RTX_5090, "FA4"), 128, 128, r"9\.x and 10\.x, not on \(12, 0\)"),
    (
        dataclasses.replace(with_flash(H200, "FA4"), flash_4=(4, 0, 0, 19)),
        128,
        128,
        r"4\.0\.0b19.*4\.0\.0b18",
    ),
    (
        dataclasses.replace(with_flash(H200, "FA4"), flash_4=(4, 0, 0, 36), torch=(2, 14)),
        128,
        128,
        None,
    ),
    (with_flash(H200, "FA9"), 128, 128, "does not know"),
]


@pytest.mark.parametrize(("platform", "size", "value_size", "says"), FLASH_LIMITS)
def test_an_activated_implementation_has_its_own_limits(platform, size, value_size, says):
    if says is None:
        choice = backend(platform, size, value_size, choice="flash")
        assert choice.name == F
        assert choice.width == (size if value_size < size else None)
        return
    with pytest.raises(AttentionChoiceError, match=says):
        backend(platform, size, value_size, choice="flash")
    assert F not in backend(platform, size, value_size).name  # "auto" goes on without it


def test_windows_stay_out_of_flash_attention_4_behind_torch_2_11():
    older = with_flash(H200, "FA4", torch=(2, 11))
    assert not backend(older, 128, choice="flash").kernels[0].tiling.native_window
    assert backend(with_flash(H200, "FA4"), 128, choice="flash").kernels[0].tiling.native_window


def test_the_platform_is_asked_when_a_call_begins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch, "__version__", "2.11.1+cu130")
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    device = torch.device("cuda")
    assert platform_of(device) == dataclasses.replace(H200_CUDNN_919, torch=(2, 11))
    with sdpa_kernel(SDPBackend.MATH):
        off = platform_of(device)
    assert (off.cudnn_on, off.flash_on, off.efficient_on) == (False, False, False)
    monkeypatch.setattr(backends, "current_flash_attention_impl", lambda: "FA4")
    monkeypatch.setattr(backends.importlib.metadata, "version", lambda name: "4.0.0b18")
    platform = platform_of(device)
    assert (platform.flash, platform.flash_4) == ("FA4", rules.MAX_FLASH_4_VERSION)
    assert platform_of(torch.device("cpu")).capability is None


def test_a_release_is_later_than_its_betas():
    """4.0.0 has one number less than 4.0.0b18, and torch before 2.14 cannot use it either."""
    final = dataclasses.replace(with_flash(H200, "FA4"), flash_4=(4, 0, 0))
    with pytest.raises(AttentionChoiceError, match=r"4\.0\.0 returns"):
        backend(final, 128, choice="flash")


def test_a_meta_tensor_stands_for_a_device_that_nothing_is_known_of():
    """The planner counts there."""
    q, v = (torch.empty(1, 4, 2, size, dtype=torch.bfloat16, device="meta") for size in (192, 128))
    assert choose_backend("auto", q, v, 0.0).width == 192
    wide = torch.empty(1, 4, 2, 512, dtype=torch.bfloat16, device="meta")
    assert choose_backend("auto", wide, wide, 0.0).name == E


MUTANTS = {
    "backward limit taken from forward's": (
        "CUDNN_MAX_HEAD_SIZE",
        256,
        (A100, RTX_4090, B200, RTX_5090),
        (256, 256),
    ),
    "any pair up to 256": ("MLA_HEAD_SIZES", (192, 192), (H200,), (192, 192)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name, monkeypatch):
    """Such a rule would send blocks to cuDNN that its backward refuses."""
    constant, value, machines, pair = MUTANTS[name]
    real_kernels = [backend(platform, *pair).kernels for platform in machines]
    monkeypatch.setattr(rules, constant, value)
    monkeypatch.setattr(backends, "_choose", backends._choose.__wrapped__)  # which remembers
    assert [backend(platform, *pair).kernels for platform in machines] != real_kernels
