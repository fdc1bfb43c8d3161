"""The shape of a guess that branches: which guessed tokens follow which, and the paths through it.

A guess is a list of tokens, each behind its parent, another one of them or the row's last known
token. A leaf is a token that no other follows; its path leads to it from the first. Each leaf has
blocks of its own, so that a path is computed as a chain is. Knows neither ids nor blocks.
Source: SpecInfer (Miao et al. 2024); paths in place of its tree mask are this engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1
"""Parent of the tokens that follow the row's last known one."""


@dataclass(frozen=True)
class DraftTree:
    """A guess of tokens 0, 1, ..., each behind its parent in `parents`, which comes before it."""

    parents: Sequence[int]

    @staticmethod
    def of(num_tokens: int, parents: Sequence[int]) -> DraftTree:
        """Returns the tree of a guess; without parents each token follows the one before."""
        return DraftTree(parents or range(ROOT, num_tokens - 1))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The tokens behind each token, or behind ROOT, in their order."""
        found: dict[int, list[int]] = {}
        for token, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(token)
        return found

    @cached_property
    def depths(self) -> list[int]:
        """Number of guessed tokens before each one on its path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    @cached_property
    def paths(self) -> list[list[int]]:
        """The path to each leaf; the first one takes the first token at each fork. Without any
        token there is one path, which is empty.
        """
        found: list[list[int]] = []
        waiting: list[list[int]] = [[]]
        while waiting:
            path = waiting.pop()
            behind = self.children.get(path[-1] if path else ROOT, ())
            if not behind:
                found.append(path)
            waiting += [[*path, token] for token in reversed(behind)]
        return found

    @cached_property
    def own(self) -> list[list[int]]:
        """The tokens of each path that no path before it has: the end of the path."""
        seen: set[int] = set()
        found = []
        for path in self.paths:
            found.append([token for token in path if token not in seen])
            seen.update(path)
        return found

    @property
    def is_chain(self) -> bool:
        """Whether there is one path."""
        return len(self.parents) == 0 or all(
            parent == token - 1 for token, parent in enumerate(self.parents)
        )

    @property
    def longest(self) -> int:
        """Tokens on the longest path."""
        return len(self.parents) if self.is_chain else 1 + max(self.depths)

    def path_of(self, token: int) -> int:
        """Returns the first path with a token; that of ROOT is the first of all."""
        if token == ROOT:
            return 0
        return next(at for at, path in enumerate(self.paths) if token in path)

    def held(self, token_ids: Sequence[int], drawn: Sequence[int]) -> list[int]:
        """Returns the tokens of the guess, whose ids are `token_ids`, that were drawn: `drawn` are
        the ids drawn one after another behind the row's last known token.
        """
        path: list[int] = []
        for token_id in drawn:
            behind = self.children.get(path[-1] if path else ROOT, ())
            found = next((token for token in behind if token_ids[token] == token_id), None)
            if found is None:
                break
            path.append(found)
        return path
