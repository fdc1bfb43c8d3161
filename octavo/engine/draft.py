"""A step being composed: what is left of its token budget, and what is to become the StepPlan.

Knows requests as far as a row of the plan needs them; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.block_manager import Grant
from octavo.engine.rates import Rates
from octavo.engine.request import Request
from octavo.step import BlockMove, NewRow, ScheduledRow


@dataclass(slots=True)
class Draft:
    now: float
    rates: Rates
    budget: int
    """Tokens that may still be added."""
    max_chunk: int
    """Most tokens of one request."""
    rows: list[ScheduledRow] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    swapped_out: list[Request] = field(default_factory=list)
    preempted: bool = False
    waits_for: str = ""
    """What keeps requests from starting in this step."""
    has_prompt: bool = False

    def end_of(self, request: Request) -> int:
        """Up to which token the budget takes the request."""
        return min(request.num_tokens, request.num_computed_tokens + min(self.budget, self.max_chunk))

    def add_row(self, request: Request, end: int, grant: Grant) -> None:
        start = request.num_computed_tokens
        self.budget -= end - start
        self.has_prompt = self.has_prompt or start < request.num_prompt_tokens
        self.moves += grant.moves
        scores_prompt = request.wants_prompt_logprobs and end >= request.params.first_prompt_logprob
        num_prompt_logprobs = request.params.prompt_logprobs if scores_prompt else None
        samples = end == request.num_tokens
        self.rows.append(
            ScheduledRow(request.request_id, start, end - start, grant.new_block_ids, grant.replaced, samples, num_prompt_logprobs)
        )

    def add_new_row(self, request: Request) -> None:
        source = request.source
        self.new_rows.append(
            NewRow(
                request.request_id,
                list(request.token_ids),
                request.num_prompt_tokens,
                request.params,
                source.seed,
                source.sample_index,
                sorted(request.end_token_ids),
            )
        )

    def drop_row(self, request: Request) -> None:
        """Of a request that is preempted after it got its share."""
        for index, row in enumerate(self.rows):
            if row.request_id == request.request_id:
                self.budget += row.num_tokens
                del self.rows[index]
                return
