"""Micro-batches whose graphs fit into the free memory run as the unpatched model. [Note:
micro-batches as unpatched]

covers: attention/backend.py, model/unpatched.py, model/head_deferral.py, model/state.py,
    offload/costs.py, offload/policy.py
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
)
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.chunks import plan_chunks
from streambp.device import RandomState
from streambp.layer.gradients import nodes_behind
from streambp.model import empty_batches, state, unpatched
from streambp.offload.costs import UnpatchedChoice
from streambp.offload.policy import SavesPolicy
from streambp.prefixes import calls
from streambp.prefixes.tree import find_tree
from tests import zoo
from tests.families import FAMILIES, LENGTH, MODES, build, make_batch
from tests.offload.runs import assert_same, step
from tests.offload.test_limits import AMPLE_BYTES, Device, MemoryNeed
from tests.seeds import seed_torch
from tests.versions import CACHE_FIELD

DROPOUT_CONFIG = {"attention_dropout": 0.3}
MAX_MEMORY_SHARE = unpatched.MAX_SHARE_OF_FREE_MEMORY  # which conftest.py takes to 0
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", MAX_MEMORY_SHARE)


def patched(model=None, with_first_step=True, headroom=AMPLE_BYTES, **settings):
    """A copy of a model that was through a step on a device with so much memory."""
    model = copy.deepcopy(build("qwen3") if model is None else model)
    streambp.patch(
        model, streambp.StreamConfig(**{"chunk_size": LENGTH, "rows": "as_given", **settings})
    )
    chooser = chooser_of(model)
    if chooser is not None:
        chooser.free = lambda _: headroom
    if with_first_step:
        step(model)
    return model


def chooser_of(model):
    return next(
        w.layer_state.saves_policy for w in model._streambp.wrappers if hasattr(w, "layer_state")
    )


def streams(loss):
    """Whether a streamed layer is in the graph of a loss."""
    return any(node.name() == "StreamedLayerBackward" for node in nodes_behind([loss]))


def seeded_step(model, **batch):
    seed_torch(3)
    return step(model, **batch)


@pytest.mark.fast(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_the_unpatched_models(family, mode):
    plain = build(family, **DROPOUT_CONFIG)
    model = patched(plain)
    assert_same(seeded_step(model, **make_batch(mode)), seeded_step(plain, **make_batch(mode)))
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert not streams(model(**make_batch(mode), use_cache=False).loss)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gemma2", "gpt_oss"])
def test_other_families(family):
    plain = zoo.build(family, torch.float32)
    model = patched(plain)
    result = seeded_step(model)
    if isinstance(chooser_of(model).latest, UnpatchedChoice):
        assert_same(result, seeded_step(plain))
    else:
        assert "eager" in {
            layer.config._attn_implementation
            for layer in model.modules()
            if hasattr(layer, "config")
        }


def test_the_first_step_streams():
    model = patched(with_first_step=False)
    assert streams(model(**make_batch("plain")).loss)


def several_steps(model):
    """Losses and weights of four steps of one stream of random numbers."""
    seed_torch(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = model(**make_batch("plain")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, torch.get_rng_state(), *(p.detach() for p in model.parameters())]


def test_a_run_with_dropout_is_the_unpatched_one_from_a_warm_up_on():
    """Without one the first step streams, and draws other numbers, after which weights are
    others."""
    plain = build("qwen3", **DROPOUT_CONFIG)
    model = patched(plain, with_first_step=False)
    streambp.warm_up(model, **make_batch("plain"))
    expected = several_steps(copy.deepcopy(plain))
    assert all(map(torch.equal, several_steps(model), expected))
    cold = several_steps(patched(plain, with_first_step=False))
    assert not any(map(torch.equal, cold[:4], expected[:4]))


@pytest.mark.parametrize("chunks", [LENGTH, "auto"])
@pytest.mark.parametrize("rate", [0.3, 0.0], ids=["dropout", "no dropout"])
def test_a_forward_without_gradients_draws_as_the_step(rate, chunks, least_chunk):
    """GradCache computes embeddings without gradients, and again with gradients from the same
    random state. A step of several chunks may run unpatched too."""
    least_chunk(1)
    model = patched(build("qwen3", attention_dropout=rate), chunk_size=chunks)
    ids = make_batch("plain")["input_ids"]
    seed_torch(4)
    with torch.no_grad():
        expected = model.model(ids, use_cache=False).last_hidden_state  # [B, T, h]
    seed_torch(4)
    hidden_states = model.model(ids, use_cache=False).last_hidden_state  # [B, T, h]
    assert streams(hidden_states) == (rate > 0)
    assert ("short steps stream" in str(streambp.describe(model))) == (rate > 0)
    if rate:
        assert torch.equal(hidden_states, expected)
    else:
        torch.testing.assert_close(hidden_states, expected)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_decoder_draws_alike_where_its_config_asks_for_a_cache(steps_before):
    """The two forwards of GradCache, without `use_cache`: the one without gradients would return a
    cache, as the config has it, and would run unpatched."""
    model = patched(build("qwen3", attention_dropout=0.3), with_first_step=False, chunk_size=5)
    model.config.use_cache = True
    batch = make_batch("plain")
    for _ in range(steps_before):
        model(**batch).loss.backward()
    ids = batch["input_ids"]
    seed_torch(4)
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state  # [B, T, h]
    seed_torch(4)
    hidden_states = model.model(ids).last_hidden_state  # [B, T, h]
    assert torch.equal(hidden_states, expected)


def test_a_head_that_is_deferred_gets_the_unpatched_layers_output():
    plain = build("qwen3", dtype=torch.float64)
    model = patched(plain, lazy_logits=True)
    batch = make_batch("plain")
    labels = batch.pop("labels")
    results = []
    for tested_model in (model, plain):
        tested_model.zero_grad(set_to_none=True)
        logits = tested_model(**batch, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        assert not streams(loss)
        loss.backward()
        results.append([p.grad for p in tested_model.parameters()])
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert "computed blockwise" in streambp.describe(model).head
    for gradient, expected in zip(*results, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_per_token_values():
    plain = build("qwen3", dtype=torch.float64)
    model, batch = patched(plain), make_batch("left-padded")
    output = model(**batch, output_log_probs=True)
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    labels = batch["labels"][:, 1:]
    expected = plain(**{**batch, "labels": None}).logits[:, :-1].log_softmax(-1)
    expected = expected.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(
        output.log_probs[labels >= 0], expected[labels >= 0], rtol=1e-6, atol=1e-8
    )


def test_a_backbone_alone():
    plain = build("qwen3").model
    model = patched(plain, with_first_step=False)
    ids = make_batch("plain")["input_ids"]
    gradients = []
    for tested_model in (model, model, plain):
        tested_model.zero_grad(set_to_none=True)
        hidden_states = tested_model(ids, use_cache=False).last_hidden_state  # [B, T, h]
        hidden_states.square().sum().backward()
        gradients.append([p.grad.clone() for p in tested_model.parameters()])
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert all(map(torch.equal, gradients[1], gradients[2]))


def test_logits_are_left_out_as_in_a_streamed_step():
    model = patched()
    output = model(**make_batch("plain"), output_hidden_states=True)
    assert set(output.keys()) == {"loss", "hidden_states", CACHE_FIELD}
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)


REASONS = {
    "chunks": {"chunk_size": LENGTH - 1},
    "saves": {"saves": ("attn_out",)},
    "shared prefixes": {"rows": "packed"},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("reason", REASONS)
def test_else_it_streams(reason):
    settings = dict(REASONS[reason])
    plain = build("qwen3")
    plain.set_attn_implementation(settings.pop("attn_implementation", "sdpa"))
    model = patched(plain, **settings)
    assert streams(model(**make_batch("plain")).loss)
    assert not isinstance(getattr(chooser_of(model), "latest", None), UnpatchedChoice)


@pytest.mark.parametrize("lazy_logits", [False, True])
def test_auto_packs_what_saves_tokens_and_else_runs_as_unpatched(lazy_logits, monkeypatch):
    """One look decides, however many forwards ask for it."""
    searches, model = [], patched(rows="auto", lazy_logits=lazy_logits)
    monkeypatch.setattr(
        calls, "find_tree", lambda *args, **kwargs: searches.append(1) or find_tree(*args, **kwargs)
    )
    batch = make_batch("plain")
    padded = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    padded["attention_mask"][0, LENGTH // 2 :] = 0
    padded["labels"] = padded["labels"].masked_fill(padded["attention_mask"] == 0, -100)
    for arguments, packs in ((batch, False), (padded, True), (batch, False), (padded, True)):
        searches.clear()
        loss = model(**arguments).loss
        loss.backward()
        assert (
            streams(loss)
            == isinstance(model.model.__dict__["forward"].prefixes.last, calls.PackedRowSizes)
            == packs
        )
        assert isinstance(chooser_of(model).latest, UnpatchedChoice) != packs
        assert len(searches) == 1


@pytest.mark.parametrize("headroom_factor", [1.2, 1.3])
def test_it_has_to_fit_once_with_a_guard(headroom_factor):
    """A fifth of what a step without saves leaves free stays free."""
    model = patched()
    model.zero_grad(set_to_none=True)
    runs, chooser = model._streambp.unpatched, chooser_of(model)
    predicted_bytes = runs.predict_memory(2 * LENGTH, LENGTH, CPU, model.config).bytes
    need = chooser.figures.need(2 * LENGTH, 2 * LENGTH)
    chooser.free = lambda _: need + headroom_factor * predicted_bytes
    assert streams(model(**make_batch("plain")).loss) == (headroom_factor < 1.25)


@pytest.fixture
def least_chunk(monkeypatch):
    """Sets the fewest tokens of an automatic chunk, without the plans that are cached."""

    def set_least(tokens):
        monkeypatch.setattr("streambp.chunks.AUTO_MIN_TOKENS", tokens)
        plan_chunks.cache_clear()

    yield set_least
    plan_chunks.cache_clear()


@pytest.mark.parametrize("chunks", ["auto", LENGTH])
def test_chunks_that_know_no_memory_are_no_reason_to_stream(chunks, least_chunk):
    """On a CPU chunks have 2,048 tokens and more, however much memory is free. Chunks of the
    program's own are kept to."""
    least_chunk(LENGTH)
    plain = build("qwen3")
    model = patched(plain, chunk_size=chunks)
    assert chooser_of(model).figures.seconds is None
    batch = make_batch("plain")
    assert (len(plan_chunks(LENGTH, 2, chunks)) > 1) == (chunks == "auto")
    assert_same(step(model, **batch), step(plain, **batch))
    long = make_batch("plain", length=2 * LENGTH)
    assert streams(model(**long).loss) == (chunks != "auto")


def test_a_tuple_is_that_of_a_streamed_step():
    model = patched()
    batch = {**make_batch("plain"), "use_cache": False}
    assert len(model(**batch, return_dict=False)) == len(model(**batch)) == 1


def test_states_stream():
    model = patched(zoo.build("lfm2", torch.float32))
    assert streams(model(**make_batch("plain")).loss)


def test_a_checkpoint_around_the_model_streams():
    model = patched()
    batch = make_batch("plain")
    hidden = model.get_input_embeddings()(batch["input_ids"])
    loss = checkpoint(
        lambda x: model(inputs_embeds=x, labels=batch["labels"]).loss, hidden, use_reentrant=False
    )
    assert not isinstance(chooser_of(model).latest, UnpatchedChoice)
    loss.backward()


def test_evaluation_streams():
    model = patched().eval()
    with torch.no_grad():
        model(**make_batch("plain"), use_cache=False)
    assert not isinstance(chooser_of(model).latest, UnpatchedChoice)


def test_out_of_memory_in_forward_streams_instead():
    plain = build("qwen3", **DROPOUT_CONFIG)
    model, reference = patched(plain), patched(plain, saves=())
    model.zero_grad(set_to_none=True)
    hook_calls = []
    handle = model.model.layers[1].mlp.act_fn.register_forward_pre_hook(
        lambda *_: hook_calls.append(1) or _raise_once(hook_calls)
    )
    seed_torch(3)
    loss = model(**make_batch("plain")).loss
    handle.remove()
    assert streams(loss)
    loss.backward()
    expected = seeded_step(reference)
    assert_same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected)
    assert streams(model(**make_batch("plain")).loss)
    assert not streams(model(**make_batch("plain", length=LENGTH // 2)).loss)


def _raise_once(hook_calls):
    if len(hook_calls) == 1:
        raise torch.OutOfMemoryError("no memory left, says a test")


def test_out_of_memory_in_backward_streams_later_steps():
    plain = build("qwen3", **DROPOUT_CONFIG)
    model, device = patched(plain), Device(fails_at=math.inf)
    seed_torch(3)
    with device:
        loss = model(**make_batch("plain")).loss
        assert not streams(loss)
        device.fails_at = device.operations + 20
        with pytest.raises(torch.OutOfMemoryError, match="says a test"):
            loss.backward()
    assert_same(seeded_step(model), seeded_step(patched(plain, saves=())))
    assert not isinstance(chooser_of(model).latest, UnpatchedChoice)
    seeded_step(model, **make_batch("plain", length=LENGTH // 2))
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)


def shrinking(graphs_left, positions=8, **settings):
    """The places of a step's operations at which it fails, if others take memory there.

    graphs_left: what a step without saves still leaves free, in graphs.
    """
    plain = build("qwen3", num_hidden_layers=3)
    model, reference, device = patched(plain, **settings), patched(plain, saves=()), Device()
    with device:
        expected = step(reference)
    need, runs = device.peak, model._streambp.unpatched
    predicted_bytes = (
        patched(plain)
        ._streambp.unpatched.predict_memory(2 * LENGTH, LENGTH, CPU, model.config)
        .bytes
    )
    chooser_of(model).figures.need = MemoryNeed()
    chooser_of(model).figures.need.bytes = need
    free, failed = need + 1.01 * predicted_bytes / MAX_MEMORY_SHARE, []
    for number in range(positions):
        at = 1 + (2 * number + 1) * 400 // (2 * positions)
        chooser_of(model).free = lambda _: free
        chooser_of(model).margins.clear()
        chooser_of(model)._forward.batch.devices.clear()
        if runs is not None:
            runs.max_tokens = math.inf
        with Device(
            free, shrinks_at=at, later_limit=need + graphs_left * predicted_bytes
        ) as device:
            try:
                result = step(model)
            except torch.OutOfMemoryError:
                failed.append(at)
                continue
        assert device.operations > at
        assert graphs_left == 0.0 or isinstance(chooser_of(model).latest, UnpatchedChoice)
        assert runs is not None or torch.equal(result[0], expected[0])
        torch.testing.assert_close(result[1], expected[1])
    return failed


def test_the_guard_may_go_within_a_step():
    assert shrinking(1.0) == []


def test_a_step_that_loses_all_room_fails():
    assert shrinking(0.0)


def test_a_step_that_loses_all_room_is_finished_where_every_step_streams():
    assert shrinking(0.0, unpatched_runs=False) == []


@pytest.mark.parametrize("headroom", [AMPLE_BYTES, 200_000, 0])
def test_numbers_do_not_depend_on_memory_where_every_step_streams(headroom):
    plain = build("qwen3", **DROPOUT_CONFIG)
    model = patched(plain, headroom=headroom, unpatched_runs=False)
    assert_same(seeded_step(model), seeded_step(patched(plain, saves=())))
    assert not isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert streams(model(**make_batch("plain"), use_cache=False).loss)


def test_a_backward_that_ends_changes_nothing():
    model = patched()
    for _ in range(3):
        step(model)
        assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert model._streambp.unpatched.max_tokens == math.inf


def test_micro_batches_before_their_backward():
    plain = build("qwen3")
    model = patched(plain)
    for tested_model in (model, plain):
        tested_model.zero_grad(set_to_none=True)
        losses = [
            tested_model(**make_batch("plain", seed=seed), use_cache=False).loss for seed in (1, 2)
        ]
        for loss in reversed(losses):
            loss.backward()
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_device_that_tells_corrects_the_prediction(monkeypatch):
    monkeypatch.setattr(unpatched, "reports_memory", lambda device: True)
    model = patched()
    runs, device = model._streambp.unpatched, Device(limit=2_000_000)
    chooser_of(model).free = lambda _: device.limit - device.live
    first = runs.predict_memory(2 * LENGTH, LENGTH, CPU, model.config).bytes
    with device:
        loss = model(**make_batch("plain"), use_cache=False).loss
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert runs.predict_memory(2 * LENGTH, LENGTH, CPU, model.config).bytes >= max(
        first, device.live
    )
    loss.backward()


def test_the_prediction_holds_what_forward_keeps():
    model = patched()
    device = Device()
    with device:
        loss = model(**make_batch("plain"), use_cache=False).loss
    predicted = chooser_of(model).latest.bytes
    assert device.live <= predicted <= 3 * device.live
    loss.backward()


def test_describe_tells():
    model = patched()
    step(model)
    description = str(streambp.describe(model))
    assert description.startswith(
        f"last step: {2 * LENGTH} tokens (2 rows) in one chunk, ran unpatched: it needs "
    )
    assert "as the unpatched model computes it, from logits [B, T, V]" in description


def test_copies_have_seen_nothing():
    model = patched()
    model._streambp.unpatched.max_tokens = 1
    model_copy = copy.deepcopy(model)
    runs = model_copy._streambp.unpatched
    assert runs.max_tokens == math.inf
    assert runs.saves_policy is chooser_of(model_copy)
    assert [layer_state.layer for layer_state in runs.steps.layer_states] == list(
        model_copy.model.layers
    )


def test_hooks_act_as_unpatched():
    """A hook that is hung on between forward and backward of a streamed layer is refused; here it
    is torch's own affair."""
    plain = build("qwen3")
    model = patched(plain)
    for tested_model in (model, plain):
        tested_model.zero_grad(set_to_none=True)
        tested_model.model.layers[0].register_full_backward_hook(
            lambda _, grads, __: (2 * grads[0],)
        )
        loss = tested_model(**make_batch("plain"), use_cache=False).loss
        tested_model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        loss.backward()
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_batch_without_a_label_has_no_loss():
    """As in a streamed step: NaN would come and go with the memory."""
    model = patched()
    batch = make_batch("plain")
    loss, gradients = step(model, labels=torch.full_like(batch["labels"], -100))
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    assert loss == 0.0
    assert all(not gradient.any() for gradient in gradients.values())


def test_router_losses_are_those_of_a_streamed_step():
    plain = zoo.build("qwen3_moe", torch.float64)
    model, streamed = (
        patched(plain, with_first_step=False),
        patched(plain, saves=(), with_first_step=False),
    )
    for labelled in (True, True, False):
        batch = {**make_batch("plain"), "output_router_logits": True}
        if not labelled:
            batch["labels"] = torch.full_like(batch["labels"], -100)
        outputs = [tested_model(**batch) for tested_model in (model, streamed)]
        assert outputs[0].keys() == outputs[1].keys()
        for tested_model, output in zip((model, streamed), outputs, strict=True):
            tested_model.zero_grad(set_to_none=True)
            output.loss.backward()
        for ours, theirs in zip(model.parameters(), streamed.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)


def test_documents_are_warned_of_whenever_they_come():
    plain = build("qwen3")
    model, batch = patched(plain), make_batch("packed")
    with pytest.warns(UserWarning, match="several documents"):
        assert streams(model(**batch).loss)
    assert not streams(model(**batch).loss)
    assert not streams(patched(plain)(**batch, use_cache=False).loss)  # it is the same there


def test_documents_that_unpatched_attention_does_not_read():
    model, batch = patched(), make_batch("plain", rows=1)
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor(
        [0, 9, LENGTH], dtype=torch.int32
    )
    assert streams(model(**batch, use_cache=False).loss)
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]
    # by these it does, as TRL packs
    assert not streams(model(**batch, position_ids=positions, use_cache=False).loss)


def fields_of(model, batch):
    """By a caller whose code does not name what the output may leave out."""
    return set(model(**batch).keys())


def test_fields_do_not_come_and_go():
    """A head with backward hooks builds its logits and hands them out; lm_head's hooks may come at
    any time."""
    model, batch = patched(), make_batch("plain")
    assert fields_of(model, batch) == {"loss", CACHE_FIELD}
    model.lm_head.register_full_backward_hook(lambda *_: None)
    assert fields_of(model, batch) == {"loss", "logits", CACHE_FIELD}


def test_a_reentrant_checkpoint_computes_the_same_twice():
    model, batch = patched(build("qwen3", **DROPOUT_CONFIG)), make_batch("plain")
    hidden = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    losses = []

    def run(x):
        loss = model(inputs_embeds=x, labels=batch["labels"]).loss
        losses.append(loss.detach())
        return loss

    checkpoint(run, hidden, use_reentrant=True).backward()
    assert len(losses) == 2
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)  # other random numbers make it 1e-4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_layers_computes_the_same_twice(reentrant):
    """Its second call is the layer's alone, which would stream."""
    model = patched()
    streamed = copy.deepcopy(model)
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for tested_model in (model, streamed):
        if tested_model is streamed:
            streambp.patch(tested_model, streambp.StreamConfig(chunk_size=LENGTH, saves=()))
        tested_model.model.layers = torch.nn.ModuleList(
            CheckpointWrapper(layer, kind) for layer in tested_model.model.layers
        )
    assert_same(step(model), step(streamed))
    assert_same(step(model), step(streamed))


def test_another_thread_that_evaluates_meanwhile_is_refused():
    """Also with a cache, with which its layers would run as unpatched; the step is as it would be
    without."""
    plain = build("qwen3")
    model, met = patched(plain), []
    ids = make_batch("plain")["input_ids"]

    def meanwhile(*_):
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(streambp.StreamBPError, match="Another thread is computing"),
        ):
            pool.submit(lambda: model(input_ids=ids)).result()
        met.append(1)

    handle = model.model.layers[0].register_forward_pre_hook(meanwhile)
    result = step(model)
    handle.remove()
    assert met == [1]
    for name, gradient in step(plain)[1].items():
        torch.testing.assert_close(result[1][name], gradient)


def test_a_saved_loss_says_nothing_of_hooks():
    model = patched()
    loss = model(**make_batch("plain")).loss
    assert not streams(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(loss, io.BytesIO())


@pytest.mark.parametrize("family", ["bloom", "xglm", "falcon"])
def test_layers_that_attend_by_themselves_stream(family):
    """They build [B, H, T, T], which a short sequence does not show."""
    assert streams(patched(zoo.build(family, torch.float32))(**make_batch("plain")).loss)


KINDS = ("latent", "dropout", "window", "padding")


def built(kind):
    """A model for which torch builds scores or masks: no fused kernel of a CPU takes values
    narrower than keys, or drops out."""
    if kind == "latent":
        return zoo.build("deepseek_v2", torch.float32)
    window = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
    return build("qwen3", **{"dropout": DROPOUT_CONFIG, "window": window}.get(kind, {}))


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", ["plain", *KINDS])
@pytest.mark.parametrize("length", [40, 300])
def test_a_step_that_just_fits_is_finished(kind, length):
    """Its graphs take all they may of the memory, and backward finds the rest of it."""
    plain = built(kind)
    batch = make_batch("right-padded" if kind == "padding" else "plain", length=length)
    model = patched(plain, chunk_size=length)
    reference = patched(plain, chunk_size=length, saves=())
    with Device() as device:
        seeded_step(reference, **batch)
    chooser = chooser_of(model)
    chooser.figures.need = MemoryNeed()
    chooser.figures.need.bytes = device.peak
    predicted_bytes = model._streambp.unpatched.predict_memory(
        2 * length, length, CPU, model.config
    ).bytes
    limit = device.peak + 1.001 * predicted_bytes / MAX_MEMORY_SHARE
    chooser.free = lambda _: limit
    with Device(limit) as device:
        result = seeded_step(model, **batch)
    assert isinstance(chooser.latest, UnpatchedChoice)
    assert_same(result, seeded_step(plain, **batch))
    print(f"{kind} {length}: {device.peak / limit:.2f} of the memory")


@pytest.mark.parametrize("kind", KINDS)
def test_the_prediction_grows_with_scores_and_masks(kind):
    model = patched(built(kind), chunk_size=300)
    device = Device()
    with device:
        loss = model(
            **make_batch("right-padded" if kind == "padding" else "plain", length=300),
            use_cache=False,
        ).loss
        live_bytes = device.live
        loss.backward()
    assert isinstance(chooser_of(model).latest, UnpatchedChoice)
    predicted = chooser_of(model).latest.bytes
    assert live_bytes <= 1.1 * predicted  # with a mask, keys are repeated for each query head
    assert device.peak <= 2 * predicted


def test_what_sdpa_leaves_out_streams():
    model = patched(zoo.build("gpt_oss", torch.float32))
    layer_states = model._streambp.steps.layer_states
    # it has sinks
    assert not any(layer_state.last_call.sdpa.same_numbers for layer_state in layer_states)
    second_model = patched()
    second_model._streambp.steps.layer_states[1].last_call.sdpa = layer_states[1].last_call.sdpa
    assert streams(second_model(**make_batch("plain")).loss)


def test_a_forward_that_keeps_too_much_is_streamed_instead(monkeypatch):
    plain = build("qwen3", **DROPOUT_CONFIG)
    model, reference = patched(plain), patched(plain, saves=())
    monkeypatch.setattr(unpatched, "reports_memory", lambda device: True)
    chooser, device = chooser_of(model), Device()
    chooser.free = lambda _: AMPLE_BYTES - 4000 * device.live
    model.zero_grad(set_to_none=True)
    seed_torch(3)
    with device:
        loss = model(**make_batch("plain")).loss
    assert streams(loss)
    loss.backward()
    assert_same(
        (loss.detach(), {name: p.grad for name, p in model.named_parameters()}),
        seeded_step(reference),
    )
    assert model._streambp.unpatched.factor > 1


def test_what_is_small_does_not_correct_the_prediction(monkeypatch):
    """An allocator rounds up what a few tokens take."""
    monkeypatch.setattr(unpatched, "reports_memory", lambda device: True)
    model = patched()
    chooser, device = chooser_of(model), Device()
    chooser.free = lambda _: AMPLE_BYTES - 10 * device.live
    with device:
        loss = model(**make_batch("plain")).loss
    assert not streams(loss)
    assert model._streambp.unpatched.factor == 1.0
    loss.backward()


def test_a_head_that_has_not_streamed_does():
    model, batch = patched(with_first_step=False), make_batch("plain")
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    model(**unlabelled).logits.sum().backward()
    assert fields_of(model, batch) == {"loss", CACHE_FIELD}
    assert "blockwise" in streambp.describe(model).head
    fields_of(model, batch)
    assert "as the unpatched model" in streambp.describe(model).head


def no_graphs(self, tokens, device, real=SavesPolicy.graphs):
    prediction = real(self, tokens, device)
    return prediction and (0.0, prediction[1])


MUTANTS = {
    "random numbers": (RandomState, "restore", lambda self: None, test_out_of_memory_in_forward_streams_instead),
    "logits": (unpatched, "LOGIT_BYTES", 0, test_the_prediction_holds_what_forward_keeps),
    "graphs": (SavesPolicy, "graphs", no_graphs, test_the_prediction_holds_what_forward_keeps),
    "share": (unpatched, "MAX_SHARE_OF_FREE_MEMORY", 1.0, lambda: test_it_has_to_fit_once_with_a_guard(1.2)),
    "eager": (unpatched, "is_plain", lambda _: True, lambda: test_else_it_streams("eager")),
    "backward": (
        unpatched.UnpatchedRuns, "_heed_backward", lambda _: None, test_out_of_memory_in_backward_streams_later_steps,
    ),
    "labels": (empty_batches.LossOfLabels, "apply", lambda loss, *_: loss, test_a_batch_without_a_label_has_no_loss),
    "scores": (unpatched, "SCORE_BYTES", 0,
        lambda: test_the_prediction_grows_with_scores_and_masks("latent")),
    "mask": (unpatched, "MASK_BYTES", 0,
        lambda: test_the_prediction_grows_with_scores_and_masks("window")),
    "own attention": (unpatched, "is_plain", lambda _: True, lambda: test_layers_that_attend_by_themselves_stream("xglm")),
    "sdpa": (unpatched, "SDPA", "another", test_what_sdpa_leaves_out_streams),
    "documents": (state, "finds_other_documents", lambda *_: False, test_documents_that_unpatched_attention_does_not_read),
    "draws": (
        unpatched.UnpatchedRuns, "watch_draws", lambda self, run, device: run(),
        lambda: test_a_forward_without_gradients_draws_as_the_step(0.3, LENGTH, lambda tokens: None),
    ),
    "noise": (
        unpatched, "IGNORED_FREE_MEMORY_FRACTION", 0.0,
        lambda: _with_a_patch(test_what_is_small_does_not_correct_the_prediction),
    ),
}  # fmt: skip


def _with_a_patch(test):
    with pytest.MonkeyPatch.context() as patch:
        test(patch)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(monkeypatch, mutant):
    owner, name, value, run = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, value)
    with pytest.raises((AssertionError, streambp.errors.BackwardError)):
        run()
