"""Policy that maximizes expected tokens per second: draft tokens are verified in the order of their
acceptance probability as long as each one raises the throughput; none if no number of them is
clearly faster than a plain step.

Probabilities and costs may be wrong. The time that drafts may waste is therefore limited
(`speculation_budget.py`), and if the gain is doubtful, the other kind of step is measured
occasionally.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from octavo.engine.speculation.policy import PlainStep, RowDraft
from octavo.engine.speculation.speculation_budget import SpeculationBudget
from octavo.engine.speculation.step_cost_model import get_candidate_counts

LEAST_GAIN = 1.1
"""Minimum expected speedup over a plain step."""
RETRY_AFTER = 64
"""Number of steps without a draft, although one was likely to be accepted, after which one is tried
anyway: the measured costs may be outliers.
"""
RETRY_UNLIKELY_AFTER = 1024
"""The same if no draft was likely to be accepted: acceptance differs between texts."""
CLEAR_GAIN = 1.5
"""Minimum speedup that noise in the measured plain step cannot explain."""
PLAIN_AFTER = 128
"""Number of steps with a smaller speedup after which a plain step is measured again."""
LIKELY = 0.5


class RankedToken(NamedTuple):
    """A draft token of any row."""

    chance: float
    """Probability that the token and all tokens before it are accepted."""
    draft_index: int
    """Index of its draft."""


class ThroughputPolicy:
    """Chooses how many draft tokens the steps of an engine verify."""

    def __init__(self) -> None:
        self._budget = SpeculationBudget()
        self._num_declined = 0
        """Number of steps without a worthwhile draft since one was last tried; steps with a likely
        draft count more.
        """
        self._num_doubtful = 0
        """Number of steps with drafts of doubtful speedup since a plain step was last measured."""

    def num_drafts(
        self, drafts: Sequence[RowDraft], step: PlainStep, max_drafted: int
    ) -> list[int]:
        """Returns how many tokens of each draft a step verifies, at most `max_drafted` in total."""
        counts = [0] * len(drafts)
        ranked = _rank(drafts)[:max_drafted]
        best, gain = self._best_count(ranked, step)
        if not best or not self._is_worth(gain, ranked[0].chance):
            return counts
        for token in ranked[:best]:
            counts[token.draft_index] += 1
        self._budget.spend(step.get_charge(best))
        return counts

    def promises(self, drafts: Sequence[RowDraft], step: PlainStep) -> bool:
        """Returns whether a step with some of these drafts is expected to be clearly faster than a
        plain one.
        """
        return self._best_count(_rank(drafts), step)[1] > LEAST_GAIN

    def record(self, num_sampled: int, num_accepted: int, step: PlainStep) -> None:
        """Records a row's result; accepted tokens add to the budget."""
        self._budget.record_step(num_sampled / step.num_samples, num_accepted / step.num_samples)

    def _best_count(self, ranked: Sequence[RankedToken], step: PlainStep) -> tuple[int, float]:
        """Returns the number of ranked tokens with the highest expected throughput, and its speedup
        over a plain step; 0 tokens if the budget allows none.
        """
        best = (0, 0.0)
        if not step.is_known:
            return best
        gains = list(accumulate(token.chance for token in ranked))
        for num_drafted in get_candidate_counts(len(ranked)):
            if not self._budget.affords(step.get_charge(num_drafted)):
                break
            gain = (1 + gains[num_drafted - 1] / step.num_samples) / step.times(num_drafted)
            best = max(best, (num_drafted, gain), key=lambda each: each[1])
        return best

    def _is_worth(self, gain: float, chance: float) -> bool:
        """Returns whether to verify drafts with an expected speedup `gain`, the likeliest of which
        is accepted with probability `chance`. If that is doubtful, the other kind of step is
        measured occasionally.
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


def _rank(drafts: Sequence[RowDraft]) -> list[RankedToken]:
    """Returns the tokens of all drafts, likeliest first; tokens of one draft keep their order."""
    tokens = (
        (-chance, depth, draft_index)
        for draft_index, draft in enumerate(drafts)
        for depth, chance in enumerate(draft.reached)
    )
    return [
        RankedToken(-minus_chance, draft_index) for minus_chance, _, draft_index in sorted(tokens)
    ]
