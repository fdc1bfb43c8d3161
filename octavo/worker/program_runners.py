"""Runs a step's rows, each by the Program of the model that the plan names.

Owns the runners by name: of Programs that draw, of Programs that pool. Rows of one Program are
computed together, one Program after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.backends.base import Runnable
from octavo.ports import Between
from octavo.step import RowResult, ScheduledRow
from octavo.worker.model_runner import DecodedRows, ModelRunner, PreparedStep
from octavo.worker.pooling_runner import PooledStep, PoolingRunner

TakeIn = Callable[[], list[RowResult]]


class DrawingPart(NamedTuple):
    """Rows of a Program that draws."""

    runner: ModelRunner
    step: PreparedStep

    def run(self) -> list[RowResult]:
        return self.runner.run(self.step)

    def launch(self, *, all_known: bool) -> TakeIn:
        launched = self.runner.launch(self.step, all_known=all_known)
        return lambda: self.runner.take_in(launched)


class PoolingPart(NamedTuple):
    """Rows of a Program that pools."""

    runner: PoolingRunner
    step: PooledStep

    def run(self) -> list[RowResult]:
        return self.runner.run(self.step)

    def launch(self, *, all_known: bool) -> TakeIn:
        return self.runner.launch(self.step)


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """A step's rows by Program, ready to be run or launched."""

    scheduled: Sequence[ScheduledRow]
    parts: Sequence[DrawingPart | PoolingPart]

    def in_order(self, results: Sequence[list[RowResult]]) -> list[RowResult]:
        """Returns the results of all parts in the order of the step's rows."""
        if len(results) == 1:
            return results[0]
        by_id = {result.request_id: result for part in results for result in part}
        return [by_id[row.request_id] for row in self.scheduled]


@dataclass(frozen=True, slots=True)
class LaunchedParts:
    """A step that the device computes, and what waits for each part's results."""

    step: PreparedParts
    take_in: Sequence[TakeIn]


class ProgramRunners:
    """The runners of one model's Programs, by the Programs' names."""

    def __init__(self, runners: Mapping[str, ModelRunner | PoolingRunner]) -> None:
        self._runners = runners

    @property
    def runnables(self) -> Sequence[Runnable]:
        """The prepared Programs."""
        return [runner.runnable for runner in self._runners.values()]

    def prepare(self, scheduled: Sequence[ScheduledRow], num_steps: int = 1) -> PreparedParts:
        """Gathers the arrays of the first of `num_steps` steps; changes no row."""
        names = list(dict.fromkeys(row.program for row in scheduled))
        if len(names) == 1:
            return PreparedParts(scheduled, [self._part(names[0], scheduled, num_steps)])
        parts = [
            self._part(name, [row for row in scheduled if row.program == name], num_steps)
            for name in names
        ]
        return PreparedParts(scheduled, parts)

    def _part(
        self, name: str, scheduled: Sequence[ScheduledRow], num_steps: int
    ) -> DrawingPart | PoolingPart:
        runner = self._runners[name]
        if isinstance(runner, PoolingRunner):
            return PoolingPart(runner, runner.prepare(scheduled))
        return DrawingPart(runner, runner.prepare(scheduled, num_steps))

    def run(self, step: PreparedParts) -> list[RowResult]:
        """Computes a step; returns one result for each row, in order."""
        return step.in_order([part.run() for part in step.parts])

    def launch(self, step: PreparedParts, *, all_known: bool = False) -> LaunchedParts:
        """Starts a step without waiting for it; `take_in` returns its results."""
        return LaunchedParts(step, [part.launch(all_known=all_known) for part in step.parts])

    def take_in(self, launched: LaunchedParts) -> list[RowResult]:
        """Waits for a launched step and returns what `run` would."""
        return launched.step.in_order([take_in() for take_in in launched.take_in])

    def decode(
        self, step: PreparedParts, num_steps: int, between: Between | None
    ) -> DecodedRows | None:
        """Computes up to `num_steps` decode steps in one call; returns None, with nothing done,
        where rows do not all draw by one Program, or are not drawn alike with every token.
        """
        (part, *others) = step.parts
        if others or isinstance(part, PoolingPart) or not part.runner.can_decode(part.step):
            return None
        return part.runner.decode(part.step, num_steps, between)
