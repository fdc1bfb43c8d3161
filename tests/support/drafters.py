"""Drafters of tests: they guess by a function of a row's tokens, and everything is verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from octavo import LLM
from octavo.engine.speculation import speculation
from octavo.engine.speculation.acceptance import Acceptance
from octavo.engine.speculation.credit import Credit
from octavo.engine.speculation.drafter import Draft
from octavo.engine.speculation.step_price import StepPrice

Guess = Callable[[list[int], int], list[int]]
"""A guess from a row's tokens and the most that it may guess."""


class GuessingDrafter:
    """Guesses by a function."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._token_ids: list[int] = []

    def took(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def propose(self, max_tokens: int) -> Draft:
        return Draft(self._guess(self._token_ids, max_tokens), 4)


def right(answers: Sequence[Sequence[int]]) -> Guess:
    """Guesses all that comes, from the whole sequences, though it is more than may be verified."""

    def guess(token_ids: list[int], most: int) -> list[int]:
        num = len(token_ids)
        return next((list(one[num:]) for one in answers if one[:num] == token_ids), [])

    return guess


def wrong(token_ids: list[int], most: int) -> list[int]:
    return [239] * most


def seldom_right(answers: Sequence[Sequence[int]], seed: int) -> Guess:
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
        patch.setattr(speculation, "LEAST_GAIN", 0.0)
        patch.setattr(Acceptance, "chance", lambda self, name, num_matched, depth=0: 1.0)
        patch.setattr(Credit, "affords", lambda self, charge: True)
        patch.setattr(StepPrice, "of", lambda self, num_more: 1.0)
        yield


@contextmanager
def all_verified(guess: Guess) -> Iterator[None]:
    """Has engines made inside verify what a function guesses."""
    with verified_at_any_cost(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(speculation.DRAFTERS, "ngram", lambda: GuessingDrafter(guess))
        yield


def sequences(outputs: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Returns the whole sequences of all samples."""
    return [
        prompt + list(sample.token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
        for sample in output.outputs
    ]


def guess_counts(llm: LLM) -> tuple[int, int]:
    """Returns how many tokens were guessed, and how many of them held."""
    stats = llm.get_metrics()
    return stats.num_draft_tokens, stats.num_accepted_tokens
