"""Draws that follow from each other beyond their tokens: mirostat's bound moves with the surprise
of each token, so a draw after a guess can be made only once the draw before it is known.

Such a row is drawn again, one draw after the other, as far as its guesses hold. Knows one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.executor.batch import Bits, SampleResult


class MirostatRule(NamedTuple):
    """How the bound of a row's mirostat moves."""

    tau: float
    """Surprise aimed at, in bits."""
    eta: float
    """Share of the error that is corrected."""

    def after(self, mu: float, surprise: float) -> float:
        """Returns the bound after a token of `surprise` bits, rounded as records keep it."""
        return float(np.float32(mu - self.eta * (surprise - self.tau)))


@dataclass(slots=True)
class SequentialSampling:
    """The draws of one row with mirostat, each made after a guess but the first."""

    rule: MirostatRule
    mu: float
    """Bound of the current draw."""
    entry: int
    """Current draw among the sampled rows."""
    draft_ids: Sequence[int]
    """Guesses behind it."""
    masks: Sequence[Bits]
    """Tokens that the draws behind the first may take."""

    def go_on(self, samples: SampleResult) -> bool:
        """Moves on to the next draw, where the guess before it holds; returns whether it does."""
        assert samples.surprises is not None, "a row with mirostat tells its surprise"
        if not self.draft_ids or samples.failed[self.entry]:
            return False
        if int(samples.token_ids[self.entry]) != self.draft_ids[0]:
            return False
        self.mu = self.rule.after(self.mu, float(samples.surprises[self.entry]))
        self.draft_ids = self.draft_ids[1:]
        self.entry += 1
        return True

    @property
    def mask(self) -> Bits:
        """The tokens that the current draw may take; the first one is never drawn again."""
        return self.masks[-1 - len(self.draft_ids)]
