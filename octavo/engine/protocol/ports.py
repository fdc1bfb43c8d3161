"""Protocols of what executes the core's steps and stores its blocks, so that the core need not
import it. Protocols for prompts are in `octavo/text/ports.py`, those for files in
`octavo/checkpoint/ports.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, runtime_checkable

from octavo.api.errors import OctavoError
from octavo.api.outputs import Profile
from octavo.engine.protocol.kv_messages import (
    ConnectorPlan,
    ConnectorReport,
)
from octavo.engine.protocol.step import StepPlan, StepResult


class Executor(Protocol):
    """Executes steps. `worker/worker.py` implements it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes a plan of one step. A failure of a single row is returned as its result's
        `failure`, not raised.
        """
        ...

    @property
    def progress(self) -> int:
        """Number that changes as a step advances, read by another thread during the step. If it
        does not change for long, the step hangs.
        """
        ...

    def close(self) -> None: ...


class Launched(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Waits for the step and returns its result; raises its exception."""
        ...


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """Executor to which the next step can be launched before the previous one has finished. Steps
    are computed in the order of their launches.
    """

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step and returns as soon as possible; rows that are `from_device` use the token
        that the previous step samples.
        """
        ...


@runtime_checkable
class DecodingExecutor(Executor, Protocol):
    """Executor of plans with several decode steps."""

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        """Executes a plan: computes one decode step each time the iterator is advanced, each row
        continuing with its sampled token. The caller may stop after any step; the iterator ends
        after `plan.num_steps` steps, or earlier.
        """
        ...


@runtime_checkable
class Losable(Protocol):
    """Executor that may be lost at any time, such as one with ranks in other processes.
    `worker/ranks/ranked_worker.py` implements it.
    """

    def when_lost(self, tell: Callable[[OctavoError], None]) -> None:
        """Calls `tell` once, from another thread, when the executor is lost; at once if it already
        is.
        """
        ...


@runtime_checkable
class SharedStepExecutor(Protocol):
    """Executor whose steps are computed together with other engines. `worker/joined_executor.py`
    implements it.
    """

    @property
    def is_behind(self) -> bool:
        """Whether another engine has begun a step that this one has not; a plan without rows takes
        part in it.
        """
        ...

    def when_called(self, on_call: Callable[[], None]) -> None:
        """Calls `on_call` from another thread whenever this engine is behind."""
        ...


class Profiler(Protocol):
    """Times the ops of steps. `worker/worker.py` implements it."""

    def start_profile(self) -> None:
        """Begins to time ops; raises BackendUnavailable if the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class ConnectorWorker(Protocol):
    """Worker half of a connector: the slots' bytes, and background work behind them while steps
    compute. `worker/kv_connectors/tiers.py` implements it.
    """

    def slot(self, group: int, slot: int) -> Any:
        """Returns the bytes of one slot, `[KvLayout.block_bytes] uint8`, for reading or writing."""
        ...

    def begin(self, plan: ConnectorPlan) -> None:
        """Begins the work of a plan after the moves of its step; returns at once."""
        ...

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        """Returns the outcome since the last report; waits at most `wait_s` seconds for the first
        result.
        """
        ...

    def close(self) -> None:
        """Ends the background work, within a short time."""
        ...
