"""Count sentences that are hard to read and packed code, by folder of streambp/, and keep folders
from getting worse.

python scripts/prose.py                     one row for each folder, and a total
python scripts/prose.py --worst 40          the sentences that break most rules, with file and line
python scripts/prose.py --lower             write today's counts into the limits, where they are lower

A sentence is a docstring's or comment's text between full stops. Section headers, tables, code,
tensor shapes and sentences of fewer than three words are left out. Each rule is one regular
expression or one count:

    clause     opens with a noun clause: What, Whether, Why, How, Who, Which, Where, Those that
    fragment   opens with a preposition or a pronoun in place of a subject or a verb: Of, By, Within, As, Not, It, They
    stacked    three or more of that, which, who, what, where, when, whether, as, than, or two within four words
    vague      two or more of it, they, them, those, others, such, so many, one, there, else
    long       more than 30 words
    list       more than one semicolon, or more than two colons
    inline     defines an attribute or argument in running text, `name: meaning`, outside of an Args or Attributes section
    private    two or more words that this project uses in a sense of its own

Beside them: function docstrings whose first word is no verb, lines beyond 100 columns, and for
1,000 lines of code conditional expressions, comprehensions, and assignments of a tuple to several
targets. Limits are shares and densities in tests/prose_limits.json; `tests/repository/test_prose_limits.py`
holds each folder to its row.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = ROOT / "tests" / "prose_limits.json"
RULES = ("clause", "fragment", "stacked", "vague", "long", "list", "inline", "private")
MAX_COLUMNS = 100
MAX_WORDS = 30

CLAUSE = re.compile(
    r"^(what|whether|why|how|who|which|where|that which|those (that|which|of))\b", re.IGNORECASE
)
FRAGMENT = re.compile(
    r"^(of|by|with|within|without|as|from|for|not|nor|beside|besides|it|they|its|their|these|those|the same|so many|"
    r"up to|at|to|in|on|than|else|to be)\b(?! (be|example|now|instance)\b)",
    re.IGNORECASE,
)
LINKS = re.compile(r"\b(that|which|who|whose|what|where|when|whether|as|than)\b", re.IGNORECASE)
VAGUE = re.compile(
    r"\b(it|they|them|those|others|such|so many|as many|as much|ones|one|else|besides|therein|thereof|there)\b"
    r"(?! (is|are|more|less|of the|tensor|layer|chunk|token|row|block|model|call|rank|step|by one))",
    re.IGNORECASE,
)
INLINE = re.compile(r"(?:^|[.;] )([a-z_]{2,}(?:, [a-z_]{2,})*): [a-z]")
PRIVATE = re.compile(
    r"\b(told|tells?|telling|let go|at work|own run|whole|looks?|seen|sees|handed?|hands|stands? in|stand-ins?|wants?|"
    r"wanted|is there|are there|comes?|came|known|kept|site|watched?|acted|put on|taken off|takes off|places?|halves|"
    r"gives?|given|knows?|asks?|asked|says?|said|apart|for good|takes notice)\b",
    re.IGNORECASE,
)
SECTION = re.compile(
    r"^\s*(Args|Arguments|Attributes|Returns|Raises|Yields|Examples?|Notes?|Warning)s?:\s*$"
)
ENTRY = re.compile(r"^\s*[\w`*., ]{1,60}(\([^)]*\))?: ")
CITATION = re.compile(r"\[Note: [^\]]*\]")
TOOL_COMMENTS = ("type:", "noqa", "fmt:", "pylint", "mypy", "!", "Copyright", "Licensed", "SPDX")
VERBS = frozenset(
    """
    add allocate apply ask assert attend begin bind borrow build call cast change check choose
    clear close collect combine compare compute concatenate configure convert copy count
    create cut decide delete describe detach determine differentiate disable discard draw
    drop enable end ensure enter estimate evaluate exchange expand expect fall fetch fill
    find flatten follow format forward free gather generate get give group handle hash
    hide hold ignore implement import initialize insert install issue join keep know launch
    leave let limit list load lock look lower make map mark mask match measure merge move
    multiply name note open order overwrite pack pad pair parse pass patch perform permute
    pin place pop prepare print push put query raise rank read rearrange rebuild receive
    recompute record reduce refuse register release reload remember remove rename reorder
    repeat replace report require rerun reserve reset reshape resolve restore resume
    retrieve retry return reverse revert round run sample save scale scan schedule search
    see select send set shard shift show silence skip slice sort split stack start stop
    store stream subtract sum swap switch synchronize take tell test time tokenize total
    track train transform translate trim truncate try unbind undo uninstall unpack unpatch
    update use validate verify view wait walk warn watch weigh widen wrap write yield zero
    """.split()  # noqa: SIM905 - one word a line would be two pages
)

Row = Counter[str]


def blocks(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the docstrings and comment blocks of a file: the line, the text, and whether the text
    is a docstring."""
    source = path.read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
        ):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text, True
    lines: list[str] = []
    first = last = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#").strip()
        if token.type != tokenize.COMMENT or text.startswith(TOOL_COMMENTS):
            continue
        is_full_line = token.line.strip().startswith("#")
        if lines and is_full_line and token.start[0] == last + 1:
            lines.append(text)
        else:
            if lines:
                yield first, " ".join(lines), False
            lines = [text]
            first = token.start[0]
        last = token.start[0] if is_full_line else -2
    if lines:
        yield first, " ".join(lines), False


def sentences(text: str, is_docstring: bool) -> list[tuple[str, bool]]:
    """Return the sentences of a text, and for each whether it stands in a section such as Args."""
    pairs: list[tuple[str, bool]] = []
    paragraph: list[str] = []
    inside = False

    def close() -> None:
        joined = CITATION.sub("", " ".join(paragraph)).strip()
        paragraph.clear()
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(\[])", joined):
            words = re.findall(r"[A-Za-z][A-Za-z'-]*", sentence)
            if len(words) >= 3 and sum(map(len, words)) * 2 > len(sentence):
                pairs.append((sentence.strip(), inside))

    for line in text.splitlines() if is_docstring else [text]:
        indented = line.startswith("    ") and not inside
        if SECTION.match(line):
            close()
            inside = True
        elif (
            not line.strip() or indented or "   " in line.strip()
        ):  # a blank line, a listing, a table
            close()
        elif inside and ENTRY.match(line):
            close()
            paragraph.append(line.split(": ", 1)[1])
        else:
            if inside and line[:1].strip():
                close()
                inside = False
            paragraph.append(line.strip())
    close()
    return pairs


def broken(sentence: str, in_section: bool) -> list[str]:
    """Return the names of the rules that a sentence breaks."""
    count = len(re.findall(r"[\w'-]+", sentence))
    links = [match.start() for match in LINKS.finditer(sentence)]
    links_are_close = any(len(sentence[a:b].split()) <= 4 for a, b in itertools.pairwise(links))
    breaks = {
        "clause": bool(CLAUSE.match(sentence)),
        "fragment": bool(FRAGMENT.match(sentence)),
        "stacked": (len(links) >= 3 and count <= 40) or links_are_close,
        "vague": len(VAGUE.findall(sentence)) >= 2,
        "long": count > MAX_WORDS,
        "list": sentence.count(";") > 1 or sentence.count(": ") > 2,
        "inline": not in_section and bool(INLINE.search(sentence)),
        "private": len(PRIVATE.findall(sentence)) >= 2,
    }
    return [rule for rule in RULES if breaks[rule]]


def begins_with_verb(docstring: str) -> bool:
    """True if a docstring begins with a verb ("Return", "Computes"), with "True if" or with
    "Context manager that"."""
    match = re.match(r"[^A-Za-z]*([A-Za-z_]+)(?: ([A-Za-z]+))?", docstring)
    if match is None:
        return False
    first, second = match[1].lower(), (match[2] or "").lower()
    stems = {
        first,
        first.removesuffix("s"),
        first.removesuffix("es"),
        first.removesuffix("ies") + "y",
    }
    return bool(stems & VERBS) or (first, second) in (("true", "if"), ("context", "manager"))


def count_code(path: Path) -> Row:
    """Return counts of one file: lines of code, wide ones, packed expressions, and docstrings of
    functions."""
    source = path.read_text("utf-8")
    lines = [
        line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")
    ]
    row: Row = Counter(lines=len(lines), wide=sum(len(line) > MAX_COLUMNS for line in lines))
    for node in ast.walk(ast.parse(source)):
        row["ifexp"] += isinstance(node, ast.IfExp)
        row["comprehensions"] += isinstance(
            node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        )
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            row["tuples"] += isinstance(node.value, ast.Tuple)
        docstring = (
            ast.get_docstring(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            else None
        )
        if docstring:
            row["docstrings"] += 1
            row["no verb"] += not begins_with_verb(docstring)
    return row


def counts_of(root: Path) -> tuple[dict[str, Row], list[tuple[int, str, str]]]:
    """Return the counts of each folder inside `root`, and every sentence: rules broken, its place,
    and its text."""
    rows: dict[str, Row] = {}
    flagged_sentences: list[tuple[int, str, str]] = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        folder = inside.parts[0] if len(inside.parts) > 1 else "."
        row = rows.setdefault(folder, Counter())
        row.update(count_code(path))
        for line, text, is_docstring in blocks(path):
            for sentence, in_section in sentences(text, is_docstring):
                rules = broken(sentence, in_section)
                row["sentences"] += 1
                row["any rule"] += bool(rules)
                row["two rules"] += len(rules) > 1
                row.update(rules)
                flagged_sentences.append(
                    (len(rules), f"{inside}:{line} [{', '.join(rules)}]", sentence)
                )
    return rows, flagged_sentences


def rates_of(row: Row) -> dict[str, float]:
    """Return what is limited: percentages of sentences, docstrings and lines, and densities for
    1,000 lines of code."""
    per_line = 1000 / max(1, row["lines"])
    return {
        "any rule": round(100 * row["any rule"] / max(1, row["sentences"]), 1),
        "two rules": round(100 * row["two rules"] / max(1, row["sentences"]), 1),
        "no verb": round(100 * row["no verb"] / max(1, row["docstrings"]), 1),
        "wide": round(100 * row["wide"] / max(1, row["lines"]), 1),
        "ifexp": round(row["ifexp"] * per_line, 1),
        "comprehensions": round(row["comprehensions"] * per_line, 1),
        "tuples": round(row["tuples"] * per_line, 1),
    }


def exceeded(rows: dict[str, Row], limits: dict[str, dict[str, float]]) -> list[str]:
    """Return a line for each rate of a folder that is above its limit; a new folder has the limits
    of the total."""
    messages = []
    for folder, row in rows.items():
        bars = limits.get(folder, limits["all"])
        for name, rate in rates_of(row).items():
            if rate > bars[name]:
                messages.append(f"{folder}: {name} {rate}, limit {bars[name]}")
    return messages


def with_total(rows: dict[str, Row]) -> dict[str, Row]:
    """Return the rows and their sum, "all"."""
    total: Row = Counter()
    for row in rows.values():
        total.update(row)
    return {**dict(sorted(rows.items())), "all": total}


def lower(limits: dict[str, dict[str, float]], rows: dict[str, Row]) -> dict[str, dict[str, float]]:
    """Return the limits, each no higher than today's rate; a folder without limits gets today's
    rates."""
    new_limits = {}
    for folder, row in rows.items():
        today = rates_of(row)
        old_limits = limits.get(folder, today)
        new_limits[folder] = {name: min(rate, old_limits[name]) for name, rate in today.items()}
    return new_limits


def main() -> int:
    """Print the table, or the worst sentences, or write the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT / "streambp")
    parser.add_argument("--worst", type=int, default=0)
    parser.add_argument("--lower", action="store_true")
    options = parser.parse_args()
    folders, flagged_sentences = counts_of(options.root)
    rows = with_total(folders)
    if options.lower:
        limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
        LIMITS.write_text(json.dumps(lower(limits, rows), indent=1) + "\n")
        return 0
    if options.worst:
        for number, location, sentence in sorted(
            flagged_sentences, key=lambda flagged: -flagged[0]
        )[: options.worst]:
            print(number, location, sentence[:200])
        return 0
    names = list(rates_of(rows["all"]))
    print(f"{'folder':14}{'sentences':>10}" + "".join(f"{name:>15}" for name in names))
    for folder, row in rows.items():
        rates = rates_of(row)
        print(f"{folder:14}{row['sentences']:10}" + "".join(f"{rates[name]:15}" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
