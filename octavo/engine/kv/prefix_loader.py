"""Brings the stored blocks of a prompt back to the device: from files into slots before the request
starts, from slots into blocks when it does.

Stands between the pools and the connector; knows neither requests' tables nor when they start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.kv.prefix_finder import Hit, PrefixFinder
from octavo.ports import Connector
from octavo.step import BlockKey, BlockMove


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Outcome of fetching the stored part of a prompt ahead of its request's start."""

    is_waiting: bool
    """Whether the request is to wait for it."""
    moves: list[BlockMove] = field(default_factory=list)
    """Loads that this step makes."""


NOTHING_TO_FETCH = Prefetch(is_waiting=False)
FETCHING = Prefetch(is_waiting=True)


class PrefixLoader:
    """Fetches and loads blocks by name, a bounded number of bytes a step."""

    def __init__(
        self, pools: Sequence[BlockPool], finder: PrefixFinder, connector: Connector
    ) -> None:
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
    ) -> Prefetch:
        """Fetches the stored blocks of a prompt into slots, and those that the engine at `source`
        computes, then loads them ahead of its start.

        Unless `at_once`, a step loads only so much that it does not keep others waiting; blocks
        loaded ahead are free, and found by name at the next step.
        """
        connector = self._connector
        if connector.is_waiting(request_id):
            return FETCHING
        if not connector.has_fetched(request_id):
            is_stored = partial(connector.can_fetch, source=source)
            stored = self._finder.find_whole(keys, is_stored).stored()
            wanted = [(group, keys[index]) for group, index in stored]
            if connector.fetch(request_id, wanted, source):
                return FETCHING
        return NOTHING_TO_FETCH if at_once else self._load_ahead(keys, reserve)

    def load(
        self, hit: Hit, keys: Sequence[BlockKey], tables: Sequence[Sequence[int]]
    ) -> list[BlockMove]:
        """Loads a hit's stored blocks into those of the tables, which bear their names from now
        on.
        """
        return [
            self._load_block(
                group,
                keys[index],
                tables[group][0 if self._pools[group].life.is_rewritten else index],
            )
            for group, index in hit.stored()
        ]

    def _load_ahead(self, keys: Sequence[BlockKey], reserve: int) -> Prefetch:
        """Loads some of a hit that has more to load than one step may."""
        stored = self._finder.find_whole(keys, self._connector.has).stored()
        if self._connector.may_load(stored) or any(
            len(pool.free) - reserve < len(keys) for pool in self._pools
        ):
            return NOTHING_TO_FETCH
        moves: list[BlockMove] = []
        for group, index in stored:
            pool = self._pools[group]
            if not self._connector.may_load([(group, index)]):
                break
            moves.append(self._load_block(group, keys[index], pool.take()))
            # Free at once, but named: the request finds it when it starts.
            pool.release(moves[-1].target)
        return Prefetch(is_waiting=bool(moves), moves=moves)

    def _load_block(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        self._pools[group].cache.add(block_id, key)
        return self._connector.load(group, key, block_id)
