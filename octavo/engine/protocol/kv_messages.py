"""The part of a step's messages that concerns KV blocks: block keys, moves before the step
computes, and the background work of a connector. Data classes with ids and digests. A StepPlan
(`step.py`) contains the moves and the ConnectorPlan, a StepResult the ConnectorReport.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext


class BlockMove(msgspec.Struct):
    """Copy of a block of one group, in all layers, before the step computes. Moves are made in the
    plan's order.

    "copy": both blocks are on the device. "swap_out": `target` is a host block. "swap_in": `source`
    is a host block. "save" and "load": from the device to a connector's slot, and back.
    """

    group: int
    source: int
    target: int
    kind: Literal["copy", "swap_out", "swap_in", "save", "load"] = "copy"


class BlockKey(NamedTuple):
    """Hash of a full block, and the contents that verify a hit."""

    digest: bytes
    parent: bytes
    """Digest of the previous block, or the root of the chain."""
    token_ids: tuple[int, ...]
    extra: tuple[bytes, ...] = ()
    """Digests of the media whose tokens are in the block."""


class BlockHashWithGroupId(NamedTuple):
    """Digest of one block of one cache group, wherever it is stored."""

    group: int
    digest: bytes


class BlockPin(NamedTuple):
    """A block to keep until a time, in seconds since 1970."""

    name: BlockHashWithGroupId
    until: float


class SlotBlock(msgspec.Struct):
    """A block of one group in a connector's slot of host memory."""

    group: int
    slot: int
    key: BlockKey
    source: str = ""
    """Address of the engine from which the block is fetched; "" if it is in the own store."""

    @property
    def name(self) -> BlockHashWithGroupId:
        return BlockHashWithGroupId(self.group, self.key.digest)


class StreamedBlock(msgspec.Struct):
    """A device block that a step fills. Its layers are sent to other engines while the step writes
    them.
    """

    request_id: str
    group: int
    block_id: int
    key: BlockKey

    @property
    def name(self) -> BlockHashWithGroupId:
        return BlockHashWithGroupId(self.group, self.key.digest)


class BlockQuery(msgspec.Struct):
    """Query for an extension's ratings of stored blocks of a prompt; the blocks are in slots or
    being fetched.
    """

    request_id: str
    token_ids: list[int]
    """Prompt tokens from which the blocks are rated."""
    positions: list[int]
    """Position of each of these tokens in the prompt."""
    num_queries: int
    """Number of tokens at the end of `token_ids` whose queries rate the blocks."""
    group: int
    """Cache group of the blocks."""
    slots: list[int]
    """Slot of each block, in prompt order."""


class BlockAnswer(msgspec.Struct):
    """Reply to a BlockQuery."""

    request_id: str
    ratings: list[float] = msgspec.field(name="masses")
    """Rating of each block; [] if they could not be rated."""


class ConnectorPlan(msgspec.Struct):
    """Work that a connector's worker half begins after the step's moves, and continues while steps
    compute.

    Work behind the slots is done plan by plan, within a plan in the order of the fields.
    """

    forget_all: bool = False
    """Whether everything stored before this plan is removed."""
    fetch: list[SlotBlock] = []
    """Blocks to be read into their slots."""
    keep: list[SlotBlock] = []
    """Blocks to be written behind their slots. A slot must not change until the report names its
    block.
    """
    touch: list[BlockHashWithGroupId] = []
    """Blocks that a request used, wherever they were found; they are evicted last."""
    pin: list[BlockPin] = []
    """Pins to set. A pin of a block that is not stored yet takes effect when it is stored. A pin
    with a past expiry time removes an earlier pin.
    """
    forget: list[BlockHashWithGroupId] = []
    """Blocks to be removed."""
    cancel: list[BlockHashWithGroupId] = []
    """Fetches that no request waits for any more."""
    complete: list[BlockHashWithGroupId] = []
    """Blocks of finished prompts that other engines wait for. Blocks among them that are not stored
    by now never will be.
    """
    stream: list[StreamedBlock] = []
    """Blocks that this plan's step fills; they are also saved and stored later, as all others."""
    queries: list[BlockQuery] = msgspec.field(default_factory=list, name="probes")
    """Queries for ratings of stored blocks, answered in the report of a later step."""


class ConnectorReport(msgspec.Struct):
    """Outcome of a connector's work since the last report."""

    fetched: list[BlockHashWithGroupId] = []
    not_fetched: list[BlockHashWithGroupId] = []
    """Blocks that were missing or damaged; their tokens are recomputed."""
    overdue: list[BlockHashWithGroupId] = msgspec.field(default_factory=list, name="late")
    """Blocks that take too long to arrive, so that requests do not wait for them any more. They may
    still arrive.
    """
    kept: list[BlockHashWithGroupId] = []
    not_kept: list[BlockHashWithGroupId] = []
    found: list[BlockHashWithGroupId] = []
    """Blocks newly discovered behind the slots."""
    gone: list[BlockHashWithGroupId] = []
    """Blocks that are no longer stored there."""
    pinned: list[BlockPin] = []
    """Pins set by other engines, or before this engine started."""
    stored: StoredBytes | None = None
    """Totals of the stored data; None if unchanged."""
    answers: list[BlockAnswer] = msgspec.field(default_factory=list, name="probed")


class StoredBytes(msgspec.Struct, frozen=True):
    """Totals of the data stored behind a connector's slots, by this model and others, and of all
    failures there.
    """

    num_bytes: int = 0
    pinned_bytes: int = 0
    foreign_pinned_bytes: int = 0
    """Pinned bytes of other models."""
    num_damaged: int = 0
    """Number of damaged files that were found and removed."""
    num_write_errors: int = 0
    num_expired_leases: int = 0
    """Number of leases to other engines that expired: their blocks were not fetched, or not read
    completely.
    """
    link_bytes: int = 0
    """Bytes received from other engines while the link, not the sender, was the bottleneck."""
    link_s: float = 0.0
    """Seconds in which `link_bytes` were received."""


class ConnectorStats(msgspec.Struct):
    """Counters of a connector's scheduler half: current gauges, then counts of blocks since the
    start.
    """

    num_slots: int = 0
    """Number of slots of each cache group."""
    num_used_slots: int = 0
    """Number of slots in use, over all groups."""
    num_stored_blocks: int = 0
    """Number of blocks of this model stored behind the slots."""
    stored: StoredBytes = StoredBytes()
    num_saved: int = 0
    num_loaded: int = 0
    num_fetched: int = 0
    num_fetched_bytes: int = 0
    """Bytes of the blocks fetched."""
    num_not_fetched: int = 0
    num_kept: int = 0
    num_not_kept: int = 0


class TransferFacts(msgspec.Struct, frozen=True):
    """Properties of an engine that exchanges blocks."""

    facts: dict[str, str]
    """Everything that the bytes of a block depend on, by name."""
    listen: str | None
    """Comma-separated endpoints, one of each rank, at which its blocks are fetched; None if it
    computes no blocks for other engines.
    """
    num_ranks: int
    """Number of ranks over which the KV heads are distributed."""
    block_size: int
    """Number of tokens in a block."""
    original: OriginalContext = ONE_CONTEXT
    """Original context of a LongRoPE model; part of block hashes."""
    token_bytes: float = 0.0
    """Bytes of one token in the blocks of all cache groups."""
