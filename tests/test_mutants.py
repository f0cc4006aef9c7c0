"""Every operator has a mutant, and every mutant turns a named test red.

covers: admission/trials.py, attention/attend.py, attention/kernels.py, attention/kv.py,
  attention/masks.py, attention/self_attending.py, attention/prefix.py, attention/spans.py,
  chunks.py, head/blocks.py, head/log_probs.py, head/one_pass.py, head/recipe.py,
  layer/arguments.py, layer/call.py, layer/data_flow.py, layer/function.py, layer/gradients.py,
  layer/products.py, layer/recompute.py, layer/saved_tensors.py, lazy/base.py, losses/masked.py,
  model/causal_lm.py, offload/free_memory.py, offload/manager.py, planner/auto.py,
  planner/delta_rules.py, planner/profile.py, sharded/call.py, sharded/layer.py, sharded/shards.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import types
from pathlib import Path

import pytest
import torch

from streambp import accumulate, device
from streambp.admission import entry, trials
from streambp.admission.probe import Verdict
from streambp.attention import attend, kernels, masks, prefix, spans
from streambp.attention import kv as keys
from streambp.attention import self_attending as cached
from streambp.attention.spans import Block, BlockKind, Spans
from streambp.chunks import ChunkPlan
from streambp.errors import BackwardError
from streambp.head import blocks, log_probs, one_pass, recipe
from streambp.layer import arguments, call, function, products, recompute
from streambp.layer import saved_tensors as kept
from streambp.lazy import lazy_hidden
from streambp.losses import masked
from streambp.model import causal_lm
from streambp.offload import free_memory, manager
from streambp.offload.policy import SavesPolicy
from streambp.planner import count, delta_rules, laws, profile
from streambp.sharded import call as sharded_call
from streambp.sharded import shards, split_attention
from tests import test_foreign_forwards, test_oracle
from tests.attention import test_graph_cache, test_merge, test_uneven_chunks
from tests.distributed import one_rank, test_host, test_shards
from tests.families import build, make_batch
from tests.head import test_expected_scale, test_log_probs
from tests.layer import test_inner_leaves
from tests.lazy import test_stand_ins
from tests.model import test_contract, test_families, test_padding, test_training
from tests.offload import runs
from tests.oracle import gradients, lift_float32_casts
from tests.planner import test_estimates, test_mixers, test_plans
from tests.planner.test_plans import planning
from tests.sharded import test_sharded
from tests.versions import needs_sharing_without_cache


def oracle(family="qwen3", mode="plain", saves=()):
    test_oracle.test_gradients_are_exact(family, mode, 5, saves, None)


def dense_mask():
    """A padding mask with a hole: no interval, so tiles of the mask; the first row starts with
    padding."""
    stock, ours = test_contract.model_pair()
    batch = make_batch("left-padded")
    batch["attention_mask"][:, 12] = 0
    batch["labels"][:, 12:14] = -100
    test_contract.check_agree(stock, ours, **batch)


def dropout():
    test_training.test_dropout_by_finite_differences("phi3", None)


def autocast():
    test_training.test_autocast_covers_the_recomputation()


def top_left(task, device, real=kernels._tile):
    block = task.block
    if block.kind is not BlockKind.CAUSAL:
        return real(task, device)
    return torch.ones(
        block.q1 - block.q0, block.k1 - block.k0, dtype=torch.bool, device=device
    ).tril()


def of_flat_scores(self, do, q, k, v, o, lse, task, real=kernels.MathKernel.backward):
    flat = kernels.MathKernel()
    flat._scores = lambda q, k, _: self._scores(q, k, task)
    return real(flat, do, q, k, v, o, lse, task._replace(softcap=None))


def without_sink_gradient(ctx, grad, real=attend.PrefixAttention.backward):
    dq, dk, dv, dsink, *other_grads = real(ctx, grad)
    return dq, dk, dv, None if dsink is None else torch.zeros_like(dsink), *other_grads


def bottom_right_block():
    """A causal block of more keys than queries: queries are aligned to the last keys."""
    q, k, v = torch.randn(1, 1, 3, 8), *torch.randn(2, 1, 1, 5, 8)
    task = kernels.Task(Block(BlockKind.CAUSAL, 0, 1, 2, 5, 0, 5), 0.3)
    o, _ = kernels.MATH.forward(q, k, v, task)
    reads = torch.ones(3, 5).tril(2)
    weights = (q @ k.mT * 0.3).masked_fill(reads == 0, -torch.inf).softmax(-1)
    assert torch.allclose(o, weights @ v, atol=1e-6)


def skips_second(real):
    """`real` as a method that does nothing the second time that it is given something."""
    calls = []

    def method(self, argument):
        calls.extend([argument] if argument else [])
        return None if argument and len(calls) == 2 else real(self, argument)

    return method


def lose_autocast(self, enabled=True, real=recompute.Autocast.restore):
    return contextlib.nullcontext() if enabled else real(self, enabled)


@contextlib.contextmanager
def no_replay(self):
    yield


@contextlib.contextmanager
def real_parameters(self, *_):
    yield self.current()


def without_onehot(logits, saved, block):
    return torch.exp(logits - saved.lse[:, None]) * -saved.d_log_probs[:, None]


def only_this_chunk(self):
    return torch.zeros_like(self.k), torch.zeros_like(self.v)


def family(name):
    with default_float64():
        test_families.check(name, modes=["plain"], chunk_sizes=[5])


def uneven(check, *args):
    with default_float64():
        check(*args)


def router_loss():
    with default_float64():
        test_families.test_router_loss("mixtral", "plain")


def foreign_forward():
    with pytest.MonkeyPatch.context() as patch:
        test_foreign_forwards.check("class", patch)


def fused_loss():
    test_stand_ins.test_right("autograd.Function")


def kept_too_long():
    assert test_stand_ins.raises(test_stand_ins.used_after_an_update)


def written_alias():
    name = "written through detach"
    assert test_stand_ins.raises(
        test_stand_ins.step_of_a_patched_model, test_stand_ins.RAISING_USES[name]
    )


def several_blocks():
    with pytest.MonkeyPatch.context() as patch:
        test_log_probs.small_blocks.__wrapped__(patch)
        test_log_probs.test_values_and_gradients({}, True)


def objective():
    """The mean of PPO's terms over tokens of which some do not count."""
    mask = torch.tensor([[True, False, True]])
    x = torch.tensor([[1.0, 5.0, 2.0]])
    assert masked.masked_mean(x, mask) == 1.5


@contextlib.contextmanager
def default_float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def inner_leaves():
    with default_float64():
        test_inner_leaves.test_an_inner_leaf_is_reduced_once_with_all_its_gradients(torch.float64)


def shared_memory():
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        meminfo = Path(folder) / "meminfo"
        meminfo.write_text("MemAvailable: 100000 kB\n")
        test_host.check_shared(meminfo, patch)


def expected_scale():
    with default_float64(), pytest.MonkeyPatch.context() as patch:
        test_expected_scale.check_late_factors(test_expected_scale.record_late_factors(patch))


@functools.cache
def of(check, *args):
    """The same object for the same check: `green` runs it once."""
    return functools.partial(check, *args)


def only_hidden_states(self, output, chunk, real=function.BackwardPass.upstream):
    self.of_extras = {}
    return real(self, output, chunk)


def hidden_states_alone(self, chunk, gradients, real=function.BackwardPass.add):
    real(self, chunk, [gradients[0], *[None] * (len(gradients) - 1)])


def streamed_prefix():
    # documents start inside tiles
    expected = runs.step(runs.model_with((), build("qwen3", torch.float64)), "packed")
    runs.assert_same(
        runs.step(runs.offloaded((), build("qwen3", torch.float64), gpu_memory=1), "packed"),
        expected,
    )


def graph_cache(spans):
    with default_float64(), pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        test_graph_cache.check(spans, ("attn_out",), "kept", patch)


def merged_with_garbage(o, lse, part_o, part_lse, out, _):
    merged = torch.logaddexp(lse, part_lse)
    weight, part_weight = (
        torch.exp(x - merged).transpose(1, 2)[..., None] for x in (lse, part_lse)
    )
    out.copy_(o * weight + part_o * part_weight)
    lse.copy_(merged)


def merged_without_weights_if_read(
    o, lse, part_o, part_lse, out, all_read, real=attend.merge_in_torch
):
    return out.copy_(o + part_o) if all_read else real(o, lse, part_o, part_lse, out)


def leave_without_sums(self, indices):
    for index in [index for index in indices if index >= self.resident]:
        self._on_device.pop(index, None)


def from_the_start(self, block):
    for index in self._tiles(block):
        chunk = self.plan[index]
        k0, k1 = max(block.k0, chunk.start), min(block.k1, chunk.stop)
        yield index, slice(0, k1 - k0), slice(k0 - block.k0, k1 - block.k0)


def put_once(self, name, chunk, tensor, real=manager.HostTensors.save):
    if not self.has(name, chunk):
        real(self, name, chunk, tensor)


def plain_causal(mask, batch_size, length, *_):
    return Spans.causal(batch_size, length)


def split(family="qwen3", mode="plain", saves=()):
    with pytest.MonkeyPatch.context() as patch:
        one_rank.split_over_one_rank(patch)
        test_sharded.test_gradients_are_exact(family, mode, saves, None, None)


def second_half_alone(self, chunk, gradients, accumulate=False, real=function.BackwardPass.add):
    real(self, chunk, [None] * len(gradients) if accumulate else gradients, accumulate)


def first_copy_alone(self, x, heads, real=shards.Shards.tokens):
    return real(self, x, self.size * x.shape[1])[:, :: (self.size * x.shape[1]) // heads]


def without_window(mask, spans, *_):
    return spans


def without_packing(batch_size, length, padding, position_ids):
    return Spans.causal(batch_size, length)


def exchange_in_other_order(self, parts, real=shards.Shards.exchange):
    return real(self, parts.flip(0))


def leave_out_everything(call, linears, *_):
    return products.UnreadInHalves(*[frozenset(linears)] * 4)


MUTANTS = {
    "drop the last chunk": (ChunkPlan, "backward", property(lambda self: self.chunks[-2::-1]), oracle),
    "differentiate first to last": (ChunkPlan, "backward", property(lambda self: self.chunks), oracle),
    "skip a parameter accumulation": (accumulate.GradientSum, "add", skips_second(accumulate.GradientSum.add), oracle),
    "drop dK and dV of earlier chunks": (prefix.KVBuffer, "grow_accumulators", only_this_chunk, oracle),
    "a cache that returns no gradient for earlier chunks": (
        prefix.KVBuffer, "grow_accumulators", only_this_chunk, lambda: family("bloom"),
    ),
    "lose the random state": (device.RandomState, "replay", no_replay, dropout),
    "lose autocast": (recompute.Autocast, "restore", lose_autocast, autocast),
    "top-left instead of bottom-right": (kernels, "_tile", top_left, bottom_right_block),
    "keys before the chunk left out": (spans.Tiling, "keys", lambda *_: [], oracle),
    "weights of an empty row": (
        kernels, "_weights", lambda scores, lse: torch.exp(scores - lse[..., None]), dense_mask,
    ),
    "ignore padding": (masks, "_from_description", plain_causal, lambda: oracle(mode="left-padded")),
    "ignore packing": (masks, "_from_description", plain_causal, lambda: oracle(mode="packed")),
    "ignore the window": (masks, "_from_description", plain_causal, lambda: oracle("mistral")),
    "trust wrong spans": (masks, "agrees", lambda *_: True, dense_mask),
    "saved logsumexp of another chunk": (
        kept.SavedForBackward, "take_attention_outputs",
        lambda self, real=kept.SavedForBackward.take_attention_outputs: [
            dataclasses.replace(a, lse=a.lse + 0.1) for a in real(self) or []
        ],
        lambda: oracle(saves=("attn_out",)),
    ),
    "shadows are the parameters": (
        recompute.Parameters, "shadow", real_parameters, test_contract.test_hooks_on_parameters_and_layers_fire_once,
    ),
    "always overwrite the gradient": (
        function, "may_overwrite", lambda *_: True, test_contract.test_captured_gradients_keep_their_values,
    ),
    "leave out every product": (
        trials, "_find_unread",
        lambda call, linears, needs_input: products.UnreadProducts(frozenset(linears), frozenset(linears)), oracle,
    ),
    "unread Linear without its weight's gradient": (
        products.LinearWithKnownOutput, "backward",
        staticmethod(
            lambda ctx, grad: (grad @ ctx.saved_tensors[1], torch.zeros_like(ctx.saved_tensors[1]), None, None, None)
        ),
        oracle,
    ),
    "a product in place of its sum": (accumulate, "add_product", lambda total, left, right: left @ right, oracle),
    "weight gradients added up and returned": (
        products.LinearWithKnownOutput, "backward",
        staticmethod(
            lambda ctx, grad, real=products.LinearWithKnownOutput.backward: (
                real(ctx, grad)[0], grad.flatten(0, -2).mT @ ctx.saved_tensors[0].flatten(0, -2), None, None, None,
            )
        ),
        oracle,
    ),
    "cross-entropy without the label's term": (
        blocks, "logits_gradient", without_onehot, test_contract.test_log_probs_of_the_labels,
    ),
    "one pass without the label's term": (blocks, "logits_gradient", without_onehot, oracle),
    "one pass ignores the upstream gradient": (
        log_probs.HeadGradients, "results",
        lambda self, *_, real=log_probs.HeadGradients.results: real(self), test_contract.test_scaled_upstream,
    ),
    "dW of the last block alone": (
        log_probs, "add_product", lambda total, a, b: a @ b if total is None else total.copy_(a @ b), several_blocks,
    ),
    "softcap without its derivative": (
        blocks.Projection, "backward", lambda self, grad, logits: grad, lambda: oracle("gemma3"),
    ),
    "attention softcap without its derivative": (
        kernels.MathKernel, "backward", of_flat_scores, lambda: family("gemma2"),
    ),
    "sink left out": (attend, "add_sink", lambda attended, sink: attended, of(family, "gpt_oss")),
    "sink without its gradient": (
        attend.PrefixAttention, "backward", staticmethod(without_sink_gradient), of(family, "gpt_oss"),
    ),
    "router outputs without their gradient": (function.BackwardPass, "upstream", only_hidden_states, router_loss),
    "router outputs of chunks taken for layers": (call, "record_outputs",
        lambda keys: contextlib.nullcontext({}), router_loss),
    "shared keys and values without their gradient": (
        function.BackwardPass, "upstream", only_hidden_states, of(family, "gemma3n_text"),
    ),
    "differentiable arguments without their gradient": (
        function.BackwardPass, "add", hidden_states_alone, of(family, "gemma3n_text"),
    ),
    "positions counted from 0 in every chunk": (
        arguments.ChunkCache, "get_seq_length", lambda self, *_: 0,
        test_families.test_llama4_counts_positions_from_the_start_of_the_sequence,
    ),
    "folds merged without their shrinking": (
        blocks.Fold, "merge",
        lambda self, fold, real=blocks.Fold.merge: dataclasses.replace(real(self, fold), sum=self.sum + fold.sum),
        several_blocks,
    ),
    "host memory of other ranks taken": (free_memory, "local_ranks", lambda: 1, shared_memory),
    "late factor not learnt": (one_pass.PendingGradients, "learn", lambda self, factor: None,
        expected_scale),
    "inner leaves not reduced": (
        entry.EngineReduce, "apply", lambda hidden_states, reductions: hidden_states, inner_leaves,
    ),
    "objectives that count every token": (masked, "masked_sum", lambda values, mask, dim=None: values.sum(), objective),
    "stream whatever comes": (
        entry, "can_stream", lambda call: Verdict(True), test_families.test_convolution_inside_a_layer_is_found,
    ),
    "chunks that end inside of images": (
        ChunkPlan, "avoid_barriers", lambda self, barriers: self,
        of(uneven, test_uneven_chunks.check_images),
    ),
    "barriers of the first row alone": (
        masks, "find_barriers",
        lambda tile, *args, real=masks.find_barriers: real(lambda *edges: tile(*edges)[:1], *args),
        of(uneven, test_uneven_chunks.check_images),
    ),
    "empty queries that read what they like": (
        cached.OwnMask, "chunk_mask", lambda self, chunk: self.mask[:, :, chunk.start : chunk.stop, : chunk.stop],
        lambda: uneven(test_padding.check_chunk_sizes, "bloom"),
    ),
    "empty queries that read themselves": (
        cached.OwnMask, "values", lambda self, v, chunk: v, lambda: uneven(test_padding.check_zero),
    ),
    # The planner's, in one block.
    "workspaces left out": (count, "workspace", lambda *_: 0, test_estimates.check_workspaces),
    "gradients that were there are left out": (
        profile, "bytes_between_steps",
        lambda p, s, real=profile.bytes_between_steps: dataclasses.replace(real(p, s),
            gradients=0.0),
        test_estimates.check_peak_by_hand,
    ),
    "experts divided like the rest": (
        profile, "bytes_between_steps",
        lambda p, s, real=profile.bytes_between_steps: real(p, dataclasses.replace(s,
                expert_parallel=1)),
        test_estimates.check_static_by_hand,
    ),
    "host memory without limit": (
        planning, "fits", lambda at, memory: at.total <= memory.usable, test_plans.check_longest,
    ),
    "states for nothing": (
        laws.Law, "at", lambda law, step, total=0.0, real=laws.Law.at: real(law._replace(chunks=0.0), step, total),
        test_estimates.check_peak_by_hand,
    ),
    "a delta rule in smaller blocks": (delta_rules, "BLOCK_TOKENS", 32, test_mixers.check_kept),
    "a backward without its states": (
        delta_rules.DeltaRuleSizes, "states", delta_rules.DeltaRuleSizes.state,
        test_mixers.check_peaks,
    ),
    "the smallest chunks are the best": (
        profile.Method, "counts_chunks", False, test_plans.check_longest_with_states,
    ),
    "chunks whatever is free": (SavesPolicy, "size", lambda *_: 8192, test_plans.check_chunks_fit),
    "cuDNN gets blocks of any size": (
        kernels.CudnnKernel, "takes", lambda self, block: block.kind in self.kinds, of(graph_cache, "left-padded"),
    ),
    "what was there before a first block": (
        attend, "merge_in_torch", merged_with_garbage, test_merge.test_nothing_read_at_all,
    ),
    "merged outputs without their weights": (
        attend, "merge_in_torch", lambda o, lse, part, part_lse, out, _: out.copy_(o + part),
        of(graph_cache, "left-padded"),
    ),
    "outputs of read blocks without their weights": (
        attend, "merge_in_torch", merged_without_weights_if_read, oracle,
    ),
    "blocks that may read nothing taken for read": (
        attend, "merge_in_torch", lambda *args, real=attend.merge_in_torch: real(*args[:5], True),
        test_merge.test_nothing_read_at_all,
    ),
    "queries' gradient of the last block alone": (
        attend.QueryGradientSum, "add", lambda self, number,
        dq: setattr(self, "_sum", dq.transpose(1, 2)),
        of(graph_cache, "plain"),
    ),
    "accumulators that stay behind": (keys.KVTiles, "_leave", leave_without_sums, streamed_prefix),
    "tiles read from their start": (keys.KVTiles, "_overlaps", from_the_start, streamed_prefix),
    "a tile that comes back as it was first": (manager.HostTensors, "save", put_once, streamed_prefix),
    "a tile of another chunk": (
        manager.HostTensors, "peek",
        lambda self, name, chunk, real=manager.HostTensors.peek: real(self, name, chunk - ((name, chunk) == ("k.0", 2))),
        streamed_prefix,
    ),
    "exchange with the wrong ranks": (
        shards.Shards, "exchange", exchange_in_other_order, lambda: test_shards.check_exchange(2, 4),
    ),
    "copies of a head without their sum": (
        shards.Shards, "tokens", first_copy_alone, lambda: test_shards.check_exchange(4, 2),
    ),
    "half before attention without its gradient of the input": (
        function.BackwardPass, "add", second_half_alone, split,
    ),
    "half after attention without its gradient of o": (
        split_attention.AllQueriesAttention, "store_gradients",
        lambda self, chunk, _, real=split_attention.AllQueriesAttention.store_gradients: real(self,
            chunk, [None]),
        split,
    ),
    "split: leave out every product": (sharded_call, "_unread_in_halves", leave_out_everything, split),
    "split: saved logsumexp of another chunk": (
        split_attention, "AttentionOutput", lambda o, lse: prefix.AttentionOutput(o, lse + 0.1),
        lambda: split(saves=("attn_out",)),
    ),
    "split: ignore the window": (sharded_call, "resolve_full_mask", without_window,
        lambda: split("gemma3")),
    "split: ignore packing": (shards, "spans_of_tokens", without_packing, lambda: split(mode="packed")),
    "a stand-in's gradient goes nowhere": (
        lazy_hidden.GradientSink, "backward", staticmethod(lambda ctx, *_: (None,
                ) * len(ctx.needs_input_grad)), fused_loss,
    ),
    "other libraries' forwards taken for transformers'": (causal_lm, "foreign_of_class", lambda *_: None, foreign_forward),
    "weights that changed since a hook kept what they made": (lazy_hidden.LazyHidden, "check",
        lambda *_: None, kept_too_long),
    "writes to what shares memory with logits unseen": (
        lazy_hidden.SharedWriteCount, "track_alias", lambda self, tensor: None, written_alias,
    ),
    "final norm left out": (
        recipe, "make_inputs",
        lambda x, t, p, norm, ignore, real=recipe.make_inputs: real(x, t, p, None, ignore), oracle,
    ),
}  # fmt: skip


SHARED_KEYS_MUTANT = "shared keys and values without their gradient"


@functools.cache
def green(check):
    """Without a mutant; once for all mutants of a check."""
    check()


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_sharing_without_cache)
        if name == SHARED_KEYS_MUTANT
        else name
        for name in MUTANTS
    ],
)
def test_mutant_turns_a_test_red(name, monkeypatch):
    owner, attribute, mutant, check = MUTANTS[name]
    if check is not autocast:
        lift_float32_casts(monkeypatch)
    green(check)
    with monkeypatch.context() as patch:
        # it would catch some of them first
        patch.setattr(entry, "can_stream", lambda call: Verdict(True))
        patch.setattr(owner, attribute, mutant)
        # the latter: the witness sees it first
        with pytest.raises((AssertionError, BackwardError)):
            check()


def test_merging_empty_blocks_needs_its_guard(monkeypatch):
    """-inf - -inf: without the guard a query whose first block holds none of its keys is NaN."""
    _, ours = test_contract.model_pair(
        config=test_contract.streambp.StreamConfig(chunk_size=23, attention="math")
    )
    batch = make_batch("left-padded")
    batch["attention_mask"][:, 12] = 0
    batch["labels"][:, 12:14] = -100
    monkeypatch.setattr(masks, "SCAN_TILE_SIZE", 4)
    monkeypatch.setattr(
        kernels.MATH,
        "tiling",
        dataclasses.replace(kernels.MATH.tiling, q_block=4, k_block=4, k_forward=4),
    )
    _, grads = gradients(ours, **batch)
    assert all(g.isfinite().all() for g in grads.values())
    monkeypatch.setattr(
        torch.Tensor,
        "masked_fill",
        lambda self, mask, value: self if value == 0.0 else _fill(self, mask, value),
    )
    _, broken = gradients(ours, **batch)
    assert any(g.isnan().any() for g in broken.values())


def _fill(tensor, mask, value, real=torch.Tensor.masked_fill):
    return real(tensor, mask, value)


LEAVES_UP_PROJ = types.SimpleNamespace(
    called=frozenset({"mlp.up_proj"}), reached=frozenset({"mlp.up_proj"}), read=frozenset()
)


@pytest.mark.parametrize("is_tried", [True, False])
def test_a_wrongly_left_out_product_is_found_and_would_be_loud(is_tried, monkeypatch):
    _, ours = test_contract.model_pair()
    if not is_tried:
        monkeypatch.setattr(trials, "same_gradients", lambda *_: True)
    monkeypatch.setattr(
        trials,
        "trace",
        lambda linears, run: (run(), LEAVES_UP_PROJ)[1],
    )
    for _ in range(2):  # the first leaves out no product
        _, grads = gradients(ours, **make_batch("plain"))
    assert any(g.isnan().any() for g in grads.values()) != is_tried


def test_mutants_run_on_a_model_that_can_show_them():
    assert build("gemma3").config.final_logit_softcapping == 5.0
