"""The tokens that penalties apply to: which a request has, and how often each was generated."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of a request and how often each was generated (0: in the prompt only)."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        for token_id in prompt_ids:
            self.add(token_id, generated=0)
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int, *, generated: int = 1) -> None:
        """Counts a token, `generated` times (0 for one of the prompt)."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += generated

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids and their counts, `[distinct]` each."""
        num = len(self._place)
        return self._ids[:num], self._counts[:num]

    def arrays_after(self, token_ids: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns what `arrays` would after these generated tokens too."""
        if not token_ids:
            return self.arrays()
        later = copy.copy(self)
        later._place = dict(self._place)
        later._ids, later._counts = self._ids.copy(), self._counts.copy()
        for token_id in token_ids:
            later.add(token_id)
        return later.arrays()
