"""Proposers for tests, which draft by a function of a row's tokens, and everything is verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from octavo import LLM
from octavo.engine.speculation import speculation, throughput
from octavo.engine.speculation.acceptance import Acceptance
from octavo.engine.speculation.proposer import Draft
from octavo.engine.speculation.speculation_budget import SpeculationBudget
from octavo.engine.speculation.step_cost_model import StepCostModel

DraftTreeBuilder = Callable[[list[int], int], list[int]]
"""A guess from a row's tokens and the most that it may guess."""


class GuessingProposer:
    """Guesses by a function."""

    def __init__(self, guess: DraftTreeBuilder) -> None:
        self._guess = guess
        self._token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def propose(self, max_tokens: int) -> Draft:
        return Draft(self._guess(self._token_ids, max_tokens), 4)


class BranchingProposer:
    """Guesses trees: along what a function guesses, other tokens beside it, some of them with
    tokens of their own behind. What the function guesses is seldom the first of them.
    """

    def __init__(self, guess: DraftTreeBuilder, seed: int) -> None:
        self._guess = guess
        self._seed = seed
        self._token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def propose(self, max_tokens: int) -> Draft:
        dice = random.Random(f"{self._seed} {len(self._token_ids)}")
        ids: list[int] = []
        parents: list[int] = []
        spine = -1
        for token_id in self._guess(self._token_ids, max_tokens):
            beside = [token_id, *dice.sample(range(240), dice.randint(0, 2))]
            beside = list(dict.fromkeys(beside))
            dice.shuffle(beside)
            first = len(ids)
            ids += beside
            parents += [spine] * len(beside)
            if dice.random() < 0.5:
                ids.append(dice.randrange(240))
                parents.append(first + dice.randrange(len(beside)))
            spine = first + beside.index(token_id)
        return _without_twins(ids, parents)


def _without_twins(ids: list[int], parents: list[int]) -> Draft:
    """Returns a guess without tokens that stand beside an equal one, and without what follows
    them.
    """
    places: dict[int, int] = {-1: -1}
    seen: set[tuple[int, int]] = set()
    kept_ids: list[int] = []
    kept_parents: list[int] = []
    for at, (token_id, parent) in enumerate(zip(ids, parents, strict=True)):
        if parent in places and (parent, token_id) not in seen:
            seen.add((parent, token_id))
            places[at] = len(kept_ids)
            kept_ids.append(token_id)
            kept_parents.append(places[parent])
    return Draft(kept_ids, 4, kept_parents)


def right(answers: Sequence[Sequence[int]]) -> DraftTreeBuilder:
    """Guesses all that comes, from the whole sequences, though it is more than may be verified."""

    def guess(token_ids: list[int], most: int) -> list[int]:
        num = len(token_ids)
        return next((list(one[num:]) for one in answers if one[:num] == token_ids), [])

    return guess


def wrong(token_ids: list[int], most: int) -> list[int]:
    return [239] * most


def seldom_right(answers: Sequence[Sequence[int]], seed: int) -> DraftTreeBuilder:
    """Guesses runs of random lengths, of which some tokens are wrong."""
    dice, knows = random.Random(seed), right(answers)

    def guess(token_ids: list[int], most: int) -> list[int]:
        found = knows(token_ids, most)[: dice.randint(0, most)]
        return [dice.randrange(240) if dice.random() < 0.2 else one for one in found]

    return guess


@contextmanager
def verified_at_any_cost() -> Iterator[None]:
    """Has engines made inside verify all guesses, whatever it costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "LEAST_GAIN", 0.0)
        patch.setattr(Acceptance, "chance", lambda self, name, num_matched, depth=0: 1.0)
        patch.setattr(SpeculationBudget, "affords", lambda self, charge: True)
        patch.setattr(StepCostModel, "seconds", lambda self, num_more: 1.0)
        yield


@contextmanager
def trees_verified(guess: DraftTreeBuilder, seed: int) -> Iterator[None]:
    """Has engines made inside verify trees around what a function guesses."""
    with verified_at_any_cost(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Acceptance, "chance", lambda self, name, num_matched, depth=0: 0.7)
        patch.setitem(speculation.PROPOSERS, "ngram", lambda: BranchingProposer(guess, seed))
        yield


@contextmanager
def all_verified(guess: DraftTreeBuilder) -> Iterator[None]:
    """Has engines made inside verify what a function guesses."""
    with verified_at_any_cost(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(speculation.PROPOSERS, "ngram", lambda: GuessingProposer(guess))
        yield


def sequences(outputs: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Returns the whole sequences of all samples."""
    return [
        prompt + list(sample.token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
        for sample in output.outputs
    ]


def draft_counts(llm: LLM) -> tuple[int, int]:
    """Returns how many tokens were guessed, and how many of them held."""
    stats = llm.get_metrics()
    return stats.num_draft_tokens, stats.num_accepted_tokens
