"""Turns a step's scheduled requests into one ModelInput, runs the Program over it, and returns each
request's sampled tokens.

Works on rows and arrays; the scheduler owns queues and block allocation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence

import numpy as np

from octavo.engine.protocol.step import ResultKind, RowResult, ScheduledRequest
from octavo.executor.base import Computing, Runnable
from octavo.executor.batch import (
    DecodeSteps,
    LastTokens,
    SampleResult,
    StepOutput,
    sampling_records,
)
from octavo.executor.kv import KvCache
from octavo.worker.draft_trees import add_draft_trees
from octavo.worker.input_batch import InputBatch
from octavo.worker.media.step_media import StepMedia
from octavo.worker.model_input import ModelInput, ProgramRunner, gather
from octavo.worker.sampling.draft_layout import DraftLayout, accept_drafts
from octavo.worker.sampling.logprobs import add_logprobs, get_num_entries, get_prompt_entries
from octavo.worker.sampling.sample_verifier import SampleContexts, SampleVerifier
from octavo.worker.sampling.sampling_states import append_targets
from octavo.worker.stages.hand_over import HiddenReceiver


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
        """`media`: images of the steps, if the Program reads any. `before`: receives the hidden
        states of the previous pipeline stage. `in_one_part`: each step must be a single run of the
        Program, since other engines that share its experts rely on that.
        """
        super().__init__(runnable, kv, rows)
        self._media = media
        self._before = before
        self._max_verified = runnable.max_verified
        self._in_one_part = in_one_part

    def prepare_inputs(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the arrays of the first of `num_steps` steps. Writes draft tokens after the rows'
        known tokens; changes nothing else in the rows.

        Returns several inputs if more samples are to be verified than the backend can verify at
        once.
        """
        if self._rows.sampling.special_rows:
            self._rows.grammars.rollback()
            if not self._in_one_part:
                parts = split_verified(scheduled, self._rows, self._max_verified)
                return [self._prepare_inputs(part, num_steps) for part in parts]
        return [self._prepare_inputs(scheduled, num_steps)]

    def launch(self, model_input: ModelInput, *, all_known: bool = False) -> Computing:
        """Starts a step without waiting for it. The device keeps the sampled tokens for rows of the
        next step that are `from_device`. With `all_known`, no row is `from_device`.
        """
        model_input.last_tokens = _make_last_tokens(model_input, all_known=all_known)
        return super().launch(model_input)

    def decode(self, model_input: ModelInput, num_steps: int) -> Iterator[list[RowResult]] | None:
        """Returns the decode steps of rows whose masks do not depend on sampled tokens. Returns
        None for other rows.
        """
        # Images change the rows or masks of a step, which must not change between decode steps.
        if model_input.input_rows is not None or model_input.limits is not None:
            return None
        if self._rows.sampling.special_rows and not self._can_decode(model_input):
            return None
        return self._decode(model_input, num_steps)

    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        assert output.samples is not None
        results = self._collect(model_input, output.samples)
        if self._rows.sampling.special_rows:
            known_ends = [
                request.start + request.num_tokens - len(request.draft_ids)
                for request in model_input.scheduled
            ]
            self._append_forced(model_input, results, known_ends)
        return results

    def _can_decode(self, model_input: ModelInput) -> bool:
        grammars, verifier = self._rows.grammars, model_input.verifier
        return all(
            row not in grammars or (verifier is not None and entry in verifier)
            for entry, row in enumerate(model_input.rows.tolist())
        )

    def _decode(self, model_input: ModelInput, num_steps: int) -> Iterator[list[RowResult]]:
        rows, sampling = self._rows, self._rows.sampling
        assert model_input.sampling is not None
        follows_tokens = bool(sampling.special_rows) and sampling.follows_tokens(model_input.rows)
        steps = DecodeSteps(num_steps, *rows.get_end_tokens(model_input.rows), follows_tokens)
        decoded = self.runnable.decode(model_input, self._kv, steps, model_input.verifier)
        for samples, is_last in decoded:
            results = self._collect(model_input, samples)
            if is_last and sampling.special_rows:
                # The plan's `start` is not used: the scheduler advances it between steps.
                self._append_forced(model_input, results, model_input.sample_ends.tolist())
            model_input.sample_ends += 1
            yield results
            if follows_tokens:
                sampling.follow(
                    model_input.sampling, model_input.rows, rows.token_ids, model_input.sample_ends
                )

    def _prepare_inputs(
        self,
        scheduled: Sequence[ScheduledRequest],
        num_steps: int,
        sampled_once: Container[int] = (),
    ) -> ModelInput:
        """Gathers a step. Permanent rows in `sampled_once` are sampled only before their draft
        tokens, none of which is accepted then.
        """
        sampling = self._rows.sampling
        model_input, drafts = self._gather(scheduled, num_steps, sampled_once)
        if sampling.logprob_token_ids:
            model_input.logprob_targets = sampling.get_logprob_targets(model_input.owner_rows)
        has_targets = bool(model_input.prompt_targets or model_input.logprob_targets)
        if sampling.special_rows:
            # Without a verifier, masks must be built before the step.
            if get_num_entries(model_input) <= self._max_verified:
                model_input.verifier = self._make_verifier(model_input)
            elif model_input.has_drafts and sampling.mirostat_rules and not sampled_once:
                # Sequential sampling requires resampling, which the backend cannot do here.
                return self._prepare_inputs(scheduled, num_steps, sampling.mirostat_rules)
        if drafts is not None:
            add_draft_trees(model_input, drafts)
        if self._media is not None:
            self._media.add(model_input)
        if self._before is not None:
            model_input.hidden = self._before.get(scheduled)
        model_input.sampling = sampling.gather(
            model_input.owner_rows,
            self._rows.token_ids,
            model_input.sample_ends,
            model_input.verifier,
        )
        if has_targets:
            self._add_targets(model_input)
        return model_input

    def _gather(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int, sampled_once: Container[int]
    ) -> tuple[ModelInput, DraftLayout | None]:
        """Writes draft tokens, gathers the step's tokens and sets where rows are sampled. Also
        returns the layout of draft trees, None if there are none.
        """
        rows = self._rows
        row_ids: list[int] = []
        ends: list[int] = []
        starts = [0]
        owners: list[int] = []
        sample_ends: list[int] = []
        sample_rows: list[int] = []
        prompt_targets: list[tuple[int, int, int]] = []
        has_drafts = False
        drafts: DraftLayout | None = None
        for index, request in enumerate(scheduled):
            row = rows.row_of[request.request_id]
            count, num_drafts = request.num_tokens, len(request.draft_ids)
            end = request.start + count
            known_end, last_known = end - num_drafts, starts[-1] + count - num_drafts - 1
            if request.num_prompt_logprobs is not None:
                # The token after the last prompt token is sampled, not scored.
                last = min(end, int(rows.num_prompt_tokens[row]) - 1)
                prompt_targets.append((index, request.start, max(request.start, last)))
            if request.leaf_blocks:
                # Tokens of a tree share positions, so they are not written to the permanent row.
                drafts = drafts or DraftLayout()
                count = drafts.add(index, request)
            elif num_drafts:
                rows.write_drafts(row, known_end, request.draft_ids)
            row_ids.append(row)
            ends.append(request.start + count)
            starts.append(starts[-1] + count)
            if num_drafts:
                has_drafts = True
                num_drafts = 0 if row in sampled_once else num_drafts
            if request.result_kind == ResultKind.SAMPLE:
                owners += [index] * (num_drafts + 1)
                sample_ends += range(known_end, known_end + num_drafts + 1)
                sample_rows += range(last_known, last_known + num_drafts + 1)
        if drafts is not None:
            drafts.append_leaves(row_ids, ends, starts)
            drafts.set_samples(owners, sample_ends, sample_rows)
        model_input = gather(
            rows,
            np.array(row_ids, np.intp),
            np.array(ends, np.int32),
            np.array(starts, np.int32),
            num_steps,
        )
        model_input.runner, model_input.scheduled = self, scheduled
        model_input.has_drafts = has_drafts
        model_input.sample_owners = owners
        model_input.owner_rows = model_input.rows[np.array(owners, np.intp)]
        model_input.sample_ends = np.array(sample_ends, np.int32)
        model_input.sample_rows = np.array(sample_rows, np.int32)
        model_input.prompt_targets = prompt_targets
        return model_input, drafts

    def _make_verifier(self, model_input: ModelInput) -> SampleVerifier | None:
        scheduled, owners = model_input.scheduled, model_input.sample_owners
        contexts = SampleContexts(
            self._rows.token_ids,
            model_input.sample_ends,
            max_num_tokens=[scheduled[index].max_num_tokens or 0 for index in owners],
            searches=[scheduled[index].search_of != "" for index in owners],
        )
        return self._rows.sampling.make_verifier(model_input.owner_rows, contexts)

    def _add_targets(self, model_input: ModelInput) -> None:
        """Adds the tokens that are scored instead of sampled: first prompt tokens, then further
        tokens of samples (their logits are read once more for each token).
        """
        token_ids, batch = self._rows.token_ids, model_input.sampling
        assert batch is not None
        sample_rows = [model_input.sample_rows]
        for index, first, end in model_input.prompt_targets:
            request = model_input.scheduled[index]
            positions = np.arange(first, end, dtype=np.int32)
            targets = sampling_records(
                end - first,
                position=positions + 1,
                target_id=token_ids[model_input.rows[index], first + 1 : end + 1],
                num_logprobs=self._rows.sampling.get_num_top(request.num_prompt_logprobs or 0),
            )
            append_targets(batch, targets)
            sample_rows.append(positions + (model_input.query_starts[index] - first))
        for sample, ids in model_input.logprob_targets:
            position = model_input.sample_ends[sample]
            append_targets(
                batch,
                sampling_records(len(ids), position=position, target_id=ids, num_logprobs=0),
            )
            sample_rows.append(np.full(len(ids), model_input.sample_rows[sample], np.int32))
        model_input.sample_rows = np.concatenate(sample_rows)

    def _append_forced(
        self, model_input: ModelInput, results: Sequence[RowResult], known_ends: Sequence[int]
    ) -> None:
        """Appends the tokens that grammars force after the sampled ones; the next step computes
        them as a chunk, like a prompt. Does nothing for more than `max_forced_requests` rows.
        Forced text with several tokenizations becomes draft tokens. `known_ends [R]`: number of
        tokens before the sampled ones.
        """
        rows = self._rows
        if not rows.grammars or len(results) > self.runnable.max_forced_requests:
            return
        # `rows` has additional entries for the branches of draft trees.
        for row, end, result in zip(model_input.rows.tolist(), known_ends, results, strict=False):
            if row in rows.grammars and result.token_ids and result.failure is None:
                result.token_ids += rows.append_forced(row, end + len(result.token_ids))
                result.draft_ids = rows.draft_forced(row)

    def _collect(self, model_input: ModelInput, samples: SampleResult) -> list[RowResult]:
        """Returns each request's sampled tokens, and appends them to the permanent rows."""
        owners, sampling = model_input.sample_owners, self._rows.sampling
        rows, ends = model_input.owner_rows, model_input.sample_ends
        results = []
        for request in model_input.scheduled:
            results.append(RowResult(request.request_id, num_kept=request.num_tokens))
        kept_ids = samples.token_ids[: len(owners)]
        token_ids = kept_ids.tolist()
        kept: Sequence[int] = range(len(owners))
        if model_input.has_drafts:
            kept = self._accept_drafts(model_input, results, token_ids, samples.failed.tolist())
            rows, ends, kept_ids = rows[kept], ends[kept], kept_ids[kept]
        for sample in kept:
            results[owners[sample]].token_ids.append(token_ids[sample])
        if samples.failed.any():  # before grammars accept the tokens
            self._add_failures(model_input, results, kept, samples.failed.tolist())
        self._rows.token_ids[rows, ends] = kept_ids
        if sampling.special_rows:
            self._rows.accept_tokens(rows.tolist(), kept_ids.tolist())
        if samples.surprises is not None:
            surprises = samples.surprises.tolist()
            for sample, row in zip(kept, rows.tolist(), strict=True):
                mu = sampling.update_mirostat(row, surprises[sample])
                results[owners[sample]].mirostat_mu = mu
        if samples.logprobs is not None:
            add_logprobs(model_input, results, kept, samples)
        return results

    def _accept_drafts(
        self,
        model_input: ModelInput,
        results: Sequence[RowResult],
        token_ids: Sequence[int],
        failed: Sequence[bool],
    ) -> list[int]:
        """Returns the samples that only follow accepted tokens, and sets the number of kept tokens
        in the results.
        """
        scheduled, owners = model_input.scheduled, model_input.sample_owners
        kept, paths = accept_drafts(scheduled, owners, token_ids, failed)
        num_sampled = Counter(owners[sample] for sample in kept)
        for index, request in enumerate(scheduled):
            if request.draft_ids:
                num_known = request.num_tokens - len(request.draft_ids)
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
        """Sets the failure of requests whose logits are NaN or for which no token is allowed."""
        for sample in kept:
            if failed[sample]:
                index = model_input.sample_owners[sample]
                results[index].failure = self._describe_failure(model_input, sample)
        for index, entries in get_prompt_entries(model_input):
            if any(failed[entry] for entry in entries):
                failure = "the model's logits within the prompt are NaN"
                results[index].failure = failure
        for result in results:
            if result.failure is not None:
                result.num_kept = 0

    def _describe_failure(self, model_input: ModelInput, sample: int) -> str:
        """Returns why nothing could be sampled: a NaN, or no allowed token."""
        num_tokens, verifier = int(model_input.sample_ends[sample]), model_input.verifier
        if verifier is not None and (fault := verifier.fault(sample)):
            return f"sampling failed after {num_tokens} tokens: {fault}"
        if fault := self._rows.grammars.fault(int(model_input.owner_rows[sample])):
            return f"the grammar failed after {num_tokens} tokens: {fault}"
        sampling = model_input.sampling
        assert sampling is not None
        is_restricted = (
            sampling.records["allowed_mask"][sample] >= 0
            or sampling.bias_starts[sample + 1] > sampling.bias_starts[sample]
            or (verifier is not None and sample in verifier)
        )
        if not is_restricted:
            return f"the model's logits after {num_tokens} tokens are NaN"
        bans = (
            "the grammar, logits_processors, allowed_token_ids, logit_bias, bad_words and"
            " min_tokens"
        )
        return (
            f"no token can be sampled after {num_tokens} tokens: {bans} exclude every token, or the"
            " model's logits are NaN"
        )


def _make_last_tokens(model_input: ModelInput, *, all_known: bool) -> LastTokens:
    """Returns the rows whose last tokens the step reads and writes; prompt targets have none."""
    starts = model_input.query_starts
    sources = np.full(len(model_input.token_ids), -1, np.int32)
    for index, request in enumerate(() if all_known else model_input.scheduled):
        if request.from_device:
            sources[starts[index]] = model_input.rows[index]
    targets = np.full(len(model_input.sample_rows), -1, np.int32)
    targets[: len(model_input.owner_rows)] = model_input.owner_rows
    return LastTokens(sources, targets)


def split_verified(
    scheduled: Sequence[ScheduledRequest], rows: InputBatch, max_verified: int
) -> list[Sequence[ScheduledRequest]]:
    """Splits the requests into parts. Requests to verify are separate from others, with at most
    `max_verified` sampled rows per part.

    A row's results do not depend on other rows, so any split gives the same results.
    """
    if sum(map(_get_max_samples, scheduled)) <= max_verified:
        return [scheduled]
    parts: list[list[ScheduledRequest]] = [[]]
    others = []
    num_samples = 0
    for request, row in zip(scheduled, rows.indices(scheduled).tolist(), strict=True):
        is_verified = request.result_kind == ResultKind.SAMPLE and rows.sampling.must_verify(
            row, has_drafts=bool(request.draft_ids), is_search=request.search_of != ""
        )
        if not is_verified:
            others.append(request)
            continue
        if num_samples + _get_max_samples(request) > max_verified:
            parts.append([])
            num_samples = 0
        parts[-1].append(request)
        num_samples += _get_max_samples(request)
    if len(others) == len(scheduled):
        return [scheduled]
    return [part for part in (others, *parts) if part]


def _get_max_samples(request: ScheduledRequest) -> int:
    """Returns the maximum number of sampled rows of a request."""
    num_targets = 0 if request.num_prompt_logprobs is None else request.num_tokens
    return num_targets + (
        len(request.draft_ids) + 1 if request.result_kind == ResultKind.SAMPLE else 0
    )
