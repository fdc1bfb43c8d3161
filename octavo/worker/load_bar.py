"""A progress bar on stderr while weights load, for those who wait at a terminal. Knows nothing of weights but their number."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from octavo.backends.base import LoadWeight
from octavo.program.program import Weight
from octavo.quant.packed import PackedWeight

PATIENCE_S = 0.5
"""A load that is over sooner shows nothing, and imports nothing to show it with."""


class LoadBar:
    """Stands between a backend and the reader of its weights, and counts."""

    def __init__(self, load: LoadWeight, total: int) -> None:
        self._load = load
        self._total = total
        self._loaded = 0
        self._began = time.monotonic()
        self._bar: Any = None

    def load(self, weight: Weight) -> PackedWeight:
        packed = self._load(weight)
        self._loaded += 1
        if self._bar is None and time.monotonic() - self._began > PATIENCE_S and sys.stderr.isatty():
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._loaded)
        return packed

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("weights", total=self._total)
        self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
