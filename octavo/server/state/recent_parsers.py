"""Output parsers of the latest conversations, in any API, for requests that fork them."""

from __future__ import annotations

from collections import OrderedDict

from octavo.server.output_parser import PLAIN, OutputParser

MAX_KEPT = 1024
MAX_KEPT_BYTES = 16 << 20
"""Most bytes of all their requests' bodies together, which hold the schemas of the functions."""


class RecentParsers:
    """Output parsers by the public id of a request; the oldest are dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[OutputParser, int]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, name: str, parser: OutputParser, num_bytes: int) -> None:
        """Keeps the parser of a request whose body has `num_bytes` bytes."""
        if parser.form is None or num_bytes > MAX_KEPT_BYTES:
            return
        self._drop(name)
        self._kept[name] = (parser, num_bytes)
        self._num_bytes += num_bytes
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def keep_fork(self, parent: str, name: str, parser: OutputParser) -> None:
        """Keeps the parser of a fork, which has the functions of its parent."""
        if parent in self._kept:
            self.keep(name, parser, self._kept[parent][1])

    def find(self, name: str) -> OutputParser:
        """Returns the parser of a request; that of plain text if none is kept."""
        return self._kept[name][0] if name in self._kept else PLAIN

    def _drop(self, name: str) -> None:
        if name in self._kept:
            self._num_bytes -= self._kept.pop(name)[1]
