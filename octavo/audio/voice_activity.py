"""Finds speech in audio by its energy, and splits it at pauses.

A frame of 10 ms is speech if its level is above a fraction of the range between the background
(10th percentile of all frames) and the loudest speech (99th percentile), in decibels. Independent
of models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FRAME_S = 0.01
"""Length of a frame, in seconds."""
SMOOTHED_FRAMES = 5
MIN_POWER = 1e-9
"""Power of silence, -90 dB."""
MIN_LEVEL_DB = -60.0
"""Level below which nothing is speech."""
MIN_RANGE_DB = 6.0
"""Range of levels below which audio has no pauses."""

Span = tuple[float, float]
"""Start and end, in seconds."""


def find_speech(
    samples: NDArray[np.float32],
    rate: int,
    *,
    threshold: float,
    padding_s: float,
    silence_s: float,
) -> list[Span]:
    """Returns the spans of `samples [N]` with speech, in order; [] if there is none.

    `threshold` is the fraction of the range of levels, from 0 to 1. Pauses shorter than `silence_s`
    belong to the speech; each span is extended by `padding_s` before it and `silence_s` after it.
    """
    levels = get_levels(samples, rate)
    if not len(levels):
        return []
    background, loudest = np.percentile(levels, (10, 99))
    if loudest < MIN_LEVEL_DB:
        return []
    duration_s = len(samples) / rate
    if loudest - background < MIN_RANGE_DB:
        return [(0.0, duration_s)]
    least = max(background + threshold * (loudest - background), MIN_LEVEL_DB)
    edges = np.flatnonzero(np.diff(np.pad(levels >= least, 1).astype(np.int8)))
    spans: list[Span] = []
    for first, last in edges.reshape(-1, 2) * FRAME_S:
        start_s = max(float(first) - padding_s, 0.0)
        end_s = min(float(last) + silence_s, duration_s)
        if spans and (start_s <= spans[-1][1] or first - (spans[-1][1] - silence_s) < silence_s):
            start_s = spans.pop()[0]
        spans.append((start_s, end_s))
    return spans


def get_levels(samples: NDArray[np.float32], rate: int) -> NDArray[np.float64]:
    """Returns the smoothed level of each frame in dB, `[N / frame]`; the last frame may be cut."""
    if not len(samples):
        return np.zeros(0)
    frame = round(rate * FRAME_S)
    power = np.pad(samples.astype(np.float64) ** 2, (0, -len(samples) % frame))
    means = power.reshape(-1, frame).mean(axis=1)
    kernel = np.ones(SMOOTHED_FRAMES) / SMOOTHED_FRAMES
    levels: NDArray[np.float64] = 10 * np.log10(
        np.maximum(np.convolve(means, kernel, mode="same")[: len(means)], MIN_POWER)
    )
    return levels


def join_spans(spans: list[Span], levels: NDArray[np.float64], max_s: float) -> list[Span]:
    """Joins adjacent spans as long as they fit `max_s` seconds, and splits longer ones at the
    quietest frame of the second half of `max_s`.
    """
    joined: list[Span] = []
    for start_s, end_s in spans:
        if joined and end_s - joined[-1][0] <= max_s:
            start_s = joined.pop()[0]
        while end_s - start_s > max_s:
            first, last = (round((start_s + max_s * part) / FRAME_S) for part in (0.5, 1.0))
            cut_s = (first + int(np.argmin(levels[first:last]))) * FRAME_S
            joined.append((start_s, cut_s))
            start_s = cut_s
        joined.append((start_s, end_s))
    return joined
