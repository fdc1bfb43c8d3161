"""A step being composed: what is left of its token budget, and what is to become the StepPlan.

Knows requests as far as a row of the plan needs them; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.kv.block_manager import Grant
from octavo.engine.requests.request import Request
from octavo.engine.requests.token_row import TokenRow
from octavo.engine.step_costs import StepCosts
from octavo.step import BlockMove, NewRow, ScheduledRow


@dataclass(slots=True)
class StepBuilder:
    now: float
    costs: StepCosts
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
    runs_ahead: bool = False
    """A step is in flight, whose tokens nobody knows yet: they are planned with all the same, and
    nobody is preempted.
    """
    is_short: bool = False
    """Somebody found no block, and would have had to preempt."""

    def end_of(self, request: Request, row: TokenRow, start: int) -> int:
        """Up to which token the budget takes it from `start` on. Whoever may go on once a step in
        flight is back is one further.
        """
        num_tokens = len(row.token_ids)
        if self.runs_ahead and start == num_tokens and request.may_go_on:
            num_tokens += 1
        return min(num_tokens, start + min(self.budget, self.max_chunk))

    def add_row(self, request: Request, row: TokenRow, start: int, end: int, grant: Grant) -> None:
        row.num_tokens_in_flight += end - start
        self.budget -= end - start
        self.has_prompt = self.has_prompt or start < request.num_prompt_tokens
        self.moves += grant.moves
        num_known = len(row.token_ids)
        scores_prompt = (
            request.wants_prompt_logprobs
            and request.params.first_prompt_logprob <= end <= num_known
        )
        num_prompt_logprobs = request.params.prompt_logprobs if scores_prompt else None
        search_of = "" if request.search is None else request.request_id
        self.owners.append((request, row))
        self.rows.append(
            ScheduledRow(
                row.request_id,
                start,
                end - start,
                grant.new_block_ids,
                grant.replaced,
                end >= num_known,
                num_prompt_logprobs,
                search_of,
                start == num_known,
            )
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
                self.owners[index][1].num_tokens_in_flight -= self.rows[index].num_tokens
                del self.rows[index], self.owners[index]
        names = {row.request_id for row in request.rows}
        self.new_rows = [new for new in self.new_rows if new.request_id not in names]
