"""Percentiles of measured seconds, as every benchmark here reports them."""

from __future__ import annotations

import math
from collections.abc import Iterable

PERCENTS = (50, 90, 99)


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """The smallest value that at least so many percent do not exceed, in milliseconds; {} where
    there are none.
    """
    ranked = sorted(seconds)
    if not ranked:
        return {}
    return {
        f"p{percent}": 1000 * ranked[math.ceil(len(ranked) * percent / 100) - 1]
        for percent in PERCENTS
    }
