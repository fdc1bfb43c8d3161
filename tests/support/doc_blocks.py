"""Reads the code blocks of the documents, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROGRAMS = "octavo|curl|make|pip|export|ray|python|pytest|[A-Z_]+=\\S+|\\.venv\\S*"
"""First words of the lines of an indented block that are commands."""
SHELLS = ("bash", "sh", "shell", "console")


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    line: int
    language: str
    """Language of a fence; "" for an indented block."""
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    name, at = str(page.relative_to(ROOT)), 0
    while at < len(lines):
        start = at
        if opened := re.match(r"( *)```(\w*) *(\w*)", lines[at]):
            at += 1
            while not lines[at].strip().startswith("```"):
                at += 1
            text = "\n".join(line.removeprefix(opened[1]) for line in lines[start + 1 : at])
            yield Block(name, start + 1, opened[2], opened[3], text)
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            text = "\n".join(line[4:] for line in lines[start:at]).rstrip()
            yield Block(name, start + 1, "", "", text)
            continue
        at += 1


def shell_lines(block: Block) -> list[str]:
    """Returns the commands of a block in a shell's language, each on one line but for quoted texts;
    of a block without a language only lines that begin with one of PROGRAMS.
    """
    if block.language not in ("", *SHELLS):
        return []
    found, lines = [], re.sub(r"\\\n\s*", " ", block.text).splitlines()
    while lines:
        line = lines.pop(0)
        is_prompt = line.startswith("$ ")
        line = line.removeprefix("$ ")
        known = re.match(rf"({PROGRAMS})(\s|$)", line) if block.language == "" else True
        if not known or (block.language == "console" and not is_prompt):
            continue
        while words_of(line) is None and lines:  # a quoted text goes on
            line += "\n" + lines.pop(0)
        assert words_of(line) is not None, f"{block}: a quotation does not end"
        found.append(line)
    return [line for line in found if words_of(line)]


def words_of(line: str) -> list[str] | None:
    """Returns the words of a command; None if a quotation in it does not end."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return None


def commands(block: Block) -> list[list[str]]:
    """Returns the words of each command of a block, without assignments of variables."""
    found = []
    for line in shell_lines(block):
        words = words_of(line) or []
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        found.append(words)
    return [words for words in found if words]
