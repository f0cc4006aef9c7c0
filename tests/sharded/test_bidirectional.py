"""Layers whose attention reads ahead: encoders, decoders made bidirectional, prefixes.

covers: sharded/split_attention.py, sharded/bidirectional.py, attention/kinds.py
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CohereConfig,
    CohereModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import streambp
from streambp.admission import long_trial
from streambp.attention import mask_scan, masks
from streambp.attention.prefix import Prefix
from streambp.attention.spans import QueryRun, Spans
from streambp.layer.function import BackwardPass
from streambp.layer.recompute import NULL_CONTEXT
from streambp.sharded import bidirectional, split_attention
from streambp.sharded import layer as halves
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

LENGTH = 22  # 3 chunks of 7, and one token
CHUNK = 7
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "pad_token_id": 0,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERNBERT_SIZES = {
    **SIZES, "num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 3, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("float64_everywhere")


@pytest.fixture
def in_halves(monkeypatch):
    """The lengths of the calls that were cut at their attention."""
    lengths: list[int] = []
    run = bidirectional.run_forward_in_halves

    def noted(call, keep):
        lengths.append(call.plan.length)
        return run(call, keep)

    monkeypatch.setattr(bidirectional, "run_forward_in_halves", noted)
    return lengths


def llama():
    """As LLM2Vec makes it."""
    model = LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2, is_causal=False))
    for layer in model.layers:
        layer.self_attn.is_causal = False
    return model


def embedding_gemma():
    return Gemma3TextModel(
        Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 3},
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            use_bidirectional_attention=True,
        )
    )


MODEL_BUILDERS = {
    "llama": llama,
    "embedding_gemma": embedding_gemma,
    "modernbert": lambda: ModernBertModel(ModernBertConfig(**MODERNBERT_SIZES)),
    "modernbert_masked": lambda: ModernBertForMaskedLM(ModernBertConfig(**MODERNBERT_SIZES)),
    "bert": lambda: BertModel(BertConfig(**SIZES, **NO_DROPOUT)),
    "bert_masked": lambda: BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)),
    "roberta_classifier": lambda: RobertaForSequenceClassification(
        RobertaConfig(**SIZES, **NO_DROPOUT, max_position_embeddings=64)
    ),
}


def padding(kind):
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if kind == "right":
        mask[1, 15:] = 0
    elif kind == "left":
        mask[1, :6] = 0
    elif kind == "between":
        mask[1, 5:8] = 0
    return mask


def batch_of(kind):
    batch = {"input_ids": torch.randint(3, 60, (3, LENGTH))}
    if kind != "none":
        batch["attention_mask"] = padding(kind)
    return batch


def gradients(model, batch, weights):
    """The loss and all gradients; padding's outputs have no part in the loss."""
    model.zero_grad(set_to_none=True)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    if hasattr(model, "classifier"):
        loss = model(**batch, labels=torch.tensor([0, 1, 0])).loss
    elif "MaskedLM" in type(model).__name__:
        labels = batch["input_ids"].masked_fill(mask == 0, -100)
        labels[:, ::3] = -100
        loss = model(**batch, labels=labels).loss
    else:
        output = model(**batch)
        loss = (output.last_hidden_state * weights * mask[..., None]).sum()
        pooled = getattr(output, "pooler_output", None)
        loss = loss if pooled is None else loss + pooled.square().sum()
    loss.backward()
    parameter_gradients = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return loss.detach(), parameter_gradients


def check(stock, batch, **settings):
    """Compare two steps of the patched model with the unpatched one, and return its description."""
    weights = torch.randn(3, LENGTH, 32)
    loss, expected = gradients(stock, batch, weights)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(**settings))
    for _ in range(2):
        ours_loss, our_gradients = gradients(ours, batch, weights)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    return streambp.describe(ours)


@pytest.mark.fast(6)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["right", "none", "left", "between"])
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_exact(name, kind, implementation, in_halves):
    seed_torch()
    model = MODEL_BUILDERS[name]().train()
    model.set_attn_implementation(implementation)
    described = check(model, batch_of(kind), chunk_size=CHUNK)
    layers = model.config.num_hidden_layers
    assert [layer.path for layer in described.layers] == ["streams"] * layers
    assert in_halves == [LENGTH] * 2 * layers


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"saves": ("attn_out", "kv"), "offload": "cpu"},
        {"saves": ("*",)},
        {"saves": ("attn_out",), "chunk_size": 11},
        {"saves": "auto", "offload": "auto"},
        {"weights": "cpu"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_settings(name, settings, in_halves):
    seed_torch(1)
    check(MODEL_BUILDERS[name]().train(), batch_of("right"), **{"chunk_size": CHUNK, **settings})
    assert set(in_halves) == {LENGTH}


def test_a_single_chunk_is_not_cut(in_halves):
    seed_torch(2)
    described = check(MODEL_BUILDERS["bert"]().train(), batch_of("right"), chunk_size=LENGTH)
    assert [layer.path for layer in described.layers] == ["streams"] * 2
    assert not in_halves


@pytest.mark.fast("modernbert")
@pytest.mark.parametrize("name", ["modernbert", "embedding_gemma"])
def test_tiles_of_a_window_that_nobody_reads_are_left_out(name, in_halves, monkeypatch):
    seed_torch(3)
    for module in (mask_scan, masks):
        monkeypatch.setattr(module, "SCAN_TILE_SIZE", 3)
    read = []
    blocks = masks.DenseMask.blocks

    def noted(self, start, stop, tiling):
        tiles = blocks(self, start, stop, tiling)
        read.extend((block.k0, block.k1) for block in tiles if self.reach)
        return tiles

    monkeypatch.setattr(masks.DenseMask, "blocks", noted)
    check(MODEL_BUILDERS[name]().train(), batch_of("left"), chunk_size=CHUNK)
    assert in_halves
    assert any(k0 > 0 for k0, _ in read)
    assert any(k1 < LENGTH for _, k1 in read)


def test_a_causal_mask_runs_as_unpatched(in_halves):
    """Eager attention reads the causal mask, sdpa gets none and reads all keys."""
    for implementation in ("sdpa", "eager"):
        seed_torch(4)
        model = MODEL_BUILDERS["llama"]().train()
        model.config.is_causal = True
        model.set_attn_implementation(implementation)
        described = str(check(model, batch_of("none"), chunk_size=CHUNK))
        assert ("its mask is causal" in described) == (implementation == "sdpa")
        assert ("streams: " in described) == (implementation == "eager")
    assert not in_halves


def test_a_row_of_padding_in_eager_attention_runs_as_unpatched(in_halves):
    seed_torch(5)
    model = MODEL_BUILDERS["bert"]().train()
    model.set_attn_implementation("eager")
    batch = batch_of("right")
    batch["attention_mask"][2] = 0
    assert "a row has no tokens" in str(check(model, batch, chunk_size=CHUNK))
    assert not in_halves


def paligemma():
    text = {
        **SIZES, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32, "vision_use_head": False,
    }  # fmt: skip
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            text_config=text, vision_config=vision, projection_dim=32, image_token_index=60
        )
    )


@pytest.mark.parametrize(
    ("prefix", "is_split"), [(9, False), (LENGTH - 1, True)], ids=["short", "long"]
)
def test_prefixes(prefix, is_split, in_halves):
    """Chunks end behind a prefix; a prefix up to the last token leaves no end."""
    seed_torch(6)
    stock = paligemma().train()
    ids = torch.randint(3, 59, (2, LENGTH))
    ids[:, :4] = 60
    kinds = torch.zeros(2, LENGTH, dtype=torch.long)
    kinds[:, prefix:] = 1
    batch = {
        "input_ids": ids, "token_type_ids": kinds, "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(kinds == 0, -100), "pixel_values": torch.randn(2, 3, 16, 16),
    }  # fmt: skip
    results = []
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    for model in (stock, ours):
        loss = model(**batch).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), grads))
    assert abs(results[1][0] - results[0][0]) <= 1e-12
    assert worst_error(results[1][1], results[0][1]) <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert [layer.path for layer in described.layers] == ["streams"] * 2
    assert bool(in_halves) == is_split


def with_dropout(adapters):
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model = BertModel(BertConfig(**SIZES, **rates), add_pooling_layer=False)
    if not adapters:
        return model
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.3, target_modules=["query", "value", "dense"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config).double()


def worst_difference(model, seed):
    """The worst difference between a gradient and a difference quotient of the loss, over
    parameters, where each loss has the same random draws."""
    batch, weights = batch_of("right"), torch.randn(3, LENGTH, 32)

    def step():
        seed_torch(seed)
        return gradients(model, batch, weights)

    step()  # the layers are tested
    loss, our_gradients = step()
    assert step()[0] == loss
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name not in our_gradients:
            continue
        direction = torch.randn_like(parameter)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-6 * direction
            losses.append(step()[0])
            with torch.no_grad():
                parameter -= sign * 1e-6 * direction
        quotient = float(losses[0] - losses[1]) / 2e-6
        slope = float((our_gradients[name] * direction).sum())
        worst = max(worst, abs(quotient - slope) / (abs(slope) + 1e-2))
    return worst


@pytest.mark.fast(2)
@pytest.mark.parametrize("adapters", [False, True], ids=["dropout", "dropout before attention"])
def test_random_draws_are_the_same_in_all_passes(adapters, in_halves):
    """Dropout before, in and behind attention."""
    seed_torch(7)
    model = streambp.patch(with_dropout(adapters).train(), streambp.StreamConfig(chunk_size=CHUNK))
    assert worst_difference(model, 8) <= 1e-4
    assert in_halves


def test_both_halves_draw_the_same_before_attention(monkeypatch):
    """A layer whose attention and MLP read one normed input, with dropout behind the norm."""
    seed_torch(9)
    model = parallel_with_dropout()
    batch = batch_of("right")
    with torch.no_grad():
        model(**batch, use_cache=False)  # the layers are tested
        drawn = dropout_masks(monkeypatch)
        model(**batch, use_cache=False)
    chunks = len(drawn) // 2
    assert chunks == 4
    assert all(map(torch.equal, drawn[:chunks], drawn[chunks:]))


def parallel_with_dropout():
    config = CohereConfig(**{**SIZES, "num_hidden_layers": 1}, is_causal=False)
    model = CohereModel(config).train()
    [layer] = model.layers
    layer.self_attn.is_causal = False
    layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, torch.nn.Dropout(0.3))
    return streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK))


def dropout_masks(monkeypatch):
    """The masks that dropout draws from here on."""
    drawn = []
    dropout = torch.nn.functional.dropout

    def noted(x, *args, **kwargs):
        result = dropout(x, *args, **kwargs)
        drawn.append(result == 0)
        return result

    monkeypatch.setattr(torch.nn.functional, "dropout", noted)
    return drawn


def test_the_mutant_with_two_masks_is_noticed(monkeypatch):
    monkeypatch.setattr(halves, "_second_half", lambda call, chunk, o: halves.SplitAtAttention(o))
    with pytest.raises(AssertionError):
        test_both_halves_draw_the_same_before_attention(monkeypatch)


def same_seed_everywhere(call, chunk):
    return call.params._replace(seed=call.params.seed + torch.is_grad_enabled())


def count_twice(call, work, gradients, real=halves._differentiate_before):
    real(call, work, [2 * gradient for gradient in gradients])


def overwrite(self, chunk, gradients, accumulate=False, real=BackwardPass.add):
    real(self, chunk, gradients)


def store_without_first_chunk(
    self, chunk, gradients, real=split_attention.ChunkwiseAttention.store_gradients
):
    real(self, chunk, [None] * len(gradients) if chunk.start == 0 else gradients)


MUTANTS = {
    "keys behind the query are not read": (
        masks, "find_reach",
        lambda tile, length, device: tuple(
            (0, min(length, q0 + masks.SCAN_TILE_SIZE)) for q0 in range(0, length,
                masks.SCAN_TILE_SIZE)
        ),
        lambda: check(MODEL_BUILDERS["modernbert"]().train(), batch_of("none"), chunk_size=CHUNK),
    ),
    "a first half that draws anew": (
        halves, "_replay_generators", lambda call, chunk: NULL_CONTEXT,
        lambda: fails_differences(True),
    ),
    "another mask of attention's dropout in backward": (
        split_attention, "params_of", same_seed_everywhere,
        lambda: fails_differences(False),
    ),
    "a first half that is not differentiated": (
        halves, "_differentiate_before", lambda call, work, gradients: None,
        lambda: check(MODEL_BUILDERS["bert"]().train(), batch_of("right"), chunk_size=CHUNK),
    ),
    "a first half whose gradients count twice": (
        halves, "_differentiate_before", count_twice,
        lambda: check(MODEL_BUILDERS["bert"]().train(), batch_of("right"), chunk_size=CHUNK),
    ),
    "a first half that overwrites the second one's gradient": (
        BackwardPass, "add", overwrite,
        lambda: check(MODEL_BUILDERS["bert"]().train(), batch_of("right"), chunk_size=CHUNK),
    ),
    "a second half whose first queries get no gradient": (
        split_attention.ChunkwiseAttention, "store_gradients", store_without_first_chunk,
        lambda: check(MODEL_BUILDERS["bert"]().train(), batch_of("right"), chunk_size=CHUNK),
    ),
}  # fmt: skip


def fails_differences(adapters):
    model = streambp.patch(with_dropout(adapters).train(), streambp.StreamConfig(chunk_size=CHUNK))
    assert worst_difference(model, 8) <= 1e-4


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch):
    module, name, replacement, run = MUTANTS[mutant]
    seed_torch(10)
    for scanned in (mask_scan, masks):
        monkeypatch.setattr(scanned, "SCAN_TILE_SIZE", 3)
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        run()


class InTheOrderOfCausalLayers(split_attention.ChunkwiseAttention):
    """Takes the gradients of a chunk's keys when its own queries are done, from the last chunk to
    the first. Queries of earlier chunks, which read these keys as well, have not added theirs."""

    def store_gradients(self, chunk, gradients):
        super().store_gradients(chunk, gradients)
        sums = self.kv_storage.grow_accumulators()
        early = self.__dict__.setdefault("early", {})
        early[chunk] = [x.transpose(1, 2)[split_attention.part_of(chunk)].clone() for x in sums]

    def gradients(self):
        results = super().gradients()
        for chunk, parts in self.early.items():
            for gradient, part in zip(results[1:], parts, strict=True):
                gradient[split_attention.part_of(chunk)] = part
        return results


@pytest.mark.parametrize("name", ["bert", "modernbert", "embedding_gemma"])
def test_the_mutant_in_the_order_of_causal_layers_is_noticed(name, monkeypatch):
    """Only dk and dv of all queries may be differentiated further."""
    seed_torch(10)
    monkeypatch.setattr(halves, "ChunkwiseAttention", InTheOrderOfCausalLayers)
    with pytest.raises(AssertionError):
        check(MODEL_BUILDERS[name]().train(), batch_of("right"), chunk_size=CHUNK)


def test_that_order_is_exact_if_all_keys_are_taken_at_the_end(monkeypatch):
    """The mutant's own code changes nothing."""
    seed_torch(10)
    monkeypatch.setattr(halves, "ChunkwiseAttention", InTheOrderOfCausalLayers)
    monkeypatch.setattr(
        InTheOrderOfCausalLayers, "gradients", split_attention.ChunkwiseAttention.gradients
    )
    check(MODEL_BUILDERS["bert"]().train(), batch_of("right"), chunk_size=CHUNK)


class WritesInPlace(torch.nn.Module):
    """A projection that scales its input in place."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.mul_(0.5))


@pytest.mark.parametrize("saves", [(), ("kv",)], ids=str)
def test_a_layer_that_writes_to_its_attentions_output(saves, in_halves):
    """With one row of tokens, the layer gets attention's output without a copy."""
    seed_torch(13)
    stock = llama().train()
    stock.set_attn_implementation("eager")  # sdpa's own backward reads what the layer overwrites
    for layer in stock.layers:
        layer.self_attn.o_proj = WritesInPlace(layer.self_attn.o_proj)
    batch = {"input_ids": torch.randint(3, 60, (1, LENGTH))}
    weights = torch.randn(1, LENGTH, 32)
    _, expected = gradients(stock, batch, weights)
    config = streambp.StreamConfig(chunk_size=CHUNK, saves=saves)
    ours = streambp.patch(copy.deepcopy(stock), config)
    for _ in range(2):
        assert worst_error(gradients(ours, batch, weights)[1], expected) <= MAX_FLOAT64_ERROR
    assert in_halves


def add_hooks(model, hook):
    for layer in model.encoder.layer:
        for module in (layer.attention.self.query, layer.output.dense):
            module.register_forward_hook(hook)


def test_hooks_that_change_values(in_halves):
    """In the half that leaves other products out, a Linear with a hook is computed."""
    seed_torch(11)
    model = MODEL_BUILDERS["bert"]().train()
    add_hooks(model, lambda module, args, output: 1.5 * output + 0.1)
    described = check(model, batch_of("right"), chunk_size=CHUNK)
    assert [layer.path for layer in described.layers] == ["streams"] * 2
    assert in_halves


def test_recorders_keep_what_they_keep_unpatched():
    seed_torch(12)
    stock = MODEL_BUILDERS["bert"]().train()
    shapes = {}
    for name, model in (("stock", stock), ("ours", copy.deepcopy(stock))):
        recorded = shapes[name] = []
        add_hooks(
            model, lambda module, args, output, recorded=recorded: recorded.append(output.shape)
        )
        if name == "ours":
            streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK))
        for _ in range(2):
            recorded.clear()
            gradients(model, batch_of("right"), torch.randn(3, LENGTH, 32))
    assert shapes["ours"] == shapes["stock"]


def test_the_mutant_that_tries_chunks_with_later_keys_is_noticed(in_halves, monkeypatch):
    """The layers then run whole: chunks of the test have no keys of later chunks."""
    buffer = Prefix._buffer
    # what is not written yet would be whatever was in memory
    monkeypatch.setattr(Prefix, "_buffer", lambda *args: buffer(*args).fill_(3.0))
    monkeypatch.setattr(
        long_trial, "Spans", SimpleNamespace(causal=lambda rows, length: all_keys(rows, length))
    )
    with pytest.raises(AssertionError):
        test_hooks_that_change_values(in_halves)


def all_keys(rows, length):
    return Spans(length, ((QueryRun(0, length, 0, length),),) * rows)
