"""Docstrings and comments are plain sentences that stand alone, by the rules of prose.py."""

import pytest

from tests.arch import prose


@pytest.mark.parametrize("path", prose.files(), ids=lambda path: str(path.relative_to(prose.ROOT)))
def test_prose_is_plain(path):
    assert not [str(finding) for finding in prose.findings(path)]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('def f():\n    """Of a step, what it costs."""', "opens as a fragment"),
        ('x = 1\n"""That it is to have on the device."""', "opens as a riddle"),
        ('class A:\n    """They have ended."""', "opens with a pronoun"),
        ('def f():\n    """The rows\' tables."""', "a function's docstring opens with a verb"),
        ('def f():\n    """Waits while nobody asks."""', "says nobody"),
        ("x = 1  # for whoever comes meanwhile", "says meanwhile, whoever"),
        ('def f(n):\n    """Returns the groups of so\n    many layers."""', "says so many"),
    ],
)
def test_a_riddle_is_found(tmp_path, source, why):
    path = tmp_path / "sample.py"
    path.write_text(source)
    assert [finding.why for finding in prose.findings(path)] == [why]


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Returns the rows\' tables."""',
        'x = 1\n"""Length of the block table on the device."""',
        'def test_f():\n    """A request\'s tokens do not depend on its batch."""',
    ],
)
def test_plain_prose_is_left_alone(tmp_path, source):
    path = tmp_path / "sample.py"
    path.write_text(source)
    assert not prose.findings(path)
