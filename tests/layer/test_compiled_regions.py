"""`kernels="compiled"`: norms, gated activations and rotations that torch compiles.

covers: model/compiled_regions.py, model/chosen_kernels.py, foreign.py, layer/layer_state.py,
model/describe.py
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import streambp
from streambp.errors import BackwardError
from streambp.model import compiled_regions, fused_layers
from streambp.model.fused_layers import fused_modules
from streambp.verify import compare
from tests import zoo
from tests.families import build, make_batch
from tests.liger_stand_in import own_attributes
from tests.oracle import gradients, lift_float32_casts, relative_l2
from tests.seeds import seed_torch, seeded

MAX_RELATIVE_ERROR = 1e-6  # of the whole gradient, in float32
CHUNK, LENGTH = 7, 22  # the last chunk has one token
CONFIG = streambp.StreamConfig(chunk_size=CHUNK, saves=(), kernels="compiled")
# Of each pass: forward, the refill of keys and values, recomputation.
REGION_CALLS = {"input_layernorm": 3, "self_attn": 2, "post_attention_layernorm": 2, "mlp": 2,
    **dict.fromkeys(
    ("self_attn.q_norm", "self_attn.k_norm"), 3)}  # fmt: skip


@pytest.fixture(autouse=True)
def _compiled_anew(monkeypatch):
    """A function of which torch would compile no more, and run the rest eagerly without a word,
    raises."""
    monkeypatch.setattr(compiled_regions, "BACKEND", "eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


ROWS = ((LENGTH, 1), (LENGTH + 6, 1), (LENGTH, 2))


def small(**overrides):
    return build("llama", num_hidden_layers=1, **overrides)


def compiler_of(model):
    return model._streambp.fused.compiler


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("llama", "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("qwen3", "inductor"), ("phi3", "aot_eager"))
        ),
    ],
)
def test_regions_are_exact_and_few_graphs_serve_all_lengths(family, backend, monkeypatch):
    monkeypatch.setattr(compiled_regions, "BACKEND", backend)
    model = build(family)
    stock = copy.deepcopy(model)
    streambp.patch(model, CONFIG)
    for length, rows in ROWS:
        batch = make_batch("plain", length, rows=rows)
        loss, our_gradients = gradients(model, **batch)
        expected_loss, expected = gradients(stock, **batch)
        assert abs(loss - expected_loss) <= 1e-6 * expected_loss
        assert relative_l2(our_gradients, expected) <= MAX_RELATIVE_ERROR
    graphs = compiler_of(model).graphs
    print(f"{family}, {backend}: {dict(graphs)} graphs, {compiler_of(model).seconds:.1f} s")
    roles = {"input_layernorm", "post_attention_layernorm", "mlp", "self_attn"}
    assert roles <= graphs.keys()
    # a row alone and several; a row's first chunk and others
    two = {"self_attn": 2, "input_layernorm": 2}
    assert all(number <= REGION_CALLS[role] * two.get(role, 1) for role, number in graphs.items())
    described = str(streambp.describe(model))
    assert "streams: 2 x" in described
    assert "compiled regions compute" in described
    assert "the rotation of queries and keys of 2 layers" in described


@pytest.mark.full
def test_every_kind_of_run_computes_with_regions():
    ran = []
    model, batch = small(), make_batch("plain")
    own_before = own_attributes(model)
    # as unpatched, or with kept graphs
    streambp.patch(model, streambp.StreamConfig(chunk_size=64, kernels="compiled"))
    for role, region in regions_of(model):
        region.compiled = counting(region.compiled, role, ran)

    def all_ran():
        names = set(ran)
        ran.clear()
        return names >= {"mlp", "input_layernorm", "post_attention_layernorm"}

    for _ in range(3):
        gradients(model, **batch)
        assert all_ran()
    with torch.no_grad():
        model.eval()(**batch)
        assert all_ran()
        model.generate(batch["input_ids"][:1, :4], max_new_tokens=2, do_sample=False)
        assert all_ran()
    streambp.unpatch(model.train())
    assert own_attributes(model) == own_before
    gradients(model, **batch)
    assert not ran


def regions_of(model):
    for name, module in model.model.layers[0].named_modules():
        region = getattr(module.__dict__.get("forward"), "__func__", None)
        if isinstance(region, compiled_regions.CompiledRegion):
            yield name, region


def counting(compiled, role, ran):
    return lambda *args: ran.append(role) or compiled(*args)


def test_copies_and_pickles():
    model, batch = small(), make_batch("plain")
    expected = gradients(model, **batch)[1]
    streambp.patch(model, CONFIG)
    twin = copy.deepcopy(model)
    sent = pickle.loads(pickle.dumps(model))
    streambp.unpatch(model)
    assert not fused_modules(model.model.layers[0])
    assert fused_modules(twin.model.layers[0])
    assert relative_l2(gradients(sent, **batch)[1], expected) <= MAX_RELATIVE_ERROR
    streambp.unpatch(twin)
    assert not fused_modules(twin.model.layers[0])
    twin_gradients = gradients(twin, **batch)[1]
    assert all(torch.equal(twin_gradients[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("why", ["no compiler", "no Triton"])
def test_a_machine_that_cannot_compile_leaves_the_model_as_it_was_and_describe_says_so(
    why, monkeypatch
):
    if why == "no compiler":
        monkeypatch.setattr(compiled_regions.shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(compiled_regions, "has_triton", lambda: False)
        real = compiled_regions.why_no_compiler
        monkeypatch.setattr(compiled_regions, "why_no_compiler", lambda device: real("cuda"))
    model = small()
    own_before = own_attributes(model)
    streambp.patch(model, CONFIG)
    notes = [
        note for note in streambp.describe(model).notes if "leaves all modules as they are" in note
    ]
    assert len(notes) == 1
    assert "torch.compile needs" in notes[0]
    assert not fused_modules(model.model.layers[0])
    streambp.unpatch(model)
    assert own_attributes(model) == own_before


class WithDropout(modeling_llama.LlamaMLP):
    """An MLP with dropout behind its activation."""

    def forward(self, x):
        middle = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(middle, 0.25, self.training))


class DrawsAnew(WithDropout):
    """The mutant: with a graph it draws other numbers."""

    def forward(self, x):
        return super().forward(
            x + 1e-300 * torch.rand(1, dtype=x.dtype) if torch.is_grad_enabled() else x
        )


class TiedNorm(modeling_llama.LlamaRMSNorm):
    """A norm over all tokens together."""

    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-2, keepdim=True))


def test_modules_that_compute_otherwise_keep_their_own_forward():
    model = small()
    layer = model.model.layers[0]
    layer.mlp.__class__, layer.input_layernorm.__class__ = WithDropout, TiedNorm
    layer.post_attention_layernorm.compile(backend="eager")
    streambp.patch(model, CONFIG)
    assert [name for name, _ in regions_of(model)] == []
    note = "compiled regions compute otherwise than TiedNorm, WithDropout, which stay as they are"
    assert note in streambp.describe(model).notes


def directional(model, batch, seed, step=1e-6):
    """The derivative of the loss along a random direction: by differences, and by the gradients.
    Both draw alike."""
    generator = seeded(seed)
    parameters = dict(model.named_parameters())
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in parameters.items()
    }
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(direction[name], alpha=sign * step)
        seed_torch(seed)
        losses.append(model(**batch, use_cache=False).loss.item())
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(direction[name], alpha=sign * step)
    seed_torch(seed)
    computed = gradients(model, **batch)[1]
    return (losses[0] - losses[1]) / (2 * step), sum(
        (direction[name] * g).sum().item() for name, g in computed.items()
    )


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_dropout_in_compiled_code_draws_the_same_again(backend, monkeypatch):
    """Of a module that a user compiles: none of ours has dropout."""
    lift_float32_casts(monkeypatch)
    for kind in (WithDropout, DrawsAnew):
        torch._dynamo.reset()
        model, batch = small().double(), make_batch("plain", LENGTH)
        model.model.layers[0].mlp.__class__ = kind
        model.model.layers[0].mlp.compile(backend=backend, dynamic=True)
        config = streambp.StreamConfig(
            chunk_size=CHUNK, saves=(), kernels="own", compare_backward=kind is WithDropout
        )
        streambp.patch(model, config)
        gradients(model, **batch)
        by_differences, by_gradients = directional(model, batch, 3)
        assert "streams: 1 x" in str(streambp.describe(model))
        assert (abs(by_differences - by_gradients) <= 1e-7 * abs(by_differences)) == (
            kind is WithDropout
        )


class DropsGradient(torch.autograd.Function):
    """x [n, h] as it is, with a backward that returns None."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


MUTANTS = {
    "mixes tokens": lambda out: out + 0.1 * out.roll(1, 0),
    "backward returns None": lambda out: DropsGradient.apply(out),
}


@pytest.mark.fast("mixes tokens-as written", "backward returns None-as compiled")
@pytest.mark.parametrize("where", ["as written", "as compiled"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name, where, monkeypatch):
    """As written, a trial sees a region that mixes tokens, and the layer runs whole. What a
    compiler makes of it is in no trial: the bar of gradients sees it, if the comparison of the
    forward with what is computed again has not."""
    mutant, stock, batch = MUTANTS[name], small(), make_batch("plain", LENGTH)
    model = copy.deepcopy(stock)
    streambp.patch(model, CONFIG)
    (region,) = [region for role, region in regions_of(model) if role == "mlp"]
    real = region.compiled

    def wrong(*args):
        eagerly = torch._dynamo.eval_frame._stance.stance == "force_eager"
        return real(*args) if eagerly and where == "as compiled" else mutant(real(*args))

    region.compiled = wrong
    expected = gradients(stock, **batch)[1]
    try:
        off = relative_l2(gradients(model, **batch)[1], expected)
    except (BackwardError, AssertionError):
        return
    assert off > 1e-3
    if where == "as written" and name == "mixes tokens":
        assert "streams" not in {layer.path for layer in streambp.describe(model).layers}


@pytest.mark.full
def test_verify_compares_both_with_regions(monkeypatch):
    with_regions, real = [], compare._run
    monkeypatch.setattr(
        compare, "_run", lambda m, *a: with_regions.append(bool(fused_modules(m))) or real(m, *a)
    )
    result = compare.verify(build("qwen3"), seq_len=97, saves=("attn_out",), kernels="compiled")
    assert result.exact, result
    assert True in with_regions


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma4_text", "gptj"])
def test_a_rotation_of_one_tensor_stays_the_models(family, float64_oracle):
    stock, batch = zoo.build(family), make_batch("plain")
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    assert (
        relative_l2(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= MAX_RELATIVE_ERROR
    )
    assert "rotation" not in str(streambp.describe(ours))


def marks_after_unpatching():
    """What torch's compiler has noted on a model's parameters and modules after `unpatch`, beside
    what was there before."""
    model = small()
    noted = model.model.layers[0].input_layernorm.weight
    torch._dynamo.mark_static_address(noted)  # by the user
    names_before = {
        name: set(vars(x)) for name, x in [*model.named_parameters(), *model.named_modules()]
    }
    streambp.patch(model, CONFIG)
    gradients(model, **make_batch("plain"))
    some = any(set(vars(p)) - names_before[name] for name, p in model.named_parameters())
    streambp.unpatch(model)
    names_after = {
        name: set(vars(x)) for name, x in [*model.named_parameters(), *model.named_modules()]
    }
    return some, {
        name: names_after[name] ^ names_before[name]
        for name in names_before
        if names_after[name] != names_before[name]
    }


def test_unpatch_takes_off_what_the_compiler_has_noted():
    assert marks_after_unpatching() == (True, {})


def test_marks_that_stay_are_found(monkeypatch):
    monkeypatch.setattr(fused_layers, "COMPILER_MARK_PREFIX", "no such name")
    assert marks_after_unpatching()[1]
