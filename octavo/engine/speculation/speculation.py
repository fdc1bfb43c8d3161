"""The guesses of an engine's steps: asks drafters for them and a policy which are verified, and
notes what became of each.

Called once for each step that is composed; with a step in flight nothing is guessed. A guess is
verified by drawing after it what would be drawn without it, so that none of this changes a token.
Reads no clock: what steps cost is an argument. Source: speculative decoding (Leviathan et al.
2023), with fixed guesses, for which keeping equal draws is the best of all rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.protocol.draft_tree import DraftTree
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.engine.requests.request import Request
from octavo.engine.requests.result_consumer import ResultConsumer
from octavo.engine.requests.token_row import TokenRow
from octavo.engine.scheduler.step_builder import StepBuilder
from octavo.engine.speculation.acceptance import Acceptance
from octavo.engine.speculation.drafter import (
    GIVEN_MATCH,
    NO_DRAFT,
    Draft,
    Drafter,
    GivenDraft,
)
from octavo.engine.speculation.earlier import EarlierAnswers
from octavo.engine.speculation.guess import row_draft_of
from octavo.engine.speculation.ngram import NgramDrafter
from octavo.engine.speculation.policy import NO_STEP, PlainStep, RowDraft
from octavo.engine.speculation.row_history import RowHistory
from octavo.engine.speculation.suffix import SuffixDrafter
from octavo.engine.speculation.throughput import LIKELY, ThroughputPolicy

SpecMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar", "auto"]
"""Ways to guess. Once options are derived, "auto" is "suffix" together with "mtp"."""

DRAFTERS: Mapping[SpecMethod, Callable[[], Drafter] | None] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "draft_model": None,
    "eagle3": None,
    "mtp": None,
    "grammar": None,
    "auto": SuffixDrafter,
}
"""Makers of a row's drafter, by method; None where only the worker guesses. It guesses what a
grammar leaves no choice of with every method.
"""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How guesses are made."""

    method: SpecMethod
    max_tokens: int
    """Most tokens of one row's guess, on each of its paths."""
    redraws: bool = True
    """Whether the backend can draw a row again, which rows that are drawn in turn need."""
    history_bytes: int = 0
    """Memory for answers of requests that have ended, in which others look up theirs; 0: none."""
    tree_width: int = 1
    """Most paths of one row's guess."""


ASKING: frozenset[SpecMethod] = frozenset({"draft_model", "eagle3", "mtp", "auto"})
"""Methods whose guesses the worker makes with a Program."""
MOST_WATCHED = 4
"""Most rows whose guesses are looked at between the decode steps of one call."""
BLIND_PLANS = 16
"""Plans in which no call ends for a guess, after one that ended and the guess was not verified."""
LEAST_CHANCE = 0.02
"""Chance below which a guess is not weighed: even free it would not be verified."""
MIN_FOLLOWED = 256
"""Tokens that drafters take in during a step of fewer, so that a prompt found in the prefix cache
holds no step up.
"""


class Speculating(Protocol):
    """Guesses, as the step planner and the result intake ask for them."""

    is_active: bool
    """Whether anything can be guessed: grammars alone leave no choice until a running request has
    come to such a place.
    """

    def add_drafts(self, builder: StepBuilder) -> bool:
        """Adds to a step the guesses that are worth verifying; returns whether the step must be
        one of its own.
        """
        ...

    def is_tempted(self, owners: Sequence[tuple[Request, TokenRow]]) -> bool:
        """Returns whether a plan of several decode steps should end behind the last one."""
        ...

    def took(self, scheduled: ScheduledRequest, result: RowResult, num_taken: int) -> int:
        """Notes what became of a row's guess, whose request took `num_taken` of the drawn tokens;
        returns how many of these were guessed.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drops what is known of a request that has ended."""
        ...


class NoSpeculation:
    """Guesses nothing. Implements `Speculating`."""

    is_active = False

    def add_drafts(self, builder: StepBuilder) -> bool:
        return False

    def is_tempted(self, owners: Sequence[tuple[Request, TokenRow]]) -> bool:
        return False

    def took(self, scheduled: ScheduledRequest, result: RowResult, num_taken: int) -> int:
        return 0

    def forget(self, request: Request) -> None:
        """Does nothing: nothing is known."""


class Speculation:
    """The guesses of one engine, of one drafter for each row. Implements `Speculating`."""

    def __init__(
        self,
        blocks: BlockManager,
        stats: EngineStats,
        drafting: Drafting,
        policy: ThroughputPolicy | None = None,
    ) -> None:
        """Takes the policy that chooses among guesses; None: the one for most tokens a second."""
        self._blocks = blocks
        self._stats = stats
        self._policy = policy or ThroughputPolicy()
        self._max_tokens = drafting.max_tokens
        self._redraws = drafting.redraws
        self._num_paths = drafting.tree_width if blocks.can_branch else 1
        self._make_drafter = _drafter_maker(drafting.method, self._num_paths)
        self._asks = drafting.method in ASKING
        """Whether the worker is asked for guesses, a step before they are verified."""
        self._is_given = drafting.method == "grammar"
        """Whether all guesses come of forms, with the results of steps."""
        self.is_active = not self._is_given
        self._earlier = EarlierAnswers(drafting.history_bytes) if drafting.history_bytes else None
        self._rows: dict[str, RowHistory] = {}
        self._acceptance = Acceptance()
        self._plain = NO_STEP
        self._has_ended_call = False
        """Whether the last call of several decode steps ended for a guess."""
        self._num_blind = 0
        """Plans that are still made before a call may end for a guess again."""

    # -- a step is composed ------------------------------------------------------------------------

    def add_drafts(self, builder: StepBuilder) -> bool:
        """Adds to the step the guesses that are worth verifying, or asks the worker for some;
        returns whether there are any. Where a step is in flight, there are none.
        """
        if builder.runs_ahead or not self.is_active:
            return False
        self._plain = PlainStep.of(builder)
        drafts = self._proposed(builder)
        given, found = self._apart(drafts)
        askable = self._askable(builder) if self._asks else []
        if found:
            self._choose(found, builder)
        self._take_given(given, builder)
        is_added = any(draft.num_tokens for draft in drafts) and self._add(drafts, builder)
        self._num_blind = max(0, self._num_blind - 1)
        if self._has_ended_call and not is_added:
            self._num_blind = BLIND_PLANS
        self._has_ended_call = False
        return self._ask(askable, builder) or is_added

    def _apart(self, drafts: list[RowDraft]) -> tuple[list[RowDraft], list[RowDraft]]:
        """Splits guesses: those of a Program, which was asked for them, and all others."""
        if not self._asks:
            return [], drafts
        is_given = [draft.num_matched == GIVEN_MATCH for draft in drafts]
        return (
            [draft for draft, given in zip(drafts, is_given, strict=True) if given],
            [draft for draft, given in zip(drafts, is_given, strict=True) if not given],
        )

    def _take_given(self, drafts: list[RowDraft], builder: StepBuilder) -> None:
        """Sets how much is verified of what the worker has guessed: as many tokens as it was asked
        for, the likeliest of its tree. They are paid for already.
        """
        for draft in drafts[: builder.budget]:
            num_asked = len(DraftTree.of(len(draft.token_ids), draft.parents).paths[0])
            draft.num_tokens = min(num_asked, builder.budget // len(drafts))

    def _ask(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Has the worker guess for the next step where that is worth it; returns whether it is."""
        if not drafts or not self._choose(drafts, builder):
            return False
        counts = {draft.index: draft.num_tokens for draft in drafts if draft.num_tokens}
        for index, count in counts.items():
            builder.rows[index].propose = count
        # The worker guesses as far as there are blocks, with these or without them.
        self._reserve(counts, builder)
        return True

    def _askable(self, builder: StepBuilder) -> list[RowDraft]:
        """Returns the rows that the worker could guess for, as if their guesses were there."""
        found = []
        for index, (scheduled, (request, row)) in enumerate(
            zip(builder.rows, builder.owners, strict=True)
        ):
            most = min(self._max_tokens, request.num_guessable_tokens - row.num_tokens - 1)
            if most > 0 and self._may_draft(request.consumer) and _goes_on(scheduled, request):
                draft = Draft([0] * most, GIVEN_MATCH)
                found.append(self._row_draft(index, row, [draft], most))
        return found

    def _add(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Adds chosen guesses to the step; returns whether there are blocks for them."""
        chosen = [draft for draft in drafts if draft.num_tokens]
        if not self._reserve({draft.index: draft.longest for draft in chosen}, builder):
            return False
        for draft in chosen:
            self._add_one(draft, builder)
        self._stats.num_drafts += len(chosen)
        self._stats.num_draft_tokens += sum(draft.num_tokens for draft in chosen)
        return True

    def _add_one(self, draft: RowDraft, builder: StepBuilder) -> None:
        """Adds a guess for which its row has blocks; where it branches and no blocks are free for
        its other paths, its first path.
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

    def _proposed(self, builder: StepBuilder) -> list[RowDraft]:
        """Returns what the rows' drafters guess, as far as the rows may go.

        Drafters take in about as many tokens as the step computes: those of a prompt come with it.
        """
        found = []
        num_left = max(MIN_FOLLOWED, sum(row.num_tokens for row in builder.rows))
        for index, (scheduled, (request, row)) in enumerate(
            zip(builder.rows, builder.owners, strict=True)
        ):
            if not self._may_draft(request.consumer):
                continue
            history = self._history_of(row)
            if history is None:
                continue
            num_left = max(0, num_left - history.follow(row.token_ids, num_left))
            most = min(self._max_tokens, request.num_guessable_tokens - row.num_tokens)
            first = scheduled.start + scheduled.num_tokens
            end = self._blocks.names.step_end(row.request_id, scheduled.start, first + max(0, most))
            most = end - first
            if most < 1 or not _goes_on(scheduled, request):
                continue
            drafts = self._ranked_drafts(history, request, row, most)
            if drafts:
                found.append(
                    self._row_draft(
                        index, row, drafts, most, may_branch=request.consumer.may_branch
                    )
                )
        return found

    def _row_draft(
        self,
        index: int,
        row: TokenRow,
        drafts: Sequence[Draft],
        most: int,
        *,
        may_branch: bool = False,
    ) -> RowDraft:
        return row_draft_of(
            self._acceptance,
            row.request_id,
            index,
            drafts,
            most=most,
            most_leaves=self._num_paths if may_branch else 1,
        )

    def _ranked_drafts(
        self, history: RowHistory, request: Request, row: TokenRow, most: int
    ) -> list[Draft]:
        """Returns the guesses of what follows a row, the one that is likeliest to hold first."""
        found = history.propose(row.token_ids, most)
        if self._earlier is not None and row.num_tokens > request.num_prompt_tokens:
            found.append(self._earlier.propose(request.source, row.token_ids, most))
        chances = [
            (self._acceptance.chance(row.request_id, draft.num_matched), draft)
            for draft in found
            if draft.token_ids
        ]
        weighed = [pair for pair in chances if pair[0] >= LEAST_CHANCE]
        return [draft for _, draft in sorted(weighed, key=lambda pair: -pair[0])]

    def _may_draft(self, consumer: ResultConsumer) -> bool:
        return consumer.may_draft and (self._redraws or not consumer.draws_in_turn)

    def _history_of(self, row: TokenRow) -> RowHistory | None:
        """Returns what is known of a row; None where only the worker guesses, and has not yet."""
        found = self._rows.get(row.request_id)
        if found is None and not self._is_given:
            drafter = None if self._make_drafter is None else self._make_drafter()
            found = self._rows[row.request_id] = RowHistory(drafter)
        return found

    def _choose(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Sets how many tokens of each guess are verified; returns whether any are."""
        counts = self._policy.num_drafts(drafts, self._plain, builder.budget)
        for draft, count in zip(drafts, counts, strict=True):
            draft.num_tokens = count
        return any(counts)

    def _reserve(self, counts: Mapping[int, int], builder: StepBuilder) -> bool:
        """Grants the blocks for more tokens of rows, `counts` by a row's index in the step, or none
        where they are not free: no request is preempted for a guess.
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

    def is_tempted(self, owners: Sequence[tuple[Request, TokenRow]]) -> bool:
        """Returns whether a plan of several decode steps should end behind the last one taken in: a
        guess that is likely to hold follows from its tokens, and verifying it promises more than
        the next plain step.
        """
        if self._make_drafter is None or self._num_blind or len(owners) > MOST_WATCHED:
            return False
        drafts = []
        for index, (request, row) in enumerate(owners):
            history = self._rows.get(row.request_id)
            if history is None or history.drafter is None or not history.is_current:
                continue
            history.follow(row.token_ids, 1)
            most = min(self._max_tokens, request.num_guessable_tokens - row.num_tokens)
            draft = history.drafter.propose(most) if most > 0 else NO_DRAFT
            chance = self._acceptance.chance(row.request_id, draft.num_matched)
            if draft.token_ids and chance >= LIKELY:
                drafts.append(self._row_draft(index, row, [draft], most))
        self._has_ended_call = bool(drafts) and self._policy.promises(drafts, self._plain)
        return self._has_ended_call

    def took(self, scheduled: ScheduledRequest, result: RowResult, num_taken: int) -> int:
        """Notes what became of a row's guess, whose request took `num_taken` of the drawn tokens:
        the others lie behind its end. Returns how many of these were guessed.
        """
        if not self.is_active and (scheduled.search_of or not result.draft_ids):
            return 0
        num_held = min(self._took(scheduled, result), num_taken)
        self._stats.num_accepted_tokens += num_held
        self._policy.took(len(result.token_ids), num_held, self._plain)
        return num_held

    def _took(self, scheduled: ScheduledRequest, result: RowResult) -> int:
        history = self._rows.get(scheduled.request_id)
        num_known = scheduled.num_tokens - len(scheduled.draft_ids)
        if result.draft_ids and history is None and self._is_given and not scheduled.search_of:
            history = self._rows[scheduled.request_id] = RowHistory(None)
            self.is_active = True
        if result.draft_ids and history is not None:
            num_tokens = scheduled.start + num_known + len(result.token_ids)
            history.given = GivenDraft(num_tokens, result.draft_ids, result.draft_parents)
        if not scheduled.draft_ids or history is None or result.failure is not None:
            return 0
        num_held = max(0, result.num_kept - num_known)
        if scheduled.draft_parents:
            self._took_tree(scheduled, result.token_ids, history.num_matched)
        else:
            self._acceptance.took(
                scheduled.request_id, history.num_matched, len(scheduled.draft_ids), num_held
            )
        return num_held

    def _took_tree(
        self, scheduled: ScheduledRequest, drawn: Sequence[int], num_matched: int
    ) -> None:
        """Notes what became of a guess that branches: of its first path as of a chain, and of the
        tokens beside others where none of these was drawn.
        """
        token_ids = scheduled.draft_ids
        tree = DraftTree.of(len(token_ids), scheduled.draft_parents)
        held = tree.held(token_ids, drawn)
        spine = tree.paths[0]
        num_spine = next(
            (at for at, (one, other) in enumerate(zip(held, spine, strict=False)) if one != other),
            min(len(held), len(spine)),
        )
        self._acceptance.took(scheduled.request_id, num_matched, len(spine), num_spine)
        for token_id, parent in zip(drawn, [-1, *held], strict=False):
            for rank, token in enumerate(tree.children.get(parent, ())[1:]):
                first = tree.children[parent][: rank + 1]
                if any(token_ids[earlier] == token_id for earlier in first):
                    break
                self._acceptance.took_runner_up(
                    scheduled.request_id, rank, held=token_ids[token] == token_id
                )

    def forget(self, request: Request) -> None:
        """Drops what is known of a request that has ended; its answer may help others."""
        self._rows.pop(request.request_id, None)
        self.is_active = bool(self._rows) or not self._is_given
        self._acceptance.forget(request.request_id)
        if self._earlier is not None and request.consumer.may_draft:
            self._earlier.add(request.source, request.token_ids)


def _drafter_maker(method: SpecMethod, num_paths: int) -> Callable[[], Drafter] | None:
    """Returns what makes a row's drafter, of up to `num_paths` paths; None: only workers guess."""
    make = DRAFTERS[method]
    return partial(SuffixDrafter, num_paths=num_paths) if make is SuffixDrafter else make


def _goes_on(scheduled: ScheduledRequest, request: Request) -> bool:
    """Returns whether a row draws after tokens that it has generated: the last one, or a few that
    its grammar left no choice of.
    """
    return (
        scheduled.wants == "draw"
        and (scheduled.num_tokens == 1 or scheduled.start >= request.num_prompt_tokens)
        and not scheduled.from_device
        and not scheduled.search_of
    )
