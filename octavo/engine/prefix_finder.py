"""How much of a prompt is computed already: full blocks that every cache group has, then a part of one more.

Looks, and changes nothing: who takes and copies the blocks is the BlockManager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.engine.block_pool import HOLE, BlockPool
from octavo.engine.prefix_cache import BlockKey

Kept = list[list[int | None]]
"""Per group the beginning of a table: blocks already there, holes, and None where one has to be taken."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A prompt's first `num_tokens` tokens: `num_blocks` whole blocks, and the beginning of the blocks `sources` (one a group, or none)."""

    kept: Kept = field(default_factory=list)
    num_blocks: int = 0
    num_tokens: int = 0
    sources: list[int] = field(default_factory=list)

    def of_whole_blocks(self, block_size: int) -> Hit:
        return Hit(self.kept, self.num_blocks, self.num_blocks * block_size)


NO_HIT = Hit()


class PrefixFinder:
    def __init__(self, pools: Sequence[BlockPool], block_size: int) -> None:
        self._pools = pools
        self._block_size = block_size
        self._windowed = [index for index, pool in enumerate(pools) if pool.window is not None]

    def find(self, keys: Sequence[BlockKey], token_ids: Sequence[int], *, root: bytes) -> Hit:
        """The longest beginning of `token_ids` from which every group can go on; `keys` are those of its full blocks."""
        kept = self._longest(self._found(keys))
        num_blocks = len(kept[0])
        num_tokens = num_blocks * self._block_size
        rest = tuple(token_ids[num_tokens : num_tokens + self._block_size])
        start = self._pools[0].cache.find_start(keys[num_blocks - 1].digest if num_blocks else root, rest)
        if start is not None:
            sources = [block_id for pool in self._pools if (block_id := pool.cache.find(start.key)) is not None]
            if len(sources) == len(self._pools):
                return Hit(kept, num_blocks, num_tokens + start.num_tokens, sources)
        return Hit(kept, num_blocks, num_tokens)

    def _found(self, keys: Sequence[BlockKey]) -> Kept:
        """Per group the blocks of these names, as far as every group without a window has them."""
        found: Kept = [[] for _ in self._pools]
        for key in keys:
            blocks = [pool.cache.find(key) for pool in self._pools]
            if any(block_id is None and pool.window is None for pool, block_id in zip(self._pools, blocks, strict=True)):
                break
            for table, block_id in zip(found, blocks, strict=True):
                table.append(block_id)
        return found

    def _longest(self, found: Kept) -> Kept:
        """The longest beginning that has, in each group with a window, the blocks that the token after it reads."""
        for num_blocks in range(len(found[0]), 0, -1):
            firsts = [pool.first_seen(num_blocks * self._block_size, self._block_size) for pool in self._pools]
            if all(None not in found[group][firsts[group] : num_blocks] for group in self._windowed):
                return [[*[HOLE] * first, *table[first:num_blocks]] for first, table in zip(firsts, found, strict=True)]
        return [[] for _ in self._pools]
