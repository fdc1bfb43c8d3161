"""Chances of guesses follow from what became of earlier ones of the same class."""

from __future__ import annotations

import pytest

from octavo.engine.speculation.acceptance import FIRST_CHANCES, MATCHES, Acceptance
from octavo.engine.speculation.proposer import DIVIDED, RUNNER_UP, WORKER_MATCH


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 100])
def test_guesses_of_divided_matches_are_measured_apart(length: int) -> None:
    """A text that went on in one way so far mostly does so again; one that did in several may
    not.
    """
    acceptance = Acceptance()
    assert acceptance.chance("r", length + DIVIDED) < acceptance.chance("r", length)
    for _ in range(20):
        acceptance.record("r", length, 4, 4)
        acceptance.record("r", length + DIVIDED, 4, 0)
    sure, divided = (acceptance.reached("r", one, 4) for one in (length, length + DIVIDED))
    assert min(sure) > 0.7 and max(divided) < 0.2
    # Other rows begin with what all rows' guesses say.
    assert (
        acceptance.chance("other", length)
        > 0.8
        > 0.2
        > acceptance.chance("other", length + DIVIDED)
    )


def test_guesses_of_the_worker_have_classes_of_their_own() -> None:
    acceptance = Acceptance()
    for kind in (WORKER_MATCH, RUNNER_UP):
        assert acceptance.chance("r", kind) == FIRST_CHANCES[MATCHES.index(kind)]
