"""The sampling state of every running request, in columns, so that a step's SamplingBatch is a few
gathers.

What few requests want (bias, bans, penalties, allowed ids) stands beside the columns and costs only
those who want it. Owns no logits and draws nothing: that is the backend's `sample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.backends.batch import SamplingBatch
from octavo.sampling_params import SamplingParams
from octavo.step import NewRow

MINUS_INFINITY = float("-inf")
NO_STARTS = np.zeros(0, np.int32)
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
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += generated

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """ids and counts, `[distinct]` each."""
        num = len(self._place)
        return self._ids[:num], self._counts[:num]


@dataclass(slots=True)
class RowExtras:
    """What only some requests have."""

    logit_bias: dict[int, float]
    end_token_ids: list[int]
    num_prompt_tokens: int
    min_num_tokens: int
    """The request's tokens, prompt included, below which `end_token_ids` are banned."""
    bad_words: list[list[int]]
    counts: TokenCounts | None
    allowed_mask: NDArray[np.bool_] | None

    def bias(self, token_ids: NDArray[np.int32]) -> dict[int, float]:
        """Added to the logits of the token that follows `token_ids [num_tokens]`."""
        if len(token_ids) >= self.min_num_tokens and not self.bad_words:
            return self.logit_bias
        bias = dict(self.logit_bias)
        if len(token_ids) < self.min_num_tokens:
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
    """Variable numbers of (id, value) per entry, laid end to end."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    values: list[NDArray] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, entry: int, ids: NDArray[np.int32], values: NDArray) -> None:
        """Entries come in rising order."""
        self.ids.append(ids)
        self.values.append(values)
        self.sizes[entry] = len(ids)

    def starts(self, num_entries: int) -> NDArray[np.int32]:
        """`[num_entries + 1]`."""
        sizes = np.zeros(num_entries + 1, np.int32)
        for entry, size in self.sizes.items():
            sizes[entry + 1] = size
        return np.cumsum(sizes, dtype=np.int32)


class SamplingRows:
    """Columns over `N` permanent rows."""

    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._floats = np.zeros((6, max_rows), np.float32)
        """temperature, top_p, min_p, repetition, presence and frequency penalty"""
        self._ints = np.zeros((2, max_rows), np.int32)
        """top_k, num_logprobs"""
        self._seeds = np.zeros(max_rows, np.uint64)
        self._sample_indices = np.zeros(max_rows, np.uint32)
        self._extras: dict[int, RowExtras] = {}
        self._masks: WeakValueDictionary[tuple[int, ...], NDArray[np.bool_]] = WeakValueDictionary()

    def add(self, row: int, new: NewRow) -> None:
        params = new.params
        self._floats[:, row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._ints[:, row] = (
            params.top_k,
            -1 if params.logprobs is None else self.num_top(params.logprobs),
        )
        self._seeds[row] = new.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._sample_indices[row] = new.sample_index
        extras = self._make_extras(new)
        if extras is not None:
            self._extras[row] = extras

    def free(self, row: int) -> None:
        self._extras.pop(row, None)

    def num_top(self, num_logprobs: int) -> int:
        """-1 as users write it is the whole vocabulary."""
        return self._vocab_size if num_logprobs == -1 else min(num_logprobs, self._vocab_size)

    @property
    def has_extras(self) -> bool:
        return bool(self._extras)

    def took(self, row: int, token_id: int) -> None:
        """A row's sampled token, for its penalties."""
        extras = self._extras.get(row)
        if extras is not None and extras.counts is not None:
            extras.counts.add(token_id)

    def gather(
        self, rows: NDArray[np.intp], token_ids: NDArray[np.int32], ends: NDArray[np.int32]
    ) -> SamplingBatch:
        """For draws from `rows [S]`, each after the first `ends [S]` of its `token_ids [N,
        context]`.
        """
        num = len(rows)
        floats, ints = self._floats.take(rows, axis=1), self._ints.take(rows, axis=1)
        zeros = np.zeros(num + 1, np.int32)
        batch = SamplingBatch(
            temperatures=floats[0],
            top_ps=floats[1],
            min_ps=floats[2],
            repetition_penalties=floats[3],
            presence_penalties=floats[4],
            frequency_penalties=floats[5],
            top_ks=ints[0],
            num_logprobs=ints[1],
            seeds=self._seeds[rows],
            sample_indices=self._sample_indices[rows],
            positions=ends.astype(np.uint32),
            target_ids=np.full(num, -1, np.int32),
            history_starts=zeros,
            history_ids=NO_STARTS,
            history_counts=NO_STARTS,
            bias_starts=zeros,
            bias_ids=NO_STARTS,
            bias_values=NO_VALUES,
            allowed=np.full(num, -1, np.int32),
            allowed_masks=np.zeros((0, self._vocab_size), np.bool_),
        )
        if self._extras:
            self._add_extras(batch, rows.tolist(), token_ids, ends)
        return batch

    def _add_extras(
        self,
        batch: SamplingBatch,
        rows: list[int],
        token_ids: NDArray[np.int32],
        ends: NDArray[np.int32],
    ) -> None:
        bias, history = Csr(), Csr()
        masks: dict[int, tuple[int, NDArray[np.bool_]]] = {}
        for entry, row in enumerate(rows):
            extras = self._extras.get(row)
            if extras is None:
                continue
            if added := extras.bias(token_ids[row, : ends[entry]]):
                bias.add(
                    entry,
                    np.fromiter(added.keys(), np.int32),
                    np.fromiter(added.values(), np.float32),
                )
            if extras.counts is not None:
                history.add(entry, *extras.counts.arrays())
            if extras.allowed_mask is not None:
                index, _ = masks.setdefault(
                    id(extras.allowed_mask), (len(masks), extras.allowed_mask)
                )
                batch.allowed[entry] = index
        if bias.ids:
            batch.bias_starts = bias.starts(len(rows))
            batch.bias_ids, batch.bias_values = (
                np.concatenate(bias.ids),
                np.concatenate(bias.values),
            )
        if history.ids:
            batch.history_starts = history.starts(len(rows))
            batch.history_ids, batch.history_counts = (
                np.concatenate(history.ids),
                np.concatenate(history.values),
            )
        if masks:
            batch.allowed_masks = np.stack([mask for _, mask in masks.values()])

    def _make_extras(self, new: NewRow) -> RowExtras | None:
        params = new.params
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
        )

    def _allowed_mask(self, params: SamplingParams) -> NDArray[np.bool_] | None:
        """`[V]`, one for all requests that allow the same ids."""
        if params.allowed_token_ids is None:
            return None
        key = tuple(sorted(params.allowed_token_ids))
        mask = self._masks.get(key)
        if mask is None:
            mask = np.zeros(self._vocab_size, np.bool_)
            mask[list(key)] = True
            self._masks[key] = mask
        return mask


def target_batch(
    *, target_ids: NDArray[np.int32], positions: NDArray[np.uint32], num_logprobs: NDArray[np.int32]
) -> dict[str, NDArray]:
    """Columns of entries that ask for a given token's logprob and draw nothing, `[S]` each."""
    num = len(target_ids)
    ones, zeros = np.ones(num, np.float32), np.zeros(num, np.float32)
    return {
        "temperatures": zeros,
        "top_ks": np.zeros(num, np.int32),
        "top_ps": ones,
        "min_ps": zeros,
        "seeds": np.zeros(num, np.uint64),
        "sample_indices": np.zeros(num, np.uint32),
        "positions": positions,
        "target_ids": target_ids,
        "num_logprobs": num_logprobs,
        "repetition_penalties": ones,
        "presence_penalties": zeros,
        "frequency_penalties": zeros,
        "allowed": np.full(num, -1, np.int32),
    }


def append_targets(batch: SamplingBatch, targets: dict[str, NDArray]) -> None:
    """Target entries after the draws; they have no bias and no history."""
    num = len(targets["target_ids"])
    for name, column in targets.items():
        setattr(batch, name, np.concatenate([getattr(batch, name), column]))
    for name in ("history_starts", "bias_starts"):
        starts = getattr(batch, name)
        setattr(batch, name, np.concatenate([starts, np.full(num, starts[-1], np.int32)]))
