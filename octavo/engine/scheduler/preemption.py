"""Preempts running requests when others need their KV blocks: all blocks of a request are swapped
to host memory, or freed and recomputed later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.requests.request import Request
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.scheduler.admission_control import NO_BLOCKS
from octavo.engine.scheduler.kv_allocator import KVAllocator
from octavo.engine.scheduler.request_queues import RequestQueues
from octavo.engine.scheduler.step_builder import StepBuilder

Mode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class Preemption:
    """Preempts the request that the queue selects. The mode `auto` swaps while a cost is unknown,
    to measure it.
    """

    queues: RequestQueues
    blocks: BlockManager
    kv_allocator: KVAllocator
    times: Timekeeper
    stats: EngineStats
    mode: Mode

    def make_room(self, request: Request, step: StepBuilder) -> bool:
        """Preempts a request to free blocks for `request`. Returns False if `request` itself was
        preempted, or must wait until no step is in flight.
        """
        step.waits_for = NO_BLOCKS.reason
        if step.runs_ahead:
            step.is_short = True
            return False
        victim = self.queues.waiting.victim(self.queues.running)
        self._preempt(victim, step)
        return victim is not request

    def restart(self, request: Request) -> None:
        """Frees a request's blocks and rows, and moves it to the front of the waiting queue."""
        self.kv_allocator.free(request)
        self.queues.restart(request)

    def _preempt(self, request: Request, step: StepBuilder) -> None:
        request.num_preemptions += 1
        self.times.preempted(request.watch)
        step.preempted = True
        step.drop_rows(request)
        moves = self.kv_allocator.swap_out(request) if self._should_swap(request, step) else None
        if moves is None:
            self.restart(request)
        else:
            self.queues.swap_out(request)
            step.moves += moves
            step.swapped_out.append(request)
            self.stats.num_swaps += 1
        self.stats.num_preemptions += 1

    def _should_swap(self, request: Request, step: StepBuilder) -> bool:
        """Returns whether to swap a request. The mode `auto` compares moving its blocks out and in
        with a prefill without prefix cache hits; blocks that beams share count twice in both.
        """
        num_tokens = sum(row.num_computed_tokens for row in request.rows)
        if num_tokens == 0 or self.mode != "auto":
            return num_tokens > 0 and self.mode == "swap"
        swap_blocks_per_s = step.costs.swap_blocks_per_s
        prefill_s = step.costs.prefill_s(num_tokens, step.max_chunk)
        if swap_blocks_per_s is None or prefill_s is None:
            return True
        num_blocks = len(self.blocks.pools) * -(-num_tokens // self.blocks.block_size)
        return 2 * num_blocks / swap_blocks_per_s < prefill_s
