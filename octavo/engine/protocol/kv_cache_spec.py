"""How the KV blocks of a cache group live: how many a request needs, how many at most, which of
them are released while it runs, and which a prefix hit needs.

The one owner of these rules: the KV budget (`worker/memory.py`) and the block manager (`engine/kv`)
both ask them here. Knows neither requests nor block ids nor bytes; every count is of blocks of
`block_size` tokens.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec

UNBOUNDED = 1 << 48
"""More tokens, and more blocks, than there ever are."""


class KvDemand(NamedTuple):
    """The most that an engine asks of its KV cache."""

    max_model_len: int
    """Tokens of the longest request."""
    max_num_seqs: int
    """Requests that run at once."""
    max_step_tokens: int
    """Tokens that one step computes, of all requests together."""
    max_encoder_len: int = 0
    """Rows of the longest encoder's input."""


class Extent(NamedTuple):
    """The tokens for which a request's tables are made when it starts or returns."""

    num_tokens: int
    """All tokens of the request known so far."""
    step_end: int
    """The end of the tokens that its next step may compute."""
    num_fixed_tokens: int = 0
    """Rows of its fixed groups: the length of the encoder's input."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Counts the blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class KVCacheSpec(msgspec.Struct, frozen=True):
    """The rules of one cache group. What the kinds share stands here, as for `growing`."""

    is_named: ClassVar[bool] = True
    """Whether full blocks get names, under which a prefix hit finds them."""
    keeps_every_token: ClassVar[bool] = False
    """Whether a token reads the blocks of all tokens before it, found or computed."""
    allows_hits: ClassVar[bool] = True
    """Whether a request may begin behind tokens that another has computed."""
    allows_forks: ClassVar[bool] = True
    """Whether a row may share another one's blocks."""
    grows: ClassVar[bool] = True
    """Whether a request's table gets longer with its tokens."""
    outlives_step: ClassVar[bool] = True
    """Whether the blocks that a step has written are read by later steps."""
    keeps_parts: ClassVar[bool] = True
    """Whether the first tokens of a step, or of a block, can be kept without the others."""
    is_rewritten: ClassVar[bool] = False
    """Whether a request has one block, which stands for all tokens so far and which every step
    writes again; under a name it stands for the tokens up to the end of the block of that name.
    """

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens from one named block to the next, where not every block gets a name; else 0."""
        return 0

    @property
    def window_tokens(self) -> int | None:
        """Keys that a query sees, itself included; None: not bounded by a window."""
        return None

    def blocks_at_start(self, extent: Extent, block_size: int) -> int:
        """Counts the blocks of a request's table when it starts or returns, holes included."""
        return blocks_for(extent.num_tokens, block_size)

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        """Counts the blocks that a request of `num_tokens` tokens holds between two steps."""
        return blocks_for(num_tokens, block_size)

    def blocks_written(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        """Counts the first blocks of a table of `num_blocks` that the first `num_tokens` tokens
        have written.
        """
        return blocks_for(num_tokens, block_size)

    def blocks_final(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        """Counts the first blocks of a table of `num_blocks` that no later token writes."""
        return num_tokens // block_size

    def first_read(self, position: int, block_size: int) -> int:
        """Returns the index of the first block that a query at `position` reads, of those that
        earlier steps have written.
        """
        return 0

    def first_found(self, num_blocks: int, block_size: int) -> int:
        """Returns the index of the first block that must be found, of the names of `num_blocks`
        blocks, for a request to go on behind them.
        """
        return self.first_read(num_blocks * block_size, block_size)

    def num_released(
        self, num_tokens: int, num_blocks: int, block_size: int, *, in_flight: bool
    ) -> int:
        """Counts the first blocks of a table of `num_blocks` that nothing reads any more, once
        `num_tokens` tokens are computed.

        `in_flight`: another step of the request, from that token on, is being computed.
        """
        return min(self.first_read(num_tokens, block_size), num_blocks)

    def capacity_tokens(
        self, num_blocks: int, num_rows: int, max_step_tokens: int, block_size: int
    ) -> int:
        """Counts the tokens that `num_blocks` blocks hold of a request of `num_rows` rows, what the
        rows share counted once; UNBOUNDED where the blocks bound no length.
        """
        return num_blocks * block_size

    def least_blocks(self, demand: KvDemand, block_size: int) -> int:
        """Counts the blocks without which the longest request cannot run."""
        return blocks_for(demand.max_model_len, block_size)

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        """Counts the blocks beyond which no request would ever wait for this group."""
        return UNBOUNDED


class FullAttentionSpec(KVCacheSpec, frozen=True, tag="growing"):
    """Every block stays until the request ends: full attention, latents."""

    keeps_every_token: ClassVar[bool] = True


GROWING = FullAttentionSpec()
"""The spec of most groups."""


class SlidingWindowSpec(KVCacheSpec, frozen=True, tag="window"):
    """Only the blocks that a query still sees stay."""

    window: int
    """Keys that a query sees, itself included."""

    @property
    def window_tokens(self) -> int | None:
        """Keys that a query sees, itself included."""
        return self.window

    def blocks_at_start(self, extent: Extent, block_size: int) -> int:
        return blocks_for(min(extent.num_tokens, extent.step_end), block_size)

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        return blocks_for(min(num_tokens, self.window + block_size), block_size)

    def first_read(self, position: int, block_size: int) -> int:
        return max(0, position - self.window + 1) // block_size

    def capacity_tokens(
        self, num_blocks: int, num_rows: int, max_step_tokens: int, block_size: int
    ) -> int:
        others = (num_rows - 1) * (blocks_for(self.window, block_size) + 1)
        if num_blocks > others + blocks_for(self.window + max_step_tokens, block_size):
            return UNBOUNDED
        return num_blocks * block_size

    def least_blocks(self, demand: KvDemand, block_size: int) -> int:
        # One more: window and step need not begin at a block's edge.
        own = blocks_for(self.window + demand.max_step_tokens, block_size) + 1
        return min(blocks_for(demand.max_model_len, block_size), own)

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        each = blocks_for(self.window, block_size) + 3  # two edges, and one block in reserve
        step = blocks_for(demand.max_step_tokens, block_size) + 1
        return demand.max_num_seqs * each + step


class CrossAttentionSpec(KVCacheSpec, frozen=True, tag="fixed"):
    """The blocks of the encoder's input stay from the start to the end: cross attention.

    The input is no part of the tokens that name blocks, so nothing is found by a prefix hit. The
    rows of one request share its blocks, since no decoder step writes them.
    """

    is_named: ClassVar[bool] = False
    allows_hits: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    max_tokens: int
    """Length of the longest input."""

    def blocks_at_start(self, extent: Extent, block_size: int) -> int:
        return blocks_for(extent.num_fixed_tokens, block_size)

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        return blocks_for(self.max_tokens, block_size)

    def blocks_written(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        return num_blocks

    def blocks_final(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        return num_blocks

    def capacity_tokens(
        self, num_blocks: int, num_rows: int, max_step_tokens: int, block_size: int
    ) -> int:
        return UNBOUNDED if num_blocks >= blocks_for(self.max_tokens, block_size) else 0

    def least_blocks(self, demand: KvDemand, block_size: int) -> int:
        return blocks_for(self.max_tokens, block_size)

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        return demand.max_num_seqs * self.least_blocks(demand, block_size)


class StateSpec(KVCacheSpec, frozen=True, tag="state"):
    """One block, which every step writes again: a recurrent state.

    It stands for all tokens so far and for no shorter prefix. Where a checkpoint is due, the block
    gets a name and is written no more: the request goes on with a copy. Beside the state lies the
    one before the last step, to which a request returns that keeps only a part of the step's
    tokens.
    """

    allows_forks: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    keeps_parts: ClassVar[bool] = False
    is_rewritten: ClassVar[bool] = True

    interval_tokens: int = 0
    """Tokens from one checkpoint to the next, whole blocks; 0 where none is kept."""

    @property
    def checkpoint_tokens(self) -> int:
        return self.interval_tokens

    def first_found(self, num_blocks: int, block_size: int) -> int:
        return max(0, num_blocks - 1)

    def num_checkpoints(self, num_tokens: int) -> int:
        """Counts the checkpoints of a request's first `num_tokens` tokens."""
        return -(-num_tokens // self.interval_tokens) if self.interval_tokens else 0

    def blocks_at_start(self, extent: Extent, block_size: int) -> int:
        return 1

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        return 1

    def blocks_written(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        return num_blocks

    def blocks_final(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        return 0

    def capacity_tokens(
        self, num_blocks: int, num_rows: int, max_step_tokens: int, block_size: int
    ) -> int:
        return UNBOUNDED if num_blocks >= num_rows else 0

    def least_blocks(self, demand: KvDemand, block_size: int) -> int:
        return 1

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        return demand.max_num_seqs * (1 + self.num_checkpoints(demand.max_model_len))


class SingleStepSpec(KVCacheSpec, frozen=True, tag="step"):
    """The blocks of the tokens that a step computes, released at its end: an encoder's own
    attention.

    Nothing is left to be found, and a request that begins behind a hit misses nothing.
    """

    is_named: ClassVar[bool] = False
    outlives_step: ClassVar[bool] = False

    def blocks_at_start(self, extent: Extent, block_size: int) -> int:
        return blocks_for(min(extent.num_tokens, extent.step_end), block_size)

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        return 0

    def first_read(self, position: int, block_size: int) -> int:
        return blocks_for(position, block_size)

    def num_released(
        self, num_tokens: int, num_blocks: int, block_size: int, *, in_flight: bool
    ) -> int:
        # The step in flight writes into the block that this one has begun.
        return min(num_tokens // block_size, num_blocks) if in_flight else num_blocks

    def capacity_tokens(
        self, num_blocks: int, num_rows: int, max_step_tokens: int, block_size: int
    ) -> int:
        own = num_blocks - num_rows  # each row's tokens begin inside a block
        if own >= blocks_for(max_step_tokens, block_size):
            return UNBOUNDED
        return max(0, own) * block_size

    def least_blocks(self, demand: KvDemand, block_size: int) -> int:
        return blocks_for(min(demand.max_model_len, demand.max_step_tokens), block_size) + 1

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        # Two more for each: its tokens begin and end inside a block.
        return blocks_for(demand.max_step_tokens, block_size) + 2 * demand.max_num_seqs


class EncoderSpec(KVCacheSpec, frozen=True, tag="encode"):
    """The blocks of the encoder's input, released at the end of the one step that encodes it: the
    encoder's own attention, beside a decoder.
    """

    is_named: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    outlives_step: ClassVar[bool] = False

    max_tokens: int
    """Length of the longest input."""

    def blocks_at_start(self, extent: Extent, block_size: int) -> int:
        return blocks_for(extent.num_fixed_tokens, block_size)

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        return 0

    def blocks_written(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        return 0

    def blocks_final(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        return 0

    def num_released(
        self, num_tokens: int, num_blocks: int, block_size: int, *, in_flight: bool
    ) -> int:
        return num_blocks

    def capacity_tokens(
        self, num_blocks: int, num_rows: int, max_step_tokens: int, block_size: int
    ) -> int:
        return UNBOUNDED if num_blocks >= blocks_for(self.max_tokens, block_size) else 0

    def least_blocks(self, demand: KvDemand, block_size: int) -> int:
        return blocks_for(self.max_tokens, block_size)

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        # The inputs of a step end inside a block each.
        step = blocks_for(demand.max_step_tokens, block_size) + demand.max_num_seqs
        return max(step, self.least_blocks(demand, block_size))


AnyKVCacheSpec = (
    FullAttentionSpec
    | SlidingWindowSpec
    | CrossAttentionSpec
    | StateSpec
    | SingleStepSpec
    | EncoderSpec
)
"""Any of the kinds, as messages and recordings spell them."""


def spec_of_window(window: int | None) -> AnyKVCacheSpec:
    """Returns the spec of a group whose queries see `window` keys; None: all before them."""
    return GROWING if window is None else SlidingWindowSpec(window)
