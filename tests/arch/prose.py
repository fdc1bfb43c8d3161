"""Finds retired words in docstrings, comments and documents.

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
    """A place where a retired word stands."""

    path: Path
    line: int
    why: str
    text: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.why}: {self.text}"


def findings(path: Path) -> list[Finding]:
    """Returns the retired words in the prose of one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [*_of_docstrings(path, text), *_of_python_comments(path, text)]
    if path.suffix == ".md":
        return _of_document(path, text)
    return list(_of_cpp_comments(path, text))


def files() -> list[Path]:
    """Lists the files whose prose is checked."""
    suffixes = {".py", ".h", ".cpp", ".inl", ".md"}
    found = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and path != Path(__file__) and "node_modules" not in path.parts
    ]
    return [*found, *sorted(ROOT.glob("*.md"))]


def _of_docstrings(path: Path, text: str) -> Iterator[Finding]:
    for node in ast.walk(ast.parse(text)):
        if _is_string(node) and (why := _retired_word(node.value.value)):
            yield Finding(path, node.lineno, why, node.value.value.strip().partition("\n")[0])


def _is_string(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _retired_word(text: str) -> str | None:
    words = re.findall(r"[a-z]+", text.lower())
    used = RETIRED & set(words)
    used |= {phrase for phrase in RETIRED_PHRASES if f" {phrase} " in f" {' '.join(words)} "}
    return f"says {', '.join(sorted(used))}" if used else None


def _of_python_comments(path: Path, text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (why := _retired_word(token.string)):
            yield Finding(path, token.start[0], why, token.string)


def _of_cpp_comments(path: Path, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        match = re.search(r"(?<!:)//+ ?(.*)$", line)
        if match is not None and (why := _retired_word(match[1])):
            yield Finding(path, number, why, match[1].strip())


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
