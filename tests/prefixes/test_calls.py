"""Calls whose rows share prefixes against the unpatched batch in float64, and those that compute
rows instead.

covers: prefixes/calls.py, prefixes/admission.py, prefixes/row_outputs.py, attention/masks.py,
head/token_positions.py, model/wrappers.py
"""

from __future__ import annotations

import copy
import functools
import itertools
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import streambp
from streambp.admission import third_party
from streambp.attention.spans import QueryRun
from streambp.errors import BackwardError, StreamBPError
from streambp.head.token_positions import take_rows
from streambp.model import wrappers
from streambp.prefixes import admission, calls, row_outputs
from streambp.prefixes.tree import MIN_SHARED_TOKENS, PrefixTree, find_tree
from tests import families, zoo
from tests.admission.test_side_effects import Reassigned
from tests.conftest import SHARES_PREFIXES
from tests.counting import LinearFlops
from tests.families import VOCABULARY
from tests.oracle import MAX_FLOAT64_ERROR, gradients, lift_float32_casts, worst_error
from tests.prefixes.batches import MODES, PROMPT, counted, make_batch, real
from tests.seeds import seeded
from tests.versions import needs_indexers
from tests.what_programs_do import Calibrated, Noisy, Running

TEST_MIN_PREFIX = 8
MOES = {"gpt_oss": {"output_router_logits": True}, "qwen3_moe": {"output_router_logits": True}}
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", *MOES, "gpt2", "gemma3n_text")


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle, monkeypatch):
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(
        calls, "find_tree", functools.partial(find_tree, min_prefix=TEST_MIN_PREFIX)
    )
    monkeypatch.setattr(calls, "CHUNK_OVERHEAD_TOKENS", 0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def trusted(monkeypatch):
    """What tests put inside a model counts as a library's that treats tokens alike; trials and
    steps find it out."""
    for name in ("HOOKS_ARE_HARMLESS", "MODULES_ARE_HARMLESS"):
        monkeypatch.setattr(third_party, name, (*getattr(third_party, name), "tests"))


def build(family):
    if family in families.FAMILIES:
        return families.build(family, torch.float64)
    return zoo.build(family, **MOES.get(family, {}))


def sharing(stock, chunk_size=7, **settings):
    config = streambp.StreamConfig(chunk_size=chunk_size, rows="packed", **settings)
    return streambp.patch(copy.deepcopy(stock), config)


@functools.cache
def reference(family, mode):
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        return gradients(build(family), **make_batch(mode))


def tokens_or_reason(model):
    """Tokens of rows and of their tree in the last call; or why rows were computed."""
    [note] = [note for note in streambp.describe(model).notes if note.startswith("rows: ")]
    match = re.fullmatch(
        r".*rows of (\d+) tokens(?: and \d+ of padding)? were computed as (\d+)", note
    )
    return (
        tuple(map(int, match.groups())) if match else note.removeprefix("rows: computed as given: ")
    )


def check(model, family, mode, **batch):
    expected_loss, expected = reference(family, mode)
    loss, our_gradients = gradients(model, **(batch or make_batch(mode)))
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    if mode == "nothing shared":
        assert "saves too little" in tokens_or_reason(model)
    else:
        assert tokens_or_reason(model) == counted(make_batch(mode))


def cases():
    """Fast: every other mode of each family and all of two, with one of the chunk sizes."""
    for f, family in enumerate(FAMILIES):
        for m, mode in enumerate(MODES):
            for number, size in enumerate((3, 7, 1000)):
                if family == "gemma3n_text" and mode in ("padded", "two prompts"):
                    continue  # unpatched its gradients are NaN where padding is on the left
                fast = number == (f + m) % 3 and (
                    (f + m) % 2 == 0 or family in ("gemma3", "gpt_oss")
                )
                yield pytest.param(family, mode, size, marks=() if fast else pytest.mark.full)


@pytest.mark.fast(9)
@pytest.mark.parametrize(("family", "mode", "chunk_size"), cases())
def test_gradients_are_exact(family, mode, chunk_size):
    check(sharing(build(family), chunk_size), family, mode)


@pytest.mark.fast("0-llama", "1-gemma3")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("over", [0, 1])
def test_chunks_that_end_on_the_last_token_or_before_it(family, over):
    _, tokens = counted(make_batch("plain"))
    sizes = [size for size in range(3, tokens) if tokens % size == over]
    for size in sizes[:2]:
        check(sharing(build(family), size), family, "plain")


SETTINGS = {
    "saves": {"saves": ("attn_out", "kv", "self_attn.*")},
    "attn_out": {"saves": ("attn_out",)},
    "offloaded": {"offload": "cpu", "saves": ("attn_out", "kv")},
    "tiles": {"offload": "cpu", "gpu_memory": "8KB"},
    "math": {"attention": "math"},
    "head": {"head": False},
}


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "mode", "setting"),
    [
        pytest.param(
            family, mode, setting, marks=() if (f + s) % 3 == 0 and m == s % 2 else pytest.mark.full
        )
        for f, family in enumerate(("qwen3", "gemma3", "gpt_oss"))
        for m, mode in enumerate(("padded", "two prompts"))
        for s, setting in enumerate(SETTINGS)
    ],
)
def test_settings(family, mode, setting):
    check(sharing(build(family), **SETTINGS[setting]), family, mode)


def policy_loss(model, batch, **kwargs):
    """What a program makes of logits, with a weight of its own for each row."""
    model.zero_grad(set_to_none=True)
    logits = model(
        input_ids=batch["input_ids"], attention_mask=real(batch), use_cache=False, **kwargs
    ).logits
    log_probs = torch.log_softmax(logits[:, PROMPT - 1 : -1], -1)
    scored = log_probs.gather(-1, batch["input_ids"][:, PROMPT:, None])[..., 0]
    weights = torch.linspace(-1, 2, len(scored))[:, None] * real(batch)[:, PROMPT:]
    loss = (scored.exp() * weights).sum()
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.fast(3)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", ["plain", "padded", "deep"])
def test_a_loss_of_logits_with_a_weight_for_each_row(mode, lazy):
    stock, batch = build("qwen3"), make_batch(mode)
    ours = sharing(stock, lazy_logits=lazy)
    (expected_loss, expected), (loss, our_gradients) = (
        policy_loss(model, batch) for model in (stock, ours)
    )
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert tokens_or_reason(ours) == counted(batch)


def test_a_batch_without_a_label():
    """The loss is 0, and so are the gradients, as without sharing."""
    ours, batch = sharing(build("llama")), make_batch("padded")
    loss, our_gradients = gradients(
        ours, **{**batch, "labels": torch.full_like(batch["labels"], -100)}
    )
    assert tokens_or_reason(ours) == counted(batch)
    assert loss == 0
    assert our_gradients.keys() == reference("llama", "padded")[1].keys()
    assert not any(gradient.any() for gradient in our_gradients.values())


@pytest.mark.parametrize("lazy", [False, True])
def test_logits_of_the_last_tokens(lazy):
    stock, batch = build("qwen3"), make_batch("deep")
    ours, last_tokens = sharing(stock, lazy_logits=lazy), batch["input_ids"].shape[1] - PROMPT + 1
    arguments = {
        "input_ids": batch["input_ids"],
        "attention_mask": real(batch),
        "logits_to_keep": last_tokens,
        "use_cache": False,
    }
    is_token, both_gradients = real(batch)[:, -last_tokens:, None] > 0, []
    for model in (stock, ours):
        model.zero_grad(set_to_none=True)
        logits = model(**arguments).logits
        assert logits.shape[1] == last_tokens
        (torch.log_softmax(logits, -1) ** 2 * is_token).sum().backward()
        both_gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert worst_error(both_gradients[1], both_gradients[0]) <= MAX_FLOAT64_ERROR
    assert tokens_or_reason(ours) == counted(batch)


def test_log_probs_of_labels():
    stock, batch = build("qwen3"), make_batch("deep")
    ours = sharing(stock)
    log_probs = ours(**batch, use_cache=False, output_log_probs=True).log_probs
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    (log_probs.exp() * weights).sum().backward()
    logits = stock(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    labels = batch["labels"][:, 1:]
    expected = torch.log_softmax(logits[:, :-1], -1).gather(-1, labels.clamp(min=0)[..., None])[
        ..., 0
    ] * (labels >= 0)
    (expected.exp() * weights * (labels >= 0)).sum().backward()
    torch.testing.assert_close(log_probs, expected, rtol=1e-12, atol=1e-12)
    our_gradients, stock_gradients = (
        {name: p.grad for name, p in model.named_parameters()} for model in (ours, stock)
    )
    assert worst_error(our_gradients, stock_gradients) <= MAX_FLOAT64_ERROR
    assert tokens_or_reason(ours) == counted(batch)


@pytest.mark.parametrize("grad", [False, True])
def test_outputs_are_those_of_rows(grad):
    """Logits, every layer's hidden states and router logits, with a graph and without."""
    stock, batch = build("qwen3_moe"), make_batch("padded")
    ours = sharing(stock)
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.set_grad_enabled(grad):
        expected, output = (
            m(**arguments, output_hidden_states=True, use_cache=False) for m in (stock, ours)
        )
    is_token = batch["attention_mask"] > 0
    assert len(output.hidden_states) == len(expected.hidden_states)
    pairs = [
        *zip(output.hidden_states, expected.hidden_states, strict=True),
        (output.logits, expected.logits),
    ]
    for value, expected_value in pairs:
        assert value.shape == expected_value.shape
        torch.testing.assert_close(
            value[is_token], expected_value[is_token], rtol=1e-12, atol=1e-12
        )
    for value, expected_value in zip(output.router_logits, expected.router_logits, strict=True):
        assert value.shape == expected_value.shape
        torch.testing.assert_close(
            value[is_token.flatten()], expected_value[is_token.flatten()], rtol=1e-12, atol=1e-12
        )
    assert tokens_or_reason(ours) == counted(batch)


def test_rows_with_other_padding_share_where_positions_say_so():
    batch = make_batch("plain")
    ids, mask = batch["input_ids"].clone(), torch.ones_like(batch["input_ids"])
    ids[1], labels = ids[1].roll(5), batch["labels"]
    ids[1, :5], mask[1, :5] = 0, 0
    ids[1, 5 : 5 + PROMPT] = ids[0, :PROMPT]
    labels[1, : 5 + PROMPT] = -100
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": positions}
    stock = build("mistral")
    ours = sharing(stock)
    assert (
        worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= MAX_FLOAT64_ERROR
    )
    rows, tree = tokens_or_reason(ours)
    assert rows - tree == 3 * PROMPT


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_embeddings_that_look_at_the_longest_row(rope):
    """Padding alone has the batch's highest position, which is beyond what the model was trained
    for."""
    batch = make_batch("plain")
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -3:] = 0
    batch = {
        **batch,
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }
    length = mask.shape[1]
    scaling = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    if rope == "longrope":
        scaling.update(
            short_factor=[1.0] * 4,
            long_factor=[3.0] * 4,
            original_max_position_embeddings=length - 1,
        )
    stock = families.build(
        "llama", torch.float64, rope_parameters=scaling, max_position_embeddings=length - 1
    )
    ours = sharing(stock)
    assert (
        worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= MAX_FLOAT64_ERROR
    )
    assert isinstance(tokens_or_reason(ours), tuple)


def rows_instead(stock, batch, expected=None, **settings):
    """The step is exact, and why rows were computed."""
    ours = sharing(stock, **settings)
    assert (
        worst_error(gradients(ours, **batch)[1], expected or gradients(stock, **batch)[1])
        <= MAX_FLOAT64_ERROR
    )
    return tokens_or_reason(ours)


@pytest.mark.parametrize(
    ("family", "mode", "why"),
    [
        ("bloom", "plain", "takes no position_ids|attends by itself"),
        ("llama4_text", "plain", "asks its cache for positions"),
        pytest.param(
            "deepseek_v32", "plain", "picks the keys that its queries read", marks=needs_indexers
        ),
        ("opt", "padded", "gave something else than rows"),
    ],
)
def test_models_that_compute_rows(family, mode, why):
    assert re.search(why, rows_instead(zoo.build(family), make_batch(mode)))


def test_opt_shares_without_padding():
    """It makes positions of its mask, which a row without padding has no use for."""
    stock = zoo.build("opt")
    ours = sharing(stock)
    batch = make_batch("plain")
    assert (
        worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= MAX_FLOAT64_ERROR
    )
    assert tokens_or_reason(ours) == counted(batch)


def changed_call(change):
    batch = make_batch("plain")
    ids = batch["input_ids"]
    length = ids.shape[1]
    if change == "embeddings":
        batch["inputs_embeds"] = torch.randn(*ids.shape, 32, generator=seeded(3))
        del batch["input_ids"]
    elif change == "4-D mask":
        batch["attention_mask"] = torch.ones(4, 1, length, length, dtype=torch.bool).tril()
    elif change == "documents":
        batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(length - 9)]).repeat(4, 1)
    elif change == "a hole":
        batch["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.tensor([3]), 0)
    elif change == "one row":
        batch = {name: value[:1] for name, value in batch.items()}
    elif change == "a label after padding":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, :2] = 0
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
    elif change == "an unknown argument":
        batch["mm_token_type_ids"] = torch.zeros_like(ids)
    return batch


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("embeddings", "inputs_embeds"),
        ("4-D mask", "not [B, T]"),
        ("documents", "do not grow by one"),
        ("a hole", "leaves out tokens"),
        ("one row", "one row"),
        ("a label after padding", "predicts a label"),
        ("an unknown argument", "mm_token_type_ids"),
    ],
)
def test_calls_that_compute_rows(change, why):
    assert why in rows_instead(build("qwen3"), changed_call(change))


def test_layers_that_mix_tokens_compute_rows(monkeypatch, trusted):
    stock = build("llama")
    families.mix_neighbours(monkeypatch, stock)
    assert "does not run in chunks" in rows_instead(stock, make_batch("plain"))


def test_a_model_that_mixes_tokens_outside_of_its_layers_computes_rows(trusted):
    stock = build("llama")

    def mix(_, __, output):
        return output + 0.5 * output.roll(1, 1)

    stock.model.embed_tokens.register_forward_hook(mix)
    assert "gave something else than rows" in rows_instead(stock, make_batch("plain"))


def test_noise_that_depends_on_the_length_of_rows():
    """As Trainer adds it (NEFTune). In eval mode, where a trial is made, there is none."""
    ours, batch = sharing(build("llama")), make_batch("plain")
    embeddings = ours.model.embed_tokens
    embeddings.neftune_noise_alpha = 5.0
    ours(**batch)
    assert "NEFTune" in tokens_or_reason(ours)
    del embeddings.neftune_noise_alpha
    ours(**batch)
    assert tokens_or_reason(ours) == counted(batch)


@pytest.mark.fast("qwen3-dtype1", "qwen3_moe-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_half_precision_shares(family, dtype):
    ours, batch = sharing(build(family).to(dtype)), make_batch("padded")
    loss, _ = gradients(ours, **batch)
    assert tokens_or_reason(ours) == counted(batch)
    expected, _ = reference(family, "padded")
    assert float(loss) == pytest.approx(float(expected), rel=0.02)


def test_autocast_shares():
    ours, batch = sharing(families.build("qwen3")), make_batch("padded")
    with torch.autocast("cpu", torch.bfloat16):
        gradients(ours, **batch)
    assert tokens_or_reason(ours) == counted(batch)


def test_adapters_of_each_row_compute_rows():
    """Rows of the same tokens may have other adapters: a list of names for the rows, which no
    packed row has."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(
        build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.add_adapter(
        "other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    ids = make_batch("plain")["input_ids"]
    names = ["default", "other", "default", "other"]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, adapter_names=names, use_cache=False).logits
        streambp.patch(model, streambp.StreamConfig(chunk_size=7, rows="packed"))
        model(input_ids=ids, use_cache=False)
        assert isinstance(tokens_or_reason(model), tuple)
        logits = model(input_ids=ids, adapter_names=names, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert isinstance(tokens_or_reason(model), str)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_layer_that_begins_to_mix_tokens_later(offload, trusted):
    """What the trial found does not hold any more: the layer does not run in chunks, and its
    forward begins again."""
    stock, batch = build("llama"), make_batch("plain")
    ours = sharing(stock, offload=offload)
    gradients(ours, **batch)
    assert tokens_or_reason(ours) == counted(batch)
    for model in (stock, ours):
        model.model.layers[1].mlp.register_forward_pre_hook(
            lambda _, args: (args[0] + args[0].roll(1, 1),)
        )
    expected = gradients(stock, **batch)[1]
    for _ in range(3):
        assert worst_error(gradients(ours, **batch)[1], expected) <= MAX_FLOAT64_ERROR
        assert "does not run in chunks" in tokens_or_reason(ours)


def test_one_rank_among_several_does_not_begin_again(monkeypatch, trusted):
    ours, batch = sharing(build("llama")), make_batch("plain")
    gradients(ours, **batch)
    ours.model.layers[1].mlp.register_forward_pre_hook(
        lambda _, args: (args[0] + args[0].roll(1, 1),)
    )
    monkeypatch.setattr(calls, "ranks_must_agree", lambda module: True)
    monkeypatch.setattr(calls, "gather_numbers", lambda module, mine, device: [mine, mine])
    with pytest.raises(StreamBPError, match="other ranks wait"):
        ours(**batch)


@pytest.mark.parametrize("ranks_agree", [True, False])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyError("rope")])
def test_a_trial_that_fails_in_a_layer_goes_on(error, ranks_agree, monkeypatch):
    """To the end of both forwards, in which other ranks wait; memory that is missing for one rank
    alone is no verdict, and its rows are computed."""
    stock, batch, entered = build("llama"), make_batch("plain"), []
    count = itertools.count(1)  # a list would be put back after the trial
    ours, call = sharing(stock), wrappers.LayerForward._call
    expected = gradients(stock, **batch)[1]

    def in_layer(layer, args, kwargs):
        if layer.layer_state.index == 0 and layer.state.running.failed is not None:
            entered.append(1)
            raise error
        return call(layer, args, kwargs)

    monkeypatch.setattr(wrappers.LayerForward, "_call", in_layer)
    monkeypatch.setattr(calls, "ranks_must_agree", lambda module: ranks_agree)
    monkeypatch.setattr(calls, "gather_numbers", lambda module, mine, device: [mine, mine])
    monkeypatch.setattr(
        third_party, "HOOKS_ARE_HARMLESS", (*third_party.HOOKS_ARE_HARMLESS, "tests")
    )
    for layer in ours.model.layers:
        layer.register_forward_hook(
            lambda *_: None if torch.is_grad_enabled() else next(count) and None
        )
    assert worst_error(gradients(ours, **batch)[1], expected) <= MAX_FLOAT64_ERROR
    assert tokens_or_reason(ours).startswith(
        f"a trial on a few random tokens failed ({type(error).__name__}: "
    )
    assert next(count) - 1 == 2 * len(ours.model.layers)  # of each
    assert entered == [1]
    ours(**batch)
    assert len(entered) == (1 if isinstance(error, KeyError) or ranks_agree else 2)


def test_a_rank_without_memory_around_layers_ends_its_forward(monkeypatch):
    """As it would unpatched: rows would begin a forward while other ranks are in the middle of
    another."""
    ours, batch = sharing(build("llama")), make_batch("plain")
    monkeypatch.setattr(calls, "ranks_must_agree", lambda module: True)
    monkeypatch.setattr(calls, "gather_numbers", lambda module, mine, device: [mine, mine])

    def without_memory(module, args):
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(
        third_party, "HOOKS_ARE_HARMLESS", (*third_party.HOOKS_ARE_HARMLESS, "tests")
    )
    ours.model.norm.register_forward_pre_hook(without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        ours(**batch)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_with_one_row_makes_the_trials_of_the_others(ranks, monkeypatch):
    """Under ZeRO-3 a trial gathers weights, which takes all ranks; the others may have more
    rows."""
    ours, batch = (
        sharing(build("llama")),
        {name: value[:1] for name, value in make_batch("plain").items()},
    )
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    trials = []
    real_try = admission.PackedRowTrials._try
    monkeypatch.setattr(
        admission.PackedRowTrials, "_try", lambda *args: trials.append(1) or real_try(*args)
    )
    monkeypatch.setattr(calls, "ranks_must_agree", lambda module: ranks > 1)
    monkeypatch.setattr(calls, "gather_numbers", lambda module, mine, device: [mine, [mine[0], 1]])
    for _ in range(2):
        ours(**batch)
        assert "saves too little" in tokens_or_reason(ours)
    # without padding and with it, as often as another rank wants to
    assert len(trials) == (4 if ranks > 1 else 0)


@pytest.mark.parametrize("other_rank", ["alike", "of another kind", "does not share"])
def test_ranks_try_a_kind_of_call_together_or_not_at_all(other_rank, monkeypatch):
    """Under ZeRO-3 and FSDP2 a trial's forwards gather weights, which takes all ranks. [Note: what
    a rank decides alone]"""
    ours, batch, trials = sharing(build("llama")), make_batch("plain"), []
    real_try = admission.PackedRowTrials._try
    monkeypatch.setattr(
        admission.PackedRowTrials, "_try", lambda *args: trials.append(1) or real_try(*args)
    )
    monkeypatch.setattr(calls, "ranks_must_agree", lambda module: True)

    def everyones_numbers(module, mine, device):
        return [
            mine,
            {"alike": mine, "of another kind": [mine[0] + 1, 1], "does not share": [0, 0]}[
                other_rank
            ],
        ]

    monkeypatch.setattr(calls, "gather_numbers", everyones_numbers)
    for _ in range(2):
        ours(**batch)
        assert len(trials) == (1 if other_rank == "alike" else 0)
        assert (tokens_or_reason(ours) == counted(batch)) == (other_rank == "alike")
    monkeypatch.setattr(calls, "gather_numbers", lambda module, mine, device: [mine, [mine[0], 1]])
    ours(**batch)  # what all know but one is tried again by all
    assert len(trials) == (2 if other_rank == "alike" else 1)
    assert tokens_or_reason(ours) == counted(batch)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_with_nothing_shared_the_step_is_that_of_rows(family):
    """To the bit; random ids begin with the same token now and then."""
    stock = families.build(family)
    generator = seeded(5)
    ids = torch.randint(3, 6, (4, 40), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    plain = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7))
    expected, our_gradients = (
        gradients(plain, **batch)[1],
        gradients(ours := sharing(stock), **batch)[1],
    )
    assert all(torch.equal(our_gradients[name], expected[name]) for name in expected)
    assert "saves too little" in tokens_or_reason(ours)


def test_gradients_at_padding_are_refused():
    ours, batch = sharing(build("llama")), make_batch("padded")
    logits = ours(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    with pytest.raises(BackwardError, match="arrives at padding"):
        logits.square().sum().backward()


def test_overflow_is_left_to_the_program():
    """A scaler skips the step by the infinite gradients that it finds."""
    ours, batch = sharing(build("llama")), make_batch("padded")
    logits = ours(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    (logits * torch.nan).sum().backward()
    assert not ours.model.layers[0].mlp.up_proj.weight.grad.isfinite().all()


def test_one_trial_for_each_kind_of_call(monkeypatch):
    ours, batch = sharing(build("llama")), make_batch("padded")
    trials = []
    real_try = admission.PackedRowTrials._try
    monkeypatch.setattr(
        admission.PackedRowTrials, "_try", lambda *args: trials.append(1) or real_try(*args)
    )
    modes = [module.training for module in ours.modules()]
    for _ in range(2):
        gradients(ours, **batch)
    assert len(trials) == 2  # without padding and with it
    assert modes == [module.training for module in ours.modules()]
    gradients(ours, **make_batch("plain"))  # it has no mask
    assert len(trials) == 3


def linear_flops(model, ids):
    """Of a step of the layers, forward and backward."""
    with LinearFlops() as counted_flops:
        model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    return counted_flops.total


def test_flops_of_linears_are_those_of_the_tree():
    batch = make_batch("plain", prompt=96, completion=12)
    stock = families.build("llama", torch.float64)
    tokens, tree = counted(batch)
    flops = []
    for rows in ("packed", "as_given"):
        ours = streambp.patch(
            copy.deepcopy(stock), streambp.StreamConfig(chunk_size=200, rows=rows)
        )
        gradients(ours, **batch)
        linear_flops(ours, batch["input_ids"])  # trials of the call without labels
        flops.append(linear_flops(ours, batch["input_ids"]))
    assert flops[0] / flops[1] == pytest.approx(tree / tokens, rel=0.02)


def test_sums_at_branches_are_wide():
    """300 rows share a token; in bfloat16 a sum of so many ones would stop at 256."""
    ids = torch.arange(MIN_SHARED_TOKENS).repeat(300, 1)
    tree = find_tree(ids)
    x = torch.zeros(1, tree.length, 2, dtype=torch.bfloat16, requires_grad=True)
    row_outputs.spread_output(x, tree).sum().backward()
    assert x.grad.unique().tolist() == [300.0]
    take_rows(x[0], tree.token_positions(x.device)).sum().backward()
    assert x.grad.unique().tolist() == [600.0]


class Widths(TorchDispatchMode):
    """The most rows of any tensor [..., h] that was made."""

    def __init__(self, width):
        super().__init__()
        self.width, self.max_rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dim() in (2, 3) and x.shape[-1] == self.width:
                self.max_rows = max(self.max_rows, x.numel() // self.width)
        return result


def most_rows(loss_of):
    """Of a step of a model whose vocabulary and inner layers are smaller than its hidden states."""
    batch = make_batch("padded", prompt=96, completion=12)
    ours = sharing(families.build("llama", torch.float64, vocab_size=VOCABULARY), lazy_logits=True)
    loss_of(ours, batch).backward()
    with Widths(32) as widths:
        loss_of(ours, batch).backward()
    return widths.max_rows, counted(batch)[1], batch["input_ids"].numel()


def labelled(model, batch):
    return model(**batch, use_cache=False).loss


def lazy(model, batch):
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask")}
    log_probs = torch.log_softmax(model(**arguments, use_cache=False).logits[:, :-1], -1)
    scored = log_probs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (scored * (batch["labels"][:, 1:] > 0)).sum()


@pytest.mark.parametrize("loss_of", [labelled, lazy])
def test_hidden_states_are_never_those_of_all_rows(loss_of):
    """The head reads them in the packed row: one where rows part once for each label, and one that
    stands for padding."""
    max_rows, tree, rows = most_rows(loss_of)
    assert VOCABULARY < max_rows <= tree + 12 < rows / 2


@pytest.mark.parametrize("arguments", [{}, {"output_log_probs": True}])
def test_labelled_tokens_that_rows_share_are_scored_once(arguments):
    batch = make_batch("equal", completion=40)  # 4 rows
    ours = sharing(build("llama"))
    ours(**batch, use_cache=False, **arguments).loss.backward()
    with Widths(VOCABULARY) as widths:  # of logits
        ours(**batch, use_cache=False, **arguments).loss.backward()
    assert widths.max_rows == 40


@pytest.mark.full
def test_a_head_that_reads_rows_is_found(monkeypatch):
    def mutant(x, tree):
        return row_outputs.LazyHidden.make(
            row_outputs.spread_output(x.source, tree), x.recipe, x.dtype
        )

    monkeypatch.setattr(row_outputs, "_copy_lazy_rows", mutant)
    max_rows, _, rows = most_rows(labelled)
    assert max_rows >= rows


def half_sums(ctx, grad):
    total = grad.new_zeros(ctx.tree.length, *grad.shape[2:])
    for row, columns, positions in row_outputs._row_pieces(ctx.tree):
        total[positions] += grad[row, columns]
    return total, None


def packed_positions(monkeypatch):
    real_packed = calls.pack_arguments

    def mutant(kwargs, tree):
        arguments = real_packed(kwargs, tree)
        return {**arguments, "position_ids": torch.arange(arguments["input_ids"].shape[1])[None]}

    monkeypatch.setattr(calls, "pack_arguments", mutant)
    check(sharing(build("llama")), "llama", "plain")


def no_shift(monkeypatch):
    real_pieces = PrefixTree._shared_runs_within
    monkeypatch.setattr(
        PrefixTree,
        "_shared_runs_within",
        lambda self, w: (QueryRun(r.q0, r.q1, r.k0, r.k1) for r in real_pieces(self, w)),
    )
    check(sharing(build("mistral")), "mistral", "deep")


def a_sibling(monkeypatch):
    real_pieces = PrefixTree._shared_runs
    monkeypatch.setattr(
        PrefixTree,
        "_shared_runs",
        lambda self: (QueryRun(r.q0, r.q1, r.k0, min(r.k1 + 1, r.q0)) for r in real_pieces(self)),
    )
    check(sharing(build("llama")), "llama", "deep")


def sums_in_half_precision(monkeypatch):
    monkeypatch.setattr(row_outputs.TokenCopies, "backward", staticmethod(half_sums))
    test_sums_at_branches_are_wide()


def any_prefix_shares(monkeypatch):
    monkeypatch.setattr(
        calls, "find_tree", functools.partial(find_tree, min_prefix=1, min_savings=0.0)
    )
    test_with_nothing_shared_the_step_is_that_of_rows("llama")


@pytest.mark.parametrize(
    "mutant", [packed_positions, no_shift, a_sibling, sums_in_half_precision, any_prefix_shares]
)
def test_mutants_are_found(mutant, monkeypatch):
    with pytest.raises(AssertionError):
        mutant(monkeypatch)


@pytest.mark.fast(4)
@pytest.mark.parametrize("module", [Reassigned, Running, Calibrated, Noisy])
def test_a_trial_leaves_no_trace(module, trusted):
    """Of modules that count, set and draw in eval mode, too; a layer with one runs whole, over
    rows."""
    stock, ours = build("llama"), build("llama")
    for model in (stock, ours):
        model.model.layers[0].mlp = module(model.model.layers[0].mlp)
    streambp.patch(ours, streambp.StreamConfig(chunk_size=7, rows="packed"))
    (_, expected), (_, our_gradients) = (
        gradients(model, **make_batch("plain")) for model in (stock, ours)
    )
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert isinstance(tokens_or_reason(ours), str)
    assert all(map(torch.equal, stock.buffers(), ours.buffers()))


@pytest.mark.skipif(SHARES_PREFIXES, reason="STREAMBP_TEST_ROWS changes the default")
def test_the_default_is_silent_where_there_is_nothing_to_pack():
    ours = streambp.patch(build("llama"))
    batch = make_batch("nothing shared")
    for rows in (4, 1):
        gradients(ours, **{name: x[:rows] for name, x in batch.items()})
        assert not any(note.startswith("rows: ") for note in streambp.describe(ours).notes)
