"""What streamed models promise as ordinary autograd citizens (DESIGN.md section 3), and the faults
of earlier tools.

covers: __init__.py, admission/entry.py, config.py, errors.py, layer/gradients.py, model/wrappers.py
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import queue

import pytest
import torch
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.model import patching
from tests.families import WINDOW, build, make_batch
from tests.oracle import gradients, worst_error
from tests.seeds import seeded

CONFIG = streambp.StreamConfig(chunk_size=5)
pytestmark = pytest.mark.usefixtures("float64_oracle")


def model_pair(family="qwen3", config=CONFIG, **overrides):
    """The same float64 model unpatched and patched."""
    stock = build(family, torch.float64, **overrides)
    return stock, streambp.patch(copy.deepcopy(stock), config)


def check_agree(stock, ours, **batch):
    (expected_loss, expected), (loss, grads) = gradients(stock, **batch), gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(grads, expected) <= 1e-10


def test_scaled_upstream():
    stock, ours = model_pair()
    batch = make_batch("plain")
    _, expected = gradients(stock, scale=0.25, **batch)
    _, grads = gradients(ours, scale=0.25, **batch)
    assert worst_error(grads, expected) <= 1e-10


def test_gradients_that_were_there_before_are_added_to():
    _, ours = model_pair()
    batch = make_batch("plain")
    _, grads = gradients(ours, **batch)
    grads_before = {name: torch.randn_like(p) for name, p in ours.named_parameters()}
    for name, p in ours.named_parameters():
        p.grad = grads_before[name].clone()
    ours(**batch, use_cache=False).loss.backward()
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads_before[name] + grads[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("valid", [1, 2, 3])
def test_sparse_labels(valid):
    stock, ours = model_pair()
    batch = make_batch("plain")
    labels = torch.full_like(batch["labels"], -100)
    labels[0, 3 : 3 + valid] = batch["labels"][0, 3 : 3 + valid]
    check_agree(stock, ours, **{**batch, "labels": labels})


def test_no_valid_label_gives_zero():
    _, ours = model_pair()
    batch = make_batch("plain")
    loss, grads = gradients(
        ours, input_ids=batch["input_ids"], labels=torch.full_like(batch["labels"], -100)
    )
    assert loss == 0
    assert grads.keys() == {name for name, _ in ours.named_parameters()}
    assert all((g == 0).all() for g in grads.values())


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6])
def test_few_tokens(length):
    stock, ours = model_pair()
    batch = make_batch("plain", length=length)
    if length == 1:
        batch["shift_labels"] = batch["labels"]
    check_agree(stock, ours, **batch)


@pytest.mark.parametrize("chunk_size", [WINDOW - 3, WINDOW + 5])
def test_window_longer_and_shorter_than_a_chunk(chunk_size):
    stock, ours = model_pair("mistral", streambp.StreamConfig(chunk_size=chunk_size))
    check_agree(stock, ours, **make_batch("left-padded"))
    check_agree(stock, ours, **make_batch("packed"))


@pytest.mark.parametrize("items", [7, torch.tensor(11.0)])
def test_num_items_in_batch(items):
    stock, ours = model_pair()
    check_agree(stock, ours, **make_batch("plain"), num_items_in_batch=items)


def test_shift_labels():
    stock, ours = model_pair()
    batch = make_batch("plain")
    check_agree(stock, ours, **batch, shift_labels=torch.roll(batch["labels"], -1, 1))


def test_deep_copy_runs_its_own_weights():
    _, ours = model_pair()
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    expected = streambp.unpatch(copy.deepcopy(twin))
    batch = make_batch("plain")
    _, grads_before = gradients(ours, **batch)
    check_agree(expected, twin, **batch)
    _, grads_after = gradients(ours, **batch)
    assert all(torch.equal(grads_before[n], grads_after[n]) for n in grads_before)


def test_pickled_model_streams():
    stock, ours = model_pair()
    loaded = pickle.loads(pickle.dumps(ours))
    assert streambp.describe(loaded) == streambp.describe(ours)
    check_agree(stock, loaded, **make_batch("packed"))


def test_two_models_patched_differently():
    stock, ours = model_pair()
    other_stock, other_model = model_pair(
        "gemma3", streambp.StreamConfig(chunk_size=3, saves=("kv",))
    )
    batch = make_batch("right-padded")
    first, second = ours(**batch, use_cache=False).loss, other_model(**batch, use_cache=False).loss
    first.backward()
    second.backward()
    for reference, model in ((stock, ours), (other_stock, other_model)):
        grads = {n: p.grad for n, p in model.named_parameters()}
        assert worst_error(grads, gradients(reference, **batch)[1]) <= 1e-10


@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_before_one_backward(first):
    stock, ours = model_pair()
    batches = [make_batch("plain", seed=s) for s in (1, 2)]
    losses = [ours(**b, use_cache=False).loss for b in batches]
    losses[first].backward()
    losses[1 - first].backward()
    grads = {n: p.grad for n, p in ours.named_parameters()}
    parts = [gradients(stock, **b)[1] for b in batches]
    assert worst_error(grads, {n: parts[0][n] + parts[1][n] for n in grads}) <= 1e-10


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant):
    """It runs forward again while the first one's backward is pending, and must find the same
    tensors saved."""
    stock, ours = model_pair()
    batch = make_batch("plain")
    _, expected = gradients(stock, scale=0.5, **batch)
    factor = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    loss = checkpoint(
        lambda f: ours(**batch, use_cache=False).loss * f, factor, use_reentrant=use_reentrant
    )
    loss.backward()
    assert worst_error({name: p.grad for name, p in ours.named_parameters()}, expected) <= 1e-10


def test_second_backward_raises():
    _, ours = model_pair()
    loss = ours(**make_batch("plain"), use_cache=False).loss
    loss.backward(retain_graph=True)
    with pytest.raises(streambp.StreamBPError, match="second time"):
        loss.backward()


def test_second_derivatives_raise():
    _, ours = model_pair(config=streambp.StreamConfig(chunk_size=5, head=False))
    loss = ours(**make_batch("plain"), use_cache=False).loss
    with pytest.raises(streambp.StreamBPError, match="create_graph"):
        torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)


def test_parameters_changed_between_forward_and_backward_raise():
    _, ours = model_pair()
    loss = ours(**make_batch("plain"), use_cache=False).loss
    with torch.no_grad():
        ours.model.layers[0].mlp.up_proj.weight.add_(1.0)
    with pytest.raises(streambp.StreamBPError, match=r"mlp.up_proj.weight was changed"):
        loss.backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_a_step_leaves_the_model_usable(where, monkeypatch):
    stock, ours = model_pair()
    batch = make_batch("plain")
    parameters = dict(ours.named_parameters())
    # out of sight
    mlp, calls, armed = (type(ours.model.layers[1].mlp), queue.SimpleQueue(), queue.SimpleQueue())
    real = mlp.forward

    def failing(self, x):
        if not armed.empty():
            calls.put(1)
        if calls.qsize() == 3:
            raise ZeroDivisionError("injected")
        return real(self, x)

    monkeypatch.setattr(mlp, "forward", failing)
    gradients(ours, **batch)  # its layers are known now
    loss = ours(**batch, use_cache=False).loss if where == "backward" else None
    armed.put(1)
    with pytest.raises(ZeroDivisionError, match="injected"):
        ours(**batch, use_cache=False) if loss is None else loss.backward()
    monkeypatch.setattr(mlp, "forward", real)
    assert all(
        p is parameters[n] and isinstance(p, torch.nn.Parameter) for n, p in ours.named_parameters()
    )
    assert ours.config._attn_implementation == "sdpa"
    assert not any(
        "forward" in m.__dict__ for m in ours.modules() if isinstance(m, torch.nn.Linear)
    )
    ours.zero_grad()
    check_agree(stock, ours, **batch)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_called_by_itself(implementation):
    """Without a mask sdpa takes it for causal, eager attention reads everything."""
    stock = build("qwen3", torch.float64)
    stock.set_attn_implementation(implementation)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    x = torch.randn(2, 11, 32, dtype=torch.float64, generator=seeded(3))
    angles = stock.model.rotary_emb(x, torch.arange(11)[None])
    expected, output = (
        model.model.layers[0](x, position_embeddings=angles) for model in (stock, ours)
    )
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    check_agree(stock, ours, **make_batch("plain"))
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


def test_hooks_on_parameters_and_layers_fire_once():
    def halved(gradient):
        assert gradient is not None
        return gradient * 0.5

    stock, ours = model_pair()
    fired = []
    for model in (stock, ours):
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.register_hook(halved)
        weight.register_post_accumulate_grad_hook(lambda p: fired.append("parameter"))
        model.model.layers[0].register_full_backward_hook(lambda *_: fired.append("layer"))
    check_agree(stock, ours, **make_batch("plain"))
    assert fired.count("parameter") == 2
    assert fired.count("layer") == 2


def test_captured_gradients_keep_their_values():
    """autograd.grad, retain_grad and hooks see true values although layers reuse each other's
    buffers."""
    results = []
    for model in model_pair(
        config=streambp.StreamConfig(chunk_size=5, head=False), num_hidden_layers=4
    ):
        hook_grads, hidden = [], []
        handles = [
            layer.register_forward_hook(lambda m, a, out, hidden=hidden: hidden.append(out))
            for layer in model.model.layers
        ]
        embeddings = (
            model.get_input_embeddings()(make_batch("plain")["input_ids"]).detach().requires_grad_()
        )
        loss = model(
            inputs_embeds=embeddings, labels=make_batch("plain")["labels"], use_cache=False
        ).loss
        hidden[0].retain_grad()
        hidden[1].register_hook(hook_grads.append)
        hidden[2].register_hook(lambda g, hook_grads=hook_grads: hook_grads.append(g[:, :3]))
        captured = torch.autograd.grad(loss, [hidden[2], hidden[1], embeddings], retain_graph=False)
        results.append([*captured, *hook_grads])
        for handle in handles:
            handle.remove()
    for expected, tensor in zip(*results, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-14)


def test_gradient_buffers_are_reused():
    from streambp.layer import function as layer_function

    _, ours = model_pair(num_hidden_layers=3)
    decisions = []
    with pytest.MonkeyPatch.context() as patch:
        real = layer_function.may_overwrite
        patch.setattr(
            layer_function, "may_overwrite", lambda *a: decisions.append(real(*a)) or decisions[-1]
        )
        gradients(ours, **make_batch("plain"))
    assert decisions == [False, True, True]


def check_parametrized_head():
    """spectral_norm iterates each time when its weight is read, and keeps vectors in buffers."""
    stock = build("llama", torch.float64)
    parametrizations.spectral_norm(stock.lm_head)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    for _ in range(2):
        check_agree(stock, ours, **make_batch("plain"))
    for expected, buffer in zip(stock.buffers(), ours.buffers(), strict=True):
        assert torch.equal(buffer, expected) or (buffer - expected).abs().max() <= 1e-12


def test_a_parametrized_head_is_not_computed_by_patch():
    check_parametrized_head()


def test_a_parametrized_head_that_patch_computes_is_seen(monkeypatch):
    monkeypatch.setattr(patching, "_has_weight", lambda head: isinstance(head.weight, torch.Tensor))
    with pytest.raises(AssertionError):
        check_parametrized_head()


def test_unpatch_restores_everything():
    stock, ours = model_pair()
    attributes_before = {n: set(m.__dict__) for n, m in stock.named_modules()}
    streambp.unpatch(ours)
    assert {n: set(m.__dict__) for n, m in ours.named_modules()} == attributes_before
    batch = make_batch("plain")
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            gradients(stock, **batch)[1].values(), gradients(ours, **batch)[1].values(), strict=True
        )
    )
    assert streambp.unpatch(ours) is ours


def test_patching_again_changes_the_settings():
    stock, ours = model_pair()
    streambp.patch(ours, streambp.StreamConfig(chunk_size=3, saves=("attn_out",)))
    assert streambp.describe(ours).chunk_size == "3"
    check_agree(stock, ours, **make_batch("plain"))
    streambp.unpatch(ours)
    assert not any("forward" in m.__dict__ for m in ours.modules())


def test_a_part_of_a_patched_model_is_not_patched_again():
    _, ours = model_pair()
    with pytest.raises(streambp.StreamBPError, match="part of a model that is patched already"):
        streambp.patch(ours.model)
    streambp.unpatch(ours)
    streambp.patch(ours.model)
    assert streambp.describe(ours).chunk_size != "5"
    streambp.patch(ours, CONFIG)
    assert streambp.describe(ours).chunk_size == "5"


def test_state_dict_and_save_pretrained(tmp_path):
    stock, ours = model_pair()
    assert stock.state_dict().keys() == ours.state_dict().keys()
    ours.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path, dtype=torch.float64).to(torch.float64).train()
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in ours.state_dict().items()
    )
    check_agree(copy.deepcopy(loaded), streambp.patch(loaded, CONFIG), **make_batch("plain"))


def test_gradient_checkpointing_switched_on_by_a_trainer():
    stock, ours = model_pair()
    enable = (
        getattr(ours, "activation_checkpointing_enable", None) or ours.gradient_checkpointing_enable
    )
    enable()
    check_agree(stock, ours, **make_batch("plain"))
    streambp.unpatch(ours)
    assert all(layer.gradient_checkpointing for layer in ours.model.layers)
    check_agree(stock, ours, **make_batch("plain"))


@pytest.mark.sees_padding("hidden states of padding are compared")
def test_output_hidden_states():
    stock, ours = model_pair()
    batch = make_batch("left-padded")
    output = ours(**batch, use_cache=False, output_hidden_states=True)
    expected = stock(**batch, use_cache=False, output_hidden_states=True)
    for a, b in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(output.loss, expected.loss)


def test_log_probs_of_the_labels():
    stock, ours = model_pair("gemma3")
    batch = make_batch("left-padded")
    # values need names
    output = ours(**batch, use_cache=False, output_log_probs=True, return_dict=False)
    logits = stock(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    target = batch["labels"][:, 1:]
    expected = logits[:, :-1].log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * (
        target != -100
    )
    torch.testing.assert_close(output.log_probs, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=seeded(0))
    (output.log_probs.exp() * weights).sum().backward()
    (expected.exp() * weights).sum().backward()
    grads, reference = ({n: p.grad for n, p in m.named_parameters()} for m in (ours, stock))
    assert worst_error(grads, reference) <= 1e-10
    assert output.logits is None


def test_inside_accelerates_device_hooks():
    hooks = pytest.importorskip("accelerate.hooks", reason="device_map needs accelerate")
    stock, ours = build("qwen3", torch.float64), build("qwen3", torch.float64)
    modules = []

    class Hook(hooks.AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            modules.append(module)
            return super().pre_forward(module, *args, **kwargs)

    for layer in ours.model.layers:
        hooks.add_hook_to_module(layer, Hook(execution_device="cpu", io_same_device=True))
    attributes_before = {
        name: dict(layer.__dict__) for name, layer in ours.model.layers.named_children()
    }
    # whose trials would call the layers, too
    streambp.patch(ours, dataclasses.replace(CONFIG, rows="as_given"))
    check_agree(stock, ours, **make_batch("plain"))
    assert len(modules) == len(ours.model.layers)
    streambp.unpatch(ours)
    assert {
        name: dict(layer.__dict__) for name, layer in ours.model.layers.named_children()
    } == attributes_before


def test_an_engines_inner_hooks_are_silent_and_users_hooks_run_per_chunk():
    stock, ours = model_pair()
    # what a hook kept in sight would make the layer run whole
    calls, engines = (queue.SimpleQueue(), [])

    def engine(module, args, output):
        engines.append(1)

    engine.__module__ = "deepspeed.runtime.zero.parameter_offload"
    mlp = ours.model.layers[0].mlp
    mlp.register_forward_hook(engine)
    mlp.register_forward_hook(lambda *_: calls.put("user"))
    order = list(mlp._forward_hooks)
    check_agree(stock, ours, **make_batch("plain"))
    assert calls.qsize() >= 10
    assert not engines
    assert list(mlp._forward_hooks) == order
    assert "once per chunk" in str(streambp.describe(ours))


@pytest.mark.parametrize("managed", [False, True])
def test_a_parameter_that_the_loss_does_not_touch(managed):
    _, ours = model_pair()
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    ours.model.layers[0].unused = unused
    if managed:
        unused.ds_id = 0
    ours(**make_batch("plain"), use_cache=False).loss.backward()
    assert torch.equal(unused.grad, torch.zeros_like(unused)) if managed else unused.grad is None
