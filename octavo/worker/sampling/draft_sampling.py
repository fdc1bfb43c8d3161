"""Samples draft tokens with the same noise as the samples that will verify them.

A sample is the argmax of z / T + g. If the draft model's logits are close to the model's, the same
noise g usually gives the same token: at temperature 1 about twice as often as the draft model's
most likely token. Filters of a row also apply to its draft tokens; penalties, bans and grammars,
which need more than a sampling record, do not. Source: Daliri, Musco and Suresh 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import SampleResult, SamplingBatch
from octavo.executor.noise import gumbel, noise_words_for
from octavo.worker.sampling.sampling_states import SamplingStates

NUM_CANDIDATES = 64
"""Number of most likely tokens from which a draft head with a separate vocabulary samples."""


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Token ids of a draft model, and their relation to the target model's ids."""

    num_inputs: int
    """Number of ids in its embedding."""
    num_outputs: int
    """Number of ids that it samples."""
    num_common: int
    """Number of ids that are tokens of both models."""
    offsets: NDArray[np.int64] | None = None
    """Offset from each sampled id to the target model's id; None: the ids are the same."""


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """One step's samples of a draft model."""

    ids: DraftVocabulary
    records: NDArray[np.void]
    """Sampling records with which the rows will sample the drafted positions, `[S]` of
    SAMPLING_RECORD.
    """
    width: int = 1
    """Number of draft tokens at each position: the sampled one and alternatives."""

    @staticmethod
    def build(
        rows: NDArray[np.intp],
        ends: NDArray[np.int32],
        sampling: SamplingStates,
        ids: DraftVocabulary,
        width: int = 1,
    ) -> DraftSampling:
        """Returns one sample for each of `rows [S]`, after its first `ends [S]` tokens."""
        records = sampling.plain_records(rows, ends)
        records["top_k"] = np.minimum(records["top_k"], ids.num_outputs)
        return DraftSampling(ids, records, width)

    def make_batch(self) -> SamplingBatch:
        """Returns how the draft model samples. A draft head with a separate vocabulary returns its
        most likely tokens instead; the noise of the target model's ids is added afterwards.
        """
        records = self.records
        num_candidates = min(NUM_CANDIDATES, self.ids.num_outputs)
        if self.ids.offsets is not None or self.width > 1:
            records = records.copy()
            num_greedy = min(self.width, num_candidates) if self.width > 1 else -1
            records["num_logprobs"] = np.where(
                records["temperature"] > 0, num_candidates, num_greedy
            )
        if self.ids.offsets is not None:
            records["temperature"] = 0
        return SamplingBatch.of(records, self.ids.num_outputs)

    def get_draft_ids(self, samples: SampleResult, entry: int) -> list[int]:
        """Returns an entry's draft tokens as target model ids: the sampled one, then the next best
        ones; [] if the sampled token does not exist in both models.
        """
        if samples.failed[entry]:
            return []
        first, *others = self._rank(samples, entry)
        if not 0 <= first < self.ids.num_common:
            return []
        return [first, *(token for token in others if 0 <= token < self.ids.num_common)]

    def _rank(self, samples: SampleResult, entry: int) -> list[int]:
        """Returns the sampled token and the next best ones among the most likely."""
        offsets, record = self.ids.offsets, self.records[entry]
        is_greedy = not record["temperature"] > 0
        sampled = int(samples.token_ids[entry])
        sampled += 0 if offsets is None else int(offsets[sampled])
        if self.width == 1 and (is_greedy or offsets is None):
            return [sampled]
        assert samples.top_ids is not None and samples.top_logprobs is not None
        num = min(NUM_CANDIDATES, self.ids.num_outputs, int(record["top_k"]) or NUM_CANDIDATES)
        num = min(num, self.width) if is_greedy else num
        top_ids = samples.top_ids[entry, :num].astype(np.int64)
        token_ids = top_ids if offsets is None else top_ids + offsets[top_ids]
        scores = samples.top_logprobs[entry, :num].astype(np.float64)
        if not is_greedy:
            noise = gumbel(noise_words_for(record, token_ids))
            scores = scores / float(record["temperature"]) + noise
        ranked = [int(token_ids[at]) for at in np.argsort(-scores, kind="stable")]
        if is_greedy or offsets is None:
            ranked = [sampled, *(token for token in ranked if token != sampled)]
        return ranked[: self.width]
