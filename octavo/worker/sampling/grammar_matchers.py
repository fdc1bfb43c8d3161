"""The grammars of the running requests: compiled ones, kept for the next request that has the same,
and one matcher for each row.

The worker takes in tokens itself, so what a row may draw crosses no boundary: a row that returns
after a preemption, or in another process, has its matcher rebuilt from its tokens. Owns no logits
and knows no sampling option; how grammars are read is behind `prompt_ports.Grammars`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.step import NewRequest
from octavo.executor.batch import Bits, mask_words
from octavo.text.ports import Grammars, Matcher

MAX_COMPILED_BYTES = 64 << 20
"""Memory of the compiled grammars that are kept."""


LEAST_TOGETHER = 2
"""Number of masks from which they are made together."""
NUM_THREADS = 2
"""Threads that compile."""
COMPILE_NICE = 5
"""Their niceness: beside a busy engine they get about a quarter of a core. At 19 they would get a
hundredth, and a large vocabulary takes seconds to read.
"""


def _give_way() -> None:
    """Lowers the priority of the calling thread on systems where threads have their own."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, 0) + COMPILE_NICE
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, 19))


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

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | None]:
        """Returns the masks of several matchers; None for one that has a fault."""
        return self._grammars.masks(matchers)

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


class TextPosition(NamedTuple):
    """A place in a row's text: after its tokens, the last of them guessed."""

    row: int
    num_tokens: int
    num_drafts: int


class CachedCompletion(NamedTuple):
    """The tokens that complete a row's text, once it has a number of tokens and this last one."""

    num_tokens: int
    token_id: int
    tokens: list[int]


class GrammarMatchers:
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
        self._ahead: dict[int, list[Matcher]] = {}
        """Matchers after each of a row's guesses, up to the first that is not legal."""
        self._made: dict[int, Bits] = {}
        """Masks that were made with others', of rows that have taken no token since."""
        self._taken: dict[int, int] = {}
        """Tokens that rows' matchers have taken in before `took` told of them."""
        self._closings: dict[int, CachedCompletion] = {}
        """Ways to complete rows' texts, as they were last found."""

    def add(self, row: int, new: NewRequest) -> None:
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
        self._closings.pop(row, None)
        self._faults.pop(row, None)
        self._ahead.pop(row, None)
        self._made.pop(row, None)
        self._taken.pop(row, None)

    def write_drafts(self, row: int, draft_ids: Sequence[int]) -> None:
        """Follows the guesses of the coming step, which the row's own matcher does not take in."""
        matcher = None if row in self._faults else self._matchers.get(row)
        if matcher is None:
            return
        ahead = self._ahead[row] = []
        for token_id in draft_ids:
            matcher = _after(matcher, token_id)
            if matcher is None:
                return
            ahead.append(matcher)

    def accept_token(self, row: int, token_id: int) -> None:
        """Takes in a row's drawn token; a fault waits until the row is drawn again."""
        matcher = self._matchers.get(row)
        if matcher is None:
            return
        self._ahead.pop(row, None)
        self._made.pop(row, None)
        known = self._closings.get(row)
        if known is not None and known.token_id != token_id:
            del self._closings[row]
        taken = self._taken.pop(row, None)
        if taken == token_id:
            return
        if taken is not None:
            matcher.take_back()
        try:
            matcher.take([token_id])
        except Exception as error:
            self._faults[row] = error

    def try_accept(self, row: int, token_id: int) -> bool:
        """Returns whether a token may come next in a row; where it may, the row's matcher takes it
        in, and `took` is to be told of it next.
        """
        if row in self._faults or not self._matchers[row].take_legal(token_id):
            return False
        self._taken[row] = token_id
        return True

    def take_back(self) -> None:
        """Takes back the tokens that `took` was not told of: their step did not end."""
        for row in self._taken:
            self._matchers[row].take_back()
        self._taken.clear()

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def __contains__(self, row: int) -> bool:
        return row in self._matchers

    def make_masks(self, rows: Sequence[int]) -> None:
        """Makes the masks of several rows together, for `mask` to return until a token is taken."""
        wanted = [
            row
            for row in rows
            if row in self._matchers and row not in self._faults and row not in self._made
        ]
        if len(wanted) < LEAST_TOGETHER or self._compiled is None:
            return
        made = self._compiled.masks([self._matchers[row] for row in wanted])
        self._made |= {
            row: np.frombuffer(mask, np.uint32)
            for row, mask in zip(wanted, made, strict=True)
            if mask is not None
        }

    def mask(self, row: int, *, num_drafts: int = 0) -> Bits | None:
        """Returns the tokens that may come next, `[ceil(V / 32)]`, after that many guesses; None
        where any may, or where a guess before is not legal and nothing after it is kept.
        """
        if num_drafts:
            return self._mask_ahead(row, num_drafts)
        if row in self._faults:
            raise self._faults[row]
        if row in self._made:
            return self._made[row]
        matcher = self._matchers.get(row)
        return None if matcher is None else np.frombuffer(matcher.mask(), np.uint32)

    def allows(self, row: int, token_id: int, *, num_drafts: int = 0) -> bool:
        """Returns whether a token may come next in a row that has a grammar; any may after a guess
        that is not legal.
        """
        if num_drafts:
            ahead = self._ahead.get(row, ())
            return num_drafts > len(ahead) or ahead[num_drafts - 1].allows(token_id)
        return row not in self._faults and self._matchers[row].allows(token_id)

    def mask_of(self, token_id: int) -> Bits:
        """Returns the mask that allows one token alone."""
        mask = np.zeros(self._mask_words, np.uint32)
        mask[token_id // 32] = np.uint32(1 << token_id % 32)
        return mask

    def mask_or_none(self, row: int, *, num_drafts: int = 0) -> Bits:
        """Returns the tokens that may come next in a row; none where there is a fault, which
        `fault` then tells.
        """
        try:
            mask = self.mask(row, num_drafts=num_drafts)
            return np.full(self._mask_words, 0xFFFF_FFFF, np.uint32) if mask is None else mask
        except Exception as error:
            self._faults[row] = error
            return np.zeros(self._mask_words, np.uint32)

    def only_token(self, row: int) -> int | None:
        """Returns the one token that may come next in a row; None where several may, or its text
        has no grammar.
        """
        matcher = self._matchers.get(row)
        if matcher is None or row in self._faults:
            return None
        try:
            return matcher.only_token()
        except Exception as error:
            self._faults[row] = error
            return None

    def closing(self, place: TextPosition, most: int) -> list[int] | None:
        """Returns at most `most` tokens that complete a row's text; None where none are found."""
        known = self._closings.get(place.row)
        if known is not None and not place.num_drafts and known.num_tokens == place.num_tokens:
            return known.tokens if len(known.tokens) <= most else None
        matcher = self._matcher_at(place)
        return None if matcher is None else self._closing_of(matcher, most)

    def closes_after(self, place: TextPosition, token_id: int, most: int) -> bool:
        """Returns whether a row's text and a legal token more can be completed by at most `most`
        tokens; true behind a guess that is not legal.
        """
        matcher = self._matcher_at(place)
        later = None if matcher is None else _after(matcher, token_id)
        if later is None:
            return True
        tokens = self._closing_of(later, most)
        if tokens is not None and not place.num_drafts:
            self._closings[place.row] = CachedCompletion(place.num_tokens + 1, token_id, tokens)
        return tokens is not None

    def _matcher_at(self, place: TextPosition) -> Matcher | None:
        """Returns the matcher at a place; None behind a guess that is not legal."""
        if not place.num_drafts:
            return self._matchers[place.row]
        ahead = self._ahead.get(place.row, ())
        return ahead[place.num_drafts - 1] if place.num_drafts <= len(ahead) else None

    def _closing_of(self, matcher: Matcher, most: int) -> list[int] | None:
        try:
            return matcher.closing(most)
        except Exception:
            return None  # the draw under its mask will tell the fault

    def likely_tokens(self, row: int) -> list[int]:
        """Returns tokens that spell the text that alone may come next in a row; a fault met here is
        met again when the row is drawn.
        """
        matcher = self._matchers.get(row)
        if matcher is None or row in self._faults:
            return []
        try:
            return matcher.likely_tokens()
        except Exception:
            return []

    def fault(self, row: int) -> str:
        """Returns why a row's grammar cannot be followed any further; "" where it can."""
        return str(self._faults.get(row, ""))

    def is_complete(self, row: int, *, num_drafts: int = 0) -> bool:
        """Returns whether a row's text is complete, and nothing but its end may follow."""
        if num_drafts:
            ahead = self._ahead.get(row, ())
            return num_drafts <= len(ahead) and ahead[num_drafts - 1].is_complete
        matcher = self._matchers.get(row)
        return matcher is not None and matcher.is_complete

    def _mask_ahead(self, row: int, num_drafts: int) -> Bits | None:
        """Returns the tokens that may come after guesses. A fault there bans all of them: the draw
        fails, is not kept, and meets the fault again as the row's own.
        """
        ahead = self._ahead.get(row, ())
        if num_drafts > len(ahead):
            return None
        try:
            return np.frombuffer(ahead[num_drafts - 1].mask(), np.uint32)
        except Exception:
            return np.zeros(self._mask_words, np.uint32)


def _after(matcher: Matcher, token_id: int) -> Matcher | None:
    """Returns a matcher that has gone on by a token; None where the token is not legal."""
    if not matcher.allows(token_id):
        return None
    ahead = matcher.copy()
    try:
        ahead.take([token_id])
    except Exception:
        return None
    return ahead
