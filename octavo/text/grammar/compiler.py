"""Compiles grammars with llguidance and advances them token by token.

The only module that calls llguidance. Limits count units of work instead of seconds, so a grammar
that compiles in the frontend also compiles in the worker.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import GrammarSpec
from octavo.text.grammar import lark
from octavo.text.grammar.closing import JSON_ORDER, LAST_ORDER, closing
from octavo.text.grammar.vocabulary import VocabularyTexts
from octavo.text.ports import Matcher, Tokenizer

SHALLOW_BYTES = 2 << 10
"""Maximum length of a text that compiles with any thread's stack."""
LARGE_BYTES = 64 << 10
"""Length above which texts compile one at a time, because their stacks may use much memory."""
LEAST_STACK_BYTES = 8 << 20
STACK_BYTES_PER_BYTE = 1024
"""Stack bytes per byte of text; chains of rules, terminals and references need 120 to 550."""
STARTS = threading.Lock()
"""Lock held while a thread with a different stack size is started, because the size is a
process-wide setting.
"""
LARGE = threading.Lock()
"""Lock held while a large text compiles."""
Returned = TypeVar("Returned")
MAX_LEXER_STATES = 20_000
"""Regex states per grammar, about 1.5 KB each."""
STEP_LEXER_FUEL = 200_000
"""Regex work per mask, about 14 ms."""
STEP_MAX_ITEMS = 50_000
"""Parser work per mask, about 3 ms."""
PROBE_TOKENS = 8
"""Number of tokens tried at validation; this detects many grammars that are too large."""
BYTES_OF_TEXT, LEAST_BYTES = 100, 64 << 10
"""Estimated memory of a compiled grammar per byte of text, and its minimum; measured with
enumerations and objects of thousands of names."""


MOST_MASK_THREADS = 8
"""Maximum number of threads that compute the masks of one step; a mask takes about 50 us."""

PANIC = "panic"
"""Prefix of llguidance's internal errors."""
JSON_KINDS = ("json", "json_object", "structural_tag")
"""Kinds of structured output for which the JSON byte order is used to complete a text."""


class GrammarError(Exception):
    """Raised for a grammar that llguidance rejects or that reaches a dead end."""


class VocabularyAdapter:
    """Adapts a tokenizer to llguidance's interface."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_id: int) -> None:
        self.eos_token_id = end_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


class TokenMatcher:
    """The state of one output in a grammar. Implements `Matcher`."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        end_token_ids: tuple[int, ...],
        mask_bytes: int,
        texts: VocabularyTexts,
        orders: Sequence[bytes],
    ) -> None:
        """`end_token_ids` has the main end token first; `orders` are byte orders for completion."""
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._mask_bytes = mask_bytes
        self._texts = texts
        self._orders = orders
        self._has_ended = False

    @property
    def parser(self) -> LLMatcher:
        """llguidance's parser state."""
        return self._matcher

    def copy(self) -> TokenMatcher:
        copied = TokenMatcher(
            self._matcher.deep_copy(),
            end_token_ids=self._end_token_ids,
            mask_bytes=self._mask_bytes,
            texts=self._texts,
            orders=self._orders,
        )
        copied._has_ended = self._has_ended
        return copied

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        ends = bool(token_ids) and token_ids[-1] in self._end_token_ids
        rest = list(token_ids[:-1] if ends else token_ids)
        num_taken = self._matcher.try_consume_tokens(rest)
        self._check()
        if num_taken < len(rest):
            raise GrammarError(f"the token {rest[num_taken]} does not continue the grammar's text")
        if ends and not self._matcher.is_accepting():
            raise GrammarError("the output ended before the grammar was complete")
        self._has_ended = ends

    def try_accept(self, token_id: int) -> bool:
        if token_id not in self._end_token_ids:
            return self._matcher.try_consume_tokens([token_id]) == 1
        self._has_ended = self._matcher.is_accepting()
        return self._has_ended

    def rollback(self) -> None:
        if self._has_ended:
            self._has_ended = False
        else:
            self._matcher.rollback(1)

    def allows(self, token_id: int) -> bool:
        if token_id in self._end_token_ids:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token_id]) == 1

    def mask(self) -> bytes:
        bitmask = self._matcher.compute_bitmask()
        self._check()
        # llguidance's masks may have a different number of words.
        return bitmask[: self._mask_bytes].ljust(self._mask_bytes, b"\0")

    def only_token(self) -> int | None:
        if self.is_complete:
            is_only = not self._has_ended and len(self._end_token_ids) == 1
            return self._end_token_ids[0] if is_only else None
        forced = self._matcher.compute_ff_bytes()
        if not forced or self._matcher.is_accepting():
            return None
        return self._texts.only_token(forced, self.allows)

    def closing(self, most: int) -> list[int] | None:
        if self._has_ended:
            return []
        tokens = closing(self._matcher, self._texts, self._orders, most - 1)
        return None if tokens is None else [*tokens, self._end_token_ids[0]]

    def likely_tokens(self) -> list[int]:
        if self.is_complete or not self._matcher.compute_ff_bytes():
            return []
        return list(self._matcher.deep_copy().compute_ff_tokens())

    @property
    def is_complete(self) -> bool:
        return self._has_ended or self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(first_line(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._end_token_ids = tuple(i for i in dict.fromkeys(end_token_ids) if i < vocab_size)
        self._special = {
            tokenizer.token_text(token_id): token_id
            for token_id in tokenizer.special_token_ids
            if token_id < vocab_size
        }
        self._mask_bytes = 4 * -(-vocab_size // 32)
        adapter = VocabularyAdapter(tokenizer, vocab_size, self._end_token_ids[0])
        self._texts = VocabularyTexts(adapter.tokens, adapter.special_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(adapter), eos_token=list(self._end_token_ids)
        )
        self._own_mask_words = max(-(-self._tokenizer.vocab_size // 32), self._mask_bytes // 4)
        self._executor: LLExecutor | None = None
        """Threads that compute masks, created when several are needed at once."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special token ids by text; grammars refer to them by id."""
        return self._special

    def compile(self, spec: GrammarSpec) -> TokenMatcher:
        """Returns a matcher at the start of the grammar; raises GrammarError if llguidance rejects
        it.
        """
        text = self._whole(spec)
        matcher = with_deep_stack(
            lambda: LLMatcher(self._tokenizer, text, log_level=0, limits=limits()), len(text)
        )
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        return TokenMatcher(
            matcher,
            end_token_ids=self._end_token_ids,
            mask_bytes=self._mask_bytes,
            texts=self._texts,
            orders=(JSON_ORDER,) if spec.kind in JSON_KINDS else (JSON_ORDER, LAST_ORDER),
        )

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | None]:
        """Returns the masks of matchers of this vocabulary; None for matchers that exceeded a
        limit.
        """
        if self._executor is None:
            self._executor = LLExecutor(min(MOST_MASK_THREADS, num_cores()))
        parsers = [one.parser for one in matchers if isinstance(one, TokenMatcher)]
        masks = np.zeros((len(matchers), self._own_mask_words), np.int32)
        places = [(parser, index) for index, parser in enumerate(parsers)]
        fill_next_token_bitmask_par(self._executor, places, masks)
        return [
            None if parser.is_error() else mask.tobytes()[: self._mask_bytes]
            for parser, mask in zip(parsers, masks, strict=True)
        ]

    def num_bytes(self, spec: GrammarSpec) -> int:
        """Returns the estimated memory of the compiled grammar."""
        return LEAST_BYTES + BYTES_OF_TEXT * len(spec.text)

    def _whole(self, spec: GrammarSpec) -> str:
        grammars = json.loads(spec.text)
        if spec.starts_after:
            whole = lark.build_after_grammar(spec, grammars[0]["name"], self._special)
            grammars.insert(0, {"name": "whole", "lark_grammar": whole})
        return json.dumps({"grammars": grammars})


def num_cores() -> int:
    """Returns the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limits() -> LLParserLimits:
    """Returns the work limits of one grammar."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        verbose_errors=False,
    )


def probe(matcher: TokenMatcher) -> None:
    """Advances a few tokens into a grammar; raises GrammarError if no token is legal or a limit is
    exceeded.
    """
    for _ in range(PROBE_TOKENS):
        mask = matcher.mask()
        first = next((i for i, byte in enumerate(mask) if byte), None)
        if first is None:
            raise GrammarError("no token can start or continue its output")
        token_id = 8 * first + (mask[first] & -mask[first]).bit_length() - 1
        matcher.accept_tokens([token_id])
        if matcher.is_complete:
            return


def fault_in(whole: str) -> str:
    """Returns llguidance's error for grammars in llguidance's format; "" if they compile."""
    validate = partial(LLMatcher.validate_grammar, whole, limits=limits())
    try:
        return first_line(with_deep_stack(validate, len(whole)))
    except BaseException as error:
        if not is_panic(error):
            raise
        return first_line(f"{PANIC}: {error}")


def is_panic(error: BaseException) -> bool:
    """Returns whether an error is an llguidance panic, which is not an Exception."""
    return type(error).__name__ == "PanicException"


def first_line(error: str) -> str:
    """Shortens llguidance's error message to its description, without parser state dumps."""
    if error.startswith(PANIC):
        what = error.removeprefix(f"{PANIC}: ").partition("<backtrace>")[0].strip()
        return f"too large, or cannot be parsed: {what}"[:500]
    lines = [line.strip() for line in error.splitlines() if not line.startswith("<")]
    return "; ".join(line for line in lines if line)[:500]


def grammar_error(given_as: str, message: str, hint: str | None = None) -> InvalidRequest:
    """Returns the error of a structured output request that cannot be compiled."""
    return InvalidRequest(f"{given_as}: {message}", param=given_as, hint=hint)


def with_deep_stack(run: Callable[[], Returned], num_bytes: int) -> Returned:
    """Calls `run`, which compiles a text of `num_bytes` bytes; long texts run on a thread with a
    larger stack.

    llguidance recurses as deep as rules and schemas refer to one another, and a stack overflow
    would kill the process.

    The recursion depth is bounded by the text's length. Computing masks does not recurse.
    """
    if num_bytes <= SHALLOW_BYTES:
        return run()
    with LARGE if num_bytes > LARGE_BYTES else nullcontext():
        return _start(run, LEAST_STACK_BYTES + num_bytes * STACK_BYTES_PER_BYTE).result()


def _start(run: Callable[[], Returned], stack_bytes: int) -> Future[Returned]:
    done: Future[Returned] = Future()

    def work() -> None:
        try:
            done.set_result(run())
        except BaseException as error:
            done.set_exception(error)

    with STARTS:
        before = threading.stack_size(stack_bytes)
        try:
            threading.Thread(target=work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done
