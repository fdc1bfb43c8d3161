"""Which blocks leave while a step fills them: full ones of that step, by their names."""

from __future__ import annotations

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.kv.kv_connector import KVConnector, Tiers
from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.kv_messages import StreamedBlock

BLOCK = 4
TOKENS = list(range(5, 23))


def manager(*, streams: bool = True, num_groups: int = 1) -> BlockManager:
    tiers = Tiers([100] * num_groups, 16, keeps=True, streams=streams)
    return BlockManager(
        [BlockGroup(16)] * num_groups,
        block_size=BLOCK,
        enable_prefix_caching=True,
        connector=KVConnector(tiers),
    )


def streamed(blocks: BlockManager, start: int, end: int) -> list[StreamedBlock]:
    """Returns what a step's plan streams that computes these tokens of a request."""
    blocks.begin_step()
    blocks.hashes.stream("a", TOKENS, start, end)
    plan = blocks.connector.end_step()
    return [] if plan is None else plan.stream


def test_blocks_that_a_step_fills_are_named_beforehand() -> None:
    """One that was begun before is among them, one that stays open is not."""
    blocks = manager(num_groups=2)
    blocks.start("a", TOKENS, reserve=0)
    found = streamed(blocks, 6, 18)
    digests = BlockHashing().digests(TOKENS, BLOCK)
    assert [(one.group, one.key.digest) for one in found] == [
        (group, digest) for group in range(2) for digest in digests[1:4]
    ]
    tables = blocks.block_ids("a")
    assert [one.block_id for one in found] == tables[0][1:4] + tables[1][1:4]
    assert {one.request_id for one in found} == {"a"}


def test_the_names_are_those_that_the_blocks_get() -> None:
    blocks = manager()
    blocks.start("a", TOKENS, reserve=0)
    found = streamed(blocks, 0, len(TOKENS))
    blocks.record("a", TOKENS, len(TOKENS))
    (pool,) = blocks.pools
    assert [pool.cache.find(one.key) for one in found] == [one.block_id for one in found]


def test_without_a_stream_nothing_is_planned() -> None:
    blocks = manager(streams=False)
    blocks.start("a", TOKENS, reserve=0)
    assert streamed(blocks, 0, len(TOKENS)) == []


def test_tokens_without_names_stay() -> None:
    blocks = manager()
    blocks.start("a", TOKENS, hashing=BlockHashing(num_hashed_tokens=9), reserve=0)
    assert [one.key.token_ids for one in streamed(blocks, 0, 18)] == [(5, 6, 7, 8), (9, 10, 11, 12)]
