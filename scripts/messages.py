"""List the messages of streambp's errors, and those that do not say what happened, why, and one
remedy in plain words.

python scripts/messages.py             the messages that break a rule, with file, line and rules
python scripts/messages.py --all       every message

A message is the text of a call of an error class such as `ConfigError(...)`. Values inside of a
message read `_`, and constants of the module are put in. Each rule is one regular expression or one
count:

    long        a sentence has more than 30 words
    stacked     a sentence links clauses as scripts/prose.py counts them
    vague       a sentence has two or more pronouns in place of nouns
    private     a word that this project uses in a sense of its own
    no remedy   no sentence tells the reader to do something, and none says what must be
    remedies    more than two things to do

`tests/repository/test_messages.py` limits the share of messages that break a rule.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.prose import ROOT, broken

# Errors that only this package reads: their texts are reasons, parts of a line of `describe`.
INTERNAL_ERRORS = frozenset({"UnsharedError", "NoKernelsError", "LayerRecomputationError"})
PRIVATE_NAME = re.compile(
    r"\b(told|telling|site|sites|look|looks|hand|hands|handed|whole|kept|let go|given up|gives|gave|"
    r"at work|own run|put on|taken off|take off|halves|apart|for good|among others|brought back|"
    r"passed over|stands? in|stand-ins?|goes? on|went on|the like|makes something else)\b",
    re.IGNORECASE,
)
# "whole" as of integers, rows and models is no word of this project
PLAIN_SENTENCE = re.compile(
    r"whole (numbers?|layers?|decoder layers|rows?|model|sequences?|gradients)|`with`|whole_length",
    re.IGNORECASE,
)
REMEDY = (
    "add|apply|call|change|check|choose|clip|compute|count|delete|do|empty|enter|export|free|freeze|give|install|"
    "keep|leave|let|load|lower|make|mark|move|name|omit|pad|pass|patch|plan|put|raise|read|rebuild|register|"
    "remove|rename|repeat|replace|report|restart|resume|return|run|save|set|shift|shorten|"
    "start|stop|switch|tokenize|train|truncate|try|unpatch|upgrade|use|verify|wait|work|write"
)
REMEDY_START = re.compile(
    rf"^_?(please |then |first |for [^,]*, |in [^,]*, |to [^,]*, |if [^,]*, )?({REMEDY})\b", re.I
)
FURTHER_REMEDY = re.compile(
    rf"(?:\bor |; (?:or )?|, (?:and |then )?)(?:else )?({REMEDY})\b(?! (?:is|are|of|in)\b)", re.I
)
RULE = re.compile(r"\b(must|needs?|at most|at least)\b", re.IGNORECASE)
NUMBER_OF_REMEDIES = 2


class Message(NamedTuple):
    """Text of one error.

    Attributes:
        location: file and line.
        error: name of the error class.
        text: the text, values as `_`.
    """

    location: str
    error: str
    text: str


def error_classes(package: Path) -> set[str]:
    """Return the names of `StreamBPError` and of the classes that derive from it."""
    names = {"StreamBPError", "DeviceMemoryError"}
    classes = [
        node
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    previous_count = 0
    while previous_count < len(names):
        previous_count = len(names)
        for node in classes:
            if any(ast.unparse(base) in names for base in node.bases):
                names.add(node.name)
    return names


def text_of(node: ast.AST, constants: dict[str, ast.expr]) -> str:
    """Return the text of an expression, values as `_`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        inner = node.value
        is_text = isinstance(inner, ast.Name | ast.IfExp)
        return text_of(inner, constants) if is_text else "_"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.IfExp):
        return text_of(node.body, constants)
    if isinstance(node, ast.Name) and isinstance(constants.get(node.id), ast.expr):
        return text_of(constants[node.id], {})
    return "_"


def messages(package: Path) -> Iterator[Message]:
    """Yield the message of each error that the package makes."""
    names = error_classes(package) - INTERNAL_ERRORS
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        constants = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = node.value
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in names:
                text = " ".join(text_of(part, constants) for part in node.args)
                location = f"{path.relative_to(package)}:{node.lineno}"
                if len(re.findall(r"[a-z]{2,}", text)) > 3:
                    yield Message(location, ast.unparse(node.func), text)


def rules_broken(text: str) -> list[str]:
    """Return the names of the rules that a message breaks."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z_`\"(\[])", text)
    breaks = set()
    remedies = 0
    states_rule = False
    for sentence in sentences:
        plain = PLAIN_SENTENCE.sub("", sentence)
        sentence = re.sub(r"\bit must\b", "that must", re.sub(r"\bone\b", "a", sentence))
        breaks |= set(broken(sentence, in_section=True)) & {"long", "stacked", "vague"}
        if PRIVATE_NAME.search(plain):
            breaks.add("private")
        states_rule = states_rule or bool(RULE.search(sentence))
        for part in re.split(r"; |: ", sentence):
            if REMEDY_START.match(part):
                remedies += 1
            remedies += len(FURTHER_REMEDY.findall(part))
    if not remedies and not states_rule:
        breaks.add("no remedy")
    if remedies > NUMBER_OF_REMEDIES:
        breaks.add("remedies")
    return sorted(breaks)


def main() -> int:
    """Print the messages that break a rule, or all, and the share of the former."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    rows = list(messages(ROOT / "streambp"))
    flagged = 0
    for message in rows:
        rules = rules_broken(message.text)
        flagged += bool(rules)
        if rules or options.all:
            print(f"{message.location} {message.error} [{', '.join(rules)}] {message.text}")
    print(f"{flagged} of {len(rows)} messages break a rule: {100 * flagged / len(rows):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
