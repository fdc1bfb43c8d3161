"""The arrays of one step: what a prepared Program is run over, and what comes back.

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
        """A view of the entries `first` .. `end` - 1."""
        part = SampleResult(self.token_ids[first:end], self.failed[first:end])
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            array = getattr(self, name)
            setattr(part, name, None if array is None else array[first:end])
        return part


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Where a step's tokens come from and go to, on a device that keeps the last token of each
    permanent row.

    `sources [T]`: the row whose last token is taken in place of the id, -1: the id. `targets [S]`:
    the row whose last token the draw is from now on, -1: nobody's.
    """

    sources: NDArray[np.int32]
    targets: NDArray[np.int32]


@dataclass(slots=True)
class StepBatch:
    """One Program's inputs of one step. `T` rows of `R` requests, laid end to end; `G` cache
    groups; `S` sampled rows.

    All arrays are C-contiguous.

    A row whose slot is -1 in every group is padding: nobody reads what it computes, and it may hold
    NaN.
    """

    token_ids: NDArray[np.int32]
    """[T]"""
    places: NDArray[np.int32]
    """[T]: each row's index among the keys of its request, which masks and biases go by."""
    positions: NDArray[np.int32]
    """[P, T]: what rope and learned embeddings turn or look up. P = 1, and equal to `places`, but
    for families with several position axes."""
    query_starts: NDArray[np.int32]
    """[R+1]: request r owns the rows query_starts[r] .. query_starts[r+1]."""
    context_lens: NDArray[np.int32]
    """[G, R]: keys of the request in the group once this step's are written."""
    slots: NDArray[np.int32]
    """[G, T]: block id * 16 + offset, or -1."""
    block_tables: NDArray[np.int32]
    """[G, R, B], padded with -1."""
    sample_rows: NDArray[np.int32]
    """[S]: rows whose logits are wanted; a row may stand more than once. S is 0 in a step that is
    all prefill.
    """
    sampling: SamplingBatch | None = None
    """None: the outputs come back as arrays and nothing is drawn."""
    hidden: NDArray[np.float32] | None = None
    """[T, W], for Programs whose input is "hidden"."""
    adapter_rows: NDArray[np.int32] | None = None
    last_tokens: LastTokens | None = None
    """None: every id is known here."""


@dataclass(slots=True)
class StepOutput:
    """`samples` where the batch asked for draws; otherwise the Program's named outputs, `[S, V]`
    logits in float32 or float64.
    """

    samples: SampleResult | None = None
    arrays: dict[str, NDArray] = field(default_factory=dict)


GoesOn = Callable[[SampleResult], bool]
"""Told what a decode step drew after which there is to be another; False: there is not."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Several steps of a batch in which each request has one row and draws from it: the drawn token
    is its next row.

    They end early where a request draws a token that ends it or fails. Block tables reach to the
    last step.
    """

    num_steps: int
    end_starts: NDArray[np.int32]
    """[R+1]: the tokens end_ids[end_starts[r] .. end_starts[r+1]) end request r."""
    end_ids: NDArray[np.int32]
