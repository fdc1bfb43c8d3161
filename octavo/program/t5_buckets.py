"""Buckets of T5's relative position bias. Raffel et al. 2020, section 2.1; logarithmic buckets as
in its reference code.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.program.ops import T5Bias


def t5_buckets(distance: NDArray[np.int64], bias: T5Bias) -> NDArray[np.int64]:
    """Returns the bucket of each distance, key index - query index.

    Near distances have a bucket each, then buckets are logarithmic up to max_distance. Later keys
    use the upper half of the buckets if bidirectional, otherwise bucket 0.
    """
    num_buckets = bias.num_buckets // 2 if bias.bidirectional else bias.num_buckets
    right = np.where(distance > 0, num_buckets, 0) if bias.bidirectional else 0
    away = np.abs(distance) if bias.bidirectional else np.maximum(-distance, 0)
    exact = num_buckets // 2
    octaves = np.log(np.maximum(away, exact) / exact) / math.log(bias.max_distance / exact)
    far = np.minimum(exact + (octaves * (num_buckets - exact)).astype(np.int64), num_buckets - 1)
    result: NDArray[np.int64] = right + np.where(away < exact, away, far)
    return result
