"""Per-input scaling factors applied before rounding: weights are multiplied by the factor and the
op that produces the input is divided by it.

AWQ (Lin et al. 2023) uses a power of the input's magnitude; the exponent with the least error is
searched. SmoothQuant (Xiao et al. 2022) splits an input's range between input and weights, for
8-bit activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.quant.making.gptq import FitGrid
from octavo.quant.making.grid import Floats32, RoundedMatrix, round_to

NUM_POWERS = 20
MAX_ROWS = 512
"""Number of outputs used to evaluate an exponent."""


def awq_factors(
    weights: Sequence[Floats32],
    hessian: NDArray[np.float64],
    strength: Floats32,
    fit: FitGrid,
) -> Floats32:
    """Returns the AWQ factors `[in]` with the least output error.

    `strength [in]` is the mean magnitude of each input, `hessian [in, in]` is the sum of x x^T.
    """
    rows = np.concatenate(weights)
    rows = rows[:: max(1, len(rows) // MAX_ROWS)]
    inner = hessian.astype(np.float32)
    ones = np.ones(rows.shape[1], np.float32)
    best, least_error = ones, np.inf
    for power in np.arange(NUM_POWERS) / NUM_POWERS:
        factors = _balance(strength**power)
        grid = fit(rows * factors, ones)
        missed = RoundedMatrix(round_to(grid, rows * factors), grid).values() / factors - rows
        error = float(np.einsum("oi,oi->", missed @ inner, missed, optimize=True))
        if error < least_error:
            best, least_error = factors, error
    return best


def smooth_factors(
    weights: Sequence[Floats32], largest: Floats32, migration: float = 0.5
) -> Floats32:
    """Returns SmoothQuant factors `[in]` from the inputs' maxima, `largest [in]`."""
    reach = np.maximum.reduce([np.abs(weight).max(axis=0) for weight in weights])
    reach = np.maximum(reach, np.float32(1e-5))
    shared = np.maximum(largest, np.float32(1e-5)) ** migration / reach ** (1 - migration)
    return np.asarray(shared, np.float32)


def _balance(factors: Floats32) -> Floats32:
    """Centers factors around 1 and limits them to what fp16 scales can represent."""
    factors = np.maximum(factors, np.float32(1e-4))
    factors = factors / np.sqrt(factors.max() * factors.min())
    return np.clip(factors, np.float32(1e-3), np.float32(1e3)).astype(np.float32)
