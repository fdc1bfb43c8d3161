"""How much guessing may lose: a share of the time that drawing takes, and a little to begin with.

Counts in plain steps' time. A step with guesses is charged what they take, and credited with those
that held; so guesses that seldom hold, or that take longer than was thought, end soon and come back
seldom, whatever chances say. Reads no clock, and replays exactly.
"""

from __future__ import annotations

FIRST_STEPS = 2.0
"""Plain steps' time that guesses may lose before anything is drawn."""
SHARE = 0.01
"""Plain steps' time that they may lose for each step."""
MOST_STEPS = 4.0
"""Bound on what is saved up: guesses that held in one text allow few losses in the next."""
LEAST_CHARGE = 0.1
"""Least charge for one guessed token a row, where a step was measured in a bad moment."""


class Credit:
    """The time that guesses may still lose."""

    def __init__(self) -> None:
        self._num_steps = FIRST_STEPS

    @staticmethod
    def charge_of(num_draws: int, num_guessed: int, times_plain: float) -> float:
        """Returns the time of guesses in plain steps, for a step of `num_draws` rows that lasts
        `times_plain` as long as one without them.
        """
        return max(times_plain - 1, LEAST_CHARGE * num_guessed / num_draws)

    def affords(self, charge: float) -> bool:
        return charge <= self._num_steps

    def spend(self, charge: float) -> None:
        self._num_steps -= charge

    def drew(self, num_steps: float, num_saved: float) -> None:
        """Notes how many plain steps' tokens were drawn, and how many of them guesses saved."""
        self._num_steps = min(MOST_STEPS, self._num_steps + SHARE * num_steps + num_saved)
