"""Output of `octavo bench --profile`: a table of ops and a roofline plot (SVG).

The plot shows operations per second over operations per byte on logarithmic axes: a roof for the
bandwidth and one for each weight format, and a dot for each op, sized by its fraction of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from octavo.api.outputs import OpProfile, Profile

WIDTH, HEIGHT, MARGIN = 860, 560, 70
COLOURS = ("#1f6feb", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#57606a")


def table(profile: Profile) -> str:
    """Returns one line for each op, slowest first, and one for the total.

    Each line shows the achieved fraction of the machine's bandwidth, of its compute rate, and of
    the tighter of both bounds.
    """
    total = sum(op.seconds for op in profile.ops)
    lines = [
        (
            f"{'op':34}{'calls':>8}{'ms':>10}{'time':>7}{'GB/s':>9}{'of max':>8}"
            f"{'GFLOP/s':>10}{'of max':>8}{'of bound':>10}"
        ),
        *(_line(profile, op, total) for op in _by_time(profile)),
        *([_sum(profile, total)] if profile.ops else []),
        f"most this machine gave: {profile.bandwidth / 1e9:.1f} GB/s from the weights' size; "
        + ", ".join(
            f"{code} {rate / 1e9:,.0f} GFLOP/s" for code, rate in sorted(profile.rates.items())
        )
        + (
            f"; {profile.hop_s * 1e9:.0f} ns for a cache line from core to core"
            if profile.hop_s
            else ""
        ),
    ]
    return "\n".join(lines)


def _by_time(profile: Profile) -> list[OpProfile]:
    return sorted(profile.ops, key=lambda op: -op.seconds)


def _line(profile: Profile, op: OpProfile, total: float) -> str:
    of_rate = (
        f"{op.operations / op.seconds / profile.rates[op.code]:8.0%}"
        if op.code in profile.rates
        else ""
    )
    reached = _reached(profile, op, of_rate, profile.bound_s(op)) if op.num_bytes else ""
    return f"{op.name:34}{op.calls:8}{1000 * op.seconds:10.2f}{op.seconds / total:7.1%}{reached}"


def _sum(profile: Profile, total: float) -> str:
    """Returns the line for the total.

    Its last number is the sum of all ops' bounds divided by the time; in single-stream decoding,
    the bound is mostly the time to read weights and KV.
    """
    num_bytes = sum(op.num_bytes for op in profile.ops)
    operations = sum(op.operations for op in profile.ops)
    all_ops = OpProfile("all", "", 0, total, num_bytes, operations)
    reached = _reached(profile, all_ops, "", sum(profile.bound_s(op) for op in profile.ops))
    return f"{'all':42}{1000 * total:10.2f}{1:7.1%}{reached}"


def _reached(profile: Profile, op: OpProfile, of_rate: str, bound_s: float) -> str:
    speed = op.num_bytes / op.seconds
    return (
        f"{speed / 1e9:9.1f}{speed / profile.bandwidth:8.0%}"
        f"{op.operations / op.seconds / 1e9:10.1f}{of_rate:8}{bound_s / op.seconds:10.0%}"
    )


class _Axes:
    """Logarithmic axes: x is operations per byte, y operations per second."""

    def __init__(self, profile: Profile, ops: list[OpProfile]) -> None:
        intensities = [op.operations / op.num_bytes for op in ops]
        ridges = [rate / profile.bandwidth for rate in profile.rates.values()]
        rates = [op.operations / op.seconds for op in ops] + list(profile.rates.values())
        self.left, self.right = _decades(intensities + ridges)
        self.bottom, self.top = _decades(rates)

    def x(self, intensity: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (math.log10(intensity) - self.left) / (
            self.right - self.left
        )

    def y(self, rate: float) -> float:
        return (
            HEIGHT
            - MARGIN
            - (HEIGHT - 2 * MARGIN) * (math.log10(rate) - self.bottom) / (self.top - self.bottom)
        )


def _decades(values: list[float]) -> tuple[int, int]:
    return math.floor(math.log10(min(values))), math.floor(math.log10(max(values))) + 1


def picture(profile: Profile, title: str) -> str:
    """Returns the SVG; raises ValueError if no op counts bytes and operations."""
    ops = [op for op in _by_time(profile) if op.num_bytes and op.operations]
    if not ops:
        raise ValueError("nothing ran that counts bytes and operations")
    axes = _Axes(profile, ops)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="30" font-size="15">{escape(title)}</text>',
        *_grid(axes),
        *_roofs(axes, profile),
        *_draw_dots(axes, ops),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(axes: _Axes) -> Iterator[str]:
    for decade in range(axes.left, axes.right + 1):
        x = axes.x(10**decade)
        yield (
            f'<line x1="{x:.1f}" y1="{MARGIN}" x2="{x:.1f}" y2="{HEIGHT - MARGIN}"'
            ' stroke="#eaeef2"/>'
        )
        yield (
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}"'
            f' text-anchor="middle">{10**decade:g}</text>'
        )
    for decade in range(axes.bottom, axes.top + 1):
        y = axes.y(10.0**decade)
        yield (
            f'<line x1="{MARGIN}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}"'
            ' stroke="#eaeef2"/>'
        )
        yield (
            f'<text x="{MARGIN - 8}" y="{y + 4:.1f}"'
            f' text-anchor="end">{10.0 ** (decade - 9):g}</text>'
        )
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 24}" text-anchor="middle">operations per byte</text>'
    yield (
        f'<text x="20" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 20'
        f' {HEIGHT / 2})">GFLOP/s</text>'
    )


def _roofs(axes: _Axes, profile: Profile) -> Iterator[str]:
    """Draws the bandwidth slope up to the highest rate, and a horizontal line for each weight
    format.
    """
    peak = max(profile.rates.values(), default=10.0**axes.top)
    low = max(10.0**axes.left, 10.0**axes.bottom / profile.bandwidth)
    ends = [(low, low * profile.bandwidth), (peak / profile.bandwidth, peak)]
    (x1, y1), (x2, y2) = [(axes.x(intensity), axes.y(rate)) for intensity, rate in ends]
    yield (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#24292f"'
        ' stroke-width="2"/>'
    )
    yield f'<text x="{x1 + 6:.1f}" y="{y1 - 10:.1f}">{profile.bandwidth / 1e9:.1f} GB/s</text>'
    for code, rate in profile.rates.items():
        x, y = axes.x(rate / profile.bandwidth), axes.y(rate)
        yield (
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}" stroke="#24292f"'
            ' stroke-width="2"/>'
        )
        yield (
            f'<text x="{WIDTH - MARGIN}" y="{y - 6:.1f}" text-anchor="end">{escape(code)}:'
            f" {rate / 1e9:,.0f} GFLOP/s</text>"
        )


def _draw_dots(axes: _Axes, ops: list[OpProfile]) -> Iterator[str]:
    total = sum(op.seconds for op in ops)
    for index, op in enumerate(ops):
        colour = COLOURS[index % len(COLOURS)]
        x, y = axes.x(op.operations / op.num_bytes), axes.y(op.operations / op.seconds)
        radius = 4 + 16 * math.sqrt(op.seconds / total)
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"'
            ' fill-opacity="0.6"/>'
        )
        legend = HEIGHT - MARGIN - 18 * (len(ops) - index) + 6
        yield f'<circle cx="{WIDTH - 300}" cy="{legend - 4}" r="5" fill="{colour}"/>'
        yield (
            f'<text x="{WIDTH - 288}" y="{legend}">{escape(op.name)},'
            f" {op.seconds / total:.0%}</text>"
        )
