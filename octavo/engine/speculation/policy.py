"""Inputs of the decision how many draft tokens a step verifies.

The policy sees drafts and step costs, neither requests nor blocks. Its decision changes how long a
step takes and never which tokens it yields.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.protocol.draft_tree import DraftTree
from octavo.engine.protocol.step import ResultKind
from octavo.engine.protocol.step_costs import UNMEASURED
from octavo.engine.scheduler.step_builder import StepBuilder
from octavo.engine.speculation.speculation_budget import SpeculationBudget
from octavo.engine.speculation.step_cost_model import StepCostModel


@dataclass(slots=True)
class RowDraft:
    """Draft of one row in the step that is being built."""

    index: int
    """Index of the row in the step."""
    token_ids: list[int]
    """Draft tokens, likeliest first; each follows its parent."""
    parents: list[int]
    """Index of each token's parent; -1 is the row's last token, [] a chain."""
    num_matched: int
    reached: list[float]
    """Probability of each draft token that it and all tokens before it on its path are accepted, in
    descending order."""
    num_tokens: int = 0
    """Number of draft tokens that the step verifies."""

    @property
    def longest(self) -> int:
        """Tokens on the longest path that the step verifies."""
        return DraftTree.of(self.num_tokens, self.parents[: self.num_tokens]).longest


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The step that is being built, without drafts."""

    cost_model: StepCostModel
    num_draws: int
    """Number of tokens that it samples, at least 1."""

    @staticmethod
    def of(builder: StepBuilder) -> PlainStep:
        num_tokens = sum(row.num_tokens for row in builder.rows)
        num_keys = sum(row.start + row.num_tokens for row in builder.rows)
        num_draws = sum(row.result_kind == ResultKind.SAMPLE for row in builder.rows)
        return PlainStep(StepCostModel(builder.costs, num_tokens, num_keys), max(1, num_draws))

    @property
    def is_known(self) -> bool:
        return self.cost_model.is_known

    def times(self, num_drafted: int) -> float:
        """Returns how many times as long the step takes with `num_drafted` more tokens."""
        return self.cost_model.seconds(num_drafted) / self.cost_model.seconds(0)

    def get_charge(self, num_drafted: int) -> float:
        """Returns the charge for `num_drafted` draft tokens, in plain steps."""
        return SpeculationBudget.get_charge(self.num_draws, num_drafted, self.times(num_drafted))


NO_STEP = PlainStep(StepCostModel(UNMEASURED, 1, 0), 1)
