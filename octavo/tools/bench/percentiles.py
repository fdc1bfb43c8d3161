from __future__ import annotations

import math
from collections.abc import Iterable

PERCENTS = (50, 90, 99)


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Returns nearest-rank percentiles in milliseconds, by name, such as "p50"; {} if there are no
    times.
    """
    ranked = sorted(seconds)
    if not ranked:
        return {}
    return {
        f"p{percent}": 1000 * ranked[math.ceil(len(ranked) * percent / 100) - 1]
        for percent in PERCENTS
    }
