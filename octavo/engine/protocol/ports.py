"""Protocols of the components that execute the core's steps and store its blocks, so that the core
does not import them. Protocols for prompts are in `octavo/text/ports.py`, for files in
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
        """Executes a plan of one step. The failure of a single row is returned as its result's
        `failure`, not raised.
        """
        ...

    @property
    def progress(self) -> int:
        """Number that changes as a step advances; read by another thread during the step. If it
        stays unchanged for long, the step hangs.
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
        """Starts a step and returns without waiting for it. Rows with `from_device` use the token
        that the previous step samples.
        """
        ...


@runtime_checkable
class DecodingExecutor(Executor, Protocol):
    """Executor of plans with several decode steps."""

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        """Executes a multi-step plan: computes one decode step each time the iterator is advanced;
        each row continues with its sampled token. The caller may stop after any step; the iterator
        ends after `plan.num_steps` steps or earlier.
        """
        ...


@runtime_checkable
class Losable(Protocol):
    """Executor that may be lost at any time, such as one with ranks in other processes.
    `worker/ranks/ranked_worker.py` implements it.
    """

    def when_lost(self, tell: Callable[[OctavoError], None]) -> None:
        """Calls `tell` once, from another thread, when the executor is lost; at once if it is lost
        already.
        """
        ...


@runtime_checkable
class SharedStepExecutor(Protocol):
    """Executor whose steps are computed together with other engines. `worker/joined_executor.py`
    implements it.
    """

    @property
    def is_behind(self) -> bool:
        """Whether another engine has begun a step that this one has not. A plan without rows takes
        part in that step.
        """
        ...

    def when_called(self, on_call: Callable[[], None]) -> None:
        """Registers `on_call`, which is called from another thread whenever this engine is
        behind.
        """
        ...


class Profiler(Protocol):
    """Measures the time of each op of a step. `worker/worker.py` implements it."""

    def start_profile(self) -> None:
        """Starts measuring ops. Raises BackendUnavailable if the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class ConnectorWorker(Protocol):
    """Worker half of a connector: the bytes of the slots, and background work behind them while
    steps compute. `worker/kv_connectors/tiers.py` implements it.
    """

    def slot(self, group: int, slot: int) -> Any:
        """Returns the bytes of one slot, `[KvLayout.block_bytes] uint8`, for reading or writing."""
        ...

    def begin(self, plan: ConnectorPlan) -> None:
        """Begins the work of a plan after the moves of its step; returns at once."""
        ...

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        """Returns the outcome since the last report, waiting at most `wait_s` seconds for it.
        Returns None if there is none.
        """
        ...

    def close(self) -> None:
        """Stops the background work within a short time."""
        ...
