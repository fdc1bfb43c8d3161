"""The policy that maximises expected tokens per second: guessed tokens are taken by their chance to
survive while each raises them, and none where no number of them promises clearly more than a plain
step.

Chances and prices may be wrong: what guesses may lose is bounded (`credit.py`), and where a gain is
in doubt the other kind of step is measured now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from octavo.engine.speculation.credit import Credit
from octavo.engine.speculation.policy import PlainStep, RowDraft
from octavo.engine.speculation.step_price import priced_counts

LEAST_GAIN = 1.1
"""How many times the tokens of a plain step in the same time a step with guesses must promise."""
RETRY_AFTER = 64
"""Steps without a guess, though one was likely to hold, after which one is tried: what a step costs
may have been measured in a bad moment.
"""
RETRY_UNLIKELY_AFTER = 1024
"""The same where none was likely to hold: what failed in earlier texts may hold in this one."""
CLEAR_GAIN = 1.5
"""Gain above which no noise in the plain step's time is feared."""
PLAIN_AFTER = 128
"""Steps with guesses of a smaller gain after which a plain one is measured again."""
LIKELY = 0.5


class RankedToken(NamedTuple):
    """A guessed token among those of all rows."""

    chance: float
    """Chance that it is reached and holds."""
    place: int
    """Index of its guess."""


class ThroughputPolicy:
    """Chooses the guesses of one engine's steps."""

    def __init__(self) -> None:
        self._credit = Credit()
        self._num_declined = 0
        """Steps in which a guess was not worth its time, since one was last tried; those in which
        one was likely to hold count more.
        """
        self._num_doubtful = 0
        """Steps with guesses of no clear gain, since a plain one was last measured."""

    def num_drafts(self, drafts: Sequence[RowDraft], step: PlainStep, most: int) -> list[int]:
        """Returns how many tokens of each guess a step verifies, at most `most` in all."""
        counts = [0] * len(drafts)
        ranked = _ranked(drafts)[:most]
        best, gain = self._best_count(ranked, step)
        if not best or not self._is_worth(gain, ranked[0].chance):
            return counts
        for token in ranked[:best]:
            counts[token.place] += 1
        self._credit.spend(step.charge_of(best))
        return counts

    def promises(self, drafts: Sequence[RowDraft], step: PlainStep) -> bool:
        """Returns whether a step with some of these guesses promises clearly more than a plain
        one.
        """
        return self._best_count(_ranked(drafts), step)[1] > LEAST_GAIN

    def took(self, num_drawn: int, num_held: int, step: PlainStep) -> None:
        """Notes what a row drew: what held earns credit for later guesses."""
        self._credit.drew(num_drawn / step.num_draws, num_held / step.num_draws)

    def _best_count(self, ranked: Sequence[RankedToken], step: PlainStep) -> tuple[int, float]:
        """Returns how many of the guessed tokens promise the most expected tokens per second, the
        best first, and how many times those of a plain step; 0 where no number can be afforded.
        """
        best = (0, 0.0)
        if not step.is_known:
            return best
        gains = list(accumulate(token.chance for token in ranked))
        for num_guessed in priced_counts(len(ranked)):
            if not self._credit.affords(step.charge_of(num_guessed)):
                break
            gain = (1 + gains[num_guessed - 1] / step.num_draws) / step.times(num_guessed)
            best = max(best, (num_guessed, gain), key=lambda each: each[1])
        return best

    def _is_worth(self, gain: float, chance: float) -> bool:
        """Returns whether a step with guesses is computed, which yields `gain` times the tokens of
        a plain one in the same time, and whose best guess holds by a `chance`. Where that is in
        doubt, the other kind of step is measured now and then.
        """
        if gain > LEAST_GAIN:
            self._num_declined = 0
            self._num_doubtful = 0 if gain > CLEAR_GAIN else self._num_doubtful + 1
            if self._num_doubtful <= PLAIN_AFTER:
                return True
            self._num_doubtful = 0
            return False
        self._num_declined += RETRY_UNLIKELY_AFTER // RETRY_AFTER if chance > LIKELY else 1
        if self._num_declined <= RETRY_UNLIKELY_AFTER:
            return False
        self._num_declined = 0
        return True


def _ranked(drafts: Sequence[RowDraft]) -> list[RankedToken]:
    """Returns the tokens of guesses, the likeliest first, and those of one guess in their order."""
    tokens = (
        (-chance, depth, place)
        for place, draft in enumerate(drafts)
        for depth, chance in enumerate(draft.reached)
    )
    return [RankedToken(-minus_chance, place) for minus_chance, _, place in sorted(tokens)]
