"""A progress bar for loading weights; wraps the function with which a backend reads weights."""

from __future__ import annotations

from typing import Self

from octavo.executor.base import LoadWeight
from octavo.program.program import Weight
from octavo.quant.blocks import StoredWeight
from octavo.utils.progress import Bar

PATIENCE_S = 0.5
"""Seconds before the bar appears; faster loads show no bar."""


class LoadBar:
    """A progress bar over `total` weights, as a context manager."""

    def __init__(self, load: LoadWeight, total: int) -> None:
        self._load = load
        self._bar = Bar("weights", total, patience_s=PATIENCE_S)

    def load(self, weight: Weight) -> StoredWeight:
        """Reads a weight and advances the bar."""
        packed = self._load(weight)
        self._bar.advance()
        return packed

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()
