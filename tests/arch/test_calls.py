"""Calls say what their arguments are: seven positional ones can only be told apart by counting."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "octavo"
KERNELS = PACKAGE / "backends" / "torch" / "triton"
"""Triton kernels, whose arguments have the order of their compiled signature."""
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(KERNELS)]
BY_FORMAT = {"pack", "debug", "info", "warning"}
"""Functions that take as many arguments as their first one, a format, has places."""
MOST = 6


def long_calls(source: str) -> list[str]:
    """Returns the line and the callee of each call with too many positional arguments."""
    return [
        f"{node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and len(node.args) > MOST
        and getattr(node.func, "attr", "") not in BY_FORMAT
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_calls_of_many_arguments_name_them(path: Path) -> None:
    assert long_calls(path.read_text()) == []


def test_long_calls_are_found() -> None:
    source = "f(1, 2, 3, 4, 5, 6)\ng.h(1, 2, 3, 4, 5, 6, 7)\nlog.info('', 1, 2, 3, 4, 5, 6)"
    assert long_calls(source) == ["2: g.h"]
