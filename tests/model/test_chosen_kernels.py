"""`kernels="auto"`: Liger's kernels on an accelerator, the modules as they are elsewhere.

With a stand-in for Liger that computes on the host (`tests/liger_stand_in.py`), so that an
accelerator is said to be there, either of the host's kind or of one that no tensor is on.

covers: config.py, model/chosen_kernels.py, model/fused_layers.py, verify/compare.py
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import sys

import pytest
import torch

import streambp
from streambp.known_names import LIGERS_TABLE
from streambp.model import chosen_kernels, fused_layers
from streambp.verify import compare
from tests import opaque_kernels
from tests.families import build, make_batch
from tests.liger_stand_in import FAMILIES, HYBRID, MIXTURE, PATCHES, built, own_attributes, stand_in
from tests.oracle import gradients, relative_l2
from tests.tiers import thinned
from tests.versions import needs_states

AUTO = streambp.StreamConfig(chunk_size=7)
OWN_KERNELS = streambp.StreamConfig(chunk_size=7, kernels="own")
MAX_RELATIVE_ERROR = 1e-6  # of the whole gradient, in float32
SAVES = ((), ("attn_out",), ("attn_out", "kv"), "auto")
ROTATION = "the rotation of queries and keys"


def with_accelerator(monkeypatch, kind="cpu"):
    monkeypatch.setattr(chosen_kernels, "kernel_device", lambda: torch.device(kind))
    monkeypatch.setattr(chosen_kernels, "why_no_driver", lambda kind: None)


@pytest.fixture
def liger(monkeypatch):
    with_accelerator(monkeypatch)
    return stand_in(monkeypatch)


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel ran."""
    counts = {"Norm": 0, "Gate": 0, "Rotation": 0}
    for name in counts:
        kernel = getattr(opaque_kernels, name)

        def forward(*args, name=name, real=kernel.forward):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(kernel, "forward", staticmethod(forward))
    return counts


SMALL_CONFIGS = {
    ("llama", "auto", "none"),
    ("qwen3", ("attn_out",), "cpu"),
    ("gemma3", (), "none"),
    (HYBRID, ("attn_out", "kv"), "none"),
}


@needs_states
@pytest.mark.parametrize(
    ("family", "saves", "offload"),
    thinned(
        itertools.product(FAMILIES, SAVES, ("none", "cpu")), lambda *case: case in SMALL_CONFIGS
    ),
)
def test_gradients_are_those_of_the_unpatched_model_with_the_same_kernels(
    family, saves, offload, liger
):
    stock, batch = built(family), make_batch("left-padded")
    ours, modeling = copy.deepcopy(stock), sys.modules[type(stock).__module__]
    config = streambp.StreamConfig(chunk_size=7, saves=saves, offload=offload, unpatched_runs=False)
    names = dict(vars(modeling))
    streambp.patch(ours, config)
    assert dict(vars(modeling)) == names
    for _ in range(3 if saves == "auto" else 1):
        loss, grads = gradients(ours, **batch)
    rotates_halves = family != HYBRID  # whose attention turns a part of the features
    liger(stock, {"rms_norm", "swiglu", *(["rope"] if rotates_halves else [])})
    expected_loss, expected = gradients(stock, **batch)
    assert abs(loss - expected_loss) <= 1e-6 * expected_loss
    assert relative_l2(grads, expected) <= MAX_RELATIVE_ERROR
    described = streambp.describe(ours)
    assert {layer.path for layer in described.layers} == {"streams"}
    notes = " ".join(note for note in described.notes if "Liger's kernels compute" in note)
    assert "input_layernorm" in notes
    assert "mlp" in notes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_an_accelerator_without_a_driver_of_tritons_has_the_models_kernels(monkeypatch):
    """Apple's, say, where liger-kernel can be installed."""
    stand_in(monkeypatch)
    monkeypatch.setattr(chosen_kernels, "kernel_device", lambda: torch.device("cpu"))
    model = build("qwen3")
    attributes_before = own_attributes(model)
    streambp.patch(model, AUTO)
    assert any("Triton has no driver here" in note for note in streambp.describe(model).notes)
    streambp.unpatch(model)
    assert own_attributes(model) == attributes_before


@pytest.mark.parametrize(("adapted", "kernels"), [(False, "auto"), (True, "auto"), (True, "liger")])
def test_experts_keep_their_own_forward(adapted, kernels, liger):
    """ "liger" asks for Liger's own, but not around adapters of the experts' parameters, which know
    nothing of them."""
    model, batch = built(MIXTURE), make_batch("plain")
    if adapted:
        peft = pytest.importorskip("peft")
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
        )
    expected = gradients(model, **batch)[1]
    streambp.patch(model, streambp.StreamConfig(chunk_size=7, saves=(), kernels=kernels))
    assert relative_l2(gradients(model, **batch)[1], expected) <= MAX_RELATIVE_ERROR
    assert any("input_layernorm" in note for note in streambp.describe(model).notes)


def test_every_kind_of_run_computes_with_the_kernels(liger, calls):
    model, batch = build("qwen3"), make_batch("plain")
    attributes_before = own_attributes(model)
    streambp.patch(model, streambp.StreamConfig(chunk_size=64))  # as unpatched, or with kept graphs

    def all_ran():
        ran, calls_before = dict(calls), dict.fromkeys(calls, 0)
        calls.update(calls_before)
        return all(ran.values())

    for _ in range(3):
        gradients(model, **batch)
        assert all_ran()
    with torch.no_grad():
        model.eval()(**batch)
        assert all_ran()
        model.generate(batch["input_ids"][:1, :4], max_new_tokens=2, do_sample=False)
        assert all_ran()
    assert any(ROTATION in note for note in streambp.describe(model).notes)
    streambp.unpatch(model.train())
    assert own_attributes(model) == attributes_before
    gradients(model, **batch)
    assert not any(calls.values())


def same_bits(model, config, other_config, batch):
    expected = gradients(streambp.patch(copy.deepcopy(model), other_config), **batch)
    result = gradients(streambp.patch(copy.deepcopy(model), config), **batch)
    return result[0] == expected[0] and all(
        torch.equal(result[1][name], grad) for name, grad in expected[1].items()
    )


def test_tensors_of_another_device_are_computed_bit_for_bit_as_without(monkeypatch, calls):
    """An accelerator is there, and the model is on the host."""
    stand_in(monkeypatch)
    with_accelerator(monkeypatch, "cuda")
    model = build("qwen3")
    assert same_bits(model, AUTO, OWN_KERNELS, make_batch("plain"))
    assert not any(calls.values())
    streambp.patch(model, AUTO)
    assert model.model.layers[0].mlp.__dict__["forward"].__func__.kind == "cuda"
    monkeypatch.setattr(fused_layers, "supports_input", lambda x, kind: True)
    gradients(model, **make_batch("plain"))
    assert all(calls.values())  # the mutant


def test_float64_is_computed_bit_for_bit_as_without(liger, calls):
    model = streambp.patch(build("qwen3"), AUTO).double()
    gradients(model, **make_batch("plain"))
    assert not any(calls.values())


def test_without_an_accelerator_nothing_is_looked_for(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(chosen_kernels, "kernel_device", lambda: None)
    monkeypatch.setattr(
        chosen_kernels, "install_kernels", lambda *_: pytest.fail("Liger was asked for")
    )
    model = build("qwen3")
    theirs = copy.deepcopy(model)
    notes = [
        streambp.describe(streambp.patch(m, config)).notes
        for m, config in ((model, AUTO), (theirs, OWN_KERNELS))
    ]
    assert notes[0] == notes[1]
    assert not any(fused_layers.fused_modules(layer) for layer in model.model.layers)
    assert same_bits(build("llama"), AUTO, OWN_KERNELS, make_batch("plain"))


@pytest.mark.parametrize("why", ["not installed", "not known", "float64", "fails", "no driver"])
def test_what_cannot_be_leaves_the_model_as_it_was_and_describe_says_why(why, liger, monkeypatch):
    table = getattr(sys.modules[PATCHES], LIGERS_TABLE)
    reason = {
        "not installed": "liger_kernel is not installed. Install it: pip install 'streambp-hf[liger]'.",
        "not known": "Liger does not know 'qwen3'.",
        "float64": "Liger computes in float32 or less, and model.embed_tokens.weight is in float64.",
        "no driver": "Liger cannot be imported (RuntimeError: 0 active drivers).",
        "fails": "Liger could not be applied to this Qwen3ForCausalLM: TypeError: injected.",
    }[why]
    if why == "not installed":
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
        monkeypatch.setitem(sys.modules, PATCHES, None)
    if why == "no driver":
        monkeypatch.setattr(fused_layers, "_function_for", has_no_driver)
    if why == "not known":
        table.pop("qwen3")
    if why == "fails":
        table["qwen3"] = fails
    model = build("qwen3", torch.float64 if why == "float64" else torch.float32)
    attributes_before = own_attributes(model)
    streambp.patch(model, AUTO)
    assert (
        f"kernels='auto' leaves all modules as they are: {reason}" in streambp.describe(model).notes
    )
    streambp.unpatch(model)
    assert own_attributes(model) == attributes_before


def has_no_driver(causal):
    raise RuntimeError("0 active drivers")


def fails(model, **_):
    model.model.norm.forward = lambda x: x
    raise TypeError("injected")


def test_modules_that_others_have_taken_stay_theirs(liger, calls):
    """A forward of the program's, a compiled module, a hook of accelerate's."""
    model = build("qwen3")
    first, second = model.model.layers
    theirs = first.mlp.forward = functools.partial(type(first.mlp).forward, first.mlp)
    first.input_layernorm.compile(backend="eager")
    second.mlp._hf_hook = object()
    streambp.patch(model, AUTO)
    assert first.mlp.forward is theirs
    assert not any("forward" in module.__dict__ for module in (first.input_layernorm, second.mlp))
    assert "forward" in second.input_layernorm.__dict__
    del second.mlp._hf_hook
    gradients(model, **make_batch("plain"))
    assert calls["Gate"] == 0 < calls["Norm"]


def test_kernels_of_others_stay_alone(liger, calls):
    model = build("qwen3")
    liger(model, {"rms_norm"})
    attributes_before = own_attributes(model)
    streambp.patch(model, AUTO)
    streambp.unpatch(model)
    assert own_attributes(model) == attributes_before


def neighbours(q, k, cos, sin, unsqueeze_dim=1):
    """Turns each feature with the next, as some families do."""
    cos, sin = (
        x[..., : x.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for x in (cos, sin)
    )

    def rotate(x):
        return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin

    return rotate(q), rotate(k)


class TestTheRotation:
    def test_one_that_turns_otherwise_stays(self, liger, calls, monkeypatch):
        model = build("qwen3")
        monkeypatch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", neighbours)
        assert not chosen_kernels.rotates_halves(neighbours)
        expected = gradients(model, **make_batch("plain"))[1]
        twin = copy.deepcopy(model)
        assert (
            relative_l2(gradients(streambp.patch(model, AUTO), **make_batch("plain"))[1], expected)
            <= MAX_RELATIVE_ERROR
        )
        assert calls["Rotation"] == 0 < calls["Norm"]
        monkeypatch.setattr(chosen_kernels, "rotates_halves", lambda rotation: True)
        grads = gradients(streambp.patch(twin, AUTO), **make_batch("plain"))[1]
        assert relative_l2(grads, expected) > 1e-3  # the mutant
        assert calls["Rotation"] > 0

    def test_one_that_is_replaced_later_counts(self, liger, calls, monkeypatch):
        model, batch = build("qwen3"), make_batch("plain")
        theirs = copy.deepcopy(model)
        streambp.patch(model, AUTO)
        gradients(model, **batch)
        monkeypatch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", neighbours)
        count_before = calls["Rotation"]
        expected = gradients(theirs, **batch)[1]
        assert (
            relative_l2(gradients(streambp.patch(model, AUTO), **batch)[1], expected)
            <= MAX_RELATIVE_ERROR
        )
        assert calls["Rotation"] == count_before

    def test_products_that_saves_names_are_not_written_over(self, liger, calls):
        model = build("llama")
        expected = gradients(model, **make_batch("plain"))[1]
        streambp.patch(model, streambp.StreamConfig(chunk_size=7, saves=("*",)))
        assert (
            relative_l2(gradients(model, **make_batch("plain"))[1], expected) <= MAX_RELATIVE_ERROR
        )
        assert calls["Rotation"] == 0 < calls["Norm"]

    def test_calls_that_ligers_does_not_take(self):
        def own_rotation(*args, **kwargs):
            return "own"

        space = {"__name__": "modeling", "apply_rotary_pos_emb": own_rotation, "else": 1}
        rotation = fused_layers.RotationGlobals(space, lambda *_: "fused", "cpu")
        q, part = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 4)
        angles = torch.zeros(1, 3, 8)
        assert rotation.apply_rotary(q, q, angles, angles) == "fused"
        assert rotation.apply_rotary(q, q, part, part) == "own"  # of a part of the features
        assert rotation.apply_rotary(q, q, angles, angles, 2) == "own"  # heads behind tokens
        assert (
            rotation.apply_rotary(q, q, angles[None], angles[None]) == "own"
        )  # several positions a token
        assert rotation["else"] == 1
        space["apply_rotary_pos_emb"] = lambda *_: "theirs"
        assert rotation.apply_rotary(q, q, angles, angles) == "theirs"


def test_copies_and_pickles(liger):
    model, batch = build("qwen3"), make_batch("plain")
    expected = gradients(model, **batch)[1]
    streambp.patch(model, AUTO)
    twin = copy.deepcopy(model)
    assert (
        relative_l2(gradients(pickle.loads(pickle.dumps(model)), **batch)[1], expected)
        <= MAX_RELATIVE_ERROR
    )
    streambp.unpatch(model)
    assert not fused_layers.fused_modules(model.model.layers[0])
    assert ROTATION in fused_layers.fused_modules(twin.model.layers[0])["liger_kernel"]
    assert relative_l2(gradients(twin, **batch)[1], expected) <= MAX_RELATIVE_ERROR
    streambp.unpatch(twin)
    grads = gradients(twin, **batch)[1]
    assert all(torch.equal(grads[name], gradient) for name, gradient in expected.items())


def test_verify_compares_both_with_the_kernels(liger, calls, monkeypatch):
    with_kernels, real = [], compare._run
    monkeypatch.setattr(
        compare,
        "_run",
        lambda m, *a: with_kernels.append(bool(fused_layers.fused_modules(m))) or real(m, *a),
    )
    result = compare.verify(build("qwen3"), seq_len=97, saves=("attn_out",))
    assert result.exact, result
    assert True in with_kernels
    assert all(calls.values())


@pytest.mark.full
def test_modules_compiled_after_patch(liger, calls):
    """The program's compilation comes around the kernel, which it cannot look into."""
    model, batch = build("qwen3"), make_batch("plain")
    expected = gradients(copy.deepcopy(model), **batch)[1]
    streambp.patch(model, AUTO)
    for layer in model.model.layers:
        kernel_forward = layer.mlp.forward.__func__
        kernel_forward.fused = torch.compiler.disable(kernel_forward.fused)
        layer.mlp.compile(backend="eager")
    assert relative_l2(gradients(model, **batch)[1], expected) <= MAX_RELATIVE_ERROR
    assert calls["Gate"] > 0
    torch._dynamo.reset()


def test_the_real_accelerator():
    """Whichever this process has; its answer is torch's."""
    assert chosen_kernels.kernel_device() == torch.accelerator.current_accelerator(
        check_available=True
    )
