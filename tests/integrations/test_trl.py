"""Stream*Trainer against TRL's own: same seeds and data, SGD, some steps, float64 with float32
casts lifted on both.

covers: integrations/trl/__init__.py, integrations/trl/dpo.py, integrations/trl/grpo.py,
  integrations/trl/settings.py, integrations/trl/sft.py, integrations/trl/trainer.py,
  model/fused_head.py
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import streambp
from tests import zoo
from tests.families import VOCABULARY, build, mix_neighbours
from tests.oracle import lift_float32_casts, relative_l2, worst_error
from tests.seeds import seed_of, seed_torch, seeded
from tests.test_foreign_forwards import fused_forward
from tests.versions import HYBRID_PATHS

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
from datasets import Dataset
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from streambp.integrations.trl import (
    StreamDPOConfig,
    StreamDPOTrainer,
    StreamGRPOConfig,
    StreamGRPOTrainer,
    StreamSFTConfig,
    StreamSFTTrainer,
)


class FullLogits:
    """In place of TRL's kernel, which computes in float32 whatever it is given: the same values
    from full logits."""

    calls = 0

    @classmethod
    def apply(cls, hidden, weight, bias, labels, temperature, chunk, softcap, scale, outputs):
        cls.calls += 1
        logits = torch.nn.functional.linear(hidden, weight, bias) * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        log_p = (logits / temperature).log_softmax(-1)
        fields = {
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
            "mean_logits": (logits / temperature).mean(-1).detach(),
            "is_top1": logits.argmax(-1) == labels,
        }
        label_log_probs = log_p.gather(-1, labels[:, None])[:, 0]
        return label_log_probs, *(fields[name] if name in outputs else None for name in fields)


@pytest.fixture(autouse=True)
def exact_stock_head(request, monkeypatch):
    if "trls_kernel" not in request.keywords:
        lift_float32_casts(monkeypatch)
        monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", FullLogits)


STREAM_ARGUMENTS = {"stream_chunk_size": "5"}
STEPS = 4


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    backend = Tokenizer(WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def words(generator, low, high):
    count = int(torch.randint(low, high, (), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (count,), generator=generator))


def texts():
    generator = seeded(0)
    return Dataset.from_list([{"text": words(generator, 5, 30)} for _ in range(24)])


def pairs():
    generator = seeded(0)
    return Dataset.from_list(
        [
            {
                "prompt": words(generator, 3, 8),
                "chosen": " " + words(generator, 4, 12),
                "rejected": " " + words(generator, 1, 12),
            }
            for _ in range(24)
        ]
    )


def prompts():
    generator = seeded(0)
    return Dataset.from_list([{"prompt": words(generator, 2, 9)} for _ in range(16)])


def train(
    trainer_class,
    config_class,
    dataset,
    folder,
    model=None,
    trainer=None,
    patch_with=None,
    **settings,
):
    """STEPS SGD steps from the same weights; the log, and all parameters afterwards.

    patch_with: patches the finished trainer's model.
    """
    model = build("qwen3", torch.float64) if model is None else model
    arguments = config_class(
        output_dir=str(folder),
        **{
            "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.1,
            "optim": "sgd", "report_to": [], "use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "bf16": False,
            "save_strategy": "no", "lr_scheduler_type": "constant", "seed": seed_of(3), **settings,
        },
    )  # fmt: skip
    created_trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer(),
        **(trainer or {}),
    )
    if patch_with is not None:
        streambp.patch(created_trainer.model, patch_with)
    created_trainer.train()
    log = [entry for entry in created_trainer.state.log_history if "loss" in entry]
    return (
        log,
        {name: p.detach().clone() for name, p in created_trainer.model.named_parameters()},
        created_trainer,
    )


IGNORED_LOG_KEYS = {"epoch", "learning_rate", "step_time"}


def compare(expected, streamed, tolerance=1e-9):
    """Metrics of every step and the weights after the last."""
    (expected_log, expected_weights, _), (log, weights, _) = expected, streamed
    assert len(log) == len(expected_log) == STEPS
    for ours, theirs in zip(log, expected_log, strict=True):
        ours = {key: value for key, value in ours.items() if not key.startswith("stream_")}
        assert ours.keys() == theirs.keys()
        # With equal rewards, which of them is larger is rounding.
        undecided = (
            {"rewards/accuracies"} if abs(theirs.get("rewards/margins", 1.0)) < 1e-7 else set()
        )
        for key in ours.keys() - IGNORED_LOG_KEYS - undecided:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-7), key
    assert worst_error(weights, expected_weights) <= tolerance


@pytest.fixture(scope="module")
def trained_by_trl():
    """What `SFTTrainer` makes of texts(), once for all that is compared with it."""
    return []


@pytest.fixture
def expected_sft(trained_by_trl, exact_stock_head, tmp_path):
    if not trained_by_trl:
        trained_by_trl.append(train(SFTTrainer, SFTConfig, texts(), tmp_path))
    return trained_by_trl[0]


SFT = {
    "plain": {"max_length": 32},
    "packed": {"max_length": 32, "packing": True},
    "padding-free": {"max_length": None, "padding_free": True},
    "dft": {"max_length": 32, "loss_type": "dft"},
}


@pytest.mark.fast("dft")
@pytest.mark.parametrize("kind", SFT)
def test_sft(kind, tmp_path, attended_chunks):
    expected = train(SFTTrainer, SFTConfig, texts(), tmp_path, **SFT[kind])
    assert not attended_chunks
    streamed = train(
        StreamSFTTrainer, StreamSFTConfig, texts(), tmp_path, **STREAM_ARGUMENTS, **SFT[kind]
    )
    assert attended_chunks
    compare(expected, streamed)
    assert "blockwise" in str(streambp.describe(streamed[2].model))


@pytest.mark.full
def test_sft_of_a_hybrid(tmp_path):
    """Qwen3.5: a layer with linear attention and one with softmax attention."""
    settings = {"gradient_accumulation_steps": 1, **SFT["plain"]}
    expected = train(
        SFTTrainer, SFTConfig, texts(), tmp_path, model=zoo.build("qwen3_5_text"), **settings
    )
    model = zoo.build("qwen3_5_text")
    streamed = train(
        StreamSFTTrainer,
        StreamSFTConfig,
        texts(),
        tmp_path,
        model=model,
        **STREAM_ARGUMENTS,
        **settings,
    )
    compare(expected, streamed)
    assert {layer.path for layer in streambp.describe(model).layers} == HYBRID_PATHS
    assert {layer.kind for layer in streambp.describe(model).layers} == {"Qwen3_5DecoderLayer"}


@pytest.mark.full
@pytest.mark.trls_kernel
def test_sft_in_float32(tmp_path):
    """With TRL's own kernel: no further from it than twice the distance between two of its
    attention kernels."""
    weights = []
    for attention in ("sdpa", "eager"):
        model = build("qwen3")
        model.set_attn_implementation(attention)
        weights.append(
            train(SFTTrainer, SFTConfig, texts(), tmp_path, model=model, **SFT["plain"])[1]
        )
    settings = {**STREAM_ARGUMENTS, **SFT["plain"]}
    ours = train(
        StreamSFTTrainer, StreamSFTConfig, texts(), tmp_path, model=build("qwen3"), **settings
    )[1]
    assert relative_l2(ours, weights[0]) <= 2 * relative_l2(weights[1], weights[0])


@pytest.mark.full
def test_patch_and_trls_own_trainer(tmp_path, attended_chunks, expected_sft):
    model = streambp.patch(build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5))
    streamed = train(SFTTrainer, SFTConfig, texts(), tmp_path, model=model)
    assert attended_chunks
    compare(expected_sft, streamed)


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model on disk: TRL loads the reference model from where the policy came from."""
    folder = str(tmp_path_factory.mktemp("model"))
    build("qwen3", torch.float64).save_pretrained(folder)
    return {"model": folder, "model_init_kwargs": {"dtype": "auto"}}


@pytest.mark.fast("full-sigmoid")
@pytest.mark.parametrize(
    ("lora", "loss_type"),
    [
        pytest.param(False, "sigmoid", id="full-sigmoid"),
        pytest.param(True, "ipo", id="peft-ipo"),
        pytest.param(False, "ipo", id="full-ipo", marks=pytest.mark.full),
        pytest.param(True, "sigmoid", id="peft-sigmoid", marks=pytest.mark.full),
    ],
)
def test_dpo(lora, loss_type, tmp_path, attended_chunks, checkpoint):
    def run(trainer_class, config_class, **settings):
        trainer = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
        seed_torch(0)
        model = {} if lora else checkpoint
        return train(
            trainer_class,
            config_class,
            pairs(),
            tmp_path,
            trainer=trainer,
            loss_type=[loss_type],
            **model,
            **settings,
        )

    expected = run(DPOTrainer, DPOConfig)
    streamed = run(StreamDPOTrainer, StreamDPOConfig, **STREAM_ARGUMENTS)
    assert attended_chunks
    compare(expected, streamed)
    assert expected[0][-1]["loss"] != expected[0][0]["loss"]


@pytest.mark.full
def test_dpo_with_layers_that_run_whole(tmp_path, monkeypatch):
    """TRL switches gradient checkpointing off for each forward, and on again before backward."""

    def run(trainer_class, config_class, **settings):
        model = build("qwen3", torch.float64)
        settings |= {"trainer": {"ref_model": copy.deepcopy(model)}, "gradient_checkpointing": True}
        return train(trainer_class, config_class, pairs(), tmp_path, model=model, **settings)

    mix_neighbours(monkeypatch, build("qwen3"))
    expected = run(DPOTrainer, DPOConfig)
    streamed = run(StreamDPOTrainer, StreamDPOConfig, **STREAM_ARGUMENTS)
    compare(expected, streamed)
    assert {layer.path for layer in streambp.describe(streamed[2].model).layers} == {"checkpoints"}


@pytest.mark.trls_kernel
def test_a_batch_without_a_label_has_fields_like_trls():
    """DPO gathers is_top1 as bools."""
    from trl.trainer.utils import add_fused_lm_head

    from streambp.integrations.trl.trainer import add_streamed_head
    from streambp.model.fused_head import OPTIONAL_OUTPUTS, FusedHead

    outputs = []
    ours = functools.partial(add_streamed_head, streambp.StreamConfig(chunk_size=5), FusedHead)
    for add in (add_fused_lm_head, ours):
        model = build("qwen3")
        add(model, outputs=OPTIONAL_OUTPUTS)
        ids = torch.randint(3, VOCABULARY, (2, 9))
        outputs.append(
            model(
                input_ids=ids,
                labels=torch.full_like(ids, -100),
                fused_lm_head=True,
                use_cache=False,
            )
        )
    expected, our_output = outputs
    for name in ("log_probs", *OPTIONAL_OUTPUTS, "label_mask"):
        ours, theirs = getattr(our_output, name), getattr(expected, name)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
    assert not our_output.is_top1.any()


def test_patching_anew_keeps_the_head_that_a_trainer_calls():
    """As `launch` does where evaluation turns out to want logits."""
    from streambp.integrations.trl.trainer import add_streamed_head
    from streambp.model.fused_head import FusedHead

    model, ids = (
        build("qwen3", torch.float64),
        torch.randint(3, VOCABULARY, (2, 13), generator=seeded()),
    )

    def scored():
        return model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False)

    config = streambp.StreamConfig(chunk_size=5)
    add_streamed_head(config, FusedHead, model, temperature=0.7, outputs=("log_probs", "entropy"))
    first_scores = scored()
    streambp.patch(model, streambp.StreamConfig(chunk_size=4, eval_logits=True))
    later_scores = scored()
    assert streambp.describe(model).chunk_size == "4"
    torch.testing.assert_close(
        later_scores.log_probs, first_scores.log_probs, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(later_scores.entropy, first_scores.entropy, rtol=1e-12, atol=1e-12)


def reward(completions, **_):
    """Depends on what was generated: how many words have an even number."""
    return [
        float(sum(int(word[1:]) % 2 == 0 for word in text.split() if word.startswith("w")))
        for text in completions
    ]


GRPO = {
    "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 7, "temperature": 0.9, "beta": 0.05,
    "num_iterations": 2,
}  # fmt: skip


@pytest.mark.parametrize("loss_type", [pytest.param("grpo", marks=pytest.mark.full), "dapo"])
def test_grpo(loss_type, tmp_path, attended_chunks, checkpoint):
    trainer = {"reward_funcs": reward}
    settings = {**GRPO, **checkpoint, "loss_type": loss_type}
    expected = train(GRPOTrainer, GRPOConfig, prompts(), tmp_path, trainer=trainer, **settings)
    streamed = train(
        StreamGRPOTrainer,
        StreamGRPOConfig,
        prompts(),
        tmp_path,
        trainer=trainer,
        **settings,
        **STREAM_ARGUMENTS,
    )
    assert attended_chunks
    compare(expected, streamed)
    assert any(entry["reward_std"] > 0 for entry in expected[0])


@pytest.mark.fast("model")
@pytest.mark.parametrize("form", ["model", "peft", "base of peft"])
def test_a_patched_model_keeps_its_settings(form, tmp_path, attended_chunks):
    model = build("qwen3", torch.float64)
    patched = model if form == "model" else peft.get_peft_model(model, peft.LoraConfig(**LORA))
    model = patched
    streambp.patch(
        patched.base_model if form == "base of peft" else patched,
        streambp.StreamConfig(chunk_size=7),
    )
    settings = {"max_steps": 1, "stream_chunk_size": "11"}
    _, _, trainer = train(
        StreamSFTTrainer, StreamSFTConfig, texts(), tmp_path, model=model, **settings
    )
    assert streambp.describe(trainer.model).chunk_size == "7"
    assert 7 in attended_chunks
    assert attended_chunks.count(11) < attended_chunks.count(7)  # a trial may have 11 tokens
    assert sum("_streambp" in module.__dict__ for module in trainer.model.modules()) == 1
    streambp.unpatch(trainer.model)
    assert not any("_streambp_forwards" in module.__dict__ for module in trainer.model.modules())


@pytest.mark.full
def test_evaluation_generation_and_resume(tmp_path):
    settings = {
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "eval_strategy": "steps",
        "eval_steps": STEPS // 2,
    }
    evaluation = {"trainer": {"eval_dataset": texts()}}
    expected = train(SFTTrainer, SFTConfig, texts(), tmp_path / "stock", **settings, **evaluation)
    streamed = train(
        StreamSFTTrainer,
        StreamSFTConfig,
        texts(),
        tmp_path / "ours",
        **settings,
        **evaluation,
        **STREAM_ARGUMENTS,
    )
    losses = [
        [e["eval_loss"] for e in run[2].state.log_history if "eval_loss" in e]
        for run in (expected, streamed)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    prompt = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        *(
            run[2].model.eval().generate(prompt, max_new_tokens=4, do_sample=False)
            for run in (expected, streamed)
        )
    )
    trainer = streamed[2]
    trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / f"checkpoint-{STEPS // 2}"))
    assert worst_error(dict(trainer.model.named_parameters()), streamed[1]) <= 1e-9


def test_settings_from_the_command_line():
    from trl import TrlParser

    config = TrlParser((StreamSFTConfig,)).parse_args_and_config(
        ["--stream_chunk_size", "512", "--stream_saves", "kv", "attn_out", "--output_dir", "x", "--bf16", "False",
         "--stream_rows", "packed"]
    )[0]  # fmt: skip
    assert config.stream_config() == streambp.StreamConfig(
        chunk_size=512, saves=("kv", "attn_out"), rows="packed"
    )
    with pytest.raises(streambp.StreamBPError, match="chunk_size"):
        StreamSFTConfig(output_dir="x", stream_chunk_size="big", bf16=False).stream_config()
    with pytest.raises(streambp.StreamBPError, match="saves is 'kv'"):
        StreamSFTConfig(output_dir="x", stream_saves="kv", bf16=False).stream_config()


def test_copies_of_a_trainers_model_score_with_their_own_weights(tmp_path):
    _, _, trainer = train(
        StreamSFTTrainer, StreamSFTConfig, texts(), tmp_path, max_steps=1, **STREAM_ARGUMENTS
    )
    model_copy = copy.deepcopy(trainer.model)
    with torch.no_grad():
        model_copy.lm_head.weight.mul_(2.0)
    ids = torch.randint(3, VOCABULARY, (2, 9))
    ours, theirs = (
        m(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        for m in (trainer.model, model_copy)
    )
    expected = (
        model_copy(input_ids=ids)
        .logits[:, :-1]
        .log_softmax(-1)
        .gather(-1, ids[:, 1:, None])[..., 0]
    )
    torch.testing.assert_close(theirs, expected)
    assert not torch.allclose(ours, theirs)


@pytest.mark.fast("grpo-True")
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        pytest.param(
            kind,
            lora,
            marks=() if (kind, lora) in (("dpo", False), ("grpo", True)) else pytest.mark.full,
        )
        for kind in ("sft", "dpo", "grpo")
        for lora in (False, True)
    ],
)
def test_patching_the_model_of_a_finished_trainer(
    kind, lora, tmp_path, attended_chunks, checkpoint
):
    """TRL has given it a head by then: ours takes its place, with TRL's settings, and `unpatch`
    gives it back."""
    classes, dataset, trainer, settings = {
        "sft": ((SFTTrainer, SFTConfig), texts, {}, SFT["dft"]),
        "dpo": ((DPOTrainer, DPOConfig), pairs, {}, {}),
        "grpo": (
            (GRPOTrainer, GRPOConfig),
            prompts,
            {"reward_funcs": reward},
            {**GRPO, "beta": 0.0},
        ),
    }[kind]

    def run(patch_with):
        seed_torch(0)
        with_lora = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
        model = {} if lora else checkpoint
        return train(
            *classes,
            dataset(),
            tmp_path,
            trainer={**trainer, **with_lora},
            patch_with=patch_with,
            **{**settings, **model},
        )

    expected = run(None)
    calls_before = FullLogits.calls
    streamed = run(streambp.StreamConfig(chunk_size=5))
    assert attended_chunks
    compare(expected, streamed)
    model = streamed[2].model
    assert streambp.describe(model).head == "blockwise loss, no logits"
    if kind != "dpo":  # its reference is another model, or the policy without its adapters
        assert FullLogits.calls == calls_before
    base = model.get_base_model() if lora else model
    streambp.unpatch(model)
    assert base.__dict__["forward"].__func__.__code__.co_name == "_fused_forward"


@pytest.mark.fast("True")
@pytest.mark.parametrize("patches_again", [False, True])
def test_patching_before_and_after_trl_gave_its_head(
    patches_again, tmp_path, attended_chunks, expected_sft
):
    """Before: layers stream under TRL's own head. Patched again afterwards, the head is ours."""
    config = streambp.StreamConfig(chunk_size=5)
    model = streambp.patch(build("qwen3", torch.float64), config)
    streamed = train(
        SFTTrainer,
        SFTConfig,
        texts(),
        tmp_path,
        model=model,
        patch_with=config if patches_again else None,
    )
    assert attended_chunks
    compare(expected_sft, streamed)
    head = streambp.describe(streamed[2].model).head
    theirs = (
        "as another library computes it: TRL's fused head replaced the model's forward after "
        "streambp.patch"
    )
    assert head == ("blockwise loss, no logits" if patches_again else theirs)


def test_copies_of_a_model_patched_after_trl_use_their_own_weights(tmp_path):
    config = streambp.StreamConfig(chunk_size=5)
    _, _, trainer = train(SFTTrainer, SFTConfig, texts(), tmp_path, max_steps=1, patch_with=config)
    model_copy = copy.deepcopy(trainer.model)
    with torch.no_grad():
        model_copy.lm_head.weight.mul_(2.0)
    ids = torch.randint(3, VOCABULARY, (2, 9))
    expected = model_copy.model(input_ids=ids).last_hidden_state @ model_copy.lm_head.weight.T
    expected = expected[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(
        model_copy(input_ids=ids, labels=ids, fused_lm_head=True).log_probs, expected
    )


@pytest.mark.full
def test_without_our_head_trls_stays(tmp_path, expected_sft):
    config = streambp.StreamConfig(chunk_size=5, head=False)
    calls_before = FullLogits.calls
    compare(expected_sft, train(SFTTrainer, SFTConfig, texts(), tmp_path, patch_with=config))
    assert FullLogits.calls > calls_before


@pytest.mark.full
def test_another_librarys_forward_on_the_class_leaves_the_head_to_trl(
    tmp_path, monkeypatch, attended_chunks, expected_sft
):
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", fused_forward)
    streamed = train(StreamSFTTrainer, StreamSFTConfig, texts(), tmp_path, **STREAM_ARGUMENTS)
    assert attended_chunks
    compare(expected_sft, streamed)
    assert "TRL's fused head" in streambp.describe(streamed[2].model).head
