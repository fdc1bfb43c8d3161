"""Turns a step's scheduled rows into one StepBatch, runs the Program over it, and returns each
row's result.

Knows rows and arrays; knows nothing of queues, blocks' owners or text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import (
    AsyncRunnable,
    CheckingRunnable,
    DecodingRunnable,
    JoiningRunnable,
    Runnable,
)
from octavo.backends.batch import (
    DecodeSteps,
    LastTokens,
    SampleResult,
    SamplingBatch,
    StepBatch,
    sampling_records,
)
from octavo.backends.kv import KvCache
from octavo.step import RowResult, ScheduledRow, TokenLogprobs
from octavo.worker.checked_draws import CheckedDraws, Texts
from octavo.worker.checked_shares import checked_shares
from octavo.worker.guessed_draws import StepRows, draws_of, kept_draws
from octavo.worker.logprobs_reader import LogprobsReader
from octavo.worker.prepared_step import LaunchedRows, Layout, PreparedStep
from octavo.worker.request_rows import RequestRows
from octavo.worker.sampling_rows import append_targets
from octavo.worker.stages.hand_over import HiddenReceiver
from octavo.worker.step_arrays import Spans, add_leaves, gather
from octavo.worker.step_media import StepMedia


class ModelRunner:
    """Runs steps of one Program over the KV of the requests that have a row."""

    def __init__(
        self,
        runnable: Runnable,
        kv: KvCache,
        rows: RequestRows,
        media: StepMedia | None = None,
        before: HiddenReceiver | None = None,
        *,
        in_one_part: bool = False,
    ) -> None:
        """Takes the images of its steps, where the Program reads any; `before` has the hidden
        states that the stage before has made, where there is one. With `in_one_part` each step is
        one run of the Program, as other engines count on that share its experts.
        """
        self.runnable = runnable
        self._media = media
        self._before = before
        self._asynchronous = runnable if isinstance(runnable, AsyncRunnable) else None
        self._checking = runnable if isinstance(runnable, CheckingRunnable) else None
        self._in_one_part = in_one_part
        self._kv = kv
        self._rows = rows

    def prepare(self, scheduled: Sequence[ScheduledRow], num_steps: int = 1) -> PreparedStep:
        """Gathers the arrays of the first of `num_steps` steps. Writes guesses behind the rows'
        known tokens and changes nothing else of them, so that a step may be prepared again.
        """
        self._rows.grammars.take_back()
        layout = self._layout(scheduled)
        if any(row.draft_ids for row in scheduled):
            chains = [[] if row.leaf_blocks else row.draft_ids for row in scheduled]
            self._rows.guess(layout.rows, layout.ends, chains)
            if not self._can_check(layout):
                layout = self._layout(scheduled, in_turn=False)
        checks = self._checks(layout)
        batch = self._batch(scheduled, layout, checks, num_steps)
        assert batch.sampling is not None
        return PreparedStep(scheduled, batch, layout, batch.sampling, checks)

    def shares(self, scheduled: Sequence[ScheduledRow]) -> list[Sequence[ScheduledRow]]:
        """Splits a step's rows where more of them are sampled than the backend has checked at once,
        and some have to be checked.
        """
        if self._in_one_part:
            return [scheduled]
        most = 0 if self._checking is None else self._checking.max_checked
        return checked_shares(scheduled, self._rows, most)

    def join(self) -> None:
        """Computes a step of no rows, whose experts compute those of other engines."""
        assert isinstance(self.runnable, JoiningRunnable), "other backends are refused"
        self.runnable.join(self._kv)

    def run(self, step: PreparedStep) -> list[RowResult]:
        """Computes a step; returns one result for each row, in order.

        The rows take in their sampled tokens only once the whole step has succeeded.
        """
        if step.checks is None:
            output = self.runnable.run(step.batch, self._kv)
        else:
            assert self._checking is not None
            output = self._checking.run_checked(step.batch, self._kv, step.checks)
        assert output.samples is not None
        return self._whole_results(step, output.samples)

    def launch(self, step: PreparedStep, *, all_known: bool = False) -> LaunchedRows:
        """Starts a step without waiting for it; `take_in` returns its results.

        The device keeps the tokens that it draws, for rows of the next step that are `from_device`.
        With `all_known` the tokens of these rows have come back already.
        """
        assert self._asynchronous is not None, "only what is asynchronous is launched"
        step.batch.last_tokens = _last_tokens(
            [] if all_known else step.scheduled,
            step.layout,
            num_samples=len(step.batch.sample_rows),
        )
        return LaunchedRows(step, self._asynchronous.launch(step.batch, self._kv))

    def take_in(self, launched: LaunchedRows) -> list[RowResult]:
        """Waits for a launched step and returns what `run` would.

        Steps are taken in in the order of their launches.
        """
        output = launched.computing.result()
        assert output.samples is not None
        return self._whole_results(launched.step, output.samples)

    def decode(self, step: PreparedStep, num_steps: int) -> Iterator[list[RowResult]]:
        """Computes up to `num_steps` decode steps, one each time the iterator is advanced; each
        row's drawn token is its next one. Yields what `run` would return.
        """
        assert isinstance(self.runnable, DecodingRunnable)
        layout, rows = step.layout, self._rows
        follows_tokens = rows.sampling.follows_tokens(layout.rows)
        end_ids, end_starts = rows.end_tokens(layout.rows)
        steps = DecodeSteps(num_steps, end_starts, end_ids, follows_tokens)
        for samples, is_last in self.runnable.decode(step.batch, self._kv, steps, step.checks):
            results = self._results(step, samples)
            layout.ends += 1
            layout.draw_ends += 1
            if is_last:
                self._append_forced(layout.rows, layout.ends, results)
            yield results
            if follows_tokens:
                rows.sampling.follow(step.sampling, layout.rows, rows.token_ids, layout.draw_ends)

    def can_decode(self, step: PreparedStep) -> bool:
        """Returns whether several decode steps may begin with this one: its rows need no mask that
        changes with their tokens.
        """
        if step.batch.given is not None or step.batch.limits is not None:
            return False
        grammars, checks = self._rows.grammars, step.checks
        return all(
            row not in grammars or (checks is not None and entry in checks)
            for entry, row in enumerate(step.layout.rows.tolist())
        )

    def _layout(self, scheduled: Sequence[ScheduledRow], *, in_turn: bool = True) -> Layout:
        """Orders a step's rows. Without `in_turn` the rows that can only be drawn in turn are drawn
        once, and none of their guesses holds.
        """
        rows = self._rows.indices(scheduled)
        step_rows = StepRows.of(scheduled)
        draws_once = [
            not in_turn and self._rows.sampling.draws_in_turn(row) for row in rows.tolist()
        ]
        draws, draw_ends, draw_places = draws_of(scheduled, step_rows, draws_once)
        return Layout(
            rows=rows,
            ends=step_rows.ends[: len(rows)],
            query_starts=step_rows.query_starts[: len(rows) + 1],
            step_rows=step_rows,
            draws=draws,
            draw_ends=draw_ends,
            draw_places=draw_places,
            targets=self._targets(scheduled, rows),
            listed=self._listed(draws, rows),
            max_num_tokens=[row.max_num_tokens or 0 for row in scheduled],
            searches=[row.search_of != "" for row in scheduled],
        )

    def _can_check(self, layout: Layout) -> bool:
        """Returns whether the backend can check draws once they are made, for as many sampled
        rows.
        """
        num_samples = len(layout.draws) + sum(last - first for _, first, last in layout.targets)
        num_samples += sum(len(ids) for _, ids in layout.listed)
        return self._checking is not None and num_samples <= self._checking.max_checked

    def _checks(self, layout: Layout) -> CheckedDraws | None:
        """Returns the draws that are checked once they are made."""
        if not self._can_check(layout):
            return None
        draws = np.array(layout.draws, np.intp)
        texts = Texts(
            self._rows.token_ids,
            layout.draw_ends,
            max_num_tokens=[layout.max_num_tokens[index] for index in layout.draws],
            searches=[layout.searches[index] for index in layout.draws],
        )
        return self._rows.sampling.checks(layout.rows[draws], texts)

    def _batch(
        self,
        scheduled: Sequence[ScheduledRow],
        layout: Layout,
        checks: CheckedDraws | None,
        num_steps: int,
    ) -> StepBatch:
        """Gathers the first of `num_steps` steps, with block tables that reach to the last."""
        step_rows = layout.step_rows
        owners = [leaf.index for leaf in step_rows.leaves]
        rows = np.concatenate([layout.rows, layout.rows[owners]]) if owners else layout.rows
        spans = Spans(rows, step_rows.ends, step_rows.query_starts)
        batch = gather(self._rows, spans, num_steps)
        if owners:
            add_leaves(batch, scheduled, step_rows)
        if self._media is not None:
            self._media.add(batch, spans)
        batch.sample_rows, batch.sampling = self._sampling(scheduled, layout, checks)
        if self._before is not None:
            batch.hidden = self._before.of(scheduled)
        return batch

    def _targets(
        self, scheduled: Sequence[ScheduledRow], rows: NDArray[np.intp]
    ) -> list[tuple[int, int, int]]:
        """Returns the tokens whose successor is in the prompt, for requests that want the prompt's
        logprobs.
        """
        found = []
        for index, row in enumerate(scheduled):
            if row.num_prompt_logprobs is not None:
                last = min(
                    row.start + row.num_tokens, self._rows.num_prompt_tokens[rows[index]] - 1
                )
                found.append((index, row.start, max(row.start, last)))
        return found

    def _listed(
        self, draws: list[int], rows: NDArray[np.intp]
    ) -> list[tuple[int, NDArray[np.int32]]]:
        """Returns the tokens whose logprobs the draws want, of those that name any."""
        sampling = self._rows.sampling
        found = ((at, sampling.listed(int(rows[index]))) for at, index in enumerate(draws))
        return [(at, ids) for at, ids in found if ids is not None]

    def _sampling(
        self, scheduled: Sequence[ScheduledRow], layout: Layout, checks: CheckedDraws | None
    ) -> tuple[NDArray[np.int32], SamplingBatch]:
        """Returns `sample_rows [S]` and how to draw: draws first, then as targets the prompt's own
        tokens, and those whose logprobs a draw wants.
        """
        draws = np.array(layout.draws, np.intp)
        sampling = self._rows.sampling.gather(
            layout.rows[draws], self._rows.token_ids, layout.draw_ends, checks
        )
        sample_rows = layout.draw_places
        if layout.targets:
            places = self._add_prompt_targets(scheduled, layout, sampling)
            sample_rows = np.concatenate([sample_rows, places])
        for draw, ids in layout.listed:
            # The same place is read once more for each of them.
            end = layout.draw_ends[draw]
            append_targets(
                sampling,
                sampling_records(len(ids), position=end, target_id=ids, num_logprobs=0),
            )
            place = layout.draw_places[draw]
            sample_rows = np.append(sample_rows, np.full(len(ids), place, np.int32))
        return sample_rows, sampling

    def _add_prompt_targets(
        self, scheduled: Sequence[ScheduledRow], layout: Layout, sampling: SamplingBatch
    ) -> NDArray[np.int32]:
        """Adds the prompt's own tokens as targets; returns their places in the step."""
        spans = [np.arange(first, last, dtype=np.int32) for _, first, last in layout.targets]
        token_ids = self._rows.token_ids
        target_ids = [
            token_ids[layout.rows[index], first + 1 : last + 1]
            for index, first, last in layout.targets
        ]
        positions = np.concatenate(spans)
        num_top = [
            self._rows.sampling.num_top(scheduled[index].num_prompt_logprobs or 0)
            for index, _, _ in layout.targets
        ]
        targets = sampling_records(
            len(positions),
            position=positions + 1,
            target_id=np.concatenate(target_ids),
            num_logprobs=np.repeat(num_top, [len(span) for span in spans]),
        )
        append_targets(sampling, targets)
        shifts = [layout.query_starts[index] - first for index, first, _ in layout.targets]
        return np.concatenate([span + shift for span, shift in zip(spans, shifts, strict=True)])

    def _whole_results(self, step: PreparedStep, samples: SampleResult) -> list[RowResult]:
        """Takes in the draws of a step, and the tokens that grammars leave no choice of."""
        results = self._results(step, samples)
        ends = step.layout.ends.copy()
        for index, row in enumerate(step.scheduled):
            num_known = row.num_tokens - len(row.draft_ids)
            ends[index] = row.start + num_known + len(results[index].token_ids)
        self._append_forced(step.layout.rows, ends, results)
        return results

    def _append_forced(
        self, rows: NDArray[np.intp], ends: NDArray[np.int32], results: Sequence[RowResult]
    ) -> None:
        """Adds to results the tokens behind them that grammars leave no choice of, where the rows
        are not too many. They are known like those of a prompt: the next step computes them as a
        chunk. A text behind them that several tokens may spell is a guess.
        """
        if self._checking is not None and len(rows) > self._checking.most_extended:
            return
        for row, end, result in zip(rows.tolist(), ends.tolist(), results, strict=True):
            if row in self._rows.grammars and result.token_ids and result.failure is None:
                result.token_ids += self._rows.append_forced(row, end)
                result.draft_ids = self._rows.guess_forced(row)

    def _results(self, step: PreparedStep, samples: SampleResult) -> list[RowResult]:
        scheduled, layout, sampling = step.scheduled, step.layout, step.sampling
        num_draws = len(layout.draws)
        results = [RowResult(row.request_id, num_kept=row.num_tokens) for row in scheduled]
        failed = samples.failed.tolist()
        token_ids = samples.token_ids[:num_draws].tolist()
        kept, paths = kept_draws(scheduled, layout.draws, token_ids, failed)
        for entry in kept:
            index = layout.draws[entry]
            results[index].token_ids.append(token_ids[entry])
            if failed[entry]:
                results[index].failure = self._failure(step, entry, index)
        for planned, result in zip(scheduled, results, strict=True):
            if planned.draft_ids:
                num_known = planned.num_tokens - len(planned.draft_ids)
                result.num_kept = num_known - 1 + len(result.token_ids)
        for index, path in paths.items():
            results[index].kept_path = path
            self._rows.keep_path(scheduled[index], path)
        draws = np.array(layout.draws, np.intp)[kept]
        self._rows.append(layout.rows[draws], layout.draw_ends[kept], samples.token_ids[kept])
        if samples.surprises is not None:
            surprises = samples.surprises.tolist()
            for entry in kept:
                index = layout.draws[entry]
                row = int(layout.rows[index])
                results[index].mirostat_mu = self._rows.sampling.surprised(row, surprises[entry])
        if samples.logprobs is not None:
            reader = LogprobsReader(sampling.records["num_logprobs"], samples)
            _add_logprobs(results, layout, kept, reader)
            for index, entries in layout.target_entries():
                if any(failed[entry] for entry in entries):
                    failure = "the model's logits within the prompt are not numbers (NaN)"
                    results[index].failure = failure
        for result in results:
            if result.failure is not None:
                result.num_kept = 0
        return results

    def _failure(self, step: PreparedStep, entry: int, index: int) -> str:
        """Returns why nothing could be drawn: a NaN, or bans of its own that leave no token."""
        num_tokens = int(step.layout.draw_ends[entry])
        if step.checks is not None and (fault := step.checks.fault(entry)):
            return f"nothing can be drawn after {num_tokens} tokens: {fault}"
        if fault := self._rows.grammars.fault(int(step.layout.rows[index])):
            return f"the grammar cannot be followed after {num_tokens} tokens: {fault}"
        if not step.is_restricted(entry):
            return f"the model's logits after {num_tokens} tokens are not numbers (NaN)"
        bans = (
            "the grammar, logits_processors, allowed_token_ids, logit_bias, bad_words and"
            " min_tokens"
        )
        return (
            f"no token can be drawn after {num_tokens} tokens: {bans} leave none, or the model's"
            " logits are not numbers (NaN)"
        )


def _last_tokens(
    scheduled: Sequence[ScheduledRow], layout: Layout, *, num_samples: int
) -> LastTokens:
    """Returns the rows whose last tokens the step reads and writes; prompt targets have none."""
    sources = np.full(layout.query_starts[-1], -1, np.int32)
    for index, row in enumerate(scheduled):
        if row.from_device:
            sources[layout.query_starts[index]] = layout.rows[index]
    targets = np.full(num_samples, -1, np.int32)
    targets[: len(layout.draws)] = layout.rows[np.array(layout.draws, np.intp)]
    return LastTokens(sources, targets)


def _add_logprobs(
    results: list[RowResult], layout: Layout, kept: Sequence[int], reader: LogprobsReader
) -> None:
    """Adds the logprobs that requests want, of the draws that are kept and of their prompts."""
    found: dict[int, TokenLogprobs] = {}
    for entry in kept:
        if reader.has(entry):
            found[entry] = reader.read(entry)
            result = results[layout.draws[entry]]
            result.logprobs = [*(result.logprobs or []), found[entry]]
    for draw, entries in layout.listed_entries():
        if draw in found:
            for entry in entries:
                reader.add(found[draw], entry)
    for index, entries in layout.target_entries():
        results[index].prompt_logprobs = [reader.read(entry) for entry in entries]
