"""Outputs of finished requests, in which running requests look up continuations.

Keeps the tokens of the latest outputs within a memory limit. Only requests with the same tenant,
cache salt and adapter can see an output. Source: SuffixDecoding's global tree (Oliaro et al. 2024),
here an index of 4-grams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.speculation.proposer import NO_DRAFT, Draft

GRAM = 4
"""Number of tokens of a lookup key."""
LONGEST = 16
"""Maximum match length that is measured; longer matches are accepted at the same rate."""
TOKEN_BYTES = 224
"""Memory per token, including its index entry, in bytes; 213 on CPython 3.11."""

Key: TypeAlias = tuple[str, str, bytes]
"""Tenant, cache salt and adapter digest."""
Gram: TypeAlias = tuple[int, ...]


class PreviousOutputs:
    """The latest outputs, by tenant, cache salt and adapter."""

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // TOKEN_BYTES
        self._outputs: deque[tuple[Key, list[int]]] = deque()
        """Outputs, oldest first, each with the last prompt tokens that a first match needs."""
        self._num_tokens = 0
        self._occurrences: dict[Key, dict[Gram, tuple[list[int], int]]] = {}
        """For each n-gram, the latest output that contains it, and the index after the n-gram."""

    @property
    def outputs(self) -> list[list[int]]:
        """Stored outputs, oldest first, each with the last few prompt tokens."""
        return [output for _, output in self._outputs]

    @property
    def num_runs(self) -> int:
        """Number of indexed n-grams."""
        return sum(map(len, self._occurrences.values()))

    def add(self, source: EngineRequest, token_ids: Sequence[int]) -> None:
        """Stores the output of a finished request; `token_ids` include its prompt."""
        start = max(0, len(source.prompt_token_ids) - GRAM)
        output = list(token_ids[start:][: self._max_tokens])
        if len(output) <= GRAM:
            return
        key = get_key(source)
        occurrences = self._occurrences.setdefault(key, {})
        for end in range(GRAM, len(output)):
            occurrences[tuple(output[end - GRAM : end])] = (output, end)
        self._outputs.append((key, output))
        self._num_tokens += len(output)
        while self._num_tokens > self._max_tokens:
            self._drop(*self._outputs.popleft())

    def propose(self, source: EngineRequest, token_ids: Sequence[int], max_tokens: int) -> Draft:
        """Proposes the tokens that followed a row's last tokens in the latest output that contains
        them.
        """
        occurrence = self._occurrences.get(get_key(source), {}).get(tuple(token_ids[-GRAM:]))
        if occurrence is None:
            return NO_DRAFT
        output, end = occurrence
        return Draft(output[end : end + max_tokens], _num_matched(output[:end], token_ids))

    def _drop(self, key: Key, output: list[int]) -> None:
        occurrences = self._occurrences[key]
        for end in range(GRAM, len(output)):
            gram = tuple(output[end - GRAM : end])
            if gram in occurrences and occurrences[gram][0] is output:
                del occurrences[gram]
        if not occurrences:
            del self._occurrences[key]
        self._num_tokens -= len(output)


def get_key(source: EngineRequest) -> Key:
    """Returns the key of the outputs that a request may use."""
    adapter = b"" if source.adapter is None else source.adapter.digest
    return (source.tenant, source.cache_salt, adapter)


def _num_matched(output: Sequence[int], token_ids: Sequence[int]) -> int:
    """Returns the length of the longest common suffix, at most LONGEST."""
    count = 0
    for one, other in zip(reversed(output), reversed(token_ids), strict=False):
        if one != other or count == LONGEST:
            break
        count += 1
    return count
