"""Converts a recording to events of the live feed, one for each step.

Replays the steps (`replay.py`); if this version of Octavo schedules a step differently, the
iterator ends there with an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from octavo.api.errors import ConfigError
from octavo.engine.live.feed import EngineFeed
from octavo.engine.live.feed import Event as FeedEvent
from octavo.engine.live.watch import make_mark, make_view
from octavo.engine.protocol.step import StepPlan
from octavo.engine.protocol.view import EngineView
from octavo.engine.recording.recorder import Event, RecordingHeader, StepComputed, StepPlanned
from octavo.engine.recording.replay import Replay
from octavo.engine.requests.stop_strings import MakeStopTexts


class RecordedFrames:
    """Iterator of events; every `num_in_chunk`-th is a snapshot."""

    def __init__(
        self,
        header: RecordingHeader,
        events: Iterable[Event],
        stop_texts: MakeStopTexts | None = None,
        *,
        num_in_chunk: int,
    ) -> None:
        self._replay = Replay(header, stop_texts=stop_texts)
        self._events = events
        self._num_in_chunk = num_in_chunk
        self._feed = EngineFeed(lambda period_s: None, lambda name: (name, 0))
        self._planned: list[StepPlanned] = []
        """Plans without a result, oldest first."""
        self._plan: StepPlan | None = None
        """The plan of the last result."""
        self._step = 0
        self._now = 0.0
        self._before: EngineView | None = None
        self._num_frames = 0

    def __iter__(self) -> Iterator[FeedEvent]:
        for event in self._events:
            self._replay.apply(event)
            if self._replay.found.differences:
                raise ConfigError(
                    f"this version schedules different steps: {self._replay.found.differences[0]}",
                    hint="use the version that wrote the recording",
                )
            if isinstance(event, StepPlanned):
                self._planned.append(event)
            elif isinstance(event, StepComputed):
                yield self._frame(event)

    def _frame(self, computed: StepComputed) -> FeedEvent:
        """Returns the event after a step; the step ends when the device has finished it."""
        busy_s = computed.result.busy_s
        if self._planned and self._planned[0].plan.step == computed.result.step:
            planned = self._planned.pop(0)
            self._plan, self._step = planned.plan, planned.plan.step
            self._now = max(self._now, planned.now + busy_s)
        else:  # a further decode step of the last plan
            self._step += 1
            self._now += busy_s
        assert self._plan is not None, "the replay has seen the plan"
        scheduler = self._replay.scheduler
        view = make_view(scheduler, self._now, with_blocks=True)
        mark = make_mark(self._step, self._plan, busy_s)
        self._feed.offer(view, scheduler.stats())
        is_first = self._num_frames % self._num_in_chunk == 0
        event = self._feed.event(None if is_first else self._before, view, [mark])
        self._before = view
        self._num_frames += 1
        return event
