"""Tests go through public names: they keep holding when the inside of a class is rewritten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
FOREIGN = {
    "_replace",  # of a NamedTuple, documented
    "_exit",  # of os, documented
    "_from_config",  # of transformers
    "_model_mapping",  # of transformers
    "_retrieve_segment",  # of transformers
    *("_combine_tokens_into_words", "_dynamic_time_warping", "_median_filter"),  # of transformers
    "_relative_position_bucket",  # of transformers
    "_init_args_hst",  # of Triton's interpreter
}
"""Names with an underscore that are other packages'."""
NATIVE = "_native"
"""Name of the compiled module, whose underscore keeps users away."""
BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}
"""Functions and methods that take an attribute by its name."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in {*FOREIGN, NATIVE}


def reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each private name of something else that is read, written,
    imported or named in a string.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if private(node.attr) and not is_own:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, each.name) for each in node.names if private(each.name))
        elif isinstance(node, ast.Call) and _called(node.func) in BY_NAME:
            for given in node.args:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    name = given.value.rpartition(".")[2]
                    if private(name):
                        yield node.lineno, name


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_tests_reach_no_private_name(path: Path) -> None:
    found = [f"{line}: {name}" for line, name in reached(ast.parse(path.read_text()))]
    assert not found, f"{path.name} reaches private names; test what is public:\n" + "\n".join(
        found
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a.b._c", ["a.b._c"]),
        ("a._b = 1", ["a._b"]),
        ("from octavo.x import _y", ["_y"]),
        ("monkeypatch.setattr(module, '_name', 1)", ["_name"]),
        ("monkeypatch.setattr('octavo.module._name', 1)", ["_name"]),
        ("self._a; cls._b; key._replace(); os._exit(1); a.__dict__; a.b", []),
        ("from octavo import __version__, _native", []),
    ],
)
def test_private_names_are_found_however_they_are_reached(source: str, names: list[str]) -> None:
    assert [name for _, name in reached(ast.parse(source))] == names
