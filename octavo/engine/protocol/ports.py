"""The protocols through which the core meets what runs its steps and keeps its blocks, without
importing it. Those of prompts are in `prompt_ports.py`, those of files in `checkpoint_ports.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from octavo.api.errors import OctavoError
from octavo.api.outputs import Profile
from octavo.engine.protocol.kv_messages import (
    BlockKey,
    BlockMove,
    BlockName,
    BlockQuery,
    ConnectorPlan,
    ConnectorReport,
    ConnectorStats,
    StreamedBlock,
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
        """Calls `tell` once, from another thread, when the executor is lost; at once where it is
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
        """Begins to time ops; raises BackendUnavailable where the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class Connector(Protocol):
    """The scheduler half of a store outside the device where KV blocks live: host memory, disk,
    another worker. Knows names, no byte.

    Every block passes through a slot of host memory. What the connector decides leaves as moves and
    as a ConnectorPlan; the outcome comes back in a ConnectorReport. `engine/kv/tier_connector.py`
    implements it.
    """

    @property
    def reaches(self) -> bool:
        """Whether the store can hold anything at all."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step is to be made for its sake, though no request runs."""
        ...

    def has(self, group: int, key: BlockKey) -> bool:
        """Returns whether the next step can load the block."""
        ...

    def can_fetch(self, group: int, key: BlockKey, source: str = "") -> bool:
        """Returns whether the block is near or can be brought near in some steps, which may fail.
        `source` is the address of an engine that computes it; "" where there is none.
        """
        ...

    def fetch(
        self, request_id: str, wanted: Iterable[tuple[int, BlockKey]], source: str = ""
    ) -> bool:
        """Prefetches blocks in this order and holds them for the request; returns False where none
        has to be waited for.
        """
        ...

    def has_fetched(self, request_id: str) -> bool: ...

    def is_waiting(self, request_id: str) -> bool: ...

    def release(self, request_id: str) -> None:
        """Lets go of the blocks held for a request, which has started or ended; one that never
        fetched is left alone.
        """
        ...

    def ask(self, query: BlockQuery, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Asks the worker half to rate the blocks that are near, or on their way; returns these."""
        ...

    def take_answer(self, request_id: str) -> Sequence[float] | None:
        """Returns the ratings that a request asked for, once; None until they are there."""
        ...

    def cancel_query(self, request_id: str) -> None:
        """Drops a request's query, whose answer is no longer wanted."""
        ...

    def rate(self, keys: Sequence[BlockKey], ratings: Sequence[float]) -> None:
        """Notes the ratings of blocks; those with higher ones stay near."""
        ...

    def may_load(self, places: Sequence[tuple[int, int]]) -> bool:
        """Returns whether this step may still load blocks at these places, (group, index), without
        keeping others waiting.
        """
        ...

    def load(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        """Returns the move that loads a block which is near."""
        ...

    def touch(self, group: int, keys: Iterable[BlockKey]) -> None:
        """Notes that blocks were found and used."""
        ...

    def offer(self, group: int, key: BlockKey) -> None:
        """Notes that the device has a full block of that name; the connector chooses whether to
        save it.
        """
        ...

    @property
    def streams(self) -> bool:
        """Whether layers of a block may leave while the step computes that fills it."""
        ...

    def stream(self, block: StreamedBlock) -> None:
        """Has the layers of a block that the coming step fills leave while it computes."""
        ...

    def complete(self, names: Iterable[BlockName]) -> None:
        """Notes that a prompt which was computed for another engine has ended: of these blocks
        those that the device has are saved, and the others never will be.
        """
        ...

    def forget(self, group: int, keys: Iterable[BlockKey]) -> None: ...

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def knows(self, name: BlockName) -> bool:
        """Returns whether the block is kept beyond the engine's life, or will be."""
        ...

    def pin(self, names: Sequence[BlockName], *, until: float, now: float) -> None:
        """Keeps blocks stored until a time, in seconds since 1970, which replaces an earlier one;
        raises InvalidRequest where they are too many.
        """
        ...

    def begin_step(self, find: Callable[[int, BlockKey], int | None]) -> list[BlockMove]:
        """Returns the moves that come before all others of the step; `find` returns the device's
        block of a name.
        """
        ...

    def end_step(self) -> ConnectorPlan | None: ...

    def step_done(self, report: ConnectorReport | None) -> None: ...

    def step_failed(self) -> None:
        """Forgets what the oldest step was to do: its moves may have been made or not."""
        ...

    def snapshot(self) -> ConnectorStats: ...


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
