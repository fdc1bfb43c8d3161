"""Progress on a terminal: bars and messages on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

Report: TypeAlias = Callable[[str], None]
"""Receives progress messages."""


class Bar:
    """A progress bar on stderr. Shows nothing for the first `patience_s` seconds, or if stderr is
    not a terminal; rich is imported when it is shown.
    """

    def __init__(
        self, name: str, total: int, *, enabled: bool = True, patience_s: float = 0.0
    ) -> None:
        self._name = name
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._began = time.monotonic()
        self._show_at = self._began + patience_s
        self._count = 0
        self._bar: Any = None

    def advance(self) -> None:
        self._count += 1
        if self._enabled and self._bar is None and time.monotonic() >= self._show_at:
            self._show()
        if self._bar is not None:
            rate = self._count / max(time.monotonic() - self._began, 1e-3)
            self._bar.update(self._task, completed=self._count, rate=rate)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Left

        words = TextColumn("{task.description}")
        rate = TextColumn("{task.fields[rate]:.1f}/s")
        columns = (words, BarColumn(), MofNCompleteColumn(), rate, Left())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._name, total=self._total, rate=0.0)
        self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def quiet(text: str) -> None:
    """Discards the message."""


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class FileProgress:
    """Progress of a file's download."""

    file: str
    sha256: str
    num_bytes: int
    completed_bytes: int = 0


OnProgress: TypeAlias = Callable[[FileProgress], None]
"""Receives the progress of a download; an exception aborts it."""


def ignore_progress(progress: FileProgress) -> None:
    pass
