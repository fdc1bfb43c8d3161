"""Tracks which grammars the worker is compiling or has compiled: a request waits for its own
grammar without delaying others.

Identifies grammars by their digests. The worker may evict a grammar that was not used for long, and
compiles it again when needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.api.structured_outputs import GrammarSpec

MAX_READY = 1_000
"""Grammars that are remembered as compiled."""


class GrammarGate:
    """The grammars of one engine's requests."""

    def __init__(self) -> None:
        self.to_compile: list[GrammarSpec] = []
        self._asked: set[bytes] = set()
        self._ready: dict[bytes, None] = {}

    def want(self, spec: GrammarSpec) -> None:
        """Requests the compilation of a grammar, unless it is known."""
        if spec.digest in self._ready or spec.digest in self._asked:
            return
        self._asked.add(spec.digest)
        self.to_compile.append(spec)

    def is_ready(self, spec: GrammarSpec) -> bool:
        """Returns whether a request with that grammar may start."""
        return spec.digest not in self._asked

    @property
    def is_compiling(self) -> bool:
        """Whether the worker still has a grammar to compile."""
        return bool(self._asked)

    def take_wanted(self) -> list[GrammarSpec]:
        """Removes and returns the grammars whose compilation the next plan begins."""
        wanted, self.to_compile = self.to_compile, []
        return wanted

    def compiled(self, digests: Iterable[bytes]) -> None:
        """Records that grammars are compiled, or failed to compile, which their rows will
        report.
        """
        for digest in digests:
            self._asked.discard(digest)
            self._ready[digest] = None
        while len(self._ready) > MAX_READY:
            del self._ready[next(iter(self._ready))]
