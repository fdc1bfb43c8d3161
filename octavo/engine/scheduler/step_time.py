"""Time budget of a step: how many prompt tokens fit beside the decoding rows, so that none of these
waits longer than a target for its next token.

Predicts from StepCosts, which are part of a recording; reads no clock. The first chunk of a step
has at least MIN_CHUNK tokens at any cost, so that prompts advance even if decoding alone takes the
whole budget. Source: stall-free batching (Sarathi-Serve, Agrawal et al. 2024), with measured costs
instead of a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.engine.protocol.step_costs import StepCosts
from octavo.engine.requests.request import Request

MIN_CHUNK = 16
"""Least tokens of a step's first chunk: one block, as many as the costs have points of their own.
"""


@dataclass(slots=True)
class StepTime:
    """Predicted time of the step that is being built."""

    costs: StepCosts
    target_s: float
    num_tokens: int = 0
    num_keys: int = 0
    """Tokens computed and keys read by all rows so far, those of `generating` included."""
    generating: set[str] = field(default_factory=set)
    """Rows that wait for their next token; their share is set aside before all others'."""
    has_chunk: bool = False
    """Whether the step computes a part of a prompt, or brings a request back."""

    def room(self, row_id: str, start: int, wanted: int, num_moves: int) -> int:
        """Returns how many of `wanted` tokens from position `start` on a row may compute in a step
        that moves `num_moves` blocks.
        """
        if row_id in self.generating or not self.generating:
            return wanted
        found = self._fitting(start, wanted, num_moves)
        return found if self.has_chunk else max(found, min(wanted, MIN_CHUNK))

    def is_full(self, num_moves: int) -> bool:
        """Returns whether there is no time for another prompt."""
        return self.room("", 0, 1, num_moves) == 0

    def allows_moves(self, num_more: int, num_moves: int) -> bool:
        """Returns whether a request with `num_more` blocks may be swapped in; the first one always
        may.
        """
        return (
            not (self.generating and self.has_chunk)
            or (self._predicted_s(0, 0, num_moves + num_more) or 0.0) <= self.target_s
        )

    def add(self, row_id: str, start: int, num_tokens: int) -> None:
        """Adds a row's tokens to the step."""
        if row_id not in self.generating:
            self.num_tokens += num_tokens
            self.num_keys += start + num_tokens
            self.has_chunk = True

    def _fitting(self, start: int, wanted: int, num_moves: int) -> int:
        """Returns the most tokens with which the step is predicted to last no longer than the
        target; 0 if nothing was measured yet.
        """
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            seconds = self._predicted_s(middle, start + middle, num_moves)
            if seconds is None or seconds > self.target_s:
                high = middle - 1
            else:
                low = middle
        return low

    def _predicted_s(self, more_tokens: int, more_keys: int, num_moves: int) -> float | None:
        step_s = self.costs.step_s(self.num_tokens + more_tokens, self.num_keys + more_keys)
        rate = self.costs.swap_blocks_per_s
        if step_s is None or not num_moves or not rate:
            return step_s
        return step_s + num_moves / rate


def step_time(costs: StepCosts, target_s: float, running: Iterable[Request]) -> StepTime:
    """Returns the predicted time of a step with the next token of each row that generates."""
    time = StepTime(costs, target_s)
    for request in running:
        for row in request.rows:
            if row.num_tokens - row.num_planned_tokens <= 1:
                time.generating.add(row.request_id)
                time.num_keys += row.num_planned_tokens + 1
    time.num_tokens = len(time.generating)
    return time
