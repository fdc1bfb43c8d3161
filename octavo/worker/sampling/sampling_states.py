"""The sampling state of every running request: one record per row, so that a step's SamplingBatch
is one gather.

What few requests want (bias, bans, penalties, allowed ids) lies beside the records and costs only
the requests that want it. Owns no logits and draws nothing, which is the backend's work; the rules
are in `executor/sampling.py`.
"""

from __future__ import annotations

import operator
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.api.sampling_params import OPTIONS, SamplingParams
from octavo.engine.protocol.step import NewRequest
from octavo.executor.batch import (
    Bits,
    SamplingBatch,
    make_record,
    mask_words,
    packed_masks,
    sampling_records,
)
from octavo.worker.csr import Csr
from octavo.worker.sampling.dry import DryMatches, dry_matches
from octavo.worker.sampling.grammar_matchers import GrammarMatchers
from octavo.worker.sampling.logits_processors import LogitsProcessors
from octavo.worker.sampling.logits_state import ANY_TOKEN, LogitsState
from octavo.worker.sampling.sample_verifier import SampleToVerify, SampleVerifier, Texts
from octavo.worker.sampling.sequential_sampling import MirostatRule, SequentialSampling
from octavo.worker.sampling.token_counts import TokenCounts

NO_IDS = np.zeros(0, np.int32)
NO_VALUES = np.zeros(0, np.float32)

get_record_options = operator.attrgetter(*OPTIONS.record)
"""Returns the options of SamplingParams that are in the sampling record."""


class Masks:
    """The distinct masks of a step's rows, in the order in which they are first met."""

    def __init__(self) -> None:
        self.arrays: list[Bits] = []
        self._places: dict[int, int] = {}

    def place(self, mask: Bits) -> int:
        """Returns a mask's place. Rows that allow the same ids share one array, so identity tells
        masks apart.
        """
        place = self._places.setdefault(id(mask), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(mask)
        return place


class SamplingStates:
    """Owns the sampling records of `N` permanent rows."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        grammars: GrammarMatchers,
        processors: LogitsProcessors,
        closes: bool,
    ) -> None:
        """`closes`: answers of a given form are completed before their length ends."""
        self._vocab_size = vocab_size
        self._closes = closes
        self._grammars = grammars
        self._processors = processors
        self._records = sampling_records(max_rows)
        self.logits_states: dict[int, LogitsState] = {}
        """What rows have beside their record, by row."""
        self._mirostats: dict[int, MirostatRule] = {}
        self._all_tokens = packed_masks(np.ones((1, vocab_size), np.bool_))[0]
        self._listed: dict[int, NDArray[np.int32]] = {}
        """Tokens whose logprobs are wanted, by row."""
        self._masks: WeakValueDictionary[tuple[int, ...], Bits] = WeakValueDictionary()

    def add(self, row: int, new: NewRequest) -> None:
        """Fills a row from a request's parameters; position and mask are set with each step."""
        params = new.params
        assert isinstance(params, SamplingParams), "a row that draws has the params of its draws"
        mu = 2 * params.mirostat_tau if new.mirostat_mu is None else new.mirostat_mu
        values = dict(zip(OPTIONS.record, get_record_options(params), strict=True)) | {
            "seed": new.seed & 0xFFFF_FFFF_FFFF_FFFF,
            "sample_index": new.sample_index,
            "num_logprobs": self._num_logprobs(params),
            "mirostat_mu": mu,
        }
        self._records[row] = make_record(values)
        if params.logprob_token_ids is not None:
            self._listed[row] = np.array(params.logprob_token_ids, np.int32)
        if params.mirostat_mode:
            self._mirostats[row] = MirostatRule(params.mirostat_tau, params.mirostat_eta)
        state = self._make_logits_state(row, new, params)
        if state is not None:
            self.logits_states[row] = state

    def free(self, row: int) -> None:
        """Drops what a row holds beside its record."""
        self._mirostats.pop(row, None)
        self._listed.pop(row, None)
        self.logits_states.pop(row, None)

    def close(self) -> None:
        """Ends what calls logits processors."""
        self._processors.close()

    def num_top(self, num_logprobs: int) -> int:
        """Returns how many top alternatives `num_logprobs` means; -1 is the whole vocabulary."""
        return self._vocab_size if num_logprobs == -1 else min(num_logprobs, self._vocab_size)

    def listed(self, row: int) -> NDArray[np.int32] | None:
        """Returns the tokens whose logprobs a row wants besides its own; None for the best ones."""
        return self._listed.get(row)

    def _num_logprobs(self, params: SamplingParams) -> int:
        """Returns the record's number of best alternatives."""
        if params.logprobs is None:
            return -1
        return 0 if params.logprob_token_ids is not None else self.num_top(params.logprobs)

    @property
    def may_verify(self) -> bool:
        """Whether any row may have samples to verify."""
        return bool(self.logits_states or self._mirostats)

    def surprised(self, row: int, surprise: float) -> float | None:
        """Moves the bound of a row's mirostat after a token of `surprise` bits; returns it, rounded
        as it is kept, or None without mirostat.
        """
        rule = self._mirostats.get(row)
        if rule is None:
            return None
        mu = rule.after(float(self._records["mirostat_mu"][row]), surprise)
        self._records["mirostat_mu"][row] = mu
        return mu

    def samples_sequentially(self, row: int) -> bool:
        """Returns whether how a row is drawn changes with what it drew before, not with its tokens
        alone.
        """
        return row in self._mirostats

    def accept_token(self, row: int, token_id: int) -> None:
        """Counts a row's sampled token."""
        state = self.logits_states.get(row)
        if state is not None:
            state.accept_token(token_id)

    def may_append(self, row: int, token_id: int, num_tokens: int) -> bool:
        """Returns whether the one token that a grammar allows after `num_tokens` is taken without a
        draw: nothing else may ban it, and no logprob of it is wanted.
        """
        state, record = self.logits_states.get(row), self._records[row]
        if state is None or record["num_logprobs"] >= 0 or row in self._mirostats:
            return False
        if state.bad_words or state.allowed_mask is not None or state.processors:
            return False
        is_banned = num_tokens < state.min_num_tokens and token_id in state.end_token_ids
        return not is_banned or self._grammars.is_complete(row)

    def must_verify(self, row: int, *, has_drafts: bool, is_search: bool) -> bool:
        """Returns whether a row's draws have to be looked at once they are made."""
        if has_drafts and row in self._mirostats:
            return True
        state = self.logits_states.get(row)
        if state is None:
            return False
        return bool(state.processors) or ((self._closes or is_search) and row in self._grammars)

    def make_verifier(self, rows: NDArray[np.intp], texts: Texts) -> SampleVerifier | None:
        """Returns which of the draws from `rows [S]` after `texts` are looked at once they are
        made; None where none is.
        """
        if not (self.logits_states or self._mirostats):
            return None
        checked: dict[int, SampleToVerify] = {}
        in_turn: dict[int, list[int]] = {}
        known: dict[int, int] = {}
        for entry, (row, end) in enumerate(zip(rows.tolist(), texts.ends.tolist(), strict=True)):
            draw = self._checked_draw(row, end, end - known.setdefault(row, end), texts, entry)
            if draw is not None:
                checked[entry] = draw
            if row in self._mirostats:
                in_turn.setdefault(row, []).append(entry)
        chains = [
            self._in_turn(
                row,
                entries,
                texts.token_ids[row, known[row] : texts.ends[entries[-1]]].tolist(),
            )
            for row, entries in in_turn.items()
            if len(entries) > 1
        ]
        if not (checked or chains):
            return None
        return SampleVerifier(checked, self._grammars, self._processors, texts, chains)

    def _checked_draw(
        self, row: int, num_tokens: int, num_drafts: int, texts: Texts, entry: int
    ) -> SampleToVerify | None:
        """Returns what is looked at of a draw after `num_tokens`, the last of them guesses; None
        where nothing is.
        """
        state = self.logits_states.get(row)
        if state is None or state.to_verify is None:
            return None
        if texts.searches[entry]:
            return state.to_verify._replace(
                num_drafts=num_drafts, is_search=True, skips_cutoffs=False
            )
        closes = self._closes and self._may_close(row, state, num_tokens)
        if not (num_drafts or closes):
            return state.to_verify
        return state.to_verify._replace(num_drafts=num_drafts, closes=closes)

    def _may_close(self, row: int, state: LogitsState, num_tokens: int) -> bool:
        """Returns whether a row's text is completed before its length ends: its grammar alone says
        what may come.
        """
        is_free = state.allowed_mask is None and not state.bad_words
        is_long_enough = num_tokens >= state.min_num_tokens
        return row in self._grammars and is_free and is_long_enough

    def _in_turn(self, row: int, entries: list[int], draft_ids: list[int]) -> SequentialSampling:
        """Returns the draws of a row, of which each but the first comes after a guess."""
        state = self.logits_states.get(row)
        masks = [
            None if state is None else self._mask(row, state, num_drafts)
            for num_drafts in range(1, len(entries))
        ]
        return SequentialSampling(
            self._mirostats[row],
            float(self._records["mirostat_mu"][row]),
            entries[0],
            draft_ids,
            [self._all_tokens if mask is None else mask for mask in masks],
        )

    def plain_records(self, rows: NDArray[np.intp], ends: NDArray[np.int32]) -> NDArray[np.void]:
        """Returns how `rows [S]` draw after their first `ends [S]` tokens, without what needs more
        than a record or changes from draw to draw, and without logprobs.
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
        """Returns how to draw from `rows [S]`, each after the first `ends [S]` of its `token_ids
        [N, context]`. Rows that `checks` has get no mask of their grammars. A row that occurs
        several times is drawn from after guesses: those behind its first end. The last token of a
        row may be known to the device alone.
        """
        records = self._records[rows]
        records["position"] = ends
        starts = np.zeros(len(rows) + 1, np.int32)
        batch = SamplingBatch(
            records=records,
            history_starts=starts,
            history_ids=NO_IDS,
            history_counts=NO_IDS,
            bias_starts=starts,
            bias_ids=NO_IDS,
            bias_values=NO_VALUES,
            allowed_masks=np.zeros((0, mask_words(self._vocab_size)), np.uint32),
        )
        if self.logits_states:
            self._add_extras(batch, rows.tolist(), token_ids, ends.tolist(), verifier)
        if verifier is not None:
            batch.keeps_logits = True
            batch.late, batch.uncut = verifier.late(len(rows)), verifier.uncut(len(rows))
        return batch

    def follows_tokens(self, rows: NDArray[np.intp]) -> bool:
        """Returns whether what is added to the logits of some of `rows [S]`, or a bound of
        mirostat, changes with their tokens.
        """
        if not (self.logits_states or self._mirostats):
            return False
        state = [self.logits_states[row] for row in rows.tolist() if row in self.logits_states]
        return any(each.follows_tokens for each in state) or not self._mirostats.keys().isdisjoint(
            rows.tolist()
        )

    def follow(
        self,
        batch: SamplingBatch,
        rows: NDArray[np.intp],
        token_ids: NDArray[np.int32],
        ends: NDArray[np.int32],
    ) -> None:
        """Sets in a batch that was gathered from `rows [S]` what follows from the tokens
        that these have by now, `ends [S]` of them. Prompt tokens and others that the batch has
        behind these rows stay as they are.
        """
        batch.records["mirostat_mu"][: len(rows)] = self._records["mirostat_mu"][rows]
        self._add_bias(batch, rows.tolist(), token_ids, ends.tolist())
        num_targets = len(batch.records) - len(rows)
        batch.bias_starts = np.pad(batch.bias_starts, (0, num_targets), "edge")

    def _add_extras(
        self,
        batch: SamplingBatch,
        rows: list[int],
        token_ids: NDArray[np.int32],
        ends: list[int],
        verifier: SampleVerifier | None,
    ) -> None:
        self._add_bias(batch, rows, token_ids, ends)
        history, masks = Csr(), Masks()
        lags = np.zeros(len(rows), np.bool_)
        known: dict[int, int] = {}
        self._grammars.make_masks(self._masked_rows(rows, verifier))
        for entry, (row, end) in enumerate(zip(rows, ends, strict=True)):
            state = self.logits_states.get(row)
            if state is None:
                continue
            num_drafts = end - known.setdefault(row, end)
            if state.counts is not None:
                guesses = token_ids[row, end - num_drafts : end]
                history.add(entry, *state.counts.arrays_after(guesses.tolist()))
                lags[entry] = state.lags(end - num_drafts)
            is_checked = verifier is not None and entry in verifier
            mask = state.allowed_mask if is_checked else self._mask(row, state, num_drafts)
            if mask is not None:
                batch.records["allowed_mask"][entry] = masks.place(mask)
        if history.ids:
            batch.history_starts = history.starts(len(rows))
            batch.history_ids = np.concatenate(history.ids)
            batch.history_counts = np.concatenate(history.values)
            batch.counts_last = lags if lags.any() else None
        if masks.arrays:
            batch.allowed_masks = np.stack(masks.arrays)

    def _add_bias(
        self, batch: SamplingBatch, rows: list[int], token_ids: NDArray[np.int32], ends: list[int]
    ) -> None:
        """Sets what is added to the logits of the rows, each after its first tokens."""
        bias, known = Csr(), dict[int, int]()
        after: list[NDArray[np.int32]] = []
        dries: dict[int, DryMatches] = {}
        for entry, (row, end) in enumerate(zip(rows, ends, strict=True)):
            state = self.logits_states.get(row)
            num_drafts = end - known.setdefault(row, end)
            if state is None or not state.may_bias(end):
                continue
            if num_drafts == 1 and state.dry is not None:
                dries[row] = state.dry.copy()
            if state.lags(end - num_drafts):
                added = state.bias_after(token_ids[row, : end - 1])
            else:
                must_end = self._grammars.is_complete(row, num_drafts=num_drafts)
                dry = dries.get(row, state.dry)
                found = state.bias(token_ids[row, :end], dry, must_end=must_end)
                added = {(ANY_TOKEN, id_): value for id_, value in found.items()}
            if added:
                keys = np.array(list(added), np.int32)
                after.append(keys[:, 0])
                bias.add(entry, keys[:, 1], np.fromiter(added.values(), np.float32))
        joined = np.concatenate([NO_IDS, *after])
        batch.bias_after = joined if (joined != ANY_TOKEN).any() else None
        batch.bias_starts = bias.starts(len(rows))
        batch.bias_ids = np.concatenate([NO_IDS, *bias.ids])
        batch.bias_values = np.concatenate([NO_VALUES, *bias.values])

    def _masked_rows(self, rows: list[int], verifier: SampleVerifier | None) -> list[int]:
        """Returns the rows whose first draws have the masks of their grammars."""
        found = dict.fromkeys(
            row
            for entry, row in enumerate(rows)
            if row in self.logits_states and not (verifier is not None and entry in verifier)
        )
        return list(found)

    def _mask(self, row: int, state: LogitsState, num_drafts: int) -> Bits | None:
        """Returns the tokens that a row may draw after `num_drafts` guesses, by its grammar and
        its allowed ids.
        """
        allowed = state.allowed_mask
        legal = self._grammars.mask(row, num_drafts=num_drafts)
        if allowed is None or legal is None:
            return legal if allowed is None else allowed
        return allowed & legal

    def _make_logits_state(
        self, row: int, new: NewRequest, params: SamplingParams
    ) -> LogitsState | None:
        penalised = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        wanted = (
            params.logit_bias,
            params.min_tokens,
            params.bad_words_token_ids,
            params.allowed_token_ids,
            penalised,
            params.dry_multiplier,
            new.grammar,
            params.logits_processors,
        )
        if not any(wanted):
            return None
        num_prompt = new.num_prompt_tokens
        state = LogitsState(
            logit_bias=params.logit_bias or {},
            end_token_ids=new.end_token_ids,
            num_prompt_tokens=num_prompt,
            num_known=len(new.token_ids),
            min_num_tokens=num_prompt + params.min_tokens,
            bad_words=params.bad_words_token_ids or [],
            counts=TokenCounts(new.token_ids[:num_prompt], new.token_ids[num_prompt:])
            if penalised
            else None,
            allowed_mask=self._allowed_mask(params),
            dry=dry_matches(params),
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

    def _allowed_mask(self, params: SamplingParams) -> Bits | None:
        """Returns the mask `[ceil(V / 32)]` of the allowed ids, one array for all requests with the
        same ones.
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
    """Appends records `[num]` of SAMPLING_RECORD that have neither bias nor history."""
    num = len(targets)
    batch.records = np.concatenate([batch.records, targets])
    if batch.late is not None:
        batch.late = np.pad(batch.late, (0, num))
    if batch.uncut is not None:
        batch.uncut = np.pad(batch.uncut, (0, num))
    if batch.counts_last is not None:
        batch.counts_last = np.pad(batch.counts_last, (0, num))
    batch.history_starts = np.pad(batch.history_starts, (0, num), "edge")
    batch.bias_starts = np.pad(batch.bias_starts, (0, num), "edge")
