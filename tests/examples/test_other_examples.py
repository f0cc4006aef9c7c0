"""Images, embeddings, an encoder-decoder, axolotl's YAML, the notebooks and the index of the examples."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys

import pytest

from scripts import notebooks
from scripts.check_commands import check, commands
from streambp.launch.settings import config_from
from tests.examples.test_long_context_sft import ROOT, run_here, run_script
from tests.examples.test_trl_examples import last
from tests.hangs import HANG

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted(
    path for path in EXAMPLES.glob("*.py") if path.name not in ("toy.py", "objectives.py")
)


LAYERS = {
    "vlm": "Qwen3DecoderLayer", "embedding": "Qwen3DecoderLayer", "encoder_decoder": "BartDecoderLayer",
    "masked_lm": "ModernBertEncoderLayer", "paligemma": "GemmaDecoderLayer",
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", list(LAYERS))
def test_two_steps(name, tmp_path):
    chunk = 3 if name == "encoder_decoder" else 4  # its decoder reads four tokens
    result = run_here("--steps", 2, "--chunk-size", chunk, "--output", tmp_path, name=f"{name}.py")
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"streams: 2 x {LAYERS[name]}" in result.stdout
    assert re.search(r"^loss: [\d.]+ -> [\d.]+$", result.stdout, re.MULTILINE)
    assert (tmp_path / "config.json").exists()


@pytest.mark.full
def test_images_and_embeddings_are_learnt(tmp_path):
    result = run_script("vlm.py", "--output", tmp_path / "vlm")
    assert result.returncode == 0, result.stderr[-3000:]
    assert last(result.stdout, "loss") < 0.3
    result = run_script("embedding.py", "--output", tmp_path / "embedding")
    assert result.returncode == 0, result.stderr[-3000:]
    assert last(result.stdout, "found") >= 0.9
    # Masked tokens cannot all be known from the others; their loss begins at 3.2.
    for name, worst in (("encoder_decoder", 0.3), ("paligemma", 0.3), ("masked_lm", 2.4)):
        result = run_script(f"{name}.py", "--output", tmp_path / name)
        assert result.returncode == 0, result.stderr[-3000:]
        assert last(result.stdout, "loss") < worst


def test_a_pretrained_model_of_images_needs_rows(tmp_path):
    result = run_here("--model", "somewhere", "--output", tmp_path, name="vlm.py")
    assert "--model and --data go together" in result.stderr


@pytest.mark.parametrize(
    "path", sorted((EXAMPLES / "axolotl").glob("*.yaml")), ids=lambda path: path.stem
)
def test_axolotls_yaml(path):
    """Its section, its data, and the commands of its comments; tests/frameworks runs axolotl
    itself."""
    yaml = pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")
    text = path.read_text("utf-8")
    settings = yaml.safe_load(text)
    config = config_from(settings["streambp"], "the example")
    assert (config.chunk_size, config.saves) == ("auto", "auto")
    assert settings["plugins"] == ["streambp.integrations.axolotl.StreamPlugin"]
    (data,) = settings["datasets"]
    rows = [json.loads(line) for line in (ROOT / data["path"]).read_text("utf-8").splitlines()]
    assert all({turn["role"] for turn in row["messages"]} == {"user", "assistant"} for row in rows)
    plans = re.findall(r"streambp plan .*", text)
    assert plans
    for line in plans:
        (command,) = commands(path.name, f"```bash\n{line}\n```")
        assert check(command)[1] is None
    assert f"examples/axolotl/{path.name}" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.full
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path):
    """In a process of its own, offline, on a CPU. The outputs that it holds are of the same kinds,
    and their lines differ in numbers alone."""
    if "matplotlib" in path.read_text("utf-8"):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = subprocess.run(
        [sys.executable, ROOT / "scripts/notebooks.py", "--into", tmp_path, path],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert shapes_of_outputs(tmp_path / path.name) == shapes_of_outputs(path)


def code_cells(path):
    return notebooks.code_cells(json.loads(path.read_text("utf-8")))


def shapes_of_outputs(path):
    """For each cell: the first words of its printed lines, and a name for a chart. Errors of a
    table are sorted, in an order that differs between machines."""
    shapes = []
    for cell in code_cells(path):
        shape = []
        for output in cell["outputs"]:
            lines = output.get("text", ["a chart"])
            shape += [re.split(r"[\d(]", line.strip())[0] for line in lines]
        shapes.append(sorted(set(shape)))
    return shapes


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_what_its_cells_printed(path):
    """Each code cell has outputs or prints nothing, and no output names the machine."""
    cells = code_cells(path)
    assert len(cells) >= 4
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        source = "".join(cell["source"])
        kinds = {output["output_type"] for output in cell["outputs"]}
        assert ("stream" in kinds) == ("print(" in source), source
        assert ("display_data" in kinds) == ("plt.show()" in source), source
        assert machine_words(cell["outputs"]) == []


def machine_words(outputs):
    """The absolute paths and the name of this machine in the text of outputs."""
    text = "".join(line for output in outputs for line in output.get("text", []))
    return re.findall(r"(?:^|[\s'\"(=])(/\w[^\s'\"]*|[A-Z]:\\\S*)", text) + [
        name for name in {platform.node()} - {"", "localhost"} if name in text
    ]


def test_words_of_a_machine_are_found():
    outputs = [{"text": ["saved to /home/me/out, by the way\n", f"{platform.node()} 1/2 a/b\n"]}]
    assert machine_words(outputs)[0] == "/home/me/out,"
    assert machine_words([{"text": ["1/2 of a/b, 3 tokens/s\n"]}]) == []


def test_outputs_are_those_of_each_cell():
    """With a cell that prints nothing, and one that reads a name of the cell before."""
    cells = [
        {"cell_type": "code", "source": [text], "outputs": ["old"], "execution_count": None}
        for text in ("a = 2", "print(a + 1)\nprint('two')")
    ]
    notebooks.run_cells({"cells": [{"cell_type": "markdown"}, *cells]})
    assert cells[0]["outputs"] == []
    assert cells[1]["outputs"] == [
        {"name": "stdout", "output_type": "stream", "text": ["3\n", "two\n"]}
    ]
    assert [cell["execution_count"] for cell in cells] == [1, 2]


def test_notebooks_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"first_steps", "plan_verify_charts"}
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text("utf-8"))
        assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
        assert notebook["cells"][0]["cell_type"] == "markdown"
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                compile("".join(cell["source"]), path.name, "exec")


def test_the_index_has_every_example():
    text = (EXAMPLES / "README.md").read_text("utf-8")
    folders = sorted({path.parent.name for path in EXAMPLES.glob("*/train.py")})
    names = [
        *(f"examples/{path.name}" for path in SCRIPTS),
        *(f"examples/{folder}/train.py" for folder in folders),
    ]
    assert [name for name in names if name not in text] == []
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not (EXAMPLES / link).exists()] == []
    commands_of_page = [
        command
        for span in re.findall(r"`([^`]+)`", text)
        for command in commands("", f"```bash\n{span}\n```")
    ]
    assert [command.text for command in commands_of_page if check(command)[1]] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_scripts_own_commands_parse(path):
    """The lines of its docstring that start it, and the plans that it names."""
    text = path.read_text("utf-8")
    lines = re.findall(
        rf"^\s*((?:python examples/{path.name}|streambp ).*?)(?:  .*)?$", text, re.MULTILINE
    )
    assert any(path.name in line for line in lines)
    for line in lines:
        for command in commands("", f"```bash\n{line}\n```"):
            program, *arguments = command.words
            problem = check(command)[1]
            flags = [word for word in arguments if word.startswith("--")]
            source = text + (EXAMPLES / "toy.py").read_text("utf-8")
            unknown = (
                [flag for flag in flags if f'"{flag}"' not in source] if program == "python" else []
            )
            assert unknown == [], line
            assert program == "python" or problem is None, problem


def test_what_the_examples_need_is_in_their_extra():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    extra = re.search(r"^examples = \[(.*?)\]$", text, re.MULTILINE)[1]
    for name in ("peft", "trl", "tqdm", "tokenizers", "matplotlib"):
        assert name in extra
