"""Full KV blocks of one cache group, found again by their names: automatic prefix caching.

A hit is verified against the token ids, so that a collision of hashes costs a miss and never a
wrong answer. Owns no block: reference counts and the order of eviction are the BlockPool's. Source:
PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.engine.protocol.block_events import BlockEventLog
from octavo.engine.protocol.kv_messages import BlockKey


class PartialMatch(NamedTuple):
    """A block of which only the beginning is wanted."""

    key: BlockKey
    num_tokens: int
    """Tokens that it has in common with what is looked for."""


class PrefixCache:
    """Map between keys and the blocks that hold them: one block a key, one key a block."""

    def __init__(self, log: BlockEventLog | None = None) -> None:
        """Takes the log in which names are noted that come and go."""
        self._log = log
        self._block_of: dict[bytes, int] = {}
        self.key_of: dict[int, BlockKey] = {}
        """Names by block."""
        self._after: dict[bytes, list[BlockKey]] = {}
        """Keys by their parent's digest, sorted by token ids: the one with the longest common
        beginning is a neighbour.
        """

    def __len__(self) -> int:
        return len(self.key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.key_of

    def find(self, key: BlockKey) -> int | None:
        """Returns the block of that name."""
        block_id = self._block_of.get(key.digest)
        return block_id if block_id is not None and self.key_of[block_id] == key else None

    def find_partial(self, parent: bytes, token_ids: tuple[int, ...]) -> PartialMatch | None:
        """Returns the block after `parent` that agrees longest with `token_ids`, which do not fill
        a block; None where none agrees at all.

        A block with media in it is no match: its tokens alone do not say what it holds.
        """
        siblings = self._after.get(parent, [])
        place = bisect_left(siblings, token_ids, key=_tokens_of)
        matches = [
            PartialMatch(key, _num_common(key.token_ids, token_ids))
            for key in siblings[max(0, place - 1) : place + 1]
            if not key.extra
        ]
        best = max(matches, key=lambda match: match.num_tokens, default=None)
        return best if best is not None and best.num_tokens else None

    def add(self, block_id: int, key: BlockKey) -> None:
        """Names a full block; where another block has the name already, that one keeps it."""
        if key.digest not in self._block_of:
            self._block_of[key.digest] = block_id
            self.key_of[block_id] = key
            siblings = self._after.setdefault(key.parent, [])
            siblings.insert(bisect_left(siblings, key.token_ids, key=_tokens_of), key)
            if self._log is not None:
                self._log.stored(key.digest, key.parent, key.token_ids)

    def forget(self, block_id: int) -> None:
        """Drops a block's name, if it has one."""
        key = self.key_of.pop(block_id, None)
        if key is None:
            return
        if self._log is not None:
            self._log.removed(key)
        del self._block_of[key.digest]
        siblings = self._after[key.parent]
        place = bisect_left(siblings, key.token_ids, key=_tokens_of)
        while siblings[place] != key:  # others have the same tokens, and other media
            place += 1
        del siblings[place]
        if not siblings:
            del self._after[key.parent]

    def forget_keys(self, keys: Iterable[BlockKey]) -> None:
        """Drops these names."""
        for key in keys:
            block_id = self.find(key)
            if block_id is not None:
                self.forget(block_id)


def _tokens_of(key: BlockKey) -> tuple[int, ...]:
    return key.token_ids


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts the tokens in which two sequences agree from their beginning on."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
