"""Estimates the time of a step that verifies draft tokens from measured steps that verified the
same number (a prefill chunk of the same size samples only once).

Measured times are noisy: if the plain step was measured during an interruption, all others look
cheap. Draft tokens therefore have a minimum cost, which also stops proposers that are rarely
accepted.
"""

from __future__ import annotations

from octavo.engine.protocol.step_costs import MAX_SINGLE_TOKENS, StepCosts

TOKEN_SHARE = 0.1
"""Assumed time of one more token, as a fraction of a one-token step (half of it for larger steps),
if no similar step was measured: decoding reads all weights for one token and for several.
"""
LEAST_TOKEN_SHARE = 0.02
"""Minimum time of one more token, as a fraction of the plain step's time per token. 0.05 to 0.13
were measured on CPUs.
"""
FAR = 12
"""A step must have this many tokens more than four times the plain step's to bound the time of one
more token: smaller differences are noise, or come from prompts in the step.
"""


class StepCostModel:
    """Estimates the time of one step with additional draft tokens."""

    def __init__(self, costs: StepCosts, num_tokens: int, num_keys: int) -> None:
        """`num_tokens`: tokens of the step without drafts; `num_keys`: keys that its rows read."""
        self._costs = costs
        self._num_tokens = num_tokens
        self._num_keys = num_keys
        self._plain_s = costs.step_s(num_tokens, num_keys) or 1.0
        self._token_s = _token_s(costs, num_tokens)

    @property
    def is_known(self) -> bool:
        """Whether steps similar to the plain one were measured."""
        return self._costs.is_measured(self._num_tokens)

    def seconds(self, num_more: int) -> float:
        """Returns the seconds of the step with `num_more` draft tokens; in an arbitrary unit if no
        step was measured.
        """
        if num_more == 0:
            return self._plain_s
        verify_s = self._costs.verify_s(self._num_tokens + num_more, self._num_keys)
        share = TOKEN_SHARE * num_more / min(self._num_tokens, 2)
        least_share = LEAST_TOKEN_SHARE * num_more / self._num_tokens
        return max(
            self._plain_s * (1 + least_share),
            self._plain_s + self._token_s * num_more,
            verify_s or self._plain_s * (1 + share),
        )


def _token_s(costs: StepCosts, num_tokens: int) -> float:
    """Returns the seconds of one more token: the minimum slope to any much larger measured step
    (such as a prefill). A single outlier has little effect.
    """
    plain_s = costs.step_s(num_tokens, 0) or 0.0
    sizes = (round(point.num_tokens) for point in costs.points)
    each_s = (
        ((costs.step_s(size, 0) or 0.0) - plain_s) / (size - num_tokens)
        for size in sizes
        if size > 4 * num_tokens + FAR
    )
    return max(0.0, min(each_s, default=0.0))


def get_candidate_counts(max_drafted: int) -> list[int]:
    """Returns the numbers of draft tokens, up to `max_drafted`, for which costs are compared: each
    small number, then powers of two, like the measured points.
    """
    counts = list(range(1, min(max_drafted, MAX_SINGLE_TOKENS) + 1))
    larger = 2 * MAX_SINGLE_TOKENS
    while larger < max_drafted:
        counts.append(larger)
        larger *= 2
    return counts if max_drafted <= MAX_SINGLE_TOKENS else [*counts, max_drafted]
