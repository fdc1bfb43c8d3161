"""Compiles grammars over a tokenizer's vocabulary, and follows an answer through them token by
token.

All that is asked of llguidance is asked here. Its limits are counts of work, not seconds: what
compiles in the front compiles in the worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from octavo.errors import InvalidRequest
from octavo.ports import Tokenizer
from octavo.structured_outputs import GrammarSpec
from octavo.text.grammar import lark

MAX_LEXER_STATES = 20_000
"""States of the regular expressions of one grammar; each takes about 1.5 KB."""
STEP_LEXER_FUEL = 200_000
"""Work on regular expressions that one mask may take, about 14 ms."""
STEP_MAX_ITEMS = 50_000
"""Work on rules that one mask may take, about 3 ms."""
PROBE_TOKENS = 8
"""Tokens that are tried at admission: many a grammar that is too large shows it there."""
BYTES_OF_TEXT, LEAST_BYTES = 100, 64 << 10
"""Memory that a compiled grammar takes for each byte of its text, and in all at least; measured
with enumerations and objects of thousands of names.
"""


class GrammarError(Exception):
    """A grammar that llguidance refuses, or that comes to a state that it cannot go on from."""


class VocabularyAdapter:
    """A tokenizer as llguidance wants to see one."""

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
    """One answer's way through a grammar. Implements `ports.Matcher`."""

    def __init__(
        self, matcher: LLMatcher, *, end_token_ids: frozenset[int], mask_bytes: int
    ) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._mask_bytes = mask_bytes
        self._has_ended = False

    def copy(self) -> TokenMatcher:
        copied = TokenMatcher(
            self._matcher.deep_copy(),
            end_token_ids=self._end_token_ids,
            mask_bytes=self._mask_bytes,
        )
        copied._has_ended = self._has_ended
        return copied

    def take(self, token_ids: Sequence[int]) -> None:
        ends = bool(token_ids) and token_ids[-1] in self._end_token_ids
        rest = list(token_ids[:-1] if ends else token_ids)
        taken = self._matcher.try_consume_tokens(rest)
        self._check()
        if taken < len(rest):
            raise GrammarError(f"the token {rest[taken]} does not continue the grammar's text")
        if ends and not self._matcher.is_accepting():
            raise GrammarError("an end token came before the end of the grammar's text")
        self._has_ended = ends

    def allows(self, token_id: int) -> bool:
        if token_id in self._end_token_ids:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token_id]) == 1

    def mask(self) -> bytes:
        found = self._matcher.compute_bitmask()
        self._check()
        # llguidance counts words of a mask in its own way.
        return found[: self._mask_bytes].ljust(self._mask_bytes, b"\0")

    @property
    def is_complete(self) -> bool:
        return self._has_ended or self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(first_line(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles over one vocabulary. Threads may compile at the same time."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._end_token_ids = frozenset(i for i in end_token_ids if i < vocab_size)
        self._special = {
            tokenizer.token_text(token_id): token_id
            for token_id in tokenizer.special_token_ids
            if token_id < vocab_size
        }
        self._mask_bytes = 4 * -(-vocab_size // 32)
        ends = sorted(self._end_token_ids)
        adapter = VocabularyAdapter(tokenizer, vocab_size, ends[0])
        self._tokenizer = LLTokenizer(TokenizerWrapper(adapter), eos_token=list(ends))

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their texts: a grammar names them, no text is one."""
        return self._special

    def compile(self, spec: GrammarSpec) -> TokenMatcher:
        """Returns a matcher at the beginning of the grammar's text; GrammarError where llguidance
        refuses the grammar.
        """
        matcher = LLMatcher(self._tokenizer, self._whole(spec), log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        return TokenMatcher(matcher, end_token_ids=self._end_token_ids, mask_bytes=self._mask_bytes)

    def num_bytes(self, spec: GrammarSpec) -> int:
        """Returns about how much memory the compiled grammar takes."""
        return LEAST_BYTES + BYTES_OF_TEXT * len(spec.text)

    def _whole(self, spec: GrammarSpec) -> str:
        grammars = json.loads(spec.text)
        if spec.starts_after:
            whole = lark.after(spec, grammars[0]["name"], self._special)
            grammars.insert(0, {"name": "whole", "lark_grammar": whole})
        return json.dumps({"grammars": grammars})


def limits() -> LLParserLimits:
    """Returns the bounds of the work on one grammar."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        verbose_errors=False,
    )


def probe(matcher: TokenMatcher) -> None:
    """Walks some tokens into a grammar; GrammarError where no token is legal, or a bound is met."""
    for _ in range(PROBE_TOKENS):
        mask = matcher.mask()
        first = next((i for i, byte in enumerate(mask) if byte), None)
        if first is None:
            raise GrammarError("no token can begin or continue its text")
        token_id = 8 * first + (mask[first] & -mask[first]).bit_length() - 1
        matcher.take([token_id])
        if matcher.is_complete:
            return


def first_line(error: str) -> str:
    """Returns what llguidance says of an error, without its dumps of the parser's state."""
    lines = [line.strip() for line in error.splitlines() if not line.startswith("<")]
    return "; ".join(line for line in lines if line)[:500]


def refuse(given_as: str, message: str, hint: str | None = None) -> InvalidRequest:
    """Returns the error of a form that cannot be met."""
    return InvalidRequest(f"{given_as}: {message}", param=given_as, hint=hint)
