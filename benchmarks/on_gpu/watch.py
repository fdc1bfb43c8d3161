"""The time that an engine's steps take: marks on the device around every launch of its Program, and
how long the host waits for results.

Between two steps the device idles from the mark behind the first one's work to the mark before the
second one's; a launch that comes in time puts its mark where the work before has just ended. A
`Look` profiles some steps with PyTorch's profiler.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from benchmarks.on_gpu.timing import Mark
from octavo import LLM
from octavo.executor.base import Computing
from octavo.executor.batch import StepBatch, StepOutput
from octavo.executor.kv import KvCache
from octavo.executor.torch.program import TorchProgram


@dataclass
class Step:
    """One step of an engine."""

    requests: int
    tokens: int
    keys: int
    """Number of keys of all contexts, this step's own included."""
    launched_at: float
    began: Mark
    ended: Mark
    waited_s: float = 0.0
    """Seconds that the host waited for the step's results."""

    @property
    def is_decode(self) -> bool:
        return self.requests == self.tokens


@dataclass(frozen=True)
class Waited:
    """A step whose results the host waits for, timed by the clock."""

    inner: Computing
    step: Step

    def result(self) -> StepOutput:
        began = time.perf_counter()
        output = self.inner.result()
        self.step.waited_s = time.perf_counter() - began
        return output


class Watch:
    """Watches every step that a Program is given from now on."""

    def __init__(self, program: TorchProgram, device: torch.device) -> None:
        self.steps: list[Step] = []
        self._device = device
        self._look: Look | None = None
        self._launch: Callable[[StepBatch, KvCache], Computing] = program.launch
        program.launch = self.launch  # type: ignore[method-assign, assignment]

    def launch(self, batch: StepBatch, kv: KvCache) -> Computing:
        if self._look is not None:
            self._look.before(batch)
        at, began = time.perf_counter(), Mark(self._device)
        computing = self._launch(batch, kv)
        sizes = len(batch.query_starts) - 1, len(batch.token_ids), int(batch.context_lens[0].sum())
        step = Step(*sizes, at, began, Mark(self._device))
        self.steps.append(step)
        return Waited(computing, step)

    def taken(self, work: Callable[[], object], look: Look | None = None) -> list[Step]:
        """Returns the steps that some work takes."""
        first, self._look = len(self.steps), look
        work()
        self._look = None
        return self.steps[first:]


def program_of(llm: LLM) -> TorchProgram:
    """Returns the Program of an engine whose core is in this process."""
    found = llm.frontend.profiler._runners.runnables[0]  # type: ignore[union-attr]
    assert isinstance(found, TorchProgram)
    return found


@dataclass(frozen=True)
class Steady:
    """Consecutive decode steps of a constant number of requests; the first ones, which still see
    the effects of the prompts, are left out.
    """

    steps: Sequence[Step]

    @staticmethod
    def of(steps: Sequence[Step], requests: int, most: int, *, skip: int = 4) -> Steady:
        found = [step for step in steps if step.is_decode and step.requests == requests][
            skip : skip + most
        ]
        if len(found) < 2:
            raise RuntimeError(f"{len(found)} steady steps of {requests} requests, expected 2")
        return Steady(found)

    @property
    def step_s(self) -> float:
        """Median time of the device from one step's end to the next, in seconds."""
        return statistics.median(
            before.ended.until(after.ended) for before, after in pairwise(self.steps)
        )

    @property
    def busy(self) -> float:
        """Share of the time in which the device had a step to compute."""
        whole = self.steps[0].ended.until(self.steps[-1].ended)
        idle = sum(
            max(0.0, before.ended.until(after.began)) for before, after in pairwise(self.steps)
        )
        return 1.0 - idle / whole

    @property
    def host_s(self) -> float:
        """Median time of a step in which the host did not wait for the device, in seconds."""
        found = [
            (after.launched_at - before.launched_at) - before.waited_s
            for before, after in pairwise(self.steps)
        ]
        return statistics.median(found)

    @property
    def keys(self) -> float:
        """Mean number of keys in a step."""
        return statistics.mean(step.keys for step in self.steps)


@dataclass
class Look:
    """A profile of `count` steps of a given number of requests, after the first `skip` of them."""

    requests: int
    skip: int
    count: int = 8
    _seen: int = 0
    _profiler: Any = field(default_factory=lambda: torch.profiler.profile(activities=[_activity()]))

    def before(self, batch: StepBatch) -> None:
        """Notes a step before it is launched, and starts or stops the profiler."""
        self._seen += len(batch.query_starts) - 1 == self.requests
        if self._seen == self.skip + 1 and self.count:
            self._profiler.start()
        elif self._seen > self.skip + self.count and self.count:
            self.count = 0
            self._profiler.stop()

    def found(self, most: int = 14) -> dict[str, Any]:
        """Returns the share of the time in which kernels ran, and the kernels that took most, by
        name.
        """
        if self.count:
            self._profiler.stop()
        spans = []
        seconds = Counter[str]()
        calls = Counter[str]()
        for event in self._profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA or not torch.cuda.is_available():
                spans.append((event.time_range.start, event.time_range.end))
                seconds[event.name] += event.time_range.elapsed_us() / 1e6
                calls[event.name] += 1
        kernels = [
            {"name": name[:100], "ms": round(1e3 * s, 3), "calls": calls[name]}
            for name, s in seconds.most_common(most)
        ]
        return {"busy": round(busy_share(spans), 4), "kernels": kernels}


def _activity() -> Any:
    return (
        torch.profiler.ProfilerActivity.CUDA
        if torch.cuda.is_available()
        else torch.profiler.ProfilerActivity.CPU
    )


def busy_share(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the share of the time from the first beginning to the last end that lies in
    any span.
    """
    if not spans:
        return 0.0
    ordered = sorted(spans)
    covered, end = 0.0, ordered[0][0]
    for start, stop in ordered:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered / ((end - ordered[0][0]) or 1.0)
