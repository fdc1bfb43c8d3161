"""How fast this machine prefills, swaps and decodes, measured from steps, for those who choose by
it.

Owned by the core and handed to the scheduler with each call, so that the scheduler itself measures
nothing and a recording replays exactly.
"""

from __future__ import annotations

import msgspec

from octavo.step import StepPlan, StepResult

MIN_PREFILL_TOKENS = 32
"""Smaller steps say more about reading the weights than about computing tokens."""

WEIGHT = 0.2
"""Of the newest measurement in the running mean."""


class Rates(msgspec.Struct, frozen=True):
    """None: not measured yet."""

    prefill_tokens_per_s: float | None = None
    swap_blocks_per_s: float | None = None
    """Of any group, in either direction."""
    decode_step_s: float | None = None
    """Of steps in which all that run decode."""


UNMEASURED = Rates()


class RateMeter:
    """Running means over the steps seen."""

    def __init__(self) -> None:
        self.rates = UNMEASURED

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        if result.moved_s > 0 and any(move.kind != "copy" for move in plan.moves):
            rate = _mean(self.rates.swap_blocks_per_s, len(plan.moves) / result.moved_s)
            self.rates = msgspec.structs.replace(self.rates, swap_blocks_per_s=rate)
        computing_s = result.busy_s - result.moved_s
        num_tokens = plan.num_tokens
        if num_tokens - len(plan.rows) >= MIN_PREFILL_TOKENS and computing_s > 0:
            rate = _mean(self.rates.prefill_tokens_per_s, num_tokens / computing_s)
            self.rates = msgspec.structs.replace(self.rates, prefill_tokens_per_s=rate)
        elif num_tokens and num_tokens == len(plan.rows):
            step_s = _mean(self.rates.decode_step_s, computing_s / result.num_steps)
            self.rates = msgspec.structs.replace(self.rates, decode_step_s=step_s)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
