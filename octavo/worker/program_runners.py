"""The runners of one model's Programs: one that samples or pools for each row, and the encoder
before a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.engine.protocol.step import ScheduledRequest, WeightArrivals
from octavo.executor.base import Runnable, StreamingRunnable
from octavo.worker.media.encoder_runner import EncoderRunner
from octavo.worker.model_input import ModelInput, ProgramRunner


class ProgramRunners:
    """Prepares each row by the runner of the Program that the plan names."""

    def __init__(
        self, runners: Mapping[str, ProgramRunner], encoder: EncoderRunner | None = None
    ) -> None:
        self._runners = runners
        self._encoder = encoder
        streaming = [each for each in self.runnables if isinstance(each, StreamingRunnable)]
        self._streaming = [each for each in streaming if each.arrivals is not None]

    @property
    def runnables(self) -> Sequence[Runnable]:
        """The prepared Programs."""
        encoders = [] if self._encoder is None else [self._encoder.runnable]
        return [runner.runnable for runner in self._runners.values()] + encoders

    @property
    def arrivals(self) -> WeightArrivals | None:
        """Weights that the Programs have read from files so far; None if all are in memory."""
        if not self._streaming:
            return None
        found = (each.arrivals for each in self._streaming)
        return sum((each for each in found if each is not None), start=WeightArrivals())

    def prepare(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the arrays of the first of `num_steps` steps, in the order in which they are
        computed.
        """
        program = scheduled[0].program
        if all(row.program == program for row in scheduled):
            inputs = self._runners[program].prepare(scheduled, num_steps)
        else:
            inputs = [
                each
                for name in dict.fromkeys(row.program for row in scheduled)
                for each in self._runners[name].prepare(
                    [row for row in scheduled if row.program == name], num_steps
                )
            ]
        return inputs if self._encoder is None else self._encoder.prepare(scheduled) + inputs

    def join(self) -> None:
        """Computes a step without rows, whose experts compute those of other engines."""
        for runner in self._runners.values():
            runner.join()
