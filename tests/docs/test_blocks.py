"""Every block and every command of README.md and the users' pages runs: pages in a folder of their
own, top to bottom.

Blocks for GPUs and big models run with the stand-ins of `tests/docs/stand_ins.py`; what cannot run
has its reason in `tests/docs/runner.py`, and is counted apart. covers: cli/runs.py,
integrations/trl/__init__.py
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from tests.conftest import SHARES_PREFIXES
from tests.docs import runner, stand_ins
from tests.docs.expectations import CHECKS, OWN_RUN, Outcome, sentence
from tests.docs.pages import USERS, Block, blocks, commands
from tests.docs.runner import NOT_RUN, PARSED, PageError, Runner, count

LIGHT_PAGES = (
    "docs/how-to/packing-and-padding.md",
    "docs/how-to/out-of-memory.md",
    "docs/reference/errors.md",
)
PAGES_WITH_CODE = tuple(page for page in USERS if blocks(page))


def run(page, inside, stand_in_folder):
    counts = Runner(page, inside, stand_in_folder).run()
    print(f"\n{page}: " + "; ".join(f"{number} {kind}" for kind, number in sorted(counts.items())))
    assert counts == count(page)
    return counts


@pytest.mark.skipif(
    SHARES_PREFIXES, reason="pages speak of the defaults, one of which STREAMBP_TEST_ROWS changes"
)
@pytest.mark.parametrize(
    "page",
    [
        page if page in LIGHT_PAGES else pytest.param(page, marks=pytest.mark.full)
        for page in PAGES_WITH_CODE
    ],
)
def test_a_page_runs(page, inside, stand_in_folder, monkeypatch, capsys, caplog):
    if page == "docs/how-to/vlm.md":
        monkeypatch.setattr("transformers.AutoProcessor", stand_ins.Processor)
        pytest.importorskip("PIL", reason="Pillow is not installed")
    if page == "docs/how-to/small-cards-mixtures.md":
        pytest.importorskip("peft", reason="peft is not installed")
        stand_ins.pack_without_bitsandbytes(monkeypatch)
    if "continue.py" in [block.title for block in blocks(page)]:
        adapter(inside, stand_in_folder)
    with caplog.at_level(logging.INFO, "streambp"):
        run(page, inside, stand_in_folder)
    if page in CHECKS and page not in OWN_RUN:
        CHECKS[page](sentence(page), Outcome(capsys.readouterr().out, caplog.text, inside))


def adapter(folder, stand_in_folder):
    """What peft saves."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stand_in_folder / stand_ins.CHECKPOINTS[1])
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(
        folder / "my-adapter"
    )


def test_every_block_is_counted():
    """What the full tier runs, by kind; what it does not run is named, and little."""
    total = Counter()
    for page in USERS:
        total += count(page)
    print("\n" + "\n".join(f"{number:4d} {kind}" for kind, number in sorted(total.items())))
    unrun = sum(number for kind, number in total.items() if PARSED in kind)
    assert unrun < sum(total.values()) / 3
    assert sum(number for kind, number in total.items() if kind.startswith("python")) >= 25
    programs = {command.split()[0] for command in NOT_RUN}
    assert programs <= {"pip", "axolotl", "bash", "streambp", "trl"}


WRONG_BLOCKS = [
    ("```python\nimport streambp\nstreambp.patch(modell)\n```", NameError),
    ("```python\nmodel.no_such_thing()\n```", AttributeError),
    ("```bash\nstreambp verify first-model --seq-len 512 --left-padding 1000\n```", PageError),
    ("```bash\npip install '.[no_such_extra]'\n```", PageError),
    ("```yaml\na: 1\n```", PageError),
    ("```bash\nstreambp --version\n```\n\n```text\nstreambp 0.0\n```", PageError),
    (
        "```bash\nstreambp launch --no-such-flag -- axolotl train x.yaml\n```",
        runner.streambp.StreamBPError,
    ),
]


@pytest.mark.parametrize(
    ("text", "error"), WRONG_BLOCKS, ids=[text.split("\n")[1][:30] for text, _ in WRONG_BLOCKS]
)
def test_a_wrong_block_is_found(text, error, inside, stand_in_folder, monkeypatch):
    """A mutant of a page each."""
    monkeypatch.setattr("tests.docs.pages.ROOT", inside)
    (inside / "page.md").write_text(text)
    with pytest.raises(error):
        Runner("page.md", inside, stand_in_folder).run()


def test_an_exit_code_may_stand_in_the_last_line_of_a_command():
    text = "streambp plan M --full \\\n    --seq-len 64k  # exit code 1\nstreambp --version\n"
    block = Block("page.md", 1, "bash", "", text)
    first, second = commands(block)
    assert first == "streambp plan M --full --seq-len 64k"
    assert runner.line_of(block, first).endswith("# exit code 1")
    assert runner.line_of(block, second) == second


def test_stand_ins_keep_what_a_program_does(tmp_path):
    program = stand_ins.python(
        'm = A.from_pretrained("Qwen/Qwen3-8B", quantization_config=b, dtype=torch.bfloat16)\n'
        'c = C(output_dir="x", max_length=65536, bf16=True, learning_rate=1e-5, stream_offload="cpu")', tmp_path
    )  # fmt: skip
    assert f"from_pretrained('{tmp_path}/Qwen/Qwen3-8B', dtype=torch.float32)" in program
    assert (
        "max_length=64, learning_rate=1e-05, stream_offload='cpu', bf16=False, max_steps=2"
        in program
    )
    assert stand_ins.ranks(["torchrun", "--nproc-per-node", "8", "a.py"]) == [
        "torchrun",
        "--nproc-per-node",
        "2",
        "a.py",
    ]
