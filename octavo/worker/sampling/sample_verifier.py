"""Optimistic sampling: sample first, verify the tokens against their grammars, and resample with a
mask only if needed. The result is exact, since a sample is the argmax of per-token scores: if the
grammar allows the token, masked sampling gives the same token.

A token that is not allowed is replaced by the only allowed token, or by the first allowed candidate
of the row; if there is none, the row is resampled with a mask. Rows with top_p, top_k or min_p are
sampled without these cut-offs, and accepted if a few other allowed tokens prove that the cut-offs
keep the token (`executor/sampling.py`). Rows whose filters depend on the mask
(`SamplingParams.depends_on_mask`) are deferred: they are sampled only once, with masks built in one
batch. Rows with logits processors are resampled from processed logits, and rows with mirostat after
each accepted draft token.

If structured outputs are to be completed before their length limit, a token that would make this
impossible is replaced by the next token of the shortest completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import Bits, Resample, SampledLogits, SampleResult, unpacked_mask
from octavo.worker.sampling.grammar_matchers import GrammarMatchers, TextPosition
from octavo.worker.sampling.logits_processors import Logits, LogitsProcessors, ProcessorFault
from octavo.worker.sampling.sequential_sampling import SequentialSampling

CLOSE_TOKENS = 128
"""Number of tokens before the length limit from which structured outputs are completed."""


class SampleToVerify(NamedTuple):
    row: int
    """Permanent row."""
    num_drafts: int
    """Number of draft tokens before the sample."""
    allowed: Bits | None
    """Ids that other options allow; None: all."""
    processors: Sequence[str]
    """Names of the logits processors of the row."""
    is_deferred: bool = False
    """Whether it is sampled only once its grammar's mask is known."""
    is_free: bool = False
    """Whether only its grammar may ban tokens."""
    skips_cutoffs: bool = False
    """Whether it is sampled without its cut-offs, with a cut-off proof."""
    closes: bool = False
    """Whether its text must be completed before its length limit."""
    is_search: bool = False
    """Whether a beam search reads its top logprobs, which must be those of allowed tokens."""


class SampleContexts(NamedTuple):
    """The texts of `S` samples: the first `ends [S]` of `token_ids [N, context]`."""

    token_ids: NDArray[np.int32]
    ends: NDArray[np.int32]
    max_num_tokens: Sequence[int]
    """Length limit of each text, `[S]`."""
    searches: Sequence[bool]
    """Whether each text is a beam's, `[S]`."""


@dataclass(slots=True)
class ResampleBuilder:
    """Collects the rows of a step to resample, by entry."""

    masks: dict[int, Bits] = field(default_factory=dict)
    logits: dict[int, Logits] = field(default_factory=dict)
    mirostat_mus: dict[int, float] = field(default_factory=dict)

    def build(self, *, is_last: bool) -> Resample | None:
        """Returns the rows to resample; None if there are none. Their samples are verified again
        unless `is_last`.
        """
        if not self.masks:
            return None
        logits = indices = mus = None
        if self.logits:
            order = {entry: index for index, entry in enumerate(self.logits)}
            indices = np.array([order.get(entry, -1) for entry in self.masks], np.int32)
            logits = np.stack(list(self.logits.values()))
        if self.mirostat_mus:
            bounds = [self.mirostat_mus.get(entry, np.nan) for entry in self.masks]
            mus = np.array(bounds, np.float32)
        return Resample(
            np.array(list(self.masks), np.int32),
            np.stack(list(self.masks.values())),
            logits,
            indices,
            mirostat_mus=mus,
            is_last=is_last,
        )


class SampleVerifier:
    """Verifies the samples of one step. A `batch.Verify`."""

    def __init__(
        self,
        to_verify: Mapping[int, SampleToVerify],
        grammars: GrammarMatchers,
        processors: LogitsProcessors,
        contexts: SampleContexts,
        sequential: Sequence[SequentialSampling] = (),
    ) -> None:
        """`to_verify`: by entry in the sampled rows."""
        self._to_verify = to_verify
        self._grammars = grammars
        self._processors = processors
        self._contexts = contexts
        self._faults: dict[int, str] = {}
        self._sequential = list(sequential)
        self._is_first = True
        """Whether the samples are verified for the first time."""
        self._processed: dict[int, Logits] = {}
        """Logits of rows after their logits processors."""
        self._to_close: list[int] = []
        """Resampled entries that must be checked again for whether their texts can be completed."""

    def __contains__(self, entry: int) -> bool:
        """Returns whether an entry needs no mask before the step."""
        return entry in self._to_verify

    def get_deferred(self, num_samples: int) -> NDArray[np.bool_] | None:
        """Returns which rows are sampled only once their masks are known, `[S]`. Returns None if
        there are none.
        """
        entries = [entry for entry, sample in self._to_verify.items() if sample.is_deferred]
        return _make_flags(entries, num_samples)

    def get_without_cutoffs(self, num_samples: int) -> NDArray[np.bool_] | None:
        """Returns which rows are sampled without cut-offs, `[S]`. Returns None if there are
        none.
        """
        entries = [entry for entry, sample in self._to_verify.items() if sample.skips_cutoffs]
        return _make_flags(entries, num_samples)

    def fault(self, entry: int) -> str:
        """Returns why an entry could not be sampled; "" if there was no error."""
        return self._faults.get(entry, "")

    def __call__(self, samples: SampleResult, sampled_logits: SampledLogits) -> Resample | None:
        """Replaces tokens that are not allowed by allowed candidates. Returns the rows to resample;
        None if there are none.
        """
        resample = ResampleBuilder()
        to_close, self._to_close = self._to_close, []
        if self._is_first:
            self._processed.clear()
            self._verify(samples, sampled_logits, resample)
            to_close = [entry for entry in self._to_verify if self._may_close(entry)]
        for entry in to_close:
            if entry in resample.masks:
                self._to_close.append(entry)
            elif not samples.failed[entry]:
                self._close(entry, samples, resample)
        self._sequential = [
            each for each in self._sequential if self._advance(each, samples, resample)
        ]
        self._is_first = not (self._to_close or self._sequential)
        return resample.build(is_last=self._is_first)

    def _advance(
        self, sequential: SequentialSampling, samples: SampleResult, resample: ResampleBuilder
    ) -> bool:
        """Advances a row with mirostat to its next sample after the current one is decided; returns
        whether there is one.
        """
        entry = sequential.entry
        if entry not in resample.masks:
            if not sequential.advance(samples):
                return False
            entry = sequential.entry
            resample.masks[entry] = sequential.mask
            if self._may_close(entry):
                self._to_close.append(entry)
        resample.mirostat_mus[entry] = sequential.mu
        if entry in self._processed:
            resample.logits[entry] = self._processed[entry]
        return True

    def _verify(
        self, samples: SampleResult, sampled_logits: SampledLogits, resample: ResampleBuilder
    ) -> None:
        token_ids, failed = samples.token_ids.tolist(), samples.failed.tolist()
        proofs = [] if samples.proof_tokens is None else samples.proof_tokens.tolist()
        rejected, to_mask = [], []
        for entry, sample in self._to_verify.items():
            if sample.is_search:
                self._search(entry, sample, samples, sampled_logits.logits(entry))
            elif sample.processors:
                self._process(entry, sample, samples, sampled_logits, resample)
            elif sample.is_deferred or failed[entry]:
                to_mask.append(entry)
            elif sample.skips_cutoffs:
                is_accepted = self._accept_proof(sample, proofs[entry])
                if not (is_accepted or self._set_only_token(entry, sample, samples, resample)):
                    to_mask.append(entry)
            elif not (
                self._accept(sample, token_ids[entry])
                or self._set_only_token(entry, sample, samples, resample)
            ):
                rejected.append(entry)
        if rejected:
            to_mask += self._replace(rejected, samples, sampled_logits, resample)
        if to_mask:
            self._mask_all(to_mask, resample)

    def _search(
        self, entry: int, sample: SampleToVerify, samples: SampleResult, logits: Logits
    ) -> None:
        """Sets the logprobs of a beam to those of its best allowed tokens."""
        if samples.failed[entry]:
            return
        legal = unpacked_mask(self._make_mask(sample), len(logits))
        samples.failed[entry] = not legal.any()
        write_best_legal(samples, entry, logits, legal)

    def _may_close(self, entry: int) -> bool:
        """Returns whether a sample is near its text's length limit."""
        sample = self._to_verify.get(entry)
        if sample is None or not sample.closes:
            return False
        num_left = self._contexts.max_num_tokens[entry] - int(self._contexts.ends[entry])
        return num_left <= CLOSE_TOKENS

    def _close(self, entry: int, samples: SampleResult, resample: ResampleBuilder) -> None:
        """Replaces a token by the next token of the shortest completion if the text could not be
        completed after it.
        """
        sample, num_tokens = self._to_verify[entry], int(self._contexts.ends[entry])
        position = TextPosition(sample.row, num_tokens, sample.num_drafts)
        num_left = self._contexts.max_num_tokens[entry] - num_tokens
        token_id = int(samples.token_ids[entry])
        if self._grammars.can_complete_after(position, token_id, num_left - 1):
            return
        completion = self._grammars.find_completion(position, num_left)
        if completion and completion[0] != token_id:
            self._set(entry, completion[0], samples, resample)

    def _set(
        self, entry: int, token_id: int, samples: SampleResult, resample: ResampleBuilder
    ) -> None:
        """Sets an entry's token. If logprobs are requested, resamples it with a mask that allows
        only this token.
        """
        if samples.logprobs is None:
            samples.token_ids[entry] = token_id
        else:
            resample.masks[entry] = self._grammars.make_token_mask(token_id)

    def _replace(
        self,
        rejected: Sequence[int],
        samples: SampleResult,
        sampled_logits: SampledLogits,
        resample: ResampleBuilder,
    ) -> list[int]:
        """Sets the first allowed candidate of each entry; returns the entries that have none."""
        left = []
        candidates = sampled_logits.candidates(np.array(rejected, np.int32)).tolist()
        for entry, ids in zip(rejected, candidates, strict=True):
            sample = self._to_verify[entry]
            token_id = next((i for i in ids if i >= 0 and self._accept(sample, i)), None)
            if token_id is None:
                left.append(entry)
            else:
                self._set(entry, token_id, samples, resample)
        return left

    def _mask_all(self, entries: Sequence[int], resample: ResampleBuilder) -> None:
        """Resamples entries with the masks of their grammars, which are built in one batch."""
        samples = [self._to_verify[entry] for entry in entries]
        self._grammars.make_masks([sample.row for sample in samples if not sample.num_drafts])
        for entry, sample in zip(entries, samples, strict=True):
            resample.masks[entry] = self._make_mask(sample)

    def _process(
        self,
        entry: int,
        sample: SampleToVerify,
        samples: SampleResult,
        sampled_logits: SampledLogits,
        resample: ResampleBuilder,
    ) -> None:
        logits = sampled_logits.logits(entry)
        if np.isnan(logits).any():
            return  # the sample has already failed
        token_ids = self._contexts.token_ids[sample.row, : self._contexts.ends[entry]]
        try:
            processed = self._processors.apply(sample.processors, token_ids, logits)
        except ProcessorFault as error:
            self._faults[entry] = str(error)
            samples.failed[entry] = True
            return
        self._processed[entry] = resample.logits[entry] = processed
        resample.masks[entry] = self._make_mask(sample)

    def _set_only_token(
        self, entry: int, sample: SampleToVerify, samples: SampleResult, resample: ResampleBuilder
    ) -> bool:
        """Sets the only token that an entry's grammar allows; returns False if there are
        several.
        """
        if sample.num_drafts or not sample.is_free:
            return False
        token_id = self._grammars.only_token(sample.row)
        if token_id is None or not self._accept(sample, token_id):
            return False
        self._set(entry, token_id, samples, resample)
        return True

    def _accept_proof(self, sample: SampleToVerify, proof: Sequence[int]) -> bool:
        """Returns whether the cut-off proof shows that the token sampled without cut-offs is also
        the masked sample with them. The proof begins with the token and is terminated by -1.
        """
        token_id, *others = proof
        for other in others:
            if other < 0:
                break
            if not self._grammars.allows(sample.row, other, num_drafts=sample.num_drafts):
                return False
        return token_id >= 0 and self._accept(sample, token_id)

    def _accept(self, sample: SampleToVerify, token_id: int) -> bool:
        """Returns whether a token is allowed. A row's main matcher accepts it immediately, unless
        other tokens are checked first.
        """
        if sample.num_drafts or sample.closes:
            return self._grammars.allows(sample.row, token_id, num_drafts=sample.num_drafts)
        return self._grammars.try_accept(sample.row, token_id)

    def _make_mask(self, sample: SampleToVerify) -> Bits:
        legal = self._grammars.mask_or_empty(sample.row, num_drafts=sample.num_drafts)
        return legal if sample.allowed is None else legal & sample.allowed


def _make_flags(entries: Sequence[int], num_samples: int) -> NDArray[np.bool_] | None:
    """Returns `[S]` with these entries True. Returns None if there are none."""
    if not entries:
        return None
    flags = np.zeros(num_samples, np.bool_)
    flags[entries] = True
    return flags


def write_best_legal(
    samples: SampleResult, entry: int, logits: NDArray[np.float32], legal: NDArray[np.bool_]
) -> None:
    """Sets an entry to the best allowed token, and its top list to the best ones in the order
    (logit down, id up), padded with logprobs of minus infinity.

    `logits [V]` are the row's logits, `legal [V]` marks the allowed tokens.

    Source: transformers' prefix_allowed_tokens_fn, which sets the logprobs of other tokens to minus
    infinity.
    """
    assert samples.logprobs is not None and samples.ranks is not None
    assert samples.top_ids is not None and samples.top_logprobs is not None
    raw = logits.astype(np.float64)
    ids = np.flatnonzero(legal & np.isfinite(raw))
    best = ids[np.argsort(-raw[ids], kind="stable")][: samples.top_ids.shape[1]]
    samples.top_ids[entry], samples.top_logprobs[entry] = 0, -np.inf
    if not len(best):
        return
    largest = raw.max()
    logprobs = raw[best] - (largest + np.log(np.exp(raw - largest).sum()))
    samples.top_ids[entry, : len(best)] = best
    samples.top_logprobs[entry, : len(best)] = logprobs
    first, logit = int(best[0]), raw[best[0]]
    samples.token_ids[entry] = first
    samples.logprobs[entry] = logprobs[0]
    better = raw > logit
    better[:first] |= raw[:first] == logit
    samples.ranks[entry] = 1 + int(better.sum())
