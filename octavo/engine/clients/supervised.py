"""Replaces a core process that hangs or dies. Only the request that caused the failure fails; all
others continue.

Records the output of every unfinished request, so that a new core can resume it. A native call that
hangs cannot be interrupted within its process, so the whole process is killed. Sampling depends
only on the request, so the new core continues with the same tokens, bit for bit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.api.errors import OctavoError, PeerEngineDead
from octavo.api.outputs import FinishReason
from octavo.engine.clients.client import EngineInfo
from octavo.engine.clients.ledger import RequestLedger, UnfinishedRequest
from octavo.engine.clients.messages import encode_requests
from octavo.engine.clients.process import ProcessClient
from octavo.engine.clients.suspects import Suspects
from octavo.engine.clients.watchdog import RestartBackoff, Watchdog
from octavo.engine.protocol.block_events import BlocksCleared
from octavo.engine.protocol.outputs import CoreOutputs, EngineOutput
from octavo.engine.protocol.requests import EngineRequest, Query, QueryAnswer, RequestChange
from octavo.engine.protocol.stats import EngineStats
from octavo.utils.progress import Report

StartCore = Callable[[int, Mapping[str, Any]], ProcessClient]
"""Starts a core, given the number of cores before it and the options changed since the first."""

MAX_FAILED_STARTS = 3
"""Number of consecutive cores that may die while loading before the waiting requests fail."""
RECOVERY_INTERVAL_S = 0.25
"""Interval at which a new core is checked for being ready, in seconds."""


@dataclass(frozen=True, slots=True)
class CoreFailure:
    """Unexpected end of a core process."""

    reason: str
    hung: bool = False
    was_ready: bool = True
    is_intended: bool = False
    """Whether `stop` or `restart` ended it; then no request is a suspect."""
    by_peer: bool = False
    """Whether the reason was that another engine ended; then no request of this core is a suspect.
    """
    step_requests: list[str] = field(default_factory=list)
    """Unfinished requests of the step that was running."""


class SupervisedClient:
    """An EngineClient over a core process, which it replaces as often as needed.

    Call `wait_until_ready` before the first request; it raises the error if the first core cannot
    start.
    """

    info: EngineInfo

    def __init__(
        self,
        start: StartCore,
        *,
        stall_timeout_s: float,
        report: Report,
        shares_steps: bool = False,
    ) -> None:
        """`report` is called for every replacement. With `stall_timeout_s` 0, hangs are not
        detected. `shares_steps`: this core waits for other cores in each step, so it may stall
        because another one hangs.
        """
        self._shares_steps = shares_steps
        self.trouble = ""
        self._start = start
        self._report = report
        self._changes: Mapping[str, Any] = {}
        self._core = start(0, self._changes)
        self._watchdog = Watchdog(stall_timeout_s)
        self._backoff = RestartBackoff()
        self._suspects = Suspects()
        self._ledger = RequestLedger()
        self._lock = threading.Lock()
        """Held while a command is sent to the core, and while the core is replaced."""
        self._closing = False
        self._wake = threading.Event()
        """Set to interrupt the wait for the next start."""
        self._restart_at: float | None = None
        """Time of the next start on the monotonic clock while there is no core; otherwise None."""
        self._trying = False
        """Whether only the request on trial is sent to the core."""
        self._watch_period_s = 0.0
        self._is_held = False
        self._is_stopped = False
        self._is_ending = False
        """Whether the core is being ended on purpose."""
        self._stats = EngineStats()
        self._before: EngineStats | None = None
        """Total counts of all earlier cores."""

    @property
    def pid(self) -> int:
        return self._core.pid

    def wait_until_ready(self, report: Report) -> EngineInfo:
        """Forwards the first core's loading progress, and returns when it is ready."""
        self.info = self._core.wait_until_ready(report)
        self._backoff.note_ready(time.monotonic())
        return self.info

    def add(self, requests: list[EngineRequest]) -> None:
        encoded = encode_requests(requests)  # a request that cannot be sent must not be registered
        with self._lock:
            self._ledger.add(requests)
            if not self._trying:
                self._core.add_encoded(encoded)

    def abort(self, request_ids: list[str]) -> None:
        """Aborts requests. One that has not been resumed by the new core yet is sent to it first,
        then aborted there.
        """
        with self._lock:
            for request_id in request_ids:
                # The receiving thread may end a request at any moment.
                request = self._ledger.unfinished.get(request_id)
                if request is None or request.aborted:
                    continue
                request.aborted = True
                if self._is_unknown_to_core(request_id):
                    self._core.add([request.resumed()])
            if self._restart_at is None:
                self._core.abort(request_ids)
        self._wake.set()

    def change(self, changes: list[RequestChange]) -> None:
        """Changes requests. One that has not been resumed by the new core yet is sent with the
        change.
        """
        with self._lock:
            self._ledger.change(changes)
            if self._restart_at is None:
                self._core.change(changes)

    def watch(self, period_s: float) -> None:
        with self._lock:
            self._watch_period_s = period_s
            if self._restart_at is None:
                self._core.watch(period_s)

    def hold(self, *, holds: bool) -> None:
        with self._lock:
            self._is_held = holds
            if self._restart_at is None:
                self._core.hold(holds=holds)

    def stop(self) -> None:
        """Ends the core, which frees its memory. Requests wait until `restart` starts the next
        one.
        """
        with self._lock:
            self._is_stopped = True
            self._end_core("the engine sleeps", math.inf)

    def restart(self, changes: Mapping[str, Any]) -> None:
        """Replaces the core by one with other values of the options in `changes`, on which the
        unfinished requests continue. The first `receive` after it starts the new core.
        """
        with self._lock:
            self._is_stopped = False
            self._changes = {**self._changes, **changes}
            self._backoff.num_failed_starts = 0
            self._end_core("the engine restarts", time.monotonic())
        self._wake.set()

    def _end_core(self, why: str, restart_at: float) -> None:
        """Ends the core, if there is one, and sets the time of the next start. The caller holds the
        lock.
        """
        self.trouble = why
        if self._restart_at is None:
            self._is_ending = True
            self._core.end()
        else:
            self._restart_at = restart_at

    @property
    def num_failed_starts(self) -> int:
        """Number of cores in a row that died before they were ready."""
        return self._backoff.num_failed_starts

    @property
    def is_restarting(self) -> bool:
        return bool(self.trouble)

    def receive(self, timeout_s: float | None = None) -> CoreOutputs | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closing:
            interval_s = RECOVERY_INTERVAL_S if self.trouble else self._watchdog.interval_s
            if end is not None:
                interval_s = max(0.0, min(interval_s, end - time.monotonic()))
            outputs = self._receive_once(interval_s)
            if outputs is not None:
                return outputs
            if end is not None and time.monotonic() >= end:
                return None
        return None

    def query(self, query: Query) -> QueryAnswer:
        return self._core.query(query)

    def release_unfinished(self) -> list[EngineRequest]:
        """Removes and returns the unfinished requests that another client may compute.

        Returns [] unless the core is being replaced. Suspects are not returned, unless the core
        failed to start, which no request can have caused.
        """
        with self._lock:
            if not self._trying:
                return []
            is_hopeless = self._restart_at is not None and self._backoff.num_failed_starts > 0
            names = [
                name
                for name, one in self._ledger.unfinished.items()
                if not one.aborted and (is_hopeless or not self._suspects.has(name))
            ]
            for name in names:
                self._suspects.ended(name)
            return [self._ledger.give_up(name) for name in names]

    def stop_replacing(self) -> None:
        """Makes the end of the core final: it is not replaced any more."""
        with self._lock:
            self._closing = True
        self._wake.set()

    def close(self) -> None:
        self.stop_replacing()
        self._core.close()

    # -- a running core ----------------------------------------------------------------------------

    def _receive_once(self, timeout_s: float) -> CoreOutputs | None:
        """Returns the next outputs; None after a timeout."""
        if self._restart_at is not None:
            return self._await_restart(timeout_s)
        try:
            step = self._core.receive(timeout_s)
        except OctavoError as error:
            self._note_recovery()
            by_peer = isinstance(error, PeerEngineDead)
            return self._replace(error.message, hung=False, by_peer=by_peer)
        self._note_recovery()
        if step is not None:
            return self._take(step)
        if self._hangs():
            return self._replace(self._describe_hang(), hung=True)
        return None

    def _note_recovery(self) -> None:
        """Reports that a new core is ready, even if it died immediately afterwards."""
        if self.trouble and self._core.is_ready and not self._is_ending:
            self.trouble = ""
            self._backoff.note_ready(time.monotonic())
            self._report("the engine is ready again")

    def _hangs(self) -> bool:
        """Returns whether a core with work has stalled. A loading core has no time limit."""
        if self._core.is_ready and self._ledger.unfinished and not self._is_held:
            return self._watchdog.has_stalled(self._core.heartbeat.beats, time.monotonic())
        self._watchdog.reset()
        return False

    def _take(self, step: CoreOutputs) -> CoreOutputs:
        """Records the outputs of a step, and continues the trials of suspects."""
        for output in step.outputs:
            request = self._ledger.unfinished.get(output.request_id)
            if request is not None:
                request.add_output(output)
                if output.finish_reason is not None:
                    self._note_end(request, output)
        self._stats = step.stats if self._before is None else step.stats.after(self._before)
        if self._trying:
            self._send_next()
        return msgspec.structs.replace(step, stats=self._stats)

    def _note_end(self, request: UnfinishedRequest, output: EngineOutput) -> None:
        """Removes a finished request. If it was on trial, it is no longer a suspect and resumes.

        A request on trial ends with "abort" after one token; the frontend does not see this.
        """
        if (
            output.finish_reason == "abort"
            and output.request_id == self._suspects.on_trial
            and not request.aborted
        ):
            output.finish_reason = None
            self._suspects.cleared(output.request_id)
            assert self._before is not None, "there are no trials in the first core"
            self._before.num_added -= 1  # the core counts it again when it resumes
            self._before.num_added_tokens -= len(request.request.prompt_token_ids)
        else:
            del self._ledger.unfinished[output.request_id]
            self._suspects.ended(output.request_id)

    def _send_next(self) -> None:
        """Sends the next suspect to the core, or all unfinished requests if there is no suspect."""
        with self._lock:
            unfinished = self._ledger.unfinished
            name = self._suspects.next_on_trial()
            if name is not None:
                self._core.add([unfinished[name].resumed(one_token=True)])
            elif not self._suspects.any:
                self._trying = False
                self._core.add([one.resumed() for one in unfinished.values() if not one.aborted])

    def _is_unknown_to_core(self, request_id: str) -> bool:
        return self._trying and self._restart_at is None and request_id != self._suspects.on_trial

    # -- a core that hangs or has died -------------------------------------------------------------

    def _replace(self, reason: str, *, hung: bool, by_peer: bool = False) -> CoreOutputs | None:
        """Ends the core; returns its last outputs, and the final outputs of the requests that fail.
        Returns None if the client is closing.

        The next `receive` starts another core after the delay.
        """
        with self._lock:
            if self._closing:
                return None
            in_step = self._core.heartbeat.step_requests()
            last = self._core.kill()
        outputs = [output for step in last for output in self._take(step).outputs]
        was_ready = self._core.is_ready or bool(in_step)
        if not self._core.is_ready and in_step:
            # It died in its first step, before its CoreReady message was sent.
            self._backoff.note_ready(time.monotonic())
        failure = CoreFailure(
            reason,
            hung,
            was_ready,
            is_intended=self._is_ending,
            by_peer=by_peer,
            step_requests=self._ledger.known(in_step),
        )
        return self._recover(failure, outputs)

    def _recover(self, failure: CoreFailure, outputs: list[EngineOutput]) -> CoreOutputs | None:
        """Fails the requests that caused the failure, adds their final outputs to `outputs`, and
        schedules the next start. Returns None if the client is closing.
        """
        with self._lock:
            if self._closing:
                return None
            now = time.monotonic()
            self._is_ending = False
            if failure.is_intended:
                self._backoff.note_intended_end()
                delay_s = math.inf if self._is_stopped else 0.0
            else:
                delay_s = 0.0 if failure.hung else self._backoff.delay_s(now)
            # Aborted requests count as suspects too: one of them may have caused the failure.
            guilty = self._find_guilty(failure)
            outputs += self._end(self._ledger.aborted(), "abort")
            given_up = f"{failure.reason}; this request is aborted; the engine was restarted"
            outputs += self._end(guilty, "error", given_up)
            wait = f" in {delay_s:g} s" if delay_s else ""
            if not failure.is_intended:
                self.trouble = f"{failure.reason}: restarting the engine{wait}"
            self._stats = self._before = self._ledger.counts(self._stats)
            self._before.num_restarts += 1
            self._trying = True
            self._restart_at = now + delay_s
        self._report(self.trouble)
        self._watchdog.reset()
        return CoreOutputs(outputs, self._before, block_events=[BlocksCleared()])

    def _describe_hang(self) -> str:
        num_requests = len(self._ledger.known(self._core.heartbeat.step_requests()))
        what = "the engine"
        if num_requests:
            what = "a step" if num_requests == 1 else f"a step of {num_requests} requests"
        return f"{what} made no progress for {self._watchdog.timeout_s:g} s (stall_timeout)"

    def _find_guilty(self, failure: CoreFailure) -> list[str]:
        """Returns the requests to fail because a core ended.

        A core that died may have been killed from outside, so a request that was computed alone
        gets a second trial after a death, but not after a hang. While a core loads, no request can
        have caused its death; after MAX_FAILED_STARTS such deaths all requests fail, so that none
        waits forever.
        """
        unfinished = list(self._ledger.unfinished)
        if failure.was_ready and not (failure.by_peer or failure.is_intended):
            certain = failure.hung and bool(failure.step_requests) and not self._shares_steps
            return self._suspects.accuse(failure.step_requests or unfinished, certain=certain)
        self._suspects.postpone()
        return unfinished if self._backoff.num_failed_starts >= MAX_FAILED_STARTS else []

    def _end(
        self, request_ids: Iterable[str], finish_reason: FinishReason, error: str | None = None
    ) -> list[EngineOutput]:
        """Ends requests without a core; returns their final outputs."""
        known = self._ledger.known(request_ids)
        for name in known:
            del self._ledger.unfinished[name]
            self._suspects.ended(name)
        return [EngineOutput(name, finish_reason=finish_reason, error=error) for name in known]

    def _await_restart(self, timeout_s: float) -> CoreOutputs | None:
        """Starts the next core after the delay. Until then, ends aborted requests. Returns their
        outputs, or None if there are none.
        """
        assert self._restart_at is not None and self._before is not None
        with self._lock:
            if ended := self._end(self._ledger.aborted(), "abort"):
                self._stats = self._before = self._ledger.counts(self._before)
                return CoreOutputs(ended, self._stats)
            left_s = self._restart_at - time.monotonic()
            failure = self._start_next(self._before.num_restarts) if left_s <= 0 else None
        if failure is not None:
            return self._recover(failure, [])
        if left_s <= 0:
            self._send_next()
        else:
            self._wake.wait(min(left_s, timeout_s))
            self._wake.clear()
        return None

    def _start_next(self, num_before: int) -> CoreFailure | None:
        """Starts a core; the caller holds the lock. Returns the failure if the process could not be
        created, else None.
        """
        if not self._closing:
            try:
                self._core = self._start(num_before, self._changes)
            except OSError as error:
                return CoreFailure(f"no process can be started: {error}", was_ready=False)
            self._restart_at = None
            if self._watch_period_s:
                self._core.watch(self._watch_period_s)
            if self._is_held:
                self._core.hold(holds=True)
        return None
