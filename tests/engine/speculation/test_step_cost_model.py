"""Which guesses a step verifies, by what steps take on a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.speculation import speculation
from octavo.engine.speculation.proposer import Draft
from octavo.worker.simulated import TOKEN, SimulatedCosts
from tests.support.simulation import request_of, simulation

FREE = ((1, 0.01), (2, 0.0001), (64, 0.0001))
"""Costs as a busy machine may have them measured: nine tokens in a hundredth of the time of one."""
STEADY = ((1, 0.010), (2, 0.011), (64, 0.073))
STEEP = ((1, 0.010), (2, 0.020), (64, 0.640))
"""Costs of a machine on which two tokens take twice as long as one."""


class OneTokenProposer:
    """Guesses one token over and over."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes nothing in."""

    def propose(self, max_tokens: int) -> Draft:
        return Draft([self._token_id] * max_tokens, 4)


def run(monkeypatch, guess, costs, *, lengths):
    """Runs requests of these lengths one after another; returns the numbers of guessed and of
    accepted tokens, and the simulated seconds.
    """
    monkeypatch.setitem(speculation.PROPOSERS, "ngram", lambda: OneTokenProposer(guess))
    table = SimulatedCosts(costs, context_token_s=0.0)
    found = simulation(costs=table, spec_method="ngram", max_model_len=1024)
    requests = [request_of(str(at), 1e3 * at, 20, length) for at, length in enumerate(lengths)]
    found.run(requests)
    stats = found.core.scheduler.stats()
    seconds = sum(record.end_time - record.arrival_time for record in found.records.values())
    return stats.num_draft_tokens, stats.num_accepted_tokens, seconds


@pytest.mark.parametrize("costs", [FREE, STEADY, STEEP], ids=["free", "steady", "steep"])
def test_a_proposer_that_is_always_wrong_is_soon_not_asked(monkeypatch, costs):
    """However cheap guessed tokens look: noise in a price costs some dozens of them."""
    num_drafted, num_accepted, _ = run(monkeypatch, TOKEN + 1, costs, lengths=[64])
    assert num_drafted <= 64 and num_accepted == 0
    both, _, _ = run(monkeypatch, TOKEN + 1, costs, lengths=[64, 400])
    assert both - num_drafted <= 16


def test_right_guesses_are_verified_where_they_cost_little(monkeypatch):
    num_drafted, num_accepted, seconds = run(monkeypatch, TOKEN, STEADY, lengths=[400])
    assert num_accepted == num_drafted > 300
    assert seconds < 0.5 * 400 * 0.010


def test_right_guesses_are_seldom_tried_where_they_gain_nothing(monkeypatch):
    """Some are verified now and then: their price may have been measured in a bad moment."""
    num_drafted, _, seconds = run(monkeypatch, TOKEN, STEEP, lengths=[900])
    assert 0 < num_drafted < 100
    assert seconds < 1.03 * 900 * 0.010
