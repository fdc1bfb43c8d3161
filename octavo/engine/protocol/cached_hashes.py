"""Hashes of the blocks that an engine has, or is expected to have, in its prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class CachedHashes:
    """Set of block hashes, bounded by evicting hashes that have not been used for long.

    There are two generations. When the younger one has half of the allowed number of hashes, it
    replaces the older one, which is discarded at once, so that no call evicts hashes one by one.
    """

    def __init__(self, max_hashes: int | None = None) -> None:
        """`max_hashes`: maximum number of hashes; None: no limit."""
        self._most = max_hashes
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def bound(self, max_hashes: int) -> None:
        """Limits the number of hashes from now on."""
        self._most = max_hashes
        self._forget()

    def num_known(self, names: Sequence[bytes]) -> int:
        """Returns the length of the longest prefix of `names` that consists of known hashes."""
        young, old = self._young, self._old
        for index, name in enumerate(names):
            if name not in young and name not in old:
                return index
        return len(names)

    def add(self, names: Iterable[bytes]) -> None:
        """Adds hashes, or marks them as used."""
        self._young.update(names)
        self._forget()

    def remove(self, names: Iterable[bytes]) -> None:
        """Removes hashes; ignores unknown ones."""
        gone = list(names)
        self._young.difference_update(gone)
        self._old.difference_update(gone)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def _forget(self) -> None:
        if self._most is not None and len(self._young) > self._most // 2:
            self._old, self._young = self._young, set()
