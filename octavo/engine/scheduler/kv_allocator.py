"""Allocates and frees the KV blocks of requests: new blocks, blocks from the prefix cache, blocks
shared with another request, and swapped blocks. Also frees their rows on the worker.

All rows of a request are allocated and freed together.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.engine.kv.block_manager import BlockManager, SwappedRow
from octavo.engine.kv.prefix_loader import Prefetch
from octavo.engine.protocol.block_hashes import BlockHashing, get_block_media
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED
from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.protocol.step import TableLength
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.sequence_state import Branch, SequenceState
from octavo.engine.scheduler.step_builder import StepBuilder


class KVAllocator:
    """Allocates and frees the blocks of requests. In all methods, `num_running` is the number of
    running rows, for which some blocks are kept free.
    """

    def __init__(
        self, blocks: BlockManager, *, watermark_blocks: int, caches_generated: bool = True
    ) -> None:
        """`watermark_blocks`: blocks that stay free when a request starts while others run, so that
        it does not cause the next preemption. `caches_generated`: whether blocks of generated
        tokens enter the prefix cache; False if their K and V differ from those of the same tokens
        in a prompt.
        """
        self._caches_generated = caches_generated
        self._blocks = blocks
        self._watermark_blocks = watermark_blocks
        self.has_connector = blocks.connector is not None
        self.freed_rows: list[str] = []
        """Rows that the worker frees with the next plan."""
        self.table_lengths: list[TableLength] = []
        """Tables that the worker shortens with the next plan."""

    # -- a request starts --------------------------------------------------------------------------

    def reserve(self, num_running: int) -> int:
        """Returns the number of blocks to keep free when a request starts: one for each running
        row, but at least the watermark; 0 if nothing runs.
        """
        return max(num_running, self._watermark_blocks) if num_running else 0

    def start(
        self, request: Request, parent: Request | None, builder: StepBuilder, *, num_running: int
    ) -> bool:
        """Allocates the blocks of a waiting request, or shares the blocks of `parent`, the sample
        that computes the same prompt. Returns False if too few blocks are free.
        """
        if parent is not None:
            return self._fork(request, parent, builder)
        reserve = self.reserve(num_running)
        if request.num_seqs > 1:
            # Each branching row writes one block; one of these is the request's last block.
            reserve += request.num_seqs - (request.num_tokens % self._blocks.block_size != 0)
        start = self._blocks.start(
            request.request_id,
            request.token_ids,
            hashing=self._get_hashing(request),
            max_cached_tokens=request.max_cached_tokens,
            reserve=reserve,
            step_tokens=builder.budget,
            num_fixed_tokens=request.num_input_tokens,
        )
        if start is None:
            return False
        if request.source.sends_kv:
            self._blocks.hashes.offer_cached(request.request_id)
        request.num_computed_tokens = start.num_cached_tokens
        if not request.has_run:
            request.num_cached_tokens = start.num_cached_tokens
        builder.moves += start.moves
        return True

    def is_reading(self, request: Request, builder: StepBuilder, num_running: int) -> bool:
        """Loads a waiting request's prefix from outside the device; returns whether the request
        must wait for it. It does not wait if nothing else runs.
        """
        prefetch = self.prefetch(request, num_running, at_once=not num_running)
        builder.moves += prefetch.moves
        return prefetch.is_waiting

    def prefetch(self, request: Request, num_running: int, *, at_once: bool) -> Prefetch:
        """Starts loading a waiting request's prefix from host memory, disk or another engine. With
        `at_once`, the request does not wait for loads that would take further steps.
        """
        return self._blocks.prefetch(
            request.request_id,
            request.token_ids,
            hashing=self._get_hashing(request),
            max_cached_tokens=request.max_cached_tokens,
            reserve=self.reserve(num_running),
            at_once=at_once,
            source=_kv_source(request),
        )

    def reset_kv_source(self, request: Request) -> None:
        """Makes a waiting request compute its prompt here instead of in another engine."""
        if request.source.kv_source and request.status is RequestStatus.WAITING:
            request.source = msgspec.structs.replace(request.source, kv_source="")
            if self._blocks.connector is not None:
                self._blocks.connector.release(request.request_id)

    def stream(self, builder: StepBuilder) -> None:
        """Sends blocks to other engines layer by layer: the blocks that a step completes with the
        last tokens of prompts computed for these engines.
        """
        if not self._blocks.hashes.streams:
            return
        for (request, row), scheduled in zip(builder.owners, builder.rows, strict=True):
            end = scheduled.start + scheduled.num_tokens
            if request.source.sends_kv and scheduled.start < request.num_prompt_tokens <= end:
                self._blocks.hashes.stream(row.request_id, row.token_ids, scheduled.start, end)

    def sent(self, request: Request) -> None:
        """Tells the connector that a prompt for another engine is finished, and which of its blocks
        that engine gets.
        """
        prompt = request.token_ids[: request.num_prompt_tokens]
        self._blocks.hashes.complete(request.request_id, prompt, self._get_hashing(request))

    def is_shareable(self, request: Request, parent: Request) -> bool:
        """Returns whether the parent has blocks to share or is computing the same prompt. It may
        have been preempted, have freed blocks outside a window, or use other rotary positions.
        """
        has_lost_them = parent.status is RequestStatus.WAITING and parent.has_run
        is_placed_alike = request.first_position == parent.first_position
        if not self._blocks.shares_blocks or has_lost_them or not is_placed_alike:
            return False
        if not self.has_shared_tokens(request, parent):
            return request.source.fork_tokens is None
        return self._blocks.can_fork(parent.request_id, self._num_shared_tokens(request, parent))

    def _fork(self, request: Request, parent: Request, builder: StepBuilder) -> bool:
        """Shares the parent's blocks of the request's tokens. Copies the last block, since the last
        token is recomputed for its logits; returns False if no block is free for the copy.
        """
        num_computed = self._num_shared_tokens(request, parent)
        self._blocks.fork(parent.request_id, request.request_id, num_computed)
        end = min(request.num_tokens, num_computed + builder.budget)
        grant = self._blocks.grow(request.request_id, num_computed, end)
        if grant is None:
            self._blocks.free(request.request_id)
            return False
        request.num_computed_tokens = request.num_cached_tokens = num_computed
        request.is_encoded = True  # by the parent, whose keys it shares
        builder.moves += grant.moves
        return True

    # -- branching ---------------------------------------------------------------------------------

    def branch(self, rows: Sequence[SequenceState], branches: Sequence[Branch]) -> None:
        """Replaces `rows` by `branches`, which share their parents' blocks. Rows without a branch
        are freed.
        """
        for row, parent_id in branches:
            if row.request_id != parent_id:
                self._blocks.fork(parent_id, row.request_id, row.num_computed_tokens)
        kept = {row.request_id: row.is_on_worker for row, _ in branches}
        for row in rows:
            row.is_on_worker = False
            if row.request_id not in kept:
                self._blocks.free(row.request_id)
            if not kept.get(row.request_id, False):
                self.freed_rows.append(row.request_id)

    # -- rejected drafts ---------------------------------------------------------------------------

    def free_unused(self, row: SequenceState) -> None:
        """Frees the blocks allocated for rejected draft tokens, unless a step in flight writes to
        them.
        """
        if row.num_tokens_in_flight:
            return
        num_blocks = self._blocks.cut(row.request_id, len(row.token_ids))
        if num_blocks is not None:
            self.table_lengths.append(TableLength(row.request_id, num_blocks))

    # -- finishing and swapping --------------------------------------------------------------------

    def num_swapped_blocks(self, request: Request) -> int:
        """Returns the number of host blocks of a swapped request."""
        return self._blocks.host.num_blocks_of(row.request_id for row in request.rows)

    def remove_from_cache(self, request: Request) -> None:
        """Removes a request's blocks from the prefix cache."""
        for row in request.rows:
            self._blocks.hashes.remove(row.request_id)

    def free(self, request: Request) -> None:
        """Frees all blocks and rows that a request holds."""
        for row in request.rows:
            self._blocks.free(row.request_id)
        self._leave_worker(request)

    def swap_out(self, request: Request) -> list[BlockMove] | None:
        """Swaps a request out to host memory; returns the moves. Returns None and changes nothing
        if host memory has no room.
        """
        moves = self._blocks.swap_out(
            {row.request_id: row.num_computed_tokens for row in request.rows}
        )
        if moves is not None:
            self._leave_worker(request)
        return moves

    def swap_in(self, request: Request, builder: StepBuilder, *, num_running: int) -> bool:
        """Swaps a request in from host memory. Returns False and changes nothing if there is no
        room for all of its rows.
        """
        moves = self._blocks.swap_in(
            [
                SwappedRow(row.request_id, row.num_computed_tokens, row.num_tokens)
                for row in request.rows
            ],
            reserve=self.reserve(num_running),
            step_tokens=builder.budget,
        )
        builder.moves += moves or []
        return moves is not None

    def _num_shared_tokens(self, request: Request, parent: Request) -> int:
        """Returns the number of tokens that a request shares with its running parent: all but the
        last token of the same prompt or, if the request continues the parent's output, the computed
        tokens whose KV would be the same in a prompt.
        """
        if request.source.fork_tokens is None:
            return request.num_prompt_tokens - 1
        return min(
            request.source.fork_tokens,
            parent.num_computed_tokens,
            request.num_tokens - 1,
            request.max_cached_tokens,
            UNBOUNDED if self._caches_generated else parent.num_prompt_tokens,
        )

    def has_shared_tokens(self, request: Request, parent: Request) -> bool:
        """Returns whether the parent has computed the shared tokens on the device."""
        if parent.status is not RequestStatus.RUNNING:
            return False
        if parent.source.encoder_input is not None and parent.num_computed_tokens == 0:
            return False  # the parent's encoder has not been computed
        if request.source.fork_tokens is None:
            return parent.num_computed_tokens >= parent.num_prompt_tokens - 1
        return self._num_shared_tokens(request, parent) > 0

    def _get_hashing(self, request: Request) -> BlockHashing:
        """Returns the inputs of a request's block hashes other than its tokens."""
        source = request.source
        return BlockHashing(
            source.cache_salt,
            b"" if source.adapter is None else source.adapter.digest,
            b"" if source.encoder_input is None else source.encoder_input.digest,
            get_block_media(source.media, self._blocks.block_size) if source.media else {},
            num_hashed_tokens=UNBOUNDED if self._caches_generated else request.num_prompt_tokens,
            first_position=request.first_position,
        )

    def _leave_worker(self, request: Request) -> None:
        for row in request.rows:
            row.is_on_worker = False
            self.freed_rows.append(row.request_id)


def _kv_source(request: Request) -> str:
    """Returns the address of the engine that computes the prompt; "" for a restarted request, which
    is computed here.
    """
    starts_over = request.has_run or request.source.resumed
    return "" if starts_over else request.source.kv_source
