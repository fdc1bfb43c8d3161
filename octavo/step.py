"""What crosses between the control plane and the execution plane: a StepPlan goes down, a
StepResult comes back.

Plain ids and numbers only: no tensor, no request object, no text. Both are msgpack-friendly
(msgspec structs of builtins).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from octavo.sampling_params import SamplingParams


class NewRow(msgspec.Struct):
    """A request the worker does not know (new, or returning after a preemption, swapped or not): it
    gets a permanent row.
    """

    request_id: str
    token_ids: list[int]
    """All tokens known so far (prompt, and what was generated before a preemption)."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """64-bit seed, always set: an unseeded request gets one at admission."""
    sample_index: int = 0
    """Which of the n samples this row is; part of the Philox counter."""
    end_token_ids: list[int] = []
    """Ids that end the request (end of sequence unless ignored, stop_token_ids): banned until
    `params.min_tokens` are generated.
    """


class ScheduledRow(msgspec.Struct):
    """One request's share of a step: `num_tokens` tokens from position `start` on are computed."""

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: list[list[int]]
    """Per cache group: block ids appended to the row's table since the last step; [] where no group
    gained any.
    """
    replaced_blocks: list[tuple[int, int, int]] = []
    """(group, index in the table, new block id): entries changed by copy-on-write."""
    samples: bool = False
    """The last of the tokens yields logits from which one token is drawn."""
    num_prompt_logprobs: int | None = None
    """Set while a prompt's own logprobs are wanted: how many top alternatives per position."""
    search_of: str = ""
    """The request whose beam search looks at the row's logprobs; "" for a row that is a request
    itself.
    """
    from_device: bool = False
    """Its one token is what the row draws in the step before, which has not come back: the device
    knows it, and nobody else yet.
    """

    @property
    def owner(self) -> str:
        """The request that it is computed for."""
        return self.search_of or self.request_id


class BlockMove(msgspec.Struct):
    """A whole block of one group, in every layer, copied before the step computes; a plan's moves
    are made in their order.

    "copy": on the device. "swap_out": `target` is a host block. "swap_in": `source` is one. "save"
    and "load" likewise, between the device and a connector's slot.
    """

    group: int
    source: int
    target: int
    kind: Literal["copy", "swap_out", "swap_in", "save", "load"] = "copy"


class BlockKey(NamedTuple):
    """The name of a full block, and what it is checked against."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class BlockName(NamedTuple):
    """One cache group's block of that digest, wherever it lies."""

    group: int
    digest: bytes


class BlockPin(NamedTuple):
    """Not to go before then, in seconds since 1970."""

    name: BlockName
    until: float


class SlotBlock(msgspec.Struct):
    """A block of one group in a connector's slot of host memory."""

    group: int
    slot: int
    key: BlockKey

    @property
    def name(self) -> BlockName:
        return BlockName(self.group, self.key.digest)


class ConnectorPlan(msgspec.Struct):
    """What a connector's worker half begins once the step's moves are made, and goes on with while
    steps compute.

    What goes behind the slots is done in the order of the fields, and of the plans.
    """

    forget_all: bool = False
    """All that was kept before this plan is to go."""
    fetch: list[SlotBlock] = []
    """To be brought into their slots."""
    keep: list[SlotBlock] = []
    """To be written behind their slots, which stay as they are until the report says so."""
    touch: list[BlockName] = []
    """Found and used, wherever that was: among the last to go."""
    pin: list[BlockPin] = []
    """Those that are not there yet: once they are. One that is past ends an earlier one."""
    forget: list[BlockName] = []
    """To go now."""


class ConnectorReport(msgspec.Struct):
    """What became of it since the last report."""

    fetched: list[BlockName] = []
    not_fetched: list[BlockName] = []
    """Gone or damaged: they are computed instead."""
    late: list[BlockName] = []
    """Not to be waited for; they come all the same."""
    kept: list[BlockName] = []
    not_kept: list[BlockName] = []
    found: list[BlockName] = []
    """That lie behind the slots, unknown until now."""
    gone: list[BlockName] = []
    """That no longer do."""
    pinned: list[BlockPin] = []
    """By other engines, or before this one."""
    stored: StoredBytes | None = None
    """None: as before."""


class StoredBytes(msgspec.Struct, frozen=True):
    """What lies behind a connector's slots, of this model and others, and what has ever gone wrong
    there.
    """

    num_bytes: int = 0
    pinned_bytes: int = 0
    foreign_pinned_bytes: int = 0
    """Of these, other models'."""
    num_damaged: int = 0
    """Damaged files met, and removed."""
    num_write_errors: int = 0


class ConnectorStats(msgspec.Struct):
    """Of a connector's scheduler half: gauges of this moment, then counts of blocks since the
    start.
    """

    num_slots: int = 0
    """For each cache group."""
    num_used_slots: int = 0
    """Of all groups."""
    num_stored_blocks: int = 0
    """Behind the slots, of this model."""
    stored: StoredBytes = StoredBytes()
    num_saved: int = 0
    num_loaded: int = 0
    num_fetched: int = 0
    num_not_fetched: int = 0
    num_kept: int = 0
    num_not_kept: int = 0


class StepPlan(msgspec.Struct):
    """All of one step. The worker moves blocks out, frees rows, adds rows, moves blocks in (from
    the first "swap_in" on), computes.
    """

    step: int
    freed_rows: list[str]
    new_rows: list[NewRow]
    moves: list[BlockMove]
    rows: list[ScheduledRow]
    connector: ConnectorPlan | None = None
    num_steps: int = 1
    """Decode steps, each row's drawn token being its next one. More than 1 only where every row
    computes one token and draws one.

    They end early where a request ends or fails, and where whoever listens says so.
    """

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class TokenLogprobs(msgspec.Struct):
    """Logprobs of one position: the token's own first, then the best `k`, each with its rank (1 =
    most likely).
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RowResult(msgspec.Struct):
    """What one row of the plan yielded: a token for each decode step; none where it did not
    sample."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of this chunk: the entry i belongs to the prompt token at `start + 1 + i`."""
    failure: str | None = None
    """Set where this row alone failed (NaN logits ...): the scheduler ends the request with it."""
    num_kept: int = 0
    """Number of the row's computed tokens whose K and V hold, counted from `start`; the request's
    computed count advances by it. 0 where the row failed.
    """


class StepResult(msgspec.Struct):
    """The rows in the plan's order, and how long the device was busy, moves included."""

    step: int
    rows: list[RowResult]
    busy_s: float = 0.0
    moved_s: float = 0.0
    """Of it, time spent moving blocks to the host and back."""
    connector: ConnectorReport | None = None
    kv_bytes: int | None = None
    """Memory that the requests' KV has on the device, where it is given on demand."""
    num_steps: int = 1
    """Decode steps computed, of those that the plan allows."""
