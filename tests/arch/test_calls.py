"""Calls say what their arguments are, and each line assigns one thing: seven positional arguments,
or three unrelated values, can only be told apart by counting.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "octavo"
KERNELS = PACKAGE / "executor" / "torch" / "triton"
"""Triton kernels, whose arguments have the order of their compiled signature."""
EVERY_FILE = sorted(PACKAGE.rglob("*.py"))
FILES = [path for path in EVERY_FILE if not path.is_relative_to(KERNELS)]
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


def packed_lines(source: str) -> list[int]:
    """Returns the lines that assign three values or more which are made in different ways."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > 2
        and len(set(map(_kind, node.value.elts))) > 1
    ]


def _kind(value: ast.expr) -> str:
    """Returns how a value is made: which function is called, what type a constant has."""
    if isinstance(value, ast.Constant):
        return "number" if type(value.value) in (int, float) else type(value.value).__name__
    if isinstance(value, ast.Call):
        return getattr(value.func, "attr", ast.unparse(value.func))
    return type(value).__name__


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_calls_of_many_arguments_name_them(path: Path) -> None:
    assert long_calls(path.read_text()) == []


def test_long_calls_are_found() -> None:
    source = "f(1, 2, 3, 4, 5, 6)\ng.h(1, 2, 3, 4, 5, 6, 7)\nlog.info('', 1, 2, 3, 4, 5, 6)"
    assert long_calls(source) == ["2: g.h"]


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_unrelated_assignments_have_lines_of_their_own(path: Path) -> None:
    assert packed_lines(path.read_text()) == []


def test_packed_lines_are_found() -> None:
    source = "a, b, c = 1, 2, 3.0\nx, y, z = f(1), f(2), f(3)\nd, e, g = 0, [], h(1)"
    assert packed_lines(source) == [3]
