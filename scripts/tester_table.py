"""Writes docs/transformers-testers.md:
`python scripts/tester_table.py TREE [--rows FILE] [--form FORM] [FAMILY ...]`.

TREE is a source tree of transformers, whose `tests/models/*/test_modeling_*.py` build a tiny model
of every class. Every class runs in each form (settings and padding, `FORMS`), each time in a
process of its own, forked from one that has imported everything. About an hour on one core. FILE
gets each row as a line of JSON, and a run that finds rows there does not repeat them. With a form,
or with names of families (folders of tests/models), only these are run, and no page is written.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "transformers-testers.md"
CHUNK_SIZE = 3
TIMEOUT_SECONDS = 240.0  # seconds for a class
MAX_FLOAT64_ERROR = 1e-10
MAX_FLOAT32_ERROR = 1e-5  # of the whole gradient, for classes that do not run in float64
# settings, the side that is padded, and if a row is packed
FORMS: dict[str, dict[str, Any]] = {
    "chunks": {"chunk_size": CHUNK_SIZE},
    "defaults, right padding": {"pad": "right"},
    "defaults, left padding": {"pad": "left"},
    "offload": {"chunk_size": CHUNK_SIZE, "offload": "cpu"},
    "packed": {"chunk_size": CHUNK_SIZE, "documents": "as_given", "packed": True},
}
MAIN_FORM = "chunks"  # the form whose rows the page shows one by one
RANDOM_SETTINGS = (
    "dropout",
    "pdrop",
    "jitter",
    "layerdrop",
    "drop_rate",
    "drop_path",
    "mask_time_prob",
    "mask_feature_prob",
)
UNUSED_ARGUMENTS = tuple(
    f"tests.test_{name}_mixin" for name in ("pipeline", "tensor_parallel", "fsdp", "training")
)
TESTED_CLASS = re.compile("CausalLM|ConditionalGeneration|LMHead|DoubleHeads|2Text|ToText")
MISSING_MODULE = re.compile(r"No module named '([^']+)'")
MISSING_NAME = re.compile(r"cannot import name '([^']+)' from '([^']+)'")


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
    form: str = MAIN_FORM

    def __str__(self) -> str:
        error = "" if self.error is None else f"{self.error:.0e}"
        return " | ".join(
            (
                self.form,
                self.family,
                self.model,
                self.outcome,
                self.layers,
                self.head,
                error,
                self.why,
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("tree")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--form", choices=FORMS, action="append")
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[0] = arguments.tree  # instead of this folder; `tests` is theirs from here on
    import torch

    import streambp  # noqa: F401 - before the forks

    torch.set_num_threads(1)
    for name in UNUSED_ARGUMENTS:
        sys.modules[name] = AbsentPackage(name)
    row_cache = StoredRows(arguments.rows)
    rows: list[Row] = []
    for path in sorted(Path(arguments.tree).glob("tests/models/*/test_modeling_*.py")):
        if not arguments.families or path.parent.name in arguments.families:
            rows += rows_of(path, arguments.form or list(FORMS), row_cache)
    print(counts_by_form(rows))
    if not (arguments.families or arguments.form):
        TARGET.write_text(page(rows, arguments.tree))


class StoredRows:
    """Rows of earlier runs in a file, one a line of JSON; None: no file.

    A test module is in the file once all its rows are, so that a run which ends early loses the
    rows of one module.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self.modules = [json.loads(line) for line in lines]

    def rows(self, path: Path, forms: list[str]) -> list[Row] | None:
        """Return the rows of a test module in these forms; None if it has not been run."""
        for module in self.modules:
            if module["path"] == path.name and module["forms"] == forms:
                return [Row(**row) for row in module["rows"]]
        return None

    def add(self, path: Path, forms: list[str], rows: list[Row]) -> None:
        """Append the rows of a test module."""
        if self.file is not None:
            module = {
                "path": path.name,
                "forms": forms,
                "rows": [dataclasses.asdict(row) for row in rows],
            }
            with self.file.open("a") as file:
                file.write(json.dumps(module) + "\n")


def rows_of(path: Path, forms: list[str], row_cache: StoredRows) -> list[Row]:
    """Return rows of all model classes of a test module, in all forms. Print those that are new."""
    rows = row_cache.rows(path, forms)
    if rows is None:
        rows = run_module(path, forms)
        row_cache.add(path, forms, rows)
    return rows


def run_module(path: Path, forms: list[str]) -> list[Row]:
    """Run all model classes of a test module in all forms, and print and return their rows."""
    family = path.parent.name
    rows: list[Row] = []
    try:
        module = import_with_stand_ins(f"tests.models.{family}.{path.stem}")
    except Exception as error:
        rows.append(Row(family, path.stem, "not imported", f"{type(error).__name__}: {error}"))
        print(rows[-1], flush=True)
        return rows
    for tester, model_class in sorted(testers(module), key=lambda pair: pair[1].__name__):
        for form in forms:
            # `patch` refuses a class in every form.
            if rows and rows[-1].outcome == "refused" and rows[-1].model == model_class.__name__:
                rows.append(dataclasses.replace(rows[-1], form=form))
                continue
            rows.append(in_a_process(tester, model_class, family, form))
            print(rows[-1], flush=True)
    return rows


def import_with_stand_ins(name: str) -> types.ModuleType:
    """Import, with stand-ins for what the tests want for other purposes: packages, and helpers of
    another transformers."""
    for _ in range(40):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing_name, absent = (
                MISSING_NAME.search(str(error)),
                MISSING_MODULE.search(str(error)),
            )
            if missing_name:
                setattr(sys.modules[missing_name[2]], missing_name[1], stand_in(missing_name[1]))
            elif absent and not absent[1].startswith("transformers.models"):
                sys.modules[absent[1]] = AbsentPackage(absent[1])
            else:
                raise
    raise ImportError(f"{name} misses more than forty names")


class AbsentPackage(types.ModuleType):
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
    testers_by_name: dict[str, tuple[type, type]] = {}
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
                and TESTED_CLASS.search(model_class.__name__)
            ):
                testers_by_name.setdefault(model_class.__name__, (test, model_class))
    yield from testers_by_name.values()


def in_a_process(test: type, model_class: type, family: str, form: str = MAIN_FORM) -> Row:
    """What `row` says, or that it took too long or took its process down."""
    row_of = Row(family, model_class.__name__, "crashed", "its process ended", form=form)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=lambda: theirs.send(dataclasses.asdict(row(test, model_class, family, form)))
    )
    process.start()
    theirs.close()
    try:
        if ours.poll(TIMEOUT_SECONDS):
            return Row(**ours.recv())
        row_of.why = f"took longer than {TIMEOUT_SECONDS:.0f} s"
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    return row_of


def row(test: type, model_class: type, family: str, form: str = MAIN_FORM) -> Row:
    """Build, run unpatched, patch, run, compare. A class that does not run in float64 is run in
    float32."""
    import torch

    result = row_in(
        torch.float64, test, model_class, Row(family, model_class.__name__, "", form=form)
    )
    if result.outcome not in ("not built", "not run unpatched"):
        return result
    float32_result = row_in(
        torch.float32, test, model_class, dataclasses.replace(result, outcome="", why="")
    )
    if float32_result.outcome in ("not built", "not run unpatched"):
        return result
    return dataclasses.replace(
        float32_result, why="; ".join(filter(None, ("in float32", float32_result.why)))
    )


def row_in(dtype: Any, test: type, model_class: type, result: Row) -> Row:
    """Fill in a row, in float64 with casts lifted or in float32."""
    import pytest
    import torch

    import streambp

    oracle, checks = load("tests/oracle"), load("scripts/tester_checks")
    settings = dict(FORMS[result.form])
    side = settings.pop("pad", None)
    packed = settings.pop("packed", False)
    torch.set_default_dtype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if dtype is torch.float64:
            oracle.lift_float32_casts(patch)
        try:
            model, batch = build(test, model_class)
            if side is not None and not pad(model, batch, side):
                why = f"its inputs have no row to pad on the {side}"
                return dataclasses.replace(result, outcome="not padded", why=why)
            if packed and not pack(model, batch):
                why = "its inputs are not one text at positions"
                return dataclasses.replace(result, outcome="not packed", why=why)
            if "chunk_size" in settings:
                settings["chunk_size"] = checks.chunk_size_for(batch, CHUNK_SIZE)
            ours = streambp.patch(copy.deepcopy(model), streambp.StreamConfig(**settings))
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
            found_loss, our_gradients = gradients(ours, batch)
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
            (found_loss, our_gradients),
            oracle.worst_error if dtype is torch.float64 else oracle.relative_l2,
        )
        exact = MAX_FLOAT64_ERROR if dtype is torch.float64 else MAX_FLOAT32_ERROR
        if result.error is not None and not result.error <= exact:
            noise = oracle.worst_error(gradients(model, batch)[1], expected)
            result.why = f"two unpatched runs differ by {noise:.0e}; {result.why}"
            result.outcome = result.outcome if result.error <= 2 * noise else "INEXACT"
        # A step under the defaults, of one chunk, shows the batch without its padding.
        nothing_reason = side is None and checks.why_nothing(described, chunks, expected)
        if nothing_reason and result.outcome in ("streams", "runs whole"):
            result.outcome, result.why = "shows nothing", nothing_reason
        return result


def pad(model: Any, batch: dict[str, Any], side: str) -> bool:
    """Mask one to three tokens at a side of each row but the last, and their labels. False if the
    batch has no 2-D mask of its tokens."""
    import torch

    ids, labels = batch.get("input_ids"), batch.get("labels")
    accepted = inspect.signature(model.forward).parameters
    if ids is None or ids.dim() != 2 or "attention_mask" not in accepted:
        return False
    if ids.shape[1] < 3 or getattr(batch.get("attention_mask"), "shape", ids.shape) != ids.shape:
        return False
    mask = torch.ones_like(ids)
    for index in range(max(1, ids.shape[0] - 1)):
        size = 1 + index % min(3, ids.shape[1] - 2)
        mask[index, slice(size) if side == "left" else slice(-size, None)] = 0
    batch["attention_mask"] = mask
    if labels is not None and labels.shape == mask.shape:
        labels[mask == 0] = -100
    leave_out_what_padding_predicts(batch)
    return True


def pack(model: Any, batch: dict[str, Any]) -> bool:
    """Make the batch's first row two documents, by positions that begin again. False if the batch
    has more than a text, or the model takes no positions."""
    import torch

    ids = batch.get("input_ids")
    accepted = inspect.signature(model.forward).parameters
    texts = {"input_ids", "attention_mask", "labels", "position_ids", "token_type_ids"}
    if ids is None or ids.dim() != 2 or ids.shape[1] < 4 or "position_ids" not in accepted:
        return False
    tensors = {name for name, value in batch.items() if isinstance(value, torch.Tensor)}
    if not tensors <= texts or getattr(model.config, "is_encoder_decoder", False):
        return False
    for name in tensors:
        batch[name] = batch[name][:1]
    batch.pop("attention_mask", None)
    batch["use_cache"] = False  # transformers sees documents in a call without a cache alone
    first = ids.shape[1] // 2
    last = ids.shape[1] - first
    batch["position_ids"] = torch.cat([torch.arange(first), torch.arange(last)])[None]
    if batch.get("labels") is not None and batch["labels"].shape == (1, ids.shape[1]):
        batch["labels"][0, first] = -100  # no document predicts the next one's first token
    return True


def compared(result: Row, description: Any, expected: Any, ours: Any, distance: Any) -> None:
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
    if ours[1].keys() != expected[1].keys():
        differing = sorted(ours[1].keys() ^ expected[1].keys())
        result.outcome, result.why = "INEXACT", f"gradients of {differing[:3]} on one side only"
        return
    loss_error = float(abs(ours[0] - expected[0]) / abs(expected[0]).clamp(min=1e-30))
    result.error = max(distance(ours[1], expected[1]), loss_error)
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
    """The tester's model in the default dtype and train mode with nothing random in it, and its
    inputs, with random labels."""
    import torch

    dtype = torch.get_default_dtype()
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
    model = model_class(config).to(dtype).train()
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
    elif "labels" not in batch and "decoder_attention_mask" in batch:
        mask = batch["decoder_attention_mask"]  # all outputs make the loss, those of padding, too
        batch["decoder_attention_mask"] = torch.where(mask.cumsum(-1) == 0, 1, mask)
    batch = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }
    batch.pop("use_cache", None)
    return model, batch


def leave_out_what_padding_predicts(batch: dict[str, Any]) -> None:
    """Left padding reads nothing, for which eager attention gives the mean over all tokens and
    streamed layers 0."""
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    for name, labels in batch.items():
        if not name.endswith("labels") or mask is None or mask.shape != labels.shape:
            continue
        empty = mask.cumsum(-1) == 0  # [B, T]
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
        if isinstance(value, float) and any(word in name for word in RANDOM_SETTINGS):
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
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


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

The tables below are of chunks. Counts of every form:

{forms}

A padded batch has one to three tokens of padding in every row but the last, on the left or on the right, and runs under the
defaults of `streambp.patch`. A packed row is one of the batch's rows without a mask, whose second half begins at position 0
again, with `documents="as_given"`, since an unpatched recurrence does not begin again there. Classes that do not run in
float64 are run in float32, and the error is then the whole gradient's.

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
    "not padded": "Not run: its inputs have no row to pad",
    "not packed": "Not run: its inputs are not one text at positions",
}
NO_DECODER = (
    "It has no stack of transformers decoder layers",
    "its attention is bidirectional",
    "is bidirectional",
)


def counts_by_form(rows: list[Row]) -> str:
    """A table of how many classes had which outcome, a row for each form."""
    names = [name for name in SECTIONS if any(row.outcome == name for row in rows)]
    lines = [f"| form | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for form in dict.fromkeys(row.form for row in rows):
        outcomes = [row.outcome for row in rows if row.form == form]
        counts = [str(outcomes.count(name)) for name in names]
        lines.append(f"| {form} | {' | '.join(counts)} |")
    return "\n".join(lines)


def page(rows: list[Row], tree: str) -> str:
    """The table as Markdown."""
    import torch
    import transformers

    all_rows, rows = rows, [row for row in rows if row.form == MAIN_FORM]
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
        f"{len(section_rows)} {SECTIONS[name][0].lower() + SECTIONS[name][1:]}"
        for name, section_rows in listed.items()
        if name not in ("not padded", "not packed")
    ]
    version = re.search(r'version="([^"]+)"', (Path(tree) / "setup.py").read_text())
    text = HEADER.format(
        chunk_size=CHUNK_SIZE,
        exact=MAX_FLOAT64_ERROR,
        tests=version[1] if version else "an unknown version",
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        counts="\n".join(f"- {count}" for count in [*counts, f"{len(encoders)} no decoders"]),
        forms=counts_by_form(all_rows),
    )
    for name, section_rows in listed.items():
        if name not in ("not padded", "not packed"):
            text += f"\n## {SECTIONS[name]}\n\n" + (
                table(section_rows, name) if section_rows else "None.\n"
            )
    text += "\n## Other forms\n\nClasses that are not exact in another form, where chunks are:\n\n"
    text += other_models(all_rows)
    text += (
        "\n## No decoders\n\nEncoders, encoder-decoders and models without transformers' decoder "
        "layers; refused when patched.\n\n"
    )
    return text + table(encoders, "refused")


def other_models(rows: list[Row]) -> str:
    """A table of classes that were exact in chunks, and have another outcome in another form."""
    exact = ("streams", "runs whole", "shows nothing", "not padded", "not packed")
    exact_models = {
        (row.family, row.model) for row in rows if row.form == MAIN_FORM and row.outcome in exact
    }
    lines = [
        f"| {row.form} | {row.model} | {row.outcome} | {cell(row.why)} |"
        for row in rows
        if row.outcome not in exact and (row.family, row.model) in exact_models
    ]
    if not lines:
        return "None.\n"
    return "\n".join(["| form | class | outcome | reason |", "|---|---|---|---|", *lines]) + "\n"


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
