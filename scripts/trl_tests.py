"""TRL's own tests, stock and under `streambp launch`: `python scripts/trl_tests.py --tests DIR [-k
WORDS]`

DIR is the folder `tests` of a checkout of TRL whose release is the installed one or near it. The
tests ask the hub for tiny models and data; nothing is downloaded. A cache of stand-ins is made
first: models of the same classes with random weights, a tokenizer of bytes, and the texts of the
checkout's own script. What has no stand-in (images, remote code) cannot run, and neither can what
the stock run cannot do for another reason: both are counted with the reason. A test that passes in
stock has to pass under launch, in chunks of 8 tokens, without saves, so that everything streams.
`--files NAME ...` chooses files of DIR, `--part 1/4` each fourth test.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HUB = "trl-internal-testing"
CHECKOUT_VARIABLE = (
    "STREAMBP_TRL_CHECKOUT"  # of the environment: where the plugin finds the data's script
)
PART_VARIABLE = (
    "STREAMBP_TRL_PART"  # of the environment: "2/4" has each fourth test, from the second one on
)
SIZES = {
    "vocab_size": 272, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 2048, "rotary_dim": 4, "layer_types": None,
}  # fmt: skip
FILES = tuple(f"test_{name}_trainer.py" for name in ("sft", "dpo", "kto", "reward", "rloo", "grpo"))
LAUNCH = (
    "-m",
    "streambp",
    "launch",
    "--chunk-size",
    "8",
    "--saves",
    "",
    "--no-unpatched-runs",
    "--",
)
NO_HUB = re.compile(
    r"Offline|LocalEntryNotFound|couldn't connect|could not be found|does not appear to have|offline mode"
)


def tokenizer() -> Any:
    """One of bytes, with a template for chats."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    result = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    result.chat_template = template.read_text() if template.exists() else None
    return result


def stand_in(name: str, cache: Path) -> str | None:
    """Puts a model of the class that its name tells into a hub cache; why there is none."""
    import torch
    import transformers

    kind = getattr(transformers, name.split("-")[1], None)
    if kind is None or not re.search("For(CausalLM|SequenceClassification)$", kind.__name__):
        return "no stand-in for this class"
    try:
        config = kind.config_class()
        for field, value in SIZES.items():
            if hasattr(config, field):
                setattr(config, field, value)
        words = tokenizer()
        ends = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
        ends |= {"num_labels": 1} if kind.__name__.endswith("Classification") else {}
        config = kind.config_class(**{**config.to_dict(), **ends})
        torch.manual_seed(0)
        model = kind(config)
        target = cache / f"models--{HUB}--{name}" / "snapshots" / "0"
        model.save_pretrained(target)
        words.save_pretrained(target)
        (target.parent.parent / "refs").mkdir()
        (target.parent.parent / "refs" / "main").write_text("0")
    except Exception as error:
        return f"no stand-in: {type(error).__name__}: {str(error)[:80]}"
    return None


def datasets_of(checkout: Path) -> dict[str, Any]:
    """The sets of texts that the checkout's script makes, by their configuration's name."""
    from datasets import DatasetDict

    spec = importlib.util.spec_from_file_location(
        "zen", checkout / "scripts" / "generate_zen_dataset.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module, by_name, real = importlib.util.module_from_spec(spec), {}, DatasetDict.push_to_hub
    spec.loader.exec_module(module)
    DatasetDict.push_to_hub = lambda self, *_, config_name, **__: by_name.setdefault(
        config_name, self
    )
    try:
        module.main(0.1, True, "")
    finally:
        DatasetDict.push_to_hub = real
    return by_name


def pytest_configure() -> None:
    """As a plugin of pytest: `load_dataset` gives what the checkout's script makes, and TRL has the
    questions for packages (`is_joblib_available`) that the checkout's release had, and a function
    that fails for each name that it lost. All arguments of trainers choose the CPU: TRL's default,
    bfloat16, is refused otherwise where there is no GPU."""
    import datasets
    import transformers
    import trl
    from trl import import_utils

    original_init = transformers.TrainingArguments.__post_init__

    def on_cpu(self: Any) -> None:
        self.use_cpu = True
        original_init(self)

    transformers.TrainingArguments.__post_init__ = on_cpu

    source = (Path(os.environ[CHECKOUT_VARIABLE]) / "tests" / "testing_utils.py").read_text("utf-8")
    for name, package in set(re.findall(r"\b(is_(\w+)_available)\b", source)):
        if not hasattr(import_utils, name):
            is_installed = importlib.util.find_spec(package) is not None
            setattr(import_utils, name, lambda is_installed=is_installed: is_installed)
    for file in (Path(os.environ[CHECKOUT_VARIABLE]) / "tests").glob("test_*_trainer.py"):
        for import_node in (
            node
            for node in ast.parse(file.read_text("utf-8")).body
            if isinstance(node, ast.ImportFrom)
        ):
            # names that the installed release no longer has
            if (import_node.module or "").startswith("trl.trainer."):
                module = importlib.import_module(str(import_node.module))
                for name in (
                    alias.name for alias in import_node.names if not hasattr(module, alias.name)
                ):
                    setattr(
                        module,
                        name,
                        lambda *_, name=name, **__: pytest.fail(
                            f"TRL {trl.__version__} has no {name}"
                        ),
                    )
    real, hub_datasets = datasets.load_dataset, datasets_of(Path(os.environ[CHECKOUT_VARIABLE]))

    def load(path: str, name: str | None = None, split: str | None = None, **kwargs: Any) -> Any:
        if path != f"{HUB}/zen" or name not in hub_datasets:
            return real(path, name, split=split, **kwargs)
        return hub_datasets[name] if split is None else hub_datasets[name][split]

    datasets.load_dataset = load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first, step = map(int, os.environ[PART_VARIABLE].split("/"))
    items[:] = items[first - 1 :: step]


@pytest.fixture(autouse=True)
def streams(record_property: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of each test under launch, how many calls of layers streamed."""
    calls: list[None] = []
    if "STREAMBP_LAUNCH" in os.environ:
        from streambp.layer.function import StreamedLayer

        forward = StreamedLayer.forward
        counted = staticmethod(
            lambda *args, **kwargs: calls.append(None) or forward(*args, **kwargs)
        )  # type: ignore[func-returns-value]
        monkeypatch.setattr(StreamedLayer, "forward", counted)
    yield
    record_property("streams", len(calls))


def run(
    tests: Path, cache: Path, arguments: list[str], part: str, launched: bool, report: Path
) -> dict[str, tuple[str, str, int]]:
    """Each test's outcome, if it did not pass what it said last, and how many calls of layers
    streamed."""
    folder = Path(__file__).parent
    environment = {
        **os.environ,
        "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", CHECKOUT_VARIABLE: str(tests.parent),
        PART_VARIABLE: part, "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), str(folder.parent), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    plugins = ("-p", Path(__file__).stem, "-p", "no:cacheprovider")
    pytest = ("-m", "pytest", "-q", *plugins, "-o", "addopts=", f"--junitxml={report}")
    command = [
        sys.executable,
        *(LAUNCH if launched else ()),
        *((sys.executable,) if launched else ()),
        *pytest,
        *arguments,
    ]
    subprocess.run(
        command, cwd=tests.parent, env=environment, stdout=subprocess.DEVNULL, check=False
    )
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        message = "" if bad is None else f"{bad.get('message', '')} {bad.text or ''}"
        counts = (
            int(property_node.get("value", 0))
            for property_node in case.iter("property")
            if property_node.get("name") == "streams"
        )
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = (
            "passed" if bad is None else bad.tag,
            message,
            sum(counts),
        )
    return outcomes


def reason(outcome: str, message: str) -> str:
    """Why the stock run could not do a test, in a few words."""
    if NO_HUB.search(message):
        return "asks the hub for what has no stand-in"
    return f"{outcome}: {message.strip().splitlines()[0][:100] if message.strip() else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tests",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder tests of a checkout of TRL",
    )
    parser.add_argument("--files", nargs="*", default=FILES, metavar="NAME", help="of this folder")
    parser.add_argument("-k", default="", metavar="WORDS", help="as pytest takes it")
    parser.add_argument(
        "--part", default="1/1", metavar="N/M", help="each M-th test, from the N-th one on"
    )
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # without the checkout's own trl, which would stand before the installed one
        for folder in ("tests", "scripts"):
            shutil.copytree(args.tests.resolve().parent / folder, scratch / "checkout" / folder)
        tests = scratch / "checkout" / "tests"
        paths = [tests / name for name in args.files]
        arguments = [*map(str, paths), *(["-k", args.k] if args.k else [])]
        text = "".join(path.read_text("utf-8") for path in paths)
        models = set(re.findall(rf"{HUB}/(tiny-[\w.-]+)", text))
        absent_names = {
            name: why
            for name in sorted(models)
            if (why := stand_in(name, scratch / "hub")) is not None
        }
        print(
            f"stand-ins for {len(models) - len(absent_names)} of {len(models)} models; none "
            f"for {', '.join(absent_names) or 'no other'}"
        )
        stock, launched = (
            run(tests, scratch, arguments, args.part, how, scratch / f"{how}.xml")
            for how in (False, True)
        )
    passed, ours = (
        {name for name, (how, *_) in outcomes.items() if how == "passed"}
        for outcomes in (stock, launched)
    )
    streamed = sum(launched[name][2] > 0 for name in ours)
    print(
        f"stock: {len(stock)} tests, {len(passed)} passed; under streambp launch: {len(ours)} "
        f"passed, {streamed} of them with streamed layers"
    )
    reasons = Counter(reason(*stock[name][:2]) for name in sorted(stock.keys() - passed))
    for why, number in reasons.most_common():
        print(f"  not runnable in stock: {number} x {why}")
    for title, names in (
        ("passed in stock alone", passed - ours),
        ("passed under launch alone", ours - passed),
    ):
        print(f"{title}: {len(names)}")
        for name in sorted(names):
            message = (launched if name in passed else stock).get(name, ("", "did not run"))[1]
            print(f"  {name}: {message.strip().splitlines()[0][:160] if message.strip() else ''}")
    sys.exit(bool(passed - ours))


if __name__ == "__main__":
    main()
