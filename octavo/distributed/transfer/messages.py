"""Messages between engines that exchange KV blocks, msgpack over ZeroMQ.

Frontends (DEALER to ROUTER): Hello is answered by Welcome. A Prefill is answered by Accepted or
Declined. An accepted one is later answered by Ended, unless it is Withdrawn first.

Workers (DEALER to ROUTER): the receiver sends WantBlocks, DropBlocks, HoldBlocks and ReleaseBlocks.
The sender replies with BlockPart or LayerPart (with the bytes as a second frame), BlockAt,
NoBlocks, KeepAlive or NotYours. A block is requested by its hash before it is computed, and sent
afterwards. Every request has an epoch that replies repeat; replies with an older epoch are ignored.
"""

from __future__ import annotations

import msgspec

from octavo.engine.protocol.kv_messages import BlockHashWithGroupId, BlockKey

UNREADABLE = (ValueError, RecursionError)
"""Exceptions that msgspec raises for invalid input: its own errors and invalid UTF-8 are
ValueErrors.
"""

PART_BYTES = 512 << 10
"""Maximum number of bytes of a block in one message: ZeroMQ sends large messages at a fraction of
the rate.
"""


class Hello(msgspec.Struct, tag=True):
    """First message of an engine that requests remote prefill."""

    facts: dict[str, str]
    """Everything that determines a block's bytes, by name."""


class Welcome(msgspec.Struct, tag=True):
    """Reply to a Hello."""

    facts: dict[str, str]
    endpoint: str
    """Endpoints from which the blocks are fetched, one for each rank (`address.join_endpoints`)."""


class Prefill(msgspec.Struct, tag=True):
    """Request to compute a prompt, so that its blocks can be fetched."""

    request_id: str
    token_ids: list[int]
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""


class Withdrawn(msgspec.Struct, tag=True):
    """A prompt is no longer needed."""

    request_id: str


class Accepted(msgspec.Struct, tag=True):
    """Reply to a Prefill that was queued."""

    request_id: str


class Declined(msgspec.Struct, tag=True):
    """Reply to a Prefill that was rejected."""

    request_id: str
    reason: str


class Ended(msgspec.Struct, tag=True):
    """An accepted Prefill has finished or failed."""

    request_id: str
    num_cached_tokens: int
    error: str | None = None


class WantedBlock(msgspec.Struct, array_like=True):
    """A requested block."""

    group: int
    key: BlockKey

    @property
    def name(self) -> BlockHashWithGroupId:
        return BlockHashWithGroupId(self.group, self.key.digest)


class WantBlocks(msgspec.Struct, tag=True):
    """Request for blocks, in the order in which they are needed."""

    fingerprint: bytes
    blocks: list[WantedBlock]
    wait_s: float
    """Seconds for which the sender waits for blocks that are not computed yet."""
    epoch: int
    """Epoch of this request; a counter."""
    heads: list[tuple[int, int]]
    """Requested KV heads of each cache group as half-open ranges, with indices in the complete
    model.
    """


class DropBlocks(msgspec.Struct, tag=True):
    """Blocks that are no longer needed."""

    names: list[BlockHashWithGroupId]


class HoldBlocks(msgspec.Struct, tag=True):
    """Renews the leases of blocks that a BlockAt offered and that are not yet read."""

    names: list[BlockHashWithGroupId]
    epoch: int
    """Epoch of the request that the BlockAt answered."""


class ReleaseBlocks(msgspec.Struct, tag="TookBlocks"):
    """Ends the leases of blocks of a BlockAt that have been read or will not be."""

    names: list[BlockHashWithGroupId]
    epoch: int
    """Epoch of the request that the BlockAt answered."""


class BlockPart(msgspec.Struct, tag=True):
    """Some bytes of a block, in the message's second frame."""

    name: BlockHashWithGroupId
    num_bytes: int
    """Size of the complete block."""
    offset: int
    checksum: int
    """64-bit XXH3 of these bytes."""
    epoch: int
    """Epoch of the answered request."""
    more: bool = False
    """Whether another part for the same peer was already queued, so that the time until it arrives
    is transfer time.
    """


class LayerPart(msgspec.Struct, tag=True):
    """One layer of some blocks of one cache group, in the message's second frame, block after
    block. Sent while later layers are still computed.
    """

    names: list[BlockHashWithGroupId]
    offset: int
    """Offset of the layer's bytes in each block."""
    checksum: int
    """64-bit XXH3 of all these bytes."""
    epoch: int
    """Epoch of the answered request."""
    more: bool = False
    """Whether another part for the same peer was already queued, as in BlockPart."""


class BlockAt(msgspec.Struct, tag=True):
    """Address of a block that the receiver may read from the sender's memory."""

    name: BlockHashWithGroupId
    session: str
    """Name of the sender's mover."""
    address: int
    num_bytes: int
    checksum: int
    """64-bit XXH3 of the complete block; detects if the memory is reused for another block."""
    epoch: int
    """Epoch of the answered request."""


class NoBlocks(msgspec.Struct, tag=True):
    """Blocks that will not be sent."""

    names: list[BlockHashWithGroupId]
    epoch: int
    """Epoch of the answered request."""


class KeepAlive(msgspec.Struct, tag="StillThere"):
    """Keep-alive while the receiver waits for blocks."""


class NotYours(msgspec.Struct, tag=True):
    """Reply to a WantBlocks of an engine whose blocks have a different layout."""

    reason: str


FrontRequestMessage = Hello | Prefill | Withdrawn
FrontReplyMessage = Welcome | Accepted | Declined | Ended
WorkerRequestMessage = WantBlocks | DropBlocks | HoldBlocks | ReleaseBlocks
WorkerReplyMessage = BlockPart | LayerPart | BlockAt | NoBlocks | KeepAlive | NotYours
