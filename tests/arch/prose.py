"""Finds docstrings and comments that are not plain English: fragments, riddles and retired words.

`python -m tests.arch.prose [PATH ...]` prints each finding; `test_prose.py` holds the tree to none.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("octavo", "csrc", "tests", "benchmarks", "docs", "examples")
PREPOSITIONS = frozenset(
    {
        "about",
        "after",
        "against",
        "ahead",
        "along",
        "among",
        "around",
        "as",
        "at",
        "because",
        "before",
        "behind",
        "below",
        "beneath",
        "beside",
        "besides",
        "between",
        "beyond",
        "by",
        "during",
        "except",
        "for",
        "from",
        "if",
        "in",
        "inside",
        "into",
        "like",
        "of",
        "off",
        "on",
        "once",
        "onto",
        "out",
        "over",
        "per",
        "since",
        "so",
        "such",
        "than",
        "then",
        "though",
        "through",
        "till",
        "to",
        "toward",
        "towards",
        "under",
        "unless",
        "until",
        "up",
        "upon",
        "where",
        "while",
        "with",
        "within",
        "without",
    }
)
"""Openings that make a docstring a fragment which only another sentence can complete."""
RIDDLES = frozenset(
    {
        "that",
        "those",
        "whose",
        "who",
        "whoever",
        "whom",
        "which",
        "what",
        "why",
    }
)
"""Openings that hide the subject."""
PRONOUNS = frozenset(
    {
        "he",
        "her",
        "his",
        "it",
        "its",
        "she",
        "their",
        "them",
        "they",
    }
)
"""Openings that point at another docstring."""
DETERMINERS = frozenset(
    {
        "a",
        "all",
        "an",
        "another",
        "any",
        "each",
        "every",
        "its",
        "no",
        "none",
        "not",
        "nothing",
        "one",
        "only",
        "same",
        "the",
        "these",
        "this",
    }
)
"""Openings of a noun phrase or a bare statement, where a function's docstring wants a verb."""
RETIRED = frozenset(
    {
        "anybody",
        "everybody",
        "nobody",
        "somebody",
        "whoever",
        "meanwhile",
        "anew",
    }
)
"""Words that the project's prose does without."""
RETIRED_PHRASES = ("so many",)
"""Phrases that stand where a number or an argument has a name."""


@dataclass(frozen=True)
class Finding:
    """One place that is not plain English, and why."""

    path: Path
    line: int
    why: str
    text: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.why}: {self.text}"


def findings(path: Path) -> list[Finding]:
    """Returns what is wrong with the prose of one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [*_of_docstrings(path, text), *_of_python_comments(path, text)]
    if path.suffix == ".md":
        return _of_document(path, text)
    return _of_cpp_comments(path, text)


def files() -> list[Path]:
    """Lists the files whose prose is checked."""
    suffixes = {".py", ".h", ".cpp", ".inl", ".md"}
    found = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and path != Path(__file__)
    ]
    return [*found, *sorted(ROOT.glob("*.md"))]


def _of_docstrings(path: Path, text: str) -> Iterator[Finding]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for index, statement in enumerate(body):
            if not _is_string(statement):
                continue
            kind = _kind(node, index, body)
            first = statement.value.value.strip()
            why = _opening_fault(first, kind) or _retired_word(first)
            if why:
                yield Finding(path, statement.lineno, why, first.splitlines()[0] if first else "")


def _is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _kind(node: ast.AST, index: int, body: list[ast.stmt]) -> str:
    """Names what a string documents: a module, a class, a function, a test or an attribute."""
    if index > 0:
        return "attribute"
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = {ast.unparse(part).split("(")[0] for part in node.decorator_list}
        if node.name.startswith("test") or "given" in decorators:
            return "test"
        names = {name.rpartition(".")[2] for name in decorators}
        return "attribute" if names & {"property", "cached_property", "fixture"} else "function"
    return "attribute"


def _opening_fault(text: str, kind: str) -> str | None:
    """Says why a docstring's first word cannot open it; None where it can."""
    word = re.match(r"[A-Za-z']+", text)
    if word is None:
        return None if text else "empty docstring"
    first = word[0].lower()
    if first == "as" and re.match(r"(?i)as of ", text):
        return None
    if not text[0].isupper():
        return None if re.match(r"[\w.]*[_.\d/(\[]", text) or kind == "module" else "no capital"
    if first in PREPOSITIONS:
        return (
            None if kind in ("module", "test") and first in TEST_OPENINGS else "opens as a fragment"
        )
    if first in RIDDLES:
        return (
            None if kind == "module" and first in ("what", "who", "which") else "opens as a riddle"
        )
    if first in PRONOUNS and kind != "test":
        return "opens with a pronoun"
    if kind == "function" and first in DETERMINERS:
        return "a function's docstring opens with a verb"
    return None


TEST_OPENINGS = frozenset(
    {
        "if",
        "once",
        "where",
        "while",
        "with",
        "without",
        "after",
    }
)
"""Subordinate clauses may open a test's or a module's docstring, which is then a whole sentence."""


def _retired_word(text: str) -> str | None:
    words = re.findall(r"[a-z]+", text.lower())
    used = RETIRED & set(words)
    used |= {phrase for phrase in RETIRED_PHRASES if f" {phrase} " in f" {' '.join(words)} "}
    return f"says {', '.join(sorted(used))}" if used else None


def _of_python_comments(path: Path, text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (why := _retired_word(token.string)):
            yield Finding(path, token.start[0], why, token.string)


def _of_cpp_comments(path: Path, text: str) -> list[Finding]:
    """Checks each block of `//` lines: its opening, and its words."""
    found = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        match = re.search(r"(?<!:)//+ ?(.*)$", line)
        if match is None:
            inside = False
            continue
        own_line = line.lstrip().startswith("//")
        comment = match[1].strip()
        why = _retired_word(comment)
        opens = not inside and not comment.startswith("--")
        if why is None and opens and own_line:
            why = _opening_fault(comment, "attribute") if comment[:1].isupper() else None
        if why:
            found.append(Finding(path, number, why, comment))
        inside = own_line
    return found


def _of_document(path: Path, text: str) -> list[Finding]:
    prose = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    return [
        Finding(path, number, why, line.strip()[:80])
        for number, line in enumerate(prose.splitlines(), 1)
        if (why := _retired_word(line))
    ]


def main(arguments: list[str]) -> None:
    """Prints the findings in the files and folders named, or in all."""
    paths = [Path(argument).resolve() for argument in arguments]
    chosen = [
        file for file in files() if not paths or any(file.is_relative_to(path) for path in paths)
    ]
    found = [finding for file in chosen for finding in findings(file)]
    print("\n".join(map(str, found)))
    print(f"{len(found)} findings in {len(chosen)} files", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
