"""Builds views of a running engine, on request or periodically while it is watched.

Reads the scheduler's state without changing it. Without a watch, steps have no extra cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby, islice

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_pool import HOLE, BlockPool
from octavo.engine.protocol.step import ResultKind, StepPlan
from octavo.engine.protocol.view import (
    CACHED,
    FREE,
    HELD,
    MAX_BLOCKS,
    MAX_REQUESTS,
    MAX_STEPS,
    SHARED,
    SWAPPED,
    BlockCounts,
    BlockMap,
    BlockRun,
    EngineView,
    RequestView,
    StepMark,
)
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.timings import STEP_RUNNING
from octavo.engine.scheduler.admission_control import NO_BLOCKS
from octavo.engine.scheduler.scheduler import Scheduler

CACHED_CELL, FREE_CELL = (CACHED, ""), (FREE, "")
MAX_SHARE = 0.03
"""Maximum fraction of the time that is spent on building views."""


class EngineWatch:
    """Steps since the last view, and the time of the next view."""

    def __init__(self, scheduler: Scheduler, period_s: float) -> None:
        """`period_s`: minimum seconds between two views."""
        self._scheduler = scheduler
        self._period_s = period_s
        self._due = 0.0
        self._steps: deque[StepMark] = deque(maxlen=MAX_STEPS)
        self._last_step = -1

    def note(self, plan: StepPlan, elapsed_s: float) -> None:
        """Adds a computed step."""
        if plan.rows:
            # the first decode step has the number `plan.step`, the next ones the numbers after it
            self._last_step = max(plan.step, self._last_step + 1)
            self._steps.append(make_mark(self._last_step, plan, elapsed_s))

    def spent(self, now: float, seconds: float) -> None:
        """Schedules the next view after building one took `seconds`: at most MAX_SHARE of the time
        is spent on views.
        """
        self._due = now + max(self._period_s, seconds / MAX_SHARE)

    def view(self, now: float, *, is_last: bool) -> EngineView | None:
        """Returns a view if one is due or `is_last`, else None."""
        if now < self._due and not is_last:
            return None
        view = make_view(self._scheduler, now, with_blocks=True)
        view.steps = list(self._steps)
        self._steps.clear()
        return view


def make_mark(step: int, plan: StepPlan, elapsed_s: float) -> StepMark:
    num_decode = sum(
        row.result_kind == ResultKind.SAMPLE and row.num_tokens == 1 for row in plan.rows
    )
    return StepMark(
        step,
        round(1000 * elapsed_s, 3),
        num_prefill_tokens=plan.num_tokens - num_decode,
        num_decode_tokens=num_decode,
        num_rows=len(plan.rows),
    )


def make_view(scheduler: Scheduler, now: float, *, with_blocks: bool) -> EngineView:
    """Returns a view of the engine's current state; with blocks, it contains at most MAX_REQUESTS
    requests.
    """
    queues = scheduler.queues
    requests: Iterable[Request] = chain(queues.running, queues.swapped, scheduler.waiting)
    if with_blocks:
        requests = islice(requests, MAX_REQUESTS)
    return EngineView(
        now,
        scheduler.blocks.block_size,
        len(queues.by_id),
        [
            _request_view(scheduler, request, now, with_waits=not with_blocks)
            for request in requests
        ],
        scheduler.waits_for,
        _block_maps(scheduler.blocks, queues.by_id.values()) if with_blocks else [],
    )


def _reason_to_wait(scheduler: Scheduler, request: Request) -> str:
    """Returns why a request does not run; "" if it does."""
    if request.status is RequestStatus.RUNNING:
        return ""
    if request.status is RequestStatus.SWAPPED:
        return NO_BLOCKS.reason
    return scheduler.waits_for or STEP_RUNNING


def _request_view(
    scheduler: Scheduler, request: Request, now: float, *, with_waits: bool
) -> RequestView:
    tables = scheduler.blocks.tables
    return RequestView(
        request.request_id,
        request.status.value,
        waits_for=_reason_to_wait(scheduler, request),
        waited_s=_waited_s(request, now),
        waits=scheduler.times.get_timings(request.watch).waits if with_waits else {},
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=max(row.num_computed_tokens for row in request.rows),
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        num_blocks=sum(
            len(table) for row in request.rows for table in tables.get(row.request_id, ())
        ),
        priority=request.source.priority,
    )


def _waited_s(request: Request, now: float) -> float:
    watch = request.watch
    until = now if watch.started is None else watch.started
    since = watch.arrival if watch.paused is None else watch.paused
    return max(0.0, (until if watch.paused is None else now) - since)


# -- blocks ----------------------------------------------------------------------------------------


def _block_maps(blocks: BlockManager, requests: Iterable[Request]) -> list[BlockMap]:
    owners = {row.request_id: request.request_id for request in requests for row in request.rows}
    return [_block_map(blocks, group, owners) for group in range(len(blocks.pools))]


def _block_map(blocks: BlockManager, group: int, owners: Mapping[str, str]) -> BlockMap:
    pool, host = blocks.pools[group], blocks.host
    held_by = _holders(blocks.tables, group, owners)
    num_shown = min(pool.num_blocks, MAX_BLOCKS)
    swapped = sorted(_holders(host.tables, group, owners).items())
    return BlockMap(
        window=pool.spec.window_tokens,
        num_blocks=pool.num_blocks,
        counts=_counts(blocks, group, held_by),
        num_shown=num_shown,
        runs=list(_runs(pool, num_shown, held_by)),
        num_host_blocks=host.num_blocks[group],
        host_runs=[BlockRun(block, 1, SWAPPED, name) for block, name in swapped[:MAX_BLOCKS]],
    )


def _counts(blocks: BlockManager, group: int, held_by: Mapping[int, str]) -> BlockCounts:
    pool, host = blocks.pools[group], blocks.host
    used = pool.counts()
    num_cached = used.num_named - len(pool.cache.key_of.keys() & held_by.keys())
    return BlockCounts(
        free=len(pool.free) - num_cached,
        cached=num_cached,
        held=used.num_held - used.num_shared,
        shared=used.num_shared,
        swapped=host.num_blocks[group] - len(host.free[group]),
    )


def _holders(
    tables: Mapping[str, list[list[int]]], group: int, owners: Mapping[str, str]
) -> dict[int, str]:
    """Maps each block in the tables of one group to the first request that holds it."""
    holders: dict[int, str] = {}
    for name in reversed(list(tables)):
        holders.update(dict.fromkeys(tables[name][group], owners.get(name, "")))
    holders.pop(HOLE, None)
    return holders


def _runs(pool: BlockPool, num_shown: int, held_by: Mapping[int, str]) -> Iterator[BlockRun]:
    named, counts = pool.cache.key_of, pool.ref_counts
    cells = [
        (SHARED if counts[block] > 1 else HELD, held_by.get(block, ""))
        if counts[block]
        else CACHED_CELL
        if block in named
        else FREE_CELL
        for block in range(num_shown)
    ]
    first = 0
    for (state, name), members in groupby(cells):
        num_blocks = len(list(members))
        yield BlockRun(first, num_blocks, state, name)
        first += num_blocks
