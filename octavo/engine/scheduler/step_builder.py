"""A StepPlan under construction, and the rest of its token budget.

`MultiStepPolicy` decides how many decode steps a plan has: the number that needs no decision by the
scheduler, so that one scheduling pass serves all of them. Source: multi-step scheduling (vLLM 0.6,
2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_tables import NO_LEAVES, BlockAllocation, LeafBlocks
from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.protocol.step import MediaItem, NewRequest, ResultKind, ScheduledRequest
from octavo.engine.protocol.step_costs import StepCosts
from octavo.engine.requests.request import Request
from octavo.engine.requests.sequence_state import SequenceState
from octavo.engine.scheduler.step_time import StepTime

MAX_CALL_S = 0.1
"""Maximum duration in seconds of one plan's decode steps (decision 0019). Requests and aborts end
them at once; the work of connectors waits for the next plan.
"""


@dataclass(frozen=True, slots=True)
class StepLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk: int | None
    """Maximum number of tokens of one request in a step; None if prompts are not chunked."""
    itl_target_s: float | None = None
    """Target for the time between two tokens of decoding rows, in seconds."""
    keeps_kv: bool = True
    """If False, each step recomputes all tokens of a request, for comparison."""
    num_micro_batches: int = 1
    """Number of steps in flight at once, over which the decoding requests are distributed. A
    request's next token is scheduled once the last one has arrived.
    """


@dataclass(slots=True)
class StepBuilder:
    """The parts of one StepPlan, added request by request."""

    now: float
    costs: StepCosts
    budget: int
    """Number of tokens that may still be added."""
    max_chunk: int
    """Maximum number of tokens of one row."""
    time: StepTime | None = None
    """Predicted time of the step if it has a target, else None."""
    rows: list[ScheduledRequest] = field(default_factory=list)
    owners: list[tuple[Request, SequenceState]] = field(default_factory=list)
    """Request and row of each of `rows`."""
    new_rows: list[NewRequest] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    swapped_out: list[Request] = field(default_factory=list)
    preempted: bool = False
    """Whether a request was preempted for this step."""
    waits_for: str = ""
    """Reason why the first waiting request does not start in this step."""
    has_prompt: bool = False
    """Whether the step computes prompt tokens."""
    runs_ahead: bool = False
    """Whether a step is in flight, so that no request is preempted."""
    samples_ahead: bool = False
    """Whether the step computes tokens that a step in flight has not sampled yet."""
    is_short: bool = False
    """Whether a row found no free block, and another request would have to be preempted."""

    def get_end(self, request: Request, row: SequenceState, start: int) -> int:
        """Returns the end of the row's tokens that the step computes from `start` on: all known
        tokens, and one more if a step in flight samples the next one.
        """
        num_tokens = len(row.token_ids)
        if self.samples_ahead and start == num_tokens and request.may_run_ahead:
            num_tokens += 1
        budget = self.budget
        if not request.is_encoded:
            budget = max(0, budget - request.num_input_tokens)
        end = min(num_tokens, start + min(budget, self.max_chunk))
        if self.time is not None and end > start:
            end = start + self.time.room(row.request_id, start, end - start, len(self.moves))
        if request.source.media:
            whole = _cut_medium(request.source.media, start, end)
            if whole is not None:
                return self._end_beside(whole, start)
        return end

    def _end_beside(self, medium: MediaItem, start: int) -> int:
        """Returns the end of a chunk that overlaps a medium whose tokens must be computed in one
        step: before the medium, or after it if the chunk begins with it and the budget suffices.
        """
        if start < medium.start:
            return medium.start
        return medium.end if medium.end - start <= self.budget else start

    def add_row(
        self, request: Request, row: SequenceState, start: int, end: int, grant: BlockAllocation
    ) -> None:
        """Adds the tokens of a row from `start` up to `end`, with the blocks allocated for them."""
        num_encoded = 0 if request.is_encoded else request.num_input_tokens
        request.is_encoded = True
        row.num_tokens_in_flight += end - start
        self.budget -= end - start + num_encoded
        if self.time is not None:
            self.time.add(row.request_id, start, end - start)
        self.has_prompt = self.has_prompt or start < request.num_prompt_tokens
        self.moves += grant.moves
        num_known = len(row.token_ids)
        num_prompt_logprobs = request.params.prompt_logprobs
        if num_prompt_logprobs is not None and not (
            request.wants_prompt_logprobs
            and request.params.first_prompt_logprob <= end <= num_known
        ):
            num_prompt_logprobs = None
        search_of = request.request_id if request.consumer.reads_logprobs else ""
        self.owners.append((request, row))
        self.rows.append(
            ScheduledRequest(
                row.request_id,
                start,
                num_tokens=end - start,
                new_block_ids=grant.new_block_ids,
                replaced_blocks=grant.replaced,
                program=request.source.program,
                result_kind=request.consumer.result_kind if end >= num_known else ResultKind.NONE,
                num_prompt_logprobs=num_prompt_logprobs,
                search_of=search_of,
                from_device=start == num_known,
                max_num_tokens=None if request.source.grammar is None else request.max_num_tokens,
                num_encoded=num_encoded,
            )
        )

    def add_draft(
        self,
        index: int,
        draft_ids: list[int],
        parents: Sequence[int] = (),
        leaves: LeafBlocks = NO_LEAVES,
    ) -> None:
        """Adds draft tokens after the last token of a row that has blocks for them. For a draft
        tree: also each token's parent, and the blocks of all paths except the first.
        """
        scheduled = self.rows[index]
        scheduled.draft_ids, scheduled.draft_parents = draft_ids, list(parents)
        scheduled.leaf_blocks = leaves.entries
        self.moves += leaves.moves
        scheduled.num_tokens += len(draft_ids)
        self.owners[index][1].num_tokens_in_flight += len(draft_ids)
        self.budget -= len(draft_ids)

    def add_blocks(self, grants: Mapping[str, list[list[int]]]) -> None:
        """Adds newly allocated blocks to the step's rows, by request and group."""
        for row in self.rows:
            if added := grants.get(row.request_id):
                row.new_block_ids = [
                    old + new
                    for old, new in zip(row.new_block_ids or [[]] * len(added), added, strict=True)
                ]

    def add_new_row(self, request: Request, row: SequenceState, adapter_slot: int) -> None:
        """Adds a row that the worker does not have; `add_row` must follow with all of its
        blocks.
        """
        source = request.source
        row.is_on_worker = True
        self.new_rows.append(
            NewRequest(
                row.request_id,
                token_ids=list(row.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.consumer.row_params,
                seed=source.seed,
                sample_index=source.sample_index,
                end_token_ids=sorted(request.end_token_ids),
                grammar=source.grammar,
                mirostat_mu=row.mirostat_mu,
                second_start=source.second_start,
                adapter_slot=adapter_slot,
                media=source.media,
                encoder_input=source.encoder_input,
                first_position=request.first_position,
            )
        )

    def drop_rows(self, request: Request) -> None:
        """Removes a preempted request's rows and returns their tokens to the budget."""
        for index in range(len(self.rows) - 1, -1, -1):
            if self.owners[index][0] is request:
                self.budget += self.rows[index].num_tokens + self.rows[index].num_encoded
                self.owners[index][1].num_tokens_in_flight -= self.rows[index].num_tokens
                del self.rows[index], self.owners[index]
        names = {row.request_id for row in request.rows}
        self.new_rows = [new for new in self.new_rows if new.request_id not in names]


class MultiStepPolicy:
    """Decides how many decode steps a plan has, at most `max_num_steps`."""

    def __init__(self, blocks: BlockManager, max_num_steps: int) -> None:
        self._blocks = blocks
        self._max_num_steps = max_num_steps

    def num_steps(self, builder: StepBuilder, *, num_running: int) -> int:
        """Returns the number of decode steps of a plan while no request waits, and allocates the
        blocks for all of them. More than one only if all running requests decode, no block moves,
        and no request ends or changes its sampling before the last step.
        """
        rows = builder.rows
        if self._max_num_steps == 1 or builder.moves or builder.has_prompt:
            return 1
        if not rows or len(rows) != num_running:
            return 1
        num_keys = 0
        for row in rows:
            if row.result_kind != ResultKind.SAMPLE or row.num_tokens != 1:
                return 1
            num_keys += row.start + 1
        step_s = builder.costs.step_s(len(rows), num_keys)
        if not step_s:
            return 1
        num_steps = min(self._max_num_steps, int(MAX_CALL_S / step_s))
        hashes = self._blocks.hashes
        for (request, _), row in zip(builder.owners, rows, strict=True):
            num_steps = min(num_steps, request.num_multi_step_tokens)
            if hashes.has_checkpoints:
                end = hashes.step_end(row.request_id, row.start, row.start + num_steps)
                num_steps = end - row.start
        return self._reserve(builder, num_steps)

    def _reserve(self, builder: StepBuilder, num_steps: int) -> int:
        """Allocates the rows' blocks for `num_steps` steps, or for fewer if too few blocks are
        free; returns the number of steps.
        """
        while num_steps > 1:
            ends = {row.request_id: row.start + num_steps for row in builder.rows}
            added = self._blocks.reserve(ends)
            if added is not None:
                if added:
                    builder.add_blocks(added)
                return num_steps
            num_steps //= 2
        return 1


def _cut_medium(media: Sequence[MediaItem], start: int, end: int) -> MediaItem | None:
    """Returns the medium that the chunk would split although it must be computed in one step.
    Returns None if there is none.
    """
    if end == start:
        return None
    return next((item for item in media if item.is_whole and item.start < end < item.end), None)
