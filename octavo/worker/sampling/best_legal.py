"""The best allowed tokens of a row with the model's own logprobs, for beam search under a grammar.
Source: transformers' prefix_allowed_tokens_fn, which sets the logprobs of other tokens to minus
infinity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import SampleResult


def write_best_legal(
    samples: SampleResult, entry: int, logits: NDArray[np.float32], legal: NDArray[np.bool_]
) -> None:
    """Sets an entry to the best allowed token, and its top list to the best ones in the order
    (logit down, id up), padded with logprobs of minus infinity.

    `logits [V]` are the row's own, `legal [V]` marks the allowed tokens.
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
