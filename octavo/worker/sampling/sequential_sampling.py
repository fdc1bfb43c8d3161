"""Sequential sampling: with mirostat, each sample depends on the surprise of the token before it,
so the sample after a draft token can be decided only after the previous sample. Such a row is
resampled, one sample after the other, as long as its draft tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.executor.batch import Bits, SampleResult


class MirostatRule(NamedTuple):
    """Parameters for updating a row's mirostat mu."""

    tau: float
    """Target surprise, in bits."""
    eta: float
    """Fraction of the error that is corrected."""

    def after(self, mu: float, surprise: float) -> float:
        """Returns mu after a token of `surprise` bits, rounded as in sampling records."""
        return float(np.float32(mu - self.eta * (surprise - self.tau)))


@dataclass(slots=True)
class SequentialSampling:
    """The samples of one row with mirostat; each except the first follows a draft token."""

    rule: MirostatRule
    mu: float
    """Mirostat's mu for the current sample."""
    entry: int
    """Index of the current sample in the sampled rows."""
    draft_ids: Sequence[int]
    """Draft tokens after the current sample."""
    masks: Sequence[Bits]
    """Tokens allowed in the samples after the first."""

    def advance(self, samples: SampleResult) -> bool:
        """Advances to the next sample if the draft token before it was accepted; returns whether it
        did.
        """
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
        """Tokens allowed in the current sample; the first sample is never resampled."""
        return self.masks[-1 - len(self.draft_ids)]
