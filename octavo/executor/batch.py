"""The arrays of one step: what a prepared Program is run over, and what it returns.

Every array has its shape beside it. Knows nothing of requests, files or models.
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
"""Parameters of one sampled row: state of the step, and the options of SamplingParams that kernels
read. `SamplingRecord` in csrc/kernels/table.h has the same fields (`csrc/kernels/sampling_fields.h`
is generated from these); the native backend checks their offsets when it loads.

`position` is that of the sampled token. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 keep all
tokens. `target_id` >= 0 wants that token's logprob instead of a sample (prompt logprobs).
`num_logprobs` -1 wants none, otherwise the token's own and as many top alternatives. `allowed_mask`
is a row of `SamplingBatch.allowed_masks`, -1 allows every token.
"""

MAX_CANDIDATES = 8
"""Tokens of a checked draw that are known in their order."""
MAX_PROOF_TOKENS = 16
"""Tokens that show that a row's cuts keep its draw, itself among them."""

_NEUTRAL = dict.fromkeys(SAMPLING_RECORD.names or (), 0) | {
    **{name: option.default for name, option in OPTIONS.record.items()},
    "temperature": 0.0,
    "target_id": -1,
    "num_logprobs": -1,
    "allowed_mask": -1,
}
"""Fields of a record that samples greedily and changes no logit, in order."""
_NEUTRAL_RECORD = np.array(tuple(_NEUTRAL.values()), SAMPLING_RECORD)


def make_record(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns one record as a tuple; fields that are not given have their neutral values."""
    return tuple(values.get(name, neutral) for name, neutral in _NEUTRAL.items())


def sampling_records(count: int, **fields: ArrayLike) -> NDArray[np.void]:
    """Returns `[count]` records that draw greedily and change no logit, but for the `fields` given:
    a value for all, or one for each.
    """
    records = np.full(count, _NEUTRAL_RECORD)
    for name, value in fields.items():
        records[name] = value
    return records


Bits = NDArray[np.uint32]
"""A bit for each token, the lowest first."""


def mask_words(vocab_size: int) -> int:
    """Returns the number of words that hold one bit for each token."""
    return -(-vocab_size // 32)


def packed_masks(masks: NDArray[np.bool_]) -> Bits:
    """Returns masks `[A, V]` as bits `[A, ceil(V / 32)]`."""
    padding = 32 * mask_words(masks.shape[1]) - masks.shape[1]
    bits = np.packbits(np.pad(masks, ((0, 0), (0, padding))), axis=1, bitorder="little")
    return np.ascontiguousarray(bits).view(np.uint32)


def unpacked_mask(mask: Bits, vocab_size: int) -> NDArray[np.bool_]:
    """Returns a mask `[ceil(V / 32)]` as booleans `[V]`."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size)
    return bits.astype(np.bool_)


@dataclass(slots=True)
class SamplingBatch:
    """How to draw from each of a step's `S` sampled rows; all arrays are C-contiguous.

    What varies in length lies beside the records, end to end: row s has the entries starts[s] ..
    starts[s + 1] - 1.
    """

    records: NDArray[np.void]
    """[S] of SAMPLING_RECORD."""
    history_starts: NDArray[np.int32]
    """[S+1]; only rows with a penalty have a history."""
    history_ids: NDArray[np.int32]
    """Distinct tokens of the request so far."""
    history_counts: NDArray[np.int32]
    """How often each was generated; 0 for tokens of the prompt alone."""
    bias_starts: NDArray[np.int32]
    """[S+1]"""
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    """Added to the logits; -inf bans a token."""
    allowed_masks: Bits
    """[A, ceil(V / 32)]: bit i % 32 of word i // 32 says whether token i is allowed."""
    keeps_logits: bool = False
    """Whether rows may be drawn again once all are drawn, by the verifier."""
    late: NDArray[np.bool_] | None = None
    """Rows that are drawn only if the verifier resamples them, `[S]`; None: no row is."""
    uncut: NDArray[np.bool_] | None = None
    """Rows sampled without min_p, top_k and top_p, `[S]`; None: no row is. None of them is greedy
    or has another filter. `SampleResult.witnesses` prove whether the cut-offs keep their tokens. A
    resampled row has its cut-offs.
    """
    bias_after: NDArray[np.int32] | None = None
    """Token that the row must have drawn last for an entry of the bias to be added, -1: any. It is
    given where the device alone knows that token (`StepBatch.last_tokens`); None: all are added.
    """
    counts_last: NDArray[np.bool_] | None = None
    """Rows whose histories lack the token that the step before has drawn, which the device alone
    knows (`StepBatch.last_tokens`) and counts as generated once more, `[S]`; None: no row's does.
    """

    def __len__(self) -> int:
        return len(self.records)

    def part(self, first: int, end: int) -> SamplingBatch:
        """Returns the rows `first` .. `end` - 1 as a batch of their own."""
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
            late=None if self.late is None else self.late[first:end],
            uncut=None if self.uncut is None else self.uncut[first:end],
            counts_last=None if self.counts_last is None else self.counts_last[first:end],
        )


ROW_ARRAYS = ("logprobs", "ranks", "top_ids", "top_logprobs", "surprises", "witnesses")
"""Arrays of a SampleResult that a step may do without."""


@dataclass(slots=True)
class SampleResult:
    """The tokens of a step's `S` sampled rows and, where any row wants them, their logprobs.

    Logprobs and ranks are of the raw logits, before bias, penalties and temperature. Among equal
    logits the lower token id comes first.
    """

    token_ids: NDArray[np.int32]
    """[S]: the drawn token, or the row's target."""
    failed: NDArray[np.bool_]
    """[S]: no token could be drawn, since a logit was NaN, or none was finite."""
    logprobs: NDArray[np.float32] | None = None
    """[S] of the tokens."""
    ranks: NDArray[np.int32] | None = None
    """[S] of the tokens, from 1: a token's place in the full top list."""
    top_ids: NDArray[np.int32] | None = None
    """[S, k], best first, k the most that a row wants; a row uses its own first ones."""
    top_logprobs: NDArray[np.float32] | None = None
    """[S, k] of `top_ids`."""
    surprises: NDArray[np.float32] | None = None
    """Surprises of drawn tokens among those that could be drawn, in bits, `[S]`; None where no row
    has a mirostat. Without meaning in a row without one.
    """
    witnesses: NDArray[np.int32] | None = None
    """Tokens that, if they are all legal, show that the cuts of a row which was drawn without them
    keep its draw whatever else is masked, `[S, MAX_PROOF_TOKENS]`: the draw first, -1 behind the
    last. The first is -1 where so few do not show it. None where every row was drawn with its cuts.
    """

    def part(self, first: int, end: int) -> SampleResult:
        """Returns a view of the entries `first` to `end - 1`."""
        part = SampleResult(self.token_ids[first:end], self.failed[first:end])
        for name in ROW_ARRAYS:
            array = getattr(self, name)
            if array is not None:
                setattr(part, name, array[first:end])
        return part

    def take(self, other: SampleResult, rows: NDArray[np.int32]) -> None:
        """Takes over some rows of another result of the same step."""
        for name in ("token_ids", "failed", *ROW_ARRAYS):
            array, others = getattr(self, name), getattr(other, name)
            if array is not None and others is not None:
                array[rows] = others[rows]


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Sources and targets of a step's tokens on a device that keeps the last token of each
    permanent row.
    """

    sources: NDArray[np.int32]
    """Permanent row whose last token stands in for the id, `[T]`; -1: the id itself."""
    targets: NDArray[np.int32]
    """Permanent row whose last token the draw becomes, `[S]`; -1: of no row."""


@dataclass(frozen=True, slots=True)
class KvCopies:
    """Further places to which rows of a step write their K and V."""

    starts: NDArray[np.int32]
    """First entry of each row in `slots`, `[T+1]`."""
    slots: NDArray[np.int32]
    """Places in the KV memory, `[G, C]`, block id * 16 + offset; -1: none."""


@dataclass(slots=True)
class StepBatch:
    """One Program's inputs of one step: `T` rows of `R` requests laid end to end, `G` cache groups,
    `S` sampled rows.

    All arrays are C-contiguous. A row whose slot is -1 in every group is padding: it may hold NaN,
    and its results are never read.
    """

    token_ids: NDArray[np.int32]
    """Ids of the tokens, `[T]`."""
    places: NDArray[np.int32]
    """Index of each row among the keys of its request, `[T]`; masks and biases go by it."""
    positions: NDArray[np.int32]
    """Numbers that rope and learned embeddings read, `[P, T]`. P = 1 and equal to `places`, but for
    families with several position axes."""
    query_starts: NDArray[np.int32]
    """First row of each request, `[R+1]`: request r owns the rows query_starts[r] to
    query_starts[r+1] - 1."""
    context_lens: NDArray[np.int32]
    """Number of keys that each request has in the group once this step's are written, `[G, R]`."""
    slots: NDArray[np.int32]
    """Place in the KV memory that each row writes, block id * 16 + offset, `[G, T]`; -1: none."""
    block_tables: NDArray[np.int32]
    """Blocks of each request in the order of its keys, `[G, R, B]`, padded with -1."""
    sample_rows: NDArray[np.int32]
    """Rows whose logits are wanted, `[S]`; a row may stand there more than once. S is 0 in a step
    that only prefills."""
    sampling: SamplingBatch | None = None
    """Parameters of the draws; None: the outputs come back as arrays, and nothing is drawn."""
    hidden: NDArray[np.float32] | None = None
    """Rows `[T, W]` for a Program whose input is "hidden"."""
    given: NDArray[np.floating] | None = None
    """Rows from outside that take the places of the step's own, `[N, W]`; None: there are none."""
    given_rows: NDArray[np.int32] | None = None
    """Row of `given` that stands at each row, `[T]`, -1: none; set wherever `given` is."""
    limits: NDArray[np.int32] | None = None
    """One past the last key that each row sees under a causal mask or a window's, `[T]`, beyond its
    own place; None: its place + 1."""
    adapter_rows: NDArray[np.int32] | None = None
    """Adapter slot of each row, `[T]`, -1: none; None: no row has one."""
    sparse_from: NDArray[np.int32] | None = None
    """Place from which on the rows of each request are sparse, `[R]`: the length of its prompt.
    Programs without thresholds do not read it; None: all rows are dense."""
    last_tokens: LastTokens | None = None
    """Sources and targets of tokens that are known on the device alone; None: every id is known
    here."""
    copies: KvCopies | None = None
    """Further places that rows write their K and V to, beside their slots; None: there are none."""


def empty_batch(num_groups: int, num_axes: int, hidden_width: int | None) -> StepBatch:
    """Returns a step without rows, for a Program whose input is "hidden" where that has a width."""
    none = np.zeros(0, np.int32)
    return StepBatch(
        token_ids=none,
        places=none,
        positions=np.zeros((num_axes, 0), np.int32),
        query_starts=np.zeros(1, np.int32),
        context_lens=np.zeros((num_groups, 0), np.int32),
        slots=np.zeros((num_groups, 0), np.int32),
        block_tables=np.zeros((num_groups, 0, 0), np.int32),
        sample_rows=none,
        hidden=None if hidden_width is None else np.zeros((0, hidden_width), np.float32),
    )


@dataclass(slots=True)
class StepOutput:
    """Result of one step."""

    samples: SampleResult | None = None
    """Drawn tokens, where the batch asked for draws."""
    arrays: dict[str, NDArray] = field(default_factory=dict)
    """Otherwise the Program's outputs by name; logits are `[S, V]` in float32 or float64."""


@dataclass(frozen=True, slots=True)
class Resample:
    """Rows of a step that are drawn again: what they drew is not allowed, or follows from what an
    earlier row drew.
    """

    samples: NDArray[np.int32]
    """Indices of the rows among the sampled ones, `[N]`."""
    masks: Bits
    """Tokens that each of them may draw, `[N, ceil(V / 32)]`."""
    logits: NDArray[np.float32] | None = None
    """Logits that some of them are drawn from in place of their own, `[M, V]`. Logprobs are of
    their own.
    """
    places: NDArray[np.int32] | None = None
    """Index of each of the rows in `logits`, `[N]`, -1: its own logits."""
    mirostat_mus: NDArray[np.float32] | None = None
    """Bounds of their mirostat, `[N]`; NaN, or None for all of them: those of the step."""
    is_last: bool = True
    """Whether the draws hold then, and are not looked at once more."""


class SampledLogits(Protocol):
    """The sampled rows of a step that is just drawn, for a verifier to read."""

    def logits(self, sample: int) -> NDArray[np.float32]:
        """Returns the logits `[V]` of a row, before anything changes them."""
        ...

    def candidates(self, samples: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the tokens that rows without filters would draw one after another if those before
        were masked, their own draws first, `[N, MAX_CANDIDATES]`; -1 behind the last.
        """
        ...


Verify = Callable[[SampleResult, SampledLogits], Resample | None]
"""Looks at the draws of a step, and may set them; None where all of them hold."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Several decode steps of one batch: each request has one row, and the token that it draws is
    its next row.

    Block tables reach to the last step.
    """

    num_steps: int
    """Upper bound; they end early where a request fails or draws a token that ends it."""
    end_starts: NDArray[np.int32]
    """First entry of each request in `end_ids`, `[R+1]`."""
    end_ids: NDArray[np.int32]
    """Tokens that end a request, those of all requests end to end."""
    follows_tokens: bool = False
    """Whether the caller sets, in the batch's sampling, what is added to logits and the bounds of
    mirostat between two steps, since these follow from the tokens that were drawn."""


class DecodedStep(NamedTuple):
    """The draws of one of several decode steps."""

    samples: SampleResult
    is_last: bool
