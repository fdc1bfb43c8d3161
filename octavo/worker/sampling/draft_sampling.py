"""How a draft model draws its guesses: with the noise of the draws that will verify them.

A draw is the argmax of z / T + g. Where the draft model's logits are near the model's, the same g
mostly gives the same token, though it is drawn at random: at temperature 1 about twice as often as
the draft model's likeliest one. The filters of a row hold for its guesses too; penalties, bans and
forms, which need more than a record, do not. Source: Daliri, Musco and Suresh 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import SampleResult, SamplingBatch, mask_words
from octavo.executor.noise import gumbel, noise_words_of
from octavo.worker.sampling.sampling_states import SamplingStates

NUM_CANDIDATES = 64
"""Likeliest tokens among which a guess is drawn, of a head that has ids of its own."""


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The ids of a draft model beside those of the model that it drafts for."""

    num_read: int
    """Ids that its embedding has."""
    num_drawn: int
    """Ids that it draws among."""
    num_common: int
    """Ids that are tokens of both."""
    offsets: NDArray[np.int64] | None = None
    """Numbers that are added to drawn ids to make them the other model's; None: none."""


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """One step's draws of a draft model, made ahead of those of its rows."""

    ids: DraftVocabulary
    records: NDArray[np.void]
    """How the rows themselves draw the tokens that are guessed, `[S]` of SAMPLING_RECORD."""
    width: int = 1
    """Tokens that are told of each draw, the one drawn first."""

    @staticmethod
    def of(
        rows: NDArray[np.intp],
        ends: NDArray[np.int32],
        sampling: SamplingStates,
        ids: DraftVocabulary,
        width: int = 1,
    ) -> DraftSampling:
        """Returns a draw for each of `rows [S]`, after its first `ends [S]` tokens."""
        records = sampling.plain_records(rows, ends)
        records["top_k"] = np.minimum(records["top_k"], ids.num_drawn)
        return DraftSampling(ids, records, width)

    def batch(self) -> SamplingBatch:
        """Returns how the draft model draws. Noise is by token, so a head with ids of its own names
        its likeliest tokens, and the noise of the other model's ids is added here.
        """
        records = self.records
        most = min(NUM_CANDIDATES, self.ids.num_drawn)
        if self.ids.offsets is not None or self.width > 1:
            records = records.copy()
            least = min(self.width, most) if self.width > 1 else -1
            records["num_logprobs"] = np.where(records["temperature"] > 0, most, least)
        if self.ids.offsets is not None:
            records["temperature"] = 0
        no_entries = np.zeros(len(records) + 1, np.int32)
        no_ids, no_values = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return SamplingBatch(
            records=records,
            history_starts=no_entries,
            history_ids=no_ids,
            history_counts=no_ids,
            bias_starts=no_entries,
            bias_ids=no_ids,
            bias_values=no_values,
            allowed_masks=np.zeros((0, mask_words(self.ids.num_drawn)), np.uint32),
        )

    def tokens_of(self, samples: SampleResult, entry: int) -> list[int]:
        """Returns the guesses of an entry, ids of both models, the drawn one first and then those
        that would have been drawn in its place; none where the drawn one is of no use.
        """
        if samples.failed[entry]:
            return []
        first, *others = self._drawn(samples, entry)
        if not 0 <= first < self.ids.num_common:
            return []
        return [first, *(token for token in others if 0 <= token < self.ids.num_common)]

    def _drawn(self, samples: SampleResult, entry: int) -> list[int]:
        """Returns the drawn token, of a head that has ids of its own by the noise of the other
        model's, and the next ones among its likeliest.
        """
        offsets, record = self.ids.offsets, self.records[entry]
        is_greedy = not record["temperature"] > 0
        drawn = int(samples.token_ids[entry])
        drawn += 0 if offsets is None else int(offsets[drawn])
        if self.width == 1 and (is_greedy or offsets is None):
            return [drawn]
        assert samples.top_ids is not None and samples.top_logprobs is not None
        num = min(NUM_CANDIDATES, self.ids.num_drawn, int(record["top_k"]) or NUM_CANDIDATES)
        num = min(num, self.width) if is_greedy else num
        top_ids = samples.top_ids[entry, :num].astype(np.int64)
        token_ids = top_ids if offsets is None else top_ids + offsets[top_ids]
        scores = samples.top_logprobs[entry, :num].astype(np.float64)
        if not is_greedy:
            noise = gumbel(noise_words_of(record, token_ids))
            scores = scores / float(record["temperature"]) + noise
        ranked = [int(token_ids[at]) for at in np.argsort(-scores, kind="stable")]
        if is_greedy or offsets is None:
            ranked = [drawn, *(token for token in ranked if token != drawn)]
        return ranked[: self.width]
