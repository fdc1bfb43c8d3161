"""Full KV blocks found again by what they hold: automatic prefix caching, for one cache group.

A block's name is a chained hash of (name of the block before it, its token ids), the chain starting
from the request's salt; a hit is verified against the token ids, so that a collision costs a miss
and never a wrong answer. Owns no block: reference counts and the order of eviction are the
BlockManager's. Source: PagedAttention (Kwon et al. 2023), with vLLM's hash per block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from octavo.step import BlockKey


class Start(NamedTuple):
    """A block whose first `num_tokens` tokens are those looked for."""

    key: BlockKey
    num_tokens: int


def root_digest(salt: str) -> bytes:
    """What the first block of a chain has as its parent."""
    return blake2b(salt.encode(), digest_size=16).digest()


def extend_keys(
    keys: list[BlockKey], token_ids: Sequence[int], num_blocks: int, *, block_size: int, salt: str
) -> None:
    """Adds the keys of the blocks up to `num_blocks` in place; `token_ids` are the request's from
    its first on.
    """
    parent = keys[-1].digest if keys else root_digest(salt)
    for index in range(len(keys), num_blocks):
        block = tuple(token_ids[index * block_size : (index + 1) * block_size])
        digest = blake2b(parent + array("i", block).tobytes(), digest_size=16).digest()
        keys.append(BlockKey(digest, parent, block))
        parent = digest


class PrefixCache:
    """Which block of a group holds which key; one block a key, one key a block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._after: dict[bytes, list[BlockKey]] = {}
        """By parent, in the order of their token ids: the longest common beginning is a
        neighbour's.
        """

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    def find(self, key: BlockKey) -> int | None:
        block_id = self._block_of.get(key.digest)
        return block_id if block_id is not None and self._key_of[block_id] == key else None

    def find_start(self, parent: bytes, token_ids: tuple[int, ...]) -> Start | None:
        """The block after `parent` that agrees longest with these tokens, which do not fill a
        block; None where none agrees at all.
        """
        siblings = self._after.get(parent, [])
        place = bisect_left(siblings, token_ids, key=_tokens_of)
        starts = [
            Start(key, _num_common(key.token_ids, token_ids))
            for key in siblings[max(0, place - 1) : place + 1]
        ]
        best = max(starts, key=lambda start: start.num_tokens, default=None)
        return best if best is not None and best.num_tokens else None

    def add(self, block_id: int, key: BlockKey) -> None:
        """Names a full block; where another block already has the name, that one keeps it."""
        if key.digest not in self._block_of:
            self._block_of[key.digest] = block_id
            self._key_of[block_id] = key
            siblings = self._after.setdefault(key.parent, [])
            siblings.insert(bisect_left(siblings, key.token_ids, key=_tokens_of), key)

    def forget(self, block_id: int) -> None:
        key = self._key_of.pop(block_id, None)
        if key is None:
            return
        del self._block_of[key.digest]
        siblings = self._after[key.parent]
        del siblings[bisect_left(siblings, key.token_ids, key=_tokens_of)]
        if not siblings:
            del self._after[key.parent]

    def forget_keys(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            block_id = self.find(key)
            if block_id is not None:
                self.forget(block_id)


def _tokens_of(key: BlockKey) -> tuple[int, ...]:
    return key.token_ids


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Of two beginnings."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
