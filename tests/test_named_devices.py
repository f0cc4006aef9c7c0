"""Where streambp/ names CUDA, and why. Everything else asks what a device can do: any accelerator
takes the same path.

covers: device.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streambp.device import is_accelerator, reports_memory

SOURCE = Path(__file__).parents[1] / "streambp"

CUDAS = (
    "CUDA's own: its kernels, its libraries, its runtime, or a cheaper way to what every "
    "accelerator tells"
)
TARGET = "names what is counted for; no device is asked"
TEXT = "a word of an error, of an option or of an attribute"
PLACES = {
    CUDAS: """
        accumulate.py:_can_sum_in_float32
        attention/backend.py:platform_of
        attention/rules.py:why_not_cudnn
        attention/rules.py:why_not_efficient
        attention/rules.py:why_not_flash
        attention/rules.py:why_not_fused
        attention/triton_merge.py:fits_triton
        attention/triton_merge.py:merge_in_triton
        device.py:allocator_count
        device.py:allocator_bytes
        device.py:memory_limit
        device.py:matmul_dtype
        device.py:reports_memory
        head/triton_fold.py:use_device
        head/triton_fold.py:supports_kernels
        model/describe.py:_describe_attention
        offload/engines.py:AcceleratorEngine._reserve
        planner/auto.py:rates_of_device
        planner/measure.py:compare_step
    """,
    TARGET: """
        cli/runs.py:_notes
        cli/runs.py:_write_page
        planner/auto.py:_skeleton
        planner/profile_cache.py:CountRequest
        planner/estimate.py:estimate
        planner/layer_costs.py:
        planner/measure.py:compare_default
        planner/plan.py:plan
        planner/skeleton.py:
        planner/skeleton.py:Skeleton.__init__
        planner/skeleton.py:Skeleton._fused_elsewhere
        planner/stored_counts.py:key_of
        planner/survey.py:Counter._prepare
        planner/tree.py:_activations
        verify/random_model.py:random_model
    """,
    TEXT: """
        cli/app.py:
        cli/app.py:profile
        cli/environment.py:
        cli/environment.py:_device
        device.py:
        layer/expert_adapters.py:
        lazy/base.py:
        model/split.py:refuse_replicas
        planner/model_class.py:fixed_positions
        planner/model_class.py:refuse_other_biases
        planner/survey.py:_groups_of_points
        planner/survey.py:survey
    """,
}


class Places(ast.NodeVisitor):
    """Qualified names of the functions and classes in which a name, or a text that is no docstring,
    says "cuda"."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.scopes: set[str] = set()

    def visit(self, node: ast.AST) -> None:
        """Go through a tree, but for docstrings."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        texts = (
            getattr(node, name, None) for name in ("id", "attr", "value", "arg", "name", "module")
        )
        if any(isinstance(text, str) and "cuda" in text.lower() for text in texts):
            self.scopes.add(".".join(self.scope))
        scoped = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if scoped:
            self.scope.append(node.name)
        super().generic_visit(node)
        if scoped:
            self.scope.pop()


def places_in(text: str) -> set[str]:
    finder = Places()
    finder.visit(ast.parse(text))
    return finder.scopes


def code_places() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        yield from (f"{name}:{scope}" for scope in sorted(places_in(path.read_text("utf-8"))))


def test_each_place_that_names_cuda_has_its_reason():
    """A place that asks a device for its name hides what follows from every other accelerator, and
    from these tests."""
    listed_places = [scope for listed in PLACES.values() for scope in listed.split()]
    assert len(listed_places) == len(set(listed_places))
    assert sorted(code_places()) == sorted(listed_places)


NEW = {
    "a comparison": "return x.device.type == 'cuda'",
    "an attribute": "return x.is_cuda",
    "a module": "return torch.cuda.current_stream()",
    "an import": "import torch.cuda",
    "names of a module": "from torch.cuda import Stream",
    "an argument": "return torch.zeros(1, device=f'cuda:{x}')",
    "a pattern": "match x:\n            case 'cuda': return 1",
}


@pytest.mark.parametrize("new", NEW)
def test_a_new_place_is_found(new):
    """Wherever it stands, in a class and function that have other such places, too; a docstring's
    word is none."""
    text = (
        f"class Engine:\n    def copy(self, x):\n        'Of a CUDA device.'\n        {NEW[new]}\n"
    )
    assert places_in(text) == {"Engine.copy"}
    assert places_in(text.replace(NEW[new], "return x")) == set()


def test_the_host_is_no_accelerator():
    for device in (torch.device("cpu"), torch.device("meta")):
        assert not is_accelerator(device)
        assert not reports_memory(device)
