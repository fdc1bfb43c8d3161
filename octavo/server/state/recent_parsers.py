"""Output parsers of recent requests, for forks."""

from __future__ import annotations

from collections import OrderedDict

from octavo.server.output_parser import PLAIN, OutputParser

MAX_KEPT = 1024
MAX_KEPT_BYTES = 16 << 20
"""Limit of the total size of the requests' bodies, whose tool schemas are kept."""


class RecentParsers:
    """Output parsers by public request id; the oldest are evicted first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[OutputParser, int]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, name: str, parser: OutputParser, num_bytes: int) -> None:
        """Keeps the parser of a request with a body of `num_bytes` bytes."""
        if parser.form is None or num_bytes > MAX_KEPT_BYTES:
            return
        self._drop(name)
        self._kept[name] = (parser, num_bytes)
        self._num_bytes += num_bytes
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def keep_fork(self, parent: str, name: str, parser: OutputParser) -> None:
        """Keeps the parser of a fork, which has its parent's tools."""
        if parent in self._kept:
            self.keep(name, parser, self._kept[parent][1])

    def find(self, name: str) -> OutputParser:
        """Returns the parser of a request; the plain-text parser if it was evicted."""
        return self._kept[name][0] if name in self._kept else PLAIN

    def _drop(self, name: str) -> None:
        if name in self._kept:
            self._num_bytes -= self._kept.pop(name)[1]
