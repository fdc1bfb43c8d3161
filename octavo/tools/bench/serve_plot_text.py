"""Draws a serving benchmark as text for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from octavo.tools.bench.serve_plot import Course, Latency, ServePlot

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#@"
LABEL_WIDTH = 24
SIDE_WIDTH = 12
"""Columns of the numbers at either side of a row."""
MIN_COLUMNS = 10
MAX_COLUMNS = 80


def lines(plot: ServePlot, width: int, encoding: str = "utf-8") -> str:
    """Returns a row for each latency and time series, at most `width` columns wide.

    A latency's row is a histogram on a logarithmic scale; a time series' row runs from start to
    end.
    """
    columns = min(MAX_COLUMNS, max(MIN_COLUMNS, width - LABEL_WIDTH - 2 * SIDE_WIDTH))
    ramp = BLOCKS if encoding.lower().replace("-", "") == "utf8" else ASCII
    rows = [_latency_row(one, columns, ramp) for one in plot.latencies if one.times_ms]
    rows += [_course_row(one, plot.elapsed_s, columns, ramp) for one in plot.courses]
    return "\n".join(rows)


def _latency_row(latency: Latency, columns: int, ramp: str) -> str:
    low = max(latency.times_ms[0], 1e-3)
    high = max(latency.times_ms[-1], low)
    counts = [0.0] * columns
    for time_ms in latency.times_ms:
        fraction = math.log(max(time_ms, low) / low) / math.log(high / low) if high > low else 0.0
        counts[min(columns - 1, int(fraction * columns))] += 1
    return _row(latency.title, f"{low:.4g} ms", counts, f"{high:.4g} ms", ramp)


def _course_row(course: Course, elapsed_s: float, columns: int, ramp: str) -> str:
    """Draws a time series as mean values for each column, with the maximum in front."""
    values = course.values
    edges = [index * len(values) / columns for index in range(columns + 1)]
    slices = [
        values[int(low) : max(int(low) + 1, int(high))] for low, high in itertools.pairwise(edges)
    ]
    means = [sum(part) / len(part) for part in slices]
    return _row(course.title, f"to {max(means):.4g}", means, f"{elapsed_s:.4g} s", ramp)


def _row(title: str, left: str, values: Sequence[float], right: str, ramp: str) -> str:
    greatest = max(values)
    bars = "".join(_bar(value, greatest, ramp) for value in values)
    return f"{title:{LABEL_WIDTH}}{left:>{SIDE_WIDTH - 1}} {bars} {right}"


def _bar(value: float, greatest: float, ramp: str) -> str:
    """Returns a bar character; only zero is blank."""
    return ramp[math.ceil((len(ramp) - 1) * value / greatest)] if greatest else ramp[0]
