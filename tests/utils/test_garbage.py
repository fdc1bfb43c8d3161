"""How often Python collects garbage while an engine runs."""

import gc

import pytest

from octavo.utils.garbage import COLLECT_AFTER, RareCollection


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "raised"),
    [(700, COLLECT_AFTER), (0, 0), (2 * COLLECT_AFTER, 2 * COLLECT_AFTER)],
    ids=["Python's", "disabled", "higher"],
)
def test_the_threshold_is_raised_and_restored(thresholds, before, raised):
    gc.set_threshold(before, 11, 12)
    rare = RareCollection()
    rare.begin()
    rare.begin()
    assert gc.get_threshold() == (raised, 11, 12)
    rare.end()
    assert gc.get_threshold() == (raised, 11, 12)
    rare.end()
    assert gc.get_threshold() == (before, 11, 12)
