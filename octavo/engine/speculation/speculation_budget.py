"""Time budget that speculation may waste: an initial amount plus a fraction of the time of all
steps.

The unit is the time of a step without drafts. A step with drafts is charged for their extra time
and credited for accepted tokens. Drafts that are rarely accepted, or slower than estimated,
therefore stop soon, whatever the estimated acceptance rates are. Reads no clock, so that a
recording replays exactly.
"""

from __future__ import annotations

FIRST_STEPS = 2.0
"""Initial budget, in plain steps."""
SHARE = 0.01
"""Budget added for each step, in plain steps."""
MOST_STEPS = 4.0
"""Maximum budget in plain steps, so that accepted drafts of one text pay for few losses in the
next.
"""
LEAST_CHARGE = 0.1
"""Minimum charge for one draft token per row, in case a measured step time is an outlier."""


class SpeculationBudget:
    """Remaining time that speculation may waste, in plain steps."""

    def __init__(self) -> None:
        self._num_steps = FIRST_STEPS

    @staticmethod
    def get_charge(num_samples: int, num_drafted: int, relative_time: float) -> float:
        """Returns the cost of `num_drafted` draft tokens in plain steps, for a step that samples
        `num_samples` tokens and takes `relative_time` times as long as one without drafts.
        """
        return max(relative_time - 1, LEAST_CHARGE * num_drafted / num_samples)

    def affords(self, charge: float) -> bool:
        return charge <= self._num_steps

    def spend(self, charge: float) -> None:
        self._num_steps -= charge

    def record_step(self, num_steps: float, num_saved: float) -> None:
        """Adds the budget of `num_steps` plain steps, and the `num_saved` steps that accepted
        drafts replaced.
        """
        self._num_steps = min(MOST_STEPS, self._num_steps + SHARE * num_steps + num_saved)
