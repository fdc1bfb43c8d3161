"""Rarely used sampling options of one request, and what they add to its logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import Bits
from octavo.worker.sampling.dry import DryMatches
from octavo.worker.sampling.sample_verifier import SampleToVerify
from octavo.worker.sampling.token_counts import TokenCounts

MINUS_INFINITY = float("-inf")
ANY_TOKEN = -1
"""Last token of a bias that is independent of the last token."""


@dataclass(slots=True)
class LogitsState:
    """Options of one request that are not part of its sampling record."""

    logit_bias: dict[int, float]
    end_token_ids: list[int]
    num_prompt_tokens: int
    num_known: int
    """Number of the row's tokens that are known on the host, prompt included."""
    min_num_tokens: int
    """Minimum number of tokens, prompt included; below it, `end_token_ids` are banned."""
    bad_words: list[list[int]]
    counts: TokenCounts | None
    """Tokens that penalties apply to; None without a penalty."""
    allowed_mask: Bits | None
    """Mask `[ceil(V / 32)]`; None allows all tokens."""
    dry: DryMatches | None
    """Repetitions that DRY penalizes; None without DRY."""
    processors: list[str]
    """Names of its logits processors."""
    to_verify: SampleToVerify | None = None
    """How to verify samples that follow no draft token and are far from the length limit; None:
    they are not verified.
    """

    def accept_token(self, token_id: int) -> None:
        """Counts a sampled token that has arrived on the host."""
        self.num_known += 1
        if self.counts is not None:
            self.counts.add(token_id)

    def lags(self, num_tokens: int) -> bool:
        """Returns whether the last of the row's first `num_tokens` tokens is known only on the
        device.
        """
        return num_tokens > self.num_known

    def may_bias(self, num_tokens: int) -> bool:
        """Returns whether anything may be added to the next token's logits."""
        has_bias = self.logit_bias or self.bad_words or self.dry is not None
        return bool(has_bias) or num_tokens < self.min_num_tokens

    @property
    def follows_tokens(self) -> bool:
        """Whether the bias may change with each token."""
        return bool(self.bad_words) or self.dry is not None

    def bias(
        self, token_ids: NDArray[np.int32], dry: DryMatches | None, *, must_end: bool
    ) -> dict[int, float]:
        """Returns the bias of the token after `token_ids [num_tokens]`; `dry` belongs to these
        tokens. If the text `must_end`, its end tokens are not banned.
        """
        bias = self._bias(token_ids, must_end=must_end)
        if dry is None:
            return bias
        penalties = dry.penalties(token_ids)
        return bias | {id_: bias.get(id_, 0.0) - lost for id_, lost in penalties.items()}

    def bias_after(self, token_ids: NDArray[np.int32]) -> dict[tuple[int, int], float]:
        """Returns the bias after `token_ids` and one more, unknown token: by that token (or
        ANY_TOKEN) and the token whose logit it is added to.
        """
        lasting = self._lasting(len(token_ids) + 1, must_end=False)
        bias = {(ANY_TOKEN, token_id): value for token_id, value in lasting.items()}
        output_ids = token_ids[self.num_prompt_tokens :]
        for word in self.bad_words:
            if _ends_with(output_ids, word[:-2]):
                last = word[-2] if len(word) > 1 else ANY_TOKEN
                bias[last, word[-1]] = MINUS_INFINITY
        if self.dry is not None:
            for key, lost in self.dry.penalties_after(token_ids).items():
                bias[key] = bias.get(key, 0.0) - lost
        return bias

    def _bias(self, token_ids: NDArray[np.int32], *, must_end: bool) -> dict[int, float]:
        bias = self._lasting(len(token_ids), must_end=must_end)
        output_ids = token_ids[self.num_prompt_tokens :]
        banned = [word[-1] for word in self.bad_words if _ends_with(output_ids, word[:-1])]
        return bias | dict.fromkeys(banned, MINUS_INFINITY) if banned else bias

    def _lasting(self, num_tokens: int, *, must_end: bool) -> dict[int, float]:
        """Returns the part of the bias after `num_tokens` tokens that does not depend on their
        ids.
        """
        if num_tokens >= self.min_num_tokens or must_end:
            return self.logit_bias
        return self.logit_bias | dict.fromkeys(self.end_token_ids, MINUS_INFINITY)


def _ends_with(token_ids: NDArray[np.int32], end: list[int]) -> bool:
    first = len(token_ids) - len(end)
    return first >= 0 and token_ids[first:].tolist() == end
