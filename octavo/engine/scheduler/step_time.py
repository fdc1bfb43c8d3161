"""Time budget of a step: how many prompt tokens fit beside the decoding rows, so that the time
between their tokens stays within a target.

Predicts times from StepCosts, which are part of a recording; reads no clock. The first chunk of a
step has at least MIN_CHUNK tokens whatever it costs, so that prompts advance even if decoding alone
takes the complete budget. Source: stall-free batching (Sarathi-Serve, Agrawal et al. 2024), with
measured costs instead of a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.engine.protocol.step_costs import StepCosts
from octavo.engine.requests.request import Request

MIN_CHUNK = 16
"""Minimum tokens of a step's first chunk: one block, and the largest size for which costs are
measured exactly (`MAX_SINGLE_TOKENS`).
"""


@dataclass(slots=True)
class StepTime:
    """Predicted time of the step under construction."""

    costs: StepCosts
    target_s: float
    num_tokens: int = 0
    num_keys: int = 0
    """Tokens computed and keys read by all rows so far, including those of `generating`."""
    generating: set[str] = field(default_factory=set)
    """Decoding rows, whose next tokens are included from the start."""
    has_chunk: bool = False
    """Whether the step already computes a part of a prompt, or swaps a request in."""

    def room(self, row_id: str, start: int, num_tokens: int, num_moves: int) -> int:
        """Returns how many of `num_tokens` tokens from position `start` on a row may compute in a
        step that moves `num_moves` blocks.
        """
        if row_id in self.generating or not self.generating:
            return num_tokens
        num_fitting = self._fitting(start, num_tokens, num_moves)
        return num_fitting if self.has_chunk else max(num_fitting, min(num_tokens, MIN_CHUNK))

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

    def _fitting(self, start: int, num_tokens: int, num_moves: int) -> int:
        """Returns the maximum number of tokens with which the step is predicted to meet the target;
        0 if nothing was measured yet.
        """
        low, high = 0, num_tokens
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
    """Returns the predicted time of a step that computes the next token of each decoding row."""
    time = StepTime(costs, target_s)
    for request in running:
        for row in request.rows:
            if row.num_tokens - row.num_planned_tokens <= 1:
                time.generating.add(row.request_id)
                time.num_keys += row.num_planned_tokens + 1
    time.num_tokens = len(time.generating)
    return time
