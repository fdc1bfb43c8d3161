"""How much of a prompt is computed already: full blocks that every cache group has, then a part of
one more.

Looks, and changes nothing: who takes and copies the blocks is the BlockManager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.engine.kv.block_pool import HOLE, BlockPool
from octavo.ports import Connector
from octavo.step import BlockKey

Kept = list[list[int | None]]
"""Per group the beginning of a table: blocks already there, holes, and None where one has to be
taken.
"""

ABSENT = -2
"""In place of a block that is nowhere."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A prompt's first `num_tokens` tokens: `num_blocks` whole blocks, and the beginning of the
    blocks `sources` (one a group, or none).

    None in `kept` is a block that the connector has.
    """

    kept: Kept = field(default_factory=list)
    num_blocks: int = 0
    num_tokens: int = 0
    sources: list[int] = field(default_factory=list)

    def of_whole_blocks(self, block_size: int) -> Hit:
        return Hit(self.kept, self.num_blocks, self.num_blocks * block_size)

    def stored(self) -> list[tuple[int, int]]:
        """(group, index) of the blocks that the connector has, in the order of the tokens."""
        return sorted(
            (
                (group, index)
                for group, table in enumerate(self.kept)
                for index, block_id in enumerate(table)
                if block_id is None
            ),
            key=lambda place: place[1],
        )


NO_HIT = Hit()


class PrefixFinder:
    def __init__(self, pools: Sequence[BlockPool], block_size: int, connector: Connector) -> None:
        self._pools = pools
        self._connector = connector
        self._block_size = block_size
        self._windowed = [index for index, pool in enumerate(pools) if pool.window is not None]

    def find(self, keys: Sequence[BlockKey], token_ids: Sequence[int], *, root: bytes) -> Hit:
        """The longest beginning of `token_ids` from which every group can go on; `keys` are those
        of its full blocks.
        """
        kept = self._longest(self._found(keys, self._connector.has))
        num_blocks = len(kept[0])
        num_tokens = num_blocks * self._block_size
        rest = tuple(token_ids[num_tokens : num_tokens + self._block_size])
        start = self._pools[0].cache.find_start(
            keys[num_blocks - 1].digest if num_blocks else root, rest
        )
        if start is not None:
            sources = [
                block_id
                for pool in self._pools
                if (block_id := pool.cache.find(start.key)) is not None
            ]
            if len(sources) == len(self._pools):
                return Hit(kept, num_blocks, num_tokens + start.num_tokens, sources)
        return Hit(kept, num_blocks, num_tokens)

    def find_whole(self, keys: Sequence[BlockKey]) -> Hit:
        """In whole blocks, those among them that it takes steps to fetch."""
        kept = self._longest(self._found(keys, self._connector.can_fetch))
        return Hit(kept, len(kept[0]), len(kept[0]) * self._block_size)

    def _found(self, keys: Sequence[BlockKey], is_stored: Callable[[int, BlockKey], bool]) -> Kept:
        """Per group the blocks of these names, as far as every group without a window has them."""
        found: Kept = [[] for _ in self._pools]
        for key in keys:
            blocks: list[int | None] = []
            for group, pool in enumerate(self._pools):
                block_id = pool.cache.find(key)
                if block_id is None and not is_stored(group, key):
                    if pool.window is None:
                        return found
                    block_id = ABSENT
                blocks.append(block_id)
            for table, block_id in zip(found, blocks, strict=True):
                table.append(block_id)
        return found

    def _longest(self, found: Kept) -> Kept:
        """The longest beginning that has, in each group with a window, the blocks that the token
        after it reads.
        """
        for num_blocks in range(len(found[0]), 0, -1):
            firsts = [
                pool.first_seen(num_blocks * self._block_size, self._block_size)
                for pool in self._pools
            ]
            if all(
                ABSENT not in found[group][firsts[group] : num_blocks] for group in self._windowed
            ):
                return [
                    [*[HOLE] * first, *table[first:num_blocks]]
                    for first, table in zip(firsts, found, strict=True)
                ]
        return [[] for _ in self._pools]
