"""The arrays of one step: what a prepared Program is run over, and what it returns.

Every array has its shape beside it. Knows nothing of requests, files or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class SamplingBatch:
    """How to draw from each sampled row; C-contiguous arrays of length S (the step's sampled rows)
    unless said otherwise.

    `target_ids[s] >= 0` asks for that token's logprob instead of a draw (prompt logprobs). Sparse
    additions to the logits come as CSR: `bias_starts [S+1]`, `bias_ids`, `bias_values` (logit_bias;
    -inf bans). Penalties need the history: `history_starts [S+1]`, `history_ids`, `history_counts`
    (of generated tokens; 0 = in the prompt only). `allowed [S]` indexes `allowed_masks [A, V]
    bool`, -1 = all. Draws are Philox4x32-10 keyed by `seeds`, counter (position, sample_index,
    draw, 0).
    """

    temperatures: NDArray[np.float32]
    top_ks: NDArray[np.int32]
    top_ps: NDArray[np.float32]
    min_ps: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    sample_indices: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    """Position of the token to be drawn."""
    target_ids: NDArray[np.int32]
    num_logprobs: NDArray[np.int32]
    """-1: none; otherwise the token's own logprob and rank, and so many top alternatives."""
    repetition_penalties: NDArray[np.float32]
    presence_penalties: NDArray[np.float32]
    frequency_penalties: NDArray[np.float32]
    history_starts: NDArray[np.int32]
    history_ids: NDArray[np.int32]
    history_counts: NDArray[np.int32]
    bias_starts: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed: NDArray[np.int32]
    allowed_masks: NDArray[np.bool_]


@dataclass(slots=True)
class SampleResult:
    """`token_ids [S]`: what was drawn (or the target). `failed [S]`: the row's logits held a NaN,
    its token means nothing.

    With logprobs asked for by any row: `logprobs [S]`, `ranks [S]` of the token, and `top_ids`,
    `top_logprobs [S, k]` for the largest k asked (best first; a row uses its own first k). They are
    of the raw logits, before bias, penalties and temperature.
    """

    token_ids: NDArray[np.int32]
    failed: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None = None
    ranks: NDArray[np.int32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None

    def part(self, first: int, end: int) -> SampleResult:
        """Returns a view of the entries `first` to `end - 1`."""
        part = SampleResult(self.token_ids[first:end], self.failed[first:end])
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            array = getattr(self, name)
            setattr(part, name, None if array is None else array[first:end])
        return part


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Sources and targets of a step's tokens on a device that keeps the last token of each
    permanent row.
    """

    sources: NDArray[np.int32]
    """Permanent row whose last token stands in for the id, `[T]`; -1: the id itself."""
    targets: NDArray[np.int32]
    """Permanent row whose last token the draw becomes, `[S]`; -1: of no row."""


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
    adapter_rows: NDArray[np.int32] | None = None
    """Adapter slot of each row, `[T]`, -1: none; None: no row has one."""
    last_tokens: LastTokens | None = None
    """Sources and targets of tokens that are known on the device alone; None: every id is known
    here."""


@dataclass(slots=True)
class StepOutput:
    """Result of one step."""

    samples: SampleResult | None = None
    """Drawn tokens, where the batch asked for draws."""
    arrays: dict[str, NDArray] = field(default_factory=dict)
    """Otherwise the Program's outputs by name; logits are `[S, V]` in float32 or float64."""


GoesOn = Callable[[SampleResult], bool]
"""Takes the draws of a decode step and says whether there is to be another one."""


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
