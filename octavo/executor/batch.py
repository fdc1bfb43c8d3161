"""Arrays of one step: inputs and outputs of a prepared Program.

Every array has its shape next to it. Independent of requests, files and models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.api.sampling_params import OPTIONS

SAMPLING_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.uint32),
        ("sample_index", np.uint32),
        ("target_id", np.int32),
        ("num_logprobs", np.int32),
        ("allowed_mask", np.int32),
        ("mirostat_mu", np.float32),
        *(
            (name, np.int32 if option.type is int else np.float32)
            for name, option in OPTIONS.record.items()
        ),
    ],
    align=True,
)
"""Parameters of one sampled row: the step's state and the options of SamplingParams that kernels
read. `SamplingRecord` in csrc/kernels/sampling.h has the same fields, from the generated
`csrc/kernels/sampling_fields.h`; the native backend checks their offsets when it loads.

`position` is the sampled token's position. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 keep
all tokens. `target_id` >= 0 requests that token's logprob instead of a sample (prompt logprobs).
`num_logprobs` -1 requests none, otherwise the token's own and that many top alternatives.
`allowed_mask` is a row of `SamplingBatch.allowed_masks`; -1 allows every token.
"""

MAX_CANDIDATES = 8
"""Maximum number of candidate tokens of a row, best first, that a verifier may read."""
MAX_PROOF_TOKENS = 16
"""Maximum number of tokens of a cut-off proof, including the sampled one."""

_NEUTRAL = dict.fromkeys(SAMPLING_RECORD.names or (), 0) | {
    **{name: option.default for name, option in OPTIONS.record.items()},
    "temperature": 0.0,
    "target_id": -1,
    "num_logprobs": -1,
    "allowed_mask": -1,
}
"""Fields of a record for greedy sampling from unchanged logits, in order."""
_NEUTRAL_RECORD = np.array(tuple(_NEUTRAL.values()), SAMPLING_RECORD)


def make_record(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns one record as a tuple; missing fields have their neutral values."""
    return tuple(map(values.get, _NEUTRAL, _NEUTRAL.values()))


def sampling_records(count: int, **fields: ArrayLike) -> NDArray[np.void]:
    """Returns `[count]` records for greedy sampling from unchanged logits, except for `fields`: one
    value for all, or one for each.
    """
    records = np.full(count, _NEUTRAL_RECORD)
    for name, value in fields.items():
        records[name] = value
    return records


NO_IDS = np.zeros(0, np.int32)
NO_VALUES = np.zeros(0, np.float32)

Bits = NDArray[np.uint32]
"""One bit per token, lowest first."""


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def packed_masks(masks: NDArray[np.bool_]) -> Bits:
    """Returns masks `[A, V]` as bits `[A, ceil(V / 32)]`."""
    padding = 32 * mask_words(masks.shape[1]) - masks.shape[1]
    bits = np.packbits(np.pad(masks, ((0, 0), (0, padding))), axis=1, bitorder="little")
    return np.ascontiguousarray(bits).view(np.uint32)


def unpacked_mask(mask: Bits, vocab_size: int) -> NDArray[np.bool_]:
    """Returns a packed mask `[ceil(V / 32)]` as booleans `[V]`."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size)
    return bits.astype(np.bool_)


@dataclass(slots=True)
class SamplingBatch:
    """Sampling options of a step's `S` sampled rows; all arrays are C-contiguous.

    Data of varying length is concatenated: row s has the entries starts[s] to starts[s + 1] - 1.
    """

    records: NDArray[np.void]
    """[S] of SAMPLING_RECORD."""
    history_starts: NDArray[np.int32]
    """`[S+1]`; only rows with a penalty have a history."""
    history_ids: NDArray[np.int32]
    """Distinct tokens of the request so far."""
    history_counts: NDArray[np.int32]
    """How often each of `history_ids` was generated; 0 for tokens that occur only in the prompt."""
    bias_starts: NDArray[np.int32]
    """[S+1]"""
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    """Added to the logits; -inf bans a token."""
    allowed_masks: Bits
    """`[A, ceil(V / 32)]`: bit i % 32 of word i // 32 is 1 if token i is allowed."""
    keeps_logits: bool = False
    """Whether rows may be resampled after verification."""
    deferred: NDArray[np.bool_] | None = None
    """Rows that are sampled only when the verifier resamples them, `[S]`; None: no row."""
    without_cutoffs: NDArray[np.bool_] | None = None
    """Rows sampled without min_p, top_k and top_p, `[S]`; None: no row. These rows are not greedy
    and have no other filter. `SampleResult.proof_tokens` proves whether their cut-offs would keep
    the sampled token. If a row is resampled, its cut-offs apply.
    """
    bias_after: NDArray[np.int32] | None = None
    """For each bias entry, the last sampled token that the entry requires; -1: any. Set if only the
    device knows that token (`StepBatch.last_tokens`); None: all entries are added.
    """
    counts_last: NDArray[np.bool_] | None = None
    """Rows whose history lacks the last sampled token because only the device knows it
    (`StepBatch.last_tokens`); the device adds it to the counts. `[S]`; None: no row.
    """

    @staticmethod
    def of(records: NDArray[np.void], vocab_size: int) -> SamplingBatch:
        """Returns a batch whose `records [S]` have no history, bias or masks."""
        starts = np.zeros(len(records) + 1, np.int32)
        return SamplingBatch(
            records=records,
            history_starts=starts,
            history_ids=NO_IDS,
            history_counts=NO_IDS,
            bias_starts=starts,
            bias_ids=NO_IDS,
            bias_values=NO_VALUES,
            allowed_masks=np.zeros((0, mask_words(vocab_size)), np.uint32),
        )

    def __len__(self) -> int:
        return len(self.records)

    def part(self, first: int, end: int) -> SamplingBatch:
        """Returns the rows `first` .. `end` - 1 as a batch."""
        history, bias = self.history_starts[first : end + 1], self.bias_starts[first : end + 1]
        return SamplingBatch(
            records=self.records[first:end],
            history_starts=history - history[0],
            history_ids=self.history_ids[history[0] : history[-1]],
            history_counts=self.history_counts[history[0] : history[-1]],
            bias_starts=bias - bias[0],
            bias_ids=self.bias_ids[bias[0] : bias[-1]],
            bias_values=self.bias_values[bias[0] : bias[-1]],
            bias_after=None if self.bias_after is None else self.bias_after[bias[0] : bias[-1]],
            allowed_masks=self.allowed_masks,
            deferred=None if self.deferred is None else self.deferred[first:end],
            without_cutoffs=None
            if self.without_cutoffs is None
            else self.without_cutoffs[first:end],
            counts_last=None if self.counts_last is None else self.counts_last[first:end],
        )


ROW_ARRAYS = ("logprobs", "ranks", "top_ids", "top_logprobs", "surprises", "proof_tokens")
"""Optional arrays of a SampleResult."""


@dataclass(slots=True)
class SampleResult:
    """Tokens of a step's `S` sampled rows and, if any row requests them, their logprobs.

    Logprobs and ranks are of the raw logits, before bias, penalties and temperature. Among equal
    logits the lower token id comes first.
    """

    token_ids: NDArray[np.int32]
    """Sampled token, or the row's target, `[S]`."""
    failed: NDArray[np.bool_]
    """Whether no token could be sampled: a logit is NaN, or none is finite, `[S]`."""
    logprobs: NDArray[np.float32] | None = None
    """Logprob of each token, `[S]`."""
    ranks: NDArray[np.int32] | None = None
    """Rank of each token among all tokens, starting at 1, `[S]`."""
    top_ids: NDArray[np.int32] | None = None
    """Top alternatives, best first, `[S, k]`; k is the maximum over the rows' requests."""
    top_logprobs: NDArray[np.float32] | None = None
    """Logprobs of `top_ids`, `[S, k]`."""
    surprises: NDArray[np.float32] | None = None
    """Surprise of each sampled token among the tokens left by the filters, in bits, `[S]`; set only
    for rows with mirostat. None: no row has mirostat.
    """
    proof_tokens: NDArray[np.int32] | None = None
    """Cut-off proofs, `[S, MAX_PROOF_TOKENS]`: the sampled token, then further tokens. If all of
    these are allowed, the cut-offs keep the sampled token, whatever else is masked. -1 after the
    last; the first is -1 if there is no proof. None: every row was sampled with its cut-offs.
    """

    def part(self, first: int, end: int) -> SampleResult:
        """Returns a view of the entries `first` .. `end` - 1."""
        part = SampleResult(self.token_ids[first:end], self.failed[first:end])
        for name in ROW_ARRAYS:
            array = getattr(self, name)
            if array is not None:
                setattr(part, name, array[first:end])
        return part

    def take(self, other: SampleResult, rows: NDArray[np.int32]) -> None:
        """Copies `rows` from another result of the same step."""
        for name in ("token_ids", "failed", *ROW_ARRAYS):
            array, others = getattr(self, name), getattr(other, name)
            if array is not None and others is not None:
                array[rows] = others[rows]


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Indices for devices that store the last token of each permanent row: which token ids a step
    reads from there, and which samples it stores there.
    """

    sources: NDArray[np.int32]
    """Permanent row whose last token replaces the id, `[T]`; -1: the id itself."""
    targets: NDArray[np.int32]
    """Permanent row whose last token is set to the sample, `[S]`; -1: none."""


@dataclass(frozen=True, slots=True)
class KvCopies:
    """Additional slots to which rows of a step write their K and V."""

    starts: NDArray[np.int32]
    """First entry of each row in `slots`, `[T+1]`."""
    slots: NDArray[np.int32]
    """Slots in the KV memory, `[G, C]`: block id * 16 + offset; -1: none."""


@dataclass(slots=True)
class StepBatch:
    """Inputs of one step of a Program: `T` rows of `R` requests, concatenated, with `G` cache
    groups and `S` sampled rows.

    All arrays are C-contiguous. A row whose slot is -1 in every group is padding: it may contain
    NaN, and its results are never read.
    """

    token_ids: NDArray[np.int32]
    """Ids of the tokens, `[T]`."""
    key_indices: NDArray[np.int32]
    """Index of each row's key among its request's keys, `[T]`; used by masks and biases."""
    positions: NDArray[np.int32]
    """Positions for RoPE and learned embeddings, `[P, T]`. P is 1, except for families with several
    position axes.
    """
    query_starts: NDArray[np.int32]
    """First row of each request, `[R+1]`: request r has the rows query_starts[r] to
    query_starts[r+1] - 1."""
    context_lens: NDArray[np.int32]
    """Number of keys of each request after this step's keys are written, `[G, R]`."""
    slots: NDArray[np.int32]
    """Slot in the KV memory that each row writes, block id * 16 + offset, `[G, T]`; -1: none."""
    block_tables: NDArray[np.int32]
    """Blocks of each request in the order of its keys, `[G, R, B]`, padded with -1."""
    sample_rows: NDArray[np.int32]
    """Rows whose logits are needed, `[S]`; a row may occur more than once. S is 0 if no row is
    sampled, as in steps that only prefill.
    """
    sampling: SamplingBatch | None = None
    """Sampling options; None: nothing is sampled, and the outputs are returned as arrays."""
    hidden: NDArray[np.float32] | None = None
    """Rows `[T, W]` for a Program whose input is "hidden"."""
    input_rows: NDArray[np.floating] | None = None
    """Rows that replace embeddings of the step, such as an image's, `[N, W]`; None: no row."""
    input_row_indices: NDArray[np.int32] | None = None
    """Row of `input_rows` that replaces each row, `[T]`, -1: none; set if `input_rows` is."""
    limits: NDArray[np.int32] | None = None
    """One past the last key that each row sees under a causal or window mask, `[T]`; None: its
    entry of `key_indices` + 1.
    """
    adapter_rows: NDArray[np.int32] | None = None
    """Adapter slot of each row, `[T]`, -1: none; None: no row has one."""
    sparse_from: NDArray[np.int32] | None = None
    """Key index at which each request's sparse rows begin: its prompt length, `[R]`. Only read by
    Programs with thresholds; None: all rows are dense.
    """
    last_tokens: LastTokens | None = None
    """Sources and targets of tokens that only the device knows; None: the host knows every token
    id.
    """
    copies: KvCopies | None = None
    """Additional slots to which rows write their K and V; None: there are none."""


def empty_batch(num_groups: int, num_axes: int, hidden_width: int | None) -> StepBatch:
    """Returns a step without rows. `hidden_width`: width of the input "hidden", if any."""
    return StepBatch(
        token_ids=NO_IDS,
        key_indices=NO_IDS,
        positions=np.zeros((num_axes, 0), np.int32),
        query_starts=np.zeros(1, np.int32),
        context_lens=np.zeros((num_groups, 0), np.int32),
        slots=np.zeros((num_groups, 0), np.int32),
        block_tables=np.zeros((num_groups, 0, 0), np.int32),
        sample_rows=NO_IDS,
        hidden=None if hidden_width is None else np.zeros((0, hidden_width), np.float32),
    )


@dataclass(slots=True)
class StepOutput:
    samples: SampleResult | None = None
    """Sampled tokens, if the batch has `sampling`."""
    arrays: dict[str, NDArray] = field(default_factory=dict)
    """Otherwise the Program's outputs by name; logits are `[S, V]` in float32 or float64."""


@dataclass(frozen=True, slots=True)
class Resample:
    """Rows of a step to resample, because their token is not allowed or depends on an earlier row's
    token.
    """

    samples: NDArray[np.int32]
    """Indices of the rows among the sampled ones, `[N]`."""
    masks: Bits
    """Allowed tokens of each row, as bits, `[N, ceil(V / 32)]`."""
    logits: NDArray[np.float32] | None = None
    """Replacement logits for some of the rows, `[M, V]`. Logprobs still come from the rows' own
    logits.
    """
    logits_indices: NDArray[np.int32] | None = None
    """Index of each row in `logits`, `[N]`; -1: the row's own logits."""
    mirostat_mus: NDArray[np.float32] | None = None
    """Mirostat bounds of the rows, `[N]`. NaN: the step's bound; None: the step's bounds for all
    rows.
    """
    is_last: bool = True
    """Whether the new samples are final; otherwise they are verified again."""


class SampledLogits(Protocol):
    """The sampled rows of the last step, for a verifier."""

    def logits(self, sample: int) -> NDArray[np.float32]:
        """Returns the raw logits `[V]` of a row."""
        ...

    def candidates(self, samples: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the best tokens of rows without filters by score, the sampled token first, `[N,
        MAX_CANDIDATES]`; -1 after the last.
        """
        ...


Verify = Callable[[SampleResult, SampledLogits], Resample | None]
"""Verifies the samples of a step and may replace them; returns the rows to resample, or None."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Several decode steps of one batch: each request has one row, and its sampled token is the
    input of its next step. Block tables must already be long enough for the last step.
    """

    num_steps: int
    """Upper bound; steps end early if a request fails or samples one of its end tokens."""
    end_starts: NDArray[np.int32]
    """First entry of each request in `end_ids`, `[R+1]`."""
    end_ids: NDArray[np.int32]
    """Tokens that end each request, concatenated over all requests."""
    follows_tokens: bool = False
    """Whether the caller updates biases and mirostat bounds between steps because they depend on
    the sampled tokens.
    """


class DecodedStep(NamedTuple):
    """The samples of one of several decode steps."""

    samples: SampleResult
    is_last: bool
