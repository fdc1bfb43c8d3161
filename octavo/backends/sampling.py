"""The reference sampler: draws tokens from logits in NumPy, row by row. Native code follows the
same text.

For a row with float32 logits z[0..V) all arithmetic is in float64:

1. A NaN among the logits: the row has failed. Logprobs, where asked for, are of these raw logits: z
   - (max + ln sum exp(z - max)); a token's rank is 1 + the number of strictly greater logits; the
   top list is by (logit down, id up).
2. With target_ids >= 0 nothing is drawn: the target is the row's token.
3. z += bias for each bias entry (-inf bans); z = -inf outside the allowed mask. Then for each
   history entry, with count c of the generated tokens: z = z / r where z > 0, else z * r, with the
   repetition penalty r; z -= frequency * c; z -= presence where c > 0. No finite maximum left
   (everything banned, or an infinity): the row has failed.
4. Temperature 0: the token with the largest z, the lowest id among equals.
5. z /= temperature; e = exp(z - max z). Kept are the tokens with e > 0 and e >= min_p (min_p is
   relative to the most likely); of these the first top_k in the order (z down, id up), where top_k
   > 0; of these the shortest beginning in that order whose running sum of e reaches top_p times the
   whole sum, where top_p < 1. Running sums go one by one, left to right.
6. u = ((uint64(x0) << 21) | (x1 >> 11)) * 2^-53, where x0, x1 are the first outputs of
   Philox4x32-10 with the key (low, high 32 bits of the seed) and the counter (position,
   sample_index, 0, 0). Walking the kept tokens by rising id, the first whose running sum of e
   exceeds u times the whole sum is the token; the last kept one where rounding leaves none.

A failed row's token is 0. Philox: Salmon et al. 2011; min_p: Nguyen et al. 2024; top_p: Holtzman et
al. 2020.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.backends.batch import SampleResult, SamplingBatch

Floats = NDArray[np.float64]

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def sample(logits: NDArray[np.float32], batch: SamplingBatch) -> SampleResult:
    """`logits [S, V]`, left as they are."""
    num_rows = len(logits)
    result = SampleResult(np.zeros(num_rows, np.int32), np.zeros(num_rows, np.bool_))
    for s in range(num_rows):
        raw = logits[s].astype(np.float64)
        token = None if np.isnan(raw).any() else _choose(raw, s, batch)
        result.failed[s] = token is None
        result.token_ids[s] = 0 if token is None else token
    if num_rows and (batch.num_logprobs.max() >= 0 or batch.target_ids.max() >= 0):
        _add_logprobs(result, logits, batch)
    return result


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds: four 32-bit numbers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK32, (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int, sample_index: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    x0, x1, _, _ = philox((seed & MASK32, seed >> 32), (position, sample_index, 0, 0))
    return ((x0 << 21) | (x1 >> 11)) * 2.0**-53


def _choose(raw: Floats, s: int, batch: SamplingBatch) -> int | None:
    """The row's token, or None where it has failed."""
    if batch.target_ids[s] >= 0:
        return int(batch.target_ids[s])
    z = _adjusted(raw, s, batch)
    top = z.max()
    if not np.isfinite(top):
        return None
    temperature = float(batch.temperatures[s])
    if temperature == 0.0:
        return int(z.argmax())
    z = z / temperature
    weights = np.exp(z - z.max())
    kept = _kept(z, weights, s, batch)
    sums = np.cumsum(weights[kept])
    u = uniform(int(batch.seeds[s]), int(batch.positions[s]), int(batch.sample_indices[s]))
    drawn = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return int(kept[min(drawn, len(kept) - 1)])


def _adjusted(raw: Floats, s: int, batch: SamplingBatch) -> Floats:
    """The logits after bias, mask and penalties."""
    z = raw.copy()
    entries = slice(batch.bias_starts[s], batch.bias_starts[s + 1])
    np.add.at(z, batch.bias_ids[entries], batch.bias_values[entries].astype(np.float64))
    if batch.allowed[s] >= 0:
        z[~batch.allowed_masks[batch.allowed[s]]] = -np.inf
    entries = slice(batch.history_starts[s], batch.history_starts[s + 1])
    ids, counts = batch.history_ids[entries], batch.history_counts[entries].astype(np.float64)
    repetition = float(batch.repetition_penalties[s])
    seen = z[ids]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    z[ids] = (
        seen
        - float(batch.frequency_penalties[s]) * counts
        - float(batch.presence_penalties[s]) * (counts > 0)
    )
    return z


def _kept(z: Floats, weights: Floats, s: int, batch: SamplingBatch) -> NDArray[np.intp]:
    """Ids of the tokens that may be drawn, rising."""
    kept = np.flatnonzero((weights > 0) & (weights >= float(batch.min_ps[s])))
    top_k, top_p = int(batch.top_ks[s]), float(batch.top_ps[s])
    if top_k <= 0 and top_p >= 1.0:
        return kept
    order = kept[np.argsort(-z[kept], kind="stable")]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        sums = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    return np.sort(order)


def _add_logprobs(result: SampleResult, logits: NDArray[np.float32], batch: SamplingBatch) -> None:
    """Fills the logprobs of every row that has not failed; in a failed row they mean nothing."""
    num_rows, count = len(logits), max(int(batch.num_logprobs.max()), 0)
    count = min(count, logits.shape[1])
    result.logprobs, result.ranks = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
    result.top_ids, result.top_logprobs = (
        np.zeros((num_rows, count), np.int32),
        np.zeros((num_rows, count), np.float32),
    )
    for s in np.flatnonzero(~result.failed):
        raw, token = logits[s].astype(np.float64), result.token_ids[s]
        top = raw.max()
        logprobs = raw - (top + np.log(np.cumsum(np.exp(raw - top))[-1]))
        best = np.argsort(-raw, kind="stable")[:count]
        result.logprobs[s], result.ranks[s] = logprobs[token], 1 + int((raw > raw[token]).sum())
        result.top_ids[s], result.top_logprobs[s] = best, logprobs[best]
