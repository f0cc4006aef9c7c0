"""Micro-batches planned as rows and packed, without padding and with a shared prompt once; both
against counted steps.

covers: planner/batches.py, planner/seconds.py, prefixes/calls.py, prefixes/row_outputs.py,
  head/token_positions.py, cli/checks.py, cli/runs.py
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import sys

import pytest
import torch
from transformers import Qwen3Config

import streambp
from streambp.cli import main
from streambp.cli.commands import parse
from streambp.errors import ConfigError
from streambp.head import recipe
from streambp.head.log_probs import HeadInputs
from streambp.launch.settings import settings_from_flags
from streambp.planner import batches
from streambp.planner.batches import Batch, predict_padded_and_packed, work
from streambp.planner.plan import Memory
from streambp.planner.profile import Setting, peak
from streambp.planner.profile import work as work_of_one_row
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import Counter, streamed_recipe, survey
from streambp.prefixes import calls, row_outputs
from streambp.prefixes.tree import find_tree
from tests import zoo
from tests.seeds import seeded

ROWS, PROMPT = 16, 2**15
GROUP = Batch((PROMPT + 2**10,) * ROWS, PROMPT)
CHUNKS = 6  # of the packed row, and of the rows
LAYERS, HEAD = ("forward", "backward"), ("head", "head backward")


@functools.cache
def skeleton():
    """Two layers and the head of Qwen3-8B, in bf16, standing for a GPU."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    return Skeleton(config, torch.bfloat16, None, 16, "cuda")


@functools.cache
def tree_and_labels():
    ids = torch.randint(0, 151936, (ROWS, GROUP.row), generator=seeded(0))
    ids[:, :PROMPT] = ids[0, :PROMPT].clone()
    labels = torch.full_like(ids, -100)
    labels[:, PROMPT - 1 : -1] = ids[:, PROMPT:]  # of the next token
    return find_tree(ids), labels


def count(batch_size, length, chunk_size, shared=False):
    """The spans of a step that is counted without data, whose head scores the completions.

    Which rows are alike and which are scored is data: a tree and labels with values stand in for
    it.
    """
    tree, labels = tree_and_labels()
    method = streamed_recipe()
    method = dataclasses.replace(
        method, config=dataclasses.replace(method.config, rows="packed" if shared else "as_given")
    )
    real = recipe._loss_at_positions, recipe.take_rows, recipe.blockwise_loss

    def loss_at_places(source, inner, token_positions, target, *arguments):
        assert token_positions.shape == target.shape == (ROWS * GROUP.row,)
        with torch.device("cpu"):
            return real[0](
                source,
                inner,
                tree.token_positions(torch.device("cpu")).flatten(),
                labels.flatten(),
                *arguments,
            )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calls.SharedPrefixes, "_find", lambda *_: tree)
        patched.setattr(
            HeadInputs, "rows", property(lambda _: torch.arange(GROUP.scored, device="meta"))
        )
        if shared:
            patched.setattr(recipe, "_loss_at_positions", loss_at_places)
            patched.setattr(
                recipe, "take_rows", lambda source, positions: real[1](source, positions.to("meta"))
            )
            patched.setattr(
                recipe,
                "blockwise_loss",
                lambda x, r, labels, *args: real[2](x, r, labels.to("meta"), *args),
            )
        counter = Counter(skeleton(), skeleton().reduce(), batch_size, "cudnn")
        (spans,) = counter.count(method, (length, chunk_size), accumulate=False)
    return spans


@functools.cache
def counted():
    """A group's tree, its rows, and a plain row of as many tokens as the tree has."""
    tokens = GROUP.tokens(packed=True)
    return {
        "tree": count(ROWS, GROUP.row, tokens // CHUNKS, shared=True),
        "rows": count(ROWS, GROUP.row, GROUP.row // CHUNKS),
        "plain": count(1, tokens, tokens // CHUNKS),
    }


def total(spans, names, field="products"):
    return sum(getattr(span.work, field) for span in spans if span.name in names)


@pytest.mark.full
def test_products_of_layers_are_those_of_the_trees_tokens():
    products = {name: total(spans, LAYERS) for name, spans in counted().items()}
    share = GROUP.tokens(True) / GROUP.tokens(False)
    print(
        f"products of layers, tree / rows: {products['tree'] / products['rows']:.4f}, "
        f"tokens {share:.4f}"
    )
    assert share == pytest.approx(1 / 11)
    assert products["tree"] / products["rows"] == pytest.approx(share, rel=0.02)
    # the completions' alone
    assert total(counted()["tree"], HEAD) == total(counted()["rows"], HEAD) > 0


def taken_by_the_head(spans):
    """The most bytes that the head takes beyond what is there when it begins, its labels and hidden
    states among them."""
    (start,) = (span.start for span in spans if span.name == HEAD[0])
    return max(span.peak for span in spans if span.name in HEAD) - start


def max_peak(spans):
    return max(span.peak for span in spans)


def test_the_head_takes_what_the_trees_own_tokens_take():
    tree, plain = (taken_by_the_head(counted()[name]) for name in ("tree", "plain"))
    print(
        f"head and expansion: {tree / 2**30:.3f} GiB, of a row with the tree's tokens "
        f"{plain / 2**30:.3f}"
    )
    assert tree <= 1.1 * plain
    assert max_peak(counted()["tree"]) <= 1.01 * max_peak(counted()["plain"])


def expanded(x, tree):
    """A mutant: the head reads the hidden states of all rows, [B, T, h]."""
    return row_outputs.LazyHidden.make(row_outputs.spread_output(x.source, tree), x.recipe, x.dtype)


def test_a_head_that_reads_all_rows_is_seen(monkeypatch):
    monkeypatch.setattr(row_outputs, "_copy_lazy_rows", expanded)
    spans = count(ROWS, GROUP.row, GROUP.tokens(True) // CHUNKS, shared=True)
    assert taken_by_the_head(spans) > 1.5 * taken_by_the_head(counted()["plain"])


@functools.cache
def profile():
    """Of one row, streamed with nothing saved."""
    return survey(skeleton(), (streamed_recipe(),), 1, None, "cudnn")


def sum_of_field(works, field, names):
    return sum(getattr(works[name], field) for name in names)


@pytest.mark.parametrize("way", ["rows", "tree"])
def test_a_groups_work_and_peak_are_those_counted(way):
    """Attention's pairs of a tree have a closed form; the count takes documents of one varlen call
    for one long one."""
    shared, spans = way == "tree", counted()[way]
    rows = 1 if shared else ROWS
    size = GROUP.tokens(shared) // rows // CHUNKS
    (method,) = profile().methods
    works = work(method, GROUP, shared, size)
    for names in (LAYERS, HEAD):
        assert sum_of_field(works, "products", names) == pytest.approx(
            total(spans, names), rel=0.02
        ), names
    traffic = sum_of_field(works, "traffic", LAYERS) / total(spans, LAYERS, "traffic")
    pairs = [
        sum_of_field(works, name, LAYERS) / total(spans, LAYERS, name)
        for name in ("forward", "backward")
    ]
    planned = peak(profile(), method, GROUP.tokens(shared), rows * size, Setting(optimizer=0))
    weights = sum(group.bytes for group in profile().groups)
    memory = (planned.total - weights) / max_peak(spans)
    print(
        f"{way}, planned / counted: moved {traffic:.3f}, attention {pairs[0]:.3f} {pairs[1]:.3f}, "
        f"peak {memory:.3f}"
    )
    assert traffic == pytest.approx(1, abs=0.05)
    assert all((0.94 if shared else 0.99) <= share <= 1.01 for share in pairs)
    assert memory == pytest.approx(1, abs=0.02)


def test_pairs_of_a_group_are_those_of_its_tree():
    """Counted one by one, with each query's own key."""
    batch = Batch((79,) * 3, 70)
    ids = torch.randint(3, 1000, (3, 79), generator=seeded(1))
    ids[:, :70] = ids[0, :70].clone()
    tree = find_tree(ids)
    depths = [
        range(s.span.row_start, s.span.row_start + s.span.stop - s.span.start)
        for s in tree.segments
    ]
    pairs = sum(depth + 1 for segment in depths for depth in segment)
    assert batch.tokens(True) == tree.tokens == 70 + 3 * 9
    assert batch.reach(True) * batch.tokens(True) == 2 * pairs - tree.tokens
    assert batch.reach(False) == 79


def test_a_group_of_one_row_is_a_row():
    (method,) = profile().methods
    row_works = work_of_one_row(method, 2**16, 2**13)
    for shared in (False, True):
        works = work(method, Batch((2**16,), 7 * 2**13), shared, 2**13)
        for name in LAYERS:
            assert works[name] == pytest.approx(row_works[name])
        # of which it scores an eighth
        assert works["head"].products == pytest.approx(row_works["head"].products / 8)


def test_the_fastest_way_that_fits():
    rows, shared = predict_padded_and_packed(profile(), GROUP, Memory(2**40), Setting(optimizer=0))
    assert rows.fits
    assert shared.fits
    assert (rows.tokens, shared.tokens) == (16 * 33 * 1024, 48 * 1024)
    assert 8 < rows.flops / shared.flops < 11
    assert 8 < rows.seconds / shared.seconds < 11
    assert rows.resident > 2 * shared.resident
    small = Memory(int(1.5 * shared.peak.total))
    rows, shared = predict_padded_and_packed(profile(), GROUP, small, Setting(optimizer=0))
    assert shared.fits
    assert not rows.fits
    for wrong in (
        {"profile": dataclasses.replace(profile(), batch_size=2)},
        {"setting": Setting(gpus=2, ulysses=2)},
    ):
        arguments = {"profile": profile(), "batch": GROUP, "memory": small, "setting": Setting()}
        with pytest.raises(ConfigError, match="one row on one rank"):
            predict_padded_and_packed(**{**arguments, **wrong})
    for lengths, prompt in (((), 0), ((5, 0), 0), ((5, 4), 4)):
        with pytest.raises(ConfigError, match="longer than the prompt"):
            Batch(lengths, prompt)


def test_groups_on_the_command_line(tmp_path, capsys, monkeypatch):
    zoo.tiny_config("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(sys.modules["streambp.planner.plan"], "count_profile", lambda *_: profile())
    ask = ["plan", str(tmp_path), "--gpu-memory", "640GiB", "--group", "16"]
    assert main([*ask, "--prompt", "32k"]) == 0
    table = capsys.readouterr().out
    assert "A group of 16 rows with a prompt of 32,768 tokens" in table
    for length, ratio in zip(batches.COMPLETION_TOKENS, ("11.00", "6.00", "2.67"), strict=True):
        assert f"{length:,}: as given" in table
        assert ratio in table
    (pasted,) = re.findall(r"For completions of 16,384 tokens: (.*)", table)
    assert eval(pasted, {"streambp": streambp}).rows == "packed"
    (launch,) = re.findall(r"  launch +streambp (.*)", table)
    assert settings_from_flags(parse(shlex.split(launch))).config.rows == "packed"
    assert main([*ask, "--prompt", "1k", "--seq-len", "1280", "--json"]) == 0
    ((rows, shared),) = json.loads(capsys.readouterr().out)["batches"]
    assert (rows["tokens"], shared["tokens"]) == (16 * 1280, 1024 + 16 * 256)
    assert main([*ask, "--prompt", "32k", "--gpu-memory", "16GiB"]) == 1
    table = capsys.readouterr().out
    assert "does not fit" in table
    assert "StreamConfig" not in table
    for wrong, message in (
        ([], "needs --prompt"),
        (["--prompt", "1k", "--seq-len", "512"], "Raise --seq-len above --prompt"),
    ):
        assert main([*ask, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_pairs_of_a_padded_batch_are_those_of_its_tree():
    lengths = (79, 31, 5, 64)
    ids = torch.randint(3, 1000, (len(lengths), 79), generator=seeded(2))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    batch, tree = Batch(lengths), find_tree(ids, mask)
    depths = [
        range(s.span.row_start, s.span.row_start + s.span.stop - s.span.start)
        for s in tree.segments
    ]
    pairs = sum(depth + 1 for segment in depths for depth in segment)
    assert batch.tokens(True) == tree.tokens == sum(lengths)
    assert batch.reach(True) * batch.tokens(True) == 2 * pairs - tree.tokens
    assert (batch.tokens(False), batch.reach(False)) == (4 * 79, 79)


def test_a_micro_batch_of_a_data_set():
    lengths = [100, 10, 30, 20, 50, 40, 60, 90, 70, 80]
    assert Batch.of_data(lengths, 5).lengths == (20, 40, 60, 80, 100)
    assert Batch.of_data(lengths, 1).lengths == (100,)
    assert Batch.of_data([7, 9], 4).lengths == (7, 7, 9, 9)
    assert Batch.of_mean(512, 190, 8).lengths == (144,) * 7 + (512,)


def test_lengths_on_the_command_line(tmp_path, capsys, monkeypatch):
    zoo.tiny_config("llama").save_pretrained(tmp_path)
    requests = []
    monkeypatch.setattr(
        sys.modules["streambp.planner.plan"],
        "count_profile",
        lambda asking, *_: requests.append(asking) or profile(),
    )
    ask = ["plan", str(tmp_path), "--gpu-memory", "640GiB", "--batch-size", "4"]
    file = tmp_path / "lengths"
    file.write_text("".join(f"{1024 * row}\n" for row in range(1, 65)))
    assert main([*ask, "--lengths", str(file)]) == 0
    table = capsys.readouterr().out
    assert "4 rows of 16,384 to 65,536 tokens, 38% padding" in table
    assert requests[-1].batch_size == 1
    assert main([*ask, "--lengths", str(file), "--seq-len", "32k", "--json"]) == 0
    ((rows, packed),) = json.loads(capsys.readouterr().out)["batches"]
    assert (rows["tokens"], packed["tokens"]) == (4 * 32768, 16384 + 3 * 32768)
    assert main([*ask, "--mean-length", "10k", "--seq-len", "32k", "--json"]) == 0
    ((rows, packed),) = json.loads(capsys.readouterr().out)["batches"]
    assert rows["tokens"] == 4 * 32768
    assert packed["tokens"] == pytest.approx(40960, abs=4)
    assert 2 < rows["seconds"] / packed["seconds"] < 3.2  # the head scores the same tokens in both
    assert main([*ask, "--lengths", str(file), "--gpu-memory", "14GiB"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "absent"], "--lengths absent cannot be read"),
        (["--lengths", "{words}"], "has 'long'"),
        (["--lengths", "{empty}"], "has no number"),
        (["--lengths", "{numbers}", "--batch-size", "1"], "one has no padding. Add --batch-size 8"),
        (
            ["--lengths", "{numbers}", "--mean-length", "4"],
            "--lengths and --mean-length each describe a micro-batch",
        ),
        (["--mean-length", "4"], "--mean-length 4 needs --seq-len"),
        (
            ["--mean-length", "4", "--seq-len", "14"],
            "with --batch-size 4 pass a number from 4 to 13",
        ),
        (["--mean-length", "4", "--seq-len", "3"], "a number from 4 to 13"),
    ],
)
def test_batches_that_cannot_be(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"words": "3 long", "empty": "\n", "numbers": "3\n5\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ask = ["plan", "Qwen/Qwen3-8B", "--gpu-memory", "80GiB", "--batch-size", "4"]
    assert main([*ask, *(word.format(**{name: name for name in files}) for word in options)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
