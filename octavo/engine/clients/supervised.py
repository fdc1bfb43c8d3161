"""A core process that is replaced when it hangs: who hung it fails, all others go on where they
were.

Remembers what every unfinished request has been given, so that a new core can be told. A hung
native call cannot be ended from inside its process, so the process is; a step's draws depend on
nothing but the request, so what follows is what would have followed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from octavo.engine.clients.client import EngineInfo
from octavo.engine.clients.process import ProcessClient
from octavo.engine.clients.suspects import Suspects
from octavo.engine.core import CoreOutputs, TakeEarly
from octavo.engine.kv.pin import Pin
from octavo.engine.requests.request import EngineOutput, EngineRequest
from octavo.engine.stats import COUNTS, EngineStats

Start = Callable[[int], ProcessClient]
"""Starts a core, told how many came before it."""
Report = Callable[[str], None]

MAX_INTERVAL_S = 2.0
LOOKS = 8
"""In the time that a core may stand still."""


@dataclass(slots=True)
class Unfinished:
    """A request, and what it has yielded so far."""

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    aborted: bool = False

    def again(self, *, one_token: bool = False) -> EngineRequest:
        """As a core takes it that has never heard of it."""
        told = {"output_token_ids": list(self.token_ids), "fork_of": None} if self.token_ids else {}
        return msgspec.structs.replace(self.request, resumed=True, one_token=one_token, **told)


class Watch:
    """For how long a mark has not changed. Time in which nobody looked does not count: a machine
    that slept has not hung.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.interval_s = min(timeout_s / LOOKS, MAX_INTERVAL_S)
        self._mark: int | None = None
        self._still_s = self._looked = 0.0

    def look(self, mark: int, now: float) -> bool:
        """Whether it has stood still for too long."""
        if mark == self._mark:
            self._still_s += min(now - self._looked, 2 * self.interval_s)
        else:
            self._mark, self._still_s = mark, 0.0
        self._looked = now
        return self._still_s >= self.timeout_s

    def rest(self) -> None:
        """Nothing has to move."""
        self._mark = None


class SupervisedClient:
    """An EngineClient. `wait_until_ready` must return before the first request."""

    info: EngineInfo

    def __init__(self, start: Start, *, stall_timeout_s: float, report: Report) -> None:
        """`report` is told of every core that is replaced."""
        self.trouble = ""
        self._start = start
        self._report = report
        self._core = start(0)
        self._watch = Watch(stall_timeout_s)
        self._suspects = Suspects()
        self._requests: dict[str, Unfinished] = {}
        self._lock = threading.Lock()
        """Held while a core is told something, and while it is replaced."""
        self._closing = False
        self._trying = False
        """The core is told of nobody but whoever is on trial."""
        self._num_sent = self._num_sent_tokens = 0
        self._stats = EngineStats()
        self._before: EngineStats | None = None
        """What earlier cores counted."""

    @property
    def pid(self) -> int:
        return self._core.pid

    def wait_until_ready(self, report: Report) -> EngineInfo:
        self.info = self._core.wait_until_ready(report)
        return self.info

    def add(self, requests: list[EngineRequest]) -> None:
        with self._lock:
            for request in requests:
                self._requests[request.request_id] = Unfinished(request)
                self._num_sent_tokens += len(request.prompt_token_ids)
            self._num_sent += len(requests)
            if not self._trying:
                self._core.add(requests)

    def abort(self, request_ids: list[str]) -> None:
        """One that the core does not know is made known to it, so that it has its end from
        there."""
        with self._lock:
            for request_id in request_ids:
                unfinished = self._requests.get(
                    request_id
                )  # the thread that receives may end it at any moment
                if unfinished is None or unfinished.aborted:
                    continue
                unfinished.aborted = True
                if self._trying and request_id != self._suspects.on_trial:
                    self._core.add([unfinished.again()])
            self._core.abort(request_ids)

    def receive(
        self, timeout_s: float | None = None, *, take_early: TakeEarly | None = None
    ) -> CoreOutputs | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closing:
            left_s = self._watch.interval_s if end is None else end - time.monotonic()
            step = self._core.receive(max(0.0, min(left_s, self._watch.interval_s)))
            if self.trouble and self._core.is_ready:
                self.trouble = ""
                self._report("the engine is there again")
            if step is not None:
                return self._take(step)
            if self._hangs():
                return self._replace()
            if end is not None and time.monotonic() >= end:
                return None
        return None

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        return self._core.reset_prefix_cache(reset_connector=reset_connector)

    def pin_prefix(self, pin: Pin) -> int:
        return self._core.pin_prefix(pin)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._core.close()

    def _hangs(self) -> bool:
        """A core that has work must move; one that loads may take its time."""
        if self._core.is_ready and self._requests:
            return self._watch.look(self._core.slate.beats, time.monotonic())
        self._watch.rest()
        return False

    def _take(self, step: CoreOutputs) -> CoreOutputs:
        for output in step.outputs:
            unfinished = self._requests.get(output.request_id)
            if unfinished is not None:
                unfinished.token_ids += output.token_ids
                if output.finish_reason is not None:
                    self._note_end(unfinished, output)
        self._stats = step.stats if self._before is None else step.stats.after(self._before)
        if self._trying:
            self._go_on()
        return CoreOutputs(step.outputs, self._stats)

    def _note_end(self, unfinished: Unfinished, output: EngineOutput) -> None:
        """One that was to yield a token and has is cleared; nobody learns that it was ended for
        that.
        """
        if (
            output.finish_reason == "abort"
            and output.request_id == self._suspects.on_trial
            and not unfinished.aborted
        ):
            output.finish_reason = None
            self._suspects.cleared(output.request_id)
            assert self._before is not None, "nobody is on trial in the first core"
            self._before.num_added -= 1  # the core will count it again
            self._before.num_added_tokens -= len(unfinished.request.prompt_token_ids)
        else:
            del self._requests[output.request_id]
            self._suspects.ended(output.request_id)

    def _go_on(self) -> None:
        """With whoever is next on trial; once nobody is left, with all."""
        with self._lock:
            name = self._suspects.next_on_trial()
            if name is not None:
                self._core.add([self._requests[name].again(one_token=True)])
            elif not self._suspects.any:
                self._trying = False
                self._core.add([one.again() for one in self._requests.values() if not one.aborted])

    # -- a core that hangs -------------------------------------------------------------------------

    def _replace(self) -> CoreOutputs | None:
        """Ends it, starts another, tells it what is unfinished. Returns what the old one said last,
        and the ends of those who fail.
        """
        with self._lock:
            if self._closing:
                return None
            hung = [name for name in self._core.slate.read() if name in self._requests]
            last = self._core.kill()
        outputs = [output for step in last for output in self._take(step).outputs]
        with self._lock:
            if self._closing:
                return None
            what = (
                f"a step of {len(hung)} requests"
                if len(hung) > 1
                else "a step"
                if hung
                else "the engine"
            )
            stalled = f"{what} made no progress for {self._watch.timeout_s:g} s (stall_timeout)"
            guilty = self._suspects.hung(hung or list(self._requests), in_step=bool(hung))
            outputs += self._end_aborted()
            outputs += self._fail(
                guilty, f"{stalled}; this request is given up, the engine was replaced"
            )
            self.trouble = f"{stalled}: another engine is being started"
            self._stats = self._before = self._counts_so_far()
            self._core = self._start(self._before.num_restarts)
            self._trying = True
        self._report(self.trouble)
        self._watch.rest()
        self._go_on()
        return CoreOutputs(outputs, self._before)

    def _fail(self, request_ids: Iterable[str], error: str) -> list[EngineOutput]:
        names = [name for name in request_ids if name in self._requests]
        return [
            self._end(name, EngineOutput(name, finish_reason="error", error=error))
            for name in names
        ]

    def _end_aborted(self) -> list[EngineOutput]:
        names = [name for name, unfinished in self._requests.items() if unfinished.aborted]
        return [self._end(name, EngineOutput(name, finish_reason="abort")) for name in names]

    def _end(self, request_id: str, output: EngineOutput) -> EngineOutput:
        del self._requests[request_id]
        self._suspects.ended(request_id)
        return output

    def _counts_so_far(self) -> EngineStats:
        """As if the cores until now had never been told of those who are unfinished: the next one
        will count them.
        """
        tokens = sum(
            len(unfinished.request.prompt_token_ids) for unfinished in self._requests.values()
        )
        added = {
            "num_added": self._num_sent - len(self._requests),
            "num_added_tokens": self._num_sent_tokens - tokens,
        }
        counts = {name: getattr(self._stats, name) for name in COUNTS} | added
        return EngineStats(**counts | {"num_restarts": self._stats.num_restarts + 1})
