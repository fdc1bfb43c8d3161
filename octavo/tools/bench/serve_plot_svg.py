"""Draws a serving benchmark as an SVG: latency distributions above, time series below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from octavo.tools.bench.serve_plot import Course, Latency, ServePlot

WIDTH = 960
HEIGHT = 520
MARGIN = 48
GAP = 56
PANEL_HEIGHT = 180
MAX_POINTS = 400
"""Maximum number of points in a line."""
LINE = "#2563eb"
LIMIT = "#dc2626"


@dataclass(frozen=True, slots=True)
class Box:
    """A panel's position and the range of its axes."""

    left: float
    top: float
    width: float
    low: float
    high: float
    peak: float
    logarithmic: bool

    def x(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.left + share * self.width

    def y(self, value: float) -> float:
        return self.top + PANEL_HEIGHT * (1 - value / self.peak)


def picture(plot: ServePlot) -> str:
    panels: list[str] = []
    width = (WIDTH - 2 * MARGIN - 2 * GAP) / 3
    for index, latency in enumerate(plot.latencies):
        panels += _latency_panel(latency, MARGIN + index * (width + GAP), width)
    width = (WIDTH - 2 * MARGIN - GAP) / 2
    for index, course in enumerate(plot.courses):
        panels += _course_panel(course, plot.elapsed_s, MARGIN + index * (width + GAP), width)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="sans-serif" font-size="11">'
    )
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, ground, *panels, "</svg>"]) + "\n"


def _latency_panel(latency: Latency, left: float, width: float) -> list[str]:
    """Draws the cumulative distribution of a latency, with goodput limits as vertical lines."""
    top = float(MARGIN)
    title = f"{latency.title}: share up to, ms"
    if not latency.times_ms:
        return [_text(left, top - 12, f"{latency.title}: none")]
    shown = [*latency.times_ms, *latency.limits_ms]
    low = max(min(shown), 1e-3) / 1.1
    box = Box(left, top, width, low, max(*shown, low) * 1.1, peak=1.0, logarithmic=True)
    count = len(latency.times_ms)
    step = max(1, count // MAX_POINTS)
    ranks = sorted({*range(0, count, step), count - 1})
    points = [
        (box.x(max(latency.times_ms[rank], low)), box.y((rank + 1) / count)) for rank in ranks
    ]
    limits = [
        f'<line x1="{box.x(one):.1f}" x2="{box.x(one):.1f}" y1="{top}" y2="{top + PANEL_HEIGHT}"'
        f' stroke="{LIMIT}" stroke-dasharray="4 3"><title>limit {one:g} ms</title></line>'
        for one in latency.limits_ms
    ]
    ticks = [(value, f"{value:g}") for value in _decades(box.low, box.high)]
    return [*_frame(box, title, ticks, ("0%", "100%")), *limits, _polyline(points)]


def _course_panel(course: Course, elapsed_s: float, left: float, width: float) -> list[str]:
    """Draws a quantity over the seconds of the run."""
    top = float(2 * MARGIN + PANEL_HEIGHT + 24)
    end = elapsed_s or 1.0
    peak = max(course.values) or 1.0
    box = Box(left, top, width, 0.0, end, peak, logarithmic=False)
    part_s = end / len(course.values)
    points = [
        (box.x((part + 0.5) * part_s), box.y(value)) for part, value in enumerate(course.values)
    ]
    ticks = [(end * quarter / 4, f"{end * quarter / 4:.3g}") for quarter in range(5)]
    title = f"{course.title}, over s"
    return [*_frame(box, title, ticks, ("0", f"{peak:.4g}")), _polyline(points)]


def _frame(
    box: Box, title: str, ticks: Iterable[tuple[float, str]], ends: tuple[str, str]
) -> list[str]:
    """Draws a panel's border, title, ticks and the labels of its y axis."""
    bottom = box.top + PANEL_HEIGHT
    parts = [
        f'<rect x="{box.left:.1f}" y="{box.top}" width="{box.width:.1f}" height="{PANEL_HEIGHT}"'
        ' fill="none" stroke="#999"/>',
        _text(box.left, box.top - 12, title, weight="bold"),
        _text(box.left - 4, bottom, ends[0], anchor="end"),
        _text(box.left - 4, box.top + 9, ends[1], anchor="end"),
    ]
    for value, label in ticks:
        x = box.x(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{box.top}" y2="{bottom}" stroke="#e5e5e5"/>'
        )
        parts.append(_text(x, bottom + 14, label, anchor="middle"))
    return parts


def _decades(low: float, high: float) -> list[float]:
    """Returns ticks at 1, 2 and 5 times powers of ten, at most about eight; the ends of the range
    if there would be fewer than two.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [
            digit * 10.0**power
            for power in powers
            for digit in digits
            if low <= digit * 10.0**power <= high
        ]
        if len(ticks) <= 8:
            break
    return ticks if len(ticks) > 1 else [float(f"{low:.3g}"), float(f"{high:.3g}")]


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{coordinates}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
