"""Docstrings, comments and documents use no retired word (prose.py)."""

import pytest

from tests.arch import prose


@pytest.mark.parametrize("path", prose.files(), ids=lambda path: str(path.relative_to(prose.ROOT)))
def test_prose_is_plain(path):
    assert not [str(finding) for finding in prose.findings(path)]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('def f():\n    """Waits while nobody asks."""', "says nobody"),
        ("x = 1  # for whoever comes meanwhile", "says meanwhile, whoever"),
        ('def f(n):\n    """Returns the groups of so\n    many layers."""', "says so many"),
    ],
)
def test_a_retired_word_is_found(tmp_path, source, why):
    path = tmp_path / "sample.py"
    path.write_text(source)
    assert [finding.why for finding in prose.findings(path)] == [why]


def test_a_docstring_may_open_with_any_word(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text('def f():\n    """Per request: its tokens."""')
    assert not prose.findings(path)
