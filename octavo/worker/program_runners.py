"""Runs a step's rows, each by the Program of the model that the plan names.

Owns the runners by name: of Programs that draw, of Programs that pool, and of the encoder before a
decoder. Rows of one Program are computed together, one Program after another, encoders first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.backends.base import Runnable, StreamingRunnable
from octavo.step import RowResult, ScheduledRow, WeightArrivals
from octavo.worker.encoder_runner import EncoderRunner, EncodingStep, Failures
from octavo.worker.model_runner import ModelRunner
from octavo.worker.pooling_runner import PooledStep, PoolingRunner
from octavo.worker.prepared_step import PreparedStep
from octavo.worker.stages.stage_runner import StageRunner, StageStep

TakeIn = Callable[[], list[RowResult]]

NO_FAILURES: Failures = {}


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


class StagePart(NamedTuple):
    """Rows of one of several stages, whose hidden states go on to the next."""

    runner: StageRunner
    step: StageStep

    def run(self) -> list[RowResult]:
        return self.runner.run(self.step)

    def launch(self, *, all_known: bool) -> TakeIn:
        """Runs the rows at once; the stages' plans are in flight by themselves."""
        results = self.run()
        return lambda: results


Part = DrawingPart | PoolingPart | StagePart
Runner = ModelRunner | PoolingRunner | StageRunner


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """A step's rows by Program, ready to be run or launched."""

    scheduled: Sequence[ScheduledRow]
    parts: Sequence[Part]
    encoding: EncodingStep | None = None
    """Inputs that are encoded before all parts."""

    def in_order(
        self, results: Sequence[list[RowResult]], failures: Failures = NO_FAILURES
    ) -> list[RowResult]:
        """Returns the results of all parts in the order of the step's rows; rows whose input could
        not be encoded have failed.
        """
        if len(results) == 1 and not failures:
            return results[0]
        by_id = {result.request_id: result for part in results for result in part} | failures
        return [by_id[row.request_id] for row in self.scheduled]


@dataclass(frozen=True, slots=True)
class LaunchedParts:
    """A step that the device computes, and what waits for each part's results."""

    step: PreparedParts
    take_in: Sequence[TakeIn]
    encoded: Callable[[], Failures]
    """Waits for the failures among the inputs that the step encodes."""


class ProgramRunners:
    """The runners of one model's Programs, by the Programs' names."""

    def __init__(
        self,
        runners: Mapping[str, Runner],
        encoder: EncoderRunner | None = None,
    ) -> None:
        """Takes the runner of the encoder before a decoder, where the model has one."""
        self._runners = runners
        self._encoder = encoder
        self._streaming = [each for each in self.runnables if isinstance(each, StreamingRunnable)]

    @property
    def runnables(self) -> Sequence[Runnable]:
        """The prepared Programs."""
        encoders = [] if self._encoder is None else [self._encoder.runnable]
        return [runner.runnable for runner in self._runners.values()] + encoders

    @property
    def arrivals(self) -> WeightArrivals | None:
        """Weights that the Programs have read from files so far; None where all are in memory."""
        found = [each.arrivals for each in self._streaming]
        some = [each for each in found if each is not None]
        return sum(some, start=WeightArrivals()) if some else None

    def prepare(self, scheduled: Sequence[ScheduledRow], num_steps: int = 1) -> PreparedParts:
        """Gathers the arrays of the first of `num_steps` steps; changes no row."""
        names = list(dict.fromkeys(row.program for row in scheduled))
        encoding = None if self._encoder is None else self._encoder.prepare(scheduled)
        if len(names) == 1:
            return PreparedParts(scheduled, self._parts(names[0], scheduled, num_steps), encoding)
        parts = [
            part
            for name in names
            for part in self._parts(
                name, [row for row in scheduled if row.program == name], num_steps
            )
        ]
        return PreparedParts(scheduled, parts, encoding)

    def _parts(self, name: str, scheduled: Sequence[ScheduledRow], num_steps: int) -> list[Part]:
        """Returns the rows of one Program, in several parts where its draws need that."""
        runner = self._runners[name]
        if isinstance(runner, PoolingRunner):
            return [PoolingPart(runner, runner.prepare(scheduled))]
        if isinstance(runner, StageRunner):
            return [StagePart(runner, runner.prepare(scheduled))]
        return [
            DrawingPart(runner, runner.prepare(part, num_steps))
            for part in runner.shares(scheduled)
        ]

    def join(self) -> None:
        """Computes a step of no rows, whose experts compute those of other engines."""
        for runner in self._runners.values():
            runner.join()

    def run(self, step: PreparedParts) -> list[RowResult]:
        """Computes a step; returns one result for each row, in order."""
        failures = NO_FAILURES
        if step.encoding is not None:
            assert self._encoder is not None, "it has prepared the step"
            failures = self._encoder.run(step.encoding)
        return step.in_order([part.run() for part in step.parts], failures)

    def launch(self, step: PreparedParts, *, all_known: bool = False) -> LaunchedParts:
        """Starts a step without waiting for it; `take_in` returns its results."""
        encoded: Callable[[], Failures] = lambda: NO_FAILURES  # noqa: E731
        if step.encoding is not None:
            assert self._encoder is not None, "it has prepared the step"
            encoded = self._encoder.launch(step.encoding)
        take_in = [part.launch(all_known=all_known) for part in step.parts]
        return LaunchedParts(step, take_in, encoded)

    def take_in(self, launched: LaunchedParts) -> list[RowResult]:
        """Waits for a launched step and returns what `run` would."""
        failures = launched.encoded()
        return launched.step.in_order([take_in() for take_in in launched.take_in], failures)

    def decode(self, step: PreparedParts, num_steps: int) -> Iterator[list[RowResult]] | None:
        """Returns what computes up to `num_steps` decode steps, one each time it is advanced; None
        where rows do not all draw by one Program, or are not drawn alike with every token.
        """
        (part, *others) = step.parts
        if others or step.encoding is not None or not isinstance(part, DrawingPart):
            return None
        return (
            part.runner.decode(part.step, num_steps) if part.runner.can_decode(part.step) else None
        )
