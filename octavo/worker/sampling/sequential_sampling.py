"""Sequential sampling: with mirostat each sample depends on the surprise of the token before it, so
the sample after a draft token can be made only once the sample before is decided. Such a row is
resampled, one sample after the other, as far as its draft tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.executor.batch import Bits, SampleResult


class MirostatRule(NamedTuple):
    """How a row's mirostat bound is updated."""

    tau: float
    """Target surprise, in bits."""
    eta: float
    """Share of the error that is corrected."""

    def after(self, mu: float, surprise: float) -> float:
        """Returns the bound after a token of `surprise` bits, rounded as records keep it."""
        return float(np.float32(mu - self.eta * (surprise - self.tau)))


@dataclass(slots=True)
class SequentialSampling:
    """The samples of one row with mirostat, each but the first after a draft token."""

    rule: MirostatRule
    mu: float
    """Bound of the current sample."""
    entry: int
    """Current sample among the sampled rows."""
    draft_ids: Sequence[int]
    """Draft tokens after it."""
    masks: Sequence[Bits]
    """Tokens that the samples after the first may have."""

    def advance(self, samples: SampleResult) -> bool:
        """Advances to the next sample if the draft token before it is accepted; returns whether."""
        assert samples.surprises is not None, "a row with mirostat reports its surprise"
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
        """Tokens allowed in the current sample; the first one is never resampled."""
        return self.masks[-1 - len(self.draft_ids)]
