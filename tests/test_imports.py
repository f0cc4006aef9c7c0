"""Imports point downwards only (DESIGN.md section 7)."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "streambp"
ORDER = (
    "errors", "config", "chunks", "distributed.zero", "distributed.host", "distributed.sequence_parallel",
    "attention.spans", "attention.masks", "distributed.shards", "attention.kernels", "attention.backend",
    "attention.triton_merge", "attention.merge", "attention.keys", "attention.attend", "attention.prefix",
    "attention.halves", "attention.interface",
    "layer.cost", "layer.store", "layer.recompute", "layer.arguments", "layer.outputs", "layer.shadows",
    "layer.products", "layer.engines", "layer.reuse", "layer.cached", "layer.site", "layer.carried", "layer.kept",
    "layer.call", "layer.gradients", "layer.probe",
    "layer.whole", "layer.exhausted",
    "layer.function", "layer.sharded_call", "layer.sharded", "head.triton_fold", "head.blocks", "head.log_probs",
    "head.one_pass", "head.deferred",
    "losses.masked", "losses.sft", "losses.dpo", "losses.grpo", "losses.ppo", "offload.engines", "offload.trace",
    "offload.arena", "offload.transfers", "offload.auto", "offload.stores",
    "offload.manager", "stacks", "instance_forward", "wrappers", "patching", "integrations.deepspeed",
    "planner.count", "planner.profile", "planner.skeleton", "planner.step", "planner.compose", "planner.tree",
    "planner.survey", "planner.estimate", "planner.plan", "planner.auto", "planner.measure", "planner.report",
    "planner.page", "planner.megatron",
    "integrations.trl.settings", "integrations.trl.head", "integrations.trl.sft", "integrations.trl.dpo",
    "integrations.trl.grpo", "integrations.trl.values", "integrations.trl.ppo", "verdict", "verify", "cli", "__main__",
)  # fmt: skip
PACKAGES = ("", "attention", "layer", "head", "losses", "offload", "distributed", "integrations", "integrations.trl")
PACKAGES += ("planner",)


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
