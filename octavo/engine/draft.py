"""A step being composed: what is left of its token budget, and what is to become the StepPlan.

Knows requests as far as a row of the plan needs them; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.block_manager import Grant
from octavo.engine.rates import Rates
from octavo.engine.request import Request
from octavo.engine.token_row import TokenRow
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
    owners: list[tuple[Request, TokenRow]] = field(default_factory=list)
    """Of each of the rows."""
    new_rows: list[NewRow] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    swapped_out: list[Request] = field(default_factory=list)
    preempted: bool = False
    waits_for: str = ""
    """What keeps requests from starting in this step."""
    has_prompt: bool = False

    def end_of(self, row: TokenRow) -> int:
        """Up to which token the budget takes it."""
        return min(row.num_tokens, row.num_computed_tokens + min(self.budget, self.max_chunk))

    def add_row(self, request: Request, row: TokenRow, end: int, grant: Grant) -> None:
        start = row.num_computed_tokens
        self.budget -= end - start
        self.has_prompt = self.has_prompt or start < request.num_prompt_tokens
        self.moves += grant.moves
        scores_prompt = request.wants_prompt_logprobs and end >= request.params.first_prompt_logprob
        num_prompt_logprobs = request.params.prompt_logprobs if scores_prompt else None
        samples = end == row.num_tokens
        search_of = "" if request.search is None else request.request_id
        self.owners.append((request, row))
        self.rows.append(
            ScheduledRow(row.request_id, start, end - start, grant.new_block_ids, grant.replaced, samples, num_prompt_logprobs, search_of)
        )

    def add_new_row(self, request: Request, row: TokenRow) -> None:
        """Before its share of the step, which brings all of its blocks."""
        source = request.source
        row.is_on_worker = True
        self.new_rows.append(
            NewRow(
                row.request_id,
                list(row.token_ids),
                request.num_prompt_tokens,
                request.row_params,
                source.seed,
                source.sample_index,
                sorted(request.end_token_ids),
            )
        )

    def drop_rows(self, request: Request) -> None:
        """Of a request that is preempted after it got its share, or some of it."""
        for index in range(len(self.rows) - 1, -1, -1):
            if self.owners[index][0] is request:
                self.budget += self.rows[index].num_tokens
                del self.rows[index], self.owners[index]
        names = {row.request_id for row in request.rows}
        self.new_rows = [new for new in self.new_rows if new.request_id not in names]
