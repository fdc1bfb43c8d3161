"""How a request comes onto the device and off it: blocks for its rows (found, shared, taken,
swapped in), and the worker's rows freed.

All rows of a request come and go together. Decides nothing about whose turn it is; it says whether
there is room, and what is waited for where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from octavo.engine.kv.block_manager import HERE, BlockManager, Nearer, SwappedRow
from octavo.engine.requests.beam_search import Child
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.token_row import TokenRow
from octavo.engine.scheduling.admission import NO_BLOCKS, NO_PROMPT, OK, READING, Admission, Answer
from octavo.engine.scheduling.step_builder import StepBuilder
from octavo.step import BlockMove

Mode = Literal["auto", "swap", "recompute"]


class Preemption:
    """`auto` swaps while a cost is unknown: the first swap measures it."""

    def __init__(self, blocks: BlockManager, mode: Mode) -> None:
        self._blocks = blocks
        self._mode = mode

    def swap_out(self, request: Request, builder: StepBuilder) -> list[BlockMove] | None:
        """All blocks of the request's computed tokens, moved to the host; None, and nothing done,
        where it is to be computed again.
        """
        computed = {row.request_id: row.num_computed_tokens for row in request.rows}
        num_tokens = sum(computed.values())
        if (
            num_tokens == 0
            or self._mode == "recompute"
            or (self._mode == "auto" and not self._is_swap_cheaper(num_tokens, builder))
        ):
            return None
        return self._blocks.swap_out(computed)

    def _is_swap_cheaper(self, num_tokens: int, builder: StepBuilder) -> bool:
        """Compares blocks moved out and in again with a prefill that finds nothing in the prefix
        cache. Blocks that beams share count twice in both.
        """
        swap_blocks_per_s = builder.costs.swap_blocks_per_s
        prefill_s = builder.costs.prefill_s(num_tokens, builder.max_chunk)
        if swap_blocks_per_s is None or prefill_s is None:
            return True
        num_blocks = len(self._blocks.pools) * -(-num_tokens // self._blocks.block_size)
        return 2 * num_blocks / swap_blocks_per_s < prefill_s


class Placement:
    """`num_running` is always the number of running rows, beside which some blocks are to stay
    free.
    """

    def __init__(self, blocks: BlockManager, admission: Admission, preemption: Preemption) -> None:
        self._blocks = blocks
        self._admission = admission
        self._preemption = preemption
        self._freed_rows: list[str] = []

    def take_freed_rows(self) -> list[str]:
        """Those that the worker is to be told of with the next plan."""
        freed, self._freed_rows = self._freed_rows, []
        return freed

    def free_again(self, freed_rows: Sequence[str]) -> None:
        """Nobody knows whether they were: twice does no harm."""
        self._freed_rows += freed_rows

    # -- a request starts --------------------------------------------------------------------------

    def start(
        self,
        request: Request,
        parent: Request | None,
        builder: StepBuilder,
        *,
        room: int,
        num_running: int,
    ) -> Answer:
        """By itself, or sharing the blocks of `parent`, the sample whose prompt it has. `room`:
        rows that may be added.
        """
        parent = parent if parent is not None and self._is_shareable(request, parent) else None
        if parent is not None and not _has_prompt(parent):
            return NO_PROMPT
        nearer = (
            HERE
            if parent is not None
            else self.read_ahead(request, num_running, at_once=not num_running)
        )
        builder.moves += nearer.moves
        if nearer.is_waiting:
            return READING
        answer = self._admission.may_start(
            request.num_tokens, budget=builder.budget, room=room, num_seqs=request.num_seqs
        )
        if answer is not OK:
            return answer
        moves = (
            self._take_blocks(request, builder, num_running)
            if parent is None
            else self._fork(request, parent)
        )
        if moves is None:
            return NO_BLOCKS
        builder.moves += moves
        return OK

    def read_ahead(self, request: Request, num_running: int, *, at_once: bool) -> Nearer:
        return self._blocks.read_ahead(
            request.request_id,
            request.token_ids,
            salt=request.source.cache_salt,
            max_cached_tokens=request.max_cached_tokens,
            reserve=self._admission.reserve(num_running),
            at_once=at_once,
        )

    def _is_shareable(self, request: Request, parent: Request) -> bool:
        """Not where the parent has lost what is to be shared, and computes it again, or has let go
        of it.
        """
        if not self._blocks.shares_blocks or (
            parent.status is RequestStatus.WAITING and parent.num_preemptions
        ):
            return False
        return not _has_prompt(parent) or self._blocks.can_fork(
            parent.request_id, request.num_prompt_tokens - 1
        )

    def _take_blocks(
        self, request: Request, builder: StepBuilder, num_running: int
    ) -> list[BlockMove] | None:
        start = self._blocks.start(
            request.request_id,
            request.token_ids,
            salt=request.source.cache_salt,
            max_cached_tokens=request.max_cached_tokens,
            reserve=self._admission.reserve(num_running) + self._branches_reserve(request),
            step_tokens=builder.budget,
        )
        if start is None:
            return None
        request.num_computed_tokens = start.num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = start.num_cached_tokens
        return start.moves

    def _branches_reserve(self, request: Request) -> int:
        """Blocks to stay free where the request is the trunk of beams: each will write one of its
        own, one of them the last.
        """
        if request.search is None:
            return 0
        return request.num_seqs - (request.num_tokens % self._blocks.block_size != 0)

    def _fork(self, request: Request, parent: Request) -> list[BlockMove] | None:
        """Shares the parent's prompt, of which the last token is computed again: its logits are
        wanted, and its block copied.
        """
        num_computed = request.num_prompt_tokens - 1
        self._blocks.fork(parent.request_id, request.request_id, num_computed)
        grant = self._blocks.grow(request.request_id, num_computed, request.num_tokens)
        if grant is None:
            self._blocks.free(request.request_id)
            return None
        request.num_computed_tokens = request.num_cached_tokens = num_computed
        return grant.moves

    # -- its rows branch off each other ------------------------------------------------------------

    def branch(self, rows: Sequence[TokenRow], children: Sequence[Child]) -> None:
        """`children` take the place of `rows`: they share what their parents have computed. Rows
        without a child are gone.
        """
        for beam, parent_id in children:
            if beam.request_id != parent_id:
                self._blocks.fork(parent_id, beam.request_id, beam.num_computed_tokens)
        kept = {beam.request_id: beam.is_on_worker for beam, _ in children}
        for row in rows:
            row.is_on_worker = False
            if row.request_id not in kept:
                self._blocks.free(row.request_id)
            if not kept.get(row.request_id, False):
                self._freed_rows.append(row.request_id)

    # -- a request leaves, for good or for a while -------------------------------------------------

    def forget(self, request: Request) -> None:
        """What was computed of it is not found again."""
        for row in request.rows:
            self._blocks.forget(row.request_id)

    def free(self, request: Request) -> None:
        """All that it holds."""
        for row in request.rows:
            self._blocks.free(row.request_id)
        self._leave_worker(request)

    def swap_out(self, request: Request, builder: StepBuilder) -> list[BlockMove] | None:
        """None, and nothing done, where it is to be computed again."""
        moves = self._preemption.swap_out(request, builder)
        if moves is not None:
            self._leave_worker(request)
        return moves

    def swap_in(self, request: Request, builder: StepBuilder, *, num_running: int) -> bool:
        """Whether there was room for all of its rows."""
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

    def _leave_worker(self, request: Request) -> None:
        for row in request.rows:
            row.is_on_worker = False
            self._freed_rows.append(row.request_id)


def _has_prompt(parent: Request) -> bool:
    """On the device, but for its last token. One that is swapped out is waited for."""
    return (
        parent.status is RequestStatus.RUNNING
        and parent.num_computed_tokens >= parent.num_prompt_tokens - 1
    )
