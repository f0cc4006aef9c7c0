"""Imports point downwards only (DESIGN.md section 7), and nowhere in a circle."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "streambp"
TREES = ("streambp", "paper_repro", "examples", "tests")
ORDER = (
    "errors", "device", "instance_forward", "foreign",
    "accumulate", "config", "chunks", "distributed.zero", "distributed.host",
    "distributed.sequence_parallel", "attention.reading",
    "attention.spans", "attention.masks", "distributed.shards", "attention.kernels", "attention.backend",
    "attention.triton_merge", "attention.merge", "attention.keys", "attention.attend", "attention.prefix",
    "attention.halves", "attention.interface",
    "layer.cost", "layer.store", "layer.recompute", "layer.written", "attention.registry", "layer.agreement",
    "layer.documents", "layer.arguments", "layer.states", "layer.scans", "layer.segments", "layer.outputs",
    "layer.shadows", "layer.side_effects", "layer.products", "layer.engines", "layer.leaves", "layer.watched",
    "layer.fingerprint", "layer.reuse", "layer.cached", "layer.site", "layer.carried", "layer.kept", "layer.call",
    "layer.reached", "layer.gradients", "layer.insides", "layer.own_run", "layer.long_trial", "layer.rehearsal",
    "layer.probe", "layer.trials", "layer.whole", "layer.exhausted",
    "layer.function", "layer.sharded_call", "layer.sharded", "head.triton_fold", "head.triton_gradient",
    "head.blocks", "head.log_probs", "head.one_pass", "head.recipe", "head.late_hooks", "head.deferred",
    "head.rows", "head.seen", "head.sweep", "head.hub", "head.lazy_rows", "head.row_rules", "head.loss_rules",
    "head.index_rules", "head.token_rules", "head.lazy",
    "losses.masked", "losses.sft", "losses.dpo", "losses.grpo", "losses.ppo", "offload.engines", "offload.trace",
    "offload.arena", "offload.transfers", "offload.auto", "offload.stores",
    "offload.manager", "stacks", "padding", "packing", "callers", "wrappers",
    "causal_lm", "fused_head", "patching", "describe",
    "planner.count", "planner.delta_rules", "planner.state_spaces", "planner.mixers",
    "planner.profile", "planner.skeleton", "planner.step", "planner.compose", "planner.tree",
    "planner.survey", "planner.estimate", "planner.plan", "planner.auto", "planner.measure", "planner.report",
    "planner.page", "planner.megatron", "integrations.deepspeed",
    "integrations.trl.settings", "integrations.trl.head", "integrations.trl.trainer", "integrations.trl.sft",
    "integrations.trl.dpo",
    "integrations.trl.grpo", "integrations.trl.values", "integrations.trl.ppo", "verdict", "choices", "truth", "verify",
    "launch.settings", "launch.report", "launch.process", "launch.hook", "launch.site.sitecustomize", "launch.place",
    "launch.command", "launch.__main__", "integrations.axolotl", "integrations.ms_swift",
    "integrations.verl", "cli", "__main__",
)  # fmt: skip
PACKAGES = ("", "attention", "layer", "head", "losses", "offload", "distributed", "integrations", "integrations.trl")
PACKAGES += ("planner", "launch")


def module_names():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield path, name.removesuffix("__init__").removesuffix(".")


def imported(path):
    """Modules of this package that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streambp"):
            yield node.module.removeprefix("streambp").removeprefix(".")
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("streambp"):
                    yield alias.name.removeprefix("streambp").removeprefix(".")


def test_every_module_has_its_place():
    assert {name for _, name in module_names()} == set(ORDER) | set(PACKAGES)


def test_imports_point_downwards():
    rank = {name: index for index, name in enumerate(ORDER)}
    wrong = [
        f"{name} imports {target or 'the package'}"
        for path, name in module_names()
        if name in rank
        for target in imported(path)
        if rank.get(target, len(ORDER)) >= rank[name] and not (name in ("verify", "cli") and target == "")
    ]
    assert not wrong


def modules_under(root):
    """Path of every module of the project's trees, by its dotted name from `root`."""
    paths = [path for tree in TREES for path in (root / tree).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports_of(name, path, modules):
    """The modules of the project that one imports, wherever the statement stands. A script's neighbours have bare names."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    asked = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            asked |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            source = ".".join(part for part in (above, node.module) if part)
            members = {f"{source}.{alias.name}" for alias in node.names}
            asked |= {found for found in members if found in modules} or {source}
    return {f for target in asked for f in (target, f"{package}.{target}") if f in modules} - {name}


def cycle(root):
    """Modules that import each other, the first one again at the end; [] where there are none."""
    modules = modules_under(root)
    try:
        graphlib.TopologicalSorter({n: imports_of(n, path, modules) for n, path in modules.items()}).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    assert cycle(ROOT) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from paper_repro.b import run", "def late():\n    import paper_repro.a"),
        ("from paper_repro import b", "from paper_repro.a import run"),
        ("from . import b", "from .a import run"),
        ("from b import run", "import a"),  # of scripts
    ],
)
def test_a_circle_of_imports_is_found(first, second, tmp_path):
    (tmp_path / "paper_repro").mkdir()
    for name, text in (("__init__", ""), ("a", first), ("b", second), ("c", "from paper_repro.a import run")):
        (tmp_path / "paper_repro" / f"{name}.py").write_text(text)
    assert set(cycle(tmp_path)) == {"paper_repro.a", "paper_repro.b"}
    (tmp_path / "paper_repro" / "b.py").write_text("import ast, torch")
    assert cycle(tmp_path) == []


def test_files_and_functions_stay_short():
    long = []
    for path, _ in module_names():
        text = path.read_text()
        if text.count("\n") > 400:
            long.append(path.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 60:
                long.append(f"{path.name}:{node.name}")
    assert not long
