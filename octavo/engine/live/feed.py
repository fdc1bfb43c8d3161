"""Events of a watched engine for each reader: first a snapshot, then changes.

An event is a JSON object, the same in Python and over HTTP (docs/concepts/engine-events.md lists
its fields). The size of an event is bounded, since a view's is. A reader that falls behind gets one
event for several views, and misses only steps beyond MAX_STEPS. Independent of the transport.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import msgspec

from octavo.api.errors import OctavoError
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.view import (
    MAX_STEPS,
    BlockMap,
    BlockRun,
    EngineView,
    RequestView,
    StepMark,
)

PERIOD_S = 0.1
"""Minimum seconds between two views of the core."""
KEEP_ALIVE_S = 10.0
"""Seconds after which an idle engine sends an event as a keep-alive."""

COUNTERS = (
    *("num_steps", "busy_s", "prompt_tokens", "generation_tokens", "num_preemptions", "num_swaps"),
    *("prefix_query_tokens", "prefix_hit_tokens", "num_restarts"),
)
"""EngineStats fields whose values an event contains."""

Event = dict[str, Any]
NameOf = Callable[[str], tuple[str, int] | None]
"""Returns the user's request id and the sample index for a core request id; None if the request has
ended.
"""


class FeedReader:
    """One reader's events, an asynchronous iterator."""

    def __init__(self, feed: EngineFeed, view: EngineView) -> None:
        self._feed = feed
        self._view = view
        """Newest view."""
        self._sent: EngineView | None = None
        """View that the reader has received; None before the snapshot."""
        self._steps: deque[StepMark] = deque(maxlen=MAX_STEPS)
        self._changed = asyncio.Event()
        self._changed.set()
        self._error: OctavoError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), KEEP_ALIVE_S)
        self._changed.clear()
        if self._error is not None:
            raise self._error
        event = self._feed.event(self._sent, self._view, list(self._steps))
        self._sent = self._view
        self._steps.clear()
        return event

    def offer(self, view: EngineView) -> None:
        """Sets the current view, adds its steps and wakes the reader."""
        self._view = view
        self._steps += view.steps
        self._changed.set()

    def fail(self, error: OctavoError) -> None:
        """Ends the events with an error."""
        self._error = error
        self._changed.set()

    def close(self) -> None:
        """Removes the reader. After the last one, the core stops sending views."""
        self._feed.leave(self)


class EngineFeed:
    """The readers of one engine's events. All methods are called in the event loop's thread."""

    def __init__(self, watch: Callable[[float], None], name_of: NameOf) -> None:
        """`watch` sets the interval in seconds at which the core sends views; 0 stops them."""
        self._watch = watch
        self._name_of = name_of
        self._readers: set[FeedReader] = set()
        self._stats = EngineStats()
        self._number = 0

    def begin(self) -> None:
        """Makes the core send views from now on."""
        self._watch(PERIOD_S)

    def join(self, view: EngineView, stats: EngineStats) -> FeedReader:
        """Adds a reader whose snapshot is `view`. Call `begin` first."""
        self._stats = stats
        reader = FeedReader(self, view)
        self._readers.add(reader)
        return reader

    def leave(self, reader: FeedReader) -> None:
        self._readers.discard(reader)
        self.end_if_unread()

    def end_if_unread(self) -> None:
        """Stops the core's views if no reader is left."""
        if not self._readers:
            self._watch(0.0)

    def offer(self, view: EngineView, stats: EngineStats) -> None:
        """Passes the newest view to all readers."""
        self._stats = stats
        for reader in self._readers:
            reader.offer(view)

    def fail(self, error: OctavoError) -> None:
        for reader in self._readers:
            reader.fail(error)

    def event(self, before: EngineView | None, view: EngineView, steps: list[StepMark]) -> Event:
        """Returns an event with the changes from `before` to `view`; a snapshot if `before` is
        None.
        """
        self._number += 1
        stats = self._stats
        known = {} if before is None else {one.request_id: one for one in before.requests}
        now = {one.request_id for one in view.requests}
        return {
            "type": "snapshot" if before is None else "update",
            "seq": self._number,
            "time": round(view.now, 4),
            "block_size": view.block_size,
            "queue": _queue(view, stats),
            "counters": {name: getattr(stats, name) for name in COUNTERS},
            "steps": [list(step) for step in steps],
            "requests": [
                self._request(one) for one in view.requests if one != known.get(one.request_id)
            ],
            "gone": [name for name in known if name not in now],
            "groups": [
                _group(number, blocks, None if before is None else before.blocks[number])
                for number, blocks in enumerate(view.blocks)
            ],
        }

    def _request(self, view: RequestView) -> Event:
        name, index = self._name_of(view.request_id) or ("", 0)
        return {
            "n": view.request_id,
            "id": name,
            "index": index,
            "state": view.state,
            "waits_for": view.waits_for,
            "waited_s": round(view.waited_s, 3),
            "prompt_tokens": view.num_prompt_tokens,
            "tokens": view.num_output_tokens,
            "computed_tokens": view.num_computed_tokens,
            "cached_tokens": view.num_cached_tokens,
            "preemptions": view.num_preemptions,
            "blocks": view.num_blocks,
            "priority": view.priority,
        }


def _queue(view: EngineView, stats: EngineStats) -> Event:
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "swapped": stats.num_swapped,
        "waits_for": view.waits_for,
        "num_requests": view.num_requests,
    }


def _group(number: int, blocks: BlockMap, before: BlockMap | None) -> Event:
    """Returns the counts of cache group `number`, and the runs of blocks that differ from
    `before`.
    """
    known = None if before is None else before.runs
    return {
        "group": number,
        "window": blocks.window,
        "num_blocks": blocks.num_blocks,
        "num_shown": blocks.num_shown,
        "counts": msgspec.structs.asdict(blocks.counts),
        "runs": [list(run) for run in changed_runs(known, blocks.runs)],
        "num_host_blocks": blocks.num_host_blocks,
        "host_runs": [list(run) for run in blocks.host_runs],
    }


def changed_runs(before: list[BlockRun] | None, now: list[BlockRun]) -> list[BlockRun]:
    """Returns the runs that differ from those in `before`. Applied to the old map, they give the
    new one.
    """
    if before is None:
        return now
    known = set(before)
    return [run for run in now if run not in known]
