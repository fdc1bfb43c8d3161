"""Loads models into their slots and unloads them, in threads.

Models are downloaded concurrently but loaded one after the other, so that each is planned with the
memory that remains. Divides the memory among engines.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import ConfigError, InsufficientMemory
from octavo.checkpoint.catalogue import resolve
from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import format_bytes
from octavo.executor.devices import default_backend
from octavo.server.state.adapters import LoraModule, ServedAdapter
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.slot import EngineSlot
from octavo.utils.progress import Report, quiet
from octavo.wiring.budget import describe_shares, share_memory
from octavo.wiring.fitting.fit import fit_to_memory
from octavo.wiring.plan import plan_model
from octavo.worker.capacity import Capacity
from octavo.worker.machine import Machine
from octavo.worker.memory import UNKNOWN_BYTES

WhenReady: TypeAlias = Callable[[EngineSlot], None]
WhenFailed: TypeAlias = Callable[[EngineSlot, Exception], None]

DRAIN_INTERVAL_S = 0.05
"""Polling interval of a draining engine, in seconds."""


@dataclass(frozen=True, slots=True)
class LoadTask:
    """A slot to load and the resolved engine options."""

    slot: EngineSlot
    loop: asyncio.AbstractEventLoop
    options: dict[str, Any] = field(default_factory=dict)

    reports_memory: bool = True
    """Whether `when_failed` is called if the model does not fit. False if other models may still be
    evicted.
    """

    @property
    def is_wanted(self) -> bool:
        return self.slot.state == "loading"

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the event loop's thread, unless the loop has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)


class ModelLoader:
    """Loads and unloads the slots of a directory."""

    def __init__(
        self,
        models: ModelDirectory,
        *,
        defaults: Mapping[str, Any] | None = None,
        memory_budget: int | None = None,
        adapters: Sequence[LoraModule] = (),
        report: Report = quiet,
        when_ready: WhenReady = lambda slot: None,
        when_failed: WhenFailed = lambda slot, error: None,
    ) -> None:
        """`when_ready` and `when_failed` are called in the event loop, once for each load."""
        self._models = models
        self.defaults = dict(defaults or {})
        """Engine options of the command line, for every model."""
        self._memory_budget = memory_budget
        self._adapters = adapters
        self._report = report
        self._when_ready = when_ready
        self._when_failed = when_failed
        self._turn = threading.Lock()
        """Lock that is held while models are planned and loaded."""
        self._unloading: set[asyncio.Task[None]] = set()

    # -- loading -----------------------------------------------------------------------------------

    def start(
        self, slots: Sequence[EngineSlot], when_done: Callable[[], None] = lambda: None
    ) -> None:
        """Loads the models of these slots in a thread and divides the free memory among them.

        `when_done` is called in the event loop when all are ready or have failed.
        """
        loop = asyncio.get_running_loop()
        tasks = [LoadTask(slot, loop, dict(slot.spec.options)) for slot in slots]
        run = partial(self._run, tasks, partial(loop.call_soon_threadsafe, when_done))
        threading.Thread(target=run, name="octavo-loader", daemon=True).start()

    async def load(self, slot: EngineSlot) -> None:
        """Loads the model of one slot; returns when it is ready or has failed.

        If it does not fit in memory, the caller must call `note_failure`.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        task = LoadTask(slot, loop, dict(slot.spec.options), reports_memory=False)
        run = partial(self._run, [task], partial(loop.call_soon_threadsafe, done.set))
        threading.Thread(target=run, name="octavo-loader", daemon=True).start()
        await done.wait()

    def note_failure(self, slot: EngineSlot) -> None:
        """Calls `when_failed` for a failed load."""
        if slot.error is not None:
            self._when_failed(slot, slot.error)

    def _run(self, tasks: list[LoadTask], done: Callable[[], object]) -> None:
        fetched = [task for task in tasks if self._attempt(task, partial(_download, task))]
        with self._turn:
            for task in self._plan_tasks([task for task in fetched if task.is_wanted]):
                if task.is_wanted:
                    self._attempt(task, partial(self._build, task))
        if not (tasks and tasks[0].loop.is_closed()):
            done()

    def _attempt(self, task: LoadTask, step: Callable[[], None]) -> bool:
        """Runs a step of a load; returns whether it succeeded."""
        try:
            step()
        except Exception as error:
            task.post(self._fail, task, error)
            return False
        return True

    def _fail(self, task: LoadTask, error: Exception) -> None:
        """Records why a model failed to load, unless it is being unloaded."""
        if not task.slot.is_draining:
            task.slot.fail(error)
            if task.reports_memory or not isinstance(error, InsufficientMemory):
                self.note_failure(task.slot)

    def _build(self, task: LoadTask) -> None:
        slot = task.slot

        def report(text: str) -> None:
            self._report(f"[{slot.name}] {text}" if len(self._models) > 1 else text)
            slot.report(text)

        build = partial(AsyncLLM.from_options, report=report, when_started=slot.set_cancel)
        try:
            llm = build(**task.options)
        except InsufficientMemory as error:
            self._fit(task, error)
            llm = build(**task.options)
        try:
            self._name_adapters(slot, llm)
        except BaseException:
            llm.close()
            raise
        gc.freeze()
        slot.fill(llm)
        if slot.is_draining:
            slot.close()
        else:
            task.post(self._begin, slot, llm)

    def _name_adapters(self, slot: EngineSlot, llm: AsyncLLM) -> None:
        """Reads the model's adapters of the command line; raises InvalidRequest if one is
        invalid.
        """
        first = next(iter(self._models), None)
        for module in self._adapters:
            if slot.name == module.base_model_name or (
                module.base_model_name is None and slot is first
            ):
                slot.adapters[module.name] = ServedAdapter.read(llm, module.name, module.path)

    def _begin(self, slot: EngineSlot, llm: AsyncLLM) -> None:
        """Starts receiving from a new engine, unless it is being unloaded."""
        if not slot.is_draining:
            llm.start()
            slot.uses.used_at = time.monotonic()
            self._when_ready(slot)

    # -- memory ------------------------------------------------------------------------------------

    def _plan_tasks(self, tasks: list[LoadTask]) -> list[LoadTask]:
        """Returns the tasks that fit, each with its part of the memory.

        A single model without a budget is not assigned a part here: it determines the free memory
        when it loads.
        """
        others = any(slot.loaded is not None for slot in self._models)
        if len(tasks) == 1 and not others and self._memory_budget is None:
            return tasks
        capacities: dict[str, Capacity] = {}
        planned = []
        free = self._free_bytes()
        for task in tasks:
            if self._attempt(task, partial(_plan, task, free, capacities)):
                planned.append(task)
        try:
            kv_bytes = share_memory(capacities, free)
        except ConfigError as error:
            for task in planned:
                task.post(self._fail, task, error)
            return []
        for task in planned:
            self._set_share(task, capacities, kv_bytes)
        if capacities:
            self._report(f"memory {format_bytes(free)}: {describe_shares(capacities, kv_bytes)}")
        return planned

    def _fit(self, task: LoadTask, error: InsufficientMemory) -> None:
        """Adds options with which a model fits into the free memory. Raises the error if it is
        not the only model, or no options help.
        """
        others = any(slot.loaded is not None for slot in self._models)
        if others or self._memory_budget is not None:
            raise error
        fit = fit_to_memory(task.options)
        if fit is None or not fit.options:
            raise error
        self._report(f"fitted to the free memory: {fit.describe()}")
        task.options.update(fit.options)

    def _set_share(
        self, task: LoadTask, capacities: Mapping[str, Capacity], kv_bytes: Mapping[str, int]
    ) -> None:
        name = task.slot.name
        if name in capacities:
            num_engines = EngineConfig.from_options(**task.options).fleet.data_parallel_size
            task.options["kv_cache_memory_bytes"] = kv_bytes[name]
            shares = _get_engine_names(task.slot.name, num_engines)
            task.slot.memory_bytes = sum(
                capacities[one].fixed_bytes + kv_bytes[one] for one in shares
            )

    def _free_bytes(self) -> int:
        """Returns the memory available for models: the rest of the budget, at most the free memory.

        KV cache that an engine has reserved but not yet written counts as used.
        """
        available = Machine().available_bytes()
        engines = [slot.loaded for slot in self._models if slot.loaded is not None]
        unwritten = sum(int(llm.info.kv_bytes * (1 - llm.stats().kv_usage)) for llm in engines)
        free = UNKNOWN_BYTES if available is None else max(0, available - unwritten)
        if self._memory_budget is None:
            return free
        used_bytes = sum(slot.memory_bytes for slot in self._models if slot.loaded is not None)
        return min(free, max(0, self._memory_budget - used_bytes))

    # -- unloading ---------------------------------------------------------------------------------

    def unload(self, slot: EngineSlot, *, timeout_s: float) -> asyncio.Task[None]:
        """Starts a task that drains a model, shuts down its engine and removes it from the
        directory.

        Requests still running after `timeout_s` seconds fail.
        """
        slot.drain(f"the model `{slot.name}` is being unloaded")
        task = asyncio.get_running_loop().create_task(self._finish(slot, timeout_s))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)
        return task

    async def _finish(self, slot: EngineSlot, timeout_s: float) -> None:
        """Shuts down a draining engine after its requests have finished."""
        llm, end = slot.loaded, time.monotonic() + timeout_s
        while llm is not None and llm.num_unfinished and time.monotonic() < end:
            await asyncio.sleep(DRAIN_INTERVAL_S)
        del llm
        await self.close(slot)
        self._models.remove(slot)

    async def close(self, slot: EngineSlot, reason: str = "") -> None:
        """Shuts down the engine of a slot and frees its memory."""
        await asyncio.to_thread(slot.close)
        slot.drop_engine()
        # The frontend's objects form reference cycles, and garbage collection is rare in a server.
        gc.unfreeze()
        await asyncio.to_thread(gc.collect)
        gc.freeze()
        self._report(f"{slot.name} was unloaded" + (f": {reason}" if reason else ""))


def _download(task: LoadTask) -> None:
    """Locates the model's files, downloading them if necessary."""
    task.options["model"] = str(resolve(task.slot.spec.model, progress=True))


def _get_engine_names(model: str, num_engines: int) -> list[str]:
    """Returns the names under which a model's engines appear in the division of memory."""
    return [model, *(f"{model} (engine {index})" for index in range(1, num_engines))]


def _plan(task: LoadTask, memory_bytes: int, capacities: dict[str, Capacity]) -> None:
    """Adds the engine's memory to `capacities`. Does nothing for the torch backend, which knows its
    memory only after loading.
    """
    config = EngineConfig.from_options(**task.options)
    if (config.backend.backend or default_backend()) != "torch":
        capacity = plan_model(config, memory_bytes=memory_bytes).capacity
        for name in _get_engine_names(task.slot.name, config.fleet.data_parallel_size):
            capacities[name] = capacity
    elif config.cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            "kv_cache_memory_bytes: required for a torch model beside other models",
            hint="set it for this model, for example to 4GiB",
        )
