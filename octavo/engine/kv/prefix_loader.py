"""Loads the stored blocks of a prompt: from files into slots before the request starts, and from
slots to the device when it starts.

Sits between the block pools and the connector. The scheduler decides when requests start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from octavo.engine.kv.block_choice import BlockChoice, PromptPart
from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.kv.hashed_blocks import Hit, PrefixFinder
from octavo.engine.kv.kv_connector import KVConnector
from octavo.engine.protocol.kv_messages import BlockKey, BlockMove


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Outcome of prefetching the stored part of a prompt."""

    is_waiting: bool
    """Whether the request must wait for it."""
    moves: list[BlockMove] = field(default_factory=list)
    """Loads that this step makes."""


NOTHING: frozenset[bytes] = frozenset()
NOTHING_TO_FETCH = Prefetch(is_waiting=False)
FETCHING = Prefetch(is_waiting=True)


class PrefixLoader:
    """Fetches and loads blocks by hash, a limited number of bytes per step."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        finder: PrefixFinder,
        connector: KVConnector,
        choice: BlockChoice | None = None,
    ) -> None:
        """`choice` selects the blocks that prompts load; None: all of them."""
        self._choice = choice
        self._pools = pools
        self._finder = finder
        self._connector = connector

    def prefetch(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        *,
        reserve: int,
        at_once: bool,
        source: str = "",
        prompt: PromptPart | None = None,
    ) -> Prefetch:
        """Fetches the stored blocks of a prompt into slots, and those that the engine at `source`
        computes. Loads them to the device before the request starts if they exceed the limit of one
        step. If a BlockChoice is configured and `prompt` is given, only the selected blocks.

        Unless `at_once`, a step loads a limited number of bytes, so that other requests are not
        delayed. Blocks loaded in advance are free blocks with a hash, which are prefix cache hits
        in the next step.
        """
        connector = self._connector
        if connector.is_waiting(request_id):
            return FETCHING
        if (
            self._choice is not None
            and prompt is not None
            and self._choice.advance(request_id, keys, prompt)
        ):
            return FETCHING
        left_out = self.left_out(request_id)
        if request_id not in connector.held:
            is_stored = partial(connector.can_fetch, source=source)
            stored = self._finder.find_whole(keys, is_stored, left_out).stored()
            blocks = [(group, keys[index]) for group, index in stored]
            if connector.fetch(request_id, blocks, source):
                return FETCHING
        return NOTHING_TO_FETCH if at_once else self._load_ahead(keys, reserve, left_out)

    def left_out(self, request_id: str) -> frozenset[bytes]:
        """Returns the digests of the blocks that a request skips."""
        return NOTHING if self._choice is None else self._choice.left_out(request_id)

    def cancel(self, request_id: str) -> None:
        """Cancels the unfinished choice of a request that has ended."""
        if self._choice is not None:
            self._choice.cancel(request_id)

    def load(
        self, hit: Hit, keys: Sequence[BlockKey], tables: Sequence[Sequence[int]]
    ) -> list[BlockMove]:
        """Loads the stored blocks of a hit into the tables' blocks, and adds these to the prefix
        cache.
        """
        return [
            self._load_block(
                group,
                keys[index],
                tables[group][0 if self._pools[group].spec.is_rewritten else index],
            )
            for group, index in hit.stored()
        ]

    def _load_ahead(
        self, keys: Sequence[BlockKey], reserve: int, left_out: frozenset[bytes]
    ) -> Prefetch:
        """Loads as much of a hit as one step may; returns a Prefetch that waits if the hit exceeds
        it.
        """
        stored = self._finder.find_whole(keys, self._connector.has, left_out).stored()
        if self._connector.may_load(stored) or any(
            len(pool.free) - reserve < len(keys) for pool in self._pools
        ):
            return NOTHING_TO_FETCH
        moves: list[BlockMove] = []
        for group, index in stored:
            pool = self._pools[group]
            if not self._connector.may_load([(group, index)]):
                break
            moves.append(self._load_block(group, keys[index], pool.allocate()))
            # Free at once, but hashed: the request finds it when it starts.
            pool.release(moves[-1].target)
        return Prefetch(is_waiting=bool(moves), moves=moves)

    def _load_block(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        self._pools[group].cache.add(block_id, key)
        return self._connector.load(group, key, block_id)
