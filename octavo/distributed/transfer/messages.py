"""Messages between engines that exchange KV blocks, msgpack over ZeroMQ.

Frontends (DEALER to ROUTER): Hello is answered by Welcome. A Prefill is answered by Accepted or
Declined, and an accepted one by Ended, unless it is Withdrawn first.

Workers (DEALER to ROUTER): the receiver sends WantBlocks, DropBlocks, HoldBlocks and TookBlocks.
The sender replies with BlockPart or LayerPart (with the bytes as a second frame), BlockAt,
NoBlocks, StillThere or NotYours. A block is requested by its hash before it is computed, and sent
afterwards. Every request has an epoch that replies repeat; replies with an older epoch are ignored.
"""

from __future__ import annotations

import msgspec

from octavo.engine.protocol.kv_messages import BlockHashWithGroupId, BlockKey

UNREADABLE = (ValueError, RecursionError)
"""Exceptions with which msgspec refuses bytes from outside: its own errors are ValueErrors, as is
that of text which is no UTF-8.
"""

PART_BYTES = 512 << 10
"""Most bytes of a block in one message: ZeroMQ sends large messages at a fraction of the rate."""


class Hello(msgspec.Struct, tag=True):
    """First message of an engine that requests remote prefill."""

    facts: dict[str, str]
    """Everything that a block's bytes depend on, by name."""


class Welcome(msgspec.Struct, tag=True):
    """Reply to a Hello."""

    facts: dict[str, str]
    endpoint: str
    """Endpoints at which the blocks are fetched, one of each rank (`address.join_endpoints`)."""


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
    """Number of this ask, which counts up."""
    heads: list[tuple[int, int]]
    """KV heads that are wanted of the blocks of each cache group, from one up to another, counted
    over the whole model."""


class DropBlocks(msgspec.Struct, tag=True):
    """Blocks that are no longer needed."""

    names: list[BlockHashWithGroupId]


class HoldBlocks(msgspec.Struct, tag=True):
    """Renews the leases of blocks of a BlockAt that are still to be read."""

    names: list[BlockHashWithGroupId]
    epoch: int
    """Epoch of the ask that they answer."""


class TookBlocks(msgspec.Struct, tag=True):
    """Ends the leases of blocks of a BlockAt that have been read or will not be."""

    names: list[BlockHashWithGroupId]
    epoch: int
    """Epoch of the ask that they answer."""


class BlockPart(msgspec.Struct, tag=True):
    """Some bytes of a block, in the message's second frame."""

    name: BlockHashWithGroupId
    num_bytes: int
    """Size of the whole block."""
    offset: int
    checksum: int
    """XXH3 of these bytes, with 64 bits."""
    epoch: int
    """Epoch of the ask that it answers."""
    more: bool = False
    """Whether another part for the same peer was waiting when this one was sent: the time until
    that one comes is the link's."""


class LayerPart(msgspec.Struct, tag=True):
    """One layer of some blocks of one cache group, in the message's second frame: each block's
    bytes, one block after the other. Sent while later layers are still computed.
    """

    names: list[BlockHashWithGroupId]
    offset: int
    """Offset of the layer's bytes in each block."""
    checksum: int
    """XXH3 of all these bytes, with 64 bits."""
    epoch: int
    """Epoch of the ask that it answers."""
    more: bool = False
    """Whether another part for the same peer was waiting, as in a BlockPart."""


class BlockAt(msgspec.Struct, tag=True):
    """Address of a block that the receiver may read from the sender's memory."""

    name: BlockHashWithGroupId
    session: str
    """Name of the sender's mover."""
    address: int
    num_bytes: int
    checksum: int
    """XXH3 of the whole block, with 64 bits: what lies there later has another."""
    epoch: int
    """Epoch of the ask that it answers."""


class NoBlocks(msgspec.Struct, tag=True):
    """Blocks that will not be sent."""

    names: list[BlockHashWithGroupId]
    epoch: int
    """Epoch of the ask that it answers."""


class StillThere(msgspec.Struct, tag=True):
    """Keep-alive while the receiver waits for blocks."""


class NotYours(msgspec.Struct, tag=True):
    """Reply to a WantBlocks of an engine whose blocks have a different layout."""

    reason: str


FrontRequestMessage = Hello | Prefill | Withdrawn
FrontReplyMessage = Welcome | Accepted | Declined | Ended
WorkerRequestMessage = WantBlocks | DropBlocks | HoldBlocks | TookBlocks
WorkerReplyMessage = BlockPart | LayerPart | BlockAt | NoBlocks | StillThere | NotYours
