"""Plans with the layers' frozen weights on the host: bytes and seconds by hand, and against steps
that are counted.

covers: planner/host_weights.py
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig

from streambp import cli
from streambp.cli import commands
from streambp.offload.ranges import bytes_on_host
from streambp.planner import Memory, Setting
from streambp.planner.count import StepCount
from streambp.planner.estimate import estimate
from streambp.planner.host_weights import (
    HOST_WEIGHTS_SUFFIX,
    add_copies,
    fewest_layers,
    first_layers,
)
from streambp.planner.launch_commands import launcher_settings
from streambp.planner.laws import Law
from streambp.planner.plan import plan_profile, put_weights_on_host
from streambp.planner.profile import (
    Method,
    ParameterGroup,
    Phase,
    bytes_between_steps,
    from_json,
    peak,
    to_json,
)
from streambp.planner.report import plan_table
from streambp.planner.seconds import min_hiding_length, seconds
from streambp.planner.skeleton import Skeleton
from streambp.planner.suggestions import Training, remedies
from streambp.planner.work import Work
from streambp.rates import DEVICES
from tests.families import build
from tests.offload.weights_runs import patched, weights_of, with_adapters
from tests.planner.laws import made_work
from tests.planner.test_estimates import made_up

GIB = 2**30
RATES = DEVICES["H200"]
LAYERS, SIZE = 10, 1_000_000
SIZES = (SIZE,) * LAYERS


def small_profile():
    """Ten layers of a million bytes each, beside a million of embeddings and head; 8 bytes a
    token."""
    work = (*made_work(3, 0.5, "forward"), *made_work(9, 1.5))
    born = Phase("backward 0", Law(200_000, 8, 5), 100_000)
    method = Method("streambp", (), "none", False, True, (born,), (born,), Law(), work)
    group = ParameterGroup("dense", 5_500_000, (LAYERS + 1) * SIZE, 50_000, 100_000)
    return dataclasses.replace(made_up(groups=(group,), methods=(method,)), frozen=SIZES)


def test_as_few_layers_as_it_takes():
    assert fewest_layers(SIZES, SIZE).layers == 3  # two more are at work
    assert fewest_layers(SIZES, SIZE + 1).layers == 4
    assert fewest_layers(SIZES, 100 * SIZE) == first_layers(SIZES, LAYERS)
    assert first_layers(SIZES, LAYERS).freed == 8 * SIZE
    assert first_layers((5, 7, 3), 3).last == 10
    assert first_layers((5, 7, 3), 3).largest == 7
    # of 4 bits, with a layer's decoded weights
    assert first_layers((5, 7, 3), 3, 4).freed == 15 - 2 * 7 - 4
    assert fewest_layers(SIZES, SIZE, SIZE).layers == 4


def test_copies_are_those_of_layers_on_the_host():
    step = {
        "forward": Work(100.0, traffic=10.0, from_host=4.0),
        "backward": Work(300.0),
        "head": Work(5.0),
    }
    works = add_copies(step, first_layers(SIZES, 5))
    assert works["forward"] == Work(50.0, traffic=5.0, from_host=2.0)
    assert works["forward" + HOST_WEIGHTS_SUFFIX] == Work(
        50.0, traffic=5.0, from_host=2.0 + 5 * SIZE
    )
    assert (
        works["backward" + HOST_WEIGHTS_SUFFIX].from_host == 3 * SIZE
    )  # the last two are there still
    assert works["head"] == step["head"]
    assert add_copies(step, None) == step


def test_weights_go_to_the_host_where_a_step_does_not_fit_otherwise():
    profile, length = small_profile(), 1000
    resident = plan_profile(profile, length, Memory(14_000_000, None, 0.0), Setting())
    assert resident.choice.on_host is None
    on_device = plan_profile(profile, length, resident.memory, Setting(weights="device"))
    assert any("weights on the host" in lever.change for lever in on_device.levers)
    for gpu_bytes, layers in ((11_000_000, 3), (8_000_000, 6), (4_100_000, 10)):
        memory = Memory(gpu_bytes, None, 0.0)
        choice = plan_profile(profile, length, memory, Setting()).choice
        assert choice.on_host.layers == layers, gpu_bytes
        assert choice.peak.total <= gpu_bytes
        assert choice.config.weights == ("cpu" if layers == LAYERS else "auto")
        assert choice.peak.weights == 11 * SIZE - first_layers(SIZES, layers).freed
        assert choice.peak.host == layers * SIZE
        assert plan_profile(profile, length, memory, Setting(weights="device")).choice is None
        assert (
            plan_profile(
                profile, length, Memory(gpu_bytes, layers * SIZE - 1, 0.0), Setting()
            ).choice
            is None
        )
    everywhere = plan_profile(
        profile, length, Memory(14_000_000, None, 0.0), Setting(weights="cpu")
    )
    assert everywhere.choice.on_host.layers == LAYERS
    assert (
        plan_profile(profile, length, Memory(4_100_000, None, 0.0), Setting(gpus=2)).choice is None
    )


@pytest.mark.parametrize(("options", "advice"), [({}, False), ({"optimizer_on_host": True}, True)])
def test_deepspeed_is_no_door(options, advice):
    """It starts a process group, in which weights on the host are refused."""
    setting = Setting(**options)
    choice = plan_profile(small_profile(), 1000, Memory(8_000_000, None, 0.0), setting).choice
    text = launcher_settings(choice, setting)["DeepSpeed"]
    assert text.startswith("not with weights on the host")
    assert ("on_host=True" in text) == advice


def test_seconds_are_the_longer_of_kernels_and_copies():
    profile = small_profile()
    method = profile.methods[0]
    slow = dataclasses.replace(RATES, link=1e6)
    resident, on_host = Setting(), Setting(on_host=first_layers(SIZES, LAYERS))
    # ten layers, and eight of them again
    assert seconds(method, 1000, 100, slow, on_host).total >= 18.0
    hidden = min_hiding_length(method, 100, RATES, on_host)
    assert hidden is not None
    assert min_hiding_length(method, 100, dataclasses.replace(RATES, link=1e-6), on_host) is None
    for length, as_long in ((hidden, True), (max(1, hidden - 1), hidden == 1)):
        ours = seconds(method, length, min(100, length), RATES, on_host).total
        is_equal = ours == pytest.approx(
            seconds(method, length, min(100, length), RATES, resident).total, rel=1e-9
        )
        assert is_equal == as_long


def test_remedies_name_the_host():
    profile = small_profile()
    plan = plan_profile(profile, 1000, Memory(8_000_000, None, 0.0), Setting(weights="device"))
    first_of_all = next(remedies(plan, 1000, Training(16), lambda how: profile))
    assert first_of_all.options == ("--weights", "auto")
    assert first_of_all.change == "the layers' weights on the host"
    read = commands.parse(
        ["plan", "MODEL", "--gpu-memory", "8GiB", "--lora", "16", *first_of_all.options]
    )
    assert read.weights == "auto"


def test_a_profile_goes_through_json():
    profile = small_profile()
    assert from_json(json.loads(json.dumps(to_json(profile)))) == profile


def test_the_table_says_it():
    text = plan_table(plan_profile(small_profile(), 1000, Memory(8_000_000, None, 0.0), Setting()))
    assert 'weights="auto"' in text
    assert "weights of the first 6 of 10 layers on the host" in text


CONFIG = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}


def counted_step(model, ids):
    """The most bytes that a step allocates on what stands for the device."""
    count = StepCount(None)
    with count:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return count.peak


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
def test_the_law_holds_on_a_model():
    """A plan of all layers on the host, against a step on a CPU: slots, the bytes that it
    allocates, the host's ranges."""
    length, chunk = 512, 128
    config = build("llama", **CONFIG).config
    profile = estimate(
        config, length, chunk_size=chunk, lora=4, device="cpu", dtype=torch.float32
    ).profile
    method = next(method for method in profile.methods if method.name == "streambp")
    setting = Setting(optimizer=0, on_host=first_layers(profile.frozen, len(profile.frozen)))
    expected = peak(profile, method, length, chunk, setting)

    model = with_adapters(build("llama", **CONFIG), rank=4).train()
    # a witness is much for so small a model
    model = patched(model, "cpu", chunk_size=chunk, compare_backward=False)
    ids = torch.randint(0, config.vocab_size, (1, length))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    weights = weights_of(model)
    on_host = {
        id(weight_slice.tensor)
        for layer_weights in weights.ranges.layers.values()
        for weight_slice in layer_weights.slices
    }
    on_device = sum(p.nbytes for p in model.parameters() if id(p) not in on_host)
    assert weights.ranges.bytes == pytest.approx(expected.host, rel=0.01)
    assert bytes_between_steps(profile, setting).weights == pytest.approx(
        on_device + weights.device_bytes, rel=0.01
    )
    peak_bytes = on_device + weights.device_bytes + counted_step(model, ids)
    assert peak_bytes == pytest.approx(expected.total, rel=0.03)


def test_bytes_of_layers_without_data():
    """Of a 70B model, whose weights are 2 bytes each."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    model = Skeleton(config, torch.bfloat16, 16, 16, "cuda").model
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    frozen = [sum(p.nbytes for p in layer.parameters() if not p.requires_grad) for layer in layers]
    assert bytes_on_host(model, layers) == (tuple(size + 512 for size in frozen), (0, 0))
    frozen, trained = bytes_on_host(model.requires_grad_(True), layers)
    assert not any(frozen)
    assert min(trained) > 0


@pytest.mark.full
def test_bytes_of_weights_of_few_bits():
    """A layer's decoded weights but for the largest; weights of 8 bits are refused, so that no plan
    has them."""
    config = build("llama", **CONFIG).config
    profiles = [
        estimate(config, 64, chunk_size=32, lora=4, bits=bits, device="cpu").profile
        for bits in (4, 8)
    ]
    layer = next(
        m for m in build("llama", **CONFIG).modules() if type(m).__name__ == "LlamaDecoderLayer"
    )
    sizes = sorted(2 * p.numel() for name, p in layer.named_parameters() if "proj" in name)
    assert profiles[0].decoded == sum(sizes[:-1])
    assert min(profiles[0].frozen) > 0
    assert profiles[1].frozen == ()
    assert put_weights_on_host(profiles[0], Setting()).on_host.decoded == profiles[0].decoded
    assert put_weights_on_host(profiles[1], Setting()) is None


LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.full
def test_the_command_plans_70b_on_24_gib(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    arguments = [
        "plan",
        str(file),
        "--lora",
        "16",
        "--gpu-memory",
        "24GiB",
        "--seq-len",
        "64k",
        "--no-cache",
    ]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "of 80 layers on the host" in text
    assert cli.main([*arguments, "--weights", "device"]) == 1
    text = capsys.readouterr().out
    assert "--weights auto" in text


QWEN = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_32B = {**QWEN, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
QWEN_14B = {**QWEN, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40}
GPT_OSS_120B = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 36, "num_local_experts": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
LORA, FULL = ("--lora", "16"), ("--full", "--weights", "cpu", "--optimizer-on-host")
# GiB of the device and of the host and seconds on an RTX 4090 at 65,536 tokens, and what ends a
# longer sequence.
PLANNED_BYTES = {
    "Llama-70B, LoRA": (LLAMA_70B, LORA, 22.0, 304.0, 365, "head"),
    "Qwen3-32B, LoRA": (QWEN_32B, LORA, 21.9, 169.1, 237, "head"),
    "gpt-oss-120b, LoRA": (GPT_OSS_120B, LORA, 18.3, 251.2, 47.9, "head"),
    "Qwen3-14B, full": (QWEN_14B, FULL, 11.8, 274.7, 109, "forward 39"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PLANNED_BYTES)
def test_the_command_says_what_24_gib_take(name, tmp_path, capsys):
    config, how, device, host, seconds, binds = PLANNED_BYTES[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert (
        cli.main(
            [
                "plan",
                str(file),
                *how,
                "--gpu-memory",
                "24GiB",
                "--seq-len",
                "64k",
                "--no-cache",
                "--json",
            ]
        )
        == 0
    )
    printed_plan = json.loads(capsys.readouterr().out)
    peak = printed_plan["choice"]["peak"]
    assert peak["total"] / GIB == pytest.approx(device, rel=0.03)
    assert peak["host"] / GIB == pytest.approx(host, rel=0.03)
    assert printed_plan["choice"]["seconds"]["total"] == pytest.approx(seconds, rel=0.03)
    assert printed_plan["binds"] == binds
