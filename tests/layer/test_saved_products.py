"""`saves` with globs of Linear names: their outputs are kept, their products not computed again,
the gradients the same.

covers: config.py, layer/products.py, layer/saved_tensors.py, model/patching.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.layer.saved_tensors import SavedForBackward
from tests.counting import LinearFlops
from tests.families import build, make_batch
from tests.seeds import seed_torch
from tests.tiers import thinned

GLOBS = (
    ("mlp.gate_proj",),
    ("mlp.*",),
    ("*",),
    ("self_attn.[qkv]_proj", "attn_out"),
    ("mlp.up_proj", "kv", "attn_out"),
)


def step(model, saves, scale=1.0, **settings):
    ours = streambp.patch(
        copy.deepcopy(model), streambp.StreamConfig(chunk_size=5, saves=saves, **settings)
    )
    ours(
        **make_batch("left-padded"), use_cache=False
    ).loss.backward()  # the first finds out what may be left out
    ours.zero_grad()
    seed_torch(3)
    loss = ours(**make_batch("left-padded"), use_cache=False).loss
    with LinearFlops() as flops:
        loss.backward()
    return {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}, flops.total


def check(model, saves, **settings):
    other_saves = tuple(name for name in saves if name in ("kv", "attn_out"))
    (expected, computed), (our_gradients, computed_with_saves) = (
        step(model, other_saves),
        step(model, saves, **settings),
    )
    assert our_gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(our_gradients[name], gradient), name
    assert computed_with_saves < computed
    return computed_with_saves / computed


@pytest.mark.fast(6)
@pytest.mark.parametrize(
    ("saves", "offload"),
    [
        pytest.param(saves, offload, marks=() if (number + offload_index) % 2 else pytest.mark.full)
        for number, saves in enumerate(GLOBS)
        for offload_index, offload in enumerate(["none", "cpu"])
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_gradients_are_bitwise_the_same(saves, offload):
    check(build("qwen3"), saves, offload=offload)


@pytest.mark.parametrize(
    "family", thinned(["gemma3", "phi3", "qwen2"], lambda family: family == "gemma3")
)
def test_families(family):
    check(build(family), ("mlp.*",))


@pytest.mark.full
def test_dropout():
    check(build("phi3", resid_pdrop=0.3, attention_dropout=0.2), ("mlp.*", "self_attn.o_proj"))


@pytest.mark.full
def test_autocast():
    model = build("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        check(model, ("mlp.*",))


@pytest.mark.full
def test_lora():
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    lora = peft.LoraConfig(r=4, target_modules=["gate_proj", "q_proj"], init_lora_weights=False)
    check(peft.get_peft_model(build("qwen3"), lora), ("mlp.gate_proj", "mlp.up_proj"))


def test_everything_saved_leaves_only_the_gradients_products():
    """Backward then computes two products for each Linear (of its input and its weight), instead of
    three."""
    share = check(build("qwen3", intermediate_size=256), ("*", "attn_out", "kv"))
    print(
        f"Linear FLOPs of backward with every product saved: {share:.3f} of those with kv and "
        "attn_out saved"
    )
    assert share <= 0.75


def kept_after(model, saves):
    """What each layer keeps in the second step."""
    saved_names = {}
    real = SavedForBackward.find_products

    def find_products(self):
        real(self)
        saved_names[self.layer_state.index] = {
            *self.products.names,
            *({"kv", "attn_out"} & set(self.saves)),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedForBackward, "find_products", find_products)
        step(model, saves)
    return saved_names


@pytest.mark.full
def test_the_last_layers_alone():
    model = build("qwen3", num_hidden_layers=4)
    saves = ("attn_out@1", "kv", "mlp.gate_proj@3", "mlp.gate_proj@2")
    check(model, saves)
    saved_names = kept_after(model, saves)
    gate = {"mlp.gate_proj"}
    assert [saved_names[index] for index in range(4)] == [
        {"kv"},
        {"kv"} | gate,
        {"kv"} | gate,
        {"kv", "attn_out"} | gate,
    ]


def test_more_layers_than_there_are():
    with pytest.raises(
        streambp.StreamBPError, match=r"saves names 'kv@3', the last 3 layers; the model has 2"
    ):
        streambp.patch(build("qwen3"), streambp.StreamConfig(saves=("kv@3",)))


def test_what_backward_does_not_read_is_not_kept():
    saved_names = kept_after(build("qwen3"), ("*",))
    assert all(
        "mlp.up_proj" in products and "mlp.down_proj" not in products
        for products in saved_names.values()
    )


def test_a_product_kept_for_nothing_is_seen(monkeypatch):
    real = SavedForBackward.find_products
    monkeypatch.setattr(
        SavedForBackward,
        "find_products",
        lambda self: (real(self), setattr(self.products, "names", list(self.products.linears))),
    )
    with pytest.raises(AssertionError):
        test_what_backward_does_not_read_is_not_kept()


def test_an_output_changed_in_place_is_refused():
    model = build("qwen3")
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.SiLU(inplace=True)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves=("mlp.gate_proj",)))
    with pytest.raises(streambp.StreamBPError, match=r"mlp\.gate_proj is changed in place"):
        model(**make_batch("plain"), use_cache=False)
