"""Parts of a step's messages about KV blocks: block keys, moves before the step computes, and the
work of a connector in the background.

Data classes of ids and digests. A StepPlan (`step.py`) contains the moves and the ConnectorPlan, a
StepResult the ConnectorReport.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext


class BlockMove(msgspec.Struct):
    """Copy of a whole block of one group, in all layers, before the step computes. Moves are made
    in the plan's order.

    "copy" stays on the device. For "swap_out" `target` is a host block, for "swap_in" `source` is
    one; "save" and "load" copy between the device and a connector's slot.
    """

    group: int
    source: int
    target: int
    kind: Literal["copy", "swap_out", "swap_in", "save", "load"] = "copy"


class BlockKey(NamedTuple):
    """Hash of a full block, and the tokens that verify a hit."""

    digest: bytes
    parent: bytes
    """Digest of the block before it, or of the chain's root."""
    token_ids: tuple[int, ...]
    extra: tuple[bytes, ...] = ()
    """Digests of the media whose tokens lie in the block."""


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
    """Address of the engine that it is fetched from; "" where it lies behind the own slots."""

    @property
    def name(self) -> BlockHashWithGroupId:
        return BlockHashWithGroupId(self.group, self.key.digest)


class StreamedBlock(msgspec.Struct):
    """A device block that a step fills; its layers are sent to other engines while the step writes
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
    """Query for the ratings, by an extension, of stored blocks of a request's prompt that are in
    slots or being fetched.
    """

    request_id: str
    token_ids: list[int]
    """Tokens of the prompt by which the blocks are rated."""
    positions: list[int]
    """Position of each of them in the prompt."""
    num_queries: int
    """Number of the last of these tokens that count."""
    group: int
    """Cache group of the blocks."""
    slots: list[int]
    """Slot of each block, in the order of the prompt."""


class BlockAnswer(msgspec.Struct):
    """Reply to a BlockQuery."""

    request_id: str
    ratings: list[float] = msgspec.field(name="masses")
    """Rating of each block; [] if they could not be rated."""


class ConnectorPlan(msgspec.Struct):
    """Work that a connector's worker half begins after the step's moves, and continues while steps
    compute.

    Work behind the slots is done in the order of the fields, and of the plans.
    """

    forget_all: bool = False
    """Whether everything kept before this plan is removed."""
    fetch: list[SlotBlock] = []
    """Blocks to be read into their slots."""
    keep: list[SlotBlock] = []
    """Blocks to be written behind their slots; a slot stays as it is until the report names its
    block.
    """
    touch: list[BlockHashWithGroupId] = []
    """Blocks found and used, wherever they were; they are evicted last."""
    pin: list[BlockPin] = []
    """Pins to be set; one for a block that is not stored yet holds from then on. A time that is
    past ends an earlier pin.
    """
    forget: list[BlockHashWithGroupId] = []
    """Blocks to be removed now."""
    cancel: list[BlockHashWithGroupId] = []
    """Fetches that no request waits for any more."""
    complete: list[BlockHashWithGroupId] = []
    """Blocks of prompts that were computed to be sent: those that are not kept by now never will
    be.
    """
    stream: list[StreamedBlock] = []
    """Blocks that the plan's own step fills; they are saved and kept later, like all others."""
    queries: list[BlockQuery] = msgspec.field(default_factory=list, name="probes")
    """Queries about stored blocks, answered in a later step's report."""


class ConnectorReport(msgspec.Struct):
    """Outcome of a connector's work since the last report."""

    fetched: list[BlockHashWithGroupId] = []
    not_fetched: list[BlockHashWithGroupId] = []
    """Blocks that were gone or damaged; their tokens are computed instead."""
    overdue: list[BlockHashWithGroupId] = msgspec.field(default_factory=list, name="late")
    """Blocks that take too long and are no longer waited for; they may still arrive."""
    kept: list[BlockHashWithGroupId] = []
    not_kept: list[BlockHashWithGroupId] = []
    found: list[BlockHashWithGroupId] = []
    """Blocks stored behind the slots that were unknown until now."""
    gone: list[BlockHashWithGroupId] = []
    """Blocks that are stored there no longer."""
    pinned: list[BlockPin] = []
    """Pins set by other engines, or before this one started."""
    stored: StoredBytes | None = None
    """Sums of what is stored; None if they have not changed."""
    answers: list[BlockAnswer] = msgspec.field(default_factory=list, name="probed")


class StoredBytes(msgspec.Struct, frozen=True):
    """Totals of what is stored behind a connector's slots, by this model and others, and of all
    failures there.
    """

    num_bytes: int = 0
    pinned_bytes: int = 0
    foreign_pinned_bytes: int = 0
    """Pinned bytes of other models."""
    num_damaged: int = 0
    """Number of damaged files met, and removed."""
    num_write_errors: int = 0
    num_expired_leases: int = 0
    """Number of leases of other engines that ended by the clock, their blocks not fetched or not
    read to the end."""
    link_bytes: int = 0
    """Bytes that came from other engines while the link, not the other engine, set the pace."""
    link_s: float = 0.0
    """Seconds in which these came."""


class ConnectorStats(msgspec.Struct):
    """Counters of a connector's scheduler half: current gauges, then numbers of blocks since the
    start.
    """

    num_slots: int = 0
    """Slots of each cache group."""
    num_used_slots: int = 0
    """Slots in use, of all groups."""
    num_stored_blocks: int = 0
    """Blocks of this model stored behind the slots."""
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
    """Everything that a block's bytes depend on, by name."""
    listen: str | None
    """Endpoints at which its blocks are fetched, one of each rank joined by commas; None
    where it computes none for others."""
    num_ranks: int
    """Ranks that share out its KV heads."""
    block_size: int
    """Tokens in a block."""
    original: OriginalContext = ONE_CONTEXT
    """Context of the model before its longer angles, which blocks are named by."""
    token_bytes: float = 0.0
    """Bytes of a token in the blocks of all cache groups."""
