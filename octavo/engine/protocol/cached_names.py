"""The block names that an engine is known, or expected, to hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class CachedNames:
    """A set of block names, bounded by forgetting names that have not been used for long.

    Names lie in two generations. Where the younger one has half of what is allowed, it becomes the
    older one, whose names are forgotten: no decision ever waits for a name by name eviction.
    """

    def __init__(self, most: int | None = None) -> None:
        """`most`: maximum number of names kept; None: no limit."""
        self._most = most
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def bound(self, most: int) -> None:
        """Keeps at most `most` names from now on."""
        self._most = most
        self._forget()

    def num_known(self, names: Sequence[bytes]) -> int:
        """Returns how many of the first names are known without a gap."""
        young, old = self._young, self._old
        for index, name in enumerate(names):
            if name not in young and name not in old:
                return index
        return len(names)

    def add(self, names: Iterable[bytes]) -> None:
        """Adds names, or notes that they are in use."""
        self._young.update(names)
        self._forget()

    def remove(self, names: Iterable[bytes]) -> None:
        """Removes names; those that are not known are left out."""
        gone = list(names)
        self._young.difference_update(gone)
        self._old.difference_update(gone)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def _forget(self) -> None:
        if self._most is not None and len(self._young) > self._most // 2:
            self._old, self._young = self._young, set()
