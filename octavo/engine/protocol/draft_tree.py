"""Draft trees: which draft tokens follow which, and the paths from the root to each leaf.

Each draft token follows its parent: another draft token, or the row's last known token. Each path
has separate KV blocks, so that it is computed as a chain. Source: SpecInfer (Miao et al. 2024),
with paths instead of a tree mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1
"""Parent of draft tokens that follow the row's last known token."""


@dataclass(frozen=True)
class DraftTree:
    """A tree of draft tokens 0, 1, ...; `parents` contains the parent of each token, which precedes
    it.
    """

    parents: Sequence[int]

    @staticmethod
    def of(num_tokens: int, parents: Sequence[int]) -> DraftTree:
        """Returns the tree of a draft; a chain if `parents` is empty."""
        return DraftTree(parents or range(ROOT, num_tokens - 1))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Children of each token and of ROOT, in order."""
        children: dict[int, list[int]] = {}
        for token, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(token)
        return children

    @cached_property
    def depths(self) -> list[int]:
        """Number of draft tokens before each token on its path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    @cached_property
    def paths(self) -> list[list[int]]:
        """The path to each leaf; the first path always follows the first child. An empty tree has
        one empty path.
        """
        paths: list[list[int]] = []
        waiting: list[list[int]] = [[]]
        while waiting:
            path = waiting.pop()
            children = self.children.get(path[-1] if path else ROOT, ())
            if not children:
                paths.append(path)
            waiting += [[*path, token] for token in reversed(children)]
        return paths

    @cached_property
    def own(self) -> list[list[int]]:
        """For each path, the tokens that are not in an earlier path."""
        seen: set[int] = set()
        own = []
        for path in self.paths:
            own.append([token for token in path if token not in seen])
            seen.update(path)
        return own

    @property
    def is_chain(self) -> bool:
        """Whether there is only one path."""
        return len(self.parents) == 0 or all(
            parent == token - 1 for token, parent in enumerate(self.parents)
        )

    @property
    def longest(self) -> int:
        """Number of tokens on the longest path."""
        return len(self.parents) if self.is_chain else 1 + max(self.depths)

    def get_path_index(self, token: int) -> int:
        """Returns the index of the first path that contains `token`; 0 for ROOT."""
        if token == ROOT:
            return 0
        return next(index for index, path in enumerate(self.paths) if token in path)

    def held(self, token_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[int]:
        """Returns the accepted tokens: the path of the tree along the sampled ids `sampled_ids`.
        `token_ids` are the ids of the tree's tokens.
        """
        path: list[int] = []
        for token_id in sampled_ids:
            children = self.children.get(path[-1] if path else ROOT, ())
            child = next((token for token in children if token_ids[token] == token_id), None)
            if child is None:
                break
            path.append(child)
        return path
