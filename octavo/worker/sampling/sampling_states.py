"""Sampling state of the running requests: one record per permanent row, so that a step's
SamplingBatch is a single gather.

Rare options (bias, bans, penalties, allowed ids) are stored outside of the records and cost time
only for requests that use them. Sampling itself is in `executor/sampling.py`.
"""

from __future__ import annotations

import operator
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.api.sampling_params import OPTIONS, SamplingParams
from octavo.engine.protocol.step import NewRequest
from octavo.executor.batch import (
    NO_IDS,
    NO_VALUES,
    Bits,
    SamplingBatch,
    make_record,
    packed_masks,
    sampling_records,
)
from octavo.worker.csr import Csr
from octavo.worker.sampling.dry import DryMatches, make_dry_matches
from octavo.worker.sampling.grammar_matchers import GrammarMatchers
from octavo.worker.sampling.logits_processors import LogitsProcessors
from octavo.worker.sampling.logits_state import ANY_TOKEN, LogitsState
from octavo.worker.sampling.sample_verifier import SampleContexts, SampleToVerify, SampleVerifier
from octavo.worker.sampling.sequential_sampling import MirostatRule, SequentialSampling
from octavo.worker.sampling.token_counts import TokenCounts

get_record_options = operator.attrgetter(*OPTIONS.record)
"""Returns the options of SamplingParams that are in the sampling record."""


class SamplingStates:
    """Sampling records of `N` permanent rows."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        grammars: GrammarMatchers,
        processors: LogitsProcessors,
        closes: bool,
    ) -> None:
        """`closes`: complete structured outputs before their length limit."""
        self._vocab_size = vocab_size
        self._closes = closes
        self._grammars = grammars
        self._processors = processors
        self._records = sampling_records(max_rows)
        self.logits_states: dict[int, LogitsState] = {}
        """Options outside of the records, by row."""
        self.mirostat_rules: dict[int, MirostatRule] = {}
        self.special_rows: set[int] = set()
        """Rows with a LogitsState or a MirostatRule. Without any, a step needs only the records."""
        self.logprob_token_ids: dict[int, NDArray[np.int32]] = {}
        """Further tokens whose logprobs samples report, by row."""
        self._all_tokens = packed_masks(np.ones((1, vocab_size), np.bool_))[0]
        self._masks: WeakValueDictionary[tuple[int, ...], Bits] = WeakValueDictionary()

    def add(self, row: int, new: NewRequest) -> None:
        """Sets a row's record from a request's params; position and mask are set in each step."""
        params = new.params
        assert isinstance(params, SamplingParams), "a request that samples has SamplingParams"
        num_logprobs = -1
        if params.logprobs is not None:
            num_logprobs = (
                0 if params.logprob_token_ids is not None else self.get_num_top(params.logprobs)
            )
        values = dict(zip(OPTIONS.record, get_record_options(params), strict=True)) | {
            "seed": new.seed & 0xFFFF_FFFF_FFFF_FFFF,
            "sample_index": new.sample_index,
            "num_logprobs": num_logprobs,
            "mirostat_mu": 2 * params.mirostat_tau if new.mirostat_mu is None else new.mirostat_mu,
        }
        self._records[row] = make_record(values)
        if params.logprob_token_ids is not None:
            self.logprob_token_ids[row] = np.array(params.logprob_token_ids, np.int32)
        if params.mirostat_mode:
            self.mirostat_rules[row] = MirostatRule(params.mirostat_tau, params.mirostat_eta)
            self.special_rows.add(row)
        state = self._make_logits_state(row, new, params)
        if state is not None:
            self.logits_states[row] = state
            self.special_rows.add(row)

    def free(self, row: int) -> None:
        self.logprob_token_ids.pop(row, None)
        if row in self.special_rows:
            self.special_rows.remove(row)
            self.mirostat_rules.pop(row, None)
            self.logits_states.pop(row, None)

    def close(self) -> None:
        self._processors.close()

    def get_num_top(self, num_logprobs: int) -> int:
        """Returns the number of top alternatives; -1 means the complete vocabulary."""
        return self._vocab_size if num_logprobs == -1 else min(num_logprobs, self._vocab_size)

    def get_logprob_targets(self, rows: NDArray[np.intp]) -> list[tuple[int, NDArray[np.int32]]]:
        """Returns the samples from `rows [D]` that report further tokens' logprobs, and the ids."""
        return [
            (sample, self.logprob_token_ids[row])
            for sample, row in enumerate(rows.tolist())
            if row in self.logprob_token_ids
        ]

    def update_mirostat(self, row: int, surprise: float) -> float | None:
        """Updates a row's mirostat mu after a token of `surprise` bits; returns it, rounded as in
        the record. Returns None without mirostat.
        """
        rule = self.mirostat_rules.get(row)
        if rule is None:
            return None
        mu = rule.after(float(self._records["mirostat_mu"][row]), surprise)
        self._records["mirostat_mu"][row] = mu
        return mu

    def accept_token(self, row: int, token_id: int) -> None:
        state = self.logits_states.get(row)
        if state is not None:
            state.accept_token(token_id)

    def may_append(self, row: int, token_id: int, num_tokens: int) -> bool:
        """Returns whether the only token that a grammar allows after `num_tokens` tokens can be
        appended without sampling: no other option may ban it, and its logprobs are not requested.
        """
        state, record = self.logits_states.get(row), self._records[row]
        if state is None or record["num_logprobs"] >= 0 or row in self.mirostat_rules:
            return False
        if state.bad_words or state.allowed_mask is not None or state.processors:
            return False
        is_banned = num_tokens < state.min_num_tokens and token_id in state.end_token_ids
        return not is_banned or self._grammars.is_complete(row)

    def must_verify(self, row: int, *, has_drafts: bool, is_search: bool) -> bool:
        """Returns whether a row's samples cannot be masked before the step."""
        if has_drafts and row in self.mirostat_rules:
            return True
        state = self.logits_states.get(row)
        if state is None:
            return False
        return bool(state.processors) or ((self._closes or is_search) and row in self._grammars)

    def make_verifier(
        self, rows: NDArray[np.intp], contexts: SampleContexts
    ) -> SampleVerifier | None:
        """Returns the verifier of the samples from `rows [D]`. Returns None if none are to be
        verified.
        """
        to_verify: dict[int, SampleToVerify] = {}
        sequential: dict[int, list[int]] = {}
        known: dict[int, int] = {}
        ends = contexts.ends.tolist()
        for entry, (row, end) in enumerate(zip(rows.tolist(), ends, strict=True)):
            num_drafts = end - known.setdefault(row, end)
            sample = self._make_sample(row, end, num_drafts, is_search=contexts.searches[entry])
            if sample is not None:
                to_verify[entry] = sample
            if row in self.mirostat_rules:
                sequential.setdefault(row, []).append(entry)
        chains = [
            self._make_sequential(
                row, entries, contexts.token_ids[row, known[row] : ends[entries[-1]]].tolist()
            )
            for row, entries in sequential.items()
            if len(entries) > 1
        ]
        if not (to_verify or chains):
            return None
        return SampleVerifier(to_verify, self._grammars, self._processors, contexts, chains)

    def _make_sample(
        self, row: int, num_tokens: int, num_drafts: int, *, is_search: bool
    ) -> SampleToVerify | None:
        """Returns how to verify a sample after `num_tokens` tokens, of which the last `num_drafts`
        are draft tokens. Returns None if it is not to be verified.
        """
        state = self.logits_states.get(row)
        if state is None or state.to_verify is None:
            return None
        if is_search:
            return state.to_verify._replace(
                num_drafts=num_drafts, is_search=True, skips_cutoffs=False
            )
        # A text is completed before its length limit if only its grammar restricts it.
        closes = (
            self._closes
            and row in self._grammars
            and state.allowed_mask is None
            and not state.bad_words
            and num_tokens >= state.min_num_tokens
        )
        if not (num_drafts or closes):
            return state.to_verify
        return state.to_verify._replace(num_drafts=num_drafts, closes=closes)

    def _make_sequential(
        self, row: int, entries: list[int], draft_ids: list[int]
    ) -> SequentialSampling:
        """Returns the samples of a row with mirostat; each except the first follows a draft
        token.
        """
        state = self.logits_states.get(row)
        masks = [
            None if state is None else self._make_mask(row, state, num_drafts)
            for num_drafts in range(1, len(entries))
        ]
        return SequentialSampling(
            self.mirostat_rules[row],
            float(self._records["mirostat_mu"][row]),
            entries[0],
            draft_ids,
            [self._all_tokens if mask is None else mask for mask in masks],
        )

    def plain_records(self, rows: NDArray[np.intp], ends: NDArray[np.int32]) -> NDArray[np.void]:
        """Returns the records of `rows [S]` after their first `ends [S]` tokens, without logprobs
        and without options that need more than a record or change with each sample.
        """
        records: NDArray[np.void] = self._records[rows]
        records["position"] = ends
        records["repetition_penalty"] = 1
        for field_name in ("presence_penalty", "frequency_penalty", "mirostat_mode"):
            records[field_name] = 0
        records["num_logprobs"] = -1
        return records

    def gather(
        self,
        rows: NDArray[np.intp],
        token_ids: NDArray[np.int32],
        ends: NDArray[np.int32],
        verifier: SampleVerifier | None = None,
    ) -> SamplingBatch:
        """Returns the sampling arrays for `rows [S]`, each after the first `ends [S]` of its
        `token_ids [N, context]`. Samples of the verifier get no grammar mask. If a row occurs
        several times, its tokens after its first end are draft tokens. The last token of a row may
        be known only on the device.
        """
        records = self._records[rows]
        records["position"] = ends
        batch = SamplingBatch.of(records, self._vocab_size)
        if self.logits_states:
            self._add_logits_states(batch, rows.tolist(), token_ids, ends.tolist(), verifier)
        if verifier is not None:
            batch.keeps_logits = True
            batch.deferred = verifier.get_deferred(len(rows))
            batch.without_cutoffs = verifier.get_without_cutoffs(len(rows))
        return batch

    def follows_tokens(self, rows: NDArray[np.intp]) -> bool:
        """Returns whether a bias or mirostat mu of `rows [S]` changes with each token."""
        return any(
            row in self.mirostat_rules
            or (row in self.logits_states and self.logits_states[row].follows_tokens)
            for row in rows.tolist()
        )

    def follow(
        self,
        batch: SamplingBatch,
        rows: NDArray[np.intp],
        token_ids: NDArray[np.int32],
        ends: NDArray[np.int32],
    ) -> None:
        """Updates the biases and mirostat values of a batch gathered from `rows [S]`, which now
        have `ends [S]` tokens. Other entries of the batch do not change.
        """
        batch.records["mirostat_mu"][: len(rows)] = self._records["mirostat_mu"][rows]
        self._add_bias(batch, rows.tolist(), token_ids, ends.tolist())
        num_targets = len(batch.records) - len(rows)
        batch.bias_starts = np.pad(batch.bias_starts, (0, num_targets), "edge")

    def _add_logits_states(
        self,
        batch: SamplingBatch,
        rows: list[int],
        token_ids: NDArray[np.int32],
        ends: list[int],
        verifier: SampleVerifier | None,
    ) -> None:
        self._add_bias(batch, rows, token_ids, ends)
        history = Csr()
        # Rows with the same allowed ids share one array, so identity distinguishes masks.
        masks: list[Bits] = []
        mask_indices: dict[int, int] = {}
        lags = np.zeros(len(rows), np.bool_)
        known: dict[int, int] = {}
        self._grammars.make_masks(self._get_masked_rows(rows, verifier))
        for entry, (row, end) in enumerate(zip(rows, ends, strict=True)):
            state = self.logits_states.get(row)
            if state is None:
                continue
            num_drafts = end - known.setdefault(row, end)
            if state.counts is not None:
                draft_ids = token_ids[row, end - num_drafts : end].tolist()
                history.add(entry, *state.counts.arrays_after(draft_ids))
                lags[entry] = state.lags(end - num_drafts)
            is_verified = verifier is not None and entry in verifier
            mask = state.allowed_mask if is_verified else self._make_mask(row, state, num_drafts)
            if mask is not None:
                index = mask_indices.setdefault(id(mask), len(masks))
                if index == len(masks):
                    masks.append(mask)
                batch.records["allowed_mask"][entry] = index
        if history.ids:
            batch.history_starts = history.starts(len(rows))
            batch.history_ids = np.concatenate(history.ids)
            batch.history_counts = np.concatenate(history.values)
            batch.counts_last = lags if lags.any() else None
        if masks:
            batch.allowed_masks = np.stack(masks)

    def _add_bias(
        self, batch: SamplingBatch, rows: list[int], token_ids: NDArray[np.int32], ends: list[int]
    ) -> None:
        """Sets the values added to the logits of the rows, each after its first `ends` tokens."""
        bias, known = Csr(), dict[int, int]()
        after: list[NDArray[np.int32]] = []
        dries: dict[int, DryMatches] = {}
        for entry, (row, end) in enumerate(zip(rows, ends, strict=True)):
            state = self.logits_states.get(row)
            num_drafts = end - known.setdefault(row, end)
            if state is None or not state.may_bias(end):
                continue
            if num_drafts == 1 and state.dry is not None:
                # Draft tokens must not advance the row's matches.
                dries[row] = state.dry.copy()
            if state.lags(end - num_drafts):
                # The last token is known only on the device, which selects the entries that apply.
                added = state.bias_after(token_ids[row, : end - 1])
            else:
                must_end = self._grammars.is_complete(row, num_drafts=num_drafts)
                dry = dries.get(row, state.dry)
                bias_by_id = state.bias(token_ids[row, :end], dry, must_end=must_end)
                added = {(ANY_TOKEN, id_): value for id_, value in bias_by_id.items()}
            if added:
                keys = np.array(list(added), np.int32)
                after.append(keys[:, 0])
                bias.add(entry, keys[:, 1], np.fromiter(added.values(), np.float32))
        joined = np.concatenate([NO_IDS, *after])
        batch.bias_after = joined if (joined != ANY_TOKEN).any() else None
        batch.bias_starts = bias.starts(len(rows))
        batch.bias_ids = np.concatenate([NO_IDS, *bias.ids])
        batch.bias_values = np.concatenate([NO_VALUES, *bias.values])

    def _get_masked_rows(self, rows: list[int], verifier: SampleVerifier | None) -> list[int]:
        """Returns the rows whose first samples are masked by their grammars."""
        masked_rows = dict.fromkeys(
            row
            for entry, row in enumerate(rows)
            if row in self.logits_states and not (verifier is not None and entry in verifier)
        )
        return list(masked_rows)

    def _make_mask(self, row: int, state: LogitsState, num_drafts: int) -> Bits | None:
        """Returns the tokens that both a row's grammar and its allowed ids allow after `num_drafts`
        draft tokens. Returns None if all are allowed.
        """
        allowed = state.allowed_mask
        legal = self._grammars.mask(row, num_drafts=num_drafts)
        if allowed is None or legal is None:
            return legal if allowed is None else allowed
        return allowed & legal

    def _make_logits_state(
        self, row: int, new: NewRequest, params: SamplingParams
    ) -> LogitsState | None:
        has_penalties = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        if not (
            has_penalties
            or params.logit_bias
            or params.min_tokens
            or params.bad_words_token_ids
            or params.allowed_token_ids
            or params.dry_multiplier
            or new.grammar
            or params.logits_processors
        ):
            return None
        num_prompt = new.num_prompt_tokens
        counts = None
        if has_penalties:
            counts = TokenCounts(new.token_ids[:num_prompt], new.token_ids[num_prompt:])
        state = LogitsState(
            logit_bias=params.logit_bias or {},
            end_token_ids=new.end_token_ids,
            num_prompt_tokens=num_prompt,
            num_known=len(new.token_ids),
            min_num_tokens=num_prompt + params.min_tokens,
            bad_words=params.bad_words_token_ids or [],
            counts=counts,
            allowed_mask=self._get_allowed_mask(params),
            dry=make_dry_matches(params),
            processors=params.logits_processors or [],
        )
        if new.grammar is not None or state.processors:
            skips_cutoffs = params.has_cutoffs_alone and not state.processors
            state.to_verify = SampleToVerify(
                row,
                num_drafts=0,
                allowed=state.allowed_mask,
                processors=state.processors,
                is_deferred=not (state.processors or skips_cutoffs) and params.depends_on_mask,
                is_free=not (
                    state.processors
                    or state.bad_words
                    or params.min_tokens
                    or params.allowed_token_ids is not None
                    or params.logit_bias
                ),
                skips_cutoffs=skips_cutoffs,
            )
        return state

    def _get_allowed_mask(self, params: SamplingParams) -> Bits | None:
        """Returns the mask `[ceil(V / 32)]` of the allowed ids; requests with the same ids share
        one array. Returns None if all are allowed.
        """
        if params.allowed_token_ids is None:
            return None
        key = tuple(sorted(params.allowed_token_ids))
        mask = self._masks.get(key)
        if mask is None:
            allowed = np.zeros((1, self._vocab_size), np.bool_)
            allowed[0, list(key)] = True
            mask = self._masks[key] = packed_masks(allowed)[0]
        return mask


def append_targets(batch: SamplingBatch, targets: NDArray[np.void]) -> None:
    """Appends records, `[num]` of SAMPLING_RECORD, without bias and history."""
    num = len(targets)
    batch.records = np.concatenate([batch.records, targets])
    if batch.deferred is not None:
        batch.deferred = np.pad(batch.deferred, (0, num))
    if batch.without_cutoffs is not None:
        batch.without_cutoffs = np.pad(batch.without_cutoffs, (0, num))
    if batch.counts_last is not None:
        batch.counts_last = np.pad(batch.counts_last, (0, num))
    batch.history_starts = np.pad(batch.history_starts, (0, num), "edge")
    batch.bias_starts = np.pad(batch.bias_starts, (0, num), "edge")
