"""The protocols through which the core meets what runs its steps and keeps its blocks, without
importing it. Those of prompts are in `prompt_ports.py`, those of files in `checkpoint_ports.py`.
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
    """Runs steps. The core knows only this; `worker/worker.py` implements it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carries out a plan of one step. The fault of a single row does not raise: that row's
        result carries `failure`.
        """
        ...

    @property
    def progress(self) -> int:
        """A number that changes as a step advances, read by another thread while it is computed. A
        step whose number stands still for long hangs.
        """
        ...

    def close(self) -> None: ...


class Launched(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Waits for the step and returns its result; raises what computing it raised."""
        ...


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """An executor that takes the next step before the one before has come back. Steps are computed
    in the order of their launches.
    """

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step and returns as soon as it can; rows that are `from_device` take what the
        step before draws.
        """
        ...


@runtime_checkable
class DecodingExecutor(Executor, Protocol):
    """An executor that carries out plans of several decode steps."""

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        """Carries out a plan: computes one decode step each time the iterator is advanced, each
        row's drawn token being its next one. The caller may stop after any step; the iterator ends
        by itself behind `plan.num_steps` steps, or sooner.
        """
        ...


@runtime_checkable
class Losable(Protocol):
    """An executor that may become useless by itself, at any time. `worker/ranks/ranked_worker.py`
    implements it.
    """

    def when_lost(self, tell: Callable[[OctavoError], None]) -> None:
        """Calls `tell` once, from another thread, when the executor is lost; at once if it is
        lost already.
        """
        ...


@runtime_checkable
class StepSharer(Protocol):
    """An executor whose steps other engines compute too. `worker/joined_executor.py` implements
    it.
    """

    @property
    def is_behind(self) -> bool:
        """Whether another engine has begun a step that this one has not: a plan without rows takes
        part in it.
        """
        ...

    def when_called(self, on_call: Callable[[], None]) -> None:
        """Calls `on_call`, from another thread, whenever this engine has fallen behind."""
        ...


class Profiler(Protocol):
    """Times the ops of steps. `worker/worker.py` implements it."""

    def start_profile(self) -> None:
        """Begins to time ops; raises BackendUnavailable if the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class ConnectorWorker(Protocol):
    """The worker half of a connector: the bytes in the slots, and the work behind them while steps
    compute. `worker/kv_connectors/tiers.py` implements it.
    """

    def slot(self, group: int, slot: int) -> Any:
        """Returns the bytes of one slot, `[KvLayout.block_bytes] uint8`, to be read or written."""
        ...

    def begin(self, plan: ConnectorPlan) -> None:
        """Begins the work of a plan once the moves of its step are made; returns at once."""
        ...

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        """Returns the outcome since the last report; waits at most `wait_s` seconds for the first
        thing to tell.
        """
        ...

    def close(self) -> None:
        """Ends the work behind the slots, within a little time."""
        ...
