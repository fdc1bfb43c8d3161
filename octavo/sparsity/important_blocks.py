"""Chooses the stored prefix blocks that a prompt does not load: those with the least attention from
its last tokens.

First, the keys of one layer (a separate cache group) and the blocks that are always loaded are
fetched. The worker scores all blocks by these keys (`prefix_weigher.py`), and then only the chosen
blocks are fetched. Blocks in host memory are always used. A preempted request keeps its choice.
Handles only block hashes. Source: IMPRESS (Chen et al. 2025, FAST).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.engine.kv.block_choice import PromptPart
from octavo.engine.kv.hashed_blocks import PrefixFinder
from octavo.engine.kv.kv_connector import BlockChoiceSpec, KVConnector
from octavo.engine.protocol.kv_messages import BlockKey, BlockQuery

MAX_TOKENS = 128
"""Maximum number of prompt tokens that are computed to obtain queries: the first block and the last
tokens.
"""

MAX_QUERIES = 32
"""Maximum number of last tokens whose attention counts."""

FEWEST = 4
"""Number of blocks that are always loaded."""

NUM_LAST = 2
"""Number of last blocks of a stored prefix that are always loaded, in addition to the first one."""

MAX_CHOICES = 1024
"""Maximum number of requests whose choices are stored; older requests choose again after a
preemption.
"""


@dataclass(slots=True)
class _Choice:
    """State of one request's choice."""

    stage: Literal["weighing", "made"] = "made"
    left_out: frozenset[bytes] = frozenset()
    """Digests of the blocks that the request does not load."""
    asked: list[BlockKey] = field(default_factory=list)
    """Blocks to score, in prompt order."""


class ImportantBlocks:
    """Block choices of requests with a stored prefix."""

    def __init__(
        self,
        finder: PrefixFinder,
        connector: KVConnector,
        spec: BlockChoiceSpec,
        *,
        num_groups: int,
    ) -> None:
        self._finder = finder
        self._connector = connector
        self._group = spec.group
        self._share = spec.share
        self._num_groups = num_groups
        self._choices: OrderedDict[str, _Choice] = OrderedDict()

    def left_out(self, request_id: str) -> frozenset[bytes]:
        """Returns the digests of the blocks that a request does not load."""
        choice = self._choices.get(request_id)
        return frozenset() if choice is None else choice.left_out

    def advance(self, request_id: str, keys: Sequence[BlockKey], prompt: PromptPart) -> bool:
        """Advances a request's choice; returns whether the request must wait for its result."""
        choice = self._choices.get(request_id)
        if choice is None:
            choice = self._choices[request_id] = self._begin(request_id, keys, prompt)
            if len(self._choices) > MAX_CHOICES:
                self._choices.popitem(last=False)
        if choice.stage == "weighing":
            masses = self._connector.pop_ratings(request_id)
            if masses is None:
                return True
            self._connector.release(request_id)
            self._decide(choice, masses)
        return False

    def _begin(self, request_id: str, keys: Sequence[BlockKey], prompt: PromptPart) -> _Choice:
        """Starts scoring the blocks beyond host memory.

        Fetches their keys and the blocks that are always loaded. If all blocks are in host memory,
        nothing is scored.
        """
        connector = self._connector
        hit = self._finder.find_whole(keys, connector.can_fetch)
        stored = hit.stored()
        indices = sorted({index for _, index in stored})
        is_far = any(not connector.has(group, keys[index]) for group, index in stored)
        if len(indices) <= FEWEST or not is_far:
            return _Choice()
        asked = [keys[index] for index in indices]
        groups = [each for each in range(self._num_groups) if each != self._group]
        certain = [asked[block_index] for block_index in sorted(always_loaded(len(asked)))]
        wanted = [(self._group, key) for key in asked]
        connector.fetch(request_id, wanted + [(each, key) for key in certain for each in groups])
        query = query_about(prompt, request_id, hit.num_blocks)
        query.group = self._group
        asked = connector.ask(query, asked)
        if not asked:
            connector.release(request_id)
        return _Choice("weighing" if asked else "made", asked=asked)

    def cancel(self, request_id: str) -> None:
        """Cancels an unfinished choice of a request that has ended."""
        choice = self._choices.get(request_id)
        if choice is not None and choice.stage != "made":
            del self._choices[request_id]
            self._connector.cancel_query(request_id)

    def _decide(self, choice: _Choice, masses: Sequence[float]) -> None:
        """Excludes the blocks with the least attention; excludes none if scoring failed."""
        choice.stage = "made"
        if len(masses) != len(choice.asked):
            return
        self._connector.rate(choice.asked, masses)
        loaded = important(masses, self._share)
        choice.left_out = frozenset(
            key.digest
            for index, key in enumerate(choice.asked)
            if index not in loaded and not self._is_near(key)
        )

    def _is_near(self, key: BlockKey) -> bool:
        """Returns whether host memory contains the block of every cache group."""
        return all(self._connector.has(group, key) for group in range(self._num_groups))


def always_loaded(count: int) -> set[int]:
    """Returns the indices of the blocks, out of `count`, that are always loaded."""
    return {0, *range(max(0, count - NUM_LAST), count)}


def important(masses: Sequence[float], share: float) -> set[int]:
    """Returns the indices of the blocks to load, a fraction `share` of all.

    The first and last blocks are always included, then the blocks with the most attention; ties go
    to the earlier block.
    """
    count = min(len(masses), max(FEWEST, math.ceil(share * len(masses) - 1e-9)))
    fixed = always_loaded(len(masses))
    order = sorted(range(len(masses)), key=lambda index: (index not in fixed, -masses[index]))
    return set(order[:count])


def query_about(prompt: PromptPart, request_id: str, num_stored_blocks: int) -> BlockQuery:
    """Returns the query for the scores of a prompt's stored blocks; its slots are set later."""
    num_tokens, size = len(prompt.token_ids), prompt.block_size
    first_of_last = max(size, num_tokens - (MAX_TOKENS - size))
    indices = [*range(min(size, num_tokens)), *range(first_of_last, num_tokens)]
    num_new = num_tokens - num_stored_blocks * size
    return BlockQuery(
        request_id,
        [prompt.token_ids[index] for index in indices],
        [prompt.first_position + index for index in indices],
        max(1, min(MAX_QUERIES, num_new)),
        group=0,
        slots=[],
    )
