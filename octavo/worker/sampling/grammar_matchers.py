"""Grammars of the running requests: a cache of compiled grammars, and one matcher per row.

The worker advances the matchers. A row that resumes after a preemption, or in another process, gets
a matcher rebuilt from its tokens. Independent of logits and sampling options; `text.ports.Grammars`
compiles grammars.
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
"""Memory limit of the cache of compiled grammars."""
MIN_BATCHED_MASKS = 2
"""Minimum number of masks to build in one batch."""
NUM_THREADS = 2
"""Number of threads that compile grammars."""
COMPILE_NICE = 5
"""Niceness of these threads: beside a busy engine they get about a quarter of a core. At 19 they
would get a hundredth, and a large vocabulary takes seconds to read.
"""


def _lower_priority() -> None:
    """Lowers the priority of the calling thread on systems where threads have their own."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, 0) + COMPILE_NICE
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, 19))


class CompiledGrammars:
    """LRU cache of compiled grammars by digest."""

    def __init__(self, grammars: Grammars, max_bytes: int = MAX_COMPILED_BYTES) -> None:
        self._grammars = grammars
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, tuple[Matcher, int]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[bytes, Future[tuple[Matcher, int]]] = {}
        """Grammars that are being compiled, or that failed to compile."""
        self.unreported: list[bytes] = []
        """Grammars whose compilation has started and has not been reported as finished."""

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """Returns a new matcher at the start of a text."""
        pending = self._pending.pop(spec.digest, None)
        matcher = self._kept.get(spec.digest)
        if matcher is None:
            matcher = self._keep(spec.digest, pending.result() if pending else self._compile(spec))
        self._kept.move_to_end(spec.digest)
        return matcher[0].copy()

    def begin(self, specs: Sequence[GrammarSpec]) -> None:
        """Starts to compile grammars in threads of low priority."""
        for spec in specs:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, "grammars", _lower_priority)
            if spec.digest not in self._pending:
                self._pending[spec.digest] = self._pool.submit(self._compile, spec)
                self.unreported.append(spec.digest)

    def pop_compiled(self, *, wait_s: float) -> list[bytes]:
        """Returns the digests of grammars whose compilation has finished since the last call; waits
        at most `wait_s` seconds for the first one. A compilation error is raised when a row needs
        the grammar.
        """
        if not self.unreported:
            return []
        wait(self._pending.values(), wait_s, FIRST_COMPLETED)
        done = [digest for digest in self.unreported if self._has_ended(digest)]
        self.unreported[:] = [digest for digest in self.unreported if digest not in done]
        for digest in done:
            pending = self._pending.get(digest)
            if pending is not None and pending.exception() is None:
                self._keep(digest, self._pending.pop(digest).result())
        return done

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | None]:
        """Returns the masks of several matchers; None for each one that has an error."""
        return self._grammars.masks(matchers)

    def close(self) -> None:
        """Stops the threads after their current compilation."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _has_ended(self, digest: bytes) -> bool:
        return digest not in self._pending or self._pending[digest].done()

    def _keep(self, digest: bytes, compiled: tuple[Matcher, int]) -> tuple[Matcher, int]:
        if digest not in self._kept:
            self._num_bytes += compiled[1]
        self._kept[digest] = compiled
        self._evict()
        return compiled

    def _compile(self, spec: GrammarSpec) -> tuple[Matcher, int]:
        return self._grammars.compile(spec), self._grammars.num_bytes(spec)

    def _evict(self) -> None:
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, (_, num_bytes) = self._kept.popitem(last=False)
            self._num_bytes -= num_bytes


class TextPosition(NamedTuple):
    """A position in a row's text after its tokens; the last `num_drafts` of them are draft
    tokens.
    """

    row: int
    num_tokens: int
    num_drafts: int


class CachedCompletion(NamedTuple):
    """Tokens that complete a row's text after `num_tokens` tokens, of which the last is
    `token_id`.
    """

    num_tokens: int
    token_id: int
    tokens: list[int]


class GrammarMatchers:
    def __init__(self, grammars: Grammars | None, vocab_size: int) -> None:
        """`grammars` is None if grammars cannot be compiled; the frontend then rejects all of
        them.
        """
        self._compiled = None if grammars is None else CompiledGrammars(grammars)
        self.compiling = [] if self._compiled is None else self._compiled.unreported
        """Digests of the grammars that are being compiled."""
        self._mask_words = mask_words(vocab_size)
        self._matchers: dict[int, Matcher] = {}
        self._faults: dict[int, Exception] = {}
        """Errors of matchers that could not accept a row's last token; raised when the row is
        sampled next.
        """
        self._ahead: dict[int, list[Matcher]] = {}
        """Matchers after each draft token of a row, up to the first token that is not allowed."""
        self._masks: dict[int, Bits] = {}
        """Masks that were built in a batch, for rows that have accepted no token since."""
        self._accepted: dict[int, int] = {}
        """Tokens that matchers have accepted before `accept_token` was called for them."""
        self._closings: dict[int, CachedCompletion] = {}
        """The last completion found for each row's text."""

    def add(self, row: int, new: NewRequest) -> None:
        """Adds a row's matcher, advanced by its generated tokens."""
        assert new.grammar is not None
        assert self._compiled is not None, "the frontend rejects grammars if nothing compiles them"
        matcher = self._compiled.matcher(new.grammar)
        matcher.accept_tokens(new.token_ids[new.num_prompt_tokens - new.grammar.num_given_tokens :])
        self._matchers[row] = matcher

    def begin(self, specs: Sequence[GrammarSpec]) -> None:
        """Starts to compile the grammars of waiting requests."""
        if specs:
            assert self._compiled is not None, "the frontend rejects grammars here"
            self._compiled.begin(specs)

    def pop_compiled(self, *, wait_s: float) -> list[bytes]:
        """Returns the digests of the grammars whose compilation has finished since the last
        call.
        """
        return [] if self._compiled is None else self._compiled.pop_compiled(wait_s=wait_s)

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.close()

    def free(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._closings.pop(row, None)
        self._faults.pop(row, None)
        self._ahead.pop(row, None)
        self._masks.pop(row, None)
        self._accepted.pop(row, None)

    def add_drafts(self, row: int, draft_ids: Sequence[int]) -> None:
        """Prepares matchers for the draft tokens of the next step; the row's main matcher does not
        change.
        """
        matcher = None if row in self._faults else self._matchers.get(row)
        if matcher is None:
            return
        ahead = self._ahead[row] = []
        for token_id in draft_ids:
            matcher = _advance(matcher, token_id)
            if matcher is None:
                return
            ahead.append(matcher)

    def accept_token(self, row: int, token_id: int) -> None:
        """Advances a row's matcher. An error is raised when the row is sampled next."""
        matcher = self._matchers.get(row)
        if matcher is None:
            return
        self._ahead.pop(row, None)
        self._masks.pop(row, None)
        known = self._closings.get(row)
        if known is not None and known.token_id != token_id:
            del self._closings[row]
        accepted = self._accepted.pop(row, None)
        if accepted == token_id:
            return
        if accepted is not None:
            # Another token was sampled than the one accepted by `try_accept`.
            matcher.rollback()
        try:
            matcher.accept_tokens([token_id])
        except Exception as error:
            self._faults[row] = error

    def try_accept(self, row: int, token_id: int) -> bool:
        """Returns whether a row's grammar allows a token. If so, its matcher accepts it, and
        `accept_token` must be called with it next.
        """
        if row in self._faults or not self._matchers[row].try_accept(token_id):
            return False
        self._accepted[row] = token_id
        return True

    def rollback(self) -> None:
        """Rolls back tokens for which `accept_token` was not called, because their step did not
        complete.
        """
        for row in self._accepted:
            self._matchers[row].rollback()
        self._accepted.clear()

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def __contains__(self, row: int) -> bool:
        return row in self._matchers

    def make_masks(self, rows: Sequence[int]) -> None:
        """Builds the masks of several rows in one batch. `mask` returns these until the next
        token.
        """
        to_build = [
            row
            for row in rows
            if row in self._matchers and row not in self._faults and row not in self._masks
        ]
        if len(to_build) < MIN_BATCHED_MASKS or self._compiled is None:
            return
        masks = self._compiled.masks([self._matchers[row] for row in to_build])
        self._masks |= {
            row: np.frombuffer(mask, np.uint32)
            for row, mask in zip(to_build, masks, strict=True)
            if mask is not None
        }

    def mask(self, row: int, *, num_drafts: int = 0) -> Bits | None:
        """Returns the tokens allowed after `num_drafts` draft tokens, `[ceil(V / 32)]`. Returns
        None if all tokens are allowed, or if a draft token is not allowed, so that no later sample
        is kept.
        """
        if num_drafts:
            return self._get_draft_mask(row, num_drafts)
        if row in self._faults:
            raise self._faults[row]
        if row in self._masks:
            return self._masks[row]
        matcher = self._matchers.get(row)
        return None if matcher is None else np.frombuffer(matcher.mask(), np.uint32)

    def allows(self, row: int, token_id: int, *, num_drafts: int = 0) -> bool:
        """Returns whether a row's grammar allows a token; always True after a draft token that is
        not allowed.
        """
        if num_drafts:
            ahead = self._ahead.get(row, ())
            return num_drafts > len(ahead) or ahead[num_drafts - 1].allows(token_id)
        return row not in self._faults and self._matchers[row].allows(token_id)

    def make_token_mask(self, token_id: int) -> Bits:
        """Returns the mask that allows only one token."""
        mask = np.zeros(self._mask_words, np.uint32)
        mask[token_id // 32] = np.uint32(1 << token_id % 32)
        return mask

    def mask_or_empty(self, row: int, *, num_drafts: int = 0) -> Bits:
        """Returns the tokens allowed next in a row; no tokens on an error, which `fault`
        returns.
        """
        try:
            mask = self.mask(row, num_drafts=num_drafts)
            return np.full(self._mask_words, 0xFFFF_FFFF, np.uint32) if mask is None else mask
        except Exception as error:
            self._faults[row] = error
            return np.zeros(self._mask_words, np.uint32)

    def only_token(self, row: int) -> int | None:
        """Returns the only token allowed next in a row. Returns None if there are several, or
        without a grammar.
        """
        matcher = self._matchers.get(row)
        if matcher is None or row in self._faults:
            return None
        try:
            return matcher.only_token()
        except Exception as error:
            self._faults[row] = error
            return None

    def find_completion(self, position: TextPosition, max_tokens: int) -> list[int] | None:
        """Returns at most `max_tokens` tokens that complete a row's text. Returns None if it finds
        none.
        """
        known = self._closings.get(position.row)
        if (
            known is not None
            and not position.num_drafts
            and known.num_tokens == position.num_tokens
        ):
            return known.tokens if len(known.tokens) <= max_tokens else None
        matcher = self._matcher_at(position)
        return None if matcher is None else self._find_completion(matcher, max_tokens)

    def can_complete_after(self, position: TextPosition, token_id: int, max_tokens: int) -> bool:
        """Returns whether at most `max_tokens` tokens can complete a row's text after one more,
        allowed token; True after a draft token that is not allowed.
        """
        matcher = self._matcher_at(position)
        later = None if matcher is None else _advance(matcher, token_id)
        if later is None:
            return True
        tokens = self._find_completion(later, max_tokens)
        if tokens is not None and not position.num_drafts:
            self._closings[position.row] = CachedCompletion(
                position.num_tokens + 1, token_id, tokens
            )
        return tokens is not None

    def _matcher_at(self, position: TextPosition) -> Matcher | None:
        """Returns the matcher at a position. Returns None after a draft token that is not
        allowed.
        """
        if not position.num_drafts:
            return self._matchers[position.row]
        ahead = self._ahead.get(position.row, ())
        return ahead[position.num_drafts - 1] if position.num_drafts <= len(ahead) else None

    def _find_completion(self, matcher: Matcher, max_tokens: int) -> list[int] | None:
        try:
            return matcher.closing(max_tokens)
        except Exception:
            return None  # sampling with its mask will report the error

    def likely_tokens(self, row: int) -> list[int]:
        """Returns tokens for the text that a row's grammar forces next. Errors are ignored here;
        they occur again when the row is sampled.
        """
        matcher = self._matchers.get(row)
        if matcher is None or row in self._faults:
            return []
        try:
            return matcher.likely_tokens()
        except Exception:
            return []

    def fault(self, row: int) -> str:
        """Returns the error because of which a row's grammar cannot continue; "" if there is
        none.
        """
        return str(self._faults.get(row, ""))

    def is_complete(self, row: int, *, num_drafts: int = 0) -> bool:
        """Returns whether a row's text is complete, so that only its end may follow."""
        if num_drafts:
            ahead = self._ahead.get(row, ())
            return num_drafts <= len(ahead) and ahead[num_drafts - 1].is_complete
        matcher = self._matchers.get(row)
        return matcher is not None and matcher.is_complete

    def _get_draft_mask(self, row: int, num_drafts: int) -> Bits | None:
        """Returns the tokens allowed after draft tokens. Returns None if one of these is not
        allowed, so that no later sample is kept. On an error, allows no token: the sample fails, is
        not kept, and the next step reports the error.
        """
        ahead = self._ahead.get(row, ())
        if num_drafts > len(ahead):
            return None
        try:
            return np.frombuffer(ahead[num_drafts - 1].mask(), np.uint32)
        except Exception:
            return np.zeros(self._mask_words, np.uint32)


def _advance(matcher: Matcher, token_id: int) -> Matcher | None:
    """Returns a matcher advanced by a token. Returns None if the token is not allowed."""
    if not matcher.allows(token_id):
        return None
    ahead = matcher.copy()
    try:
        ahead.accept_tokens([token_id])
    except Exception:
        return None
    return ahead
