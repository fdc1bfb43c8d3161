"""What guessing does to calls of several decode steps, and what it may lose, by counts and on a
simulated clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import pytest

from octavo.engine.speculation import speculation
from octavo.engine.speculation.proposer import NO_DRAFT, Draft
from octavo.worker.simulated import TOKEN, SimulatedClock, SimulatedCosts, SimulatedExecutor
from tests.support.engine_fakes import make_core
from tests.support.simulation import request_of

STEADY = ((1, 0.010), (2, 0.011), (64, 0.073))
STEEP = ((1, 0.010), (2, 0.020), (64, 0.640))
BETWEEN = ((1, 0.010), (2, 0.0135), (8, 0.020), (64, 0.120))
"""Costs at which guesses have to be right about every third time."""
PROMPT_TOKENS = 20


class ListingExecutor(SimulatedExecutor):
    """Lists the calls that it is given."""

    def __init__(self, costs) -> None:
        super().__init__(SimulatedClock(), SimulatedCosts(costs, context_token_s=0.0))
        self.calls: list[tuple[int, list[int]]] = []
        """Decode steps that each call computed, and the tokens of its rows."""

    def execute(self, plan):
        self.calls.append((1, [row.num_tokens for row in plan.rows]))
        return super().execute(plan)

    def decode(self, plan):
        for num_done, result in enumerate(super().decode(plan), start=1):
            self.calls[-1] = (num_done, [row.num_tokens for row in plan.rows])
            yield result


class SometimesProposer:
    """Guesses as long as it may, each token right by a chance; or only after some tokens."""

    def __init__(self, chance: float, every: int = 1, seed: int = 0) -> None:
        self._chance, self._every = chance, every
        self._dice = random.Random(seed)
        self._num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        if self._num_tokens % self._every:
            return NO_DRAFT
        dice = self._dice
        guess = [TOKEN if dice.random() < self._chance else TOKEN + 1 for _ in range(max_tokens)]
        return Draft(guess, 4)


class Run:
    """One engine, with guesses or without."""

    def __init__(self, monkeypatch, costs, make_proposer=None) -> None:
        if make_proposer is not None:
            monkeypatch.setitem(speculation.PROPOSERS, "ngram", make_proposer)
        self.executor = ListingExecutor(costs)
        self.core = make_core(
            executor=self.executor,
            clock=self.executor.clock,
            num_blocks=2048,
            max_model_len=1024,
            max_num_seqs=64,
            budget=512,
            num_scheduler_steps=8,
            spec_method=None if make_proposer is None else "ngram",
        )
        self._names = count()

    def answers(self, num_streams, num_tokens):
        """Runs requests to their ends; returns the calls and the simulated seconds."""
        first, began = len(self.executor.calls), self.executor.clock.now
        for _ in range(num_streams):
            self.core.add(request_of(str(next(self._names)), 0.0, PROMPT_TOKENS, num_tokens))
        while self.core.has_work:
            self.core.step()
        return self.executor.calls[first:], self.executor.clock.now - began

    @property
    def num_drafted(self) -> int:
        return self.core.scheduler.stats().num_draft_tokens


@pytest.mark.parametrize("costs", [STEADY, BETWEEN, STEEP], ids=["steady", "between", "steep"])
@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_after_64_tokens_a_proposer_that_is_always_wrong_leaves_calls_as_they_are(
    monkeypatch, num_streams, costs
):
    """The same calls, of as many decode steps each, as without guesses; the first, short answers
    measure what steps cost. One token may be guessed later: until one was verified beside as many
    rows, nothing tells what that takes.
    """
    plain = Run(monkeypatch, costs)
    guessing = Run(monkeypatch, costs, lambda: SometimesProposer(0.0))
    for run in (plain, guessing):
        run.answers(num_streams, 8)
        run.answers(num_streams, 64)
    num_drafted = guessing.num_drafted
    wanted, found = (run.answers(num_streams, 200)[0] for run in (plain, guessing))
    num_later = guessing.num_drafted - num_drafted
    assert num_later <= 1 and len(found) <= len(wanted) + 2 * num_later
    assert num_later or found == wanted
    assert sum(num_steps for num_steps, _ in found) == sum(num_steps for num_steps, _ in wanted)
    # Steps of many rows are too long here for calls of several.
    assert num_streams > 1 or any(num_steps > 1 for num_steps, _ in wanted)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("costs", [STEADY, BETWEEN, STEEP], ids=["steady", "between", "steep"])
@pytest.mark.parametrize("num_streams", [1, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5, 0.8])
def test_guesses_lose_little_however_often_they_hold(monkeypatch, chance, num_streams, costs):
    """They lose at most a hundredth of the time, and what was lost before anything was known."""
    seeds = count()
    plain = Run(monkeypatch, costs)
    guessing = Run(monkeypatch, costs, lambda: SometimesProposer(chance, seed=next(seeds)))
    (calls, wanted_s), (_, found_s) = (run.answers(num_streams, 400) for run in (plain, guessing))
    step_s = wanted_s / sum(num_steps for num_steps, _ in calls)
    assert found_s < 1.01 * wanted_s + 2 * step_s


def test_guesses_that_hold_gain(monkeypatch):
    plain = Run(monkeypatch, STEADY)
    guessing = Run(monkeypatch, STEADY, lambda: SometimesProposer(0.9))
    (_, wanted_s), (_, found_s) = (run.answers(1, 400) for run in (plain, guessing))
    assert found_s < wanted_s / 2


def test_a_call_ends_for_a_guess_that_is_likely_to_hold(monkeypatch):
    """A guess that exists only after every 20th token mostly comes up within a call of 8 steps."""
    run = Run(monkeypatch, STEADY, lambda: SometimesProposer(1.0, every=20))
    run.answers(1, 400)
    assert run.core.scheduler.stats().num_drafts >= 18


def test_no_call_ends_for_a_guess_that_seldom_holds(monkeypatch):
    run = Run(monkeypatch, STEADY, lambda: SometimesProposer(0.0, every=20))
    run.answers(1, 64)
    calls, _ = run.answers(1, 200)
    assert all(num_steps == 8 for num_steps, _ in calls[2:-1])
