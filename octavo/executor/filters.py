"""The reference of the filters that look at a row's whole distribution: steps 5 and 9 of
`executor/sampling.py`, which says why they stand where they do.

Owns their formulas in NumPy, in float64; a row that asks for none of them never gets here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.intp]

LEAST_TEMPERATURE = 0.01
"""Lower bound of a dynamic temperature."""
MIROSTAT_TOKENS = 100
"""Number of the most likely tokens from which mirostat 1 estimates the exponent of Zipf's law."""


def above_sigmas(z: Floats, num_sigmas: float) -> Floats:
    """Returns `z [V]` with -inf for tokens more than `num_sigmas` deviations below the best."""
    sigma = z[np.isfinite(z)].std()
    return np.where(z >= z.max() - num_sigmas * sigma, z, -np.inf)


def dynamic_temperature(z: Floats, record: Any) -> float:
    """Returns the temperature of `z [V]`, which grows with the entropy of its softmax."""
    middle, reach = float(record["temperature"]), float(record["dynatemp_range"])
    finite = z[np.isfinite(z)]
    if len(finite) < 2:
        return middle
    low, high = max(middle - reach, LEAST_TEMPERATURE), middle + reach
    share = max(_entropy(finite - finite.max()) / np.log(len(finite)), 0.0)
    return low + (high - low) * float(min(share, 1.0) ** float(record["dynatemp_exponent"]))


def typical(z: Floats, temperature: float, typical_p: float) -> Floats:
    """Returns `z [V]` with -inf for tokens whose surprise is far from the entropy."""
    d = (z - z.max()) / temperature
    weights = np.exp(d)
    ids = np.flatnonzero(weights > 0)
    total = weights.sum()
    surprises = np.log(total) - d[ids]
    distances = np.abs(surprises - _entropy(d[ids]))
    order = ids[np.argsort(distances, kind="stable")]
    sums = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(sums, typical_p * sums[-1])) + 1]
    found = np.full_like(z, -np.inf)
    found[order] = z[order]
    return found


def without_top_choices(d: Floats, kept: Ids, threshold: float) -> Ids:
    """Returns `kept`, in the order (d down, id up), without the tokens of at least `threshold`
    probability but the last of them.
    """
    weights = np.exp(d[kept])
    num_viable = int((weights / weights.sum() >= threshold).sum())
    return kept[max(num_viable - 1, 0) :]


def mirostat(d: Floats, kept: Ids, mode: int, mu: float) -> Ids:
    """Returns the beginning of `kept`, in the order (d down, id up), that mirostat draws from."""
    weights = np.exp(d[kept])
    p = weights / weights.sum()
    if mode == 2:
        return kept[: max(1, int((-np.log2(p) <= mu).sum()))]
    return kept[: zipf_count(np.log(p[:MIROSTAT_TOKENS]), mu, len(d))]


def zipf_count(log_p: Floats, mu: float, vocab_size: int) -> int:
    """Returns how many tokens give a surprise of `mu` bits, where `log_p` are the best ones'."""
    if len(log_p) < 2:
        return 1
    places = np.arange(1, len(log_p))
    t, b = np.log((places + 1) / places), log_p[:-1] - log_p[1:]
    exponent = float((t * b).sum() / (t * t).sum())
    epsilon = exponent - 1
    if exponent <= 0:
        return vocab_size
    # The limit at epsilon 0, where both sides of the quotient vanish, is 1 / ln V.
    log_quotient = (
        np.log(epsilon / -np.expm1(-epsilon * np.log(vocab_size)))
        if abs(epsilon) > 1e-9
        else -np.log(np.log(vocab_size))
    )
    log_count = (log_quotient + mu * np.log(2.0)) / exponent
    return max(1, int(min(np.exp(min(log_count, 40.0)), vocab_size)))


def _entropy(d: Floats) -> float:
    """Returns the entropy in nats of the softmax of `d`, all of them finite."""
    weights = np.exp(d)
    total = weights.sum()
    return float(np.log(total) - (weights * d).sum() / total)
