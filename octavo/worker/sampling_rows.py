"""The sampling state of every running request: one record per row, so that a step's SamplingBatch
is one gather.

What few requests want (bias, bans, penalties, allowed ids) lies beside the records and costs only
the requests that want it. Owns no logits and draws nothing, which is the backend's work; the rules
are in `backends/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.backends.batch import (
    Bits,
    SamplingBatch,
    mask_words,
    packed_masks,
    sampling_records,
)
from octavo.sampling_params import SamplingParams
from octavo.step import NewRow
from octavo.worker.checked_draws import CheckedDraws
from octavo.worker.dry import DryMatches, dry_matches
from octavo.worker.grammar_rows import GrammarRows

MINUS_INFINITY = float("-inf")
NO_IDS = np.zeros(0, np.int32)
NO_VALUES = np.zeros(0, np.float32)


class TokenCounts:
    """The distinct tokens of a request and how often each was generated (0: in the prompt only)."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        for token_id in prompt_ids:
            self.add(token_id, generated=0)
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int, *, generated: int = 1) -> None:
        """Counts a token, `generated` times (0 for one of the prompt)."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += generated

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids and their counts, `[distinct]` each."""
        num = len(self._place)
        return self._ids[:num], self._counts[:num]


@dataclass(slots=True)
class RowExtras:
    """One request's sampling options that most requests do not have."""

    logit_bias: dict[int, float]
    end_token_ids: list[int]
    num_prompt_tokens: int
    min_num_tokens: int
    """Number of tokens, prompt included, below which `end_token_ids` are banned."""
    bad_words: list[list[int]]
    counts: TokenCounts | None
    """Tokens that penalties apply to; None without a penalty."""
    allowed_mask: Bits | None
    """[ceil(V / 32)]; None allows all."""
    dry: DryMatches | None
    """Repetitions that DRY penalises; None without it."""
    draws_first: bool
    """Whether a grammar may be checked once the token is drawn."""

    def bias(self, token_ids: NDArray[np.int32], *, must_end: bool = False) -> dict[int, float]:
        """Returns what is added to the logits of the token after `token_ids [num_tokens]`. Where
        the text `must_end`, its end is not banned.
        """
        bias = self._bias(token_ids, must_end=must_end)
        if self.dry is None:
            return bias
        penalties = self.dry.penalties(token_ids)
        return bias | {id_: bias.get(id_, 0.0) - lost for id_, lost in penalties.items()}

    def _bias(self, token_ids: NDArray[np.int32], *, must_end: bool) -> dict[int, float]:
        ends_banned = len(token_ids) < self.min_num_tokens and not must_end
        if not ends_banned and not self.bad_words:
            return self.logit_bias
        bias = dict(self.logit_bias)
        if ends_banned:
            bias.update(dict.fromkeys(self.end_token_ids, MINUS_INFINITY))
        output_ids = token_ids[self.num_prompt_tokens :]
        for word in self.bad_words:
            prefix = word[:-1]
            if (
                len(prefix) <= len(output_ids)
                and output_ids[len(output_ids) - len(prefix) :].tolist() == prefix
            ):
                bias[word[-1]] = MINUS_INFINITY
        return bias


@dataclass(slots=True)
class Csr:
    """Lists of (id, value) of varying length, one per entry, joined end to end."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    values: list[NDArray] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, entry: int, ids: NDArray[np.int32], values: NDArray) -> None:
        """Appends the list of `entry`; entries come in rising order."""
        self.ids.append(ids)
        self.values.append(values)
        self.sizes[entry] = len(ids)

    def starts(self, num_entries: int) -> NDArray[np.int32]:
        """Returns where each entry's list begins, `[num_entries + 1]`."""
        sizes = np.zeros(num_entries + 1, np.int32)
        for entry, size in self.sizes.items():
            sizes[entry + 1] = size
        return np.cumsum(sizes, dtype=np.int32)


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


class SamplingRows:
    """Owns the sampling records of `N` permanent rows."""

    def __init__(self, *, max_rows: int, vocab_size: int, grammars: GrammarRows) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._records = sampling_records(max_rows)
        self._extras: dict[int, RowExtras] = {}
        self._mirostats: dict[int, tuple[float, float]] = {}
        """Surprise aimed at, and share of the error that is corrected, by row."""
        self._listed: dict[int, NDArray[np.int32]] = {}
        """Tokens whose logprobs are wanted, by row."""
        self._masks: WeakValueDictionary[tuple[int, ...], Bits] = WeakValueDictionary()

    def add(self, row: int, new: NewRow) -> None:
        """Fills a row from a request's parameters; position and mask are set with each step."""
        params = new.params
        assert isinstance(params, SamplingParams), "a row that draws has the params of its draws"
        self._records[row : row + 1] = sampling_records(
            1,
            seed=new.seed & 0xFFFF_FFFF_FFFF_FFFF,
            sample_index=new.sample_index,
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            top_n_sigma=params.top_n_sigma,
            dynatemp_range=params.dynatemp_range,
            dynatemp_exponent=params.dynatemp_exponent,
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
            mirostat_mode=params.mirostat_mode,
            mirostat_mu=2 * params.mirostat_tau if new.mirostat_mu is None else new.mirostat_mu,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            top_k=params.top_k,
            num_logprobs=self._num_logprobs(params),
        )
        if params.logprob_token_ids is not None:
            self._listed[row] = np.array(params.logprob_token_ids, np.int32)
        if params.mirostat_mode:
            self._mirostats[row] = (params.mirostat_tau, params.mirostat_eta)
        extras = self._make_extras(new, params)
        if extras is not None:
            self._extras[row] = extras

    def free(self, row: int) -> None:
        """Drops what a row holds beside its record."""
        self._mirostats.pop(row, None)
        self._listed.pop(row, None)
        self._extras.pop(row, None)

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
    def has_extras(self) -> bool:
        """Whether any row has more than its record."""
        return bool(self._extras)

    def surprised(self, row: int, surprise: float) -> float | None:
        """Moves the bound of a row's mirostat after a token of so many bits; returns it, rounded as
        it is kept, or None without mirostat.
        """
        if row not in self._mirostats:
            return None
        tau, eta = self._mirostats[row]
        mu = float(self._records["mirostat_mu"][row]) - eta * (surprise - tau)
        self._records["mirostat_mu"][row] = mu
        return float(self._records["mirostat_mu"][row])

    def took(self, row: int, token_id: int) -> None:
        """Counts a row's sampled token for its penalties."""
        extras = self._extras.get(row)
        if extras is not None and extras.counts is not None:
            extras.counts.add(token_id)

    def checks(self, rows: NDArray[np.intp]) -> CheckedDraws | None:
        """Returns which of the draws from `rows [S]` are checked once they are made, against
        grammars; None where none is.
        """
        checked, allowed = {}, {}
        for entry, row in enumerate(rows.tolist() if self._extras else ()):
            extras = self._extras.get(row)
            if extras is not None and extras.draws_first and row in self._grammars:
                checked[entry] = row
                if extras.allowed_mask is not None:
                    allowed[entry] = extras.allowed_mask
        return CheckedDraws(self._grammars, checked, allowed) if checked else None

    def gather(
        self,
        rows: NDArray[np.intp],
        token_ids: NDArray[np.int32],
        ends: NDArray[np.int32],
        checks: CheckedDraws | None = None,
    ) -> SamplingBatch:
        """Returns how to draw from `rows [S]`, each after the first `ends [S]` of its `token_ids
        [N, context]`. Rows that `checks` has get no mask of their grammars.
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
        if self._extras:
            self._add_extras(batch, rows.tolist(), token_ids, ends, checks)
        batch.keeps_logits = checks is not None
        return batch

    def _add_extras(
        self,
        batch: SamplingBatch,
        rows: list[int],
        token_ids: NDArray[np.int32],
        ends: NDArray[np.int32],
        checks: CheckedDraws | None,
    ) -> None:
        bias, history = Csr(), Csr()
        masks = Masks()
        for entry, row in enumerate(rows):
            extras = self._extras.get(row)
            if extras is None:
                continue
            must_end = self._grammars.is_complete(row)
            if added := extras.bias(token_ids[row, : ends[entry]], must_end=must_end):
                ids = np.fromiter(added.keys(), np.int32)
                bias.add(entry, ids, np.fromiter(added.values(), np.float32))
            if extras.counts is not None:
                history.add(entry, *extras.counts.arrays())
            is_checked = checks is not None and entry in checks
            mask = extras.allowed_mask if is_checked else self._mask(row, extras)
            if mask is not None:
                batch.records["allowed_mask"][entry] = masks.place(mask)
        if bias.ids:
            batch.bias_starts = bias.starts(len(rows))
            batch.bias_ids = np.concatenate(bias.ids)
            batch.bias_values = np.concatenate(bias.values)
        if history.ids:
            batch.history_starts = history.starts(len(rows))
            batch.history_ids = np.concatenate(history.ids)
            batch.history_counts = np.concatenate(history.values)
        if masks.arrays:
            batch.allowed_masks = np.stack(masks.arrays)

    def _mask(self, row: int, extras: RowExtras) -> Bits | None:
        """Returns the tokens that a row may draw, by its grammar and its allowed ids."""
        allowed, legal = extras.allowed_mask, self._grammars.mask(row)
        if allowed is None or legal is None:
            return legal if allowed is None else allowed
        return allowed & legal

    def _make_extras(self, new: NewRow, params: SamplingParams) -> RowExtras | None:
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
        )
        if not any(wanted):
            return None
        num_prompt = new.num_prompt_tokens
        return RowExtras(
            logit_bias=params.logit_bias or {},
            end_token_ids=new.end_token_ids,
            num_prompt_tokens=num_prompt,
            min_num_tokens=num_prompt + params.min_tokens,
            bad_words=params.bad_words_token_ids or [],
            counts=TokenCounts(new.token_ids[:num_prompt], new.token_ids[num_prompt:])
            if penalised
            else None,
            allowed_mask=self._allowed_mask(params),
            dry=dry_matches(params),
            draws_first=not params.depends_on_mask,
        )

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
    batch.history_starts = np.pad(batch.history_starts, (0, num), "edge")
    batch.bias_starts = np.pad(batch.bias_starts, (0, num), "edge")
