"""Aligns a transcript's tokens with the audio by dynamic time warping over cross-attention weights.

Independent of models and of how the weights are computed. Source: `timing.py` of OpenAI's whisper,
and `_extract_token_timestamps` of transformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FILTER_WIDTH = 7
"""Width of the median filter, in steps of the input."""


def attention_weights(
    queries: NDArray[np.floating], keys: NDArray[np.floating], num_heads: int
) -> NDArray[np.float64]:
    """Returns the attention weights `[H, T, S]` of queries `[T, H * D]` and keys `[S, H * D]`."""
    q, k = (
        np.moveaxis(each.astype(np.float64).reshape(len(each), num_heads, -1), 1, 0)
        for each in (queries, keys)
    )
    scores = q @ np.swapaxes(k, 1, 2) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return found


def find_token_steps(weights: NDArray[np.float64], num_steps: int) -> list[int]:
    """Returns the input step at which each token begins, `[T]`, from the weights `[H, T, S]` with
    which the tokens are predicted. Only the first `num_steps` inputs contain audio.
    """
    weights = weights[:, :, : max(num_steps, 1)]
    deviation = weights.std(axis=1, keepdims=True)
    normed = (weights - weights.mean(axis=1, keepdims=True)) / np.maximum(deviation, 1e-12)
    costs = -_median_filtered(normed).mean(axis=0)
    tokens, steps = _warp(costs)
    begins = np.flatnonzero(np.diff(tokens, prepend=-1))
    return [int(step) for step in steps[begins]]


def _median_filtered(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the median of neighbours on the last axis, reflected at its ends."""
    half = FILTER_WIDTH // 2
    if weights.shape[-1] <= half:
        return weights
    padded = np.pad(weights, ((0, 0), (0, 0), (half, half)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, FILTER_WIDTH, axis=-1)
    found: NDArray[np.float64] = np.median(windows, axis=-1)
    return found


def _warp(costs: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows and columns of the cheapest monotonic path through `costs [T, S]`.

    Sums are computed in float32, as in transformers. An antidiagonal is computed at once, since its
    cells do not depend on each other.
    """
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    trace = np.full((num_rows + 1, num_columns + 1), 2, np.int8)
    trace[:, 0] = 1
    trace[0, :] = 2
    total[0, 0] = 0
    for diagonal in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        columns = diagonal - rows
        both = total[rows - 1, columns - 1]
        down = total[rows - 1, columns]
        right = total[rows, columns - 1]
        takes_both = (both < down) & (both < right)
        takes_down = ~takes_both & (down < both) & (down < right)
        best = np.where(takes_both, both, np.where(takes_down, down, right))
        total[rows, columns] = costs[rows - 1, columns - 1] + best
        trace[rows, columns] = np.where(takes_both, 0, np.where(takes_down, 1, 2))
    path = []
    row, column = num_rows, num_columns
    while row or column:
        path.append((row - 1, column - 1))
        direction = trace[row, column]
        row -= int(direction != 2)
        column -= int(direction != 1)
    tokens, steps = np.array(path[::-1], np.int64).T
    return tokens, steps
