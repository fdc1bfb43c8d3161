"""Turns a step's scheduled rows into one StepBatch, runs the Program over it, and returns each
row's result.

Knows rows and arrays; knows nothing of queues, blocks' owners or text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import add

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import RowResult, ScheduledRequest, TokenLogprobs
from octavo.executor.base import Computing, DecodingRunnable, Runnable, VerifyingRunnable
from octavo.executor.batch import (
    DecodeSteps,
    LastTokens,
    SampleResult,
    SamplingBatch,
    StepBatch,
    StepOutput,
    sampling_records,
)
from octavo.executor.kv import KvCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.media.step_media import StepMedia
from octavo.worker.model_input import ModelInput, ProgramRunner, SampleLayout
from octavo.worker.sampling.draft_acceptance import StepRows, accept_drafts, draws_of
from octavo.worker.sampling.logprobs_reader import LogprobsReader
from octavo.worker.sampling.sample_verifier import SampleVerifier, Texts
from octavo.worker.sampling.sampling_states import append_targets
from octavo.worker.sampling.verified_parts import split_verified
from octavo.worker.stages.hand_over import HiddenReceiver
from octavo.worker.step_arrays import Spans, add_leaves, gather


class ModelRunner(ProgramRunner):
    """Runs steps of one Program that samples tokens."""

    def __init__(
        self,
        runnable: Runnable,
        kv: KvCache,
        rows: InputBatch,
        media: StepMedia | None = None,
        before: HiddenReceiver | None = None,
        *,
        in_one_part: bool = False,
    ) -> None:
        """Takes the images of its steps, if the Program reads any; `before` has the hidden states
        of the stage before. With `in_one_part` each step is one run of the Program, as other
        engines count on that share its experts.
        """
        super().__init__(runnable, kv, rows)
        self._media = media
        self._before = before
        self._verifying = runnable if isinstance(runnable, VerifyingRunnable) else None
        self._max_verified = 0 if self._verifying is None else self._verifying.max_verified
        self._in_one_part = in_one_part

    def prepare(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the arrays of the first of `num_steps` steps. Writes draft tokens behind the
        rows' known tokens and changes nothing else of them.

        Returns several inputs if more rows are sampled than the backend verifies at once, and some
        have to be verified.
        """
        if self._in_one_part:
            return [self._prepare(scheduled, num_steps)]
        return [
            self._prepare(part, num_steps)
            for part in split_verified(scheduled, self._rows, self._max_verified)
        ]

    def run(self, model_input: ModelInput) -> list[RowResult]:
        """Computes a step. The rows take their sampled tokens only once all of it has succeeded."""
        if model_input.verifier is None:
            output = self.runnable.run(model_input.batch, self._kv)
        else:
            assert self._verifying is not None
            output = self._verifying.run_verified(model_input.batch, self._kv, model_input.verifier)
        return self.results(model_input, output)

    def launch(self, model_input: ModelInput, *, all_known: bool = False) -> Computing:
        """Starts a step without waiting for it. The device keeps the tokens that it samples, for
        rows of the next step that are `from_device`; with `all_known` none of these rows is.
        """
        model_input.batch.last_tokens = _last_tokens(model_input, all_known=all_known)
        return super().launch(model_input)

    def decode(self, model_input: ModelInput, num_steps: int) -> Iterator[list[RowResult]] | None:
        """Returns the decode steps of rows that need no mask that changes with their tokens; None
        for others.
        """
        batch, verifier, grammars = model_input.batch, model_input.verifier, self._rows.grammars
        if batch.given is not None or batch.limits is not None:
            return None
        for entry, row in enumerate(model_input.rows.tolist() if grammars else ()):
            if row in grammars and not (verifier is not None and entry in verifier):
                return None
        return self._decode(model_input, num_steps)

    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        assert output.samples is not None
        results = self._sampled(model_input, output.samples)
        if self._rows.grammars:
            num_sampled = [len(result.token_ids) for result in results]
            ends = [
                row.start + row.num_tokens - len(row.draft_ids) for row in model_input.scheduled
            ]
            self._append_forced(model_input, list(map(add, ends, num_sampled)), results)
        return results

    def _decode(self, model_input: ModelInput, num_steps: int) -> Iterator[list[RowResult]]:
        assert isinstance(self.runnable, DecodingRunnable)
        rows, layout, batch = self._rows, model_input.layout, model_input.batch
        assert layout is not None and batch.sampling is not None
        follows_tokens = rows.sampling.follows_tokens(layout.rows)
        end_ids, end_starts = rows.end_tokens(layout.rows)
        steps = DecodeSteps(num_steps, end_starts, end_ids, follows_tokens)
        for samples, is_last in self.runnable.decode(batch, self._kv, steps, model_input.verifier):
            results = self._sampled(model_input, samples)
            layout.draw_ends += 1
            if is_last and rows.grammars:
                self._append_forced(model_input, layout.draw_ends.tolist(), results)
            yield results
            if follows_tokens:
                rows.sampling.follow(batch.sampling, layout.rows, rows.token_ids, layout.draw_ends)

    def _prepare(self, scheduled: Sequence[ScheduledRequest], num_steps: int) -> ModelInput:
        self._rows.grammars.take_back()
        layout = self._layout(scheduled)
        if layout.has_drafts:
            chains = [[] if row.leaf_blocks else row.draft_ids for row in scheduled]
            self._rows.write_drafts(layout.rows, layout.step_rows.ends[: len(scheduled)], chains)
            if layout.num_samples > self._max_verified:
                layout = self._layout(scheduled, in_turn=False)
        verifier = self._make_verifier(scheduled, layout)
        batch = self._batch(scheduled, layout, verifier, num_steps)
        return ModelInput(self, scheduled, batch, layout.rows, layout, verifier)

    def _layout(
        self, scheduled: Sequence[ScheduledRequest], *, in_turn: bool = True
    ) -> SampleLayout:
        """Returns where a step's rows are sampled. Without `in_turn`, rows that can only be sampled
        in turn are sampled once, and none of their draft tokens is accepted.
        """
        rows = self._rows.indices(scheduled)
        step_rows = StepRows.of(scheduled)
        draws_once = [
            not in_turn and self._rows.sampling.samples_sequentially(row) for row in rows.tolist()
        ]
        draws, draw_ends, draw_places = draws_of(scheduled, step_rows, draws_once)
        return SampleLayout(
            rows=rows,
            step_rows=step_rows,
            draws=draws,
            draw_rows=rows[np.array(draws, np.intp)],
            draw_ends=draw_ends,
            draw_places=draw_places,
            targets=self._targets(scheduled, rows),
            listed=self._listed(draws, rows),
            has_drafts=any(row.draft_ids for row in scheduled),
        )

    def _make_verifier(
        self, scheduled: Sequence[ScheduledRequest], layout: SampleLayout
    ) -> SampleVerifier | None:
        """Returns the samples to verify once they are made, unless there are more than the backend
        can verify.
        """
        sampling = self._rows.sampling
        if not sampling.may_verify or layout.num_samples > self._max_verified:
            return None
        texts = Texts(
            self._rows.token_ids,
            layout.draw_ends,
            max_num_tokens=[scheduled[index].max_num_tokens or 0 for index in layout.draws],
            searches=[scheduled[index].search_of != "" for index in layout.draws],
        )
        return sampling.make_verifier(layout.draw_rows, texts)

    def _batch(
        self,
        scheduled: Sequence[ScheduledRequest],
        layout: SampleLayout,
        verifier: SampleVerifier | None,
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
        batch.sample_rows, batch.sampling = self._sampling(scheduled, layout, verifier)
        if self._before is not None:
            batch.hidden = self._before.of(scheduled)
        return batch

    def _targets(
        self, scheduled: Sequence[ScheduledRequest], rows: NDArray[np.intp]
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
        self,
        scheduled: Sequence[ScheduledRequest],
        layout: SampleLayout,
        verifier: SampleVerifier | None,
    ) -> tuple[NDArray[np.int32], SamplingBatch]:
        """Returns `sample_rows [S]` and how to draw: draws first, then as targets the prompt's own
        tokens, and those whose logprobs a draw wants.
        """
        sampling = self._rows.sampling.gather(
            layout.draw_rows, self._rows.token_ids, layout.draw_ends, verifier
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
        self, scheduled: Sequence[ScheduledRequest], layout: SampleLayout, sampling: SamplingBatch
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
        shifts = [
            layout.step_rows.query_starts[index] - first for index, first, _ in layout.targets
        ]
        return np.concatenate([span + shift for span, shift in zip(spans, shifts, strict=True)])

    def _append_forced(
        self, model_input: ModelInput, ends: Sequence[int], results: Sequence[RowResult]
    ) -> None:
        """Adds to results the tokens behind their `ends` that grammars leave no choice of, if the
        rows are not too many. They are known like those of a prompt: the next step computes them
        as a chunk. Text behind them that several tokens may spell becomes draft tokens.
        """
        rows = model_input.rows
        if self._verifying is not None and len(rows) > self._verifying.max_forced_requests:
            return
        for row, end, result in zip(rows.tolist(), ends, results, strict=True):
            if row in self._rows.grammars and result.token_ids and result.failure is None:
                result.token_ids += self._rows.append_forced(row, end)
                result.draft_ids = self._rows.draft_forced(row)

    def _sampled(self, model_input: ModelInput, samples: SampleResult) -> list[RowResult]:
        """Returns each row's sampled tokens, and appends them to the permanent rows."""
        scheduled, layout = model_input.scheduled, model_input.layout
        assert layout is not None, "the Program samples"
        draws = layout.draws
        results = [RowResult(row.request_id, num_kept=row.num_tokens) for row in scheduled]
        kept: Sequence[int] = range(len(draws))
        token_ids, failed = samples.token_ids.tolist(), samples.failed.tolist()
        if layout.has_drafts:
            kept = self._accept(model_input, results, token_ids, failed)
        for entry in kept:
            results[draws[entry]].token_ids.append(token_ids[entry])
        if True in failed:  # before grammars take the tokens in
            self._add_failures(model_input, results, kept, failed)
        self._append_tokens(layout, kept, samples)
        if samples.surprises is not None:
            surprises = samples.surprises.tolist()
            for entry in kept:
                row = int(layout.draw_rows[entry])
                mu = self._rows.sampling.surprised(row, surprises[entry])
                results[draws[entry]].mirostat_mu = mu
        if samples.logprobs is not None:
            assert model_input.batch.sampling is not None
            num_logprobs = model_input.batch.sampling.records["num_logprobs"]
            _add_logprobs(results, layout, kept, LogprobsReader(num_logprobs, samples))
        return results

    def _append_tokens(
        self, layout: SampleLayout, kept: Sequence[int], samples: SampleResult
    ) -> None:
        rows, ends, token_ids = layout.draw_rows, layout.draw_ends, samples.token_ids
        if layout.has_drafts:
            entries = np.array(kept, np.intp)
            rows, ends, token_ids = rows[entries], ends[entries], token_ids[entries]
        self._rows.append(rows, ends, token_ids[: len(rows)])

    def _accept(
        self,
        model_input: ModelInput,
        results: Sequence[RowResult],
        token_ids: Sequence[int],
        failed: Sequence[bool],
    ) -> list[int]:
        """Returns the samples that follow accepted tokens only, and notes in results how many
        draft tokens are accepted.
        """
        scheduled, layout = model_input.scheduled, model_input.layout
        assert layout is not None
        kept, paths = accept_drafts(scheduled, layout.draws, token_ids, failed)
        num_sampled = Counter(layout.draws[entry] for entry in kept)
        for index, row in enumerate(scheduled):
            if row.draft_ids:
                num_known = row.num_tokens - len(row.draft_ids)
                results[index].num_kept = num_known - 1 + num_sampled[index]
        for index, path in paths.items():
            results[index].kept_path = path
            self._rows.keep_path(scheduled[index], path)
        return kept

    def _add_failures(
        self,
        model_input: ModelInput,
        results: Sequence[RowResult],
        kept: Sequence[int],
        failed: Sequence[bool],
    ) -> None:
        """Notes which requests fail, of which nothing is kept: their logits are not numbers, or
        nothing may be sampled.
        """
        layout = model_input.layout
        assert layout is not None
        for entry in kept:
            if failed[entry]:
                results[layout.draws[entry]].failure = self._failure(model_input, layout, entry)
        for index, entries in layout.target_entries():
            if any(failed[entry] for entry in entries):
                failure = "the model's logits within the prompt are not numbers (NaN)"
                results[index].failure = failure
        for result in results:
            if result.failure is not None:
                result.num_kept = 0

    def _failure(self, model_input: ModelInput, layout: SampleLayout, entry: int) -> str:
        """Returns why nothing could be sampled: a NaN, or bans of its own that leave no token."""
        num_tokens, verifier = int(layout.draw_ends[entry]), model_input.verifier
        if verifier is not None and (fault := verifier.fault(entry)):
            return f"nothing can be drawn after {num_tokens} tokens: {fault}"
        if fault := self._rows.grammars.fault(int(layout.draw_rows[entry])):
            return f"the grammar cannot be followed after {num_tokens} tokens: {fault}"
        sampling = model_input.batch.sampling
        assert sampling is not None
        is_restricted = (
            sampling.records["allowed_mask"][entry] >= 0
            or sampling.bias_starts[entry + 1] > sampling.bias_starts[entry]
            or (verifier is not None and entry in verifier)
        )
        if not is_restricted:
            return f"the model's logits after {num_tokens} tokens are not numbers (NaN)"
        bans = (
            "the grammar, logits_processors, allowed_token_ids, logit_bias, bad_words and"
            " min_tokens"
        )
        return (
            f"no token can be drawn after {num_tokens} tokens: {bans} leave none, or the model's"
            " logits are not numbers (NaN)"
        )


def _last_tokens(model_input: ModelInput, *, all_known: bool) -> LastTokens:
    """Returns the rows whose last tokens the step reads and writes; prompt targets have none."""
    layout = model_input.layout
    assert layout is not None, "the Program samples"
    starts = layout.step_rows.query_starts
    sources = np.full(starts[len(layout.rows)], -1, np.int32)
    for index, row in enumerate(() if all_known else model_input.scheduled):
        if row.from_device:
            sources[starts[index]] = layout.rows[index]
    targets = np.full(len(model_input.batch.sample_rows), -1, np.int32)
    targets[: len(layout.draws)] = layout.draw_rows
    return LastTokens(sources, targets)


def _add_logprobs(
    results: Sequence[RowResult], layout: SampleLayout, kept: Sequence[int], reader: LogprobsReader
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
