"""DRY: penalizes tokens that would continue a repetition, by its length.

For each index i of the last `penalty_last_n` tokens, let n be the length of the longest sequence
that ends at i and also at the last token, without a sequence breaker. If n >= allowed_length, the
logit of the token after i is reduced by multiplier * base^(n - allowed_length), for its largest n;
a sequence breaker is not penalized. Tokens of the prompt and the completion count equally. Source:
P. E. Weidmann, text-generation-webui 5677, 2024.

The lengths are updated incrementally in each step. After a preemption or a rollback they are
recomputed in linear time (Z-function of the reversed tokens).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.api.sampling_params import SamplingParams

MAX_FOLLOWED = 32
"""Maximum number of new tokens for an incremental update; with more, lengths are recomputed."""
LARGEST_PENALTY = 1e30
"""Upper bound on a penalty: far above any logit and far below the maximum of fp32."""


@dataclass(frozen=True, slots=True)
class DryRule:
    """DRY options of a request."""

    multiplier: float
    base: float
    allowed_length: int
    penalty_last_n: int
    """Number of last tokens to search; -1: all."""
    breaker_ids: frozenset[int]


class DryMatches:
    """Repetitions that end with a row's last token."""

    def __init__(self, rule: DryRule) -> None:
        self._rule = rule
        self._num_tokens = -1
        self._first = 0
        self._lengths = np.zeros(0, np.int64)
        """Lengths for the indices `_first` to `_num_tokens - 2`, ignoring sequence breakers."""
        self._num_unbroken = 0
        """Number of last tokens without a sequence breaker."""

    def copy(self) -> DryMatches:
        """Returns an independent copy."""
        return copy.copy(self)

    def penalties(self, token_ids: NDArray[np.int32]) -> dict[int, float]:
        """Returns the penalties on the logits of the token after `token_ids`, by token id."""
        rule = self._rule
        if len(token_ids) < 2:
            return {}
        self._follow(token_ids)
        counts = np.arange(1, len(self._lengths) + 1)
        lengths = np.minimum(np.minimum(self._lengths, counts), self._num_unbroken)
        penalties = np.flatnonzero(lengths >= rule.allowed_length)
        longest: dict[int, int] = {}
        followers = token_ids[self._first + 1 :][penalties].tolist()
        for token_id, length in zip(followers, lengths[penalties].tolist(), strict=True):
            if token_id not in rule.breaker_ids:
                longest[token_id] = max(length, longest.get(token_id, 0))
        return {token_id: self._penalty(length) for token_id, length in longest.items()}

    def penalties_after(self, token_ids: NDArray[np.int32]) -> dict[tuple[int, int], float]:
        """Returns the penalties on the logits after `token_ids` and one more, unknown token: by
        that token and the penalized one.
        """
        rule = self._rule
        first = self._get_first(len(token_ids) + 1)
        window = token_ids[first:]
        if len(window) == 0:
            return {}
        self._follow(token_ids)
        before = np.concatenate([[0], self._lengths])[first - self._first :]
        counts = np.arange(1, len(before) + 1)
        lengths = np.minimum(np.minimum(before + 1, counts), self._num_unbroken + 1)
        penalties = np.flatnonzero(lengths >= rule.allowed_length)
        lasts = window[penalties].tolist()
        # The last index is followed by the unknown token itself.
        followers = np.append(window[1:], window[-1])[penalties].tolist()
        longest: dict[tuple[int, int], int] = {}
        pairs = zip(lasts, followers, strict=True)
        for key, length in zip(pairs, lengths[penalties].tolist(), strict=True):
            if rule.breaker_ids.isdisjoint(key):
                longest[key] = max(length, longest.get(key, 0))
        return {key: self._penalty(length) for key, length in longest.items()}

    def _penalty(self, length: int) -> float:
        rule = self._rule
        try:
            penalty = rule.multiplier * rule.base ** (length - rule.allowed_length)
        except OverflowError:
            return LARGEST_PENALTY
        return min(penalty, LARGEST_PENALTY)

    def _follow(self, token_ids: NDArray[np.int32]) -> None:
        """Updates the lengths to the end of `token_ids`."""
        num = len(token_ids)
        first = self._get_first(num)
        if num == self._num_tokens:
            return
        if 0 <= self._num_tokens < num <= self._num_tokens + MAX_FOLLOWED:
            for end in range(self._num_tokens + 1, num + 1):
                self._add(token_ids[:end])
            return
        window, breaker_ids = token_ids[first:].tolist(), self._rule.breaker_ids
        self._lengths = np.array(get_common_suffixes(window), np.int64)
        breaks = (at for at, one in enumerate(reversed(window)) if one in breaker_ids)
        self._num_unbroken = next(breaks, len(window))
        self._num_tokens, self._first = num, first

    def _add(self, token_ids: NDArray[np.int32]) -> None:
        """Updates the lengths by one token, the last one."""
        num = len(token_ids)
        first = self._get_first(num)
        before = np.concatenate([[0], self._lengths])
        same = token_ids[self._first : num - 1] == token_ids[-1]
        self._lengths = np.where(same, before + 1, 0)[first - self._first :]
        broken = int(token_ids[-1]) in self._rule.breaker_ids
        self._num_unbroken = 0 if broken else self._num_unbroken + 1
        self._num_tokens, self._first = num, first

    def _get_first(self, num_tokens: int) -> int:
        """Returns the index of the first token to search."""
        last_n = self._rule.penalty_last_n
        return 0 if last_n == -1 else max(0, num_tokens - last_n)


def make_dry_matches(params: SamplingParams) -> DryMatches | None:
    """Returns the matches of a request. Returns None without DRY."""
    if not params.dry_multiplier or not params.dry_penalty_last_n:
        return None
    return DryMatches(
        DryRule(
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_penalty_last_n,
            frozenset(params.dry_sequence_breaker_ids or ()),
        )
    )


def get_common_suffixes(token_ids: list[int]) -> list[int]:
    """Returns for each index except the last the length of the longest sequence that ends both
    there and at the last index.
    """
    reversed_ids = token_ids[::-1]
    num = len(reversed_ids)
    lengths = [0] * num
    left = right = 0
    for index in range(1, num):
        length = min(right - index, lengths[index - left]) if index < right else 0
        while index + length < num and reversed_ids[length] == reversed_ids[index + length]:
            length += 1
        if index + length > right:
            left, right = index, index + length
        lengths[index] = length
    return lengths[:0:-1]
