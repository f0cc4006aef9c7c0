"""Whether training steps at another commit gave the same bits: losses, gradients and what `describe` says, case by case.

    mkdir /tmp/before && git archive 58ea65a | tar -x -C /tmp/before
    OMP_NUM_THREADS=1 python scripts/compare_commits.py --against /tmp/before

Two processes, one for each tree (it comes first in PYTHONPATH), build the same tiny models and batches with this tree's
tests/zoo.py, patch them and run two steps: the first, in which layers are tried, and a warm one. Cases are all families,
modes, `saves` and `offload` in float64, with transformers' float32 casts lifted, and a few in bfloat16. Printed for each
case that differs is how far the tensors are apart, how far those of each tree are from the unpatched model's (in float64),
and the lines of `describe` that are not the same. KNOWN lists the differences that are meant to be, each with its reason;
the exit status is 1 if there are others.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streambp

HERE = Path(__file__).resolve().parent.parent
CHUNK, LENGTH = 5, 21
IMAGE = 50  # the token in the place of an image's patches
DENSE = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "glm4", "olmo2", "cohere", "starcoder2", "gpt2",
    "gpt_neox", "opt", "bloom", "falcon", "gptj",
)  # fmt: skip
ROUTED = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
STATES = (
    "qwen3_next", "qwen3_5_text", "mamba2", "bamba", "jamba", "falcon_h1", "lfm2", "recurrent_gemma", "nemotron_h",
    "minimax",
)  # fmt: skip
FAMILIES = (*DENSE, *ROUTED, "deepseek_v3", "gemma4_text", *STATES, "llava")
MODES = ("plain", "padded", "packed")
SAVES = ("none", "attn_out", "kv")
OFFLOAD = ("none", "cpu")
HALF = (("plain", "none", "none"), ("packed", "attn_out", "cpu"))  # what is run in bfloat16 too


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, batch and configuration."""

    family: str
    mode: str = "plain"
    saves: str = "none"
    offload: str = "none"
    dtype: str = "float64"

    def __str__(self) -> str:
        kept = "offloaded" if self.offload == "cpu" else "kept"
        return f"{self.family} {self.mode}, saves {self.saves}, {kept}, {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Known:
    """A difference that is meant to be.

    Args:
        reason: why.
        families, modes, dtypes: globs of the cases.
        lines: what the lines of `describe` match that come or go; "": none may.
        within: the largest relative difference of a tensor.
        same_with: settings of this tree's StreamConfig under which its tensors must be those of the other tree.
    """

    reason: str
    families: tuple[str, ...] = ("*",)
    modes: tuple[str, ...] = ("*",)
    dtypes: tuple[str, ...] = ("*",)
    lines: str = ""
    within: float = 0.0
    same_with: dict[str, Any] | None = None

    def covers(self, case: Case) -> bool:
        pairs = ((case.family, self.families), (case.mode, self.modes), (case.dtype, self.dtypes))
        return all(any(fnmatch(value, glob) for glob in globs) for value, globs in pairs)


KNOWN = (
    Known(
        "describe says where attention takes a row for several documents",
        modes=("packed",),
        lines=r"^\+note +position_ids do not grow by one: attention took the last call's rows for \d+ documents$",
    ),
    Known(
        "recurrences and convolutions start anew with each document of packed rows; with documents='as_given' they go on",
        families=STATES,
        modes=("packed",),
        lines=r"^\+.+ documents of packed rows, told by position_ids: |^-(layers)? +streams: ",
        same_with={"documents": "as_given"},
    ),
)


# --- One tree's process


def use_tests_of_this_tree() -> None:
    """Make `tests` this tree's package, whatever PYTHONPATH says; its helpers import no streambp."""
    spec = importlib.util.spec_from_file_location(
        "tests", HERE / "tests" / "__init__.py", submodule_search_locations=[str(HERE / "tests")]
    )
    assert spec is not None
    sys.modules["tests"] = importlib.util.module_from_spec(spec)


def build(family: str, dtype: torch.dtype, seed: int) -> nn.Module:
    """A tiny model in train mode; nothing in it is zero by its initialization."""
    from tests import zoo

    if family == "llava":
        from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

        vision = CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
            projection_dim=16,
        )  # fmt: skip
        text = zoo.tiny_config("llama")
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)
        torch.manual_seed(seed)
        model: nn.Module = LlavaForConditionalGeneration(config).to(dtype).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1 * (parameter.dim() <= 1))
        return model
    routed = {"output_router_logits": True} if family in ROUTED else {}
    return zoo.build(family, dtype, seed, **routed)


def batch_of(family: str, mode: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Two rows of random tokens. Padded: the first on its left, the second on its right."""
    from tests.families import make_batch

    if mode == "padded":
        left, right = (make_batch(f"{side}-padded", LENGTH, seed) for side in ("left", "right"))
        batch = {name: torch.stack([left[name][0], right[name][1]]) for name in left}
    else:
        batch = make_batch(mode, LENGTH, seed)
    if family == "llava":
        ids = batch["input_ids"]
        ids[ids == IMAGE] -= 1
        ids[:, 8:12] = IMAGE
        batch["labels"] = batch["labels"].masked_fill(ids == IMAGE, -100)
        generator = torch.Generator().manual_seed(seed)
        batch["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return batch


def documents_apart(batch: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each document of packed rows as a row of its own, with its share of the labels."""
    labelled = float((batch["labels"] != -100).sum())  # no document's first token is
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in itertools.pairwise(starts):
            document = {name: value[row : row + 1, start:end] for name, value in batch.items()}
            share = float((document["labels"] != -100).sum()) / labelled
            if share:
                yield share, document


@functools.lru_cache(maxsize=4)
def tensors_of(case: Case, settings: tuple[tuple[str, Any], ...] | None) -> tuple[dict[str, Tensor], str]:
    """The losses and gradients of two steps, and what `describe` says after them.

    Without settings unpatched, packed rows of layers with states as rows of their own.
    """
    from tests.oracle import lift_float32_casts

    dtype = getattr(torch, case.dtype)
    seed = zlib.crc32(f"{case.family} {case.mode}".encode())
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            lift_float32_casts(patch)
            torch.set_default_dtype(torch.float64)
        try:
            model, batch = build(case.family, dtype, seed), batch_of(case.family, case.mode, dtype, seed)
            if settings is not None:
                saves = () if case.saves == "none" else (case.saves,)
                chosen: dict[str, Any] = {"chunk_size": CHUNK, "saves": saves, "offload": case.offload, **dict(settings)}
                streambp.patch(model, streambp.StreamConfig(**chosen))
                return steps(model, [(1.0, batch)]), str(streambp.describe(model))
            apart = case.mode == "packed" and case.family in STATES
            return steps(model, list(documents_apart(batch)) if apart else [(1.0, batch)]), ""
        finally:
            torch.set_default_dtype(torch.float32)


def steps(model: nn.Module, parts: list[tuple[float, dict[str, Any]]]) -> dict[str, Tensor]:
    """Loss and gradients of the parts' weighted sum, by name, for each of two steps."""
    found = {}
    for step in ("first", "warm"):
        total = torch.zeros(())
        for share, batch in parts:
            loss = model(**batch, use_cache=False).loss
            (loss if share == 1.0 else loss * share).backward()
            total = loss.detach() if share == 1.0 else total + loss.detach() * share
        found[f"{step} loss"] = total
        found |= {f"{step} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Of a case: the digests of its tensors, or the error that it raises. The tensors go to the file that is named."""
    try:
        settings = request["settings"]
        found, text = tensors_of(Case(**request["case"]), None if settings is None else tuple(settings.items()))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "tensors": {}, "text": ""}
    bad = [name for name, tensor in found.items() if not tensor.isfinite().all()]
    if bad:
        return {"error": f"not finite: {bad[0]} and {len(bad) - 1} others", "tensors": {}, "text": text}
    if request["file"]:
        torch.save(found, request["file"])
    return {"error": "", "tensors": {name: digest(tensor) for name, tensor in found.items()}, "text": text}


def serve() -> None:
    """Answer each line of the input with a line; what models print goes to the error output."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    use_tests_of_this_tree()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(str(Path(streambp.__file__).resolve().parent.parent)), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


# --- The process that asks both


class Tree:
    """A tree, and the process that runs it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(self.root), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        served = self._reply("import streambp")
        if served != str(self.root):
            raise SystemExit(f"{self.root} was to be compared, but the streambp that its process imports is in {served}.")

    def _reply(self, asked: object) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            told = self.errors.read()[-2000:]
            raise SystemExit(f"The process of {self.root} ended with status {status} at: {asked}. It printed:\n{told}")
        return json.loads(line)

    def start(self, case: Case, settings: dict[str, Any] | None, file: str = "") -> Callable[[], dict[str, Any]]:
        """Asks; what is returned waits for the reply."""
        assert self.process.stdin is not None
        request = {"case": dataclasses.asdict(case), "settings": settings, "file": file}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return lambda: self._reply(case)

    def tensors(self, case: Case, settings: dict[str, Any] | None) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/tensors.pt"
            self.start(case, settings, file)()
            return torch.load(file) if os.path.exists(file) else {}


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is not the same in a case: the tensors or the error (in words), and lines of `describe`."""

    what: str
    largest: float
    lines: tuple[str, ...]

    def known(self, case: Case, same_with: Callable[[dict[str, Any]], bool]) -> list[str]:
        """The reasons, if those of KNOWN explain all of it; else none."""
        covering = [known for known in KNOWN if known.covers(case)]
        used = []
        if self.what:
            of_tensors = [k for k in covering if self._explains(k, same_with)]
            if not of_tensors:
                return []
            used.append(of_tensors[0].reason)
        for line in self.lines:
            of_line = [k for k in covering if k.lines and re.search(k.lines, line)]
            if not of_line:
                return []
            used.append(of_line[0].reason)
        return list(dict.fromkeys(used))

    def _explains(self, known: Known, same_with: Callable[[dict[str, Any]], bool]) -> bool:
        return self.largest <= known.within or (known.same_with is not None and same_with(known.same_with))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two elements over the largest element."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    apart = (ours.double() - theirs.double()).abs().max()
    return float(apart / theirs.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny))


def whole_error(found: dict[str, Tensor], oracle: dict[str, Tensor]) -> str:
    """Relative L2 error of all tensors taken together, or which of them are missing."""
    if found.keys() != oracle.keys():
        return f"{len(found.keys() ^ oracle.keys())} tensors missing or too many"
    squares = [((found[n].double() - o.double()).square().sum(), o.double().square().sum()) for n, o in oracle.items()]
    return f"{float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5):.0e}"


def tensors_apart(case: Case, here: Tree, there: Tree) -> tuple[str, float]:
    """In words and as a number; ("", 0.0) if torch.equal finds them the same."""
    ours, theirs = here.tensors(case, {}), there.tensors(case, {})
    apart = {n: relative(ours[n], theirs[n]) for n in theirs if n in ours and not torch.equal(ours[n], theirs[n])}
    extra, missing = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    parts = []
    if apart:
        name = max(apart, key=lambda n: apart[n])
        parts.append(f"{len(apart)} of {len(theirs)} tensors differ, by up to {apart[name]:.1e} ({name})")
    parts += [f"only {where}: {', '.join(names)}" for where, names in (("here", extra), ("there", missing)) if names]
    if parts and case.dtype == "float64":
        oracle = here.tensors(dataclasses.replace(case, saves="none", offload="none"), None)
        parts.append(f"from the unpatched model: here {whole_error(ours, oracle)}, there {whole_error(theirs, oracle)}")
    return "; ".join(parts), float("inf") if extra or missing else max(apart.values(), default=0.0)


def difference(case: Case, here: Tree, there: Tree) -> Difference | None:
    """None: it is the same in both trees.

    Raises:
        NothingComparedError: both trees raise the same error.
    """
    replies = [tree.start(case, {}) for tree in (here, there)]
    ours, theirs = (reply() for reply in replies)
    if ours["error"] and ours["error"] == theirs["error"]:
        raise NothingComparedError(ours["error"])
    what, largest = "", 0.0
    if ours["error"] != theirs["error"]:
        what, largest = f"here {ours['error'] or 'no error'}; there {theirs['error'] or 'no error'}", float("inf")
    elif ours["tensors"] != theirs["tensors"]:
        what, largest = tensors_apart(case, here, there)
    lines = () if what and largest == float("inf") else changed_lines(theirs["text"], ours["text"])
    return Difference(what, largest, lines) if what or lines else None


class NothingComparedError(Exception):
    """A case that says nothing: both trees raise the same error."""


def changed_lines(before: str, after: str) -> tuple[str, ...]:
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return tuple(line for line in itertools.islice(diff, 2, None) if not line.startswith("@@"))


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for family in arguments.families:
        for mode, saves, offload in itertools.product(arguments.modes, arguments.saves, arguments.offload):
            yield Case(family, mode, saves, offload)
            if (mode, saves, offload) in HALF:
                yield Case(family, mode, saves, offload, "bfloat16")


def compare(arguments: argparse.Namespace, say: Callable[[str], object] = print) -> int:
    """The number of cases whose difference nothing in KNOWN explains."""
    here, there = Tree(arguments.tree), Tree(arguments.against)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in cases(arguments):
        counts["cases"] += 1
        try:
            found = difference(case, here, there)
        except NothingComparedError as error:
            counts["not known"] += 1
            say(f"NOTHING COMPARED: {case}: both trees: {error}")
            continue
        if found is None:
            continue
        before = there.start(case, {})()["tensors"]  # it remembers
        known = found.known(case, lambda s, case=case, before=before: here.start(case, s)()["tensors"] == before)
        counts["known" if known else "not known"] += 1
        reasons.update(known)
        lines = () if known else found.lines
        say("\n".join([f"{'known' if known else 'DIFFERS'}: {case}: {found.what or 'describe'}", *lines]))
    for tree in (here, there):
        tree.process.communicate()
    for reason, number in reasons.items():
        say(f"known in {number} cases: {reason}")
    equal = counts["cases"] - counts["known"] - counts["not known"]
    say(f"{counts['cases']} cases: {equal} equal, {counts['known']} known to differ, {counts['not known']} not known")
    return counts["not known"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the root of another commit's tree")
    parser.add_argument("--tree", type=Path, default=HERE, help="the root of the tree that is compared with it")
    for name, values in (("families", FAMILIES), ("modes", MODES), ("saves", SAVES), ("offload", OFFLOAD)):
        parser.add_argument(f"--{name}", nargs="*", default=values, choices=values)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.against is None:
        parser.error("name another tree with --against")
    sys.exit(compare(arguments) > 0)


if __name__ == "__main__":
    main()
