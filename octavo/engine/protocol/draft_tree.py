"""Draft trees: which draft tokens follow which, and the paths from the root to each leaf.

Each draft token follows its parent: another draft token, or the row's last known token. Each leaf
has KV blocks of its own, so that a path is computed as a chain. Source: SpecInfer (Miao et al.
2024), with paths instead of its tree mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1
"""Parent of the tokens that follow the row's last known one."""


@dataclass(frozen=True)
class DraftTree:
    """A tree of draft tokens 0, 1, ...; `parents` holds each token's parent, which precedes it."""

    parents: Sequence[int]

    @staticmethod
    def of(num_tokens: int, parents: Sequence[int]) -> DraftTree:
        """Returns the tree of a draft; without parents it is a chain."""
        return DraftTree(parents or range(ROOT, num_tokens - 1))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Children of each token and of ROOT, in order."""
        found: dict[int, list[int]] = {}
        for token, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(token)
        return found

    @cached_property
    def depths(self) -> list[int]:
        """Number of draft tokens before each one on its path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    @cached_property
    def paths(self) -> list[list[int]]:
        """Path to each leaf; the first one follows the first child everywhere. An empty tree has
        one empty path.
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
        """Tokens of each path that are in no earlier path."""
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

    def get_path_index(self, token: int) -> int:
        """Returns the index of the first path that contains a token; 0 for ROOT."""
        if token == ROOT:
            return 0
        return next(at for at, path in enumerate(self.paths) if token in path)

    def held(self, token_ids: Sequence[int], drawn: Sequence[int]) -> list[int]:
        """Returns the accepted tokens of the tree: those on the path of the sampled ids `drawn`,
        given the ids `token_ids` of the tree's tokens.
        """
        path: list[int] = []
        for token_id in drawn:
            behind = self.children.get(path[-1] if path else ROOT, ())
            found = next((token for token in behind if token_ids[token] == token_id), None)
            if found is None:
                break
            path.append(found)
        return path
