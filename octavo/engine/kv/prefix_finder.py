"""How much of a prompt is computed already: full blocks that every cache group has, then a part of
one more.

Looks, and changes nothing: the BlockManager takes the blocks and has them copied. Which blocks a
group must have is asked of its spec (`octavo/engine/protocol/kv_cache_spec.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from octavo.engine.kv.block_pool import HOLE, BlockPool
from octavo.engine.kv.block_tables import Kept
from octavo.engine.protocol.kv_messages import BlockKey, BlockName
from octavo.engine.protocol.ports import Connector

ABSENT = -2
"""Place of a block that is nowhere."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The beginning of a prompt that is computed already."""

    kept: Kept = field(default_factory=list)
    """Blocks of each group in the order of their names; None stands for one that the connector
    has.
    """
    num_blocks: int = 0
    """Whole blocks that are found."""
    num_tokens: int = 0
    """Tokens that are found, those of a partial block included."""
    sources: list[int] = field(default_factory=list)
    """The partial block in each group, to be copied; a hole where a group needs none, and [] where
    the hit ends with a whole block.
    """

    def without_partial_block(self, block_size: int) -> Hit:
        """Returns the hit's whole blocks alone."""
        return Hit(self.kept, self.num_blocks, self.num_blocks * block_size)

    def stored(self) -> list[tuple[int, int]]:
        """Lists (group, index) of the blocks that the connector has, in the order of the tokens."""
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
    """Looks for prompts in the pools of all groups, and in what the connector has."""

    def __init__(self, pools: Sequence[BlockPool], block_size: int, connector: Connector) -> None:
        specs = [pool.spec for pool in pools]
        self.can_hit = all(spec.allows_hits for spec in specs) and any(
            spec.is_named for spec in specs
        )
        """Whether a request may begin behind tokens that another has computed: every group allows
        it, and names tell what was computed.
        """
        self._finds_parts = all(spec.keeps_parts for spec in specs)
        """Whether a request may go on behind the beginning of another one's block."""
        self._pools = pools
        self._connector = connector
        self._block_size = block_size
        self._partly_read = [
            index for index, pool in enumerate(pools) if not pool.spec.keeps_every_token
        ]
        """Groups of which the next token does not read all blocks."""

    def find(
        self,
        keys: Sequence[BlockKey],
        rest: tuple[int, ...],
        *,
        root: bytes,
        left_out: Collection[bytes] = (),
    ) -> Hit:
        """Finds the longest beginning of a prompt from which every group can go on.

        `keys` are those of the prompt's full blocks, `root` is the parent of the first; `rest` are
        the tokens behind them, less than a block. Blocks of the digests `left_out` are holes.
        """
        if not self.can_hit:
            return NO_HIT
        kept = self._longest(self._found(keys, self._connector.has, left_out))
        num_blocks = len(kept[0])
        num_tokens = num_blocks * self._block_size
        wanted = rest
        if num_blocks < len(keys):  # the tokens of a block with media do not say what it holds
            wanted = () if keys[num_blocks].extra else keys[num_blocks].token_ids
        # The block at which the hit ends may share its beginning with one that is known.
        parent = keys[num_blocks - 1].digest if num_blocks else root
        sources, num_common = self._partial_block(parent, wanted)
        return Hit(kept, num_blocks, num_tokens + num_common, sources)

    def find_whole(
        self,
        keys: Sequence[BlockKey],
        is_stored: Callable[[int, BlockKey], bool],
        left_out: Collection[bytes] = (),
    ) -> Hit:
        """Finds whole blocks only; `is_stored` says which blocks the connector counts as having."""
        if not self.can_hit:
            return NO_HIT
        kept = self._longest(self._found(keys, is_stored, left_out))
        return Hit(kept, len(kept[0]), len(kept[0]) * self._block_size)

    def read_after(self, keys: Sequence[BlockKey]) -> list[BlockName]:
        """Names the blocks that the token after these blocks reads."""
        names = []
        for group, first in enumerate(self._firsts(len(keys))):
            if self._pools[group].spec.is_named:
                names += [BlockName(group, key.digest) for key in keys[first:]]
        return names

    def _partial_block(self, parent: bytes, wanted: tuple[int, ...]) -> tuple[list[int], int]:
        """Finds a block whose beginning is wanted: its id in each group, and how many of its tokens
        are common; ([], 0) where there is none.
        """
        named = [pool for pool in self._pools if pool.spec.is_named and self._finds_parts]
        match = named[0].cache.find_partial(parent, wanted) if named else None
        if match is None:
            return [], 0
        sources = [
            pool.cache.find(match.key) if pool.spec.is_named else HOLE for pool in self._pools
        ]
        found = [block_id for block_id in sources if block_id is not None]
        return (found, match.num_tokens) if len(found) == len(sources) else ([], 0)

    def _found(
        self,
        keys: Sequence[BlockKey],
        is_stored: Callable[[int, BlockKey], bool],
        left_out: Collection[bytes],
    ) -> Kept:
        """Returns the blocks of these names, as far as every group that needs them all has them;
        holes for those that are left out.
        """
        found: Kept = [[] for _ in self._pools]
        for key in keys:
            if key.digest in left_out:
                for table in found:
                    table.append(HOLE)
                continue
            blocks: list[int | None] = []
            for group, pool in enumerate(self._pools):
                block_id = pool.cache.find(key)
                if block_id is None and not (pool.spec.is_named and is_stored(group, key)):
                    if pool.spec.keeps_every_token:
                        return found
                    block_id = ABSENT
                blocks.append(block_id)
            for table, block_id in zip(found, blocks, strict=True):
                table.append(block_id)
        return found

    def _longest(self, found: Kept) -> Kept:
        """Returns the longest beginning that has, in every group, the blocks that the token after
        it reads.
        """
        for num_blocks in range(len(found[0]), 0, -1):
            firsts = self._firsts(num_blocks)
            if all(
                ABSENT not in found[group][firsts[group] : num_blocks]
                for group in self._partly_read
            ):
                return [
                    [*[HOLE] * first, *table[first:num_blocks]]
                    for first, table in zip(firsts, found, strict=True)
                ]
        return [[] for _ in self._pools]

    def _firsts(self, num_blocks: int) -> list[int]:
        """Returns for each group the first block that must be found for the token after
        `num_blocks` blocks.
        """
        return [pool.spec.first_found(num_blocks, self._block_size) for pool in self._pools]
