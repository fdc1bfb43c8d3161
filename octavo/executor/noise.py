"""The random numbers of sampling: Philox4x32-10 as a function of seed, position and token.

Source: Salmon et al. 2011. `sampling.py` explains their use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Record = Mapping[str, Any] | np.void
"""A SAMPLING_RECORD, or its fields by name."""
Words = NDArray[np.uint64]
"""32-bit numbers stored in 64 bits, so that products do not overflow."""

MASK32 = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
PHILOX_ROUNDS = 10

SAMPLE_PURPOSE = 0
"""Last counter word (purpose) for the noise that chooses a token."""
XTC_PURPOSE = 1
"""Last counter word (purpose) for the random number that decides whether XTC applies."""


def coin(record: Record) -> float:
    """Returns the uniform number that decides whether XTC applies."""
    return (float(noise_words(record, 1, XTC_PURPOSE)[0]) + 0.5) * 2.0**-32


def noise_words(record: Record, vocab_size: int, purpose: int = SAMPLE_PURPOSE) -> Words:
    """Returns the random word of each token `[V]`, by the record's seed, position and sample."""
    seed = np.uint64(record["seed"])
    quads = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    counter = (record["position"], record["sample_index"], quads, purpose)
    words = philox((seed & MASK32, seed >> HALF), counter)
    return np.stack(words, axis=1).reshape(-1)[:vocab_size]


def noise_words_for(record: Record, token_ids: NDArray[np.integer]) -> Words:
    """Returns the random words of some tokens `[N]`, the same as `noise_words`."""
    seed = np.uint64(record["seed"])
    counter = (record["position"], record["sample_index"], token_ids // 4, SAMPLE_PURPOSE)
    words = philox((seed & MASK32, seed >> HALF), counter)
    chosen_words: Words = np.stack(words, axis=1)[np.arange(len(token_ids)), token_ids % 4]
    return chosen_words


def philox(key: tuple, counter: tuple) -> tuple[Words, Words, Words, Words]:
    """Returns the four output words of Philox4x32-10. `counter` has four words, each a number or an
    array.
    """
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
