"""KV cache specs: how many blocks of a cache group a request needs, which of them are freed while
it runs, and which a prefix hit requires.

Used by the KV budget (`worker/memory.py`) and the block manager (`engine/kv`). All counts are
numbers of blocks of `block_size` tokens.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec

UNBOUNDED = 1 << 48
"""A number of tokens or blocks that is never reached."""


class KvDemand(NamedTuple):
    """Maximum demand of an engine on its KV cache."""

    max_model_len: int
    """Maximum length of a request, in tokens."""
    max_num_seqs: int
    """Maximum number of running requests."""
    max_step_tokens: int
    """Maximum number of tokens in one step."""
    max_encoder_len: int = 0
    """Maximum length of an encoder input, in rows."""


class Extent(NamedTuple):
    """Tokens for which a request's block tables are allocated when it starts or is swapped in."""

    num_tokens: int
    """All known tokens of the request."""
    step_end: int
    """End of the tokens that its next step may compute."""
    num_fixed_tokens: int = 0
    """Length of the encoder input, in rows."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns the number of blocks for `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class KVCacheSpec(msgspec.Struct, frozen=True):
    """Rules of one cache group; the defaults are the rules of full attention."""

    is_hashed: ClassVar[bool] = True
    """Whether full blocks are hashed for the prefix cache."""
    keeps_every_token: ClassVar[bool] = False
    """Whether a token reads the blocks of all tokens before it."""
    allows_hits: ClassVar[bool] = True
    """Whether a request may start after tokens that another request has computed."""
    allows_forks: ClassVar[bool] = True
    """Whether a row may share another row's blocks."""
    grows: ClassVar[bool] = True
    """Whether a request's block table grows with its tokens."""
    outlives_step: ClassVar[bool] = True
    """Whether later steps read the blocks written by a step."""
    keeps_parts: ClassVar[bool] = True
    """Whether the first tokens of a step or block can be kept when the later ones are discarded."""
    is_rewritten: ClassVar[bool] = False
    """Whether a request has a single block that represents all tokens so far and is rewritten by
    every step. In the prefix cache, such a block represents all tokens up to the end of the block
    whose hash it has.
    """

    @property
    def checkpoint_tokens(self) -> int:
        """Number of tokens between two hashed blocks; 0 if every block is hashed."""
        return 0

    @property
    def window_tokens(self) -> int | None:
        """Window size in keys, including the query's own key; None: unlimited."""
        return None

    def blocks_at_start(self, extent: Extent, block_size: int) -> int:
        """Returns the length of a request's block table, including holes, when it starts or is
        swapped in.
        """
        return blocks_for(extent.num_tokens, block_size)

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        """Returns the number of blocks that a request of `num_tokens` tokens holds between
        steps.
        """
        return blocks_for(num_tokens, block_size)

    def blocks_written(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        """Returns how many blocks of a table of `num_blocks` contain any of the first `num_tokens`
        tokens.
        """
        return blocks_for(num_tokens, block_size)

    def blocks_final(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        """Returns how many blocks of a table of `num_blocks` are complete after `num_tokens`
        tokens, so that no later token writes to them.
        """
        return num_tokens // block_size

    def first_read(self, position: int, block_size: int) -> int:
        """Returns the index of the first block from earlier steps that a query at `position`
        reads.
        """
        return 0

    def first_found(self, num_blocks: int, block_size: int) -> int:
        """Returns the index of the first block that must be in the prefix cache for a request to
        continue after `num_blocks` blocks.
        """
        return self.first_read(num_blocks * block_size, block_size)

    def num_released(
        self, num_tokens: int, num_blocks: int, block_size: int, *, in_flight: bool
    ) -> int:
        """Returns how many blocks at the beginning of a table of `num_blocks` are no longer read
        once `num_tokens` tokens are computed.

        `in_flight`: another step of the request, starting with the next token, is being computed.
        """
        return min(self.first_read(num_tokens, block_size), num_blocks)

    def capacity_tokens(
        self, num_blocks: int, num_rows: int, max_step_tokens: int, block_size: int
    ) -> int:
        """Returns the maximum length in tokens of a request with `num_rows` rows if there are
        `num_blocks` blocks, counting shared blocks once; UNBOUNDED if the blocks do not limit the
        length.
        """
        return num_blocks * block_size

    def least_blocks(self, demand: KvDemand, block_size: int) -> int:
        """Returns the number of blocks that the longest request needs."""
        return blocks_for(demand.max_model_len, block_size)

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        """Returns the number of blocks that suffices for all requests to run without waiting for
        blocks.
        """
        return UNBOUNDED


class FullAttentionSpec(KVCacheSpec, frozen=True, tag="growing"):
    """Full attention and latent (MLA) caches: every block is kept until the request ends."""

    keeps_every_token: ClassVar[bool] = True


GROWING = FullAttentionSpec()
"""The spec of full attention."""


class SlidingWindowSpec(KVCacheSpec, frozen=True, tag="window"):
    """Sliding window: only blocks inside the window are kept."""

    window: int
    """Number of keys that a query attends to, including its own."""

    @property
    def window_tokens(self) -> int | None:
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
        # One more: window and step need not begin at a block boundary.
        own = blocks_for(self.window + demand.max_step_tokens, block_size) + 1
        return min(blocks_for(demand.max_model_len, block_size), own)

    def most_blocks(self, demand: KvDemand, block_size: int) -> int:
        per_request = (
            blocks_for(self.window, block_size) + 3
        )  # two boundaries, and one block in reserve
        step = blocks_for(demand.max_step_tokens, block_size) + 1
        return demand.max_num_seqs * per_request + step


class CrossAttentionSpec(KVCacheSpec, frozen=True, tag="fixed"):
    """Cross attention: the blocks of the encoder input are kept until the request ends.

    The prefix cache does not contain them, since block hashes do not cover the encoder input. The
    rows of a request share them, since no decoder step writes them.
    """

    is_hashed: ClassVar[bool] = False
    allows_hits: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    max_tokens: int
    """Length of the longest encoder input."""

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
    """Recurrent state: one block, which every step overwrites.

    The state represents all tokens so far and no shorter prefix. At a checkpoint, the block is
    hashed and no longer written; the request continues with a copy. The block also contains the
    state before the last step: the request returns to it if only some of the step's draft tokens
    are accepted.
    """

    allows_forks: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    keeps_parts: ClassVar[bool] = False
    is_rewritten: ClassVar[bool] = True

    interval_tokens: int = 0
    """Number of tokens between two checkpoints, a multiple of the block size; 0: no checkpoints."""

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
    """Self-attention of an encoder-only model: blocks of the tokens in a step, freed at its end."""

    is_hashed: ClassVar[bool] = False
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
        # The step in flight writes to the block that this one has begun.
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
        # Two more blocks for each request: its tokens begin and end inside a block.
        return blocks_for(demand.max_step_tokens, block_size) + 2 * demand.max_num_seqs


class EncoderSpec(KVCacheSpec, frozen=True, tag="encode"):
    """Self-attention of the encoder in an encoder-decoder model: blocks of the encoder input, freed
    after the step that encodes it.
    """

    is_hashed: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    outlives_step: ClassVar[bool] = False

    max_tokens: int
    """Length of the longest encoder input."""

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
        # Each encoder input of a step ends inside a block.
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
"""Any kind of spec, in the form that messages and recordings serialize."""


def get_window_spec(window: int | None) -> AnyKVCacheSpec:
    """Returns the spec of a group whose queries attend to `window` keys; None: to all earlier
    keys.
    """
    return GROWING if window is None else SlidingWindowSpec(window)
