"""The reference page of guarantees: what the documents promise, and the tests that hold it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tables import table

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).parent / "guarantees.toml"


def read_guarantees() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads(SOURCE.read_text())["guarantee"]
    return entries


def guarantees() -> str:
    rows = [
        (
            entry["text"],
            ", ".join(f"[{Path(page).stem}]({_link(page)})" for page in entry["stated"]),
            ", ".join(f"`{test}`" for test in entry["tests"]),
        )
        for entry in read_guarantees()
    ]
    return "\n\n".join(
        [
            "# Guarantees",
            "What the documents promise about results, and the tests that hold it. A test fails if"
            " a sentence of the documents with a word such as bitwise, never or always is not in"
            " `docs/guarantees.toml`, from which this page is made.",
            table(("guarantee", "stated in", "tests"), rows),
        ]
    )


def _link(page: str) -> str:
    return f"../{page.removeprefix('docs/')}" if page.startswith("docs/") else f"../../{page}"
