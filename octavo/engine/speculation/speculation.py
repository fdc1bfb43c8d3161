"""Which guesses a step verifies: those that raise the tokens it is expected to yield by more than
the time that they take.

Called once for each step that is composed, with nothing in flight. A guess is verified by drawing
after it what would be drawn without it, so that none of this changes a token. Reads no clock: what
steps cost is an argument. Source: speculative decoding (Leviathan et al. 2023), with fixed guesses,
for which keeping equal draws is the best of all rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.requests.request import Request
from octavo.engine.requests.result_consumer import ResultConsumer
from octavo.engine.requests.token_row import TokenRow
from octavo.engine.scheduling.step_builder import StepBuilder
from octavo.engine.speculation.acceptance import Acceptance
from octavo.engine.speculation.credit import Credit
from octavo.engine.speculation.drafter import (
    GIVEN_MATCH,
    NO_DRAFT,
    NOTHING_GIVEN,
    Draft,
    Drafter,
    GivenDraft,
)
from octavo.engine.speculation.earlier import EarlierAnswers
from octavo.engine.speculation.ngram import NgramDrafter
from octavo.engine.speculation.step_price import StepPrice, priced_counts
from octavo.engine.speculation.suffix import SuffixDrafter
from octavo.engine.stats import EngineStats
from octavo.engine.step_costs import UNMEASURED
from octavo.step import RowResult, ScheduledRow

SpecMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar"]

DRAFTERS: Mapping[SpecMethod, Callable[[], Drafter] | None] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "draft_model": None,
    "eagle3": None,
    "mtp": None,
    "grammar": None,
}
"""Makers of a row's drafter, by method; None where only the worker guesses. It guesses what a
grammar leaves no choice of with every method.
"""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How guesses are made."""

    method: SpecMethod
    max_tokens: int
    """Most tokens of one row's guess."""
    redraws: bool = True
    """Whether the backend can draw a row again, which rows that are drawn in turn need."""
    history_bytes: int = 0
    """Memory for answers of requests that have ended, in which others look up theirs; 0: none."""


ASKING: frozenset[SpecMethod] = frozenset({"draft_model", "eagle3", "mtp"})
"""Methods whose guesses the worker makes with a Program."""
LEAST_GAIN = 1.1
"""How many times the tokens of a plain step in the same time a step with guesses must promise."""
RETRY_AFTER = 64
"""Steps without a guess, though one was likely to hold, after which one is tried: what a step costs
may have been measured in a bad moment.
"""
RETRY_UNLIKELY_AFTER = 1024
"""The same where none was likely to hold: what failed in earlier texts may hold in this one."""
CLEAR_GAIN = 1.5
"""Gain above which no noise in the plain step's time is feared."""
PLAIN_AFTER = 128
"""Steps with guesses of a smaller gain after which a plain one is measured again."""
LIKELY = 0.5
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


@dataclass(slots=True)
class RowDraft:
    """One row's guess in the step that is composed."""

    index: int
    """Index of the row in the step."""
    token_ids: list[int]
    num_matched: int
    reached: list[float]
    """Chance of each guessed token that it and those before it hold."""
    num_tokens: int = 0
    """Guessed tokens that the step verifies."""


class RankedToken(NamedTuple):
    """A guessed token among those of all rows."""

    chance: float
    """Chance that it is reached and holds."""
    place: int
    """Index of its guess."""


def _ranked(drafts: Sequence[RowDraft]) -> list[RankedToken]:
    """Returns the tokens of guesses, the likeliest first, and those of one guess in their order."""
    tokens = (
        (-chance, depth, place)
        for place, draft in enumerate(drafts)
        for depth, chance in enumerate(draft.reached)
    )
    return [RankedToken(-minus_chance, place) for minus_chance, _, place in sorted(tokens)]


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

    def charge_of(self, num_guessed: int) -> float:
        """Returns the charge for `num_guessed` tokens, in plain steps."""
        times_plain = self.price.of(num_guessed) / self.price.of(0)
        return Credit.charge_of(self.num_draws, num_guessed, times_plain)


class RowHistory:
    """Keeps one row's drafter, and the match that its last guess followed from."""

    __slots__ = ("drafter", "given", "is_current", "num_matched", "num_taken")

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.is_current = False
        """Whether the drafter knew all of the row's tokens when the last step was composed."""
        self.given = NOTHING_GIVEN
        self.num_taken = 0
        self.num_matched = 0

    def follow(self, token_ids: list[int], most: int) -> int:
        """Has the drafter take in the row's next tokens, at most `most`, or all that a row has
        drawn since it was last known whole; returns how many.
        """
        num_more = len(token_ids) - self.num_taken
        if not self.is_current:
            num_more = min(most, num_more)
        if self.drafter is not None and num_more > 0:
            self.drafter.took(token_ids[self.num_taken : self.num_taken + num_more])
            self.num_taken += num_more
        self.is_current = self.num_taken == len(token_ids)
        return max(0, num_more)

    def propose(self, token_ids: list[int], most: int) -> list[Draft]:
        """Returns the guess that the worker gave of what comes now, and the drafter's, which has
        none while it does not know all of the row's tokens.
        """
        found = []
        if self.given.num_tokens == len(token_ids):
            found.append(Draft(self.given.token_ids[:most], GIVEN_MATCH))
        if self.drafter is not None and self.num_taken == len(token_ids):
            found.append(self.drafter.propose(most))
        return found


class Speculation:
    """The guesses of one engine, of one drafter for each row."""

    def __init__(self, blocks: BlockManager, stats: EngineStats, drafting: Drafting) -> None:
        self._blocks = blocks
        self._stats = stats
        self._make_drafter = DRAFTERS[drafting.method]
        self._max_tokens = drafting.max_tokens
        self._redraws = drafting.redraws
        self._asks = drafting.method in ASKING
        """Whether the worker is asked for guesses, a step before they are verified."""
        self._earlier = EarlierAnswers(drafting.history_bytes) if drafting.history_bytes else None
        self._rows: dict[str, RowHistory] = {}
        self._acceptance = Acceptance()
        self._num_declined = 0
        """Steps in which a guess was not worth its time, since one was last tried; those in which
        one was likely to hold count more.
        """
        self._num_doubtful = 0
        """Steps with guesses of no clear gain, since a plain one was last measured."""
        self._credit = Credit()
        self._plain = PlainStep(StepPrice(UNMEASURED, 1, 0), 1)
        self._has_ended_call = False
        """Whether the last call of several decode steps ended for a guess."""
        self._num_blind = 0
        """Plans that are still made before a call may end for a guess again."""

    # -- a step is composed ------------------------------------------------------------------------

    def add_drafts(self, builder: StepBuilder) -> bool:
        """Adds to the step the guesses that are worth verifying; returns whether there are any."""
        self._plain = PlainStep.of(builder)
        drafts = self._proposed(builder)
        if self._asks:
            return self._ask_and_verify(drafts, builder)
        is_added = bool(drafts) and self._choose(drafts, builder) and self._add(drafts, builder)
        self._num_blind = max(0, self._num_blind - 1)
        if self._has_ended_call and not is_added:
            self._num_blind = BLIND_PLANS
        self._has_ended_call = False
        return is_added

    def _ask_and_verify(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Has the worker guess for the next step where that is worth it; verifies what it has
        guessed already.
        """
        asked = self._askable(builder)
        if not asked or not self._choose(asked, builder):
            asked = []
        for draft in drafts[: builder.budget]:
            draft.num_tokens = min(len(draft.token_ids), builder.budget // len(drafts))
        is_added = bool(drafts) and self._add(drafts, builder)
        asked = [draft for draft in asked if draft.num_tokens]
        for draft in asked:
            builder.rows[draft.index].propose = draft.num_tokens
        # The worker guesses as far as there are blocks, with these or without them.
        self._reserve(asked, builder)
        return is_added or bool(asked)

    def _askable(self, builder: StepBuilder) -> list[RowDraft]:
        """Returns the rows that the worker could guess for, as if their guesses were there."""
        found = []
        for index, (scheduled, (request, row)) in enumerate(
            zip(builder.rows, builder.owners, strict=True)
        ):
            most = min(self._max_tokens, request.num_guessable_tokens - row.num_tokens - 1)
            if most > 0 and self._may_draft(request.consumer) and _goes_on(scheduled, request):
                found.append(self._row_draft(index, row, Draft([0] * most, GIVEN_MATCH)))
        return found

    def _add(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Adds chosen guesses to the step; returns whether there are blocks for them."""
        chosen = [draft for draft in drafts if draft.num_tokens]
        if not self._reserve(chosen, builder):
            return False
        for draft in chosen:
            token_ids = draft.token_ids[: draft.num_tokens]
            builder.add_draft(draft.index, token_ids)
            self._rows[builder.rows[draft.index].request_id].num_matched = draft.num_matched
        self._stats.num_drafts += len(chosen)
        self._stats.num_draft_tokens += sum(draft.num_tokens for draft in chosen)
        return True

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
            num_left = max(0, num_left - history.follow(row.token_ids, num_left))
            most = min(self._max_tokens, request.num_guessable_tokens - row.num_tokens)
            first = scheduled.start + scheduled.num_tokens
            end = self._blocks.step_end(row.request_id, scheduled.start, first + max(0, most))
            most = end - first
            if most < 1 or not _goes_on(scheduled, request):
                continue
            chance, draft = self._best(history, request, row, most)
            if draft.token_ids and chance >= LEAST_CHANCE:
                found.append(self._row_draft(index, row, draft))
        return found

    def _row_draft(self, index: int, row: TokenRow, draft: Draft) -> RowDraft:
        num_tokens = len(draft.token_ids)
        reached = self._acceptance.reached(row.request_id, draft.num_matched, num_tokens)
        return RowDraft(index, draft.token_ids, draft.num_matched, reached)

    def _best(
        self, history: RowHistory, request: Request, row: TokenRow, most: int
    ) -> tuple[float, Draft]:
        """Returns the guess that is likeliest to hold, and its chance."""
        found = history.propose(row.token_ids, most)
        if self._earlier is not None and row.num_tokens > request.num_prompt_tokens:
            found.append(self._earlier.propose(request.source, row.token_ids, most))
        chances = [
            (
                self._acceptance.chance(row.request_id, draft.num_matched),
                Draft(draft.token_ids[:most], draft.num_matched),
            )
            for draft in found
            if draft.token_ids
        ]
        return max(chances, key=lambda each: each[0], default=(0.0, NO_DRAFT))

    def _may_draft(self, consumer: ResultConsumer) -> bool:
        return consumer.may_draft and (self._redraws or not consumer.draws_in_turn)

    def _history_of(self, row: TokenRow) -> RowHistory:
        found = self._rows.get(row.request_id)
        if found is None:
            drafter = None if self._make_drafter is None else self._make_drafter()
            found = self._rows[row.request_id] = RowHistory(drafter)
        return found

    def _choose(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Sets how many tokens of each guess are verified; returns whether any are."""
        ranked = _ranked(drafts)[: builder.budget]
        best, gain = self._best_count(ranked)
        if not best or not self._is_worth(gain, ranked[0].chance):
            return False
        for token in ranked[:best]:
            drafts[token.place].num_tokens += 1
        self._credit.spend(self._plain.charge_of(best))
        return True

    def _best_count(self, ranked: Sequence[RankedToken]) -> tuple[int, float]:
        """Returns how many of the guessed tokens promise the most expected tokens per second, the
        best first, and how many times those of a plain step; 0 where no number can be afforded.
        """
        plain, best = self._plain, (0, 0.0)
        if not plain.is_known:
            return best
        gains = list(accumulate(token.chance for token in ranked))
        for num_guessed in priced_counts(len(ranked)):
            if not self._credit.affords(plain.charge_of(num_guessed)):
                break
            times_plain = plain.price.of(num_guessed) / plain.price.of(0)
            gain = (1 + gains[num_guessed - 1] / plain.num_draws) / times_plain
            best = max(best, (num_guessed, gain), key=lambda each: each[1])
        return best

    def _is_worth(self, gain: float, chance: float) -> bool:
        """Returns whether a step with guesses is computed, which yields `gain` times the tokens of
        a plain one in the same time, and whose best guess holds by a `chance`. Where that is in
        doubt, the other kind of step is measured now and then.
        """
        if gain > LEAST_GAIN:
            self._num_declined = 0
            self._num_doubtful = 0 if gain > CLEAR_GAIN else self._num_doubtful + 1
            if self._num_doubtful <= PLAIN_AFTER:
                return True
            self._num_doubtful = 0
            return False
        self._num_declined += RETRY_UNLIKELY_AFTER // RETRY_AFTER if chance > LIKELY else 1
        if self._num_declined <= RETRY_UNLIKELY_AFTER:
            return False
        self._num_declined = 0
        return True

    def _reserve(self, drafts: list[RowDraft], builder: StepBuilder) -> bool:
        """Grants the blocks that the guesses take, or none where they are not free: no request is
        preempted for a guess.
        """
        ends = {}
        for draft in drafts:
            row = builder.rows[draft.index]
            ends[row.request_id] = row.start + row.num_tokens + draft.num_tokens
        grants = self._blocks.reserve(ends)
        if grants is None:
            return False
        builder.add_blocks(grants)
        return True

    # -- results -----------------------------------------------------------------------------------

    def is_tempted(
        self, owners: Sequence[tuple[Request, TokenRow]], results: Sequence[RowResult]
    ) -> bool:
        """Returns whether a call of several decode steps should end behind one, whose `results`
        are not taken in yet: a guess that is likely to hold follows from them, and verifying it
        promises more than the next plain step.
        """
        if self._make_drafter is None or self._num_blind or len(owners) > MOST_WATCHED:
            return False
        drafts = []
        for index, ((request, row), result) in enumerate(zip(owners, results, strict=True)):
            history = self._rows.get(row.request_id)
            if history is None or history.drafter is None or not history.is_current:
                continue
            history.drafter.took(result.token_ids)
            history.num_taken += len(result.token_ids)
            most = min(self._max_tokens, request.num_guessable_tokens - history.num_taken)
            draft = history.drafter.propose(most) if most > 0 else NO_DRAFT
            chance = self._acceptance.chance(row.request_id, draft.num_matched)
            if draft.token_ids and chance >= LIKELY:
                drafts.append(self._row_draft(index, row, draft))
        self._has_ended_call = bool(drafts) and self._best_count(_ranked(drafts))[1] > LEAST_GAIN
        return self._has_ended_call

    def took(self, scheduled: ScheduledRow, result: RowResult) -> int:
        """Notes what became of a row's guess; returns how many of its tokens held."""
        num_held = self._took(scheduled, result)
        num_draws = self._plain.num_draws
        self._credit.drew(len(result.token_ids) / num_draws, num_held / num_draws)
        return num_held

    def _took(self, scheduled: ScheduledRow, result: RowResult) -> int:
        history = self._rows.get(scheduled.request_id)
        if result.draft_ids and history is not None:
            num_known = scheduled.start + scheduled.num_tokens - len(scheduled.draft_ids)
            history.given = GivenDraft(num_known + len(result.token_ids), result.draft_ids)
        if not scheduled.draft_ids or history is None or result.failure is not None:
            return 0
        num_held = max(0, result.num_kept - (scheduled.num_tokens - len(scheduled.draft_ids)))
        self._stats.num_accepted_tokens += num_held
        self._acceptance.took(
            scheduled.request_id, history.num_matched, len(scheduled.draft_ids), num_held
        )
        return num_held

    def forget(self, request: Request) -> None:
        """Drops what is known of a request that has ended; its answer may help others."""
        self._rows.pop(request.request_id, None)
        self._acceptance.forget(request.request_id)
        if self._earlier is not None and request.consumer.may_draft:
            self._earlier.add(request.source, request.token_ids)


def _goes_on(scheduled: ScheduledRow, request: Request) -> bool:
    """Returns whether a row draws after tokens that it has generated: the last one, or a few that
    its grammar left no choice of.
    """
    return (
        scheduled.wants == "draw"
        and (scheduled.num_tokens == 1 or scheduled.start >= request.num_prompt_tokens)
        and not scheduled.from_device
        and not scheduled.search_of
    )
