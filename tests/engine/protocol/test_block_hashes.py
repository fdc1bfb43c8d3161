"""Block names: equal exactly where blocks hold the same, and out of any sender's reach."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_pool import BlockGroup, PrefixCache
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_messages import BlockKey

BLOCK = 4


def keys(tokens: list[int], hashing: BlockHashing | None = None) -> list[BlockKey]:
    return BlockChain(hashing or BlockHashing()).extend(tokens, len(tokens) // BLOCK, BLOCK)


def digests(tokens: list[int], hashing: BlockHashing | None = None) -> list[bytes]:
    return [key.digest for key in keys(tokens, hashing)]


def test_a_digest_depends_on_the_tokens_before_its_block():
    plain = digests([1, 2, 3, 4, 5, 6, 7, 8])
    assert plain[0] == digests([1, 2, 3, 4])[0]
    assert plain[1] != digests([9, 2, 3, 4, 5, 6, 7, 8])[1]


@pytest.mark.parametrize(
    "hashing",
    [
        BlockHashing("tenant"),
        BlockHashing(adapter_digest=b"adapter"),
        BlockHashing("tenant", b"adapter"),
        BlockHashing("tenantadapter"),
        BlockHashing(media={0: (b"cat",)}),
        BlockHashing(media={0: (b"dog",)}),
        BlockHashing(media={0: (b"cat", b"dog")}),
        BlockHashing(media={0: (b"catdog",)}),
    ],
)
def test_salt_adapter_and_media_each_make_other_names(hashing):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    others = [
        BlockHashing(),
        BlockHashing("tenant"),
        BlockHashing(adapter_digest=b"adapter"),
        BlockHashing("tenant", b"adapter"),
        BlockHashing(media={0: (b"cat",)}),
        BlockHashing(media={0: (b"cat", b"dog")}),
    ]
    for other in others:
        assert set(digests(tokens, hashing)).isdisjoint(digests(tokens, other)) or hashing == other


def test_media_change_their_own_block_and_those_behind_it():
    tokens = list(range(12))
    plain, image = keys(tokens), keys(tokens, BlockHashing(media={1: (b"cat",)}))
    assert image[0] == plain[0]
    assert [key.extra for key in image] == [(), (b"cat",), ()]
    assert image[1].digest != plain[1].digest and image[2].digest != plain[2].digest


def test_blocks_with_the_same_tokens_and_other_media_are_not_taken_for_each_other():
    cache = PrefixCache()
    found = {
        media: keys([7, 7, 7, 7], BlockHashing(media={0: media}))[0]
        for media in ((b"cat",), (b"dog",), ())
    }
    for block_id, key in enumerate(found.values()):
        cache.add(block_id, key)
    assert [cache.find(key) for key in found.values()] == [0, 1, 2]
    root = BlockHashing().root()
    assert cache.find_partial(root, (7, 7)).key == found[()], "only tokens say what it holds"
    cache.remove(2)
    assert cache.find_partial(root, (7, 7)) is None
    cache.remove(0)
    assert [cache.find(key) for key in found.values()] == [None, 1, None]


def test_a_salt_cannot_be_crafted_into_the_name_of_another_prompts_block():
    """A salt is a text that its sender chooses. Were a root hashed as a block is, the salt below
    would be the bytes of the second block, and the sender would get the victim's third block for a
    prompt that begins with its tokens.
    """
    # The first digest of this prompt is valid UTF-8 where a root hashes the salt's bytes alone.
    first, second, third = [16935, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12]
    root = blake2b(b"", digest_size=16).digest()
    parent = blake2b(root + struct.pack("4i", *first), digest_size=16).digest()
    crafted = (parent + struct.pack("4i", *second)).decode()
    blocks = BlockManager([BlockGroup(16)], block_size=BLOCK, enable_prefix_caching=True)
    victim = [*first, *second, *third]
    blocks.start("victim", victim, reserve=0)
    blocks.record("victim", victim, len(victim))
    started = blocks.start("other", [*third, 13], hashing=BlockHashing(crafted), reserve=0)
    assert started.num_cached_tokens == 0


def test_no_salt_and_no_adapter_is_hashed_as_a_block_is():
    tokens = [1, 2, 3, 4]
    block = keys(tokens)[0]
    hashed = block.parent + struct.pack("4i", *tokens)
    for hashing in (
        BlockHashing(hashed.decode("latin-1")),
        BlockHashing(adapter_digest=hashed),
        BlockHashing(adapter_digest=hashed[8:]),
    ):
        assert hashing.root() != block.digest
