"""Beam search: expands the best beams until no live beam can beat the finished ones.

Owns the beams of one request, their tokens and the finished sequences. Works on logprobs as
numbers, without blocks or arrays; its results specify the parent of each new beam (`Branch`).
Scores, order and termination equal those of `generate(num_beams=...)` of Hugging Face transformers;
scores are normalized by length ** length_penalty, the simplest form of Wu et al. 2016.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.outputs import BeamOutput
from octavo.engine.protocol.step import ResultKind, RowResult, TokenLogprobs
from octavo.engine.requests.sequence_state import Branch, Finish, RequestProgress, SequenceState
from octavo.engine.requests.stop_strings import TokenizedStops


class Beam(SequenceState):
    """A live sequence of the search."""

    __slots__ = ("cumulative_logprob", "logprobs")

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        num_computed_tokens: int,
        cumulative_logprob: float,
        logprobs: list[TokenLogprobs],
    ) -> None:
        super().__init__(request_id, token_ids, num_computed_tokens)
        self.cumulative_logprob = cumulative_logprob
        self.logprobs = logprobs


@dataclass(frozen=True, slots=True)
class Continuation:
    """A row continued by one more token."""

    row: SequenceState
    token_id: int
    cumulative_logprob: float
    rank: int
    """Index of the token among the row's top alternatives."""


class Width(NamedTuple):
    """Number of `beams`, and number of continuations to consider so that enough remain if some
    finish.
    """

    beams: int
    num_candidates: int


class BeamSearch:
    """Beam search of one request; consumes the results of its rows.

    After a preemption, the search restarts from its trunk, the common prefix of all beams: the
    trunk is computed first, then the beams branch off again.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        num_prompt_tokens: int,
        max_num_tokens: int,
        stop_texts: TokenizedStops | None = None,
        has_grammar: bool = False,
    ) -> None:
        assert params.beam_width is not None
        self.beams: list[Beam] = []
        self.is_done = False
        self._request_id = request_id
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        self._end_token_ids = self._eos_token_ids | frozenset(params.stop_token_ids or ())
        self._num_prompt_tokens = num_prompt_tokens
        self._max_output_tokens = max_num_tokens - num_prompt_tokens
        self._stop_texts = stop_texts
        self._has_grammar = has_grammar
        self._width = Width(
            params.beam_width, max(2, 1 + len(self._end_token_ids)) * params.beam_width
        )
        self._folded: list[Beam] = []
        self._row_results: dict[str, RowResult] = {}
        self._found: list[BeamOutput] = []
        self._num_names = 0
        self.row_params = self._row_params()
        """Parameters of each row on the worker: only its top logprobs matter, not the sampled
        token.
        """

    result_kind: ResultKind = ResultKind.SAMPLE
    reads_logprobs = True
    may_draft = False
    may_branch = False
    samples_sequentially = False
    needs_last_token = "a beam search: which beams go on is decided by what they yield"

    @property
    def num_seqs(self) -> int:
        """Maximum number of live beams."""
        return self._width.beams

    def set_max_num_tokens(self, max_num_tokens: int) -> None:
        """Raises an error: earlier pruning depended on the old maximum length."""
        raise AssertionError("the frontend does not change the length of a beam search")

    def num_multi_step_tokens(self, num_tokens: int) -> int:
        """Returns 1: the beams are selected after each step."""
        return 1

    def _row_params(self) -> SamplingParams:
        num_banned = len(self._end_token_ids) if self._params.min_tokens else 0
        num_logprobs = max(self._width.num_candidates + num_banned, self._params.logprobs or 0)
        return SamplingParams(
            temperature=0,
            max_tokens=None,
            logprobs=-1 if self._params.logprobs == -1 else num_logprobs,
        )

    # -- a step of the search ----------------------------------------------------------------------

    def process_result(
        self, request: SequenceState, row: SequenceState, result: RowResult
    ) -> RequestProgress | None:
        """Processes one row's result. After the last row, the next beams branch off or the search
        ends. Returns None until all rows have results.
        """
        rows: Sequence[SequenceState] = self.beams or (request,)
        self._row_results[row.request_id] = result
        if len(self._row_results) < len(rows):
            return None
        progress = RequestProgress(len(rows), replaced_rows=rows, branches=self._advance(rows))
        if self.is_done:
            progress.is_first = True
            progress.finish = self._finish()
            progress.beams = self._found[: self._params.n] or None
        return progress

    def _advance(self, rows: Sequence[SequenceState]) -> list[Branch]:
        """Returns the beams of the next step; [] if the search has finished."""
        row_results, self._row_results = self._row_results, {}
        if self._folded:
            return self._unfold(rows[0])
        num_output_tokens = rows[0].num_tokens + 1 - self._num_prompt_tokens
        running: list[Continuation] = []
        finished: list[BeamOutput] = []
        for rank, best in enumerate(self._candidates(rows, row_results)):
            end = self._get_finish(best, num_output_tokens)
            if end is None and len(running) < self.num_seqs:
                running.append(best)
            elif end is not None and rank < self.num_seqs:
                finished.append(self._output(best, end, row_results))
        self._found = sorted(self._found + finished, key=lambda output: -output.score)[
            : self.num_seqs
        ]
        self.is_done = not running or self._is_settled(
            running[0].cumulative_logprob, num_output_tokens
        )
        children = [] if self.is_done else self._children(running, row_results)
        self.beams = [beam for beam, _ in children]
        return [Branch(beam, parent_id) for beam, parent_id in children]

    def _finish(self) -> Finish:
        if not self._found:
            return Finish("error", error="the beam search found no token that could follow")
        return Finish(self._found[0].finish_reason)

    def _candidates(
        self, rows: Sequence[SequenceState], row_results: dict[str, RowResult]
    ) -> list[Continuation]:
        """Returns the best continuations of all rows, best first."""
        every = [
            Continuation(row, token_id, _cumulative(row) + logprob, alternative)
            for row in rows
            for alternative, token_id, logprob in self._allowed(row, row_results[row.request_id])
        ]
        return heapq.nlargest(
            self._width.num_candidates, every, key=lambda best: best.cumulative_logprob
        )

    def _allowed(self, row: SequenceState, result: RowResult) -> list[tuple[int, int, float]]:
        """Returns the allowed continuations of one row: (index, token, logprob). Before min_tokens,
        end tokens are excluded unless a grammar allows no other token.
        """
        num_output_tokens = row.num_tokens - self._num_prompt_tokens
        continuations = [
            (index, token_id, logprob)
            for index, (token_id, logprob) in enumerate(_alternatives(result))
            if logprob > -math.inf
        ]
        if num_output_tokens >= self._params.min_tokens:
            return continuations
        others = [one for one in continuations if one[1] not in self._end_token_ids]
        return continuations if self._has_grammar and not others else others

    def _get_finish(self, best: Continuation, num_output_tokens: int) -> Finish | None:
        if best.token_id in self._end_token_ids:
            return Finish("stop", None if best.token_id in self._eos_token_ids else best.token_id)
        if self._stop_texts is not None and num_output_tokens > self._params.min_tokens:
            text = self._stop_texts.ended_by(
                best.row.token_ids[self._num_prompt_tokens :], best.token_id
            )
            if text is not None:
                return Finish("stop", text)
        return Finish("length") if num_output_tokens >= self._max_output_tokens else None

    def _is_settled(self, best_running: float, num_output_tokens: int) -> bool:
        """Returns whether no live beam is expected to beat the worst finished sequence."""
        if len(self._found) < self.num_seqs:
            return False
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if early is True or self.num_seqs == 1:
            return True
        length = self._max_output_tokens if early == "never" and penalty > 0 else num_output_tokens
        return best_running / math.pow(length, penalty) <= self._found[-1].score

    def _output(
        self, best: Continuation, end: Finish, row_results: dict[str, RowResult]
    ) -> BeamOutput:
        token_ids = [*best.row.token_ids[self._num_prompt_tokens :], best.token_id]
        score = best.cumulative_logprob / math.pow(len(token_ids), self._params.length_penalty)
        return BeamOutput(
            token_ids,
            best.cumulative_logprob,
            score,
            end.reason,
            end.stop_reason,
            self._logprobs(best, row_results),
        )

    def _logprobs(
        self, best: Continuation, row_results: dict[str, RowResult]
    ) -> list[TokenLogprobs]:
        if self._params.logprobs is None:
            return []
        before = best.row.logprobs if isinstance(best.row, Beam) else []
        return [
            *before,
            _get_chosen_logprobs(
                row_results[best.row.request_id], best.rank, self._params.logprobs
            ),
        ]

    # -- beams -------------------------------------------------------------------------------------

    def _children(
        self, running: Sequence[Continuation], row_results: dict[str, RowResult]
    ) -> list[tuple[Beam, str]]:
        """Returns the next beams, each with the id of its parent. The first child of a beam
        replaces it, and keeps its worker row if that row sampled the same token.
        """
        heirs: set[str] = set()
        children = []
        for best in running:
            row, parent_id = best.row, best.row.request_id
            inherits = isinstance(row, Beam) and parent_id not in heirs
            name = parent_id if inherits else self._new_name()
            heirs.add(parent_id)
            logprobs = self._logprobs(best, row_results)
            beam = Beam(
                name,
                [*row.token_ids, best.token_id],
                row.num_tokens,
                best.cumulative_logprob,
                logprobs,
            )
            beam.is_on_worker = (
                inherits
                and row.is_on_worker
                and row_results[parent_id].token_ids == [best.token_id]
            )
            children.append((beam, parent_id))
        return children

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self._request_id}/{self._num_names}"

    def restart(self, trunk: list[int]) -> list[int]:
        """Reduces the beams to their common prefix, which is returned and computed first. Returns
        `trunk` if there are no beams.
        """
        self._row_results.clear()
        if not self.beams:
            return trunk
        self._folded, self.beams = self.beams, []
        first, last = (
            min(beam.token_ids for beam in self._folded),
            max(beam.token_ids for beam in self._folded),
        )
        length = next(
            (index for index, (a, b) in enumerate(zip(first, last, strict=True)) if a != b),
            len(first) - 1,
        )
        return first[:length]

    def _unfold(self, trunk: SequenceState) -> list[Branch]:
        self.beams, self._folded = self._folded, []
        for beam in self.beams:
            beam.num_computed_tokens, beam.is_on_worker = trunk.num_tokens, False
        return [Branch(beam, trunk.request_id) for beam in self.beams]


def _cumulative(row: SequenceState) -> float:
    return row.cumulative_logprob if isinstance(row, Beam) else 0.0


def _entry(result: RowResult) -> TokenLogprobs:
    """Returns the row's logprobs: the sampled token first, then the top alternatives."""
    assert result.logprobs is not None
    return result.logprobs[0]


def _alternatives(result: RowResult) -> list[tuple[int, float]]:
    entry = _entry(result)
    return list(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True))


def _get_chosen_logprobs(result: RowResult, index: int, num_logprobs: int) -> TokenLogprobs:
    """Returns logprobs as if the candidate at `index` had been sampled, with `num_logprobs`
    alternatives (-1: all).
    """
    entry, alternatives = (
        _entry(result),
        range(1, len(_entry(result).token_ids) if num_logprobs == -1 else 1 + num_logprobs),
    )
    # A grammar may allow fewer tokens than requested.
    order = [index + 1, *(i for i in alternatives if entry.logprobs[i] > -math.inf)]
    return TokenLogprobs(
        [entry.token_ids[i] for i in order],
        [entry.logprobs[i] for i in order],
        [entry.ranks[i] for i in order],
    )
