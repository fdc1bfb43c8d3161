"""What the documents promise is held by tests that exist, and no promise is left out."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = tomllib.loads((ROOT / "docs" / "guarantees.toml").read_text())
GUARANTEES = SOURCE["guarantee"]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "docs" / "distributed.md"]
PAGES += [*(ROOT / "docs" / "guides").glob("*.md"), *(ROOT / "docs" / "concepts").glob("*.md")]
WORDS = re.compile(
    r"bitwise|bit for bit|\bsame bits\b|\bsame tokens\b|equal tokens|\bnever\b|\balways\b"
    r"|exactly once",
    re.IGNORECASE,
)
NEW_BLOCK = re.compile(r"\s*(\||- |\d+\. |#)")


def joined(text: str) -> str:
    return " ".join(text.split())


def sentences(text: str) -> list[str]:
    """Returns the sentences with such a word, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.startswith("    "):
            continue
        if not line.strip() or NEW_BLOCK.match(line):
            blocks.append([])
        blocks[-1].append(line)
    parts = [
        part for block in blocks for part in re.split(r"(?<=[.:;]) ", joined("\n".join(block)))
    ]
    return [part for part in parts if WORDS.search(part)]


def phrases(page: Path) -> list[str]:
    name = str(page.relative_to(ROOT))
    stated = [phrase for entry in GUARANTEES for phrase in entry["stated"].get(name, ())]
    return stated + SOURCE["plain"].get(name, [])


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("entry", GUARANTEES, ids=lambda entry: entry["text"][:40])
def test_the_tests_of_a_guarantee_exist(entry):
    assert entry["tests"]
    for test in entry["tests"]:
        path, _, name = test.partition("::")
        assert name in functions(path), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_promise_of_a_page_is_listed(page):
    text, listed = joined(page.read_text()), phrases(page)
    assert not [phrase for phrase in listed if phrase not in text]
    unlisted = [one for one in sentences(page.read_text()) if not any(p in one for p in listed)]
    assert not unlisted, "name the test that holds it in docs/guarantees.toml, or mend the sentence"


def test_every_page_that_is_listed_is_read():
    named = {page for entry in GUARANTEES for page in entry["stated"]} | {*SOURCE["plain"]}
    assert named <= {str(page.relative_to(ROOT)) for page in PAGES}


def test_every_statement_of_the_threat_model_has_a_test_that_exists():
    text = (ROOT / "docs" / "concepts" / "threat-model.md").read_text()
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(tests) > 50
    for path, name in tests:
        assert not name or name in functions(path), f"{path}::{name}"
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = table.strip().split("\n")
        if head.endswith("| test |"):
            assert all("`tests/" in row.rpartition(" | ")[2] for row in rows), table
