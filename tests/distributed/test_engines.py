"""Two ranks, gloo, CPU: streamed models under DDP, FSDP2 and DeepSpeed against the bare engine and
a single process.

covers: distributed/engines.py, distributed/host.py
"""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run
from tests.versions import HYBRID_PATHS

MAX_RELATIVE_ERRORS = (
    1e-6  # of all gradients of four steps taken together, of all weights, and of evaluation losses
)
MAX_GRADIENT_ERROR = (
    1e-5  # of any one gradient; a term that is lost or counted twice changes one by percents
)
# The gradients of adapters are few and cancel: from draw to draw float32's own error in them
# differs tenfold. Two runs of equal precision lie two errors apart, one within a factor of 2 of the
# other (the spread of its logarithm is 0.32).
ROUNDING = 3
MAX_HALF_ERROR_RATIO = 1.05  # in half precision: times the unpatched engine's own error
MODELS = ("llama", "qwen3", "qwen3_moe")
# A gated delta rule; Mamba 2; Mamba 1, whose mixer runs under a substituted forward; a unit that
# keeps its states itself.
HYBRIDS = ("qwen3_5_text", "bamba", "jamba", "recurrent_gemma")
ADAPTED_HYBRID = HYBRIDS[0]
CACHED_STATE_HYBRIDS = HYBRIDS[:3]  # have their states in a cache; the last keeps them on itself
NOTHING_CACHED = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
}  # fmt: skip
SMALL_CASES = {
    "reduce_bucket_size": 500,
    "allgather_bucket_size": 500,
    "stage3_prefetch_bucket_size": 100,
}
CPU = {"device": "cpu"}
STREAM = {"offload": "cpu", "saves": ["attn_out", "kv"]}


def zero_settings():
    """Stages x accumulation x {overlap_comm, small buckets, offload_optimizer, offload_param}."""
    for accumulation in (1, 3):
        for stage in (1, 2, 3):
            cached = NOTHING_CACHED if stage == 3 else {}
            settings = [
                {"overlap_comm": True},
                {**SMALL_CASES, "overlap_comm": True},
                {"offload_optimizer": CPU},
            ]
            settings += (
                [{"offload_param": CPU}, {"offload_param": CPU, "offload_optimizer": CPU}]
                if stage == 3
                else []
            )
            for zero in settings:
                patched = (
                    ["before", "after"] if stage == 3 else [("before", "after")[accumulation == 3]]
                )
                yield {
                    "stage": stage,
                    "accumulation": accumulation,
                    "zero": {**cached, **zero},
                    "patched": patched,
                }


ENGINES = ("ddp", "fsdp", "deepspeed")
FAST_CASES = {  # by the engine that starts the ranks: torch's two share theirs
    "ddp": [
        {"accumulation": 3, "eval": True, "steps": 2},
        {"logits": True, "options": {"static_graph": True}, "patched": ["after"], "steps": 2},
        {"engine": "fsdp", "offload": True, "stream": STREAM, "resume": "patched", "patched": ["before"], "steps": 2},
        {"one_chunk_on": 0, "accumulation": 2, "steps": 2}, {"one_chunk_on": 0, "engine": "fsdp", "steps": 2},
        {"lora": True, "engine": "fsdp", "patched": ["after"], "steps": 2},
    ],
    "deepspeed": [
        {"stage": 2, "patched": ["after"], "steps": 2, "one_chunk_on": 0},
        {"stage": 3, "zero": NOTHING_CACHED, "model": "qwen3_moe", "patched": ["after"], "steps": 2},
        {"stage": 3, "zero": NOTHING_CACHED, "model": "qwen3_5_text", "patched": ["before"], "steps": 2},
        {"stage": 3, "zero": NOTHING_CACHED, "logits": True, "patched": ["before"], "steps": 2},
        {"stage": 3, "zero": NOTHING_CACHED, "padded_on": 1, "unlabelled_on": 0, "patched": ["before"], "steps": 2},
    ],
}  # fmt: skip
MATRIX = {
    "ddp": [
        {"options": {"static_graph": True}}, {"options": {"find_unused_parameters": True}}, {"accumulation": 3},
    ],
    "fsdp": [{"reshard": True, "accumulation": 3}, {"reshard": False}, {"offload": True}],
    "deepspeed": list(zero_settings()),
}  # fmt: skip
RESUME_CASES = [{"resume": "patched"}, {"resume": "from unpatched", "eval": True}]
PARTIAL_CASES = [{"frozen": True, "tied": True}, {"lora": True}]
SINGLE_CASES = {
    "ddp": [
        *RESUME_CASES, *PARTIAL_CASES, {"lora": True, "options": {"find_unused_parameters": True}},
        {"stream": STREAM},
        {"logits": True, "options": {"find_unused_parameters": True}, "eval": True},
        *[{"one_chunk_on": 0, **case} for case in (RESUME_CASES[0], *PARTIAL_CASES)],
        *[{"one_chunk_on": 0, "options": {option: True}} for option in ("static_graph", "find_unused_parameters")],
    ],
    "fsdp": [
        {"logits": True}, {"padded_from": 2}, *RESUME_CASES, *PARTIAL_CASES, {"offload": True, "resume": "patched"},
        {"offload": True, "stream": STREAM}],
    "deepspeed": [
        *[{"stage": 1, **case} for case in (*RESUME_CASES, *PARTIAL_CASES)],
        *[{"stage": 2, **case} for case in (*RESUME_CASES, *PARTIAL_CASES)],
        *[{"stage": 3, "zero": NOTHING_CACHED, **case} for case in (*RESUME_CASES, *PARTIAL_CASES)],
        {"stage": 3, "zero": NOTHING_CACHED, "zero_init": True}, {"stage": 3},
        {"stage": 2, "logits": True}, {"stage": 3, "logits": True, "zero_init": True, "eval": True},
        {"stage": 3, "zero": NOTHING_CACHED, "logits": True, "lora": True},
        {"stage": 3, "zero": NOTHING_CACHED, "padded_on": 0, "unlabelled_on": 0, "lora": True},
        {"stage": 3, "zero": NOTHING_CACHED, "padded_on": 1, "unlabelled_on": 1, "logits": True},
        {"stage": 2, "zero": {"offload_optimizer": CPU}, "stream": STREAM},
        {"stage": 3, "zero": {**NOTHING_CACHED, "offload_optimizer": CPU, "offload_param": CPU}, "stream": STREAM},
        {"stage": 3, "zero": {"stage3_param_persistence_threshold": 0}, "padded_from": 2},
    ],
}  # fmt: skip
RECURRENT_CASES = {
    "ddp": [{}, {"accumulation": 3, "eval": True}],
    "fsdp": [{}, {"offload": True, "stream": STREAM}],
    "deepspeed": [
        {"stage": 2},
        {"stage": 3, "zero": NOTHING_CACHED, "accumulation": 2, "steps": 2, "eval": True, "patched": ["after"]},
        {
            "stage": 3, "zero": {**NOTHING_CACHED, "offload_optimizer": CPU, "offload_param": CPU}, "stream": STREAM,
            "steps": 2, "patched": ["before"],
        },
    ],
}  # fmt: skip
BF16_CASES = {
    "ddp": [{}],
    "fsdp": [{}, {"offload": True}],
    "deepspeed": [
        {"stage": 1}, {"stage": 2, "accumulation": 3}, {"stage": 2, "zero": {"offload_optimizer": CPU}},
        {"stage": 3, "zero": NOTHING_CACHED, "accumulation": 3},
        {"stage": 3, "zero": {**NOTHING_CACHED, "offload_optimizer": CPU, "offload_param": CPU}},
    ],
}  # fmt: skip
TIED_FAMILIES = ("recurrent_gemma",)


def with_models(case):
    models = [model for model in MODELS if not (model == "qwen3_moe" and case.get("zero_init"))]
    return [{**case, "model": model} for model in models]


def listed(table):
    return [(engine, case) for engine, cases in table.items() for case in cases]


def bars_of(rounding):
    bars = {
        "gradients": MAX_RELATIVE_ERRORS,
        "weights": MAX_RELATIVE_ERRORS,
        "losses": MAX_RELATIVE_ERRORS,
        "worst gradient": MAX_GRADIENT_ERROR,
    }
    return bars | {name: max(bars[name], ROUNDING * error) for name, error in rounding.items()}


def check(engine, cases):
    for row, case in zip(run(engine, cases), cases, strict=True):
        assert row["case"] == case
        bars = bars_of(row["unpatched"].get("rounding", {}))
        for when in case.get("patched", ["before", "after"]):
            results = row[when]
            print(
                case,
                "patched",
                when,
                {name: results[name] for name in results.keys() - {"counts", "paths"}},
            )
            for reference in ("unpatched", "single process"):
                distances = results.get(reference, {})
                assert distances or case.get("zero_init")
                assert all(value <= bars[name] for name, value in distances.items()), (
                    case,
                    when,
                    results,
                    bars,
                )
            assert results["paths"] == sorted(
                HYBRID_PATHS if case.get("model") in CACHED_STATE_HYBRIDS else {"streams"}
            )
            # The head's, for each of what is taken of lazy logits: a logit, its logsumexp (known by
            # then), an entropy.
            logits_uses = 3 * bool(case.get("logits"))
            # embeddings and head each gather theirs
            uses = 2 if case.get("tied") or case.get("model") in TIED_FAMILIES else 1
            assert (
                results["counts"].get("gathers per parameter", 0)
                <= uses * (2 + bool(case.get("eval"))) + logits_uses
            )
            if case.get("logits"):
                expected = (
                    "as its caller computes it"
                    if case.get("engine", engine) == "fsdp"
                    else "no logits: computed blockwise for gather"
                )
                assert results["head"].startswith(expected)
            if "one_chunk_on" in case:  # [Note: micro-batches as unpatched]
                assert ("as the unpatched model" in results["saves"]) == (
                    case.get("engine", engine) == "ddp"
                )
            # LoRA on Linears in 8 bits keeps peft's own forward
            fuses = case.get("lora") and case.get("few_bits") != "int8"
            if fuses and "one_chunk_on" not in case:
                assert results["operations"] > row["unpatched"]["operations"] == 0
                (adapters, *of_experts) = results["adapters"]
                assert adapters.endswith("Linears with adapters are computed as one operation")
                assert len(of_experts) == (case["lora"] == "experts")
                # ZeRO-3 replaces torch's function for Linears
                how = "by peft's code" if case.get("stage") == 3 else "added to their adapters once"
                assert all(how in note for note in of_experts)
            if "stream" in case:
                assert set(results["not offloaded"].values()) == {0.0}
                check_host(case, results["host"])


def check_host(case, host):
    """What the engine itself keeps on the host of this rank's half, in float32, is what `describe`
    says."""
    shard, zero = host["trainable"] / 2, case.get("zero", {})
    parameters = shard if case.get("offload") or "offload_param" in zero else 0
    optimizer = 3 * shard if "offload_optimizer" in zero else 0  # weights, gradients, momentum
    assert host["parameters"] == pytest.approx(parameters, rel=0.05)  # padding
    assert host["optimizer"] == pytest.approx(optimizer, rel=0.05)
    # gradients are None again
    assert host["to_come"] == (3 * host["parameters"] if case.get("offload") else 0)
    assert ("B of parameters" in host["describe"]) == bool(parameters)
    assert ("B of optimizer state" in host["describe"]) == bool(optimizer)


@pytest.mark.fast("ddp")
@pytest.mark.parametrize("engine", FAST_CASES)
def test_engine(engine):
    check(engine, FAST_CASES[engine])


ON_ONE_RANK = {
    "shared_on": 0, "stream": {"rows": "packed"}, "longer": 6, "steps": 2, "patched": ["before"], "count": True,
}  # fmt: skip


def check_sharing(engine, **settings_of_all):
    settings = (
        [{}, {"engine": "fsdp"}] if engine == "ddp" else [{"stage": 3, "zero": NOTHING_CACHED}]
    )
    for row in run(engine, [{**ON_ONE_RANK, **setting, **settings_of_all} for setting in settings]):
        results = row["before"]
        for reference in ("unpatched", "single process"):
            assert all(value <= bars_of({})[name] for name, value in results[reference].items()), (
                row
            )
        assert "were computed as" in results["shared"][0]
        first, second = results["counts of ranks"]
        assert first == second
        assert sum(count for name, count in first.items() if name.startswith("calls")) > 0


@pytest.mark.full
@pytest.mark.parametrize("engine", FAST_CASES)
def test_rows_share_prefixes_on_one_rank_alone(engine):
    """Its forward is over a packed row, the other rank's over its rows; both try the model at their
    first call, and make the same collectives."""
    check_sharing(engine)


@pytest.mark.full
@pytest.mark.parametrize("engine", FAST_CASES)
@pytest.mark.parametrize("model", ["qwen3_5_text", "bamba"])
def test_branches_of_layers_with_states_on_one_rank_alone(engine, model):
    # a branch is a chunk of its own, which long prefixes pay for
    check_sharing(engine, model=model, longer=20)


PLENTY, LITTLE = 1e9, 1e3  # bytes; with little nothing is saved
SAVES_CASES = {  # ranks that decide alike, and not
    "ddp": [
        {"engine": "fsdp", "free": [PLENTY, PLENTY]},
        {"engine": "fsdp", "free": [PLENTY, LITTLE]},
    ],
    "deepspeed": [
        {"stage": 3, "zero": NOTHING_CACHED, "free": [PLENTY, PLENTY], "patched": ["after"]},
        {"stage": 3, "zero": NOTHING_CACHED, "free": [LITTLE, PLENTY]},
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("engine", SAVES_CASES)
def test_each_rank_saves_what_fits_it(engine):
    """From the first step on, by a count of the logical parameters. What is saved changes no
    number and adds no collective, and attention's forward runs once a layer and chunk."""
    cases = [{"patched": ["before"], "steps": 2, "count": True, **c} for c in SAVES_CASES[engine]]
    for row, case in zip(run(engine, cases), cases, strict=True):
        for when in case["patched"]:
            for reference in ("unpatched", "single process"):
                errors = row[when][reference]
                assert all(value <= bars_of({})[name] for name, value in errors.items()), row
            for free, mine in zip(case["free"], row[when]["ranks"], strict=True):
                distances, counts, attended, without_saves, saves = mine
                assert set(distances.values()) == {0.0}
                assert counts[0].keys() == counts[1].keys()
                assert all(counts[0][name] <= counts[1][name] for name in counts[0]), counts
                assert counts == row[when]["ranks"][0][1]
                assert attended * (2 if free == PLENTY else 1) == without_saves > 0
                assert ("attn_out of 2 layers" in saves) == (free == PLENTY), saves


@pytest.mark.full
@pytest.mark.parametrize(("engine", "case"), listed(MATRIX), ids=str)
def test_every_setting(engine, case):
    check(engine, with_models(case))


@pytest.mark.full
@pytest.mark.parametrize(("engine", "case"), listed(SINGLE_CASES), ids=str)
def test_parts_of_a_model_and_what_happens_between_steps(engine, case):
    check(engine, with_models(case))


@pytest.mark.full
@pytest.mark.parametrize(("engine", "case"), listed(RECURRENT_CASES), ids=str)
def test_layers_with_states(engine, case):
    check(engine, [{**case, "model": model} for model in HYBRIDS])


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_on_layers_with_states(engine):
    setting = {"stage": 3, "zero": NOTHING_CACHED} if engine == "deepspeed" else {}
    check(engine, [{**setting, "model": ADAPTED_HYBRID, "lora": True, "steps": 2}])


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_adapters_of_experts(engine, packed):
    """Experts as parameters, and in 4 bits: the packed bytes are sharded, the statistics are not."""
    setting = {"stage": 3, "zero": NOTHING_CACHED} if engine == "deepspeed" else {}
    case = {**setting, "model": "qwen3_moe", "lora": "experts", "steps": 2, "patched": ["before"]}
    check(engine, [{**case, "packed": True} if packed else case])


FEW_BITS = {
    "adapted experts, offload": {"model": "gpt_oss", "lora": "experts", "stream": STREAM},
    "4-bit experts": {"model": "mixtral", "lora": True, "packed": True},
    "adapted 4-bit experts": {"model": "mixtral", "lora": "experts", "packed": True},
    "adapted 4-bit experts, offload": {
        "model": "gpt_oss", "lora": "experts", "packed": True, "stream": STREAM,
    },
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_mixtures_in_few_bits(engine, name):
    """Of the table in tests/layer/test_covering_table.py, what runs on two ranks."""
    setting = {"stage": 3, "zero": NOTHING_CACHED} if engine == "deepspeed" else {}
    case = {**setting, **FEW_BITS[name], "steps": 2, "patched": ["before"]}
    if setting and not case.get("packed"):
        # DeepSpeed ends an unpatched step of gpt-oss, too: the biases of experts whose weights have
        # adapters are gathered in another order than it recorded.
        case["model"] = "mixtral"
    check(engine, [case])


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_linears_in_4_bits(engine):
    """FSDP2 shards their bytes; in each forward bitsandbytes then wraps the gathered weight. The
    dtypes are values of `bnb_4bit_quant_storage`."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    setting = {"stage": 3, "zero": NOTHING_CACHED} if engine == "deepspeed" else {}
    cases = [
        {**setting, "lora": True, "few_bits": dtype, "steps": 2} for dtype in ("float32", "uint8")
    ]
    check(engine, cases)


@pytest.mark.full
def test_linears_in_8_bits():
    """Under DDP. FSDP2 and ZeRO-3 would shard the numbers of 8 bits without the scales, which
    bitsandbytes has in an attribute of the weight."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    check("ddp", [{"lora": True, "few_bits": "int8", "steps": 2}])


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_router_loss(engine):
    """Its gradient comes through router logits, which leave the layer beside its hidden states."""
    setting = {"stage": 3, "zero": NOTHING_CACHED} if engine == "deepspeed" else {}
    check(engine, [{**setting, "model": "qwen3_moe", "router": True, "experts": "grouped_mm"}])


@pytest.mark.full
@pytest.mark.parametrize(("engine", "case"), listed(BF16_CASES), ids=str)
def test_bf16_is_as_precise_as_the_unpatched_engine(engine, case):
    # one ratio of two errors has a spread of 4 %
    draws = {"steps": 16 // case.get("accumulation", 1), "longer": 4}
    cases = [{**case, **draws, "dtype": "bfloat16", "model": model} for model in ("llama", "qwen3")]
    for row, case in zip(run(engine, cases), cases, strict=True):
        stock = row["unpatched"]["single process"]["gradients"]
        for when in ("before", "after"):
            ours = row[when]["single process"]["gradients"]
            print(
                case,
                "patched",
                when,
                f"error {ours:.3e}, unpatched {stock:.3e}, ratio {ours / stock:.3f}",
            )
            assert 1e-3 < ours <= MAX_HALF_ERROR_RATIO * stock


FEW_BITS_IN_BF16 = {
    "adapted experts": {"model": "mixtral", "lora": "experts"},
    "4-bit experts": {"model": "mixtral", "lora": True, "packed": True},
    "adapted 4-bit experts": {"model": "mixtral", "lora": "experts", "packed": True},
    "4-bit Linears": {"lora": True, "few_bits": "bfloat16"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", FEW_BITS_IN_BF16)
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_few_bits_in_bf16(engine, name):
    """As precise as the unpatched engine, beside float32 with the decoded weights. A token's number
    chooses its experts."""
    if "few_bits" in FEW_BITS_IN_BF16[name]:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    setting = {"stage": 3, "zero": NOTHING_CACHED} if engine == "deepspeed" else {}
    steps = 16 if "few_bits" in FEW_BITS_IN_BF16[name] else 8  # few tokens a step
    draws = {"steps": steps, "longer": 2, "dtype": "bfloat16", "patched": ["before"]}
    [row] = run(engine, [{**setting, **FEW_BITS_IN_BF16[name], **draws}])
    stock = row["unpatched"]["single process"]["gradients"]
    ours = row["before"]["single process"]["gradients"]
    print(f"error {ours:.3e}, unpatched {stock:.3e}, ratio {ours / stock:.3f}")
    assert row["before"]["paths"] == ["streams"]
    assert 1e-3 < ours <= MAX_HALF_ERROR_RATIO * stock


@pytest.mark.full
def test_a_rank_with_one_row_gathers_for_the_trials_of_the_other():
    """It shares nothing, but the model is tried at the first call of every rank."""
    (row,) = run("ddp", [{**ON_ONE_RANK, "engine": "fsdp", "alone": True}])
    results = row["before"]
    for reference in ("unpatched", "single process"):
        assert all(value <= bars_of({})[name] for name, value in results[reference].items()), row
    assert "were computed as" in results["shared"][0]
