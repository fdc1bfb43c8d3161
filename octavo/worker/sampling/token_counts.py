"""Token counts of a request, for penalties."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct tokens of a request, and how often each was generated (0: only in the prompt)."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        for token_id in prompt_ids:
            self.add(token_id, generated=0)
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int, *, generated: int = 1) -> None:
        """Counts a token `generated` times (0 for a prompt token)."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += generated

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids and their counts, `[distinct]` each."""
        num = len(self._index)
        return self._ids[:num], self._counts[:num]

    def arrays_after(self, token_ids: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns `arrays` as if these generated tokens had been added, without adding them."""
        if not token_ids:
            return self.arrays()
        later = copy.copy(self)
        later._index = dict(self._index)
        later._ids, later._counts = self._ids.copy(), self._counts.copy()
        for token_id in token_ids:
            later.add(token_id)
        return later.arrays()
