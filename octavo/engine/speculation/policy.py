"""The decision how many guessed tokens a step verifies, as a protocol, and what it is made by.

A policy sees guesses and what steps cost, and neither requests nor blocks. It decides what a step
takes and never what it yields, so any answer is allowed. Reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.protocol.draft_tree import DraftTree
from octavo.engine.protocol.step_costs import UNMEASURED
from octavo.engine.scheduler.step_builder import StepBuilder
from octavo.engine.speculation.credit import Credit
from octavo.engine.speculation.step_price import StepPrice


@dataclass(slots=True)
class RowDraft:
    """One row's guess in the step that is composed."""

    index: int
    """Index of the row in the step."""
    token_ids: list[int]
    """Guessed tokens, the likeliest to be reached first and each behind its parent."""
    parents: list[int]
    """Index of each token's parent among them, -1: the row's last known token; []: each follows the
    one before.
    """
    num_matched: int
    reached: list[float]
    """Chance of each guessed token that it and those before it on its path hold; falling."""
    num_tokens: int = 0
    """Guessed tokens that the step verifies, the first ones."""

    @property
    def longest(self) -> int:
        """Tokens on the longest path of what the step verifies."""
        return DraftTree.of(self.num_tokens, self.parents[: self.num_tokens]).longest


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The step that is composed, as it is without guesses."""

    price: StepPrice
    num_draws: int
    """Number of its draws, at least 1."""

    @staticmethod
    def of(builder: StepBuilder) -> PlainStep:
        num_tokens = sum(row.num_tokens for row in builder.rows)
        num_keys = sum(row.start + row.num_tokens for row in builder.rows)
        num_draws = sum(row.wants == "draw" for row in builder.rows)
        return PlainStep(StepPrice(builder.costs, num_tokens, num_keys), max(1, num_draws))

    @property
    def is_known(self) -> bool:
        return self.price.is_known

    def times(self, num_guessed: int) -> float:
        """Returns how many times as long the step takes with `num_guessed` tokens more."""
        return self.price.of(num_guessed) / self.price.of(0)

    def charge_of(self, num_guessed: int) -> float:
        """Returns the charge for `num_guessed` tokens, in plain steps."""
        return Credit.charge_of(self.num_draws, num_guessed, self.times(num_guessed))


NO_STEP = PlainStep(StepPrice(UNMEASURED, 1, 0), 1)
