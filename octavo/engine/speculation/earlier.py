"""Answers of requests that have ended, in which those that run look up how their text goes on.

Owns the tokens of the latest answers, within a number of bytes, each seen only by requests of the
same tenant, salt and adapter. Reads no clock; what a lookup finds follows from the answers' order.
Source: SuffixDecoding's global tree (Oliaro et al. 2024), here an index of runs of four tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.speculation.drafter import NO_DRAFT, Draft

GRAM = 4
"""Tokens that are looked up together."""
LONGEST = 16
"""Length up to which a match is followed backwards; longer ones are as likely to hold."""
TOKEN_BYTES = 224
"""Bytes that a token of an answer takes with its entry of the index; 213 on CPython 3.11."""

Key: TypeAlias = tuple[str, str, bytes]
"""Tenant, salt and adapter."""
Gram: TypeAlias = tuple[int, ...]


class EarlierAnswers:
    """The latest answers by whose they are."""

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // TOKEN_BYTES
        self._answers: deque[tuple[Key, list[int]]] = deque()
        """Answers with the tokens before them that a first match needs, the oldest first."""
        self._num_tokens = 0
        self._places: dict[Key, dict[Gram, tuple[list[int], int]]] = {}
        """Latest answer with each run of tokens, and the place behind the run."""

    @property
    def answers(self) -> list[list[int]]:
        """The answers that are kept, the oldest first, with a few tokens before them."""
        return [answer for _, answer in self._answers]

    @property
    def num_runs(self) -> int:
        """Number of runs of tokens that are looked up."""
        return sum(map(len, self._places.values()))

    def add(self, source: EngineRequest, token_ids: Sequence[int]) -> None:
        """Keeps the answer of a request that has ended; `token_ids` are the prompt's too."""
        start = max(0, len(source.prompt_token_ids) - GRAM)
        answer = list(token_ids[start:][: self._max_tokens])
        if len(answer) <= GRAM:
            return
        key = key_of(source)
        places = self._places.setdefault(key, {})
        for end in range(GRAM, len(answer)):
            places[tuple(answer[end - GRAM : end])] = (answer, end)
        self._answers.append((key, answer))
        self._num_tokens += len(answer)
        while self._num_tokens > self._max_tokens:
            self._drop(*self._answers.popleft())

    def propose(self, source: EngineRequest, token_ids: Sequence[int], max_tokens: int) -> Draft:
        """Returns what followed the last tokens of a row in the latest answer that has them."""
        found = self._places.get(key_of(source), {}).get(tuple(token_ids[-GRAM:]))
        if found is None:
            return NO_DRAFT
        answer, end = found
        return Draft(answer[end : end + max_tokens], _num_matched(answer[:end], token_ids))

    def _drop(self, key: Key, answer: list[int]) -> None:
        places = self._places[key]
        for end in range(GRAM, len(answer)):
            gram = tuple(answer[end - GRAM : end])
            if gram in places and places[gram][0] is answer:
                del places[gram]
        if not places:
            del self._places[key]
        self._num_tokens -= len(answer)


def key_of(source: EngineRequest) -> Key:
    """Returns whose answers a request may see, and adds its own to."""
    adapter = b"" if source.adapter is None else source.adapter.digest
    return (source.tenant, source.cache_salt, adapter)


def _num_matched(answer: Sequence[int], token_ids: Sequence[int]) -> int:
    """Returns how many last tokens two texts have in common."""
    count = 0
    for one, other in zip(reversed(answer), reversed(token_ids), strict=False):
        if one != other or count == LONGEST:
            break
        count += 1
    return count
