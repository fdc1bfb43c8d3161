"""Preempts running requests that hold the KV blocks which others need."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.protocol.stats import EngineStats
from octavo.engine.requests.request import Request
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.scheduler.admission import NO_BLOCKS
from octavo.engine.scheduler.kv_allocator import KVAllocator
from octavo.engine.scheduler.request_queues import RequestQueues
from octavo.engine.scheduler.step_builder import StepBuilder


@dataclass(frozen=True, slots=True)
class Preemption:
    """Takes the blocks of the request that the policy names, all of them or none."""

    queues: RequestQueues
    kv_allocator: KVAllocator
    times: Timekeeper
    stats: EngineStats

    def make_room(self, request: Request, step: StepBuilder) -> bool:
        """Preempts a request to free blocks for another; returns False if that is the request
        itself, or must wait until no step is in flight.
        """
        step.waits_for = NO_BLOCKS.reason
        if step.runs_ahead:
            step.is_short = True
            return False
        victim = self.queues.waiting.victim(self.queues.running)
        self._preempt(victim, step)
        return victim is not request

    def start_over(self, request: Request) -> None:
        """Frees what a request holds and returns it to the front of the waiting ones."""
        self.kv_allocator.free(request)
        self.queues.start_over(request)

    def _preempt(self, request: Request, step: StepBuilder) -> None:
        """Takes all blocks of a running request, which is swapped out or recomputed later."""
        request.num_preemptions += 1
        self.times.preempted(request.watch)
        step.preempted = True
        step.drop_rows(request)
        moves = self.kv_allocator.swap_out(request, step)
        if moves is None:
            self.start_over(request)
        else:
            self.queues.swap_out(request)
            step.moves += moves
            step.swapped_out.append(request)
            self.stats.num_swaps += 1
        self.stats.num_preemptions += 1
