"""Inputs for deciding how many draft tokens a step verifies.

The policy sees only drafts and step costs. Its decision changes how long a step takes, never which
tokens are sampled.
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
    """Draft of one row in the step under construction."""

    index: int
    """Index of the row in the step."""
    token_ids: list[int]
    """Draft tokens, likeliest first; parents precede their children."""
    parents: list[int]
    """Index of each token's parent, -1: the row's last token; []: a chain."""
    num_matched: int
    reached: list[float]
    """Probability for each draft token that it and all tokens before it on its path are accepted,
    in descending order.
    """
    num_tokens: int = 0
    """Number of draft tokens that the step verifies."""

    @property
    def longest(self) -> int:
        """Number of tokens on the longest path that the step verifies."""
        return DraftTree.of(self.num_tokens, self.parents[: self.num_tokens]).longest


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The step under construction, without drafts."""

    cost_model: StepCostModel
    num_samples: int
    """Number of tokens that the step samples, at least 1."""

    @staticmethod
    def of(builder: StepBuilder) -> PlainStep:
        num_tokens = sum(row.num_tokens for row in builder.rows)
        num_keys = sum(row.start + row.num_tokens for row in builder.rows)
        num_samples = sum(row.result_kind == ResultKind.SAMPLE for row in builder.rows)
        return PlainStep(StepCostModel(builder.costs, num_tokens, num_keys), max(1, num_samples))

    @property
    def is_known(self) -> bool:
        return self.cost_model.is_known

    def times(self, num_drafted: int) -> float:
        """Returns the step's time with `num_drafted` more tokens, relative to its time without
        them.
        """
        return self.cost_model.seconds(num_drafted) / self.cost_model.seconds(0)

    def get_charge(self, num_drafted: int) -> float:
        """Returns the cost of `num_drafted` draft tokens, in plain steps."""
        return SpeculationBudget.get_charge(self.num_samples, num_drafted, self.times(num_drafted))


NO_STEP = PlainStep(StepCostModel(UNMEASURED, 1, 0), 1)
