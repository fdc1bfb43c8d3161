"""The reference of the filters, in NumPy and float64: which tokens of a row may be sampled.

A row at temperature 0 has no filters. Each filter works on the tokens that the previous filters
kept. Tokens are always ordered by (z descending, id ascending).

1. top_n_sigma n > 0: kept are the z >= max z - n * sigma, with sigma the standard deviation of the
   finite z.
2. temperature T; with a dynatemp_range r > 0 instead low + (high - low) * (H / ln N)^exponent, with
   low = max(T - r, 0.01), high = T + r, and H the entropy of the softmax of the N finite z.
3. typical_p < 1: with p the softmax of z / T and H its entropy, tokens are ordered by |-ln p - H|,
   the lower id first among equals; kept is the shortest prefix of that order whose running sum of p
   reaches typical_p.
4. min_p: d = (z - max z) / T and e = exp(d). Kept are the tokens with e > 0 and e >= min_p (min_p
   is relative to the most likely token).
5. top_k > 0: kept are the first top_k.
6. top_p < 1: kept is the shortest prefix of the order whose running sum of e reaches top_p times
   the whole sum. Running sums are computed one by one, left to right.
7. XTC, if the row's coin falls below xtc_probability: of the tokens with p >= xtc_threshold all but
   the last in the order are removed. The coin is u of word 0 at purpose 1.
8. mirostat_mode 2: kept are the tokens whose surprise -log2 p is at most mu, and always the first.
   mirostat_mode 1: the first max(1, floor(k)), with Zipf's exponent s = sum t b / sum t^2 over the
   100 likeliest, t_i = ln((i + 1) / i), b_i = ln(p_i / p_(i+1)), epsilon = s - 1 and
   k = (epsilon * 2^mu / (1 - V^-epsilon))^(1 / s). The token's surprise, among the tokens left,
   is returned with it; the host, which owns mu, computes mu -= eta * (surprise - tau).

Deviation and entropy refer to the complete distribution, so the "distribution" filters (1 to 3)
come first, then the cutoffs (4 to 6), then the "after_cutoff" filters (7 and 8). As in vLLM and
transformers, temperature precedes min_p, top_k and top_p. XTC removes some of the tokens that are
good enough, so as in llama.cpp it follows the filters that determine them. Mirostat controls the
surprise of the sample, so no filter may follow it. llama.cpp applies top_k before typical_p, min_p
after top_p, temperature last, and no other filter together with mirostat; here all filters can be
combined. DRY is a bias on logits, before the penalties.

Sources. min_p: Nguyen et al. 2024; top_p: Holtzman et al. 2020; typical_p: Meister et al. 2022;
top_n_sigma: Tang et al. 2024; mirostat: Basu et al. 2021 (the surprise of the truncated
distribution, as in llama.cpp); XTC: P. E. Weidmann 2024; dynamic temperature: kalomaze 2023.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.executor.noise import Floats, Record, coin

Ids = NDArray[np.intp]

MIN_TEMPERATURE = 0.01
"""Lower bound of a dynamic temperature."""
MIROSTAT_TOKENS = 100
"""Number of the most likely tokens from which mirostat 1 estimates the exponent of Zipf's law."""


def kept_distances(z: Floats, record: Record) -> Floats:
    """Returns d of each token of `z [V]`, -inf for tokens not kept."""
    temperature = float(record["temperature"])
    if record["top_n_sigma"] > 0:
        z = above_sigmas(z, float(record["top_n_sigma"]))
    if record["dynatemp_range"] > 0:
        temperature = dynamic_temperature(z, record)
    if record["typical_p"] < 1:
        z = typical(z, temperature, float(record["typical_p"]))
    d = (z - z.max()) / temperature
    kept_ids = above_cutoffs(z, np.exp(d), record)
    throws = record["xtc_probability"] > 0
    if throws or record["mirostat_mode"] > 0:
        kept_ids = kept_ids[np.lexsort((kept_ids, -z[kept_ids]))]
    if throws and coin(record) < float(record["xtc_probability"]):
        kept_ids = without_top_choices(d, kept_ids, float(record["xtc_threshold"]))
    if record["mirostat_mode"] > 0:
        mode, mu = int(record["mirostat_mode"]), float(record["mirostat_mu"])
        kept_ids = mirostat(d, kept_ids, mode, mu)
    distances = np.full(len(z), -np.inf)
    distances[kept_ids] = d[kept_ids]
    return distances


def above_sigmas(z: Floats, num_sigmas: float) -> Floats:
    """Returns `z [V]` with -inf for tokens more than `num_sigmas` deviations below the best."""
    sigma = z[np.isfinite(z)].std()
    return np.where(z >= z.max() - num_sigmas * sigma, z, -np.inf)


def dynamic_temperature(z: Floats, record: Record) -> float:
    """Returns the temperature of `z [V]`, which grows with the entropy of its softmax."""
    middle, reach = float(record["temperature"]), float(record["dynatemp_range"])
    finite = z[np.isfinite(z)]
    if len(finite) < 2:
        return middle
    low, high = max(middle - reach, MIN_TEMPERATURE), middle + reach
    share = max(_entropy(finite - finite.max()) / np.log(len(finite)), 0.0)
    return low + (high - low) * float(min(share, 1.0) ** float(record["dynatemp_exponent"]))


def typical(z: Floats, temperature: float, typical_p: float) -> Floats:
    """Returns `z [V]` with -inf for tokens that typical_p removes."""
    d = (z - z.max()) / temperature
    weights = np.exp(d)
    ids = np.flatnonzero(weights > 0)
    total = weights.sum()
    surprises = np.log(total) - d[ids]
    distances = np.abs(surprises - _entropy(d[ids]))
    order = ids[np.argsort(distances, kind="stable")]
    sums = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(sums, typical_p * sums[-1])) + 1]
    filtered = np.full_like(z, -np.inf)
    filtered[order] = z[order]
    return filtered


def above_cutoffs(z: Floats, weights: Floats, record: Record) -> Ids:
    """Returns the ids that min_p, top_k and top_p keep."""
    kept_ids = np.flatnonzero((weights > 0) & (weights >= float(record["min_p"])))
    top_k, top_p = int(record["top_k"]), float(record["top_p"])
    if top_k <= 0 and top_p >= 1.0:
        return kept_ids
    order = kept_ids[order_tokens(z[kept_ids])]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        sums = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    return order


def order_tokens(z: Floats) -> Ids:
    """Returns the indices of `z`, ordered by (z descending, index ascending)."""
    return np.argsort(-z, kind="stable")


def without_top_choices(d: Floats, kept_ids: Ids, threshold: float) -> Ids:
    """Returns `kept_ids`, ordered by (d descending, id ascending), without the tokens of at least
    `threshold` probability; the last of these stays.
    """
    weights = np.exp(d[kept_ids])
    num_viable = int((weights / weights.sum() >= threshold).sum())
    return kept_ids[max(num_viable - 1, 0) :]


def mirostat(d: Floats, kept_ids: Ids, mode: int, mu: float) -> Ids:
    """Returns the prefix of `kept_ids` that mirostat keeps; the ids are ordered by (d descending,
    id ascending).
    """
    weights = np.exp(d[kept_ids])
    p = weights / weights.sum()
    if mode == 2:
        return kept_ids[: max(1, int((-np.log2(p) <= mu).sum()))]
    return kept_ids[: zipf_count(np.log(p[:MIROSTAT_TOKENS]), mu, len(d))]


def zipf_count(log_p: Floats, mu: float, vocab_size: int) -> int:
    """Returns how many of the most likely tokens give a surprise of `mu` bits, estimated from
    `log_p` of the best ones.
    """
    if len(log_p) < 2:
        return 1
    ranks = np.arange(1, len(log_p))
    t, b = np.log((ranks + 1) / ranks), log_p[:-1] - log_p[1:]
    exponent = float((t * b).sum() / (t * t).sum())
    epsilon = exponent - 1
    if exponent <= 0:
        return vocab_size
    # At epsilon 0 numerator and denominator vanish; the limit is 1 / ln V.
    log_quotient = (
        np.log(epsilon / -np.expm1(-epsilon * np.log(vocab_size)))
        if abs(epsilon) > 1e-9
        else -np.log(np.log(vocab_size))
    )
    log_count = (log_quotient + mu * np.log(2.0)) / exponent
    return max(1, int(min(np.exp(min(log_count, 40.0)), vocab_size)))


def _entropy(d: Floats) -> float:
    """Returns the entropy in nats of the softmax of finite `d`."""
    weights = np.exp(d)
    total = weights.sum()
    return float(np.log(total) - (weights * d).sum() / total)


def surprise(distances: Floats, token: int) -> float:
    """Returns the surprise of a token in bits, among the kept tokens."""
    d = distances - distances.max()
    return float((np.log(np.exp(d).sum()) - d[token]) / np.log(2.0))
