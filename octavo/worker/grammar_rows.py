"""The grammars of the running requests: compiled ones, kept for the next request that has the same,
and one matcher for each row.

The worker takes in tokens itself, so what a row may draw crosses no boundary: a row that returns
after a preemption, or in another process, has its matcher rebuilt from its tokens. Owns no logits
and knows no sampling option; how grammars are read is behind `ports.Grammars`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from octavo.backends.batch import Bits, mask_words
from octavo.ports import Grammars, Matcher
from octavo.step import NewRow
from octavo.structured_outputs import GrammarSpec

MAX_COMPILED_BYTES = 64 << 20
"""Memory of the compiled grammars that are kept."""


NUM_THREADS = 2
"""Threads that compile, at the lowest priority."""


def _give_way() -> None:
    """Lowers the priority of the calling thread to the least, where the system has one of each."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class CompiledGrammars:
    """Compiled grammars by digest; those used least recently go first."""

    def __init__(self, grammars: Grammars, max_bytes: int = MAX_COMPILED_BYTES) -> None:
        self._grammars = grammars
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, tuple[Matcher, int]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[bytes, Future[tuple[Matcher, int]]] = {}
        """Grammars that are being compiled, or whose compiling has failed."""
        self._unreported: list[bytes] = []

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """Returns a new matcher at the beginning of a grammar's text."""
        pending = self._pending.pop(spec.digest, None)
        found = self._kept.get(spec.digest)
        if found is None:
            found = self._keep(spec.digest, pending.result() if pending else self._compile(spec))
        self._kept.move_to_end(spec.digest)
        return found[0].copy()

    def begin(self, specs: Sequence[GrammarSpec]) -> None:
        """Begins to compile grammars, in threads that give way to all others."""
        for spec in specs:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, "grammars", _give_way)
            if spec.digest not in self._pending:
                self._pending[spec.digest] = self._pool.submit(self._compile, spec)
                self._unreported.append(spec.digest)

    def take_compiled(self, *, wait_s: float) -> list[bytes]:
        """Returns the digests of the grammars whose compiling has ended since the last call; waits
        at most `wait_s` seconds for the first.

        A fault is raised where a row needs the grammar.
        """
        if not self._unreported:
            return []
        wait(self._pending.values(), wait_s, FIRST_COMPLETED)
        done = [digest for digest in self._unreported if self._has_ended(digest)]
        self._unreported = [digest for digest in self._unreported if digest not in done]
        for digest in done:
            pending = self._pending.get(digest)
            if pending is not None and pending.exception() is None:
                self._keep(digest, self._pending.pop(digest).result())
        return done

    def close(self) -> None:
        """Ends the threads, once they have compiled what they are at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _has_ended(self, digest: bytes) -> bool:
        return digest not in self._pending or self._pending[digest].done()

    def _keep(self, digest: bytes, made: tuple[Matcher, int]) -> tuple[Matcher, int]:
        if digest not in self._kept:
            self._num_bytes += made[1]
        self._kept[digest] = made
        self._drop_oldest()
        return made

    def _compile(self, spec: GrammarSpec) -> tuple[Matcher, int]:
        return self._grammars.compile(spec), self._grammars.num_bytes(spec)

    def _drop_oldest(self) -> None:
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, (_, num_bytes) = self._kept.popitem(last=False)
            self._num_bytes -= num_bytes


class GrammarRows:
    """The matchers of the rows that have a grammar."""

    def __init__(self, grammars: Grammars | None, vocab_size: int) -> None:
        """Takes None where nothing compiles grammars; the front then refuses them all."""
        self._compiled = None if grammars is None else CompiledGrammars(grammars)
        self._mask_words = mask_words(vocab_size)
        self._matchers: dict[int, Matcher] = {}
        self._faults: dict[int, Exception] = {}
        """Faults of matchers that could not take in a row's last token; raised when the row is
        next drawn.
        """

    def add(self, row: int, new: NewRow) -> None:
        """Gives a row the grammar that it comes with, at the place where its tokens are."""
        if new.grammar is None:
            return
        assert self._compiled is not None, "the front refuses grammars where nothing compiles them"
        matcher = self._compiled.matcher(new.grammar)
        matcher.take(new.token_ids[new.num_prompt_tokens - new.grammar.num_given_tokens :])
        self._matchers[row] = matcher

    def begin(self, specs: Sequence[GrammarSpec]) -> None:
        """Begins to compile the grammars of requests that wait."""
        if specs:
            assert self._compiled is not None, "the front refuses grammars here"
            self._compiled.begin(specs)

    def take_compiled(self, *, wait_s: float) -> list[bytes]:
        """Returns the digests of the grammars whose compiling has ended since the last call."""
        return [] if self._compiled is None else self._compiled.take_compiled(wait_s=wait_s)

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.close()

    def free(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._faults.pop(row, None)

    def took(self, row: int, token_id: int) -> None:
        """Takes in a row's drawn token; a fault waits until the row is drawn again."""
        matcher = self._matchers.get(row)
        if matcher is None:
            return
        try:
            matcher.take([token_id])
        except Exception as error:
            self._faults[row] = error

    def __contains__(self, row: int) -> bool:
        return row in self._matchers

    def mask(self, row: int) -> Bits | None:
        """Returns the tokens that may come next, `[ceil(V / 32)]`; None where any may."""
        if row in self._faults:
            raise self._faults[row]
        matcher = self._matchers.get(row)
        return None if matcher is None else np.frombuffer(matcher.mask(), np.uint32)

    def allows(self, row: int, token_id: int) -> bool:
        """Returns whether a token may come next in a row that has a grammar."""
        return row not in self._faults and self._matchers[row].allows(token_id)

    def mask_or_none(self, row: int) -> Bits:
        """Returns the tokens that may come next in a row that has a grammar; none where there is a
        fault, which `fault` then tells.
        """
        try:
            mask = self.mask(row)
            assert mask is not None, "only rows with a grammar are asked for"
            return mask
        except Exception as error:
            self._faults[row] = error
            return np.zeros(self._mask_words, np.uint32)

    def fault(self, row: int) -> str:
        """Returns why a row's grammar cannot be followed any further; "" where it can."""
        return str(self._faults.get(row, ""))

    def is_complete(self, row: int) -> bool:
        """Returns whether a row's text is complete, and nothing but its end may follow."""
        matcher = self._matchers.get(row)
        return matcher is not None and matcher.is_complete
