"""The reference sampler: draws tokens from logits in NumPy, row by row, in float64.

The other backends follow this text for a row of float32 logits z[0..V):

1. With a NaN among the logits the row has failed. Logprobs, where wanted, are of these raw logits:
   z - (max + ln sum exp(z - max)). A token's rank is its place in the order (logit down, id up),
   from 1, and the top list is the beginning of that order.
2. A row with `target_id` >= 0 is of a token that is known, and whose logprob is wanted: nothing is
   drawn, the target is the row's token. A request's logits_processors make new logits of z, one
   after another.
3. z += bias, where a token has one (-inf bans it); z = -inf outside the tokens that
   allowed_token_ids and the grammar allow. Then for each token of prompt and answer, which the
   answer has c times: z = z / r where z > 0, else z * r, with the repetition penalty r;
   z -= frequency * c; z -= presence where c > 0. If no finite maximum is left (everything is
   banned, or something is infinite), the row has failed.
4. At temperature 0 the token is the one with the largest z, the lowest id among equals.
5. Otherwise tokens are filtered, in the order of steps 5 to 9. Each filter sees what the ones
   before it left as a distribution of its own; the order of tokens is always (z down, id up).
   - top_n_sigma n > 0: kept are the z >= max z - n * sigma, with sigma the standard deviation of
     the finite z.
   - temperature T; with a dynatemp_range r > 0 instead low + (high - low) * (H / ln N)^exponent,
     with low = max(T - r, 0.01), high = T + r, and H the entropy of the softmax of the N finite z.
   - typical_p < 1: with p the softmax of z / T and H its entropy, tokens are ordered by
     |-ln p - H|, the lower id first among equals; kept is the shortest beginning of that order
     whose running sum of p reaches typical_p.
6. min_p: d = (z - max z) / T and e = exp(d). Kept are the tokens with e > 0 and e >= min_p (min_p
   is relative to the most likely token).
7. top_k > 0: kept are the first top_k.
8. top_p < 1: kept is the shortest beginning of the order whose running sum of e reaches top_p times
   the whole sum. Running sums go one by one, left to right.
9. What looks at the tokens that are left:
   - XTC, where the row's coin falls below xtc_probability: of the tokens with p >= xtc_threshold
     all but the last in the order are removed. The coin is u of word 0 at purpose 1.
   - mirostat_mode 2: kept are the tokens whose surprise -log2 p is at most mu, and always the
     first. mirostat_mode 1: the first max(1, floor(k)), with Zipf's exponent s = sum t b / sum t^2
     over the 100 likeliest, t_i = ln((i + 1) / i), b_i = ln(p_i / p_(i+1)), epsilon = s - 1 and
     k = (epsilon * 2^mu / (1 - V^-epsilon))^(1 / s). The token's surprise, among the tokens left,
     goes back with it; mu -= eta * (surprise - tau) is the host's, which owns mu.
10. The token is the kept one with the largest score d + g, the lowest id among equals. The noise
   g = -ln(-ln u), with u = (k + 1/2) / 2^32, makes this a draw from the softmax over the kept
   tokens (Gumbel-max). k is word `token % 4` of Philox4x32-10 with the key (low, high 32 bits of
   the seed) and the counter (position, sample_index, token // 4, purpose). Above u = 1/2, -ln u is
   -log1p(-(1 - u)), since a narrower type would round u to 1.

Why this order: what a filter measures (a deviation, an entropy) is of the whole distribution, so
these come first; temperature before min_p, top_k and top_p is vLLM's and transformers' order;
XTC removes choices among tokens that are good enough, so it follows what says which these are, as
in llama.cpp; mirostat steers the surprise of the draw itself, and nothing may change it behind.
llama.cpp takes top_k before typical_p, min_p behind top_p and temperature last, and with mirostat
no other filter; here all combine. DRY reaches step 3 as a bias, before the penalties.

Noise belongs to a token and not to its place among the kept ones, so the best score among the
tokens that some mask allows is the masked draw. g lies between -3.13 and 22.88: a token whose d is
further below the best score cannot win.

A failed row ends its request with an error, and no other one; its token is 0.

Sources. Philox: Salmon et al. 2011; Gumbel-max: Maddison et al. 2014; min_p: Nguyen et al. 2024;
top_p: Holtzman et al. 2020; typical_p: Meister et al. 2022; top_n_sigma: Tang et al. 2024;
mirostat: Basu et al. 2021 (the surprise of the truncated distribution, as in llama.cpp); XTC and
DRY: P. E. Weidmann 2024; dynamic temperature: kalomaze 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor import filters
from octavo.executor.batch import (
    MOST_CANDIDATES,
    MOST_WITNESSES,
    Redraw,
    SampleResult,
    SamplingBatch,
    unpacked_mask,
)
from octavo.executor.witnesses import without_cuts, witnesses

Floats = NDArray[np.float64]
Record = Mapping[str, Any] | np.void
"""A SAMPLING_RECORD, or its fields by name."""
Words = NDArray[np.uint64]
"""Numbers of 32 bits in 64, so that two of them can be multiplied."""

MASK32 = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
PHILOX_ROUNDS = 10

DRAW_PURPOSE = 0
"""Last word of the counter of the noise that chooses a token."""
XTC_PURPOSE = 1
"""Last word of the counter of the coin that XTC throws."""


def sample(
    logits: NDArray[np.float32],
    batch: SamplingBatch,
    drawn_from: NDArray[np.float32] | None = None,
) -> SampleResult:
    """Draws a token of each row of `logits [S, V]`, which stay as they are; from the rows of
    `drawn_from [S, V]` where these are given. Logprobs are of `logits`.
    """
    num_rows = len(logits)
    result = SampleResult(np.zeros(num_rows, np.int32), np.zeros(num_rows, np.bool_))
    if num_rows and batch.records["mirostat_mode"].any():
        result.surprises = np.zeros(num_rows, np.float32)
    drawn_from = logits if drawn_from is None else drawn_from
    records, uncut = batch.records, batch.uncut
    if uncut is not None:
        result.witnesses = found = np.full((num_rows, MOST_WITNESSES), -1, np.int32)
        batch = without_cuts(batch, uncut)
    for s in range(num_rows):
        if batch.late is not None and batch.late[s]:
            continue
        raw = drawn_from[s].astype(np.float64)
        token = None if np.isnan(raw).any() else _choose(raw, s, batch, result)
        result.failed[s] = token is None
        result.token_ids[s] = 0 if token is None else token
        if token is not None and uncut is not None and uncut[s]:
            shown = witnesses(changed_logits(raw, s, batch), records[s], token)
            found[s, : len(shown)] = shown
    if num_rows and (records["num_logprobs"].max() >= 0 or records["target_id"].max() >= 0):
        _add_logprobs(result, logits, batch)
    return result


def masked(batch: SamplingBatch, redraw: Redraw) -> SamplingBatch:
    """Returns a batch in which the rows that are drawn again have their masks and bounds; the
    others draw what they drew.
    """
    records = batch.records.copy()
    if redraw.mirostat_mus is not None:
        given = ~np.isnan(redraw.mirostat_mus)
        records["mirostat_mu"][redraw.samples[given]] = redraw.mirostat_mus[given]
    records["allowed_mask"][redraw.samples] = len(batch.allowed_masks) + np.arange(
        len(redraw.samples)
    )
    masks = np.concatenate([batch.allowed_masks, redraw.masks])
    return replace(batch, records=records, allowed_masks=masks, late=None, uncut=None)


def replaced(logits: NDArray[np.float32], redraw: Redraw) -> NDArray[np.float32]:
    """Returns the logits `[S, V]` that rows are drawn from when some are drawn again."""
    if redraw.logits is None or redraw.places is None:
        return logits
    changed = logits.copy()
    for entry, place in zip(redraw.samples, redraw.places, strict=True):
        if place >= 0:
            changed[entry] = redraw.logits[place]
    return changed


def candidates(z: Floats, record: Record) -> NDArray[np.intp]:
    """Returns the tokens that a draw without filters would take one after another if those before
    were masked, of `z [V]`, the changed logits; at most MOST_CANDIDATES.
    """
    values = z
    if record["temperature"] > 0:
        words = noise_words(record, len(z))
        values = (z - z.max()) / float(record["temperature"]) + gumbel(words)
    order = _order(values)[:MOST_CANDIDATES]
    return order[np.isfinite(values[order])]


def row_candidates(logits: NDArray[np.float32], batch: SamplingBatch, s: int) -> NDArray[np.int32]:
    """Returns the candidates of row s of a batch, of its own `logits [V]`, padded with -1."""
    found = candidates(changed_logits(logits.astype(np.float64), s, batch), batch.records[s])
    return np.pad(found.astype(np.int32), (0, MOST_CANDIDATES - len(found)), constant_values=-1)


def scores(z: Floats, record: Record) -> Floats:
    """Returns d + g of each token of `z [V]`, the changed logits, and -inf where it is not kept."""
    distances = kept_distances(z, record)
    return distances + gumbel(noise_words(record, len(z)))


def kept_distances(z: Floats, record: Record) -> Floats:
    """Returns d of each token of `z [V]`, and -inf where it is not kept."""
    temperature = float(record["temperature"])
    if record["top_n_sigma"] > 0:
        z = filters.above_sigmas(z, float(record["top_n_sigma"]))
    if record["dynatemp_range"] > 0:
        temperature = filters.dynamic_temperature(z, record)
    if record["typical_p"] < 1:
        z = filters.typical(z, temperature, float(record["typical_p"]))
    d = (z - z.max()) / temperature
    kept = _kept(z, np.exp(d), record)
    throws = record["xtc_probability"] > 0
    if throws or record["mirostat_mode"] > 0:
        kept = kept[np.lexsort((kept, -z[kept]))]
    if throws and coin(record) < float(record["xtc_probability"]):
        kept = filters.without_top_choices(d, kept, float(record["xtc_threshold"]))
    if record["mirostat_mode"] > 0:
        mode, mu = int(record["mirostat_mode"]), float(record["mirostat_mu"])
        kept = filters.mirostat(d, kept, mode, mu)
    found = np.full(len(z), -np.inf)
    found[kept] = d[kept]
    return found


def surprise(distances: Floats, token: int) -> float:
    """Returns the bits of surprise of a token among those that could be drawn."""
    d = distances - distances.max()
    return float((np.log(np.exp(d).sum()) - d[token]) / np.log(2.0))


def coin(record: Record) -> float:
    """Returns u of the coin that XTC throws."""
    return (float(noise_words(record, 1, XTC_PURPOSE)[0]) + 0.5) * 2.0**-32


def noise_words(record: Record, vocab_size: int, purpose: int = DRAW_PURPOSE) -> Words:
    """Returns the random word of each token `[V]`, by the record's seed, position and sample."""
    seed = np.uint64(record["seed"])
    quads = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    counter = (record["position"], record["sample_index"], quads, purpose)
    words = philox((seed & MASK32, seed >> HALF), counter)
    return np.stack(words, axis=1).reshape(-1)[:vocab_size]


def noise_words_of(record: Record, token_ids: NDArray[np.integer]) -> Words:
    """Returns the random words of some tokens `[N]`, as `noise_words` has them."""
    seed = np.uint64(record["seed"])
    counter = (record["position"], record["sample_index"], token_ids // 4, DRAW_PURPOSE)
    words = philox((seed & MASK32, seed >> HALF), counter)
    found: Words = np.stack(words, axis=1)[np.arange(len(token_ids)), token_ids % 4]
    return found


def philox(key: tuple, counter: tuple) -> tuple[Words, Words, Words, Words]:
    """Returns the four words of Philox4x32-10 at `counter`, four words that may be arrays."""
    k0, k1 = (np.asarray(word, np.uint64) for word in key)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1 = (p1 >> HALF) ^ c1 ^ k0, p1 & MASK32
        c2, c3 = (p0 >> HALF) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK32, (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def gumbel(words: Words) -> Floats:
    """Returns g = -ln(-ln u) with u = (word + 1/2) / 2^32."""
    u, rest = (words + 0.5) * 2.0**-32, (MASK32 - words + 0.5) * 2.0**-32
    minus_log: Floats = np.where(u > 0.5, -np.log1p(-rest), -np.log(u))
    noise: Floats = -np.log(minus_log)
    return noise


def _choose(raw: Floats, s: int, batch: SamplingBatch, result: SampleResult) -> int | None:
    """Returns the row's token, or None where it has failed; notes its surprise."""
    record = batch.records[s]
    if record["target_id"] >= 0:
        return int(record["target_id"])
    z = changed_logits(raw, s, batch)
    if not np.isfinite(z.max()):
        return None
    if record["temperature"] == 0.0:
        return int(z.argmax())
    token = int(scores(z, record).argmax())
    if result.surprises is not None and record["mirostat_mode"] > 0:
        result.surprises[s] = surprise(kept_distances(z, record), token)
    return token


def changed_logits(raw: Floats, s: int, batch: SamplingBatch) -> Floats:
    """Returns row s's logits after bias, mask and penalties."""
    z, record = raw.copy(), batch.records[s]
    entries = slice(batch.bias_starts[s], batch.bias_starts[s + 1])
    np.add.at(z, batch.bias_ids[entries], batch.bias_values[entries].astype(np.float64))
    if record["allowed_mask"] >= 0:
        z[~unpacked_mask(batch.allowed_masks[record["allowed_mask"]], len(z))] = -np.inf
    entries = slice(batch.history_starts[s], batch.history_starts[s + 1])
    ids, counts = batch.history_ids[entries], batch.history_counts[entries].astype(np.float64)
    repetition = float(record["repetition_penalty"])
    seen = z[ids]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    frequency, presence = float(record["frequency_penalty"]), float(record["presence_penalty"])
    z[ids] = seen - frequency * counts - presence * (counts > 0)
    return z


def _kept(z: Floats, weights: Floats, record: Record) -> NDArray[np.intp]:
    """Returns the ids of the tokens that may be drawn."""
    kept = np.flatnonzero((weights > 0) & (weights >= float(record["min_p"])))
    top_k, top_p = int(record["top_k"]), float(record["top_p"])
    if top_k <= 0 and top_p >= 1.0:
        return kept
    order = kept[_order(z[kept])]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        sums = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    return order


def _order(z: Floats) -> NDArray[np.intp]:
    """Returns the places of `z` in the order (z down, place up)."""
    return np.argsort(-z, kind="stable")


def _add_logprobs(result: SampleResult, logits: NDArray[np.float32], batch: SamplingBatch) -> None:
    """Fills the logprobs of every row that has not failed; in a failed row they mean nothing."""
    num_rows, vocab_size = logits.shape
    count = min(max(int(batch.records["num_logprobs"].max()), 0), vocab_size)
    result.logprobs, result.ranks = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
    result.top_ids = np.zeros((num_rows, count), np.int32)
    result.top_logprobs = np.zeros((num_rows, count), np.float32)
    for s in np.flatnonzero(~result.failed):
        raw, token = logits[s].astype(np.float64), result.token_ids[s]
        top = raw.max()
        logprobs = raw - (top + np.log(np.cumsum(np.exp(raw - top))[-1]))
        order = _order(raw)
        result.logprobs[s] = logprobs[token]
        result.ranks[s] = 1 + int(np.flatnonzero(order == token)[0])
        result.top_ids[s] = order[:count]
        result.top_logprobs[s] = logprobs[order[:count]]
