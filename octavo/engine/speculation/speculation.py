"""Speculative decoding in the scheduler: collects drafts from proposers, lets a policy decide how
many tokens are verified, and records which were accepted.

Called once per step; nothing is drafted while a step is in flight. Verification samples the same
tokens as without drafts, so drafts never change the output. Source: speculative decoding (Leviathan
et al. 2023) with deterministic drafts, for which accepting equal samples is optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.protocol.draft_tree import DraftTree
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import ResultKind, RowResult, ScheduledRequest
from octavo.engine.requests.request import Request
from octavo.engine.requests.sequence_state import ResultConsumer, SequenceState
from octavo.engine.scheduler.step_builder import StepBuilder
from octavo.engine.speculation.acceptance import Acceptance
from octavo.engine.speculation.draft_tree_builder import build_row_draft
from octavo.engine.speculation.ngram import NgramProposer
from octavo.engine.speculation.policy import NO_STEP, PlainStep, RowDraft
from octavo.engine.speculation.previous_outputs import PreviousOutputs
from octavo.engine.speculation.proposer import (
    NO_DRAFT,
    NO_WORKER_DRAFT,
    WORKER_MATCH,
    Draft,
    Proposer,
    WorkerDraft,
)
from octavo.engine.speculation.suffix import SuffixProposer
from octavo.engine.speculation.throughput import LIKELY, ThroughputPolicy

SpecMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar", "auto"]
"""Methods of speculation. After the options are resolved, "auto" is "suffix" together with "mtp".
"""

PROPOSERS: Mapping[SpecMethod, Callable[[], Proposer] | None] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "draft_model": None,
    "eagle3": None,
    "mtp": None,
    "grammar": None,
    "auto": SuffixProposer,
}
"""Proposer of a row, by method; None if only the worker drafts. With every method, the worker also
drafts the tokens that a grammar forces.
"""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    method: SpecMethod
    max_tokens: int
    """Maximum number of draft tokens of a row, on each path."""
    can_resample: bool = True
    """Whether the backend can resample a row, which sequential sampling requires."""
    history_bytes: int = 0
    """Memory for outputs of finished requests that serve as drafts for others, in bytes; 0:
    none.
    """
    tree_width: int = 1
    """Maximum number of paths of a row's draft."""


PROGRAM_METHODS: frozenset[SpecMethod] = frozenset({"draft_model", "eagle3", "mtp", "auto"})
"""Methods whose drafts the worker computes with a Program."""
MOST_WATCHED = 4
"""Maximum number of rows that may draft between the decode steps of one plan."""
BLIND_PLANS = 16
"""If a multi-step plan ended early for a draft that was not verified: number of following plans
that do not end early.
"""
MIN_ACCEPTANCE = 0.02
"""Minimum acceptance probability of a draft; less likely drafts are ignored."""
MIN_FOLLOWED = 256
"""Minimum number of tokens that proposers may process per step. The number is limited so that a
prompt found in the prefix cache does not delay a step.
"""


class Speculation:
    """Speculation of one engine, with a proposer for each row."""

    def __init__(
        self,
        blocks: BlockManager,
        stats: EngineStats,
        drafting: SpeculationOptions,
        policy: ThroughputPolicy | None = None,
    ) -> None:
        """`policy` decides what is verified; None: `ThroughputPolicy`."""
        self._blocks = blocks
        self._stats = stats
        self._policy = policy or ThroughputPolicy()
        self._max_tokens = drafting.max_tokens
        self._can_resample = drafting.can_resample
        self._num_paths = drafting.tree_width if blocks.can_branch else 1
        self._make_proposer = _get_proposer_factory(drafting.method, self._num_paths)
        self._drafts_with_program = drafting.method in PROGRAM_METHODS
        """Whether drafts are requested from the worker, one step before they are verified."""
        self._drafts_by_grammar = drafting.method == "grammar"
        """Whether all drafts are tokens forced by grammars, which step results contain."""
        self.is_active = not self._drafts_by_grammar
        """Whether drafts are possible. With method "grammar", only after a running request has
        reached a forced token.
        """
        self._previous_outputs = (
            PreviousOutputs(drafting.history_bytes) if drafting.history_bytes else None
        )
        self._rows: dict[str, RowHistory] = {}
        self._acceptance = Acceptance()
        self._plain = NO_STEP
        self._has_ended_call = False
        """Whether the last multi-step plan ended early for a draft."""
        self._num_blind = 0
        """Number of plans before a multi-step plan may again end early for a draft."""

    # -- building a step ---------------------------------------------------------------------------

    def add_drafts(self, builder: StepBuilder) -> bool:
        """Adds the drafts that are worth verifying to the step, or requests drafts from the worker.
        Returns whether it did either. Does nothing while a step is in flight.
        """
        if builder.runs_ahead or not self.is_active:
            return False
        self._plain = PlainStep.of(builder)
        drafts = self._collect_drafts(builder)
        worker_drafts, other_drafts = self._split_by_source(drafts)
        worker_rows = self._get_worker_rows(builder) if self._drafts_with_program else []
        if other_drafts:
            self._choose(other_drafts, builder)
        self._schedule_worker_drafts(worker_drafts, builder)
        is_added = any(draft.num_tokens for draft in drafts) and self._add(drafts, builder)
        self._num_blind = max(0, self._num_blind - 1)
        if self._has_ended_call and not is_added:
            self._num_blind = BLIND_PLANS
        self._has_ended_call = False
        return self._request_worker_drafts(worker_rows, builder) or is_added

    def _split_by_source(self, drafts: list[RowDraft]) -> tuple[list[RowDraft], list[RowDraft]]:
        """Splits drafts into those that the worker computed on request, and all others."""
        if not self._drafts_with_program:
            return [], drafts
        is_given = [draft.num_matched == WORKER_MATCH for draft in drafts]
        return (
            [draft for draft, worker_drafts in zip(drafts, is_given, strict=True) if worker_drafts],
            [
                draft
                for draft, worker_drafts in zip(drafts, is_given, strict=True)
                if not worker_drafts
            ],
        )

    def _schedule_worker_drafts(self, drafts: list[RowDraft], builder: StepBuilder) -> None:
        """Schedules the worker's drafts: the number of tokens that were requested, the likeliest
        ones of a tree. Their cost is already spent.
        """
        for draft in drafts[: builder.budget]:
            num_asked = len(DraftTree.of(len(draft.token_ids), draft.parents).paths[0])
            draft.num_tokens = min(num_asked, builder.budget // len(drafts))

    def _request_worker_drafts(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Requests drafts for the next step from the worker if they are worthwhile; returns whether
        it did.
        """
        if not drafts or not self._choose(drafts, builder):
            return False
        counts = {draft.index: draft.num_tokens for draft in drafts if draft.num_tokens}
        for index, count in counts.items():
            builder.rows[index].propose = count
        # If this fails, the worker drafts as far as the rows have blocks.
        self._reserve(counts, builder)
        return True

    def _get_worker_rows(self, builder: StepBuilder) -> list[RowDraft]:
        """Returns the rows that the worker can draft for, with placeholder tokens."""
        drafts = []
        for index, (scheduled, (request, row)) in enumerate(
            zip(builder.rows, builder.owners, strict=True)
        ):
            max_tokens = min(self._max_tokens, request.num_draftable_tokens - row.num_tokens - 1)
            if (
                max_tokens > 0
                and self._may_draft(request.consumer)
                and _can_draft(scheduled, request)
            ):
                draft = Draft([0] * max_tokens, WORKER_MATCH)
                drafts.append(self._row_draft(index, row, [draft], max_tokens))
        return drafts

    def _add(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Adds the chosen drafts to the step; returns False if too few blocks are free."""
        chosen = [draft for draft in drafts if draft.num_tokens]
        if not self._reserve({draft.index: draft.longest for draft in chosen}, builder):
            return False
        for draft in chosen:
            self._add_one(draft, builder)
        self._stats.num_drafts += len(chosen)
        self._stats.num_draft_tokens += sum(draft.num_tokens for draft in chosen)
        return True

    def _add_one(self, draft: RowDraft, builder: StepBuilder) -> None:
        """Adds a draft whose row has blocks. Adds only the first path if no blocks are free for the
        others.
        """
        scheduled = builder.rows[draft.index]
        self._rows[scheduled.request_id].num_matched = draft.num_matched
        token_ids, parents = draft.token_ids[: draft.num_tokens], draft.parents[: draft.num_tokens]
        tree = DraftTree.of(len(token_ids), parents)
        if tree.is_chain:
            builder.add_draft(draft.index, token_ids)
            return
        first = scheduled.start + scheduled.num_tokens
        leaves = self._blocks.branch(
            scheduled.request_id,
            scheduled.start,
            [first + len(path) for path in tree.paths[1:]],
        )
        if leaves is None:
            draft.num_tokens = len(tree.paths[0])
            builder.add_draft(draft.index, [token_ids[at] for at in tree.paths[0]])
            return
        builder.add_draft(draft.index, token_ids, parents, leaves)

    def _collect_drafts(self, builder: StepBuilder) -> list[RowDraft]:
        """Returns the drafts of the rows' proposers, within the rows' limits.

        The number of tokens indexed per step is limited to about the number that the step computes,
        so a prompt is indexed along with its prefill.
        """
        row_drafts = []
        num_left = max(MIN_FOLLOWED, sum(row.num_tokens for row in builder.rows))
        for index, (scheduled, (request, row)) in enumerate(
            zip(builder.rows, builder.owners, strict=True)
        ):
            if not self._may_draft(request.consumer):
                continue
            history = self._get_history(row)
            if history is None:
                continue
            num_left = max(0, num_left - history.follow(row.token_ids, num_left))
            max_tokens = min(self._max_tokens, request.num_draftable_tokens - row.num_tokens)
            first = scheduled.start + scheduled.num_tokens
            end = self._blocks.hashes.step_end(
                row.request_id, scheduled.start, first + max(0, max_tokens)
            )
            max_tokens = end - first
            if max_tokens < 1 or not _can_draft(scheduled, request):
                continue
            drafts = self._ranked_drafts(history, request, row, max_tokens)
            if drafts:
                row_drafts.append(
                    self._row_draft(
                        index, row, drafts, max_tokens, may_branch=request.consumer.may_branch
                    )
                )
        return row_drafts

    def _row_draft(
        self,
        index: int,
        row: SequenceState,
        drafts: Sequence[Draft],
        max_tokens: int,
        *,
        may_branch: bool = False,
    ) -> RowDraft:
        return build_row_draft(
            self._acceptance,
            row.request_id,
            index,
            drafts,
            max_tokens=max_tokens,
            max_leaves=self._num_paths if may_branch else 1,
        )

    def _ranked_drafts(
        self, history: RowHistory, request: Request, row: SequenceState, max_tokens: int
    ) -> list[Draft]:
        """Returns the drafts for a row, the likeliest to be accepted first."""
        drafts = history.propose(row.token_ids, max_tokens)
        if self._previous_outputs is not None and row.num_tokens > request.num_prompt_tokens:
            drafts.append(self._previous_outputs.propose(request.source, row.token_ids, max_tokens))
        chances = [
            (self._acceptance.chance(row.request_id, draft.num_matched), draft)
            for draft in drafts
            if draft.token_ids
        ]
        weighed = [pair for pair in chances if pair[0] >= MIN_ACCEPTANCE]
        return [draft for _, draft in sorted(weighed, key=lambda pair: -pair[0])]

    def _may_draft(self, consumer: ResultConsumer) -> bool:
        return consumer.may_draft and (self._can_resample or not consumer.samples_sequentially)

    def _get_history(self, row: SequenceState) -> RowHistory | None:
        """Returns a row's state. Returns None if only the worker drafts and has not done so for
        this row.
        """
        history = self._rows.get(row.request_id)
        if history is None and not self._drafts_by_grammar:
            proposer = None if self._make_proposer is None else self._make_proposer()
            history = self._rows[row.request_id] = RowHistory(proposer)
        return history

    def _choose(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Sets how many tokens of each draft are verified; returns whether any are."""
        counts = self._policy.num_drafts(drafts, self._plain, builder.budget)
        for draft, count in zip(drafts, counts, strict=True):
            draft.num_tokens = count
        return any(counts)

    def _reserve(self, counts: Mapping[int, int], builder: StepBuilder) -> bool:
        """Allocates blocks for `counts` more tokens of each row, by row index; returns False and
        allocates none if too few are free. No request is preempted for a draft.
        """
        ends = {}
        for index, count in counts.items():
            (request, _), scheduled = builder.owners[index], builder.rows[index]
            tree = DraftTree.of(len(scheduled.draft_ids), scheduled.draft_parents)
            num_known = scheduled.num_tokens - len(scheduled.draft_ids)
            end = scheduled.start + num_known + tree.longest + count
            ends[scheduled.request_id] = min(end, request.max_num_tokens)
        grants = self._blocks.reserve(ends)
        if grants is None:
            return False
        builder.add_blocks(grants)
        return True

    # -- results -----------------------------------------------------------------------------------

    def should_end_decode(self, owners: Sequence[tuple[Request, SequenceState]]) -> bool:
        """Returns whether a multi-step plan should end after the last result, because its tokens
        lead to a draft that is likely to be accepted, and verifying it is faster than the next
        plain step.
        """
        if self._make_proposer is None or self._num_blind or len(owners) > MOST_WATCHED:
            return False
        drafts = []
        for index, (request, row) in enumerate(owners):
            history = self._rows.get(row.request_id)
            if history is None or history.proposer is None or not history.is_current:
                continue
            history.follow(row.token_ids, 1)
            max_tokens = min(self._max_tokens, request.num_draftable_tokens - row.num_tokens)
            draft = history.proposer.propose(max_tokens) if max_tokens > 0 else NO_DRAFT
            chance = self._acceptance.chance(row.request_id, draft.num_matched)
            if draft.token_ids and chance >= LIKELY:
                drafts.append(self._row_draft(index, row, [draft], max_tokens))
        self._has_ended_call = bool(drafts) and self._policy.promises(drafts, self._plain)
        return self._has_ended_call

    def record(self, scheduled: ScheduledRequest, result: RowResult, num_taken: int) -> int:
        """Records the result of a row's draft, of which the request kept `num_taken` sampled tokens
        (tokens after its end are dropped). Returns how many of these were draft tokens.
        """
        if not self.is_active and (scheduled.search_of or not result.draft_ids):
            return 0
        num_accepted = min(self._record_drafts(scheduled, result), num_taken)
        self._stats.num_accepted_tokens += num_accepted
        self._policy.record(len(result.token_ids), num_accepted, self._plain)
        return num_accepted

    def _record_drafts(self, scheduled: ScheduledRequest, result: RowResult) -> int:
        history = self._rows.get(scheduled.request_id)
        num_known = scheduled.num_tokens - len(scheduled.draft_ids)
        drafts_by_grammar = self._drafts_by_grammar and not scheduled.search_of
        if result.draft_ids and history is None and drafts_by_grammar:
            history = self._rows[scheduled.request_id] = RowHistory(None)
            self.is_active = True
        if result.draft_ids and history is not None:
            num_tokens = scheduled.start + num_known + len(result.token_ids)
            history.worker_draft = WorkerDraft(num_tokens, result.draft_ids, result.draft_parents)
        if not scheduled.draft_ids or history is None or result.failure is not None:
            return 0
        num_accepted = max(0, result.num_kept - num_known)
        if scheduled.draft_parents:
            self._record_tree(scheduled, result.token_ids, history.num_matched)
        else:
            self._acceptance.record(
                scheduled.request_id, history.num_matched, len(scheduled.draft_ids), num_accepted
            )
        return num_accepted

    def _record_tree(
        self, scheduled: ScheduledRequest, sampled_ids: Sequence[int], num_matched: int
    ) -> None:
        """Records the result of a draft tree: of the first path as for a chain, and of runner-up
        tokens whose likelier siblings were rejected.
        """
        token_ids = scheduled.draft_ids
        tree = DraftTree.of(len(token_ids), scheduled.draft_parents)
        accepted = tree.held(token_ids, sampled_ids)
        spine = tree.paths[0]
        num_accepted_spine = next(
            (
                depth
                for depth, (accepted_token, spine_token) in enumerate(
                    zip(accepted, spine, strict=False)
                )
                if accepted_token != spine_token
            ),
            min(len(accepted), len(spine)),
        )
        self._acceptance.record(scheduled.request_id, num_matched, len(spine), num_accepted_spine)
        for token_id, parent in zip(sampled_ids, [-1, *accepted], strict=False):
            for rank, token in enumerate(tree.children.get(parent, ())[1:]):
                first = tree.children[parent][: rank + 1]
                if any(token_ids[earlier] == token_id for earlier in first):
                    break
                self._acceptance.record_runner_up(
                    scheduled.request_id, rank, accepted=token_ids[token] == token_id
                )

    def remove_request(self, request: Request) -> None:
        """Removes the state of a finished request; its output may serve as drafts for others."""
        self._rows.pop(request.request_id, None)
        self.is_active = bool(self._rows) or not self._drafts_by_grammar
        self._acceptance.remove_request(request.request_id)
        if self._previous_outputs is not None and request.consumer.may_draft:
            self._previous_outputs.add(request.source, request.token_ids)


def _get_proposer_factory(method: SpecMethod, num_paths: int) -> Callable[[], Proposer] | None:
    """Returns the factory of a row's proposer with up to `num_paths` paths. Returns None if only
    the worker drafts.
    """
    make = PROPOSERS[method]
    return partial(SuffixProposer, num_paths=num_paths) if make is SuffixProposer else make


def _can_draft(scheduled: ScheduledRequest, request: Request) -> bool:
    """Returns whether a row samples after generated tokens: the last one, or several that its
    grammar forced.
    """
    return (
        scheduled.result_kind == ResultKind.SAMPLE
        and (scheduled.num_tokens == 1 or scheduled.start >= request.num_prompt_tokens)
        and not scheduled.from_device
        and not scheduled.search_of
    )


class RowHistory:
    """Proposer of one row, the worker's draft, and the match of the last verified draft."""

    __slots__ = ("is_current", "num_matched", "num_taken", "proposer", "worker_draft")

    def __init__(self, proposer: Proposer | None) -> None:
        self.proposer = proposer
        self.is_current = False
        """Whether the proposer knew all of the row's tokens when the last step was built."""
        self.worker_draft = NO_WORKER_DRAFT
        self.num_taken = 0
        self.num_matched = 0

    def follow(self, token_ids: list[int], max_new: int) -> int:
        """Passes the row's next tokens to the proposer: at most `max_new`, or all new ones if it
        was up to date. Returns their number.
        """
        num_more = len(token_ids) - self.num_taken
        if not self.is_current:
            num_more = min(max_new, num_more)
        if self.proposer is not None and num_more > 0:
            self.proposer.extend(token_ids[self.num_taken : self.num_taken + num_more])
            self.num_taken += num_more
        self.is_current = self.num_taken == len(token_ids)
        return max(0, num_more)

    def propose(self, token_ids: list[int], max_tokens: int) -> list[Draft]:
        """Returns the worker's draft for this position, and the proposer's draft if it knows all of
        the row's tokens.
        """
        drafts = []
        if self.worker_draft.num_tokens == len(token_ids):
            drafts.append(
                Draft(self.worker_draft.token_ids, WORKER_MATCH, self.worker_draft.parents)
            )
        if self.proposer is not None and self.num_taken == len(token_ids):
            drafts.append(self.proposer.propose(max_tokens))
        return drafts
