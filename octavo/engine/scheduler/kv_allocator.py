"""Allocates and frees the KV blocks of requests: found in the prefix cache, shared with another
request, newly allocated, or swapped in; and frees their rows on the worker.

All rows of a request are allocated and freed together. The scheduler decides which request is next;
this class reports whether it fits, and what it waits for if it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.engine.kv.block_manager import BlockManager, SwappedRow
from octavo.engine.kv.prefix_loader import Prefetch
from octavo.engine.protocol.block_hashes import BlockHashing, media_of_blocks
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED
from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.protocol.prompt_limits import OK, AdmissionDecision
from octavo.engine.protocol.step import TableEnd
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.result_consumer import Branch
from octavo.engine.requests.sequence_state import SequenceState
from octavo.engine.scheduler.admission import NO_BLOCKS, NO_PROMPT, READING, Admission
from octavo.engine.scheduler.preemption_policy import PreemptionPolicy
from octavo.engine.scheduler.step_builder import StepBuilder


class KVAllocator:
    """Allocates and frees the blocks of requests. In every method `num_running` is the number of
    running rows, for which some blocks are kept free.
    """

    def __init__(
        self,
        blocks: BlockManager,
        admission: Admission,
        preemption_policy: PreemptionPolicy,
        *,
        names_generated: bool = True,
    ) -> None:
        """`names_generated`: whether blocks of generated tokens enter the prefix cache; False if
        their K and V differ from those of a prompt.
        """
        self._names_generated = names_generated
        self._blocks = blocks
        self._admission = admission
        self._preemption_policy = preemption_policy
        self.freed_rows: list[str] = []
        """Rows that the worker frees with the next plan."""
        self.table_ends: list[TableEnd] = []
        """Tables that the worker shortens with the next plan."""

    def take_freed_rows(self) -> list[str]:
        """Removes and returns the rows that the worker frees with the next plan."""
        freed, self.freed_rows = self.freed_rows, []
        return freed

    def take_table_ends(self) -> list[TableEnd]:
        """Removes and returns the tables that the worker shortens with the next plan."""
        ends, self.table_ends = self.table_ends, []
        return ends

    def free_again(self, freed_rows: Sequence[str]) -> None:
        """Frees the rows of a failed plan again; freeing a row twice is harmless."""
        self.freed_rows += freed_rows

    # -- a request starts --------------------------------------------------------------------------

    def start(
        self,
        request: Request,
        parent: Request | None,
        builder: StepBuilder,
        *,
        room: int,
        num_running: int,
    ) -> AdmissionDecision:
        """Allocates the blocks of a waiting request if it may start, or shares those of `parent`,
        the sample that computes the same prompt. `room` is the number of rows that may be added.
        """
        if parent is not None and not self._is_shareable(request, parent):
            parent = None
        if parent is not None and not self._has_shared_tokens(request, parent):
            return NO_PROMPT
        if parent is None:
            prefetch = self.prefetch(request, num_running, at_once=not num_running)
            builder.moves += prefetch.moves
            if prefetch.is_waiting:
                return READING
        decision = self._admission.may_start(
            request.num_tokens,
            budget=builder.budget,
            room=room,
            num_seqs=request.num_seqs,
            num_whole=0 if parent is not None else request.num_input_tokens,
        )
        if decision is not OK:
            return decision
        if parent is None:
            moves = self._take_blocks(request, builder, num_running)
        else:
            moves = self._fork(request, parent, builder)
        if moves is None:
            return NO_BLOCKS
        builder.moves += moves
        return OK

    def prefetch(self, request: Request, num_running: int, *, at_once: bool) -> Prefetch:
        """Starts loading a waiting request's prefix from host memory, disk or another engine; with
        `at_once` the request does not wait for loads that take further steps.
        """
        return self._blocks.prefetch(
            request.request_id,
            request.token_ids,
            naming=self._naming(request),
            max_cached_tokens=request.max_cached_tokens,
            reserve=self._admission.reserve(num_running),
            at_once=at_once,
            source=_kv_source(request),
        )

    def forget_source(self, request: Request) -> None:
        """Makes a waiting request compute its prompt here instead of in another engine."""
        if request.source.kv_source and request.status is RequestStatus.WAITING:
            request.source = msgspec.structs.replace(request.source, kv_source="")
            self._blocks.connector.release(request.request_id)

    def stream(self, builder: StepBuilder) -> None:
        """Streams, layer by layer, the blocks that a step completes with the last tokens of prompts
        computed for other engines.
        """
        if not self._blocks.names.streams:
            return
        for (request, row), scheduled in zip(builder.owners, builder.rows, strict=True):
            end = scheduled.start + scheduled.num_tokens
            if request.source.sends_kv and scheduled.start < request.num_prompt_tokens <= end:
                self._blocks.names.stream(row.request_id, row.token_ids, scheduled.start, end)

    def sent(self, request: Request) -> None:
        """Handles the end of a request computed for another engine: announces which blocks of the
        prompt that engine gets.
        """
        if request.source.sends_kv:
            prompt = request.token_ids[: request.num_prompt_tokens]
            naming = self._naming(request)
            self._blocks.names.complete(request.request_id, prompt, naming)

    def _is_shareable(self, request: Request, parent: Request) -> bool:
        """Returns whether the parent has blocks to share or is computing the same prompt. It may
        have been preempted, have freed blocks outside a window, or use other rotary positions.
        """
        has_lost_them = parent.status is RequestStatus.WAITING and parent.has_run
        is_placed_alike = request.first_position == parent.first_position
        if not self._blocks.shares_blocks or has_lost_them or not is_placed_alike:
            return False
        if not self._has_shared_tokens(request, parent):
            return request.source.fork_tokens is None
        return self._blocks.can_fork(parent.request_id, self._num_shared_tokens(request, parent))

    def _take_blocks(
        self, request: Request, builder: StepBuilder, num_running: int
    ) -> list[BlockMove] | None:
        """Allocates blocks for all of the request's tokens, from the prefix cache or new; returns
        None and changes nothing if there are too few.
        """
        start = self._blocks.start(
            request.request_id,
            request.token_ids,
            naming=self._naming(request),
            max_cached_tokens=request.max_cached_tokens,
            reserve=self._admission.reserve(num_running) + self._branches_reserve(request),
            step_tokens=builder.budget,
            num_fixed_tokens=request.num_input_tokens,
        )
        if start is None:
            return None
        if request.source.sends_kv:
            self._blocks.names.offer_cached(request.request_id)
        request.num_computed_tokens = start.num_cached_tokens
        if not request.has_run:
            request.num_cached_tokens = start.num_cached_tokens
        return start.moves

    def _branches_reserve(self, request: Request) -> int:
        """Returns the blocks to keep free for rows that will branch off: each writes a block of its
        own, one of them the request's last.
        """
        if request.num_seqs == 1:
            return 0
        return request.num_seqs - (request.num_tokens % self._blocks.block_size != 0)

    def _fork(
        self, request: Request, parent: Request, builder: StepBuilder
    ) -> list[BlockMove] | None:
        """Shares the parent's blocks of the request's tokens and returns the moves that copy the
        last one, since the last token is recomputed for its logits; None if no block is free for
        it.
        """
        num_computed = self._num_shared_tokens(request, parent)
        self._blocks.fork(parent.request_id, request.request_id, num_computed)
        end = min(request.num_tokens, num_computed + builder.budget)
        grant = self._blocks.grow(request.request_id, num_computed, end)
        if grant is None:
            self._blocks.free(request.request_id)
            return None
        request.num_computed_tokens = request.num_cached_tokens = num_computed
        request.is_encoded = True  # by the parent, whose keys it shares
        return grant.moves

    # -- branching ---------------------------------------------------------------------------------

    def branch(self, rows: Sequence[SequenceState], branches: Sequence[Branch]) -> None:
        """Replaces `rows` by `branches`, which share their parents' blocks; rows without a branch
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
        num_blocks = self._blocks.cut(row.request_id, row.num_tokens)
        if num_blocks is not None:
            self.table_ends.append(TableEnd(row.request_id, num_blocks))

    # -- finishing and swapping --------------------------------------------------------------------

    def num_swapped_blocks(self, request: Request) -> int:
        """Returns the number of blocks of a swapped request in host memory."""
        return self._blocks.host.num_blocks_of(row.request_id for row in request.rows)

    def remove_from_cache(self, request: Request) -> None:
        """Removes a request's blocks from the prefix cache."""
        for row in request.rows:
            self._blocks.names.forget(row.request_id)

    def free(self, request: Request) -> None:
        """Frees all blocks and rows that a request holds."""
        for row in request.rows:
            self._blocks.free(row.request_id)
        self._leave_worker(request)

    def swap_out(self, request: Request, builder: StepBuilder) -> list[BlockMove] | None:
        """Returns the moves that swap a request to host memory; None, with nothing changed, if it
        should be recomputed.
        """
        moves = self._preemption_policy.swap_out(request, builder)
        if moves is not None:
            self._leave_worker(request)
        return moves

    def swap_in(self, request: Request, builder: StepBuilder, *, num_running: int) -> bool:
        """Swaps a request in from host memory; returns False, with nothing changed, if there is no
        room for all of its rows.
        """
        moves = self._blocks.swap_in(
            [
                SwappedRow(row.request_id, row.num_computed_tokens, row.num_tokens)
                for row in request.rows
            ],
            reserve=self._admission.reserve(num_running),
            step_tokens=builder.budget,
        )
        builder.moves += moves or []
        return moves is not None

    def _num_shared_tokens(self, request: Request, parent: Request) -> int:
        """Returns the number of tokens that a request shares with its running parent: all but the
        last of their common prompt, or, for a request that continues the parent's output, the
        computed tokens whose KV would be the same in a prompt.
        """
        if request.source.fork_tokens is None:
            return request.num_prompt_tokens - 1
        return min(
            request.source.fork_tokens,
            parent.num_computed_tokens,
            request.num_tokens - 1,
            request.max_cached_tokens,
            UNBOUNDED if self._names_generated else parent.num_prompt_tokens,
        )

    def _has_shared_tokens(self, request: Request, parent: Request) -> bool:
        """Returns whether the parent has computed the shared tokens on the device."""
        if parent.status is not RequestStatus.RUNNING:
            return False
        if parent.source.encoder_input is not None and parent.num_computed_tokens == 0:
            return False  # its encoder has not been computed
        if request.source.fork_tokens is None:
            return parent.num_computed_tokens >= parent.num_prompt_tokens - 1
        return self._num_shared_tokens(request, parent) > 0

    def _naming(self, request: Request) -> BlockHashing:
        """Returns what the block hashes of a request depend on besides its tokens."""
        source = request.source
        return BlockHashing(
            source.cache_salt,
            b"" if source.adapter is None else source.adapter.digest,
            b"" if source.encoder_input is None else source.encoder_input.digest,
            media_of_blocks(source.media, self._blocks.block_size),
            num_named_tokens=UNBOUNDED if self._names_generated else request.num_prompt_tokens,
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
