"""The sampling options of one request that most do not have, and what they add to logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.batch import Bits
from octavo.worker.checked_draws import CheckedDraw
from octavo.worker.dry import DryMatches
from octavo.worker.token_counts import TokenCounts

MINUS_INFINITY = float("-inf")


@dataclass(slots=True)
class RowExtras:
    """One request's sampling options that most requests do not have."""

    logit_bias: dict[int, float]
    end_token_ids: list[int]
    num_prompt_tokens: int
    min_num_tokens: int
    """Number of tokens, prompt included, below which `end_token_ids` are banned."""
    bad_words: list[list[int]]
    counts: TokenCounts | None
    """Tokens that penalties apply to; None without a penalty."""
    allowed_mask: Bits | None
    """[ceil(V / 32)]; None allows all."""
    dry: DryMatches | None
    """Repetitions that DRY penalises; None without it."""
    processors: list[str]
    """Names of the processors that change its logits."""
    check: CheckedDraw | None = None
    """Check of the draws that follow no guess and come near no close; None: they have none."""

    def may_bias(self, num_tokens: int) -> bool:
        """Returns whether anything may be added to the logits of the token that follows."""
        has_bias = self.logit_bias or self.bad_words or self.dry is not None
        return bool(has_bias) or num_tokens < self.min_num_tokens

    @property
    def follows_tokens(self) -> bool:
        """Whether what is added to logits may change with each token."""
        return bool(self.bad_words) or self.dry is not None

    def bias(
        self, token_ids: NDArray[np.int32], dry: DryMatches | None, *, must_end: bool
    ) -> dict[int, float]:
        """Returns what is added to the logits of the token after `token_ids [num_tokens]`, where
        `dry` follows them. Where the text `must_end`, its end is not banned.
        """
        bias = self._bias(token_ids, must_end=must_end)
        if dry is None:
            return bias
        penalties = dry.penalties(token_ids)
        return bias | {id_: bias.get(id_, 0.0) - lost for id_, lost in penalties.items()}

    def _bias(self, token_ids: NDArray[np.int32], *, must_end: bool) -> dict[int, float]:
        ends_banned = len(token_ids) < self.min_num_tokens and not must_end
        if not ends_banned and not self.bad_words:
            return self.logit_bias
        bias = dict(self.logit_bias)
        if ends_banned:
            bias.update(dict.fromkeys(self.end_token_ids, MINUS_INFINITY))
        output_ids = token_ids[self.num_prompt_tokens :]
        for word in self.bad_words:
            prefix = word[:-1]
            if (
                len(prefix) <= len(output_ids)
                and output_ids[len(output_ids) - len(prefix) :].tolist() == prefix
            ):
                bias[word[-1]] = MINUS_INFINITY
        return bias
