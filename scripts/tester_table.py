"""Writes docs/transformers-testers.md: `python scripts/tester_table.py TREE [FAMILY ...]`.

TREE is a source tree of transformers, whose `tests/models/*/test_modeling_*.py` build a tiny model
of every class. Every class runs in a process of its own, forked from one that has imported
everything. About twenty minutes on one core. With names of families (folders of tests/models) only
these are run, and nothing is written.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import inspect
import multiprocessing
import os
import re
import sys
import textwrap
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "transformers-testers.md"
CHUNK_SIZE = 3
LIMIT = 240.0  # seconds for a class
EXACT = 1e-10
RANDOM = (
    "dropout",
    "pdrop",
    "jitter",
    "layerdrop",
    "drop_rate",
    "drop_path",
    "mask_time_prob",
    "mask_feature_prob",
)
UNUSED = tuple(
    f"tests.test_{name}_mixin" for name in ("pipeline", "tensor_parallel", "fsdp", "training")
)
WANTED = re.compile("CausalLM|ConditionalGeneration|LMHead|DoubleHeads|2Text|ToText")
MODULE = re.compile(r"No module named '([^']+)'")
NAME = re.compile(r"cannot import name '([^']+)' from '([^']+)'")


@dataclasses.dataclass
class Row:
    """A model class of a family: what became of it, why if it does not stream, and the figures if
    it was run."""

    family: str
    model: str
    outcome: str
    why: str = ""
    layers: str = ""
    head: str = ""
    error: float | None = None

    def __str__(self) -> str:
        error = "" if self.error is None else f"{self.error:.0e}"
        return " | ".join(
            (self.family, self.model, self.outcome, self.layers, self.head, error, self.why)
        )


def main() -> None:
    tree, *families = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[0] = tree  # instead of this folder; `tests` is theirs from here on
    import torch

    import streambp  # noqa: F401 - before the forks

    torch.set_num_threads(1)
    for name in UNUSED:
        sys.modules[name] = Absent(name)
    rows: list[Row] = []
    paths = sorted(Path(tree).glob("tests/models/*/test_modeling_*.py"))
    for path in paths:
        family = path.parent.name
        if families and family not in families:
            continue
        try:
            module = import_with_stand_ins(f"tests.models.{family}.{path.stem}")
        except Exception as error:
            rows.append(Row(family, path.stem, "not imported", f"{type(error).__name__}: {error}"))
            print(rows[-1], flush=True)
            continue
        for tester, model_class in sorted(testers(module), key=lambda pair: pair[1].__name__):
            rows.append(in_a_process(tester, model_class, family))
            print(rows[-1], flush=True)
    if not families:
        TARGET.write_text(page(rows, tree))


def import_with_stand_ins(name: str) -> types.ModuleType:
    """Import, with stand-ins for what the tests want for other purposes: packages, and helpers of
    another transformers."""
    for _ in range(40):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing, absent = NAME.search(str(error)), MODULE.search(str(error))
            if missing:
                setattr(sys.modules[missing[2]], missing[1], stand_in(missing[1]))
            elif absent and not absent[1].startswith("transformers.models"):
                sys.modules[absent[1]] = Absent(absent[1])
            else:
                raise
    raise ImportError(f"{name} misses more than forty names")


class Absent(types.ModuleType):
    """In place of a package that is not installed."""

    __path__: list[str] = []  # noqa: RUF012 - of the module, not of instances

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


class StandIn(type):
    """A class that may be a base, a decorator, or something with attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("stands_in"):
            return args[0] if args and callable(args[0]) else lambda decorated: decorated
        return super().__call__(*args, **kwargs)


def stand_in(name: str) -> type:
    return StandIn(name, (), {"stands_in": True})


def testers(module: types.ModuleType) -> Iterator[tuple[type, type]]:
    """The module's test classes that build models, each with the model classes that it builds."""
    found: dict[str, tuple[type, type]] = {}
    for test in vars(module).values():
        if not (
            inspect.isclass(test)
            and issubclass(test, unittest.TestCase)
            and test.__module__ == module.__name__
        ):
            continue
        try:
            case = test()
            case.setUp()
            classes = case.all_model_classes if hasattr(case, "model_tester") else ()
        except Exception as error:
            print(module.__name__, test.__name__, short(error), flush=True)
            continue
        for model_class in classes:
            if (
                inspect.isclass(model_class)
                and not isinstance(model_class, StandIn)
                and WANTED.search(model_class.__name__)
            ):
                found.setdefault(model_class.__name__, (test, model_class))
    yield from found.values()


def in_a_process(test: type, model_class: type, family: str) -> Row:
    """What `row` says, or that it took too long or took its process down."""
    row_of = Row(family, model_class.__name__, "crashed", "its process ended")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=lambda: theirs.send(dataclasses.asdict(row(test, model_class, family)))
    )
    process.start()
    theirs.close()
    try:
        if ours.poll(LIMIT):
            return Row(**ours.recv())
        row_of.why = f"took longer than {LIMIT:.0f} s"
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    return row_of


def row(test: type, model_class: type, family: str) -> Row:
    """Build, run unpatched, patch, run, compare."""
    import pytest
    import torch

    import streambp

    oracle, checks = load("tests/oracle"), load("scripts/tester_checks")
    result = Row(family, model_class.__name__, "")
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        oracle.lift_float32_casts(patch)
        try:
            model, batch = build(test, model_class)
            size = checks.chunk_size_for(batch, CHUNK_SIZE)
            ours = streambp.patch(copy.deepcopy(model), streambp.StreamConfig(chunk_size=size))
        except streambp.StreamBPError as error:
            return dataclasses.replace(result, outcome="refused", why=short(error))
        except Exception as error:
            return dataclasses.replace(result, outcome="not built", why=short(error))
        try:
            loss, expected = gradients(model, batch)
        except Exception as error:
            return dataclasses.replace(result, outcome="not run unpatched", why=short(error))
        chunks = checks.count_chunks(patch)
        try:
            found_loss, found = gradients(ours, batch)
        except streambp.StreamBPError as error:
            return dataclasses.replace(
                result, outcome="refused in the first step", why=short(error)
            )
        except Exception as error:
            return dataclasses.replace(result, outcome="crashed", why=short(error))
        compared(
            result,
            described := streambp.describe(ours),
            (loss, expected),
            (found_loss, found),
            oracle,
        )
        if result.error is not None and not result.error <= EXACT:
            noise = oracle.worst_error(gradients(model, batch)[1], expected)
            result.why = f"two unpatched runs differ by {noise:.0e}; {result.why}"
            result.outcome = result.outcome if result.error <= 2 * noise else "INEXACT"
        nothing = checks.why_nothing(described, chunks, expected)
        if nothing and result.outcome in ("streams", "runs whole"):
            result.outcome, result.why = "shows nothing", nothing
        return result


def compared(result: Row, description: Any, expected: Any, found: Any, oracle: Any) -> None:
    """Fill in what the patched model did, and how far its loss and gradients are off."""
    paths = [layer.path for layer in description.layers]
    result.layers = ", ".join(
        f"{paths.count(path)} {path}" for path in ("streams", "checkpoints") if path in paths
    )
    result.why = "; ".join(sorted({layer.reason for layer in description.layers} - {""}))
    result.head = next(
        (kind for kind in ("blockwise", "logits", "none") if kind in description.head),
        description.head,
    )
    if found[1].keys() != expected[1].keys():
        differing = sorted(found[1].keys() ^ expected[1].keys())
        result.outcome, result.why = "INEXACT", f"gradients of {differing[:3]} on one side only"
        return
    loss_error = float(abs(found[0] - expected[0]) / abs(expected[0]).clamp(min=1e-30))
    result.error = max(oracle.worst_error(found[1], expected[1]), loss_error)
    result.outcome = "streams" if "streams" in paths else "runs whole"


def load(name: str) -> Any:
    """A module of this project; by path, because `tests` is theirs here."""
    spec = importlib.util.spec_from_file_location(
        f"streambp_{Path(name).stem}", ROOT / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(test: type, model_class: type) -> tuple[Any, dict[str, Any]]:
    """The tester's model in float64 and train mode with nothing random in it, and its inputs, with
    random labels."""
    import torch

    torch.manual_seed(0)
    case = test()
    case.setUp()
    config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
    config = copy.deepcopy(config)
    make_deterministic(config)
    texts = (config, getattr(config, "text_config", None))
    # their sdpa leaves it out
    if any(getattr(text, "attn_logit_softcapping", None) is not None for text in texts):
        config._attn_implementation = "eager"
    model = model_class(config).double().train()
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.p = 0.0
    plain = case._prepare_for_class(copy.deepcopy(inputs), model_class)
    try:
        labelled = case._prepare_for_class(copy.deepcopy(inputs), model_class, return_labels=True)
    except Exception:
        labelled = plain
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    accepted = inspect.signature(model.forward).parameters
    batch = {name: value for name, value in labelled.items() if name in accepted or name in plain}
    load("scripts/tester_checks").give_every_row_a_token(batch)
    if "labels" in batch and not batch["labels"].is_floating_point():
        batch["labels"] = torch.randint(
            0, classes_of(model, batch["labels"].dim()), batch["labels"].shape
        )
        leave_out_what_padding_predicts(batch)
    batch = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }
    batch.pop("use_cache", None)
    return model, batch


def leave_out_what_padding_predicts(batch: dict[str, Any]) -> None:
    """Left padding reads nothing, for which eager attention gives the mean over all tokens and
    streamed layers 0."""
    mask, labels = batch.get("attention_mask"), batch["labels"]
    if mask is not None and mask.shape == labels.shape and labels.dim() == 2:
        empty = mask.cumsum(-1) == 0
        labels[empty] = -100  # some models shift no labels
        labels[:, 1:][empty[:, :-1]] = -100


def classes_of(model: Any, dims: int) -> int:
    """How many different labels there are: the vocabulary of a language model, two for everything
    else."""
    head = model.get_output_embeddings() if dims > 1 else None
    weight = getattr(head, "weight", None)
    return 2 if weight is None else weight.shape[0]


def make_deterministic(config: Any) -> None:
    """No dropout in a config and its sub-configs, and experts that know float64."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            make_deterministic(value)
    config._experts_implementation = "eager"


def gradients(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The loss, or the mean square of what the model returns if that has none, and its
    gradients."""
    import torch

    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    output = model(**copy.deepcopy(batch))
    loss = output.get("loss") if hasattr(output, "get") else None
    if loss is None:
        fields = output.values() if hasattr(output, "values") else output
        parts = [part for part in fields if isinstance(part, torch.Tensor) and part.requires_grad]
        loss = sum(part.square().mean() for part in parts)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def short(error: Exception) -> str:
    text = re.sub(r"/\S+/(?=\S)", "", " ".join(str(error).split()))
    text = text.split("cannot be streamed. ", 1)[-1].split(". Use gradient checkpointing for it")[0]
    return (
        text[:200]
        if type(error).__module__.startswith("streambp")
        else f"{type(error).__name__}: {text[:160]}"
    )


HEADER = """# transformers' own tiny models

Every causal-language-model and conditional-generation class that the testers of transformers' test suite build, with their
configurations and inputs (images, audio, random padding, no row of padding alone) and random labels (none that left padding
predicts): patched with chunks of {chunk_size} positions (a shorter text's last chunk has one) and compared with the
unpatched model in float64, inner float32 casts lifted, train mode, dropout off: the loss and all parameters' gradients, the
same set of them. *error*: the worst over both, relative to each gradient (tests/oracle.py). Exact: at most {exact:.0e}.

Made by `python scripts/tester_table.py TREE` with the tests of transformers {tests}, run with transformers {transformers}
and torch {torch}.

{counts}

*streams*: so many layers run in chunks; *checkpoints*: these run whole under torch's checkpoint, which costs memory.
*head*: whether the loss is computed without logits.
"""
SECTIONS = {
    "INEXACT": "Inexact",
    "crashed": "Crashed where the unpatched model runs",
    "streams": "Exact and streams",
    "runs whole": "Exact and runs whole",
    "shows nothing": "Agrees, and shows nothing",
    "refused in the first step": "Refused in the first step",
    "refused": "Refused when patched",
    "not run unpatched": "Not run: the unpatched model does not take the tester's inputs in float64",
    "not built": "Not run: the tester does not build its model here",
    "not imported": "Not run: the test module is not imported here",
}
NO_DECODER = (
    "It has no stack of transformers decoder layers",
    "its attention is bidirectional",
    "is bidirectional",
)


def page(rows: list[Row], tree: str) -> str:
    """The table as Markdown."""
    import torch
    import transformers

    encoders = [
        row
        for row in rows
        if row.outcome == "refused" and any(why in row.why for why in NO_DECODER)
    ]
    listed = {
        name: [row for row in rows if row.outcome == name and row not in encoders]
        for name in SECTIONS
    }
    counts = [
        f"{len(found)} {SECTIONS[name][0].lower() + SECTIONS[name][1:]}"
        for name, found in listed.items()
    ]
    version = re.search(r'version="([^"]+)"', (Path(tree) / "setup.py").read_text())
    text = HEADER.format(
        chunk_size=CHUNK_SIZE,
        exact=EXACT,
        tests=version[1] if version else "an unknown version",
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        counts="\n".join(f"- {count}" for count in [*counts, f"{len(encoders)} no decoders"]),
    )
    for name, found in listed.items():
        text += f"\n## {SECTIONS[name]}\n\n" + (table(found, name) if found else "None.\n")
    text += (
        "\n## No decoders\n\nEncoders, encoder-decoders and models without transformers' decoder "
        "layers; refused when "
    )
    text += (
        "patched.\n\n" + textwrap.fill(", ".join(row.model for row in encoders) + ".", 125) + "\n"
    )
    return text


def table(rows: list[Row], outcome: str) -> str:
    if outcome in ("streams", "runs whole", "INEXACT"):
        lines = [
            "| family | class | layers | head | error | why not all in chunks |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r.family} | {r.model} | {r.layers} | {r.head} | {r.error or 0:.0e} | "
            f"{cell(r.why)} |"
            for r in rows
        ]
    else:
        lines = ["| family | class | reason |", "|---|---|---|"]
        lines += [f"| {r.family} | {r.model} | {cell(r.why)} |" for r in rows]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
