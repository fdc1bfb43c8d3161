"""Block hashes: a chain of hashes over everything that the contents of a full KV block depend on.

A block's digest is the hash of its parent's digest, its token ids and the digests of the media
inside it. The parent of the first block is a root: the hash of the request's cache salt, adapter,
encoder input and first position. Roots and blocks use separate hash domains, so that a salt cannot
imitate a block. Source: vLLM's block hashes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from octavo.engine.protocol.block_events import BlockEvent, BlocksRemoved, BlocksStored
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED
from octavo.engine.protocol.kv_messages import BlockKey
from octavo.engine.protocol.step import MediaItem

DIGEST_BYTES = 16
TOKEN_BYTES = array("i").itemsize
ROOT_DOMAIN = b"octavo root"
BLOCK_DOMAIN = b"octavo block"


@dataclass(frozen=True, slots=True)
class BlockHashing:
    """Inputs of a request's block hashes other than its tokens."""

    salt: str = ""
    """Cache salt, which separates tenants: only requests with equal salts share blocks."""
    adapter_digest: bytes = b""
    """Digest of the adapter's content; empty for the base model."""
    input_digest: bytes = b""
    """Digest of the encoder input, which the decoder's tokens attend to; empty without an
    encoder.
    """
    media: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Digests of the media in each block, by block index (`get_block_media`)."""
    num_hashed_tokens: int = UNBOUNDED
    """Number of leading tokens whose blocks are hashed; K and V of later tokens are not shared."""

    first_position: int = 0
    """Position of the first token. Equal tokens at other positions have other keys."""

    def root(self) -> bytes:
        """Returns the parent of the first block."""
        salt = self.salt.encode()
        parts = [struct.pack("<Q", len(salt)), salt, self.adapter_digest]
        if self.input_digest:
            parts.append(b"encoder" + self.input_digest)
        if self.first_position:
            parts.append(b"position" + struct.pack("<Q", self.first_position))
        return blake2b(b"".join(parts), digest_size=DIGEST_BYTES, person=ROOT_DOMAIN).digest()

    def block(self, parent: bytes, token_ids: tuple[int, ...], index: int) -> BlockKey:
        """Returns the key of the block at `index` of a chain."""
        extra = self.media.get(index, ())
        hashed = blake2b(parent, digest_size=DIGEST_BYTES, person=BLOCK_DOMAIN)
        hashed.update(array("i", token_ids).tobytes())
        for digest in extra:
            hashed.update(struct.pack("<Q", len(digest)) + digest)
        return BlockKey(hashed.digest(), parent, token_ids, extra)

    def digests(self, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """Returns the digests of all full blocks of a text without media. Same as repeated calls of
        `block`, but faster.
        """
        num_bytes = block_size * TOKEN_BYTES
        data = array("i", token_ids).tobytes()
        parent, digests = self.root(), []
        for end in range(num_bytes, len(data) + 1, num_bytes):
            hashed = parent + data[end - num_bytes : end]
            parent = blake2b(hashed, digest_size=DIGEST_BYTES, person=BLOCK_DOMAIN).digest()
            digests.append(parent)
        return digests


def get_block_media(media: Iterable[MediaItem], block_size: int) -> dict[int, tuple[bytes, ...]]:
    """Returns the digests of the media in each block, by block index. A digest includes the offset
    of the medium's first token in the block, since equal tokens may be different parts of an image.
    """
    by_block: dict[int, tuple[bytes, ...]] = {}
    for item in media:
        for index in range(item.start // block_size, -(-item.end // block_size)):
            offset = struct.pack("<q", item.start - index * block_size)
            by_block[index] = (*by_block.get(index, ()), item.digest + offset)
    return by_block


class BlockChain:
    """Keys of one request's full blocks, as far as they have been computed."""

    __slots__ = ("hashing", "keys", "last_checkpoint", "num_hashed_tokens", "num_registered")

    def __init__(self, hashing: BlockHashing) -> None:
        self.hashing = hashing
        self.keys: list[BlockKey] = []
        self.num_hashed_tokens = hashing.num_hashed_tokens
        """Number of leading tokens whose blocks are hashed; lower than the limit of `hashing` if
        the request skips earlier blocks.
        """
        self.num_registered = 0
        """Number of first blocks that are in the prefix cache, or whose key another block has
        there.
        """
        self.last_checkpoint = 0
        """End of the last full block of the tokens known at the start, without the last token. The
        recurrent state at this position is kept.
        """

    def fork(self, num_blocks: int) -> BlockChain:
        """Returns the chain of a row that shares the first `num_blocks` blocks."""
        child = BlockChain(self.hashing)
        child.keys = self.keys[:num_blocks]
        child.num_registered = min(num_blocks, self.num_registered)
        child.last_checkpoint = self.last_checkpoint
        child.num_hashed_tokens = self.num_hashed_tokens
        return child

    def extend(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> list[BlockKey]:
        """Returns the keys of the first `num_blocks` blocks; `token_ids` start with the request's
        first token.
        """
        keys = self.keys
        parent = keys[-1].digest if keys else self.hashing.root()
        for index in range(len(keys), num_blocks):
            block = tuple(token_ids[index * block_size : (index + 1) * block_size])
            keys.append(self.hashing.block(parent, block, index))
            parent = keys[-1].digest
        return keys[:num_blocks]

    def registered(self) -> Sequence[BlockKey]:
        """Returns the keys of the blocks that are in the prefix cache."""
        return self.keys[: self.num_registered]

    def register_until(self, num_blocks: int) -> Iterator[tuple[int, BlockKey]]:
        """Yields (index, key) of the next blocks to add to the prefix cache, and counts them as
        added.
        """
        first, self.num_registered = self.num_registered, max(self.num_registered, num_blocks)
        for index in range(first, self.num_registered):
            yield index, self.keys[index]


def note_events(cached: CachedHashes, events: Iterable[BlockEvent]) -> None:
    """Updates a set of cached hashes by an engine's block events."""
    for event in events:
        if isinstance(event, BlocksStored):
            cached.add(event.digests)
        elif isinstance(event, BlocksRemoved):
            cached.remove(event.digests)
        else:
            cached.clear()
