"""Statistics of a matrix's input rows for quantization: correlations, strengths and maxima."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from octavo.quant.making.gptq import GptqInputs
from octavo.quant.making.grid import Floats32

CHUNK_ROWS = 4096


class RowStatistics:
    """Lazily computed statistics of rows `[T, in]`."""

    def __init__(self, rows: NDArray, damp_percent: float, exact: NDArray | None = None) -> None:
        """`exact [T, in]`: rows of the unrounded model, if known."""
        self._rows = rows
        self._damp_percent = damp_percent
        self._exact = exact

    @property
    def is_empty(self) -> bool:
        """Whether no calibration token was routed here."""
        return len(self._rows) == 0

    @cached_property
    def hessian(self) -> NDArray[np.float64]:
        """Sum of x x^T, `[in, in]`: matmuls in fp32, summed in fp64 every few thousand rows."""
        total = np.zeros((self._rows.shape[1],) * 2)
        for start in range(0, len(self._rows), CHUNK_ROWS):
            part = self._rows[start : start + CHUNK_ROWS].astype(np.float32)
            total += part.T @ part
        return total

    @property
    def shift(self) -> NDArray[np.float64] | None:
        """Sum of (x - y) y^T, `[in, in]`, for the exact rows x and these rows y; None without exact
        rows.
        """
        return None if self._exact is None else self.missed(self._exact, self._rows)

    def missed(self, exact: NDArray, actual: NDArray) -> NDArray[np.float64]:
        """Returns the sum of r y^T, `[width, in]`, for r = `exact [T, width]` - `actual` and these
        rows y.
        """
        total = np.zeros((exact.shape[1], self._rows.shape[1]))
        for start in range(0, len(self._rows), CHUNK_ROWS):
            own = slice(start, start + CHUNK_ROWS)
            missed = (exact[own] - actual[own]).astype(np.float32)
            total += missed.T @ self._rows[own].astype(np.float32)
        return total

    @cached_property
    def importance(self) -> Floats32:
        """Sum of squares of each input, `[in]`."""
        total: Floats32 = np.einsum("ti,ti->i", self._rows, self._rows).astype(np.float32)
        return total

    @cached_property
    def strength(self) -> Floats32:
        """Mean magnitude of each input, `[in]`."""
        total: Floats32 = np.abs(self._rows).mean(axis=0).astype(np.float32)
        return total

    @cached_property
    def largest(self) -> Floats32:
        """Largest magnitude of each input, `[in]`."""
        largest: Floats32 = np.abs(self._rows).max(axis=0).astype(np.float32)
        return largest

    @cached_property
    def gptq(self) -> GptqInputs:
        return GptqInputs(self.hessian, self._damp_percent, self.shift)
