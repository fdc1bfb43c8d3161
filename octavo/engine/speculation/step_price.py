"""What a step takes that computes guessed tokens too: what steps took that verified as many, not
what a prompt's chunk took, which draws once.

Measured times are noisy: a step that was measured in a bad moment makes every other look cheap. So
no guess is priced below a floor, and a drafter that is seldom right is not asked whatever the
measurements say. Knows neither rows nor drafters; reads no clock.
"""

from __future__ import annotations

from octavo.engine.protocol.step_costs import MAX_SINGLE_TOKENS, StepCosts

TOKEN_SHARE = 0.1
"""Time of one more token as a share of a step of one, and half of it as a share of a larger one,
where none like it was measured: decoding reads all weights for one token and for some.
"""
LEAST_TOKEN_SHARE = 0.02
"""Least time of one more token, as a share of the plain step's time for each of its tokens. Between
0.05 and 0.13 were measured on CPUs.
"""
FAR = 12
"""Tokens beyond four times the plain step's from which a larger step tells what one more takes at
least: those of about as many tokens are told apart by noise, or have prompts among them.
"""


class StepPrice:
    """Prices one step that computes more tokens than it must."""

    def __init__(self, costs: StepCosts, num_tokens: int, num_keys: int) -> None:
        """Takes the tokens that the step must compute, and the keys that their rows read."""
        self._costs = costs
        self._num_tokens = num_tokens
        self._num_keys = num_keys
        self._plain_s = costs.step_s(num_tokens, num_keys) or 1.0
        self._token_s = _token_s(costs, num_tokens)

    @property
    def is_known(self) -> bool:
        """Whether steps like the plain one were measured; what they take is a bound before."""
        return self._costs.is_measured(self._num_tokens)

    def of(self, num_more: int) -> float:
        """Returns the seconds with `num_more` tokens, or any unit where no step was measured."""
        if num_more == 0:
            return self._plain_s
        found = self._costs.verify_s(self._num_tokens + num_more, self._num_keys)
        share = TOKEN_SHARE * num_more / min(self._num_tokens, 2)
        least_share = LEAST_TOKEN_SHARE * num_more / self._num_tokens
        return max(
            self._plain_s * (1 + least_share),
            self._plain_s + self._token_s * num_more,
            found or self._plain_s * (1 + share),
        )


def _token_s(costs: StepCosts, num_tokens: int) -> float:
    """Returns the seconds that one more token takes on the way to a much larger measured step, such
    as a prompt's, where it takes least: a measure that a single bad moment does not move much.
    """
    plain_s = costs.step_s(num_tokens, 0) or 0.0
    sizes = (round(point.num_tokens) for point in costs.points)
    each_s = (
        ((costs.step_s(size, 0) or 0.0) - plain_s) / (size - num_tokens)
        for size in sizes
        if size > 4 * num_tokens + FAR
    )
    return max(0.0, min(each_s, default=0.0))


def priced_counts(most: int) -> list[int]:
    """Returns the numbers of guessed tokens, up to `most`, at which a step is priced: each of the
    first, and powers of two, as steps are measured.
    """
    counts = list(range(1, min(most, MAX_SINGLE_TOKENS) + 1))
    larger = 2 * MAX_SINGLE_TOKENS
    while larger < most:
        counts.append(larger)
        larger *= 2
    return counts if most <= MAX_SINGLE_TOKENS else [*counts, most]
