"""Sentences "**Expect** ..." of pages and examples are held by what the page's program does.

`tests/docs/test_blocks.py` runs the programs and calls the checks. covers: model/trainer_logs.py,
model/describe.py
"""

from __future__ import annotations

import json

import pytest

from tests.distributed.test_engines import NOTHING_CACHED
from tests.docs import stand_ins
from tests.docs.expectations import (
    CHECKS,
    GATHERS_PREFIX,
    OWN_RUN,
    SENTENCE,
    WORD,
    Outcome,
    gathered_twice,
    sentence,
)
from tests.docs.pages import ALL_PAGES, ROOT, blocks
from tests.docs.runner import Runner

READ_PAGES = (*ALL_PAGES, "README.md", *(
    path.relative_to(ROOT).as_posix()
    for kind in ("md", "py", "ipynb", "yaml")
    for path in sorted((ROOT / "examples").rglob(f"*.{kind}"))
))  # fmt: skip


def test_each_sentence_has_a_check():
    pages = set()
    for page in READ_PAGES:
        text = (ROOT / page).read_text("utf-8")
        assert len(WORD.findall(text)) == len(SENTENCE.findall(text)) <= 1, page
        if sentence(page):
            pages.add(page)
    assert pages == set(CHECKS)


@pytest.fixture
def outcomes(tmp_path):
    """The output of each page, shortened, and the files of QLoRA's."""
    adapter = tmp_path / "qlora/adapter/adapter_model.safetensors"
    adapter.parent.mkdir(parents=True)
    adapter.touch()
    logged = "step 1: 64 tokens in one chunk, streamed: saved nothing"
    printed = {
        "embeddings": "step 0: loss 3.2\nstep 1: loss 3.1\nlayers  streams: 4 x ModernBertEncoderLayer",
        "small-cards-mixtures": "step 0: loss 7.1\nstep 1: loss 7.0\nlayers  streams: 2 x GptOssDecoderLayer\n"
        "note  4 weights of experts are added to their adapters once for each pass",
        "encoder-decoders": "{'loss': '3.2'}\n{'loss': '3.1'}\nlayers  streams: 2 x BartDecoderLayer\n"
        "note  left as it is: BartEncoder",
        "70b-24gb": "9.0 KiB of weights of 2 layers live on the host, beside it: 8 copies of a layer so far, for "
        "which the device waited 0.0 s",
        "qlora-24gb": "{'loss': '6.9', 'stream_tokens': 64, 'stream_chunk_size': 64}",
        "extend-the-context": "{'loss': '6.9', 'stream_tokens': 64, 'stream_chunk_size': 64}",
        "zero3": f"{GATHERS_PREFIX}[3, 2, 2]\n{GATHERS_PREFIX}[2, 2, 2]",
    }  # fmt: skip
    return {
        f"docs/how-to/{page}.md": Outcome(text, logged, tmp_path) for page, text in printed.items()
    }


@pytest.mark.parametrize("page", CHECKS)
def test_the_shortened_output_passes(page, outcomes):
    CHECKS[page](sentence(page), outcomes[page])


WRONG_EXPECTATIONS = [
    ("embeddings", "3.1", "3.3"),
    ("embeddings", "4 x", "3 x"),
    ("small-cards-mixtures", "2 x", "1 x"),
    ("small-cards-mixtures", "added to their adapters", "copied"),
    ("encoder-decoders", "{'loss': '3.2'}\n", ""),
    ("encoder-decoders", "left as it is", "streams"),
    ("70b-24gb", "8 copies", "0 copies"),
    ("70b-24gb", "live on the host", "stay"),
    ("qlora-24gb", "'stream_tokens'", "'tokens'"),
    ("extend-the-context", "'stream_tokens': 64", "'stream_tokens': 41"),
    ("zero3", "[2, 2, 2]", "[2, 2, 6]"),
    ("zero3", "[3, 2, 2]", "[3, 4, 4]"),
]


@pytest.mark.parametrize(("page", "right", "wrong"), WRONG_EXPECTATIONS)
def test_another_output_is_found(page, right, wrong, outcomes):
    name = f"docs/how-to/{page}.md"
    outcome = outcomes[name]
    new_output = outcome.printed.replace(right, wrong)
    assert new_output != outcome.printed
    with pytest.raises(AssertionError):
        CHECKS[name](sentence(name), Outcome(new_output, outcome.logged, outcome.folder))


def test_weights_of_the_base_beside_the_adapter_are_found(outcomes, tmp_path):
    name = "docs/how-to/qlora-24gb.md"
    (tmp_path / "qlora/model.safetensors").touch()
    with pytest.raises(AssertionError):
        CHECKS[name](sentence(name), outcomes[name])


@pytest.mark.parametrize("page", CHECKS)
def test_another_sentence_is_found(page, outcomes):
    with pytest.raises((AssertionError, ValueError)):
        CHECKS[page]("**Expect** the best.", outcomes[page])


@pytest.mark.full
def test_zero3_gathers_each_parameter_twice(stand_in_folder, inside):
    """The page's own loop on two ranks: once in four chunks, once in one."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    page = OWN_RUN[0]
    texts = {block.title: block.text for block in blocks(page)}
    program = stand_ins.python(texts["loop.py"], stand_in_folder)
    counting = "from tests.docs.expectations import count_gathers\n\ncount_gathers()\n"
    (inside / "loop.py").write_text(counting + program)
    printed = []
    for chunk_size in (16, 64):
        config = json.loads(stand_ins.deepspeed(texts["zero3.json"]))
        config["streambp"]["chunk_size"] = chunk_size
        config["zero_optimization"] |= NOTHING_CACHED  # as for parameters of real size
        (inside / "zero3.json").write_text(json.dumps(config))
        (block,) = [
            candidate
            for candidate in blocks(page)
            if "torchrun" in candidate.text and "loop" in candidate.text
        ]
        runner = Runner(page, inside, stand_in_folder)
        with runner.inside():
            output = runner.process(["torchrun", "--nproc-per-node", "2", "loop.py"], {}, block)
        printed.append(next(line for line in output.splitlines() if GATHERS_PREFIX in line))
        chunks = f"in {64 // chunk_size} chunks" if chunk_size < 64 else "in one chunk"
        assert chunks in output
    gathered_twice(sentence(page), Outcome("\n".join(printed), "", inside))
