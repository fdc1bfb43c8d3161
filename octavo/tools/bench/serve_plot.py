"""Data of a benchmark plot: latency distributions and time series.

`serve_plot_svg.py` and `serve_plot_text.py` draw it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo.tools.bench.serve_figures import Outcome, e2e_latency_s, first_token_s, gaps_s
from octavo.tools.bench.stream_client import StreamedAnswer

NUM_PARTS = 120
"""Number of equal intervals of a time series."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of one latency."""

    title: str
    times_ms: list[float]
    """Sorted, ascending."""
    limits_ms: tuple[float, ...]
    """Goodput limits of this latency."""


@dataclass(frozen=True, slots=True)
class Course:
    """A quantity over the run, one value for each interval."""

    title: str
    values: list[float]


@dataclass(frozen=True, slots=True)
class ServePlot:
    latencies: list[Latency]
    courses: list[Course]
    elapsed_s: float


def make_plot(outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> ServePlot:
    """Returns the plot; failed requests are excluded."""
    done = [outcome.streamed for outcome in outcomes if outcome.streamed is not None]
    latencies = [
        _latency(
            "time to first token",
            (first_token_s(streamed) for streamed in done if streamed.token_times),
            limits,
            names=("ttft",),
        ),
        _latency(
            "time between tokens",
            itertools.chain.from_iterable(map(gaps_s, done)),
            limits,
            names=("itl", "tpot"),
        ),
        _latency("whole request", map(e2e_latency_s, done), limits, names=("e2el",)),
    ]
    began = min((streamed.sent for streamed in done), default=0.0)
    elapsed_s = max((streamed.ended for streamed in done), default=0.0) - began
    part_s = elapsed_s / NUM_PARTS
    courses = [
        Course("requests in progress", _in_progress(done, began, part_s)),
        Course("output tokens/s", _token_rates(done, began, part_s)),
    ]
    return ServePlot(latencies, courses, elapsed_s)


def _latency(
    title: str, seconds: Iterable[float], limits: Mapping[str, float], *, names: tuple[str, ...]
) -> Latency:
    bounds = tuple(limits[name] for name in names if name in limits)
    return Latency(title, sorted(1000 * one for one in seconds), bounds)


def _in_progress(done: Sequence[StreamedAnswer], began: float, part_s: float) -> list[float]:
    middles = [began + (part + 0.5) * part_s for part in range(NUM_PARTS)]
    return [float(sum(one.sent <= middle < one.ended for one in done)) for middle in middles]


def _token_rates(done: Sequence[StreamedAnswer], began: float, part_s: float) -> list[float]:
    counts = [0.0] * NUM_PARTS
    for streamed in done:
        for arrived in streamed.token_times:
            part = int((arrived - began) / part_s) if part_s else 0
            counts[min(part, NUM_PARTS - 1)] += streamed.num_tokens / len(streamed.token_times)
    return [count / part_s if part_s else 0.0 for count in counts]
