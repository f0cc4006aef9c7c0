"""Training as people do it: adapters, frozen parts, mixed precision, dropout, Trainer; evaluation
and generation.

covers: model/patching.py
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

import streambp
from streambp.lazy.dispatch import LazyLogits
from streambp.model.installed_patch import streamed_head
from tests.families import VOCABULARY, build, make_batch
from tests.oracle import assert_as_precise, gradients, relative_l2, worst_error
from tests.seeds import seed_of, seed_torch, seeded

CONFIG = streambp.StreamConfig(chunk_size=5)


def compare(stock, config=CONFIG, mode="plain", bar=1e-10, **batch):
    ours = streambp.patch(copy.deepcopy(stock), config)
    batch = {**make_batch(mode), **batch}
    expected, grads = gradients(stock, **batch)[1], gradients(ours, **batch)[1]
    assert worst_error(grads, expected) <= bar
    return grads


@pytest.mark.fast(4)
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("saves", [(), ("attn_out", "kv")])
def test_lora(patch_first, saves, float64_oracle):
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    models = []
    for streamed in (False, True):
        model = build("qwen3", torch.float64)
        config = streambp.StreamConfig(chunk_size=5, saves=saves)
        if streamed and patch_first:
            streambp.patch(model, config)
        seed_torch(3)
        model = peft.get_peft_model(model, lora).to(torch.float64).train()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p)
        if streamed and not patch_first:
            streambp.patch(model, config)
        models.append(model)
    batch = make_batch("right-padded")
    (_, expected), (_, grads) = (gradients(m, **batch) for m in models)
    assert expected
    assert all("lora" in name for name in grads)
    assert worst_error(grads, expected) <= 1e-10


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "frozen",
    [
        ("embed_tokens",),
        ("embed_tokens", "layers.0"),
        ("layers.1",),
        ("up_proj", "q_norm"),
        ("layers",),
        ("lm_head",),
        ("norm",),
    ],
    ids="+".join,
)
def test_frozen_parts(frozen, float64_oracle):
    stock = build("qwen3", torch.float64, num_hidden_layers=3)
    for name, p in stock.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))
    grads = compare(stock)
    assert not any(part in name for part in frozen for name in grads)


def test_input_embeddings_get_their_gradient(float64_oracle):
    stock = build("qwen3", torch.float64).requires_grad_(False)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = make_batch("plain")
    results = []
    for model in (stock, ours):
        x = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        model(inputs_embeds=x, labels=batch["labels"], use_cache=False).loss.backward()
        results.append(x.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_dropout_by_finite_differences(family, float64_oracle):
    """With the same seed the streamed loss is a fixed function; its slope along a direction is the
    gradient's."""
    overrides = {"attention_dropout": 0.3, **({"resid_pdrop": 0.2} if family == "phi3" else {})}
    model = streambp.patch(build(family, torch.float64, **overrides), CONFIG)
    batch = make_batch("left-padded")

    def loss():
        seed_torch(7)
        return model(**batch, use_cache=False).loss

    value = loss()
    value.backward()
    seed_torch(11)
    direction = [torch.randn_like(p) for p in model.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), direction, strict=True))
    step, ends = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=sign * step)
            ends.append(loss())
            for p, d in zip(model.parameters(), direction, strict=True):
                p.sub_(d, alpha=sign * step)
    assert abs((ends[0] - ends[1]) / (2 * step) - slope) <= 1e-6 * abs(slope)
    assert not torch.equal(value, model.eval()(**batch, use_cache=False).loss)


def test_backward_leaves_the_random_stream_alone():
    model = streambp.patch(build("phi3", resid_pdrop=0.2, attention_dropout=0.1), CONFIG)
    loss = model(**make_batch("plain"), use_cache=False).loss
    state_before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(state_before, torch.get_rng_state())


@pytest.mark.full
@pytest.mark.parametrize(
    "saves",
    [(), *(pytest.param(saves, marks=pytest.mark.full) for saves in (("attn_out",), ("kv",)))],
)
def test_autocast_is_as_precise_as_the_unpatched_model(saves):
    assert_as_precise(autocast_errors(saves))


def autocast_errors(saves):
    for seed in itertools.count():
        model = build("qwen3", seed=seed, hidden_size=64)
        batch = make_batch("plain", length=96, seed=seed)
        _, truth = gradients(model, **batch)

        def step(model, batch=batch):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch, use_cache=False).loss
            loss.backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters()}
            model.zero_grad()
            return grads

        stock = step(model)
        ours = step(streambp.patch(model, streambp.StreamConfig(chunk_size=11, saves=saves)))
        yield relative_l2(ours, truth), relative_l2(stock, truth)


@pytest.mark.parametrize(
    "settings",
    [{}, {"saves": ("attn_out", "kv", "*")}, {"head": False}, {"lazy_logits": True}],
    ids=str,
)
def test_autocast_leaves_float64_alone(settings, float64_oracle):
    """As torch's own operations do, so that such a model is exact under it."""
    with torch.autocast("cpu", torch.bfloat16):
        compare(build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5, **settings))


def test_autocast_covers_the_recomputation():
    model = streambp.patch(build("qwen3"), CONFIG)
    dtypes = set()  # a list would have an entry for each chunk, and the layer would run whole
    for name, module in model.model.layers[0].named_modules():
        if name.endswith("up_proj"):
            module.register_forward_hook(lambda m, args, out: dtypes.add(out.dtype))
    for _ in range(2):  # the first step tries the layers
        dtypes.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**make_batch("plain"), use_cache=False).loss
        loss.backward()
        assert dtypes == {torch.bfloat16}
    assert streambp.describe(model).layers[0].path == "streams"


@pytest.mark.full
def test_fp16_with_a_gradient_scaler():
    """Weights in float32 under autocast: without the scaler's factor the head's products underflow
    in float16."""
    assert_as_precise(map(scaled_errors, itertools.count()))


def scaled_errors(seed):
    model = build("qwen3", seed=seed, vocab_size=4096)
    ids = torch.randint(3, 4096, (2, 96), generator=seeded(seed))
    batch = {"input_ids": ids, "labels": ids}
    _, truth = gradients(model, **batch)
    runs = []
    for patched in (False, True):
        if patched:
            streambp.patch(model, streambp.StreamConfig(chunk_size=37))
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch, use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        runs.append({n: p.grad.clone() for n, p in model.named_parameters()})
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 65536.0
        model.zero_grad()
    return relative_l2(runs[1], truth), relative_l2(runs[0], truth)


@pytest.mark.sees_padding("logits of padding are compared")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("labels", [True, False])
def test_no_grad_streams(training, labels, attended_chunks, float64_oracle):
    stock = build("gemma3", torch.float64).train(training)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = make_batch("left-padded")
    if not labels:
        del batch["labels"]
    with torch.no_grad():
        expected, output = stock(**batch, use_cache=False), ours(**batch, use_cache=False)
    assert 5 in attended_chunks
    assert 23 not in attended_chunks
    if labels:
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-12, atol=0)
    logits = torch.as_tensor(output.logits.numpy())
    torch.testing.assert_close(logits, expected.logits, rtol=1e-10, atol=1e-10)


@pytest.mark.full
def test_accelerates_mixed_precision_around_the_model(tmp_path):
    """It binds wrappers of its own to the model: copies run their own weights, it can be unwrapped,
    unpatched, patched."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    import transformers

    model = streambp.patch(build("qwen3"), CONFIG)
    batch = make_batch("plain")
    rows = [{"input_ids": [5] * 8, "labels": [5] * 8}] * 4
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, bf16=True, use_cpu=True, report_to=[], save_strategy="no"
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert model.forward is not streamed_head(model)
    assert "blockwise" in streambp.describe(model).head
    model.eval()
    for unwrapped in (False, True):
        if unwrapped:
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        expected = model(**batch).loss
        blank = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in blank.parameters():
                parameter.zero_()
        assert blank(**batch).loss.item() == pytest.approx(math.log(VOCABULARY))
        twin = streambp.patch(copy.deepcopy(model), streambp.StreamConfig(chunk_size=3))
        torch.testing.assert_close(twin(**batch).loss, expected, rtol=1e-3, atol=0)
        assert type(twin(**batch).logits) is LazyLogits
        bare = streambp.unpatch(copy.deepcopy(model))
        torch.testing.assert_close(bare(**batch, use_cache=False).loss, expected, rtol=1e-3, atol=0)
        assert bare(**batch, use_cache=False).logits is not None


def test_eval_logits():
    stock = build("gemma3").eval()
    ours = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, eval_logits=True)
    )
    batch = make_batch("plain")
    with torch.no_grad():
        expected, output = stock(**batch, use_cache=False), ours(**batch, use_cache=False)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss)


def test_generation_is_as_unpatched(attended_chunks):
    stock = build("qwen3").eval()
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    prompt = make_batch("plain", length=11)["input_ids"]
    expected = stock.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert torch.equal(ours.train().generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert not attended_chunks
    assert ours(prompt, use_cache=True).past_key_values.get_seq_length() == 11
    with torch.no_grad():
        assert ours(prompt, labels=prompt, use_cache=True).past_key_values is not None
    assert ours.eval()(prompt, use_cache=True).past_key_values is not None


@pytest.mark.full
@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.full), True])
def test_continuous_batching_is_as_unpatched(training, attended_chunks):
    """A paged cache is a cache; TRL's GRPO generates with it."""
    stock = build("qwen3").eval()
    ours = streambp.patch(copy.deepcopy(stock), CONFIG).train(training)
    prompts = [
        row[:count].tolist()
        for row, count in zip(make_batch("plain", rows=3)["input_ids"], (11, 4, 7), strict=True)
    ]
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=64)
    expected, sequences = (
        [
            answer.generated_tokens
            for answer in model.generate_batch(prompts, settings, sizes).values()
        ]
        for model in (stock, ours)
    )
    assert sequences == expected
    assert [len(tokens) for tokens in sequences] == [6, 6, 6]
    assert not attended_chunks
    assert ours.config._attn_implementation == stock.config._attn_implementation


@pytest.mark.parametrize("use_cache", [None, True, False])
def test_a_cache_is_returned_in_eval_mode_as_unpatched(use_cache, attended_chunks):
    """With gradients as without, the config decides where the call does not; with labels there is
    no cache."""
    stock = build("qwen3", torch.float64).eval()
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = make_batch("plain")
    options = {} if use_cache is None else {"use_cache": use_cache}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            expected, output = (model(batch["input_ids"], **options) for model in (stock, ours))
        assert (
            (output.past_key_values is None)
            == (expected.past_key_values is None)
            == (use_cache is False)
        )
        torch.testing.assert_close(output.logits, expected.logits)
    assert bool(attended_chunks) == (use_cache is False)
    assert ("pass use_cache=False" in str(streambp.describe(ours))) == (use_cache is None)
    if use_cache is None:
        following = batch["input_ids"][:, :1]
        torch.testing.assert_close(
            ours(following, past_key_values=output.past_key_values).logits,
            stock(following, past_key_values=expected.past_key_values).logits,
        )
        assert ours(**batch).past_key_values is None
        assert attended_chunks
        ours.config.use_cache = False
        assert ours(batch["input_ids"]).past_key_values is None


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        ids = torch.randint(3, VOCABULARY, (17,), generator=seeded(index))
        return {"input_ids": ids, "labels": ids}


def train(model, folder, resume=None, steps=6, **settings):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        save_steps=3, logging_steps=1, report_to=[], use_cpu=True, gradient_checkpointing=True, eval_strategy="steps",
        eval_steps=3, disable_tqdm=True, seed=seed_of(5), **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume)
    return [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]


def test_trainer_with_resume(tmp_path, attended_chunks):
    stock = build("qwen3")
    expected = train(copy.deepcopy(stock), tmp_path / "stock")
    assert not attended_chunks
    logs = train(streambp.patch(copy.deepcopy(stock), CONFIG), tmp_path / "ours")
    assert attended_chunks
    for a, b in zip(expected, logs, strict=True):
        for key in {"loss", "eval_loss", "grad_norm"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-3)
    model = streambp.patch(copy.deepcopy(stock), CONFIG)
    resumed = train(model, tmp_path / "ours", resume=str(tmp_path / "ours" / "checkpoint-3"))
    assert resumed[-1]["eval_loss"] == pytest.approx(logs[-1]["eval_loss"], rel=1e-4)


@pytest.mark.full
def test_trainer_with_torch_compile(tmp_path, attended_chunks):
    stock = build("qwen3")
    expected = train(copy.deepcopy(stock), tmp_path / "stock")
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    logs = train(streambp.patch(copy.deepcopy(stock), CONFIG), tmp_path / "ours", **compiled)
    assert attended_chunks
    assert logs[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-3)
